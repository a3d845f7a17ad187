"""Additive attention (Bahdanau): a small network computes the score of a query and a key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from ..interfaces import Similarity
from ..interfaces.axis_layout import AxisLayout
from ..interfaces.core_types import CoreShape, Param, PartParams, SpecFactory
from ..interfaces.part import part
from ..spec.attention_spec import AttentionSpec
from .initialisers import zeros_init

MAX_HIDDEN_NUMEL = 2**24  # limit on the elements of the hidden layer in memory at once


@part
class Additive(Similarity):
    """s = v_h.tanh(W_Q x + W_K z + b_h): a network with one hidden layer, of width dim (1409.0473, section A.1.2).

    W_Q and W_K belong to the project, so a single head has exactly the paper's parameters plus the bias b, which the
    paper leaves out. v and b start at zero as in the paper (section B.1), so a new layer averages all values. The
    hidden layer exists for every (query, key) pair, so queries are processed in blocks; the backward pass still needs
    the hidden layers of all blocks.

    >>> p = {"v": torch.tensor([2.0, 1.0]), "bias": torch.tensor([0.0, 30.0])}
    >>> Additive().pair(torch.zeros(2), torch.zeros(2), 1.0, p).item()
    1.0
    """

    paper = "1409.0473"
    per_head: ClassVar[bool] = True

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        if not spec.project.uses_head_dims:
            name = type(spec.project).__name__
            yield f"Additive needs queries and keys with heads.dim channels, unlike {name}; use project Direct()"

    def score_scale(self, core: CoreShape) -> float:
        return 1.0

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        return {name: Param(AxisLayout.parse("q dim"), zeros_init) for name in ("v", "bias")}

    def pair(self, q_K: Tensor, k_K: Tensor, scale: float, p_h: Mapping[str, Tensor]) -> Tensor:
        return (p_h["v"] * torch.tanh(q_K + k_K + p_h["bias"])).sum(-1)

    def scores(self, q_BHTK: Tensor, k_BHSK: Tensor, scale: float, p: PartParams) -> Tensor:
        shifted = (k_BHSK + p["bias"][:, None])[:, :, None]
        queries = max(1, MAX_HIDDEN_NUMEL // max(1, k_BHSK.numel()))
        blocks = [_score_hidden_layer(q, shifted, p["v"]) for q in q_BHTK.split(queries, 2)]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, 2)

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(similarity=cls(), pattern="causal", kv=2, vdim=5)
        yield base(similarity=cls(), source=13, bias="qkvo")


def _score_hidden_layer(q_BHTK: Tensor, shifted: Tensor, v: Tensor) -> Tensor:
    """s_BHTS as one matrix product over the hidden layers of all pairs, as torch and `CoreShape.flops` count it."""
    hidden = torch.tanh(q_BHTK[:, :, :, None] + shifted)
    pairs = hidden.shape[2:4]
    return torch.matmul(hidden.flatten(2, 3), v[:, :, None]).unflatten(2, pairs).squeeze(-1)
