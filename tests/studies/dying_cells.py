"""Replacements of functions of the engines of studies for worker processes, which import them by
name.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Never

from torch import nn

from headwise.studies import process_engine
from headwise.studies.process_engine import (
    ShardResult,
    ShardTask,
    run_cell_elsewhere,
    sum_shard_elsewhere,
)
from headwise.studies.run_cell import run_cell

MARKERS = "HEADWISE_TEST_MARKERS"


def run_or_die(config: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Run a cell, but end the process the first time, and always for seed 2."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / process_engine.STARTED_FILE).touch()
    marker = Path(folder) / "died"
    if config["recipe"]["seed"] == 2 or not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return run_cell(config, folder)


def run_or_die_elsewhere(config: Mapping[str, Any], part_files: Sequence[str]) -> dict[str, Any]:
    """Run a cell in a worker of Ray, but end the process the first time; the folder in `MARKERS`
    counts them.
    """
    marker = Path(os.environ[MARKERS]) / f"died-{config['recipe']['seed']}"
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return run_cell_elsewhere(config, part_files)


def sum_or_die_elsewhere(
    model: nn.Module, task: ShardTask, part_files: Sequence[str]
) -> ShardResult:
    """Measure a shard of texts in a worker of Ray, but end the process the first time; `MARKERS`
    counts them.
    """
    ids = task[0][0].inputs["x"][0].tolist()
    marker = Path(os.environ[MARKERS]) / f"died-{'-'.join(map(str, ids))}"
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return sum_shard_elsewhere(model, task, part_files)


def die_before_the_cell(*_: object) -> Never:
    """End the process before it marks the cell as started, as a worker that cannot import its
    modules does.
    """
    os._exit(1)
