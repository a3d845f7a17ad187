"""Fused attention in blocks of queries: keys that no query of a block may read are not touched."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.orders import is_under_functorch
from ..parts.sink_softmax import SinkSoftmax
from ..pattern import Causal, Full
from ..probe import Probe
from ..seams import ScoreStep
from ..terms import CallSize
from ..tokens import AttentionMask
from . import banding, blocks, sdpa
from .bands import block_sparse_attention
from .blocks import QUERY_BLOCK_SIZE, CallBlocks
from .bound import CoreSteps, expand_kv_heads
from .job import CoreInputs, CallSignature
from .slices import gather_slices

MIN_KEYS = 370  # keys from which on it was measured to be faster: docs/backends.md


def boundary_lengths() -> tuple[int, ...]:
    """The lengths at which a block more is begun."""
    return blocks.QUERY_BLOCK_LENGTHS


def unsupported_reasons(job: CallSignature) -> list[str]:
    """Why this job cannot run here."""
    reasons = sdpa.fused_call_conflicts(job)
    if job.single_query:
        reasons.append("a single query is one block")
    if job.spec.pattern in (Full(), Causal()):
        reasons.append(f"{job.spec.pattern.text} leaves no block of keys out that one call would not")
    if "lse" in job.probed_tensors:
        reasons.append("it has a log-sum-exp for each block only")
    return reasons or job.slower_than(MIN_KEYS, "one call with a mask takes less time")


def executed_flops(job: CallSignature, work: CallSize) -> int:
    """The products of every block with the keys that some of its queries may read, and of a sink's own column."""
    columns = sdpa.num_sink_columns(job) * work.queries if _is_single_call(job, work) or not _has_cpu_kernel(job) else 0
    return job.core.flops(work.batch * (count_formed_pairs(job, work) + columns))


def count_formed_pairs(job: CallSignature, work: CallSize) -> int:
    """The pairs of one row whose scores are formed, for queries that are the last of the keys."""
    if _is_single_call(job, work):
        return work.queries * work.keys
    if not _has_cpu_kernel(job):
        return blocks.count_block_pairs(job, work)
    return banding.count_batch_pairs(job.spec.pattern, *_position_ranges(job, work))


def attend(job: CallSignature, sight: AttentionMask, inputs: CoreInputs, bound: CoreSteps, probe: Probe | None) -> Tensor:
    """Per-head outputs o_BTHV."""
    if not _has_cpu_kernel(job) or is_under_functorch():
        return _attend_per_block(job, sight, inputs, bound)
    asks, told = sight.queries, sight.keys
    if _is_single_block(asks.count, told.count) or sight.shape != "any":
        return sdpa.attend(job, sight, inputs, bound, None)
    k, v = inputs.k, inputs.v
    if not job.group_size:
        k, v = (expand_kv_heads(x, by).transpose(1, 2) for x, by in ((k, job.core.keys), (v, job.core.value_head_of_row)))
    known = asks.start is not None and told.start is not None
    tokens = [] if known else [asks.position, asks.segment, told.position, told.segment]
    sinks = bound.normaliser_p.broadcast_over_scores()["sink"].flatten() if isinstance(bound.normaliser, SinkSoftmax) else None
    starts = [asks.start, told.start] if known else []
    return block_sparse_attention(inputs.q, k, v, sinks, tokens, starts, bound.pattern_text, inputs.query_context.scale)[0]


def _is_single_block(queries: int, keys: int) -> bool:
    """Whether there is not enough to cut."""
    return queries <= QUERY_BLOCK_SIZE and keys <= 2 * QUERY_BLOCK_SIZE


def _has_cpu_kernel(job: CallSignature) -> bool:
    """Whether the kernel of the CPU can run it, forward and backward."""
    steps = any(isinstance(part, ScoreStep) for _, part in job.spec.parts())
    return job.device == "cpu" and job.core.dim == job.core.vdim and not steps


def _is_single_call(job: CallSignature, work: CallSize) -> bool:
    """Whether one call does it all."""
    if not _has_cpu_kernel(job):
        return work.queries <= QUERY_BLOCK_SIZE
    if _is_single_block(work.queries, work.keys):
        return True
    queries, keys = _position_ranges(job, work)
    pairs = job.spec.pattern.pairs(queries, keys)
    square = queries == keys and job.spec.pattern.tokens_before_decode == 0 and pairs == Causal().pairs(queries, keys)
    return square or pairs == work.queries * work.keys


def _position_ranges(job: CallSignature, work: CallSize) -> tuple[range, range]:
    # Tokens of a source are counted from 0 like those that ask.
    first = work.keys - work.queries if job.spec.source is None else 0
    return range(first, first + work.queries), range(work.keys)


def _attend_per_block(job: CallSignature, sight: AttentionMask, inputs: CoreInputs, bound: CoreSteps) -> Tensor:
    cut = CallBlocks(sight, inputs)
    if len(cut.all) == 1:
        return sdpa.attend(job, sight, inputs, bound, None)
    read, asking = [block.keys for block in cut.all], [(block.queries,) for block in cut.all]
    queries, keys, values = (gather_slices(x, some) for x, some in ((inputs.q, asking), (inputs.k, read), (inputs.v, read)))
    asked = (gather_slices(x, asking) for x in (inputs.query_context.x_BTD, inputs.query_context.q_BTHK))
    parts = [
        sdpa.attend(job, cut.mask_of(block), _block_inputs(cut.inputs_of(block), *given), bound, None)
        for block, *given in zip(cut.all, queries, keys, values, *asked, strict=True)
    ]
    return torch.cat(parts, 1)


def _block_inputs(inputs: CoreInputs, q: Tensor, k: Tensor, v: Tensor, x_BTD: Tensor, q_BTHK: Tensor) -> CoreInputs:
    """The tensors of a block, those that learn in the slices made for all blocks."""
    return inputs._replace(q=q, k=k, v=v, query_context=inputs.query_context._replace(x_BTD=x_BTD, q_BTHK=q_BTHK))
