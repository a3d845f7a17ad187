"""Fused attention in blocks of queries: keys that no query of a block may read are not touched."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.orders import transformed
from ..parts.sink_softmax import SinkSoftmax
from ..pattern import Causal, Full
from ..probe import Probe
from ..seams import ScoreStep
from ..terms import Work
from ..tokens import Sight
from . import banding, blocks, sdpa
from .bands import banded
from .blocks import BLOCK, Blocks
from .bound import Bound, spread_heads
from .job import Inputs, Job
from .slices import slices

LEAST = 370  # keys from which on it was measured to be faster: docs/backends.md


def edges() -> tuple[int, ...]:
    """The lengths at which a block more is begun."""
    return blocks.EDGES


def refuses(job: Job) -> list[str]:
    """Why this job cannot run here."""
    reasons = sdpa.refuses_core(job)
    if job.one:
        reasons.append("a single query is one block")
    if job.spec.pattern in (Full(), Causal()):
        reasons.append(f"{job.spec.pattern.text} leaves no block of keys out that one call would not")
    if "lse" in job.wants:
        reasons.append("it has a log-sum-exp for each block only")
    return reasons or job.early(LEAST, "one call with a mask takes less time")


def spent(job: Job, work: Work) -> int:
    """The products of every block with the keys that some of its queries may read, and of a sink's own column."""
    columns = sdpa.columns(job) * work.queries if _whole(job, work) or not _folds(job) else 0
    return job.core.flops(work.batch * (formed(job, work) + columns))


def formed(job: Job, work: Work) -> int:
    """The pairs of one row whose scores are formed, for queries that are the last of the keys."""
    if _whole(job, work):
        return work.queries * work.keys
    if not _folds(job):
        return blocks.formed(job, work)
    return banding.formed(job.spec.pattern, *_places(job, work))


def attend(job: Job, sight: Sight, inputs: Inputs, bound: Bound, probe: Probe | None) -> Tensor:
    """Per-head outputs o_BTHV."""
    if not _folds(job) or transformed():
        return _one_by_one(job, sight, inputs, bound)
    asks, told = sight.queries, sight.keys
    if _few(asks.count, told.count) or sight.shape != "any":
        return sdpa.attend(job, sight, inputs, bound, None)
    k, v = inputs.k, inputs.v
    if not job.groups:
        k, v = (spread_heads(x, by).transpose(1, 2) for x, by in ((k, job.core.keys), (v, job.core.values)))
    known = asks.start is not None and told.start is not None
    tokens = [] if known else [asks.position, asks.segment, told.position, told.segment]
    sinks = bound.normaliser_p.spread()["sink"].flatten() if isinstance(bound.normaliser, SinkSoftmax) else None
    starts = [asks.start, told.start] if known else []
    return banded(inputs.q, k, v, sinks, tokens, starts, bound.pattern, inputs.asked.scale)[0]


def _few(queries: int, keys: int) -> bool:
    """Whether there is not enough to cut."""
    return queries <= BLOCK and keys <= 2 * BLOCK


def _folds(job: Job) -> bool:
    """Whether the kernel of the CPU can run it, forward and backward."""
    steps = any(isinstance(part, ScoreStep) for _, part in job.spec.parts())
    return job.device == "cpu" and job.core.dim == job.core.vdim and not steps


def _whole(job: Job, work: Work) -> bool:
    """Whether one call does it all."""
    if not _folds(job):
        return work.queries <= BLOCK
    if _few(work.queries, work.keys):
        return True
    queries, keys = _places(job, work)
    pairs = job.spec.pattern.pairs(queries, keys)
    square = queries == keys and job.spec.pattern.opening == 0 and pairs == Causal().pairs(queries, keys)
    return square or pairs == work.queries * work.keys


def _places(job: Job, work: Work) -> tuple[range, range]:
    # Tokens of a source are counted from 0 like those that ask.
    first = work.keys - work.queries if job.spec.source is None else 0
    return range(first, first + work.queries), range(work.keys)


def _one_by_one(job: Job, sight: Sight, inputs: Inputs, bound: Bound) -> Tensor:
    cut = Blocks(sight, inputs)
    if len(cut.all) == 1:
        return sdpa.attend(job, sight, inputs, bound, None)
    read, asking = [block.keys for block in cut.all], [(block.queries,) for block in cut.all]
    queries, keys, values = (slices(x, some) for x, some in ((inputs.q, asking), (inputs.k, read), (inputs.v, read)))
    asked = (slices(x, asking) for x in (inputs.asked.x_BTD, inputs.asked.q_BTHK))
    parts = [
        sdpa.attend(job, cut.seen(block), _handed(cut.handed(block), *given), bound, None)
        for block, *given in zip(cut.all, queries, keys, values, *asked, strict=True)
    ]
    return torch.cat(parts, 1)


def _handed(inputs: Inputs, q: Tensor, k: Tensor, v: Tensor, x_BTD: Tensor, q_BTHK: Tensor) -> Inputs:
    """The tensors of a block, those that learn in the slices made for all blocks."""
    return inputs._replace(q=q, k=k, v=v, asked=inputs.asked._replace(x_BTD=x_BTD, q_BTHK=q_BTHK))
