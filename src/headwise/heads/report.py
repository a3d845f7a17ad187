"""Figures of a model's heads, and the table, as files in a folder."""

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
from ..hub.capturing import trace
from ..hub.keeping import Capture
from ..traces import Trace
from . import figures
from .exporting import headvis
from .gallery import Picture, gallery, overlaid
from .inks import CLASSES, PAPERS, Paper, group_of, write
from .rating import Importance
from .redundancy import Redundancy
from .scene import Scene
from .table import Head, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIT = range(6, 19)  # tokens of a text that a picture shows well
RELATIONS = 9  # that are shown


More = tuple[Importance | None, Redundancy | None]
Pair = Sequence[tuple[str, int]]


def write_all(
    model: nn.Module, table: Table, scenes: Sequence[Scene], folder: Path, more: More = (None, None), pair: Pair = ()
) -> Iterator[str]:
    """The table as JSON, what HeadVis reads, and every figure on light and dark paper, as SVG and PNG.

    `pair` are two heads, (site, number) each, to be laid over each other; the most global and the most local if none.
    """
    for site, head in pair:
        table.head(site, head)  # refuse a head that is not there before anything is written
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "heads.json", json.dumps(table.data, indent=1).encode())
    yield str(folder / "heads.json")
    shown = [scene for scene in scenes if all(one.count in FIT for one in scene.streams.values())] or list(scenes[:1])
    for name, make in [*_figures(model, table, shown, pair), *_others(table, *more)]:
        for paper in PAPERS:
            for suffix in (".svg", ".png"):
                write(make, folder / f"{name}-{paper}{suffix}", paper)
        yield str(folder / f"{name}-light.svg")
    yield from headvis(table, _trace(model, shown[0]), shown[0], folder / "headvis")


def _figures(
    model: nn.Module, table: Table, shown: Sequence[Scene], heads: Pair
) -> Iterator[tuple[str, Callable[[Paper], Figure]]]:
    yield "grid", partial(figures.grid, table)
    yield "entropy", partial(figures.by_layer, table)
    pictures = list(_exemplars(model, table, shown))
    if pictures:
        yield "gallery", partial(gallery, pictures, f"{table.model}: the surest head of each class")
    arcs = list(_related(model, table, shown))
    if arcs:
        yield "relations", partial(gallery, arcs, f"{table.model}: the best head of each relation; marked are its arcs")
    if pair := _pair(model, table, shown[0], heads):
        yield "pair", partial(overlaid, *pair)


def _others(
    table: Table, weighed: Importance | None, alike: Redundancy | None
) -> Iterator[tuple[str, Callable[[Paper], Figure]]]:
    if weighed is not None:
        names = [f"{one.site} {one.head}" for one in weighed.heads]
        values = [(one.value, one.low, one.high) for one in weighed.heads]
        title = f"importance by {weighed.method}, of {weighed.objective}"
        yield "importance", partial(figures.curve, names, values, title)
    for number, one in enumerate(alike.readers if alike is not None else ()):
        heads = tuple(table.head(who.site, who.head) for who in one.heads)
        name = "map" if not number else f"map-{'-'.join(dict.fromkeys(one.streams))}"
        yield name, partial(figures.atlas, replace(table, heads=heads), one.plane.places)


def _trace(model: nn.Module, scene: Scene) -> Trace:
    return trace(model, scene.given, how=Capture(), tell=lambda _: None)


def _picture(kept: Trace, scene: Scene, one: Head, name: str, title: str) -> Picture:
    own = kept.site(one.site)
    asks, told = scene.streams[own.asks].words, scene.streams[own.told].words
    return Picture(title, name, kept.rows(one.site, one.head), asks, told)


def _exemplars(model: nn.Module, table: Table, shown: Sequence[Scene]) -> Iterator[Picture]:
    """The surest head of each class, on the first text that fits."""
    kept = _trace(model, shown[0])
    for group in CLASSES:
        found = [(named, one) for one in table.heads for named in one.classes if group_of(named.name) == group]
        if not found or group in ("unclear", "syntactic"):
            continue
        named, one = max(found, key=lambda pair: pair[0].score)
        title = f"{named.name} {named.score:.2f}: {one.site} {one.head}"
        yield _picture(kept, shown[0], one, named.name, title)


def _related(model: nn.Module, table: Table, shown: Sequence[Scene]) -> Iterator[Picture]:
    """The surest head of each relation, on the first text that has it, with its arcs."""
    found = sorted(
        ((named, one) for one in table.heads for named in one.classes if group_of(named.name) == "syntactic"),
        key=lambda pair: -pair[0].score,
    )
    done: set[str] = set()
    for named, one in found:
        _, relation, _, towards = named.name.rsplit(" ", 3)
        scene = next((told for told in shown if any(arc[2] == relation for arc in told.arcs)), None)
        if named.name in done or scene is None or len(done) == RELATIONS:
            continue
        done.add(named.name)
        title = f"{relation} to {towards} {named.score:.2f}: {one.site} {one.head}"
        picture = _picture(_trace(model, scene), scene, one, named.name, title)
        yield picture._replace(arcs=_cells(scene, relation, towards))


def _cells(scene: Scene, relation: str, towards: str) -> list[tuple[int, int]]:
    """Where the first tokens of the words of these arcs meet."""
    word = next(iter(scene.streams.values())).word.tolist()
    arcs = [(word.index(a), word.index(b)) for a, b, name in scene.arcs if name == relation]
    return arcs if towards == "governor" else [(b, a) for a, b in arcs]


def _pair(model: nn.Module, table: Table, scene: Scene, heads: Pair) -> tuple[Picture, Picture] | None:
    """Two heads; else that which reads most broadly and that which reads most narrowly, of those of their own text."""
    if heads:
        return _both(
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
    return _both(model, scene, [(far, "most global"), (near, "most local")])


def _both(model: nn.Module, scene: Scene, told: Sequence[tuple[Head, str]]) -> tuple[Picture, Picture]:
    kept = _trace(model, scene)
    first, second = (_picture(kept, scene, one, "", f"{what}: {one.site} {one.head}") for one, what in told)
    return first, second
