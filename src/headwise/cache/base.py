"""What every cache is: rows of remembered tokens that only go forward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import SpecError
from ..spec import AttentionSpec
from ..tokens import Tokens
from .reach import Reach

Entry = dict[str, Tensor]


class Remembered(NamedTuple):
    """Tokens of another sequence, projected once for many queries."""

    entry: Entry
    tokens: Tokens
    spec: AttentionSpec


class Cache(ABC):
    """Remembered tokens of one layer, made by `layer.cache(...)` and handed over as `cache=`.

    `append` takes new ones, `rows` reorders the batch, `nbytes` is what it costs.
    """

    def __init__(self, spec: AttentionSpec, batch: int, dtype: torch.dtype, device: torch.device) -> None:
        self.spec, self.batch, self.dtype, self.device = spec, batch, dtype, device
        self._opening = spec.pattern.opening
        self.used = 0  # tokens appended, padding included
        self.uniform = True  # every row holds positions 0 .. used - 1 of segment 0, known without asking the device
        self.single = True  # no row has held another segment than 0
        self._settles = 1  # behind so many tokens a step does what the one before it did
        self._reach: Reach | None = None
        self._last = torch.full((batch,), -1, dtype=torch.int64, device=device)
        self._zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self._segment = torch.zeros(batch, dtype=torch.int64, device=device)

    @staticmethod
    def of(
        spec: AttentionSpec,
        *,
        batch: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        store: str | None = None,
    ) -> Cache:
        """The cache this spec needs: a state, a ring of what its pattern still reads, or every token.

        With store="int8" keys and values are kept in 8 bits, and each head of each token has a scale.

        >>> import headwise as hw
        >>> hw.Cache.of(hw.design(model=8, heads=2, pattern="window(3) | first(2)"), batch=1, capacity=100).slots
        5
        """
        if not (isinstance(batch, int) and isinstance(capacity, int) and batch >= 0 and capacity >= 1):
            raise SpecError(f"a cache of batch={batch}, capacity={capacity} cannot be; capacity needs at least 1")
        check_forward(spec)
        from .slots import Numbers, PlainCache, RingCache
        from .state import StateCache
        from .stored import check_store

        check_store(spec, store)

        where = torch.empty(0, device=device).device  # "cuda" is some card, and knows which
        if spec.stateful:
            return StateCache(spec, batch, dtype, where)
        first, last = spec.pattern.memory
        kept = Numbers(dtype, where, store)
        if last is not None and first + last < capacity:
            return RingCache(spec, (batch, first, last), kept)
        return PlainCache(spec, (batch, capacity), kept)

    @abstractmethod
    def append(self, entry: Entry, at: Tokens) -> tuple[Entry, Tokens]:
        """Remember these tokens; what their queries may read, and where each of them stands."""

    @abstractmethod
    def rows(self, index: Tensor) -> None:
        """Keep these rows of the batch, in this order; a row may be taken twice."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The bytes held for remembered tokens."""

    @property
    def store(self) -> str | None:
        """In which form keys and values are kept, where that is not the layer's own."""
        return None

    def opened(self, entry: Entry) -> Entry:
        """What `append` gave of a single token, in the layer's own numbers."""
        return entry

    @property
    def state(self) -> Mapping[str, Tensor]:
        """The state of all past tokens, for similarities that have one."""
        return {}

    @property
    def foreseen(self) -> bool:
        """Whether the next token of every row does only what those before it did: then one graph serves all of them."""
        counted = self._reach is None or self.used < self._reach.known
        return self.uniform and self.used >= self._settles and counted

    def next(self, count: int) -> Tokens:
        """Where the next tokens stand when nobody says otherwise: after the last one of each row."""
        if self.uniform:
            position = torch.arange(self.used, self.used + count, device=self.device)[None]
            segment = self._zero if count == 1 else torch.zeros_like(position)
            return Tokens(position, segment, self.used, checked=True)
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
                f"this cache holds {self.dtype} on {self.device} but x is {x.dtype} on {x.device}; make one to match"
            )

    def _advance(self, at: Tokens) -> None:
        """Take note of new tokens, or refuse them and change nothing."""
        if self._opening:
            self._opened(at, self._opening)
        if self.uniform and at.start == self.used:
            self.used += at.count
            return
        last = torch.full_like(self._last, self.used - 1) if self.uniform else self._last
        self._ordered(last, at)
        self._last, self.uniform = last, False
        self.single = self.single and not bool((at.segment > 0).any())
        self.used += at.count
        if at.count:
            self._follow(at)

    def _opened(self, at: Tokens, opening: int) -> None:
        """Refuse a prefix in pieces: its first queries would miss what comes later."""
        if self.uniform and at.start == self.used:
            given = opening if self.used else at.count
        else:
            early = at.live & (at.position < opening)
            alike = ((at.segment[:, :, None] == at.segment[:, None, :]) & early[:, None, :]).sum(2)
            given = int(alike[early].min()) if bool(early.any()) else opening
        if given < opening:
            raise ValueError(
                f"pattern {self.spec.pattern.text} needs the first {opening} tokens of a text together, not {given}; "
                "append the whole prefix at once"
            )

    def _ordered(self, last: Tensor, at: Tokens) -> None:
        """Refuse tokens that go back: what they would read may have been forgotten."""
        place = torch.cat([last[:, None], at.position.expand(self.batch, -1)], 1)
        segment = torch.cat([self._segment[:, None], at.segment.expand(self.batch, -1)], 1)
        live = torch.cat([torch.ones_like(last, dtype=torch.bool)[:, None], at.live.expand(self.batch, -1)], 1)
        # Padding stands where the last live token before it stands, so that neighbours can be compared.
        latest = torch.where(live, torch.arange(live.shape[1], device=live.device), 0).cummax(1).values
        place, segment = place.gather(1, latest), segment.gather(1, latest)
        on = (segment[:, 1:] == segment[:, :-1]) & (place[:, 1:] > place[:, :-1])
        if bool((live[:, 1:] & ~(on | (segment[:, 1:] > segment[:, :-1]))).any()):
            raise ValueError("tokens went back to an earlier position or segment; a cache only goes forward")

    def _follow(self, at: Tokens) -> None:
        order = torch.arange(at.count, device=self.device)
        latest = torch.where(at.live, order, -1).amax(1, keepdim=True).expand(self.batch, 1)
        some, pick = latest.squeeze(1) >= 0, latest.clamp(min=0)
        for name, new in (("_last", at.position), ("_segment", at.segment)):
            told = new.expand(self.batch, -1).gather(1, pick).squeeze(1)
            setattr(self, name, torch.where(some, told, getattr(self, name)))

    def _take(self, index: Tensor) -> None:
        whole = isinstance(index, Tensor) and index.dim() == 1 and index.dtype in (torch.int64, torch.int32)
        if not whole or (index.numel() and not 0 <= int(index.min()) <= int(index.max()) < self.batch):
            raise ValueError(
                f"rows {index!r} cannot be taken; give a tensor of whole numbers (no torch.bool) in 0..{self.batch - 1}"
            )
        self.batch = len(index)
        self._last, self._segment = self._last[index], self._segment[index]


def check_forward(spec: AttentionSpec) -> None:
    """Refuse a pattern that looks ahead, of which nothing can be remembered step by step."""
    if spec.pattern.opening is None:
        raise SpecError(
            f"pattern {spec.pattern.text} reads tokens that have not come yet, so nothing can be decoded step by step; "
            "use a causal pattern such as causal() or window(256)"
        )
