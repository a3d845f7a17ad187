"""What every pattern is and does, and how two patterns join."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from functools import reduce
from typing import Any, final

from headwise.boxes import KeyBand, BoundaryLines, KeyRetention, any_true, smallest_retention, largest_retention, spans_covered, union_of_spans, count_pairs
from headwise.errors import SpecError


@dataclass(frozen=True, repr=False)
class Pattern(ABC):
    """Which keys a query may read."""

    @abstractmethod
    def allows(self, i: Any, j: Any) -> Any:
        """Whether query i may read key j: a bool for ints, a boolean tensor for tensors that broadcast."""

    @property
    @abstractmethod
    def retention(self) -> KeyRetention:
        """What later queries may still read: allows(i, j) and j <= i imply j < first or i - j < last."""

    @property
    @abstractmethod
    def tokens_before_decode(self) -> int | None:
        """The tokens that must arrive together before decoding one by one is exact; None = no such number."""

    @abstractmethod
    def spans(self, i: int, keys: range) -> list[range]:
        """The keys that query i may read among `keys`, as disjoint step-1 ranges in order."""

    @abstractmethod
    def lines(self, queries: range, keys: range) -> BoundaryLines:
        """The lines on which the ends of the spans run."""

    @final
    def pairs(self, queries: range, keys: range) -> int:
        """The number of allowed pairs of a query and a key in two step-1 ranges.

        >>> from headwise.pattern import Causal
        >>> Causal().pairs(range(1_000_000), range(1_000_000))
        500000500000
        """
        for axis in (queries, keys):
            if axis and (axis.step != 1 or axis.start < 0):
                raise SpecError(f"pairs are counted in step-1 ranges from 0 up; got {axis}; use range(start, stop)")
        return self._count(queries, keys) if queries and keys else 0

    @final
    def visible_keys(self, queries: range, keys: range) -> list[range]:
        """The keys that at least one of these queries may read, as disjoint ranges in order.

        >>> from headwise.pattern import First, Window
        >>> (Window(4) | First(2)).reach(range(100, 110), range(200))
        [range(0, 2), range(97, 110)]
        """
        return union_of_spans(self, queries, keys) if queries and keys else []

    def __and__(self, other: Pattern) -> And:
        return And(self, other)

    def __or__(self, other: Pattern) -> Or:
        return Or(self, other)

    @property
    def text(self) -> str:
        """The short form, which `parse` reads.

        >>> from headwise.pattern import Causal, First, Window
        >>> (Window(5, after=2) & (Causal() | First(2))).text
        'window(5, after=2) & (causal() | first(2))'
        """
        return _spell(self, _short_text)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return _spell(self, _code_text)

    @abstractmethod
    def _count(self, queries: range, keys: range) -> int:
        """The number of pairs, given ranges that are not empty."""


class LineCountedPattern(Pattern):
    """A pattern counted by its lines."""

    @final
    def _count(self, queries: range, keys: range) -> int:
        return count_pairs(self, queries, keys)


class BandedPattern(LineCountedPattern):
    """A pattern that is a union of boxes: everything else follows from them."""

    @property
    @abstractmethod
    def bands(self) -> tuple[KeyBand, ...]:
        """The boxes whose union it is."""

    @final
    def allows(self, i: Any, j: Any) -> Any:
        return any_true(*[box.allows(i, j) for box in self.bands])

    @final
    @property
    def retention(self) -> KeyRetention:
        return largest_retention(*(box.memory for box in self.bands))

    @final
    @property
    def tokens_before_decode(self) -> int | None:
        return longest_prefix(*(box.tokens_before_decode for box in self.bands))

    @final
    def spans(self, i: int, keys: range) -> list[range]:
        return spans_covered((box.span(i, keys) for box in self.bands), 1)

    @final
    def lines(self, queries: range, keys: range) -> BoundaryLines:
        return reduce(BoundaryLines.join, (box.lines for box in self.bands))


@dataclass(frozen=True, repr=False)
class CombinedPattern(LineCountedPattern):
    """Two patterns joined; a chain leans left however it was bracketed, so equal spellings compare equal."""

    left: Pattern
    right: Pattern

    def __post_init__(self) -> None:
        for side in (self.left, self.right):
            _check_pattern(side)
        if type(self.right) is type(self):
            object.__setattr__(self, "left", type(self)(self.left, self.right.left))
            object.__setattr__(self, "right", self.right.right)

    @final
    def lines(self, queries: range, keys: range) -> BoundaryLines:
        return self.left.lines(queries, keys).join(self.right.lines(queries, keys))


@dataclass(frozen=True, repr=False)
class And(CombinedPattern):
    """A query reads the keys that both patterns allow; it remembers what the more forgetful one needs.

    >>> from headwise.pattern import Causal, Window
    >>> [j for j in range(12) if (Window(keys=5, after=2) & Causal()).allows(8, j)]
    [6, 7, 8]
    """

    def allows(self, i: Any, j: Any) -> Any:
        return self.left.allows(i, j) & self.right.allows(i, j)

    @property
    def retention(self) -> KeyRetention:
        return smallest_retention(self.left.retention, self.right.retention)

    @property
    def tokens_before_decode(self) -> int | None:
        openings = [side.tokens_before_decode for side in (self.left, self.right) if side.tokens_before_decode is not None]
        return min(openings, default=None)

    def spans(self, i: int, keys: range) -> list[range]:
        return spans_covered([*self.left.spans(i, keys), *self.right.spans(i, keys)], 2)


@dataclass(frozen=True, repr=False)
class Or(CombinedPattern):
    """A query reads the keys that either pattern allows; it remembers what either needs.

    >>> from headwise.pattern import First, Window
    >>> [j for j in range(12) if (Window(keys=3) | First(keys=2)).allows(8, j)]
    [0, 1, 6, 7, 8]
    """

    def allows(self, i: Any, j: Any) -> Any:
        return self.left.allows(i, j) | self.right.allows(i, j)

    @property
    def retention(self) -> KeyRetention:
        return largest_retention(self.left.retention, self.right.retention)

    @property
    def tokens_before_decode(self) -> int | None:
        return longest_prefix(self.left.tokens_before_decode, self.right.tokens_before_decode)

    def spans(self, i: int, keys: range) -> list[range]:
        return spans_covered([*self.left.spans(i, keys), *self.right.spans(i, keys)], 1)


def longest_prefix(*openings: int | None) -> int | None:
    """The opening that serves all: the longest, and none if one of them has none.

    >>> longest_prefix(0, 3), longest_prefix(3, None)
    (3, None)
    """
    known = [opening for opening in openings if opening is not None]
    return max(known) if len(known) == len(openings) else None


def check_whole_number(name: str, value: object, low: int) -> int:
    """The value, if it is a whole number of at least `low` (True and 2.0 are not).

    >>> check_whole_number("keys", 4, 1)
    4
    """
    if type(value) is not int or value < low:
        raise SpecError(f"{name} must be a whole number of at least {low}; got {value!r}; use {low} or more")
    return value


def _check_pattern(side: object) -> None:
    if not isinstance(side, Pattern):
        raise SpecError(f"only patterns can be joined; got {side!r}; use parse() to read a text")


def _spell(pattern: Pattern, leaf: Callable[[Pattern], str]) -> str:
    if not isinstance(pattern, And | Or):
        return leaf(pattern)
    sign = " & " if isinstance(pattern, And) else " | "
    sides = ((side, _spell(side, leaf)) for side in (pattern.left, pattern.right))
    # & binds tighter than |, so only an Or inside an And needs brackets.
    return sign.join(f"({said})" if isinstance(pattern, And) and isinstance(side, Or) else said for side, said in sides)


def _non_default_fields(pattern: Pattern) -> dict[str, tuple[object, object]]:
    """The arguments that are not left at their default: name -> (value, default)."""
    every = {one.name: (getattr(pattern, one.name), one.default) for one in fields(pattern) if one.init}
    return {name: (value, default) for name, (value, default) in every.items() if value != default}


def _short_text(pattern: Pattern) -> str:
    said = (
        repr(value) if default is MISSING else f"{name}={value!r}" for name, (value, default) in _non_default_fields(pattern).items()
    )
    return f"{type(pattern).__name__.lower()}({', '.join(said)})"


def _code_text(pattern: Pattern) -> str:
    said = (f"{name}={value!r}" for name, (value, _) in _non_default_fields(pattern).items())
    return f"{type(pattern).__name__}({', '.join(said)})"
