"""Interface of KV caches: the past tokens of each row of a batch, appended in order, in float or
int8.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple

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
    (cross-attention).
    """

    entry: KVEntry
    sequence: SequenceInfo
    spec: AttentionSpec


class TokenCache(ABC):
    """Positions of the past tokens of each row; subclasses store what a layer keeps of the tokens.

    `select_rows` reorders the batch (for beam search), `nbytes` is the memory in use.
    """

    def __init__(self, batch: int, dtype: torch.dtype, device: torch.device) -> None:
        self.batch = batch
        self.dtype = dtype
        self.device = device
        self.used = 0  # tokens appended, padding included
        # every row holds positions 0 .. used - 1 of segment 0, known without a device sync
        self.uniform = True
        self.is_single_segment = True  # every token so far is in segment 0
        self._last = torch.full((batch,), -1, dtype=torch.int64, device=device)
        self._segment = torch.zeros(batch, dtype=torch.int64, device=device)

    @abstractmethod
    def select_rows(self, index: Tensor) -> None:
        """Keep these rows of the batch, in this order; an index may occur twice."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory for the cached tokens."""

    def continue_after(self, last: Tensor) -> None:
        """Let the next tokens of each row follow these positions, which are not read back from the
        device.
        """
        self.uniform = False
        self._last = last

    def next_positions(self, count: int) -> SequenceInfo:
        """Return the default positions of the next `count` tokens: after the last token of each
        row.
        """
        if self.uniform:
            return SequenceInfo.contiguous(self.used, count, self.device)
        position = self._last[:, None] + torch.arange(1, count + 1, device=self.device)
        return SequenceInfo(position, self._segment[:, None].expand_as(position), checked=True)

    def _record_positions(self, new_tokens: SequenceInfo) -> None:
        """Record the positions of new tokens; raise before any change if they are invalid."""
        if self.uniform and new_tokens.start == self.used:
            self.used += new_tokens.count
            return
        last = torch.full_like(self._last, self.used - 1) if self.uniform else self._last
        self._check_order(last, new_tokens)
        self._last = last
        self.uniform = False
        self.is_single_segment = self.is_single_segment and not bool((new_tokens.segment > 0).any())
        self.used += new_tokens.count
        if new_tokens.count:
            self._update_last_positions(new_tokens)

    def _check_order(self, last: Tensor, new_tokens: SequenceInfo) -> None:
        """Raise if tokens go back to an earlier position: the tokens that they attend to may have
        been dropped.
        """
        position = torch.cat([last[:, None], new_tokens.position.expand(self.batch, -1)], 1)
        segment = torch.cat([self._segment[:, None], new_tokens.segment.expand(self.batch, -1)], 1)
        is_real = torch.cat(
            [
                torch.ones_like(last, dtype=torch.bool)[:, None],
                new_tokens.is_real.expand(self.batch, -1),
            ],
            1,
        )
        # Padding takes the position of the last real token before it, so that neighbours can be
        # compared.
        last_real = (
            torch.where(is_real, torch.arange(is_real.shape[1], device=is_real.device), 0)
            .cummax(1)
            .values
        )
        position = position.gather(1, last_real)
        segment = segment.gather(1, last_real)
        advances = (segment[:, 1:] == segment[:, :-1]) & (position[:, 1:] > position[:, :-1])
        if bool((is_real[:, 1:] & ~(advances | (segment[:, 1:] > segment[:, :-1]))).any()):
            raise ValueError(
                "tokens went back to an earlier position or segment; a cache only goes forward"
            )

    def _update_last_positions(self, new_tokens: SequenceInfo) -> None:
        order = torch.arange(new_tokens.count, device=self.device)
        latest = (
            torch.where(new_tokens.is_real, order, -1).amax(1, keepdim=True).expand(self.batch, 1)
        )
        has_token = latest.squeeze(1) >= 0
        column = latest.clamp(min=0)
        for name, values in (("_last", new_tokens.position), ("_segment", new_tokens.segment)):
            latest_values = values.expand(self.batch, -1).gather(1, column).squeeze(1)
            setattr(self, name, torch.where(has_token, latest_values, getattr(self, name)))

    def _select_batch(self, index: Tensor) -> None:
        is_index = (
            isinstance(index, Tensor)
            and index.dim() == 1
            and index.dtype in (torch.int64, torch.int32)
        )
        if not is_index or (
            index.numel() and not 0 <= int(index.min()) <= int(index.max()) < self.batch
        ):
            raise ValueError(
                f"cannot select rows {index!r}; give a 1-D int64 tensor (not torch.bool) in "
                f"0..{self.batch - 1}"
            )
        self.batch = len(index)
        self._last = self._last[index]
        self._segment = self._segment[index]


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
            in_prefix = new_tokens.is_real & (new_tokens.position < prefix_length)
            same_segment_counts = (
                (new_tokens.segment[:, :, None] == new_tokens.segment[:, None, :])
                & in_prefix[:, None, :]
            ).sum(2)
            num_together = (
                int(same_segment_counts[in_prefix].min())
                if bool(in_prefix.any())
                else prefix_length
            )
        if num_together < prefix_length:
            raise ValueError(
                f"pattern {self.spec.pattern.text} needs the first {prefix_length} tokens of a "
                "text together, "
                f"not {num_together}; append the whole prefix at once"
            )


def _without_empty_slots(entry: KVEntry, sequence: SequenceInfo) -> tuple[KVEntry, SequenceInfo]:
    if (
        sequence.num_visible is None or torch.compiler.is_compiling()
    ):  # a compiled step keeps its shapes
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
