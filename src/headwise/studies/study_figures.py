"""Figures of a study: seeds of every variant, differences, quality against cost and length, and
curves of training and of decoding.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..report.data import Axis, Estimate, Figure, Plot, Reference, Series
from ..training.data import Task
from .cells import PairKey
from .seed_statistics import Comparison, VariantScore, mean_test
from .study_file import StudyTask
from .study_runner import StudyResults

Points = Sequence[tuple[float, float]]
LABEL_WIDTH = 14  # characters of a line of a variant's name
COLUMN_INCHES = 0.85


def draw_task(
    results: StudyResults,
    task: StudyTask,
    scores: Mapping[PairKey, VariantScore],
    comparisons: Mapping[PairKey, Comparison],
) -> Iterator[Figure]:
    """All figures of a task."""
    study = results.study
    of_task = {variant: scores[variant, task.name] for variant in study.variants}
    names = sorted(of_task, key=lambda name: _rank(of_task[name].mean.value, task))
    baseline = of_task[study.baseline].mean.value
    yield _seeds_figure(
        f"{task.name}: {task.metric} of every seed",
        {name: (of_task[name].values, of_task[name].mean) for name in names},
        Reference("y", baseline, study.baseline) if math.isfinite(baseline) else None,
    )
    if study.contrasts:
        yield from draw_differences(results, task, comparisons)
    yield from _draw_costs(results, task, of_task)
    yield from _draw_losses(results, task)
    yield from draw_lengths(results, task, of_task)


def draw_differences(
    results: StudyResults, task: StudyTask, comparisons: Mapping[PairKey, Comparison]
) -> Iterator[Figure]:
    """Every comparison of the study on a task; none if nothing was compared."""
    rows: dict[str, tuple[Sequence[float], Estimate]] = {}
    for (name, of_task), one in comparisons.items():
        if of_task == task.name:
            is_variant = name in results.study.variants
            label = f"{name} minus {results.study.baseline}" if is_variant else name
            rows[f"{label} *" if one.is_significant else label] = (one.pairs, one.difference)
    if rows:
        title = f"{task.name}: differences of every seed (*: significant)"
        yield _seeds_figure(title, rows, Reference("y", 0.0))


def _seeds_figure(
    title: str,
    rows: Mapping[str, tuple[Sequence[float], Estimate]],
    reference: Reference | None,
) -> Figure:
    """A column per name: a dot for each seed, and the mean with its interval."""
    seeds: list[tuple[float, float]] = []
    means: list[tuple[float, Estimate]] = []
    for place, (values, mean) in enumerate(rows.values()):
        seeds += [(place - 0.12, value) for value in values]
        means += [(place + 0.12, mean)] if math.isfinite(mean.value) else []
    series = [
        Series("seed", *_columns(seeds), line="", marker="o"),
        Series(
            "mean, 95 % interval",
            [place for place, _ in means],
            [mean.value for _, mean in means],
            [_or_value(mean.low, mean) for _, mean in means],
            [_or_value(mean.high, mean) for _, mean in means],
            line="",
            marker="D",
            band=False,
        ),
    ]
    names = {float(n): textwrap.fill(name, LABEL_WIDTH) for n, name in enumerate(rows)}
    axis = Axis(ticks=names, low=-0.5, high=len(rows) - 0.5)
    size = (max(4.4, 1.0 + COLUMN_INCHES * len(rows)), 3.0)
    references = [reference] if reference else []
    return Figure(title, [Plot(series, x=axis, references=references, size=size)])


def _or_value(end: float, mean: Estimate) -> float:
    return end if math.isfinite(end) else mean.value


def _draw_costs(
    results: StudyResults, task: StudyTask, scores: Mapping[str, VariantScore]
) -> Iterator[Figure]:
    """Quality against each cost; the variants that no other beats in both are joined."""
    sizes = {name: results.grid.models[name, task.name].size for name in scores}
    costs = {
        "parameters": {name: float(size.parameters) for name, size in sizes.items()},
        "FLOPs of a training step": {name: float(size.step_flops) for name, size in sizes.items()},
        "KV bytes of a row": {
            name: float(size.kv_bytes or math.nan) for name, size in sizes.items()
        },
    }
    panels: list[Plot] = []
    for label, values in costs.items():
        points: dict[str, tuple[float, float]] = {}
        for name, cost in values.items():
            quality = scores[name].mean.value
            if math.isfinite(cost) and math.isfinite(quality):
                points[name] = (cost, quality)
        series = [Series(name, [x], [y], line="", marker="o") for name, (x, y) in points.items()]
        front = [points[name] for name in pareto_front(points, task.sign)]
        series.append(Series("", *_columns(front), line="--", colour="muted"))
        if points:
            is_wide = max(values.values()) > 4 * min(values.values())
            panels.append(Plot(series, Axis(label, log=is_wide), Axis(task.metric), names="ends"))
    if panels:
        note = "Joined: no variant is better and cheaper."
        yield Figure(f"{task.name}: {task.metric} against cost", panels, note=note)


def pareto_front(points: Mapping[str, tuple[float, float]], sign: int = 1) -> list[str]:
    """Names of the points that no other beats in cost and quality at once, by rising cost.

    >>> pareto_front({"a": (1, 0.5), "b": (2, 0.4), "c": (3, 0.9)})
    ['a', 'c']
    """
    front: list[str] = []
    best = -math.inf
    for name in sorted(points, key=lambda name: (points[name][0], -sign * points[name][1])):
        quality = sign * points[name][1]
        if quality > best:
            front.append(name)
            best = quality
    return front


def _draw_losses(results: StudyResults, task: StudyTask) -> Iterator[Figure]:
    """Validation loss of the median seed against steps, time and FLOPs."""
    curves: dict[str, dict[str, Points]] = {"step": {}, "seconds": {}, "training FLOPs": {}}
    for name in results.study.variants:
        cells = results.done_cells(name, task.name)
        if not cells:
            continue
        median = sorted(cells, key=lambda cell: cell.result["metrics"]["loss"])[len(cells) // 2]
        points = [
            (float(point["step"]), point["metrics"]["loss"]) for point in median.result["curve"]
        ]
        factors = {
            "step": 1.0,
            "seconds": median.result["timing"].get("step", math.nan),
            "training FLOPs": float(results.grid.models[name, task.name].size.step_flops),
        }
        for label, factor in factors.items():
            curves[label][name] = [(at * factor, loss) for at, loss in points]
    yield from _curves_figure(
        f"{task.name}: validation loss of the median seed", curves, "validation loss"
    )


def draw_lengths(
    results: StudyResults, task: StudyTask, scores: Mapping[str, VariantScore]
) -> Iterator[Figure]:
    """The metric against the length of the inputs, if further tests have other lengths."""
    trained = _longest(task.task)
    lengths = {name: _longest(test) for name, test in task.tests.items()}
    if not set(lengths.values()) - {trained}:
        return
    curves: dict[str, Points] = {}
    for variant in results.study.variants:
        points = {trained: scores[variant].mean.value}
        for name, length in lengths.items():
            points[length] = mean_test(results, variant, task, name).value
        curves[variant] = [(float(at), value) for at, value in sorted(points.items())]
    title = f"{task.name}: {task.metric} against length, trained on up to {trained} tokens"
    yield from _curves_figure(title, {"tokens of an input": curves}, task.metric)


def _longest(task: Task) -> int:
    """Tokens of the longest of a few inputs."""
    return task.batch(0, 64, "test").labels.shape[-1]


def draw_decoding(decoding: Mapping[str, Any]) -> Iterator[Figure]:
    """Milliseconds of a token and of the prompt against the context."""
    panels: list[Plot] = []
    for kind, label in (("step", "ms a token"), ("prompt", "ms of the prompt")):
        series: list[Series] = []
        for name, records in decoding["variants"].items():
            if isinstance(records, list):
                contexts = [record["context"] for record in records]
                times = [1000 * record[kind] for record in records]
                series.append(Series(name, contexts, times))
        if series:
            panels.append(Plot(series, Axis("tokens", log=True), Axis(label), names="ends"))
    if panels:
        yield Figure("Decode time against context, processor time of one row", panels)


def _curves_figure(
    title: str, curves: Mapping[str, Mapping[str, Points]], label: str
) -> Iterator[Figure]:
    """A panel for each horizontal axis, with a line per variant; none without points."""
    panels: list[Plot] = []
    for x_label, of_variant in curves.items():
        series: list[Series] = []
        for name, points in of_variant.items():
            finite = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
            if finite:
                series.append(Series(name, *_columns(finite)))
        if series:
            panels.append(Plot(series, Axis(x_label), Axis(label), names="ends"))
    if panels:
        yield Figure(title, panels)


def _columns(points: Points) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _rank(value: float, task: StudyTask) -> float:
    return math.inf if math.isnan(value) else -task.sign * value
