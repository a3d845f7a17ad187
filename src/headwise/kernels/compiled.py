"""Kernels by name: compiled when they are first asked for, kept on disk where that can be, run by torch's threads.

Numba keeps what it compiled by the code of a function and what this closes over, and sees neither the functions that
it calls nor, in the next process, those that it closes over. So every function that is handed to it closes over plain
names and numbers alone, and one of them is `MARK`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numba import cfunc, types
from torch import Tensor

from . import team

ENTRY = types.void(types.int64)


def _mark() -> int:
    """A number of all files that kernels are made of, never 0."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return 1 + int(sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12], 16)


MARK = _mark()


class Kernels:
    """Compiled functions of one address."""

    def __init__(self, functions: Mapping[Any, Callable[[Any], None]]) -> None:
        self.functions = functions
        self.made: dict[Any, Any] = {}  # an address is good as long as what was compiled lives

    def address(self, name: Any) -> int:
        """Where this one lies once compiled."""
        if name not in self.made:  # of two threads that make it the first is kept: its address may be in use
            self.made.setdefault(name, _compiled(self.functions[name], name))
        return self.made[name].address

    def launch(self, name: Any, units: int, *told: Tensor | int) -> None:
        """Run one over so many units: it is told counters, how many there are, then addresses and numbers."""
        numbers = [0, 0, units, *(t.data_ptr() if isinstance(t, Tensor) else t for t in told)]
        table = np.array(numbers, dtype=np.int64)
        team.run(self.address(name), table.ctypes.data, threads(units))


def threads(units: int) -> int:
    """How many threads take so many units on."""
    return max(1, min(units, team.most()))


def _compiled(function: Callable[[Any], None], name: Any) -> Any:
    # Numba numbers what it keeps under one function's name, and two processes may give two kernels the same number.
    function.__qualname__ += "".join(f"_{part}" for part in (name if isinstance(name, tuple) else (name,)))
    try:
        return cfunc(ENTRY, cache=True)(function)
    except RuntimeError:  # neither the package's folder nor the user's own can be written
        return cfunc(ENTRY)(function)
