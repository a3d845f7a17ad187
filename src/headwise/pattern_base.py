"""What every pattern is and does, and how two patterns join."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from functools import reduce
from typing import Any, final

from headwise.boxes import Box, Lines, Memory, either, least, most, overlay, shadow, sweep
from headwise.errors import SpecError


@dataclass(frozen=True, repr=False)
class Pattern(ABC):
    """Which keys a query may read."""

    @abstractmethod
    def allows(self, i: Any, j: Any) -> Any:
        """Whether query i may read key j: a bool for ints, a boolean tensor for tensors that broadcast."""

    @property
    @abstractmethod
    def memory(self) -> Memory:
        """What later queries may still read: allows(i, j) and j <= i imply j < first or i - j < last."""

    @property
    @abstractmethod
    def opening(self) -> int | None:
        """The tokens that must arrive together before decoding one by one is exact; None = no such number."""

    @abstractmethod
    def spans(self, i: int, keys: range) -> list[range]:
        """The keys that query i may read among `keys`, as disjoint step-1 ranges in order."""

    @abstractmethod
    def lines(self, queries: range, keys: range) -> Lines:
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
    def reach(self, queries: range, keys: range) -> list[range]:
        """The keys that at least one of these queries may read, as disjoint ranges in order.

        >>> from headwise.pattern import First, Window
        >>> (Window(4) | First(2)).reach(range(100, 110), range(200))
        [range(0, 2), range(97, 110)]
        """
        return shadow(self, queries, keys) if queries and keys else []

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
        return _spell(self, _short)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return _spell(self, _code)

    @abstractmethod
    def _count(self, queries: range, keys: range) -> int:
        """The number of pairs, given ranges that are not empty."""


class Swept(Pattern):
    """A pattern counted by its lines."""

    @final
    def _count(self, queries: range, keys: range) -> int:
        return sweep(self, queries, keys)


class Boxed(Swept):
    """A pattern that is a union of boxes: everything else follows from them."""

    @property
    @abstractmethod
    def boxes(self) -> tuple[Box, ...]:
        """The boxes whose union it is."""

    @final
    def allows(self, i: Any, j: Any) -> Any:
        return either(*[box.allows(i, j) for box in self.boxes])

    @final
    @property
    def memory(self) -> Memory:
        return most(*(box.memory for box in self.boxes))

    @final
    @property
    def opening(self) -> int | None:
        return widest(*(box.opening for box in self.boxes))

    @final
    def spans(self, i: int, keys: range) -> list[range]:
        return overlay((box.span(i, keys) for box in self.boxes), 1)

    @final
    def lines(self, queries: range, keys: range) -> Lines:
        return reduce(Lines.join, (box.lines for box in self.boxes))


@dataclass(frozen=True, repr=False)
class Both(Swept):
    """Two patterns joined; a chain leans left however it was bracketed, so equal spellings compare equal."""

    left: Pattern
    right: Pattern

    def __post_init__(self) -> None:
        for side in (self.left, self.right):
            _check(side)
        if type(self.right) is type(self):
            object.__setattr__(self, "left", type(self)(self.left, self.right.left))
            object.__setattr__(self, "right", self.right.right)

    @final
    def lines(self, queries: range, keys: range) -> Lines:
        return self.left.lines(queries, keys).join(self.right.lines(queries, keys))


@dataclass(frozen=True, repr=False)
class And(Both):
    """A query reads the keys that both patterns allow; it remembers what the more forgetful one needs.

    >>> from headwise.pattern import Causal, Window
    >>> [j for j in range(12) if (Window(keys=5, after=2) & Causal()).allows(8, j)]
    [6, 7, 8]
    """

    def allows(self, i: Any, j: Any) -> Any:
        return self.left.allows(i, j) & self.right.allows(i, j)

    @property
    def memory(self) -> Memory:
        return least(self.left.memory, self.right.memory)

    @property
    def opening(self) -> int | None:
        openings = [side.opening for side in (self.left, self.right) if side.opening is not None]
        return min(openings, default=None)

    def spans(self, i: int, keys: range) -> list[range]:
        return overlay([*self.left.spans(i, keys), *self.right.spans(i, keys)], 2)


@dataclass(frozen=True, repr=False)
class Or(Both):
    """A query reads the keys that either pattern allows; it remembers what either needs.

    >>> from headwise.pattern import First, Window
    >>> [j for j in range(12) if (Window(keys=3) | First(keys=2)).allows(8, j)]
    [0, 1, 6, 7, 8]
    """

    def allows(self, i: Any, j: Any) -> Any:
        return self.left.allows(i, j) | self.right.allows(i, j)

    @property
    def memory(self) -> Memory:
        return most(self.left.memory, self.right.memory)

    @property
    def opening(self) -> int | None:
        return widest(self.left.opening, self.right.opening)

    def spans(self, i: int, keys: range) -> list[range]:
        return overlay([*self.left.spans(i, keys), *self.right.spans(i, keys)], 1)


def widest(*openings: int | None) -> int | None:
    """The opening that serves all: the longest, and none if one of them has none.

    >>> widest(0, 3), widest(3, None)
    (3, None)
    """
    known = [opening for opening in openings if opening is not None]
    return max(known) if len(known) == len(openings) else None


def whole(name: str, value: object, low: int) -> int:
    """The value, if it is a whole number of at least `low` (True and 2.0 are not).

    >>> whole("keys", 4, 1)
    4
    """
    if type(value) is not int or value < low:
        raise SpecError(f"{name} must be a whole number of at least {low}; got {value!r}; use {low} or more")
    return value


def _check(side: object) -> None:
    if not isinstance(side, Pattern):
        raise SpecError(f"only patterns can be joined; got {side!r}; use parse() to read a text")


def _spell(pattern: Pattern, leaf: Callable[[Pattern], str]) -> str:
    if not isinstance(pattern, And | Or):
        return leaf(pattern)
    sign = " & " if isinstance(pattern, And) else " | "
    sides = ((side, _spell(side, leaf)) for side in (pattern.left, pattern.right))
    # & binds tighter than |, so only an Or inside an And needs brackets.
    return sign.join(f"({said})" if isinstance(pattern, And) and isinstance(side, Or) else said for side, said in sides)


def _given(pattern: Pattern) -> dict[str, tuple[object, object]]:
    """The arguments that are not left at their default: name -> (value, default)."""
    every = {one.name: (getattr(pattern, one.name), one.default) for one in fields(pattern) if one.init}
    return {name: (value, default) for name, (value, default) in every.items() if value != default}


def _short(pattern: Pattern) -> str:
    said = (
        repr(value) if default is MISSING else f"{name}={value!r}" for name, (value, default) in _given(pattern).items()
    )
    return f"{type(pattern).__name__.lower()}({', '.join(said)})"


def _code(pattern: Pattern) -> str:
    said = (f"{name}={value!r}" for name, (value, _) in _given(pattern).items())
    return f"{type(pattern).__name__}({', '.join(said)})"
