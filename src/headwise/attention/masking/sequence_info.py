"""Positions and segments of tokens, and the attention mask between two sequences."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .patterns import Causal, Full, Pattern, PerHead


class BlockTable(NamedTuple):
    """The location of each row's tokens in a paged cache, which are not gathered into one tensor.

    `table` is [B, N, 3] with page, begin and end: row b has tokens in the slots begin .. end - 1 of
    its n-th page. Column n * slots + slot of a row is that slot of its n-th page. `all_visible`:
    the newest token of each row may attend to all of these tokens.
    """

    table: Tensor
    all_visible: bool


class SequenceInfo:
    """Positions and segments of the tokens of a batch.

    `position` counts from 0 within each segment. Tokens attend only within their segment;
    segment -1 is padding. Both tensors are [B, T], or [1, T] if all rows are equal; `contiguous`
    makes them on first read.

    The other fields are set by the library and are known without reading tensors from the device:

    - `start`: every row has the consecutive positions start, start + 1, ... of segment 0;
    - `count`: the number of tokens per row, including padding;
    - `checked`: the values come from the library and are not validated again;
    - `num_visible` (set by a cache): the newest token attends to exactly the first `num_visible`
      tokens;
    - `visible_per_row` [B]: their number in each row, if rows differ;
    - `block_table` (set by a paged cache): the location of the tokens in pages;
    - `lengths` (set by `packed`): the lengths of the texts in each row;
    - `has_padding`: False if no token is padding;
    - `pads_right`: True if each row is one text, with padding behind it;
    - `position_bound`: no position is above it;
    - `in_order`: positions grow within each segment.

    Both tensors are not to be changed. What is not known is read from the device once, and kept:
    `real_tokens`, `max_position`, and in `derived` what the caches of a model derive from the
    tokens, the same for all layers.

    >>> SequenceInfo.from_batch(torch.zeros(2, 3, 8), lengths=[3, 2]).segment.tolist()
    [[0, 0, 0], [0, 0, -1]]
    """

    has_padding = True
    pads_right = False
    in_order = True
    position_bound: int | None = None
    _max_position: int | None = None
    _derived: dict[Any, Any] | None = None

    def __init__(
        self,
        position: Tensor,
        segment: Tensor,
        start: int | None = None,
        checked: bool = False,
        num_visible: int | None = None,
        visible_per_row: Tensor | None = None,
        block_table: BlockTable | None = None,
        lengths: tuple[tuple[int, ...], ...] | None = None,
    ) -> None:
        if not checked:  # only the library may set the other fields, and it sets `checked` too
            _check_sequence(position, segment)
            position = position.long()
            segment = segment.long()
            self.in_order = _is_in_order(position, segment)
            start = num_visible = visible_per_row = block_table = lengths = None
        self._position: Tensor | None = position
        self._segment: Tensor | None = segment
        self.device = position.device
        self.start = start
        self.count = position.shape[1]
        self.num_visible = num_visible
        self.visible_per_row = visible_per_row
        self.block_table = block_table
        self.lengths = lengths
        self.backend_plans: list[Any] = []  # execution plans that backends cache here

    @property
    def position(self) -> Tensor:
        """Positions [B, T], or [1, T] if all rows are equal."""
        if self._position is None:
            assert self.start is not None
            stop = self.start + self.count
            with torch.inference_mode(False):  # they may be saved for a backward pass later
                self._position = torch.arange(self.start, stop, device=self.device)[None]
        return self._position

    @property
    def segment(self) -> Tensor:
        """Segments [B, T], or [1, T] if all rows are equal."""
        if self._segment is None:
            with torch.inference_mode(False):
                self._segment = torch.zeros_like(self.position)
        return self._segment

    def __repr__(self) -> str:
        return f"SequenceInfo({self.position}, {self.segment}, start={self.start})"

    @staticmethod
    def from_batch(
        x: Tensor,
        *,
        lengths: Sequence[int] | Tensor | None = None,
        segments: Tensor | None = None,
        pad: str = "right",
    ) -> SequenceInfo:
        """The sequence info of a batch x [B, T, ...].

        Without other arguments every row is one full sequence. `lengths` gives the number of tokens
        in each row, padded on the side `pad`. `segments` [B, T] gives a segment id for each token,
        with -1 for padding; the positions of a segment count from 0 at its first token in the row.
        """
        batch = x.shape[0]
        count = x.shape[1]
        if lengths is not None and segments is not None:
            raise ValueError(
                "got both lengths and segments; give segments alone, with -1 for padding"
            )
        if segments is not None:
            return _from_segments(_as_integers("segments", segments, x.device), batch, count)
        if lengths is None:
            sequence = SequenceInfo.contiguous(0, count, x.device)
            _ = sequence.segment  # made here, so that a compiled call does not change the object
            return sequence
        sizes = _as_integers("lengths", lengths)  # checked where they are, on the host if a list
        if (
            sizes.shape != (batch,)
            or sizes.is_floating_point()
            or ((sizes < 0) | (sizes > count)).any()
        ):
            raise ValueError(
                f"lengths={lengths!r} do not fit {batch} rows of {count} tokens; give one in "
                f"0..{count} per row"
            )
        if pad not in ("right", "left"):
            raise ValueError(f"pad={pad!r} is unknown; use 'right' or 'left'")
        sizes = sizes.to(x.device)
        column = torch.arange(count, device=x.device)[None]
        position = (
            column - (count - sizes[:, None]) if pad == "left" else column.expand(batch, count)
        )
        is_real = position >= 0 if pad == "left" else column < sizes[:, None]
        sequence = SequenceInfo(position.clamp(min=0), is_real.long() - 1, checked=True)
        sequence.pads_right = pad == "right"
        sequence.position_bound = count - 1
        return sequence

    @staticmethod
    def contiguous(
        start: int, count: int, device: torch.device | str, num_visible: int | None = None
    ) -> SequenceInfo:
        """Sequence info with equal rows: the positions start .. start + count - 1 of segment
        0.
        """
        sequence = SequenceInfo.__new__(SequenceInfo)
        sequence._position = sequence._segment = None
        sequence.device = torch.device(device)
        sequence.start = start
        sequence.count = count
        sequence.num_visible = num_visible
        sequence.visible_per_row = sequence.block_table = sequence.lengths = None
        sequence.backend_plans = []
        if torch.compiler.is_compiling():  # a graph may not set them later, inside a checkpoint
            sequence._position = torch.arange(start, start + count, device=device)[None]
            sequence._segment = torch.zeros_like(sequence._position)
        return sequence

    @staticmethod
    def packed(
        lengths: Sequence[Sequence[int]], device: torch.device | str = "cpu"
    ) -> SequenceInfo:
        """Sequence info of rows with several concatenated texts; `lengths` has the text lengths of
        each row.

        Shorter rows are padded at the end. Each text attends only to itself. In cross-attention
        with a packed source, text k of a row attends to text k of the same row of the source.

        >>> sequence = SequenceInfo.packed([[2, 3], [1]])
        >>> sequence.segment.tolist(), sequence.position.tolist()
        ([[0, 0, 1, 1, 1], [0, -1, -1, -1, -1]], [[0, 1, 0, 1, 2], [0, 0, 0, 0, 0]])
        """
        is_nested = isinstance(lengths, Sequence) and all(
            isinstance(row, Sequence) for row in lengths
        )
        rows = tuple(tuple(row) for row in lengths) if is_nested else ()
        listed = chain.from_iterable(rows)
        if not rows or any(type(length) is not int or length < 0 for length in listed):
            raise ValueError(
                f"lengths={lengths!r} must list the text lengths of each row, such as [[5, 3], [8]]"
            )
        count = max(map(sum, rows))
        position, segment = (torch.full((len(rows), count), fill) for fill in (0, -1))
        for n, row in enumerate(rows):
            if row:
                position[n, : sum(row)] = torch.cat([torch.arange(length) for length in row])
                segment[n, : sum(row)] = torch.arange(len(row)).repeat_interleave(torch.tensor(row))
        position = position.to(device)
        sequence = SequenceInfo(position, segment.to(device), checked=True, lengths=rows)
        sequence.position_bound = count - 1
        return sequence

    @staticmethod
    def following(position: Tensor, segment: Tensor, bound: int | None = None) -> SequenceInfo:
        """The sequence info of tokens without padding, at positions up to `bound`, if it is
        known.
        """
        sequence = SequenceInfo(position, segment, checked=True)
        sequence.has_padding = False
        sequence.position_bound = bound
        return sequence

    def to(self, device: torch.device | str) -> SequenceInfo:
        """A copy on another device."""
        position = self.position.to(device)
        segment = self.segment.to(device)
        other = SequenceInfo(position, segment, self.start, checked=True, lengths=self.lengths)
        other.position_bound = self.position_bound
        other.in_order = self.in_order
        other.pads_right = self.pads_right
        return other

    def rows(self, own: slice) -> SequenceInfo:
        """The sequence info of some rows."""
        lengths = None if self.lengths is None else self.lengths[own]
        selected = SequenceInfo(
            self.position[own], self.segment[own], self.start, checked=True, lengths=lengths
        )
        selected.position_bound = self.position_bound
        selected.in_order = self.in_order
        selected.pads_right = self.pads_right
        return selected

    def trimmed(self) -> SequenceInfo:
        """The sequence info of the first `num_visible` tokens."""
        position, segment = (t[:, : self.num_visible] for t in (self.position, self.segment))
        return SequenceInfo(
            position, segment, self.start, checked=True, num_visible=self.num_visible
        )

    def for_other_pattern(self) -> SequenceInfo:
        """These tokens of a cache without what it knew of its own layer's pattern: which of them
        the newest token attends to.
        """
        if self.num_visible is None:
            return SequenceInfo(self.position, self.segment, self.start, checked=True)
        if self.start is not None:
            return SequenceInfo.contiguous(self.start, self.count, self.device)
        slot = torch.arange(self.count, device=self.device)
        segment = ((slot < self.num_visible).long() - 1).expand_as(self.position)
        return SequenceInfo(self.position, segment, checked=True)

    @property
    def is_real(self) -> Tensor:
        """Boolean tensor: True for tokens that are not padding."""
        return self.segment >= 0

    @property
    def derived(self) -> dict[Any, Any]:
        """Values that caches derived from these tokens, by keys of their own."""
        if self._derived is None:
            self._derived = {}
        return self._derived

    @property
    def max_position(self) -> int:
        """The largest position of a token that is not padding; -1 without such a token."""
        if self._max_position is None:
            if self.start is not None:
                self._max_position = self.start + self.count - 1
            elif not self.position.numel():
                self._max_position = -1
            else:
                self._max_position = int(self.position.masked_fill(~self.is_real, -1).max())
        return self._max_position

    def position_beyond(self, count: int) -> int | None:
        """The largest position if it is not in 0 .. count - 1, else None; None in a compiled call
        if only the device knows it.
        """
        bound = self.position_bound if self.start is None else self.start + self.count - 1
        if bound is not None and bound < count:
            return None
        if self.start is None and torch.compiler.is_compiling():
            return None
        return None if self.max_position < count else self.max_position

    def real_tokens(self, batch: int) -> tuple[Tensor, Tensor]:
        """Row and column of each token that is not padding, in a batch of this size."""
        index = self.derived.get(batch)
        if index is None:
            row, column = self.is_real.expand(batch, -1).nonzero(as_tuple=True)
            self.derived[batch] = index = row, column
        return index


class AttentionMask:
    """The keys that each query may attend to in one call, from positions, segments, pattern and an
    optional mask.

    The boolean tensor is computed on first use and shared by everything that needs it.
    """

    def __init__(
        self,
        queries: SequenceInfo,
        keys: SequenceInfo,
        pattern: Pattern,
        mask: Tensor | None = None,
    ) -> None:
        self.queries = queries
        self.keys = keys
        self.pattern = pattern
        self.mask = mask
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
        """The mask as a boolean tensor that broadcasts to [B, H, T, S]; its heads differ only under
        `PerHead`.
        """
        if self._allowed is None:
            self._allowed = self._compute_allowed()
        return self._allowed

    def _compute_allowed(self) -> Tensor:
        if self.mask is None and self.keys.num_visible is not None:
            slot = torch.arange(self.keys.count, device=self.keys.position.device)
            filled = (slot < self.keys.num_visible)[None, None, None]
            if self.differs_by_head:
                return filled & allowed_by_head(self.pattern, self.i, self.j)
            return filled
        query_segment = self.queries.segment[:, None, :, None]
        key_segment = self.keys.segment[:, None, None, :]
        allowed = (
            (query_segment == key_segment)
            & (key_segment >= 0)
            & allowed_by_head(self.pattern, self.i, self.j)
        )
        return allowed if self.mask is None else allowed & self.mask

    @property
    def has_all_queries(self) -> bool:
        """True if the keys are the tokens of the queries, without tokens of a cache, and the caller
        gave no mask.
        """
        return self.keys is self.queries and self.mask is None

    @property
    def hides_only_padded_queries(self) -> bool:
        """True if padding stands behind the texts, and no query attends to later keys: then only
        the queries that are padding attend to other keys than without padding, to none.
        """
        reads_past = self.pattern.tokens_before_decode == 0
        return reads_past and self.has_all_queries and self.queries.pads_right

    def without_padding(self) -> AttentionMask:
        """The mask if all these tokens were real, with the same tokens for all layers of a model
        (in a compiled graph, which may not change them, with own ones).
        """
        tokens = SequenceInfo.contiguous(0, self.queries.count, self.queries.device)
        if not torch.compiler.is_compiling():
            tokens = self.queries.derived.setdefault("as if real", tokens)
        return AttentionMask(tokens, tokens, self.pattern)

    @property
    def differs_by_head(self) -> bool:
        """True if heads have different patterns."""
        return self.pattern.differs_by_head

    @property
    def shape(self) -> str:
        """The shape of the mask if it is known without reading tensors from the device.

        "full": every query may attend to every key; "triangle": a square causal mask; "any":
        anything else.
        """
        if not self._shape:
            self._shape = self._classify_shape()
        return self._shape

    def _classify_shape(self) -> str:
        num_queries = self.queries.count
        num_keys = self.keys.count
        query_start = self.queries.start
        key_start = self.keys.start
        if self.pattern.differs_by_head:
            return "any"
        if self.mask is None and self.keys.num_visible == num_keys:
            return "full"
        if self.mask is not None or query_start is None or key_start is None:
            return "any"
        if isinstance(self.pattern, Causal):  # counting pairs takes longer
            if query_start == key_start and num_queries == num_keys:
                return "full" if num_queries == 1 else "triangle"
        elif isinstance(self.pattern, Full):  # a compiled graph must not depend on positions here
            return "full"
        queries = range(query_start, query_start + num_queries)
        return mask_shape(self.pattern, queries, range(key_start, key_start + num_keys))


def allowed_by_head(pattern: Pattern, i: Tensor, j: Tensor) -> Tensor:
    """True if query i may attend to key j, for i [B, 1, T, 1] and j [B, 1, 1, S]; broadcasts to [B,
    H, T, S].
    """
    if not isinstance(pattern, PerHead):
        allowed: Tensor = pattern.allows(i, j)
        return allowed
    by_pattern = torch.broadcast_tensors(*(one.allows(i, j) for one in pattern.patterns))
    return torch.cat([by_pattern[index] for index in pattern.pattern_of_head], 1)


def mask_shape(pattern: Pattern, queries: range, keys: range, pairs: int | None = None) -> str:
    """The shape of a pattern's mask over these positions: "full", the square "triangle", or "any".

    `pairs` are the allowed pairs if they were counted before.

    >>> mask_shape(Causal(), range(4), range(4)), mask_shape(Causal(), range(3, 4), range(4))
    ('triangle', 'full')
    """
    if isinstance(pattern, PerHead):
        return "any"
    pairs = pattern.pairs(queries, keys) if pairs is None else pairs
    if pairs == len(queries) * len(keys):
        return "full"
    # Without keys after the query, as many pairs as a causal mask means the same pairs.
    causal = (
        queries == keys
        and pattern.tokens_before_decode == 0
        and pairs == Causal().pairs(queries, keys)
    )
    return "triangle" if causal else "any"


def _from_segments(segment: Tensor, batch: int, count: int) -> SequenceInfo:
    if segment.shape != (batch, count) or segment.is_floating_point():
        raise ValueError(
            f"segments of shape {tuple(segment.shape)} do not fit; give whole numbers [{batch}, "
            f"{count}]"
        )
    column = torch.arange(count, device=segment.device).expand(batch, count)
    begins = torch.ones_like(segment, dtype=torch.bool)
    begins[:, 1:] = segment[:, 1:] != segment[:, :-1]
    position = column - torch.where(begins, column, 0).cummax(1).values
    sequence = SequenceInfo(position, segment)
    sequence.position_bound = count - 1
    return sequence


def _as_integers(name: str, values: object, device: torch.device | None = None) -> Tensor:
    try:
        return torch.as_tensor(values, device=device)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"{name}={values!r} is not a list of whole numbers; give one for each row"
        ) from None


def _check_sequence(position: Tensor, segment: Tensor) -> None:
    for name, value in (("positions", position), ("segments", segment)):
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{name} are of type {type(value).__name__}; give a tensor [batch, tokens]"
            )
    if position.device != segment.device:
        raise ValueError(
            f"positions are on {position.device}, segments on {segment.device}; move one of them"
        )
    if position.shape != segment.shape or position.dim() != 2:
        shapes = tuple(position.shape), tuple(segment.shape)
        raise ValueError(
            f"positions and segments have shapes {shapes}; both must be [batch, tokens]"
        )
    if any(
        t.is_floating_point() or t.is_complex() or t.dtype == torch.bool
        for t in (position, segment)
    ):
        raise ValueError(
            f"positions and segments are {position.dtype} and {segment.dtype}; both must be whole "
            "numbers"
        )
    if ((position < 0) & (segment >= 0)).any():
        raise ValueError("a position is below 0; count from 0 within each segment")
    # Sort by segment, then by position, so that duplicates become neighbours.
    sorted_position, order = position.sort(dim=1, stable=True)
    sorted_segment, order = segment.gather(1, order).sort(dim=1, stable=True)
    sorted_position = sorted_position.gather(1, order)
    same_segment = sorted_segment[:, 1:] == sorted_segment[:, :-1]
    same_position = sorted_position[:, 1:] == sorted_position[:, :-1]
    if (same_segment & same_position & (sorted_segment[:, 1:] >= 0)).any():
        raise ValueError(
            "two tokens of one segment have the same position; count positions within each "
            "segment from 0"
        )


def _is_in_order(position: Tensor, segment: Tensor) -> bool:
    """Return whether positions grow within each segment."""
    by_segment, order = segment.sort(dim=1, stable=True)
    position = position.gather(1, order)
    is_next = (by_segment[:, 1:] == by_segment[:, :-1]) & (by_segment[:, 1:] >= 0)
    return not (is_next & (position[:, 1:] < position[:, :-1])).any()
