"""What verbs read that look at heads: lines, parsed sentences, aligned pairs, or examples of a task."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from .arguments import UsageError, parse_value

if TYPE_CHECKING:
    from ..data import Task
    from ..head_analysis.annotated_examples import Example

DEFAULT_EXAMPLES = 200  # of a task, unless said
TEXT_SOURCES = ("data", "conllu", "align_files", "task")


def add_text_arguments(parser: argparse.ArgumentParser, task: str) -> None:
    """Let a verb be told of texts; `task` says which tasks will do."""
    parser.add_argument("--data", metavar="FILE", help="texts, one a line; a tab parts a source from its target")
    parser.add_argument("--conllu", metavar="FILE", help="parsed sentences: their texts are read, relations are tried")
    parser.add_argument("--task", metavar="NAME", help=task)
    parser.add_argument("--limit", type=int, metavar="COUNT", help="read so many texts")
    parser.add_argument("--tokenizer", metavar="bytes|FILE", help="for a model that carries none: how it reads text")


def check_text_arguments(given: argparse.Namespace) -> None:
    """Refuse what names no texts, several kinds of them, or too few."""
    said = vars(given)
    if sum(said.get(name) is not None for name in TEXT_SOURCES) != 1:
        links = ", --align SOURCE TARGET GOLD" if "align_files" in said else ""
        raise UsageError(f"say what is read: one of --data FILE, --conllu FILE{links}, --task dates")
    if given.limit is not None and given.limit < 2:
        raise UsageError(f"--limit {given.limit} leaves no interval; give at least 2")


def attach_named_tokenizer(model: Any, given: argparse.Namespace) -> None:
    """Let a model that carries no tokenizer read with the one that was named."""
    if given.tokenizer is not None:
        from ..hub.tokenizer_files import attach_tokenizer

        attach_tokenizer(model, given.tokenizer)


def parse_task(given: argparse.Namespace, changes: list[str]) -> Task:
    """The task that was named, with its fields as KEY=VALUE."""
    from ..data import make_task

    said: dict[str, Any] = {}
    for change in changes:
        key, equals, words = change.partition("=")
        if not equals or not key:
            raise UsageError(f"--set {change!r} says nothing; write KEY=VALUE, a field of the task")
        said[key] = parse_value(words)
    return make_task(given.task, **said)


def read_examples(
    model: Any, given: argparse.Namespace, task: Task | None = None
) -> tuple[list[Example], tuple[str, ...]]:
    """The texts, with notes of what was left out; of a task its links, or where one is given, what it wants."""
    from ..head_analysis import annotated_examples
    from ..head_analysis.annotated_examples import read_conllu

    if given.conllu is not None:
        sentences = read_conllu(annotated_examples.read_lines(given.conllu), given.conllu)
        found = annotated_examples.examples_from_sentences(model, sentences, given.limit)
    elif task is not None:
        found = annotated_examples.examples_from_task(model, task, given.limit or DEFAULT_EXAMPLES)
    elif vars(given).get("align_files") is not None:
        found = _read_aligned_pairs(model, given)
    elif given.task is not None:
        from ..data import make_task as named

        found = annotated_examples.ExampleReader(model)
        found.add_task_examples(named(given.task), given.limit or DEFAULT_EXAMPLES)
    else:
        found = annotated_examples.examples_from_lines(model, annotated_examples.read_lines(given.data), given.limit)
    scenes = found.examples_with_frequencies()
    if len(scenes) < 2:
        why = f": {'; '.join(found.notes)}" if found.notes else ""
        raise UsageError(f"{len(scenes)} texts can be read{why}; give at least two")
    return scenes, found.notes


def _read_aligned_pairs(model: Any, given: argparse.Namespace) -> Any:
    from ..head_analysis import annotated_examples

    source, target, gold = (annotated_examples.read_lines(path) for path in given.align_files)
    if not len(source) == len(target) == len(gold):
        counts = f"{len(source)}, {len(target)} and {len(gold)}"
        raise UsageError(f"the three files of --align have {counts} lines; give as many of each")
    links = [annotated_examples.parse_alignment_links(line, number) for number, line in enumerate(gold, 1)]
    return annotated_examples.examples_from_pairs(
        model, list(zip(source, target, strict=True))[: given.limit], links[: given.limit]
    )


def split_examples(scenes: list[Example], min_count: int = 8) -> tuple[list[Example], list[Example], str]:
    """Every second text to choose by, the others to prove with, and a note; the same for both where they are few."""
    if len(scenes) < min_count:
        return scenes, scenes, f"heads were chosen by the {len(scenes)} texts that prove: they are too few to part"
    return scenes[::2], scenes[1::2], f"heads were chosen by {len(scenes[::2])} other texts than those that prove"
