"""Bugs in the ways heads work together."""

from __future__ import annotations

from planting import (
    COUNTS,
    PATTERN,
    bug,
    cut,
    edge,
    ragged,
    truth,
)

# --- blocks, sums and other numbers of heads -----------------------------------------------------------

bug(
    "a-chunk-forgets-those-before",
    "backends/linear_attention.py",
    "self.both(q, k, v, square, state if start else None)",
    "self.both(q, k, v, square, None)",
    edge("Sum0", "linear"),
)
bug(
    "all-are-read-but-the-last",
    "backends/linear_attention.py",
    "state = self._folded(state, k_BHSK, v_BHSV)",
    "state = self._folded(state, k_BHSK[:, :, :-1], v_BHSV[:, :, :-1])",
    truth("FeatureMap0"),
)
bug(
    "a-block-reaches-its-first-query-only",
    "boxes.py",
    "range(min(a.start, b.start), max(a.stop, b.stop))",
    "range(a.start, a.stop)",
    PATTERN + "test_reach_is_what_somebody_reads",
    edge("Dynamic1", "composed"),
)
bug(
    "a-block-reads-its-first-range-only",
    "backends/query_blocks.py",
    "torch.cat(index) if index",
    "index[0] if index",
    "contract/test_edges.py::test_sparse_patterns_touch_what_they_read[composed-bigbird(300, block=16, random=2)]",
)
bug(
    "blocks-keep-their-scores",
    "backends/chunked_attention.py",
    "if not torch.is_grad_enabled() or not any(t.requires_grad for t in wanted) or _kept(inputs, learned):",
    "if plan.blocks:",
    "contract/test_edges.py::test_mixing_heads_keeps_no_square[(TalkingHeads(),)]",
)
bug(
    "blocks-are-billed-in-full",
    "backends/query_blocks.py",
    "return len(self.queries) * sum(map(len, self.keys))",
    "return len(self.queries) * self.keys[-1].stop",
    "contract/test_edges.py::test_blocks_are_counted_as_torch_counts_them[SinkSoftmax0-composed]",
)
bug(
    "padding-counts-in-the-average",
    "parts/mean_attention.py",
    "live_BS.sum(-1, keepdim=True)",
    "live_BS.shape[1]",
    ragged("Average0"),
)
bug(
    "cut-takes-rows-for-score-heads",
    "axes.py",
    "rows = q if heads.rows == heads.q else tuple(range(heads.rows))",
    "rows = q",
    cut("TalkingHeads2"),
)
bug(
    "talking-in-too-few-heads",
    "parts/talking_heads.py",
    'given = spec.heads.q if self.on == "scores" else spec.mixed(Phase.SCORES)',
    "given = spec.heads.q",
    truth("TalkingHeads2"),
)

# --- blocks that join layers -----------------------------------------------------------------------------

DEPTH, MERGED, LONG = "test_depth_init.py", "test_merged.py", "test_longformer.py"

