"""All tasks by name: `TASKS` and `make_task`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ..errors import SpecError, suggest
from .associative_recall import AssociativeRecall
from .copy_task import CopyTask
from .date_translation import DateTranslation
from .graph_distance import GraphDistance
from .group_product import GroupProduct
from .images import ImageClassification
from .jsonl import JsonlTask
from .language_modelling import TextTask
from .listops import ListOps
from .markov_chains import MarkovChains
from .task import Task
from .time_series import FrameClassification
from .token_files import TokenFileTask
from .translation import ParallelTextTask
from .two_key_lookup import TwoKeyLookup

TASKS: dict[str, type[Task]] = {
    "copy": CopyTask,
    "dates": DateTranslation,
    "frames": FrameClassification,
    "graph": GraphDistance,
    "group": GroupProduct,
    "images": ImageClassification,
    "jsonl": JsonlTask,
    "listops": ListOps,
    "lookup2": TwoKeyLookup,
    "markov": MarkovChains,
    "parallel": ParallelTextTask,
    "recall": AssociativeRecall,
    "text": TextTask,
    "tokens": TokenFileTask,
}


def make_task(name: str, **options: Any) -> Task:
    """Create the task `name`; `options` are its fields.

    >>> make_task("recall", pairs=8, seed=1)
    AssociativeRecall(seed=1, pairs=8)
    >>> make_task("recal")
    Traceback (most recent call last):
    headwise.errors.SpecError: there is no task 'recal'; did you mean 'recall'?
    """
    if name not in TASKS:
        raise SpecError(f"there is no task {name!r}; {suggest(name, TASKS)}")
    known = [field.name for field in fields(TASKS[name]) if field.init]
    for option in options:
        if option not in known:
            raise SpecError(f"the task {name!r} has no option {option!r}; {suggest(option, known)}")
    return TASKS[name](**options)
