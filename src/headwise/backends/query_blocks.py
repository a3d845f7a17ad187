"""Patterns whose queries read only keys at every r-th place: r texts, each read by a pattern without the gaps."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd, lcm
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..interfaces.core_types import CallSize
from ..kernels.autograd_guards import is_under_functorch
from ..masking.key_intervals import BoundaryLines, boundary_rows, spans_covered
from ..masking.patterns import And, Dilated, Or, Pattern
from ..masking.sequence_info import AttentionMask, SequenceInfo
from .core_interface import CallSignature, CoreInputs


def find_dilation(pattern: Pattern) -> int:
    """The largest r known for which allows(i, j) implies that r divides i - j.

    >>> from headwise.masking.patterns import Dilated, Window
    >>> [
    ...     find_dilation(one)
    ...     for one in (
    ...         Window(9),
    ...         Dilated(5, rate=6),
    ...         Dilated(5, rate=6) | Dilated(3, rate=4),
    ...     )
    ... ]
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


# --- A call in blocks of queries, each with the keys that some of its queries may read, and no others ---

QUERY_BLOCK_SIZE = 128
QUERY_BLOCK_LENGTHS = (
    QUERY_BLOCK_SIZE - 1,
    QUERY_BLOCK_SIZE,
    QUERY_BLOCK_SIZE + 1,
    2 * QUERY_BLOCK_SIZE + 3,
)  # lengths at which a block more is begun


class QueryBlock(NamedTuple):
    """Queries, and the keys they may read as disjoint ranges, both counted from the first of the call."""

    queries: range
    keys: tuple[range, ...]

    @property
    def num_pairs(self) -> int:
        """The scores it forms for each head."""
        return len(self.queries) * sum(map(len, self.keys))


def split_queries(pattern: Pattern, queries: range, keys: range) -> Iterator[QueryBlock]:
    """The blocks of queries and keys that stand at these positions."""
    for start, stop in _split_into_blocks(len(queries)):
        reach = pattern.visible_keys(queries[start:stop], keys)
        yield QueryBlock(range(start, stop), tuple(range(s.start - keys.start, s.stop - keys.start) for s in reach))


def _split_into_blocks(count: int) -> Iterator[tuple[int, int]]:
    return pairwise([*range(0, max(count, 1), QUERY_BLOCK_SIZE), count])


def split_unordered_queries(queries: int, keys: int) -> Iterator[QueryBlock]:
    """Blocks of tokens that stand who knows where: each may read every key."""
    for start, stop in _split_into_blocks(queries):
        yield QueryBlock(range(start, stop), (range(keys),))


def count_formed_pairs(call: CallSignature, size: CallSize) -> int:
    """The pairs of one row whose scores are formed, for queries that are the last of the keys."""
    if size.queries <= QUERY_BLOCK_SIZE:
        return size.queries * size.keys
    # Tokens of a source are counted from 0 like those that ask.
    first = size.keys - size.queries if call.spec.source is None else 0
    return sum_block_pairs(call.spec.pattern, range(first, first + size.queries), range(size.keys))


