"""Gates that learn to be shut: each head pays for the chance that it is open."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from ..layout import Layout
from ..registry import part
from ..seams import Gate
from ..spec import AttentionSpec
from ..terms import Asked, Base, Ledger, Param, Weighted
from .start import full

_EPS = 1e-6


@part
class Concrete(Gate):
    """o_h * g_h, one hard-concrete gate per output head, 0 or 1 with a chance of its own (1712.01312, 1905.09418).

    Training: g = clip(s (high - low) + low, 0, 1) with s = sigmoid((log u - log(1 - u) + a) / temperature) and one
    uniform u a head and call, for all rows and tokens. The term "l0" in the ledger is what heads cost,
    P(g != 0) = sigmoid(a - temperature log(-low / high)), summed over the heads of the layer; regulariser="mean"
    divides by the number of `layers`, which placing sets. Otherwise s = sigmoid(a), stretched and clipped alike, or,
    with evaluation="hard", 1 where open is likelier than shut and else 0. sampling="hard" trains with 0 or 1, and
    hands the gradient on to the soft gate.

    `start` is the first a. A drop rate r, as Louizos starts from, is a = log((1 - r) / r):

    >>> g = Concrete(start=math.log((1 - 0.5) / 0.5)).opened(torch.zeros(1))
    >>> round(g.item(), 4)
    0.6881
    """

    paper = "1905.09418"
    disagreements: ClassVar[tuple[str, ...]] = (
        "The paper sums the cost over all heads, its code takes the mean over layers of the sum in each: regulariser.",
        "At test time gates are 0 or 1 in the paper, and sigmoid(a) without temperature in its code: evaluation.",
        "a starts near 0 in this code, from a drop rate in Louizos': start.",
    )
    temperature: float = 0.33
    low: float = -0.1
    high: float = 1.1
    start: float = 0.0
    regulariser: str = "sum"
    evaluation: str = "code"
    sampling: str = "soft"
    layers: int = 1

    def clashes(self, spec: AttentionSpec) -> Iterable[str]:
        if not self.temperature > 0:
            yield f"Concrete(temperature={self.temperature!r}) must be positive; 0.33 is published"
        if not (self.low < 0 and self.high > 1):
            yield f"Concrete(low={self.low!r}, high={self.high!r}) never shuts or never opens; use -0.1 and 1.1"
        if self.layers < 1:
            yield f"Concrete(layers={self.layers}) is no stack; use at least 1"
        words = {"regulariser": ("sum", "mean"), "evaluation": ("code", "hard"), "sampling": ("soft", "hard")}
        for name, known in words.items():
            if getattr(self, name) not in known:
                yield f"Concrete({name}={getattr(self, name)!r}) is unknown; use {known[0]!r} or {known[1]!r}"

    def placed(self, layer: int, layers: int) -> Self:
        return replace(self, layers=layers)

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        return {"log_a": Param(Layout.parse("out"), full(self.start))}

    def gate(self, asked: Asked, p: Weighted, ledger: Ledger | None) -> Tensor:
        log_a = p["log_a"].to(torch.promote_types(p["log_a"].dtype, torch.float32))
        if ledger is not None:
            ledger.set("l0", self.opened(log_a).sum() / (self.layers if self.regulariser == "mean" else 1))
        gate_O = self._sampled(log_a) if p.training else self._settled(log_a)
        return gate_O[:, None].to(asked.x_BTD.dtype)

    def opened(self, log_a: Tensor) -> Tensor:
        """The chance that a gate is not shut."""
        shift = self.temperature * math.log(-self.low / self.high)
        return torch.sigmoid(log_a - shift).clamp(_EPS, 1 - _EPS)

    def _sampled(self, log_a: Tensor) -> Tensor:
        u = torch.rand_like(log_a).clamp(_EPS, 1 - _EPS)
        soft = self._stretched(torch.sigmoid((u.log() - (1 - u).log() + log_a) / self.temperature))
        return soft if self.sampling == "soft" else soft + ((soft > 0.5).to(soft.dtype) - soft).detach()

    def _settled(self, log_a: Tensor) -> Tensor:
        if self.evaluation == "code":
            return self._stretched(torch.sigmoid(log_a))
        wide = torch.sigmoid(self.temperature * math.log((1 - self.low) / (self.high - 1)) - log_a)  # P(g < 1)
        return ((1 - wide) >= (1 - self.opened(log_a))).to(log_a.dtype)

    def _stretched(self, s: Tensor) -> Tensor:
        return (s * (self.high - self.low) + self.low).clamp(0, 1)

    @classmethod
    def examples(cls, base: Base) -> Iterator[AttentionSpec]:
        yield base(modifiers=(cls(),), kv=2, vdim=5)
        yield base(modifiers=(cls(temperature=0.5, low=-0.2, high=1.3, start=1.0, regulariser="mean", layers=3),))
        yield base(modifiers=(cls(evaluation="hard", sampling="hard"),), pattern="causal")
