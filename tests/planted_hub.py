"""Bugs in what reads and writes models as others keep them."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
HUB, C, BOTH, ON = "test_hub.py", "test_llama2c.py", "anchors/test_hub.py", "test_hub_training.py"
SAME = f"{BOTH}::test_a_folder_of_transformers_says_the_same_here"
BACK = f"{BOTH}::test_what_was_read_is_written_as_it_was"
HARM = f"{HUB}::test_a_harmed_folder_is_refused_in_one_line"
INDEX = f"{HUB}::test_a_wrong_index_is_refused_in_one_line"
UNSAID = f"{HUB}::test_what_no_format_says_is_refused_by_the_first_difference"
CUT = f"{C}::test_text_is_cut_as_the_definition_cuts_it"
FILE = f"{C}::test_a_harmed_file_of_llama2c_is_refused_in_one_line"
bug(
    "hub-gpt2-keys-are-queries",
    "families/gpt2.py",
    '"decoder.{layer}.attention.project.k": Slot(MATRIX, "source (qkv kv dim)", {"qkv": 1}, FUSED),',
    '"decoder.{layer}.attention.project.k": Slot(MATRIX, "source (qkv kv dim)", {"qkv": 0}, FUSED),',
    f"{SAME}[gpt2]",
    f"{HUB}::test_every_family_that_is_described_is_read[gpt2]",
)
bug(
    "hub-gpt2-output-lies-as-ours",
    "families/gpt2.py",
    'Slot(".h.{layer}.attn.c_proj.weight", "(out vdim) model")',
    'Slot(".h.{layer}.attn.c_proj.weight", "model (out vdim)")',
    f"{SAME}[gpt2]",
)
bug(
    "hub-gates-behind-ups",
    "families/gpt_oss.py",
    'GATE, UP = ({"side": 0}, {"side": 2}), ({"side": 1}, {"side": 2})',
    'UP, GATE = ({"side": 0}, {"side": 2}), ({"side": 1}, {"side": 2})',
    f"{SAME}[gpt-oss]",
)
bug(
    "hub-second-of-two-begins-at-nought",
    "families/weight_names.py",
    "before = sum(self.sizes[part] for part in parts[: parts.index(place)])",
    "before = 0 * sum(self.sizes[part] for part in parts[: parts.index(place)])",
    f"{HUB}::test_a_place_in_a_fused_tensor_is_what_slicing_gives",
    f"{SAME}[deepseek]",
)
bug(
    "hub-pairs-lie-as-halves",
    "families/llama.py",
    '"{layer}.wk", "(kv pair side) source"',
    '"{layer}.wk", "(kv side pair) source"',
    f"{C}::test_a_file_of_llama2c_says_what_its_definition_says[False]",
)
bug(
    "hub-ups-are-gates",
    "families/llama.py",
    '"decoder.{layer}.feed.up": "{layer}.w3",\n',
    '"decoder.{layer}.feed.up": "{layer}.w1",\n',
    f"{C}::test_a_file_of_llama2c_says_what_its_definition_says[True]",
)
bug(
    "hub-gemma-norms-of-llama",
    "families/gemma.py",
    "slots={**LLAMA.slots, **NORMS}",
    "slots={**NORMS, **LLAMA.slots}",
    f"{SAME}[gemma2]",
)
bug(
    "hub-extra-tensors-are-let-be",
    "hub/checkpoint_weights.py",
    "if wanted is None and not names.ignores(name):",
    "if wanted is None and not names.ignores(name) and False:",
    f"{HARM}[extra]",
    f"{HARM}[layers]",
)
bug(
    "hub-shapes-are-not-looked-at",
    "hub/checkpoint_weights.py",
    "elif wanted and kind.shape != wanted[0].shape:",
    "elif wanted and sum(kind.shape) != sum(wanted[0].shape):",
    f"{HARM}[transposed]",
)
bug(
    "hub-a-second-table-is-not-compared",
    "hub/checkpoint_weights.py",
    "if not torch.equal(theirs, ours):",
    "if theirs.shape != ours.shape:",
    f"{HARM}[untied]",
)
bug(
    "hub-dtypes-are-mixed",
    "hub/checkpoint_weights.py",
    "if len(several) > 1:",
    "if len(several) > 2:",
    f"{HARM}[mixed]",
)
bug(
    "hub-an-index-may-point-outside",
    "hub/checkpoint_weights.py",
    'if Path(file).name != file or not file.endswith(".safetensors")]',
    'if not file.endswith(".safetensors")]',
    f"{INDEX}[outside]",
)
bug(
    "hub-what-an-index-leaves-out",
    "hub/checkpoint_weights.py",
    "for name in sorted(named ^ set(held)):",
    "for name in sorted(named - set(held)):",
    f"{INDEX}[unnamed]",
)
bug(
    "hub-a-table-has-one-name",
    "families/weight_names.py",
    "for name in (path, *twins) if name in names",
    "for name in (path,) if name in names",
    f"{HUB}::test_a_tied_head_may_be_there_or_not",
)
bug(
    "hub-masks-of-old-files",
    "families/gpt2.py",
    r'ignored=(r"(^|\.)attn\.(bias|masked_bias)$",),',
    r'ignored=(r"\.attn\.masked_bias$",),',
    f"{HUB}::test_names_of_other_times_are_read",
)
bug(
    "hub-a-difference-is-let-pass",
    "families/config_writer.py",
    "    elif one != other:\n",
    '    elif one != other and "pairs" not in where:\n',
    f"{UNSAID}[pairs]",
)
bug(
    "hub-layers-beyond-are-not-compared",
    "families/config_writer.py",
    "        if len(items) != len(others):\n",
    "        if len(items) > len(others):\n",
    f"{UNSAID}[modifier]",
)
bug(
    "hub-yarn-rounds-its-ramp",
    "families/attention_config.py",
    '"truncate": scaling.ramp != "exact"}',
    '"truncate": scaling.ramp == "exact"}',
    f"{BOTH}::test_a_model_of_ours_is_read_by_transformers[llama]",
)
bug(
    "hub-a-llama-that-transformers-refuses",
    "families/llama.py",
    'if name == "llama" and stack.model % heads.q:',
    'if name == "llama" and stack.model % heads.q > 99:',
    f"{BOTH}::test_a_model_of_ours_is_read_by_transformers[mistral]",
)
bug(
    "hub-a-full-folder-is-written-over",
    "hub/model_export.py",
    "if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):",
    "if folder.exists() and not folder.is_dir():",
    f"{HUB}::test_nothing_is_written_over",
)
bug(
    "hub-a-failed-folder-stays",
    "hub/model_export.py",
    "        shutil.rmtree(fresh, ignore_errors=True)\n",
    "        pass\n",
    f"{HUB}::test_a_disk_that_fails_leaves_no_half_folder[write]",
)
bug(
    "hub-the-tokenizer-is-made-anew",
    "hub/model_export.py",
    '{"tokenizer_class": "PreTrainedTokenizerFast", ',
    '{"tokenizer_class": "LlamaTokenizer", ',
    f"{BOTH}::test_transformers_makes_no_tokenizer_of_its_own",
)
bug(
    "hub-ids-of-other-tokenizers",
    "hub/tokenizer_files.py",
    "return tuple(one for one in ids if 0 <= one < rows)",
    "return tuple(one for one in ids if 0 <= one <= rows)",
    f"{BOTH}::test_what_a_folder_says_of_use_is_read",
)
bug(
    "hub-the-last-score-first",
    "hub/llama2c.py",
    "key=lambda piece: -piece.score",
    "key=lambda piece: piece.score",
    CUT,
)
bug(
    "hub-no-space-before-the-first-word",
    "hub/llama2c.py",
    '    tokenizer.normalizer = normalizers.Prepend(" ")\n',
    "",
    CUT,
)
bug(
    "hub-unknown-characters-are-unknown",
    "hub/llama2c.py",
    "            byte_fallback=True,\n",
    "            byte_fallback=False,\n",
    CUT,
)
bug(
    "hub-angles-are-not-looked-at",
    "hub/llama2c.py",
    "if not bool(((tensor - wanted).abs() < ROUNDING).all()):",
    "if bool(((tensor - wanted).abs() > 3).any()):",
    f"{FILE}[angles]",
    f"{FILE}[not numbers]",
)
bug(
    "hub-pickles-by-their-first-byte",
    "hub/llama2c.py",
    "    if header.possible and size == header.bytes:\n        return header\n",
    "    if header.possible and size == header.bytes and not first.startswith(PICKLES):\n        return header\n",
    f"{C}::test_sizes_that_begin_like_a_pickle_are_read",
)
bug(
    "hub-training-begins-afresh",
    "cli/train.py",
    "return read(path) if path.suffix in DESCRIBED else _weights(path, task, recipe)",
    "return read(path)",
    f"{ON}::test_a_folder_of_transformers_is_gone_on_with[0-dtype0]",
)
bug(
    "hub-a-text-in-other-tokens",
    "cli/train.py",
    "return replace(task, tokens=str(path)) if isinstance(task, Text) and path.is_file() else task",
    "return task",
    f"{ON}::test_a_folder_of_transformers_is_gone_on_with[0-dtype0]",
)
bug(
    "hub-any-table-may-be-wider",
    "training/loss.py",
    "not same_words(task.tokenizer, brought):",
    "brought is None:",
    f"{ON}::test_a_table_may_be_wider_than_its_own_tokenizer_alone",
)
