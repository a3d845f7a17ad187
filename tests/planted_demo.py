"""Bugs in the demo where a translator is made smaller and shown beside what it was."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
DEMO = "test_demo_smaller.py::"
bug(
    "demo-shows-another-translator",
    "demo/translator_compression.py",
    '        asked = {"model": mark_of(net), "how"',
    '        asked = {"model": "", "how"',
    DEMO + "test_what_was_made_of_another_translator_is_made_anew",
)
bug(
    "demo-judges-by-what-it-learned",
    "demo/translator_compression.py",
    "of_examples(net, task, scale.texts).counted()",
    'of_examples(net, task, scale.texts, "train").counted()',
    DEMO + "test_what_was_made_of_another_translator_is_made_anew",
)
bug(
    "demo-writes-what-was-not-learned",
    "demo/translator_compression.py",
    "        write(learnt.net, self.translator.folder",
    "        write(made.net, self.translator.folder",
    DEMO + "test_what_is_shown_is_what_the_folders_translate[pruned]",
    DEMO + "test_what_is_shown_is_what_the_folders_translate[shared]",
)
bug(
    "demo-gain-is-a-loss",
    "demo/before_after.py",
    "if lost <= POINT + 1e-9",
    "if abs(lost) < POINT",
    DEMO + "test_the_verdict_is_honest[-0.01-no more]",
)
bug(
    "demo-removes-what-is-not-its-own",
    "demo/translator_compression.py",
    "        if self._known() is None:\n            check_free(self.folder)\n",
    "",
    DEMO + "test_a_folder_of_somebody_else_is_refused_before_anything_is_trained",
)
bug(
    "report-takes-text-for-tags",
    "demo/html_report.py",
    'return f"<pre>{escape(text)}</pre>"',
    'return f"<pre>{text}</pre>"',
    DEMO + "test_the_report_holds_every_page_and_number",
)
