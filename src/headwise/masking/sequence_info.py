"""Tokens know where they stand; who may read whom is a question asked of two sets of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .patterns import Causal, Full, Pattern


class BlockTable(NamedTuple):
    """Where tokens lie that were not gathered: row b's are slots `begin` to before `end` of a page, for each n.

    The table is [B, N, 3]: page, begin, end; column n x slots + slot of a row is that slot of its n-th page. `whole`
    says that the newest token of each row reads every one of them.
    """

    table: Tensor
    all_visible: bool


@dataclass(eq=False, slots=True)
class SequenceInfo:
    """The position of each token inside its own segment, counted from 0; segment -1 is padding and meets nobody.

    Both tensors are [B, T], or [1, T] when all rows are alike. `start` is set when every row is known, without
    looking at the device, to hold the neighbouring positions start, start + 1, ... of segment 0. `filled`, set by a
    cache, says that the newest token reads exactly the first `filled` of these, and `held` [B] how many it reads in
    each row where they differ; `spans`, set by a cache of pages, where they lie in place of rows. `lengths`, set by
    `packed`, are those of the texts of each row, known without looking at the device. `checked` spares what the library
    made itself a second look.

    >>> SequenceInfo.from_batch(torch.zeros(2, 3, 8), lengths=[3, 2]).segment.tolist()
    [[0, 0, 0], [0, 0, -1]]
    """

    position: Tensor
    segment: Tensor
    start: int | None = None
    checked: bool = field(default=False, repr=False)
    num_visible: int | None = None
    visible_per_row: Tensor | None = None
    block_table: BlockTable | None = field(default=None, repr=False)
    lengths: tuple[tuple[int, ...], ...] | None = field(default=None, repr=False)
    backend_plans: list[Any] = field(default_factory=list, init=False, repr=False)  # what a backend made of them once

    def __post_init__(self) -> None:
        if not self.checked:
            _check_sequence(self.position, self.segment)
            self.position, self.segment = self.position.long(), self.segment.long()
            self.start = self.num_visible = self.visible_per_row = self.block_table = self.lengths = (
                None  # who knows more has checked it
            )

    @staticmethod
    def from_batch(
        x: Tensor,
        *,
        lengths: Sequence[int] | Tensor | None = None,
        segments: Tensor | None = None,
        pad: str = "right",
    ) -> SequenceInfo:
        """The tokens of a batch x [B, T, ...]: whole rows, rows of these lengths, or packed segments [B, T].

        A segment's positions count from 0 where it begins in its row; -1 marks padding.
        """
        batch, count = x.shape[0], x.shape[1]
        if lengths is not None and segments is not None:
            raise ValueError("both lengths and segments were given; segments alone can say both")
        if segments is not None:
            return _from_segments(_as_integers("segments", segments, x.device), batch, count)
        if lengths is None:
            return SequenceInfo.contiguous(0, count, x.device)
        sizes = _as_integers("lengths", lengths, x.device)
        if sizes.shape != (batch,) or sizes.is_floating_point() or ((sizes < 0) | (sizes > count)).any():
            raise ValueError(
                f"lengths={lengths!r} do not fit {batch} rows of {count} tokens; give one in 0..{count} a row"
            )
        if pad not in ("right", "left"):
            raise ValueError(f"pad={pad!r} is unknown; use 'right' or 'left'")
        place = torch.arange(count, device=x.device)[None]
        position = place - (count - sizes[:, None]) if pad == "left" else place.expand(batch, count)
        live = position >= 0 if pad == "left" else place < sizes[:, None]
        return SequenceInfo(position.clamp(min=0), live.long() - 1, checked=True)

    @staticmethod
    def contiguous(start: int, count: int, device: torch.device | str) -> SequenceInfo:
        """Every row the same: positions start .. start + count - 1 of segment 0."""
        position = torch.arange(start, start + count, device=device)[None]
        return SequenceInfo(position, torch.zeros_like(position), start, checked=True)

    @staticmethod
    def packed(lengths: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> SequenceInfo:
        """Rows of texts of these lengths, one behind the other; a row that holds less is filled up behind them.

        Attention then runs text by text, and a source that is packed too is read text by text: text k of a row reads
        text k of the same row of the source.

        >>> told = SequenceInfo.packed([[2, 3], [1]])
        >>> told.segment.tolist(), told.position.tolist()
        ([[0, 0, 1, 1, 1], [0, -1, -1, -1, -1]], [[0, 1, 0, 1, 2], [0, 0, 0, 0, 0]])
        """
        told = isinstance(lengths, Sequence) and all(isinstance(row, Sequence) for row in lengths)
        rows = tuple(tuple(row) for row in lengths) if told else ()
        if not rows or any(type(length) is not int or length < 0 for row in rows for length in row):
            raise ValueError(
                f"lengths={lengths!r} are no texts in rows; give whole numbers from 0, as in [[5, 3], [8]]"
            )
        count = max(map(sum, rows))
        position, segment = (torch.full((len(rows), count), fill) for fill in (0, -1))
        for n, row in enumerate(rows):
            if row:
                position[n, : sum(row)] = torch.cat([torch.arange(length) for length in row])
                segment[n, : sum(row)] = torch.arange(len(row)).repeat_interleave(torch.tensor(row))
        return SequenceInfo(position.to(device), segment.to(device), checked=True, lengths=rows)

    def to(self, device: torch.device | str) -> SequenceInfo:
        """The same tokens over there."""
        position, segment = self.position.to(device), self.segment.to(device)
        return SequenceInfo(position, segment, self.start, checked=True, lengths=self.lengths)

    def rows(self, own: slice) -> SequenceInfo:
        """Those of some rows."""
        lengths = None if self.lengths is None else self.lengths[own]
        return SequenceInfo(self.position[own], self.segment[own], self.start, checked=True, lengths=lengths)

    @property
    def count(self) -> int:
        """How many tokens a row has."""
        return self.position.shape[1]

    def trimmed(self) -> SequenceInfo:
        """Only those that are filled."""
        position, segment = (t[:, : self.num_visible] for t in (self.position, self.segment))
        return SequenceInfo(position, segment, checked=True, num_visible=self.num_visible)

    @property
    def is_real(self) -> Tensor:
        """Which tokens are not padding."""
        return self.segment >= 0


class AttentionMask:
    """Which keys each query may read in this call, asked once and shared by all that want to know."""

    def __init__(self, queries: SequenceInfo, keys: SequenceInfo, pattern: Pattern, mask: Tensor | None = None) -> None:
        self.queries, self.keys, self.pattern, self.mask = queries, keys, pattern, mask
        self._allowed: Tensor | None = None
        self._shape = ""

    @property
    def i(self) -> Tensor:
        """Query positions, shaped [B, 1, T, 1]."""
        return self.queries.position[:, None, :, None]

    @property
    def j(self) -> Tensor:
        """Key positions, shaped [B, 1, 1, S]."""
        return self.keys.position[:, None, None, :]

    @property
    def allowed(self) -> Tensor:
        """The rule as a tensor [B or 1, 1, T, S]."""
        if self._allowed is None:
            self._allowed = self._compute_allowed()
        return self._allowed

    def _compute_allowed(self) -> Tensor:
        if self.mask is None and self.keys.num_visible is not None:
            slot = torch.arange(self.keys.count, device=self.keys.position.device)
            return (slot < self.keys.num_visible)[None, None, None]
        asks, told = self.queries.segment[:, None, :, None], self.keys.segment[:, None, None, :]
        allowed = (asks == told) & (told >= 0) & self.pattern.allows(self.i, self.j)
        return allowed if self.mask is None else allowed & self.mask

    @property
    def shape(self) -> str:
        """What is known without asking the device: "full", the square "triangle", or "any"."""
        self._shape = self._shape or self._classify_shape()
        return self._shape

    def _classify_shape(self) -> str:
        first, second = self.queries.start, self.keys.start
        if self.mask is None and self.keys.num_visible == self.keys.count:
            return "full"
        if self.mask is not None or first is None or second is None:
            return "any"
        if isinstance(self.pattern, Full):  # before positions are looked at, on which a graph would then depend
            return "full"
        if isinstance(self.pattern, Causal) and (first, self.queries.count) == (second, self.keys.count):
            return "full" if self.queries.count == 1 else "triangle"  # as its pairs say, which take long to count
        queries = range(first, first + self.queries.count)
        return mask_shape(self.pattern, queries, range(second, second + self.keys.count))


def mask_shape(pattern: Pattern, queries: range, keys: range) -> str:
    """The shape of a pattern's mask over these positions: "full", the square "triangle", or "any"."""
    pairs = pattern.pairs(queries, keys)
    if pairs == len(queries) * len(keys):
        return "full"
    square = queries == keys and pattern.tokens_before_decode == 0 and pairs == Causal().pairs(queries, keys)
    return "triangle" if square else "any"


