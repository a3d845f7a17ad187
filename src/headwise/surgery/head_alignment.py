"""Alignment of key-value heads by orthogonal maps that the rest of the layer can undo (Procrustes
analysis).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from ..attention.attention import Attention
from ..attention.interfaces.core_types import SymmetryGroup
from ..attention.spec.attention_spec import AttentionSpec
from ..kernels.devices import to_float64
from ..util.errors import SpecError
from .attention_replacement import weights_of_part

MAX_ROUNDS = 100
MIN_GAIN = 1e-10


def solve_procrustes(products: Tensor, symmetry: SymmetryGroup) -> Tensor:
    """Return the map R in the symmetry group with the largest trace of R P, for each P = X^T Y of
    [.., width, width].

    R minimises ||X R^T - Y||^2: from singular vectors within a block of channels (Schoenemann
    1966), and within a plane (a RoPE pair) as the rotation by the angle with tangent (P_ab - P_ba)
    / (P_aa + P_bb). Other channels stay.

    >>> quarter = solve_procrustes(
    ...     torch.tensor([[0.0, 1.0], [-1.0, 0.0]]), SymmetryGroup(planes=((0, 1),))
    ... )
    >>> quarter.round().tolist()  # maps (1, 0) to (0, 1) and (0, -1) to (1, 0)
    [[-0.0, -1.0], [1.0, -0.0]]
    """
    maps = torch.eye(products.shape[-1], dtype=products.dtype).expand(products.shape).clone()
    if symmetry.planes:
        a, b = (list(side) for side in zip(*symmetry.planes, strict=True))
        angle = torch.atan2(*_plane_sine_cosine(products, symmetry))
        maps[..., a, a] = maps[..., b, b] = angle.cos()
        maps[..., b, a] = angle.sin()
        maps[..., a, b] = -angle.sin()
    for block in symmetry.blocks:
        channels = torch.tensor(block)
        u, _, vh = torch.linalg.svd(products[..., channels[:, None], channels])
        maps[..., channels[:, None], channels] = (u @ vh).mT
    return maps


def max_trace(products: Tensor, symmetry: SymmetryGroup) -> Tensor:
    """Return the largest trace of R P over all R in the symmetry group, for each P of [.., width,
    width].

    >>> max_trace(torch.tensor([[0.0, 1.0], [-1.0, 0.0]]), SymmetryGroup.full(2)).item()
    2.0
    """
    bound = set(chain(*symmetry.planes, *symmetry.blocks))
    trace = products.diagonal(dim1=-2, dim2=-1)[
        ..., [c for c in range(products.shape[-1]) if c not in bound]
    ].sum(-1)
    if symmetry.planes:
        trace = trace + torch.hypot(*_plane_sine_cosine(products, symmetry)).sum(-1)
    for block in symmetry.blocks:
        channels = torch.tensor(block)
        trace = trace + torch.linalg.svdvals(products[..., channels[:, None], channels]).sum(-1)
    return trace


def _plane_sine_cosine(products: Tensor, symmetry: SymmetryGroup) -> tuple[Tensor, Tensor]:
    """Return P_ab - P_ba and P_aa + P_bb of each plane: sine and cosine of its best angle, times
    their common norm.
    """
    a, b = (list(side) for side in zip(*symmetry.planes, strict=True))
    return products[..., a, b] - products[..., b, a], products[..., a, a] + products[..., b, b]


def align_to_mean(products: Tensor, symmetry: SymmetryGroup) -> Tensor:
    """Return maps R_i in the symmetry group that bring heads closest to their mean, [heads, width,
    width]; R_0 is I.

    Generalised Procrustes analysis (Gower 1975) on P_ij = X_i^T X_j: each head in turn is mapped
    onto the sum of the others. It starts once from the heads as they are and once from all mapped
    onto the most central head, and the better result is returned. No step increases the error, so
    aligned heads never pool worse than unaligned ones.

    >>> p = torch.eye(2, dtype=torch.float64)
    >>> maps = align_to_mean(
    ...     torch.stack([torch.stack([p, -p]), torch.stack([-p, p])]), SymmetryGroup.full(2)
    ... )  # X and -X
    >>> maps[1].tolist()
    [[-1.0, 0.0], [0.0, -1.0]]
    """
    identity = (
        torch.eye(products.shape[-1], dtype=products.dtype).expand(products.shape[1:]).clone()
    )
    center = int(max_trace(products, symmetry).sum(0).argmax())
    results = [
        _iterate_maps(products, symmetry, start)
        for start in (identity, solve_procrustes(products[:, center], symmetry))
    ]
    maps = max(results, key=lambda result: squared_norm_of_sum(products, result).item())
    return maps[0].mT @ maps


def _iterate_maps(products: Tensor, symmetry: SymmetryGroup, maps: Tensor) -> Tensor:
    """Map every head once per round until the relative gain of a round is below MIN_GAIN; changes
    `maps` in place.
    """
    objective = squared_norm_of_sum(products, maps)
    for _ in range(MAX_ROUNDS):
        for head in range(len(maps)):
            mapped = products[head] @ maps.mT
            maps[head] = solve_procrustes(mapped.sum(0) - mapped[head], symmetry)
        previous = objective
        objective = squared_norm_of_sum(products, maps)
        if objective - previous <= MIN_GAIN * objective.abs():
            break
    return maps


def squared_norm_of_sum(products: Tensor, maps: Tensor) -> Tensor:
    """Return ||sum_i X_i R_i^T||^2, which alignment maximises."""
    return torch.einsum("iab,ijbc,jac->", maps, products, maps)


def pooling_error(products: Tensor, maps: Tensor) -> float:
    """Return the squared error of the mean of mapped heads, sum_i ||X_i R_i^T - mean||^2.

    >>> identity = torch.eye(1).expand(2, 1, 1)
    >>> pooling_error(
    ...     torch.tensor([[[[1.0]], [[-1.0]]], [[[-1.0]], [[1.0]]]]), identity
    ... )  # heads 1 and -1, mean 0
    2.0
    """
    total = torch.einsum("iiaa->", products)
    return max((total - squared_norm_of_sum(products, maps) / len(maps)).item(), 0.0)


# --- Cross products of the key and value heads of a layer -----------------------------------------


@dataclass(frozen=True, eq=False)
class CrossProducts:
    """Cross products sums[i, j] = X_i^T X_j over `num_tokens` tokens, [heads, heads, width, width].

    They are on the CPU, in float64. Least squares between mapped heads depend on nothing else, so
    tokens need not be stored; products over two sets of tokens add up.

    >>> x = torch.tensor([[[3.0, 4.0]], [[0.0, 0.0]]])  # two tokens of one head
    >>> both = CrossProducts.from_features(x) + CrossProducts.from_features(x)
    >>> both.num_tokens, both.sums[0, 0].tolist()
    (4, [[18.0, 24.0], [24.0, 32.0]])
    """

    sums: Tensor
    num_tokens: int

    @staticmethod
    def from_features(features: Tensor) -> CrossProducts:
        """Return the cross products of features [.., heads, width]."""
        x = to_float64(features.detach()).flatten(0, -3)
        if not x.isfinite().all():
            raise ValueError(
                "keys or values are not finite (NaN or inf); check the weights, or mask padding "
                "tokens"
            )
        flat = x.flatten(1)
        products = (flat.T @ flat).cpu().unflatten(1, x.shape[1:]).unflatten(0, x.shape[1:])
        return CrossProducts(products.transpose(1, 2), len(x))

    def __add__(self, other: CrossProducts) -> CrossProducts:
        return CrossProducts(self.sums + other.sums, self.num_tokens + other.num_tokens)


def compute_kv_features(attention: Attention, z: Tensor) -> dict[str, Tensor]:
    """Return keys ("k") and values ("v") of a layer's input before RoPE and QK norms, [batch,
    tokens, heads, width].

    >>> import headwise as hw
    >>> layer = hw.Attention(hw.design(model=8, heads=4, kv=2, modifiers=(hw.parts.Rotary(),)))
    >>> z = torch.randn(1, 3, 8)
    >>> torch.equal(
    ...     compute_kv_features(layer, z)["k"].flatten(2), z @ layer.state_dict()["project.k"].T
    ... )
    True
    """

    def before_qk_transform(x_BTHK: Tensor, side: str) -> Tensor:
        return x_BTHK

    spec = attention.spec
    project = spec.project.equivalent_forms(spec).get("step", spec.project)  # one per latent
    p = attention.weights["project"]
    with torch.no_grad():
        entry = project.project_kv(z, before_qk_transform, p)
        k_BSGK, v_BSGV = project.expand_kv(entry, before_qk_transform, p)
    return {"k": k_BSGK, "v": v_BSGV}


def compute_similarity(products: CrossProducts, symmetry: SymmetryGroup | None = None) -> Tensor:
    """Return minus the mean squared distance of every pair of heads after the best map in the
    symmetry group, [heads, heads].

    Without `symmetry` heads are compared as they are.

    >>> x = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])  # one token, two orthogonal heads
    >>> [
    ...     compute_similarity(CrossProducts.from_features(x), symmetry)[0, 1].item()
    ...     for symmetry in (None, SymmetryGroup.full(2))
    ... ]
    [-2.0, 0.0]
    """
    squared_norms = products.sums.diagonal(dim1=0, dim2=1).diagonal(dim1=0, dim2=1).sum(-1)
    traces = max_trace(products.sums, symmetry or SymmetryGroup())
    return (2 * traces - squared_norms[:, None] - squared_norms) / products.num_tokens


# --- Alignment of a layer's key-value heads -------------------------------------------------------

SIDE_NAMES = {"k": "keys", "v": "values"}
GroupSequence = Sequence[Sequence[int]]


class AlignmentResult(NamedTuple):
    """Weights of the same function with aligned heads.

    `skip_reasons` has the sides ("k", "v") that could not be aligned. `pooling_errors` has, by
    side, the fraction of the squared norm that group means lose, before and after alignment.
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
    """Map the heads of each group as close to each other as possible without changing the function
    (2412.20677).

    Values are mapped by any orthogonal matrix, undone in W_O. Keys are mapped by matrices that
    commute with the query-key transforms, such as a rotation of each RoPE pair, undone in W_Q. A
    side that cannot be mapped without changing the function stays, with the reason.

    >>> import headwise as hw
    >>> from headwise.surgery.head_alignment import compute_kv_features
    >>> layer = hw.Attention(hw.design(model=8, heads=4, kv=2, modifiers=(hw.parts.Rotary(),)))
    >>> products = {
    ...     side: CrossProducts.from_features(x)
    ...     for side, x in compute_kv_features(layer, torch.randn(1, 9, 8)).items()
    ... }
    >>> aligned = align_heads(layer.spec, layer.state_dict(), [(0, 1)], products)
    >>> aligned.skip_reasons, aligned.pooling_errors["v"][1] <= aligned.pooling_errors["v"][0]
    ({}, True)
    """
    if spec.heads.value_heads:
        raise SpecError(
            f"cannot align heads: keys and values are grouped separately ({spec.heads})"
        )
    aligned = dict(weights)
    skip_reasons = dict[str, str]()
    errors = dict[str, tuple[float, float]]()
    for side in sides:
        symmetry, reason = find_symmetry(spec, aligned, side)
        maps = torch.empty_like(products[side].sums[0])
        for group in groups:
            heads = list(group)
            maps[heads] = align_to_mean(products[side].sums[heads][:, heads], symmetry)
        identity = torch.eye(maps.shape[-1]).to(maps).expand_as(maps)
        unaligned, aligned_error = (
            _relative_error(groups, products[side], own) for own in (identity, maps)
        )
        errors[side] = (unaligned, aligned_error)
        if reason:
            skip_reasons[side] = reason
        else:
            aligned |= map_heads(spec, aligned, side, maps)
    return AlignmentResult(aligned, skip_reasons, errors)


