"""Pruning curves: quality of many pruned versions of one model, all compared with it on the same
texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ..data import Task
from ..errors import SpecError, suggest
from ..generation import eval_mode
from ..head_analysis.annotated_examples import Example
from ..head_analysis.dependency_syntax import DependencyScores
from ..head_analysis.distinct_examples import DistinctExamples
from ..head_analysis.head_classes import classify_heads
from ..head_analysis.head_figures import class_group
from ..head_analysis.head_measurement import MeasureCollector, measure_heads
from ..head_analysis.objectives import EvaluationInput, Objective, OutputDrift, choose_objective
from ..head_analysis.word_alignment import AlignmentScores
from ..models import Transformer
from ..progress import CountedMessage
from .attention_replacement import remove_heads
from .distillation import RetrainingPoint
from .head_selection import (
    RANDOM,
    RANKING_METHODS,
    HeadRanking,
    HeadScores,
    score_heads,
    select_top_units,
)
from .l0_gates import GateTrainingOptions, train_gates
from .pruning_plan import HeadId, HeadUnit, KeptHeads, count_heads, list_units
from .verification.model_comparison import compute_output
from .verification.quality_metrics import (
    DEFAULT_NUM_EXAMPLES,
    IntervalEstimate,
    MetricRow,
    QualityReport,
    QualityTally,
    TextCounts,
    TranslationPair,
    can_compute_bleu,
    check_min_count,
    compare_tallies,
    compare_translated_texts,
    get_translation_pairs,
    score_task,
    translate_sources,
)


@dataclass(frozen=True, eq=False)
class ModelEvaluator:
    """Evaluates pruned models against one baseline model, whose outputs are computed once and
    stored.

    `baseline_outputs` are stored only if the objective is drift; `baseline_answers` are its
    generated answers.

    >>> import headwise as hw, torch
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0)
    >>> evaluator = ModelEvaluator.of(
    ...     net, [Example({"x": torch.tensor([[n, 1, 4, 1, 5]])}, {}) for n in range(5)]
    ... )
    >>> evaluator.evaluate(net)[0].row("loss").change.value
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
    def of(
        net: Transformer, examples: Sequence[Example], objective: str | Objective | None = None
    ) -> ModelEvaluator:
        """Run the baseline model on every text."""
        distinct = DistinctExamples(examples)
        examples = list(distinct)
        check_min_count(len(examples), "texts")
        resolved, note = choose_objective(net, objective, examples[0])
        tally = QualityTally(resolved, [*([note] if note else []), *distinct.notes])
        is_drift = isinstance(resolved, OutputDrift)
        questions = tuple(
            resolved.prepare_input(net, example, number) for number, example in enumerate(examples)
        )
        outputs = list[Tensor | None]()
        with eval_mode(net):
            for question in questions:
                output = compute_output(net, question.inputs)
                outputs.append(output if is_drift else None)
                tally.add(question, output, outputs[-1])
        return ModelEvaluator(net, examples, resolved, questions, tuple(outputs), tally)

    def with_generation(self, task: Task | None = None) -> ModelEvaluator:
        """Return a copy that also scores generated answers: of a task, or as translations."""
        if task is None and not can_compute_bleu(self.net):
            fact = f"cannot score generated answers of {self.net.spec.name}"
            raise SpecError(
                f"{fact}. Give a task, or use a translation model with text pairs and sacrebleu "
                "installed"
            )
        evaluator = replace(
            self,
            task=task,
            pairs=() if task is not None else get_translation_pairs(self.net, self.examples),
        )
        return replace(evaluator, baseline_answers=evaluator._generate_answers(self.net))

    def evaluate(self, after: Transformer) -> tuple[QualityReport, tuple[TextCounts, ...]]:
        """Measure a model against the baseline; return the report and the sums of every text."""
        is_drift = isinstance(self.objective, OutputDrift)
        tally = QualityTally(
            self.objective,
            list(self.baseline_tally.notes),
            before=[] if is_drift else self.baseline_tally.after,
        )
        if after is self.net:
            tally.after, tally.num_unscored = (
                self.baseline_tally.after,
                self.baseline_tally.num_unscored,
            )
            return tally.report, tuple(tally.after)
        with eval_mode(after):
            for question, baseline_output in zip(
                self.questions, self.baseline_outputs, strict=True
            ):
                tally.add(question, compute_output(after, question.inputs), baseline_output)
        return tally.report, tuple(tally.after)

    def score_generation(self, after: Transformer) -> list[MetricRow]:
        """Score the generated answers of a model against the baseline's, by the task's scores, or
        as translations.
        """
        answers = self.baseline_answers if after is self.net else self._generate_answers(after)
        if self.task is not None:
            return [
                row
                for row in compare_tallies(self.baseline_answers, answers)
                if "/" not in row.name
            ]
        return [compare_translated_texts(self.baseline_answers, answers, self.pairs)[0]]

    def _generate_answers(self, net: Transformer) -> list[Any]:
        with eval_mode(net):
            return (
                translate_sources(net, self.pairs)
                if self.task is None
                else list(score_task(net, self.task, DEFAULT_NUM_EXAMPLES))
            )


