"""Small importances stay legible: scientific form, intervals, full column names."""

from __future__ import annotations

import csv
import io
import math
import re

import pytest

from headwise.observe.head_analysis.head_table import (
    HeadClass,
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
    lines = to_text(small_result().table).splitlines()
    title = "GPT2, 9 texts: importance by leave-one-out for next-token; low and high: 95 % interval"
    assert " ".join(lines[:2]) == title
    assert re.split(r"  +", lines[3]) == [
        *("head", "importance", "low", "high", "corrected p"),
    ]
    rows = [re.split(r"  +", line) for line in lines[4:7]]
    assert rows[0] == ["L0H0", "3.21e-06", "1.50e-06", "4.90e-06", "0.040"]
    assert rows[1] == ["L0H1", "-8.04e-07", "-1.00e-06", "2.00e-07", "0.040"]
    assert rows[2][1:4] == ["-", "-", "-"]
    assert lines[-1] == "note: a note"
    assert max(map(len, lines)) <= 80


def test_importance_is_printed_as_a_grid_in_one_unit():
    lines = str(small_result()).splitlines()
    assert lines[0] == "GPT2, 9 texts: importance by leave-one-out, in units of 1e-6"
    assert lines[2].split() == ["head", "0", "1", "2"]
    assert lines[3].split() == ["decoder.0.attention", "3.21", "-0.80", "-"]
    assert lines[5].startswith("GPT2, 9 texts: importance by leave-one-out for next-token")


def test_a_table_has_one_format_of_numbers():
    values = [(0.5, 0.4, 0.6), (0.2, 0.0001, 0.3)]
    heads = [
        HeadImportance("decoder.0.attention", "decoder", "attention", 0, n, n, *value)
        for n, value in enumerate(values)
    ]
    table = ImportanceResult("GPT2", "michel", "next-token", 9, tuple(heads)).table
    for line in to_text(table).splitlines()[4:]:
        assert all(len(cell) == len("0.0001") for cell in re.split(r"  +", line)[1:4])


def test_the_legend_names_every_class_that_is_listed():
    two = (HeadClass("previous", 0.9, ""), HeadClass("separator", 0.4, ""))
    classes = [two, (HeadClass("unclear", 0.0, ""),)]
    heads = tuple(
        HeadMeasures("decoder", "attention", 0, n, 0, "decoder.0.attention", {}, one)
        for n, one in enumerate(classes)
    )
    table = HeadTable("small", "9 texts", heads)
    assert list(table.class_legend) == ["P positional", "E separator", "· unclear"]
    assert str(table).splitlines()[5].split() == ["decoder.0.attention", "P", "·"]


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
        *("head", "importance", "low", "high", "chance", "classes"),
    ]
    name, *numbers = re.split(r"  +", lines[3])[:5]
    assert name == "L0H2"
    expected = [0.7 * scale, 0.4 * scale, 0.9 * scale, 0.1 * scale]
    assert list(map(float, numbers)) == pytest.approx(expected)


def test_measures_from_0_to_1_have_decimals_in_one_block():
    """Small values beside larger ones do not turn a column into powers of ten."""
    one = HeadMeasures(
        *("decoder", "attention", 0, 1, 0, "decoder.0.attention"),
        {"previous": Measure(1.0, 0.998, 1.0, 0.0012)},
        (HeadClass("previous", 0.99, ""), HeadClass("sink", 0.4, "")),
    )
    lines = to_text(HeadTable("small", "9 texts", (one,)).ranking("previous")).splitlines()
    assert lines[3].split()[:5] == ["L0H1", "1.0000", "0.9980", "1.0000", "0.0012"]
    assert all(len(line) <= 80 for line in lines)
    assert len(lines) == 4


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
