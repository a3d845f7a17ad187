"""Names for heads (previous-token, induction, sink, ...), each with a score and its evidence, by our rules or published
ones.

A head belongs to a class if the class's measure is significantly above chance, corrected for testing all heads and
classes of the table at once; the score is how far the measure stands between chance (0) and perfect (1). Weight on sink
tokens is measured first, and most other measures describe the weight that remains. A head may belong to several
classes, and one without any class is "unclear".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from ..errors import pluralise, suggest
from . import literature_metrics
from .dependency_syntax import is_relation_measure
from .head_table import HeadClass, HeadMeasures, HeadTable, Measure
from .literature_metrics import OFFSET_NAMES, offset_class_name
from .resampling import holm_correction
from .word_alignment import ALIGNMENT_PREFIX, ROW_CONVENTIONS

MIN_SCORE = 0.1  # smallest normalised score that earns a class, even if it is significant
MIN_UNTESTED_SCORE = 0.5  # smallest normalised score that earns a class without a test
MIN_ROWS = 20  # smallest number of rows behind a class
SIGNIFICANCE = 0.05
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
    ClassRule("broad", "breadth", "spreads its weight over {} of the allowed keys (1 is uniform)"),
)
PATCH_CLASS_RULES = (
    ClassRule("self", "same_patch", "puts {} on the patch itself"),
    ClassRule("neighbour", "neighbours", "puts {} on the 8 patches around the query"),
    ClassRule("row", "same_row", "puts {} on other patches of the same row"),
    ClassRule("column", "same_column", "puts {} on other patches of the same column"),
)


class ClassCandidate(NamedTuple):
    """A class that a head could have, the measure that decides it, and its evidence without the test."""

    name: str
    measure: Measure
    evidence: str


def normalised_score(measure: Measure) -> float:
    """How far a measure stands between chance (0) and 1, clipped to that range.

    >>> normalised_score(Measure(0.8, 0.7, 0.9, 0.5))
    0.6
    """
    if measure.chance >= 1:
        return 0.0
    return min(1.0, max(0.0, round((measure.value - measure.chance) / (1 - measure.chance), 12)))


def _evidence_sentence(measure: Measure, template: str, baseline: str = "chance") -> str:
    interval = "" if math.isnan(measure.low) else f", 95 % interval {measure.low:.2f} to {measure.high:.2f}"
    rows = "" if math.isnan(measure.rows) else f", {pluralise(round(measure.rows), 'row')}"
    return f"{template.format(f'{measure.value:.2f}')}; {baseline} {measure.chance:.2f}{interval}{rows}"


def _non_sink_prefix(head: HeadMeasures) -> str:
    """Start of an evidence sentence about the weight that sinks leave."""
    remaining = f"the {1 - head.measures['sink'].value:.2f} that" if "sink" in head.measures else "what"
    return f"of {remaining} sinks leave, "


def _candidate_classes(head: HeadMeasures) -> Iterable[ClassCandidate]:
    """All classes that the head's measures could give it."""
    non_sink = _non_sink_prefix(head)
    for rule in (*CLASS_RULES, *PATCH_CLASS_RULES):
        if rule.measure in head.measures:
            measure, metric = head.measures[rule.measure], literature_metrics.get_metric(rule.measure)
            prefix = non_sink if metric.weight_source == "rest" else ""
            baseline = "chance" if metric.compute_chance is None else "random weights"
            yield ClassCandidate(rule.name, measure, prefix + _evidence_sentence(measure, rule.evidence, baseline))
    if "offset" in head.measures and "peak" in head.measures:
        measure, peak = head.measures["offset"], head.measures["peak"].value
        if peak == peak and int(peak) not in OFFSET_NAMES:
            template = f"puts its largest weight at distance {int(peak):+d} in {{}} of rows"
            yield ClassCandidate(offset_class_name(peak), measure, non_sink + _evidence_sentence(measure, template))
    for name, measure in head.measures.items():
        if is_relation_measure(name):
            _, relation, _, towards = name.rsplit(" ", 3)
            template = f"finds the {towards} of {relation} in {{}} of dependencies"
            margin = f"{measure.value - measure.chance:+.2f} over the better of the best offset and uniform attention,"
            yield ClassCandidate(name, measure, _evidence_sentence(measure, template, margin))
    alignment_names = [f"{ALIGNMENT_PREFIX} {row}" for row in ROW_CONVENTIONS]
    alignments = [head.measures[name] for name in alignment_names if name in head.measures]
    for measure in sorted(alignments, key=normalised_score)[-1:]:
        template = "aligns words as the gold links do, 1 - AER {}"
        measure = measure._replace(p=min(1.0, measure.p * len(alignments)))  # the best of several conventions
        yield ClassCandidate("alignment", measure, _evidence_sentence(measure, template, "uniform or diagonal"))


