"""Statistics over seeds, against scipy and by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy  # imports scipy.stats when a test needs it

from headwise.report import plots
from headwise.report.data import Estimate
from headwise.studies import seed_statistics, study_verdict
from headwise.studies.cells import CellGrid
from headwise.studies.seed_statistics import (
    VariantScore,
    compare_seeds,
    draw_differences,
    estimate_mean,
    score_variants,
)
from headwise.studies.study_file import Contrast, Readout, parse_study
from headwise.studies.study_report import StudyReport
from headwise.studies.study_runner import CellResult, StudyResults, choose_rates
from headwise.studies.study_verdict import StudyVerdict, judge_study

TABLE: dict[str, Any] = {
    "hypothesis": "x",
    "seeds": [1, 2, 3, 4],
    "recipe": {"steps": 8, "lr": [0.001, 0.003]},
    "variants": {"mha": {}, "gqa": {}, "linear": {}},
    "tasks": {"recall": {"vocabulary": 32, "length": 32, "pairs": 4, "threshold": 0.5}},
}


def scores_of(results: StudyResults) -> dict[tuple[str, str], VariantScore]:
    return score_variants(results, compare_seeds(results))


def test_interval_of_differences_is_scipys():
    values = np.random.default_rng(1).normal(0.2, 1, 5)
    expected = scipy.stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert estimate_mean(values.tolist())[1:3] == pytest.approx(
        (expected.low, expected.high), rel=1e-9
    )


def test_paired_test_is_scipys():
    generator = np.random.default_rng(0)
    for count in (2, 3, 7, 9):
        ours, theirs = generator.normal(0.3, 1, count), generator.normal(0, 1, count)
        expected = scipy.stats.ttest_rel(ours, theirs).pvalue
        assert estimate_mean(ours - theirs).p == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize(
    "differences", [[1.0], [0.0, 0.0], [0.25, 0.25], [0.1 + 0.2, 0.3, 0.3], [0.5] * 20]
)
def test_seeds_without_spread_have_no_p(differences: list[float]):
    assert math.isnan(estimate_mean(differences).p)


def test_seeds_without_spread_decide_nothing_and_are_named():
    results = make_results({"mha": [0.25] * 4, "gqa": [0.5] * 4, "linear": [0.2, 0.25, 0.2, 0.25]})
    compared = compare_seeds(results)
    gqa, linear = (compared[name, "recall"] for name in ("gqa", "linear"))
    assert math.isnan(gqa.corrected_p)
    assert not gqa.is_significant
    assert (
        linear.corrected_p == linear.difference.p
    )  # the comparison without spread is not one of the tests
    assert not scores_of(results)["gqa", "recall"].is_best
    claims = StudyReport(results, scores_of(results), compared, {}, {}).claims
    assert "recall: gqa minus mha: +0.25 [no spread], p -, not significant." in claims
    task = results.study.tasks["recall"]
    figures = list(draw_differences(results, task, compared))
    assert list(figures[0].panels[0].x.ticks.values()) == ["gqa minus mha", "linear minus\nmha"]
    assert "nan" not in plots.to_svg(figures[0])


def test_the_interval_of_a_share_ends_at_1():
    low, high = estimate_mean([0.99, 1.0, 0.98], "accuracy")[1:3]
    assert (low < 0.98, high) == (True, 1.0)


def make_results(values: dict[str, list[float | None]], **changes: Any) -> StudyResults:
    """Results of a study with these accuracies; None is a cell that diverged."""
    grid = CellGrid(parse_study({**TABLE, **changes}, "t", "small", {}))
    rates = {(name, "recall"): 0.001 for name in values}
    cells = []
    for cell in grid.report_cells(rates):
        value = values[cell.variant][cell.seed - 1]
        result: dict[str, Any] = {"status": "diverged", "message": "step 3: the loss is nan"}
        if value is not None:
            curve = [
                {"step": 4 * n, "metrics": {"accuracy": value * n / 2, "loss": 1.0}} for n in (1, 2)
            ]
            result = {
                "status": "done",
                "metrics": {"accuracy": value},
                "counts": {"accuracy": 100},
                "curve": curve,
            }
        cells.append(CellResult(cell, "report", result))
    return StudyResults(grid, rates, cells)


def test_scores_and_comparisons():
    values = {
        "mha": [0.5, 0.6, 0.7, 0.4],
        "gqa": [0.8, 0.95, 1.0, 0.65],
        "linear": [0.1, None, 0.35, 0.0],
    }
    scores = scores_of(make_results(values))
    mha, gqa, linear = (scores[name, "recall"] for name in values)
    assert mha.comparison is None
    assert mha.seed_deviation == pytest.approx(np.std(values["mha"], ddof=1))
    assert mha.test_error == pytest.approx(math.sqrt(0.55 * 0.45 / 100))
    assert (mha.success_rate, mha.steps_to_threshold) == (0.75, 8.0)
    p_gqa = scipy.stats.ttest_rel(values["gqa"], values["mha"]).pvalue
    p_linear = scipy.stats.ttest_rel([0.1, 0.35, 0.0], [0.5, 0.7, 0.4]).pvalue
    assert gqa.comparison
    assert gqa.comparison.difference.value == pytest.approx(0.3)
    assert gqa.comparison.difference.p == pytest.approx(p_gqa)
    assert gqa.comparison.corrected_p == pytest.approx(min(1, 2 * min(p_gqa, p_linear)))
    assert gqa.is_best
    assert not mha.is_best
    assert linear.failures == ("seed 2: diverged",)
    assert linear.success_rate == 0.0


def test_contrasts_are_in_the_correction():
    values = {
        "mha": [0.5, 0.6, 0.7, 0.4],
        "gqa": [0.8, 0.95, 1.0, 0.65],
        "linear": [0.1, None, 0.35, 0.0],
    }
    results = make_results(
        values, contrasts=[["linear", "gqa"], ["learning of gqa", "learning of mha"]]
    )
    compared = compare_seeds(results)
    name = "linear minus gqa"
    assert compared[name, "recall"].pairs == pytest.approx((0.1 - 0.8, 0.35 - 1.0, 0.0 - 0.65))
    assert compared[
        "learning of gqa minus learning of mha", "recall"
    ].difference.value == pytest.approx(0.75 * 0.3)
    raw = {key: one.difference.p for key, one in compared.items()}
    assert raw[name, "recall"] == pytest.approx(
        scipy.stats.ttest_1samp([-0.7, -0.65, -0.65], 0).pvalue
    )
    assert len(raw) == 4
    smallest = min(raw, key=lambda key: raw[key])
    assert compared[smallest].corrected_p == pytest.approx(min(1.0, 4 * raw[smallest]))
    assert scores_of(results)["gqa", "recall"].comparison == compared["gqa", "recall"]


def test_readouts():
    cell: dict[str, Any] = {
        "metrics": {"accuracy": 0.9},
        "tests": {"longer": {"accuracy": 0.3}},
        "edits": {"half": {"metrics": {"accuracy": 0.7}}},
        "curve": [{"metrics": {"accuracy": 0.1}}, {"metrics": {"accuracy": 0.5}}],
        "heads": {"measures": {"entropy": 1.5}, "diversity": 0.25, "residual": [1.0, 0.75, 0.625]},
        "heads_at": {
            "step 0": {"measures": {"entropy": 2.0}},
            "test longer": {"measures": {"entropy": 2.5}},
        },
    }
    expected = {
        "a": 0.9,
        "a on longer": 0.3,
        "a after half": 0.7,
        "change of a on longer": -0.6,
        "change of a after half": -0.2,
        "learning of a": 0.3,
        "entropy of a": 1.5,
        "entropy of a at step 0": 2.0,
        "entropy of a on longer": 2.5,
        "diversity of a": 0.25,
        "residual of a": 0.625,
    }
    assert {text: Readout.parse(text).read(cell, "accuracy") for text in expected} == pytest.approx(
        expected
    )
    assert all(
        Readout.parse(text).read(cell, "accuracy") is None
        for text in ("a on other", "entropy of a at step 9")
    )


def test_best_needs_significance():
    equal = scores_of(
        make_results(
            {"mha": [0.5, 0.6, 0.7, 0.4], "gqa": [0.9, 0.2, 0.8, 0.4], "linear": [0.1] * 4}
        )
    )
    assert not equal["gqa", "recall"].is_best  # a larger mean, but not significantly
    assert not equal["mha", "recall"].is_best
    spread = [0.1, 0.12, 0.11, 0.1]
    beaten = scores_of(
        make_results({"mha": [0.9] * 4, "gqa": [0.2, 0.3, 0.2, 0.3], "linear": spread})
    )
    assert beaten["mha", "recall"].is_best
    close = scores_of(
        make_results({"mha": [0.9] * 4, "gqa": [0.2, 0.9, 0.9, 0.9], "linear": spread})
    )
    assert not close[
        "mha", "recall"
    ].is_best  # the best mean, but one variant is not significantly worse


def test_a_metric_that_is_measured_only_at_the_end():
    results = make_results(
        {"mha": [0.9, 0.3], "gqa": [0.3, 0.3], "linear": [0.3, 0.3]}, seeds=[1, 2]
    )
    late = {"curve": [{"step": 4, "metrics": {"loss": 1.0}}], "steps": 8}  # as of generated texts
    results.cells = [replace(one, result={**one.result, **late}) for one in results.cells]
    mha = scores_of(results)["mha", "recall"]
    assert (mha.success_rate, mha.steps_to_threshold) == (0.5, 8.0)
    grid = results.grid
    losses = {0.001: 0.75, 0.003: 0.5}
    tuned = [
        CellResult(cell, "tune", {"status": "done", "valid": {"loss": losses[cell.rate]}})
        for cell in grid.tuning_cells()
    ]
    assert set(choose_rates(grid.study, tuned).values()) == {0.003}


def test_learning_rates_are_chosen_on_validation():
    grid = CellGrid(parse_study(TABLE, "t", "small", {}))
    valid = {("mha", 0.001): 0.4, ("mha", 0.003): 0.6, ("gqa", 0.001): 0.3}
    tuned = [
        CellResult(
            cell, "tune", {"status": "done", "valid": {"accuracy": valid[cell.variant, cell.rate]}}
        )
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


# --- Verdicts by rules ----------------------------------------------------------------------------

STRONG: dict[str, list[float | None]] = {
    "mha": [0.5, 0.52, 0.51, 0.49],
    "gqa": [0.8, 0.83, 0.81, 0.8],
    "linear": [0.5] * 4,
}


def judge(values: dict[str, list[float | None]], *contrasts: list[str]) -> StudyVerdict:
    results = make_results(values, contrasts=list(contrasts))
    return judge_study(results.study, scores_of(results), compare_seeds(results))


@pytest.mark.parametrize(
    ("expected", "word"),
    [
        (["better"], "Supported"),
        (["worse"], "Contradicted"),
        (["within 0.5"], "Supported"),
        (["within 0.1"], "Contradicted"),
        (["within 0.31"], "Not resolved"),
        (["at most 0.1 worse"], "Supported"),
    ],
)
def test_one_expected_difference(expected: list[str], word: str):
    verdict = judge(STRONG, ["gqa", "mha", *expected])
    assert verdict.word == word
    assert verdict.sentences[0].startswith(f"{word}: ")
    assert "recall: gqa" in verdict.sentences[1]
    assert len(verdict.sentences) == 2


def test_several_expected_differences():
    verdict = judge(STRONG, ["gqa", "mha", "better"], ["linear", "mha", "better"])
    assert verdict.sentences == [
        "Partly supported: 1 of 2 expected differences seen.",
        "Seen: recall: gqa better than mha, +0.305 [+0.2958, +0.3142]; open: recall: linear "
        "better than mha, -0.005 [-0.02554, +0.01554].",
    ]
    assert (
        judge(STRONG, ["gqa", "mha", "worse"], ["linear", "mha", "better"]).word == "Contradicted"
    )
    assert judge(STRONG, ["linear", "mha", "better"]).word == "Not resolved"
    assert judge(STRONG).word == "No verdict"


def test_of_many_differences_only_the_names_are_written(monkeypatch: pytest.MonkeyPatch):
    verdict = judge(STRONG, ["gqa", "mha", "better"], ["linear", "mha", "better"])
    monkeypatch.setattr(study_verdict, "MOST_WRITTEN", 0)
    assert verdict.sentences[1] == "Seen: recall: gqa; open: recall: linear."


def test_many_columns_are_drawn_in_panels():
    rows = {f"v{n}": ([0.1, 0.2], Estimate(0.15, 0.1, 0.2)) for n in range(25)}
    (few,) = seed_statistics._seeds_figure("t", dict(list(rows.items())[:11]), ()).panels
    panels = seed_statistics._seeds_figure("t", rows, ()).panels
    assert len(few.x.ticks) == 11
    assert [list(panel.x.ticks.values()) for panel in panels] == [
        [f"v{n}" for n in range(*ends)] for ends in ((0, 11), (11, 22), (22, 25))
    ]


def test_more_of_a_measure_is_not_better_or_worse():
    verdict = judge(STRONG, ["learning of gqa", "learning of mha", "more"])
    assert verdict.word == "Supported"


def test_a_lower_loss_is_better():
    task = {**TABLE["tasks"]["recall"], "metric": "loss", "threshold": 2.0}
    results = make_results(STRONG, tasks={"recall": task})
    losses = []
    for one in results.cells:
        value = STRONG[one.cell.variant][one.cell.seed - 1]
        losses.append(replace(one, result={**one.result, "metrics": {"loss": value}}))
    results = replace(results, cells=losses)
    for expected, word in (("better", "Contradicted"), ("worse", "Supported")):
        contrast = replace(parse_contrast("gqa", "mha"), expected=expected)
        study = replace(results.study, contrasts=(contrast,))
        verdict = judge_study(study, scores_of(results), compare_seeds(results))
        assert verdict.word == word


def parse_contrast(left: str, right: str) -> Contrast:
    return Contrast(Readout.parse(left), Readout.parse(right))


def test_a_margin_to_one_side():
    """mha is 0.305 worse than gqa: more than 0.1, less than 0.5, and 0.31 is within the interval."""
    table = {"at most 0.1 worse": "Contradicted", "at most 0.5 worse": "Supported"}
    table["at most 0.31 worse"] = "Not resolved"
    for expected, word in table.items():
        results = make_results(STRONG, baseline="gqa", contrasts=[["mha", "gqa", expected]])
        verdict = judge_study(results.study, scores_of(results), compare_seeds(results))
        assert verdict.word == word, expected
        assert f"recall: mha {expected} than gqa, -0.305" in verdict.sentences[1]


def test_equal_seeds_are_within_a_margin_and_not_better():
    same = {**STRONG, "gqa": STRONG["mha"]}
    assert judge(same, ["gqa", "mha", "within 0.1"]).word == "Supported"
    assert judge(same, ["gqa", "mha", "better"]).word == "Not resolved"


def test_an_expectation_of_some_tasks():
    tasks = {**TABLE["tasks"], "copy": {"task": "recall", **TABLE["tasks"]["recall"]}}
    table = {**TABLE, "tasks": tasks, "contrasts": [["gqa", "mha", "better", "recall"]]}
    study = parse_study(table, "t", "small", {})
    assert study.contrasts[0].tasks == ("recall",)
    verdict = judge(
        STRONG, ["gqa", "mha", "better", "recall"], ["linear", "mha", "worse", "recall"]
    )
    assert len(verdict.predictions) == 2


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([0.995, 0.999, 0.994, 1.0], "every variant reaches 0.99"),
        ([0.05, 0.07, 0.06, 0.08], "no seed of any variant is 0.02 above chance (0.0625)"),
    ],
)
def test_tasks_at_the_ceiling_or_the_floor_have_no_verdict(values: list[float | None], words: str):
    of_all = {"mha": values, "gqa": values[::-1], "linear": values}
    verdict = judge(of_all, ["gqa", "mha", "within 0.1"])
    assert verdict.word == "No verdict"
    assert verdict.sentences[1] == f"Recall is without verdict, because {words}."


def test_what_has_a_verdict_at_the_ceiling_and_what_is_no_floor():
    """Tests and measures are judged on a solved task; a baseline with unequal seeds is no floor."""
    solved: dict[str, list[float | None]] = {name: [1.0, 0.99, 1.0, 0.99] for name in STRONG}
    contrasts = [["gqa on longer", "mha on longer", "worse"]]
    task = {**TABLE["tasks"]["recall"], "tests": {"longer": {"length": 64, "pairs": 8}}}
    results = make_results(solved, tasks={"recall": task}, contrasts=contrasts)
    cells = []
    for one in results.cells:
        value = 0.2 + 0.01 * one.cell.seed if one.cell.variant == "gqa" else 0.9
        tests = {"longer": {"accuracy": value}}
        cells.append(replace(one, result={**one.result, "tests": tests}))
    results = replace(results, cells=cells)
    verdict = judge_study(results.study, scores_of(results), compare_seeds(results))
    assert (verdict.word, verdict.mute_tasks) == ("Supported", {})
    unequal: dict[str, list[float | None]] = {**STRONG, "mha": [0.1, 0.99, 0.98, 0.2]}
    assert judge(unequal, ["gqa", "mha", "better"]).word == "Not resolved"
