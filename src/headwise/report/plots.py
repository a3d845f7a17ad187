"""Figures drawn with matplotlib: one style for light and for dark backgrounds, one palette.

Equal data gives an equal file. Characters that no installed font has are named by their code
points.
"""

from __future__ import annotations

import io
import math
import re
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..util.errors import SpecError
from ..util.escaping import escape_svg
from ..util.files import write_atomically
from ..util.output_paths import FIGURE_FILE, FIGURE_METADATA, Existing, check_output
from .data import Axis, Bars, Dendrogram, Figure, HeatMap, Links, Panel, Plot, Reference, Series
from .text import format_count, is_light, spread_labels, wrap

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

SAVE_OPTIONS: Mapping[str, Mapping[str, Any]] = {".svg": {}, ".png": {"dpi": 160}, ".pdf": {}}
FONT_SIZE = 8.0
MARKERS = "os^Dv"
DASHES: Sequence[Any] = ("-", (0, (5, 1.5)), (0, (1, 1.2)))  # for more lines than colours
MAX_TICK_LABELS = 40  # on an axis of cells; with more, every second, third, ... has one
TICK_INCHES = 0.13  # of a label on an axis of cells
MAX_LABEL = 24  # characters of a label on an axis of cells
SCALE_TICKS = (0.0, 0.01, 0.05, 0.2, 0.5, 1.0)  # values marked on the scale of heat maps
DEFAULT_FONT = "DejaVu Sans"
# Fonts with Chinese, Japanese and Korean characters on common systems.
FALLBACK_FONTS = (
    *("Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "WenQuanYi Zen Hei"),
    *("WenQuanYi Micro Hei", "PingFang SC", "Hiragino Sans GB", "Microsoft YaHei", "SimHei"),
    "Arial Unicode MS",
)


@dataclass(frozen=True)
class Theme:
    """Colours of a drawing; `palette` is Okabe and Ito's, readable on the background."""

    name: str
    background: str
    text: str
    muted: str
    empty: str
    ramp: tuple[str, str]  # of heat maps
    palette: tuple[str, ...]

    def colour(self, name: str, number: int = 0) -> str:
        """Return a colour by name, "#rrggbb" as it is, or without a name the colour of a series."""
        named = {"": self.palette[number % len(self.palette)], "text": self.text}
        named |= {"muted": self.muted, "empty": self.empty}
        return named.get(name, name)


THEMES = {
    "light": Theme(
        *("light", "#FFFFFF", "#1A1A1A", "#6A6A6A", "#F2F2F2", ("#FFFFFF", "#3A2A8C")),
        ("#0072B2", "#D55E00", "#007A5A", "#A8458A", "#A87400", "#56B4E9", "#7F7F7F"),
    ),
    "dark": Theme(
        *("dark", "#14161A", "#E8E8E8", "#9AA1AA", "#23262C", ("#14161A", "#5FD7E8")),
        ("#56B4E9", "#E8833A", "#2FC79A", "#DE9CC6", "#E6B422", "#9AA0FF", "#A6A6A6"),
    ),
}


def get_theme(name: str) -> Theme:
    """Return the theme of this name."""
    if name not in THEMES:
        raise SpecError(f"unknown theme {name!r}; use light or dark")
    return THEMES[name]


# --- Files ----------------------------------------------------------------------------------------


def check_figure_path(path: Path | str, existing: Existing = "refuse") -> Path:
    """Return the path of a figure; raise SpecError for other suffixes and unwritable paths.

    >>> check_figure_path("costs.jpg")
    Traceback (most recent call last):
    headwise.util.errors.SpecError: cannot draw into costs.jpg: '.jpg' is not supported; use .svg,
    .png or .pdf
    """
    suffix = Path(path).suffix
    if suffix not in SAVE_OPTIONS:
        fact = f"cannot draw into {path}: {suffix!r} is not supported"
        raise SpecError(f"{fact}; use .svg, .png or .pdf")
    return check_output(path, FIGURE_FILE, existing)


def save_figure(
    figure: Figure, path: Path | str, theme: str = "light", *, overwrite: bool = False
) -> None:
    """Draw a figure into an SVG, PNG or PDF file. `overwrite` replaces an earlier figure."""
    target = check_figure_path(path, "overwrite" if overwrite else "refuse")
    write_atomically(target, to_bytes(figure, target.suffix, theme))


def to_svg(figure: Figure, theme: str = "light", inline: bool = False) -> Any:
    """Return a figure as SVG; `inline` gives an element for an HTML page, with text as text."""
    text = to_bytes(figure, ".svg", theme, "none" if inline else "path").decode()
    if not inline:
        return text
    from markupsafe import Markup

    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*">', "<g>", text)  # ids would occur twice on a page
    label = f'<svg role="img" aria-label="{escape_svg(figure.title)}" '
    return Markup(text.replace("<svg ", label, 1))  # matplotlib escaped all texts


_drawing = threading.Lock()  # settings of matplotlib belong to the process


def to_bytes(figure: Figure, suffix: str, theme: str = "light", font: str = "path") -> bytes:
    """Return a figure as a file with this suffix; the font "none" leaves text in SVG as text."""
    buffer = io.BytesIO()
    colours = get_theme(theme)
    with _drawing, figure_style(colours), warnings.catch_warnings():
        import matplotlib

        matplotlib.rcParams["svg.fonttype"] = font
        if font == "none":  # the browser has the glyphs
            warnings.filterwarnings("ignore", "Glyph", UserWarning)
        drawing = draw(figure, colours)
        drawing.draw_without_rendering()  # the layout of the second pass knows the ticks
        metadata = FIGURE_METADATA[suffix]
        drawing.savefig(buffer, format=suffix[1:], metadata=metadata, **SAVE_OPTIONS[suffix])
    return buffer.getvalue()


@contextmanager
def figure_style(theme: Theme) -> Iterator[None]:
    """Apply the settings of matplotlib for a theme, without the user's own."""
    import matplotlib

    style: Any = {
        "font.size": FONT_SIZE,
        "font.family": list_fonts(),
        "axes.titlesize": FONT_SIZE,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "text.parse_math": False,
        "svg.hashsalt": "headwise",
        "legend.frameon": False,
        "legend.fontsize": FONT_SIZE - 1,
        "lines.linewidth": 1.3,
        "lines.markersize": 3.2,
    }
    style |= dict.fromkeys(
        ("figure.facecolor", "savefig.facecolor", "axes.facecolor"), theme.background
    )
    style |= dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), theme.muted)
    style |= dict.fromkeys(("text.color", "axes.labelcolor"), theme.text)
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(style)
        yield


