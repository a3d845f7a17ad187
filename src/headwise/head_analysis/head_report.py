"""Report of a model's heads in a folder: the table as JSON, figures, and files for the HeadVis viewer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import nn

from ..files import write_atomically
from ..inspect.trace_capture import Capture, trace
from ..traces import Trace
from . import head_figures
from .annotated_examples import Example
from .head_figures import (
    CLASS_STYLES,
    FIGURE_THEMES,
    FigureTheme,
    HeadPicture,
    class_group,
    draw_gallery,
    draw_head_overlay,
    save_figure,
)
from .head_redundancy import RedundancyResult
from .head_table import HeadMeasures, HeadTable
from .importance_methods import ImportanceResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# --- Files for HeadVis ---------------------------------------------------------------------------------

MAX_KEYS = 8  # strongest keys kept of each row, as in HeadVis


def export_headvis(table: HeadTable, trace: Trace, annotated: Example, folder: Path) -> Iterator[str]:
    """Write scatter_data.json and heads/L{layer}H{head}.json for HeadVis, and yield the path of the first.

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
            [[int(s), round(float(row[s]), 6)] for s in (-row).argsort(kind="stable")[:MAX_KEYS] if row[s] > 0]
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


# --- The report ----------------------------------------------------------------------------------------

EXAMPLE_LENGTHS = range(6, 19)  # numbers of tokens that suit a heat map
MAX_RELATIONS = 9  # largest number of relations in the figure


ExtraResults = tuple[ImportanceResult | None, RedundancyResult | None]
PairSelection = Sequence[tuple[str, int]]


def write_head_report(
    model: nn.Module,
    table: HeadTable,
    examples: Sequence[Example],
    folder: Path,
    extra_results: ExtraResults = (None, None),
    head_pair: PairSelection = (),
) -> Iterator[str]:
    """Write the table as JSON, the files of HeadVis, and every figure for light and dark backgrounds as SVG and PNG.

    It yields the paths of the main files. `head_pair` are two heads, (site, number) each, for the overlay figure; by
    default these are the heads with the broadest and the narrowest attention.
    """
    for site, head in head_pair:
        table.head(site, head)  # refuse an unknown head before anything is written
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "heads.json", json.dumps(table.data, indent=1).encode())
    yield str(folder / "heads.json")
    short = [
        example for example in examples if all(tokens.count in EXAMPLE_LENGTHS for tokens in example.streams.values())
    ]
    shown = short or list(examples[:1])
    for name, draw in [*_list_figures(model, table, shown, head_pair), *_extra_figures(table, *extra_results)]:
        for theme in FIGURE_THEMES:
            for suffix in (".svg", ".png"):
                save_figure(draw, folder / f"{name}-{theme}{suffix}", theme)
        yield str(folder / f"{name}-light.svg")
    yield from export_headvis(table, _trace_example(model, shown[0]), shown[0], folder / "headvis")


def _list_figures(
    model: nn.Module, table: HeadTable, examples: Sequence[Example], head_pair: PairSelection
) -> Iterator[tuple[str, Callable[[FigureTheme], Figure]]]:
    yield "grid", partial(head_figures.draw_head_grid, table)
    yield "entropy", partial(head_figures.draw_measure_by_layer, table)
    if pictures := list(_class_pictures(model, table, examples)):
        yield "gallery", partial(draw_gallery, pictures, f"{table.model}: the top head of each class")
    if pictures := list(_relation_pictures(model, table, examples)):
        title = f"{table.model}: the top head of each relation, its dependencies marked"
        yield "relations", partial(draw_gallery, pictures, title)
    if pair := _choose_pair(model, table, examples[0], head_pair):
        yield "pair", partial(draw_head_overlay, *pair)


def _extra_figures(
    table: HeadTable, importance: ImportanceResult | None, redundancy: RedundancyResult | None
) -> Iterator[tuple[str, Callable[[FigureTheme], Figure]]]:
    if importance is not None:
        names = [f"{head.site} {head.head}" for head in importance.heads]
        values = [(head.value, head.low, head.high) for head in importance.heads]
        title = f"importance for {importance.objective}, by {importance.method}"
        yield "importance", partial(head_figures.draw_importance_curve, names, values, title)
    for number, group in enumerate(redundancy.readers if redundancy is not None else ()):
        heads = tuple(table.head(location.site, location.head) for location in group.heads)
        name = "map" if not number else f"map-{'-'.join(dict.fromkeys(group.streams))}"
        yield name, partial(head_figures.draw_head_map, replace(table, heads=heads), group.embedding.points)


