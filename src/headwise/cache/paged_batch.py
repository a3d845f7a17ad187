"""What one call does to the pages of one group: where it writes, and what it reads, gathered or where it lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..masking.sequence_info import BlockTable, SequenceInfo
from .block_table import BlockTables, PagedSequence, RetentionGroup


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
        return SequenceInfo(
            self._placed.position, self._placed.segment, checked=True, block_table=BlockTable(self._placed.table, whole)
        )

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


# --- The rows of one call, and what it does to their pages ---------------------------------------------


class PagedBatch:
    """The rows of one call, for all layers: the first layer that is told of tokens makes room for them."""

    def __init__(self, numbers: Tensor, book: BlockTables, rows: Sequence[PagedSequence]) -> None:
        self.numbers, self.book, self.rows = numbers, book, list(rows)
        self.calls = self.moves = 0
        self.last = self._last()
        self._accesses: tuple[PageAccess, ...] = ()

    def next_positions(self, counts: Sequence[int]) -> SequenceInfo:
        """Where so many tokens of each row stand, padded on the right, with room made for them."""
        device, most = self.numbers.device, max(counts)
        starts = [row.length for row in self.rows]
        if len(set(counts)) == len(set(starts)) == 1:
            at = SequenceInfo.contiguous(starts[0], most, device)
        else:
            place = torch.arange(most, device=device)
            live = place < torch.tensor(counts, device=device)[:, None]
            at = SequenceInfo(torch.tensor(starts, device=device)[:, None] + place, live.long() - 1, checked=True)
        self._begin(at, [list(range(count)) for count in counts])
        return at

    def begin(self, at: SequenceInfo) -> None:
        """Make room for these tokens, and find out how to write and read them, group by group."""
        self._begin(at, self._columns(at))

    def _begin(self, at: SequenceInfo, columns: list[list[int]]) -> None:
        changes, numbers = self.book.append_slots(self.rows, [len(live) for live in columns]), self.numbers
        if changes.emptied:
            numbers.index_fill_(0, torch.tensor(changes.emptied, device=numbers.device), 0)
        for old, new in changes.copied:
            numbers[new] = numbers[old]
        keeps = enumerate(self.book.keeps)
        self._accesses = tuple(self._access(group, keep, columns, at) for group, keep in keeps)
        for row, live in zip(self.rows, columns, strict=True):
            row.length += len(live)
        self.last = self._last()
        self.calls += 1

    @property
    def accesses(self) -> tuple[PageAccess, ...]:
        """Those of the call that has begun."""
        return self._accesses

    def select_rows(self, index: Tensor) -> None:
        """These rows in this order; one that is taken again goes on in pages that it shares, one left out leaves."""
        taken = index.tolist()
        book, seen = self.book, set[int]()
        rows = []
        for number in taken:
            rows.append(book.fork(self.rows[number]) if number in seen else self.rows[number])
            seen.add(number)
        for number, row in enumerate(self.rows):
            if number not in seen:
                book.free_sequence(row)
        self.rows = rows
        self.last = self._last()
        self.moves += 1

    def _last(self) -> Tensor:
        """The position at which each row ended."""
        return torch.tensor([row.length for row in self.rows], dtype=torch.int64, device=self.numbers.device) - 1

    def _columns(self, at: SequenceInfo) -> list[list[int]]:
        """Which tokens of each row are live; refuse any that do not go on where the row ended."""
        if at.start is not None and all(row.length == at.start for row in self.rows):
            return [list(range(at.count))] * len(self.rows)
        batch = len(self.rows)
        positions, segments = (told.expand(batch, -1).tolist() for told in (at.position, at.segment))
        columns = []
        for row, position, segment in zip(self.rows, positions, segments, strict=True):
            live = [column for column, told in enumerate(segment) if told >= 0]
            if any(segment[column] for column in live):
                raise ValueError("pages hold one text a row; give each packed document a row of its own")
            if [position[column] for column in live] != list(range(row.length, row.length + len(live))):
                raise ValueError(
                    f"a row of {row.length} tokens goes on at position {row.length}, one by one; "
                    "let the cache say where tokens stand, with cache.next(count)"
                )
            columns.append(live)
        return columns

    def _access(self, group: int, keep: RetentionGroup, columns: list[list[int]], at: SequenceInfo) -> PageAccess:
        """Rows still have the lengths from before."""
        device = self.numbers.device
        each = [(row, n) for row, live in zip(self.rows, columns, strict=True) for n in range(len(live))]
        spots = [divmod(row.length + n, keep.page) for row, n in each]
        page = [row.tables[group][number] for (row, _), (number, _) in zip(each, spots, strict=True)]
        whole = all(len(live) == at.count for live in columns)
        live = None if whole else _index_tensor([(b, t) for b, own in enumerate(columns) for t in own], device)
        write = (
            torch.tensor(page, dtype=torch.int64, device=device),
            torch.tensor([offset for _, offset in spots], dtype=torch.int64, device=device),
        )
        past = at.count == 1 or any(row.length for row in self.rows)
        tables = [row.tables[group] for row in self.rows]
        counts = [len(live) for live in columns]
        ends = [row.length + count for row, count in zip(self.rows, counts, strict=True)]
        return PageAccess(
            *write, live, HeldPages(keep, tables, counts, ends, self.book.pages.count, device) if past else None
        )


def _index_tensor(pairs: list[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    rows, columns = ([pair[side] for pair in pairs] for side in (0, 1))
    return torch.tensor(rows, dtype=torch.int64, device=device), torch.tensor(columns, dtype=torch.int64, device=device)
