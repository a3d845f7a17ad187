"""Pruning by L0 gates: train a gate on every head, with a target for the number of open gates
(1905.09418).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..attention.interfaces import Gate
from ..attention.presets import with_gates
from ..models import Transformer
from ..observe.head_analysis.annotated_examples import Example
from ..report.progress import CountedMessage
from ..training.recipe import Recipe
from ..training.train_step import AdamWOptimiser
from ..util.errors import SpecError
from .attention_replacement import (
    AttentionChange,
    get_attention,
    get_attention_parameters,
    remove_heads,
    replace_attentions,
)
from .distillation import (
    AuxiliaryTraining,
    DistillationTexts,
    Retraining,
    RetrainingOptions,
    RetrainingPoint,
    cast_for_training,
    no_progress,
)
from .head_selection import HeadSelection, LogFunction
from .pruning_plan import HeadUnit, PruningPlan, choose_sites, collect_heads, list_units

GATE_UNITS = ("head", "kv")
FREEZE_MODES = ("none", "model", "decoder")

# the method of multipliers uses 2, once at each minimum; a step is a small part of the way to one
MULTIPLIER_RATE = 0.03

COUNT_TOLERANCE = 0.5  # expected open gates may differ by this much from the target


@dataclass(frozen=True, repr=False, kw_only=True)
class GateTrainingOptions(RetrainingOptions):
    """Options for training with a gate on every head (1905.09418) until `heads` of them are open: a
    number or fraction.

    With unit="kv" all query heads of one key-value head share a gate, and `heads` counts these
    groups. `sites` are names of attentions or prefixes such as "encoder"; empty means all.
    freeze="model" trains the gates only, freeze="decoder" also keeps the last of two stacks and its
    output head fixed, as published for encoder pruning.

    The expected number of open gates S is held at a target T by the method of multipliers (Hestenes
    1969): with N gates the loss gets the terms a (S - T) + `strength` (S - T)^2 / N, where a starts
    at 0 and grows every step by a multiple of strength (S - T) / N. T falls linearly from N over
    the first `ramp` fraction of the steps (1910.04732, which learns both factors). So the pressure
    per gate does not depend on their number, and a replaces the factor that Voita et al. choose by
    hand. `start` is the initial log alpha of the gates, `gates_rate` their learning rate.
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
        """Return how many of `count` units should stay open.

        >>> (
        ...     GateTrainingOptions(heads=0.25).target_count(8),
        ...     GateTrainingOptions(heads=3).target_count(8),
        ... )
        (2, 3)
        """
        units = "heads" if self.unit == "head" else "groups of heads"
        if isinstance(self.heads, float) and not 0 < self.heads < 1:
            raise SpecError(
                f"heads must be an int or a fraction between 0 and 1, got {self.heads!r} for "
                f"{count} {units}"
            )
        target = max(1, round(self.heads * count)) if isinstance(self.heads, float) else self.heads
        if not 1 <= target <= count:
            raise SpecError(
                f"cannot keep {target} of {count} {units}. Give heads=1 to {count}, or a fraction "
                "such as 0.5"
            )
        return target


class GateTrainingResult(NamedTuple):
    """Result of gate training: the model without gates, the heads to keep, and the probability that
    each gate is open.

    `keep` can be passed to `remove_heads`. `held_out` is the loss of the pruned model on held-out
    examples. `curve` has the loss and the expected number of open gates; `stop_reason` is empty
    unless training was interrupted.
    """

    net: Transformer
    keep: Mapping[str, tuple[int, ...]]
    open_probabilities: Mapping[str, tuple[float, ...]]
    curve: tuple[RetrainingPoint, ...]
    held_out: float
    stop_reason: str
    notes: tuple[str, ...]


