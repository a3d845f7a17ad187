"""One cell: train the model, test it, measure its heads, and write the result once. Any engine
calls `run_cell`.
"""

from __future__ import annotations

import gc
import json
import math
import shutil
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..kernels.capabilities import use_threads
from ..models import Transformer
from ..training.data import Task, make_task
from ..training.training_run import CHECKPOINT_FOLDER
from ..util.errors import SpecError, TrainingDiverged
from ..util.files import write_atomically

if TYPE_CHECKING:
    from ..training import TrainingResult

RESULT_FILE = "result.json"
RUN_FOLDER = "run"
EDIT_FOLDER = "edits"
LOG_FILE = "metrics.jsonl"
TEST_BATCHES = 4  # batches of each further test


def run_cell(config: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Run a cell in its folder and return its result; a folder that holds a result is read, not run
    again.

    A cell that was killed resumes from its last checkpoint and ends with the same bits. Divergence,
    lack of memory and invalid settings are results too: they carry a status and a message instead
    of metrics.
    """
    path = Path(folder)
    stored = read_result(path)
    if stored is not None:
        return stored
    path.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    processor_start = time.process_time()
    result: dict[str, Any]
    try:
        with use_threads(1):  # sums and times must not depend on the number of processors
            result = {"status": "done", **_train_and_test(config, path)}
    except TrainingDiverged as error:
        result = {"status": "diverged", "message": str(error).partition(";")[0]}
    except MemoryError:
        result = {"status": "out of memory", "message": "the process could not allocate memory"}
    except (ValueError, NotImplementedError) as error:
        result = {"status": "failed", "message": str(error)}
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        result = {"status": "out of memory", "message": str(error).splitlines()[0]}
    times = {
        "seconds": time.perf_counter() - start,
        "processor": time.process_time() - processor_start,
    }
    result["timing"] = times | result.get("timing", {})
    write_result(path, result)
    shutil.rmtree(path / RUN_FOLDER / CHECKPOINT_FOLDER, ignore_errors=True)
    gc.collect()
    return result


def read_result(folder: Path) -> dict[str, Any] | None:
    """The result of a cell, or None if it has not ended."""
    try:
        return json.loads((folder / RESULT_FILE).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        raise SpecError(
            f"{folder / RESULT_FILE} is damaged; delete it, and the cell is run again"
        ) from None


def write_result(folder: Path, result: Mapping[str, Any]) -> None:
    """Write the result of a cell, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(
        folder / RESULT_FILE, json.dumps(result, indent=1, sort_keys=True).encode() + b"\n"
    )


def _train_and_test(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    from ..training.recipe import from_dict as read_recipe
    from .cell_heads import summarise_heads
    from .model_edits import ModelEdit, evaluate_edit

    task = read_task(config["task"])
    recipe = read_recipe(config["recipe"])
    num_texts = config["head_texts"]
    clock = StepClock()
    run_folder = folder / RUN_FOLDER
    trained = _train(config, run_folder, clock)
    net = trained.net
    curve = read_curve(run_folder / LOG_FILE)
    sums = evaluate_model(net, task, recipe.batch, trained.split)
    tests: dict[str, dict[str, float]] = {}
    heads_at = _measure_heads_during_training(config, run_folder)
    for name, values in config["tests"].items():
        test = read_task(values)
        of_test = evaluate_model(net, test, recipe.batch)
        tests[name] = {metric: total / count for metric, (total, count) in of_test.items()}
        heads_at[f"test {name}"] = summarise_heads(net, test, num_texts)
    heads = summarise_heads(net, task, num_texts)
    edits: dict[str, Any] = {}
    for name, values in config["edits"].items():
        out = run_folder / EDIT_FOLDER / name
        edits[name] = evaluate_edit(net, task, recipe, ModelEdit(**values), out)
    return {
        "metrics": dict(trained.metrics),
        "valid": next((point["metrics"] for point in curve if point["step"] == trained.best), {}),
        "counts": {name: count for name, (_, count) in sums.items()},
        "parameters": sum(one.numel() for one in net.parameters() if one.requires_grad),
        "steps": trained.steps,
        "best_step": trained.best,
        "curve": curve,
        "tests": tests,
        "heads": heads,
        "heads_at": heads_at,
        "edits": edits,
        "timing": {"training": trained.seconds, "step": clock.median},
    }


class StepClock:
    """Logger of a training run that measures the processor time of its steps, which other processes
    do not change.
    """

    def __init__(self) -> None:
        self._last: float | None = None
        self._steps: list[float] = []

    @property
    def median(self) -> float:
        """Median processor seconds of a step; NaN if fewer than two steps were taken."""
        return statistics.median(self._steps) if self._steps else math.nan

    def open(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Nothing is opened."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Add the time since the last step, unless something else was recorded between the two."""
        now = time.process_time()
        if record["event"] == "step":
            if self._last is not None:
                self._steps.append(now - self._last)
            self._last = now
        else:
            self._last = None

    def close(self) -> None:
        """Nothing is closed."""


def _train(config: Mapping[str, Any], folder: Path, clock: StepClock) -> TrainingResult:
    """Train the model of a cell, or go on from its last checkpoint, without pictures of the run."""
    from ..models.distributed import join_process_group
    from ..models.model_spec.serialization import from_dict as read_model
    from ..training.loggers import JsonlLogger
    from ..training.loop import run_training
    from ..training.recipe import from_dict as read_recipe
    from ..training.run_setup import TrainingSetup

    task = read_task(config["task"])
    recipe = read_recipe(config["recipe"])
    with join_process_group() as launch:
        setup = TrainingSetup.of(task, read_model(config["model"]), recipe, folder, launch)
        return run_training(setup, "allowed", [JsonlLogger(), clock])


def _measure_heads_during_training(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Summaries of the heads before the first step, and at every checkpoint if the recipe keeps
    several.
    """
    from ..models import build
    from ..models.model_spec.serialization import from_dict as read_model
    from ..training.training_run import CheckpointFolder, read_checkpoint
    from .cell_heads import summarise_heads

    task = read_task(config["task"])
    recipe = config["recipe"]
    net = build(read_model(config["model"]), seed=recipe["seed"], init=recipe["init"])
    net.usage = task.usage
    summaries = {"step 0": summarise_heads(net, task, config["head_texts"])}
    if recipe["keep"] == 1 or config["head_texts"] < 2:
        return summaries
    for path in reversed(CheckpointFolder(folder / CHECKPOINT_FOLDER).paths):
        checkpoint = read_checkpoint(path)
        if checkpoint.step:
            net.load_state_dict(checkpoint.tensors_of_kind("model"))
            summaries[f"step {checkpoint.step}"] = summarise_heads(net, task, config["head_texts"])
    return summaries


def read_task(values: Mapping[str, Any]) -> Task:
    """The task that `describe_task` described."""
    options = {
        key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
    }
    name = str(options.pop("task"))
    return make_task(name, **options)


def evaluate_model(
    net: Transformer, task: Task, batch_size: int, split: str = "test"
) -> dict[str, tuple[float, int]]:
    """Sum and number of terms of each metric of a model on a few batches of a split."""
    from ..training.evaluation import sum_batch_metrics

    sums = sum_batch_metrics(net, task, (batch_size, TEST_BATCHES), split)
    return {name: (total, count) for name, (total, count) in sums.items() if count}


def read_curve(path: Path) -> list[dict[str, Any]]:
    """Step and metrics of the evaluations of a run; those of steps that a resumed run repeated are
    given once.
    """
    from ..util.files import read_lines

    evaluations: dict[int, dict[str, Any]] = {}
    for record in read_lines(path):
        if record.get("event") == "evaluation":
            point = {"step": record["step"], "metrics": record["metrics"]}
            evaluations[record["step"]] = point
    return [evaluations[step] for step in sorted(evaluations)]
