"""Relative positions in the scores: ALiBi's fixed slopes, T5's table of learned biases, Shaw's
vectors for keys and values, and a small network from the offset of two grid cells (Swin v2).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ...util.size_limits import MAX_BIAS_NETWORK, check_size
from ..interfaces import ScoreStep, ValueStep
from ..interfaces.core_types import (
    AxisLayout,
    CallSize,
    Param,
    PartParams,
    QueryContext,
    ScorePosition,
    SpecFactory,
)
from ..interfaces.part import part
from ..spec.attention_spec import AttentionSpec
from .initialisers import (
    constant,
    fixed_values,
    normal_with_std,
    weight,
    xavier_uniform,
    zeros_init,
)


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
        return s - p["slope"].to(s) * (position.i - position.j).abs()

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
    T5 does not divide by sqrt(dim): use DotProduct(scale=1.0). The table may be shared by all
    layers, so each layer stores the table column of each of its heads in a constant; pruning heads
    shortens that constant and leaves the table as it is.

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
        from .dot_product import DotProduct

        yield base(modifiers=(cls(buckets=8, reach=9),), similarity=DotProduct(scale=1.0))
        yield base(modifiers=(cls(buckets=4, reach=5, looking="back"),), pattern="causal", kv=3)
        yield base(modifiers=(cls(buckets=8, reach=9, columns=11),))


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
        vectors = work.batch * work.queries * spec.num_core_heads
        return 2 * vectors * (2 * self.reach + 1) * spec.heads.dim

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
        vectors = work.batch * work.queries * len(spec.score_head_of_row)
        return 2 * vectors * (2 * self.reach + 1) * spec.heads.vdim

    def pair_value(self, i: int, j: int, p: PartParams) -> Tensor:
        return p["table"][min(max(j - i, -self.reach), self.reach) + self.reach]

    def weighted_values(self, w_BRTS: Tensor, i: Tensor, j: Tensor, p: PartParams) -> Tensor:
        distance = ((j - i).clamp(-self.reach, self.reach) + self.reach).expand(w_BRTS.shape)
        by_distance = w_BRTS.new_zeros(*w_BRTS.shape[:3], 2 * self.reach + 1).scatter_add(
            -1, distance, w_BRTS
        )
        return torch.matmul(by_distance, p["table"].to(w_BRTS.dtype))


@part
class ContinuousBias(ScoreStep):
    """s + 16 sigmoid(b_h), b = W_2 relu(W_1 d + c), d the log-spaced offset of query and key in a
    grid (2111.09883).

    Token t lies in row t // columns and column t % columns of a grid such as the patches of an
    image. An offset of n cells, query minus key, enters as sign(n) log_8(1 + 8 |n| / (size - 1)),
    where size is the size of this grid, or of the grid of pre-training (`trained_rows`,
    `trained_columns`), so that weights can move to another grid. Offsets beyond the grid count as
    the largest. output="sigmoid" is Swin v2; "linear" is b_h plus a learned number, as in TransNeXt
    (2311.17132) and MoH-ViT (2410.11842). Scaled-cosine attention is QKNorm(kind="l2") with
    DotProduct(scale=1.0).

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
        from .dot_product import DotProduct
        from .rms_norms import QKNorm

        yield base(modifiers=(cls(rows=3, columns=2, hidden=5),), kv=2)
        yield base(
            modifiers=(
                QKNorm(kind="l2"),
                cls(rows=2, columns=4, hidden=3, output="linear", trained_rows=5),
            ),
            similarity=DotProduct(scale=1.0),
        )
