"""Tables, figures and pages as text for a terminal, Markdown, HTML, JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..util.escaping import escape_markdown, make_visible
from .data import Column, Estimate, Figure, HeatMap, Item, Page, Section, Table, Value
from .text import (
    NOT_MEASURED,
    TERMINAL_WIDTH,
    align_columns,
    format_interval,
    format_numbers,
    is_light,
    pad,
    text_width,
    wrap,
)

SHADES = " ·░▒▓█"  # weight 0 .. 1
TEMPLATE = Path(__file__).with_name("page.html")


# --- Cells of a table -----------------------------------------------------------------------------


def format_cells(table: Table) -> tuple[list[str], list[list[str]], list[bool]]:
    """Return the header, the rows of text, and for each column whether it is aligned to the
    left.
    """
    columns = table.column_list
    header = [f"{one.name}, {one.unit}" if one.unit else one.name for one in columns]
    texts: list[list[str]] = []
    to_left: list[bool] = []
    for number, column in enumerate(columns):
        values = [row[number] for row in table.rows]
        texts.append(_format_column(column, values))
        is_text = any(isinstance(value, str) for value in values)
        to_left.append(column.align == "left" if column.align else is_text)
    rows = [list(row) for row in zip(*texts, strict=True)]
    return header, rows, to_left


def _format_column(column: Column, values: Sequence[Value]) -> list[str]:
    """Return the values of a column as text; numbers with a fraction are formatted alike."""
    numbers = [value for value in values if isinstance(value, float)]
    alike = iter(() if column.format else format_numbers(numbers))
    texts: list[str] = []
    for value in values:
        if value is None:
            texts.append(NOT_MEASURED)
        elif column.format is not None and not isinstance(value, str):
            texts.append(column.format(value))
        elif isinstance(value, bool):
            texts.append("yes" if value else "no")
        elif isinstance(value, Estimate):
            texts.append(format_interval(*value[:3]))
        elif isinstance(value, float):
            texts.append(next(alike))
        else:
            texts.append(value if isinstance(value, str) else f"{value:,}")
    return texts


# --- Terminal -------------------------------------------------------------------------------------


def to_text(item: Item | Page, width: int = TERMINAL_WIDTH, colour: bool = False) -> str:
    """Return a paragraph, list, table, figure or page for a terminal; `colour` allows ANSI
    colours.
    """
    return "\n".join(_text_lines(item, width, colour))


def _text_lines(item: Item | Page, width: int, colour: bool) -> Iterator[str]:
    if isinstance(item, str):
        yield from wrap(make_visible(item), width) or [""]
    elif isinstance(item, list):
        for line in item:
            yield from wrap(make_visible(f"- {line}"), width, hanging="  ")
    elif isinstance(item, Table):
        header, rows, to_left = format_cells(item)
        yield from [*wrap(make_visible(item.title), width), ""] if item.title else []
        rows = [list(map(make_visible, row)) for row in rows]
        yield from align_columns(header, rows, to_left, width)
        yield from note_lines(item.notes, width)
    elif isinstance(item, Figure):
        yield from [*wrap(item.title, width), ""] if item.title else []
        if item.legend:
            legend = [", ".join(item.legend), *([item.legend_title] if item.legend_title else [])]
            yield from [*wrap("; ".join(legend), width), ""]
        for panel in item.panels:
            if isinstance(panel, HeatMap):
                yield from [panel.title] if panel.title else []
                yield from heat_map_lines(panel, width, colour)
    else:
        yield from [*wrap(item.title, width), *wrap(item.summary, width)]
        for section in item.sections:
            yield from ["", section.title, "-" * text_width(section.title)]
            for part in section.items:
                yield ""
                yield from _text_lines(part, width, colour)


def note_lines(notes: Sequence[str], width: int = TERMINAL_WIDTH) -> list[str]:
    """Return notes as lines below a table, after an empty line."""
    lines = [""] if notes else []
    for note in notes:
        lines += wrap(make_visible(f"note: {note}"), width)
    return lines


def heat_map_lines(
    panel: HeatMap, width: int = TERMINAL_WIDTH, colour: bool = False
) -> Iterator[str]:
    """Yield a row of cells for each row of a heat map: texts if it has them, else shades.

    >>> panel = HeatMap([[0.0, 1.0], [0.5, 0.5]], ["x", "y"], ["a", "b"], marked=[(0, 1)])
    >>> print("\\n".join(heat_map_lines(panel)))
       a b
    x   [█
    y  ▒ ▒
    """
    corner = panel.x_label if panel.texts else ""
    side = max(map(text_width, [*panel.rows, corner]))
    gap = "  " if panel.texts else " "
    sizes = [max(text_width(name), 1) + len(gap) for name in panel.columns]
    start = 0
    while start < len(sizes):
        end = start + 1
        while end < len(sizes) and side + 1 + sum(sizes[start : end + 1]) <= width:
            end += 1
        names = [pad(f"{gap}{panel.columns[n]}", sizes[n]) for n in range(start, end)]
        yield f"{pad(corner, side)} {''.join(names)}".rstrip()
        for row, name in enumerate(panel.rows):
            cells = "".join(_cell(panel, row, n, sizes[n], colour) for n in range(start, end))
            yield f"{pad(name, side)} {cells}".rstrip()
        start = end


def _cell(panel: HeatMap, row: int, column: int, size: int, colour: bool) -> str:
    if panel.texts:
        text = panel.texts[row][column]
        shown = panel.colours[row][column] if colour and panel.colours else ""
        painted = colour_text(text, shown) if text.strip() else text
        return "  " + painted + " " * (size - 2 - len(text))
    strength = round(panel.values[row][column] * (len(SHADES) - 1) + 0.3)
    mark = "[" if (row, column) in panel.marked else " "
    return pad(mark + SHADES[min(max(strength, 0), len(SHADES) - 1)], size)


def colour_text(text: str, colour: str) -> str:
    """Return the text in black or white on a colour, legible in light and dark terminals."""
    if not colour:
        return text
    red, green, blue = (int(colour[n : n + 2], 16) for n in (1, 3, 5))
    ink = 16 if is_light(colour) else 231  # black and white of the 256 fixed colours
    return f"\x1b[48;2;{red};{green};{blue};38;5;{ink}m{text}\x1b[0m"


# --- Markdown, CSV and JSON -----------------------------------------------------------------------


def to_markdown(
    item: Item | Page, image_of: Mapping[str, str] | None = None, level: int = 1
) -> str:
    """Return Markdown. `image_of` gives the address of the picture of a figure by its title."""
    render = partial(to_markdown, image_of=image_of)
    heading = "#" * level
    if isinstance(item, str):
        return escape_markdown(item)
    if isinstance(item, list):
        return "\n".join(f"- {escape_markdown(line)}" for line in item)
    if isinstance(item, Table):
        header, rows, to_left = format_cells(item)
        rules = ["---" if left else "---:" for left in to_left]
        lines = [header, *(list(map(escape_markdown, row)) for row in rows)]
        for row, column in item.bold:
            lines[row + 1][column] = f"**{lines[row + 1][column]}**"
        table = "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], rules, *lines[1:]])
        title = [f"{heading} {escape_markdown(item.title)}"] if item.title else []
        return "\n\n".join([*title, table, *map(escape_markdown, item.notes)])
    if isinstance(item, Figure):
        address = (image_of or {}).get(item.title)
        picture = [f"![{escape_markdown(item.title)}]({address})"] if address else []
        return "\n\n".join([*picture, *([escape_markdown(item.note)] if item.note else [])])
    parts = [f"{heading} {escape_markdown(item.title)}"]
    parts += [escape_markdown(item.summary)] if item.summary else []
    for section in item.sections:
        parts.append(f"{heading}# {escape_markdown(section.title)}")
        parts += [render(part, level=level + 2) for part in section.items]
    return "\n\n".join(parts) + "\n"


def to_csv(table: Table) -> str:
    """Return a table as CSV (RFC 4180) with plain values; what was not measured is an empty field.

    An estimate has three columns.

    >>> to_csv(Table("", ("a", "b"), [("x, y", Estimate(0.5, 0.25)), ("z", None)])).splitlines()
    ['a,b,b low,b high', '"x, y",0.5,0.25,', 'z,,,']
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    for cells in flat_rows(table):
        writer.writerow(["" if is_nan(cell) else cell for cell in cells])
    return buffer.getvalue()


def flat_rows(table: Table) -> Iterator[list[Any]]:
    """Yield the header and the rows of a table; an estimate has three columns."""
    wide: list[bool] = []
    header: list[str] = []
    for n, column in enumerate(table.column_list):
        wide.append(any(isinstance(row[n], Estimate) for row in table.rows))
        header.append(column.name)
        if wide[-1]:
            header += [f"{column.name} low", f"{column.name} high"]
    yield header
    for row in table.rows:
        cells: list[Any] = []
        for value, is_wide in zip(row, wide, strict=True):
            cells += value[:3] if isinstance(value, Estimate) else [value, *([None] * 2 * is_wide)]
        yield cells


def is_nan(value: object) -> bool:
    """Return True for the float NaN."""
    return isinstance(value, float) and math.isnan(value)


def to_plain(value: Any) -> Any:
    """Return data as lists, dictionaries, texts and numbers, ready for JSON; NaN becomes None.

    >>> to_plain({"a": Estimate(0.5), "b": (1, math.nan)})["b"]
    [1, None]
    """
    if is_dataclass(value):
        return {one.name: to_plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, tuple) and isinstance(value, Estimate):
        return value.data
    if isinstance(value, Mapping):
        return {str(name): to_plain(part) for name, part in value.items()}
    if isinstance(value, str | int | bool) or value is None:
        return value
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if callable(value):
        return None  # formats of columns and axes
    return [to_plain(part) for part in (value if isinstance(value, Iterable) else [value.item()])]


def to_json(value: Any) -> str:
    """Return data as JSON."""
    return json.dumps(to_plain(value), indent=1, allow_nan=False, ensure_ascii=False) + "\n"


# --- HTML -----------------------------------------------------------------------------------------


def to_html(page: Page) -> str:
    """Return a page as one HTML document, light and dark, without scripts and remote addresses."""

    return fill_template(TEMPLATE, page=page, themes=["light", "dark"])


def fill_template(template: Path, **values: Any) -> str:
    """Return HTML of a template, which may include `items.html` of this folder; texts are escaped
    and made visible.
    """
    import jinja2

    from .plots import to_svg

    def kind(item: Any) -> str:
        kinds = (one.__name__ for one in (Figure, Table) if isinstance(item, one))
        return next(kinds, type(item).__name__)

    def show(value: Any) -> Any:
        return make_visible(value, keep="\n\t") if type(value) is str else value

    loader = jinja2.FileSystemLoader(TEMPLATE.parent)
    environment = jinja2.Environment(
        autoescape=True, finalize=show, trim_blocks=True, lstrip_blocks=True, loader=loader
    )
    text = template.read_text(encoding="utf-8")
    functions = {"to_svg": to_svg, "format_cells": format_cells, "kind": kind}
    return environment.from_string(text).render(values | functions)


def make_page(title: str, *sections: tuple[str, Sequence[Item]], summary: str = "") -> Page:
    """Return a page of sections (title, items)."""
    return Page(title, [Section(name, items) for name, items in sections], summary)
