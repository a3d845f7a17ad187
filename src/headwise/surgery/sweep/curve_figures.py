"""Curves drawn: quality against heads left, part against part, and columns of the heads that stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...head_analysis.head_figures import CLASS_STYLES, FIGURE_THEMES, FigureTheme, class_style, save_figure
from ..head_selection import RANDOM
from ..pruning_plan import HeadId
from ..verification.quality_metrics import LOSS, PERPLEXITY
from .curve_report import assess_group_survival, get_joint_curves, group_by_part, list_grouped_heads
from .pruning_curves import ALL_PARTS, CurveValue, PruningCurves

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, for light and for dark paper; lines are told by their signs as well.
LINE_COLOURS = {
    "light": ("#0072B2", "#D55E00", "#009E73", "#CC79A7"),
    "dark": ("#56B4E9", "#E8833A", "#2FC79A", "#DE9CC6"),
}
MARKERS = "os^D"
LABEL_COLOUR = "#1A1A1A"  # on every colour of a class
LABEL_GAP = 0.075  # of an axis, between two labels
ROW_HEIGHT = 0.028  # of a column, that a letter needs
PART_LETTERS = {"encoder": "N", "decoder": "D", "cross": "X"}


class PlotLine(NamedTuple):
    """One line: its name, its marks, its colour and its sign."""

    name: str
    values: Sequence[CurveValue]
    colour: str
    marker: str


def write_figures(curves: PruningCurves, folder: Path) -> list[str]:
    """Every figure on light and dark paper, as SVG and PNG; their names."""
    names = list[str]()
    for name, make in list_figures(curves):
        names.append(name)
        for paper in FIGURE_THEMES:
            for suffix in (".svg", ".png"):
                save_figure(make, folder / f"{name}-{paper}{suffix}", paper)
    return names


def list_figures(curves: PruningCurves) -> Iterator[tuple[str, Callable[[FigureTheme], Figure]]]:
    """The figures that these curves have, by name."""
    for name in curves.metric_names:
        if name in (LOSS, curves.objective):
            yield "curves", partial(plot_by_order, curves, name)
        elif name != PERPLEXITY:
            yield f"curves-{name.lower().replace(' ', '-')}", partial(plot_by_order, curves, name)
    if len(curves.parts) > 2:
        yield "parts", partial(plot_by_part, curves)
    for place, order in enumerate(get_joint_curves(curves)):
        ends = f"-{order}" if place else ""
        if group_by_part(curves):
            yield f"parts-left{ends}", partial(plot_parts_left, curves, order)
        if curves.classes:
            yield f"classes-left{ends}", partial(plot_classes_left, curves, order)


def plot_parts_left(curves: PruningCurves, order: str, paper: FigureTheme) -> Figure:
    """The heads that stay, part by part."""
    colours = zip([part for part in curves.parts if part != ALL_PARTS], LINE_COLOURS["dark"], strict=False)
    inks = {part: (PART_LETTERS.get(part, part[0].upper()), colour) for part, colour in colours}
    return plot_columns(curves, order, group_by_part(curves), inks, paper)


def plot_classes_left(curves: PruningCurves, order: str, paper: FigureTheme) -> Figure:
    """The heads that stay, class by class."""
    return plot_columns(curves, order, curves.classes, {name: class_style(name, paper) for name in CLASS_STYLES}, paper)


def plot_by_order(curves: PruningCurves, name: str, paper: FigureTheme) -> Figure:
    """A panel for each part, a line for each order: a number with its interval, of chance the mean and the range."""
    from matplotlib.figure import Figure

    names = [part for part in curves.parts if any(curves.list_values(part, order, name) for order in curves.orders)]
    across = min(2, len(names))
    down = -(-len(names) // across)
    figure = Figure(figsize=(4.4 * across, 2.9 * down + 0.5), layout="constrained")
    figure.suptitle(
        f"{curves.model}: {_axis_label(curves, name)}, less that of the whole model",
        x=0.01,
        ha="left",
        fontweight="bold",
        fontsize=9,
    )
    for number, part in enumerate(names, 1):
        axes = figure.add_subplot(down, across, number)
        every = [_make_line(curves, part, order, name, paper) for order in curves.orders]
        strokes = [one for one in every if one.values]
        _draw_lines(axes, strokes, paper)
        heads = curves.count_part_heads(part)
        axes.set_title(f"all {heads} heads" if part == ALL_PARTS else f"{heads} of {part}, the others whole")
        axes.set(xlim=(heads, 0), xlabel="heads left")
        axes.set_xticks([mark.num_heads for mark in strokes[0].values])
        if name in (LOSS, curves.objective):
            _draw_limit(axes, curves.max_loss_increase, paper)
    figure.supxlabel(
        f"{_band_label(curves, name)} {curves.num_texts} texts", fontsize=6.5, color=paper.muted, x=0.01, ha="left"
    )
    return figure


def plot_by_part(curves: PruningCurves, paper: FigureTheme) -> Figure:
    """A line for each part alone by our order, on one scale."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 3.3), layout="constrained")
    axes, name, order = figure.add_subplot(), curves.metric_names[0], curves.orders[0]
    strokes = list[PlotLine]()
    for place, part in enumerate(curves.parts):
        heads = curves.count_part_heads(part) / 100
        marks = [one._replace(num_heads=one.num_heads / heads) for one in curves.list_values(part, order, name)]
        colour = paper.muted if part == ALL_PARTS else LINE_COLOURS[paper.name][place % len(MARKERS) - 1]
        strokes.append(PlotLine(part, marks, colour, MARKERS[place % len(MARKERS)]))
    _draw_lines(axes, strokes, paper)
    axes.set(xlim=(100, 0), xlabel="heads of the part left, %; the other parts whole")
    axes.set_title(f"{curves.model}: {_axis_label(curves, name)}, less that of the whole model; by {order}")
    _draw_limit(axes, curves.max_loss_increase, paper)
    return figure


