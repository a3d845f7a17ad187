"""From which length on a layer costs less than another: found by counting, and to the token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from ..errors import SpecError
from .along import MAX_TOKENS, QUANTITY_LABELS, CostByLength
from .calls import Workload
from .devices import Device
from .whole import SpecOrModel

NEAR_LENGTHS = 16  # lengths that are all looked at, before they are doubled
RELATIVE_TOLERANCE = 1e-12  # seconds are sums of rounded quotients: what is nearer than this share is equal
MAX_RANGES_SHOWN = 3  # spans of lengths that are told one by one


class LengthRange(NamedTuple):
    """Lengths one after another, both ends included; `last` is None where no end was found."""

    first: int
    last: int | None

    def __str__(self) -> str:
        if self.last is None:
            return f"from {self.first:,} on"
        return f"at {self.first:,}" if self.first == self.last else f"from {self.first:,} to {self.last:,}"


@dataclass(frozen=True)
class Crossover:
    """The lengths at which one costs less than another in one quantity, as far as was looked.

    `unlike` says whether they ever differ; None where one of the two has no such quantity.
    """

    name: str
    baseline: str
    quantity: str
    ranges: tuple[LengthRange, ...]
    differs: bool | None
    checked_up_to: int

    def __str__(self) -> str:
        if self.differs is None:
            return "-"
        if not self.ranges:
            return "never" if self.differs else "never: equal"
        if self.ranges == (LengthRange(1, None),):
            return "always"
        more = len(self.ranges) - MAX_RANGES_SHOWN
        told = ", ".join(map(str, self.ranges[:MAX_RANGES_SHOWN])) + (f", and {more} spans more" if more > 0 else "")
        return told.replace("from 1 to", "up to")

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values."""
        told = {"name": self.name, "against": self.baseline, "quantity": self.quantity, "checked_up_to": self.checked_up_to}
        return told | {
            "cheaper": None if self.differs is None else [span._asdict() for span in self.ranges],
            "said": str(self),
        }


@dataclass(frozen=True)
class CrossoverReport:
    """Where each of several costs less than the first of them, quantity by quantity."""

    workload: Workload
    crossovers: tuple[Crossover, ...]

    def __str__(self) -> str:
        load, first = self.workload, self.crossovers[0].baseline
        rows = "row" if load.batch == 1 else "rows"
        lines = [f"Lengths at which each costs less than {first}"]
        lines += [f"{load.batch:,} {rows}, {load.dtype}, {Device.from_name(load.device).description}"]
        for name in dict.fromkeys(row.name for row in self.crossovers):
            mine = [row for row in self.crossovers if row.name == name]
            lines += ["", f"{name} (looked at up to {mine[0].checked_up_to:,} tokens)"]
            lines += [f"  {QUANTITY_LABELS[row.quantity]:<20}{row}" for row in mine]
        return "\n".join(lines)

    @property
    def data(self) -> list[dict[str, Any]]:
        """The same as plain values."""
        return [row.data for row in self.crossovers]


def find_crossovers(specs: Mapping[str, SpecOrModel], workload: Workload | None = None) -> CrossoverReport:
    """The lengths at which each costs less than the first: FLOPs, cache, and seconds at least on the device.

    Every change is found to the token, between lengths that are doubled and their halves; of two changes between the
    same neighbours none is seen.

    >>> import headwise as hw
    >>> told = find_crossovers({n: hw.design(preset=n, model=4096, heads=32) for n in ("gqa", "mla", "linear")})
    >>> {row.name: str(row) for row in told.rows if row.quantity == "cache_bytes"}
    {'mla': 'always', 'linear': 'from 517 on'}
    """
    known = specs if isinstance(specs, Mapping) else {f"{specs!r}"[:40]: specs}
    if len(known) < 2:
        raise SpecError(f"{', '.join(known) or 'nothing'} has nothing to break even with; give two or more by name")
    along = CostByLength(specs, workload or Workload())
    first, *others = specs
    rows = [find_crossover(along, name, first, quantity) for name in others for quantity in QUANTITY_LABELS]
    return CrossoverReport(along.workload, tuple(rows))


def find_crossover(costs: CostByLength, name: str, baseline: str, quantity: str, max_length: int = MAX_TOKENS) -> Crossover:
    """The lengths, up to `farthest`, at which one costs less than another in one quantity."""
    max_length = min(max_length, costs.max_length(name, baseline))

    def gain(tokens: int) -> float:
        """What one costs less than the other."""
        one, other = (getattr(costs.at(each, tokens), quantity) for each in (name, baseline))
        return 0 if type(one) is float and math.isclose(one, other, rel_tol=RELATIVE_TOLERANCE) else other - one

    if None in (getattr(costs.at(each, 1), quantity) for each in (name, baseline)):
        return Crossover(name, baseline, quantity, (), None, max_length)
    unlike = any(gain(tokens) for tokens in _sampled_lengths(max_length))
    return Crossover(name, baseline, quantity, find_ranges(lambda tokens: gain(tokens) > 0, max_length), unlike, max_length)


def find_ranges(holds: Callable[[int], bool], max_length: int) -> tuple[LengthRange, ...]:
    """The lengths at which it holds, as far as was looked.

    >>> [str(span) for span in find_ranges(lambda tokens: tokens < 5 or tokens**2 > 10**9, 2**40)]
    ['from 1 to 4', 'from 31,623 on']
    """
    return tuple(_ranges_from_samples(holds, {tokens: holds(tokens) for tokens in _sampled_lengths(max_length)}))


def _sampled_lengths(farthest: int) -> Iterator[int]:
    """Every short length, then fewer and fewer."""
    yield from range(1, min(NEAR_LENGTHS, farthest))
    yield from bisection_lengths(NEAR_LENGTHS, farthest)


def bisection_lengths(first: int, max_length: int) -> Iterator[int]:
    """A length doubled again and again, and what lies halfway between two of these; then the last.

    >>> list(bisection_lengths(16, 50))
    [16, 24, 32, 48, 50]
    """
    size = first
    while size < max_length:
        yield size
        if 3 * size // 2 < max_length:
            yield 3 * size // 2
        size *= 2
    yield max_length


def _ranges_from_samples(holds: Callable[[int], bool], found: Mapping[int, bool]) -> Iterator[LengthRange]:
    """The lengths at which it holds, given where it was looked: between two that differ, the first like the second."""
    start = 1 if found[1] else None
    for low, high in pairwise(found):
        if found[low] == found[high]:
            continue
        change = _bisect_change(holds, low, high, found[high])
        if found[high]:
            start = change
        elif start is not None:
            yield LengthRange(start, change - 1)
            start = None
    if start is not None:
        yield LengthRange(start, None)


def _bisect_change(holds: Callable[[int], bool], low: int, high: int, after: bool) -> int:
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) == after else (middle, high)
    return high
