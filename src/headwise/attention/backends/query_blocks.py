"""Plans of block-sparse attention: blocks of queries, each with the ranges of keys that its queries
may attend to.

In reading order: dilated patterns as r patterns without gaps (`ResiduePattern`), blocks of
consecutive queries (`split_queries`, `CallBlocks`), and batches of equally shaped blocks
(`plan_block_batches`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise, starmap
from math import gcd, lcm
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..interfaces.core_types import CallSize
from ..masking.key_intervals import BoundaryLines, boundary_rows, spans_covered
from ..masking.patterns import And, Dilated, Or, Pattern
from ..masking.sequence_info import AttentionMask, SequenceInfo
from .core_interface import CallSignature, CoreInputs


def find_dilation(pattern: Pattern) -> int:
    """Find the largest r that is known to divide i - j for every allowed pair (i, j).

    >>> from headwise.attention.masking.patterns import Dilated, Window
    >>> [
    ...     find_dilation(one)
    ...     for one in (Window(9), Dilated(5, rate=6), Dilated(5, rate=6) | Dilated(3, rate=4))
    ... ]
    [1, 6, 2]
    """
    if isinstance(pattern, Dilated):
        return pattern.rate
    if isinstance(pattern, And):
        return lcm(find_dilation(pattern.left), find_dilation(pattern.right))
    if isinstance(pattern, Or):
        return gcd(find_dilation(pattern.left), find_dilation(pattern.right))
    return 1


def split_by_residue(count: int, positions: range) -> list[range]:
    """For each residue modulo `count`, the positions with this residue, numbered among themselves.

    >>> split_by_residue(3, range(4, 9))
    [range(2, 3), range(1, 3), range(1, 3)]
    """
    return [
        range(-((residue - positions.start) // count), -((residue - positions.stop) // count))
        for residue in range(count)
    ]


@dataclass(frozen=True)
class ResiduePattern:
    """A pattern restricted to positions with one residue: number n is `residue + modulus * n`."""

    pattern: Pattern
    modulus: int
    residue: int

    def allows(self, i: Any, j: Any) -> Any:
        """True if query i may attend to key j."""
        return self.pattern.allows(self.residue + self.modulus * i, self.residue + self.modulus * j)

    def spans(self, i: int, keys: range) -> list[range]:
        """The keys of query i as disjoint ranges, in order."""
        if self.modulus == 1:
            return self.pattern.spans(i, keys)
        if isinstance(self.pattern, Dilated) and self.pattern.rate == self.modulus:
            before = self.pattern.keys - 1 - self.pattern.after
            after = self.pattern.after
            return [range(max(keys.start, i - before), min(keys.stop, i + after + 1))]
        spans = self.pattern.spans(self.residue + self.modulus * i, self._between(keys))
        return [range(self._first(span.start), self._first(span.stop)) for span in spans]

    def lines(self, queries: range, keys: range) -> BoundaryLines:
        """The boundary lines of these ranges."""
        if self.modulus == 1:
            return self.pattern.lines(queries, keys)
        if isinstance(self.pattern, Dilated) and self.pattern.rate == self.modulus:
            before = self.pattern.keys - 1 - self.pattern.after
            after = self.pattern.after
            return BoundaryLines(diagonals=frozenset((-before, after + 1)))
        rows, columns, diagonals = self.pattern.lines(self._between(queries), self._between(keys))
        return BoundaryLines(
            frozenset(map(self._first, rows)),
            frozenset(map(self._first, columns)),
            frozenset(-(-offset // self.modulus) for offset in diagonals),
        )

    def original_positions(self, numbers: range) -> range:
        """Their positions in the whole sequence."""
        first, stop = (
            self.residue + self.modulus * number for number in (numbers.start, numbers.stop)
        )
        return range(first, stop, self.modulus)

    def _between(self, numbers: range) -> range:
        """All positions from the first to the last of them."""
        positions = self.original_positions(numbers)
        return range(positions.start, positions[-1] + 1 if positions else positions.start)

    def _first(self, position: int) -> int:
        """How many of them come before a position."""
        return -((self.residue - position) // self.modulus)


# --- Blocks of consecutive queries, each with the keys that any of its queries may attend to ------

QUERY_BLOCK_SIZE = 128
# Lengths at which the number of blocks changes, for tests of boundaries.
QUERY_BLOCK_LENGTHS = (
    QUERY_BLOCK_SIZE - 1,
    QUERY_BLOCK_SIZE,
    QUERY_BLOCK_SIZE + 1,
    2 * QUERY_BLOCK_SIZE + 3,
)


class QueryBlock(NamedTuple):
    """Consecutive queries and their keys as disjoint ranges; both are indices within the call."""

    queries: range
    keys: tuple[range, ...]

    @property
    def num_pairs(self) -> int:
        """Number of computed scores per head."""
        return len(self.queries) * sum(map(len, self.keys))


def split_queries(pattern: Pattern, queries: range, keys: range) -> Iterator[QueryBlock]:
    """Split queries at these positions into blocks, each with its keys."""
    for rows in split_range(len(queries)):
        visible = pattern.visible_keys(queries[rows.start : rows.stop], keys)
        yield QueryBlock(
            rows, tuple(range(s.start - keys.start, s.stop - keys.start) for s in visible)
        )


def split_range(count: int) -> Iterator[range]:
    """The rows of each block, of `count` rows."""
    return starmap(range, pairwise([*range(0, max(count, 1), QUERY_BLOCK_SIZE), count]))


def count_query_blocks(queries: int) -> int:
    """Number of blocks for this number of queries.

    >>> count_query_blocks(128), count_query_blocks(129)
    (1, 2)
    """
    return max(1, -(-queries // QUERY_BLOCK_SIZE))


def count_formed_pairs(call: CallSignature, size: CallSize) -> int:
    """Number of computed scores per head and row of the batch; the queries are the last tokens of
    the keys.
    """
    if size.queries <= QUERY_BLOCK_SIZE:
        return size.queries * size.keys
    # Source positions start at 0, and so do query positions.
    first = size.keys - size.queries if call.spec.source is None else 0
    return sum_block_pairs(call.pattern, range(first, first + size.queries), range(size.keys))


def sum_block_pairs(pattern: Pattern, queries: range, keys: range) -> int:
    """Number of computed scores of all blocks; long linear stretches are summed as a series.

    >>> from headwise.attention.masking.patterns import Window
    >>> sum_block_pairs(Window(1000), range(10**15), range(10**15)) == 10**15 * 1127 - 128 * sum(
    ...     range(1127 - 1024, 1127, 128)
    ... )
    True
    """

    def pairs_of(part: range) -> int:
        return sum(block.num_pairs for block in split_queries(pattern, part, keys)) if part else 0

    turns = boundary_rows(pattern, queries, keys)
    return sum_series(turns, queries, QUERY_BLOCK_SIZE, queries.start, pairs_of)


def sum_series(
    turns: Sequence[int], queries: range, rows: int, origin: int, pairs_of: Callable[[range], int]
) -> int:
    """Sum the pairs of all blocks of `rows` queries, which begin at `origin`.

    Between two turns the pairs of a block grow linearly: they are summed from the first and last.
    """
    total = 0
    at = queries.start
    for top, stop in pairwise(turns) if len(turns) < len(queries) // rows else ():
        first = origin - (origin - max(top, at)) // rows * rows
        count = (stop - first) // rows
        if count > 2:
            last = first + (count - 1) * rows
            both = pairs_of(range(first, first + rows)) + pairs_of(range(last, last + rows))
            total += pairs_of(range(at, first)) + both * count // 2
            at = first + count * rows
    return total + pairs_of(range(at, queries.stop))


def split_call(mask: AttentionMask) -> list[QueryBlock]:
    """The blocks of one call; queries at unknown positions have all keys."""
    queries = mask.queries
    keys = mask.keys
    if queries.start is None or keys.start is None or queries.count <= QUERY_BLOCK_SIZE:
        every = (range(keys.count),)
        return [QueryBlock(rows, every) for rows in split_range(queries.count)]
    query_positions = range(queries.start, queries.start + queries.count)
    key_positions = range(keys.start, keys.start + keys.count)
    return [*split_queries(mask.pattern, query_positions, key_positions)]


def slice_inputs(inputs: CoreInputs, block: QueryBlock) -> CoreInputs:
    """The inputs of one block of a call, without the probe and the gates of the whole call."""
    rows = slice(block.queries.start, block.queries.stop)
    context = inputs.query_context
    mask = inputs.mask
    queries = slice_sequence(mask.queries, (block.queries,))
    entries = {name: slice_rows(entry, block.keys) for name, entry in inputs.kv_entry.items()}
    return inputs._replace(
        q=inputs.q[:, rows],
        k=slice_rows(inputs.k, block.keys),
        v=slice_rows(inputs.v, block.keys),
        mask=AttentionMask(queries, slice_sequence(mask.keys, block.keys), mask.pattern),
        query_context=context._replace(
            x_BTD=context.x_BTD[:, rows], q_BTHK=context.q_BTHK[:, rows], sequence=queries
        ),
        kv_entry=entries,
        probe=None,
        gates=(),
        kv_by_heads=(),
    )


def slice_sequence(tokens: SequenceInfo, ranges: Sequence[range]) -> SequenceInfo:
    """The positions of some ranges of tokens."""
    position, segment = (slice_rows(t, ranges) for t in (tokens.position, tokens.segment))
    start = (
        tokens.start + ranges[0].start if tokens.start is not None and len(ranges) == 1 else None
    )
    return SequenceInfo(position, segment, start, checked=True)


def slice_rows(t: Tensor, ranges: Sequence[range]) -> Tensor:
    """Rows of dimension 1; a view if they are one range."""
    if len(ranges) == 1:
        return t[:, ranges[0].start : ranges[0].stop]
    index = [torch.arange(r.start, r.stop, device=t.device) for r in ranges]
    return t.index_select(1, torch.cat(index) if index else torch.arange(0, device=t.device))


# --- Slices with gradients added in place ---------------------------------------------------------


class GatherSlices(torch.autograd.Function):
    """For each list of ranges, the rows of dimension 1 of a tensor.

    Autograd would allocate a gradient of the full length for every slice.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, range_lists: Sequence[tuple[range, ...]]
    ) -> tuple[Tensor, ...]:
        """Return the slices."""
        ctx.range_lists = range_lists
        ctx.shape = x.shape
        return tuple(slice_rows(x, ranges) for ranges in range_lists)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the tensor."""
        x_grad = grads[0].new_zeros(ctx.shape)
        for ranges, grad in zip(ctx.range_lists, grads, strict=True):
            add_to_ranges(x_grad.transpose(0, 1), grad.transpose(0, 1), ranges)
        return x_grad, None


def add_to_ranges(total: Tensor, x: Tensor, ranges: Sequence[range]) -> None:
    """Add x to these ranges of `total`; its first axis holds the tokens of all ranges."""
    for tokens, part in zip(ranges, x.split(list(map(len, ranges))), strict=True):
        total[range_to_slice(tokens)] += part


def range_to_slice(tokens: range) -> slice:
    """Convert a range to the slice with the same indices."""
    return slice(tokens.start, tokens.stop, tokens.step)


# --- Batches of equally shaped blocks -------------------------------------------------------------

# Time per score in blocks of this many queries, forward and backward, relative to blocks of 64.
# Sizes 128 and 256 were measured on an idle machine, 32 on a busy one; 16 is an estimate.
BLOCK_SIZE_COSTS = {16: 2.0, 32: 1.35, 64: 1.0, 128: 0.93, 256: 0.93}
# queries and keys over which block sizes are compared
BLOCK_SIZE_PROBE = (range(2048, 2560), range(4096))

KeyRanges = tuple[range, ...]


class TokenAxis(NamedTuple):
    """Tokens at consecutive positions of a pattern, at every `slot_stride`-th
    slot of the tensor.
    """

    positions: range
    first_slot: int = 0
    slot_stride: int = 1

    def slots_of(self, positions: range) -> range:
        """The slots of these positions."""
        first = self.first_slot + (positions.start - self.positions.start) * self.slot_stride
        return range(first, first + len(positions) * self.slot_stride, self.slot_stride)


class BlockBatch(NamedTuple):
    """Blocks with equally many queries and keys: their slots, and the positions of the first block.

    `first_block_positions` is None if every query of a block may attend to all of its keys.
    """

    queries: Sequence[range]
    keys: Sequence[KeyRanges]
    first_block_positions: tuple[range, KeyRanges] | None

    @property
    def num_pairs(self) -> int:
        """Number of computed scores per head."""
        return len(self.queries) * len(self.queries[0]) * sum(map(len, self.keys[0]))


class SparseBlock(NamedTuple):
    """Consecutive queries, the keys (on each key axis) that any of them may attend to, and
    stretches of rows.

    Between the boundaries of a stretch, the ends of the key ranges move linearly. A stretch is
    (first row, end row, keys of the first row, keys of the last row).
    """

    queries: range
    keys: tuple[KeyRanges, ...]
    row_ranges: tuple[tuple[int, int, tuple[KeyRanges, ...], tuple[KeyRanges, ...]], ...]

    @property
    def is_full(self) -> bool:
        """True if every query may attend to every key."""
        return all(first == last == self.keys for _, _, first, last in self.row_ranges)

    @property
    def batching_key(self) -> object:
        """Return a key that is equal for blocks that can share a fused call and its mask."""
        widths = tuple(map(len, chain.from_iterable(self.keys)))
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

    def _columns_of_row(self, row_keys: tuple[KeyRanges, ...]) -> tuple[tuple[int, int], ...]:
        """The columns of a row's keys within the block, as (first column, number of columns)."""
        columns = []
        offset = 0
        for block_ranges, row_ranges in zip(self.keys, row_keys, strict=True):
            for keys in block_ranges:
                columns += [
                    (offset + part.start - keys.start, len(part))
                    for part in row_ranges
                    if keys.start <= part.start < keys.stop
                ]
                offset += len(keys)
        return tuple(columns)


