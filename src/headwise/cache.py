"""What is remembered of past tokens; made and owned by the caller."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import CacheFull, SpecError
from .spec import AttentionSpec
from .tokens import Tokens

Entry = dict[str, Tensor]


class Remembered(NamedTuple):
    """Tokens of another sequence, projected once for many queries."""

    entry: Entry
    tokens: Tokens
    spec: AttentionSpec


class Cache(ABC):
    """Remembered tokens of one layer: `append` new ones, `rows` to reorder the batch, `nbytes` to know the cost."""

    def __init__(self, spec: AttentionSpec, batch: int, dtype: torch.dtype, device: torch.device) -> None:
        self.spec, self.batch, self.dtype, self.device = spec, batch, dtype, device
        self.used = 0  # tokens appended, padding included
        self.uniform = True  # every row holds positions 0 .. used - 1 of segment 0, known without asking the device
        self._last = torch.full((batch,), -1, dtype=torch.int64, device=device)
        self._segment = torch.zeros(batch, dtype=torch.int64, device=device)

    @staticmethod
    def of(
        spec: AttentionSpec, *, batch: int, capacity: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> Cache:
        """The cache this spec needs: a state, a ring of what its pattern still reads, or every token.

        >>> import headwise as hw
        >>> hw.Cache.of(hw.design(model=8, heads=2, pattern="window(3) | first(2)"), batch=1, capacity=100).slots
        5
        """
        if batch < 0 or capacity < 1:
            raise SpecError(f"a cache of batch={batch}, capacity={capacity} holds nothing; capacity needs at least 1")
        if spec.pattern.opening is None:
            raise SpecError(
                f"pattern {spec.pattern.text} reads tokens that have not come yet, so nothing can be decoded step by "
                "step; use a causal pattern such as causal() or window(256)"
            )
        where = torch.device(device)
        if spec.similarity.state(spec):
            return StateCache(spec, batch, dtype, where)
        first, last = spec.pattern.memory
        if last is not None and first + last < capacity:
            return RingCache(spec, batch, first, last, dtype, where)
        return PlainCache(spec, batch, capacity, dtype, where)

    @abstractmethod
    def append(self, entry: Entry, at: Tokens) -> tuple[Entry, Tokens]:
        """Remember these tokens; what their queries may read, and where each of it stands."""

    @abstractmethod
    def rows(self, index: Tensor) -> None:
        """Keep these rows of the batch, in this order; a row may be taken twice."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The bytes held for remembered tokens."""

    @property
    def state(self) -> Mapping[str, Tensor]:
        """The state of all past tokens, for similarities that have one."""
        return {}

    def next(self, count: int) -> Tokens:
        """Where the next tokens stand when nobody says otherwise: after the last one of each row."""
        if self.uniform:
            return Tokens.run(self.used, count, self.device)
        position = self._last[:, None] + torch.arange(1, count + 1, device=self.device)
        return Tokens(position, self._segment[:, None].expand_as(position), checked=True)

    def check(self, spec: AttentionSpec, x: Tensor) -> None:
        """Refuse what was not made for this cache."""
        if spec is not self.spec and spec != self.spec:
            raise ValueError("this cache was made for another spec; make one with layer.cache(batch=..., capacity=...)")
        if x.shape[0] != self.batch:
            raise ValueError(f"this cache holds {self.batch} rows, not {x.shape[0]}; make it with batch={x.shape[0]}")
        if x.dtype != self.dtype or x.device != self.device:
            raise ValueError(
                f"this cache holds {self.dtype} on {self.device}, the input is {x.dtype} on {x.device}; make it to match"
            )

    def _advance(self, at: Tokens) -> None:
        if self.used == 0 and self.spec.pattern.opening:
            self._opened(at)
        if at.start == self.used and self.uniform:
            self.used += at.count
            return
        if self.uniform:
            self._last, self.uniform = torch.full_like(self._last, self.used - 1), False
        self._ordered(at)
        self.used += at.count
        if at.count:
            self._follow(at)

    def _opened(self, at: Tokens) -> None:
        needed = self.spec.pattern.opening or 0
        given = at.count if at.start is not None else int(at.live.sum(1).min()) if at.live.numel() else 0
        if given < needed:
            raise ValueError(
                f"pattern {self.spec.pattern.text} needs its first {needed} tokens at once, not {given}; "
                "append the whole prefix first"
            )

    def _ordered(self, at: Tokens) -> None:
        """Refuse tokens that go back: what they would read may have been forgotten."""
        place = torch.cat([self._last[:, None], at.position.expand(self.batch, -1)], 1)
        segment = torch.cat([self._segment[:, None], at.segment.expand(self.batch, -1)], 1)
        live = torch.cat([torch.ones_like(self._last, dtype=torch.bool)[:, None], at.live.expand(self.batch, -1)], 1)
        rank = torch.where(live, segment * (place.amax() + 2) + place + 1, -1) if place.numel() else place
        if bool((live[:, 1:] & (rank[:, 1:] <= rank.cummax(1).values[:, :-1])).any()):
            raise ValueError("tokens went back to an earlier position or segment; a cache only goes forward")

    def _follow(self, at: Tokens) -> None:
        order = torch.arange(at.count, device=self.device)
        latest = torch.where(at.live, order, -1).amax(1, keepdim=True).expand(self.batch, 1)
        some, pick = latest.squeeze(1) >= 0, latest.clamp(min=0)
        for name, new in (("_last", at.position), ("_segment", at.segment)):
            told = new.expand(self.batch, -1).gather(1, pick).squeeze(1)
            setattr(self, name, torch.where(some, told, getattr(self, name)))

    def _take(self, index: Tensor) -> None:
        self.batch = len(index)
        self._last, self._segment = self._last[index], self._segment[index]


