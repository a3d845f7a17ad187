"""Tensor product attention: queries, keys and values are sums of outer products of two factors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from ..interfaces import Project
from ..interfaces.core_types import (
    AxisLayout,
    CallSize,
    CoreShape,
    Param,
    PartParams,
    SpecFactory,
    TransformsQK,
)
from ..interfaces.part import part
from ..spec.attention_spec import AttentionSpec
from .initialisers import weight, xavier_uniform


@part
class TensorProduct(Project):
    """k_h = 1/R sum over r of a_hr(z) b_r(z), with numbers a = z A for each head and vectors
    b = z B for all; q and v likewise (2501.06425).

    The factors of keys and values are cached: `rank` times a number for each head and a vector.
    RoPE turns the vectors b, which is the same as turning the keys. `query_rank` is the R of
    queries. At 32 heads of 64 channels and rank 2 a token has 384 numbers, those of plain heads
    4,096:

    >>> import headwise as hw
    >>> spec = hw.design(model=2048, heads=32, project=TensorProduct())
    >>> hw.costs.cached_numbers_per_token(spec), 2 * 2 * (32 + 64)
    (384, 384)
    """

    paper = "2501.06425"
    disagreements: ClassVar[tuple[str, ...]] = (
        "The released code starts the factors in other ranges than the paper; here all start by "
        "Xavier's rule over a whole matrix.",
    )
    supports_grouping: ClassVar[bool] = False
    rank: int = 2
    query_rank: int = 6
    field_minima: ClassVar = {"rank": 1, "query_rank": 1}

    def sizes(self, spec: AttentionSpec) -> Mapping[str, int]:
        return {"rank": self.rank, "query_rank": self.query_rank}

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        return {
            "q_heads": weight("(q query_rank) model", xavier_uniform, "query"),
            "q_vectors": weight("(query_rank dim) model", xavier_uniform, "query"),
            "k_heads": weight("(kv rank) source", xavier_uniform, "source"),
            "k_vectors": weight("(rank dim) source", xavier_uniform, "source"),
            "v_heads": weight("(kv rank) source", xavier_uniform, "source"),
            "v_vectors": weight("(rank vdim) source", xavier_uniform, "source"),
        }

    def kv_entry_layouts(self, spec: AttentionSpec) -> Mapping[str, AxisLayout]:
        return {
            "k_heads": AxisLayout.parse("kv rank"),
            "k_vectors": AxisLayout.parse("rank dim"),
            "v_heads": AxisLayout.parse("kv rank"),
            "v_vectors": AxisLayout.parse("rank vdim"),
        }

    def flops(self, spec: AttentionSpec, work: CallSize) -> int:
        heads = spec.heads
        queries = work.tokens("query") * heads.q * self.query_rank * heads.dim
        keys = work.tokens("recalled") * heads.kv * self.rank * (heads.dim + heads.vdim)
        return 2 * (queries + keys)

    def core(self, spec: AttentionSpec) -> CoreShape:
        heads = spec.heads
        scale = heads.dim**-0.5
        keys = heads.kv_head_of_query
        return CoreShape(keys, spec.score_head_of_row, heads.dim, heads.vdim, scale)

    def project_query(self, x_BTD: Tensor, transform: TransformsQK, p: PartParams) -> Tensor:
        a_BTHR, b_BTRK = self._factors(x_BTD, "q", self.query_rank, p)
        return a_BTHR @ transform(b_BTRK, "q") / self.query_rank

    def project_kv(
        self, z_BSE: Tensor, transform: TransformsQK, p: PartParams
    ) -> dict[str, Tensor]:
        entry: dict[str, Tensor] = {}
        for side in "kv":
            a_BSHR, b_BSRK = self._factors(z_BSE, side, self.rank, p)
            entry |= {f"{side}_heads": a_BSHR, f"{side}_vectors": transform(b_BSRK, side)}
        return entry

    def _factors(self, x: Tensor, side: str, rank: int, p: PartParams) -> tuple[Tensor, Tensor]:
        a = F.linear(x, p[f"{side}_heads"]).unflatten(-1, (-1, rank))
        return a, F.linear(x, p[f"{side}_vectors"]).unflatten(-1, (rank, -1))

    def expand_kv(
        self, entry: Mapping[str, Tensor], transform: TransformsQK, p: PartParams
    ) -> tuple[Tensor, Tensor]:
        k = entry["k_heads"] @ entry["k_vectors"] / self.rank
        return k, entry["v_heads"] @ entry["v_vectors"] / self.rank

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        from .rotary_embedding import Rotary

        yield base(project=cls(), modifiers=(Rotary(),), pattern="causal", vdim=5)
        yield base(project=cls(rank=1, query_rank=2), source=13)
