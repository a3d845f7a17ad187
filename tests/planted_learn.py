"""Bugs in what models learn after they were cut: lessons, uptraining and learned gates."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
UP = "test_uptraining.py::"
GATES = "test_gates.py::"
bug(
    "lesson-padding-is-learned",
    "surgery/distillation_data.py",
    "        return _by_text(each, self.places) * temperature**2\n",
    "        return each.mean(1) * temperature**2\n",
    UP + "test_divergence_and_distance_are_as_defined_and_blind_to_padding",
)
bug(
    "lesson-temperature-not-squared",
    "surgery/distillation_data.py",
    "self.places) * temperature**2",
    "self.places) * temperature",
    UP + "test_divergence_and_distance_are_as_defined_and_blind_to_padding",
)
bug(
    "lesson-all-places-count-alike",
    "surgery/distillation_data.py",
    "return each.masked_fill(~where, 0).sum(1) / where.sum(1).clamp(min=1)",
    "return each.masked_fill(~where, 0).sum(1) * len(where) / where.sum().clamp(min=1)",
    UP + "test_a_lesson_is_worth_what_its_texts_are_alone[gpt2]",
)
bug(
    "lesson-padding-is-text",
    "surgery/distillation_data.py",
    "segment = torch.cat([F.pad(row.segment, gap, value=-1)",
    "segment = torch.cat([F.pad(row.segment, gap, value=0)",
    UP + "test_a_lesson_is_worth_what_its_texts_are_alone[bert]",
    UP + "test_a_lesson_is_worth_what_its_texts_are_alone[label of the mean]",
)
bug(
    "lesson-frames-are-tokens",
    "surgery/distillation_data.py",
    "return x.shape[-2] // patches.high * patches.columns + stack.embedding.first",
    "return x.shape[-2] // patches.high * patches.columns",
    UP + "test_a_lesson_is_worth_what_its_texts_are_alone[frames]",
)
bug(
    "lessons-teach-what-is-held-back",
    "surgery/distillation.py",
    "sorted(mixed[:back]), sorted(mixed[back:])",
    "sorted(mixed[:back]), sorted(mixed)",
    UP + "test_lessons_follow_from_the_seed_and_leave_what_is_held_back",
)
bug(
    "lessons-mask-the-same-every-time",
    "surgery/distillation_data.py",
    "number + turn * len(self.scenes)",
    "number",
    UP + "test_every_time_round_other_tokens_are_masked_and_held_back_ones_stay",
)
bug(
    "uptraining-alpha-for-both",
    "surgery/distillation.py",
    "parts.append((1 - self.alpha) * lesson.losses(said))",
    "parts.append(self.alpha * lesson.losses(said))",
    UP + "test_one_step_is_torchs_own_adamw",
)
bug(
    "uptraining-never-clips",
    "surgery/distillation.py",
    "        if self.how.clip:\n",
    "        if self.how.clip > 1:\n",
    UP + "test_one_step_is_torchs_own_adamw",
)
bug(
    "uptraining-keeps-the-last",
    "surgery/distillation.py",
    "point.held_out < best)",
    "point.held_out > best)",
    UP + "test_what_is_its_teacher_already_is_kept_as_it_was",
)
bug(
    "uptraining-changes-the-student",
    "surgery/distillation.py",
    "net = copied(student, rebuilt(student, {}))",
    "net = copied(student, student)",
    UP + "test_a_model_comes_nearer_to_its_teacher_which_stays[gpt2]",
)
bug(
    "uptraining-draws-from-everybodys-numbers",
    "surgery/distillation.py",
    "with torch.random.fork_rng(cards):",
    "with torch.random.fork_rng(cards, enabled=False):",
    UP + "test_the_same_seed_teaches_the_same_and_torchs_own_numbers_go_on",
    GATES + "test_seeds_repeat",
)
bug(
    "gates-pushed-open",
    "surgery/l0_gates.py",
    "return self.factor * over + self.how.strength",
    "return self.factor * over - self.how.strength",
    GATES + "test_what_joins_the_loss_is_the_method_of_multipliers",
)
bug(
    "gates-keep-the-least-likely",
    "surgery/l0_gates.py",
    "every.sort(key=lambda unit: -chances",
    "every.sort(key=lambda unit: chances",
    GATES + "test_needless_heads_are_found_and_can_be_cut_for_nothing[0]",
    GATES + "test_exactly_as_many_stay_as_were_asked_for[3]",
)
bug(
    "gates-freeze-lets-the-shared-table-learn",
    "surgery/l0_gates.py",
    '*(f"{table}.embedding.tokens" for table in tables if table)',
    "*()",
    GATES + "test_a_table_that_the_decoder_reads_is_frozen_with_it",
)
bug(
    "gates-freeze-lets-the-model-learn",
    "surgery/l0_gates.py",
    '    if freeze == "model":\n        return []\n',
    '    if freeze == "model":\n        freeze = "none"\n',
    GATES + "test_needless_heads_are_found_and_can_be_cut_for_nothing[0]",
)
bug(
    "gates-groups-count-their-heads",
    "surgery/l0_gates.py",
    "firsts = {site: [heads[0] for heads in groups]",
    "firsts = {site: [h for heads in groups for h in heads]",
    GATES + "test_the_count_of_groups_is_of_gates",
)
bug(
    "concrete-of-a-group-cut-with-its-heads",
    "parts/hard_concrete_gate.py",
    'return replace(self, gates=self.sizes(spec).get("gate", 0))',
    "return self",
    "contract/test_axes.py::test_cutting_is_silencing[Concrete4]",
)
