"""Loggers of training runs: the protocol `MetricLogger`, metrics.jsonl, the console and
TensorBoard.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TextIO

from ..report.data import Axis, Figure, Plot, Reference, Series
from ..report.plots import to_svg
from ..report.progress import ProgressReporter, format_duration
from ..util import size_limits
from ..util.errors import SpecError, pluralise, suggest
from ..util.escaping import make_visible
from ..util.files import JsonLines, read_lines, write_atomically, write_lines

Record = Mapping[str, Any]


class MetricLogger(Protocol):
    """Protocol of a logger, which receives the records of a run in order.

    A record has an "event" and a "step". The events are "run" (the configuration, first), "note" (a
    message about the run), "step" and "evaluation" (metrics), and "end" (the final metrics).
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
        """Append one line; all records except steps are synchronised to disk."""
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
        record = size_limits.Record(f"{path}: line {number}", values, "delete the line")
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
    """Return the numbers of a record under names such as "evaluation/loss".

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
        try:
            self._tensorboard: Any = import_module("torch.utils.tensorboard")
        except ImportError:
            raise SpecError(
                "this logger needs a package that is not installed; pip install tensorboard"
            ) from None

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


# --- Console output -------------------------------------------------------------------------------


def format_record(record: Mapping[str, Any], startup: float = 0.0) -> str:
    """Format a record as one line of text; metrics without slices such as "exact_match@date".

    >>> format_record(
    ...     {"event": "evaluation", "step": 100, "metrics": {"loss": 0.25, "accuracy": 0.5}}
    ... )
    'step 100, held out: loss 0.2500, accuracy 0.5000'
    """
    values = record.get("metrics", {}).items()
    metrics = ", ".join(f"{name} {value:.4f}" for name, value in values if "@" not in name)
    step = f"step {record['step']}"
    match record["event"]:
        case "note":
            return record["says"]
        case "evaluation":
            return f"{step}, held out: {metrics}{', best so far' * bool(record.get('best'))}"
        case "end":
            duration = format_duration(record["seconds"] + startup)
            return f"{record['split']}: {metrics}; {duration} in all"
        case _:
            speed = f"{record['tokens_per_second']:,.0f} tokens/s"
            speed += f", MFU {record['mfu']:.0%}" if "mfu" in record else ""
            left = format_duration(record["left"])
            return f"{step}: loss {record['loss']:.4f}, {speed}, {left} left"


class ConsoleLogger:
    """Prints progress for people, on stderr by default: one line for the last step on a terminal,
    otherwise a line now and then.

    `startup` are the seconds that the process took before it called `train`, for the time in all.
    """

    def __init__(self, stream: TextIO | None = None, startup: float = 0.0) -> None:
        self._stream = stream or sys.stderr
        self._startup = startup
        self._report = ProgressReporter(self._stream)

    def open(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Print a line about the run."""
        first_step = config["step"]
        steps = pluralise(config["recipe"]["steps"], "step")
        extent = f"from step {first_step} on" if first_step else steps
        place = "" if config["device"] == "cpu" else f" on {config['device']}"
        size = f"{config['parameters']:,} parameters{place}"
        self._print_line(f"{config['task']['name']} into {folder}, {extent}, {size}")

    def write(self, record: Mapping[str, Any]) -> None:
        """Show a step as progress, and print a line for every other record."""
        if record["event"] == "step":
            self._report(format_record(record))
        elif record["event"] != "run":
            self._print_line(format_record(record, self._startup))

    def close(self) -> None:
        """Clear the line of the last step."""
        self._report("")

    def _print_line(self, text: str) -> None:
        self._report("")
        self._stream.write(make_visible(text) + "\n")
        self._stream.flush()


# --- Learning curves of a run as a figure, from its metrics.jsonl ---------------------------------


CURVE_FILES = {"light": "curves.svg", "dark": "curves-dark.svg"}
SMOOTHING_WINDOW = 0.02  # share of the steps over which the training loss is averaged
MAX_POINTS = 1000  # of one line, so that the picture of a long run stays small
STEP_AXIS = Axis("step")


def make_curves(
    records: Iterable[Mapping[str, Any]], title: str, changes: Sequence[int] = ()
) -> Figure:
    """Make the curves of a run over its steps: loss, other metrics of evaluations, and learning
    rate.

    `changes` are the steps after which the recipe changed.
    """
    steps: list[int] = []
    losses: list[float] = []
    rates: list[float] = []
    evaluations: dict[str, dict[int, float]] = {}
    for record in records:
        if record["event"] == "step":
            steps.append(record["step"])
            losses.append(record["loss"])
            rates.append(record["rate"])
        elif record["event"] == "evaluation":
            for name, value in record["metrics"].items():
                if "@" not in name:  # slices, such as "accuracy@distance<=8"
                    evaluations.setdefault(name, {})[record["step"]] = value
    window = max(1, round(SMOOTHING_WINDOW * len(steps)))
    smooth = average_over_windows(losses, window)
    thin = slice(None, None, 1 + len(steps) // MAX_POINTS)
    name = "training" if window == 1 else f"training, mean of {window} steps"
    series = [Series(name, steps[thin], smooth[thin])]
    series += _metric_series({"validation": evaluations.pop("loss", {})})
    references = [Reference("x", step, "changed") for step in changes]
    panels = [Plot(series, STEP_AXIS, Axis("nats per label"), "loss", references)]
    if evaluations:
        scores = _metric_series(evaluations)
        panels.append(Plot(scores, STEP_AXIS, title="validation metrics", references=references))
    rate = Series("", steps[thin], rates[thin])
    rate_axis = Axis(low=0.0)
    panels.append(Plot([rate], STEP_AXIS, rate_axis, "learning rate", references))
    return Figure(title, panels, num_columns=3)


def _metric_series(metrics: Mapping[str, Mapping[int, float]]) -> list[Series]:
    return [
        Series(name, list(values), list(values.values()), marker="o")
        for name, values in metrics.items()
        if values
    ]


def average_over_windows(values: Sequence[float], window: int) -> list[float]:
    """Average the last `window` values at each position, fewer at the beginning.

    >>> average_over_windows([4.0, 2.0, 6.0], 2)
    [4.0, 3.0, 4.0]
    """
    means: list[float] = []
    total = 0.0
    for n, value in enumerate(values):
        total += value - (values[n - window] if n >= window else 0.0)
        means.append(total / min(n + 1, window))
    return means


def save_curves(folder: Path, figure: Figure) -> None:
    """Draw the curves into the folder of a run for both backgrounds; equal records give equal
    files.
    """
    for theme, name in CURVE_FILES.items():
        write_atomically(folder / name, to_svg(figure, theme).encode())