def plot_columns(
    curves: PruningCurves,
    order: str,
    groups: Mapping[HeadId, str],
    inks: Mapping[str, tuple[str, str]],
    paper: FigureTheme,
) -> Figure:
    """The heads that stay as columns of groups; triangles where surely more or fewer stay than chance leaves.

    Above the column where the last head of a group is gone stands its letter, struck out by a cross.
    """
    from matplotlib.figure import Figure

    kept = list_grouped_heads(get_joint_curves(curves)[order], groups)
    told = {(one.group, one.num_heads): one.verdict for one in assess_group_survival(groups, kept[1:])}
    names = [name for name in inks if name in set(groups.values())]
    figure = Figure(figsize=(max(4.6, 0.62 * len(kept) + 1.6), 4.6), layout="constrained")
    axes, bottoms = figure.add_subplot(), [0.0] * len(kept)
    for name in names:
        for place, heads in enumerate(kept):
            count = Counter(groups[head] for head in heads)[name]
            sure = told.get((name, len(heads)), "")
            _draw_box(axes, (place, bottoms[place], count, len(groups)), inks[name], sure, paper)
            bottoms[place] += count
    _mark_extinctions(axes, kept, groups, {name: inks[name] for name in names}, paper)
    axes.set(xlim=(-0.6, len(kept) - 0.4), ylim=(0, len(groups) * 1.02), xlabel="heads left", ylabel="heads")
    axes.set_xticks(range(len(kept)), [str(len(heads)) for heads in kept])
    axes.set_title(f"{curves.model}: the heads that stay by {order}")
    axes.tick_params(axis="x", length=0)
    _draw_legend(figure, {name: inks[name] for name in names}, paper)
    return figure


# --- how it is drawn ---------------------------------------------------------------------------------------------


def _draw_lines(axes: Axes, strokes: Sequence[PlotLine], paper: FigureTheme) -> None:
    for one in reversed(strokes):  # ours lies upon the others
        lefts = [mark.num_heads for mark in one.values]
        axes.fill_between(
            lefts, [m.low for m in one.values], [m.high for m in one.values], color=one.colour, alpha=0.16, lw=0
        )
        axes.plot(lefts, [m.value for m in one.values], color=one.colour, marker=one.marker, ms=3.2)
    axes.axhline(0, color=paper.muted, lw=0.5)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high)
    ends = [one.values[-1].value for one in strokes]
    for one, end, place in zip(strokes, ends, spread_labels(ends, low, high), strict=True):
        leads = {"arrowstyle": "-", "color": one.colour, "lw": 0.5, "shrinkA": 1, "shrinkB": 3}
        axes.annotate(
            one.name,
            (one.values[-1].num_heads, end),
            xytext=(1.03, (place - low) / (high - low)),
            color=one.colour,
            textcoords="axes fraction",
            va="center",
            fontsize=7,
            arrowprops=leads,
        )


