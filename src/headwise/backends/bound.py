"""The parts that run inside the core, each with its weights, in the order in which they act."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ..seams import Foldable, Mix, Normaliser, Part, ScoreStep, Similarity, ValueStep, WeightStep
from ..spec import AttentionSpec
from ..terms import Phase, Weighted
from ..tokens import Sight
from .job import Inputs

Gather = Callable[[Tensor, Tensor, Tensor, tuple[int, ...], Weighted], Tensor]
WITHIN = (Similarity, Normaliser, ScoreStep, Mix, WeightStep, ValueStep)


@runtime_checkable
class Act(Protocol):
    """One change of a tensor [B, H, T, S] of scores or weights."""

    def __call__(self, a_BHTS: Tensor, sight: Sight, inputs: Inputs, /) -> Tensor: ...


@dataclass(frozen=True)
class Bound:
    """What a backend runs between q, k, v and the per-head outputs."""

    similarity: Similarity
    similarity_p: Weighted
    folder: tuple[Foldable, Weighted] | None  # what can keep past tokens as sums
    scores: Sequence[Act]
    normaliser: Normaliser
    normaliser_p: Weighted
    normalise: Callable[[Tensor, Tensor, Weighted], Tensor]
    gather: Gather | None  # in one with the reading of values
    weights: Sequence[Act]
    values: Sequence[tuple[ValueStep, Weighted]]
    elementwise: Sequence[tuple[ScoreStep, Weighted]]
    selected: tuple[int, ...] | None  # the rows of weights that read values, when some do not
    weighted: Sequence[Weighted]  # of every part in here
    straight: bool  # whether values are read with weights just as they were normalised
    pattern: str  # who reads whom, as text: what a kernel that torch knows by name can be told

    @staticmethod
    def of(spec: AttentionSpec, p: Mapping[str, Weighted]) -> Bound:
        """Bind the parts of a spec to their weights."""
        acts = {
            phase: [
                _act(spec, name, part, p[name])
                for name, part in spec.parts()
                if isinstance(part, (ScoreStep, Mix, WeightStep)) and part.phase is phase
            ]
            for phase in (Phase.SCORES, Phase.WEIGHTS)
        }
        mixed = any(isinstance(part, Mix) and part.phase is Phase.WEIGHTS for _, part in spec.parts())
        every = mixed or spec.voices == tuple(range(spec.heads.rows))
        return Bound(
            similarity=spec.similarity,
            similarity_p=p["similarity"],
            folder=spec.folder and (spec.folder[1], p[spec.folder[0]]),
            scores=acts[Phase.SCORES],
            normaliser=spec.normaliser,
            normaliser_p=p["normaliser"],
            normalise=spec.normaliser.normalise,
            gather=None,
            straight=straight(spec),
            weights=acts[Phase.WEIGHTS],
            values=[(step, p[name]) for name, step in spec.steps(ValueStep)],
            elementwise=[(step, p[name]) for name, step in spec.steps(ScoreStep)],
            selected=None if every else spec.voices,
            weighted=[p[name] for name, part in spec.parts() if isinstance(part, WITHIN)],
            pattern=spec.pattern.text,
        )

    def fused(self) -> Bound:
        """The same with heads mixed, and scores normalised, by kernels where parts have some."""
        acts = {phase: [*map(_fused, getattr(self, phase))] for phase in ("scores", "weights")}
        gather = self.normaliser.gather if self.straight else None
        return replace(self, **acts, normalise=self.normaliser.fused, gather=gather)

    @property
    def learned(self) -> list[Tensor]:
        """Every parameter that is read in here."""
        return [t for p in self.weighted for t in p.learned()]

    def bias(self, sight: Sight, inputs: Inputs) -> Tensor:
        """What additive score steps add, as scores over which they were run on zero."""
        zero = inputs.q.new_zeros(1, 1, sight.queries.count, sight.keys.count)
        for act in self.scores:
            zero = act(zero, sight, inputs)
        return zero


class Cells:
    """All pairs of a call at once: positions [B, 1, T, 1] and [B, 1, 1, S]."""

    def __init__(self, sight: Sight) -> None:
        self.i, self.j = sight.i, sight.j

    def take(self, factors: Tensor, index: Tensor) -> Tensor:
        """factors [B, T, H, R] at index [B, 1, T, S], as [B, H, T, S]."""
        by_head = factors.transpose(1, 2)
        return by_head.gather(-1, index.expand(*by_head.shape[:3], index.shape[-1]))


def straight(spec: AttentionSpec) -> bool:
    """Whether every row of weights reads values just as it was normalised."""
    acts = (part for part in spec.modifiers if part.phase is Phase.WEIGHTS or isinstance(part, ValueStep))
    return spec.voices == tuple(range(spec.heads.rows)) and not any(acts)


def _act(spec: AttentionSpec, name: str, part: Part, p: Weighted) -> Act:
    # Partials and not closures: a copy of a layer must act with its own weights, and only these are copied.
    if isinstance(part, Mix):
        return partial(_mix, part, p, {key: f"{name}.{key}" for key in part.entry(spec)})
    if isinstance(part, ScoreStep):
        return partial(_score, part, p)
    assert isinstance(part, WeightStep)
    return partial(_weigh, part, p)


def _fused(act: Act) -> Act:
    return partial(_mix_fused, *act.args) if isinstance(act, partial) and act.func is _mix else act


def _mix_fused(part: Mix, p: Weighted, names: Mapping[str, str], a: Tensor, sight: Sight, inputs: Inputs) -> Tensor:
    kept = {key: inputs.entry[name] for key, name in names.items()}
    return part.fused(a, part.ask(inputs.asked.x_BTD, p), kept, p)


def _mix(part: Mix, p: Weighted, names: Mapping[str, str], a: Tensor, sight: Sight, inputs: Inputs) -> Tensor:
    kept = {key: inputs.entry[name] for key, name in names.items()}
    return part.mix(a, part.ask(inputs.asked.x_BTD, p), kept, p)


def _score(part: ScoreStep, p: Weighted, s: Tensor, sight: Sight, inputs: Inputs) -> Tensor:
    return part.score(s, Cells(sight), part.ask(inputs.asked, p), p.spread())


def _weigh(part: WeightStep, p: Weighted, w: Tensor, sight: Sight, inputs: Inputs) -> Tensor:
    return part.weigh(w, p)


def spread_heads(x_BSGK: Tensor, heads: tuple[int, ...]) -> Tensor:
    """x_BHSK: for each reader the head it reads; a view when every head has its own or all read one."""
    x_BGSK = x_BSGK.transpose(1, 2)
    if heads == tuple(range(x_BGSK.shape[1])):
        return x_BGSK
    if x_BGSK.shape[1] == 1:
        return x_BGSK.expand(-1, len(heads), -1, -1)
    return x_BGSK.index_select(1, torch.tensor(heads, device=x_BGSK.device))


def as_rows(x_BHTK: Tensor, each: int) -> Tensor:
    """[B, heads / each, each x T, K]: the heads of one group as rows of one product, so that no key is repeated."""
    return x_BHTK.unflatten(1, (-1, each)).flatten(2, 3)


def as_heads(rows: Tensor, each: int) -> Tensor:
    """The same rows as heads again."""
    return rows.unflatten(2, (each, -1)).flatten(1, 2)
