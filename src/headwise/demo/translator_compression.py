"""How far the demo is with a model that learns again: a moving line on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from ..errors import SpecError
from ..head_analysis.annotated_examples import Example, examples_from_task
from ..hub.model_import import load
from ..models import Transformer
from ..surgery import HeadRanking, KeepTop, Pool
from ..surgery.conversion import convert
from ..surgery.distillation import RetrainingPoint, UptrainingOptions, uptrain
from ..surgery.hf_export.model_folder import check_folder_empty, read_record, write_model_folder
from ..surgery.pruning import prune
from ..surgery.pruning_plan import fingerprint_model
from ..surgery.verification.efficiency import TimingOptions
from ..surgery.verification.proof import PROOF_JSON, ProofOptions, prove, write_proof
from ..surgery.verification.quality_metrics import compare_task_scores
from ..training import Recipe
from ..training.loggers import LINE_INTERVAL, format_duration
from . import before_after, html_report
from .translator import Translator

LINE_WIDTH = 78


class RetrainingProgress:
    """Says on stderr, unless told otherwise, what goes on and how long it may still take.

    >>> import io
    >>> heard = io.StringIO()
    >>> RetrainingProgress("pruned", 300, heard).report_stage("weighing heads")
    >>> heard.getvalue()
    'pruned: weighing heads\\n'
    """

    def __init__(self, name: str, steps: int, stream: TextIO | None = None) -> None:
        self._name, self._steps, self._stream = name, steps, stream or sys.stderr
        self._begun = self._said = 0.0

    def report_stage(self, what: str) -> None:
        """What goes on now; "" when all is done."""
        if self._stream.isatty():
            self._stream.write("\r\x1b[K" + (f"{self._name}: {what}"[:LINE_WIDTH] if what else ""))
        elif what:
            self._stream.write(f"{self._name}: {what}\n")
        self._stream.flush()
        self._said = time.monotonic()

    def report_step(self, at: RetrainingPoint) -> None:
        """A step of learning."""
        now = time.monotonic()
        if at.step == 0:
            self._begun = now
        if at.step in (0, self._steps) or self._stream.isatty() or now - self._said > LINE_INTERVAL:
            left = (now - self._begun) / at.step * (self._steps - at.step) if at.step else None
            loss = f", loss {at.loss:.4f}" if at.loss is not None else ""
            rest = f", {format_duration(left)} left" if left is not None else ""
            self.report_stage(f"step {at.step} of {self._steps}{loss}{rest}")


# --- The translator made smaller, with half of its heads and with shared keys and values, each with its ---

SCORE_NAME = "exact_match"
ProgressCallback = Callable[[str], object]


class CompressedModel(NamedTuple):
    """A model with other heads, what was done in a sentence and as plain values, and what is to be proven of it."""

    net: Transformer
    summary: str
    record: Mapping[str, Any]
    verification: Mapping[str, Any]


class CompressionMethod(NamedTuple):
    """A way to make a translator smaller: its folder, its page, and for what part of the training it learns again."""

    name: str
    title: str
    compress: Callable[[Transformer, Sequence[Example], ProgressCallback], CompressedModel]
    retraining_fraction: float


class CompressionScale(NamedTuple):
    """How many examples are learned from, look at heads, prove, and are translated; how long speed is measured."""

    num_distillation_texts: int = 4000
    num_selection_texts: int = 128
    num_proof_texts: int = 64
    num_scored_examples: int = 400
    seconds: float = 3.0


DEFAULT_SCALE = CompressionScale()
RETRAINING = UptrainingOptions(steps=1, batch=64, rate=1e-3, alpha=1.0, every=50)  # from the translator as it was alone


def prune_half(net: Transformer, texts: Sequence[Example], tell: ProgressCallback) -> CompressedModel:
    """Half of all heads, those worth most; the others leave what they said on average."""
    done = prune(net, KeepTop(0.5, HeadRanking(num_examples=64), scope="model"), texts, fold="mean", log=tell)
    asked = {
        "keep": dict(done.plan.changed_sites),
        "replacements": dict(done.head_constants),
        "ablation_pair": (net, done.after),
    }
    return CompressedModel(done.after, done.plan.summary, done.data, asked)


def convert_to_mqa(net: Transformer, texts: Sequence[Example], tell: ProgressCallback) -> CompressedModel:
    """One head of keys and values for all query heads of a layer, the mean of those there were, aligned first."""
    tell("aligning keys and values")
    done = convert(net, Pool(1, align="both"), texts)
    asked = {"equivalents": {"aligned, before heads are pooled": lambda: done.equivalent}}
    return CompressedModel(done.after, done.conversion.summary, done.data, asked)


COMPRESSION_METHODS = (
    CompressionMethod("pruned", "Half of its heads", prune_half, 1 / 2),
    CompressionMethod("shared", "Keys and values shared", convert_to_mqa, 1 / 4),
)


class CompressedTranslator:
    """A translator changed in one way, in a folder beside it; made when its numbers are asked for, if it is not there.

    Numbers are always those of the folder, so that a second look shows what the first did.
    """

    def __init__(
        self, translator: Translator, change: CompressionMethod, scale: CompressionScale = DEFAULT_SCALE
    ) -> None:
        self.translator, self.change, self.scale = translator, change, scale
        self.folder = translator.folder / change.name
        self._data: dict[str, Any] | None = None
        if self._load_record() is None:
            check_folder_empty(self.folder)

    @property
    def retraining(self) -> UptrainingOptions:
        """How it learns again: a part as long as it was trained."""
        return replace(RETRAINING, steps=max(1, round(self.change.retraining_fraction * self.translator.recipe.steps)))

    @property
    def data(self) -> dict[str, Any]:
        """What was done, and the proof of it, as plain values."""
        if self._data is None:
            self._ensure_compressed()
            proof = json.loads((self.folder / PROOF_JSON).read_text(encoding="utf-8"))
            self._data = {"folder": str(self.folder), **read_record(self.folder).done, "proof": proof}
        return self._data

    def _ensure_compressed(self) -> None:
        """See to it that the folder holds what was made of this translator, in this way."""
        net = self.translator.result.net
        asked = {"model": fingerprint_model(net), "how": repr(self.retraining), "scale": list(self.scale)}
        known = self._load_record()
        if known is not None and (self.folder / PROOF_JSON).is_file() and known.items() >= asked.items():
            return
        if known is not None:
            shutil.rmtree(self.folder)
        self._compress(net.eval(), asked)

    def _load_record(self) -> dict[str, Any] | None:
        """What an earlier demo left in the folder; what is not the demo's own is not touched."""
        try:
            done = read_record(self.folder).done
        except SpecError:
            return None
        return dict(done) if done.get("demo") == self.change.name else None

    def _compress(self, net: Transformer, asked: Mapping[str, Any]) -> None:
        task, scale, screen = (
            self.translator.task,
            self.scale,
            RetrainingProgress(self.change.name, self.retraining.steps),
        )
        screen.report_stage("examples to learn from")
        texts = examples_from_task(net, task, scale.num_distillation_texts, "train").examples_with_frequencies()
        made = self.change.compress(net, texts[: scale.num_selection_texts], screen.report_stage)
        screen.report_stage("translating")
        cut = next(
            row for row in compare_task_scores(net, made.net, task, scale.num_scored_examples) if row.name == SCORE_NAME
        )
        learnt = uptrain(made.net, net, texts, self.retraining, screen.report_step)
        if learnt.stop_reason:
            raise KeyboardInterrupt(learnt.stop_reason)
        record = {**made.record, **asked, "demo": self.change.name, "cut": cut.data, "kept": learnt.step}
        record |= {"steps": self.retraining.steps, "curve": [at._asdict() for at in learnt.curve]}
        write_model_folder(learnt.net, self.translator.folder, self.folder, record)
        notes = f"learned again for {self.retraining.steps} steps from what the model was; step {learnt.step} is kept"
        how = ProofOptions(
            made.summary,
            exports={"headwise.load of what was written": lambda: load(self.folder)},
            task=task,
            num_examples=scale.num_scored_examples,
            timing=TimingOptions(batch=16, length=16, steps=task.answers, seconds=scale.seconds),
            notes=(notes,),
            command="headwise demo",
            **made.verification,
        )
        proof = prove(
            net,
            learnt.net,
            examples_from_task(net, task, scale.num_proof_texts).examples_with_frequencies(),
            how,
            screen.report_stage,
        )
        screen.report_stage("")
        write_proof(proof, self.folder)


