"""Loggers of training runs: the protocol `MetricLogger`, metrics.jsonl, the console and
TensorBoard.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TextIO

from ..errors import SpecError, pluralise, suggest
from ..escaping import escape_terminal, make_visible
from ..files import JsonLines, read_lines, write_lines
from ..progress import LINE_INTERVAL, format_duration
from ..traces import record_types

Record = Mapping[str, Any]


class MetricLogger(Protocol):
    """Protocol of a logger, which receives the records of a run in order.

    A record has an "event" and a "step". The events are "run" (the configuration, first), "note" (a
    message about the run), "step" and "evaluation" (metrics), "sample" (a generated text), and
    "end" (the final metrics).
    """

    def open(self, folder: Path, config: Record) -> None:
        """Start logging; called when a run starts or resumes."""
        ...

    def write(self, record: Record) -> None:
        """Log one record."""
        ...

    def close(self) -> None:
        """Stop logging; called when the run has ended."""
        ...


class JsonlLogger:
    """Writes metrics.jsonl in the folder of a run, one record per line.

    When a run resumes, records after its checkpoint are dropped, because these steps are run again.
    """

    NAME = "metrics.jsonl"

    def __init__(self) -> None:
        self._lines: JsonLines | None = None

    def open(self, folder: Path, config: Record) -> None:
        """Open the file for appending, and drop records after `config["step"]`."""
        path = folder / self.NAME
        if path.exists():
            records = [record for record in read_records(path) if record["event"] != "end"]
            earlier = [record for record in records if record.get("step", 0) <= config["step"]]
            write_lines(path, earlier)
        self._lines = JsonLines(path)

    def write(self, record: Record) -> None:
        """Append one line; all records but those of steps are synchronised to disk."""
        assert self._lines is not None
        self._lines.append(record)
        if record["event"] != "step":
            self._lines.sync()

    def close(self) -> None:
        """Close the file."""
        if self._lines is not None:
            self._lines.close()


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl; raises SpecError for a line that
    no run has written.
    """
    records = read_lines(path)
    for number, values in enumerate(records, 1):
        record = record_types.Record(f"{path}: line {number}", values, "delete the line")
        event = record.read_text("event")
        numbers = dict[str, Any]()
        record.read_int("step", default=0)
        if event == "step":
            numbers = {name: record.get(name) for name in ("loss", "rate")}
        elif event == "evaluation":
            record.read_bool("best")
            numbers = record.read_record("metrics").values
        for name, value in numbers.items():
            if type(value) not in (int, float):  # it may be infinite
                record.fail(name, f"= {value!r} is not a number")
    return records


def flatten_numbers(record: Record) -> dict[str, float]:
    """The numbers of a record under names such as "evaluation/loss".

    >>> flatten_numbers({"event": "evaluation", "step": 3, "metrics": {"loss": 0.5}, "at": "noon"})
    {'evaluation/loss': 0.5}
    """
    numbers: dict[str, float] = {}
    for name, value in (dict(record) | record.get("metrics", {})).items():
        if name != "step" and type(value) in (int, float):
            numbers[f"{record['event']}/{name.replace('@', '/')}"] = value
    return numbers


class TensorBoardLogger:
    """Writes event files to the run's folder, for `tensorboard --logdir`."""

    def __init__(self) -> None:
        self._tensorboard = import_optional("torch.utils.tensorboard", "tensorboard")

    def open(self, folder: Path, config: Record) -> None:
        """Create the event file."""
        self._writer: Any = self._tensorboard.SummaryWriter(log_dir=str(folder / "tensorboard"))

    def write(self, record: Record) -> None:
        """Add each number of the record to its curve."""
        for name, value in flatten_numbers(record).items():
            self._writer.add_scalar(name, value, record.get("step", 0))

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


LOGGERS = {"tensorboard": TensorBoardLogger}


