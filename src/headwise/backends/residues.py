"""Patterns whose queries read only keys at every r-th place: r texts, each read by a pattern without the gaps."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, lcm
from typing import Any

from ..boxes import BoundaryLines
from ..pattern import And, Dilated, Or, Pattern


def find_dilation(pattern: Pattern) -> int:
    """The largest r known for which allows(i, j) implies that r divides i - j.

    >>> from headwise.pattern import Dilated, Window
    >>> [find_dilation(one) for one in (Window(9), Dilated(5, find_dilation=6), Dilated(5, find_dilation=6) | Dilated(3, find_dilation=4))]
    [1, 6, 2]
    """
    if isinstance(pattern, Dilated):
        return pattern.rate
    if isinstance(pattern, And):
        return lcm(find_dilation(pattern.left), find_dilation(pattern.right))
    return gcd(find_dilation(pattern.left), find_dilation(pattern.right)) if isinstance(pattern, Or) else 1


def split_by_residue(count: int, places: range) -> list[range]:
    """For each rest of a division by `count`, which of the places have it, counted among all that do.

    >>> split_by_residue(3, range(4, 9))
    [range(2, 3), range(1, 3), range(1, 3)]
    """
    return [range(-((rest - places.start) // count), -((rest - places.stop) // count)) for rest in range(count)]


@dataclass(frozen=True)
class ResiduePattern:
    """A pattern among the places that leave this rest when divided by `count`, counted among themselves."""

    pattern: Pattern
    modulus: int
    residue: int

    def allows(self, i: Any, j: Any) -> Any:
        """Whether the i-th of them reads the j-th."""
        return self.pattern.allows(self.residue + self.modulus * i, self.residue + self.modulus * j)

    def spans(self, i: int, keys: range) -> list[range]:
        """The keys that the i-th reads, as disjoint ranges in order."""
        if self.modulus == 1:
            return self.pattern.spans(i, keys)
        if isinstance(self.pattern, Dilated) and self.pattern.rate == self.modulus:
            back, ahead = self.pattern.keys - 1 - self.pattern.after, self.pattern.after
            return [range(max(keys.start, i - back), min(keys.stop, i + ahead + 1))]
        spans = self.pattern.spans(self.residue + self.modulus * i, self._between(keys))
        return [range(self._first(span.start), self._first(span.stop)) for span in spans]

    def lines(self, queries: range, keys: range) -> BoundaryLines:
        """The lines on which the ends of those ranges run."""
        if self.modulus == 1:
            return self.pattern.lines(queries, keys)
        if isinstance(self.pattern, Dilated) and self.pattern.rate == self.modulus:
            back, ahead = self.pattern.keys - 1 - self.pattern.after, self.pattern.after
            return BoundaryLines(diagonals=frozenset((-back, ahead + 1)))
        rows, columns, diagonals = self.pattern.lines(self._between(queries), self._between(keys))
        return BoundaryLines(
            frozenset(map(self._first, rows)),
            frozenset(map(self._first, columns)),
            frozenset(-(-offset // self.modulus) for offset in diagonals),
        )

    def original_positions(self, some: range) -> range:
        """The places of these, as the whole pattern counts."""
        return range(self.residue + self.modulus * some.start, self.residue + self.modulus * some.stop, self.modulus)

    def _between(self, some: range) -> range:
        """Every place from the first to the last of them."""
        every = self.original_positions(some)
        return range(every.start, every[-1] + 1 if every else every.start)

    def _first(self, place: int) -> int:
        """How many of them come before a place."""
        return -((self.residue - place) // self.modulus)
