"""Patterns whose queries read only keys at every r-th place: r texts, each read by a pattern without the gaps."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, lcm
from typing import Any

from ..boxes import Lines
from ..pattern import And, Dilated, Or, Pattern


def rate(pattern: Pattern) -> int:
    """The largest r known for which allows(i, j) implies that r divides i - j.

    >>> from headwise.pattern import Dilated, Window
    >>> [rate(one) for one in (Window(9), Dilated(5, rate=6), Dilated(5, rate=6) | Dilated(3, rate=4))]
    [1, 6, 2]
    """
    if isinstance(pattern, Dilated):
        return pattern.rate
    if isinstance(pattern, And):
        return lcm(rate(pattern.left), rate(pattern.right))
    return gcd(rate(pattern.left), rate(pattern.right)) if isinstance(pattern, Or) else 1


def residues(count: int, places: range) -> list[range]:
    """For each rest of a division by `count`, which of the places have it, counted among all that do.

    >>> residues(3, range(4, 9))
    [range(2, 3), range(1, 3), range(1, 3)]
    """
    return [range(-((rest - places.start) // count), -((rest - places.stop) // count)) for rest in range(count)]


@dataclass(frozen=True)
class Thin:
    """A pattern among the places that leave this rest when divided by `count`, counted among themselves."""

    pattern: Pattern
    count: int
    rest: int

    def allows(self, i: Any, j: Any) -> Any:
        """Whether the i-th of them reads the j-th."""
        return self.pattern.allows(self.rest + self.count * i, self.rest + self.count * j)

    def spans(self, i: int, keys: range) -> list[range]:
        """The keys that the i-th reads, as disjoint ranges in order."""
        if self.count == 1:
            return self.pattern.spans(i, keys)
        if isinstance(self.pattern, Dilated) and self.pattern.rate == self.count:
            back, ahead = self.pattern.keys - 1 - self.pattern.after, self.pattern.after
            return [range(max(keys.start, i - back), min(keys.stop, i + ahead + 1))]
        spans = self.pattern.spans(self.rest + self.count * i, self._between(keys))
        return [range(self._first(span.start), self._first(span.stop)) for span in spans]

    def lines(self, queries: range, keys: range) -> Lines:
        """The lines on which the ends of those ranges run."""
        if self.count == 1:
            return self.pattern.lines(queries, keys)
        if isinstance(self.pattern, Dilated) and self.pattern.rate == self.count:
            back, ahead = self.pattern.keys - 1 - self.pattern.after, self.pattern.after
            return Lines(diagonals=frozenset((-back, ahead + 1)))
        rows, columns, diagonals = self.pattern.lines(self._between(queries), self._between(keys))
        return Lines(
            frozenset(map(self._first, rows)),
            frozenset(map(self._first, columns)),
            frozenset(-(-offset // self.count) for offset in diagonals),
        )

    def all(self, some: range) -> range:
        """The places of these, as the whole pattern counts."""
        return range(self.rest + self.count * some.start, self.rest + self.count * some.stop, self.count)

    def _between(self, some: range) -> range:
        """Every place from the first to the last of them."""
        every = self.all(some)
        return range(every.start, every[-1] + 1 if every else every.start)

    def _first(self, place: int) -> int:
        """How many of them come before a place."""
        return -((self.rest - place) // self.count)
