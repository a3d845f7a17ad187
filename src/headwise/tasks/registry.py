"""Every task by its name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ..errors import SpecError, suggest
from .base import Task
from .copy import Copy
from .dates import Dates
from .frames import Frames
from .graph import Graph
from .group import Group
from .images import Images
from .jsonl import Jsonl
from .listops import ListOps
from .lookup2 import Lookup2
from .markov import Markov
from .parallel import Parallel
from .recall import Recall
from .text import Text
from .tokens import TokenFile

TASKS: dict[str, type[Task]] = {
    "copy": Copy,
    "dates": Dates,
    "frames": Frames,
    "graph": Graph,
    "group": Group,
    "images": Images,
    "jsonl": Jsonl,
    "listops": ListOps,
    "lookup2": Lookup2,
    "markov": Markov,
    "parallel": Parallel,
    "recall": Recall,
    "text": Text,
    "tokens": TokenFile,
}


def task(name: str, **said: Any) -> Task:
    """The task of this name, its difficulty as said.

    >>> task("recall", pairs=8, seed=1)
    Recall(seed=1, pairs=8)
    >>> task("recal")
    Traceback (most recent call last):
    headwise.errors.SpecError: there is no task 'recal'; did you mean 'recall'?
    """
    if name not in TASKS:
        raise SpecError(f"there is no task {name!r}; {suggest(name, TASKS)}")
    known = [field.name for field in fields(TASKS[name]) if field.init]
    for knob in said:
        if knob not in known:
            raise SpecError(f"{name} has no {knob!r}; {suggest(knob, known)}")
    return TASKS[name](**said)
