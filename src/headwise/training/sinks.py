"""Where the numbers of a run go: one small protocol, its own file of JSON lines, and what others watch runs with."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

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
        self._lines.add(record)
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
