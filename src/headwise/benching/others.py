"""Other libraries, each where it is installed; who is not is named, and why."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from .case import MissingPeer

T = TypeVar("T")


def make_peer(library: str, make: Callable[[Any], T]) -> T | MissingPeer:
    """What `make` makes of an imported library; where that cannot be imported, the reason.

    >>> make_peer("no_such_library", lambda library: library.run)
    Absent(why="No module named 'no_such_library'")
    """
    try:
        return make(import_quietly(library))
    except ImportError as error:
        return MissingPeer(str(error))


def import_quietly(library: str) -> Any:
    """A library that keeps its progress, and its doubts about random models, to itself."""
    found = import_module(library)
    if library == "transformers":
        found.utils.logging.disable_progress_bar()
        found.utils.logging.set_verbosity_error()
    return found
