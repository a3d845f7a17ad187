"""Bugs in the core: patterns, tokens, caches, counting, cutting, backends, the first parts, text and input."""

from __future__ import annotations

from planting import (
    COUNTS,
    IDENTITY,
    MHA,
    PATTERN,
    STORIES,
    bug,
    cut,
    decode,
    frequencies,
    layers,
    ragged,
    ring,
    steps,
    truth,
)

# --- patterns ------------------------------------------------------------------------------------------

bug(
    "window-sees-one-more",
    "pattern.py",
    "back=self.keys - 1 - self.after",
    "back=self.keys - self.after",
    PATTERN + "test_memory_is_tight",
    layers("gemma2-none"),
)
bug(
    "blocks-forget-the-last",
    "pattern.py",
    "min(queries - rest, self.size) * min(keys - rest, self.size)",
    "(queries - rest) * (keys - rest)",
    PATTERN + "test_pairs_equal_brute_force",
)
bug(
    "union-remembers-too-little",
    "boxes.py",
    "max(memory.first for memory in memories)",
    "min(memory.first for memory in memories)",
    PATTERN + "test_memory_and_opening_hold",
)
bug(
    "boxes-end-one-late",
    "boxes.py",
    "ahead = NOTHING if self.ahead is None else {self.ahead + 1}",
    "ahead = NOTHING if self.ahead is None else {self.ahead + 2}",
    PATTERN + "test_pairs_equal_brute_force",
)
bug(
    "opening-forgets-the-unbounded",
    "pattern_base.py",
    "max(known) if len(known) == len(openings) else None",
    "max(known) if known else None",
    PATTERN + "test_memory_and_opening_hold",
)
bug(
    "edges-alias-beyond-their-width",
    "pattern_tables.py",
    "(j < self.width) & listed(",
    "listed(",
    PATTERN + "test_pairs_equal_brute_force",
)

# --- tokens, sight and caches --------------------------------------------------------------------------

bug("padding-meets-padding", "tokens.py", "(asks == told) & (told >= 0) &", "(asks == told) &", truth("Direct0"))
bug("documents-meet", "tokens.py", "(asks == told) & (told >= 0)", "(told >= 0)", truth("Direct0"))
bug(
    "padding-one-too-late",
    "tokens.py",
    "place < sizes[:, None]",
    "place <= sizes[:, None]",
    MHA + "test_key_padding[full()]",
)
bug(
    "left-padding-at-the-wrong-end",
    "tokens.py",
    "position >= 0 if pad",
    "position < sizes[:, None] if pad",
    layers("t5-left"),
)
bug(
    "packed-positions-run-on",
    "tokens.py",
    "place - torch.where(begins, place, 0).cummax(1).values",
    "place",
    "contract/test_truth.py::test_packed_documents_do_not_meet[Sigmoid0]",
    "test_cache.py",
)
bug("mask-upside-down", "tokens.py", "allowed & self.mask", "allowed & ~self.mask", MHA + "test_boolean_mask[False]")
bug(
    "a-window-passes-for-a-triangle",
    "tokens.py",
    "and pairs == Causal().pairs(asks, told)",
    "",
    truth("SinkSoftmax0"),
    ring("Direct1"),
)
bug(
    "filled-slots-one-short",
    "cache/contiguous.py",
    "filled = min(self.used, self.slots)",
    "filled = min(self.used, self.slots) - 1",
    decode("Direct0"),
)
bug(
    "held-is-taken-for-allowed",
    "cache/full_visibility.py",
    "return self._all",
    "return True",
    "contract/test_any.py::test_any_spec_decodes",
)
bug(
    "ring-one-slot-short",
    "cache/contiguous.py",
    "slot = before if before < self.first else self.first + (before - self.first) % self.last",
    "slot = before if before < self.first else self.first + (before - self.first) % (self.last - 1)",
    steps("gemma2"),
)
bug(
    "ring-keeps-any-of-many",
    "cache/contiguous.py",
    'winner.scatter_reduce(1, slot, order, "amax")',
    'winner.scatter_reduce(1, slot, order, "amin", include_self=False)',
    ring("Direct0"),
)
bug(
    "ring-reads-what-is-left",
    "cache/contiguous.py",
    "if at.count == 1 else (told, where)",
    "if at.count == 1 else (self.entry, self.tokens)",
    steps("gemma2"),
)
bug(
    "padding-takes-a-slot",
    "cache/contiguous.py",
    "torch.where(live, self._filled[:, None] + live.cumsum(1) - 1, self.slots)",
    "self._filled[:, None] + torch.arange(at.count, device=self.device)",
    "test_cache.py",
)
bug(
    "ragged-rows-go-on-from-the-longest",
    "cache/kv_cache.py",
    "position = self._last[:, None] + ",
    "position = self._last.amax() + ",
    ragged("Direct0"),
    ragged("Rotary0"),
)

