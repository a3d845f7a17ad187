"""Figures inside a page: one SVG for both themes, with shorter numbers."""

from __future__ import annotations

import re

from markupsafe import Markup

from ..report.data import Figure
from ..report.plots import to_svg

SCALE = 1.2  # of figures on a page, so that their smallest labels have 10 pixels
SIZE = re.compile(r'width="([\d.]+)pt" height="([\d.]+)pt"')
ID = re.compile(r'(?<=\bid=")[^"]+|(?<=url\(#)[^)]+|(?<=href="#)[^"]+')
BLACK_TEXT = re.compile(r'(<text style="(?:(?!fill: )[^"])*)(?=")')  # matplotlib leaves black out
GEOMETRY = re.compile(r'(?<= d=")[^"]+|(?<= transform=")[^"]+|(?<= [xy]=")[^"]+')
LONG_NUMBER = re.compile(r"\d+\.\d{3,}")
# What differs between the themes: colours, and pictures that hold them.
THEMED = re.compile(r"#[0-9a-fA-F]{6}\b|<image [^>]*>")


def draw_inline(figure: Figure, number: int) -> Markup:
    """Return a figure as an element whose ids start with its number on the page. A browser chooses
    its colours by the theme of the reader.
    """
    light, dark = (
        _shorten(to_svg(figure, theme, inline=True), number) for theme in ("light", "dark")
    )
    common = THEMED.split(light)
    if common != THEMED.split(dark):
        both = (
            f'<div class="{name}">{svg}</div>' for name, svg in (("light", light), ("dark", dark))
        )
        return Markup("".join(both))
    merged = [common[0]]
    pairs = zip(THEMED.findall(light), THEMED.findall(dark), strict=True)
    for (own, other), rest in zip(pairs, common[1:], strict=True):
        merged += [_choose_by_theme(own, other), rest]
    return Markup("".join(merged))


def _choose_by_theme(light: str, dark: str) -> str:
    if light == dark:
        return light
    if light.startswith("<"):
        light, dark = (re.sub(r' id="[^"]*"', "", image) for image in (light, dark))
        return f'<g class="light">{light}</g><g class="dark">{dark}</g>'
    return f"light-dark({light}, {dark})"


def _shorten(svg: str, number: int) -> str:
    """Number the ids of an SVG in their order, and round its coordinates to 0.01 points."""
    names: dict[str, str] = {}
    svg = ID.sub(lambda id: names.setdefault(id[0], f"figure-{number}-{len(names)}"), svg)
    svg = BLACK_TEXT.sub(r"\1; fill: #000000", svg)
    svg = GEOMETRY.sub(lambda text: " ".join(_round_numbers(text[0]).split()), svg)
    svg = re.sub(r"\s*\n\s*", "\n", svg)
    return SIZE.sub(_enlarge, svg, count=1)


def _enlarge(size: re.Match[str]) -> str:
    """Return the size of a figure on a page; on narrow ones the style sheet makes it smaller."""
    width, height = (float(one) * SCALE for one in size.groups())
    return f'style="--width: {width:g}pt" width="{width:g}pt" height="{height:g}pt"'


def _round_numbers(text: str) -> str:
    return LONG_NUMBER.sub(lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), text)
