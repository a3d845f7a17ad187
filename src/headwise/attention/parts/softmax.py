"""Softmax over the allowed keys of each query, softmax with an attention sink (a learned score per
head), and softmax whose scores grow with the number of keys. Softpick and sigmoid attention, whose
rows need not sum to one, and dropout on weights.
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
from .initialisers import constant_value, weight, zeros_init

SOFTPICK_EPSILON = 1e-8  # as in the released code


def _count_allowed(allowed: Tensor, s_BHTS: Tensor) -> Tensor:
    """Count the allowed keys of each query, at least 1, in the dtype of the scores."""
    count = allowed.expand(*allowed.shape[:-1], s_BHTS.shape[-1]).sum(-1, keepdim=True)
    return count.clamp(min=1).to(s_BHTS.dtype)


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
class ScalableSoftmax(Normaliser):
    """w = softmax(s_h log(n) scores), where n is the number of allowed keys of the query and s_h a
    learned number per head (2501.19399).

    A key that is ahead of n - 1 others by a fixed score keeps its weight as n grows, where softmax
    dilutes it. `start` is the first value of s_h. With s = 1 a score of 1 beside one of 0 has the
    weight 2 / (2 + 1), because exp(log 2) = 2:

    >>> row = torch.tensor([1.0, 0.0])
    >>> round(ScalableSoftmax().normalise_row(row, {"s": torch.tensor(1.0)})[0].item(), 4)
    0.6667
    """

    paper = "2501.19399"
    disagreements: ClassVar[tuple[str, ...]] = (
        "n is the number of allowed keys of each query, also in a window or with padding; the "
        "paper has causal attention over one text, where it is the position of the query.",
    )
    shift_invariant: ClassVar[bool] = True
    sums_to_one: ClassVar[bool] = True
    start: float = 0.43

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        return {"s": weight("q", constant_value(self.start))}

    def normalise_row(self, s_S: Tensor, p_h: Mapping[str, Tensor]) -> Tensor:
        return (p_h["s"] * math.log(len(s_S)) * s_S).softmax(-1)

    def normalise(self, s_BHTS: Tensor, allowed: Tensor, p: PartParams) -> Tensor:
        factor = p.broadcast_over_scores()["s"].to(s_BHTS.dtype)
        scores = factor * _count_allowed(allowed, s_BHTS).log() * s_BHTS
        return Softmax().normalise(scores, allowed, p)

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(normaliser=cls(), pattern="causal", kv=2)
        yield base(normaliser=cls(start=1.5), pattern="window(4)")


@part
class Softpick(Normaliser):
    """w_j = [exp(s_j) - 1]_+ / sum of |exp(s) - 1|: keys with a score of at most 0 have the weight
    0 (2504.20966).

    Weights need not sum to one, so that no key has to be a sink. Scores of log 3 and log 1/2 are 2
    and -1/2 after subtracting one from their exponentials:

    >>> Softpick().normalise_row(torch.tensor([3.0, 0.5]).log(), {}).tolist()
    [0.800000011920929, 0.0]
    """

    paper = "2504.20966"
    disagreements: ClassVar[tuple[str, ...]] = (
        "The released code subtracts the largest score before the exponential, which overflows if "
        "all scores are far below 0; here it is the larger of that and 0. The small number that "
        "keeps rows of zeros finite is added after this step in both.",
    )

    def normalise_row(self, s_S: Tensor, p_h: Mapping[str, Tensor]) -> Tensor:
        return self._pick(s_S)

    def normalise(self, s_BHTS: Tensor, allowed: Tensor, p: PartParams) -> Tensor:
        return self._pick(s_BHTS.masked_fill(~allowed, 0.0))  # exp(0) - 1 adds nothing

    def _pick(self, scores: Tensor) -> Tensor:
        if scores.shape[-1] == 0:
            return scores
        top = scores.amax(-1, keepdim=True).clamp(min=0)
        excess = (scores - top).exp() - (-top).exp()
        return excess.relu() / (excess.abs().sum(-1, keepdim=True) + SOFTPICK_EPSILON)

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(normaliser=cls(), pattern="causal")
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
        bias = _count_allowed(allowed, s_BHTS).log()
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
