"""ALiBi: scores decrease linearly with the distance between query and key, with a different slope per head."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import ClassVar

from torch import Tensor

from ..interfaces import ScoreStep
from ..interfaces.axis_layout import AxisLayout
from ..interfaces.core_types import Param, ScorePosition, SpecFactory
from ..interfaces.part import part
from ..spec.attention_spec import AttentionSpec
from .initialisers import fixed_values


@part
class Alibi(ScoreStep):
    """s - m_h |i - j|, with m_h = 2^(-8h/H) for h = 1..H when H is a power of two (2108.12409).

    Other numbers of heads use the slopes of the next lower power of two, then every second slope of the next higher
    one. With a causal pattern this equals the published m (j - i); otherwise it is the symmetric form.

    >>> [round(math.log2(m), 3) for m in alibi_slopes(4)], len(alibi_slopes(6))
    ([-2.0, -4.0, -6.0, -8.0], 6)
    """

    paper = "2108.12409"
    positional: ClassVar[bool] = True
    additive: ClassVar[bool] = True
    unrestricted_sides: ClassVar[str] = "kv"

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        return {"slope": Param(AxisLayout.parse("q"), fixed_values(alibi_slopes(spec.heads.q)), trainable=False)}

    def score(self, s: Tensor, position: ScorePosition, factors: Tensor | None, p: Mapping[str, Tensor]) -> Tensor:
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
