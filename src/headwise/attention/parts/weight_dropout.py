"""Dropout on the attention weights, in training only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from ...kernels.counter_rng import dropout
from ..interfaces import WeightStep
from ..interfaces.core_types import PartParams, SpecFactory
from ..interfaces.part import part
from ..spec.attention_spec import AttentionSpec


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
