"""Text by its width in columns of a terminal, where a Chinese character takes two."""

from __future__ import annotations

import math
import textwrap
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from statistics import quantiles

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
    """Yield wide characters, and Latin words with the spaces after them; opening brackets and
    quotes stay with what follows them.
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

    Columns that do not fit the width follow below, each time after the first column. That one is
    cut if it leaves no room for the widest column of numbers; longer texts are cut at the width.

    >>> align_columns(["键", "n"], [["keys", "22"]], [True, False])
    ['键     n', 'keys  22']
    >>> align_columns(["key", "n", "m"], [["a", "1", "2"]], [True, False, False], width=7)
    ['key  n', 'a    1', '', 'key  m', 'a    2']
    >>> align_columns(["key", "n"], [["a long name", "12.5"]], [True, False], width=14)
    ['key          n', 'a long …  12.5']
    >>> align_columns(["key", "why"], [["a name", "a long reason"]], [True, True], width=14)
    ['key     why', 'a name  a lon…']
    """
    columns = list(zip(header, *rows, strict=True))
    numbers = [column for column, left in zip(columns[1:], to_left[1:], strict=True) if not left]
    widest = max(map(text_width, chain.from_iterable(numbers)), default=-2)
    most = max(1, width - 2 - widest)
    columns[:1] = [tuple(cut(cell, most) for cell in column) for column in columns[:1]]
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


NOT_MEASURED = "-"
NO_SPREAD = "no spread"  # instead of an interval with equal ends
SMALLEST_FIXED = 0.01  # magnitudes that two decimals can show
LARGEST_FIXED = 10_000.0
UNIT_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")


MAX_TIME_SPREAD = 0.2  # interquartile range over the median of times that mean something


def median_time(times: Sequence[float]) -> float:
    """Return the median of several times; NaN if their quartiles spread by more than a fifth of it,
    because then something else ran on the machine.

    >>> median_time([1.0, 1.1, 1.05]), median_time([1.0, 3.0, 1.2])
    (1.05, nan)
    """
    if len(times) < 2:
        return times[0] if times else math.nan
    low, middle, high = quantiles(times, method="inclusive")
    return middle if high - low <= MAX_TIME_SPREAD * middle else math.nan


def is_missing(value: float | None) -> bool:
    """Return True for None and NaN."""
    return value is None or math.isnan(value)


def format_numbers(values: Sequence[float | None]) -> list[str]:
    """Return numbers of one kind alike: with two decimals, with four if some are small, or all in
    scientific form if all are small or some are large.

    >>> format_numbers([0.5, 0.0, 12.345]), format_numbers([0.00123, -0.5, math.nan])
    (['0.50', '0.00', '12.35'], ['0.0012', '-0.5000', '-'])
    >>> format_numbers([0.000123, 0.0]), format_numbers([12345.6, 0.5])
    (['1.23e-04', '0.00e+00'], ['1.23e+04', '5.00e-01'])
    """
    return list(map(choose_format(values), values))


def choose_format(values: Sequence[float | None]) -> Callable[[float | None], str]:
    """Return the format of `format_numbers` for all of these numbers, such as those of several
    columns.
    """
    sizes = [abs(value) for value in values if value and math.isfinite(value)]
    is_fixed = not sizes or SMALLEST_FIXED <= max(sizes) < LARGEST_FIXED
    decimals = 2 if min(sizes, default=1.0) >= SMALLEST_FIXED else 4
    form = f".{decimals}f" if is_fixed else ".2e"
    return lambda value: NOT_MEASURED if value is None or is_missing(value) else format(value, form)


def format_number(value: float | None) -> str:
    """Return a number with about four significant digits.

    >>> [format_number(value) for value in (0.12345, 12.3456, 12345.6, 1e-7, 3, math.nan)]
    ['0.1235', '12.346', '12,346', '1.0e-07', '3', '-']
    """
    if value is None or math.isnan(value):
        return NOT_MEASURED
    if value == int(value) if math.isfinite(value) else False:
        return f"{int(value):,}" if abs(value) < 1e6 else format_count(value)
    size = abs(value)
    if size >= 1e6 or size < 1e-4:
        return f"{value:.1e}"
    return format(value, ",.0f" if size >= 1000 else ".3f" if size >= 1 else ".4f")


