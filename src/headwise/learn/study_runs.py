"""Stored runs of studies: what a finished `headwise study` claims, read from its report, and the command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

STUDIES = Path("runs/studies")  # where headwise study writes, under the current folder
CLAIMS = "## What can be claimed"


@dataclass(frozen=True)
class StudyRun:
    """The report of one finished run of a study: its folder and its claims."""

    folder: Path
    claims: tuple[str, ...]


def study_command(study: str) -> str:
    """The command that runs a study.

    >>> study_command("heads-count")
    'headwise study studies/heads-count.toml'
    """
    return f"headwise study studies/{study}.toml"


def find_study_runs(study: str, folder: Path = STUDIES) -> Sequence[StudyRun]:
    """The stored runs of a study at any scale, the most recent first."""
    reports = [path for path in folder.glob(f"{study}-*/report.md") if _names_study(path, study)]
    reports.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    return [StudyRun(path.parent, _read_claims(path)) for path in reports]


def _names_study(report: Path, study: str) -> bool:
    """Whether the first line names this study, and not another whose name begins alike."""
    lines = report.read_text(encoding="utf-8").splitlines()
    return lines[:1] == [f"# Study: {study}"]


def _read_claims(report: Path) -> tuple[str, ...]:
    _, _, text = report.read_text(encoding="utf-8").partition(CLAIMS)
    section = text.partition("\n## ")[0]
    return tuple(line.removeprefix("- ") for line in section.splitlines() if line.startswith("- "))
