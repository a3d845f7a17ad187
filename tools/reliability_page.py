"""Generated parts of docs/reliability.md, from docs/reliability.json, which soak.py and crashes of
`tests` write.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).resolve().parent.parent / "docs" / "reliability.json"
LEAST_INPUTS, LEAST_TOTAL = 1000, 20_000
CRASH_TRIALS = {
    "kills": "kills of commands that write",
    "full_disk": "full disks under commands that write",
}


def read_figures() -> dict[str, Any]:
    """Return the figures; raises SystemExit if a parser was tried too rarely,
    or anything failed.
    """
    figures = json.loads(FIGURES.read_text())
    rows = figures["inputs"]
    for key, name in CRASH_TRIALS.items():
        trials = figures[key]
        figures["faults"][name] = {"injected": trials["trials"], "failures": trials["failures"]}
    if rare := [name for name, counts in rows.items() if counts["inputs"] < LEAST_INPUTS]:
        raise SystemExit(
            f"{FIGURES.name}: {rare[0]} has fewer than {LEAST_INPUTS:,} inputs; run tests/soak.py "
            "again"
        )
    if sum(counts["inputs"] for counts in rows.values()) < LEAST_TOTAL:
        raise SystemExit(
            f"{FIGURES.name} has fewer than {LEAST_TOTAL:,} inputs in all; run tests/soak.py again"
        )
    if failed := [
        name for name, counts in (rows | figures["faults"]).items() if counts["failures"]
    ]:
        raise SystemExit(
            f"{FIGURES.name}: {failed[0]} failed; correct it, and run tests/soak.py again"
        )
    return figures


def summary_line() -> str:
    """Return inputs, faults and failures in one sentence."""
    figures = read_figures()
    rows, faults = figures["inputs"].values(), figures["faults"].values()
    inputs, injected = sum(row["inputs"] for row in rows), sum(row["injected"] for row in faults)
    failures = sum(row["failures"] for row in (*rows, *faults))
    return (
        f"**{inputs:,} inputs** of {len(rows)} parsers, routes and commands and **{injected:,} "
        "injected faults**; "
        f"**{failures} failures**. {figures['versions']}."
    )


def input_rows() -> list[list[str]]:
    """Return a row for each parser: inputs, read, refused, failures."""
    keys = ("inputs", "read", "refused", "failures")
    return [
        [name, *(f"{counts[key]:,}" for key in keys)]
        for name, counts in read_figures()["inputs"].items()
    ]


def fault_rows() -> list[list[str]]:
    """Return a row for each kind of fault: how many were injected, and failures."""
    keys = ("injected", "failures")
    return [
        [name, *(f"{counts[key]:,}" for key in keys)]
        for name, counts in read_figures()["faults"].items()
    ]
