"""Run a study: choose a learning rate for each variant on each task, then train the seeds of the
report.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..kernels.capabilities import use_threads
from ..kernels.compilation import compile_when_called
from ..models import Transformer, build
from ..models.model_spec import ModelSpec
from ..models.transformer import ModelCache
from ..report.data import Column, Table, Value
from ..report.progress import CountedMessage, TimeLeft, format_duration
from ..report.text import format_count, format_seconds
from ..util.errors import SpecError, pluralise
from ..util.files import FolderLock, read_json_file, write_atomically, write_together
from ..util.output_paths import FolderKind, check_output
from .cells import Cell, CellGrid, PairKey, VariantModel, count_cache_bytes
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
    """Pair a cell with its result; `stage` is "tune" or "report"."""

    cell: Cell
    stage: str
    result: Mapping[str, Any]

    @property
    def is_done(self) -> bool:
        """Return True if the cell ended with metrics."""
        return self.result["status"] == "done"

    @property
    def record(self) -> dict[str, Any]:
        """Return the cell and its result as plain values.

        Times are left out, so that equal runs give equal bytes.
        """
        cell = self.cell
        names = {"id": cell.id, "stage": self.stage, "task": cell.task, "variant": cell.variant}
        values = {key: value for key, value in self.result.items() if key != "timing"}
        return {**names, "lr": cell.rate, "seed": cell.seed, **values}


@dataclass
class StudyResults:
    """Hold all cells of a study, and the learning rate chosen for each variant on each task."""

    grid: CellGrid
    rates: dict[PairKey, float]
    cells: list[CellResult] = field(default_factory=list[CellResult])

    @property
    def study(self) -> Study:
        """Return the study that was run."""
        return self.grid.study

    def report_cells(self, variant: str, task: str) -> list[CellResult]:
        """Return the report cells of a variant on a task, by seed."""
        key = (REPORT, variant, task)
        cells = [one for one in self.cells if (one.stage, one.cell.variant, one.cell.task) == key]
        return sorted(cells, key=lambda one: one.cell.seed)

    def done_cells(self, variant: str, task: str) -> list[CellResult]:
        """Return the report cells of a variant on a task that ended with metrics."""
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
        path = folder / STUDY_FILE
        document = read_json_file(path) if path.exists() else {"study": study.name}
        stored = document.get("study") if isinstance(document, dict) else None
        if stored != study.name:
            raise SpecError(
                f"{folder} holds the study {stored!r}, not {study.name!r}; give another --out"
            )
        if not path.exists():
            write_atomically(path, json.dumps(document).encode() + b"\n")
        rates: dict[PairKey, float] = {}
        for variant, task in grid.pairs:
            tried = grid.rates(variant, task)
            if len(tried) == 1:
                rates[variant.name, task.name] = tried[0]
        cells = folder / CELLS_FOLDER
        chosen = list(filter(only, grid.tuning_cells()))
        tuned = run_stage(TUNE, chosen, cells, engine, progress)
        rates |= choose_rates(study, tuned)
        chosen = list(filter(only, grid.report_cells(rates)))
        reported = run_stage(REPORT, chosen, cells, engine, progress)
        results = StudyResults(grid, rates, [*tuned, *reported])
        write_results(results, folder)
    return results


def choose_rates(study: Study, tuned: Sequence[CellResult]) -> dict[PairKey, float]:
    """Choose the learning rate with the best validation metric for each variant on each task.

    None where all cells failed. If the metric is not measured during training, as for generated
    texts, the validation loss chooses.
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


def write_results(results: StudyResults, folder: Path) -> None:
    """Write all cells in the order of the study; their times go to a separate file."""
    times = [{"id": one.cell.id, **one.result.get("timing", {})} for one in results.cells]
    records = {RESULTS_FILE: [one.record for one in results.cells], TIMINGS_FILE: times}
    contents: dict[str, bytes] = {}
    for name, rows in records.items():
        lines = [json.dumps(row, sort_keys=name == RESULTS_FILE) for row in rows]
        contents[name] = "".join(f"{line}\n" for line in lines).encode()
    write_together(folder, contents)


def run_stage(
    stage: str,
    cells: Sequence[Cell],
    folder: Path,
    engine: CellEngine,
    progress: Callable[[str], object],
) -> list[CellResult]:
    """Run the cells of a stage by an engine, and report each; finished ones are not run again."""
    done: dict[str, Mapping[str, Any]] = {}
    for cell in cells:
        stored = read_result(folder / cell.id)
        if stored is not None:
            done[cell.id] = stored
    if done:
        progress(f"{stage:<6}  {len(done)}/{len(cells)}  finished before")
    pending = [cell for cell in cells if cell.id not in done]
    time_left = TimeLeft()
    time_left.seconds(CountedMessage(stage, len(done), len(cells), "cells"))
    for cell, result in engine.run_cells(pending, folder):
        done[cell.id] = result
        message = CountedMessage(stage, len(done), len(cells), "cells")
        line = f"{stage:<6}  {make_progress_line(len(done), len(cells), cell, result)}"
        seconds = time_left.seconds(message)
        if seconds is not None:
            line += f", {format_duration(seconds)} left"
        progress(line)
    return [CellResult(cell, stage, done[cell.id]) for cell in cells]


