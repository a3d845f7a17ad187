"""The generated parts of docs/concepts.md and docs/questions.md: statements of `headwise learn`
with their runs.
"""

from __future__ import annotations

from functools import cache

from headwise.learn.catalogue import Entry, Result, find_entries
from headwise.learn.entry_text import Words

# Entries of `headwise learn` in each part of the pages.
CONCEPTS = {
    "look-up": "004-1 004-1e 004-2 003-1.2",
    "five-steps": "003-2.2 002-3.2",
    "queries-keys-values": "000-1.2.1b 000-1.2.1 000-1.2.3 004-5",
    "scale": "001-4b 003-2.1b 001-4c",
    "heads": "001-3 001-3c 003-2.3 002-0 002-2.2b 000-0b 001-3b",
    "parameters": "001-2b 000-1.2.2 002-2.1i",
    "masks": "003-2.2c 003-5.1b 003-8.3b",
    "cross-attention": "004-4 003-5.1d",
    "positions": "003-5.2b 003-5.2f 003-5.2c 003-7.4",
    "recurrence": "003-3.1b 003-3.2 003-4.2 003-3.1c",
    "cost": "000-1d 003-2.3b 003-4.3b",
    "kv-cache": "002-2.3b 002-2.3c 002-2.1d",
    "what-heads-do": "002-2.4 002-2.6c 002-2.6g 002-2.6f 002-2.6e 002-2.2c",
    "circuits": "002-4.3c 002-4.3d 002-4.3f",
    "which-heads-can-go": "002-2.6b 002-2.6h 002-2.6i 003-6.6",
    "how-variants-differ": (
        "002-FF.3 002-4.1 002-4.2b 002-4.3b 002-4.3e 002-2.5c 002-2.5b 003-4.3c 003-4.3"
    ),
    "training": "003-5.2d 003-5.2e 003-5.2 002-FF.1 002-FF.6",
    "misconceptions": "003-7.1 003-7.2 003-7.3 003-7.4 003-7.5 003-7.5b",
    "questions": "003-6.1 003-6.2 003-6.3 003-6.4 003-6.5 003-6.6 003-6.6b 003-6.7",
}


@cache
def run_entry(entry_id: str) -> tuple[Entry, Result]:
    """An entry and the result of its run, for both languages."""
    [entry] = find_entries(entry_id)
    return entry, entry.check()


def concept_list(name: str, language: str) -> str:
    """One item for each entry: its statement, the verdict, the reason with numbers, and the
    command.
    """
    return "\n".join(concept_item(entry_id, language) for entry_id in CONCEPTS[name].split())


def concept_item(entry_id: str, language: str) -> str:
    entry, result = run_entry(entry_id)
    statement = entry.line_en if language == "en" else entry.line_zh
    reason = "<br>".join(result.reason(language).splitlines())
    command = f"`headwise learn {entry_id}`"
    if language == "en":
        return f"- **{statement}** *{result.verdict.value}*. {reason} {command}"
    space = "" if reason.endswith("。") else " "  # the Chinese full stop has a space of its own
    return (
        f"- **{statement}** *{Words(language).verdict(result.verdict)}*。{reason}{space}{command}"
    )
