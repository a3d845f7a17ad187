"""A normaliser that divides scores by their sum, for linear attention."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from ..interfaces import Normaliser
from ..interfaces.core_types import PartParams, SpecFactory
from ..interfaces.part import part
from ..spec.attention_spec import AttentionSpec
from .feature_map import FeatureMap


@part
class Sum(Normaliser):
    """w_j = s_j / sum of s, for similarities that are never negative (2006.16236). A row of zeros stays zero.

    >>> Sum().normalise_row(torch.tensor([1.0, 3.0]), {}).tolist()
    [0.25, 0.75]
    """

    paper = "2006.16236"
    sums_to_one: ClassVar[bool] = True
    proportional: ClassVar[bool] = True

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        if spec.similarity.signed:
            name = type(spec.similarity).__name__
            yield f"Sum needs scores that are never negative, unlike {name}; use similarity FeatureMap()"

    def normalise_row(self, s_S: Tensor, p_h: Mapping[str, Tensor]) -> Tensor:
        total = s_S.sum()
        return s_S / torch.where(total == 0, torch.ones_like(total), total)

    def normalise(self, s_BHTS: Tensor, allowed: Tensor, p: PartParams) -> Tensor:
        s_BHTS = s_BHTS.masked_fill(~allowed, 0.0)
        total = s_BHTS.sum(-1, keepdim=True)
        return s_BHTS / total.masked_fill(total == 0, 1.0)

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(normaliser=cls(), similarity=FeatureMap(), pattern="causal")