def train_gates(
    net: Transformer,
    examples: Sequence[Example],
    options: GateTrainingOptions,
    log: LogFunction = no_progress,
) -> GateTrainingResult:
    """Train gates on the heads of a copy of a model until the target number is open; return which
    heads to keep.

    `net` itself is not changed. With `alpha` above 0 it is the teacher.
    """
    texts = DistillationTexts(net, examples, options)
    if options.alpha == 0 and not texts.has_loss:
        raise SpecError(
            f"{net.spec.name} has no loss on these examples; use alpha=1 to train on its own "
            "outputs"
        )
    sites = choose_sites(dict(net.spec.attention_specs()), options.sites)
    all_units = list_units(net.spec, "group" if options.unit == "kv" else "head")
    units = {site: all_units[site] for site in sites}
    target = options.target_count(sum(map(len, units.values())))
    # Raise for heads that cannot be removed before any training.
    remove_heads(net, {site: groups[0].heads for site, groups in units.items()})
    gated = cast_for_training(
        net, replace_attentions(net, {site: _add_gate(net, site, options) for site in sites})
    )
    teacher = net if options.alpha > 0 else None
    trainable = _trainable_names(net, options.freeze)

    def progress(point: RetrainingPoint) -> None:
        log(CountedMessage("training gates", point.step, options.steps, "steps"))

    training = Retraining(gated, teacher, texts, trainable, progress)
    training.auxiliary = GateCountConstraint(gated, units, target, options)
    training.train_steps()
    changes = dict[str, AttentionChange]()
    for site, spec in sites.items():
        weights = get_attention_parameters(gated, site)
        changes[site] = AttentionChange(spec, {name: weights[name] for name in spec.params()})
    ungated = replace_attentions(gated, changes).requires_grad_(True)
    open_probabilities = {
        site: tuple(get_open_probabilities(gated, site).tolist()) for site in sites
    }
    keep = select_most_open(open_probabilities, units, target)
    held_out = training.held_out_loss(remove_heads(ungated, keep))
    notes = list(texts.notes)
    num_open = training.curve[-1].num_open_gates or 0.0
    if abs(num_open - target) > COUNT_TOLERANCE:
        notes.append(
            f"{num_open:.1f} gates were expected to be open at the end, the target was {target}; "
            "train for more steps"
        )
    ungated.to(next(net.parameters()).dtype).train(net.training)
    return GateTrainingResult(
        ungated,
        keep,
        open_probabilities,
        tuple(training.curve),
        held_out,
        training.stop_reason,
        tuple(notes),
    )


def select_most_open(
    open_probabilities: Mapping[str, Sequence[float]],
    units: Mapping[str, Sequence[HeadUnit]],
    count: int,
) -> dict[str, tuple[int, ...]]:
    """Return the heads of the `count` units most likely to be open, by site; ties go to the first.

    >>> units = {"a": [HeadUnit("a", (0,)), HeadUnit("a", (1,))], "b": [HeadUnit("b", (0, 1))]}
    >>> select_most_open({"a": (0.1, 0.9), "b": (0.7, 0.7)}, units, 2)
    {'a': (1,), 'b': (0, 1)}
    """
    ranked = sorted(
        chain.from_iterable(units.values()),
        key=lambda unit: -open_probabilities[unit.site][unit.heads[0]],
    )
    return collect_heads(units, ranked[:count])


def get_open_probabilities(net: Transformer, site: str) -> Tensor:
    """Return the probability that the gate of each head of an attention is open, [heads]."""
    attention = get_attention(net, site)
    per_gate = [
        gate.open_probabilities(attention.weights[name])
        for name, gate in attention.spec.parts_of(Gate)
    ]
    return next(probabilities for probabilities in per_gate if probabilities is not None)


