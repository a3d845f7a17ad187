"""T5's relative position bias: a learned bias per head and bucket of distances."""

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
from ..interfaces.part import part
from ..spec.attention_spec import AttentionSpec
from .initialisers import fixed_values, normal_with_std


@part
class T5Bias(ScoreStep):
    """s + table[bucket(j - i), h]: half of the buckets exact, half logarithmic up to `reach` (1910.10683).

    looking="both" splits the buckets between past and future; "back" uses all of them for the past. T5 does not divide
    by sqrt(dim): use Dot(scale=1.0). The table may be shared by all layers, so each layer stores the table column of
    each of its heads in a constant; pruning heads shortens that constant and leaves the table as it is.

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
            yield f"T5Bias(columns={self.columns}) is less than the {spec.heads.q} heads; leave columns out"
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
        column_of_head = fixed_values(range(spec.heads.q))
        return {
            "table": Param(AxisLayout.parse("bucket column"), normal_with_std(0.02), tied_to="t5_bias.table"),
            "column": Param(AxisLayout.parse("q"), column_of_head, trainable=False),
        }

    @property
    def _buckets_per_side(self) -> int:
        return self.buckets // 2 if self.looking == "both" else self.buckets

    @property
    def _exact(self) -> int:
        return self._buckets_per_side // 2

    def relative_bucket(self, relative_position: Tensor) -> Tensor:
        """The bucket of a key at this position relative to its query (negative: before the query)."""
        buckets, exact = self._buckets_per_side, self._exact
        offset = (relative_position > 0) * buckets if self.looking == "both" else 0
        distance = relative_position.abs() if self.looking == "both" else (-relative_position).clamp(min=0)
        ratio = (distance.clamp(min=1).float() / exact).log() / math.log(self.reach / exact)
        large = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
        return offset + torch.where(distance < exact, distance, large)

    def score(self, s: Tensor, position: ScorePosition, factors: Tensor | None, p: Mapping[str, Tensor]) -> Tensor:
        return s + p["table"][self.relative_bucket(position.j - position.i), p["column"]].to(s.dtype)

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        from .dot_product import Dot

        yield base(modifiers=(cls(buckets=8, reach=9),), similarity=Dot(scale=1.0))
        yield base(modifiers=(cls(buckets=4, reach=5, looking="back"),), pattern="causal", kv=3)
        yield base(modifiers=(cls(buckets=8, reach=9, columns=11),))
