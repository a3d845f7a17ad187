"""Softmax over the allowed keys of each query."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from ..interfaces import Normaliser
from ..interfaces.core_types import PartParams, SpecFactory
from ..interfaces.part import part
from ..kernels import row_normalisers
from ..spec.attention_spec import AttentionSpec


@part
class Softmax(Normaliser):
    """w_j = exp(s_j) / sum of exp(s) over the allowed keys; all weights are 0 if no key is allowed (1706.03762).

    >>> Softmax().normalise_row(torch.tensor([0.0, 0.0, 0.0, 0.0]), {})[0].item()
    0.25
    """

    paper = "1706.03762"
    shift_invariant: ClassVar[bool] = True
    sums_to_one: ClassVar[bool] = True

    def normalise_row(self, s_S: Tensor, p_h: Mapping[str, Tensor]) -> Tensor:
        e_S = (s_S - s_S.max()).exp()
        return e_S / e_S.sum()

    def normalise(self, s_BHTS: Tensor, allowed: Tensor, p: PartParams) -> Tensor:
        lowest = torch.finfo(s_BHTS.dtype).min
        return s_BHTS.masked_fill(~allowed, lowest).softmax(-1).masked_fill(~allowed, 0.0)

    def fused_normalise(self, s_BHTS: Tensor, allowed: Tensor, p: PartParams) -> Tensor:
        return (
            row_normalisers.masked_softmax(s_BHTS, allowed)
            if row_normalisers.can_use_kernels(s_BHTS, row_normalisers.SOFTMAX_KERNELS)
            else self.normalise(s_BHTS, allowed, p)
        )

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(normaliser=cls(), pattern="causal")
