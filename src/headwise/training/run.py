"""A run in hand: one step after the other, and all that it needs to be taken up again where it stood."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import Diverged
from ..models import Transformer, save
from ..tasks import Batch, Task
from ..tasks.packing import packed, texts_of
from .blame import first_bad
from .checkpoint import Checkpoint, Checkpoints, Damaged, read
from .evaluation import Examiner
from .loss import check
from .optimiser import Optimiser, grouped, named
from .probing import peak
from .recipe import Recipe
from .stepping import Stepper
from .work import step_flops, tokens_in

CHECKPOINTS = "checkpoint"  # the folder of them, in that of the run
STREAM = 0x9E3779B97F4A7C15  # far from one worker's seed to the next
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
        self.holding, self.world, self.device = stepper.holding, stepper.world, stepper.device
        self.groups = grouped(self.holding.own, self.net.described, self.recipe.decays)
        self.optimiser = Optimiser(self.groups, self.recipe)
        self.checkpoints = Checkpoints(folder / CHECKPOINTS, self.recipe.keep)
        self.examiner = Examiner(task, self.recipe, stepper.choice, self.world)
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
        norm = self.holding.norm()
        if not bool(loss.isfinite() & norm.isfinite()):
            self._diverge(step, batch, loss)
        if self.recipe.clip:
            self.holding.clip(self.recipe.clip, norm)
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
        metrics = self.examiner.measures(self.holding.path, "valid")
        if not math.isfinite(metrics["loss"]):
            raise Diverged(self._refused(f"step {step}: the held-out loss is {metrics['loss']}"))
        if before is None or metrics["loss"] < before:
            self.progress.best, self.progress.loss, self.progress.waited = step, metrics["loss"], 0
        else:
            self.progress.waited += 1
        self.progress.seconds += time.perf_counter() - begun
        return {"event": "evaluation", "step": step, "metrics": metrics, "best": self.progress.best == step}

    def keep(self, config: Mapping[str, Any]) -> None:
        """Write a checkpoint of this moment; what ranks hold parts of is written whole, so that any world can go on."""
        tensors = {f"model {name}": value for name, value in self._led(self.holding.tensors())}
        tensors |= {f"optimiser {key}": value for key, value in self._led(self._moments())}
        tensors |= {f"random {name}": value for name, value in self._random().items()}
        state = {"config": config, "choice": asdict(self.stepper.choice), "progress": asdict(self.progress)}
        if self.world.leads:
            self.checkpoints.save(Checkpoint(self.progress.step, tensors, state), self.progress.best)

    def leave(self, readme: str) -> None:
        """Leave the model in the run's folder."""
        net = self.holding.gathered()
        if self.world.leads:
            save(net, self.folder, readme=readme)

    def best(self) -> tuple[Transformer, str | None]:
        """The whole model with the weights that were best, as the leader finds them; the last, and why, if damaged."""
        path = self.checkpoints.path(self.progress.best or self.progress.step)
        last = dict(self._led(self.holding.tensors()))

        def found() -> tuple[dict[str, Tensor], str | None]:
            try:
                return read(path).kind("model"), None
            except Damaged as error:
                return last, f"{error}; the last weights are taken"

        tensors, damage = self.world.told(found)
        return self.holding.assembled(tensors), damage

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go back to the moment of a checkpoint."""
        self.holding.load(checkpoint.kind("model"))
        moments = checkpoint.kind("optimiser").items()
        self.optimiser.load({key: self.holding.part(named(key), value) for key, value in moments})
        self.progress = Progress(**checkpoint.state["progress"])
        self._draw_on(checkpoint.kind("random"))

    def _led(self, every: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """All of these, put together with the others, for the leader alone."""
        return ((name, value.detach().cpu()) for name, value in every if self.world.leads)

    def _moments(self) -> Iterator[tuple[str, Tensor]]:
        for key, value in self.optimiser.tensors.items():
            yield key, self.holding.whole(named(key), value)

    def _random(self) -> dict[str, Tensor]:
        """The states of torch's generators by worker, the leader's without a number; nothing else is drawn from."""
        here = {"cpu": torch.get_rng_state()}
        here |= {"cuda": torch.cuda.get_rng_state(self.device)} if self.device.type == "cuda" else {}
        every = enumerate(self.world.every(here)[:: self.world.spread.tensor])
        return {_of_worker(name, worker): state for worker, states in every for name, state in states.items()}

    def _draw_on(self, states: Mapping[str, Tensor]) -> None:
        """Go on drawing where this worker stood; one that was not there begins a stream of its own."""
        cpu, cuda = (states.get(_of_worker(name, self.world.worker)) for name in ("cpu", "cuda"))
        if cpu is None:
            torch.manual_seed(stream(self.recipe.seed + self.progress.step, self.world.worker))
            return
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, self.device)

    def _speed(self, batch: Batch, seconds: float) -> dict[str, float]:
        self._pace = seconds if self._pace is None else SMOOTH * self._pace + (1 - SMOOTH) * seconds
        return {
            "seconds": seconds,
            "tokens_per_second": tokens_in(self.net.described, batch) / seconds,
            "mfu": self._asked(batch) / seconds / self.peak / self.world.size,
            "left": self._pace * (self.recipe.steps - self.progress.step),
        }

    def _asked(self, batch: Batch) -> int:
        """The FLOPs of a step on this batch, of packed rows those of every text by itself."""
        each = [batch] if self.stepper.choice.rows == "padded" else texts_of(packed(batch).batch)
        return sum(self._flops_of(one) for one in each)

    def _flops_of(self, batch: Batch) -> int:
        shape = (batch.x.shape, None if batch.source is None else batch.source.shape)
        if shape not in self._flops:
            self._flops[shape] = step_flops(self.holding.described, batch)
        return self._flops[shape]

    def _diverge(self, step: int, batch: Batch, loss: Tensor) -> None:
        own = self.holding.share(batch).batch
        bad = first_bad(self.holding, self.groups, lambda: self.stepper.loss(own))
        what = "gradient is not finite" if bool(loss.isfinite()) else f"loss is {loss.item()}"
        raise Diverged(self._refused(f"step {step}: the {what}; {bad}"))

    def _refused(self, fact: str) -> str:
        paths = self.checkpoints.paths
        kept = f"the checkpoint of step {int(paths[0].stem)} is kept in {self.folder}" if paths else "nothing is lost"
        return f"{fact}; {kept}; train anew with a lower lr than {self.recipe.lr:g} or a longer warmup"


def stream(seed: int, worker: int) -> int:
    """The seed of what one of several workers draws: none draws what another does, and the first as if alone.

    >>> stream(7, 0), stream(7, 1) != stream(8, 0)
    (7, True)
    """
    return (seed + worker * STREAM) % 2**63


def _of_worker(name: str, worker: int) -> str:
    return f"{name} {worker}" if worker else name
