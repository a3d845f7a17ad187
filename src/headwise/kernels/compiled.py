"""Kernels by name: compiled when they are first asked for, kept on disk where that can be, run by torch's threads.

Numba keeps what it compiled by the code of a function and by what this closes over, and sees nothing of what is called
there. So what is handed to it closes over `MARK`, a number of all files of kernels; and the function that it calls is
one as Python has it, which is known by its name, where one of Numba's would be another in the next process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import cfunc, types
from torch import Tensor

from . import team
from .memory import form

NUMBERS = {torch.float32: "float32", torch.float64: "float64"}  # that are computed with as they lie
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
        """Where this one lies once compiled; with a kind of numbers it is told their form before the address."""
        own = name, dtype
        if own not in self.made:  # of two threads that make it the first is kept: its address may be in use
            kind = None if dtype is None else self.kinds[dtype]
            self.made.setdefault(own, _compiled(self.functions[name], kind))
        return self.made[own].address

    def launch(self, name: str, dtype: torch.dtype, units: int, *told: Tensor | int) -> None:
        """Run one over so many units: it is told counters, how many there are, then addresses and numbers."""
        numbers = [0, 0, units, *(t.data_ptr() if isinstance(t, Tensor) else t for t in told)]
        table = np.array(numbers, dtype=np.int64)
        team.run(self.address(name, dtype), table.ctypes.data, threads(units))


def threads(units: int) -> int:
    """How many threads take so many units on."""
    return max(1, min(units, team.most()))


def _compiled(function: Callable[..., None], kind: str | None) -> Any:
    entry = _plain(function, MARK) if kind is None else _formed(function, kind, MARK)
    # Numba numbers what it keeps under one function's name, and two processes may give two kernels the same number.
    entry.__qualname__ = "_".join([function.__module__.rpartition(".")[2], function.__name__, kind or "plain"])
    try:
        return cfunc(ENTRY, cache=True)(entry)
    except RuntimeError:  # neither the package's folder nor the user's own can be written
        return cfunc(ENTRY)(entry)


def _plain(function: Callable[..., None], mark: int) -> Any:
    def entry(table):
        if mark:
            function(table)

    return entry


def _formed(function: Callable[..., None], kind: str, mark: int) -> Any:
    def entry(table):
        if mark:
            function(form(kind), table)

    return entry
