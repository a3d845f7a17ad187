"""torch's fused `scaled_dot_product_attention`, which never returns attention weights."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..interfaces import Mix, RowStep, ScoreStep, ValueStep
from ..interfaces.core_types import CallSize
from ..masking.patterns import Causal, Full, PerHead
from ..parts.dot_product import DotProduct
from ..parts.softmax import SinkSoftmax, Softmax, WeightDropout
from .core_interface import (
    CallSignature,
    CoreInputs,
    expand_kv_heads,
    heads_to_rows,
    no_mask_conflicts,
)


def unsupported_reasons(call: CallSignature) -> list[str]:
    """Why this call cannot run here. On the CPU torch drops no weights inside its kernel."""
    return fused_call_conflicts(call, drops_weights=call.device == "cuda")


def slower_reasons(call: CallSignature, size: CallSize, mask_shape: str) -> list[str]:
    """Why another backend is preferred at this size."""
    if call.single_query and call.group_size > 1 and isinstance(call.spec.normaliser, SinkSoftmax):
        return ["would copy all keys and values to add the column of the sink"]
    return []


def fused_call_conflicts(call: CallSignature, drops_weights: bool = False) -> list[str]:
    """Properties of a call that a fused softmax call does not support, torch's or one of our
    kernels; only torch's for CUDA `drops_weights`.
    """
    spec = call.spec
    reasons = []
    if call.has_recurrent_state:
        reasons.append("needs cached keys and values; this layer caches a recurrent state")
    if not isinstance(spec.similarity, DotProduct):
        reasons.append(f"needs dot-product similarity, not {type(spec.similarity).__name__}")
    if not call.core.dim:
        reasons.append(f"{type(spec.project).__name__} has no queries and keys to compare")
    if not isinstance(spec.normaliser, (Softmax, SinkSoftmax)):
        reasons.append(f"needs softmax, not {type(spec.normaliser).__name__}")
    for _, part in spec.parts():
        name = type(part).__name__
        if isinstance(part, Mix):
            reasons.append(f"{name} mixes heads, which a fused call cannot do")
        elif isinstance(part, RowStep):
            reasons.append(f"{name} needs all scores of a query")
        elif isinstance(part, ScoreStep) and not part.additive:
            reasons.append(f"{name} is not additive")
        elif isinstance(part, ValueStep):
            reasons.append(f"{name} needs the weights")
        elif isinstance(part, WeightDropout) and dropout_rate(call) and not drops_weights:
            reasons.append(f"{name} needs dropout on weights, which only chunked and dense apply")
    if isinstance(call.pattern, PerHead):
        reasons.append("needs the same pattern for all heads")
    if call.is_transformed:
        reasons.append("does not support torch.func and forward-mode derivatives")
    if call.has_caller_mask:
        reasons.append("does not support a mask given by the caller; dense does")
    unseen = sorted(call.probed_tensors & {"scores", "weights", "lse"})
    if unseen:
        reasons.append(f"cannot show {', '.join(unseen)}")
    if not call.heads_in_order:
        reasons.append("needs one output head per query head, in order")
    return reasons


def dropout_rate(call: CallSignature) -> float:
    """The probability that this call drops a weight; 0 outside training."""
    if not call.training:
        return 0.0
    stays = 1.0
    for _, part in call.spec.parts_of(WeightDropout):
        stays *= 1 - part.rate
    return 1 - stays


def plain_softmax_conflicts(call: CallSignature) -> list[str]:
    """Properties of a call beyond a plain softmax over scaled dot products with a full or causal
    mask.
    """
    spec = call.spec
    reasons = fused_call_conflicts(call)
    if spec.parts_of(ScoreStep) or not isinstance(spec.normaliser, Softmax):
        reasons.append("needs a plain softmax over scaled dot products, with nothing added")
    if call.pattern not in (Full(), Causal()):
        reasons.append(f"computes every score, also those that {call.pattern.text} hides")
    return reasons


mask_conflicts = no_mask_conflicts


def executed_flops(call: CallSignature, size: CallSize) -> int:
    """FLOPs of all (query, key) pairs, including those that the mask hides, and of the key column
    of a sink.
    """
    return call.core.flops(size.batch * size.queries * (size.keys + num_sink_columns(call)))


def num_sink_columns(call: CallSignature) -> int:
    """The number of key columns added to the real keys: 1 for `SinkSoftmax`, else 0."""
    return int(isinstance(call.spec.normaliser, SinkSoftmax))


def fused_attention(call: CallSignature, inputs: CoreInputs) -> Tensor:
    """Per-head outputs o_BTRV."""
    q_BHTK = inputs.q.transpose(1, 2)
    grouped = call.group_size > 0
    k, v = (
        (inputs.k.transpose(1, 2), inputs.v.transpose(1, 2))
        if grouped
        else (
            expand_kv_heads(inputs.k, call.core.key_head_of_query),
            expand_kv_heads(inputs.v, call.core.value_head_of_row),
        )
    )
    triangle, bias = mask_or_bias(inputs)
    if inputs.steps.has_sinks:
        # A softmax with a sink equals a softmax over one more key, with key 0, value 0 and the sink
        # as its bias.
        bias = _bias_with_sink_column(inputs.mask.allowed if triangle else bias, inputs)
        triangle = False
        k = F.pad(k, (0, 0, 0, 1))
        v = F.pad(v, (0, 0, 0, 1))
    scale = inputs.query_context.scale
    rate = dropout_rate(call)
    group_size = call.group_size
    if call.single_query and group_size > 1:
        # Query heads that share a key head become rows of one call, which reads it once.
        batch, _, heads, channels = inputs.q.shape
        q_BGRK = inputs.q.reshape(batch, heads // group_size, group_size, channels)
        if bias is not None and bias.shape[1] > 1:
            bias = heads_to_rows(bias, group_size)
        o_BGRV = F.scaled_dot_product_attention(q_BGRK, k, v, bias, dropout_p=rate, scale=scale)
        return o_BGRV.reshape(batch, 1, heads, o_BGRV.shape[-1])
    o_BHTV = F.scaled_dot_product_attention(
        q_BHTK,
        k,
        v,
        bias,
        dropout_p=rate,
        is_causal=triangle,
        scale=scale,
        enable_gqa=group_size > 1,
    )
    return o_BHTV.transpose(1, 2)


# only dispatch calls `attend`; other backends call `fused_attention` for their blocks
attend = fused_attention


def mask_or_bias(inputs: CoreInputs) -> tuple[bool, Tensor | None]:
    """The arguments `is_causal` and `attn_mask` of the fused call, from the mask and the additive
    score steps.
    """
    mask = inputs.mask
    if not inputs.steps.scores:
        shape = mask.shape
        return (False, mask.allowed) if shape == "any" else (shape == "triangle", None)
    bias = inputs.steps.additive_bias(inputs)
    return False, bias if mask.shape == "full" else bias.masked_fill(~mask.allowed, -torch.inf)


class SoftmaxArgs(NamedTuple):
    """Arguments of a softmax call except q, k and v: mask or causal flag, bias, sinks."""

    mask: Tensor | None
    causal: bool
    bias: Tensor | None
    sinks: Tensor | None


def is_softmax_with_bias(call: CallSignature) -> bool:
    """True if the weights of this call are a softmax over scaled dot products
    plus additive biases.
    """
    return not fused_call_conflicts(
        replace(call, probed_tensors=frozenset(), has_caller_mask=False, training=False)
    )


def softmax_args(inputs: CoreInputs) -> SoftmaxArgs:
    """Mask, causal flag, bias and sinks of a plain softmax call."""
    mask = inputs.mask
    bias = inputs.steps.additive_bias(inputs) if inputs.steps.scores else None
    return SoftmaxArgs(
        mask.allowed if mask.shape == "any" else None,
        mask.shape == "triangle",
        bias,
        inputs.steps.sinks,
    )


def _bias_with_sink_column(bias: Tensor | None, inputs: CoreInputs) -> Tensor:
    heads = inputs.q.shape[2]
    queries = inputs.q.shape[1]
    keys = inputs.k.shape[1]
    zero = inputs.q.new_zeros(1, 1, queries, keys)
    if bias is None or bias.dtype == torch.bool:
        bias = zero if bias is None else zero.masked_fill(~bias, -torch.inf)
    sink = (
        inputs.steps.normaliser_p.broadcast_over_scores()["sink"]
        .to(bias.dtype)
        .expand(*bias.shape[:1], heads, queries, 1)
    )
    return torch.cat([bias.expand(-1, heads, queries, keys), sink], -1)
