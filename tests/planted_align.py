"""Bugs in what maps heads onto each other before they are shared, and in layers as others of the same function."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
ALIGNING, GROUPS, LATENT, GATHERING = (
    "test_aligning.py",
    "test_head_groups.py",
    "test_as_latent.py",
    "test_gathering.py",
)
UNSEEN = f"{ALIGNING}::test_a_turn_is_refused_or_unseen"
BEST = f"{ALIGNING}::test_the_best_map_is_in_its_freedom_and_no_other_there_is_better"
MERGED = f"{LATENT}::test_a_merged_layer_is_refused_or_the_same"
bug(
    "align-queries-that-share-a-key-keep-their-own-map",
    "surgery/head_alignment.py",
    'spec.project.absorb(spec, exact, "q", maps[list(heads.reads)])',
    'spec.project.absorb(spec, exact, "q", maps[[h % heads.kv for h in range(heads.q)]])',
    f"{ALIGNING}::test_aligned_is_the_same_function_and_nearer_to_its_means[rotary-torch.float64]",
)
bug(
    "align-outputs-are-mapped-forth-and-not-back",
    "surgery/head_alignment.py",
    "spec.merge.absorb(spec, exact, maps[own].mT)",
    "spec.merge.absorb(spec, exact, maps[own])",
    f"{UNSEEN}[Dot0]",
)
bug(
    "align-rotary-lets-any-map-pass",
    "parts/rotary_embedding.py",
    "return Freedom(self.planes(dims), (rest,) if rest else ())",
    "return Freedom.whole(spec.heads.dim)",
    f"{UNSEEN}[Rotary0]",
    f"{ALIGNING}::test_rotations_of_pairs_are_what_rotary_cannot_see[half]",
)
bug(
    "align-rotary-pairs-are-always-halves",
    "parts/rotary_embedding.py",
    "return tuple((c, c + 1) for c in range(0, dims, 2))",
    "return tuple((c, c + dims // 2) for c in range(dims // 2))",
    f"{ALIGNING}::test_rotations_of_pairs_are_what_rotary_cannot_see[interleaved]",
)
bug(
    "align-norm-of-queries-is-not-asked",
    "parts/qk_norm.py",
    'for own in "qk"])\n        return Freedom.alike',
    'for own in "k"])\n        return Freedom.alike',
    f"{ALIGNING}::test_a_norm_of_keys_lets_turns_pass_where_its_weights_are_alike",
)
bug(
    "align-angle-the-other-way-round",
    "surgery/head_alignment.py",
    "products[..., a, b] - products[..., b, a],",
    "products[..., b, a] - products[..., a, b],",
    BEST,
)
bug(
    "align-head-is-pulled-by-itself",
    "surgery/head_alignment.py",
    "best(met.sum(0) - met[head], freedom)",
    "best(met[head], freedom)",
    f"{ALIGNING}::test_means_of_turned_heads_miss_no_more",
)
bug(
    "align-cosines-of-rows-as-they-are-long",
    "surgery/head_alignment.py",
    "_met(x / torch.where(lengths > 0, lengths, 1.0))",
    "_met(x)",
    f"{ALIGNING}::test_likeness_is_that_of_rows_after_the_best_map[cosine]",
)
bug(
    "groups-climb-nowhere",
    "surgery/head_grouping.py",
    "if gain[a, b] <= 1e-12 * score.abs().max():",
    "if gain[a, b] <= 1e12 * score.abs().max():",
    f"{GROUPS}::test_many_heads_are_grouped_alike_every_time_and_never_worse_than_neighbours",
    f"{GROUPS}::test_hidden_groups_are_found",
)
bug(
    "groups-of-few-heads-are-not-all-tried",
    "surgery/head_grouping.py",
    "torch.combinations(torch.tensor(rest, dtype=torch.int64), size - 1).tolist()",
    "torch.combinations(torch.tensor(rest, dtype=torch.int64), size - 1).tolist()[:1]",
    f"{GROUPS}::test_few_heads_are_grouped_as_well_as_can_be",
)
bug(
    "arranged-outputs-stay-where-they-were",
    "surgery/head_grouping.py",
    '"kv": take(kv), "out": take(outs)}',
    '"kv": take(kv)}',
    f"{GROUPS}::test_neighbours_make_what_was_shared_regular",
)
bug(
    "latent-query-keeps-its-scale",
    "parts/latent_attention.py",
    "(heads.q, heads.dim)) * grown",
    "(heads.q, heads.dim))",
    f"{MERGED}[Rotary0]",
)
bug(
    "latent-query-meets-every-head",
    "parts/latent_attention.py",
    "mine = (torch.tensor(reads)[:, None] == torch.tensor(owner)[None])",
    "mine = (torch.tensor(reads)[:, None] >= torch.tensor(owner)[None])",
    f"{MERGED}[Rotary0]",
)
bug(
    "rotary-copies-go-on-falling",
    "parts/rotary_embedding.py",
    "each = self.frequencies(dims // self.copies)",
    "each = self.frequencies(dims)[: dims // 2 // self.copies]",
    f"{LATENT}::test_copies_turn_each_head_as_it_turned_alone",
)
bug(
    "routed-first-heads-always-speak",
    "parts/mixture_of_heads.py",
    "choice = {head: n for n, head in enumerate((*first, *others))}",
    "choice = {head: head for head in range(len(speaks))}",
    f"{LATENT}::test_a_token_silences_the_heads_with_the_shortest_queries[(4,)]",
)
bug(
    "gathered-padding-counts",
    "surgery/kv_statistics.py",
    "live = said if tokens is None else said[tokens.live.expand(said.shape[:2])]",
    "live = said",
    f"{GATHERING}::test_keys_are_heard_before_they_turn_and_padding_not_at_all",
)
