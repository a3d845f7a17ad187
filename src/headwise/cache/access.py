"""What one call does to the pages of one group: where it writes, and what it reads, gathered or where it lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..tokens import BlockTable, SequenceInfo
from .paging import RetentionGroup


@dataclass(frozen=True, eq=False)
class PageAccess:
    """Where the live tokens of a call are written, and what there is to read: nothing when there is no past."""

    page: Tensor
    offset: Tensor
    is_real: tuple[Tensor, Tensor] | None  # which tokens of the call these are; none when all are
    held_pages: HeldPages | None


class GatheredPages(NamedTuple):
    """The pages of every row, as many of each, those that it does not have being the empty one; what is in them.

    Where all rows have as many slots, `filled` is how many are read.
    """

    pages: Tensor
    filled: int | None
    sequence: SequenceInfo


class PageSpans(NamedTuple):
    """The table of spans, and where what they hold stands."""

    table: Tensor
    position: Tensor
    segment: Tensor


@dataclass(eq=False)
class HeldPages:
    """The pages of each row by their place in it, at the end of a call with so many new tokens of each.

    What layers read of them is worked out for the first that asks.
    """

    keep: RetentionGroup
    tables: Sequence[Mapping[int, int]]
    counts: Sequence[int]
    ends: Sequence[int]
    empty: int
    device: torch.device
    _gathered: GatheredPages | None = None
    _placed: PageSpans | None = None
    _indices: dict[tuple[int, int, int], Tensor] = field(default_factory=dict[tuple[int, int, int], Tensor])

    @property
    def gathered(self) -> GatheredPages:
        """What is copied side by side."""
        self._gathered = self._gathered or self._gather()
        return self._gathered

    def spans(self, whole: bool) -> SequenceInfo:
        """Of one token of each row: where what it may read lies, whether or not that is `whole` what lies there."""
        self._placed = self._placed or self._make_spans()
        return SequenceInfo(self._placed.position, self._placed.segment, checked=True, block_table=BlockTable(self._placed.table, whole))

    def index(self, heads: int, pieces: int, stride: int) -> Tensor:
        """The pieces of all pages in the order of rows, heads and pages, of so many to a head and so many to a page."""
        key = heads, pieces, stride
        if key not in self._indices:
            pages = self.gathered.pages[:, None, :, None] * stride
            head = torch.arange(heads, device=pages.device)[None, :, None, None] * pieces
            self._indices[key] = (pages + head + torch.arange(pieces, device=pages.device)).flatten()
        return self._indices[key]

    def _gather(self) -> GatheredPages:
        keep, tables, ends, device = self.keep, self.tables, self.ends, self.device
        most = max((len(table) for table in tables), default=0)
        pages = self._as_tensor([[*table.values(), *[self.empty] * (most - len(table))] for table in tables])
        alike = [*tables[0]] if tables and len(set(ends)) == 1 and all([*t] == [*tables[0]] for t in tables) else None
        if alike and alike == list(range(alike[0], alike[0] + most)):
            start = alike[0] * keep.page
            run = SequenceInfo.contiguous(start, ends[0] - start, device)
            return GatheredPages(pages, run.count, run)
        begins = self._as_tensor([[*[n * keep.page for n in t], *[-keep.page] * (most - len(t))] for t in tables])
        position = (begins[..., None] + torch.arange(keep.page, device=device)).flatten(1)
        live = (position >= 0) & (position < self._as_tensor(ends)[:, None])
        return GatheredPages(pages, None, SequenceInfo(position.clamp(min=0), live.long() - 1, checked=True))

    def _make_spans(self) -> PageSpans:
        """The first tokens, where some are kept for ever, and the latest. One page may hold some of both."""
        first, last, page = self.keep
        begins = [max(first, end - last) if last is not None else 0 for end in self.ends]
        pieces = [self._span_of_positions(begins, self.ends)]
        if first:
            pieces.insert(0, self._span_of_positions([0] * len(begins), [min(first, end) for end in self.ends]))
        table, start = (torch.cat(told, 1) if first else told[0] for told in zip(*pieces, strict=True))
        slot = torch.arange(page, device=self.device)
        live = (slot >= table[..., 1:2]) & (slot < table[..., 2:3])
        return PageSpans(table, (start[..., None] + slot).flatten(1), live.flatten(1).long() - 1)

    def _span_of_positions(self, begins: Sequence[int], ends: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Of each row from one position to another: pages with their slots, and the position of each page's first."""
        page = self.keep.page
        ends = [end if count else 0 for end, count in zip(ends, self.counts, strict=True)]
        numbers = [range(begin // page, -(-end // page)) for begin, end in zip(begins, ends, strict=True)]
        most = max((len(own) for own in numbers), default=0)
        held = [
            [*[table[n] for n in own], *[self.empty] * (most - len(own))]
            for table, own in zip(self.tables, numbers, strict=True)
        ]
        first = self._as_tensor([own.start * page for own in numbers])[:, None]
        start = first + torch.arange(most, device=self.device) * page
        low = (self._as_tensor(begins)[:, None] - start).clamp(0, page)
        high = (self._as_tensor(ends)[:, None] - start).clamp(0, page)
        return torch.stack([self._as_tensor(held).view(len(held), most), low, high], -1), start

    def _as_tensor(self, told: Sequence[object]) -> Tensor:
        return torch.tensor(told, dtype=torch.int64, device=self.device)
