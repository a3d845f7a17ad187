"""Findings from pruning curves, as sentences with confidence intervals, and the report CURVES.md.

The questions are the claims of 1905.10650 and 1905.09418: how many heads can be removed, in which
order, from which part, and which heads stay. A difference whose interval contains 0 counts as not
significant.
"""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise, product
from math import comb
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..escaping import escape_markdown
from ..files import write_atomically
from ..head_analysis.head_figures import FIGURE_THEMES
from ..head_analysis.head_table import SIGNIFICANCE_LEVEL
from ..head_analysis.resampling import CONFIDENCE, Array, Jackknife, correct_p_values
from ..output_paths import Existing, FolderKind, stage_folder
from .head_selection import RANDOM
from .pruning_curves import ALL_PARTS, CurvePoint, CurveValue, PruningCurve, PruningCurves
from .pruning_plan import HeadId
from .verification.proof import replace_non_finite
from .verification.proof_report import (
    TEXT_WIDTH,
    format_number,
    format_table,
    to_one_line,
    wrap_text,
)
from .verification.quality_metrics import (
    ACCURACY,
    BLEU,
    LOSS,
    PERPLEXITY,
    IntervalEstimate,
    make_estimate,
)

PART_LABELS = {"cross": "cross-attention"}
PUBLISHED_ORDER = ("encoder", "decoder", "cross")  # first removed to last removed (1905.09418)


def list_findings(curves: PruningCurves) -> list[str]:
    """Return the findings, one sentence each."""
    first = next(iter(curves.parts))
    return [
        *(_describe_harmless_removal(curves, part) for part in curves.parts),
        *(_compare_orders(curves, first, other) for other in curves.orders[1:]),
        *_describe_generation(curves),
        *_compare_parts(curves),
        *_describe_survival(curves, group_by_part(curves), "part"),
        *_describe_survival(curves, curves.classes, "class"),
    ]


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
    return make_estimate(
        Jackknife.of_ratio(differences, positions), 1 - (1 - CONFIDENCE) / num_tests
    )


def _mean_text_losses(points: Sequence[CurvePoint]) -> Array:
    """Return the summed loss of each text, a mean over points, [texts]."""
    return np.mean([[text.sums[LOSS] for text in point.text_counts] for point in points], axis=0)


class GroupSurvival(NamedTuple):
    """Heads of a group among those kept, the number expected by chance, and the p-value of the
    difference.

    `p_value` is corrected for all groups and counts tested.
    """

    group: str
    num_heads: int
    num_in_group: int
    expected_in_group: float
    p_value: float

    @property
    def verdict(self) -> str:
        """One of "more", "fewer" and "no difference shown", compared with chance."""
        return (
            "no difference shown"
            if self.p_value >= SIGNIFICANCE_LEVEL
            else "more"
            if self.num_in_group > self.expected_in_group
            else "fewer"
        )


def assess_group_survival(
    groups: Mapping[HeadId, str], kept_heads: Sequence[Collection[HeadId]]
) -> list[GroupSurvival]:
    """Test for every group and every set of kept heads whether more or fewer of its heads are kept
    than by chance.

    Two-sided hypergeometric test, corrected for all tests (Holm).

    >>> groups = {("a", n): "few" if n < 8 else "many" for n in range(32)}
    >>> few, many = assess_group_survival(groups, [[("a", n) for n in range(8)]])
    >>> few.num_in_group, few.expected_in_group, few.verdict, many.verdict
    (8, 2.0, 'more', 'fewer')
    """
    sizes, results = Counter(groups.values()), list[GroupSurvival]()
    for heads in kept_heads:
        kept_counts = Counter(groups[head] for head in heads)
        for group, size in sizes.items():
            p = compute_hypergeometric_p_value(kept_counts[group], len(heads), size, len(groups))
            results.append(
                GroupSurvival(
                    group, len(heads), kept_counts[group], len(heads) * size / len(groups), p
                )
            )
    corrected = (
        correct_p_values(np.array([result.p_value for result in results])) if results else []
    )
    return [result._replace(p_value=float(p)) for result, p in zip(results, corrected, strict=True)]


