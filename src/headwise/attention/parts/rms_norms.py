"""Norms within attention: of queries and keys before scores are computed (QK-norm), and of each
head's output.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ..interfaces import OutputStep, QKTransform
from ..interfaces.core_types import Param, PartParams, SpecFactory, SymmetryGroup
from ..interfaces.part import part
from ..spec.attention_spec import AttentionSpec
from .initialisers import constant_value, normal_with_std, ones_init, weight, zeros_init

UNIT_KINDS = (("l2", "head"), ("l2-embedding", "head"))


@part
class QKNorm(QKTransform):
    """Normalises q and k, each with its own weights.

    kind="rms", scope="head": RMSNorm over the channels of each head, as in Qwen3 (2505.09388);
    scope="full": over all heads at once, as in OLMo 2 (2501.00656). kind="offset": RMSNorm per head
    with weights stored as w - 1, as in Gemma 3 (2503.19786). kind="l2": unit vectors with a learned
    temperature per head in place of 1/sqrt(dim), so it needs DotProduct(scale=1.0) (2010.04245).
    kind="l2-embedding" adds a learned vector of each head to its unit queries before the
    temperature, which TransNeXt (2311.17132) and MoH-ViT call query embedding. Swin v2 stores the
    logarithm of the temperature, and TransNeXt softplus^-1 of the temperature over log n for n
    tokens. QK transforms run in the order of the modifiers: write QKNorm before Rotary as in Qwen3,
    or after it.

    >>> import torch
    >>> QKNorm().transform(torch.tensor([[[[3.0, 4.0]]]]), "q", None, {"q": torch.ones(2)}).round(
    ...     decimals=3
    ... )
    tensor([[[[0.8490, 1.1310]]]])
    """

    paper = "2010.04245"
    kv_only_params: ClassVar = ("k",)
    kind: str = "rms"
    scope: str = "head"
    eps: float = 1e-6
    temperature: float = 10.0
    positive_fields: ClassVar = ("eps",)

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        if (self.kind, self.scope) not in (
            ("rms", "head"),
            ("rms", "full"),
            ("offset", "head"),
            *UNIT_KINDS,
        ):
            yield (
                f"QKNorm(kind={self.kind!r}, scope={self.scope!r}) is not defined; use kind 'rms' "
                "with scope 'head' or "
                "'full', or kinds 'offset', 'l2' and 'l2-embedding' with scope 'head'"
            )
        if self._has_unit_vectors and spec.similarity.score_scale(spec.core) != 1.0:
            yield (
                f"QKNorm(kind={self.kind!r}) has a temperature in place of 1/sqrt(dim); use "
                "similarity DotProduct(scale=1.0)"
            )
        if not spec.project.uses_head_dims:
            name = type(spec.project).__name__
            yield (
                f"QKNorm would normalise only a slice of the queries and keys of {name}; leave "
                "QKNorm out"
            )

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        if self._has_unit_vectors:
            temperature = {"temperature": weight("q", constant_value(self.temperature))}
            embedding = {"embedding": weight("q dim", normal_with_std(0.02))}
            return temperature if self.kind == "l2" else temperature | embedding
        axes = (
            {"q": "(q dim)", "k": "(kv dim)"} if self.scope == "full" else {"q": "dim", "k": "dim"}
        )
        start = zeros_init if self.kind == "offset" else ones_init
        return {side: weight(axis, start) for side, axis in axes.items()}

    def required_score_heads(self, spec: AttentionSpec, heads: frozenset[int]) -> frozenset[int]:
        return frozenset(range(spec.heads.q)) if self.scope == "full" else heads

    def concatenates_key_heads(self) -> bool:
        return self.scope == "full"

    @property
    def _has_unit_vectors(self) -> bool:
        return (self.kind, self.scope) in UNIT_KINDS

    def normalises_length(self) -> bool:
        return self.scope == "head" and self.kind != "l2-embedding"

    def symmetry(self, spec: AttentionSpec, side: str, p: Mapping[str, Tensor]) -> SymmetryGroup:
        if side == "v" or self.kind == "l2":
            return SymmetryGroup.full({"k": spec.heads.dim, "v": spec.heads.vdim}[side])
        if self.kind == "l2-embedding":  # the embedding has a direction
            return SymmetryGroup()
        scales = torch.cat([p[own].reshape(-1, spec.heads.dim) for own in "qk"])
        return SymmetryGroup.commuting_with_scales(scales.T.tolist())

    def transform(self, x_BTHK: Tensor, side: str, precomputed: None, p: PartParams) -> Tensor:
        if self._has_unit_vectors:
            unit = F.normalize(x_BTHK, dim=-1, eps=self.eps)
            if side != "q":
                return unit
            unit = unit + p["embedding"] if self.kind == "l2-embedding" else unit
            return unit * p["temperature"][:, None]
        scale = p[side].to(x_BTHK.dtype)  # under autocast only x has low precision
        scale = scale + 1 if self.kind == "offset" else scale
        if self.scope == "full":
            flat = x_BTHK.flatten(-2)
            return F.rms_norm(flat, flat.shape[-1:], scale, self.eps).view_as(x_BTHK)
        return F.rms_norm(x_BTHK, x_BTHK.shape[-1:], scale, self.eps)

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        from .dot_product import DotProduct

        yield base(modifiers=(cls(),), kv=2)
        yield base(modifiers=(cls(scope="full", eps=1e-5),), kv=2)
        yield base(modifiers=(cls(kind="offset"),), kv=2)
        yield base(modifiers=(cls(kind="l2", temperature=3.0),), similarity=DotProduct(scale=1.0))
        yield base(
            modifiers=(cls(kind="l2-embedding", temperature=3.0),),
            similarity=DotProduct(scale=1.0),
            kv=2,
        )


@part
class HeadNorm(OutputStep):
    """o_h -> w o_h / sqrt(mean(o_h^2) + eps): RMSNorm of every head's output over its own channels.

    This is the norm of differential attention (2410.05258) as a separate part. scope="shared": one
    weight w of vdim numbers for all heads, as in its released code; scope="head": one per output
    head, as in a group norm (2307.08621). rescale="depth" multiplies by 1 - l0, where l0 = 0.8 -
    0.6 exp(-0.3 depth) and depth counts layers from 0, as in multi-token attention (2504.00927).

    >>> import torch
    >>> HeadNorm().transform_outputs(
    ...     torch.tensor([[[[3.0, 4.0]]]]), torch.ones(1, 1, 1), {"scale": torch.ones(2)}
    ... )
    tensor([[[[0.8485, 1.1314]]]])
    """

    paper = "2410.05258"
    scope: str = "shared"
    eps: float = 1e-5
    rescale: str = "none"
    depth: int = 0
    field_choices: ClassVar = {"scope": ("shared", "head"), "rescale": ("none", "depth")}
    field_minima: ClassVar = {"depth": 0}
    positive_fields: ClassVar = ("eps",)

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        steps = [step for _, step in spec.parts_of(OutputStep)]
        later = [type(step).__name__ for step in steps[steps.index(self) :] if step.combines_rows]
        if self.scope == "head" and later:
            yield (
                f"HeadNorm(scope='head') would run before {later[0]} combines rows; write it "
                f"after {later[0]}"
            )

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        return {"scale": weight("vdim" if self.scope == "shared" else "out vdim", ones_init)}

    def at_depth(self, layer: int, layers: int) -> Self:
        return replace(self, depth=layer) if self.rescale == "depth" else self

    def symmetry(self, spec: AttentionSpec, side: str, p: Mapping[str, Tensor]) -> SymmetryGroup:
        of_scale = SymmetryGroup.commuting_with_scales(
            p["scale"].reshape(-1, spec.heads.vdim).T.tolist()
        )
        return of_scale if side == "v" else super().symmetry(spec, side, p)

    def transform_outputs(self, o_BTRV: Tensor, x_BTD: Tensor, p: PartParams) -> Tensor:
        normed = F.rms_norm(o_BTRV, o_BTRV.shape[-1:], eps=self.eps) * p["scale"]
        if self.rescale == "none":
            return normed
        return normed * (0.2 + 0.6 * math.exp(-0.3 * self.depth))

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(modifiers=(cls(),), pattern="causal", kv=2, vdim=5)
        yield base(modifiers=(cls(scope="head", eps=1e-2),), vdim=5)
        yield base(modifiers=(cls(rescale="depth", depth=3),))
