"""Figures as SVG: matrices with their numbers, the lines of heads over a sentence, stacked columns,
labelled boxes.

Every matrix, head and box is an image of its own, so that a narrow page breaks between them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..report.text import text_width
from ..util.escaping import escape_svg as escape
from .language import join_items, localise

CELL_WIDTH = 40
CELL_HEIGHT = 26
GAP = 24
TOP = 26
LEFT = 34
FONT = 'font-family="system-ui, sans-serif" font-size="12"'
PANEL_WIDTH = 270
ROW_HEIGHT = 20
COLORS = (
    "#009e73",
    "#d55e00",
    "#3d8fd1",
    "#b5862d",
)  # of Okabe and Ito, readable on light and dark pages
# Letter and colour of each class of heads; the letter distinguishes classes without colour.
CLASS_COLORS = {
    "sink": ("K", "#999999"),
    "rare-token": ("R", "#cc79a7"),
    "positional": ("P", "#56b4e9"),
    "syntactic": ("S", "#009e73"),
    "broad": ("B", "#f0e442"),
    "punctuation": ("T", "#d55e00"),
}
COLUMN_WIDTH = 40
COLUMN_HEIGHT = 220
BOX_WIDTH = 220
BOX_HEIGHT = 92

Matrix = Any  # rows of numbers, as lists or a tensor


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


def draw_matrices(named: Iterable[tuple[str, Matrix]], rows: Sequence[str] = ()) -> str:
    """Matrices side by side, each with its name, all numbers printed; `rows` names the rows of the
    first.

    >>> drawn = draw_matrices([("A", [[1.0, 2.0]]), ("B", [[1.0]])])
    >>> drawn.count("<rect"), drawn.count("<svg")
    (3, 2)
    """
    matrices = [(name, [list(map(float, row)) for row in matrix]) for name, matrix in named]
    height = TOP + CELL_HEIGHT * max(len(matrix) for _, matrix in matrices) + 8
    images = [
        _draw_matrix(localise(name), matrix, height, () if number else rows)
        for number, (name, matrix) in enumerate(matrices)
    ]
    return "".join(images)


def _draw_matrix(name: str, matrix: Matrix, height: float, rows: Sequence[str]) -> str:
    left = 12 + 8 * max(map(text_width, rows)) if rows else 1
    parts = [f'<text x="{left}" y="16" font-weight="600">{escape(name)}</text>']
    for row, token in enumerate(rows):
        y = TOP + CELL_HEIGHT * (row + 0.66)
        parts.append(f'<text x="{left - 8}" y="{y:g}" text-anchor="end">{escape(token)}</text>')
    most = max(
        (abs(number) for line in matrix for number in line if math.isfinite(number)), default=0.0
    )
    for row, line in enumerate(matrix):
        for column, number in enumerate(line):
            parts.append(_cell(left + CELL_WIDTH * column, TOP + CELL_HEIGHT * row, number, most))
    width = left + max(CELL_WIDTH * len(matrix[0]), 8 * text_width(name)) + GAP
    return _svg(width, height, escape(name), parts)


def _cell(x: float, y: float, number: float, most: float) -> str:
    text = format_cell(number)
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{CELL_WIDTH}" height="{CELL_HEIGHT}" '
        f'fill="{_shade(number, most)}" '
        f'stroke="#b9bab4"/><text x="{x + CELL_WIDTH / 2:g}" y="{y + 17:g}" text-anchor="middle" '
        'fill="#17181b">'
        f"{text}</text>"
    )


def _svg(width: float, height: float, label: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" style="min-width: '
        f'{0.8 * width:g}px" role="img" '
        f'aria-label="{label}" '
        f'fill="currentColor" {FONT}>{"".join(parts)}</svg>'
    )


def draw_heads(
    heads: Sequence[tuple[str, Matrix]], queries: Sequence[str], keys: Sequence[str]
) -> str:
    """Heads side by side: a line from each query (left) to each key (right), as thick as the
    weight.
    """
    return "".join(
        _draw_head(localise(name), weights, queries, keys, COLORS[number % len(COLORS)])
        for number, (name, weights) in enumerate(heads)
    )


def _draw_head(
    name: str, weights: Matrix, queries: Sequence[str], keys: Sequence[str], color: str
) -> str:
    height = TOP + ROW_HEIGHT * max(len(queries), len(keys)) + 26
    parts = [f'<text x="8" y="16" font-weight="600" fill="{color}">{escape(name)}</text>']
    for side, axis, tokens, anchor in ((70, "query", queries, "end"), (190, "key", keys, "start")):
        parts.append(
            f'<text x="{side}" y="{height - 8}" text-anchor="{anchor}" '
            f'font-style="italic">{localise(axis)}</text>'
        )
        parts += [
            (
                f'<text x="{side}" y="{TOP + ROW_HEIGHT * (row + 0.7):g}" '
                f'text-anchor="{anchor}">{escape(token)}</text>'
            )
            for row, token in enumerate(tokens)
        ]
    strong = [
        (r, c, weight)
        for r, line in enumerate(weights)
        for c, weight in enumerate(line)
        if weight >= 0.05
    ]
    parts += [_attention_line((row, column), weight, color) for row, column, weight in strong]
    return _svg(PANEL_WIDTH, height, escape(name), parts)


def _attention_line(ends: tuple[int, int], weight: float, color: str) -> str:
    y1, y2 = (TOP + ROW_HEIGHT * (end + 0.5) for end in ends)
    return (
        f'<line x1="76" y1="{y1:g}" x2="184" y2="{y2:g}" stroke="{color}" '
        f'stroke-width="{4 * weight:.2f}"><title>{weight:.3f}</title></line>'
    )


def draw_columns(columns: Sequence[Mapping[str, int]], labels: Sequence[str], axis: str) -> str:
    """Stacked columns: the number of heads of each class, with its letter and colour, in each
    column.

    >>> draw_columns([{"sink": 3}, {"sink": 1}], ["3", "1"], "heads left").count("<rect")
    3
    """
    names = [name for name in CLASS_COLORS if any(name in column for column in columns)]
    most = max(sum(column.values()) for column in columns)
    parts = list[str]()
    for number, column in enumerate(columns):
        x = 4 + COLUMN_WIDTH * number
        y = float(TOP + COLUMN_HEIGHT)
        for name in (name for name in names if column.get(name)):
            letter, color = CLASS_COLORS[name]
            height = COLUMN_HEIGHT * column[name] / most
            y -= height
            parts.append(
                f'<rect x="{x:g}" y="{y:.1f}" width="{COLUMN_WIDTH - 8}" height="{height:.1f}" '
                f'fill="{color}" '
                f'stroke="#17181b" stroke-width="0.5"><title>{localise(name)} '
                f"{column[name]}</title></rect>"
            )
            if height >= 12:
                text = (
                    f'x="{x + COLUMN_WIDTH / 2 - 4:g}" y="{y + height / 2 + 4:.1f}" '
                    'text-anchor="middle" font-size="11"'
                )
                parts.append(f'<text {text} fill="#17181b">{letter} {column[name]}</text>')
        label = (
            f'x="{x + COLUMN_WIDTH / 2 - 4:g}" y="{TOP + COLUMN_HEIGHT + 16}" text-anchor="middle"'
        )
        parts.append(f"<text {label}>{escape(labels[number])}</text>")
    parts.append(
        f'<text x="4" y="{TOP + COLUMN_HEIGHT + 36}" '
        f'font-style="italic">{escape(localise(axis))}</text>'
    )
    width = COLUMN_WIDTH * len(columns) + 8
    height = TOP + COLUMN_HEIGHT + 44
    return _svg(max(width, 300), height, escape(localise(axis)), parts) + _draw_legend(names)


def _draw_legend(names: Sequence[str]) -> str:
    """The colour, letter and name of each class, from the top of a column down."""
    parts = list[str]()
    for row, name in enumerate(reversed(names)):
        letter, color = CLASS_COLORS[name]
        y = TOP + 20 * row
        parts.append(
            f'<rect x="12" y="{y}" width="13" height="13" fill="{color}" stroke="#17181b"/>'
        )
        parts.append(f'<text x="32" y="{y + 11}">{letter}  {localise(name)}</text>')
    return _svg(150, TOP + 20 * len(names), escape(join_items(map(localise, names))), parts)


def draw_curves(curves: Sequence[tuple[str, Mapping[int, float]]], x_axis: str, y_axis: str) -> str:
    """Curves over a positive number, both axes logarithmic: the first with dots and their values,
    the others as lines.

    >>> draw_curves([("a", {1: 1.0, 2: 0.5}), ("b", {1: 1.0, 2: 0.7})], "m", "error").count(
    ...     "<circle"
    ... )
    2
    """
    xs = [math.log(x) for x in curves[0][1]]
    ys = [math.log(y) for _, curve in curves for y in curve.values()]
    parts = list[str]()
    width = 300
    height = 200
    top = TOP + 16  # below the name of the axis

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log(x) - xs[0]) / (xs[-1] - xs[0])
        up = (math.log(y) - min(ys)) / (max(ys) - min(ys))
        return LEFT + width * across, top + height * (1 - up)

    for number, (name, curve) in enumerate(curves):
        points = [place(x, y) for x, y in curve.items()]
        color = COLORS[number]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dash = ' stroke-dasharray="6 4"' if number else ""
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"{dash}/>'
        )
        label = f'x="{LEFT + width}" y="{top + 14 + 18 * number}" text-anchor="end" fill="{color}"'
        parts.append(f"<text {label}>{escape(localise(name))}</text>")
        for (x, y), (count, value) in zip(
            points, curve.items() if not number else (), strict=False
        ):
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>')
            parts.append(f'<text x="{x + 6:.1f}" y="{y - 6:.1f}" font-size="11">{value:.2g}</text>')
            parts.append(
                f'<text x="{x:.1f}" y="{top + height + 20}" text-anchor="middle">{count}</text>'
            )
    axes = (
        (f'x="{LEFT}" y="16"', y_axis),
        (f'x="{LEFT + width}" y="{top + height + 38}" text-anchor="end"', x_axis),
    )
    parts += [
        f'<text {at} font-style="italic">{escape(localise(axis))}</text>' for at, axis in axes
    ]
    return _svg(LEFT + width + 40, top + height + 46, escape(localise(y_axis)), parts)


def draw_boxes(boxes: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Dashed boxes side by side in reading order, each with a title and lines of text.

    >>> draw_boxes([("A", ["one"]), ("B", ["two"])]).count("stroke-dasharray")
    2
    """
    return "".join(
        _draw_box(localise(title), [localise(line) for line in lines], number)
        for number, (title, lines) in enumerate(boxes)
    )


def _draw_box(title: str, lines: Sequence[str], number: int) -> str:
    """One box, after an arrow if it is not the first."""
    x = 28 if number else 2
    color = COLORS[(number + 1) % len(COLORS)]
    frame = f'x="{x}" y="8" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" fill="none" stroke="{color}"'
    parts = [f'<rect {frame} stroke-width="2" stroke-dasharray="6 4" rx="4"/>']
    parts.append(f'<text x="{x + 10}" y="30" font-weight="600">{escape(title)}</text>')
    parts += [
        f'<text x="{x + 10}" y="{52 + 18 * row}">{escape(line)}</text>'
        for row, line in enumerate(lines)
    ]
    if number:
        parts.append(f'<text x="{x - 22}" y="{8 + BOX_HEIGHT / 2:g}" font-size="16">→</text>')
    return _svg(x + BOX_WIDTH + 4, BOX_HEIGHT + 16, escape(title), parts)
