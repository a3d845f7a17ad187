"""Run heads that have different patterns: each group of heads with one pattern is a separate call,
and gets a backend of its own (`plan_dispatch`).

One call computes all heads, with a mask for each, if heads are mixed, if a probe reads scores or
weights, or if the caller names a backend that supports such masks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..masking.patterns import Causal, Full, Pattern
from ..masking.sequence_info import AttentionMask, SequenceInfo
from .core_interface import (
    CallSignature,
    CoreInputs,
    HeadGroup,
    HeadsKV,
    list_head_groups,
    take_heads,
)
from .dispatch import MASK_PER_HEAD_BACKENDS, CoreDispatch, PackedDispatch, make_dispatch
from .query_blocks import slice_rows, slice_sequence

PROBED_BY_ALL_HEADS = frozenset({"scores", "weights", "lse"})


def split_by_pattern(
    call: CallSignature, backend_name: str | None = None
) -> tuple[CallSignature, ...]:
    """Split a call into one call per head pattern; with one pattern return it unchanged."""
    if call.probed_tensors & PROBED_BY_ALL_HEADS or backend_name in MASK_PER_HEAD_BACKENDS:
        return (call,)
    groups = list_head_groups(call.spec) if call.head_group is None else ()
    return tuple(_call_of_group(call, group) for group in groups) or (call,)


def _call_of_group(call: CallSignature, group: HeadGroup) -> CallSignature:
    heads = HeadGroupIndices.from_call(call, group)
    core = call.core
    own_core = replace(
        core,
        key_head_of_query=tuple(heads.keys.index(core.key_head_of_query[n]) for n in heads.queries),
        value_head_of_row=tuple(heads.values.index(core.value_head_of_row[n]) for n in heads.rows),
    )
    # Heads are taken from keys and values that the cache gathered and dequantised.
    return replace(call, core=own_core, head_group=group, has_paged_cache=False, cache_format=None)


def plan_dispatch(
    call: CallSignature, backend_name: str | None = None
) -> CoreDispatch | PackedDispatch | HeadGroupDispatch:
    """How a call runs: on one backend, or on one for each pattern of its heads."""
    calls = split_by_pattern(call, backend_name)
    dispatches = [_dispatch_of(own_call, backend_name) for own_call in calls]
    if len(dispatches) == 1 and calls[0].head_group is None:
        return dispatches[0]
    heads = [
        HeadGroupIndices.from_call(call, own_call.head_group)
        for own_call in calls
        if own_call.head_group is not None
    ]
    rows: list[int] = []
    for own in heads:
        rows += own.rows
    order = tuple(rows.index(row) for row in range(len(rows)))
    return HeadGroupDispatch(tuple(zip(heads, dispatches, strict=True)), order)


def _dispatch_of(call: CallSignature, backend_name: str | None) -> CoreDispatch | PackedDispatch:
    dispatch = make_dispatch(call, backend_name)
    return PackedDispatch(dispatch) if call.is_packed else dispatch


@dataclass(frozen=True)
class HeadGroupIndices:
    """The pattern of a group, and the indices of its queries, keys, values and rows in the call."""

    pattern: Pattern
    score_heads: tuple[int, ...]
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    values: tuple[int, ...]
    rows: tuple[int, ...]

    @staticmethod
    def from_call(call: CallSignature, group: HeadGroup) -> HeadGroupIndices:
        """Find the indices of a group's heads in the call of all heads."""
        spec = call.spec
        core = call.core
        own = frozenset(group.score_heads)
        queries = tuple(index for index, head in enumerate(spec.core_score_heads) if head in own)
        rows = tuple(row for row, head in enumerate(spec.score_head_of_row) if head in own)
        keys = sorted({core.key_head_of_query[n] for n in queries})
        values = sorted({core.value_head_of_row[n] for n in rows})
        return HeadGroupIndices(
            group.pattern, group.score_heads, queries, tuple(keys), tuple(values), rows
        )

    def select(self, inputs: CoreInputs) -> CoreInputs:
        """The mask and the inputs of the group.

        A single query at a known position gets only the keys that it may attend to, so that heads
        with a window do not read the whole cache.
        """
        context = inputs.query_context
        kv = self._read_kv(inputs)
        own_inputs = inputs._replace(
            q=take_heads(inputs.q, self.queries),
            k=kv.k,
            v=kv.v,
            query_context=context._replace(q_BTHK=take_heads(context.q_BTHK, self.queries)),
            probe=None,
            gates=(),
            kv_by_heads=(),
        )
        queries = inputs.mask.queries
        keys = kv.sequence
        mask = inputs.mask.mask
        if mask is not None:
            own_mask = mask if mask.shape[1] == 1 else mask[:, list(self.queries)]
            return own_inputs._replace(mask=AttentionMask(queries, keys, self.pattern, own_mask))
        own_keys = keys
        if keys.num_visible is not None and keys.start is not None and queries.start is not None:
            visible = self.pattern.visible_keys(_positions(queries), _positions(keys))
            ranges = [range(part.start - keys.start, part.stop - keys.start) for part in visible]
            own_inputs = own_inputs._replace(
                k=slice_rows(own_inputs.k, ranges), v=slice_rows(own_inputs.v, ranges)
            )
            own_keys = slice_sequence(keys, ranges)
            own_keys = SequenceInfo(
                own_keys.position,
                torch.zeros_like(own_keys.segment),
                checked=True,
                num_visible=own_keys.count,
            )
        elif kv.pattern != self.pattern:
            own_keys = _keys_of_pattern(keys, self.pattern)
        return own_inputs._replace(mask=AttentionMask(queries, own_keys, self.pattern))

    def _read_kv(self, inputs: CoreInputs) -> HeadsKV:
        """The keys and values of the group's heads: of the call, or of the heads that are cached
        together.
        """
        for kv in inputs.kv_by_heads:
            if self.keys[0] in kv.kv_heads:
                key_places = tuple(map(kv.kv_heads.index, self.keys))
                value_places = tuple(map(kv.kv_heads.index, self.values))
                k = take_heads(kv.k, key_places)
                return kv._replace(k=k, v=take_heads(kv.v, value_places))
        return HeadsKV(
            self.keys,
            None,
            take_heads(inputs.k, self.keys),
            take_heads(inputs.v, self.values),
            inputs.mask.keys,
        )


