"""A small translator of dates and amounts: trained as you watch, and what its heads read."""

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
NUM_EVALUATED, TERMINAL_WIDTH = 64, 80  # examples that heads are judged by; columns of a terminal
WEIGHT_SHADES = " ·░▒▓█"  # no weight .. all of it


class TranslationExample(NamedTuple):
    """A held-out example: what was asked, what is right, and what the model says."""

    direction: str
    source: str
    wanted: str
    said: str


class HeadAlignment(NamedTuple):
    """A head that reads the source, and how often the token it reads most is the one that is translated."""

    layer: int
    head: int
    right: int
    of: int

    @property
    def share(self) -> float:
        """Right answers among all."""
        return self.right / self.of


@dataclass(frozen=True)
class AlignmentMap:
    """What one head reads of a source for each token of a translation, [T, S], with the gold links."""

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
    """The pages of a translator, which is trained when the first of them is made."""

    def __init__(self, folder: Path, recipe: Recipe | None = None) -> None:
        self.folder, self.recipe = folder, RECIPE if recipe is None else recipe
        self.task = DateTranslation()
        self.batch = self.task.batch(0, NUM_EVALUATED, "test")  # examples that training never shows
        self._result: TrainingResult | None = None

    @property
    def result(self) -> TrainingResult:
        """Trained, or gone on with where an earlier run into the folder ended."""
        if self._result is None:
            self._result = train(
                self.task, recipe=self.recipe, out=self.folder, resume="allowed", loggers=[ConsoleLogger()]
            )
        return self._result

    @property
    def head_alignments(self) -> list[HeadAlignment]:
        """How each head that reads the source is aligned, best first."""
        return measure_alignment(self.result.net, self.batch)

    def training_page(self) -> str:
        """What was trained, for how long, and how good it is."""
        result, count = self.result, sum(p.numel() for p in self.result.net.parameters())
        best = f"{result.metrics['exact_match']:.1%} of held-out dates and amounts come out letter for letter"
        lines = [
            f"{count:,} parameters, {result.steps:,} steps in {result.seconds:.0f} s, {result.precision}: {best}.",
            f"It is in {self.folder}, with its curve in metrics.jsonl.",
        ]
        return "\n".join(line for long in lines for line in textwrap.wrap(long, TERMINAL_WIDTH))

    def examples_page(self) -> str:
        """One held-out example of each direction."""
        return format_examples(translate_samples(self.result.net, self.task, self.batch))

    def alignment_page(self) -> str:
        """How well heads are aligned, and a picture of the best."""
        heads = self.head_alignments
        return format_alignment(heads, make_alignment_map(self.result.net, heads[0], self.batch))

    @property
    def data(self) -> dict[str, Any]:
        """All numbers as plain values."""
        told = [said._asdict() for said in translate_samples(self.result.net, self.task, self.batch)]
        heads = [{**head._asdict(), "share": head.share} for head in self.head_alignments]
        return {**self.result.data, "samples": told, "heads": heads}


def translate_samples(net: Transformer, task: DateTranslation, batch: Batch) -> list[TranslationExample]:
    """What a model says of the first example of each direction."""
    firsts = {one.direction: row for row, one in reversed(list(enumerate(batch.gold)))}
    rows = sorted(firsts.values())
    answers = _predict(net, task, batch)
    gold = [batch.gold[row] for row in rows]
    return [
        TranslationExample(one.direction, one.source, one.target, task.text(answers[row]))
        for row, one in zip(rows, gold, strict=True)
    ]


def _predict(net: Transformer, task: DateTranslation, batch: Batch) -> list[list[int]]:
    assert batch.source is not None, "dates are read before they are written"
    with torch.no_grad():
        memory = net.eval().encode(batch.source, sequence=batch.source_tokens)
    prompt, tokens = task.prompt(batch)
    return greedy_decode(
        net, prompt, max_new_tokens=task.answers, sequence=tokens, end_id=END_ID, encoder_output=memory
    )


