"""Continuous relative position bias (Swin v2): a small network from the offset of two grid cells to
a bias per head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ...util.size_limits import MAX_BIAS_NETWORK, check_size
from ..interfaces import ScoreStep
from ..interfaces.core_types import (
    CallSize,
    Param,
    PartParams,
    QueryContext,
    ScorePosition,
    SpecFactory,
)
from ..interfaces.part import part
from ..spec.attention_spec import AttentionSpec
from .initialisers import normal_with_std, weight, zeros_init


@part
class ContinuousBias(ScoreStep):
    """s + 16 sigmoid(b_h), b = W_2 relu(W_1 d + c), d the log-spaced offset of query and key in a
    grid (2111.09883).

    Token t lies in row t // columns and column t % columns of a grid such as the patches of an
    image. An offset of n cells, query minus key, enters as sign(n) log_8(1 + 8 |n| / (size - 1)),
    where size is that of the grid, or of the grid of pre-training (`trained_rows`,
    `trained_columns`), so that weights can move to another grid. Offsets beyond the grid count as
    the largest. output="sigmoid" is Swin v2; "linear" is b_h plus a learned number, as in TransNeXt
    (2311.17132) and MoH-ViT (2410.11842). Scaled-cosine attention is QKNorm(kind="l2") with
    Dot(scale=1.0).

    >>> [
    ...     round(x, 3)
    ...     for x in ContinuousBias(rows=2, columns=3)._spaced(torch.arange(-2, 3), 3).tolist()
    ... ]
    [-1.057, -0.774, 0.0, 0.774, 1.057]
    """

    paper = "2111.09883"
    positional: ClassVar[bool] = True
    additive: ClassVar[bool] = True
    per_head: ClassVar[bool] = True
    unrestricted_sides: ClassVar[str] = "kv"
    rows: int = 7
    columns: int = 7
    hidden: int = 512
    output: str = "sigmoid"
    trained_rows: int = 0
    trained_columns: int = 0
    field_choices: ClassVar = {"output": ("sigmoid", "linear")}
    field_minima: ClassVar = dict.fromkeys(("rows", "columns", "hidden"), 1) | {
        "trained_rows": 0,
        "trained_columns": 0,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        name = "(2 rows - 1) (2 columns - 1) hidden of ContinuousBias"
        check_size(name, self._num_offsets * self.hidden, MAX_BIAS_NETWORK)

    def sizes(self, spec: AttentionSpec) -> Mapping[str, int]:
        return {"bias_hidden": self.hidden, "grid_axis": 2}

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        layers = {
            "hidden": weight("bias_hidden grid_axis", normal_with_std(0.02)),
            "hidden_bias": weight("bias_hidden", zeros_init),
            "out": weight("q bias_hidden", normal_with_std(0.02)),
        }
        return (
            layers if self.output == "sigmoid" else layers | {"out_bias": weight("q", zeros_init)}
        )

    @property
    def _num_offsets(self) -> int:
        return (2 * self.rows - 1) * (2 * self.columns - 1)

    def flops(self, spec: AttentionSpec, work: CallSize) -> int:
        return self.query_independent_flops(spec)

    def query_independent_flops(self, spec: AttentionSpec) -> int:
        return 2 * self._num_offsets * self.hidden * (2 + spec.heads.q)

    def constant_flops(self, spec: AttentionSpec, work: CallSize) -> int:
        return 2 * self._num_offsets * self.hidden * 2

    def _spaced(self, offset: Tensor, size: int) -> Tensor:
        return offset.sign() * (1 + 8 * offset.abs() / max(size - 1, 1)).log2() / math.log2(8)

    def query_factors(self, context: QueryContext, p: PartParams) -> Tensor:
        """The bias of every offset in the grid, [B, T, H, offsets]; it is the
        same for all queries.
        """
        batch, queries, heads, _ = context.q_BTHK.shape
        weight = p["hidden"]
        spaced = [
            self._spaced(
                torch.arange(1 - size, size, device=weight.device, dtype=weight.dtype),
                trained or size,
            )
            for size, trained in (
                (self.rows, self.trained_rows),
                (self.columns, self.trained_columns),
            )
        ]
        hidden_NF = F.relu(F.linear(torch.cartesian_prod(*spaced), weight, p["hidden_bias"]))
        bias_NH = F.linear(hidden_NF, p["out"], None if self.output == "sigmoid" else p["out_bias"])
        bias_NH = 16 * bias_NH.sigmoid() if self.output == "sigmoid" else bias_NH
        return bias_NH.T.expand(batch, queries, heads, -1)

    def score(
        self, s: Tensor, position: ScorePosition, factors: Tensor | None, p: Mapping[str, Tensor]
    ) -> Tensor:
        assert factors is not None
        last_row = self.rows - 1
        last_column = self.columns - 1
        down = (position.i // self.columns - position.j // self.columns).clamp(-last_row, last_row)
        right = (position.i % self.columns - position.j % self.columns).clamp(
            -last_column, last_column
        )
        index = (down + last_row) * (2 * self.columns - 1) + right + last_column
        return s + position.take(factors, index).to(s.dtype)

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        from .dot_product import Dot
        from .rms_norms import QKNorm

        yield base(modifiers=(cls(rows=3, columns=2, hidden=5),), kv=2)
        yield base(
            modifiers=(
                QKNorm(kind="l2"),
                cls(rows=2, columns=4, hidden=3, output="linear", trained_rows=5),
            ),
            similarity=Dot(scale=1.0),
        )
