"""Colours, letters and styles of drawings of heads, for light and for dark paper."""

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

SAVE_OPTIONS: dict[str, dict[str, Any]] = {".svg": {"metadata": {"Date": None}}, ".png": {"dpi": 160}}
# Okabe and Ito's colours; a class is told by its letter as well, never by its hue alone.
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
# Fonts that know Chinese, Japanese and Korean, by the names of usual systems.
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
    """What a drawing stands on: the paper itself, ink, faint ink, what is empty, the ramp of weights,
    and two colours to tell apart.
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
    """The paper of this name."""
    if name not in FIGURE_THEMES:
        raise SpecError(f"there is no paper {name!r}; give light or dark")
    return FIGURE_THEMES[name]


def class_group(name: str) -> str:
    """The group of classes that share a letter and a colour: relations are syntactic, distances positional.

    >>> class_group("syntactic det to its governor"), class_group("previous"), class_group("rare-token")
    ('syntactic', 'positional', 'rare-token')
    """
    first = name.partition(" ")[0]
    return {"offset": "positional", "first": "sink"}.get(first, "positional" if first in OFFSET_CLASSES else first)


def class_style(name: str, theme: FigureTheme) -> tuple[str, str]:
    """The letter and the colour of a class."""
    letter, colour = CLASS_STYLES.get(class_group(name), ("?", theme.muted))
    return letter, colour or theme.empty_cell


def list_fonts() -> list[str]:
    """matplotlib's own font, and behind it those that are installed here and know more signs."""
    from matplotlib.font_manager import fontManager

    there = {font.name for font in fontManager.ttflist}
    return [DEFAULT_FONT, *(name for name in FALLBACK_FONTS if name in there)]