# --- Fonts ----------------------------------------------------------------------------------------

_known_files: set[str] = set()  # of matplotlib's list, once this process has looked for others


def list_fonts() -> list[str]:
    """Return matplotlib's own font and the installed fallback fonts, also newer than its list."""
    from matplotlib.font_manager import findSystemFonts, fontManager

    if not _known_files and not any(font.name in FALLBACK_FONTS for font in fontManager.ttflist):
        _known_files.update(font.fname for font in fontManager.ttflist)
        for path in sorted({*findSystemFonts()} - _known_files):
            with suppress(Exception):  # a font that matplotlib cannot read, as in its own list
                fontManager.addfont(path)
    installed = {font.name for font in fontManager.ttflist}
    return [DEFAULT_FONT, *(name for name in FALLBACK_FONTS if name in installed)]


def find_undrawable(text: str) -> list[str]:
    """Return the characters that no listed font can draw, each once."""
    if text.isascii() and text.isprintable():
        return []
    from matplotlib.font_manager import FontProperties, findfont, get_font

    files = [findfont(FontProperties(family=name)) for name in list_fonts()]
    charmaps = [get_font(file).get_charmap() for file in files]
    undrawable: list[str] = []
    for char in dict.fromkeys(text):
        has_glyph = any(ord(char) in charmap for charmap in charmaps)
        if char != "\n" and not (char.isprintable() and has_glyph):
            undrawable.append(char)
    return undrawable


def name_undrawable(text: str) -> str:
    """Return the text with code points for characters that no listed font can draw, or in text that
    stays text, for those that cannot be printed.

    >>> name_undrawable("a\\x07b")
    'aU+0007b'
    """
    import matplotlib

    stays_text = matplotlib.rcParams["svg.fonttype"] == "none"
    undrawable = [char for char in text if not char.isprintable() and char != "\n"]
    for char in undrawable if stays_text else find_undrawable(text):
        text = text.replace(char, f"U+{ord(char):04X}")
    return text


