"""Heads that talk: a learned mixing of all heads, the same at every pair of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from ..layout import Layout
from ..registry import part
from ..seams import Base, Mix, Param, Phase, Weighted, Work
from ..spec import AttentionSpec
from .start import identity


@part
class TalkingHeads(Mix):
    """a'_h = sum over g of a_g P[g, h], on the scores before the pattern or on the weights (2003.02436).

    P starts as the identity, so a fresh layer is plain attention:

    >>> TalkingHeads().pair(torch.tensor([1.0, 2.0]), {}, {}, {"mixing": torch.eye(2)}).tolist()
    [1.0, 2.0]
    """

    paper = "2003.02436"
    on: str = "scores"

    @property
    def phase(self) -> Phase:
        return Phase.WEIGHTS if self.on == "weights" else Phase.SCORES

    def clashes(self, spec: AttentionSpec) -> Iterable[str]:
        if self.on not in ("scores", "weights"):
            yield f"TalkingHeads(on={self.on!r}) is unknown; use 'scores' or 'weights'"
        if self.on == "weights" and spec.voices != spec.speaks:
            yield "TalkingHeads(on='weights') gives output heads, but an output step wants to join their rows first"

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        axes = "q out" if self.on == "weights" else "q mixed"
        return {"mixing": Param(Layout.parse(axes), identity)}

    def sizes(self, spec: AttentionSpec) -> Mapping[str, int]:
        return {"mixed": spec.heads.q}

    def flops(self, spec: AttentionSpec, work: Work) -> int:
        heads = spec.heads.q if self.on == "scores" else len(spec.voices)
        return 2 * work.batch * work.pairs * spec.heads.q * heads

    def sources(self, spec: AttentionSpec, heads: frozenset[int]) -> frozenset[int]:
        return frozenset(range(spec.heads.q))

    def pair(self, a_H: Tensor, asked: Mapping[str, Tensor], kept: Mapping[str, Tensor], p: Weighted) -> Tensor:
        return a_H @ p["mixing"].to(a_H.dtype)

    def mix(self, a_BHTS: Tensor, asked: Mapping[str, Tensor], kept: Mapping[str, Tensor], p: Weighted) -> Tensor:
        return torch.einsum("bgts,gh->bhts", a_BHTS, p["mixing"].to(a_BHTS.dtype))

    @classmethod
    def examples(cls, base: Base) -> Iterator[AttentionSpec]:
        yield base(modifiers=(cls(),), pattern="causal", kv=2)
        yield base(modifiers=(cls(on="scores"), cls(on="weights")), pattern="window(4)", vdim=5)
