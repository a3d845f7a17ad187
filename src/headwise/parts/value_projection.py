"""A projection with values only: without queries and keys, weights do not depend on the tokens' contents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Self

import torch.nn.functional as F
from torch import Tensor

from ..interfaces import Project, QKTransform
from ..interfaces.axis_layout import AxisLayout
from ..interfaces.core_types import CoreShape, Param, PartParams, SpecFactory, TransformsQK
from ..interfaces.part import part
from ..spec.attention_spec import AttentionSpec
from .initialisers import xavier_uniform, zeros_init
from .linear_projection import absorb_matrix_per_head
from .mean_attention import Average


@part
class Values(Project):
    """v = z W_V + b_V, without q and k: every score starts at 0.

    With Average it is the averaging branch of merged attention (1908.11365), with `Learned` scores a synthesizer
    (2005.00743), with T5Bias or Alibi attention by position only. The only weights are W_V and W_O:

    >>> import headwise as hw
    >>> hw.costs.count_parameters(hw.design(model=8, heads=2, project=Values()))  # 2 d^2
    128
    """

    paper = "1908.11365"
    bias: str = ""

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        if self.bias not in ("", "v"):
            yield f"Values(bias={self.bias!r}) is unknown; use '' or 'v'"
        if not spec.similarity.linear:
            yield f"Values has no queries and keys for {type(spec.similarity).__name__}; use similarity Dot()"
        for name, transform in spec.parts_of(QKTransform):
            if transform.transformed_sides(spec) & set("qk"):
                yield f"Values has no queries and keys for {name}; leave it out, or use project Direct()"

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        rows = f"({spec.heads.value_axis} vdim)"
        weights = {"v": Param(AxisLayout.parse(f"{rows} source"), xavier_uniform, "source")}
        return weights | ({"v_bias": Param(AxisLayout.parse(rows), zeros_init)} if self.bias else {})

    def kv_entry_layouts(self, spec: AttentionSpec) -> Mapping[str, AxisLayout]:
        return {"v": AxisLayout.parse(f"{spec.heads.value_axis} vdim")}

    def transformed_dims(self, spec: AttentionSpec) -> int:
        return 0

    def constant_biases(self, spec: AttentionSpec, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        heads = spec.heads
        if not self.bias:
            return {}
        value_heads = [heads.value_head_of_row[row] for row in spec.score_head_of_row]
        return {"v": weights["project.v_bias"].view(heads.num_value_heads, heads.vdim)[value_heads]}

    def without_biases(self, biases: frozenset[str]) -> Self:
        return replace(self, bias="" if "v" in biases else self.bias)

    def absorb_matrix(
        self, spec: AttentionSpec, weights: Mapping[str, Tensor], side: str, matrix: Tensor
    ) -> Mapping[str, Tensor]:
        names = [key for key in ("v", "v_bias") if key in self.params(spec)]
        return absorb_matrix_per_head(weights, names, matrix) if side == "v" else {}

    def core(self, spec: AttentionSpec) -> CoreShape:
        heads = spec.heads
        return CoreShape(
            heads.kv_head_of_query,
            tuple(heads.value_head_of_row[row] for row in spec.score_head_of_row),
            0,
            heads.vdim,
            1.0,
        )

    def project_query(self, x_BTD: Tensor, transform: TransformsQK, p: PartParams) -> Tensor:
        return x_BTD.new_zeros(*x_BTD.shape[:2], p.sizes["q"], 0)

    def project_kv(self, z_BSE: Tensor, transform: TransformsQK, p: PartParams) -> dict[str, Tensor]:
        v = F.linear(z_BSE, p["v"], p["v_bias"] if self.bias else None)
        return {"v": transform(v.unflatten(-1, (-1, p.sizes["vdim"])), "v")}

    def expand_kv(self, entry: Mapping[str, Tensor], transform: TransformsQK, p: PartParams) -> tuple[Tensor, Tensor]:
        v_BSGV = entry["v"]
        return v_BSGV.new_zeros(*v_BSGV.shape[:2], p.sizes["kv"], 0), v_BSGV

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        from .alibi import Alibi

        yield base(project=cls(), normaliser=Average(), pattern="causal", kv=3, vdim=5)
        yield base(project=cls(bias="v"), kv=2, source=13)
        yield base(project=cls(), modifiers=(Alibi(),), pattern="window(4)")
