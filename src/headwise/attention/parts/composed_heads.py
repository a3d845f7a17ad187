"""Explicit composition of heads: keys and values are sums of cached ones with learned weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import ClassVar, Self

import torch
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


def init_composition(shape: tuple[int, ...]) -> Tensor:
    """Weights [heads, components] with which each head starts as one component, like a group of
    heads.

    >>> init_composition((4, 2)).tolist()
    [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]
    """
    heads, components = shape
    first = torch.arange(heads) * components // heads
    return F.one_hot(first, components).to(torch.get_default_dtype())


@part
class ComposedHeads(Project):
    """k_h = sum over c of A_hc z W_K^c, v_h = sum over c of B_hc z W_V^c, with q_h = x W_Q^h
    (2601.19611).

    Only the `components` keys and values are cached (default: as many as heads); fewer make the
    others "virtual heads". RoPE turns the components, which is the same as turning their sums. The
    heads of the paper also have a norm of their outputs: `HeadNorm`. With half as many components
    as heads, the cache is half as large:

    >>> import headwise as hw
    >>> [
    ...     hw.costs.cached_numbers_per_token(
    ...         hw.design(model=512, heads=8, project=ComposedHeads(components=c))
    ...     )
    ...     for c in (8, 4)
    ... ]
    [1024, 512]
    """

    paper = "2601.19611"
    disagreements: ClassVar[tuple[str, ...]] = (
        "Descriptions of the paper disagree on the group norm of heads: RMSNorm or GroupNorm, with "
        "weights for each head or for all. No code is released; the preset has HeadNorm, an "
        "RMSNorm of each head's output.",
        "The start of the sums is not published; here each head starts as one component.",
    )
    supports_grouping: ClassVar[bool] = False
    components: int = 0
    field_minima: ClassVar = {"components": 0}

    def sizes(self, spec: AttentionSpec) -> Mapping[str, int]:
        return {"component": self.components or spec.heads.q}

    def with_fixed_sizes(self, spec: AttentionSpec) -> Self:
        return replace(self, components=self.sizes(spec)["component"])

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        return {
            "q": weight("(q dim) model", xavier_uniform, "query"),
            "k": weight("(component dim) source", xavier_uniform, "source"),
            "v": weight("(component vdim) source", xavier_uniform, "source"),
            "key_sum": weight("kv component", init_composition),
            "value_sum": weight("kv component", init_composition),
        }

    def kv_entry_layouts(self, spec: AttentionSpec) -> Mapping[str, AxisLayout]:
        return {"k": AxisLayout.parse("component dim"), "v": AxisLayout.parse("component vdim")}

    def flops(self, spec: AttentionSpec, work: CallSize) -> int:
        channels = spec.heads.kv * (spec.heads.dim + spec.heads.vdim)
        return 2 * work.tokens("recalled") * self.sizes(spec)["component"] * channels

    def core(self, spec: AttentionSpec) -> CoreShape:
        heads = spec.heads
        scale = heads.dim**-0.5
        keys = heads.kv_head_of_query
        return CoreShape(keys, spec.score_head_of_row, heads.dim, heads.vdim, scale)

    def project_query(self, x_BTD: Tensor, transform: TransformsQK, p: PartParams) -> Tensor:
        return transform(F.linear(x_BTD, p["q"]).unflatten(-1, (-1, p.sizes["dim"])), "q")

    def project_kv(
        self, z_BSE: Tensor, transform: TransformsQK, p: PartParams
    ) -> dict[str, Tensor]:
        k_BSCK = F.linear(z_BSE, p["k"]).unflatten(-1, (-1, p.sizes["dim"]))
        v_BSCV = F.linear(z_BSE, p["v"]).unflatten(-1, (-1, p.sizes["vdim"]))
        return {"k": transform(k_BSCK, "k"), "v": transform(v_BSCV, "v")}

    def expand_kv(
        self, entry: Mapping[str, Tensor], transform: TransformsQK, p: PartParams
    ) -> tuple[Tensor, Tensor]:
        return p["key_sum"] @ entry["k"], p["value_sum"] @ entry["v"]

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        from .rotary_embedding import Rotary

        yield base(project=cls(), modifiers=(Rotary(),), pattern="causal", vdim=5)
        yield base(project=cls(components=2), source=13)
