"""From which length on a layer costs less than another: found by counting, and to the token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from ..errors import SpecError
from .along import FARTHEST, WORDS, Along
from .calls import Load
from .devices import Device
from .whole import Described

NEAR = 16  # lengths that are all looked at, before they are doubled
ALIKE = 1e-12  # seconds are sums of rounded quotients: what is nearer than this share is equal
SHOWN = 3  # spans of lengths that are told one by one


class Span(NamedTuple):
    """Lengths one after another, both ends included; `last` is None where no end was found."""

    first: int
    last: int | None

    def __str__(self) -> str:
        if self.last is None:
            return f"from {self.first:,} on"
        return f"at {self.first:,}" if self.first == self.last else f"from {self.first:,} to {self.last:,}"


@dataclass(frozen=True)
class Even:
    """The lengths at which one costs less than another in one quantity, as far as was looked.

    `unlike` says whether they ever differ; None where one of the two has no such quantity.
    """

    name: str
    against: str
    quantity: str
    spans: tuple[Span, ...]
    unlike: bool | None
    checked: int

    def __str__(self) -> str:
        if self.unlike is None:
            return "-"
        if not self.spans:
            return "never" if self.unlike else "never: equal"
        if self.spans == (Span(1, None),):
            return "always"
        more = len(self.spans) - SHOWN
        told = ", ".join(map(str, self.spans[:SHOWN])) + (f", and {more} spans more" if more > 0 else "")
        return told.replace("from 1 to", "up to")

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values."""
        told = {"name": self.name, "against": self.against, "quantity": self.quantity, "checked_up_to": self.checked}
        return told | {
            "cheaper": None if self.unlike is None else [span._asdict() for span in self.spans],
            "said": str(self),
        }


@dataclass(frozen=True)
class Evens:
    """Where each of several costs less than the first of them, quantity by quantity."""

    load: Load
    rows: tuple[Even, ...]

    def __str__(self) -> str:
        load, first = self.load, self.rows[0].against
        rows = "row" if load.batch == 1 else "rows"
        lines = [f"Lengths at which each costs less than {first}"]
        lines += [f"{load.batch:,} {rows}, {load.dtype}, {Device.named(load.device).what}"]
        for name in dict.fromkeys(row.name for row in self.rows):
            mine = [row for row in self.rows if row.name == name]
            lines += ["", f"{name} (looked at up to {mine[0].checked:,} tokens)"]
            lines += [f"  {WORDS[row.quantity]:<20}{row}" for row in mine]
        return "\n".join(lines)

    @property
    def data(self) -> list[dict[str, Any]]:
        """The same as plain values."""
        return [row.data for row in self.rows]


def break_even(described: Mapping[str, Described], load: Load | None = None) -> Evens:
    """The lengths at which each costs less than the first: FLOPs, cache, and seconds at least on the device.

    Every change is found to the token, between lengths that are doubled and their halves; of two changes between the
    same neighbours none is seen.

    >>> import headwise as hw
    >>> told = break_even({n: hw.design(preset=n, model=4096, heads=32) for n in ("gqa", "mla", "linear")})
    >>> {row.name: str(row) for row in told.rows if row.quantity == "cache_bytes"}
    {'mla': 'always', 'linear': 'from 517 on'}
    """
    known = described if isinstance(described, Mapping) else {f"{described!r}"[:40]: described}
    if len(known) < 2:
        raise SpecError(f"{', '.join(known) or 'nothing'} has nothing to break even with; give two or more by name")
    along = Along(described, load or Load())
    first, *others = described
    rows = [even(along, name, first, quantity) for name in others for quantity in WORDS]
    return Evens(along.load, tuple(rows))


def even(along: Along, name: str, against: str, quantity: str, farthest: int = FARTHEST) -> Even:
    """The lengths, up to `farthest`, at which one costs less than another in one quantity."""
    farthest = min(farthest, along.farthest(name, against))

    def gain(tokens: int) -> float:
        """What one costs less than the other."""
        one, other = (getattr(along.at(each, tokens), quantity) for each in (name, against))
        return 0 if type(one) is float and math.isclose(one, other, rel_tol=ALIKE) else other - one

    if None in (getattr(along.at(each, 1), quantity) for each in (name, against)):
        return Even(name, against, quantity, (), None, farthest)
    unlike = any(gain(tokens) for tokens in _grid(farthest))
    return Even(name, against, quantity, spans(lambda tokens: gain(tokens) > 0, farthest), unlike, farthest)


def spans(holds: Callable[[int], bool], farthest: int) -> tuple[Span, ...]:
    """The lengths at which it holds, as far as was looked.

    >>> [str(span) for span in spans(lambda tokens: tokens < 5 or tokens**2 > 10**9, 2**40)]
    ['from 1 to 4', 'from 31,623 on']
    """
    return tuple(_spans(holds, {tokens: holds(tokens) for tokens in _grid(farthest)}))


def _grid(farthest: int) -> Iterator[int]:
    """Every short length, then fewer and fewer."""
    yield from range(1, min(NEAR, farthest))
    yield from halfway(NEAR, farthest)


def halfway(first: int, farthest: int) -> Iterator[int]:
    """A length doubled again and again, and what lies halfway between two of these; then the last.

    >>> list(halfway(16, 50))
    [16, 24, 32, 48, 50]
    """
    size = first
    while size < farthest:
        yield size
        if 3 * size // 2 < farthest:
            yield 3 * size // 2
        size *= 2
    yield farthest


def _spans(holds: Callable[[int], bool], found: Mapping[int, bool]) -> Iterator[Span]:
    """The lengths at which it holds, given where it was looked: between two that differ, the first like the second."""
    start = 1 if found[1] else None
    for low, high in pairwise(found):
        if found[low] == found[high]:
            continue
        change = _change(holds, low, high, found[high])
        if found[high]:
            start = change
        elif start is not None:
            yield Span(start, change - 1)
            start = None
    if start is not None:
        yield Span(start, None)


def _change(holds: Callable[[int], bool], low: int, high: int, after: bool) -> int:
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) == after else (middle, high)
    return high
