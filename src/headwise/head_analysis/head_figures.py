"""Drawings of heads for light and dark backgrounds, and tables of heads for a terminal."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import SpecError
from ..files import write_atomically
from .head_table import HeadMeasures, HeadTable
from .resampling import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# --- Themes, colours and fonts -------------------------------------------------------------------------

SAVE_OPTIONS: dict[str, dict[str, Any]] = {".svg": {"metadata": {"Date": None}}, ".png": {"dpi": 160}}
# Letter and colour of each class. Colours are those of Okabe and Ito; the letter distinguishes classes without colour.
CLASS_STYLES: Mapping[str, tuple[str, str]] = {
    "sink": ("K", "#999999"),
    "positional": ("P", "#56B4E9"),
    "syntactic": ("S", "#009E73"),
    "rare-token": ("R", "#CC79A7"),
    "induction": ("I", "#D55E00"),
    "duplicate": ("D", "#E69F00"),
    "separator": ("E", "#7A7ACF"),
    "punctuation": ("T", "#B58B5A"),
    "alignment": ("A", "#0072B2"),
    "broad": ("B", "#F0E442"),
    "unclear": ("U", ""),
}
OFFSET_CLASSES = ("previous", "self", "next")
FONT_SIZE = 8.0
DEFAULT_FONT = "DejaVu Sans"
# Fonts with Chinese, Japanese and Korean characters on common systems.
FALLBACK_FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans SC",
    "Source Han Sans SC",
    "WenQuanYi Zen Hei",
    "WenQuanYi Micro Hei",
    "PingFang SC",
    "Hiragino Sans GB",
    "Microsoft YaHei",
    "SimHei",
    "Arial Unicode MS",
)


@dataclass(frozen=True)
class FigureTheme:
    """Colours of a drawing: background, text, muted text, empty cells, the ramp of weights, and two colours for
    pairs.
    """

    name: str
    background: str
    foreground: str
    muted: str
    empty_cell: str
    colour_ramp: tuple[str, str]
    pair_colours: tuple[str, str]


FIGURE_THEMES = {
    "light": FigureTheme(
        "light", "#FFFFFF", "#1A1A1A", "#8A8A8A", "#F2F2F2", ("#FFFFFF", "#3A2A8C"), ("#0072B2", "#D55E00")
    ),
    "dark": FigureTheme(
        "dark", "#14161A", "#E8E8E8", "#8C939C", "#23262C", ("#14161A", "#5FD7E8"), ("#56B4E9", "#E8833A")
    ),
}


def get_theme(name: str) -> FigureTheme:
    """Return the theme of this name."""
    if name not in FIGURE_THEMES:
        raise SpecError(f"unknown theme {name!r}; use light or dark")
    return FIGURE_THEMES[name]


def class_group(name: str) -> str:
    """Group of a class, which has one letter and one colour: relations are syntactic, distances positional.

    >>> class_group("syntactic det to its governor"), class_group("previous"), class_group("rare-token")
    ('syntactic', 'positional', 'rare-token')
    """
    first = name.partition(" ")[0]
    return {"offset": "positional", "first": "sink"}.get(first, "positional" if first in OFFSET_CLASSES else first)


def class_style(name: str, theme: FigureTheme) -> tuple[str, str]:
    """Letter and colour of a class."""
    letter, colour = CLASS_STYLES.get(class_group(name), ("?", theme.muted))
    return letter, colour or theme.empty_cell


def list_fonts() -> list[str]:
    """Names of matplotlib's own font and of the installed fallback fonts."""
    from matplotlib.font_manager import fontManager

    installed = {font.name for font in fontManager.ttflist}
    return [DEFAULT_FONT, *(name for name in FALLBACK_FONTS if name in installed)]


