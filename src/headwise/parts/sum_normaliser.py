"""A normaliser that divides scores by their sum, for linear attention."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from torch import Tensor

from ..interfaces import Normaliser
from ..interfaces.core_types import PartParams, SpecFactory
from ..interfaces.part import part
from ..spec.attention_spec import AttentionSpec
from .feature_map import FeatureMap


@part
class Sum(Normaliser):
    """w_j = s_j / (eps + sum of s), for similarities that are never negative (2006.16236). A row of zeros stays zero.

    With `eps` = 0, as in the paper, weights sum to one. The authors' code adds eps=1e-6.

    >>> import torch
    >>> Sum().normalise_row(torch.tensor([1.0, 3.0]), {}).tolist()
    [0.25, 0.75]
    >>> Sum(eps=1.0).normalise_row(torch.tensor([1.0, 2.0]), {}).tolist()
    [0.25, 0.5]
    """

    paper = "2006.16236"
    disagreements: ClassVar[tuple[str, ...]] = (
        "The paper divides by the sum of the scores; its code adds 1e-6 to the sum: see `eps` of `Sum`, by default 0.",
    )
    sums_to_one: ClassVar[bool] = True
    proportional: ClassVar[bool] = True
    eps: float = 0.0

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        if spec.similarity.signed:
            name = type(spec.similarity).__name__
            yield f"Sum needs scores that are never negative, unlike {name}; use similarity FeatureMap()"
        if not self.eps >= 0:
            yield f"Sum(eps={self.eps!r}) is negative; use 1e-6 as in the authors' code, or leave it out"
        elif self.eps and spec.similarity.has_arbitrary_scale():
            name = repr(spec.similarity)
            yield f"Sum(eps={self.eps!r}) needs scores of a known scale, unlike {name}; use the eps of the similarity"

    def divisor(self, total: Tensor) -> Tensor:
        return total + self.eps if self.eps else total.masked_fill(total == 0, 1.0)

    def always_sums_to_one(self) -> bool:
        return self.eps == 0

    def normalise_row(self, s_S: Tensor, p_h: Mapping[str, Tensor]) -> Tensor:
        return s_S / self.divisor(s_S.sum())

    def normalise(self, s_BHTS: Tensor, allowed: Tensor, p: PartParams) -> Tensor:
        s_BHTS = s_BHTS.masked_fill(~allowed, 0.0)
        return s_BHTS / self.divisor(s_BHTS.sum(-1, keepdim=True))

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(normaliser=cls(), similarity=FeatureMap(), pattern="causal")
        yield base(normaliser=cls(eps=0.5), similarity=FeatureMap(), pattern="causal", kv=2)