def format_count(number: float) -> str:
    """Return a count with a unit prefix if it has more than four digits.

    >>> (
    ...     format_count(67108864),
    ...     format_count(999),
    ...     format_count(2 * 10**15),
    ...     format_count(2345 * 10**27),
    ... )
    ('67.11 M', '999', '2.00 P', '2.34e30')
    """
    if abs(number) < 10_000:
        return f"{number:,.0f}"
    digits = str(abs(int(number)))
    power = (len(digits) - 1) // 3
    if power >= len(UNIT_PREFIXES):
        return f"{digits[0]}.{digits[1:3]}e{len(digits) - 1}"
    return f"{number / 1000**power:.2f} {UNIT_PREFIXES[power]}"


def format_bytes(num_bytes: float | None) -> str:
    """Return a number of bytes with a decimal unit.

    >>> format_bytes(192), format_bytes(31104), format_bytes(302_000_000)
    ('192 B', '31.10 kB', '302.00 MB')
    """
    if num_bytes is None or math.isnan(num_bytes):
        return NOT_MEASURED
    if 1000 <= num_bytes < 10_000:
        return f"{num_bytes / 1000:.2f} kB"
    number = format_count(num_bytes)
    return f"{number}B" if number[-1].isalpha() else f"{number} B"


def format_seconds(seconds: float | None) -> str:
    """Return a time with about three digits in the unit that suits it.

    >>> [format_seconds(value) for value in (8.2e-6, 0.0029134, 12.5, 150, 5400)]
    ['8.2 us', '2.91 ms', '12.5 s', '2.5 min', '1.5 h']
    """
    if seconds is None or math.isnan(seconds):
        return NOT_MEASURED
    if seconds >= 90:
        return f"{seconds / 60:.1f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
    units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
    scale, unit = next((pair for pair in units if seconds >= pair[0]), units[-1])
    value = seconds / scale
    places = 0 if value >= 100 else 1 if value >= 10 or unit in ("us", "ns") else 2
    return f"{value:.{places}f} {unit}"


def format_share(share: float | None) -> str:
    """Return a share in per cent.

    >>> format_share(0.917), format_share(0.0042)
    ('92 %', '0.42 %')
    """
    if share is None or math.isnan(share):
        return NOT_MEASURED
    return f"{100 * share:.0f} %" if not share or abs(share) >= 0.01 else f"{100 * share:.2g} %"


def format_p(p: float | None) -> str:
    """Return a p-value.

    >>> format_p(0.0312), format_p(1e-7), format_p(math.nan)
    ('0.031', '< 0.001', '-')
    """
    if p is None or math.isnan(p):
        return NOT_MEASURED
    return f"{p:.3f}" if p >= 0.001 else "< 0.001"


def format_interval(value: float, low: float, high: float, sign: str = "") -> str:
    """Return a value with its interval.

    >>> format_interval(0.000123, 0.0001, 0.00015), format_interval(0.5, 0.5, 0.5)
    ('0.000123 [0.0001, 0.00015]', '0.5 [no spread]')
    """
    if is_missing(value):
        return NOT_MEASURED
    form = f"{sign}.4g" if abs(value) < 10_000 else f"{sign},.0f"
    ends = f"{low:{form}}, {high:{form}}" if low < high else NO_SPREAD
    return f"{value:{form}} [{ends}]"


def format_difference(difference: Sequence[float]) -> str:
    """Return a difference, an `Estimate`, with its sign and its interval.

    >>> format_difference((0.5, -0.25, 1.25))
    '+0.5 [-0.25, +1.25]'
    """
    return format_interval(*difference[:3], sign="+")
