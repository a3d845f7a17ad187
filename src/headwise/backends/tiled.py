"""Plain softmax heads on the CPU: a kernel reads for sixty-four queries at a time, and keeps no score."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.compiled import NUMBERS
from ..kernels.every import Size, pairs, read_every
from ..kernels.orders import transformed
from ..kernels.tiles import ROWS
from ..pattern import Causal
from ..probe import Probe
from ..terms import Work
from ..tokens import Sight
from . import sdpa
from .bound import Bound, spread_heads
from .job import Inputs, Job
from .speaking import Reading

LEAST = 64  # keys from which on it was measured to be faster: docs/backends.md


def edges() -> tuple[int, ...]:
    """The lengths at which units are full, and one at which a part of the keys ends."""
    return ROWS - 1, ROWS, ROWS + 1, 259


def refuses(job: Job) -> list[str]:
    """Why this job cannot run here."""
    reasons = sdpa.refuses_plain(job)
    if job.device != "cpu":
        reasons.append(f"its kernel is the CPU's, not that of {job.device}")
    if job.dtype not in NUMBERS:
        reasons.append(f"it computes in float32 and float64; torch's call multiplies {_name(job.dtype)} as it is")
    if job.one:
        reasons.append("a single query fills no unit")
    if "lse" in job.wants:
        reasons.append("sdpa shows a log-sum-exp as well, also of queries that read nothing")
    return reasons or job.early(LEAST, "torch's own call takes less time")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def spent(job: Job, work: Work) -> int:
    """The products that whole units of queries form, each with the keys of its last."""
    ahead = work.keys - work.queries if job.spec.pattern == Causal() and job.spec.source is None else None
    size = Size(work.batch, work.queries, len(job.core.keys), work.keys, _kept(job))
    return job.core.flops(pairs(size, None, ahead)) // len(job.core.keys)


def _kept(job: Job) -> int:
    """The key heads that the kernel sees: where groups are not equal, one for each that reads."""
    return len(job.core.keys) // (job.groups or 1)


def attend(job: Job, sight: Sight, inputs: Inputs, bound: Bound, probe: Probe | None) -> Tensor:
    """Per-head outputs o_BTHV."""
    q, k, v = inputs.q, inputs.k, inputs.v
    coarse = q.dtype not in NUMBERS or torch.is_autocast_enabled(q.device.type)
    if coarse or not q.numel() or not k.numel() or transformed():
        return sdpa.attend(job, sight, inputs, bound, probe)
    known, ends, ahead = _read(sight, q)
    if not known:
        return sdpa.attend(job, sight, inputs, bound, probe)
    if not job.groups:
        k, v = (spread_heads(x, by).transpose(1, 2) for x, by in ((k, job.core.keys), (v, job.core.values)))
    return read_every(q, k, v, ends, ahead, inputs.asked.scale)


def _read(sight: Sight, q: Tensor) -> tuple[bool, Tensor | None, int | None]:
    """Whether every token reads neighbouring keys, and which: as ends, or how many stand before the first token."""
    if sight.shape in ("full", "triangle"):
        return True, None, None if sight.shape == "full" else 0
    with torch.no_grad():
        reading = Reading(sight, q.dtype)
        if reading.causal:
            return True, None, reading.ahead
        ends = None if torch.compiler.is_compiling() else reading.ends(q.shape[1])  # a graph cannot ask the data
        return ends is not None, ends, None
