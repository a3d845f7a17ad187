"""What has to lie in memory to answer or to train, and how much of it a machine can hold."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction

from ..errors import SpecError, suggest
from .allocators import RequestBatch, list_cache_terms
from .bills import CostTerm
from .calls import MAX_SIZE
from .devices import STORAGE_BYTES, dtype_bytes
from .layers import live_numbers
from .scopes import max_lengths
from .serving import ServingCost, first_where

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
                f"training={self.training_bytes_per_parameter} bytes of each number cannot hold it, which takes {least}; 16, 18 and 20 "
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
        return divided + (-(-working * -(-rows // self.num_devices) // rows) if self.training_bytes_per_parameter else working)

    @property
    def fits(self) -> bool:
        """Whether a device can hold its share."""
        return self.bytes_per_device <= self.serving.device.memory

    def with_uniform_requests(self, count: int, length: int) -> MemoryDemand:
        """The same for so many rows of one length."""
        rows = self.requests
        return replace(self, requests=RequestBatch.uniform(count, length, min(rows.shared_prefix, length), rows.source_tokens))

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
        inside = [self._live_term(f"inside {each.name}", tokens, live_numbers(each.spec)) for each in serving.attentions]
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
    >>> from headwise.select_counted.num_devices import Device
    >>> device = replace(Device.named("h200"), memory=8e9)
    >>> serving = ServingCost(hw.design(preset="gqa", model=4096, heads=32, kv=8), device, layers=32)
    >>> most = max_context(MemoryDemand(serving, chunk=1))  # 32 x 41,943,040 weights, 4,096 + 14,336 numbers of a token
    >>> most, (8 * 10**9 - 2 * (32 * 41943040 + 18432)) // 131072
    (40554, 40554)
    """
    found = _max_size(lambda length: demand.with_uniform_requests(demand.requests.num_requests, length), "a context of one token", demand)
    placed = max_lengths(demand.serving.spec_or_model).own  # learned positions end there, whatever memory holds
    return placed if found is None else min(found, placed or found)


def max_requests(demand: MemoryDemand) -> int | None:
    """The most rows, as long as the longest, that can be answered at once; None when no number is too many."""
    length = max(length for length, _ in demand.requests.counts_by_length)
    return _max_size(lambda count: demand.with_uniform_requests(count, length), f"one row of {length:,} tokens", demand)


def last_where(fits: Callable[[int], bool], limit: int = MAX_SIZE) -> int:
    """The last whole number from 1 on that fits, where larger ones fit less; 0 when not even 1 does.

    >>> last_where(lambda n: n * n <= 50), last_where(lambda n: False), last_where(lambda n: True, most=7)
    (7, 0, 7)
    """
    over = first_where(lambda n: n > limit or not fits(n))
    return MAX_SIZE if over is None else over - 1


def _max_size(sized: Callable[[int], MemoryDemand], least: str, demand: MemoryDemand) -> int | None:
    found = last_where(lambda size: sized(size).fits)
    if not found:
        needed, memory = sized(1).bytes_per_device, int(demand.serving.device.memory)
        raise SpecError(
            f"{least} takes {format_gigabytes(needed)} with weights and activations, and memory is {format_gigabytes(memory)}; "
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
