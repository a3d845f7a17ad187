"""What `prune` and `share` have in common: where a model comes from, where it goes, and the proof of what is left."""

from __future__ import annotations

import argparse
import shlex
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import TERMINAL_WIDTH, CommandParser, UsageError, add_json_argument, print_page, to_json
from .text_arguments import (
    add_text_arguments,
    attach_named_tokenizer,
    check_text_arguments,
    parse_task,
    read_examples,
    split_examples,
)

if TYPE_CHECKING:
    from ..data import Task
    from ..head_analysis.annotated_examples import Example
    from ..models import Transformer
    from ..surgery.verification.efficiency import TimingOptions
    from ..surgery.verification.proof import ProofOptions


# Of uptraining: what gave the demo's translator its answers back in the fewest steps, from its teacher alone.
LEARNING_RATE, BATCH_SIZE = 1e-3, 64


def add_compression_arguments(parser: CommandParser) -> None:
    """Let a verb be told of a model, of texts, where to leave what it makes, and how speed is measured."""
    add_model_arguments(parser)
    learn = parser.add_argument_group("learning again, from the model as it was")
    learn.add_argument("--uptrain", type=int, metavar="STEPS", help="steps of distillation, on texts that do not prove")
    learn.add_argument("--learn", metavar="FILE", help="texts to learn from, in the place of those heads are chosen by")
    learn.add_argument("--lessons", type=int, default=2000, metavar="COUNT", help="examples of a task to learn (2000)")
    learn.add_argument("--rate", type=float, metavar="NUMBER", help=f"the highest rate of learning ({LEARNING_RATE})")
    parser.add_argument("--length", type=int, metavar="COUNT", help="tokens that speed and cost are told for")
    parser.add_argument("--seconds", type=float, default=10.0, metavar="NUMBER", help="for measuring speed (10)")


def add_model_arguments(parser: CommandParser) -> None:
    """Let a verb be told of a model, of texts, and where to leave what it makes."""
    parser.add_argument("model", metavar="MODEL", help="a folder of headwise or of transformers, or llama2.c's file")
    parser.add_argument("--out", required=True, metavar="DIR", help="a new folder for what is made")
    add_text_arguments(parser, "examples of a task, which then says what is right; its fields by --set")
    parser.add_argument(
        "--set", dest="changes", action="append", default=[], metavar="KEY=VALUE", help="a field of the task"
    )
    parser.add_argument("--objective", metavar="NAME", help="what quality is: next-token, translation, label, drift")
    parser.add_argument("--seed", type=int, default=0, metavar="INT", help="of whatever is drawn (0)")
    add_json_argument(parser)


