"""What a changed translator is beside the one that it was made of: a table, a verdict, a drawing of its heads."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ..surgery.verification.proof_report import format_bytes

SIGNIFICANT_CHANGE = 0.01  # of exact match, that may be lost
WIDTH = 80
COLUMN_WIDTHS = (28, 16, 16, 16)


class ComparisonRow(NamedTuple):
    """One number of the translator before, with its heads changed, and after it has learnt again."""

    name: str
    before: str
    changed: str
    after: str


def comparison_rows(data: Mapping[str, Any]) -> Iterator[ComparisonRow]:
    """Exact match with its interval, parameters, bytes of caches, tokens a second."""
    proof, cut = data["proof"], data["cut"]
    score = exact_match_rows(data)
    yield ComparisonRow(
        "exact match", *(f"{one['value']:.1%}" for one in (score["before"], cut["after"], score["after"]))
    )
    yield ComparisonRow(
        "  95% of draws", *(_format_interval(one) for one in (score["before"], cut["after"], score["after"]))
    )
    for one in proof["savings"]["numbers"]:
        if one["name"] == "parameters" or one["name"].startswith("cache per token"):
            said = "{:,}".format if one["name"] == "parameters" else format_bytes
            yield ComparisonRow(one["name"], said(one["before"]), said(one["after"]), said(one["after"]))
    for one in proof["speeds"]["phases"]:
        if one["unit"] == "tokens/s":
            yield ComparisonRow(f"{one['phase']}, tokens/s", f"{one['before']:,.0f}", "", f"{one['after']:,.0f}")


def exact_match_rows(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Exact match before, after, and the change, each with its interval."""
    return next(row for row in data["proof"]["quality"]["rows"] if row["name"] == data["cut"]["name"])


def change_verdict(data: Mapping[str, Any]) -> str:
    """What was lost, how sure that is, and whether it is more than a point.

    >>> change = {"value": -0.0025, "low": -0.0075, "high": 0.0}
    >>> row = {"name": "exact_match", "change": change}
    >>> change_verdict({"cut": {"name": "exact_match"}, "proof": {"quality": {"rows": [row]}}})
    'Exact match lost: 0.2 points (95% of draws: 0.0 to 0.8). That is no more than one point.'
    """
    change = exact_match_rows(data)["change"]
    lost, low, high = -change["value"], -change["high"], -change["low"]
    verdict = (
        "no more than one point" if lost <= SIGNIFICANT_CHANGE + 1e-9 else "MORE than the one point that was aimed at"
    )
    within = f"{_format_percentage_points(low)} to {_format_percentage_points(high)}"
    return f"Exact match lost: {_format_percentage_points(lost)} points (95% of draws: {within}). That is {verdict}."


def format_comparison(data: Mapping[str, Any]) -> str:
    """All of it as a terminal shows it."""
    proof = data["proof"]
    told = [ComparisonRow("", "before", "at once", "learnt again"), *comparison_rows(data)]
    table = [
        "".join([one.name.ljust(COLUMN_WIDTHS[0]), *map(str.rjust, one[1:], COLUMN_WIDTHS[1:])]).rstrip()
        for one in told
    ]
    texts = [f"{line}." for line in (data["proof"]["what"],)]
    heads = [*draw_heads(data), ""] if data.get("keep") else []
    return "\n".join(
        [*_wrap(texts[0]), "", *heads, *table, "", *_wrap(change_verdict(data)), *_wrap(_speed_sentences(data, proof))]
    )


def draw_heads(data: Mapping[str, Any]) -> list[str]:
    """Every head of every attention: one that stays, or a hole.

    >>> draw_heads({"keep": {"decoder.0.cross": [1]}, "there": {"decoder.0.cross": 4}})
    ['  decoder.0.cross        · █ · ·']
    """
    return [
        f"  {site:<22} " + " ".join("█" if head in data["keep"][site] else "·" for head in range(count))
        for site, count in data["there"].items()
    ]


def _speed_sentences(data: Mapping[str, Any], proof: Mapping[str, Any]) -> str:
    speeds = [one for one in proof["speeds"]["phases"] if one["unit"] == "tokens/s"]
    fast = "; ".join(f"{one['phase']} {one['verdict']}" for one in speeds)
    same = "holds" if proof["holds"] else "does NOT hold"
    return (
        f"It learned again for {data['steps']:,} steps from what it was, of which step {data['kept']:,} is kept. "
        f"Speed, {proof['speeds']['machine']}: {fast}. The proof {same}: {data['folder']}/PROOF.md."
    )


def _format_interval(one: Mapping[str, float]) -> str:
    return f"{one['low']:.1%} - {one['high']:.1%}"


def _format_percentage_points(share: float) -> str:
    """Hundredths, without a sign before nothing."""
    return f"{100 * share + 0.0:.1f}".replace("-0.0", "0.0")


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH)
