"""Caches with one slot per token (all tokens, or a ring of those in reach); states of linear attention and of a GRU."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..backends.linear_attention import empty_state
from ..errors import CacheFull
from ..masking.patterns import Causal, First, Pattern, Window
from ..masking.sequence_info import SequenceInfo
from ..spec.attention_spec import AttentionSpec
from .kv_cache import FullVisibility, KVCache, KVEntry, TokenCache, dequantize_entry, quantize_entry


class StorageFormat(NamedTuple):
    """Dtype and device of a cache; `store` names a compressed format such as "int8", None stores in `dtype`."""

    dtype: torch.dtype
    device: torch.device
    store: str | None = None


class SlotCache(KVCache):
    """Tokens in a fixed number of slots; an empty slot has segment -1."""

    def __init__(self, spec: AttentionSpec, shape: tuple[int, int], storage: StorageFormat) -> None:
        (batch, slots), (dtype, device, store) = shape, storage
        super().__init__(spec, batch, dtype, device)
        self.slots, self._store = slots, store
        self._names = [*spec.project.kv_entry_layouts(spec)] if store else []
        shapes = spec.kv_entry_shapes().items()
        empty_entry = {n: torch.zeros(batch, 0, *s, dtype=dtype, device=device) for n, s in shapes}
        templates = quantize_entry(empty_entry, self._names)
        self.entry: KVEntry = {n: like.new_zeros(batch, slots, *like.shape[2:]) for n, like in templates.items()}
        empty = torch.full((batch, slots), -1, dtype=torch.int64, device=device)
        self.tokens = SequenceInfo(torch.arange(slots, device=device).repeat(batch, 1), empty, checked=True)
        self._visibility = self._full_visibility = FullVisibility(spec.pattern, slots)

    @abstractmethod
    def _retained_positions(self) -> Pattern:
        """Return the pattern of past tokens that are still in a slot."""

    def _stored_tokens(self) -> SequenceInfo:
        """Return the positions of all slots; `num_visible` is set if the newest token attends to every stored token."""
        if not (self.uniform and self._reads_all):
            if self.uniform:
                self._write_pending_positions(self.used)
            return self.tokens
        num_filled, position, segment = min(self.used, self.slots), self.tokens.position, self.tokens.segment
        # A compiled step keeps the empty slots, which are not tokens at consecutive positions.
        start = None if torch.compiler.is_compiling() else self._first_position
        return SequenceInfo(position, segment, start, checked=True, num_visible=num_filled)

    @property
    @abstractmethod
    def _first_position(self) -> int | None:
        """Return the position in the first slot if uniform rows have consecutive positions, else None."""

    @property
    def _reads_all(self) -> bool:
        """Whether the newest token attends to every stored token (see `FullVisibility`)."""
        return self._full_visibility.sees_all(self.used, self._retained_positions)

    @property
    def storage_format(self) -> str | None:
        return self._store

    def dequantize(self, entry: KVEntry) -> KVEntry:
        return dequantize_entry(entry, self._names, self.dtype) if self._names else entry

    def select_rows(self, index: Tensor) -> None:
        self._select_batch(index)
        self.entry = {name: cached[index] for name, cached in self.entry.items()}
        self.tokens = SequenceInfo(self.tokens.position[index], self.tokens.segment[index], checked=True)

    @property
    def nbytes(self) -> int:
        return sum(cached.nbytes for cached in self.entry.values())

    def _write(self, entry: KVEntry, new_tokens: SequenceInfo, slot_BT: Tensor) -> None:
        """Write each token into its slot; a token whose slot is `self.slots` is dropped."""
        keep = slot_BT < self.slots
        row = torch.arange(self.batch, device=self.device)[:, None].expand_as(slot_BT)[keep]
        slot = slot_BT[keep]
        for name, new in self._to_storage(entry).items():
            self.entry[name][row, slot] = new[keep].to(self.entry[name].dtype)  # autocast projects in its own dtype
        for stored, new in ((self.tokens.position, new_tokens.position), (self.tokens.segment, new_tokens.segment)):
            stored[row, slot] = new.expand(self.batch, -1)[keep]

    def _write_entry(self, entry: KVEntry, first: int, count: int) -> None:
        """Write tokens into consecutive slots of all rows at once."""
        for name, new in self._to_storage(entry).items():
            self.entry[name][:, first : first + count] = new

    def _to_storage(self, entry: KVEntry) -> KVEntry:
        return quantize_entry(entry, self._names) if self._names else entry

    @abstractmethod
    def _write_pending_positions(self, used: int) -> None:
        """Write the positions of the first `used` tokens, which uniform rows leave implicit."""


class ContiguousCache(SlotCache):
    """Cache of every token; raises CacheFull when all slots are used."""

    def __init__(self, spec: AttentionSpec, shape: tuple[int, int], storage: StorageFormat) -> None:
        super().__init__(spec, shape, storage)
        self._filled = torch.zeros(self.batch, dtype=torch.int64, device=self.device)
        self._bound = 0  # upper bound of the slots that any row has filled

    def append(self, entry: KVEntry, new_tokens: SequenceInfo) -> tuple[KVEntry, SequenceInfo]:
        self._check_capacity(new_tokens)
        was_uniform, is_first, first = self.uniform, self.used == 0, self.used
        self._record_tokens(new_tokens)
        if self.uniform:
            self._write_entry(entry, first, new_tokens.count)
        else:
            if was_uniform:
                self._write_pending_positions(first)
                self._filled = torch.full_like(self._filled, first)
            self._write(entry, new_tokens, self._slot(new_tokens))
            self._filled = self._filled + new_tokens.is_real.expand(self.batch, -1).sum(1)
        self._bound += new_tokens.count
        if new_tokens.count == 1:
            return self.entry, self._stored_tokens() if self.uniform else self._per_row_lengths(new_tokens)
        if is_first:
            return entry, new_tokens
        if self.uniform:
            self._write_pending_positions(self.used)
        filled = self.dequantize({name: cached[:, : self._bound] for name, cached in self.entry.items()})
        position, segment = self.tokens.position[:, : self._bound], self.tokens.segment[:, : self._bound]
        return filled, SequenceInfo(position, segment, 0 if self.uniform else None, checked=True)

    def _per_row_lengths(self, new_tokens: SequenceInfo) -> SequenceInfo:
        """Positions of all slots; `visible_per_row` is set if each newest token attends to all tokens of its row."""
        if not (self.is_single_segment and self._reads_all):
            return self.tokens
        num_visible = torch.where(new_tokens.is_real.expand(self.batch, -1)[:, 0], self._filled, 0)
        return SequenceInfo(self.tokens.position, self.tokens.segment, checked=True, visible_per_row=num_visible)

    def _write_pending_positions(self, used: int) -> None:
        # While rows are uniform, a slot's position is its index and its segment 0; segments are written on first use.
        self.tokens.segment[:, :used] = 0

    def _retained_positions(self) -> Pattern:
        return Causal()

    @property
    def _first_position(self) -> int | None:
        return 0

    def _slot(self, new_tokens: SequenceInfo) -> Tensor:
        live = new_tokens.is_real.expand(self.batch, -1)
        return torch.where(live, self._filled[:, None] + live.cumsum(1) - 1, self.slots)

    def _check_capacity(self, new_tokens: SequenceInfo) -> None:
        if self._bound + new_tokens.count <= self.slots:
            return
        longest = self._bound + new_tokens.count
        if not (self.uniform and new_tokens.start is not None) and self.batch:
            # The bound counts padding; only now is a device sync for the exact count worth its time.
            filled = self._filled if not self.uniform else torch.full_like(self._filled, self.used)
            longest = int((filled + new_tokens.is_real.expand(self.batch, -1).sum(1)).max())
        if longest > self.slots:
            raise CacheFull(
                f"{longest} tokens do not fit in {self.slots} slots; make the cache with capacity={longest} or more"
            )
        self._bound = longest - new_tokens.count

    def select_rows(self, index: Tensor) -> None:
        super().select_rows(index)
        self._filled = self._filled[index]


class RingCache(SlotCache):
    """Cache of the first tokens of a segment and its latest ones, all that a windowed pattern can still attend to."""

    def __init__(self, spec: AttentionSpec, shape: tuple[int, int, int], storage: StorageFormat) -> None:
        batch, first, last = shape
        super().__init__(spec, (batch, first + last), storage)
        self.first, self.last = first, last
        self._num_warmup_tokens = self.slots  # once the ring is full, every token overwrites another

    def append(self, entry: KVEntry, new_tokens: SequenceInfo) -> tuple[KVEntry, SequenceInfo]:
        is_first, old_entry, old_tokens = self.used == 0, self.entry, self.tokens
        visible, sequence = entry, new_tokens
        if new_tokens.count != 1 and not is_first:
            order, start = self._slots_in_order(new_tokens)
            past = self.dequantize({name: cached[:, order] for name, cached in old_entry.items()})
            visible = {name: torch.cat([cached, entry[name]], 1) for name, cached in past.items()}
            position, segment = (
                torch.cat([old[:, order], new.expand(self.batch, -1)], 1)
                for old, new in ((old_tokens.position, new_tokens.position), (old_tokens.segment, new_tokens.segment))
            )
            sequence = SequenceInfo(position, segment, start, checked=True)
        before = self.used
        self._record_tokens(new_tokens)
        if self.uniform and new_tokens.count == 1:
            slot = before if before < self.first else self.first + (before - self.first) % self.last
            self._write_entry(entry, slot, 1)
            self.tokens.position[:, slot : slot + 1] = new_tokens.position
            self.tokens.segment[:, slot : slot + 1] = 0
        elif self.uniform and new_tokens.start == before:
            self._write_uniform(entry, new_tokens, before)
        else:
            self._write(entry, new_tokens, self._slot(new_tokens))
        return (self.entry, self._stored_tokens()) if new_tokens.count == 1 else (visible, sequence)

    def _write_uniform(self, entry: KVEntry, new_tokens: SequenceInfo, start: int) -> None:
        """Write consecutive tokens of all rows, those that stay in the cache; no value is read from the device."""
        stop = start + new_tokens.count
        leading = torch.arange(start, max(start, min(self.first, stop)), device=self.device)
        latest = torch.arange(min(stop, max(start, self.first, stop - self.last)), stop, device=self.device)
        column = torch.cat([leading, latest]) - start
        slot = torch.cat([leading, self.first + (latest - self.first) % self.last])
        for name, new in self._to_storage(entry).items():
            self.entry[name][:, slot] = new[:, column].to(self.entry[name].dtype)
        self.tokens.position[:, slot] = new_tokens.position[:, column]
        self.tokens.segment[:, slot] = 0

    def _slots_in_order(self, new_tokens: SequenceInfo) -> tuple[Tensor | slice, int | None]:
        """Slots ordered by position, and the position of the first; all slots and None if rows are not uniform."""
        if self.first or not self.uniform or new_tokens.start != self.used:
            return slice(None), None
        start = max(0, self.used - self.last)
        return torch.arange(start, self.used, device=self.device) % self.last, start

    def _write_pending_positions(self, used: int) -> None:
        """Do nothing: a ring writes every position at once because slots are reused."""

    def _retained_positions(self) -> Pattern:
        return Window(self.last) | First(self.first) if self.first else Window(self.last)

    @property
    def _first_position(self) -> int | None:
        return None

    def _slot(self, new_tokens: SequenceInfo) -> Tensor:
        position = new_tokens.position.expand(self.batch, -1)
        ring = self.first + (position - self.first) % self.last
        slot = torch.where(position < self.first, position, ring)
        slot = torch.where(new_tokens.is_real.expand(self.batch, -1), slot, self.slots)
        # If several new tokens map to one slot, the latest is stored; index_put would pick any.
        order = torch.arange(new_tokens.count, device=self.device).expand_as(slot)
        winner = torch.full((self.batch, self.slots + 1), -1, device=self.device)
        winner = winner.scatter_reduce(1, slot, order, "amax")
        return torch.where(winner.gather(1, slot) == order, slot, self.slots)


# --- Recurrent states ----------------------------------------------------------------------------------


class RecurrentStateCache(KVCache):
    """One recurrent state per head, updated with every token; its size does not depend on the length."""

    def __init__(self, spec: AttentionSpec, batch: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, batch, dtype, device)
        self._state = empty_state(spec, batch, dtype, device)

    @property
    def state(self) -> Mapping[str, Tensor]:
        return self._state

    def set_state(self, state: dict[str, Tensor]) -> None:
        """Store the state after the tokens just appended."""
        self._state = state

    def append(self, entry: KVEntry, new_tokens: SequenceInfo) -> tuple[KVEntry, SequenceInfo]:
        if new_tokens.start is None and bool((new_tokens.is_real & (new_tokens.segment != 0)).any()):
            raise ValueError("a recurrent state cannot separate segments; give each packed document a cache of its own")
        self._record_tokens(new_tokens)
        return entry, new_tokens

    def select_rows(self, index: Tensor) -> None:
        self._select_batch(index)
        self._state = {name: state[index] for name, state in self._state.items()}

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self._state.values())


class HiddenStateCache(TokenCache):
    """The state [B, ...] of a recurrence or convolution after the tokens so far; None before the first."""

    def __init__(self, batch: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(batch, dtype, device)
        self.state: Tensor | None = None

    def advance(self, state: Tensor | None, new_tokens: SequenceInfo) -> None:
        """Store the state after these tokens."""
        self._record_positions(new_tokens)
        self.state = state

    def select_rows(self, index: Tensor) -> None:
        self._select_batch(index)
        self.state = None if self.state is None else self.state[index]

    @property
    def is_predictable(self) -> bool:
        return self.uniform and self.used >= self._num_warmup_tokens

    @property
    def nbytes(self) -> int:
        return 0 if self.state is None else self.state.nbytes
