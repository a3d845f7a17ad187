"""Paged KV cache: all layers store tokens in pages of one pool, which sequences allocate, share and
free.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, prod
from operator import add
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ...util.errors import SpecError
from ..masking.sequence_info import BlockTable, SequenceInfo
from ..spec.attention_spec import AttentionSpec
from .block_table import BlockTables, PagedSequence, PageLayout, RetentionGroup, TensorPlacement
from .cache_selection import HeadGroupCache, split_by_retention
from .kv_cache import FullVisibility, KVCache, KVEntry, RowEnds, check_causal, retained_tokens

# --- Rows of one forward call ---------------------------------------------------------------------


@dataclass(eq=False)
class RowPages:
    """The pages that one call writes in one retention group: the place of each real token, and the
    pages of each row after it has appended `counts` tokens.

    `page` and `offset` locate each real token; `is_real` is its (row, column), None if all are
    real. `ends` are the new lengths of the rows; `reads_past` is True if tokens were cached before.
    Index tensors are computed on first use and reused by all layers of the group.
    """

    group: RetentionGroup
    tables: Sequence[Mapping[int, int]]
    counts: Sequence[int]
    ends: Sequence[int]
    empty: int
    device: torch.device
    page: Tensor
    offset: Tensor
    is_real: tuple[Tensor, Tensor] | None
    reads_past: bool
    _gathered: tuple[Tensor, int | None, SequenceInfo] | None = None
    _placed: tuple[Tensor, Tensor, Tensor] | None = None
    _indices: dict[tuple[int, int, int], Tensor] = field(
        default_factory=dict[tuple[int, int, int], Tensor]
    )

    def spans(self, whole: bool) -> SequenceInfo:
        """Return key positions and block table for a single-token step; `whole`: every stored token
        is visible.
        """
        self._placed = self._placed or self._place()
        table, position, segment = self._placed
        block_table = BlockTable(table, whole)
        return SequenceInfo(position, segment, checked=True, block_table=block_table)

    def index(self, heads: int, pieces: int, stride: int) -> Tensor:
        """Return indices of all pieces in the order rows, heads, pages; `pieces` per head, `stride`
        per page.
        """
        key = heads, pieces, stride
        if key not in self._indices:
            pages = self.gathered[0][:, None, :, None] * stride
            head = torch.arange(heads, device=pages.device)[None, :, None, None] * pieces
            self._indices[key] = (
                pages + head + torch.arange(pieces, device=pages.device)
            ).flatten()
        return self._indices[key]

    @property
    def gathered(self) -> tuple[Tensor, int | None, SequenceInfo]:
        """Pages of every row [rows, pages] to copy into one contiguous buffer, padded with the
        empty page; the number of slots to read if it is the same for all rows; the positions of
        their tokens.
        """
        self._gathered = self._gathered or self._gather()
        return self._gathered

    def _gather(self) -> tuple[Tensor, int | None, SequenceInfo]:
        page = self.group.page
        tables = self.tables
        ends = self.ends
        device = self.device
        max_pages = max((len(table) for table in tables), default=0)
        pages = self._as_tensor(
            [[*table.values(), *[self.empty] * (max_pages - len(table))] for table in tables]
        )
        common_pages = None
        if tables and len(set(ends)) == 1 and all([*t] == [*tables[0]] for t in tables):
            common_pages = [*tables[0]]
        if common_pages and common_pages == list(
            range(common_pages[0], common_pages[0] + max_pages)
        ):
            start = common_pages[0] * page
            sequence = SequenceInfo.contiguous(start, ends[0] - start, device)
            return pages, sequence.count, sequence
        starts = self._as_tensor(
            [[*[n * page for n in t], *[-page] * (max_pages - len(t))] for t in tables]
        )
        position = (starts[..., None] + torch.arange(page, device=device)).flatten(1)
        is_real = (position >= 0) & (position < self._as_tensor(ends)[:, None])
        sequence = SequenceInfo(position.clamp(min=0), is_real.long() - 1, checked=True)
        return pages, None, sequence

    def _place(self) -> tuple[Tensor, Tensor, Tensor]:
        """Block table with slot ranges, and positions and segments of all slots: spans of the
        retained first tokens, if any, and of the latest; a page may hold some of both.
        """
        first, last, page = self.group
        begins = [max(first, end - last) if last is not None else 0 for end in self.ends]
        pieces = [self._span_of_positions(begins, self.ends)]
        if first:
            pieces.insert(
                0,
                self._span_of_positions([0] * len(begins), [min(first, end) for end in self.ends]),
            )
        table, start = (
            torch.cat(tensors, 1) if first else tensors[0] for tensors in zip(*pieces, strict=True)
        )
        slot = torch.arange(page, device=self.device)
        live = (slot >= table[..., 1:2]) & (slot < table[..., 2:3])
        return table, (start[..., None] + slot).flatten(1), live.flatten(1).long() - 1

    def _span_of_positions(
        self, begins: Sequence[int], ends: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Return a table [rows, pages, (page, first slot, end slot)] and the first position of each
        page.
        """
        page = self.group.page
        ends = [end if count else 0 for end, count in zip(ends, self.counts, strict=True)]
        page_indices = [
            range(begin // page, -(-end // page)) for begin, end in zip(begins, ends, strict=True)
        ]
        max_pages = max((len(indices) for indices in page_indices), default=0)
        pages = [
            [*[table[n] for n in indices], *[self.empty] * (max_pages - len(indices))]
            for table, indices in zip(self.tables, page_indices, strict=True)
        ]
        first = self._as_tensor([indices.start * page for indices in page_indices])[:, None]
        start = first + torch.arange(max_pages, device=self.device) * page
        first_slot = (self._as_tensor(begins)[:, None] - start).clamp(0, page)
        end_slot = (self._as_tensor(ends)[:, None] - start).clamp(0, page)
        return torch.stack(
            [self._as_tensor(pages).view(len(pages), max_pages), first_slot, end_slot], -1
        ), start

    def _as_tensor(self, values: Sequence[object]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


# --- The rows of one call, and what it does to their pages ----------------------------------------


class PagedBatch:
    """Rows of one forward call, common to all layers: the first layer that appends tokens allocates
    their pages.
    """

    def __init__(
        self, storage: Tensor, block_tables: BlockTables, rows: Sequence[PagedSequence]
    ) -> None:
        self.storage, self.block_tables, self.rows = storage, block_tables, list(rows)
        self.num_calls = self.num_selections = 0
        self.ends = self._ends()
        self.accesses: tuple[RowPages, ...] = ()  # of the current call, one per retention group

    def next_positions(self, counts: Sequence[int]) -> SequenceInfo:
        """Return the positions of the next tokens of each row, padded on the right, and allocate
        their pages.
        """
        device = self.storage.device
        most = max(counts)
        starts = [row.length for row in self.rows]
        if len(set(counts)) == len(set(starts)) == 1:
            new_tokens = SequenceInfo.contiguous(starts[0], most, device)
        else:
            place = torch.arange(most, device=device)
            live = place < torch.tensor(counts, device=device)[:, None]
            new_tokens = SequenceInfo(
                torch.tensor(starts, device=device)[:, None] + place, live.long() - 1, checked=True
            )
            new_tokens.position_bound = max(map(add, starts, counts)) - 1
        before = self.ends
        self._begin(new_tokens, [list(range(count)) for count in counts])
        new_tokens.derived[before] = self.ends
        return new_tokens

    def preview(self, new_tokens: SequenceInfo) -> tuple[RowPages, ...]:
        """Return the accesses of these tokens without a change of tables and pages."""
        trial = copy.copy(self)
        trial.block_tables, trial.rows = copy.deepcopy((self.block_tables, self.rows))
        trial.storage = self.storage[:, :0]
        trial.begin(new_tokens)
        return trial.accesses

    def begin(self, new_tokens: SequenceInfo) -> None:
        """Allocate pages for these tokens and prepare their accesses, group by group."""
        self._begin(new_tokens, self._columns(new_tokens))

    def _begin(self, new_tokens: SequenceInfo, columns: list[list[int]]) -> None:
        counts = [len(live) for live in columns]
        emptied, copied = self.block_tables.append_slots(self.rows, counts)
        storage = self.storage
        if emptied:
            storage.index_fill_(0, torch.tensor(emptied, device=storage.device), 0)
        for old, new in copied:
            storage[new] = storage[old]
        groups = enumerate(self.block_tables.groups)
        self.accesses = tuple(
            self._access(index, group, columns, new_tokens) for index, group in groups
        )
        for row, live in zip(self.rows, columns, strict=True):
            row.length += len(live)
        self.ends = self._ends()
        self.num_calls += 1

    def select_rows(self, index: Tensor) -> None:
        """Keep these rows in this order; a repeated row is forked with shared pages, a row left out
        is freed.
        """
        indices = index.tolist()
        block_tables = self.block_tables
        used = set[int]()
        rows = []
        for number in indices:
            rows.append(
                block_tables.fork(self.rows[number]) if number in used else self.rows[number]
            )
            used.add(number)
        for number, row in enumerate(self.rows):
            if number not in used:
                block_tables.free_sequence(row)
        self.rows = rows
        self.ends = self._ends()
        self.num_selections += 1

    def _ends(self) -> RowEnds:
        """Return the ends of the rows."""
        lengths = [row.length for row in self.rows]
        length = torch.tensor(lengths, dtype=torch.int64, device=self.storage.device)
        longest = max(lengths, default=0)
        return RowEnds(length - 1, torch.zeros_like(length), length, True, longest - 1, longest)

    def _columns(self, new_tokens: SequenceInfo) -> list[list[int]]:
        """Return the real columns of each row; raise ValueError unless they continue at the end of
        the row.
        """
        if new_tokens.start is not None and all(
            row.length == new_tokens.start for row in self.rows
        ):
            return [list(range(new_tokens.count))] * len(self.rows)
        if not new_tokens.has_padding and self.ends in new_tokens.derived:  # they follow the rows
            return [list(range(new_tokens.count))] * len(self.rows)
        batch = len(self.rows)
        positions, segments = (
            tensor.expand(batch, -1).tolist()
            for tensor in (new_tokens.position, new_tokens.segment)
        )
        columns = []
        for row, position, segment in zip(self.rows, positions, segments, strict=True):
            live = [column for column, number in enumerate(segment) if number >= 0]
            if any(segment[column] for column in live):
                raise ValueError(
                    "a paged cache holds one text per row; give each packed document its own row"
                )
            if [position[column] for column in live] != list(
                range(row.length, row.length + len(live))
            ):
                raise ValueError(
                    f"a row of {row.length} tokens goes on at position {row.length}, one by one; "
                    "take positions from cache.next_positions(count)"
                )
            columns.append(live)
        return columns

    def _access(
        self, index: int, group: RetentionGroup, columns: list[list[int]], new_tokens: SequenceInfo
    ) -> RowPages:
        """Prepare one group's access; called before row lengths are updated."""

        def as_tensor(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=self.storage.device)

        pages: list[int] = []
        offsets: list[int] = []
        rows: list[int] = []
        flat_columns: list[int] = []
        for number, (row, live) in enumerate(zip(self.rows, columns, strict=True)):
            for position in range(row.length, row.length + len(live)):
                pages.append(row.tables[index][position // group.page])
                offsets.append(position % group.page)
            rows += [number] * len(live)
            flat_columns += live
        counts = [len(live) for live in columns]
        all_real = all(count == new_tokens.count for count in counts)
        return RowPages(
            group,
            [row.tables[index] for row in self.rows],
            counts,
            [row.length + count for row, count in zip(self.rows, counts, strict=True)],
            self.block_tables.pages.count,
            self.storage.device,
            as_tensor(pages),
            as_tensor(offsets),
            None if all_real else (as_tensor(rows), as_tensor(flat_columns)),
            new_tokens.count == 1 or any(row.length for row in self.rows),
        )


# --- Caches ---------------------------------------------------------------------------------------

ALIGNMENT = 64  # bytes


def reserve_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return a tensor of zeros that takes memory of the CPU when it is written, one page of the
    system at a time.

    `torch.zeros` writes the zeros; NumPy asks the system for memory (calloc), which is zero and not
    there until then. On another device all memory is allocated at once.

    >>> reserve_zeros((2, 3), torch.bfloat16, "cpu").sum().item()
    0.0
    """
    if torch.device(device).type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    size = prod(shape) * dtype.itemsize
    try:
        memory = torch.from_numpy(np.zeros(size + ALIGNMENT, np.uint8))
    except (MemoryError, ValueError, OverflowError) as error:
        raise ValueError(
            f"the system refuses to reserve {size:,} bytes of memory; give a smaller budget"
        ) from error
    start = -memory.untyped_storage().data_ptr() % ALIGNMENT
    return memory[start : start + size].view(dtype).view(*shape)


class PagePool:
    """Pool of KV cache pages for all layers, in one tensor; a page holds tokens of every layer of a
    retention group.

    On a CPU a page takes memory when it is first written.

    `block_tables` assigns pages to sequences; `caches(batch_of(rows))` are the caches to pass to
    the layers.

    >>> import headwise as hw
    >>> layer = hw.Attention(hw.design(model=8, heads=2, pattern="causal"))
    >>> pool = PagePool([layer.spec], pages=5, page=4)
    >>> (cache,) = pool.caches(
    ...     pool.batch_of([pool.block_tables.new_sequence(), pool.block_tables.new_sequence()])
    ... )
    >>> with torch.no_grad():
    ...     _ = layer(torch.randn(2, 5, 8), cache=cache)
    >>> (
    ...     pool.block_tables.pages.num_allocated,
    ...     cache.nbytes,
    ... )  # 2 rows x 2 pages x 4 tokens x 16 elements x 4 bytes
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
            check_causal(spec)
            if spec.is_recurrent:
                raise SpecError(
                    "this layer keeps one recurrent state instead of tokens, which has no pages; "
                    "use layer.cache(...)"
                )
        self.specs, self.head_groups = tuple(specs), tuple(map(split_by_retention, specs))
        # If heads retain different tokens, each group of key-value heads is stored as one layer.
        self.stored_specs = list_stored_specs(specs)
        self.paging = PageLayout.for_specs(self.stored_specs, page)
        self.block_tables = BlockTables(self.paging, pages)
        # One extra page that is never allocated: padding reads finite zeros there.
        self.storage = reserve_zeros((pages + 1, self.paging.numel), dtype, device)
        self.views = [
            {name: self._tensor_view(place) for name, place in places.items()}
            for places in self.paging.layers
        ]
        self.visibilities = [
            FullVisibility(spec.pattern, retained_tokens(spec.pattern))
            for spec in self.stored_specs
        ]
        self._buffer = self.storage.new_zeros(0)
        self._buffer_end = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, used or not, and of the buffer into which the pages of one layer are
        gathered.
        """
        return self.storage.nbytes + self._buffer.nbytes

    def batch_of(self, rows: Sequence[PagedSequence]) -> PagedBatch:
        """Return a batch of these rows in this order, for one call or several."""
        return PagedBatch(self.storage, self.block_tables, rows)

    def caches(self, batch: PagedBatch) -> list[KVCache]:
        """Return a cache of these rows for each layer."""
        caches = list[KVCache]()
        first = 0
        for spec, groups in zip(self.specs, self.head_groups, strict=True):
            own = [
                PagedCache(self, batch, first + number, number)
                for number in range(max(1, len(groups)))
            ]
            caches.append(HeadGroupCache(spec, groups, own) if groups else own[0])
            caches[-1].continue_after(batch.ends)
            first += len(own)
        return caches

    def _tensor_view(self, place: TensorPlacement) -> Tensor:
        """Return a view of one tensor in all pages: [pages + 1, heads, tokens, width]."""
        tokens = self.paging.groups[place.group].page
        flat = self.storage[:, place.start : place.start + place.heads * tokens * place.width]
        return flat.unflatten(1, (place.heads, tokens, place.width))

    def reserve(self, pages: int) -> None:
        """Reserve the gather buffer for `pages` pages of any layer, over all its head groups."""
        self._buffer = reserve_zeros(
            (pages * self.paging.widest,), self.storage.dtype, self.storage.device
        )

    def gather(self, layer: int, row_pages: RowPages, head_group: int = 0) -> KVEntry:
        """Copy one stored layer's entry from the pages of every row into the buffer; valid until
        the next layer's.

        The tokens of each head are contiguous, as attention reads them. A layer with several groups
        of heads has them one after the other in the buffer.
        """
        page_table, filled, _ = row_pages.gathered
        rows, pages = page_table.shape
        entry = KVEntry()
        begin = self._buffer_end if head_group else 0
        for name, place in self.paging.layers[layer].items():
            tokens = self.paging.groups[place.group].page
            piece = gcd(tokens * place.width, place.start, self.paging.numel)
            index = row_pages.index(
                place.heads, tokens * place.width // piece, self.paging.numel // piece
            )
            end = begin + index.numel() * piece
            if end > self._buffer.numel():
                self._buffer = self.storage.new_empty(2 * end)
            gathered = self._buffer[begin:end].view(index.numel(), piece)
            torch.index_select(
                self.storage.view(-1, piece), 0, index + place.start // piece, out=gathered
            )
            slots = gathered.view(rows, place.heads, pages * tokens, place.width).transpose(1, 2)[
                :, :filled
            ]
            entry[name] = slots.reshape(*slots.shape[:2], *place.shape)
            begin = end
        self._buffer_end = begin
        return entry

    def in_place(self, layer: int) -> KVEntry:
        """Return views of one layer's entry in all pages without a copy, one row per page."""
        return {
            name: view.transpose(1, 2).unflatten(2, place.shape[:-1])
            for (name, view), place in zip(
                self.views[layer].items(), self.paging.layers[layer].values(), strict=True
            )
        }


def list_stored_specs(specs: Sequence[AttentionSpec]) -> tuple[AttentionSpec, ...]:
    """The specs of what pages store: layers, or groups of key-value heads that retain the same
    tokens.
    """
    stored: list[AttentionSpec] = []
    for spec in specs:
        stored += [group.spec for group in split_by_retention(spec)] or [spec]
    return tuple(stored)


class PagedCache(KVCache):
    """KV cache of one layer, or of a group of its heads, in pages; rows with equal prefixes share
    pages.
    """

    reuses_memory: ClassVar[bool] = True

    def __init__(self, pool: PagePool, batch: PagedBatch, layer: int, head_group: int = 0) -> None:
        super().__init__(
            pool.stored_specs[layer], len(batch.rows), pool.storage.dtype, pool.storage.device
        )
        self._pool = pool
        self._paged_batch = batch
        self._layer = layer
        self._head_group = head_group
        self._num_calls = batch.num_calls
        self._num_selections = batch.num_selections
        self._group = next(place.group for place in pool.paging.layers[layer].values())
        self.continue_after(batch.ends)

    def append(self, entry: KVEntry, new_tokens: SequenceInfo) -> tuple[KVEntry, SequenceInfo]:
        pages = self._write_tokens(entry, new_tokens)
        if pages is None:
            return entry, new_tokens
        return self._pool.gather(self._layer, pages, self._head_group), pages.gathered[2]

    def preview(self, new_tokens: SequenceInfo) -> SequenceInfo:
        batch = self._paged_batch
        is_begun = self._num_calls != batch.num_calls  # by an earlier layer, or by the engine
        access = (batch.accesses if is_begun else batch.preview(new_tokens))[self._group]
        return access.gathered[2] if access.reads_past else new_tokens

    def extend_in_place(
        self, entry: KVEntry, new_tokens: SequenceInfo
    ) -> tuple[KVEntry, SequenceInfo]:
        """Store one token per row; return views of all pages, and a sequence with a block table.

        For layers that attend to "k" and "v" as stored.
        """
        if new_tokens.count != 1:
            raise ValueError(
                f"cannot read pages in place for {new_tokens.count} tokens per row, only for 1; "
                "use extend"
            )
        pages = self._write_tokens(entry, new_tokens)
        assert pages is not None, "a single token always attends at least to itself"
        all_visible = self._pool.visibilities[self._layer].sees_all(max(pages.ends, default=0))
        return self._pool.in_place(self._layer), pages.spans(all_visible)

    def _write_tokens(self, entry: KVEntry, new_tokens: SequenceInfo) -> RowPages | None:
        """Write these tokens into their pages; return the pages to read, None if no token was
        cached before.
        """
        if torch.is_grad_enabled() and any(new.requires_grad for new in entry.values()):
            raise ValueError(
                "a paged cache does not record gradients; decode under torch.no_grad()"
            )
        if self._num_calls == self._paged_batch.num_calls:
            self._paged_batch.begin(new_tokens)
        self._num_calls += 1
        access = self._paged_batch.accesses[self._group]
        self.used += new_tokens.count
        self._ends = self._paged_batch.ends
        self._write(entry, access)
        return access if access.reads_past else None

    def take_rows(self, index: Tensor, ends: dict[RowEnds, RowEnds]) -> None:
        self._take_ends(index, ends)
        if self._num_selections == self._paged_batch.num_selections:
            self._paged_batch.select_rows(index)
        self._num_selections += 1
        self._ends = self._paged_batch.ends

    @property
    def nbytes(self) -> int:
        pages: set[int] = set()
        for row in self._paged_batch.rows:
            pages.update(row.tables[self._group].values())
        return len(pages) * sum(view[0].nbytes for view in self._pool.views[self._layer].values())

    def _write(self, entry: KVEntry, access: RowPages) -> None:
        for name, view in self._pool.views[self._layer].items():
            tokens = (
                entry[name].flatten(0, 1) if access.is_real is None else entry[name][access.is_real]
            )
            tokens = tokens.reshape(len(tokens), view.shape[1], view.shape[3])
            # autocast projects in its own dtype
            view[access.page, :, access.offset] = tokens.to(self.dtype)
