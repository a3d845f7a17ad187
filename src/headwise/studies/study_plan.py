"""The price of a study before it runs: parameters, FLOPs and time of every cell, from a few real
training steps.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..report.data import Column, Table, Value
from ..report.numbers import format_count, format_seconds
from ..util.errors import SpecError, pluralise
from .cells import Cell, CellGrid
from .process_engine import ProcessEngine
from .study_file import Study
from .variant_models import ModelSize

TRIAL_STEPS = 6
FORWARD_SHARE = 1 / 3  # of a training step: the backward pass takes about two forward passes


@dataclass(frozen=True)
class CellPrice:
    """The price of one cell of a variant on a task, and the number of such cells.

    `seconds` is None if no steps were timed, or if they failed, which `problem` explains.
    """

    variant: str
    task: str
    count: int
    steps: int
    size: ModelSize
    match: str
    seconds: float | None
    problem: str = ""

    @property
    def flops(self) -> int:
        """FLOPs of the training of one cell."""
        return self.steps * self.size.step_flops


@dataclass(frozen=True)
class StudyPlan:
    """The prices of all cells of a study, and the number of processes that share them."""

    study: Study
    prices: tuple[CellPrice, ...]
    jobs: int

    @property
    def num_cells(self) -> int:
        """Number of cells, those that choose learning rates included."""
        return sum(price.count for price in self.prices)

    @property
    def seconds(self) -> float | None:
        """Predicted duration of the study; None if some cells were not timed."""
        total = 0.0
        for price in self.prices:
            if price.seconds is None:
                return None
            total += price.count * price.seconds
        return total / max(1, self.jobs)

    @property
    def data(self) -> list[dict[str, Any]]:
        """The prices as plain values."""
        records: list[dict[str, Any]] = []
        for price in self.prices:
            record = {**vars(price), **price.size._asdict()}
            del record["size"]
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
        for _ in engine.run(_warm_up_cells(grid, engine.jobs), Path(folder)):
            pass
        for number, (cell, result) in enumerate(engine.run(list(trials.values()), Path(folder)), 1):
            timings[cell.id] = result
            progress(f"timing {number}/{len(trials)}  {cell.task}  {cell.variant}")
    prices: list[CellPrice] = []
    for variant, task in grid.pairs:
        key = (variant.name, task.name)
        num_rates = len(grid.rates(variant))
        recipe = grid.recipes[key]
        result = timings[trials[key].id]
        is_done = result["status"] == "done"
        prices.append(
            CellPrice(
                *key,
                count=len(study.seeds) + (num_rates if num_rates > 1 else 0),
                steps=recipe.steps,
                size=grid.models[key].size,
                match=grid.models[key].match,
                seconds=_predict_seconds(grid, key, result["timing"]) if is_done else None,
                problem="" if is_done else f"{result['status']}: {result.get('message', '')}",
            )
        )
    return StudyPlan(study, tuple(prices), engine.jobs)


def _warm_up_cells(grid: CellGrid, jobs: int) -> list[Cell]:
    """One trial for each process, so that imports and compilation are not timed."""
    variant, task = next(grid.pairs)
    return [_trial_cell(grid, variant.name, task.name, seed) for seed in range(1, max(1, jobs) + 1)]


def _trial_cell(grid: CellGrid, variant: str, task: str, seed: int = 0) -> Cell:
    """The first cell of a variant on a task, cut to a few steps and one evaluation."""
    study = grid.study
    cell = grid.cell(
        study.variants[variant], study.tasks[task], grid.rates(study.variants[variant])[0], seed
    )
    recipe = {**cell.config["recipe"], "steps": TRIAL_STEPS, "evaluate_every": TRIAL_STEPS}
    return replace(cell, config={**cell.config, "recipe": recipe})


def _predict_seconds(grid: CellGrid, key: tuple[str, str], timing: Mapping[str, float]) -> float:
    """Processor seconds of a whole cell: the trial's, with its steps and its evaluation repeated as
    often as the recipe says.
    """
    recipe = grid.recipes[key]
    step = timing["step"]
    evaluations = -(-recipe.steps // recipe.evaluate_every)
    evaluation = recipe.evaluate_batches * step * FORWARD_SHARE
    fixed = max(0.0, timing["processor"] - TRIAL_STEPS * step - evaluation)
    return fixed + recipe.steps * step + evaluations * evaluation


def tabulate_plan(plan: StudyPlan) -> Table:
    """The plan as a table, with the time of the study and problems as notes."""
    columns = [
        *("task", "variant", "cells", "steps", "parameters"),
        Column("FLOPs", format_count),
        "KV bytes",
        Column("time", format_seconds),
    ]
    rows: list[list[Value]] = []
    notes: list[str] = []
    for price in plan.prices:
        size = price.size
        row: list[Value] = [price.task, price.variant, price.count, price.steps, size.parameters]
        rows.append([*row, float(price.flops), size.kv_bytes, price.seconds])
        if price.problem:
            notes.append(f"{price.variant} on {price.task} cannot run: {price.problem}")
    matches = {f"{price.variant}: {price.match}" for price in plan.prices if price.match}
    where = f"with {plan.jobs} processes" if plan.jobs else "in this process"
    total = "unknown time" if plan.seconds is None else format_seconds(plan.seconds)
    about = (
        f"{total} in all {where}; the column is the time of one cell, from {TRIAL_STEPS} steps "
        "timed here"
    )
    count = pluralise(plan.num_cells, "cell")
    title = f"{plan.study.name}, scale {plan.study.scale}: {count}"
    return Table(title, columns, rows, [about, *notes, *sorted(matches)])
