"""Every score, a block of queries at a time: takes what `dense` takes, in memory that only the length makes grow."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..probe import Probe
from ..terms import Work
from ..tokens import Sight
from . import dense
from .blocks import EDGES, Block, Blocks, formed
from .bound import Bound
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


def spent(job: Job, work: Work) -> int:
    """The products of every block with the keys that some of its queries may read."""
    return job.core.flops(work.batch * formed(job, work))


def attend(job: Job, sight: Sight, inputs: Inputs, bound: Bound, probe: Probe | None) -> Tensor:
    """Per-head outputs o_BTHV. Backwards, the scores of a block are formed once more, so that none is kept."""
    cut = Blocks(sight, inputs)
    if len(cut.all) == 1:
        return dense.attend(job, sight, inputs, bound, None)
    run = partial(_block, job, cut, bound)
    if torch.is_grad_enabled():
        again = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=job.training)
        return torch.cat([again(block) for block in cut.all], 1)
    return torch.cat([run(block) for block in cut.all], 1)


def _block(job: Job, cut: Blocks, bound: Bound, block: Block) -> Tensor:
    return dense.attend(job, cut.seen(block), cut.handed(block), bound, None)
