"""Run cells in a pool, one cell and one thread per process; replace killed processes."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import tempfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from ..attention.interfaces.part import import_part_file, imported_part_files
from ..kernels.capabilities import this_machine
from ..observe.head_analysis.annotated_examples import Example
from ..observe.head_analysis.head_measurement import (
    MeasureCollector,
    MeasureOptions,
    MetricSums,
    TextSums,
    sum_examples,
)
from ..observe.head_analysis.head_metrics import get_metric
from ..util.errors import SpecError
from ..util.python_processes import safe_import_path
from .cells import Cell
from .run_cell import read_result, run_cell, write_result

MAX_ATTEMPTS = 3  # of a cell if its process dies
STARTED_FILE = "started"
WORKERS_FAIL = (
    f"the worker processes ended {MAX_ATTEMPTS} times before they ran a cell (their output above "
    "may say why); run the study with --jobs 0, which needs no workers"
)
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


class ProcessEngine:
    """Run cells in `jobs` spawned processes on this machine; 0 runs them one by one in this
    process.

    If a cell's process dies (out of memory, kill -9), the cell goes on from its last checkpoint.
    When a process dies, all running cells may have been the cause. Each is tried at most three
    times, the last time alone; if its process dies then too, it is recorded as killed.
    """

    def __init__(self, jobs: int | None = None) -> None:
        self.jobs = this_machine().usable_processors if jobs is None else jobs
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes; cells that still run resume from their checkpoints in the next run."""
        if self._pool is not None:
            # Python 3.14 has terminate_workers.
            workers = self._pool._processes or {}  # pyright: ignore[reportPrivateUsage] - see above
            processes = list(workers.values())
            self._pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.terminate()
            self._pool = None

    def run_cells(
        self, cells: Sequence[Cell], folder: Path
    ) -> Iterator[tuple[Cell, Mapping[str, Any]]]:
        """Run the cells; yield each with its result."""
        for cell in () if self.jobs else cells:
            yield cell, run_cell(cell.config, str(folder / cell.id))
        pending = {cell.id: cell for cell in cells} if self.jobs else {}
        attempts: Counter[str] = Counter()
        num_failed_starts = 0
        while pending:
            suspects = [cell_id for cell_id in pending if attempts[cell_id] == MAX_ATTEMPTS - 1]
            tried = {cell_id: pending[cell_id] for cell_id in suspects[:1] or pending}
            for cell_id in tried:
                (folder / cell_id / STARTED_FILE).unlink(missing_ok=True)
            try:
                for cell, result in self._run_in_pool(tried, folder):
                    del pending[cell.id]
                    yield cell, result
            except BrokenProcessPool as error:
                self._pool = None
                unfinished = [cell_id for cell_id in tried if cell_id in pending]
                started = [one for one in unfinished if (folder / one / STARTED_FILE).exists()]
                num_failed_starts = 0 if started else num_failed_starts + 1
                if num_failed_starts == MAX_ATTEMPTS:
                    raise ChildProcessError(WORKERS_FAIL) from error
                attempts.update(started)
                for cell_id in started:
                    if attempts[cell_id] >= MAX_ATTEMPTS:
                        result = read_result(folder / cell_id) or record_killed(folder / cell_id)
                        yield pending.pop(cell_id), result

    def _run_in_pool(
        self, pending: Mapping[str, Cell], folder: Path
    ) -> Iterator[tuple[Cell, Mapping[str, Any]]]:
        """Run cells in one pool, until all are done or a process dies."""
        if self._pool is None:
            with safe_import_path():  # the pool starts a process that frees its locks
                self._pool = ProcessPoolExecutor(
                    self.jobs,
                    mp_context=multiprocessing.get_context("spawn"),
                    initializer=prepare_worker,
                    initargs=(imported_part_files(),),
                )
        pool = self._pool
        queue = iter(pending.values())
        futures: dict[Future[dict[str, Any]], Cell] = {}

        def submit_next() -> None:
            cell = next(queue, None)
            if cell is not None:
                with safe_import_path():  # the first cell starts the workers
                    futures[pool.submit(_run_marked, cell.config, str(folder / cell.id))] = cell

        for _ in range(self.jobs):
            submit_next()
        while futures:
            for future in wait(futures, return_when=FIRST_COMPLETED).done:
                result = future.result()
                yield futures.pop(future), result
                submit_next()


