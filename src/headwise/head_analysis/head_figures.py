"""Drawings of all heads of a model for light and dark backgrounds, and tables of heads for a
terminal.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SpecError, pluralise
from ..files import write_atomically
from ..output_paths import FIGURE_FILE, FIGURE_METADATA, check_output
from ..report.text import pad, wrap
from .head_metrics import HEAD_METRICS
from .head_table import HeadMeasures, HeadTable
from .measure_tables import LINE_WIDTH, format_notes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .head_similarity import PlaneEmbedding

# --- Themes, colours and fonts --------------------------------------------------------------------

SAVE_OPTIONS: dict[str, dict[str, Any]] = {".svg": {}, ".png": {"dpi": 160}}
# Letter and colour of each class. Colours are those of Okabe and Ito; the letter distinguishes
# classes without colour.
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
    "neighbour": ("N", "#44AA99"),
    "row": ("H", "#882255"),
    "column": ("V", "#117733"),
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
    """Colours of a drawing: background, text, muted text, empty cells, the ramp of weights, and two
    colours for pairs.
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
        "light",
        "#FFFFFF",
        "#1A1A1A",
        "#8A8A8A",
        "#F2F2F2",
        ("#FFFFFF", "#3A2A8C"),
        ("#0072B2", "#D55E00"),
    ),
    "dark": FigureTheme(
        "dark",
        "#14161A",
        "#E8E8E8",
        "#8C939C",
        "#23262C",
        ("#14161A", "#5FD7E8"),
        ("#56B4E9", "#E8833A"),
    ),
}


def get_theme(name: str) -> FigureTheme:
    """Return the theme of this name."""
    if name not in FIGURE_THEMES:
        raise SpecError(f"unknown theme {name!r}; use light or dark")
    return FIGURE_THEMES[name]


def class_group(name: str) -> str:
    """Group of a class, which has one letter and one colour: relations are syntactic, distances
    positional.

    >>> (
    ...     class_group("syntactic det to its governor"),
    ...     class_group("previous"),
    ...     class_group("rare-token"),
    ... )
    ('syntactic', 'positional', 'rare-token')
    """
    first = name.partition(" ")[0]
    return {"offset": "positional", "first": "sink"}.get(
        first, "positional" if first in OFFSET_CLASSES else first
    )


def class_style(name: str, theme: FigureTheme) -> tuple[str, str]:
    """Letter and colour of a class."""
    letter, colour = CLASS_STYLES.get(class_group(name), ("?", theme.muted))
    return letter, colour or theme.empty_cell


_known_files: set[str] = (
    set()
)  # font files of matplotlib's list, once this process has looked for others


def list_fonts() -> list[str]:
    """Names of matplotlib's own font and of the installed fallback fonts, also newer ones than it
    stored.
    """
    from matplotlib.font_manager import findSystemFonts, fontManager

    if not _known_files and not any(font.name in FALLBACK_FONTS for font in fontManager.ttflist):
        _known_files.update(font.fname for font in fontManager.ttflist)
        for path in sorted({*findSystemFonts()} - _known_files):
            with suppress(
                Exception
            ):  # a font that matplotlib cannot read, for whatever reason, as in its own list
                fontManager.addfont(path)
    installed = {font.name for font in fontManager.ttflist}
    return [DEFAULT_FONT, *(name for name in FALLBACK_FONTS if name in installed)]


def wrap_title(text: str, inches: float, font_size: float) -> str:
    """The text in lines that fit a width; a bold character is about 0.64 of the font size wide.

    >>> wrap_title("Heads of a model", 0.7, 8.0)
    'Heads of\\na model'
    """
    return textwrap.fill(text, max(8, int(72 * inches / (0.64 * font_size))))


def text_colour_on(colour: str, alpha: float, theme: FigureTheme) -> str:
    """Black or white, whichever is easier to read on a colour with this opacity.

    >>> (
    ...     text_colour_on("#F0E442", 1.0, FIGURE_THEMES["dark"]),
    ...     text_colour_on("#F0E442", 0.1, FIGURE_THEMES["dark"]),
    ... )
    ('#000000', '#FFFFFF')
    """
    from matplotlib.colors import to_rgb

    shown = [
        alpha * own + (1 - alpha) * below
        for own, below in zip(to_rgb(colour), to_rgb(theme.background), strict=True)
    ]
    return "#000000" if is_light(shown) else "#FFFFFF"


