"""Folding of biases and query-key transforms into neighbouring weights, without changing the
function.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..attention.interfaces import Merge, Modifier, QKTransform
from ..attention.interfaces.core_types import Phase
from ..attention.interfaces.part import field_defaults
from ..attention.spec.attention_spec import AttentionSpec
from .attention_replacement import merge_heads, weights_of_part


class FoldedWeights(NamedTuple):
    """Spec and weights after folding; `reasons_kept` gives the reason for each bias or transform
    not folded.
    """

    spec: AttentionSpec
    weights: dict[str, Tensor]
    reasons_kept: dict[str, str]


def fold_bias(spec: AttentionSpec, weights: Mapping[str, Tensor]) -> FoldedWeights:
    """Compute the same function with fewer biases: b_K is dropped and b_V W_O is added to b_O.

    A key bias adds one constant to all scores of a row, and softmax is invariant to that. A value
    bias passes unchanged through attention weights that sum to one. If either does not hold, the
    bias stays, with the reason. One difference remains: a query without any allowed key now gets
    b_V W_O, where it got zero.

    >>> import headwise as hw
    >>> spec = hw.design(model=8, heads=2, bias="qkv", modifiers=(hw.Rotary(),))
    >>> folded = fold_bias(spec, hw.Attention(spec).state_dict())
    >>> folded.spec.project.bias, folded.spec.merge.bias, list(folded.reasons_kept)
    ('qk', 'o', ['k'])
    """
    biases = spec.project.constant_biases(spec, weights)
    reasons_kept = {
        side: reason for side in biases if (reason := "; ".join(_reasons_bias_stays(spec, side)))
    }
    folded = [side for side in biases if side not in reasons_kept]
    if not folded:
        return FoldedWeights(spec, dict(weights), reasons_kept)
    remaining = {
        name: tensor
        for name, tensor in weights.items()
        if name not in {f"project.{side}_bias" for side in folded}
    }
    smaller = replace(spec, project=spec.project.without_biases(frozenset(folded)))
    if "v" in folded:
        merge, bias = _merge_with_bias(spec, remaining, biases["v"])
        smaller = replace(smaller, merge=merge)
        remaining["output.o_bias"] = bias
    return FoldedWeights(smaller, remaining, reasons_kept)


def _reasons_bias_stays(spec: AttentionSpec, side: str) -> Iterator[str]:
    """Yield the reasons why the key or value bias has an effect that no other
    weight can take over.
    """
    for name, transform in spec.parts_of(QKTransform):
        if side in transform.transformed_sides(spec):
            yield f"{name} transforms {side} after its bias"
    if side == "k":
        if not spec.similarity.linear:
            yield f"{type(spec.similarity).__name__} is not linear in the keys"
        yield from spec.shift_sensitivity()
        return
    if not spec.normaliser.always_sums_to_one():
        yield f"the weights of {type(spec.normaliser).__name__} do not always sum to one"
    elif spec.normaliser.proportional and spec.similarity.can_be_all_zero():
        yield f"all weights of {type(spec.similarity).__name__} may be zero"
    if "bias" not in field_defaults(type(spec.merge)):
        yield f"{type(spec.merge).__name__} has no bias to add it to"
    for name, modifier in spec.parts_of(Modifier):
        if modifier.phase in (Phase.WEIGHTS, Phase.OUTPUTS, Phase.GATES):
            yield f"{name} acts on the attention weights or outputs"


def _merge_with_bias(
    spec: AttentionSpec, weights: Mapping[str, Tensor], bias_OV: Tensor
) -> tuple[Merge, Tensor]:
    """Return the merge with an output bias, and the bias: the projected value bias plus the old
    output bias.
    """
    biased = replace(spec, merge=replace(spec.merge, bias="o"))
    own = {**weights, "output.o_bias": weights.get("output.o_bias", bias_OV.new_zeros(spec.model))}
    return biased.merge, merge_heads(biased, own, bias_OV[None, None])


def fold_qk_transforms(spec: AttentionSpec, weights: Mapping[str, Tensor]) -> FoldedWeights:
    """Compute the same function with fewer query-key transforms: constant matrices go into the
    projection before them.

    Each side ("q", "k", "v") of a transform is folded on its own. It stays, with the reason, if it
    is not one matrix for all tokens, or if a transform that stays comes before it. Keys of
    `reasons_kept` are "name.side", with the names of `spec`.

    >>> import headwise as hw
    >>> spec = hw.design(model=8, heads=2, modifiers=(hw.Rotary(), hw.Knocking(sides="qv")))
    >>> folded = fold_qk_transforms(spec, hw.Attention(spec).state_dict())
    >>> folded.spec.modifiers[1], folded.reasons_kept["knocking.q"]
    (Knocking(sides='q'), 'rotary transforms q before it')
    """
    folded_weights = dict(weights)
    reasons_kept = dict[str, str]()
    folded_sides = dict[str, frozenset[str]]()
    for side in "qkv":
        blocked_by = ""
        for name, transform in spec.parts_of(QKTransform):
            if side not in transform.transformed_sides(spec):
                continue
            matrix = transform.as_matrix(side, weights_of_part(folded_weights, name))
            absorbed: Mapping[str, Tensor] = {}
            if matrix is None:
                reason = "it is not one matrix for every head and token"
            elif blocked_by:
                reason = f"{blocked_by} transforms {side} before it"
            else:
                kind = type(spec.project).__name__
                reason = f"{kind} cannot absorb a matrix into its projection of {side}"
                with torch.no_grad():
                    absorbed = spec.project.absorb_matrix(spec, folded_weights, side, matrix)
            if absorbed:
                folded_weights |= absorbed
                folded_sides[name] = folded_sides.get(name, frozenset()) | {side}
            else:
                reasons_kept[f"{name}.{side}"] = reason
                blocked_by = blocked_by or name
    return FoldedWeights(*_without_transforms(spec, folded_weights, folded_sides), reasons_kept)


def _without_transforms(
    spec: AttentionSpec, weights: Mapping[str, Tensor], folded_sides: Mapping[str, frozenset[str]]
) -> tuple[AttentionSpec, dict[str, Tensor]]:
    """Return spec and weights with these sides of the transforms removed; later parts may get a
    smaller number.
    """
    slots = [name for name, part in spec.parts() if not isinstance(part, Modifier)]
    remaining = [
        (
            name,
            modifier.without_sides(folded_sides[name])
            if name in folded_sides and isinstance(modifier, QKTransform)
            else modifier,
        )
        for name, modifier in spec.parts_of(Modifier)
    ]
    smaller = replace(
        spec, modifiers=tuple(modifier for _, modifier in remaining if modifier is not None)
    )
    old_names = [*slots, *(name for name, modifier in remaining if modifier is not None)]
    return smaller, {
        f"{name}.{key}": weights[f"{old_name}.{key}"]
        for old_name, (name, part) in zip(old_names, smaller.parts(), strict=True)
        for key in part.params(smaller)
    }