# --- counting ------------------------------------------------------------------------------------------

bug(
    "constants-are-counted-as-learned",
    "costs/__init__.py",
    "if param.learned}",
    "}",
    COUNTS + "test_parameters_are_counted_as_made[Alibi0]",
)
bug(
    "values-cost-as-much-as-keys",
    "terms.py",
    "len(self.values) * self.vdim)",
    "len(self.values) * self.dim)",
    COUNTS + "test_products_are_counted_as_torch_counts_them[Direct1-dense]",
)
bug(
    "a-source-is-projected-per-query",
    "terms.py",
    '"source": self.remembered',
    '"source": self.queries',
    COUNTS + "test_products_are_counted_as_torch_counts_them[Direct3-dense]",
)
bug(
    "talking-is-free",
    "parts/talking_heads.py",
    'return 2 * work.batch * work.pairs * sizes["given"] * heads',
    "return 0",
    COUNTS + "test_products_are_counted_as_torch_counts_them[TalkingHeads0-dense]",
)
bug(
    "a-ring-is-billed-in-full",
    "costs/__init__.py",
    "capacity if last is None else min(capacity, first + last)",
    "capacity",
    ring("Direct0"),
)

# --- axes ----------------------------------------------------------------------------------------------

bug(
    "cut-forgets-who-speaks",
    "axes.py",
    "speaks=tuple(rows.index(spec.speaks[out]) for out in outs)",
    "speaks=tuple(range(len(outs)))",
    cut("TalkingHeads0"),
)
bug(
    "cut-forgets-who-is-needed",
    "parts/talking_heads.py",
    "return frozenset(range(spec.heads.q))",
    "return heads",
    cut("TalkingHeads0"),
)
bug(
    "cut-narrows-a-norm-over-all-heads",
    "parts/qk_norm.py",
    'return frozenset(range(spec.heads.q)) if self.scope == "full" else heads',
    "return heads",
    cut("QKNorm1"),
)
bug(
    "sizes-follow-the-cut",
    "axes.py",
    "slots = {slot: getattr(spec, slot).settled(spec)",
    "slots = {slot: getattr(spec, slot)",
    cut("Overlapping0"),
)
bug(
    "share-adds-instead-of-averaging",
    "axes.py",
    "take(group)(t, axis).mean(axis)",
    "take(group)(t, axis).sum(axis)",
    "contract/test_axes.py::test_sharing_equal_heads_changes_nothing[Direct1]",
)
bug("groups-interleave", "grouping.py", "h // (q // kv)", "h % kv", layers("llama-none"))

# --- the module and its backends -----------------------------------------------------------------------

