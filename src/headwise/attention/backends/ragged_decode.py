"""Decode step on the CPU: one query per row, over a different number of cached keys per row."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ...kernels import PagedDecodeOptions, attend_paged
from ...kernels.capabilities import crossover_size
from ..interfaces import ScoreStep
from ..interfaces.core_types import CallSize
from ..masking.sequence_info import AttentionMask
from ..parts.dot_product import Softcap
from ..parts.linear_projection import LinearProjection
from ..spec.attention_spec import AttentionSpec
from . import sdpa
from .core_interface import (
    CallSignature,
    CoreInputs,
    cpu_kernel_conflicts,
    flops_of_all_pairs,
    no_mask_conflicts,
    slower_at_every_size,
)

RAGGED_DTYPES = (torch.float32, torch.bfloat16, torch.float64)
# Crossover points in bytes of keys and values; torch's fused call is slow in bfloat16.
POINT_BY_DTYPE = {
    torch.bfloat16: "ragged_bfloat16",
    torch.float32: "ragged_float32",
    torch.float64: "ragged_float32",
}


def unsupported_reasons(call: CallSignature) -> list[str]:
    """Why this call cannot run here."""
    cap = leading_softcap(call.spec)
    reasons = sdpa.fused_call_conflicts(call)
    # the kernel applies a soft cap before all other score steps, but none after them
    if cap is not None:
        reasons.remove(f"{type(cap).__name__} is not additive")
    if not call.single_query:
        reasons.append("supports one query per row only")
    if not call.group_size:
        reasons.append("needs equal groups of query heads that share a key head")
    reasons += cpu_kernel_conflicts(call)
    if call.dtype not in RAGGED_DTYPES:
        reasons.append(f"does not support {call.dtype}")
    return reasons


def leading_softcap(spec: AttentionSpec) -> Softcap | None:
    """Return the soft cap if it is the first score step of the spec, else None."""
    steps = [step for _, step in spec.parts_of(ScoreStep)]
    return steps[0] if steps and isinstance(steps[0], Softcap) else None


mask_conflicts = no_mask_conflicts
executed_flops = flops_of_all_pairs


def reads_quantized_cache(call: CallSignature) -> bool:
    """True if int8 keys and values are read in place; this needs a `LinearProjection` project and
    no probe of keys or values.
    """
    probed = call.probed_tensors & {"k", "v"}
    return (
        call.cache_format == "int8"
        and isinstance(call.spec.project, LinearProjection)
        and call.dtype != torch.float64
        and not probed
    )


def slower_reasons(call: CallSignature, size: CallSize, mask_shape: str) -> list[str]:
    """Why another backend is preferred at this size: torch operations are faster on few bytes of
    keys and values.
    """
    nbytes = size.batch * size.keys * bytes_per_token(call)
    least = min_bytes(call)
    if nbytes >= least or not bytes_per_token(call):
        return []
    if math.isinf(least):
        return [
            slower_at_every_size(POINT_BY_DTYPE[call.dtype], "torch's fused call takes less time")
        ]
    return [
        (
            f"plain calls take less time below {least / 2**20:.3g} MiB of keys and values; this "
            "call "
            f"has {nbytes:,} bytes"
        )
    ]


def min_bytes(call: CallSignature) -> float:
    """Bytes of keys and values from which the kernel runs; infinity if torch is always faster."""
    return crossover_size(POINT_BY_DTYPE[call.dtype])


def bytes_per_token(call: CallSignature) -> int:
    """Bytes of the keys and values of one token; 0 if no other backend can read the cache in its
    storage format.
    """
    if reads_quantized_cache(call) or call.dtype not in POINT_BY_DTYPE:
        return 0
    return (
        (call.core.dim + call.core.vdim)
        * (max(call.core.key_head_of_query) + 1)
        * call.dtype.itemsize
    )


def attend(call: CallSignature, inputs: CoreInputs) -> Tensor:
    """Per-head outputs o_B1HV."""
    spans = key_spans(inputs.mask, len(inputs.q))
    return attend_spans(call, inputs, spans)


def attend_spans(
    call: CallSignature,
    inputs: CoreInputs,
    span_args: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    """Per-head outputs o_B1HV of keys in spans of slots. `span_args` is (spans, hidden).

    Spans [B, N, 3] are (page or row, begin, end), or None if every row reads all of its keys;
    `hidden` marks the key columns that the mask hides, or is None.
    """
    cap = leading_softcap(call.spec)
    (spans_BN3, hidden) = span_args
    steps = inputs.steps
    if cap is not None:
        steps = replace(steps, scores=steps.scores[1:])
    exact = torch.promote_types(inputs.q.dtype, torch.float32)
    bias = None
    if steps.scores:
        bias = steps.additive_bias(inputs._replace(q=inputs.q.to(exact)))[:, :, 0]
    if hidden is not None:
        zero = inputs.q.new_zeros(()) if bias is None else bias
        bias = torch.where(hidden, -torch.inf, zero)
    scales = [None, None]
    if reads_quantized_cache(call):
        scales = [inputs.kv_entry[f"{side}.scale"].transpose(1, 2) for side in "kv"]
    options = PagedDecodeOptions(
        bias, steps.sinks, *scales, softcap=0.0 if cap is None else cap.limit
    )
    k = inputs.k.transpose(1, 2)
    v = inputs.v.transpose(1, 2)
    o_BHV, _ = attend_paged(
        inputs.q[:, 0], k, v, spans_BN3, scale=inputs.query_context.scale, options=options
    )
    return o_BHV[:, None]


def key_spans(attention_mask: AttentionMask, batch: int) -> tuple[Tensor | None, Tensor | None]:
    """The span of slots of each row, [B, 1, 3], or None for all slots; and the slots in it that the
    mask hides, [B or 1, 1, S], or None if there are none.
    """
    keys = attention_mask.keys
    device = attention_mask.keys.position.device
    if attention_mask.shape == "full":
        return None, None
    row = torch.arange(batch, device=device)
    hidden = None
    begin = torch.zeros_like(row)
    if keys.visible_per_row is not None:
        end = keys.visible_per_row
    elif keys.num_visible is not None:
        end = torch.full_like(row, keys.num_visible)
    else:
        allowed = attention_mask.allowed[:, 0, 0].expand(batch, -1)
        slot = torch.arange(keys.count, device=device)
        end = torch.where(allowed, slot + 1, 0).amax(1) if keys.count else begin
        begin = torch.where(allowed, slot, keys.count).amin(1) if keys.count else begin
        if torch.compiler.is_compiling() or bool((allowed.sum(1) < end - begin).any()):
            hidden = ~allowed[:, None]
    return torch.stack([row, begin, end], -1)[:, None], hidden
