"""Whether it fits, and if not, what would: every remedy is priced again before it is named."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..errors import SpecError
from ..pattern import Causal, Window
from ..spec import AttentionSpec
from .allocators import ALLOCATION_POLICIES, CacheAllocator
from .capacity import MemoryDemand, format_gigabytes, last_where
from .layers import map_attention_specs
from .serving import first_where

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
    >>> from headwise.select_counted.allocators import Rows
    >>> from headwise.select_counted.num_devices import Device
    >>> from headwise.select_counted.serving import Serving
    >>> serving = Serving(hw.design(preset="gqa", model=4096, heads=32, kv=8), Device.named("h100"), layers=32)
    >>> told = check_memory_fit(MemoryDemand(serving, Rows.alike(16, 131072)))
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
        return replace(demand, requests=replace(rows, counts_by_length=tuple(each.items()), shared_prefix=min(rows.shared_prefix, *each)))

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
        yield MemoryRemedy(f"an allocator that forgets, {paged}", replace(demand, serving=replace(serving, allocator=paged)))


def _more_devices(demand: MemoryDemand) -> Iterator[MemoryRemedy]:
    """As many devices as are enough, each with its share of weights and cache."""
    count = first_where(lambda count: replace(demand, num_devices=count).fits)
    if count and count <= (demand.requests.num_requests if demand.training_bytes_per_parameter else MAX_DEVICES):
        shared = "weights and rows" if demand.training_bytes_per_parameter else "weights and cache"
        yield MemoryRemedy(f"{count:,} devices that divide {shared}", replace(demand, num_devices=count))


REMEDIES = (_shorter_context, _fewer_requests, _fewer_kv_heads, _narrower_window, _smaller_formats, _paged_allocation, _more_devices)
