"""Blocks of one call laid side by side in memory that is already there, and what they give put back or added up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .banding import BlockBatch, KeyRanges

MAX_CALL_BYTES = 2**24  # bytes of keys and values that one call reads: more would be written and read again from far away


class BatchedBlocks(NamedTuple):
    """Blocks that one fused call runs: several of one row of the batch, or with row=None one of all rows."""

    batch_row: int | None
    queries: Sequence[range]
    keys: Sequence[KeyRanges]

    def gather_queries(self, x_BTHD: Tensor) -> Tensor:
        """x_NHRD: the queries of each block; a view."""
        return self._view(x_BTHD, self.queries).transpose(1, 2)

    def gather_keys(self, x_BSGD: Tensor) -> Tensor:
        """x_NGWD: the keys that each block reads; a view where these are one range."""
        if len(self.keys[0]) == 1:
            return self._view(x_BSGD, [only for (only,) in self.keys]).transpose(1, 2)
        if self.batch_row is None:
            return torch.cat([x_BSGD[:, _range_to_slice(some)] for some in self.keys[0]], 1).transpose(1, 2)
        every = [x_BSGD[self.batch_row, _range_to_slice(some)] for ranges in self.keys for some in ranges]
        return torch.cat(every).unflatten(0, (len(self.keys), -1)).transpose(1, 2)

    def scatter_queries(self, into_BTHD: Tensor, x_NHRD: Tensor) -> None:
        """Write what each block's queries got to where these stand."""
        self.gather_queries(into_BTHD).copy_(x_NHRD)

    def add_to_keys(self, into_BSGD: Tensor, x_NGWD: Tensor) -> None:
        """Add what each block says of its keys to where these stand."""
        x_NWGD = x_NGWD.transpose(1, 2)
        if self.batch_row is None:
            _add_to_ranges(into_BSGD.transpose(0, 1), x_NWGD.transpose(0, 1), self.keys[0])
        elif len(self.keys[0]) == 1 and len(self.keys) > 1:
            self._overlap(into_BSGD, x_NWGD, [only for (only,) in self.keys])
        else:
            for ranges, x_WGD in zip(self.keys, x_NWGD, strict=True):
                _add_to_ranges(into_BSGD[self.batch_row], x_WGD, ranges)

    def _overlap(self, into_BSGD: Tensor, x_NWGD: Tensor, ranges: Sequence[range]) -> None:
        """Add windows that overlap: as many of their columns at once as no two blocks share."""
        gap, step, width = ranges[1].start - ranges[0].start, ranges[0].step, len(ranges[0])
        if gap == 0:
            into_BSGD[self.batch_row, _range_to_slice(ranges[0])] += x_NWGD.sum(0)
            return
        apart = len(ranges) * gap <= step  # each between the tokens of the others
        each = width if apart else gap // step
        for begin in range(0, width, each):
            columns = [some[begin : begin + each] for some in ranges]
            self._view(into_BSGD, columns).add_(x_NWGD[:, begin : begin + each])

    def _view(self, x_BTHD: Tensor, ranges: Sequence[range]) -> Tensor:
        if self.batch_row is None:
            return x_BTHD[:, _range_to_slice(ranges[0])]
        _, along, head, channel = x_BTHD.stride()
        start, step = ranges[0].start, ranges[0].step
        gap = ranges[1].start - start if len(ranges) > 1 else 0
        shape = (len(ranges), len(ranges[0]), *x_BTHD.shape[2:])
        offset = x_BTHD.storage_offset() + self.batch_row * x_BTHD.stride(0) + start * along
        return x_BTHD.as_strided(shape, (gap * along, step * along, head, channel), offset)


def batch_blocks(piece: BlockBatch, rows: Sequence[int], nbytes: int) -> Iterator[BatchedBlocks]:
    """The calls in which a piece runs over these rows of the batch, given the bytes of a token's key and value."""
    blocks = list(zip(piece.queries, piece.keys, strict=True))
    if 1 < len(rows) >= len(blocks):  # several are all
        yield from (BatchedBlocks(None, [queries], [keys]) for queries, keys in blocks)
        return
    most = max(1, MAX_CALL_BYTES // (nbytes * sum(map(len, blocks[0][1]))))
    even = min((_evenly_spaced_runs(order) for order in (blocks, sorted(blocks, key=_block_start))), key=len)
    for row in rows:
        for run in even:
            for begin in range(0, len(run), most):
                queries, keys = zip(*run[begin : begin + most], strict=True)
                yield BatchedBlocks(row, queries, keys)


def _block_start(block: tuple[range, KeyRanges]) -> int:
    return block[0].start


def _evenly_spaced_runs(blocks: Sequence[tuple[range, KeyRanges]]) -> list[list[tuple[range, KeyRanges]]]:
    """The blocks in runs that begin at equal distances; their keys too, where these are one range."""
    found: list[list[tuple[range, KeyRanges]]] = []
    gaps: tuple[int, ...] | None = None
    for block in blocks:
        gap = None if not found else _block_distance(found[-1][-1], block)
        if gap is None or (gaps is not None and gap != gaps) or min(gap) < 0:
            found.append([block])
            gaps = None
        else:
            found[-1].append(block)
            gaps = gap
    return found


def _block_distance(one: tuple[range, KeyRanges], other: tuple[range, KeyRanges]) -> tuple[int, ...]:
    asked = other[0].start - one[0].start
    return (asked, other[1][0].start - one[1][0].start) if len(one[1]) == 1 else (asked,)


def _add_to_ranges(into: Tensor, some: Tensor, ranges: KeyRanges) -> None:
    """Add along the first axis, the tokens."""
    for where, part in zip(ranges, some.split([len(one) for one in ranges]), strict=True):
        into[_range_to_slice(where)] += part


def _range_to_slice(some: range) -> slice:
    return slice(some.start, some.stop, some.step)
