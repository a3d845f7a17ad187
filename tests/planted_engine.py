"""Bugs in what answers many requests at once."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
PAGES = "test_pages.py"
ENGINE = "test_engine.py"
REQUESTS = "test_requests.py"
bug(
    "pages-that-are-known-are-handed-out-first",
    "cache/block_table.py",
    "self._free.move_to_end(page, last=page in self._names)",
    "self._free.move_to_end(page, last=False)",
    f"{PAGES}::test_pages_without_a_name_are_handed_out_first_then_the_longest_free",
)
bug(
    "pages-handed-out-anew-are-still-found",
    "cache/block_table.py",
    "            del self._named[self._names.pop(page)]",
    "            self._names.pop(page)",
    f"{PAGES}::test_pages_without_a_name_are_handed_out_first_then_the_longest_free",
)
bug(
    "pages-held-again-stay-free",
    "cache/block_table.py",
    "        self._free.pop(page, None)\n",
    "",
    f"{PAGES}::test_a_page_that_was_found_again_is_not_handed_out",
)
bug(
    "pages-a-window-gives-back-one-too-early",
    "cache/block_table.py",
    "(length - self.last + 1) // self.page",
    "(length - self.last + 2) // self.page",
    f"{PAGES}::test_pages_read_are_those_of_tokens_read",
)
bug(
    "pages-need-forgets-the-chunk",
    "cache/block_table.py",
    "latest = self.last - 1 + min(chunk, length)",
    "latest = self.last",
    f"{PAGES}::test_pages_read_are_those_of_tokens_read",
)
bug(
    "pages-shared-ones-are-written-to",
    "cache/block_table.py",
    "        return self.pages.holders(page) > 1",
    "        return self.pages.holders(page) > 2",
    f"{PAGES}::test_rows_that_part_copy_what_they_write",
)
bug(
    "pages-are-known-by-their-own-ids-alone",
    "cache/block_table.py",
    "hashlib.sha256(before + array",
    "hashlib.sha256(array",
    f"{PAGES}::test_what_is_shared_follows_from_all_ids_before_it",
)
bug(
    "pages-begin-alike-whatever-the-source",
    "cache/block_table.py",
    "row.known[-1] if row.known else row.root",
    'row.known[-1] if row.known else b""',
    f"{ENGINE}::test_a_source_is_part_of_what_a_beginning_follows_from",
)
bug(
    "pages-all-of-a-prompt-may-be-shared",
    "cache/block_table.py",
    "most = (len(ids) - 1) // self._unit * self._unit",
    "most = len(ids) // self._unit * self._unit",
    f"{PAGES}::test_an_opening_is_shared_as_a_whole",
)
bug(
    "pages-an-opening-is-shared-in-part",
    "cache/block_table.py",
    "ends = range(most, max(opening, 1) - 1, -self._unit)",
    "ends = range(most, 0, -self._unit)",
    f"{PAGES}::test_an_opening_is_shared_as_a_whole",
)
bug(
    "pages-shared-windows-count-once",
    "cache/block_table.py",
    "total += sum(times > 1 for times in held.values())",
    "total += len(held) - held.total()",
    f"{PAGES}::test_what_is_pledged_is_never_overdrawn",
)
bug(
    "pages-what-was-there-before-is-read",
    "cache/paged_batch.py",
    "        if changes.emptied:\n",
    "        if not changes:\n",
    f"{PAGES}::test_a_row_sees_nothing_of_who_had_its_pages_before",
)
bug(
    "pages-slots-of-a-window-stand-from-nought",
    "cache/paged_batch.py",
    "[*[n * keep.page for n in t], *",
    "[*[n * keep.page for n in range(len(t))], *",
    f"{PAGES}::test_chunks_with_padding",
)
bug(
    "pages-heads-lie-in-the-order-of-tokens",
    "cache/paged_cache.py",
    "slots = found.view(rows, place.heads, pages * tokens, place.width).transpose(1, 2)",
    "slots = found.view(rows, pages * tokens, place.heads, place.width)",
    f"{PAGES}::test_the_cache_says_where_tokens_stand",
)
bug(
    "engine-states-are-not-kept",
    "serving/kv_memory.py",
    "                kept[call.slots] = cache.state[name]",
    "                kept[call.slots] = kept[call.slots]",
    f"{ENGINE}::test_logits_are_those_of_one_pass[linear]",
)
bug(
    "engine-a-state-is-left-to-the-next",
    "serving/kv_memory.py",
    "                held[place.slot] = 0",
    "                held[place.slot] *= 1",
    f"{ENGINE}::test_logits_are_those_of_one_pass[linear]",
)
bug(
    "engine-a-call-that-fails-has-happened",
    "serving/model_runner.py",
    "                row.length = length\n",
    "                pass\n",
    f"{ENGINE}::test_an_interrupted_step_has_not_happened",
)
bug(
    "engine-all-fail-with-one",
    "serving/model_runner.py",
    "            if len(parts) == 1:\n                parts[0][0].fail(error)\n                return\n",
    "            for request, _ in parts:\n                request.fail(error)\n            return\n",
    f"{ENGINE}::test_whoever_breaks_a_call_is_found_and_the_others_go_on",
)
bug(
    "engine-nan-is-a-token",
    "serving/model_runner.py",
    "            if broken[n]:\n",
    "            if not n and broken[n]:\n",
    f"{ENGINE}::test_who_fails_fails_alone",
)
bug(
    "engine-lets-in-whoever-comes",
    "serving/kv_memory.py",
    "<= self.pages\n\n    def enter",
    "<= 2 * self.pages\n\n    def enter",
    f"{ENGINE}::test_the_budget_is_kept_and_what_waits_is_let_in_when_pages_are_free",
)
bug(
    "engine-short-ones-pass-for-ever",
    "serving/scheduler.py",
    " or oldest.overtaken >= batching.patience",
    "",
    f"{ENGINE}::test_short_ones_overtake_but_nobody_waits_for_ever",
)
bug(
    "engine-reads-alike-beginnings-at-once",
    "serving/model_runner.py",
    "                ahead |= {known} if known else set()\n",
    "",
    f"{ENGINE}::test_beginnings_are_read_once",
)
bug(
    "engine-what-is-cancelled-waits-for-a-step",
    "serving/engine.py",
    "            if not self._driving:\n                self._sweep()\n",
    "",
    f"{ENGINE}::test_what_is_cancelled_is_free_at_once",
)
bug(
    "engine-nobody-hears-of-a-failing-thread",
    "serving/engine.py",
    "                request.fail(error)\n            self._sweep()\n            self._news.notify_all()\n",
    "                pass\n            self._sweep()\n            self._news.notify_all()\n",
    f"{ENGINE}::test_a_thread_that_fails_ends_what_waits_for_it",
)
bug(
    "engine-a-window-goes-on-one-token-late",
    "serving/model_runner.py",
    "len(request.context) > self.longest:",
    "len(request.context) > self.longest + 1:",
    f"{ENGINE}::test_a_window_goes_on_beyond_the_last_position",
)
bug(
    "requests-all-draw-alike",
    "cli/run/requests.py",
    "Numbers(self.seed, number - 1)",
    "Numbers(self.seed, 0)",
    f"{REQUESTS}::test_lines_are_answered_as_alone",
)
bug(
    "requests-95-of-100-is-the-highest",
    "serving/metrics.py",
    "told[-(-len(told) * share // 100) - 1] for share in (50, 95)",
    "told[-(-len(told) * share // 100) - 1] for share in (50, 100)",
    f"{REQUESTS}::test_what_half_and_95_of_100_do_not_exceed",
)
bug(
    "requests-prompts-cost-nothing",
    "serving/metrics.py",
    "    if step.prompts:\n",
    "    if step.prompts < 0:\n",
    f"{REQUESTS}::test_the_prediction_is_the_price_of_every_step",
)
