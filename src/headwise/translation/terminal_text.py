"""Text by its width in columns of a terminal: padded, wrapped and aligned, and heat maps in
characters.

A Chinese character takes two columns.
"""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Collection, Iterator, Sequence

TERMINAL_WIDTH = 80
# characters that no line begins with
CLOSING = "\uff0c\u3002\uff1b\uff1a\u3001\uff09\u300d\uff01\uff1f\u201d"
OPENING = "\uff08\u300c\u300a\u201c"  # characters that no line ends with


def text_width(text: str) -> int:
    """Columns of a text in a terminal; Chinese characters take two.

    >>> text_width("QK^T 点积")
    9
    """
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def pad(text: str, width: int) -> str:
    """The text with spaces after it, up to this width."""
    return text + " " * (width - text_width(text))


def pad_left(text: str, width: int) -> str:
    """The text with spaces before it, up to this width."""
    return " " * (width - text_width(text)) + text


def cut(text: str, width: int) -> str:
    """The text, or its beginning and "…" if it is wider.

    >>> cut("点积点积", 6), cut("abc", 3)
    ('点积…', 'abc')
    """
    if text_width(text) <= width:
        return text
    while text_width(text) >= width:
        text = text[:-1]
    return f"{text}…"


def rule(text: str, width: int = TERMINAL_WIDTH) -> str:
    """A heading with a line after it, up to this width.

    >>> rule("-- 词元 ", 12)
    '-- 词元 ────'
    """
    return text + "\u2500" * (width - text_width(text))


def wrap(
    text: str, width: int = TERMINAL_WIDTH, indent: str = "", hanging: str | None = None
) -> list[str]:
    """The text in lines of at most this width; Latin words stay whole, Chinese text breaks between
    any two characters.

    >>> wrap("a long word 一二三", 8)
    ['a long', 'word 一', '二三']
    >>> wrap("run it in all-of-it", 10)  # commands stay whole
    ['run it in', 'all-of-it']
    >>> wrap("一二三「四」“五”", 8)
    ['一二三', '「四」', '“五”']
    """
    hanging = indent if hanging is None else hanging
    if text_width(text) == len(text):
        return textwrap.wrap(
            text, width, initial_indent=indent, subsequent_indent=hanging, break_on_hyphens=False
        )
    lines, line = [], indent
    for piece in _pieces(" ".join(text.split())):
        is_start = not line.strip()
        if not is_start and text_width(line + piece.rstrip()) > width and not _is_closing(piece):
            lines.append(line.rstrip())
            line, is_start = hanging, True
        line += piece.lstrip() if is_start else piece
    return [*lines, line.rstrip()] if line.strip() else lines


def _pieces(text: str) -> Iterator[str]:
    """Wide characters, and Latin words with the spaces after them; opening brackets and quotes stay
    with both.
    """
    word = ""
    for letter in text:
        if letter in OPENING:
            if word:
                yield word
            word = letter
        elif unicodedata.east_asian_width(letter) in "WF":
            if word and word not in OPENING:
                yield word
                word = ""
            yield word + letter
            word = ""
        elif word.endswith(" ") and letter != " ":
            yield word
            word = letter
        else:
            word += letter
    if word:
        yield word


def _is_closing(piece: str) -> bool:
    """Whether a line must not begin with this character."""
    return piece[:1] in CLOSING


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
