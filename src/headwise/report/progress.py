"""Progress of long commands on stderr, with the time left: one line on a terminal, lines at
intervals elsewhere.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO, TypeVar

from ..util.escaping import make_visible
from .text import cut

LINE_INTERVAL = 10.0  # seconds between progress lines if the output is not a terminal
TERMINAL_WIDTH = 78
Item = TypeVar("Item")


def format_duration(seconds: float) -> str:
    """Format a duration as h:mm:ss, or m:ss below an hour.

    >>> format_duration(59.6), format_duration(3723)
    ('1:00', '1:02:03')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class CountedMessage(str):
    """A progress message with a count, from which the time left is estimated.

    >>> CountedMessage("ranking heads", 3, 1200, "texts")
    'ranking heads: 3 of 1,200 texts'
    """

    label: str
    done: int
    total: int

    def __new__(cls, label: str, done: int, total: int, unit: str) -> CountedMessage:
        message = super().__new__(cls, f"{label}: {done:,} of {total:,} {unit}")
        message.label = label
        message.done = done
        message.total = total
        return message


def count_items(
    items: Sequence[Item], log: Callable[[str], object], label: str, unit: str
) -> Iterator[Item]:
    """Yield the items, and log their number so far.

    >>> list(count_items("ab", print, "reading", "texts"))
    reading: 0 of 2 texts
    reading: 1 of 2 texts
    ['a', 'b']
    """
    for number, item in enumerate(items):
        log(CountedMessage(label, number, len(items), unit))
        yield item


class TimeLeft:
    """Estimates the time left of a stage from its counts; a new label starts a new stage."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._label = ""
        self._start_time = 0.0
        self._start_count = 0

    def seconds(self, message: CountedMessage) -> float | None:
        """Return the seconds left after this message; None while nothing was counted."""
        if message.label != self._label:
            self._label = message.label
            self._start_time = self._now()
            self._start_count = message.done
        counted = message.done - self._start_count
        return (
            None
            if not counted
            else (self._now() - self._start_time) / counted * (message.total - message.done)
        )


class ProgressReporter:
    """Prints progress messages on stderr: a terminal shows the latest one, otherwise lines are
    printed at intervals.

    The first line is printed after LINE_INTERVAL seconds, so that a command which is refused prints
    its error alone.

    >>> seconds = [0.0]
    >>> report = ProgressReporter(sys.stdout, now=lambda: seconds[0])
    >>> report(CountedMessage("ranking heads", 0, 8, "texts"))
    >>> seconds[0] = 20.0
    >>> report(CountedMessage("ranking heads", 2, 8, "texts"))
    ranking heads: 2 of 8 texts, 1:00 left
    """

    def __init__(
        self, stream: TextIO | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream
        self._now = now
        self._time_left = TimeLeft(now)
        self._last_line_time = now()

    def __call__(self, message: str) -> None:
        """Show a message; an empty one clears the line of a terminal."""
        stream = self._stream or sys.stderr
        text = make_visible(message)
        if isinstance(message, CountedMessage):
            seconds = self._time_left.seconds(message)
            text += "" if seconds is None else f", {format_duration(seconds)} left"
        if stream.isatty():
            stream.write(f"\r\x1b[K{cut(text, TERMINAL_WIDTH)}")
            stream.flush()
            return
        now = self._now()
        if text and now - self._last_line_time >= LINE_INTERVAL:
            stream.write(f"{text}\n")
            stream.flush()
            self._last_line_time = now

    def counter(self, label: str, total: int, unit: str) -> Callable[[int], None]:
        """Return a function that reports how many of `total` are done; reports 0 at once."""
        self(CountedMessage(label, 0, total, unit))
        return lambda done: self(CountedMessage(label, done, total, unit))
