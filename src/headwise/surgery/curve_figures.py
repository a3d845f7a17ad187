"""Curves drawn: quality against heads left, part against part, and columns of the heads that stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..heads.inks import CLASSES, PAPERS, Paper, ink_of, write
from .claims import alone, kept_of, parts_of, stayed
from .curves import ALL, Curves, Mark
from .plans import Head
from .quality import LOSS, PERPLEXITY
from .worths import RANDOM

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, for light and for dark paper; lines are told by their signs as well.
LINES = {"light": ("#0072B2", "#D55E00", "#009E73", "#CC79A7"), "dark": ("#56B4E9", "#E8833A", "#2FC79A", "#DE9CC6")}
SIGNS = "os^D"
DARK = "#1A1A1A"  # on every colour of a class
APART = 0.075  # of an axis, between two labels
TALL = 0.028  # of a column, that a letter needs
LETTERS = {"encoder": "N", "decoder": "D", "cross": "X"}


class Stroke(NamedTuple):
    """One line: its name, its marks, its colour and its sign."""

    name: str
    marks: Sequence[Mark]
    colour: str
    sign: str


def write_figures(curves: Curves, folder: Path) -> list[str]:
    """Every figure on light and dark paper, as SVG and PNG; their names."""
    names = list[str]()
    for name, make in figures(curves):
        names.append(name)
        for paper in PAPERS:
            for suffix in (".svg", ".png"):
                write(make, folder / f"{name}-{paper}{suffix}", paper)
    return names


def figures(curves: Curves) -> Iterator[tuple[str, Callable[[Paper], Figure]]]:
    """The figures that these curves have, by name."""
    for name in curves.names:
        if name in (LOSS, curves.objective):
            yield "curves", partial(by_order, curves, name)
        elif name != PERPLEXITY:
            yield f"curves-{name.lower().replace(' ', '-')}", partial(by_order, curves, name)
    if len(curves.parts) > 2:
        yield "parts", partial(by_part, curves)
    for place, order in enumerate(alone(curves)):
        ends = f"-{order}" if place else ""
        if parts_of(curves):
            yield f"parts-left{ends}", partial(parts_left, curves, order)
        if curves.classes:
            yield f"classes-left{ends}", partial(classes_left, curves, order)


def parts_left(curves: Curves, order: str, paper: Paper) -> Figure:
    """The heads that stay, part by part."""
    colours = zip([part for part in curves.parts if part != ALL], LINES["dark"], strict=False)
    inks = {part: (LETTERS.get(part, part[0].upper()), colour) for part, colour in colours}
    return columns(curves, order, parts_of(curves), inks, paper)


def classes_left(curves: Curves, order: str, paper: Paper) -> Figure:
    """The heads that stay, class by class."""
    return columns(curves, order, curves.classes, {name: ink_of(name, paper) for name in CLASSES}, paper)


def by_order(curves: Curves, name: str, paper: Paper) -> Figure:
    """A panel for each part, a line for each order: a number with its interval, of chance the mean and the range."""
    from matplotlib.figure import Figure

    names = [part for part in curves.parts if any(curves.marks(part, order, name) for order in curves.orders)]
    across = min(2, len(names))
    down = -(-len(names) // across)
    figure = Figure(figsize=(4.4 * across, 2.9 * down + 0.5), layout="constrained")
    figure.suptitle(f"{curves.model}: {_row(curves, name)}, less that of the whole model", x=0.01, ha="left",
                    fontweight="bold", fontsize=9)  # fmt: skip
    for number, part in enumerate(names, 1):
        axes = figure.add_subplot(down, across, number)
        every = [_stroke(curves, part, order, name, paper) for order in curves.orders]
        strokes = [one for one in every if one.marks]
        _draw(axes, strokes, paper)
        heads = curves.heads(part)
        axes.set_title(f"all {heads} heads" if part == ALL else f"{heads} of {part}, the others whole")
        axes.set(xlim=(heads, 0), xlabel="heads left")
        axes.set_xticks([mark.left for mark in strokes[0].marks])
        if name in (LOSS, curves.objective):
            _allow(axes, curves.allowed, paper)
    figure.supxlabel(f"{_band(curves, name)} {curves.texts} texts", fontsize=6.5, color=paper.faint, x=0.01, ha="left")
    return figure


def by_part(curves: Curves, paper: Paper) -> Figure:
    """A line for each part alone by our order, on one scale."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 3.3), layout="constrained")
    axes, name, order = figure.add_subplot(), curves.names[0], curves.orders[0]
    strokes = list[Stroke]()
    for place, part in enumerate(curves.parts):
        heads = curves.heads(part) / 100
        marks = [one._replace(left=one.left / heads) for one in curves.marks(part, order, name)]
        colour = paper.faint if part == ALL else LINES[paper.name][place % len(SIGNS) - 1]
        strokes.append(Stroke(part, marks, colour, SIGNS[place % len(SIGNS)]))
    _draw(axes, strokes, paper)
    axes.set(xlim=(100, 0), xlabel="heads of the part left, %; the other parts whole")
    axes.set_title(f"{curves.model}: {_row(curves, name)}, less that of the whole model; by {order}")
    _allow(axes, curves.allowed, paper)
    return figure


