"""What heads that go leave behind: the vector that they said on average, or nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import SpecError, suggest
from ..folding import fold_bias
from ..heads.scene import Example
from ..hub.means import head_means
from ..models import Transformer
from .plans import HeadId, PruningPlan
from .rebuilding import get_attention, get_attention_parameters
from .removing import output_without_heads

FOLD_MODES = ("none", "mean", "bias")


class HeadConstants(NamedTuple):
    """What each head that goes is taken to say before it is merged, and what that makes its site say, [model]."""

    head_outputs: Mapping[HeadId, Tensor]
    site_constants: Mapping[str, Tensor]


def compute_head_constants(net: Transformer, plan: PruningPlan, examples: Sequence[Example], fold: str) -> HeadConstants:
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
        said |= {(site, head): shift_OV[head].double() for head in range(len(spec.score_head_of_output)) if head not in kept}
    if not said:
        raise SpecError(f"no values of {net.described.name} have a bias that heads leave behind; use fold='mean'")
    return said


def _site_constant(net: Transformer, site: str, said: Mapping[HeadId, Tensor]) -> Tensor:
    """What heads add to the output of a site when they say this, [model]."""
    spec, weights, like = get_attention(net, site).spec, get_attention_parameters(net, site), next(net.parameters())
    said_BTOV = torch.zeros(1, 1, len(spec.score_head_of_output), spec.heads.vdim, dtype=torch.float64, device=like.device)
    for (where, head), vector in said.items():
        if where == site:
            said_BTOV[0, 0, head] = vector
    own = {name.removeprefix("output."): t.double() for name, t in weights.items() if name.startswith("output.")}
    with torch.no_grad():
        whole = spec.merge.merge(said_BTOV, own)[0, 0]  # pyright: ignore[reportArgumentType] - by name alone
    return (whole - output_without_heads(spec, weights, like).double()).to(like.dtype)
