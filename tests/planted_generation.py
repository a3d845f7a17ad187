"""Bugs in generation, in text that comes in pieces, and in `headwise run`."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
GENERATION = "test_generation.py"
TELLING = "test_telling.py"
RUN = "test_run_cli.py"
THEIRS = "anchors/test_generation.py"
OFTEN = f"{GENERATION}::test_tokens_are_drawn_as_often_as_they_are_likely"
EXHAUSTIVE = f"{GENERATION}::test_enough_beams_find_the_best_of_all_answers"
bug(
    "draws-a-stream-without-its-number",
    "draws.py",
    "for part in (SAID, self.number & int(LOW), self.number >> 32)",
    "for part in (SAID, 0, 0)",
    f"{GENERATION}::test_a_stream_goes_on_where_it_was_left",
)
bug(
    "draws-a-stream-begins-anew",
    "draws.py",
    "self._ahead = self._units(self.used - at)",
    "self._ahead = self._units(0)",
    f"{GENERATION}::test_a_stream_goes_on_where_it_was_left",
)
bug(
    "picking-top-p-without-the-one-that-reaches-it",
    "generation/sampling.py",
    "out = ordered.softmax(-1).cumsum(-1) <= 1 - how.top_p",
    "out = ordered.softmax(-1).cumsum(-1) <= 1 - how.top_p + ordered.softmax(-1)",
    f"{OFTEN}[top_p-1.5]",
    f"{THEIRS}::test_what_is_drawn_from_is_theirs[1.0-chosen1]",
)
bug(
    "picking-min-p-of-all",
    "generation/sampling.py",
    "share < how.min_p * share.amax(-1, keepdim=True)",
    "share < how.min_p",
    f"{OFTEN}[min_p-1.5]",
    f"{THEIRS}::test_what_is_drawn_from_is_theirs[1.0-chosen2]",
)
bug(
    "picking-the-penalty-lifts-what-is-unlikely",
    "generation/sampling.py",
    "torch.where(logits < 0, logits * penalty, logits / penalty)",
    "logits / penalty",
    f"{OFTEN}[repetition-1.5]",
)
bug(
    "picking-temperature-behind-the-filters",
    "generation/sampling.py",
    "return drawn(filtered(logits / temperature, how), streams)",
    "return drawn(filtered(logits, how) / temperature, streams)",
    f"{OFTEN}[all-0.6]",
)
bug(
    "picking-rounded-up-to-an-impossible-token",
    "generation/sampling.py",
    "below = torch.minimum(unit * whole, whole.nextafter(torch.zeros_like(whole)))",
    "below = torch.maximum(unit * whole, whole)",
    f"{GENERATION}::test_a_number_that_is_rounded_up_draws_no_impossible_token",
)
bug(
    "course-rows-that-are-over-stay",
    "generation/decoding_state.py",
    "WORTH = 0.75",
    "WORTH = 0.0",
    f"{GENERATION}::test_rows_that_are_over_are_computed_no_longer",
)
bug(
    "course-the-memory-of-another-row",
    "generation/decoding_state.py",
    "self.memory = self.memory.rows(at)",
    "self.memory = self.memory.rows(at.flip(0))",
    f"{GENERATION}::test_a_translator_answers_each_source_as_alone",
)
bug(
    "course-all-rows-forget-with-the-longest",
    "generation/decoding_state.py",
    "[held if held <= longest else self.window or 1 for held in self._held]",
    "[self.window or 1 for held in self._held]",
    f"{GENERATION}::test_a_window_goes_on_beyond_the_last_position",
)
bug(
    "course-the-last-position-is-not-used",
    "generation/decoding_state.py",
    "beyond = prompt + count - 1 - known",
    "beyond = prompt + count - known",
    f"{GENERATION}::test_all_positions_can_be_used",
)
bug(
    "saying-streams-by-place-and-not-by-prompt",
    "generation/generate.py",
    "own = [streams[row] for row in course.rows] if streams else ()",
    "own = streams[: len(course.rows)] if streams else ()",
    f"{GENERATION}::test_rows_draw_on_as_they_would_when_others_end",
)
bug(
    "saying-a-reader-finds-the-model-answering",
    "generation/generate.py",
    '            if kind == "ids":\n                yield from answer.fresh_ids()\n',
    '                if kind == "ids":\n                    yield from answer.fresh_ids()\n'
    '            if kind == "ids":\n                pass\n',
    f"{GENERATION}::test_a_stream_leaves_the_model_as_it_was_between_tokens",
)
bug(
    "beams-decided-by-the-length-so-far",
    "generation/beam_search.py",
    "kindest = self.count if self.how.length_penalty > 0 else len(self.going[0].ids)",
    "kindest = len(self.going[0].ids)",
    f"{EXHAUSTIVE}[decoder-2.5]",
    f"{EXHAUSTIVE}[encoder-decoder-2.5]",
    f"{THEIRS}::test_beams_find_what_theirs_find[gpt2-2.0]",
)
bug(
    "beams-scores-without-the-end",
    "generation/beam_search.py",
    "score = answer.value / len(answer.ids) ** self.how.length_penalty",
    "score = answer.value / max(1, len(answer.ids) - 1) ** self.how.length_penalty",
    f"{EXHAUSTIVE}[decoder-1.0]",
)
bug(
    "beams-nobody-goes-on-behind-an-end",
    "generation/beam_search.py",
    "looked = max(2, 1 + len(self.ends)) * self.how.beams",
    "looked = self.how.beams",
    f"{THEIRS}::test_beams_find_what_theirs_find[gpt2-1.0]",
    f"{THEIRS}::test_beams_find_what_theirs_find[bart-1.0]",
    f"{THEIRS}::test_beams_find_what_theirs_find[llama-1.0]",
)
bug(
    "beams-any-answer-that-ends-is-over",
    "generation/beam_search.py",
    "if rank < self.how.beams:",
    "if rank >= 0:",
    f"{GENERATION}::test_an_answer_that_ends_behind_those_that_go_on_is_none",
)
bug(
    "words-characters-come-in-part",
    "generation/text_output.py",
    "waiting = min(PARTS, len(new) - len(new.rstrip(PART)))",
    "waiting = 0",
    f"{TELLING}::test_a_character_waits_for_its_last_byte",
)
bug(
    "words-every-piece-begins-a-text",
    "generation/text_output.py",
    "whole = self.words.text([*self._settled, *self._open])",
    "whole = self._known + self.words.text(self._open)",
    f"{TELLING}::test_a_text_goes_on_as_it_is_written[sentencepiece]",
)
bug(
    "words-the-unknown-is-read",
    "generation/text_output.py",
    "if self._unknown in found.ids:",
    "if self._unknown is None:",
    f"{TELLING}::test_what_a_tokenizer_does_not_know_is_said[dates]",
)
bug(
    "answers-a-stop-within-one-piece",
    "generation/text_output.py",
    "self._searched = max(self._searched, len(text) - max(map(len, self._stops), default=1) + 1)",
    "self._searched = len(text)",
    f"{TELLING}::test_an_answer_is_the_text_before_the_first_stop",
)
bug(
    "answers-a-stop-is-told-as-it-comes",
    "generation/text_output.py",
    "return len(text) - max(ways, default=0)",
    "return len(text) - 0 * max(ways, default=0)",
    f"{TELLING}::test_an_answer_is_the_text_before_the_first_stop",
)
bug(
    "usage-is-not-saved",
    "models/save_load.py",
    "for name, data in new.items()}, usage)",
    "for name, data in new.items()})",
    f"{TELLING}::test_a_folder_keeps_how_a_model_is_spoken_to",
)
bug(
    "usage-pairs-read-with-the-words-of-the-target",
    "generation/text_output.py",
    "read = written if usage.source_tokenizer is None else Words(usage.source_tokenizer, usage.specials)",
    "read = written",
    f"{TELLING}::test_a_source_is_read_with_its_own_words",
)
bug(
    "run-lines-draw-by-their-place-in-a-batch",
    "cli/run/texts.py",
    "[Stream(self.seed, line.number - 1) for line in lines]",
    "[Stream(self.seed, n) for n, line in enumerate(lines)]",
    f"{RUN}::test_lines_are_answered_in_order_whatever_stands_beside_them[2]",
)
bug(
    "run-a-bad-line-moves-the-others-up",
    "cli/run/texts.py",
    '        if not own:\n            show("" if self.asked.how.best == 1 else f"{line.number}\\t\\t")\n',
    "",
    f"{RUN}::test_a_line_that_cannot_be_read_does_not_stop_the_others",
)
bug(
    "run-pixels-as-they-lie",
    "generation/classification.py",
    "((numbers - mean) / deviation)",
    "(numbers - mean)",
    f"{RUN}::test_images_are_classified_as_in_training",
)
bug(
    "run-all-of-stdin-first",
    "cli/run/inputs.py",
    "lines, size = enumerate(_lines(), 1), 1 if sys.stdin.isatty() else self.batch",
    "lines, size = enumerate(list(_lines()), 1), 1 if sys.stdin.isatty() else self.batch",
    f"{RUN}::test_lines_are_read_as_they_are_answered",
)