def compute_hypergeometric_p_value(
    num_in_group: int, num_drawn: int, group_size: int, num_heads: int
) -> float:
    """Return the two-sided p-value of `num_in_group` group members in a draw of `num_drawn` heads
    without replacement.

    The group has `group_size` of all `num_heads` heads. The p-value is twice the smaller tail.

    >>> compute_hypergeometric_p_value(2, 2, 2, 4)  # one of six pairs, doubled
    0.3333333333333333
    """
    num_draws = [
        comb(group_size, n) * comb(num_heads - group_size, num_drawn - n)
        for n in range(min(group_size, num_drawn) + 1)
    ]
    total = comb(num_heads, num_drawn)
    return min(
        1.0, 2 * min(sum(num_draws[: num_in_group + 1]), sum(num_draws[num_in_group:])) / total
    )


# --- findings -------------------------------------------------------------------------------------


def _describe_harmless_removal(curves: PruningCurves, part: str) -> str:
    num_heads, results = curves.count_part_heads(part), list[str]()
    for order in curves.orders:
        points = [
            find_smallest_harmless(curve, curves.max_loss_increase)
            for curve in curves.select_curves(part, order)
        ]
        removed = sorted({num_heads - point.num_heads for point in points})
        if len(points) > 1:
            results.append(
                f"{' to '.join(map(str, removed[:1] + removed[1:][-1:]))} by {order} "
                f"({len(points)} draws)"
            )
        elif removed[0]:
            results.append(f"{removed[0]} by {order} ({_format_interval(points[0].loss_change)})")
        else:
            results.append(f"none by {order}")
    return (
        f"{describe_part(curves, part)}: heads removed with an increase of {_metric_name(curves)} "
        "below "
        f"{curves.max_loss_increase:g} (95% confidence), of the counts tested: "
        f"{', '.join(results)}."
    )


def _compare_orders(curves: PruningCurves, part: str, other: str) -> str:
    first = curves.orders[0]
    points_by_count = _points_by_count(curves.select_curves(part, first))
    other_points_by_count = _points_by_count(curves.select_curves(part, other))
    counts = [count for count in points_by_count if count in other_points_by_count][1:]
    draws = len(curves.select_curves(part, other))
    name = (
        f"{describe_part(curves, part)}: {first} against "
        f"{other}{f', a mean of {draws} draws' if draws > 1 else ''}"
    )
    if not counts:
        return f"{name}: no number of heads was measured for both."
    signs = [
        _difference_sign(
            compare_losses(points_by_count[count], other_points_by_count[count], len(counts))
        )
        for count in counts
    ]
    overall = compare_losses(
        [point for count in counts for point in points_by_count[count]],
        [p for count in counts for p in other_points_by_count[count]],
    )
    return (
        f"{name}: over all counts {_metric_name(curves)} {_describe_difference(overall)}; of "
        f"{len(counts)} "
        f"counts it is lower at "
        f"{signs.count(-1)}, higher at {signs.count(1)}, and not significantly different at "
        f"{signs.count(0)}."
    )


def _describe_generation(curves: PruningCurves) -> Iterator[str]:
    """Yield the findings on scores of generated answers, if they were measured."""
    for name in curves.metric_names:
        if name in (LOSS, PERPLEXITY, ACCURACY, curves.objective):
            continue
        for part, order in product(curves.parts, curves.orders):
            values = curves.list_values(part, order, name)[1:]
            if not values or len(curves.select_curves(part, order)) > 1:
                continue
            results = ", ".join(_list_verdicts(values))
            yield (
                f"{describe_part(curves, part)}, by {order}: {name} of generated answers is "
                f"{results}."
            )


