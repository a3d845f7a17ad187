"""Figures of pruning curves: quality against heads kept, part against part, and stacked columns of
kept heads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..head_analysis.head_figures import (
    CLASS_STYLES,
    FIGURE_THEMES,
    FigureTheme,
    class_style,
    save_figure,
)
from .curve_report import assess_group_survival, get_joint_curves, group_by_part, list_grouped_heads
from .head_selection import RANDOM
from .pruning_curves import ALL_PARTS, CurveValue, PruningCurves
from .pruning_plan import HeadId
from .verification.quality_metrics import LOSS, PERPLEXITY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, for light and dark backgrounds; lines also differ by marker.
LINE_COLOURS = {
    "light": ("#0072B2", "#D55E00", "#009E73", "#CC79A7"),
    "dark": ("#56B4E9", "#E8833A", "#2FC79A", "#DE9CC6"),
}
MARKERS = "os^D"
LABEL_COLOUR = "#1A1A1A"  # readable on every class colour
LABEL_GAP = 0.075  # minimum distance of two labels, as a fraction of the axis
ROW_HEIGHT = 0.028  # minimum height of a labelled box, as a fraction of a column
PART_LETTERS = {"encoder": "N", "decoder": "D", "cross": "X"}


class PlotLine(NamedTuple):
    """A line of a plot: name, values, colour and marker."""

    name: str
    values: Sequence[CurveValue]
    colour: str
    marker: str


def write_figures(curves: PruningCurves, folder: Path) -> list[str]:
    """Save every figure for light and dark backgrounds as SVG and PNG; return their names."""
    names = list[str]()
    for name, make in list_figures(curves):
        names.append(name)
        for paper in FIGURE_THEMES:
            for suffix in (".svg", ".png"):
                save_figure(make, folder / f"{name}-{paper}{suffix}", paper)
    return names


def list_figures(curves: PruningCurves) -> Iterator[tuple[str, Callable[[FigureTheme], Figure]]]:
    """Yield the name and plot function of every figure that these curves have data for."""
    for name in curves.metric_names:
        if name in (LOSS, curves.objective):
            yield "curves", partial(plot_by_order, curves, name)
        elif name != PERPLEXITY:
            yield f"curves-{name.lower().replace(' ', '-')}", partial(plot_by_order, curves, name)
    if len(curves.parts) > 2:
        yield "parts", partial(plot_by_part, curves)
    for index, order in enumerate(get_joint_curves(curves)):
        suffix = f"-{order}" if index else ""
        if group_by_part(curves):
            yield f"parts-left{suffix}", partial(plot_parts_left, curves, order)
        if curves.classes:
            yield f"classes-left{suffix}", partial(plot_classes_left, curves, order)


def plot_parts_left(curves: PruningCurves, order: str, paper: FigureTheme) -> Figure:
    """Plot the heads kept in each part."""
    colours = zip(
        [part for part in curves.parts if part != ALL_PARTS], LINE_COLOURS["dark"], strict=False
    )
    inks = {part: (PART_LETTERS.get(part, part[0].upper()), colour) for part, colour in colours}
    return plot_columns(curves, order, group_by_part(curves), inks, paper)


def plot_classes_left(curves: PruningCurves, order: str, paper: FigureTheme) -> Figure:
    """Plot the heads kept in each class."""
    return plot_columns(
        curves,
        order,
        curves.classes,
        {name: class_style(name, paper) for name in CLASS_STYLES},
        paper,
    )


def plot_by_order(curves: PruningCurves, name: str, paper: FigureTheme) -> Figure:
    """Plot one panel per part and one line per order, with intervals; for random orders the mean
    and range.
    """
    from matplotlib.figure import Figure

    parts = [
        part
        for part in curves.parts
        if any(curves.list_values(part, order, name) for order in curves.orders)
    ]
    num_columns = min(2, len(parts))
    num_rows = -(-len(parts) // num_columns)
    figure = Figure(figsize=(4.4 * num_columns, 2.9 * num_rows + 0.5), layout="constrained")
    figure.suptitle(
        f"{curves.model}: {_axis_label(curves, name)}, change from the full model",
        x=0.01,
        ha="left",
        fontweight="bold",
        fontsize=9,
    )
    for number, part in enumerate(parts, 1):
        axes = figure.add_subplot(num_rows, num_columns, number)
        all_lines = [_make_line(curves, part, order, name, paper) for order in curves.orders]
        lines = [line for line in all_lines if line.values]
        _draw_lines(axes, lines, paper)
        num_heads = curves.count_part_heads(part)
        axes.set_title(
            f"all {num_heads} heads"
            if part == ALL_PARTS
            else f"{num_heads} heads of {part}, other parts complete"
        )
        axes.set(xlim=(num_heads, 0), xlabel="heads kept")
        axes.set_xticks([value.num_heads for value in lines[0].values])
        if name in (LOSS, curves.objective):
            _draw_limit(axes, curves.max_loss_increase, paper)
    figure.supxlabel(
        f"{_band_label(curves, name)} {curves.num_texts} texts",
        fontsize=6.5,
        color=paper.muted,
        x=0.01,
        ha="left",
    )
    return figure


def plot_by_part(curves: PruningCurves, paper: FigureTheme) -> Figure:
    """Plot one line per part in the first order, on one scale of the fraction of heads kept."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 3.3), layout="constrained")
    axes, name, order = figure.add_subplot(), curves.metric_names[0], curves.orders[0]
    lines = list[PlotLine]()
    for index, part in enumerate(curves.parts):
        heads_per_percent = curves.count_part_heads(part) / 100
        values = [
            value._replace(num_heads=value.num_heads / heads_per_percent)
            for value in curves.list_values(part, order, name)
        ]
        colour = (
            paper.muted if part == ALL_PARTS else LINE_COLOURS[paper.name][index % len(MARKERS) - 1]
        )
        lines.append(PlotLine(part, values, colour, MARKERS[index % len(MARKERS)]))
    _draw_lines(axes, lines, paper)
    axes.set(xlim=(100, 0), xlabel="heads of the part kept, %; other parts complete")
    axes.set_title(
        f"{curves.model}: {_axis_label(curves, name)}, change from the full model; by {order}"
    )
    _draw_limit(axes, curves.max_loss_increase, paper)
    return figure


