"""Names for heads (previous-token, induction, sink, ...), each with a score and its evidence, by
our rules or published ones.

A head belongs to a class if the class's measure is significantly above chance, corrected for
testing all heads and classes of the table at once; the score is how far the measure stands between
chance (0) and perfect (1). Weight on sink tokens is measured first, and most other measures
describe the weight that remains. A head may belong to several classes, and one without any class is
"unclear".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ...util.errors import pluralise, suggest
from . import literature_metrics
from .dependency_syntax import is_relation_measure
from .head_table import HeadClass, HeadMeasures, HeadTable, Measure
from .literature_metrics import OFFSET_NAMES, offset_class_name
from .resampling import correct_p_values
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
    ClassRule(
        "induction",
        "induction",
        "puts {} on tokens that follow an earlier occurrence of the same token",
    ),
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
    """A class that a head could have, the measure that decides it, and its evidence without the
    test.
    """

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
    interval = (
        f", 95 % interval {measure.low:.2f} to {measure.high:.2f}"
        if measure.low < measure.high
        else ""
    )
    rows = "" if math.isnan(measure.rows) else f", {pluralise(round(measure.rows), 'row')}"
    return (
        f"{template.format(f'{measure.value:.2f}')}; {baseline} "
        f"{measure.chance:.2f}{interval}{rows}"
    )


def _non_sink_prefix(head: HeadMeasures) -> str:
    """Start of an evidence sentence about the weight that sinks leave."""
    remaining = (
        f"the {1 - head.measures['sink'].value:.2f} that" if "sink" in head.measures else "what"
    )
    return f"of {remaining} sinks leave, "


def _candidate_classes(head: HeadMeasures) -> Iterable[ClassCandidate]:
    """All classes that the head's measures could give it."""
    non_sink = _non_sink_prefix(head)
    for rule in (*CLASS_RULES, *PATCH_CLASS_RULES):
        if rule.measure in head.measures:
            measure = head.measures[rule.measure]
            metric = literature_metrics.get_metric(rule.measure)
            prefix = non_sink if metric.weight_source == "rest" else ""
            baseline = "chance" if metric.compute_chance is None else "random weights"
            yield ClassCandidate(
                rule.name, measure, prefix + _evidence_sentence(measure, rule.evidence, baseline)
            )
    if "offset" in head.measures and "peak" in head.measures:
        measure = head.measures["offset"]
        peak = head.measures["peak"].value
        if peak == peak and int(peak) not in OFFSET_NAMES:
            template = f"puts its largest weight at distance {int(peak):+d} in {{}} of rows"
            yield ClassCandidate(
                offset_class_name(peak), measure, non_sink + _evidence_sentence(measure, template)
            )
    for name, measure in head.measures.items():
        if is_relation_measure(name):
            _, relation, _, towards = name.rsplit(" ", 3)
            template = f"finds the {towards} of {relation} in {{}} of dependencies"
            margin = (
                f"{measure.value - measure.chance:+.2f} over the better of the best offset "
                "and uniform attention,"
            )
            yield ClassCandidate(name, measure, _evidence_sentence(measure, template, margin))
    alignment_names = [f"{ALIGNMENT_PREFIX} {row}" for row in ROW_CONVENTIONS]
    alignments = [head.measures[name] for name in alignment_names if name in head.measures]
    for measure in sorted(alignments, key=normalised_score)[-1:]:
        template = "aligns words as the gold links do, 1 - AER {}"
        measure = measure._replace(
            p=min(1.0, measure.p * len(alignments))
        )  # the best of several conventions
        yield ClassCandidate(
            "alignment", measure, _evidence_sentence(measure, template, "uniform or diagonal")
        )


def default_classes(table: HeadTable) -> list[list[HeadClass]]:
    """Classes of every head by our rules; "unclear" with the strongest measure if there is none.

    A class needs a p-value below 0.05 after correction for all heads and classes of the table
    (Holm), a score of at least `MIN_SCORE` and at least `MIN_ROWS` rows.
    """
    candidates = [list(_candidate_classes(head)) for head in table.heads]
    is_tested = [[not one.measure.rows < MIN_ROWS for one in by_head] for by_head in candidates]
    p_values = [
        one.measure.p if tested else math.nan
        for by_head, flags in zip(candidates, is_tested, strict=True)
        for one, tested in zip(by_head, flags, strict=True)
    ]
    corrected = iter(correct_p_values(p_values).tolist())
    return [
        _significant_classes([(one, next(corrected)) for one in by_head]) for by_head in candidates
    ]