def plan_block_batches(
    pattern: Pattern, query_axis: TokenAxis, key_axes: Sequence[TokenAxis]
) -> list[BlockBatch]:
    """Batches of blocks that contain every allowed pair once; queries without keys are left out.

    >>> from headwise.attention.masking.patterns import Window
    >>> [
    ...     (len(one.queries), one.num_pairs)
    ...     for one in plan_block_batches(
    ...         Window(256), TokenAxis(range(1024)), [TokenAxis(range(1024))]
    ...     )
    ... ]
    [(1, 4096), (1, 8192), (1, 12288), (1, 16384), (11, 224576), (1, 20416)]
    """
    modulus = find_dilation(pattern)
    block_size = choose_block_size(pattern)
    batches: dict[object, tuple[list[range], list[KeyRanges], tuple[range, KeyRanges] | None]] = {}
    for residue in sorted({position % modulus for position in query_axis.positions[:modulus]}):
        own_pattern = ResiduePattern(pattern, modulus, residue)
        queries = _residue_axis(query_axis, modulus, residue)
        axes = [_residue_axis(axis, modulus, residue) for axis in key_axes]
        for block in _make_sparse_blocks(
            own_pattern, queries.positions, [axis.positions for axis in axes], block_size
        ):
            positions = None
            if not block.is_full:
                places = map(own_pattern.original_positions, chain.from_iterable(block.keys))
                positions = own_pattern.original_positions(block.queries), tuple(places)
            query_slots, key_slots, _ = batches.setdefault(block.batching_key, ([], [], positions))
            query_slots.append(queries.slots_of(block.queries))
            slots: list[range] = []
            for axis, ranges in zip(axes, block.keys, strict=True):
                slots += map(axis.slots_of, ranges)
            key_slots.append(tuple(slots))
    return [BlockBatch(*batch) for batch in batches.values()]


