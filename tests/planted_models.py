"""Bugs in what describes whole models, and in what reads them from elsewhere."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
FAMILIES = "anchors/test_families.py"
PUBLIC = f"{FAMILIES}::test_public_models_have_the_numbers_they_are_known_for"
SAME = f"{FAMILIES}::test_the_spec_is_the_one_that_computes_the_same"
BLUEPRINT = "test_blueprint.py"
bug(
    "blueprint-shared-table-once-for-each-layer",
    "model_spec/model.py",
    "owned.setdefault(key, name) == name",
    "owned.setdefault(name, name) == name",
    f"{BLUEPRINT}::test_a_table_of_relative_positions_is_named_where_it_first_stands",
    f"{PUBLIC}[t5-small]",
)
bug(
    "blueprint-sandwich-of-one-slice",
    "model_spec/model.py",
    '"sandwich": ("norm", "norm_after")',
    '"sandwich": ("norm",)',
    f"{BLUEPRINT}::test_norms_by_placement",
    f"{PUBLIC}[gemma-2-2b]",
)
bug(
    "blueprint-depth-is-not-placed",
    "model_spec/model.py",
    "placed = [block.placed(depth, len(blocks)) for depth, block in enumerate(blocks)]",
    "placed = list(blocks)",
    f"{BLUEPRINT}::test_a_stack_places_schedules_by_depth",
)
bug(
    "blueprint-only-the-first-layer-is-asked-for-schedules",
    "model_spec/model.py",
    "for part, placed in block.late(depth, len(self.layers))[:1]:",
    "for part, placed in block.late(0, 1)[:1]:",
    f"{BLUEPRINT}::test_an_unplaced_schedule_is_refused_with_the_reason",
)
bug(
    "blueprint-runs-lose-the-rest",
    "model_spec/model.py",
    "        at += covered\n",
    "        at += max(covered, 2)\n",
    f"{BLUEPRINT}::test_runs_are_the_layers_however_they_repeat",
)
bug(
    "blueprint-balance-is-learned",
    "model_spec/components.py",
    'yield replace(bias, learned=self.bias == "learned")',
    "yield bias",
    f"{BLUEPRINT}::test_experts_have_one_of_each_and_a_constant_is_not_learned",
    f"{PUBLIC}[deepseek-v3]",
)
bug(
    "blueprint-tied-head-counted-twice",
    "model_spec/components.py",
    "if self.outputs and not self.table:",
    "if self.outputs:",
    f"{BLUEPRINT}::test_ties_name_the_owner",
    f"{PUBLIC}[gpt2]",
)
bug(
    "blueprint-terms-forget-how-many-layers",
    "costs/flops.py",
    "_numel(w), times[line]) for",
    "_numel(w), 1) for",
    f"{BLUEPRINT}::test_terms_add_up_and_say_how",
)
bug(
    "blueprint-text-keeps-only-what-must-be-said",
    "model_spec/serialization.py",
    "if usual is MISSING or said != usual}",
    "if usual is MISSING}",
    f"{BLUEPRINT}::test_text_is_read_back_as_the_same_model",
)
bug(
    "family-llama-head-dim-from-the-width",
    "families/config_reader.py",
    "return model // heads if told is None else told",
    "return model // heads",
    f"{PUBLIC}[qwen3-0.6b]",
    f"{SAME}[llama]",
)
bug(
    "family-llama-kv-default-hidden",
    "families/config_reader.py",
    "kv = self.maybe(name, default=default, most=HEADS) or heads",
    "kv = heads",
    f"{PUBLIC}[llama-3-8b]",
)
bug(
    "family-windows-in-the-first-layers",
    "families/llama.py",
    "SLIDING if window and layer >= first else FULL",
    "SLIDING if window and layer < first else FULL",
    f"{FAMILIES}::test_windows_begin_where_qwen_says",
)
bug(
    "family-t5-decoder-looks-both-ways",
    "families/t5.py",
    'T5Bias(buckets, reach, "back")',
    'T5Bias(buckets, reach, "both")',
    f"{SAME}[t5]",
)
bug(
    "family-gemma-scale-follows-the-head",
    "families/gemma.py",
    'scaled(config.number("query_pre_attn_scalar", default=256) ** -0.5, dim**-0.5)',
    "scaled(dim**-0.5, dim**-0.5)",
    f"{SAME}[gemma2]",
)
bug(
    "family-deepseek-mscale-not-squared",
    "families/deepseek.py",
    "plain * rope.swelling() ** 2",
    "plain * rope.swelling()",
    f"{SAME}[deepseek-yarn]",
)
bug(
    "family-deepseek-shared-experts-are-one",
    "families/deepseek.py",
    "hidden=shared * each.hidden",
    "hidden=each.hidden",
    f"{PUBLIC}[deepseek-v2-lite]",
)
bug(
    "family-bart-positions-without-the-two",
    "families/bart.py",
    "BART = Kin(skipped=2",
    "BART = Kin(skipped=0",
    f"{PUBLIC}[bart-base]",
)
bug(
    "family-gpt2-depth-from-zero",
    "families/gpt2.py",
    "depth + 1 if by_depth",
    "depth + 2 if by_depth",
    f"{SAME}[gpt2-by-depth]",
)
bug(
    "family-true-is-a-size",
    "families/config_reader.py",
    "if type(value) is not int:",
    "if not isinstance(value, int):",
    f'{BLUEPRINT}::test_an_impossible_config_is_refused[config("llama", hidden_size=True)]',
)
bug(
    "family-runs-foreign-code-without-a-word",
    "families/config_reader.py",
    "if config.said.get(key):\n            config.note",
    "if not config.said:\n            config.note",
    f"{BLUEPRINT}::test_what_a_description_leaves_out_is_noted",
)
