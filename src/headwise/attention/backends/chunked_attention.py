"""`dense` in blocks of queries: supports what `dense` supports, in memory linear in the length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...kernels.autograd_guards import (
    NO_DOUBLE_BACKWARD_REMEDY,
    forbid_double_backward,
    is_under_functorch,
)
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

NUM_QUERY_TENSORS = (
    3  # the first tensors of `_tensors_of` have one row per query, the others one row per key
)


class RecomputePlan(NamedTuple):
    """The blocks of a call, the function that runs one of them, and whether it draws random
    numbers.
    """

    blocks: Sequence[QueryBlock]
    attend_block: Callable[[QueryBlock, CoreInputs], Tensor]
    uses_random_numbers: bool


def attend_recomputed(plan: RecomputePlan, inputs: CoreInputs, learned: Sequence[Tensor]) -> Tensor:
    """Outputs o_BTRV of all blocks, with gradients for the inputs and for the
    parameters `learned`.
    """
    tensors = [*_tensors_of(inputs), *learned]
    if (
        not torch.is_grad_enabled()
        or not any(t.requires_grad for t in tensors)
        or _must_keep_graph(inputs, learned)
    ):
        return torch.cat(
            [plan.attend_block(block, slice_inputs(inputs, block)) for block in plan.blocks], 1
        )
    empty = _replace_tensors(
        inputs._replace(gates=()), [inputs.q.detach()[:0]] * (len(tensors) - len(learned))
    )
    o_BTRV: Any = _RecomputedBlocks.apply(plan, empty, *tensors)
    return o_BTRV


def _must_keep_graph(inputs: CoreInputs, learned: Sequence[Tensor]) -> bool:
    """Whether the graphs of all blocks are kept: under functorch, for meta tensors, which need no
    memory, and for parameters with hooks, because recomputation would call these once per block.
    """
    return is_under_functorch() or inputs.q.is_meta or any(t._backward_hooks for t in learned)


def _tensors_of(inputs: CoreInputs) -> list[Tensor]:
    """The tensors that may have a gradient; those of queries before those of keys."""
    q, k, v, context, kv_entry, *_ = inputs
    return [q, context.x_BTD, context.q_BTHK, k, v, *kv_entry.values()]


def _replace_tensors(inputs: CoreInputs, tensors: Sequence[Tensor]) -> CoreInputs:
    """The inputs with these tensors, in the order of `_tensors_of`."""
    q, x_BTD, raw_q_BTHK, k, v, *entries = tensors
    context = inputs.query_context._replace(x_BTD=x_BTD, q_BTHK=raw_q_BTHK)
    kv_entry = dict(zip(inputs.kv_entry, entries, strict=True))
    return inputs._replace(q=q, k=k, v=v, query_context=context, kv_entry=kv_entry)


class _RecomputedBlocks(torch.autograd.Function):
    """Forward without a graph; backward block by block, with a graph that is freed before the next
    block.

    The gradients of keys are summed in one tensor for all blocks. Autograd would allocate zeros of
    the full length for the slice of every block, so that its cost would grow with the square of the
    length.
    """

    @staticmethod
    def forward(ctx: Any, plan: RecomputePlan, empty: CoreInputs, *tensors: Tensor) -> Tensor:
        ctx.plan = plan
        ctx.empty = empty
        ctx.save_for_backward(*tensors)
        device = tensors[0].device
        ctx.autocast = (
            device.type,
            torch.get_autocast_dtype(device.type),
            torch.is_autocast_enabled(device.type),
        )
        ctx.rng_states = []
        outputs = []
        inputs = _replace_tensors(empty, tensors[: len(_tensors_of(empty))])
        for block in plan.blocks:
            ctx.rng_states.append(_rng_state(device) if plan.uses_random_numbers else ())
            outputs.append(plan.attend_block(block, slice_inputs(inputs, block)))
        return torch.cat(outputs, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        forbid_double_backward(NO_DOUBLE_BACKWARD_REMEDY)
        count = len(_tensors_of(ctx.empty))
        saved = list(
            ctx.saved_tensors
        )  # read once, because a checkpoint hands out each tensor only once
        tensors = saved[:count]
        learned = saved[count:]
        sums = _GradientSums(tensors, learned, ctx.needs_input_grad[2:])
        device, dtype, is_enabled = ctx.autocast
        inputs = _replace_tensors(ctx.empty, [t.detach() for t in tensors])
        for block, rng_states in zip(ctx.plan.blocks, ctx.rng_states, strict=True):
            part = slice_inputs(inputs, block)
            with (
                torch.enable_grad(),
                torch.autocast(device, dtype, enabled=is_enabled),
                _restored_rng_state(tensors[0].device, rng_states),
            ):
                leaves = sums.make_leaves(_tensors_of(part))
                o_BTRV = ctx.plan.attend_block(block, _replace_tensors(part, leaves))
            sums.add_block(
                block, o_BTRV, leaves, grads[0][:, block.queries.start : block.queries.stop]
            )
        return None, None, *sums.all


class _GradientSums:
    """Sums over blocks of the gradients of the inputs and of the parameters, as far as they are
    needed.
    """

    def __init__(
        self, tensors: Sequence[Tensor], learned: Sequence[Tensor], needed: Sequence[bool]
    ) -> None:
        self.tensors = tensors
        self.learned = learned
        self.needed = needed
        self.all: list[Tensor | None] = [None] * len(needed)

    def make_leaves(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Leaf tensors for the inputs of a block, whose gradients can be taken."""
        return [
            part.detach().requires_grad_(need)
            for part, need in zip(parts, self.needed, strict=False)
        ]

    def add_block(
        self, block: QueryBlock, o_BTRV: Tensor, leaves: Sequence[Tensor], grad_BTRV: Tensor
    ) -> None:
        """Add the gradients of one block."""
        if not o_BTRV.requires_grad:
            return
        numbers = [n for n, need in enumerate(self.needed) if need]
        tensors = [leaves[n] if n < len(leaves) else self.learned[n - len(leaves)] for n in numbers]
        grads = torch.autograd.grad(o_BTRV, tensors, grad_BTRV, allow_unused=True)
        for n, grad in zip(numbers, grads, strict=True):
            if grad is not None:
                ranges = (
                    None
                    if n >= len(leaves)
                    else (block.queries,)
                    if n < NUM_QUERY_TENSORS
                    else block.keys
                )
                self._add(n, grad, ranges)

    def _add(self, n: int, grad: Tensor, ranges: Sequence[range] | None) -> None:
        if ranges is None:
            before = self.all[n]
            self.all[n] = grad if before is None else before.add_(grad)
            return
        total = self.all[n]
        if total is None:
            total = self.all[n] = torch.zeros_like(self.tensors[n])
        offset = 0
        for rows in ranges:
            total[:, rows.start : rows.stop] += grad[:, offset : offset + len(rows)]
            offset += len(rows)


