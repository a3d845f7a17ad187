"""The generated parts of docs/benchmarks.md and docs/backends.md.

`python -m benchmarks --out docs` writes the measurements. The page also compares the targets of
every machine whose bench.json is kept as docs/bench-CLASS.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import headwise as hw
from headwise.attention import backends

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
from benchmarks.report import compare_targets, format_seconds, markdown, table  # noqa: E402

__all__ = ["MEASURED", "backends_page", "benchmarks_page", "format_seconds", "table"]

MEASURED = ROOT / "docs" / "bench.json"
CHART = "![Time of every library relative to headwise, with the targets](bench.svg)"


def benchmarks_page() -> str:
    """The chart, every row with its peers, and the targets on all machines."""
    paths = [MEASURED, *sorted(MEASURED.parent.glob("bench-*.json"))]
    reports = [json.loads(path.read_text()) for path in paths]
    targets = f"## Targets on each machine\n\n{compare_targets(reports)}"
    return "\n\n".join([CHART, markdown(reports[0]), targets])


def backends_page() -> str:
    """Every backend in order of preference on the CPU: its definition and presets it supports."""
    specs = {name: hw.design(preset=name, model=512, heads=8) for name in hw.PRESETS}
    whole = {name: hw.why(spec) for name, spec in specs.items()}
    causal = {name: spec for name, spec in specs.items() if not spec.pattern.tokens_before_decode}
    step = {name: hw.why(spec, tokens="one") for name, spec in causal.items()}
    lines = []
    for name in next(iter(whole.values())).reasons_against:
        summary = (backends.BACKENDS[name].__doc__ or "").strip().split("\n\n")[0]
        summary = " ".join(summary.split())
        lines.append((f"`{name}`", summary, _presets(whole, name), _presets(step, name)))
    head = ["backend", "definition", "presets, whole sequences", "presets, decode steps"]
    note = "A preset is bold if the backend is chosen for it on the CPU in float32."
    return f"{table(head, lines)}\n\n{note}"


def _presets(reports: Mapping[str, Any], backend: str) -> str:
    """The presets that a backend supports; those for which it is chosen are bold."""
    names = []
    for preset, report in reports.items():
        if not report.reasons_against[backend]:
            names.append(f"**{preset}**" if report.backend == backend else preset)
    return ", ".join(names) or "-"
