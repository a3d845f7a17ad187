"""Where the numbers of a run go: one small protocol, its own file of JSON lines, and what others watch runs with."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TextIO

from ..errors import SpecError, suggest
from ..files import JsonLines, read_lines, write_lines

Record = Mapping[str, Any]


class MetricLogger(Protocol):
    """Takes the records of a run, one after the other.

    A record has an "event" and a "step": "run" begins it and says its configuration, "note" tells of what was decided,
    "step" and "evaluation" hold numbers, "end" the last ones.
    """

    def open(self, folder: Path, config: Record) -> None:
        """A run begins, or goes on."""
        ...

    def write(self, record: Record) -> None:
        """Take one record."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...


class JsonlLogger:
    """metrics.jsonl in the folder of a run: every record on a line of its own.

    What a killed run wrote after the checkpoint that it goes on from is dropped: it comes again.
    """

    NAME = "metrics.jsonl"

    def __init__(self) -> None:
        self._lines: JsonLines | None = None

    def open(self, folder: Path, config: Record) -> None:
        """Go on behind the records up to the step in hand."""
        path, step = folder / self.NAME, config["step"]
        if path.exists():
            before = (record for record in read_lines(path) if record["event"] != "end")
            write_lines(path, [record for record in before if record.get("step", 0) <= step])
        self._lines = JsonLines(path)

    def write(self, record: Record) -> None:
        """One line more; what ends a stretch of work waits for the disk."""
        assert self._lines is not None
        self._lines.append(record)
        if record["event"] != "step":
            self._lines.sync()

    def close(self) -> None:
        """Let go of the file."""
        if self._lines is not None:
            self._lines.close()


def flatten_numbers(record: Record) -> dict[str, float]:
    """The numbers of a record to be drawn over its steps, by names such as "evaluation/loss", in letters that every
    tracker takes.

    >>> flatten_numbers({"event": "evaluation", "step": 3, "metrics": {"loss": 0.5}, "at": "noon"})
    {'evaluation/loss': 0.5}
    """
    inner = dict(record) | record.get("metrics", {})
    kept = {name: value for name, value in inner.items() if name != "step" and type(value) in (int, float)}
    return {f"{record['event']}/{name.replace('@', '/')}": value for name, value in kept.items()}


class TensorBoardLogger:
    """Event files in the run's folder, for `tensorboard --logdir`."""

    def __init__(self) -> None:
        self._made = import_optional("torch.utils.tensorboard", "tensorboard")

    def open(self, folder: Path, config: Record) -> None:
        """Begin to write."""
        self._writer: Any = self._made.SummaryWriter(log_dir=str(folder / "tensorboard"))

    def write(self, record: Record) -> None:
        """Each number as a curve of its own."""
        for name, value in flatten_numbers(record).items():
            self._writer.add_scalar(name, value, record.get("step", 0))

    def close(self) -> None:
        """Bring it to the disk."""
        self._writer.close()


class MLflowLogger:
    """A run of MLflow, where its own settings say."""

    def __init__(self) -> None:
        self._mlflow = import_optional("mlflow", "mlflow-skinny")

    def open(self, folder: Path, config: Record) -> None:
        """Begin a run, its parameters the recipe's."""
        self._mlflow.start_run(run_name=folder.name)
        self._mlflow.log_params({"task": config["task"]["name"], **config["recipe"]})

    def write(self, record: Record) -> None:
        """All numbers of a step."""
        if found := flatten_numbers(record):
            self._mlflow.log_metrics(found, step=record.get("step", 0))

    def close(self) -> None:
        """End the run."""
        self._mlflow.end_run()


class TrackerLogger:
    """A run of W&B, or of a package that is spoken to in the same way."""

    def __init__(self, name: str) -> None:
        self._package = import_optional(name, name)

    def open(self, folder: Path, config: Record) -> None:
        """Begin a run, its configuration ours."""
        self._package.init(project="headwise", name=folder.name, config=dict(config))

    def write(self, record: Record) -> None:
        """All numbers of a step."""
        if found := flatten_numbers(record):
            self._package.log(found, step=record.get("step", 0))

    def close(self) -> None:
        """End the run."""
        self._package.finish()