def spread_labels(values: Sequence[float], low: float, high: float) -> list[float]:
    """Where labels stand so that none is upon another: near their values, in their order, between low and high.

    >>> [round(place, 3) for place in spread_labels([0.5, 0.5, 0.0], 0.0, 1.0)]
    [0.463, 0.537, 0.0]
    """
    step = LABEL_GAP * (high - low)
    order = sorted(range(len(values)), key=lambda n: values[n])
    runs = list[tuple[list[int], float]]()  # labels side by side, and where their middle is
    for n in order:
        run, middle = [n], values[n]
        while runs and runs[-1][1] + step * (len(runs[-1][0]) + len(run)) / 2 > middle:
            before, at = runs.pop()
            middle = (at * len(before) + middle * len(run)) / (len(before) + len(run))
            run = before + run
        half = step * (len(run) - 1) / 2
        runs.append((run, max(low + half, min(high - half, middle))))
    places = {n: middle + step * (k - (len(run) - 1) / 2) for run, middle in runs for k, n in enumerate(run)}
    return [places[n] for n in range(len(values))]


def _draw_limit(axes: Axes, at: float, paper: FigureTheme) -> None:
    axes.axhline(at, color=paper.muted, lw=0.7, ls=(0, (4, 3)))
    axes.annotate(
        f"allowed {at:g}",
        (0, at),
        xycoords=("axes fraction", "data"),
        xytext=(2, 2),
        textcoords="offset points",
        fontsize=6.5,
        color=paper.muted,
    )


def _make_line(curves: PruningCurves, part: str, order: str, name: str, paper: FigureTheme) -> PlotLine:
    place = curves.orders.index(order)
    colour = paper.muted if order == RANDOM else LINE_COLOURS[paper.name][place % len(MARKERS)]
    return PlotLine(order, curves.list_values(part, order, name), colour, MARKERS[place % len(MARKERS)])


def _draw_box(axes: Axes, at: tuple[int, float, int, int], ink: tuple[str, str], sure: str, paper: FigureTheme) -> None:
    place, bottom, count, whole = at
    letter, colour = ink
    if not count:
        return
    axes.bar(place, count, 0.86, bottom, color=colour, edgecolor=paper.background, lw=0.6)
    sign = {"more": " ▲", "fewer": " ▼"}.get(sure, "")
    if count >= ROW_HEIGHT * whole:
        on = paper.foreground if colour == paper.empty_cell else LABEL_COLOUR
        axes.text(place, bottom + count / 2, f"{letter} {count}{sign}", ha="center", va="center", fontsize=6, color=on)


def _mark_extinctions(
    axes: Axes,
    kept: Sequence[Sequence[HeadId]],
    groups: Mapping[HeadId, str],
    inks: Mapping[str, tuple[str, str]],
    paper: FigureTheme,
) -> None:
    """A mark above the first column that a group is missing from, and from all behind it."""
    above = Counter[int]()
    for name, (letter, colour) in inks.items():
        there = [place for place, heads in enumerate(kept) if any(groups[head] == name for head in heads)]
        if (first := max(there) + 1) == len(kept):
            continue
        height = len(kept[first]) + len(groups) * (0.045 + 0.06 * above[first])
        on = paper.foreground if colour == paper.empty_cell else LABEL_COLOUR
        axes.text(
            first,
            height,
            f"× {letter}",
            ha="center",
            va="center",
            fontsize=7,
            fontweight="bold",
            color=on,
            bbox={"boxstyle": "round,pad=0.2", "facecolor": colour, "edgecolor": "none"},
        )
        above[first] += 1


def _draw_legend(figure: Figure, inks: Mapping[str, tuple[str, str]], paper: FigureTheme) -> None:
    from matplotlib.patches import Patch

    marks = [
        Patch(facecolor=colour, edgecolor=paper.muted, lw=0.3, label=f"{letter}  {name}")
        for name, (letter, colour) in inks.items()
    ]
    figure.legend(
        handles=marks,
        loc="outside lower center",
        ncols=4,
        fontsize=7,
        handlelength=1,
        title="× gone, ▲ surely more, ▼ fewer than chance leaves",
        title_fontsize=6.5,
    )


def _axis_label(curves: PruningCurves, name: str) -> str:
    return f"{curves.objective} loss" if name == LOSS else name


def _band_label(curves: PruningCurves, name: str) -> str:
    first = next(iter(curves.parts))
    drawn = len(curves.select_curves(first, RANDOM)) if curves.list_values(first, RANDOM, name) else 0
    said = f", of {RANDOM} the range of {drawn} draws around their mean" if drawn > 1 else ""
    return f"bands: 95 % of draws of texts{said}; scales differ;"
