"""What is to be answered: one text, or the lines of stdin, a few at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, TypeVar

from ..screen import Wrong

LONGEST = 2**20  # bytes of a line
Read = TypeVar("Read")


@dataclass
class Line(Generic[Read]):
    """A line by its number, counted from 1: what it says, and what was made of it, or why nothing could be."""

    number: int
    text: str
    read: Read | None = None
    wrong: str = ""


@dataclass
class Lines:
    """Lines of stdin in batches, in order. A line that cannot be read is told on stderr, and the others go on.

    `refused` counts those; an empty line is answered by an empty one.
    """

    batch: int
    refused: int = field(default=0, init=False)

    def __iter__(self) -> Iterator[list[Line[Any]]]:
        lines, size = enumerate(_lines(), 1), 1 if sys.stdin.isatty() else self.batch
        while some := [_line(number, raw) for number, raw in islice(lines, size)]:
            yield some

    def read(self, lines: list[Line[Any]], make: Callable[[str], Any]) -> list[Line[Any]]:
        """What is made of each line that is not empty; those that something could be made of."""
        for line in lines:
            if line.wrong or not line.text.strip():
                continue
            try:
                line.read = make(line.text)
            except (ValueError, OSError) as error:
                line.wrong = " ".join(str(error).split())
        for line in lines:
            if line.wrong:
                self.refused += 1
                print(f"headwise: line {line.number}: {line.wrong}", file=sys.stderr)
        return [line for line in lines if line.read is not None]


def _lines() -> Iterator[bytes]:
    while raw := sys.stdin.buffer.readline(LONGEST + 1):
        if len(raw) > LONGEST:
            raise Wrong(f"a line of stdin is longer than {LONGEST:,} bytes; give text, a sentence a line")
        yield raw


def _line(number: int, raw: bytes) -> Line[Any]:
    try:
        return Line(number, raw.decode().rstrip("\r\n"))
    except UnicodeDecodeError as error:
        return Line(number, "", wrong=f"byte {error.start} is no text: {error.reason}; give UTF-8")
