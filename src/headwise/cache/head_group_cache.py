"""`HeadGroupCache`: a cache for each group of key-value heads that retain the same tokens, for patterns per head.

Streaming heads keep a few first and the latest tokens, while retrieval heads keep all (DuoAttention, 2410.10819).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..interfaces import Mix
from ..masking.key_intervals import KeyRetention, largest_retention
from ..masking.pattern_base import PerHead, head_pattern, select_heads
from ..masking.sequence_info import SequenceInfo
from ..spec.attention_spec import AttentionSpec
from ..spec.heads import Heads
from .kv_cache import KVCache, KVEntry


class KVHeadGroup(NamedTuple):
    """Key-value heads that are cached together, and the spec of a plain layer of these heads alone."""

    kv_heads: tuple[int, ...]
    spec: AttentionSpec


class CachedHeads(NamedTuple):
    """The kv entry that the queries of some key-value heads attend to, and the positions of its tokens."""

    kv_heads: tuple[int, ...]
    spec: AttentionSpec
    entry: KVEntry
    sequence: SequenceInfo


def split_by_retention(spec: AttentionSpec) -> tuple[KVHeadGroup, ...]:
    """The groups of key-value heads whose patterns retain different tokens, the largest retention first.

    Empty if one cache serves all heads: if they have one pattern or one retention, if they are not cached head by head
    (latent keys, states of linear attention), if heads are mixed, if query heads with the same pattern belong to
    different groups, or if no group retains the tokens of all others.

    >>> import headwise as hw
    >>> spec = hw.design(model=8, heads=4, kv=2, pattern="perhead((window(4), causal()), (0, 0, 1, 1))")
    >>> [(group.kv_heads, group.spec.pattern) for group in split_by_retention(spec)]
    [((1,), Causal()), ((0,), Window(keys=4))]
    """
    heads, pattern = spec.heads, spec.pattern
    if not isinstance(pattern, PerHead) or heads.value_heads or spec.parts_of(Mix) or spec.recurrent_part:
        return ()
    if not spec.project.caches_keys_and_values or spec.similarity.params(spec):
        return ()
    queries = [[head for head in range(heads.q) if heads.kv_head_of_query[head] == kv] for kv in range(heads.kv)]
    retentions = [largest_retention(*(head_pattern(pattern, head).retention for head in own)) for own in queries]
    by_retention: dict[KeyRetention, list[int]] = {}
    for kv, retention in enumerate(retentions):
        by_retention.setdefault(retention, []).append(kv)
    ordered = sorted(by_retention, key=lambda retention: -retention.total)
    is_split = any(len({retentions[heads.kv_head_of_query[head]] for head in own}) > 1 for _, own in pattern.groups)
    if len(ordered) < 2 or is_split or largest_retention(*ordered) != ordered[0]:
        return ()
    return tuple(_make_group(spec, by_retention[retention], queries) for retention in ordered)


def _make_group(spec: AttentionSpec, kv_heads: Sequence[int], queries: Sequence[Sequence[int]]) -> KVHeadGroup:
    own = sorted(head for kv in kv_heads for head in queries[kv])
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

    `extend` returns the tokens of the first for all heads, with zeros where a head has dropped its own, which its
    pattern masks. `extend_by_heads` returns what each group keeps, without copies.
    """

    def __init__(self, spec: AttentionSpec, groups: Sequence[KVHeadGroup], caches: Sequence[KVCache]) -> None:
        largest = caches[0]
        super().__init__(spec, largest.batch, largest.dtype, largest.device)
        self.groups, self.caches = tuple(groups), tuple(caches)

    def extend_by_heads(self, entry: KVEntry, new_tokens: SequenceInfo) -> list[CachedHeads]:
        """Append these tokens; return what the queries of each group of heads attend to, in the layer's own dtype."""
        cached: list[CachedHeads] = []
        for group, cache in zip(self.groups, self.caches, strict=True):  # the first raises if it is full
            own = {name: _take_heads(tensor, group.kv_heads) for name, tensor in entry.items()}
            cached.append(CachedHeads(*group, *cache.extend(own, new_tokens)))
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

    def select_rows(self, index: Tensor) -> None:
        self._select_batch(index)
        for cache in self.caches:
            cache.select_rows(index)

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)

    @property
    def storage_format(self) -> str | None:
        return self.caches[0].storage_format

    @property
    def is_predictable(self) -> bool:
        return all(cache.is_predictable for cache in self.caches)


def _take_heads(tensor_BSGK: Tensor, heads: Sequence[int]) -> Tensor:
    """These heads; a view if they are consecutive."""
    if list(heads) == list(range(heads[0], heads[-1] + 1)):
        return tensor_BSGK[:, :, heads[0] : heads[-1] + 1]
    return tensor_BSGK[:, :, list(heads)]


def _tokens_of(cached: CachedHeads, sequence: SequenceInfo, batch: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of some heads at the tokens of a sequence, zero at those that they have dropped."""
    is_same_BTS = _real_positions(sequence)[:, :, None] == _real_positions(cached.sequence)[:, None, :]
    if sequence.num_visible is None and cached.sequence.num_visible is None:
        is_same_BTS = is_same_BTS & (sequence.segment[:, :, None] == cached.sequence.segment[:, None, :])
    slot_BT, is_cached_BT = is_same_BTS.int().argmax(-1), is_same_BTS.any(-1)
    row = torch.arange(batch, device=slot_BT.device)[:, None]
    for name, tensor in cached.entry.items():
        yield name, tensor[row, slot_BT.expand(batch, -1)] * is_cached_BT[..., None, None]


def _real_positions(sequence: SequenceInfo) -> Tensor:
    """Positions, and -1 for empty slots and padding."""
    if sequence.num_visible is None:
        return torch.where(sequence.is_real, sequence.position, -1)
    slot = torch.arange(sequence.count, device=sequence.position.device)
    return torch.where(slot < sequence.num_visible, sequence.position, -1)
