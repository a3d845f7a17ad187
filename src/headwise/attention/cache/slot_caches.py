"""Caches with one slot per token (all tokens, or a ring of those in reach; a static one for
compiled steps); states of linear attention and of a GRU.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Self

import torch
from torch import Tensor

from ...util.errors import CacheFull
from ..backends.linear_attention import empty_state
from ..masking.patterns import Causal, Pattern
from ..masking.sequence_info import SequenceInfo
from ..spec.attention_spec import AttentionSpec
from .kv_cache import (
    FullVisibility,
    KVCache,
    KVEntry,
    RowEnds,
    TokenCache,
    dequantize_entry,
    quantize_entry,
    retained_tokens,
)


class SlotCache(KVCache):
    """Tokens in a fixed number of slots; an empty slot has segment -1."""

    # The position in the first slot if uniform rows have consecutive positions.
    _first_position: int | None = None

    def __init__(
        self,
        spec: AttentionSpec,
        batch: int,
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
        store: str | None,
    ) -> None:
        super().__init__(spec, batch, dtype, device)
        self.slots = slots
        self.storage_format = store
        self._names = [*spec.project.kv_entry_layouts(spec)] if store else []
        shapes = spec.kv_entry_shapes().items()
        empty_entry = {n: torch.zeros(batch, 0, *s, dtype=dtype, device=device) for n, s in shapes}
        templates = quantize_entry(empty_entry, self._names)
        self.entry: KVEntry = {
            n: like.new_zeros(batch, slots, *like.shape[2:]) for n, like in templates.items()
        }
        empty = torch.full((batch, slots), -1, dtype=torch.int64, device=device)
        self.tokens = SequenceInfo(
            torch.arange(slots, device=device).repeat(batch, 1), empty, checked=True
        )
        self._full_visibility = FullVisibility(spec.pattern, self._retained_tokens(), slots)

    def preview(self, new_tokens: SequenceInfo) -> SequenceInfo:
        return self._copy_positions().extend({}, new_tokens)[1]

    def _copy_positions(self) -> Self:
        """Return a copy that stores positions alone."""
        other = copy.copy(self)
        other.entry = {}
        other._names = []
        position = self.tokens.position.clone()
        other.tokens = SequenceInfo(position, self.tokens.segment.clone(), checked=True)
        return other

    def _retained_tokens(self) -> Pattern:
        """Return the pattern of past tokens that are still in a slot."""
        return retained_tokens(self.spec.pattern)

    def _stored_tokens(self) -> SequenceInfo:
        """Return the positions of all slots; `num_visible` is set if the newest token attends to
        every stored token.
        """
        is_uniform = self._ends is None
        if not (is_uniform and self._reads_all):
            if is_uniform:
                self._write_pending_positions(self.used)
            return self.tokens
        num_filled = min(self.used, self.slots)
        position = self.tokens.position
        segment = self.tokens.segment
        # A compiled step keeps the empty slots, which are not tokens at consecutive positions.
        start = None if torch.compiler.is_compiling() else self._first_position
        return SequenceInfo(position, segment, start, checked=True, num_visible=num_filled)

    @property
    def _reads_all(self) -> bool:
        """True if the newest token attends to every stored token (see `FullVisibility`)."""
        return self._full_visibility.sees_all(self.used)

    def dequantize(self, entry: KVEntry) -> KVEntry:
        return dequantize_entry(entry, self._names, self.dtype) if self._names else entry

    def take_rows(self, index: Tensor, ends: dict[RowEnds, RowEnds]) -> None:
        self._take_ends(index, ends)
        self.entry = {name: cached[index] for name, cached in self.entry.items()}
        self.tokens = SequenceInfo(
            self.tokens.position[index], self.tokens.segment[index], checked=True
        )

    @property
    def nbytes(self) -> int:
        return sum(cached.nbytes for cached in self.entry.values())

    def _write(self, entry: KVEntry, new_tokens: SequenceInfo, slot_BT: Tensor) -> None:
        """Write each token that is not padding into its slot."""
        row = torch.arange(self.batch, device=self.device)[:, None]
        column: Tensor | slice = slice(None)
        if new_tokens.has_padding:
            row, column = new_tokens.real_tokens(self.batch)
            slot_BT = slot_BT[row, column]
        for stored, new in self._stored_and_new(entry, new_tokens):
            stored[row, slot_BT] = new[row, column] if new_tokens.has_padding else new

    def _stored_and_new(
        self, entry: KVEntry, new_tokens: SequenceInfo
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each tensor of the slots, and what of the new tokens goes into it."""
        for name, new in self._to_storage(entry).items():
            stored = self.entry[name]
            yield stored, new.to(stored.dtype)  # autocast projects in its own dtype
        yield self.tokens.position, new_tokens.position.expand(self.batch, -1)
        yield self.tokens.segment, new_tokens.segment.expand(self.batch, -1)

    def _write_entry(self, entry: KVEntry, first: int, count: int) -> None:
        """Write tokens into consecutive slots of all rows at once."""
        for name, new in self._to_storage(entry).items():
            self.entry[name][:, first : first + count] = new

    def _to_storage(self, entry: KVEntry) -> KVEntry:
        return quantize_entry(entry, self._names) if self._names else entry

    def _write_pending_positions(self, used: int) -> None:
        """Write the positions of the first `used` tokens, if uniform rows leave them implicit."""


