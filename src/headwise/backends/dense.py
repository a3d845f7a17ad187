"""Every score, in plain tensor operations: takes every spec, shows every weight."""

from __future__ import annotations

import torch
from torch import Tensor

from ..interfaces.core_types import CallSize
from ..interfaces.probe import Probe
from ..kernels.autograd_guards import is_under_functorch
from ..masking.sequence_info import AttentionMask
from .core_interface import CallSignature, CoreInputs, CoreSteps, expand_kv_heads, heads_to_rows, rows_to_heads


def unsupported_reasons(job: CallSignature) -> list[str]:
    """Why this job cannot run here."""
    return ["past tokens are a state, not scores"] if job.has_recurrent_state else []


def executed_flops(job: CallSignature, work: CallSize) -> int:
    """The products of the full rectangle, allowed or not."""
    return job.core.flops(work.batch * work.queries * work.keys)


def attend(
    job: CallSignature, sight: AttentionMask, inputs: CoreInputs, bound: CoreSteps, probe: Probe | None
) -> Tensor:
    """Per-head outputs o_BTHV, one head for each row of weights that reads values."""
    s_BHTS = _scores(job, inputs, bound)
    exact = torch.promote_types(s_BHTS.dtype, torch.float32)
    s_BHTS = s_BHTS.to(exact)
    for act in bound.scores:
        s_BHTS = act(s_BHTS, sight, inputs)
    allowed = sight.allowed
    if probe is not None:
        s_BHTS = probe("scores", s_BHTS)
        if "lse" in probe.points:
            probe("lse", s_BHTS.masked_fill(~allowed, -torch.inf).logsumexp(-1))
    if (
        bound.gather_values is not None
        and bound.normaliser.prefers_gather(s_BHTS.device.type, inputs.v.dtype)
        and not is_under_functorch()
    ):
        return bound.gather_values(s_BHTS, allowed, inputs.v, job.core.value_head_of_row, bound.normaliser_p).transpose(
            1, 2
        )
    w_BHTS = bound.normalise(s_BHTS, allowed, bound.normaliser_p)
    for act in bound.weights:
        w_BHTS = act(w_BHTS, sight, inputs)
    if bound.selected_rows is not None:
        w_BHTS = w_BHTS.index_select(1, torch.tensor(bound.selected_rows, device=w_BHTS.device))
    if probe is not None:
        w_BHTS = probe("weights", w_BHTS)
    o_BHTV = _weighted_values(w_BHTS.to(inputs.v.dtype), inputs.v, job)
    for step, p in bound.values:
        o_BHTV = o_BHTV + step.weighted_values(w_BHTS, sight.i, sight.j, p).to(o_BHTV.dtype)
    return o_BHTV.transpose(1, 2)


def _scores(job: CallSignature, inputs: CoreInputs, bound: CoreSteps) -> Tensor:
    q_BHTK, k_BGSK = inputs.q.transpose(1, 2), inputs.k.transpose(1, 2)
    scale, similarity = inputs.query_context.scale, bound.similarity
    each = job.group_size
    if each <= 1 or similarity.per_head:
        k_BHSK = expand_kv_heads(inputs.k, job.core.key_head_of_query)
        return similarity.scores(q_BHTK, k_BHSK, scale, bound.similarity_p)
    return rows_to_heads(similarity.scores(heads_to_rows(q_BHTK, each), k_BGSK, scale, bound.similarity_p), each)


def _weighted_values(w_BHTS: Tensor, v_BSGV: Tensor, job: CallSignature) -> Tensor:
    every = (
        v_BSGV.shape[2] == max(job.core.value_head_of_row) + 1
    )  # behind a mixing, a cut may leave values that nobody reads
    each = job.group_size if every else 0
    if each <= 1:
        return torch.matmul(
            w_BHTS, v_BSGV.transpose(1, 2) if each else expand_kv_heads(v_BSGV, job.core.value_head_of_row)
        )
    return rows_to_heads(torch.matmul(heads_to_rows(w_BHTS, each), v_BSGV.transpose(1, 2)), each)
