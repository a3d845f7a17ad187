"""Figures of the runs: matrices with their numbers, lines of heads over a sentence, the heads left
of each class, and curves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from textwrap import fill
from typing import Any

import numpy as np
import torch

from ..observe.head_analysis.head_table import CLASS_STYLES
from ..report.data import Axis, Bars, Estimate, Figure, HeatMap, Links, Plot, Reference, Series
from .language import join_items, localise

POSITIVE = "#5E65C0"
NEGATIVE = "#D57828"
HIDDEN = "#C9C9C4"  # of -inf, the score of a masked key
STRENGTH = 0.75  # of the largest number, so that its text is easy to read


def format_cell(number: float) -> str:
    """A number with two decimals, or -∞.

    >>> format_cell(0.5), format_cell(float("-inf"))
    ('0.50', '-∞')
    """
    return "-∞" if math.isinf(number) else f"{number:.2f}"


def draw_matrices(named: Iterable[tuple[str, Any]], rows: Sequence[str] = ()) -> Figure:
    """Matrices side by side, each with its name, all numbers printed; `rows` names the rows of the
    first, others have numbers.

    >>> draw_matrices([("A", [[1.0, -2.0]])]).panels[0].texts
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
        labels = places[0] if panels or not rows else list(rows)
        title = localise(name)
        panels.append(HeatMap(strengths, labels, places[1], title, texts=texts, colours=colours))
    return Figure(join_items(panel.title for panel in panels), panels, num_columns=4)


def draw_heads(
    heads: Sequence[tuple[str, Any]], queries: Sequence[str], keys: Sequence[str]
) -> Figure:
    """Heads side by side: a line from each query (left) to each key (right), as thick as the
    weight.
    """
    headings = (localise("query"), localise("key"))
    panels: list[Links] = []
    for name, weights in heads:
        panels.append(Links(queries, keys, {localise(name): weights}, headings=headings))
    return Figure(join_items(localise(name) for name, _ in heads), panels)


def draw_columns(columns: Sequence[Mapping[str, int]], labels: Sequence[str], axis: str) -> Figure:
    """Stacked columns: the number of heads of each class, with its letter and colour, in each
    column.

    >>> draw_columns([{"sink": 3}, {"sink": 1}], ["3", "1"], "heads left").panels[0].texts
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
            colours[title] = colour
            legend[f"{letter}  {title}"] = colour
    bars = Bars(labels, heights, x_label=localise(axis), colours=colours, texts=texts)
    return Figure(localise(axis), [bars], legend)


def draw_strips(title: str, rows: Mapping[str, tuple[Sequence[float], Estimate]]) -> Figure:
    """A column per name: a dot for each seed, and the mean with its interval beside them.

    >>> figure = draw_strips("copy", {"h1 minus h4": ([0.1, 0.0], Estimate(0.05, -0.1, 0.2))})
    >>> figure.panels[0].series[0].ys
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


def draw_curves(
    curves: Sequence[tuple[str, Mapping[int, float]]], x_axis: str, y_axis: str
) -> Figure:
    """Curves over a positive number, both axes logarithmic: the first with dots and their values,
    the others as lines.
    """
    series: list[Series] = []
    for name, curve in curves:
        xs = list(curve)
        ys = list(curve.values())
        is_first = not series
        values = [f"{y:.2g}" for y in ys] if is_first else []
        marker = "o" if is_first else ""
        line = "-" if is_first else "--"
        series.append(Series(localise(name), xs, ys, line=line, marker=marker, labels=values))
    x = Axis(localise(x_axis), log=True, ticks={count: str(count) for count in curves[0][1]})
    plot = Plot(series, x, Axis(localise(y_axis), log=True))
    return Figure(localise(y_axis), [plot])
