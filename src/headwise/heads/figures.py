"""A model's heads drawn: one cell for each, by layer, by importance, on a map."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .inks import CLASS_STYLES, FigureTheme, class_group, class_style
from .table import HeadMeasures, HeadTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .intervals import Array

CELL_SIZE = 0.32  # inches
MAX_LABELLED_HEADS = 24  # names on an axis, beyond which some are left out


def draw_head_grid(table: HeadTable, theme: FigureTheme) -> Figure:
    """Every head of every layer as a cell: the colour and letter of its first class, the stronger the surer."""
    from matplotlib.figure import Figure

    sites = table.sites
    wide = max(one.head for one in table.heads) + 1
    inches = max(4.6, wide * CELL_SIZE + 2.6), len(sites) * CELL_SIZE + 1.5
    figure = Figure(figsize=inches, layout="constrained")
    axes = figure.add_subplot()
    for one in table.heads:
        _draw_cell(axes, one.head, sites.index(one.site), one, theme)
    axes.set(xlim=(-0.5, wide - 0.5), ylim=(len(sites) - 0.5, -0.5), aspect="equal", xlabel="head")
    axes.set_title(f"Heads of {table.model}, {table.texts}")
    _set_ticks(axes.set_xticks, range(wide), [str(n) for n in range(wide)])
    _set_ticks(axes.set_yticks, range(len(sites)), list(sites))
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    _draw_legend(figure, table, theme)
    return figure


def _draw_cell(axes: Axes, x: int, y: int, one: HeadMeasures, paper: FigureTheme) -> None:
    from matplotlib.patches import Rectangle

    first = one.classes[0] if one.classes else None
    letter, colour = class_style(first.name, paper) if first else ("", paper.empty_cell)
    strength = 0.35 + 0.65 * first.score if first and first.name != "unclear" else 1.0
    box = Rectangle((x - 0.47, y - 0.47), 0.94, 0.94, facecolor=colour, alpha=strength, edgecolor=paper.muted, lw=0.3)
    axes.add_patch(box)
    axes.text(x, y, letter, ha="center", va="center", fontsize=7, color=paper.foreground)


def _draw_legend(figure: Figure, table: HeadTable, paper: FigureTheme) -> None:
    from matplotlib.patches import Patch

    there = {class_group(named.name) for one in table.heads for named in one.classes[:1]}
    marks = [
        Patch(facecolor=class_style(name, paper)[1], edgecolor=paper.muted, lw=0.3, label=f"{CLASS_STYLES[name][0]}  {name}")
        for name in CLASS_STYLES
        if name in there
    ]
    if marks:
        figure.legend(handles=marks, loc="outside lower center", ncols=4, fontsize=7, handlelength=1)


def _set_ticks(put: Any, places: Sequence[int], names: Sequence[str]) -> None:
    step = math.ceil(len(places) / MAX_LABELLED_HEADS)
    put(list(places)[::step], list(names)[::step])


def draw_measure_by_layer(table: HeadTable, theme: FigureTheme, measure: str = "entropy") -> Figure:
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
            axes.plot([x, x], [told.low, told.high], color=theme.muted, lw=0.6)
            first = one.classes[0].name if one.classes else "unclear"
            colour = class_style(first, theme)[1]
            axes.plot(x, told.value, "o", ms=3.4, color=colour, mec=theme.foreground, mew=0.3)
        middle.append(sum(values) / len(values))
    chance = [next(one for one in table.heads if one.site == site).measures[measure].chance for site in sites]
    axes.plot(range(len(sites)), middle, color=theme.foreground, lw=1, label="mean of the layer")
    axes.plot(range(len(sites)), chance, "--", color=theme.muted, lw=1, label="chance")
    _set_ticks(axes.set_xticks, range(len(sites)), [site.removesuffix(".attention") for site in sites])
    axes.tick_params(axis="x", labelrotation=30)
    axes.set_title(f"{measure} by layer, {table.model}")
    axes.legend(fontsize=7)
    return figure


def draw_importance_curve(names: Sequence[str], values: Sequence[tuple[float, float, float]], title: str, theme: FigureTheme) -> Figure:
    """Heads by importance, the most important first: value, low and high of each."""
    from matplotlib.figure import Figure

    order = sorted(range(len(values)), key=lambda n: -values[n][0])
    figure = Figure(figsize=(6.4, 2.9), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(order))
    axes.fill_between(
        places, [values[n][1] for n in order], [values[n][2] for n in order], color=theme.pair_colours[0], alpha=0.25
    )
    axes.plot(places, [values[n][0] for n in order], color=theme.pair_colours[0], marker=".", ms=3)
    axes.axhline(0, color=theme.muted, lw=0.6)
    for place in list(places)[:5]:
        axes.annotate(names[order[place]], (place, values[order[place]][0]), xytext=(4, 3), textcoords="offset points",
                      fontsize=6.5, color=theme.foreground)  # fmt: skip
    axes.set(xlabel="heads, the most important first")
    axes.set_title(title)
    return figure


def draw_head_map(table: HeadTable, positions: Array, theme: FigureTheme) -> Figure:
    """Heads on a map [heads, 2]: near are those that read alike; colours and letters are classes, sizes layers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 5.2), layout="constrained")
    axes = figure.add_subplot()
    sites = table.sites
    for one, (x, y) in zip(table.heads, positions.tolist(), strict=True):
        colour = class_style(one.classes[0].name if one.classes else "unclear", theme)[1]
        depth = sites.index(one.site) / max(1, len(sites) - 1)
        axes.plot(x, y, "o", ms=7 + 6 * depth, color=colour, mec=theme.muted, mew=0.4, alpha=0.85)
        axes.text(x, y, f"{sites.index(one.site)}.{one.head}", ha="center", va="center", fontsize=5, color=theme.foreground)
    axes.set(aspect="equal", xticks=[], yticks=[])
    axes.set_title(f"{table.model}: near are heads that read alike; site.head, larger is later")
    _draw_legend(figure, table, theme)
    return figure
