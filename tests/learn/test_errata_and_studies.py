"""The errata page in both languages, and stored runs of studies."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwise.learn import catalogue
from headwise.learn.entry_text import (
    Erratum,
    Words,
    describe_study,
    find_study_runs,
    list_errata,
    study_command,
)

ROOT = Path(__file__).resolve().parents[2]
ENTRIES = catalogue.load_entries()
REPORT = (
    "# Study: {}\n\n## What can be claimed\n\n- recall: qkv reaches accuracy 0.9.\n- a "
    "second claim\n\n"
)
REPORT += "## Results\n\n- x\n"


@pytest.fixture(scope="module")
def errata() -> list[Erratum]:
    return list(list_errata(ENTRIES))


def test_every_erratum_has_a_row(errata: list[Erratum]):
    assert list(dict.fromkeys(row.id for row in errata)) == list(
        catalogue.read_toml("source_rows")["errata"]
    )


@pytest.mark.parametrize(("page", "language"), [("errata.md", "en"), ("errata.zh.md", "zh")])
def test_pages_have_every_row(page: str, language: str, errata: list[Erratum]):
    text = (ROOT / "docs" / page).read_text()
    for row in errata:
        id, claim, correction, reference, command = (
            cell.replace("|", "\\|") for cell in row.cells(language)
        )
        assert f"| {id} | {claim} | {correction} | {reference} | {command} |" in text


def test_commands_of_errata_find_their_entries(errata: list[Erratum]):
    for row in errata:
        assert row.entry.id in {
            entry.id for entry in catalogue.find_entries(row.cells("en")[4].strip("`").split()[-1])
        }


def test_tables_become_sentences(errata: list[Erratum]):
    cells = next(row for row in errata if row.entry.id == "003-2.1b").cells("en")
    assert "d_k: 4, 16, 64, 256, 1024<br>not scaled: 0.324" in cells[2]


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
    (run,) = find_study_runs("depth")
    assert run.folder == Path("runs/studies/depth-small")
    assert run.claims == ("recall: qkv reaches accuracy 0.9.", "a second claim")
    lines = describe_study("depth", Words("en"))
    assert "stored run runs/studies/depth-small" in lines[0]
    assert study_command("depth") in lines[0]
    assert lines[1:] == ["- recall: qkv reaches accuracy 0.9.", "- a second claim"]


def test_without_a_stored_run_the_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (line,) = describe_study("depth", Words("zh"))
    assert line.endswith("headwise study studies/depth.toml")
    assert "没有" in line


def test_reports_of_studies_have_the_section_that_is_read():
    from headwise.learn.entry_text import CLAIMS
    from headwise.studies import study_report

    assert f"## {study_report.CLAIMS_TITLE}" == CLAIMS
