"""Heads mapped onto each other, by orthogonal maps that what comes after them cannot see."""

from __future__ import annotations

import torch
from torch import Tensor

from ..terms import SymmetryGroup

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

    >>> max_trace(torch.tensor([[0.0, 1.0], [-1.0, 0.0]]), SymmetryGroup.whole(2)).item()
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
    >>> maps = align_to_mean(torch.stack([torch.stack([p, -p]), torch.stack([-p, p])]), SymmetryGroup.whole(2))  # X and -X
    >>> maps[1].tolist()
    [[-1.0, 0.0], [0.0, -1.0]]
    """
    still = torch.eye(products.shape[-1], dtype=products.dtype).expand(products.shape[1:]).clone()
    middle = int(max_trace(products, symmetry).sum(0).argmax())
    ends = [_iterate_maps(products, symmetry, start) for start in (still, solve_procrustes(products[:, middle], symmetry))]
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
    return torch.on_einsum("iab,ijbc,jac->", maps, products, maps)


def pooling_error(products: Tensor, maps: Tensor) -> float:
    """What the mean of mapped heads misses of them, sum_i ||X_i R_i^T - mean||^2.

    >>> still = torch.eye(1).expand(2, 1, 1)
    >>> pooling_error(torch.tensor([[[[1.0]], [[-1.0]]], [[[-1.0]], [[1.0]]]]), still)  # of 1 and -1, the mean is 0
    2.0
    """
    whole = torch.on_einsum("iiaa->", products)
    return max((whole - squared_norm_of_sum(products, maps) / len(maps)).item(), 0.0)
