"""What heads are called, how surely, and why: by our own rules or by published ones.

A head belongs to a class as far as a measure is between its chance and perfect, if the interval of the measure leaves
chance out. What sinks take is told first, and all else is of what they leave. A head may belong to several classes; one
that belongs to none is unclear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from ..errors import suggest
from . import literature_metrics
from .dependency_syntax import is_relation_measure
from .head_metrics import HEAD_METRICS
from .head_table import HeadClass, HeadMeasures, HeadTable, Measure
from .literature_metrics import OFFSET_NAMES, offset_class_name
from .word_alignment import ALIGNMENT_PREFIX, ROW_CONVENTIONS

MIN_SCORE = 0.1  # of the way from chance to perfect; below, what is surely there is not worth a name
SURE_SCORE = 0.5  # of what may be read is broad
UNCLEAR = "unclear"


class ClassRule(NamedTuple):
    """A class, the measure it goes by, and the sentence that says so."""

    name: str
    measure: str
    evidence: str


CLASS_RULES = (
    ClassRule("sink", "sink", "puts {} of its weight on sinks"),
    ClassRule("separator", "separator", "puts {} of its weight on separators"),
    ClassRule("previous", "previous", "puts {} on the token before"),
    ClassRule("self", "self", "puts {} on the token itself"),
    ClassRule("next", "next", "puts {} on the token behind"),
    ClassRule("duplicate", "duplicate", "puts {} on the same token elsewhere"),
    ClassRule("induction", "induction", "puts {} behind an earlier same token"),
    ClassRule("punctuation", "punctuation", "puts {} on punctuation"),
    ClassRule("rare-token", "rare", "reads the rarest token most in {} of rows"),
)


def normalised_score(measure: Measure) -> float:
    """How far a measure is between chance and 1, the perfect head.

    >>> normalised_score(Measure(0.8, 0.7, 0.9, 0.5))
    0.6
    """
    return (
        0.0
        if measure.chance >= 1
        else min(1.0, max(0.0, round((measure.value - measure.chance) / (1 - measure.chance), 12)))
    )


def _evidence_sentence(one: Measure, says: str, against: str = "chance") -> str:
    sure = f"95 % interval {one.low:.2f} to {one.high:.2f}"
    return f"{says.format(f'{one.value:.2f}')}; {against} {one.chance:.2f}, {sure}"


def _non_sink_prefix(head: HeadMeasures) -> str:
    """What a sentence begins with that is of what sinks leave."""
    left = f"the {1 - head.measures['sink'].value:.2f} that" if "sink" in head.measures else "what"
    return f"of {left} sinks leave, "


def _candidate_classes(head: HeadMeasures) -> Iterable[tuple[str, Measure, str]]:
    """Classes with the measure that speaks for each, and the sentence that says it."""
    rest = _non_sink_prefix(head)
    for kind in CLASS_RULES:
        if kind.measure in head.measures:
            one = head.measures[kind.measure]
            yield (
                kind.name,
                one,
                (rest if HEAD_METRICS[kind.measure].weight_source == "rest" else "")
                + _evidence_sentence(one, kind.evidence),
            )
    if "offset" in head.measures and "peak" in head.measures:
        one, peak = head.measures["offset"], head.measures["peak"].value
        if peak == peak and int(peak) not in OFFSET_NAMES:
            says = f"reads most at distance {int(peak):+d} in {{}} of rows"
            yield offset_class_name(peak), one, rest + _evidence_sentence(one, says)
    for name, one in head.measures.items():
        if is_relation_measure(name):
            _, relation, _, towards = name.rsplit(" ", 3)
            says = f"finds the {towards} of {relation} in {{}} of arcs"
            margin = f"{one.value - one.chance:+.2f} over the best offset or all alike,"
            yield name, one, _evidence_sentence(one, says, margin)
    rows = [
        head.measures[f"{ALIGNMENT_PREFIX} {row}"]
        for row in ROW_CONVENTIONS
        if f"{ALIGNMENT_PREFIX} {row}" in head.measures
    ]
    for one in sorted(rows, key=normalised_score)[-1:]:
        yield "alignment", one, _evidence_sentence(one, "links words as people do, 1 - AER {}", "uniform or diagonal")


def default_classes(head: HeadMeasures) -> list[HeadClass]:
    """All that our measures say of a head."""
    found: list[HeadClass] = []
    best = ""
    for name, one, why in sorted(_candidate_classes(head), key=lambda told: -normalised_score(told[1])):
        best = best or f"; most of all it is {name}: {why}"
        if one.is_above_chance and normalised_score(one) >= MIN_SCORE:
            found.append(HeadClass(name, normalised_score(one), why))
    breadth = head.measures.get("breadth")
    if breadth is not None and breadth.low > SURE_SCORE:
        says = f"reads {breadth.value:.2f} of what it may read, all alike would be 1"
        found.append(
            HeadClass("broad", breadth.value, f"{says}; 95 % interval {breadth.low:.2f} to {breadth.high:.2f}")
        )
    return found or [HeadClass(UNCLEAR, 0.0, f"nothing stands out from chance{best}")]


CLASSIFIERS: Mapping[str, Callable[[HeadMeasures], list[HeadClass]]] = {
    "ours": default_classes,
    "clark": literature_metrics.clark_classes,
    "voita": literature_metrics.voita_classes,
}


def classify_heads(table: HeadTable, *, criteria: str = "ours") -> HeadTable:
    """The same table with the classes of every head, the surest first.

    `criteria` are "ours", or those published by "clark" (1906.04341) or "voita" (1905.09418), whose own statistics must
    have been measured then.

    >>> head = HeadMeasures("decoder", 0, 0, 0, 0, "decoder.0.attention", {"previous": Measure(0.97, 0.95, 0.99, 0.1)})
    >>> classify_heads(HeadTable("small", "9 texts", (head,))).heads[0].classes[0].name
    'previous'
    """
    if criteria not in CLASSIFIERS:
        raise ValueError(f"criteria={criteria!r} are unknown; {suggest(criteria, CLASSIFIERS)}")
    known = literature_metrics.metrics_for_criteria(criteria) or tuple(kind.measure for kind in CLASS_RULES)
    for head in table.heads:
        if not any(name in head.measures for name in known):
            asked = f"Chosen(statistics={known!r})" if literature_metrics.metrics_for_criteria(criteria) else "Chosen()"
            raise ValueError(
                f"head {head.head} of {head.site} has no measure that {criteria!r} names heads by; measure with {asked}"
            )
    nobody = [HeadClass(UNCLEAR, 0.0, f"is none of what {criteria!r} names")]
    heads = [replace(head, classes=tuple(_sort_classes(CLASSIFIERS[criteria](head) or nobody))) for head in table.heads]
    return replace(table, heads=tuple(heads))


def _sort_classes(classes: list[HeadClass]) -> list[HeadClass]:
    return sorted(classes, key=lambda one: -one.score)
