"""Select the cache of a spec: `make_cache` returns the smallest one that serves all heads.

If patterns differ between heads, `HeadGroupCache` has a cache for each group of key-value heads
that retain the same tokens: streaming heads keep a few first and the latest ones, retrieval heads
keep all (DuoAttention, 2410.10819).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...util.errors import SpecError, suggest
from ..backends.core_interface import HeadsKV, take_heads
from ..masking.key_intervals import KeyRetention, largest_retention
from ..masking.pattern_base import PerHead, head_pattern, select_heads
from ..masking.sequence_info import SequenceInfo
from ..spec.attention_spec import AttentionSpec
from ..spec.heads import Heads
from .kv_cache import KVCache, KVEntry, RowEnds, check_causal, check_storage_format
from .slot_caches import ContiguousCache, RecurrentStateCache, RingCache, StaticCache


class KVHeadGroup(NamedTuple):
    """Key-value heads that are cached together, and the spec of a plain layer
    of these heads alone.
    """

    kv_heads: tuple[int, ...]
    spec: AttentionSpec


def split_by_retention(spec: AttentionSpec) -> tuple[KVHeadGroup, ...]:
    """Group key-value heads by the tokens that their patterns retain, largest retention first.

    Empty if one cache serves all heads: if they have one pattern or one retention, if they are not
    cached head by head (latent keys, states of linear attention), if heads are computed together,
    if query heads with the same pattern belong to different groups, or if no group retains the
    tokens of all others.

    >>> import headwise as hw
    >>> spec = hw.design(
    ...     model=8, heads=4, kv=2, pattern="perhead((window(4), causal()), (0, 0, 1, 1))"
    ... )
    >>> [(group.kv_heads, group.spec.pattern) for group in split_by_retention(spec)]
    [((1,), Causal()), ((0,), Window(keys=4))]
    """
    heads = spec.heads
    pattern = spec.pattern
    if (
        not isinstance(pattern, PerHead)
        or heads.value_heads
        or spec.computes_heads_together
        or spec.recurrent_part
    ):
        return ()
    if not spec.project.caches_keys_and_values or spec.similarity.params(spec):
        return ()
    queries: list[list[int]] = [[] for _ in range(heads.kv)]
    for head, kv in enumerate(heads.kv_head_of_query):
        queries[kv].append(head)
    by_retention: dict[KeyRetention, list[int]] = {}
    retentions: list[KeyRetention] = []
    for kv, own in enumerate(queries):
        retention = largest_retention(*(head_pattern(pattern, head).retention for head in own))
        by_retention.setdefault(retention, []).append(kv)
        retentions.append(retention)
    ordered = sorted(by_retention, key=lambda retention: -retention.total)
    is_split = any(
        len({retentions[heads.kv_head_of_query[head]] for head in own}) > 1
        for _, own in pattern.groups
    )
    if len(ordered) < 2 or is_split or largest_retention(*ordered) != ordered[0]:
        return ()
    return tuple(_make_group(spec, by_retention[retention], queries) for retention in ordered)


def _make_group(
    spec: AttentionSpec, kv_heads: Sequence[int], queries: Sequence[Sequence[int]]
) -> KVHeadGroup:
    own = sorted(chain.from_iterable(queries[kv] for kv in kv_heads))
    heads = Heads(
        q=len(own),
        kv=len(kv_heads),
        dim=spec.heads.dim,
        vdim=spec.heads.vdim,
        kv_head_of_query=tuple(kv_heads.index(spec.heads.kv_head_of_query[head]) for head in own),
    )
    plain = replace(spec, heads=heads, pattern=select_heads(spec.pattern, own), modifiers=())
    return KVHeadGroup(tuple(kv_heads), plain)


class HeadGroupCache(KVCache):
    """The caches of several groups of heads; the first retains the tokens of all others.

    `extend` returns the tokens of the first for all heads, with zeros where a head has dropped its
    own, which its pattern masks. `extend_by_heads` returns what each group keeps, without copies.
    """

    def __init__(
        self, spec: AttentionSpec, groups: Sequence[KVHeadGroup], caches: Sequence[KVCache]
    ) -> None:
        largest = caches[0]
        super().__init__(spec, largest.batch, largest.dtype, largest.device)
        self.groups = tuple(groups)
        self.caches = tuple(caches)
        self.storage_format = largest.storage_format

    def extend_by_heads(self, entry: KVEntry, new_tokens: SequenceInfo) -> list[HeadsKV]:
        """Append these tokens; return each head group's attended tokens in the layer's dtype."""
        if self._prefix_length:  # of all groups, checked before the first changes
            self._check_prefix_whole(new_tokens, self._prefix_length)
        cached: list[HeadsKV] = []
        # the first raises if it is full
        for group, cache in zip(self.groups, self.caches, strict=True):
            own = {name: take_heads(tensor, group.kv_heads) for name, tensor in entry.items()}
            kv, sequence = cache.extend(own, new_tokens)
            pattern = group.spec.pattern
            cached.append(HeadsKV(group.kv_heads, pattern, kv["k"], kv["v"], sequence))
        self._record_tokens(new_tokens)
        return cached

    def append(self, entry: KVEntry, new_tokens: SequenceInfo) -> tuple[KVEntry, SequenceInfo]:
        largest, *others = self.extend_by_heads(entry, new_tokens)
        merged: KVEntry = {}
        for name, tensor in largest.entry.items():
            merged[name] = tensor.new_zeros(*tensor.shape[:2], self.spec.heads.kv, tensor.shape[3])
            merged[name][:, :, list(largest.kv_heads)] = tensor
        for other in others:
            for name, tensor in _tokens_of(other, largest.sequence, self.batch):
                merged[name][:, :, list(other.kv_heads)] = tensor
        return merged, largest.sequence

    def preview(self, new_tokens: SequenceInfo) -> SequenceInfo:
        return self.caches[0].preview(new_tokens)

    def take_rows(self, index: Tensor, ends: dict[RowEnds, RowEnds]) -> None:
        self._take_ends(index, ends)
        for cache in self.caches:
            cache.take_rows(index, ends)

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)


def _tokens_of(cached: HeadsKV, sequence: SequenceInfo, batch: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of some heads at the tokens of a sequence, zero at those that they have
    dropped.
    """
    is_same_BTS = (
        _real_positions(sequence)[:, :, None] == _real_positions(cached.sequence)[:, None, :]
    )
    if sequence.num_visible is None and cached.sequence.num_visible is None:
        is_same_BTS = is_same_BTS & (
            sequence.segment[:, :, None] == cached.sequence.segment[:, None, :]
        )
    slot_BT = is_same_BTS.int().argmax(-1)
    is_cached_BT = is_same_BTS.any(-1)
    row = torch.arange(batch, device=slot_BT.device)[:, None]
    for name, tensor in cached.entry.items():
        yield name, tensor[row, slot_BT.expand(batch, -1)] * is_cached_BT[..., None, None]


