"""A heat map of attention weights in characters, for terminals."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..translation.terminal_text import pad, text_width

WEIGHT_SHADES = " ·░▒▓█"  # weight 0 .. 1


def draw_heat_map(
    queries: Sequence[str],
    keys: Sequence[str],
    weights: Sequence[Sequence[float]],
    marked_links: Collection[tuple[int, int]] = (),
) -> str:
    """Draw weights [queries, keys]: a row for each query, darker for larger weights; links (key, query) are marked [.

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
        cells = [_shade_cell(w, (column, row) in marked_links) for column, w in enumerate(row_weights)]
        row_text = "".join(pad(cell, w) for cell, w in zip(cells, columns, strict=True))
        lines.append(pad(token, side) + row_text)
    return "\n".join(line.rstrip() for line in lines)


def _shade_cell(weight: float, linked: bool) -> str:
    shade = WEIGHT_SHADES[min(round(weight * (len(WEIGHT_SHADES) - 1) + 0.3), len(WEIGHT_SHADES) - 1)]
    return f"[{shade}" if linked else f" {shade}"


def _visible_token(token: str) -> str:
    return "␣" if token == " " else token
