"""Which heads a model can do without, learned: a gate on every head, and a count that gates must come down to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..errors import SpecError, nearest
from ..heads.scene import Scene
from ..models import Transformer
from ..presets import with_gates
from ..seams import Gate
from ..spec import AttentionSpec
from ..training.optimiser import Optimiser
from ..training.recipe import Recipe
from .course import Beside, Course, Point, Progress, unheard
from .learning import Learning, Lessons, Pupil, copied
from .lessons import Texts
from .rebuilding import Changed, attention_of, rebuilt, weights_of
from .removing import removed

UNITS = ("head", "kv")
FREEZE = ("none", "model", "decoder")

RISE = 0.03  # the method's own is 2, at every minimum: a step comes a small part of the way to one

SURE = 0.5  # gates more or less than were to be open


@dataclass(frozen=True, repr=False, kw_only=True)
class Gating(Learning):
    """The same, of a model with a gate on every head (1905.09418), of which `heads` are to stay: a number, or a share.

    With unit="kv" all heads that read one key-value head share a gate, and `heads` counts these groups. `sites` are
    names of attentions, or what they begin with, such as "encoder"; all if none is said. freeze="model" lets nothing
    but gates learn, "decoder" keeps the second of two stacks and its head as they are, as published for the first.

    The expected number of open gates S is held at a target T by the method of multiplier (Hestenes 1969): of N gates
    a (S - T) + `strength` (S - T)^2 / N joins the loss, where a begins at 0 and grows with every step by a part of
    strength (S - T) / N. T falls in a line from N over the first `ramp` of the steps (1910.04732, which learns both
    factors). So gates are pushed alike, however many there are, and a is the factor that Voita et al. choose by hand.
    `start` is log_a, and `gates_rate` how fast it learns.
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
    strength: float = 0.5
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
            raise SpecError(
                f"heads={self.heads!r} is no share of {count} {units}; give a number of them, or 0.5 for half"
            )
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
    lessons = Lessons(Texts(net, scenes, how.objective), how)
    if how.alpha == 0 and not lessons.texts.losses:
        raise SpecError(f"{net.described.name} has no loss of its own in these texts; use alpha=1, to stay near itself")
    sites = sites_of(net, how.sites)
    units = {site: units_of(spec, how.unit) for site, spec in sites.items()}
    target = how.target(sum(map(len, units.values())))
    removed(net, {site: groups[0] for site, groups in units.items()})  # refuse what cannot be cut before it is learnt
    made = copied(net, rebuilt(net, {site: _with_gate(net, site, how) for site in sites}))
    pupil = Pupil(made, net if how.alpha > 0 else None, lessons, _learned(net, how.freeze))
    course = Course(pupil, Multiplier(made, units, target, how), progress, "last")
    course.go()
    plain = rebuilt(made, {site: _without_gate(made, site, spec) for site, spec in sites.items()}).requires_grad_(True)
    chances = {site: tuple(chances_of(made, site).tolist()) for site in sites}
    keep = likeliest(chances, units, target)
    held_out, notes = pupil.held_out(removed(plain, keep)), [*lessons.texts.notes, *_unsure(course, target)]
    plain.to(next(net.parameters()).dtype).train(net.training)
    return Gates(plain, keep, chances, tuple(course.curve), held_out, course.ended, tuple(notes))


def likeliest(
    chances: Mapping[str, Sequence[float]], units: Mapping[str, Sequence[tuple[int, ...]]], count: int
) -> dict[str, tuple[int, ...]]:
    """The heads of so many units, those that are likeliest to speak; of equals the first.

    >>> likeliest({"a": (0.1, 0.9), "b": (0.7, 0.7)}, {"a": ((0,), (1,)), "b": ((0,), (1,))}, 2)
    {'a': (1,), 'b': (0,)}
    """
    every = [(site, heads) for site, groups in units.items() for heads in groups]
    every.sort(key=lambda unit: -chances[unit[0]][unit[1][0]])
    return {site: tuple(sorted(h for own, heads in every[:count] if own == site for h in heads)) for site in units}


def _unsure(course: Course, target: int) -> list[str]:
    """What is to be said where gates did not come to their target."""
    opened = course.curve[-1].opened or 0.0
    if abs(opened - target) <= SURE:
        return []
    return [f"{opened:.1f} gates were expected to be open when {target} were chosen; more steps would tell better"]


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


def units_of(spec: AttentionSpec, unit: str) -> tuple[tuple[int, ...], ...]:
    """The heads of an attention that go or stay together: each alone, or with unit="kv" those of a group.

    >>> import headwise as hw
    >>> units_of(hw.design(model=8, heads=4, kv=2), "kv")
    ((0, 1), (2, 3))
    """
    if unit == "head":
        return tuple((head,) for head in range(len(spec.speaks)))
    return tuple(tuple(o for o, own in enumerate(spec.groups) if own == one) for one in sorted(set(spec.groups)))


def chances_of(net: Transformer, site: str) -> Tensor:
    """How likely each head of an attention is to speak, as its gates learned it."""
    attention = attention_of(net, site)
    told = [gate.chances(attention.weights[name]) for name, gate in attention.spec.steps(Gate)]
    return next(chances for chances in told if chances is not None)


class Multiplier(Beside):
    """Gates that learn, and the multiplier that holds how many are open at a target."""

    def __init__(
        self, net: Transformer, units: Mapping[str, Sequence[tuple[int, ...]]], target: int, how: Gating
    ) -> None:
        self.net, self.units, self.target, self.how = net, units, target, how
        self.every, self.factor = sum(map(len, units.values())), 0.0
        owners = [attention_of(net, site).weights[name] for site in units for name in _gates_of(net, site)]
        own = {str(n): p for n, weights in enumerate(owners) for p in weights.parameters()}
        for parameter in own.values():
            parameter.requires_grad_(True)
        self._optimiser = Optimiser({"gates, kept": own}, Recipe(lr=how.gates_rate, weight_decay=0.0))

    def count(self) -> Tensor:
        """How many gates are expected to be open."""
        firsts = {site: [heads[0] for heads in groups] for site, groups in self.units.items()}
        return torch.stack([chances_of(self.net, site)[own].sum() for site, own in firsts.items()]).sum()

    def aim(self, step: int) -> float:
        """The target of a step."""
        ramp = self.how.ramp * self.how.steps
        return self.every - (self.every - self.target) * (min(1.0, step / ramp) if ramp else 1.0)

    def added(self, step: int) -> Tensor:
        over = self.count() - self.aim(step)
        return self.factor * over + self.how.strength * over**2 / self.every

    def step(self, step: int) -> None:
        over = (self.opened - self.aim(step)) / self.every
        self._optimiser.step(self.how.gates_rate)
        self.factor += RISE * self.how.strength * over

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