def _trace_example(model: nn.Module, example: Example) -> Trace:
    return trace(model, example.model_inputs, capture=Capture(), log=lambda _: None)


def _make_picture(trace: Trace, example: Example, head: HeadMeasures, name: str, title: str) -> HeadPicture:
    layer = trace.get_layer(head.site)
    query_words, key_words = example.streams[layer.query_stream].words, example.streams[layer.key_stream].words
    return HeadPicture(title, name, trace.head_weights(head.site, head.head), query_words, key_words)


def _class_pictures(model: nn.Module, table: HeadTable, examples: Sequence[Example]) -> Iterator[HeadPicture]:
    """The head with the highest score of each class, on the first example."""
    first_trace = _trace_example(model, examples[0])
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
        title = f"{head_class.name} {head_class.score:.2f}: {head.site} {head.head}"
        yield _make_picture(first_trace, examples[0], head, head_class.name, title)


def _relation_pictures(model: nn.Module, table: HeadTable, examples: Sequence[Example]) -> Iterator[HeadPicture]:
    """The head with the highest score of each relation, on the first example with that relation."""
    members = [
        (head_class, head)
        for head in table.heads
        for head_class in head.classes
        if class_group(head_class.name) == "syntactic"
    ]
    done: set[str] = set()
    for head_class, head in sorted(members, key=lambda member: -member[0].score):
        _, relation, _, towards = head_class.name.rsplit(" ", 3)
        example = next(
            (candidate for candidate in examples if any(arc[2] == relation for arc in candidate.dependencies)), None
        )
        if head_class.name in done or example is None or len(done) == MAX_RELATIONS:
            continue
        done.add(head_class.name)
        title = f"{relation} to {towards} {head_class.score:.2f}: {head.site} {head.head}"
        picture = _make_picture(_trace_example(model, example), example, head, head_class.name, title)
        yield picture._replace(marked_cells=_dependency_cells(example, relation, towards))


def _dependency_cells(example: Example, relation: str, towards: str) -> list[tuple[int, int]]:
    """Cells (query, key) of a relation's dependencies, at the first tokens of the words."""
    word_of_token = next(iter(example.streams.values())).word_index.tolist()
    cells = [
        (word_of_token.index(dependent), word_of_token.index(governor))
        for dependent, governor, name in example.dependencies
        if name == relation
    ]
    return cells if towards == "governor" else [(governor, dependent) for dependent, governor in cells]


def _choose_pair(
    model: nn.Module, table: HeadTable, example: Example, head_pair: PairSelection
) -> tuple[HeadPicture, HeadPicture] | None:
    """The two given heads, or the self-attention heads with the broadest and the narrowest attention of one stack."""
    if head_pair:
        first, second = (table.head(*location) for location in head_pair)
        return _make_picture_pair(model, example, [(first, "one"), (second, "other")])
    heads = [head for head in table.heads if {"breadth", "distance"} <= set(head.measures) and head.kind == "attention"]
    heads = [head for head in heads if not np.isnan(head.measures["distance"].value)]
    if len(heads) < 2:
        return None
    stack = heads[0].stack
    heads = [head for head in heads if head.stack == stack]
    broadest = max(heads, key=lambda head: head.measures["breadth"].value)
    others = (head for head in heads if head is not broadest)
    narrowest = min(others, key=lambda head: head.measures["breadth"].value)
    return _make_picture_pair(model, example, [(broadest, "most global"), (narrowest, "most local")])


def _make_picture_pair(
    model: nn.Module, example: Example, heads: Sequence[tuple[HeadMeasures, str]]
) -> tuple[HeadPicture, HeadPicture]:
    example_trace = _trace_example(model, example)
    first, second = (
        _make_picture(example_trace, example, head, "", f"{label}: {head.site} {head.head}") for head, label in heads
    )
    return first, second