def replace_undrawable(text: str) -> str:
    """Replace every character that no listed font can draw with a box."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    charmaps = [get_font(findfont(FontProperties(family=name))).get_charmap() for name in list_fonts()]
    return "".join(
        char if any(ord(char) in charmap for charmap in charmaps) and char.isprintable() else "□" for char in text
    )


def plot_style(theme: FigureTheme) -> Any:
    """Settings of matplotlib for a theme."""
    return {
        "font.size": FONT_SIZE,
        "font.family": list_fonts(),
        "figure.facecolor": theme.background,
        "savefig.facecolor": theme.background,
        "axes.facecolor": theme.background,
        "text.color": theme.foreground,
        "axes.edgecolor": theme.muted,
        "axes.labelcolor": theme.foreground,
        "xtick.color": theme.muted,
        "ytick.color": theme.muted,
        "axes.titlesize": FONT_SIZE + 1,
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "text.parse_math": False,
        "svg.hashsalt": "headwise",
        "svg.fonttype": "path",
        "legend.frameon": False,
        "lines.linewidth": 1.2,
    }


def save_figure(draw: Callable[[FigureTheme], Figure], path: Path | str, theme_name: str = "light") -> None:
    """Draw a figure into an SVG or PNG file; equal data gives an equal file."""
    suffix = Path(path).suffix
    if suffix not in SAVE_OPTIONS:
        raise SpecError(f"cannot save a figure as {Path(path).name}: the name must end in {' or '.join(SAVE_OPTIONS)}")
    import matplotlib

    theme = get_theme(theme_name)
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # ignore the user's own settings
        matplotlib.rcParams.update(plot_style(theme))
        buffer = io.BytesIO()
        draw(theme).savefig(buffer, format=suffix[1:], **SAVE_OPTIONS[suffix])
    write_atomically(path, buffer.getvalue())


# --- Attention weights of single heads -----------------------------------------------------------------

NUM_COLUMNS = 3  # heat maps in a row
MIN_LINE_WEIGHT = 0.05  # smaller weights are not drawn as lines


class HeadPicture(NamedTuple):
    """Attention weights [T, S] of one head over one text, with a title, a class name, tokens and cells to mark."""

    title: str
    name: str
    weights: Array
    query_tokens: Sequence[str]
    key_tokens: Sequence[str]
    marked_cells: Sequence[tuple[int, int]] = ()


def draw_gallery(pictures: Sequence[HeadPicture], title: str, theme: FigureTheme) -> Figure:
    """Draw a heat map for each head: queries from top to bottom, keys from left to right, gold dependencies marked."""
    from matplotlib.figure import Figure

    rows = -(-len(pictures) // NUM_COLUMNS)
    columns = min(NUM_COLUMNS, len(pictures))
    figure = Figure(figsize=(3.1 * columns, 3.2 * rows + 0.4), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=9)
    for number, picture in enumerate(pictures, 1):
        _draw_heat_map(figure.add_subplot(rows, columns, number), picture, theme)
    return figure


def _draw_heat_map(axes: Axes, picture: HeadPicture, theme: FigureTheme) -> None:
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Rectangle

    ramp = LinearSegmentedColormap.from_list("weights", list(theme.colour_ramp))
    axes.imshow(np.sqrt(np.clip(picture.weights, 0, 1)), cmap=ramp, vmin=0, vmax=1, interpolation="nearest")
    for t, s in picture.marked_cells:
        axes.add_patch(Rectangle((s - 0.5, t - 0.5), 1, 1, fill=False, edgecolor=theme.pair_colours[1], lw=1.1))
    axes.set_xticks(
        range(len(picture.key_tokens)), [_shorten_token(word) for word in picture.key_tokens], rotation=90, fontsize=5.5
    )
    axes.set_yticks(
        range(len(picture.query_tokens)), [_shorten_token(word) for word in picture.query_tokens], fontsize=5.5
    )
    axes.tick_params(length=0, pad=1)
    letter, colour = class_style(picture.name, theme)
    axes.set_title(f"{letter}  {picture.title}", fontsize=7, color=theme.foreground)
    for side in axes.spines.values():
        side.set(visible=True, color=colour, linewidth=1.2)


def draw_head_overlay(first: HeadPicture, second: HeadPicture, theme: FigureTheme) -> Figure:
    """Draw the attention of two heads as lines from queries to keys, in one colour each."""
    from matplotlib.figure import Figure

    count = max(len(first.query_tokens), len(first.key_tokens))
    figure = Figure(figsize=(4.6, 0.21 * count + 0.9), layout="constrained")
    axes = figure.add_subplot()
    for picture, colour in zip((first, second), theme.pair_colours, strict=True):
        for t, s in np.argwhere(picture.weights >= MIN_LINE_WEIGHT).tolist():
            weight = float(picture.weights[t, s])
            axes.plot([0, 1], [t, s], color=colour, alpha=min(1.0, 0.12 + 0.88 * weight), lw=0.4 + 2.2 * weight)
    for x, words, side in ((-0.03, first.query_tokens, "right"), (1.03, first.key_tokens, "left")):
        for row, word in enumerate(words):
            axes.text(x, row, _shorten_token(word), ha=side, va="center", fontsize=7)
    for row, (picture, colour) in enumerate(zip((first, second), theme.pair_colours, strict=True)):
        axes.text(0.5, -2.4 + 0.9 * row, picture.title, ha="center", color=colour, fontsize=7.5, fontweight="bold")
    axes.set(xlim=(-0.5, 1.5), ylim=(count - 0.3, -3.2))
    axes.set_axis_off()
    return figure


def _shorten_token(word: str) -> str:
    """The token as at most 12 characters that can be drawn."""
    shown = replace_undrawable(word.strip()) or "·"
    return shown if len(shown) <= 12 else f"{shown[:11]}…"


# --- All heads of a model ------------------------------------------------------------------------------

CELL_SIZE = 0.32  # inches
MAX_LABELLED_HEADS = 24  # labels on an axis; with more heads, labels are left out


def draw_head_grid(table: HeadTable, theme: FigureTheme) -> Figure:
    """Draw every head of every layer as a cell with the letter and colour of its first class, stronger for a higher
    score.
    """
    from matplotlib.figure import Figure

    sites = table.sites
    num_heads = max(head.head for head in table.heads) + 1
    inches = max(4.6, num_heads * CELL_SIZE + 2.6), len(sites) * CELL_SIZE + 1.5
    figure = Figure(figsize=inches, layout="constrained")
    axes = figure.add_subplot()
    for head in table.heads:
        _draw_cell(axes, head.head, sites.index(head.site), head, theme)
    axes.set(xlim=(-0.5, num_heads - 0.5), ylim=(len(sites) - 0.5, -0.5), aspect="equal", xlabel="head")
    axes.set_title(f"Heads of {table.model}, {table.texts}")
    _set_ticks(axes.set_xticks, range(num_heads), [str(n) for n in range(num_heads)])
    _set_ticks(axes.set_yticks, range(len(sites)), list(sites))
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    _draw_legend(figure, table, theme)
    return figure


def _draw_cell(axes: Axes, x: int, y: int, head: HeadMeasures, theme: FigureTheme) -> None:
    from matplotlib.patches import Rectangle

    first = head.classes[0] if head.classes else None
    letter, colour = class_style(first.name, theme) if first else ("", theme.empty_cell)
    strength = 0.35 + 0.65 * first.score if first and first.name != "unclear" else 1.0
    box = Rectangle((x - 0.47, y - 0.47), 0.94, 0.94, facecolor=colour, alpha=strength, edgecolor=theme.muted, lw=0.3)
    axes.add_patch(box)
    axes.text(x, y, letter, ha="center", va="center", fontsize=7, color=theme.foreground)


def _draw_legend(figure: Figure, table: HeadTable, theme: FigureTheme) -> None:
    from matplotlib.patches import Patch

    present = {class_group(head_class.name) for head in table.heads for head_class in head.classes[:1]}
    handles = [
        Patch(
            facecolor=class_style(name, theme)[1],
            edgecolor=theme.muted,
            lw=0.3,
            label=f"{CLASS_STYLES[name][0]}  {name}",
        )
        for name in CLASS_STYLES
        if name in present
    ]
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=7, handlelength=1)


def _set_ticks(set_ticks: Any, positions: Sequence[int], labels: Sequence[str]) -> None:
    step = math.ceil(len(positions) / MAX_LABELLED_HEADS)
    set_ticks(list(positions)[::step], list(labels)[::step])


def draw_measure_by_layer(table: HeadTable, theme: FigureTheme, measure: str = "entropy") -> Figure:
    """Draw a measure of every head by layer: dots are heads with intervals, the line their mean, the dashed line
    chance.
    """
    from matplotlib.figure import Figure

    sites = table.sites
    figure = Figure(figsize=(6.4, 2.9), layout="constrained")
    axes = figure.add_subplot()
    means: list[float] = []
    for index, site in enumerate(sites):
        heads = [head for head in table.heads if head.site == site]
        for n, head in enumerate(heads):
            value = head.measures[measure]
            x = index + 0.5 * (n / max(1, len(heads) - 1) - 0.5)
            axes.plot([x, x], [value.low, value.high], color=theme.muted, lw=0.6)
            first_class = head.classes[0].name if head.classes else "unclear"
            colour = class_style(first_class, theme)[1]
            axes.plot(x, value.value, "o", ms=3.4, color=colour, mec=theme.foreground, mew=0.3)
        values = [head.measures[measure].value for head in heads]
        means.append(sum(values) / len(values))
    first_heads = [next(head for head in table.heads if head.site == site) for site in sites]
    chance = [head.measures[measure].chance for head in first_heads]
    axes.plot(range(len(sites)), means, color=theme.foreground, lw=1, label="mean of the layer")
    axes.plot(range(len(sites)), chance, "--", color=theme.muted, lw=1, label="chance")
    _set_ticks(axes.set_xticks, range(len(sites)), [site.removesuffix(".attention") for site in sites])
    axes.tick_params(axis="x", labelrotation=30)
    axes.set_title(f"{measure} by layer, {table.model}")
    axes.legend(fontsize=7)
    return figure


def draw_importance_curve(
    names: Sequence[str], values: Sequence[tuple[float, float, float]], title: str, theme: FigureTheme
) -> Figure:
    """Draw heads by decreasing importance; `values` are the value, low and high of each head."""
    from matplotlib.figure import Figure

    order = sorted(range(len(values)), key=lambda n: -values[n][0])
    figure = Figure(figsize=(6.4, 2.9), layout="constrained")
    axes = figure.add_subplot()
    ranks = range(len(order))
    axes.fill_between(
        ranks, [values[n][1] for n in order], [values[n][2] for n in order], color=theme.pair_colours[0], alpha=0.25
    )
    axes.plot(ranks, [values[n][0] for n in order], color=theme.pair_colours[0], marker=".", ms=3)
    axes.axhline(0, color=theme.muted, lw=0.6)
    for rank in list(ranks)[:5]:
        axes.annotate(
            names[order[rank]],
            (rank, values[order[rank]][0]),
            xytext=(4, 3),
            textcoords="offset points",
            fontsize=6.5,
            color=theme.foreground,
        )
    axes.set(xlabel="heads by decreasing importance")
    axes.set_title(title)
    return figure


def draw_head_map(table: HeadTable, positions: Array, theme: FigureTheme) -> Figure:
    """Draw heads at points [heads, 2] with their class colours; later layers have larger dots."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 5.2), layout="constrained")
    axes = figure.add_subplot()
    sites = table.sites
    for head, (x, y) in zip(table.heads, positions.tolist(), strict=True):
        colour = class_style(head.classes[0].name if head.classes else "unclear", theme)[1]
        depth = sites.index(head.site) / max(1, len(sites) - 1)
        axes.plot(x, y, "o", ms=7 + 6 * depth, color=colour, mec=theme.muted, mew=0.4, alpha=0.85)
        axes.text(
            x, y, f"{sites.index(head.site)}.{head.head}", ha="center", va="center", fontsize=5, color=theme.foreground
        )
    axes.set(aspect="equal", xticks=[], yticks=[])
    axes.set_title(f"{table.model}: similar heads are close; site.head, later is larger")
    _draw_legend(figure, table, theme)
    return figure


