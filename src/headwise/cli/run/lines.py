"""What is to be answered: one text, or the lines of stdin, a few at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, TypeVar

from ..screen import UsageError

MAX_LINE_BYTES = 2**20  # bytes of a line
InputT = TypeVar("Read")


@dataclass
class InputLine(Generic[InputT]):
    """A line by its number, counted from 1: what it says, and what was made of it, or why nothing could be."""

    number: int
    text: str
    read: InputT | None = None
    error: str = ""


@dataclass
class InputLines:
    """Lines of stdin in batches, in order. A line that cannot be read is told on stderr, and the others go on.

    `refused` counts those; an empty line is answered by an empty one.
    """

    batch_size: int
    num_failed: int = field(default=0, init=False)

    def __iter__(self) -> Iterator[list[InputLine[Any]]]:
        lines, size = enumerate(_read_stdin_lines(), 1), 1 if sys.stdin.isatty() else self.batch_size
        while some := [_decode_line(number, raw) for number, raw in islice(lines, size)]:
            yield some

    def read(self, lines: list[InputLine[Any]], make: Callable[[str], Any]) -> list[InputLine[Any]]:
        """What is made of each line that is not empty; those that something could be made of."""
        for line in lines:
            if line.error or not line.text.strip():
                continue
            try:
                line.read = make(line.text)
            except (ValueError, OSError) as error:
                line.error = " ".join(str(error).split())
        for line in lines:
            if line.error:
                self.num_failed += 1
                print(f"headwise: line {line.number}: {line.error}", file=sys.stderr)
        return [line for line in lines if line.read is not None]


def _read_stdin_lines() -> Iterator[bytes]:
    while raw := sys.stdin.buffer.readline(MAX_LINE_BYTES + 1):
        if len(raw) > MAX_LINE_BYTES:
            raise UsageError(f"a line of stdin is longer than {MAX_LINE_BYTES:,} bytes; give text, a sentence a line")
        yield raw


def _decode_line(number: int, raw: bytes) -> InputLine[Any]:
    try:
        return InputLine(number, raw.decode().rstrip("\r\n"))
    except UnicodeDecodeError as error:
        return InputLine(number, "", error=f"byte {error.start} is no text: {error.reason}; give UTF-8")
