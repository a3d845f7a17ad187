"""Run what only some layers need around the core: probes, gates, feature maps, recurrent states,
caches of single groups of heads, masks that a cached call may refuse, and ranks. Plain layers skip
this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import backends
from .attention_call import PlannedCall
from .backends import CoreDispatch, CoreInputs, HeadsKV
from .cache import HeadGroupCache, KVEntry, RecurrentStateCache
from .masking.sequence_info import AttentionMask, SequenceInfo

if TYPE_CHECKING:
    from .attention_base import AttentionBase


def attend_with_extras(
    layer: AttentionBase, call: PlannedCall, inputs: CoreInputs
) -> tuple[Tensor, Sequence[Tensor]]:
    """Run the core with the extras of this layer: o [B, T, R, vdim] and the values of the gates,
    which let a backend skip closed heads.
    """
    parts = layer.parts
    if call.probe.points:
        q_BTHK = call.probe("q", inputs.q)
        inputs = inputs._replace(
            q=q_BTHK,
            k=call.probe("k", inputs.k),
            v=call.probe("v", inputs.v),
            query_context=inputs.query_context._replace(q_BTHK=q_BTHK),
        )
    with layer.parallel.head_local_rng(layer.training):
        losses = layer.parallel.aux_losses(call.probe.aux_losses)
        inputs = inputs._replace(gates=parts.gate_values(inputs.query_context, losses))
        if len(parts.core_score_heads) != inputs.q.shape[2]:
            inputs = parts.select_core_heads(inputs)
        if parts.maps_features:
            q_BTHK = parts.feature_map(inputs.q, "q")
            inputs = inputs._replace(q=q_BTHK, k=parts.feature_map(inputs.k, "k"))
        if call.plan.signature.has_recurrent_state:
            assert isinstance(call.cache, RecurrentStateCache)
            inputs = inputs._replace(state=call.cache.state)
        o_BTRV = layer.attend(call, inputs)
    if call.plan.signature.has_recurrent_state:
        assert isinstance(call.cache, RecurrentStateCache)
        assert parts.core_steps.recurrent_part is not None
        part, p = parts.core_steps.recurrent_part
        k, v = backends.values_per_row(inputs, call.plan.signature)
        is_real = inputs.mask.keys.is_real
        call.cache.state = part.update_state(inputs.state, k, v, is_real, p)
    return o_BTRV, inputs.gates


def extend_by_heads(
    layer: AttentionBase, kv_entry: KVEntry, call: PlannedCall
) -> tuple[KVEntry, SequenceInfo, Sequence[HeadsKV]]:
    """Append tokens to the caches of all groups of heads: the kv entry of the first group, its
    positions, and the keys and values of every group.
    """
    assert isinstance(call.cache, HeadGroupCache)
    new_tokens = layer.parallel.gather_tokens(kv_entry, call.sequence)
    cached = call.cache.extend_by_heads(*new_tokens)
    kv_by_heads = [own._replace(k=layer.parts.feature_map(own.k, "k")) for own in cached]
    return cached[0].entry, cached[0].sequence, kv_by_heads


def refuse_mask(layer: AttentionBase, call: PlannedCall, new_tokens: SequenceInfo) -> None:
    """Raise NoBackend before the cache stores tokens whose mask no backend can run."""
    assert call.cache is not None
    assert isinstance(call.plan.dispatch, CoreDispatch)
    keys = call.cache.preview(new_tokens)
    attention_mask = AttentionMask(call.sequence, keys, layer.parts.core_pattern, call.mask)
    call.plan.dispatch.select(attention_mask, call.cache.batch, call.sequence.count)


def sum_over_ranks(layer: AttentionBase, y_BTD: Tensor, o_BTOV: Tensor) -> Tensor:
    """Sum the partial outputs of the ranks that hold the heads; one rank adds the bias."""
    if not layer.parallel.adds_output_bias:
        zeros_BTOV = torch.zeros_like(o_BTOV[:1, :1])  # their merge is the bias
        y_BTD = y_BTD - layer.spec.merge.merge(zeros_BTOV, layer.parts.weights["output"])
    return layer.parallel.reduce_from_heads(y_BTD)
