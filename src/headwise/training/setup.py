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
from ..tasks import Batch, Task
from .checkpoint import Checkpoint, first_difference
from .choosing import Choice
from .loss import check, check_model, same_words
from .probing import Trial
from .recipe import Recipe, to_dict
from .run import Run
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

    @staticmethod
    def of(task: Task, described: Model | Transformer | None, recipe: Recipe, folder: Path) -> Setup:
        """The setup of what `train` is given; task and model must fit together."""
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
        return Setup(task, model, recipe, folder, given, first, config_of(task, model, recipe, first))

    @property
    def device(self) -> torch.device:
        """Where steps are computed."""
        return device_of(self.recipe.device)

    def begun(self) -> Run:
        """A run before its first step, its ways chosen and kept: what was measured once is not measured again."""
        net = self._net()
        torch.manual_seed(self.recipe.seed)
        some = [self.first, *(self.task.batch(index, self.recipe.batch) for index in range(1, TRIED))]
        for index, batch in enumerate(some):
            check(batch, self.described, f"batch {index}")
        run = Run(self.task, Trial(net, self.recipe, self.device, some).choose(), self.folder)
        run.keep(self.config)
        return run

    def resumed(self, held: Checkpoint) -> Run:
        """The run of this checkpoint, if it is one of the same setup."""
        if difference := first_difference(held.state["config"], self.config):
            same = "resume with what it was, or train into another folder"
            raise SpecError(f"{self.folder} holds a run of another kind: {difference}; {same}")
        choice = Choice(**held.state["choice"])
        run = Run(self.task, Stepper(self._net(), self.recipe, choice, self.device), self.folder)
        run.restore(held)
        return run

    def _net(self) -> Transformer:
        said = self.recipe
        net = self.given or build(self.described, dropout=said.dropout, seed=said.seed, start=said.start)
        net.usage = self._usage()
        net.checkpointing = "block" if said.activations == "recompute" else "none"
        return net.to(self.device)

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
    said = {
        "task": {"name": task.name, **own},
        "recipe": to_dict(recipe),
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
        "parameters": sum(p.numel() for p in run.net.parameters() if p.requires_grad),
    }


def shorter(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration for those who watch: without the model's description, which its folder holds."""
    return {name: value for name, value in config.items() if name != "model"}