def _real_positions(sequence: SequenceInfo) -> Tensor:
    """Positions, and -1 for empty slots and padding."""
    if sequence.num_visible is None:
        return torch.where(sequence.is_real, sequence.position, -1)
    slot = torch.arange(sequence.count, device=sequence.position.device)
    return torch.where(slot < sequence.num_visible, sequence.position, -1)


CACHE_KINDS = ("smallest", "static")


def check_cache_kind(spec: AttentionSpec, kind: str) -> None:
    """Raise SpecError for an unknown kind of cache, or a static one that the layer cannot have."""
    if kind not in CACHE_KINDS:
        raise SpecError(f"kind={kind!r} is unknown; {suggest(str(kind), CACHE_KINDS)}")
    if kind == "static" and spec.is_recurrent:
        raise SpecError(
            "a recurrent state has no tokens that a static cache could keep; leave out "
            'kind="static" or compile=True'
        )
    if kind == "static" and spec.pattern.tokens_before_decode:
        raise SpecError(
            f"pattern {spec.pattern.text} needs its first tokens together, which a static cache "
            'cannot check; leave out kind="static" or compile=True'
        )


def make_cache(
    spec: AttentionSpec,
    *,
    batch: int,
    capacity: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    storage_format: str | None = None,
    kind: str = "smallest",
) -> KVCache:
    """Return the smallest cache for this spec: a recurrent state, a ring of visible tokens, or
    every token; with kind="static" a `StaticCache`, for compiled decode steps.

    If heads retain different tokens, each group of heads gets a separate cache.

    With storage_format="int8" keys and values are stored in 8 bits, with one scale per head and
    token.

    >>> import headwise as hw
    >>> make_cache(
    ...     hw.design(model=8, heads=2, pattern="window(3) | first(2)"), batch=1, capacity=100
    ... ).slots
    5
    """
    if not (isinstance(batch, int) and isinstance(capacity, int) and batch >= 0 and capacity >= 1):
        raise SpecError(
            f"cannot make a cache of batch={batch}, capacity={capacity}; capacity must be at "
            "least 1"
        )
    check_causal(spec)
    check_storage_format(spec, storage_format)
    check_cache_kind(spec, kind)
    own_device = torch.empty(0, device=device).device  # "cuda" becomes the current device
    if kind == "static":
        return StaticCache(spec, batch, capacity, dtype, own_device, storage_format)
    if spec.is_recurrent:
        return RecurrentStateCache(spec, batch, dtype, own_device)
    groups = split_by_retention(spec)
    if groups:
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        options |= {"batch": batch, "capacity": capacity, "storage_format": storage_format}
        return HeadGroupCache(spec, groups, [make_cache(group.spec, **options) for group in groups])
    first, last = spec.pattern.retention
    if last is not None and first + last < capacity:
        return RingCache(spec, batch, dtype, own_device, storage_format)
    return ContiguousCache(spec, batch, capacity, dtype, own_device, storage_format)
