"""Base classes of attention patterns, their combination with & and |, parsing from text, and
drawing as text.
"""

from __future__ import annotations

import ast
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import reduce
from itertools import chain, pairwise, starmap
from typing import Any, ClassVar, cast, final

from ...util.errors import SpecError, suggest
from .key_intervals import (
    BoundaryLines,
    KeyBand,
    KeyRetention,
    any_true,
    boundary_rows,
    count_pairs,
    intersect,
    intersection_of_spans,
    largest_retention,
    longest_prefix,
    smallest_retention,
    spans_covered,
    union_of_spans,
)

MAX_DRAWN_CELLS = 64  # a mask this wide leaves 16 of a terminal's 80 columns for the row index
FULL = "█"
PART = "▒"
NONE = "·"


def parse_calls(text: str, functions: Mapping[str, Any]) -> Any:
    """Evaluate a text of known calls with literal arguments, `&` (which binds tighter) and `|`.

    >>> parse_calls(
    ...     "pair(0, right=3) | none",
    ...     {"pair": lambda left, right: {left, right}, "none": lambda: set()},
    ... )
    {0, 3}
    """
    # `global` is a Python keyword, so it is replaced by a valid name; all names are converted to
    # lower case later.
    source = re.sub(r"\bglobal\b", "Global", " ".join(text.split()))
    try:
        return _build(ast.parse(source, mode="eval").body, functions)
    except SyntaxError as error:
        raise SpecError(
            f"not a pattern: {text!r}; write it like 'window(256) | first(4)'"
        ) from error
    except (RecursionError, MemoryError) as error:
        raise SpecError(
            f"pattern is nested too deeply: {text[:40]!r}...; build it in Python"
        ) from error


def _build(node: ast.expr, functions: Mapping[str, Any]) -> Any:
    match node:
        case ast.BinOp(left, ast.BitAnd(), right):
            return _build(left, functions) & _build(right, functions)
        case ast.BinOp(left, ast.BitOr(), right):
            return _build(left, functions) | _build(right, functions)
        case ast.Call(ast.Name(name), args, keywords):
            return _build_call(name.lower(), args, keywords, functions)
        case ast.Name(name):
            return _build_call(name.lower(), [], [], functions)
        case _:
            problem = f"a pattern consists of calls, & and |; got {ast.unparse(node)!r}"
            raise SpecError(f"{problem}; use one of {', '.join(sorted(functions))}")


def _build_call(
    name: str, args: list[ast.expr], keywords: list[ast.keyword], functions: Mapping[str, Any]
) -> Any:
    if name not in functions:
        raise SpecError(f"unknown pattern {name!r}; {suggest(name, functions)}")
    signature = inspect.signature(functions[name])
    try:
        named = {keyword.arg or "**": _argument(keyword.value, functions) for keyword in keywords}
        if len(named) < len(keywords):  # ast.parse accepts repeated keywords
            raise TypeError("a keyword is repeated")
        bound = signature.bind(*(_argument(arg, functions) for arg in args), **named)
    except (TypeError, ValueError) as error:
        usage = signature.replace(
            parameters=[
                field.replace(annotation=field.empty) for field in signature.parameters.values()
            ],
            return_annotation=signature.empty,
        )
        raise SpecError(
            f"{name} cannot take its arguments: {error}; write {name}{usage}"
        ) from error
    return functions[name](*bound.args, **bound.kwargs)


