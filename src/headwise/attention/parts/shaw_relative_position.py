"""Relative position representations (Shaw et al.): learned vectors per clipped distance for keys
and values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from ..interfaces import ScoreStep, ValueStep
from ..interfaces.core_types import Param, PartParams, QueryContext, ScorePosition, SpecFactory
from ..interfaces.part import part
from ..spec.attention_spec import AttentionSpec
from .initialisers import weight, xavier_uniform


@part
class Shaw(ScoreStep):
    """s + scale q.a[clip(j - i, -reach, reach)]: one table of 2 reach + 1 vectors for all heads
    (1803.02155).

    >>> import headwise as hw
    >>> Shaw(reach=2).params(hw.design(model=8, heads=2))["table"].layout
    AxisLayout(dims=(('place',), ('dim',)))
    """

    paper = "1803.02155"
    positional: ClassVar[bool] = True
    additive: ClassVar[bool] = True
    per_head: ClassVar[bool] = True
    reach: int = 16
    field_minima: ClassVar = {"reach": 1}
    needed_head_dims: ClassVar = "queries with heads.dim channels"

    def sizes(self, spec: AttentionSpec) -> Mapping[str, int]:
        return {"place": 2 * self.reach + 1}

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        return {"table": weight("place dim", xavier_uniform)}

    def flops(self, spec: AttentionSpec, work) -> int:
        return (
            2
            * work.batch
            * work.queries
            * spec.num_core_heads
            * (2 * self.reach + 1)
            * spec.heads.dim
        )

    def query_factors(self, context: QueryContext, p: PartParams) -> Tensor | None:
        return torch.matmul(context.q_BTHK * context.scale, p["table"].T)

    def score(
        self, s: Tensor, position: ScorePosition, factors: Tensor | None, p: Mapping[str, Tensor]
    ) -> Tensor:
        assert factors is not None
        return s + position.take(
            factors, (position.j - position.i).clamp(-self.reach, self.reach) + self.reach
        )

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(modifiers=(cls(reach=2), ShawValues(reach=3)), pattern="causal", kv=2)
        yield base(modifiers=(cls(reach=4),), vdim=5)


@part
class ShawValues(ValueStep):
    """o + sum over keys of w a[clip(j - i, -reach, reach)]: relative vectors added to values
    (1803.02155).

    >>> import headwise as hw
    >>> ShawValues(reach=2).params(hw.design(model=8, heads=2))["table"].layout.axes
    ('place_of_value', 'vdim')
    """

    paper = "1803.02155"
    positional: ClassVar[bool] = True
    reach: int = 16
    field_minima: ClassVar = {"reach": 1}
    needed_head_dims: ClassVar = "values with heads.vdim channels in the core"

    def sizes(self, spec: AttentionSpec) -> Mapping[str, int]:
        return {"place_of_value": 2 * self.reach + 1}

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        return {"table": weight("place_of_value vdim", xavier_uniform)}

    def flops(self, spec: AttentionSpec, work) -> int:
        return (
            2
            * work.batch
            * work.queries
            * len(spec.score_head_of_row)
            * (2 * self.reach + 1)
            * spec.heads.vdim
        )

    def pair_value(self, i: int, j: int, p: PartParams) -> Tensor:
        return p["table"][min(max(j - i, -self.reach), self.reach) + self.reach]

    def weighted_values(self, w_BRTS: Tensor, i: Tensor, j: Tensor, p: PartParams) -> Tensor:
        distance = ((j - i).clamp(-self.reach, self.reach) + self.reach).expand(w_BRTS.shape)
        by_distance = w_BRTS.new_zeros(*w_BRTS.shape[:3], 2 * self.reach + 1).scatter_add(
            -1, distance, w_BRTS
        )
        return torch.matmul(by_distance, p["table"].to(w_BRTS.dtype))
