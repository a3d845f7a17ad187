"""What requests are remembered in: pages, states and sources, all within one budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from ..cache import KVCache, PagedSequence, PagePool, ProjectedSource, RecurrentStateCache
from ..cache.block_table import PageLayout
from ..cache.paged_batch import PagedBatch
from ..errors import SpecError, suggest
from ..masking.sequence_info import SequenceInfo
from ..models import EncoderOutput, ModelCache, Transformer
from ..spec.attention_spec import AttentionSpec
from .paged_layers import PagedSupport

ADMISSION_ORDERS = ("arrival", "shortest")


@dataclass(frozen=True)
class BatchingConfig:
    """How requests share a model: at most so many `rows` at once, in pages of so many tokens.

    A step takes at most `chunk` tokens of prompts beside one of every row. `order` says who is let in next: by
    "arrival", or the "shortest" first, where nobody is overtaken more than `patience` times. `source` is the longest
    that a model of two stacks reads.

    >>> BatchingConfig(rows=0)
    Traceback (most recent call last):
    headwise.errors.SpecError: Batching(rows=0) cannot be; give a whole number of at least 1
    """

    rows: int = 64
    page: int = 16
    chunk: int = 256
    order: str = "arrival"
    patience: int = 16
    source: int = 512

    def __post_init__(self) -> None:
        for name in ("rows", "page", "chunk", "patience", "source"):
            size = getattr(self, name)
            if type(size) is not int or size < 1:
                raise SpecError(f"Batching({name}={size!r}) cannot be; give a whole number of at least 1")
        if self.order not in ADMISSION_ORDERS:
            raise SpecError(f"Batching(order={self.order!r}) is unknown; {suggest(str(self.order), ADMISSION_ORDERS)}")


@dataclass
class CacheSlot:
    """Where one request is remembered: its row of pages, and the number of its state and source."""

    row: PagedSequence
    state_index: int
    source: int = 0  # tokens


class KVMemory:
    """A budget in bytes, divided into pages for all layers, and a state and a source for every row.

    The buffer into which the pages of one layer are gathered is part of it; what one step has alive besides is not.
    """

    def __init__(self, net: Transformer, budget: int, batching: BatchingConfig) -> None:
        self.batching, self.budget = batching, budget
        self.reading = PagedSupport.of(net)
        layers = net.cache(batch=1, capacity=1).layers
        self._cache_names = [[*layer] for layer in layers]
        caches = [cache for layer in layers for cache in layer.values()]
        self._is_stateful = [cache.spec.is_recurrent for cache in caches]
        paged = [cache.spec for cache in caches if not cache.spec.is_recurrent]
        like, rows = caches[0], batching.rows
        self._states = [RecurrentStateCache(c.spec, rows, c.dtype, c.device) for c in caches if c.spec.is_recurrent]
        blocks = list(net.stacks.values())[-1].blocks
        self._cross_specs = [
            block.attentions["cross"].spec if "cross" in block.attentions else None for block in blocks
        ]
        self._source_buffers = [_make_source_buffers(spec, batching, like) for spec in self._cross_specs]
        self.paging = PageLayout.for_specs(paged, batching.page)
        self.pages = self._num_affordable_pages(like)
        self.pool = PagePool(paged, pages=self.pages, page=batching.page, dtype=like.dtype, device=like.device)
        self.pool.reserve(self.pages)
        self.min_first_chunk = max((spec.pattern.tokens_before_decode or 0 for spec in paged), default=0)
        self._free_slots = list(reversed(range(rows)))

    @property
    def shares(self) -> bool:
        """Whether beginnings can be shared: a state is of one row."""
        return not any(self._is_stateful)

    @property
    def fixed_bytes(self) -> int:
        """Bytes of states and sources, of all rows there may be."""
        sources = sum(held.nbytes for source in self._source_buffers for held in source.values())
        # A call takes those of its rows side by side, once more.
        return 2 * (sum(state.nbytes for state in self._states) + sources)

    @property
    def device(self) -> torch.device:
        """Where all of it lies."""
        return self.pool.numbers.device

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.paging.numbers * self.pool.numbers.element_size()

    @property
    def nbytes(self) -> int:
        """Bytes that are really taken, in use or not: never more than the budget."""
        return self.fixed_bytes + self.pool.nbytes

    @property
    def used(self) -> int:
        """Bytes in use: of pages that are held, and of states and sources of the rows there are."""
        rows = self.batching.rows
        return (
            self.pool.book.pages.num_held * self.page_bytes + self.fixed_bytes * (rows - len(self._free_slots)) // rows
        )

    def pages_needed(self, tokens: int) -> tuple[int, ...]:
        """The pages that a row comes to hold at most on its way to so many tokens, group by group."""
        chunk = max(self.batching.chunk, self.min_first_chunk)
        return tuple(keep.max_pages(tokens, chunk) for keep in self.paging.groups)

    def check(self, tokens: int) -> None:
        """Refuse what could not be remembered if nobody else were here."""
        need = sum(self.pages_needed(tokens))
        if need > self.pages:
            enough = self.budget + (need - self.pages) * self._bytes_per_page(self.pool.numbers.element_size())
            raise ValueError(
                f"a request of {tokens:,} tokens needs {need:,} pages of {self.page_bytes:,} bytes and the budget of "
                f"{self.budget:,} bytes holds {self.pages:,}; ask for fewer tokens, or give a budget of {enough:,}"
            )

    def can_admit(self, slots: Sequence[CacheSlot], tokens: int) -> bool:
        """Whether a row of so many tokens fits beside these, whatever each of them still comes to need."""
        rows = [place.row for place in slots]
        fresh = self.pool.book.new_sequence(self.pages_needed(tokens))
        return bool(self._free_slots) and self.pool.book.num_reserved_pages([*rows, fresh]) <= self.pages

    def enter(self, tokens: int, namespace: bytes) -> CacheSlot:
        """A place for a row of so many tokens."""
        place = CacheSlot(self.pool.book.new_sequence(self.pages_needed(tokens), namespace), self._free_slots.pop())
        self._clear_states(place)
        return place

    def leave(self, slot: CacheSlot) -> None:
        """Give back all that a row has."""
        self.pool.book.free_sequence(slot.row)
        self._free_slots.append(slot.state_index)

    def restart(self, slot: CacheSlot) -> None:
        """Let a row begin anew in the same place."""
        need, root = slot.row.reserved_tokens, slot.row.namespace
        self.pool.book.free_sequence(slot.row)
        slot.row = self.pool.book.new_sequence(need, root)
        self._clear_states(slot)

    def max_gathered_pages(self, slot: CacheSlot, count: int) -> int:
        """The pages that a layer gathers of a row with so many tokens more, at most."""
        end = slot.row.length + count
        each = zip(self.paging.groups, slot.row.reserved_tokens, strict=True)
        return max((min(-(-end // keep.page), need) for keep, need in each), default=0)

    def remember(self, slot: CacheSlot, encoder_output: EncoderOutput) -> None:
        """Keep what a row reads of another stack."""
        slot.source = encoder_output.tokens.count
        for kept, read in zip(self._source_buffers, encoder_output.layers, strict=True):
            for name, held in kept.items():
                assert read is not None
                held[slot.state_index, : slot.source] = read.entry[name][0]

    def call(self, cache_slots: Sequence[CacheSlot]) -> BatchedModelCall:
        """What a call of the model with these rows is handed."""
        slots = torch.tensor([place.state_index for place in cache_slots], device=self.pool.numbers.device)
        seats = self.pool.batch_of([place.row for place in cache_slots])
        states = [RecurrentStateCache(held.spec, len(cache_slots), held.dtype, held.device) for held in self._states]
        for cache, held in zip(states, self._states, strict=True):
            cache.set_state({name: kept[slots] for name, kept in held.state.items()})
        paged, stated = iter(self.pool.caches(seats)), iter(states)
        every = iter([cast(KVCache, next(stated if is_stated else paged)) for is_stated in self._is_stateful])
        layers = [{name: next(every) for name in names} for names in self._cache_names]
        return BatchedModelCall(seats, ModelCache(layers), self._encoder_output(cache_slots, slots), slots, states)

    def keep(self, call: BatchedModelCall) -> None:
        """Write down the states behind a call."""
        for held, cache in zip(self._states, call.states, strict=True):
            for name, kept in held.state.items():
                kept[call.slots] = cache.state[name]

    def _clear_states(self, place: CacheSlot) -> None:
        for state in self._states:
            for held in state.state.values():
                held[place.state_index] = 0

    def _encoder_output(self, places: Sequence[CacheSlot], slots: Tensor) -> EncoderOutput | None:
        if not any(self._source_buffers):
            return None
        counts = [place.source for place in places]
        device, most = slots.device, max(counts)
        place = torch.arange(most, device=device).expand(len(places), -1)
        live = place < torch.tensor(counts, device=device)[:, None]
        whole = len(set(counts)) == 1
        tokens = (
            SequenceInfo.contiguous(0, most, device) if whole else SequenceInfo(place, live.long() - 1, checked=True)
        )
        layers = [
            spec and ProjectedSource({name: held[slots, :most] for name, held in kept.items()}, tokens, spec)
            for spec, kept in zip(self._cross_specs, self._source_buffers, strict=True)
        ]
        return EncoderOutput(self.pool.numbers.new_zeros(len(places), 0, 0), tokens, tuple(layers))

    def _num_affordable_pages(self, like: KVCache) -> int:
        """Pages that the budget holds beside what every row has, the empty one and the buffer counted."""
        each, one = self._bytes_per_page(like.dtype.itemsize), self.paging.numbers * like.dtype.itemsize
        left = self.budget - self.fixed_bytes - one
        pages = left // each if each else 0
        if left < 0 or (each and pages < 1):
            least = self.fixed_bytes + one + each
            raise ValueError(
                f"a budget of {self.budget:,} bytes holds no request: states and sources of {self.batching.rows} rows "
                f"take {self.fixed_bytes:,} and a page {each:,}; give {least:,} or more, or fewer rows"
            )
        return pages

    def _bytes_per_page(self, itemsize: int) -> int:
        """Bytes of a page, and of its share in the buffer."""
        return (self.paging.numbers + self.paging.widest) * itemsize


@dataclass
class BatchedModelCall:
    """What one call of the model is handed: caches and memory of its rows, and where their states are kept."""

    paged_batch: PagedBatch
    caches: ModelCache
    memory: EncoderOutput | None
    slots: Tensor
    states: list[RecurrentStateCache] = field(default_factory=list)


def _make_source_buffers(spec: AttentionSpec | None, batching: BatchingConfig, like: KVCache) -> dict[str, Tensor]:
    """Room for what one layer reads of every row's source."""
    if spec is None:
        return {}
    lead = batching.rows, batching.source
    return {
        name: torch.zeros(*lead, *shape, dtype=like.dtype, device=like.device)
        for name, shape in spec.kv_entry_shapes().items()
    }
