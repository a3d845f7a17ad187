"""What curves show, in sentences with numbers: how many heads can go, in which order, from where, and which stay.

What is asked are the claims of 1905.10650 and 1905.09418. What an interval does not tell apart is not shown.
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

from ...files import write_atomically
from ...head_analysis.importance_methods import SIGNIFICANCE_LEVEL
from ...head_analysis.resampling import (
    CONFIDENCE,
    Array,
    confidence_interval,
    correct_p_values,
    draw_resamples,
    ratio_of_sums,
    resampled_ratios,
)
from ..head_selection import RANDOM
from ..pruning_plan import HeadId
from ..verification.proof import replace_non_finite
from ..verification.proof_report import TEXT_WIDTH, format_number, format_table, to_one_line, wrap_text
from ..verification.quality_metrics import ACCURACY, BLEU, BOOTSTRAP_SEED, LOSS, PERPLEXITY, IntervalEstimate
from .pruning_curves import ALL_PARTS, CurvePoint, CurveValue, PruningCurve, PruningCurves

TAIL_RESAMPLES = 10_000  # the tails of intervals that are corrected for many tests are thin
PUBLISHED_ORDER = ("encoder", "decoder", "cross")  # from the first to go to the last


def list_findings(curves: PruningCurves) -> list[str]:
    """Every question with what was found."""
    first = next(iter(curves.parts))
    return [
        *(_describe_harmless_removal(curves, part) for part in curves.parts),
        *(_compare_orders(curves, first, other) for other in curves.orders[1:]),
        *_describe_generation(curves),
        *_compare_parts(curves),
        *_describe_survival(curves, group_by_part(curves), "part"),
        *_describe_survival(curves, curves.classes, "class"),
    ]


def find_smallest_harmless(line: PruningCurve, max_loss_increase: float) -> CurvePoint:
    """The point with the fewest heads left down to which the loss surely grows by less than so much."""
    found = line.points[0]
    for point in line.points[1:]:
        if not point.loss_change.high < max_loss_increase:
            break
        found = point
    return found


def compare_losses(one: Sequence[CurvePoint], other: Sequence[CurvePoint], num_tests: int = 1) -> IntervalEstimate:
    """How much larger the loss of some points is than that of others, means over each; the same texts are drawn.

    The interval is corrected for so many tests (Bonferroni).
    """
    sums, places = (
        _mean_text_losses(one) - _mean_text_losses(other),
        np.array([[float(text.num_positions)] for text in one[0].text_counts]),
    )
    found = resampled_ratios(sums, places, draw_resamples(len(sums), TAIL_RESAMPLES, BOOTSTRAP_SEED))
    low, high = confidence_interval(found, 1 - (1 - CONFIDENCE) / num_tests)
    return IntervalEstimate(float(ratio_of_sums(sums, places)[0]), float(low[0]), float(high[0]))


def _mean_text_losses(points: Sequence[CurvePoint]) -> Array:
    """Of each text, a mean over points [texts, 1]."""
    return np.mean([[[text.sums[LOSS]] for text in point.text_counts] for point in points], axis=0)


class GroupSurvival(NamedTuple):
    """How many heads of a group are left among so many, what chance would leave, and how likely it does as much.

    `level` is corrected for all groups and counts that were tested.
    """

    group: str
    num_heads: int
    num_in_group: int
    expected_in_group: float
    p_value: float

    @property
    def verdict(self) -> str:
        """Whether chance leaves as many: "more", "fewer" or "no difference shown"."""
        return (
            "no difference shown"
            if self.p_value >= SIGNIFICANCE_LEVEL
            else "more"
            if self.num_in_group > self.expected_in_group
            else "fewer"
        )


def assess_group_survival(groups: Mapping[HeadId, str], kept: Sequence[Collection[HeadId]]) -> list[GroupSurvival]:
    """Of every group at every count, whether more or fewer of its heads are left than of heads drawn by chance.

    The hypergeometric law, both tails, corrected for all tests (Holm).

    >>> groups = {("a", n): "few" if n < 8 else "many" for n in range(32)}
    >>> few, many = assess_group_survival(groups, [[("a", n) for n in range(8)]])
    >>> few.num_in_group, few.expected_in_group, few.verdict, many.verdict
    (8, 2.0, 'more', 'fewer')
    """
    sizes, found = Counter(groups.values()), list[GroupSurvival]()
    for heads in kept:
        own = Counter(groups[head] for head in heads)
        for group, size in sizes.items():
            p = compute_hypergeometric_p_value(own[group], len(heads), size, len(groups))
            found.append(GroupSurvival(group, len(heads), own[group], len(heads) * size / len(groups), p))
    levels = correct_p_values(np.array([one.p_value for one in found])) if found else []
    return [one._replace(p_value=float(level)) for one, level in zip(found, levels, strict=True)]


def compute_hypergeometric_p_value(num_in_group: int, num_drawn: int, group_size: int, num_heads: int) -> float:
    """How likely a draw without return is as far out: of `whole` heads, `size` of a group, `own` of it among `drawn`.

    Twice the smaller tail.

    >>> compute_hypergeometric_p_value(2, 2, 2, 4)  # of six pairs one, and twice that
    0.3333333333333333
    """
    ways = [
        comb(group_size, n) * comb(num_heads - group_size, num_drawn - n) for n in range(min(group_size, num_drawn) + 1)
    ]
    total = comb(num_heads, num_drawn)
    return min(1.0, 2 * min(sum(ways[: num_in_group + 1]), sum(ways[num_in_group:])) / total)


# --- sentences ------------------------------------------------------------------------------------------------


def _describe_harmless_removal(curves: PruningCurves, part: str) -> str:
    heads, told = curves.count_part_heads(part), list[str]()
    for order in curves.orders:
        found = [find_smallest_harmless(line, curves.max_loss_increase) for line in curves.select_curves(part, order)]
        gone = sorted({heads - point.num_heads for point in found})
        if len(found) > 1:
            told.append(f"{' to '.join(map(str, gone[:1] + gone[1:][-1:]))} by {order} ({len(found)} draws)")
        else:
            told.append(
                f"{gone[0]} by {order} ({_format_interval(found[0].loss_change)})" if gone[0] else f"none by {order}"
            )
    return (
        f"{describe_part(curves, part)}: {_metric_name(curves)} surely grows by less than "
        f"{curves.max_loss_increase:g} with so many gone, "
        f"of the counts that were tried: {', '.join(told)}."
    )


def _compare_orders(curves: PruningCurves, part: str, other: str) -> str:
    first = curves.orders[0]
    own, theirs = (
        _points_by_count(curves.select_curves(part, first)),
        _points_by_count(curves.select_curves(part, other)),
    )
    lefts = [left for left in own if left in theirs][1:]
    draws = len(curves.select_curves(part, other))
    name = f"{describe_part(curves, part)}: {first} against {other}{f', a mean of {draws} draws' if draws > 1 else ''}"
    if not lefts:
        return f"{name}: no count of heads is left by both."
    each = [_difference_sign(compare_losses(own[left], theirs[left], len(lefts))) for left in lefts]
    every = compare_losses(
        [point for left in lefts for point in own[left]], [p for left in lefts for p in theirs[left]]
    )
    return (
        f"{name}: over all counts {_metric_name(curves)} {_describe_difference(every)}; of {len(lefts)} "
        f"counts it is lower at "
        f"{each.count(-1)}, higher at {each.count(1)}, and no difference is shown at {each.count(0)}."
    )


def _describe_generation(curves: PruningCurves) -> Iterator[str]:
    """What free answers lose, where they were asked for."""
    for name in curves.metric_names:
        if name in (LOSS, PERPLEXITY, ACCURACY, curves.objective):
            continue
        for part, order in product(curves.parts, curves.orders):
            marks = curves.list_values(part, order, name)[1:]
            if not marks or len(curves.select_curves(part, order)) > 1:
                continue
            told = [
                f"{said} with {', '.join(str(mark.num_heads) for mark in own)} left"
                for sign, said in ((-1, "surely lower"), (0, "not told apart"), (1, "surely higher"))
                if (own := [mark for mark in marks if _difference_sign(IntervalEstimate(*mark[1:])) == sign])
            ]
            yield f"{describe_part(curves, part)}, by {order}: {name} of free answers is {', '.join(told)}."


def _compare_parts(curves: PruningCurves) -> Iterator[str]:
    """Each part alone, by our order: which costs least."""
    names = [part for part in curves.parts if part != ALL_PARTS]
    points = {part: curves.select_curves(part, curves.orders[0])[0].points[1:] for part in names}
    shares = set[float].intersection(*({point.share for point in own} for own in points.values())) if points else set()
    if len(names) < 2 or not shares:
        return
    own = {part: [point for point in points[part] if point.share in shares] for part in names}
    whole = curves.select_curves(names[0], curves.orders[0])[0].points[:1]
    cost = {part: compare_losses(own[part], whole) for part in names}
    names.sort(key=lambda part: cost[part].value)
    told = ", ".join(f"{part} {cost[part].value:+.3f} ({_format_interval(cost[part])})" for part in names)
    yield (
        f"Heads of one part gone, the others whole, by {curves.orders[0]}: {_metric_name(curves)} changes, a mean over "
        f"{len(shares)} shares that stay, {told}."
    )
    tests = len(names) * (len(names) - 1) // 2
    more = [compare_losses(own[other], own[one], tests) for one, other in pairwise(names)]
    for (one, other), differs in zip(pairwise(names), more, strict=True):
        yield (
            f"Without heads of {other}, beside without heads of {one}: {_metric_name(curves)} "
            f"{_describe_difference(differs)}."
        )
    if sorted(names) == sorted(PUBLISHED_ORDER):
        yield f"That the encoder goes first and cross-attention last: {_order_verdict(names, more)}."


def _order_verdict(names: Sequence[str], more: Sequence[IntervalEstimate]) -> str:
    sure = all(_difference_sign(one) > 0 for one in more)
    if tuple(names) == PUBLISHED_ORDER:
        return "shown" if sure else "so it was found, but not shown, for an interval holds 0"
    return f"not so; from the cheapest on {', '.join(names)}{'' if sure else ', of which not all are told apart'}"


def group_by_part(curves: PruningCurves) -> dict[HeadId, str]:
    """The part of every head; nothing where not all parts were swept, together and apart."""
    alone = {part: own for part, own in curves.parts.items() if part != ALL_PARTS}
    groups = {(site, head): part for part, own in alone.items() for site, n in own.items() for head in range(n)}
    return groups if ALL_PARTS in curves.parts and alone and len(groups) == curves.count_part_heads(ALL_PARTS) else {}


def get_joint_curves(curves: PruningCurves) -> dict[str, PruningCurve]:
    """The line of all parts together by each order that is drawn once; nothing where parts were not swept together."""
    lines = {order: curves.select_curves(ALL_PARTS, order) for order in curves.orders}
    return {order: own[0] for order, own in lines.items() if len(own) == 1}


def list_point_heads(point: CurvePoint) -> list[HeadId]:
    """The heads that are left at a point."""
    return [(site, head) for site, heads in point.keep.items() for head in heads]


def _describe_survival(curves: PruningCurves, groups: Mapping[HeadId, str], what: str) -> Iterator[str]:
    """What stays of each group when all parts lose heads together, by every order that is no chance."""
    for order, line in get_joint_curves(curves).items() if groups else ():
        found = assess_group_survival(groups, list_grouped_heads(line, groups)[1:])
        own = {
            group: [one for one in found if one.group == group] for group, _ in Counter(groups.values()).most_common()
        }
        told = [f"{group} {said}" for group, lefts in own.items() for said in _describe_significance(lefts)]
        vague = [group for group, lefts in own.items() if not any(True for _ in _describe_significance(lefts))]
        if vague:
            told.append(f"of {', '.join(vague)} no difference from chance is shown")
        gone = [
            f"{group} with {left} left"
            for group, lefts in own.items()
            if (left := _extinction_count(lefts)) is not None
        ]
        told.append(f"the last is gone of {', '.join(gone)}" if gone else "of each some stay to the end")
        yield f"What stays by {order}, {what} by {what}: {'; '.join(told)}."


def list_grouped_heads(line: PruningCurve, groups: Mapping[HeadId, str]) -> list[list[HeadId]]:
    """The heads at every point that are of any group."""
    return [[head for head in list_point_heads(point) if head in groups] for point in line.points]


def _extinction_count(own: Sequence[GroupSurvival]) -> int | None:
    """How many heads are left where the last one of a group has gone; counts fall."""
    there = max((place for place, one in enumerate(own) if one.num_in_group), default=-1)
    return None if there + 1 == len(own) else own[there + 1].num_heads


def _describe_significance(own: Sequence[GroupSurvival]) -> Iterator[str]:
    for which in ("more", "fewer"):
        there = [one for one in own if one.verdict == which]
        if there:
            best, lefts = min(there, key=lambda one: one.p_value), ", ".join(str(one.num_heads) for one in there)
            yield (
                f"{which} than by chance with {lefts} left (surest {best.num_in_group} of {best.num_heads}, by chance "
                f"{best.expected_in_group:.1f}, p {best.p_value:.1g})"
            )


def describe_part(curves: PruningCurves, part: str) -> str:
    """What a part is called.

    >>> describe_part(
    ...     PruningCurves("small", "translation", 2, 9, {"cross": {"decoder.0.cross": 3}}, (), {}, 0.1), "cross"
    ... )
    'The 3 heads of cross alone'
    """
    heads = curves.count_part_heads(part)
    return f"All {heads} heads" if part == ALL_PARTS else f"The {heads} heads of {part} alone"


def _metric_name(curves: PruningCurves) -> str:
    return f"{curves.objective} loss" if LOSS in curves.metric_names else curves.objective


def _points_by_count(lines: Sequence[PruningCurve]) -> dict[int, list[CurvePoint]]:
    found: dict[int, list[CurvePoint]] = {}
    for line in lines:
        for point in line.points:
            found.setdefault(point.num_heads, []).append(point)
    return found


def _difference_sign(one: IntervalEstimate) -> int:
    return 0 if one.low <= 0 <= one.high else 1 if one.value > 0 else -1


def _describe_difference(one: IntervalEstimate) -> str:
    said = {0: "is not told apart", 1: "is higher", -1: "is lower"}[_difference_sign(one)]
    return f"{said}, {one.value:+.3f} ({_format_interval(one)})"


def _format_interval(one: IntervalEstimate) -> str:
    return f"{one.low:+.3f} to {one.high:+.3f}"


# --- Curves as files -----------------------------------------------------------------------------------

COLUMNS_PER_TABLE = 3  # columns that fit a page
CURVES_JSON, CURVES_PAGE = "curves.json", "CURVES.md"
VERDICT_SIGNS = {"more": "+", "fewer": "-"}


def write_report(curves: PruningCurves, folder: Path) -> None:
    """curves.json, CURVES.md and every figure, in a folder, made where it is missing."""
    from .curve_figures import write_figures

    folder.mkdir(parents=True, exist_ok=True)
    drawn = write_figures(curves, folder)
    write_atomically(
        folder / CURVES_JSON, (json.dumps(to_report_data(curves), indent=1, allow_nan=False) + "\n").encode()
    )
    write_atomically(folder / CURVES_PAGE, render_report(curves, drawn).encode())


def to_report_data(curves: PruningCurves) -> dict[str, Any]:
    """The numbers with what they answer, as plain values; what is no finite number is None."""
    return replace_non_finite(curves.data | {"answers": list_findings(curves)})


def render_report(curves: PruningCurves, figure_names: list[str]) -> str:
    """What was asked, what was found, every number in tables, and how to see it again."""
    parts = [[f"# {to_one_line(curves.model)}: quality against heads left", "", *wrap_text(_describe_setup(curves))]]
    parts.append(
        [
            "## What it shows",
            "",
            *(row for said in list_findings(curves) for row in wrap_text(to_one_line(said, 600), "- ")),
        ]
    )
    parts += [[f"## {describe_part(curves, part)}", "", *_order_tables(curves, part)] for part in curves.parts]
    parts.append(["## The heads that stay", "", *_survival_tables(curves)])
    parts.append(["## How to see it again", "", *_reproduction_section(curves)])
    if figure_names:
        parts.insert(2, ["## Figures", "", *(f"![{name}]({name}-light.svg)" for name in figure_names)])
    return "\n\n".join("\n".join(part).rstrip() for part in parts) + "\n"


def render_terminal(curves: PruningCurves) -> str:
    """A short table and the answers, no wider than a terminal, without colour."""
    first = next(iter(curves.parts))
    lines = [
        *wrap_text(f"{to_one_line(curves.model)}: {_describe_setup(curves)}"),
        "",
        describe_part(curves, first),
        "",
    ]
    lines += [*format_short_table(curves, first), ""]
    for said in list_findings(curves):
        lines += wrap_text(said, "  ")
    return "\n".join(lines)


def format_short_table(curves: PruningCurves, part: str) -> list[str]:
    """A column for each order: how the first row differs from the whole model's, against heads left."""
    every = [
        {mark.num_heads: mark for mark in curves.list_values(part, order, curves.metric_names[0])}
        for order in curves.orders
    ]
    lefts = sorted({left for own in every for left in own}, reverse=True)[1:]
    rows = [(str(left), *(f"{own[left].value:+.3f}" if left in own else "-" for own in every)) for left in lefts]
    return format_table(("heads left", *curves.orders), rows)


