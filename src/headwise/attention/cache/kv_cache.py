"""Interface of KV caches: the past tokens of each row of a batch, appended in order, in float or
int8.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ...util.errors import SpecError, suggest
from ..masking.patterns import Causal, First, Pattern, Window
from ..masking.sequence_info import SequenceInfo
from ..spec.attention_spec import AttentionSpec

# --- Full visibility ------------------------------------------------------------------------------


class FullVisibility:
    """Tests whether a pattern allows exactly the tokens that a cache retains, by counting pairs
    ahead of time.

    >>> from headwise.attention.masking.patterns import Dilated
    >>> [
    ...     FullVisibility(pattern, Causal()).sees_all(1000)
    ...     for pattern in (Causal(), Dilated(keys=5, rate=2))
    ... ]
    [True, False]
    """

    def __init__(self, pattern: Pattern, retained: Pattern, min_counted: int = 0) -> None:
        self._pattern = pattern & Causal()
        self._retained = retained
        self._min_counted = min_counted
        self.num_counted = 0  # tokens up to which pairs are counted
        self._is_full = True

    def sees_all(self, used: int) -> bool:
        """True if each of the first `used` tokens sees all tokens that the cache retains."""
        if used > self.num_counted:
            self.num_counted = 64 * max(used, self._min_counted)
            span = range(self.num_counted)
            if self._is_full:  # once unequal, always unequal
                self._is_full = self._pattern.pairs(span, span) == self._retained.pairs(span, span)
        return self._is_full


def retained_tokens(pattern: Pattern) -> Pattern:
    """Return the pattern of tokens to retain: those that later queries may still attend to."""
    first, last = pattern.retention
    if last is None:
        return Causal()
    return Window(last) | First(first) if first else Window(last)


# --- Caches ---------------------------------------------------------------------------------------

KVEntry = dict[str, Tensor]


class ProjectedSource(NamedTuple):
    """Keys and values of another sequence, projected once and attended to by many queries
    (cross-attention); or those of the queries' own sequence, by this layer or an earlier one.
    """

    entry: KVEntry
    sequence: SequenceInfo
    spec: AttentionSpec
    is_own_sequence: bool = False


@dataclass(frozen=True, eq=False)
class RowEnds:
    """The last position and segment of each row, and the number of its tokens, all [B].

    `position_bound` and `length_bound` are upper bounds that are known without reading the device.
    The layers of a model receive the same tokens, so their caches share one object: the first layer
    derives it, and `SequenceInfo.derived` hands it to the others.
    """

    position: Tensor
    segment: Tensor
    length: Tensor
    is_single_segment: bool  # every token so far is in segment 0
    position_bound: int
    length_bound: int

    @staticmethod
    def of_equal_rows(batch: int, count: int, device: torch.device) -> RowEnds:
        """The ends of rows with the positions 0 .. count - 1 of segment 0."""
        length = torch.full((batch,), count, dtype=torch.int64, device=device)
        return RowEnds(length - 1, torch.zeros_like(length), length, True, count - 1, count)

    def read_max_length(self) -> int:
        """The number of tokens of the longest row, read from the device."""
        return int(self.length.max()) if self.length.numel() else 0

    def following_tokens(self, count: int) -> SequenceInfo:
        """The positions of the next `count` tokens of each row."""
        steps = torch.arange(1, count + 1, device=self.position.device)
        position = self.position[:, None] + steps
        segment = self.segment[:, None].expand_as(position)
        bound = self.position_bound + count
        new_tokens = SequenceInfo.following(position, segment, bound)
        new_tokens.derived[self] = replace(
            self,
            position=self.position + count,
            length=self.length + count,
            position_bound=bound,
            length_bound=self.length_bound + count,
        )
        return new_tokens

    def after(self, new_tokens: SequenceInfo) -> RowEnds:
        """The ends after these tokens; raise if they go back to an earlier position, because the
        tokens that they attend to may have been dropped.
        """
        batch = len(self.position)
        position = torch.cat([self.position[:, None], new_tokens.position.expand(batch, -1)], 1)
        segment = torch.cat([self.segment[:, None], new_tokens.segment.expand(batch, -1)], 1)
        is_real = segment >= 0
        is_real[:, 0] = True
        # Padding takes the place of the last real token before it, so that neighbours can be
        # compared.
        column = torch.arange(is_real.shape[1], device=is_real.device)
        last_real = torch.where(is_real, column, 0).cummax(1).values
        position = position.gather(1, last_real)
        segment = segment.gather(1, last_real)
        advances = (segment[:, 1:] == segment[:, :-1]) & (position[:, 1:] > position[:, :-1])
        goes_back = is_real[:, 1:] & ~(advances | (segment[:, 1:] > segment[:, :-1]))
        last = position[:, -1]
        length = self.length + is_real[:, 1:].sum(1)
        facts = [0, 0, -1, 0]
        if batch:
            on_device = goes_back.any(), (segment > 0).any(), last.max(), length.max()
            facts = torch.stack([fact.long() for fact in on_device]).tolist()
        if facts[0]:
            raise ValueError(
                "tokens went back to an earlier position or segment; a cache only goes forward"
            )
        return RowEnds(last, segment[:, -1], length, not facts[1], facts[2], facts[3])

    def rows(self, index: Tensor) -> RowEnds:
        """The ends of these rows."""
        return replace(
            self,
            position=self.position[index],
            segment=self.segment[index],
            length=self.length[index],
        )


class TokenCache(ABC):
    """Positions of the past tokens of each row; subclasses store what a layer keeps of the tokens.

    `select_rows` reorders the batch (for beam search), `nbytes` is the memory in use.
    """

    def __init__(self, batch: int, dtype: torch.dtype, device: torch.device) -> None:
        self.batch = batch
        self.dtype = dtype
        self.device = device
        self.used = 0  # tokens appended, padding included
        # None if every row holds positions 0 .. used - 1 of segment 0
        self._ends: RowEnds | None = None

    @property
    def uniform(self) -> bool:
        """True if every row holds the same positions, which are known without the device."""
        return self._ends is None

    def select_rows(self, index: Tensor) -> None:
        """Keep these rows of the batch, in this order; an index may occur twice."""
        check_rows(index, self.batch)
        self.take_rows(index, {})

    @abstractmethod
    def take_rows(self, index: Tensor, ends: dict[RowEnds, RowEnds]) -> None:
        """`select_rows` for an index that was checked; `ends` maps the ends of the rows so far to
        those of the selected rows, for the caches of a model that share them.
        """

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory for the cached tokens."""

    def continue_after(self, ends: RowEnds) -> None:
        """Let the next tokens of each row follow these ends."""
        self._ends = ends

    def next_positions(self, count: int) -> SequenceInfo:
        """Return the default positions of the next `count` tokens: after the last token of each
        row.
        """
        if self._ends is None:
            return SequenceInfo.contiguous(self.used, count, self.device)
        return self._ends.following_tokens(count)

    def _ends_after(self, new_tokens: SequenceInfo) -> RowEnds:
        """The ends of the rows after these tokens; raise if they are invalid."""
        ends = self._ends
        key = (self.batch, self.used) if ends is None else ends
        derived = new_tokens.derived
        if key not in derived:
            ends = ends or RowEnds.of_equal_rows(self.batch, self.used, self.device)
            derived[key] = ends.after(new_tokens)
        return derived[key]

    def _record_positions(self, new_tokens: SequenceInfo) -> None:
        """Record the positions of new tokens; raise before any change if they are invalid."""
        if self._ends is not None or new_tokens.start != self.used:
            self._ends = self._ends_after(new_tokens)
        self.used += new_tokens.count

    def _take_ends(self, index: Tensor, ends: dict[RowEnds, RowEnds]) -> None:
        self.batch = len(index)
        if self._ends is not None:
            if self._ends not in ends:
                ends[self._ends] = self._ends.rows(index)
            self._ends = ends[self._ends]


