"""Finished cells that are packed beside the studies: equal bytes, and nothing is trained again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from headwise.studies.cells import Cell
from headwise.studies.process_engine import ProcessEngine
from headwise.studies.study_file import read_study
from headwise.studies.study_runner import RESULTS_FILE, run_study

TOOLS = Path(__file__).parents[2] / "tools"
STUDY = """
hypothesis = "x"
seeds = [1, 2]
head_texts = 0
[recipe]
steps = 2
batch = 2
lr = [0.001, 0.003]
[variants.mha]
[variants.mqa]
[tasks.recall]
vocabulary = 16
length = 16
pairs = 2
[scales.page]
"""


class IdleEngine:
    """An engine that trains nothing, and notes what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __enter__(self) -> IdleEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing was started."""

    def run_cells(self, cells: Sequence[Cell], folder: Path) -> Iterator[tuple[Cell, Any]]:
        self.asked += [cell.id for cell in cells]
        return iter(())


def test_stored_cells_are_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(TOOLS)
    findings = import_module("findings")
    monkeypatch.setattr(findings, "ROOT", tmp_path)
    path = tmp_path / "studies" / "tiny.toml"
    path.parent.mkdir()
    path.write_text(STUDY)
    study = read_study(path, "page")
    first = tmp_path / "first"
    run_study(study, first / "tiny", ProcessEngine(0))
    (first / "tiny" / "cells" / "another").mkdir()
    stored = findings.store_cells("tiny", first)
    packed = stored.read_bytes()
    assert findings.store_cells("tiny", first).read_bytes() == packed
    second = tmp_path / "second"
    findings.restore_cells("tiny", second)
    engine = IdleEngine()
    run_study(study, second / "tiny", engine)
    assert engine.asked == []
    results = [(folder / "tiny" / RESULTS_FILE).read_bytes() for folder in (first, second)]
    assert results[0] == results[1]
    assert results[0].count(b"\n") == 8  # 4 that choose rates, 4 of the report
