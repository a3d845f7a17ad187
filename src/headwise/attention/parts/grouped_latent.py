"""Grouped latent attention: several latents, each for the keys and values of a group of heads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

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
from .initialisers import ones_init, weight, xavier_uniform, zeros_init
from .latent_attention import MLAProjection


@part
class GroupedLatent(MLAProjection):
    """c_g = RMSNorm(z W_DKV^g) for each group g of heads, r = RoPE(z W_KR) for all;
    k_h = [c_g W_UK_h, r], v_h = c_g W_UV_h (2505.21487).

    MLA with several latents of `rank` numbers: as many as key-value heads, `kv`, each used by the
    query heads of its group. Latents can so be divided over devices together with their heads. With
    two latents of 256 a token has as many numbers as with MLA's one of 512. With `branches`, that
    many score heads, which `SumRows` adds up, share a query (2603.02188):

    >>> import headwise as hw
    >>> spec = hw.design(model=4096, heads=32, kv=2, dim=128, project=GroupedLatent(rank=256))
    >>> hw.costs.cached_numbers_per_token(spec), 2 * 256 + 64
    (576, 576)
    """

    paper = "2505.21487"
    disagreements: ClassVar[tuple[str, ...]] = (
        "The code of 2603.02188 multiplies latents of queries and of keys and values after their "
        "norm by sqrt(model / rank), that of 2505.21487 and headwise do not. Norms with weights "
        "multiplied by that number compute the same.",
        "The code of 2505.21487 has biases in all projections of queries and latents; here only "
        "queries may have one.",
    )
    supports_grouping: ClassVar[bool] = True
    branches: int = 1
    field_choices: ClassVar = {**MLAProjection.field_choices, "bias": ("", "q")}
    field_minima: ClassVar = {**MLAProjection.field_minima, "branches": 1}

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        if spec.heads.value_heads:
            yield "GroupedLatent has one latent for keys and values; leave value_heads out"
        if self.branches <= 1:
            return
        fact = f"GroupedLatent(branches={self.branches})"
        if len(spec.score_head_of_output) * self.branches != spec.heads.q:
            yield (
                f"{fact} has one query for {self.branches} score heads of an output head, but "
                f"{spec.heads.q} score heads make {len(spec.score_head_of_output)} output heads; "
                f"use modifier SumRows(rows={self.branches})"
            )
            return
        first = frozenset(range(self.branches))
        for _, other in spec.parts():
            if other.required_score_heads(spec, first) != first:
                name = type(other).__name__
                yield f"{fact} shares queries, so no part may mix heads; leave {name} out"

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        applied = "query" if self.form == "absorbed" else "recalled"
        of_queries = {
            name: param for name, param in super().params(spec).items() if name.startswith("q")
        }
        if self.branches > 1:
            name = "q_up" if self.query_rank else "q"
            source = "query_rank" if self.query_rank else "model"
            wide = "(out [dim|rope])"
            of_queries[name] = weight(f"{wide} {source}", xavier_uniform, "query")
            of_queries |= {"q_bias": weight(wide, zeros_init)} if self.bias else {}
        return of_queries | {
            "kv_down": weight("(kv rank) source", xavier_uniform, "source"),
            "rotary_down": weight("rope source", xavier_uniform, "source"),
            **({"kv_norm": weight("kv rank", ones_init)} if self.norm == "rms" else {}),
            "k_up": weight("(q dim) rank", xavier_uniform, applied),
            "v_up": weight("(q vdim) rank", xavier_uniform, applied),
        }

    def flops(self, spec: AttentionSpec, work: CallSize) -> int:
        if self.form == "expanded":
            return 0
        unused = spec.heads.q - len(spec.score_head_of_row)
        return -2 * unused * spec.heads.vdim * self.rank * work.tokens("query")

    def kv_entry_layouts(self, spec: AttentionSpec) -> Mapping[str, AxisLayout]:
        return {"c": AxisLayout.parse("kv rank"), "r": AxisLayout.parse("rope")}

    def absorb_matrix(
        self, spec: AttentionSpec, weights: Mapping[str, Tensor], side: str, matrix: Tensor
    ) -> Mapping[str, Tensor]:
        return {}  # matrices of values belong to key-value heads, which are latents here

    def core(self, spec: AttentionSpec) -> CoreShape:
        heads = spec.heads
        scale = (heads.dim + self.rope) ** -0.5
        rows = spec.score_head_of_row
        if self.form == "expanded":
            width = heads.dim + self.rope
            return CoreShape(tuple(range(heads.q)), rows, width, heads.vdim, scale)
        latents = heads.kv_head_of_query
        of_rows = tuple(latents[head] for head in rows)
        return CoreShape(latents, of_rows, self.rank + self.rope, self.rank, scale)

    def project_kv(
        self, z_BSE: Tensor, transform: TransformsQK, p: PartParams
    ) -> dict[str, Tensor]:
        c_BSGR = F.linear(z_BSE, p["kv_down"]).unflatten(-1, (-1, self.rank))
        if self.norm == "rms":
            c_BSGR = F.rms_norm(c_BSGR, (self.rank,), None, self.eps)
            c_BSGR = c_BSGR * p["kv_norm"].to(c_BSGR.dtype)
        r = F.linear(z_BSE, p["rotary_down"])
        return {"c": c_BSGR, "r": transform(r[..., None, :], "k").squeeze(-2)}

    def expand_kv(
        self, entry: Mapping[str, Tensor], transform: TransformsQK, p: PartParams
    ) -> tuple[Tensor, Tensor]:
        c_BSGR = entry["c"]
        shared = entry["r"][..., None, :]
        if self.form == "absorbed":
            keys = torch.cat([c_BSGR, shared.expand(*c_BSGR.shape[:-1], -1)], -1)
            return keys, c_BSGR
        k, v = (self._multiply_by_group(c_BSGR, p[name], p) for name in ("k_up", "v_up"))
        return torch.cat([k, shared.expand(*k.shape[:-1], -1)], -1), v

    @staticmethod
    def _multiply_by_group(c_BSGR: Tensor, up: Tensor, p: PartParams) -> Tensor:
        """The product of each head's rows of `up` with the latent of its group."""
        heads = len(p.kv_head_of_query)
        by_head = up.unflatten(0, (heads, -1))
        size, rest = divmod(heads, c_BSGR.shape[2])
        if rest or p.kv_head_of_query != tuple(head // size for head in range(heads)):
            c_BSHR = c_BSGR[:, :, list(p.kv_head_of_query)]
            return torch.einsum("bshr,hkr->bshk", c_BSHR, by_head)
        by_group = by_head.unflatten(0, (-1, size))
        return torch.einsum("bsgr,ghkr->bsghk", c_BSGR, by_group).flatten(2, 3)

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        from .rotary_embedding import Rotary
        from .row_groups import SumRows

        rotary = (Rotary(),)
        yield base(project=cls(rank=8, rope=2), modifiers=rotary, pattern="causal", vdim=5, kv=2)
        yield base(project=cls(rank=8, rope=2, query_rank=9), modifiers=rotary, kv=3)
        yield base(project=cls(rank=8, rope=0, form="absorbed", norm="none", bias="q"), kv=2)
        branches = cls(rank=8, rope=2, query_rank=9, branches=2, bias="q")
        yield base(project=branches, modifiers=(*rotary, SumRows()), pattern="causal", kv=2, vdim=5)
