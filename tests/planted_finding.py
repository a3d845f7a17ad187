"""Bugs in finding attentions by what they do, in overhearing weights, and in saying what cannot be done."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
FINDING = "test_finding.py"
HEARING = "inspect/adapters/module_tracer.py"
CALLED = "inspect/adapters/example_run.py"
PROJECTION = "inspect/adapters/output_projection.py"
READING = "inspect/adapters/module_attributes.py"
FOUND = f"{FINDING}::test_what_an_attention_does_finds_it"
UNCLEAR = f"{FINDING}::test_what_is_not_understood_is_listed_and_refused"
ROWS = f"{FINDING}::test_rows_of_models_that_ask_no_interface"
LOCAL = f"{FINDING}::test_patterns_of_local_and_global_layers_are_what_they_read"
bug(
    "finding-causal-is-not-heard",
    HEARING,
    'bool(told.get("is_causal", False))',
    "False",
    f"{FOUND}[nanoGPT fused]",
)
bug(
    "finding-scale-is-not-heard",
    HEARING,
    "q.shape[-1] ** -0.5 if scale is None else scale",
    "q.shape[-1] ** -0.5",
    f"{FINDING}::test_all_that_the_function_was_told_is_seen",
)
bug(
    "finding-dropped-weights-are-lost",
    HEARING,
    '"softmax": Ear.softmax, "dropout": Ear.dropout,',
    '"softmax": Ear.softmax,',
    f"{FINDING}::test_weights_are_those_before_dropout",
)
bug(
    "finding-any-weights-will-do",
    HEARING,
    "    return torch.equal(used.to(tensor.dtype).reshape(tensor.shape), tensor)",
    "    return True",
    f"{UNCLEAR}[talking]",
)
bug(
    "finding-the-core-is-where-values-are-read",
    HEARING,
    "        return sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], both))",
    "        return len(self.inside)",
    f"{FINDING}::test_a_comparison_in_two_modules_is_that_of_the_one_around_them",
)
bug(
    "finding-two-comparisons-are-one",
    CALLED,
    "        if len(frame.own) > 1:",
    "        if len(frame.own) > 2:",
    f"{UNCLEAR}[several]",
)
bug(
    "finding-what-stands-within-is-overlooked",
    CALLED,
    "            outer.within += 1",
    "            outer.within += 0",
    f"{UNCLEAR}[around]",
)
bug(
    "finding-silent-when-nothing-is-heard",
    CALLED,
    "    if not times:\n",
    "    if times > 1:\n",
    f"{FINDING}::test_a_call_unlike_the_example_is_refused",
)
bug(
    "finding-an-example-trains",
    CALLED,
    "    if any(module.training for module in model.modules()):",
    "    if False:",
    f"{FINDING}::test_an_example_that_cannot_be_run[train]",
)
bug(
    "finding-weights-need-not-explain-heads",
    PROJECTION,
    "if heard.core and _is(heard.z_BTHV, z_BTHV)), None)",
    "if heard.core), None)",
    f"{FINDING}::test_a_declared_attention_is_seen_where_its_weights_explain_what_heads_say",
)
bug(
    "finding-tokens-lie-on-one-axis",
    PROJECTION,
    "z.reshape(z.shape[0] if z.dim() > 2 else 1, -1, _HEADS[last], z.shape[-1] // _HEADS[last])",
    "z.unflatten(-1, (_HEADS[last], -1))",
    f"{FINDING}::test_tokens_on_two_axes",
)
bug(
    "finding-an-adapter-has-no-width",
    PROJECTION,
    "    if isinstance(inner, nn.Module):",
    "    if False:",
    f"{FINDING}::test_an_adapter_is_silenced_with_what_it_is_beside",
)
bug(
    "finding-a-band-begins-at-the-query",
    "inspect/adapters/output_projection.py",
    "    weights = padded[..., side : side + length]",
    "    weights = padded[..., :length]",
    f"{ROWS}[longformer]",
)
bug(
    "finding-global-queries-keep-their-band",
    "inspect/adapters/output_projection.py",
    "        weights[row][:, tokens] = rows[row][:, : len(tokens)].to(weights)",
    "        weights[row][:, tokens] += 0",
    f"{ROWS}[longformer]",
)
bug(
    "finding-a-window-to-both-sides-is-one",
    READING,
    "Window(2 * keys - 1, after=keys - 1).text",
    "Window(keys).text",
    f"{LOCAL}[modernbert]",
)
bug(
    "finding-chunks-are-not-causal",
    READING,
    '(Causal() & Blocks(_whole(config, "attention_chunk_size"))).text',
    'Blocks(_whole(config, "attention_chunk_size")).text',
    f"{LOCAL}[llama4]",
)
bug(
    "finding-stages-share-names",
    "inspect/attention_sites.py",
    "    for how in (_before_first, _before_last, _whole):",
    "    for how in (_before_first,):",
    f"{FINDING}::test_sites_of_stages_have_names_of_their_own",
)
bug(
    "finding-whole-numbers-are-weights",
    "inspect/attention_sites.py",
    "        if whole or tensor.dtype.itemsize == 1:",
    "        if False:",
    f"{FINDING}::test_quantised_weights_are_silenced_and_not_cut",
)
bug(
    "finding-an-heir-is-stood-at-twice",
    "inspect/adapters/module_tracer.py",
    "        if role is None or self in within:",
    "        if role is None:",
    f"{FINDING}::test_a_forward_that_goes_on_to_its_parents_is_one",
)
