"""Published head metrics and classes: Clark et al. (1906.04341) and Voita et al. (1905.09418).

These metrics use the whole row, sinks included. Those of Clark et al. are means over texts instead
of rows: a text counts once, however many of its rows may read the tokens in question.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ...util.errors import suggest
from .annotated_examples import TokenAnnotations
from .dependency_syntax import is_relation_measure
from .head_metrics import (
    HEAD_METRICS,
    PATCH_METRICS,
    HeadMetric,
    SumAndCount,
    argmax_offset_sums,
    confidence_sums,
    rarest_token_sums,
    select_largest,
    select_peak_offset,
)
from .head_table import HeadClass, HeadMeasures, Measure
from .weight_bands import WeightBand, row_entropy

OFFSET_NAMES = {-1: "previous", 0: "self", 1: "next"}

# --- Metrics of Clark et al. ----------------------------------------------------------------------

SENTENCE_ENDS = (".", ",")  # the punctuation that Clark et al. measure
SMOOTHING = 1e-4


def _mean_per_text(rows_HT: Tensor, band: WeightBand) -> SumAndCount:
    """Contribution of rows to the mean over the rows of a text, so that each text counts once."""
    num_rows = band.query_tokens.count
    sums = rows_HT.sum(-1, dtype=torch.float64) / num_rows
    return sums, torch.full_like(sums, rows_HT.shape[1] / num_rows)


def _weight_metric(
    name: str, description: str, select_keys: Callable[[TokenAnnotations], Tensor]
) -> HeadMetric:
    """A metric of the weight on some tokens of the key stream."""

    def sums(band: WeightBand) -> SumAndCount:
        return _mean_per_text(band.weight_on(select_keys(band.key_tokens)), band)

    return HeadMetric(f"clark {name}", description, sums)


def _offset_metric(name: str, offset: int) -> HeadMetric:
    def sums(band: WeightBand) -> SumAndCount:
        return _mean_per_text(band.weights_at_offsets((offset,))[0][..., 0], band)

    description = f"weight on the {name} token"
    return HeadMetric(f"clark {name}", description, sums, self_attention_only=True)


def _is_first_token(tokens: TokenAnnotations) -> Tensor:
    return tokens.is_special & (torch.arange(tokens.count, device=tokens.ids.device) == 0)


def _is_sentence_end(tokens: TokenAnnotations) -> Tensor:
    flags = [word.strip() in SENTENCE_ENDS for word in tokens.words]
    return torch.tensor(flags, device=tokens.ids.device)


def _smoothed_entropy(band: WeightBand) -> SumAndCount:
    """Entropy of the smoothed rows; keys outside the band have only the added weight."""
    added = SMOOTHING / band.key_tokens.count
    entropy_outside_band = (band.key_tokens.count - band.w_HTS.shape[-1]) * added * math.log(added)
    entropy = row_entropy((1 - SMOOTHING) * band.w_HTS + added) - entropy_outside_band
    return _mean_per_text(entropy, band)


CLARK_METRICS: tuple[HeadMetric, ...] = (
    _offset_metric("next", 1),
    _offset_metric("previous", -1),
    _weight_metric("first", "weight on [CLS]", _is_first_token),
    _weight_metric("separator", "weight on [SEP]", lambda tokens: tokens.is_separator),
    _weight_metric("punctuation", "weight on . and ,", _is_sentence_end),
    HeadMetric("clark entropy", "entropy of a smoothed row in nats", _smoothed_entropy),
)


# --- Metrics of Voita et al. ----------------------------------------------------------------------


def _drop_separators(band: WeightBand) -> WeightBand:
    """The band without separators as keys and as queries; rows are not rescaled."""
    is_kept = band.slice_keys(~band.key_tokens.is_separator)
    queries = ~band.query_tokens.is_separator[band.query_positions]
    allowed = band.allowed & is_kept & queries[:, None]
    return replace(band, w_HTS=band.w_HTS * is_kept, allowed=allowed)


def _argmax_offsets(band: WeightBand) -> SumAndCount:
    return argmax_offset_sums(_drop_separators(band))


VOITA_METRICS: tuple[HeadMetric, ...] = (
    HeadMetric(
        "voita confidence",
        "largest weight of a row, separators excluded",
        lambda band: confidence_sums(_drop_separators(band)),
    ),
    HeadMetric(
        "voita position",
        "rows whose largest weight is at one distance",
        _argmax_offsets,
        reduce=select_largest,
        self_attention_only=True,
    ),
    HeadMetric(
        "voita peak",
        "distance at which most rows have their largest weight",
        _argmax_offsets,
        reduce=select_peak_offset,
        self_attention_only=True,
    ),
    HeadMetric(
        "voita rare",
        "rows whose largest weight is on the rarest token",
        lambda band: rarest_token_sums(_drop_separators(band)),
    ),
)
# --- Metrics by name ------------------------------------------------------------------------------

LITERATURE_METRICS: Mapping[str, HeadMetric] = {
    one.name: one for one in (*CLARK_METRICS, *VOITA_METRICS)
}
ALL_METRICS: Mapping[str, HeadMetric] = {**HEAD_METRICS, **PATCH_METRICS, **LITERATURE_METRICS}


def get_metric(name: str) -> HeadMetric:
    """Return the metric of this name, one of ours or a published one.

    >>> get_metric("clark next").description
    'weight on the next token'
    """
    if name not in ALL_METRICS:
        raise ValueError(f"unknown metric {name!r}; {suggest(name, ALL_METRICS)}")
    return ALL_METRICS[name]


def metrics_for_criteria(criteria: str) -> tuple[str, ...]:
    """Names of the metrics that published criteria need; empty for "ours".

    >>> metrics_for_criteria("voita")
    ('voita confidence', 'voita position', 'voita peak', 'voita rare')
    """
    return tuple(name for name in LITERATURE_METRICS if name.startswith(f"{criteria} "))


def offset_class_name(offset: float) -> str:
    """Class name of a head that attends to one offset.

    >>> offset_class_name(-1.0), offset_class_name(3.0)
    ('previous', 'offset +3')
    """
    return OFFSET_NAMES.get(int(offset), f"offset {int(offset):+d}")


# --- Classes --------------------------------------------------------------------------------------

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