class GateCountConstraint(AuxiliaryTraining):
    """Optimiser of the gates and the multiplier that holds the number of open gates at a target.
    `Retraining` trains it together with a model.
    """

    def __init__(
        self,
        net: Transformer,
        units: Mapping[str, Sequence[HeadUnit]],
        target: int,
        options: GateTrainingOptions,
    ) -> None:
        self.net = net
        self.units = units
        self.target = target
        self.options = options
        self.num_units = sum(map(len, units.values()))
        self.multiplier = 0.0
        parameters = dict[str, nn.Parameter]()
        for site in units:
            attention = get_attention(net, site)
            for name, gate in attention.spec.parts_of(Gate):
                if gate.open_probabilities(attention.weights[name]) is not None:
                    own = attention.weights[name].parameters()
                    parameters |= {f"{site}.{name}.{n}": p for n, p in enumerate(own)}
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        self._optimiser = AdamWOptimiser(
            {"gates, kept": parameters}, Recipe(lr=options.gates_rate, weight_decay=0.0)
        )

    def count_expected_open(self) -> Tensor:
        """Return the expected number of open gates, differentiable."""
        counts = list[Tensor]()
        for site, groups in self.units.items():
            first_heads = [unit.heads[0] for unit in groups]
            counts.append(get_open_probabilities(self.net, site)[first_heads].sum())
        return torch.stack(counts).sum()

    def target_at(self, step: int) -> float:
        """Return the target number of open gates at a step."""
        ramp_steps = self.options.ramp * self.options.steps
        progress = min(1.0, step / ramp_steps) if ramp_steps else 1.0
        return self.num_units - (self.num_units - self.target) * progress

    def extra_loss(self, step: int) -> Tensor:
        """Return the term added to the loss of a step."""
        excess = self.count_expected_open() - self.target_at(step)
        return self.multiplier * excess + self.options.strength * excess**2 / self.num_units

    def step(self, step: int) -> None:
        """Update the gates and the multiplier."""
        excess = (self.num_open_gates - self.target_at(step)) / self.num_units
        self._optimiser.step(self.options.gates_rate)
        self.multiplier += MULTIPLIER_RATE * self.options.strength * excess

    @property
    def num_open_gates(self) -> float:
        """Expected number of open gates."""
        return float(self.count_expected_open().detach())


def _add_gate(net: Transformer, site: str, options: GateTrainingOptions) -> AttentionChange:
    spec = get_attention(net, site).spec
    weights = get_attention_parameters(net, site)
    try:
        gated_spec = with_gates(spec, per=options.unit, start=options.start)
    except SpecError as error:
        raise SpecError(f"{site}: {error}") from None
    like = next(net.parameters())
    shapes = gated_spec.shapes()
    for name, param in gated_spec.params().items():
        if name not in weights:
            fresh = param.init(shapes[name])
            weights[name] = fresh.to(like) if param.trainable else fresh.to(like.device)
    return AttentionChange(gated_spec, weights)


def _trainable_names(net: Transformer, freeze: str) -> list[str]:
    """Return the names of the parameters trained in addition to the gates."""
    if freeze == "model":
        return []
    names = [name for name, _ in net.named_parameters()]
    if freeze == "none":
        return names
    stacks = net.spec.stacks
    if len(stacks) < 2:
        raise SpecError(
            f"freeze='decoder' needs two stacks, {net.spec.name} has one; use 'none' or 'model'"
        )
    last = stacks[-1]
    tables = [last.embedding and last.embedding.table, *(head.table for head in net.spec.heads)]
    frozen_prefixes = (
        f"{last.name}.",
        "head.",
        *(f"{table}.embedding.tokens" for table in tables if table),
    )
    return [name for name in names if not name.startswith(frozen_prefixes)]


# --- Selection by gates ---------------------------------------------------------------------------


@dataclass(frozen=True)
class KeepOpenGates(HeadSelection):
    """Train the model with a gate on every head, and keep the heads with open gates (1905.09418).

    Prunes the trained model: its weights have adapted to fewer heads. With freeze="model" they are
    unchanged.
    """

    options: GateTrainingOptions

    def prepare(
        self, net: Transformer, examples: Sequence[Example], log: LogFunction
    ) -> tuple[Transformer, PruningPlan]:
        result = train_gates(net, examples, self.options, log=log)
        probabilities = list(chain.from_iterable(result.open_probabilities.values()))
        num_decided = sum(p > 0.9 or p < 0.1 for p in probabilities)
        notes = [
            f"{num_decided} of {len(probabilities)} gates ended with a probability of being open "
            "below 0.1 or "
            "above 0.9",
            *result.notes,
        ]
        notes += [result.stop_reason] if result.stop_reason else []
        reason = f"those with open gates after {self.options.steps} steps"
        return result.net, PruningPlan.from_kept_heads(net.spec, result.keep, reason, notes)

    def plan(self, net: Transformer, examples: Sequence[Example], log: LogFunction) -> PruningPlan:
        return self.prepare(net, examples, log)[1]
