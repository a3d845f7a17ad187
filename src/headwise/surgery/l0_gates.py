"""Which heads a model can do without, learned: a gate on every head, and a count that gates must come down to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..errors import SpecError, suggest
from ..head_analysis.annotated_examples import Example
from ..interfaces import Gate
from ..models import Transformer
from ..presets import with_gates
from ..spec.attention_spec import AttentionSpec
from ..training.optimiser import AdamWOptimiser
from ..training.recipe import Recipe
from .attention_replacement import (
    AttentionChange,
    get_attention,
    get_attention_parameters,
    remove_heads,
    replace_attentions,
)
from .distillation import (
    AuxiliaryTraining,
    DistillationLoader,
    PointCallback,
    RetrainingLoop,
    RetrainingOptions,
    RetrainingPoint,
    Student,
    cast_for_training,
    no_progress,
)
from .distillation_data import DistillationTexts
from .head_selection import HeadSelection, LogFunction
from .pruning_plan import PruningPlan

GATE_UNITS = ("head", "kv")
FREEZE_MODES = ("none", "model", "decoder")

MULTIPLIER_RATE = 0.03  # the method's own is 2, at every minimum: a step comes a small part of the way to one

COUNT_TOLERANCE = 0.5  # gates more or less than were to be open


@dataclass(frozen=True, repr=False, kw_only=True)
class GateTrainingOptions(RetrainingOptions):
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
        **RetrainingOptions.ranges,
        "gates_rate": (1e-9, 1),
        "strength": (1e-9, 1e6),
        "ramp": (0, 1),
        "start": (-10, 10),
    }
    choices: ClassVar = {**RetrainingOptions.choices, "unit": GATE_UNITS, "freeze": FREEZE_MODES}
    heads: int | float
    unit: str = "head"
    sites: tuple[str, ...] = ()
    freeze: str = "none"
    gates_rate: float = 0.1
    strength: float = 0.5
    ramp: float = 0.5
    start: float = 2.0
    alpha: float = 0.0

    def target_count(self, count: int) -> int:
        """How many of so many stay.

        >>> GateTrainingOptions(heads=0.25).target_count(8), GateTrainingOptions(heads=3).target_count(8)
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


class GateTrainingResult(NamedTuple):
    """What gates learned: the model without them, which heads to keep at each site, and how likely each is to speak.

    `keep` is as `removed` takes it; `held_out` is the loss of texts held back when only these are left. `curve` says
    how many gates were expected to be open on the way; `ended` says what ended it early, if anything.
    """

    net: Transformer
    keep: Mapping[str, tuple[int, ...]]
    open_probabilities: Mapping[str, tuple[float, ...]]
    curve: tuple[RetrainingPoint, ...]
    held_out: float
    stop_reason: str
    notes: tuple[str, ...]


def train_gates(
    net: Transformer, examples: Sequence[Example], options: GateTrainingOptions, progress: PointCallback = no_progress
) -> GateTrainingResult:
    """Train gates on the heads of a model until so many are expected to stay, and tell which.

    The model itself is not changed. With `alpha` above 0 it is the teacher.
    """
    lessons = DistillationLoader(DistillationTexts(net, examples, options.objective), options)
    if options.alpha == 0 and not lessons.texts.has_loss:
        raise SpecError(f"{net.spec.name} has no loss of its own in these texts; use alpha=1, to stay near itself")
    sites = select_attentions(net, options.sites)
    units = {site: list_gate_units(spec, options.unit) for site, spec in sites.items()}
    target = options.target_count(sum(map(len, units.values())))
    remove_heads(
        net, {site: groups[0] for site, groups in units.items()}
    )  # refuse what cannot be cut before it is learnt
    made = cast_for_training(net, replace_attentions(net, {site: _add_gate(net, site, options) for site in sites}))
    pupil = Student(made, net if options.alpha > 0 else None, lessons, _trainable_names(net, options.freeze))
    course = RetrainingLoop(pupil, GateCountConstraint(made, units, target, options), progress, "last")
    course.run()
    plain = replace_attentions(
        made, {site: _remove_gate(made, site, spec) for site, spec in sites.items()}
    ).requires_grad_(True)
    chances = {site: tuple(get_open_probabilities(made, site).tolist()) for site in sites}
    keep = select_most_open(chances, units, target)
    held_out, notes = (
        pupil.held_out_loss(remove_heads(plain, keep)),
        [*lessons.texts.notes, *_target_notes(course, target)],
    )
    plain.to(next(net.parameters()).dtype).train(net.training)
    return GateTrainingResult(plain, keep, chances, tuple(course.curve), held_out, course.stop_reason, tuple(notes))


