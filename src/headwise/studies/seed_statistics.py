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
from typing import NamedTuple

import numpy as np

from ..head_analysis.resampling import SHARES, Jackknife, correct_p_values
from .study_file import Contrast, Readout, StudyTask
from .study_runner import CellResult, StudyResults

SIGNIFICANCE = 0.05


class Interval(NamedTuple):
    """A mean over seeds and its 95 % interval by Student's t; the ends are NaN if fewer than 6
    seeds are all equal.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """A variant against the baseline on one task: paired differences over seeds; p is corrected
    over all comparisons.

    A positive `difference` means that the variant has the larger metric, whether that is better or
    not. Its interval is that of the paired t test. A comparison can also be a contrast of two
    readouts that the study planned.
    """

    pairs: tuple[float, ...]
    difference: Interval
    p: float
    corrected_p: float = math.nan

    @property
    def is_significant(self) -> bool:
        """Whether the corrected p is below 5 %."""
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
    task: str
    values: tuple[float, ...]
    mean: Interval
    seed_deviation: float
    test_error: float
    failures: tuple[str, ...]
    success_rate: float
    steps_to_threshold: float
    comparison: Comparison | None = None
    is_best: bool = False


def score_variants(
    results: StudyResults, comparisons: Mapping[tuple[str, str], Comparison]
) -> dict[tuple[str, str], VariantScore]:
    """Score every variant on every task, with its comparison with the baseline from
    `compare_seeds`.

    A variant is the best of a task only if it is significantly better than the baseline, or is the
    baseline and all others are significantly worse.
    """
    scores: dict[tuple[str, str], VariantScore] = {}
    study = results.study
    for task in study.tasks.values():
        for variant in study.variants:
            score = _score_cells(variant, task, results.report_cells(variant, task.name))
            scores[variant, task.name] = replace(
                score, comparison=comparisons.get((variant, task.name))
            )
        if (best := _find_best(scores, task, study.baseline)) is not None:
            scores[best] = replace(scores[best], is_best=True)
    return scores


def compare_seeds(results: StudyResults) -> dict[tuple[str, str], Comparison]:
    """Every variant minus the baseline and every contrast of the study, by variant or contrast, and
    task.

    p values are corrected over all of them (Holm). Those with fewer than two seeds are left out.
    """
    study = results.study
    trained = {name: Readout(name, "", name, "", "") for name in study.variants}
    baseline = trained.pop(study.baseline)
    planned = {name: Contrast(readout, baseline) for name, readout in trained.items()}
    planned |= {contrast.name: contrast for contrast in study.contrasts}
    differences: dict[tuple[str, str], list[float]] = {}
    for task in study.tasks.values():
        for name, contrast in planned.items():
            left, right = (
                _read_seeds(results, task, one) for one in (contrast.left, contrast.right)
            )
            pairs = [left[seed] - right[seed] for seed in sorted(set(left) & set(right))]
            if len(pairs) >= 2:
                differences[name, task.name] = pairs
    tests = {key: paired_t_test(pairs) for key, pairs in differences.items()}
    corrected = correct_p_values(list(tests.values())).tolist()
    return {
        key: Comparison(tuple(pairs), mean_interval(pairs), tests[key], p)
        for (key, pairs), p in zip(differences.items(), corrected, strict=True)
    }


def mean_interval(values: Sequence[float], metric: str = "") -> Interval:
    """Mean of the values with its 95 % interval by Student's t, which excludes 0 where p of the t
    test is below 5 %.

    The interval of a share, such as an accuracy, is cut off at 0 and 1.

    >>> [round(end, 2) for end in mean_interval([1.0, 2.0, 3.0])]
    [2.0, -0.48, 4.48]
    """
    if not len(values):
        return Interval(math.nan, math.nan, math.nan)
    mean = Jackknife.of_ratio(np.asarray(values, dtype=np.float64))
    low, high = (float(end) for end in mean.interval())
    if metric.startswith(SHARES):
        low, high = float(np.clip(low, 0, 1)), float(np.clip(high, 0, 1))
    return Interval(float(mean.value), low, high)


def paired_t_test(differences: Sequence[float]) -> float:
    """Two-sided p of Student's t test that the mean of paired differences is 0.

    It is NaN for fewer than two differences, and for equal ones: without spread there is nothing to
    test.

    >>> round(paired_t_test([1.0, 2.0, 3.0]), 4), paired_t_test([0.25, 0.25])
    (0.0742, nan)
    """
    return float(Jackknife.of_ratio(np.asarray(differences, dtype=np.float64)).p_values())


def _read_seeds(results: StudyResults, task: StudyTask, readout: Readout) -> dict[int, float]:
    """A readout of every seed that has it, by seed."""
    cells = [one for one in results.report_cells(readout.variant, task.name) if one.is_done]
    values = {one.cell.seed: readout.read(one.result, task.metric) for one in cells}
    return {
        seed: value for seed, value in values.items() if value is not None and math.isfinite(value)
    }


def _score_cells(variant: str, task: StudyTask, cells: Sequence[CellResult]) -> VariantScore:
    metrics = [one.result["metrics"].get(task.metric, math.nan) for one in cells if one.is_done]
    values = [value for value in metrics if math.isfinite(value)]
    reached = [
        step for one in cells if one.is_done and (step := _first_success(one, task)) is not None
    ]
    count = next((one.result["counts"].get(task.metric, 0) for one in cells if one.is_done), 0)
    mean = mean_interval(values, task.metric)
    is_share = task.metric.startswith(SHARES) and count
    return VariantScore(
        variant=variant,
        task=task.name,
        values=tuple(values),
        mean=mean,
        seed_deviation=float(np.std(values, ddof=1)) if len(values) > 1 else math.nan,
        test_error=math.sqrt(max(0.0, mean.value * (1 - mean.value)) / count)
        if is_share
        else math.nan,
        failures=tuple(
            f"seed {one.cell.seed}: {one.result['status']}" for one in cells if not one.is_done
        ),
        success_rate=len(reached) / len(cells)
        if cells and task.threshold is not None
        else math.nan,
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
        value = point["metrics"].get(task.metric, math.nan)
        if (value >= task.threshold) if task.higher_is_better else (value <= task.threshold):
            return int(point["step"])
    return None


def _find_best(
    scores: dict[tuple[str, str], VariantScore], task: StudyTask, baseline: str
) -> tuple[str, str] | None:
    """The best variant of a task if it is significantly better than the baseline; a baseline if it
    beats all others.
    """
    sign = 1 if task.higher_is_better else -1
    others = {
        key: score for key, score in scores.items() if key[1] == task.name and key[0] != baseline
    }
    gains = {
        key: sign * one.difference.value
        for key, score in others.items()
        if (one := score.comparison) is not None and one.is_significant
    }
    if any(gain > 0 for gain in gains.values()):
        return max(
            (key for key, gain in gains.items() if gain > 0),
            key=lambda key: sign * scores[key].mean.value,
        )
    return (baseline, task.name) if others and len(gains) == len(others) else None
