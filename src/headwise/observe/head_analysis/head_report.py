"""Report of a model's heads in a folder: the table as JSON, figures, and files for the HeadVis
viewer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import nn

from ...report.data import Figure
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
    head_pair_figure,
    make_picture,
)
from .head_classes import UNCLEAR
from .head_figures import plot_importance, plot_measure_by_layer, plot_similar_heads
from .head_redundancy import RedundancyResult
from .head_table import CLASS_STYLES, HeadMeasures, HeadTable, ImportanceResult

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
        *(f"*-{theme}.{suffix}" for theme in THEMES for suffix in ("svg", "png")),
    ),
)
HeadSelection = Sequence[tuple[str, int]]


class ReportOptions(NamedTuple):
    """Figures of a report besides the table.

    - `importance`, `redundancy`: results that get a figure.
    - `head_pair`: two heads, (site, number) each, for the figure of two heads; by default these are
      the heads with the broadest and the narrowest attention.
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
        maker = PictureMaker(model, _short_examples(examples))
        names = [*write_figures(_list_figures(table, maker, options), staged)]
        names += export_headvis(table, maker.trace(0), maker.examples[0], staged / "headvis")
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
        title = f"{model}: the top head of each class, each on the text that shows it best"
        marks = "the pairs of tokens that the class is about"
        figures["gallery"] = head_gallery(pictures, title, marks)
    pictures = list(_relation_pictures(table, maker))
    if pictures:
        title = f"{model}: the top head of each dependency relation"
        figures["relations"] = head_gallery(pictures, title, "the dependencies of the relation")
    pair = _choose_pair(table, maker, options.head_pair)
    if pair:
        figures["pair"] = head_pair_figure(*pair, f"{model}: attention of two heads")
    for location in options.drawn_heads:
        head = table.head(*location)
        classes = [one for one in head.classes if one.name != UNCLEAR]
        names = ", ".join(f"{one.name} {one.score:.2f}" for one in classes[:3]) or "no class"
        name = classes[0].name if classes else ""
        picture = make_picture(maker.trace(0), maker.examples[0], head, name, names)
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
        if not members or group in (UNCLEAR, "syntactic"):
            continue
        best, head = members[0]
        title = f"{best.name} {best.score:.2f}: {head.site} {head.head}"
        picture = maker.picture(head, best.name, title)
        if picture is not None:
            yield picture


def _relation_pictures(table: HeadTable, maker: PictureMaker) -> Iterator[HeadPicture]:
    """Yield the head with the highest score of each relation, on the text on which it finds the
    dependencies best.
    """
    done: set[str] = set()
    for best, head in table.class_members("syntactic"):
        if best.name in done or len(done) == MAX_RELATIONS:
            continue
        _, relation, _, towards = best.name.rsplit(" ", 3)
        title = f"{relation} to {towards} {best.score:.2f}: {head.site} {head.head}"
        picture = maker.picture(head, best.name, title)
        if picture is not None:
            done.add(best.name)
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
