"""Bugs in what prices whole models."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
COST, COUNTER = "test_model_cost.py::", "anchors/test_model_costs.py::"
TRAINING, WRITING = (COUNTER + f"test_{what}_is_counted_as_torch_counts_it" for what in ("training", "a_generation"))
bug(
    "cost-every-expert-is-asked",
    "model_spec/components.py",
    "active=self.active, model=model, hidden=self.each.hidden",
    "active=self.count, model=model, hidden=self.each.hidden",
    f"{TRAINING}[gpt_oss]",
)
bug(
    "cost-every-expert-is-met",
    "model_spec/components.py",
    "self.count - min(self.count, tokens * self.active)",
    "self.count - self.count",
    COST + "test_of_experts_a_token_meets_its_own",
)
bug(
    "cost-a-prompt-is-scored-everywhere",
    "costs/flops.py",
    'lambda call: 1 if call.way == "prompt" else call.tokens',
    "lambda call: call.tokens",
    COST + "test_a_prompt_is_scored_at_its_end",
    f"{WRITING}[llama]",
)
bug(
    "cost-pixels-have-gradients",
    "costs/flops.py",
    "        factors=1,\n",
    "        factors=2,\n",
    f"{TRAINING}[vit]",
)
bug(
    "cost-the-first-vector-is-a-patch",
    "costs/flops.py",
    "call.tokens and patches.count if patches else call.tokens",
    "call.tokens",
    f"{TRAINING}[vit]",
)
bug(
    "cost-a-source-is-remembered-at-every-step",
    "costs/flops.py",
    "return Work(batch, new, 0, new * source",
    "return Work(batch, new, new * source, new * source",
    COST + "test_cross_attention_remembers_its_source_once",
    f"{WRITING}[bart]",
)
bug(
    "cost-encoders-step-too",
    "costs/workload.py",
    "[piece for piece in every if not piece.early]",
    "list(every)",
    COST + "test_cross_attention_remembers_its_source_once",
    COST + "test_what_cannot_be_meant_is_refused_in_one_line",
    COST + "test_a_config_is_priced[t5]",
)
bug(
    "cost-the-last-written-token-is-read",
    "costs/workload.py",
    'whole._replace(tokens=load.generate - 1, past=load.context, way="steps")',
    'whole._replace(tokens=load.generate, past=load.context, way="steps")',
    COST + "test_a_generation_is_the_sum_of_its_steps",
    f"{WRITING}[gpt2]",
)
bug(
    "cost-rings-grow-while-generating",
    "costs/flops.py",
    "growing * past + growing * (growing + 1) // 2 + (steps - growing) * kept",
    "steps * past + steps * (steps + 1) // 2",
    COST + "test_a_generation_is_the_sum_of_its_steps",
    f"{WRITING}[mistral]",
)
bug(
    "cost-layers-of-one-kind-once",
    "costs/flops.py",
    "run.times * run.blocks.count(block)",
    "run.blocks.count(block)",
    COST + "test_equal_blocks_are_one_piece_however_they_alternate",
    COST + "test_training_of_gpt_by_hand",
)
bug(
    "cost-states-step-once",
    "costs/flops.py",
    "return none * work.queries + every - none",
    "return every",
    COST + "test_a_state_steps_as_long_as_it_likes",
)
bug(
    "cost-fused-kernels-keep-scores",
    "backends/__init__.py",
    "if backend in (dense, linear) or",
    "if backend in (dense, linear, sdpa) or",
    COST + "test_a_fused_core_forms_its_scores_once_more",
    COST + "test_gradients_are_spent_as_torch_spends_them",
)
bug(
    "cost-blocks-of-a-series-are-one-too-few",
    "backends/query_blocks.py",
    "at = first + count * BLOCK",
    "at = first + (count + 1) * BLOCK",
    COST + "test_many_blocks_are_summed_as_a_few",
)
bug(
    "cost-a-step-reads-every-weight-of-a-cross",
    "costs/flops.py",
    "if one.learned and (not one.applied or work.tokens(one.applied))",
    "if one.learned",
    COST + "test_cross_attention_remembers_its_source_once",
)
bug(
    "cost-a-layer-keeps-the-cache-of-the-encoder",
    "costs/cost_report.py",
    'if isinstance(piece, Reader) and not piece.early and "decode" in calls',
    'if isinstance(piece, Reader) and "decode" in calls',
    COST + "test_cross_attention_remembers_its_source_once",
    COST + "test_a_generation_is_the_sum_of_its_steps",
    COST + "test_a_config_is_priced[t5]",
)
bug(
    "cost-positions-without-end",
    "costs/workload.py",
    "load.held > most.own",
    "load.context > most.own",
    COST + "test_what_cannot_be_meant_is_refused_in_one_line",
)
bug(
    "cost-an-unplaced-schedule-is-priced",
    "costs/workload.py",
    "        if not _first(spec):\n",
    "        if False:\n",
    COST + "test_what_cannot_be_meant_is_refused_in_one_line",
)