bug(
    "depth-scales-the-variance",
    "nn/depth_init.py",
    "return alpha / depth**exponent",
    "return alpha / depth ** (exponent / 2)",
    f"{DEPTH}::test_paper_and_code_at_layer_16",
)
bug(
    "xavier-knows-one-fan",
    "parts/initialisers.py",
    "shape[-1] + math.prod(shape[:-1])",
    "2 * shape[-1]",
    f"{DEPTH}::test_each_matrix_of_a_layer_by_its_own_widths",
)
bug(
    "three-maps-drawn-as-one",
    "nn/depth_init.py",
    "yield from module.in_proj_weight.chunk(3)",
    "yield module.in_proj_weight",
    f"{DEPTH}::test_any_module",
)
bug(
    "tables-drawn-as-maps",
    "nn/depth_init.py",
    "declared[name].applied is not None and ",
    "",
    f"{DEPTH}::test_biases_norms_tables_and_constants_stay",
)
bug(
    "shared-weights-made-twice",
    "module.py",
    "            if name not in shares:\n                self.add_module",
    "            if True:\n                self.add_module",
    f"{MERGED}::test_it_saves_a_whole_self_attention",
)
bug(
    "any-weights-can-be-shared",
    "weights.py",
    "if held != wanted:",
    "if held is None:",
    f"{MERGED}::test_weights_that_differ_cannot_be_shared",
)
bug(
    "the-mean-has-a-merge-of-its-own",
    "nn/merged_attention.py",
    'for name in ("project", "output")}',
    'for name in ("project",)}',
    f"{MERGED}::test_it_saves_a_whole_self_attention",
)
bug(
    "the-mean-forgets-the-bias-of-values",
    "nn/merged_attention.py",
    'bias = "v" if "v_bias" in spec.project.params(spec) else ""',
    'bias = ""',
    f"{MERGED}::test_the_formula[grouped]",
)
bug(
    "a-step-of-the-cross-branch-stands-at-zero",
    "nn/merged_attention.py",
    "at = cache.next(x.shape[1]) if tokens is None and cache is not None else tokens",
    "at = tokens",
    f"{MERGED}::test_cached_decode_is_one_pass[turned-one by one]",
)
bug(
    "cross-heads-outside-the-merge",
    "nn/merged_attention.py",
    "return self.cross.merge(read_BTOV + mean_BTOV)",
    "return self.cross.merge(read_BTOV) + self.average.merge(mean_BTOV)",
    f"{MERGED}::test_the_formula[pruned]",
    f"{MERGED}::test_the_formula[grouped]",
)
bug(
    "rows-with-fewer-global-tokens-lose-others",
    "nn/longformer_attention.py",
    "torch.where(asks.live[..., None, None], read, o_BTOV[there])",
    "read",
    f"{LONG}::test_each_token_is_read_by_its_own_layer[plain]",
)
bug(
    "the-second-projections-start-elsewhere",
    "nn/longformer_attention.py",
    "        self.overall.load_state_dict({name: held[name] for name in self.overall.state_dict()})\n",
    "",
    f"{LONG}::test_a_fresh_block_is_the_plain_layer[plain]",
)
bug(
    "the-first-global-token-is-not-counted",
    "nn/longformer_attention.py",
    "at.start <= position < at.start + at.count",
    "at.start < position < at.start + at.count",
    f"{LONG}::test_positions_count_from_where_the_tokens_stand[0]",
)
bug(
    "global-queries-ask-from-the-start",
    "nn/longformer_attention.py",
    "return there, Tokens(at.position.expand(batch, -1)[there], segment, checked=True)",
    "return there, Tokens(index, segment, checked=True)",
    f"{LONG}::test_each_token_is_read_by_its_own_layer[turned]",
)
bug(
    "everybody-asks-twice",
    "nn/longformer_attention.py",
    "return sum(at.start <= position < at.start + at.count for position in self.positions)",
    "return at.count",
    f"{LONG}::test_only_global_tokens_ask_twice[plain]",
)
bug(
    "packed-rows-share-their-global-tokens",
    "nn/longformer_attention.py",
    "self.overall.remember(x, tokens=at)",
    "self.overall.remember(x)",
    f"{LONG}::test_each_token_is_read_by_its_own_layer[plain]",
)
bug(
    "one-global-block-too-many",
    "pattern_tables.py",
    "return either(near, c < self.globals, r < self.globals, *drawn)",
    "return either(near, c <= self.globals, r < self.globals, *drawn)",
    "anchors/test_bigbird.py::test_one_head_with_drawn_blocks_is_a_pattern[none]",
)
bug(
    "an-edge-read-backwards",
    "pattern_tables.py",
    "return (j < self.width) & listed(self.codes, i * self.width + j)",
    "return (i < self.width) & listed(self.codes, j * self.width + i)",
    "anchors/test_bigbird.py::test_one_head_with_drawn_blocks_is_a_pattern[none]",
)
bug(
    "the-window-of-a-longformer-is-its-half",
    "pattern.py",
    "return (Box(back=self.keys - 1 - self.after, ahead=self.after),)",
    "return (Box(back=self.keys - self.after, ahead=self.after),)",
    "anchors/test_longformer.py::test_layers_agree[none]",
)
bug(
    "a-dilated-window-that-slides-over-classes",
    "pattern.py",
    "return near & (i % self.rate == j % self.rate)",
    "return near & (i % self.rate <= j % self.rate)",
    "anchors/test_dilated.py::test_residue_classes_are_segments[4-2-0]",
)
bug(
    "a-memory-made-under-autocast-is-refused-there",
    "inputs.py",
    "(held.dtype != x.dtype and not _autocasts(x))",
    "held.dtype != x.dtype",
    f"{MERGED}::test_autocast_remembers_and_reads",
)

# --- turns and outputs -----------------------------------------------------------------------------------

KNOCKING = "anchors/test_knocking.py::"
PAIRED = "anchors/test_differential.py::"
NORMED = "anchors/test_head_norm.py::"
SUMMED = "anchors/test_sum_heads.py::"
LLAMA = "anchors/test_diffllama.py::"

