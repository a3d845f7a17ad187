"""Bugs in what heads are measured by and called."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
STATISTICS = "test_statistics.py"
SYNTAX = "test_syntax.py"
ALIGNMENT = "test_alignment.py"
CLASSES = "test_classes.py"
ROWS = f"{STATISTICS}::test_sums_and_numbers_are_those_of_every_row"
ARCS = f"{SYNTAX}::test_arcs_are_counted_one_by_one"
LINKS = f"{ALIGNMENT}::test_links_are_counted_as_sets"
bug(
    "heads-support-one-key-short",
    "head_analysis/head_metrics.py",
    "keys = torch.searchsorted(held, goals) + 1",
    "keys = torch.searchsorted(held, goals)",
    f"{ROWS}[full-0-support50]",
)
bug(
    "heads-support-over-all-keys",
    "head_analysis/head_metrics.py",
    "    visible = block.visible[..., rows].expand(keys.shape[:2])\n",
    "    visible = torch.ones_like(block.allowed[..., rows, :]).sum(-1).expand(keys.shape[:2])\n",
    f"{ROWS}[causal-0-support90]",
)
bug(
    "heads-sorted-rows-are-spread-over-the-band",
    "head_analysis/head_metrics.py",
    "    count = block.asks.count\n    spread",
    "    count = block.w_HTS.shape[1]\n    spread",
    f"{STATISTICS}::test_bands_of_any_size_add_up_to_one[causal-tokens]",
    f"{STATISTICS}::test_rows_of_long_texts_that_are_sorted_are_spread_and_the_same_in_any_bands",
)
bug(
    "heads-distance-explains-of-near-pairs-alone",
    "head_analysis/head_metrics.py",
    "(every - pairs.sum(-1))[:, None]], -1).expand_as(sums)",
    "(every - every)[:, None]], -1).expand_as(sums)",
    f"{STATISTICS}::test_what_distance_explains_is_what_regression_on_offsets_explains[causal-0]",
)
bug(
    "heads-ties-go-to-the-first",
    "head_analysis/head_metrics.py",
    "    hits = block.most @ block.here(rarest).to(block.most.dtype) / block.ties\n",
    "    hits = rarest[block.w_HTS.argmax(-1)].double()\n",
    f"{STATISTICS}::test_chance_is_what_many_random_heads_do_on_average[rare]",
)
bug(
    "heads-a-word-that-ends-in-the-next-band-is-cut",
    "head_analysis/weight_bands.py",
    "if end < block.asks.count and int(asks.of[end]) == last:",
    "if False and int(asks.of[end]) == last:",
    f"{STATISTICS}::test_bands_of_any_size_add_up_to_one[full-words]",
)
bug(
    "heads-what-a-word-reads-is-a-sum",
    "head_analysis/weight_bands.py",
    "            w_HTS = w_HTS / pieces[:, None]\n",
    "",
    f"{STATISTICS}::test_words_are_read_by_all_pieces_and_read_on_average[full-0]",
)
bug(
    "heads-clarks-mean-over-rows-that-may-read",
    "head_analysis/literature_metrics.py",
    "    return sums, (chosen.sum(dtype=torch.float64) / max(1, whole)).expand(heads)",
    "    return sums * whole, chosen.sum(dtype=torch.float64).expand(heads)",
    f"{STATISTICS}::test_clarks_statistics_are_means_over_texts[full-clark next]",
)
bug(
    "heads-voita-with-ends-as-rows",
    "head_analysis/literature_metrics.py",
    "allowed = block.allowed & kept & ~block.asks.separator[block.places][:, None]",
    "allowed = block.allowed & kept",
    f"{STATISTICS}::test_voitas_statistics[full-0]",
)
bug(
    "heads-a-governor-is-its-dependents-dependent",
    "head_analysis/dependency_syntax.py",
    "else (governor, dependent)",
    "else (dependent, governor)",
    f"{ARCS}[ours-full-counted-19]",
)
bug(
    "heads-arcs-that-nobody-may-read-count",
    "head_analysis/dependency_syntax.py",
    'if self.convention.counted == "read":',
    'if self.convention.counted == "any":',
    f"{ARCS}[ours-causal-counted-19]",
)
bug(
    "heads-marks-of-possession-are-the-token-behind",
    "head_analysis/dependency_syntax.py",
    "mark = at.get(arc[0] + 1) if",
    "mark = dependent + 1 if dependent + 1 < words.count and",
    f"{ARCS}[clark-full-clark-19]",
)
bug(
    "heads-columns-of-the-last-band-alone",
    "head_analysis/dependency_syntax.py",
    "torch.where(most > was, by + block.start, whom)",
    "torch.where(most > was, by, whom)",
    f"{ARCS}[clark-full-clark-4]",
)
bug(
    "heads-relations-are-tested-one-by-one",
    "head_analysis/dependency_syntax.py",
    "NormalDist().inv_cdf(1 - (1 - SHARE) / 2 / max(1, tests))",
    "NormalDist().inv_cdf(1 - (1 - SHARE) / 2)",
    f"{ARCS}[ours-full-counted-19]",
)
bug(
    "heads-what-is-sure-is-not-possible",
    "head_analysis/word_alignment.py",
    "        possible[link[1], link[0]] = 1\n",
    "        possible[link[1], link[0]] = 1 - float(link[2])\n",
    f"{LINKS}[full-read-17]",
)
bug(
    "heads-said-is-what-was-read-before",
    "head_analysis/word_alignment.py",
    "torch.cat([text.word[1:], text.word.new_full((1,), -1)])",
    "torch.cat([text.word.new_full((1,), -1), text.word[:-1]])",
    f"{LINKS}[full-said-17]",
)
bug(
    "heads-the-diagonal-is-no-chance",
    "head_analysis/word_alignment.py",
    "chance = float(value[n, -2:].max())",
    "chance = float(value[n, -2])",
    f"{ALIGNMENT}::test_a_head_that_draws_the_gold_links_has_no_error",
)
bug(
    "heads-named-without-an-interval",
    "head_analysis/head_classes.py",
    "if one.above and score(one) >= LEAST:",
    "if score(one) >= LEAST:",
    f"{CLASSES}::test_a_class_is_how_far_a_measure_is_between_chance_and_perfect[sink]",
)
bug(
    "heads-score-is-the-measure",
    "head_analysis/head_classes.py",
    "round((one.value - one.chance) / (1 - one.chance), 12)",
    "round(one.value, 12)",
    f"{CLASSES}::test_a_class_is_how_far_a_measure_is_between_chance_and_perfect[induction]",
)
bug(
    "heads-a-relation-of-all-is-a-class",
    "head_analysis/dependency_syntax.py",
    'return measure.startswith(f"{SIGN} ") and not measure.startswith(f"{SIGN} {ALL} ")',
    'return measure.startswith(f"{SIGN} ")',
    f"{CLASSES}::test_relations_are_told_with_how_much_better_than_the_best_offset",
)
bug(
    "heads-words-of-many-pieces-are-no-rival",
    "head_analysis/dependency_syntax.py",
    "block.uniform.w_HTS.to(block.w_HTS.dtype)]",
    "torch.zeros_like(block.w_HTS[:1])]",
    f"{ARCS}[ours-full-counted-19]",
)
