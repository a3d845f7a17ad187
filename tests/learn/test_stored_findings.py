"""Stored results of studies: the same numbers as on the pages of the studies, shown in both
languages without any run on this machine.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest

from headwise.learn import catalogue, document_page
from headwise.learn.catalogue import Verdict
from headwise.learn.document_page import DocumentPages
from headwise.learn.entry_text import Words, describe_study
from headwise.learn.language import use_language
from headwise.learn.stored_findings import (
    draw_study,
    list_claims,
    read_stored,
    stored_differences,
    stored_values,
)
from headwise.report.data import Plot
from learn import learn_entries as learn

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


def number_of_page(value: float) -> str:
    """A pattern of a number: three decimals, or four digits on newer pages; one that rounds to zero
    keeps its sign.
    """
    texts = {re.escape(f"{value:+.3f}").replace(r"\+0\.000", r"[-+]0\.000")}
    return f"({'|'.join(sorted(texts | {re.escape(f'{value:+.4g}')}))})"


@pytest.mark.parametrize("study", NAMES)
def test_comparisons_are_those_of_the_page(study: str):
    page = " ".join(page_of(study).split())
    for of_task in STUDIES[study]["tasks"].values():
        for name, one in of_task["comparisons"].items():
            value, low, high = (number_of_page(one[end]) for end in ("difference", "low", "high"))
            interval = rf"[(\[]{low}( to |, ){high}\\?[)\]]"
            if one["low"] == one["high"]:  # all seeds have the same difference
                interval = rf"({interval}|\[no spread)"
            assert re.search(rf"{value} \\?{interval}", page), name
            assert not one["significant"] or "**" in page or "significant" in page


@pytest.mark.parametrize("study", NAMES)
def test_seeds_average_to_the_difference(study: str):
    for of_task in STUDIES[study]["tasks"].values():
        for name, one in of_task["comparisons"].items():
            assert np.mean(one["seeds"]) == pytest.approx(one["difference"], abs=0.002), name


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


@pytest.mark.parametrize(
    ("language", "summary"),
    [
        ("en", "Tested by training: heads-count, 4 results"),
        ("zh", "训练检验\uff1aheads-count\uff0c4 项结果"),
    ],
)
def test_long_results_of_a_study_are_folded(language, summary, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    entry = next(one for one in ENTRIES if one.study == "heads-count")
    (document,) = catalogue.load_documents([entry.document])
    pages = DocumentPages([document], language)
    text = pages.render_document(replace(document, entries=(entry,)))
    before, _, rest = text.partition(f"<details><summary>{summary}</summary>")
    folded, _, after = rest.partition("</details>")
    assert folded.count('<p class="small">') == 5
    assert "headwise study studies/heads-count.toml" in folded
    assert "studies/heads-count.toml" not in before + after


def test_short_results_of_a_study_are_not_folded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(document_page, "describe_study", lambda *_: ["one", "two", "three"])
    entry = next(one for one in ENTRIES if one.study == "heads-count")
    (document,) = catalogue.load_documents([entry.document])
    pages = DocumentPages([document], "en")
    text = pages.render_document(replace(document, entries=(entry,)))
    assert '<p class="small">three</p>' in text
    assert "<summary>Tested by training" not in text


def test_long_lists_show_what_is_significant():
    claims = list(list_claims("variants", "en"))
    compared = [claim for claim in claims if "minus" in claim]
    assert len(compared) == 5
    assert all(claim.endswith(", significant.") for claim in compared)
    assert "copy: 16 other differences are not significant." in claims


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_strip_picture_has_a_dot_for_every_seed(language: str):
    with use_language(language):
        figure = next(draw_study("head-noise", language))()
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
    expected = {
        f"studies|heads-count|tasks|copy|comparisons|{name}": one for name, one in signs.items()
    }
    outcome = stored_differences(expected=expected)
    assert outcome.verdict == verdict
    assert outcome.numbers["difference_1"] in (-0.296, 0.035)


def test_stored_values_are_compared_in_order():
    place = "studies|heads-count|tasks|copy|scores|{}|accuracy"
    values = {name: place.format(name) for name in ("h1", "h32")} | {"chance": 1 / 16}
    order = ["chance", "h32", "h1"]
    outcome = stored_values(values=values, ascending=order)
    assert dict(outcome.numbers) == {"h1": 0.9051, "h32": 0.4259, "chance": 1 / 16}
    assert outcome.verdict == Verdict.HOLDS
    assert stored_values(values=values, ascending=order[::-1]).verdict == Verdict.WRONG


def import_stored_studies() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools"))
        return import_module("stored_studies")


def test_the_stored_file_is_what_the_tool_writes():
    assert json.loads(import_stored_studies().stored_studies()) == STUDIES


STUDY_PAGE = """
### copy

| variant | accuracy (95 % interval) | minus mha (95 % interval) | p |
| --- | --- | --- | --- |
| **mha** | **0.9 (0.8 to 1)** | - | - |
| few | 0.5 (0.4 to 0.6) | -0.400 (-0.500 to -0.300) | 0.050 |
| mqa | 0.6 (0.5 to 0.7) | -0.300 (-0.400 to -0.200) | 0.012 |

