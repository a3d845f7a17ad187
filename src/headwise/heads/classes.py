"""What heads are called, how surely, and why: by our own rules or by published ones.

A head belongs to a class as far as a measure is between its chance and perfect, if the interval of the measure leaves
chance out. What sinks take is told first, and all else is of what they leave. A head may belong to several classes; one
that belongs to none is unclear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from ..errors import nearest
from . import published
from .alignment import ROWS, SIGN
from .published import NEAR, distance_name
from .statistics import STATISTICS
from .syntax import follows
from .table import Head, Measure, Named, Table

LEAST = 0.1  # of the way from chance to perfect; below, what is surely there is not worth a name
HALF = 0.5  # of what may be read is broad
NOBODY = "unclear"


class Kind(NamedTuple):
    """A class, the measure it goes by, and the sentence that says so."""

    name: str
    measure: str
    says: str


KINDS = (
    Kind("sink", "sink", "puts {} of its weight on sinks"),
    Kind("separator", "separator", "puts {} of its weight on separators"),
    Kind("previous", "previous", "puts {} on the token before"),
    Kind("self", "self", "puts {} on the token itself"),
    Kind("next", "next", "puts {} on the token behind"),
    Kind("duplicate", "duplicate", "puts {} on the same token elsewhere"),
    Kind("induction", "induction", "puts {} behind an earlier same token"),
    Kind("punctuation", "punctuation", "puts {} on punctuation"),
    Kind("rare-token", "rare", "reads the rarest token most in {} of rows"),
)


def score(one: Measure) -> float:
    """How far a measure is between chance and 1, the perfect head.

    >>> score(Measure(0.8, 0.7, 0.9, 0.5))
    0.6
    """
    return 0.0 if one.chance >= 1 else min(1.0, max(0.0, round((one.value - one.chance) / (1 - one.chance), 12)))


def _said(one: Measure, says: str, against: str = "chance") -> str:
    sure = f"95 % interval {one.low:.2f} to {one.high:.2f}"
    return f"{says.format(f'{one.value:.2f}')}; {against} {one.chance:.2f}, {sure}"


def _rest(head: Head) -> str:
    """What a sentence begins with that is of what sinks leave."""
    left = f"the {1 - head.measures['sink'].value:.2f} that" if "sink" in head.measures else "what"
    return f"of {left} sinks leave, "


def _candidates(head: Head) -> Iterable[tuple[str, Measure, str]]:
    """Classes with the measure that speaks for each, and the sentence that says it."""
    rest = _rest(head)
    for kind in KINDS:
        if kind.measure in head.measures:
            one = head.measures[kind.measure]
            yield kind.name, one, (rest if STATISTICS[kind.measure].of == "rest" else "") + _said(one, kind.says)
    if "offset" in head.measures and "peak" in head.measures:
        one, peak = head.measures["offset"], head.measures["peak"].value
        if peak == peak and int(peak) not in NEAR:
            says = f"reads most at distance {int(peak):+d} in {{}} of rows"
            yield distance_name(peak), one, rest + _said(one, says)
    for name, one in head.measures.items():
        if follows(name):
            _, relation, _, towards = name.rsplit(" ", 3)
            says = f"finds the {towards} of {relation} in {{}} of arcs"
            margin = f"{one.value - one.chance:+.2f} over the best offset or all alike,"
            yield name, one, _said(one, says, margin)
    rows = [head.measures[f"{SIGN} {row}"] for row in ROWS if f"{SIGN} {row}" in head.measures]
    for one in sorted(rows, key=score)[-1:]:
        yield "alignment", one, _said(one, "links words as people do, 1 - AER {}", "uniform or diagonal")


def ours(head: Head) -> list[Named]:
    """All that our measures say of a head."""
    found: list[Named] = []
    best = ""
    for name, one, why in sorted(_candidates(head), key=lambda told: -score(told[1])):
        best = best or f"; most of all it is {name}: {why}"
        if one.above and score(one) >= LEAST:
            found.append(Named(name, score(one), why))
    breadth = head.measures.get("breadth")
    if breadth is not None and breadth.low > HALF:
        says = f"reads {breadth.value:.2f} of what it may read, all alike would be 1"
        found.append(Named("broad", breadth.value, f"{says}; 95 % interval {breadth.low:.2f} to {breadth.high:.2f}"))
    return found or [Named(NOBODY, 0.0, f"nothing stands out from chance{best}")]


CRITERIA: Mapping[str, Callable[[Head], list[Named]]] = {
    "ours": ours,
    "clark": published.clark,
    "voita": published.voita,
}


def classified(table: Table, *, criteria: str = "ours") -> Table:
    """The same table with the classes of every head, the surest first.

    `criteria` are "ours", or those published by "clark" (1906.04341) or "voita" (1905.09418), whose own statistics must
    have been measured then.

    >>> head = Head("decoder", 0, 0, 0, 0, "decoder.0.attention", {"previous": Measure(0.97, 0.95, 0.99, 0.1)})
    >>> classified(Table("small", "9 texts", (head,))).heads[0].classes[0].name
    'previous'
    """
    if criteria not in CRITERIA:
        raise ValueError(f"criteria={criteria!r} are unknown; {nearest(criteria, CRITERIA)}")
    known = published.chosen(criteria) or tuple(kind.measure for kind in KINDS)
    for head in table.heads:
        if not any(name in head.measures for name in known):
            asked = f"Chosen(statistics={known!r})" if published.chosen(criteria) else "Chosen()"
            raise ValueError(f"head {head.head} of {head.site} has no measure that {criteria!r} names heads by; "
                             f"measure with {asked}")  # fmt: skip
    nobody = [Named(NOBODY, 0.0, f"is none of what {criteria!r} names")]
    heads = [replace(head, classes=tuple(_sorted(CRITERIA[criteria](head) or nobody))) for head in table.heads]
    return replace(table, heads=tuple(heads))


def _sorted(classes: list[Named]) -> list[Named]:
    return sorted(classes, key=lambda one: -one.score)