def is_light(rgb: Sequence[float]) -> bool:
    """Return True if black is easier to read than white on a colour with parts from 0 to 1."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in rgb]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return luminance > 0.179  # where both have the same contrast


def find_undrawable(text: str) -> list[str]:
    """The characters that no listed font can draw, each once."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    charmaps = [
        get_font(findfont(FontProperties(family=name))).get_charmap() for name in list_fonts()
    ]
    return [
        char
        for char in dict.fromkeys(text)
        if char != "\n"
        and not (char.isprintable() and any(ord(char) in charmap for charmap in charmaps))
    ]


def name_undrawable(text: str) -> str:
    """The text with the code point in place of every character that no listed font can draw.

    >>> name_undrawable("a\x07b")
    'aU+0007b'
    """
    for char in find_undrawable(text):
        text = text.replace(char, f"U+{ord(char):04X}")
    return text


FONT_NOTE = (
    "No installed font has Chinese characters. Install one, as the package "
    "fonts-noto-cjk, and draw again."
)
CODE_POINT = re.compile(
    "U\\+[2-9A-F][0-9A-F]{3}"
)  # of a character beyond those of European languages
TOKEN_LABEL = "token"  # of texts of a figure that are tokens


def note_missing_font(figure: Figure) -> None:
    """Write below a figure which package to install if its tokens are named by code points."""
    from matplotlib.text import Text

    tokens: list[Text] = [text for text in figure.findobj(Text) if text.get_label() == TOKEN_LABEL]
    for axes in figure.axes:
        tokens += [*axes.get_xticklabels(), *axes.get_yticklabels()]
    has_code_point = any(CODE_POINT.search(text.get_text()) for text in tokens)
    if has_code_point and not figure.get_supxlabel():
        # below legends at the lower edge
        figure.supxlabel(FONT_NOTE, y=-0.01, verticalalignment="top", fontsize=6)


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


def save_figure(
    draw: Callable[[FigureTheme], Figure],
    path: Path | str,
    theme_name: str = "light",
    *,
    overwrite: bool = False,
) -> None:
    """Draw a figure into an SVG or PNG file; equal data gives an equal file. `overwrite` replaces
    an earlier figure.
    """
    suffix = Path(path).suffix
    if suffix not in SAVE_OPTIONS:
        raise SpecError(
            f"cannot save a figure as {Path(path).name}: the name must end in "
            f"{' or '.join(SAVE_OPTIONS)}"
        )
    theme, buffer = get_theme(theme_name), io.BytesIO()
    path = check_output(path, FIGURE_FILE, "overwrite" if overwrite else "refuse")
    with figure_style(theme):
        figure = draw(theme)
        note_missing_font(figure)
        extra: dict[str, Any] = (
            {"bbox_inches": "tight"} if figure.get_supxlabel() == FONT_NOTE else {}
        )
        figure.savefig(
            buffer,
            format=suffix[1:],
            metadata=FIGURE_METADATA[suffix],
            **SAVE_OPTIONS[suffix],
            **extra,
        )
    write_atomically(path, buffer.getvalue())


