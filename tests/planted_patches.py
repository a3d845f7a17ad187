"""Bugs in what heads say instead of their own, and in telling depths and forwards apart."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
PATCHES = "test_patches.py"
DEPTHS = "test_depths.py"
FORWARDS = "inspect/site_hooks.py"
MEANS = "inspect/dataset_means.py"
OFFSETS = "inspect/dataset_means.py"
EDITING = "inspect/ablation.py"
KINDS = "inspect/ablation.py"
FEEDING = "inspect/dataset_means.py"
bug(
    "patches-mean-of-batches-not-of-tokens",
    MEANS,
    "share = count / self.count.clamp(min=1)",
    "share = 0.5",
    f"{PATCHES}::test_means_are_those_of_the_tokens_that_count",
)
bug(
    "patches-spread-forgets-how-far-batches-are",
    MEANS,
    "self.squares = seen + squares + far.square() * own * share",
    "self.squares = seen + squares",
    f"{PATCHES}::test_means_are_those_of_the_tokens_that_count",
)
bug(
    "patches-padding-counts",
    FEEDING,
    "            counts &= self.tokens.to(z.device)",
    "            pass",
    f"{PATCHES}::test_padding_of_ours_does_not_count",
)
bug(
    "patches-mask-of-the-encoder-for-all-stacks",
    FEEDING,
    "if mask.dim() != 2 or len(stacks) > 1:",
    "if mask.dim() != 2:",
    f"{PATCHES}::test_masks_by_stack",
)
bug(
    "patches-positions-of-rows-padded-on-the-left",
    MEANS,
    "(counts[:, 1:] & ~counts[:, :-1]).any()",
    "False",
    f"{PATCHES}::test_padding_of_ours_does_not_count",
)
bug(
    "patches-drawn-rows-may-be-ones-own",
    KINDS,
    "        return tuple(after[row] for row in range(rows))",
    "        return tuple(cycle)",
    f"{PATCHES}::test_drawn_rows_are_never_ones_own_and_come_again",
)
bug(
    "patches-noise-of-every-head-alike",
    KINDS,
    'f"{self.seed} {site} {head}"',
    'f"{self.seed}"',
    f"{PATCHES}::test_noise_has_the_moments_of_the_head",
)
bug(
    "patches-noise-of-unit-size",
    KINDS,
    "(mean + std * drawn)",
    "(mean + drawn)",
    f"{PATCHES}::test_noise_has_the_moments_of_the_head",
)
bug(
    "patches-noise-seed-lost-in-the-generator",
    KINDS,
    'zlib.crc32(f"{self.seed} {site} {head}".encode())',
    'self.seed << 32 | zlib.crc32(f"{site} {head}".encode())',
    f"{PATCHES}::test_noise_as_told_and_by_seed",
)
bug(
    "patches-offsets-not-brought-to-the-sum-of-a-row",
    OFFSETS,
    "return a_BTS * torch.where(total_BT > 0, self.mass / total_BT, 0.0)[..., None]",
    "return a_BTS",
    f"{PATCHES}::test_weights_by_offset_of_ours",
)
bug(
    "patches-offsets-of-a-sink-brought-to-one",
    OFFSETS,
    "self.mass / total_BT",
    "1 / total_BT",
    f"{PATCHES}::test_weights_by_offset_of_others[gpt-oss]",
)
bug(
    "patches-offsets-the-other-way-round",
    OFFSETS,
    "place = _offsets(count, a_BTS.device).expand_as",
    "place = _offsets(count, a_BTS.device).T.expand_as",
    f"{PATCHES}::test_weights_by_offset_of_others[t5]",
)
bug(
    "patches-offsets-over-keys-that-nobody-may-read",
    OFFSETS,
    "    allowed = core.allowed()",
    "    allowed = core.allowed() | True",
    f"{PATCHES}::test_weights_by_offset_of_others[bert]",
)
bug(
    "patches-offsets-read-the-values-of-another-group",
    "inspect/adapters/headwise_attention.py",
    "self.job.core.values[row]",
    "row % self.job.spec.heads.kv",
    f"{PATCHES}::test_weights_by_offset_of_ours",
)
bug(
    "patches-offsets-of-heads-that-say-more",
    OFFSETS,
    "if not far <= CLOSE.get(said_BTV.dtype, COARSE) * said_BTV.abs().max() or (a_BTS < 0).any():",
    "if (a_BTS < 0).any():",
    f"{PATCHES}::test_what_has_no_weights_by_offset_says_why",
)
bug(
    "patches-columns-from-the-end-are-lost",
    EDITING,
    "if wrong := [column for column in tokens if not -count <= column < count]:",
    "if wrong := [column for column in tokens if not 0 <= column < count]:",
    f"{PATCHES}::test_another_text_by_hand",
)
bug(
    "patches-vectors-that-are-not-finite",
    EDITING,
    "if value.is_meta or not value.isfinite().all():",
    "if value.is_meta:",
    f"{PATCHES}::test_what_cannot_be_meant_is_one_line[nan]",
)
bug(
    "depths-group-of-a-run-rounded-up",
    "inspect/attention_sites.py",
    "if int(run / (layers / groups)) == group:",
    "if run // (layers // groups) == group:",
    f"{DEPTHS}::test_silenced_at_one_depth[odd]",
)
bug(
    "depths-not-counted-anew",
    FORWARDS,
    "            _FORWARDS.reset(token)\n        for posts, calls in begun.items():",
    "            pass\n        for posts, calls in begun.items():",
    f"{DEPTHS}::test_silenced_at_one_depth[one]",
)
bug(
    "depths-a-part-of-them-goes-unseen",
    FORWARDS,
    "if post.calls > 1 and count not in (0, post.calls):",
    "if False:",
    f"{DEPTHS}::test_a_part_of_the_depths_is_refused",
)
bug(
    "depths-that-nothing-speaks-of-are-all-silenced",
    FORWARDS,
    "        if turn >= self.calls:",
    "        if turn >= self.calls > 1:",
    f"{DEPTHS}::test_depths_that_nothing_speaks_of_are_refused",
)
bug(
    "forwards-what-never-ran-is-not-told",
    FORWARDS,
    "            if self.forwards[module] and not self.ran[module]:",
    "            if False:",
    f"{PATCHES}::test_what_was_never_done_is_told",
)
bug(
    "forwards-of-a-part-without-it-count",
    FORWARDS,
    "        for module in self.below[begun]:\n            self.forwards[module] += 1",
    "        for module in self.at:\n            self.forwards[module] += 1",
    f"{PATCHES}::test_what_was_never_done_is_told",
)
bug(
    "forwards-replaced-modules-go-unseen",
    FORWARDS,
    "if _in_place(self.model, path) is not module]:",
    "if _in_place(self.model, path) is None]:",
    f"{PATCHES}::test_a_model_that_changes_meanwhile",
)
bug(
    "forwards-run-again-on-the-way-back",
    FORWARDS,
    "if torch.is_grad_enabled() and any(map(_runs_again, self.model.modules())):",
    "if False:",
    f"{PATCHES}::test_checkpointing_is_refused",
)
bug(
    "depths-kept-all-as-one",
    FORWARDS,
    "        watcher = self.turns.get(self._turn())\n        if watcher is not None and watcher.wants_core:",
    "        watcher = self.turns.get(0)\n        if watcher is not None and watcher.wants_core:",
    f"{DEPTHS}::test_a_trace_keeps_every_depth",
)