def _list_verdicts(values: Sequence[CurveValue]) -> Iterator[str]:
    """Yield the numbers of heads kept that score lower than, like, or higher
    than the full model.
    """
    for sign, verdict in ((-1, "lower"), (0, "not significantly different"), (1, "higher")):
        counts = [
            str(value.num_heads)
            for value in values
            if _difference_sign(IntervalEstimate(*value[1:])) == sign
        ]
        if counts:
            yield f"{verdict} with {', '.join(counts)} heads kept"


def _compare_parts(curves: PruningCurves) -> Iterator[str]:
    """Yield the findings on which part loses least, each pruned alone in the first order."""
    parts = [part for part in curves.parts if part != ALL_PARTS]
    points = {part: curves.select_curves(part, curves.orders[0])[0].points[1:] for part in parts}
    if len(parts) < 2:
        return
    shares = set[float].intersection(*({point.share for point in own} for own in points.values()))
    if not shares:
        return
    shared_points = {
        part: [point for point in points[part] if point.share in shares] for part in parts
    }
    full_model = curves.select_curves(parts[0], curves.orders[0])[0].points[:1]
    cost = {part: compare_losses(shared_points[part], full_model) for part in parts}
    parts.sort(key=lambda part: cost[part].value)
    changes = ", ".join(
        f"{part} {cost[part].value:+.3f} ({_format_interval(cost[part])})" for part in parts
    )
    yield (
        f"Heads of one part removed, the others kept, by {curves.orders[0]}: mean change of "
        f"{_metric_name(curves)} over {len(shares)} fractions kept: {changes}."
    )
    tests = len(parts) * (len(parts) - 1) // 2
    differences = [
        compare_losses(shared_points[other], shared_points[one], tests)
        for one, other in pairwise(parts)
    ]
    for (one, other), difference in zip(pairwise(parts), differences, strict=True):
        yield (
            f"Removing {other} heads instead of {one} heads: {_metric_name(curves)} "
            f"{_describe_difference(difference)}."
        )
    if sorted(parts) == sorted(PUBLISHED_ORDER):
        verdict = _order_verdict(parts, differences)
        yield (
            "Claim that encoder heads can be removed first and cross-attention heads last: "
            f"{verdict}."
        )


def _order_verdict(parts: Sequence[str], differences: Sequence[IntervalEstimate]) -> str:
    significant = all(_difference_sign(difference) > 0 for difference in differences)
    if tuple(parts) == PUBLISHED_ORDER:
        return (
            "supported"
            if significant
            else "order observed, but not significant (an interval contains 0)"
        )
    caveat = "" if significant else ", not all significantly different"
    return f"not supported; cheapest first: {', '.join(parts)}{caveat}"


def group_by_part(curves: PruningCurves) -> dict[HeadId, str]:
    """Return the part of every head; empty unless all parts were swept together and each alone."""
    single_parts = {part: own for part, own in curves.parts.items() if part != ALL_PARTS}
    groups = {
        (site, head): part
        for part, own in single_parts.items()
        for site, n in own.items()
        for head in range(n)
    }
    return (
        groups
        if ALL_PARTS in curves.parts
        and single_parts
        and len(groups) == curves.count_part_heads(ALL_PARTS)
        else {}
    )


def get_joint_curves(curves: PruningCurves) -> dict[str, PruningCurve]:
    """Return the curve over all parts of each order without repetitions; empty if parts were not
    swept together.
    """
    lines = {order: curves.select_curves(ALL_PARTS, order) for order in curves.orders}
    return {order: own[0] for order, own in lines.items() if len(own) == 1}


def list_point_heads(point: CurvePoint) -> list[HeadId]:
    """Return the heads kept at a point."""
    return [(site, head) for site, heads in point.keep.items() for head in heads]