def draw_pattern(pattern: Pattern, queries: int, keys: int) -> str:
    """The mask as text: one row per query, one column per key, and a legend with the number of
    allowed pairs.

    With more than 64 queries or keys, a character stands for a square of pairs, as the legend
    explains. Patterns per head are drawn one after the other.
    """
    if isinstance(pattern, PerHead):
        return "\n\n".join(
            f"{describe_heads(heads)}: {draw_pattern(one, queries, keys)}"
            for one, heads in pattern.groups
        )
    if min(queries, keys) < 1:
        raise SpecError(f"cannot draw {queries} queries and {keys} keys; use at least 1 of each")
    side = -(-max(queries, keys) // MAX_DRAWN_CELLS)
    tops = range(0, queries, side)
    lefts = range(0, keys, side)
    margin = max(len(str(tops[-1])), 4)
    title = pattern.text if len(pattern.text) <= 80 else pattern.text[:77] + "..."
    # Every eighth column has a label, so that labels of up to seven digits fit.
    ruler = "".join(str(left).ljust(8) for left in lefts[::8]).rstrip()
    rows: list[str] = []
    for top in tops:
        row_queries = range(top, min(top + side, queries))
        marks = ""
        for left in lefts:
            row_keys = range(left, min(left + side, keys))
            pairs = pattern.pairs(row_queries, row_keys)
            is_full = pairs == len(row_queries) * len(row_keys)
            marks += FULL if is_full else PART if pairs else NONE
        rows.append(f"{top:>{margin}} {marks}")
    pairs = pattern.pairs(range(queries), range(keys))
    counts = f"{pairs} of {queries * keys} pairs ({pairs / (queries * keys):.1%})"
    legend = f"rows are queries, columns are keys ({FULL} allowed); {counts}"
    if side > 1:
        marked = f"{side} x {side} pairs: {FULL} all, {PART} some, {NONE} none allowed"
        legend = f"each character is {marked}\n{counts}"
    return "\n".join([title, " " * (margin + 1) + ruler, *rows, legend])


def describe_heads(heads: tuple[int, ...]) -> str:
    """The numbers of some heads, as text.

    >>> describe_heads((0,)), describe_heads((1, 3))
    ('head 0', 'heads 1, 3')
    """
    return f"head{'s' * (len(heads) > 1)} {', '.join(map(str, heads))}"


def _argument(node: ast.expr, functions: Mapping[str, Any]) -> Any:
    """A literal, or a tuple of patterns."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        if isinstance(node, ast.Tuple | ast.List):
            return tuple(_build(item, functions) for item in node.elts)
        raise TypeError(f"{ast.unparse(node)!r} is not a number") from None


# --- Base classes ---------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Pattern(ABC):
    """A rule for the keys that each query may attend to.

    It also decides which past keys a KV cache must keep (`retention`).
    """

    differs_by_head: ClassVar[bool] = False  # only `PerHead` has several patterns

    @abstractmethod
    def allows(self, i: Any, j: Any) -> Any:
        """True if query i may attend to key j: a bool for ints, a boolean tensor for tensors that
        broadcast.
        """

    @property
    @abstractmethod
    def retention(self) -> KeyRetention:
        """The past keys that later queries may attend to: allows(i, j) and j <= i imply j < first
        or i - j < last.
        """

    @property
    @abstractmethod
    def tokens_before_decode(self) -> int | None:
        """The number of first tokens that must be processed together before token-by-token decoding
        is exact.

        None if no number suffices, because queries may attend to later keys anywhere in the
        sequence.
        """

    @abstractmethod
    def spans(self, i: int, keys: range) -> list[range]:
        """The keys in `keys` that query i may attend to, as disjoint ranges of step 1 in order."""

    @abstractmethod
    def lines(self, queries: range, keys: range) -> BoundaryLines:
        """The boundary lines of the spans."""

    @final
    def pairs(self, queries: range, keys: range) -> int:
        """The number of allowed (query, key) pairs in two ranges of step 1.

        >>> from headwise.attention.masking.patterns import Causal
        >>> Causal().pairs(range(1_000_000), range(1_000_000))
        500000500000
        """
        for axis in (queries, keys):
            if axis and (axis.step != 1 or axis.start < 0):
                raise SpecError(
                    f"pairs needs ranges of step 1 from 0 up, got {axis}; use range(start, stop)"
                )
        return self._count(queries, keys) if queries and keys else 0

    @final
    def visible_keys(self, queries: range, keys: range) -> list[range]:
        """The keys that at least one of these queries may attend to, as disjoint ranges in order.

        >>> from headwise.attention.masking.patterns import First, Window
        >>> (Window(4) | First(2)).visible_keys(range(100, 110), range(200))
        [range(0, 2), range(97, 110)]
        """
        return union_of_spans(self, queries, keys) if queries and keys else []

    @final
    def shared_keys(self, queries: range, keys: range) -> list[range]:
        """Keys that all of these queries may attend to, as disjoint ranges in order: all such keys
        of windows and other bands, and their unions with fixed keys.

        >>> from headwise.attention.masking.patterns import First, Window
        >>> (Window(20) | First(2)).shared_keys(range(100, 110), range(200))
        [range(0, 2), range(90, 101)]
        """
        return intersection_of_spans(self, queries, keys) if queries and keys else []

    def __and__(self, other: Pattern) -> Pattern:
        return _combine(And, self, other)

    def __or__(self, other: Pattern) -> Pattern:
        return _combine(Or, self, other)

    @property
    def text(self) -> str:
        """The pattern in the text form that `parse_pattern` reads.

        >>> from headwise.attention.masking.patterns import Causal, First, Window
        >>> (Window(5, after=2) & (Causal() | First(2))).text
        'window(5, after=2) & (causal() | first(2))'
        """
        return _format(self, is_code=False)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return _format(self, is_code=True)

    def _count(self, queries: range, keys: range) -> int:
        """The number of pairs, given ranges that are not empty."""
        return count_pairs(self, queries, keys)


class UnionPattern(Pattern):
    """Base class of unions: a query may attend to the keys that some member allows. All other
    methods follow from the members.
    """

    @property
    @abstractmethod
    def members(self) -> Sequence[KeyBand | Pattern]:
        """The bands or patterns that together form the pattern."""

    @final
    def allows(self, i: Any, j: Any) -> Any:
        return any_true(*[member.allows(i, j) for member in self.members])

    @final
    @property
    def retention(self) -> KeyRetention:
        return largest_retention(*(member.retention for member in self.members))

    @final
    @property
    def tokens_before_decode(self) -> int | None:
        return longest_prefix(*(member.tokens_before_decode for member in self.members))

    @final
    def spans(self, i: int, keys: range) -> list[range]:
        spans = (member.spans(i, keys) for member in self.members)
        return spans_covered(chain.from_iterable(spans), 1)

    def lines(self, queries: range, keys: range) -> BoundaryLines:
        return reduce(BoundaryLines.join, (member.lines(queries, keys) for member in self.members))


@dataclass(frozen=True, repr=False)
class CombinedPattern(Pattern):
    """Base class of `And` and `Or`; chains associate to the left, so that bracketing does not
    affect equality.
    """

    left: Pattern
    right: Pattern

    def __post_init__(self) -> None:
        for side in (self.left, self.right):
            _check_pattern(side)
            if isinstance(side, PerHead):
                raise SpecError(
                    f"{side.text} has a pattern for each head; combine them with the operators & "
                    "and |"
                )
        if type(self.right) is type(self):
            object.__setattr__(self, "left", type(self)(self.left, self.right.left))
            object.__setattr__(self, "right", self.right.right)

    def lines(self, queries: range, keys: range) -> BoundaryLines:
        return self.left.lines(queries, keys).join(self.right.lines(queries, keys))


@dataclass(frozen=True, repr=False)
class And(CombinedPattern):
    """A query may attend to the keys that both patterns allow; the cache keeps the smaller of both
    retentions.

    >>> from headwise.attention.masking.patterns import Causal, Window
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
        counts = [
            side.tokens_before_decode
            for side in (self.left, self.right)
            if side.tokens_before_decode is not None
        ]
        return min(counts, default=None)

    def spans(self, i: int, keys: range) -> list[range]:
        return spans_covered([*self.left.spans(i, keys), *self.right.spans(i, keys)], 2)


@dataclass(frozen=True, repr=False)
class Or(CombinedPattern, UnionPattern):
    """A query may attend to the keys that either pattern allows; the cache keeps what either needs.

    >>> from headwise.attention.masking.patterns import First, Window
    >>> [j for j in range(12) if (Window(keys=3) | First(keys=2)).allows(8, j)]
    [0, 1, 6, 7, 8]
    """

    @property
    def members(self) -> tuple[Pattern, Pattern]:
        return self.left, self.right


def _combine(kind: type[And] | type[Or], left: Pattern, right: Pattern) -> Pattern:
    """`left` and `right` combined, head by head if one of them is `PerHead`."""
    # torch.compile traces this line
    if not isinstance(left, PerHead) and not isinstance(right, PerHead):
        return kind(left, right)
    heads = max(len(side.pattern_of_head) for side in (left, right) if isinstance(side, PerHead))
    return PerHead.from_heads(
        [kind(head_pattern(left, h), head_pattern(right, h)) for h in range(heads)]
    )


# --- Patterns per head ----------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class PerHead(UnionPattern):
    """Heads with different patterns: score head h has the pattern ``patterns[pattern_of_head[h]]``.

    Examples: dilated and undilated heads (Longformer, 2004.05150), different random blocks per head
    (BigBird, 2007.14062), streaming heads, which attend to sinks and recent tokens, and retrieval
    heads (2410.10819). If scores are mixed over heads, the mask applies after mixing.

    Methods shared with other patterns describe the union: the keys that at least one head may
    attend to. Equal patterns become one, and patterns without a head are dropped.

    >>> from headwise.attention.masking.patterns import Causal, First, Window
    >>> mixed = PerHead((Causal(), Window(3) | First(1)), (0, 0, 1))
    >>> [[j for j in range(9) if head_pattern(mixed, h).allows(5, j)] for h in (0, 2)]
    [[0, 1, 2, 3, 4, 5], [0, 3, 4, 5]]
    """

    differs_by_head: ClassVar[bool] = True
    patterns: tuple[Pattern, ...]
    pattern_of_head: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("patterns", "pattern_of_head"):
            value: Any = getattr(self, name)
            if not isinstance(value, tuple | list) or not value:
                raise SpecError(
                    f"{name}={value!r} must be a tuple with at least one entry; write "
                    f"{name}=(..., ...)"
                )
        for pattern in self.patterns:
            _check_pattern(pattern)
            if isinstance(pattern, PerHead):
                raise SpecError(
                    f"a head has one pattern, not {pattern.text}; list the patterns of all heads "
                    "once"
                )
        for index in self.pattern_of_head:
            if type(index) is not int or not 0 <= index < len(self.patterns):
                problem = f"pattern_of_head={tuple(self.pattern_of_head)} has {index!r}"
                raise SpecError(
                    f"{problem}, but there are {len(self.patterns)} patterns; use "
                    f"0..{len(self.patterns) - 1}"
                )
        by_head = [self.patterns[index] for index in self.pattern_of_head]
        distinct = tuple(dict.fromkeys(by_head))
        object.__setattr__(self, "patterns", distinct)
        object.__setattr__(
            self, "pattern_of_head", tuple(distinct.index(pattern) for pattern in by_head)
        )

    @classmethod
    def from_heads(cls, patterns: Iterable[Pattern]) -> PerHead:
        """The pattern of each head, in order.

        >>> from headwise.attention.masking.patterns import Causal, Window
        >>> PerHead.from_heads([Window(4), Causal(), Window(4)]).text
        'perhead((window(4), causal()), (0, 1, 0))'
        """
        listed = tuple(patterns)
        return cls(listed, tuple(range(len(listed))))

    @property
    def groups(self) -> tuple[tuple[Pattern, tuple[int, ...]], ...]:
        """Each pattern, with the heads that have it."""
        heads = enumerate(self.pattern_of_head)
        by_pattern: list[list[int]] = [[] for _ in self.patterns]
        for head, index in heads:
            by_pattern[index].append(head)
        return tuple(
            (pattern, tuple(own)) for pattern, own in zip(self.patterns, by_pattern, strict=True)
        )

    @property
    def members(self) -> tuple[Pattern, ...]:
        return self.patterns


def head_pattern(pattern: Pattern, head: int) -> Pattern:
    """The pattern of one score head: its own in `PerHead`, else the pattern of all."""
    return (
        pattern.patterns[pattern.pattern_of_head[head]] if isinstance(pattern, PerHead) else pattern
    )


def select_heads(pattern: Pattern, heads: Iterable[int]) -> Pattern:
    """The pattern of these score heads, in order; without `PerHead` if they have one pattern.

    >>> from headwise.attention.masking.patterns import Causal, Window
    >>> select_heads(PerHead((Causal(), Window(3)), (0, 1, 1)), (2, 1))
    Window(keys=3)
    """
    if not isinstance(pattern, PerHead):
        return pattern
    selected = PerHead.from_heads(head_pattern(pattern, head) for head in heads)
    first, *others = selected.patterns
    return selected if others else first


def count_pairs_by_head(
    pattern: Pattern, queries: range, keys: range
) -> tuple[int, tuple[int, ...]]:
    """Count the pairs that any head allows, and each head's pairs; () if patterns are equal.

    >>> from headwise.attention.masking.patterns import Causal, Window
    >>> count_pairs_by_head(PerHead((Causal(), Window(2)), (0, 1)), range(4), range(4))
    (10, (10, 7))
    """
    if not isinstance(pattern, PerHead):
        return _count_fast(pattern, queries, keys), ()
    by_pattern = [_count_fast(one, queries, keys) for one in pattern.patterns]
    return _count_fast(pattern, queries, keys), tuple(
        by_pattern[index] for index in pattern.pattern_of_head
    )


COUNTED_ROWS = 512
MAX_COUNTED_CELLS = 2**32  # some ten seconds


def _count_fast(pattern: Pattern, queries: range, keys: range) -> int:
    """`pattern.pairs`; counted with tensors if spans differ per row, as in a dilated window."""
    if not queries or not keys or len(boundary_rows(pattern, queries, keys)) <= len(queries):
        return pattern.pairs(queries, keys)
    _, columns, diagonals = pattern.lines(queries, keys)
    low = min(diagonals, default=0)
    high = max(diagonals, default=0) + COUNTED_ROWS
    width = min(high - low, len(keys)) + len(columns)
    if width * len(queries) > MAX_COUNTED_CELLS:
        fact = f"cannot count {len(queries):,} tokens under the pattern {pattern.text[:60]}"
        raise SpecError(
            f"{fact}: its spans differ in every row; give at most {MAX_COUNTED_CELLS // width:,}"
        )
    total = 0
    for start in range(queries.start, queries.stop, COUNTED_ROWS):
        rows = range(start, min(start + COUNTED_ROWS, queries.stop))
        # Between two columns and away from the diagonals, a row allows all keys or none.
        near = intersect(keys, range(start + low, start + high + 1))
        ends = {
            end
            for end in (*columns, keys.start, keys.stop, near.start, near.stop)
            if end not in near[1:]
        }
        stretches = [
            span
            for span in starmap(range, pairwise(sorted(ends)))
            if span != near and intersect(keys, span)
        ]
        total += _count_cells(pattern, rows, [range(key, key + 1) for key in near])
        total += _count_cells(pattern, rows, [intersect(keys, span) for span in stretches])
    return total


def _count_cells(pattern: Pattern, queries: range, stretches: Sequence[range]) -> int:
    """Return the number of pairs of rows and keys, for stretches of keys that a row allows all or
    none of.
    """
    import torch

    i = torch.arange(queries.start, queries.stop)[:, None]
    j = torch.tensor([keys.start for keys in stretches], dtype=torch.long)
    lengths = torch.tensor([len(keys) for keys in stretches], dtype=torch.long)
    return int((pattern.allows(i, j) * lengths).sum()) if stretches else 0


def _check_pattern(side: object) -> None:
    if not isinstance(side, Pattern):
        raise SpecError(f"& and | need patterns, got {side!r}; use parse_pattern() for text")


def _format(pattern: Pattern, is_code: bool) -> str:
    """The pattern as Python code or as `parse_pattern` reads it, without default arguments."""
    if isinstance(pattern, And | Or):
        sides: list[str] = []
        for side in (pattern.left, pattern.right):
            text = _format(side, is_code)
            # & binds tighter than |, so only an Or inside an And needs brackets.
            needs_brackets = isinstance(pattern, And) and isinstance(side, Or)
            sides.append(f"({text})" if needs_brackets else text)
        return (" & " if isinstance(pattern, And) else " | ").join(sides)
    args: list[str] = []
    for field in fields(pattern):
        value: object = getattr(pattern, field.name)
        if field.init and value != field.default:
            is_named = is_code or field.default is not MISSING
            args.append(f"{field.name}={value!r}" if is_named else _value_text(value))
    name = type(pattern).__name__
    return f"{name if is_code else name.lower()}({', '.join(args)})"


def _value_text(value: Any) -> str:
    text = repr(value)
    if isinstance(value, tuple) and value and isinstance(value[0], Pattern):
        texts = [pattern.text for pattern in cast("tuple[Pattern, ...]", value)]
        text = f"({', '.join(texts)}{',' * (len(texts) == 1)})"
    return text
