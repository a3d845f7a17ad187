"""One query per row on the CPU: a kernel reads the keys that each row holds, where they lie, and no others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from ..kernels import Beside, decode
from ..parts.direct import Direct
from ..parts.sink_softmax import SinkSoftmax
from ..parts.softcap import Softcap
from ..probe import Probe
from ..seams import ScoreStep
from ..spec import AttentionSpec
from ..terms import Work
from ..tokens import Sight
from . import dense, grouped, sdpa
from .bound import Bound
from .job import Inputs, Job

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
COMPILER = find_spec("numba") is not None
# Bytes of keys and values from which on the kernel is faster than torch's own call, which is slow in bfloat16.
LEAST = {torch.bfloat16: 2**21, torch.float32: 2**23, torch.float64: 2**23}


def refuses(job: Job) -> list[str]:
    """Why this job cannot run here."""
    cap = capped(job.spec)
    core = sdpa.refuses_core(replace(job, wants=job.wants - {"lse"}))
    reasons = list(core)
    if cap is not None:  # it is the first to act; another behind it is none of the kernel's
        reasons.remove(f"{type(cap).__name__} is not additive")
    if not job.one:
        reasons.append("there is more than one query per row")
    if not job.groups:
        reasons.append("no equal groups of heads share a key head")
    if job.device != "cpu":
        reasons.append(f"its kernel is for the CPU, not {job.device}")
    if job.dtype not in DTYPES:
        reasons.append(f"its kernel does not know {job.dtype}")
    if not COMPILER:
        reasons.append("Numba, which compiles its kernel, is not installed")
    return reasons


def capped(spec: AttentionSpec) -> Softcap | None:
    """The ceiling that scores have before anything is added to them, where there is one."""
    return _first([step for _, step in spec.steps(ScoreStep)])


def _first(steps: Sequence[ScoreStep]) -> Softcap | None:
    return steps[0] if steps and isinstance(steps[0], Softcap) else None


def spent(job: Job, work: Work) -> int:
    """The products with every slot there is, read or not."""
    if small(job, work.batch, work.keys) and _other(job, capped(job.spec)) is sdpa:
        return sdpa.spent(job, work)
    return job.core.flops(work.batch * work.queries * work.keys)


def reads_stored(job: Job) -> bool:
    """Whether it reads keys and values in 8 bits: where a project hands on what it remembered, and nobody looks."""
    seen = job.wants & {"k", "v"}
    return job.store == "int8" and isinstance(job.spec.project, Direct) and job.dtype != torch.float64 and not seen


def small(job: Job, batch: int, keys: int) -> bool:
    """Whether there is so little to read that torch's own call is done before."""
    if reads_stored(job) or "lse" in job.wants:
        return False
    numbers = batch * keys * (job.core.dim + job.core.vdim) * (max(job.core.keys) + 1)
    return numbers * job.dtype.itemsize < LEAST[job.dtype]


def _other(job: Job, cap: Softcap | None) -> ModuleType:
    """Who reads what is small."""
    if job.groups == 1 and cap is None:
        return sdpa
    return dense if cap or isinstance(job.spec.normaliser, SinkSoftmax) else grouped


def attend(job: Job, sight: Sight, inputs: Inputs, bound: Bound, probe: Probe | None) -> Tensor:
    """Per-head outputs o_B1HV."""
    if small(job, len(inputs.q), sight.keys.count):
        cap = _first([step for step, _ in bound.elementwise])
        return _other(job, cap).attend(job, sight, inputs, bound, probe)
    return read(job, sight, inputs, bound, probe, spans(sight, len(inputs.q)))


def read(
    job: Job, sight: Sight, inputs: Inputs, bound: Bound, probe: Probe | None, told: tuple[Tensor | None, Tensor | None]
) -> Tensor:
    """The same of keys in pages, told by their spans, [B, N, 3], if not all, and which of their columns are hidden."""
    cap, (spans_BN3, hidden) = capped(job.spec), told
    if cap is not None:
        bound = replace(bound, scores=bound.scores[1:])
    exact = torch.promote_types(inputs.q.dtype, torch.float32)
    bias = bound.bias(sight, inputs._replace(q=inputs.q.to(exact)))[:, :, 0] if bound.scores else None
    if hidden is not None:
        zero = inputs.q.new_zeros(()) if bias is None else bias
        bias = torch.where(hidden, -torch.inf, zero)
    sink = bound.normaliser_p.spread()["sink"].flatten() if isinstance(bound.normaliser, SinkSoftmax) else None
    scales = [inputs.entry[f"{side}.scale"].transpose(1, 2) for side in "kv"] if reads_stored(job) else [None, None]
    beside = Beside(bias, sink, *scales, cap=0.0 if cap is None else cap.limit)
    k, v = inputs.k.transpose(1, 2), inputs.v.transpose(1, 2)
    o_BHV, lse_BH = decode(inputs.q[:, 0], k, v, spans_BN3, scale=inputs.asked.scale, beside=beside)
    if probe is not None and "lse" in probe.wants:
        probe("lse", lse_BH[..., None])
    return o_BHV[:, None]


def spans(sight: Sight, batch: int) -> tuple[Tensor | None, Tensor | None]:
    """Which slots each row reads, [B, 1, 3], if not all; and which of these are hidden, [B or 1, 1, S], if some are."""
    keys, device = sight.keys, sight.keys.position.device
    if sight.shape == "full":
        return None, None
    row, hidden = torch.arange(batch, device=device), None
    begin = torch.zeros_like(row)
    if keys.held is not None:
        end = keys.held
    elif keys.filled is not None:
        end = torch.full_like(row, keys.filled)
    else:
        allowed = sight.allowed[:, 0, 0].expand(batch, -1)
        slot = torch.arange(keys.count, device=device)
        end = torch.where(allowed, slot + 1, 0).amax(1) if keys.count else begin
        begin = torch.where(allowed, slot, keys.count).amin(1) if keys.count else begin
        if torch.compiler.is_compiling() or bool((allowed.sum(1) < end - begin).any()):
            hidden = ~allowed[:, None]
    return torch.stack([row, begin, end], -1)[:, None], hidden