# --- A translator from its first step to two smaller ones ----------------------------------------------


class TrainingDemo:
    """A translator and what is made of it; a folder that holds something else is refused at once."""

    def __init__(self, folder: Path, recipe: Recipe | None = None, scale: CompressionScale = DEFAULT_SCALE) -> None:
        self.translator = Translator(folder, recipe)
        self.smaller = {
            change.title: CompressedTranslator(self.translator, change, scale) for change in COMPRESSION_METHODS
        }

    def pages(self) -> Iterator[tuple[str, Callable[[], str]]]:
        """A title, and what makes the page when it is its turn."""
        yield "A translator learns", self.translator.training_page
        yield "What it says", self.translator.examples_page
        yield "Which head reads what", self.translator.alignment_page
        for title, one in self.smaller.items():
            yield title, partial(_format_compressed, one)

    def report(self, shown: Sequence[tuple[str, str]]) -> Path:
        """Everything that was shown, as a page of HTML in the folder."""
        changes = {title: one.data for title, one in self.smaller.items()}
        return html_report.write_report(self.translator.folder, shown, changes)

    @property
    def data(self) -> dict[str, Any]:
        """All numbers as plain values."""
        smaller = {one.change.name: one.data for one in self.smaller.values()}
        return {"translator": self.translator.data, **smaller}


def _format_compressed(one: CompressedTranslator) -> str:
    return before_after.format_comparison(one.data)
