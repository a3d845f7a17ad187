"""A model's heads drawn: one cell for each, by layer, by importance, on a map."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .inks import CLASSES, Paper, group_of, ink_of
from .table import Head, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .intervals import Array

CELL = 0.32  # inches
MANY = 24  # names on an axis, beyond which some are left out


def grid(table: Table, paper: Paper) -> Figure:
    """Every head of every layer as a cell: the colour and letter of its first class, the stronger the surer."""
    from matplotlib.figure import Figure

    sites = table.sites
    wide = max(one.head for one in table.heads) + 1
    inches = max(4.6, wide * CELL + 2.6), len(sites) * CELL + 1.5
    figure = Figure(figsize=inches, layout="constrained")
    axes = figure.add_subplot()
    for one in table.heads:
        _cell(axes, one.head, sites.index(one.site), one, paper)
    axes.set(xlim=(-0.5, wide - 0.5), ylim=(len(sites) - 0.5, -0.5), aspect="equal", xlabel="head")
    axes.set_title(f"Heads of {table.model}, {table.texts}")
    _ticks(axes.set_xticks, range(wide), [str(n) for n in range(wide)])
    _ticks(axes.set_yticks, range(len(sites)), list(sites))
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    _legend(figure, table, paper)
    return figure


def _cell(axes: Axes, x: int, y: int, one: Head, paper: Paper) -> None:
    from matplotlib.patches import Rectangle

    first = one.classes[0] if one.classes else None
    letter, colour = ink_of(first.name, paper) if first else ("", paper.empty)
    strength = 0.35 + 0.65 * first.score if first and first.name != "unclear" else 1.0
    box = Rectangle((x - 0.47, y - 0.47), 0.94, 0.94, facecolor=colour, alpha=strength, edgecolor=paper.faint, lw=0.3)
    axes.add_patch(box)
    axes.text(x, y, letter, ha="center", va="center", fontsize=7, color=paper.ink)


def _legend(figure: Figure, table: Table, paper: Paper) -> None:
    from matplotlib.patches import Patch

    there = {group_of(named.name) for one in table.heads for named in one.classes[:1]}
    marks = [
        Patch(facecolor=ink_of(name, paper)[1], edgecolor=paper.faint, lw=0.3, label=f"{CLASSES[name][0]}  {name}")
        for name in CLASSES
        if name in there
    ]
    if marks:
        figure.legend(handles=marks, loc="outside lower center", ncols=4, fontsize=7, handlelength=1)


def _ticks(put: Any, places: Sequence[int], names: Sequence[str]) -> None:
    step = math.ceil(len(places) / MANY)
    put(list(places)[::step], list(names)[::step])


def by_layer(table: Table, paper: Paper, measure: str = "entropy") -> Figure:
    """A measure of every head, layer by layer: dots are heads, the line their mean, the dashes chance."""
    from matplotlib.figure import Figure

    sites = table.sites
    figure = Figure(figsize=(6.4, 2.9), layout="constrained")
    axes = figure.add_subplot()
    middle: list[float] = []
    for place, site in enumerate(sites):
        own = [one for one in table.heads if one.site == site]
        values = [one.measures[measure].value for one in own]
        for n, one in enumerate(own):
            told = one.measures[measure]
            x = place + 0.5 * (n / max(1, len(own) - 1) - 0.5)
            axes.plot([x, x], [told.low, told.high], color=paper.faint, lw=0.6)
            first = one.classes[0].name if one.classes else "unclear"
            colour = ink_of(first, paper)[1]
            axes.plot(x, told.value, "o", ms=3.4, color=colour, mec=paper.ink, mew=0.3)
        middle.append(sum(values) / len(values))
    chance = [next(one for one in table.heads if one.site == site).measures[measure].chance for site in sites]
    axes.plot(range(len(sites)), middle, color=paper.ink, lw=1, label="mean of the layer")
    axes.plot(range(len(sites)), chance, "--", color=paper.faint, lw=1, label="chance")
    _ticks(axes.set_xticks, range(len(sites)), [site.removesuffix(".attention") for site in sites])
    axes.tick_params(axis="x", labelrotation=30)
    axes.set_title(f"{measure} by layer, {table.model}")
    axes.legend(fontsize=7)
    return figure


def curve(names: Sequence[str], values: Sequence[tuple[float, float, float]], title: str, paper: Paper) -> Figure:
    """Heads by importance, the most important first: value, low and high of each."""
    from matplotlib.figure import Figure

    order = sorted(range(len(values)), key=lambda n: -values[n][0])
    figure = Figure(figsize=(6.4, 2.9), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(order))
    axes.fill_between(
        places, [values[n][1] for n in order], [values[n][2] for n in order], color=paper.pair[0], alpha=0.25
    )
    axes.plot(places, [values[n][0] for n in order], color=paper.pair[0], marker=".", ms=3)
    axes.axhline(0, color=paper.faint, lw=0.6)
    for place in list(places)[:5]:
        axes.annotate(names[order[place]], (place, values[order[place]][0]), xytext=(4, 3), textcoords="offset points",
                      fontsize=6.5, color=paper.ink)  # fmt: skip
    axes.set(xlabel="heads, the most important first")
    axes.set_title(title)
    return figure


def atlas(table: Table, places: Array, paper: Paper) -> Figure:
    """Heads on a map [heads, 2]: near are those that read alike; colours and letters are classes, sizes layers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 5.2), layout="constrained")
    axes = figure.add_subplot()
    sites = table.sites
    for one, (x, y) in zip(table.heads, places.tolist(), strict=True):
        colour = ink_of(one.classes[0].name if one.classes else "unclear", paper)[1]
        depth = sites.index(one.site) / max(1, len(sites) - 1)
        axes.plot(x, y, "o", ms=7 + 6 * depth, color=colour, mec=paper.faint, mew=0.4, alpha=0.85)
        axes.text(x, y, f"{sites.index(one.site)}.{one.head}", ha="center", va="center", fontsize=5, color=paper.ink)
    axes.set(aspect="equal", xticks=[], yticks=[])
    axes.set_title(f"{table.model}: near are heads that read alike; site.head, larger is later")
    _legend(figure, table, paper)
    return figure
