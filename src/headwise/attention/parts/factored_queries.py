"""Multi-matrix factorisation: queries through a space that all heads share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from ..interfaces.core_types import Param, PartParams, SpecFactory, TransformsQK
from ..interfaces.part import part
from ..spec.attention_spec import AttentionSpec
from .initialisers import ones_init, weight, xavier_uniform
from .linear_projection import KeyValueProjection, absorb_matrix_per_head


@part
class FactoredQueries(KeyValueProjection):
    """q_h = RMSNorm(x W_S) W_Q^h with `rank` channels that all heads share; k = z W_K, v = z W_V
    (2412.19255).

    With one key-value head of many channels, heads are cheap: each one more adds `rank` times dim
    weights and nothing to the cache. norm="none" leaves the norm out. With 64 heads of 256
    channels, a token has 512 numbers, those of 64 plain heads 32,768:

    >>> import headwise as hw
    >>> spec = hw.design(model=2048, heads=64, kv=1, dim=256, project=FactoredQueries(rank=2048))
    >>> hw.costs.cached_numbers_per_token(spec), 2 * 256
    (512, 512)
    """

    paper = "2412.19255"
    disagreements: ClassVar[tuple[str, ...]] = (
        "The variant with reused keys, whose values are computed from keys, is not part of this.",
    )
    rank: int = 512
    norm: str = "rms"
    eps: float = 1e-6
    field_choices: ClassVar = {"norm": ("rms", "none")}
    field_minima: ClassVar = {"rank": 1}
    positive_fields: ClassVar = ("eps",)

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        queries = {
            "q_down": weight("rank model", xavier_uniform, "query"),
            **({"q_norm": weight("rank", ones_init)} if self.norm == "rms" else {}),
            "q_up": weight("(q dim) rank", xavier_uniform, "query"),
        }
        return {**queries, **super().params(spec)}

    def sizes(self, spec: AttentionSpec) -> Mapping[str, int]:
        return {"rank": self.rank}

    def absorb_matrix(
        self, spec: AttentionSpec, weights: Mapping[str, Tensor], side: str, matrix: Tensor
    ) -> Mapping[str, Tensor]:
        if side != "q":
            return super().absorb_matrix(spec, weights, side, matrix)
        names = [name for name in ("q_up", "q_bias") if name in self.params(spec)]
        return absorb_matrix_per_head(weights, names, matrix)

    def project_query(self, x_BTD: Tensor, transform: TransformsQK, p: PartParams) -> Tensor:
        low = F.linear(x_BTD, p["q_down"])
        if self.norm == "rms":
            low = F.rms_norm(low, (self.rank,), p["q_norm"].to(low.dtype), self.eps)
        flat = F.linear(low, p["q_up"], p["q_bias"] if "q" in self.bias else None)
        return transform(flat.unflatten(-1, (-1, p.sizes["dim"])), "q")

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        from .rotary_embedding import Rotary

        yield base(
            project=cls(rank=7), modifiers=(Rotary(),), pattern="causal", kv=1, vdim=5, bias="qkvo"
        )
        yield base(project=cls(rank=5, norm="none", eps=1e-5), source=13, kv=2)
