"""The notebooks that `tools/learn_notebooks.py` makes of the documents."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

from headwise.learn.catalogue import MODULES, load_entries
from headwise.report.notebook import ShownFigure

TOOL = Path(__file__).resolve().parents[2] / "tools" / "learn_notebooks.py"


def test_a_notebook_for_each_document_runs_each_entry_once(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["learn_notebooks.py", str(tmp_path)])
    runpy.run_path(str(TOOL), run_name="__main__")
    calls: list[str] = []
    for document in MODULES:
        notebook = json.loads((tmp_path / f"{document}.ipynb").read_text("utf-8"))
        assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
        cells = notebook["cells"]
        assert len({cell["id"] for cell in cells}) == len(cells)
        assert all(not cell.get("outputs") for cell in cells)
        calls += [cell["source"] for cell in cells[2:] if cell["cell_type"] == "code"]
    assert sorted(calls) == sorted(f'run("{entry.id}")' for entry in load_entries())


def test_the_cells_of_a_notebook_run(capsys):
    tool = runpy.run_path(str(TOOL))
    (document,) = tool["load_documents"](["004"])
    _, first, *cells = tool["make_notebook"](document)["cells"]
    namespace: dict[str, Any] = {}
    exec(first["source"], namespace)
    shown = [eval(cell["source"], namespace) for cell in cells if cell["cell_type"] == "code"]
    assert sum(isinstance(one, ShownFigure) for one in shown) >= 5
    printed = capsys.readouterr().out
    assert "[x] 004-1b  formula  wrong" in printed
    assert all(entry.id in printed for entry in document.entries)
