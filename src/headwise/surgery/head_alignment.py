"""Heads mapped onto each other, by orthogonal maps that what comes after them cannot see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import SpecError, suggest
from ..interfaces.core_types import SymmetryGroup
from ..nn.attention import Attention
from ..spec.attention_spec import AttentionSpec

MAX_ROUNDS, MIN_GAIN = 100, 1e-10


def solve_procrustes(products: Tensor, symmetry: SymmetryGroup) -> Tensor:
    """The map R of this freedom with the largest trace of R P, for each P = X^T Y of [.., width, width].

    It brings X R^T nearest to Y in the sum of squares: by singular vectors in a room (Schoenemann 1966), in a plane by
    the angle whose tangent is (P_ab - P_ba) / (P_aa + P_bb). Channels in neither stay.

    >>> quarter = solve_procrustes(torch.tensor([[0.0, 1.0], [-1.0, 0.0]]), SymmetryGroup(planes=((0, 1),)))
    >>> quarter.round().tolist()  # of (1, 0) and (0, -1) it makes (0, 1) and (1, 0)
    [[-0.0, -1.0], [1.0, -0.0]]
    """
    mapped = torch.eye(products.shape[-1], dtype=products.dtype).expand(products.shape).clone()
    if symmetry.planes:
        a, b = (list(side) for side in zip(*symmetry.planes, strict=True))
        angle = torch.atan2(*_plane_sine_cosine(products, symmetry))
        mapped[..., a, a] = mapped[..., b, b] = angle.cos()
        mapped[..., b, a] = angle.sin()
        mapped[..., a, b] = -angle.sin()
    for room in symmetry.blocks:
        inside = torch.tensor(room)
        u, _, vh = torch.linalg.svd(products[..., inside[:, None], inside])
        mapped[..., inside[:, None], inside] = (u @ vh).mT
    return mapped


def max_trace(products: Tensor, symmetry: SymmetryGroup) -> Tensor:
    """The largest trace of R P of any R of this freedom, for each P of [.., width, width].

    >>> max_trace(torch.tensor([[0.0, 1.0], [-1.0, 0.0]]), SymmetryGroup.full(2)).item()
    2.0
    """
    bound = {channel for group in (*symmetry.planes, *symmetry.blocks) for channel in group}
    found = products.diagonal(dim1=-2, dim2=-1)[..., [c for c in range(products.shape[-1]) if c not in bound]].sum(-1)
    if symmetry.planes:
        found = found + torch.hypot(*_plane_sine_cosine(products, symmetry)).sum(-1)
    for room in symmetry.blocks:
        inside = torch.tensor(room)
        found = found + torch.linalg.svdvals(products[..., inside[:, None], inside]).sum(-1)
    return found


def _plane_sine_cosine(products: Tensor, symmetry: SymmetryGroup) -> tuple[Tensor, Tensor]:
    """P_ab - P_ba and P_aa + P_bb of each plane: sine and cosine of its angle, times what the rotation gains."""
    a, b = (list(side) for side in zip(*symmetry.planes, strict=True))
    return products[..., a, b] - products[..., b, a], products[..., a, a] + products[..., b, b]


def align_to_mean(products: Tensor, symmetry: SymmetryGroup) -> Tensor:
    """Maps R_i of this freedom under which heads are nearest to their mean, [heads, width, width]; the first stays.

    Generalised Procrustes analysis (Gower 1975) on P_ij = X_i^T X_j: head after head is mapped onto the sum of the
    others, from where all stand and from where each is mapped onto the one most like them; the better end is kept. No
    step loses, so that no data is pooled worse than as it was.

    >>> p = torch.eye(2, dtype=torch.float64)
    >>> maps = align_to_mean(
    ...     torch.stack([torch.stack([p, -p]), torch.stack([-p, p])]), SymmetryGroup.full(2)
    ... )  # X and -X
    >>> maps[1].tolist()
    [[-1.0, 0.0], [0.0, -1.0]]
    """
    still = torch.eye(products.shape[-1], dtype=products.dtype).expand(products.shape[1:]).clone()
    middle = int(max_trace(products, symmetry).sum(0).argmax())
    ends = [
        _iterate_maps(products, symmetry, start) for start in (still, solve_procrustes(products[:, middle], symmetry))
    ]
    maps = max(ends, key=lambda end: squared_norm_of_sum(products, end).item())
    return maps[0].mT @ maps


def _iterate_maps(products: Tensor, symmetry: SymmetryGroup, maps: Tensor) -> Tensor:
    """The maps after rounds that each map every head once, until a round gains too little to go on."""
    reached = squared_norm_of_sum(products, maps)
    for _ in range(MAX_ROUNDS):
        for head in range(len(maps)):
            met = products[head] @ maps.mT
            maps[head] = solve_procrustes(met.sum(0) - met[head], symmetry)
        before, reached = reached, squared_norm_of_sum(products, maps)
        if reached - before <= MIN_GAIN * reached.abs():
            break
    return maps


def squared_norm_of_sum(products: Tensor, maps: Tensor) -> Tensor:
    """||sum_i X_i R_i^T||^2: what of the heads is left in their sum."""
    return torch.einsum("iab,ijbc,jac->", maps, products, maps)


def pooling_error(products: Tensor, maps: Tensor) -> float:
    """What the mean of mapped heads misses of them, sum_i ||X_i R_i^T - mean||^2.

    >>> still = torch.eye(1).expand(2, 1, 1)
    >>> pooling_error(torch.tensor([[[[1.0]], [[-1.0]]], [[[-1.0]], [[1.0]]]]), still)  # of 1 and -1, the mean is 0
    2.0
    """
    whole = torch.einsum("iiaa->", products)
    return max((whole - squared_norm_of_sum(products, maps) / len(maps)).item(), 0.0)


# --- What the key and value heads of a layer say over data, as far as grouping and turning them asks ---

SIMILARITY_KINDS = ("distance", "cosine")


@dataclass(frozen=True, eq=False)
class CrossProducts:
    """sums[i, j] = X_i^T X_j over `rows` tokens, [heads, heads, width, width] in float64; `units` of X with unit rows.

    All that the least squares between mapped heads depend on, so that no token is kept; two of them add up.

    >>> x = torch.tensor([[[3.0, 4.0]], [[0.0, 0.0]]])  # two tokens of one head
    >>> both = CrossProducts.from_features(x) + CrossProducts.from_features(x)
    >>> both.num_tokens, both.sums[0, 0].tolist(), both.normalised_sums[0, 0].trace().item()
    (4, [[18.0, 24.0], [24.0, 32.0]], 2.0)
    """

    sums: Tensor
    normalised_sums: Tensor
    num_tokens: int

    @staticmethod
    def from_features(features: Tensor) -> CrossProducts:
        """Those of what heads say of some tokens, [.., heads, width]."""
        x = features.detach().double().flatten(0, -3)
        if not x.isfinite().all():
            raise ValueError("what heads say is not finite; say which tokens count, or mend the model")
        lengths = x.norm(dim=-1, keepdim=True)
        return CrossProducts(
            _pairwise_products(x), _pairwise_products(x / torch.where(lengths > 0, lengths, 1.0)), len(x)
        )

    def __add__(self, other: CrossProducts) -> CrossProducts:
        return CrossProducts(
            self.sums + other.sums, self.normalised_sums + other.normalised_sums, self.num_tokens + other.num_tokens
        )


def _pairwise_products(x: Tensor) -> Tensor:
    flat = x.flatten(1)
    return (flat.T @ flat).unflatten(1, x.shape[1:]).unflatten(0, x.shape[1:]).transpose(1, 2)


def compute_kv_features(attention: Attention, z: Tensor) -> dict[str, Tensor]:
    """What key ("k") and value ("v") heads make of a layer's input, before any turn: [batch, tokens, heads, width].

    >>> import headwise as hw
    >>> layer = hw.Attention(hw.design(model=8, heads=4, kv=2, modifiers=(hw.Rotary(),)))
    >>> z = torch.randn(1, 3, 8)
    >>> torch.equal(compute_kv_features(layer, z)["k"].flatten(2), z @ layer.state_dict()["project.k"].T)
    True
    """
    project, p = attention.spec.project, attention.weights["project"]
    with torch.no_grad():
        k_BSGK, v_BSGV = project.expand_kv(project.project_kv(z, _before_qk_transform, p), _before_qk_transform, p)
    return {"k": k_BSGK, "v": v_BSGV}


def _before_qk_transform(x_BTHK: Tensor, side: str) -> Tensor:
    return x_BTHK


def compute_similarity(
    products: CrossProducts, symmetry: SymmetryGroup | None = None, *, kind: str = "distance"
) -> Tensor:
    """How alike two heads are when one is mapped onto the other as far as it is free: [heads, heads] (2412.20677).

    "distance" is minus their mean squared distance, "cosine" the mean cosine of their rows; without a freedom nothing
    is mapped. The best map is that of the same rows, of unit length for cosines.

    >>> x = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])  # one token, two heads at a right angle
    >>> [
    ...     compute_similarity(CrossProducts.from_features(x), free)[0, 1].item()
    ...     for free in (None, SymmetryGroup.full(2))
    ... ]
    [-2.0, 0.0]
    """
    if kind not in SIMILARITY_KINDS:
        raise ValueError(f"kind={kind!r} is no likeness of heads; {suggest(kind, SIMILARITY_KINDS)}")
    if not products.num_tokens:
        raise ValueError("no token was gathered; give data")
    own = symmetry or SymmetryGroup()
    if kind == "cosine":
        return max_trace(products.normalised_sums, own) / products.num_tokens
    size = products.sums.diagonal(dim1=0, dim2=1).diagonal(dim1=0, dim2=1).sum(-1)
    return (2 * max_trace(products.sums, own) - size[:, None] - size) / products.num_tokens


# --- Key-value heads mapped alike before they are pooled, with the function as it was ------------------

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
    >>> from headwise.surgery.head_alignment import compute_kv_features
    >>> layer = hw.Attention(hw.design(model=8, heads=4, kv=2, modifiers=(hw.Rotary(),)))
    >>> said = {
    ...     side: CrossProducts.from_features(x) for side, x in compute_kv_features(layer, torch.randn(1, 9, 8)).items()
    ... }
    >>> made = align_heads(layer.spec, layer.state_dict(), [(0, 1)], said)
    >>> made.skip_reasons, made.pooling_errors["v"][1] <= made.pooling_errors["v"][0]
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
    [(SymmetryGroup(planes=((0, 1),), blocks=((2, 3),)), ''), (SymmetryGroup(planes=(), blocks=()), 'ShawValues sees
    how values lie')]
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
    changed = {
        name: tensor for taken in _absorb_maps(spec, weights, side, maps).values() for name, tensor in taken.items()
    }
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
    whole = torch.einsum("iiaa->", products.sums).item()
    lost = sum(pooling_error(products.sums[list(group)][:, list(group)], maps[list(group)]) for group in groups)
    return lost / whole if whole else 0.0


def _check_alignment(
    spec: AttentionSpec, groups: GroupSequence, products: Mapping[str, CrossProducts], sides: str
) -> None:
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
