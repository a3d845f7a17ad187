"""Kernels by name: compiled when they are first asked for, kept on disk where that can be, run by torch's threads.

Numba keeps what it compiled by the code of a function and by what this closes over, and sees nothing of what is called
there. So what is handed to it closes over `MARK`, a number of all files of kernels; and the function that it calls is
one as Python has it, which is known by its name, where one of Numba's would be another in the next process.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from numba import cfunc, types
from torch import Tensor

from . import team
from .memory import form, take, whole

NUMBERS = {torch.float32: "float32", torch.float64: "float64"}  # that are computed with as they lie
UNITS = 2  # where a table says how many there are; then where desks lie, and the bytes of one
HEAD = 5  # numbers of a table of units that are the same for all: the next one, the next thread, how many, desks
ENTRY = types.void(types.int64)


def _mark() -> int:
    """A number of all files that kernels are made of, never 0."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return 1 + int(sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12], 16)


MARK = _mark()


class Kernels:
    """Functions of one address, `register_jitable`, each compiled for every kind of numbers that it is asked for."""

    def __init__(self, kinds: Mapping[torch.dtype, str], **functions: Callable[..., None]) -> None:
        self.kinds, self.functions = kinds, functions
        self.made: dict[tuple[str, torch.dtype | None], Any] = {}  # an address is good as long as what was made lives

    def address(self, name: str, dtype: torch.dtype | None = None) -> int:
        """Where this one lies once compiled; for a kind of numbers it is told their form before the address."""
        own, function = (name, dtype), self.functions[name]
        if own not in self.made:  # of two threads that make it the first is kept: its address may be in use
            kind = "" if dtype is None else self.kinds[dtype]
            entry = self.entry(function, kind, MARK) if kind else _plain(function, MARK)
            self.made.setdefault(own, _compiled(entry, f"{function.__module__}.{name}.{kind}"))
        return self.made[own].address

    def entry(self, function: Callable[..., None], kind: str, mark: int) -> Any:
        """What is compiled: the function with the form."""

        def entry(table):
            if mark:
                function(form(kind), table)

        return entry


class Units(Kernels):
    """Functions that do one unit of work: they are told its number, and where their thread may write meanwhile."""

    def launch(self, name: str, dtype: torch.dtype, work: tuple[int, int], *told: Tensor | int) -> None:
        """Do so many units, each with so many numbers to write on; what is told are addresses and numbers."""
        numbers = [0, 0, work[0], 0, work[1] * dtype.itemsize, *told]
        self.start(name, dtype, array("q", [t.data_ptr() if isinstance(t, Tensor) else t for t in numbers]))

    def start(self, name: str, dtype: torch.dtype, table: array) -> None:
        """Do the units of a table, in which only desks are missing."""
        many = threads(table[UNITS])
        desks = torch.empty(many * table[UNITS + 2], dtype=torch.uint8)
        table[UNITS + 1] = desks.data_ptr()
        team.run(self.address(name, dtype), table.buffer_info()[0], many)

    def entry(self, function: Callable[..., None], kind: str, mark: int) -> Any:
        """What is compiled: a thread takes one unit after the other, until there are no more."""

        def entry(table):
            if mark:
                desk = whole(table + 24) + whole(table + 32) * take(table + 8)
                unit = take(table)
                while unit < whole(table + 16):
                    function(form(kind), table, unit, desk)
                    unit = take(table)

        return entry


def threads(units: int) -> int:
    """How many threads take so many units on."""
    return max(1, min(units, team.most()))


def _plain(function: Callable[..., None], mark: int) -> Any:
    def entry(table):
        if mark:
            function(table)

    return entry


def _compiled(entry: Any, name: str) -> Any:
    # Numba numbers what it keeps under one function's name, and two processes may give two kernels the same number.
    entry.__qualname__ = name
    try:
        return cfunc(ENTRY, cache=True)(entry)
    except RuntimeError:  # neither the package's folder nor the user's own can be written
        return cfunc(ENTRY)(entry)
