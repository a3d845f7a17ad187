"""Statistics over seeds: intervals, paired comparisons with the baseline, success rates and steps
to a threshold.

Cells of one seed see the same data in the same order, so variants are compared seed by seed. The
variance over seeds estimates how much a new training run would differ; the test set error estimates
the effect of other test examples. They are reported separately.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..observe.head_analysis.resampling import SHARES, Jackknife, correct_p_values
from ..report.data import Axis, Estimate, Figure, Plot, Reference, Series
from ..training.data import Task
from .cells import PairKey
from .study_file import Contrast, Readout, StudyTask
from .study_runner import StudyResults

SIGNIFICANCE = 0.05


@dataclass(frozen=True)
class Comparison:
    """Compare a variant with the baseline on one task, or a planned contrast, paired over seeds.

    A positive `difference` means a larger metric, whether that is better or not. Its interval and
    `p` are of the paired t test; `corrected_p` is corrected over all comparisons of the study.
    """

    pairs: tuple[float, ...]
    difference: Estimate
    corrected_p: float = math.nan

    @property
    def is_significant(self) -> bool:
        """Return True if the corrected p is below 5 %."""
        return self.corrected_p < SIGNIFICANCE


@dataclass(frozen=True)
class VariantScore:
    """Hold the scores of a variant on one task.

    `values` are the metrics of the seeds that ended; `seed_deviation` is their standard deviation,
    `test_error` the standard error from the finite test set (only for shares, such as accuracies).
    `success_rate` is the share of seeds that reached the threshold, `steps_to_threshold` the median
    number of steps until they did.
    """

    values: tuple[float, ...]
    mean: Estimate
    seed_deviation: float
    test_error: float
    failures: tuple[str, ...]
    success_rate: float
    steps_to_threshold: float
    comparison: Comparison | None = None
    is_best: bool = False


def score_variants(
    results: StudyResults, comparisons: Mapping[PairKey, Comparison]
) -> dict[PairKey, VariantScore]:
    """Score every variant on every task, compared with the baseline by `compare_seeds`.

    A variant is the best of a task only if it is significantly better than the baseline, or is the
    baseline and all others are significantly worse.
    """
    scores: dict[PairKey, VariantScore] = {}
    study = results.study
    for task in study.tasks.values():
        of_task: dict[str, VariantScore] = {}
        for variant in study.variants:
            score = _score_seeds(results, task, variant)
            comparison = comparisons.get((variant, task.name))
            of_task[variant] = replace(score, comparison=comparison)
        gains: dict[str, float] = {}  # of the variants that differ significantly
        for variant, score in of_task.items():
            if score.comparison is not None and score.comparison.is_significant:
                gains[variant] = task.sign * score.comparison.difference.value
        ranks = {name: task.sign * of_task[name].mean.value for name in gains if gains[name] > 0}
        best = study.baseline if 0 < len(gains) == len(of_task) - 1 else None
        best = max(ranks, key=lambda name: ranks[name], default=best)
        for variant, score in of_task.items():
            scores[variant, task.name] = replace(score, is_best=variant == best)
    return scores


def compare_seeds(results: StudyResults) -> dict[PairKey, Comparison]:
    """Compare every variant with the baseline, and every contrast of the study, by task.

    p values are corrected over all of them (Holm). Comparisons with fewer than two seeds are left
    out.
    """
    study = results.study
    trained = {name: Readout.for_variant(name) for name in study.variants}
    baseline = trained.pop(study.baseline)
    planned = {name: Contrast(readout, baseline) for name, readout in trained.items()}
    planned |= {contrast.key(study.baseline): contrast for contrast in study.contrasts}
    compared: dict[PairKey, Comparison] = {}
    for task in study.tasks.values():
        for name, contrast in planned.items():
            left = _read_seeds(results, task, contrast.left)
            right = _read_seeds(results, task, contrast.right)
            pairs = [left[seed] - right[seed] for seed in sorted(left.keys() & right.keys())]
            if len(pairs) >= 2:
                compared[name, task.name] = Comparison(tuple(pairs), estimate_mean(pairs))
    corrected = correct_p_values([one.difference.p for one in compared.values()]).tolist()
    return {
        key: replace(one, corrected_p=p)
        for (key, one), p in zip(compared.items(), corrected, strict=True)
    }


def estimate_mean(values: Sequence[float], metric: str = "") -> Estimate:
    """Estimate a mean, its 95 % interval by Student's t, and p of the t test that it is 0.

    The interval of a share, such as an accuracy, is cut off at 0 and 1. Values without spread have
    no p, and fewer than 6 of them no interval.

    >>> [round(number, 4) for number in estimate_mean([1.0, 2.0, 3.0])]
    [2.0, -0.4841, 4.4841, nan, 3, 0.0742]
    """
    if not len(values):
        return Estimate(math.nan, rows=0)
    mean = Jackknife.of_ratio(np.asarray(values, dtype=np.float64))
    low, high = (float(end) for end in mean.interval())
    if metric.startswith(SHARES):
        low, high = np.clip((low, high), 0.0, 1.0).tolist()
    return Estimate(float(mean.value), low, high, rows=len(values), p=float(mean.p_values()))


def mean_of_seeds(results: StudyResults, task: StudyTask, readout: Readout) -> Estimate:
    """Average a readout on a task over seeds."""
    return estimate_mean([*_read_seeds(results, task, readout).values()], task.metric)


def _read_seeds(results: StudyResults, task: StudyTask, readout: Readout) -> dict[int, float]:
    """Return a readout by seed, for every seed that has it."""
    values: dict[int, float] = {}
    for one in results.done_cells(readout.variant, task.name):
        value = readout.read(one.result, task.metric)
        if value is not None and math.isfinite(value):
            values[one.cell.seed] = value
    return values


def _score_seeds(results: StudyResults, task: StudyTask, variant: str) -> VariantScore:
    cells = results.report_cells(variant, task.name)
    done = results.done_cells(variant, task.name)
    values = [*_read_seeds(results, task, Readout.for_variant(variant)).values()]
    reached: list[int] = []  # the first evaluation step of each seed at which it was a success
    for one in done if task.threshold is not None else ():
        curve = one.result["curve"]
        if all(task.metric not in point["metrics"] for point in curve):
            # A metric of generated texts is only measured at the end of training.
            curve = [{"step": one.result["steps"], "metrics": one.result["metrics"]}]
        for point in curve:
            value = point["metrics"].get(task.metric, math.nan)
            if task.sign * (value - task.threshold) >= 0:
                reached.append(int(point["step"]))
                break
    mean = estimate_mean(values, task.metric)
    count = done[0].result["counts"].get(task.metric, 0) if done else 0
    test_error = math.nan
    if task.metric.startswith(SHARES) and count:
        test_error = math.sqrt(max(0.0, mean.value * (1 - mean.value)) / count)
    failed = [one for one in cells if not one.is_done]
    has_rate = bool(cells) and task.threshold is not None
    return VariantScore(
        values=tuple(values),
        mean=mean,
        seed_deviation=float(np.std(values, ddof=1)) if len(values) > 1 else math.nan,
        test_error=test_error,
        failures=tuple(f"seed {one.cell.seed}: {one.result['status']}" for one in failed),
        success_rate=len(reached) / len(cells) if has_rate else math.nan,
        steps_to_threshold=float(np.median(reached)) if reached else math.nan,
    )


# --- Figures of a study ---------------------------------------------------------------------------


Curve = tuple[Sequence[float], Sequence[float]]  # horizontal and vertical positions
LABEL_WIDTH = 14  # characters of a line of a variant's name
COLUMN_INCHES = 0.85
MOST_COLUMNS = 11  # of one panel


def draw_task(
    results: StudyResults,
    task: StudyTask,
    scores: Mapping[PairKey, VariantScore],
    comparisons: Mapping[PairKey, Comparison],
) -> Iterator[Figure]:
    """Draw all figures of a task."""
    study = results.study
    of_task = {variant: scores[variant, task.name] for variant in study.variants}
    ranks = {name: -task.sign * score.mean.value for name, score in of_task.items()}
    names = sorted(of_task, key=lambda name: (math.isnan(ranks[name]), ranks[name]))
    baseline = of_task[study.baseline].mean.value
    yield _seeds_figure(
        f"{task.name}: {task.metric} of every seed",
        {name: (of_task[name].values, of_task[name].mean) for name in names},
        [Reference("y", baseline, study.baseline)] if math.isfinite(baseline) else [],
    )
    if study.contrasts:
        yield from draw_differences(results, task, comparisons)
    yield from _draw_costs(results, task, of_task)
    title = f"{task.name}: validation loss of the median seed"
    yield from _curves_figure(title, _loss_curves(results, task), "validation loss")
    yield from draw_lengths(results, task, of_task)


def draw_differences(
    results: StudyResults, task: StudyTask, comparisons: Mapping[PairKey, Comparison]
) -> Iterator[Figure]:
    """Draw every comparison of the study on a task; none if nothing was compared."""
    rows: dict[str, tuple[Sequence[float], Estimate]] = {}
    for (name, of_task), one in comparisons.items():
        if of_task == task.name:
            is_variant = name in results.study.variants
            label = f"{name} minus {results.study.baseline}" if is_variant else name
            rows[f"{label} *" if one.is_significant else label] = (one.pairs, one.difference)
    if rows:
        title = f"{task.name}: differences of every seed (*: significant)"
        yield _seeds_figure(title, rows, [Reference("y", 0.0)])


def _seeds_figure(
    title: str,
    rows: Mapping[str, tuple[Sequence[float], Estimate]],
    references: Sequence[Reference],
) -> Figure:
    """Draw a column per name, in panels of `MOST_COLUMNS` at most."""
    names = list(rows)
    parts = [names[n : n + MOST_COLUMNS] for n in range(0, len(names), MOST_COLUMNS)] or [[]]
    label_width = LABEL_WIDTH if len(parts) == 1 else LABEL_WIDTH - 4
    panels = [
        _seeds_plot({name: rows[name] for name in part}, references, label_width) for part in parts
    ]
    return Figure(title, panels, num_columns=1)


def _seeds_plot(
    rows: Mapping[str, tuple[Sequence[float], Estimate]],
    references: Sequence[Reference],
    label_width: int,
) -> Plot:
    """Draw a dot for each seed of a column, and the mean with its interval."""
    seeds: list[tuple[float, float]] = []
    means: list[tuple[float, ...]] = []
    for place, (values, mean) in enumerate(rows.values()):
        seeds += [(place - 0.12, value) for value in values]
        ends = [end if math.isfinite(end) else mean.value for end in (mean.low, mean.high)]
        means += [(place + 0.12, mean.value, *ends)] if math.isfinite(mean.value) else []
    dots = zip(*seeds, strict=True) if seeds else ((), ())
    bars = zip(*means, strict=True) if means else ((), (), (), ())
    series = [
        Series("seed", *dots, line="", marker="o"),
        Series("mean, 95 % interval", *bars, line="", marker="D", band=False),
    ]
    names = {float(n): textwrap.fill(name, label_width) for n, name in enumerate(rows)}
    axis = Axis(ticks=names, low=-0.5, high=len(rows) - 0.5)
    size = (max(4.4, 1.0 + COLUMN_INCHES * len(rows)), 3.0)
    return Plot(series, x=axis, references=references, size=size)


def _draw_costs(
    results: StudyResults, task: StudyTask, scores: Mapping[str, VariantScore]
) -> Iterator[Figure]:
    """Draw quality against each cost; joins the variants that no other beats in both."""
    panels: list[Plot] = []
    costs = {
        "parameters": "parameters",
        "FLOPs of a training step": "step_flops",
        "KV bytes of a row": "kv_bytes",
    }
    for label, field in costs.items():
        points: dict[str, tuple[float, float]] = {}
        for name, score in scores.items():
            cost = getattr(results.grid.models[name, task.name], field)
            if cost and math.isfinite(score.mean.value):
                points[name] = (float(cost), score.mean.value)
        if points:
            series = [
                Series(name, [x], [y], line="", marker="o") for name, (x, y) in points.items()
            ]
            front = [points[name] for name in pareto_front(points, task.sign)]
            series.append(Series("", *zip(*front, strict=True), line="--", colour="muted"))
            xs = [x for x, _ in points.values()]
            axis = Axis(label, log=max(xs) > 4 * min(xs))
            panels.append(Plot(series, axis, Axis(task.metric), names="ends"))
    if panels:
        note = "Joined: no variant is better and cheaper."
        yield Figure(f"{task.name}: {task.metric} against cost", panels, note=note)


def pareto_front(points: Mapping[str, tuple[float, float]], sign: int = 1) -> list[str]:
    """Return the names of points that no other beats in both cost and quality, by rising cost.

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


