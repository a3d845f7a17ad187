"""Text by its width in columns of a terminal: padded, wrapped and aligned, and heat maps in
characters.

A Chinese character takes two columns.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..report.text import (
    TERMINAL_WIDTH as TERMINAL_WIDTH,
    cut as cut,
    pad as pad,
    pad_left as pad_left,
    rule as rule,
    text_width as text_width,
    wrap as wrap,
)


def align_table(text: str) -> str:
    """Align the columns of rows that are written as cells between bars; other lines stay.

    >>> print(align_table("键 | 1\\nkeys | 22"))
    键   | 1
    keys | 22
    """
    lines = text.splitlines()
    rows = [[cell.strip() for cell in line.split(" | ")] for line in lines if " | " in line]
    widths = [max(map(text_width, column)) for column in zip(*rows, strict=True)] if rows else []
    aligned = iter(
        " | ".join(pad(cell, w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
    return "\n".join(next(aligned) if " | " in line else line for line in lines)


WEIGHT_SHADES = " ·░▒▓█"  # weight 0 .. 1


def draw_heat_map(
    queries: Sequence[str],
    keys: Sequence[str],
    weights: Sequence[Sequence[float]],
    marked_links: Collection[tuple[int, int]] = (),
) -> str:
    """Draw weights [queries, keys]: a row for each query, darker for larger weights; links (key,
    query) are marked [.

    >>> print(draw_heat_map(["x", "y"], ["a", "b"], [[0.0, 1.0], [0.5, 0.5]], {(1, 0)}))
      a b
    x   [█
    y  ▒ ▒
    """
    keys, queries = list(map(_visible_token, keys)), list(map(_visible_token, queries))
    side = max(map(text_width, queries)) + 1
    columns = [max(text_width(token), 1) + 1 for token in keys]
    lines = [" " * side + "".join(pad(t, w) for t, w in zip(keys, columns, strict=True))]
    for row, (token, row_weights) in enumerate(zip(queries, weights, strict=True)):
        cells = [
            _shade_cell(w, (column, row) in marked_links) for column, w in enumerate(row_weights)
        ]
        row_text = "".join(pad(cell, w) for cell, w in zip(cells, columns, strict=True))
        lines.append(pad(token, side) + row_text)
    return "\n".join(line.rstrip() for line in lines)


def _shade_cell(weight: float, linked: bool) -> str:
    shade = WEIGHT_SHADES[
        min(round(weight * (len(WEIGHT_SHADES) - 1) + 0.3), len(WEIGHT_SHADES) - 1)
    ]
    return f"[{shade}" if linked else f" {shade}"


def _visible_token(token: str) -> str:
    return "␣" if token == " " else token