def _describe_setup(curves: PruningCurves) -> str:
    whole = curves.curves[0].points[0].rows[0].after
    asked = (
        f"{curves.objective.capitalize()} over {curves.num_texts} texts, {curves.num_positions:,} places, "
        f"with ever fewer heads"
    )
    base = (
        f" The whole model's loss is {format_number(whole.value)} ({format_number(whole.low)} to "
        f"{format_number(whole.high)})."
    )
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
                [(str(marks[0].num_heads), *map(partial(_format_cell, curves), own, marks)) for marks in lines],
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
    sure = {
        (one.group, one.num_heads): VERDICT_SIGNS.get(one.verdict, "")
        for one in assess_group_survival(groups, kept[1:])
    }
    rows = [
        [group, *(f"{sum(groups[head] == group for head in own)}{sure.get((group, len(own)), '')}" for own in kept)]
        for group, _ in Counter(groups.values()).most_common()
    ]
    return [what, *(str(len(own)) for own in kept)], rows


def _reproduction_section(curves: PruningCurves) -> Iterator[str]:
    if curves.command:
        yield from (
            f"    {row}" for row in textwrap.wrap(to_one_line(curves.command), TEXT_WIDTH, subsequent_indent="    ")
        )
        yield ""
    yield from wrap_text(f"Every number stands in {CURVES_JSON}, with the heads that were kept at every point.")
    for note in curves.notes:
        yield from wrap_text(to_one_line(note), "- ")
