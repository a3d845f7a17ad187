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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import NamedTuple

from ...util.errors import check_known, pluralise
from .dependency_syntax import is_relation_measure
from .head_metrics import get_metric, metrics_for_criteria
from .head_table import MIN_ROWS, HeadClass, HeadMeasures, HeadTable, Measure, order_classes
from .resampling import correct_p_values
from .word_alignment import ALIGNMENT_PREFIX, ROW_CONVENTIONS

MIN_SCORE = 0.1  # smallest normalised score that earns a class, even if it is significant
MIN_UNTESTED_SCORE = 0.5  # smallest normalised score that earns a class without a test
SIGNIFICANCE = 0.05
UNCLEAR = "unclear"
OFFSET_NAMES = {-1: "previous", 0: "self", 1: "next"}


def offset_class_name(offset: float) -> str:
    """Class name of a head that attends to one offset.

    >>> offset_class_name(-1.0), offset_class_name(3.0)
    ('previous', 'offset +3')
    """
    return OFFSET_NAMES.get(int(offset), f"offset {int(offset):+d}")


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


def normalised_score(measure: Measure) -> float:
    """How far a measure stands between chance (0) and 1, clipped to that range.

    >>> normalised_score(Measure(0.8, 0.7, 0.9, 0.5))
    0.6
    """
    if measure.chance >= 1:
        return 0.0
    return min(1.0, max(0.0, round((measure.value - measure.chance) / (1 - measure.chance), 12)))


class ClassCandidate(NamedTuple):
    """A class that a head could have, the measure that decides it, its evidence without the test,
    and the corrected p-value.
    """

    name: str
    measure: Measure
    evidence: str
    p: float = math.nan

    @property
    def score(self) -> float:
        """Score of the class, from 0 to 1."""
        return normalised_score(self.measure)

    @property
    def has_rows(self) -> bool:
        """False if the measure is known to have too few rows."""
        return not self.measure.rows < MIN_ROWS

    @property
    def tested_evidence(self) -> str:
        """The evidence with the result of the test."""
        phrase = "not tested"
        if not math.isnan(self.p):
            phrase = f"corrected p {self.p:.3f}" if self.p >= 0.001 else "corrected p < 0.001"
        elif not self.has_rows:
            phrase = f"fewer than {MIN_ROWS} rows"
        elif math.isnan(self.measure.low) or self.measure.low == self.measure.high:
            phrase = "not tested: the texts agree"
        return f"{self.evidence}, {phrase}"


def _evidence_sentence(measure: Measure, template: str, baseline: str = "chance") -> str:
    value, low, high, chance, num_rows, _ = measure
    interval = f", 95 % interval {low:.2f} to {high:.2f}" if low < high else ""
    rows = "" if math.isnan(num_rows) else f", {pluralise(round(num_rows), 'row')}"
    return f"{template.format(f'{value:.2f}')}; {baseline} {chance:.2f}{interval}{rows}"


