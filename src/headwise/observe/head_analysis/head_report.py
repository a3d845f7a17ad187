"""Report of a model's heads in a folder: the table as JSON, and figures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ...report.data import Axis, Figure, HeatMap, Plot, Series
from ...report.plots import THEMES, save_figure
from ...util.files import write_atomically
from ...util.output_paths import Existing, FolderKind, stage_folder
from ..head_names import print_head
from ..inspect.trace_capture import Capture, trace
from ..traces import AttentionRecord, Trace
from ..traces.attention_trace import SCALE_LABEL
from .annotated_examples import Example, TokenAnnotations
from .dependency_syntax import is_relation_measure
from .head_classes import CLASS_RULES, PATCH_CLASS_RULES, UNCLEAR, offset_class_name
from .head_metrics import MAX_OFFSET, get_metric
from .head_redundancy import RedundancyResult
from .head_similarity import PlaneEmbedding
from .head_table import CLASS_STYLES, HeadMeasures, HeadTable, ImportanceResult, class_group
from .resampling import Array
from .weight_bands import WeightBand
from .word_alignment import ALIGNMENT_PREFIX, ROW_CONVENTIONS

# --- Figures of all heads -------------------------------------------------------------------------

NUM_NAMED_HEADS = 5  # named on the curve of importance

COLOUR_NOTE = "colour: class with the highest score"


def _class_colours(heads: Sequence[HeadMeasures]) -> list[str]:
    return [CLASS_STYLES.get(head.group, ("", "muted"))[1] or "empty" for head in heads]


def plot_entropy_by_layer(table: HeadTable) -> Figure:
    """Return the entropy of every head by layer: dots are heads with intervals, the line their
    mean.
    """
    sites = table.sites
    xs: list[float] = []
    heads: list[HeadMeasures] = []
    means: list[float] = []
    chance: list[float] = []
    for index, site in enumerate(sites):
        members = [head for head in table.heads if head.site == site]
        count = len(members)
        heads += members
        xs += [index + 0.5 * (n / max(1, count - 1) - 0.5) for n in range(count)]
        means.append(sum(head.measures["entropy"].value for head in members) / count)
        chance.append(members[0].measures["entropy"].chance)
    ys, lows, highs = zip(*(head.measures["entropy"][:3] for head in heads), strict=True)
    dots: dict[str, Any] = {"line": "", "colours": _class_colours(heads), "sizes": [3.4] * len(xs)}
    layers = range(len(sites))
    series = [
        Series("head, 95 % interval", xs, ys, lows, highs, band=False, **dots),
        Series("mean of the layer", layers, means, colour="text"),
        Series("chance", layers, chance, line="--", colour="muted"),
    ]
    step = -(-len(sites) // 12)
    names = [site.removesuffix(".attention") for site in sites]
    ticks: dict[float, str] = {n: names[n] for n in range(0, len(sites), step)}
    axes = (Axis("attention layer", ticks=ticks), Axis("entropy (nats)"))
    plot = Plot(series, *axes, size=(6.4, 3.4))
    title = f"{table.model}: entropy of every head, {table.texts}"
    return Figure(title, [plot], table.class_legend, legend_title=COLOUR_NOTE)


def plot_importance(result: ImportanceResult) -> Figure:
    """Return the importance of the heads in decreasing order, with 95 % intervals."""
    heads = result.by_importance
    ys, lows, highs = zip(*(head.measure[:3] for head in heads), strict=True)
    sites = list(dict.fromkeys(head.site for head in result.heads))
    names = [
        f"{rank}  {print_head(head.site, head.head, sites)}" for rank, head in enumerate(heads)
    ]
    ranks = range(len(heads))
    series = Series("head, 95 % interval", ranks, ys, lows, highs, marker=".")
    axes = (Axis("heads by decreasing importance"), Axis(f"importance by {result.method}"))
    plot = Plot([series], *axes, size=(6.4, 3.1))
    title = f"{result.model}: importance of every head for {result.objective}, {result.texts} texts"
    return Figure(title, [plot], note=f"most important: {', '.join(names[:NUM_NAMED_HEADS])}")


def plot_similar_heads(table: HeadTable, embedding: PlaneEmbedding) -> Figure:
    """Return heads as points of an embedding; later layers have larger dots."""
    last = max(1, len(table.sites) - 1)
    sizes = [6 + 5 * table.sites.index(head.site) / last for head in table.heads]
    xs, ys = embedding.points.T.tolist()
    labels = [f"{head.layer}.{head.head}" for head in table.heads]
    dots: dict[str, Any] = {"line": "", "colours": _class_colours(table.heads), "sizes": sizes}
    series = Series("", xs, ys, labels=labels, **dots)
    unit = "nats of Jensen-Shannon divergence without sinks"
    plot = Plot([series], Axis(unit), Axis(unit), names="", size=(5.6, 5.4))
    note = f"labels are layer.head; larger dots are later layers; stress {embedding.stress:.2f}"
    title = f"{table.model}: similar heads are close"
    return Figure(title, [plot], table.class_legend, legend_title=COLOUR_NOTE, note=note)


# --- The report -----------------------------------------------------------------------------------

EXAMPLE_LENGTHS = range(6, 19)  # numbers of tokens that suit a heat map

HEAD_REPORT = FolderKind(
    "report of heads",
    ("heads.json", "head-*-light.svg"),
    lambda folder: (
        "heads.json",
        *(f"*-{theme}.{suffix}" for theme, suffix in product(THEMES, ("svg", "png"))),
    ),
)
HeadSelection = Sequence[tuple[str, int]]


def write_head_report(
    model: nn.Module,
    table: HeadTable,
    examples: Sequence[Example],
    folder: Path,
    *,
    importance: ImportanceResult | None = None,
    redundancy: RedundancyResult | None = None,
    drawn_heads: HeadSelection = (),
    existing: Existing = "refuse",
) -> list[str]:
    """Write the table as JSON, and every figure for light and dark
    backgrounds as SVG and PNG.

    `importance` and `redundancy` get a figure, `drawn_heads` one each on the first text. The folder
    appears complete or not at all; "overwrite" replaces an earlier report. Returns the paths of the
    main files.
    """
    for site, head in drawn_heads:
        table.head(site, head)  # refuse an unknown head before anything is written
    with stage_folder(folder, HEAD_REPORT, existing) as staged:
        write_atomically(staged / "heads.json", json.dumps(table.data, indent=1).encode())
        suiting = [one for one in examples if one.is_within(EXAMPLE_LENGTHS)]
        maker = PictureMaker(model, suiting or examples[:1])
        figures = _list_figures(table, maker, drawn_heads)
        if importance is not None:
            figures["importance"] = plot_importance(importance)
        for number, group in enumerate(redundancy.readers if redundancy else ()):
            heads = tuple(table.head(location.site, location.head) for location in group.heads)
            name = "map" if not number else f"map-{'-'.join(dict.fromkeys(group.streams))}"
            figures[name] = plot_similar_heads(replace(table, heads=heads), group.embedding)
        names = list(write_figures(figures, staged))
        relative = [Path(name).relative_to(staged) for name in names]
        return [str(folder / "heads.json"), *(str(folder / name) for name in relative)]


def write_figures(figures: Mapping[str, Figure], folder: Path) -> Iterator[str]:
    """Write each figure for light and dark backgrounds as SVG and PNG, and yield the path of the
    light SVG.
    """
    for name, figure in figures.items():
        for theme in THEMES:
            for suffix in (".svg", ".png"):
                save_figure(figure, folder / f"{name}-{theme}{suffix}", theme)
        yield str(folder / f"{name}-light.svg")


def _list_figures(
    table: HeadTable, maker: PictureMaker, drawn_heads: HeadSelection
) -> dict[str, Figure]:
    model = table.model
    figures = {
        "grid": table.class_grid(f"{model}: class of every head, {table.texts}"),
        "entropy": plot_entropy_by_layer(table),
    }
    pictures: list[HeadPicture] = []  # the head with the highest score of each class
    for group in CLASS_STYLES:
        for best, head in table.class_members(group)[: group != UNCLEAR]:
            title = f"{best.name} {best.score:.2f}: {table.name(head)}"
            picture = maker.picture(head, best.name, title)
            pictures += [picture] if picture is not None else []
    if pictures:
        marks = "the pairs of tokens that the class is about"
        title = f"{model}: the top head of each class, each on the text that shows it best"
        figures["gallery"] = head_gallery(pictures, title, marks)
    for location in drawn_heads:
        head = table.head(*location)
        classes = [one for one in head.classes if one.name != UNCLEAR]
        names = ", ".join(f"{one.name} {one.score:.2f}" for one in classes[:3]) or "no class"
        picture = maker.first_picture(head, classes[0].name if classes else "", names)
        title = f"{model}: {table.name(head)}"
        figures[head_file_name(*location)] = head_figure(picture, title)
    return figures


def head_file_name(site: str, head: int) -> str:
    """Return the file name of the figure of one head.

    >>> head_file_name("decoder.1.attention", 3)
    'head-decoder.1.attention-3'
    """
    return f"head-{site.replace('/', '.')}-{head}"


def draw_traced_heads(
    trace: Trace, heads: HeadSelection, folder: Path, existing: Existing = "refuse"
) -> list[str]:
    """Write a figure of each chosen head on the first text of a trace to a folder; return the paths
    of the light SVGs.

    The folder appears complete or not at all.
    """
    figures = {
        head_file_name(trace.get_layer(site).name, head): trace.draw(f"{site}:{head}")
        for site, head in heads
    }
    with stage_folder(folder, HEAD_REPORT, existing) as staged:
        return [str(folder / Path(name).name) for name in write_figures(figures, staged)]


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

Cells = list[tuple[int, int]]


@dataclass
class PictureMaker:
    """Make pictures of heads on the texts that show their classes; each text runs once."""

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
        for number, cells in self.rank_texts(head, name)[:1]:
            picture = self.first_picture(head, name, title, number)
            return picture._replace(marked_cells=cells or ())
        return None

    def rank_texts(self, head: HeadMeasures, name: str) -> list[tuple[int, Cells | None]]:
        """The numbers of the texts that show a class of a head, the best first, with its cells."""
        layer = self.trace(0).get_layer(head.site)
        cells_of_text = [find_cells(name, example, layer, head) for example in self.examples]
        numbers = [n for n, cells in enumerate(cells_of_text) if cells is None or cells]
        scores = {n: self._score(n, head, name, cells_of_text[n]) for n in numbers[:MAX_TEXTS]}
        ranked = sorted(scores, key=lambda number: -scores[number])
        return [(number, cells_of_text[number]) for number in ranked if scores[number] > 0]

    def _score(self, number: int, head: HeadMeasures, name: str, cells: Cells | None) -> float:
        """How well an example shows a class of a head, which is about these cells."""
        example = self.examples[number]
        traced = self.trace(number)
        layer = traced.get_layer(head.site)
        weights = traced.head_weights(head.site, head.head)
        if cells is not None:
            return score_cells(weights, cells)
        tokens = [example.streams[stream] for stream in (layer.query_stream, layer.key_stream)]
        allowed = torch.from_numpy(np.asarray(traced.head_mask(head.site, head.head), dtype=bool))
        band = WeightBand(torch.from_numpy(weights)[None], allowed, 0, tokens[0], tokens[1])
        rules = (*CLASS_RULES, *PATCH_CLASS_RULES)
        measures = [rule.measure for rule in rules if rule.name == name]
        metric = get_metric((*measures, "confidence")[0])
        band = band.without_sinks() if metric.weight_source == "rest" else band
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


def find_cells(
    name: str, example: Example, layer: AttentionRecord, head: HeadMeasures
) -> Cells | None:
    """The cells (query, key) that a class of a head in this layer is about; None if it is not about
    pairs.
    """
    if is_relation_measure(name):  # the first tokens of the words
        _, relation, _, towards = name.rsplit(" ", 3)
        word_of_token = next(iter(example.streams.values())).word_index.tolist()
        cells: Cells = []
        for dependent, governor, of in example.dependencies:
            if of == relation:
                pair = (word_of_token.index(dependent), word_of_token.index(governor))
                cells.append(pair if towards == "governor" else (pair[1], pair[0]))
        return cells
    if name == "alignment":  # every token of the words with gold links
        # The convention by which the head aligns better: the row of a word has it as input, or
        # predicts it.
        measures = {row: head.measures.get(f"{ALIGNMENT_PREFIX} {row}") for row in ROW_CONVENTIONS}
        values = {row: measure.value for row, measure in measures.items() if measure is not None}
        best = max(values, key=lambda row: values[row], default=ROW_CONVENTIONS[0])
        target, source = (example.streams[one].word_index.tolist() for one in ("text", "source"))
        links = {(link[1], link[0]) for link in example.alignment_links}
        earlier = 0 if best == "input" else 1  # the row before a token predicts it
        places = product(range(earlier, len(target)), range(len(source)))
        return [(t - earlier, s) for t, s in places if (target[t], source[s]) in links]
    if name in ("duplicate", "induction"):
        is_induction = name == "induction"
        earlier_only = layer.stack == "decoder" or is_induction
        return _repeated_cells(example.streams[layer.query_stream], is_induction, earlier_only)
    for offset in range(-MAX_OFFSET, MAX_OFFSET + 1):
        if name == offset_class_name(offset):
            count = example.streams[layer.query_stream].count
            return [(t, t + offset) for t in range(count) if 0 <= t + offset < count]
    return None


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
