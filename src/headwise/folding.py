"""Biases that do nothing, or the same for every query, need not be there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from .registry import defaults
from .seams import Merge, Modifier, Phase, Turn
from .spec import AttentionSpec


class Folded(NamedTuple):
    """A spec and weights without the biases that could go, and why each of the others stayed."""

    spec: AttentionSpec
    weights: dict[str, Tensor]
    stayed: dict[str, str]


def fold_bias(spec: AttentionSpec, weights: Mapping[str, Tensor]) -> Folded:
    """The same function with fewer biases: b_K is dropped, b_V W_O goes into b_O.

    A bias of all keys adds one number to every score of a row, which a softmax forgets; weights that sum to one
    hand a bias of all values on unchanged. Where that does not hold the bias stays, with the reason. The one
    difference: a query with nothing to read now gets b_V W_O, where it got nothing.

    >>> import headwise as hw
    >>> spec = hw.design(model=8, heads=2, bias="qkv", modifiers=(hw.Rotary(),))
    >>> folded = fold_bias(spec, hw.Attention(spec).state_dict())
    >>> folded.spec.project.bias, folded.spec.merge.bias, list(folded.stayed)
    ('qk', 'o', ['k'])
    """
    shifts = spec.project.shifts(spec, weights)
    stayed = {side: reason for side in shifts if (reason := "; ".join(_reasons(spec, side)))}
    gone = [side for side in shifts if side not in stayed]
    if not gone:
        return Folded(spec, dict(weights), stayed)
    left = {name: tensor for name, tensor in weights.items() if name not in {f"project.{side}_bias" for side in gone}}
    smaller = replace(spec, project=spec.project.without(frozenset(gone)))
    if "v" in gone:
        merge, bias = _merged(spec, left, shifts["v"])
        smaller = replace(smaller, merge=merge)
        left["output.o_bias"] = bias
    return Folded(smaller, left, stayed)


def _reasons(spec: AttentionSpec, side: str) -> Iterator[str]:
    """Why a bias of keys or values does something that nobody else can do for it."""
    for name, turn in spec.steps(Turn):
        if side in turn.reaches(spec):
            yield f"{name} turns {side} after its bias"
    if side == "k":
        if not spec.similarity.linear:
            yield f"{type(spec.similarity).__name__} does not add it up"
        yield from spec.sees_shifts()
        return
    if not spec.normaliser.whole:
        yield f"the weights of {type(spec.normaliser).__name__} need not sum to one"
    if "bias" not in defaults(type(spec.merge)):
        yield f"{type(spec.merge).__name__} has no bias to take it"
    for name, modifier in spec.steps(Modifier):
        if modifier.phase in (Phase.WEIGHTS, Phase.OUTPUTS, Phase.GATES):
            yield f"{name} acts on what was read"


def _merged(spec: AttentionSpec, weights: Mapping[str, Tensor], shift_OV: Tensor) -> tuple[Merge, Tensor]:
    """The merge with a bias, and the bias: what the merge makes of the shift, and what it added before."""
    biased = replace(spec.merge, bias="o")
    held = {key.removeprefix("output."): tensor for key, tensor in weights.items() if key.startswith("output.")}
    held.setdefault("o_bias", held["o"].new_zeros(spec.model))
    with torch.no_grad():
        return biased, biased.merge(shift_OV[None, None], held)[0, 0]  # pyright: ignore[reportArgumentType] - by name alone