class ContiguousCache(SlotCache):
    """Cache of every token; raises CacheFull when all slots are used."""

    _first_position = 0
    _bound = 0  # upper bound of the slots that any row has filled

    def append(self, entry: KVEntry, new_tokens: SequenceInfo) -> tuple[KVEntry, SequenceInfo]:
        self._check_capacity(new_tokens)
        before = self._ends
        is_first = self.used == 0
        first = self.used
        self._record_tokens(new_tokens)
        ends = self._ends
        if ends is None:
            self._write_entry(entry, first, new_tokens.count)
        else:
            if before is None:
                self._write_pending_positions(first)
            filled = first if before is None else before.length[:, None]
            slot_BT = (filled + _real_before(new_tokens)).expand(self.batch, -1)
            self._write(entry, new_tokens, slot_BT)
        self._bound += new_tokens.count
        if new_tokens.count == 1:
            sequence = (
                self._stored_tokens() if ends is None else self._per_row_lengths(new_tokens, ends)
            )
            return self.entry, sequence
        if is_first:
            return entry, new_tokens
        if ends is None:
            self._write_pending_positions(self.used)
        filled = self.dequantize(
            {name: cached[:, : self._bound] for name, cached in self.entry.items()}
        )
        position = self.tokens.position[:, : self._bound]
        segment = self.tokens.segment[:, : self._bound]
        return filled, SequenceInfo(position, segment, 0 if ends is None else None, checked=True)

    def extend(self, entry: KVEntry, new_tokens: SequenceInfo) -> tuple[KVEntry, SequenceInfo]:
        if torch.compiler.is_compiling():
            return super().extend(entry, new_tokens)
        first = self.used
        is_next_token = self._ends is None and new_tokens.start == first and new_tokens.count == 1
        is_plain = (
            first > 0
            and self._bound < self.slots
            and not (self.storage_format or self._prefix_length)
        )
        if not (is_next_token and is_plain and self._full_visibility.sees_all(first + 1)):
            return super().extend(entry, new_tokens)
        # The usual decode step writes one slot of each tensor and reads views.
        self.used = count = first + 1
        self._bound += 1
        visible: KVEntry = {}
        for name, new in entry.items():
            self.entry[name][:, first] = new[:, 0]
            visible[name] = self.entry[name][:, :count]
        return visible, SequenceInfo.contiguous(0, count, self.device, num_visible=count)

    def _per_row_lengths(self, new_tokens: SequenceInfo, ends: RowEnds) -> SequenceInfo:
        """Positions of all slots; `visible_per_row` is set if each newest token attends to all
        tokens of its row.
        """
        if not (ends.is_single_segment and self._reads_all):
            return self.tokens
        num_visible = ends.length
        if new_tokens.has_padding:
            num_visible = torch.where(new_tokens.is_real[:, 0], num_visible, 0)
        return SequenceInfo(
            self.tokens.position, self.tokens.segment, checked=True, visible_per_row=num_visible
        )

    def _write_pending_positions(self, used: int) -> None:
        # While rows are uniform, a slot's position is its index and its segment 0; segments are
        # written on first use.
        self.tokens.segment[:, :used] = 0

    def _retained_tokens(self) -> Pattern:
        return Causal()

    def _check_capacity(self, new_tokens: SequenceInfo) -> None:
        if self._bound + new_tokens.count <= self.slots:
            return
        longest = self._bound + new_tokens.count
        if not (self._ends is None and new_tokens.start is not None) and self.batch:
            # The bound counts padding; only now is a wait for the exact count worth its time.
            ends = self._ends_after(new_tokens)
            longest = ends.length_bound
            if longest > self.slots:  # of rows that were left out, perhaps
                longest = ends.read_max_length()
        if longest > self.slots:
            raise CacheFull(
                f"{longest} tokens do not fit in {self.slots} slots; make the cache with "
                f"capacity={longest} or more"
            )
        self._bound = longest - new_tokens.count


