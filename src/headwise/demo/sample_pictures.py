"""Pictures of heads as SVG: heat maps, badges of head classes, and bars. Colours come from the styles of the page."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..escaping import escape_html, escape_svg
from ..head_analysis.head_figures import CLASS_STYLES, class_group

NUM_SHADES = 9
CELL = 18  # units of a cell in a heat map with tokens
GLYPH = 7.2  # width of a Latin letter at the font size of tokens
# Outline of the badge of each class, in a square of 16: a shape besides letter and colour.
DISC = "M8 .5a7.5 7.5 0 1 1 0 15a7.5 7.5 0 1 1 0-15z"
CLASS_SHAPES = {
    "positional": DISC,
    "syntactic": "M.8 .8h14.4v14.4h-14.4z",
    "rare-token": "M8 0l8 8l-8 8l-8-8z",
    "broad": "M5.5 2.5h5a5.5 5.5 0 0 1 0 11h-5a5.5 5.5 0 0 1 0-11z",
    "sink": "M-.5 1.5h17L8 16z",
    "duplicate": "M.8 .8h11v3.5h3.5v11h-11v-3.5h-3.5z",
    "induction": "M8 0l8.5 14.5h-17z",
    "punctuation": "M8 0l8 6l-3 9.5h-10l-3-9.5z",
    "separator": "M8 0l8 6l-3 9.5h-10l-3-9.5z",
    "alignment": "M4 1h8l4 7l-4 7h-8l-4-7z",
}
# Names of the classes in the styles: --c-p, --c-k, ...
STYLE_LETTERS = {name: letter.lower() for name, (letter, _) in CLASS_STYLES.items()} | {"separator": "t"}


def shade_of(weight: float) -> int:
    """Shade 0 to 8 of a weight, by its square root.

    >>> [shade_of(w) for w in (0.0, 0.02, 0.25, 1.0)]
    [0, 1, 4, 8]
    """
    return round(math.sqrt(min(max(weight, 0.0), 1.0)) * (NUM_SHADES - 1))


def _cells(weights: Sequence[Sequence[float]], size: float) -> str:
    """One path for all cells of equal shade; cells of shade 0 are left out."""
    paths = [""] * NUM_SHADES
    for row, line in enumerate(weights):
        for column, weight in enumerate(line):
            if shade := shade_of(weight):
                paths[shade] += f"M{column * size:g} {row * size:g}h{size:g}v{size:g}h-{size:g}z"
    return "".join(f'<path class="s{shade}" d="{path}"/>' for shade, path in enumerate(paths) if path)


def draw_thumbnail(weights: Sequence[Sequence[float]], label: str) -> str:
    """A heat map without tokens."""
    rows, columns = len(weights), len(weights[0])
    return (
        f'<svg class="map" viewBox="0 0 {columns} {rows}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape_svg(label)}" shape-rendering="crispEdges">{_cells(weights, 1)}</svg>'
    )


def draw_heat_map(weights: Sequence[Sequence[float]], queries: Sequence[str], keys: Sequence[str], label: str) -> str:
    """A heat map with the tokens of queries at the left and those of keys on top; hovering a cell shows its weight."""
    left = max(map(_text_width, queries)) + 10
    top = max(map(_text_width, keys)) + 10
    width, height = left + CELL * len(keys), top + CELL * len(queries)
    parts = [
        f'<svg class="heat" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'role="img" aria-label="{escape_svg(label)}">',
        f'<g transform="translate({left:g} {top:g})"><rect class="paper" width="{CELL * len(keys)}" '
        f'height="{CELL * len(queries)}"/>{_cells(weights, CELL)}{_hover_cells(weights, queries, keys)}</g>',
    ]
    for row, token in enumerate(queries):
        y = top + CELL * row + CELL * 0.7
        parts.append(f'<text class="token" x="{left - 6:g}" y="{y:g}" text-anchor="end">{show_token(token)}</text>')
    for column, token in enumerate(keys):
        x = left + CELL * column + CELL * 0.68
        parts.append(
            f'<text class="token" transform="translate({x:g} {top - 6:g}) rotate(-90)">{show_token(token)}</text>'
        )
    return "".join([*parts, "</svg>"])


def _hover_cells(weights: Sequence[Sequence[float]], queries: Sequence[str], keys: Sequence[str]) -> str:
    """Invisible cells with the exact weight as a tooltip."""
    return "".join(
        f'<rect class="hit" x="{column * CELL}" y="{row * CELL}" width="{CELL}" height="{CELL}">'
        f"<title>{show_token(queries[row])} to {show_token(keys[column])}: {weight:.4f}</title></rect>"
        for row, line in enumerate(weights)
        for column, weight in enumerate(line)
        if weight >= 0.005
    )


def show_token(token: str) -> str:
    """A token as HTML text: spaces and characters that cannot be printed are made visible.

    >>> show_token("<zh>"), show_token(" "), show_token("\\u202e")
    ('&lt;zh&gt;', '␣', '\\\\u202e')
    """
    visible = token.replace(" ", "␣")
    return escape_html(visible)


def _text_width(token: str) -> float:
    """Width of a token; Chinese characters are wider than Latin letters."""
    return sum(13.0 if ord(character) > 0x2E80 else GLYPH for character in token)


def draw_badge(class_name: str) -> str:
    """The badge of a class: letter, colour and shape. An unclear head has a ring.

    >>> 'aria-label="sink"' in draw_badge("first")
    True
    """
    group = class_group(class_name)
    letter = CLASS_STYLES.get(group, ("U", ""))[0]
    style = STYLE_LETTERS.get(group, "u")
    y = {"sink": 9.6, "induction": 13.0}.get(group, 11.6)
    return (
        f'<svg class="badge" viewBox="-1 -1 18 18" role="img" aria-label="{escape_svg(group)}"><path class="c-{style}" '
        f'd="{CLASS_SHAPES.get(group, DISC)}"/><text class="i-{style}" x="8" y="{y}">{escape_svg(letter)}</text></svg>'
    )


def draw_bar(share: float, label: str) -> str:
    """A horizontal bar for a share of 1."""
    width = 100 * min(max(share, 0.0), 1.0)
    return (
        f'<svg class="bar" viewBox="0 0 100 6" preserveAspectRatio="none" role="img" aria-label="{escape_svg(label)}">'
        f'<rect class="track" width="100" height="6"/><rect class="fill" width="{width:.2f}" height="6"/></svg>'
    )
