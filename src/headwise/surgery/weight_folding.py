"""What does nothing, or what its neighbour could do as well, need not be there: biases and turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..interfaces import Merge, Modifier, QKTransform
from ..interfaces.core_types import Phase
from ..interfaces.registry import field_defaults
from ..spec.attention_spec import AttentionSpec


class FoldedWeights(NamedTuple):
    """A spec and weights without what could go, and why each of the others stayed."""

    spec: AttentionSpec
    weights: dict[str, Tensor]
    reasons_kept: dict[str, str]


def fold_bias(spec: AttentionSpec, weights: Mapping[str, Tensor]) -> FoldedWeights:
    """The same function with fewer biases: b_K is dropped, b_V W_O goes into b_O.

    A bias of all keys adds one number to every score of a row, which a softmax forgets; weights that sum to one
    hand a bias of all values on unchanged. Where that does not hold the bias stays, with the reason. The one
    difference: a query with nothing to read now gets b_V W_O, where it got nothing.

    >>> import headwise as hw
    >>> spec = hw.design(model=8, heads=2, bias="qkv", modifiers=(hw.Rotary(),))
    >>> folded = fold_bias(spec, hw.Attention(spec).state_dict())
    >>> folded.spec.project.bias, folded.spec.merge.bias, list(folded.reasons_kept)
    ('qk', 'o', ['k'])
    """
    shifts = spec.project.constant_biases(spec, weights)
    stayed = {side: reason for side in shifts if (reason := "; ".join(_reasons_bias_stays(spec, side)))}
    gone = [side for side in shifts if side not in stayed]
    if not gone:
        return FoldedWeights(spec, dict(weights), stayed)
    left = {name: tensor for name, tensor in weights.items() if name not in {f"project.{side}_bias" for side in gone}}
    smaller = replace(spec, project=spec.project.without_biases(frozenset(gone)))
    if "v" in gone:
        merge, bias = _merge_with_bias(spec, left, shifts["v"])
        smaller = replace(smaller, merge=merge)
        left["output.o_bias"] = bias
    return FoldedWeights(smaller, left, stayed)


def _reasons_bias_stays(spec: AttentionSpec, side: str) -> Iterator[str]:
    """Why a bias of keys or values does something that nobody else can do for it."""
    for name, turn in spec.parts_of(QKTransform):
        if side in turn.transformed_sides(spec):
            yield f"{name} turns {side} after its bias"
    if side == "k":
        if not spec.similarity.linear:
            yield f"{type(spec.similarity).__name__} does not add it up"
        yield from spec.shift_sensitivity()
        return
    if not spec.normaliser.sums_to_one:
        yield f"the weights of {type(spec.normaliser).__name__} need not sum to one"
    elif spec.normaliser.proportional and spec.similarity.can_be_all_zero():
        yield f"all weights of {type(spec.similarity).__name__} may be zero"
    if "bias" not in field_defaults(type(spec.merge)):
        yield f"{type(spec.merge).__name__} has no bias to take it"
    for name, modifier in spec.parts_of(Modifier):
        if modifier.phase in (Phase.WEIGHTS, Phase.OUTPUTS, Phase.GATES):
            yield f"{name} acts on what was read"


def _merge_with_bias(spec: AttentionSpec, weights: Mapping[str, Tensor], shift_OV: Tensor) -> tuple[Merge, Tensor]:
    """The merge with a bias, and the bias: what the merge makes of the shift, and what it added before."""
    biased = replace(spec.merge, bias="o")
    held = _weights_of_part(weights, "output")
    held.setdefault("o_bias", shift_OV.new_zeros(spec.model))
    with torch.no_grad():
        return biased, biased.merge(shift_OV[None, None], held)[0, 0]  # pyright: ignore[reportArgumentType] - by name alone


def fold_qk_transforms(spec: AttentionSpec, weights: Mapping[str, Tensor]) -> FoldedWeights:
    """The same function with fewer turns: a matrix that meets every head goes into the projection before it.

    A turn goes side by side. It stays, with the reason, where it is more than a matrix, or where another that
    stays stands before it. `stayed` speaks of turns by their names in the spec that was given.

    >>> import headwise as hw
    >>> spec = hw.design(model=8, heads=2, modifiers=(hw.Rotary(), hw.Knocking(sides="qv")))
    >>> folded = fold_qk_transforms(spec, hw.Attention(spec).state_dict())
    >>> folded.spec.modifiers[1], folded.reasons_kept["knocking.q"]
    (Knocking(sides='q'), 'rotary turns q before it')
    """
    left, gone, stayed = dict(weights), dict[str, frozenset[str]](), dict[str, str]()
    for side in "qkv":
        before = ""
        for name, turn in [
            (name, turn) for name, turn in spec.parts_of(QKTransform) if side in turn.transformed_sides(spec)
        ]:
            matrix = turn.as_matrix(side, _weights_of_part(left, name))
            told = _absorb_transform(spec, left, side, None if before else matrix)
            if told:
                left |= told
                gone[name] = gone.get(name, frozenset()) | {side}
                continue
            stayed[f"{name}.{side}"] = _reason_transform_stays(spec, side, matrix, before)
            before = before or name
    return FoldedWeights(*_without_transforms(spec, left, gone), stayed)


def _absorb_transform(
    spec: AttentionSpec, weights: Mapping[str, Tensor], side: str, matrix: Tensor | None
) -> Mapping[str, Tensor]:
    with torch.no_grad():
        return {} if matrix is None else spec.project.absorb_matrix(spec, weights, side, matrix)


def _reason_transform_stays(spec: AttentionSpec, side: str, matrix: Tensor | None, before: str) -> str:
    """Why a turn stays on a side."""
    if matrix is None:
        return "it is no one matrix for every head and token"
    if before:
        return f"{before} turns {side} before it"
    return f"{type(spec.project).__name__} takes no matrix into its projection of {side}"


def _without_transforms(
    spec: AttentionSpec, weights: Mapping[str, Tensor], gone: Mapping[str, frozenset[str]]
) -> tuple[AttentionSpec, dict[str, Tensor]]:
    """The spec and its weights when turns have left these sides; the names of those behind them may move up."""
    slots = [name for name, part in spec.parts() if not isinstance(part, Modifier)]
    kept = [
        (name, turn.without_sides(gone[name]) if name in gone and isinstance(turn, QKTransform) else turn)
        for name, turn in spec.parts_of(Modifier)
    ]
    smaller = replace(spec, modifiers=tuple(turn for _, turn in kept if turn is not None))
    named = [*slots, *(name for name, turn in kept if turn is not None)]
    return smaller, {
        f"{name}.{key}": weights[f"{before}.{key}"]
        for before, (name, part) in zip(named, smaller.parts(), strict=True)
        for key in part.params(smaller)
    }


def _weights_of_part(weights: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The weights of one part, by the names it declared."""
    return {key.removeprefix(f"{name}."): held for key, held in weights.items() if key.startswith(f"{name}.")}
