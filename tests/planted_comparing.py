"""Bugs in what compares layers: sizes that match, lengths that break even, tables and drawings."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
MATCHING, COMPARING, DRAWING = "test_matching.py", "test_comparing.py", "test_drawing.py"
bug(
    "match-takes-the-size-below",
    "costs/size_matching.py",
    "key=lambda one: (abs(one[1] - wanted)",
    "key=lambda one: (one[1] > wanted, abs(one[1] - wanted)",
    f"{MATCHING}::test_grouped_heads_as_large_as_full_ones_by_hand[vdim-141-1049600]",
    f"{MATCHING}::test_nobody_nearer_exists",
)
bug(
    "match-takes-every-count-for-rising",
    "costs/size_matching.py",
    "(self._counted(found) < wanted) == rises",
    "(self._counted(found) < wanted)",
    f"{MATCHING}::test_counts_that_fall_are_searched_the_other_way",
)
bug(
    "match-stops-at-the-first-size-that-cannot-be",
    "costs/size_matching.py",
    "range(2 * size, 4 * size + self.gap)",
    "range(2 * size, 2 * size + 1)",
    f"{MATCHING}::test_the_next_size_may_be_far_where_heads_are_shared_evenly",
)
bug(
    "match-trusts-a-count-that-goes-back",
    "costs/size_matching.py",
    "return len(ups) < 2",
    "return True",
    f"{MATCHING}::test_what_goes_up_and_down_is_tried_one_by_one",
)
bug(
    "match-takes-an-end-for-near-enough",
    "costs/size_matching.py",
    "if not search.reached(self.wanted):",
    "if search.reached(self.wanted) is None:",
    f"{MATCHING}::test_an_impossible_match_says_what_is_near_and_what_else_to_free",
    f"{MATCHING}::test_nobody_nearer_exists",
)
bug(
    "match-leaves-values-as-wide-as-keys-were",
    "costs/size_matching.py",
    "vdim=spec.heads.vdim if rest else times * dim",
    "vdim=spec.heads.vdim",
    f"{MATCHING}::test_grouped_heads_as_large_as_full_ones_by_hand[dim-102-1044480]",
    f"{MATCHING}::test_what_hangs_on_a_size_follows",
)
bug(
    "match-widens-a-model-without-its-heads",
    "costs/size_matching.py",
    "if spec.model % width == 0:",
    "if spec.model % width == width:",
    f"{MATCHING}::test_what_hangs_on_a_size_follows",
)
bug(
    "cache-along-lengths-forgets-the-source",
    "costs/cost_vs_length.py",
    '"cross": calls["prefill"][1].source',
    '"cross": load.context',
    f"{COMPARING}::test_models_are_sampled_too_sources_included",
)
bug(
    "break-even-one-token-late",
    "costs/cost_vs_length.py",
    "while high - low > 1:",
    "while high - low > 2:",
    f"{COMPARING}::test_spans_are_found_to_the_token",
    f"{COMPARING}::test_a_window_gains_once_it_is_full",
)
bug(
    "break-even-tells-the-first-change-as-the-last",
    "costs/cost_vs_length.py",
    "yield Span(start, change - 1)",
    "yield Span(start, None)",
    f"{COMPARING}::test_what_does_not_stay_is_told_span_by_span",
)
bug(
    "break-even-takes-equal-for-less",
    "costs/cost_vs_length.py",
    "spans(lambda tokens: gain(tokens) > 0, farthest)",
    "spans(lambda tokens: gain(tokens) >= 0, farthest)",
    f"{COMPARING}::test_a_window_gains_once_it_is_full",
    f"{COMPARING}::test_a_cache_of_latents_is_smaller_at_any_length_and_a_state_from_some",
)
bug(
    "complexity-a-window-reaches-its-own-width",
    "costs/complexity.py",
    "_reaching(sizes.window - 1, sizes.tokens)",
    "_reaching(sizes.window, sizes.tokens)",
    f"{COMPARING}::test_paths_are_as_long_as_walking_them",
)
bug(
    "complexity-gates-read-the-token-alone",
    "costs/complexity.py",
    "return 4 * gates * n * Symbol.of(sizes.model",
    "return 2 * gates * n * Symbol.of(sizes.model",
    f"{COMPARING}::test_recurrences_are_products_of_the_token_and_of_the_state",
    f"{COMPARING}::test_from_which_length_attention_is_dearer_by_hand",
)
bug(
    "names-of-lines-pile-up",
    "costs/cost_plots.py",
    "order = sorted(range(len(wanted)), key=lambda n: wanted[n])",
    "order = list(range(len(wanted)))",
    f"{DRAWING}::test_names_keep_their_distance_and_their_order",
)
bug(
    "drawing-follows-a-users-settings",
    "costs/cost_plots.py",
    "matplotlib.rcdefaults()  #",
    "pass  #",
    f"{DRAWING}::test_the_same_costs_are_the_same_file",
)
bug(
    "drawing-says-when-it-was-made",
    "costs/cost_plots.py",
    '".svg": {"metadata": {"Date": None}}',
    '".svg": {}',
    f"{DRAWING}::test_the_same_costs_are_the_same_file[svg]",
)
bug(
    "drawing-names-run-into-the-next-panel",
    "costs/cost_plots.py",
    "shortened(mark.name, int(72 * room / size / LETTER))",
    "mark.name",
    f"{DRAWING}::test_no_text_covers_another_or_leaves_the_drawing",
)
bug(
    "sheet-ends-lines-as-unix-does",
    "costs/cost_report.py",
    'lineterminator="\\r\\n"',
    'lineterminator="\\n"',
    f"{DRAWING}::test_the_sheet_is_the_document_again",
)
