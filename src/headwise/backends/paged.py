"""One query per row reads keys and values where they lie, and pages that rows share once: nothing is gathered."""

from __future__ import annotations

import torch
from torch import Tensor

from ..parts.sink_softmax import SinkSoftmax
from ..probe import Probe
from ..terms import Work
from ..tokens import Sight, Tokens
from . import ragged
from .bound import Bound
from .job import Inputs, Job


def refuses(job: Job) -> list[str]:
    """Why this job cannot run here."""
    reasons = [] if job.paged else ["keys do not lie in pages"]
    reasons += ragged.refuses(job)
    if not job.spec.project.handed:
        reasons.append(f"{type(job.spec.project).__name__} makes keys and values of what is remembered")
    if job.grad:
        reasons.append("pages keep no gradients")
    if unseen := sorted(job.wants & {"k", "v"}):
        reasons.append(f"it never has the {', '.join(unseen)} of each row side by side")
    if "lse" in job.wants and isinstance(job.spec.normaliser, SinkSoftmax):
        reasons.append("its lse is of scores and sinks together")
    return reasons


def spent(job: Job, work: Work) -> int:
    """The products of every key in reach, allowed or not."""
    return job.core.flops(work.batch * work.queries * work.keys)


def attend(job: Job, sight: Sight, inputs: Inputs, bound: Bound, probe: Probe | None) -> Tensor:
    """Per-head outputs o_B1HV."""
    spans = sight.keys.spans
    assert spans is not None, "keys were gathered; let the cache place them"
    hidden = None if spans.whole else ~sight.allowed[:, :, 0]
    return ragged.read(job, sight, inputs, bound, probe, (spans.table, hidden))


def gathered(sight: Sight, inputs: Inputs) -> tuple[Sight, Inputs]:
    """The same call with the keys of each row side by side and in numbers, for whoever looks at them."""
    if inputs.k.dtype == torch.int8:
        told = ((held, inputs.entry[f"{side}.scale"]) for side, held in (("k", inputs.k), ("v", inputs.v)))
        k, v = ((held * scale[..., None]).to(inputs.q.dtype) for held, scale in told)
        inputs = inputs._replace(k=k, v=v)
    keys = sight.keys
    if keys.spans is None:
        return sight, inputs
    pages = keys.spans.table[..., 0]
    k, v = (held[pages].flatten(1, 2).masked_fill(~keys.live[..., None, None], 0) for held in (inputs.k, inputs.v))
    told = Tokens(keys.position, keys.segment, checked=True)
    return Sight(sight.queries, told, sight.pattern, sight.mask), inputs._replace(k=k, v=v)
