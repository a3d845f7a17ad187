"""Bugs in how runs are timed, held to each other and to the machine, and in what follows from seconds that grow."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
BENCH, SCALING, STEPPED = "test_benching.py", "test_scaling.py", "test_ctranslated.py"
bug(
    "bench-a-sample-too-short",
    "bench/benchmark_case.py",
    "math.ceil(self.sample / seconds)",
    "math.floor(self.sample / seconds)",
    f"{BENCH}::test_a_sample_lasts_long_enough_and_says_seconds_of_one_call",
)
bug(
    "bench-turns-in-one-order",
    "bench/benchmark_case.py",
    "        draw.shuffle(those)\n",
    "",
    f"{BENCH}::test_turns_are_mixed_the_same_way_every_time",
)
bug(
    "bench-the-slow-at-the-end",
    "bench/benchmark_case.py",
    "if (number + 1) * count // rounds > number * count // rounds",
    "if rounds - number <= count",
    f"{BENCH}::test_turns_are_mixed_the_same_way_every_time",
)
bug(
    "bench-collector-stays-off",
    "bench/benchmark_case.py",
    "        if was:\n            gc.enable()",
    "        if not was:\n            gc.enable()",
    f"{BENCH}::test_the_collector_rests_while_runs_are_timed",
)
bug(
    "bench-differences-of-single-numbers",
    "bench/benchmark_case.py",
    "size = float(mine.abs().max())",
    "size = 1.0",
    f"{BENCH}::test_results_are_held_to_their_largest_number",
)
bug(
    "bench-nan-is-the-same",
    "bench/benchmark_case.py",
    "    if not math.isfinite(most):\n        return math.inf\n",
    "",
    f"{BENCH}::test_results_are_held_to_their_largest_number",
)
bug(
    "bench-ratio-upside-down",
    "bench/session.py",
    "reached, spreads = peers[aim.against] / ours,",
    "reached, spreads = ours / peers[aim.against],",
    f"{BENCH}::test_a_row_has_medians_ratios_the_limit_and_verdicts",
)
bug(
    "bench-verdict-on-other-results",
    "bench/session.py",
    "if reached is not None and self.differs:",
    "if reached is not None and aim.against in self.differs:",
    f"{BENCH}::test_other_results_give_no_verdict",
)
bug(
    "bench-spread-of-ours-forgotten",
    "bench/session.py",
    "spreads = {OURS: self.taken[OURS].spread} if OURS in self.taken else {}",
    "spreads: dict[str, float] = {}",
    f"{BENCH}::test_a_loose_spread_gives_no_verdict",
)
bug(
    "bench-the-absent-are-silent",
    "bench/session.py",
    '                self.absent[name] = f"failed: {_said(error)}"\n                continue\n',
    "                continue\n",
    f"{BENCH}::test_who_is_absent_is_named",
)
bug(
    "bench-limit-by-the-shorter",
    "bench/session.py",
    "longest = max(least,",
    "longest = min(least,",
    f"{BENCH}::test_a_limit_is_the_longer_of_reading_and_products",
)
bug(
    "bench-a-buffer-that-fits-the-cache",
    "bench/session.py",
    "return BEYOND * self.last.size",
    "return self.last.size",
    f"{BENCH}::test_the_machine_reads_more_than_its_cache_holds_and_multiplies_in_the_dtype",
)
bug(
    "bench-caches-counted-for-every-processor",
    "bench/session.py",
    'found[f"{level} {shared}"]',
    "found[str(index)]",
    f"{BENCH}::test_the_last_level_is_that_of_all_processors_once",
)
bug(
    "bench-missed-where-one-cannot-be-told",
    "bench/session.py",
    "return None if None in verdicts or not verdicts else True",
    "return True if verdicts else None",
    f"{BENCH}::test_who_is_absent_is_named",
)
bug(
    "bench-interrupts-lose-what-is-done",
    "bench/session.py",
    '                told["interrupted"] = True\n',
    "                raise\n",
    f"{BENCH}::test_an_interrupt_shows_what_is_done",
)
bug(
    "bench-what-is-slow-is-called-once-more",
    "bench/benchmark_case.py",
    "taken[name] += [seconds] if calls[name] == 1 else []",
    "taken[name] += []",
    f"{BENCH}::test_a_call_as_long_as_a_sample_is_one_from_the_first_round_on",
)
bug(
    "bench-the-shortest-of-some-is-a-sample",
    "bench/benchmark_case.py",
    "taken[name] += [seconds] if calls[name] == 1 else []",
    "taken[name] += [seconds]",
    f"{BENCH}::test_a_call_as_long_as_a_sample_is_one_from_the_first_round_on",
)
bug(
    "bench-making-counted-from-the-first-row",
    "bench/runner.py",
    "        gc.collect()\n        begun = how.clock()\n",
    "        gc.collect()\n",
    f"{BENCH}::test_a_row_says_where_its_time_went",
)
bug(
    "bench-drawn-aims-are-at-anybody",
    "bench/benchmark_report.py",
    'those = [one for one in row["aim"] if one["against"] == against]',
    'those = row["aim"]',
    f"{BENCH}::test_aims_are_drawn_and_those_missed_are_seen",
)
bug(
    "bench-drawn-aims-that-are-met-are-missed",
    "bench/benchmark_report.py",
    "if goal.met is False:",
    "if goal.met is not None:",
    f"{BENCH}::test_aims_are_drawn_and_those_missed_are_seen",
)
bug(
    "bench-drawn-for-light-paper-alone",
    "bench/benchmark_report.py",
    "@media (prefers-color-scheme:dark){{{dark}}}",
    "@media (prefers-color-scheme:dark){{{light}}}",
    f"{BENCH}::test_a_drawing_is_for_light_and_for_dark_paper",
)
bug(
    "stepped-rows-go-on-that-nobody-asks",
    "bench/reference_models.py",
    "        return bool(ends)\n",
    "        return bool(ends) and step.batch_id == len(words) - 1\n",
    f"{STEPPED}::test_what_nobody_asks_any_more_ends_at_once",
)
bug(
    "scaling-powers-of-short-calls",
    "bench/runner.py",
    "used = sizes[-max(LEAST, -(-len(sizes) // 2)) :]",
    "used = sizes",
    f"{SCALING}::test_a_power_is_found_and_its_interval_holds_it",
)
bug(
    "scaling-intervals-of-the-normal",
    "bench/runner.py",
    "(STUDENT[free - 1] if free <= len(STUDENT) else NORMAL)",
    "NORMAL",
    f"{SCALING}::test_a_power_is_found_and_its_interval_holds_it",
)
bug(
    "scaling-crossings-half-way",
    "bench/runner.py",
    "share = before / (before + after) if before + after else 0.5",
    "share = 0.5",
    f"{SCALING}::test_crossings_are_between_the_points_where_the_fastest_changes",
)
bug(
    "scaling-a-cache-that-grows",
    "bench/runner.py",
    "self._now = copy.deepcopy(self._full)\n        return",
    "self._now = self._full\n        return",
    f"{SCALING}::test_a_cache_begins_anew",
)
bug(
    "bench-samples-once-whatever-the-spread",
    "bench/benchmark_case.py",
    "        if any(pace.unsettled(Samples(tuple(seconds))) for seconds in taken.values()):",
    "        if not taken:",
    f"{BENCH}::test_who_is_widely_spread_has_all_sampled_as_often_again",
)
bug(
    "bench-samples-again-however-many-there-are",
    "bench/benchmark_case.py",
    "return len(samples.seconds) < self.most and ",
    "return ",
    f"{BENCH}::test_who_is_widely_spread_has_all_sampled_as_often_again",
)
bug(
    "bench-asks-only-linux-for-processors",
    "bench/session.py",
    "    except AttributeError:",
    "    except NotImplementedError:",
    "test_benching.py::test_where_nobody_says_which_processors_all_count",
)