def columns(
    curves: Curves, order: str, groups: Mapping[Head, str], inks: Mapping[str, tuple[str, str]], paper: Paper
) -> Figure:
    """The heads that stay as columns of groups; triangles where surely more or fewer stay than chance leaves.

    Above the column where the last head of a group is gone stands its letter, struck out by a cross.
    """
    from matplotlib.figure import Figure

    kept = kept_of(alone(curves)[order], groups)
    told = {(one.group, one.left): one.sure for one in stayed(groups, kept[1:])}
    names = [name for name in inks if name in set(groups.values())]
    figure = Figure(figsize=(max(4.6, 0.62 * len(kept) + 1.6), 4.6), layout="constrained")
    axes, bottoms = figure.add_subplot(), [0.0] * len(kept)
    for name in names:
        for place, heads in enumerate(kept):
            count = Counter(groups[head] for head in heads)[name]
            sure = told.get((name, len(heads)), "")
            _box(axes, (place, bottoms[place], count, len(groups)), inks[name], sure, paper)
            bottoms[place] += count
    _gone(axes, kept, groups, {name: inks[name] for name in names}, paper)
    axes.set(xlim=(-0.6, len(kept) - 0.4), ylim=(0, len(groups) * 1.02), xlabel="heads left", ylabel="heads")
    axes.set_xticks(range(len(kept)), [str(len(heads)) for heads in kept])
    axes.set_title(f"{curves.model}: the heads that stay by {order}")
    axes.tick_params(axis="x", length=0)
    _legend(figure, {name: inks[name] for name in names}, paper)
    return figure


# --- how it is drawn ---------------------------------------------------------------------------------------------


def _draw(axes: Axes, strokes: Sequence[Stroke], paper: Paper) -> None:
    for one in reversed(strokes):  # ours lies upon the others
        lefts = [mark.left for mark in one.marks]
        axes.fill_between(lefts, [m.low for m in one.marks], [m.high for m in one.marks], color=one.colour, alpha=0.16,
                          lw=0)  # fmt: skip
        axes.plot(lefts, [m.value for m in one.marks], color=one.colour, marker=one.sign, ms=3.2)
    axes.axhline(0, color=paper.faint, lw=0.5)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high)
    ends = [one.marks[-1].value for one in strokes]
    for one, end, place in zip(strokes, ends, spread(ends, low, high), strict=True):
        leads = {"arrowstyle": "-", "color": one.colour, "lw": 0.5, "shrinkA": 1, "shrinkB": 3}
        axes.annotate(
            one.name, (one.marks[-1].left, end), xytext=(1.03, (place - low) / (high - low)), color=one.colour,
            textcoords="axes fraction", va="center", fontsize=7, arrowprops=leads,
        )  # fmt: skip