def _describe_survival(
    curves: PruningCurves, groups: Mapping[HeadId, str], what: str
) -> Iterator[str]:
    """Yield the findings on which groups keep more or fewer heads than by chance, for every order
    but random.
    """
    for order, curve in get_joint_curves(curves).items() if groups else ():
        results = assess_group_survival(groups, list_grouped_heads(curve, groups)[1:])
        by_group = {
            group: [result for result in results if result.group == group]
            for group, _ in Counter(groups.values()).most_common()
        }
        findings = [
            f"{group} {text}"
            for group, own in by_group.items()
            for text in _describe_significance(own)
        ]
        undecided = [
            group for group, own in by_group.items() if not list(_describe_significance(own))
        ]
        if undecided:
            findings.append(f"no significant difference from chance for {', '.join(undecided)}")
        extinct = [
            f"{group} with {count} heads kept"
            for group, own in by_group.items()
            if (count := _extinction_count(own)) is not None
        ]
        findings.append(
            f"no heads left of {', '.join(extinct)}"
            if extinct
            else f"every {what} keeps some heads"
        )
        yield f"Heads kept by {order}, {what} by {what}: {'; '.join(findings)}."


def list_grouped_heads(curve: PruningCurve, groups: Mapping[HeadId, str]) -> list[list[HeadId]]:
    """Return the heads kept at every point that belong to any group."""
    return [[head for head in list_point_heads(point) if head in groups] for point in curve.points]


def _extinction_count(results: Sequence[GroupSurvival]) -> int | None:
    """Return the number of heads kept at the first point without any head of a group; None if some
    stay.
    """
    last_present = max(
        (index for index, result in enumerate(results) if result.num_in_group), default=-1
    )
    return None if last_present + 1 == len(results) else results[last_present + 1].num_heads


def _describe_significance(results: Sequence[GroupSurvival]) -> Iterator[str]:
    for direction in ("more", "fewer"):
        significant = [result for result in results if result.verdict == direction]
        if significant:
            best, counts = (
                min(significant, key=lambda result: result.p_value),
                ", ".join(str(result.num_heads) for result in significant),
            )
            yield (
                f"{direction} than by chance with {counts} heads kept (most significant: "
                f"{best.num_in_group} of "
                f"{best.num_heads}, expected {best.expected_in_group:.1f}, p = {best.p_value:.1g})"
            )


def describe_part(curves: PruningCurves, part: str) -> str:
    """Return the phrase for the heads of a part.

    >>> describe_part(
    ...     PruningCurves(
    ...         "small", "translation", 2, 9, {"cross": {"decoder.0.cross": 3}}, (), {}, 0.1
    ...     ),
    ...     "cross",
    ... )
    'The 3 cross-attention heads alone'
    """
    heads = curves.count_part_heads(part)
    return (
        f"All {heads} heads"
        if part == ALL_PARTS
        else f"The {heads} {PART_LABELS.get(part, part)} heads alone"
    )


def _metric_name(curves: PruningCurves) -> str:
    return f"{curves.objective} loss" if LOSS in curves.metric_names else curves.objective


def _points_by_count(curves: Sequence[PruningCurve]) -> dict[int, list[CurvePoint]]:
    points: dict[int, list[CurvePoint]] = {}
    for curve in curves:
        for point in curve.points:
            points.setdefault(point.num_heads, []).append(point)
    return points


def _difference_sign(difference: IntervalEstimate) -> int:
    if not (difference.low > 0 or difference.high < 0):  # also without an interval
        return 0
    return 1 if difference.value > 0 else -1


def _describe_difference(difference: IntervalEstimate) -> str:
    verdict = {0: "does not differ significantly", 1: "is higher", -1: "is lower"}[
        _difference_sign(difference)
    ]
    return f"{verdict}, {difference.value:+.3f} ({_format_interval(difference)})"


def _format_interval(estimate: IntervalEstimate) -> str:
    return (
        f"{estimate.low:+.3f} to {estimate.high:+.3f}"
        if estimate.low < estimate.high
        else "no spread"
    )


