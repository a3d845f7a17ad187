"""Other libraries, each where it is installed; who is not is named, and why."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from .case import Absent

T = TypeVar("T")


def given(library: str, make: Callable[[Any], T]) -> T | Absent:
    """What `make` makes of an imported library; where that cannot be imported, the reason.

    >>> given("no_such_library", lambda library: library.run)
    Absent(why="No module named 'no_such_library'")
    """
    try:
        return make(import_module(library))
    except ImportError as error:
        return Absent(str(error))
