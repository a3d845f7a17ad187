"""Gates on head outputs: sigmoid gates computed from the query token, and hard-concrete gates,
which learn which heads to switch off under an L0 penalty.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ..interfaces import Gate
from ..interfaces.core_types import AuxLosses, Param, PartParams, QueryContext, SpecFactory
from ..interfaces.part import part
from ..spec.attention_spec import AttentionSpec
from .initialisers import constant, constant_value, weight, xavier_uniform


@dataclass(frozen=True, repr=False)
class SigmoidGate(Gate):
    """Base class of sigmoid gates computed from the query token, with a bias if it has a start."""

    axes: ClassVar[str] = "out"
    start: float | None = None

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        params = {"gate": weight(f"{self.axes} model", xavier_uniform, "query")}
        if self.start is not None:
            params["bias"] = weight(self.axes, constant_value(self.start))
        return params

    def sigmoid_of_query(self, context: QueryContext, p: PartParams) -> Tensor:
        """The gates of each token, flat."""
        bias = None if self.start is None else p["bias"]
        return torch.sigmoid(F.linear(context.x_BTD, p["gate"], bias))

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(modifiers=(cls(),), kv=2, vdim=5)
        yield base(modifiers=(cls(start=4.0),))


@part
class HeadGate(SigmoidGate):
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

    def gate(self, context: QueryContext, p: PartParams, aux_losses: AuxLosses | None) -> Tensor:
        return self.sigmoid_of_query(context, p)[..., None]


@part
class OutputGate(SigmoidGate):
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
    axes: ClassVar[str] = "(out vdim)"

    def gate(self, context: QueryContext, p: PartParams, aux_losses: AuxLosses | None) -> Tensor:
        return self.sigmoid_of_query(context, p).unflatten(-1, (-1, p.sizes["vdim"]))


# distance from 0 and 1 that uniform samples and probabilities are clamped to, as released
CLAMP_EPS = 1e-6


@part
class HardConcreteGate(Gate):
    """o_h g_h, g = clip(low + (high - low) sigmoid((logit u + log_a_h) / temperature), 0, 1), u
    uniform (1905.09418).

    A hard-concrete gate (1712.01312) with one number log_a per output head. During training u is
    sampled once per head and call; sample="hard" rounds g to 0 or 1 with a straight-through
    gradient. Otherwise nothing is sampled: evaluation="code" is clip(low + (high - low)
    sigmoid(log_a), 0, 1), without the temperature, as released; evaluation="hard" is the more
    likely of 0 and 1, as published, and 1 if both are equally likely.

    The auxiliary loss "l0" is the sum over heads of P(g != 0) = sigmoid(log_a - temperature
    log(-low / high)). Auxiliary losses are summed over layers: regulariser="sum", as published, is
    the sum over all heads; "mean", as released, is the mean over the `layers` that have gates. For
    an initial drop probability r use start=log((1 - r) / r). per="kv" uses one gate for all heads
    of a key-value head; `gates` is the number of gates before pruning.

    >>> round(
    ...     HardConcreteGate().probability_nonzero(torch.tensor(0.0)).item(), 3
    ... )  # 1 / (1 + 11 ** -0.33)
    0.688
    """

    paper = "1905.09418"
    unrestricted_sides: ClassVar[str] = "kv"
    disagreements: ClassVar[tuple[str, ...]] = (
        "The paper sums the penalty over all heads, its code takes the mean over layers: see "
        "`regulariser`.",
        "At test time gates are 0 or 1 in the paper, sigmoid(log_a) without temperature in its "
        "code: see `evaluation`.",
        "log_a starts near 0 in this code, and from a drop rate in that of Louizos: see `start`.",
    )
    temperature: float = 0.33
    low: float = -0.1
    high: float = 1.1
    start: float = 0.0
    sample: str = "soft"
    evaluation: str = "code"
    regulariser: str = "sum"
    layers: int = 1
    per: str = "head"
    gates: int = 0
    field_choices: ClassVar = {
        "sample": ("soft", "hard"),
        "evaluation": ("code", "hard"),
        "regulariser": ("sum", "mean"),
        "per": ("head", "kv"),
    }
    field_minima: ClassVar = {"layers": 1}
    positive_fields: ClassVar = ("temperature",)

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        if not self.low < 0:
            yield (
                f"HardConcreteGate(low={self.low!r}) can never close a gate; use a number below "
                "0, -0.1 is usual"
            )
        if not self.high > 1:
            yield (
                f"HardConcreteGate(high={self.high!r}) can never fully open a gate; use a number "
                "above 1, 1.1 is usual"
            )
        if self.gates and (self.per == "head" or self.gates <= max(spec.kv_head_of_output)):
            yield (
                f"HardConcreteGate(gates={self.gates}) does not match the key-value heads; leave "
                "gates out"
            )
        if self.layers > 1 and self.regulariser == "sum":
            yield (
                f"HardConcreteGate(layers={self.layers}) is for a mean over layers; use "
                "regulariser='mean', or leave it out"
            )
        if sum(isinstance(modifier, HardConcreteGate) for modifier in spec.modifiers) > 1:
            yield (
                "two HardConcreteGate parts in a layer would overwrite each other's auxiliary "
                "loss; keep one"
            )

    def at_depth(self, layer: int, layers: int) -> Self:
        return replace(self, layers=layers) if self.regulariser == "mean" else self

    def sizes(self, spec: AttentionSpec) -> Mapping[str, int]:
        return {"gate": self.gates or max(spec.kv_head_of_output) + 1} if self.per == "kv" else {}

    def with_fixed_sizes(self, spec: AttentionSpec) -> Self:
        return replace(self, gates=self.sizes(spec).get("gate", 0))

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        if self.per == "head":
            return {"log_a": weight("out", constant_value(self.start))}
        own = constant("out", spec.kv_head_of_output)
        return {"log_a": weight("gate", constant_value(self.start)), "own": own}

    def gate(self, context: QueryContext, p: PartParams, aux_losses: AuxLosses | None) -> Tensor:
        log_a = p["log_a"].to(torch.promote_types(context.x_BTD.dtype, torch.float32))
        if aux_losses is not None:
            aux_losses.set(
                "l0",
                aux_losses.sum_over(
                    self._gate_of_each_head(self.probability_nonzero(log_a), p).sum(), "heads"
                )
                / self.layers,
            )
        gate = self._gate_of_each_head(
            self._sample_gate(log_a) if p.training else self._deterministic_gate(log_a), p
        )
        return gate.to(context.x_BTD.dtype)[:, None]

    def open_probabilities(self, p: PartParams) -> Tensor:
        return self._gate_of_each_head(self.probability_nonzero(p["log_a"]), p)

    def _gate_of_each_head(self, gates: Tensor, p: PartParams) -> Tensor:
        """The gate of each output head; with per="kv", heads of a group share one."""
        return gates if self.per == "head" else gates[p["own"]]

    def probability_nonzero(self, log_a: Tensor) -> Tensor:
        """P(g != 0), the probability that a head's gate is open."""
        return torch.sigmoid(log_a - self.temperature * math.log(-self.low / self.high)).clamp(
            CLAMP_EPS, 1 - CLAMP_EPS
        )

    def _sample_gate(self, log_a: Tensor) -> Tensor:
        u = CLAMP_EPS + (1 - 2 * CLAMP_EPS) * torch.rand(
            log_a.shape, dtype=log_a.dtype, device=log_a.device
        )
        soft = self._stretch_and_clip((torch.logit(u) + log_a) / self.temperature)
        return (
            soft if self.sample == "soft" else (soft > 0.5).to(soft.dtype) + (soft - soft.detach())
        )

    def _deterministic_gate(self, log_a: Tensor) -> Tensor:
        if self.evaluation == "code":
            return self._stretch_and_clip(log_a)
        # P(g = 0) = sigmoid(t log(-low / high) - log_a), P(g = 1) = sigmoid(log_a - t log((1 - low)
        # / (high - 1)))
        even = (
            self.temperature
            / 2
            * (math.log(-self.low / self.high) + math.log((1 - self.low) / (self.high - 1)))
        )
        return (log_a >= even).to(log_a.dtype)

    def _stretch_and_clip(self, logit: Tensor) -> Tensor:
        return (self.low + (self.high - self.low) * torch.sigmoid(logit)).clamp(0, 1)

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(modifiers=(cls(),), kv=2, vdim=5)
        yield base(
            modifiers=(cls(temperature=0.7, low=-0.2, high=1.4, start=1.5, sample="hard"),),
            pattern="causal",
        )
        yield base(modifiers=(cls(evaluation="hard"),))
        yield base(modifiers=(cls(regulariser="mean", layers=5),))
        yield base(modifiers=(cls(per="kv"),), kv=2)