def _wrap_title(text: str, inches: float, font_size: float = FONT_SIZE + 1) -> str:
    """Return the text in lines that fit a width; a bold character is about 0.64 of its size
    wide.
    """
    columns = max(8, int(72 * inches / (0.64 * font_size)))
    return "\n".join(wrap(name_undrawable(text), columns))


def _shorten(label: str) -> str:
    shown = name_undrawable(label.strip()) or "·"
    return shown if len(shown) <= MAX_LABEL else f"{shown[: MAX_LABEL - 1]}…"


# --- Drawing --------------------------------------------------------------------------------------


def draw(figure: Figure, theme: Theme) -> Drawing:
    """Return a figure as one of matplotlib; call it within `figure_style`."""
    from matplotlib.figure import Figure as Drawing
    from matplotlib.patches import Patch

    columns = max(1, min(figure.num_columns, len(figure.panels)))
    rows = max(1, math.ceil(len(figure.panels) / columns))
    sizes = [_panel_size(panel) for panel in figure.panels] or [(4.0, 1.0)]
    width = columns * max(size[0] for size in sizes)
    height = rows * max(size[1] for size in sizes) + 0.4 + 0.18 * math.ceil(len(figure.legend) / 4)
    drawing = Drawing(figsize=(width, height), layout="constrained")
    title = _wrap_title(figure.title, width)
    drawing.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=FONT_SIZE + 1)
    all_axes = [drawing.add_subplot(rows, columns, n + 1) for n in range(len(figure.panels))]
    for axes, panel in zip(all_axes, figure.panels, strict=True):
        if isinstance(panel, Plot):
            _draw_plot(axes, panel, theme)
        elif isinstance(panel, Bars):
            _draw_bars(axes, panel, theme)
        elif isinstance(panel, HeatMap):
            _draw_heat_map(axes, panel, theme)
        elif isinstance(panel, Links):
            _draw_links(axes, panel, theme)
        else:
            _draw_dendrogram(axes, panel, theme)
        if not isinstance(panel, Links) and panel.title:
            axes.set_title(_wrap_title(panel.title, _panel_size(panel)[0], FONT_SIZE))
    if figure.scale_label:
        _draw_scale(drawing, all_axes, figure.scale_label, theme)
    if figure.note:
        note = _wrap_title(figure.note, width, 6.5)
        drawing.supxlabel(note, fontsize=6.5, color=theme.muted, x=0.01, ha="left")
    if figure.legend:
        handles = [
            Patch(facecolor=theme.colour(colour), edgecolor=theme.muted, lw=0.3, label=name)
            for name, colour in figure.legend.items()
        ]
        style: dict[str, Any] = {"fontsize": 7, "title_fontsize": 7, "handlelength": 1}
        heading = _wrap_title(figure.legend_title, width, 7)
        drawing.legend(handles=handles, loc="outside lower center", ncols=4, title=heading, **style)
    return drawing


def _panel_size(panel: Panel) -> tuple[float, float]:
    if isinstance(panel, Links):
        return panel.width, 0.21 * max(len(panel.left), len(panel.right)) + 1.5
    if panel.size is not None:
        return panel.size
    if isinstance(panel, Dendrogram):
        return 5.6, 0.16 * len(panel.labels) + 1.0
    side = 0.075 * max(map(len, panel.rows), default=0) + 0.7
    cell = 0.32 if panel.texts else 0.19
    wide = cell * len(panel.columns) + side
    return min(11.0, max(3.0, wide)), min(11.0, max(1.6, cell * len(panel.rows) + 1.2))


def _draw_plot(axes: Axes, plot: Plot, theme: Theme) -> None:
    _set_axis(axes, "x", plot.x)
    _set_axis(axes, "y", plot.y)
    for number, series in enumerate(plot.series):
        _draw_series(axes, series, number, theme)
    _draw_references(axes, plot.references, theme)
    axes.autoscale_view()
    for axis, get, put in (
        (plot.x, axes.get_xlim, axes.set_xlim),
        (plot.y, axes.get_ylim, axes.set_ylim),
    ):
        low, high = get()
        low = low if axis.low is None else axis.low
        high = high if axis.high is None else axis.high
        put(*((high, low) if axis.reverse else (low, high)))
    if plot.names == "ends":
        _name_ends(axes, plot.series, theme)
    elif plot.names and any(series.name for series in plot.series):
        axes.legend()