def select_most_open(
    open_probabilities: Mapping[str, Sequence[float]], units: Mapping[str, Sequence[tuple[int, ...]]], count: int
) -> dict[str, tuple[int, ...]]:
    """The heads of so many units, those that are likeliest to speak; of equals the first.

    >>> select_most_open({"a": (0.1, 0.9), "b": (0.7, 0.7)}, {"a": ((0,), (1,)), "b": ((0,), (1,))}, 2)
    {'a': (1,), 'b': (0,)}
    """
    every = [(site, heads) for site, groups in units.items() for heads in groups]
    every.sort(key=lambda unit: -open_probabilities[unit[0]][unit[1][0]])
    return {site: tuple(sorted(h for own, heads in every[:count] if own == site for h in heads)) for site in units}


def _target_notes(course: RetrainingLoop, target: int) -> list[str]:
    """What is to be said where gates did not come to their target."""
    opened = course.curve[-1].num_open_gates or 0.0
    if abs(opened - target) <= COUNT_TOLERANCE:
        return []
    return [f"{opened:.1f} gates were expected to be open when {target} were chosen; more steps would tell better"]


def select_attentions(net: Transformer, wanted: Sequence[str] = ()) -> dict[str, AttentionSpec]:
    """The attentions of these names, or whose names begin so; all if none is said.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read_model_spec(
    ...         {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 2, "vocab_size": 11}
    ...     ),
    ...     seed=0,
    ... )
    >>> list(select_attentions(net, ["decoder.1"]))
    ['decoder.1.attention']
    """
    every = dict(net.spec.attention_specs())
    for one in wanted:
        if not any(_has_prefix(site, one) for site in every):
            raise SpecError(f"{net.spec.name} has no attention {one!r}; {suggest(one, every)}")
    return {site: spec for site, spec in every.items() if not wanted or any(_has_prefix(site, one) for one in wanted)}


def _has_prefix(site: str, one: str) -> bool:
    return f"{site}.".startswith(f"{one}.")


def list_gate_units(spec: AttentionSpec, unit: str) -> tuple[tuple[int, ...], ...]:
    """The heads of an attention that go or stay together: each alone, or with unit="kv" those of a group.

    >>> import headwise as hw
    >>> list_gate_units(hw.design(model=8, heads=4, kv=2), "kv")
    ((0, 1), (2, 3))
    """
    if unit == "head":
        return tuple((head,) for head in range(len(spec.score_head_of_output)))
    return tuple(
        tuple(o for o, own in enumerate(spec.kv_head_of_output) if own == one)
        for one in sorted(set(spec.kv_head_of_output))
    )


def get_open_probabilities(net: Transformer, site: str) -> Tensor:
    """How likely each head of an attention is to speak, as its gates learned it."""
    attention = get_attention(net, site)
    told = [gate.open_probabilities(attention.weights[name]) for name, gate in attention.spec.parts_of(Gate)]
    return next(chances for chances in told if chances is not None)


