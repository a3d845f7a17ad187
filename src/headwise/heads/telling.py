"""The heads of a model on a terminal: a cell for each, then the surest of every class and why."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence

from .inks import CLASSES, group_of
from .table import Head, Table

WIDTH = 80
BEST = 2  # heads that are told of each class
Paint = Callable[[str, str], str]  # a text, and the name of a group of classes


def plain(text: str, group: str) -> str:
    """No colour."""
    return text


def painted(text: str, group: str) -> str:
    """In the colour of a group of classes, for a terminal that shows colours."""
    colour = CLASSES[group][1]
    if not colour:
        return text
    red, green, blue = (int(colour[n : n + 2], 16) for n in (1, 3, 5))
    return f"\x1b[38;2;{red};{green};{blue}m{text}\x1b[0m"


def told(table: Table, paint: Paint = plain) -> str:
    """A grid of letters, layer by layer, and below it the surest heads of each class."""
    lines = [f"{table.model}, {table.texts}", "", *_grid(table, paint), ""]
    for group in CLASSES:
        if group != "unclear":
            lines += _best(table, group, paint)
    return "\n".join([*lines, *_notes(table)])


def listed(table: Table, measure: str) -> str:
    """Heads with the most of a measure first: the value, its interval, chance, and the first classes.

    >>> from headwise.heads.table import Measure
    >>> head = Head("decoder", "attention", 0, 3, 0, "decoder.0.attention", {"sink": Measure(0.5, 0.4, 0.6, 0.1)})
    >>> print(listed(Table("small", "9 texts", (head,)), "sink").splitlines()[-1])
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
        lines.append(line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…")
    return "\n".join([*lines, *_notes(table)])


def _grid(table: Table, paint: Paint) -> Iterator[str]:
    sites = table.sites
    wide = max(len(site) for site in sites)
    heads = {(one.site, one.head): one for one in table.heads}
    count = max(one.head for one in table.heads) + 1
    across = max(1, (WIDTH - wide - 2) // 3)
    for start in range(0, count, across):
        some = range(start, min(count, start + across))
        yield f"{'head'.ljust(wide)}  {''.join(str(n).rjust(2) + ' ' for n in some)}".rstrip()
        for site in sites:
            cells = [_cell(heads.get((site, n)), paint) for n in some]
            yield f"{site.ljust(wide)}  {''.join(cells)}".rstrip()


def _cell(one: Head | None, paint: Paint) -> str:
    """The letter of the first class, small where it is not sure of half."""
    if one is None:
        return "   "
    if not one.classes:
        return " · "
    group = group_of(one.classes[0].name)
    letter = "·" if group == "unclear" else CLASSES[group][0]
    return " " + paint(letter if one.classes[0].score >= 0.5 else letter.lower(), group) + " "


def _best(table: Table, group: str, paint: Paint) -> Iterator[str]:
    found = [(named, one) for one in table.heads for named in one.classes if group_of(named.name) == group]
    found.sort(key=lambda pair: -pair[0].score)
    if not found:
        return
    count = len({id(one) for _, one in found})
    yield paint(f"{CLASSES[group][0]}  {group}", group) + f", {count} head{'s' if count > 1 else ''}"
    for named, one in found[:BEST]:
        yield from textwrap.wrap(f"{one.site} {one.head}: {named.name} {named.score:.2f}, {named.evidence}", WIDTH,
                                 initial_indent="   ", subsequent_indent="   ")  # fmt: skip


def _notes(table: Table) -> Sequence[str]:
    return (
        ["", *(line for note in table.notes for line in textwrap.wrap(f"note: {note}", WIDTH))] if table.notes else []
    )