def _real_before(new_tokens: SequenceInfo) -> Tensor:
    """The number of real tokens before each token of its row, [B or 1, T]."""
    if new_tokens.has_padding:
        return new_tokens.is_real.long().cumsum(1) - 1
    return torch.arange(new_tokens.count, device=new_tokens.device)[None]


class RingCache(SlotCache):
    """Cache of the first and the latest tokens of a segment: those a window can still attend to."""

    def __init__(
        self,
        spec: AttentionSpec,
        batch: int,
        dtype: torch.dtype,
        device: torch.device,
        store: str | None,
    ) -> None:
        self.first, last = spec.pattern.retention
        assert last is not None, "a ring needs a pattern that forgets tokens"
        self.last = last
        super().__init__(spec, batch, self.first + last, dtype, device, store)

    def append(self, entry: KVEntry, new_tokens: SequenceInfo) -> tuple[KVEntry, SequenceInfo]:
        is_first = self.used == 0
        old_entry = self.entry
        old_tokens = self.tokens
        visible = entry
        sequence = new_tokens
        if new_tokens.count != 1 and not is_first:
            order, start = self._slots_in_order(new_tokens)
            past = self.dequantize({name: cached[:, order] for name, cached in old_entry.items()})
            visible = {name: torch.cat([cached, entry[name]], 1) for name, cached in past.items()}
            position, segment = (
                torch.cat([old[:, order], new.expand(self.batch, -1)], 1)
                for old, new in (
                    (old_tokens.position, new_tokens.position),
                    (old_tokens.segment, new_tokens.segment),
                )
            )
            sequence = SequenceInfo(position, segment, start, checked=True)
        before = self.used
        self._record_tokens(new_tokens)
        is_uniform = self._ends is None
        if is_uniform and new_tokens.count == 1:
            slot = before if before < self.first else self.first + (before - self.first) % self.last
            self._write_entry(entry, slot, 1)
            self.tokens.position[:, slot : slot + 1] = new_tokens.position
            self.tokens.segment[:, slot : slot + 1] = 0
        elif is_uniform and new_tokens.start == before:
            self._write_uniform(entry, new_tokens, before)
        elif new_tokens.count == 1:
            self._write(entry, new_tokens, self._slots_of(new_tokens))
        elif new_tokens.count:
            self._write_latest(entry, new_tokens)
        if new_tokens.count == 1:
            visible = self.entry
            sequence = self._stored_tokens()
        if self.spec.depends_on_key_order:
            return self._sort_by_position(visible, sequence)
        return visible, sequence

    def _sort_by_position(
        self, entry: KVEntry, tokens: SequenceInfo
    ) -> tuple[KVEntry, SequenceInfo]:
        """Put the tokens of each row in the order of their positions."""
        order = tokens.position.expand(self.batch, -1).argsort(1)
        row = torch.arange(self.batch, device=self.device)[:, None]
        position, segment = (
            values.expand(self.batch, -1)[row, order]
            for values in (tokens.position, tokens.segment)
        )
        return (
            {name: cached[row, order] for name, cached in entry.items()},
            SequenceInfo(position, segment, checked=True),
        )

    def _write_uniform(self, entry: KVEntry, new_tokens: SequenceInfo, start: int) -> None:
        """Write consecutive tokens of all rows, those that stay in the cache; no value is read from
        the device.
        """
        stop = start + new_tokens.count
        leading = torch.arange(start, max(start, min(self.first, stop)), device=self.device)
        latest = torch.arange(
            min(stop, max(start, self.first, stop - self.last)), stop, device=self.device
        )
        column = torch.cat([leading, latest]) - start
        slot = torch.cat([leading, self.first + (latest - self.first) % self.last])
        for name, new in self._to_storage(entry).items():
            self.entry[name][:, slot] = new[:, column].to(self.entry[name].dtype)
        self.tokens.position[:, slot] = new_tokens.position[:, column]
        self.tokens.segment[:, slot] = 0

    def _slots_in_order(self, new_tokens: SequenceInfo) -> tuple[Tensor | slice, int | None]:
        """Slots ordered by position, and the position of the first; all slots and None if rows are
        not uniform.
        """
        if self.first or self._ends is not None or new_tokens.start != self.used:
            return slice(None), None
        start = max(0, self.used - self.last)
        return torch.arange(start, self.used, device=self.device) % self.last, start

    def _slots_of(self, new_tokens: SequenceInfo) -> Tensor:
        position = new_tokens.position.expand(self.batch, -1)
        ring = self.first + (position - self.first) % self.last
        return torch.where(position < self.first, position, ring)

    def _write_latest(self, entry: KVEntry, new_tokens: SequenceInfo) -> None:
        """Write tokens into their slots, the latest if several have one slot; the device is not
        read to know which.
        """
        slot = torch.where(new_tokens.is_real, self._slots_of(new_tokens), self.slots)
        order = torch.arange(new_tokens.count, device=self.device).expand_as(slot)
        latest = torch.full((self.batch, self.slots + 1), -1, device=self.device)
        latest = latest.scatter_reduce(1, slot, order, "amax")[:, : self.slots]
        row = torch.arange(self.batch, device=self.device)[:, None]
        is_new = latest >= 0
        column = latest.clamp(min=0)
        for stored, new in self._stored_and_new(entry, new_tokens):
            keep_shape = is_new.view(*is_new.shape, *[1] * (stored.dim() - 2))
            stored.copy_(torch.where(keep_shape, new[row, column], stored))


