"""The rows of one call, and what it does to their pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..tokens import SequenceInfo
from .access import PageAccess, HeldPages
from .paging import BlockTables, RetentionGroup, PagedSequence


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
        return PageAccess(*write, live, HeldPages(keep, tables, counts, ends, self.book.pages.count, device) if past else None)


def _index_tensor(pairs: list[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    rows, columns = ([pair[side] for pair in pairs] for side in (0, 1))
    return torch.tensor(rows, dtype=torch.int64, device=device), torch.tensor(columns, dtype=torch.int64, device=device)
