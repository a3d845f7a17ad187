"""Heads that talk: a learned mixing of all heads, the same at every pair of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from ..interfaces import Mix, ScoreStep
from ..interfaces.axis_layout import AxisLayout
from ..interfaces.core_types import CallSize, Param, PartParams, Phase, SpecFactory
from ..interfaces.registry import part
from ..spec.attention_spec import AttentionSpec
from ..spec.heads import Heads
from .initialisers import identity_init


@part
class TalkingHeads(Mix):
    """a'_h = sum over g of a_g P[g, h], on the scores before the pattern or on the weights (2003.02436).

    `heads` says how many come out, when that is not how many go in: the paper's h_k score heads, h softmaxes and
    h_v value heads are TalkingHeads(heads=h) on the scores and TalkingHeads(on="weights", heads=h_v).
    P starts as the identity, so a fresh layer is plain attention (CaiT's released code starts it at random):

    >>> import torch
    >>> TalkingHeads().mix_pair(torch.tensor([1.0, 2.0]), {}, {}, {"mixing": torch.eye(2)}).tolist()
    [1.0, 2.0]
    """

    paper = "2003.02436"
    disagreements: ClassVar[tuple[str, ...]] = (
        "The mixing starts as the identity; CaiT's released code starts it at random.",
    )
    position_independent: ClassVar[bool] = True
    on: str = "scores"
    heads: int = 0

    @property
    def phase(self) -> Phase:
        return Phase.WEIGHTS if self.on == "weights" else Phase.SCORES

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        if self.on not in ("scores", "weights"):
            yield f"TalkingHeads(on={self.on!r}) is unknown; use 'scores' or 'weights'"
        if self.heads < 0:
            yield f"TalkingHeads(heads={self.heads}) is no number of heads; leave it out for as many as there are"
        if self.phase is Phase.SCORES and self.num_outputs(spec.heads.q) != spec.heads.q:
            yield from self._lost(spec)

    def _lost(self, spec: AttentionSpec) -> Iterable[str]:
        """Who acts on what comes out of it and has parameters for each score head, of which there are others now."""
        mixes = [mix for _, mix in spec.parts_of(Mix) if mix is not self]
        scores = [step for _, step in spec.parts_of(ScoreStep)][self._before(spec) :]
        for later in (spec.normaliser, *mixes, *scores):
            asks = isinstance(later, ScoreStep) and later.per_head
            if asks or any("q" in param.layout.axes for param in later.params(spec).values()):
                name = type(later).__name__
                yield (
                    f"TalkingHeads(heads={self.heads}) leaves other heads than the {spec.heads.q} that "
                    f"{name} has something of its own for; use heads=0, or do without {name}"
                )
        if any(mix.phase is Phase.SCORES for mix in mixes):
            yield f"TalkingHeads(heads={self.heads}) must be the only mixing on the scores; use heads=0"

    def _before(self, spec: AttentionSpec) -> int:
        """How many score steps are written before it."""
        written = spec.modifiers[: spec.modifiers.index(self)]
        return sum(isinstance(step, ScoreStep) for step in written)

    def num_outputs(self, heads: int) -> int:
        return self.heads or heads

    def fit_heads(self, heads: Heads) -> Heads:
        return replace(heads, values=tuple(range(self.heads))) if self.heads else heads

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        axes = "given out" if self.on == "weights" else "given mixed"
        return {"mixing": Param(AxisLayout.parse(axes), identity_init)}

    def sizes(self, spec: AttentionSpec) -> Mapping[str, int]:
        given = spec.heads.q if self.on == "scores" else spec.num_heads_after(Phase.SCORES)
        return {"given": given, "mixed": self.num_outputs(given)}

    def flops(self, spec: AttentionSpec, work: CallSize) -> int:
        sizes = self.sizes(spec)
        heads = sizes["mixed"] if self.on == "scores" else len(spec.score_head_of_row)
        return 2 * work.batch * work.pairs * sizes["given"] * heads

    def required_score_heads(self, spec: AttentionSpec, heads: frozenset[int]) -> frozenset[int]:
        return frozenset(range(spec.heads.q))

    def mix_pair(self, a_H: Tensor, asked: Mapping[str, Tensor], kept: Mapping[str, Tensor], p: PartParams) -> Tensor:
        return a_H @ p["mixing"].to(a_H.dtype)

    def mix(self, a_BHTS: Tensor, asked: Mapping[str, Tensor], kept: Mapping[str, Tensor], p: PartParams) -> Tensor:
        return mix_heads(a_BHTS, p["mixing"])

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        from .alibi import Alibi

        yield base(modifiers=(cls(),), pattern="causal", kv=2)
        yield base(modifiers=(cls(on="scores"), cls(on="weights")), pattern="window(4)", vdim=5)
        yield base(modifiers=(Alibi(), cls(heads=7), cls(on="weights", heads=5)), pattern="causal", vdim=9)
        yield base(modifiers=(cls(heads=5),), kv=3, source=13)


def mix_heads(a_BHTS: Tensor, mixing_HO: Tensor) -> Tensor:
    """Heads mixed alike at every pair: [B, H, T, S] to [B, O, T, S]."""
    return (mixing_HO.to(a_BHTS.dtype).T @ a_BHTS.flatten(2)).unflatten(2, a_BHTS.shape[2:])
