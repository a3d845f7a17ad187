"""Learned scores: what a query reads follows from where it stands, or from itself alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..interfaces import ScoreStep
from ..interfaces.axis_layout import AxisLayout
from ..interfaces.core_types import CallSize, Param, PartParams, QueryContext, ScorePosition, SpecFactory
from ..interfaces.registry import part
from ..spec.attention_spec import AttentionSpec
from .initialisers import xavier_uniform, zeros_init

SYNTHESIZER_KINDS = ("random", "factorised", "dense")


@part
class Learned(ScoreStep):
    """s + R_h[i, j], learned for the positions 0 .. length - 1: the scores of a Synthesizer (2005.00743).

    kind="random": R is a table; "factorised": R = A B^T of this rank; "dense": row i of R is
    W_2 relu(W_1 x_i + b_1) + b_2, from the query token alone, the hidden layer of a head dim wide, which gives the
    paper's d^2 + d length when heads times dim are d. Without q and k (project Values()) it is the paper's pure
    form, beside Dot its mixture as a plain sum: the paper weighs the two, its code can do either. Of "dense" that
    code has another form: no biases, W_1 taken from the queries' projection, W_2 shared by all heads.

    Break-even with W_Q and W_K of dim channels is at h length^2 = 2 d h dim: 8 positions for d = 16 and dim = 2.

    >>> import headwise as hw
    >>> spec = hw.design(model=16, heads=3, dim=2, modifiers=(Learned(length=8),))
    >>> spec.shapes()["learned.table"], 2 * 16 * 3 * 2 == 3 * 8 * 8
    ((3, 8, 8), True)
    """

    paper = "2005.00743"
    disagreements: ClassVar[tuple[str, ...]] = (
        "The paper weighs learned scores against dot products, its code can also add them: they are added.",
        "The dense kind follows the paper; its code has no biases and shares W_2 over heads.",
    )
    positional: ClassVar[bool] = True
    additive: ClassVar[bool] = True
    unrestricted_sides: ClassVar[str] = "kv"
    length: int = 512
    kind: str = "random"
    rank: int = 8

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        if self.length < 1:
            yield f"Learned(length={self.length}) knows no position; use at least 1"
        if self.kind not in SYNTHESIZER_KINDS:
            yield f"Learned(kind={self.kind!r}) is unknown; use 'random', 'factorised' or 'dense'"
        elif self.kind != "factorised" and self.rank != 8:
            yield f"Learned(kind={self.kind!r}, rank={self.rank}) factorises nothing; leave rank out"
        if self.rank < 1:
            yield f"Learned(rank={self.rank}) leaves nothing of a table; use at least 1"

    def max_positions(self, spec: AttentionSpec) -> int | None:
        return self.length

    def sizes(self, spec: AttentionSpec) -> Mapping[str, int]:
        return {"asking": self.length, "told": self.length, "rank": self.rank}

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        if self.kind == "random":
            return {"table": Param(AxisLayout.parse("q asking told"), xavier_uniform)}
        if self.kind == "factorised":
            return {
                "asking": Param(AxisLayout.parse("q asking rank"), xavier_uniform),
                "told": Param(AxisLayout.parse("q told rank"), xavier_uniform),
            }
        return {
            "hidden": Param(AxisLayout.parse("(q dim) model"), xavier_uniform, "query"),
            "hidden_bias": Param(AxisLayout.parse("(q dim)"), zeros_init),
            "out": Param(AxisLayout.parse("q dim told"), xavier_uniform, "query"),
            "out_bias": Param(AxisLayout.parse("q told"), zeros_init),
        }

    def flops(self, spec: AttentionSpec, work: CallSize) -> int:
        """Rows of R for each query; where all rows of a batch stand alike, and only then, once for all of them."""
        if self.kind != "factorised":
            return 0
        return 2 * work.queries * spec.heads.q * self.rank * self.length

    def query_factors(self, asked: QueryContext, p: PartParams) -> Tensor | None:
        if self.kind == "dense":
            return _dense_score_rows(asked.x_BTD, p)
        # Padding may stand anywhere; nobody reads what it gets.
        place = asked.sequence.position.clamp(0, self.length - 1)
        if self.kind == "random":
            rows = p["table"][:, place]
        else:
            rows = torch.matmul(p["asking"][:, place], p["told"].transpose(-1, -2)[:, None])
        return rows.permute(1, 2, 0, 3).expand(asked.x_BTD.shape[0], -1, -1, -1)

    def score(self, s: Tensor, cell: ScorePosition, factors: Tensor | None, p: Mapping[str, Tensor]) -> Tensor:
        assert factors is not None
        return s + cell.take(factors, cell.j.clamp(0, self.length - 1))  # so may an empty slot of a cache

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(modifiers=(cls(length=19),), pattern="causal", kv=2, vdim=5)
        yield base(modifiers=(cls(length=262, kind="factorised", rank=2),), pattern="causal")
        yield base(modifiers=(cls(length=29, kind="dense"),), source=13)


def _dense_score_rows(x_BTD: Tensor, p: PartParams) -> Tensor:
    """Rows of scores [B, T, H, length] from the query tokens themselves."""
    hidden = F.relu(F.linear(x_BTD, p["hidden"], p["hidden_bias"])).unflatten(-1, (p.sizes["q"], -1))
    rows = torch.matmul(hidden.transpose(1, 2), p["out"]) + p["out_bias"][:, None]
    return rows.transpose(1, 2)
