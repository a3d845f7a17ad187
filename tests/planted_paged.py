"""Bugs in pages that are read where they lie."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
PAGED = "test_paged.py"
READ = f"{PAGED}::test_a_row_that_has_ended_reads_nothing"
ENGINE = f"{PAGED}::test_an_engine_whose_layers_read_in_place_gathers_nothing"
SAYS = f"{PAGED}::test_an_engine_says_which_layers_gather"
bug(
    "spans-end-before-the-newest-token",
    "cache/paged_batch.py",
    "self._piece(begins, self.ends)",
    "self._piece(begins, [end - 1 for end in self.ends])",
    f"{READ}[grouped]",
)
bug(
    "spans-of-a-window-begin-with-its-page",
    "cache/paged_batch.py",
    "low = (self._numbers(begins)[:, None] - start).clamp(0, page)",
    "low = torch.zeros_like(start)",
    f"{READ}[window]",
)
bug(
    "spans-of-a-window-begin-one-late",
    "cache/paged_batch.py",
    "max(first, end - last) if last",
    "max(first, end - last + 1) if last",
    f"{READ}[window]",
)
bug(
    "spans-read-some-first-tokens-twice",
    "cache/paged_batch.py",
    "max(first, end - last) if last",
    "max(0, end - last) if last",
    f"{READ}[sinks]",
)
bug(
    "spans-forget-the-first-tokens",
    "cache/paged_batch.py",
    "        if first:\n            pieces.insert",
    "        if first and last is None:\n            pieces.insert",
    f"{READ}[sinks]",
)
bug(
    "columns-of-pages-count-from-the-first-page-that-is-left",
    "cache/paged_batch.py",
    "first = self._numbers([own.start * page for own in numbers])[:, None]\n",
    "first = self._numbers([own.start * page for own in numbers])[:, None] * 0\n",
    f"{READ}[t5 in a window]",
)
bug(
    "rows-that-have-ended-read-on",
    "cache/paged_batch.py",
    "[end if count else 0 for",
    "[end for",
    f"{READ}[grouped]",
)
bug(
    "all-is-read-of-what-some-may-not-read",
    "cache/paged_cache.py",
    "held.placed(whole)",
    "held.placed(True)",
    f"{READ}[gaps]",
)
bug(
    "reach-is-known-once-for-ever",
    "cache/full_visibility.py",
    "        if used > self.known:\n            first",
    "        if not self.known:\n            first",
    f"{PAGED}::test_reach_is_asked_again_where_rows_are_longer",
)
bug(
    "pages-of-latents-are-handed-on",
    "backends/paged_decode.py",
    "    if not job.spec.project.handed:\n",
    "    if not job.spec.project.entry(job.spec):\n",
    f"{PAGED}::test_the_reasons_to_gather",
)
bug(
    "pages-are-read-with-their-tokens-as-heads",
    "cache/paged_cache.py",
    "name: view.transpose(1, 2).unflatten(2, place.shape[:-1])",
    "name: view.flatten(1, 2).unflatten(1, (view.shape[2], view.shape[1]))",
    f"{READ}[grouped]",
)
bug(
    "ceiling-over-what-is-added",
    "backends/ragged_decode.py",
    "cap=0.0 if cap is None else cap.limit",
    "cap=0.0",
    f"{READ}[cap]",
)
bug(
    "who-looks-sees-pages-for-rows",
    "backends/paged_decode.py",
    "held[pages].flatten(1, 2).masked_fill(~keys.live[..., None, None], 0)",
    "held[pages].flatten(1, 2)",
    f"{PAGED}::test_what_is_looked_at_is_gathered_on_the_way",
)
bug(
    "rows-divided-where-nothing-is-gathered",
    "serving/model_runner.py",
    "if one and parts and not self.room.reading.gathers:",
    "if False:",
    ENGINE,
)
bug(
    "rows-together-where-pages-are-gathered",
    "serving/model_runner.py",
    "if one and parts and not self.room.reading.gathers:",
    "if one and parts:",
    SAYS,
)
bug(
    "a-layer-that-asks-for-another-backend-reads-in-place",
    "serving/paged_layers.py",
    'if layer.only not in (None, "paged"):',
    "if False:",
    SAYS,
)