def make_progress_line(done: int, total: int, cell: Cell, result: Mapping[str, Any]) -> str:
    """Write one line about a finished cell.

    >>> make_progress_line(
    ...     3,
    ...     12,
    ...     Cell("gqa", "recall", 1e-3, 1, {}),
    ...     {"status": "done", "timing": {"seconds": 4.25}},
    ... )
    ' 3/12  recall  gqa  lr 0.001  seed 1  done in 4.2 s'
    """
    seconds = result.get("timing", {}).get("seconds", 0.0)
    status = result["status"]
    if status != "done":
        status += f": {result.get('message', '')}"
    return (
        f"{done:>{len(str(total))}}/{total}  {cell.task}  {cell.variant}  lr {cell.rate:g}  seed "
        f"{cell.seed}  {status} in {seconds:.1f} s"
    )


def prepare_worker(part_files: Sequence[str]) -> None:
    """Prepare a worker: one thread for every library, the user's parts, and Ctrl-C left to the
    parent.
    """
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in THREAD_VARIABLES:
        os.environ[name] = "1"
    torch.set_num_threads(1)
    for name in part_files:
        import_part_file(name)


def _run_marked(config: Mapping[str, Any], folder: str) -> dict[str, Any]:
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / STARTED_FILE).touch()
    return run_cell(config, folder)


def record_killed(folder: Path) -> dict[str, Any]:
    """Write and return the result of a cell after its process died too often."""
    result = {
        "status": "killed",
        "message": f"its process died {MAX_ATTEMPTS} times",
        "timing": {"seconds": 0.0},
    }
    write_result(folder, result)
    return result


# --- Run cells of a study, or measure heads, as tasks of Ray, on several ma -----------------------


NO_RAY = "--engine ray needs Ray; pip install 'headwise[ray]', or use --engine local"
NEW_CLUSTER = "local"  # Ray's name for a cluster that is started with the call


