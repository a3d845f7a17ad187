"""Flash attention on the CPU for plain softmax heads: tiles of 64 queries, no
score kept in memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.flash_attention import (
    QUERY_TILE_ROWS,
    FlashAttentionShape,
    attend_key_ranges,
    count_executed_pairs,
)
from ...kernels.launch import COMPUTE_DTYPES
from ..interfaces.core_types import CallSize
from ..masking.patterns import Causal
from ..masking.sequence_info import AttentionMask
from . import sdpa
from .core_interface import (
    CallSignature,
    CoreInputs,
    cpu_kernel_conflicts,
    kv_of_even_groups,
)


def boundary_lengths() -> tuple[int, ...]:
    """Lengths where work items are full, and one where a part of the keys ends."""
    return QUERY_TILE_ROWS - 1, QUERY_TILE_ROWS, QUERY_TILE_ROWS + 1, 259


def unsupported_reasons(call: CallSignature) -> list[str]:
    """Why this call cannot run here."""
    reasons = sdpa.plain_softmax_conflicts(call)
    reasons += cpu_kernel_conflicts(call)
    if call.dtype not in COMPUTE_DTYPES:
        reasons.append(
            f"computes in float32 and float64 only; sdpa multiplies {_dtype_name(call.dtype)} "
            "directly"
        )
    if call.single_query:
        reasons.append("needs more than one query per row")
    return reasons


def slower_reasons(call: CallSignature, size: CallSize, mask_shape: str) -> list[str]:
    """Why another backend is preferred at this size."""
    point = "flash_cpu_full" if mask_shape == "full" else "flash_cpu"
    return call.slower_below(point, size, "torch's fused call takes less time")


def mask_conflicts(call: CallSignature, attention_mask: AttentionMask) -> list[str]:
    """Why this mask cannot run here: the kernel reads one range of keys per query."""
    if _key_ranges(attention_mask) is None:
        return [
            (
                "needs the allowed keys of each query to be one range, and a mask known before "
                "compilation"
            )
        ]
    return []


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def executed_flops(call: CallSignature, size: CallSize) -> int:
    """FLOPs of whole query tiles; each reads all keys up to its last query."""
    ahead = (
        size.keys - size.queries if call.pattern == Causal() and call.spec.source is None else None
    )
    shape = FlashAttentionShape(
        size.batch,
        size.queries,
        len(call.core.key_head_of_query),
        size.keys,
        len(call.core.key_head_of_query) // (call.group_size or 1),
    )
    return call.core.flops(count_executed_pairs(shape, None, ahead)) // len(
        call.core.key_head_of_query
    )


def attend(call: CallSignature, inputs: CoreInputs) -> Tensor:
    """Per-head outputs o_BTRV."""
    q = inputs.q
    ranges = _key_ranges(inputs.mask)
    assert ranges is not None, "mask_conflicts refuses such a mask"
    ends, ahead = ranges
    k, v = kv_of_even_groups(call, inputs)
    return attend_key_ranges(q, k, v, ends, ahead, inputs.query_context.scale)


def _key_ranges(attention_mask: AttentionMask) -> tuple[Tensor | None, int | None] | None:
    """The range of keys of each query, as (ends [1 or B, T, 2], None), or (None, offset) for a full
    or causal mask.

    The offset is the number of keys before the first query; it is None for a full mask. The result
    is None if the keys of some query are not one range.
    """
    if attention_mask.shape in ("full", "triangle"):
        return None, None if attention_mask.shape == "full" else 0
    offset = _causal_offset(attention_mask)
    if offset is not None:
        return None, offset
    if torch.compiler.is_compiling():
        return None
    with torch.no_grad():
        ends = _allowed_ranges(attention_mask)
    return None if ends is None else (ends, None)


def keys_ahead(attention_mask: AttentionMask) -> int | None:
    """The number n such that query t reads the keys up to t + n: all keys for a full mask.

    None if the mask is neither full nor causal, as far as is known without reading tensors.
    """
    if attention_mask.shape == "full":
        return attention_mask.keys.count
    if attention_mask.shape == "triangle":
        return 0
    return _causal_offset(attention_mask)


def key_range_table(attention_mask: AttentionMask, q: Tensor) -> Tensor | None:
    """The first key and the end of the keys of each query, [1 or B, T, 2]; None if some query's
    keys have gaps.
    """
    ahead = keys_ahead(attention_mask)
    if ahead is None:
        return _allowed_ranges(attention_mask)
    end = torch.arange(q.shape[1], device=q.device) + ahead + 1
    end.clamp_(max=attention_mask.keys.count)
    return torch.stack([torch.zeros_like(end), end], -1)[None]


def _causal_offset(attention_mask: AttentionMask) -> int | None:
    """The number of keys before the first query, if the mask is causal; None otherwise."""
    first_query = attention_mask.queries.start
    first_key = attention_mask.keys.start
    if first_query is None or first_key is None or attention_mask.pattern != Causal():
        return None
    return first_query - first_key if first_query >= first_key else None


def _allowed_ranges(attention_mask: AttentionMask) -> Tensor | None:
    allowed_BTS = attention_mask.allowed[:, 0]
    count = allowed_BTS.sum(-1)
    first = allowed_BTS.to(torch.uint8).argmax(-1)
    end = attention_mask.keys.count - allowed_BTS.flip(-1).to(torch.uint8).argmax(-1)
    end = torch.where(count > 0, end, first)
    return torch.stack([first, end], -1) if bool((end - first == count).all()) else None
