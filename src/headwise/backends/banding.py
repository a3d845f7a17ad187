"""A call cut into pieces: blocks of queries that read as many keys in the same way, so that one fused call runs all."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from ..boxes import boundary_rows, spans_covered
from ..pattern import Pattern
from .residues import ResiduePattern, find_dilation, split_by_residue

# What a pair costs in blocks of so many queries, forward and backward, against one in blocks of 64. For 128 and 256 it
# was measured alone on the machine, for 32 beside other work, for 16 not at all.
BLOCK_SIZE_COSTS = {16: 2.0, 32: 1.35, 64: 1.0, 128: 0.93, 256: 0.93}
BLOCK_SIZE_PROBE = range(2048, 2560), range(4096)  # the queries and keys over which heights are compared

KeyRanges = tuple[range, ...]


class TokenAxis(NamedTuple):
    """Tokens at neighbouring places, as a pattern counts them, each `step` slots behind the one before."""

    positions: range
    first_slot: int = 0
    slot_stride: int = 1

    def slots_of(self, some: range) -> range:
        """Where these places lie."""
        first = self.first_slot + (some.start - self.positions.start) * self.slot_stride
        return range(first, first + len(some) * self.slot_stride, self.slot_stride)


class BlockBatch(NamedTuple):
    """Blocks of as many queries, each with as many keys: their slots, and the places of those of the first block.

    `places` is None where every query of a block may read every key of it.
    """

    queries: Sequence[range]
    keys: Sequence[KeyRanges]
    first_block_positions: tuple[range, KeyRanges] | None

    @property
    def num_pairs(self) -> int:
        """The scores that it forms for each head."""
        return len(self.queries) * len(self.queries[0]) * sum(map(len, self.keys[0]))


class SparseBlock(NamedTuple):
    """Neighbouring queries, the keys that some of them read (of each axis), and the rows between two bends.

    A stretch is its first row and the one behind its last, and what these two rows read of every axis.
    """

    queries: range
    keys: tuple[KeyRanges, ...]
    row_ranges: tuple[tuple[int, int, tuple[KeyRanges, ...], tuple[KeyRanges, ...]], ...]

    @property
    def is_full(self) -> bool:
        """Whether every query reads every key."""
        return all(first == last == self.keys for _, _, first, last in self.row_ranges)

    @property
    def batching_key(self) -> object:
        """What is equal of two blocks that one fused call with one mask can run."""
        widths = tuple(len(some) for each in self.keys for some in each)
        if self.is_full:
            return len(self.queries), sum(widths), len(widths) == 1
        rows = tuple(
            (top - self.queries.start, stop - self.queries.start, self._columns_of_row(first), self._columns_of_row(last))
            for top, stop, first, last in self.row_ranges
        )
        return len(self.queries), widths, rows

    def _columns_of_row(self, read: tuple[KeyRanges, ...]) -> tuple[tuple[int, int], ...]:
        """The columns of the block that a row reads."""
        found, before = [], 0
        for every, some in zip(self.keys, read, strict=True):
            for here in every:
                inside = [(before + s.start - here.start, len(s)) for s in some if here.start <= s.start < here.stop]
                found += inside
                before += len(here)
        return tuple(found)


def plan_block_batches(pattern: Pattern, query_axis: TokenAxis, key_axes: Sequence[TokenAxis]) -> list[BlockBatch]:
    """All that these queries read of these keys, each pair once; queries that read nothing are in no piece.

    >>> from headwise.pattern import Window
    >>> [(len(one.queries), one.pairs) for one in plan_block_batches(Window(256), TokenAxis(range(1024)), [TokenAxis(range(1024))])]
    [(1, 4096), (1, 8192), (1, 12288), (1, 16384), (11, 224576), (1, 20416)]
    """
    count, rows = find_dilation(pattern), choose_block_size(pattern)
    found: dict[object, tuple[list[range], list[KeyRanges], tuple[range, KeyRanges] | None]] = {}
    for rest in sorted({place % count for place in query_axis.positions[:count]}):
        thin, queries = ResiduePattern(pattern, count, rest), _residue_axis(query_axis, count, rest)
        axes = [_residue_axis(axis, count, rest) for axis in key_axes]
        for block in _make_sparse_blocks(thin, queries.positions, [axis.positions for axis in axes], rows):
            places = None if block.is_full else _block_positions(thin, block)
            piece = found.setdefault(block.batching_key, ([], [], places))
            piece[0].append(queries.slots_of(block.queries))
            some = zip(axes, block.keys, strict=True)
            piece[1].append(tuple(axis.slots_of(one) for axis, ranges in some for one in ranges))
    return [BlockBatch(*piece) for piece in found.values()]


def count_batch_pairs(pattern: Pattern, queries: range, keys: range) -> int:
    """The pairs of all pieces, where tokens lie in order: as a series between two bends.

    >>> from headwise.pattern import Window
    >>> count_batch_pairs(Window(256), range(1024), range(1024))
    285952
    >>> 319 * 10**15 - count_batch_pairs(Window(256), range(10**15), range(10**15))  # each reads 319 but near the beginning
    40704
    """
    count, rows = find_dilation(pattern), choose_block_size(pattern)
    split = zip(split_by_residue(count, queries), split_by_residue(count, keys), strict=True)
    return sum(_sum_batch_pairs(ResiduePattern(pattern, count, rest), *some, rows) for rest, some in enumerate(split) if all(some))


_BLOCK_SIZES: dict[str, int] = {}


def choose_block_size(pattern: Pattern) -> int:
    """How many queries a block has: the more, the better its products run, and more keys are read by few of them."""
    if (told := pattern.text) not in _BLOCK_SIZES:
        thin = ResiduePattern(pattern, find_dilation(pattern), 0)
        costs = {rows: each * _pairs_of_sparse_blocks(thin, *BLOCK_SIZE_PROBE, rows) for rows, each in BLOCK_SIZE_COSTS.items()}
        _BLOCK_SIZES[told] = min(costs, key=costs.__getitem__)
    return _BLOCK_SIZES[told]


def _residue_axis(axis: TokenAxis, count: int, rest: int) -> TokenAxis:
    """Those tokens whose place leaves this rest, at places counted among themselves."""
    places = split_by_residue(count, axis.positions)[rest] if count > 1 else axis.positions
    return TokenAxis(places, axis.first_slot + places.start * count + rest - axis.positions.start, axis.slot_stride * count)


def _block_positions(thin: ResiduePattern, block: SparseBlock) -> tuple[range, KeyRanges]:
    """Where the queries and keys of a block stand, as the whole pattern counts."""
    return thin.original_positions(block.queries), tuple(thin.original_positions(some) for each in block.keys for some in each)


def _split_at_multiples(queries: range, rows: int) -> Iterator[range]:
    """Blocks that end at multiples of `rows`, as the blocks of a pattern do."""
    inside = range(queries.start // rows * rows + rows, queries.stop, rows)
    yield from (range(start, stop) for start, stop in pairwise([queries.start, *inside, queries.stop]))


def _make_sparse_blocks(thin: ResiduePattern, queries: range, told: Sequence[range], rows: int) -> Iterator[SparseBlock]:
    """Blocks of queries with the keys that they read; those that read nothing are left out."""
    if not queries:
        return
    turns = sorted({*queries[:1], queries.stop}.union(*(boundary_rows(thin, queries, keys) for keys in told if keys)))
    for some in _split_at_multiples(queries, rows):
        inner = turns[bisect_right(turns, some.start) : bisect_left(turns, some.stop)]
        block = _make_sparse_block(thin, some, inner, told)
        if any(block.keys):
            yield block


def _make_sparse_block(thin: ResiduePattern, queries: range, turns: Sequence[int], told: Sequence[range]) -> SparseBlock:
    stretches, reached = [], [list[range]() for _ in told]
    pending = list(pairwise([queries.start, *turns, queries.stop]))[::-1]
    while pending:
        top, stop = pending.pop()
        first, last = (tuple(_key_ranges_of_row(thin, i, keys) for keys in told) for i in (top, stop - 1))
        if any(len(a) != len(b) for a, b in zip(first, last, strict=True)):
            # Ranges touch or fall apart in between: such rows are looked at one by one.
            pending += [(row, row + 1) for row in reversed(range(top, stop))]
            continue
        stretches.append((top, stop, first, last))
        for ranges, some, other in zip(reached, first, last, strict=True):
            ranges += [range(min(a.start, b.start), max(a.stop, b.stop)) for a, b in zip(some, other, strict=True)]
    return SparseBlock(queries, tuple(_merge_ranges(ranges) for ranges in reached), tuple(stretches))


def _key_ranges_of_row(thin: ResiduePattern, i: int, keys: range) -> KeyRanges:
    return _merge_ranges(thin.spans(i, keys)) if keys else ()


def _merge_ranges(ranges: Sequence[range]) -> KeyRanges:
    """The same keys as ranges of which no two touch."""
    found: list[range] = []
    for one in spans_covered(ranges, 1):
        if found and found[-1].stop == one.start:
            found[-1] = range(found[-1].start, one.stop)
        else:
            found.append(one)
    return tuple(found)


def _sum_batch_pairs(thin: ResiduePattern, queries: range, keys: range, rows: int) -> int:
    turns, total, at = boundary_rows(thin, queries, keys), 0, queries.start
    for top, stop in pairwise(turns) if len(turns) < len(queries) // rows else ():
        first = -(-max(top, at) // rows) * rows
        count = (stop - first) // rows
        if count > 2:
            ends = [_pairs_of_sparse_blocks(thin, range(n, n + rows), keys, rows) for n in (first, first + (count - 1) * rows)]
            total += _pairs_of_sparse_blocks(thin, range(at, first), keys, rows) + sum(ends) * count // 2
            at = first + count * rows
    return total + _pairs_of_sparse_blocks(thin, range(at, queries.stop), keys, rows)


def _pairs_of_sparse_blocks(thin: ResiduePattern, queries: range, keys: range, rows: int) -> int:
    every = _make_sparse_blocks(thin, queries, (keys,), rows)
    return sum(len(block.queries) * sum(map(len, block.keys[0])) for block in every)
