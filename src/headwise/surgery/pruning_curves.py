"""Pruning curves: quality of many pruned versions of one model on the same texts, as tables,
figures, and the report CURVES.md.

Answers the question of 1905.10650 and 1905.09418: how many heads can be removed, in which order,
from which part. A difference is inconclusive if its interval contains 0.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..models import Transformer
from ..observe.head_analysis.annotated_examples import Example
from ..observe.head_analysis.objectives import (
    Objective,
    choose_objective,
)
from ..report.data import Axis, Column, Estimate, Figure, Page, Plot, Reference, Series, Table
from ..report.plots import save_figure
from ..report.render import make_page, to_markdown, to_plain, to_text
from ..report.text import format_difference, format_interval
from ..training.data import Task
from ..util.errors import SpecError, suggest
from ..util.files import write_atomically
from ..util.output_paths import Existing, FolderKind, stage_folder
from .attention_replacement import remove_heads
from .head_selection import (
    RANDOM,
    RANKING_METHODS,
    HeadRanking,
    HeadScores,
    score_heads,
    select_top_units,
)
from .l0_gates import GateTrainingOptions, train_gates
from .pruning_plan import HeadId, HeadUnit, KeptHeads, collect_heads, count_heads, list_units
from .verification.model_comparison import JsonRecord
from .verification.quality_metrics import (
    LOSS,
    PERPLEXITY,
    IntervalEstimate,
    MetricRow,
    ModelEvaluator,
    check_min_count,
)

# --- Options --------------------------------------------------------------------------------------

GATE_ORDER = "gates"
REMOVAL_ORDERS = (*RANKING_METHODS, GATE_ORDER)
DEFAULT_METHOD = "leave-one-out"
GRADIENT_METHOD = "michel"
ALL_PARTS = "all"
DEFAULT_SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
LogFunction = Callable[[str], object]


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """Options of a sweep: removal orders, fractions of heads to keep, parts of the model, and how
    results are judged.

    `orders` are names in REMOVAL_ORDERS, the first is compared with the others; empty means those
    that the model allows. "random" is repeated with `seeds` seeds, "gates" needs `gate_options`.
    `shares` are the fractions of heads kept. `parts` are "encoder" and "decoder" (self-attention of
    a stack), "cross", and "all"; heads of one part are removed while the other parts stay complete.
    Empty means every part. Heads are ranked by `objective` on `num_examples` texts. For
    `generation_orders` generated answers are scored too, of `task` if given. At least `least` heads
    stay in every attention. A loss increase below `max_loss_increase` counts as harmless.
    """

    orders: tuple[str, ...] = ()
    shares: tuple[float, ...] = DEFAULT_SHARES
    parts: tuple[str, ...] = ()
    objective: str | Objective | None = None
    num_examples: int | None = None
    gate_options: GateTrainingOptions | None = None
    seed: int = 0
    seeds: int = 5
    generation_orders: tuple[str, ...] = ()
    unit: str = "auto"
    least: int = 0
    max_loss_increase: float = 0.1
    task: Task | None = None

    def __post_init__(self) -> None:
        for order in (*self.orders, *self.generation_orders):
            if order not in REMOVAL_ORDERS:
                raise SpecError(f"unknown order {order!r}; {suggest(order, REMOVAL_ORDERS)}")
            if order == GATE_ORDER and self.gate_options is None:
                raise SpecError(
                    "order 'gates' needs gate training options; give "
                    "gate_options=GateTrainingOptions(heads=0.5, freeze='model')"
                )
        if not self.shares:
            raise SpecError("shares is empty; give fractions of heads to keep, such as 0.5")
        for share in self.shares:
            if not 0 < share <= 1:
                raise SpecError(f"shares must be in (0, 1], got {share!r}")
        for name, minimum in (("seeds", 1), ("least", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < minimum:
                raise SpecError(f"{name} must be an int >= {minimum}, got {value!r}")
        if not self.max_loss_increase > 0:
            raise SpecError(f"max_loss_increase must be > 0, got {self.max_loss_increase!r}")


# --- Removal orders -------------------------------------------------------------------------------


def score_by_order(
    net: Transformer,
    examples: Sequence[Example],
    units: Mapping[str, Sequence[HeadUnit]],
    order: str,
    options: SweepOptions,
    log: LogFunction = lambda _: None,
) -> HeadScores:
    """Score heads by a removal order; heads with the lowest scores are removed first.

    For "gates" (1905.09418) the score is the probability that the gate of a head is open.
    """
    if order != GATE_ORDER:
        ranking = HeadRanking(order, options.objective, options.num_examples, seed=options.seed)
        return score_heads(net, examples, ranking, log)
    assert options.gate_options is not None
    flat = list(chain.from_iterable(units.values()))
    single_heads = all(len(unit.heads) == 1 for unit in flat)
    gates = replace(options.gate_options, unit="head" if single_heads else "kv")

    result = train_gates(net, examples, gates, log)
    scores = dict[HeadId, float]()
    for site, probabilities in result.open_probabilities.items():
        scores |= {(site, head): p for head, p in enumerate(probabilities)}
    note = (
        f"gates trained for {gates.steps} steps to keep {gates.target_count(len(flat))} open, "
        f"freeze={gates.freeze!r}"
    )
    return HeadScores(scores, (note, *result.notes))


# --- Curves ---------------------------------------------------------------------------------------


def get_change(row: MetricRow) -> IntervalEstimate:
    """Return the change of a metric from the full model; a drift is itself a change."""
    return row.after if row.change is None else row.change


class CurvePoint(NamedTuple):
    """One pruned model: the requested fraction, the heads kept, and its metrics."""

    share: float
    num_heads: int
    keep: KeptHeads
    rows: tuple[MetricRow, ...]

    @property
    def loss_change(self) -> IntervalEstimate:
        """Change of the loss from the full model."""
        return get_change(self.rows[0])

    def get_row(self, name: str) -> MetricRow | None:
        """Return the metric of this name; None if it was not measured."""
        return next((row for row in self.rows if row.name == name), None)


class PruningCurve(NamedTuple):
    """Points of one removal order on one part, starting with the full model; `seed` numbers
    repeated random orders.
    """

    part: str
    order: str
    seed: int
    points: tuple[CurvePoint, ...]


@dataclass(frozen=True)
class PruningCurves(JsonRecord):
    """All curves of a model; `parts` maps each part to its attentions and their numbers of
    heads.
    """

    model: str
    objective: str
    num_texts: int
    num_positions: int
    parts: Mapping[str, Mapping[str, int]]
    curves: tuple[PruningCurve, ...]
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
        points = chain.from_iterable(line.points for line in self.curves)
        rows = chain.from_iterable(point.rows for point in points)
        return tuple(dict.fromkeys(row.name for row in rows))

    def select_curves(self, part: str, order: str) -> tuple[PruningCurve, ...]:
        """Return the curves of an order on a part, one per seed."""
        return tuple(line for line in self.curves if (line.part, line.order) == (part, order))

    def list_values(self, part: str, order: str, name: str) -> dict[int, IntervalEstimate]:
        """Return the change of a metric from the full model by the number of heads kept, with its
        interval over texts.

        For several seeds it is the mean over seeds, with minimum and maximum.
        """
        changes: dict[int, list[IntervalEstimate]] = {}
        points = chain.from_iterable(line.points for line in self.select_curves(part, order))
        for point in points:
            row = point.get_row(name)
            if row is not None:
                changes.setdefault(point.num_heads, []).append(get_change(row))
        values = dict[int, IntervalEstimate]()
        for num_heads, draws in sorted(changes.items(), reverse=True):
            ordered = sorted(change.value for change in draws)
            mean = float(np.mean([change.value for change in draws]))
            spread = IntervalEstimate(mean, ordered[0], ordered[-1])
            values[num_heads] = spread if len(draws) > 1 else draws[0]
        return values

    def count_part_heads(self, part: str) -> int:
        """Return the number of heads of a part."""
        return sum(self.parts[part].values())

    @property
    def data(self) -> dict[str, Any]:
        """The curves as JSON-serialisable values."""
        return {**super().data, "version": 1}


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
    >>> options = SweepOptions(orders=("random",), shares=(0.5, 0.25), seeds=2)
    >>> curves = run_sweep(net, texts, texts, options).curves
    >>> [(curve.part, curve.seed, [p.num_heads for p in curve.points]) for curve in curves]
    [('all', 0, [4, 2, 1]), ('all', 1, [4, 2, 1])]
    """
    check_min_count(len(selection_examples), "texts for ranking heads")
    units = list_units(net.spec, options.unit)
    parts = _list_parts(net, options.parts)
    objective = choose_objective(net, options.objective, selection_examples[0])[0]
    is_possible = {
        DEFAULT_METHOD: True,
        GRADIENT_METHOD: objective.has_gradient,
        RANDOM: True,
        GATE_ORDER: options.gate_options is not None,
    }
    orders = options.orders or [order for order, possible in is_possible.items() if possible]
    evaluator = ModelEvaluator(net, evaluation_examples, options.objective)
    if options.generation_orders:
        evaluator.prepare_generation(options.task)
    curves = list[PruningCurve]()
    notes = dict.fromkeys(evaluator.baseline.notes)
    for order in orders:
        for seed in range(options.seeds if order == RANDOM else 1):
            log(f"{order}: ranking heads")
            seeded = replace(options, seed=options.seed + seed)
            scores = score_by_order(net, selection_examples, units, order, seeded, log)
            new_notes = [note for note in scores.notes if note not in evaluator.baseline.notes]
            notes |= dict.fromkeys(f"{order}: {note}" for note in new_notes)
            for part, sites in parts.items():
                part_units = {site: units[site] for site in sites}
                log(f"{order} {seed}: removing heads of {part}")
                points = _sweep_part(evaluator, options, order, part_units, scores)
                curves.append(PruningCurve(part, order, seed, points))
    return PruningCurves(
        model=net.spec.name,
        objective=evaluator.objective.name,
        num_texts=len(evaluator.baseline.after),
        num_positions=sum(text.num_positions for text in evaluator.baseline.after),
        parts=parts,
        curves=tuple(curves),
        max_loss_increase=options.max_loss_increase,
        notes=tuple(notes),
    )


