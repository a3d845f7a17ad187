"""Options for the texts that `heads`, `prune` and `convert` read: lines, parsed or aligned
sentences, or a task.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .argument_checks import check_text_model
from .arguments import parse_assignments
from .options import AtLeastTwo, InputFile, Options, TokenizerFile, UsageError, options

if TYPE_CHECKING:
    from ..observe.head_analysis.annotated_examples import Example
    from ..training.data import Task

DEFAULT_EXAMPLES = 200  # task examples without --limit


@options
class TextOptions(Options):
    """Options for the model and the texts that `heads`, `prune` and `convert` read.

    MODEL  a folder of headwise or transformers
    --data FILE  texts, one per line; a tab separates source, target
    --task NAME  use examples of a task, such as dates
    --limit COUNT  use at most this many texts (default: all, 200 of a task)

    other texts:
    --conllu FILE  read parsed sentences; heads also measures their dependency relations
    --tokenizer FILE  tokenizer of a model without one: a tokenizer.json, or bytes (default: the
        model's)
    """

    choices = {"task": "training.data:TASKS"}
    model: str
    data: InputFile | None = None
    task: str | None = None
    limit: AtLeastTwo | None = None
    conllu: InputFile | None = None
    tokenizer: TokenizerFile | None = None

    @property
    def text_sources(self) -> dict[str, bool]:
        """The options that name texts, and whether they are given."""
        return {
            "--data": self.data is not None,
            "--conllu": self.conllu is not None,
            "--task": self.task is not None,
        }

    def check_texts(self) -> None:
        """Refuse anything but one source of texts, and a model of another kind."""
        chosen_sources = [name for name, is_given in self.text_sources.items() if is_given]
        if len(chosen_sources) != 1:
            sources = ["--data FILE", "--conllu FILE"]
            if "--align" in self.text_sources:
                sources += ["--align SOURCE TARGET GOLD", "--images PATH"]
            raise UsageError(
                f"give exactly one source of texts: {', '.join(sources)}, or --task dates"
            )
        if chosen_sources[0] != "--images":
            has_images = "--images" in self.text_sources
            remedy = "use hw.prune or hw.convert with batches of pixels"
            check_text_model(
                self.model, chosen_sources[0], "give --images PATH" if has_images else remedy
            )


def attach_named_tokenizer(model: Any, args: Any) -> None:
    """Attach the tokenizer named by --tokenizer, if any, to the model."""
    if args.tokenizer is not None:
        from ..hub.tokenizer_files import attach_tokenizer

        attach_tokenizer(model, args.tokenizer)


def parse_task(args: Any, changes: Sequence[str]) -> Task:
    """Return the task named by --task, with its fields set by `changes`, each as KEY=VALUE."""
    from ..training.data import make_task

    return make_task(args.task, **parse_assignments(changes, "--set digits=3"))


def read_examples(
    model: Any, args: Any, task: Task | None = None
) -> tuple[list[Example], tuple[str, ...]]:
    """Read the texts that the options name; return them with notes on texts that were skipped.

    Examples of `task` carry its targets; without `task`, examples of --task carry its alignments.
    """
    from ..observe.head_analysis import annotated_examples
    from ..observe.head_analysis.annotated_examples import read_conllu

    if args.conllu is not None:
        sentences = read_conllu(annotated_examples.read_lines(args.conllu), args.conllu)
        reader = annotated_examples.examples_from_sentences(model, sentences, args.limit)
    elif task is not None:
        reader = annotated_examples.examples_from_task(model, task, args.limit or DEFAULT_EXAMPLES)
    elif vars(args).get("align_files"):
        reader = _read_aligned_pairs(model, args)
    elif args.task is not None:
        from ..training.data import make_task as make_task_by_name

        reader = annotated_examples.ExampleReader(model)
        reader.add_task_examples(make_task_by_name(args.task), args.limit or DEFAULT_EXAMPLES)
    else:
        lines = annotated_examples.read_lines(args.data)
        reader = annotated_examples.examples_from_lines(model, lines, args.limit)
    examples = reader.examples_with_frequencies()
    if len(examples) < 2:
        reasons = f" ({'; '.join(reader.notes)})" if reader.notes else ""
        raise UsageError(
            f"only {len(examples)} of the texts can be read{reasons}; give at least two"
        )
    return examples, reader.notes


def _read_aligned_pairs(model: Any, args: Any) -> Any:
    from ..observe.head_analysis import annotated_examples

    source, target, gold = (annotated_examples.read_lines(path) for path in args.align_files)
    if not len(source) == len(target) == len(gold):
        fact = f"the three files of --align have {len(source)}, {len(target)} and {len(gold)} lines"
        raise UsageError(f"{fact}; give the same number in each")
    links = [
        annotated_examples.parse_alignment_links(line, number)
        for number, line in enumerate(gold, 1)
    ]
    return annotated_examples.examples_from_pairs(
        model, list(zip(source, target, strict=True))[: args.limit], links[: args.limit]
    )
