"""Colours, letters and styles of drawings of heads, for light and for dark paper."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SpecError
from ..files import write_atomically

if TYPE_CHECKING:
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
FALLBACK_FONTS = ("Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "WenQuanYi Zen Hei", "WenQuanYi Micro Hei",
         "PingFang SC", "Hiragino Sans GB", "Microsoft YaHei", "SimHei", "Arial Unicode MS")  # fmt: skip


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
    "light": FigureTheme("light", "#FFFFFF", "#1A1A1A", "#8A8A8A", "#F2F2F2", ("#FFFFFF", "#3A2A8C"), ("#0072B2", "#D55E00")),
    "dark": FigureTheme("dark", "#14161A", "#E8E8E8", "#8C939C", "#23262C", ("#14161A", "#5FD7E8"), ("#56B4E9", "#E8833A")),
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
        "font.size": FONT_SIZE, "font.family": list_fonts(), "figure.facecolor": theme.background,
        "savefig.facecolor": theme.background, "axes.facecolor": theme.background, "text.color": theme.foreground,
        "axes.edgecolor": theme.muted, "axes.labelcolor": theme.foreground, "xtick.color": theme.muted,
        "ytick.color": theme.muted, "axes.titlesize": FONT_SIZE + 1, "axes.titlelocation": "left",
        "axes.titleweight": "bold", "axes.spines.top": False, "axes.spines.right": False, "text.parse_math": False,
        "svg.hashsalt": "headwise", "svg.fonttype": "path", "legend.frameon": False, "lines.linewidth": 1.2,
    }  # fmt: skip


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