def sum_block_pairs(pattern: Pattern, queries: range, keys: range) -> int:
    """The pairs of all blocks: as a series those between two bends, where what a block may read grows evenly.

    >>> from headwise.masking.patterns import Window
    >>> sum_block_pairs(Window(1000), range(10**15), range(10**15)) == 10**15 * 1127 - 128 * sum(
    ...     range(1127 - 1024, 1127, 128)
    ... )
    True
    """
    turns, total, at = boundary_rows(pattern, queries, keys), 0, queries.start
    for top, stop in pairwise(turns) if len(turns) < len(queries) // QUERY_BLOCK_SIZE else ():
        first = queries.start + -(-(max(top, at) - queries.start) // QUERY_BLOCK_SIZE) * QUERY_BLOCK_SIZE
        count = (stop - first) // QUERY_BLOCK_SIZE
        if count > 2:
            ends = [
                _list_block_pairs(pattern, range(n, n + QUERY_BLOCK_SIZE), keys)
                for n in (first, first + (count - 1) * QUERY_BLOCK_SIZE)
            ]
            total += _pairs_of_blocks(pattern, range(at, first), keys) + sum(ends) * count // 2
            at = first + count * QUERY_BLOCK_SIZE
    return total + _pairs_of_blocks(pattern, range(at, queries.stop), keys)


def _pairs_of_blocks(pattern: Pattern, queries: range, keys: range) -> int:
    return sum(block.num_pairs for block in split_queries(pattern, queries, keys)) if queries else 0


def _list_block_pairs(pattern: Pattern, queries: range, keys: range) -> int:
    return len(queries) * sum(map(len, pattern.visible_keys(queries, keys)))


class CallBlocks:
    """The blocks of one call: what each sees and is handed."""

    def __init__(self, attention_mask: AttentionMask, inputs: CoreInputs) -> None:
        self.attention_mask, self.inputs = attention_mask, inputs
        self.all = list(self._planned())

    def _planned(self) -> Iterator[QueryBlock]:
        asks, told = self.attention_mask.queries, self.attention_mask.keys
        if asks.start is None or told.start is None or asks.count <= QUERY_BLOCK_SIZE:
            return split_unordered_queries(asks.count, told.count)
        queries = range(asks.start, asks.start + asks.count)
        return split_queries(self.attention_mask.pattern, queries, range(told.start, told.start + told.count))

    def mask_of(self, block: QueryBlock) -> AttentionMask:
        """Who may read whom inside one block."""
        asks, told = self.attention_mask.queries, self.attention_mask.keys
        return AttentionMask(
            _slice_sequence(asks, (block.queries,)), _slice_sequence(told, block.keys), self.attention_mask.pattern
        )

    def inputs_of(self, block: QueryBlock) -> CoreInputs:
        """The tensors of one block."""
        return slice_inputs(self.inputs, block)


def slice_inputs(inputs: CoreInputs, block: QueryBlock) -> CoreInputs:
    """Of a call's tensors those of one block."""
    q, k, v, asked, entry, state, _ = inputs
    rows = block.queries
    asked = asked._replace(
        x_BTD=asked.x_BTD[:, rows.start : rows.stop],
        q_BTHK=asked.q_BTHK[:, rows.start : rows.stop],
        sequence=_slice_sequence(asked.sequence, (rows,)),
    )
    kept = {name: _slice_rows(held, block.keys) for name, held in entry.items()}
    q = q[:, rows.start : rows.stop]
    return CoreInputs(q, _slice_rows(k, block.keys), _slice_rows(v, block.keys), asked, kept, state)


def _slice_sequence(tokens: SequenceInfo, ranges: Sequence[range]) -> SequenceInfo:
    position, segment = (_slice_rows(t, ranges) for t in (tokens.position, tokens.segment))
    start = tokens.start + ranges[0].start if tokens.start is not None and len(ranges) == 1 else None
    return SequenceInfo(position, segment, start, checked=True)


def _slice_rows(t: Tensor, ranges: Sequence[range]) -> Tensor:
    """These neighbours of dimension 1: a view where they are one range."""
    if len(ranges) == 1:
        return t[:, ranges[0].start : ranges[0].stop]
    index = [torch.arange(r.start, r.stop, device=t.device) for r in ranges]
    return t.index_select(1, torch.cat(index) if index else torch.arange(0, device=t.device))


# --- Slices of tokens whose gradients are added up in one place, where autograd would make a whole for ---

SliceRanges = tuple[range, ...]


def gather_slices(x: Tensor, range_lists: Sequence[SliceRanges]) -> Sequence[Tensor]:
    """For each of these, its neighbours of dimension 1 side by side: a view where they are one range."""
    if torch.is_grad_enabled() and x.requires_grad and not is_under_functorch():
        return _GatherSlices.apply(x, [[(some.start, some.stop) for some in ranges] for ranges in range_lists])
    return [_concat_ranges(x, [(some.start, some.stop) for some in ranges]) for ranges in range_lists]


class _GatherSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, every: list[list[tuple[int, int]]]) -> tuple[Tensor, ...]:
        ctx.every, ctx.shape = every, x.shape
        return tuple(_concat_ranges(x, ranges) for ranges in every)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        whole = grads[0].new_zeros(ctx.shape)
        for ranges, grad in zip(ctx.every, grads, strict=True):
            begin = 0
            for start, stop in ranges:
                whole[:, start:stop] += grad[:, begin : begin + stop - start]
                begin += stop - start
        return whole, None