bug(
    "knocking-knocks-transposed",
    "parts/knocking_heads.py",
    "return F.linear(x_BTHK, p[side])",
    "return F.linear(x_BTHK, p[side].T)",
    KNOCKING + "test_one_matrix_for_all_heads_of_a_side",
)
bug(
    "the-knocking-mlp-forgets-its-two",
    "parts/knocking_heads.py",
    "F.linear(2 * F.linear",
    "F.linear(F.linear",
    KNOCKING + "test_a_fresh_layer_is_plain_attention",
)
bug(
    "knocking-counts-query-heads-for-keys",
    "parts/knocking_heads.py",
    "work.remembered * heads.kv * heads.dim**2",
    "work.remembered * heads.q * heads.dim**2",
    COUNTS + "test_products_are_counted_as_torch_counts_them[Knocking1-dense]",
)
bug(
    "folding-leaves-the-bias-behind",
    "parts/linear_projection.py",
    'for key in (side, f"{side}_bias") if key in self.params(spec)',
    "for key in (side,) if key in self.params(spec)",
    KNOCKING + "test_folded_is_unfolded",
)
bug(
    "folding-goes-through-what-turns-before",
    "folding.py",
    "None if before else matrix)",
    "matrix)",
    KNOCKING + "test_folded_is_unfolded[after it turned-]",
)
bug(
    "folding-takes-the-weights-of-another-name",
    "folding.py",
    'weights[f"{before}.{key}"]',
    'weights[f"{name}.{key}"]',
    KNOCKING + "test_folded_is_unfolded[around an mlp-]",
)
bug(
    "an-mlp-is-folded-as-a-matrix",
    "parts/knocking_heads.py",
    'return p[side] if self.kind == "linear" else None',
    'return p["up" if self.kind == "mlp" else side]',
    KNOCKING + "test_folded_is_unfolded[around an mlp-]",
)
bug(
    "version-2-pairs-halves",
    "parts/differential.py",
    "return o_BTHV[..., ::2, :] - noise * o_BTHV[..., 1::2, :]",
    "return o_BTHV.chunk(2, -2)[0] - noise * o_BTHV.chunk(2, -2)[1]",
    PAIRED + "test_version_2_as_published",
)
bug(
    "version-2-takes-a-raw-share-away",
    "parts/differential.py",
    'noise = torch.sigmoid(F.linear(x_BTD, p["noise"]))',
    'noise = F.linear(x_BTD, p["noise"])',
    PAIRED + "test_version_2_as_published",
)
bug(
    "rows-of-a-mixing-are-paired",
    "parts/differential.py",
    "if heads.rows != heads.q:",
    "if heads.rows < 1:",
    PAIRED + "test_what_cannot_be_a_pair_is_refused",
)
bug(
    "a-pair-may-read-apart",
    "parts/differential.py",
    "if read[i] != read[i + 1]]:",
    "if heads.reads[i] != heads.reads[i + 1]]:",
    PAIRED + "test_what_cannot_be_a_pair_is_refused",
)
bug(
    "depth-is-counted-from-one",
    "parts/differential.py",
    "math.exp(-0.3 * self.depth)",
    "math.exp(-0.3 * (self.depth - 1))",
    LLAMA + "test_layers_agree[grouped-none]",
    PAIRED + "test_version_1_as_released",
)
bug(
    "output-steps-in-a-row-forget-whose-row",
    "spec.py",
    "speaks = tuple(speaks[row] for row in step.speaks(len(speaks)))",
    "speaks = step.speaks(len(speaks))",
    cut("DifferentialV2-HeadNorm"),
    NORMED + "test_weights_of_each_output_head_may_stand_behind_a_join",
)
bug(
    "heads-are-normed-together",
    "parts/head_norm.py",
    "F.rms_norm(o_BTHV, o_BTHV.shape[-1:], eps=self.eps)",
    "F.rms_norm(o_BTHV, o_BTHV.shape[-2:], eps=self.eps)",
    NORMED + "test_every_head_by_itself",
)
bug(
    "a-norm-of-rows-is-let-through",
    "parts/head_norm.py",
    "steps[steps.index(self) :] if step.joins]",
    "steps[: steps.index(self)] if step.joins]",
    NORMED + "test_what_cannot_be_meant_is_refused",
)
bug(
    "a-mean-is-of-the-heads-that-are-left",
    "parts/sum_heads.py",
    "total / (self.heads or o_BTOV.shape[2])",
    "total / o_BTOV.shape[2]",
    cut("SumHeads1"),
    SUMMED + "test_a_mean_is_of_the_heads_that_were_there",
)
bug(
    "a-fixed-projection-is-learned",
    "parts/sum_heads.py",
    'Param(Layout.parse("model vdim"), xavier, "query", learned)',
    'Param(Layout.parse("model vdim"), xavier, "query")',
    SUMMED + "test_every_arm_has_the_parameters_it_says_and_learns_with_all[sum, fixed]",
)
bug(
    "a-fixed-projection-keeps-to-its-own-precision",
    "parts/concat.py",
    'p["o"].to(o_BTOV.dtype)',
    'p["o"]',
    SUMMED + "test_a_fixed_projection_runs_in_every_precision_and_keeps_its_own",
)
bug(
    "a-folded-bias-is-as-precise-as-a-constant",
    "folding.py",
    "shift_OV.new_zeros(spec.model)",
    'held["o"].new_zeros(spec.model)',
    SUMMED + "test_a_bias_of_values_folds_into_a_fixed_sum",
)

# --- similarities and learned scores ---------------------------------------------------------------------