def _draw_references(
    axes: Axes, references: Sequence[Reference], theme: Theme, *, beside: bool = False
) -> None:
    """Draw lines across; the label of a level is inside the axes, or `beside` them."""
    for reference in references:
        at = reference.at
        is_level = reference.axis == "y"
        line = axes.axhline if is_level else axes.axvline
        line(at, color=theme.muted, lw=0.7, ls=(0, (4, 3)))
        place = (float(beside), at) if is_level else (at, 1.0)
        system = ("axes fraction", "data") if is_level else ("data", "axes fraction")
        style: dict[str, Any] = {"textcoords": "offset points", "fontsize": 6.5}
        label = name_undrawable(reference.label)
        axes.annotate(label, place, xytext=(2, 2), xycoords=system, color=theme.muted, **style)


def _draw_series(axes: Axes, series: Series, number: int, theme: Theme) -> None:
    colour = theme.colour(series.colour, number)
    line = series.line
    style = DASHES[number // len(theme.palette) % len(DASHES)] if line == "-" else line
    if series.lows and series.band:
        axes.fill_between(series.xs, series.lows, series.highs, color=colour, alpha=0.16, lw=0)
    elif series.lows:
        axes.vlines(series.xs, series.lows, series.highs, color=theme.muted, lw=0.8)
    marker = series.marker or ("" if line else "o")
    label = name_undrawable(series.name)
    depth = 3 - number / 100  # the first series is on top
    if series.colours or series.sizes:
        colours = [theme.colour(one) for one in series.colours] or colour
        areas = [size**2 for size in series.sizes] or 12.0
        edges: dict[str, Any] = {"edgecolors": theme.muted, "linewidths": 0.4}
        axes.scatter(series.xs, series.ys, areas, colours, marker=marker, label=label, **edges)
    else:
        axes.plot(
            *(series.xs, series.ys),
            color=colour,
            ls=style,
            marker=marker,
            label=label,
            zorder=depth,
        )
    for x, y, text in zip(series.xs, series.ys, series.labels, strict=False):
        shown = name_undrawable(text)
        style = {"textcoords": "offset points", "fontsize": 6, "color": theme.text}
        axes.annotate(shown, (x, y), xytext=(0, 4), ha="center", annotation_clip=True, **style)


def _set_axis(axes: Axes, name: str, axis: Axis) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis_of_plot = axes.xaxis if name == "x" else axes.yaxis
    axes.set(**{f"{name}label": name_undrawable(axis.label)})
    format_tick = axis.format or (format_count if axis.log else None)
    if axis.log:
        axes.set(**{f"{name}scale": "log"})
        axis_of_plot.set_major_locator(LogLocator(10, (1.0,), numticks=9))
        axis_of_plot.set_minor_formatter(NullFormatter())
    if format_tick is not None:
        axis_of_plot.set_major_formatter(FuncFormatter(lambda value, _: format_tick(value)))
    if axis.ticks:
        labels = [name_undrawable(label) for label in axis.ticks.values()]
        axis_of_plot.set_ticks(list(axis.ticks), labels)


def _name_ends(axes: Axes, series: Sequence[Series], theme: Theme) -> None:
    """Write the name of each series next to its last point, with a thin line to it."""
    from matplotlib.transforms import Transform

    to_axes: Transform = axes.transData - axes.transAxes
    named = [(n, one) for n, one in enumerate(series) if len(one.xs) and one.name]
    ends = [to_axes.transform((one.xs[-1], one.ys[-1])) for _, one in named]
    heights = spread_labels([float(end[1]) for end in ends], 0.075, 0.0, 1.0)
    for (number, one), height in zip(named, heights, strict=True):
        colour = theme.colour(one.colour, number)
        arrow = {"arrowstyle": "-", "color": colour, "lw": 0.5, "shrinkA": 1, "shrinkB": 2}
        style: dict[str, Any] = {"textcoords": "axes fraction", "va": "center", "fontsize": 7}
        end = (one.xs[-1], one.ys[-1])
        label = name_undrawable(one.name)
        axes.annotate(label, end, (1.03, height), color=colour, arrowprops=arrow, **style)


def _draw_bars(axes: Axes, bars: Bars, theme: Theme) -> None:
    places = range(len(bars.columns))
    bottoms = np.zeros(len(bars.columns))
    total = sum if bars.stacked else max
    most = max((total(heights) for heights in zip(*bars.groups.values(), strict=True)), default=1.0)
    wide = 0.86 if bars.stacked else 0.8 / len(bars.groups)
    for number, (name, heights) in enumerate(bars.groups.items()):
        colour = theme.colour(bars.colours.get(name, ""), number)
        edge: dict[str, Any] = {"edgecolor": theme.background, "lw": 0.6}
        label = name_undrawable(name)
        shift = 0.0 if bars.stacked else (number - (len(bars.groups) - 1) / 2) * wide
        axes.bar(np.add(places, shift), heights, wide, bottoms, color=colour, label=label, **edge)
        ink = "#000000" if is_light(colour) else "#FFFFFF"
        texts = bars.texts.get(name, ())
        for place, height, text in zip(places, heights, texts, strict=False):
            if not bars.stacked:
                axes.text(place + shift, height, text, ha="center", va="bottom", fontsize=7)
            elif height >= 0.028 * most:
                middle = float(bottoms[place]) + height / 2
                axes.text(place, middle, text, ha="center", va="center", fontsize=6, color=ink)
        bottoms += np.asarray(heights, dtype=float) * bars.stacked
    _draw_references(axes, bars.references, theme, beside=True)
    above = dict.fromkeys(places, 0)
    for place, text, colour in bars.marks:
        above[place] += 1
        height = float(bottoms[place]) + most * 0.06 * above[place]
        axes.text(place, height, text, ha="center", fontsize=7, color=theme.colour(colour))
    axes.set_xticks(list(places), [name_undrawable(name) for name in bars.columns])
    axes.set(xlabel=name_undrawable(bars.x_label), ylabel=name_undrawable(bars.y_label))
    if not bars.texts:
        axes.legend()
    elif not bars.stacked and len(bars.groups) > 1:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3)


