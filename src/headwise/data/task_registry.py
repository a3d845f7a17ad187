"""Every task by its name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ..errors import SpecError, suggest
from .associative_recall import Recall
from .copy_task import Copy
from .date_translation import Dates
from .graph_distance import Graph
from .group_product import Group
from .images import Images
from .jsonl import Jsonl
from .language_modelling import Text
from .listops import ListOps
from .markov_chains import Markov
from .task import Task
from .time_series import Frames
from .token_files import TokenFile
from .translation import Parallel
from .two_key_lookup import Lookup2

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
