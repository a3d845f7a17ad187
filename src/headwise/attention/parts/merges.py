"""Merges: concatenation of the head outputs, or their sum, and one linear layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.linear import linear
from ..interfaces import Merge
from ..interfaces.core_types import AxisLayout, Param, PartParams, SpecFactory
from ..interfaces.part import part
from ..spec.attention_spec import AttentionSpec
from .initialisers import weight, xavier_uniform, zeros_init


@part
class ConcatMerge(Merge):
    """y = concat(o_1 .. o_h) W_O + b_O, which is the sum over heads of o_h W_O[h] (1706.03762).

    output="fixed" keeps W_O at its random initial value, for measuring what training it
    contributes.

    >>> import headwise as hw
    >>> hw.Attention(hw.design(model=8, heads=2, bias="o")).state_dict()["output.o"].shape
    torch.Size([8, 8])
    """

    paper = "1706.03762"
    bias: str = ""
    output: str = "learned"
    field_choices: ClassVar = {"bias": ("", "o"), "output": ("learned", "fixed")}

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        learned = self.output == "learned"
        weights = {
            "o": Param(AxisLayout.parse("model (out vdim)"), xavier_uniform, "query", learned)
        }
        return weights | ({"o_bias": weight("model", zeros_init)} if self.bias else {})

    def absorb_matrix(
        self, spec: AttentionSpec, weights: Mapping[str, Tensor], matrix: Tensor
    ) -> Mapping[str, Tensor]:
        by_head = weights["output.o"].unflatten(1, (-1, spec.heads.vdim))
        return {"output.o": torch.einsum("dov,ovw->dow", by_head, matrix).flatten(1)}

    def merge(self, o_BTOV: Tensor, p: PartParams) -> Tensor:
        return linear(
            o_BTOV.flatten(2), p["o"].to(o_BTOV.dtype), p["o_bias"] if self.bias else None
        )

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(merge=cls(bias="o"))
        yield base(merge=cls(output="fixed"), kv=2, vdim=5)


@part
class SumMerge(Merge):
    """y = (o_1 + .. + o_h) W_O + b_O: heads are summed and share one W_O with vdim rows.

    It equals `ConcatMerge` with all W_O[h] tied; with separate W_O[h], projecting and then adding
    *is* concatenation. of="mean" divides by the number of heads, which pruning does not change.
    output="fixed" keeps W_O at its random initial value. It has fewer parameters than ConcatMerge
    at the same width; `hw.match_size` finds the value width that makes up for that.

    >>> import headwise as hw
    >>> hw.Attention(hw.design(model=8, heads=2, merge=SumMerge())).state_dict()["output.o"].shape
    torch.Size([8, 4])
    """

    bias: str = ""
    of: str = "sum"
    output: str = "learned"
    heads: int = 0
    field_choices: ClassVar = {
        "bias": ("", "o"),
        "of": ("sum", "mean"),
        "output": ("learned", "fixed"),
    }

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        if self.heads and self.of == "sum":
            yield (
                f"SumMerge(heads={self.heads}) is only used by of='mean'; leave heads out, or "
                "use of='mean'"
            )
        elif self.heads and self.heads < len(spec.score_head_of_output):
            yield (
                f"SumMerge(heads={self.heads}) is less than the {len(spec.score_head_of_output)} "
                "output heads; "
                "leave heads out"
            )

    def with_fixed_sizes(self, spec: AttentionSpec) -> Self:
        if self.of == "mean":
            return replace(self, heads=self.heads or len(spec.score_head_of_output))
        return self

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        learned = self.output == "learned"
        weights = {"o": Param(AxisLayout.parse("model vdim"), xavier_uniform, "query", learned)}
        return weights | ({"o_bias": weight("model", zeros_init)} if self.bias else {})

    def merge(self, o_BTOV: Tensor, p: PartParams) -> Tensor:
        total = o_BTOV.sum(2)
        if self.of == "mean":
            total = total / (self.heads or o_BTOV.shape[2])
        return F.linear(total, p["o"].to(total.dtype), p["o_bias"] if self.bias else None)

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(merge=cls(bias="o"), kv=2, vdim=5)
        yield base(merge=cls(of="mean"), pattern="causal", vdim=5)
        yield base(merge=cls(of="mean", output="fixed", heads=7))