def _sweep_part(
    evaluator: ModelEvaluator,
    options: SweepOptions,
    order: str,
    units_by_site: Mapping[str, tuple[HeadUnit, ...]],
    scores: HeadScores,
) -> tuple[CurvePoint, ...]:
    """Return the points of one part; its heads are removed and all other parts stay complete."""
    units = list(chain.from_iterable(units_by_site.values()))
    num_heads = sum(len(unit.heads) for unit in units)
    points = list[CurvePoint]()
    for share in (1.0, *sorted(options.shares, reverse=True)):
        amount = max(len(units[0].heads), round(share * num_heads))
        selected = units
        if share < 1:
            selected = select_top_units(units_by_site, scores, amount, options.least)
        count = sum(len(unit.heads) for unit in selected)
        if points and count >= points[-1].num_heads:
            continue
        keep = collect_heads(units_by_site, selected)
        full = points[0].keep if points else keep
        changed = {site: heads for site, heads in keep.items() if heads != full[site]}
        pruned = remove_heads(evaluator.net, changed) if changed else evaluator.net
        rows = list(evaluator.evaluate(pruned).rows)
        if order in options.generation_orders:
            rows += evaluator.score_generation(pruned)
        points.append(CurvePoint(share, count, keep, tuple(rows)))
    return tuple(points)


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
    wrong = [part for part in names if part not in parts]
    if wrong:
        raise SpecError(f"{net.spec.name} has no part {wrong[0]!r}; {suggest(wrong[0], parts)}")
    return {part: sites for part, sites in parts.items() if not names or part in names}