def find_symmetry(
    spec: AttentionSpec, weights: Mapping[str, Tensor], side: str
) -> tuple[SymmetryGroup, str]:
    """Return the symmetry group by which heads of a side ("k", "v") can be mapped; the reason if it
    is trivial.

    >>> import headwise as hw
    >>> spec = hw.design(
    ...     model=8, heads=2, modifiers=(hw.parts.Rotary(dims=2), hw.parts.ShawValues(reach=3))
    ... )
    >>> [find_symmetry(spec, hw.Attention(spec).state_dict(), side) for side in "kv"]
    [(SymmetryGroup(planes=((0, 1),), blocks=((2, 3),)), ''), (SymmetryGroup(planes=(), blocks=()),
    'ShawValues depends
    on the basis of values')]
    """
    heads = spec.heads
    identity = torch.eye(heads.dim if side == "k" else heads.vdim, dtype=torch.float64)
    absorbed = _absorb_maps(spec, weights, side, identity.expand(heads.kv, -1, -1))
    for name, changed in absorbed.items():
        if not changed:
            return SymmetryGroup(), f"{name} cannot absorb a matrix per head of {SIDE_NAMES[side]}"
    symmetry = SymmetryGroup.full(len(identity))
    limiting = list[str]()
    for name, part in spec.parts():
        part_symmetry = part.symmetry(spec, side, weights_of_part(weights, name))
        if part_symmetry != SymmetryGroup.full(len(identity)):
            limiting.append(type(part).__name__)
        symmetry &= part_symmetry
    if symmetry != SymmetryGroup():
        return symmetry, ""
    verb = "depends" if len(limiting) == 1 else "depend"
    return symmetry, f"{' and '.join(limiting)} {verb} on the basis of {SIDE_NAMES[side]}"


