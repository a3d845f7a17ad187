"""The errata page in both languages, and stored runs of studies."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from headwise.learn import catalogue
from headwise.learn.entry_text import Words, describe_study, find_reports

ROOT = Path(__file__).resolve().parents[2]
ENTRIES = catalogue.load_entries()
REPORT = (
    "# Study: {}\n\n## What can be claimed\n\n- recall: qkv reaches accuracy 0.9.\n- a "
    "second claim\n\n"
)
REPORT += "## Results\n\n- x\n"


@pytest.fixture(scope="module")
def build_docs() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools"))
        return import_module("build_docs")


def test_every_erratum_has_a_row(build_docs: Any):
    rows = dict.fromkeys(row for row, _, _ in build_docs.read_errata())
    assert list(rows) == list(catalogue.read_toml("source_rows")["errata"])


@pytest.mark.parametrize(("page", "language"), [("errata.md", "en"), ("errata.zh.md", "zh")])
def test_pages_have_every_row(page: str, language: str, build_docs: Any):
    text = (ROOT / "docs" / page).read_text()
    errata = build_docs.read_errata()
    assert len(errata) == sum(row[0] == "C" for entry in ENTRIES for row in entry.rows)
    for row, entry, result in errata:
        cells = build_docs.erratum_cells(row, entry, result, language)
        cells = [cell.replace("|", "\\|") for cell in cells]
        assert f"| {' | '.join(cells)} |" in text
        assert entry.id in [one.id for one in catalogue.find_entries(row)]


def test_tables_become_sentences(build_docs: Any):
    erratum = next(one for one in build_docs.read_errata() if one[1].id == "003-2.1b")
    reason = build_docs.erratum_cells(*erratum, "en")[2]
    assert "d_k: 4, 16, 64, 256, 1024<br>not scaled: 0.324" in reason


def test_studies_exist():
    studies = {entry.study for entry in ENTRIES if entry.study}
    assert studies
    assert [study for study in studies if not (ROOT / "studies" / f"{study}.toml").is_file()] == []


def test_a_stored_run_is_read_with_its_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, title in (("depth-small", "depth"), ("depth-first-small", "depth-first")):
        folder = tmp_path / "runs" / "studies" / name / "report"
        folder.mkdir(parents=True)
        (folder / "report.md").write_text(REPORT.format(title))
    monkeypatch.chdir(tmp_path)
    assert find_reports("depth") == [Path("runs/studies/depth-small/report/report.md")]
    lines = describe_study("depth", Words("en"))
    assert "stored run runs/studies/depth-small" in lines[0]
    assert "headwise study studies/depth.toml" in lines[0]
    assert lines[1:] == ["- recall: qkv reaches accuracy 0.9.", "- a second claim"]


def test_without_a_stored_run_the_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (line,) = describe_study("not-yet-run", Words("zh"))
    assert line.endswith("headwise study studies/not-yet-run.toml")
    assert "没有" in line


def test_no_space_follows_a_full_width_colon():
    for study in {entry.study for entry in ENTRIES if entry.study}:
        head, *claims = describe_study(study, Words("zh"))
        assert "重新运行\uff1aheadwise study" in head
        assert not any("\uff1a " in line for line in [head, *claims]), study


def test_reports_of_studies_have_the_section_that_is_read():
    from headwise.learn.entry_text import CLAIMS
    from headwise.studies import study_report

    assert f"## {study_report.CLAIMS_TITLE}" == CLAIMS
