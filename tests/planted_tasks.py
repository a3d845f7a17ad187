"""Bugs in the tasks that are made in code."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
TASKS, TRUTH, DATES = "test_tasks.py::", "test_task_truth.py::", "test_dates.py::"
bug(
    "draws-key-without-seed",
    "draws.py",
    "return philox(counter, (self.seed & int(LOW), self.seed >> 32))",
    "return philox(counter, (self.seed & int(LOW), 0))",
    f"{TASKS}test_streams_do_not_repeat_nor_meet",
)
bug(
    "draws-nine-rounds",
    "draws.py",
    "ROUNDS = 10",
    "ROUNDS = 9",
    f"{TASKS}test_random_words_are_those_that_their_authors_publish",
)
bug(
    "draws-floyd-takes-what-was-drawn",
    "draws.py",
    "drawn[again, place] = limit - count + place",
    "drawn[again, place] = place",
    f"{TASKS}test_draws_are_even",
)
bug(
    "generated-first-attempt-always",
    "data/synthetic_task.py",
    "taken = np.flatnonzero(found) * ahead + good.argmax(1)[found]",
    "taken = np.flatnonzero(found) * ahead",
    f"{TASKS}test_splits_share_no_example",
)
bug(
    "generated-splits-by-seed-alone",
    "data/synthetic_task.py",
    'good = (splits(drawn["content"]) == SPLITS.index(split)) & drawn.pop("fits", True)',
    'good = (splits(drawn["content"]) >= 0) & drawn.pop("fits", True)',
    f"{TASKS}test_small_tasks_use_all_that_there_is",
)
bug(
    "generated-rows-by-place-in-batch",
    "data/synthetic_task.py",
    "return self.show(self._drawn(np.arange(first, first + size), split))",
    "return self.show(self._drawn(np.arange(size) + index, split))",
    f"{TASKS}test_a_batch_is_a_function_of_its_number",
)
bug(
    "generated-marks-without-place",
    "data/synthetic_task.py",
    "mixed = _mixed(_mixed(content.astype(np.uint64) + place) + place)",
    "mixed = _mixed(_mixed(content.astype(np.uint64)))",
    f"{TASKS}test_marks_see_order_and_length_but_not_padding",
)
bug(
    "recall-slots-with-plain-power",
    "data/associative_recall.py",
    "/ place ** (self.power - 1)",
    "/ place**self.power",
    f"{TRUTH}test_recall_takes_slots_by_the_power_law_without_replacement",
)
bug(
    "recall-values-among-keys",
    "data/associative_recall.py",
    "values = draws.distinct(self.vocabulary - half, most) + half",
    "values = draws.distinct(self.vocabulary - half, most) + 1",
    f"{TRUTH}test_recall_wants_the_value_of_each_key",
)
bug(
    "copy-scattered-out-of-order",
    "data/copy_task.py",
    'return (rank >= block[:, None]).argsort(1, kind="stable")',
    'return rank.argsort(1, kind="stable")',
    f"{TRUTH}test_copy_wants_the_block_again",
)
bug(
    "markov-bigram-counts-ahead",
    "data/markov_chains.py",
    "counts[rows, x[:, t - 1], x[:, t]] += 1",
    "counts[rows, x[:, t], x[:, t - 1]] += 1",
    f"{TRUTH}test_markov_knows_the_best_guess",
)
bug(
    "markov-excess-the-other-way-round",
    "data/markov_chains.py",
    "excess[:, 1:] = (best * (best.log() - guess[:, 1:, : self.symbols])).sum(-1)",
    "excess[:, 1:] = (guess[:, 1:, : self.symbols].exp() * (guess[:, 1:, : self.symbols] - best.log())).sum(-1)",
    f"{TRUTH}test_markov_measures_nats_above_the_best_guess",
)
bug(
    "group-right-factor-first",
    "data/group_product.py",
    "products = moves[np.arange(len(moves))[None, :, None], moves[:, None]]",
    "products = moves[np.arange(len(moves))[:, None, None], moves[None, :]]",
    f"{TRUTH}test_permutations_multiply_as_sympys",
)
bug(
    "lookup2-asks-the-same-entity",
    "data/two_key_lookup.py",
    "one += one >= np.take_along_axis(asked, other, 1)  # any entity but the other",
    "one += 0 * other",
    f"{TRUTH}test_lookup2_wants_what_the_facts_say",
)
bug(
    "listops-upper-median",
    "data/listops.py",
    "middle = (ranked[first + (count - 1) // 2] + ranked[first + count // 2]) // 2",
    "middle = ranked[first + count // 2]",
    f"{TRUTH}test_listops_wants_the_value",
)
bug(
    "listops-one-argument",
    "data/listops.py",
    "many = np.where(operator, 2 + _below(count, arguments - 1), 0)",
    "many = np.where(operator, 1 + _below(count, arguments), 0)",
    f"{TRUTH}test_listops_draws_as_the_arena_does",
)
bug(
    "graph-one-step-late",
    "data/graph_distance.py",
    'labels = self.distances[drawn["sources"]].min(1).clip(max=self.reach + 1)',
    'labels = self.distances[drawn["sources"]].max(1).clip(max=self.reach + 1)',
    f"{TRUTH}test_graph_wants_how_far_the_nearest_source_is",
)
bug(
    "dates-zeros-cross-the-myriad",
    "data/date_translation.py",
    'out, zeros = [*out, ("万", means)], ()',
    'out, zeros = [*out, ("万", means)], zeros',
    f"{DATES}test_numerals_are_as_written_otherwise_and_read_back",
)
bug(
    "dates-two-before-hundreds",
    "data/date_translation.py",
    'said[1][0] in "千万"',
    'said[1][0] in "百千万"',
    f"{DATES}test_amounts_in_chinese",
)
bug(
    "dates-held-out-by-currency",
    "data/date_translation.py",
    "content = np.stack([subject, np.abs(number), number < 0], 1).astype(np.int64)",
    "content = np.stack([subject, np.abs(number), currency], 1).astype(np.int64)",
    f"{DATES}test_what_is_held_out_is_held_out_in_every_language",
)
bug(
    "dates-links-forget-the-tag",
    "data/date_translation.py",
    "for place, (_, means) in enumerate(source, 1):",
    "for place, (_, means) in enumerate(source):",
    f"{DATES}test_linked_tokens_mean_the_same",
)
bug(
    "dates-zero-stands-for-one-zero",
    "data/date_translation.py",
    "zeros += means",
    "zeros = means",
    f"{DATES}test_what_chinese_says_of_a_number_is_linked",
)
