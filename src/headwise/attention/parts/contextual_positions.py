"""Contextual positions (CoPE): the position of a key counts the keys that a gate opens for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..interfaces import RowFactors, RowStep
from ..interfaces.core_types import CallSize, Param, PartParams, QueryContext, SpecFactory
from ..interfaces.part import part
from ..spec.attention_spec import AttentionSpec
from .initialisers import weight, zeros_init


@part
class ContextualPositions(RowStep):
    """s_ij -> s_ij + q_i.e[p_ij], where p_ij is the sum of sigmoid(s_ik) over the keys k from j to
    i, and e is interpolated between the embeddings of the two nearest integers (2405.18719).

    All heads share the embeddings of the positions 0 .. `positions` - 1, which start at 0; larger
    positions have the last one. Scores of 0 open every gate by a half, so that the nearest key has
    the position 1/2. With q.e[n] = n for an integer n, that is what is added:

    >>> numbers = torch.arange(4.0).expand(1, 1, 1, 4)
    >>> ContextualPositions(4).interpolate(numbers, torch.full((1, 1, 1, 3), 0.5)).tolist()
    [[[[0.5, 0.5, 0.5]]]]
    """

    paper = "2405.18719"
    disagreements: ClassVar[tuple[str, ...]] = (
        "The formula has gates of q.k without a scale; the listing in the appendix takes the "
        "scaled scores, as here. The added q.e has no scale in either.",
        "The paper also tries gates of separate keys or values; here they are the scores alone.",
    )
    needed_head_dims: ClassVar[str] = "queries with heads.dim channels"
    positions: int = 64
    field_minima: ClassVar = {"positions": 1}

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        yield from self.order_conflicts(spec)

    def sizes(self, spec: AttentionSpec) -> Mapping[str, int]:
        return {"position": self.positions}

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        return {"embedding": weight("position dim", zeros_init)}

    def flops(self, spec: AttentionSpec, work: CallSize) -> int:
        sizes = spec.sizes_of(self)
        return 2 * work.batch * work.queries * sizes["q"] * sizes["dim"] * sizes["position"]

    def query_factors(self, context: QueryContext, p: PartParams) -> Tensor:
        return F.linear(context.q_BTHK, p["embedding"])

    def change_row(self, s_S: Tensor, head: int, factors: RowFactors, p: PartParams) -> Tensor:
        assert factors.query is not None
        last = len(factors.query) - 1
        changed: list[Tensor] = []
        for n, score in enumerate(s_S):
            position = torch.sigmoid(s_S[n:]).sum().clamp(max=last)
            below = min(int(position), last)
            above = min(below + 1, last)
            share = position - below
            changed.append(
                score + (1 - share) * factors.query[below] + share * factors.query[above]
            )
        return torch.stack(changed) if changed else s_S

    def change_rows(self, s_BHTS: Tensor, factors: RowFactors, p: PartParams) -> Tensor:
        assert factors.query is not None
        gate = torch.sigmoid(s_BHTS)
        by_position = factors.query.to(s_BHTS.dtype).transpose(1, 2)
        return s_BHTS + self.interpolate(by_position, factors.sum_after(gate) + gate)

    def interpolate(self, by_position: Tensor, position_BHTS: Tensor) -> Tensor:
        """Return values at fractional positions, given those at integers [B, H, T, positions]."""
        last = self.positions - 1
        position_BHTS = position_BHTS.clamp(max=last)
        below = position_BHTS.detach().long()
        above = (below + 1).clamp(max=last)
        by_position = by_position.expand(*position_BHTS.shape[:3], -1)
        values = by_position.gather(-1, below), by_position.gather(-1, above)
        return torch.lerp(*values, position_BHTS - below)

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(modifiers=(cls(positions=3),), pattern="causal", kv=2)
        yield base(modifiers=(cls(positions=5),), pattern="window(4)", vdim=5)