A = "anchors/test_similarities.py::"
F = "anchors/test_favor.py::"
L = "anchors/test_learned.py::"
bug(
    "additive-bias-is-dropped",
    "parts/additive_attention.py",
    'shifted = (k_BHSK + p["bias"][:, None])[:, :, None]',
    "shifted = k_BHSK[:, :, None]",
    A + "test_additive_scores_by_their_formula[2]",
)
bug(
    "additive-heads-are-folded-into-rows",
    "parts/additive_attention.py",
    "headed: ClassVar[bool] = True",
    "headed: ClassVar[bool] = False",
    truth("Additive0"),
)
bug(
    "additive-blocks-swap-places",
    "parts/additive_attention.py",
    "torch.cat(blocks, 2)",
    "torch.cat(blocks[::-1], 2)",
    A + "test_blocks_of_additive_queries_are_one_pass[1]",
)
bug(
    "additive-scales-like-a-product",
    "parts/additive_attention.py",
    "v[:, :, None]).unflatten(2, pairs)",
    "v[:, :, None] * v.shape[-1] ** -0.5).unflatten(2, pairs)",
    A + "test_a_recurrent_decoder_reads_through_the_layer",
)
bug(
    "gaussian-forgets-the-half",
    "parts/gaussian_kernel.py",
    "apart[..., None]).flatten(-3) / -2",
    "-apart[..., None]).flatten(-3)",
    A + "test_soft_look_up[2.0]",
)
bug(
    "gaussian-blocks-swap-places",
    "parts/gaussian_kernel.py",
    "torch.cat(blocks, 2)",
    "torch.cat(blocks[::-1], 2)",
    A + "test_blocks_of_gaussian_queries_are_one_pass[1]",
)
bug(
    "gaussian-counts-no-product",
    "parts/gaussian_kernel.py",
    "return torch.matmul(apart[..., None, :], apart[..., None]).flatten(-3) / -2",
    "return apart.square().sum(-1) / -2",
    COUNTS + "test_products_are_counted_as_torch_counts_them[Gaussian0-dense]",
)
bug(
    "random-directions-are-all-of-one-length",
    "parts/feature_map.py",
    "lengths = draw(count, dim).norm(dim=1, keepdim=True)",
    "lengths = dim**0.5",
    F + "test_a_product_of_features_is_the_exponential_on_average[13]",
    F + "test_rows_are_orthogonal_and_as_long_as_gaussians",
)
bug(
    "random-directions-are-not-orthogonal",
    "parts/feature_map.py",
    "blocks.append(q * r.diagonal().sign())",
    "blocks.append(draw(dim, dim))",
    F + "test_rows_are_orthogonal_and_as_long_as_gaussians",
)
bug(
    "favor-scales-as-a-product-does",
    "parts/feature_map.py",
    "x_BTHK.shape[-1] ** -0.25",
    "x_BTHK.shape[-1] ** -0.5",
    F + "test_the_layer_by_its_formula",
    F + "test_more_features_come_closer_to_softmax",
)
bug(
    "favor-takes-the-largest-exponent-off",
    "parts/feature_map.py",
    "exponents = along - x",
    "exponents = along - along.amax((1, -1), keepdim=True) - x",
    F + "test_parallel_chunked_and_recurrent_are_one_function[favor]",
)
bug(
    "lifting-is-free",
    "parts/feature_map.py",
    "lifted = work.queries * spec.heads.q + keys * spec.heads.kv",
    "lifted = work.queries * spec.heads.q + keys * spec.heads.q",
    F + "test_what_lifting_costs",
    COUNTS + "test_products_are_counted_as_torch_counts_them[FeatureMap2-linear]",
)
bug(
    "a-score-costs-what-a-head-is-wide",
    "spec.py",
    "core.vdim, core.scale, self.similarity.compared(core))",
    "core.vdim, core.scale, core.dim)",
    COUNTS + "test_products_are_counted_as_torch_counts_them[FeatureMap2-dense]",
)
bug(
    "relu-features-are-shifted",
    "parts/feature_map.py",
    "return F.relu(x_BTHK)",
    "return F.relu(x_BTHK) + 1e-6",
    F + "test_a_query_that_meets_no_channel_reads_zero",
)
bug(
    "learned-tables-are-transposed",
    "parts/synthesizer.py",
    'rows = p["table"][:, place]',
    'rows = p["table"].transpose(1, 2)[:, place]',
    L + "test_synthesizers_by_their_formulas[random-pure]",
)
bug(
    "learned-scores-go-by-slot",
    "parts/synthesizer.py",
    "cell.take(factors, cell.j.clamp(0, self.length - 1))",
    "cell.take(factors, (cell.j - cell.j.amin()).clamp(0, self.length - 1))",
    L + "test_synthesizers_by_their_formulas[random-mixture]",
)
bug(
    "learned-hidden-layer-is-linear",
    "parts/synthesizer.py",
    'hidden = F.relu(F.linear(x_BTD, p["hidden"], p["hidden_bias"]))',
    'hidden = F.linear(x_BTD, p["hidden"], p["hidden_bias"])',
    L + "test_synthesizers_by_their_formulas[dense-pure]",
)
bug(
    "the-last-position-is-refused",
    "inputs.py",
    "if last >= limit.longest:",
    "if last >= limit.longest - 1:",
    L + "test_input_beyond_the_table_is_refused",
)
bug(
    "one-position-too-many-is-let-in",
    "inputs.py",
    "if last >= limit.longest:",
    "if last > limit.longest:",
    L + "test_input_beyond_the_table_is_refused",
)
bug(
    "padding-counts-as-far",
    "inputs.py",
    "at.position.masked_fill(~at.live, -1).max()",
    "at.position.max()",
    L + "test_positions_are_what_counts_and_not_how_many_tokens_there_are",
)
bug(
    "a-source-is-not-looked-at",
    "module.py",
    "            inputs.check_positions(self._limit, at)\n        entry = self._entry(self.peers",
    "            pass\n        entry = self._entry(self.peers",
    L + "test_a_source_beyond_the_table_is_refused",
)
bug(
    "an-absorbed-step-meets-features",
    "parts/latent_attention.py",
    "if not spec.similarity.linear:",
    "if False:",
    F + "test_an_absorbed_query_keeps_nothing_but_products",
)

# --- overlapping, collaborating, routing, composing ------------------------------------------------------

OVERLAPPING = "test_overlapping.py::"
COLLABORATE = "test_collaborate.py::"
ROUTED = "test_routed.py::"
DYNAMIC = "test_dynamic.py::"

