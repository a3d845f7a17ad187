"""The loop: from a task and a recipe to a folder that holds a model, whatever happens on the way."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..blueprint import Model
from ..blueprint.manifest import MANIFEST
from ..errors import SpecError, nearest
from ..files import Lock, sweep, write_atomically
from ..models import Transformer, save
from ..spread import joined
from ..spread.path import Path as Way
from ..tasks import Task
from .checkpoint import Checkpoint, Checkpoints
from .interrupts import Interrupts
from .pages import page
from .recipe import Recipe
from .run import CHECKPOINTS, Run
from .setup import Setup, environment, shorter
from .sinks import Journal, Sink, sink

RESUMES = ("never", "allowed")
FINAL = "final.json"
Write = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class Result:
    """What a run came to, with the weights that were best on "valid"; `split` says what they were measured on at last:
    "test", or "valid" of data without a test split.
    """

    task: str
    steps: int
    seconds: float
    metrics: Mapping[str, float]
    split: str
    model: str
    best: int | None
    precision: str
    compile: str
    net: Transformer = field(repr=False, compare=False)

    @property
    def data(self) -> dict[str, Any]:
        """All of it but the model itself, as plain values."""
        return {name: value for name, value in vars(self).items() if name != "net"}


def train(
    task: Task,
    described: Model | Transformer | None = None,
    recipe: Recipe | None = None,
    out: Path | str = "",
    resume: str = "never",
    sinks: Sequence[Sink | str] = (),
) -> Result:
    """Train a model on a task and leave it in the folder `out`, with checkpoints and metrics.jsonl beside it.

    Without a description the task's own model is built; a model that is given goes on from its weights, and is
    changed. resume="allowed" goes on where a run of the same task, model and recipe was ended, and begins where there
    is none; "never" refuses a folder that holds one. `sinks` are told all numbers as they come: "tensorboard",
    "mlflow", "wandb", "trackio", or objects of your own.

    Killed at any moment and resumed, a run on the CPU ends with the same bits as one that was let be.
    """
    if resume not in RESUMES:
        raise SpecError(f"resume={resume!r} is unknown; {nearest(str(resume), RESUMES)}")
    if not str(out):
        raise SpecError("train leaves a model behind; say where, as in out='runs/first'")
    taken = [sink(one) if isinstance(one, str) else one for one in sinks]
    with joined() as launch:
        setup = Setup.of(task, described, Recipe() if recipe is None else recipe, Path(out), launch)
        return _trained(setup, resume, [Journal(), *taken])


def _trained(setup: Setup, resume: str, sinks: Sequence[Sink]) -> Result:
    """What the setup comes to, with the folder to itself; of all ranks the leader tells."""
    world = setup.world
    devices = [world.device] if world.device.type == "cuda" else []
    with Interrupts() as interrupts, world.leading(Lock(setup.folder)), torch.random.fork_rng(devices):
        run, notes = _begin(setup, resume)
        with _opened(sinks if world.leads else [], run, shorter(setup.config)) as write:
            for note in notes:
                write({"event": "note", "step": run.progress.step, "says": note})
            _go(run, setup, write, interrupts)
            return _finish(run, write)


def _begin(setup: Setup, resume: str) -> tuple[Run, list[str]]:
    """The run, new or gone on with, and what is to be said about that."""
    held, damages = setup.world.told(lambda: _found(setup.folder, resume))
    if held is None:
        run = setup.begun()
        return run, [*setup.task.notes, *setup.notes, *run.stepper.choice.reasons]
    run = setup.resumed(held)
    return run, [*damages, *setup.notes, f"going on from step {held.step}", *run.stepper.choice.reasons]


def _found(folder: Path, resume: str) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint to go on from, none where there is nothing, and what was found wrong with newer ones."""
    checkpoints = Checkpoints(folder / CHECKPOINTS)
    for swept in (folder, checkpoints.folder):
        sweep(swept)
    held, damages = checkpoints.newest()
    if held is None and (folder / MANIFEST).exists():
        raise SpecError(f"{folder} holds a model already; give another folder, or move that one away")
    if held is not None and resume == "never":
        remedy = "go on with resume='allowed' (--resume), or give another folder"
        raise SpecError(f"{folder} holds a run of {held.step} steps; {remedy}")
    return held, damages


@contextmanager
def _opened(sinks: Sequence[Sink], run: Run, config: Mapping[str, Any]) -> Iterator[Write]:
    """Every sink, open; what hands a record to all of them."""
    begins = {"event": "run", "step": run.progress.step, **environment(run), **config}
    with ExitStack() as stack:
        for one in sinks:
            stack.callback(one.close)
            one.open(run.folder, begins)

        def write(record: Mapping[str, Any]) -> None:
            for one in sinks:
                one.write(record)

        write(begins)
        yield write


def _go(run: Run, setup: Setup, write: Write, interrupts: Interrupts) -> None:
    """Every step that is left, with all that is looked at and kept on the way."""
    every = run.recipe.checkpoint_every
    while not run.over:
        write(run.step())
        better = False
        if run.due:
            told = run.evaluate()
            write(told)
            better = told["best"]
        asked = run.world.any(interrupts.asked)
        if better or run.over or asked or run.progress.step % every == 0:
            run.keep(setup.config)
        if better:
            run.leave(page(run, told["metrics"], "valid"))
        if asked and not run.over:
            raise KeyboardInterrupt(f"ended at step {run.progress.step}, which is kept in {run.folder}")


def _finish(run: Run, write: Write) -> Result:
    """Measure the best weights on what was never looked at, and leave them in the folder."""
    net, damage = run.best()
    if damage:
        write({"event": "note", "step": run.progress.step, "says": damage})
    begun, split = time.perf_counter(), run.examiner.last
    metrics = run.examiner.measures(Way(net), split) | run.examiner.scores(net, split)
    seconds = run.progress.seconds + time.perf_counter() - begun
    choice = run.stepper.choice
    told = (run.task.name, run.progress.step, seconds, metrics, split, str(run.folder), run.progress.best)
    result = Result(*told, choice.precision, choice.compile, net.eval())
    if run.world.leads:
        save(net, run.folder, tokenizer=run.task.tokenizer, readme=page(run, metrics, split))
        write_atomically(run.folder / FINAL, json.dumps(result.data, indent=2).encode() + b"\n")
    write({"event": "end", "step": run.progress.step, "metrics": metrics, "seconds": seconds, "split": split})
    return result