LOGGERS = {
    "tensorboard": TensorBoardLogger,
    "mlflow": MLflowLogger,
    "wandb": lambda: TrackerLogger("wandb"),
    "trackio": lambda: TrackerLogger("trackio"),
}


def create_logger(name: str) -> MetricLogger:
    """The sink of this name."""
    if name not in LOGGERS:
        raise SpecError(f"there is no sink {name!r}; {suggest(name, LOGGERS)}")
    return LOGGERS[name]()


def import_optional(module: str, name: str) -> Any:
    """A module that is imported only when it is wanted.

    >>> import_optional("no.such.module", "no-such-package")
    Traceback (most recent call last):
    headwise.errors.SpecError: this sink needs a package that is not installed; pip install no-such-package
    """
    try:
        return import_module(module)
    except ImportError:
        raise SpecError(f"this sink needs a package that is not installed; pip install {name}") from None


# --- A run as it is watched ----------------------------------------------------------------------------

LINE_INTERVAL = 10.0  # seconds between lines where nothing can move


def format_duration(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> format_duration(59.6), format_duration(3723)
    ('1:00', '1:02:03')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_record(record: Mapping[str, Any]) -> str:
    """The numbers of a step or an evaluation on one line.

    >>> format_record({"event": "evaluation", "step": 100, "metrics": {"loss": 0.25, "accuracy": 0.5}})
    'step 100, held out: loss 0.2500, accuracy 0.5000'
    """
    if record["event"] == "evaluation":
        better = ", the best so far" if record.get("best") else ""
        return f"step {record['step']}, held out: {_format_metrics(record['metrics'])}{better}"
    parts = [f"step {record['step']}: loss {record['loss']:.4f}", f"{record['tokens_per_second']:,.0f} tokens/s"]
    parts += [f"MFU {record['mfu']:.0%}"] if "mfu" in record else []
    return ", ".join([*parts, f"{format_duration(record['left'])} left"])


def _format_metrics(metrics: Mapping[str, float]) -> str:
    """The measures; not those of one kind of example alone, such as "exact_match@date"."""
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items() if "@" not in name)


class ConsoleLogger:
    """A sink for people, on stderr unless told otherwise."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._said = 0.0
        self._moving: Any = None

    def open(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Say what begins; on a terminal, show a bar."""
        steps, begun = config["recipe"]["steps"], config["step"]
        going = f"from step {begun} on" if begun else f"{steps} steps"
        self._print_line(f"{config['task']['name']} into {folder}, {going}, {config['parameters']:,} parameters")
        if self._stream.isatty():
            self._moving = _make_progress_bar(self._stream)
            self._moving.add_task("", total=steps, completed=begun, said="")
            self._moving.start()

    def write(self, record: Mapping[str, Any]) -> None:
        """A step moves the bar, or is a line when the last one was long ago; all else is a line."""
        event = record["event"]
        if event == "step" and self._moving is not None:
            self._moving.update(self._moving.task_ids[0], completed=record["step"], said=format_record(record))
        elif event == "evaluation" or (event == "step" and time.monotonic() - self._said > LINE_INTERVAL):
            self._print_line(format_record(record))
        elif event == "note":
            self._print_line(record["says"])
        elif event == "end":
            self._print_line(
                f"{record['split']}: {_format_metrics(record['metrics'])}; {format_duration(record['seconds'])} in all"
            )

    def close(self) -> None:
        """Leave the bar where it is."""
        if self._moving is not None:
            self._moving.stop()
            self._moving = None

    def _print_line(self, text: str) -> None:
        self._said = time.monotonic()
        if self._moving is not None:
            self._moving.console.print(text, highlight=False, markup=False)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()


def _make_progress_bar(stream: TextIO) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    said = TextColumn("{task.fields[said]}", markup=False)
    return Progress(BarColumn(20), said, console=Console(file=stream), transient=True)
