"""Scores without a comparison of tokens: Synthesizer learns them per position, or computes them
from the query token alone; in average attention every allowed key has the same weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..interfaces import Modifier, Normaliser, RecurrentPart, ScoreStep
from ..interfaces.core_types import (
    AxisLayout,
    CallSize,
    CoreShape,
    Param,
    PartParams,
    Phase,
    QueryContext,
    ScorePosition,
    SpecFactory,
)
from ..interfaces.part import part
from ..spec.attention_spec import AttentionSpec
from .initialisers import weight, xavier_uniform, zeros_init


@part
class LearnedScores(ScoreStep):
    """s + R_h[i, j], learned for the positions 0 .. length - 1: the scores of a Synthesizer
    (2005.00743).

    kind="random": R is a table. "factorised": R = A B^T with this `rank`. "dense": row i of R is
    W_2 relu(W_1 x_i + b_1) + b_2, computed from the query token alone; the hidden layer has dim
    channels per head, which gives the paper's d^2 + d length parameters if heads times dim is d.
    Without queries and keys (project ValueProjection()) it is the paper's pure form; with
    DotProduct it is the paper's mixture as a plain sum, where the paper has weights and its code
    can do either. The code's "dense" differs: no biases, W_1 taken from the query projection, and
    W_2 shared by all heads.

    The table has as many parameters as W_Q and W_K at h length^2 = 2 d h dim: 8 positions for d =
    16 and dim = 2.

    >>> import headwise as hw
    >>> spec = hw.design(model=16, heads=3, dim=2, modifiers=(LearnedScores(length=8),))
    >>> spec.shapes()["learned_scores.table"], 2 * 16 * 3 * 2 == 3 * 8 * 8
    ((3, 8, 8), True)
    """

    paper = "2005.00743"
    disagreements: ClassVar[tuple[str, ...]] = (
        "The paper weights learned scores and dot products, its code can also add them: added.",
        "The dense kind follows the paper; its code has no biases and shares W_2 over heads.",
    )
    positional: ClassVar[bool] = True
    additive: ClassVar[bool] = True
    unrestricted_sides: ClassVar[str] = "kv"
    length: int = 512
    kind: str = "random"
    rank: int = 8
    field_choices: ClassVar = {"kind": ("random", "factorised", "dense")}
    field_minima: ClassVar = {"length": 1, "rank": 1}

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        if self.kind != "factorised" and self.rank != 8:
            yield (
                f"LearnedScores(kind={self.kind!r}, rank={self.rank}) is not factorised; leave "
                "rank out"
            )

    def max_positions(self, spec: AttentionSpec) -> int | None:
        return self.length

    def sizes(self, spec: AttentionSpec) -> Mapping[str, int]:
        return {"query_position": self.length, "key_position": self.length, "rank": self.rank}

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        if self.kind == "random":
            return {"table": weight("q query_position key_position", xavier_uniform)}
        if self.kind == "factorised":
            return {  # by the names of saved models, for queries and for keys
                "asking": weight("q query_position rank", xavier_uniform),
                "told": weight("q key_position rank", xavier_uniform),
            }
        return {
            "hidden": weight("(q dim) model", xavier_uniform, "query"),
            "hidden_bias": weight("(q dim)", zeros_init),
            "out": weight("q dim key_position", xavier_uniform, "query"),
            "out_bias": weight("q key_position", zeros_init),
        }

    def flops(self, spec: AttentionSpec, work: CallSize) -> int:
        """FLOPs of the rows of R; they are computed once for all rows of a batch with equal
        positions.
        """
        if self.kind != "factorised":
            return 0
        return 2 * work.queries * spec.num_core_heads * self.rank * self.length

    def query_factors(self, context: QueryContext, p: PartParams) -> Tensor | None:
        if self.kind == "dense":
            return _dense_score_rows(context.x_BTD, p)
        # Padding may have any position; its rows are never used.
        position = context.sequence.position.clamp(0, self.length - 1)
        if self.kind == "random":
            rows = p["table"][:, position]
        else:
            rows = torch.matmul(p["asking"][:, position], p["told"].transpose(-1, -2)[:, None])
        return rows.permute(1, 2, 0, 3).expand(context.x_BTD.shape[0], -1, -1, -1)

    def score(
        self, s: Tensor, position: ScorePosition, factors: Tensor | None, p: Mapping[str, Tensor]
    ) -> Tensor:
        assert factors is not None
        # Clamped because empty cache slots may have any position, too.
        return s + position.take(factors, position.j.clamp(0, self.length - 1))

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(modifiers=(cls(length=19),), pattern="causal", kv=2, vdim=5)
        yield base(modifiers=(cls(length=262, kind="factorised", rank=2),), pattern="causal")
        yield base(modifiers=(cls(length=29, kind="dense"),), source=13)


def _dense_score_rows(x_BTD: Tensor, p: PartParams) -> Tensor:
    """Rows of scores [B, T, H, length] computed from the query tokens."""
    hidden = F.relu(F.linear(x_BTD, p["hidden"], p["hidden_bias"])).unflatten(
        -1, (p.sizes["q"], -1)
    )
    rows = torch.matmul(hidden.transpose(1, 2), p["out"]) + p["out_bias"][:, None]
    return rows.transpose(1, 2)


@part
class AverageNormaliser(Normaliser, RecurrentPart):
    """w_j = 1/n for the n allowed keys, whatever the scores: average attention (1805.00631).

    Decoding needs only the sum of the values and their number, unless a modifier mixes heads or
    changes weights.

    >>> AverageNormaliser().normalise_row(torch.tensor([5.0, -5.0]), {}).tolist()
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

    def num_state_features(self, core: CoreShape) -> int:
        return 0

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
