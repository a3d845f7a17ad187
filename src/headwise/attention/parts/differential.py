"""Differential attention: subtracts the output of one head of a pair from the other to cancel
common noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ..interfaces.core_types import Param, PartParams, SpecFactory, SymmetryGroup
from ..interfaces.part import part
from ..spec.attention_spec import AttentionSpec
from ..spec.heads import Heads
from .initialisers import normal_with_std, ones_init, weight, xavier_uniform
from .row_groups import RowGroups, repeat_consecutive


class HeadPairs(RowGroups):
    """Base class of steps that compute output head i from the rows of score heads 2i and 2i + 1."""

    @property
    def group_size(self) -> int:
        """Two heads."""
        return 2


@part
class Differential(HeadPairs):
    """o_i = (1 - l0) RMSNorm(softmax(q_2i k_2i) V_i - l softmax(q_2i+1 k_2i+1) V_i), V_i twice as
    wide.

    Version 1 (2410.05258): l = exp(a1.b1) - exp(a2.b2) + l0 with l0 = 0.8 - 0.6 exp(-0.3 depth),
    depth counted from 0, one l for all heads of a layer. `design(heads=h)` makes h pairs of score
    heads. With grouped keys, each head of a pair has its own key head, as in the released flash
    implementation. The released naive one repeats key heads instead, which is
    `design(preset="diff", kv=g, keys="repeated")`.

    >>> (
    ...     round(Differential(depth=0).initial_lambda, 3),
    ...     round(Differential(depth=10).initial_lambda, 3),
    ... )
    (0.2, 0.77)
    """

    paper = "2410.05258"
    disagreements: ClassVar[tuple[str, ...]] = (
        (
            "With grouped keys the released flash code gives each head of a pair its own key. The "
            "naive code repeats "
            "each key `repeats` = heads / kv times and gives score head j the key j // repeats: "
            "both heads of a pair "
            "share a key if `repeats` is even, and if it is odd, some pairs do and others do not. "
            "This follows the "
            'flash code; the preset `diff` has the other as keys="repeated".'
        ),
    )
    depth: int = 0
    eps: float = 1e-5
    field_minima: ClassVar = {"depth": 0}
    positive_fields: ClassVar = ("eps",)

    @property
    def initial_lambda(self) -> float:
        """The initial value of lambda at this depth."""
        return 0.8 - 0.6 * math.exp(-0.3 * self.depth)

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        heads = spec.heads
        grouping_errors = list(self.grouping_errors(heads))
        yield from grouping_errors
        if not grouping_errors and heads.value_head_of_row[::2] != heads.value_head_of_row[1::2]:
            yield (
                "Differential needs pairs of heads that share a value head; use value_heads=(0, "
                "0, 1, 1, ...)"
            )

    def fit_heads(self, heads: Heads) -> Heads:
        doubled = Heads.grouped(q=2 * heads.q, kv=2 * heads.kv, dim=heads.dim)
        kv = heads.kv_head_of_query
        kv_head_of_query = repeat_consecutive([2 * kv_head for kv_head in kv], 2)
        value_heads = repeat_consecutive(kv, 2, distance=0)
        return replace(
            doubled, vdim=2 * heads.dim, kv_head_of_query=kv_head_of_query, value_heads=value_heads
        )

    def at_depth(self, layer: int, layers: int) -> Self:
        return replace(self, depth=layer)

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        lambdas = {name: weight("dim", normal_with_std(0.1)) for name in ("a1", "b1", "a2", "b2")}
        return lambdas | {"norm": weight("vdim", ones_init)}

    def symmetry(self, spec: AttentionSpec, side: str, p: Mapping[str, Tensor]) -> SymmetryGroup:
        of_norm = SymmetryGroup.commuting_with_scales(p["norm"][:, None].tolist())
        return of_norm if side == "v" else super().symmetry(spec, side, p)

    def transform_outputs(self, o_BTRV: Tensor, x_BTD: Tensor, p: PartParams) -> Tensor:
        exact = torch.promote_types(o_BTRV.dtype, torch.float32)
        up = (p["a1"] * p["b1"]).sum(dtype=exact).exp()
        down = (p["a2"] * p["b2"]).sum(dtype=exact).exp()
        noise = (up - down + self.initial_lambda).to(o_BTRV.dtype)
        difference = o_BTRV[..., ::2, :] - noise * o_BTRV[..., 1::2, :]
        weight = p["norm"].to(difference.dtype)
        return F.rms_norm(difference, difference.shape[-1:], weight, self.eps) * (
            1 - self.initial_lambda
        )

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(modifiers=(cls(),), pattern="causal")
        yield base(modifiers=(cls(depth=3, eps=1e-6),), heads=3, kv=3, vdim=None)


@part
class DifferentialV2(HeadPairs):
    """o_i = softmax(q_2i k) v - sigmoid(x.w_i) softmax(q_2i+1 k) v: both heads of a pair share k
    and v.

    Version 2 (unilm, Diff-Transformer-V2, 2026): each token sets how much each head subtracts.
    There is no norm and no depth schedule, and outputs are as wide as values. `design(heads=h,
    kv=g)` makes 2h score heads on g key-value heads, so compared with grouped-query attention W_Q
    is twice as large and W_lambda is added. A token with x.w = 0 subtracts half of the second
    output:

    >>> p = {"noise": torch.zeros(1, 3)}
    >>> DifferentialV2().transform_outputs(
    ...     torch.tensor([[[[5.0], [4.0]]]]), torch.ones(1, 1, 3), p
    ... ).tolist()
    [[[[3.0]]]]
    """

    paper = "unilm/Diff-Transformer-V2"
    unrestricted_sides: ClassVar[str] = "kv"

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        heads = spec.heads
        grouping_errors = list(self.grouping_errors(heads))
        if grouping_errors:
            yield from grouping_errors
            return
        if not spec.project.supports_grouping:
            name = type(spec.project).__name__
            yield (
                f"DifferentialV2 needs pairs of heads that share a key, unlike {name}; use "
                "project LinearProjection()"
            )
            return
        kv_heads = list(zip(heads.kv_head_of_query, heads.value_head_of_row, strict=True))
        mismatched = [i for i in range(0, heads.q, 2) if kv_heads[i] != kv_heads[i + 1]]
        if mismatched:
            first = mismatched[0]
            yield (
                f"DifferentialV2 subtracts heads {first} and {first + 1}, which use different "
                "key-value heads; "
                f"use a kv that divides {heads.q // 2}, or kv_head_of_query=(0, 0, 1, 1, ...)"
            )

    def fit_heads(self, heads: Heads) -> Heads:
        return replace(
            heads,
            q=2 * heads.q,
            kv_head_of_query=repeat_consecutive(heads.kv_head_of_query, 2, distance=0),
            value_heads=repeat_consecutive(heads.value_heads, 2, distance=0),
        )

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        return {"noise": weight("out model", xavier_uniform, "query")}

    def transform_outputs(self, o_BTRV: Tensor, x_BTD: Tensor, p: PartParams) -> Tensor:
        noise = torch.sigmoid(F.linear(x_BTD, p["noise"]))[..., None]
        return o_BTRV[..., ::2, :] - noise * o_BTRV[..., 1::2, :]

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(modifiers=(cls(),), kv=2, pattern="causal")
        yield base(modifiers=(cls(),), heads=8, kv=1, vdim=7)
