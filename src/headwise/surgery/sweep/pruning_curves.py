"""Many models that were made of one, each held to it over the same texts, of which the one before reads each once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ...data import Task
from ...errors import SpecError, suggest
from ...generation import eval_mode
from ...head_analysis.annotated_examples import Example
from ...head_analysis.dependency_syntax import DependencyScores
from ...head_analysis.head_classes import classify_heads
from ...head_analysis.head_figures import class_group
from ...head_analysis.head_measurement import MeasureCollector, measure_heads
from ...head_analysis.objectives import EvaluationInput, Objective, OutputDrift, choose_objective
from ...head_analysis.word_alignment import AlignmentScores
from ...models import Transformer
from ..attention_replacement import remove_heads
from ..distillation import RetrainingPoint
from ..head_selection import RANDOM, RANKING_METHODS, HeadRanking, HeadScores, score_heads, select_top_units
from ..l0_gates import GateTrainingOptions, train_gates
from ..pruning_plan import HeadId, HeadUnit, KeptHeads, count_heads, list_units
from ..verification.model_comparison import compute_output
from ..verification.quality_metrics import (
    DEFAULT_NUM_EXAMPLES,
    IntervalEstimate,
    MetricRow,
    QualityReport,
    QualityTally,
    TextCounts,
    TranslationPair,
    can_compute_bleu,
    check_min_count,
    compare_bleu_of_texts,
    compare_tallies,
    get_translation_pairs,
    score_task,
    translate_sources,
)


@dataclass(frozen=True, eq=False)
class ModelEvaluator:
    """A model before, what texts ask, what it says of them where drift is measured, and what was counted of it.

    >>> import headwise as hw, torch
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0)
    >>> judge = ModelEvaluator.of(net, [Example({"x": torch.tensor([[n, 1, 4, 1, 5]])}, {}) for n in range(5)])
    >>> judge.evaluate(net)[0].row("loss").change.value
    0.0
    """

    net: Transformer
    examples: Sequence[Example]
    objective: Objective
    questions: tuple[EvaluationInput, ...]
    baseline_outputs: tuple[Tensor | None, ...]
    baseline_tally: QualityTally
    task: Task | None = None
    pairs: Sequence[TranslationPair] = ()
    baseline_answers: Sequence[Any] = ()

    @staticmethod
    def of(net: Transformer, examples: Sequence[Example], objective: str | Objective | None = None) -> ModelEvaluator:
        """The model has read every text."""
        check_min_count(len(examples), "texts")
        chosen, why = choose_objective(net, objective, examples[0])
        before, drifts = QualityTally(chosen, [why] if why else []), isinstance(chosen, OutputDrift)
        questions = tuple(chosen.prepare_input(net, scene, number) for number, scene in enumerate(examples))
        said = list[Tensor | None]()
        with eval_mode(net):
            for question in questions:
                own = compute_output(net, question.inputs)
                said.append(own if drifts else None)
                before.add(question, own, said[-1])
        return ModelEvaluator(net, examples, chosen, questions, tuple(said), before)

    def with_generation(self, task: Task | None = None) -> ModelEvaluator:
        """The same with free answers of the model before, to a task or as translations."""
        if task is None and not can_compute_bleu(self.net):
            fact = f"free answers of {self.net.spec.name} have no score here"
            raise SpecError(f"{fact}; give a task, or a translator with pairs of texts and sacrebleu installed")
        asked = replace(
            self, task=task, pairs=() if task is not None else get_translation_pairs(self.net, self.examples)
        )
        return replace(asked, baseline_answers=asked._generate_answers(self.net))

    def evaluate(self, after: Transformer) -> tuple[QualityReport, tuple[TextCounts, ...]]:
        """How well another model speaks beside the one before, and what was counted of it, text by text."""
        drifts = isinstance(self.objective, OutputDrift)
        now = QualityTally(
            self.objective, list(self.baseline_tally.notes), before=[] if drifts else self.baseline_tally.after
        )
        if after is self.net:
            now.after, now.num_unscored = self.baseline_tally.after, self.baseline_tally.num_unscored
            return now.report, tuple(now.after)
        with eval_mode(after):
            for question, said in zip(self.questions, self.baseline_outputs, strict=True):
                now.add(question, compute_output(after, question.inputs), said)
        return now.report, tuple(now.after)

    def score_generation(self, after: Transformer) -> list[MetricRow]:
        """What free answers of another model are worth beside those of the one before: a task's score, or BLEU."""
        own = self.baseline_answers if after is self.net else self._generate_answers(after)
        if self.task is not None:
            return [row for row in compare_tallies(self.baseline_answers, own) if "/" not in row.name]
        return [compare_bleu_of_texts(self.baseline_answers, own, self.pairs)]

    def _generate_answers(self, net: Transformer) -> list[Any]:
        with eval_mode(net):
            return (
                translate_sources(net, self.pairs)
                if self.task is None
                else list(score_task(net, self.task, DEFAULT_NUM_EXAMPLES))
            )


