"""The only attention module: it owns the parameters and calls the parts in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from . import backends, inputs
from .backends import Attend, Bound, Inputs, Job, packed
from .cache import Cache, Entry, PagedCache, Remembered, StateCache
from .peers import Peered
from .probe import Probe
from .seams import Gate, Mix, OutputStep, Project, Turn
from .spec import AttentionSpec
from .terms import Asked, Weighted
from .tokens import Sight, Tokens
from .weights import NO_WEIGHTS, Weights, check_shared

NOTHING: frozenset[str] = frozenset()
Append = Callable[[Entry, Tokens], tuple[Entry, Tokens]]  # of a cache: remember these, tell what may be read
Made = tuple[dict[str, Tensor] | None, Append | None]  # the entry where it was made with the queries; how to keep it


class Plan(NamedTuple):
    """How one kind of call runs: the form of the project, the job, and who does it."""

    project: Project
    job: Job
    attend: Attend
    raw: bool  # it reads a cache as that keeps it, where it lies
    scale: float
    voices: tuple[int, ...]

    def append(self, cache: Cache | None) -> Append | None:
        """How the cache is to remember, if there is one."""
        if self.raw and isinstance(cache, PagedCache):
            return cache.append_in_place
        return None if cache is None else cache.append


class Turning:
    """The turns of each side, at the positions in hand; what they need of these is worked out once."""

    def __init__(self, turns: Mapping[str, Sequence[tuple[str, Turn, Weighted]]], position_BT: Tensor) -> None:
        self.turns, self.position_BT = turns, position_BT
        self.placed: dict[str, Any] = {}

    def __call__(self, x_BTHK: Tensor, side: str) -> Tensor:
        for name, turn, p in self.turns[side]:
            if name not in self.placed:
                exact = torch.promote_types(x_BTHK.dtype, torch.float32)
                self.placed[name] = turn.place(self.position_BT, exact, p)
            x_BTHK = turn.turn(x_BTHK, side, self.placed[name], p)
        return x_BTHK


class Attention(Peered, nn.Module):
    """An attention layer: what its spec says, run by whichever backend takes the call.

    >>> import headwise as hw, torch
    >>> layer = hw.Attention(hw.design(model=8, heads=4, kv=2, pattern="causal"))
    >>> x = torch.randn(1, 5, 8)
    >>> cache = layer.cache(batch=1, capacity=16)
    >>> steps = [layer(x[:, t : t + 1], cache=cache) for t in range(5)]
    >>> torch.allclose(torch.cat(steps, 1), layer(x), atol=1e-6)
    True
    """

    def __init__(
        self, spec: AttentionSpec, *, backend: str | None = None, shares: Mapping[str, Weights] = NO_WEIGHTS
    ) -> None:
        """`shares` are weights that another layer owns, of a whole part, "output", or one tensor, "t5_bias.table": used
        here, but saved, moved and trained there."""
        super().__init__()
        if not isinstance(spec, AttentionSpec):
            raise ValueError(f"spec is of type {type(spec).__name__}; make one with hw.design(model=..., heads=...)")
        backends.known(backend)
        check_shared(spec, shares)
        self.spec, self.only, self._shares = spec, backend, dict(shares)
        for name, part in spec.parts():
            if name not in shares:
                self.add_module(name, Weights(spec, part, _within(shares, name)))
        self._plans: dict[tuple[object, ...], Plan] = {}
        self._bind()

    def _bind(self) -> None:
        spec, own = self.spec, dict(self.named_children())
        p = {name: self._shares[name] if name in self._shares else cast(Weights, own[name]) for name, _ in spec.parts()}
        turns = spec.steps(Turn)
        self._turns = {s: [(n, t, p[n]) for n, t in turns if s in t.reaches(spec)] for s in "qkv"}
        self._mixes = [(name, mix, p[name]) for name, mix in spec.steps(Mix)]
        self._outputs = [(step, p[name]) for name, step in spec.steps(OutputStep)]
        self._gates = [(gate, p[name]) for name, gate in spec.steps(Gate)]
        self._bound = Bound.of(spec, p)
        self._forms = {one: spec.form(one) for one in (False, True)}  # made here: making parts cannot be traced
        self._limit = inputs.Limit.of(spec)
        self._p = p

    def forward(
        self,
        x: Tensor,
        *,
        source: Tensor | Remembered | None = None,
        cache: Cache | None = None,
        tokens: Tokens | None = None,
        mask: Tensor | None = None,
        probe: Probe | None = None,
    ) -> Tensor:
        """y [B, T, model]: what each token of x reads, of x itself or of `source`.

        `cache` remembers x for later calls; `tokens` says where x stands and what is padding; `mask` [B, H, T, S]
        is True where a key may be read; `probe` looks in.
        """
        o_BTOV = self.heads(x, source=source, cache=cache, tokens=tokens, mask=mask, probe=probe)
        return self.merge(o_BTOV)

    def heads(
        self,
        x: Tensor,
        *,
        source: Tensor | Remembered | None = None,
        cache: Cache | None = None,
        tokens: Tokens | None = None,
        mask: Tensor | None = None,
        probe: Probe | None = None,
    ) -> Tensor:
        """o [B, T, O, vdim]: what each output head reads, before the merge."""
        return self.gated(x, source=source, cache=cache, tokens=tokens, mask=mask, probe=probe)[0]

    def gated(
        self,
        x: Tensor,
        *,
        source: Tensor | Remembered | None = None,
        cache: Cache | None = None,
        tokens: Tokens | None = None,
        mask: Tensor | None = None,
        probe: Probe | None = None,
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """The same, and the gates that it was multiplied with, for whoever puts other outputs in its place."""
        inputs.check(self.spec, x, source, cache, tokens, self._like)
        if mask is not None:
            inputs.check_mask(self.spec, mask, x, source, cache, self.peers.spans)
        state = {} if cache is None else cache.state
        at = tokens or (Tokens.run(0, x.shape[1], x.device) if cache is None else cache.next(x.shape[1]))
        apart = cache is None and mask is None and self._apart(x, at, source, probe)
        keys = self._keys(x, at, source, cache, apart)
        plan = self._plan(x, cache, mask is not None, apart, probe, keys)  # may refuse before anything is remembered
        if self._limit is not None:
            inputs.check_positions(self._limit, at)
        x, turning, p = self.peers.enter(x), Turning(self._turns, at.position), self._p["project"]
        both = plan.project.both(x, turning, p) if source is None and plan.project is self.spec.project else None
        entry, told = self._remembered(x, at, turning, source, (both and both[1], plan.append(cache)))
        if cache is not None and at.count == 1 and not plan.raw:
            entry = cache.opened(entry)
        q_BTHK = both[0] if both else plan.project.ask(x, turning, p)
        k_BSGK, v_BSGV = plan.project.recall(entry, Turning(self._turns, told.position), p)
        if probe is not None:
            q_BTHK, k_BSGK, v_BSGV = probe("q", q_BTHK), probe("k", k_BSGK), probe("v", v_BSGV)
        asked = Asked(x, q_BTHK, plan.scale, at)
        sight = Sight(at, told, self.spec.pattern, mask)
        with self.peers.apart(self.training):
            gates = self._opened(asked, probe)
            job_inputs = Inputs(self._lift(q_BTHK, "q"), self._lift(k_BSGK, "k"), v_BSGV, asked, entry, state, gates)
            o_BTHV = plan.attend(plan.job, sight, job_inputs, self._bound, probe)
        if isinstance(cache, StateCache):
            cache.fold(self._folded(plan.job, job_inputs, told))
        o_BTOV = self._finished(plan.project.deliver(o_BTHV, plan.voices, p), x, gates)
        return (o_BTOV if probe is None else probe("heads", o_BTOV)), gates

    def _finished(self, o_BTOV: Tensor, x: Tensor, gates: Sequence[Tensor]) -> Tensor:
        for step, own in self._outputs:
            o_BTOV = step.finish(o_BTOV, x, own)
        for gate in gates:
            o_BTOV = o_BTOV * gate
        return o_BTOV

    def merge(self, o_BTOV: Tensor) -> Tensor:
        """y_BTD from per-head outputs."""
        merge, p = self.spec.merge, self._p["output"]
        y_BTD = merge.merge(o_BTOV, p)
        if not self.peers.first:  # what a merge says of silence is added once
            y_BTD = y_BTD - merge.merge(torch.zeros_like(o_BTOV[:1, :1]), p)
        return self.peers.leave(y_BTD)

    def remember(self, z: Tensor, *, tokens: Tokens | None = None) -> Remembered:
        """Another sequence, projected once: hand it over as `source` as often as you like."""
        inputs.check_source(self.spec, z, tokens, self._like)
        at = tokens or Tokens.run(0, z.shape[1], z.device)
        if self._limit is not None:
            inputs.check_positions(self._limit, at)
        entry = self._entry(self.peers.enter(z), Turning(self._turns, at.position))
        return Remembered(*self.peers.gather(entry, at), self.spec)

    @property
    def weights(self) -> Mapping[str, Weights]:
        """The weights of each part by its name, its own and those it shares."""
        return self._p

    @property
    def mixes(self) -> Sequence[tuple[str, Mix, Weighted]]:
        """What mixes heads, by its name, with its weights."""
        return self._mixes

    @property
    def bound(self) -> Bound:
        """What a backend runs between queries, keys and values and the per-head outputs."""
        return self._bound

    def cache(self, *, batch: int, capacity: int, store: str | None = None) -> Cache:
        """A fresh cache for this layer, in its dtype and on its device; store="int8" keeps keys and values in 8 bits
        each."""
        like, device = self._like, str(self._like.device)
        return Cache.of(self.spec, batch=batch, capacity=capacity, dtype=like.dtype, device=device, store=store)

    @property
    def _like(self) -> Tensor:
        return self._p["project"].first

    def _remembered(
        self, x_BTD: Tensor, at: Tokens, turning: Turning, source: Tensor | Remembered | None, made: Made
    ) -> tuple[dict[str, Tensor], Tokens]:
        if isinstance(source, Tensor):
            source = self.remember(source)
        if source is not None:
            return source.entry, source.tokens
        own, append = made
        entry, told = self.peers.gather(self._entry(x_BTD, turning, own), at)
        if append is None:
            return entry, told
        entry, told = append(entry, told)
        if told.filled is None or torch.compiler.is_compiling():  # a compiled step keeps its shapes
            return entry, told
        return {name: held[:, : told.filled] for name, held in entry.items()}, told.narrowed()

    def _entry(self, z_BSE: Tensor, turning: Turning, own: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        entry = self.spec.project.remember(z_BSE, turning, self._p["project"]) if own is None else own
        for name, mix, p in self._mixes:
            entry |= {f"{name}.{key}": factor for key, factor in mix.remember(z_BSE, p).items()}
        return entry

    def _opened(self, asked: Asked, probe: Probe | None) -> list[Tensor]:
        ledger = None if probe is None or probe.ledger is None else self.peers.ledger(probe.ledger)
        return [gate.gate(asked, own, ledger) for gate, own in self._gates]

    def _lift(self, x_BTHK: Tensor, side: str) -> Tensor:
        return self._bound.similarity.lift(x_BTHK, side, self._bound.similarity_p)

    def _folded(self, job: Job, given: Inputs, told: Tokens) -> dict[str, Tensor]:
        assert self._bound.folder is not None
        folder, p = self._bound.folder
        return folder.fold(given.state, *backends.heard(given, job), told.live, p)

    def _apart(self, x: Tensor, at: Tokens, source: Tensor | Remembered | None, probe: Probe | None) -> bool:
        """Whether every packed text runs by itself; compiled, whose shapes may not follow the lengths, none does."""
        if torch.compiler.is_compiling() or self.peers.spans > 1 or at.lengths is None:
            return False
        seen = probe is None or inputs.checked_probe(probe).wants <= packed.SHOWN
        told = source.tokens if isinstance(source, Remembered) else at if source is None else None
        return seen and packed.apart(at, told, x.shape[0])

    def _keys(
        self, x: Tensor, at: Tokens, source: Tensor | Remembered | None, cache: Cache | None, apart: bool
    ) -> int | None:
        """The length that a backend is chosen by. A single query has its own, and a graph keeps one for all lengths."""
        if x.shape[1] == 1 or self.only is not None or torch.compiler.is_compiling():
            return None
        told = source.tokens if isinstance(source, Remembered) else at
        count = source.shape[1] if isinstance(source, Tensor) else packed.longest(told) if apart else told.count
        return backends.stage(count * self.peers.spans + (0 if cache is None else cache.used))

    def _plan(
        self, x: Tensor, cache: Cache | None, masked: bool, apart: bool, probe: Probe | None, keys: int | None
    ) -> Plan:
        wants = NOTHING if probe is None else inputs.checked_probe(probe).wants
        grad, one, compiled = torch.is_grad_enabled(), x.shape[1] == 1, torch.compiler.is_compiling()
        stated, store = cache is not None and bool(cache.state), None if cache is None else cache.store
        paged = isinstance(cache, PagedCache)
        facts = (
            x.device.type,
            inputs.worked(x),
            grad,
            one,
            stated,
            paged,
            masked,
            self.training,
            wants,
            compiled,
            store,
            keys,
        )
        key = (self.only, apart, *facts)
        if key in self._plans:
            return self._plans[key]
        project = self._forms[one]
        job = Job(self.spec, self.spec.core_of(project), *facts)
        backend, scale = backends.choose(job, self.only), self.spec.similarity.factor(job.core)
        attend = packed.Runner.of(backend, job, self.only).attend if apart else backend.attend
        raw = backends.reads_stored(backend, job)
        plan = Plan(project, job, attend, raw, scale, self.spec.voices)
        if not compiled:  # a graph that saw none would be made anew once there is one
            self._plans[key] = plan
        return plan


def _within(shares: Mapping[str, Weights], part: str) -> dict[str, Weights]:
    """Those of one part's tensors that are shared one by one, by their names in it."""
    return {name.removeprefix(f"{part}."): owner for name, owner in shares.items() if name.startswith(f"{part}.")}
