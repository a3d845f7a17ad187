"""Tables of measures with their confidence intervals for a terminal; small numbers are printed in
scientific form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..report.text import cut, pad, pad_left, text_width, wrap
from .head_table import HeadTable, ImportanceResult, Measure

if TYPE_CHECKING:
    from .attention_maps import AttentionTable
    from .logit_attribution import LogitAttribution

LINE_WIDTH = 80
SMALLEST_FIXED, LARGEST_FIXED = 0.01, 10_000.0  # magnitudes that two decimals can show
INTERVAL_COLUMNS = ("low", "high")
INTERVAL_NOTE = "low and high: 95 % interval"


def format_numbers(values: Sequence[float]) -> list[str]:
    """Format numbers of one kind alike: with two decimals, or in scientific form if any of them
    needs it.

    >>> format_numbers([0.5, 0.0, 12.345])
    ['0.50', '0.00', '12.35']
    >>> format_numbers([0.000123, -0.5, math.nan])
    ['1.23e-04', '-5.00e-01', '-']
    """
    sizes = [abs(value) for value in values if value and math.isfinite(value)]
    is_fixed = all(SMALLEST_FIXED <= size < LARGEST_FIXED for size in sizes)
    return [
        "-" if math.isnan(value) else f"{value:.2f}" if is_fixed else f"{value:.2e}"
        for value in values
    ]


def format_interval(measure: Measure) -> str:
    """Format a measure with its interval in brackets.

    >>> format_interval(Measure(0.000123, 0.0001, 0.00015, 0.0))
    '1.23e-04 [1.00e-04, 1.50e-04]'
    >>> format_interval(Measure(0.5, 0.5, 0.5, 0.0))
    '0.50 [no spread]'
    """
    value, low, high = format_numbers([measure.value, measure.low, measure.high])
    return f"{value} [{low}, {high}]" if measure.low < measure.high else f"{value} [no spread]"


def format_columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Align columns below their names: the first and the last to the left, the
    others to the right.
    """
    lines, last = [list(header), *rows], len(header) - 1
    widths = [max(text_width(line[n]) for line in lines) for n in range(len(header))]
    aligned = (
        "  ".join(
            pad(cell, width) if n in (0, last) else pad_left(cell, width)
            for n, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
    return [cut(line, LINE_WIDTH) for line in aligned]


def format_notes(notes: Sequence[str]) -> list[str]:
    """Format notes as wrapped lines below a table."""
    return (
        ["", *(line for note in notes for line in wrap(f"note: {note}", LINE_WIDTH))]
        if notes
        else []
    )


def format_head_ranking(table: HeadTable, measure: str) -> str:
    """Format heads by decreasing value of a measure: value, interval, chance and first classes.

    >>> from headwise.head_analysis.head_table import HeadMeasures
    >>> head = HeadMeasures(
    ...     "decoder",
    ...     "attention",
    ...     0,
    ...     3,
    ...     0,
    ...     "decoder.0.attention",
    ...     {"sink": Measure(0.5, 0.4, 0.6, 0.1)},
    ... )
    >>> print(format_head_ranking(HeadTable("small", "9 texts", (head,)), "sink").splitlines()[-1])
    decoder.0.attention     3  0.50  0.40  0.60    0.10
    """
    heads = table.sorted_by(measure)
    numbers = format_numbers([number for head in heads for number in head.measures[measure][:4]])
    rows = [
        [
            head.site,
            str(head.head),
            *numbers[4 * n : 4 * n + 4],
            ", ".join(f"{one.name} {one.score:.2f}" for one in head.classes[:2]),
        ]
        for n, head in enumerate(heads)
    ]
    lines = format_columns(["site", "head", measure, *INTERVAL_COLUMNS, "chance", "classes"], rows)
    title = f"{table.model}, {table.texts}; {INTERVAL_NOTE}"
    return "\n".join([title, "", *lines, *format_notes(table.notes)])


def format_importance(result: ImportanceResult) -> str:
    """Format heads by decreasing importance: value, interval and corrected p-value."""
    heads = result.by_importance
    numbers = format_numbers([number for head in heads for number in head.measure[:3]])
    rows = [
        [
            head.site,
            str(head.head),
            *numbers[3 * n : 3 * n + 3],
            "-"
            if math.isnan(head.level)
            else f"{head.level:.3f}"
            if head.level >= 0.001
            else "< 0.001",
        ]
        for n, head in enumerate(heads)
    ]
    title = (
        f"{result.model}, {result.texts} texts: importance by {result.method} for "
        f"{result.objective}"
    )
    lines = format_columns(["site", "head", "importance", *INTERVAL_COLUMNS, "corrected p"], rows)
    return "\n".join([*wrap(title), INTERVAL_NOTE, "", *lines, *format_notes(result.notes)])


def format_logit_shares(attribution: LogitAttribution) -> str:
    """Format what heads add to a logit, the largest contribution first."""
    shares = attribution.by_size
    names = [
        f"token {token}" for token in (attribution.token, attribution.baseline) if token is not None
    ]
    named = [
        f"{name} ({word!r})" for name, word in zip(names, attribution.words or names, strict=True)
    ]
    what = f"the logit of {' minus that of '.join(named)}"
    total, rest, *numbers = format_numbers(
        [attribution.logit, attribution.rest, *(share.value for share in shares)]
    )
    rows = [
        [share.site, str(share.head), number, ""]
        for share, number in zip(shares, numbers, strict=True)
    ]
    lines = format_columns(["site", "head", "added", ""], rows)
    title = (
        f"{what} at position {attribution.position}: {total}, of which {rest} comes from no head"
    )
    return "\n".join([*wrap(title, LINE_WIDTH), "", *lines])


def format_attention_table(table: AttentionTable) -> str:
    """Format the largest entries of every query of an attention matrix, largest first."""
    numbers = iter(format_numbers([value for row in table.values for value in row]))
    rows: list[list[str]] = []
    for place, (query, values) in enumerate(zip(table.queries, table.values, strict=True)):
        texts = [next(numbers) for _ in values]
        order = sorted(range(len(values)), key=lambda key: -values[key])[: table.top]
        largest = "  ".join(
            f"{table.keys[key]!r} {key}: {texts[key]}" for key in order if values[key]
        )
        rows.append([repr(query), str(place), largest])
    lines = format_columns(["query", "position", "largest keys"], rows)
    return "\n".join([table.title, "", *lines])
