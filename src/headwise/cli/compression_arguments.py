"""Shared by `prune` and `convert`: read a model and texts, retrain, write the new model, and verify
it.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..output_paths import check_output, stage_folder
from ..progress import ProgressReporter
from . import known_names
from .argument_checks import (
    check_choice,
    check_input_file,
    check_minimum,
    check_model_path,
    check_output_folder,
    check_positive,
)
from .arguments import (
    add_json_argument,
    add_overwrite_argument,
    add_set_argument,
    existing_mode,
    print_page,
    to_json,
)
from .command_parser import TERMINAL_WIDTH, CommandParser, UsageError
from .text_arguments import (
    add_text_arguments,
    attach_named_tokenizer,
    check_text_arguments,
    parse_task,
    read_examples,
)

if TYPE_CHECKING:
    from ..data import Task
    from ..head_analysis.annotated_examples import Example
    from ..models import Transformer
    from ..surgery.verification.efficiency import TimingOptions
    from ..surgery.verification.proof import ProofOptions


# Defaults of --uptrain: they restored the quality of the demo's translator in the fewest steps of
# pure distillation.
LEARNING_RATE, BATCH_SIZE = 1e-3, 64


def add_compression_arguments(parser: CommandParser) -> None:
    """Add the options for the model, texts, output folder, retraining, and
    measurements of speed.
    """
    add_model_arguments(parser)
    parser.add_argument(
        "--uptrain",
        type=int,
        metavar="STEPS",
        help="steps of retraining by distillation (default: none)",
    )
    learn = parser.add_expert_group(
        "retraining by distillation from the original model (--uptrain)"
    )
    learn.add_argument(
        "--distill-data",
        metavar="FILE",
        help="texts for --uptrain (default: those that heads are chosen by)",
    )
    learn.add_argument(
        "--distill-examples",
        type=int,
        default=2000,
        metavar="COUNT",
        help="task examples for --uptrain",
    )
    learn.add_argument(
        "--lr", type=float, metavar="NUMBER", help=f"peak learning rate (default: {LEARNING_RATE})"
    )
    timing = parser.add_expert_group("measurements in the proof")
    timing.add_argument(
        "--length",
        type=int,
        metavar="COUNT",
        help="tokens per text in the tables of speed and of cost (default: at most 256 and 512)",
    )
    timing.add_argument(
        "--seconds",
        type=float,
        default=10.0,
        metavar="NUMBER",
        help="time limit for measuring speed",
    )


def add_model_arguments(parser: CommandParser, written: str = "the new model") -> None:
    """Add the options for the model, texts, and the output folder; `written` is what the command
    writes there.
    """
    parser.add_argument("model", metavar="MODEL", help="a folder of headwise or transformers")
    parser.add_argument(
        "--out",
        required=True,
        metavar="DIR",
        help=f"write {written} to this folder",
    )
    add_overwrite_argument(parser)
    task = "use and score examples of this task"
    add_text_arguments(parser, task, "read the texts of parsed sentences")
    add_set_argument(parser, "set a field of the task; repeatable")
    measurement = parser.add_expert_group("measure of quality")
    measurement.add_argument(
        "--objective",
        metavar="NAME",
        help="next-token, translation, label or drift (default: chosen by the model)",
    )
    measurement.add_argument("--seed", type=int, default=0, metavar="INT", help="random seed")
    add_json_argument(parser)


def check_compression_arguments(args: argparse.Namespace) -> None:
    """Refuse what cannot work before the model is loaded."""
    if Path(args.model.partition(":")[0]).suffix == ".py":
        function, change = ("convert_module", "2") if "kv" in args else ("prune_module", "[(0, 1)]")
        raise UsageError(
            f"{args.model} is Python code, and this command reads folders with models; for an "
            "nn.Module of your own, "
            f"call headwise.{function}(model, {change}, example) in Python, and name your parts "
            "with --import"
        )
    check_model_path(args.model)
    check_text_arguments(args)
    is_sweep = "sweep" in args and args.sweep
    kind = "report of pruning curves" if is_sweep else "pruned or converted model"
    check_output_folder(args.out, kind, existing_mode(args))
    if args.changes and args.task is None:
        raise UsageError(
            f"--set {args.changes[0]} sets a field of a task; add --task NAME, or leave it out"
        )
    check_choice("--objective", args.objective, known_names.OBJECTIVES)
    if "seconds" in args:
        check_minimum("--uptrain", args.uptrain, 1)
        check_input_file("--distill-data", args.distill_data)
        check_minimum("--distill-examples", args.distill_examples, 2)
        check_positive("--lr", args.lr)
        check_minimum("--length", args.length, 1)
        check_positive("--seconds", args.seconds)


@dataclass
class CompressionRun:
    """The original model, the texts that it is changed by, the texts of the proof, and notes for
    its report.
    """

    args: argparse.Namespace
    net: Transformer
    selection_examples: list[Example]
    proof_examples: list[Example]
    task: Task | None
    notes: list[str] = field(default_factory=list)
    report_progress: ProgressReporter = field(default_factory=ProgressReporter)

    @staticmethod
    def from_args(args: argparse.Namespace) -> CompressionRun:
        """Check all arguments, then read the model and the texts; nothing is written."""
        check_compression_arguments(args)
        task = None if args.task is None else parse_task(args, args.changes)
        from ..hub.pretrained_models import load
        from ..surgery.curve_report import CURVES_FOLDER
        from ..surgery.hf_export.model_folder import COMPRESSED_MODEL

        check_output(
            args.out,
            CURVES_FOLDER if "sweep" in args and args.sweep else COMPRESSED_MODEL,
            existing_mode(args),
        )
        model = load(Path(args.model))
        attach_named_tokenizer(model, args)
        examples, reading_notes = read_examples(model, args, task)
        _check_model(model, args, examples[0])
        return CompressionRun(args, model, examples, examples, task, [*reading_notes])

    def split_texts(self, uses: Sequence[str]) -> None:
        """Keep texts for the proof that the change does not use; `uses` is what the others are used
        for.
        """
        from ..surgery.model_and_texts import split_examples

        is_retrained = "uptrain" in self.args and self.args.uptrain is not None
        has_own_texts = self.task is not None or (
            is_retrained and self.args.distill_data is not None
        )
        retrained = ("the model was retrained",) if is_retrained and not has_own_texts else ()
        self.selection_examples, self.proof_examples, notes = split_examples(
            self.proof_examples, (*uses, *retrained)
        )
        self.notes[:0] = notes

    @property
    def source(self) -> Path:
        """Path of the original model."""
        return Path(self.args.model)

    def distillation_texts(self) -> list[Example]:
        """Return the texts for retraining; the proof uses none of them."""
        from ..head_analysis.annotated_examples import (
            examples_from_lines,
            examples_from_task,
            read_lines,
        )

        if self.task is not None:
            return examples_from_task(
                self.net, self.task, self.args.distill_examples, "train"
            ).examples_with_frequencies()
        if self.args.distill_data is not None:
            return examples_from_lines(
                self.net, read_lines(self.args.distill_data)
            ).examples_with_frequencies()
        return self.selection_examples

    def retrain(self, model: Transformer) -> tuple[Transformer, dict[str, Any]]:
        """Retrain the model if --uptrain is given; return it with entries for the record of the
        folder.
        """
        from ..surgery.distillation import UptrainingOptions, uptrain

        if self.args.uptrain is None:
            return model, {}
        texts = self.distillation_texts()
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
        first, best = (
            next((point.held_out for point in result.curve if point.step == step), None)
            for step in (0, result.step)
        )
        self.notes.append(
            f"uptrained on {len(texts)} texts: step {result.step} of {options.steps} is kept, "
            "held-out loss "
            f"{_format_number(first)} -> {_format_number(best)}"
        )
        self.notes += [*result.notes, *([result.stop_reason] if result.stop_reason else [])]
        return result.net, {
            "uptraining": {"options": repr(options), "step": result.step, "curve": curve}
        }

    def write_and_verify(
        self, model: Transformer, summary: str, record: Mapping[str, Any], **verification: Any
    ) -> int:
        """Write the model and its proof to the folder, print a summary, and
        return the exit code.
        """
        from ..hub.pretrained_models import load
        from ..surgery.hf_export.model_folder import COMPRESSED_MODEL, write_model_folder
        from ..surgery.verification.proof import prove
        from ..surgery.verification.proof_report import render_summary, write_proof

        out = Path(self.args.out)
        with stage_folder(out, COMPRESSED_MODEL, existing_mode(self.args)) as staged:
            self.report_progress("writing the model")
            written = write_model_folder(model, self.source, staged, record)
            exports: dict[str, Callable[[], Any]] = {
                "headwise.load of the written folder": lambda: load(staged)
            }
            options = self._verification_options(
                summary, [*record.get("notes", ())], exports=exports, **verification
            )
            proof = prove(self.net, model, self.proof_examples, options, self.report_progress)
            self.report_progress("")
            write_proof(proof, staged)
        if self.args.json:
            print_page(
                to_json(
                    proof.data | {"folder": {"kind": written.kind, "sentence": written.summary}}
                )
            )
        else:
            folder_note = textwrap.fill(
                written.summary, TERMINAL_WIDTH, initial_indent="  ", subsequent_indent="  "
            )
            print_page(
                f"{render_summary(proof)}\n\n{out}\n{folder_note}\n  PROOF.md in this folder has "
                "the full report."
            )
        return 0 if proof.holds else 1

    def _verification_options(
        self, summary: str, notes: Sequence[str], **verification: Any
    ) -> ProofOptions:
        from ..surgery.verification.proof import ProofOptions

        args, command = self.args, shlex.join(["headwise", *sys.argv[1:]])
        return ProofOptions(
            summary,
            objective=args.objective,
            timing=_timing_pace(args),
            length=args.length,
            task=self.task,
            notes=(*self.notes, *notes),
            command=command,
            **verification,
        )


def _timing_pace(args: argparse.Namespace) -> TimingOptions:
    from ..surgery.verification.efficiency import TimingOptions

    return TimingOptions(length=args.length, seconds=args.seconds)


def _check_model(net: Transformer, args: argparse.Namespace, example: Example) -> None:
    """Raise now the errors that `prove` would raise only after the model has been written."""
    from ..head_analysis.objectives import choose_objective
    from ..surgery.verification.efficiency import fit_lengths

    choose_objective(net, args.objective, example)
    if "seconds" in args:
        fit_lengths(net, _timing_pace(args))


def _format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