def _rng_state(device: torch.device) -> tuple[Tensor, ...]:
    """States of the random number generators that a block may use: of the CPU,
    and of its device.
    """
    own = () if device.type == "cpu" else (torch.get_device_module(device).get_rng_state(device),)
    return torch.get_rng_state(), *own


@contextmanager
def _restored_rng_state(device: torch.device, rng_states: tuple[Tensor, ...]) -> Iterator[None]:
    """Repeat the random numbers drawn from these states; afterwards the
    generators are as before.
    """
    if not rng_states:
        yield
        return
    has_device = bool(rng_states[1:])
    with torch.random.fork_rng(
        [device] if has_device else [], device_type=device.type if has_device else "cuda"
    ):
        torch.set_rng_state(rng_states[0])
        for state in rng_states[1:]:
            torch.get_device_module(device).set_rng_state(state, device)
        yield


# --- The backend ----------------------------------------------------------------------------------


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
    blocks = CallBlocks(attention_mask, inputs)
    # Fused kernels read one mask for all heads.
    fused_steps = steps if attention_mask.differs_by_head else steps.with_fused_kernels()
    if (
        len(blocks.all) == 1
    ):  # saves what `dense` saves, because recomputing a single block saves no memory
        plain = torch.is_grad_enabled() and not _can_gather_values(call)
        return dense.attend_all_pairs(
            call, attention_mask, inputs, steps if plain else fused_steps, None
        )
    steps = fused_steps
    attend_block = partial(_attend_block, call, blocks.mask_of, steps)
    if (
        torch.compiler.is_compiling()
    ):  # the compiler does not trace a gradient within a gradient, but checkpoints
        checkpointed = partial(
            checkpoint, attend_block, use_reentrant=False, preserve_rng_state=call.training
        )
        run = checkpointed if torch.is_grad_enabled() else attend_block
        return torch.cat([run(block, blocks.inputs_of(block)) for block in blocks.all], 1)
    plan = RecomputePlan(blocks.all, attend_block, call.training)
    return attend_recomputed(plan, inputs, steps.trainable_parameters)


def _can_gather_values(call: CallSignature) -> bool:
    return has_unmodified_weights(call.spec) and call.spec.normaliser.prefers_gather(
        call.device, call.dtype
    )


def _attend_block(
    call: CallSignature,
    mask_of: Callable[[QueryBlock], AttentionMask],
    steps: CoreSteps,
    block: QueryBlock,
    inputs: CoreInputs,
) -> Tensor:
    return dense.attend_all_pairs(call, mask_of(block), inputs, steps, None)
