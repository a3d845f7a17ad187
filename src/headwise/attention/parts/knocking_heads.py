"""Knocking-heads attention: one small matrix, shared by all heads, transforms queries, keys or
values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ..interfaces import QKTransform
from ..interfaces.axis_layout import AxisLayout
from ..interfaces.core_types import CallSize, Param, PartParams, SpecFactory
from ..interfaces.part import part
from ..spec.attention_spec import AttentionSpec
from .initialisers import identity_init, weight, zeros_init


@part
class Knocking(QKTransform):
    """x_h -> x_h T, with one T per side, shared by all heads; `sides` are any of q, k and v
    (2510.23052).

    T starts as the identity. kind="mlp", for values only: v_h -> 2 (v_h W_up * sigmoid(v_h W_gate))
    W_down, where W_up and W_down start as the identity and W_gate as zero, so that both kinds start
    as plain attention. The paper finds that values matter most. `fold_qk_transforms` folds the
    linear kind into the projections.

    >>> weights = {"v": torch.tensor([[1.0, 2.0], [0.0, 1.0]])}  # [out, in]
    >>> Knocking().transform(torch.tensor([[[[3.0, 4.0]]]]), "v", None, weights).tolist()
    [[[[11.0, 4.0]]]]
    """

    paper = "2510.23052"
    kind: str = "linear"
    sides: str = "v"
    field_choices: ClassVar = {"kind": ("linear", "mlp")}

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        if (
            not self.sides
            or set(self.sides) - set("qkv")
            or len(set(self.sides)) != len(self.sides)
        ):
            yield f"Knocking(sides={self.sides!r}) is unknown; name each of q, k and v at most once"
        elif self.kind == "mlp" and self.sides != "v":
            yield (
                f"Knocking(kind='mlp', sides={self.sides!r}) is defined for values only; use "
                "sides='v'"
            )
        values = AxisLayout.parse(f"{spec.heads.value_axis} vdim")
        values_only = self.sides == "v" and spec.project.kv_entry_layouts(spec).get("v") == values
        if not (spec.project.uses_head_dims or values_only):
            name = type(spec.project).__name__
            yield (
                "Knocking needs queries, keys and values with heads.dim and heads.vdim channels, "
                f"unlike {name}; "
                "use project Direct()"
            )

    def sizes(self, spec: AttentionSpec) -> Mapping[str, int]:
        return {"knocked": spec.heads.dim, "vknocked": spec.heads.vdim}

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        if self.kind == "mlp":
            return {
                "up": weight("vknocked vdim", identity_init),
                "gate": weight("vknocked vdim", zeros_init),
                "down": weight("vdim vknocked", identity_init),
            }
        axes = {"q": "knocked dim", "k": "knocked dim", "v": "vknocked vdim"}
        return {side: weight(axes[side], identity_init) for side in self.sides}

    def flops(self, spec: AttentionSpec, work: CallSize) -> int:
        heads = spec.heads
        matrices = 3 if self.kind == "mlp" else 1
        elements = {
            "q": work.queries * heads.q * heads.dim**2,
            "k": work.new_tokens * heads.kv * heads.dim**2,
            "v": work.new_tokens * heads.num_value_heads * heads.vdim**2,
        }
        return 2 * work.batch * matrices * sum(elements[side] for side in self.sides)

    def transformed_sides(self, spec: AttentionSpec) -> frozenset[str]:
        return frozenset(self.sides)

    def transform(self, x_BTHK: Tensor, side: str, precomputed: None, p: PartParams) -> Tensor:
        if self.kind == "linear":
            return F.linear(x_BTHK, p[side])
        open_BTHK = torch.sigmoid(F.linear(x_BTHK, p["gate"]))
        return F.linear(2 * F.linear(x_BTHK, p["up"]) * open_BTHK, p["down"])

    def as_matrix(self, side: str, p: Mapping[str, Tensor]) -> Tensor | None:
        return p[side] if self.kind == "linear" else None

    def without_sides(self, sides: frozenset[str]) -> Self | None:
        remaining = "".join(side for side in self.sides if side not in sides)
        return replace(self, sides=remaining) if remaining else None

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        from .rotary_embedding import Rotary

        yield base(modifiers=(cls(),), kv=2, vdim=5, bias="qkvo")
        yield base(modifiers=(cls(sides="qkv"), Rotary()), pattern="causal", kv=2)
        yield base(modifiers=(cls(kind="mlp"),), pattern="causal", vdim=5)
