"""Gated attention: sigmoid gates on head outputs, computed from the query token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..interfaces import Gate
from ..interfaces.core_types import AuxLosses, Param, PartParams, QueryContext, SpecFactory
from ..interfaces.part import part
from ..spec.attention_spec import AttentionSpec
from .initialisers import constant_value, weight, xavier_uniform


@part
class HeadGate(Gate):
    """o_h * sigmoid(x.g_h + b_h), before the merge: the headwise form of gated attention
    (2505.06708).

    There is a bias b only if `start` gives its initial value. With a large value all gates start
    open, which is useful when gates are added to a trained layer.

    >>> import headwise as hw
    >>> spec = hw.design(model=8, heads=2, modifiers=(HeadGate(),))
    >>> hw.costs.count_parameters(spec) - hw.costs.count_parameters(hw.design(model=8, heads=2))
    16
    """

    paper = "2505.06708"
    unrestricted_sides: ClassVar[str] = "kv"
    start: float | None = None

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        gate = {"gate": weight("out model", xavier_uniform, "query")}
        return (
            gate
            if self.start is None
            else gate | {"bias": weight("out", constant_value(self.start))}
        )

    def gate(self, context: QueryContext, p: PartParams, aux_losses: AuxLosses | None) -> Tensor:
        bias = None if self.start is None else p["bias"]
        return torch.sigmoid(F.linear(context.x_BTD, p["gate"], bias))[..., None]

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(modifiers=(cls(),), kv=2, vdim=5)
        yield base(modifiers=(cls(start=4.0),))


@part
class OutputGate(Gate):
    """o_h * sigmoid(x G_h + b_h), elementwise before the merge: the best form of gated attention
    (2505.06708).

    As in `HeadGate`, `start` adds a bias.

    >>> import headwise as hw
    >>> spec = hw.design(model=8, heads=2, modifiers=(OutputGate(),))
    >>> hw.costs.count_parameters(spec) - hw.costs.count_parameters(hw.design(model=8, heads=2))
    64
    """

    paper = "2505.06708"
    unrestricted_sides: ClassVar[str] = "k"
    start: float | None = None

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        gate = {"gate": weight("(out vdim) model", xavier_uniform, "query")}
        return (
            gate
            if self.start is None
            else gate | {"bias": weight("(out vdim)", constant_value(self.start))}
        )

    def gate(self, context: QueryContext, p: PartParams, aux_losses: AuxLosses | None) -> Tensor:
        bias = None if self.start is None else p["bias"]
        flat = torch.sigmoid(F.linear(context.x_BTD, p["gate"], bias))
        return flat.unflatten(-1, (-1, p.sizes["vdim"]))

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(modifiers=(cls(),), kv=2, vdim=5)
        yield base(modifiers=(cls(start=4.0),))
