"""Bugs in what reads users' own data."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
TEXT, PAIRS, FILES, ERRORS = ("test_data_text.py", "test_data_pairs.py", "test_data_files.py", "test_data_errors.py")

bug(
    "text-crops-reach-into-what-is-held-out",
    "data/language_modelling.py",
    "integers(span.start, span.stop - self.length, size)",
    "integers(span.start, span.stop, size)",
    f"{TEXT}::test_training_reads_nothing_of_what_is_held_out",
)
bug(
    "text-rows-overlap-by-one",
    "data/language_modelling.py",
    "asked = [first + n * self.length for n in",
    "asked = [first + n * (self.length - 1) for n in",
    f"{TEXT}::test_held_out_parts_are_the_end_of_the_text_and_each_of_their_bytes_is_asked_once",
)
bug(
    "text-first-held-out-token-is-not-asked",
    "data/language_modelling.py",
    "return max(1, self.spans[split].start)",
    "return 1 + self.spans[split].start",
    f"{TEXT}::test_held_out_parts_are_the_end_of_the_text_and_each_of_their_bytes_is_asked_once",
)
bug(
    "text-pieces-learnt-from-all-of-it",
    "data/language_modelling.py",
    "return learned(blocks(raw[:first]), self.vocab)",
    "return learned(blocks(raw), self.vocab)",
    f"{TEXT}::test_pieces_are_learnt_from_the_part_to_train_on_alone",
)
bug(
    "text-split-inside-a-character",
    "data/language_modelling.py",
    "while at < len(raw) and raw[at] & 0xC0 == 0x80:",
    "while at < len(raw) and raw[at] & 0xC0 == 0xC0:",
    f"{TEXT}::test_no_character_is_cut_in_two",
)
bug(
    "text-bits-over-tokens",
    "data/language_modelling.py",
    "count = int(self._widths[labels.cpu()].sum())",
    "count = len(labels)",
    f"{TEXT}::test_bits_for_each_byte_by_hand",
)
bug(
    "text-special-tokens-out-of-text",
    "data/vocabulary.py",
    "tokenizer.encode_special_tokens = True",
    "tokenizer.encode_special_tokens = False",
    f"{TEXT}::test_marks_of_a_vocabulary_that_stand_in_a_text_are_text",
)
bug(
    "text-a-tokenizer-cuts-it-off",
    "data/vocabulary.py",
    "    tokenizer.no_truncation()\n",
    "",
    f"{TEXT}::test_a_tokenizer_from_elsewhere_is_used_as_it_is",
)
bug(
    "text-crops-know-no-seed",
    "data/language_modelling.py",
    "starts = drawn(seed, index)",
    "starts = drawn(0, index)",
    f"{TEXT}::test_a_batch_follows_from_its_numbers",
)
bug(
    "data-a-changed-file-is-not-read-again",
    "data/file_task.py",
    'if name != "seed"), stamps',
    'if name != "seed"), len(stamps)',
    f"{TEXT}::test_tasks_that_are_alike_read_once_and_a_changed_file_is_read_again",
)
bug(
    "text-first-batches-are-the-beginning",
    "data/example_order.py",
    "return range(index % batches, count, batches)",
    "return range(index % batches * size, min(index % batches * size + size, count))",
    f"{TEXT}::test_a_few_batches_are_a_sample_of_the_whole_part",
)
bug(
    "pairs-target-of-another-row",
    "data/translation.py",
    "[[[self.start, *targets.ids[n]] for n in row] for row in rows]",
    "[[[self.start, *targets.ids[n]] for n in row[::-1]] for row in rows[::-1]]",
    f"{PAIRS}::test_sentences_stay_beside_their_translation_and_an_epoch_has_each_once[bucketed]",
)
bug(
    "pairs-packed-rows-mix-segments",
    "data/translation.py",
    "[[[self.start, *targets.ids[n]] for n in row] for row in rows]",
    "[[[self.start, *targets.ids[n]] for n in row[::-1]] for row in rows]",
    f"{PAIRS}::test_sentences_stay_beside_their_translation_and_an_epoch_has_each_once[packed]",
)
bug(
    "pairs-sources-in-two-splits",
    "data/translation.py",
    "found = members([plain(pair.source) for pair in whole], valid, test)",
    "found = members([str(n) for n in range(len(whole))], valid, test)",
    f"{PAIRS}::test_sources_that_are_nearly_alike_stay_in_one_split",
)
bug(
    "pairs-own-files-leak",
    "data/translation.py",
    "kept = [pair for pair in whole if plain(pair.source) not in judged]",
    "kept = [pair for pair in whole if pair.source not in judged]",
    f"{PAIRS}::test_files_of_their_own_and_what_is_left_out_is_said",
)
bug(
    "pairs-pieces-learnt-from-all",
    "data/translation.py",
    'self.vocabularies = _vocabularies(self.pairs["train"], making)',
    "self.vocabularies = _vocabularies([pair for own in self.pairs.values() for pair in own], making)",
    f"{PAIRS}::test_pieces_are_learnt_from_pairs_to_train_on",
)
bug(
    "pairs-a-row-runs-over-on-one-side",
    "data/example_order.py",
    "fits = np.all(room >= need, axis=1)",
    "fits = np.any(room >= need, axis=1)",
    f"{PAIRS}::test_rows_are_packed_without_overflowing_either_side",
)
bug(
    "pairs-epochs-alike",
    "data/example_order.py",
    "epoch, at = divmod(index, self.batches)",
    "epoch, at = 0, index % self.batches",
    f"{PAIRS}::test_epochs_differ_in_order_and_batches_follow_from_their_numbers[bucketed]",
)
bug(
    "pairs-short-sentences-are-judged-first",
    "data/example_order.py",
    "chosen = drawn(0).permutation(len(self.units))[at",
    "chosen = np.arange(len(self.units))[at",
    f"{PAIRS}::test_a_few_held_out_batches_have_short_and_long_sentences",
)
bug(
    "images-another-epoch-is-the-same",
    "data/example_order.py",
    "found = drawn(seed, epoch).permutation(self.count)",
    "found = drawn(seed, 0).permutation(self.count)",
    f"{FILES}::test_epochs_of_pictures_differ_and_have_each_once",
)
bug(
    "images-labels-of-others",
    "data/labelled_examples.py",
    "self._asked([self.labels[n] for n in chosen])",
    "self._asked([self.labels[n] for n in sorted(chosen)])",
    f"{FILES}::test_pictures_stay_with_their_labels_at_mean_0_and_deviation_1[as_idx]",
)
bug(
    "idx-little-end-first",
    "data/image_arrays.py",
    '0x0B: ">i2"',
    '0x0B: "<i2"',
    f"{FILES}::test_idx_files_are_what_was_packed",
)
bug(
    "tokens-only-the-first-piece-is-looked-at",
    "data/token_files.py",
    "for at in range(0, len(ids), SCANNED):",
    "for at in range(0, min(len(ids), SCANNED), SCANNED):",
    f"{ERRORS}::test_one_line_says_what_is_wrong_where_and_what_to_do",
)
bug(
    "reading-offset-of-a-later-piece",
    "data/text_files.py",
    "begun = fed - len(decoder.getstate()[0])",
    "begun = 0 * fed - len(decoder.getstate()[0])",
    f"{ERRORS}::test_one_line_says_what_is_wrong_where_and_what_to_do",
)
bug(
    "frames-mean-with-padding",
    "data/time_series.py",
    "row[: len(self.spoken[n])] = (self.spoken[n] - self.mean) / self.deviation",
    "row[: len(self.spoken[n])] = self.spoken[n] / self.deviation",
    f"{FILES}::test_frames_stay_with_their_labels",
)
