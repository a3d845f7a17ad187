"""The definition: one query at a time, over its list of allowed keys, in float64. Slow, and the judge.

It never masks and never works on many positions at once: the scores of a pair are a vector over heads, mixing
is the part's `pair`, and each head's row is normalised by the part's `row`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .module import Attention, Turning
from .seams import Asked, Core, Gate, Mix, Modifier, OutputStep, Phase, Project, ScoreStep, Turn, ValueStep, Weighted
from .tokens import Tokens


class Pair(NamedTuple):
    """One query and one key, by position."""

    i: Tensor
    j: Tensor

    def take(self, factors: Tensor, index: Tensor) -> Tensor:
        """This query's factors [H, R] at an index."""
        return factors[:, index]


def attention(
    layer: Attention,
    x_BTD: Tensor,
    *,
    source: Tensor | None = None,
    tokens: Tokens | None = None,
    source_tokens: Tokens | None = None,
    mask: Tensor | None = None,
    project: Project | None = None,
) -> Tensor:
    """y_BTD, from the definition; `project` tries a rewrite in the place of the spec's own."""
    spec = layer.spec
    project = project or spec.project
    p: dict[str, Weighted] = {name: layer.get_submodule(name) for name, _ in spec.parts()}  # pyright: ignore
    at = tokens or Tokens.run(0, x_BTD.shape[1], x_BTD.device)
    z_BSE = x_BTD if source is None else source
    told = source_tokens or (at if source is None else Tokens.run(0, z_BSE.shape[1], x_BTD.device))
    q, k, v, core = _project(layer, project, p, x_BTD, z_BSE, at, told)
    asked = Asked(x_BTD, q, spec.similarity.factor(core), at.live)
    one = _Query(layer, core, p, asked, z_BSE)
    rows = []
    for b in range(x_BTD.shape[0]):
        for t in range(x_BTD.shape[1]):
            keys = _readable(layer, b, t, at, told, mask)
            rows.append(one.read(b, t, keys, k[b], v[b], (_of(at, b), _of(told, b))))
    o_BTRV = torch.stack(rows).view(*x_BTD.shape[:2], -1, v.shape[-1]) if rows else v.new_zeros(*x_BTD.shape[:2], 1, 1)
    o_BTOV = project.deliver(o_BTRV, p["project"])
    for name, step in spec.steps(OutputStep):
        o_BTOV = step.finish(o_BTOV, x_BTD, p[name])
    for name, gate in spec.steps(Gate):
        o_BTOV = o_BTOV * gate.gate(asked, p[name], None)
    return spec.merge.merge(o_BTOV, p["output"])


def _project(
    layer: Attention, project: Project, p: Mapping[str, Weighted], x: Tensor, z: Tensor, at: Tokens, told: Tokens
) -> tuple[Tensor, Tensor, Tensor, Core]:
    spec = layer.spec
    turns = {s: [(t, p[n]) for n, t in spec.steps(Turn) if s in t.reaches(spec)] for s in "qkv"}
    asks, tells = Turning(turns, at.position), Turning(turns, told.position)
    q = project.ask(x, asks, p["project"])
    k, v = project.recall(project.remember(z, tells, p["project"]), tells, p["project"])
    return q, k, v, project.core(spec)


def _readable(layer: Attention, b: int, t: int, at: Tokens, told: Tokens, mask: Tensor | None) -> list[int]:
    """The indices of the keys that this query may read: same segment, allowed by the pattern, and not masked."""
    asks, tells = _of(at, b), _of(told, b)
    mine = int(asks.segment[t])
    return [
        s
        for s in range(told.count)
        if mine >= 0
        and int(tells.segment[s]) == mine
        and bool(layer.spec.pattern.allows(int(asks.position[t]), int(tells.position[s])))
        and (mask is None or bool(mask.expand(at.live.shape[0] if mask.shape[0] == 1 else -1, -1, -1, -1)[b, 0, t, s]))
    ]


