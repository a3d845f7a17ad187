"""Run a study: choose a learning rate for each variant on each task, then train the seeds of the
report.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import SpecError
from ..files import FolderLock, read_json_file, write_atomically, write_together
from ..output_paths import FolderKind, check_output
from ..progress import CountedMessage, TimeLeft, format_duration
from .cells import Cell, CellGrid
from .process_engine import CellEngine, ProcessEngine, make_progress_line
from .run_cell import read_result
from .study_file import Study

CELLS_FOLDER, RESULTS_FILE, TIMINGS_FILE, STUDY_FILE = (
    "cells",
    "results.jsonl",
    "timings.jsonl",
    "study.json",
)
STUDY_FOLDER = FolderKind("study", (STUDY_FILE,))
TUNE, REPORT = "tune", "report"


@dataclass(frozen=True)
class CellResult:
    """A cell with its result; `stage` is "tune" or "report"."""

    cell: Cell
    stage: str
    result: Mapping[str, Any]

    @property
    def is_done(self) -> bool:
        """Whether the cell ended with metrics."""
        return self.result["status"] == "done"

    @property
    def record(self) -> dict[str, Any]:
        """The cell and its result as plain values, without times, so that equal runs give equal
        bytes.
        """
        cell = self.cell
        names = {"id": cell.id, "stage": self.stage, "task": cell.task, "variant": cell.variant}
        values = {key: value for key, value in self.result.items() if key != "timing"}
        return {**names, "lr": cell.rate, "seed": cell.seed, **values}


@dataclass
class StudyResults:
    """The results of a study: all cells, and the learning rate chosen for each variant on each
    task.
    """

    grid: CellGrid
    rates: dict[tuple[str, str], float]
    cells: list[CellResult] = field(default_factory=list[CellResult])

    @property
    def study(self) -> Study:
        """The study that was run."""
        return self.grid.study

    def report_cells(self, variant: str, task: str) -> list[CellResult]:
        """The report cells of a variant on a task, by seed."""
        chosen = [one for one in self.cells if one.stage == REPORT]
        return sorted(
            (one for one in chosen if (one.cell.variant, one.cell.task) == (variant, task)),
            key=lambda one: one.cell.seed,
        )


def run_study(
    study: Study,
    out: Path | str,
    engine: CellEngine | None = None,
    only: Callable[[Cell], bool] = lambda cell: True,
    progress: Callable[[str], object] = lambda line: None,
) -> StudyResults:
    """Run the cells of a study that have no result in `out` yet, and write results.jsonl.

    A cell that fails is recorded and stops nothing else. `only` selects cells, to run a part of the
    study.
    """
    folder, grid = check_output(out, STUDY_FOLDER, "continue"), CellGrid(study)
    folder.mkdir(parents=True, exist_ok=True)
    with FolderLock(folder), engine or ProcessEngine() as engine:
        check_same_study(folder, study.name)
        rates = {
            (variant.name, task.name): grid.rates(variant)[0]
            for variant, task in grid.pairs
            if len(grid.rates(variant)) == 1
        }
        tuned = _run_stage(grid.tuning_cells(), TUNE, folder, engine, only, progress)
        rates |= choose_rates(study, tuned)
        reported = _run_stage(grid.report_cells(rates), REPORT, folder, engine, only, progress)
        results = StudyResults(grid, rates, [*tuned, *reported])
        write_results(results, folder)
    return results


def choose_rates(study: Study, tuned: Sequence[CellResult]) -> dict[tuple[str, str], float]:
    """The learning rate with the best validation metric for each variant on each task; none where
    all cells failed.

    If the metric is not measured during training, as of generated texts, the validation loss
    chooses.
    """
    best: dict[tuple[str, str], tuple[float, float]] = {}
    for one in tuned:
        task, valid = study.tasks[one.cell.task], one.result.get("valid", {})
        score = valid.get(task.metric, math.nan) * (1 if task.higher_is_better else -1)
        if task.metric not in valid:
            score = -valid.get("loss", math.nan)
        if not math.isfinite(score):
            continue
        key = one.cell.variant, one.cell.task
        if key not in best or score > best[key][0]:
            best[key] = score, one.cell.rate
    return {key: rate for key, (_, rate) in best.items()}


def check_same_study(folder: Path, name: str) -> None:
    """Raise if the folder holds another study; writes the name of this one."""
    path = folder / STUDY_FILE
    if path.exists():
        document = read_json_file(path)
        stored = document.get("study") if isinstance(document, dict) else None
        if stored != name:
            raise SpecError(
                f"{folder} holds the study {stored!r}, not {name!r}; give another --out"
            )
        return
    write_atomically(path, json.dumps({"study": name}).encode() + b"\n")


def write_results(results: StudyResults, folder: Path) -> None:
    """Write all cells in the order of the study; their times are in a file of their own."""
    lines = [json.dumps(one.record, sort_keys=True) for one in results.cells]
    times = [
        json.dumps({"id": one.cell.id, **one.result.get("timing", {})}) for one in results.cells
    ]
    contents = {RESULTS_FILE: lines, TIMINGS_FILE: times}
    write_together(
        folder,
        {name: "".join(f"{line}\n" for line in rows).encode() for name, rows in contents.items()},
    )


def _run_stage(
    cells: list[Cell],
    stage: str,
    folder: Path,
    engine: CellEngine,
    only: Callable[[Cell], bool],
    progress: Callable[[str], object],
) -> list[CellResult]:
    chosen = [cell for cell in cells if only(cell)]
    num_before = sum(
        read_result(folder / CELLS_FOLDER / cell.id) is not None for cell in chosen
    )  # they come first
    time_left, done = TimeLeft(), dict[str, Mapping[str, Any]]()
    time_left.seconds(CountedMessage(stage, num_before, len(chosen), "cells"))
    for number, (cell, result) in enumerate(engine.run(chosen, folder / CELLS_FOLDER), 1):
        done[cell.id] = result
        line = f"{stage:<6}  {make_progress_line(number, len(chosen), cell, result)}"
        seconds = (
            time_left.seconds(CountedMessage(stage, number, len(chosen), "cells"))
            if number > num_before
            else None
        )
        progress(line if seconds is None else f"{line}, {format_duration(seconds)} left")
    return [CellResult(cell, stage, done[cell.id]) for cell in chosen]
