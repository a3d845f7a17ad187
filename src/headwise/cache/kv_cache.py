"""What every cache is: rows of remembered tokens that only go forward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import SpecError
from ..masking.sequence_info import SequenceInfo
from ..spec.attention_spec import AttentionSpec
from .full_visibility import FullVisibility

KVEntry = dict[str, Tensor]


class ProjectedSource(NamedTuple):
    """Tokens of another sequence, projected once for many queries."""

    entry: KVEntry
    sequence: SequenceInfo
    spec: AttentionSpec


class KVCache(ABC):
    """Remembered tokens of one layer, made by `layer.cache(...)` and handed over as `cache=`.

    `append` takes new ones, `rows` reorders the batch, `nbytes` is what it costs.
    """

    def __init__(self, spec: AttentionSpec, batch: int, dtype: torch.dtype, device: torch.device) -> None:
        self.spec, self.batch, self.dtype, self.device = spec, batch, dtype, device
        self._opening = spec.pattern.tokens_before_decode
        self.used = 0  # tokens appended, padding included
        self.uniform = True  # every row holds positions 0 .. used - 1 of segment 0, known without asking the device
        self.single = True  # no row has held another segment than 0
        self._settles = 1  # behind so many tokens a step does what the one before it did
        self._reach: FullVisibility | None = None
        self._last = torch.full((batch,), -1, dtype=torch.int64, device=device)
        self._zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self._segment = torch.zeros(batch, dtype=torch.int64, device=device)

    @staticmethod
    def for_spec(
        spec: AttentionSpec,
        *,
        batch: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        storage_format: str | None = None,
    ) -> KVCache:
        """The cache this spec needs: a state, a ring of what its pattern still reads, or every token.

        With storage_format="int8" keys and values are kept in 8 bits, and each head of each token has a scale.

        >>> import headwise as hw
        >>> hw.KVCache.for_spec(
        ...     hw.design(model=8, heads=2, pattern="window(3) | first(2)"), batch=1, capacity=100
        ... ).slots
        5
        """
        if not (isinstance(batch, int) and isinstance(capacity, int) and batch >= 0 and capacity >= 1):
            raise SpecError(f"a cache of batch={batch}, capacity={capacity} cannot be; capacity needs at least 1")
        check_causal(spec)
        from .contiguous import ContiguousCache, RingCache, StorageFormat
        from .int8_quantization import check_storage_format
        from .recurrent_state import RecurrentStateCache

        check_storage_format(spec, storage_format)

        where = torch.empty(0, device=device).device  # "cuda" is some card, and knows which
        if spec.is_recurrent:
            return RecurrentStateCache(spec, batch, dtype, where)
        first, last = spec.pattern.retention
        kept = StorageFormat(dtype, where, storage_format)
        if last is not None and first + last < capacity:
            return RingCache(spec, (batch, first, last), kept)
        return ContiguousCache(spec, (batch, capacity), kept)

    @abstractmethod
    def append(self, entry: KVEntry, at: SequenceInfo) -> tuple[KVEntry, SequenceInfo]:
        """Remember these tokens; what their queries may read, and where each of them stands."""

    def extend(self, entry: KVEntry, at: SequenceInfo) -> tuple[KVEntry, SequenceInfo]:
        """Append these tokens; the keys and values that their queries may attend to, in the layer's own dtype."""
        entry, sequence = _without_empty_slots(*self.append(entry, at))
        return (self.dequantised(entry) if at.count == 1 else entry), sequence

    def extend_in_place(self, entry: KVEntry, at: SequenceInfo) -> tuple[KVEntry, SequenceInfo]:
        """`extend` for backends that read a cache in the form in which it is stored."""
        return _without_empty_slots(*self.append(entry, at))

    @abstractmethod
    def select_rows(self, index: Tensor) -> None:
        """Keep these rows of the batch, in this order; a row may be taken twice."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The bytes held for remembered tokens."""

    @property
    def storage_format(self) -> str | None:
        """In which form keys and values are kept, where that is not the layer's own."""
        return None

    def dequantised(self, entry: KVEntry) -> KVEntry:
        """What `append` gave of a single token, in the layer's own numbers."""
        return entry

    @property
    def state(self) -> Mapping[str, Tensor]:
        """The state of all past tokens, for similarities that have one."""
        return {}

    @property
    def is_predictable(self) -> bool:
        """Whether the next token of every row does only what those before it did: then one graph serves all of them."""
        counted = self._reach is None or self.used < self._reach.known
        return self.uniform and self.used >= self._settles and counted

    def next_positions(self, count: int) -> SequenceInfo:
        """Where the next tokens stand when nobody says otherwise: after the last one of each row."""
        if self.uniform:
            position = torch.arange(self.used, self.used + count, device=self.device)[None]
            segment = self._zero if count == 1 else torch.zeros_like(position)
            return SequenceInfo(position, segment, self.used, checked=True)
        position = self._last[:, None] + torch.arange(1, count + 1, device=self.device)
        return SequenceInfo(position, self._segment[:, None].expand_as(position), checked=True)

    def check_input(self, spec: AttentionSpec, x: Tensor) -> None:
        """Refuse what was not made for this cache."""
        if spec is not self.spec and spec != self.spec:
            raise ValueError("this cache was made for another spec; make one with layer.cache(batch=..., capacity=...)")
        if x.shape[0] != self.batch:
            raise ValueError(f"this cache holds {self.batch} rows, not {x.shape[0]}; make it with batch={x.shape[0]}")
        if x.dtype != self.dtype or x.device != self.device:
            raise ValueError(
                f"this cache holds {self.dtype} on {self.device} but x is {x.dtype} on {x.device}; make one to match"
            )

    def _advance(self, at: SequenceInfo) -> None:
        """Take note of new tokens, or refuse them and change nothing."""
        if self._opening:
            self._check_prefix_whole(at, self._opening)
        if self.uniform and at.start == self.used:
            self.used += at.count
            return
        last = torch.full_like(self._last, self.used - 1) if self.uniform else self._last
        self._check_order(last, at)
        self._last, self.uniform = last, False
        self.single = self.single and not bool((at.segment > 0).any())
        self.used += at.count
        if at.count:
            self._follow(at)

    def _check_prefix_whole(self, at: SequenceInfo, opening: int) -> None:
        """Refuse a prefix in pieces: its first queries would miss what comes later."""
        if self.uniform and at.start == self.used:
            given = opening if self.used else at.count
        else:
            early = at.is_real & (at.position < opening)
            alike = ((at.segment[:, :, None] == at.segment[:, None, :]) & early[:, None, :]).sum(2)
            given = int(alike[early].min()) if bool(early.any()) else opening
        if given < opening:
            raise ValueError(
                f"pattern {self.spec.pattern.text} needs the first {opening} tokens of a text together, not {given}; "
                "append the whole prefix at once"
            )

    def _check_order(self, last: Tensor, at: SequenceInfo) -> None:
        """Refuse tokens that go back: what they would read may have been forgotten."""
        place = torch.cat([last[:, None], at.position.expand(self.batch, -1)], 1)
        segment = torch.cat([self._segment[:, None], at.segment.expand(self.batch, -1)], 1)
        live = torch.cat([torch.ones_like(last, dtype=torch.bool)[:, None], at.is_real.expand(self.batch, -1)], 1)
        # Padding stands where the last live token before it stands, so that neighbours can be compared.
        latest = torch.where(live, torch.arange(live.shape[1], device=live.device), 0).cummax(1).values
        place, segment = place.gather(1, latest), segment.gather(1, latest)
        on = (segment[:, 1:] == segment[:, :-1]) & (place[:, 1:] > place[:, :-1])
        if bool((live[:, 1:] & ~(on | (segment[:, 1:] > segment[:, :-1]))).any()):
            raise ValueError("tokens went back to an earlier position or segment; a cache only goes forward")

    def _follow(self, at: SequenceInfo) -> None:
        order = torch.arange(at.count, device=self.device)
        latest = torch.where(at.is_real, order, -1).amax(1, keepdim=True).expand(self.batch, 1)
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


def _without_empty_slots(entry: KVEntry, sequence: SequenceInfo) -> tuple[KVEntry, SequenceInfo]:
    if sequence.num_visible is None or torch.compiler.is_compiling():  # a compiled step keeps its shapes
        return entry, sequence
    return {name: stored[:, : sequence.num_visible] for name, stored in entry.items()}, sequence.trimmed()


def check_causal(spec: AttentionSpec) -> None:
    """Refuse a pattern that looks ahead, of which nothing can be remembered step by step."""
    if spec.pattern.tokens_before_decode is None:
        raise SpecError(
            f"pattern {spec.pattern.text} reads tokens that have not come yet, so nothing can be decoded step by step; "
            "use a causal pattern such as causal() or window(256)"
        )