def _candidate_classes(head: HeadMeasures) -> Iterator[ClassCandidate]:
    """All classes that the head's measures could give it."""
    measures = head.measures
    rest = f"the {1 - measures['sink'].value:.2f} that" if "sink" in measures else "what"
    non_sink = f"of {rest} sinks leave, "
    for rule in (*CLASS_RULES, *PATCH_CLASS_RULES):
        if rule.measure in measures:
            metric = get_metric(rule.measure)
            prefix = non_sink if metric.weight_source == "rest" else ""
            baseline = "chance" if metric.compute_chance is None else "random weights"
            measure = measures[rule.measure]
            evidence = _evidence_sentence(measure, rule.evidence, baseline)
            yield ClassCandidate(rule.name, measure, prefix + evidence)
    peak = measures["peak"].value if {"offset", "peak"} <= measures.keys() else math.nan
    if peak == peak and int(peak) not in OFFSET_NAMES:
        template = f"puts its largest weight at distance {int(peak):+d} in {{}} of rows"
        evidence = non_sink + _evidence_sentence(measures["offset"], template)
        yield ClassCandidate(offset_class_name(peak), measures["offset"], evidence)
    for name, measure in measures.items():
        if is_relation_measure(name):
            _, relation, _, towards = name.rsplit(" ", 3)
            template = f"finds the {towards} of {relation} in {{}} of dependencies"
            margin = f"{measure.value - measure.chance:+.2f} over the better of the best offset"
            baseline = f"{margin} and uniform attention,"
            yield ClassCandidate(name, measure, _evidence_sentence(measure, template, baseline))
    names = [f"{ALIGNMENT_PREFIX} {row}" for row in ROW_CONVENTIONS]
    alignments = [measures[name] for name in names if name in measures]
    if alignments:  # the best of several conventions
        best = sorted(alignments, key=normalised_score)[-1]
        best = best._replace(p=min(1.0, best.p * len(alignments)))
        template = "aligns words as the gold links do, 1 - AER {}"
        evidence = _evidence_sentence(best, template, "uniform or diagonal")
        yield ClassCandidate("alignment", best, evidence)


def classes_by_rules(table: HeadTable, is_tested: bool) -> list[list[HeadClass]]:
    """Classes of every head by our rules; "unclear" with the strongest measure if there is none.

    A class needs a p-value below 0.05 after correction for all heads and classes of the table
    (Holm), a score of at least `MIN_SCORE` and at least `MIN_ROWS` rows. One text leaves nothing to
    test over: without `is_tested`, a class needs a score of at least `MIN_UNTESTED_SCORE`.
    """
    candidates = [list(_candidate_classes(head)) for head in table.heads]
    flat = chain.from_iterable(candidates)
    p_values = [one.measure.p if is_tested and one.has_rows else math.nan for one in flat]
    corrected = iter(correct_p_values(p_values).tolist())
    classes: list[list[HeadClass]] = []
    for by_head in candidates:
        by_head = [one._replace(p=next(corrected)) for one in by_head]
        if is_tested:
            able = [one for one in by_head if not math.isnan(one.p)]
            named = [one for one in able if one.p < SIGNIFICANCE and one.score >= MIN_SCORE]
            evidence = [one.tested_evidence for one in named]
            reason = "no measure is clearly above chance"
        else:
            able = [one for one in by_head if one.has_rows]
            named = [one for one in able if one.score >= MIN_UNTESTED_SCORE]
            evidence = [f"{one.evidence}, not tested" for one in named]
            need = "as a class without a test needs; give several texts"
            reason = f"no score is {MIN_UNTESTED_SCORE} or more, {need}"
        reason = reason if able else _untested_reason(by_head)
        pairs = zip(named, evidence, strict=True)
        named_classes = [HeadClass(one.name, one.score, text) for one, text in pairs]
        classes.append(named_classes or [_unclear(reason, by_head)])
    return classes


def _unclear(reason: str, candidates: Sequence[ClassCandidate]) -> HeadClass:
    """The class of a head without any other, with its strongest candidate."""
    if not candidates:
        return HeadClass(UNCLEAR, 0.0, reason)
    top = max(candidates, key=lambda one: one.score)
    evidence = f"the strongest candidate is {top.name}: {top.tested_evidence}"
    return HeadClass(UNCLEAR, 0.0, f"{reason}; {evidence}")


def _untested_reason(candidates: Sequence[ClassCandidate]) -> str:
    """Why no candidate of a head could be tested, and what would help."""
    if not any(one.has_rows for one in candidates):
        fact = f"too little text to name a class: fewer than {MIN_ROWS} rows"
        return f"{fact}; give longer texts or more of them"
    return "there is nothing to test: the texts do not differ in these measures; give more texts"


# --- Published classes ----------------------------------------------------------------------------

