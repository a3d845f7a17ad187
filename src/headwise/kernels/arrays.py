"""Kernels by name, compiled when they are first asked for, and what they are told: one array of whole numbers."""

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


def mark() -> int:
    """A mark of the files that kernels are made of, never 0: what was compiled of others must not be found on disk."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return 1 + int(sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12], 16)


class Kernels:
    """Compiled functions of one address, each made when it is first launched and kept on disk where that can be."""

    def __init__(self, functions: Mapping[Any, Callable[[Any], None]]) -> None:
        self.functions = functions
        self.made: dict[Any, Any] = {}

    def launch(self, name: Any, units: int, *told: Tensor | int) -> None:
        """Run one over so many units: it is told counters, how many there are, then addresses and numbers."""
        if name not in self.made:
            self.made[name] = _compiled(self.functions[name])
        numbers = [0, 0, units, *(t.data_ptr() if isinstance(t, Tensor) else t for t in told)]
        table = np.array(numbers, dtype=np.int64)
        team.run(self.made[name].address, table.ctypes.data, threads(units))


def threads(units: int) -> int:
    """How many threads take so many units on."""
    return max(1, min(units, team.most()))


def _compiled(function: Callable[[Any], None]) -> Any:
    try:
        return cfunc(ENTRY, cache=True)(function)
    except RuntimeError:  # neither the package's folder nor the user's own can be written
        return cfunc(ENTRY)(function)