class GateCountConstraint(AuxiliaryTraining):
    """Gates that learn, and the multiplier that holds how many are open at a target."""

    def __init__(
        self, net: Transformer, units: Mapping[str, Sequence[tuple[int, ...]]], target: int, how: GateTrainingOptions
    ) -> None:
        self.net, self.units, self.target, self.options = net, units, target, how
        self.num_units, self.multiplier = sum(map(len, units.values())), 0.0
        owners = [get_attention(net, site).weights[name] for site in units for name in _gate_names(net, site)]
        own = {str(n): p for n, weights in enumerate(owners) for p in weights.parameters()}
        for parameter in own.values():
            parameter.requires_grad_(True)
        self._optimiser = AdamWOptimiser({"gates, kept": own}, Recipe(lr=how.gates_rate, weight_decay=0.0))

    def count_expected_open(self) -> Tensor:
        """How many gates are expected to be open."""
        firsts = {site: [heads[0] for heads in groups] for site, groups in self.units.items()}
        return torch.stack([get_open_probabilities(self.net, site)[own].sum() for site, own in firsts.items()]).sum()

    def target_at(self, step: int) -> float:
        """The target of a step."""
        ramp = self.options.ramp * self.options.steps
        return self.num_units - (self.num_units - self.target) * (min(1.0, step / ramp) if ramp else 1.0)

    def extra_loss(self, step: int) -> Tensor:
        over = self.count_expected_open() - self.target_at(step)
        return self.multiplier * over + self.options.strength * over**2 / self.num_units

    def step(self, step: int) -> None:
        over = (self.num_open_gates - self.target_at(step)) / self.num_units
        self._optimiser.step(self.options.gates_rate)
        self.multiplier += MULTIPLIER_RATE * self.options.strength * over

    @property
    def num_open_gates(self) -> float:
        return float(self.count_expected_open().detach())


def _gate_names(net: Transformer, site: str) -> list[str]:
    """The names of parts that say how likely heads are to speak."""
    attention = get_attention(net, site)
    gates = attention.spec.parts_of(Gate)
    return [name for name, gate in gates if gate.open_probabilities(attention.weights[name]) is not None]


def _add_gate(net: Transformer, site: str, how: GateTrainingOptions) -> AttentionChange:
    spec, weights = get_attention(net, site).spec, get_attention_parameters(net, site)
    try:
        gated_spec = with_gates(spec, per=how.unit, start=how.start)
    except SpecError as error:
        raise SpecError(f"{site}: {error}") from None
    like, shapes = next(net.parameters()), gated_spec.shapes()
    for name, param in gated_spec.params().items():
        if name not in weights:
            fresh = param.init(shapes[name])
            weights[name] = fresh.to(like) if param.trainable else fresh.to(like.device)
    return AttentionChange(gated_spec, weights)


def _remove_gate(made: Transformer, site: str, spec: AttentionSpec) -> AttentionChange:
    weights = get_attention_parameters(made, site)
    return AttentionChange(spec, {name: weights[name] for name in spec.params()})


def _trainable_names(net: Transformer, freeze: str) -> list[str]:
    """The names of what learns beside gates."""
    if freeze == "model":
        return []
    names = [name for name, _ in net.named_parameters()]
    if freeze == "none":
        return names
    stacks = net.spec.stacks
    if len(stacks) < 2:
        raise SpecError(f"{net.spec.name} has one stack; freeze='decoder' is for two, use 'none' or 'model'")
    last = stacks[-1]
    tables = [last.embedding and last.embedding.table, *(head.table for head in net.spec.heads)]
    still = (f"{last.name}.", "head.", *(f"{table}.embedding.tokens" for table in tables if table))
    return [name for name in names if not name.startswith(still)]


# --- Heads that a model learns to do without, by gates -------------------------------------------------


@dataclass(frozen=True)
class KeepOpenGates(HeadSelection):
    """Keep the heads whose gates stay open while the model learns with a gate on each (1905.09418), as `gating` says.

    What is cut is the model as it then is: it has learnt to live with fewer heads. With freeze="model" it is as it was.
    """

    options: GateTrainingOptions

    def prepare(
        self, net: Transformer, examples: Sequence[Example], log: LogFunction
    ) -> tuple[Transformer, PruningPlan]:
        found = train_gates(
            net, examples, self.options, lambda at: log(f"gates: step {at.step}, {at.num_open_gates or 0:.1f} open")
        )
        chances = [chance for own in found.open_probabilities.values() for chance in own]
        surely = sum(chance > 0.9 or chance < 0.1 for chance in chances)
        notes = [f"{surely} of {len(chances)} gates were open or shut with 9 chances in 10 at the end", *found.notes]
        notes += [found.stop_reason] if found.stop_reason else []
        why = f"those whose gates stayed open over {self.options.steps} steps"
        return found.net, PruningPlan.of(net.spec, found.keep, why, notes)

    def plan(self, net: Transformer, examples: Sequence[Example], log: LogFunction) -> PruningPlan:
        return self.prepare(net, examples, log)[1]