def _draw_heat_map(axes: Axes, panel: HeatMap, theme: Theme) -> None:
    from matplotlib.patches import Rectangle

    values = np.clip(np.nan_to_num(np.asarray(panel.values, dtype=float)), 0, 1)
    cells = (len(panel.rows), len(panel.columns))
    if panel.colours:
        axes.set(xlim=(-0.5, cells[1] - 0.5), ylim=(cells[0] - 0.5, -0.5), aspect="equal")
    else:
        ramp = _ramp(theme)
        style: dict[str, Any] = {"interpolation": "nearest", "aspect": "auto"}
        axes.imshow(np.sqrt(values), cmap=ramp, vmin=0, vmax=1, **style)
    inside = {"in_layout": False}  # to measure every cell would take long
    for row, column in product(range(cells[0]), range(cells[1])):
        strength = float(values[row, column])
        colour = theme.colour(panel.colours[row][column] or "empty") if panel.colours else ""
        if colour:
            box: dict[str, Any] = {"edgecolor": theme.muted, "lw": 0.3, "alpha": strength, **inside}
            axes.add_patch(
                Rectangle((column - 0.47, row - 0.47), 0.94, 0.94, facecolor=colour, **box)
            )
        if panel.texts:
            ink = _ink(colour or theme.ramp[1], strength if colour else strength**0.5, theme)
            text = name_undrawable(panel.texts[row][column])
            centred: dict[str, Any] = {"ha": "center", "va": "center", **inside}
            axes.text(column, row, text, fontsize=7, color=ink, **centred)
    for row, column in panel.marked:
        frame: dict[str, Any] = {"fill": False, "edgecolor": theme.palette[1], "lw": 1.1}
        axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, **frame))
    sides = ((axes.xaxis, panel.columns, 90), (axes.yaxis, panel.rows, 0))
    for (axis, labels, turn), inches in zip(sides, _panel_size(panel), strict=True):
        most = min(MAX_TICK_LABELS, int(inches / TICK_INCHES))
        shown = range(0, len(labels), math.ceil(len(labels) / most) or 1)
        rotation = 0 if max(map(len, labels), default=0) <= 2 else turn
        axis.set_ticks(
            list(shown), [_shorten(labels[n]) for n in shown], rotation=rotation, fontsize=6
        )
    axes.tick_params(length=0, pad=1)
    axes.set_xlabel(panel.x_label, fontsize=6.5, labelpad=1)
    axes.set_ylabel(panel.y_label, fontsize=6.5, labelpad=1)
    for side in axes.spines.values():
        side.set(
            visible=not panel.colours, color=theme.colour(panel.frame or "muted"), linewidth=1.2
        )