def _concat_ranges(x: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    if len(ranges) == 1:
        return x[:, ranges[0][0] : ranges[0][1]]
    return torch.cat([x[:, start:stop] for start, stop in ranges], 1) if ranges else x[:, :0]


# --- A call cut into pieces ----------------------------------------------------------------------------

# What a pair costs in blocks of so many queries, forward and backward, against one in blocks of 64. For 128 and 256 it
# was measured alone on the machine, for 32 beside other size, for 16 not at all.
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
            (
                top - self.queries.start,
                stop - self.queries.start,
                self._columns_of_row(first),
                self._columns_of_row(last),
            )
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

    >>> from headwise.masking.patterns import Window
    >>> [
    ...     (len(one.queries), one.num_pairs)
    ...     for one in plan_block_batches(Window(256), TokenAxis(range(1024)), [TokenAxis(range(1024))])
    ... ]
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

    >>> from headwise.masking.patterns import Window
    >>> count_batch_pairs(Window(256), range(1024), range(1024))
    285952
    >>> 319 * 10**15 - count_batch_pairs(
    ...     Window(256), range(10**15), range(10**15)
    ... )  # each reads 319 but near the beginning
    40704
    """
    count, rows = find_dilation(pattern), choose_block_size(pattern)
    split = zip(split_by_residue(count, queries), split_by_residue(count, keys), strict=True)
    return sum(
        _sum_batch_pairs(ResiduePattern(pattern, count, rest), *some, rows)
        for rest, some in enumerate(split)
        if all(some)
    )


_BLOCK_SIZES: dict[str, int] = {}


def choose_block_size(pattern: Pattern) -> int:
    """How many queries a block has: the more, the better its products run, and more keys are read by few of them."""
    if (told := pattern.text) not in _BLOCK_SIZES:
        thin = ResiduePattern(pattern, find_dilation(pattern), 0)
        costs = {
            rows: each * _pairs_of_sparse_blocks(thin, *BLOCK_SIZE_PROBE, rows)
            for rows, each in BLOCK_SIZE_COSTS.items()
        }
        _BLOCK_SIZES[told] = min(costs, key=costs.__getitem__)
    return _BLOCK_SIZES[told]


def _residue_axis(axis: TokenAxis, count: int, rest: int) -> TokenAxis:
    """Those tokens whose place leaves this rest, at places counted among themselves."""
    places = split_by_residue(count, axis.positions)[rest] if count > 1 else axis.positions
    return TokenAxis(
        places, axis.first_slot + places.start * count + rest - axis.positions.start, axis.slot_stride * count
    )


def _block_positions(thin: ResiduePattern, block: SparseBlock) -> tuple[range, KeyRanges]:
    """Where the queries and keys of a block stand, as the whole pattern counts."""
    return thin.original_positions(block.queries), tuple(
        thin.original_positions(some) for each in block.keys for some in each
    )


def _split_at_multiples(queries: range, rows: int) -> Iterator[range]:
    """Blocks that end at multiples of `rows`, as the blocks of a pattern do."""
    inside = range(queries.start // rows * rows + rows, queries.stop, rows)
    yield from (range(start, stop) for start, stop in pairwise([queries.start, *inside, queries.stop]))


def _make_sparse_blocks(
    thin: ResiduePattern, queries: range, told: Sequence[range], rows: int
) -> Iterator[SparseBlock]:
    """Blocks of queries with the keys that they read; those that read nothing are left out."""
    if not queries:
        return
    turns = sorted({*queries[:1], queries.stop}.union(*(boundary_rows(thin, queries, keys) for keys in told if keys)))
    for some in _split_at_multiples(queries, rows):
        inner = turns[bisect_right(turns, some.start) : bisect_left(turns, some.stop)]
        block = _make_sparse_block(thin, some, inner, told)
        if any(block.keys):
            yield block


def _make_sparse_block(
    thin: ResiduePattern, queries: range, turns: Sequence[int], told: Sequence[range]
) -> SparseBlock:
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
            ends = [
                _pairs_of_sparse_blocks(thin, range(n, n + rows), keys, rows)
                for n in (first, first + (count - 1) * rows)
            ]
            total += _pairs_of_sparse_blocks(thin, range(at, first), keys, rows) + sum(ends) * count // 2
            at = first + count * rows
    return total + _pairs_of_sparse_blocks(thin, range(at, queries.stop), keys, rows)


def _pairs_of_sparse_blocks(thin: ResiduePattern, queries: range, keys: range, rows: int) -> int:
    every = _make_sparse_blocks(thin, queries, (keys,), rows)
    return sum(len(block.queries) * sum(map(len, block.keys[0])) for block in every)