def count_batch_pairs(pattern: Pattern, queries: range, keys: range) -> int:
    """Number of computed scores of all batches, for tokens in order; linear stretches are summed as
    a series.

    >>> from headwise.attention.masking.patterns import Window
    >>> count_batch_pairs(Window(256), range(1024), range(1024))
    285952
    >>> 319 * 10**15 - count_batch_pairs(
    ...     Window(256), range(10**15), range(10**15)
    ... )  # each query attends to 319 keys, except at the beginning
    40704
    """
    modulus = find_dilation(pattern)
    block_size = choose_block_size(pattern)
    tokens = zip(split_by_residue(modulus, queries), split_by_residue(modulus, keys), strict=True)
    total = 0
    for residue, (own_queries, own_keys) in enumerate(tokens):
        own_pattern = ResiduePattern(pattern, modulus, residue)
        pairs_of = partial(_pairs_of_sparse_blocks, own_pattern, keys=own_keys, rows=block_size)
        turns = boundary_rows(own_pattern, own_queries, own_keys)
        total += sum_series(turns, own_queries, block_size, 0, pairs_of)
    return total


_BLOCK_SIZES: dict[str, int] = {}


def choose_block_size(pattern: Pattern) -> int:
    """Number of queries per block: large blocks multiply faster, but compute more scores that the
    mask discards.
    """
    text = pattern.text
    if text not in _BLOCK_SIZES:
        own_pattern = ResiduePattern(pattern, find_dilation(pattern), 0)
        costs = {
            size: cost * _pairs_of_sparse_blocks(own_pattern, *BLOCK_SIZE_PROBE, size)
            for size, cost in BLOCK_SIZE_COSTS.items()
        }
        _BLOCK_SIZES[text] = min(costs, key=costs.__getitem__)
    return _BLOCK_SIZES[text]


