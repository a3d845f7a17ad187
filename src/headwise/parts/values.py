"""Values alone: neither queries nor keys, so nothing of the weights comes from the tokens' contents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Self

import torch.nn.functional as F
from torch import Tensor

from ..layout import Layout
from ..registry import part
from ..seams import Project, Turn
from ..spec import AttentionSpec
from ..terms import Base, Core, Param, Turning, Weighted
from .average import Average
from .direct import absorbed
from .start import xavier, zeros


@part
class Values(Project):
    """v = z W_V + b_V, and no q or k: every score starts at 0.

    With Average the averaging branch of merged attention (1908.11365), with a `Learned` score a synthesizer
    (2005.00743), with T5Bias or Alibi attention by position alone. Of the parameters W_V and W_O are left:

    >>> import headwise as hw
    >>> hw.counting.params(hw.design(model=8, heads=2, project=Values()))  # 2 d^2
    128
    """

    paper = "1908.11365"
    bias: str = ""

    def clashes(self, spec: AttentionSpec) -> Iterable[str]:
        if self.bias not in ("", "v"):
            yield f"Values(bias={self.bias!r}) asks for biases it has no use for; use '' or 'v'"
        if not spec.similarity.linear:
            yield f"Values has no q and k that {type(spec.similarity).__name__} could compare; use similarity Dot()"
        for name, turn in spec.steps(Turn):
            if turn.reaches(spec) & set("qk"):
                yield f"Values has no q and k for {name} to turn; leave it out, or use project Direct()"

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        rows = f"({spec.heads.value_axis} vdim)"
        weights = {"v": Param(Layout.parse(f"{rows} source"), xavier, "source")}
        return weights | ({"v_bias": Param(Layout.parse(rows), zeros)} if self.bias else {})

    def entry(self, spec: AttentionSpec) -> Mapping[str, Layout]:
        return {"v": Layout.parse(f"{spec.heads.value_axis} vdim")}

    def turned(self, spec: AttentionSpec) -> int:
        return 0

    def shifts(self, spec: AttentionSpec, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        heads = spec.heads
        reads = [heads.value_of[voice] for voice in spec.voices]
        return {"v": weights["project.v_bias"].view(heads.v, heads.vdim)[reads]} if self.bias else {}

    def without(self, biases: frozenset[str]) -> Self:
        return replace(self, bias="" if "v" in biases else self.bias)

    def absorb(
        self, spec: AttentionSpec, weights: Mapping[str, Tensor], side: str, matrix: Tensor
    ) -> Mapping[str, Tensor]:
        names = [key for key in ("v", "v_bias") if key in self.params(spec)]
        return absorbed(weights, names, matrix) if side == "v" else {}

    def core(self, spec: AttentionSpec) -> Core:
        heads = spec.heads
        return Core(heads.reads, tuple(heads.value_of[row] for row in spec.voices), 0, heads.vdim, 1.0)

    def ask(self, x_BTD: Tensor, turn: Turning, p: Weighted) -> Tensor:
        return x_BTD.new_zeros(*x_BTD.shape[:2], p.sizes["q"], 0)

    def remember(self, z_BSE: Tensor, turn: Turning, p: Weighted) -> dict[str, Tensor]:
        v = F.linear(z_BSE, p["v"], p["v_bias"] if self.bias else None)
        return {"v": turn(v.unflatten(-1, (-1, p.sizes["vdim"])), "v")}

    def recall(self, entry: Mapping[str, Tensor], turn: Turning, p: Weighted) -> tuple[Tensor, Tensor]:
        v_BSGV = entry["v"]
        return v_BSGV.new_zeros(*v_BSGV.shape[:2], p.sizes["kv"], 0), v_BSGV

    @classmethod
    def examples(cls, base: Base) -> Iterator[AttentionSpec]:
        from .alibi import Alibi

        yield base(project=cls(), normaliser=Average(), pattern="causal", kv=3, vdim=5)
        yield base(project=cls(bias="v"), kv=2, source=13)
        yield base(project=cls(), modifiers=(Alibi(),), pattern="window(4)")
