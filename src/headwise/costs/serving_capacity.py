"""Capacity of serving: whether requests fit into memory, and what would make them fit.

`MemoryDemand` sums weights, cache and activations; `check_memory_fit` finds remedies.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, NamedTuple

from ..errors import SpecError, pluralise, suggest
from ..masking.patterns import Causal, Window
from ..spec.attention_spec import AttentionSpec
from ..translation.terminal_text import pad, wrap
from .flops import CostTerm
from .kv_cache_memory import (
    ALLOCATION_POLICIES,
    CacheAllocator,
    RequestBatch,
    list_cache_terms,
    live_numbers,
    map_attention_specs,
)
from .roofline import dtype_bytes, format_gigabytes
from .serving_cost import ServingCost, first_where
from .weight_storage import DTYPE_BYTES
from .workload import MAX_SIZE, max_lengths

BYTE_UNITS = {"b": 1} | {f"{p}b": 1000**n for n, p in enumerate("kmgt", 1)}
BYTE_UNITS |= {f"{p}ib": 1024**n for n, p in enumerate("kmgt", 1)}


@dataclass(frozen=True)
class MemoryDemand:
    """The memory that requests need, if prompts are prefilled in chunks of `chunk` tokens.

    Several devices divide weights and cache.

    A positive `training_bytes_per_parameter` describes training instead of serving: the bytes of a
    weight with its gradient and optimiser state, such as 16 (1910.02054), 18 with gradients in
    float32 (Megatron-LM), or 20 with gradients in both formats (zhihu 624740065). Activations are
    checkpointed: the inputs of layers are saved and everything else is recomputed. Several devices
    then divide the state and the rows.
    """

    serving: ServingCost
    requests: RequestBatch = field(default_factory=RequestBatch)
    chunk: int = 2048
    training_bytes_per_parameter: int = 0
    num_devices: int = 1

    def __post_init__(self) -> None:
        for name, least in (("chunk", 1), ("training_bytes_per_parameter", 0), ("num_devices", 1)):
            size = getattr(self, name)
            if type(size) is not int or not least <= size <= MAX_SIZE:
                raise SpecError(f"{name} must be a whole number of at least {least}, got {size!r}")
        if (
            0
            < self.training_bytes_per_parameter
            < (least := dtype_bytes(self.serving.formats.compute))
        ):
            fact = (
                f"training_bytes_per_parameter={self.training_bytes_per_parameter} is less "
                f"than the {least} of a weight"
            )
            raise SpecError(f"{fact}; use 16, 18 or 20, for example")

    @property
    def terms(self) -> tuple[CostTerm, ...]:
        """Everything in memory: first what several devices divide, then what each of them needs."""
        return (*self._sharded_terms(), *self._activation_terms())

    @property
    def bytes_per_device(self) -> int:
        """Lower bound of the bytes on one device."""
        sharded = -(-sum(term.value for term in self._sharded_terms()) // self.num_devices)
        activations = sum(term.value for term in self._activation_terms())
        if self.training_bytes_per_parameter:
            num_rows = self.requests.num_requests
            rows_per_device = -(-num_rows // self.num_devices)
            activations = -(-activations * rows_per_device // num_rows)
        return sharded + activations

    @property
    def fits(self) -> bool:
        """Whether the device's memory is large enough."""
        return self.bytes_per_device <= self.serving.device.memory

    def with_uniform_requests(self, count: int, length: int) -> MemoryDemand:
        """Return the demand with `count` requests of one length."""
        shared_prefix = min(self.requests.shared_prefix, length)
        requests = RequestBatch.uniform(count, length, shared_prefix, self.requests.source_tokens)
        return replace(self, requests=requests)

    @property
    def cache_terms(self) -> tuple[CostTerm, ...]:
        """KV cache by kind of layer; empty in training."""
        serving = self.serving
        if self.training_bytes_per_parameter:
            return ()
        terms = list_cache_terms(
            serving.attentions, self.requests, serving.allocator, serving.formats
        )
        return tuple(
            term._replace(name=serving.operation_title("cache", layers))
            for layers, term in zip(serving.attentions, terms, strict=True)
        )

    def _sharded_terms(self) -> Iterator[CostTerm]:
        serving = self.serving
        if self.training_bytes_per_parameter:
            count = serving.weights.num_parameters
            text = f"{count:,} parameters x {self.training_bytes_per_parameter} bytes"
            yield CostTerm(
                "weights, gradients, optimiser", text, count * self.training_bytes_per_parameter
            )
            return
        storage = serving.storage
        size = (
            f"x {DTYPE_BYTES[storage.dtype]} bytes"
            if storage.quantization is None
            else f"in {storage.describe()}"
        )
        yield CostTerm(
            "weights",
            f"{serving.weights.num_parameters:,} parameters {size}",
            serving.weights.bytes,
        )
        yield from self.cache_terms

    @property
    def _step_tokens(self) -> int:
        """Tokens of one step: all in training; in serving, one chunk of a prompt and one token per
        other request.
        """
        if self.training_bytes_per_parameter:
            return sum(length * times for length, times in self.requests.counts_by_length)
        longest = max(length for length, _ in self.requests.counts_by_length)
        return min(self.chunk, longest) + self.requests.num_requests - 1

    def _activation_terms(self) -> Iterator[CostTerm]:
        """Yield the hidden states between layers, and the largest activations inside a layer.

        This is a lower bound; kernels may need more.
        """
        serving, tokens = self.serving, self._step_tokens
        hidden_states = self._tensor_term(
            "hidden states between layers", tokens, serving.model_width
        )
        if self.training_bytes_per_parameter:
            num_layers = sum(
                group.num_layers for group in serving.attentions if group.name != "cross"
            )
            text = f"{pluralise(num_layers, 'layer')} x {hidden_states.formula}"
            yield CostTerm("saved inputs of layers", text, num_layers * hidden_states.value)
        yield hidden_states
        inside_layers = [
            self._tensor_term(f"inside {group.name}", tokens, live_numbers(group.spec))
            for group in serving.attentions
        ]
        scored_tokens = tokens if self.training_bytes_per_parameter else self.requests.num_requests
        for group in serving.matrices:
            count = scored_tokens if group.name == "head" else tokens
            inside_layers.append(
                self._tensor_term(f"inside {group.name}", count, group.hidden_numbers)
            )
        yield max(inside_layers, key=lambda term: term.value)

    def _tensor_term(self, name: str, tokens: int, width: int) -> CostTerm:
        number_bytes = dtype_bytes(self.serving.formats.compute)
        text = f"{tokens:,} tokens x {width:,} values x {number_bytes} bytes"
        return CostTerm(name, text, tokens * width * number_bytes)


