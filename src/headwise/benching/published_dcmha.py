"""Dynamically composed heads in plain PyTorch, as published: from the formulas of 2405.08553, rank after rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..terms import PartParams

RMS_EPS = 1e-6


class CompositionFactors(NamedTuple):
    """Of each token: heads to ranks and ranks to heads [B, T, R, H], and gates [B, T, H]."""

    source: Tensor
    target: Tensor
    gate: Tensor


@dataclass(frozen=True)
class CompositionBranch:
    """What makes factors of tokens: u = GELU(x W1), [w1; w2] = u W2, g = tanh(x Wg), w1 normalised over heads."""

    hidden: Tensor
    source: Tensor
    target: Tensor
    gate: Tensor

    def __call__(self, x_BTD: Tensor) -> CompositionFactors:
        hidden = F.gelu(F.linear(x_BTD, self.hidden))
        heads = self.gate.shape[0]
        w1, w2 = (F.linear(hidden, w).unflatten(-1, (-1, heads)) for w in (self.source, self.target))
        w1 = w1 * torch.rsqrt(w1.square().mean(-1, keepdim=True) + RMS_EPS)
        return CompositionFactors(w1, w2, torch.tanh(F.linear(x_BTD, self.gate)))


def make_branch(weights: PartParams) -> CompositionBranch:
    """The branch of queries, from the weights of one composition by name."""
    return CompositionBranch(*(weights[f"query_{name}"] for name in ("hidden", "source", "target", "gate")))


def compose_heads(a_BHTS: Tensor, query_factors: CompositionFactors, key_factors: CompositionFactors) -> Tensor:
    """a' = a + sum_r (a.w1_r) w2_r + a g, with factors of queries and of keys."""
    gate_q, gate_k = (f.gate.transpose(1, 2) for f in (query_factors, key_factors))
    made_BHTS = a_BHTS + a_BHTS * gate_q[..., None] + a_BHTS * gate_k[:, :, None]
    for r in range(query_factors.source.shape[2]):
        for factors, axis in ((query_factors, -1), (key_factors, -2)):
            source, target = (w[:, :, r].transpose(1, 2).unsqueeze(axis) for w in factors[:2])
            made_BHTS = made_BHTS + (a_BHTS * source).sum(1, keepdim=True) * target
    return made_BHTS


def composed_attention(qkv: Sequence[Tensor], scores: tuple[CompositionFactors, CompositionFactors], weights: tuple[CompositionFactors, CompositionFactors]) -> Tensor:
    """o_BTHV, causal, of q, k and v [B, T, H, K]: composed before the mask, and behind the softmax."""
    q, k, v = (t.transpose(1, 2) for t in qkv)
    a_BHTS = compose_heads(q @ k.mT * q.shape[-1] ** -0.5, *scores)
    later = torch.ones(a_BHTS.shape[-2:], dtype=torch.bool).triu(1)
    w_BHTS = compose_heads(a_BHTS.masked_fill(later, torch.finfo(a_BHTS.dtype).min).on_softmax(-1), *weights)
    return (w_BHTS @ v).transpose(1, 2)
