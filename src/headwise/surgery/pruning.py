"""Pruning of attention heads: choose, remove and optionally replace them by constant vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..kernels.devices import exact_device, to_float64
from ..models import Transformer
from ..observe.head_analysis.annotated_examples import Example
from ..observe.inspect.dataset_means import head_means
from ..util.errors import SpecError, suggest
from .attention_replacement import (
    adds_first_values,
    fold_bias,
    get_attention,
    get_attention_parameters,
    merge_heads,
    output_without_heads,
    remove_heads,
)
from .head_selection import HeadSelection, KeepTop
from .model_and_texts import NativeResult, OpenedModel
from .pruning_plan import HeadId, PruningPlan
from .verification.model_comparison import full_precision, parameter_dtype

FOLD_MODES = ("none", "mean", "bias")


def compute_head_constants(
    net: Transformer, plan: PruningPlan, examples: Sequence[Example], fold: str
) -> dict[HeadId, Tensor]:
    """Compute the constant outputs of removed heads, before the output projection, that replace
    them.

    "mean" is their average output over the tokens of `examples`, so that removing them equals mean
    ablation. "bias" is b_V alone, which a head outputs for any text if its attention weights sum to
    one. "none" replaces nothing.
    """
    if fold not in FOLD_MODES:
        raise SpecError(f"unknown fold={fold!r}; {suggest(fold, FOLD_MODES)}")
    head_outputs = dict[HeadId, Tensor]()
    if fold == "none":
        return head_outputs
    if fold == "mean":
        if not examples:
            raise SpecError(
                "fold='mean' needs examples to average over, got none; give examples or use "
                "fold='none'"
            )
        inputs = [example.model_inputs for example in examples]
        means = head_means(net, inputs, plan.removed_heads)
        return {(site, head): means[site, head] for site, head in plan.removed_heads}
    for site, head in plan.removed_heads:
        spec = get_attention(net, site).spec
        weights = get_attention_parameters(net, site)
        shift_OV = spec.project.constant_biases(spec, weights).get("v")
        if shift_OV is None:
            continue
        reason = fold_bias(spec, weights).reasons_kept.get("v")
        if adds_first_values(net.spec, site):
            reason = "values of the first layer are added to its own"
        if reason:
            raise SpecError(f"cannot fold the value bias of {site}: {reason}. Use fold='mean'")
        head_outputs[site, head] = to_float64(shift_OV[head])
    if not head_outputs:
        raise SpecError(
            f"cannot fold biases: no removed head of {net.spec.name} has a value bias. Use "
            "fold='mean'"
        )
    return head_outputs


def _site_constant(net: Transformer, site: str, head_outputs: Mapping[HeadId, Tensor]) -> Tensor:
    """Return what the given constant head outputs add to the output of a site, [model]."""
    spec = get_attention(net, site).spec
    like = next(net.parameters())
    device = exact_device(like.device)
    like = like.to(device)
    weights = {name: one.to(device) for name, one in get_attention_parameters(net, site).items()}
    shape = (1, 1, len(spec.score_head_of_output), spec.heads.vdim)
    outputs_BTOV = torch.zeros(shape, dtype=torch.float64, device=device)
    for (head_site, head), vector in head_outputs.items():
        if head_site == site:
            outputs_BTOV[0, 0, head] = vector
    output = merge_heads(spec, weights, outputs_BTOV)
    return output - to_float64(output_without_heads(spec, weights, like))


def list_text_uses(selection: HeadSelection, fold: str) -> tuple[str, ...]:
    """Return the uses of texts in a pruning, as worded in the notes of its verification report.

    >>> from headwise.surgery import DropHeads
    >>> (
    ...     list_text_uses(DropHeads((("decoder.0.attention", 1),)), "none"),
    ...     list_text_uses(DropHeads(()), "mean"),
    ... )
    ((), ('mean outputs were computed',))
    """
    return (*selection.text_uses, *(["mean outputs were computed"] if fold == "mean" else []))


def read_selection(selection: HeadSelection | float) -> HeadSelection:
    """Return a selection; a number is the fraction each layer keeps, as in `KeepTop`."""
    strategy = KeepTop(selection) if isinstance(selection, (int, float)) else selection
    if not isinstance(strategy, HeadSelection):
        raise SpecError(
            f"selection={selection!r} is no HeadSelection; give a fraction such as 0.5, or "
            "hw.surgery.DropHeads(...)"
        )
    return strategy


# --- Pruning --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class PruningResult(NativeResult):
    """Model before and after pruning, the plan, and the constants that replace removed heads.

    `removal_source` is the model before removal: `before`, unless the selection trained it
    (KeepOpenGates). `head_constants` are the outputs of removed heads before the output projection,
    empty with fold="none"; `site_constants` are the resulting site outputs after it, [model].
    """

    removal_source: Transformer
    plan: PruningPlan
    head_constants: Mapping[HeadId, Tensor]
    site_constants: Mapping[str, Tensor]
    fold: str

    @property
    def summary(self) -> str:
        return self.plan.summary

    @property
    def verification_options(self) -> dict[str, Any]:
        def remove_in_float32() -> Transformer:
            # folded constants are not rounded to 16 bits
            source = self.removal_source
            dtype = full_precision(parameter_dtype(source))
            return remove_heads(source, self.plan.changed_sites, self.site_constants, dtype)

        return {
            "keep": dict(self.plan.changed_sites),
            "replacements": dict(self.head_constants),
            "surgery_pair": (self.removal_source, self.after),
            "exact_change": remove_in_float32 if self.head_constants else None,
        }

    @property
    def data(self) -> dict[str, Any]:
        """The plan and options as JSON-serialisable values."""
        return {"operation": "prune", "fold": self.fold, **self.plan.data}

    def __str__(self) -> str:
        size = sum(parameter.numel() for parameter in self.before.parameters())
        saved = f"{self.removed_params:,} of {size:,} parameters removed"
        return "\n".join(
            [f"{self.before.spec.name}: {self.plan.summary}; {saved}", *self.plan.notes]
        )


def prune_native(
    opened: OpenedModel, selection: HeadSelection, fold: str, log: Callable[[str], Any]
) -> PruningResult:
    """Return the pruning of a model that headwise loads as its own, as by `hw.prune`."""
    original, net, examples, notes = opened
    source, plan = selection.prepare(net, examples, log)
    plan = replace(plan, notes=(*plan.notes, *notes))
    if not plan.removed_heads:
        raise SpecError(f"no head would be removed: {plan.summary}. Keep fewer heads")
    log("removing heads")
    head_constants = compute_head_constants(source, plan, examples, fold)
    sites = plan.changed_sites if head_constants else ()
    constants = {site: _site_constant(source, site, head_constants) for site in sites}
    after = remove_heads(source, plan.changed_sites, constants)
    return PruningResult(net, after, original, source, plan, head_constants, constants, fold)