def plot_columns(
    curves: PruningCurves,
    order: str,
    groups: Mapping[HeadId, str],
    inks: Mapping[str, tuple[str, str]],
    paper: FigureTheme,
) -> Figure:
    """Plot the heads kept as stacked columns of groups; triangles mark significantly more or fewer
    than by chance.

    A cross and the letter of a group mark the first column in which no head of it is left.
    """
    from matplotlib.figure import Figure

    kept_heads = list_grouped_heads(get_joint_curves(curves)[order], groups)
    verdicts = {
        (result.group, result.num_heads): result.verdict
        for result in assess_group_survival(groups, kept_heads[1:])
    }
    group_names = [name for name in inks if name in set(groups.values())]
    figure = Figure(figsize=(max(4.6, 0.62 * len(kept_heads) + 1.6), 4.6), layout="constrained")
    axes, bottoms = figure.add_subplot(), [0.0] * len(kept_heads)
    for name in group_names:
        for column, heads in enumerate(kept_heads):
            count = Counter(groups[head] for head in heads)[name]
            verdict = verdicts.get((name, len(heads)), "")
            _draw_box(
                axes, (column, bottoms[column], count, len(groups)), inks[name], verdict, paper
            )
            bottoms[column] += count
    _mark_extinctions(axes, kept_heads, groups, {name: inks[name] for name in group_names}, paper)
    axes.set(
        xlim=(-0.6, len(kept_heads) - 0.4),
        ylim=(0, len(groups) * 1.02),
        xlabel="heads kept",
        ylabel="heads",
    )
    axes.set_xticks(range(len(kept_heads)), [str(len(heads)) for heads in kept_heads])
    axes.set_title(f"{curves.model}: heads kept by {order}")
    axes.tick_params(axis="x", length=0)
    _draw_legend(figure, {name: inks[name] for name in group_names}, paper)
    return figure


# --- drawing --------------------------------------------------------------------------------------


def _draw_lines(axes: Axes, lines: Sequence[PlotLine], paper: FigureTheme) -> None:
    for line in reversed(lines):  # the first order is drawn on top
        counts = [mark.num_heads for mark in line.values]
        axes.fill_between(
            counts,
            [value.low for value in line.values],
            [value.high for value in line.values],
            color=line.colour,
            alpha=0.16,
            lw=0,
        )
        axes.plot(
            counts,
            [value.value for value in line.values],
            color=line.colour,
            marker=line.marker,
            ms=3.2,
        )
    axes.axhline(0, color=paper.muted, lw=0.5)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high)
    ends = [line.values[-1].value for line in lines]
    for line, end, label_y in zip(lines, ends, spread_labels(ends, low, high), strict=True):
        arrow_style = {
            "arrowstyle": "-",
            "color": line.colour,
            "lw": 0.5,
            "shrinkA": 1,
            "shrinkB": 3,
        }
        axes.annotate(
            line.name,
            (line.values[-1].num_heads, end),
            xytext=(1.03, (label_y - low) / (high - low)),
            color=line.colour,
            textcoords="axes fraction",
            va="center",
            fontsize=7,
            arrowprops=arrow_style,
        )


