"""Drawings of the attention weights of single heads: heat maps of one or several heads, and two heads as lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .head_figures import TOKEN_LABEL, FigureTheme, class_style, name_undrawable, wrap_title
from .resampling import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

NUM_COLUMNS = 3  # heat maps in a row of a gallery
MIN_LINE_WEIGHT = 0.05  # smaller weights are not drawn as lines
MAX_TOKEN_LABELS = 40  # labels on an axis; with more tokens, every second, third, ... has one
MAX_TOKEN_LENGTH = 12
SCALE_TICKS = (0.0, 0.01, 0.05, 0.2, 0.5, 1.0)  # weights marked on the scale
SCALE_LABEL = "attention weight (strength of colour: its square root)"


class HeadPicture(NamedTuple):
    """Attention weights [T, S] of one head over one text, with a title, a class name, tokens and cells to mark."""

    title: str
    name: str
    weights: Array
    query_tokens: Sequence[str]
    key_tokens: Sequence[str]
    marked_cells: Sequence[tuple[int, int]] = ()


def draw_gallery(pictures: Sequence[HeadPicture], title: str, theme: FigureTheme, marks: str = "") -> Figure:
    """Draw a heat map for each head: queries from top to bottom, keys from left to right.

    `marks` names what the frames around cells mark.
    """
    from matplotlib.figure import Figure

    rows = -(-len(pictures) // NUM_COLUMNS)
    columns = min(NUM_COLUMNS, len(pictures))
    width = max(4.2, 3.1 * columns)
    figure = Figure(figsize=(width, 3.4 * rows + 1.0), layout="constrained")
    figure.suptitle(wrap_title(title, width, 9), x=0.01, ha="left", fontweight="bold", fontsize=9)
    all_axes: list[Axes] = []
    for number, picture in enumerate(pictures, 1):
        axes = figure.add_subplot(rows, columns, number)
        _draw_heat_map(axes, picture, theme, 3.1)
        all_axes.append(axes)
    _draw_scale(figure, all_axes, theme, marks)
    return figure


def draw_head(picture: HeadPicture, title: str, theme: FigureTheme) -> Figure:
    """Draw one head large enough to read every token of a text of some dozen tokens."""
    from matplotlib.figure import Figure

    width, height = (
        min(11.0, max(3.6, 0.19 * len(tokens) + 1.6)) for tokens in (picture.key_tokens, picture.query_tokens)
    )
    figure = Figure(figsize=(width, height + 1.0), layout="constrained")
    figure.suptitle(wrap_title(title, width, 9), x=0.01, ha="left", fontweight="bold", fontsize=9)
    axes = figure.add_subplot()
    _draw_heat_map(axes, picture, theme, width)
    _draw_scale(figure, [axes], theme, "")
    return figure


def _draw_heat_map(axes: Axes, picture: HeadPicture, theme: FigureTheme, width: float) -> None:
    from matplotlib.patches import Rectangle

    brightness = np.sqrt(np.clip(picture.weights, 0, 1))
    axes.imshow(brightness, cmap=_weight_colours(theme), vmin=0, vmax=1, interpolation="nearest", aspect="auto")
    for t, s in picture.marked_cells:
        axes.add_patch(Rectangle((s - 0.5, t - 0.5), 1, 1, fill=False, edgecolor=theme.pair_colours[1], lw=1.1))
    for set_ticks, tokens, rotation in (
        (axes.set_xticks, picture.key_tokens, 90),
        (axes.set_yticks, picture.query_tokens, 0),
    ):
        step = math.ceil(len(tokens) / MAX_TOKEN_LABELS)
        shown = range(0, len(tokens), step)
        set_ticks(list(shown), [_shorten_token(tokens[n]) for n in shown], rotation=rotation, fontsize=5.5)
    axes.tick_params(length=0, pad=1)
    axes.set_xlabel("key", fontsize=6.5, labelpad=1)
    axes.set_ylabel("query", fontsize=6.5, labelpad=1)
    letter, colour = class_style(picture.name, theme) if picture.name else ("", theme.muted)
    axes.set_title(wrap_title(f"{letter}  {picture.title}".strip(), width - 0.5, 7), fontsize=7)
    for side in axes.spines.values():
        side.set(visible=True, color=colour, linewidth=1.2)


def _weight_colours(theme: FigureTheme) -> Colormap:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("weights", list(theme.colour_ramp))


def _draw_scale(figure: Figure, all_axes: Sequence[Axes], theme: FigureTheme, marks: str) -> None:
    """Draw the scale of weights below all heat maps."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    scale = figure.colorbar(
        ScalarMappable(Normalize(0, 1), _weight_colours(theme)),
        ax=list(all_axes),
        location="bottom",
        shrink=min(1.0, 3.6 / figure.get_figwidth()),
        aspect=30,
        pad=0.02,
    )
    scale.set_ticks([math.sqrt(weight) for weight in SCALE_TICKS], labels=[f"{weight:g}" for weight in SCALE_TICKS])
    scale.ax.tick_params(labelsize=6, length=2)
    label = f"{SCALE_LABEL}\nframed: {marks}" if marks else SCALE_LABEL
    scale.set_label(label, fontsize=6.5)
    scale.outline.set_edgecolor(theme.muted)  # pyright: ignore[reportCallIssue] - its stubs take it for a method


def draw_head_overlay(first: HeadPicture, second: HeadPicture, title: str, theme: FigureTheme) -> Figure:
    """Draw the attention of two heads as lines from queries to keys, in one colour each."""
    from matplotlib.figure import Figure

    count, width = max(len(first.query_tokens), len(first.key_tokens)), 4.6
    figure = Figure(figsize=(width, 0.21 * count + 1.5), layout="constrained")
    figure.suptitle(wrap_title(title, width, 9), x=0.01, ha="left", fontweight="bold", fontsize=9)
    axes = figure.add_subplot()
    for picture, colour in zip((first, second), theme.pair_colours, strict=True):
        for t, s in np.argwhere(picture.weights >= MIN_LINE_WEIGHT).tolist():
            weight = float(picture.weights[t, s])
            axes.plot([0, 1], [t, s], color=colour, alpha=min(1.0, 0.12 + 0.88 * weight), lw=0.4 + 2.2 * weight)
    for x, heading, words, side in (
        (-0.03, "query", first.query_tokens, "right"),
        (1.03, "key", first.key_tokens, "left"),
    ):
        axes.text(x, -1.1, heading, ha=side, va="center", fontsize=7, color=theme.muted)
        for row, word in enumerate(words):
            axes.text(x, row, _shorten_token(word), ha=side, va="center", fontsize=7, label=TOKEN_LABEL)
    for row, (picture, colour) in enumerate(zip((first, second), theme.pair_colours, strict=True)):
        axes.text(
            0.5, -3.3 + 1.0 * row, picture.title, ha="center", va="center", color=colour, fontsize=7, fontweight="bold"
        )
    note = f"weights of at least {MIN_LINE_WEIGHT:g}; thicker, stronger lines are larger weights"
    axes.text(0.5, count + 0.1, note, ha="center", va="center", fontsize=6, color=theme.muted)
    axes.set(xlim=(-0.5, 1.5), ylim=(count + 0.6, -3.9))
    axes.set_axis_off()
    return figure


def _shorten_token(word: str) -> str:
    """The token as at most 12 characters that can be drawn."""
    shown = name_undrawable(word.strip()) or "·"
    return shown if len(shown) <= MAX_TOKEN_LENGTH else f"{shown[: MAX_TOKEN_LENGTH - 1]}…"
