"""A small translator of dates and amounts: its training, sample translations, and alignment heads."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..data import IGNORE_INDEX, Batch
from ..data.date_translation import END_ID, VOCABULARY, DateTranslation, TranslationAnnotation
from ..generation.greedy_decoding import greedy_decode
from ..interfaces.probe import Probe
from ..models import Transformer
from ..training import ConsoleLogger, Recipe, TrainingResult, train

RECIPE = Recipe(steps=800, batch=128, lr=3e-3, evaluate_every=200, checkpoint_every=200, compile="off")
NUM_EVALUATED, TERMINAL_WIDTH = 64, 80  # examples for the alignment scores; columns of a terminal
WEIGHT_SHADES = " ·░▒▓█"  # weight 0 .. 1


class TranslationExample(NamedTuple):
    """A held-out example: source, reference (`wanted`) and output of the model (`said`)."""

    direction: str
    source: str
    wanted: str
    said: str


class HeadAlignment(NamedTuple):
    """A cross-attention head, and how often its most attended source token is the aligned one (`right` `of` all)."""

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
    """Attention weights of one head over the source for each target token, [T, S], with the gold alignment."""

    layer: int
    head: int
    gold: TranslationAnnotation
    weights: tuple[tuple[float, ...], ...]

    def __str__(self) -> str:
        source = [f"<{self.gold.direction.split('-')[1]}>", *map(_visible_token, _tokenize(self.gold.source))]
        target = [*map(_visible_token, _tokenize(self.gold.target)), "end"]
        side = max(map(_terminal_width, target)) + 1
        columns = [max(_terminal_width(token), 1) + 1 for token in source]
        lines = [" " * side + "".join(_pad_to_width(t, w) for t, w in zip(source, columns, strict=True))]
        for row, (token, weights) in enumerate(zip(target, self.weights, strict=True)):
            cells = [_shade_cell(w, (s, row) in self.gold.links) for s, w in enumerate(weights)]
            lines.append(
                _pad_to_width(token, side) + "".join(_pad_to_width(c, w) for c, w in zip(cells, columns, strict=True))
            )
        return "\n".join(line.rstrip() for line in lines)


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
                self.task, recipe=self.recipe, out=self.folder, resume="allowed", loggers=[ConsoleLogger()]
            )
        return self._result

    @property
    def head_alignments(self) -> list[HeadAlignment]:
        """Alignment of every cross-attention head, best first."""
        return measure_alignment(self.result.net, self.batch)

    def training_page(self) -> str:
        """Format size, training time and quality of the translator."""
        result, count = self.result, sum(p.numel() for p in self.result.net.parameters())
        quality = f"{result.metrics['exact_match']:.1%} of held-out dates and amounts are translated exactly"
        lines = [
            f"{count:,} parameters, {result.steps:,} steps in {result.seconds:.0f} s, {result.precision}: {quality}.",
            f"The model is in {self.folder}, its training curve in metrics.jsonl.",
        ]
        return "\n".join(line for paragraph in lines for line in textwrap.wrap(paragraph, TERMINAL_WIDTH))

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
        samples = [sample._asdict() for sample in translate_samples(self.result.net, self.task, self.batch)]
        heads = [{**head._asdict(), "share": head.share} for head in self.head_alignments]
        return {**self.result.data, "samples": samples, "heads": heads}


def translate_samples(net: Transformer, task: DateTranslation, batch: Batch) -> list[TranslationExample]:
    """Translate the first example of each direction."""
    first_rows = {annotation.direction: row for row, annotation in reversed(list(enumerate(batch.gold)))}
    rows = sorted(first_rows.values())
    answers = _predict(net, task, batch)
    gold = [batch.gold[row] for row in rows]
    return [
        TranslationExample(annotation.direction, annotation.source, annotation.target, task.text(answers[row]))
        for row, annotation in zip(rows, gold, strict=True)
    ]


def _predict(net: Transformer, task: DateTranslation, batch: Batch) -> list[list[int]]:
    assert batch.source is not None, "the task has a source"
    with torch.no_grad():
        memory = net.eval().encode(batch.source, sequence=batch.source_tokens)
    prompt, tokens = task.prompt(batch)
    return greedy_decode(
        net, prompt, max_new_tokens=task.answers, sequence=tokens, end_id=END_ID, encoder_output=memory
    )


def measure_alignment(net: Transformer, batch: Batch) -> list[HeadAlignment]:
    """Score the alignment of every cross-attention head, best first; only tokens with a gold alignment count."""
    alignments = [
        HeadAlignment(layer, head, *count_correct_links(w_BTS, batch))
        for layer, w_BHTS in cross_attention_weights(net, batch).items()
        for head, w_BTS in enumerate(w_BHTS.unbind(1))
    ]
    return sorted(alignments, key=lambda alignment: (-alignment.share, alignment.layer, alignment.head))


def cross_attention_weights(net: Transformer, batch: Batch) -> dict[int, Tensor]:
    """Return the cross-attention weights [B, H, T, S] by layer, with the reference as decoder input."""
    names = [name for name, _ in net.spec.attention_specs() if name.endswith(".cross")]
    probes = {name: Probe("weights") for name in names}
    saved_probes, net.probes = net.probes, probes
    try:
        with torch.no_grad():
            net.eval()(batch.x, sequence=batch.tokens, source=batch.source, source_sequence=batch.source_tokens)
    finally:
        net.probes = saved_probes
    return {int(name.split(".")[1]): probe.tensors["weights"] for name, probe in probes.items()}


def count_correct_links(w_BTS: Tensor, batch: Batch) -> tuple[int, int]:
    """Count the aligned target tokens whose most attended source token is right, and all aligned ones."""
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
    """Return the alignment map of the best head for the first date from English to Chinese, which fits a terminal."""
    row = next(
        row
        for row, annotation in enumerate(batch.gold)
        if annotation.subject == "date" and len(annotation.links) and annotation.direction == "en-zh"
    )
    annotation = batch.gold[row]
    num_targets, num_sources = int((batch.labels[row] != IGNORE_INDEX).sum()), len(_tokenize(annotation.source)) + 1
    weights = cross_attention_weights(net, batch)[best.layer][row, best.head, :num_targets, :num_sources]
    return AlignmentMap(best.layer, best.head, annotation, tuple(tuple(line) for line in weights.tolist()))


def _tokenize(text: str) -> list[str]:
    tokens, remaining = [], text
    while remaining:
        token = max((word for word in VOCABULARY if remaining.startswith(word)), key=len)
        tokens.append(token)
        remaining = remaining[len(token) :]
    return tokens


def _shade_cell(weight: float, linked: bool) -> str:
    shade = WEIGHT_SHADES[min(round(weight * (len(WEIGHT_SHADES) - 1) + 0.3), len(WEIGHT_SHADES) - 1)]
    return f"[{shade}" if linked else f" {shade}"


def _terminal_width(text: str) -> int:
    """Width in terminal columns: Chinese characters take two."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def _pad_to_width(text: str, width: int) -> str:
    return text + " " * (width - _terminal_width(text))


def _visible_token(token: str) -> str:
    return "␣" if token == " " else token


def format_examples(examples: Sequence[TranslationExample]) -> str:
    """Format every example with its output, and the reference if the output is wrong."""
    lines = []
    for example in examples:
        mark = "right" if example.said == example.wanted else f"wrong, should be {example.wanted}"
        lines += [f"{example.direction:<8}{example.source}", f"        {example.said}   ({mark})"]
    return "\n".join(lines)


def format_alignment(heads: Sequence[HeadAlignment], best_map: AlignmentMap) -> str:
    """Format the alignment of every head, and the map of the best one."""
    lines = ["How often the most attended source token is the aligned one:", ""]
    lines += [
        f"  layer {entry.layer} head {entry.head}   {entry.share:6.1%}   {'█' * round(30 * entry.share)}"
        for entry in heads
    ]
    caption = (
        f"Layer {best_map.layer} head {best_map.head} attends to {best_map.gold.source!r} (columns) while it writes"
    )
    return "\n".join([*lines, "", f"{caption} the rows;", "gold alignments are marked with [:", "", str(best_map)])
