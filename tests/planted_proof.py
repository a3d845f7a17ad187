"""Bugs in what is proven of models that were cut, and in how it is told."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
QUALITY, PROOF, SPEED, WORDS = "test_proof_quality.py", "test_proof.py", "test_proof_speed.py", "test_wording.py"
bug(
    "proof-loss-is-a-mean-of-means",
    "surgery/verification/quality_metrics.py",
    "return Counts(found, question.asked)",
    "return Counts({name: one / question.asked for name, one in found.items()}, 1)",
    f"{QUALITY}::test_perplexity_is_that_of_the_definition_over_all_places_together",
)
bug(
    "proof-difference-draws-texts-of-each-apart",
    "surgery/verification/quality_metrics.py",
    "    other = _drawn(counts[1], of, draws, shape)",
    "    other = _drawn(counts[1], of, resampled(len(counts[0]), RESAMPLES, SEED + 1), shape)",
    f"{QUALITY}::test_a_difference_has_the_same_texts_drawn_of_both",
)
bug(
    "proof-perplexity-of-the-mean-of-exponents",
    "surgery/verification/quality_metrics.py",
    "return shape(mean(sums, places)), shape(means(sums, places, draws))",
    "return mean(shape(sums), places), means(shape(sums), places, draws)",
    f"{QUALITY}::test_perplexity_is_that_of_the_definition_over_all_places_together",
)
bug(
    "proof-accuracy-counts-what-is-not-asked",
    "surgery/verification/quality_metrics.py",
    "float(((flat.argmax(-1) == labels) & (labels != IGNORED)).sum())",
    "float(((flat.argmax(-1) == labels) | (labels == IGNORED)).sum())",
    f"{QUALITY}::test_masked_tokens_are_asked_alone_and_counted_by_hand",
)
bug(
    "proof-kl-the-other-way-round",
    "surgery/verification/model_comparison.py",
    "F.kl_div(other.log_softmax(-1), own.log_softmax(-1), log_target=True",
    "F.kl_div(own.log_softmax(-1), other.log_softmax(-1), log_target=True",
    f"{QUALITY}::test_agreement_is_counted_by_hand",
)
bug(
    "proof-states-are-what-a-layer-is-given",
    "surgery/verification/model_comparison.py",
    "    states[name] = said\n",
    "    states[name] = given[0]\n",
    f"{PROOF}::test_layers_before_the_first_cut_agree_wholly",
)
bug(
    "proof-kept-heads-are-silenced",
    "surgery/verification/model_comparison.py",
    "for head in range(count) if head not in kept]",
    "for head in range(count) if head in kept]",
    f"{PROOF}::test_what_is_cut_says_what_is_silenced_and_another_cut_does_not[decoder]",
)
bug(
    "proof-folded-means-are-forgotten",
    "surgery/verification/model_comparison.py",
    "{one: said.get(one, Scaled(0.0)) for one in out}",
    "{one: Scaled(0.0) for one in out}",
    f"{PROOF}::test_means_that_were_folded_in_are_what_silenced_heads_say",
)
bug(
    "proof-only-the-last-text-counts",
    "surgery/verification/model_comparison.py",
    "apart = max(apart, float((first.double()",
    "apart = min(9.0, float((first.double()",
    f"{PROOF}::test_a_model_that_was_read_again_otherwise_is_found_out",
)
bug(
    "proof-rounding-whatever-the-precision",
    "surgery/verification/model_comparison.py",
    "torch.finfo(getattr(torch, self.dtype))",
    "torch.finfo(torch.float32)",
    f"{PROOF}::test_rounding_is_of_the_precision_and_the_largest_number",
)
bug(
    "proof-cache-of-the-wrong-precision",
    "surgery/verification/efficiency.py",
    "before, after = (told(prices[which]) // PRICED * each[which] for which in nets)",
    "before, after = (told(prices[which]) for which in nets)",
    f"{PROOF}::test_a_step_and_a_cache_are_what_is_counted_and_held",
)
bug(
    "proof-source-is-priced-as-long-as-the-text",
    "surgery/verification/efficiency.py",
    "read = source or min(own, most.source or own)",
    "read = min(own, most.source or own)",
    f"{PROOF}::test_what_a_decoder_reads_of_a_source_is_counted_by_itself",
)
bug(
    "proof-heads-that-save-nothing-are-not-told",
    "surgery/verification/efficiency.py",
    "if after.heads < before.heads and before.remembered == after.remembered and after.remembered",
    "if after.heads < before.heads and before.remembered > after.remembered and after.remembered",
    f"{PROOF}::test_where_all_heads_talk_the_proof_says_that_little_was_saved",
)
bug(
    "proof-examples-changed-least",
    "surgery/verification/proof.py",
    "(heapq.heappush if len(self.held) < SHOWN else heapq.heappushpop)(self.held, one)",
    "heapq.heappush(self.held, one)\n        self.held[:] = heapq.nsmallest(SHOWN, self.held)",
    f"{PROOF}::test_the_examples_are_those_that_changed_most",
)
bug(
    "proof-continues-all-of-a-text",
    "surgery/verification/proof.py",
    "    half = max(1, len(ids) // 2)",
    "    half = len(ids)",
    f"{PROOF}::test_an_example_goes_on_from_half_a_text_by_the_likeliest_token",
)
bug(
    "proof-signs-reach-the-terminal",
    "surgery/verification/proof_report.py",
    "char if char.isprintable() else char.encode",
    "char if char else char.encode",
    f"{PROOF}::test_a_page_carries_no_signs_of_others",
)
bug(
    "speed-one-model-always-first",
    "surgery/verification/efficiency.py",
    "order = nets if len(taken) % 2 == 0 else nets[::-1]",
    "order = nets",
    f"{SPEED}::test_both_models_take_turns_and_who_is_first_changes",
)
bug(
    "speed-concludes-from-anything",
    "surgery/verification/efficiency.py",
    "if self.spread > SURE:",
    "if self.spread > 9 * SURE:",
    f"{SPEED}::test_nothing_is_concluded_from_few_rounds_or_from_rounds_far_apart",
)
bug(
    "speed-ratio-upside-down",
    "surgery/verification/efficiency.py",
    "gains = taken[:, 0] / taken[:, 1]",
    "gains = taken[:, 1] / taken[:, 0]",
    f"{SPEED}::test_medians_ratios_and_spread_are_those_of_the_rounds",
)
bug(
    "speed-tensors-are-never-given-back",
    "surgery/verification/efficiency.py",
    "        self.now -= self._known.pop(name)",
    "        self._known.pop(name)",
    f"{SPEED}::test_what_is_held_is_what_live_tensors_take_at_once",
)
bug(
    "speed-caches-are-not-held",
    "surgery/verification/efficiency.py",
    "most_held(lambda net=net: phase.begin(net)())",
    "most_held(phase.begin(net))",
    f"{SPEED}::test_a_smaller_cache_is_held_while_tokens_are_said",
)
bug(
    "bleu-of-a-draw-is-that-of-all",
    "surgery/verification/quality_metrics.py",
    "np.concatenate([counts.sum(0)[None], draws @ counts])",
    "np.concatenate([counts.sum(0)[None], (draws > 0) @ counts])",
    f"{QUALITY}::test_bleu_is_that_of_sacrebleu_and_its_draws_those_of_corpora",
)
bug(
    "wording-bytes-in-too-few-ids",
    "hub/tokenizer_files.py",
    "    if tokens < VALUES:",
    "    if tokens < VALUES - 1:",
    f"{WORDS}::test_too_few_ids_another_tokenizer_and_models_of_others_are_refused",
)
bug(
    "wording-pieces-without-a-beginning",
    "hub/tokenizer_files.py",
    "replace(usage, before=(BEGIN,), end=(BEGIN,)",
    "replace(usage, end=(BEGIN,)",
    f"{WORDS}::test_a_document_and_pieces_with_scores_are_read_as_they_are_meant",
)
COMMAND = "test_prune_command.py::test_wrong_arguments"
bug(
    "command-a-length-is-looked-at-when-all-is-written",
    "cli/compression_arguments.py",
    "        fitting(net, _pace(given))\n",
    "        pass\n",
    COMMAND,
)
bug(
    "command-an-objective-is-looked-at-when-all-is-written",
    "cli/compression_arguments.py",
    "    objective_of(net, given.objective, scene)\n",
    "",
    COMMAND,
)
bug(
    "plan-written-by-hand-is-believed",
    "surgery/pruning_plan.py",
    "        if not isinstance(keep, dict) or not all(isinstance(heads, list) for heads in keep.values()):\n",
    "        if False:\n",
    "test_prune_command.py::test_the_same_plan_again_and_not_for_another_model",
)