def map_heads(
    spec: AttentionSpec, weights: Mapping[str, Tensor], side: str, maps: Tensor
) -> dict[str, Tensor]:
    """Return the changed weights after mapping every head of a side by its map [heads, width,
    width]; same function.
    """
    changed = dict[str, Tensor]()
    for absorbed in _absorb_maps(spec, weights, side, maps).values():
        for name, tensor in absorbed.items():
            changed[name] = tensor.to(weights[name])
    return changed


def _absorb_maps(
    spec: AttentionSpec, weights: Mapping[str, Tensor], side: str, maps: Tensor
) -> dict[str, Mapping[str, Tensor]]:
    """Return the weights that absorb the maps, by part: the projection, and the part that undoes
    the maps.
    """
    exact = {name: to_float64(tensor.detach()) for name, tensor in weights.items()}
    heads = spec.heads
    maps = maps.to(next(iter(exact.values())).device)
    project = type(spec.project).__name__
    absorbed = spec.project.absorb_matrix(spec, exact, side, maps)
    if side == "k":
        query_maps = maps[list(heads.kv_head_of_query)]
        queries = spec.project.absorb_matrix(spec, exact, "q", query_maps)
        return {project: {**absorbed, **queries} if absorbed and queries else {}}
    value_heads = [heads.value_head_of_row[row] for row in spec.score_head_of_output]
    undone = spec.merge.absorb_matrix(spec, exact, maps[value_heads].mT)
    return {project: absorbed, type(spec.merge).__name__: undone}


def _relative_error(groups: GroupSequence, products: CrossProducts, maps: Tensor) -> float:
    total = torch.einsum("iiaa->", products.sums).item()
    error = 0.0
    for group in groups:
        heads = list(group)
        error += pooling_error(products.sums[heads][:, heads], maps[heads])
    return error / total if total else 0.0
