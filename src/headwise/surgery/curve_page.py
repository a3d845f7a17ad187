"""Curves as files: numbers for programs, a page for people, and the figures."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..files import write_atomically
from .claims import alone, answers, kept_of, parts_of, stayed, titled
from .curves import Curves, Mark
from .page import INSIDE, line, number, table, wrapped
from .plans import Head
from .proof import finite
from .quality import LOSS, PERPLEXITY
from .scores import BLEU
from .worths import RANDOM

ACROSS = 3  # columns that fit a page
JSON, PAGE = "curves.json", "CURVES.md"
SURE = {"more": "+", "fewer": "-"}


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
    parts.append(["## The heads that stay", "", *_stay(curves)])
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
    asked = (
        f"{curves.objective.capitalize()} over {curves.texts} texts, {curves.places:,} places, with ever fewer heads"
    )
    base = f" The whole model's loss is {number(whole.value)} ({number(whole.low)} to {number(whole.high)})."
    draws = f", of {RANDOM} the range of draws" if RANDOM in curves.orders else ""
    said = f" Told is what differs from the whole model; in brackets 95% of draws of texts{draws}."
    return f"{asked}; nothing is trained anew.{base if LOSS in curves.names else ''}{said}"


def _tables(curves: Curves, part: str) -> Iterator[str]:
    """A table for each order: at every count, how what is measured differs from the whole model's."""
    for order in curves.orders:
        rows = {name: curves.marks(part, order, name)[1:] for name in curves.names if name != PERPLEXITY}
        names, draws = [name for name, marks in rows.items() if marks], len(curves.own(part, order))
        for at in range(0, len(names), ACROSS):
            own = names[at : at + ACROSS]
            yield from wrapped(f"{order}{f', the mean and the range of {draws} draws' if draws > 1 else ''}:")
            yield ""
            lines = zip(*(rows[name] for name in own), strict=True)
            yield from table(
                ("left", *(_unit(curves, name) for name in own)),
                [(str(marks[0].left), *map(partial(_cell, curves), own, marks)) for marks in lines],
            )
            yield ""


def _unit(curves: Curves, name: str) -> str:
    return name if name in (LOSS, curves.objective, BLEU) else f"{name}, %"


def _cell(curves: Curves, name: str, mark: Mark) -> str:
    """A number and its band; shares are told in percent."""
    losses = name in (LOSS, curves.objective)
    times, digits = (1, 3) if losses else (1 if name == BLEU else 100, 1)
    value, low, high = (f"{times * one:+.{digits}f}" for one in mark[1:])
    return f"{value} ({low}, {high})"


def _stay(curves: Curves) -> Iterator[str]:
    """The columns of the figures: of each group, how many are left at every count."""
    yield from wrapped("All parts together; + and - where surely more or fewer stay than chance leaves.")
    for what, groups in (("part", parts_of(curves)), ("class", curves.classes)):
        for order, own in alone(curves).items() if groups else ():
            yield from ("", f"{order}:", "")
            yield from table(*_columns(kept_of(own, groups), groups, what))


def _columns(
    kept: Sequence[Sequence[Head]], groups: Mapping[Head, str], what: str
) -> tuple[list[str], list[list[str]]]:
    sure = {(one.group, one.left): SURE.get(one.sure, "") for one in stayed(groups, kept[1:])}
    rows = [
        [group, *(f"{sum(groups[head] == group for head in own)}{sure.get((group, len(own)), '')}" for own in kept)]
        for group, _ in Counter(groups.values()).most_common()
    ]
    return [what, *(str(len(own)) for own in kept)], rows


def _see(curves: Curves) -> Iterator[str]:
    if curves.command:
        yield from (f"    {row}" for row in textwrap.wrap(line(curves.command), INSIDE, subsequent_indent="    "))
        yield ""
    yield from wrapped(f"Every number stands in {JSON}, with the heads that were kept at every point.")
    for note in curves.notes:
        yield from wrapped(line(note), "- ")
