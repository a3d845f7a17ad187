"""The heads of a model on a terminal: a cell for each, then the surest of every class and why."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence

from .inks import CLASS_STYLES, class_group
from .table import HeadMeasures, HeadTable

LINE_WIDTH = 80
HEADS_PER_CLASS = 2  # heads that are told of each class
ColourFunction = Callable[[str, str], str]  # a text, and the name of a group of classes


def without_colour(text: str, group: str) -> str:
    """No colour."""
    return text


def with_ansi_colour(text: str, group: str) -> str:
    """In the colour of a group of classes, for a terminal that shows colours."""
    colour = CLASS_STYLES[group][1]
    if not colour:
        return text
    red, green, blue = (int(colour[n : n + 2], 16) for n in (1, 3, 5))
    return f"\x1b[38;2;{red};{green};{blue}m{text}\x1b[0m"


def format_head_table(table: HeadTable, colour: ColourFunction = without_colour) -> str:
    """A grid of letters, layer by layer, and below it the surest heads of each class."""
    lines = [f"{table.model}, {table.texts}", "", *_grid_lines(table, colour), ""]
    for group in CLASS_STYLES:
        if group != "unclear":
            lines += _top_heads(table, group, colour)
    return "\n".join([*lines, *_note_lines(table)])


def format_head_ranking(table: HeadTable, measure: str) -> str:
    """Heads with the most of a measure first: the value, its interval, chance, and the first classes.

    >>> from headwise.heads.table import Measure
    >>> head = HeadMeasures("decoder", "attention", 0, 3, 0, "decoder.0.attention", {"sink": Measure(0.5, 0.4, 0.6, 0.1)})
    >>> print(format_head_ranking(HeadTable("small", "9 texts", (head,)), "sink").splitlines()[-1])
    decoder.0.attention     3   0.50    0.40    0.60    0.10
    """
    heads = table.sorted_by(measure)
    wide = max(len(one.site) for one in heads)
    lines = [
        f"{table.model}, {table.texts}",
        "",
        f"{'site'.ljust(wide)}  head  {measure[:6]:>5}     low    high  chance",
    ]
    for one in heads:
        numbers = "   ".join(f"{number:>5.2f}" for number in one.measures[measure])
        classes = ", ".join(f"{named.name} {named.score:.2f}" for named in one.classes[:2])
        line = f"{one.site.ljust(wide)}  {one.head:>4}  {numbers}  {classes}".rstrip()
        lines.append(line if len(line) <= LINE_WIDTH else f"{line[: LINE_WIDTH - 1]}…")
    return "\n".join([*lines, *_note_lines(table)])


def _grid_lines(table: HeadTable, paint: ColourFunction) -> Iterator[str]:
    sites = table.sites
    wide = max(len(site) for site in sites)
    heads = {(one.site, one.head): one for one in table.heads}
    count = max(one.head for one in table.heads) + 1
    across = max(1, (LINE_WIDTH - wide - 2) // 3)
    for start in range(0, count, across):
        some = range(start, min(count, start + across))
        yield f"{'head'.ljust(wide)}  {''.join(str(n).rjust(2) + ' ' for n in some)}".rstrip()
        for site in sites:
            cells = [_cell_letter(heads.get((site, n)), paint) for n in some]
            yield f"{site.ljust(wide)}  {''.join(cells)}".rstrip()


def _cell_letter(one: HeadMeasures | None, paint: ColourFunction) -> str:
    """The letter of the first class, small where it is not sure of half."""
    if one is None:
        return "   "
    if not one.classes:
        return " · "
    group = class_group(one.classes[0].name)
    letter = "·" if group == "unclear" else CLASS_STYLES[group][0]
    return " " + paint(letter if one.classes[0].score >= 0.5 else letter.lower(), group) + " "


def _top_heads(table: HeadTable, group: str, paint: ColourFunction) -> Iterator[str]:
    found = [(named, one) for one in table.heads for named in one.classes if class_group(named.name) == group]
    found.sort(key=lambda pair: -pair[0].score)
    if not found:
        return
    count = len({id(one) for _, one in found})
    yield paint(f"{CLASS_STYLES[group][0]}  {group}", group) + f", {count} head{'s' if count > 1 else ''}"
    for named, one in found[:HEADS_PER_CLASS]:
        yield from textwrap.wrap(f"{one.site} {one.head}: {named.name} {named.score:.2f}, {named.evidence}", LINE_WIDTH,
                                 initial_indent="   ", subsequent_indent="   ")  # fmt: skip


def _note_lines(table: HeadTable) -> Sequence[str]:
    return (
        ["", *(line for note in table.notes for line in textwrap.wrap(f"note: {note}", LINE_WIDTH))] if table.notes else []
    )
