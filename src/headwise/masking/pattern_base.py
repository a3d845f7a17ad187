"""Patterns as text: reading the short form, and drawing a mask for a terminal."""

from __future__ import annotations

import ast
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import reduce
from typing import Any, Protocol, final, runtime_checkable

from ..errors import SpecError, suggest
from .key_intervals import (
    BoundaryLines,
    KeyBand,
    KeyRetention,
    any_true,
    count_pairs,
    largest_retention,
    smallest_retention,
    spans_covered,
    union_of_spans,
)

MAX_DRAWN_CELLS = 64  # a mask this wide leaves 16 of a terminal's 80 columns for the row index
FULL, PART, NONE = "█", "▒", "·"
ASCII = str.maketrans({FULL: "#", PART: "+", NONE: "."})


def parse_calls(text: str, known: Mapping[str, Any]) -> Any:
    """The value of a text made of known calls with literal arguments, `&` (which binds tighter) and `|`.

    >>> parse_calls("pair(0, right=3) | none", {"pair": lambda left, right: {left, right}, "none": lambda: set()})
    {0, 3}
    """
    # `global` is a Python keyword, so it travels as a name that is not, and every name is lowered again.
    source = re.sub(r"\bglobal\b", "Global", " ".join(text.split()))
    try:
        return _build(ast.parse(source, mode="eval").body, known)
    except SyntaxError as error:
        raise SpecError(f"not a pattern: {text!r}; write it like 'window(256) | first(4)'") from error
    except (RecursionError, MemoryError) as error:
        raise SpecError(f"nested too deeply to be read: {text[:40]!r}...; build it in Python") from error


def _build(node: ast.expr, known: Mapping[str, Any]) -> Any:
    match node:
        case ast.BinOp(left, ast.BitAnd(), right):
            return _build(left, known) & _build(right, known)
        case ast.BinOp(left, ast.BitOr(), right):
            return _build(left, known) | _build(right, known)
        case ast.Call(ast.Name(name), args, keywords):
            return _build_call(name.lower(), args, keywords, known)
        case ast.Name(name):
            return _build_call(name.lower(), [], [], known)
        case _:
            fact = f"a pattern is made of calls, & and |; got {ast.unparse(node)!r}"
            raise SpecError(f"{fact}; use one of {', '.join(sorted(known))}")


def _build_call(name: str, args: list[ast.expr], keywords: list[ast.keyword], known: Mapping[str, Any]) -> Any:
    if name not in known:
        raise SpecError(f"unknown pattern {name!r}; {suggest(name, known)}")
    signature = inspect.signature(known[name])
    try:
        named = {word.arg or "**": _literal(word.value) for word in keywords}
        if len(named) < len(keywords):  # the parser lets a repeated keyword pass
            raise TypeError("a keyword is repeated")
        bound = signature.bind(*map(_literal, args), **named)
    except (TypeError, ValueError) as error:
        usage = signature.replace(
            parameters=[field.replace(annotation=field.empty) for field in signature.parameters.values()],
            return_annotation=signature.empty,
        )
        raise SpecError(f"{name} cannot take its arguments: {error}; write {name}{usage}") from error
    return known[name](*bound.args, **bound.kwargs)


@runtime_checkable
class Drawable(Protocol):
    """What drawing needs to know of a pattern."""

    @property
    def text(self) -> str:
        """Its short form."""
        ...

    def pairs(self, queries: range, keys: range) -> int:
        """The allowed pairs in the ranges."""
        ...


def draw_pattern(pattern: Drawable, queries: int, keys: int) -> str:
    """The mask as text: one row per query, one column per key, then what its marks mean and how full it is.

    Beyond 64 queries or keys it is shrunk: a mark stands for a square of pairs, and the legend says so.
    """
    if min(queries, keys) < 1:
        raise SpecError(f"there is nothing to draw; got {queries} queries and {keys} keys; use at least 1 of each")
    side = -(-max(queries, keys) // MAX_DRAWN_CELLS)
    tops, lefts = range(0, queries, side), range(0, keys, side)
    margin = max(len(str(tops[-1])), 4)
    title = pattern.text if len(pattern.text) <= 80 else pattern.text[:77] + "..."
    # A label stands over every eighth column, so that seven digits fit before the next.
    ruler = "".join(str(left).ljust(8) for left in lefts[::8]).rstrip()
    rows = [
        f"{top:>{margin}} "
        + "".join(
            _cell_mark(pattern, _cell_ranges(top, side, queries), _cell_ranges(left, side, keys)) for left in lefts
        )
        for top in tops
    ]
    return "\n".join([title, " " * (margin + 1) + ruler, *rows, _legend(pattern, queries, keys, side)])


def _cell_ranges(start: int, size: int, end: int) -> range:
    return range(start, min(start + size, end))


def _cell_mark(pattern: Drawable, queries: range, keys: range) -> str:
    pairs = pattern.pairs(queries, keys)
    return NONE if not pairs else FULL if pairs == len(queries) * len(keys) else PART


def _legend(pattern: Drawable, queries: int, keys: int, side: int) -> str:
    pairs = pattern.pairs(range(queries), range(keys))
    counts = f"{pairs} of {queries * keys} pairs ({pairs / (queries * keys):.1%})"
    if side == 1:
        return f"rows ask, columns are read ({FULL}); {counts}"
    return f"shrunk: a mark is {side} x {side} pairs, {FULL} all, {PART} some, {NONE} none\n{counts}"


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        raise TypeError(f"{ast.unparse(node)!r} is no number") from None


# --- What every pattern is and does, and how two patterns join -----------------------------------------


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

        >>> from headwise.masking.patterns import Causal
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

        >>> from headwise.masking.patterns import First, Window
        >>> (Window(4) | First(2)).visible_keys(range(100, 110), range(200))
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

        >>> from headwise.masking.patterns import Causal, First, Window
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

    >>> from headwise.masking.patterns import Causal, Window
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
        openings = [
            side.tokens_before_decode for side in (self.left, self.right) if side.tokens_before_decode is not None
        ]
        return min(openings, default=None)

    def spans(self, i: int, keys: range) -> list[range]:
        return spans_covered([*self.left.spans(i, keys), *self.right.spans(i, keys)], 2)


@dataclass(frozen=True, repr=False)
class Or(CombinedPattern):
    """A query reads the keys that either pattern allows; it remembers what either needs.

    >>> from headwise.masking.patterns import First, Window
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
        repr(value) if default is MISSING else f"{name}={value!r}"
        for name, (value, default) in _non_default_fields(pattern).items()
    )
    return f"{type(pattern).__name__.lower()}({', '.join(said)})"


def _code_text(pattern: Pattern) -> str:
    said = (f"{name}={value!r}" for name, (value, _) in _non_default_fields(pattern).items())
    return f"{type(pattern).__name__}({', '.join(said)})"