# --- The price of a study before it runs ----------------------------------------------------------


TRIAL_STEPS = 6
FORWARD_SHARE = 1 / 3  # of a training step: the backward pass takes about two forward passes


@dataclass(frozen=True)
class CellPrice:
    """Price one report cell of a variant on a task, and count its cells.

    `rates` are the learning rates that are tried, each in a tuning cell of half the steps if there
    are several. `seconds` is None if no steps were timed, or if they failed, which `problem`
    explains.
    """

    variant: str
    task: str
    seeds: int
    rates: tuple[float, ...]
    steps: int
    model: VariantModel
    seconds: float | None
    problem: str = ""

    @property
    def tuning_cells(self) -> int:
        """Count the cells that choose the learning rate."""
        return len(self.rates) if len(self.rates) > 1 else 0

    @property
    def flops(self) -> int:
        """Count FLOPs of the training of one cell."""
        return self.steps * self.model.step_flops


@dataclass(frozen=True)
class StudyPlan:
    """Hold the prices of all cells of a study, and the number of processes that share them."""

    study: Study
    prices: tuple[CellPrice, ...]
    jobs: int

    @property
    def num_cells(self) -> int:
        """Count cells, including those that choose learning rates."""
        return sum(price.seeds + price.tuning_cells for price in self.prices)

    @property
    def seconds(self) -> float | None:
        """Predict the duration of the study; None if some cells were not timed."""
        total = 0.0
        for price in self.prices:
            if price.seconds is None:
                return None
            total += (price.seeds + price.tuning_cells / 2) * price.seconds
        return total / max(1, self.jobs)

    @property
    def data(self) -> list[dict[str, Any]]:
        """Return the prices as plain values."""
        records: list[dict[str, Any]] = []
        for price in self.prices:
            size = {name: value for name, value in vars(price.model).items() if name != "spec"}
            record = {**vars(price), **size}
            del record["model"]
            records.append(record)
        return records

    def check_budget(self, hours: float) -> None:
        """Raise SpecError if the study is predicted to take longer."""
        if self.seconds is not None and self.seconds > hours * 3600:
            raise SpecError(
                f"the study {self.study.name!r} has {self.num_cells} cells and would take about "
                f"{format_seconds(self.seconds)}, more than the budget of {hours:g} h; give fewer "
                "variants, seeds or steps, a smaller --scale, or a larger --budget"
            )


