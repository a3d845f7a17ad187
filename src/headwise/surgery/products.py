"""What the key and value heads of a layer say over data, as far as grouping and turning them asks: sums of products."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import suggest
from ..module import Attention
from ..terms import SymmetryGroup
from .procrustes import max_trace

SIMILARITY_KINDS = ("distance", "cosine")


@dataclass(frozen=True, eq=False)
class CrossProducts:
    """sums[i, j] = X_i^T X_j over `rows` tokens, [heads, heads, width, width] in float64; `units` of X with unit rows.

    All that the least squares between mapped heads depend on, so that no token is kept; two of them add up.

    >>> x = torch.tensor([[[3.0, 4.0]], [[0.0, 0.0]]])  # two tokens of one head
    >>> both = CrossProducts.of(x) + CrossProducts.of(x)
    >>> both.rows, both.sums[0, 0].tolist(), both.units[0, 0].trace().item()
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
        return CrossProducts(_pairwise_products(x), _pairwise_products(x / torch.where(lengths > 0, lengths, 1.0)), len(x))

    def __add__(self, other: CrossProducts) -> CrossProducts:
        return CrossProducts(self.sums + other.sums, self.normalised_sums + other.normalised_sums, self.num_tokens + other.num_tokens)


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


def compute_similarity(products: CrossProducts, symmetry: SymmetryGroup | None = None, *, kind: str = "distance") -> Tensor:
    """How alike two heads are when one is mapped onto the other as far as it is free: [heads, heads] (2412.20677).

    "distance" is minus their mean squared distance, "cosine" the mean cosine of their rows; without a freedom nothing
    is mapped. The best map is that of the same rows, of unit length for cosines.

    >>> x = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])  # one token, two heads at a right angle
    >>> [compute_similarity(CrossProducts.of(x), free)[0, 1].item() for free in (None, SymmetryGroup.whole(2))]
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
