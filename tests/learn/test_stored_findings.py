"""Stored results of studies: the same numbers as on the pages of the studies, shown in both
languages without any run on this machine.
"""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from headwise.learn import catalogue
from headwise.learn.catalogue import Verdict
from headwise.learn.document_page import DocumentPages
from headwise.learn.entry_text import Words, describe_study
from headwise.learn.language import use_language
from headwise.learn.stored_findings import (
    draw_study,
    list_claims,
    read_stored,
    stored_values,
    study_differences,
)
from headwise.report.data import Plot

ROOT = Path(__file__).resolve().parents[2]
ENTRIES = catalogue.load_entries()
STUDIES = read_stored("studies")
NAMES = sorted(STUDIES)


def page_of(study: str) -> str:
    return (ROOT / "docs" / "findings" / f"study-{study}.md").read_text(encoding="utf-8")


def test_every_page_of_a_study_is_stored():
    pages = {path.stem[6:] for path in (ROOT / "docs" / "findings").glob("study-*.md")}
    assert set(STUDIES) == pages
    assert {entry.study for entry in ENTRIES if entry.study} <= pages


@pytest.mark.parametrize("study", NAMES)
def test_comparisons_are_those_of_the_page(study: str):
    page = " ".join(page_of(study).split())
    for of_task in STUDIES[study]["tasks"].values():
        for one in of_task["comparisons"]:
            low, high = (f"{one[end]:+.3f}" for end in ("low", "high"))
            interval = rf"{one['difference']:+.3f} [(\[]{low}( to |, ){high}[)\]]"
            interval = re.sub(r"(?<!\[)([+.])(?=\d)", r"\\\1", interval)
            # a difference that rounds to zero keeps its sign on the page
            pattern = interval.replace(r"\+0\.000", r"[-+]0\.000")
            assert re.search(pattern, page), one["name"]
            assert not one["significant"] or "**" in page or "significant" in page


@pytest.mark.parametrize("study", NAMES)
def test_seeds_average_to_the_difference(study: str):
    for of_task in STUDIES[study]["tasks"].values():
        for one in of_task["comparisons"]:
            assert np.mean(one["seeds"]) == pytest.approx(one["difference"], abs=0.002), one["name"]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_an_entry_with_a_study_shows_its_claims(
    language: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    head, *claims = describe_study("heads-count", Words(language))
    assert "docs/findings/study-heads-count.md" in head
    assert "headwise study studies/heads-count.toml" in head
    assert len(claims) == 4
    assert all(number in claims[2] for number in ("-0.296", "-0.442", "-0.151", "0.026"))
    assert ("显著" in claims[2]) == (language == "zh")


def test_long_lists_show_what_is_significant():
    claims = list(list_claims("variants", "en"))
    compared = [claim for claim in claims if "minus" in claim]
    assert len(compared) == 5
    assert all(claim.endswith(", significant.") for claim in compared)
    assert "copy: 16 other differences are not significant." in claims


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_strip_picture_has_a_dot_for_every_seed(language: str):
    with use_language(language):
        (figure,) = draw_study("head-noise", language)
    (plot,) = figure.panels
    assert isinstance(plot, Plot)
    dots, means = plot.series
    assert len(dots.ys) == 6 * 3
    assert list(means.ys) == [0.007, -0.126, -0.239, 0.07, -0.096, 0.148]
    assert ("种子" in figure.title) == (language == "zh")
    assert (dots.name == "seed") == (language == "en")


def test_pages_of_documents_have_the_strip_pictures():
    (document,) = catalogue.load_documents(["001"])
    studies = [entry.study for entry in document.entries if entry.study]
    few = catalogue.Document("001", document.title, document.entries[-1:] + document.entries[:1])
    with_study = [entry for entry in document.entries if entry.study][:1]
    short = catalogue.Document("001", document.title, (*few.entries, *with_study))
    page = DocumentPages([short], "zh").render_document(short)
    assert studies
    assert page.count("每个种子的差异") >= 2  # light and dark


@pytest.mark.parametrize(
    ("signs", "verdict"),
    [
        ({"h16 minus h4": -1, "h32 minus h4": -1}, Verdict.HOLDS),
        ({"h16 minus h4": -1, "h1 minus h4": -1}, Verdict.HOLDS_IF),
        ({"h1 minus h4": 1}, Verdict.NOT_RESOLVED),
        ({"h1 minus h4": 1, "h16 minus h4": 1}, Verdict.WRONG),
    ],
)
def test_verdicts_follow_what_is_significant(signs: dict[str, int], verdict: Verdict):
    outcome = study_differences(study="heads-count", task="copy", expected=signs)
    assert outcome.verdict == verdict
    assert outcome.numbers["difference_1"] in (-0.296, 0.035)


def test_stored_values_are_compared_in_order():
    place = "heads-count|tasks|copy|scores|{}|accuracy"
    values = {name: place.format(name) for name in ("h1", "h32")} | {"chance": 1 / 16}
    order = ["chance", "h32", "h1"]
    outcome = stored_values(of="studies", values=values, ascending=order)
    assert dict(outcome.numbers) == {"h1": 0.9051, "h32": 0.4259, "chance": 1 / 16}
    assert outcome.verdict == Verdict.HOLDS
    assert (
        stored_values(of="studies", values=values, ascending=order[::-1]).verdict == Verdict.WRONG
    )


def test_the_stored_file_is_what_the_tool_writes():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools"))
        stored_studies = import_module("stored_studies")
    assert json.loads(stored_studies.stored_studies()) == STUDIES
