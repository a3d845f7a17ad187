"""Run cells in a pool of processes: one cell and one thread a process, killed processes are
replaced.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Protocol, Self

from ..attention.interfaces.external_parts import import_part_file, imported_part_files
from ..kernels.capabilities import this_machine
from ..util.python_processes import safe_import_path
from .cells import Cell
from .run_cell import read_result, run_cell, write_result

MAX_ATTEMPTS = 3  # of a cell whose process dies
STARTED_FILE = "started"
WORKERS_FAIL = (
    f"the worker processes ended {MAX_ATTEMPTS} times before they ran a cell (their output above "
    "may say why); run the study with --jobs 0, which needs no workers"
)
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


class CellEngine(Protocol):
    """Interface of engines: they yield each result once, in any order, and free their workers at
    the end.
    """

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def run(self, cells: Sequence[Cell], folder: Path) -> Iterator[tuple[Cell, Mapping[str, Any]]]:
        """Run the cells that have no result in their folder yet; yields every
        cell with its result.
        """
        ...


class ProcessEngine:
    """Runs cells in `jobs` spawned processes on this machine; 0 runs them one by one in this
    process.

    A cell whose process dies (out of memory, kill -9) goes on from its last checkpoint. When a
    process dies, all cells that run may have been the cause. Each is tried at most three times, the
    last time alone; if its process dies then too, it is recorded as killed.
    """

    def __init__(self, jobs: int | None = None) -> None:
        self.jobs = this_machine().usable_processors if jobs is None else jobs
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes; cells that still run resume from their checkpoints in the next run."""
        if self._pool is not None:
            workers = self._pool._processes or {}  # pyright: ignore[reportPrivateUsage] - Python 3.14 has terminate_workers
            processes = list(workers.values())
            self._pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.terminate()
            self._pool = None

    def run(self, cells: Sequence[Cell], folder: Path) -> Iterator[tuple[Cell, Mapping[str, Any]]]:
        """Run the cells; yields each with its result, finished ones first."""
        pending = dict[str, Cell]()
        for cell in cells:
            result = read_result(folder / cell.id)
            if result is not None:
                yield cell, result
            else:
                pending[cell.id] = cell
        if self.jobs == 0:
            for cell in pending.values():
                yield cell, run_cell(cell.config, str(folder / cell.id))
            return
        yield from self._run_in_pools(pending, folder)

    def _run_in_pools(
        self, pending: dict[str, Cell], folder: Path
    ) -> Iterator[tuple[Cell, Mapping[str, Any]]]:
        attempts: Counter[str] = Counter()
        num_failed_starts = 0
        while pending:
            suspects = [cell_id for cell_id in pending if attempts[cell_id] == MAX_ATTEMPTS - 1]
            cells = {cell_id: pending[cell_id] for cell_id in suspects[:1] or pending}
            for cell_id in cells:
                (folder / cell_id / STARTED_FILE).unlink(missing_ok=True)
            try:
                for cell, result in self._run_in_pool(cells, folder):
                    del pending[cell.id]
                    yield cell, result
            except BrokenProcessPool as error:
                self._pool = None
                unfinished = [cell_id for cell_id in cells if cell_id in pending]
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
            self._pool = self._make_pool()
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

    def _make_pool(self) -> ProcessPoolExecutor:
        with safe_import_path():  # the pool starts a process that frees its locks
            return ProcessPoolExecutor(
                self.jobs,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=prepare_worker,
                initargs=(imported_part_files(),),
            )


def make_progress_line(done: int, total: int, cell: Cell, result: Mapping[str, Any]) -> str:
    """One line about a finished cell.

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
    """Prepare a worker: one thread for every library, the user's own parts, and Ctrl-C is left to
    the parent.
    """
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in THREAD_VARIABLES:
        os.environ[name] = "1"
    import torch

    torch.set_num_threads(1)
    for name in part_files:
        import_part_file(name)


def _run_marked(config: Mapping[str, Any], folder: str) -> dict[str, Any]:
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / STARTED_FILE).touch()
    return run_cell(config, folder)


def record_killed(folder: Path) -> dict[str, Any]:
    """Write and return the result of a cell whose process died too often."""
    result = {
        "status": "killed",
        "message": f"its process died {MAX_ATTEMPTS} times",
        "timing": {"seconds": 0.0},
    }
    write_result(folder, result)
    return result
