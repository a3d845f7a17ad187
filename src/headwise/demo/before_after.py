"""Comparison of a compressed translator with the original: table, verdict, and a drawing of its heads."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ..surgery.verification.proof_report import format_bytes

SIGNIFICANT_CHANGE = 0.01  # acceptable loss of exact match
WIDTH = 80
COLUMN_WIDTHS = (28, 16, 16, 16)


class ComparisonRow(NamedTuple):
    """One number of the original translator, of the compressed one, and after retraining."""

    name: str
    before: str
    changed: str
    after: str


def comparison_rows(data: Mapping[str, Any]) -> Iterator[ComparisonRow]:
    """Yield exact match with its interval, parameters, cache sizes, and tokens per second."""
    proof, compressed = data["proof"], data["cut"]
    exact_match = exact_match_rows(data)
    yield ComparisonRow(
        "exact match",
        *(f"{entry['value']:.1%}" for entry in (exact_match["before"], compressed["after"], exact_match["after"])),
    )
    yield ComparisonRow(
        "  95% interval",
        *(_format_interval(entry) for entry in (exact_match["before"], compressed["after"], exact_match["after"])),
    )
    for entry in proof["savings"]["numbers"]:
        if entry["name"] == "parameters" or entry["name"] in ("cache per token", "cache per source token"):
            format_value = "{:,}".format if entry["name"] == "parameters" else format_bytes
            yield ComparisonRow(
                entry["name"], format_value(entry["before"]), format_value(entry["after"]), format_value(entry["after"])
            )
    for entry in proof["speeds"]["phases"]:
        if entry["unit"] == "tokens/s":
            yield ComparisonRow(f"{entry['phase']}, tokens/s", f"{entry['before']:,.0f}", "", f"{entry['after']:,.0f}")


def exact_match_rows(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return exact match before, after, and the change, each with its interval."""
    return next(row for row in data["proof"]["quality"]["rows"] if row["name"] == data["cut"]["name"])


def change_verdict(data: Mapping[str, Any]) -> str:
    """Return a sentence on the loss of exact match, its interval, and whether it exceeds one point.

    >>> change = {"value": -0.0025, "low": -0.0075, "high": 0.0}
    >>> row = {"name": "exact_match", "change": change}
    >>> change_verdict({"cut": {"name": "exact_match"}, "proof": {"quality": {"rows": [row]}}})
    'Exact match lost: 0.2 points (95% interval: 0.0 to 0.8). That is at most one point.'
    """
    change = exact_match_rows(data)["change"]
    lost, low, high = -change["value"], -change["high"], -change["low"]
    verdict = "at most one point" if lost <= SIGNIFICANT_CHANGE + 1e-9 else "MORE than the target of one point"
    interval = f"{_format_percentage_points(low)} to {_format_percentage_points(high)}"
    return f"Exact match lost: {_format_percentage_points(lost)} points (95% interval: {interval}). That is {verdict}."


def format_comparison(data: Mapping[str, Any]) -> str:
    """Format the comparison for a terminal."""
    proof = data["proof"]
    rows = [ComparisonRow("", "before", "compressed", "retrained"), *comparison_rows(data)]
    table = [
        "".join([row.name.ljust(COLUMN_WIDTHS[0]), *map(str.rjust, row[1:], COLUMN_WIDTHS[1:])]).rstrip()
        for row in rows
    ]
    sentences = [f"{line}." for line in (data["proof"]["what"],)]
    heads_drawing = [*draw_heads(data), ""] if data.get("keep") else []
    return "\n".join(
        [
            *_wrap(sentences[0]),
            "",
            *heads_drawing,
            *table,
            "",
            *_wrap(change_verdict(data)),
            *_wrap(_speed_sentences(data, proof)),
        ]
    )


def draw_heads(data: Mapping[str, Any]) -> list[str]:
    """Draw the heads of every attention layer: a block for a kept head, a dot for a removed one.

    >>> draw_heads({"keep": {"decoder.0.cross": [1]}, "there": {"decoder.0.cross": 4}})
    ['  decoder.0.cross        · █ · ·']
    """
    return [
        f"  {site:<22} " + " ".join("█" if head in data["keep"][site] else "·" for head in range(count))
        for site, count in data["there"].items()
    ]


def _speed_sentences(data: Mapping[str, Any], proof: Mapping[str, Any]) -> str:
    speeds = [phase for phase in proof["speeds"]["phases"] if phase["unit"] == "tokens/s"]
    verdicts = "; ".join(f"{phase['phase']} {phase['verdict']}" for phase in speeds)
    proof_state = "holds" if proof["holds"] else "does NOT hold"
    return (
        f"Retrained for {data['steps']:,} steps by distillation from the original; step {data['kept']:,} is kept. "
        f"Speed, {proof['speeds']['machine']}: {verdicts}. The proof {proof_state}: {data['folder']}/PROOF.md."
    )


def _format_interval(score: Mapping[str, float]) -> str:
    return f"{score['low']:.1%} - {score['high']:.1%}"


def _format_percentage_points(share: float) -> str:
    """Format a share in percentage points, without -0.0."""
    return f"{100 * share + 0.0:.1f}".replace("-0.0", "0.0")


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH)
