"""Proof as tables: the page PROOF.md, and a short text for the terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...report.data import Column, Estimate, Page, Table
from ...report.render import make_page, to_markdown, to_text
from ...report.text import format_bytes, format_count, format_number, format_share
from ...util.errors import pluralise
from ...util.escaping import escape_terminal
from ...util.files import write_atomically
from ...util.output_paths import check_output
from .efficiency import CostPair, PhaseSpeed
from .model_comparison import DOUBLE_TOLERANCE, OUTPUT_TOLERANCE
from .proof import PROOF_FOLDER, PROOF_JSON, PROOF_PAGE, ModelProof
from .quality_metrics import MAX_EQUAL_CHANGE, describe_change

MAX_LINE_LENGTH = 240  # characters of a text that are shown


def write_proof(proof: ModelProof, folder: Path | str) -> tuple[Path, Path]:
    """Write proof.json and PROOF.md to a folder, which is created if missing; return both paths."""
    folder = check_output(folder, PROOF_FOLDER, "continue")
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / PROOF_JSON, folder / PROOF_PAGE
    write_atomically(paths[0], (json.dumps(proof.data, indent=1, allow_nan=False) + "\n").encode())
    write_atomically(paths[1], render_proof(proof).encode())
    return paths


def render_proof(proof: ModelProof) -> str:
    """Return the proof as a Markdown page."""
    return to_markdown(make_proof_page(proof))


def render_summary(proof: ModelProof) -> str:
    """Return the summary for a terminal: plain text, 80 columns."""
    title = f"{_one_line(proof.model)}: {_one_line(proof.what)}"
    notes = [f"note: {_one_line(note)}" for note in proof.notes]
    return "\n".join(map(to_text, [title, "", summary_table(proof), *notes]))


def _one_line(text: str) -> str:
    return escape_terminal(text, MAX_LINE_LENGTH)


def summary_table(proof: ModelProof) -> Table:
    """Return the results of all comparisons, one a row: both models and the verdict."""
    rows = list[tuple[str | None, ...]]()
    if proof.equal:
        outputs = [difference for difference in proof.equal if difference.texts]
        worst = max(outputs, key=lambda difference: difference.apart / (difference.allowed or 1.0))
        result = "equal up to rounding" if proof.holds else "NOT equal"
        result = f"{result}, {worst.apart:.1e}"
        rows.append((f"outputs, {pluralise(len(proof.equal), 'check')}", None, None, result))
    for pair in proof.savings.costs:
        if pair.name in ("parameters", "cache per token"):
            name, before, after, ratio = _cost_row(pair)
            rows.append((name, before, after, "" if ratio is None else f"{ratio - 1:+.1%}"))
    for phase in proof.speeds.phases:
        name, before, after, factor, *_ = _speed_row(phase)
        verdict = phase.verdict.partition(":")[0]
        rows.append((name, before, after, f"{verdict}, {factor}" if factor else verdict))
    for row in proof.quality.rows:
        if "/" not in row.name:
            before = None if row.before is None else format_number(row.before.value)
            result = describe_change(row)
            rows.append((_one_line(row.name), before, format_number(row.after.value), result))
    return Table("", ("", "before", "after", "result"), rows)


# --- Page -----------------------------------------------------------------------------------------


def make_proof_page(proof: ModelProof) -> Page:
    """Return the proof as a page of tables."""
    versions = ", ".join(f"{name} {version}" for name, version in proof.versions.items())
    notes = [
        "All numbers are in proof.json, with the heads that were kept.",
        versions,
        *proof.notes,
    ]
    command = [_one_line(proof.command)] if proof.command else []
    return make_page(
        f"{_one_line(proof.model)}: report of the changed model",
        ("Summary", [summary_table(proof)]),
        (
            "Equality checks",
            [_equality_table(proof) if proof.equal else "No equality was checked."],
        ),
        (
            "Size and cost",
            [_cost_table(proof), *([_site_table(proof)] if proof.savings.sites else [])],
        ),
        ("Speed", [_speed_table(proof)]),
        ("Quality", [_quality_table(proof)]),
        ("How to reproduce", [*command, [_one_line(note) for note in notes if note]]),
        summary=_one_line(proof.what),
    )


def _equality_table(proof: ModelProof) -> Table:
    rows = [
        (
            _one_line(check.what),
            f"{check.apart:.1e}",
            f"{check.allowed:.1e}",
            check.texts,
            check.same,
        )
        for check in proof.equal
    ]
    rows += [
        (_one_line(other.what), f"{other.apart:.1e}", None, other.texts, None)
        for other in proof.rounding
    ]
    notes = [
        "Difference is the largest absolute difference of any output on any text. Tolerance is "
        f"{OUTPUT_TOLERANCE:.0e} of the largest output, {DOUBLE_TOLERANCE:.0e} in float64. "
        "Differences of weights (of 0 texts) are relative to the largest of each tensor."
    ]
    if proof.rounding:
        notes.append(
            "Models of 16 bits are compared in float32, on one text. The row without a tolerance "
            "shows their rounding, which would hide a wrong head."
        )
    columns = ("outputs compared", "difference", "tolerance", "texts", "equal")
    return Table("", columns, rows, notes)


def _cost_table(proof: ModelProof) -> Table:
    saved = proof.savings
    source = f" and a source of {saved.source_length:,}" if saved.source_length else ""
    note = (
        f"For one sequence of {saved.length:,} tokens{source}, {saved.dtype}. FLOPs count allowed "
        "query-key pairs only."
    )
    columns = ("cost", "before", "after", Column("ratio", format_share))
    return Table("", columns, [_cost_row(pair) for pair in saved.costs], [note])


def _cost_row(pair: CostPair) -> tuple[Any, ...]:
    show = {"": "{:,}".format, "bytes": format_bytes, "FLOPs": format_count}[pair.unit]
    unit = " FLOPs" if pair.unit == "FLOPs" else ""
    return pair.name + unit, show(pair.before), show(pair.after), pair.ratio


def _site_table(proof: ModelProof) -> Table:
    """Sizes of the attentions that changed."""
    rows = list[tuple[str, ...]]()
    for site, before, after in proof.savings.sites:
        pairs = zip(before, after, strict=True)
        cells = [f"{old:,}" if old == new else f"{old:,} -> {new:,}" for old, new in pairs]
        rows.append((site, *cells))
    columns = ("attention", "heads", "kv heads", "parameters", "keys and values cached per token")
    return Table("", columns, rows)


def _speed_table(proof: ModelProof) -> Table:
    speeds = proof.speeds
    note = (
        f"Both models were measured alternately in one process ({speeds.machine}): batch "
        f"{speeds.batch}, {speeds.length:,} prompt tokens, {speeds.steps} decode steps; units per "
        "second, medians, and the quartiles of the speedup. Spread is the interquartile range of "
        "the rounds over their median; above 20 % there is no verdict."
    )
    columns = ("phase", "before", "after", "speedup", "spread", "rounds", "verdict")
    rows = [_speed_row(phase) for phase in speeds.phases]
    return Table("", columns, rows, [note, *map(_one_line, speeds.notes)])


def _speed_row(phase: PhaseSpeed) -> tuple[Any, ...]:
    factor = (
        f"{phase.speedup:.2f} [{phase.low:.2f}, {phase.high:.2f}]" if phase.has_verdict else None
    )
    return (
        f"{phase.phase}, {phase.unit}",
        format_count(round(phase.before)),
        format_count(round(phase.after)),
        factor,
        format_share(phase.spread),
        phase.rounds,
        phase.verdict,
    )


def _quality_table(proof: ModelProof) -> Table:
    quality = proof.quality
    rows = list[tuple[Any, ...]]()
    for row in quality.rows:
        estimates = (row.before, row.after, row.change)
        cells = [None if one is None else Estimate(*one) for one in estimates]
        rows.append((_one_line(row.name), *cells))
    note = (
        f"Over {quality.texts:,} texts with {quality.num_positions:,} scored positions. Intervals "
        "are 95 % confidence intervals over texts, for the change over pairs; no difference is "
        f"shown only if the interval stays within {MAX_EQUAL_CHANGE:.0%} of the value."
    )
    columns = (_one_line(quality.objective), "before", "after", "change")
    return Table("", columns, rows, [note, *map(_one_line, quality.notes)])
