"""Figures of the runs: matrices with their numbers or as shades, lines of heads over a sentence,
the heads left of each class, curves, and bars or points of the numbers of a run.

These functions return a `Picture`: called, it makes the figure in the current language, so that a
run gives the pages of both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from itertools import chain
from textwrap import fill
from types import MappingProxyType
from typing import Any, ParamSpec

import numpy as np
import torch

from ..observe.head_analysis.head_table import CLASS_STYLES
from ..report.data import Axis, Bars, Estimate, Figure, HeatMap, Links, Plot, Reference, Series
from ..report.text import format_count, text_width
from .language import join_items, localise

POSITIVE = "#5E65C0"
NEGATIVE = "#D57828"
HIDDEN = "#C9C9C4"  # of -inf, the score of a masked key
STRENGTH = 0.75  # of the largest number, so that its text is easy to read
# Of a shade, by the most columns of the matrix.
CELL_INCHES = {9: 0.28, 14: 0.13, 26: 0.11, 40: 0.085, 1000: 0.043}
PAGE_INCHES = 6.7  # of a row of pictures
CELL_HEIGHT = 0.32  # inches of a printed number
MOST_NUMBERS = 9  # columns of a matrix with printed numbers
MOST_MARKERS = 12  # points of a curve with a marker each
COLUMN_INCHES = 0.62  # of a column of bars
CHARACTER_INCHES = 0.075  # of its label
NO_LEVELS: Mapping[str, float] = MappingProxyType({})
NO_LINES: Mapping[str, str] = MappingProxyType({})
Heights = Mapping[str, Sequence[float]]
Picture = Callable[[], Figure]
P = ParamSpec("P")


def make_later(draw: Callable[P, Figure]) -> Callable[P, Picture]:
    """Let a function return a picture, which makes its figure."""

    @wraps(draw)
    def picture(*args: P.args, **kwargs: P.kwargs) -> Picture:
        return partial(draw, *args, **kwargs)

    return picture


def format_cell(number: float) -> str:
    """A number with two decimals, or -∞.

    >>> format_cell(0.5), format_cell(float("-inf"))
    ('0.50', '-∞')
    """
    return "-∞" if math.isinf(number) else f"{number:.2f}"


@make_later
def draw_matrices(named: Sequence[tuple[str, Any]], rows: Sequence[str] = ()) -> Figure:
    """Matrices side by side, each with its name, all numbers of narrow ones printed; `rows` names
    the rows of those with as many, others have numbers.

    >>> draw_matrices([("A", [[1.0, -2.0]])])().panels[0].texts
    [['1.00', '-2.00']]
    """
    panels: list[HeatMap] = []
    for name, matrix in named:
        numbers = torch.as_tensor(matrix, dtype=torch.float64).numpy()
        sizes = np.where(np.isinf(numbers), 0, abs(numbers))
        strengths = STRENGTH * sizes / (sizes.max() or 1)
        strengths[np.isinf(numbers)] = 1
        signs = np.where(numbers > 0, POSITIVE, NEGATIVE)
        colours = np.where(np.isinf(numbers), HIDDEN, signs).tolist()
        texts = [list(map(format_cell, row)) for row in numbers.tolist()]
        places = [list(map(str, range(1, count + 1))) for count in numbers.shape]
        labels = list(map(localise, rows)) if len(rows) == len(numbers) else places[0]
        title = localise(name)
        shown = texts if numbers.shape[1] <= MOST_NUMBERS else None
        panels.append(HeatMap(strengths, labels, places[1], title, texts=shown, colours=colours))
    title = join_items(panel.title for panel in panels)
    if not all(map(_is_narrow, panels)):
        return Figure(title, panels, num_columns=2)
    width = PAGE_INCHES / 3
    narrow = [replace(one, size=(width, CELL_HEIGHT * len(one.rows) + 0.7)) for one in panels]
    return Figure(title, narrow, num_columns=3)


def _is_narrow(panel: HeatMap) -> bool:
    return panel.texts is not None and len(panel.columns) <= 4


@make_later
def draw_heads(
    heads: Sequence[tuple[str, Any]], queries: Sequence[str], keys: Sequence[str]
) -> Figure:
    """Heads side by side: a line from each query (left) to each key (right), as thick as the
    weight.
    """
    headings = (localise("query"), localise("key"))
    panels: list[Links] = []
    for name, weights in heads:
        panels.append(Links(queries, keys, {localise(name): weights}, headings=headings, width=3.3))
    return Figure(join_items(localise(name) for name, _ in heads), panels)


@make_later
def draw_columns(columns: Sequence[Mapping[str, int]], labels: Sequence[str], axis: str) -> Figure:
    """Stacked columns: the number of heads of each class, with its letter and colour, in each
    column.

    >>> draw_columns([{"sink": 3}, {"sink": 1}], ["3", "1"], "heads left")().panels[0].texts
    {'sink': ['K 3', 'K 1']}
    """
    heights: dict[str, list[int]] = {}
    texts: dict[str, list[str]] = {}
    colours: dict[str, str] = {}
    legend: dict[str, str] = {}
    present = set[str]().union(*columns)
    for name, (letter, colour) in CLASS_STYLES.items():
        if name in present:
            title = localise(name)
            heights[title] = [column.get(name, 0) for column in columns]
            texts[title] = [f"{letter} {height}" for height in heights[title]]
            colours[title] = colour or "muted"
            legend[f"{letter}  {title}"] = colours[title]
    bars = Bars(labels, heights, x_label=localise(axis), colours=colours, texts=texts)
    return Figure(localise(axis), [bars], legend)


@make_later
def draw_strips(title: str, rows: Mapping[str, tuple[Sequence[float], Estimate]]) -> Figure:
    """A column per name: a dot for each seed, and the mean with its interval beside them.

    >>> figure = draw_strips("copy", {"h1 minus h4": ([0.1, 0.0], Estimate(0.05, -0.1, 0.2))})
    >>> figure().panels[0].series[0].ys
    [0.1, 0.0]
    """
    dots = [(place - 0.12, value) for place, row in enumerate(rows.values()) for value in row[0]]
    means = [mean for _, mean in rows.values()]
    places = [place + 0.12 for place in range(len(means))]
    ends = ([mean.low for mean in means], [mean.high for mean in means])
    values = [mean.value for mean in means]
    xs, ys = map(list, zip(*dots, strict=True))
    series = [
        Series(localise("seed"), xs, ys, line="", marker="o"),
        Series(
            localise("mean, 95 % interval"), places, values, *ends, line="", marker="D", band=False
        ),
    ]
    names = {float(place): fill(name, 18) for place, name in enumerate(rows)}
    axis = Axis(ticks=names, low=-0.5, high=len(rows) - 0.5)
    size = (max(4.4, 1.0 + 1.4 * len(rows)), 3.0)
    return Figure(title, [Plot(series, x=axis, references=[Reference("y", 0.0)], size=size)])


@make_later
def draw_curves(
    curves: Mapping[str, Mapping[Any, float]],
    x_axis: str,
    y_axis: str,
    *,
    log: str = "",
    lines: Mapping[str, str] = NO_LINES,
    levels: Mapping[str, float] = NO_LEVELS,
) -> Figure:
    """A line for each curve (x -> y); `log` names the logarithmic axes, `lines` has the style of a
    line if it is not solid ("" for points alone), `levels` are lines across.

    >>> figure = draw_curves({"a": {1: 0.5, 2: 0.25}}, "n", "weight", log="xy")
    >>> figure().panels[0].series[0].ys
    [0.5, 0.25]
    """
    series: list[Series] = []
    ticks = dict[float, str]()
    for name, curve in curves.items():
        is_short = len(curve) <= MOST_MARKERS
        is_only = is_short and len(curves) == len(lines) + 1 and name not in lines
        values = list(map(_format_value, curve.values())) if is_only else []
        line = lines.get(name, "-")
        marker = "o" if not line or (line == "-" and is_short) else ""
        curve = {x: y for x, y in curve.items() if y > 0 or "y" not in log}
        points = list(map(float, curve)), list(curve.values())
        series.append(Series(localise(name), *points, line=line, marker=marker, labels=values))
        if is_short and "x" in log:
            ticks |= {float(x): f"{x:,}" for x in curve}
    x = Axis(localise(x_axis), log="x" in log, ticks=ticks)
    references = [Reference("y", at, localise(name)) for name, at in levels.items()]
    y = _make_axis(y_axis, "y" in log, [y for one in series for y in one.ys])
    return Figure(localise(y_axis), [Plot(series, x, y, references=references)])


def _make_axis(label: str, log: bool, values: Iterable[float]) -> Axis:
    """An axis that starts at 0 unless it is logarithmic, or would be mostly empty."""
    numbers = list(values)
    if not log:
        return Axis(localise(label), low=0.0 if 0 <= 2 * min(numbers) <= max(numbers) else None)
    ticks: dict[float, str] = {}
    if max(numbers) < 100 * min(numbers):  # powers of ten would mark too few places
        for power in range(-30, 30):
            places = (digit * 10.0**power for digit in (1, 2, 5))
            ticks |= {at: _format_tick(at) for at in places if min(numbers) <= at <= max(numbers)}
    return Axis(localise(label), log=True, ticks=ticks, format=None if ticks else _format_tick)


def _format_tick(value: float) -> str:
    return format_count(value) if value >= 10_000 else f"{value:g}"


def _format_value(value: float) -> str:
    """A number beside its bar or point; rounding errors are 0.

    >>> _format_value(0.12345), _format_value(2e-16), _format_value(123456.0)
    ('0.123', '0', '123.46 k')
    """
    if abs(value) < 1e-12:
        return "0"
    return format_count(value) if abs(value) >= 10_000 else f"{value:.3g}"


@make_later
def draw_grids(
    named: Mapping[str, Any],
    x_axis: str = "",
    y_axis: str = "",
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
) -> Figure:
    """Matrices of numbers from 0 as shades, each relative to its largest number; rows and columns
    are numbered from 0 without names.

    >>> draw_grids({"weights": [[0.2, 0.4]]})().panels[0].values.tolist()
    [[0.5, 1.0]]
    """
    panels: list[HeatMap] = []
    widest = 1.8
    for name, matrix in named.items():
        numbers = torch.as_tensor(matrix, dtype=torch.float64).detach().numpy()
        height, width = numbers.shape
        cell = next(inches for count, inches in CELL_INCHES.items() if width <= count)
        size = (max(1.8, cell * width + 0.6), max(cell, 1.8 / max(height, 14)) * height + 0.8)
        widest = max(widest, size[0])
        labels = [list(rows) or _count(height), list(columns) or _count(width)]
        axes = (localise(x_axis), localise(y_axis))
        shades = numbers / (numbers.max() or 1)
        rest = (localise(name), *axes)
        panels.append(HeatMap(shades, labels[0], labels[1], *rest, size=size))
    title = join_items(panel.title for panel in panels)
    return Figure(title, panels, num_columns=max(1, int(PAGE_INCHES / widest)))


def _count(number: int) -> list[str]:
    return list(map(str, range(number)))


@make_later
def draw_numbers(table: Mapping[str, Any], numbers: Mapping[str, Any]) -> Figure:
    """Numbers of a run as a table of an entry asks: bars, a curve over the columns, or points on a
    logarithmic axis.

    `columns` has the name of a number by the label of its column. With `groups`, each has a pattern
    of names, in which {} is the name of the column. `values` are further numbers, as published.

    >>> table = {"columns": {"1 head": "h1", "2 heads": "h2"}, "axis": "weight"}
    >>> draw_numbers(table, {"h1": 0.5, "h2": 0.25})().panels[0].texts
    {'': ['0.5', '0.25']}
    """
    axis: str = table.get("axis", "")
    numbers = {**numbers, **table.get("values", {})}
    columns: Mapping[str, str] = table["columns"]
    groups: dict[str, list[float]] = {}
    for group, pattern in table.get("groups", {"": "{}"}).items():
        groups[group] = [float(numbers[pattern.format(name)]) for name in columns.values()]
    levels = {name: float(numbers[level]) for name, level in table.get("levels", {}).items()}
    x_axis: str = table.get("x_axis", "")
    log: str = table.get("log", "")
    if table.get("curve"):
        places = [int(label.replace(",", "")) for label in columns]
        curves = {name: dict(zip(places, ys, strict=True)) for name, ys in groups.items()}
        return draw_curves(curves, x_axis, axis, log=log, levels=levels)()
    labels = [fill(localise(label), 13) for label in columns]
    longest = max(text_width(line) for label in labels for line in label.splitlines())
    width = max(COLUMN_INCHES * len(groups) ** 0.5, CHARACTER_INCHES * longest) * len(columns)
    heights = {localise(name): ys for name, ys in groups.items()}
    draw = _draw_points if log else _draw_bars
    y = _make_axis(axis, bool(log), chain(*groups.values()))
    panel = draw(labels, heights, Axis(localise(x_axis)), y)
    references = [Reference("y", at, localise(name)) for name, at in levels.items()]
    panel = replace(panel, references=references, size=(max(3.4, 1.0 + width), 2.7))
    return Figure(localise(axis), [panel])


def _draw_bars(labels: Sequence[str], heights: Heights, x: Axis, y: Axis) -> Bars:
    texts = {name: list(map(_format_value, ys)) for name, ys in heights.items()}
    return Bars(labels, heights, x.label, y.label, texts=texts, stacked=False)


def _draw_points(labels: Sequence[str], heights: Heights, x: Axis, y: Axis) -> Plot:
    series: list[Series] = []
    for name, ys in heights.items():
        texts = list(map(_format_value, ys))
        series.append(Series(name, range(len(ys)), ys, line="", marker="o", labels=texts))
    ticks = {float(place): label for place, label in enumerate(labels)}
    x = replace(x, ticks=ticks, low=-0.5, high=len(labels) - 0.5)
    return Plot(series, x, y, names="legend" if len(heights) > 1 else "")