def _from_segments(segment: Tensor, batch: int, count: int) -> SequenceInfo:
    if segment.shape != (batch, count) or segment.is_floating_point():
        raise ValueError(f"segments of shape {tuple(segment.shape)} do not fit; give whole numbers [{batch}, {count}]")
    place = torch.arange(count, device=segment.device).expand(batch, count)
    begins = torch.ones_like(segment, dtype=torch.bool)
    begins[:, 1:] = segment[:, 1:] != segment[:, :-1]
    position = place - torch.where(begins, place, 0).cummax(1).values
    return SequenceInfo(position, segment)


def _as_integers(name: str, told: object, device: torch.device) -> Tensor:
    try:
        return torch.as_tensor(told, device=device)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name}={told!r} is no list of whole numbers; give one for each row") from None


def _check_sequence(position: Tensor, segment: Tensor) -> None:
    for name, told in (("positions", position), ("segments", segment)):
        if not isinstance(told, Tensor):
            raise ValueError(f"{name} are of type {type(told).__name__}; give a tensor [batch, tokens]")
    if position.device != segment.device:
        raise ValueError(f"positions are on {position.device}, segments on {segment.device}; move one of them")
    if position.shape != segment.shape or position.dim() != 2:
        shapes = tuple(position.shape), tuple(segment.shape)
        raise ValueError(f"positions and segments have shapes {shapes}; both must be [batch, tokens]")
    if any(t.is_floating_point() or t.is_complex() or t.dtype == torch.bool for t in (position, segment)):
        raise ValueError(f"positions and segments are {position.dtype} and {segment.dtype}; both must be whole numbers")
    if ((position < 0) & (segment >= 0)).any():
        raise ValueError("a position below 0 has no place in its segment; count from 0")
    place, order = position.sort(dim=1, stable=True)
    told, again = segment.gather(1, order).sort(dim=1, stable=True)
    place = place.gather(1, again)
    if ((told[:, 1:] == told[:, :-1]) & (place[:, 1:] == place[:, :-1]) & (told[:, 1:] >= 0)).any():
        raise ValueError(
            "two tokens of one segment stand at the same position; count positions inside each segment from 0"
        )
