"""Pruned and converted versions of the demo's translator: retrained, verified, and compared with the original."""

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
    """Prints the current stage and the remaining time on `stream` (default: stderr).

    On a terminal it overwrites one line; elsewhere it prints a line from time to time.

    >>> import io
    >>> stream = io.StringIO()
    >>> RetrainingProgress("pruned", 300, stream).report_stage("ranking heads")
    >>> stream.getvalue()
    'pruned: ranking heads\\n'
    """

    def __init__(self, name: str, steps: int, stream: TextIO | None = None) -> None:
        self._name, self._steps, self._stream = name, steps, stream or sys.stderr
        self._started = self._last_report = 0.0

    def report_stage(self, stage: str) -> None:
        """Print the current stage; "" clears the line at the end."""
        if self._stream.isatty():
            self._stream.write("\r\x1b[K" + (f"{self._name}: {stage}"[:LINE_WIDTH] if stage else ""))
        elif stage:
            self._stream.write(f"{self._name}: {stage}\n")
        self._stream.flush()
        self._last_report = time.monotonic()

    def report_step(self, point: RetrainingPoint) -> None:
        """Print the number of the retraining step, loss, and time left."""
        now = time.monotonic()
        if point.step == 0:
            self._started = now
        if point.step in (0, self._steps) or self._stream.isatty() or now - self._last_report > LINE_INTERVAL:
            seconds_left = (now - self._started) / point.step * (self._steps - point.step) if point.step else None
            loss = f", loss {point.loss:.4f}" if point.loss is not None else ""
            time_left = f", {format_duration(seconds_left)} left" if seconds_left is not None else ""
            self.report_stage(f"step {point.step} of {self._steps}{loss}{time_left}")


# --- Compression: half of the heads, or shared keys and values -----------------------------------------

SCORE_NAME = "exact_match"
ProgressCallback = Callable[[str], object]


class CompressedModel(NamedTuple):
    """A compressed model, its summary, its record, and the arguments for its verification."""

    net: Transformer
    summary: str
    record: Mapping[str, Any]
    verification: Mapping[str, Any]


class CompressionMethod(NamedTuple):
    """A compression method: folder name, page title, function, and retraining steps as a share of training steps."""

    name: str
    title: str
    compress: Callable[[Transformer, Sequence[Example], ProgressCallback], CompressedModel]
    retraining_fraction: float


class CompressionScale(NamedTuple):
    """Numbers of examples for distillation, ranking heads, proof and scores; seconds for measuring speed."""

    num_distillation_texts: int = 4000
    num_selection_texts: int = 128
    num_proof_texts: int = 64
    num_scored_examples: int = 400
    seconds: float = 3.0


DEFAULT_SCALE = CompressionScale()
RETRAINING = UptrainingOptions(steps=1, batch=64, rate=1e-3, alpha=1.0, every=50)  # distillation only: alpha=1


def prune_half(net: Transformer, texts: Sequence[Example], progress: ProgressCallback) -> CompressedModel:
    """Keep the most important half of all heads; fold the mean outputs of the others into the bias."""
    pruned = prune(net, KeepTop(0.5, HeadRanking(num_examples=64), scope="model"), texts, fold="mean", log=progress)
    verification = {
        "keep": dict(pruned.plan.changed_sites),
        "replacements": dict(pruned.head_constants),
        "ablation_pair": (net, pruned.after),
    }
    return CompressedModel(pruned.after, pruned.plan.summary, pruned.data, verification)


def convert_to_mqa(net: Transformer, texts: Sequence[Example], progress: ProgressCallback) -> CompressedModel:
    """Convert to MQA: align the key-value heads of each layer and replace them by their mean."""
    progress("aligning keys and values")
    converted = convert(net, Pool(1, align="both"), texts)
    verification = {"equivalents": {"aligned, before heads are pooled": lambda: converted.equivalent}}
    return CompressedModel(converted.after, converted.conversion.summary, converted.data, verification)


COMPRESSION_METHODS = (
    CompressionMethod("pruned", "Half of the heads", prune_half, 1 / 2),
    CompressionMethod("shared", "Shared keys and values (MQA)", convert_to_mqa, 1 / 4),
)


