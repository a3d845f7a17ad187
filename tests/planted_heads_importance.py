"""Bugs in how heads are weighed: objectives, methods, restarts, chance, relevance, the probe."""

from __future__ import annotations

from planting import bug

IMPORTANCE, OBJECTIVES = "test_importance.py", "test_objectives.py"
RELEVANCE, PROBING = "test_relevance.py", "test_probing.py"
bug(
    "importance-leaves-out-from-a-layer-too-late",
    "head_analysis/partial_forward.py",
    "h = _along(stacks[0], self.calls[name], self.kept[name][depth], start=depth)",
    "h = _along(stacks[0], self.calls[name], self.kept[name][-1], start=stacks[0].depth - 1)",
    f"{IMPORTANCE}::test_beginning_again_midway_is_the_whole_run[decoder]",
)
bug(
    "importance-a-decoder-reads-the-source-as-it-was",
    "head_analysis/partial_forward.py",
    "h = _along(stack, _calls(stack, self.calls[name][0], h), self.kept[name][0])",
    "h = _along(stack, self.calls[name], self.kept[name][0])",
    f"{IMPORTANCE}::test_beginning_again_midway_is_the_whole_run[both]",
)
bug(
    "importance-begins-at-the-last-edited-layer",
    "head_analysis/partial_forward.py",
    "first, depth = min(",
    "first, depth = max(",
    f"{IMPORTANCE}::test_beginning_again_midway_is_the_whole_run[encoder]",
)
bug(
    "importance-runs-all-layers-again",
    "head_analysis/partial_forward.py",
    "        return Restarted(model, those, given)\n",
    "        return Passage(model, those, given)\n",
    f"{IMPORTANCE}::test_a_run_that_begins_midway_runs_no_layer_before",
)
bug(
    "importance-paper-sizes-token-by-token",
    "head_analysis/importance_methods.py",
    "return {site: _one(np.abs(told.sum(0))) for site, told in found.items()}",
    "return {site: _one(np.abs(told).sum(0)) for site, told in found.items()}",
    f"{IMPORTANCE}::test_michels_three_are_what_masks_say[gpt2]",
)
bug(
    "importance-code-is-a-mean-over-texts",
    "head_analysis/importance_methods.py",
    "np.full(told.shape[1], len(told))) for site, told in found.items()}",
    "np.ones(told.shape[1])) for site, told in found.items()}",
    f"{IMPORTANCE}::test_michels_three_are_what_masks_say[bert]",
)
bug(
    "importance-bertology-weighs-texts-alike",
    "head_analysis/importance_methods.py",
    "* text.question.asked / asked",
    "/ len(texts)",
    f"{IMPORTANCE}::test_michels_three_are_what_masks_say[gpt2]",
)
bug(
    "importance-taylor-upside-down",
    "head_analysis/importance_methods.py",
    "_one(-slope.by_token.sum(0))",
    "_one(slope.by_token.sum(0))",
    f"{IMPORTANCE}::test_taylor_is_the_slope_of_a_loss[decoder]",
)
bug(
    "importance-what-is-not-learned-has-no-slope",
    "head_analysis/partial_forward.py",
    "z = z if z.requires_grad else z.detach().requires_grad_()",
    "z = z if z.requires_grad else z.detach()",
    f"{IMPORTANCE}::test_taylor_is_the_slope_of_a_loss[both]",
)
bug(
    "importance-shapley-forgets-who-is-silent",
    "head_analysis/importance_methods.py",
    "                before = after\n",
    "                before = plain\n",
    f"{IMPORTANCE}::test_shapley_shares_out_what_all_heads_are_worth",
    f"{IMPORTANCE}::test_shapley_of_many_orders_is_its_definition",
)
bug(
    "importance-a-budget-is-doubled",
    "head_analysis/importance_methods.py",
    "if seconds is not None and now() - begun > seconds:",
    "if seconds is not None and now() - begun > 2 * seconds:",
    f"{IMPORTANCE}::test_time_that_is_used_up_is_said",
    f"{IMPORTANCE}::test_a_clock_rings_when_its_seconds_are_over",
)
bug(
    "importance-a-stop-is-not-said",
    "head_analysis/head_importance.py",
    "            self.stopped = True\n",
    "            self.stopped = False\n",
    f"{IMPORTANCE}::test_time_that_is_used_up_is_said",
)
bug(
    "importance-silent-texts-count",
    "head_analysis/head_importance.py",
    "                self.silent += 1\n",
    "                self.silent += 0\n",
    f"{IMPORTANCE}::test_texts_that_ask_nothing_are_left_out_and_counted",
)
bug(
    "importance-normalised-over-all-layers-by-sum",
    "head_analysis/importance_methods.py",
    "np.linalg.norm(told, axis=-1, keepdims=True)",
    "np.abs(told).sum(-1, keepdims=True)",
    f"{IMPORTANCE}::test_a_layers_worth_has_length_one_when_normalised",
)
bug(
    "importance-one-sided-chance",
    "head_analysis/resampling.py",
    "return (np.abs((1.0 - 2 * bits) @ differences) >= least).mean(0)",
    "return ((1.0 - 2 * bits) @ differences >= least).mean(0)",
    f"{IMPORTANCE}::test_signs_are_turned_in_all_ways",
)
bug(
    "importance-holm-without-steps",
    "head_analysis/resampling.py",
    "p[order] * np.arange(len(p), 0, -1)",
    "p[order] * np.arange(1, len(p) + 1)",
    f"{IMPORTANCE}::test_chance_is_told_from_worth_as_often_as_it_says",
)
bug(
    "objective-next-token-is-this-one",
    "head_analysis/objectives.py",
    "torch.cat([ids[1:], ids.new_full((1,), IGNORED)])",
    "torch.cat([ids[:-1], ids.new_full((1,), IGNORED)])",
    f"{OBJECTIVES}::test_next_token_loss_is_transformers_own",
    f"{OBJECTIVES}::test_translation_loss_is_transformers_own",
)
bug(
    "objective-masks-specials-too",
    "head_analysis/objectives.py",
    "free = np.flatnonzero(~special.numpy())",
    "free = np.arange(len(ids))",
    f"{OBJECTIVES}::test_masked_loss_is_transformers_own",
)
bug(
    "objective-pools-no-tokens",
    "head_analysis/objectives.py",
    'if of == "pooled" else flat',
    'if of == "tokens" else flat',
    f"{OBJECTIVES}::test_drift_is_its_definition",
)
bug(
    "objective-l2-of-what-is-new",
    "head_analysis/objectives.py",
    "/ old.norm(dim=-1)",
    "/ new.norm(dim=-1)",
    f"{OBJECTIVES}::test_drift_is_its_definition",
)
bug(
    "objective-masked-head-taken-for-causal",
    "head_analysis/objectives.py",
    '"encoder": "masked-token"',
    '"encoder": "next-token"',
    f"{OBJECTIVES}::test_the_objective_is_that_of_the_models_head",
)
bug(
    "relevance-a-bias-takes-no-part",
    "head_analysis/lrp.py",
    "weight * x[:, None] + (bias / weight.shape[1])[:, None]",
    "weight * x[:, None]",
    f"{RELEVANCE}::test_a_linear_map_divides_as_the_rule_says",
)
bug(
    "relevance-signs-are-not-apart",
    "head_analysis/lrp.py",
    "more @ up + less @ down, more @ down + less @ up",
    "more @ up, more @ down",
    f"{RELEVANCE}::test_reading_divides_among_tokens_and_heads_that_share_values",
)
bug(
    "relevance-is-lost-on-the-way",
    "head_analysis/lrp.py",
    "one.add(told * (total / came)",
    "one.add(told * 1.0",
    f"{RELEVANCE}::test_relevance_is_conserved[pre]",
    f"{RELEVANCE}::test_a_layer_by_hand",
)
bug(
    "relevance-shared-values-keep-the-last-head",
    "head_analysis/lrp.py",
    "torch.zeros_like(v.value).index_add_(1, index, parts)",
    "torch.zeros_like(v.value).index_copy_(1, index, parts)",
    f"{RELEVANCE}::test_reading_divides_among_tokens_and_heads_that_share_values",
)
bug(
    "relevance-of-what-is-not-followed",
    "head_analysis/lrp.py",
    "        _check(site, z.value, o_BTOV[0].double())\n",
    "",
    f"{RELEVANCE}::test_what_relevance_cannot_follow_is_refused",
)
bug(
    "probe-tokens-that-are-no-words-stand-in-maps",
    "head_analysis/dependency_syntax.py",
    "torch.cat(bands[one.site.name], 1)[:, kept][:, :, kept]",
    "torch.cat(bands[one.site.name], 1)",
    f"{PROBING}::test_maps_of_words_sum_what_is_read_and_average_who_reads",
)
bug(
    "probe-up-and-down-exchanged",
    "head_analysis/dependency_syntax.py",
    "return torch.cat([up, down], -1)",
    "return torch.cat([down, up], -1)",
    f"{PROBING}::test_the_likelihood_is_its_definition",
    f"{PROBING}::test_what_goes_up_is_told_from_what_goes_down",
)
bug(
    "probe-words-govern-themselves",
    "head_analysis/dependency_syntax.py",
    "return words != torch.tensor([dependent for dependent, _ in self.arcs])[:, None]",
    "return words >= torch.zeros(len(self.arcs), 1)",
    f"{PROBING}::test_the_likelihood_is_its_definition",
)
bug(
    "probe-offset-from-governor-to-word",
    "head_analysis/dependency_syntax.py",
    "far = [governor - dependent for",
    "far = [dependent - governor for",
    f"{PROBING}::test_the_offset_that_is_most_often_right_is_a_baseline",
)