# --- Files and terminal ---------------------------------------------------------------------------

COLUMNS_PER_TABLE = 3  # that fit the page width
CURVES_JSON, CURVES_PAGE = "curves.json", "CURVES.md"
VERDICT_SIGNS = {"more": "+", "fewer": "-"}


CURVES_FOLDER = FolderKind(
    "report of pruning curves",
    (CURVES_JSON,),
    lambda folder: (
        CURVES_JSON,
        CURVES_PAGE,
        *(f"*-{theme}.{suffix}" for theme in FIGURE_THEMES for suffix in ("svg", "png")),
    ),
)


def write_report(curves: PruningCurves, folder: Path, existing: Existing = "refuse") -> None:
    """Write curves.json, CURVES.md and all figures to a folder, which appears complete or not at
    all.
    """
    from .curve_figures import write_figures

    data = (json.dumps(to_report_data(curves), indent=1, allow_nan=False) + "\n").encode()
    with stage_folder(folder, CURVES_FOLDER, existing) as staged:
        figure_names = write_figures(curves, staged)
        write_atomically(staged / CURVES_JSON, data)
        write_atomically(staged / CURVES_PAGE, render_report(curves, figure_names).encode())


def to_report_data(curves: PruningCurves) -> dict[str, Any]:
    """Return curves and findings as JSON-serialisable values; NaN and infinities are None."""
    return replace_non_finite(curves.data | {"answers": list_findings(curves)})


def render_report(curves: PruningCurves, figure_names: list[str]) -> str:
    """Return the report as a Markdown page: setup, findings, tables, and how to reproduce it."""
    parts = [
        [
            f"# {escape_markdown(curves.model)}: quality against heads kept",
            "",
            *wrap_text(_describe_setup(curves)),
        ]
    ]
    parts.append(
        [
            "## Findings",
            "",
            *(
                row
                for finding in list_findings(curves)
                for row in wrap_text(to_one_line(finding, 600), "- ")
            ),
        ]
    )
    parts += [
        [f"## {describe_part(curves, part)}", "", *_order_tables(curves, part)]
        for part in curves.parts
    ]
    parts.append(["## Heads kept", "", *_survival_tables(curves)])
    parts.append(["## How to reproduce", "", *_reproduction_section(curves)])
    if figure_names:
        parts.insert(
            2, ["## Figures", "", *(f"![{name}]({name}-light.svg)" for name in figure_names)]
        )
    return "\n\n".join("\n".join(part).rstrip() for part in parts) + "\n"


def render_terminal(curves: PruningCurves) -> str:
    """Return a short table and the findings for a terminal: plain text, 80 columns."""
    first = next(iter(curves.parts))
    lines = [
        *wrap_text(f"{to_one_line(curves.model)}: {_describe_setup(curves)}"),
        "",
        describe_part(curves, first),
        "",
    ]
    lines += [*format_short_table(curves, first), ""]
    for finding in list_findings(curves):
        lines += wrap_text(finding, "  ")
    return "\n".join(lines)


def format_short_table(curves: PruningCurves, part: str) -> list[str]:
    """Return a table of the change of the first metric from the full model, by heads kept and
    order.
    """
    columns = [
        {
            value.num_heads: value
            for value in curves.list_values(part, order, curves.metric_names[0])
        }
        for order in curves.orders
    ]
    counts = sorted({count for column in columns for count in column}, reverse=True)[1:]
    rows = [
        (
            str(count),
            *(f"{column[count].value:+.3f}" if count in column else "-" for column in columns),
        )
        for count in counts
    ]
    return format_table(("heads kept", *curves.orders), rows)