class CompressedTranslator:
    """A translator compressed by one method, in a subfolder; it is made when `data` is first read, unless it exists.

    `data` is always read from the folder, so that later runs show the same numbers.
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
        """Options of the retraining, which takes a share of the original training steps."""
        return replace(RETRAINING, steps=max(1, round(self.change.retraining_fraction * self.translator.recipe.steps)))

    @property
    def data(self) -> dict[str, Any]:
        """Record and proof of the compression, as plain values."""
        if self._data is None:
            self._ensure_compressed()
            proof = json.loads((self.folder / PROOF_JSON).read_text(encoding="utf-8"))
            self._data = {"folder": str(self.folder), **read_record(self.folder).done, "proof": proof}
        return self._data

    def _ensure_compressed(self) -> None:
        """Compress the translator unless the folder already has the result for this model and these options."""
        net = self.translator.result.net
        request = {"model": fingerprint_model(net), "how": repr(self.retraining), "scale": list(self.scale)}
        record = self._load_record()
        if record is not None and (self.folder / PROOF_JSON).is_file() and record.items() >= request.items():
            return
        if record is not None:
            shutil.rmtree(self.folder)
        self._compress(net.eval(), request)

    def _load_record(self) -> dict[str, Any] | None:
        """Return the record that an earlier demo left in the folder, or None if the folder is not from the demo."""
        try:
            record = read_record(self.folder).done
        except SpecError:
            return None
        return dict(record) if record.get("demo") == self.change.name else None

    def _compress(self, net: Transformer, request: Mapping[str, Any]) -> None:
        task, scale, progress = (
            self.translator.task,
            self.scale,
            RetrainingProgress(self.change.name, self.retraining.steps),
        )
        progress.report_stage("generating examples")
        texts = examples_from_task(net, task, scale.num_distillation_texts, "train").examples_with_frequencies()
        compressed = self.change.compress(net, texts[: scale.num_selection_texts], progress.report_stage)
        progress.report_stage("translating test examples")
        score_without_retraining = next(
            row
            for row in compare_task_scores(net, compressed.net, task, scale.num_scored_examples)
            if row.name == SCORE_NAME
        )
        retrained = uptrain(compressed.net, net, texts, self.retraining, progress.report_step)
        if retrained.stop_reason:
            raise KeyboardInterrupt(retrained.stop_reason)
        record = {
            **compressed.record,
            **request,
            "demo": self.change.name,
            "cut": score_without_retraining.data,
            "kept": retrained.step,
        }
        record |= {"steps": self.retraining.steps, "curve": [point._asdict() for point in retrained.curve]}
        write_model_folder(retrained.net, self.translator.folder, self.folder, record)
        notes = f"retrained for {self.retraining.steps} steps from the original model; step {retrained.step} is kept"
        options = ProofOptions(
            compressed.summary,
            exports={"headwise.load of the written folder": lambda: load(self.folder)},
            task=task,
            num_examples=scale.num_scored_examples,
            timing=TimingOptions(batch=16, length=16, steps=task.answers, seconds=scale.seconds),
            notes=(notes,),
            command="headwise demo",
            **compressed.verification,
        )
        proof = prove(
            net,
            retrained.net,
            examples_from_task(net, task, scale.num_proof_texts).examples_with_frequencies(),
            options,
            progress.report_stage,
        )
        progress.report_stage("")
        write_proof(proof, self.folder)


# --- Translator and its compressed versions ------------------------------------------------------------


class TrainingDemo:
    """The translator and its compressed versions; raises at once if a folder has other contents."""

    def __init__(self, folder: Path, recipe: Recipe | None = None, scale: CompressionScale = DEFAULT_SCALE) -> None:
        self.translator = Translator(folder, recipe)
        self.smaller = {
            change.title: CompressedTranslator(self.translator, change, scale) for change in COMPRESSION_METHODS
        }

    def pages(self) -> Iterator[tuple[str, Callable[[], str]]]:
        """Yield the title of every page and the function that makes it."""
        yield "Training a translator", self.translator.training_page
        yield "Its translations", self.translator.examples_page
        yield "Its alignment heads", self.translator.alignment_page
        for title, translator in self.smaller.items():
            yield title, partial(_format_compressed, translator)

    def report(self, pages: Sequence[tuple[str, str]]) -> Path:
        """Write all pages as HTML to the folder and return the path."""
        changes = {title: translator.data for title, translator in self.smaller.items()}
        return html_report.write_report(self.translator.folder, pages, changes)

    @property
    def data(self) -> dict[str, Any]:
        """All numbers as plain values."""
        smaller = {translator.change.name: translator.data for translator in self.smaller.values()}
        return {"translator": self.translator.data, **smaller}


def _format_compressed(translator: CompressedTranslator) -> str:
    return before_after.format_comparison(translator.data)