bug(
    "turns-in-reverse-order",
    "module.py",
    "in self.turns[side]:",
    "in reversed(self.turns[side]):",
    layers("qwen3-none"),
)
bug(
    "source-tokens-forgotten",
    "module.py",
    "return source.entry, source.tokens",
    "return source.entry, Tokens.run(0, source.tokens.count, x_BTD.device)",
    layers("t5-right"),
)
bug(
    "constants-round-with-the-layer",
    "weights.py",
    "self._buffers[name] = before.to(after.device)",
    "self._buffers[name] = after",
    "contract/test_module.py::test_copies_saves_and_moves[Rotary0]",
)
bug(
    "a-copy-acts-with-old-weights",
    "backends/core_interface.py",
    "return partial(_score, part, p)",
    "return lambda s, sight, inputs: _score(part, p, s, sight, inputs)",
    "contract/test_module.py::test_copies_saves_and_moves[T5Bias0]",
)
bug(
    "dense-groups-swap-queries",
    "backends/core_interface.py",
    "return x_BHTK.unflatten(1, (-1, each)).flatten(2, 3)",
    "return x_BHTK.unflatten(1, (-1, each)).transpose(2, 3).flatten(2, 3)",
    truth("Direct1"),
)
bug(
    "softcap-comes-before-the-scale",
    "backends/dense.py",
    "    for act in bound.scores:\n        s_BHTS = act(s_BHTS, sight, inputs)",
    "    for act in bound.scores:\n        s_BHTS = act(s_BHTS / job.core.scale, sight, inputs) * job.core.scale",
    layers("gemma2-none"),
)
bug(
    "sdpa-forgets-the-scale",
    "backends/sdpa.py",
    "is_causal=triangle, scale=scale, enable_gqa",
    "is_causal=triangle, enable_gqa",
    layers("gpt2-by-depth-none"),
)
bug(
    "sdpa-forgets-the-mask-beside-a-bias",
    "backends/sdpa.py",
    'bias if sight.shape == "full" else bias.masked_fill(~sight.allowed, -torch.inf)',
    "bias",
    truth("Alibi1"),
)
bug(
    "sdpa-permutes-nothing",
    "backends/sdpa.py",
    "    if not job.straight:\n",
    "    if len(job.core.keys) != len(job.core.values):\n",
    "test_odd_input.py::test_heads_may_speak_in_any_order",
)
bug(
    "sink-weighs-by-value",
    "backends/sdpa.py",
    "F.pad(v, (0, 0, 0, 1))",
    "F.pad(v, (0, 0, 0, 1), value=1.0)",
    layers("gpt-oss-none"),
)
bug(
    "state-reads-for-padding",
    "parts/feature_map.py",
    ".masked_fill(~live_BS[:, None, :, None], 0.0)",
    "",
    ragged("FeatureMap0"),
)
bug(
    "state-forgets-its-weight",
    "backends/linear_attention.py",
    "value_BHTV + past_BHTV, total + weight",
    "value_BHTV + past_BHTV, total",
    decode("FeatureMap0"),
)

# --- parts ---------------------------------------------------------------------------------------------

