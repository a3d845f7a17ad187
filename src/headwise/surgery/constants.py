"""What heads that go leave behind: the vector that they said on average, or nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import SpecError, nearest
from ..folding import fold_bias
from ..heads.scene import Scene
from ..hub.means import head_means
from ..models import Transformer
from .plans import Head, Plan
from .rebuilding import attention_of, weights_of
from .removing import at_rest

FOLDS = ("none", "mean", "bias")


class Folded(NamedTuple):
    """What each head that goes is taken to say before it is merged, and what that makes its site say, [model]."""

    said: Mapping[Head, Tensor]
    constants: Mapping[str, Tensor]


def folded(net: Transformer, plan: Plan, scenes: Sequence[Scene], fold: str) -> Folded:
    """What takes the place of the heads that go.

    "mean" is what they said on average over the tokens of these texts, so that to cut them is to patch them with their
    means; "bias" is b_V alone, which heads say of any text when their weights sum to one.
    """
    if fold not in FOLDS:
        raise SpecError(f"fold={fold!r} is unknown; {nearest(fold, FOLDS)}")
    if fold == "none":
        return Folded({}, {})
    if fold == "mean" and not scenes:
        raise SpecError("fold='mean' asks for texts to take the mean over; give some, or fold='none'")
    said = _means(net, plan, scenes) if fold == "mean" else _biases(net, plan)
    return Folded(said, {site: _added(net, site, said) for site in plan.changes})


def _means(net: Transformer, plan: Plan, scenes: Sequence[Scene]) -> dict[Head, Tensor]:
    means = head_means(net, [scene.given for scene in scenes], plan.gone)
    return {(site, head): means[site, head] for site, head in plan.gone}


def _biases(net: Transformer, plan: Plan) -> dict[Head, Tensor]:
    """The bias of values, wherever the bias of the merge could say it; heads without one say nothing."""
    said = dict[Head, Tensor]()
    for site, kept in plan.changes.items():
        spec, weights = attention_of(net, site).spec, weights_of(net, site)
        shift_OV = spec.project.shifts(spec, weights).get("v")
        if shift_OV is None:
            continue
        if why := fold_bias(spec, weights).stayed.get("v"):
            raise SpecError(f"the bias of values of {site} cannot be folded: {why}; use fold='mean'")
        said |= {(site, head): shift_OV[head].double() for head in range(len(spec.speaks)) if head not in kept}
    if not said:
        raise SpecError(f"no values of {net.described.name} have a bias that heads leave behind; use fold='mean'")
    return said


def _added(net: Transformer, site: str, said: Mapping[Head, Tensor]) -> Tensor:
    """What heads add to the output of a site when they say this, [model]."""
    spec, weights, like = attention_of(net, site).spec, weights_of(net, site), next(net.parameters())
    said_BTOV = torch.zeros(1, 1, len(spec.speaks), spec.heads.vdim, dtype=torch.float64, device=like.device)
    for (where, head), vector in said.items():
        if where == site:
            said_BTOV[0, 0, head] = vector
    own = {name.removeprefix("output."): t.double() for name, t in weights.items() if name.startswith("output.")}
    with torch.no_grad():
        whole = spec.merge.merge(said_BTOV, own)[0, 0]  # pyright: ignore[reportArgumentType] - by name alone
    return (whole - at_rest(spec, weights, like).double()).to(like.dtype)
