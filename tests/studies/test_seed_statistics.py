"""Statistics over seeds, against scipy and by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.stats

from headwise.studies.cells import CellGrid
from headwise.studies.seed_statistics import bootstrap_mean, paired_t_test, score_variants, student_tail
from headwise.studies.study_file import parse_study
from headwise.studies.study_runner import CellResult, StudyResults, choose_rates

TABLE: dict[str, Any] = {
    "hypothesis": "x",
    "seeds": [1, 2, 3, 4],
    "recipe": {"steps": 8, "lr": [0.001, 0.003]},
    "variants": {"mha": {}, "gqa": {}, "linear": {}},
    "tasks": {"recall": {"vocabulary": 32, "length": 32, "pairs": 4, "threshold": 0.5}},
}


@pytest.mark.parametrize(("t", "freedom"), [(0.0, 3), (0.3, 1), (2.1, 2), (4.4, 4), (1.0, 9), (30.0, 3), (2.0, 200)])
def test_tail_of_student(t: float, freedom: int):
    assert student_tail(t, freedom) == pytest.approx(2 * scipy.stats.t.sf(t, freedom), rel=1e-9, abs=1e-12)


def test_paired_test_is_scipys():
    generator = np.random.default_rng(0)
    for count in (2, 3, 7, 20):
        ours, theirs = generator.normal(0.3, 1, count), generator.normal(0, 1, count)
        expected = scipy.stats.ttest_rel(ours, theirs).pvalue
        assert paired_t_test(ours - theirs) == pytest.approx(expected, rel=1e-8)
    assert math.isnan(paired_t_test([1.0]))
    assert (paired_t_test([0.0, 0.0]), paired_t_test([0.5, 0.5])) == (1.0, 0.0)


def test_bootstrap_interval_is_scipys():
    values = np.random.default_rng(3).normal(size=12)
    own = bootstrap_mean(values)
    theirs = scipy.stats.bootstrap((values,), np.mean, method="percentile", n_resamples=200_000, random_state=0)
    assert own.value == pytest.approx(values.mean())
    assert own[1:] == pytest.approx(tuple(theirs.confidence_interval), abs=0.03)


def make_results(values: dict[str, list[float | None]]) -> StudyResults:
    """Results of a study with these accuracies; None is a cell that diverged."""
    grid = CellGrid(parse_study(TABLE, "t", "small", {}))
    rates = {(name, "recall"): 0.001 for name in values}
    cells = []
    for cell in grid.report_cells(rates):
        value = values[cell.variant][cell.seed - 1]
        result: dict[str, Any] = {"status": "diverged", "message": "step 3: the loss is nan"}
        if value is not None:
            curve = [{"step": 4 * n, "metrics": {"accuracy": value * n / 2, "loss": 1.0}} for n in (1, 2)]
            result = {"status": "done", "metrics": {"accuracy": value}, "counts": {"accuracy": 100}, "curve": curve}
        cells.append(CellResult(cell, "report", result))
    return StudyResults(grid, rates, cells)


def test_scores_and_comparisons():
    values = {"mha": [0.5, 0.6, 0.7, 0.4], "gqa": [0.8, 0.95, 1.0, 0.65], "linear": [0.1, None, 0.35, 0.0]}
    scores = score_variants(make_results(values))
    mha, gqa, linear = (scores[name, "recall"] for name in values)
    assert mha.comparison is None
    assert mha.seed_deviation == pytest.approx(np.std(values["mha"], ddof=1))
    assert mha.test_error == pytest.approx(math.sqrt(0.55 * 0.45 / 100))
    assert (mha.success_rate, mha.steps_to_threshold) == (0.75, 8.0)
    p_gqa = scipy.stats.ttest_rel(values["gqa"], values["mha"]).pvalue
    p_linear = scipy.stats.ttest_rel([0.1, 0.35, 0.0], [0.5, 0.7, 0.4]).pvalue
    assert gqa.comparison
    assert gqa.comparison.difference.value == pytest.approx(0.3)
    assert gqa.comparison.p == pytest.approx(p_gqa)
    assert gqa.comparison.corrected_p == pytest.approx(min(1, 2 * min(p_gqa, p_linear)))
    assert gqa.is_best
    assert not mha.is_best
    assert linear.failures == ("seed 2: diverged",)
    assert linear.success_rate == 0.0


def test_best_needs_significance():
    equal = score_variants(
        make_results({"mha": [0.5, 0.6, 0.7, 0.4], "gqa": [0.9, 0.2, 0.8, 0.4], "linear": [0.1] * 4})
    )
    assert not equal["gqa", "recall"].is_best  # a larger mean, but not significantly
    assert not equal["mha", "recall"].is_best
    beaten = score_variants(make_results({"mha": [0.9] * 4, "gqa": [0.2, 0.3, 0.2, 0.3], "linear": [0.1] * 4}))
    assert beaten["mha", "recall"].is_best


def test_learning_rates_are_chosen_on_validation():
    grid = CellGrid(parse_study(TABLE, "t", "small", {}))
    valid = {("mha", 0.001): 0.4, ("mha", 0.003): 0.6, ("gqa", 0.001): 0.3}
    tuned = [
        CellResult(cell, "tune", {"status": "done", "valid": {"accuracy": valid[cell.variant, cell.rate]}})
        if (cell.variant, cell.rate) in valid
        else CellResult(cell, "tune", {"status": "diverged"})
        for cell in grid.tuning_cells()
    ]
    assert choose_rates(grid.study, tuned) == {("mha", "recall"): 0.003, ("gqa", "recall"): 0.001}
    lower = parse_study({**TABLE, "tasks": {"recall": {"metric": "loss"}}}, "t", "small", {})
    losses = [
        CellResult(cell, "tune", {"status": "done", "valid": {"loss": cell.rate}})
        for cell in CellGrid(lower).tuning_cells()
    ]
    assert set(choose_rates(lower, losses).values()) == {0.001}
