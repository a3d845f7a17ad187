"""Average attention: every allowed key has the same weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from ..interfaces import Modifier, Normaliser
from ..interfaces.axis_layout import AxisLayout
from ..interfaces.core_types import PartParams, Phase, SpecFactory
from ..interfaces.part import part
from ..spec.attention_spec import AttentionSpec


@part
class Average(Normaliser):
    """w_j = 1/n for the n allowed keys, whatever the scores: average attention (1805.00631).

    Decoding needs only the sum of the values and their number, unless a modifier mixes heads or
    changes weights.

    >>> Average().normalise_row(torch.tensor([5.0, -5.0]), {}).tolist()
    [0.5, 0.5]
    """

    paper = "1805.00631"
    shift_invariant: ClassVar[bool] = True
    sums_to_one: ClassVar[bool] = True

    def normalise_row(self, s_S: Tensor, p_h: Mapping[str, Tensor]) -> Tensor:
        return torch.full_like(s_S, 1 / len(s_S)) + 0 * s_S

    def normalise(self, s_BHTS: Tensor, allowed: Tensor, p: PartParams) -> Tensor:
        live = allowed.expand(s_BHTS.shape).to(s_BHTS.dtype)
        return live / live.sum(-1, keepdim=True).clamp(min=1) + 0 * s_BHTS.masked_fill(
            ~allowed, 0.0
        )

    def state_layouts(self, spec: AttentionSpec) -> Mapping[str, AxisLayout]:
        core = (Phase.SCORES, Phase.WEIGHTS, Phase.VALUES)
        if any(
            step.phase in core for _, step in spec.parts_of(Modifier)
        ) or spec.project.equivalent_forms(spec):
            # the equivalent form for single queries has other values than those that were summed
            return {}
        return {"v": AxisLayout.parse("row vdim"), "count": AxisLayout.parse("row")}

    def unnormalised_weights(
        self, q_BHTK: Tensor, k_BHSK: Tensor, scale: float, p: PartParams
    ) -> Tensor:
        return q_BHTK.new_ones(*q_BHTK.shape[:3], k_BHSK.shape[2])

    def update_state(
        self,
        state: Mapping[str, Tensor],
        k_BHSK: Tensor,
        v_BHSV: Tensor,
        live_BS: Tensor,
        p: PartParams,
    ) -> dict[str, Tensor]:
        values = v_BHSV.to(state["v"].dtype).masked_fill(~live_BS[:, None, :, None], 0.0)
        return {
            "v": state["v"] + values.sum(-2),
            "count": state["count"] + live_BS.sum(-1, keepdim=True),
        }

    def read_state(
        self, q_BHTK: Tensor, state: Mapping[str, Tensor], p: PartParams
    ) -> tuple[Tensor, Tensor]:
        shape = q_BHTK.shape[:3]
        return state["v"][:, :, None].expand(*shape, -1), state["count"][..., None].expand(shape)

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(normaliser=cls(), pattern="causal")