def create_logger(name: str) -> MetricLogger:
    """Create the logger `name`, one of LOGGERS."""
    if name not in LOGGERS:
        raise SpecError(f"there is no logger {name!r}; {suggest(name, LOGGERS)}")
    return LOGGERS[name]()


def import_optional(module: str, name: str) -> Any:
    """Import an optional module; `name` is the package that provides it.

    >>> import_optional("no.such.module", "no-such-package")
    Traceback (most recent call last):
    headwise.errors.SpecError: this logger needs a package that is not installed; pip install no-such-package
    """
    try:
        return import_module(module)
    except ImportError:
        raise SpecError(
            f"this logger needs a package that is not installed; pip install {name}"
        ) from None


# --- Console output -------------------------------------------------------------------------------


def format_record(record: Mapping[str, Any]) -> str:
    """The metrics of a step or an evaluation as one line of text.

    >>> format_record(
    ...     {"event": "evaluation", "step": 100, "metrics": {"loss": 0.25, "accuracy": 0.5}}
    ... )
    'step 100, held out: loss 0.2500, accuracy 0.5000'
    """
    if record["event"] == "evaluation":
        best = ", best so far" if record.get("best") else ""
        return f"step {record['step']}, held out: {_format_metrics(record['metrics'])}{best}"
    parts = [
        f"step {record['step']}: loss {record['loss']:.4f}",
        f"{record['tokens_per_second']:,.0f} tokens/s",
    ]
    parts += [f"MFU {record['mfu']:.0%}"] if "mfu" in record else []
    return ", ".join([*parts, f"{format_duration(record['left'])} left"])


def _format_metrics(metrics: Mapping[str, float]) -> str:
    """The metrics as text, without slices such as "exact_match@date"."""
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items() if "@" not in name)


class ConsoleLogger:
    """Prints progress for people, on stderr by default: a progress bar on a terminal, otherwise
    lines of text.

    `startup` are the seconds that the process took before it called `train`, for the time in all.
    """

    def __init__(self, stream: TextIO | None = None, startup: float = 0.0) -> None:
        self._stream = stream or sys.stderr
        self._startup = startup
        self._last_line_time = 0.0
        self._progress: Any = None

    def open(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Print a line about the run; on a terminal, also show a progress bar."""
        steps = config["recipe"]["steps"]
        first_step = config["step"]
        extent = f"from step {first_step} on" if first_step else pluralise(steps, "step")
        self._print_line(
            f"{config['task']['name']} into {folder}, {extent}, {config['parameters']:,} parameters"
        )
        if self._stream.isatty():
            self._progress = _make_progress_bar(self._stream)
            self._progress.add_task("", total=steps, completed=first_step, status="")
            self._progress.start()

    def write(self, record: Mapping[str, Any]) -> None:
        """Update the bar, or print a line; without a bar, steps are printed at most every
        LINE_INTERVAL seconds.
        """
        event = record["event"]
        if event == "step" and self._progress is not None:
            self._progress.update(
                self._progress.task_ids[0], completed=record["step"], status=format_record(record)
            )
        elif event == "evaluation" or (
            event == "step" and time.monotonic() - self._last_line_time > LINE_INTERVAL
        ):
            self._print_line(format_record(record))
        elif event == "note":
            self._print_line(record["says"])
        elif event == "sample":
            self._print_line(
                f"step {record['step']}, sample: "
                f"{escape_terminal(record['prompt'] + record['text'])}"
            )
        elif event == "end":
            duration = format_duration(record["seconds"] + self._startup)
            self._print_line(
                f"{record['split']}: {_format_metrics(record['metrics'])}; {duration} in all"
            )

    def close(self) -> None:
        """Stop the progress bar."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _print_line(self, text: str) -> None:
        self._last_line_time = time.monotonic()
        text = make_visible(text)
        if self._progress is not None:
            self._progress.console.print(text, highlight=False, markup=False)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()


def _make_progress_bar(stream: TextIO) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    status = TextColumn("{task.fields[status]}", markup=False)
    return Progress(BarColumn(20), status, console=Console(file=stream), transient=True)