def _describe_setup(curves: PruningCurves) -> str:
    full = curves.curves[0].points[0].rows[0].after
    setup = (
        f"{curves.objective.capitalize()} over {curves.num_texts} texts, {curves.num_positions:,} "
        "scored positions, "
        f"as heads are removed without retraining."
    )
    baseline = (
        f" The full model's loss is {format_number(full.value)} ({format_number(full.low)} to "
        f"{format_number(full.high)})."
    )
    draws = f"; for {RANDOM} the range of draws" if RANDOM in curves.orders else ""
    values = (
        f" Values are changes from the full model, in brackets 95% intervals over texts{draws}."
    )
    return f"{setup}{baseline if LOSS in curves.metric_names else ''}{values}"


def _order_tables(curves: PruningCurves, part: str) -> Iterator[str]:
    """Yield one table per order: changes of all metrics from the full model by heads kept."""
    for order in curves.orders:
        rows = {
            name: curves.list_values(part, order, name)[1:]
            for name in curves.metric_names
            if name != PERPLEXITY
        }
        names, draws = (
            [name for name, values in rows.items() if values],
            len(curves.select_curves(part, order)),
        )
        for start in range(0, len(names), COLUMNS_PER_TABLE):
            columns = names[start : start + COLUMNS_PER_TABLE]
            yield from wrap_text(
                f"{order}{f', the mean and the range of {draws} draws' if draws > 1 else ''}:"
            )
            yield ""
            lines = zip(*(rows[name] for name in columns), strict=True)
            yield from format_table(
                ("heads kept", *(_format_unit(curves, name) for name in columns)),
                [
                    (str(values[0].num_heads), *map(partial(_format_cell, curves), columns, values))
                    for values in lines
                ],
            )
            yield ""


def _format_unit(curves: PruningCurves, name: str) -> str:
    return name if name in (LOSS, curves.objective, BLEU) else f"{name}, %"


def _format_cell(curves: PruningCurves, name: str, curve_value: CurveValue) -> str:
    """Format a value with its interval; fractions in percent."""
    is_loss = name in (LOSS, curves.objective)
    factor, digits = (1, 3) if is_loss else (1 if name == BLEU else 100, 1)
    value, low, high = (f"{factor * number:+.{digits}f}" for number in curve_value[1:])
    return f"{value} ({low}, {high})"


def _survival_tables(curves: PruningCurves) -> Iterator[str]:
    """Yield tables of the number of heads kept in each group, as shown in the figures."""
    yield from wrap_text(
        "Heads removed from all parts together; + and - mark significantly more or fewer than by "
        "chance."
    )
    for what, groups in (("part", group_by_part(curves)), ("class", curves.classes)):
        for order, curve in get_joint_curves(curves).items() if groups else ():
            yield from ("", f"{order}:", "")
            yield from format_table(
                *_survival_columns(list_grouped_heads(curve, groups), groups, what)
            )


def _survival_columns(
    kept_heads: Sequence[Sequence[HeadId]], groups: Mapping[HeadId, str], what: str
) -> tuple[list[str], list[list[str]]]:
    signs = {
        (result.group, result.num_heads): VERDICT_SIGNS.get(result.verdict, "")
        for result in assess_group_survival(groups, kept_heads[1:])
    }
    rows = [
        [
            group,
            *(
                f"{sum(groups[head] == group for head in heads)}{signs.get((group, len(heads)), '')}"
                for heads in kept_heads
            ),
        ]
        for group, _ in Counter(groups.values()).most_common()
    ]
    return [what, *(str(len(heads)) for heads in kept_heads)], rows


def _reproduction_section(curves: PruningCurves) -> Iterator[str]:
    if curves.command:
        yield from (
            f"    {row}"
            for row in textwrap.wrap(
                to_one_line(curves.command), TEXT_WIDTH, subsequent_indent="    "
            )
        )
        yield ""
    yield from wrap_text(f"All numbers are in {CURVES_JSON}, with the heads kept at every point.")
    for note in curves.notes:
        yield from wrap_text(to_one_line(note), "- ")
