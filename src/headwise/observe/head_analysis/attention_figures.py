"""Pictures of the attention weights of single heads, on the texts that show their classes.

For each class of a head, the text that shows the class best is drawn. A class about pairs of tokens
(an offset, a duplicate, induction, a dependency, an alignment) is shown on a text that has such
pairs and on which the head puts most weight on them; the pairs are marked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ...report.data import Figure, HeatMap, Links
from ..inspect.trace_capture import Capture, trace
from ..traces import AttentionRecord, Trace
from .annotated_examples import Example, TokenAnnotations
from .dependency_syntax import is_relation_measure
from .head_classes import CLASS_RULES, PATCH_CLASS_RULES
from .head_table import CLASS_STYLES, HeadMeasures, class_group
from .literature_metrics import get_metric
from .resampling import Array
from .weight_bands import WeightBand
from .word_alignment import ALIGNMENT_PREFIX, ROW_CONVENTIONS

SCALE_LABEL = "attention weight (strength of colour: its square root)"


class HeadPicture(NamedTuple):
    """Attention weights [T, S] of one head over one text, with a title, a class name, tokens and
    cells to mark.
    """

    title: str
    name: str
    weights: Array
    query_tokens: Sequence[str]
    key_tokens: Sequence[str]
    marked_cells: Sequence[tuple[int, int]] = ()

    def heat_map(self, size: tuple[float, float] | None = None) -> HeatMap:
        """Return the weights as cells: queries from top to bottom, keys from left to right."""
        letter, colour = CLASS_STYLES.get(class_group(self.name), ("", ""))
        tokens = (self.query_tokens, self.key_tokens)
        texts = (f"{letter}  {self.title}".strip(), "key", "query")
        style: dict[str, Any] = {"marked": self.marked_cells, "frame": colour, "size": size}
        return HeatMap(self.weights, *tokens, *texts, **style)


def head_gallery(pictures: Sequence[HeadPicture], title: str, marks: str = "") -> Figure:
    """Return a heat map for each head; `marks` names what the frames around cells mark."""
    panels = [picture.heat_map((3.1, 3.2)) for picture in pictures]
    label = f"{SCALE_LABEL}; framed: {marks}" if marks else SCALE_LABEL
    return Figure(title, panels, num_columns=3, scale_label=label)


def head_figure(picture: HeadPicture, title: str) -> Figure:
    """Return one head large enough to read every token of a text of some dozen tokens."""
    return Figure(title, [picture.heat_map()], scale_label=SCALE_LABEL)


def head_pair_figure(first: HeadPicture, second: HeadPicture, title: str) -> Figure:
    """Return the attention of two heads as lines from queries to keys, in one colour each."""
    weights = {picture.title: picture.weights for picture in (first, second)}
    note = "weights of at least 0.05; thicker, stronger lines are larger weights"
    return Figure(title, [Links(first.query_tokens, first.key_tokens, weights)], note=note)


MAX_TEXTS = 12  # texts that are tried for each class
ENOUGH_PAIRS = 3  # a text with fewer pairs counts for less
OFFSET_OF_CLASS = {"previous": -1, "self": 0, "next": 1}
Cells = list[tuple[int, int]]


def trace_example(model: nn.Module, example: Example) -> Trace:
    """Record the weights of every head on an example."""
    return trace(model, example.model_inputs, capture=Capture())


def make_picture(
    traced: Trace, example: Example, head: HeadMeasures, name: str, title: str
) -> HeadPicture:
    """The picture of a head on an example."""
    layer = traced.get_layer(head.site)
    query_words = example.streams[layer.query_stream].words
    key_words = example.streams[layer.key_stream].words
    return HeadPicture(
        title, name, traced.head_weights(head.site, head.head), query_words, key_words
    )


@dataclass
class PictureMaker:
    """Makes pictures of the heads of a model on the texts that show their classes; each text is run
    once.
    """

    model: nn.Module
    examples: Sequence[Example]
    _traces: dict[int, Trace] = field(default_factory=dict[int, Trace])

    def trace(self, number: int) -> Trace:
        """The trace of example `number`."""
        if number not in self._traces:
            self._traces[number] = trace_example(self.model, self.examples[number])
        return self._traces[number]

    def picture(self, head: HeadMeasures, name: str, title: str) -> HeadPicture | None:
        """The picture of a head on the text that shows its class `name` best; None if no text can
        show it.
        """
        layer = self.trace(0).get_layer(head.site)
        has_pairs = _pair_finder(name, layer, head) is not None
        numbers = [
            number
            for number, example in enumerate(self.examples)
            if not has_pairs or find_cells(name, example, layer, head)
        ]
        scores = {number: self.score(number, head, name) for number in numbers[:MAX_TEXTS]}
        scores = {number: score for number, score in scores.items() if score > 0}
        if not scores:
            return None
        best = max(scores, key=lambda number: scores[number])
        example = self.examples[best]
        picture = make_picture(self.trace(best), example, head, name, title)
        return picture._replace(marked_cells=find_cells(name, example, layer, head))

    def score(self, number: int, head: HeadMeasures, name: str) -> float:
        """How well an example shows a class of a head."""
        example = self.examples[number]
        traced = self.trace(number)
        layer = traced.get_layer(head.site)
        weights = traced.head_weights(head.site, head.head)
        if _pair_finder(name, layer, head) is not None:
            return score_cells(weights, find_cells(name, example, layer, head))
        tokens = [example.streams[stream] for stream in (layer.query_stream, layer.key_stream)]
        allowed = torch.from_numpy(np.asarray(traced.head_mask(head.site, head.head), dtype=bool))
        band = WeightBand(torch.from_numpy(weights)[None], allowed, 0, tokens[0], tokens[1])
        measure = next(
            (rule.measure for rule in (*CLASS_RULES, *PATCH_CLASS_RULES) if rule.name == name),
            "confidence",
        )
        metric = get_metric(measure)
        sums, counts = metric.compute_sums(
            band if metric.weight_source == "all" else band.without_sinks()
        )
        return float(sums[0] / counts[0]) if float(counts[0]) else 0.0


def score_cells(weights: np.ndarray, cells: Cells) -> float:
    """Mean weight of the rows of some cells on these cells, less if there are fewer than
    `ENOUGH_PAIRS` such rows.

    >>> score_cells(np.eye(4), [(0, 0), (1, 2)]), score_cells(np.eye(4), [(0, 0), (1, 1), (2, 2)])
    (0.3333333333333333, 1.0)
    """
    by_row: dict[int, float] = {}
    for t, s in cells:
        by_row[t] = by_row.get(t, 0.0) + float(weights[t, s])
    return sum(by_row.values()) / max(len(by_row), ENOUGH_PAIRS)


def find_cells(name: str, example: Example, layer: AttentionRecord, head: HeadMeasures) -> Cells:
    """The cells (query, key) that a class of a head in this layer is about; none if it is not about
    pairs.
    """
    finder = _pair_finder(name, layer, head)
    return [] if finder is None else finder(example)


def _pair_finder(
    name: str, layer: AttentionRecord, head: HeadMeasures
) -> Callable[[Example], Cells] | None:
    is_causal_text = layer.stack == "decoder"
    if is_relation_measure(name):
        _, relation, _, towards = name.rsplit(" ", 3)
        return lambda example: _dependency_cells(example, relation, towards)
    if name == "alignment":
        return lambda example: _alignment_cells(example, _aligned_row(head))
    if name == "duplicate":
        return lambda example: _duplicate_cells(example.streams[layer.query_stream], is_causal_text)
    if name == "induction":
        return lambda example: _induction_cells(example.streams[layer.query_stream])
    offset = OFFSET_OF_CLASS.get(
        name, int(name.removeprefix("offset ")) if name.startswith("offset ") else None
    )
    if offset is None:
        return None
    return lambda example: _offset_cells(example.streams[layer.query_stream].count, offset)


def _offset_cells(count: int, offset: int) -> Cells:
    return [(t, t + offset) for t in range(count) if 0 <= t + offset < count]


def _duplicate_cells(tokens: TokenAnnotations, is_causal_text: bool) -> Cells:
    """Pairs of equal tokens that are not special; those before the query if later ones cannot be
    read.
    """
    ids = tokens.ids.tolist()
    shown = [n for n in range(len(ids)) if not bool(tokens.is_special[n])]
    return [
        (t, s)
        for t in shown
        for s in shown
        if ids[t] == ids[s] and (s < t or (s > t and not is_causal_text))
    ]


def _induction_cells(tokens: TokenAnnotations) -> Cells:
    """Pairs of a token and a token behind an earlier occurrence of it."""
    ids = tokens.ids.tolist()
    return [(t, s + 1) for t in range(len(ids)) for s in range(t - 1) if ids[s] == ids[t]]


def _dependency_cells(example: Example, relation: str, towards: str) -> Cells:
    """Cells of a relation's dependencies, at the first tokens of the words."""
    word_of_token = next(iter(example.streams.values())).word_index.tolist()
    cells = [
        (word_of_token.index(dependent), word_of_token.index(governor))
        for dependent, governor, name in example.dependencies
        if name == relation
    ]
    return (
        cells if towards == "governor" else [(governor, dependent) for dependent, governor in cells]
    )


def _aligned_row(head: HeadMeasures) -> str:
    """The convention by which the head aligns better: the row of a word has it as input, or
    predicts it.
    """
    measures = {row: head.measures.get(f"{ALIGNMENT_PREFIX} {row}") for row in ROW_CONVENTIONS}
    values = {row: measure.value for row, measure in measures.items() if measure is not None}
    return max(values, key=lambda row: values[row], default=ROW_CONVENTIONS[0])


def _alignment_cells(example: Example, row: str) -> Cells:
    """Cells of the gold links of a source and its target: every token of the linked words."""
    target, source = (example.streams[name].word_index.tolist() for name in ("text", "source"))
    links = {(link[1], link[0]) for link in example.alignment_links}
    earlier = 0 if row == "input" else 1  # the row before a token predicts it
    return [
        (t - earlier, s)
        for t, word in enumerate(target)
        for s, other in enumerate(source)
        if (word, other) in links and t >= earlier
    ]
