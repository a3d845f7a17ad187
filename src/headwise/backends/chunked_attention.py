"""`dense` in blocks of queries: supports what `dense` supports, in memory linear in the length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..interfaces.core_types import CallSize, Probe
from ..kernels.autograd_guards import NO_DOUBLE_BACKWARD_REMEDY, forbid_double_backward, is_under_functorch
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
from .query_blocks import QUERY_BLOCK_LENGTHS, CallBlocks, QueryBlock, count_formed_pairs, slice_inputs

NUM_QUERY_TENSORS = 3  # of what a block is handed, the first so many have a row for each query, the others for each key


class RecomputePlan(NamedTuple):
    """The blocks of a call, what runs one of them, and whether that draws random numbers."""

    blocks: Sequence[QueryBlock]
    attend_block: Callable[[QueryBlock, CoreInputs], Tensor]
    uses_random_numbers: bool


def attend_recomputed(plan: RecomputePlan, inputs: CoreInputs, learned: Sequence[Tensor]) -> Tensor:
    """o_BTHV of all blocks; gradients reach what they were handed, and the parameters that they read."""
    wanted = [*_tensors_of(inputs), *learned]
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in wanted) or _can_keep_graph(inputs, learned):
        return torch.cat([plan.attend_block(block, slice_inputs(inputs, block)) for block in plan.blocks], 1)
    empty = _replace_tensors(inputs._replace(gates=()), [inputs.q.detach()[:0]] * (len(wanted) - len(learned)))
    made: Any = _RecomputedBlocks.apply(plan, empty, *wanted)
    return made


def _can_keep_graph(inputs: CoreInputs, learned: Sequence[Tensor]) -> bool:
    """Whether every block is kept after all: for who transforms functions, for shapes alone, which take no room, and
    where a parameter has hooks, which would be called for each block and once more for all."""
    return is_under_functorch() or inputs.q.is_meta or any(t._backward_hooks for t in learned)


def _tensors_of(inputs: CoreInputs) -> list[Tensor]:
    """What may have a gradient; queries before keys."""
    q, k, v, asked, entry, *_ = inputs
    return [q, asked.x_BTD, asked.q_BTHK, k, v, *entry.values()]


def _replace_tensors(inputs: CoreInputs, tensors: Sequence[Tensor]) -> CoreInputs:
    """The same with other tensors in their place."""
    q, x, asking, k, v, *kept = tensors
    asked = inputs.query_context._replace(x_BTD=x, q_BTHK=asking)
    return inputs._replace(q=q, k=k, v=v, query_context=asked, kv_entry=dict(zip(inputs.kv_entry, kept, strict=True)))


class _RecomputedBlocks(torch.autograd.Function):
    """Forward without a graph; backward block by block, each with a graph of its own that is gone before the next.

    The gradients of keys are added up in one tensor for all blocks: a slice's own would be zeros of the full length
    from every block, and so a cost that grows with the square of the length.
    """

    @staticmethod
    def forward(ctx: Any, plan: RecomputePlan, empty: CoreInputs, *wanted: Tensor) -> Tensor:
        ctx.plan, ctx.empty = plan, empty
        ctx.save_for_backward(*wanted)
        device = wanted[0].device
        ctx.autocast = device.type, torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type)
        ctx.drawn, made = [], []
        inputs = _replace_tensors(empty, wanted[: len(_tensors_of(empty))])
        for block in plan.blocks:
            ctx.drawn.append(_rng_state(device) if plan.uses_random_numbers else ())
            made.append(plan.attend_block(block, slice_inputs(inputs, block)))
        return torch.cat(made, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        forbid_double_backward(NO_DOUBLE_BACKWARD_REMEDY)
        count = len(_tensors_of(ctx.empty))
        saved = list(ctx.saved_tensors)  # asked once: a checkpoint hands each out no second time
        given, learned = saved[:count], saved[count:]
        sums = _GradientSums(given, learned, ctx.needs_input_grad[2:])
        device, dtype, on = ctx.autocast
        inputs = _replace_tensors(ctx.empty, [t.detach() for t in given])
        for block, drawn in zip(ctx.plan.blocks, ctx.drawn, strict=True):
            part = slice_inputs(inputs, block)
            with (
                torch.enable_grad(),
                torch.autocast(device, dtype, enabled=on),
                _restored_rng_state(given[0].device, drawn),
            ):
                leaves = sums.make_leaves(_tensors_of(part))
                o_BTHV = ctx.plan.attend_block(block, _replace_tensors(part, leaves))
            sums.add_block(block, o_BTHV, leaves, grads[0][:, block.queries.start : block.queries.stop])
        return None, None, *sums.all


class _GradientSums:
    """The gradients of all that blocks were handed, and of what they read, as far as they are needed."""

    def __init__(self, given: Sequence[Tensor], learned: Sequence[Tensor], needed: Sequence[bool]) -> None:
        self.given, self.learned, self.needed = given, learned, needed
        self.all: list[Tensor | None] = [None] * len(needed)

    def make_leaves(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """What a block is handed, so that its gradients can be asked for."""
        return [part.detach().requires_grad_(need) for part, need in zip(parts, self.needed, strict=False)]

    def add_block(self, block: QueryBlock, o_BTHV: Tensor, leaves: Sequence[Tensor], grad_BTHV: Tensor) -> None:
        """Add the gradients of one block."""
        if not o_BTHV.requires_grad:
            return
        wanted = [n for n, need in enumerate(self.needed) if need]
        asked = [leaves[n] if n < len(leaves) else self.learned[n - len(leaves)] for n in wanted]
        found = torch.autograd.grad(o_BTHV, asked, grad_BTHV, allow_unused=True)
        for n, grad in zip(wanted, found, strict=True):
            if grad is not None:
                ranges = None if n >= len(leaves) else (block.queries,) if n < NUM_QUERY_TENSORS else block.keys
                self._add(n, grad, ranges)

    def _add(self, n: int, grad: Tensor, ranges: Sequence[range] | None) -> None:
        if ranges is None:
            before = self.all[n]
            self.all[n] = grad if before is None else before.add_(grad)
            return
        total = self.all[n]
        if total is None:
            total = self.all[n] = torch.zeros_like(self.given[n])
        done = 0
        for r in ranges:
            total[:, r.start : r.stop] += grad[:, done : done + len(r)]
            done += len(r)


def _rng_state(device: torch.device) -> tuple[Tensor, ...]:
    """Where the random numbers stand that a block may draw."""
    own = () if device.type == "cpu" else (torch.get_device_module(device).get_rng_state(device),)
    return torch.get_rng_state(), *own


@contextmanager
def _restored_rng_state(device: torch.device, drawn: tuple[Tensor, ...]) -> Iterator[None]:
    """Random numbers as they were drawn before, and afterwards as if they had not been."""
    if not drawn:
        yield
        return
    with torch.random.fork_rng([device] if drawn[1:] else [], device_type=device.type if drawn[1:] else "cuda"):
        torch.set_rng_state(drawn[0])
        for state in drawn[1:]:
            torch.get_device_module(device).set_rng_state(state, device)
        yield


# --- Every score, a block of queries at a time ---------------------------------------------------------


def boundary_lengths() -> tuple[int, ...]:
    """The lengths at which a block more is begun."""
    return QUERY_BLOCK_LENGTHS


def unsupported_reasons(call: CallSignature) -> list[str]:
    """Why this call cannot run here."""
    reasons = dense.unsupported_reasons(call)
    if call.single_query:
        reasons.append("needs more than one query per row; dense runs it")
    if call.has_caller_mask:
        reasons.append("does not support a mask given by the caller; dense does")
    if unseen := sorted(call.probed_tensors & {"scores", "weights", "lse"}):
        reasons.append(f"it never has all {', '.join(unseen)} at once")
    return reasons


def notes(call: CallSignature) -> list[str]:
    """What it does with this call beyond what it does with every one."""
    return ["does not read the values of keys with zero weight"] if _can_gather_values(call) else []


tensor_conflicts = no_tensor_conflicts
slower_reasons = never_slower


def executed_flops(call: CallSignature, size: CallSize) -> int:
    """The products of every block with the keys that some of its queries may read."""
    return call.core.flops(size.batch * count_formed_pairs(call, size))


def attend(
    call: CallSignature, attention_mask: AttentionMask, inputs: CoreInputs, steps: CoreSteps, probe: Probe | None
) -> Tensor:
    """Per-head outputs o_BTHV. Backwards, the scores of a block are formed once more, so that none is kept."""
    cut = CallBlocks(attention_mask, inputs)
    if len(cut.all) == 1:  # keeps for the way back what dense keeps: nothing is gained by forming it once more
        plain = torch.is_grad_enabled() and not _can_gather_values(call)
        return dense.attend_all_pairs(
            call, attention_mask, inputs, steps if plain else steps.with_fused_kernels(), None
        )
    steps = steps.with_fused_kernels()
    run = partial(_attend_block, call, cut.mask_of, steps)
    if torch.compiler.is_compiling():  # which traces no gradient inside a gradient, but knows checkpoints
        run_again = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=call.training)
        made = run_again if torch.is_grad_enabled() else run
        return torch.cat([made(block, cut.inputs_of(block)) for block in cut.all], 1)
    return attend_recomputed(RecomputePlan(cut.all, run, call.training), inputs, steps.trainable_parameters)


def _can_gather_values(call: CallSignature) -> bool:
    return has_unmodified_weights(call.spec) and call.spec.normaliser.prefers_gather(call.device, call.dtype)


def _attend_block(
    call: CallSignature,
    seen: Callable[[QueryBlock], AttentionMask],
    steps: CoreSteps,
    block: QueryBlock,
    handed: CoreInputs,
) -> Tensor:
    return dense.attend_all_pairs(call, seen(block), handed, steps, None)
