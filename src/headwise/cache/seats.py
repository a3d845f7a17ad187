"""The rows of one call, and what it does to their pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..tokens import Tokens
from .paging import Book, Keep, Row


@dataclass(frozen=True, eq=False)
class Access:
    """What one call does to the pages of one group: where it writes its live tokens, and what it reads."""

    page: Tensor
    offset: Tensor
    live: tuple[Tensor, Tensor] | None  # which tokens of the call these are; none when all are
    pages: Tensor | None  # none when there is no past
    filled: int | None  # how many slots are read, where all rows have as many
    told: Tokens
    _indices: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int]:
        """How many rows there are, and how many pages are read of each."""
        rows, pages = (0, 0) if self.pages is None else self.pages.shape
        return rows, pages

    def index(self, heads: int, pieces: int, stride: int) -> Tensor:
        """The pieces of all pages in the order of rows, heads and pages, of so many to a head and so many to a page."""
        key = heads, pieces, stride
        if key not in self._indices:
            assert self.pages is not None, "there is no past"
            pages = self.pages[:, None, :, None] * stride
            head = torch.arange(heads, device=pages.device)[None, :, None, None] * pieces
            self._indices[key] = (pages + head + torch.arange(pieces, device=pages.device)).flatten()
        return self._indices[key]


class Seats:
    """The rows of one call, for all layers: the first layer that is told of tokens makes room for them."""

    def __init__(self, numbers: Tensor, book: Book, rows: Sequence[Row]) -> None:
        self.numbers, self.book, self.rows = numbers, book, list(rows)
        self.calls = self.moves = 0
        self.last = self._last()
        self._accesses: tuple[Access, ...] = ()

    def next(self, counts: Sequence[int]) -> Tokens:
        """Where so many tokens of each row stand, padded on the right, with room made for them."""
        device, most = self.numbers.device, max(counts)
        starts = [row.length for row in self.rows]
        if len(set(counts)) == len(set(starts)) == 1:
            at = Tokens.run(starts[0], most, device)
        else:
            place = torch.arange(most, device=device)
            live = place < torch.tensor(counts, device=device)[:, None]
            at = Tokens(torch.tensor(starts, device=device)[:, None] + place, live.long() - 1, checked=True)
        self._begin(at, [list(range(count)) for count in counts])
        return at

    def begin(self, at: Tokens) -> None:
        """Make room for these tokens, and find out how to write and read them, group by group."""
        self._begin(at, self._columns(at))

    def _begin(self, at: Tokens, columns: list[list[int]]) -> None:
        changes, numbers = self.book.extend(self.rows, [len(live) for live in columns]), self.numbers
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
    def accesses(self) -> tuple[Access, ...]:
        """Those of the call that has begun."""
        return self._accesses

    def take(self, index: Tensor) -> None:
        """These rows in this order; one that is taken again goes on in pages that it shares, one left out leaves."""
        taken = index.tolist()
        book, seen = self.book, set[int]()
        rows = []
        for number in taken:
            rows.append(book.fork(self.rows[number]) if number in seen else self.rows[number])
            seen.add(number)
        for number, row in enumerate(self.rows):
            if number not in seen:
                book.leave(row)
        self.rows = rows
        self.last = self._last()
        self.moves += 1

    def _last(self) -> Tensor:
        """The position at which each row ended."""
        return torch.tensor([row.length for row in self.rows], dtype=torch.int64, device=self.numbers.device) - 1

    def _columns(self, at: Tokens) -> list[list[int]]:
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

    def _access(self, group: int, keep: Keep, columns: list[list[int]], at: Tokens) -> Access:
        """Rows still have the lengths from before."""
        numbers = self.numbers
        each = [(row, n) for row, live in zip(self.rows, columns, strict=True) for n in range(len(live))]
        spots = [divmod(row.length + n, keep.page) for row, n in each]
        page = [row.tables[group][number] for (row, _), (number, _) in zip(each, spots, strict=True)]
        whole = all(len(live) == at.count for live in columns)
        live = None if whole else _index([(b, t) for b, own in enumerate(columns) for t in own], numbers.device)
        write = (
            torch.tensor(page, dtype=torch.int64, device=numbers.device),
            torch.tensor([offset for _, offset in spots], dtype=torch.int64, device=numbers.device),
        )
        if at.count > 1 and not any(row.length for row in self.rows):
            return Access(*write, live, None, None, at)
        return Access(*write, live, *self._read(group, keep, [len(own) for own in columns]))

    def _read(self, group: int, keep: Keep, counts: list[int]) -> tuple[Tensor, int | None, Tokens]:
        """The pages of every row, those that it does not have being the empty one; and where what they hold stands."""
        device = self.numbers.device
        tables = [row.tables[group] for row in self.rows]
        ends = [row.length + count for row, count in zip(self.rows, counts, strict=True)]
        most = max((len(table) for table in tables), default=0)
        empty = self.book.pages.count
        held = [[*table.values(), *[empty] * (most - len(table))] for table in tables]
        pages = torch.tensor(held, dtype=torch.int64, device=device)
        alike = [*tables[0]] if tables and len(set(ends)) == 1 and all([*t] == [*tables[0]] for t in tables) else None
        if alike and alike == list(range(alike[0], alike[0] + most)):
            start = alike[0] * keep.page
            run = Tokens.run(start, ends[0] - start, device)
            return pages, run.count, run
        begins = [[*[n * keep.page for n in table], *[-keep.page] * (most - len(table))] for table in tables]
        inside = torch.arange(keep.page, device=device)
        position = (torch.tensor(begins, dtype=torch.int64, device=device)[..., None] + inside).flatten(1)
        live = (position >= 0) & (position < torch.tensor(ends, dtype=torch.int64, device=device)[:, None])
        return pages, None, Tokens(position.clamp(min=0), live.long() - 1, checked=True)


def _index(pairs: list[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    rows, columns = ([pair[side] for pair in pairs] for side in (0, 1))
    return torch.tensor(rows, dtype=torch.int64, device=device), torch.tensor(columns, dtype=torch.int64, device=device)