bug(
    "overlap-schedule-off-by-one",
    "parts/overlapping_heads.py",
    '"L-l": lambda layer, layers: layers - layer,',
    '"L-l": lambda layer, layers: layers - layer - 1,',
    OVERLAPPING + "test_the_overlap_at_every_depth[L-l]",
)
bug(
    "overlap-halved-before-one-is-added",
    "parts/overlapping_heads.py",
    "layer // 2 + 1,",
    "(layer + 1) // 2,",
    OVERLAPPING + "test_the_overlap_at_every_depth[l//2+1]",
)
bug(
    "placed-heads-keep-their-width",
    "spec.py",
    "heads = part.widened(heads)",
    "heads = heads",
    OVERLAPPING + "test_the_overlap_at_every_depth[l]",
)
bug(
    "a-cut-overlap-is-placed-anew",
    "parts/overlapping_heads.py",
    'channels=self.sizes(spec)["channel"], schedule="fixed")',
    'channels=self.sizes(spec)["channel"])',
    OVERLAPPING + "test_what_was_cut_is_not_placed_anew",
)
bug(
    "collaborative-scale-of-the-shared-width",
    "parts/collaborative.py",
    "self.width + heads.q, heads.vdim, heads.dim**-0.5)",
    "self.width + heads.q, heads.vdim, (self.width / heads.q) ** -0.5)",
    COLLABORATE + "test_a_space_that_is_shared_is_found[3]",
)
bug(
    "collaborate-forgets-who-reads-whom",
    "parts/collaborative.py",
    "k[list(heads.reads)]",
    "k[[h % heads.kv for h in range(heads.q)]]",
    COLLABORATE + "test_full_width_is_exact",
)
bug(
    "collaborate-drops-the-query-bias",
    "parts/collaborative.py",
    'if "q" in bias:',
    'if "q" == bias:',
    COLLABORATE + "test_full_width_is_exact",
)
bug(
    "collaborate-reports-the-square",
    "parts/collaborative.py",
    "return math.sqrt(missed / whole) if whole",
    "return missed / whole if whole",
    COLLABORATE + "test_the_error_is_that_of_the_tensor",
)
bug(
    "als-forgets-the-mixing-of-others",
    "parts/collaborative.py",
    "q = _nearest((mixing.T @ mixing) * (k @ k.T), met, q)",
    "q = _nearest(k @ k.T, met, q)",
    COLLABORATE + "test_sweeps_and_ranks_never_make_it_worse",
    COLLABORATE + "test_a_space_that_is_shared_is_found",
)
bug(
    "als-takes-the-longer-step-regardless",
    "parts/collaborative.py",
    "if (found := _missed(form, further)) < least:",
    "if (found := _missed(form, further)) < least + 1:",
    COLLABORATE + "test_sweeps_and_ranks_never_make_it_worse",
)
bug(
    "als-starts-from-the-smallest",
    "parts/collaborative.py",
    "sort(descending=True, stable=True).indices[:rank]",
    "sort(descending=False, stable=True).indices[:rank]",
    COLLABORATE + "test_it_starts_from_singular_triples_and_not_from_noise",
)
bug(
    "collaborate-drops-a-key-bias-that-is-seen",
    "spec.py",
    "if not self.normaliser.shift_free:",
    "if not self.normaliser.whole and not self.normaliser.shift_free and self.normaliser.proportional:",
    COLLABORATE + "test_what_cannot_be_shared_is_refused",
    "test_bias_laws.py",
)
bug(
    "mixing-blocks-round-down",
    "parts/collaborative.py",
    "math.ceil(width / heads)",
    "(width // heads)",
    COLLABORATE + "test_how_a_mixing_starts",
)
bug(
    "routed-shares-out-over-all",
    "parts/mixture_of_heads.py",
    "kept = (share * chosen).sum(-1, keepdim=True)",
    "kept = share.sum(-1, keepdim=True)",
    ROUTED + "test_learned_gates",
)
bug(
    "router-norm-with-a-biased-deviation",
    "parts/mixture_of_heads.py",
    "/ (long.shape[-1] - 1)",
    "/ long.shape[-1]",
    ROUTED + "test_the_balance[code-norm]",
)
bug(
    "router-norm-asks-the-shared-heads",
    "parts/mixture_of_heads.py",
    "own[(self.always + n) % len(own)]",
    "own[n % len(own)]",
    ROUTED + "test_gates_by_the_length_of_queries",
)
bug(
    "straight-through-the-chosen-alone",
    "parts/mixture_of_heads.py",
    "(chosen + (share - share.detach()))",
    "(chosen + chosen * (share - share.detach()))",
    ROUTED + "test_gradients_go_straight_through",
)
bug(
    "router-norm-speaks-softly",
    "parts/mixture_of_heads.py",
    "(chosen + (share - share.detach()))",
    "(chosen * share)",
    ROUTED + "test_a_grouped_layer_is_converted_without_a_weight",
)
bug(
    "router-norm-asks-only-who-is-left",
    "parts/mixture_of_heads.py",
    'return frozenset(range(spec.heads.q)) if self.router == "norm" else heads',
    "return heads",
    ROUTED + "test_a_cut_head_is_still_asked",
)
bug(
    "paper-balance-with-the-factor-of-the-code",
    "parts/mixture_of_heads.py",
    "return self._factor(share.shape[-1]) * (mean * often).sum()",
    "return share.shape[-1] * (mean * often).sum()",
    ROUTED + "test_the_balance_of_a_uniform_router[paper-0.75]",
)
bug(
    "router-norm-after-a-norm-of-heads",
    "parts/qk_norm.py",
    'return self.scope == "head"',
    "return False",
    ROUTED + "test_a_router_that_cannot_be_meant",
)
bug(
    "router-takes-the-last-of-equals",
    "parts/mixture_of_heads.py",
    "share.sort(dim=-1, descending=True, stable=True).indices[..., : self.active]",
    "share.sort(dim=-1, stable=True).indices[..., -self.active :]",
    ROUTED + "test_of_equals_the_first_is_chosen",
)
bug(
    "dynamic-rank-and-group-swapped",
    "parts/dynamic_composition.py",
    "weight.view(rank, groups, -1, units).permute(1, 3, 0, 2)",
    "weight.view(groups, rank, -1, units).permute(0, 3, 1, 2)",
    DYNAMIC + "test_one_matrix_for_every_pair",
    DYNAMIC + "test_groups_are_so_many_layers_side_by_side",
)
bug(
    "dynamic-norm-over-all-groups",
    "parts/dynamic_composition.py",
    "F.rms_norm(source, source.shape[-1:], eps=_EPS)",
    "F.rms_norm(source, source.shape[-2:], eps=_EPS)",
    DYNAMIC + "test_groups_are_so_many_layers_side_by_side",
)
bug(
    "dynamic-groups-by-turns",
    "parts/dynamic_composition.py",
    "if head // each in {one // each for one in heads})",
    "if head % each in {one % each for one in heads})",
    DYNAMIC + "test_whole_groups_are_cut",
    cut("Dynamic2"),
)
bug(
    "dynamic-own-by-place",
    "parts/dynamic_composition.py",
    'return a_BHTS.index_select(1, torch.searchsorted(p["name"], p["own"]))',
    'return a_BHTS.index_select(1, p["own"] % a_BHTS.shape[1])',
    DYNAMIC + "test_whole_groups_are_cut",
)
bug(
    "what-parts-need-is-asked-once",
    "spec.py",
    "while heads != needed:",
    "if heads != needed:",
    DYNAMIC + "test_groups_that_cross_are_kept_until_all_are_whole",
)
bug(
    "dynamic-remembers-for-queries-alone",
    "parts/dynamic_composition.py",
    'if "key" not in self._sides:',
    'if "key" in self.sides:',
    DYNAMIC + "test_what_is_remembered_grows_by_ten_numbers_a_head",
)
bug(
    "dynamic-static-turned-round",
    "parts/dynamic_composition.py",
    "return (static.mT @ ",
    "return (static @ ",
    DYNAMIC + "test_one_matrix_for_every_pair",
)

