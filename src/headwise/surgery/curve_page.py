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
from .claims import get_joint_curves, list_findings, list_grouped_heads, group_by_part, assess_group_survival, describe_part
from .curves import PruningCurves, CurveValue
from .page import TEXT_WIDTH, to_one_line, format_number, format_table, wrap_text
from .plans import HeadId
from .proof import replace_non_finite
from .quality import LOSS, PERPLEXITY
from .scores import BLEU
from .worths import RANDOM

COLUMNS_PER_TABLE = 3  # columns that fit a page
CURVES_JSON, CURVES_PAGE = "curves.json", "CURVES.md"
VERDICT_SIGNS = {"more": "+", "fewer": "-"}


def write_report(curves: PruningCurves, folder: Path) -> None:
    """curves.json, CURVES.md and every figure, in a folder, made where it is missing."""
    from .curve_figures import write_figures

    folder.mkdir(parents=True, exist_ok=True)
    drawn = write_figures(curves, folder)
    write_atomically(folder / CURVES_JSON, (json.dumps(to_report_data(curves), indent=1, allow_nan=False) + "\n").encode())
    write_atomically(folder / CURVES_PAGE, render_report(curves, drawn).encode())


def to_report_data(curves: PruningCurves) -> dict[str, Any]:
    """The numbers with what they answer, as plain values; what is no finite number is None."""
    return replace_non_finite(curves.data | {"answers": list_findings(curves)})


def render_report(curves: PruningCurves, figure_names: list[str]) -> str:
    """What was asked, what was found, every number in tables, and how to see it again."""
    parts = [[f"# {to_one_line(curves.model)}: quality against heads left", "", *wrap_text(_describe_setup(curves))]]
    parts.append(["## What it shows", "", *(row for said in list_findings(curves) for row in wrap_text(to_one_line(said, 600), "- "))])
    parts += [[f"## {describe_part(curves, part)}", "", *_order_tables(curves, part)] for part in curves.parts]
    parts.append(["## The heads that stay", "", *_survival_tables(curves)])
    parts.append(["## How to see it again", "", *_reproduction_section(curves)])
    if figure_names:
        parts.insert(2, ["## Figures", "", *(f"![{name}]({name}-light.svg)" for name in figure_names)])
    return "\n\n".join("\n".join(part).rstrip() for part in parts) + "\n"


def render_terminal(curves: PruningCurves) -> str:
    """A short table and the answers, no wider than a terminal, without colour."""
    first = next(iter(curves.parts))
    lines = [*wrap_text(f"{to_one_line(curves.model)}: {_describe_setup(curves)}"), "", describe_part(curves, first), ""]
    lines += [*format_short_table(curves, first), ""]
    for said in list_findings(curves):
        lines += wrap_text(said, "  ")
    return "\n".join(lines)


def format_short_table(curves: PruningCurves, part: str) -> list[str]:
    """A column for each order: how the first row differs from the whole model's, against heads left."""
    every = [{mark.num_heads: mark for mark in curves.list_values(part, order, curves.metric_names[0])} for order in curves.orders]
    lefts = sorted({left for own in every for left in own}, reverse=True)[1:]
    rows = [(str(left), *(f"{own[left].value:+.3f}" if left in own else "-" for own in every)) for left in lefts]
    return format_table(("heads left", *curves.orders), rows)


def _describe_setup(curves: PruningCurves) -> str:
    whole = curves.curves[0].points[0].rows[0].after
    asked = (
        f"{curves.objective.capitalize()} over {curves.num_texts} texts, {curves.num_positions:,} places, with ever fewer heads"
    )
    base = f" The whole model's loss is {format_number(whole.value)} ({format_number(whole.low)} to {format_number(whole.high)})."
    draws = f", of {RANDOM} the range of draws" if RANDOM in curves.orders else ""
    said = f" Told is what differs from the whole model; in brackets 95% of draws of texts{draws}."
    return f"{asked}; nothing is trained anew.{base if LOSS in curves.metric_names else ''}{said}"


def _order_tables(curves: PruningCurves, part: str) -> Iterator[str]:
    """A table for each order: at every count, how what is measured differs from the whole model's."""
    for order in curves.orders:
        rows = {name: curves.list_values(part, order, name)[1:] for name in curves.metric_names if name != PERPLEXITY}
        names, draws = [name for name, marks in rows.items() if marks], len(curves.select_curves(part, order))
        for at in range(0, len(names), COLUMNS_PER_TABLE):
            own = names[at : at + COLUMNS_PER_TABLE]
            yield from wrap_text(f"{order}{f', the mean and the range of {draws} draws' if draws > 1 else ''}:")
            yield ""
            lines = zip(*(rows[name] for name in own), strict=True)
            yield from format_table(
                ("left", *(_format_unit(curves, name) for name in own)),
                [(str(marks[0].left), *map(partial(_format_cell, curves), own, marks)) for marks in lines],
            )
            yield ""


def _format_unit(curves: PruningCurves, name: str) -> str:
    return name if name in (LOSS, curves.objective, BLEU) else f"{name}, %"


def _format_cell(curves: PruningCurves, name: str, mark: CurveValue) -> str:
    """A number and its band; shares are told in percent."""
    losses = name in (LOSS, curves.objective)
    times, digits = (1, 3) if losses else (1 if name == BLEU else 100, 1)
    value, low, high = (f"{times * one:+.{digits}f}" for one in mark[1:])
    return f"{value} ({low}, {high})"


def _survival_tables(curves: PruningCurves) -> Iterator[str]:
    """The columns of the figures: of each group, how many are left at every count."""
    yield from wrap_text("All parts together; + and - where surely more or fewer stay than chance leaves.")
    for what, groups in (("part", group_by_part(curves)), ("class", curves.classes)):
        for order, own in get_joint_curves(curves).items() if groups else ():
            yield from ("", f"{order}:", "")
            yield from format_table(*_survival_columns(list_grouped_heads(own, groups), groups, what))


def _survival_columns(
    kept: Sequence[Sequence[HeadId]], groups: Mapping[HeadId, str], what: str
) -> tuple[list[str], list[list[str]]]:
    sure = {(one.group, one.num_heads): VERDICT_SIGNS.get(one.verdict, "") for one in assess_group_survival(groups, kept[1:])}
    rows = [
        [group, *(f"{sum(groups[head] == group for head in own)}{sure.get((group, len(own)), '')}" for own in kept)]
        for group, _ in Counter(groups.values()).most_common()
    ]
    return [what, *(str(len(own)) for own in kept)], rows


def _reproduction_section(curves: PruningCurves) -> Iterator[str]:
    if curves.command:
        yield from (f"    {row}" for row in textwrap.wrap(to_one_line(curves.command), TEXT_WIDTH, subsequent_indent="    "))
        yield ""
    yield from wrap_text(f"Every number stands in {CURVES_JSON}, with the heads that were kept at every point.")
    for note in curves.notes:
        yield from wrap_text(to_one_line(note), "- ")
