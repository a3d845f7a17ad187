"""The only attention module: it owns the parameters and calls the parts in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from . import backends, inputs
from .backends import Bound, Inputs, Job
from .cache import Cache, Remembered, StateCache
from .probe import Probe
from .seams import Asked, Core, Gate, Ledger, Mix, OutputStep, Project, Turn, Weighted
from .spec import AttentionSpec
from .tokens import Sight, Tokens
from .weights import Weights


class Plan(NamedTuple):
    """How one kind of call runs: the form of the project, the job, and who does it."""

    project: Project
    job: Job
    backend: ModuleType
    scale: float


@dataclass(frozen=True)
class Turning:
    """The turns of each side, at the positions in hand."""

    turns: Mapping[str, list[tuple[Turn, Weighted]]]
    position_BT: Tensor

    def __call__(self, x_BTHK: Tensor, side: str) -> Tensor:
        for turn, p in self.turns[side]:
            x_BTHK = turn.turn(x_BTHK, side, self.position_BT, p)
        return x_BTHK


class Attention(nn.Module):
    """An attention layer: what its spec says, run by whichever backend takes the call.

    >>> import headwise as hw, torch
    >>> layer = hw.Attention(hw.design(model=8, heads=4, kv=2, pattern="causal"))
    >>> x = torch.randn(1, 5, 8)
    >>> cache = layer.cache(batch=1, capacity=16)
    >>> steps = [layer(x[:, t : t + 1], cache=cache) for t in range(5)]
    >>> torch.allclose(torch.cat(steps, 1), layer(x), atol=1e-6)
    True
    """

    def __init__(self, spec: AttentionSpec, *, backend: str | None = None) -> None:
        super().__init__()
        self.spec, self.only = spec, backend
        for name, part in spec.parts():
            self.add_module(name, Weights(spec, part))
        self._plans: dict[tuple[object, ...], Plan] = {}
        self._bind()

    def _bind(self) -> None:
        p: dict[str, Weighted] = {name: self.get_submodule(name) for name, _ in self.spec.parts()}  # pyright: ignore
        spec = self.spec
        turns = spec.steps(Turn)
        self._turns = {s: [(t, p[n]) for n, t in turns if s in t.reaches(spec)] for s in "qkv"}
        self._mixes = [(name, mix, p[name]) for name, mix in spec.steps(Mix)]
        self._outputs = [(step, p[name]) for name, step in spec.steps(OutputStep)]
        self._gates = [(gate, p[name]) for name, gate in spec.steps(Gate)]
        self._bound = Bound.of(spec, p)
        self._p, self._merge_p = p["project"], p["output"]

    def forward(
        self,
        x_BTD: Tensor,
        *,
        source: Tensor | Remembered | None = None,
        cache: Cache | None = None,
        tokens: Tokens | None = None,
        mask: Tensor | None = None,
        probe: Probe | None = None,
        ledger: Ledger | None = None,
    ) -> Tensor:
        """y_BTD: what each token of x reads, of x itself or of `source`."""
        o_BTOV = self.heads(
            x_BTD, source=source, cache=cache, tokens=tokens, mask=mask, probe=probe, ledger=ledger
        )
        return self.merge(o_BTOV)

    def heads(
        self,
        x_BTD: Tensor,
        *,
        source: Tensor | Remembered | None = None,
        cache: Cache | None = None,
        tokens: Tokens | None = None,
        mask: Tensor | None = None,
        probe: Probe | None = None,
        ledger: Ledger | None = None,
    ) -> Tensor:
        """o_BTOV: what each output head reads, before the merge."""
        inputs.check(self.spec, x_BTD, source, cache, tokens, self._like)
        at = tokens or (Tokens.run(0, x_BTD.shape[1], x_BTD.device) if cache is None else cache.next(x_BTD.shape[1]))
        entry, told = self._remembered(x_BTD, at, source, cache)
        state = {} if cache is None else cache.state
        plan = self._plan(x_BTD, bool(state), mask is not None, probe)
        q_BTHK = plan.project.ask(x_BTD, Turning(self._turns, at.position), self._p)
        k_BSGK, v_BSGV = plan.project.recall(entry, Turning(self._turns, told.position), self._p)
        if probe is not None:
            q_BTHK, k_BSGK, v_BSGV = probe("q", q_BTHK), probe("k", k_BSGK), probe("v", v_BSGV)
        asked = Asked(x_BTD, q_BTHK, plan.scale, at.live)
        gates = [gate.gate(asked, p, ledger) for gate, p in self._gates]
        sight = Sight(at, told, self.spec.pattern, inputs.checked_mask(mask, x_BTD, told.count, self.spec.heads.q))
        job_inputs = Inputs(q_BTHK, k_BSGK, v_BSGV, asked, entry, state)
        o_BTHV = plan.backend.attend(plan.job, sight, job_inputs, self._bound, probe)
        if isinstance(cache, StateCache):
            cache.fold(self._folded(plan.job.core, job_inputs, told))
        o_BTOV = plan.project.deliver(o_BTHV, self._p)
        for step, p in self._outputs:
            o_BTOV = step.finish(o_BTOV, x_BTD, p)
        for gate in gates:
            o_BTOV = o_BTOV * gate
        return o_BTOV if probe is None else probe("heads", o_BTOV)

    def merge(self, o_BTOV: Tensor) -> Tensor:
        """y_BTD from per-head outputs."""
        return self.spec.merge.merge(o_BTOV, self._merge_p)

    def remember(self, z_BSE: Tensor, *, tokens: Tokens | None = None) -> Remembered:
        """Another sequence, projected once: hand it over as `source` as often as you like."""
        inputs.check_source(self.spec, z_BSE, tokens, self._like)
        at = tokens or Tokens.run(0, z_BSE.shape[1], z_BSE.device)
        return Remembered(self._entry(z_BSE, at), at, self.spec)

    def cache(self, *, batch: int, capacity: int) -> Cache:
        """A fresh cache for this layer, in its dtype and on its device."""
        like = self._like
        return Cache.of(self.spec, batch=batch, capacity=capacity, dtype=like.dtype, device=str(like.device))

    @property
    def _like(self) -> Tensor:
        return next(p for p in self.parameters() if p.is_floating_point())

    def _remembered(
        self, x_BTD: Tensor, at: Tokens, source: Tensor | Remembered | None, cache: Cache | None
    ) -> tuple[dict[str, Tensor], Tokens]:
        if isinstance(source, Tensor):
            source = self.remember(source)
        if source is not None:
            return source.entry, source.tokens
        entry = self._entry(x_BTD, at)
        return (entry, at) if cache is None else cache.append(entry, at)

    def _entry(self, z_BSE: Tensor, at: Tokens) -> dict[str, Tensor]:
        entry = self.spec.project.remember(z_BSE, Turning(self._turns, at.position), self._p)
        for name, mix, p in self._mixes:
            entry |= {f"{name}.{key}": factor for key, factor in mix.remember(z_BSE, p).items()}
        return entry

    def _folded(self, core: Core, given: Inputs, told: Tokens) -> dict[str, Tensor]:
        similarity, p = self._bound.similarity, self._bound.similarity_p
        k_BHSK = backends.spread_heads(given.k, core.keys)
        v_BHSV = backends.spread_heads(given.v, core.values)
        return similarity.fold(given.state, k_BHSK, v_BHSV, told.live, p)

    def _plan(self, x: Tensor, stated: bool, masked: bool, probe: Probe | None) -> Plan:
        wants = frozenset() if probe is None else probe.wants
        grad, one = torch.is_grad_enabled(), x.shape[1] == 1
        key = (x.device.type, x.dtype, grad, one, stated, masked, self.training, wants)
        if key not in self._plans:
            job = Job(self.spec, form(self.spec, one).core(self.spec), *key)
            backend = backends.choose(job, self.only)
            scale = self.spec.similarity.factor(job.core)
            self._plans[key] = Plan(form(self.spec, one), job, backend, scale)
        return self._plans[key]


def form(spec: AttentionSpec, one: bool) -> Project:
    """The project, or its rewrite for a single query."""
    return spec.project.rewrites(spec).get("step", spec.project) if one else spec.project
