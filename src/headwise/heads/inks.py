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

SUFFIXES: dict[str, dict[str, Any]] = {".svg": {"metadata": {"Date": None}}, ".png": {"dpi": 160}}
# Okabe and Ito's colours; a class is told by its letter as well, never by its hue alone.
CLASSES: Mapping[str, tuple[str, str]] = {
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
NEAR = ("previous", "self", "next")
SIZE = 8.0
USUAL = "DejaVu Sans"
# Fonts that know Chinese, Japanese and Korean, by the names of usual systems.
WIDER = ("Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "WenQuanYi Zen Hei", "WenQuanYi Micro Hei",
         "PingFang SC", "Hiragino Sans GB", "Microsoft YaHei", "SimHei", "Arial Unicode MS")  # fmt: skip


@dataclass(frozen=True)
class Paper:
    """What a drawing stands on: the paper itself, ink, faint ink, what is empty, the ramp of weights,
    and two colours to tell apart.
    """

    name: str
    paper: str
    ink: str
    faint: str
    empty: str
    ramp: tuple[str, str]
    pair: tuple[str, str]


PAPERS = {
    "light": Paper("light", "#FFFFFF", "#1A1A1A", "#8A8A8A", "#F2F2F2", ("#FFFFFF", "#3A2A8C"), ("#0072B2", "#D55E00")),
    "dark": Paper("dark", "#14161A", "#E8E8E8", "#8C939C", "#23262C", ("#14161A", "#5FD7E8"), ("#56B4E9", "#E8833A")),
}


def paper_of(name: str) -> Paper:
    """The paper of this name."""
    if name not in PAPERS:
        raise SpecError(f"there is no paper {name!r}; give light or dark")
    return PAPERS[name]


def group_of(name: str) -> str:
    """The group of classes that share a letter and a colour: relations are syntactic, distances positional.

    >>> group_of("syntactic det to its governor"), group_of("previous"), group_of("rare-token")
    ('syntactic', 'positional', 'rare-token')
    """
    first = name.partition(" ")[0]
    return {"offset": "positional", "first": "sink"}.get(first, "positional" if first in NEAR else first)


def ink_of(name: str, paper: Paper) -> tuple[str, str]:
    """The letter and the colour of a class."""
    letter, colour = CLASSES.get(group_of(name), ("?", paper.faint))
    return letter, colour or paper.empty


def fonts() -> list[str]:
    """matplotlib's own font, and behind it those that are installed here and know more signs."""
    from matplotlib.font_manager import fontManager

    there = {font.name for font in fontManager.ttflist}
    return [USUAL, *(name for name in WIDER if name in there)]


def drawable(text: str) -> str:
    """The text with a box for every sign that no font here can draw."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    known = [get_font(findfont(FontProperties(family=name))).get_charmap() for name in fonts()]
    return "".join(char if any(ord(char) in one for one in known) and char.isprintable() else "□" for char in text)


def style(paper: Paper) -> Any:
    """What matplotlib is told before anything is drawn."""
    return {
        "font.size": SIZE, "font.family": fonts(), "figure.facecolor": paper.paper,
        "savefig.facecolor": paper.paper, "axes.facecolor": paper.paper, "text.color": paper.ink,
        "axes.edgecolor": paper.faint, "axes.labelcolor": paper.ink, "xtick.color": paper.faint,
        "ytick.color": paper.faint, "axes.titlesize": SIZE + 1, "axes.titlelocation": "left",
        "axes.titleweight": "bold", "axes.spines.top": False, "axes.spines.right": False, "text.parse_math": False,
        "svg.hashsalt": "headwise", "svg.fonttype": "path", "legend.frameon": False, "lines.linewidth": 1.2,
    }  # fmt: skip


def write(make: Callable[[Paper], Figure], path: Path | str, paper: str = "light") -> None:
    """Draw into an SVG or a PNG: the same numbers are the same file."""
    suffix = Path(path).suffix
    if suffix not in SUFFIXES:
        raise SpecError(f"{Path(path).name} ends in none of {', '.join(SUFFIXES)}; give one of these")
    import matplotlib

    on = paper_of(paper)
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever a user's own settings are
        matplotlib.rcParams.update(style(on))
        written = io.BytesIO()
        make(on).savefig(written, format=suffix[1:], **SUFFIXES[suffix])
    write_atomically(path, written.getvalue())
