"""The same model with another attention in every layer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from ..data import Batch, Task
from ..distributed import Parallelism, ProcessInfo
from ..distributed.config_consistency import check_same_config, fingerprint_code
from ..distributed.ranks import ProcessMesh
from ..distributed.sharded_model import check_partition, shard_model
from ..errors import SpecError
from ..masking.patterns import Causal, Full
from ..model_spec import (
    ApproximateAttention,
    BlockSpec,
    ModelSpec,
    PositionSpec,
    ProcessorSpec,
    StackSpec,
    to_dict as spec_to_dict,
)
from ..models import Transformer, build
from ..presets import design
from ..spec.attention_spec import AttentionSpec
from .autotune import StepTrial
from .checkpoint import TrainingCheckpoint, describe_first_difference
from .loss import check_batch, check_model, has_same_vocabulary
from .recipe import Recipe, to_dict
from .train_step import StepOptions, TrainStep
from .training_run import TrainingRun, derive_worker_seed


def replace_self_attention(model_spec: ModelSpec, name: str) -> ModelSpec:
    """A preset in the place of every self-attention: as wide, of as many heads, and no token reads more than before.

    What says where tokens stand is kept, unless the preset brings its own; where it cannot stand beside the preset,
    sinusoidal positions are added to the embedding instead. Cross-attention stays what it is.

    >>> from headwise.model_spec import EmbeddingSpec
    >>> plain = design(model=8, heads=4, pattern="causal()")
    >>> stack = StackSpec.from_blocks("decoder", 8, [BlockSpec(plain)], embedding=EmbeddingSpec(11))
    >>> changed = replace_self_attention(ModelSpec("one", "decoder", (stack,)), "mqa")
    >>> [spec.heads.kv for _, spec in changed.attention_specs()]
    [1]
    """
    return replace(model_spec, stacks=tuple(_replace_in_stack(stack, name) for stack in model_spec.stacks))


def _replace_in_stack(stack: StackSpec, name: str) -> StackSpec:
    embedding = stack.embedding
    try:
        blocks = [_replace_in_block(block, name, turned=True) for block in stack.layers]
    except SpecError:
        blocks = [_replace_in_block(block, name, turned=False) for block in stack.layers]
        if embedding and embedding.positions is None:
            embedding = replace(embedding, positions=PositionSpec("sinusoidal"))
    return StackSpec.from_blocks(stack.name, stack.model, blocks, embedding=embedding, norm=stack.norm)


def _replace_in_block(block: BlockSpec, name: str, turned: bool) -> BlockSpec:
    if isinstance(block.attention, ApproximateAttention):
        raise SpecError(f"an attention that no spec says cannot be exchanged: {block.attention.reason}")
    return replace(block, attention=block.attention and _replace_spec(block.attention, name, turned))


def _replace_spec(spec: AttentionSpec, name: str, turned: bool) -> AttentionSpec:
    made = design(preset=name, model=spec.model, heads=spec.heads.q)
    pattern = spec.pattern if made.pattern in (Full(), Causal()) else made.pattern & spec.pattern
    modifiers = made.modifiers
    if turned and not any(modifier.positional for modifier in modifiers):
        modifiers = (*(modifier for modifier in spec.modifiers if modifier.positional), *modifiers)
    return replace(made, pattern=pattern, modifiers=modifiers)


# --- What a run is made of, and how it begins or goes on -----------------------------------------------

TRIAL_BATCHES = 3  # batches that ways to compute are tried on, for their shapes may differ


@dataclass(frozen=True, eq=False)
class TrainingSetup:
    """A task, the model that is to learn it, a recipe, and where; `config` is what decides the numbers, as values."""

    task: Task
    model_spec: ModelSpec
    recipe: Recipe
    folder: Path
    initial_model: Transformer | None
    first_batch: Batch
    config: Mapping[str, Any]
    ranks: ProcessMesh

    @staticmethod
    def of(
        task: Task, model_spec: ModelSpec | Transformer | None, recipe: Recipe, folder: Path, launch: ProcessInfo
    ) -> TrainingSetup:
        """The setup of what `train` is given; task and model must fit together, and ranks must be given the same."""
        world = ProcessMesh(launch, Parallelism.over(recipe.spread, launch.size), resolve_device(recipe.device))
        if world.size > 1:
            check_same_config(world, {**fingerprint_code(), "spread": recipe.spread})
        setup = world.run_on_all(lambda: TrainingSetup._of(task, model_spec, recipe, folder, world))
        if world.size > 1:
            check_same_config(
                world, {**setup.config, "weights": setup.initial_model and hash_weights(setup.initial_model)}
            )
        return setup

    @staticmethod
    def _of(
        task: Task, model_spec: ModelSpec | Transformer | None, recipe: Recipe, folder: Path, world: ProcessMesh
    ) -> TrainingSetup:
        if not isinstance(task, Task):
            raise SpecError(f"task is of type {type(task).__name__}; give one of headwise.data")
        given = model_spec if isinstance(model_spec, Transformer) else None
        model = given.spec if given else task.model() if model_spec is None else model_spec
        if not isinstance(model, ModelSpec):
            raise SpecError(
                f"described is of type {type(model).__name__}; give a blueprint.Model, or one that is built"
            )
        if given and given.dropout != recipe.dropout:
            said = f"the model was built with dropout={given.dropout}, the recipe says {recipe.dropout}"
            raise SpecError(f"{said}; give Recipe(dropout={given.dropout})")
        check_model(model, task, given.usage.tokenizer if given else None)
        first = task.batch(0, recipe.batch, "train")
        check_batch(first, model, "batch 0")
        check_partition(model, world.spread)
        check_ranks(recipe, world)
        return TrainingSetup(task, model, recipe, folder, given, first, build_config(task, model, recipe, first), world)

    @property
    def notes(self) -> list[str]:
        """What is to be said of how ranks divide the work."""
        if self.ranks.size == 1:
            return []
        rows = self.recipe.batch // self.recipe.accumulate
        uneven = (
            f"; {rows} rows make {self.ranks.num_data_shards} unequal shares"
            if rows % self.ranks.num_data_shards
            else ""
        )
        return [f"{self.ranks.size} ranks, {self.ranks.spread}{uneven}"]

    def start_run(self) -> TrainingRun:
        """A run before its first step, its ways chosen and kept: what was measured once is not measured again."""
        net, world = self._make_model(), self.ranks
        torch.manual_seed(derive_worker_seed(self.recipe.seed, world.worker_index))
        some = [self.first_batch, *(self.task.batch(index, self.recipe.batch) for index in range(1, TRIAL_BATCHES))]
        for index, batch in enumerate(some):
            check_batch(batch, self.model_spec, f"batch {index}")
        shares = [world.share(batch).batch for batch in some]
        run = self._make_run(net, world.told(lambda: StepTrial(net, self._trial_recipe, world.device, shares).choose()))
        run.save_checkpoint(self.config)
        return run

    def resume_run(self, checkpoint: TrainingCheckpoint) -> TrainingRun:
        """The run of this checkpoint, if it is one of the same setup."""
        if difference := describe_first_difference(checkpoint.state["config"], self.config):
            same = "resume with what it was, or train into another folder"
            raise SpecError(f"{self.folder} holds a run of another kind: {difference}; {same}")
        run = self._make_run(self._make_model(), StepOptions(**checkpoint.state["choice"]))
        run.restore(checkpoint)
        return run

    def _make_run(self, net: Transformer, choice: StepOptions) -> TrainingRun:
        """A run of this model, as far as this rank is to hold it; slices are not compiled, whatever was chosen."""
        possible = choice if self.ranks.spread.shards == 1 else replace(choice, compile="off")
        possible = possible if self.ranks.spread.context == 1 else replace(possible, rows="padded")
        return TrainingRun(self.task, TrainStep(shard_model(net, self.ranks), self.recipe, possible), self.folder)

    @property
    def _trial_recipe(self) -> Recipe:
        """The recipe, with what cannot be compiled, or packed, not tried."""
        said = replace(self.recipe, compile="off") if _has_layer_collectives(self.ranks.spread) else self.recipe
        return replace(said, rows="padded") if self.ranks.spread.context > 1 else said

    def _make_model(self) -> Transformer:
        said = self.recipe
        net = self.initial_model or build(self.model_spec, dropout=said.dropout, seed=said.seed, init=said.start)
        net.usage = self._merge_usage()
        net.checkpointing = "block" if said.activations == "recompute" else "none"
        return net.to(self.ranks.device)

    def _merge_usage(self) -> ProcessorSpec:
        """How the model is spoken to: as the task says, and besides as before where that was in the same words."""
        own = self.task.usage
        if self.initial_model is None or not has_same_vocabulary(own.tokenizer, self.initial_model.usage.tokenizer):
            return own
        said = ProcessorSpec.from_dict(self.initial_model.usage.to_dict | own.to_dict)
        return replace(said, tokenizer=own.tokenizer, source_tokenizer=own.source_tokenizer)


def build_config(task: Task, model_spec: ModelSpec, recipe: Recipe, first: Batch) -> dict[str, Any]:
    """All that decides what a run computes, as plain values."""
    own = {f.name: getattr(task, f.name) for f in fields(task)}
    decided = {name: value for name, value in to_dict(recipe).items() if name != "spread"}  # any world goes on
    said = {
        "task": {"name": task.name, **own},
        "recipe": decided,
        "model": spec_to_dict(model_spec),
        "first batch": hash_batch(first),
    }
    return json.loads(json.dumps(said, default=str))


def hash_batch(batch: Batch) -> str:
    """A checksum of what a batch asks: data that was changed under a run shows in its first batch."""
    found = hashlib.sha256()
    for tensor in (batch.x, batch.labels, batch.source):
        if tensor is not None:
            found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def hash_weights(net: Transformer) -> str:
    """A checksum of the weights of a model."""
    found = hashlib.sha256()
    for name, tensor in net.state_dict().items():
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()[:12]


def check_ranks(recipe: Recipe, ranks: ProcessMesh) -> None:
    """Refuse parts of a batch that do not give every worker a row, and what ranks cannot do together."""
    if _has_layer_collectives(ranks.spread) and recipe.compile == "on":
        raise SpecError(f"layers whose ranks talk to each other ({ranks.spread}) are not compiled; give compile='off'")
    if ranks.spread.context > 1 and recipe.rows == "packed":
        raise SpecError(f"rows whose tokens are divided ({ranks.spread}) are not packed; give rows='padded'")
    rows = recipe.batch // recipe.accumulate
    if rows < ranks.num_data_shards:
        part = f"a batch of {recipe.batch}" + (f" in {recipe.accumulate} parts" if recipe.accumulate > 1 else "")
        more = ranks.num_data_shards * recipe.accumulate
        raise SpecError(
            f"{part} has no row for each of {ranks.num_data_shards} ranks; use batch={more} or more, or fewer ranks"
        )


def _has_layer_collectives(spread: Parallelism) -> bool:
    """Whether ranks talk to each other inside layers."""
    return max(spread.context, spread.shards, spread.tensor) > 1


def resolve_device(name: str) -> torch.device:
    """The device of this name; "auto" is a graphics card where there is one.

    >>> resolve_device("cpu")
    device(type='cpu')
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError):  # torch built without CUDA asserts
        raise SpecError(f"device={name!r} is not here; use 'auto' or 'cpu'") from None
    return device


def describe_environment(run: TrainingRun) -> dict[str, Any]:
    """What a run's numbers depend on besides its setup."""
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": str(run.device),
        "ranks": run.world.size,
        "spread": str(run.world.spread),
        "parameters": sum(p.numel() for p in run.net.parameters() if p.requires_grad),
    }


def omit_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration for those who watch: without the model's description, which its folder holds."""
    return {name: value for name, value in config.items() if name != "model"}