# --- Removal orders -------------------------------------------------------------------------------

GATE_ORDER = "gates"
REMOVAL_ORDERS = (*RANKING_METHODS, GATE_ORDER)
DEFAULT_METHOD, GRADIENT_METHOD = "leave-one-out", "michel"
OrderLogFunction = Callable[[str], object]


@dataclass(frozen=True)
class OrderingOptions:
    """Options for ranking heads: objective, number of texts, gate training, and seed."""

    objective: str | Objective | None = None
    num_examples: int | None = None
    gate_options: GateTrainingOptions | None = None
    seed: int = 0


def list_default_orders(
    net: Transformer, examples: Sequence[Example], options: OrderingOptions
) -> tuple[str, ...]:
    """Return the removal orders available for a model.

    Gradient methods need a differentiable objective, "gates" needs `options.gate_options`.

    >>> import headwise as hw, torch
    >>> net = hw.build(
    ...     hw.families.read_model_spec(
    ...         {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}
    ...     ),
    ...     seed=0,
    ... )
    >>> texts = [Example({"x": torch.tensor([[3, 1, 4]])}, {})]
    >>> (
    ...     list_default_orders(net, texts, OrderingOptions()),
    ...     list_default_orders(net, texts, OrderingOptions("drift")),
    ... )
    (('leave-one-out', 'michel', 'random'), ('leave-one-out', 'random'))
    """
    gradient_orders = (
        (GRADIENT_METHOD,)
        if choose_objective(net, options.objective, examples[0])[0].has_gradient
        else ()
    )
    return (
        DEFAULT_METHOD,
        *gradient_orders,
        RANDOM,
        *([GATE_ORDER] if options.gate_options is not None else []),
    )


def check_order(order: str, options: OrderingOptions) -> None:
    """Raise SpecError if an order is unknown or lacks its options."""
    if order not in REMOVAL_ORDERS:
        raise SpecError(f"unknown removal order {order!r}; {suggest(order, REMOVAL_ORDERS)}")
    if order == GATE_ORDER and options.gate_options is None:
        raise SpecError(
            "order 'gates' needs gate training options; give "
            "gate_options=GateTrainingOptions(heads=0.5, "
            "freeze='model')"
        )


