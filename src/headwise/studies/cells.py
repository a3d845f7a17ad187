"""Cells: the training runs of a study, each with an id that depends only on what determines its
numbers.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..models import build
from ..models.distributed import join_process_group
from ..models.distributed.model_sharding import shard_model
from ..models.model_spec import ModelSpec, serialization as model_serialization
from ..training.data import Task
from ..training.evaluation import sum_batch_metrics
from ..training.recipe import Recipe, from_dict, to_dict
from ..training.run_setup import TrainingSetup
from ..training.train_step import StepOptions, TrainStep, check_model
from ..util.errors import SpecError
from .study_file import CELL_EXECUTION, Readout, Study, StudyTask, Variant
from .variant_models import VariantModel, make_variant_model

# It grows when the results of a cell change, so that old results are not mixed with new ones.
CELL_FORMAT = 3
ID_LENGTH = 12
MIN_CHECKPOINT_STEPS = 50  # shorter runs take seconds, of which checkpoints would be a tenth

PairKey = tuple[str, str]  # a variant and a task


@dataclass(frozen=True)
class Cell:
    """One training run: a variant on a task with a learning rate and a seed.

    `config` holds everything that determines its numbers, as plain values; equal configs have equal
    ids, also in different studies.
    """

    variant: str
    task: str
    rate: float
    seed: int
    config: Mapping[str, Any]

    @property
    def id(self) -> str:
        """Hash of the config, the name of the cell's folder."""
        text = json.dumps(self.config, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:ID_LENGTH]


