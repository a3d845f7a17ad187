"""Biases of scores by the distance of query and key: ALiBi's fixed slopes, and T5's table of
learned ones.
"""

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
from .initialisers import constant, fixed_values, normal_with_std


@part
class Alibi(ScoreStep):
    """s - m_h |i - j|, with m_h = 2^(-8h/H) for h = 1..H when H is a power of two (2108.12409).

    Other numbers of heads use the slopes of the next lower power of two, then every second slope of
    the next higher one. With a causal pattern this equals the published m (j - i); otherwise it is
    the symmetric form.

    >>> [round(math.log2(m), 3) for m in alibi_slopes(4)], len(alibi_slopes(6))
    ([-2.0, -4.0, -6.0, -8.0], 6)
    """

    paper = "2108.12409"
    positional: ClassVar[bool] = True
    additive: ClassVar[bool] = True
    unrestricted_sides: ClassVar[str] = "kv"

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        return {"slope": constant("q", alibi_slopes(spec.heads.q))}

    def score(
        self, s: Tensor, position: ScorePosition, factors: Tensor | None, p: Mapping[str, Tensor]
    ) -> Tensor:
        return s - p["slope"].to(s.dtype) * (position.i - position.j).abs()

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(modifiers=(cls(),))
        yield base(modifiers=(cls(),), pattern="causal", kv=2)


def alibi_slopes(heads: int) -> list[float]:
    """The published slope of each head."""
    power = 2 ** int(math.log2(heads))  # the largest power of two up to `heads`
    series = [2.0 ** (-8 * (h + 1) / power) for h in range(power)]
    between = [2.0 ** (-8 * (h + 1) / (2 * power)) for h in range(0, 2 * power, 2)]
    return series + between[: heads - power]


@part
class T5Bias(ScoreStep):
    """s + table[bucket(j - i), h]: half of the buckets exact, half logarithmic up to `reach`
    (1910.10683).

    looking="both" splits the buckets between past and future; "back" uses all of them for the past.
    T5 does not divide by sqrt(dim): use Dot(scale=1.0). The table may be shared by all layers, so
    each layer stores the table column of each of its heads in a constant; pruning heads shortens
    that constant and leaves the table as it is.

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
    field_choices: ClassVar = {"looking": ("both", "back")}

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        if self.columns and self.columns < spec.heads.q:
            yield (
                f"T5Bias(columns={self.columns}) is less than the {spec.heads.q} heads; leave "
                "columns out"
            )
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
            "table": Param(
                AxisLayout.parse("bucket column"), normal_with_std(0.02), tied_to="t5_bias.table"
            ),
            "column": Param(AxisLayout.parse("q"), column_of_head, trainable=False),
        }

    @property
    def _buckets_per_side(self) -> int:
        return self.buckets // 2 if self.looking == "both" else self.buckets

    @property
    def _exact(self) -> int:
        return self._buckets_per_side // 2

    def relative_bucket(self, relative_position: Tensor) -> Tensor:
        """The bucket of a key at this position relative to its query (negative:
        before the query).
        """
        buckets = self._buckets_per_side
        exact = self._exact
        offset = (relative_position > 0) * buckets if self.looking == "both" else 0
        distance = (
            relative_position.abs() if self.looking == "both" else (-relative_position).clamp(min=0)
        )
        ratio = (distance.clamp(min=1).float() / exact).log() / math.log(self.reach / exact)
        large = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
        return offset + torch.where(distance < exact, distance, large)

    def score(
        self, s: Tensor, position: ScorePosition, factors: Tensor | None, p: Mapping[str, Tensor]
    ) -> Tensor:
        return s + p["table"][self.relative_bucket(position.j - position.i), p["column"]].to(
            s.dtype
        )

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        from .dot_product import Dot

        yield base(modifiers=(cls(buckets=8, reach=9),), similarity=Dot(scale=1.0))
        yield base(modifiers=(cls(buckets=4, reach=5, looking="back"),), pattern="causal", kv=3)
        yield base(modifiers=(cls(buckets=8, reach=9, columns=11),))
