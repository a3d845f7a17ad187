"""Bugs in reading configs of others' models, in what stands around attention, and in giving specs to sites."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
FAMILIES = "test_families_more.py"
SAYS = f"{FAMILIES}::test_attention_says_what_theirs_says"
COUNT = f"{FAMILIES}::test_as_many_numbers_as_there"
KEEPS = f"{FAMILIES}::test_they_keep_what_formulas_say"
HUB = "test_hub_more.py::test_a_folder_says_the_same_here"
bug(
    "families-gemma3-one-window-in-seven",
    "families/gemma.py",
    "FULL if (layer + 1) % every == 0 else SLIDING",
    "FULL if layer % every == 0 else SLIDING",
    f"{FAMILIES}::test_keys_that_are_left_out_are_what_transformers_fills_in[gemma3-usual]",
    f"{FAMILIES}::test_nothing_but_a_name_is_the_usual_model[gemma3_text]",
)
bug(
    "families-gemma3-local-angles-everywhere",
    "families/gemma.py",
    'turns = (QKNorm("offset", eps=norm.eps), ropes[kind].rotary(sizes.dim), *caps)',
    'turns = (QKNorm("offset", eps=norm.eps), ropes[SLIDING].rotary(sizes.dim), *caps)',
    f"{SAYS}[gemma3]",
)
bug(
    "qk-norm-offset-without-its-one",
    "parts/qk_norm.py",
    'scale = scale + 1 if self.kind == "offset" else scale',
    "scale = scale",
    f"{SAYS}[gemma3]",
)
bug(
    "families-gptj-turns-halves",
    "families/gpt_neo.py",
    'pairs="interleaved"',
    'pairs="half"',
    f"{SAYS}[gptj]",
)
bug(
    "families-neox-turns-all",
    "families/gpt_neo.py",
    'config.number("rotary_pct", default=0.25)',
    'config.number("rotary_pct", default=1.0)',
    f"{FAMILIES}::test_what_old_files_leave_out_is_the_usual",
)
bug(
    "families-neox-one-norm-for-both",
    "families/gpt_neo.py",
    'placement = "abreast" if',
    'placement = "parallel" if',
    f"{COUNT}[gpt-neox]",
)
bug(
    "families-whisper-biased-keys",
    "families/bart.py",
    'bias="qvo"',
    'bias="qkvo"',
    f"{COUNT}[whisper]",
    f"{SAYS}[whisper]",
)
bug(
    "families-smollm3-turns-everywhere",
    "families/llama.py",
    "return [int((layer + 1) % every != 0) for layer in range(layers)]",
    "return [1 for layer in range(layers)]",
    f"{FAMILIES}::test_keys_that_are_left_out_are_what_transformers_fills_in[smollm3]",
)
bug(
    "families-cohere2-turns-where-all-is-read",
    "families/cohere_stablelm.py",
    '            return design(**sizes.words, bias=_bias(config), pattern="causal()")',
    '            return design(**sizes.words, bias=_bias(config), pattern="causal()", '
    "modifiers=(rope.rotary(sizes.dim),))",
    f"{SAYS}[cohere2]",
)
bug(
    "families-mpt-any-number-of-heads",
    "families/bloom_falcon_mpt.py",
    "if heads & (heads - 1) or steepest != 8:",
    "if steepest != 8:",
    f"{FAMILIES}::test_what_no_spec_says_has_its_reason[mpt-six]",
)
bug(
    "families-granite-scores-as-usual",
    "families/llama.py",
    'config.number("attention_multiplier", default=1.0)',
    "sizes.dim**-0.5",
    f"{SAYS}[granite]",
)
bug(
    "models-granite-adds-all",
    "models/block.py",
    "y = y if self.scale == 1 else y * self.scale",
    "y = y",
    f"{HUB}[granite]",
)
bug(
    "models-after-is-before",
    "models/block.py",
    '        if self.placement == "after":',
    '        if self.placement == "afterwards":',
    f"{HUB}[olmo2]",
)
bug(
    "models-abreast-one-after-the-other",
    "models/block.py",
    'if self.placement == "abreast":',
    'if self.placement == "apart":',
    f"{HUB}[gpt-neox]",
)
bug(
    "models-sines-between-cosines",
    "models/embeddings_heads.py",
    "return sinusoidal(position, like.shape[-1], told.layout).to(like.dtype)",
    "return sinusoidal(position, like.shape[-1]).to(like.dtype)",
    f"{HUB}[marian]",
)
bug(
    "kept-abreast-reads-twice",
    "costs/training_memory.py",
    'held[1:] if described.placement == "abreast" and name != branches[0] else held',
    "held",
    f"{KEEPS}[gpt-neox-dtype0]",
)
bug(
    "hub-phi3-values-are-keys",
    "families/phi.py",
    '{"q|kv|v": "v"}',
    '{"q|kv|v": "kv"}',
    f"{HUB}[phi3]",
)
bug(
    "hub-neox-keys-before-queries",
    "families/gpt_neo.py",
    'for place, side in enumerate("qkv"):',
    'for place, side in enumerate("kqv"):',
    f"{HUB}[gpt-neox]",
    f"{HUB}[bloom]",
)
bug(
    "blueprint-one-layer-for-all-counted-for-each",
    "model_spec/model.py",
    'self.layers if self.weights_of == "each" else self.layers[:1]',
    "self.layers",
    f"{COUNT}[albert]",
)
bug(
    "models-beyond-is-built",
    "models/transformer.py",
    "    for beyond in described.beyond:\n",
    "    for beyond in ():\n",
    f"{FAMILIES}::test_what_is_beyond_words_is_counted_said_and_not_built",
)
bug(
    "sites-words-of-one-tower-for-all",
    "inspect/attention_sites.py",
    "if not one.words or any(w in site.path for w in one.words)",
    "if True",
    f"{FAMILIES}::test_towers_are_read_from_configs_inside",
)
bug(
    "sites-a-class-that-nobody-knows-hides-its-layers",
    "inspect/attention_sites.py",
    'if key != "architectures"',
    "if True",
    f"{FAMILIES}::test_a_config_that_no_class_fits_still_says_its_layers",
)
bug(
    "sites-a-stack-as-paths-guess-it",
    "inspect/attention_sites.py",
    '        only = f"{self.stacks[0]}.{site.layer}.{site.kind}"\n',
    "        only = site.name\n",
    f"{FAMILIES}::test_the_stack_of_a_site_is_that_of_its_description",
)
bug(
    "families-falcon-groups-where-one-head-serves-all",
    "families/bloom_falcon_mpt.py",
    'kv = 1 if config.flag("multi_query", True) else heads',
    'kv = config.maybe("num_kv_heads") or heads',
    f"{COUNT}[falcon]",
)
bug(
    "families-a-window-one-too-wide",
    "families/starcoder.py",
    'f"window({window})"',
    'f"window({window + 1})"',
    f"{FAMILIES}::test_the_mask_is_theirs[starcoder2]",
)
bug(
    "families-deberta-as-deep-as-bert",
    "families/deberta.py",
    "reading.Usual(1536, 24, 24, ",
    "reading.Usual(1536, 24, 12, ",
    f"{FAMILIES}::test_nothing_but_a_name_is_the_usual_model[deberta-v2]",
)