def replace_undrawable(text: str) -> str:
    """The text with a box for every sign that no font here can draw."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    known = [get_font(findfont(FontProperties(family=name))).get_charmap() for name in list_fonts()]
    return "".join(char if any(ord(char) in one for one in known) and char.isprintable() else "□" for char in text)


def plot_style(theme: FigureTheme) -> Any:
    """What matplotlib is told before anything is drawn."""
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
    """Draw into an SVG or a PNG: the same numbers are the same file."""
    suffix = Path(path).suffix
    if suffix not in SAVE_OPTIONS:
        raise SpecError(f"{Path(path).name} ends in none of {', '.join(SAVE_OPTIONS)}; give one of these")
    import matplotlib

    on = get_theme(theme_name)
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever a user's own settings are
        matplotlib.rcParams.update(plot_style(on))
        written = io.BytesIO()
        draw(on).savefig(written, format=suffix[1:], **SAVE_OPTIONS[suffix])
    write_atomically(path, written.getvalue())


# --- Heads at work on one text -------------------------------------------------------------------------

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
    axes.set_xticks(
        range(len(one.key_tokens)), [_shorten_token(word) for word in one.key_tokens], rotation=90, fontsize=5.5
    )
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


# --- A model's heads drawn -----------------------------------------------------------------------------

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
        Patch(
            facecolor=class_style(name, paper)[1],
            edgecolor=paper.muted,
            lw=0.3,
            label=f"{CLASS_STYLES[name][0]}  {name}",
        )
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


def draw_importance_curve(
    names: Sequence[str], values: Sequence[tuple[float, float, float]], title: str, theme: FigureTheme
) -> Figure:
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
        axes.annotate(
            names[order[place]],
            (place, values[order[place]][0]),
            xytext=(4, 3),
            textcoords="offset points",
            fontsize=6.5,
            color=theme.foreground,
        )
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
        axes.text(
            x, y, f"{sites.index(one.site)}.{one.head}", ha="center", va="center", fontsize=5, color=theme.foreground
        )
    axes.set(aspect="equal", xticks=[], yticks=[])
    axes.set_title(f"{table.model}: near are heads that read alike; site.head, larger is later")
    _draw_legend(figure, table, theme)
    return figure


# --- The heads of a model on a terminal ----------------------------------------------------------------

LINE_WIDTH = 80
HEADS_PER_CLASS = 2  # heads that are told of each class
ColourFunction = Callable[[str, str], str]  # a text, and the name of a group of classes


def without_colour(text: str, group: str) -> str:
    """No colour."""
    return text


def with_ansi_colour(text: str, group: str) -> str:
    """In the colour of a group of classes, for a terminal that shows colours."""
    colour = CLASS_STYLES[group][1]
    if not colour:
        return text
    red, green, blue = (int(colour[n : n + 2], 16) for n in (1, 3, 5))
    return f"\x1b[38;2;{red};{green};{blue}m{text}\x1b[0m"


def format_head_table(table: HeadTable, colour: ColourFunction = without_colour) -> str:
    """A grid of letters, layer by layer, and below it the surest heads of each class."""
    lines = [f"{table.model}, {table.texts}", "", *_grid_lines(table, colour), ""]
    for group in CLASS_STYLES:
        if group != "unclear":
            lines += _top_heads(table, group, colour)
    return "\n".join([*lines, *_note_lines(table)])


def format_head_ranking(table: HeadTable, measure: str) -> str:
    """Heads with the most of a measure first: the value, its interval, chance, and the first classes.

    >>> from headwise.head_analysis.head_table import Measure
    >>> head = HeadMeasures(
    ...     "decoder", "attention", 0, 3, 0, "decoder.0.attention", {"sink": Measure(0.5, 0.4, 0.6, 0.1)}
    ... )
    >>> print(format_head_ranking(HeadTable("small", "9 texts", (head,)), "sink").splitlines()[-1])
    decoder.0.attention     3   0.50    0.40    0.60    0.10
    """
    heads = table.sorted_by(measure)
    wide = max(len(one.site) for one in heads)
    lines = [
        f"{table.model}, {table.texts}",
        "",
        f"{'site'.ljust(wide)}  head  {measure[:6]:>5}     low    high  chance",
    ]
    for one in heads:
        numbers = "   ".join(f"{number:>5.2f}" for number in one.measures[measure])
        classes = ", ".join(f"{named.name} {named.score:.2f}" for named in one.classes[:2])
        line = f"{one.site.ljust(wide)}  {one.head:>4}  {numbers}  {classes}".rstrip()
        lines.append(line if len(line) <= LINE_WIDTH else f"{line[: LINE_WIDTH - 1]}…")
    return "\n".join([*lines, *_note_lines(table)])


def _grid_lines(table: HeadTable, paint: ColourFunction) -> Iterator[str]:
    sites = table.sites
    wide = max(len(site) for site in sites)
    heads = {(one.site, one.head): one for one in table.heads}
    count = max(one.head for one in table.heads) + 1
    across = max(1, (LINE_WIDTH - wide - 2) // 3)
    for start in range(0, count, across):
        some = range(start, min(count, start + across))
        yield f"{'head'.ljust(wide)}  {''.join(str(n).rjust(2) + ' ' for n in some)}".rstrip()
        for site in sites:
            cells = [_cell_letter(heads.get((site, n)), paint) for n in some]
            yield f"{site.ljust(wide)}  {''.join(cells)}".rstrip()


def _cell_letter(one: HeadMeasures | None, paint: ColourFunction) -> str:
    """The letter of the first class, small where it is not sure of half."""
    if one is None:
        return "   "
    if not one.classes:
        return " · "
    group = class_group(one.classes[0].name)
    letter = "·" if group == "unclear" else CLASS_STYLES[group][0]
    return " " + paint(letter if one.classes[0].score >= 0.5 else letter.lower(), group) + " "


def _top_heads(table: HeadTable, group: str, paint: ColourFunction) -> Iterator[str]:
    found = [(named, one) for one in table.heads for named in one.classes if class_group(named.name) == group]
    found.sort(key=lambda pair: -pair[0].score)
    if not found:
        return
    count = len({id(one) for _, one in found})
    yield paint(f"{CLASS_STYLES[group][0]}  {group}", group) + f", {count} head{'s' if count > 1 else ''}"
    for named, one in found[:HEADS_PER_CLASS]:
        yield from textwrap.wrap(
            f"{one.site} {one.head}: {named.name} {named.score:.2f}, {named.evidence}",
            LINE_WIDTH,
            initial_indent="   ",
            subsequent_indent="   ",
        )


def _note_lines(table: HeadTable) -> Sequence[str]:
    return (
        ["", *(line for note in table.notes for line in textwrap.wrap(f"note: {note}", LINE_WIDTH))]
        if table.notes
        else []
    )
