"""Memory of the engine: the cache pages of all rows within one budget of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from ...attention import backends
from ...attention.attention import Attention
from ...attention.backends import CallSignature
from ...attention.cache import KVCache, PagedSequence, PagePool
from ...attention.cache.block_table import PageLayout
from ...attention.cache.paged_cache import PagedBatch, list_stored_specs
from ...util.errors import SpecError
from .. import ModelCache, Transformer


@dataclass(frozen=True)
class BatchingConfig:
    """How requests share a model: at most `rows` requests run at once, in cache pages of `page`
    tokens.

    A step prefills at most `chunk` prompt tokens and decodes one token per row.

    >>> BatchingConfig(rows=0)
    Traceback (most recent call last):
    headwise.util.errors.SpecError: BatchingConfig: rows must be an integer of at least 1, got 0;
    try rows=64
    """

    rows: int = 64
    page: int = 16
    chunk: int = 256

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if type(size) is not int or size < 1:
                raise SpecError(
                    f"BatchingConfig: {name} must be an integer of at least 1, got {size!r}; try "
                    f"{name}=64"
                )


class KVMemory:
    """Divides a budget of bytes into cache pages for all layers.

    The budget includes the buffer into which the pages of one layer are gathered, but not a step's
    activations. On a CPU, pages and the buffer take memory when they are first written.
    """

    def __init__(self, net: Transformer, budget: int, batching: BatchingConfig) -> None:
        self.batching = batching
        self.budget = budget
        layers = net.cache(batch=1, capacity=1).layers
        caches = list(chain.from_iterable(layer.values() for layer in layers))
        specs = [cache.spec for cache in caches if isinstance(cache, KVCache)]
        has_state = len(specs) < len(caches) or any(spec.is_recurrent for spec in specs)
        if net.spec.kind == "encoder-decoder" or has_state or not specs:
            raise SpecError(
                f"the engine caches the keys and values of decoders, and {net.spec.name} has an "
                "encoder, or layers with a state instead; use hw.generate"
            )
        self._cache_names = [[*layer] for layer in layers]
        stored = list_stored_specs(specs)
        self.paging = PageLayout.for_specs(stored, batching.page)
        retentions = [group[:2] for group in self.paging.groups]
        # Retention groups of each layer, without repetition: one, or one for each group of its
        # heads.
        self._groups_of_layers = set[tuple[int, ...]]()
        for spec in specs:
            own = list_stored_specs([spec])
            groups = (retentions.index(part.pattern.retention) for part in own)
            self._groups_of_layers.add(tuple(groups))
        like = next(net.parameters())
        per_page = self._bytes_per_page(like.dtype)
        padding_page = self.paging.numel * like.dtype.itemsize
        pages = (self.budget - padding_page) // per_page
        if pages < 1:
            raise ValueError(
                f"a budget of {self.budget:,} bytes holds no request: a page takes {per_page:,}; "
                f"give {padding_page + per_page:,} or more"
            )
        self.pages = pages
        self.pool = PagePool(
            specs, pages=self.pages, page=batching.page, dtype=like.dtype, device=like.device
        )
        self.pool.reserve(self.pages)
        self.min_first_chunk = max(spec.pattern.tokens_before_decode or 0 for spec in specs)
        blocks = list(net.stacks.values())[-1].blocks
        attentions = [block.attentions.get("attention") for block in blocks]
        # True if pages are gathered to decode, because a layer cannot read them in place.
        self.gathers = any(layer is not None and _gathers_pages(layer) for layer in attentions)

    @property
    def device(self) -> torch.device:
        """The device of the pages."""
        return self.pool.storage.device

    @property
    def page_bytes(self) -> int:
        """Bytes per page."""
        return self.paging.numel * self.pool.storage.element_size()

    @property
    def nbytes(self) -> int:
        """Bytes reserved, in use or not; never more than the budget."""
        return self.pool.nbytes

    @property
    def used(self) -> int:
        """Bytes of the pages that belong to a row."""
        return self.pool.block_tables.pages.num_allocated * self.page_bytes

    def new_row(self, tokens: int) -> PagedSequence:
        """Return an empty row that may grow to `tokens` tokens; raise if it does not fit into the
        budget even alone.
        """
        chunk = max(self.batching.chunk, self.min_first_chunk)
        reserved = tuple(group.max_pages(tokens, chunk) for group in self.paging.groups)
        need = sum(reserved)
        if need > self.pages:
            enough = self.budget + (need - self.pages) * self._bytes_per_page(
                self.pool.storage.dtype
            )
            raise ValueError(
                f"a request of {tokens:,} tokens needs {need:,} pages of {self.page_bytes:,} "
                f"bytes and the budget of {self.budget:,} bytes holds {self.pages:,}; ask for "
                f"fewer tokens, or give a budget of {enough:,}"
            )
        return self.pool.block_tables.new_sequence(reserved)

    def can_admit(self, rows: Sequence[PagedSequence], row: PagedSequence) -> bool:
        """True if a row fits next to `rows`, even if each needs all pages reserved for it."""
        needed = self.pool.block_tables.num_reserved_pages([*rows, row])
        return len(rows) < self.batching.rows and needed <= self.pages

    def max_gathered_pages(self, row: PagedSequence, count: int) -> int:
        """Maximum number of pages that a layer gathers for a row after `count` more tokens, for all
        groups of heads.
        """
        end = row.length + count
        groups = zip(self.paging.groups, row.reserved_pages, strict=True)
        pages = [min(-(-end // group.page), need) for group, need in groups]
        return max(sum(map(pages.__getitem__, layer)) for layer in self._groups_of_layers)

    def call(self, rows: Sequence[PagedSequence]) -> tuple[PagedBatch, ModelCache]:
        """Return the batch and the caches for one model call with these rows."""
        batch = self.pool.batch_of(rows)
        caches = iter(self.pool.caches(batch))
        # strict=False: each layer takes as many caches as it has names
        return batch, ModelCache(
            [dict(zip(names, caches, strict=False)) for names in self._cache_names]
        )

    def _bytes_per_page(self, dtype: torch.dtype) -> int:
        """Count the bytes of a page and of its part of the gather buffer."""
        return (self.paging.numel + self.paging.widest) * dtype.itemsize


def _gathers_pages(layer: Attention) -> bool:
    """True if a decode step of a layer copies its pages, because the backend "paged" cannot run."""
    spec = layer.spec
    like = layer.weights["project"].first_parameter
    job = CallSignature(
        spec,
        spec.core_of(spec.projection_form(one=True)),
        like.device.type,
        like.dtype,
        single_query=True,
        has_paged_cache=True,
    )
    is_free = layer.backend_name in (None, "paged")
    return not is_free or bool(backends.unsupported_reasons("paged", job))
