"""Pruning curves as tables and figures, with the tests behind them, and the report CURVES.md.

The questions are the claims of 1905.10650 and 1905.09418: how many heads can be removed, in which
order, from which part, and which heads stay. A difference whose interval contains 0 shows nothing.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..files import write_atomically
from ..head_analysis.resampling import CONFIDENCE, Array, Jackknife, correct_p_values
from ..output_paths import Existing, FolderKind, stage_folder
from ..report.data import Axis, Column, Estimate, Figure, Page, Plot, Reference, Series, Table
from ..report.numbers import format_interval
from ..report.plots import save_figure
from ..report.render import make_page, to_markdown, to_plain, to_text
from .head_selection import RANDOM
from .pruning_curves import ALL_PARTS, CurvePoint, PruningCurve, PruningCurves
from .pruning_plan import HeadId
from .verification.quality_metrics import LOSS, PERPLEXITY, IntervalEstimate, make_estimate


def _format_change(change: Estimate) -> str:
    return format_interval(*change[:3], sign="+")


# --- Tests ----------------------------------------------------------------------------------------


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


def compare_losses(
    one: Sequence[CurvePoint], other: Sequence[CurvePoint], num_tests: int = 1
) -> IntervalEstimate:
    """Return the difference of mean losses of two lists of points, with a paired interval over
    texts.

    The interval is corrected for `num_tests` tests (Bonferroni).
    """
    differences = _mean_text_losses(one) - _mean_text_losses(other)
    positions = np.array([float(text.num_positions) for text in one[0].text_counts])
    confidence = 1 - (1 - CONFIDENCE) / num_tests
    return make_estimate(Jackknife.of_ratio(differences, positions), confidence)


def _mean_text_losses(points: Sequence[CurvePoint]) -> Array:
    """Return the summed loss of each text, a mean over points, [texts]."""
    losses = [np.array([text.sums[LOSS] for text in point.text_counts]) for point in points]
    return np.mean(losses, axis=0)


class GroupSurvival(NamedTuple):
    """Heads of a group among those kept, the number expected by chance, and the p-value of the
    difference, corrected for all groups and counts tested.
    """

    group: str
    num_heads: int
    num_in_group: int
    expected_in_group: float
    p_value: float


def assess_group_survival(
    groups: Mapping[HeadId, str], kept_heads: Sequence[Collection[HeadId]]
) -> list[GroupSurvival]:
    """Test for every group and every set of kept heads whether more or fewer of its heads are kept
    than by chance.

    Two-sided hypergeometric test (twice the smaller tail), corrected for all tests (Holm).

    >>> groups = {("a", n): "few" if n < 8 else "many" for n in range(32)}
    >>> few, many = assess_group_survival(groups, [[("a", n) for n in range(8)]])
    >>> few.num_in_group, few.expected_in_group, few.p_value < 0.001
    (8, 2.0, True)
    """
    from scipy.stats import hypergeom

    sizes = Counter(groups.values())
    results = list[GroupSurvival]()
    for heads in kept_heads:
        kept_counts = Counter(groups[head] for head in heads)
        for group, size in sizes.items():
            count = kept_counts[group]
            draws = hypergeom(len(groups), size, len(heads))
            p = min(1.0, 2 * min(draws.cdf(count), draws.sf(count - 1)))
            expected = len(heads) * size / len(groups)
            results.append(GroupSurvival(group, len(heads), count, expected, p))
    corrected = correct_p_values([result.p_value for result in results]) if results else []
    return [result._replace(p_value=float(p)) for result, p in zip(results, corrected, strict=True)]


# --- Tables ---------------------------------------------------------------------------------------


def make_tables(curves: PruningCurves) -> list[Table]:
    """Return the tables of a report that have rows."""
    tables = [_harmless_table(curves), _order_table(curves), _part_table(curves)]
    names = [name for name in curves.metric_names if name != PERPLEXITY]
    tables += [_value_table(curves, part, name) for name in names for part in curves.parts]
    tables += [_survival_table(curves, "part", _group_by_part(curves))]
    tables += [_survival_table(curves, "class", curves.classes)]
    return [table for table in tables if table.rows]


def _harmless_table(curves: PruningCurves) -> Table:
    rows = list[Sequence[Any]]()
    for part in curves.parts:
        for curve in curves.curves:
            if curve.part == part:
                point = find_smallest_harmless(curve, curves.max_loss_increase)
                num_heads = curves.count_part_heads(part)
                change = Estimate(*point.loss_change)
                name = _name_order(curves, curve)
                rows.append((part, num_heads, name, num_heads - point.num_heads, change))
    title = (
        f"Heads removed with an increase of {_metric(curves)} below {curves.max_loss_increase:g}"
    )
    note = "Of the numbers of heads tested, by the upper end of the 95 % interval over texts."
    return Table(
        title, ("part", "heads", "order", "removed", Column("change", _format_change)), rows, [note]
    )


def _order_table(curves: PruningCurves) -> Table:
    """Compare the first order with each other one, over all counts that both have."""
    part = next(iter(curves.parts))
    first = curves.orders[0]
    rows = list[Sequence[Any]]()
    own = _points_by_count(curves.select_curves(part, first))
    for other in curves.orders[1:]:
        others = _points_by_count(curves.select_curves(part, other))
        counts = [count for count in own if count in others][1:]
        if not counts:
            continue
        signs = Counter(
            _sign(compare_losses(own[count], others[count], len(counts))) for count in counts
        )
        all_own = list(chain.from_iterable(own[count] for count in counts))
        all_others = list(chain.from_iterable(others[count] for count in counts))
        difference = Estimate(*compare_losses(all_own, all_others))
        rows.append((other, difference, signs[-1], signs[1], signs[0]))
    columns = (
        "other order",
        Column(f"{first} - other", _format_change),
        "lower",
        "higher",
        "no difference",
    )
    return Table(
        f"{_metric(curves)}, {first} against other orders, {part} heads".capitalize(), columns, rows
    )


def _part_table(curves: PruningCurves) -> Table:
    """Compare parts, each pruned alone in the first order, at the shares that all have."""
    order = curves.orders[0]
    parts = [part for part in curves.parts if part != ALL_PARTS]
    points = {part: curves.select_curves(part, order)[0].points for part in parts}
    shares = [{point.share for point in own[1:]} for own in points.values()]
    shared = set[float].intersection(*shares) if len(parts) > 1 else set[float]()
    rows = list[Sequence[Any]]()
    if shared:
        chosen = {part: [p for p in points[part][1:] if p.share in shared] for part in parts}
        cost = {part: compare_losses(chosen[part], points[parts[0]][:1]) for part in parts}
        parts.sort(key=lambda part: cost[part].value)
        tests = len(parts) * (len(parts) - 1) // 2
        steps: list[Estimate | None] = [None]
        steps += [
            Estimate(*compare_losses(chosen[other], chosen[one], tests))
            for one, other in pairwise(parts)
        ]
        rows = [
            (part, Estimate(*cost[part]), step) for part, step in zip(parts, steps, strict=True)
        ]
    title = f"Parts pruned alone by {order}: mean change of {_metric(curves)}, smallest first"
    columns = (
        "part",
        Column("change", _format_change),
        Column("more than the part above", _format_change),
    )
    return Table(title, columns, rows)


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


def _survival_table(curves: PruningCurves, what: str, groups: Mapping[HeadId, str]) -> Table:
    """Heads kept in each group, when all parts are pruned together, and tests against chance."""
    rows = list[Sequence[Any]]()
    for order in curves.orders:
        lines = curves.select_curves(ALL_PARTS, order)
        if len(lines) == 1 and len({*groups.values()}) > 1:
            heads_left = [_grouped_heads(point, groups) for point in lines[0].points[1:]]
            rows += [(order, *result) for result in assess_group_survival(groups, heads_left)]
    note = "p is corrected for all tests of an order (Holm)."
    columns = (
        "order",
        what,
        "heads kept",
        "of this",
        "expected",
        Column("p", lambda p: f"{p:.1g}"),
    )
    return Table(f"Heads kept, by {what}", columns, rows, [note] if rows else [])


def _group_by_part(curves: PruningCurves) -> dict[HeadId, str]:
    """Return the part of every head; empty unless all parts were swept together and each alone."""
    groups = dict[HeadId, str]()
    for part, sites in curves.parts.items():
        for site, count in sites.items() if part != ALL_PARTS else ():
            groups |= {(site, head): part for head in range(count)}
    is_whole = ALL_PARTS in curves.parts and len(groups) == curves.count_part_heads(ALL_PARTS)
    return groups if is_whole else {}


def _grouped_heads(point: CurvePoint, groups: Mapping[HeadId, str]) -> list[HeadId]:
    """Return the heads kept at a point that belong to any group."""
    heads_left = [(site, head) for site, heads in point.keep.items() for head in heads]
    return [head for head in heads_left if head in groups]


def _points_by_count(curves: Sequence[PruningCurve]) -> dict[int, list[CurvePoint]]:
    points: dict[int, list[CurvePoint]] = {}
    for curve in curves:
        for point in curve.points:
            points.setdefault(point.num_heads, []).append(point)
    return points


def _metric(curves: PruningCurves) -> str:
    return f"{curves.objective} loss" if LOSS in curves.metric_names else curves.objective


def _name_order(curves: PruningCurves, curve: PruningCurve) -> str:
    is_repeated = len(curves.select_curves(curve.part, curve.order)) > 1
    return f"{curve.order} {curve.seed}" if is_repeated else curve.order


def _sign(difference: IntervalEstimate) -> int:
    """Return 1 or -1 if the interval is on one side of 0, else 0."""
    return int(difference.low > 0) - int(difference.high < 0)


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
    shown = [_harmless_table(curves), values, _order_table(curves), _part_table(curves)]
    setup = f"{curves.model}: {_describe_setup(curves)}"
    return "\n\n".join(map(to_text, [setup, *(table for table in shown if table.rows)]))


def _describe_setup(curves: PruningCurves) -> str:
    full = curves.curves[0].points[0].rows[0].after
    loss = f", {format_interval(*full)} for the full model" if LOSS in curves.metric_names else ""
    return (
        f"{curves.objective.capitalize()} over {curves.num_texts} texts with "
        f"{curves.num_positions:,} scored positions{loss}, as heads are removed without retraining."
        " Values are changes from the full model with 95 % intervals over texts; for a random order"
        " the mean and the range of draws."
    )
