"""What heads that go leave behind: the vector that they said on average, or nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..errors import SpecError, nearest
from ..folding import fold_bias
from ..heads.scene import Scene
from ..hub.means import head_means
from ..models import Transformer
from .plans import Plan
from .rebuilding import Changed, attention_of, rebuilt, weights_of
from .removing import at_rest

FOLDS = ("none", "mean", "bias")


def folded(net: Transformer, plan: Plan, scenes: Sequence[Scene], fold: str) -> tuple[Transformer, dict[str, Tensor]]:
    """The model to cut, and the vectors [model] that take the place of what goes.

    "mean" is what the heads that go said on average over the tokens of these texts, so that to cut them is to patch
    them with their means; "bias" is b_V W_O alone, which any text has, moved into the output bias before the cut.
    """
    if fold not in FOLDS:
        raise SpecError(f"fold={fold!r} is unknown; {nearest(fold, FOLDS)}")
    if fold == "bias":
        return _without_biases(net, plan), {}
    if fold == "none" or not plan.gone:
        return net, {}
    if not scenes:
        raise SpecError("fold='mean' asks for texts to take the mean over; give some, or fold='none'")
    means = head_means(net, [scene.inputs for scene in scenes], plan.gone)
    return net, {site: _said(net, site, means, kept) for site, kept in plan.changes.items()}


def _said(
    net: Transformer, site: str, means: Mapping[tuple[int | str, int | str], Tensor], kept: Sequence[int]
) -> Tensor:
    """What the heads that a site does not keep add to its output, when they say their means."""
    spec, weights, like = attention_of(net, site).spec, weights_of(net, site), next(net.parameters())
    said_BTOV = torch.zeros(1, 1, len(spec.speaks), spec.heads.vdim, dtype=torch.float64)
    for head in range(len(spec.speaks)):
        if head not in kept:
            said_BTOV[0, 0, head] = means[site, head]
    own = {name.removeprefix("output."): t.double() for name, t in weights.items() if name.startswith("output.")}
    with torch.no_grad():
        whole = spec.merge.merge(said_BTOV.to(like.device), own)[0, 0]  # pyright: ignore[reportArgumentType] - by name
    return (whole - at_rest(spec, weights, like).double()).to(like.dtype)


def _without_biases(net: Transformer, plan: Plan) -> Transformer:
    """The same function, with the bias of values in the bias of the merge, wherever heads go."""
    changes = dict[str, Changed]()
    for site in plan.changes:
        spec, weights = attention_of(net, site).spec, weights_of(net, site)
        done = fold_bias(spec, weights)
        if "v" in done.stayed:
            raise SpecError(f"the bias of values of {site} cannot be folded: {done.stayed['v']}; use fold='mean'")
        changes[site] = Changed(done.spec, done.weights)
    return rebuilt(net, changes)