def _significant_classes(candidates: list[tuple[ClassCandidate, float]]) -> list[HeadClass]:
    """Classes of one head among its candidates with their corrected p-values."""
    classes = [
        HeadClass(
            one.name,
            normalised_score(one.measure),
            f"{one.evidence}, {_test_phrase(one.measure, p)}",
        )
        for one, p in candidates
        if p < SIGNIFICANCE and normalised_score(one.measure) >= MIN_SCORE
    ]
    is_tested = any(not math.isnan(p) for _, p in candidates)
    reason = (
        "no measure is clearly above chance"
        if is_tested
        else _untested_reason([one for one, _ in candidates])
    )
    return classes or [_unclear(reason, candidates)]


def _unclear(reason: str, candidates: Sequence[tuple[ClassCandidate, float]]) -> HeadClass:
    """The class of a head without any other, with its strongest candidate."""
    if not candidates:
        return HeadClass(UNCLEAR, 0.0, reason)
    top, p = max(candidates, key=lambda pair: normalised_score(pair[0].measure))
    strongest = (
        f"the strongest candidate is {top.name}: {top.evidence}, {_test_phrase(top.measure, p)}"
    )
    return HeadClass(UNCLEAR, 0.0, f"{reason}; {strongest}")


def _test_phrase(measure: Measure, p: float) -> str:
    if not math.isnan(p):
        return f"corrected p {p:.3f}" if p >= 0.001 else "corrected p < 0.001"
    if measure.rows < MIN_ROWS:
        return f"fewer than {MIN_ROWS} rows"
    return (
        "not tested: the texts agree"
        if math.isnan(measure.low) or measure.low == measure.high
        else "not tested"
    )


def _untested_reason(candidates: Sequence[ClassCandidate]) -> str:
    """Why no candidate of a head could be tested, and what would help."""
    if all(one.measure.rows < MIN_ROWS for one in candidates):
        return (
            f"too little text to name a class: fewer than {MIN_ROWS} rows; give longer texts "
            "or more of them"
        )
    return "there is nothing to test: the texts do not differ in these measures; give more texts"


def untested_classes(table: HeadTable) -> list[list[HeadClass]]:
    """Classes of every head by scores of at least `MIN_UNTESTED_SCORE` alone: one text leaves
    nothing to test over.
    """
    return [_high_classes(list(_candidate_classes(head))) for head in table.heads]


def _high_classes(candidates: list[ClassCandidate]) -> list[HeadClass]:
    """Classes of one head among its candidates by score alone."""
    long_enough = [one for one in candidates if not one.measure.rows < MIN_ROWS]
    classes = [
        HeadClass(one.name, normalised_score(one.measure), f"{one.evidence}, not tested")
        for one in long_enough
        if normalised_score(one.measure) >= MIN_UNTESTED_SCORE
    ]
    reason = (
        f"no score is {MIN_UNTESTED_SCORE} or more, as a class without a test needs; give "
        "several texts"
    )
    reason = reason if long_enough else _untested_reason(candidates)
    return classes or [_unclear(reason, [(one, math.nan) for one in candidates])]


CLASSIFIERS: Mapping[str, Callable[[HeadTable], list[list[HeadClass]]]] = {
    "ours": default_classes,
    "untested": untested_classes,
    "clark": lambda table: [literature_metrics.clark_classes(head) for head in table.heads],
    "voita": lambda table: [literature_metrics.voita_classes(head) for head in table.heads],
}


def classify_heads(table: HeadTable, *, criteria: str = "ours") -> HeadTable:
    """Return the table with the classes of every head, the highest score first.

    `criteria` is "ours", "untested" (our scores without the test, for a single text), "clark"
    (1906.04341) or "voita" (1905.09418). The published criteria need their own metrics, which must
    have been measured: see `metrics_for_criteria`.

    >>> previous = Measure(0.97, 0.95, 0.99, 0.1, rows=300, p=1e-9)
    >>> head = HeadMeasures(
    ...     "decoder", "attention", 0, 0, 0, "decoder.0.attention", {"previous": previous}
    ... )
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
            fact = (
                f"cannot classify head {head.head} of {head.site}: it has no measure that "
                f"criteria={criteria!r} use"
            )
            raise ValueError(f"{fact}; measure with {remedy}")
    unclear = [HeadClass(UNCLEAR, 0.0, f"matches no class of criteria={criteria!r}")]
    classes = CLASSIFIERS[criteria](table)
    heads = [
        replace(
            head,
            classes=tuple(sorted(by_head or unclear, key=lambda head_class: -head_class.score)),
        )
        for head, by_head in zip(table.heads, classes, strict=True)
    ]
    return replace(table, heads=tuple(heads))
