"""What is known of heads, as HeadVis keeps it: one document for all heads, one for each head with its examples."""

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

MAX_KEYS = 8  # of a row, as HeadVis keeps


def export_headvis(table: HeadTable, trace: Trace, annotated: Example, folder: Path) -> Iterator[str]:
    """Write scatter_data.json and heads/L{layer}H{head}.json; layers are numbered over all sites, in their order."""
    (folder / "heads").mkdir(parents=True, exist_ok=True)
    sites = table.sites
    points = [
        {
            "layer": sites.index(one.site),
            "head": one.head,
            "site": one.site,
            "metrics": {name: told.data["value"] for name, told in one.measures.items()},
            "labels": [named.name for named in one.classes],
        }
        for one in table.heads
    ]
    path = folder / "scatter_data.json"
    write_atomically(path, json.dumps({"model": table.model, "heads": points}).encode())
    yield str(path)
    for one in table.heads:
        if one.site not in {layer.name for layer in trace.layers}:
            continue
        own = trace.get_layer(one.site)
        weights = trace.head_weights(one.site, one.head)
        strongest = [
            [[int(s), round(float(row[s]), 6)] for s in (-row).argsort(kind="stable")[:MAX_KEYS] if row[s] > 0]
            for row in weights
        ]
        example = {
            "tokens": list(annotated.streams[own.asks].words),
            "keys": list(annotated.streams[own.told].words),
            "attention": strongest,
        }
        told = {**one.data, "examples": [example]}
        name = folder / "heads" / f"L{sites.index(one.site)}H{one.head}.json"
        write_atomically(name, json.dumps(told).encode())


# --- Figures of a model's heads, and the table, as files in a folder -----------------------------------

EXAMPLE_LENGTHS = range(6, 19)  # tokens of a text that a picture shows well
MAX_RELATIONS = 9  # that are shown


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
    """The table as JSON, what HeadVis reads, and every figure on light and dark paper, as SVG and PNG.

    `pair` are two heads, (site, number) each, to be laid over each other; the most global and the most local if none.
    """
    for site, head in head_pair:
        table.head(site, head)  # refuse a head that is not there before anything is written
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "heads.json", json.dumps(table.data, indent=1).encode())
    yield str(folder / "heads.json")
    shown = [
        scene for scene in examples if all(one.count in EXAMPLE_LENGTHS for one in scene.streams.values())
    ] or list(examples[:1])
    for name, make in [*_list_figures(model, table, shown, head_pair), *_extra_figures(table, *extra_results)]:
        for paper in FIGURE_THEMES:
            for suffix in (".svg", ".png"):
                save_figure(make, folder / f"{name}-{paper}{suffix}", paper)
        yield str(folder / f"{name}-light.svg")
    yield from export_headvis(table, _trace_example(model, shown[0]), shown[0], folder / "headvis")


def _list_figures(
    model: nn.Module, table: HeadTable, shown: Sequence[Example], heads: PairSelection
) -> Iterator[tuple[str, Callable[[FigureTheme], Figure]]]:
    yield "grid", partial(head_figures.draw_head_grid, table)
    yield "entropy", partial(head_figures.draw_measure_by_layer, table)
    pictures = list(_class_pictures(model, table, shown))
    if pictures:
        yield "gallery", partial(draw_gallery, pictures, f"{table.model}: the surest head of each class")
    arcs = list(_relation_pictures(model, table, shown))
    if arcs:
        yield (
            "relations",
            partial(draw_gallery, arcs, f"{table.model}: the best head of each relation; marked are its arcs"),
        )
    if pair := _choose_pair(model, table, shown[0], heads):
        yield "pair", partial(draw_head_overlay, *pair)


def _extra_figures(
    table: HeadTable, weighed: ImportanceResult | None, alike: RedundancyResult | None
) -> Iterator[tuple[str, Callable[[FigureTheme], Figure]]]:
    if weighed is not None:
        names = [f"{one.site} {one.head}" for one in weighed.heads]
        values = [(one.value, one.low, one.high) for one in weighed.heads]
        title = f"importance by {weighed.method}, of {weighed.objective}"
        yield "importance", partial(head_figures.draw_importance_curve, names, values, title)
    for number, one in enumerate(alike.readers if alike is not None else ()):
        heads = tuple(table.head(who.site, who.head) for who in one.heads)
        name = "map" if not number else f"map-{'-'.join(dict.fromkeys(one.streams))}"
        yield name, partial(head_figures.draw_head_map, replace(table, heads=heads), one.plane.places)