### copy, planned contrasts

| contrast | expected | difference (95 % interval) | seeds | p | significant |
| --- | --- | --- | --- | --- | --- |
| few minus mha | worse | -0.400 (-0.500 to -0.300) | 3 | 0.050 | yes |
| few minus mqa | - | -0.100 (-0.300 to +0.100) | 3 | 0.050 | no |

- scale page: 15 steps of 2 examples, 400 steps of 32 examples
"""


def test_a_planned_contrast_with_the_baseline_is_stored_once():
    """The page has p = 0.0496 as 0.050; its column "significant" knows better."""
    stored = import_stored_studies().read_study_page("none", STUDY_PAGE)
    comparisons = stored["tasks"]["copy"]["comparisons"]
    significant = {name: one["significant"] for name, one in comparisons.items()}
    assert significant == {"few minus mha": True, "mqa minus mha": True, "few minus mqa": False}
    assert stored.keys() == {"tasks", "scale"}


# --- Entries and the files of measured models -----------------------------------------------------

STORED = {
    name: json.loads((catalogue.FOLDER / f"stored_{name}.json").read_text(encoding="utf-8"))
    for name in ("studies", "models", "training")
}
READ = [entry for entry in ENTRIES if learn.module_of(entry) == "stored_findings"]


def look_up(place: str) -> Any:
    found: Any = STORED
    for key in place.split("|"):
        found = found[key]
    return found


@pytest.mark.parametrize("entry", READ, ids=lambda entry: entry.id)
def test_entries_print_what_is_stored(entry: catalogue.Entry):
    arguments = cast(partial[Any], entry.run).keywords
    expected: dict[str, Any] = {}
    for number, place in enumerate(arguments.get("expected", ()), 1):
        expected |= {f"{part}_{number}": value for part, value in look_up(place).items()}
    for name, place in arguments.get("values", {}).items():
        expected[name] = look_up(place) if isinstance(place, str) else place
    result = learn.checked(entry)
    assert result.verdict == entry.verdict, dict(result.numbers)
    assert learn.shown_names(entry) <= set(expected)
    for name, value in result.numbers.items():
        assert value == expected[name], name


def finding(name: str) -> str:
    return " ".join((ROOT / "docs" / "findings" / f"{name}.md").read_text("utf-8").split())


def test_classes_and_relations_are_those_of_the_page():
    page, minilm = finding("minilm"), STORED["models"]["minilm"]
    for name, count in minilm["classes"].items():
        assert f"| {name} | {count} |" in page
    for relation in ("obj", "aux"):
        one = minilm["relations"][relation]
        row = re.search(rf"\| {relation} \| governor \| {one['head']} \| ([\d.]+) ", page)
        assert row is not None
        assert float(row[1]) == round(one["value"], 4)
    assert minilm["sentences"] == 500
    assert minilm["found"] == sum(one["found"] for one in minilm["relations"].values())


def test_numbers_of_the_translator_are_those_of_the_page():
    page, stored = finding("translator"), STORED["models"]["translator"]
    part = page[page.index("The 48 encoder heads alone: heads removed") :]
    assert f"{stored['loo']} by leave-one-out" in part
    assert f"{stored['michel']} by michel" in part
    assert f"{stored['random_low']} to {stored['random_high']} by random" in part
    assert f"{stored['gates']} by gates" in part
    for name in ("encoder", "decoder", "cross"):
        assert f"{name} +{stored[name]:.3f}" in page


def test_pages_of_other_models_have_the_stored_numbers():
    vision, speech = (STORED["models"][name] for name in ("vision", "speech"))
    assert f"column | {vision['column_heads']:.0f} | {vision['column_drift']:.4f}" in finding(
        "dinov2"
    )
    assert f"{speech['found']:.0f} of the {speech['listed']:.0f} heads" in finding("whisper")
    assert f"curve is {speech['auc']:.3f}" in finding("whisper")


def test_subspaces_and_sizes_follow_from_formulas():
    models = STORED["models"]
    assert models["minilm"]["subspaces"]["chance"] == 32 / 384
    assert models["variants"]["vanilla"]["numbers_512"] == 4 * 512**2
    assert models["variants"]["vanilla"]["numbers_32768"] == 4 * 32768**2
    assert models["variants"]["flash"]["numbers_4096"] == 64 * 4096
    assert models["dates"]["uniform"] == pytest.approx(np.log(63))


def test_losses_of_the_curve_are_measured_again():
    """Half of the shared channels: what 002-FF.2 computes on the same model."""
    reduced = next(entry for entry in ENTRIES if entry.id == "002-FF.2").check().numbers["reduced"]
    assert STORED["models"]["dates"]["curve"]["2"] == pytest.approx(float(reduced), rel=1e-3)


def test_chance_of_the_own_token_is_that_of_uniform_causal_attention():
    chance = np.tril(np.ones((64, 64))) / np.arange(1, 65)[:, None]
    assert STORED["training"]["heads"]["chance"] == pytest.approx(np.diag(chance).mean())
