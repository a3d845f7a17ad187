"""Counting without looking: a row of a mask is a few spans of keys, and their ends move on straight lines.

An end stands still (a column) or walks with the query (a diagonal). Between two crossings of such lines the
length of a row is linear in the query, so the first and last row give the sum of all. That is exact for every
pattern; its cost follows the crossings, which for windows, sinks and prefixes do not grow with the lengths.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ..errors import SpecError

NO_LINES: frozenset[int] = frozenset()
MAX_LINES = 2**18  # of a board: more would be listed one by one for minutes


class KeyRetention(NamedTuple):
    """Which remembered tokens a later query may still read: the `first` ones for ever, and the latest `last`.

    `last` counts the query's own token, so it is at least 1; None means all of them.
    """

    first: int
    last: int | None

    @property
    def total(self) -> float:
        """The tokens a cache must hold for one sequence, without bound if nothing may be forgotten."""
        return float("inf") if self.last is None else self.first + self.last


def smallest_retention(*memories: KeyRetention) -> KeyRetention:
    """The cheapest of several true promises, the earlier one when they cost the same.

    >>> smallest_retention(KeyRetention(0, None), KeyRetention(2, 4), KeyRetention(0, 6))
    KeyRetention(first=2, last=4)
    """
    return min(memories, key=lambda memory: memory.total)


def largest_retention(*memories: KeyRetention) -> KeyRetention:
    """The promise that covers all the given ones.

    >>> largest_retention(KeyRetention(0, 4), KeyRetention(2, 1))
    KeyRetention(first=2, last=4)
    """
    lasts = [memory.last for memory in memories if memory.last is not None]
    if len(lasts) < len(memories):
        return KeyRetention(0, None)
    return KeyRetention(max(memory.first for memory in memories), max(lasts))


class BoundaryLines(NamedTuple):
    """Where the ends of spans run: at key c (columns), at i + d (diagonals); at rows they may jump."""

    rows: frozenset[int] = NO_LINES
    columns: frozenset[int] = NO_LINES
    diagonals: frozenset[int] = NO_LINES

    def join(self, other: BoundaryLines) -> BoundaryLines:
        """All lines of both."""
        return BoundaryLines(*(mine | theirs for mine, theirs in zip(self, other, strict=True)))


def all_true(first: Any, *rest: Any) -> Any:
    """Whether all hold, elementwise for tensors."""
    for test in rest:
        first = first & test
    return first


def any_true(first: Any, *rest: Any) -> Any:
    """Whether any holds, elementwise for tensors."""
    for test in rest:
        first = first | test
    return first


class KeyBand(NamedTuple):
    """The keys below `high`, at most `back` before and at most `ahead` after the query; None = no bound.

    >>> [j for j in range(9) if KeyBand(back=1, ahead=2).allows(4, j)]
    [3, 4, 5, 6]
    """

    high: int | None = None
    back: int | None = None
    ahead: int | None = None

    def allows(self, i: Any, j: Any) -> Any:
        """Whether query i reads key j."""
        tests: list[Any] = []
        # The sums are taken on the queries alone, so that tensors grow to queries x keys only as booleans.
        if self.high is not None:
            tests.append(j < self.high)
        if self.back is not None:
            tests.append(j >= i - self.back)
        if self.ahead is not None:
            tests.append(j <= i + self.ahead)
        # Without a bound: true, in the shape of both.
        return all_true(*tests) if tests else all_true(i * 0 == 0, j * 0 == 0)

    def span(self, i: int, keys: range) -> range:
        """The keys that query i reads."""
        start = keys.start if self.back is None else max(keys.start, i - self.back)
        ends = [end for end in (self.high, None if self.ahead is None else i + self.ahead + 1) if end is not None]
        return range(start, min([keys.stop, *ends]))

    @property
    def lines(self) -> BoundaryLines:
        """The lines its two ends run on."""
        back = NO_LINES if self.back is None else {-self.back}
        ahead = NO_LINES if self.ahead is None else {self.ahead + 1}
        return BoundaryLines(
            NO_LINES, NO_LINES if self.high is None else frozenset({self.high}), frozenset(back | ahead)
        )

    @property
    def memory(self) -> KeyRetention:
        """The cheapest promise its bounds give."""
        by_age = KeyRetention(0, None if self.back is None else self.back + 1)
        return by_age if self.high is None else smallest_retention(by_age, KeyRetention(self.high, 1))

    @property
    def tokens_before_decode(self) -> int | None:
        """How many tokens must arrive together: none if it never reads ahead, else those below `high`."""
        return 0 if self.ahead == 0 else self.high


@runtime_checkable
class HasKeySpans(Protocol):
    """What counting needs to know of a pattern."""

    def spans(self, i: int, keys: range) -> list[range]:
        """The keys that query i reads among `keys`, as disjoint spans in order."""
        ...

    def lines(self, queries: range, keys: range) -> BoundaryLines:
        """The lines on which the ends of those spans run."""
        ...


def intersect(left: range, right: range) -> range:
    """The positions in both of two step-1 ranges.

    >>> intersect(range(0, 5), range(3, 9))
    range(3, 5)
    """
    return range(max(left.start, right.start), min(left.stop, right.stop))


def spans_covered(spans: Iterable[range], depth: int) -> list[range]:
    """The keys covered by at least `depth` of the spans, as disjoint spans in order.

    >>> spans_covered([range(0, 4), range(2, 6)], 1), spans_covered([range(0, 4), range(2, 6)], 2)
    ([range(0, 6)], [range(2, 4)])
    """
    # Where one span stops and another starts, -1 sorts first: the pieces touch, and stay disjoint.
    steps = sorted(step for span in spans if span for step in ((span.start, 1), (span.stop, -1)))
    found: list[range] = []
    level = start = 0
    for at, step in steps:
        if step == 1 and level == depth - 1:
            start = at
        if step == -1 and level == depth:
            found.append(range(start, at))
        level += step
    return found


def block_grid_lines(size: int, queries: range, keys: range) -> BoundaryLines:
    """The lines of a board of size x size blocks inside the ranges.

    >>> sorted(block_grid_lines(4, range(3, 9), range(0, 4)).rows)
    [4, 8]
    """
    if len(queries) // size > MAX_LINES:
        most = MAX_LINES * size
        raise SpecError(f"{len(queries)} tokens in blocks of {size} are counted block by block; give at most {most}")
    rows, columns = (range(-(-axis.start // size) * size, axis.stop, size) for axis in (queries, keys))
    return BoundaryLines(frozenset(rows), frozenset(columns), NO_LINES)


def count_pairs(pattern: HasKeySpans, queries: range, keys: range) -> int:
    """The number of pairs in non-empty ranges: two rows are measured between every two crossings of lines.

    There are never more rows to measure than twice the queries, nor more than the crossings ask for.
    """
    total = 0
    for top, stop in pairwise(boundary_rows(pattern, queries, keys)):
        ends = sum(len(span) for i in (top, stop - 1) for span in pattern.spans(i, keys))
        total += ends * (stop - top) // 2  # an arithmetic series; its doubled sum is even
    return total


def union_of_spans(pattern: HasKeySpans, queries: range, keys: range) -> list[range]:
    """The keys that at least one of the queries reads, as disjoint spans in order.

    Between two bends a span keeps its length or grows, and moves by at most one key a row: what its rows read
    together reaches from the first end of its first or last row to the last.
    """
    spans: list[range] = []
    for top, stop in pairwise(boundary_rows(pattern, queries, keys)):
        first, last = ([span for span in pattern.spans(i, keys) if span] for i in (top, stop - 1))
        if len(first) == len(last):
            ends = zip(first, last, strict=True)
            spans += [range(min(a.start, b.start), max(a.stop, b.stop)) for a, b in ends]
        else:
            spans += [span for i in range(top, stop) for span in pattern.spans(i, keys)]
    return spans_covered(spans, 1)


def boundary_rows(pattern: HasKeySpans, queries: range, keys: range) -> Sequence[int]:
    """The rows between which the ends of all spans run straight; never more than there are rows."""
    rows, _, diagonals = pattern.lines(queries, keys[:0])
    # Columns that no diagonal meets within these rows cannot bend anything, and may be many.
    near = range(queries.start + min(diagonals, default=0), queries.stop + max(diagonals, default=0) + 1)
    columns = pattern.lines(queries, intersect(keys, near)).columns | {keys.start, keys.stop}
    if len(rows) + len(columns) * len(diagonals) < len(queries):
        crossings = rows | {column - diagonal for column in columns for diagonal in diagonals}
        # No generator is handed to `union`: traced for a compiler, it would lose what it gives.
        return sorted({queries.start, queries.stop} | {at for at in crossings if at in queries})
    return range(queries.start, queries.stop + 1)
