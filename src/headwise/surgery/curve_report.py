"""Pruning curves as tables and figures, and the report CURVES.md.

The question is that of 1905.10650 and 1905.09418: how many heads can be removed, in which order,
from which part. A difference whose interval contains 0 shows nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..report.data import Axis, Column, Estimate, Figure, Page, Plot, Reference, Series, Table
from ..report.plots import save_figure
from ..report.render import make_page, to_markdown, to_plain, to_text
from ..report.text import format_interval
from ..util.files import write_atomically
from ..util.output_paths import Existing, FolderKind, stage_folder
from .head_selection import RANDOM
from .pruning_curves import CurvePoint, PruningCurve, PruningCurves
from .verification.quality_metrics import LOSS, PERPLEXITY


def _format_change(change: Estimate) -> str:
    return format_interval(*change[:3], sign="+")


# --- Tables ---------------------------------------------------------------------------------------


def find_smallest_harmless(curve: PruningCurve, max_loss_increase: float) -> CurvePoint:
    """Return the last point up to which the upper bound of the loss increase stays below
    `max_loss_increase`.
    """
    last_harmless = curve.points[0]
    for point in curve.points[1:]:
        if not point.loss_change.high < max_loss_increase:
            break
        last_harmless = point
    return last_harmless


def make_tables(curves: PruningCurves) -> list[Table]:
    """Return the tables of a report that have rows."""
    tables = [_harmless_table(curves)]
    for name in curves.metric_names:
        if name != PERPLEXITY:
            tables += [_value_table(curves, part, name) for part in curves.parts]
    return [table for table in tables if table.rows]


def _harmless_table(curves: PruningCurves) -> Table:
    rows = list[Sequence[Any]]()
    for part in curves.parts:
        for curve in curves.curves:
            if curve.part == part:
                point = find_smallest_harmless(curve, curves.max_loss_increase)
                num_heads = curves.count_part_heads(part)
                change = Estimate(*point.loss_change)
                is_repeated = len(curves.select_curves(part, curve.order)) > 1
                name = f"{curve.order} {curve.seed}" if is_repeated else curve.order
                rows.append((part, num_heads, name, num_heads - point.num_heads, change))
    title = (
        f"Heads removed with an increase of {_metric(curves)} below {curves.max_loss_increase:g}"
    )
    note = "Of the numbers of heads tested, by the upper end of the 95 % interval over texts."
    return Table(
        title, ("part", "heads", "order", "removed", Column("change", _format_change)), rows, [note]
    )


def _value_table(
    curves: PruningCurves, part: str, name: str, form: Callable[[Estimate], str] = _format_change
) -> Table:
    """Change of a metric from the full model by heads kept, a column for each order."""
    values = {order: curves.list_values(part, order, name) for order in curves.orders}
    values = {order: own for order, own in values.items() if own}
    counts = sorted({count for own in values.values() for count in own}, reverse=True)[1:]
    rows = list[Sequence[Any]]()
    for count in counts:
        cells = [Estimate(*own[count]) if count in own else None for own in values.values()]
        rows.append((count, *cells))
    title = f"Change of {_metric(curves) if name == LOSS else name}, {part} heads"
    return Table(title, ("heads kept", *(Column(order, form) for order in values)), rows)


def _metric(curves: PruningCurves) -> str:
    return f"{curves.objective} loss" if LOSS in curves.metric_names else curves.objective


# --- Figures --------------------------------------------------------------------------------------


def make_figures(curves: PruningCurves) -> dict[str, Figure]:
    """Return a figure for each metric, by the name of its file."""
    figures = dict[str, Figure]()
    for name in curves.metric_names:
        is_loss = name in (LOSS, curves.objective)
        if name != PERPLEXITY:
            file = "curves" if is_loss else f"curves-{name.lower().replace(' ', '-')}"
            figures[file] = _make_figure(curves, name, is_loss)
    return figures


def _make_figure(curves: PruningCurves, name: str, is_loss: bool) -> Figure:
    panels = list[Plot]()
    limit = curves.max_loss_increase
    references = [
        Reference("y", 0.0),
        *([Reference("y", limit, f"limit {limit:g}")] if is_loss else []),
    ]
    for part in curves.parts:
        series = list[Series]()
        for order in curves.orders:
            values = curves.list_values(part, order, name)
            if values:
                middle, lows, highs = zip(*values.values(), strict=True)
                colour = "muted" if order == RANDOM else ""
                series.append(
                    Series(order, list(values), middle, lows, highs, colour=colour, marker="o")
                )
        if series:
            x = Axis("heads kept", reverse=True)
            title = f"{part}: {curves.count_part_heads(part)} heads"
            panels.append(Plot(series, x, title=title, references=references, names="ends"))
    title = (
        f"{curves.model}: {_metric(curves) if name == LOSS else name}, change from the full model"
    )
    note = "Bands: 95 % intervals over texts; the range of draws for a random order."
    return Figure(title, panels, note=note)


# --- Report ---------------------------------------------------------------------------------------

CURVES_JSON = "curves.json"
CURVES_PAGE = "CURVES.md"
THEMES = ("light", "dark")
CURVES_FOLDER = FolderKind(
    "report of pruning curves",
    (CURVES_JSON,),
    lambda folder: (CURVES_JSON, CURVES_PAGE, *(f"*-{theme}.svg" for theme in THEMES)),
)


def write_report(curves: PruningCurves, folder: Path, existing: Existing = "refuse") -> None:
    """Write curves.json, CURVES.md and all figures to a folder, which appears complete or not at
    all.
    """
    data = (json.dumps(to_report_data(curves), indent=1, allow_nan=False) + "\n").encode()
    figures = make_figures(curves)
    images = {figure.title: f"{name}-light.svg" for name, figure in figures.items()}
    with stage_folder(folder, CURVES_FOLDER, existing) as staged:
        for name, figure in figures.items():
            for theme in THEMES:
                save_figure(figure, staged / f"{name}-{theme}.svg", theme)
        write_atomically(staged / CURVES_JSON, data)
        write_atomically(staged / CURVES_PAGE, to_markdown(make_report(curves), images).encode())


def to_report_data(curves: PruningCurves) -> dict[str, Any]:
    """Return curves and tables as JSON-serialisable values; NaN is None."""
    tables = list[dict[str, Any]]()
    for table in make_tables(curves):
        columns = [column.name for column in table.column_list]
        tables.append({"title": table.title, "columns": columns, "rows": table.rows})
    return to_plain(curves.data | {"tables": tables})


def make_report(curves: PruningCurves) -> Page:
    """Return the report: setup, tables, figures, and how to reproduce it."""
    items = [curves.command] if curves.command else []
    notes = ["All numbers are in curves.json, with the heads kept at every point.", *curves.notes]
    return make_page(
        f"{curves.model}: quality against heads kept",
        ("Tables", make_tables(curves)),
        ("Figures", list(make_figures(curves).values())),
        ("How to reproduce", [*items, list(notes)]),
        summary=_describe_setup(curves),
    )


def render_terminal(curves: PruningCurves) -> str:
    """Return the first tables for a terminal: plain text, 80 columns."""
    first = next(iter(curves.parts))
    name = curves.metric_names[0]
    values = _value_table(curves, first, name, lambda change: f"{change.value:+.3f}")
    setup = f"{curves.model}: {_describe_setup(curves)}"
    return "\n\n".join(map(to_text, [setup, _harmless_table(curves), values]))


def _describe_setup(curves: PruningCurves) -> str:
    full = curves.curves[0].points[0].rows[0].after
    loss = f", {format_interval(*full)} for the full model" if LOSS in curves.metric_names else ""
    return (
        f"{curves.objective.capitalize()} over {curves.num_texts} texts with "
        f"{curves.num_positions:,} scored positions{loss}, as heads are removed without retraining."
        " Values are changes from the full model with 95 % intervals over texts; for a random order"
        " the mean and the range of draws."
    )
