"""Pictures of the attention weights of single heads, on the texts that show their classes.

For each class of a head, the text that shows the class best is drawn. A class about pairs of tokens
(an offset, a duplicate, induction, a dependency, an alignment) is shown on a text that has such
pairs and on which the head puts most weight on them; the pairs are marked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ...report.data import Figure, HeatMap
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


MAX_TEXTS = 12  # texts that are tried for each class
ENOUGH_PAIRS = 3  # a text with fewer pairs counts for less
OFFSET_OF_CLASS = {"previous": -1, "self": 0, "next": 1}
Cells = list[tuple[int, int]]


@dataclass
class PictureMaker:
    """Makes pictures of the heads of a model on the texts that show their classes; each text is run
    once.
    """

    model: nn.Module
    examples: Sequence[Example]
    _traces: dict[int, Trace] = field(default_factory=dict[int, Trace])

    def trace(self, number: int) -> Trace:
        """The trace of example `number`, with the weights of every head."""
        if number not in self._traces:
            inputs = self.examples[number].model_inputs
            self._traces[number] = trace(self.model, inputs, capture=Capture())
        return self._traces[number]

    def first_picture(
        self, head: HeadMeasures, name: str, title: str, number: int = 0
    ) -> HeadPicture:
        """The picture of a head on the first example, or on another."""
        traced = self.trace(number)
        layer = traced.get_layer(head.site)
        streams = self.examples[number].streams
        queries = streams[layer.query_stream].words
        keys = streams[layer.key_stream].words
        weights = traced.head_weights(head.site, head.head)
        return HeadPicture(title, name, weights, queries, keys)

    def picture(self, head: HeadMeasures, name: str, title: str) -> HeadPicture | None:
        """The picture of a head on the text that shows its class `name` best; None if no text can
        show it.
        """
        layer = self.trace(0).get_layer(head.site)
        numbers = list(range(len(self.examples)))
        if _pair_finder(name, layer, head) is not None:
            numbers = [n for n in numbers if find_cells(name, self.examples[n], layer, head)]
        scores = {number: self.score(number, head, name) for number in numbers[:MAX_TEXTS]}
        best = max(scores, key=lambda number: scores[number], default=None)
        if best is None or not scores[best] > 0:
            return None
        cells = find_cells(name, self.examples[best], layer, head)
        return self.first_picture(head, name, title, best)._replace(marked_cells=cells)

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
        rules = (*CLASS_RULES, *PATCH_CLASS_RULES)
        measures = [rule.measure for rule in rules if rule.name == name]
        metric = get_metric((*measures, "confidence")[0])
        band = band if metric.weight_source == "all" else band.without_sinks()
        sums, counts = metric.compute_sums(band)
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
    """The function that finds the cells of a class on an example; None if it is not about pairs."""
    if is_relation_measure(name):
        _, relation, _, towards = name.rsplit(" ", 3)
        return lambda example: _dependency_cells(example, relation, towards)
    if name == "alignment":
        # The convention by which the head aligns better: the row of a word has it as input, or
        # predicts it.
        measures = {row: head.measures.get(f"{ALIGNMENT_PREFIX} {row}") for row in ROW_CONVENTIONS}
        values = {row: measure.value for row, measure in measures.items() if measure is not None}
        best = max(values, key=lambda row: values[row], default=ROW_CONVENTIONS[0])
        return lambda example: _alignment_cells(example, best)
    if name in ("duplicate", "induction"):
        is_induction = name == "induction"
        earlier_only = layer.stack == "decoder" or is_induction
        stream = layer.query_stream
        return lambda example: _repeated_cells(example.streams[stream], is_induction, earlier_only)
    if name in OFFSET_OF_CLASS or name.startswith("offset "):
        offset = OFFSET_OF_CLASS.get(name) if name in OFFSET_OF_CLASS else int(name.split()[1])
        return lambda example: _offset_cells(example.streams[layer.query_stream].count, offset or 0)
    return None


def _offset_cells(count: int, offset: int) -> Cells:
    return [(t, t + offset) for t in range(count) if 0 <= t + offset < count]


def _repeated_cells(tokens: TokenAnnotations, is_induction: bool, earlier_only: bool) -> Cells:
    """Pairs of equal tokens that are not special; of induction, pairs of any token and the token
    after an earlier occurrence of it.
    """
    cells: Cells = []
    ids = tokens.ids.tolist()
    special = tokens.is_special.tolist()
    for t, s in product(range(len(ids)), repeat=2):
        if ids[t] != ids[s] or s == t or (earlier_only and s > t):
            continue
        if is_induction:
            cells += [(t, s + 1)] if s < t - 1 else []
        elif not special[t] and not special[s]:
            cells.append((t, s))
    return cells


def _dependency_cells(example: Example, relation: str, towards: str) -> Cells:
    """Cells of a relation's dependencies, at the first tokens of the words."""
    word_of_token = next(iter(example.streams.values())).word_index.tolist()
    cells: Cells = []
    for dependent, governor, name in example.dependencies:
        if name == relation:
            pair = (word_of_token.index(dependent), word_of_token.index(governor))
            cells.append(pair if towards == "governor" else (pair[1], pair[0]))
    return cells


def _alignment_cells(example: Example, row: str) -> Cells:
    """Cells of the gold links of a source and its target: every token of the linked words."""
    target, source = (example.streams[name].word_index.tolist() for name in ("text", "source"))
    links = {(link[1], link[0]) for link in example.alignment_links}
    earlier = 0 if row == "input" else 1  # the row before a token predicts it
    places = product(range(earlier, len(target)), range(len(source)))
    return [(t - earlier, s) for t, s in places if (target[t], source[s]) in links]