def score_by_order(
    net: Transformer,
    examples: Sequence[Example],
    units: Mapping[str, Sequence[HeadUnit]],
    order: str,
    options: OrderingOptions,
    log: OrderLogFunction = lambda _: None,
) -> HeadScores:
    """Score heads by a removal order; heads with the lowest scores are removed first.

    For "gates" (1905.09418) the score is the probability that the gate of a head is open.
    """
    check_order(order, options)
    if order != GATE_ORDER:
        return score_heads(
            net,
            examples,
            HeadRanking(order, options.objective, options.num_examples, seed=options.seed),
            log,
        )
    assert options.gate_options is not None
    single_heads = all(
        len(unit.heads) == 1 for probabilities in units.values() for unit in probabilities
    )
    gate_options = replace(options.gate_options, unit="head" if single_heads else "kv")

    def progress(point: RetrainingPoint) -> None:
        log(CountedMessage("training gates", point.step, gate_options.steps, "steps"))

    result = train_gates(net, examples, gate_options, progress)
    scores = {
        (site, head): probability
        for site, probabilities in result.open_probabilities.items()
        for head, probability in enumerate(probabilities)
    }
    num_open = gate_options.target_count(sum(map(len, units.values())))
    note = (
        f"gates trained for {gate_options.steps} steps to keep {num_open} open, "
        f"freeze={gate_options.freeze!r}"
    )
    return HeadScores(scores, (note, *result.notes))


# --- Curves ---------------------------------------------------------------------------------------

ALL_PARTS = "all"
DEFAULT_SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
LogFunction = Callable[[str], object]


