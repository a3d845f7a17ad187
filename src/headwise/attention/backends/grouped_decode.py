"""Decode step of grouped heads: the query heads that share a key head become rows of one fused
call.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..interfaces.core_types import Probe
from ..masking.sequence_info import AttentionMask
from ..parts.softmax import SinkSoftmax
from .core_interface import (
    CallSignature,
    CoreInputs,
    CoreSteps,
    flops_of_all_pairs,
    never_slower,
    no_tensor_conflicts,
)
from .sdpa import attend_with_lse, fused_call_conflicts, mask_or_bias


def unsupported_reasons(call: CallSignature) -> list[str]:
    """Why this call cannot run here."""
    reasons = fused_call_conflicts(call)
    if not call.single_query:
        reasons.append("supports one query per row only")
    if call.group_size <= 1:
        reasons.append("needs equal groups of query heads that share a key head")
    if isinstance(call.spec.normaliser, SinkSoftmax):
        reasons.append("does not support attention sinks")
    return reasons


tensor_conflicts = no_tensor_conflicts
slower_reasons = never_slower
executed_flops = flops_of_all_pairs


def attend(
    call: CallSignature,
    attention_mask: AttentionMask,
    inputs: CoreInputs,
    steps: CoreSteps,
    probe: Probe | None,
) -> Tensor:
    """Per-head outputs o_B1HV."""
    batch, _, heads, dim = inputs.q.shape
    kv_heads = inputs.k.shape[2]
    rows_BGRK = inputs.q.reshape(batch, kv_heads, heads // kv_heads, dim)
    _, bias = mask_or_bias(attention_mask, inputs, steps)
    if bias is not None and bias.shape[1] > 1:
        bias = bias.reshape(bias.shape[0], kv_heads, heads // kv_heads, bias.shape[-1])
    k = inputs.k.transpose(1, 2)
    v = inputs.v.transpose(1, 2)
    scale = inputs.query_context.scale
    if probe is not None and "lse" in probe.points:
        o_BGRV, lse_BGR = attend_with_lse(rows_BGRK, k, v, (bias, False, scale))
        probe("lse", lse_BGR.reshape(batch, heads, 1))
    else:
        o_BGRV = F.scaled_dot_product_attention(rows_BGRK, k, v, bias, scale=scale)
    return o_BGRV.reshape(batch, 1, heads, o_BGRV.shape[-1])
