"""Bugs in finding attentions, in seeing what they work with, and in silencing heads."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
SITES = "test_sites.py"
OURS = "test_sites_ours.py"
INTERFACE = "inspect/adapters/transformers_interface.py"
WATCHING = "inspect/hooks.py"
bug(
    "sites-rows-without-softcap",
    WATCHING,
    "        if self.cap is not None:",
    "        if False:",
    f"{SITES}::test_rows_are_the_models_own[gemma2]",
)
bug(
    "sites-rows-without-sinks",
    WATCHING,
    "        if self.sinks is None:",
    "        if True:",
    f"{SITES}::test_rows_are_the_models_own[gpt-oss]",
)
bug(
    "sites-rows-without-bias",
    WATCHING,
    "        for grid in self._added(queries, keys):\n            s_BHTS = s_BHTS + grid\n",
    "",
    f"{SITES}::test_rows_are_the_models_own[t5]",
)
bug(
    "sites-rows-not-causal",
    WATCHING,
    "        if self.causal:",
    "        if False:",
    f"{SITES}::test_rows_are_the_models_own[llama]",
)
bug(
    "sites-rows-read-another-group",
    WATCHING,
    "head * groups // heads",
    "head % groups",
    f"{SITES}::test_rows_are_the_models_own[qwen3]",
)
bug(
    "sites-silenced-behind-the-merge",
    "inspect/adapters/torch_mha.py",
    "y = F.linear(_edited(self, those, z), self.out_proj.weight, self.out_proj.bias)",
    "y = _edited(self, those, F.linear(z, self.out_proj.weight, self.out_proj.bias))",
    f"{SITES}::test_torchs_own_layers[False-batch first]",
)
bug(
    "sites-fast-path-left-on",
    "inspect/adapters/torch_mha.py",
    "        torch.backends.mha.set_fastpath_enabled(False)",
    "        pass",
    f"{SITES}::test_torchs_own_layers[False-batch first]",
)
bug(
    "sites-class-stays-replaced",
    WATCHING,
    "                    self.restore()",
    "                    pass",
    f"{SITES}::test_nothing_is_left_behind",
)
bug(
    "sites-watched-by-everybody",
    WATCHING,
    "            _WATCHED.reset(token)",
    "            pass",
    f"{SITES}::test_nothing_is_left_behind",
)
bug(
    "sites-inner-watcher-alone",
    WATCHING,
    "now[module] = (*now.get(module, ()), *those)",
    "now[module] = those",
    f"{SITES}::test_heads_say_something_else",
)
bug(
    "sites-all-tokens",
    "inspect/ablation.py",
    "said if at is None else",
    "said if True else",
    f"{OURS}::test_only_some_tokens",
)
bug(
    "sites-probe-pushed-aside",
    "inspect/adapters/headwise_attention.py",
    "        return probe(place, tensor) if probe is not None and place in own else tensor",
    "        return tensor",
    f"{OURS}::test_a_probe_of_ones_own_looks_on",
)
bug(
    "sites-scale-forgotten",
    "inspect/ablation.py",
    "lambda moment: moment.own * self.scale",
    "lambda moment: moment.own * 0",
    f"{OURS}::test_a_model_of_ours_and_a_copy_of_it",
)
bug(
    "sites-a-head-named-twice-counts-once",
    "inspect/ablation.py",
    "            if head in own:",
    "            if head in own and head < 0:",
    f"{OURS}::test_what_cannot_be_meant_is_one_line[twice]",
)