def spread(values: Sequence[float], low: float, high: float) -> list[float]:
    """Where labels stand so that none is upon another: near their values, in their order, between low and high.

    >>> [round(place, 3) for place in spread([0.5, 0.5, 0.0], 0.0, 1.0)]
    [0.463, 0.537, 0.0]
    """
    step = APART * (high - low)
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


def _allow(axes: Axes, at: float, paper: Paper) -> None:
    axes.axhline(at, color=paper.faint, lw=0.7, ls=(0, (4, 3)))
    axes.annotate(f"allowed {at:g}", (0, at), xycoords=("axes fraction", "data"), xytext=(2, 2),
                  textcoords="offset points", fontsize=6.5, color=paper.faint)  # fmt: skip


def _stroke(curves: Curves, part: str, order: str, name: str, paper: Paper) -> Stroke:
    place = curves.orders.index(order)
    colour = paper.faint if order == RANDOM else LINES[paper.name][place % len(SIGNS)]
    return Stroke(order, curves.marks(part, order, name), colour, SIGNS[place % len(SIGNS)])


def _box(axes: Axes, at: tuple[int, float, int, int], ink: tuple[str, str], sure: str, paper: Paper) -> None:
    place, bottom, count, whole = at
    letter, colour = ink
    if not count:
        return
    axes.bar(place, count, 0.86, bottom, color=colour, edgecolor=paper.paper, lw=0.6)
    sign = {"more": " ▲", "fewer": " ▼"}.get(sure, "")
    if count >= TALL * whole:
        on = paper.ink if colour == paper.empty else DARK
        axes.text(place, bottom + count / 2, f"{letter} {count}{sign}", ha="center", va="center", fontsize=6, color=on)


def _gone(
    axes: Axes, kept: Sequence[Sequence[Head]], groups: Mapping[Head, str],
    inks: Mapping[str, tuple[str, str]], paper: Paper,
) -> None:  # fmt: skip
    """A mark above the first column that a group is missing from, and from all behind it."""
    above = Counter[int]()
    for name, (letter, colour) in inks.items():
        there = [place for place, heads in enumerate(kept) if any(groups[head] == name for head in heads)]
        if (first := max(there) + 1) == len(kept):
            continue
        height = len(kept[first]) + len(groups) * (0.045 + 0.06 * above[first])
        on = paper.ink if colour == paper.empty else DARK
        axes.text(first, height, f"× {letter}", ha="center", va="center", fontsize=7, fontweight="bold", color=on,
                  bbox={"boxstyle": "round,pad=0.2", "facecolor": colour, "edgecolor": "none"})  # fmt: skip
        above[first] += 1


def _legend(figure: Figure, inks: Mapping[str, tuple[str, str]], paper: Paper) -> None:
    from matplotlib.patches import Patch

    marks = [Patch(facecolor=colour, edgecolor=paper.faint, lw=0.3, label=f"{letter}  {name}")
             for name, (letter, colour) in inks.items()]  # fmt: skip
    figure.legend(handles=marks, loc="outside lower center", ncols=4, fontsize=7, handlelength=1,
                  title="× gone, ▲ surely more, ▼ fewer than chance leaves", title_fontsize=6.5)  # fmt: skip


def _row(curves: Curves, name: str) -> str:
    return f"{curves.objective} loss" if name == LOSS else name


def _band(curves: Curves, name: str) -> str:
    first = next(iter(curves.parts))
    drawn = len(curves.own(first, RANDOM)) if curves.marks(first, RANDOM, name) else 0
    said = f", of {RANDOM} the range of {drawn} draws around their mean" if drawn > 1 else ""
    return f"bands: 95 % of draws of texts{said}; scales differ;"
