"""What has to lie in memory to answer or to train, and how much of it a machine can hold."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from typing import Any, NamedTuple

from ..errors import SpecError, suggest
from ..masking.patterns import Causal, Window
from ..spec.attention_spec import AttentionSpec
from .cost_report import TERMINAL_WIDTH, format_count, format_seconds
from .flops import CostTerm
from .kv_cache_memory import (
    ALLOCATION_POLICIES,
    CacheAllocator,
    RequestBatch,
    list_cache_terms,
    live_numbers,
    map_attention_specs,
)
from .roofline import STORAGE_BYTES, dtype_bytes
from .serving_cost import ServingCost, ServingStep, first_where
from .workload import MAX_SIZE, max_lengths

BYTE_UNITS = {"b": 1} | {f"{p}b": 1000**n for n, p in enumerate("kmgt", 1)}
BYTE_UNITS |= {f"{p}ib": 1024**n for n, p in enumerate("kmgt", 1)}


@dataclass(frozen=True)
class MemoryDemand:
    """Rows to be served, prompts being taken `chunk` tokens at a time, on devices that divide weights and cache.

    training=16 says that each learned number takes 16 bytes with its gradient and what the optimiser keeps, rows being
    trained on and not answered: 16 (1910.02054), 18 with gradients in float32 (Megatron-LM), 20 with both
    (zhihu 624740065). Of activations the inputs of layers are kept then, and the rest of each formed again; devices
    divide the rows.
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
                raise SpecError(f"{name}={size!r} is no size; give a whole number of at least {least}")
        if 0 < self.training_bytes_per_parameter < (least := dtype_bytes(self.serving.formats.compute)):
            raise SpecError(
                f"training={self.training_bytes_per_parameter} bytes of each number cannot hold it, which "
                f"takes {least}; 16, 18 and 20 "
                "are usual"
            )

    @property
    def terms(self) -> tuple[CostTerm, ...]:
        """What lies in memory, on all devices together: first what they divide, then what each of them needs."""
        return (*self._sharded_terms(), *self._activation_terms())

    @property
    def bytes_per_device(self) -> int:
        """Bytes on one device, at least."""
        divided = -(-sum(term.value for term in self._sharded_terms()) // self.num_devices)
        rows, working = self.requests.num_requests, sum(term.value for term in self._activation_terms())
        return divided + (
            -(-working * -(-rows // self.num_devices) // rows) if self.training_bytes_per_parameter else working
        )

    @property
    def fits(self) -> bool:
        """Whether a device can hold its share."""
        return self.bytes_per_device <= self.serving.device.memory

    def with_uniform_requests(self, count: int, length: int) -> MemoryDemand:
        """The same for so many rows of one length."""
        rows = self.requests
        return replace(
            self, requests=RequestBatch.uniform(count, length, min(rows.shared_prefix, length), rows.source_tokens)
        )

    @property
    def cache_terms(self) -> tuple[CostTerm, ...]:
        """What is remembered, by kind of layer; in training nothing is."""
        serving = self.serving
        if self.training_bytes_per_parameter:
            return ()
        terms = list_cache_terms(serving.attentions, self.requests, serving.allocator, serving.formats)
        return tuple(
            term._replace(name=serving.operation_title("cache", layers))
            for layers, term in zip(serving.attentions, terms, strict=True)
        )

    def _sharded_terms(self) -> Iterator[CostTerm]:
        serving, formats = self.serving, self.serving.formats
        if self.training_bytes_per_parameter:
            count = serving.weights.num_parameters
            how = f"{count:,} numbers x {self.training_bytes_per_parameter} bytes"
            yield CostTerm("weights, gradients, optimiser", how, count * self.training_bytes_per_parameter)
            return
        scales = " and scales" if STORAGE_BYTES[formats.weights] == 1 else "s"
        how = f"{serving.weights.num_parameters:,} numbers x {STORAGE_BYTES[formats.weights]} byte{scales}"
        yield CostTerm("weights", how, serving.weights.bytes)
        yield from self.cache_terms

    @property
    def _step_tokens(self) -> int:
        """Tokens of one step: in training all of them, else one of each row and a chunk of one more prompt."""
        if self.training_bytes_per_parameter:
            return sum(length * times for length, times in self.requests.counts_by_length)
        longest = max(length for length, _ in self.requests.counts_by_length)
        return min(self.chunk, longest) + self.requests.num_requests - 1

    def _activation_terms(self) -> Iterator[CostTerm]:
        """What runs from layer to layer, and the widest of what is alive beside it; kernels may want more."""
        serving, tokens = self.serving, self._step_tokens
        between = self._live_term("between layers", tokens, serving.model_width)
        if self.training_bytes_per_parameter:
            layers = sum(each.num_layers for each in serving.attentions if each.name != "cross")
            yield CostTerm("inputs of layers", f"{layers:,} layers x {between.formula}", layers * between.value)
        yield between
        answers = tokens if self.training_bytes_per_parameter else self.requests.num_requests
        inside = [
            self._live_term(f"inside {each.name}", tokens, live_numbers(each.spec)) for each in serving.attentions
        ]
        for each in serving.matrices:
            count = answers if each.name == "head" else tokens
            inside.append(self._live_term(f"inside {each.name}", count, each.hidden_numbers))
        yield max(inside, key=lambda term: term.value)

    def _live_term(self, name: str, tokens: int, width: int) -> CostTerm:
        each = dtype_bytes(self.serving.formats.compute)
        how = f"{tokens:,} tokens x {width:,} numbers x {each} bytes"
        return CostTerm(name, how, tokens * width * each)


def max_context(demand: MemoryDemand) -> int | None:
    """The most tokens that each of so many rows may have, at most all that have positions; None when any may.

    Eight billion bytes for layers of Llama-3-8B's attention; of a step only the cache grows with the context:

    >>> import headwise as hw
    >>> from headwise.costs.roofline import Device
    >>> device = replace(Device.from_name("h200"), memory=8e9)
    >>> serving = ServingCost(hw.design(preset="gqa", model=4096, heads=32, kv=8), device, num_layers=32)
    >>> most = max_context(MemoryDemand(serving, chunk=1))  # 32 x 41,943,040 weights, 4,096 + 14,336 numbers of a token
    >>> most, (8 * 10**9 - 2 * (32 * 41943040 + 18432)) // 131072
    (40554, 40554)
    """
    found = _max_size(
        lambda length: demand.with_uniform_requests(demand.requests.num_requests, length),
        "a context of one token",
        demand,
    )
    placed = max_lengths(demand.serving.spec_or_model).own  # learned positions end there, whatever memory holds
    return placed if found is None else min(found, placed or found)


def max_requests(demand: MemoryDemand) -> int | None:
    """The most rows, as long as the longest, that can be answered at once; None when no number is too many."""
    length = max(length for length, _ in demand.requests.counts_by_length)
    return _max_size(lambda count: demand.with_uniform_requests(count, length), f"one row of {length:,} tokens", demand)


def last_where(fits: Callable[[int], bool], limit: int = MAX_SIZE) -> int:
    """The last whole number from 1 on that fits, where larger ones fit less; 0 when not even 1 does.

    >>> last_where(lambda n: n * n <= 50), last_where(lambda n: False), last_where(lambda n: True, limit=7)
    (7, 0, 7)
    """
    over = first_where(lambda n: n > limit or not fits(n))
    return MAX_SIZE if over is None else over - 1


def _max_size(sized: Callable[[int], MemoryDemand], least: str, demand: MemoryDemand) -> int | None:
    found = last_where(lambda size: sized(size).fits)
    if not found:
        needed, memory = sized(1).bytes_per_device, int(demand.serving.device.memory)
        raise SpecError(
            f"{least} takes {format_gigabytes(needed)} with weights and activations, and memory is "
            f"{format_gigabytes(memory)}; "
            f"give {format_gigabytes(needed)} or more, or divide them among devices"
        )
    return None if found >= MAX_SIZE else found


def format_gigabytes(count: int) -> str:
    """Bytes as 10^9 of them, few ones as 10^6.

    >>> format_gigabytes(16060522496), format_gigabytes(16777216)
    ('16.06 GB', '16.78 MB')
    """
    return f"{count / 1e9:,.2f} GB" if count >= 10**9 else f"{count / 1e6:,.2f} MB"


def parse_bytes(text: str) -> int:
    """How many bytes a text such as "80 GB" or "5.38 GiB" says.

    >>> parse_bytes("80 GB"), parse_bytes("1.5GiB")
    (80000000000, 1610612736)
    """
    found = re.fullmatch(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([A-Za-z]*)\s*", text)
    if not found:
        raise SpecError(f"{text!r} says no memory; write it as in '80 GB' or '5.38 GiB'")
    number, unit = found.groups()
    if (known := unit.lower() or "b") not in BYTE_UNITS:
        raise SpecError(f"{text!r} has the unit {unit!r}; {suggest(known, BYTE_UNITS)}")
    count = int(Fraction(number) * BYTE_UNITS[known])
    if not 1 <= count <= MAX_SIZE:
        raise SpecError(f"{text!r} is no memory of a machine; give from 1 to {MAX_SIZE} bytes")
    return count


# --- Whether it fits, and if not, what would -----------------------------------------------------------

MAX_DEVICES = 2**16  # more than anybody has
PAGE_SIZE = 16
VERDICT_WIDTH = 80


class MemoryRemedy(NamedTuple):
    """One thing to change, in words, and what is asked then."""

    name: str
    demand: MemoryDemand


@dataclass(frozen=True)
class MemoryFit:
    """What a demand takes, whether that fits on its device, and where it does not, what would."""

    demand: MemoryDemand
    remedies: tuple[MemoryRemedy, ...]

    @property
    def fits(self) -> bool:
        """Whether it fits."""
        return self.demand.fits

    def __str__(self) -> str:
        demand = self.demand
        device, devices = demand.serving.device, demand.num_devices
        where = device.description if devices == 1 else f"{devices:,} of {device.description}"
        lines = [*textwrap.wrap(f"{'fits' if self.fits else 'does not fit'} on {where}", VERDICT_WIDTH)]
        for term in demand.terms:
            lines += [f"  {term.name:<34}{format_gigabytes(term.value):>16}", f"    {term.formula}"]
        lines += [_memory_line("needed of each device" if devices > 1 else "needed at least", demand.bytes_per_device)]
        lines += [_memory_line("memory", int(device.memory))]
        if self.remedies:
            lines += ["", "each of these alone is enough:"]
            lines += [f"  {name:<52}{format_gigabytes(other.bytes_per_device):>16}" for name, other in self.remedies]
        elif not self.fits:
            lines += ["", "no single change is enough"]
        return "\n".join(lines)

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values."""
        return {
            "fits": self.fits,
            "needed": self.demand.bytes_per_device,
            "memory": int(self.demand.serving.device.memory),
            "terms": [term._asdict() for term in self.demand.terms],
            "remedies": [{"name": name, "needed": other.bytes_per_device} for name, other in self.remedies],
        }


def _memory_line(name: str, count: int) -> str:
    return f"{name:<36}{format_gigabytes(count):>16}{f'{count / 2**30:,.2f} GiB':>16}"


def check_memory_fit(demand: MemoryDemand) -> MemoryFit:
    """The verdict on a demand: one change at a time that is enough, each with its largest number.

    Sixteen rows of 131,072 tokens for layers of Llama-3-8B's attention, on a device of 80 GB:

    >>> import headwise as hw
    >>> from headwise.costs.kv_cache_memory import RequestBatch
    >>> from headwise.costs.roofline import Device
    >>> from headwise.costs.serving_cost import ServingCost
    >>> serving = ServingCost(
    ...     hw.design(preset="gqa", model=4096, heads=32, kv=8), Device.from_name("h100"), num_layers=32
    ... )
    >>> told = check_memory_fit(MemoryDemand(serving, RequestBatch.uniform(16, 131072)))
    >>> told.fits, [remedy.name for remedy in told.remedies][:3]
    (False, ['a context of 36,830 tokens', '4 rows', 'kv=2 in every layer'])
    """
    if demand.fits:
        return MemoryFit(demand, ())
    tried = (remedy for find in REMEDIES for remedy in find(demand))
    return MemoryFit(demand, tuple(remedy for remedy in tried if remedy.demand.fits))


def _shorter_context(demand: MemoryDemand) -> Iterator[MemoryRemedy]:
    """Rows cut to the most tokens that fit."""
    rows = demand.requests

    def cut(most: int) -> MemoryDemand:
        each: dict[int, int] = {}
        for length, times in rows.counts_by_length:
            each[min(length, most)] = each.get(min(length, most), 0) + times
        return replace(
            demand,
            requests=replace(rows, counts_by_length=tuple(each.items()), shared_prefix=min(rows.shared_prefix, *each)),
        )

    if most := last_where(lambda length: cut(length).fits, max(length for length, _ in rows.counts_by_length)):
        yield MemoryRemedy(f"a context of {most:,} tokens", cut(most))


def _fewer_requests(demand: MemoryDemand) -> Iterator[MemoryRemedy]:
    """Fewer rows, the first of them."""

    def kept(count: int) -> MemoryDemand:
        each: list[tuple[int, int]] = []
        for length, times in demand.requests.counts_by_length:
            left = count - sum(taken for _, taken in each)
            each += [(length, min(times, left))] if left else []
        return replace(demand, requests=replace(demand.requests, counts_by_length=tuple(each)))

    if count := last_where(lambda count: kept(count).fits, demand.requests.num_requests - 1):
        yield MemoryRemedy(f"{count:,} row{'s' if count > 1 else ''}", kept(count))


def _fewer_kv_heads(demand: MemoryDemand) -> Iterator[MemoryRemedy]:
    """As many key-value heads as fit, every layer having that many."""
    most = max((each.spec.heads.kv for each in demand.serving.attentions), default=1)
    for count in (count for count in range(most - 1, 0, -1) if most % count == 0):
        fewer = _with_specs(demand, lambda spec, count=count: _with_kv_heads(spec, count))
        if fewer is not None and fewer.fits:
            yield MemoryRemedy(f"kv={count} in every layer", fewer)
            return


def _with_kv_heads(spec: AttentionSpec, count: int) -> AttentionSpec:
    return spec if spec.heads.kv <= count else spec.with_heads(kv=count)


def _narrower_window(demand: MemoryDemand) -> Iterator[MemoryRemedy]:
    """The widest window that fits, in layers that read everything."""
    if not ALLOCATION_POLICIES[demand.serving.allocator.kind].frees_evicted:
        return

    def seen(keys: int) -> MemoryDemand | None:
        return _with_specs(demand, lambda spec: _with_window(spec, keys))

    def fits(keys: int) -> bool:
        found = seen(keys)
        return found is not None and found.fits

    longest = max(length for length, _ in demand.requests.counts_by_length)
    if (keys := last_where(fits, longest - 1)) and (found := seen(keys)):
        yield MemoryRemedy(f"window({keys}) where a layer reads everything", found)


def _with_window(spec: AttentionSpec, keys: int) -> AttentionSpec:
    return replace(spec, pattern=Window(keys)) if spec.pattern == Causal() and not spec.is_recurrent else spec


def _with_specs(demand: MemoryDemand, change: Callable[[AttentionSpec], AttentionSpec]) -> MemoryDemand | None:
    """The demand with every attention changed; None where one cannot be."""
    try:
        described = map_attention_specs(demand.serving.spec_or_model, change)
        return replace(demand, serving=replace(demand.serving, spec_or_model=described))
    except SpecError:
        return None


def _smaller_formats(demand: MemoryDemand) -> Iterator[MemoryRemedy]:
    """Bytes for the cache, or for weights; for both where neither is enough."""
    if demand.training_bytes_per_parameter:
        return

    def held(name: str, *which: str) -> MemoryRemedy:
        formats = replace(demand.serving.formats, **dict.fromkeys(which, "int8"))
        return MemoryRemedy(name, replace(demand, serving=replace(demand.serving, formats=formats)))

    either = [held("int8 cache", "cache"), held("int8 weights", "weights")]
    enough = [remedy for remedy in either if remedy.demand.fits]
    yield from enough or [held("int8 weights and cache", "weights", "cache")]


def _paged_allocation(demand: MemoryDemand) -> Iterator[MemoryRemedy]:
    """Pages of its own for each layer, given back when they are forgotten, where they are not."""
    serving = demand.serving
    if not demand.training_bytes_per_parameter and not ALLOCATION_POLICIES[serving.allocator.kind].frees_evicted:
        paged = CacheAllocator("paged", max(serving.allocator.page_size, PAGE_SIZE))
        yield MemoryRemedy(
            f"an allocator that forgets, {paged}", replace(demand, serving=replace(serving, allocator=paged))
        )


def _more_devices(demand: MemoryDemand) -> Iterator[MemoryRemedy]:
    """As many devices as are enough, each with its share of weights and cache."""
    count = first_where(lambda count: replace(demand, num_devices=count).fits)
    if count and count <= (demand.requests.num_requests if demand.training_bytes_per_parameter else MAX_DEVICES):
        shared = "weights and rows" if demand.training_bytes_per_parameter else "weights and cache"
        yield MemoryRemedy(f"{count:,} devices that divide {shared}", replace(demand, num_devices=count))


REMEDIES = (
    _shorter_context,
    _fewer_requests,
    _fewer_kv_heads,
    _narrower_window,
    _smaller_formats,
    _paged_allocation,
    _more_devices,
)

# --- How fast requests are answered, what a step waits for, and how many of them memory holds ----------

MAX_ROWS = 2**16  # rows at which the curve ends, where memory does not end it


class DecodeRate(NamedTuple):
    """So many rows at once: seconds of a step, and tokens a second of all of them."""

    rows: int
    seconds: float
    tokens: float


@dataclass(frozen=True)
class ThroughputReport:
    """Rows that are answered together, and a prompt that comes in beside them.

    >>> import headwise as hw
    >>> from headwise.costs.roofline import Device
    >>> from headwise.costs.serving_cost import ServingCost
    >>> serving = ServingCost(
    ...     hw.design(preset="gqa", model=4096, heads=32, kv=8), Device.from_name("h200"), num_layers=32
    ... )
    >>> told = ThroughputReport("gqa", MemoryDemand(serving, RequestBatch.uniform(16, 8192)), prompt=8192)
    >>> [round(rate.tokens, -1) for rate in told.decode_rates[:2]]  # n / ((2.684 + n 1.074) GB / 4.8 TB/s), nearly
    [1280.0, 1990.0]
    """

    name: str
    demand: MemoryDemand
    prompt: int

    @property
    def decode_step(self) -> ServingStep:
        """One token for every row."""
        return self.demand.serving.decode_step(self.demand.requests)

    @property
    def mixed_step(self) -> ServingStep:
        """The same with the last chunk of a prompt in the place of one row."""
        taken = (self.prompt - 1) // self.demand.chunk * self.demand.chunk
        return self.demand.serving.mixed_step(self.other_requests, self.prompt - taken, taken)

    @property
    def other_requests(self) -> RequestBatch | None:
        """The rows without the first: who is answered while a prompt comes in."""
        (length, times), *rest = self.demand.requests.counts_by_length
        each = (*(((length, times - 1),) if times > 1 else ()), *rest)
        return RequestBatch(each) if each else None

    @property
    def first_token_seconds(self) -> float:
        """Seconds at least until the first token of the prompt."""
        return self.demand.serving.first_token_seconds(self.prompt, self.demand.chunk, self.other_requests)

    @property
    def longest_length(self) -> int:
        """Tokens of the longest row."""
        return max(length for length, _ in self.demand.requests.counts_by_length)

    @property
    def decode_rates(self) -> list[DecodeRate]:
        """Rates of 1, 2, 4 ... rows as long as the longest, as far as memory goes."""
        most = max_requests(self.demand) or MAX_ROWS
        counts = sorted({most} | {2**n for n in range(MAX_ROWS.bit_length()) if 2**n <= min(most, MAX_ROWS)})
        steps = (
            (n, self.demand.serving.decode_step(RequestBatch.uniform(n, self.longest_length)).seconds) for n in counts
        )
        return [DecodeRate(n, seconds, n / seconds) for n, seconds in steps]

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        serving, rows = self.demand.serving, self.demand.requests
        long = (
            f"{self.longest_length:,}"
            if len(rows.counts_by_length) == 1
            else f"{min(rows.counts_by_length)[0]:,} to {self.longest_length:,}"
        )
        yield from _wrap(
            f"{self.name}: {_pluralise(rows.num_requests, 'row')} of {long} tokens, "
            f"{serving.formats.compute}, a cache of "
            f"{serving.formats.cache} ({serving.allocator}), {serving.device.description}"
        )
        yield from ("", _operation_line("a token for every row", "FLOP", "bytes", "FLOP/byte", "waits for", "at least"))
        yield from _step_lines(self.decode_step)
        yield from ("", f"the same while a prompt of {self.prompt:,} tokens ends")
        yield from _step_lines(self.mixed_step)
        seconds = self.decode_step.seconds
        yield from ("", _value_line("first token of that prompt", format_seconds(self.first_token_seconds)))
        yield _value_line("then a token every", format_seconds(seconds))
        yield _value_line("tokens a second, all rows together", f"{rows.num_requests / seconds:,.0f}")
        yield from self._limit_lines()
        yield from ("", "rows".rjust(10) + "a step".rjust(14) + "tokens a second".rjust(20))
        for rate in self.decode_rates:
            yield f"{rate.rows:,}".rjust(10) + format_seconds(rate.seconds).rjust(14) + f"{rate.tokens:,.0f}".rjust(20)

    def _limit_lines(self) -> Iterator[str]:
        serving, rows, demand = self.demand.serving, self.demand.requests, self.demand
        tokens, context = serving.compute_bound_tokens(), serving.core_dominates_from(rows.num_requests)
        yield _value_line(
            "products with weights wait for compute from", "never" if tokens is None else f"{tokens:,} tokens a step"
        )
        yield _value_line(
            "cores take longer than these from", "never" if context is None else f"{context:,} tokens a row"
        )
        longest, most = max_context(demand), max_requests(demand)
        yield _value_line(f"rows of {self.longest_length:,} tokens that memory holds", _format_limit(most))
        yield _value_line(f"or {_pluralise(rows.num_requests, 'row')} of so many tokens", _format_limit(longest))
        if not demand.fits:
            yield "These rows do not fit; --verdict says what would."

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values."""
        demand, serving = self.demand, self.demand.serving
        seconds = self.decode_step.seconds
        steps = {"decode": self.decode_step, "mixed": self.mixed_step}
        return {
            "name": self.name,
            "rows": [list(each) for each in demand.requests.counts_by_length],
            "allocator": str(serving.allocator),
            "first_token_seconds": self.first_token_seconds,
            "token_seconds": seconds,
            "tokens_per_second": demand.requests.num_requests / seconds,
            "steps": {
                name: [{**asdict(one), "intensity": one.intensity} for one in step.operations]
                for name, step in steps.items()
            },
            "compute_bound_from_tokens": serving.compute_bound_tokens(),
            "core_longest_from_context": serving.core_dominates_from(demand.requests.num_requests),
            "cache_bytes": sum(term.value for term in demand.cache_terms),
            "fits": demand.fits,
            "most_rows": max_requests(demand),
            "longest_context": max_context(demand),
            "curve": [rate._asdict() for rate in self.decode_rates],
        }


def _step_lines(step: ServingStep) -> Iterator[str]:
    for one in step.operations:
        cells = (f"{one.intensity:,.1f}", one.bound, format_seconds(one.seconds))
        yield _operation_line(f"  {one.name}", format_count(one.flops), format_count(one.moved), *cells)
    together = (
        format_count(sum(one.flops for one in step.operations)),
        format_count(sum(one.moved for one in step.operations)),
    )
    yield _operation_line("  together", *together, "", "", format_seconds(step.seconds))


def _operation_line(name: str, *cells: str) -> str:
    widths = (10, 10, 11, 10, 9)
    numbers = "".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
    return f"{name:<30}{numbers}" if len(name) <= 30 else f"{name}\n{'':<30}{numbers}"


def _value_line(name: str, value: str) -> str:
    return f"{name:<46}{value:>22}"


def _format_limit(count: int | None) -> str:
    return "any number" if count is None else f"{count:,}"


def _pluralise(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, TERMINAL_WIDTH)
