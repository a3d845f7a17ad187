"""Softmax over the allowed keys of each query, and softmax with an attention sink: a learned score
per head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from ...kernels import row_normalisers
from ..interfaces import Normaliser
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
        return (
            row_normalisers.masked_softmax(s_BHTS, allowed)
            if row_normalisers.SOFTMAX_KERNELS.can_run(s_BHTS)
            else self.normalise(s_BHTS, allowed, p)
        )

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(normaliser=cls(), pattern="causal")


@part
class SinkSoftmax(Normaliser):
    """w_j = exp(s_j) / (exp(sink_h) + sum of exp(s)): one learned score per head beside the keys
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