class _Row(NamedTuple):
    position: Tensor
    segment: Tensor


def _of(tokens: Tokens, b: int) -> _Row:
    row = b if tokens.position.shape[0] > 1 else 0
    return _Row(tokens.position[row], tokens.segment[row])


class _Query:
    """Reads one query's keys, head by head, with everything that acts between scores and outputs."""

    def __init__(
        self, layer: Attention, core: Core, p: Mapping[str, Weighted], asked: Asked, z_BSE: Tensor
    ) -> None:
        spec = layer.spec
        self.spec, self.core, self.p, self.asked = spec, core, p, asked
        self.factors = {name: step.ask(asked, p[name]) for name, step in spec.steps(ScoreStep)}
        self.mixes = {name: (m.ask(asked.x_BTD, p[name]), m.remember(z_BSE, p[name])) for name, m in spec.steps(Mix)}

    def read(
        self, b: int, t: int, keys: Sequence[int], k_SGK: Tensor, v_SGV: Tensor, where: tuple[_Row, _Row]
    ) -> Tensor:
        """o_RV: what the rows of this query's weights read."""
        if not keys:
            return v_SGV.new_zeros(len(self.core.values), v_SGV.shape[-1])
        pairs = [(s, Pair(where[0].position[t], where[1].position[s])) for s in keys]
        s_NH = torch.stack([self._score(b, t, s, pair, k_SGK) for s, pair in pairs])
        normaliser, p = self.spec.normaliser, self.p["normaliser"]
        w_NH = torch.stack([normaliser.row(s_NH[:, h], p.head(h)) for h in range(s_NH.shape[1])], 1)
        steps = self._steps(Phase.WEIGHTS)
        mixes = [(name, step) for name, step in steps if isinstance(step, Mix)]
        for name, mix in mixes:
            w_NH = torch.stack([self._mixed(name, mix, w_NH[n], b, t, s) for n, s in enumerate(keys)])
        w_NR = w_NH if mixes else w_NH[:, list(self.spec.voices)]
        return torch.stack([w @ self._value(s, pair, v_SGV) for w, (s, pair) in zip(_diagonals(w_NR), pairs, strict=True)]).sum(0)

    def _score(self, b: int, t: int, s: int, pair: Pair, k_SGK: Tensor) -> Tensor:
        q_HK, k_HK = self.asked.q_BTHK[b, t], k_SGK[s, list(self.core.keys)]
        s_H = self.spec.similarity.pair(q_HK, k_HK, self.asked.scale, {})
        for name, step in self._steps(Phase.SCORES):
            if isinstance(step, Mix):
                s_H = self._mixed(name, step, s_H, b, t, s)
            elif isinstance(step, ScoreStep):
                factors, p = self.factors[name], self.p[name]
                mine = None if factors is None else factors[b, t]
                s_H = step.score(s_H, pair, mine, {key: p[key] for key in step.params(self.spec)})
        return s_H

    def _mixed(self, name: str, mix: Mix, a_H: Tensor, b: int, t: int, s: int) -> Tensor:
        asked, kept = self.mixes[name]
        mine = {key: factor[b, t] for key, factor in asked.items()}
        its = {key: factor[b, s] for key, factor in kept.items()}
        return mix.pair(a_H, mine, its, self.p[name])

    def _value(self, s: int, pair: Pair, v_SGV: Tensor) -> Tensor:
        v_RV = v_SGV[s, list(self.core.values)]
        for name, step in self.spec.steps(ValueStep):
            v_RV = v_RV + step.value(int(pair.i), int(pair.j), self.p[name])
        return v_RV

    def _steps(self, phase: Phase) -> list[tuple[str, Modifier]]:
        return [(name, step) for name, step in self.spec.steps(Modifier) if step.phase is phase]


def _diagonals(w_NR: Tensor) -> list[Tensor]:
    return [torch.diag(w) for w in w_NR]
