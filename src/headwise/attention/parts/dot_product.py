"""Scaled dot-product similarity."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from ..interfaces import Similarity
from ..interfaces.core_types import CoreShape, PartParams, SpecFactory
from ..interfaces.part import part
from ..spec.attention_spec import AttentionSpec


@part
class Dot(Similarity):
    """s = scale * q.k, where scale is 1/sqrt(dim) unless given (1706.03762, section 3.2.1).

    Two equal unit vectors with 4 channels have a score of 1/2:

    >>> q = torch.tensor([1.0, 0, 0, 0])
    >>> Dot().pair(q, q, 4**-0.5, {}).item()
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
