"""`dense` in blocks of queries: supports what `dense` supports, in memory linear in the length."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...kernels.autograd_guards import is_under_functorch
from ...kernels.compilation import compile_when_called
from ..interfaces.core_types import CallSize, Probe
from ..masking.sequence_info import AttentionMask
from . import dense
from .core_interface import (
    CallSignature,
    CoreInputs,
    CoreSteps,
    has_unmodified_weights,
    never_slower,
    no_tensor_conflicts,
)
from .query_blocks import (
    QUERY_BLOCK_LENGTHS,
    CallBlocks,
    QueryBlock,
    count_formed_pairs,
    count_query_blocks,
    slice_inputs,
)


def boundary_lengths() -> tuple[int, ...]:
    """Lengths at which the number of blocks changes."""
    return QUERY_BLOCK_LENGTHS


def unsupported_reasons(call: CallSignature) -> list[str]:
    """Why this call cannot run here."""
    reasons = dense.unsupported_reasons(call)
    if call.single_query:
        reasons.append("needs more than one query per row; dense runs it")
    if call.has_caller_mask:
        reasons.append("does not support a mask given by the caller; dense does")
    unseen = sorted(call.probed_tensors & {"scores", "weights", "lse"})
    if unseen:
        reasons.append(f"it never has all {', '.join(unseen)} at once")
    return reasons


def notes(call: CallSignature) -> list[str]:
    """Notes for the report of this call."""
    return ["does not read the values of keys with zero weight"] if _can_gather_values(call) else []


tensor_conflicts = no_tensor_conflicts
slower_reasons = never_slower


def executed_flops(call: CallSignature, size: CallSize) -> int:
    """FLOPs of all blocks with the keys that any of their queries may attend to."""
    again = sum(part.query_independent_flops(call.spec) for _, part in call.spec.parts())
    return call.core.flops(size.batch * count_formed_pairs(call, size)) + again * (
        count_query_blocks(size.queries) - 1
    )


def attend(
    call: CallSignature,
    attention_mask: AttentionMask,
    inputs: CoreInputs,
    steps: CoreSteps,
    probe: Probe | None,
) -> Tensor:
    """Per-head outputs o_BTRV. The backward pass recomputes the scores of each block, so none are
    saved.
    """
    blocks = CallBlocks(attention_mask)
    context = inputs.query_context
    kv_entry = inputs.kv_entry
    # Fused kernels read one mask for all heads.
    fused_steps = steps if attention_mask.differs_by_head else steps.with_fused_kernels()
    if (
        len(blocks.all) == 1
    ):  # saves what `dense` saves, because recomputing a single block saves no memory
        plain = torch.is_grad_enabled() and not _can_gather_values(call)
        return dense.attend_all_pairs(
            call, attention_mask, inputs, steps if plain else fused_steps, None
        )
    # A tensor of its own for each argument, because checkpoints save those and no nested ones.
    tensors = [inputs.q, context.x_BTD, context.q_BTHK, inputs.k, inputs.v, *kv_entry.values()]
    run = partial(_attend_block, call, blocks, fused_steps, inputs)
    # Tensors on the meta device need no memory.
    if not torch.is_grad_enabled() or is_under_functorch() or inputs.q.is_meta:
        return torch.cat([run(block, *tensors) for block in blocks.all], 1)
    is_compiling = torch.compiler.is_compiling()
    # The backward pass must find the kernels of the forward pass, so these do not change in between.
    with nullcontext() if is_compiling else compile_when_called():
        outputs = [
            checkpoint(run, block, *tensors, use_reentrant=False, preserve_rng_state=call.training)
            for block in blocks.all
        ]
    return torch.cat(outputs, 1)


def _can_gather_values(call: CallSignature) -> bool:
    return has_unmodified_weights(call.spec) and call.spec.normaliser.prefers_gather(
        call.device, call.dtype
    )


def _attend_block(
    call: CallSignature,
    blocks: CallBlocks,
    steps: CoreSteps,
    inputs: CoreInputs,
    block: QueryBlock,
    *tensors: Tensor,
) -> Tensor:
    q, x_BTD, raw_q_BTHK, k, v, *entries = tensors
    context = inputs.query_context._replace(x_BTD=x_BTD, q_BTHK=raw_q_BTHK)
    kv_entry = dict(zip(inputs.kv_entry, entries, strict=True))
    inputs = inputs._replace(q=q, k=k, v=v, query_context=context, kv_entry=kv_entry)
    part = slice_inputs(inputs, block)
    return dense.attend_all_pairs(call, blocks.mask_of(block), part, steps, None)
