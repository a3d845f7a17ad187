"""A small translator of dates and amounts: its training, its alignment heads, and its pruned and
converted versions.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from torch import Tensor

from ..data import IGNORE_INDEX, Batch
from ..data.date_translation import END_ID, VOCABULARY, DateTranslation, TranslationAnnotation
from ..errors import SpecError
from ..generation.decoding_strategies import greedy_decode
from ..head_analysis.annotated_examples import Example, examples_from_task
from ..hub.pretrained_models import load
from ..interfaces.core_types import Probe
from ..models import Transformer
from ..output_paths import check_output, stage_folder
from ..progress import LINE_INTERVAL, CountedMessage, format_duration
from ..surgery import HeadRanking, KeepTop, Pool
from ..surgery.conversion import convert
from ..surgery.distillation import RetrainingPoint, UptrainingOptions, uptrain
from ..surgery.hf_export.model_folder import COMPRESSED_MODEL, read_record, write_model_folder
from ..surgery.pruning import prune
from ..surgery.pruning_plan import fingerprint_model
from ..surgery.verification.efficiency import TimingOptions
from ..surgery.verification.proof import PROOF_JSON, ProofOptions, prove
from ..surgery.verification.proof_report import write_proof
from ..surgery.verification.quality_metrics import compare_task_scores
from ..training import ConsoleLogger, Recipe, TrainingResult, train
from ..translation.terminal_text import cut, draw_heat_map, wrap
from . import before_after

# --- Training and translations --------------------------------------------------------------------


RECIPE = Recipe(
    steps=800, batch=128, lr=3e-3, evaluate_every=200, checkpoint_every=200, compile="off"
)
NUM_EVALUATED, TERMINAL_WIDTH = 64, 80  # examples for the alignment scores; columns of a terminal


class TranslationExample(NamedTuple):
    """A held-out example: source, reference and output of the model."""

    direction: str
    source: str
    reference: str
    output: str


class HeadAlignment(NamedTuple):
    """A cross-attention head, and how often its most attended source token is the aligned one
    (`right` `of` all).
    """

    layer: int
    head: int
    right: int
    of: int

    @property
    def share(self) -> float:
        """Share of aligned tokens that are right."""
        return self.right / self.of


@dataclass(frozen=True)
class AlignmentMap:
    """Attention weights of one head over the source for each target token, [T, S], with the gold
    alignment.
    """

    layer: int
    head: int
    gold: TranslationAnnotation
    weights: tuple[tuple[float, ...], ...]

    def __str__(self) -> str:
        source = [f"<{self.gold.direction.split('-')[1]}>", *_tokenize(self.gold.source)]
        target = [*_tokenize(self.gold.target), "end"]
        return draw_heat_map(target, source, self.weights, set(self.gold.links))


class Translator:
    """The pages about the translator, which is trained when the first page is made."""

    def __init__(self, folder: Path, recipe: Recipe | None = None) -> None:
        self.folder, self.recipe = folder, RECIPE if recipe is None else recipe
        self.task = DateTranslation()
        self.batch = self.task.batch(0, NUM_EVALUATED, "test")  # held out from training
        self._result: TrainingResult | None = None

    @property
    def result(self) -> TrainingResult:
        """Result of training, which resumes an earlier run in the folder."""
        if self._result is None:
            self._result = train(
                self.task,
                recipe=self.recipe,
                out=self.folder,
                resume="allowed",
                loggers=[ConsoleLogger()],
            )
        return self._result

    @property
    def head_alignments(self) -> list[HeadAlignment]:
        """Alignment of every cross-attention head, best first."""
        return measure_alignment(self.result.net, self.batch)

    def training_page(self) -> str:
        """Format size, training time and quality of the translator."""
        result, count = self.result, sum(p.numel() for p in self.result.net.parameters())
        quality = (
            f"{result.metrics['exact_match']:.1%} of held-out dates and amounts are "
            "translated exactly"
        )
        lines = [
            (
                f"{count:,} parameters, {result.steps:,} steps in {result.seconds:.0f} s, "
                f"{result.precision}: {quality}."
            ),
            f"The model is in {self.folder}, its training curve in metrics.jsonl.",
        ]
        return "\n".join(line for text in lines for line in wrap(text))

    def examples_page(self) -> str:
        """Format one held-out example per direction."""
        return format_examples(translate_samples(self.result.net, self.task, self.batch))

    def alignment_page(self) -> str:
        """Format the alignment of all heads, and the map of the best one."""
        heads = self.head_alignments
        return format_alignment(heads, make_alignment_map(self.result.net, heads[0], self.batch))

    @property
    def data(self) -> dict[str, Any]:
        """All numbers as plain values."""
        samples = [
            sample._asdict() for sample in translate_samples(self.result.net, self.task, self.batch)
        ]
        heads = [{**head._asdict(), "share": head.share} for head in self.head_alignments]
        return {**self.result.data, "samples": samples, "heads": heads}


def translate_samples(
    net: Transformer, task: DateTranslation, batch: Batch
) -> list[TranslationExample]:
    """Translate the first example of each direction."""
    first_rows = {
        annotation.direction: row for row, annotation in reversed(list(enumerate(batch.gold)))
    }
    rows = sorted(first_rows.values())
    answers = _predict(net, task, batch)
    gold = [batch.gold[row] for row in rows]
    return [
        TranslationExample(
            annotation.direction, annotation.source, annotation.target, task.text(answers[row])
        )
        for row, annotation in zip(rows, gold, strict=True)
    ]


def _predict(net: Transformer, task: DateTranslation, batch: Batch) -> list[list[int]]:
    assert batch.source is not None, "the task has a source"
    with torch.no_grad():
        memory = net.eval().encode(batch.source, sequence=batch.source_tokens)
    prompt, tokens = task.prompt(batch)
    return greedy_decode(
        net,
        prompt,
        max_new_tokens=task.answers,
        sequence=tokens,
        end_id=END_ID,
        encoder_output=memory,
    )


def measure_alignment(net: Transformer, batch: Batch) -> list[HeadAlignment]:
    """Score the alignment of every cross-attention head, best first; only tokens with a gold
    alignment count.
    """
    alignments = [
        HeadAlignment(layer, head, *count_correct_links(w_BTS, batch))
        for layer, w_BHTS in cross_attention_weights(net, batch).items()
        for head, w_BTS in enumerate(w_BHTS.unbind(1))
    ]
    return sorted(
        alignments, key=lambda alignment: (-alignment.share, alignment.layer, alignment.head)
    )


def cross_attention_weights(net: Transformer, batch: Batch) -> dict[int, Tensor]:
    """Return the cross-attention weights [B, H, T, S] by layer, with the reference as decoder
    input.
    """
    names = [name for name, _ in net.spec.attention_specs() if name.endswith(".cross")]
    probes = {name: Probe("weights") for name in names}
    saved_probes, net.probes = net.probes, probes
    try:
        with torch.no_grad():
            net.eval()(
                batch.x,
                sequence=batch.tokens,
                source=batch.source,
                source_sequence=batch.source_tokens,
            )
    finally:
        net.probes = saved_probes
    return {int(name.split(".")[1]): probe.tensors["weights"] for name, probe in probes.items()}


def count_correct_links(w_BTS: Tensor, batch: Batch) -> tuple[int, int]:
    """Count the aligned target tokens whose most attended source token is right, and all aligned
    ones.
    """
    best_source = w_BTS.argmax(-1).tolist()
    linked = [
        (row, t, {s for s, to in annotation.links if to == t})
        for row, annotation in enumerate(batch.gold)
        for t in _linked_positions(annotation)
    ]
    return sum(best_source[row][t] in sources for row, t, sources in linked), len(linked)


def _linked_positions(annotation: TranslationAnnotation) -> Iterator[int]:
    return iter(sorted({t for _, t in annotation.links}))


def make_alignment_map(net: Transformer, best: HeadAlignment, batch: Batch) -> AlignmentMap:
    """Return the alignment map of the best head for the first date from English to Chinese, which
    fits a terminal.
    """
    row = next(
        row
        for row, annotation in enumerate(batch.gold)
        if annotation.subject == "date"
        and len(annotation.links)
        and annotation.direction == "en-zh"
    )
    annotation = batch.gold[row]
    num_targets, num_sources = (
        int((batch.labels[row] != IGNORE_INDEX).sum()),
        len(_tokenize(annotation.source)) + 1,
    )
    weights = cross_attention_weights(net, batch)[best.layer][
        row, best.head, :num_targets, :num_sources
    ]
    return AlignmentMap(
        best.layer, best.head, annotation, tuple(tuple(line) for line in weights.tolist())
    )


def _tokenize(text: str) -> list[str]:
    tokens, remaining = [], text
    while remaining:
        token = max((word for word in VOCABULARY if remaining.startswith(word)), key=len)
        tokens.append(token)
        remaining = remaining[len(token) :]
    return tokens


def format_examples(examples: Sequence[TranslationExample]) -> str:
    """Format every example with its output, and the reference if the output is wrong."""
    lines = []
    for example in examples:
        mark = (
            "right"
            if example.output == example.reference
            else f"wrong, should be {example.reference}"
        )
        lines += [
            f"{example.direction:<8}{example.source}",
            f"        {example.output}   ({mark})",
        ]
    return "\n".join(lines)


def format_alignment(heads: Sequence[HeadAlignment], best_map: AlignmentMap) -> str:
    """Format the alignment of every head, and the map of the best one."""
    lines = ["How often the most attended source token is the aligned one:", ""]
    lines += [
        (
            f"  {f'layer {entry.layer} head {entry.head}'}   {entry.share:6.1%}   "
            f"{'█' * round(30 * entry.share)}"
        )
        for entry in heads
    ]
    caption = wrap(
        f"Layer {best_map.layer} head {best_map.head} attends to {best_map.gold.source!r} "
        "(columns) while it writes "
        "the rows; gold alignments are marked with [:"
    )
    return "\n".join([*lines, "", *caption, "", str(best_map)])


# --- Pruned and converted versions ----------------------------------------------------------------

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
        """Print the current stage; "" clears the line at the end. In a file, counts appear at
        intervals.
        """
        if self._stream.isatty():
            self._stream.write(
                "\r\x1b[K" + (cut(f"{self._name}: {stage}", LINE_WIDTH) if stage else "")
            )
        elif (
            isinstance(stage, CountedMessage)
            and time.monotonic() - self._last_report <= LINE_INTERVAL
        ):
            return
        elif stage:
            self._stream.write(f"{self._name}: {stage}\n")
        self._stream.flush()
        self._last_report = time.monotonic()

    def report_step(self, point: RetrainingPoint) -> None:
        """Print the number of the retraining step, loss, and time left."""
        now = time.monotonic()
        if point.step == 0:
            self._started = now
        if (
            point.step in (0, self._steps)
            or self._stream.isatty()
            or now - self._last_report > LINE_INTERVAL
        ):
            seconds_left = (
                (now - self._started) / point.step * (self._steps - point.step)
                if point.step
                else None
            )
            loss = f", loss {point.loss:.4f}" if point.loss is not None else ""
            time_left = (
                f", {format_duration(seconds_left)} left" if seconds_left is not None else ""
            )
            self.report_stage(f"step {point.step} of {self._steps}{loss}{time_left}")


# --- Compression: half of the heads, or shared keys and values ------------------------------------

SCORE_NAME = "exact_match"
ProgressCallback = Callable[[str], object]


class CompressedModel(NamedTuple):
    """A compressed model, its summary, its record, and the arguments for its verification."""

    net: Transformer
    summary: str
    record: Mapping[str, Any]
    verification: Mapping[str, Any]


class CompressionMethod(NamedTuple):
    """A compression method: folder name, page title, function, and retraining steps as a share of
    training steps.
    """

    name: str
    title: str
    compress: Callable[[Transformer, Sequence[Example], ProgressCallback], CompressedModel]
    retraining_fraction: float


class CompressionScale(NamedTuple):
    """Numbers of examples for distillation, ranking heads, proof and scores; seconds for measuring
    speed.
    """

    num_distillation_texts: int = 4000
    num_selection_texts: int = 128
    num_proof_texts: int = 64
    num_scored_examples: int = 400
    seconds: float = 3.0


DEFAULT_SCALE = CompressionScale()
RETRAINING = UptrainingOptions(
    steps=1, batch=64, rate=1e-3, alpha=1.0, every=50
)  # distillation only: alpha=1


def prune_half(
    net: Transformer, texts: Sequence[Example], progress: ProgressCallback
) -> CompressedModel:
    """Keep the most important half of all heads; fold the mean outputs of the
    others into the bias.
    """
    pruned = prune(
        net,
        KeepTop(0.5, HeadRanking(num_examples=64), scope="model"),
        texts,
        fold="mean",
        log=progress,
    )
    return CompressedModel(pruned.after, pruned.plan.summary, pruned.data, pruned.proof_options)


def convert_to_mqa(
    net: Transformer, texts: Sequence[Example], progress: ProgressCallback
) -> CompressedModel:
    """Convert to MQA: align the key-value heads of each layer and replace them by their mean."""
    progress("aligning keys and values")
    converted = convert(net, Pool(1, align="both"), texts)
    return CompressedModel(
        converted.after, converted.conversion.summary, converted.data, converted.proof_options
    )


COMPRESSION_METHODS = (
    CompressionMethod("pruned", "Half of the heads", prune_half, 1 / 2),
    CompressionMethod("shared", "Shared keys and values (MQA)", convert_to_mqa, 1 / 4),
)


class CompressedTranslator:
    """A translator compressed by one method, in a subfolder; it is made when `data` is first read,
    unless it exists.

    `data` is always read from the folder, so that later runs show the same numbers.
    """

    def __init__(
        self,
        translator: Translator,
        change: CompressionMethod,
        scale: CompressionScale = DEFAULT_SCALE,
    ) -> None:
        self.translator, self.change, self.scale = translator, change, scale
        self.folder = translator.folder / change.name
        self._data: dict[str, Any] | None = None
        if self._load_record() is None:
            check_output(self.folder, COMPRESSED_MODEL)

    @property
    def retraining(self) -> UptrainingOptions:
        """Options of the retraining, which takes a share of the original training steps."""
        return replace(
            RETRAINING,
            steps=max(1, round(self.change.retraining_fraction * self.translator.recipe.steps)),
        )

    @property
    def data(self) -> dict[str, Any]:
        """Record and proof of the compression, as plain values."""
        if self._data is None:
            self._ensure_compressed()
            proof = json.loads((self.folder / PROOF_JSON).read_text(encoding="utf-8"))
            self._data = {
                "folder": str(self.folder),
                **read_record(self.folder).change,
                "proof": proof,
            }
        return self._data

    def _ensure_compressed(self) -> None:
        """Compress the translator unless the folder already has the result for this model and these
        options.
        """
        net = self.translator.result.net
        request = {
            "model": fingerprint_model(net),
            "how": repr(self.retraining),
            "scale": list(self.scale),
        }
        record = self._load_record()
        if (
            record is not None
            and (self.folder / PROOF_JSON).is_file()
            and record.items() >= request.items()
        ):
            return
        with stage_folder(
            self.folder, COMPRESSED_MODEL, "refuse" if record is None else "overwrite"
        ) as staged:
            self._compress(net.eval(), request, staged)

    def _load_record(self) -> dict[str, Any] | None:
        """Return the record that an earlier demo left in the folder, or None if the folder is not
        from the demo.
        """
        try:
            record = read_record(self.folder).change
        except SpecError:
            return None
        return dict(record) if record.get("demo") == self.change.name else None

    def _compress(self, net: Transformer, request: Mapping[str, Any], folder: Path) -> None:
        """Compress, retrain and prove the model, and write it to a folder."""
        task, scale, progress = (
            self.translator.task,
            self.scale,
            RetrainingProgress(self.change.name, self.retraining.steps),
        )
        progress.report_stage("generating examples")
        texts = examples_from_task(
            net, task, scale.num_distillation_texts, "train"
        ).examples_with_frequencies()
        compressed = self.change.compress(
            net, texts[: scale.num_selection_texts], progress.report_stage
        )
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
        record |= {
            "steps": self.retraining.steps,
            "curve": [point._asdict() for point in retrained.curve],
        }
        write_model_folder(retrained.net, self.translator.folder, folder, record)
        notes = (
            f"retrained for {self.retraining.steps} steps from the original model; step "
            f"{retrained.step} is kept"
        )
        options = ProofOptions(
            compressed.summary,
            exports={"headwise.load of the written folder": lambda: load(folder)},
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
        write_proof(proof, folder)


# --- Translator and its compressed versions -------------------------------------------------------


class TrainingDemo:
    """The translator and its compressed versions; raises at once if a folder has other contents."""

    def __init__(
        self, folder: Path, recipe: Recipe | None = None, scale: CompressionScale = DEFAULT_SCALE
    ) -> None:
        self.translator = Translator(folder, recipe)
        self.smaller = {
            change.title: CompressedTranslator(self.translator, change, scale)
            for change in COMPRESSION_METHODS
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
        return before_after.write_report(self.translator.folder, pages, changes)

    @property
    def data(self) -> dict[str, Any]:
        """All numbers as plain values."""
        smaller = {translator.change.name: translator.data for translator in self.smaller.values()}
        return {"translator": self.translator.data, **smaller}


def _format_compressed(translator: CompressedTranslator) -> str:
    return before_after.format_comparison(translator.data)
