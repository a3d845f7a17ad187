"""Bugs in texts that lie one behind the other, in a layer and in batches."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
LAYER, BATCH, SEEN = "test_packed.py", "test_packing.py", "test_received.py"
ALONE = f"{LAYER}::test_texts_read_as_if_they_were_alone"
SOURCE = f"{LAYER}::test_a_text_reads_its_own_source"
ANY = f"{LAYER}::test_any_lengths_give_what_texts_alone_give"
PAIRS = f"{BATCH}::test_packed_pairs_teach_the_same[1]"
CORE = "backends/varlen.py"
bug(
    "packed-keys-too-many-are-read",
    CORE,
    "if (lengths == longest).all() or (itself and not ahead):",
    "if (lengths == longest).all() or itself:",
    f"{ALONE}[Dot0]",
)
bug(
    "packed-gradient-of-what-nobody-reads",
    CORE,
    "return grad.new_zeros(ctx.slots).index_copy_(0, to, grad), None, None, None, None",
    "return grad.new_ones(ctx.slots).index_copy_(0, to, grad), None, None, None, None",
    f"{ALONE}[Dot0]",
)
bug(
    "packed-tokens-come-back-in-the-order-of-groups",
    CORE,
    "back[torch.from_numpy(order)].to(device)",
    "back.to(device)",
    f"{ALONE}[Dot0]",
)
bug(
    "packed-rows-begin-where-the-first-does",
    CORE,
    "begins += [n * tokens.count + before",
    "begins += [before",
    f"{ALONE}[Dot0]",
)
bug(
    "packed-texts-read-the-next-source",
    CORE,
    "row = (*row, *[0] * len(other))[: len(other)]",
    "row = (*row[1:], *[0] * len(other))[: len(other)]",
    f"{SOURCE}[Dot0]",
)
bug(
    "packed-a-source-is-as-long-as-its-text",
    CORE,
    "return Plan(tuple(groups), slots, slots if itself else _slots(keys, chosen, told))",
    "return Plan(tuple(groups), slots, slots)",
    f"{SOURCE}[Dot0]",
)
bug(
    "packed-factors-of-the-row",
    CORE,
    "x = plan.queries.taken(asked.x_BTD) if asks else before",
    "x = [asked.x_BTD] * len(own[0])",
    f"{ALONE}[Dynamic0]",
)
bug(
    "packed-groups-of-any-length",
    CORE,
    "> max(SPARE, SLACK * more)",
    "> max(SPARE, 4 * SLACK * more)",
    f"{LAYER}::test_little_is_formed_that_nobody_reads",
)
bug(
    "packed-one-plan-for-all-patterns",
    CORE,
    'f"groups, {ahead}"',
    '"groups"',
    f"{LAYER}::test_a_plan_is_made_once_for_all_layers",
)
bug(
    "packed-weights-of-groups-are-shown",
    "module.py",
    "return seen and packed.apart(at, told, x.shape[0])",
    "return packed.apart(at, told, x.shape[0])",
    f"{LAYER}::test_texts_run_apart_where_they_are_known_and_nobody_looks_at_the_whole",
)
bug(
    "tokens-lose-their-lengths-on-the-way",
    "tokens.py",
    "return Tokens(position, segment, self.start, checked=True, lengths=self.lengths)",
    "return Tokens(position, segment, self.start, checked=True)",
    f"{LAYER}::test_some_rows_and_another_device_keep_the_lengths",
)
bug(
    "tokens-of-some-rows-with-all-lengths",
    "tokens.py",
    "lengths = None if self.lengths is None else self.lengths[own]",
    "lengths = self.lengths",
    f"{LAYER}::test_some_rows_and_another_device_keep_the_lengths",
)
bug(
    "packing-labels-of-the-first-places",
    "data/translation.py",
    "labels = batch.labels.flatten()[places]",
    "labels = batch.labels.flatten()[: len(places)]",
    PAIRS,
)
bug(
    "packing-asks-of-padding",
    "data/translation.py",
    "if int((labels != IGNORED).sum()) != int((batch.labels != IGNORED).sum()):",
    "if not labels.numel():",
    f"{BATCH}::test_what_cannot_be_packed_says_why",
)
bug(
    "packing-texts-from-anywhere",
    "data/translation.py",
    "if not (np.array_equal(np.repeat(texts, lengths, 0), which) and np.array_equal(inside, position[places])):",
    "if not np.array_equal(np.repeat(texts, lengths, 0), which):",
    f"{BATCH}::test_what_cannot_be_packed_says_why",
)
bug(
    "packing-measures-the-row",
    "training/evaluation.py",
    "return row.unpacked(path(row.batch.to(self.device)))",
    "return path(row.batch.to(self.device))",
    f"{BATCH}::test_what_is_measured_is_the_same[text]",
)
bug(
    "packing-whatever-it-takes",
    "training/train_step.py",
    '    if took < seconds * (1 - WORTH):\n        told = f"packed',
    '    if took < seconds:\n        told = f"packed',
    f"{BATCH}::test_rows_are_packed_where_that_is_faster",
)
bug(
    "received-at-the-first-keys",
    "head_analysis/weight_bands.py",
    "keys = slice(block.first, block.first + block.w_HTS.shape[2])",
    "keys = slice(0, block.w_HTS.shape[2])",
    f"{SEEN}::test_columns_are_those_of_all_weights",
)