def _positions(sequence: SequenceInfo) -> range:
    assert sequence.start is not None
    return range(sequence.start, sequence.start + sequence.count)


def _keys_of_pattern(keys: SequenceInfo, pattern: Pattern) -> SequenceInfo:
    """The keys without the fields that a cache sets for the union of all patterns, if this pattern
    allows fewer.
    """
    if (keys.num_visible is None and keys.visible_per_row is None) or pattern in (Causal(), Full()):
        return keys
    segment = keys.segment
    # rows are uniform, and the cache may not have written their segments
    if keys.num_visible is not None:
        slot = torch.arange(keys.count, device=segment.device)
        segment = ((slot < keys.num_visible).long() - 1).expand_as(segment)
    return SequenceInfo(keys.position, segment, checked=True)


@dataclass(frozen=True)
class HeadGroupDispatch:
    """Runs each group of heads with one pattern on a separate backend.

    Row n of the weights of all heads is row ``order[n]`` of the concatenated groups.
    """

    groups: tuple[tuple[HeadGroupIndices, CoreDispatch | PackedDispatch], ...]
    order: tuple[int, ...]

    def attend(self, inputs: CoreInputs) -> Tensor:
        """Per-head outputs o_BTHV."""
        outputs = [
            dispatch.attend(heads.select(inputs)._replace(steps=own_steps))
            for (heads, dispatch), own_steps in zip(
                self.groups, inputs.steps.of_groups, strict=True
            )
        ]
        return take_heads(torch.cat(outputs, 2), self.order)
