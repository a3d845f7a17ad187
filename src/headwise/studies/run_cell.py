"""One cell: train the model, test it, measure its heads, and write the result once. Any engine calls `run_cell`."""

from __future__ import annotations

import gc
import json
import math
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..data import Task, make_task
from ..errors import SpecError, TrainingDiverged
from ..files import write_atomically
from ..models import Transformer
from ..training.training_run import CHECKPOINT_FOLDER

RESULT_FILE = "result.json"
RUN_FOLDER, LOG_FILE = "run", "metrics.jsonl"
HEAD_MEASURES = ("entropy", "distance", "sink", "previous", "self", "induction")
TEST_BATCHES = 4  # batches of each further test
STATUSES = ("done", "diverged", "out of memory", "failed", "killed")


def run_cell(config: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Run a cell in its folder and return its result; a folder that holds a result is read, not run again.

    A cell that was killed resumes from its last checkpoint and ends with the same bits. Divergence, lack of memory and
    invalid settings are results too: they carry a status and a message instead of metrics.
    """
    path = Path(folder)
    if (stored := read_result(path)) is not None:
        return stored
    path.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    result: dict[str, Any]
    try:
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
    result["timing"] = {"seconds": time.perf_counter() - start, **result.get("timing", {})}
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
        raise SpecError(f"{folder / RESULT_FILE} is damaged; delete it, and the cell is run again") from None


def write_result(folder: Path, result: Mapping[str, Any]) -> None:
    """Write the result of a cell, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / RESULT_FILE, json.dumps(result, indent=1, sort_keys=True).encode() + b"\n")


def _train_and_test(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    from ..model_spec.serialization import from_dict as read_model
    from ..training import train
    from ..training.recipe import from_dict as read_recipe

    task, recipe = read_task(config["task"]), read_recipe(config["recipe"])
    trained = train(task, read_model(config["model"]), recipe, folder / RUN_FOLDER, resume="allowed")
    curve = list(_read_curve(folder / RUN_FOLDER / LOG_FILE))
    tests = {name: evaluate_model(trained.net, read_task(test), recipe.batch) for name, test in config["tests"].items()}
    counts = evaluate_model(trained.net, task, recipe.batch, trained.split)
    return {
        "metrics": dict(trained.metrics),
        "valid": next((point["metrics"] for point in curve if point["step"] == trained.best), {}),
        "counts": {name: count for name, (_, count) in counts.items()},
        "parameters": sum(one.numel() for one in trained.net.parameters() if one.requires_grad),
        "steps": trained.steps,
        "best_step": trained.best,
        "curve": [{key: point[key] for key in ("step", "metrics")} for point in curve],
        "tests": {name: {key: total / count for key, (total, count) in sums.items()} for name, sums in tests.items()},
        "heads": measure_cell_heads(trained.net, task, config["head_texts"]),
        "timing": {"training": trained.seconds, "step": _median_step(folder / RUN_FOLDER / LOG_FILE)},
    }


def read_task(values: Mapping[str, Any]) -> Task:
    """The task that `describe_task` described."""
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    name = str(options.pop("task"))
    return make_task(name, **options)


def evaluate_model(net: Transformer, task: Task, batch_size: int, split: str = "test") -> dict[str, tuple[float, int]]:
    """Sum and number of terms of each metric of a model on a few batches of a split."""
    from ..training.evaluation import sum_batch_metrics

    sums = sum_batch_metrics(net, task, (batch_size, TEST_BATCHES), split)
    return {name: (total, count) for name, (total, count) in sums.items() if count}


def measure_cell_heads(net: Transformer, task: Task, num_texts: int) -> dict[str, Any]:
    """Mean of each head measure over all heads, and the number of heads of each class; or why there is none."""
    from ..head_analysis.annotated_examples import examples_from_task
    from ..head_analysis.head_classes import classify_heads
    from ..head_analysis.head_measurement import measure_heads

    if num_texts < 2:
        return {"note": "not measured"}
    try:
        reader = examples_from_task(net, task, num_texts)
        table = classify_heads(measure_heads(net.eval(), reader.examples_with_frequencies()))
    except ValueError as error:
        return {"note": str(error)}
    means: dict[str, list[float]] = {}
    classes: Counter[str] = Counter()
    for head in table.heads:
        classes[head.classes[0].name if head.classes else "unclear"] += 1
        for name in HEAD_MEASURES:
            if name in head.measures and math.isfinite(head.measures[name].value):
                means.setdefault(name, []).append(head.measures[name].value)
    return {
        "heads": len(table.heads),
        "measures": {name: sum(values) / len(values) for name, values in sorted(means.items())},
        "classes": dict(sorted(classes.items())),
    }


def _read_curve(path: Path) -> Iterator[dict[str, Any]]:
    """The evaluations of a run; those of steps that a resumed run repeated are given once."""
    from ..files import read_lines

    evaluations = {record["step"]: record for record in read_lines(path) if record.get("event") == "evaluation"}
    yield from (evaluations[step] for step in sorted(evaluations))


def _median_step(path: Path) -> float:
    """Median seconds of a training step; the first step is left out if there are others."""
    from ..files import read_lines

    seconds = [record["seconds"] for record in read_lines(path) if record.get("event") == "step"]
    return statistics.median(seconds[1:] or seconds or [math.nan])
