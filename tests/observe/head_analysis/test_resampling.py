"""Intervals and tests over texts, against scipy, by enumeration, and by simulation."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy
import torch

from headwise.observe.head_analysis.annotated_examples import Example
from headwise.observe.head_analysis.attention_sinks import DistinctExamples
from headwise.observe.head_analysis.head_classes import classify_heads
from headwise.observe.head_analysis.head_importance import estimate_importance
from headwise.observe.head_analysis.head_measurement import MeasureOptions, measure_heads
from headwise.observe.head_analysis.head_redundancy import measure_redundancy
from headwise.observe.head_analysis.resampling import Jackknife, correct_p_values, excess_p_values
from headwise.surgery.verification.quality_metrics import measure_quality
from observe.head_analysis import handset_heads as handmade
from support.pruned_models import build_model, make_examples, make_model_spec

COVERAGE_TOOL = Path(__file__).resolve().parents[3] / "tools" / "measured_pages.py"


@pytest.mark.parametrize("count", [2, 3, 5, 9])
def test_means_have_the_interval_and_the_p_value_of_scipy(count: int):
    values = np.random.default_rng(count).normal(0.5, 1, (count, 3))
    expected = scipy.stats.ttest_1samp(values, 0)
    ours = Jackknife.of_ratio(values)
    interval = expected.confidence_interval(0.95)
    np.testing.assert_allclose(ours.interval(), (interval.low, interval.high), rtol=1e-9)
    np.testing.assert_allclose(ours.p_values(), expected.pvalue, rtol=1e-9)
    one_sided = scipy.stats.ttest_1samp(values, 0, alternative="greater").pvalue
    np.testing.assert_allclose(ours.p_values(sides=1), one_sided, rtol=1e-9)


@pytest.mark.parametrize("count", [10, 40])
def test_skewed_units_are_corrected_as_hall_does_and_intervals_agree_with_tests(count: int):
    values = np.random.default_rng(count).exponential(size=count)
    w, skewness = (
        values.mean() / values.std(ddof=1),
        scipy.stats.skew(values) * (1 - 1 / count) ** 1.5,
    )
    t = math.sqrt(count) * (
        w + skewness * w**2 / 3 + skewness**2 * w**3 / 27 + skewness / (6 * count)
    )
    assert Jackknife.of_ratio(values).p_values(sides=1) == pytest.approx(
        scipy.stats.t.sf(t, count - 1)
    )
    for end in Jackknife.of_ratio(
        values
    ).interval():  # 0 is on the edge of the interval of values - end
        assert Jackknife.of_ratio(values - end).p_values() == pytest.approx(0.05, rel=1e-6)


def test_ratios_are_jackknifed_over_the_texts_that_count():
    draw = np.random.default_rng(0)
    counts = draw.integers(1, 9, 7).astype(float)
    sums = counts * draw.random(7)
    without = [(sums.sum() - s) / (counts.sum() - c) for s, c in zip(sums, counts, strict=True)]
    error = math.sqrt(6 / 7 * ((np.array(without) - np.mean(without)) ** 2).sum())
    reach = scipy.stats.t.ppf(0.975, 6) * error
    ratio = sums.sum() / counts.sum()
    expected = (ratio - reach, ratio + reach)
    assert Jackknife.of_ratio(sums, counts).interval() == pytest.approx(expected)
    padded = Jackknife.of_ratio(np.append(sums, [0.0, 0.0]), np.append(counts, [0.0, 0.0]))
    assert padded.interval() == pytest.approx(expected)  # texts without rows are no evidence
    assert np.isnan(Jackknife.of_ratio(sums[:1], counts[:1]).interval()).all()


@pytest.mark.parametrize(
    ("value", "baseline", "count", "expected"),
    [
        (0.5, 0.1, 1, math.nan),
        (0.5, 0.1, 2, 0.2**2),
        (1.0, 0.1, 20, 0.1**20),
        (0.1, 0.1, 5, 1.0),
        (0.05, 0.1, 5, 1.0),
        (-0.5, -0.6, 5, math.nan),
    ],
)
def test_equal_texts_have_the_p_value_of_markovs_inequality(value, baseline, count, expected):
    """Values >= 0 with a mean of at most b reach v in all of n texts with a probability of at most
    (b / v)^n.
    """
    ones = np.ones((count, 1))
    rounding = 1 + 1e-8 * np.arange(count)[:, None]
    for factor in (ones, rounding):
        found = excess_p_values((value * ones * factor, ones), (baseline * ones, ones))
        assert found == pytest.approx(expected, rel=1e-6, nan_ok=True)


def test_equal_units_have_an_interval_from_six_on_and_no_p_value():
    for count in (2, 5, 6, 40):
        mean = Jackknife.of_ratio(np.full(count, 0.25))
        assert np.isnan(mean.p_values())
        assert mean.interval() == pytest.approx(
            (0.25, 0.25) if count >= 6 else (math.nan, math.nan), nan_ok=True
        )


def test_what_was_not_tested_does_not_count_in_a_correction():
    p = np.array([0.01, math.nan, 0.2, 0.04, math.nan])
    tested = correct_p_values(p[~np.isnan(p)])
    np.testing.assert_allclose(correct_p_values(p)[[0, 2, 3]], tested)
    assert np.isnan(correct_p_values(p)[[1, 4]]).all()
    assert correct_p_values(np.full(2, math.nan)).tolist() == pytest.approx(
        [math.nan] * 2, nan_ok=True
    )


# --- repeated texts -------------------------------------------------------------------------------


def test_repeated_texts_are_no_further_evidence():
    net, texts = handmade.decoder(), handmade.texts(5)
    once, often = measure_heads(net, texts), measure_heads(net, [*texts, *texts[:3], texts[0]])
    assert repr(once.heads) == repr(often.heads)
    assert once.texts == often.texts == "5 texts"
    assert "left out 4 texts that repeat an earlier one" in often.notes
    with pytest.raises(
        ValueError, match="from equal texts \\(different: 1 of 2\\); give different texts"
    ):
        measure_heads(net, [texts[0]] * 2)
    one = measure_heads(net, [texts[0]] * 2, options=MeasureOptions(min_texts=1))
    assert all(
        math.isnan(number)
        for head in one.heads
        for measure in head.measures.values()
        for number in measure[1:3]
    )
    assert all(math.isnan(measure.p) for head in one.heads for measure in head.measures.values())
    assert one.data["heads"][0]["measures"]["previous"]["p"] is None
    assert not any(
        one.name != "unclear" for head in classify_heads(one).heads for one in head.classes
    )


def test_repeated_texts_count_once_in_importance_redundancy_and_quality():
    net = build_model(make_model_spec("decoder"))
    texts = make_examples("decoder", 5)
    repeated = [*texts, texts[2], texts[2]]
    note = "left out 2 texts that repeat an earlier one"
    importances = [estimate_importance(net, some) for some in (texts, repeated)]
    assert repr(importances[0].heads) == repr(importances[1].heads)
    assert note in importances[1].notes
    qualities = [measure_quality(net, some) for some in (texts, repeated)]
    assert repr(qualities[0].rows) == repr(qualities[1].rows)
    assert note in qualities[1].notes
    similarities = [measure_redundancy(net, some) for some in (texts, repeated)]
    assert repr(similarities[0].readers[0].high) == repr(similarities[1].readers[0].high)
    assert note in similarities[1].notes
    for call in (estimate_importance, measure_redundancy):
        with pytest.raises(ValueError, match="give different texts"):
            call(net, [texts[0]] * 3)


def test_texts_differ_by_any_of_their_inputs():
    ids = torch.tensor([[1, 2, 3]])
    inputs: list[Any] = [
        {"x": ids},
        {"x": ids[:, :2]},
        {"x": ids.float()},
        {"y": ids},
        {"x": ids, "labels": ids},
        [ids],
    ]
    assert len(list(DistinctExamples([Example(one, {}) for one in inputs * 2]))) == len(inputs)


# --- calibration ----------------------------------------------------------------------------------


def _load_tool() -> Any:
    spec = spec_from_file_location("measured_pages", COVERAGE_TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_coverage_and_rejection_rates_are_those_of_the_documents():
    """Simulated: normal, skewed, rare and rounded values of 2 to 60 units."""
    tool = _load_tool()
    figures = tool.simulate_all()
    assert figures == json.loads(tool.COVERAGE.read_text())
    for count, rates in figures["normal"].items():
        assert rates["coverage"] == pytest.approx(0.95, abs=0.01), count
        assert rates["above"] == pytest.approx(0.05, abs=0.01), count
    for kind in ("normal", "skewed", "rounded"):
        assert min(figures[kind][str(count)]["coverage"] for count in (20, 40, 60)) >= 0.93
    for kind, by_count in figures.items():
        for (
            count,
            rates,
        ) in by_count.items():  # what is not covered is above the rejections by what has no p-value
            assert rates["coverage"] + rates["rejected"] + rates["untested"] == pytest.approx(
                1, abs=0.002
            ), (
                kind,
                count,
            )


def test_scipy_is_not_imported_before_it_is_needed():
    code = "import sys, headwise, headwise.cli; print('scipy' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert found.stdout == "False\n"
