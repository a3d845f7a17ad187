"""Exact counts of allowed (query, key) pairs without computing a mask.

A row of a mask consists of a few spans of keys. Their ends lie on straight lines: an end stays at a
fixed key (a column) or moves with the query (a diagonal). Between two intersections of such lines
the number of keys in a row is linear in the query, so the first and the last row determine the sum.
This is exact for every pattern. The cost depends on the number of intersections, which for windows,
sinks and prefixes does not grow with the sequence length.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, product
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ...util.errors import SpecError

NO_LINES: frozenset[int] = frozenset()
MAX_LINES = 2**18  # limit for block patterns; listing more lines would take minutes


class KeyRetention(NamedTuple):
    """The past tokens that later queries may attend to: the `first` tokens of the sequence and the
    latest `last`.

    `last` includes the query's own token, so it is at least 1; None means all past tokens.
    """

    first: int
    last: int | None

    @property
    def total(self) -> float:
        """The number of tokens to cache for one sequence; infinite if no token can be dropped."""
        return float("inf") if self.last is None else self.first + self.last


def smallest_retention(*retentions: KeyRetention) -> KeyRetention:
    """The retention with the fewest tokens, given several that are all sufficient; the first of
    equal ones.

    >>> smallest_retention(KeyRetention(0, None), KeyRetention(2, 4), KeyRetention(0, 6))
    KeyRetention(first=2, last=4)
    """
    return min(retentions, key=lambda retention: retention.total)


def largest_retention(*retentions: KeyRetention) -> KeyRetention:
    """The smallest retention that includes all the given ones.

    >>> largest_retention(KeyRetention(0, 4), KeyRetention(2, 1))
    KeyRetention(first=2, last=4)
    """
    lasts = [retention.last for retention in retentions if retention.last is not None]
    if len(lasts) < len(retentions):
        return KeyRetention(0, None)
    return KeyRetention(max(retention.first for retention in retentions), max(lasts))


def longest_prefix(*prefixes: int | None) -> int | None:
    """The longest of several prefix lengths; None if any of them is None.

    >>> longest_prefix(0, 3), longest_prefix(3, None)
    (3, None)
    """
    lengths = [prefix for prefix in prefixes if prefix is not None]
    return max(lengths) if len(lengths) == len(prefixes) else None


class BoundaryLines(NamedTuple):
    """Boundaries of key spans as row, column and diagonal lines.

    A span ends at key c for column c, and at key i + d of query i for diagonal d. It may jump at
    the given rows.
    """

    rows: frozenset[int] = NO_LINES
    columns: frozenset[int] = NO_LINES
    diagonals: frozenset[int] = NO_LINES

    def join(self, other: BoundaryLines) -> BoundaryLines:
        """The union of both sets of lines."""
        return BoundaryLines(*(ours | theirs for ours, theirs in zip(self, other, strict=True)))


def one_key_edges(keys: Iterable[int]) -> frozenset[int]:
    """The ends of ranges of one key each.

    >>> sorted(one_key_edges((3, 7)))
    [3, 4, 7, 8]
    """
    starts = frozenset(keys)
    return starts | {start + 1 for start in starts}


def any_true(first: Any, *conditions: Any) -> Any:
    """True where any condition holds; elementwise for tensors."""
    for condition in conditions:
        first = first | condition
    return first


class KeyBand(NamedTuple):
    """The keys below `high`, at most `back` before and at most `ahead` after the query; None means
    no bound.

    >>> [j for j in range(9) if KeyBand(back=1, ahead=2).allows(4, j)]
    [3, 4, 5, 6]
    """

    high: int | None = None
    back: int | None = None
    ahead: int | None = None

    def allows(self, i: Any, j: Any) -> Any:
        """True if query i may attend to key j."""
        conditions: list[Any] = []
        # Sums involve queries only, so that tensors of shape queries x keys are always boolean.
        if self.high is not None:
            conditions.append(j < self.high)
        if self.back is not None:
            conditions.append(j >= i - self.back)
        if self.ahead is not None:
            conditions.append(j <= i + self.ahead)
        # Without bounds: True in the broadcast shape of i and j.
        allowed, *others = conditions or [i * 0 == 0, j * 0 == 0]
        for condition in others:
            allowed = allowed & condition
        return allowed

    def spans(self, i: int, keys: range) -> list[range]:
        """The keys in `keys` that query i may attend to: one range."""
        start = keys.start if self.back is None else max(keys.start, i - self.back)
        ends = [
            end
            for end in (self.high, None if self.ahead is None else i + self.ahead + 1)
            if end is not None
        ]
        return [range(start, min([keys.stop, *ends]))]

    def lines(self, queries: range, keys: range) -> BoundaryLines:
        """The boundary lines of the band."""
        back = NO_LINES if self.back is None else {-self.back}
        ahead = NO_LINES if self.ahead is None else {self.ahead + 1}
        return BoundaryLines(
            NO_LINES,
            NO_LINES if self.high is None else frozenset({self.high}),
            frozenset(back | ahead),
        )

    @property
    def retention(self) -> KeyRetention:
        """The smallest retention that follows from the bounds."""
        by_age = KeyRetention(0, None if self.back is None else self.back + 1)
        return (
            by_age if self.high is None else smallest_retention(by_age, KeyRetention(self.high, 1))
        )

    @property
    def tokens_before_decode(self) -> int | None:
        """The number of tokens that must be processed together: 0 without keys after the query,
        else `high`.
        """
        return 0 if self.ahead == 0 else self.high


@runtime_checkable
class HasKeySpans(Protocol):
    """Methods of a pattern that counting needs."""

    def spans(self, i: int, keys: range) -> list[range]:
        """The keys in `keys` that query i may attend to, as disjoint spans in order."""
        ...

    def lines(self, queries: range, keys: range) -> BoundaryLines:
        """The boundary lines of those spans."""
        ...


def intersect(left: range, right: range) -> range:
    """The intersection of two ranges of step 1.

    >>> intersect(range(0, 5), range(3, 9))
    range(3, 5)
    """
    return range(max(left.start, right.start), min(left.stop, right.stop))


def spans_covered(spans: Iterable[range], depth: int) -> list[range]:
    """The keys contained in at least `depth` of the spans, as disjoint spans in order.

    >>> spans_covered([range(0, 4), range(2, 6)], 1), spans_covered([range(0, 4), range(2, 6)], 2)
    ([range(0, 6)], [range(2, 4)])
    """
    # Where one span stops and another starts, -1 sorts first, so the resulting spans are adjacent
    # but not merged.
    steps: list[tuple[int, int]] = []
    for span in spans:
        if span:
            steps += (span.start, 1), (span.stop, -1)
    covered: list[range] = []
    level = start = 0
    for key, step in sorted(steps):
        if step == 1 and level == depth - 1:
            start = key
        if step == -1 and level == depth:
            covered.append(range(start, key))
        level += step
    return covered


def block_grid_lines(size: int, queries: range, keys: range) -> BoundaryLines:
    """The lines of a grid of size x size blocks within the ranges.

    >>> sorted(block_grid_lines(4, range(3, 9), range(0, 4)).rows)
    [4, 8]
    """
    if len(queries) // size > MAX_LINES:
        limit = MAX_LINES * size
        raise SpecError(
            f"cannot count {len(queries)} tokens in blocks of {size}: too many blocks; give at "
            f"most {limit}"
        )
    rows, columns = (
        range(-(-axis.start // size) * size, axis.stop, size) for axis in (queries, keys)
    )
    return BoundaryLines(frozenset(rows), frozenset(columns), NO_LINES)


def count_pairs(pattern: HasKeySpans, queries: range, keys: range) -> int:
    """The number of allowed pairs in two non-empty ranges.

    Two rows are measured between neighbouring intersections of lines, so never more than twice the
    number of queries.
    """
    total = 0
    for top, stop in pairwise(boundary_rows(pattern, queries, keys)):
        first = last = sum(map(len, pattern.spans(top, keys)))
        if stop - top > 1:
            last = sum(map(len, pattern.spans(stop - 1, keys)))
        total += (first + last) * (stop - top) // 2  # an arithmetic series; the division is exact
    return total


def union_of_spans(pattern: HasKeySpans, queries: range, keys: range) -> list[range]:
    """The keys that at least one of the queries may attend to, as disjoint spans in order."""
    spans: list[range] = []
    for first, last in spans_of_stretches(pattern, queries, keys):
        ends = zip(first, last, strict=True)
        spans += [range(min(a.start, b.start), max(a.stop, b.stop)) for a, b in ends]
    return spans_covered(spans, 1)


def intersection_of_spans(pattern: HasKeySpans, queries: range, keys: range) -> list[range]:
    """The keys that all of the queries may attend to, as disjoint spans in order; without those
    that lie in different spans of two queries.
    """
    spans: list[range] = []
    num_stretches = 0
    for first, last in spans_of_stretches(pattern, queries, keys):
        num_stretches += 1
        spans += map(intersect, first, last)
    return spans_covered(spans, num_stretches)


def spans_of_stretches(
    pattern: HasKeySpans, queries: range, keys: range
) -> Iterator[tuple[list[range], list[range]]]:
    """Yield the spans of the first and the last query of stretches of queries.

    Between these two, the ends of each span move by at most one key per query, all in the same
    direction. Where spans appear or vanish, a stretch is one query.
    """
    for top, stop in pairwise(boundary_rows(pattern, queries, keys)):
        first = list(filter(None, pattern.spans(top, keys)))
        last = list(filter(None, pattern.spans(stop - 1, keys)))
        if len(first) == len(last):
            yield first, last
        else:
            for i in range(top, stop):
                own = list(filter(None, pattern.spans(i, keys)))
                yield own, own


def boundary_rows(pattern: HasKeySpans, queries: range, keys: range) -> Sequence[int]:
    """The rows between which the ends of all spans move along straight lines; at most all rows."""
    rows, _, diagonals = pattern.lines(queries, keys[:0])
    # Columns that no diagonal intersects within these rows have no effect, and there may be many of
    # them.
    reachable = range(
        queries.start + min(diagonals, default=0), queries.stop + max(diagonals, default=0) + 1
    )
    columns = pattern.lines(queries, intersect(keys, reachable)).columns | {keys.start, keys.stop}
    if len(rows) + len(columns) * len(diagonals) < len(queries):
        intersections = rows | {
            column - diagonal for column, diagonal in product(columns, diagonals)
        }
        # `|` of sets instead of set.union(generator): torch.compile loses its elements in a trace.
        return sorted(
            {queries.start, queries.stop} | {row for row in intersections if row in queries}
        )
    return range(queries.start, queries.stop + 1)
