"""Text options of `heads`, `prune` and `convert`: lines, parsed or aligned sentences, or a task."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..report.progress import ProgressReporter
from ..report.render import to_text
from ..report.text import format_seconds, wrap
from .arguments import (
    TokenizerOptions,
    announce_placement,
    attach_named_tokenizer,
    check_model_path,
    check_text_model,
    parse_assignments,
    print_note,
    print_result,
)
from .options import (
    AtLeastTwo,
    Count,
    InputFile,
    Positive,
    UsageError,
    options,
)

if TYPE_CHECKING:
    from ..models import Transformer
    from ..observe.head_analysis.annotated_examples import Example
    from ..surgery.model_and_texts import SurgeryResult
    from ..surgery.verification.efficiency import TimingOptions
    from ..surgery.verification.evaluation_tasks import EvaluationTasks, PerplexityOptions
    from ..training.data import Task

DEFAULT_EXAMPLES = 200  # task examples without --limit


@options
class TextOptions(TokenizerOptions):
    """Options for the model and the texts that `heads`, `prune` and `convert` read.

    MODEL  a folder, a Hub id (org/name, org/name@revision), a .gguf file, or FILE.py:FACTORY
    --data FILE  texts, one per line; a tab separates source, target
    --task NAME  use examples of a task, such as dates
    --limit COUNT  use at most this many texts (default: all, 200 of a task)

    other texts:
    --conllu FILE  read parsed sentences; heads also measures their dependency relations
    """

    choices = {"task": "training.data:TASKS"}
    model: str
    data: InputFile | None = None
    task: str | None = None
    limit: AtLeastTwo | None = None
    conllu: InputFile | None = None

    @property
    def text_sources(self) -> dict[str, bool]:
        """Return the options that name texts, and which of them are set."""
        return {
            "--data": self.data is not None,
            "--conllu": self.conllu is not None,
            "--task": self.task is not None,
        }

    def check_texts(self) -> None:
        """Require exactly one source of texts that fits the model."""
        chosen_sources = [name for name, is_given in self.text_sources.items() if is_given]
        if len(chosen_sources) != 1:
            sources = ["--data FILE", "--conllu FILE"]
            if "--align" in self.text_sources:
                sources += ["--align SOURCE TARGET GOLD", "--images PATH"]
            more = "" if chosen_sources else "; any text file with a text on each line will do"
            raise UsageError(
                f"give exactly one source of texts: {', '.join(sources)}, or --task dates{more}"
            )
        if chosen_sources[0] != "--images":
            has_images = "--images" in self.text_sources
            remedy = "use hw.prune or hw.convert with batches of pixels"
            check_text_model(
                self.model, chosen_sources[0], "give --images PATH" if has_images else remedy
            )


def read_examples(
    model: Any, args: Any, task: Task | None = None, min_count: int = 2
) -> tuple[list[Example], tuple[str, ...]]:
    """Read the texts named by the options; return them with notes on skipped texts.

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
        lines = annotated_examples.read_lines(args.data or annotated_examples.GENERAL_TEXTS)
        reader = annotated_examples.examples_from_lines(model, lines, args.limit)
    examples = reader.examples_with_frequencies()
    is_general = not any(args.text_sources.values())
    if len(examples) < min_count:
        reasons = f" ({'; '.join(reader.notes)})" if reader.notes else ""
        texts = "general texts that come with headwise" if is_general else "texts"
        remedy = f"give at least {'two' if min_count == 2 else 'one'}"
        remedy = "name yours with --data FILE or --task NAME" if is_general else remedy
        raise UsageError(f"only {len(examples)} of the {texts} can be read{reasons}; {remedy}")
    general = (annotated_examples.GENERAL_TEXTS_NOTE,) if is_general else ()
    return examples, (*general, *reader.notes)


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


# Defaults of --uptrain: they restored the quality of the demo's translator in the fewest steps of
# pure distillation.
LEARNING_RATE = 1e-3
VERIFICATION_PASSES = 8  # over the texts: quality, ablated against removed heads, the written model
LOADING_SECONDS = 10.0  # in which transformers is imported and loads the written model
BATCH_SIZE = 64


