"""Heads at work on one text: the best of each class, the arcs of a parse, and two heads over each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .inks import FigureTheme, replace_undrawable, class_style
from .intervals import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUM_COLUMNS = 3  # pictures beside each other
MIN_LINE_WEIGHT = 0.05  # the least weight that is drawn as a line


class HeadPicture(NamedTuple):
    """The weights of one head over one text [T, S], its tokens, what it is called and why; arcs are marked cells."""

    title: str
    name: str
    weights: Array
    query_tokens: Sequence[str]
    key_tokens: Sequence[str]
    marked_cells: Sequence[tuple[int, int]] = ()


def draw_gallery(pictures: Sequence[HeadPicture], title: str, theme: FigureTheme) -> Figure:
    """A heat map for each: queries from above to below, keys from left to right; marked are gold arcs."""
    from matplotlib.figure import Figure

    down = -(-len(pictures) // NUM_COLUMNS)
    across = min(NUM_COLUMNS, len(pictures))
    figure = Figure(figsize=(3.1 * across, 3.2 * down + 0.4), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=9)
    for number, one in enumerate(pictures, 1):
        _draw_heat_map(figure.add_subplot(down, across, number), one, theme)
    return figure


def _draw_heat_map(axes: Axes, one: HeadPicture, paper: FigureTheme) -> None:
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Rectangle

    ramp = LinearSegmentedColormap.from_list("weights", list(paper.colour_ramp))
    axes.imshow(np.sqrt(np.clip(one.weights, 0, 1)), cmap=ramp, vmin=0, vmax=1, interpolation="nearest")
    for t, s in one.marked_cells:
        axes.add_patch(Rectangle((s - 0.5, t - 0.5), 1, 1, fill=False, edgecolor=paper.pair_colours[1], lw=1.1))
    axes.set_xticks(range(len(one.key_tokens)), [_shorten_token(word) for word in one.key_tokens], rotation=90, fontsize=5.5)
    axes.set_yticks(range(len(one.query_tokens)), [_shorten_token(word) for word in one.query_tokens], fontsize=5.5)
    axes.tick_params(length=0, pad=1)
    letter, colour = class_style(one.name, paper)
    axes.set_title(f"{letter}  {one.title}", fontsize=7, color=paper.foreground)
    for side in axes.spines.values():
        side.set(visible=True, color=colour, linewidth=1.2)


def draw_head_overlay(first: HeadPicture, second: HeadPicture, theme: FigureTheme) -> Figure:
    """What two heads read, one colour each: every line leads from a token that asks to one that is read."""
    from matplotlib.figure import Figure

    count = max(len(first.query_tokens), len(first.key_tokens))
    figure = Figure(figsize=(4.6, 0.21 * count + 0.9), layout="constrained")
    axes = figure.add_subplot()
    for one, colour in zip((first, second), theme.pair_colours, strict=True):
        for t, s in np.argwhere(one.weights >= MIN_LINE_WEIGHT).tolist():
            weight = float(one.weights[t, s])
            axes.plot([0, 1], [t, s], color=colour, alpha=min(1.0, 0.12 + 0.88 * weight), lw=0.4 + 2.2 * weight)
    for x, words, side in ((-0.03, first.query_tokens, "right"), (1.03, first.key_tokens, "left")):
        for place, word in enumerate(words):
            axes.text(x, place, _shorten_token(word), ha=side, va="center", fontsize=7)
    for place, (one, colour) in enumerate(zip((first, second), theme.pair_colours, strict=True)):
        axes.text(0.5, -2.4 + 0.9 * place, one.title, ha="center", color=colour, fontsize=7.5, fontweight="bold")
    axes.set(xlim=(-0.5, 1.5), ylim=(count - 0.3, -3.2))
    axes.set_axis_off()
    return figure


def _shorten_token(word: str) -> str:
    """A token in a few signs that can be drawn."""
    shown = replace_undrawable(word.strip()) or "·"
    return shown if len(shown) <= 12 else f"{shown[:11]}…"
