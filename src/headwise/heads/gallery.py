"""Heads at work on one text: the best of each class, the arcs of a parse, and two heads over each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .inks import Paper, drawable, ink_of
from .intervals import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ACROSS = 3  # pictures beside each other
LINE = 0.05  # the least weight that is drawn as a line


class Picture(NamedTuple):
    """The weights of one head over one text [T, S], its tokens, what it is called and why; arcs are marked cells."""

    title: str
    name: str
    weights: Array
    asks: Sequence[str]
    told: Sequence[str]
    arcs: Sequence[tuple[int, int]] = ()


def gallery(pictures: Sequence[Picture], title: str, paper: Paper) -> Figure:
    """A heat map for each: queries from above to below, keys from left to right; marked are gold arcs."""
    from matplotlib.figure import Figure

    down = -(-len(pictures) // ACROSS)
    across = min(ACROSS, len(pictures))
    figure = Figure(figsize=(3.1 * across, 3.2 * down + 0.4), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=9)
    for number, one in enumerate(pictures, 1):
        _heat(figure.add_subplot(down, across, number), one, paper)
    return figure


def _heat(axes: Axes, one: Picture, paper: Paper) -> None:
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Rectangle

    ramp = LinearSegmentedColormap.from_list("weights", list(paper.ramp))
    axes.imshow(np.sqrt(np.clip(one.weights, 0, 1)), cmap=ramp, vmin=0, vmax=1, interpolation="nearest")
    for t, s in one.arcs:
        axes.add_patch(Rectangle((s - 0.5, t - 0.5), 1, 1, fill=False, edgecolor=paper.pair[1], lw=1.1))
    axes.set_xticks(range(len(one.told)), [_short(word) for word in one.told], rotation=90, fontsize=5.5)
    axes.set_yticks(range(len(one.asks)), [_short(word) for word in one.asks], fontsize=5.5)
    axes.tick_params(length=0, pad=1)
    letter, colour = ink_of(one.name, paper)
    axes.set_title(f"{letter}  {one.title}", fontsize=7, color=paper.ink)
    for side in axes.spines.values():
        side.set(visible=True, color=colour, linewidth=1.2)


def overlaid(first: Picture, second: Picture, paper: Paper) -> Figure:
    """What two heads read, one colour each: every line leads from a token that asks to one that is read."""
    from matplotlib.figure import Figure

    count = max(len(first.asks), len(first.told))
    figure = Figure(figsize=(4.6, 0.21 * count + 0.9), layout="constrained")
    axes = figure.add_subplot()
    for one, colour in zip((first, second), paper.pair, strict=True):
        for t, s in np.argwhere(one.weights >= LINE).tolist():
            weight = float(one.weights[t, s])
            axes.plot([0, 1], [t, s], color=colour, alpha=min(1.0, 0.12 + 0.88 * weight), lw=0.4 + 2.2 * weight)
    for x, words, side in ((-0.03, first.asks, "right"), (1.03, first.told, "left")):
        for place, word in enumerate(words):
            axes.text(x, place, _short(word), ha=side, va="center", fontsize=7)
    for place, (one, colour) in enumerate(zip((first, second), paper.pair, strict=True)):
        axes.text(0.5, -2.4 + 0.9 * place, one.title, ha="center", color=colour, fontsize=7.5, fontweight="bold")
    axes.set(xlim=(-0.5, 1.5), ylim=(count - 0.3, -3.2))
    axes.set_axis_off()
    return figure


def _short(word: str) -> str:
    """A token in a few signs that can be drawn."""
    shown = drawable(word.strip()) or "·"
    return shown if len(shown) <= 12 else f"{shown[:11]}…"
