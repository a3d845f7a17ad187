"""A run in hand: one step after the other, and all that it needs to be taken up again where it stood."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import Diverged
from ..models import Transformer
from ..tasks import Batch, Task
from .blame import first_bad
from .checkpoint import Checkpoint, Checkpoints
from .evaluation import Examiner
from .loss import check
from .optimiser import Optimiser, grouped
from .probing import peak
from .recipe import Recipe
from .stepping import Stepper
from .work import step_flops, tokens_in

CHECKPOINTS = "checkpoint"  # the folder of them, in that of the run
SMOOTH = 0.9  # how much of the last estimate of a step's seconds stays


@dataclass
class Progress:
    """How far a run is: steps taken, which of them was the best and its loss, evaluations since, seconds in all."""

    step: int = 0
    best: int | None = None
    loss: float | None = None
    waited: int = 0
    seconds: float = 0.0


class Run:
    """A model that is being trained, the state of its optimiser, and how far it is."""

    def __init__(self, task: Task, stepper: Stepper, folder: Path) -> None:
        self.task, self.stepper, self.folder = task, stepper, folder
        self.net: Transformer = stepper.net
        self.recipe: Recipe = stepper.recipe
        self.device = stepper.device
        learned = {name: p for name, p in self.net.named_parameters() if p.requires_grad}
        self.groups = grouped(learned, self.net.described, self.recipe.decays)
        self.optimiser = Optimiser(self.groups, self.recipe)
        self.checkpoints = Checkpoints(folder / CHECKPOINTS, self.recipe.keep)
        self.examiner = Examiner(task, self.recipe, stepper.choice, self.device)
        self.progress = Progress()
        self.peak = peak(self.device, stepper.choice.dtype or torch.float32)
        self._pace: float | None = None
        self._flops: dict[tuple[Any, ...], int] = {}

    @property
    def over(self) -> bool:
        """Whether every step is taken, or enough were taken for nothing."""
        waited = self.recipe.patience and self.progress.waited >= self.recipe.patience
        return self.progress.step >= self.recipe.steps or bool(waited)

    @property
    def due(self) -> bool:
        """Whether held-out data is to be looked at now."""
        return self.progress.step % self.recipe.evaluate_every == 0 or self.progress.step == self.recipe.steps

    def step(self) -> dict[str, Any]:
        """Take one step; its record."""
        begun, step = time.perf_counter(), self.progress.step + 1
        batch = self.task.batch(step - 1, self.recipe.batch, "train")
        check(batch, self.net.described, f"batch {step - 1}")
        self.net.train()
        loss = self.stepper.gradients(batch)
        norm = self.stepper.norm()
        if not bool(loss.isfinite() & norm.isfinite()):
            self._diverge(step, batch, loss)
        self.stepper.clip(norm)
        rate = self.recipe.rate(step)
        self.optimiser.step(rate)
        self.progress.step = step
        seconds = time.perf_counter() - begun
        self.progress.seconds += seconds
        told = {"event": "step", "step": step, "loss": loss.item(), "rate": rate, "norm": norm.item()}
        return told | self._speed(batch, seconds)

    def evaluate(self) -> dict[str, Any]:
        """Measure held-out data and remember whether it was never better; the record."""
        begun, step, before = time.perf_counter(), self.progress.step, self.progress.loss
        metrics = self.examiner.measures(self.net, "valid")
        if not math.isfinite(metrics["loss"]):
            raise Diverged(self._refused(f"step {step}: the held-out loss is {metrics['loss']}"))
        if before is None or metrics["loss"] < before:
            self.progress.best, self.progress.loss, self.progress.waited = step, metrics["loss"], 0
        else:
            self.progress.waited += 1
        self.progress.seconds += time.perf_counter() - begun
        return {"event": "evaluation", "step": step, "metrics": metrics, "best": self.progress.best == step}

    def keep(self, config: Mapping[str, Any]) -> None:
        """Write a checkpoint of this moment."""
        tensors = {f"model {name}": value for name, value in self.net.state_dict().items()}
        tensors |= {f"optimiser {name}": value for name, value in self.optimiser.tensors.items()}
        tensors |= {f"random {name}": value for name, value in self._random().items()}
        state = {"config": config, "choice": asdict(self.stepper.choice), "progress": asdict(self.progress)}
        self.checkpoints.save(Checkpoint(self.progress.step, tensors, state), self.progress.best)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go back to the moment of a checkpoint."""
        self.net.load_state_dict(checkpoint.kind("model"))
        self.optimiser.load(checkpoint.kind("optimiser"))
        self.progress = Progress(**checkpoint.state["progress"])
        random = checkpoint.kind("random")
        torch.set_rng_state(random["cpu"])
        if "cuda" in random:
            torch.cuda.set_rng_state(random["cuda"], self.device)

    def _random(self) -> dict[str, Tensor]:
        """The states of torch's generators; nothing else is drawn from."""
        here = {"cpu": torch.get_rng_state()}
        return here | ({"cuda": torch.cuda.get_rng_state(self.device)} if self.device.type == "cuda" else {})

    def _speed(self, batch: Batch, seconds: float) -> dict[str, float]:
        shape = (batch.x.shape, None if batch.source is None else batch.source.shape)
        if shape not in self._flops:
            self._flops[shape] = step_flops(self.net.described, batch)
        self._pace = seconds if self._pace is None else SMOOTH * self._pace + (1 - SMOOTH) * seconds
        return {
            "seconds": seconds,
            "tokens_per_second": tokens_in(self.net.described, batch) / seconds,
            "mfu": self._flops[shape] / seconds / self.peak,
            "left": self._pace * (self.recipe.steps - self.progress.step),
        }

    def _diverge(self, step: int, batch: Batch, loss: Tensor) -> None:
        bad = first_bad(self.net, self.groups, lambda: self.stepper.loss(batch))
        what = "gradient is not finite" if bool(loss.isfinite()) else f"loss is {loss.item()}"
        raise Diverged(self._refused(f"step {step}: the {what}; {bad}"))

    def _refused(self, fact: str) -> str:
        paths = self.checkpoints.paths
        kept = f"the checkpoint of step {int(paths[0].stem)} is kept in {self.folder}" if paths else "nothing is lost"
        return f"{fact}; {kept}; train anew with a lower lr than {self.recipe.lr:g} or a longer warmup"