def check_rows(index: Tensor, batch: int) -> None:
    """Raise ValueError unless an index holds rows of a batch of this size."""
    is_index = (
        isinstance(index, Tensor) and index.dim() == 1 and index.dtype in (torch.int64, torch.int32)
    )
    if is_index and index.numel():
        low, high = torch.stack(index.aminmax()).tolist()
        is_index = 0 <= low <= high < batch
    if not is_index:
        raise ValueError(
            f"cannot select rows {index!r}; give a 1-D int64 tensor (not torch.bool) in "
            f"0..{batch - 1}"
        )


class KVCache(TokenCache):
    """Past tokens of one attention layer, created by `layer.cache(...)` and passed to the layer as
    `cache=`.

    The layer passes the kv entry of new tokens to `extend`, which stores it and returns what their
    queries attend to. `storage_format` is the format of stored keys and values, None for the
    layer's dtype; `state` is the recurrent state of all past tokens in linear attention,
    and empty in other caches.
    """

    storage_format: str | None = None
    state: Mapping[str, Tensor] = MappingProxyType({})
    # True if `extend` returns memory that the next layer's `extend` fills again
    reuses_memory: ClassVar[bool] = False

    def __init__(
        self, spec: AttentionSpec, batch: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(batch, dtype, device)
        self.spec = spec
        self._prefix_length = spec.pattern.tokens_before_decode

    @abstractmethod
    def append(self, entry: KVEntry, new_tokens: SequenceInfo) -> tuple[KVEntry, SequenceInfo]:
        """Store these tokens; return the kv entry that their queries attend to, and the positions
        of its tokens.
        """

    @abstractmethod
    def preview(self, new_tokens: SequenceInfo) -> SequenceInfo:
        """Return the positions that `extend` would return for these tokens; nothing is stored."""

    def extend(self, entry: KVEntry, new_tokens: SequenceInfo) -> tuple[KVEntry, SequenceInfo]:
        """Append these tokens; return the keys and values that their queries attend to, in the
        layer's own dtype.
        """
        entry, sequence = _without_empty_slots(*self.append(entry, new_tokens))
        return (self.dequantize(entry) if new_tokens.count == 1 else entry), sequence

    def extend_in_place(
        self, entry: KVEntry, new_tokens: SequenceInfo
    ) -> tuple[KVEntry, SequenceInfo]:
        """`extend` for backends that read the cache in its storage format."""
        return _without_empty_slots(*self.append(entry, new_tokens))

    def dequantize(self, entry: KVEntry) -> KVEntry:
        """Convert the entry that `append` returned for a single token to the layer's own dtype."""
        return entry

    def check_input(self, spec: AttentionSpec, x: Tensor) -> None:
        """Raise ValueError if spec, batch size, dtype or device do not match this cache."""
        if spec is not self.spec and spec != self.spec:
            raise ValueError(
                "this cache was made for another spec; make one with layer.cache(batch=..., "
                "capacity=...)"
            )
        if x.shape[0] != self.batch:
            raise ValueError(
                f"this cache has {self.batch} rows, not {x.shape[0]}; make it with "
                f"batch={x.shape[0]}"
            )
        if x.dtype != self.dtype or x.device != self.device:
            raise ValueError(
                f"this cache is {self.dtype} on {self.device} but x is {x.dtype} on {x.device}; "
                "make a cache to match"
            )

    def _record_tokens(self, new_tokens: SequenceInfo) -> None:
        """Record the positions of new tokens; raise before any change if they are invalid."""
        if self._prefix_length:
            self._check_prefix_whole(new_tokens, self._prefix_length)
        self._record_positions(new_tokens)

    def _check_prefix_whole(self, new_tokens: SequenceInfo, prefix_length: int) -> None:
        """Raise if a bidirectional prefix is appended in parts: its first queries would miss the
        later tokens.
        """
        if self.uniform and new_tokens.start == self.used:
            num_together = prefix_length if self.used else new_tokens.count
        else:
            key = ("prefix", prefix_length)
            num_together = new_tokens.derived.get(key)
            if num_together is None:
                in_prefix = new_tokens.is_real & (new_tokens.position < prefix_length)
                same_segment = new_tokens.segment[:, :, None] == new_tokens.segment[:, None, :]
                counts = (same_segment & in_prefix[:, None, :]).sum(2)
                counts = torch.where(in_prefix, counts, prefix_length)
                num_together = int(counts.min()) if counts.numel() else prefix_length
                new_tokens.derived[key] = num_together
        if num_together < prefix_length:
            raise ValueError(
                f"pattern {self.spec.pattern.text} needs the first {prefix_length} tokens of a "
                "text together, "
                f"not {num_together}; append the whole prefix at once"
            )


def _without_empty_slots(entry: KVEntry, sequence: SequenceInfo) -> tuple[KVEntry, SequenceInfo]:
    # a compiled step keeps its shapes
    if sequence.num_visible is None or torch.compiler.is_compiling():
        return entry, sequence
    return {
        name: stored[:, : sequence.num_visible] for name, stored in entry.items()
    }, sequence.trimmed()


def check_causal(spec: AttentionSpec) -> None:
    """Raise SpecError for a pattern with future tokens: it cannot be decoded step by step."""
    if spec.pattern.tokens_before_decode is None:
        raise SpecError(
            f"pattern {spec.pattern.text} attends to future tokens, so it cannot be decoded step "
            "by step; "
            "use a causal pattern such as causal() or window(256)"
        )


# --- Int8 storage ---------------------------------------------------------------------------------

STORAGE_FORMATS = ("int8",)
INT8_MAX = 127  # symmetric range without -128, so that x and -x are rounded alike
SCALE_SUFFIX = ".scale"


def check_storage_format(spec: AttentionSpec, store: str | None) -> None:
    """Raise SpecError for an unknown storage format, or one that the layer does not support."""
    if store is None:
        return
    if store not in STORAGE_FORMATS:
        raise SpecError(
            f"storage_format={store!r} is unknown; {suggest(str(store), STORAGE_FORMATS)}"
        )
    if spec.is_recurrent:
        raise SpecError(
            f"{store} storage does not support a recurrent state: sums over thousands of tokens do "
            "not fit; leave storage_format out"
        )


def quantize_entry(entry: KVEntry, names: Collection[str]) -> KVEntry:
    """Quantise the named tensors to int8; each head's vector gets a scale of its largest magnitude
    / 127.
    """
    quantized = KVEntry(entry)
    for name in names:
        exact = entry[name].to(torch.promote_types(entry[name].dtype, torch.float32))
        scale = exact.abs().amax(-1) / INT8_MAX if exact.shape[-1] else exact.sum(-1)
        # A zero vector stays zero; a vector with an infinity or NaN becomes NaN when it is
        # multiplied by its scale.
        quantized[name] = (
            (exact / scale[..., None])
            .nan_to_num(0.0)
            .round()
            .clamp(-INT8_MAX, INT8_MAX)
            .to(torch.int8)
        )
        quantized[name + SCALE_SUFFIX] = scale.to(torch.float32)
    return quantized


def dequantize_entry(entry: KVEntry, names: Collection[str], dtype: torch.dtype) -> KVEntry:
    """Convert quantised tensors back to `dtype` and drop their scales."""
    unquantized = {
        name: tensor
        for name, tensor in entry.items()
        if not name.endswith(SCALE_SUFFIX) or name[: -len(SCALE_SUFFIX)] not in names
    }
    for name in names:
        scale = entry[name + SCALE_SUFFIX][..., None]
        unquantized[name] = (entry[name] * scale).to(dtype)
    return unquantized
