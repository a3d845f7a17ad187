"""Every score, a block of queries at a time: takes what `dense` takes, in memory that only the length makes grow."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..probe import Probe
from ..terms import Work
from ..tokens import Sight
from . import again, dense
from .blocks import EDGES, Block, Blocks, formed
from .bound import Bound, straight
from .job import Inputs, Job


def edges() -> tuple[int, ...]:
    """The lengths at which a block more is begun."""
    return EDGES


def refuses(job: Job) -> list[str]:
    """Why this job cannot run here."""
    reasons = dense.refuses(job)
    if job.one:
        reasons.append("a single query is one block, which dense runs as it is")
    if job.masked:
        reasons.append("a mask of the caller's own is for dense")
    if unseen := sorted(job.wants & {"scores", "weights", "lse"}):
        reasons.append(f"it never has all {', '.join(unseen)} at once")
    return reasons


def notes(job: Job) -> list[str]:
    """What it does with this job beyond what it does with every one."""
    return ["values of keys that get no weight are not read"] if _gathers(job) else []


def spent(job: Job, work: Work) -> int:
    """The products of every block with the keys that some of its queries may read."""
    return job.core.flops(work.batch * formed(job, work))


def attend(job: Job, sight: Sight, inputs: Inputs, bound: Bound, probe: Probe | None) -> Tensor:
    """Per-head outputs o_BTHV. Backwards, the scores of a block are formed once more, so that none is kept."""
    cut = Blocks(sight, inputs)
    if len(cut.all) == 1:  # keeps for the way back what dense keeps: nothing is gained by forming it once more
        plain = torch.is_grad_enabled() and not _gathers(job)
        return dense.attend(job, sight, inputs, bound if plain else bound.fused(), None)
    bound = bound.fused()
    run = partial(_block, job, cut.seen, bound)
    if torch.compiler.is_compiling():  # which traces no gradient inside a gradient, but knows checkpoints
        run_again = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=job.training)
        made = run_again if torch.is_grad_enabled() else run
        return torch.cat([made(block, cut.handed(block)) for block in cut.all], 1)
    return again.attend(again.Plan(cut.all, run, job.training), inputs, bound.learned)


def _gathers(job: Job) -> bool:
    return straight(job.spec) and job.spec.normaliser.gathers(job.device, job.dtype)


def _block(job: Job, seen: Callable[[Block], Sight], bound: Bound, block: Block, handed: Inputs) -> Tensor:
    return dense.attend(job, seen(block), handed, bound, None)
