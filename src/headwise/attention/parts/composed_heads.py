"""Explicit composition of heads: keys and values are sums of cached ones with learned weights. Also
converts trained multi-head layers to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ...util.errors import SpecError
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
from .initialisers import weight, xavier_uniform, zeros_init
from .linear_projection import LinearProjection


def init_composition(shape: tuple[int, ...]) -> Tensor:
    """Weights [heads, components] with which each head starts as one component, like a group of
    heads.

    >>> init_composition((4, 2)).tolist()
    [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]
    """
    heads, components = shape
    own = [head * components // heads for head in range(heads)]
    return torch.tensor([[float(place == one) for place in range(components)] for one in own])


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
        "How the sums start in a layer that is trained from scratch was not found; here each head "
        "starts as one component.",
    )
    supports_grouping: ClassVar[bool] = False
    kv_only_params: ClassVar = ("k_bias", "v_bias")
    components: int = 0
    bias: str = ""
    field_minima: ClassVar = {"components": 0}
    letter_fields: ClassVar = {"bias": "qkv"}

    def sizes(self, spec: AttentionSpec) -> Mapping[str, int]:
        return {"component": self.components or spec.heads.q}

    def with_fixed_sizes(self, spec: AttentionSpec) -> Self:
        return replace(self, components=self.sizes(spec)["component"])

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        rows = {"q": "(q dim)", "k": "(component dim)", "v": "(component vdim)"}
        return {
            "q": weight(f"{rows['q']} model", xavier_uniform, "query"),
            "k": weight(f"{rows['k']} source", xavier_uniform, "source"),
            "v": weight(f"{rows['v']} source", xavier_uniform, "source"),
            "key_sum": weight("kv component", init_composition),
            "value_sum": weight("kv component", init_composition),
            **{f"{side}_bias": weight(rows[side], zeros_init) for side in self.bias},
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
        return transform(self._project(x_BTD, "q", "dim", p), "q")

    def project_kv(
        self, z_BSE: Tensor, transform: TransformsQK, p: PartParams
    ) -> dict[str, Tensor]:
        axes = {"k": "dim", "v": "vdim"}
        return {side: transform(self._project(z_BSE, side, axes[side], p), side) for side in axes}

    def _project(self, x: Tensor, side: str, axis: str, p: PartParams) -> Tensor:
        bias = p[f"{side}_bias"] if side in self.bias else None
        return F.linear(x, p[side], bias).unflatten(-1, (-1, p.sizes[axis]))

    def expand_kv(
        self, entry: Mapping[str, Tensor], transform: TransformsQK, p: PartParams
    ) -> tuple[Tensor, Tensor]:
        return p["key_sum"] @ entry["k"], p["value_sum"] @ entry["v"]

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        from .rotary_embedding import Rotary

        yield base(project=cls(), modifiers=(Rotary(),), pattern="causal", vdim=5)
        yield base(project=cls(components=2, bias="qkv"), source=13)
        yield base(project=cls(components=3, bias="v"), pattern="window(4)")


class CompositionConversion(NamedTuple):
    """Result of `convert_to_composed`: the layer, and the relative errors of the parameters of keys
    and of values.
    """

    spec: AttentionSpec
    weights: dict[str, Tensor]
    key_error: float
    value_error: float


def convert_to_composed(
    spec: AttentionSpec, weights: Mapping[str, Tensor], components: int
) -> CompositionConversion:
    """Convert a trained layer with `LinearProjection` to `ComposedHeads` with this many components.

    The parameters of the keys of all heads, with their biases, are the rows of a matrix; its
    largest singular vectors are the best components for the sum of squared errors. Values have
    their own. The errors are ||W - W'|| / ||W||; they are 0 with as many components as key-value
    heads. Reconstructing heads from fewer is the "virtual heads" of 2601.19611.

    >>> import headwise as hw
    >>> spec = hw.design(model=8, heads=4, kv=2)
    >>> conversion = convert_to_composed(spec, hw.Attention(spec).state_dict(), 2)
    >>> conversion.spec.project, round(conversion.key_error, 6)
    (ComposedHeads(components=2), 0.0)
    """
    project = spec.project
    if not isinstance(project, LinearProjection):
        raise SpecError(
            f"cannot convert a layer with project {type(project).__name__}; give one with project "
            "LinearProjection"
        )
    heads = spec.heads
    if not 1 <= components <= heads.q:
        raise SpecError(f"components={components} is not within 1..{heads.q}; {heads.kv} is exact")
    if heads.value_heads or heads.rows != heads.q:
        raise SpecError(
            f"cannot convert this layer: keys and values are grouped differently ({heads})"
        )
    new_spec = replace(
        spec,
        heads=replace(heads, kv=heads.q, kv_head_of_query=()),
        project=ComposedHeads(components=components, bias=project.bias),
    )
    errors: dict[str, float] = {}
    new: dict[str, Tensor] = {}
    for side, name in (("k", "key_sum"), ("v", "value_sum")):
        columns = [weights[f"project.{side}"].detach().double()]
        if side in project.bias:
            columns.append(weights[f"project.{side}_bias"].detach().double()[:, None])
        by_head = torch.cat(columns, 1).unflatten(0, (heads.kv, -1))[list(heads.kv_head_of_query)]
        if not by_head.isfinite().all():
            raise SpecError(f"project.{side} has numbers that are not finite; load a sound model")
        left, sizes, right = torch.linalg.svd(by_head.flatten(1), full_matrices=False)
        root = sizes[:components].sqrt()
        missing = components - len(root)  # of a matrix with fewer columns
        new[name] = F.pad(left[:, :components] * root, (0, missing))
        parts = F.pad(root[:, None] * right[:components], (0, 0, 0, missing))
        parts = parts.view(components, *by_head.shape[1:])
        width = weights[f"project.{side}"].shape[1]
        new[side] = parts[..., :width].flatten(0, 1)
        if side in project.bias:
            new[f"{side}_bias"] = parts[..., width].flatten()
        norm = torch.linalg.vector_norm(sizes).clamp(min=torch.finfo(sizes.dtype).tiny)
        errors[side] = float(torch.linalg.vector_norm(sizes[components:]) / norm)
    like = weights["project.k"]
    changed = {f"project.{name}": tensor.to(like) for name, tensor in new.items()}
    copied = {name: weights[name].clone() for name in new_spec.shapes() if name not in changed}
    return CompositionConversion(new_spec, changed | copied, errors["k"], errors["v"])
