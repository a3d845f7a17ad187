"""Linear attention: a similarity that splits into features of the query and features of the key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layout import Layout
from ..registry import part
from ..seams import Similarity
from ..spec import AttentionSpec
from ..terms import Base, Core, Phase, Weighted


@part
class FeatureMap(Similarity):
    """s = phi(q).phi(k) with phi(x) = elu(x) + 1: never negative, and without a scale (2006.16236).

    All past tokens fit in one state per head: the sum of phi(k) v^T and the sum of phi(k).

    >>> FeatureMap().pair(torch.zeros(3), torch.zeros(3), 1.0, {}).item()
    3.0
    """

    paper = "2006.16236"
    signed: ClassVar[bool] = False

    def clashes(self, spec: AttentionSpec) -> Iterable[str]:
        if not spec.normaliser.proportional:
            name = type(spec.normaliser).__name__
            yield f"FeatureMap keeps past tokens as sums, of which {name} cannot be made; use normaliser Sum()"
        if any(modifier.phase in (Phase.SCORES, Phase.WEIGHTS, Phase.VALUES) for modifier in spec.modifiers):
            yield "FeatureMap never forms scores while decoding, so nothing may change scores, weights or values"

    def factor(self, core: Core) -> float:
        return 1.0

    def pair(self, q_K: Tensor, k_K: Tensor, scale: float, p_h: Mapping[str, Tensor]) -> Tensor:
        return ((F.elu(q_K) + 1) * (F.elu(k_K) + 1)).sum(-1)

    def scores(self, q_BHTK: Tensor, k_BHSK: Tensor, scale: float, p: Weighted) -> Tensor:
        return torch.matmul(_phi(q_BHTK), _phi(k_BHSK).transpose(-1, -2))

    def features(self, core: Core) -> int:
        return core.dim

    def share(self, q_BHTK: Tensor, k_BHSK: Tensor, scale: float, p: Weighted) -> Tensor:
        return self.scores(q_BHTK, k_BHSK, scale, p)

    def state(self, spec: AttentionSpec) -> Mapping[str, Layout]:
        return {"kv": Layout.parse("voice dim vdim"), "k": Layout.parse("voice dim")}

    def fold(
        self, state: Mapping[str, Tensor], k_BHSK: Tensor, v_BHSV: Tensor, live_BS: Tensor, p: Weighted
    ) -> dict[str, Tensor]:
        exact = state["k"].dtype  # bfloat16 keeps 8 bits, too few for a sum of thousands
        phi = _phi(k_BHSK).to(exact).masked_fill(~live_BS[:, None, :, None], 0.0)
        return {"kv": state["kv"] + phi.transpose(-1, -2) @ v_BHSV.to(exact), "k": state["k"] + phi.sum(-2)}

    def read(self, q_BHTK: Tensor, state: Mapping[str, Tensor], p: Weighted) -> tuple[Tensor, Tensor]:
        phi = _phi(q_BHTK).to(state["k"].dtype)
        return phi @ state["kv"], (phi @ state["k"][..., None]).squeeze(-1)

    @classmethod
    def examples(cls, base: Base) -> Iterator[AttentionSpec]:
        from .sum import Sum

        yield base(similarity=cls(), normaliser=Sum(), kv=2, vdim=5)


def _phi(x: Tensor) -> Tensor:
    return F.elu(x) + 1