def _trace_example(model: nn.Module, scene: Example) -> Trace:
    return trace(model, scene.model_inputs, capture=Capture(), log=lambda _: None)


def _make_picture(kept: Trace, scene: Example, one: HeadMeasures, name: str, title: str) -> HeadPicture:
    own = kept.get_layer(one.site)
    asks, told = scene.streams[own.asks].words, scene.streams[own.told].words
    return HeadPicture(title, name, kept.head_weights(one.site, one.head), asks, told)


def _class_pictures(model: nn.Module, table: HeadTable, shown: Sequence[Example]) -> Iterator[HeadPicture]:
    """The surest head of each class, on the first text that fits."""
    kept = _trace_example(model, shown[0])
    for group in CLASS_STYLES:
        found = [(named, one) for one in table.heads for named in one.classes if class_group(named.name) == group]
        if not found or group in ("unclear", "syntactic"):
            continue
        named, one = max(found, key=lambda pair: pair[0].score)
        title = f"{named.name} {named.score:.2f}: {one.site} {one.head}"
        yield _make_picture(kept, shown[0], one, named.name, title)


def _relation_pictures(model: nn.Module, table: HeadTable, shown: Sequence[Example]) -> Iterator[HeadPicture]:
    """The surest head of each relation, on the first text that has it, with its arcs."""
    found = sorted(
        ((named, one) for one in table.heads for named in one.classes if class_group(named.name) == "syntactic"),
        key=lambda pair: -pair[0].score,
    )
    done: set[str] = set()
    for named, one in found:
        _, relation, _, towards = named.name.rsplit(" ", 3)
        scene = next((told for told in shown if any(arc[2] == relation for arc in told.dependencies)), None)
        if named.name in done or scene is None or len(done) == MAX_RELATIONS:
            continue
        done.add(named.name)
        title = f"{relation} to {towards} {named.score:.2f}: {one.site} {one.head}"
        picture = _make_picture(_trace_example(model, scene), scene, one, named.name, title)
        yield picture._replace(marked_cells=_dependency_cells(scene, relation, towards))


def _dependency_cells(scene: Example, relation: str, towards: str) -> list[tuple[int, int]]:
    """Where the first tokens of the words of these arcs meet."""
    word = next(iter(scene.streams.values())).word_index.tolist()
    arcs = [(word.index(a), word.index(b)) for a, b, name in scene.dependencies if name == relation]
    return arcs if towards == "governor" else [(b, a) for a, b in arcs]


def _choose_pair(
    model: nn.Module, table: HeadTable, scene: Example, heads: PairSelection
) -> tuple[HeadPicture, HeadPicture] | None:
    """Two heads; else that which reads most broadly and that which reads most narrowly, of those of their own text."""
    if heads:
        return _make_picture_pair(
            model, scene, [(table.head(*one), name) for one, name in zip(heads, ("one", "other"), strict=True)]
        )
    own = [one for one in table.heads if {"breadth", "distance"} <= set(one.measures) and one.kind == "attention"]
    own = [one for one in own if not np.isnan(one.measures["distance"].value)]
    if len(own) < 2:
        return None
    stack = own[0].stack
    own = [one for one in own if one.stack == stack]
    far = max(own, key=lambda one: one.measures["breadth"].value)
    near = min((one for one in own if one is not far), key=lambda one: one.measures["breadth"].value)
    return _make_picture_pair(model, scene, [(far, "most global"), (near, "most local")])


def _make_picture_pair(
    model: nn.Module, scene: Example, told: Sequence[tuple[HeadMeasures, str]]
) -> tuple[HeadPicture, HeadPicture]:
    kept = _trace_example(model, scene)
    first, second = (_make_picture(kept, scene, one, "", f"{what}: {one.site} {one.head}") for one, what in told)
    return first, second
