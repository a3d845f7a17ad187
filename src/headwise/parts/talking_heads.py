"""Heads that talk: a learned mixing of all heads, the same at every pair of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from torch import Tensor

from ..layout import Layout
from ..registry import part
from ..seams import Mix
from ..spec import AttentionSpec
from ..terms import Base, Param, Phase, Weighted, Work
from .start import identity


@part
class TalkingHeads(Mix):
    """a'_h = sum over g of a_g P[g, h], on the scores before the pattern or on the weights (2003.02436).

    P starts as the identity, so a fresh layer is plain attention:

    >>> import torch
    >>> TalkingHeads().pair(torch.tensor([1.0, 2.0]), {}, {}, {"mixing": torch.eye(2)}).tolist()
    [1.0, 2.0]
    """

    paper = "2003.02436"
    even: ClassVar[bool] = True
    on: str = "scores"

    @property
    def phase(self) -> Phase:
        return Phase.WEIGHTS if self.on == "weights" else Phase.SCORES

    def clashes(self, spec: AttentionSpec) -> Iterable[str]:
        if self.on not in ("scores", "weights"):
            yield f"TalkingHeads(on={self.on!r}) is unknown; use 'scores' or 'weights'"

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
        return mixed_heads(a_BHTS, p["mixing"])

    @classmethod
    def examples(cls, base: Base) -> Iterator[AttentionSpec]:
        yield base(modifiers=(cls(),), pattern="causal", kv=2)
        yield base(modifiers=(cls(on="scores"), cls(on="weights")), pattern="window(4)", vdim=5)


def mixed_heads(a_BHTS: Tensor, mixing_HO: Tensor) -> Tensor:
    """Heads mixed alike at every pair: [B, H, T, S] to [B, O, T, S]."""
    return (mixing_HO.to(a_BHTS.dtype).T @ a_BHTS.flatten(2)).unflatten(2, a_BHTS.shape[2:])
