"""`train`: the training loop, with evaluation, checkpoints, resuming and graceful interruption."""

from __future__ import annotations

import _thread
import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch

from ..attention.spec.serialization import format_toml
from ..kernels.compilation import compile_when_called
from ..models import Transformer, save
from ..models.distributed import join_process_group
from ..models.distributed.sharded_model import BatchForward
from ..models.model_spec import ModelSpec
from ..models.model_spec.serialization import MANIFEST_FILE
from ..models.save_load import MODEL_FOLDER
from ..report.data import Column, Table
from ..report.progress import format_duration
from ..report.render import to_markdown
from ..util.errors import SpecError, pluralise, suggest
from ..util.files import FolderLock, remove_leftovers, write_atomically
from ..util.output_paths import check_output
from .data import Task
from .loggers import (
    CURVE_FILES,
    JsonlLogger,
    MetricLogger,
    create_logger,
    make_curves,
    read_records,
    save_curves,
)
from .recipe import Recipe
from .run_setup import TrainingSetup, describe_change
from .train_step import BatchPrefetcher
from .training_run import CHECKPOINT_FOLDER, CheckpointFolder, TrainingCheckpoint, TrainingRun

GRACE_SECONDS = 1.0  # for the step that runs when Ctrl-C arrives
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


# --- Interruption ---------------------------------------------------------------------------------