@contextmanager
def figure_style(theme: FigureTheme) -> Iterator[None]:
    """Settings of matplotlib for a theme, without the user's own."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(plot_style(theme))
        yield


# --- All heads of a model -------------------------------------------------------------------------

CELL_SIZE = 0.32  # inches
MAX_LABELLED_HEADS = 24  # labels on an axis; with more heads, labels are left out
NUM_NAMED_HEADS = 5  # named beside the curve of importance
MEASURE_UNITS = {"entropy": "nats", "distance": "tokens"}


def draw_head_grid(table: HeadTable, theme: FigureTheme) -> Figure:
    """Draw every head of every layer as a cell with the letter and colour of its first class,
    stronger for a higher score.
    """
    from matplotlib.figure import Figure

    sites = table.sites
    num_heads = max(head.head for head in table.heads) + 1
    name_width = 0.075 * max(map(len, sites)) + 0.6
    inches = max(5.2, num_heads * CELL_SIZE + name_width), len(sites) * CELL_SIZE + 1.6
    figure = Figure(figsize=inches, layout="constrained")
    axes = figure.add_subplot()
    for head in table.heads:
        _draw_cell(axes, head.head, sites.index(head.site), head, theme)
    axes.set(xlim=(-0.5, num_heads - 0.5), ylim=(len(sites) - 0.5, -0.5), aspect="equal")
    axes.set(xlabel="head", ylabel="attention layer")
    figure.suptitle(
        wrap_title(f"{table.model}: class of every head, {table.texts}", inches[0], 9),
        **_TITLE_STYLE,
    )
    _set_ticks(axes.set_xticks, range(num_heads), [str(n) for n in range(num_heads)])
    _set_ticks(axes.set_yticks, range(len(sites)), list(sites))
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    _draw_legend(
        figure, table, theme, "class with the highest score; a stronger colour is a higher score"
    )
    return figure


_TITLE_STYLE: dict[str, Any] = {"x": 0.01, "ha": "left", "fontweight": "bold", "fontsize": 9}


def _draw_cell(axes: Axes, x: int, y: int, head: HeadMeasures, theme: FigureTheme) -> None:
    from matplotlib.patches import Rectangle

    first = head.classes[0] if head.classes else None
    letter, colour = class_style(first.name, theme) if first else ("", theme.empty_cell)
    strength = 0.35 + 0.65 * first.score if first and first.name != "unclear" else 1.0
    box = Rectangle(
        (x - 0.47, y - 0.47),
        0.94,
        0.94,
        facecolor=colour,
        alpha=strength,
        edgecolor=theme.muted,
        lw=0.3,
    )
    axes.add_patch(box)
    axes.text(
        x,
        y,
        letter,
        ha="center",
        va="center",
        fontsize=7,
        color=text_colour_on(colour, strength, theme),
    )


def _draw_legend(figure: Figure, table: HeadTable, theme: FigureTheme, title: str) -> None:
    from matplotlib.patches import Patch

    present = {
        class_group(head_class.name) for head in table.heads for head_class in head.classes[:1]
    }
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
        figure.legend(
            handles=handles,
            loc="outside lower center",
            ncols=4,
            fontsize=7,
            handlelength=1,
            title=wrap_title(title, figure.get_figwidth() - 0.4, 7),
            title_fontsize=7,
        )


def _set_ticks(set_ticks: Any, positions: Sequence[int], labels: Sequence[str]) -> None:
    step = math.ceil(len(positions) / MAX_LABELLED_HEADS)
    set_ticks(list(positions)[::step], list(labels)[::step])


def draw_measure_by_layer(table: HeadTable, theme: FigureTheme, measure: str = "entropy") -> Figure:
    """Draw a measure of every head by layer: dots are heads with intervals, the line their mean,
    the dashed line chance.
    """
    from matplotlib.figure import Figure

    sites = table.sites
    figure = Figure(figsize=(6.4, 3.9), layout="constrained")
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
    names = [site.removesuffix(".attention") for site in sites]
    _set_ticks(axes.set_xticks, range(len(sites)), names)
    axes.tick_params(
        axis="x", labelrotation=0 if 0.075 * sum(len(name) + 1 for name in names) < 5.0 else 90
    )
    unit = MEASURE_UNITS.get(measure) or (
        HEAD_METRICS[measure].description if measure in HEAD_METRICS else ""
    )
    axes.set(xlabel="attention layer", ylabel=f"{measure} ({unit})" if unit else measure)
    axes.ticklabel_format(axis="y", useOffset=False)  # ticks are values, not differences from one
    figure.suptitle(
        wrap_title(f"{table.model}: {measure} of every head, {table.texts}", 6.4, 9), **_TITLE_STYLE
    )
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    _draw_legend(
        figure,
        table,
        theme,
        "dots are heads with 95 % intervals; colour: class with the highest score",
    )
    return figure


def draw_importance_curve(
    names: Sequence[str],
    values: Sequence[tuple[float, float, float]],
    title: str,
    theme: FigureTheme,
    axis_label: str = "importance",
) -> Figure:
    """Draw heads by decreasing importance; `values` are the value, low and high of each head."""
    from matplotlib.figure import Figure

    order = sorted(range(len(values)), key=lambda n: -values[n][0])
    figure = Figure(figsize=(6.4, 3.1), layout="constrained")
    axes = figure.add_subplot()
    ranks = range(len(order))
    axes.fill_between(
        ranks,
        [values[n][1] for n in order],
        [values[n][2] for n in order],
        color=theme.pair_colours[0],
        alpha=0.25,
        label="95 % interval",
    )
    axes.plot(
        ranks,
        [values[n][0] for n in order],
        color=theme.pair_colours[0],
        marker=".",
        ms=3,
        label="head",
    )
    axes.axhline(0, color=theme.muted, lw=0.6)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4))
    axes.set(xlabel="heads by decreasing importance", ylabel=axis_label)
    figure.suptitle(wrap_title(title, 6.4, 9), **_TITLE_STYLE)
    most = [f"{rank}  {names[n]}" for rank, n in enumerate(order[:NUM_NAMED_HEADS])]
    axes.legend(
        *axes.get_legend_handles_labels(),
        title="\n".join(["most important:", *most, ""]),
        title_fontsize=6.5,
        fontsize=6.5,
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        alignment="left",
    )
    return figure


def draw_head_map(table: HeadTable, embedding: PlaneEmbedding, theme: FigureTheme) -> Figure:
    """Draw heads as points of an embedding with their class colours; later layers have larger dots.

    A label names the layer and the head. Labels that would overlap others are left out, and a note
    says how many.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 6.2), layout="constrained")
    axes = figure.add_subplot()
    sites = table.sites
    for head, (x, y) in zip(table.heads, embedding.points.tolist(), strict=True):
        colour = class_style(head.classes[0].name if head.classes else "unclear", theme)[1]
        axes.plot(
            x, y, "o", ms=_dot_size(head, sites), color=colour, mec=theme.muted, mew=0.4, alpha=0.85
        )
    axes.margins(0.08)
    axes.set(aspect="equal", xticks=[], yticks=[])
    for side in axes.spines.values():
        side.set_visible(False)
    figure.suptitle(wrap_title(f"{table.model}: similar heads are close", 5.6, 9), **_TITLE_STYLE)
    _draw_length(axes, embedding, theme)
    note = (
        "labels are layer.head; larger dots are later layers; colour: class with the highest score"
    )
    _draw_legend(figure, table, theme, note)
    note_of_labels = axes.set_title(
        " ", fontsize=6.5, fontweight="normal"
    )  # keeps its place in the layout
    note_missing_font(figure)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # labels are placed in the final layout
    if left_out := _label_heads(axes, table, embedding, theme):
        heads = "1 head is" if left_out == 1 else f"{left_out} heads are"
        note_of_labels.set_text(f"{heads} without a label, too close to others")
    return figure


