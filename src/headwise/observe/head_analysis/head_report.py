"""Report of a model's heads in a folder: the table as JSON, and figures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from ...report.data import Axis, Figure, Plot, Series
from ...report.plots import THEMES, save_figure
from ...util.files import write_atomically
from ...util.output_paths import Existing, FolderKind, stage_folder
from ..traces import Trace
from .annotated_examples import Example
from .attention_figures import (
    HeadPicture,
    PictureMaker,
    head_figure,
    head_gallery,
)
from .head_classes import UNCLEAR
from .head_metrics import HEAD_METRICS
from .head_redundancy import RedundancyResult
from .head_similarity import PlaneEmbedding
from .head_table import CLASS_STYLES, HeadMeasures, HeadTable, ImportanceResult

# --- Figures of all heads -------------------------------------------------------------------------

NUM_NAMED_HEADS = 5  # named on the curve of importance
MEASURE_UNITS = {"entropy": "nats", "distance": "tokens"}
COLOUR_NOTE = "colour: class with the highest score"


def _class_colours(heads: Sequence[HeadMeasures]) -> list[str]:
    return [CLASS_STYLES.get(head.group, ("", "muted"))[1] or "empty" for head in heads]


def plot_measure_by_layer(table: HeadTable, measure: str = "entropy") -> Figure:
    """Return a measure of every head by layer: dots are heads with intervals, the line their mean."""
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
        means.append(sum(head.measures[measure].value for head in members) / count)
        chance.append(members[0].measures[measure].chance)
    ys, lows, highs = zip(*(head.measures[measure][:3] for head in heads), strict=True)
    dots: dict[str, Any] = {"line": "", "colours": _class_colours(heads), "sizes": [3.4] * len(xs)}
    layers = range(len(sites))
    series = [
        Series("head, 95 % interval", xs, ys, lows, highs, band=False, **dots),
        Series("mean of the layer", layers, means, colour="text"),
        Series("chance", layers, chance, line="--", colour="muted"),
    ]
    metric = HEAD_METRICS.get(measure)
    unit = MEASURE_UNITS.get(measure) or (metric.description if metric is not None else "")
    step = -(-len(sites) // 12)
    names = [site.removesuffix(".attention") for site in sites]
    ticks: dict[float, str] = {n: names[n] for n in range(0, len(sites), step)}
    y = Axis(f"{measure} ({unit})" if unit else measure)
    plot = Plot(series, Axis("attention layer", ticks=ticks), y, size=(6.4, 3.4))
    title = f"{table.model}: {measure} of every head, {table.texts}"
    return Figure(title, [plot], table.class_legend, legend_title=COLOUR_NOTE)


def plot_importance(result: ImportanceResult) -> Figure:
    """Return the importance of the heads in decreasing order, with 95 % intervals."""
    heads = result.by_importance
    ys, lows, highs = zip(*(head.measure[:3] for head in heads), strict=True)
    names = [f"{rank}  {head.site} {head.head}" for rank, head in enumerate(heads)]
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


class ReportOptions(NamedTuple):
    """Figures of a report besides the table.

    - `importance`, `redundancy`: results that get a figure.
    - `drawn_heads`: heads with a figure of their own on the first text.
    - `existing`: "overwrite" replaces a folder with an earlier report.
    """

    importance: ImportanceResult | None = None
    redundancy: RedundancyResult | None = None
    drawn_heads: HeadSelection = ()
    existing: Existing = "refuse"


DEFAULT_OPTIONS = ReportOptions()


def write_head_report(
    model: nn.Module,
    table: HeadTable,
    examples: Sequence[Example],
    folder: Path,
    options: ReportOptions = DEFAULT_OPTIONS,
) -> list[str]:
    """Write the table as JSON, and every figure for light and dark
    backgrounds as SVG and PNG.

    The folder appears complete or not at all. Returns the paths of the main files.
    """
    for site, head in options.drawn_heads:
        table.head(site, head)  # refuse an unknown head before anything is written
    with stage_folder(folder, HEAD_REPORT, options.existing) as staged:
        write_atomically(staged / "heads.json", json.dumps(table.data, indent=1).encode())
        maker = PictureMaker(model, _short_examples(examples))
        names = list(write_figures(_list_figures(table, maker, options), staged))
        relative = [Path(name).relative_to(staged) for name in names]
        return [str(folder / "heads.json"), *(str(folder / name) for name in relative)]


def _short_examples(examples: Sequence[Example]) -> list[Example]:
    """Return the examples whose lengths suit a heat map, or the first one if there is none."""

    def is_short(example: Example) -> bool:
        return all(tokens.count in EXAMPLE_LENGTHS for tokens in example.streams.values())

    return list(filter(is_short, examples)) or list(examples[:1])


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
    table: HeadTable, maker: PictureMaker, options: ReportOptions
) -> dict[str, Figure]:
    model = table.model
    figures = {
        "grid": table.class_grid(f"{model}: class of every head, {table.texts}"),
        "entropy": plot_measure_by_layer(table),
    }
    pictures = list(_class_pictures(table, maker))
    if pictures:
        marks = "the pairs of tokens that the class is about"
        title = f"{model}: the top head of each class, each on the text that shows it best"
        figures["gallery"] = head_gallery(pictures, title, marks)
    for location in options.drawn_heads:
        head = table.head(*location)
        classes = [one for one in head.classes if one.name != UNCLEAR]
        names = ", ".join(f"{one.name} {one.score:.2f}" for one in classes[:3]) or "no class"
        picture = maker.first_picture(head, classes[0].name if classes else "", names)
        title = f"{model}: {head.site} {head.head}"
        figures[head_file_name(*location)] = head_figure(picture, title)
    if options.importance is not None:
        figures["importance"] = plot_importance(options.importance)
    for number, group in enumerate(options.redundancy.readers if options.redundancy else ()):
        heads = tuple(table.head(location.site, location.head) for location in group.heads)
        name = "map" if not number else f"map-{'-'.join(dict.fromkeys(group.streams))}"
        figures[name] = plot_similar_heads(replace(table, heads=heads), group.embedding)
    return figures


def head_file_name(site: str, head: int) -> str:
    """File name of the figure of one head.

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
    figures: dict[str, Figure] = {}
    model = str(trace.model.get("name") or trace.model.get("class") or "model")
    for site, head in heads:
        layer = trace.get_layer(site)
        weights = trace.head_weights(site, head)
        queries = trace.streams[layer.query_stream][0].words[: weights.shape[0]]
        keys = trace.streams[layer.key_stream][0].words[: weights.shape[1]]
        text = f"text 1 of {layer.batch_size}" if layer.batch_size > 1 else ""
        picture = HeadPicture(text, "", weights[: len(queries), : len(keys)], queries, keys)
        title = f"{model}: {layer.name} {head}"
        figures[head_file_name(layer.name, head)] = head_figure(picture, title)
    with stage_folder(folder, HEAD_REPORT, existing) as staged:
        return [str(folder / Path(name).name) for name in write_figures(figures, staged)]


def _class_pictures(table: HeadTable, maker: PictureMaker) -> Iterator[HeadPicture]:
    """Yield the head with the highest score of each class, on the text that shows it best."""
    for group in CLASS_STYLES:
        members = table.class_members(group)
        if not members or group == UNCLEAR:
            continue
        best, head = members[0]
        title = f"{best.name} {best.score:.2f}: {head.site} {head.head}"
        picture = maker.picture(head, best.name, title)
        if picture is not None:
            yield picture
