"""Whether it fits, and if not, what would: every remedy is priced again before it is named."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..errors import SpecError
from ..pattern import Causal, Window
from ..spec import AttentionSpec
from .allocators import MANNERS, Allocator
from .capacity import Demand, gigabytes, last
from .layers import changed
from .serving import first

DEVICES = 2**16  # more than anybody has
PAGE = 16
WIDTH = 80


class Remedy(NamedTuple):
    """One thing to change, in words, and what is asked then."""

    name: str
    demand: Demand


@dataclass(frozen=True)
class Verdict:
    """What a demand takes, whether that fits on its device, and where it does not, what would."""

    demand: Demand
    remedies: tuple[Remedy, ...]

    @property
    def fits(self) -> bool:
        """Whether it fits."""
        return self.demand.fits

    def __str__(self) -> str:
        demand = self.demand
        device, devices = demand.serving.device, demand.devices
        where = device.what if devices == 1 else f"{devices:,} of {device.what}"
        lines = [*textwrap.wrap(f"{'fits' if self.fits else 'does not fit'} on {where}", WIDTH)]
        for term in demand.terms:
            lines += [f"  {term.name:<34}{gigabytes(term.value):>16}", f"    {term.formula}"]
        lines += [_line("needed of each device" if devices > 1 else "needed at least", demand.needed)]
        lines += [_line("memory", int(device.memory))]
        if self.remedies:
            lines += ["", "each of these alone is enough:"]
            lines += [f"  {name:<52}{gigabytes(other.needed):>16}" for name, other in self.remedies]
        elif not self.fits:
            lines += ["", "no single change is enough"]
        return "\n".join(lines)

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values."""
        return {
            "fits": self.fits,
            "needed": self.demand.needed,
            "memory": int(self.demand.serving.device.memory),
            "terms": [term._asdict() for term in self.demand.terms],
            "remedies": [{"name": name, "needed": other.needed} for name, other in self.remedies],
        }


def _line(name: str, count: int) -> str:
    return f"{name:<36}{gigabytes(count):>16}{f'{count / 2**30:,.2f} GiB':>16}"


def judge(demand: Demand) -> Verdict:
    """The verdict on a demand: one change at a time that is enough, each with its largest number.

    Sixteen rows of 131,072 tokens for layers of Llama-3-8B's attention, on a device of 80 GB:

    >>> import headwise as hw
    >>> from headwise.counting.allocators import Rows
    >>> from headwise.counting.devices import Device
    >>> from headwise.counting.serving import Serving
    >>> serving = Serving(hw.design(preset="gqa", model=4096, heads=32, kv=8), Device.named("h100"), layers=32)
    >>> told = judge(Demand(serving, Rows.alike(16, 131072)))
    >>> told.fits, [remedy.name for remedy in told.remedies][:3]
    (False, ['a context of 36,830 tokens', '4 rows', 'kv=2 in every layer'])
    """
    if demand.fits:
        return Verdict(demand, ())
    tried = (remedy for find in REMEDIES for remedy in find(demand))
    return Verdict(demand, tuple(remedy for remedy in tried if remedy.demand.fits))


def _context(demand: Demand) -> Iterator[Remedy]:
    """Rows cut to the most tokens that fit."""
    rows = demand.rows

    def cut(most: int) -> Demand:
        each: dict[int, int] = {}
        for length, times in rows.each:
            each[min(length, most)] = each.get(min(length, most), 0) + times
        return replace(demand, rows=replace(rows, each=tuple(each.items()), shared=min(rows.shared, *each)))

    if most := last(lambda length: cut(length).fits, max(length for length, _ in rows.each)):
        yield Remedy(f"a context of {most:,} tokens", cut(most))


def _rows(demand: Demand) -> Iterator[Remedy]:
    """Fewer rows, the first of them."""

    def kept(count: int) -> Demand:
        each: list[tuple[int, int]] = []
        for length, times in demand.rows.each:
            left = count - sum(taken for _, taken in each)
            each += [(length, min(times, left))] if left else []
        return replace(demand, rows=replace(demand.rows, each=tuple(each)))

    if count := last(lambda count: kept(count).fits, demand.rows.count - 1):
        yield Remedy(f"{count:,} row{'s' if count > 1 else ''}", kept(count))


def _heads(demand: Demand) -> Iterator[Remedy]:
    """As many key-value heads as fit, every layer having that many."""
    most = max((each.spec.heads.kv for each in demand.serving.attentions), default=1)
    for count in (count for count in range(most - 1, 0, -1) if most % count == 0):
        fewer = _with(demand, lambda spec, count=count: _sharing(spec, count))
        if fewer is not None and fewer.fits:
            yield Remedy(f"kv={count} in every layer", fewer)
            return


def _sharing(spec: AttentionSpec, count: int) -> AttentionSpec:
    return spec if spec.heads.kv <= count else spec.with_heads(kv=count)


def _window(demand: Demand) -> Iterator[Remedy]:
    """The widest window that fits, in layers that read everything."""
    if not MANNERS[demand.serving.allocator.kind].forgets:
        return

    def seen(keys: int) -> Demand | None:
        return _with(demand, lambda spec: _windowed(spec, keys))

    def fits(keys: int) -> bool:
        found = seen(keys)
        return found is not None and found.fits

    longest = max(length for length, _ in demand.rows.each)
    if (keys := last(fits, longest - 1)) and (found := seen(keys)):
        yield Remedy(f"window({keys}) where a layer reads everything", found)


def _windowed(spec: AttentionSpec, keys: int) -> AttentionSpec:
    return replace(spec, pattern=Window(keys)) if spec.pattern == Causal() and not spec.stateful else spec


def _with(demand: Demand, change: Callable[[AttentionSpec], AttentionSpec]) -> Demand | None:
    """The demand with every attention changed; None where one cannot be."""
    try:
        described = changed(demand.serving.described, change)
        return replace(demand, serving=replace(demand.serving, described=described))
    except SpecError:
        return None


def _formats(demand: Demand) -> Iterator[Remedy]:
    """Bytes for the cache, or for weights; for both where neither is enough."""
    if demand.training:
        return

    def held(name: str, *which: str) -> Remedy:
        formats = replace(demand.serving.formats, **dict.fromkeys(which, "int8"))
        return Remedy(name, replace(demand, serving=replace(demand.serving, formats=formats)))

    either = [held("int8 cache", "cache"), held("int8 weights", "weights")]
    enough = [remedy for remedy in either if remedy.demand.fits]
    yield from enough or [held("int8 weights and cache", "weights", "cache")]


def _pages(demand: Demand) -> Iterator[Remedy]:
    """Pages of its own for each layer, given back when they are forgotten, where they are not."""
    serving = demand.serving
    if not demand.training and not MANNERS[serving.allocator.kind].forgets:
        paged = Allocator("paged", max(serving.allocator.page, PAGE))
        yield Remedy(f"an allocator that forgets, {paged}", replace(demand, serving=replace(serving, allocator=paged)))


def _devices(demand: Demand) -> Iterator[Remedy]:
    """As many devices as are enough, each with its share of weights and cache."""
    count = first(lambda count: replace(demand, devices=count).fits)
    if count and count <= (demand.rows.count if demand.training else DEVICES):
        shared = "weights and rows" if demand.training else "weights and cache"
        yield Remedy(f"{count:,} devices that divide {shared}", replace(demand, devices=count))


REMEDIES = (_context, _rows, _heads, _window, _formats, _pages, _devices)
