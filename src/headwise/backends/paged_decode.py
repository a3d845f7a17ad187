"""One query per row reads keys and values where they lie, and pages that rows share once: nothing is gathered."""

from __future__ import annotations

import torch
from torch import Tensor

from ..interfaces.core_types import CallSize
from ..interfaces.probe import Probe
from ..masking.sequence_info import AttentionMask, SequenceInfo
from ..parts.sink_softmax import SinkSoftmax
from . import ragged_decode
from .core_interface import CallSignature, CoreInputs, CoreSteps


def unsupported_reasons(job: CallSignature) -> list[str]:
    """Why this job cannot run here."""
    reasons = [] if job.has_paged_cache else ["keys do not lie in pages"]
    reasons += ragged_decode.unsupported_reasons(job)
    if not job.spec.project.caches_keys_and_values:
        reasons.append(f"{type(job.spec.project).__name__} makes keys and values of what is remembered")
    if job.needs_grad:
        reasons.append("pages keep no gradients")
    if unseen := sorted(job.probed_tensors & {"k", "v"}):
        reasons.append(f"it never has the {', '.join(unseen)} of each row side by side")
    if "lse" in job.probed_tensors and isinstance(job.spec.normaliser, SinkSoftmax):
        reasons.append("its lse is of scores and sinks together")
    return reasons


def executed_flops(job: CallSignature, work: CallSize) -> int:
    """The products of every key in reach, allowed or not."""
    return job.core.flops(work.batch * work.queries * work.keys)


def attend(
    job: CallSignature, sight: AttentionMask, inputs: CoreInputs, bound: CoreSteps, probe: Probe | None
) -> Tensor:
    """Per-head outputs o_B1HV."""
    spans = sight.keys.block_table
    assert spans is not None, "keys were gathered; let the cache place them"
    hidden = None if spans.all_visible else ~sight.allowed[:, :, 0]
    return ragged_decode.attend_spans(job, sight, inputs, bound, probe, (spans.table, hidden))


def gather_pages(sight: AttentionMask, inputs: CoreInputs) -> tuple[AttentionMask, CoreInputs]:
    """The same call with the keys of each row side by side and in numbers, for whoever looks at them."""
    if inputs.k.dtype == torch.int8:
        told = ((held, inputs.kv_entry[f"{side}.scale"]) for side, held in (("k", inputs.k), ("v", inputs.v)))
        k, v = ((held * scale[..., None]).to(inputs.q.dtype) for held, scale in told)
        inputs = inputs._replace(k=k, v=v)
    keys = sight.keys
    if keys.block_table is None:
        return sight, inputs
    pages = keys.block_table.table[..., 0]
    k, v = (held[pages].flatten(1, 2).masked_fill(~keys.is_real[..., None, None], 0) for held in (inputs.k, inputs.v))
    told = SequenceInfo(keys.position, keys.segment, checked=True)
    return AttentionMask(sight.queries, told, sight.pattern, sight.mask), inputs._replace(k=k, v=v)
