"""Figures as SVG: matrices with their numbers in a row, and the lines of attention heads over a sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..escaping import escape_svg as escape

CELL_WIDTH, CELL_HEIGHT, GAP, TOP, LEFT = 46, 26, 44, 26, 34
FONT = 'font-family="system-ui, sans-serif" font-size="12"'
PANEL_WIDTH, ROW_HEIGHT = 300, 20
COLORS = ("#176639", "#a8201a", "#0072b2", "#8a5a00")

Matrix = Sequence[Sequence[float]]


def _shade(number: float, most: float) -> str:
    """Background of a cell: white for 0, blue for positive and orange for negative numbers."""
    if math.isinf(number):
        return "#c9c9c4"
    red, green, blue = (94, 101, 192) if number > 0 else (213, 120, 40)
    share = 0.75 * min(abs(number) / most, 1.0) if most else 0.0
    mixed = (round(255 - share * (255 - part)) for part in (red, green, blue))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def format_cell(number: float) -> str:
    """A number with two decimals, or -∞.

    >>> format_cell(0.5), format_cell(float("-inf"))
    ('0.50', '-∞')
    """
    return "-∞" if math.isinf(number) else f"{number:.2f}"


def draw_matrices(named: Sequence[tuple[str, Matrix]], rows: Sequence[str] = ()) -> str:
    """Matrices side by side, each with its name, all numbers printed; `rows` names the rows of the first.

    >>> draw_matrices([("A", [[1.0, 2.0]])]).count("<rect")
    2
    """
    parts, x = [], LEFT
    height = TOP + CELL_HEIGHT * max(len(matrix) for _, matrix in named) + 8
    for row, token in enumerate(rows):
        y = TOP + CELL_HEIGHT * (row + 0.66)
        parts.append(f'<text x="{LEFT - 8}" y="{y:g}" text-anchor="end">{escape(token)}</text>')
    for name, matrix in named:
        parts.append(f'<text x="{x}" y="16" font-weight="600">{escape(name)}</text>')
        most = max((abs(number) for line in matrix for number in line if math.isfinite(number)), default=0.0)
        for row, line in enumerate(matrix):
            for column, number in enumerate(line):
                parts.append(_cell(x + CELL_WIDTH * column, TOP + CELL_HEIGHT * row, number, most))
        x += max(CELL_WIDTH * len(matrix[0]), 8 * len(name)) + GAP
    label = escape(", ".join(name for name, _ in named))
    return _svg(x - GAP + 8, height, label, parts)


def _cell(x: float, y: float, number: float, most: float) -> str:
    text = format_cell(number)
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{CELL_WIDTH}" height="{CELL_HEIGHT}" fill="{_shade(number, most)}" '
        f'stroke="#b9bab4"/><text x="{x + CELL_WIDTH / 2:g}" y="{y + 17:g}" text-anchor="middle" fill="#17181b">'
        f"{text}</text>"
    )


def _svg(width: float, height: float, label: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img" aria-label="{label}" '
        f'fill="currentColor" {FONT}>{"".join(parts)}</svg>'
    )


def draw_heads(heads: Sequence[tuple[str, Matrix]], queries: Sequence[str], keys: Sequence[str]) -> str:
    """Heads side by side: a line from each query (left) to each key (right), as thick as the weight."""
    panel, row_height = PANEL_WIDTH, ROW_HEIGHT
    height = TOP + row_height * max(len(queries), len(keys)) + 8
    parts = []
    for number, (name, weights) in enumerate(heads):
        x, color = number * panel, COLORS[number % len(COLORS)]
        parts.append(f'<text x="{x + 8}" y="16" font-weight="600" fill="{color}">{escape(name)}</text>')
        for side, tokens, anchor in ((x + 90, queries, "end"), (x + 210, keys, "start")):
            parts += [
                f'<text x="{side}" y="{TOP + row_height * (row + 0.7):g}" text-anchor="{anchor}">{escape(token)}</text>'
                for row, token in enumerate(tokens)
            ]
        strong = [(r, c, weight) for r, line in enumerate(weights) for c, weight in enumerate(line) if weight >= 0.05]
        parts += [_attention_line(x, (row, column), weight, color) for row, column, weight in strong]
    return _svg(panel * len(heads), height, escape(", ".join(name for name, _ in heads)), parts)


def _attention_line(x: float, ends: tuple[int, int], weight: float, color: str) -> str:
    y1, y2 = (TOP + ROW_HEIGHT * (end + 0.5) for end in ends)
    return (
        f'<line x1="{x + 96}" y1="{y1:g}" x2="{x + 204}" y2="{y2:g}" stroke="{color}" '
        f'stroke-width="{4 * weight:.2f}"><title>{weight:.3f}</title></line>'
    )
