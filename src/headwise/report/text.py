"""Text by its width in columns of a terminal, where a Chinese character takes two."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterator, Sequence

TERMINAL_WIDTH = 80
# characters that no line begins with
CLOSING = "\uff0c\u3002\uff1b\uff1a\u3001\uff09\u300d\uff01\uff1f\u201d"
OPENING = "\uff08\u300c\u300a\u201c"  # characters that no line ends with


def text_width(text: str) -> int:
    """Return the columns of a text on a terminal.

    >>> text_width("QK^T 点积")
    9
    """
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def pad(text: str, width: int) -> str:
    """Return the text with spaces after it, up to this width."""
    return text + " " * (width - text_width(text))


def pad_left(text: str, width: int) -> str:
    """Return the text with spaces before it, up to this width."""
    return " " * (width - text_width(text)) + text


def cut(text: str, width: int) -> str:
    """Return the text, or its beginning and "…" if it is wider.

    >>> cut("点积点积", 6), cut("abc", 3)
    ('点积…', 'abc')
    """
    if text_width(text) <= width:
        return text
    while text_width(text) >= width:
        text = text[:-1]
    return f"{text}…"


def rule(text: str, width: int = TERMINAL_WIDTH) -> str:
    """Return a heading with a line after it, up to this width.

    >>> rule("-- 词元 ", 12)
    '-- 词元 ────'
    """
    return text + "\u2500" * (width - text_width(text))


def wrap(
    text: str, width: int = TERMINAL_WIDTH, indent: str = "", hanging: str | None = None
) -> list[str]:
    """Return the text in lines of at most this width; `hanging` indents all lines but the first.

    Latin words stay whole, Chinese text breaks between any two characters.

    >>> wrap("a long word 一二三", 8), wrap("run it in all-of-it", 10)
    (['a long', 'word 一', '二三'], ['run it in', 'all-of-it'])
    >>> wrap("一二三「四」“五”", 8)
    ['一二三', '「四」', '“五”']
    """
    hanging = indent if hanging is None else hanging
    if text_width(text) == len(text):
        return textwrap.wrap(
            text, width, initial_indent=indent, subsequent_indent=hanging, break_on_hyphens=False
        )
    lines: list[str] = []
    line = indent
    for piece in _pieces(" ".join(text.split())):
        is_start = not line.strip()
        is_full = text_width(line + piece.rstrip()) > width and piece[:1] not in CLOSING
        if not is_start and is_full:
            lines.append(line.rstrip())
            line = hanging
            is_start = True
        line += piece.lstrip() if is_start else piece
    return [*lines, line.rstrip()] if line.strip() else lines


def _pieces(text: str) -> Iterator[str]:
    """Yield wide characters, and Latin words with the spaces after them; opening brackets and quotes
    stay with what follows them.
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


def align_columns(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    to_left: Sequence[bool],
    width: int = TERMINAL_WIDTH,
) -> list[str]:
    """Return a header and rows as lines with aligned columns.

    Columns that do not fit the width follow below, each time after the first column. A line is cut
    only if the first column and one more do not fit.

    >>> align_columns(["键", "n"], [["keys", "22"]], [True, False])
    ['键     n', 'keys  22']
    >>> align_columns(["key", "n", "m"], [["a", "1", "2"]], [True, False, False], width=7)
    ['key  n', 'a    1', '', 'key  m', 'a    2']
    """
    columns = list(zip(header, *rows, strict=True))
    padded: list[list[str]] = []
    for column, left in zip(columns, to_left, strict=True):
        size = max(map(text_width, column))
        padded.append([pad(cell, size) if left else pad_left(cell, size) for cell in column])
    aligned: list[str] = []
    rest = padded[1:]
    while padded:
        part = padded[:1]
        used = text_width(part[0][0])
        while rest and (len(part) == 1 or used + 2 + text_width(rest[0][0]) <= width):
            used += 2 + text_width(rest[0][0])
            part.append(rest.pop(0))
        aligned += [""] if aligned else []
        aligned += [cut("  ".join(cells).rstrip(), width) for cells in zip(*part, strict=True)]
        if not rest:
            break
    return aligned


def spread_labels(
    targets: Sequence[float], gap: float, low: float = 0.0, high: float = 1.0
) -> list[float]:
    """Return positions within bounds that are at least `gap` apart, with the least sum of squared
    distances to `targets`. If the bounds are too narrow, the gap is reduced.

    >>> spread_labels([0.5, 0.5, 0.9], gap=0.2), spread_labels([1.0, 0.0, 1.0], gap=0.25)
    ([0.4, 0.6, 0.9], [0.75, 0.0, 1.0])
    """
    order = sorted(range(len(targets)), key=lambda n: targets[n])
    gap = min(gap, (high - low) / max(len(targets) - 1, 1))
    blocks: list[tuple[float, int]] = []  # sum and number of neighbours that touch each other
    for rank, n in enumerate(order):
        total = targets[n] - rank * gap
        count = 1
        while blocks and blocks[-1][0] / blocks[-1][1] > total / count:
            previous_total, previous_count = blocks.pop()
            total += previous_total
            count += previous_count
        blocks.append((total, count))
    starts: list[float] = []
    for total, count in blocks:
        starts += [min(max(total / count, low), high - (len(targets) - 1) * gap)] * count
    positions = [0.0] * len(targets)
    for rank, n in enumerate(order):
        positions[n] = round(starts[rank] + rank * gap, 9)
    return positions


def is_light(colour: str) -> bool:
    """Return True if black is easier to read than white on "#rrggbb"."""
    parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return luminance > 0.179  # where both have the same contrast
