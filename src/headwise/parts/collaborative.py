"""Heads that share one query-key space, each weighing its channels in its own way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layout import Layout
from ..registry import part
from ..seams import Project, Turn
from ..spec import AttentionSpec
from ..terms import Base, Core, Param, Turning, Weighted
from .start import normal, xavier, zeros


@part
class Collaborative(Project):
    """s_i = scale (x W_Q diag(m_i) . z W_K + z.c_i): one shared key, a mixing vector and a content bias a head.

    (2006.16362.) The scale stays 1/sqrt(heads.dim) whatever the shared width, so that a converted layer keeps
    its scores. Inside, the content bias rides in the key: q' = [m_i * q, e_i], k' = [k, z.c_1 .. z.c_h].

    >>> import headwise as hw
    >>> spec = hw.design(model=8, heads=2, project=Collaborative(width=4))
    >>> hw.counting.cache_numbers(spec)  # 4 shared key channels, 2 content biases, 8 value channels
    14
    """

    paper = "2006.16362"
    width: int = 64
    bias: str = ""

    def clashes(self, spec: AttentionSpec) -> Iterable[str]:
        if self.bias not in ("", "v"):
            yield f"Collaborative(bias={self.bias!r}) is unknown; its content bias stands for q's, so use '' or 'v'"
        if self.width < 1:
            yield f"Collaborative(width={self.width}) leaves nothing to compare; use at least 1"
        if any(step.reaches(spec) & set("qk") for _, step in spec.steps(Turn)):
            yield "Collaborative's heads share one query-key space, which no per-head turn can reach; leave turns out"

    def sizes(self, spec: AttentionSpec) -> Mapping[str, int]:
        return {"width": self.width}

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        axis = spec.heads.value_axis
        params = {
            "q": Param(Layout.parse("width model"), xavier, "query"),
            "k": Param(Layout.parse("width source"), xavier, "source"),
            "mixing": Param(Layout.parse("q width"), normal(0.2)),
            "content": Param(Layout.parse("q source"), xavier, "source"),
            "v": Param(Layout.parse(f"({axis} vdim) source"), xavier, "source"),
        }
        return params | ({"v_bias": Param(Layout.parse(f"({axis} vdim)"), zeros)} if self.bias else {})

    def entry(self, spec: AttentionSpec) -> Mapping[str, Layout]:
        values = Layout.parse(f"{spec.heads.value_axis} vdim")
        return {"k": Layout.parse("width"), "content": Layout.parse("q"), "v": values}

    def core(self, spec: AttentionSpec) -> Core:
        heads = spec.heads
        values = tuple(heads.value_of[row] for row in spec.voices)
        return Core((0,) * heads.q, values, self.width + heads.q, heads.vdim, heads.dim**-0.5)

    def ask(self, x_BTD: Tensor, turn: Turning, p: Weighted) -> Tensor:
        mixed = F.linear(x_BTD, p["q"])[..., None, :] * p["mixing"]
        own = torch.eye(mixed.shape[-2], dtype=mixed.dtype, device=mixed.device)
        return torch.cat([mixed, own.expand(*mixed.shape[:2], -1, -1)], -1)

    def remember(self, z_BSE: Tensor, turn: Turning, p: Weighted) -> dict[str, Tensor]:
        v = F.linear(z_BSE, p["v"], p["v_bias"] if self.bias else None)
        v_BSGV = v.unflatten(-1, (-1, p.sizes["vdim"]))
        return {
            "k": F.linear(z_BSE, p["k"]),
            "content": F.linear(z_BSE, p["content"]),
            "v": turn(v_BSGV, "v"),
        }

    def recall(self, entry: Mapping[str, Tensor], turn: Turning, p: Weighted) -> tuple[Tensor, Tensor]:
        return torch.cat([entry["k"], entry["content"]], -1)[..., None, :], entry["v"]

    @classmethod
    def examples(cls, base: Base) -> Iterator[AttentionSpec]:
        yield base(project=cls(width=8), pattern="causal", vdim=5)
        yield base(project=cls(width=9, bias="v"), kv=2, source=13)