# --- Orders in which heads are taken away --------------------------------------------------------------

GATE_ORDER = "gates"
REMOVAL_ORDERS = (*RANKING_METHODS, GATE_ORDER)
DEFAULT_METHOD, GRADIENT_METHOD = "leave-one-out", "michel"
OrderLogFunction = Callable[[str], object]


@dataclass(frozen=True)
class OrderingOptions:
    """How an order is found: on how many of the texts, of which objective, with which gates, from which seed."""

    objective: str | Objective | None = None
    num_examples: int | None = None
    gate_options: GateTrainingOptions | None = None
    seed: int = 0


def list_default_orders(net: Transformer, examples: Sequence[Example], options: OrderingOptions) -> tuple[str, ...]:
    """The orders that can be found of a model: those with slopes need a loss, gates need to be said how they learn.

    >>> import headwise as hw, torch
    >>> net = hw.build(
    ...     hw.families.read_model_spec({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}), seed=0
    ... )
    >>> texts = [Example({"x": torch.tensor([[3, 1, 4]])}, {})]
    >>> list_default_orders(net, texts, OrderingOptions()), list_default_orders(net, texts, OrderingOptions("drift"))
    (('leave-one-out', 'michel', 'random'), ('leave-one-out', 'random'))
    """
    sloped = (GRADIENT_METHOD,) if choose_objective(net, options.objective, examples[0])[0].has_gradient else ()
    return (DEFAULT_METHOD, *sloped, RANDOM, *([GATE_ORDER] if options.gate_options is not None else []))


def check_order(order: str, options: OrderingOptions) -> None:
    """Refuse an order that nothing can find."""
    if order not in REMOVAL_ORDERS:
        raise SpecError(f"heads are ordered by {order!r} nowhere; {suggest(order, REMOVAL_ORDERS)}")
    if order == GATE_ORDER and options.gate_options is None:
        raise SpecError("gates learn before they order heads; say how, as in gates=Gating(heads=0.5, freeze='model')")


def score_by_order(
    net: Transformer,
    examples: Sequence[Example],
    units: Mapping[str, Sequence[HeadUnit]],
    order: str,
    options: OrderingOptions,
    log: OrderLogFunction = lambda _: None,
) -> HeadScores:
    """What each head is worth by this order: those worth least go first.

    By gates (1905.09418) a head is worth the chance that its gate is open.
    """
    check_order(order, options)
    if order != GATE_ORDER:
        return score_heads(
            net, examples, HeadRanking(order, options.objective, options.num_examples, seed=options.seed)
        )
    assert options.gate_options is not None
    whole = all(len(unit.heads) == 1 for own in units.values() for unit in own)
    gating = replace(options.gate_options, unit="head" if whole else "kv")

    def progress(point: RetrainingPoint) -> None:
        log(f"gates: step {point.step} of {gating.steps}")

    found = train_gates(net, examples, gating, progress)
    of = {(site, head): chance for site, own in found.open_probabilities.items() for head, chance in enumerate(own)}
    share = gating.target_count(sum(map(len, units.values())))
    said = f"gates learned in {gating.steps} steps until {share} were to stay, freeze={gating.freeze!r}"
    return HeadScores(of, (said, *found.notes))


