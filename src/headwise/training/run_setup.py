"""Setup of a training run: checks of task, model and recipe; starting it, or resuming it, also with
another recipe.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..attention.masking.patterns import Causal, Full
from ..attention.presets import design
from ..attention.spec.attention_spec import AttentionSpec
from ..kernels.capabilities import crossover_size
from ..kernels.devices import resolve_device
from ..models import Transformer, build
from ..models.distributed import Parallelism, ProcessInfo
from ..models.distributed.ranks import ProcessMesh, check_same_config, fingerprint_code
from ..models.distributed.sharded_model import check_partition, shard_model
from ..models.model_spec import (
    BlockSpec,
    EmbeddingSpec,
    ModelSpec,
    OutputHeadSpec,
    PositionSpec,
    ProcessorSpec,
    StackSpec,
    to_dict as spec_to_dict,
)
from ..util.errors import SpecError, pluralise
from .data import Batch, Task
from .recipe import CHANGEABLE_FIELDS, FIELDS_WITHOUT_EFFECT, Recipe, from_dict, to_dict
from .train_step import (
    StepOptions,
    TrainStep,
    check_batch,
    check_model,
    count_step_flops,
    has_same_vocabulary,
    measure_peak_flops,
)
from .training_run import (
    CHECKPOINT_FOLDER,
    CheckpointFolder,
    TrainingCheckpoint,
    TrainingRun,
    derive_worker_seed,
    describe_first_difference,
    read_checkpoint_state,
)

COMPILE_SECONDS = 30.0  # to compile both passes for one batch shape on a few CPU cores
COMPILE_GAIN = 0.3  # share of the step time that compilation saves in good cases
USUAL_MFU = 0.3  # share of the peak FLOPs that a step reaches without compilation

RecipeChange = dict[str, Any]  # {"step": 24, "fields": {"lr": [0.002, 0.001]}}


def describe_change(change: Mapping[str, Any]) -> str:
    """Describe a change of the recipe in words.

    >>> describe_change({"step": 24, "fields": {"steps": [24, 48], "lr": [0.002, 0.001]}})
    'after step 24: steps 24 -> 48, lr 0.002 -> 0.001'
    """
    changes: list[str] = []
    for name, values in change["fields"].items():
        old, new = (f"{value:g}" if isinstance(value, float) else value for value in values)
        changes.append(f"{name} {old} -> {new}")
    return f"after step {change['step']}: {', '.join(changes)}"


def find_changes(
    step: int, old_config: Mapping[str, Any], config: Mapping[str, Any], resume: str, folder: Path
) -> RecipeChange | None:
    """Return the change of the recipe of a run at this step; None if its configuration is the same.

    Raises SpecError if anything else differs, and for any difference unless `resume` is
    "with-changes".
    """
    old = old_config["recipe"]
    new = config["recipe"]
    fields = {name: [old[name], new[name]] for name in CHANGEABLE_FIELDS if old[name] != new[name]}
    accepted = old
    if resume == "with-changes":
        accepted = {**old, **{name: new[name] for name in fields}}
    difference = describe_first_difference({**old_config, "recipe": accepted}, config)
    if difference:
        remedy = "resume with the old value, or train into another folder"
        if difference.partition(" ")[0].removeprefix("recipe.") in CHANGEABLE_FIELDS:
            remedy = (
                "resume with the old value, or with the new one from here on by "
                "resume='with-changes'"
            )
        raise SpecError(f"{folder} holds a run with another configuration: {difference}; {remedy}")
    if not fields:
        return None
    if new["steps"] < step:
        raise SpecError(
            f"{folder} holds a run that has taken {pluralise(step, 'step')}, which "
            f"steps={new['steps']} does not reach; resume with steps={step} or more"
        )
    return {"step": step, "fields": fields}


def read_run_recipe(folder: Path | str) -> Recipe | None:
    """Return the recipe of the run in a folder, with all changes so far; None without a readable
    checkpoint.
    """
    for path in CheckpointFolder(Path(folder) / CHECKPOINT_FOLDER).paths:
        state = read_checkpoint_state(path)
        if state is not None:
            return from_dict(state["config"]["recipe"])
    return None


# --- Replacing the attention of a model -----------------------------------------------------------


AttentionEdit = Callable[[AttentionSpec], AttentionSpec]


def replace_self_attention(model_spec: ModelSpec, new: str | AttentionEdit) -> ModelSpec:
    """Model spec with another self-attention in every layer: a preset of the same width and number
    of query heads.

    `new` is the name of the preset, or a function from the old spec to the new one. A token attends
    to no more tokens than before. Positional modifiers such as RoPE are kept, unless the new
    attention has its own; if it does not support them, sinusoidal positions are added to the
    embedding instead. Cross-attention is not changed.

    >>> from headwise.models.model_spec import EmbeddingSpec
    >>> attention = design(model=8, heads=4, pattern="causal()")
    >>> stack = StackSpec.from_blocks(
    ...     "decoder", 8, [BlockSpec(attention)], embedding=EmbeddingSpec(11)
    ... )
    >>> changed = replace_self_attention(ModelSpec("model", "decoder", (stack,)), "mqa")
    >>> [spec.heads.kv for _, spec in changed.attention_specs()]
    [1]
    """

    def design_like(old: AttentionSpec) -> AttentionSpec:
        return (
            design(preset=new, model=old.model, heads=old.heads.q)
            if isinstance(new, str)
            else new(old)
        )

    stacks = [_replace_in_stack(stack, design_like) for stack in model_spec.stacks]
    return replace(model_spec, stacks=tuple(stacks))


def _replace_in_stack(stack: StackSpec, edit: AttentionEdit) -> StackSpec:
    embedding = stack.embedding
    try:
        blocks = [_replace_in_block(block, edit, keep_positional=True) for block in stack.layers]
    except SpecError:
        blocks = [_replace_in_block(block, edit, keep_positional=False) for block in stack.layers]
        if embedding and embedding.positions is None:
            embedding = replace(embedding, positions=PositionSpec("sinusoidal"))
    return StackSpec.from_blocks(
        stack.name, stack.model, blocks, embedding=embedding, norm=stack.norm
    )


def _replace_in_block(block: BlockSpec, edit: AttentionEdit, keep_positional: bool) -> BlockSpec:
    old = block.attention
    if old is None:
        return block
    new = edit(old)
    pattern = old.pattern
    if new.pattern not in (Full(), Causal(), pattern):
        pattern = new.pattern & pattern
    modifiers = new.modifiers
    if keep_positional and not any(modifier.positional for modifier in modifiers):
        modifiers = (*(modifier for modifier in old.modifiers if modifier.positional), *modifiers)
    return replace(block, attention=replace(new, pattern=pattern, modifiers=modifiers))


# --- Giving a model the vocabulary of a task ------------------------------------------------------


def fit_vocabulary(model_spec: ModelSpec, task_model: ModelSpec) -> ModelSpec:
    """Model spec with the vocabularies and outputs of a task's own model; layers, width and
    positions are kept.

    Source, target and outputs share tables where they share vocabularies. For images and frames,
    the embedding and the output head come from the task's model, with positions as in the model if
    the task's has none. Raises SpecError for another kind of model.

    >>> from headwise.models.families import read_model_spec
    >>> from headwise.training.data import make_task
    >>> spec = fit_vocabulary(read_model_spec("transformer-base"), make_task("dates").model())
    >>> [stack.embedding.tokens for stack in spec.stacks], spec.heads[0].outputs
    ([63, 63], 63)
    """
    if model_spec.kind != task_model.kind:
        raise SpecError(
            f"its kind is {model_spec.kind!r}, and the task needs {task_model.kind!r}; give a "
            "model of that kind"
        )
    pairs = zip(model_spec.stacks, task_model.stacks, strict=True)
    stacks = tuple(
        replace(own, embedding=_fit_embedding(own, like, model_spec.stacks[0]))
        for own, like in pairs
    )
    heads = tuple(
        _fit_head(own, like, stacks[-1])
        for own, like in zip(model_spec.heads, task_model.heads, strict=True)
    )
    return replace(model_spec, stacks=stacks, heads=heads)


def _fit_embedding(own: StackSpec, like: StackSpec, first: StackSpec) -> EmbeddingSpec | None:
    if own.embedding is None or like.embedding is None:
        return like.embedding
    if not (own.embedding.tokens and like.embedding.tokens):
        positions = own.embedding.positions
        patches = like.embedding.patches
        if like.embedding.positions or positions is None or patches is None:
            return like.embedding
        length = positions.length and like.embedding.first + patches.num_patches
        return replace(like.embedding, positions=replace(positions, length=length))
    table = first.name if like.embedding.table else ""
    return replace(own.embedding, tokens=like.embedding.tokens, table=table)


def _fit_head(own: OutputHeadSpec, like: OutputHeadSpec, last: StackSpec) -> OutputHeadSpec:
    if own.name != like.name or last.embedding is None or not last.embedding.tokens:
        return like
    return replace(
        own, outputs=like.outputs, table=own.table and (last.embedding.table or last.name)
    )


# --- Starting and resuming a run ------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TrainingSetup:
    """Checked inputs of a run: task, model, recipe, folder and ranks.

    `config` holds everything that determines the numbers of the run, as plain values.
    `initial_model` is the model that is trained further, or None to build a new one.
    """

    task: Task
    model_spec: ModelSpec
    recipe: Recipe
    folder: Path
    initial_model: Transformer | None
    first_batch: Batch
    config: Mapping[str, Any]
    ranks: ProcessMesh
    started_at: float  # time.perf_counter() when training was called

    @staticmethod
    def prepare(
        task: Task,
        model_spec: ModelSpec | Transformer | None,
        recipe: Recipe,
        folder: Path,
        launch: ProcessInfo,
    ) -> TrainingSetup:
        """Check the arguments of `train` and that they are equal on all ranks; raises SpecError."""
        started_at = time.perf_counter()
        world = ProcessMesh(
            launch, Parallelism.over(recipe.parallelism, launch.size), resolve_device(recipe.device)
        )
        if world.size > 1:
            check_same_config(world, {**fingerprint_code(), "parallelism": recipe.parallelism})
        setup = world.run_on_all(lambda: TrainingSetup._of(task, model_spec, recipe, folder, world))
        setup = replace(setup, started_at=started_at)
        if world.size > 1:
            net = setup.initial_model
            check_same_config(world, {**setup.config, "weights": net and hash_weights(net)})
        return setup

    @staticmethod
    def _of(
        task: Task,
        model_spec: ModelSpec | Transformer | None,
        recipe: Recipe,
        folder: Path,
        world: ProcessMesh,
    ) -> TrainingSetup:
        if not isinstance(task, Task):
            raise SpecError(
                f"task is of type {type(task).__name__}; give a task of headwise.training.data"
            )
        net = model_spec if isinstance(model_spec, Transformer) else None
        spec = net.spec if net else task.model() if model_spec is None else model_spec
        if not isinstance(spec, ModelSpec):
            raise SpecError(
                f"model_spec is of type {type(spec).__name__}; give a ModelSpec or a Transformer"
            )
        if net and net.dropout != recipe.dropout:
            raise SpecError(
                f"the model was built with dropout={net.dropout}, but the recipe has "
                f"dropout={recipe.dropout}; use Recipe(dropout={net.dropout})"
            )
        check_model(spec, task, net.usage.tokenizer if net else None)
        first_batch = task.batch(0, recipe.batch, "train")
        check_batch(first_batch, spec, "batch 0")
        check_partition(spec, world.parallelism)
        if spec.has_mixer and recipe.rows == "packed":
            raise SpecError(
                f"rows='packed' is not possible: {spec.name} has a recurrence or convolution, "
                "which needs a row for each text; use rows='padded'"
            )
        check_ranks(recipe, world)
        config = build_config(task, spec, recipe, first_batch)
        return TrainingSetup(
            task, spec, recipe, folder, net, first_batch, config, world, time.perf_counter()
        )

    @property
    def notes(self) -> list[str]:
        """Notes about how the ranks divide the work; empty for a single process."""
        if self.ranks.size == 1:
            return []
        note = f"{self.ranks.size} ranks, {self.ranks.parallelism}"
        rows = self.recipe.batch // self.recipe.accumulate
        shares = self.ranks.num_data_shards
        if rows % shares:
            note += f"; {rows} rows are divided into {shares} unequal shares"
        return [note]

    def start_run(self) -> TrainingRun:
        """Make a new run before its first step, with its step options saved, so that resuming keeps
        them.
        """
        net = self._make_model()
        torch.manual_seed(derive_worker_seed(self.recipe.seed, self.ranks.worker_index))
        run = self._make_run(net, self.ranks.run_on_leader(partial(self._choose_options, net)))
        run.save_checkpoint(self.config)
        return run

    def _choose_options(self, net: Transformer) -> StepOptions:
        recipe = self.recipe
        precision = recipe.precision
        if precision == "auto":
            is_slow = self.ranks.device.type == "cpu"
            num_parameters = sum(parameter.numel() for parameter in net.parameters())
            is_slow &= num_parameters < crossover_size("bf16_training")
            precision = "fp32" if is_slow else "bf16"
        compiles = recipe.compile
        if compiles == "auto":
            compiles = "on" if self._gains_by_compiling() else "off"
        return StepOptions(precision, compiles, recipe.attention, recipe.rows)

    def _gains_by_compiling(self) -> bool:
        """True if compiled steps are estimated to save more than twice the time to compile them."""
        recipe = self.recipe
        device = self.ranks.device
        split = self.ranks.parallelism
        if recipe.rows == "packed" or max(split.context, split.shards, split.tensor) > 1:
            return False
        if device.type == "cpu" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
            return False
        shapes = set[object]()
        for index in range(3):
            batch = self.task.batch(index, recipe.batch)
            shapes.add((batch.x.shape, None if batch.source is None else batch.source.shape))
        flops = recipe.steps * count_step_flops(self.model_spec, self.first_batch)
        seconds = flops / (USUAL_MFU * measure_peak_flops(device, torch.float32))
        return seconds * COMPILE_GAIN > 2 * COMPILE_SECONDS * len(shapes)

    def resume_run(
        self, checkpoint: TrainingCheckpoint, resume: str
    ) -> tuple[TrainingRun, RecipeChange | None]:
        """Return the run of a checkpoint, and how its recipe changes; raises SpecError for changes
        that are not allowed.

        A change is saved at once. It resets the patience of early stopping.
        """
        change = find_changes(
            checkpoint.step, checkpoint.state["config"], self.config, resume, self.folder
        )
        run = self._make_run(self._make_model(), StepOptions(**checkpoint.state["choice"]))
        run.restore(checkpoint)
        if change is not None:
            run.history.append(change)
            run.progress.waited = 0
            run.save_checkpoint(self.config)
        return run, change

    def _make_run(self, net: Transformer, options: StepOptions) -> TrainingRun:
        """Make a run with the part of the model that belongs to this rank."""
        part = shard_model(net, self.ranks, options.dtype)
        train_step = TrainStep(part, self.recipe, options)
        return TrainingRun(self.task, train_step, self.folder, self.started_at)

    def _make_model(self) -> Transformer:
        """Build the model in main memory; on meta if this rank gets its part from the leader."""
        recipe = self.recipe
        split = self.ranks.parallelism
        is_received = max(split.shards, split.tensor) > 1 and not self.ranks.is_leader
        with torch.device("meta" if is_received else "cpu"):
            net = self.initial_model or build(
                self.model_spec, dropout=recipe.dropout, seed=recipe.seed, init=recipe.init
            )
        net.usage = self._merge_usage()
        net.checkpointing = "block" if recipe.activations == "recompute" else "none"
        return net

    def _merge_usage(self) -> ProcessorSpec:
        """Return the task's processor, completed from the initial model's if both have the same
        vocabulary.
        """
        usage = self.task.usage
        if self.initial_model is None or not has_same_vocabulary(
            usage.tokenizer, self.initial_model.usage.tokenizer
        ):
            return usage
        merged = ProcessorSpec.from_dict(self.initial_model.usage.to_dict | usage.to_dict)
        return replace(merged, tokenizer=usage.tokenizer, source_tokenizer=usage.source_tokenizer)


def build_config(task: Task, model_spec: ModelSpec, recipe: Recipe, first: Batch) -> dict[str, Any]:
    """Return everything that determines the numbers of a run, as plain values; `first` is its first
    batch.
    """
    options = {f.name: getattr(task, f.name) for f in fields(task)}
    entries = to_dict(recipe)
    for name in FIELDS_WITHOUT_EFFECT:  # a run may be resumed on another number of ranks
        del entries[name]
    # the first batch reveals data that was changed between a run and its resumption
    digest = hashlib.sha256()
    for tensor in (first.x, first.labels, first.source):
        if tensor is not None:
            digest.update(tensor.contiguous().numpy().tobytes())
    config = {
        "task": {"name": task.name, **options},
        "recipe": entries,
        "model": spec_to_dict(model_spec),
        "first batch": digest.hexdigest(),
    }
    return json.loads(json.dumps(config, default=str))


def hash_weights(net: Transformer) -> str:
    """Checksum of the weights of a model."""
    digest = hashlib.sha256()
    for name, tensor in net.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:12]


def check_ranks(recipe: Recipe, ranks: ProcessMesh) -> None:
    """Raise SpecError if a part of a batch has fewer rows than there are data shards, or an option
    is unsupported.
    """
    split = ranks.parallelism
    if recipe.compile == "on" and max(split.context, split.shards, split.tensor) > 1:
        raise SpecError(
            f"compile='on' does not support collectives inside layers ({split}); use compile='off'"
        )
    if ranks.parallelism.context > 1 and recipe.rows == "packed":
        raise SpecError(
            f"rows='packed' does not support context parallelism ({ranks.parallelism}); use "
            "rows='padded'"
        )
    rows = recipe.batch // recipe.accumulate
    if rows < ranks.num_data_shards:
        part = f" with accumulate={recipe.accumulate}" if recipe.accumulate > 1 else ""
        raise SpecError(
            f"batch={recipe.batch}{part} has fewer rows than the {ranks.num_data_shards} data "
            f"shards; use batch={ranks.num_data_shards * recipe.accumulate} or more, or fewer ranks"
        )