def max_context(demand: MemoryDemand) -> int | None:
    """Return the greatest length that all requests can have together; None if memory and positions
    set no limit.

    Layers with Llama-3-8B's attention in eight billion bytes; in a decode step only the cache grows
    with the context:

    >>> import headwise as hw
    >>> from headwise.costs.roofline import Device
    >>> device = replace(Device.from_name("h200"), memory=8e9)
    >>> serving = ServingCost(
    ...     hw.design(preset="gqa", model=4096, heads=32, kv=8), device, num_layers=32
    ... )
    >>> weights, activations = 2 * 32 * 41943040, 2 * (4096 + 14336)
    >>> max_context(MemoryDemand(serving, chunk=1)), (8 * 10**9 - weights - activations) // 131072
    (40554, 40554)
    """
    max_length = _max_size(
        lambda length: demand.with_uniform_requests(demand.requests.num_requests, length),
        "a context of one token",
        demand,
    )
    max_positions = max_lengths(demand.serving.spec_or_model).own  # the limit of learned positions
    return max_positions if max_length is None else min(max_length, max_positions or max_length)


def max_requests(demand: MemoryDemand) -> int | None:
    """Return how many requests, as long as the longest, fit at once; None if there is no limit."""
    length = max(length for length, _ in demand.requests.counts_by_length)
    return _max_size(
        lambda count: demand.with_uniform_requests(count, length),
        f"one row of {length:,} tokens",
        demand,
    )


