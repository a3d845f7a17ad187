"""Bugs in bands of weights and in what is found of them once."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
BANDS = "test_bands.py"
WEIGHTS = f"{BANDS}::test_bands_are_the_weights_of_the_definition"
NOTHING = f"{BANDS}::test_keys_that_nobody_reads_add_nothing"
bug(
    "bands-one-key-short",
    "head_analysis/weight_bands.py",
    "those = slice(int(read[0]), int(read[-1]) + 1) if len(read)",
    "those = slice(int(read[0]), max(int(read[0]) + 1, int(read[-1]))) if len(read)",
    f"{WEIGHTS}[causal-300]",
)
bug(
    "bands-forget-where-keys-begin",
    "head_analysis/weight_bands.py",
    "Block(w_HTS, allowed, start, asks, told, first=those.start)",
    "Block(w_HTS, allowed, start, asks, told)",
    f"{WEIGHTS}[window-300]",
)
bug(
    "bands-always-of-all-keys",
    "head_analysis/weight_bands.py",
    "            those = slice(int(read[0]), int(read[-1]) + 1) if len(read) else slice(0, 1)\n",
    "            those = slice(0, keys)\n",
    f"{BANDS}::test_bands_are_as_narrow_as_what_they_read",
)
bug(
    "bands-as-high-as-it-goes",
    "head_analysis/weight_bands.py",
    "min(TALL * least, CELLS // (heads * w_HTS.shape[-1]))",
    "CELLS * TALL // (heads * w_HTS.shape[-1])",
    f"{BANDS}::test_bands_are_as_narrow_as_what_they_read",
)
bug(
    "bands-of-ours-with-the-mask-of-all-keys",
    "inspect/adapters/headwise_attention.py",
    "        told = Tokens(told.position[:, keys], told.segment[:, keys], checked=True, filled=filled)\n",
    "        told = Tokens(told.position[:, : keys.stop - keys.start], told.segment[:, keys], checked=True, "
    "filled=filled)\n",
    f"{WEIGHTS}[window-300]",
)
bug(
    "seen-bars-between-the-wrong-columns",
    "inspect/hooks.py",
    "columns = slice(int(some[0]), int(some[-1]) + 1) if len(some) else slice(0)",
    "columns = slice(int(some[0]), int(some[-1])) if len(some) else slice(0)",
    f"{BANDS}::test_seen_keys_are_all_that_rows_may_read[bool]",
)
bug(
    "seen-mask-of-other-keys",
    "inspect/hooks.py",
    "grid[..., : self.k_BSGK.shape[1]][..., keys] if grid.shape[3] > 1 else grid",
    "grid[..., : len(range(self.k_BSGK.shape[1])[keys])] if grid.shape[3] > 1 else grid",
    f"{BANDS}::test_seen_keys_are_all_that_rows_may_read[float]",
)
bug(
    "seen-shared-keys-out-of-order",
    "inspect/hooks.py",
    "q_BHTK.unflatten(1, (k_BGSK.shape[1], -1)).flatten(2, 3)",
    "q_BHTK.unflatten(1, (-1, k_BGSK.shape[1])).transpose(1, 2).flatten(2, 3)",
    f"{BANDS}::test_seen_keys_are_all_that_rows_may_read[bool]",
)
bug(
    "block-flags-of-other-keys",
    "head_analysis/weight_bands.py",
    "return known[self.first : self.first + self.w_HTS.shape[2]]",
    "return known[: self.w_HTS.shape[2]]",
    f"{NOTHING}[causal]",
)
bug(
    "block-nothing-is-the-largest",
    "head_analysis/weight_bands.py",
    "torch.where(self.top == 0, torch.inf, self.most.sum(-1))",
    "self.most.sum(-1)",
    f"{NOTHING}[causal]",
)
bug(
    "block-few-keys-are-none",
    "head_analysis/weight_bands.py",
    "return self.w_HTS[..., those].sum(-1)",
    "return self.w_HTS[..., those[1:]].sum(-1)",
    f"{BANDS}::test_few_tokens_of_many_are_picked",
)
bug(
    "clark-forgets-keys-that-nobody-reads",
    "head_analysis/literature_metrics.py",
    "    return nats((1 - SMOOTH) * block.w_HTS + each) - elsewhere\n",
    "    return nats((1 - SMOOTH) * block.w_HTS + each)\n",
    f"{NOTHING}[causal]",
)
bug(
    "chance-is-the-first-head",
    "head_analysis/head_measurement.py",
    "chances = {name: (sums[-1:], numbers[-1:])",
    "chances = {name: (sums[:1], numbers[:1])",
    f"{BANDS}::test_chance_is_the_same_whether_it_was_known",
)