def _dot_size(head: HeadMeasures, sites: Sequence[str]) -> float:
    """Diameter of a head's dot in points."""
    return 10 + 5 * sites.index(head.site) / max(1, len(sites) - 1)


def _draw_length(axes: Axes, embedding: PlaneEmbedding, theme: FigureTheme) -> None:
    """Draw a bar of a round length below the points, because the plane has no other axis."""
    low, high = embedding.points.min(0), embedding.points.max(0)
    span = float(max(high - low)) or 1.0
    length = next(
        size for size in (10.0**-n * m for n in range(9) for m in (5, 2, 1)) if size <= 0.3 * span
    )
    x, y = float(low[0]), float(low[1]) - 0.07 * span
    axes.plot([x, x + length], [y, y], color=theme.foreground, lw=1.5, solid_capstyle="butt")
    text = (
        f"{length:g} nats of Jensen-Shannon divergence without sinks; stress of the map "
        f"{embedding.stress:.2f}"
    )
    axes.text(x, y - 0.025 * span, text, ha="left", va="top", fontsize=6.5)


def _label_heads(
    axes: Axes, table: HeadTable, embedding: PlaneEmbedding, theme: FigureTheme
) -> int:
    """Write the label of every head on its dot or beside it unless it would overlap another; return
    the number left.
    """
    from matplotlib.transforms import Bbox

    figure, sites = axes.figure, table.sites
    pixels_per_point = figure.dpi / 72
    occupied: list[Bbox] = [text.get_window_extent() for text in axes.texts]
    left_out = 0
    places = axes.transData.transform(embedding.points)
    for head, point, place in zip(table.heads, embedding.points.tolist(), places, strict=True):
        label, radius = f"{head.layer}.{head.head}", _dot_size(head, sites) / 2
        half = 1.75 * len(label) + 0.5, 3.0  # half the size of a label of 5 points
        steps = [(0.0, 0.0), *((dx, dy) for dx in (1, -1, 0) for dy in (0, 1, -1) if dx or dy)]
        for dx, dy in steps if half[0] <= radius + 1 else steps[1:]:
            x, y = dx * (radius + half[0]), dy * (radius + half[1])
            ends = [[x - half[0], y - half[1]], [x + half[0], y + half[1]]]
            box = Bbox(
                [[float(place[n] + pixels_per_point * end[n]) for n in range(2)] for end in ends]
            )
            if not any(box.overlaps(other) for other in occupied):
                occupied.append(box)
                colour = class_style(head.classes[0].name if head.classes else "unclear", theme)[1]
                inside = text_colour_on(colour, 0.85, theme) if not (dx or dy) else theme.foreground
                axes.annotate(
                    label,
                    point,
                    xytext=(x, y),
                    textcoords="offset points",
                    ha="center",
                    va="center",
                    fontsize=5,
                    color=inside,
                )
                break
        else:
            left_out += 1
    return left_out