def plan_study(
    study: Study, engine: ProcessEngine, progress: Callable[[str], object] = lambda line: None
) -> StudyPlan:
    """Price every cell; times come from a few training steps of each variant on each task, run by
    the engine.
    """
    grid = CellGrid(study)
    trials = {
        (variant.name, task.name): _trial_cell(grid, variant.name, task.name)
        for variant, task in grid.pairs
    }
    timings: dict[str, Mapping[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="headwise-plan-") as folder, engine:
        progress("starting the processes")
        # One trial for each process, so that imports and compilation are not timed.
        first = next(iter(trials))
        seeds = range(1, max(1, engine.jobs) + 1)
        for _ in engine.run_cells(
            [_trial_cell(grid, *first, seed) for seed in seeds], Path(folder)
        ):
            pass
        for number, (cell, result) in enumerate(
            engine.run_cells(list(trials.values()), Path(folder)), 1
        ):
            timings[cell.id] = result
            progress(f"timing {number}/{len(trials)}  {cell.task}  {cell.variant}")
    prices: list[CellPrice] = []
    for variant, task in grid.pairs:
        key = (variant.name, task.name)
        recipe = grid.recipes[key]
        result = timings[trials[key].id]
        is_done = result["status"] == "done"
        seconds = None
        if is_done:  # the trial's seconds, scaled to the recipe's steps and evaluations
            timing = result["timing"]
            step = timing["step"]
            evaluations = -(-recipe.steps // recipe.evaluate_every)
            evaluation = recipe.evaluate_batches * step * FORWARD_SHARE
            fixed = max(0.0, timing["processor"] - TRIAL_STEPS * step - evaluation)
            edits = [edit.training_steps for _, edit in study.edits_of(variant.name)]
            steps = recipe.steps + sum(edits)
            seconds = fixed + steps * step + (evaluations + len(edits)) * evaluation
        prices.append(
            CellPrice(
                *key,
                seeds=len(study.seeds),
                rates=grid.rates(variant, task),
                steps=recipe.steps,
                model=grid.models[key],
                seconds=seconds,
                problem="" if is_done else f"{result['status']}: {result.get('message', '')}",
            )
        )
    return StudyPlan(study, tuple(prices), engine.jobs)


def _trial_cell(grid: CellGrid, variant: str, task: str, seed: int = 0) -> Cell:
    """Cut the first cell of a variant on a task to a few steps, one evaluation and no edits."""
    arm = grid.study.variants[variant]
    of_task = grid.study.tasks[task]
    cell = grid.cell(arm, of_task, grid.rates(arm, of_task)[0], seed)
    recipe = {**cell.config["recipe"], "steps": TRIAL_STEPS, "evaluate_every": TRIAL_STEPS}
    return replace(cell, config={**cell.config, "recipe": recipe, "edits": {}})


def tabulate_plan(plan: StudyPlan) -> Table:
    """Tabulate the plan, with the time of the study and problems as notes."""
    columns = [
        *("task", "variant", "seeds", "learning rates", "steps", "parameters"),
        Column("FLOPs", format_count),
        "KV bytes",
        Column("time", format_seconds),
    ]
    rows: list[list[Value]] = []
    notes: list[str] = []
    for price in plan.prices:
        model = price.model
        rates = ", ".join(f"{rate:g}" for rate in price.rates)
        row: list[Value] = [price.task, price.variant, price.seeds, rates, price.steps]
        rows.append([*row, model.parameters, float(price.flops), model.kv_bytes, price.seconds])
        if price.problem:
            notes.append(f"{price.variant} on {price.task} cannot run: {price.problem}")
    matches = {f"{one.variant}: {one.model.match}" for one in plan.prices if one.model.match}
    where = f"with {plan.jobs} processes" if plan.jobs else "in this process"
    total = "unknown time" if plan.seconds is None else format_seconds(plan.seconds)
    about = (
        f"{total} in all {where}; the column is the time of one cell, from {TRIAL_STEPS} steps "
        "timed here; a learning rate is tried with half the steps"
    )
    count = pluralise(plan.num_cells, "cell")
    title = f"{plan.study.name}, scale {plan.study.scale}: {count}"
    return Table(title, columns, rows, [about, *notes, *sorted(matches)])


# --- Decoding of a study's models against context length ------------------------------------------


DECODE_FILE = "decoding.json"
CONTEXTS = (64, 256, 1024, 4096)
STEPS = 9  # timed at each context, after one that is not
FORMAT = 1  # grows when other things are measured


def read_decode_times(grid: CellGrid, folder: Path) -> Mapping[str, Any]:
    """Time decoding of each variant on the first task with a decoder.

    Measured once, then read from the study's folder. The result has `task`, and `variants`: by name
    a list with one record for each context, or a note why there is none.
    """
    path = folder / DECODE_FILE
    baseline = grid.study.baseline
    tasks = [
        name for name in grid.study.tasks if grid.models[baseline, name].spec.kind == "decoder"
    ]
    if not tasks:
        return {"task": None, "variants": {}}
    task = tasks[0]
    specs = {name: grid.models[name, task].spec for name in grid.study.variants}
    key = {"format": FORMAT, "task": task}
    if path.exists():
        stored = read_json_file(path)
        if stored.items() >= key.items() and list(stored["variants"]) == list(specs):
            return stored
    measured = {**key, "variants": {name: measure_decoding(spec) for name, spec in specs.items()}}
    write_atomically(path, json.dumps(measured, indent=1).encode() + b"\n")
    return measured


@compile_when_called()
@use_threads(1)
def measure_decoding(
    spec: ModelSpec, contexts: Sequence[int] = CONTEXTS
) -> list[dict[str, Any]] | str:
    """Measure decoding at each context, for one row and random weights.

    Returns processor seconds of a prompt and of a decode step, and bytes of the cache; or why the
    model does not decode.
    """
    net = build(spec, seed=0).eval()
    generator = torch.Generator().manual_seed(0)
    records: list[dict[str, Any]] = []
    for context in contexts:
        ids = torch.randint(0, spec.heads[0].outputs, (1, context), generator=generator)
        try:
            if not records:  # the first call compiles kernels
                _measure_context(net, ids)
            records.append(_measure_context(net, ids))
        except (SpecError, ValueError, NotImplementedError) as error:
            return records or str(error)
    return records


@torch.inference_mode()
def _measure_context(net: Transformer, ids: torch.Tensor) -> dict[str, Any]:
    """Time the prompt `ids` and a next step; count cache bytes by formula and as held."""
    capacity = ids.shape[1] + STEPS + 1
    cache = net.cache(batch=1, capacity=capacity)
    prompt = _time_call(net, ids, cache)
    seconds = [_time_call(net, ids[:, :1], cache) for _ in range(STEPS + 1)][1:]
    return {
        "context": ids.shape[1],
        "prompt": prompt,
        "step": statistics.median(seconds),
        "formula": count_cache_bytes(net.spec, capacity),
        "held": cache.nbytes,
    }


def _time_call(net: Transformer, ids: torch.Tensor, cache: ModelCache) -> float:
    start = time.process_time()
    net(ids, cache=cache)
    return time.process_time() - start
