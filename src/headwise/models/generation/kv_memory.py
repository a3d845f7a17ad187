"""Memory of the engine: cache pages, recurrent states and encoder outputs within one budget of
bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ...attention import backends
from ...attention.attention import Attention
from ...attention.backends import CallSignature
from ...attention.cache import (
    KVCache,
    PagedSequence,
    PagePool,
    ProjectedSource,
    RecurrentStateCache,
)
from ...attention.cache.block_table import PageLayout
from ...attention.cache.paged_cache import PagedBatch, list_stored_specs, reserve_zeros
from ...attention.masking.sequence_info import SequenceInfo
from ...attention.spec.attention_spec import AttentionSpec
from ...util.errors import SpecError
from .. import EncoderOutput, ModelCache, Transformer

# --- Layers that read cache pages in place --------------------------------------------------------


class PagedSupport(NamedTuple):
    """Number of layers with paged caches, and the reasons of those that gather pages to decode, by
    module path.

    >>> import headwise as hw
    >>> config = {
    ...     "model_type": "llama",
    ...     "hidden_size": 8,
    ...     "intermediate_size": 12,
    ...     "num_attention_heads": 2,
    ... }
    >>> PagedSupport.of(
    ...     hw.build(
    ...         hw.families.read_model_spec(config | {"num_hidden_layers": 2, "vocab_size": 11})
    ...     )
    ... )
    PagedSupport(layers=2, gathers={})
    """

    layers: int
    gathers: dict[str, str]

    @staticmethod
    def of(net: Transformer) -> PagedSupport:
        """Inspect the last stack, which generates."""
        name, stack = list(net.stacks.items())[-1]
        reasons: dict[str, str] = {}
        layers = 0
        for number, block in enumerate(stack.blocks):
            layer = block.attentions.get("attention")
            if layer is not None and not layer.spec.is_recurrent:
                layers += 1
                why = _gather_reason(layer)
                if why:
                    reasons[f"{name}.{number}.attention"] = why
        return PagedSupport(layers, reasons)


def _gather_reason(layer: Attention) -> str:
    if layer.backend_name not in (None, "paged"):
        return f"the layer sets backend={layer.backend_name!r}"
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
    return "; ".join(backends.unsupported_reasons("paged", job))


# --- Memory ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchingConfig:
    """How requests share a model: at most `rows` requests run at once, in cache pages of `page`
    tokens.

    A step prefills at most `chunk` prompt tokens and decodes one token per row. `source` is the
    maximum source length of an encoder-decoder.

    >>> BatchingConfig(rows=0)
    Traceback (most recent call last):
    headwise.util.errors.SpecError: BatchingConfig: rows must be an integer of at least 1, got 0; try rows=64
    """

    rows: int = 64
    page: int = 16
    chunk: int = 256
    source: int = 512

    def __post_init__(self) -> None:
        for name in ("rows", "page", "chunk", "source"):
            size = getattr(self, name)
            if type(size) is not int or size < 1:
                raise SpecError(
                    f"BatchingConfig: {name} must be an integer of at least 1, got {size!r}; try "
                    f"{name}=64"
                )


@dataclass
class CacheSlot:
    """Cache of one request: its page table, and the index of its recurrent state and source."""

    row: PagedSequence
    state_index: int
    source: int = 0  # tokens


class KVMemory:
    """Divides a budget of bytes into cache pages for all layers, and one state and source buffer
    per row.

    The budget includes the buffer into which the pages of one layer are gathered, but not a step's
    activations. On a CPU, pages, sources and the buffer take memory when they are first written.
    """

    def __init__(self, net: Transformer, budget: int, batching: BatchingConfig) -> None:
        self.batching = batching
        self.budget = budget
        self.reading = PagedSupport.of(net)
        layers = net.cache(batch=1, capacity=1).layers
        self._cache_names = [[*layer] for layer in layers]
        caches = [
            cache for layer in layers for cache in layer.values() if isinstance(cache, KVCache)
        ]
        if len(caches) < sum(map(len, layers)):
            raise SpecError(
                "the engine caches attention only, and this model has recurrences or "
                "convolutions; use hw.generate"
            )
        if not caches:
            raise SpecError(
                "the engine caches self-attention, and this model has none in the stack that "
                "generates; use hw.generate"
            )
        self._is_stateful = [cache.spec.is_recurrent for cache in caches]
        paged = [cache.spec for cache in caches if not cache.spec.is_recurrent]
        like = caches[0]
        rows = batching.rows
        self._states = [
            RecurrentStateCache(c.spec, rows, c.dtype, c.device)
            for c in caches
            if c.spec.is_recurrent
        ]
        blocks = list(net.stacks.values())[-1].blocks
        self._cross_specs = [
            block.attentions["cross"].spec if "cross" in block.attentions else None
            for block in blocks
        ]
        self._source_buffers = [
            _make_source_buffers(spec, batching, like) for spec in self._cross_specs
        ]
        self.paging = PageLayout.for_specs(list_stored_specs(paged), batching.page)
        retentions = [group[:2] for group in self.paging.groups]
        # Retention groups of each layer, without repetition: one, or one for each group of its
        # heads.
        self._groups_of_layers = {
            tuple(
                retentions.index(stored.pattern.retention) for stored in list_stored_specs([spec])
            )
            for spec in paged
        }
        self.pages = self._num_affordable_pages(like)
        self.pool = PagePool(
            paged, pages=self.pages, page=batching.page, dtype=like.dtype, device=like.device
        )
        self.pool.reserve(self.pages)
        self.min_first_chunk = max(
            (spec.pattern.tokens_before_decode or 0 for spec in paged), default=0
        )
        self._free_slots = list(reversed(range(rows)))

    @property
    def shares(self) -> bool:
        """Whether prefixes can be shared; a recurrent state belongs to one row, so it cannot."""
        return not any(self._is_stateful)

    @property
    def fixed_bytes(self) -> int:
        """Bytes of the states and sources of `batching.rows` rows."""
        sources = sum(
            buffer.nbytes for source in self._source_buffers for buffer in source.values()
        )
        # Twice: each call copies the states and sources of its rows into one batch.
        return 2 * (sum(state.nbytes for state in self._states) + sources)

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
        return self.fixed_bytes + self.pool.nbytes

    @property
    def used(self) -> int:
        """Bytes in use: pages that belong to a row, and states and sources of the running rows."""
        rows = self.batching.rows
        return (
            self.pool.block_tables.pages.num_allocated * self.page_bytes
            + self.fixed_bytes * (rows - len(self._free_slots)) // rows
        )

    def pages_needed(self, tokens: int) -> tuple[int, ...]:
        """Maximum number of pages per layer group that a row of `tokens` tokens ever uses."""
        chunk = max(self.batching.chunk, self.min_first_chunk)
        return tuple(group.max_pages(tokens, chunk) for group in self.paging.groups)

    def check(self, tokens: int) -> None:
        """Raise if a request of `tokens` tokens does not fit into the budget even alone."""
        need = sum(self.pages_needed(tokens))
        if need > self.pages:
            enough = self.budget + (need - self.pages) * self._bytes_per_page(
                self.pool.storage.element_size()
            )
            raise ValueError(
                f"a request of {tokens:,} tokens needs {need:,} pages of {self.page_bytes:,} "
                "bytes and the budget of "
                f"{self.budget:,} bytes holds {self.pages:,}; ask for fewer tokens, or give a "
                f"budget of {enough:,}"
            )

    def can_admit(self, slots: Sequence[CacheSlot], tokens: int) -> bool:
        """Whether a row of `tokens` tokens fits beside `slots`, even if each needs all pages
        reserved for it.
        """
        rows = [place.row for place in slots]
        fresh = self.pool.block_tables.new_sequence(self.pages_needed(tokens))
        return (
            bool(self._free_slots)
            and self.pool.block_tables.num_reserved_pages([*rows, fresh]) <= self.pages
        )

    def enter(self, tokens: int, namespace: bytes) -> CacheSlot:
        """Reserve a slot for a row of `tokens` tokens; only rows of one
        namespace share prefixes.
        """
        place = CacheSlot(
            self.pool.block_tables.new_sequence(self.pages_needed(tokens), namespace),
            self._free_slots.pop(),
        )
        self._clear_states(place)
        return place

    def leave(self, slot: CacheSlot) -> None:
        """Free the pages and the state of a row."""
        self.pool.block_tables.free_sequence(slot.row)
        self._free_slots.append(slot.state_index)

    def restart(self, slot: CacheSlot) -> None:
        """Clear a row so that it starts again in the same slot."""
        row = slot.row
        self.pool.block_tables.free_sequence(row)
        slot.row = self.pool.block_tables.new_sequence(row.reserved_pages, row.namespace)
        self._clear_states(slot)

    def max_gathered_pages(self, slot: CacheSlot, count: int) -> int:
        """Maximum number of pages that a layer gathers for a row after `count` more tokens, for all
        groups of heads.
        """
        end = slot.row.length + count
        groups = zip(self.paging.groups, slot.row.reserved_pages, strict=True)
        pages = [min(-(-end // group.page), need) for group, need in groups]
        return max(
            (sum(pages[group] for group in layer) for layer in self._groups_of_layers), default=0
        )

    def remember(self, slot: CacheSlot, encoder_output: EncoderOutput) -> None:
        """Store the projected keys and values of a row's source."""
        slot.source = encoder_output.tokens.count
        for buffers, projected in zip(self._source_buffers, encoder_output.layers, strict=True):
            for name, buffer in buffers.items():
                assert projected is not None
                buffer[slot.state_index, : slot.source] = projected.entry[name][0]

    def call(self, cache_slots: Sequence[CacheSlot]) -> BatchedModelCall:
        """Return caches and encoder output for one model call with these rows."""
        slots = torch.tensor(
            [place.state_index for place in cache_slots], device=self.pool.storage.device
        )
        batch = self.pool.batch_of([slot.row for slot in cache_slots])
        states = [
            RecurrentStateCache(c.spec, len(cache_slots), c.dtype, c.device) for c in self._states
        ]
        for cache, all_rows in zip(states, self._states, strict=True):
            cache.set_state({name: tensor[slots] for name, tensor in all_rows.state.items()})
        paged = iter(self.pool.caches(batch))
        stateful = iter(states)
        caches = iter(
            [cast(KVCache, next(stateful if is_state else paged)) for is_state in self._is_stateful]
        )
        layers = [{name: next(caches) for name in names} for names in self._cache_names]
        return BatchedModelCall(
            batch, ModelCache(layers), self._encoder_output(cache_slots, slots), slots, states
        )

    def keep(self, call: BatchedModelCall) -> None:
        """Store the recurrent states after a call."""
        for all_rows, cache in zip(self._states, call.states, strict=True):
            for name, tensor in all_rows.state.items():
                tensor[call.slots] = cache.state[name]

    def _clear_states(self, place: CacheSlot) -> None:
        for state in self._states:
            for tensor in state.state.values():
                tensor[place.state_index] = 0

    def _encoder_output(self, places: Sequence[CacheSlot], slots: Tensor) -> EncoderOutput | None:
        if not any(self._source_buffers):
            return None
        counts = [place.source for place in places]
        device = slots.device
        most = max(counts)
        place = torch.arange(most, device=device).expand(len(places), -1)
        live = place < torch.tensor(counts, device=device)[:, None]
        whole = len(set(counts)) == 1
        tokens = (
            SequenceInfo.contiguous(0, most, device)
            if whole
            else SequenceInfo(place, live.long() - 1, checked=True)
        )
        layers = [
            spec
            and ProjectedSource(
                {name: tensor[slots, :most] for name, tensor in buffers.items()}, tokens, spec
            )
            for spec, buffers in zip(self._cross_specs, self._source_buffers, strict=True)
        ]
        return EncoderOutput(self.pool.storage.new_zeros(len(places), 0, 0), tokens, tuple(layers))

    def _num_affordable_pages(self, like: KVCache) -> int:
        """Pages that fit beside the states and sources, after the padding page and the gather
        buffer.
        """
        per_page = self._bytes_per_page(like.dtype.itemsize)
        padding_page = self.paging.numel * like.dtype.itemsize
        available = self.budget - self.fixed_bytes - padding_page
        pages = available // per_page if per_page else 0
        if available < 0 or (per_page and pages < 1):
            minimum = self.fixed_bytes + padding_page + per_page
            raise ValueError(
                f"a budget of {self.budget:,} bytes holds no request: states and sources of "
                f"{self.batching.rows} rows "
                f"take {self.fixed_bytes:,} and a page {per_page:,}; give {minimum:,} or more, or "
                "fewer rows"
            )
        return pages

    def _bytes_per_page(self, itemsize: int) -> int:
        """Bytes of a page and of its part of the gather buffer."""
        return (self.paging.numel + self.paging.widest) * itemsize


@dataclass
class BatchedModelCall:
    """Inputs of one model call: caches and encoder output of its rows, and their state indices."""

    paged_batch: PagedBatch
    caches: ModelCache
    memory: EncoderOutput | None
    slots: Tensor
    states: list[RecurrentStateCache] = field(default_factory=list)


def _make_source_buffers(
    spec: AttentionSpec | None, batching: BatchingConfig, like: KVCache
) -> dict[str, Tensor]:
    """Return buffers for one layer's cross-attention keys and values of every row."""
    if spec is None:
        return {}
    lead = batching.rows, batching.source
    return {
        name: reserve_zeros((*lead, *shape), like.dtype, like.device)
        for name, shape in spec.kv_entry_shapes().items()
    }
