"""Outcomes that are known from the literature, at the smallest scale at which they show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.models.model_spec import OutputHeadSpec
from headwise.studies.process_engine import ProcessEngine
from headwise.studies.study_file import parse_study
from headwise.studies.study_runner import CellResult, run_study
from headwise.training.data.synthetic_task import ModelShape, make_small_encoder


def run_one_seed(
    variants: dict[str, Any], task: dict[str, Any], steps: int, folder: Path
) -> dict[str, CellResult]:
    """Train each variant once; results by variant."""
    table = {
        "hypothesis": "known",
        "seeds": [1],
        "head_texts": 0,
        "recipe": {"steps": steps, "batch": 32, "lr": 0.003},
        "variants": variants,
        "tasks": {"known": task},
    }
    results = run_study(parse_study(table, "known", "small", {}), folder, ProcessEngine())
    return {name: results.report_cells(name, "known")[0] for name in variants}


@pytest.mark.slow
def test_full_attention_recalls_and_others_do_not(tmp_path: Path):
    near = {
        "options": {"pattern": "window(4)"}
    }  # two layers reach 6 tokens back, but pairs are up to 24 away
    task = {"task": "recall", "vocabulary": 32, "length": 32, "pairs": 4}
    variants: dict[str, Any] = {"mha": {}, "near": near, "linear": {}, "average": {}}
    cells = run_one_seed(variants, task, 600, tmp_path)
    accuracy = {name: cell.result["metrics"]["accuracy"] for name, cell in cells.items()}
    assert accuracy["mha"] > 0.95
    assert all(accuracy[name] < 0.6 for name in ("near", "linear", "average")), accuracy


@pytest.mark.slow
def test_induction_needs_two_layers(tmp_path: Path):
    task = {"task": "copy", "symbols": 16, "block": [6, 8, 10], "gap": [0, 3, 6, 9]}
    cells = run_one_seed(
        {"two": {"model": {"layers": 2}}, "one": {"model": {"layers": 1}}}, task, 600, tmp_path
    )
    assert cells["two"].result["metrics"]["accuracy"] > 0.95
    assert cells["one"].result["metrics"]["accuracy"] < 0.6


@pytest.mark.slow
def test_parity_does_not_generalise_in_length(tmp_path: Path):
    task = {"task": "group", "length": 12, "tests": {"longer": {"length": 48}}}
    for cell in run_one_seed({"mha": {}, "gqa": {}}, task, 800, tmp_path).values():
        assert cell.result["metrics"]["accuracy"] > 0.95
        assert abs(cell.result["tests"]["longer"]["accuracy@t<=64"] - 0.5) < 0.1


def test_permuted_tokens_leave_an_encoder_without_positions_unchanged():
    shape = ModelShape(width=32, heads=4, layers=3, feed=48, positions="none")
    spec = make_small_encoder("bag", 23, shape, OutputHeadSpec("tokens", 5, at="each"))
    net = hw.build(spec, seed=0).double().eval()
    ids, order = (
        torch.randint(0, 23, (4, 9), generator=torch.Generator().manual_seed(0)),
        torch.randperm(9),
    )
    with torch.no_grad():
        assert torch.allclose(net(ids)[:, order], net(ids[:, order]), atol=1e-12)
        rotary = hw.build(
            make_small_encoder(
                "rotary", 23, ModelShape(32, 4, 3, 48), OutputHeadSpec("tokens", 5, at="each")
            ),
            seed=0,
        )
        assert not torch.allclose(rotary.eval()(ids)[:, order], rotary(ids[:, order]), atol=1e-3)
