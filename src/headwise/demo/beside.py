"""What a changed translator is beside the one that it was made of: a table, a verdict, a drawing of its heads."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ..surgery.page import sized

POINT = 0.01  # of exact match, that may be lost
WIDTH = 80
COLUMNS = (28, 16, 16, 16)


class Line(NamedTuple):
    """One number of the translator before, with its heads changed, and after it has learnt again."""

    name: str
    before: str
    changed: str
    after: str


def lines(data: Mapping[str, Any]) -> Iterator[Line]:
    """Exact match with its interval, parameters, bytes of caches, tokens a second."""
    proof, cut = data["proof"], data["cut"]
    score = scored(data)
    yield Line("exact match", *(f"{one['value']:.1%}" for one in (score["before"], cut["after"], score["after"])))
    yield Line("  95% of draws", *(_within(one) for one in (score["before"], cut["after"], score["after"])))
    for one in proof["savings"]["numbers"]:
        if one["name"] == "parameters" or one["name"].startswith("cache, a token"):
            said = "{:,}".format if one["name"] == "parameters" else sized
            yield Line(one["name"], said(one["before"]), said(one["after"]), said(one["after"]))
    for one in proof["speeds"]["phases"]:
        if one["unit"] == "tokens/s":
            yield Line(f"{one['phase']}, tokens/s", f"{one['before']:,.0f}", "", f"{one['after']:,.0f}")


def scored(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Exact match before, after, and the change, each with its interval."""
    return next(row for row in data["proof"]["quality"]["rows"] if row["name"] == data["cut"]["name"])


def verdict(data: Mapping[str, Any]) -> str:
    """What was lost, how sure that is, and whether it is more than a point.

    >>> change = {"value": -0.0025, "low": -0.0075, "high": 0.0}
    >>> row = {"name": "exact_match", "change": change}
    >>> verdict({"cut": {"name": "exact_match"}, "proof": {"quality": {"rows": [row]}}})
    'Exact match lost: 0.2 points (95% of draws: 0.0 to 0.8). That is no more than one point.'
    """
    change = scored(data)["change"]
    lost, low, high = -change["value"], -change["high"], -change["low"]
    verdict = "no more than one point" if lost <= POINT + 1e-9 else "MORE than the one point that was aimed at"
    within = f"{_points(low)} to {_points(high)}"
    return f"Exact match lost: {_points(lost)} points (95% of draws: {within}). That is {verdict}."


def page(data: Mapping[str, Any]) -> str:
    """All of it as a terminal shows it."""
    proof = data["proof"]
    told = [Line("", "before", "at once", "learnt again"), *lines(data)]
    table = ["".join([one.name.ljust(COLUMNS[0]), *map(str.rjust, one[1:], COLUMNS[1:])]).rstrip() for one in told]
    texts = [f"{line}." for line in (data["proof"]["what"],)]
    heads = [*drawn(data), ""] if data.get("keep") else []
    return "\n".join(
        [*_wrapped(texts[0]), "", *heads, *table, "", *_wrapped(verdict(data)), *_wrapped(_rest(data, proof))]
    )


def drawn(data: Mapping[str, Any]) -> list[str]:
    """Every head of every attention: one that stays, or a hole.

    >>> drawn({"keep": {"decoder.0.cross": [1]}, "there": {"decoder.0.cross": 4}})
    ['  decoder.0.cross        · █ · ·']
    """
    return [
        f"  {site:<22} " + " ".join("█" if head in data["keep"][site] else "·" for head in range(count))
        for site, count in data["there"].items()
    ]


def _rest(data: Mapping[str, Any], proof: Mapping[str, Any]) -> str:
    speeds = [one for one in proof["speeds"]["phases"] if one["unit"] == "tokens/s"]
    fast = "; ".join(f"{one['phase']} {one['verdict']}" for one in speeds)
    same = "holds" if proof["holds"] else "does NOT hold"
    return (
        f"It learned again for {data['steps']:,} steps from what it was, of which step {data['kept']:,} is kept. "
        f"Speed, {proof['speeds']['machine']}: {fast}. The proof {same}: {data['folder']}/PROOF.md."
    )


def _within(one: Mapping[str, float]) -> str:
    return f"{one['low']:.1%} - {one['high']:.1%}"


def _points(share: float) -> str:
    """Hundredths, without a sign before nothing."""
    return f"{100 * share + 0.0:.1f}".replace("-0.0", "0.0")


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH)
