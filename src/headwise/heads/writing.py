"""What each head writes into the states of a model: how much, and what share of what all heads of its layer write."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..hub.finding import find_attention
from .circuits import get_circuits
from .folds import FoldedSums
from .sampled import collect_head_outputs
from .scene import Example
from .table import Measure

MAX_CHUNK_CELLS = 2**22  # numbers that all heads of a layer write at once, at most


class ResidualContribution(NamedTuple):
    """One head: the norm of z W_O, and its share of what its layer writes, each a mean over tokens.

    A share is the part along the sum of all heads, <own, sum> / <sum, sum>: shares of a layer sum to one, and one that
    is below zero takes back what others write. The chance of a share is one over the number of heads; a norm has none.
    """

    site: str
    head: int
    norm: Measure
    share: Measure


def measure_residual_contributions(model: nn.Module, examples: Iterable[Example], *, num_resamples: int = 1000, seed: int = 0) -> tuple[ResidualContribution, ...]:
    """How much every head of a model writes over texts, of models whose circuits are known.

    What output biases add belongs to no head, and what a norm behind the attention does is left out.
    """
    maps = {name: torch.stack([own.output_map(head) for head in range(len(own.spec.score_head_of_output))])
            for name, own in get_circuits(model).items()}  # fmt: skip
    those = [one for one in find_attention(model) if one.site.silence.can and one.site.name in maps]
    sums = {one.site.name: FoldedSums() for one in those}
    for number, scene in enumerate(examples):
        for name, z in collect_head_outputs(model, those, scene).items():
            told = _contribution_norms(z, maps[name].to(z))
            sums[name].add(number, told.sum(0).cpu().numpy(), len(told))
    rows: list[ResidualContribution] = []
    for name, held in sums.items():
        if held.count:
            told = held.mean_intervals(num_resamples, seed)
            heads = told.mean.shape[1]
            rows += [ResidualContribution(name, head, told.measure_at((0, head)), told.measure_at((1, head), 1 / heads)) for head in range(heads)]
    if not rows:
        raise ValueError("no text was read; give at least two")
    return tuple(rows)


def _contribution_norms(z: Tensor, maps: Tensor) -> Tensor:
    """Norm and share of each head at each token, [tokens, 2, heads], in float64."""
    step = max(1, MAX_CHUNK_CELLS // max(1, maps.shape[0] * maps.shape[2]))
    found: list[Tensor] = []
    for start in range(0, len(z), step):
        own = torch.on_einsum("tov,ovd->tod", z[start : start + step], maps).double()
        total = own.sum(1, keepdim=True)
        whole = total.square().sum(-1)
        share = torch.where(whole > 0, (own * total).sum(-1) / whole.clamp(min=1e-300), 1 / own.shape[1])
        found.append(torch.stack([own.norm(dim=-1), share], 1))
    return torch.cat(found)
