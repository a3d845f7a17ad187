"""Run cells of a study, or measure heads, as tasks of Ray, on several machines or on a local
cluster started here.

Ray starts the worker processes, one processor and one thread each, and runs a task again whose
process or machine dies. Workers return results; only the driver, which runs the study, writes them.
Heads are measured by shards of the texts; the sums of every text are kept apart until all are
merged, in their order, so no sum depends on how the texts were divided.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from torch import nn

from ..attention.interfaces.external_parts import imported_part_files
from ..kernels.capabilities import this_machine
from ..observe.head_analysis.annotated_examples import Example
from ..observe.head_analysis.head_measurement import (
    MeasureOptions,
    MetricSums,
    TextSums,
    sum_examples,
)
from ..observe.head_analysis.literature_metrics import get_metric
from ..util.errors import SpecError
from .cells import Cell
from .process_engine import MAX_ATTEMPTS, THREAD_VARIABLES, prepare_worker, record_killed
from .run_cell import read_result, run_cell, write_result

NO_RAY = "--engine ray needs Ray; pip install 'headwise[ray]', or use --engine local"
NEW_CLUSTER = "local"  # Ray's name for a cluster that is started with the call


class RayEngine:
    """Runs cells on the Ray cluster at `address`, as "host:port"; without one, on a cluster of
    `jobs` processors here.

    The machines of a cluster need the same version of headwise, and the files of `--import` at the
    same paths. A cell whose process dies is run again from its start, at most three times; then it
    is recorded as killed.
    """

    def __init__(self, address: str = "", jobs: int | None = None) -> None:
        if address and jobs is not None:
            raise SpecError(
                f"the cluster at {address} has its own number of processors; leave --jobs {jobs} "
                "out"
            )
        self.address = address
        self.jobs = jobs
        # Ray reads it when it is imported: it shall report nothing.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            importlib.import_module("ray.exceptions")
            self.ray: Any = importlib.import_module("ray")
        except ImportError:
            raise SpecError(NO_RAY) from None

    def __enter__(self) -> Self:
        ray = self.ray
        size = {} if self.address else {"num_cpus": self.jobs or this_machine().usable_processors}
        try:
            ray.init(
                address=self.address or NEW_CLUSTER,
                include_dashboard=None if self.address else False,
                log_to_driver=False,
                logging_level="ERROR",
                runtime_env={"env_vars": dict.fromkeys(THREAD_VARIABLES, "1")},
                **size,
            )
        except (ConnectionError, TimeoutError, RuntimeError, ValueError) as error:
            action = f"reach a Ray cluster at {self.address}" if self.address else "start Ray"
            raise SpecError(
                f"cannot {action}: {str(error).splitlines()[0]}; start a cluster with ray start "
                "--head and give its HOST:PORT, or leave --address out to start one here"
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        """Disconnect; a cluster that was started here ends, and with it the
        tasks that still run.
        """
        self.ray.shutdown()

    @property
    def lost_task_errors(self) -> tuple[type[Exception], ...]:
        """Exceptions of tasks whose process or machine ended, or whose result was lost."""
        errors = self.ray.exceptions
        names = ("OutOfMemoryError", "WorkerCrashedError", "NodeDiedError", "ObjectLostError")
        return tuple(getattr(errors, name) for name in names)

    def remote(self, function: Callable[..., Any]) -> Any:
        """Return the function as a task of one processor that is tried again if its process dies."""
        return self.ray.remote(num_cpus=1, max_retries=MAX_ATTEMPTS - 1)(function).remote

    def run(self, cells: Sequence[Cell], folder: Path) -> Iterator[tuple[Cell, Mapping[str, Any]]]:
        """Run the cells; yields each with its result, finished ones first."""
        start = self.remote(run_cell_elsewhere)
        tasks: dict[Any, Cell] = {}
        for cell in cells:
            stored = read_result(folder / cell.id)
            if stored is None:
                tasks[start(cell.config, imported_part_files())] = cell
            else:
                yield cell, stored
        while tasks:
            for task in self.ray.wait(list(tasks))[0]:
                cell = tasks.pop(task)
                yield cell, self._receive(task, folder / cell.id)

    def _receive(self, task: Any, folder: Path) -> Mapping[str, Any]:
        """The result of a task that has ended, written to the folder of its cell."""
        try:
            result = self.ray.get(task)
        except self.ray.exceptions.OutOfMemoryError:
            result = {
                "status": "out of memory",
                "message": "Ray ended its process to free memory",
                "timing": {},
            }
        except self.lost_task_errors:
            return record_killed(folder)
        write_result(folder, result)
        return result


def run_cell_elsewhere(config: Mapping[str, Any], part_files: Sequence[str]) -> dict[str, Any]:
    """Run a cell in a worker of Ray, in a temporary folder of its machine."""
    prepare_worker(part_files)
    with tempfile.TemporaryDirectory(prefix="headwise-cell-") as folder:
        return run_cell(config, folder)


SHARD_SIZE = 8  # texts of a task, which runs again as a whole if its process dies
SumsByExample = dict[tuple[str, str, str], list[TextSums]]


class RayHeads:
    """Engine of `measure_heads` on the Ray cluster at `address` ("host:port"); without one, on a
    cluster started here.

    Workers have one processor and one thread, so that measures are those of one process with one
    thread, bit for bit. The machines need the same version of headwise, and the files of `--import`
    at the same paths.
    """

    def __init__(self, address: str = "") -> None:
        self._engine = RayEngine(address)

    def __call__(
        self,
        model: nn.Module,
        examples: Iterable[Example],
        options: MeasureOptions,
        progress: Callable[[int], object],
    ) -> MetricSums:
        """Sums of every metric of the examples, in their order."""
        texts = list(examples)
        options = options._replace(engine=None)
        shards = [texts[first : first + SHARD_SIZE] for first in range(0, len(texts), SHARD_SIZE)]
        merged = MetricSums([get_metric(metric) for metric in options.metrics])
        with self._engine as engine:
            start = engine.remote(sum_shard_elsewhere)
            model_ref = engine.ray.put(model)
            tasks = [start(model_ref, shard, options, imported_part_files()) for shard in shards]
            for task, shard in zip(tasks, shards, strict=True):
                try:
                    merged.append(engine.ray.get(task), len(shard))
                except engine.lost_task_errors as error:
                    raise SpecError(
                        "Ray ended a worker that measured texts, or lost its result "
                        f"({str(error).splitlines()[0]}); use --engine local"
                    ) from None
                progress(merged.num_examples)
        return merged


def sum_shard_elsewhere(
    model: nn.Module,
    examples: Sequence[Example],
    options: MeasureOptions,
    part_files: Sequence[str],
) -> SumsByExample:
    """Sums of the texts of one shard, in a worker of Ray."""
    prepare_worker(part_files)
    return sum_examples(model, examples, options).sums_by_example