CLARK_BROAD_ENTROPY = 3.8
CLARK_OFFSET_THRESHOLD = 0.5
CLARK_TOKEN_THRESHOLD = 0.6  # 1906.04341: nats, and weights
VOITA_POSITION_THRESHOLD = 0.9  # 1905.09418: share of rows
VOITA_CONFIDENCE_THRESHOLD = 0.8  # 1905.09418: largest weight
VOITA_SYNTAX_MARGIN = 0.1  # 1905.09418: share of dependencies above the best offset
# share of rows; 1905.09418 names a head with 0.66 but gives no threshold
VOITA_RARE_THRESHOLD = 0.5
NOT_MEASURED = Measure(math.nan)


def _class_if_above(
    head: HeadMeasures, name: str, measure: str, threshold: float
) -> list[HeadClass]:
    measured = head.measures.get(measure)
    if measured is None or not measured.value > threshold:
        return []
    evidence = f"{get_metric(measure).description} {measured.value:.2f}, above {threshold:g}"
    return [HeadClass(name, min(1.0, measured.value), evidence)]


def clark_classes(head: HeadMeasures) -> list[HeadClass]:
    """Classes of a head by section 3 of Clark et al. (1906.04341)."""
    classes: list[HeadClass] = []
    for name in ("next", "previous", "first", "separator", "punctuation"):
        is_offset = name in ("next", "previous")
        threshold = CLARK_OFFSET_THRESHOLD if is_offset else CLARK_TOKEN_THRESHOLD
        classes += _class_if_above(head, name, f"clark {name}", threshold)
    for broad in _class_if_above(head, "broad", "clark entropy", CLARK_BROAD_ENTROPY):
        entropy = head.measures["clark entropy"]
        classes.append(broad._replace(score=min(1.0, entropy.value / entropy.chance)))
    return classes


def voita_classes(head: HeadMeasures) -> list[HeadClass]:
    """Classes of a head by section 5 of Voita et al. (1905.09418); relations as measured by
    `DependencyScores`.
    """
    classes = _class_if_above(head, "rare-token", "voita rare", VOITA_RARE_THRESHOLD)
    position = head.measures.get("voita position", NOT_MEASURED).value
    confidence = head.measures.get("voita confidence", NOT_MEASURED).value
    if position >= VOITA_POSITION_THRESHOLD and confidence > VOITA_CONFIDENCE_THRESHOLD:
        evidence = f"{position:.2f} of rows have their largest weight at one distance"
        name = offset_class_name(head.measures["voita peak"].value)
        classes.append(
            HeadClass(name, position, f"{evidence}; mean largest weight {confidence:.2f}")
        )
    for name, measure in head.measures.items():
        margin = measure.value - measure.chance
        if is_relation_measure(name) and round(margin, 9) >= VOITA_SYNTAX_MARGIN:
            evidence = (
                f"finds {measure.value:.2f} of dependencies, {margin:.2f} more than the best offset"
            )
            classes.append(HeadClass(name, measure.value, evidence))
    return classes


# --- Choice ---

CLASSIFIERS: Mapping[str, Callable[[HeadTable], list[list[HeadClass]]]] = {
    "ours": partial(classes_by_rules, is_tested=True),
    "untested": partial(classes_by_rules, is_tested=False),
    "clark": lambda table: [clark_classes(head) for head in table.heads],
    "voita": lambda table: [voita_classes(head) for head in table.heads],
}


def classify_heads(table: HeadTable, *, criteria: str = "ours") -> HeadTable:
    """Return the table with the classes of every head in the order of `order_classes`.

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
    check_known("criteria", criteria, CLASSIFIERS)
    published = metrics_for_criteria(criteria)
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
    heads: list[HeadMeasures] = []
    for head, by_head in zip(table.heads, classes, strict=True):
        heads.append(replace(head, classes=order_classes(by_head or unclear)))
    return replace(table, heads=tuple(heads))
