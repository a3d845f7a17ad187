"""Cells: the training runs of a study, each with an id that depends only on what determines its
numbers.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..attention.interfaces.part_types import Modifier
from ..attention.presets import design, from_json, from_toml
from ..attention.spec import attention_spec, serialization
from ..attention.spec.attention_spec import SLOTS, AttentionSpec
from ..costs import cache_bytes, count_parameters
from ..costs.size_matching import SizeMatch, list_sizes, match_size
from ..costs.workload import Workload
from ..models import build
from ..models.distributed import join_process_group
from ..models.distributed.sharded_model import shard_model
from ..models.model_spec import ModelSpec, serialization as model_serialization
from ..training.data import Batch, Task
from ..training.data.synthetic_task import (
    NETWORKS,
    ModelShape,
    make_small_decoder,
    make_small_encoder,
    make_small_translator,
)
from ..training.evaluation import sum_batch_metrics
from ..training.recipe import Recipe, from_dict, to_dict
from ..training.run_setup import TrainingSetup, replace_self_attention
from ..training.train_step import StepOptions, TrainStep, check_model, count_step_flops
from ..util.errors import SpecError
from .study_file import CELL_EXECUTION, Readout, Study, StudyTask, Variant

# It grows when the results of a cell change, so that old results are not mixed with new ones.
CELL_FORMAT = 4
ID_LENGTH = 12
MIN_CHECKPOINT_STEPS = 50  # in shorter runs of seconds, checkpoints would take a tenth of the time

PairKey = tuple[str, str]  # a variant and a task


@dataclass(frozen=True)
class Cell:
    """Specify one training run: a variant on a task with a learning rate and a seed.

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
        """Hash the config; names the cell's folder."""
        text = json.dumps(self.config, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:ID_LENGTH]


class CellGrid:
    """Hold the models of a study, one per variant and task, and the cells that train them."""

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
            # Raise if two variants would train the same model in the same way.
            names: dict[tuple[ModelSpec, Recipe, tuple[float, ...]], str] = {}
            for name, variant in study.variants.items():
                key = (name, task.name)
                trained = (self.models[key].spec, self.recipes[key])
                other = names.setdefault((*trained, self.rates(variant, task)), name)
                if other != name:
                    raise SpecError(
                        f"the variants {other!r} and {name!r} are the same model on {task.name!r}; "
                        "leave one out, or give it other options"
                    )
        for contrast in study.contrasts:
            self._check_step(contrast.left)
            self._check_step(contrast.right)

    @property
    def pairs(self) -> Iterator[tuple[Variant, StudyTask]]:
        """List every variant with every task, task by task."""
        for task in self.study.tasks.values():
            for variant in self.study.variants.values():
                yield variant, task

    def _check_step(self, readout: Readout) -> None:
        """Raise unless the heads of the readout are measured at its step on at least one task."""
        if readout.place != "at step":
            return
        problems = [
            explain_missing_step(self.recipes[readout.variant, task], readout.name)
            for task in self.study.tasks
        ]
        if all(problems):
            raise SpecError(f"the contrast of {readout.text!r} cannot be measured: {problems[0]}")

    def rates(self, variant: Variant, task: StudyTask) -> tuple[float, ...]:
        """Return the learning rates to try for a variant on a task."""
        return self.study.recipe_changes(variant, task)["lr"]

    def tuning_cells(self) -> list[Cell]:
        """List the cells that choose a learning rate, for variants with more than one.

        They take half the steps, and only validate: no tests, heads or edits.
        """
        cells: list[Cell] = []
        for variant, task in self.pairs:
            rates = self.rates(variant, task)
            for rate in rates if len(rates) > 1 else ():
                cell = self.cell(variant, task, rate, self.study.tuning_seed)
                recipe = dict(cell.config["recipe"])
                for name in ("steps", "evaluate_every", "checkpoint_every"):
                    recipe[name] = max(1, recipe[name] // 2)
                changes = {"recipe": recipe, "tests": {}, "head_texts": 0, "edits": {}}
                cells.append(replace(cell, config={**cell.config, **changes}))
        return cells

    def report_cells(self, chosen: Mapping[PairKey, float]) -> list[Cell]:
        """List the cells of the report, with the learning rate chosen for each variant on each
        task.
        """
        cells: list[Cell] = []
        for variant, task in self.pairs:
            rate = chosen.get((variant.name, task.name))
            if rate is not None:
                cells += [self.cell(variant, task, rate, seed) for seed in self.study.seeds]
        return cells

    def cell(self, variant: Variant, task: StudyTask, rate: float, seed: int) -> Cell:
        """Make the cell of a variant on a task, with this learning rate and seed."""
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
            "edits": {name: vars(edit) for name, edit in self.study.edits_of(variant.name)},
        }
        return Cell(variant.name, task.name, rate, seed, json.loads(json.dumps(config)))


