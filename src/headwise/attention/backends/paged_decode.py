"""Decode step over a paged KV cache: one query per row reads pages in place,
and shared pages once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..masking.sequence_info import AttentionMask, SequenceInfo
from . import ragged_decode
from .core_interface import (
    CallSignature,
    CoreInputs,
    flops_of_all_pairs,
    never_slower,
    no_mask_conflicts,
)


def unsupported_reasons(call: CallSignature) -> list[str]:
    """Why this call cannot run here."""
    reasons = [] if call.has_paged_cache else ["the KV cache is not paged"]
    reasons += ragged_decode.unsupported_reasons(call)
    if not call.spec.project.caches_keys_and_values:
        reasons.append(
            f"{type(call.spec.project).__name__} computes keys and values from what is cached"
        )
    if call.grad_enabled:
        reasons.append("a paged cache keeps no gradients")
    unseen = sorted(call.probed_tensors & {"k", "v"})
    if unseen:
        reasons.append(f"cannot show {', '.join(unseen)}: it reads keys and values in their pages")
    return reasons


mask_conflicts = no_mask_conflicts
slower_reasons = never_slower
executed_flops = flops_of_all_pairs


def attend(call: CallSignature, inputs: CoreInputs) -> Tensor:
    """Per-head outputs o_B1HV."""
    spans = inputs.mask.keys.block_table
    assert spans is not None, "the paged backend needs the block table of a paged cache"
    hidden = None if spans.all_visible else ~inputs.mask.allowed[:, :, 0]
    return ragged_decode.attend_spans(call, inputs, (spans.table, hidden))


def gather_pages(inputs: CoreInputs) -> CoreInputs:
    """The mask and inputs of a call with the pages of each row gathered and dequantised, for other
    backends.
    """
    if inputs.k.dtype == torch.int8:
        scales = (inputs.kv_entry[f"{side}.scale"] for side in "kv")
        k, v = (
            (x * scale[..., None]).to(inputs.q.dtype)
            for x, scale in zip((inputs.k, inputs.v), scales, strict=True)
        )
        inputs = inputs._replace(k=k, v=v)
    mask = inputs.mask
    keys = mask.keys
    if keys.block_table is None:
        return inputs
    pages = keys.block_table.table[..., 0]
    k, v = (
        x[pages].flatten(1, 2).masked_fill(~keys.is_real[..., None, None], 0)
        for x in (inputs.k, inputs.v)
    )
    gathered_keys = SequenceInfo(keys.position, keys.segment, checked=True)
    gathered_mask = AttentionMask(mask.queries, gathered_keys, mask.pattern, mask.mask)
    return inputs._replace(k=k, v=v, mask=gathered_mask)