# --- How well a model speaks with ever fewer heads -----------------------------------------------------

ALL_PARTS = "all"
DEFAULT_SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
LogFunction = Callable[[str], object]


@dataclass(frozen=True)
class SweepOptions:
    """Which heads are taken away, in which orders, how many, and what is asked of what is left.

    `points` are the shares of heads that stay. `parts` are "encoder", "decoder" (what a stack attends to in itself) and
    "cross", each with the others whole, or "all"; where none is named, all of them. Orders are as `orders.ORDERS` has
    them, the first is ours; chance is drawn `seeds` times. Models of the orders in `answered` also answer freely, to a
    `task` where one is given. `least` heads stay in every attention. A loss may grow by less than `allowed`.
    """

    ordering: OrderingOptions = field(default_factory=OrderingOptions)
    orders: tuple[str, ...] = ()
    shares: tuple[float, ...] = DEFAULT_SHARES
    parts: tuple[str, ...] = ()
    seeds: int = 5
    generation_orders: tuple[str, ...] = ()
    unit: str = "auto"
    least: int = 0
    max_loss_increase: float = 0.1
    task: Task | None = None

    def __post_init__(self) -> None:
        for order in (*self.orders, *self.generation_orders):
            check_order(order, self.ordering)
        if wrong := [one for one in self.shares if not 0 < one <= 1]:
            raise SpecError(f"{wrong[0]!r} is no share of heads that stay; give more than 0 and at most 1")
        for name, least in (("seeds", 1), ("least", 0)):
            if type(said := getattr(self, name)) is not int or said < least:
                raise SpecError(f"{name}={said!r} cannot be meant; give {least} or more")
        if not self.shares:
            raise SpecError("no point was given; give shares of heads that stay, such as 0.5")
        if not self.max_loss_increase > 0:
            raise SpecError(
                f"allowed={self.max_loss_increase!r} allows nothing; give by how much a loss may grow, such as 0.1"
            )


def get_change(row: MetricRow) -> IntervalEstimate:
    """How a row differs from the whole model's; a drift is a difference itself."""
    return row.after if row.change is None else row.change


class CurvePoint(NamedTuple):
    """What is left of a part, the share that was asked for, and how well the model speaks with it.

    `counts` are of each text, of which the rows are made.
    """

    share: float
    num_heads: int
    keep: KeptHeads
    rows: tuple[MetricRow, ...]
    text_counts: tuple[TextCounts, ...]

    @property
    def loss_change(self) -> IntervalEstimate:
        """How much the loss has grown since the whole model."""
        return get_change(self.rows[0])

    def get_row(self, name: str) -> MetricRow | None:
        """One of its rows, if there."""
        return next((row for row in self.rows if row.name == name), None)

    @property
    def data(self) -> dict[str, Any]:
        """As plain values."""
        keep = {site: list(heads) for site, heads in self.keep.items()}
        return {"share": self.share, "left": self.num_heads, "keep": keep, "rows": [row.data for row in self.rows]}


class PruningCurve(NamedTuple):
    """One order of one part, from the whole model on; `seed` is the draw, where there are several."""

    part: str
    order: str
    seed: int
    points: tuple[CurvePoint, ...]

    @property
    def data(self) -> dict[str, Any]:
        """As plain values."""
        told = {"part": self.part, "order": self.order, "seed": self.seed}
        return told | {"points": [point.data for point in self.points]}