@options
class SurgeryOptions(TextOptions):
    """Options for the texts, the output folder and the measure of quality.

    --out DIR  write the new model, or the report, to this folder
    --overwrite  replace an earlier output of this command
    --json  print one JSON document instead of text

    measure of quality:
    --set KEY=VALUE  set a field of the task; repeatable
    --objective NAME  next-token, translation, label or drift (default: chosen by the model)
    --seed INT  random seed
    """

    names = {"--set": "changes"}
    choices = {"objective": "observe.head_analysis.objectives:OBJECTIVES"}
    needs = {"changes": "task"}
    outputs = {"out": "surgery.hf_export.model_folder:COMPRESSED_MODEL"}
    out: str
    overwrite: bool = False
    changes: tuple[str, ...] = ()
    json: bool = False
    objective: str | None = None
    seed: int = 0

    def check(self) -> None:
        """Refuse impossible options before the model is loaded."""
        if Path(self.model.partition(":")[0]).suffix == ".py":
            is_conversion = "kv" in vars(self)
            call = "convert_module(model, 2" if is_conversion else "prune_module(model, [(0, 1)]"
            raise UsageError(
                f"{self.model} is Python code, and this command reads folders with models; for an "
                f"nn.Module of your own, call headwise.{call}, example) in Python, and name your "
                "parts with --import"
            )
        check_model_path("MODEL", self.model)
        self.check_texts()


@options
class CompressionOptions(SurgeryOptions):
    """Options for retraining, and for measurements of speed.

    --out DIR  write the new model, or the report, to this folder
    --dry-run  print the plan, sizes and time; write nothing
    --uptrain STEPS  steps of retraining by distillation (default: none)

    retraining by distillation from the original model (--uptrain):
    --distill-data FILE  texts for --uptrain (default: those that heads are chosen by)
    --distill-examples COUNT  task examples for --uptrain
    --lr NUMBER  peak learning rate (default: 0.001)

    measurements in the verification:
    --eval TASKS  tasks of lm-evaluation-harness before and after: names or .yaml files,
        separated by commas (default: none)
    --eval-limit COUNT  use at most this many documents of each task (default: all)
    --perplexity FILE  perplexity of a text file before and after (default: none)
    --context COUNT  tokens per window of --perplexity (default: 1024, or what the model
        takes)
    --stride COUNT  tokens between windows of --perplexity (default: half of --context)
    --length COUNT  tokens per text in the tables of speed and of cost (default: at most 256 and
        512)
    --seconds NUMBER  time limit for measuring speed
    --no-speed  measure no speed
    """

    needs = {"eval_limit": "eval", "context": "perplexity", "stride": "perplexity"}
    excludes = ("dry_run uptrain", "no_speed seconds")
    out: str = ""
    dry_run: bool = False
    no_speed: bool = False
    uptrain: Count | None = None
    distill_data: InputFile | None = None
    distill_examples: AtLeastTwo = 2000
    lr: Positive | None = None
    eval: str | None = None
    eval_limit: AtLeastTwo | None = None
    perplexity: InputFile | None = None
    context: AtLeastTwo | None = None
    stride: Count | None = None
    length: Count | None = None
    seconds: Positive = 10.0

    def check(self) -> None:
        """Require --out unless nothing is written; refuse a missing package or task file before the
        model is loaded.
        """
        if not self.out and not self.dry_run:
            raise UsageError(f"missing --out DIR; add it; see headwise {self.command} --help")
        super().check()
        if self.evaluation is not None:
            from ..surgery.verification.evaluation_tasks import check_evaluation_tasks

            check_evaluation_tasks(self.evaluation)

    @property
    def evaluation(self) -> EvaluationTasks | None:
        """The tasks of --eval."""
        if self.eval is None:
            return None
        from ..surgery.verification.evaluation_tasks import EvaluationTasks

        names = tuple(name.strip() for name in self.eval.split(",") if name.strip())
        if not names:
            raise UsageError("--eval names no task; give --eval arc_easy,my_task.yaml, for example")
        return EvaluationTasks(names, self.eval_limit)