class _Slots(Cache):
    """Tokens in a fixed number of slots; a slot that holds nothing is of segment -1."""

    def __init__(self, spec: AttentionSpec, batch: int, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, batch, dtype, device)
        self.slots = slots
        shapes = spec.entry().items()
        self.entry: Entry = {n: torch.zeros(batch, slots, *s, dtype=dtype, device=device) for n, s in shapes}
        empty = torch.full((batch, slots), -1, dtype=torch.int64, device=device)
        self.tokens = Tokens(torch.arange(slots, device=device).repeat(batch, 1), empty, checked=True)

    def rows(self, index: Tensor) -> None:
        self._take(index)
        self.entry = {name: held[index] for name, held in self.entry.items()}
        self.tokens = Tokens(self.tokens.position[index], self.tokens.segment[index], checked=True)

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in self.entry.values())

    def _write(self, entry: Entry, at: Tokens, slot_BT: Tensor) -> None:
        """Put each token into its slot; those whose slot is `slots` go nowhere."""
        keep = slot_BT < self.slots
        row = torch.arange(self.batch, device=self.device)[:, None].expand_as(slot_BT)[keep]
        slot = slot_BT[keep]
        for name, new in entry.items():
            self.entry[name][row, slot] = new[keep]
        for held, new in ((self.tokens.position, at.position), (self.tokens.segment, at.segment)):
            held[row, slot] = new.expand(self.batch, -1)[keep]

    def _write_run(self, entry: Entry, at: Tokens, first: int) -> None:
        """The same for neighbouring slots in all rows at once."""
        last = first + at.count
        for name, new in entry.items():
            self.entry[name][:, first:last] = new
        self.tokens.position[:, first:last] = at.position
        self.tokens.segment[:, first:last] = at.segment