class RayEngine:
    """Run cells on the Ray cluster at `address` ("host:port").

    Without an address, starts a cluster of `jobs` processors here. The machines of a cluster need
    the same version of headwise, and the files of `--import` at the same paths. If a cell's process
    dies, the cell runs again from its start, at most three times; then it is recorded as killed.
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
        """Return the exceptions of tasks that lost their process, machine or result."""
        errors = self.ray.exceptions
        names = ("OutOfMemoryError", "WorkerCrashedError", "NodeDiedError", "ObjectLostError")
        return tuple(getattr(errors, name) for name in names)

    def remote(self, function: Callable[..., Any]) -> Any:
        """Return the function as a one-processor task that is tried again if its process dies."""
        return self.ray.remote(num_cpus=1, max_retries=MAX_ATTEMPTS - 1)(function).remote

    def run_cells(
        self, cells: Sequence[Cell], folder: Path
    ) -> Iterator[tuple[Cell, Mapping[str, Any]]]:
        """Run the cells; yield each with its result."""
        start = self.remote(run_cell_elsewhere)
        tasks = {start(cell.config, imported_part_files()): cell for cell in cells}
        while tasks:
            for task in self.ray.wait(list(tasks))[0]:
                cell = tasks.pop(task)
                try:
                    result = self.ray.get(task)
                except self.ray.exceptions.OutOfMemoryError:
                    result = {
                        "status": "out of memory",
                        "message": "Ray ended its process to free memory",
                        "timing": {},
                    }
                except self.lost_task_errors:
                    yield cell, record_killed(folder / cell.id)
                    continue
                write_result(folder / cell.id, result)
                yield cell, result


CellEngine = ProcessEngine | RayEngine


def run_cell_elsewhere(config: Mapping[str, Any], part_files: Sequence[str]) -> dict[str, Any]:
    """Run a cell in a worker of Ray, in a temporary folder of its machine."""
    prepare_worker(part_files)
    with tempfile.TemporaryDirectory(prefix="headwise-cell-") as folder:
        return run_cell(config, folder)


SHARD_SIZE = 8  # texts of a task, which runs again as a whole if its process dies
SumsByExample = dict[tuple[str, str, str], list[TextSums]]
ShardTask = tuple[Sequence[Example], MeasureOptions, Sequence[MeasureCollector]]
ShardResult = tuple[SumsByExample, Sequence[MeasureCollector]]


class ShardedHeads(ABC):
    """Base class of engines that measure shards of the texts in workers and merge them in order.

    Workers have one thread, so measures equal one process with one thread, bit for bit, whatever
    the number of workers.
    """

    def __call__(
        self,
        model: nn.Module,
        examples: Iterable[Example],
        options: MeasureOptions,
        progress: Callable[[int], object],
        collectors: Sequence[MeasureCollector] = (),
    ) -> MetricSums:
        """Sum every metric of the examples, in their order."""
        texts = list(examples)
        options = options._replace(engine=None)
        shards = [texts[first : first + SHARD_SIZE] for first in range(0, len(texts), SHARD_SIZE)]
        merged = MetricSums([get_metric(metric) for metric in options.metrics])
        results = self.run_tasks(model, [(shard, options, collectors) for shard in shards])
        for shard, (sums_by_example, collected) in zip(shards, results, strict=True):
            merged.append(sums_by_example, len(shard))
            for collector, later in zip(collectors, collected, strict=True):
                collector.merge(later)
            progress(merged.num_examples)
        return merged

    @abstractmethod
    def run_tasks(self, model: nn.Module, tasks: Sequence[ShardTask]) -> Iterator[ShardResult]:
        """Run all tasks on copies of the collectors; yield their results in order."""


class RayHeads(ShardedHeads):
    """Run `measure_heads` on the Ray cluster at `address` ("host:port").

    Without an address, starts a cluster of `jobs` processors here. The machines need the same
    version of headwise, and the files of `--import` at the same paths.
    """

    def __init__(self, address: str = "", jobs: int | None = None) -> None:
        self._engine = RayEngine(address, jobs)

    def run_tasks(self, model: nn.Module, tasks: Sequence[ShardTask]) -> Iterator[ShardResult]:
        """Run each task as a task of Ray."""
        with self._engine as engine:
            start = engine.remote(sum_shard_elsewhere)
            model_ref = engine.ray.put(model)
            for started in [start(model_ref, task, imported_part_files()) for task in tasks]:
                try:
                    yield engine.ray.get(started)
                except engine.lost_task_errors as error:
                    raise SpecError(
                        "Ray ended a worker that measured texts, or lost its result "
                        f"({str(error).splitlines()[0]}); use --engine local"
                    ) from None


def sum_shard_elsewhere(
    model: nn.Module, task: ShardTask, part_files: Sequence[str]
) -> ShardResult:
    """Measure the texts of one shard, in a worker of Ray."""
    prepare_worker(part_files)
    return _sum_shard(model, task)


def _sum_shard(model: nn.Module, task: ShardTask) -> ShardResult:
    examples, options, collectors = task
    return sum_examples(model, examples, options, collectors).sums_by_example, collectors


class ProcessHeads(ShardedHeads):
    """Run `measure_heads` in `jobs` spawned processes on this machine, which share one copy of the
    weights.
    """

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs

    def run_tasks(self, model: nn.Module, tasks: Sequence[ShardTask]) -> Iterator[ShardResult]:
        """Run each task in one of the processes."""
        with tempfile.TemporaryDirectory(prefix="headwise-model-") as folder:
            path = str(Path(folder) / "model.pt")
            try:
                torch.save(model, path)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                fact = f"cannot send the model to other processes: {str(error).splitlines()[0]}"
                raise SpecError(f"{fact}; leave --jobs out") from None
            pool = ProcessPoolExecutor(
                self.jobs,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_load_model,
                initargs=(path, imported_part_files()),
            )
            try:
                with safe_import_path():
                    # As bytes: a tensor that a queue passes keeps a file open.
                    results = pool.map(_sum_pickled, map(pickle.dumps, tasks))
                yield from map(pickle.loads, results)
            except BrokenProcessPool:
                fact = "a process that measured texts ended, perhaps for lack of memory"
                raise SpecError(f"{fact}; give fewer --jobs") from None
            finally:
                pool.shutdown(cancel_futures=True)


_models: list[nn.Module] = []  # of a worker process, the model that it measures


def _load_model(path: str, part_files: Sequence[str]) -> None:
    """Read the model that the parent process wrote; the processes share its weights."""
    prepare_worker(part_files)
    _models.append(torch.load(path, weights_only=False, mmap=True))


def _sum_pickled(task: bytes) -> bytes:
    return pickle.dumps(_sum_shard(_models[0], pickle.loads(task)))