bug(
    "rotary-turns-backwards",
    "parts/rotary_embedding.py",
    "a * cos - b * sin, a * sin + b * cos",
    "a * cos + b * sin, b * cos - a * sin",
    layers("llama-none"),
)
bug(
    "rotary-swaps-its-pairings",
    "parts/rotary_embedding.py",
    'halves = self.pairs == "half"',
    'halves = self.pairs != "half"',
    layers("llama-none"),
    STORIES + "test_one_pass_predicts_every_next_id",
)
bug(
    "rotary-exponent-forgets-the-two",
    "parts/rotary_embedding.py",
    "self.base ** (-2 * c / dims)",
    "self.base ** (-c / dims)",
    frequencies("linear"),
)
bug(
    "rotary-swells-only-the-cosine",
    "parts/rotary_embedding.py",
    "cos, sin = cos * self.swell, sin * self.swell",
    "cos, sin = cos * self.swell, sin",
    layers("llama-yarn-none"),
)
bug(
    "yarn-ramp-upside-down",
    "parts/rotary_scaling.py",
    "[1 - _between(c, first, last)",
    "[_between(c, first, last)",
    layers("llama-yarn-none"),
)
bug(
    "yarn-swells-by-bits",
    "parts/rotary_scaling.py",
    "0.1 * math.log(self.factor) + 1 if",
    "0.1 * math.log2(self.factor) + 1 if",
    frequencies("yarn"),
)
bug(
    "llama3-forgets-two-pi",
    "parts/rotary_scaling.py",
    "_between(self.original * f / (2 * math.pi), self.low",
    "_between(self.original * f, self.low",
    layers("llama-llama3-none"),
)
bug(
    "ntk-forgets-the-exponent",
    "parts/rotary_scaling.py",
    "self.factor ** (dims / (dims - 2))",
    "self.factor",
    layers("llama-dynamic-none"),
)
bug(
    "alibi-rewards-distance",
    "parts/alibi.py",
    'return s - p["slope"]',
    'return s + p["slope"]',
    "house/test_house.py::test_doctests[headwise.parts.alibi]",
    "anchors/test_alibi.py",
)
bug("t5-own-token-is-later", "parts/t5_bias.py", "(ahead > 0) * side", "(ahead >= 0) * side", layers("t5-none"))
bug("t5-looks-the-other-way", "parts/t5_bias.py", "cell.j - cell.i", "cell.i - cell.j", layers("t5-none"))
bug(
    "t5-reach-off-by-one",
    "parts/t5_bias.py",
    "math.log(self.reach / exact)",
    "math.log((self.reach + 1) / exact)",
    "anchors/test_transformers.py::test_t5_buckets[back-32-128]",
)
bug(
    "softcap-forgets-to-divide",
    "parts/softcap.py",
    "torch.tanh(s / self.limit) * self.limit",
    "torch.tanh(s) * self.limit",
    layers("gemma2-none"),
)
bug(
    "shaw-values-clip-short",
    "parts/shaw_relative_position.py",
    "min(max(j - i, -self.reach), self.reach)",
    "min(max(j - i, 1 - self.reach), self.reach)",
    truth("Shaw0"),
)
bug(
    "qk-norm-one-weight-for-both",
    "parts/qk_norm.py",
    "scale = p[side].to(x_BTHK.dtype)",
    'scale = p["q"].to(x_BTHK.dtype)',
    layers("qwen3-none"),
)
bug(
    "softmax-of-nothing-is-even",
    "parts/softmax.py",
    ".softmax(-1).masked_fill(~allowed, 0.0)",
    ".softmax(-1)",
    MHA + "test_nothing_to_read_is_nan_there_and_the_bias_here",
)
bug(
    "sink-sign",
    "parts/sink_softmax.py",
    'sink = p.spread()["sink"]',
    'sink = -p.spread()["sink"]',
    layers("gpt-oss-none"),
)
bug(
    "sigmoid-counts-the-batch-length",
    "parts/sigmoid.py",
    "bias = count.clamp(min=1)",
    "bias = torch.full_like(count, s_BHTS.shape[-1])",
    truth("Sigmoid0"),
    decode("Sigmoid0"),
)
bug(
    "average-counts-the-forbidden",
    "parts/mean_attention.py",
    "live.sum(-1, keepdim=True).clamp(min=1)",
    "live.shape[-1]",
    truth("Average0"),
)
bug(
    "latent-shared-key-unturned",
    "parts/latent_attention.py",
    'turn(r[..., None, :], "k").squeeze(-2)',
    "r",
    layers("deepseek-none"),
)
bug(
    "latent-scale-forgets-rope",
    "parts/latent_attention.py",
    "(spec.heads.dim + self.rope) ** -0.5",
    "spec.heads.dim**-0.5",
    layers("deepseek-none"),
)
bug(
    "latent-query-norm-forgets-weights",
    "parts/latent_attention.py",
    '(self.query_rank,), p["q_norm"]',
    "(self.query_rank,), None",
    layers("deepseek-query-rank-none"),
)
bug(
    "latent-absorbs-for-the-wrong-head",
    "parts/latent_attention.py",
    "up = up[list(voices)]",
    "up = up[: len(voices)]",
    cut("Latent3"),
)
bug(
    "talking-heads-listen-backwards",
    "parts/talking_heads.py",
    "(mixing_HO.to(a_BHTS.dtype).T @",
    "(mixing_HO.to(a_BHTS.dtype) @",
    truth("TalkingHeads0"),
)
bug(
    "dynamic-forgets-its-norm",
    "parts/dynamic_composition.py",
    '"source": F.rms_norm(source, source.shape[-1:], eps=_EPS)',
    '"source": source',
    IDENTITY + "test_dynamic_heads_as_published",
)
bug(
    "dynamic-keys-answer-for-queries",
    "parts/dynamic_composition.py",
    "permute(0, 3, 1, 2), kept)",
    "permute(0, 3, 1, 2), asked)",
    truth("Dynamic0"),
)
bug(
    "collaborative-scale-follows-the-width",
    "parts/collaborative.py",
    "heads.vdim, heads.dim**-0.5)",
    "heads.vdim, self.width**-0.5)",
    IDENTITY + "test_collaborative_heads_of_full_width_with_blocks_and_the_query_bias",
)
bug(
    "overlapping-scale-follows-the-slice",
    "parts/overlapping_heads.py",
    "wide, wide, heads.dim**-0.5)",
    "wide, wide, wide**-0.5)",
    IDENTITY + "test_overlapping_queries_and_keys_are_collaborative_ones_with_a_banded_mixing",
)
bug(
    "overlapping-pads-one-end",
    "parts/overlapping_heads.py",
    "F.pad(channels_BTC, (self.overlap, self.overlap))",
    "F.pad(channels_BTC, (0, 2 * self.overlap))",
    IDENTITY + "test_overlapping_queries_and_keys_are_collaborative_ones_with_a_banded_mixing",
)
bug(
    "differential-adds",
    "parts/differential.py",
    "left = o_BTHV[..., ::2, :] - noise",
    "left = o_BTHV[..., ::2, :] + noise",
    IDENTITY + "test_differential_heads_that_subtract_nothing",
)
bug(
    "routing-shares-out-nothing",
    "parts/mixture_of_heads.py",
    "return self.active * share * chosen",
    "return share * chosen",
    IDENTITY + "test_routing_without_a_preference_and_all_heads_active",
)
bug(
    "routing-counts-padding",
    "parts/mixture_of_heads.py",
    "live = asked.at.live.expand(share.shape[:-1])",
    "live = torch.ones(share.shape[:-1])",
    IDENTITY + "test_routing_leaves_padding_out_of_its_balance",
)
bug(
    "routing-forgets-who-was-cut",
    "parts/mixture_of_heads.py",
    '.index_select(-1, p["slot"])',
    '[..., : len(p["slot"])]',
    cut("Routed0"),
)

