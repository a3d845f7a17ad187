"""Linear attention while decoding: past tokens are one state, and only the new ones form scores."""

from __future__ import annotations

import torch
from torch import Tensor

from ..probe import Probe
from ..terms import Work
from ..tokens import Sight
from .bound import Bound, spread_heads
from .job import Inputs, Job


def refuses(job: Job) -> list[str]:
    """Why this job cannot run here."""
    reasons = [] if job.stated else ["there is no state of past tokens"]
    if not job.spec.normaliser.proportional:
        reasons.append(f"a state gives sums, which {type(job.spec.normaliser).__name__} is not made of")
    if job.masked:
        reasons.append("a state cannot be masked")
    if unseen := sorted(job.wants & {"scores", "weights", "lse"}):
        reasons.append(f"it cannot show {', '.join(unseen)}")
    return reasons


def spent(job: Job, work: Work) -> int:
    """Own scores of the new tokens, and for each one reading of the state."""
    core = job.core
    own = core.flops(work.batch * work.queries * work.queries)
    return own + 2 * work.batch * work.queries * len(core.keys) * core.dim * (core.vdim + 1)


def heard(inputs: Inputs, job: Job) -> tuple[Tensor, Tensor]:
    """The key and the value that each voice reads."""
    keys = tuple(job.core.keys[own] for own in job.spec.voices)
    return spread_heads(inputs.k, keys), spread_heads(inputs.v, job.core.values)


def attend(job: Job, sight: Sight, inputs: Inputs, bound: Bound, probe: Probe | None) -> Tensor:
    """Per-head outputs o_BTHV: (what the state gives + what new tokens give) / (all their weight)."""
    q_BHTK = inputs.q.transpose(1, 2)
    if bound.selected is not None:
        q_BHTK = q_BHTK.index_select(1, torch.tensor(bound.selected, device=q_BHTK.device))
    k_BHSK, v_BHSV = heard(inputs, job)
    s_BHTS = bound.similarity.scores(q_BHTK, k_BHSK, inputs.asked.scale, bound.similarity_p)
    s_BHTS = s_BHTS.masked_fill(~sight.allowed, 0.0)
    past, weight = bound.similarity.read(q_BHTK, inputs.state, bound.similarity_p)
    live = sight.queries.live[:, None, :]
    past, weight = past.masked_fill(~live[..., None], 0.0), weight.masked_fill(~live, 0.0)
    total = weight + s_BHTS.sum(-1)
    o_BHTV = (past + torch.matmul(s_BHTS, v_BHSV)) / total.masked_fill(total == 0, 1.0)[..., None]
    return o_BHTV.to(v_BHSV.dtype).transpose(1, 2)
