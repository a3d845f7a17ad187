"""Options for the texts that `heads`, `prune` and `convert` read: lines, parsed or aligned
sentences, or a task.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from . import known_names
from .argument_checks import check_choice, check_input_file, check_text_model, check_tokenizer
from .arguments import parse_value
from .command_parser import CommandParser, UsageError

if TYPE_CHECKING:
    from ..data import Task
    from ..head_analysis.annotated_examples import Example

DEFAULT_EXAMPLES = 200  # task examples without --limit
TEXT_SOURCES = ("data", "conllu", "align_files", "task", "images")


def add_text_arguments(parser: CommandParser, task: str, conllu: str) -> None:
    """Add the options that name texts; `task` and `conllu` are the help texts of these options."""
    parser.add_argument(
        "--data", metavar="FILE", help="texts, one per line; a tab separates source, target"
    )
    parser.add_argument("--task", metavar="NAME", help=task)
    parser.add_argument(
        "--limit",
        type=int,
        metavar="COUNT",
        help=f"use at most this many texts (default: all, {DEFAULT_EXAMPLES} of a task)",
    )
    other = parser.add_expert_group("other texts")
    other.add_argument("--conllu", metavar="FILE", help=conllu)
    other.add_argument(
        "--answer-after",
        default="",
        metavar="TEXT",
        help="with --data, score only what a decoder predicts after the last TEXT of each line, "
        "such as 'A:' "
        "(default: all)",
    )
    add_tokenizer_argument(other)


def add_tokenizer_argument(parser: argparse._ActionsContainer) -> None:
    """Add `--tokenizer`."""
    parser.add_argument(
        "--tokenizer",
        metavar="FILE",
        help="tokenizer of a model without one: a tokenizer.json, or bytes (default: the model's)",
    )


def check_text_arguments(args: argparse.Namespace) -> None:
    """Raise unless exactly one source of texts is given and exists, with a sensible --limit."""
    options = vars(args)
    if sum(options.get(name) is not None for name in TEXT_SOURCES) != 1:
        links = ["--align SOURCE TARGET GOLD", "--images PATH"] if "align_files" in options else []
        sources = ", ".join(["--data FILE", "--conllu FILE", *links])
        raise UsageError(f"give exactly one source of texts: {sources}, or --task dates")
    if args.answer_after and args.data is None:
        raise UsageError(
            f"--answer-after {args.answer_after!r} needs lines of text; give them with --data FILE"
        )
    if args.limit is not None and args.limit < 2:
        raise UsageError(
            f"--limit {args.limit} is too few for a confidence interval; give at least 2"
        )
    for name in (name for name in TEXT_SOURCES[:4] if options.get(name) is not None):
        images = (
            "give --images PATH"
            if "images" in options
            else "use hw.prune or hw.convert with batches of pixels"
        )
        check_text_model(args.model, f"--{name.removesuffix('_files')}", images)
    check_input_file("--data", args.data)
    check_input_file("--conllu", args.conllu)
    for name in options.get("align_files") or ():
        check_input_file("--align", name)
    check_choice("--task", args.task, (*known_names.TASKS, *known_names.FILE_TASKS))
    check_tokenizer(args.tokenizer)


def attach_named_tokenizer(model: Any, args: argparse.Namespace) -> None:
    """Attach the tokenizer named by --tokenizer, if any, to the model."""
    if args.tokenizer is not None:
        from ..hub.tokenizer_files import attach_tokenizer

        attach_tokenizer(model, args.tokenizer)


def parse_task(args: argparse.Namespace, changes: list[str]) -> Task:
    """Return the task named by --task, with its fields set by `changes`, each as KEY=VALUE."""
    from ..data import make_task

    fields: dict[str, Any] = {}
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or not key:
            raise UsageError(
                f"--set {change!r} is not KEY=VALUE; name a field of the task and its value"
            )
        fields[key] = parse_value(text)
    return make_task(args.task, **fields)


def read_examples(
    model: Any, args: argparse.Namespace, task: Task | None = None
) -> tuple[list[Example], tuple[str, ...]]:
    """Read the texts that the options name; return them with notes on texts that were skipped.

    Examples of `task` carry its targets; without `task`, examples of --task carry its alignments.
    """
    from ..head_analysis import annotated_examples
    from ..head_analysis.annotated_examples import read_conllu

    if args.conllu is not None:
        sentences = read_conllu(annotated_examples.read_lines(args.conllu), args.conllu)
        reader = annotated_examples.examples_from_sentences(model, sentences, args.limit)
    elif task is not None:
        reader = annotated_examples.examples_from_task(model, task, args.limit or DEFAULT_EXAMPLES)
    elif vars(args).get("align_files") is not None:
        reader = _read_aligned_pairs(model, args)
    elif args.task is not None:
        from ..data import make_task as make_task_by_name

        reader = annotated_examples.ExampleReader(model)
        reader.add_task_examples(make_task_by_name(args.task), args.limit or DEFAULT_EXAMPLES)
    else:
        lines = annotated_examples.read_lines(args.data)
        reader = annotated_examples.examples_from_lines(
            model, lines, args.limit, answer_after=args.answer_after
        )
    examples = reader.examples_with_frequencies()
    if len(examples) < 2:
        reasons = f" ({'; '.join(reader.notes)})" if reader.notes else ""
        raise UsageError(
            f"only {len(examples)} of the texts can be read{reasons}; give at least two"
        )
    return examples, reader.notes


def _read_aligned_pairs(model: Any, args: argparse.Namespace) -> Any:
    from ..head_analysis import annotated_examples

    source, target, gold = (annotated_examples.read_lines(path) for path in args.align_files)
    if not len(source) == len(target) == len(gold):
        counts = f"{len(source)}, {len(target)} and {len(gold)}"
        raise UsageError(
            f"the three files of --align have {counts} lines; give the same number in each"
        )
    links = [
        annotated_examples.parse_alignment_links(line, number)
        for number, line in enumerate(gold, 1)
    ]
    return annotated_examples.examples_from_pairs(
        model, list(zip(source, target, strict=True))[: args.limit], links[: args.limit]
    )