def _ramp(theme: Theme) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("weights", list(theme.ramp))


def _ink(colour: str, alpha: float, theme: Theme) -> str:
    """Return black or white, whichever is easier to read on a colour with this opacity."""
    mixed = "#"
    for n in (1, 3, 5):
        above = int(colour[n : n + 2], 16)
        below = int(theme.background[n : n + 2], 16)
        mixed += f"{round(alpha * above + (1 - alpha) * below):02x}"
    return "#000000" if is_light(mixed) else "#FFFFFF"


def _draw_scale(drawing: Drawing, all_axes: Sequence[Axes], label: str, theme: Theme) -> None:
    """Draw the scale of values below all heat maps; their strength is the square root."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    mappable = ScalarMappable(Normalize(0, 1), _ramp(theme))
    place: dict[str, Any] = {"location": "bottom", "aspect": 30, "pad": 0.02}
    shrink = min(1.0, 3.6 / drawing.get_figwidth())
    scale = drawing.colorbar(mappable, ax=list(all_axes), shrink=shrink, **place)
    scale.set_ticks(
        [math.sqrt(tick) for tick in SCALE_TICKS], labels=[f"{n:g}" for n in SCALE_TICKS]
    )
    scale.ax.tick_params(labelsize=6, length=2)
    scale.set_label(label, fontsize=6.5)


def _draw_links(axes: Axes, links: Links, theme: Theme) -> None:
    for number, weights in enumerate(links.weights.values()):
        values = np.asarray(weights)
        for row, column in np.argwhere(values >= links.least).tolist():
            weight = float(values[row, column])
            style: dict[str, Any] = {
                "alpha": min(1.0, 0.12 + 0.88 * weight),
                "lw": 0.4 + 2.2 * weight,
            }
            axes.plot([0, 1], [row, column], color=theme.palette[number], **style)
    for x, heading, tokens, side in (
        (-0.03, links.headings[0], links.left, "right"),
        (1.03, links.headings[1], links.right, "left"),
    ):
        axes.text(x, -1.1, heading, ha=side, va="center", fontsize=7, color=theme.muted)
        for row, token in enumerate(tokens):
            axes.text(x, row, _shorten(token), ha=side, va="center", fontsize=7)
    for number, name in enumerate(links.weights):
        style = {"color": theme.palette[number], "fontsize": 7, "fontweight": "bold"}
        axes.text(0.5, number - 3.3, name_undrawable(name), ha="center", va="center", **style)
    count = max(len(links.left), len(links.right))
    axes.set(xlim=(-0.5, 1.5), ylim=(count + 0.6, -3.9))
    axes.set_axis_off()


def _draw_dendrogram(axes: Axes, tree: Dendrogram, theme: Theme) -> None:
    from scipy.cluster.hierarchy import dendrogram

    shape: Mapping[str, Any] = dendrogram(np.asarray(tree.merges), no_plot=True)
    for heights, places in zip(shape["dcoord"], shape["icoord"], strict=True):
        axes.plot(heights, places, color=theme.palette[0], lw=1)
    leaves: list[int] = shape["leaves"]
    labels = [_shorten(str(tree.labels[n])) for n in leaves]
    axes.set_yticks([10 * n + 5 for n in range(len(labels))], labels)
    axes.set(xlabel=tree.x_label, ylim=(0, 10 * len(labels)))
    axes.tick_params(axis="y", length=0)
