"""A call in blocks of queries, each with the keys that some of its queries may read, and no others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..boxes import bends
from ..pattern import Pattern
from ..terms import Work
from ..tokens import Sight, Tokens
from .job import Inputs, Job

BLOCK = 128
EDGES = (BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3)  # lengths at which a block more is begun


class Block(NamedTuple):
    """Queries, and the keys they may read as disjoint ranges, both counted from the first of the call."""

    queries: range
    keys: tuple[range, ...]

    @property
    def pairs(self) -> int:
        """The scores it forms for each head."""
        return len(self.queries) * sum(map(len, self.keys))


def blocks(pattern: Pattern, queries: range, keys: range) -> Iterator[Block]:
    """The blocks of queries and keys that stand at these positions."""
    for start, stop in _cuts(len(queries)):
        reach = pattern.reach(queries[start:stop], keys)
        yield Block(range(start, stop), tuple(range(s.start - keys.start, s.stop - keys.start) for s in reach))


def _cuts(count: int) -> Iterator[tuple[int, int]]:
    return pairwise([*range(0, max(count, 1), BLOCK), count])


def anywhere(queries: int, keys: int) -> Iterator[Block]:
    """Blocks of tokens that stand who knows where: each may read every key."""
    for start, stop in _cuts(queries):
        yield Block(range(start, stop), (range(keys),))


def formed(job: Job, work: Work) -> int:
    """The pairs of one row whose scores are formed, for queries that are the last of the keys."""
    if work.queries <= BLOCK:
        return work.queries * work.keys
    # Tokens of a source are counted from 0 like those that ask.
    first = work.keys - work.queries if job.spec.source is None else 0
    return summed(job.spec.pattern, range(first, first + work.queries), range(work.keys))


def summed(pattern: Pattern, queries: range, keys: range) -> int:
    """The pairs of all blocks: as a series those between two bends, where what a block may read grows evenly.

    >>> from headwise.pattern import Window
    >>> summed(Window(1000), range(10**15), range(10**15)) == 10**15 * 1127 - 128 * sum(range(1127 - 1024, 1127, 128))
    True
    """
    turns, total, at = bends(pattern, queries, keys), 0, queries.start
    for top, stop in pairwise(turns) if len(turns) < len(queries) // BLOCK else ():
        first = queries.start + -(-(max(top, at) - queries.start) // BLOCK) * BLOCK
        count = (stop - first) // BLOCK
        if count > 2:
            ends = [_pairs(pattern, range(n, n + BLOCK), keys) for n in (first, first + (count - 1) * BLOCK)]
            total += _each(pattern, range(at, first), keys) + sum(ends) * count // 2
            at = first + count * BLOCK
    return total + _each(pattern, range(at, queries.stop), keys)


def _each(pattern: Pattern, queries: range, keys: range) -> int:
    return sum(block.pairs for block in blocks(pattern, queries, keys)) if queries else 0


def _pairs(pattern: Pattern, queries: range, keys: range) -> int:
    return len(queries) * sum(map(len, pattern.reach(queries, keys)))


class Blocks:
    """The blocks of one call: what each sees and is handed."""

    def __init__(self, sight: Sight, inputs: Inputs) -> None:
        self.sight, self.inputs = sight, inputs
        self.all = list(self._planned())

    def _planned(self) -> Iterator[Block]:
        asks, told = self.sight.queries, self.sight.keys
        if asks.start is None or told.start is None or asks.count <= BLOCK:
            return anywhere(asks.count, told.count)
        queries = range(asks.start, asks.start + asks.count)
        return blocks(self.sight.pattern, queries, range(told.start, told.start + told.count))

    def seen(self, block: Block) -> Sight:
        """Who may read whom inside one block."""
        asks, told = self.sight.queries, self.sight.keys
        return Sight(_some(asks, (block.queries,)), _some(told, block.keys), self.sight.pattern)

    def handed(self, block: Block) -> Inputs:
        """The tensors of one block."""
        q, k, v, asked, entry, state, _ = self.inputs
        rows = block.queries
        asked = asked._replace(
            x_BTD=asked.x_BTD[:, rows.start : rows.stop],
            q_BTHK=asked.q_BTHK[:, rows.start : rows.stop],
            at=_some(asked.at, (rows,)),
        )
        kept = {name: _rows(held, block.keys) for name, held in entry.items()}
        q = q[:, rows.start : rows.stop]
        return Inputs(q, _rows(k, block.keys), _rows(v, block.keys), asked, kept, state)


def _some(tokens: Tokens, ranges: Sequence[range]) -> Tokens:
    position, segment = (_rows(t, ranges) for t in (tokens.position, tokens.segment))
    start = tokens.start + ranges[0].start if tokens.start is not None and len(ranges) == 1 else None
    return Tokens(position, segment, start, checked=True)


def _rows(t: Tensor, ranges: Sequence[range]) -> Tensor:
    """These neighbours of dimension 1: a view where they are one range."""
    if len(ranges) == 1:
        return t[:, ranges[0].start : ranges[0].stop]
    index = [torch.arange(r.start, r.stop, device=t.device) for r in ranges]
    return t.index_select(1, torch.cat(index) if index else torch.arange(0, device=t.device))
