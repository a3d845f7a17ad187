"""Similarities: scaled dot products with an optional soft cap; and, pair by pair in blocks of
queries, additive attention (Bahdanau) and the Gaussian kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from ..interfaces import ScoreStep, Similarity
from ..interfaces.core_types import CoreShape, Param, PartParams, ScorePosition, SpecFactory
from ..interfaces.part import part
from ..spec.attention_spec import AttentionSpec
from .feature_map import to_at_least_float32, without_autocast
from .initialisers import weight, zeros_init


@part
class DotProduct(Similarity):
    """s = scale * q.k, where scale is 1/sqrt(dim) unless given (1706.03762, section 3.2.1).

    Two equal unit vectors with 4 channels have a score of 1/2:

    >>> q = torch.tensor([1.0, 0, 0, 0])
    >>> DotProduct().pair(q, q, 4**-0.5, {}).item()
    0.5
    """

    paper = "1706.03762"
    linear: ClassVar[bool] = True
    unrestricted_sides: ClassVar[str] = "kv"
    scale: float | None = None
    positive_fields: ClassVar = ("scale",)

    def score_scale(self, core: CoreShape) -> float:
        return core.scale if self.scale is None else self.scale

    def pair(self, q_K: Tensor, k_K: Tensor, scale: float, p_h: Mapping[str, Tensor]) -> Tensor:
        return (q_K * k_K).sum(-1) * scale

    def scores(self, q_BHTK: Tensor, k_BHSK: Tensor, scale: float, p: PartParams) -> Tensor:
        return torch.matmul(q_BHTK * scale, k_BHSK.transpose(-1, -2))

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(similarity=cls(scale=0.25))


MAX_PAIR_NUMEL = 2**24  # limit on the numbers of (query, key) pairs in memory at once
MIN_BANDWIDTH = 1e-9  # for smaller widths, distance / width^2 can overflow float32


@part
class Additive(Similarity):
    """s = v_h.tanh(W_Q x + W_K z + b_h): a network with one hidden layer, of width dim (1409.0473,
    section A.1.2).

    W_Q and W_K belong to the project, so a single head has exactly the paper's parameters plus the
    bias b, which the paper leaves out. v and b start at zero as in the paper (section B.1), so a
    new layer averages all values. The hidden layer exists for every (query, key) pair, so queries
    are processed in blocks; the backward pass still needs the hidden layers of all blocks.

    >>> p = {"v": torch.tensor([2.0, 1.0]), "bias": torch.tensor([0.0, 30.0])}
    >>> Additive().pair(torch.zeros(2), torch.zeros(2), 1.0, p).item()
    1.0
    """

    paper = "1409.0473"
    per_head: ClassVar[bool] = True
    needed_head_dims: ClassVar = "queries and keys with heads.dim channels"

    def score_scale(self, core: CoreShape) -> float:
        return 1.0

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        return {name: weight("q dim", zeros_init) for name in ("v", "bias")}

    def pair(self, q_K: Tensor, k_K: Tensor, scale: float, p_h: Mapping[str, Tensor]) -> Tensor:
        return (p_h["v"] * torch.tanh(q_K + k_K + p_h["bias"])).sum(-1)

    def scores(self, q_BHTK: Tensor, k_BHSK: Tensor, scale: float, p: PartParams) -> Tensor:
        shifted = (k_BHSK + p["bias"][:, None])[:, :, None]
        blocks = [
            _score_hidden_layer(block, shifted, p["v"]) for block in _split_queries(q_BHTK, k_BHSK)
        ]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, 2)

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(similarity=cls(), pattern="causal", kv=2, vdim=5)
        yield base(similarity=cls(), source=13, bias="qkvo")


def _split_queries(q_BHTK: Tensor, k_BHSK: Tensor) -> tuple[Tensor, ...]:
    """Blocks of as many queries as `MAX_PAIR_NUMEL` allows with all keys."""
    return q_BHTK.split(max(1, MAX_PAIR_NUMEL // max(1, k_BHSK.numel())), 2)


def _score_hidden_layer(q_BHTK: Tensor, shifted: Tensor, v: Tensor) -> Tensor:
    """s_BHTS as one matrix product over the hidden layers of all pairs, as torch and
    `CoreShape.flops` count it.
    """
    hidden = torch.tanh(q_BHTK[:, :, :, None] + shifted)
    pairs = hidden.shape[2:4]
    return torch.matmul(hidden.flatten(2, 3), v[:, :, None]).unflatten(2, pairs).squeeze(-1)


@part
class Gaussian(Similarity):
    """s = -|q - k|^2 / (2 width^2); with Softmax, the kernel regression of Nadaraya (1964) and
    Watson (1964).

    A small width selects the nearest key, a large one averages all keys. If all keys have equal
    length it is the same as DotProduct(scale=1 / width^2), because the length of the query is
    constant within its row.

    Computed as q.k - |q|^2 / 2 - |k|^2 / 2, small distances between long vectors would be lost to
    rounding. So the difference of every pair is computed, in blocks of queries; the backward pass
    still needs the differences of all blocks.

    >>> Gaussian(width=2.0).pair(
    ...     torch.tensor([3.0, 1.0]), torch.tensor([0.0, 5.0]), 1.0, {}
    ... ).item()  # -25 / 8
    -3.125
    """

    unrestricted_sides: ClassVar[str] = "kv"
    width: float = 1.0
    field_minima: ClassVar = {"width": MIN_BANDWIDTH}
    needed_head_dims: ClassVar = "queries and keys with heads.dim channels"

    def score_scale(self, core: CoreShape) -> float:
        return 1.0

    def pair(self, q_K: Tensor, k_K: Tensor, scale: float, p_h: Mapping[str, Tensor]) -> Tensor:
        return -(q_K - k_K).square().sum(-1) / (2 * self.width**2)

    def scores(self, q_BHTK: Tensor, k_BHSK: Tensor, scale: float, p: PartParams) -> Tensor:
        q = to_at_least_float32(q_BHTK)
        k = to_at_least_float32(k_BHSK)
        with without_autocast(q):
            blocks = [self._block_scores(block, k) for block in _split_queries(q, k)]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, 2)

    def _block_scores(self, q_BHTK: Tensor, k_BHSK: Tensor) -> Tensor:
        """s_BHTS of a block of queries, as matrix products of differences, as `CoreShape.flops`
        counts them.
        """
        difference = (q_BHTK[:, :, :, None] - k_BHSK[:, :, None]) / self.width
        return torch.matmul(difference[..., None, :], difference[..., None]).flatten(-3) / -2

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(similarity=cls(width=1.5), pattern="causal", kv=2, vdim=5)
        yield base(similarity=cls(width=0.7), source=13)


@part
class Softcap(ScoreStep):
    """s -> limit tanh(s / limit): limits scores smoothly to (-limit, limit) (Gemma 2, 2408.00118).

    >>> Softcap(50.0).score(torch.tensor(1e6), None, None, {}).item()
    50.0
    """

    paper = "2408.00118"
    unrestricted_sides: ClassVar[str] = "kv"
    limit: float = 50.0
    positive_fields: ClassVar = ("limit",)

    def score(
        self, s: Tensor, position: ScorePosition, factors: Tensor | None, p: Mapping[str, Tensor]
    ) -> Tensor:
        return torch.tanh(s / self.limit) * self.limit

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(modifiers=(cls(limit=0.5),), pattern="causal")