class CellGrid:
    """The models of a study, one for each variant on each task, and the cells that train them."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self.recipes: dict[PairKey, Recipe] = {}
        self.models: dict[PairKey, VariantModel] = {}
        for variant, task in self.pairs:
            key = (variant.name, task.name)
            recipe = make_recipe(study, variant, task)
            model = make_variant_model(study, variant, task, task.task.batch(0, recipe.batch))
            self.recipes[key] = recipe
            self.models[key] = model
            check_training(study, variant, task, model.spec, recipe)
        for task in study.tasks.values():
            self._check_all_differ(task.name)
        for contrast in study.contrasts:
            self._check_step(contrast.left)
            self._check_step(contrast.right)

    @property
    def pairs(self) -> Iterator[tuple[Variant, StudyTask]]:
        """Every variant with every task, task by task."""
        for task in self.study.tasks.values():
            for variant in self.study.variants.values():
                yield variant, task

    def _check_all_differ(self, task: str) -> None:
        """Raise if two variants would train the same model in the same way."""
        names: dict[tuple[ModelSpec, Recipe, tuple[float, ...]], str] = {}
        for name, variant in self.study.variants.items():
            key = (self.models[name, task].spec, self.recipes[name, task], self.rates(variant))
            if key in names:
                raise SpecError(
                    f"the variants {names[key]!r} and {name!r} are the same model on {task!r}; "
                    "leave one out, or give it other options"
                )
            names[key] = name

    def _check_step(self, readout: Readout) -> None:
        """Raise unless the heads of the readout are measured at its step on one task or more."""
        if readout.place != "at step":
            return
        problems = [
            explain_missing_step(self.recipes[readout.variant, task], readout.name)
            for task in self.study.tasks
        ]
        if all(problems):
            raise SpecError(f"the contrast of {readout.text!r} cannot be measured: {problems[0]}")

    def rates(self, variant: Variant) -> tuple[float, ...]:
        """The learning rates that are tried for a variant."""
        return variant.rates or self.study.rates

    def tuning_cells(self) -> list[Cell]:
        """The cells that choose a learning rate, for variants with more than one."""
        cells: list[Cell] = []
        for variant, task in self.pairs:
            rates = self.rates(variant)
            if len(rates) > 1:
                cells += [self.cell(variant, task, rate, self.study.tuning_seed) for rate in rates]
        return cells

    def report_cells(self, chosen: Mapping[PairKey, float]) -> list[Cell]:
        """The cells of the report, with the learning rate chosen for each variant on each task."""
        cells: list[Cell] = []
        for variant, task in self.pairs:
            rate = chosen.get((variant.name, task.name))
            if rate is not None:
                cells += [self.cell(variant, task, rate, seed) for seed in self.study.seeds]
        return cells

    def cell(self, variant: Variant, task: StudyTask, rate: float, seed: int) -> Cell:
        """The cell of a variant on a task, with this learning rate and seed."""
        key = (variant.name, task.name)
        recipe = from_dict({"lr": rate, "seed": seed}, self.recipes[key])
        config = {
            "format": CELL_FORMAT,
            "task": describe_task(task.task),
            "metric": task.metric,
            "tests": {name: describe_task(test) for name, test in task.tests.items()},
            "model": model_serialization.to_dict(self.models[key].spec),
            "recipe": to_dict(recipe),
            "head_texts": self.study.head_texts,
            "edits": {name: vars(edit) for name, edit in self.study.edits.items()},
        }
        return Cell(variant.name, task.name, rate, seed, json.loads(json.dumps(config)))


def make_recipe(study: Study, variant: Variant, task: StudyTask) -> Recipe:
    """The recipe of a variant on a task: the study's, changed by the task and
    then by the variant.
    """
    changes = {**study.recipe, **task.recipe, **variant.recipe}
    try:
        steps = from_dict(changes).steps
        evaluations = {
            "evaluate_every": max(1, steps // 10),
            "checkpoint_every": max(MIN_CHECKPOINT_STEPS, steps // 4),
            "keep": 1,
        }
        return from_dict({**evaluations, **changes, **CELL_EXECUTION})
    except SpecError as error:
        raise SpecError(f"the recipe of {variant.name!r} on {task.name!r}: {error}") from None


def check_training(
    study: Study, variant: Variant, task: StudyTask, spec: ModelSpec, recipe: Recipe
) -> None:
    """Raise SpecError unless a cell can begin: build and edit its model, train on one example, and
    test on one of each test.
    """
    where = "the model"
    recipe = replace(recipe, batch=1, accumulate=1)
    try:
        net = build(spec, seed=recipe.seed, dropout=recipe.dropout, init=recipe.init)
        where = "a training step"
        with join_process_group() as launch:
            setup = TrainingSetup.of(task.task, spec, recipe, Path(), launch)
        step = TrainStep(
            shard_model(net, setup.ranks), recipe, StepOptions("fp32", "off", attention="plain")
        )
        step.compute_gradients(setup.first_batch)
        for name, test in task.tests.items():
            where = f"the test {name!r}"
            check_model(spec, test)
            sum_batch_metrics(net, test, (1, 1), "test")
        for name, edit in study.edits.items():
            where = f"the edit {name!r}"
            edit.check_model(net)
    except ValueError as error:
        raise SpecError(
            f"the variant {variant.name!r} on {task.name!r} cannot be run; {where}: {error}"
        ) from None


def explain_missing_step(recipe: Recipe, text: str) -> str:
    """Why the heads may not be measured at a step, with a remedy; "" at step 0 and where a
    checkpoint is kept.

    Any evaluation can be the best so far and write a checkpoint, which counts among the last
    `keep`.
    """
    step = int(text)
    last = recipe.steps
    every = recipe.checkpoint_every
    if step == 0:
        return ""
    if step > last or (step % every and step != last):
        return (
            f"checkpoints are written every {every} steps and at the last, {last}; use one of "
            "these, or step 0"
        )
    # Later multiples of either number, those of both counted once, and the last step.
    later = sum(last // number - step // number for number in (every, recipe.evaluate_every))
    common = math.lcm(every, recipe.evaluate_every)
    later -= last // common - step // common
    later += step < last and last % every > 0 and last % recipe.evaluate_every > 0
    if 1 < recipe.keep > later:
        return ""
    fact = "heads are only measured at step 0"
    if recipe.keep > 1:
        fact = f"up to {later} later ones replace it"
    return (
        f"with recipe.keep = {recipe.keep} {fact}; set recipe.keep = {max(2, later + 1)}, or "
        "use step 0"
    )


def describe_task(task: Task) -> dict[str, Any]:
    """A task as plain values, from which `make_task` makes it again."""
    return {
        "task": task.name,
        **{one.name: getattr(task, one.name) for one in fields(task) if one.init},
    }