@dataclass
class CompressionRun:
    """The original model, its folder, texts for changing and for verifying it, and notes."""

    args: Any
    net: Any
    source: Path | None
    selection_examples: list[Example]
    verification_examples: list[Example]
    task: Task | None
    notes: list[str] = field(default_factory=list)
    report_progress: ProgressReporter = field(default_factory=ProgressReporter)

    @staticmethod
    def from_options(args: SurgeryOptions) -> CompressionRun:
        """Read the model and the texts. Writes nothing."""
        from ..hub.pretrained_models import find_model, load
        from ..training.data import make_task
        from ..util.errors import SpecError

        fields = parse_assignments(args.changes, "--set digits=3")
        task = None if args.task is None else make_task(args.task, **fields)

        announce_placement(args.model, args)
        folder = find_model(args.model)
        try:
            model: Any = load(folder, **args.loading)
        except SpecError:
            model = _load_unread(folder, args)
            if model is None:
                raise
        attach_named_tokenizer(model, args)
        examples, reading_notes = read_examples(model, args, task)
        # `verify` would raise these errors only after the model has been written.
        from ..observe.head_analysis.objectives import choose_objective
        from ..surgery.verification.efficiency import fit_lengths
        from ..surgery.verification.evaluation_tasks import check_decoder, check_perplexity

        choose_objective(model, args.objective, examples[0])
        if isinstance(args, CompressionOptions):
            pace = _timing_pace(args)
            if pace is not None:
                fit_lengths(model, pace)
            perplexity = _perplexity(args)
            if perplexity is not None:
                check_perplexity(model, perplexity)
            if args.evaluation is not None:
                check_decoder(model)
        source = folder if isinstance(folder, Path) else None
        return CompressionRun(args, model, source, examples, examples, task, [*reading_notes])

    def split_texts(self, uses: Sequence[str]) -> None:
        """Reserve texts for the verification; `uses` is what the change uses the others for."""
        from ..surgery.model_and_texts import split_examples

        is_retrained = vars(self.args).get("uptrain") is not None
        has_own_texts = self.task is not None or (
            is_retrained and self.args.distill_data is not None
        )
        retrained = ("the model was retrained",) if is_retrained and not has_own_texts else ()
        self.selection_examples, self.verification_examples, notes = split_examples(
            self.verification_examples, (*uses, *retrained)
        )
        self.notes[:0] = notes

    def retrain(self, model: Transformer) -> tuple[Transformer, dict[str, Any]]:
        """Retrain the model if --uptrain is given; return it with entries for the record of the
        folder.
        """
        from ..observe.head_analysis import annotated_examples
        from ..surgery.distillation import UptrainingOptions, uptrain

        if self.args.uptrain is None:
            return model, {}
        texts = self.selection_examples
        if self.task is not None:
            reader = annotated_examples.examples_from_task(
                self.net, self.task, self.args.distill_examples, "train"
            )
            texts = reader.examples_with_frequencies()
        elif self.args.distill_data is not None:
            lines = annotated_examples.read_lines(self.args.distill_data)
            reader = annotated_examples.examples_from_lines(self.net, lines)
            texts = reader.examples_with_frequencies()
        options = UptrainingOptions(
            steps=self.args.uptrain,
            seed=self.args.seed,
            objective=self.args.objective,
            alpha=1.0,
            rate=LEARNING_RATE if self.args.lr is None else self.args.lr,
            batch=max(1, min(BATCH_SIZE, len(texts) // 4)),
        )
        progress = self.report_progress.counter(
            "retraining by distillation", self.args.uptrain, "steps"
        )
        result = uptrain(
            model,
            self.net,
            texts,
            options,
            lambda point: progress(point.step),
        )
        curve = [point._asdict() for point in result.curve]
        losses = {point.step: point.held_out for point in result.curve}
        self.notes.append(
            f"uptrained on {len(texts)} texts: step {result.step} of {options.steps} is kept, "
            "held-out loss "
            f"{_format_number(losses.get(0))} -> {_format_number(losses.get(result.step))}"
        )
        self.notes += [*result.notes, *([result.stop_reason] if result.stop_reason else [])]
        return result.net, {
            "uptraining": {"options": repr(options), "step": result.step, "curve": curve}
        }

    def _announce(self, result: SurgeryResult) -> None:
        """Say before the long steps if the folder will be a plain checkpoint; with --dry-run, print
        the plan, sizes and time too.
        """
        from ..models import Transformer
        from ..observe.inspect.model_inputs import run_model
        from ..surgery.hf_export.model_folder import list_plain_counts
        from ..surgery.verification.efficiency import compare_cost
        from ..surgery.verification.verify import cost_table

        text = "the folder will be one of headwise"
        reason = result.forecast_folder(self.source)
        if reason is not None:
            kind = "a plain transformers checkpoint"
            end = f"not be {kind}, because {reason}" if reason else f"be {kind}"
            text = f"the folder will {end}"
            is_native = isinstance(self.net, Transformer)
            if reason and is_native and self.source and self.args.command == "prune":
                counts = list_plain_counts(result.before, self.source)
                listed = " or ".join(map(str, counts))
                remedy = f"equal numbers of heads would give one: --keep {listed}"
                text += f"; {remedy if counts else 'no number of heads would give one'}"
        self.report_progress("")
        if not self.args.dry_run:
            if reason:
                print_note(f"headwise: {text}")
            return
        start = 0.0
        for _ in range(2):  # the first run prepares kernels
            start = time.perf_counter()
            run_model(result.before, self.verification_examples[0].model_inputs)
        seconds = VERIFICATION_PASSES * len(self.verification_examples)
        seconds *= time.perf_counter() - start
        seconds += LOADING_SECONDS + (0 if self.args.no_speed else self.args.seconds)
        costs = compare_cost(result.before, result.after, self.args.length)
        end = f"writing and verifying it would take about {format_seconds(seconds)}"
        items = [*result.report_items, cost_table(costs), f"{text}; {end}; nothing was written"]
        shown = "\n\n".join(map(to_text, items))
        print_result(self.args, shown, result.record | {"folder": text, "seconds": seconds})

    def _named_tokenizer(self) -> dict[str, bytes]:
        """The tokenizer of --tokenizer as a file, for a folder that has none."""
        from ..models import Transformer
        from ..models.model_spec.serialization import TOKENIZER_FILE
        from ..observe.inspect.model_tokenizer import find_tokenizer

        is_there = self.source is not None and (self.source / TOKENIZER_FILE).is_file()
        if self.args.tokenizer is None or is_there:
            return {}
        if isinstance(self.net, Transformer):
            text = self.net.usage.tokenizer
        else:
            tokenizer = find_tokenizer(self.net)
            text = None if tokenizer is None else tokenizer.to_str()
        return {} if text is None else {TOKENIZER_FILE: text.encode()}

    def finish(self, result: SurgeryResult) -> int:
        """Retrain the changed model if asked, write it with its verification report, print a
        summary, and return the exit code.
        """
        from ..surgery.model_and_texts import OutputFolder, write_and_verify
        from ..surgery.verification.verify import VerificationOptions, render_summary

        args = self.args
        self._announce(result)
        if args.dry_run:
            return 0
        model, retraining = self.retrain(result.after)
        record = result.record | retraining
        options = VerificationOptions(
            result.summary,
            objective=args.objective,
            timing=_timing_pace(args),
            length=args.length,
            task=self.task,
            evaluation=args.evaluation,
            perplexity=_perplexity(args),
            notes=(*self.notes, *record["notes"]),
            command=shlex.join(["headwise", *sys.argv[1:]]),
        )
        folder = OutputFolder(Path(args.out), args.existing, self.source, self._named_tokenizer())
        written, verification = write_and_verify(
            result, model, self.verification_examples, options, folder, record, self.report_progress
        )
        self.report_progress("")
        note = "\n".join(wrap(written.summary, indent="  "))
        more = f"{args.out}\n{note}\n  VERIFICATION.md in this folder has the full report."
        data = verification.data | {"folder": {"kind": written.kind, "sentence": written.summary}}
        print_result(args, f"{render_summary(verification)}\n\n{more}", data)
        return 0 if verification.holds else 1


def _load_unread(folder: Any, args: Any) -> Any:
    """Return a transformers model that headwise does not load as its own; None if it has no
    attention to change. Refuse options that need a model of headwise.
    """
    from ..hub.pretrained_models import load_original
    from ..surgery.pruning_plan import describe_heads
    from ..util.errors import SpecError

    try:
        model = load_original(folder, **args.loading).eval()
        describe_heads(model)
    except SpecError:
        return None
    for name in ("uptrain", "sweep"):
        if vars(args).get(name):
            raise UsageError(
                f"--{name} needs a model that headwise loads as its own, and "
                f"{type(model).__name__} is changed on its own modules; leave --{name} out"
            )
    return model


def _perplexity(args: Any) -> PerplexityOptions | None:
    from ..surgery.verification.evaluation_tasks import PerplexityOptions

    if args.perplexity is None:
        return None
    return PerplexityOptions(args.perplexity, args.context, args.stride)


def _timing_pace(args: Any) -> TimingOptions | None:
    from ..surgery.verification.efficiency import TimingOptions

    if args.no_speed:
        return None
    return TimingOptions(length=args.length, seconds=args.seconds)


def _format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
