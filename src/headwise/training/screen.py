"""A run as it is watched: a moving line on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

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
            self._print_line(f"{record['split']}: {_format_metrics(record['metrics'])}; {format_duration(record['seconds'])} in all")

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
