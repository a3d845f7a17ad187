"""Heads taken out of a model, which then says what it said with them silent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..axes import cut
from ..errors import SpecError
from ..models import Transformer
from ..registry import defaults
from ..spec import AttentionSpec
from .plans import check_heads
from .rebuilding import Changed, attention_of, rebuilt, weights_of

NONE: Mapping[str, Tensor] = {}


def removed(net: Transformer, keep: Mapping[str, Sequence[int]], constants: Mapping[str, Tensor] = NONE) -> Transformer:
    """A new model with only these heads at these sites; a site that keeps none says one vector from then on.

    `constants` are vectors [model] that sites add from then on, such as what the removed heads said on average.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 4, "n_layer": 2, "vocab_size": 11}), seed=0
    ... )
    >>> small, x = removed(net, {"decoder.0.attention": (0, 2), "decoder.1.attention": ()}), torch.tensor([[3, 1, 4]])
    >>> with hw.silence(net, [(0, 1), (0, 3), (1, "all")]):
    ...     torch.allclose(net(x), small(x), atol=1e-6)
    True
    """
    if wrong := [site for site in constants if site not in keep]:
        raise SpecError(f"{wrong[0]} keeps all of its heads, and no vector stands for any; say which it keeps")
    changes = {site: _changed(net, site, heads, constants.get(site)) for site, heads in keep.items()}
    if changes.keys() >= {site for site, _ in net.described.specs()} and not any(keep.values()):
        raise SpecError(f"no head would be left in {net.described.name}; keep at least one")
    return rebuilt(net, changes)


def _changed(net: Transformer, site: str, heads: Sequence[int], constant: Tensor | None) -> Changed:
    spec, weights = attention_of(net, site).spec, weights_of(net, site)
    check_heads(site, heads, len(spec.speaks))
    _check_form(net, site)
    if not heads:
        said = at_rest(spec, weights, next(net.parameters()))
        return Changed(None, {"constant": said if constant is None else said + constant.to(said)})
    smaller, left = cut(spec, weights, heads)
    return (
        Changed(smaller, left)
        if constant is None
        else with_constant(smaller, left, constant.to(next(net.parameters())))
    )


def _check_form(net: Transformer, site: str) -> None:
    stack, depth, _ = site.split(".")
    if net.stacks[stack].blocks[int(depth)].described.form == "merged":
        raise SpecError(
            f"{site} reads its source and a mean of the past through the same heads; to cut one would cut both"
        )


def at_rest(spec: AttentionSpec, weights: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """What a layer says when all of its heads are silent, [model]: the bias of its merge, or nothing."""
    own = {name.removeprefix("output."): tensor for name, tensor in weights.items() if name.startswith("output.")}
    silent_BTOV = like.new_zeros(1, 1, len(spec.speaks), spec.heads.vdim)
    with torch.no_grad():
        return spec.merge.merge(silent_BTOV, own)[0, 0]  # pyright: ignore[reportArgumentType] - by name alone


def with_constant(spec: AttentionSpec, weights: Mapping[str, Tensor], constant: Tensor) -> Changed:
    """The same layer, which adds a vector to whatever it says: to the bias of its merge, made where there is none."""
    if "bias" not in defaults(type(spec.merge)):
        raise SpecError(f"{type(spec.merge).__name__} has no bias that could say it; fold nothing in")
    said = at_rest(spec, weights, constant)
    biased = replace(spec, merge=replace(spec.merge, bias="o"))
    return Changed(biased, {**weights, "output.o_bias": said + constant})
