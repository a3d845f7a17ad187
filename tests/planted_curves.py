"""Bugs in curves of quality against heads left, and in what is claimed of them."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
CURVES = "test_curves.py"
bug(
    "curves-heads-of-another-part-go",
    "surgery/sweep/pruning_curves.py",
    "[at.line(part, {site: those[site] for site in sites}, found)",
    "[at.line(part, those, found)",
    f"{CURVES}::test_a_part_loses_its_own_heads_and_no_others_by_what_they_are_worth",
)
bug(
    "curves-heads-worth-most-go-first",
    "surgery/head_selection.py",
    "    for unit in sorted(rest, key=found.unit, reverse=True):\n"
    "        if sum(len(one.heads) for one in kept) + len(unit.heads) <= wanted",
    "    for unit in sorted(rest, key=found.unit):\n"
    "        if sum(len(one.heads) for one in kept) + len(unit.heads) <= wanted",
    f"{CURVES}::test_a_part_loses_its_own_heads_and_no_others_by_what_they_are_worth",
)
bug(
    "curves-every-draw-is-the-first",
    "surgery/sweep/pruning_curves.py",
    "seed=how.ordering.seed + seed)",
    "seed=how.ordering.seed)",
    f"{CURVES}::test_chance_is_drawn_so_often_and_its_band_is_the_range",
)
bug(
    "curves-points-are-cut-from-the-last-one-and-not-heard",
    "surgery/sweep/pruning_curves.py",
    "points.append(self._point(share, keep, removed(self.net, fewer)))",
    "points.append(self._point(share, keep, self.net))",
    f"{CURVES}::test_every_point_says_what_the_model_says_with_those_heads_silent",
)
bug(
    "curves-none-stays-in-an-attention",
    "surgery/sweep/pruning_curves.py",
    "round(share * heads)), self.how.least)",
    "round(share * heads)), 0)",
    f"{CURVES}::test_heads_that_must_stay_in_every_attention_stay",
)
bug(
    "curves-gates-that-are-shut-are-worth-most",
    "surgery/sweep/pruning_curves.py",
    "of = {(site, head): chance for",
    "of = {(site, head): 1 - chance for",
    f"{CURVES}::test_gates_order_heads_by_the_chance_that_they_are_open",
)
bug(
    "claims-heads-go-past-a-point-that-fails",
    "surgery/sweep/curve_report.py",
    "        if not point.change.high < allowed:\n            break\n",
    "        if not point.change.high < allowed:\n            continue\n",
    f"{CURVES}::test_heads_can_go_until_an_interval_no_longer_stays_below",
)
bug(
    "claims-a-mean-is-enough-for-heads-to-go",
    "surgery/sweep/curve_report.py",
    "if not point.change.high < allowed",
    "if not point.change.value < allowed",
    f"{CURVES}::test_heads_can_go_until_an_interval_no_longer_stays_below",
)
bug(
    "claims-intervals-are-not-corrected",
    "surgery/sweep/curve_report.py",
    "interval(found, 1 - (1 - SHARE) / tests)",
    "interval(found, SHARE)",
    f"{CURVES}::test_a_difference_between_points_is_drawn_by_texts_and_corrected",
)
bug(
    "claims-one-tail-is-one-head-short",
    "surgery/sweep/curve_report.py",
    "sum(ways[own:])",
    "sum(ways[own + 1 :])",
    f"{CURVES}::test_what_stays_against_chance_by_trying_every_draw",
)
bug(
    "claims-shown-without-intervals",
    "surgery/sweep/curve_report.py",
    "sure = all(_sign(one) > 0 for one in more)",
    "sure = all(one.value > 0 for one in more)",
    f"{CURVES}::test_answers_say_what_is_shown_and_what_is_not",
)
bug(
    "claims-a-group-is-gone-where-its-last-head-stands",
    "surgery/sweep/curve_figures.py",
    "if (first := max(there) + 1) == len(kept):",
    "if (first := max(there)) == len(kept):",
    f"{CURVES}::test_columns_hold_every_head_and_mark_where_a_group_is_gone",
)
bug(
    "curves-labels-stand-where-lines-end",
    "surgery/sweep/curve_figures.py",
    "runs[-1][1] + step * (len(runs[-1][0]) + len(run)) / 2 > middle",
    "runs[-1][1] > middle",
    f"{CURVES}::test_labels_stand_apart_in_their_order_and_inside",
)