class StaticCache(SlotCache):
    """Cache of every token in which the number of tokens is a tensor, for compiled and captured
    decode steps: a step changes tensors in place and no number of the host, so one graph serves all
    lengths.

    All rows advance together, so padding takes a slot. A decode step attends to all slots, and the
    mask hides the empty ones. That positions go forward is not checked, and tokens beyond the last
    slot raise the IndexError of torch; both would have to read the device.

    >>> import headwise as hw
    >>> layer = hw.Attention(hw.design(model=8, heads=2, pattern="causal"))
    >>> cache = layer.cache(batch=1, capacity=16, kind="static")
    >>> step = torch.compile(layer, fullgraph=True, backend="eager")
    >>> x = torch.randn(1, 5, 8)
    >>> with torch.no_grad():
    ...     steps = [step(x[:, t : t + 1], cache=cache) for t in range(5)]
    ...     torch.allclose(torch.cat(steps, 1), layer(x), atol=1e-6)
    True
    """

    def __init__(
        self,
        spec: AttentionSpec,
        batch: int,
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
        store: str | None,
    ) -> None:
        self.length = torch.zeros((), dtype=torch.int64, device=device)
        super().__init__(spec, batch, slots, dtype, device, store)
        self._is_empty = True
        self._next_position = torch.zeros(batch, dtype=torch.int64, device=device)
        self._segment = torch.zeros(batch, dtype=torch.int64, device=device)
        if device.type == "cuda":  # a captured graph writes to these addresses
            rows = (self._next_position, self._segment, self.tokens.position, self.tokens.segment)
            for tensor in (self.length, *rows, *self.entry.values()):
                torch._dynamo.mark_static_address(tensor, guard=False)

    @property
    def used(self) -> int:
        """The number of tokens appended per row, padding included, read from the device."""
        return int(self.length)

    @used.setter
    def used(self, count: int) -> None:
        self.length.fill_(count)

    def next_positions(self, count: int) -> SequenceInfo:
        steps = torch.arange(count, device=self.device)
        position = self._next_position[:, None] + steps
        return SequenceInfo.following(position, self._segment[:, None].expand_as(position))

    def append(self, entry: KVEntry, new_tokens: SequenceInfo) -> tuple[KVEntry, SequenceInfo]:
        slot = self.length + torch.arange(new_tokens.count, device=self.device)
        for stored, new in self._stored_and_new(entry, new_tokens):
            stored.index_copy_(1, slot, new)
        self.length.add_(new_tokens.count)
        self._follow(new_tokens)
        # A decode step does not read the flag: a graph must not depend on it.
        is_first = new_tokens.count != 1 and self._is_empty
        self._is_empty = False
        if is_first:
            return entry, new_tokens
        stored = self.entry if new_tokens.count == 1 else self.dequantize(self.entry)
        return stored, self.tokens

    def _follow(self, new_tokens: SequenceInfo) -> None:
        """Let the next tokens follow the last one of each row that is not padding."""
        if not new_tokens.count:
            return
        is_real = new_tokens.is_real.expand(self.batch, -1)
        column = torch.arange(new_tokens.count, device=self.device)
        column = torch.where(is_real, column, -1).amax(1, keepdim=True)
        has_token = column[:, 0] >= 0
        for stored, new in (
            (self._next_position, new_tokens.position + 1),
            (self._segment, new_tokens.segment),
        ):
            last = new.expand(self.batch, -1).gather(1, column.clamp(min=0))[:, 0]
            stored.copy_(torch.where(has_token, last, stored))

    def take_rows(self, index: Tensor, ends: dict[RowEnds, RowEnds]) -> None:
        super().take_rows(index, ends)
        self._next_position = self._next_position[index]
        self._segment = self._segment[index]

    def _copy_positions(self) -> Self:
        other = super()._copy_positions()
        other.length = self.length.clone()
        other._next_position = self._next_position.clone()
        other._segment = self._segment.clone()
        return other