# --- sparse weights, and gates that learn to be shut -------------------------------------------------

# --- entmax and hard-concrete gates -----------------------------------------------------------------------

ENTMAX = "anchors/test_entmax.py::"
CONCRETE = "test_concrete.py::"

bug(
    "entmax-multiplies-before-the-top-goes",
    "parts/entmax.py",
    "x_BHTS = (s_BHTS - top).mul_(alpha - 1)",
    "x_BHTS = (s_BHTS * (alpha - 1)).sub_(top * (alpha - 1))",
    ENTMAX + "test_scores_of_any_size_are_numbers",
)
bug(
    "entmax-reads-masked-keys-where-all-are",
    "parts/entmax.py",
    "s_BHTS = s_BHTS.masked_fill(~allowed, -torch.inf)",
    "s_BHTS = s_BHTS.masked_fill(~allowed, torch.finfo(s_BHTS.dtype).min)",
    ENTMAX + "test_a_query_with_nothing_to_read_gets_no_weight",
)
bug(
    "entmax-steps-on-the-sum-of-powers",
    "parts/entmax.py",
    "tau = tau + (total - total ** (2 - alpha)) / fall",
    "tau = tau + (total - 1) * (alpha - 1) / fall",
    ENTMAX + "test_the_steps_are_enough_for_any_row",
)
bug(
    "entmax-stops-two-steps-early",
    "parts/entmax.py",
    "return 3 + math.ceil(8 * (most - 1))",
    "return 1 + math.ceil(8 * (most - 1))",
    ENTMAX + "test_the_steps_are_enough_for_any_row",
)
bug(
    "entmax-steps-above-two",
    "parts/entmax.py",
    "isinstance(alpha, Tensor) or alpha <= 2",
    "isinstance(alpha, Tensor) or alpha <= 9",
    ENTMAX + "test_weights_and_gradients_are_the_packages",
)
bug(
    "entmax-slopes-of-keys-not-read",
    "parts/entmax.py",
    "return r.sign() if power == 0 else",
    "return torch.ones_like(r) if power == 0 else",
    ENTMAX + "test_weights_and_gradients_are_the_packages",
)
bug(
    "entmax-mean-of-gradients-by-weight",
    "parts/entmax.py",
    "mean = (slope * grads[0]).sum(-1, keepdim=True) / total",
    "mean = (w_BHTS * grads[0]).sum(-1, keepdim=True)",
    ENTMAX + "test_weights_and_gradients_are_the_packages",
)
bug(
    "entmax-alpha-without-the-entropy-of-the-row",
    "parts/entmax.py",
    "+ spread_BHTS - share_BHTS * spread_BHTS.sum(-1, keepdim=True)",
    "+ spread_BHTS - share_BHTS",
    ENTMAX + "test_the_gradient_in_alpha_is_the_packages",
    ENTMAX + "test_the_gradient_in_alpha_is_a_finite_difference",
)
bug(
    "entmax-saturates-at-two",
    "parts/entmax.py",
    "clamp(min=LEAST, max=MOST)",
    "clamp(min=LEAST)",
    ENTMAX + "test_the_ends_of_a_head_are_numbers",
)
bug(
    "concrete-evaluates-with-the-temperature",
    "parts/hard_concrete_gate.py",
    "return self._stretched(log_a)",
    "return self._stretched(log_a / self.temperature)",
    CONCRETE + "test_evaluation_as_released_forgets_the_temperature",
)
bug(
    "concrete-draws-without-the-temperature",
    "parts/hard_concrete_gate.py",
    "(torch.logit(u) + log_a) / self.temperature",
    "torch.logit(u) + log_a",
    CONCRETE + "test_a_gate_is_the_formula_of_what_was_drawn",
    CONCRETE + "test_gates_are_distributed_as_published",
)
bug(
    "concrete-one-draw-for-all-heads",
    "parts/hard_concrete_gate.py",
    "torch.rand(log_a.shape,",
    "torch.rand(log_a[:1].shape,",
    CONCRETE + "test_one_draw_for_each_head_and_call",
)
bug(
    "concrete-chance-upside-down",
    "parts/hard_concrete_gate.py",
    "log_a - self.temperature * math.log(-self.low / self.high)",
    "log_a - self.temperature * math.log(-self.high / self.low)",
    CONCRETE + "test_the_chance_is_that_of_a_gate_not_shut",
)
bug(
    "concrete-likelier-end-without-the-upper-one",
    "parts/hard_concrete_gate.py",
    "even = self.temperature / 2 * (math.log(-self.low / self.high) + math.log((1 - self.low) / (self.high - 1)))",
    "even = 0.0",
    CONCRETE + "test_evaluation_as_published_takes_the_likelier_end",
)
bug(
    "concrete-mean-over-heads",
    "parts/hard_concrete_gate.py",
    'self.chance(log_a), p).sum(), "heads")',
    'self.chance(log_a), p).mean(), "heads")',
    CONCRETE + "test_the_ledger_adds_up_two_layers",
)
bug(
    "concrete-mean-that-never-learns-the-depth",
    "parts/hard_concrete_gate.py",
    'return replace(self, layers=layers) if self.regulariser == "mean" else self',
    "return self",
    CONCRETE + "test_the_ledger_adds_up_two_layers",
    CONCRETE + "test_only_a_mean_has_to_know_the_depth",
)
bug(
    "concrete-rounds-the-gradient-away",
    "parts/hard_concrete_gate.py",
    "(soft > 0.5).to(soft.dtype) + (soft - soft.detach())",
    "(soft > 0.5).to(soft.dtype) + 0 * soft",
    CONCRETE + "test_gradients_reach_every_gate",
)

