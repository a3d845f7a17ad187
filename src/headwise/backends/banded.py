"""Fused attention in blocks of queries: keys that no query of a block may read are not touched."""

from __future__ import annotations

import torch
from torch import Tensor

from ..pattern import Causal, Full
from ..probe import Probe
from ..terms import Work
from ..tokens import Sight
from . import sdpa
from .blocks import EDGES, Blocks, formed
from .bound import Bound
from .job import Inputs, Job


def edges() -> tuple[int, ...]:
    """The lengths at which a block more is begun."""
    return EDGES


def refuses(job: Job) -> list[str]:
    """Why this job cannot run here."""
    reasons = sdpa.refuses_core(job)
    if job.one:
        reasons.append("a single query is one block")
    if job.spec.pattern in (Full(), Causal()):
        reasons.append(f"{job.spec.pattern.text} leaves no block of keys out that one call would not")
    if "lse" in job.wants:
        reasons.append("it has a log-sum-exp for each block only")
    return reasons


def spent(job: Job, work: Work) -> int:
    """The products of every block with the keys that some of its queries may read, and of a sink's own column."""
    columns = sdpa.columns(job) * work.queries
    return job.core.flops(work.batch * (formed(job, work) + columns))


def attend(job: Job, sight: Sight, inputs: Inputs, bound: Bound, probe: Probe | None) -> Tensor:
    """Per-head outputs o_BTHV."""
    cut = Blocks(sight, inputs)
    if len(cut.all) == 1:
        return sdpa.attend(job, sight, inputs, bound, None)
    return torch.cat([sdpa.attend(job, cut.seen(b), cut.handed(b), bound, None) for b in cut.all], 1)
