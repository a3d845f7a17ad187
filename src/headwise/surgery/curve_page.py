"""Curves as files: numbers for programs, a page for people, and the figures."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..files import write_atomically
from .claims import answers, titled
from .curves import Curves, Mark
from .page import INSIDE, line, number, table, wrapped
from .proof import finite
from .quality import LOSS
from .worths import RANDOM

JSON, PAGE = "curves.json", "CURVES.md"


def write(curves: Curves, folder: Path) -> None:
    """curves.json, CURVES.md and every figure, in a folder, made where it is missing."""
    from .curve_figures import write_figures

    folder.mkdir(parents=True, exist_ok=True)
    drawn = write_figures(curves, folder)
    write_atomically(folder / JSON, (json.dumps(data_of(curves), indent=1, allow_nan=False) + "\n").encode())
    write_atomically(folder / PAGE, page(curves, drawn).encode())


def data_of(curves: Curves) -> dict[str, Any]:
    """The numbers with what they answer, as plain values; what is no finite number is None."""
    return finite(curves.data | {"answers": answers(curves)})


def page(curves: Curves, drawn: list[str]) -> str:
    """What was asked, what was found, every number in tables, and how to see it again."""
    parts = [[f"# {line(curves.model)}: quality against heads left", "", *wrapped(_what(curves))]]
    parts.append(["## What it shows", "", *(row for said in answers(curves) for row in wrapped(line(said, 600), "- "))])
    parts += [[f"## {titled(curves, part)}", "", *_tables(curves, part)] for part in curves.parts]
    parts.append(["## How to see it again", "", *_see(curves)])
    if drawn:
        parts.insert(2, ["## Figures", "", *(f"![{name}]({name}-light.svg)" for name in drawn)])
    return "\n\n".join("\n".join(part).rstrip() for part in parts) + "\n"


def told(curves: Curves) -> str:
    """A short table and the answers, no wider than a terminal, without colour."""
    first = next(iter(curves.parts))
    lines = [*wrapped(f"{line(curves.model)}: {_what(curves)}"), "", titled(curves, first), ""]
    lines += [*short(curves, first), ""]
    for said in answers(curves):
        lines += wrapped(said, "  ")
    return "\n".join(lines)


def short(curves: Curves, part: str) -> list[str]:
    """A column for each order: how the first row differs from the whole model's, against heads left."""
    every = [{mark.left: mark for mark in curves.marks(part, order, curves.names[0])} for order in curves.orders]
    lefts = sorted({left for own in every for left in own}, reverse=True)[1:]
    rows = [(str(left), *(f"{own[left].value:+.3f}" if left in own else "-" for own in every)) for left in lefts]
    return table(("heads left", *curves.orders), rows)


def _what(curves: Curves) -> str:
    whole = curves.lines[0].points[0].rows[0].after
    base = "" if curves.names[0] != LOSS else f" The whole model's loss is {number(whole.value)}"
    spread = f" ({number(whole.low)} to {number(whole.high)})." if base else ""
    return (
        f"{curves.objective} over {curves.texts} texts, {curves.places:,} places, with ever fewer heads; nothing is "
        f"trained anew.{base}{spread}"
    )


def _tables(curves: Curves, part: str) -> Iterator[str]:
    for name in curves.names:
        if name == "perplexity":
            continue
        own = [order for order in curves.orders if curves.marks(part, order, name)]
        yield from wrapped(f"{name}, less that of the whole model:")
        yield ""
        for order in own:
            marks = curves.marks(part, order, name)[1:]
            draws = len(curves.own(part, order))
            band = f"range of {draws} draws" if draws > 1 else "95% of draws of texts"
            yield from table((order, "change", band), [_row(mark) for mark in marks])
            yield ""


def _row(mark: Mark) -> tuple[str, str, str]:
    return f"{mark.left} left", f"{mark.value:+.3f}", f"{mark.low:+.3f} to {mark.high:+.3f}"


def _see(curves: Curves) -> Iterator[str]:
    if curves.command:
        yield from (f"    {row}" for row in textwrap.wrap(line(curves.command), INSIDE, subsequent_indent="    "))
        yield ""
    yield from wrapped(f"Every number stands in {JSON}, with the heads that were kept at every point.")
    if RANDOM in curves.orders:
        yield from wrapped("Of random the mean of all draws is shown, and their range.", "- ")
    for note in curves.notes:
        yield from wrapped(line(note), "- ")
