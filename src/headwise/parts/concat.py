"""The usual merge: concatenates the head outputs and applies a linear layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from ..interfaces import Merge
from ..interfaces.axis_layout import AxisLayout
from ..interfaces.core_types import Param, PartParams, SpecFactory
from ..interfaces.part import part
from ..ops.linear import linear
from ..spec.attention_spec import AttentionSpec
from .initialisers import xavier_uniform, zeros_init


@part
class Concat(Merge):
    """y = concat(o_1 .. o_h) W_O + b_O, which is the sum over heads of o_h W_O[h] (1706.03762).

    output="fixed" keeps W_O at its random initial value, for measuring what training it contributes.

    >>> import headwise as hw
    >>> hw.Attention(hw.design(model=8, heads=2, bias="o")).state_dict()["output.o"].shape
    torch.Size([8, 8])
    """

    paper = "1706.03762"
    bias: str = ""
    output: str = "learned"

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        if self.output not in ("learned", "fixed"):
            yield f"Concat(output={self.output!r}) is unknown; use 'learned' or 'fixed'"
        if self.bias not in ("", "o"):
            yield f"Concat(bias={self.bias!r}) is unknown; use bias='o' for an output bias or '' for none"

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        learned = self.output == "learned"
        weights = {"o": Param(AxisLayout.parse("model (out vdim)"), xavier_uniform, "query", learned)}
        return weights | ({"o_bias": Param(AxisLayout.parse("model"), zeros_init)} if self.bias else {})

    def absorb_matrix(self, spec: AttentionSpec, weights: Mapping[str, Tensor], matrix: Tensor) -> Mapping[str, Tensor]:
        by_head = weights["output.o"].unflatten(1, (-1, spec.heads.vdim))
        return {"output.o": torch.einsum("dov,ovw->dow", by_head, matrix).flatten(1)}

    def merge(self, o_BTOV: Tensor, p: PartParams) -> Tensor:
        return linear(o_BTOV.flatten(2), p["o"].to(o_BTOV.dtype), p["o_bias"] if self.bias else None)

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(merge=cls(bias="o"))
        yield base(merge=cls(output="fixed"), kv=2, vdim=5)