# --- Recurrent states -----------------------------------------------------------------------------


class RecurrentStateCache(KVCache):
    """One recurrent state per head, updated with every token; its size does not depend on the
    length.
    """

    def __init__(
        self, spec: AttentionSpec, batch: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(spec, batch, dtype, device)
        self.state = empty_state(spec, batch, dtype, device)

    def append(self, entry: KVEntry, new_tokens: SequenceInfo) -> tuple[KVEntry, SequenceInfo]:
        if new_tokens.start is None and not self._ends_after(new_tokens).is_single_segment:
            raise ValueError(
                "a recurrent state cannot separate segments; give each packed document a cache of "
                "its own"
            )
        self._record_tokens(new_tokens)
        return entry, new_tokens

    def preview(self, new_tokens: SequenceInfo) -> SequenceInfo:
        return new_tokens

    def take_rows(self, index: Tensor, ends: dict[RowEnds, RowEnds]) -> None:
        self._take_ends(index, ends)
        self.state = {name: state[index] for name, state in self.state.items()}

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self.state.values())


class HiddenStateCache(TokenCache):
    """The state [B, ...] of a recurrence or convolution after the tokens so far; None before the
    first.
    """

    def __init__(self, batch: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(batch, dtype, device)
        self.state: Tensor | None = None

    def advance(self, state: Tensor | None, new_tokens: SequenceInfo) -> None:
        """Store the state after these tokens."""
        self._record_positions(new_tokens)
        self.state = state

    def take_rows(self, index: Tensor, ends: dict[RowEnds, RowEnds]) -> None:
        self._take_ends(index, ends)
        self.state = None if self.state is None else self.state[index]

    @property
    def nbytes(self) -> int:
        return 0 if self.state is None else self.state.nbytes
