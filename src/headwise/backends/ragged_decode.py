"""One query per row on the CPU: a kernel reads the keys that each row holds, where they lie, and no others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from ..interfaces import ScoreStep
from ..interfaces.core_types import CallSize
from ..interfaces.probe import Probe
from ..kernels import PagedDecodeOptions, attend_paged
from ..masking.sequence_info import AttentionMask
from ..parts.linear_projection import Direct
from ..parts.sink_softmax import SinkSoftmax
from ..parts.softcap import Softcap
from ..spec.attention_spec import AttentionSpec
from . import dense, grouped_decode, sdpa
from .core_interface import CallSignature, CoreInputs, CoreSteps

RAGGED_DTYPES = (torch.float32, torch.bfloat16, torch.float64)
HAS_NUMBA = find_spec("numba") is not None
# Bytes of keys and values from which on the kernel is faster than torch's own call, which is slow in bfloat16.
MIN_BYTES_BY_DTYPE = {torch.bfloat16: 2**21, torch.float32: 2**23, torch.float64: 2**23}


def unsupported_reasons(job: CallSignature) -> list[str]:
    """Why this job cannot run here."""
    cap = leading_softcap(job.spec)
    core = sdpa.fused_call_conflicts(replace(job, probed_tensors=job.probed_tensors - {"lse"}))
    reasons = list(core)
    if cap is not None:  # it is the first to act; another behind it is none of the kernel's
        reasons.remove(f"{type(cap).__name__} is not additive")
    if not job.single_query:
        reasons.append("there is more than one query per row")
    if not job.group_size:
        reasons.append("no equal groups of heads share a key head")
    if job.device != "cpu":
        reasons.append(f"its kernel is for the CPU, not {job.device}")
    if job.dtype not in RAGGED_DTYPES:
        reasons.append(f"its kernel does not know {job.dtype}")
    if not HAS_NUMBA:
        reasons.append("Numba, which compiles its kernel, is not installed")
    return reasons


def leading_softcap(spec: AttentionSpec) -> Softcap | None:
    """The ceiling that scores have before anything is added to them, where there is one."""
    return _leading_softcap_of([step for _, step in spec.parts_of(ScoreStep)])


def _leading_softcap_of(steps: Sequence[ScoreStep]) -> Softcap | None:
    return steps[0] if steps and isinstance(steps[0], Softcap) else None


def executed_flops(job: CallSignature, work: CallSize) -> int:
    """The products with every slot there is, read or not."""
    if is_small_call(job, work.batch, work.keys) and _small_call_backend(job, leading_softcap(job.spec)) is sdpa:
        return sdpa.executed_flops(job, work)
    return job.core.flops(work.batch * work.queries * work.keys)


def reads_quantized_cache(job: CallSignature) -> bool:
    """Whether it reads keys and values in 8 bits: where a project hands on what it remembered, and nobody looks."""
    seen = job.probed_tensors & {"k", "v"}
    return (
        job.cache_format == "int8" and isinstance(job.spec.project, Direct) and job.dtype != torch.float64 and not seen
    )


def is_small_call(job: CallSignature, batch: int, keys: int) -> bool:
    """Whether there is so little to read that torch's own call is done before."""
    if reads_quantized_cache(job) or "lse" in job.probed_tensors:
        return False
    numbers = batch * keys * (job.core.dim + job.core.vdim) * (max(job.core.key_head_of_query) + 1)
    return numbers * job.dtype.itemsize < MIN_BYTES_BY_DTYPE[job.dtype]


def _small_call_backend(job: CallSignature, cap: Softcap | None) -> ModuleType:
    """Who reads what is small."""
    if job.group_size == 1 and cap is None:
        return sdpa
    return dense if cap or isinstance(job.spec.normaliser, SinkSoftmax) else grouped_decode


def attend(
    job: CallSignature, sight: AttentionMask, inputs: CoreInputs, bound: CoreSteps, probe: Probe | None
) -> Tensor:
    """Per-head outputs o_B1HV."""
    if is_small_call(job, len(inputs.q), sight.keys.count):
        cap = _leading_softcap_of([step for step, _ in bound.elementwise])
        return _small_call_backend(job, cap).attend(job, sight, inputs, bound, probe)
    return attend_spans(job, sight, inputs, bound, probe, key_spans(sight, len(inputs.q)))


def attend_spans(
    job: CallSignature,
    sight: AttentionMask,
    inputs: CoreInputs,
    bound: CoreSteps,
    probe: Probe | None,
    span_args: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    """The same of keys in pages, told by their spans, [B, N, 3], if not all, and which of their columns are hidden."""
    cap, (spans_BN3, hidden) = leading_softcap(job.spec), span_args
    if cap is not None:
        bound = replace(bound, scores=bound.scores[1:])
    exact = torch.promote_types(inputs.q.dtype, torch.float32)
    bias = bound.additive_bias(sight, inputs._replace(q=inputs.q.to(exact)))[:, :, 0] if bound.scores else None
    if hidden is not None:
        zero = inputs.q.new_zeros(()) if bias is None else bias
        bias = torch.where(hidden, -torch.inf, zero)
    sink = (
        bound.normaliser_p.broadcast_over_scores()["sink"].flatten()
        if isinstance(bound.normaliser, SinkSoftmax)
        else None
    )
    scales = (
        [inputs.kv_entry[f"{side}.scale"].transpose(1, 2) for side in "kv"]
        if reads_quantized_cache(job)
        else [None, None]
    )
    beside = PagedDecodeOptions(bias, sink, *scales, softcap=0.0 if cap is None else cap.limit)
    k, v = inputs.k.transpose(1, 2), inputs.v.transpose(1, 2)
    o_BHV, lse_BH = attend_paged(inputs.q[:, 0], k, v, spans_BN3, scale=inputs.query_context.scale, options=beside)
    if probe is not None and "lse" in probe.points:
        probe("lse", lse_BH[..., None])
    return o_BHV[:, None]


def key_spans(sight: AttentionMask, batch: int) -> tuple[Tensor | None, Tensor | None]:
    """Which slots each row reads, [B, 1, 3], if not all; and which of these are hidden, [B or 1, 1, S], if some are."""
    keys, device = sight.keys, sight.keys.position.device
    if sight.shape == "full":
        return None, None
    row, hidden = torch.arange(batch, device=device), None
    begin = torch.zeros_like(row)
    if keys.visible_per_row is not None:
        end = keys.visible_per_row
    elif keys.num_visible is not None:
        end = torch.full_like(row, keys.num_visible)
    else:
        allowed = sight.allowed[:, 0, 0].expand(batch, -1)
        slot = torch.arange(keys.count, device=device)
        end = torch.where(allowed, slot + 1, 0).amax(1) if keys.count else begin
        begin = torch.where(allowed, slot, keys.count).amin(1) if keys.count else begin
        if torch.compiler.is_compiling() or bool((allowed.sum(1) < end - begin).any()):
            hidden = ~allowed[:, None]
    return torch.stack([row, begin, end], -1)[:, None], hidden
