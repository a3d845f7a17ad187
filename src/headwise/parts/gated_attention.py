"""A gate per head, opened by the token that asks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..interfaces import Gate
from ..interfaces.axis_layout import AxisLayout
from ..interfaces.core_types import AuxLosses, Param, PartParams, QueryContext, SpecFactory
from ..interfaces.registry import part
from ..spec.attention_spec import AttentionSpec
from .initialisers import constant_value, xavier_uniform


@part
class HeadGate(Gate):
    """o_h * sigmoid(x.g_h + b_h), before the merge: the headwise form of gated attention (2505.06708).

    There is no bias unless `start` gives it a first value; a large one starts with every gate open, which is
    what adding gates to a trained layer needs.

    >>> import headwise as hw
    >>> spec = hw.design(model=8, heads=2, modifiers=(HeadGate(),))
    >>> hw.costs.count_parameters(spec) - hw.costs.count_parameters(hw.design(model=8, heads=2))
    16
    """

    paper = "2505.06708"
    unrestricted_sides: ClassVar[str] = "kv"
    start: float | None = None

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        gate = {"gate": Param(AxisLayout.parse("out model"), xavier_uniform, "query")}
        return (
            gate if self.start is None else gate | {"bias": Param(AxisLayout.parse("out"), constant_value(self.start))}
        )

    def gate(self, asked: QueryContext, p: PartParams, aux_losses: AuxLosses | None) -> Tensor:
        bias = None if self.start is None else p["bias"]
        return torch.sigmoid(F.linear(asked.x_BTD, p["gate"], bias))[..., None]

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(modifiers=(cls(),), kv=2, vdim=5)
        yield base(modifiers=(cls(start=4.0),))


# --- A gate per channel of every head, opened by the token that asks -----------------------------------


@part
class OutputGate(Gate):
    """o_h * sigmoid(x G_h + b_h), elementwise before the merge: gated attention's best form (2505.06708).

    >>> import headwise as hw
    >>> spec = hw.design(model=8, heads=2, modifiers=(OutputGate(),))
    >>> hw.costs.count_parameters(spec) - hw.costs.count_parameters(hw.design(model=8, heads=2))
    64
    """

    paper = "2505.06708"
    unrestricted_sides: ClassVar[str] = "k"
    start: float | None = None

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        gate = {"gate": Param(AxisLayout.parse("(out vdim) model"), xavier_uniform, "query")}
        return (
            gate
            if self.start is None
            else gate | {"bias": Param(AxisLayout.parse("(out vdim)"), constant_value(self.start))}
        )

    def gate(self, asked: QueryContext, p: PartParams, aux_losses: AuxLosses | None) -> Tensor:
        bias = None if self.start is None else p["bias"]
        flat = torch.sigmoid(F.linear(asked.x_BTD, p["gate"], bias))
        return flat.unflatten(-1, (-1, p.sizes["vdim"]))

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(modifiers=(cls(),), kv=2, vdim=5)
        yield base(modifiers=(cls(start=4.0),))
