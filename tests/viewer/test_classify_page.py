"""The Class screen in a browser: intervals, thresholds with a live recount, and classes of the
user's own.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest

from headwise.observe.traces.trace_file import load_trace
from headwise.viewer.open_model import OpenModel
from viewer.page_browser import sample_model, served, wait_until


def open_classes(page: Any, url: str) -> None:
    page.goto(url)
    page.get_by_role("gridcell").first.wait_for()
    page.get_by_role("link", name="Class").click()
    page.get_by_role("region", name="Class").wait_for()


def download_rows(page: Any, folder: Path) -> list[dict[str, str]]:
    with page.expect_download() as download:
        page.get_by_role("button", name="Download CSV").click()
    download.value.save_as(folder / "classes.csv")
    with (folder / "classes.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_table_has_the_scores_and_intervals_of_the_library(page: Any, tmp_path: Path):
    model = sample_model()
    assert model.table is not None
    expected = {(head.site, head.head): head for head in model.table.heads}
    with served(model) as url:
        open_classes(page, url)
        rows = download_rows(page, tmp_path)
        assert len(rows) == len(expected) == 54
        for row in rows:
            head = expected[row["site"], int(row["head"])]
            top = head.classes[0]
            assert row["class"] == row["measured_class"] == top.name
            assert row["evidence"] == top.evidence
            if top.name == "unclear":
                continue
            assert float(row["score"]) == pytest.approx(top.score, abs=1e-6)
            assert float(row["score_low"]) <= top.score <= float(row["score_high"])
            if top.name == "self":
                measure = head.measures["self"]
                low = (measure.low - measure.chance) / (1 - measure.chance)
                assert float(row["score_low"]) == pytest.approx(low, abs=1e-4)
        scores = [
            float(score)
            for score in page.locator(".classify td:nth-child(3)").all_inner_texts()
            if score != "–"
        ]
        assert scores == sorted(scores, reverse=True)


def test_a_class_of_ones_own_is_saved_with_the_trace(page: Any, tmp_path: Path):
    """Named on the page, saved as a trace, and opened again from that file."""
    with served(sample_model(with_model=False)) as url:
        page.goto(url)
        page.get_by_role("gridcell").first.wait_for()
        page.get_by_role("link", name="Class").click()
        page.get_by_label("your class: E1 H2").focus()
        page.get_by_label("your class: E1 H2").select_option("induction")
        page.wait_for_timeout(800)
        page.keyboard.press("Escape")
        page.get_by_role("heading", name="Class").click()
        page.keyboard.press("e")
        with page.expect_download() as download:
            page.get_by_role("button", name=re.compile("^Trace")).click()
        download.value.save_as(tmp_path / "a.trace")
    trace = load_trace(tmp_path / "a.trace")
    assert dict(trace.classes) == {("encoder.1.attention", 2): "induction"}
    with served(OpenModel(trace)) as url:
        page.goto(url)
        page.get_by_role("gridcell").first.wait_for()
        wait_until(page, "location.hash.includes('classes=1.2')")
