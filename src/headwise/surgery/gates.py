"""Which heads a model can do without, learned: a gate on every head, and a count that gates must come down to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import SpecError, nearest
from ..heads.scene import Scene
from ..models import Transformer
from ..presets import with_gates
from ..seams import Gate
from ..spec import AttentionSpec
from ..training.optimiser import Optimiser
from ..training.recipe import Recipe
from .learning import Beside, Course, Learning, Point, Progress, Pupil, copied, learnable, unheard
from .rebuilding import Changed, attention_of, rebuilt, weights_of
from .removing import removed

UNITS = ("head", "kv")
FREEZE = ("none", "model", "decoder")

Unit = tuple[str, tuple[int, ...]]  # a site, and the heads of it that share a gate


@dataclass(frozen=True, repr=False, kw_only=True)
class Gating(Learning):
    """The same, of a model with a gate on every head (1905.09418), of which `heads` are to stay: a number, or a share.

    With unit="kv" all heads that read one key-value head share a gate, and `heads` counts these groups. `sites` are
    names of attentions, or what they begin with, such as "encoder"; all if none is said. freeze="model" lets nothing
    but gates learn, "decoder" keeps the second of two stacks and its head as they are, as published for the first.

    The expected number of open gates S is held at a target T, which falls in a line from all of them over the first
    `ramp` of the steps: a (S - T) + b (S - T)^2 / N joins the loss of N gates, where a and b begin at 0 and grow by
    `strength` (S - T) / N and its square with every step (1910.04732). So they act on a gate alike, however many there
    are, and a is the factor that Voita et al. choose by hand. `start` is log_a, and `gates_rate` how fast it learns.
    """

    ranges: ClassVar = {
        **Learning.ranges,
        "gates_rate": (1e-9, 1),
        "strength": (1e-9, 1e6),
        "ramp": (0, 1),
        "start": (-10, 10),
    }
    choices: ClassVar = {**Learning.choices, "unit": UNITS, "freeze": FREEZE}
    heads: int | float
    unit: str = "head"
    sites: tuple[str, ...] = ()
    freeze: str = "none"
    gates_rate: float = 0.1
    strength: float = 0.1
    ramp: float = 0.5
    start: float = 2.0
    alpha: float = 0.0

    def target(self, count: int) -> int:
        """How many of so many stay.

        >>> Gating(heads=0.25).target(8), Gating(heads=3).target(8)
        (2, 3)
        """
        units = "heads" if self.unit == "head" else "groups of heads"
        if isinstance(self.heads, float) and not 0 < self.heads < 1:
            raise SpecError(f"heads={self.heads!r} is no share of {count} {units}; give a number of them, or 0.5 for half")
        found = max(1, round(self.heads * count)) if isinstance(self.heads, float) else self.heads
        if not 1 <= found <= count:
            raise SpecError(f"{found} of {count} {units} cannot stay; give heads=1 to {count}, or a share such as 0.5")
        return found


class Gates(NamedTuple):
    """What gates learned: the model without them, which heads to keep at each site, and how likely each is to speak.

    `keep` is as `removed` takes it; `held_out` is the loss of texts held back when only these are left. `curve` says
    how many gates were expected to be open on the way; `ended` says what ended it early, if anything.
    """

    net: Transformer
    keep: Mapping[str, tuple[int, ...]]
    chances: Mapping[str, tuple[float, ...]]
    curve: tuple[Point, ...]
    held_out: float
    ended: str
    notes: tuple[str, ...]


def gated(net: Transformer, scenes: Sequence[Scene], how: Gating, progress: Progress = unheard) -> Gates:
    """Train gates on the heads of a model until so many are expected to stay, and tell which.

    The model itself is not changed. With `alpha` above 0 it is the teacher.
    """
    lessons = learnable(scenes, net, how)
    sites = sites_of(net, how.sites)
    units = [unit for site, spec in sites.items() for unit in units_of(site, spec, how.unit)]
    target = how.target(len(units))
    removed(net, _heads_of(sites, units[:1]))  # what cannot be cut is refused before anything is learned
    made = copied(net, rebuilt(net, {site: _with_gate(net, site, how) for site in sites}))
    teacher = net if how.alpha > 0 or not lessons.texts.losses else None
    if teacher is not None and how.alpha == 0:
        raise SpecError(f"{net.described.name} has no loss of its own in these texts; use alpha=1, to stay near itself")
    pupil = Pupil(made, teacher, lessons, _learned(net, how.freeze))
    multipliers = Multipliers(made, units, target, how)
    course = Course(pupil, multipliers, progress, "last")
    course.go()
    plain = rebuilt(made, {site: _without_gate(made, site, spec) for site, spec in sites.items()}).requires_grad_(True)
    likely = sorted(units, key=lambda unit: -multipliers.chance(unit))
    keep = _heads_of(sites, likely[:target])
    chances = {site: tuple(chances_of(made, site).tolist()) for site in sites}
    held_out = pupil.held_out(removed(plain, keep))
    plain.to(next(net.parameters()).dtype).train(net.training)
    return Gates(plain, keep, chances, tuple(course.curve), held_out, course.ended, lessons.texts.notes)


def sites_of(net: Transformer, wanted: Sequence[str] = ()) -> dict[str, AttentionSpec]:
    """The attentions of these names, or whose names begin so; all if none is said.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 2, "vocab_size": 11}), seed=0
    ... )
    >>> list(sites_of(net, ["decoder.1"]))
    ['decoder.1.attention']
    """
    every = dict(net.described.specs())
    for one in wanted:
        if not any(_begins(site, one) for site in every):
            raise SpecError(f"{net.described.name} has no attention {one!r}; {nearest(one, every)}")
    return {site: spec for site, spec in every.items() if not wanted or any(_begins(site, one) for one in wanted)}


def _begins(site: str, one: str) -> bool:
    return f"{site}.".startswith(f"{one}.")


def units_of(site: str, spec: AttentionSpec, unit: str) -> list[Unit]:
    """The heads of an attention that go or stay together."""
    if unit == "head":
        return [(site, (head,)) for head in range(len(spec.speaks))]
    return [(site, tuple(o for o, own in enumerate(spec.groups) if own == one)) for one in sorted(set(spec.groups))]


def chances_of(net: Transformer, site: str) -> Tensor:
    """How likely each head of an attention is to speak, as its gates learned it."""
    attention = attention_of(net, site)
    told = [gate.chances(attention.weights[name]) for name, gate in attention.spec.steps(Gate)]
    return next(chances for chances in told if chances is not None)


class Multipliers(Beside):
    """Gates that learn, and the two numbers that hold how many are open at a target (1910.04732)."""

    def __init__(self, net: Transformer, units: Sequence[Unit], target: int, how: Gating) -> None:
        self.net, self.units, self.target, self.how = net, units, target, how
        self.first = self.second = 0.0
        sites = {site for site, _ in units}
        owners = [attention_of(net, site).weights[name] for site in sites for name in _gates_of(net, site)]
        own = {str(n): p for n, weights in enumerate(owners) for p in weights.parameters()}
        for parameter in own.values():
            parameter.requires_grad_(True)
        recipe = Recipe(lr=how.gates_rate, weight_decay=0.0)
        self._optimiser = Optimiser({"gates, kept": own}, recipe)

    def count(self) -> Tensor:
        """How many gates are expected to be open."""
        told = {site: chances_of(self.net, site) for site, _ in self.units}
        return torch.stack([told[site][heads[0]] for site, heads in self.units]).sum()

    def chance(self, unit: Unit) -> float:
        """How likely a gate is to be open."""
        site, heads = unit
        return float(chances_of(self.net, site)[heads[0]].detach())

    def aim(self, step: int) -> float:
        """The target of a step."""
        every, ramp = len(self.units), self.how.ramp * self.how.steps
        return every - (every - self.target) * (min(1.0, step / ramp) if ramp else 1.0)

    def added(self, step: int) -> Tensor:
        over = self.count() - self.aim(step)
        return self.first * over + self.second * over**2 / len(self.units)

    def step(self, step: int) -> None:
        over = (self.opened - self.aim(step)) / len(self.units)
        self._optimiser.step(self.how.gates_rate)
        self.first += self.how.strength * over
        self.second += self.how.strength * over**2

    @property
    def opened(self) -> float:
        return float(self.count().detach())


def _gates_of(net: Transformer, site: str) -> list[str]:
    """The names of parts that say how likely heads are to speak."""
    attention = attention_of(net, site)
    gates = attention.spec.steps(Gate)
    return [name for name, gate in gates if gate.chances(attention.weights[name]) is not None]


def _with_gate(net: Transformer, site: str, how: Gating) -> Changed:
    spec, weights = attention_of(net, site).spec, weights_of(net, site)
    try:
        gated_spec = with_gates(spec, per=how.unit, start=how.start)
    except SpecError as error:
        raise SpecError(f"{site}: {error}") from None
    like, shapes = next(net.parameters()), gated_spec.shapes()
    for name, param in gated_spec.params().items():
        if name not in weights:
            fresh = param.init(shapes[name])
            weights[name] = fresh.to(like) if param.learned else fresh.to(like.device)
    return Changed(gated_spec, weights)


def _without_gate(made: Transformer, site: str, spec: AttentionSpec) -> Changed:
    weights = weights_of(made, site)
    return Changed(spec, {name: weights[name] for name in spec.params()})


def _heads_of(sites: Mapping[str, AttentionSpec], units: Sequence[Unit]) -> dict[str, tuple[int, ...]]:
    """The heads of these units at every site."""
    return {site: tuple(sorted(h for own, heads in units if own == site for h in heads)) for site in sites}


def _learned(net: Transformer, freeze: str) -> list[str]:
    """The names of what learns beside gates."""
    if freeze == "model":
        return []
    names = [name for name, _ in net.named_parameters()]
    if freeze == "none":
        return names
    stacks = net.described.stacks
    if len(stacks) < 2:
        raise SpecError(f"{net.described.name} has one stack; freeze='decoder' is for two, use 'none' or 'model'")
    last = stacks[-1]
    tables = [last.embedding and last.embedding.table, *(head.table for head in net.described.heads)]
    still = (f"{last.name}.", "head.", *(f"{table}.embedding.tokens" for table in tables if table))
    return [name for name in names if not name.startswith(still)]
