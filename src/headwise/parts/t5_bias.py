"""A learned bias by bucket of relative position, one table for many layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from ..interfaces import ScoreStep
from ..interfaces.axis_layout import AxisLayout
from ..interfaces.core_types import Param, ScorePosition, SpecFactory
from ..interfaces.registry import part
from ..spec.attention_spec import AttentionSpec
from .initialisers import fixed_values, normal_with_std


@part
class T5Bias(ScoreStep):
    """s + table[bucket(j - i), h]: half the buckets exact, half logarithmic up to `reach` (1910.10683).

    looking="both" halves the buckets between past and future; "back" gives all to the past. T5 has no
    1/sqrt(dim): use Dot(scale=1.0). The table may be tied across layers, so each layer keeps the column
    that each of its heads reads as a constant of its own: cutting heads cuts columns' readers, never the table.

    >>> T5Bias().relative_bucket(torch.tensor([0, -1, 1, -8, -200])).tolist()
    [0, 1, 17, 8, 15]
    """

    paper = "1910.10683"
    positional: ClassVar[bool] = True
    additive: ClassVar[bool] = True
    unrestricted_sides: ClassVar[str] = "kv"
    buckets: int = 32
    reach: int = 128
    looking: str = "both"
    columns: int = 0

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        if self.looking not in ("both", "back"):
            yield f"T5Bias(looking={self.looking!r}) is unknown; use 'both' or 'back'"
        elif self.columns and self.columns < spec.heads.q:
            yield f"T5Bias(columns={self.columns}) has too few for {spec.heads.q} heads; leave columns out"
        elif self._exact < 1 or self.reach <= self._exact:
            yield (
                f"T5Bias(buckets={self.buckets}, reach={self.reach}) leaves no logarithmic part; "
                f"use at least 4 buckets and a reach above {max(self._exact, 1)}"
            )

    def sizes(self, spec: AttentionSpec) -> Mapping[str, int]:
        return {"bucket": self.buckets, "column": self.columns or spec.heads.q}

    def with_fixed_sizes(self, spec: AttentionSpec) -> Self:
        return replace(self, columns=self.sizes(spec)["column"])

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        own = fixed_values(range(spec.heads.q))
        return {
            "table": Param(AxisLayout.parse("bucket column"), normal_with_std(0.02), tied_to="t5_bias.table"),
            "column": Param(AxisLayout.parse("q"), own, trainable=False),
        }

    @property
    def _side(self) -> int:
        return self.buckets // 2 if self.looking == "both" else self.buckets

    @property
    def _exact(self) -> int:
        return self._side // 2

    def relative_bucket(self, relative_position: Tensor) -> Tensor:
        """The bucket of a key that stands `ahead` of its query (behind, when negative)."""
        side, exact = self._side, self._exact
        later = (relative_position > 0) * side if self.looking == "both" else 0
        far = relative_position.abs() if self.looking == "both" else (-relative_position).clamp(min=0)
        ratio = (far.clamp(min=1).float() / exact).log() / math.log(self.reach / exact)
        large = (exact + (ratio * (side - exact)).long()).clamp(max=side - 1)
        return later + torch.where(far < exact, far, large)

    def score(self, s: Tensor, cell: ScorePosition, factors: Tensor | None, p: Mapping[str, Tensor]) -> Tensor:
        return s + p["table"][self.relative_bucket(cell.j - cell.i), p["column"]].to(s.dtype)

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        from .dot_product import Dot

        yield base(modifiers=(cls(buckets=8, reach=9),), similarity=Dot(scale=1.0))
        yield base(modifiers=(cls(buckets=4, reach=5, looking="back"),), pattern="causal", kv=3)
        yield base(modifiers=(cls(buckets=8, reach=9, columns=11),))
