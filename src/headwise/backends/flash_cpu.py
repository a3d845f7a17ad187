"""Plain softmax heads on the CPU: a kernel reads for sixty-four queries at a time, and keeps no score."""

from __future__ import annotations

import torch
from torch import Tensor

from ..interfaces.core_types import CallSize
from ..interfaces.probe import Probe
from ..kernels.autograd_guards import is_under_functorch
from ..kernels.flash_attention import FlashAttentionShape, attend_key_ranges, count_executed_pairs
from ..kernels.flash_attention_kernel import QUERY_TILE_ROWS
from ..kernels.jit import COMPUTE_DTYPES
from ..masking.patterns import Causal
from ..masking.sequence_info import AttentionMask
from . import sdpa
from .core_interface import CallSignature, CoreInputs, CoreSteps, expand_kv_heads
from .routed_heads import KeyVisibility

MIN_KEYS = 64  # keys from which on it was measured to be faster: docs/backends.md


def boundary_lengths() -> tuple[int, ...]:
    """The lengths at which units are full, and one at which a part of the keys ends."""
    return QUERY_TILE_ROWS - 1, QUERY_TILE_ROWS, QUERY_TILE_ROWS + 1, 259


def unsupported_reasons(job: CallSignature) -> list[str]:
    """Why this job cannot run here."""
    reasons = sdpa.plain_softmax_conflicts(job)
    if job.device != "cpu":
        reasons.append(f"its kernel is the CPU's, not that of {job.device}")
    if job.dtype not in COMPUTE_DTYPES:
        reasons.append(f"it computes in float32 and float64; torch's call multiplies {_dtype_name(job.dtype)} as it is")
    if job.single_query:
        reasons.append("a single query fills no unit")
    if "lse" in job.probed_tensors:
        reasons.append("sdpa shows a log-sum-exp as well, also of queries that read nothing")
    return reasons or job.slower_than(MIN_KEYS, "torch's own call takes less time")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def executed_flops(job: CallSignature, work: CallSize) -> int:
    """The products that whole units of queries form, each with the keys of its last."""
    ahead = work.keys - work.queries if job.spec.pattern == Causal() and job.spec.source is None else None
    size = FlashAttentionShape(
        work.batch, work.queries, len(job.core.key_head_of_query), work.keys, _num_kernel_kv_heads(job)
    )
    return job.core.flops(count_executed_pairs(size, None, ahead)) // len(job.core.key_head_of_query)


def _num_kernel_kv_heads(job: CallSignature) -> int:
    """The key heads that the kernel sees: where groups are not equal, one for each that reads."""
    return len(job.core.key_head_of_query) // (job.group_size or 1)


def attend(
    job: CallSignature, sight: AttentionMask, inputs: CoreInputs, bound: CoreSteps, probe: Probe | None
) -> Tensor:
    """Per-head outputs o_BTHV."""
    q, k, v = inputs.q, inputs.k, inputs.v
    coarse = q.dtype not in COMPUTE_DTYPES or torch.is_autocast_enabled(q.device.type)
    if coarse or not q.numel() or not k.numel() or is_under_functorch():
        return sdpa.attend(job, sight, inputs, bound, probe)
    known, ends, ahead = _key_ranges(sight, q)
    if not known:
        return sdpa.attend(job, sight, inputs, bound, probe)
    if not job.group_size:
        k, v = (
            expand_kv_heads(x, by).transpose(1, 2)
            for x, by in ((k, job.core.key_head_of_query), (v, job.core.value_head_of_row))
        )
    return attend_key_ranges(q, k, v, ends, ahead, inputs.query_context.scale)


def _key_ranges(sight: AttentionMask, q: Tensor) -> tuple[bool, Tensor | None, int | None]:
    """Whether every token reads neighbouring keys, and which: as ends, or how many stand before the first token."""
    if sight.shape in ("full", "triangle"):
        return True, None, None if sight.shape == "full" else 0
    with torch.no_grad():
        reading = KeyVisibility(sight, q.dtype)
        if reading.is_causal:
            return True, None, reading.query_offset
        ends = None if torch.compiler.is_compiling() else reading.key_ranges(q.shape[1])  # a graph cannot ask the data
        return ends is not None, ends, None
