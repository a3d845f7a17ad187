"""The attention core in plain tensor operations: supports every spec, and probes can read every
score and weight.

Steps are numbered as in `attention/attention.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.operand_checks import is_under_functorch
from ..spec.attention_spec import AttentionSpec
from .core_interface import (
    CallSignature,
    CoreInputs,
    expand_kv_heads,
    flops_of_all_pairs,
    heads_to_rows,
    never_slower,
    no_mask_conflicts,
    rows_to_heads,
)


def unsupported_reasons(call: CallSignature) -> list[str]:
    """Why this call cannot run here."""
    if call.has_recurrent_state:
        return ["needs cached keys and values; this layer caches a recurrent state"]
    return []


mask_conflicts = no_mask_conflicts
slower_reasons = never_slower
executed_flops = flops_of_all_pairs


def attend_all_pairs(call: CallSignature, inputs: CoreInputs) -> Tensor:
    """Per-head outputs o_BTRV, one head for each row of weights that reads values."""
    mask = inputs.mask
    steps = inputs.steps
    probe = inputs.probe
    s_BHTS = _scores(call, inputs)  # 3 compare
    exact = torch.promote_types(s_BHTS.dtype, torch.float32)
    s_BHTS = s_BHTS.to(exact)
    for act in steps.scores:  # 4 change scores
        s_BHTS = act(s_BHTS, inputs)
    allowed = mask.allowed  # 5 mask, which the normaliser applies
    if probe is not None:
        s_BHTS = probe("scores", s_BHTS)
        if "lse" in probe.points:
            probe("lse", _log_sum_exp(s_BHTS.masked_fill(~allowed, -torch.inf), call.spec))
    if (
        steps.gather_values is not None
        and steps.normaliser.prefers_gather(s_BHTS.device.type, inputs.v.dtype)
        and not is_under_functorch()
    ):  # 6 and 8 in one function, for weights that are mostly zero
        return steps.gather_values(
            s_BHTS, allowed, inputs.v, call.core.value_head_of_row, steps.normaliser_p
        ).transpose(1, 2)
    w_BHTS = steps.normalise(s_BHTS, allowed, steps.normaliser_p)  # 6 normalise
    for act in steps.weights:  # 7 change weights
        w_BHTS = act(w_BHTS, inputs)
    if steps.selected_rows is not None:
        w_BHTS = w_BHTS.index_select(1, torch.tensor(steps.selected_rows, device=w_BHTS.device))
    if probe is not None:
        w_BHTS = probe("weights", w_BHTS)
    o_BRTV = _weighted_values(w_BHTS.to(inputs.v.dtype), inputs.v, call)  # 8 gather values
    for step, p in steps.values:
        o_BRTV = o_BRTV + step.weighted_values(w_BHTS, mask.i, mask.j, p).to(o_BRTV.dtype)
    return o_BRTV.transpose(1, 2)


# only dispatch calls `attend`; other backends call `attend_all_pairs` for their blocks
attend = attend_all_pairs


def _log_sum_exp(s_BHTS: Tensor, spec: AttentionSpec) -> Tensor:
    """Log of the sum of exponentials of the row of each head, which heads may share."""
    lse_BHT = s_BHTS.logsumexp(-1)
    rows = [spec.normaliser.heads_of_row(spec, head) for head in range(s_BHTS.shape[1])]
    return lse_BHT if len(rows[0]) == 1 else lse_BHT[:, rows].logsumexp(2)


def _scores(call: CallSignature, inputs: CoreInputs) -> Tensor:
    q_BHTK = inputs.q.transpose(1, 2)
    k_BGSK = inputs.k.transpose(1, 2)
    scale = inputs.query_context.scale
    similarity = inputs.steps.similarity
    p = inputs.steps.similarity_p
    group_size = call.group_size
    if group_size <= 1 or similarity.per_head:
        k_BHSK = expand_kv_heads(inputs.k, call.core.key_head_of_query)
        return similarity.scores(q_BHTK, k_BHSK, scale, p)
    s_BGRS = similarity.scores(heads_to_rows(q_BHTK, group_size), k_BGSK, scale, p)
    return rows_to_heads(s_BGRS, group_size)


def _weighted_values(w_BHTS: Tensor, v_BSGV: Tensor, call: CallSignature) -> Tensor:
    # After pruning behind a `Mix`, some value heads may have no reader.
    all_heads_used = v_BSGV.shape[2] == max(call.core.value_head_of_row) + 1
    group_size = call.group_size if all_heads_used else 0
    if group_size <= 1:
        return torch.matmul(
            w_BHTS,
            v_BSGV.transpose(1, 2)
            if group_size
            else expand_kv_heads(v_BSGV, call.core.value_head_of_row),
        )
    return rows_to_heads(
        torch.matmul(heads_to_rows(w_BHTS, group_size), v_BSGV.transpose(1, 2)), group_size
    )
