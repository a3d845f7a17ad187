"""A gate per head, opened by the token that asks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layout import AxisLayout
from ..registry import part
from ..seams import Gate
from ..spec import AttentionSpec
from ..terms import QueryContext, SpecFactory, AuxLosses, Param, PartParams
from .start import constant_value, xavier_uniform


@part
class HeadGate(Gate):
    """o_h * sigmoid(x.g_h + b_h), before the merge: the headwise form of gated attention (2505.06708).

    There is no bias unless `start` gives it a first value; a large one starts with every gate open, which is
    what adding gates to a trained layer needs.

    >>> import headwise as hw
    >>> spec = hw.design(model=8, heads=2, modifiers=(HeadGate(),))
    >>> hw.select_counted.params(spec) - hw.select_counted.params(hw.design(model=8, heads=2))
    16
    """

    paper = "2505.06708"
    unrestricted_sides: ClassVar[str] = "kv"
    start: float | None = None

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        gate = {"gate": Param(AxisLayout.parse("out model"), xavier_uniform, "query")}
        return gate if self.start is None else gate | {"bias": Param(AxisLayout.parse("out"), constant_value(self.start))}

    def gate(self, asked: QueryContext, p: PartParams, aux_losses: AuxLosses | None) -> Tensor:
        bias = None if self.start is None else p["bias"]
        return torch.sigmoid(F.linear(asked.x_BTD, p["gate"], bias))[..., None]

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(modifiers=(cls(),), kv=2, vdim=5)
        yield base(modifiers=(cls(start=4.0),))