def last_where(fits: Callable[[int], bool], limit: int = MAX_SIZE) -> int:
    """Return the greatest number from 1 to `limit` for which a decreasing condition holds; 0 if
    there is none.

    >>> (
    ...     last_where(lambda n: n * n <= 50),
    ...     last_where(lambda n: False),
    ...     last_where(lambda n: True, limit=7),
    ... )
    (7, 0, 7)
    """
    first_failure = first_where(lambda n: n > limit or not fits(n))
    return MAX_SIZE if first_failure is None else first_failure - 1


def _max_size(
    with_size: Callable[[int], MemoryDemand], minimum: str, demand: MemoryDemand
) -> int | None:
    size = last_where(lambda size: with_size(size).fits)
    if not size:
        needed, memory = with_size(1).bytes_per_device, int(demand.serving.device.memory)
        fact = f"{minimum} takes {format_gigabytes(needed)} with weights and activations"
        remedy = f"give {format_gigabytes(needed)} or more, or use several devices"
        raise SpecError(f"{fact}, and memory is {format_gigabytes(memory)}; {remedy}")
    return None if size >= MAX_SIZE else size


def parse_bytes(text: str) -> int:
    """Parse a number of bytes such as "80 GB" or "5.38 GiB".

    >>> parse_bytes("80 GB"), parse_bytes("1.5GiB")
    (80000000000, 1610612736)
    """
    match = re.fullmatch(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([A-Za-z]*)\s*", text)
    if not match:
        raise SpecError(
            f"cannot read {text!r} as a number of bytes; write it as in '80 GB' or '5.38 GiB'"
        )
    number, suffix = match.groups()
    unit = suffix.lower() or "b"
    if unit not in BYTE_UNITS:
        raise SpecError(f"{text!r} has the unknown unit {suffix!r}; {suggest(unit, BYTE_UNITS)}")
    count = int(Fraction(number) * BYTE_UNITS[unit])
    if not 1 <= count <= MAX_SIZE:
        raise SpecError(f"memory must be from 1 to {MAX_SIZE} bytes, got {text!r}")
    return count


# --- Whether a demand fits, and remedies if it does not -------------------------------------------

MAX_DEVICES = 2**16  # remedies with more devices are not suggested
PAGE_SIZE = 16
VERDICT_WIDTH = 80


class MemoryRemedy(NamedTuple):
    """A single change that makes a demand fit: its description, and the changed demand."""

    name: str
    demand: MemoryDemand


@dataclass(frozen=True)
class MemoryFit:
    """Whether a demand fits on its device, and single changes that would make it fit."""

    demand: MemoryDemand
    remedies: tuple[MemoryRemedy, ...]

    @property
    def fits(self) -> bool:
        """Whether the demand fits on its device."""
        return self.demand.fits

    def __str__(self) -> str:
        demand = self.demand
        device, num_devices = demand.serving.device, demand.num_devices
        description = (
            device.description if num_devices == 1 else f"{num_devices:,} x {device.description}"
        )
        lines = wrap(f"{'fits' if self.fits else 'does not fit'} on {description}", VERDICT_WIDTH)
        for term in demand.terms:
            lines += [
                pad(f"  {term.name}", 36) + f"{format_gigabytes(term.value):>16}",
                f"    {term.formula}",
            ]
        label = "needed per device, at least" if num_devices > 1 else "needed, at least"
        lines.append(_memory_line(label, demand.bytes_per_device))
        lines.append(_memory_line("memory", int(device.memory)))
        if self.remedies:
            lines += ["", "each of these changes alone is enough:"]
            for name, changed in self.remedies:
                lines.append(
                    pad(f"  {name}", 54) + f"{format_gigabytes(changed.bytes_per_device):>16}"
                )
        elif not self.fits:
            lines += ["", "no single change is enough"]
        return "\n".join(lines)

    @property
    def data(self) -> dict[str, Any]:
        """The result as plain values."""
        return {
            "fits": self.fits,
            "needed": self.demand.bytes_per_device,
            "memory": int(self.demand.serving.device.memory),
            "terms": [term._asdict() for term in self.demand.terms],
            "remedies": [
                {"name": name, "needed": changed.bytes_per_device}
                for name, changed in self.remedies
            ],
        }


def _memory_line(name: str, count: int) -> str:
    return pad(name, 36) + f"{format_gigabytes(count):>16}{f'{count / 2**30:,.2f} GiB':>16}"


def check_memory_fit(demand: MemoryDemand) -> MemoryFit:
    """Check whether a demand fits on its device; if it does not, find single changes that are
    enough.

    Each remedy changes as little as possible: it has the longest context, the most rows, or the
    fewest devices.

    Sixteen rows of 131,072 tokens for layers with Llama-3-8B's attention, on a device of 80 GB:

    >>> import headwise as hw
    >>> from headwise.costs.kv_cache_memory import RequestBatch
    >>> from headwise.costs.roofline import Device
    >>> from headwise.costs.serving_cost import ServingCost
    >>> spec = hw.design(preset="gqa", model=4096, heads=32, kv=8)
    >>> serving = ServingCost(spec, Device.from_name("h100"), num_layers=32)
    >>> fit = check_memory_fit(MemoryDemand(serving, RequestBatch.uniform(16, 131072)))
    >>> fit.fits, [remedy.name for remedy in fit.remedies][:3]
    (False, ['a context of 36,830 tokens', '4 rows', 'kv=2 in every layer'])
    """
    if demand.fits:
        return MemoryFit(demand, ())
    candidates = (remedy for find in REMEDIES for remedy in find(demand))
    return MemoryFit(demand, tuple(remedy for remedy in candidates if remedy.demand.fits))


def _shorter_context(demand: MemoryDemand) -> Iterator[MemoryRemedy]:
    """Truncate requests to the greatest length that fits."""
    requests = demand.requests

    def truncated(max_length: int) -> MemoryDemand:
        counts: dict[int, int] = {}
        for length, times in requests.counts_by_length:
            counts[min(length, max_length)] = counts.get(min(length, max_length), 0) + times
        shared_prefix = min(requests.shared_prefix, *counts)
        shorter = replace(
            requests, counts_by_length=tuple(counts.items()), shared_prefix=shared_prefix
        )
        return replace(demand, requests=shorter)

    longest = max(length for length, _ in requests.counts_by_length)
    if max_length := last_where(lambda length: truncated(length).fits, longest):
        yield MemoryRemedy(f"a context of {max_length:,} tokens", truncated(max_length))


def _fewer_requests(demand: MemoryDemand) -> Iterator[MemoryRemedy]:
    """Keep only as many requests as fit, in their order."""

    def first_requests(count: int) -> MemoryDemand:
        counts: list[tuple[int, int]] = []
        remaining = count
        for length, times in demand.requests.counts_by_length:
            if remaining:
                counts.append((length, min(times, remaining)))
                remaining -= min(times, remaining)
        return replace(demand, requests=replace(demand.requests, counts_by_length=tuple(counts)))

    if count := last_where(
        lambda count: first_requests(count).fits, demand.requests.num_requests - 1
    ):
        yield MemoryRemedy(pluralise(count, "row"), first_requests(count))


def _fewer_kv_heads(demand: MemoryDemand) -> Iterator[MemoryRemedy]:
    """Use the greatest number of key-value heads that fits, in every layer."""
    num_kv_heads = max((group.spec.heads.kv for group in demand.serving.attentions), default=1)
    for count in range(num_kv_heads - 1, 0, -1):
        if num_kv_heads % count:
            continue
        changed = _with_specs(demand, lambda spec, count=count: _with_kv_heads(spec, count))
        if changed is not None and changed.fits:
            yield MemoryRemedy(f"kv={count} in every layer", changed)
            return


def _with_kv_heads(spec: AttentionSpec, count: int) -> AttentionSpec:
    return spec if spec.heads.kv <= count else spec.with_heads(kv=count)


def _narrower_window(demand: MemoryDemand) -> Iterator[MemoryRemedy]:
    """Use the widest sliding window that fits, in layers with full causal attention."""
    if not ALLOCATION_POLICIES[demand.serving.allocator.kind].frees_evicted:
        return

    def with_window(keys: int) -> MemoryDemand | None:
        return _with_specs(demand, lambda spec: _with_window(spec, keys))

    def fits(keys: int) -> bool:
        changed = with_window(keys)
        return changed is not None and changed.fits

    longest = max(length for length, _ in demand.requests.counts_by_length)
    if (keys := last_where(fits, longest - 1)) and (changed := with_window(keys)):
        yield MemoryRemedy(f"window({keys}) in layers with full attention", changed)


def _with_window(spec: AttentionSpec, keys: int) -> AttentionSpec:
    return (
        replace(spec, pattern=Window(keys))
        if spec.pattern == Causal() and not spec.is_recurrent
        else spec
    )


def _with_specs(
    demand: MemoryDemand, change: Callable[[AttentionSpec], AttentionSpec]
) -> MemoryDemand | None:
    """Change every attention spec of a demand; None if one does not support the change."""
    try:
        spec_or_model = map_attention_specs(demand.serving.spec_or_model, change)
        return replace(demand, serving=replace(demand.serving, spec_or_model=spec_or_model))
    except SpecError:
        return None


def _smaller_formats(demand: MemoryDemand) -> Iterator[MemoryRemedy]:
    """Use int8 for the cache, or for weights; for both if neither is enough."""
    if demand.training_bytes_per_parameter:
        return

    def in_int8(name: str, *fields: str) -> MemoryRemedy:
        formats = replace(demand.serving.formats, **dict.fromkeys(fields, "int8"))
        return MemoryRemedy(name, replace(demand, serving=replace(demand.serving, formats=formats)))

    single = [in_int8("int8 cache", "cache"), in_int8("int8 weights", "weights")]
    sufficient = [remedy for remedy in single if remedy.demand.fits]
    yield from sufficient or [in_int8("int8 weights and cache", "weights", "cache")]


def _paged_allocation(demand: MemoryDemand) -> Iterator[MemoryRemedy]:
    """Use separate pages for each layer, which are freed when their tokens leave the window."""
    serving = demand.serving
    if (
        not demand.training_bytes_per_parameter
        and not ALLOCATION_POLICIES[serving.allocator.kind].frees_evicted
    ):
        paged = CacheAllocator("paged", max(serving.allocator.page_size, PAGE_SIZE))
        changed = replace(demand, serving=replace(serving, allocator=paged))
        yield MemoryRemedy(f"allocator {paged}, which frees pages", changed)


def _more_devices(demand: MemoryDemand) -> Iterator[MemoryRemedy]:
    """Use the least number of devices that is enough, each with its share of weights and cache."""
    is_training = bool(demand.training_bytes_per_parameter)
    if count := min_devices(demand):
        divided = "weights and rows" if is_training else "weights and cache"
        yield MemoryRemedy(
            f"{count:,} devices that divide {divided}", replace(demand, num_devices=count)
        )


def min_devices(demand: MemoryDemand) -> int | None:
    """Return the least number of devices that hold a demand, each with its share; None if none
    does.
    """
    count = first_where(lambda count: replace(demand, num_devices=count).fits)
    limit = demand.requests.num_requests if demand.training_bytes_per_parameter else MAX_DEVICES
    return count if count and count <= limit else None


REMEDIES = (
    _shorter_context,
    _fewer_requests,
    _fewer_kv_heads,
    _narrower_window,
    _smaller_formats,
    _paged_allocation,
    _more_devices,
)
