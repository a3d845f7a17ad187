"""Bugs in whole models, in how they decode, and in the folders they are kept in."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
MODELS = "test_models.py"
FOLDERS = "test_model_folders.py"
EVERY = "contract/test_models.py"
ANCHORS = "anchors/test_models.py"
bug(
    "models-post-norm-before-the-sum",
    "models/block.py",
    'return self._normed(f"{name}_norm", x + self._run(name, x, call))',
    'return x + self._normed(f"{name}_norm", self._run(name, x, call))',
    f"{ANCHORS}::test_layers_of_torch_agree[post]",
)
bug(
    "models-sandwich-without-its-second-slice",
    "models/block.py",
    'if self.placement == "sandwich" else y)',
    'if self.placement == "sandwiched" else y)',
    f"{ANCHORS}::test_logits_agree[gemma2]",
)
bug(
    "models-parallel-one-after-the-other",
    "models/block.py",
    "                x = x + self._run(name, z, call)\n",
    "                x = z = x + self._run(name, z, call)\n",
    f"{ANCHORS}::test_a_parallel_block_is_that_of_gptj",
)
bug(
    "models-each-layer-has-a-table-of-its-own",
    "models/block.py",
    "shares = {name: owners[key] for name, key in tied.items() if key in owners}",
    "shares = {}",
    f"{MODELS}::test_what_is_shared_is_one_tensor",
    f"{ANCHORS}::test_logits_agree[t5]",
)
bug(
    "weights-a-borrowed-tensor-is-the-owners-whole-part",
    "weights.py",
    "return self._borrowed[name][name]",
    "return self._borrowed[name][name].detach()",
    f"{MODELS}::test_what_is_shared_is_one_tensor",
)
bug(
    "models-nearly-is-built-as-what-it-is-like",
    "models/block.py",
    "if isinstance(described.attention, Nearly):",
    "if isinstance(described.feed, Nearly):",
    f"{MODELS}::test_what_cannot_be_built_says_why",
)
bug(
    "models-skipped-rows-are-read",
    "models/embeddings_heads.py",
    "F.embedding(position + told.skipped,",
    "F.embedding(position,",
    f"{ANCHORS}::test_logits_agree[bart]",
)
bug(
    "models-positions-count-padding",
    "models/embeddings_heads.py",
    "position = at.position if at.start is not None else at.position.where(at.live, 0)",
    "position = torch.arange(at.count, device=at.position.device)[None]",
    f"{MODELS}::test_padded_rows_are_as_if_alone",
    f"{MODELS}::test_packed_rows_are_as_if_alone",
)
bug(
    "models-scale-of-positions-too",
    "models/embeddings_heads.py",
    "        h = h if self.norm is None else self.norm(h)\n        return dropped",
    "        h = h * told.scale if self.norm is None else self.norm(h)\n        return dropped",
    f"{MODELS}::test_sinusoids_are_added_times_nothing",
)
bug(
    "models-last-is-the-last-place",
    "models/embeddings_heads.py",
    "return _taken(h, at.count - 1 - at.live.flip(1).byte().argmax(1))",
    "return h[:, -1]",
    f"{MODELS}::test_heads_of_whole_rows_mind_padding",
)
bug(
    "models-mean-of-padding-too",
    "models/embeddings_heads.py",
    "(h * live).sum(1) / live.sum(1).clamp(min=1)",
    "h.sum(1) / live.sum(1).clamp(min=1)",
    f"{MODELS}::test_heads_of_whole_rows_mind_padding",
)
bug(
    "models-patches-column-by-column",
    "models/embeddings_heads.py",
    "h = grid.flatten(2).transpose(1, 2)",
    "h = grid.mT.flatten(2).transpose(1, 2)",
    f"{MODELS}::test_patches_are_one_linear_map",
    f"{ANCHORS}::test_an_image_is_classified_alike",
)
bug(
    "models-head-capped-before-its-bias",
    "models/embeddings_heads.py",
    "told.cap * torch.tanh(y / told.cap)",
    "told.cap * torch.tanh(y)",
    f"{ANCHORS}::test_logits_agree[gemma2]",
)
bug(
    "models-offset-norm-without-its-one",
    "models/feed_forward.py",
    'weight + 1 if self.kind == "offset" else weight',
    "weight",
    f"{MODELS}::test_norms_by_their_definitions[offset]",
    f"{ANCHORS}::test_logits_agree[gemma2]",
)
bug(
    "models-balance-weighs-too",
    "models/feed_forward.py",
    "share = score.gather(-1, chosen)",
    "share = wanted.gather(-1, chosen)",
    f"{MODELS}::test_experts_are_what_their_router_says[sigmoid-constant]",
    f"{ANCHORS}::test_logits_agree[deepseek]",
)
bug(
    "models-experts-give-back-in-their-own-order",
    "models/feed_forward.py",
    "(out[back].view(*chosen.shape, -1)",
    "(out[order].view(*chosen.shape, -1)",
    f"{MODELS}::test_experts_are_what_their_router_says",
)
bug(
    "models-experts-all-run",
    "models/feed_forward.py",
    "run = self._all if torch.compiler.is_compiling() else self._sorted",
    "run = self._all",
    f"{MODELS}::test_an_expert_that_nobody_asks_costs_nothing",
)
bug(
    "models-dropout-in-answers",
    "models/block.py",
    "return dropped(y, self.dropout, self.training)",
    "return dropped(y, self.dropout, True)",
    f"{MODELS}::test_dropout_acts_in_training_alone_and_where_it_should",
)
bug(
    "models-checkpointing-keeps-everything",
    "models/block.py",
    'again = checkpointing == "block" and torch.is_grad_enabled()',
    'again = checkpointing == "layer" and torch.is_grad_enabled()',
    f"{MODELS}::test_checkpointing_computes_again_what_it_forgot",
)
bug(
    "models-depth-counted-from-zero",
    "models/initialisation.py",
    "matrix.mul_(depth**-0.5)",
    "matrix.mul_((depth + 1) ** -0.5)",
    f"{MODELS}::test_depth_scaled_start",
)
bug(
    "models-memory-keeps-its-rows",
    "models/model_cache.py",
    "{name: entry[index] for name, entry in held.entry.items()}",
    "dict(held.entry)",
    f"{MODELS}::test_what_was_encoded_is_read_again",
)
bug(
    "models-greedy-goes-on-from-the-last-place",
    "generation/decoding_state.py",
    "self.logits = self.net.read(last(h, at)[:, None])[:, 0]",
    "self.logits = self.net.read(h[:, :1])[:, 0]",
    f"{EVERY}::test_every_preset_decodes[mha-decoder]",
)
bug(
    "models-greedy-says-the-end",
    "generation/text_output.py",
    "        if one in self._ends:\n            self.close()\n            return\n        self.ids.append(one)\n",
    "        self.ids.append(one)\n        if one in self._ends:\n            self.close()\n            return\n",
    f"{MODELS}::test_rows_stop_before_the_end",
)
bug(
    "models-greedy-stops-at-the-first-end",
    "generation/decoding_state.py",
    "        if not going:\n",
    "        if len(going) < len(ids):\n",
    f"{MODELS}::test_rows_stop_before_the_end",
)
bug(
    "models-a-merged-block-forgets-its-mean",
    "models/block.py",
    "return self._merged[0](z, source=source, tokens=call.at, cache=cache, probe=probe)",
    "return attention(z, source=source, tokens=call.at, probe=probe)",
    f"{MODELS}::test_a_merged_block_is_the_block_of_attentions",
)
bug(
    "folder-manifest-before-the-weights",
    "models/save_load.py",
    "    for name, data in new.items():\n        write_atomically(folder / name, data)\n"
    "    manifest = Manifest(net.described, {name: hashlib.sha256(data).hexdigest() for name, data in new.items()}, "
    "usage)\n"
    "    write_atomically(folder / MANIFEST, str(manifest).encode())",
    "    manifest = Manifest(net.described, {name: hashlib.sha256(data).hexdigest() for name, data in new.items()}, "
    "usage)\n"
    "    write_atomically(folder / MANIFEST, str(manifest).encode())\n"
    "    for name, data in new.items():\n        write_atomically(folder / name, data)\n    ",
    f"{FOLDERS}::test_whatever_fails_a_whole_model_is_there",
)
bug(
    "folder-a-second-failure-forgets-the-first-copy",
    "models/save_load.py",
    "if before.is_file() and sha256(before) == checksum:",
    "if before.is_dir():",
    f"{FOLDERS}::test_whatever_fails_a_whole_model_is_there",
)
bug(
    "folder-checksums-are-not-looked-at",
    "models/save_load.py",
    "if hashlib.sha256(data).hexdigest() == checksum:",
    "if data:",
    f"{FOLDERS}::test_a_harmed_folder_is_refused_in_one_line",
)
bug(
    "folder-shapes-are-not-looked-at",
    "models/save_load.py",
    "elif held[name].shape != tensor.shape:",
    "elif held[name].dim() != tensor.dim():",
    f"{FOLDERS}::test_tensors_of_another_model_are_refused_by_name",
)
bug(
    "folder-any-tokenizer-will-do",
    "models/save_load.py",
    "    if size > max(tables, default=0):",
    "    if not size:",
    f"{FOLDERS}::test_a_tokenizer_of_another_vocabulary_is_refused",
)
bug(
    "families-t5-does-not-read-its-own-scale",
    "families/t5.py",
    'config.flag("scale_decoder_outputs", tied)',
    "tied",
    f"{ANCHORS}::test_logits_agree[t5-gated]",
)
bug(
    "blueprint-a-table-counts-a-run-once",
    "model_spec/weight_table.py",
    "return self.times * sum(learned(rows) for _, rows in self.each)",
    "return sum(learned(rows) for _, rows in self.each)",
    "house/test_house.py::test_doctests[headwise.model_spec.weight_table]",
)
bug(
    "dropout-of-neighbours-together",
    "dropping.py",
    "[: x.numel()].view(x.shape) >=",
    "[: x.numel()].roll(1).view(x.shape).sort().values >=",
    "test_dropping.py::test_each_alone",
)
bug(
    "dropout-leaves-numbers-as-large-as-they-were",
    "dropping.py",
    ".mul_(STEPS / (STEPS - cut))",
    "",
    "test_dropping.py::test_as_many_are_dropped_as_it_says",
)
