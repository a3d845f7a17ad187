"""Paged KV cache: all layers store tokens in pages of one pool, which sequences allocate, share and free."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import gcd

import torch
from torch import Tensor

from ..errors import SpecError
from ..masking.sequence_info import SequenceInfo
from ..spec.attention_spec import AttentionSpec
from .block_table import BlockTables, PagedSequence, PageLayout, TensorPlacement
from .full_visibility import FullVisibility, retained_tokens
from .kv_cache import KVCache, KVEntry, check_causal
from .paged_batch import HeldPages, PageAccess, PagedBatch


class PagePool:
    """Pool of KV cache pages for all layers, in one tensor; a page holds tokens of every layer of a retention group.

    `book` assigns pages to sequences; `caches(batch_of(rows))` are the caches to pass to the layers.

    >>> import headwise as hw
    >>> layer = hw.Attention(hw.design(model=8, heads=2, pattern="causal"))
    >>> pool = PagePool([layer.spec], pages=5, page=4)
    >>> (cache,) = pool.caches(pool.batch_of([pool.book.new_sequence(), pool.book.new_sequence()]))
    >>> with torch.no_grad():
    ...     _ = layer(torch.randn(2, 5, 8), cache=cache)
    >>> pool.book.pages.num_held, cache.nbytes  # 2 rows x 2 pages x 4 tokens x 16 numbers x 4 bytes
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
            _check_pageable(spec)
        self.specs, self.paging = tuple(specs), PageLayout.for_specs(specs, page)
        self.book = BlockTables(self.paging, pages)
        # One extra page that is never allocated: padding reads finite zeros there.
        self.numbers = torch.zeros(pages + 1, self.paging.numbers, dtype=dtype, device=device)
        self.views = [
            {name: self._tensor_view(place) for name, place in places.items()} for places in self.paging.layers
        ]
        self.reaches = [FullVisibility(spec.pattern) for spec in specs]
        self._buffer = self.numbers.new_zeros(0)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, and of the buffer into which the pages of one layer are gathered."""
        return self.numbers.nbytes + self._buffer.nbytes

    def batch_of(self, rows: Sequence[PagedSequence]) -> PagedBatch:
        """Return a batch of these rows in this order, for one call or several."""
        return PagedBatch(self.numbers, self.book, rows)

    def caches(self, seats: PagedBatch) -> list[PagedCache]:
        """Return a cache of these rows for each layer."""
        return [PagedCache(self, seats, layer) for layer in range(len(self.specs))]

    def _tensor_view(self, place: TensorPlacement) -> Tensor:
        """Return a view of one tensor in all pages: [pages + 1, heads, tokens, width]."""
        tokens = self.paging.groups[place.group].page
        flat = self.numbers[:, place.start : place.start + place.heads * tokens * place.width]
        return flat.unflatten(1, (place.heads, tokens, place.width))

    def reserve(self, pages: int) -> None:
        """Allocate the gather buffer for `pages` pages of any layer."""
        self._buffer = self.numbers.new_zeros(pages * self.paging.widest)

    def gather(self, layer: int, held: HeldPages) -> KVEntry:
        """Copy one layer's entry from the pages of every row into the buffer; valid until the next call.

        The tokens of each head are contiguous, as attention reads them.
        """
        rows, pages = held.gathered.pages.shape
        entry, begin = KVEntry(), 0
        for name, place in self.paging.layers[layer].items():
            tokens = self.paging.groups[place.group].page
            piece = gcd(tokens * place.width, place.start, self.paging.numbers)
            index = held.index(place.heads, tokens * place.width // piece, self.paging.numbers // piece)
            end = begin + index.numel() * piece
            if end > self._buffer.numel():
                self._buffer = self.numbers.new_empty(2 * end)
            gathered = self._buffer[begin:end].view(index.numel(), piece)
            torch.index_select(self.numbers.view(-1, piece), 0, index + place.start // piece, out=gathered)
            slots = gathered.view(rows, place.heads, pages * tokens, place.width).transpose(1, 2)[
                :, : held.gathered.filled
            ]
            entry[name], begin = slots.reshape(*slots.shape[:2], *place.shape), end
        return entry

    def in_place(self, layer: int) -> KVEntry:
        """Return views of one layer's entry in all pages without a copy, one row per page."""
        return {
            name: view.transpose(1, 2).unflatten(2, place.shape[:-1])
            for (name, view), place in zip(self.views[layer].items(), self.paging.layers[layer].values(), strict=True)
        }


class PagedCache(KVCache):
    """KV cache of one layer in pages; rows with equal prefixes share pages."""

    def __init__(self, pool: PagePool, seats: PagedBatch, layer: int) -> None:
        super().__init__(pool.specs[layer], len(seats.rows), pool.numbers.dtype, pool.numbers.device)
        self._pool, self._seats, self._layer = pool, seats, layer
        self._calls, self._moves = seats.calls, seats.moves
        self._group = next(place.group for place in pool.paging.layers[layer].values())
        self.uniform, self._last = False, seats.last

    def append(self, entry: KVEntry, at: SequenceInfo) -> tuple[KVEntry, SequenceInfo]:
        pages = self._write_tokens(entry, at)
        return (entry, at) if pages is None else (self._pool.gather(self._layer, pages), pages.gathered.sequence)

    def extend_in_place(self, entry: KVEntry, at: SequenceInfo) -> tuple[KVEntry, SequenceInfo]:
        """Store one token per row; return views of all pages, and a sequence with a block table.

        For layers that attend to "k" and "v" as stored.
        """
        if at.count != 1:
            raise ValueError(f"cannot read pages in place for {at.count} tokens per row, only for 1; use extend")
        pages = self._write_tokens(entry, at)
        assert pages is not None, "a single token always attends at least to itself"
        retained = partial(retained_tokens, self.spec.pattern)
        all_visible = self._pool.reaches[self._layer].sees_all(max(pages.ends, default=0), retained)
        return self._pool.in_place(self._layer), pages.spans(all_visible)

    def _write_tokens(self, entry: KVEntry, at: SequenceInfo) -> HeldPages | None:
        """Write these tokens into their pages; return the pages to read, None if no token was cached before."""
        if torch.is_grad_enabled() and any(new.requires_grad for new in entry.values()):
            raise ValueError("a paged cache does not record gradients; decode under torch.no_grad()")
        if self._calls == self._seats.calls:
            self._seats.begin(at)
        self._calls += 1
        access = self._seats.accesses[self._group]
        self.used += at.count
        self._last = self._seats.last
        self._write(entry, access)
        return access.held_pages

    def select_rows(self, index: Tensor) -> None:
        self._take(index)
        if self._moves == self._seats.moves:
            self._seats.select_rows(index)
        self._moves += 1

    @property
    def nbytes(self) -> int:
        pages = {page for row in self._seats.rows for page in row.tables[self._group].values()}
        return len(pages) * sum(view[0].nbytes for view in self._pool.views[self._layer].values())

    def _write(self, entry: KVEntry, access: PageAccess) -> None:
        for name, view in self._pool.views[self._layer].items():
            tokens = entry[name].flatten(0, 1) if access.is_real is None else entry[name][access.is_real]
            tokens = tokens.reshape(len(tokens), view.shape[1], view.shape[3])
            view[access.page, :, access.offset] = tokens.to(self.dtype)  # autocast projects in its own dtype


def _check_pageable(spec: AttentionSpec) -> None:
    """Raise SpecError for a layer that does not cache tokens."""
    check_causal(spec)
    if spec.is_recurrent:
        raise SpecError(
            "this layer keeps one recurrent state instead of tokens, which has no pages; use layer.cache(...)"
        )
