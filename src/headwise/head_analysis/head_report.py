"""Report of a model's heads in a folder: the table as JSON, figures, and files for the HeadVis
viewer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import nn

from ..files import write_atomically
from ..output_paths import Existing, FolderKind, stage_folder
from ..traces import Trace
from . import head_figures
from .annotated_examples import Example
from .attention_figures import (
    HeadPicture,
    PictureMaker,
    draw_gallery,
    draw_head,
    draw_head_overlay,
    make_picture,
)
from .head_classes import UNCLEAR
from .head_figures import CLASS_STYLES, FIGURE_THEMES, FigureTheme, class_group, save_figure
from .head_redundancy import RedundancyResult
from .head_table import HeadMeasures, HeadTable, ImportanceResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# --- Files for HeadVis ----------------------------------------------------------------------------

MAX_KEYS = 8  # strongest keys kept of each row, as in HeadVis


def export_headvis(
    table: HeadTable, trace: Trace, annotated: Example, folder: Path
) -> Iterator[str]:
    """Write scatter_data.json and heads/L{layer}H{head}.json for HeadVis, and yield the path of the
    first.

    Layers are numbered over all sites in the order of the table.
    """
    (folder / "heads").mkdir(parents=True, exist_ok=True)
    sites = table.sites
    points = [
        {
            "layer": sites.index(head.site),
            "head": head.head,
            "site": head.site,
            "metrics": {name: measure.data["value"] for name, measure in head.measures.items()},
            "labels": [head_class.name for head_class in head.classes],
        }
        for head in table.heads
    ]
    path = folder / "scatter_data.json"
    write_atomically(path, json.dumps({"model": table.model, "heads": points}).encode())
    yield str(path)
    traced_sites = {layer.name for layer in trace.layers}
    for head in table.heads:
        if head.site not in traced_sites:
            continue
        layer = trace.get_layer(head.site)
        weights = trace.head_weights(head.site, head.head)
        strongest = [
            [
                [int(s), round(float(row[s]), 6)]
                for s in (-row).argsort(kind="stable")[:MAX_KEYS]
                if row[s] > 0
            ]
            for row in weights
        ]
        example = {
            "tokens": list(annotated.streams[layer.query_stream].words),
            "keys": list(annotated.streams[layer.key_stream].words),
            "attention": strongest,
        }
        document = {**head.data, "examples": [example]}
        path = folder / "heads" / f"L{sites.index(head.site)}H{head.head}.json"
        write_atomically(path, json.dumps(document).encode())


# --- The report -----------------------------------------------------------------------------------

EXAMPLE_LENGTHS = range(6, 19)  # numbers of tokens that suit a heat map
MAX_RELATIONS = 9  # largest number of relations in the figure

HEAD_REPORT = FolderKind(
    "report of heads",
    ("heads.json", "head-*-light.svg"),
    lambda folder: (
        "heads.json",
        "headvis",
        *(f"*-{theme}.{suffix}" for theme in FIGURE_THEMES for suffix in ("svg", "png")),
    ),
)
HeadSelection = Sequence[tuple[str, int]]
NamedFigure = tuple[str, Callable[[FigureTheme], "Figure"]]


class ReportOptions(NamedTuple):
    """Figures of a report besides the table.

    - `importance`, `redundancy`: results that get a figure.
    - `head_pair`: two heads, (site, number) each, for the overlay figure; by default these are the
      heads with the
      broadest and the narrowest attention.
    - `drawn_heads`: heads with a figure of their own on the first text.
    - `existing`: "overwrite" replaces a folder with an earlier report.
    """

    importance: ImportanceResult | None = None
    redundancy: RedundancyResult | None = None
    head_pair: HeadSelection = ()
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
    """Write the table as JSON, the files of HeadVis, and every figure for light and dark
    backgrounds as SVG and PNG.

    The folder appears complete or not at all. Returns the paths of the main files.
    """
    for site, head in (*options.head_pair, *options.drawn_heads):
        table.head(site, head)  # refuse an unknown head before anything is written
    with stage_folder(folder, HEAD_REPORT, options.existing) as staged:
        write_atomically(staged / "heads.json", json.dumps(table.data, indent=1).encode())
        short = [
            example
            for example in examples
            if all(tokens.count in EXAMPLE_LENGTHS for tokens in example.streams.values())
        ]
        maker = PictureMaker(model, short or list(examples[:1]))
        figures = [*_list_figures(table, maker, options), *_extra_figures(table, options)]
        names = [*write_figures(figures, staged)]
        names += export_headvis(table, maker.trace(0), maker.examples[0], staged / "headvis")
        return [
            str(folder / "heads.json"),
            *(str(folder / Path(name).relative_to(staged)) for name in names),
        ]


def write_figures(figures: Iterable[NamedFigure], folder: Path) -> Iterator[str]:
    """Write each figure for light and dark backgrounds as SVG and PNG, and yield the path of the
    light SVG.
    """
    for name, draw in figures:
        for theme in FIGURE_THEMES:
            for suffix in (".svg", ".png"):
                save_figure(draw, folder / f"{name}-{theme}{suffix}", theme)
        yield str(folder / f"{name}-light.svg")


def _list_figures(
    table: HeadTable, maker: PictureMaker, options: ReportOptions
) -> Iterator[NamedFigure]:
    yield "grid", partial(head_figures.draw_head_grid, table)
    yield "entropy", partial(head_figures.draw_measure_by_layer, table)
    if pictures := list(_class_pictures(table, maker)):
        title = f"{table.model}: the top head of each class, each on the text that shows it best"
        yield (
            "gallery",
            partial(
                draw_gallery, pictures, title, marks="the pairs of tokens that the class is about"
            ),
        )
    if pictures := list(_relation_pictures(table, maker)):
        title = f"{table.model}: the top head of each dependency relation"
        yield (
            "relations",
            partial(draw_gallery, pictures, title, marks="the dependencies of the relation"),
        )
    if pair := _choose_pair(table, maker, options.head_pair):
        yield "pair", partial(draw_head_overlay, *pair, f"{table.model}: attention of two heads")
    for location in options.drawn_heads:
        head = table.head(*location)
        classes = [head_class for head_class in head.classes if head_class.name != UNCLEAR]
        names = (
            ", ".join(f"{head_class.name} {head_class.score:.2f}" for head_class in classes[:3])
            or "no class"
        )
        name = classes[0].name if classes else ""
        picture = make_picture(maker.trace(0), maker.examples[0], head, name, names)
        yield (
            head_file_name(*location),
            partial(draw_head, picture, f"{table.model}: {head.site} {head.head}"),
        )


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
    figures: list[NamedFigure] = []
    model = str(trace.model.get("name") or trace.model.get("class") or "model")
    for site, head in heads:
        layer = trace.get_layer(site)
        query_words, key_words = (
            trace.streams[stream][0].words for stream in (layer.query_stream, layer.key_stream)
        )
        weights = trace.head_weights(site, head)
        query_words, key_words = query_words[: weights.shape[0]], key_words[: weights.shape[1]]
        text = f"text 1 of {layer.batch_size}" if layer.batch_size > 1 else ""
        picture = HeadPicture(
            text, "", weights[: len(query_words), : len(key_words)], query_words, key_words
        )
        figures.append(
            (
                head_file_name(layer.name, head),
                partial(draw_head, picture, f"{model}: {layer.name} {head}"),
            )
        )
    with stage_folder(folder, HEAD_REPORT, existing) as staged:
        return [str(folder / Path(name).name) for name in write_figures(figures, staged)]


def _extra_figures(table: HeadTable, options: ReportOptions) -> Iterator[NamedFigure]:
    importance, redundancy = options.importance, options.redundancy
    if importance is not None:
        names = [f"{head.site} {head.head}" for head in importance.heads]
        values = [(head.value, head.low, head.high) for head in importance.heads]
        title = (
            f"{table.model}: importance of every head for {importance.objective}, "
            f"{importance.texts} texts"
        )
        label = f"importance by {importance.method}"
        yield (
            "importance",
            partial(head_figures.draw_importance_curve, names, values, title, axis_label=label),
        )
    for number, group in enumerate(redundancy.readers if redundancy is not None else ()):
        heads = tuple(table.head(location.site, location.head) for location in group.heads)
        name = "map" if not number else f"map-{'-'.join(dict.fromkeys(group.streams))}"
        yield (
            name,
            partial(head_figures.draw_head_map, replace(table, heads=heads), group.embedding),
        )


def _class_pictures(table: HeadTable, maker: PictureMaker) -> Iterator[HeadPicture]:
    """The head with the highest score of each class, on the text that shows it best."""
    for group in CLASS_STYLES:
        members = [
            (head_class, head)
            for head in table.heads
            for head_class in head.classes
            if class_group(head_class.name) == group
        ]
        if not members or group in ("unclear", "syntactic"):
            continue
        head_class, head = max(members, key=lambda member: member[0].score)
        picture = maker.picture(
            head,
            head_class.name,
            f"{head_class.name} {head_class.score:.2f}: {head.site} {head.head}",
        )
        if picture is not None:
            yield picture


def _relation_pictures(table: HeadTable, maker: PictureMaker) -> Iterator[HeadPicture]:
    """The head with the highest score of each relation, on the text on which it finds the
    dependencies best.
    """
    members = [
        (head_class, head)
        for head in table.heads
        for head_class in head.classes
        if class_group(head_class.name) == "syntactic"
    ]
    done: set[str] = set()
    for head_class, head in sorted(members, key=lambda member: -member[0].score):
        if head_class.name in done or len(done) == MAX_RELATIONS:
            continue
        _, relation, _, towards = head_class.name.rsplit(" ", 3)
        title = f"{relation} to {towards} {head_class.score:.2f}: {head.site} {head.head}"
        picture = maker.picture(head, head_class.name, title)
        if picture is not None:
            done.add(head_class.name)
            yield picture


def _choose_pair(
    table: HeadTable, maker: PictureMaker, head_pair: HeadSelection
) -> tuple[HeadPicture, HeadPicture] | None:
    """The two given heads, or the self-attention heads with the broadest and the narrowest
    attention of one stack.
    """
    if head_pair:
        first, second = (table.head(*location) for location in head_pair)
        return _make_picture_pair(maker, [(first, "one"), (second, "other")])
    heads = [
        head
        for head in table.heads
        if {"breadth", "distance"} <= set(head.measures) and head.kind == "attention"
    ]
    heads = [head for head in heads if not np.isnan(head.measures["distance"].value)]
    if len(heads) < 2:
        return None
    stack = heads[0].stack
    heads = [head for head in heads if head.stack == stack]
    broadest = max(heads, key=lambda head: head.measures["breadth"].value)
    others = (head for head in heads if head is not broadest)
    narrowest = min(others, key=lambda head: head.measures["breadth"].value)
    return _make_picture_pair(maker, [(broadest, "broadest"), (narrowest, "narrowest")])


def _make_picture_pair(
    maker: PictureMaker, heads: Sequence[tuple[HeadMeasures, str]]
) -> tuple[HeadPicture, HeadPicture]:
    first, second = (
        make_picture(
            maker.trace(0), maker.examples[0], head, "", f"{label}: {head.site} {head.head}"
        )
        for head, label in heads
    )
    return first, second
