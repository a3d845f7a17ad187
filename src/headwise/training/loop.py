"""Ctrl-C and a request to end, put off until a step is whole."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch

from ..data import Task
from ..distributed import join_process_group
from ..distributed.sharded_model import BatchForward as Way
from ..errors import SpecError, suggest
from ..files import FolderLock, remove_temporary_files, write_atomically
from ..model_spec import ModelSpec
from ..model_spec.serialization import MANIFEST_FILE
from ..models import Transformer, save
from ..spec.serialization import format_toml
from .checkpoint import CheckpointFolder, TrainingCheckpoint
from .loggers import JsonlLogger, MetricLogger, create_logger, format_duration
from .recipe import Recipe
from .run_setup import TrainingSetup, describe_environment, omit_model
from .training_run import CHECKPOINT_FOLDER, TrainingRun

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class InterruptGuard:
    """Inside, the first Ctrl-C or SIGTERM only sets `asked`; the second ends at once, as outside.

    Only a main thread hears signals; in another one nothing changes.

    >>> with InterruptGuard() as interrupts:
    ...     signal.raise_signal(signal.SIGINT)
    ...     interrupts.is_requested
    True
    """

    def __init__(self) -> None:
        self.is_requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle_signal) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_requested:
            raise KeyboardInterrupt
        self.is_requested = True


# --- What the page of a trained model says of how it was trained, and of its scores --------------------

SPLIT_DESCRIPTIONS = {"valid": "held-out examples", "test": "the test split, looked at once, after training"}


def render_training_card(run: TrainingRun, metrics: Mapping[str, float], split: str) -> str:
    """Markdown: the task, the recipe as far as it is not the usual one, and every measure beside its chance level."""
    task, chance, choice = run.task, run.task.chance, run.train_step.options
    knobs = ", ".join(f"{f.name}={getattr(task, f.name)!r}" for f in fields(task))
    usual, own = vars(Recipe()), vars(run.recipe)
    said = [f"{name} = {format_toml(_to_plain(value))}" for name, value in own.items() if value != usual[name]]
    lines = ["## Training", "", f"The task is {task.name} ({knobs})."]
    lines += [
        f"{run.progress.step} steps of {run.recipe.batch} examples in {choice.precision}, "
        f"{format_duration(run.progress.seconds)} in all, from the seed {run.recipe.seed}."
    ]
    lines += ["", "What its recipe says besides the usual:", "", "```toml", *said, "```"] if said else []
    lines += [
        "",
        "## Scores",
        "",
        f"On {SPLIT_DESCRIPTIONS[split]}.",
        "",
        "| measure | value | by chance |",
        "|---|---|---|",
    ]
    lines += [f"| {name} | {value:.4f} | {_format_chance(chance, name)} |" for name, value in metrics.items()]
    return "\n".join(lines)


def _to_plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _format_chance(chance: Mapping[str, float], name: str) -> str:
    return f"{chance[name]:.4f}" if name in chance else ""


# --- The loop ------------------------------------------------------------------------------------------

RESUME_MODES = ("never", "allowed")
FINAL_FILE = "final.json"
RecordWriter = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class TrainingResult:
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
    model_spec: ModelSpec | Transformer | None = None,
    recipe: Recipe | None = None,
    out: Path | str = "",
    resume: str = "never",
    loggers: Sequence[MetricLogger | str] = (),
) -> TrainingResult:
    """Train a model on a task and leave it in the folder `out`, with checkpoints and metrics.jsonl beside it.

    Without a description the task's own model is built; a model that is given goes on from its weights, and is
    changed. resume="allowed" goes on where a run of the same task, model and recipe was ended, and begins where there
    is none; "never" refuses a folder that holds one. `sinks` are told all numbers as they come: "tensorboard",
    "mlflow", "wandb", "trackio", or objects of your own.

    Killed at any moment and resumed, a run on the CPU ends with the same bits as one that was let be.
    """
    if resume not in RESUME_MODES:
        raise SpecError(f"resume={resume!r} is unknown; {suggest(str(resume), RESUME_MODES)}")
    if not str(out):
        raise SpecError("train leaves a model behind; say where, as in out='runs/first'")
    taken = [create_logger(one) if isinstance(one, str) else one for one in loggers]
    with join_process_group() as launch:
        setup = TrainingSetup.of(task, model_spec, Recipe() if recipe is None else recipe, Path(out), launch)
        return _run_training(setup, resume, [JsonlLogger(), *taken])


def _run_training(setup: TrainingSetup, resume: str, sinks: Sequence[MetricLogger]) -> TrainingResult:
    """What the setup comes to, with the folder to itself; of all ranks the leader tells."""
    world = setup.ranks
    devices = [world.device] if world.device.type == "cuda" else []
    with InterruptGuard() as interrupts, world.leader_context(FolderLock(setup.folder)), torch.random.fork_rng(devices):
        run, notes = _start_or_resume(setup, resume)
        with _open_loggers(sinks if world.is_leader else [], run, omit_model(setup.config)) as write:
            for note in notes:
                write({"event": "note", "step": run.progress.step, "says": note})
            _run_steps(run, setup, write, interrupts)
            return _finish_run(run, write)


def _start_or_resume(setup: TrainingSetup, resume: str) -> tuple[TrainingRun, list[str]]:
    """The run, new or gone on with, and what is to be said about that."""
    held, damages = setup.ranks.told(lambda: _find_checkpoint(setup.folder, resume))
    if held is None:
        run = setup.start_run()
        return run, [*setup.task.notes, *setup.notes, *run.train_step.options.reasons]
    run = setup.resume_run(held)
    return run, [*damages, *setup.notes, f"going on from step {held.step}", *run.train_step.options.reasons]


def _find_checkpoint(folder: Path, resume: str) -> tuple[TrainingCheckpoint | None, list[str]]:
    """The checkpoint to go on from, none where there is nothing, and what was found wrong with newer ones."""
    checkpoints = CheckpointFolder(folder / CHECKPOINT_FOLDER)
    for swept in (folder, checkpoints.folder):
        remove_temporary_files(swept)
    held, damages = checkpoints.load_newest()
    if held is None and (folder / MANIFEST_FILE).exists():
        raise SpecError(f"{folder} holds a model already; give another folder, or move that one away")
    if held is not None and resume == "never":
        remedy = "go on with resume='allowed' (--resume), or give another folder"
        raise SpecError(f"{folder} holds a run of {held.step} steps; {remedy}")
    return held, damages


@contextmanager
def _open_loggers(sinks: Sequence[MetricLogger], run: TrainingRun, config: Mapping[str, Any]) -> Iterator[RecordWriter]:
    """Every sink, open; what hands a record to all of them."""
    begins = {"event": "run", "step": run.progress.step, **describe_environment(run), **config}
    with ExitStack() as stack:
        for one in sinks:
            stack.callback(one.close)
            one.open(run.folder, begins)

        def write(record: Mapping[str, Any]) -> None:
            for one in sinks:
                one.write(record)

        write(begins)
        yield write


def _run_steps(run: TrainingRun, setup: TrainingSetup, write: RecordWriter, interrupts: InterruptGuard) -> None:
    """Every step that is left, with all that is looked at and kept on the way."""
    every = run.recipe.checkpoint_every
    while not run.is_finished:
        write(run.step())
        better = False
        if run.is_evaluation_due:
            told = run.evaluate()
            write(told)
            better = told["best"]
        asked = run.world.any(interrupts.is_requested)
        if better or run.is_finished or asked or run.progress.step % every == 0:
            run.save_checkpoint(setup.config)
        if better:
            run.save_model(render_training_card(run, told["metrics"], "valid"))
        if asked and not run.is_finished:
            raise KeyboardInterrupt(f"ended at step {run.progress.step}, which is kept in {run.folder}")


def _finish_run(run: TrainingRun, write: RecordWriter) -> TrainingResult:
    """Measure the best weights on what was never looked at, and leave them in the folder."""
    net, damage = run.load_best()
    if damage:
        write({"event": "note", "step": run.progress.step, "says": damage})
    begun, split = time.perf_counter(), run.evaluator.final_split
    metrics = run.evaluator.compute_metrics(Way(net), split) | run.evaluator.score_generation(net, split)
    seconds = run.progress.seconds + time.perf_counter() - begun
    choice = run.train_step.options
    told = (run.task.name, run.progress.step, seconds, metrics, split, str(run.folder), run.progress.best)
    result = TrainingResult(*told, choice.precision, choice.compile, net.eval())
    if run.world.is_leader:
        save(net, run.folder, readme=render_training_card(run, metrics, split))
        write_atomically(run.folder / FINAL_FILE, json.dumps(result.data, indent=2).encode() + b"\n")
    write({"event": "end", "step": run.progress.step, "metrics": metrics, "seconds": seconds, "split": split})
    return result