class CurveValue(NamedTuple):
    """A number at so many heads left, and a band around it."""

    num_heads: int
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class PruningCurves:
    """Lines of a model, over so many texts; `parts` says which attentions each part has, with their heads.

    `classes` names every head by the group of its first class, the surest; it is empty where heads cannot be named.
    """

    model: str
    objective: str
    num_texts: int
    num_positions: int
    parts: Mapping[str, Mapping[str, int]]
    curves: tuple[PruningCurve, ...]
    classes: Mapping[HeadId, str]
    max_loss_increase: float
    notes: tuple[str, ...] = ()
    command: str = ""

    @property
    def orders(self) -> tuple[str, ...]:
        """The orders, the first of which is ours."""
        return tuple(dict.fromkeys(line.order for line in self.curves))

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The rows that are there, loss or drift first."""
        return tuple(dict.fromkeys(row.name for line in self.curves for point in line.points for row in point.rows))

    def select_curves(self, part: str, order: str) -> tuple[PruningCurve, ...]:
        """The lines of an order of a part, one for each draw."""
        return tuple(line for line in self.curves if (line.part, line.order) == (part, order))

    def list_values(self, part: str, order: str, name: str) -> list[CurveValue]:
        """How a row differs from the whole model's, text by text, against heads left: with its interval over texts; of
        several draws their mean, least and most.
        """
        found: dict[int, list[IntervalEstimate]] = {}
        for line in self.select_curves(part, order):
            for point in line.points:
                if row := point.get_row(name):
                    found.setdefault(point.num_heads, []).append(get_change(row))
        return [CurveValue(left, *_summarise_draws(found[left])) for left in sorted(found, reverse=True)]

    def count_part_heads(self, part: str) -> int:
        """How many heads a part has."""
        return sum(self.parts[part].values())

    @property
    def data(self) -> dict[str, Any]:
        """All of it as plain values."""
        classes: dict[str, dict[str, str]] = {}
        for (site, head), name in self.classes.items():
            classes.setdefault(site, {})[str(head)] = name
        return {
            "version": 1,
            "model": self.model,
            "objective": self.objective,
            "texts": self.num_texts,
            "places": self.num_positions,
            "allowed": self.max_loss_increase,
            "parts": {name: dict(sites) for name, sites in self.parts.items()},
            "classes": classes,
            "lines": [line.data for line in self.curves],
            "notes": list(self.notes),
            "command": self.command,
        }


def _summarise_draws(found: Sequence[IntervalEstimate]) -> tuple[float, float, float]:
    if len(found) == 1:
        return found[0]
    values = [one.value for one in found]
    return float(np.mean(values)), min(values), max(values)


def run_sweep(
    net: Transformer,
    selection_examples: Sequence[Example],
    evaluation_examples: Sequence[Example],
    options: SweepOptions = SweepOptions(),
    log: LogFunction = lambda _: None,
) -> PruningCurves:
    """Quality against heads left: orders are found once, by the first texts; what is left is judged by the others.

    >>> import headwise as hw, torch
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 2, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0).eval()
    >>> texts = [Example({"x": torch.tensor([[n, 1, 4, 1, 5]])}, {}) for n in range(4)]
    >>> found = run_sweep(net, texts, texts, SweepOptions(orders=("random",), shares=(0.5, 0.25), seeds=2))
    >>> [(line.part, line.seed, [point.num_heads for point in line.points]) for line in found.curves]
    [('all', 0, [4, 2, 1]), ('all', 1, [4, 2, 1])]
    """
    check_min_count(len(selection_examples), "texts to choose by")
    those = list_units(net.spec, options.unit)
    parts, orders = (
        _list_parts(net, options.parts),
        options.orders or list_default_orders(net, selection_examples, options.ordering),
    )
    judge = ModelEvaluator.of(net, evaluation_examples, options.ordering.objective)
    judge = judge.with_generation(options.task) if options.generation_orders else judge
    lines, notes = list[PruningCurve](), dict[str, None]()
    for order in orders:
        for seed in range(options.seeds if order == RANDOM else 1):
            log(f"{order}: weighing heads")
            ordering = replace(options.ordering, seed=options.ordering.seed + seed)
            found = score_by_order(net, selection_examples, those, order, ordering, log)
            notes |= {f"{order}: {note}": None for note in found.notes if note not in judge.baseline_tally.notes}
            at = _OrderSweep(net, judge, options, order, seed, log)
            lines += [
                at.sweep_part(part, {site: those[site] for site in sites}, found) for part, sites in parts.items()
            ]
    log("naming heads")
    classes, more = _classify_heads(net, selection_examples)
    return PruningCurves(
        model=net.spec.name,
        objective=judge.objective.name,
        num_texts=len(judge.baseline_tally.after),
        num_positions=sum(one.num_positions for one in judge.baseline_tally.after),
        parts=parts,
        curves=tuple(lines),
        classes=classes,
        max_loss_increase=options.max_loss_increase,
        notes=(*judge.baseline_tally.notes, *notes, *more),
    )


@dataclass(frozen=True, eq=False)
class _OrderSweep:
    """One order at work: models are cut, and what they say is heard."""

    net: Transformer
    evaluator: ModelEvaluator
    options: SweepOptions
    order: str
    seed: int
    log: LogFunction

    def sweep_part(self, part: str, own: Mapping[str, tuple[HeadUnit, ...]], found: HeadScores) -> PruningCurve:
        """A part with ever fewer heads."""
        whole = {site: tuple(head for unit in units for head in unit.heads) for site, units in own.items()}
        heads, points = sum(map(len, whole.values())), [self._evaluate_point(1.0, whole, self.net)]
        for share in sorted(self.options.shares, reverse=True):
            most = select_top_units(
                own, found, max(len(own[next(iter(own))][0].heads), round(share * heads)), self.options.least
            )
            keep = {site: tuple(sorted(h for one in most if one.site == site for h in one.heads)) for site in own}
            if sum(map(len, keep.values())) < points[-1].num_heads:
                self.log(f"{self.order} {self.seed}, {part}: {sum(map(len, keep.values()))} of {heads} heads left")
                fewer = {site: kept for site, kept in keep.items() if kept != whole[site]}
                points.append(self._evaluate_point(share, keep, remove_heads(self.net, fewer)))
        return PruningCurve(part, self.order, self.seed, tuple(points))

    def _evaluate_point(self, share: float, keep: KeptHeads, left: Transformer) -> CurvePoint:
        found, each = self.evaluator.evaluate(left)
        rows = [
            *found.rows,
            *(self.evaluator.score_generation(left) if self.order in self.options.generation_orders else []),
        ]
        return CurvePoint(share, sum(map(len, keep.values())), keep, tuple(rows), each)


def _list_parts(net: Transformer, wanted: Sequence[str]) -> dict[str, dict[str, int]]:
    """The attentions of each part, with how many heads they have: all of them, and each kind by itself."""
    there = count_heads(net.spec)
    found: dict[str, dict[str, int]] = {}
    for site, heads in there.items():
        stack, _, kind = site.split(".")
        found.setdefault(stack if kind == "attention" else kind, {})[site] = heads
    found = {ALL_PARTS: there} | (found if len(found) > 1 else {})
    if wrong := [one for one in wanted if one not in found]:
        raise SpecError(f"{net.spec.name} has no part {wrong[0]!r}; {suggest(wrong[0], found)}")
    return {part: sites for part, sites in found.items() if not wanted or part in wanted}


def _classify_heads(net: Transformer, scenes: Sequence[Example]) -> tuple[dict[HeadId, str], list[str]]:
    """Every head by the group of its first class; empty, and why, where texts do not say what heads read."""
    more = list[MeasureCollector]()
    if any(scene.dependencies for scene in scenes):
        more.append(DependencyScores(stream=next(iter(scenes[0].streams))))
    if any(scene.alignment_links for scene in scenes):
        more.append(AlignmentScores())
    if not all(scene.streams for scene in scenes):
        return {}, ["heads have no classes: it is not known which tokens they read"]
    table = classify_heads(measure_heads(net, scenes, collectors=more))
    said = "heads are counted by their first class, the surest"
    if not any(scene.dependencies for scene in scenes):
        said += "; syntactic ones were not looked for, because the texts are not parsed"
    return {(one.site, one.head): class_group(one.classes[0].name) for one in table.heads}, [said, *table.notes]
