"""Comparison of training runs: steps, logs and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.training import CheckpointFolder
from headwise.util.files import read_lines


def check_equal_steps(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Losses, norms, gradients and weights are equal."""
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-10)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-10)
    for step, gradients in enumerate(expected["gradients"]):
        assert found["gradients"][step].keys() == gradients.keys()
        for name, gradient in gradients.items():
            place = f"{name} at step {step}"
            other = found["gradients"][step][name]
            assert (other is None) == (gradient is None), place
            if gradient is not None:
                torch.testing.assert_close(other, gradient, rtol=1e-9, atol=1e-12, msg=place)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, tensor in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], tensor, rtol=1e-8, atol=1e-11, msg=name)


def newest_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of the newest checkpoint of a run."""
    checkpoint, damages = CheckpointFolder(folder / "checkpoint").load_newest()
    assert checkpoint is not None
    assert not damages
    return dict(checkpoint.tensors)


def logged_results(folder: Path) -> list[Any]:
    """Results of every step and evaluation, without times."""
    events = read_lines(folder / "metrics.jsonl")
    steps = [(r["step"], r["loss"], r["rate"], r["norm"]) for r in events if r["event"] == "step"]
    return steps + [
        (r["step"], r["metrics"]) for r in events if r["event"] in ("evaluation", "end")
    ]


def check_similar_runs(found: Path, other_run: Path) -> None:
    """Weights, results and optimiser state are equal up to the order of sums in float32."""
    first, second = newest_checkpoint(found), newest_checkpoint(other_run)
    names = [name for name in second if not name.startswith("random")]
    assert names == [name for name in first if not name.startswith("random")]
    for name in names:
        torch.testing.assert_close(first[name], second[name], rtol=1e-3, atol=1e-5, msg=name)
    for (step, *values), (other, *expected) in zip(
        logged_results(found), logged_results(other_run), strict=True
    ):
        assert step == other
        for value, wanted_value in zip(values, expected, strict=True):
            assert value == pytest.approx(wanted_value, rel=1e-4, abs=1e-6)
    for name, tensor in hw.load(other_run).state_dict().items():
        torch.testing.assert_close(
            hw.load(found).state_dict()[name], tensor, rtol=1e-3, atol=1e-5, msg=name
        )