def make_recipe(study: Study, variant: Variant, task: StudyTask) -> Recipe:
    """Return the recipe of a variant on a task, with its first learning rate."""
    changes = study.recipe_changes(variant, task)
    changes["lr"] = changes["lr"][0]
    try:
        steps = from_dict(changes).steps
        evaluations = {
            "evaluate_every": max(1, steps // 10),
            "checkpoint_every": max(MIN_CHECKPOINT_STEPS, steps // 4),
            "keep": 1,
        }
        return from_dict({**evaluations, **changes, **CELL_EXECUTION, "device": study.device})
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
            setup = TrainingSetup.prepare(task.task, spec, recipe, Path(), launch)
        step = TrainStep(
            shard_model(net, setup.ranks), recipe, StepOptions("fp32", "off", attention="plain")
        )
        step.compute_gradients(setup.first_batch)
        for name, test in task.tests.items():
            where = f"the test {name!r}"
            check_model(spec, test)
            sum_batch_metrics(net, test, (1, 1), "test")
        for name, edit in study.edits_of(variant.name):
            where = f"the edit {name!r}"
            edit.check_model(net)
    except ValueError as error:
        raise SpecError(
            f"the variant {variant.name!r} on {task.name!r} cannot be run; {where}: {error}"
        ) from None


def explain_missing_step(recipe: Recipe, text: str) -> str:
    """Explain why heads cannot be measured at a step, with a remedy.

    Returns "" at step 0 and where a checkpoint is kept. Any evaluation can be the best so far and
    write a checkpoint, which counts among the last `keep`.
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
    # Later multiples of either number, common ones counted once, and the last step.
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
    """Return a task as plain values, so that `make_task` can make it again."""
    return {
        "task": task.name,
        **{one.name: getattr(task, one.name) for one in fields(task) if one.init},
    }


# --- The model of a variant on a task -------------------------------------------------------------


# Options that are passed to `design`; others are fields of the spec.
DESIGN_OPTIONS = ("kv", "dim", "vdim", "bias", "pattern")
BYTES_PER_VALUE = 4  # cells are trained in fp32
FIXED_SIZES = ("model", "q")  # matching changes other sizes of a layer


@dataclass(frozen=True)
class VariantModel:
    """Hold the model spec of a variant on a task, how it was matched, and its size and cost.

    Parameters, FLOPs of one training step, and KV bytes of a row in fp32.
    """

    spec: ModelSpec
    match: str
    parameters: int
    attention_parameters: int
    step_flops: int
    kv_bytes: int | None


def make_variant_model(
    study: Study, variant: Variant, task: StudyTask, batch: Batch
) -> VariantModel:
    """Make the model of a variant, matched to the baseline's if the study matches sizes.

    `batch` has its lengths.
    """
    spec = _edit_model(study, variant, task)
    match = ""
    if study.match != "none" and variant.name != study.baseline:
        baseline = _edit_model(study, study.variants[study.baseline], task)
        try:
            spec, match = _match_model(study, spec, baseline, batch)
        except SpecError as error:
            raise SpecError(
                f"the variant {variant.name!r} cannot be matched on {task.name!r} by "
                f"{study.match}: {error}"
            ) from None
    attention = sum(count_parameters(layer) for _, layer in spec.attention_specs())
    kv_bytes = None
    if batch.x.dim() == 2:
        with suppress(SpecError):  # a layer is not causal, as in encoders
            kv_bytes = count_cache_bytes(spec, batch.x.shape[1])
    flops = count_step_flops(spec, batch)
    return VariantModel(spec, match, count_parameters(spec), attention, flops, kv_bytes)


def count_cache_bytes(spec: ModelSpec, length: int) -> int:
    """Count the bytes that decoding keeps for one row of this length, in fp32."""
    layers = [layer for _, layer in spec.attention_specs()]
    attention = sum(cache_bytes(layer, batch=1, capacity=length) for layer in layers)
    return attention + BYTES_PER_VALUE * spec.num_state_values


# --- The size of a task's own model ---------------------------------------------------------------


def read_shape(spec: ModelSpec) -> ModelShape:
    """Read the width, heads, layers, feed-forward width and positions of a task's model.

    >>> from headwise.training.data import make_task
    >>> read_shape(make_task("recall").model())
    ModelShape(width=64, heads=4, layers=2)
    """
    stack = spec.stacks[-1]
    block = stack.layers[0]
    attention = block.attention
    if (
        not isinstance(attention, AttentionSpec)
        or stack.embedding is None
        or not stack.embedding.tokens
    ):
        raise SpecError(
            f"the model {spec.name!r} is not one of the small token models; leave the table "
            "[model] out"
        )
    rotary = any(modifier.positional for modifier in attention.modifiers)
    positions = "rotary" if rotary else "sinusoidal" if stack.embedding.positions else "none"
    feed = 0 if block.feed is None else getattr(block.feed, "hidden", 0)
    return ModelShape(stack.model, attention.heads.q, len(stack.layers), feed, positions)


def resize_model(task: Task, changes: Mapping[str, Any]) -> ModelSpec:
    """Change the width, heads, layers, feed-forward width, positions or network of a task's model.

    >>> from headwise.training.data import make_task
    >>> [
    ...     block.mixer
    ...     for block in resize_model(make_task("dates"), {"network": "gru-fixed"}).stacks[1].layers
    ... ]
    [RecurrentSpec(initial='source'), RecurrentSpec(initial='source')]
    """
    own = task.model()
    if not changes:
        return own
    shape = replace(read_shape(own), **changes)
    if own.kind not in NETWORKS[shape.network]:
        fitting = ", ".join(name for name, kinds in NETWORKS.items() if own.kind in kinds)
        raise SpecError(
            f"network = {shape.network!r} is for models of kind "
            f"{' or '.join(NETWORKS[shape.network])}, but that of {own.name} is {own.kind}; use "
            f"one of {fitting}"
        )
    stack = own.stacks[-1]
    assert stack.embedding is not None  # read_shape has checked it
    vocabulary = stack.embedding.tokens
    if own.kind == "encoder-decoder":
        return make_small_translator(own.name, vocabulary, shape)
    if own.kind == "decoder":
        return make_small_decoder(own.name, vocabulary, shape)
    attention = stack.layers[0].attention
    assert isinstance(attention, AttentionSpec)  # read_shape has checked it
    return make_small_encoder(own.name, vocabulary, shape, own.heads[0], attention.pattern)


# --- The attention of a variant -------------------------------------------------------------------


def _edit_model(study: Study, variant: Variant, task: StudyTask) -> ModelSpec:
    spec = resize_model(task.task, {**study.model, **task.model, **variant.model})
    if not (variant.preset or variant.spec or variant.options):
        return spec
    file_spec = None
    if variant.spec:
        path = study.folder / variant.spec
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SpecError(f"the spec {path} cannot be read: {error}") from None
        file_spec = (from_json if path.suffix == ".json" else from_toml)(text)
    return replace_self_attention(spec, partial(_edit_attention, variant, file_spec))


def _edit_attention(
    variant: Variant, file_spec: AttentionSpec | None, old: AttentionSpec
) -> AttentionSpec:
    options = dict(variant.options)
    design_options = {key: options.pop(key) for key in DESIGN_OPTIONS if key in options}
    new = old if file_spec is None else file_spec
    if variant.preset:
        new = design(preset=variant.preset, model=old.model, heads=old.heads.q, **design_options)
    elif design_options:
        parts: dict[str, Any] = {slot: getattr(new, slot) for slot in SLOTS}
        parts["modifiers"] = tuple(part for _, part in new.parts_of(Modifier))
        sizes = {"model": new.model, "heads": new.heads.q}
        new = design(**{**parts, **sizes, **design_options})
    if new.model != old.model:
        raise SpecError(
            f"the spec of the variant {variant.name!r} has model={new.model}, but the model of "
            f"the task has {old.model}; set model.width = {new.model} in the study"
        )
    if not options:
        return new
    table = serialization.to_dict(new)
    for path, value in options.items():
        *parents, last = path.split(".")
        target: Any = table
        for key in parents:
            target = target.get(key) if isinstance(target, dict) else None
        if not isinstance(target, dict):
            raise SpecError(
                f"the variant {variant.name!r} sets {path}, but its spec has no {'.'.join(parents)}"
            )
        target[last] = value
    return attention_spec.from_dict(table)


# --- Matching -------------------------------------------------------------------------------------


# Matches of this process: layers of a model, other tasks and other scales are mostly alike.
_matches: dict[tuple[AttentionSpec, AttentionSpec, str, float, Workload], SizeMatch] = {}


def _match_model(
    study: Study, spec: ModelSpec, baseline: ModelSpec, batch: Batch
) -> tuple[ModelSpec, str]:
    """Match each self-attention to the baseline's of the same name; describe the sizes too."""
    goals = [layer for name, layer in baseline.attention_specs() if not name.endswith("cross")]
    length = batch.x.shape[1] if batch.x.dim() == 2 else 1
    workload = Workload() if study.match == "params" else Workload(context=length)
    sentences: list[str] = []
    remaining = iter(goals)

    def match_layer(old: AttentionSpec) -> AttentionSpec:
        goal = next(remaining, goals[-1])
        key = (old, goal, study.match, study.tolerance, workload)
        match = _matches[key] = _matches.get(key) or _match_layer(*key)
        sentences.append(str(match))
        return match.spec

    return replace_self_attention(spec, match_layer), "; ".join(dict.fromkeys(sentences))


def _match_layer(
    old: AttentionSpec, goal: AttentionSpec, by: str, tolerance: float, workload: Workload
) -> SizeMatch:
    """Match the first size that reaches the goal.

    Never changes the model width or the query heads, which the whole model shares.
    """
    sizes = {name: size for name, size in list_sizes(old).items() if name not in FIXED_SIZES}
    matches: list[SizeMatch] = []
    for free in sizes:
        with suppress(SpecError):
            matches.append(match_size(old, like=goal, by=by, free=free, workload=workload))
            if abs(matches[-1].difference) <= tolerance:
                return matches[-1]
    fact = f"no single one of its sizes ({sizes}) reaches the baseline's"
    if matches:
        fact = f"the nearest is {min(matches, key=lambda match: abs(match.difference))}"
    raise SpecError(f"{fact}; set other sizes in its options, or raise tolerance = {tolerance:g}")
