"""What others have measured of heads and how they name them: Clark et al. (1906.04341), Voita et al. (1905.09418).

Their sums are over all of a row, sinks included, and Clark's are means over texts and not over rows: a text of n tokens
counts once, however many rows may read what is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import log

import torch
from torch import Tensor

from ..errors import suggest
from .dependency_syntax import is_relation_measure
from .head_metrics import (
    HEAD_METRICS,
    HeadMetric,
    SumAndCount,
    argmax_offset_sums,
    mean_over_rows,
    rarest_token_sums,
    row_entropy,
    select_largest,
    select_peak_offset,
)
from .head_table import HeadClass, HeadMeasures
from .weight_bands import WeightBand

SENTENCE_ENDS = (".", ",")  # the punctuation that Clark et al. looked at
SMOOTHING = 1e-4
CLARK_BROAD_ENTROPY, CLARK_OFFSET_THRESHOLD, CLARK_TOKEN_THRESHOLD = 3.8, 0.5, 0.6  # 1906.04341: nats, and weights
VOITA_POSITION_THRESHOLD, VOITA_CONFIDENCE_THRESHOLD, VOITA_SYNTAX_MARGIN = (
    0.9,
    0.8,
    0.1,
)  # 1905.09418: rows, largest weight, and share of arcs above the best offset
OFFSET_NAMES = {-1: "previous", 0: "self", 1: "next"}
VOITA_RARE_THRESHOLD = 0.5  # of rows; 1905.09418 names a head of 0.66 and no bound


def _mean_per_text(rows_HT: Tensor, chosen: Tensor, num_rows: int) -> SumAndCount:
    """The part of these rows in the mean over a text, of which so many rows are counted; each text counts once."""
    heads = rows_HT.shape[0]
    sums = torch.where(chosen, rows_HT, 0).sum(-1, dtype=torch.float64) / max(1, num_rows)
    return sums, (chosen.sum(dtype=torch.float64) / max(1, num_rows)).expand(heads)


def _counted_rows(block: WeightBand) -> Tensor:
    return torch.ones(block.w_HTS.shape[1], dtype=torch.bool, device=block.w_HTS.device)


def _mean_weight(keys: Callable[[WeightBand], Tensor], block: WeightBand) -> SumAndCount:
    return _mean_per_text(block.weight_on(keys(block)), _counted_rows(block), block.query_tokens.count)


def _weight_at_offset(offset: int, block: WeightBand) -> SumAndCount:
    return _mean_per_text(
        block.weights_at_offsets((offset,))[0][..., 0], _counted_rows(block), block.query_tokens.count
    )


def _is_first_token(block: WeightBand) -> Tensor:
    first = torch.zeros_like(block.key_tokens.is_special)
    first[:1] = block.key_tokens.is_special[:1]
    return first


def _is_separator(block: WeightBand) -> Tensor:
    return block.key_tokens.is_separator


def _is_sentence_end(block: WeightBand) -> Tensor:
    return torch.tensor([word.strip() in SENTENCE_ENDS for word in block.key_tokens.words], device=block.w_HTS.device)


def _weight_on_separators(own: str, block: WeightBand) -> SumAndCount:
    """The weight on separators of rows that are such, or of all others."""
    those = block.query_tokens.is_separator if own == "separator" else ~block.query_tokens.is_separator
    return _mean_per_text(
        block.weight_on(block.key_tokens.is_separator), those[block.query_positions], int(those.sum())
    )


def _smooth_weights(block: WeightBand) -> Tensor:
    each = SMOOTHING / block.key_tokens.count
    elsewhere = (block.key_tokens.count - block.w_HTS.shape[-1]) * each * log(each)
    return row_entropy((1 - SMOOTHING) * block.w_HTS + each) - elsewhere


def _mean_entropy(block: WeightBand) -> SumAndCount:
    return _mean_per_text(_smooth_weights(block), _counted_rows(block), block.query_tokens.count)


def _first_token_entropy(block: WeightBand) -> SumAndCount:
    return _mean_per_text(
        _smooth_weights(block), (block.query_positions == 0) & block.query_tokens.is_special[block.query_positions], 1
    )


CLARK_METRICS: tuple[HeadMetric, ...] = (
    HeadMetric("clark self", "weight on itself", partial(_weight_at_offset, 0), self_attention_only=True),
    HeadMetric("clark next", "weight on the token behind", partial(_weight_at_offset, 1), self_attention_only=True),
    HeadMetric(
        "clark previous", "weight on the token before", partial(_weight_at_offset, -1), self_attention_only=True
    ),
    HeadMetric("clark first", "weight on [CLS]", partial(_mean_weight, _is_first_token)),
    HeadMetric("clark separator", "weight on [SEP]", partial(_mean_weight, _is_separator)),
    HeadMetric("clark separator to itself", "weight of [SEP] on [SEP]", partial(_weight_on_separators, "separator")),
    HeadMetric("clark others to separator", "weight of all others on [SEP]", partial(_weight_on_separators, "others")),
    HeadMetric("clark punctuation", "weight on . and ,", partial(_mean_weight, _is_sentence_end)),
    HeadMetric("clark entropy", "nats of a smoothed row", _mean_entropy),
    HeadMetric("clark entropy of first", "nats of the smoothed row of [CLS]", _first_token_entropy),
)


def _drop_sentence_end(block: WeightBand) -> WeightBand:
    """The same without the tokens that end a text, as keys and as rows; what is left is not made whole."""
    kept = block.slice_keys(~block.key_tokens.is_separator)
    allowed = block.allowed & kept & ~block.query_tokens.is_separator[block.query_positions][:, None]
    return replace(block, w_HTS=block.w_HTS * kept, allowed=allowed)


def _mean_confidence(block: WeightBand) -> SumAndCount:
    block = _drop_sentence_end(block)
    return mean_over_rows(block.max_weight, block.has_keys)


def _argmax_offsets(block: WeightBand) -> SumAndCount:
    return argmax_offset_sums(_drop_sentence_end(block))


def _rarest_token_hits(block: WeightBand) -> SumAndCount:
    return rarest_token_sums(_drop_sentence_end(block))


VOITA_METRICS: tuple[HeadMetric, ...] = (
    HeadMetric("voita confidence", "largest weight of a row, but for the end of the text", _mean_confidence),
    HeadMetric(
        "voita position",
        "rows whose largest weight is at one distance",
        _argmax_offsets,
        reduce=select_largest,
        self_attention_only=True,
    ),
    HeadMetric(
        "voita peak",
        "the distance that most largest weights are at",
        _argmax_offsets,
        reduce=select_peak_offset,
        self_attention_only=True,
    ),
    HeadMetric("voita rare", "rows whose largest weight is on the rarest token", _rarest_token_hits),
)
LITERATURE_METRICS: Mapping[str, HeadMetric] = {one.name: one for one in (*CLARK_METRICS, *VOITA_METRICS)}
ALL_METRICS: Mapping[str, HeadMetric] = {**HEAD_METRICS, **LITERATURE_METRICS}


def get_metric(name: str) -> HeadMetric:
    """The statistic of this name, ours or published.

    >>> get_metric("clark next").description
    'weight on the token behind'
    """
    if name not in ALL_METRICS:
        raise ValueError(f"no statistic is called {name!r}; {suggest(name, ALL_METRICS)}")
    return ALL_METRICS[name]


def metrics_for_criteria(criteria: str) -> tuple[str, ...]:
    """The statistics that these criteria ask for.

    >>> metrics_for_criteria("voita")
    ('voita confidence', 'voita position', 'voita peak', 'voita rare')
    """
    return tuple(name for name in LITERATURE_METRICS if name.startswith(f"{criteria} "))


def offset_class_name(offset: float) -> str:
    """What a head is called that reads at one distance.

    >>> offset_class_name(-1.0), offset_class_name(3.0)
    ('previous', 'offset +3')
    """
    return OFFSET_NAMES.get(int(offset), f"offset {int(offset):+d}")


def _class_if_above(head: HeadMeasures, name: str, measure: str, bound: float) -> list[HeadClass]:
    """The class of this name if a measure is above its bound."""
    one = head.measures.get(measure)
    if one is None or not one.value > bound:
        return []
    return [HeadClass(name, min(1.0, one.value), f"{get_metric(measure).description} {one.value:.2f}, above {bound:g}")]


def clark_classes(head: HeadMeasures) -> list[HeadClass]:
    """What section 3 of 1906.04341 calls a head."""
    found = _class_if_above(head, "next", "clark next", CLARK_OFFSET_THRESHOLD) + _class_if_above(
        head, "previous", "clark previous", CLARK_OFFSET_THRESHOLD
    )
    for name in ("first", "separator", "punctuation"):
        found += _class_if_above(head, name, f"clark {name}", CLARK_TOKEN_THRESHOLD)
    for broad in _class_if_above(head, "broad", "clark entropy", CLARK_BROAD_ENTROPY):
        one = head.measures["clark entropy"]
        found.append(broad._replace(score=min(1.0, one.value / one.chance)))
    return found


def voita_classes(head: HeadMeasures) -> list[HeadClass]:
    """What section 5 of 1905.09418 calls a head; relations as measured by `Syntax`."""
    found = _class_if_above(head, "rare-token", "voita rare", VOITA_RARE_THRESHOLD)
    position, sure = head.measures.get("voita position"), head.measures.get("voita confidence")
    if position and sure and position.value >= VOITA_POSITION_THRESHOLD and sure.value > VOITA_CONFIDENCE_THRESHOLD:
        why = f"{position.value:.2f} of rows read most at one distance, largest weight {sure.value:.2f}"
        found.append(HeadClass(offset_class_name(head.measures["voita peak"].value), position.value, why))
    for name, one in head.measures.items():
        if is_relation_measure(name) and round(one.value - one.chance, 9) >= VOITA_SYNTAX_MARGIN:
            why = f"finds {one.value:.2f} of arcs, {one.value - one.chance:.2f} more than the best offset"
            found.append(HeadClass(name, one.value, why))
    return found
