"""What heads that go leave behind: the vector that they said on average, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import SpecError, suggest
from ..head_analysis.annotated_examples import Example
from ..inspect.dataset_means import head_means
from ..models import Transformer
from .attention_replacement import (
    get_attention,
    get_attention_parameters,
    output_without_heads,
    remove_heads,
    to_native_model,
)
from .head_selection import HeadSelection, KeepTop
from .pruning_plan import HeadId, PruningPlan
from .weight_folding import fold_bias

FOLD_MODES = ("none", "mean", "bias")


class HeadConstants(NamedTuple):
    """What each head that goes is taken to say before it is merged, and what that makes its site say, [model]."""

    head_outputs: Mapping[HeadId, Tensor]
    site_constants: Mapping[str, Tensor]


def compute_head_constants(
    net: Transformer, plan: PruningPlan, examples: Sequence[Example], fold: str
) -> HeadConstants:
    """What takes the place of the heads that go.

    "mean" is what they said on average over the tokens of these texts, so that to cut them is to patch them with their
    means; "bias" is b_V alone, which heads say of any text when their weights sum to one.
    """
    if fold not in FOLD_MODES:
        raise SpecError(f"fold={fold!r} is unknown; {suggest(fold, FOLD_MODES)}")
    if fold == "none":
        return HeadConstants({}, {})
    if fold == "mean" and not examples:
        raise SpecError("fold='mean' asks for texts to take the mean over; give some, or fold='none'")
    said = _mean_outputs(net, plan, examples) if fold == "mean" else _bias_outputs(net, plan)
    return HeadConstants(said, {site: _site_constant(net, site, said) for site in plan.changed_sites})


def _mean_outputs(net: Transformer, plan: PruningPlan, scenes: Sequence[Example]) -> dict[HeadId, Tensor]:
    means = head_means(net, [scene.model_inputs for scene in scenes], plan.removed_heads)
    return {(site, head): means[site, head] for site, head in plan.removed_heads}


def _bias_outputs(net: Transformer, plan: PruningPlan) -> dict[HeadId, Tensor]:
    """The bias of values, wherever the bias of the merge could say it; heads without one say nothing."""
    said = dict[HeadId, Tensor]()
    for site, kept in plan.changed_sites.items():
        spec, weights = get_attention(net, site).spec, get_attention_parameters(net, site)
        shift_OV = spec.project.constant_biases(spec, weights).get("v")
        if shift_OV is None:
            continue
        if why := fold_bias(spec, weights).reasons_kept.get("v"):
            raise SpecError(f"the bias of values of {site} cannot be folded: {why}; use fold='mean'")
        said |= {
            (site, head): shift_OV[head].double() for head in range(len(spec.score_head_of_output)) if head not in kept
        }
    if not said:
        raise SpecError(f"no values of {net.spec.name} have a bias that heads leave behind; use fold='mean'")
    return said


def _site_constant(net: Transformer, site: str, said: Mapping[HeadId, Tensor]) -> Tensor:
    """What heads add to the output of a site when they say this, [model]."""
    spec, weights, like = get_attention(net, site).spec, get_attention_parameters(net, site), next(net.parameters())
    said_BTOV = torch.zeros(
        1, 1, len(spec.score_head_of_output), spec.heads.vdim, dtype=torch.float64, device=like.device
    )
    for (where, head), vector in said.items():
        if where == site:
            said_BTOV[0, 0, head] = vector
    own = {name.removeprefix("output."): t.double() for name, t in weights.items() if name.startswith("output.")}
    with torch.no_grad():
        whole = spec.merge.merge(said_BTOV, own)[0, 0]  # pyright: ignore[reportArgumentType] - by name alone
    return (whole - output_without_heads(spec, weights, like).double()).to(like.dtype)


# --- Heads are chosen and cut --------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PruningResult:
    """A model before and after, what it keeps and why, and what the heads that went are taken to say from then on.

    `ready` is the model that was cut: the one before, unless choosing made it learn.
    """

    before: Transformer
    removal_source: Transformer
    after: Transformer
    plan: PruningPlan
    head_constants: Mapping[HeadId, Tensor]
    fold: str

    @property
    def data(self) -> dict[str, Any]:
        """What was done, as plain values."""
        return {"done": "prune", "fold": self.fold, **self.plan.data}


def prune(
    model: nn.Module,
    selection: HeadSelection | float,
    examples: Sequence[Example] = (),
    *,
    fold: str = "none",
    log: Callable[[str], Any] = lambda _: None,
) -> PruningResult:
    """A model without the heads that a choice gives up; a number is the share that every layer keeps.

    `scenes` are the texts by which heads are judged, as `hw.ExampleReader` reads them. fold="mean" leaves what the
    heads said
    on average over these texts, fold="bias" what their values' bias made them say. The model itself is left alone; one
    of transformers is copied as one of ours first.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read_model_spec({"model_type": "gpt2", "n_embd": 8, "n_head": 4, "n_layer": 2}), seed=0
    ... )
    >>> done = prune(net, hw.surgery.DropHeads((("decoder.0.attention", 3),)))
    >>> done.plan.summary, hw.costs.count_parameters(net.spec) - hw.costs.count_parameters(done.after.spec)
    ('7 of 8 heads stay, without those that were named', 70)
    """
    model = to_native_model(model)
    chosen = KeepTop(selection) if isinstance(selection, (int, float)) else selection
    if not isinstance(chosen, HeadSelection):
        raise SpecError(f"choice={selection!r} chooses no heads; give a share such as 0.5, or hw.surgery.Named(...)")
    ready, plan = chosen.prepare(model, examples, log)
    if not plan.removed_heads:
        raise SpecError(f"no head would go: {plan.summary}; choose fewer to keep")
    log("cutting")
    left = compute_head_constants(ready, plan, examples, fold)
    return PruningResult(
        model, ready, remove_heads(ready, plan.changed_sites, left.site_constants), plan, left.head_outputs, fold
    )
