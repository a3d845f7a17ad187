"""Bugs in what transformers runs on headwise."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
FILE = "hub/transformers_backend.py"
TESTS = "test_registered.py"
OUTPUTS = f"{TESTS}::test_outputs_are_eagers"
bug(
    "registered-masks-are-not-made",
    FILE,
    "    AttentionMaskInterface.register(NAME, mask)\n",
    "",
    f"{OUTPUTS}[llama]",
    f"{OUTPUTS}[t5]",
)
bug(
    "registered-masks-are-the-fused-functions",
    FILE,
    'return _as_scores(fused, told.get("dtype", torch.float32))',
    "return fused",
    f"{TESTS}::test_a_model_that_asks_no_interface_is_as_with_eager",
)
bug(
    "registered-what-is-ahead-is-read",
    FILE,
    "        causal = not one\n",
    "        causal = False\n",
    f"{OUTPUTS}[llama]",
)
bug(
    "registered-a-mark-outlives-its-mask",
    FILE,
    "getattr(shown, AHEAD, None) == _version(shown)",
    "getattr(shown, AHEAD, None) is not None",
    f"{TESTS}::test_a_mask_that_was_written_to_is_read",
)
bug(
    "registered-keys-are-repeated-for-one-query",
    FILE,
    "    if one and each > 1:\n",
    "    if one and each > len(qkv) * 9:\n",
    f"{TESTS}::test_no_key_is_repeated_for_one_query",
)
bug(
    "registered-biases-by-head-stay-by-head",
    FILE,
    "            bias = as_rows(bias, each)\n",
    "            bias = bias[:, ::each]\n",
    f"{TESTS}::test_it_is_its_definition[biased-1-2]",
)
bug(
    "registered-a-sink-comes-before-the-cap",
    FILE,
    "        s = torch.cat([s, seen.sinks.to(s).reshape(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)\n",
    "        s = torch.cat([s, torch.tanh(seen.sinks.to(s)).reshape(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)\n",
    f"{TESTS}::test_it_is_its_definition[sinks-5-2]",
)
bug(
    "registered-nothing-is-dropped",
    FILE,
    'told.get("dropout", 0.0) if module.training else 0.0',
    "0.0",
    f"{TESTS}::test_training_is_eagers[llama-0.3]",
    f"{TESTS}::test_training_is_eagers[gemma2-0.3]",
)
bug(
    "registered-a-row-of-minus-infinity",
    FILE,
    "    if least > torch.finfo(added.dtype).min:\n",
    "    if least > 0:\n",
    f"{TESTS}::test_half_precision_is_no_further_from_the_truth_than_eagers[llama]",
)
bug(
    "registered-what-it-does-not-know-is-dropped",
    FILE,
    "    if seen.odd:\n",
    "    if seen.odd and told is None:\n",
    f"{TESTS}::test_what_it_cannot_know_is_refused[indices]",
)
bug(
    "registered-weights-are-never-given",
    FILE,
    ' or told.get("output_attentions"):',
    ":",
    f"{TESTS}::test_weights_that_are_asked_for_are_given[llama]",
)
bug(
    "registered-in-any-transformers",
    FILE,
    "SINCE = (5, 3)",
    "SINCE = (5, 0)",
    f"{TESTS}::test_transformers_before_5_3_is_left_alone[5.2.9-False]",
)
bug(
    "registered-waits-for-one-import-only",
    FILE,
    "            run(module)\n            sys.meta_path.remove(self)\n",
    "            sys.meta_path.remove(self)\n            run(module)\n",
    f"{TESTS}::test_it_waits_until_an_import_has_come_to_its_end",
)
bug(
    "registered-no-mask-means-causal",
    "inspect/adapters/transformers_interface.py",
    "        return bool(said)\n",
    "        said = said\n",
    f"{TESTS}::test_it_is_its_definition[plain-5-2]",
)