def _loss_curves(results: StudyResults, task: StudyTask) -> dict[str, dict[str, Curve]]:
    """Draw validation loss of the median seed against steps, time and FLOPs."""
    curves: dict[str, dict[str, Curve]] = {"step": {}, "seconds": {}, "training FLOPs": {}}
    for name in results.study.variants:
        cells = results.done_cells(name, task.name)
        if not cells:
            continue
        median = sorted(cells, key=lambda cell: cell.result["metrics"]["loss"])[len(cells) // 2]
        steps = np.array([point["step"] for point in median.result["curve"]], np.float64)
        losses = [point["metrics"]["loss"] for point in median.result["curve"]]
        seconds = median.result["timing"].get("step", math.nan)
        flops = float(results.grid.models[name, task.name].step_flops)
        for label, factor in zip(curves, (1.0, seconds, flops), strict=True):
            curves[label][name] = ((steps * factor).tolist(), losses)
    return curves


def draw_lengths(
    results: StudyResults, task: StudyTask, scores: Mapping[str, VariantScore]
) -> Iterator[Figure]:
    """Draw the metric against the length of the inputs, if further tests have other lengths."""
    trained = _longest(task.task)
    lengths = {name: _longest(test) for name, test in task.tests.items()}
    if not set(lengths.values()) - {trained}:
        return
    curves: dict[str, Curve] = {}
    for variant in results.study.variants:
        points = {trained: scores[variant].mean.value}
        for name, length in lengths.items():
            readout = Readout.for_variant(variant, "on", name)
            points[length] = mean_of_seeds(results, task, readout).value
        places = sorted(points)
        curves[variant] = (places, [points[at] for at in places])
    title = f"{task.name}: {task.metric} against length, trained on up to {trained} tokens"
    yield from _curves_figure(title, {"tokens of an input": curves}, task.metric)


def _longest(task: Task) -> int:
    """Return the number of tokens of the longest of a few inputs."""
    return task.batch(0, 64, "test").labels.shape[-1]


def draw_decoding(decoding: Mapping[str, Any]) -> Iterator[Figure]:
    """Draw milliseconds of a token and of the prompt against the context."""
    panels: list[Plot] = []
    measured = {name: of for name, of in decoding["variants"].items() if isinstance(of, list)}
    for kind, label in (("step", "ms a token"), ("prompt", "ms of the prompt")):
        series: list[Series] = []
        for name, records in measured.items():
            times = [1000 * record[kind] for record in records]
            series.append(Series(name, [record["context"] for record in records], times))
        panels.append(Plot(series, Axis("tokens", log=True), Axis(label), names="ends"))
    if measured:
        yield Figure("Decode time against context, processor time of one row", panels)


def _curves_figure(
    title: str, curves: Mapping[str, Mapping[str, Curve]], label: str
) -> Iterator[Figure]:
    """Draw a panel for each horizontal axis, with a line per variant; none without points."""
    panels: list[Plot] = []
    for x_label, of_variant in curves.items():
        series: list[Series] = []
        for name, curve in of_variant.items():
            points = np.array(curve, np.float64)
            points = points[:, np.isfinite(points).all(0)]
            if points.size:
                series.append(Series(name, *points.tolist()))
        if series:
            panels.append(Plot(series, Axis(x_label), Axis(label), names="ends"))
    if panels:
        yield Figure(title, panels)
