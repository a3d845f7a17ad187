"""Key-value heads mapped alike before they are pooled, with the function as it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import SpecError
from ..spec import AttentionSpec
from ..terms import SymmetryGroup
from .procrustes import pooling_error, align_to_mean
from .products import CrossProducts

SIDE_NAMES = {"k": "keys", "v": "values"}
GroupSequence = Sequence[Sequence[int]]


class AlignmentResult(NamedTuple):
    """Weights of the same function whose heads are alike in groups, the sides that stayed with the reason, and errors.

    `missed` says of each side what the means of groups miss of what their heads say, as a share of its sum of squares:
    as they were, and as they are.
    """

    weights: dict[str, Tensor]
    skip_reasons: dict[str, str]
    pooling_errors: dict[str, tuple[float, float]]


def align_heads(
    spec: AttentionSpec,
    weights: Mapping[str, Tensor],
    groups: GroupSequence,
    products: Mapping[str, CrossProducts],
    *,
    sides: str = "kv",
) -> AlignmentResult:
    """The same function with the heads of each group mapped as near to each other as it allows (2412.20677).

    Values are mapped by any orthogonal matrix, undone in W_O; keys by those that turns of queries and keys commute
    with, such as a rotation of each rotary pair, undone in W_Q. A side whose heads cannot be mapped unseen stays, with
    the reason.

    >>> import headwise as hw
    >>> from headwise.surgery.products import features
    >>> layer = hw.Attention(hw.design(model=8, heads=4, kv=2, modifiers=(hw.Rotary(),)))
    >>> said = {side: CrossProducts.of(x) for side, x in features(layer, torch.randn(1, 9, 8)).items()}
    >>> made = align_heads(layer.spec, layer.state_dict(), [(0, 1)], said)
    >>> made.stayed, made.pooling_errors["v"][1] <= made.pooling_errors["v"][0]
    ({}, True)
    """
    _check_alignment(spec, groups, products, sides)
    left, stayed, errors = dict(weights), dict[str, str](), dict[str, tuple[float, float]]()
    for side in sides:
        free, reason = find_symmetry(spec, left, side)
        maps = compute_maps(groups, products[side], free)
        errors[side] = (
            _relative_error(groups, products[side], torch.eye(maps.shape[-1]).to(maps).expand_as(maps)),
            _relative_error(groups, products[side], maps),
        )
        if reason:
            stayed[side] = reason
        else:
            left |= map_heads(spec, left, side, maps)
    return AlignmentResult(left, stayed, errors)


def find_symmetry(spec: AttentionSpec, weights: Mapping[str, Tensor], side: str) -> tuple[SymmetryGroup, str]:
    """By which maps the heads of a side, "k" or "v", can be mapped unseen; and where by none, why.

    >>> import headwise as hw
    >>> spec = hw.design(model=8, heads=2, modifiers=(hw.Rotary(dims=2), hw.ShawValues(reach=3)))
    >>> [find_symmetry(spec, hw.Attention(spec).state_dict(), side) for side in "kv"]
    [(Freedom(planes=((0, 1),), rooms=((2, 3),)), ''), (Freedom(planes=(), rooms=()), 'ShawValues sees how values lie')]
    """
    heads = spec.heads
    still = torch.eye(heads.dim if side == "k" else heads.vdim, dtype=torch.float64)
    for name, taken in _absorb_maps(spec, weights, side, still.expand(heads.kv, -1, -1)).items():
        if not taken:
            return SymmetryGroup(), f"{name} takes no matrix for each head of {SIDE_NAMES[side]}"
    free, sees = SymmetryGroup.full(len(still)), list[str]()
    for name, part in spec.parts():
        own = {key.removeprefix(f"{name}."): held for key, held in weights.items() if key.startswith(f"{name}.")}
        passes = part.symmetry(spec, side, own)
        if passes != SymmetryGroup.full(len(still)):
            sees.append(type(part).__name__)
        free &= passes
    if free != SymmetryGroup():
        return free, ""
    return free, f"{' and '.join(sees)} {'sees' if len(sees) == 1 else 'see'} how {SIDE_NAMES[side]} lie"


def map_heads(spec: AttentionSpec, weights: Mapping[str, Tensor], side: str, maps: Tensor) -> dict[str, Tensor]:
    """The weights that change when every head of a side is mapped by its map, [heads, width, width], unseen."""
    changed = {name: tensor for taken in _absorb_maps(spec, weights, side, maps).values() for name, tensor in taken.items()}
    return {name: tensor.to(weights[name]) for name, tensor in changed.items()}


def _absorb_maps(
    spec: AttentionSpec, weights: Mapping[str, Tensor], side: str, maps: Tensor
) -> dict[str, Mapping[str, Tensor]]:
    """What takes the maps into its weights, by name: who says what heads are, and who hears them."""
    exact, heads = {name: tensor.detach().double() for name, tensor in weights.items()}, spec.heads
    project, merge = type(spec.project).__name__, type(spec.merge).__name__
    taken = {project: spec.project.absorb_matrix(spec, exact, side, maps)}
    if side == "k":
        read = spec.project.absorb_matrix(spec, exact, "q", maps[list(heads.reads)])
        return {project: {**taken[project], **read} if taken[project] and read else {}}
    own = [heads.value_head_of_row[row] for row in spec.score_head_of_output]
    return taken | {merge: spec.merge.absorb_matrix(spec, exact, maps[own].mT)}


def compute_maps(groups: GroupSequence, products: CrossProducts, symmetry: SymmetryGroup) -> Tensor:
    """The map of each head that brings the heads of each group together, [heads, width, width]."""
    maps = torch.empty_like(products.sums[0])
    for group in groups:
        own = list(group)
        maps[own] = align_to_mean(products.sums[own][:, own], symmetry)
    return maps


def _relative_error(groups: GroupSequence, products: CrossProducts, maps: Tensor) -> float:
    whole = torch.on_einsum("iiaa->", products.sums).item()
    lost = sum(pooling_error(products.sums[list(group)][:, list(group)], maps[list(group)]) for group in groups)
    return lost / whole if whole else 0.0


def _check_alignment(spec: AttentionSpec, groups: GroupSequence, products: Mapping[str, CrossProducts], sides: str) -> None:
    heads = spec.heads
    if heads.values:
        raise SpecError(f"keys and values are grouped apart here ({heads}); align them by hand")
    if not sides or set(sides) - set(SIDE_NAMES) or len(set(sides)) != len(sides):
        raise SpecError(f"sides={sides!r} is no choice of sides; name each of k and v at most once")
    if sorted(head for group in groups for head in group) != list(range(heads.kv)):
        raise SpecError(f"groups {groups} must hold each of {heads.kv} key-value heads once")
    for side in sides:
        if side not in products:
            raise SpecError(
                f"nothing was gathered of {SIDE_NAMES[side]}; give products of {side!r}, or leave it out of sides"
            )
        width = heads.dim if side == "k" else heads.vdim
        if products[side].sums.shape != (wanted := (heads.kv, heads.kv, width, width)):
            shape = list(products[side].sums.shape)
            raise SpecError(
                f"products of {SIDE_NAMES[side]} are {shape}, not {list(wanted)}; gather those of this very layer"
            )