# --- Tables ---------------------------------------------------------------------------------------


def find_smallest_harmless(curve: PruningCurve, max_loss_increase: float) -> CurvePoint:
    """Return the last point up to which the upper bound of the loss increase stays below
    `max_loss_increase`.
    """
    last_harmless = curve.points[0]
    for point in curve.points[1:]:
        if not point.loss_change.high < max_loss_increase:
            break
        last_harmless = point
    return last_harmless


def make_tables(curves: PruningCurves) -> list[Table]:
    """Return the tables of a report that have rows."""
    tables = [_harmless_table(curves)]
    for name in curves.metric_names:
        if name != PERPLEXITY:
            tables += [_value_table(curves, part, name) for part in curves.parts]
    return [table for table in tables if table.rows]


def _harmless_table(curves: PruningCurves) -> Table:
    rows = list[Sequence[Any]]()
    for part in curves.parts:
        for curve in curves.curves:
            if curve.part == part:
                point = find_smallest_harmless(curve, curves.max_loss_increase)
                num_heads = curves.count_part_heads(part)
                change = Estimate(*point.loss_change)
                is_repeated = len(curves.select_curves(part, curve.order)) > 1
                name = f"{curve.order} {curve.seed}" if is_repeated else curve.order
                rows.append((part, num_heads, name, num_heads - point.num_heads, change))
    title = (
        f"Heads removed with an increase of {_metric(curves)} below {curves.max_loss_increase:g}"
    )
    note = "Of the numbers of heads tested, by the upper end of the 95 % interval over texts."
    columns = ("part", "heads", "order", "removed", Column("change", format_difference))
    return Table(title, columns, rows, [note])


def _value_table(
    curves: PruningCurves, part: str, name: str, form: Callable[[Estimate], str] = format_difference
) -> Table:
    """Change of a metric from the full model by heads kept, a column for each order."""
    values = {order: curves.list_values(part, order, name) for order in curves.orders}
    values = {order: own for order, own in values.items() if own}
    counts = sorted(set[int]().union(*values.values()), reverse=True)[1:]
    rows = list[Sequence[Any]]()
    for count in counts:
        cells = [Estimate(*own[count]) if count in own else None for own in values.values()]
        rows.append((count, *cells))
    title = f"Change of {_metric(curves) if name == LOSS else name}, {part} heads"
    return Table(title, ("heads kept", *(Column(order, form) for order in values)), rows)


