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

from ..report.progress import CountedMessage, TimeLeft, format_duration
from ..util.errors import SpecError
from ..util.files import FolderLock, read_json_file, write_atomically, write_together
from ..util.output_paths import FolderKind, check_output
from .cells import Cell, CellGrid, PairKey
from .process_engine import CellEngine, ProcessEngine, make_progress_line
from .run_cell import read_result
from .study_file import Study

CELLS_FOLDER = "cells"
RESULTS_FILE = "results.jsonl"
TIMINGS_FILE = "timings.jsonl"
STUDY_FILE = "study.json"
STUDY_FOLDER = FolderKind("study", (STUDY_FILE,))
TUNE = "tune"
REPORT = "report"


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
    rates: dict[PairKey, float]
    cells: list[CellResult] = field(default_factory=list[CellResult])

    @property
    def study(self) -> Study:
        """The study that was run."""
        return self.grid.study

    def report_cells(self, variant: str, task: str) -> list[CellResult]:
        """The report cells of a variant on a task, by seed."""
        key = (REPORT, variant, task)
        cells = [one for one in self.cells if (one.stage, one.cell.variant, one.cell.task) == key]
        return sorted(cells, key=lambda one: one.cell.seed)

    def done_cells(self, variant: str, task: str) -> list[CellResult]:
        """The report cells of a variant on a task that ended with metrics."""
        return [one for one in self.report_cells(variant, task) if one.is_done]


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
    folder = check_output(out, STUDY_FOLDER, "continue")
    grid = CellGrid(study)
    folder.mkdir(parents=True, exist_ok=True)
    with FolderLock(folder), engine or ProcessEngine() as engine:
        check_same_study(folder, study.name)
        rates: dict[PairKey, float] = {}
        for variant, task in grid.pairs:
            if len(grid.rates(variant)) == 1:
                rates[variant.name, task.name] = grid.rates(variant)[0]
        stage = StageRunner(folder / CELLS_FOLDER, engine, only, progress)
        tuned = stage.run(grid.tuning_cells(), TUNE)
        rates |= choose_rates(study, tuned)
        reported = stage.run(grid.report_cells(rates), REPORT)
        results = StudyResults(grid, rates, [*tuned, *reported])
        write_results(results, folder)
    return results


def choose_rates(study: Study, tuned: Sequence[CellResult]) -> dict[PairKey, float]:
    """The learning rate with the best validation metric for each variant on each task; none where
    all cells failed.

    If the metric is not measured during training, as of generated texts, the validation loss
    chooses.
    """
    best: dict[PairKey, tuple[float, float]] = {}
    for one in tuned:
        task = study.tasks[one.cell.task]
        valid = one.result.get("valid", {})
        score = -valid.get("loss", math.nan)
        if task.metric in valid:
            score = task.sign * valid[task.metric]
        key = (one.cell.variant, one.cell.task)
        if math.isfinite(score) and (key not in best or score > best[key][0]):
            best[key] = (score, one.cell.rate)
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
    times = [{"id": one.cell.id, **one.result.get("timing", {})} for one in results.cells]
    records = {RESULTS_FILE: [one.record for one in results.cells], TIMINGS_FILE: times}
    contents: dict[str, bytes] = {}
    for name, rows in records.items():
        lines = [json.dumps(row, sort_keys=name == RESULTS_FILE) for row in rows]
        contents[name] = "".join(f"{line}\n" for line in lines).encode()
    write_together(folder, contents)


@dataclass(frozen=True)
class StageRunner:
    """Runs the chosen cells of a stage by an engine, and reports each."""

    folder: Path
    engine: CellEngine
    only: Callable[[Cell], bool]
    progress: Callable[[str], object]

    def run(self, cells: list[Cell], stage: str) -> list[CellResult]:
        """The results of the chosen cells, in their order; finished ones are not run again."""
        chosen = [cell for cell in cells if self.only(cell)]
        # Those that were finished before come first.
        num_before = sum(read_result(self.folder / cell.id) is not None for cell in chosen)
        time_left = TimeLeft()
        time_left.seconds(CountedMessage(stage, num_before, len(chosen), "cells"))
        done: dict[str, Mapping[str, Any]] = {}
        for number, (cell, result) in enumerate(self.engine.run(chosen, self.folder), 1):
            done[cell.id] = result
            line = f"{stage:<6}  {make_progress_line(number, len(chosen), cell, result)}"
            if number > num_before:
                message = CountedMessage(stage, number, len(chosen), "cells")
                seconds = time_left.seconds(message)
                if seconds is not None:
                    line += f", {format_duration(seconds)} left"
            self.progress(line)
        return [CellResult(cell, stage, done[cell.id]) for cell in chosen]
