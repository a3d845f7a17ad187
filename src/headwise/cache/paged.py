"""Caches whose tokens lie in pages of one pool; rows come, go and share them between calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd

import torch
from torch import Tensor

from ..errors import SpecError
from ..spec import AttentionSpec
from ..tokens import Tokens
from .base import Cache, Entry, check_forward
from .paging import Book, Keep, Paging, Place, Row


class Pool:
    """Pages for the tokens of all layers, in one tensor: a page holds what every layer that keeps alike remembers.

    `book` says whose they are; `seat(rows)` is what a call of the layers reads and fills.

    >>> import headwise as hw
    >>> layer = hw.Attention(hw.design(model=8, heads=2, pattern="causal"))
    >>> pool = Pool([layer.spec], pages=5, page=4)
    >>> (cache,) = pool.seat([pool.book.fresh(), pool.book.fresh()]).caches
    >>> with torch.no_grad():
    ...     _ = layer(torch.randn(2, 5, 8), cache=cache)
    >>> pool.book.pages.held, cache.nbytes  # 2 rows x 2 pages x 4 tokens x 16 numbers x 4 bytes
    (4, 1024)
    """

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        *,
        pages: int,
        page: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        for spec in specs:
            _check(spec)
        self.specs, self.paging = tuple(specs), Paging.of(specs, page)
        self.book = Book(self.paging, pages)
        # One page more, never handed out: what a row does not have is read there, and is finite.
        self.numbers = torch.zeros(pages + 1, self.paging.numbers, dtype=dtype, device=device)
        self.views = [{name: self._view(place) for name, place in places.items()} for places in self.paging.layers]
        self._buffer = self.numbers.new_zeros(0)

    @property
    def nbytes(self) -> int:
        """All of its pages, and the buffer into which those of one layer are gathered."""
        return self.numbers.nbytes + self._buffer.nbytes

    def seat(self, rows: Sequence[Row]) -> Seats:
        """These rows in this order, with a cache for each layer."""
        return Seats(self, list(rows))

    def _view(self, place: Place) -> Tensor:
        """One tensor of every page: [pages + 1, heads, tokens, width]."""
        tokens = self.paging.keeps[place.group].page
        taken = self.numbers[:, place.start : place.start + place.heads * tokens * place.width]
        return taken.unflatten(1, (place.heads, tokens, place.width))

    def reserve(self, pages: int) -> None:
        """Make the buffer now for so many pages of any layer."""
        self._buffer = self.numbers.new_zeros(pages * self.paging.widest)

    def gather(self, layer: int, access: Access) -> Entry:
        """What one layer keeps of the pages of every row, in a buffer: good until the next call.

        Each head's tokens lie together, as the core reads them. A kernel that reads pages where they lie takes
        `views[layer]` and the numbers of the pages instead.
        """
        entry, begin = Entry(), 0
        for name, place in self.paging.layers[layer].items():
            tokens = self.paging.keeps[place.group].page
            piece = gcd(tokens * place.width, place.start, self.paging.numbers)
            index = access.index(place.heads, tokens * place.width // piece, self.paging.numbers // piece)
            end = begin + index.numel() * piece
            if end > self._buffer.numel():
                self._buffer = self.numbers.new_empty(2 * end)
            found = self._buffer[begin:end].view(index.numel(), piece)
            torch.index_select(self.numbers.view(-1, piece), 0, index + place.start // piece, out=found)
            rows, pages = access.shape
            slots = found.view(rows, place.heads, pages * tokens, place.width).transpose(1, 2)[:, : access.filled]
            entry[name], begin = slots.reshape(*slots.shape[:2], *place.shape), end
        return entry


@dataclass(frozen=True, eq=False)
class Access:
    """What one call does to the pages of one group: where it writes its live tokens, and what it reads."""

    page_N: Tensor
    offset_N: Tensor
    live: tuple[Tensor, Tensor] | None  # which tokens of the call these are; none when all are
    pages_BP: Tensor | None  # none when there is no past
    filled: int | None  # how many slots are read, where all rows have as many
    told: Tokens
    _indices: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int]:
        """How many rows there are, and how many pages are read of each."""
        rows, pages = (0, 0) if self.pages_BP is None else self.pages_BP.shape
        return rows, pages

    def index(self, heads: int, pieces: int, stride: int) -> Tensor:
        """The pieces of all pages in the order of rows, heads and pages, of so many to a head and so many to a page."""
        key = heads, pieces, stride
        if key not in self._indices:
            assert self.pages_BP is not None, "there is no past"
            pages = self.pages_BP[:, None, :, None] * stride
            head = torch.arange(heads, device=pages.device)[None, :, None, None] * pieces
            self._indices[key] = (pages + head + torch.arange(pieces, device=pages.device)).flatten()
        return self._indices[key]


class Seats:
    """The rows of one call, for all layers: the first layer that is told of tokens makes room for them."""

    def __init__(self, pool: Pool, rows: list[Row]) -> None:
        self.pool, self.rows = pool, rows
        self.calls = self.moves = 0
        self.last = self._last()
        self._accesses: tuple[Access, ...] = ()
        self.caches = [PagedCache(self, layer) for layer in range(len(pool.specs))]

    def next(self, counts: Sequence[int]) -> Tokens:
        """Where so many tokens of each row stand, padded on the right, with room made for them."""
        device, most = self.pool.numbers.device, max(counts)
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
        changes, numbers = self.pool.book.extend(self.rows, [len(live) for live in columns]), self.pool.numbers
        if changes.emptied:
            numbers.index_fill_(0, torch.tensor(changes.emptied, device=numbers.device), 0)
        for old, new in changes.copied:
            numbers[new] = numbers[old]
        keeps = enumerate(self.pool.book.keeps)
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
        book, seen = self.pool.book, set[int]()
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
        return torch.tensor([row.length for row in self.rows], dtype=torch.int64, device=self.pool.numbers.device) - 1

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
        numbers = self.pool.numbers
        spots = [
            divmod(row.length + n, keep.page)
            for row, live in zip(self.rows, columns, strict=True)
            for n in range(len(live))
        ]
        owners = [row for row, live in zip(self.rows, columns, strict=True) for _ in live]
        page = [row.tables[group][number] for row, (number, _) in zip(owners, spots, strict=True)]
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
        device = self.pool.numbers.device
        tables = [row.tables[group] for row in self.rows]
        ends = [row.length + count for row, count in zip(self.rows, counts, strict=True)]
        most = max((len(table) for table in tables), default=0)
        empty = self.pool.book.pages.count
        pages = [[*table.values(), *[empty] * (most - len(table))] for table in tables]
        pages_BP = torch.tensor(pages, dtype=torch.int64, device=device)
        alike = [*tables[0]] if tables and len(set(ends)) == 1 and all([*t] == [*tables[0]] for t in tables) else None
        if alike and alike == list(range(alike[0], alike[0] + most)):
            start = alike[0] * keep.page
            run = Tokens.run(start, ends[0] - start, device)
            return pages_BP, run.count, run
        begins = [[*[n * keep.page for n in table], *[-keep.page] * (most - len(table))] for table in tables]
        position = torch.tensor(begins, dtype=torch.int64, device=device)[..., None] + torch.arange(
            keep.page, device=device
        )
        position = position.flatten(1)
        live = (position >= 0) & (position < torch.tensor(ends, dtype=torch.int64, device=device)[:, None])
        return pages_BP, None, Tokens(position.clamp(min=0), live.long() - 1, checked=True)


class PagedCache(Cache):
    """Remembered tokens of one layer in pages that rows share where they began alike."""

    def __init__(self, seats: Seats, layer: int) -> None:
        pool = seats.pool
        super().__init__(pool.specs[layer], len(seats.rows), pool.numbers.dtype, pool.numbers.device)
        self._pool, self._seats, self._layer = pool, seats, layer
        self._calls, self._moves = seats.calls, seats.moves
        self._group = next(place.group for place in pool.paging.layers[layer].values())
        self.uniform, self._last = False, seats.last

    def append(self, entry: Entry, at: Tokens) -> tuple[Entry, Tokens]:
        if torch.is_grad_enabled() and any(new.requires_grad for new in entry.values()):
            raise ValueError("pages keep no gradients; decode under torch.no_grad()")
        if self._calls == self._seats.calls:
            self._seats.begin(at)
        self._calls += 1
        access = self._seats.accesses[self._group]
        self.used += at.count
        self._last = self._seats.last
        self._write(entry, access)
        if access.pages_BP is None:
            return entry, at
        return self._pool.gather(self._layer, access), access.told

    def rows(self, index: Tensor) -> None:
        self._take(index)
        if self._moves == self._seats.moves:
            self._seats.take(index)
        self._moves += 1

    @property
    def nbytes(self) -> int:
        held = {page for row in self._seats.rows for page in row.tables[self._group].values()}
        return len(held) * sum(view[0].nbytes for view in self._pool.views[self._layer].values())

    def _write(self, entry: Entry, access: Access) -> None:
        for name, view in self._pool.views[self._layer].items():
            told = entry[name].flatten(0, 1) if access.live is None else entry[name][access.live]
            told = told.reshape(len(told), view.shape[1], view.shape[3])
            view[access.page_N, :, access.offset_N] = told.to(self.dtype)  # autocast projects in a dtype of its own


def _index(pairs: list[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    rows, columns = ([pair[side] for pair in pairs] for side in (0, 1))
    return torch.tensor(rows, dtype=torch.int64, device=device), torch.tensor(columns, dtype=torch.int64, device=device)


def _check(spec: AttentionSpec) -> None:
    """Refuse what has no tokens to lie in pages."""
    check_forward(spec)
    if spec.stateful:
        raise SpecError("this layer remembers all past tokens as one state, which has no pages; use layer.cache(...)")