@dataclass(frozen=True)
class SweepOptions:
    """Options of a sweep: removal orders, fractions of heads to keep, parts of the model, and how
    results are judged.

    `shares` are the fractions of heads kept. `parts` are "encoder" and "decoder" (self-attention of
    a stack), "cross", and "all"; heads of one part are removed while the other parts stay complete.
    Empty means every part. `orders` are names in REMOVAL_ORDERS, the first is compared with the
    others; "random" is repeated with `seeds` seeds. For `generation_orders` generated answers are
    scored too, of `task` if given. At least `least` heads stay in every attention. A loss increase
    below `max_loss_increase` counts as harmless.
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
        if wrong := [share for share in self.shares if not 0 < share <= 1]:
            raise SpecError(f"shares must be > 0 and <= 1, got {wrong[0]!r}")
        for name, minimum in (("seeds", 1), ("least", 0)):
            if type(value := getattr(self, name)) is not int or value < minimum:
                raise SpecError(f"{name} must be an int >= {minimum}, got {value!r}")
        if not self.shares:
            raise SpecError("shares is empty; give fractions of heads to keep, such as 0.5")
        if not self.max_loss_increase > 0:
            raise SpecError(
                f"max_loss_increase must be > 0, got {self.max_loss_increase!r}; give a value "
                "such as 0.1"
            )


def get_change(row: MetricRow) -> IntervalEstimate:
    """Return the change of a metric from the full model; a drift is itself a change."""
    return row.after if row.change is None else row.change


class CurvePoint(NamedTuple):
    """One pruned model: the requested fraction, the heads kept, and its metrics.

    `text_counts` are the sums of every text, from which the rows were computed.
    """

    share: float
    num_heads: int
    keep: KeptHeads
    rows: tuple[MetricRow, ...]
    text_counts: tuple[TextCounts, ...]

    @property
    def loss_change(self) -> IntervalEstimate:
        """Change of the loss from the full model."""
        return get_change(self.rows[0])

    def get_row(self, name: str) -> MetricRow | None:
        """Return the metric of this name; None if it was not measured."""
        return next((row for row in self.rows if row.name == name), None)

    @property
    def data(self) -> dict[str, Any]:
        """The fields as JSON-serialisable values."""
        keep = {site: list(heads) for site, heads in self.keep.items()}
        return {
            "share": self.share,
            "left": self.num_heads,
            "keep": keep,
            "rows": [row.data for row in self.rows],
        }


class PruningCurve(NamedTuple):
    """Points of one removal order on one part, starting with the full model; `seed` numbers
    repeated random orders.
    """

    part: str
    order: str
    seed: int
    points: tuple[CurvePoint, ...]

    @property
    def data(self) -> dict[str, Any]:
        """The fields as JSON-serialisable values."""
        values = {"part": self.part, "order": self.order, "seed": self.seed}
        return values | {"points": [point.data for point in self.points]}


class CurveValue(NamedTuple):
    """A value at a number of heads kept, with its interval."""

    num_heads: int
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class PruningCurves:
    """All curves of a model; `parts` maps each part to its attentions and their numbers of heads.

    `classes` maps every head to the group of its most certain class; empty if heads could not be
    classified.
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
        """The removal orders; the first is compared with the others."""
        return tuple(dict.fromkeys(line.order for line in self.curves))

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The names of the metrics, loss or drift first."""
        return tuple(
            dict.fromkeys(
                row.name for line in self.curves for point in line.points for row in point.rows
            )
        )

    def select_curves(self, part: str, order: str) -> tuple[PruningCurve, ...]:
        """Return the curves of an order on a part, one per seed."""
        return tuple(line for line in self.curves if (line.part, line.order) == (part, order))

    def list_values(self, part: str, order: str, name: str) -> list[CurveValue]:
        """Return the change of a metric from the full model, by number of heads kept, with its
        interval over texts.

        For several seeds it is the mean over seeds, with minimum and maximum.
        """
        changes: dict[int, list[IntervalEstimate]] = {}
        for line in self.select_curves(part, order):
            for point in line.points:
                if row := point.get_row(name):
                    changes.setdefault(point.num_heads, []).append(get_change(row))
        return [
            CurveValue(num_heads, *_summarise_draws(changes[num_heads]))
            for num_heads in sorted(changes, reverse=True)
        ]

    def count_part_heads(self, part: str) -> int:
        """Return the number of heads of a part."""
        return sum(self.parts[part].values())

    @property
    def data(self) -> dict[str, Any]:
        """The curves as JSON-serialisable values."""
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


def _summarise_draws(changes: Sequence[IntervalEstimate]) -> tuple[float, float, float]:
    if len(changes) == 1:
        return changes[0]
    values = [change.value for change in changes]
    return float(np.mean(values)), min(values), max(values)


def run_sweep(
    net: Transformer,
    selection_examples: Sequence[Example],
    evaluation_examples: Sequence[Example],
    options: SweepOptions = SweepOptions(),
    log: LogFunction = lambda _: None,
) -> PruningCurves:
    """Measure quality against heads kept; heads are ranked on the selection examples, models
    measured on the others.

    >>> import headwise as hw, torch
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 2, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0).eval()
    >>> texts = [Example({"x": torch.tensor([[n, 1, 4, 1, 5]])}, {}) for n in range(4)]
    >>> curves = run_sweep(
    ...     net, texts, texts, SweepOptions(orders=("random",), shares=(0.5, 0.25), seeds=2)
    ... )
    >>> [
    ...     (curve.part, curve.seed, [point.num_heads for point in curve.points])
    ...     for curve in curves.curves
    ... ]
    [('all', 0, [4, 2, 1]), ('all', 1, [4, 2, 1])]
    """
    check_min_count(len(selection_examples), "texts for ranking heads")
    units_by_site = list_units(net.spec, options.unit)
    parts = _list_parts(net, options.parts)
    orders = options.orders or list_default_orders(net, selection_examples, options.ordering)
    evaluator = ModelEvaluator.of(net, evaluation_examples, options.ordering.objective)
    evaluator = evaluator.with_generation(options.task) if options.generation_orders else evaluator
    curves, notes = list[PruningCurve](), dict[str, None]()
    for order in orders:
        for seed in range(options.seeds if order == RANDOM else 1):
            log(f"{order}: ranking heads")
            ordering = replace(options.ordering, seed=options.ordering.seed + seed)
            scores = score_by_order(net, selection_examples, units_by_site, order, ordering, log)
            notes |= {
                f"{order}: {note}": None
                for note in scores.notes
                if note not in evaluator.baseline_tally.notes
            }
            sweep = _OrderSweep(net, evaluator, options, order, seed, log)
            curves += [
                sweep.sweep_part(part, {site: units_by_site[site] for site in sites}, scores)
                for part, sites in parts.items()
            ]
    log("classifying heads")
    classes, class_notes = _classify_heads(net, selection_examples)
    return PruningCurves(
        model=net.spec.name,
        objective=evaluator.objective.name,
        num_texts=len(evaluator.baseline_tally.after),
        num_positions=sum(text.num_positions for text in evaluator.baseline_tally.after),
        parts=parts,
        curves=tuple(curves),
        classes=classes,
        max_loss_increase=options.max_loss_increase,
        notes=(*evaluator.baseline_tally.notes, *notes, *class_notes),
    )


@dataclass(frozen=True, eq=False)
class _OrderSweep:
    """Prunes and evaluates a model in one removal order."""

    net: Transformer
    evaluator: ModelEvaluator
    options: SweepOptions
    order: str
    seed: int
    log: LogFunction

    def sweep_part(
        self, part: str, units_by_site: Mapping[str, tuple[HeadUnit, ...]], scores: HeadScores
    ) -> PruningCurve:
        """Return the curve of one part; its heads are removed and all other parts stay complete."""
        all_heads = {
            site: tuple(head for unit in units for head in unit.heads)
            for site, units in units_by_site.items()
        }
        num_heads = sum(map(len, all_heads.values()))
        points = [self._evaluate_point(1.0, all_heads, self.net)]
        for share in sorted(self.options.shares, reverse=True):
            selected = select_top_units(
                units_by_site,
                scores,
                max(
                    len(units_by_site[next(iter(units_by_site))][0].heads), round(share * num_heads)
                ),
                self.options.least,
            )
            keep = {
                site: tuple(sorted(h for unit in selected if unit.site == site for h in unit.heads))
                for site in units_by_site
            }
            if sum(map(len, keep.values())) < points[-1].num_heads:
                self.log(
                    f"{self.order} {self.seed}, {part}: {sum(map(len, keep.values()))} of "
                    f"{num_heads} heads kept"
                )
                changed = {site: heads for site, heads in keep.items() if heads != all_heads[site]}
                points.append(self._evaluate_point(share, keep, remove_heads(self.net, changed)))
        return PruningCurve(part, self.order, self.seed, tuple(points))

    def _evaluate_point(self, share: float, keep: KeptHeads, pruned: Transformer) -> CurvePoint:
        report, text_counts = self.evaluator.evaluate(pruned)
        rows = [
            *report.rows,
            *(
                self.evaluator.score_generation(pruned)
                if self.order in self.options.generation_orders
                else []
            ),
        ]
        return CurvePoint(share, sum(map(len, keep.values())), keep, tuple(rows), text_counts)


def _list_parts(net: Transformer, names: Sequence[str]) -> dict[str, dict[str, int]]:
    """Return the attentions of each part with their numbers of heads: "all", and each kind if there
    are several.
    """
    head_counts = count_heads(net.spec)
    parts: dict[str, dict[str, int]] = {}
    for site, heads in head_counts.items():
        stack, _, kind = site.split(".")
        parts.setdefault(stack if kind == "attention" else kind, {})[site] = heads
    parts = {ALL_PARTS: head_counts} | (parts if len(parts) > 1 else {})
    if wrong := [part for part in names if part not in parts]:
        raise SpecError(f"{net.spec.name} has no part {wrong[0]!r}; {suggest(wrong[0], parts)}")
    return {part: sites for part, sites in parts.items() if not names or part in names}


def _classify_heads(
    net: Transformer, examples: Sequence[Example]
) -> tuple[dict[HeadId, str], list[str]]:
    """Return the class group of every head, and notes; empty if the tokens of the examples are
    unknown.
    """
    collectors = list[MeasureCollector]()
    if any(example.dependencies for example in examples):
        collectors.append(DependencyScores())
    if any(example.alignment_links for example in examples):
        collectors.append(AlignmentScores())
    if not all(example.streams for example in examples):
        return {}, ["heads are not classified: the examples have no tokens"]
    table = classify_heads(measure_heads(net, examples, collectors=collectors))
    note = "heads are counted by their most certain class"
    if not any(example.dependencies for example in examples):
        note += "; syntactic classes need parsed texts and were not tested"
    return {(head.site, head.head): class_group(head.classes[0].name) for head in table.heads}, [
        note,
        *table.notes,
    ]