def _residue_axis(axis: TokenAxis, modulus: int, residue: int) -> TokenAxis:
    """The tokens at positions with this residue, renumbered from the first."""
    numbers = split_by_residue(modulus, axis.positions)[residue] if modulus > 1 else axis.positions
    first_slot = axis.first_slot + numbers.start * modulus + residue - axis.positions.start
    return TokenAxis(numbers, first_slot, axis.slot_stride * modulus)


def _make_sparse_blocks(
    pattern: ResiduePattern, queries: range, key_positions: Sequence[range], rows: int
) -> Iterator[SparseBlock]:
    """Blocks of queries with their keys; blocks without keys are left out."""
    if not queries:
        return
    turns = sorted(
        {*queries[:1], queries.stop}.union(
            *(boundary_rows(pattern, queries, keys) for keys in key_positions if keys)
        )
    )
    multiples = range(queries.start // rows * rows + rows, queries.stop, rows)
    for block_queries in starmap(range, pairwise([queries.start, *multiples, queries.stop])):
        inner_turns = turns[
            bisect_right(turns, block_queries.start) : bisect_left(turns, block_queries.stop)
        ]
        block = _make_sparse_block(pattern, block_queries, inner_turns, key_positions)
        if any(block.keys):
            yield block


def _make_sparse_block(
    pattern: ResiduePattern, queries: range, turns: Sequence[int], key_positions: Sequence[range]
) -> SparseBlock:
    stretches = []
    block_keys = [list[range]() for _ in key_positions]
    pending = list(pairwise([queries.start, *turns, queries.stop]))[::-1]
    while pending:
        top, stop = pending.pop()
        first = tuple(_key_ranges_of_row(pattern, top, keys) for keys in key_positions)
        last = tuple(_key_ranges_of_row(pattern, stop - 1, keys) for keys in key_positions)
        if any(len(a) != len(b) for a, b in zip(first, last, strict=True)):
            # Ranges merge or split in between, so these rows are handled one by one.
            pending += [(row, row + 1) for row in reversed(range(top, stop))]
            continue
        stretches.append((top, stop, first, last))
        for ranges, first_keys, last_keys in zip(block_keys, first, last, strict=True):
            pairs = zip(first_keys, last_keys, strict=True)
            ranges += [range(min(a.start, b.start), max(a.stop, b.stop)) for a, b in pairs]
    return SparseBlock(
        queries, tuple(_merge_ranges(ranges) for ranges in block_keys), tuple(stretches)
    )


def _key_ranges_of_row(pattern: ResiduePattern, i: int, keys: range) -> KeyRanges:
    return _merge_ranges(pattern.spans(i, keys)) if keys else ()


def _merge_ranges(ranges: Sequence[range]) -> KeyRanges:
    """Merge overlapping and adjacent ranges."""
    merged: list[range] = []
    for span in spans_covered(ranges, 1):
        if merged and merged[-1].stop == span.start:
            merged[-1] = range(merged[-1].start, span.stop)
        else:
            merged.append(span)
    return tuple(merged)


def _pairs_of_sparse_blocks(pattern: ResiduePattern, queries: range, keys: range, rows: int) -> int:
    blocks = _make_sparse_blocks(pattern, queries, (keys,), rows)
    return sum(len(block.queries) * sum(map(len, block.keys[0])) for block in blocks)
