"""Sigmoid attention: each weight is the sigmoid of its score; rows are not normalised."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ..interfaces import Normaliser
from ..interfaces.core_types import PartParams, SpecFactory
from ..interfaces.part import part
from ..spec.attention_spec import AttentionSpec


@part
class Sigmoid(Normaliser):
    """w_j = sigmoid(s_j - log n), where n is the number of allowed keys of the query (2409.04431).

    n counts the allowed keys of each query, not the length of the batch, so that decoding with a
    cache equals one forward pass. Two keys with score 0 get a weight of 1/3 each:

    >>> Sigmoid().normalise_row(torch.zeros(2), {}).tolist() == [torch.tensor(1 / 3).item()] * 2
    True
    """

    paper = "2409.04431"

    def normalise_row(self, s_S: Tensor, p_h: Mapping[str, Tensor]) -> Tensor:
        return torch.sigmoid(s_S - math.log(len(s_S)))

    def normalise(self, s_BHTS: Tensor, allowed: Tensor, p: PartParams) -> Tensor:
        count = allowed.expand(*allowed.shape[:-1], s_BHTS.shape[-1]).sum(-1, keepdim=True)
        bias = count.clamp(min=1).to(s_BHTS.dtype).log()
        return torch.sigmoid(s_BHTS - bias).masked_fill(~allowed, 0.0)

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(normaliser=cls(), pattern="causal")
