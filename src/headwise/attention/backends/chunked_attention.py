"""`dense` in blocks of queries: supports what `dense` supports, in memory linear in the length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...kernels.operand_checks import (
    NO_DOUBLE_BACKWARD_REMEDY,
    forbid_double_backward,
    is_under_functorch,
)
from ..interfaces.core_types import CallSize
from . import dense
from .core_interface import (
    CallSignature,
    CoreInputs,
    has_unmodified_weights,
    never_slower,
    no_mask_conflicts,
)
from .query_blocks import (
    QUERY_BLOCK_LENGTHS,
    QueryBlock,
    add_to_ranges,
    count_formed_pairs,
    count_query_blocks,
    slice_inputs,
    split_call,
)

NUM_QUERY_TENSORS = 3  # of `_tensors_of`: one row per query; the others have one row per key


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
    # Fused kernels read one mask for all heads.
    fused_steps = inputs.steps if inputs.mask.differs_by_head else inputs.steps.with_fused_kernels()
    if (
        len(blocks) == 1
    ):  # saves what `dense` saves, because recomputing a single block saves no memory
        plain = torch.is_grad_enabled() and not _can_gather_values(call)
        steps = inputs.steps if plain else fused_steps
        return dense.attend_all_pairs(call, inputs._replace(steps=steps, probe=None))
    inputs = inputs._replace(steps=fused_steps)

    def run(block: QueryBlock, part: CoreInputs) -> Tensor:
        return dense.attend_all_pairs(call, part)

    tensors = _tensors_of(inputs)
    learned: list[Tensor] = []
    for p in inputs.steps.part_weights:
        learned += p.trainable()
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, *learned))
    if torch.compiler.is_compiling() and needs_grad:
        # The compiler does not trace a gradient within a gradient, but checkpoints.
        run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=call.training)
    elif needs_grad and not _must_keep_graph(inputs, learned):
        fields = run, blocks, inputs._replace(gates=()), call.training
        o_BTRV: Tensor = _RecomputedBlocks.apply(*fields, *tensors, *learned)
        return o_BTRV
    return torch.cat([run(block, slice_inputs(inputs, block)) for block in blocks], 1)


def _can_gather_values(call: CallSignature) -> bool:
    return has_unmodified_weights(call.spec) and call.spec.normaliser.prefers_gather(
        call.device, call.dtype
    )


def _must_keep_graph(inputs: CoreInputs, learned: Sequence[Tensor]) -> bool:
    """True under functorch, for meta tensors and for parameters with hooks.

    Meta tensors need no memory, and recomputation would call a hook once per block.
    """
    return is_under_functorch() or inputs.q.is_meta or any(t._backward_hooks for t in learned)


def _tensors_of(inputs: CoreInputs) -> list[Tensor]:
    """Differentiable inputs, query tensors first."""
    context = inputs.query_context
    kv = (inputs.k, inputs.v, *inputs.kv_entry.values())
    return [inputs.q, context.x_BTD, context.q_BTHK, *kv]


def _with_tensors(inputs: CoreInputs, tensors: Sequence[Tensor]) -> CoreInputs:
    q, x_BTD, raw_q_BTHK, k, v, *entries = tensors
    context = inputs.query_context._replace(x_BTD=x_BTD, q_BTHK=raw_q_BTHK)
    kv_entry = dict(zip(inputs.kv_entry, entries, strict=True))
    return inputs._replace(q=q, k=k, v=v, query_context=context, kv_entry=kv_entry)


class _RecomputedBlocks(torch.autograd.Function):
    """Forward without a graph; backward block by block, with a graph that is freed before the next.

    The gradients of keys are summed in one tensor for all blocks. Checkpoints of autograd would
    build a graph twice, and allocate zeros of the full length for the slice of every block.
    """

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[[QueryBlock, CoreInputs], Tensor],
        blocks: Sequence[QueryBlock],
        inputs: CoreInputs,
        draws_random_numbers: bool,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.run = run
        ctx.blocks = blocks
        ctx.count = len(_tensors_of(inputs))
        # Keep only the saved tensors.
        ctx.inputs = _with_tensors(inputs, [tensors[0].detach()[:0]] * ctx.count)
        ctx.save_for_backward(*tensors)
        device = tensors[0].device.type
        ctx.autocast = partial(
            torch.autocast,
            device,
            torch.get_autocast_dtype(device),
            enabled=torch.is_autocast_enabled(device),
        )
        ctx.rng_states = []
        outputs = []
        for block in blocks:
            ctx.rng_states.append(_rng_states(tensors[0]) if draws_random_numbers else ())
            outputs.append(run(block, slice_inputs(inputs, block)))
        return torch.cat(outputs, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        forbid_double_backward(NO_DOUBLE_BACKWARD_REMEDY)
        saved = ctx.saved_tensors  # read once: a checkpoint hands out each tensor only once
        inputs = _with_tensors(ctx.inputs, [t.detach() for t in saved[: ctx.count]])
        needed = ctx.needs_input_grad[4:]
        indices = [n for n, need in enumerate(needed) if need]
        sums: dict[int, Tensor] = {}
        for block, rng_states in zip(ctx.blocks, ctx.rng_states, strict=True):
            part = slice_inputs(inputs, block)
            with torch.enable_grad(), ctx.autocast(), _restored_rng(saved[0], rng_states):
                leaves = [
                    t.detach().requires_grad_(need)
                    for t, need in zip(_tensors_of(part), needed, strict=False)
                ]
                o_BTRV = ctx.run(block, _with_tensors(part, leaves))
            if not o_BTRV.requires_grad:
                continue
            sources = [*leaves, *saved[ctx.count :]]
            own_grad = grads[0][:, block.queries.start : block.queries.stop]
            block_grads = torch.autograd.grad(
                o_BTRV, [sources[n] for n in indices], own_grad, allow_unused=True
            )
            for n, grad in zip(indices, block_grads, strict=True):
                if grad is None:
                    continue
                if n >= ctx.count:
                    sums[n] = sums[n].add_(grad) if n in sums else grad
                    continue
                if n not in sums:
                    sums[n] = torch.zeros_like(saved[n])
                ranges = (block.queries,) if n < NUM_QUERY_TENSORS else block.keys
                add_to_ranges(sums[n].transpose(0, 1), grad.transpose(0, 1), ranges)
        return None, None, None, None, *map(sums.get, range(len(saved)))


def _rng_states(like: Tensor) -> tuple[Tensor, ...]:
    """States of the generators that a block may use: of the CPU, and of its device."""
    if like.is_cpu:
        return (torch.get_rng_state(),)
    return torch.get_rng_state(), torch.get_device_module(like.device).get_rng_state(like.device)


@contextmanager
def _restored_rng(like: Tensor, states: tuple[Tensor, ...]) -> Iterator[None]:
    """Repeat the random numbers drawn from these states; then the generators are as before."""
    if not states:
        yield
        return
    devices = [] if like.is_cpu else [like.device]
    device_type = "cuda" if like.is_cpu else like.device.type
    with torch.random.fork_rng(devices, device_type=device_type):
        torch.set_rng_state(states[0])
        for state in states[1:]:
            torch.get_device_module(like.device).set_rng_state(state, like.device)
        yield