def default_classes(table: HeadTable) -> list[list[HeadClass]]:
    """Classes of every head by our rules; "unclear" with the strongest measure if there is none.

    A class needs a p-value below 0.05 after correction for all heads and classes of the table (Holm), a score of at
    least `MIN_SCORE` and at least `MIN_ROWS` rows.
    """
    candidates = [list(_candidate_classes(head)) for head in table.heads]
    is_tested = [[not one.measure.rows < MIN_ROWS for one in by_head] for by_head in candidates]
    p_values = [
        one.measure.p if tested else math.nan
        for by_head, flags in zip(candidates, is_tested, strict=True)
        for one, tested in zip(by_head, flags, strict=True)
    ]
    corrected = iter(holm_correction(p_values))
    return [_significant_classes([(one, next(corrected)) for one in by_head]) for by_head in candidates]


def _significant_classes(candidates: list[tuple[ClassCandidate, float]]) -> list[HeadClass]:
    """Classes of one head among its candidates with their corrected p-values."""
    classes: list[HeadClass] = []
    strongest = ""
    for candidate, p in sorted(candidates, key=lambda pair: -normalised_score(pair[0].measure)):
        score = normalised_score(candidate.measure)
        evidence = f"{candidate.evidence}, {_test_phrase(candidate.measure, p)}"
        strongest = strongest or f"; the strongest candidate is {candidate.name}: {evidence}"
        if p < SIGNIFICANCE and score >= MIN_SCORE:
            classes.append(HeadClass(candidate.name, score, evidence))
    return classes or [HeadClass(UNCLEAR, 0.0, f"no measure is clearly above chance{strongest}")]


def _test_phrase(measure: Measure, p: float) -> str:
    if not math.isnan(p):
        return f"corrected p {p:.3f}" if p >= 0.001 else "corrected p < 0.001"
    return f"fewer than {MIN_ROWS} rows" if measure.rows < MIN_ROWS else "not tested"


def untested_classes(table: HeadTable) -> list[list[HeadClass]]:
    """Classes of every head by scores of at least `MIN_UNTESTED_SCORE` alone: one text leaves nothing to test over."""
    return [
        [
            HeadClass(one.name, normalised_score(one.measure), f"{one.evidence}, not tested")
            for one in _candidate_classes(head)
            if normalised_score(one.measure) >= MIN_UNTESTED_SCORE and not one.measure.rows < MIN_ROWS
        ]
        for head in table.heads
    ]


CLASSIFIERS: Mapping[str, Callable[[HeadTable], list[list[HeadClass]]]] = {
    "ours": default_classes,
    "untested": untested_classes,
    "clark": lambda table: [literature_metrics.clark_classes(head) for head in table.heads],
    "voita": lambda table: [literature_metrics.voita_classes(head) for head in table.heads],
}


def classify_heads(table: HeadTable, *, criteria: str = "ours") -> HeadTable:
    """Return the table with the classes of every head, the highest score first.

    `criteria` is "ours", "untested" (our scores without the test, for a single text), "clark" (1906.04341) or "voita"
    (1905.09418). The published criteria need their own metrics, which must have been measured: see
    `metrics_for_criteria`.

    >>> previous = Measure(0.97, 0.95, 0.99, 0.1, rows=300, p=1e-9)
    >>> head = HeadMeasures("decoder", "attention", 0, 0, 0, "decoder.0.attention", {"previous": previous})
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
    classes = CLASSIFIERS[criteria](table)
    heads = [
        replace(head, classes=tuple(sorted(by_head or unclear, key=lambda head_class: -head_class.score)))
        for head, by_head in zip(table.heads, classes, strict=True)
    ]
    return replace(table, heads=tuple(heads))