# --- Tables for a terminal -----------------------------------------------------------------------------

LINE_WIDTH = 80
HEADS_PER_CLASS = 2  # heads listed for each class
ColourFunction = Callable[[str, str], str]  # (text, class group) -> text with colour codes


def without_colour(text: str, group: str) -> str:
    """Return the text unchanged."""
    return text


def with_ansi_colour(text: str, group: str) -> str:
    """Return the text with ANSI codes for the colour of a class group."""
    colour = CLASS_STYLES[group][1]
    if not colour:
        return text
    red, green, blue = (int(colour[n : n + 2], 16) for n in (1, 3, 5))
    return f"\x1b[38;2;{red};{green};{blue}m{text}\x1b[0m"


def format_head_table(table: HeadTable, colour: ColourFunction = without_colour) -> str:
    """Format a table as a grid of class letters by layer, followed by the heads with the highest score in each
    class.
    """
    lines = [f"{table.model}, {table.texts}", "", *_grid_lines(table, colour), ""]
    for group in CLASS_STYLES:
        if group != "unclear":
            lines += _top_heads(table, group, colour)
    return "\n".join([*lines, *_note_lines(table)])


def format_head_ranking(table: HeadTable, measure: str) -> str:
    """Format heads by decreasing value of a measure: value, interval, chance and first classes.

    >>> from headwise.head_analysis.head_table import Measure
    >>> head = HeadMeasures(
    ...     "decoder", "attention", 0, 3, 0, "decoder.0.attention", {"sink": Measure(0.5, 0.4, 0.6, 0.1)}
    ... )
    >>> print(format_head_ranking(HeadTable("small", "9 texts", (head,)), "sink").splitlines()[-1])
    decoder.0.attention     3   0.50    0.40    0.60    0.10
    """
    heads = table.sorted_by(measure)
    width = max(len(head.site) for head in heads)
    lines = [
        f"{table.model}, {table.texts}",
        "",
        f"{'site'.ljust(width)}  head  {measure[:6]:>5}     low    high  chance",
    ]
    for head in heads:
        numbers = "   ".join(f"{number:>5.2f}" for number in head.measures[measure][:4])
        classes = ", ".join(f"{head_class.name} {head_class.score:.2f}" for head_class in head.classes[:2])
        line = f"{head.site.ljust(width)}  {head.head:>4}  {numbers}  {classes}".rstrip()
        lines.append(line if len(line) <= LINE_WIDTH else f"{line[: LINE_WIDTH - 1]}…")
    return "\n".join([*lines, *_note_lines(table)])