@dataclass
class CompressionRun:
    """A model, texts to choose by and others to prove with, and what is to be known of them."""

    args: argparse.Namespace
    net: Transformer
    selection_examples: list[Example]
    proof_examples: list[Example]
    task: Task | None
    notes: list[str] = field(default_factory=list)

    @staticmethod
    def from_args(given: argparse.Namespace) -> CompressionRun:
        """Everything that can be refused is, before anything is done."""
        check_text_arguments(given)
        from ..hub.model_import import load
        from ..surgery.hf_export.model_folder import check_folder_empty

        check_folder_empty(given.out)
        net = load(Path(given.model))
        attach_named_tokenizer(net, given)
        task = None if given.task is None else parse_task(given, given.changes)
        scenes, left_out = read_examples(net, given, task)
        _check_model(net, given, scenes[0])
        one, other, said = split_examples(scenes)
        return CompressionRun(given, net, one, other, task, [said, *left_out])

    @property
    def source(self) -> Path:
        """Where the model was read."""
        return Path(self.args.model)

    def report_progress(self, said: str) -> None:
        """Progress, where somebody looks on."""
        if sys.stderr.isatty():
            print(f"\r\x1b[K{said[:78]}", end="", file=sys.stderr, flush=True)

    def distillation_texts(self) -> list[Example]:
        """Texts to learn from: none of those that prove."""
        from ..head_analysis.annotated_examples import examples_from_lines, examples_from_task, read_lines

        if self.task is not None:
            return examples_from_task(self.net, self.task, self.args.lessons, "train").examples_with_frequencies()
        if self.args.learn is not None:
            return examples_from_lines(self.net, read_lines(self.args.learn)).examples_with_frequencies()
        return self.selection_examples

    def retrain(self, after: Transformer) -> tuple[Transformer, dict[str, Any]]:
        """The model after it has learnt again, if that is asked for, and what there is to tell of it."""
        from ..surgery.distillation import UptrainingOptions, uptrain

        if self.args.uptrain is None:
            return after, {}
        texts = self.distillation_texts()
        how = UptrainingOptions(
            steps=self.args.uptrain,
            seed=self.args.seed,
            objective=self.args.objective,
            alpha=1.0,
            rate=LEARNING_RATE if self.args.rate is None else self.args.rate,
            batch=max(1, min(BATCH_SIZE, len(texts) // 4)),
        )
        done = uptrain(
            after,
            self.net,
            texts,
            how,
            lambda at: self.report_progress(f"uptraining: step {at.step} of {self.args.uptrain}"),
        )
        curve = [at._asdict() for at in done.curve]
        first, kept = (next((at.held_out for at in done.curve if at.step == step), None) for step in (0, done.step))
        self.notes.append(
            f"uptrained on {len(texts)} texts: {done.step} of {how.steps} steps are kept, loss of texts held back "
            f"{_format_number(first)} -> {_format_number(kept)}"
        )
        self.notes += [*done.notes, *([done.stop_reason] if done.stop_reason else [])]
        return done.net, {"uptraining": {"said": repr(how), "step": done.step, "curve": curve}}

    def write_and_verify(self, after: Transformer, what: str, record: Mapping[str, Any], **asked: Any) -> int:
        """Write the model, prove what is left of it, and say both."""
        from ..hub.model_import import load
        from ..surgery.hf_export.model_folder import write_model_folder
        from ..surgery.verification.proof import prove, write_proof
        from ..surgery.verification.proof_report import render_summary

        out = Path(self.args.out)
        self.report_progress("writing")
        written = write_model_folder(after, self.source, out, record)
        again: dict[str, Callable[[], Any]] = {"headwise.load of what was written": lambda: load(out)}
        how = self._verification_options(what, [*record.get("notes", ())], exports=again, **asked)
        proof = prove(self.net, after, self.proof_examples, how, self.report_progress)
        self.report_progress("")
        write_proof(proof, out)
        if self.args.json:
            print_page(to_json(proof.data | {"folder": {"kind": written.kind, "sentence": written.summary}}))
        else:
            where = textwrap.fill(written.summary, TERMINAL_WIDTH, initial_indent="  ", subsequent_indent="  ")
            print_page(f"{render_summary(proof)}\n\n{out}\n{where}\n  PROOF.md in it says all of this and more.")
        return 0 if proof.holds else 1

    def _verification_options(self, what: str, notes: Sequence[str], **asked: Any) -> ProofOptions:
        from ..surgery.verification.proof import ProofOptions

        given, command = self.args, shlex.join(["headwise", *sys.argv[1:]])
        return ProofOptions(
            what,
            objective=given.objective,
            timing=_timing_pace(given),
            length=given.length,
            task=self.task,
            notes=(*self.notes, *notes),
            command=command,
            **asked,
        )


def _timing_pace(given: argparse.Namespace) -> TimingOptions:
    from ..surgery.verification.efficiency import TimingOptions

    return TimingOptions(length=given.length, seconds=given.seconds)


def _check_model(net: Transformer, given: argparse.Namespace, scene: Example) -> None:
    """Refuse what would be refused only in the proof, when the model is written already."""
    from ..head_analysis.objectives import choose_objective
    from ..surgery.verification.efficiency import fit_lengths

    choose_objective(net, given.objective, scene)
    if "seconds" in given:
        fit_lengths(net, _timing_pace(given))
        if given.lessons < 2:
            raise UsageError(f"--lessons {given.lessons} teaches nothing; give at least 2")


def _format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
