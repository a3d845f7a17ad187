"""Heads taken out of a model, which then says what it said with them silent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..axes import keep_heads
from ..errors import SpecError
from ..models import Transformer
from ..registry import field_defaults
from ..spec import AttentionSpec
from .plans import check_heads
from .rebuilding import AttentionChange, get_attention, replace_attentions, get_attention_parameters

NO_CONSTANTS: Mapping[str, Tensor] = {}


def remove_heads(net: Transformer, keep: Mapping[str, Sequence[int]], constants: Mapping[str, Tensor] = NO_CONSTANTS) -> Transformer:
    """A new model with only these heads at these sites; a site that keeps none says one vector from then on.

    `constants` are vectors [model] that sites add from then on, such as what the removed heads said on average.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 4, "n_layer": 2, "vocab_size": 11}), seed=0
    ... )
    >>> small, x = remove_heads(net, {"decoder.0.attention": (0, 2), "decoder.1.attention": ()}), torch.tensor([[3, 1, 4]])
    >>> with hw.ablate(net, [(0, 1), (0, 3), (1, "all")]):
    ...     torch.allclose(net(x), small(x), atol=1e-6)
    True
    """
    if wrong := [site for site in constants if site not in keep]:
        raise SpecError(f"{wrong[0]} keeps all of its heads, and no vector stands for any; say which it keeps")
    changes = {site: _shrink_attention(net, site, heads, constants.get(site)) for site, heads in keep.items()}
    if changes.keys() >= {site for site, _ in net.described.attention_specs()} and not any(keep.values()):
        raise SpecError(f"no head would be left in {net.described.name}; keep at least one")
    return replace_attentions(net, changes)


def _shrink_attention(net: Transformer, site: str, heads: Sequence[int], constant: Tensor | None) -> AttentionChange:
    spec, weights = get_attention(net, site).spec, get_attention_parameters(net, site)
    check_heads(site, heads, len(spec.score_head_of_output))
    _check_removable(net, site)
    if not heads:
        said = output_without_heads(spec, weights, next(net.parameters()))
        return AttentionChange(None, {"constant": said if constant is None else said + constant.to(said)})
    smaller, left = keep_heads(spec, weights, heads)
    return (
        AttentionChange(smaller, left)
        if constant is None
        else add_constant(smaller, left, constant.to(next(net.parameters())))
    )


def _check_removable(net: Transformer, site: str) -> None:
    stack, depth, _ = site.split(".")
    if net.stacks[stack].blocks[int(depth)].described.form == "merged":
        raise SpecError(
            f"{site} reads its source and a mean of the past through the same heads; to cut one would cut both"
        )


def output_without_heads(spec: AttentionSpec, weights: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """What a layer says when all of its heads are silent, [model]: the bias of its merge, or nothing."""
    own = {name.removeprefix("output."): tensor for name, tensor in weights.items() if name.startswith("output.")}
    silent_BTOV = like.new_zeros(1, 1, len(spec.score_head_of_output), spec.heads.vdim)
    with torch.no_grad():
        return spec.merge.merge(silent_BTOV, own)[0, 0]  # pyright: ignore[reportArgumentType] - by name alone


def add_constant(spec: AttentionSpec, weights: Mapping[str, Tensor], constant: Tensor) -> AttentionChange:
    """The same layer, which adds a vector to whatever it says: to the bias of its merge, made where there is none."""
    if "bias" not in field_defaults(type(spec.merge)):
        raise SpecError(f"{type(spec.merge).__name__} has no bias that could say it; fold nothing in")
    said = output_without_heads(spec, weights, constant)
    biased = replace(spec, merge=replace(spec.merge, bias="o"))
    return AttentionChange(biased, {**weights, "output.o_bias": said + constant})