class InterruptGuard:
    """Context in which the first Ctrl-C or SIGTERM only sets `is_requested`; a second one
    interrupts at once.

    A second one comes by itself after `grace` seconds, unless `finish` was called. The context has
    no effect outside the main thread, which alone can handle signals.

    >>> with InterruptGuard() as interrupts:
    ...     signal.raise_signal(signal.SIGINT)
    ...     interrupts.is_requested
    True
    """

    def __init__(self, grace: float | None = None) -> None:
        self.is_requested = False
        self._grace = grace
        self._before: dict[int, Any] = {}
        self._requested = threading.Event()
        self._finished = threading.Event()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {
                number: signal.signal(number, self._handle_signal) for number in STOP_SIGNALS
            }
            if self._grace is not None:
                threading.Thread(
                    target=self._interrupt_late, name="headwise-interrupt", daemon=True
                ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def finish(self) -> None:
        """Let what follows take its time, such as writing a checkpoint."""
        self._finished.set()
        self._requested.set()

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_requested:
            raise KeyboardInterrupt
        self.is_requested = True
        self._requested.set()

    def _interrupt_late(self) -> None:
        self._requested.wait()
        if not self._finished.wait(self._grace):
            _thread.interrupt_main()


# --- Model card -----------------------------------------------------------------------------------

CURVE_LINES = [
    "",
    "<picture>",
    f'<source media="(prefers-color-scheme: dark)" srcset="{CURVE_FILES["dark"]}">',
    f'<img src="{CURVE_FILES["light"]}" alt="Learning curves over the steps">',
    "</picture>",
]
SPLIT_DESCRIPTIONS = {
    "valid": "held-out examples",
    "test": "the test split, evaluated once, after training",
}


def render_training_card(run: TrainingRun, metrics: Mapping[str, float], split: str) -> str:
    """Render Markdown with the task, recipe fields that differ from the defaults, and each metric
    with its chance level.
    """
    task = run.task
    task_options = ", ".join(f"{f.name}={getattr(task, f.name)!r}" for f in fields(task))
    steps = f"{pluralise(run.progress.step, 'step')} of {pluralise(run.recipe.batch, 'example')}"
    duration = format_duration(run.elapsed_seconds)
    reason = f" It ended because of this: {run.end_reason}." if run.is_out_of_patience else ""
    lines = [
        *("## Training", "", f"The task is {task.name} ({task_options})."),
        f"{steps} in {run.train_step.options.precision}, "
        f"{duration} in total, with seed {run.recipe.seed}.{reason}",
    ]
    defaults = vars(Recipe())
    changed: list[str] = []
    for name, value in vars(run.recipe).items():
        if value != defaults[name]:
            plain = list(value) if isinstance(value, tuple) else value
            changed.append(f"{name} = {format_toml(plain)}")
    if changed:
        lines += ["", "Recipe, where it differs from the defaults:", "", "```toml", *changed, "```"]
    if run.history:
        changes = [f"- {describe_change(change)}" for change in run.history]
        lines += ["", "Changes of the recipe:", "", *changes]
    if (run.folder / CURVE_FILES["light"]).exists():
        lines += CURVE_LINES
    lines += ["", "## Scores", "", f"On {SPLIT_DESCRIPTIONS[split]}.", ""]
    rows = [(name, value, task.chance.get(name, "")) for name, value in metrics.items()]
    columns = ["metric", *(Column(name, "{:.4f}".format) for name in ("value", "chance"))]
    return "\n".join([*lines, to_markdown(Table("", columns, rows))])


# --- The loop -------------------------------------------------------------------------------------

RESUME_MODES = ("never", "allowed", "with-changes")
FINAL_FILE = "final.json"
RecordWriter = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class TrainingResult:
    """Result of a training run: the model with the lowest validation loss, and its final metrics.

    `split` is the split of `metrics`: "test", or "valid" if the data has no test split. `best` is
    the step at which the model was saved. `ended` is the reason why the run ended, and `history`
    lists changes of its recipe. `seconds` counts everything from the call of `train` on, in all
    processes that worked on the run.
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
    ended: str
    history: Sequence[Mapping[str, Any]]
    net: Transformer = field(repr=False, compare=False)

    @property
    def data(self) -> dict[str, Any]:
        """All fields but the model, as plain values."""
        return {name: value for name, value in vars(self).items() if name != "net"}


@compile_when_called()
def train(
    task: Task,
    model_spec: ModelSpec | Transformer | None = None,
    recipe: Recipe | None = None,
    out: Path | str = "",
    resume: str = "never",
    loggers: Sequence[MetricLogger | str] = (),
    *,
    curves: bool = True,
) -> TrainingResult:
    """Train a model on a task and save it in the folder `out`, together with checkpoints and
    metrics.jsonl.

    `model_spec` is the spec of a new model (default: `task.model()`), or a model, which is trained
    further in place. resume="allowed" continues a run of the same task, model and recipe in `out`,
    or starts one if there is none; "with-changes" also lets the recipe change from the next step
    on, for example to more steps or another learning rate; "never" raises SpecError if `out` holds
    a run.

    `loggers` receive all records: "tensorboard", or objects of your own with the methods of
    `MetricLogger`. `curves=False` leaves out the pictures of learning curves.

    A run on the CPU that was killed at any moment and resumed ends with the same bits as an
    uninterrupted one.
    """
    if resume not in RESUME_MODES:
        raise SpecError(f"resume={resume!r} is unknown; {suggest(str(resume), RESUME_MODES)}")
    if not str(out):
        raise SpecError(
            "out= is missing; give the folder for the trained model, as in out='runs/first'"
        )
    opened = [create_logger(one) if isinstance(one, str) else one for one in loggers]
    check_output(out, MODEL_FOLDER, "continue")
    with ExitStack() as stack:
        launch = stack.enter_context(join_process_group())
        setup = TrainingSetup.prepare(task, model_spec, recipe or Recipe(), Path(out), launch)
        world = setup.ranks
        is_alone = world.size == 1
        interrupts = InterruptGuard(GRACE_SECONDS if is_alone else None)
        stack.enter_context(world.leader_context(FolderLock(setup.folder)))
        stack.enter_context(
            torch.random.fork_rng([world.device] if world.device.type == "cuda" else [])
        )
        if not is_alone:  # several ranks end at the same step, never during the start
            stack.enter_context(interrupts)
        run, notes = _start_or_resume(setup, resume)
        config = {name: value for name, value in setup.config.items() if name != "model"}
        opened = [JsonlLogger(), *opened] if world.is_leader else []
        with _open_loggers(opened, run, config) as write:
            for note in notes:
                write({"event": "note", "step": run.progress.step, "says": note})
            ahead = run.recipe.prefetch if is_alone else 0
            batches = BatchPrefetcher(task, run.recipe.batch, ahead=ahead, stop=run.recipe.steps)
            with interrupts if is_alone else nullcontext(), batches:
                _run_steps(run, setup, write, interrupts, batches)
            if curves:
                _draw_curves(run)
            return _finish_run(run, write)


def _start_or_resume(setup: TrainingSetup, resume: str) -> tuple[TrainingRun, list[str]]:
    """Start or resume the run, and return it with notes about it for the loggers."""
    checkpoint, notes = setup.ranks.run_on_leader(lambda: _find_checkpoint(setup.folder, resume))
    if checkpoint is None:
        run = setup.start_run()
        notes = [*setup.task.notes, *setup.notes]
    else:
        run, change = setup.resume_run(checkpoint, resume)
        run.count_earlier_seconds(_read_final_seconds(setup.folder, checkpoint.step))
        notes = [*notes, *setup.notes, f"resuming from step {checkpoint.step}"]
        notes += [describe_change(change)] if change else []
    return run, notes


def _read_final_seconds(folder: Path, step: int) -> float:
    """Seconds that a run had taken when it ended at this step; 0 if it has not ended there."""
    try:
        final = json.loads((folder / FINAL_FILE).read_text())
        return float(final["seconds"]) if final["steps"] == step else 0.0
    except (OSError, ValueError, KeyError):
        return 0.0


def _find_checkpoint(folder: Path, resume: str) -> tuple[TrainingCheckpoint | None, list[str]]:
    """Return the checkpoint to resume from (None without a run), and a message for each damaged
    newer one.
    """
    checkpoints = CheckpointFolder(folder / CHECKPOINT_FOLDER)
    for directory in (folder, checkpoints.folder):
        remove_leftovers(directory)
    checkpoint, damages = checkpoints.load_newest()
    if checkpoint is None and (folder / MANIFEST_FILE).exists():
        raise SpecError(
            f"{folder} already holds a model; give another folder, or move the model away"
        )
    if checkpoint is not None and resume == "never":
        raise SpecError(
            f"{folder} holds a run of {pluralise(checkpoint.step, 'step')}; continue it with "
            "resume='allowed' (--resume), or give another folder"
        )
    return checkpoint, damages


@contextmanager
def _open_loggers(
    loggers: Sequence[MetricLogger], run: TrainingRun, config: Mapping[str, Any]
) -> Iterator[RecordWriter]:
    """Open all loggers; yields a function that writes a record to each of them."""
    environment = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": str(run.device),
        "ranks": run.world.size,
        "parallelism": str(run.world.parallelism),
        "parameters": sum(p.numel() for p in run.net.parameters() if p.requires_grad),
    }
    run_record = {"event": "run", "step": run.progress.step, **environment, **config}
    with ExitStack() as stack:
        for logger in loggers:
            stack.callback(logger.close)
            logger.open(run.folder, run_record)

        def write(record: Mapping[str, Any]) -> None:
            for logger in loggers:
                logger.write(record)

        write(run_record)
        yield write


def _run_steps(
    run: TrainingRun,
    setup: TrainingSetup,
    write: RecordWriter,
    interrupts: InterruptGuard,
    batches: BatchPrefetcher,
) -> None:
    """Take the remaining steps, with evaluations and checkpoints."""
    while not run.is_finished:
        try:
            record = run.step(batches)
        except KeyboardInterrupt:
            interrupts.finish()
            if run.undo_step():
                run.save_checkpoint(setup.config)
            elif not run.checkpoints.path(run.progress.step).exists():
                raise
            raise _describe_interrupt(run) from None
        write(record)
        step = run.progress.step
        metrics: Mapping[str, float] | None = None  # of the best evaluation so far
        if step % run.recipe.evaluate_every == 0 or step == run.recipe.steps:
            evaluation = run.evaluate()
            write(evaluation)
            metrics = evaluation["metrics"] if evaluation["best"] else None
        is_interrupted = run.world.any(interrupts.is_requested)
        if is_interrupted:
            interrupts.finish()
        is_due = step % run.recipe.checkpoint_every == 0 or run.is_finished
        if is_due or is_interrupted or metrics is not None:
            run.save_checkpoint(setup.config)
        if metrics is not None:
            run.save_model(render_training_card(run, metrics, "valid"))
        if is_interrupted and not run.is_finished:
            raise _describe_interrupt(run)


def _describe_interrupt(run: TrainingRun) -> KeyboardInterrupt:
    return KeyboardInterrupt(
        f"interrupted at step {run.progress.step}; the checkpoint is in {run.folder}"
    )


def _draw_curves(run: TrainingRun) -> None:
    """Draw the learning curves into the folder, once at the end, because drawing takes a quarter of
    a second.
    """
    if run.world.is_leader and run.progress.step:
        records = read_records(run.folder / JsonlLogger.NAME)
        size = f"{pluralise(run.progress.step, 'step')} of {pluralise(run.recipe.batch, 'example')}"
        changes = [change["step"] for change in run.history]
        save_curves(run.folder, make_curves(records, f"{run.task.name}, {size}", changes))


def _finish_run(run: TrainingRun, write: RecordWriter) -> TrainingResult:
    """Evaluate the best weights on the final split, and save them in the folder."""
    step = run.progress.step
    net, damage = run.load_best()
    for note in (run.end_reason if run.is_out_of_patience else None, damage):
        if note:
            write({"event": "note", "step": step, "says": note})
    split = run.evaluator.final_split
    metrics = run.evaluator.compute_metrics(BatchForward(net), split)
    metrics |= run.evaluator.score_generation(net, split)
    end = {"metrics": metrics, "seconds": run.elapsed_seconds, "split": split}
    options = run.train_step.options
    result = TrainingResult(
        task=run.task.name,
        steps=step,
        **end,
        model=str(run.folder),
        best=run.progress.best,
        precision=options.precision,
        compile=options.compile,
        ended=run.end_reason,
        history=list(run.history),
        net=net.eval(),
    )
    if run.world.is_leader:
        save(net, run.folder, readme=render_training_card(run, metrics, split))
        write_atomically(
            run.folder / FINAL_FILE, json.dumps(result.data, indent=2).encode() + b"\n"
        )
    write({"event": "end", "step": step, **end, "ended": run.end_reason})
    return result