# --- bills ---------------------------------------------------------------------------------------------

BILLS, COST = "contract/test_bills.py::", "test_cost.py::"

bug(
    "constants-get-gradients",
    "costs/flops.py",
    'yield Product(f"{name}.{key}", flops, 2 if param.learned else 1)',
    'yield Product(f"{name}.{key}", flops)',
    BILLS + "test_gradients_are_counted_as_torch_counts_them[Concat1]",
)
bug(
    "weights-that-nobody-learned-get-gradients",
    "costs/flops.py",
    "return 2 if core.width or any(",
    "return 2 if True or any(",
    BILLS + "test_gradients_are_counted_as_torch_counts_them[Values2]",
)
bug(
    "random-directions-get-gradients",
    "parts/feature_map.py",
    "return self.flops(spec, work)",
    "return 0",
    BILLS + "test_gradients_are_counted_as_torch_counts_them[FeatureMap2]",
)
bug(
    "a-sum-loses-its-brackets",
    "costs/symbolic_int.py",
    'return f"({self.text})" if self.loose else self.text',
    "return self.text",
    BILLS + "test_symbols_compute_like_numbers",
    BILLS + "test_a_formula_is_worth_its_number[Latent0]",
)
bug(
    "a-ring-is-read-in-full",
    "costs/flops.py",
    "kept = past + steps if last is None else min(past + steps, first + last)",
    "kept = past + steps",
    COST + "test_a_ring_is_read_as_far_as_it_goes",
)
bug(
    "memory-is-free",
    "costs/roofline.py",
    "return max(flops / self.flops[dtype], moved / self.bandwidth)",
    "return flops / self.flops[dtype]",
    COST + "test_rooflines_by_hand",
)

# --- combinations --------------------------------------------------------------------------------------

TOGETHER = "test_combinations.py::"

bug(
    "values-of-a-cut-are-read-in-order",
    "backends/dense.py",
    "each = job.groups if every else 0",
    "each = job.groups",
    TOGETHER + "test_a_cut_behind_another_number_of_rows[2-4-keep1-Concat()-weights]",
)
bug(
    "shares-are-summed-as-coarse-as-they-are",
    "backends/linear_attention.py",
    "share_BHTS = share_BHTS.to(torch.promote_types(share_BHTS.dtype, torch.float32))",
    "share_BHTS = share_BHTS + 0",
    TOGETHER + "test_a_state_in_half_precision_sums_thousands",
)
bug(
    "a-latent-average-is-summed-in-another-form",
    "parts/mean_attention.py",
    " or spec.project.rewrites(spec):",
    ":",
    TOGETHER + "test_an_average_of_latent_values_is_no_sum_of_them[4]",
)
bug(
    "a-ring-is-handed-over-as-it-lies",
    "cache/contiguous.py",
    "torch.arange(start, self.used, device=self.device) % self.last, start",
    "torch.arange(start, self.used, device=self.device) - start, start",
    TOGETHER + "test_a_ring_hands_over_what_it_holds_in_turn",
)

