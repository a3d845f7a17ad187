"""Attention with linear biases: a score falls with distance, faster in some heads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import ClassVar

from torch import Tensor

from ..interfaces import ScoreStep
from ..interfaces.axis_layout import AxisLayout
from ..interfaces.core_types import Param, ScorePosition, SpecFactory
from ..interfaces.registry import part
from ..spec.attention_spec import AttentionSpec
from .initialisers import fixed_values


@part
class Alibi(ScoreStep):
    """s - m_h |i - j|, with m_h = 2^(-8h/H) for h = 1..H when H is a power of two (2108.12409).

    Other head counts take the slopes of the power of two below, then every second one of the next. Under a
    causal pattern this is the published m (j - i); both ways it is the symmetric form.

    >>> [round(math.log2(m), 3) for m in alibi_slopes(4)], len(alibi_slopes(6))
    ([-2.0, -4.0, -6.0, -8.0], 6)
    """

    paper = "2108.12409"
    positional: ClassVar[bool] = True
    additive: ClassVar[bool] = True
    unrestricted_sides: ClassVar[str] = "kv"

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        return {"slope": Param(AxisLayout.parse("q"), fixed_values(alibi_slopes(spec.heads.q)), trainable=False)}

    def score(self, s: Tensor, cell: ScorePosition, factors: Tensor | None, p: Mapping[str, Tensor]) -> Tensor:
        return s - p["slope"].to(s.dtype) * (cell.i - cell.j).abs()

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(modifiers=(cls(),))
        yield base(modifiers=(cls(),), pattern="causal", kv=2)


def alibi_slopes(heads: int) -> list[float]:
    """The published slope of each head."""
    below = 2 ** int(math.log2(heads))
    series = [2.0 ** (-8 * (h + 1) / below) for h in range(below)]
    between = [2.0 ** (-8 * (h + 1) / (2 * below)) for h in range(0, 2 * below, 2)]
    return series + between[: heads - below]
