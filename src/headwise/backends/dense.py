"""Every score, in plain tensor operations: takes every spec, shows every weight."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.orders import transformed
from ..probe import Probe
from ..terms import Work
from ..tokens import Sight
from .bound import Bound, as_heads, as_rows, spread_heads
from .job import Inputs, Job


def refuses(job: Job) -> list[str]:
    """Why this job cannot run here."""
    return ["past tokens are a state, not scores"] if job.stated else []


def spent(job: Job, work: Work) -> int:
    """The products of the full rectangle, allowed or not."""
    return job.core.flops(work.batch * work.queries * work.keys)


def attend(job: Job, sight: Sight, inputs: Inputs, bound: Bound, probe: Probe | None) -> Tensor:
    """Per-head outputs o_BTHV, one head for each row of weights that reads values."""
    s_BHTS = _scores(job, inputs, bound)
    exact = torch.promote_types(s_BHTS.dtype, torch.float32)
    s_BHTS = s_BHTS.to(exact)
    for act in bound.scores:
        s_BHTS = act(s_BHTS, sight, inputs)
    allowed = sight.allowed
    if probe is not None:
        s_BHTS = probe("scores", s_BHTS)
        if "lse" in probe.wants:
            probe("lse", s_BHTS.masked_fill(~allowed, -torch.inf).logsumexp(-1))
    if bound.gather is not None and bound.normaliser.gathers(s_BHTS.device.type, inputs.v.dtype) and not transformed():
        return bound.gather(s_BHTS, allowed, inputs.v, job.core.values, bound.normaliser_p).transpose(1, 2)
    w_BHTS = bound.normalise(s_BHTS, allowed, bound.normaliser_p)
    for act in bound.weights:
        w_BHTS = act(w_BHTS, sight, inputs)
    if bound.selected is not None:
        w_BHTS = w_BHTS.index_select(1, torch.tensor(bound.selected, device=w_BHTS.device))
    if probe is not None:
        w_BHTS = probe("weights", w_BHTS)
    o_BHTV = _read(w_BHTS.to(inputs.v.dtype), inputs.v, job)
    for step, p in bound.values:
        o_BHTV = o_BHTV + step.read(w_BHTS, sight.i, sight.j, p).to(o_BHTV.dtype)
    return o_BHTV.transpose(1, 2)


def _scores(job: Job, inputs: Inputs, bound: Bound) -> Tensor:
    q_BHTK, k_BGSK = inputs.q.transpose(1, 2), inputs.k.transpose(1, 2)
    scale, similarity = inputs.asked.scale, bound.similarity
    each = job.groups
    if each <= 1 or similarity.headed:
        k_BHSK = spread_heads(inputs.k, job.core.keys)
        return similarity.scores(q_BHTK, k_BHSK, scale, bound.similarity_p)
    return as_heads(similarity.scores(as_rows(q_BHTK, each), k_BGSK, scale, bound.similarity_p), each)


def _read(w_BHTS: Tensor, v_BSGV: Tensor, job: Job) -> Tensor:
    every = v_BSGV.shape[2] == max(job.core.values) + 1  # behind a mixing, a cut may leave values that nobody reads
    each = job.groups if every else 0
    if each <= 1:
        return torch.matmul(w_BHTS, v_BSGV.transpose(1, 2) if each else spread_heads(v_BSGV, job.core.values))
    return as_heads(torch.matmul(as_rows(w_BHTS, each), v_BSGV.transpose(1, 2)), each)
