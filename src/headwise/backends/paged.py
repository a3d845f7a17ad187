"""One query per row reads keys and values where they lie, in pages that rows may share: nothing is gathered for it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..kernels.decode import KINDS, Beside, decode
from ..parts.sink_softmax import SinkSoftmax
from ..parts.softcap import Softcap
from ..probe import Probe
from ..seams import ScoreStep
from ..spec import AttentionSpec
from ..terms import Work
from ..tokens import Sight, Tokens
from .bound import Bound
from .job import Inputs, Job
from .sdpa import refuses_core

READS = {torch.float32, torch.float64, torch.bfloat16} & set(KINDS)


def refuses(job: Job) -> list[str]:
    """Why this job cannot run here."""
    reasons = [] if job.paged else ["keys do not lie in pages"]
    reasons += refuses_core(replace(job, spec=_added(job.spec)) if _limit(job.spec) else job)
    if not job.one:
        reasons.append("there is more than one query per row")
    if not job.spec.project.handed:
        reasons.append(f"{type(job.spec.project).__name__} makes keys and values of what is remembered")
    if not job.groups:
        reasons.append("no equal groups of neighbouring heads share a key head")
    if job.device != "cpu":
        reasons.append(f"its kernel is for the CPU, not {job.device}")
    if job.dtype not in READS:
        reasons.append(f"its kernel does not read {job.dtype}")
    if job.grad:
        reasons.append("pages keep no gradients")
    if unseen := sorted(job.wants & {"k", "v"}):
        reasons.append(f"it never has the {', '.join(unseen)} of each row side by side")
    return reasons


def spent(job: Job, work: Work) -> int:
    """The products of every key in reach, allowed or not."""
    return job.core.flops(work.batch * work.queries * work.keys)


def attend(job: Job, sight: Sight, inputs: Inputs, bound: Bound, probe: Probe | None) -> Tensor:
    """Per-head outputs o_B1HV."""
    spans = sight.keys.spans
    assert spans is not None, "keys were gathered; let the cache place them"
    sink = None
    if isinstance(bound.normaliser, SinkSoftmax):
        sink = bound.normaliser_p.spread()["sink"].flatten()
    beside = Beside(bias=_bias(sight, inputs, bound), sink=sink, cap=_limit(job.spec))
    k_PGSK, v_PGSV = inputs.k.transpose(1, 2), inputs.v.transpose(1, 2)
    q_BHK = inputs.q[:, 0].to(k_PGSK.dtype)  # autocast projects in a dtype of its own
    o_BHV, lse_BH = decode(q_BHK, k_PGSK, v_PGSV, spans.table, scale=inputs.asked.scale, beside=beside)
    if probe is not None and "lse" in probe.wants:
        probe("lse", lse_BH[..., None])
    return o_BHV[:, None].to(inputs.q.dtype)


def gathered(sight: Sight, inputs: Inputs) -> tuple[Sight, Inputs]:
    """The same call with the keys of each row side by side, for whoever looks at them."""
    keys = sight.keys
    if keys.spans is None:
        return sight, inputs
    pages = keys.spans.table[..., 0]
    k, v = (held[pages].flatten(1, 2).masked_fill(~keys.live[..., None, None], 0) for held in (inputs.k, inputs.v))
    told = Tokens(keys.position, keys.segment, checked=True)
    return Sight(sight.queries, told, sight.pattern, sight.mask), inputs._replace(k=k, v=v)


def _bias(sight: Sight, inputs: Inputs, bound: Bound) -> Tensor | None:
    """What is added to the score of the key in each column, [B or 1, H or 1, columns]; none where nothing is."""
    spans, bias = sight.keys.spans, None
    if bound.scores:  # a limit comes first, and leaves the zeros as they are to which they add
        bias = bound.bias(sight, inputs._replace(q=inputs.q.to(torch.promote_types(inputs.q.dtype, torch.float32))))
    if spans is not None and not spans.whole:
        bias = torch.zeros((), device=inputs.q.device) if bias is None else bias
        bias = torch.where(sight.allowed, bias, -torch.inf)
    return None if bias is None else bias[:, :, 0]


def _limit(spec: AttentionSpec) -> float:
    """Where scores saturate before anything is added to them; 0 where they do not."""
    steps = spec.steps(ScoreStep)
    return steps[0][1].limit if steps and isinstance(steps[0][1], Softcap) else 0.0


def _added(spec: AttentionSpec) -> AttentionSpec:
    """The spec of what is done to scores behind that."""
    first = spec.steps(ScoreStep)[0][1]
    return replace(spec, modifiers=tuple(one for one in spec.modifiers if one is not first))
