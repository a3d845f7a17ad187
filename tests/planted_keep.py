"""Bugs in what is written of models whose heads were cut, and in what is read back of it."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
TEST = "test_folders.py::"
PLAIN = f"{TEST}test_layers_alike_are_a_plain_checkpoint"
RESIZED = f"{TEST}test_what_no_config_says_comes_with_a_loader"
HARMED = f"{TEST}test_a_harmed_folder_is_refused_in_one_line"
bug(
    "folders-heads-stay-in-the-order-they-were-shared-in",
    "surgery/hf_export/shard_rewrite.py",
    "for step in (_ordered, _narrowed, _unsettled):",
    "for step in (_narrowed, _unsettled):",
    f"{PLAIN}[llama shared by likeness]",
    f"{TEST}test_groups_in_any_order_are_made_regular",
)
bug(
    "folders-keys-do-not-move-with-queries",
    "surgery/hf_export/shard_rewrite.py",
    '"out": take(order), "kv": take(groups)}',
    '"out": take(order)}',
    f"{TEST}test_the_plain_form_is_the_same_function",
)
bug(
    "folders-a-shared-table-is-cut-to-the-first-columns",
    "surgery/hf_export/shard_rewrite.py",
    "tensors[owner] = take(kept)(",
    "tensors[owner] = take(range(len(kept)))(",
    f"{TEST}test_the_plain_form_is_the_same_function",
)
bug(
    "folders-constants-of-files-are-not-compared",
    "surgery/hf_export/shard_rewrite.py",
    "if not torch.equal(",
    "if torch.equal(",
    f"{TEST}test_groups_in_any_order_are_made_regular",
)
bug(
    "folders-a-config-is-not-read-back",
    "surgery/hf_export/model_folder.py",
    "why = _difference(read(keys), described) or _refused(keys)",
    "why = _refused(keys)",
    f"{TEST}test_without_transformers_nothing_is_claimed",
)
bug(
    "folders-transformers-is-not-asked-of-a-config",
    "surgery/hf_export/model_folder.py",
    "why = _difference(read(keys), described) or _refused(keys)",
    "why = _difference(read(keys), described)",
    f"{PLAIN}[llama of three heads]",
)
bug(
    "folders-a-number-of-key-value-heads-stays",
    "surgery/hf_export/model_folder.py",
    "edited |= {name: last.kv for name in SHARED if config.get(name) is not None}",
    "pass",
    f"{PLAIN}[gemma2]",
)
bug(
    "folders-tensors-of-32-bits-among-others",
    "surgery/hf_export/shard_rewrite.py",
    "fresh = torch.empty(own[0].shape, dtype=dtype)",
    "fresh = torch.empty(own[0].shape)",
    f"{TEST}test_shards_dtypes_and_what_the_map_ignores_stay",
)
bug(
    "folders-an-attention-that-went-keeps-its-tensors",
    "surgery/hf_export/shard_rewrite.py",
    "return there.layout.shape({**there.sizes, **{axis: 0 for axis in HEADED if axis in there.sizes}})",
    "return own[0].shape",
    f"{RESIZED}[gemma2 without one]",
)
bug(
    "folders-what-is-no-data-travels-on",
    "surgery/hf_export/model_folder.py",
    r"|sentencepiece[\w.-]*|source|target|spiece)\.(json|txt|model|jinja|spm)",
    r"|sentencepiece[\w.-]*|source|target|spiece|\w+)\.(json|txt|model|jinja|spm|py|bin|pt)",
    f"{TEST}test_shards_dtypes_and_what_the_map_ignores_stay",
)
bug(
    "folders-written-where-they-will-stand",
    "surgery/hf_export/model_folder.py",
    'fresh = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}{TEMPORARY}")',
    "fresh = folder",
    f"{TEST}test_who_is_killed_leaves_no_folder",
)
bug(
    "folders-what-failed-stays-beside",
    "surgery/hf_export/model_folder.py",
    "    finally:\n        shutil.rmtree(fresh, ignore_errors=True)\n",
    "    finally:\n        pass\n",
    f"{TEST}test_a_disk_that_fails_leaves_nothing",
)
bug(
    "folders-a-plan-for-any-checkpoint",
    "surgery/hf_export/model_folder.py",
    "if plan.source.get(name) != known.get(name)]",
    "if name not in plan.source]",
    f"{TEST}test_the_record_says_what_was_done_and_to_what",
)
bug(
    "folders-a-loader-that-was-not-tried",
    "surgery/hf_export/resized_modules.py",
    "    if not trial.agrees:\n",
    "    if not trial:\n",
    f"{TEST}test_a_loader_that_says_something_else_is_not_given",
)
bug(
    "folders-far-is-close",
    "surgery/hf_export/load_check.py",
    'if far <= ways["close"]:',
    "if far <= 1e5:",
    f"{TEST}test_a_loader_that_says_something_else_is_not_given",
)
bug(
    "folders-a-layer-without-heads-counts-no-tokens",
    "surgery/load_model.txt",
    'if cache is not None and self.still["remembers"]:',
    "if False:",
    f"{TEST}test_a_layer_without_heads_counts_tokens[llama without the first]",
)
bug(
    "folders-layers-read-the-columns-of-others",
    "surgery/load_model.txt",
    'elif "position_bias" in inspect.signature(type(module).forward).parameters:',
    "elif False:",
    f"{RESIZED}[t5]",
)
bug(
    "folders-files-are-not-those-that-were-written",
    "hub/model_import.py",
    "        if sha256(path) != checksum:\n",
    "        if False:\n",
    HARMED,
)
bug(
    "folders-constants-are-made-anew",
    "hub/checkpoint_weights.py",
    "yield full, _given(full, given[full], made) if full in given else made",
    "yield full, made",
    f"{RESIZED}[t5]",
)
bug(
    "folders-a-vector-behind-heads-has-no-place",
    "families/weight_names.py",
    "found = self.slots.get(own) or self._added(own)",
    "found = self.slots.get(own)",
    f"{RESIZED}[t5]",
)
bug(
    "folders-config-says-what-heads-json-should",
    "families/__init__.py",
    "        if record and record.model:\n",
    "        if False:\n",
    f"{RESIZED}[gpt2]",
)
bug(
    "living-tensors-are-those-of-the-model",
    "hub/model_import.py",
    'config.to_dict() | {"architectures": [name]}',
    'config.to_dict() | {"architectures": None}',
    f"{TEST}test_a_model_in_memory_is_copied[bert]",
)
bug(
    "living-names-of-memory-for-names-of-files",
    "hub/model_import.py",
    "return revert_weight_conversion(model, model.state_dict())",
    "return model.state_dict()",
    f"{TEST}test_a_model_in_memory_is_copied[vit]",
)
