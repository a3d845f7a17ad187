"""The same weight for every key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from ..registry import part
from ..seams import Normaliser
from ..spec import AttentionSpec
from ..terms import Base, Weighted


@part
class Average(Normaliser):
    """w_j = 1/n for the n allowed keys, whatever the scores: average attention (1805.00631).

    >>> Average().row(torch.tensor([5.0, -5.0]), {}).tolist()
    [0.5, 0.5]
    """

    paper = "1805.00631"
    shift_free: ClassVar[bool] = True
    whole: ClassVar[bool] = True

    def row(self, s_S: Tensor, p_h: Mapping[str, Tensor]) -> Tensor:
        return torch.full_like(s_S, 1 / len(s_S)) + 0 * s_S

    def normalise(self, s_BHTS: Tensor, allowed: Tensor, p: Weighted) -> Tensor:
        live = allowed.expand(s_BHTS.shape).to(s_BHTS.dtype)
        return live / live.sum(-1, keepdim=True).clamp(min=1) + 0 * s_BHTS.masked_fill(~allowed, 0.0)

    @classmethod
    def examples(cls, base: Base) -> Iterator[AttentionSpec]:
        yield base(normaliser=cls(), pattern="causal")
