"""Key-value heads mapped alike before they are pooled, with the function as it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import SpecError
from ..spec import AttentionSpec
from ..terms import Freedom
from .procrustes import missed, together
from .products import Products

SIDES = {"k": "keys", "v": "values"}
Groups = Sequence[Sequence[int]]


class Aligned(NamedTuple):
    """Weights of the same function whose heads are alike in groups, the sides that stayed with the reason, and errors.

    `missed` says of each side what the means of groups miss of what their heads say, as a share of its sum of squares:
    as they were, and as they are.
    """

    weights: dict[str, Tensor]
    stayed: dict[str, str]
    missed: dict[str, tuple[float, float]]


def aligned(
    spec: AttentionSpec,
    weights: Mapping[str, Tensor],
    groups: Groups,
    products: Mapping[str, Products],
    *,
    sides: str = "kv",
) -> Aligned:
    """The same function with the heads of each group mapped as near to each other as it allows (2412.20677).

    Values are mapped by any orthogonal matrix, undone in W_O; keys by those that turns of queries and keys commute
    with, such as a rotation of each rotary pair, undone in W_Q. A side whose heads cannot be mapped unseen stays, with
    the reason.

    >>> import headwise as hw
    >>> from headwise.surgery.products import features
    >>> layer = hw.Attention(hw.design(model=8, heads=4, kv=2, modifiers=(hw.Rotary(),)))
    >>> said = {side: Products.of(x) for side, x in features(layer, torch.randn(1, 9, 8)).items()}
    >>> made = aligned(layer.spec, layer.state_dict(), [(0, 1)], said)
    >>> made.stayed, made.missed["v"][1] <= made.missed["v"][0]
    ({}, True)
    """
    _check(spec, groups, products, sides)
    left, stayed, errors = dict(weights), dict[str, str](), dict[str, tuple[float, float]]()
    for side in sides:
        free, reason = freedom(spec, left, side)
        maps = maps_of(groups, products[side], free)
        errors[side] = (
            _share(groups, products[side], torch.eye(maps.shape[-1]).to(maps).expand_as(maps)),
            _share(groups, products[side], maps),
        )
        if reason:
            stayed[side] = reason
        else:
            left |= mapped(spec, left, side, maps)
    return Aligned(left, stayed, errors)


def freedom(spec: AttentionSpec, weights: Mapping[str, Tensor], side: str) -> tuple[Freedom, str]:
    """By which maps the heads of a side, "k" or "v", can be mapped unseen; and where by none, why.

    >>> import headwise as hw
    >>> spec = hw.design(model=8, heads=2, modifiers=(hw.Rotary(dims=2), hw.ShawValues(reach=3)))
    >>> [freedom(spec, hw.Attention(spec).state_dict(), side) for side in "kv"]
    [(Freedom(planes=((0, 1),), rooms=((2, 3),)), ''), (Freedom(planes=(), rooms=()), 'ShawValues sees how values lie')]
    """
    heads = spec.heads
    still = torch.eye(heads.dim if side == "k" else heads.vdim, dtype=torch.float64)
    for name, taken in _taken(spec, weights, side, still.expand(heads.kv, -1, -1)).items():
        if not taken:
            return Freedom(), f"{name} takes no matrix for each head of {SIDES[side]}"
    free, sees = Freedom.whole(len(still)), list[str]()
    for name, part in spec.parts():
        own = {key.removeprefix(f"{name}."): held for key, held in weights.items() if key.startswith(f"{name}.")}
        passes = part.freedom(spec, side, own)
        if passes != Freedom.whole(len(still)):
            sees.append(type(part).__name__)
        free &= passes
    if free != Freedom():
        return free, ""
    return free, f"{' and '.join(sees)} {'sees' if len(sees) == 1 else 'see'} how {SIDES[side]} lie"


def mapped(spec: AttentionSpec, weights: Mapping[str, Tensor], side: str, maps: Tensor) -> dict[str, Tensor]:
    """The weights that change when every head of a side is mapped by its map, [heads, width, width], unseen."""
    changed = {name: tensor for taken in _taken(spec, weights, side, maps).values() for name, tensor in taken.items()}
    return {name: tensor.to(weights[name]) for name, tensor in changed.items()}


def _taken(
    spec: AttentionSpec, weights: Mapping[str, Tensor], side: str, maps: Tensor
) -> dict[str, Mapping[str, Tensor]]:
    """What takes the maps into its weights, by name: who says what heads are, and who hears them."""
    exact, heads = {name: tensor.detach().double() for name, tensor in weights.items()}, spec.heads
    project, merge = type(spec.project).__name__, type(spec.merge).__name__
    taken = {project: spec.project.absorb(spec, exact, side, maps)}
    if side == "k":
        read = spec.project.absorb(spec, exact, "q", maps[list(heads.reads)])
        return {project: {**taken[project], **read} if taken[project] and read else {}}
    own = [heads.value_of[row] for row in spec.speaks]
    return taken | {merge: spec.merge.absorb(spec, exact, maps[own].mT)}


def maps_of(groups: Groups, products: Products, free: Freedom) -> Tensor:
    """The map of each head that brings the heads of each group together, [heads, width, width]."""
    maps = torch.empty_like(products.sums[0])
    for group in groups:
        own = list(group)
        maps[own] = together(products.sums[own][:, own], free)
    return maps


def _share(groups: Groups, products: Products, maps: Tensor) -> float:
    whole = torch.einsum("iiaa->", products.sums).item()
    lost = sum(missed(products.sums[list(group)][:, list(group)], maps[list(group)]) for group in groups)
    return lost / whole if whole else 0.0


def _check(spec: AttentionSpec, groups: Groups, products: Mapping[str, Products], sides: str) -> None:
    heads = spec.heads
    if heads.values:
        raise SpecError(f"keys and values are grouped apart here ({heads}); align them by hand")
    if not sides or set(sides) - set(SIDES) or len(set(sides)) != len(sides):
        raise SpecError(f"sides={sides!r} is no choice of sides; name each of k and v at most once")
    if sorted(head for group in groups for head in group) != list(range(heads.kv)):
        raise SpecError(f"groups {groups} must hold each of {heads.kv} key-value heads once")
    for side in sides:
        if side not in products:
            raise SpecError(
                f"nothing was gathered of {SIDES[side]}; give products of {side!r}, or leave it out of sides"
            )
        width = heads.dim if side == "k" else heads.vdim
        if products[side].sums.shape != (wanted := (heads.kv, heads.kv, width, width)):
            shape = list(products[side].sums.shape)
            raise SpecError(
                f"products of {SIDES[side]} are {shape}, not {list(wanted)}; gather those of this very layer"
            )
