"""Softmax over the allowed keys of each query, and softmax with an attention sink: a learned score
per head. Sigmoid attention (rows are not normalised) and dropout on weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from ...kernels import row_normalisers
from ...kernels.counter_rng import dropout
from ..interfaces import Normaliser, WeightStep
from ..interfaces.core_types import Param, PartParams, SpecFactory
from ..interfaces.part import part
from ..spec.attention_spec import AttentionSpec
from .initialisers import weight, zeros_init


@part
class Softmax(Normaliser):
    """w_j = exp(s_j) / sum of exp(s) over the allowed keys; all weights are 0 if no key is allowed
    (1706.03762).

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
        if row_normalisers.SOFTMAX_KERNELS.can_run(s_BHTS):
            return row_normalisers.masked_softmax(s_BHTS, allowed)
        return self.normalise(s_BHTS, allowed, p)

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(normaliser=cls(), pattern="causal")


@part
class SinkSoftmax(Normaliser):
    """w_j = exp(s_j) / (exp(sink_h) + sum of exp(s)): one learned score per head next to the keys
    (2508.10925).

    A head with a large sink attends to almost nothing. A sink of 0 takes half the weight from one
    key with score 0:

    >>> SinkSoftmax().normalise_row(torch.zeros(1), {"sink": torch.tensor(0.0)}).item()
    0.5
    """

    paper = "2508.10925"

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        return {"sink": weight("q", zeros_init)}

    def normalise_row(self, s_S: Tensor, p_h: Mapping[str, Tensor]) -> Tensor:
        top = torch.maximum(s_S.max(), p_h["sink"])
        e_S = (s_S - top).exp()
        return e_S / (e_S.sum() + (p_h["sink"] - top).exp())

    def normalise(self, s_BHTS: Tensor, allowed: Tensor, p: PartParams) -> Tensor:
        lowest = torch.finfo(s_BHTS.dtype).min
        s_BHTS = s_BHTS.masked_fill(~allowed, lowest)
        sink = p.broadcast_over_scores()["sink"].to(s_BHTS.dtype).expand(*s_BHTS.shape[:3], 1)
        return torch.cat([s_BHTS, sink], -1).softmax(-1)[..., :-1].masked_fill(~allowed, 0.0)

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(normaliser=cls(), pattern="window(4)", kv=2)


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


@part
class WeightDropout(WeightStep):
    """Each weight is dropped with probability `rate` while training, and the others grow by 1/(1 -
    rate).

    >>> import headwise as hw, torch
    >>> layer = hw.Attention(hw.design(model=8, heads=2, modifiers=(WeightDropout(0.5),))).eval()
    >>> x = torch.randn(1, 3, 8)
    >>> torch.equal(layer(x), layer(x))
    True
    """

    paper = "1706.03762"
    rate: float = 0.1

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        if not 0 <= self.rate < 1:
            yield f"WeightDropout(rate={self.rate!r}) must lie in [0, 1); 0.1 is usual"

    def transform_weights(self, w_BHTS: Tensor, p: PartParams) -> Tensor:
        return dropout(w_BHTS, self.rate, p.training)

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(modifiers=(cls(rate=0.3),), pattern="causal")
