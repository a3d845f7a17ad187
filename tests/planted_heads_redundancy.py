"""Bugs in what compares heads, and in what their weights alone say."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
REDUNDANCY, DIVERSITY = "test_redundancy.py", "test_diversity.py"
CIRCUITS, SPECTRA = "test_circuits.py", "test_spectra.py"
LIKENESS, SAMPLED = "head_analysis/head_similarity.py", "head_analysis/head_similarity.py"
bug(
    "redundancy-half-of-the-entropies-is-forgotten",
    LIKENESS,
    "both - (own[head] + own_told[head + 1 :]) / 2",
    "both - (own[head] + own[head + 1 :]) / 2",
    f"{REDUNDANCY}::test_the_other_rows_of_the_other_head",
)
bug(
    "redundancy-pieces-of-rows-overlap",
    LIKENESS,
    "(each[:, start : start + step] for each in (weights, told))",
    "(each[:, start : start + step + 1] for each in (weights, told))",
    f"{REDUNDANCY}::test_pairs_in_pieces_are_pairs_at_once",
)
bug(
    "redundancy-clark-over-one-key-more",
    "head_analysis/head_redundancy.py",
    "smoothed(weights[..., :-1], self.how.smoothing)",
    "smoothed(weights, self.how.smoothing)[..., :-1]",
    f"{REDUNDANCY}::test_distances_of_a_model_are_means_over_all_rows[clark]",
)
bug(
    "redundancy-every-text-counts-alike",
    "head_analysis/head_redundancy.py",
    "jensen_shannon(weights).cpu().numpy() * rows.weight, count)",
    "jensen_shannon(weights).cpu().numpy() / count, 1.0)",
    f"{REDUNDANCY}::test_distances_of_a_model_are_means_over_all_rows[none]",
)
bug(
    "redundancy-cka-keeps-the-mean",
    LIKENESS,
    "    x = x - x.mean(1, keepdim=True)\n",
    "",
    f"{REDUNDANCY}::test_likeness_of_what_heads_say[linear-textbook]",
)
bug(
    "redundancy-cka-keeps-its-bias",
    LIKENESS,
    "found = shared - diagonal @ diagonal.T",
    "found = shared",
    f"{REDUNDANCY}::test_likeness_of_what_heads_say[unbiased-without_bias]",
)
bug(
    "redundancy-a-sample-of-the-first-tokens",
    SAMPLED,
    "marks = np.random.default_rng([self.seed, number]).random(count)",
    "marks = np.random.default_rng([self.seed, len(self.marks)]).random(count)",
    f"{REDUNDANCY}::test_a_sample_of_tokens_does_not_depend_on_how_they_come",
)
bug(
    "redundancy-weights-dealt-to-what-may-not-be-read",
    SAMPLED,
    "torch.where(may, marks, 2)",
    "marks",
    f"{REDUNDANCY}::test_weights_dealt_anew_are_as_sharp_and_stay_where_they_may_be",
)
bug(
    "redundancy-clusters-join-by-the-nearest",
    "head_analysis/head_similarity.py",
    "mean = (size[one] * far[one] + size[other] * far[other]) / (size[one] + size[other])",
    "mean = np.minimum(far[one], far[other])",
    f"{REDUNDANCY}::test_clusters_join_by_the_mean_over_pairs",
)
bug(
    "redundancy-the-map-is-the-first-start",
    "head_analysis/head_similarity.py",
    "begin = [_classical(far), *(",
    "begin = [*(",
    f"{REDUNDANCY}::test_several_starts_end_no_worse_than_the_classical_one_and_say_their_stress",
)
bug(
    "redundancy-chance-that-is-never-corrected",
    "head_analysis/resampling.py",
    "float(told[n]) * (len(order) - rank)",
    "float(told[n])",
    f"{REDUNDANCY}::test_holms_correction",
)
bug(
    "redundancy-near-without-its-own-chance",
    "head_analysis/resampling.py",
    "far = (np.minimum(mean, cut) - mean) / error - DEVIATIONS",
    "far = (cut - mean) / error - DEVIATIONS",
    f"{REDUNDANCY}::test_near_pairs_are_counted_beside_what_a_poisson_number_would_be",
)
bug(
    "diversity-sets-are-not-means",
    "head_analysis/head_redundancy.py",
    "return members / members.sum(1, keepdim=True)",
    "return members / members.shape[0]",
    f"{DIVERSITY}::test_the_spread_as_it_is_defined_of_layers_of_several_sizes",
)
bug(
    "diversity-outliers-count-themselves",
    "head_analysis/head_redundancy.py",
    "mean = (total - values) / count",
    "mean = total / (count + 1)",
    f"{DIVERSITY}::test_deviations_are_students",
)
bug(
    "diversity-layers-are-dealt-once",
    "head_analysis/head_redundancy.py",
    "*(draw.permutation(own) for _ in range(times))",
    "*(own for _ in range(times))",
    f"{DIVERSITY}::test_a_layer_whose_heads_are_alike_is_found",
)
bug(
    "depth-a-path-keeps-its-skips",
    "head_analysis/rank_analysis.py",
    'x + y * layer.scale if path.skip == "with" else y * layer.scale',
    "x + y * layer.scale",
    f"{DIVERSITY}::test_attention_alone_brings_all_tokens_together_and_skips_do_not",
)
bug(
    "depth-distance-from-nowhere",
    "head_analysis/rank_analysis.py",
    "(x - x.mean(0)).norm()",
    "(x - x.mean()).norm()",
    f"{DIVERSITY}::test_how_far_tokens_are_from_one",
)
bug(
    "circuits-grouped-keys-by-the-number-of-the-head",
    "head_analysis/head_circuits.py",
    "k[heads.reads[head]]",
    "k[head % len(k)]",
    f"{CIRCUITS}::test_scores_and_outputs_are_those_of_the_layer[said1]",
)
bug(
    "circuits-writes-with-the-output-bias",
    "head_analysis/head_circuits.py",
    "return y[:-1] - y[-1]",
    "return y[:-1]",
    f"{CIRCUITS}::test_scores_and_outputs_are_those_of_the_layer[said5]",
)
bug(
    "circuits-angles-of-columns-that-are-no-basis",
    "head_analysis/head_circuits.py",
    "return basis[:, size > 1e-10 * size[:1].clamp(min=1e-300)]",
    "return columns.double()",
    f"{CIRCUITS}::test_angles_are_those_of_full_products[left]",
)
bug(
    "circuits-copying-of-sizes",
    "head_analysis/head_circuits.py",
    "float(values.real.sum() / size)",
    "float(values.real.abs().sum() / size)",
    f"{CIRCUITS}::test_a_head_that_copies_and_one_that_takes_back[-1.0]",
)
bug(
    "circuits-shares-of-norms",
    "head_analysis/head_circuits.py",
    "(own * total).sum(-1) / whole.clamp(min=1e-300)",
    "own.square().sum(-1) / whole.clamp(min=1e-300)",
    f"{CIRCUITS}::test_norms_and_shares_of_what_is_written",
)
bug(
    "circuits-a-twin-that-moves-the-callers-draws",
    "head_analysis/random_baseline.py",
    "        with torch.random.fork_rng(cards):\n            torch.manual_seed(seed)\n            other = make(config)",
    "        with torch.random.fork_rng(cards):\n            other = make(config)",
    f"{CIRCUITS}::test_a_twin_of_somebody_elses[bert]",
)
bug(
    "spectra-keys-counted-for-every-reader",
    "head_analysis/rank_analysis.py",
    "dict.fromkeys(reads)])\n",
    "reads])\n",
    f"{SPECTRA}::test_dims_are_those_of_the_full_products[2]",
)
bug(
    "spectra-gaussian-heads-with-keys-of-their-own",
    "head_analysis/rank_analysis.py",
    "Factors(torch.randn(head.left.shape, generator=draw), keys[key])",
    "Factors(torch.randn(head.left.shape, generator=draw), torch.randn(keys[key].shape, generator=draw))",
    f"{SPECTRA}::test_gaussian_weights_are_what_fresh_ones_look_like_and_share_keys_as_they_do",
)
bug(
    "spectra-energy-without-squares",
    "head_analysis/rank_analysis.py",
    "power = singular.double().square()",
    "power = singular.double()",
    f"{SPECTRA}::test_the_edge_of_a_share_is_inside",
)
bug(
    "spectra-effective-rank-of-squares",
    "head_analysis/rank_analysis.py",
    "    values = torch.linalg.svdvals(matrices.double())\n    total",
    "    values = torch.linalg.svdvals(matrices.double()).square()\n    total",
    f"{SPECTRA}::test_ranks_of_matrices",
)
bug(
    "spectra-mixed-scores-are-the-plain-ones",
    "head_analysis/rank_analysis.py",
    'found["mixed"] = probe.seen["scores"][:, :, :MOST]',
    'found["mixed"] = found["scores"]',
    f"{SPECTRA}::test_mixing_heads_lifts_the_rank_of_scores",
)