class PlainCache(_Slots):
    """Every token has a slot of its own, until there are no more."""

    def __init__(self, spec: AttentionSpec, batch: int, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, batch, slots, dtype, device)
        self._filled = torch.zeros(batch, dtype=torch.int64, device=device)
        self._bound = 0  # no row has filled more slots than this

    def append(self, entry: Entry, at: Tokens) -> tuple[Entry, Tokens]:
        self._room(at)
        was_run, alone, first = self.uniform, self.used == 0, self.used
        self._advance(at)
        if self.uniform:
            self._write_run(entry, at, first)
        else:
            if was_run:
                self._filled = torch.full_like(self._filled, first)
            self._write(entry, at, self._slot(at))
            self._filled = self._filled + at.live.expand(self.batch, -1).sum(1)
        self._bound += at.count
        if at.count == 1:
            return self.entry, self.tokens
        if alone:
            return entry, at
        filled = {name: held[:, : self._bound] for name, held in self.entry.items()}
        position, segment = self.tokens.position[:, : self._bound], self.tokens.segment[:, : self._bound]
        return filled, Tokens(position, segment, 0 if self.uniform else None, checked=True)

    def _slot(self, at: Tokens) -> Tensor:
        live = at.live.expand(self.batch, -1)
        return torch.where(live, self._filled[:, None] + live.cumsum(1) - 1, self.slots)

    def _room(self, at: Tokens) -> None:
        if self._bound + at.count <= self.slots:
            return
        longest = self._bound + at.count
        if not (self.uniform and at.start is not None) and self.batch:
            # The bound counts padding; only now is it worth asking the device for the truth.
            filled = self._filled if not self.uniform else torch.full_like(self._filled, self.used)
            longest = int((filled + at.live.expand(self.batch, -1).sum(1)).max())
        if longest > self.slots:
            raise CacheFull(
                f"{longest} tokens do not fit in {self.slots} slots; make the cache with capacity={longest} or more"
            )
        self._bound = longest - at.count

    def rows(self, index: Tensor) -> None:
        super().rows(index)
        self._filled = self._filled[index]


class RingCache(_Slots):
    """The first tokens of a segment for ever, and of the others the latest: what the pattern can still read."""

    def __init__(
        self, spec: AttentionSpec, batch: int, first: int, last: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(spec, batch, first + last, dtype, device)
        self.first, self.last = first, last

    def append(self, entry: Entry, at: Tokens) -> tuple[Entry, Tokens]:
        alone, old_entry, old = self.used == 0, self.entry, self.tokens
        told, where = entry, at
        if at.count != 1 and not alone:
            told = {name: torch.cat([held, entry[name]], 1) for name, held in old_entry.items()}
            position, segment = (
                torch.cat([held, new.expand(self.batch, -1)], 1)
                for held, new in ((old.position, at.position), (old.segment, at.segment))
            )
            where = Tokens(position, segment, checked=True)
        before = self.used
        self._advance(at)
        if self.uniform and at.count == 1:
            slot = before if before < self.first else self.first + (before - self.first) % self.last
            self._write_run(entry, at, slot)
        else:
            self._write(entry, at, self._slot(at))
        return (self.entry, self.tokens) if at.count == 1 else (told, where)

    def _slot(self, at: Tokens) -> Tensor:
        position = at.position.expand(self.batch, -1)
        ring = self.first + (position - self.first) % self.last
        slot = torch.where(position < self.first, position, ring)
        slot = torch.where(at.live.expand(self.batch, -1), slot, self.slots)
        # Of several new tokens that want one slot the latest stays; index_put would pick any.
        order = torch.arange(at.count, device=self.device).expand_as(slot)
        winner = torch.full((self.batch, self.slots + 1), -1, device=self.device)
        winner = winner.scatter_reduce(1, slot, order, "amax")
        return torch.where(winner.gather(1, slot) == order, slot, self.slots)


class StateCache(Cache):
    """No tokens at all: one state per head, folded up as tokens pass."""

    def __init__(self, spec: AttentionSpec, batch: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, batch, dtype, device)
        sizes = spec.sizes_of(spec.similarity)
        self._state = {
            name: torch.zeros(batch, *layout.opened(sizes), dtype=dtype, device=device)
            for name, layout in spec.similarity.state(spec).items()
        }

    @property
    def state(self) -> Mapping[str, Tensor]:
        return self._state

    def fold(self, state: dict[str, Tensor]) -> None:
        """The state after the tokens just appended."""
        self._state = state

    def append(self, entry: Entry, at: Tokens) -> tuple[Entry, Tokens]:
        if at.start is None and bool((at.live & (at.segment != 0)).any()):
            raise ValueError("a state cannot tell segments apart; give each packed document a cache of its own")
        self._advance(at)
        return entry, at

    def rows(self, index: Tensor) -> None:
        self._take(index)
        self._state = {name: held[index] for name, held in self._state.items()}

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in self._state.values())
