"""How far the demo is with a model that learns again: a moving line on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from ..surgery.course import RetrainingPoint
from ..training.screen import LINE_INTERVAL, format_duration

LINE_WIDTH = 78


class RetrainingProgress:
    """Says on stderr, unless told otherwise, what goes on and how long it may still take.

    >>> import io
    >>> heard = io.StringIO()
    >>> RetrainingProgress("pruned", 300, heard).tell("weighing heads")
    >>> heard.getvalue()
    'pruned: weighing heads\\n'
    """

    def __init__(self, name: str, steps: int, stream: TextIO | None = None) -> None:
        self._name, self._steps, self._stream = name, steps, stream or sys.stderr
        self._begun = self._said = 0.0

    def report_stage(self, what: str) -> None:
        """What goes on now; "" when all is done."""
        if self._stream.isatty():
            self._stream.write("\r\x1b[K" + (f"{self._name}: {what}"[:LINE_WIDTH] if what else ""))
        elif what:
            self._stream.write(f"{self._name}: {what}\n")
        self._stream.flush()
        self._said = time.monotonic()

    def report_step(self, at: RetrainingPoint) -> None:
        """A step of learning."""
        now = time.monotonic()
        if at.step == 0:
            self._begun = now
        if at.step in (0, self._steps) or self._stream.isatty() or now - self._said > LINE_INTERVAL:
            left = (now - self._begun) / at.step * (self._steps - at.step) if at.step else None
            loss = f", loss {at.loss:.4f}" if at.loss is not None else ""
            rest = f", {format_duration(left)} left" if left is not None else ""
            self.report_stage(f"step {at.step} of {self._steps}{loss}{rest}")
