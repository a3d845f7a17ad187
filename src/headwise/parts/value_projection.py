"""Values alone: neither queries nor keys, so nothing of the weights comes from the tokens' contents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Self

import torch.nn.functional as F
from torch import Tensor

from ..interfaces import Project, QKTransform
from ..interfaces.axis_layout import AxisLayout
from ..interfaces.core_types import CoreShape, Param, PartParams, SpecFactory, TransformsQK
from ..interfaces.registry import part
from ..spec.attention_spec import AttentionSpec
from .initialisers import xavier_uniform, zeros_init
from .linear_projection import absorb_matrix_per_head
from .mean_attention import Average


@part
class Values(Project):
    """v = z W_V + b_V, and no q or k: every score starts at 0.

    With Average the averaging branch of merged attention (1908.11365), with a `Learned` score a synthesizer
    (2005.00743), with T5Bias or Alibi attention by position alone. Of the parameters W_V and W_O are left:

    >>> import headwise as hw
    >>> hw.costs.count_parameters(hw.design(model=8, heads=2, project=Values()))  # 2 d^2
    128
    """

    paper = "1908.11365"
    bias: str = ""

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        if self.bias not in ("", "v"):
            yield f"Values(bias={self.bias!r}) asks for biases it has no use for; use '' or 'v'"
        if not spec.similarity.linear:
            yield f"Values has no q and k that {type(spec.similarity).__name__} could compare; use similarity Dot()"
        for name, turn in spec.parts_of(QKTransform):
            if turn.transformed_sides(spec) & set("qk"):
                yield f"Values has no q and k for {name} to turn; leave it out, or use project Direct()"

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
        reads = [heads.value_head_of_row[voice] for voice in spec.score_head_of_row]
        return {"v": weights["project.v_bias"].view(heads.num_value_heads, heads.vdim)[reads]} if self.bias else {}

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
            heads.reads, tuple(heads.value_head_of_row[row] for row in spec.score_head_of_row), 0, heads.vdim, 1.0
        )

    def project_query(self, x_BTD: Tensor, turn: TransformsQK, p: PartParams) -> Tensor:
        return x_BTD.new_zeros(*x_BTD.shape[:2], p.sizes["q"], 0)

    def project_kv(self, z_BSE: Tensor, turn: TransformsQK, p: PartParams) -> dict[str, Tensor]:
        v = F.linear(z_BSE, p["v"], p["v_bias"] if self.bias else None)
        return {"v": turn(v.unflatten(-1, (-1, p.sizes["vdim"])), "v")}

    def expand_kv(self, entry: Mapping[str, Tensor], turn: TransformsQK, p: PartParams) -> tuple[Tensor, Tensor]:
        v_BSGV = entry["v"]
        return v_BSGV.new_zeros(*v_BSGV.shape[:2], p.sizes["kv"], 0), v_BSGV

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        from .alibi import Alibi

        yield base(project=cls(), normaliser=Average(), pattern="causal", kv=3, vdim=5)
        yield base(project=cls(bias="v"), kv=2, source=13)
        yield base(project=cls(), modifiers=(Alibi(),), pattern="window(4)")