# --- text, input and what callers hold -----------------------------------------------------------------

BAD = "test_bad_input.py::"
bug(
    "rows-forget-how-full-they-are",
    "cache/contiguous.py",
    "self._filled = self._filled[index]",
    "self._filled = self._filled[: len(index)]",
    "test_cache.py::test_rows_go_their_own_way[plain-ragged-reorder]",
)
bug(
    "a-full-cache-takes-one-more",
    "cache/contiguous.py",
    "if longest > self.slots:",
    "if longest > self.slots + 1:",
    BAD + "test_a_full_cache_says_so_and_keeps_what_it_has",
)
bug(
    "lse-counts-the-forbidden",
    "backends/dense.py",
    "s_BHTS.masked_fill(~allowed, -torch.inf).logsumexp(-1)",
    "s_BHTS.logsumexp(-1)",
    "test_lse.py::test_slices_merge",
)
bug(
    "a-row-that-reads-nothing-has-an-lse",
    "backends/sdpa.py",
    "lse = lse.masked_fill((bias == -torch.inf).all(-1), -torch.inf)",
    "pass",
    "contract/test_module.py::test_fused_kernels_show_the_lse_that_dense_shows[Direct0]",
)
bug(
    "nan-is-hidden",
    "backends/dense.py",
    "w_BHTS = bound.normalise(s_BHTS, allowed, bound.normaliser_p)",
    "w_BHTS = bound.normalise(s_BHTS, allowed, bound.normaliser_p).nan_to_num(0.0)",
    "test_odd_input.py::test_a_nan_that_only_asks_is_seen_there_and_nowhere_else",
)
bug(
    "sum-divides-by-nothing",
    "parts/sum_normaliser.py",
    "s_BHTS / total.masked_fill(total == 0, 1.0)",
    "s_BHTS / total",
    "test_odd_input.py::test_a_query_with_nothing_to_read_reads_zero",
)
bug(
    "heads-are-sorted-before-they-are-read",
    "backends/core_interface.py",
    "torch.tensor(heads, device=x_BGSK.device)",
    "torch.tensor(sorted(heads), device=x_BGSK.device)",
    "test_bias_laws.py::test_the_constant_follows_who_reads_whom",
)
bug(
    "a-source-forgets-where-it-stands",
    "module.py",
    "return Remembered(*self.peers.gather(entry, at), self.spec)",
    "return Remembered(entry, Tokens.run(0, at.count, at.position.device), self.spec)",
    "test_lse.py::test_slices_of_the_sequence_itself_merge",
)
bug(
    "repeated-positions-pass",
    "tokens.py",
    "(told[:, 1:] == told[:, :-1]) & (place[:, 1:] == place[:, :-1])",
    "(told[:, 1:] == told[:, :-1]) & (place[:, 1:] < place[:, :-1])",
    BAD + "test_a_call_that_cannot_be_meant[at([0, 1, 1], [0, 0, 0])]",
)
bug(
    "uneven-heads-print-as-even",
    "text.py",
    "if spec.heads.even:",
    "if spec.heads.q % spec.heads.kv == 0:",
    "test_text.py::test_heads_come_back",
)
bug(
    "two-spellings-are-two-specs",
    "spec.py",
    "key=lambda modifier: modifier.phase",
    "key=lambda modifier: 0",
    "test_text.py::test_two_spellings_of_one_list_are_one_spec",
)
bug(
    "sines-alternate-in-both-layouts",
    "positions.py",
    "pair.transpose(-1, -2).flatten(-2)",
    "pair.flatten(-2)",
    "test_positions.py::test_sines_are_those_of_the_formula",
)
bug(
    "a-prefix-may-come-in-pieces",
    "cache/kv_cache.py",
    "if given < opening:",
    "if given < opening - 1:",
    "test_odd_input.py::test_a_later_prefix_must_come_at_once_too",
)
bug(
    "a-source-of-other-rows-passes",
    "inputs.py",
    "if batch != x.shape[0]:",
    "if batch > x.shape[0]:",
    BAD + "test_a_call_that_cannot_be_meant[layer()(X, source=X[:1])]",
)

bug(
    "angles-in-single-precision",
    "parts/rotary_embedding.py",
    "self.position_BT.view(*self.position_BT.shape, 1, 1) * self.frequency",
    "self.position_BT.view(*self.position_BT.shape, 1, 1).float() * self.frequency.float()",
    "test_odd_input.py::test_only_distances_matter_however_far_out",
)
bug(
    "a-state-as-coarse-as-its-inputs",
    "backends/linear_attention.py",
    "part, exact = spec.folder[1], torch.promote_types(dtype, torch.float32)",
    "part, exact = spec.folder[1], dtype",
    "test_odd_input.py::test_a_state_keeps_sums_that_its_inputs_could_not",
)
bug(
    "a-step-is-billed-for-the-expanded-form",
    "costs/__init__.py",
    "spec = replace(spec, project=spec.form(work.queries == 1))",
    "spec = replace(spec, project=spec.form(False))",
    COUNTS + "test_a_step_is_counted_as_torch_counts_it[Latent0]",
)
bug(
    "small-numbers-stay-small",
    "tokens.py",
    "self.position, self.segment = self.position.long(), self.segment.long()",
    "pass",
    "test_odd_input.py::test_positions_of_small_types_are_positions",
)
