"""What a run is made of, and how it begins or goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from .. import blueprint
from ..blueprint import Model, Usage
from ..errors import SpecError
from ..models import Transformer, build
from ..spread import Launch, Spread
from ..spread.alike import check_alike, code
from ..spread.holding import check_divides, hold
from ..spread.world import World
from ..tasks import Batch, Task
from .checkpoint import Checkpoint, first_difference
from .choosing import Choice
from .loss import check, check_model, same_words
from .probing import Trial
from .recipe import Recipe, to_dict
from .run import Run, stream
from .stepping import Stepper

TRIED = 3  # batches that ways to compute are tried on, for their shapes may differ


@dataclass(frozen=True, eq=False)
class Setup:
    """A task, the model that is to learn it, a recipe, and where; `config` is what decides the numbers, as values."""

    task: Task
    described: Model
    recipe: Recipe
    folder: Path
    given: Transformer | None
    first: Batch
    config: Mapping[str, Any]
    world: World

    @staticmethod
    def of(task: Task, described: Model | Transformer | None, recipe: Recipe, folder: Path, launch: Launch) -> Setup:
        """The setup of what `train` is given; task and model must fit together, and ranks must be given the same."""
        world = World(launch, Spread.over(recipe.spread, launch.size), device_of(recipe.device))
        if world.size > 1:
            check_alike(world, {**code(), "spread": recipe.spread})
        setup = world.together(lambda: Setup._of(task, described, recipe, folder, world))
        if world.size > 1:
            check_alike(world, {**setup.config, "weights": setup.given and checksum(setup.given)})
        return setup

    @staticmethod
    def _of(task: Task, described: Model | Transformer | None, recipe: Recipe, folder: Path, world: World) -> Setup:
        if not isinstance(task, Task):
            raise SpecError(f"task is of type {type(task).__name__}; give one of headwise.tasks")
        given = described if isinstance(described, Transformer) else None
        model = given.described if given else task.model() if described is None else described
        if not isinstance(model, Model):
            raise SpecError(
                f"described is of type {type(model).__name__}; give a blueprint.Model, or one that is built"
            )
        if given and given.dropout != recipe.dropout:
            said = f"the model was built with dropout={given.dropout}, the recipe says {recipe.dropout}"
            raise SpecError(f"{said}; give Recipe(dropout={given.dropout})")
        check_model(model, task, given.usage.tokenizer if given else None)
        first = task.batch(0, recipe.batch, "train")
        check(first, model, "batch 0")
        check_divides(model, world.spread)
        check_ranks(recipe, world)
        return Setup(task, model, recipe, folder, given, first, config_of(task, model, recipe, first), world)

    @property
    def notes(self) -> list[str]:
        """What is to be said of how ranks divide the work."""
        if self.world.size == 1:
            return []
        rows = self.recipe.batch // self.recipe.accumulate
        uneven = f"; {rows} rows make {self.world.takers} unequal shares" if rows % self.world.takers else ""
        return [f"{self.world.size} ranks, {self.world.spread}{uneven}"]

    def begun(self) -> Run:
        """A run before its first step, its ways chosen and kept: what was measured once is not measured again."""
        net, world = self._net(), self.world
        torch.manual_seed(stream(self.recipe.seed, world.worker))
        some = [self.first, *(self.task.batch(index, self.recipe.batch) for index in range(1, TRIED))]
        for index, batch in enumerate(some):
            check(batch, self.described, f"batch {index}")
        shares = [world.share(batch).batch for batch in some]
        run = self._run(net, world.told(lambda: Trial(net, self._tried, world.device, shares).choose()))
        run.keep(self.config)
        return run

    def resumed(self, held: Checkpoint) -> Run:
        """The run of this checkpoint, if it is one of the same setup."""
        if difference := first_difference(held.state["config"], self.config):
            same = "resume with what it was, or train into another folder"
            raise SpecError(f"{self.folder} holds a run of another kind: {difference}; {same}")
        run = self._run(self._net(), Choice(**held.state["choice"]))
        run.restore(held)
        return run

    def _run(self, net: Transformer, choice: Choice) -> Run:
        """A run of this model, as far as this rank is to hold it; slices are not compiled, whatever was chosen."""
        possible = choice if self.world.spread.shards == 1 else replace(choice, compile="off")
        possible = possible if self.world.spread.context == 1 else replace(possible, rows="padded")
        return Run(self.task, Stepper(hold(net, self.world), self.recipe, possible), self.folder)

    @property
    def _tried(self) -> Recipe:
        """The recipe, with what cannot be compiled, or packed, not tried."""
        said = replace(self.recipe, compile="off") if _talks(self.world.spread) else self.recipe
        return replace(said, rows="padded") if self.world.spread.context > 1 else said

    def _net(self) -> Transformer:
        said = self.recipe
        net = self.given or build(self.described, dropout=said.dropout, seed=said.seed, start=said.start)
        net.usage = self._usage()
        net.checkpointing = "block" if said.activations == "recompute" else "none"
        return net.to(self.world.device)

    def _usage(self) -> Usage:
        """How the model is spoken to: as the task says, and besides as before where that was in the same words."""
        own = self.task.usage
        if self.given is None or not same_words(own.tokenizer, self.given.usage.tokenizer):
            return own
        said = Usage.of(self.given.usage.table | own.table)
        return replace(said, tokenizer=own.tokenizer, source_tokenizer=own.source_tokenizer)


def config_of(task: Task, described: Model, recipe: Recipe, first: Batch) -> dict[str, Any]:
    """All that decides what a run computes, as plain values."""
    own = {f.name: getattr(task, f.name) for f in fields(task)}
    decided = {name: value for name, value in to_dict(recipe).items() if name != "spread"}  # any world goes on
    said = {
        "task": {"name": task.name, **own},
        "recipe": decided,
        "model": blueprint.to_dict(described),
        "first batch": digest(first),
    }
    return json.loads(json.dumps(said, default=str))


def digest(batch: Batch) -> str:
    """A checksum of what a batch asks: data that was changed under a run shows in its first batch."""
    found = hashlib.sha256()
    for tensor in (batch.x, batch.labels, batch.source):
        if tensor is not None:
            found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def checksum(net: Transformer) -> str:
    """A checksum of the weights of a model."""
    found = hashlib.sha256()
    for name, tensor in net.state_dict().items():
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()[:12]


def check_ranks(recipe: Recipe, world: World) -> None:
    """Refuse parts of a batch that do not give every worker a row, and what ranks cannot do together."""
    if _talks(world.spread) and recipe.compile == "on":
        raise SpecError(f"layers whose ranks talk to each other ({world.spread}) are not compiled; give compile='off'")
    if world.spread.context > 1 and recipe.rows == "packed":
        raise SpecError(f"rows whose tokens are divided ({world.spread}) are not packed; give rows='padded'")
    rows = recipe.batch // recipe.accumulate
    if rows < world.takers:
        part = f"a batch of {recipe.batch}" + (f" in {recipe.accumulate} parts" if recipe.accumulate > 1 else "")
        more = world.takers * recipe.accumulate
        raise SpecError(f"{part} has no row for each of {world.takers} ranks; use batch={more} or more, or fewer ranks")


def _talks(spread: Spread) -> bool:
    """Whether ranks talk to each other inside layers."""
    return max(spread.context, spread.shards, spread.tensor) > 1


def device_of(name: str) -> torch.device:
    """The device of this name; "auto" is a graphics card where there is one.

    >>> device_of("cpu")
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


def environment(run: Run) -> dict[str, Any]:
    """What a run's numbers depend on besides its setup."""
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": str(run.device),
        "ranks": run.world.size,
        "spread": str(run.world.spread),
        "parameters": sum(p.numel() for p in run.net.parameters() if p.requires_grad),
    }


def shorter(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration for those who watch: without the model's description, which its folder holds."""
    return {name: value for name, value in config.items() if name != "model"}
