"""A training step waits for the device once: for the loss and the norm that it logs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import headwise as hw
from headwise.models.distributed.sharded_model import wrap_single_process
from headwise.training import training_run
from headwise.training.train_step import BatchPrefetcher, TrainStep
from headwise.training.training_run import TrainingRun
from support.pretended_device import count_waits, pretended_device
from support.small_training import PLAIN, Echo, RoutedEcho, short_recipe

TASKS = {
    "plain": (Echo(), {}),
    "accumulated": (Echo(), {"batch": 6, "accumulate": 2, "clip": 0.5}),
    "routed": (RoutedEcho(), {"aux_losses": (("balance", 0.1),)}),
}


@pytest.mark.parametrize("name", TASKS)
def test_a_step_waits_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(training_run, "measure_peak_flops", lambda *_: 1e9)
    task, options = TASKS[name]
    recipe = short_recipe(**options)
    losses: list[float] = []
    waits: list[int] = []

    def train(device: torch.device) -> None:
        net = hw.build(task.model(), seed=0).to(device)
        train_step = TrainStep(wrap_single_process(net, device), recipe, PLAIN)
        run = TrainingRun(task, train_step, tmp_path, 0.0)

        def step() -> None:
            losses.append(run.step(batches)["loss"])

        with BatchPrefetcher(task, recipe.batch, ahead=0, stop=recipe.steps) as batches:
            waits.extend(count_waits(step) for _ in range(4))

    train(torch.device("cpu"))
    waits.clear()
    with pretended_device() as device:
        train(device)
    assert losses[4:] == pytest.approx(losses[:4], rel=1e-5)
    assert waits[1:] == [1, 1, 1]