def measure_alignment(net: Transformer, batch: Batch) -> list[HeadAlignment]:
    """How often each head that reads the source reads what is translated, best first; only linked tokens count."""
    found = [
        HeadAlignment(layer, head, *count_correct_links(w_BTS, batch))
        for layer, w_BHTS in cross_attention_weights(net, batch).items()
        for head, w_BTS in enumerate(w_BHTS.unbind(1))
    ]
    return sorted(found, key=lambda one: (-one.share, one.layer, one.head))


def cross_attention_weights(net: Transformer, batch: Batch) -> dict[int, Tensor]:
    """The weights [B, H, T, S] of every attention to the source, by layer, while the right answer is read."""
    names = [name for name, _ in net.spec.attention_specs() if name.endswith(".cross")]
    probes = {name: Probe("weights") for name in names}
    before, net.probes = net.probes, probes
    try:
        with torch.no_grad():
            net.eval()(batch.x, sequence=batch.tokens, source=batch.source, source_sequence=batch.source_tokens)
    finally:
        net.probes = before
    return {int(name.split(".")[1]): probe.tensors["weights"] for name, probe in probes.items()}


def count_correct_links(w_BTS: Tensor, batch: Batch) -> tuple[int, int]:
    """How many linked tokens read one that they translate more than any other, and how many there are."""
    most = w_BTS.argmax(-1).tolist()
    linked = [
        (row, t, {s for s, at in one.links if at == t})
        for row, one in enumerate(batch.gold)
        for t in _linked_positions(one)
    ]
    return sum(most[row][t] in wanted for row, t, wanted in linked), len(linked)


def _linked_positions(one: TranslationAnnotation) -> Iterator[int]:
    """The places of a translation that translate something."""
    return iter(sorted({t for _, t in one.links}))


def make_alignment_map(net: Transformer, best: HeadAlignment, batch: Batch) -> AlignmentMap:
    """What the best head reads of the first date that is short enough for a terminal."""
    row = next(
        row
        for row, one in enumerate(batch.gold)
        if one.subject == "date" and len(one.links) and one.direction == "en-zh"
    )
    one = batch.gold[row]
    count, width = int((batch.labels[row] != IGNORE_INDEX).sum()), len(_tokenize(one.source)) + 1
    weights = cross_attention_weights(net, batch)[best.layer][row, best.head, :count, :width]
    return AlignmentMap(best.layer, best.head, one, tuple(tuple(line) for line in weights.tolist()))


def _tokenize(text: str) -> list[str]:
    """A text as its tokens."""
    found, rest = [], text
    while rest:
        token = max((word for word in VOCABULARY if rest.startswith(word)), key=len)
        found.append(token)
        rest = rest[len(token) :]
    return found


def _shade_cell(weight: float, linked: bool) -> str:
    shade = WEIGHT_SHADES[min(round(weight * (len(WEIGHT_SHADES) - 1) + 0.3), len(WEIGHT_SHADES) - 1)]
    return f"[{shade}" if linked else f" {shade}"


def _terminal_width(text: str) -> int:
    """Columns of a terminal: signs of Chinese take two."""
    return sum(2 if unicodedata.east_asian_width(sign) in "WF" else 1 for sign in text)


def _pad_to_width(text: str, width: int) -> str:
    return text + " " * (width - _terminal_width(text))


def _visible_token(token: str) -> str:
    return "␣" if token == " " else token


def format_examples(told: Sequence[TranslationExample]) -> str:
    """Each answer on a line of its own, with the right one where it is wrong."""
    lines = []
    for one in told:
        mark = "right" if one.said == one.wanted else f"wrong, it is {one.wanted}"
        lines += [f"{one.direction:<8}{one.source}", f"        {one.said}   ({mark})"]
    return "\n".join(lines)


def format_alignment(heads: Sequence[HeadAlignment], drawn: AlignmentMap) -> str:
    """How well each head is aligned, and what the best one reads."""
    lines = ["How often the source token that a head reads most is the one translated:", ""]
    lines += [
        f"  layer {one.layer} head {one.head}   {one.share:6.1%}   {'█' * round(30 * one.share)}" for one in heads
    ]
    head = f"Layer {drawn.layer} head {drawn.head} reads {drawn.gold.source!r} (columns) to write"
    return "\n".join([*lines, "", f"{head} the rows;", "links that are known are in brackets:", "", str(drawn)])
