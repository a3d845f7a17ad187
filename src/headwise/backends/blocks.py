"""A call in blocks of queries, each with the keys that some of its queries may read, and no others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..boxes import boundary_rows
from ..pattern import Pattern
from ..terms import CallSize
from ..tokens import AttentionMask, SequenceInfo
from .job import CoreInputs, CallSignature

QUERY_BLOCK_SIZE = 128
QUERY_BLOCK_LENGTHS = (QUERY_BLOCK_SIZE - 1, QUERY_BLOCK_SIZE, QUERY_BLOCK_SIZE + 1, 2 * QUERY_BLOCK_SIZE + 3)  # lengths at which a block more is begun


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


def count_block_pairs(job: CallSignature, work: CallSize) -> int:
    """The pairs of one row whose scores are formed, for queries that are the last of the keys."""
    if work.queries <= QUERY_BLOCK_SIZE:
        return work.queries * work.keys
    # Tokens of a source are counted from 0 like those that ask.
    first = work.keys - work.queries if job.spec.source is None else 0
    return sum_block_pairs(job.spec.pattern, range(first, first + work.queries), range(work.keys))


def sum_block_pairs(pattern: Pattern, queries: range, keys: range) -> int:
    """The pairs of all blocks: as a series those between two bends, where what a block may read grows evenly.

    >>> from headwise.pattern import Window
    >>> sum_block_pairs(Window(1000), range(10**15), range(10**15)) == 10**15 * 1127 - 128 * sum(range(1127 - 1024, 1127, 128))
    True
    """
    turns, total, at = boundary_rows(pattern, queries, keys), 0, queries.start
    for top, stop in pairwise(turns) if len(turns) < len(queries) // QUERY_BLOCK_SIZE else ():
        first = queries.start + -(-(max(top, at) - queries.start) // QUERY_BLOCK_SIZE) * QUERY_BLOCK_SIZE
        count = (stop - first) // QUERY_BLOCK_SIZE
        if count > 2:
            ends = [_list_block_pairs(pattern, range(n, n + QUERY_BLOCK_SIZE), keys) for n in (first, first + (count - 1) * QUERY_BLOCK_SIZE)]
            total += _pairs_of_blocks(pattern, range(at, first), keys) + sum(ends) * count // 2
            at = first + count * QUERY_BLOCK_SIZE
    return total + _pairs_of_blocks(pattern, range(at, queries.stop), keys)


def _pairs_of_blocks(pattern: Pattern, queries: range, keys: range) -> int:
    return sum(block.num_pairs for block in split_queries(pattern, queries, keys)) if queries else 0


def _list_block_pairs(pattern: Pattern, queries: range, keys: range) -> int:
    return len(queries) * sum(map(len, pattern.visible_keys(queries, keys)))


class CallBlocks:
    """The blocks of one call: what each sees and is handed."""

    def __init__(self, sight: AttentionMask, inputs: CoreInputs) -> None:
        self.sight, self.inputs = sight, inputs
        self.all = list(self._planned())

    def _planned(self) -> Iterator[QueryBlock]:
        asks, told = self.sight.queries, self.sight.keys
        if asks.start is None or told.start is None or asks.count <= QUERY_BLOCK_SIZE:
            return split_unordered_queries(asks.count, told.count)
        queries = range(asks.start, asks.start + asks.count)
        return split_queries(self.sight.pattern, queries, range(told.start, told.start + told.count))

    def mask_of(self, block: QueryBlock) -> AttentionMask:
        """Who may read whom inside one block."""
        asks, told = self.sight.queries, self.sight.keys
        return AttentionMask(_slice_sequence(asks, (block.queries,)), _slice_sequence(told, block.keys), self.sight.pattern)

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
