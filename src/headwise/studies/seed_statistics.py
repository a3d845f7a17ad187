"""Statistics over seeds: intervals, paired comparisons with the baseline, success rates and steps
to a threshold.

Cells of one seed see the same data in the same order, so variants are compared seed by seed. The
variance over seeds says how much a new training run would differ; the error of the test set says
how much other test examples would. They are reported apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..observe.head_analysis.resampling import SHARES, Jackknife, correct_p_values
from ..report.data import Estimate
from .cells import PairKey
from .study_file import Contrast, Readout, StudyTask
from .study_runner import CellResult, StudyResults

SIGNIFICANCE = 0.05


@dataclass(frozen=True)
class Comparison:
    """A variant minus the baseline on one task, or a planned contrast: paired differences over
    seeds.

    A positive `difference` means a larger metric, whether that is better or not. Its interval and
    `p` are of the paired t test; `corrected_p` is corrected over all comparisons of the study.
    """

    pairs: tuple[float, ...]
    difference: Estimate
    corrected_p: float = math.nan

    @property
    def is_significant(self) -> bool:
        """True if the corrected p is below 5 %."""
        return self.corrected_p < SIGNIFICANCE


@dataclass(frozen=True)
class VariantScore:
    """Scores of a variant on one task.

    `values` are the metrics of the seeds that ended; `seed_deviation` is their standard deviation,
    `test_error` the standard error from the finite test set (only for shares, such as accuracies).
    `success_rate` is the share of seeds that reached the threshold, `steps_to_threshold` the median
    number of steps until they did.
    """

    variant: str
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
    """Score every variant on every task, with its comparison with the baseline from
    `compare_seeds`.

    A variant is the best of a task only if it is significantly better than the baseline, or is the
    baseline and all others are significantly worse.
    """
    scores: dict[PairKey, VariantScore] = {}
    study = results.study
    for task in study.tasks.values():
        of_task: dict[str, VariantScore] = {}
        for variant in study.variants:
            score = _score_cells(variant, task, results.report_cells(variant, task.name))
            comparison = comparisons.get((variant, task.name))
            of_task[variant] = replace(score, comparison=comparison)
        best = _find_best(of_task, task, study.baseline)
        for variant, score in of_task.items():
            scores[variant, task.name] = replace(score, is_best=variant == best)
    return scores


def compare_seeds(results: StudyResults) -> dict[PairKey, Comparison]:
    """Every variant minus the baseline and every contrast of the study, by variant or contrast, and
    task.

    p values are corrected over all of them (Holm). Those with fewer than two seeds are left out.
    """
    study = results.study
    trained = {name: Readout(name, "", name, "", "") for name in study.variants}
    baseline = trained.pop(study.baseline)
    planned = {name: Contrast(readout, baseline) for name, readout in trained.items()}
    planned |= {contrast.name: contrast for contrast in study.contrasts}
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
    """Mean of the values, its 95 % interval by Student's t, and p of the t test that it is 0.

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


def mean_test(results: StudyResults, variant: str, task: StudyTask, test: str) -> Estimate:
    """Mean over seeds of the metric of a variant on a further test."""
    metrics = [one.result["tests"].get(test, {}) for one in results.done_cells(variant, task.name)]
    values = [of_test[task.metric] for of_test in metrics if task.metric in of_test]
    return estimate_mean(values, task.metric)


def _read_seeds(results: StudyResults, task: StudyTask, readout: Readout) -> dict[int, float]:
    """A readout of every seed that has it, by seed."""
    values: dict[int, float] = {}
    for one in results.done_cells(readout.variant, task.name):
        value = readout.read(one.result, task.metric)
        if value is not None and math.isfinite(value):
            values[one.cell.seed] = value
    return values


def _score_cells(variant: str, task: StudyTask, cells: Sequence[CellResult]) -> VariantScore:
    done = [one for one in cells if one.is_done]
    metrics = [one.result["metrics"].get(task.metric, math.nan) for one in done]
    values = [value for value in metrics if math.isfinite(value)]
    steps = [_first_success(one, task) for one in done]
    reached = [step for step in steps if step is not None]
    has_rate = bool(cells) and task.threshold is not None
    mean = estimate_mean(values, task.metric)
    count = done[0].result["counts"].get(task.metric, 0) if done else 0
    test_error = math.nan
    if task.metric.startswith(SHARES) and count:
        test_error = math.sqrt(max(0.0, mean.value * (1 - mean.value)) / count)
    failed = [one for one in cells if not one.is_done]
    return VariantScore(
        variant=variant,
        values=tuple(values),
        mean=mean,
        seed_deviation=float(np.std(values, ddof=1)) if len(values) > 1 else math.nan,
        test_error=test_error,
        failures=tuple(f"seed {one.cell.seed}: {one.result['status']}" for one in failed),
        success_rate=len(reached) / len(cells) if has_rate else math.nan,
        steps_to_threshold=float(np.median(reached)) if reached else math.nan,
    )


def _first_success(one: CellResult, task: StudyTask) -> int | None:
    """The first evaluation step at which the metric reached the threshold; None if it never did.

    A metric of generated texts is only measured at the end of training.
    """
    if task.threshold is None:
        return None
    curve = one.result["curve"]
    if all(task.metric not in point["metrics"] for point in curve):
        curve = [{"step": one.result["steps"], "metrics": one.result["metrics"]}]
    for point in curve:
        gain = task.sign * (point["metrics"].get(task.metric, math.nan) - task.threshold)
        if gain >= 0:
            return int(point["step"])
    return None


def _find_best(scores: Mapping[str, VariantScore], task: StudyTask, baseline: str) -> str | None:
    """The best variant that is significantly better than the baseline; the baseline if it is
    significantly better than all others.
    """
    num_worse = 0
    better: list[str] = []
    for variant, score in scores.items():
        if score.comparison is not None and score.comparison.is_significant:
            is_better = task.sign * score.comparison.difference.value > 0
            num_worse += not is_better
            better += [variant] if is_better else []
    if better:
        return max(better, key=lambda variant: task.sign * scores[variant].mean.value)
    return baseline if 0 < num_worse == len(scores) - 1 else None
