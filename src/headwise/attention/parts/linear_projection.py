"""Linear projections of the input: the usual queries, keys and values, or values only.

Without queries and keys, weights do not depend on the tokens' contents.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.linear import linear, linear_many
from ..interfaces import Project, QKTransform
from ..interfaces.core_types import (
    AxisLayout,
    CoreShape,
    Param,
    PartParams,
    SpecFactory,
    TransformsQK,
)
from ..interfaces.part import part
from ..spec.attention_spec import AttentionSpec
from .initialisers import weight, xavier_uniform, zeros_init
from .synthesizer import AverageNormaliser


@dataclass(frozen=True, repr=False)
class HeadProjection(Project):
    """Base class of projects with weights and biases per head, named by their side."""

    kv_only_params: ClassVar = ("k_bias", "v_bias")
    bias: str = ""

    def constant_biases(
        self, spec: AttentionSpec, weights: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        heads = spec.heads
        shapes = {"k": (heads.kv, heads.dim), "v": (heads.num_value_heads, heads.vdim)}
        biases = {
            side: weights[f"project.{side}_bias"].view(shape)
            for side, shape in shapes.items()
            if side in self.bias
        }
        return biases | {"v": biases["v"][[*spec.value_head_of_row]]} if "v" in biases else biases

    def without_biases(self, biases: frozenset[str]) -> Self:
        return replace(self, bias="".join(side for side in self.bias if side not in biases))

    def absorb_matrix(
        self, spec: AttentionSpec, weights: Mapping[str, Tensor], side: str, matrix: Tensor
    ) -> Mapping[str, Tensor]:
        names = [key for key in (side, f"{side}_bias") if key in self.params(spec)]
        return absorb_matrix_per_head(weights, names, matrix)


class KeyValueProjection(HeadProjection):
    """Base class of projects that cache keys z W_K + b_K and values z W_V + b_V."""

    uses_head_dims: ClassVar[bool] = True
    caches_keys_and_values: ClassVar[bool] = True
    letter_fields: ClassVar = {"bias": "qkv"}

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        axis = spec.heads.value_axis
        rows = {"q": "(q dim)", "k": "(kv dim)", "v": f"({axis} vdim)"}
        weights = {side: weight(f"{rows[side]} source", xavier_uniform, "source") for side in "kv"}
        return weights | {f"{side}_bias": weight(rows[side], zeros_init) for side in self.bias}

    def kv_entry_layouts(self, spec: AttentionSpec) -> Mapping[str, AxisLayout]:
        return {
            "k": AxisLayout.parse("kv dim"),
            "v": AxisLayout.parse(f"{spec.heads.value_axis} vdim"),
        }

    def core(self, spec: AttentionSpec) -> CoreShape:
        heads = spec.heads
        keys = heads.kv_head_of_query
        return CoreShape(keys, spec.value_head_of_row, heads.dim, heads.vdim, heads.dim**-0.5)

    def project_kv(
        self, z_BSE: Tensor, transform: TransformsQK, p: PartParams
    ) -> dict[str, Tensor]:
        axes = {"k": ("kv", "dim"), "v": ("v", "vdim")}
        if set(self.bias) & set("kv"):
            projected = [self._project(z_BSE, side, axes[side], p) for side in axes]
        else:  # both projections in one pass over z
            flat = linear_many(z_BSE, (p["k"], p["v"]))
            projected = [_split_heads(y, axes[side], p) for side, y in zip(axes, flat, strict=True)]
        return {side: transform(y, side) for side, y in zip(axes, projected, strict=True)}

    def expand_kv(
        self, entry: Mapping[str, Tensor], transform: TransformsQK, p: PartParams
    ) -> tuple[Tensor, Tensor]:
        return entry["k"], entry["v"]

    def _project(self, x: Tensor, side: str, axes: tuple[str, str], p: PartParams) -> Tensor:
        bias = p[f"{side}_bias"] if side in self.bias else None
        return _split_heads(linear(x, p[side], bias), axes, p)


@part
class LinearProjection(KeyValueProjection):
    """q = x W_Q + b_Q, k = z W_K + b_K, v = z W_V + b_V; keys and values are cached.

    `bias` names the projections that have one: "qkv", "q", "". With 8 query heads of 64 channels on
    2 key-value heads, 256 numbers are cached per token:

    >>> import headwise as hw
    >>> hw.costs.cached_numbers_per_token(hw.design(model=512, heads=8, kv=2))
    256
    """

    paper = "1706.03762"

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        return {"q": weight("(q dim) model", xavier_uniform, "query"), **super().params(spec)}

    def project_query(self, x_BTD: Tensor, transform: TransformsQK, p: PartParams) -> Tensor:
        return transform(self._project(x_BTD, "q", ("q", "dim"), p), "q")

    def project_qkv(
        self, x_BTD: Tensor, transform: TransformsQK, p: PartParams
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if self.bias:
            return super().project_qkv(x_BTD, transform, p)
        batch, tokens = x_BTD.shape[:2]
        sizes = p.sizes
        q, k, v = linear_many(x_BTD, (p["q"], p["k"], p["v"]))
        q_BTHK = q.view(batch, tokens, sizes["q"], sizes["dim"])
        k_BSGK = k.view(batch, tokens, sizes["kv"], sizes["dim"])
        transformed = transform(k_BSGK, "k")
        if v._base is not None and transformed is not k_BSGK and v.requires_grad:
            # q, k and v are views of one tensor, which v would keep alive until the backward pass
            v = v.clone()
        v_BSGV = v.view(batch, tokens, sizes["v"], sizes["vdim"])
        entry = {"k": transformed, "v": transform(v_BSGV, "v")}
        return transform(q_BTHK, "q"), entry

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base()
        yield base(kv=2, vdim=5, bias="qkvo")
        yield base(kv=3, project=cls(bias="v"))
        yield base(kv=1, source=13, project=cls(bias="q"))


def _split_heads(y: Tensor, axes: tuple[str, str], p: PartParams) -> Tensor:
    return y.view(y.shape[0], y.shape[1], p.sizes[axes[0]], p.sizes[axes[1]])


def absorb_matrix_per_head(
    weights: Mapping[str, Tensor], names: Iterable[str], matrix: Tensor
) -> dict[str, Tensor]:
    """The named weights of a project after folding in a matrix that multiplies the channels of each
    head.

    The rows of the weights must be the channels of the heads; `matrix` is [out, in] or [heads, out,
    in].
    """
    width = matrix.shape[-1]
    old = {f"project.{name}": weights[f"project.{name}"] for name in names}
    by_head = {name: rows.reshape(rows.shape[0] // width, width, -1) for name, rows in old.items()}
    return {
        name: torch.matmul(matrix, heads).reshape(old[name].shape)
        for name, heads in by_head.items()
    }


@part
class ValueProjection(HeadProjection):
    """v = z W_V + b_V, without q and k: every score starts at 0.

    With AverageNormaliser it is the averaging branch of merged attention (1908.11365), with
    `LearnedScores` scores a synthesizer (2005.00743), with T5Bias or Alibi attention by position
    only. The only weights are W_V and W_O:

    >>> import headwise as hw
    >>> hw.costs.count_parameters(hw.design(model=8, heads=2, project=ValueProjection()))  # 2 d^2
    128
    """

    paper = "1908.11365"
    field_choices: ClassVar = {"bias": ("", "v")}

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        if not spec.similarity.linear:
            yield (
                f"ValueProjection has no queries and keys for {type(spec.similarity).__name__}; "
                "use similarity DotProduct()"
            )
        for name, transform in spec.parts_of(QKTransform):
            if transform.transformed_sides(spec) & set("qk"):
                yield (
                    f"ValueProjection has no queries and keys for {name}; leave it out, or use "
                    "project LinearProjection()"
                )

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        rows = f"({spec.heads.value_axis} vdim)"
        weights = {"v": weight(f"{rows} source", xavier_uniform, "source")}
        return weights | ({"v_bias": weight(rows, zeros_init)} if self.bias else {})

    def kv_entry_layouts(self, spec: AttentionSpec) -> Mapping[str, AxisLayout]:
        return {"v": AxisLayout.parse(f"{spec.heads.value_axis} vdim")}

    def transformed_dims(self, spec: AttentionSpec) -> int:
        return 0

    def core(self, spec: AttentionSpec) -> CoreShape:
        heads = spec.heads
        return CoreShape(heads.kv_head_of_query, spec.value_head_of_row, 0, heads.vdim, 1.0)

    def project_query(self, x_BTD: Tensor, transform: TransformsQK, p: PartParams) -> Tensor:
        return x_BTD.new_zeros(*x_BTD.shape[:2], p.sizes["q"], 0)

    def project_kv(
        self, z_BSE: Tensor, transform: TransformsQK, p: PartParams
    ) -> dict[str, Tensor]:
        v = F.linear(z_BSE, p["v"], p["v_bias"] if self.bias else None)
        return {"v": transform(v.unflatten(-1, (-1, p.sizes["vdim"])), "v")}

    def expand_kv(
        self, entry: Mapping[str, Tensor], transform: TransformsQK, p: PartParams
    ) -> tuple[Tensor, Tensor]:
        v_BSGV = entry["v"]
        return v_BSGV.new_zeros(*v_BSGV.shape[:2], p.sizes["kv"], 0), v_BSGV

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        from .relative_position_bias import Alibi

        yield base(project=cls(), normaliser=AverageNormaliser(), pattern="causal", kv=3, vdim=5)
        yield base(project=cls(bias="v"), kv=2, source=13)
        yield base(project=cls(), modifiers=(Alibi(),), pattern="window(4)")