def _grid_lines(table: HeadTable, colour: ColourFunction) -> Iterator[str]:
    sites = table.sites
    width = max(len(site) for site in sites)
    head_at = {(head.site, head.head): head for head in table.heads}
    num_heads = max(head.head for head in table.heads) + 1
    columns = max(1, (LINE_WIDTH - width - 2) // 3)
    for start in range(0, num_heads, columns):
        numbers = range(start, min(num_heads, start + columns))
        yield f"{'head'.ljust(width)}  {''.join(str(n).rjust(2) + ' ' for n in numbers)}".rstrip()
        for site in sites:
            cells = [_cell_letter(head_at.get((site, n)), colour) for n in numbers]
            yield f"{site.ljust(width)}  {''.join(cells)}".rstrip()


def _cell_letter(head: HeadMeasures | None, colour: ColourFunction) -> str:
    """Letter of the first class, lower case if its score is below 0.5."""
    if head is None:
        return "   "
    if not head.classes:
        return " · "
    group = class_group(head.classes[0].name)
    letter = "·" if group == "unclear" else CLASS_STYLES[group][0]
    return " " + colour(letter if head.classes[0].score >= 0.5 else letter.lower(), group) + " "


def _top_heads(table: HeadTable, group: str, colour: ColourFunction) -> Iterator[str]:
    members = [
        (head_class, head)
        for head in table.heads
        for head_class in head.classes
        if class_group(head_class.name) == group
    ]
    members.sort(key=lambda member: -member[0].score)
    if not members:
        return
    count = len({id(head) for _, head in members})
    yield colour(f"{CLASS_STYLES[group][0]}  {group}", group) + f", {count} head{'s' if count > 1 else ''}"
    for head_class, head in members[:HEADS_PER_CLASS]:
        yield from textwrap.wrap(
            f"{head.site} {head.head}: {head_class.name} {head_class.score:.2f}, {head_class.evidence}",
            LINE_WIDTH,
            initial_indent="   ",
            subsequent_indent="   ",
        )


def _note_lines(table: HeadTable) -> list[str]:
    if not table.notes:
        return []
    return ["", *(line for note in table.notes for line in textwrap.wrap(f"note: {note}", LINE_WIDTH))]