# --- found by review -----------------------------------------------------------------------------------

A, F = "anchors/test_similarities.py::", "anchors/test_favor.py::"
bug(
    "gaussian-is-seen-from-the-middle-of-its-queries",
    "parts/gaussian_kernel.py",
    "        q, k = exact(q_BHTK), exact(k_BHSK)\n",
    "        q, k = exact(q_BHTK), exact(k_BHSK)\n"
    "        middle = q.mean(-2, keepdim=True)\n"
    "        q, k = (q - middle) / self.width, (k - middle) / self.width\n"
    "        lengths = q.square().sum(-1)[..., None] / 2 + k.square().sum(-1)[..., None, :] / 2\n"
    "        return q @ k.transpose(-1, -2) - lengths\n",
    A + "test_far_tokens_that_nobody_reads_change_nothing[10000.0]",
    A + "test_clusters_far_apart_are_each_as_if_alone",
)
bug(
    "gaussian-is-a-difference-of-products",
    "parts/gaussian_kernel.py",
    "        q, k = exact(q_BHTK), exact(k_BHSK)\n",
    "        q, k = exact(q_BHTK) / self.width, exact(k_BHSK) / self.width\n"
    "        lengths = q.square().sum(-1)[..., None] / 2 + k.square().sum(-1)[..., None, :] / 2\n"
    "        return q @ k.transpose(-1, -2) - lengths\n",
    A + "test_an_offset_of_all_tokens_costs_no_digits[10000.0]",
    A + "test_empty_slots_do_not_cost_digits_either",
)
bug(
    "favor-features-overflow",
    "parts/feature_map.py",
    "return exponents.clamp(max=HIGHEST).exp()",
    "return (exponents + lowered(directions).to(x.dtype)).exp()",
    F + "test_no_key_leaves_float32",
)
bug(
    "favor-queries-keep-their-largest-exponent",
    "parts/feature_map.py",
    "return (along - along.amax(-1, keepdim=True)).exp()",
    "return (along - x.square().sum(-1, keepdim=True) / 2).exp()",
    F + "test_float32_at_the_top_of_the_features[128]",
)
bug(
    "favor-lowers-all-keys",
    "parts/feature_map.py",
    ".clamp(0, LOWERED)",
    ".clamp(min=0)",
    F + "test_lengths_that_float32_can_tell[256]",
)
bug(
    "alpha-has-no-end",
    "parts/entmax.py",
    'self.kind == "fixed" and self.alpha > LARGEST',
    'self.kind == "fixed" and self.alpha > 1e40',
    "anchors/test_entmax.py::test_bad_fields_are_refused",
)
bug(
    "a-content-bias-beside-features",
    "parts/collaborative.py",
    "        if not spec.similarity.linear:\n            name",
    "        if spec.similarity.headed:\n            name",
    "test_collaborate.py::test_sums_of_features_have_no_place_for_a_content_bias",
)
bug(
    "weights-that-may-be-zero-sum-to-one",
    "folding.py",
    "elif spec.normaliser.proportional and spec.similarity.vanishes():",
    "elif spec.normaliser.proportional and spec.similarity.signed:",
    "test_bias_laws.py::test_folding_removes_what_can_go_and_says_what_stays[sums that may be zero]",
)
bug(
    "forms-are-taken-as-large-as-they-are",
    "parts/collaborative.py",
    "return Form(_times(form.q, torch.where(live, k - size, -q)), _times(form.k, -k)), size",
    "return form, 0",
    "test_collaborate.py::test_the_error_does_not_depend_on_size",
)
bug(
    "no-form-is-swept-too",
    "parts/collaborative.py",
    "    if not error:  #",
    "    if error < 0:  #",
    "test_collaborate.py::test_heads_that_compare_nothing",
)
bug(
    "half-a-pair-is-kept",
    "parts/differential.py",
    "return heads | {head ^ 1 for head in heads}",
    "return heads",
    "anchors/test_differential.py::test_groups_of_three_heads_hold_no_whole_pairs",
)
bug(
    "global-tokens-draw-gates-of-their-own",
    "nn/longformer_attention.py",
    "if not isinstance(modifier, Gate))",
    "if True)",
    "test_longformer.py::test_a_fresh_block_is_the_plain_layer_while_training_too[gates]",
)
bug(
    "global-tokens-learn-tables-of-their-own",
    "nn/longformer_attention.py",
    'for name, _ in far.parts() if name != "project"}',
    'for name, _ in far.parts() if name == "output"}',
    "test_longformer.py::test_only_the_projections_come_twice[sinks]",
)
bug(
    "global-tokens-meet-no-gate",
    "nn/longformer_attention.py",
    "read = read * gate.expand(*o_BTOV.shape[:-1], 1)[there]",
    "read = read * 1",
    "test_longformer.py::test_each_token_is_read_by_its_own_layer[mixed]",
)
