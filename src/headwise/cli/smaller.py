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

from .reading import check_texts, halves, scenes_of, spoken, take_texts, task_of
from .screen import WIDTH, Arguments, Wrong, document, show, take_form

if TYPE_CHECKING:
    from ..heads.scene import Scene
    from ..models import Transformer
    from ..surgery.phases import Pace
    from ..surgery.proving import Asked
    from ..tasks import Task


# Of uptraining: what gave the demo's translator its answers back in the fewest steps, from its teacher alone.
RATE, BATCH = 1e-3, 64


def take_work(parser: Arguments) -> None:
    """Let a verb be told of a model, of texts, where to leave what it makes, and how speed is measured."""
    take_model(parser)
    learn = parser.add_argument_group("learning again, from the model as it was")
    learn.add_argument("--uptrain", type=int, metavar="STEPS", help="steps of distillation, on texts that do not prove")
    learn.add_argument("--learn", metavar="FILE", help="texts to learn from, in the place of those heads are chosen by")
    learn.add_argument("--lessons", type=int, default=2000, metavar="COUNT", help="examples of a task to learn (2000)")
    learn.add_argument("--rate", type=float, metavar="NUMBER", help=f"the highest rate of learning ({RATE})")
    parser.add_argument("--length", type=int, metavar="COUNT", help="tokens that speed and cost are told for")
    parser.add_argument("--seconds", type=float, default=10.0, metavar="NUMBER", help="for measuring speed (10)")


def take_model(parser: Arguments) -> None:
    """Let a verb be told of a model, of texts, and where to leave what it makes."""
    parser.add_argument("model", metavar="MODEL", help="a folder of headwise or of transformers, or llama2.c's file")
    parser.add_argument("--out", required=True, metavar="DIR", help="a new folder for what is made")
    take_texts(parser, "examples of a task, which then says what is right; its fields by --set")
    parser.add_argument(
        "--set", dest="changes", action="append", default=[], metavar="KEY=VALUE", help="a field of the task"
    )
    parser.add_argument("--objective", metavar="NAME", help="what quality is: next-token, translation, label, drift")
    parser.add_argument("--seed", type=int, default=0, metavar="INT", help="of whatever is drawn (0)")
    take_form(parser)


@dataclass
class Work:
    """A model, texts to choose by and others to prove with, and what is to be known of them."""

    given: argparse.Namespace
    net: Transformer
    chosen_by: list[Scene]
    proven_with: list[Scene]
    task: Task | None
    notes: list[str] = field(default_factory=list)

    @staticmethod
    def of(given: argparse.Namespace) -> Work:
        """Everything that can be refused is, before anything is done."""
        check_texts(given)
        from ..hub.loading import load
        from ..surgery.folders import check_free

        check_free(given.out)
        net = load(Path(given.model))
        spoken(net, given)
        task = None if given.task is None else task_of(given, given.changes)
        scenes, left_out = scenes_of(net, given, task)
        _check(net, given, scenes[0])
        one, other, said = halves(scenes)
        return Work(given, net, one, other, task, [said, *left_out])

    @property
    def source(self) -> Path:
        """Where the model was read."""
        return Path(self.given.model)

    def tell(self, said: str) -> None:
        """Progress, where somebody looks on."""
        if sys.stderr.isatty():
            print(f"\r\x1b[K{said[:78]}", end="", file=sys.stderr, flush=True)

    def lessons(self) -> list[Scene]:
        """Texts to learn from: none of those that prove."""
        from ..heads.sources import lines_of, of_examples, of_lines

        if self.task is not None:
            return of_examples(self.net, self.task, self.given.lessons, "train").counted()
        if self.given.learn is not None:
            return of_lines(self.net, lines_of(self.given.learn)).counted()
        return self.chosen_by

    def uptrained(self, after: Transformer) -> tuple[Transformer, dict[str, Any]]:
        """The model after it has learnt again, if that is asked for, and what there is to tell of it."""
        from ..surgery.uptraining import Uptraining, uptrain

        if self.given.uptrain is None:
            return after, {}
        texts = self.lessons()
        how = Uptraining(
            steps=self.given.uptrain, seed=self.given.seed, objective=self.given.objective, alpha=1.0,
            rate=RATE if self.given.rate is None else self.given.rate, batch=max(1, min(BATCH, len(texts) // 4)),
        )  # fmt: skip
        done = uptrain(
            after, self.net, texts, how, lambda at: self.tell(f"uptraining: step {at.step} of {self.given.uptrain}")
        )
        curve = [at._asdict() for at in done.curve]
        first, kept = (next((at.held_out for at in done.curve if at.step == step), None) for step in (0, done.step))
        self.notes.append(
            f"uptrained on {len(texts)} texts: {done.step} of {how.steps} steps are kept, loss of texts held back "
            f"{_number(first)} -> {_number(kept)}"
        )
        self.notes += [*done.notes, *([done.ended] if done.ended else [])]
        return done.net, {"uptraining": {"said": repr(how), "step": done.step, "curve": curve}}

    def done(self, after: Transformer, what: str, record: Mapping[str, Any], **asked: Any) -> int:
        """Write the model, prove what is left of it, and say both."""
        from ..hub.loading import load
        from ..surgery.folders import write
        from ..surgery.proof import write as write_proof
        from ..surgery.proving import prove
        from ..surgery.telling import told

        out = Path(self.given.out)
        self.tell("writing")
        written = write(after, self.source, out, record)
        again: dict[str, Callable[[], Any]] = {"headwise.load of what was written": lambda: load(out)}
        how = self._asked(what, [*record.get("notes", ())], again=again, **asked)
        proof = prove(self.net, after, self.proven_with, how, self.tell)
        self.tell("")
        write_proof(proof, out)
        if self.given.json:
            show(document(proof.data | {"folder": {"kind": written.kind, "sentence": written.sentence}}))
        else:
            where = textwrap.fill(written.sentence, WIDTH, initial_indent="  ", subsequent_indent="  ")
            show(f"{told(proof)}\n\n{out}\n{where}\n  PROOF.md in it says all of this and more.")
        return 0 if proof.holds else 1

    def _asked(self, what: str, notes: Sequence[str], **asked: Any) -> Asked:
        from ..surgery.proving import Asked

        given, command = self.given, shlex.join(["headwise", *sys.argv[1:]])
        return Asked(
            what, objective=given.objective, pace=_pace(given), length=given.length, task=self.task,
            notes=(*self.notes, *notes), command=command, **asked,
        )  # fmt: skip


def _pace(given: argparse.Namespace) -> Pace:
    from ..surgery.phases import Pace

    return Pace(length=given.length, seconds=given.seconds)


def _check(net: Transformer, given: argparse.Namespace, scene: Scene) -> None:
    """Refuse what would be refused only in the proof, when the model is written already."""
    from ..heads.objectives import objective_of
    from ..surgery.phases import fitting

    objective_of(net, given.objective, scene)
    if "seconds" in given:
        fitting(net, _pace(given))
        if given.lessons < 2:
            raise Wrong(f"--lessons {given.lessons} teaches nothing; give at least 2")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