def _metric(curves: PruningCurves) -> str:
    return f"{curves.objective} loss" if LOSS in curves.metric_names else curves.objective


# --- Figures --------------------------------------------------------------------------------------


def make_figures(curves: PruningCurves) -> dict[str, Figure]:
    """Return a figure for each metric, by the name of its file."""
    figures = dict[str, Figure]()
    note = "Bands: 95 % intervals over texts; the range of draws for a random order."
    x = Axis("heads kept", reverse=True)
    for name in curves.metric_names:
        if name == PERPLEXITY:
            continue
        is_loss = name in (LOSS, curves.objective)
        limit = curves.max_loss_increase
        references = [Reference("y", 0.0)]
        references += [Reference("y", limit, f"limit {limit:g}")] if is_loss else []
        panels = list[Plot]()
        for part in curves.parts:
            series = list[Series]()
            for order in curves.orders:
                values = curves.list_values(part, order, name)
                if values:
                    middle, lows, highs = zip(*values.values(), strict=True)
                    colour = "muted" if order == RANDOM else ""
                    series.append(
                        Series(order, list(values), middle, lows, highs, colour=colour, marker="o")
                    )
            if series:
                title = f"{part}: {curves.count_part_heads(part)} heads"
                panels.append(Plot(series, x, title=title, references=references, names="ends"))
        metric = _metric(curves) if name == LOSS else name
        title = f"{curves.model}: {metric}, change from the full model"
        file = "curves" if is_loss else f"curves-{name.lower().replace(' ', '-')}"
        figures[file] = Figure(title, panels, note=note)
    return figures


# --- Report ---------------------------------------------------------------------------------------

CURVES_JSON = "curves.json"
CURVES_PAGE = "CURVES.md"
THEMES = ("light", "dark")
CURVES_FOLDER = FolderKind(
    "report of pruning curves",
    (CURVES_JSON,),
    lambda folder: (CURVES_JSON, CURVES_PAGE, *(f"*-{theme}.svg" for theme in THEMES)),
)


def write_report(curves: PruningCurves, folder: Path, existing: Existing = "refuse") -> None:
    """Write curves.json, CURVES.md and all figures to a folder, which appears complete or not at
    all.
    """
    data = (json.dumps(to_report_data(curves), indent=1, allow_nan=False) + "\n").encode()
    figures = make_figures(curves)
    images = {figure.title: f"{name}-light.svg" for name, figure in figures.items()}
    with stage_folder(folder, CURVES_FOLDER, existing) as staged:
        for name, figure in figures.items():
            for theme in THEMES:
                save_figure(figure, staged / f"{name}-{theme}.svg", theme)
        write_atomically(staged / CURVES_JSON, data)
        write_atomically(staged / CURVES_PAGE, to_markdown(make_report(curves), images).encode())


def to_report_data(curves: PruningCurves) -> dict[str, Any]:
    """Return curves and tables as JSON-serialisable values; NaN is None."""
    tables = list[dict[str, Any]]()
    for table in make_tables(curves):
        columns = [column.name for column in table.column_list]
        tables.append({"title": table.title, "columns": columns, "rows": table.rows})
    return to_plain(curves.data | {"tables": tables})


def make_report(curves: PruningCurves) -> Page:
    """Return the report: setup, tables, figures, and how to reproduce it."""
    items = [curves.command] if curves.command else []
    notes = ["All numbers are in curves.json, with the heads kept at every point.", *curves.notes]
    return make_page(
        f"{curves.model}: quality against heads kept",
        ("Tables", make_tables(curves)),
        ("Figures", list(make_figures(curves).values())),
        ("How to reproduce", [*items, list(notes)]),
        summary=_describe_setup(curves),
    )


def render_terminal(curves: PruningCurves) -> str:
    """Return the first tables for a terminal: plain text, 80 columns."""
    first = next(iter(curves.parts))
    name = curves.metric_names[0]
    values = _value_table(curves, first, name, lambda change: f"{change.value:+.3f}")
    setup = f"{curves.model}: {_describe_setup(curves)}"
    return "\n\n".join(map(to_text, [setup, _harmless_table(curves), values]))


def _describe_setup(curves: PruningCurves) -> str:
    full = curves.curves[0].points[0].rows[0].after
    loss = f", {format_interval(*full)} for the full model" if LOSS in curves.metric_names else ""
    return (
        f"{curves.objective.capitalize()} over {curves.num_texts} texts with "
        f"{curves.num_positions:,} scored positions{loss}, as heads are removed without retraining."
        " Values are changes from the full model with 95 % intervals over texts; for a random order"
        " the mean and the range of draws."
    )
