"""Kernels that were compiled, kept on disk for the next process where that can be."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from numba import cfunc, types

ENTRY = types.void(types.int64)
_held: list[Any] = []  # an address is good as long as what was compiled lives


def mark() -> int:
    """A number of all files that kernels are made of, never 0: Numba keeps what it compiled by the code of a function
    and what this closes over, and does not see the functions that it calls."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return 1 + int(sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12], 16)


def address(function: Callable[[Any], None]) -> int:
    """Where this function lies once compiled."""
    try:
        made = cfunc(ENTRY, cache=True)(function)
    except RuntimeError:  # neither the folder of the package nor the user's own can be written
        made = cfunc(ENTRY)(function)
    _held.append(made)
    return int(made.address or 0)
