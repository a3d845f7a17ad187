"""Every score, a block of queries at a time: takes what `dense` takes, in memory that only the length makes grow."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..probe import Probe
from ..terms import CallSize
from ..tokens import AttentionMask
from . import again, dense
from .blocks import QUERY_BLOCK_LENGTHS, QueryBlock, CallBlocks, count_block_pairs
from .bound import CoreSteps, has_unmodified_weights
from .job import CoreInputs, CallSignature


def boundary_lengths() -> tuple[int, ...]:
    """The lengths at which a block more is begun."""
    return QUERY_BLOCK_LENGTHS


def unsupported_reasons(job: CallSignature) -> list[str]:
    """Why this job cannot run here."""
    reasons = dense.unsupported_reasons(job)
    if job.single_query:
        reasons.append("a single query is one block, which dense runs as it is")
    if job.has_caller_mask:
        reasons.append("a mask of the caller's own is for dense")
    if unseen := sorted(job.probed_tensors & {"scores", "weights", "lse"}):
        reasons.append(f"it never has all {', '.join(unseen)} at once")
    return reasons


def notes(job: CallSignature) -> list[str]:
    """What it does with this job beyond what it does with every one."""
    return ["values of keys that get no weight are not read"] if _can_gather_values(job) else []


def executed_flops(job: CallSignature, work: CallSize) -> int:
    """The products of every block with the keys that some of its queries may read."""
    return job.core.flops(work.batch * count_block_pairs(job, work))


def attend(job: CallSignature, sight: AttentionMask, inputs: CoreInputs, bound: CoreSteps, probe: Probe | None) -> Tensor:
    """Per-head outputs o_BTHV. Backwards, the scores of a block are formed once more, so that none is kept."""
    cut = CallBlocks(sight, inputs)
    if len(cut.all) == 1:  # keeps for the way back what dense keeps: nothing is gained by forming it once more
        plain = torch.is_grad_enabled() and not _can_gather_values(job)
        return dense.attend(job, sight, inputs, bound if plain else bound.with_fused_kernels(), None)
    bound = bound.with_fused_kernels()
    run = partial(_attend_block, job, cut.mask_of, bound)
    if torch.compiler.is_compiling():  # which traces no gradient inside a gradient, but knows checkpoints
        run_again = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=job.training)
        made = run_again if torch.is_grad_enabled() else run
        return torch.cat([made(block, cut.inputs_of(block)) for block in cut.all], 1)
    return again.attend_recomputed(again.RecomputePlan(cut.all, run, job.training), inputs, bound.trainable_parameters)


def _can_gather_values(job: CallSignature) -> bool:
    return has_unmodified_weights(job.spec) and job.spec.normaliser.prefers_gather(job.device, job.dtype)


def _attend_block(job: CallSignature, seen: Callable[[QueryBlock], AttentionMask], bound: CoreSteps, block: QueryBlock, handed: CoreInputs) -> Tensor:
    return dense.attend(job, seen(block), handed, bound, None)
