"""`dense` in blocks of queries: supports what `dense` supports, in memory linear in the length."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...kernels.compilation import with_same_kernels
from ...kernels.operand_checks import is_under_functorch
from ..interfaces.core_types import CallSize
from . import dense
from .core_interface import (
    CallSignature,
    CoreInputs,
    CoreSteps,
    has_unmodified_weights,
    never_slower,
    no_mask_conflicts,
)
from .query_blocks import (
    QUERY_BLOCK_LENGTHS,
    QueryBlock,
    count_formed_pairs,
    count_query_blocks,
    slice_inputs,
    split_call,
)


def boundary_lengths() -> tuple[int, ...]:
    """Lengths where the number of blocks changes."""
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


mask_conflicts = no_mask_conflicts
slower_reasons = never_slower


def executed_flops(call: CallSignature, size: CallSize) -> int:
    """FLOPs of all blocks with the keys that any of their queries may attend to."""
    again = sum(part.query_independent_flops(call.spec) for _, part in call.spec.parts())
    return call.core.flops(size.batch * count_formed_pairs(call, size)) + again * (
        count_query_blocks(size.queries) - 1
    )


def attend(call: CallSignature, inputs: CoreInputs) -> Tensor:
    """Per-head outputs o_BTRV. The backward pass recomputes the scores of each block, so none are
    saved.
    """
    blocks = split_call(inputs.mask)
    inputs = inputs._replace(steps=_fused_steps(call, inputs, len(blocks)))
    if len(blocks) == 1:
        return dense.attend_all_pairs(call, inputs._replace(probe=None))

    def run(
        block: QueryBlock, carried: Mapping[str, Tensor], *tensors: Tensor
    ) -> tuple[Tensor, dict[str, Tensor] | None]:
        part = slice_inputs(_with_tensors(inputs, tensors), block)
        part = part._replace(carried=dict(carried) if inputs.mask.has_all_queries else None)
        return dense.attend_all_pairs(call, part), part.carried

    if torch.is_grad_enabled() and not (is_under_functorch() or inputs.q.is_meta):
        run = partial(
            checkpoint,
            with_same_kernels(run),
            use_reentrant=False,
            preserve_rng_state=call.training,
        )
    context = inputs.query_context
    kv = (inputs.k, inputs.v, *inputs.kv_entry.values())
    tensors = (inputs.q, context.x_BTD, context.q_BTHK, *kv)
    outputs: list[Tensor] = []
    carried: Mapping[str, Tensor] = {}
    for block in blocks:
        o_BTRV, after = run(block, carried, *tensors)
        outputs.append(o_BTRV)
        carried = after or {}
    return torch.cat(outputs, 1)


def _fused_steps(call: CallSignature, inputs: CoreInputs, num_blocks: int) -> CoreSteps:
    """The steps with fused kernels, which read one mask for all heads."""
    steps = inputs.steps
    if inputs.mask.differs_by_head:
        return steps
    if num_blocks == 1 and torch.is_grad_enabled() and not _can_gather_values(call):
        return steps.with_fused_mixes()  # a single block saves what `dense` saves
    return steps.with_fused_kernels()


def _with_tensors(inputs: CoreInputs, tensors: tuple[Tensor, ...]) -> CoreInputs:
    """The inputs with the differentiable tensors that a checkpoint has saved."""
    q, x_BTD, raw_q_BTHK, k, v, *entries = tensors
    context = inputs.query_context._replace(x_BTD=x_BTD, q_BTHK=raw_q_BTHK)
    kv_entry = dict(zip(inputs.kv_entry, entries, strict=True))
    return inputs._replace(q=q, k=k, v=v, query_context=context, kv_entry=kv_entry)


def _can_gather_values(call: CallSignature) -> bool:
    return has_unmodified_weights(call.spec) and call.spec.normaliser.prefers_gather(
        call.device, call.dtype
    )
