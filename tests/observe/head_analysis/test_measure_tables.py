"""Small importances stay legible: scientific form, intervals, full column names."""

from __future__ import annotations

import csv
import io
import math
import re

import pytest

from headwise.observe.head_analysis.head_table import (
    HeadImportance,
    HeadMeasures,
    HeadTable,
    ImportanceResult,
    Measure,
)
from headwise.report.render import to_text

VALUES = [(3.21e-6, 1.5e-6, 4.9e-6), (-8.04e-7, -1e-6, 2e-7), (math.nan, math.nan, math.nan)]


def small_result() -> ImportanceResult:
    heads = [
        HeadImportance(
            "decoder.0.attention", "decoder", "attention", 0, n, n, *value, p=0.01, level=0.04
        )
        for n, value in enumerate(VALUES)
    ]
    return ImportanceResult("GPT2", "leave-one-out", "next-token", 9, tuple(heads), ("a note",))


def test_small_importances_are_printed_in_scientific_form_with_intervals():
    lines = str(small_result()).splitlines()
    title = "GPT2, 9 texts: importance by leave-one-out for next-token; low and high: 95 % interval"
    assert " ".join(lines[:2]) == title
    assert re.split(r"  +", lines[3]) == [
        *("site", "head", "importance", "low", "high", "corrected p"),
    ]
    rows = [re.split(r"  +", line) for line in lines[4:7]]
    assert rows[0] == ["decoder.0.attention", "0", "3.21e-06", "1.50e-06", "4.90e-06", "0.040"]
    assert rows[1] == ["decoder.0.attention", "1", "-8.04e-07", "-1.00e-06", "2.00e-07", "0.040"]
    assert rows[2][2:5] == ["-", "-", "-"]
    assert lines[-1] == "note: a note"
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("scale", [1.0, 1e-5])
def test_a_ranking_names_its_columns_in_full(scale: float):
    heads = tuple(
        HeadMeasures(
            *("decoder", "attention", 0, n, 0, "decoder.0.attention"),
            {"importance": Measure(scale * (0.5 + n / 10), scale * 0.4, scale * 0.9, scale * 0.1)},
        )
        for n in range(3)
    )
    lines = to_text(HeadTable("small", "9 texts", heads).ranking("importance")).splitlines()
    assert re.split(r"  +", lines[2]) == [
        *("site", "head", "importance", "low", "high", "chance", "classes"),
    ]
    numbers = [float(text) for text in re.split(r"  +", lines[3])[2:6]]
    assert numbers == pytest.approx([0.7 * scale, 0.4 * scale, 0.9 * scale, 0.1 * scale])


def test_results_as_csv():
    rows = list(csv.DictReader(io.StringIO(small_result().to_csv())))
    assert [float(row["importance"] or "nan") for row in rows[:2]] == [3.21e-6, -8.04e-7]
    assert (rows[0]["site"], rows[0]["head"], rows[0]["corrected p"]) == (
        "decoder.0.attention",
        "0",
        "0.04",
    )
    assert rows[2]["importance"] == ""
    measures = {"sink": Measure(0.25, 0.125, 0.5, 0.0625)}
    head = HeadMeasures("decoder", "attention", 0, 1, 0, "decoder.0.attention", measures)
    (row,) = csv.DictReader(io.StringIO(HeadTable("small", "9 texts", (head,)).to_csv()))
    assert (row["head"], row["measure"], row["value"], row["p"]) == ("1", "sink", "0.25", "")
