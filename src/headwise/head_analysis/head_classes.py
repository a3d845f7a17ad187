"""Names for heads (previous-token, induction, sink, ...), each with a score and its evidence, by our rules or published
ones.

A head belongs to a class if the confidence interval of the class's measure lies above chance; the score is how far the
measure stands between chance (0) and perfect (1). Weight on sink tokens is measured first, and most other measures
describe the weight that remains. A head may belong to several classes, and one without any class is "unclear".
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

MIN_SCORE = 0.1  # smallest normalised score that earns a class, even if the interval excludes chance
SURE_SCORE = 0.5  # a head is broad if the lower end of "breadth" is above this share of the allowed keys
UNCLEAR = "unclear"


class ClassRule(NamedTuple):
    """A class, the measure that decides it, and the sentence that reports the evidence."""

    name: str
    measure: str
    evidence: str


CLASS_RULES = (
    ClassRule("sink", "sink", "puts {} of its weight on sinks"),
    ClassRule("separator", "separator", "puts {} of its weight on separators"),
    ClassRule("previous", "previous", "puts {} on the previous token"),
    ClassRule("self", "self", "puts {} on the token itself"),
    ClassRule("next", "next", "puts {} on the next token"),
    ClassRule("duplicate", "duplicate", "puts {} on other occurrences of the same token"),
    ClassRule("induction", "induction", "puts {} on tokens that follow an earlier occurrence of the same token"),
    ClassRule("punctuation", "punctuation", "puts {} on punctuation"),
    ClassRule("rare-token", "rare", "puts its largest weight on the rarest token in {} of rows"),
)


def normalised_score(measure: Measure) -> float:
    """How far a measure stands between chance (0) and 1, clipped to that range.

    >>> normalised_score(Measure(0.8, 0.7, 0.9, 0.5))
    0.6
    """
    if measure.chance >= 1:
        return 0.0
    return min(1.0, max(0.0, round((measure.value - measure.chance) / (1 - measure.chance), 12)))


def _evidence_sentence(measure: Measure, template: str, baseline: str = "chance") -> str:
    interval = f"95 % interval {measure.low:.2f} to {measure.high:.2f}"
    return f"{template.format(f'{measure.value:.2f}')}; {baseline} {measure.chance:.2f}, {interval}"


def _non_sink_prefix(head: HeadMeasures) -> str:
    """Start of an evidence sentence about the weight that sinks leave."""
    remaining = f"the {1 - head.measures['sink'].value:.2f} that" if "sink" in head.measures else "what"
    return f"of {remaining} sinks leave, "


def _candidate_classes(head: HeadMeasures) -> Iterable[tuple[str, Measure, str]]:
    """All classes that the head's measures could give it, with the deciding measure and the evidence sentence."""
    non_sink = _non_sink_prefix(head)
    for rule in CLASS_RULES:
        if rule.measure in head.measures:
            measure = head.measures[rule.measure]
            prefix = non_sink if HEAD_METRICS[rule.measure].weight_source == "rest" else ""
            yield rule.name, measure, prefix + _evidence_sentence(measure, rule.evidence)
    if "offset" in head.measures and "peak" in head.measures:
        measure, peak = head.measures["offset"], head.measures["peak"].value
        if peak == peak and int(peak) not in OFFSET_NAMES:
            template = f"puts its largest weight at distance {int(peak):+d} in {{}} of rows"
            yield offset_class_name(peak), measure, non_sink + _evidence_sentence(measure, template)
    for name, measure in head.measures.items():
        if is_relation_measure(name):
            _, relation, _, towards = name.rsplit(" ", 3)
            template = f"finds the {towards} of {relation} in {{}} of dependencies"
            margin = f"{measure.value - measure.chance:+.2f} over the better of the best offset and uniform attention,"
            yield name, measure, _evidence_sentence(measure, template, margin)
    alignment_names = [f"{ALIGNMENT_PREFIX} {row}" for row in ROW_CONVENTIONS]
    alignments = [head.measures[name] for name in alignment_names if name in head.measures]
    for measure in sorted(alignments, key=normalised_score)[-1:]:
        template = "aligns words as human annotators do, 1 - AER {}"
        yield "alignment", measure, _evidence_sentence(measure, template, "uniform or diagonal")


def default_classes(head: HeadMeasures) -> list[HeadClass]:
    """Classes of a head by our own rules; "unclear" with the strongest measure if there is none."""
    classes: list[HeadClass] = []
    strongest = ""
    candidates = sorted(_candidate_classes(head), key=lambda candidate: -normalised_score(candidate[1]))
    for name, measure, evidence in candidates:
        strongest = strongest or f"; the strongest candidate is {name}: {evidence}"
        if measure.is_above_chance and normalised_score(measure) >= MIN_SCORE:
            classes.append(HeadClass(name, normalised_score(measure), evidence))
    breadth = head.measures.get("breadth")
    if breadth is not None and breadth.low > SURE_SCORE:
        evidence = f"spreads its weight over {breadth.value:.2f} of the allowed keys (1 is uniform)"
        interval = f"95 % interval {breadth.low:.2f} to {breadth.high:.2f}"
        classes.append(HeadClass("broad", breadth.value, f"{evidence}; {interval}"))
    return classes or [HeadClass(UNCLEAR, 0.0, f"no measure is clearly above chance{strongest}")]


CLASSIFIERS: Mapping[str, Callable[[HeadMeasures], list[HeadClass]]] = {
    "ours": default_classes,
    "clark": literature_metrics.clark_classes,
    "voita": literature_metrics.voita_classes,
}


def classify_heads(table: HeadTable, *, criteria: str = "ours") -> HeadTable:
    """Return the table with the classes of every head, the highest score first.

    `criteria` is "ours", "clark" (1906.04341) or "voita" (1905.09418). The published criteria need their own metrics,
    which must have been measured: see `metrics_for_criteria`.

    >>> head = HeadMeasures("decoder", 0, 0, 0, 0, "decoder.0.attention", {"previous": Measure(0.97, 0.95, 0.99, 0.1)})
    >>> classify_heads(HeadTable("small", "9 texts", (head,))).heads[0].classes[0].name
    'previous'
    """
    if criteria not in CLASSIFIERS:
        raise ValueError(f"unknown criteria={criteria!r}; {suggest(criteria, CLASSIFIERS)}")
    published = literature_metrics.metrics_for_criteria(criteria)
    measures = published or tuple(rule.measure for rule in CLASS_RULES)
    for head in table.heads:
        if not any(name in head.measures for name in measures):
            remedy = f"MeasureOptions(metrics={measures!r})" if published else "MeasureOptions()"
            fact = f"cannot classify head {head.head} of {head.site}: it has no measure that criteria={criteria!r} use"
            raise ValueError(f"{fact}; measure with {remedy}")
    unclear = [HeadClass(UNCLEAR, 0.0, f"matches no class of criteria={criteria!r}")]
    heads = [
        replace(head, classes=tuple(_sort_classes(CLASSIFIERS[criteria](head) or unclear))) for head in table.heads
    ]
    return replace(table, heads=tuple(heads))


def _sort_classes(classes: list[HeadClass]) -> list[HeadClass]:
    return sorted(classes, key=lambda head_class: -head_class.score)