def spread_labels(values: Sequence[float], low: float, high: float) -> list[float]:
    """Return label positions near their values, in the same order, without overlap, between low and
    high.

    >>> [round(position, 3) for position in spread_labels([0.5, 0.5, 0.0], 0.0, 1.0)]
    [0.463, 0.537, 0.0]
    """
    step = LABEL_GAP * (high - low)
    order = sorted(range(len(values)), key=lambda n: values[n])
    runs = list[tuple[list[int], float]]()  # adjacent labels, and the position of their middle
    for n in order:
        run, middle = [n], values[n]
        while runs and runs[-1][1] + step * (len(runs[-1][0]) + len(run)) / 2 > middle:
            previous, centre = runs.pop()
            middle = (centre * len(previous) + middle * len(run)) / (len(previous) + len(run))
            run = previous + run
        half = step * (len(run) - 1) / 2
        runs.append((run, max(low + half, min(high - half, middle))))
    positions = {
        n: middle + step * (k - (len(run) - 1) / 2)
        for run, middle in runs
        for k, n in enumerate(run)
    }
    return [positions[n] for n in range(len(values))]


def _draw_limit(axes: Axes, at: float, paper: FigureTheme) -> None:
    axes.axhline(at, color=paper.muted, lw=0.7, ls=(0, (4, 3)))
    axes.annotate(
        f"limit {at:g}",
        (0, at),
        xycoords=("axes fraction", "data"),
        xytext=(2, 2),
        textcoords="offset points",
        fontsize=6.5,
        color=paper.muted,
    )


def _make_line(
    curves: PruningCurves, part: str, order: str, name: str, paper: FigureTheme
) -> PlotLine:
    index = curves.orders.index(order)
    colour = paper.muted if order == RANDOM else LINE_COLOURS[paper.name][index % len(MARKERS)]
    return PlotLine(
        order, curves.list_values(part, order, name), colour, MARKERS[index % len(MARKERS)]
    )


def _draw_box(
    axes: Axes,
    box: tuple[int, float, int, int],
    letter_and_colour: tuple[str, str],
    verdict: str,
    paper: FigureTheme,
) -> None:
    column, bottom, count, num_heads = box
    letter, colour = letter_and_colour
    if not count:
        return
    axes.bar(column, count, 0.86, bottom, color=colour, edgecolor=paper.background, lw=0.6)
    sign = {"more": " ▲", "fewer": " ▼"}.get(verdict, "")
    if count >= ROW_HEIGHT * num_heads:
        text_colour = paper.foreground if colour == paper.empty_cell else LABEL_COLOUR
        axes.text(
            column,
            bottom + count / 2,
            f"{letter} {count}{sign}",
            ha="center",
            va="center",
            fontsize=6,
            color=text_colour,
        )


def _mark_extinctions(
    axes: Axes,
    kept_heads: Sequence[Sequence[HeadId]],
    groups: Mapping[HeadId, str],
    inks: Mapping[str, tuple[str, str]],
    paper: FigureTheme,
) -> None:
    """Mark the first column from which on a group has no heads."""
    marks_in_column = Counter[int]()
    for name, (letter, colour) in inks.items():
        columns = [
            column
            for column, heads in enumerate(kept_heads)
            if any(groups[head] == name for head in heads)
        ]
        if (first := max(columns) + 1) == len(kept_heads):
            continue
        height = len(kept_heads[first]) + len(groups) * (0.045 + 0.06 * marks_in_column[first])
        text_colour = paper.foreground if colour == paper.empty_cell else LABEL_COLOUR
        axes.text(
            first,
            height,
            f"× {letter}",
            ha="center",
            va="center",
            fontsize=7,
            fontweight="bold",
            color=text_colour,
            bbox={"boxstyle": "round,pad=0.2", "facecolor": colour, "edgecolor": "none"},
        )
        marks_in_column[first] += 1


def _draw_legend(figure: Figure, inks: Mapping[str, tuple[str, str]], paper: FigureTheme) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=colour, edgecolor=paper.muted, lw=0.3, label=f"{letter}  {name}")
        for name, (letter, colour) in inks.items()
    ]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=4,
        fontsize=7,
        handlelength=1,
        title="× none left, ▲ significantly more, ▼ fewer than by chance",
        title_fontsize=6.5,
    )


def _axis_label(curves: PruningCurves, name: str) -> str:
    return f"{curves.objective} loss" if name == LOSS else name


def _band_label(curves: PruningCurves, name: str) -> str:
    first = next(iter(curves.parts))
    num_draws = (
        len(curves.select_curves(first, RANDOM)) if curves.list_values(first, RANDOM, name) else 0
    )
    random_note = f", for {RANDOM} mean and range of {num_draws} draws" if num_draws > 1 else ""
    return f"bands: 95 % intervals over texts{random_note}; scales differ;"
