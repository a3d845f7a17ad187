"""What verbs read that look at heads: lines, parsed sentences, aligned pairs, or examples of a task."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from .screen import Wrong, value_of

if TYPE_CHECKING:
    from ..heads.scene import Scene
    from ..tasks import Task

EXAMPLES = 200  # of a task, unless said
WAYS = ("data", "conllu", "align_files", "task")


def take_texts(parser: argparse.ArgumentParser, task: str) -> None:
    """Let a verb be told of texts; `task` says which tasks will do."""
    parser.add_argument("--data", metavar="FILE", help="texts, one a line; a tab parts a source from its target")
    parser.add_argument("--conllu", metavar="FILE", help="parsed sentences: their texts are read, relations are tried")
    parser.add_argument("--task", metavar="NAME", help=task)
    parser.add_argument("--limit", type=int, metavar="COUNT", help="read so many texts")
    parser.add_argument("--tokenizer", metavar="bytes|FILE", help="for a model that carries none: how it reads text")


def check_texts(given: argparse.Namespace) -> None:
    """Refuse what names no texts, several kinds of them, or too few."""
    said = vars(given)
    if sum(said.get(name) is not None for name in WAYS) != 1:
        links = ", --align SOURCE TARGET GOLD" if "align_files" in said else ""
        raise Wrong(f"say what is read: one of --data FILE, --conllu FILE{links}, --task dates")
    if given.limit is not None and given.limit < 2:
        raise Wrong(f"--limit {given.limit} leaves no interval; give at least 2")


def spoken(model: Any, given: argparse.Namespace) -> None:
    """Let a model that carries no tokenizer read with the one that was named."""
    if given.tokenizer is not None:
        from ..hub.wording import give_words

        give_words(model, given.tokenizer)


def task_of(given: argparse.Namespace, changes: list[str]) -> Task:
    """The task that was named, with its fields as KEY=VALUE."""
    from ..tasks import task

    said: dict[str, Any] = {}
    for change in changes:
        key, equals, words = change.partition("=")
        if not equals or not key:
            raise Wrong(f"--set {change!r} says nothing; write KEY=VALUE, a field of the task")
        said[key] = value_of(words)
    return task(given.task, **said)


def scenes_of(model: Any, given: argparse.Namespace, task: Task | None = None) -> tuple[list[Scene], tuple[str, ...]]:
    """The texts, with notes of what was left out; of a task its links, or where one is given, what it wants."""
    from ..heads import sources
    from ..heads.conllu import sentences_of

    if given.conllu is not None:
        sentences = sentences_of(sources.lines_of(given.conllu), given.conllu)
        found = sources.of_sentences(model, sentences, given.limit)
    elif task is not None:
        found = sources.of_examples(model, task, given.limit or EXAMPLES)
    elif vars(given).get("align_files") is not None:
        found = _pairs(model, given)
    elif given.task is not None:
        from ..tasks import task as named

        found = sources.Sources(model)
        found.take(named(given.task), given.limit or EXAMPLES)
    else:
        found = sources.of_lines(model, sources.lines_of(given.data), given.limit)
    scenes = found.counted()
    if len(scenes) < 2:
        why = f": {'; '.join(found.notes)}" if found.notes else ""
        raise Wrong(f"{len(scenes)} texts can be read{why}; give at least two")
    return scenes, found.notes


def _pairs(model: Any, given: argparse.Namespace) -> Any:
    from ..heads import sources

    source, target, gold = (sources.lines_of(path) for path in given.align_files)
    if not len(source) == len(target) == len(gold):
        counts = f"{len(source)}, {len(target)} and {len(gold)}"
        raise Wrong(f"the three files of --align have {counts} lines; give as many of each")
    links = [sources.links_of(line, number) for number, line in enumerate(gold, 1)]
    return sources.of_pairs(model, list(zip(source, target, strict=True))[: given.limit], links[: given.limit])


def halves(scenes: list[Scene], least: int = 8) -> tuple[list[Scene], list[Scene], str]:
    """Every second text to choose by, the others to prove with, and a note; the same for both where they are few."""
    if len(scenes) < least:
        return scenes, scenes, f"heads were chosen by the {len(scenes)} texts that prove: they are too few to part"
    return scenes[::2], scenes[1::2], f"heads were chosen by {len(scenes[::2])} other texts than those that prove"
