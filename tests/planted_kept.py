"""Bugs in what is kept for the way back, in checkpoints, and in what torch's counter is asked."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
KEPT, COUNTER, PAGE, MODELS = "test_kept.py", "test_counter.py", "test_kept_page.py", "test_kept_models.py"
PLAIN = f"{KEPT}::test_plain_attention_keeps_what_the_tables_say"
ACTS = f"{KEPT}::test_feed_forwards_by_activation"
GPT = f"{KEPT}::test_a_gpt_block"
bug(
    "kept-parameters-count",
    "costs/saved_tensors.py",
    "        if where in self._owned:\n            return tensor\n",
    "",
    f"{KEPT}::test_any_small_layer_keeps_what_its_formula_says",
)
bug(
    "kept-views-count-as-memories",
    "costs/saved_tensors.py",
    "return tensor.untyped_storage()._cdata",
    "return id(tensor)",
    f"{KEPT}::test_any_small_layer_keeps_what_its_formula_says",
)
bug(
    "kept-a-fused-call-is-taken-for-granted",
    "costs/saved_tensors.py",
    "few = [t.requires_grad_() for t in few]",
    "few = [few[0]] * 3",
    f"{COUNTER}::test_the_fused_call_takes_no_other_path_unnoticed",
)
bug(
    "kept-a-learned-bias-is-fused",
    "costs/saved_tensors.py",
    ".requires_grad_(bias.requires_grad)",
    "",
    f"{KEPT}::test_every_part_keeps_what_its_formula_says[T5Bias0]",
)
bug(
    "kept-rows-are-those-of-the-run",
    "costs/saved_tensors.py",
    'letters = Symbol.of(load.batch, "b")',
    'letters = Symbol.of(min(load.batch, 7), "b")',
    f"{KEPT}::test_a_load_that_nothing_could_hold_stays_exact",
)
bug(
    "kept-a-sink-is-no-token-more",
    "costs/saved_tensors.py",
    "return [self.load[n] + more]",
    "return [self.load[n]]",
    "test_cost.py::test_formulas_hold_for_a_small_layer[SinkSoftmax0]",
)
bug(
    "kept-statistics-of-the-cpu-in-single-precision",
    "costs/activations.py",
    "stat, mask = (4, 1) if fused else (each, each)",
    "stat, mask = (4, 1) if fused else (4, each)",
    f"{GPT}[dtype1]",
)
bug(
    "kept-masks-of-cuda-as-wide-as-numbers",
    "costs/activations.py",
    "stat, mask = (4, 1) if fused else (each, each)",
    "stat, mask = (4, each)",
    f"{KEPT}::test_the_two_published_constants_fall_out",
)
bug(
    "kept-a-dropped-output-is-the-same-tensor",
    "costs/activations.py",
    "return act.own + 1 + (act.output and at.dropped)",
    "return act.own + 1",
    f"{ACTS}[relu-plain-0.5]",
)
bug(
    "kept-a-gate-is-not-multiplied",
    "costs/activations.py",
    "return act.own + 3",
    "return act.own + 2",
    f"{ACTS}[silu-gated-0.0]",
    f"{KEPT}::test_a_llama_block",
)
bug(
    "kept-parallel-branches-read-two-inputs",
    "costs/training_memory.py",
    'shared = {"source"} if alone else {"source", "input"}',
    'shared = {"source"}',
    f"{KEPT}::test_bounded_gates_and_parallel_blocks",
)
bug(
    "kept-a-core-computed-anew-holds-nothing",
    "costs/saved_tensors.py",
    "for w in handed if w not in kept and w not in self._owned",
    "for w in handed if w in self._owned",
    f"{COUNTER}::test_checkpoints_do_again_and_keep_what_they_say[Additive1-core]",
)
bug(
    "checkpoint-does-the-last-product-too",
    "costs/training_memory.py",
    'if not term.name.startswith("output.")',
    "if term.name",
    f"{COUNTER}::test_checkpoints_do_again_and_keep_what_they_say[Additive1-block]",
)
bug(
    "checkpoint-forgets-what-a-norm-behind-reads",
    "costs/training_memory.py",
    'described.placement in ("post", "after", "sandwich")',
    'described.placement == "post"',
    f"{COUNTER}::test_a_checkpointed_block_does_all_but_the_last_product_again[sandwich-0.0]",
)
bug(
    "checkpoint-forgets-the-mask-of-a-dropout",
    "costs/training_memory.py",
    "or bool(way.dropout) or",
    "or",
    f"{COUNTER}::test_a_checkpointed_block_does_all_but_the_last_product_again[pre-0.5]",
)
bug(
    "fused-backward-has-four-products",
    "costs/training_memory.py",
    "times = {SCORES: 3, VALUES: 2}",
    "times = {SCORES: 2, VALUES: 2}",
    f"{COUNTER}::test_gradients_under_the_fused_kernel[gqa]",
)
bug(
    "guard-lets-vectors-pass",
    "auditing.py",
    "|matmul|mv|addmv|dot",
    "|matmul|addmv|dot",
    f"{COUNTER}::test_a_product_without_a_formula_is_an_error[<lambda>-aten.mv]",
)
bug(
    "guard-stands-inside-the-counter",
    "auditing.py",
    "and packet not in flop_registry and",
    "and packet in flop_registry and",
    f"{COUNTER}::test_a_product_without_a_formula_is_an_error",
)
bug(
    "page-says-nothing-of-a-checkpoint-alone",
    "cli/cost/training_options.py",
    "given.checkpoint is not None, ",
    "",
    f"{PAGE}::test_what_cannot_be_meant_is_refused_in_one_line",
)