# --- Tables for a terminal ------------------------------------------------------------------------

HEADS_PER_CLASS = 2  # heads listed for each class
ColourFunction = Callable[[str, str], str]  # (text, class group) -> text with colour codes


def without_colour(text: str, group: str) -> str:
    """Return the text unchanged."""
    return text


def with_ansi_colour(text: str, group: str) -> str:
    """Return the text in black or white on the colour of a class group, legible in light and dark
    terminals.
    """
    colour = CLASS_STYLES[group][1]
    if not colour:
        return text
    red, green, blue = (int(colour[n : n + 2], 16) for n in (1, 3, 5))
    ink = (
        16 if is_light((red / 255, green / 255, blue / 255)) else 231
    )  # black and white of the 256 fixed colours
    return f"\x1b[48;2;{red};{green};{blue};38;5;{ink}m{text}\x1b[0m"


def format_head_table(table: HeadTable, colour: ColourFunction = without_colour) -> str:
    """Format a table: the legend of the class letters, a grid of them by layer, and the heads with
    the highest score in each class.
    """
    lines = [
        f"{table.model}, {table.texts}",
        "",
        *_legend_lines(table),
        "",
        *_grid_lines(table, colour),
    ]
    groups = [group for group in CLASS_STYLES if group != "unclear"]
    top_heads = [line for group in groups for line in _top_heads(table, group, colour)]
    return "\n".join([*lines, *([""] if top_heads else []), *top_heads, *format_notes(table.notes)])


def _legend_lines(table: HeadTable) -> list[str]:
    """Explain the letters of the grid."""
    groups = {
        class_group(head.classes[0].name) if head.classes else "unclear" for head in table.heads
    }
    letters = [f"{_class_letter(group)} {group}" for group in CLASS_STYLES if group in groups]
    return wrap(f"{', '.join(letters)}; in lower case if the score is below 0.5")


def _grid_lines(table: HeadTable, colour: ColourFunction) -> Iterator[str]:
    sites = table.sites
    width = max(len(site) for site in sites)
    head_at = {(head.site, head.head): head for head in table.heads}
    num_heads = max(head.head for head in table.heads) + 1
    columns = max(1, (LINE_WIDTH - width - 2) // 3)
    for start in range(0, num_heads, columns):
        numbers = range(start, min(num_heads, start + columns))
        yield (f"{pad('head', width)}  {''.join(str(n).rjust(2) + ' ' for n in numbers)}").rstrip()
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
    letter = _class_letter(group)
    return " " + colour(letter if head.classes[0].score >= 0.5 else letter.lower(), group) + " "


def _class_letter(group: str) -> str:
    return "·" if group == "unclear" else CLASS_STYLES[group][0]


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
    title = colour(f"{CLASS_STYLES[group][0]}  {group}", group)
    yield f"{title}, {pluralise(count, 'head')}"
    for head_class, head in members[:HEADS_PER_CLASS]:
        measured = f"{head_class.name} {head_class.score:.2f}, {head_class.evidence}"
        yield from wrap(f"{head.site} {head.head}: {measured}", indent="   ")
