"""What is measured of a head's weights: each a sum over rows, and the number of rows it is a mean of.

A row is what one query reads. A statistic is given a band of rows of every head and adds up; the mean over a data set
is the sum of its sums over the sum of their numbers. The same of a head that reads all it may alike is its chance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .weight_bands import WeightBand

SumAndCount = tuple[Tensor, Tensor]  # of each head: [H] or [H, N], and the number of rows
ReduceFunction = Callable[[Tensor], Tensor]
MAX_OFFSET = 8  # offsets that are looked at, each way
MAX_DISTANCE = 16  # offsets whose mean weight is kept, each way; farther pairs are one group
MAX_ROWS = 64  # of a text are sorted, at most
SUPPORT_FRACTIONS = (0.5, 0.9, 0.95)
MASS_TOLERANCE = 1e-6  # by which a sum of float32 may miss a share


@dataclass(frozen=True)
class HeadMetric:
    """A name, what it says in a sentence, and how it is summed; `of` "rest" is of what sinks leave.

    `fold` makes one number of a mean of several.
    """

    name: str
    description: str
    compute_sums: Callable[[WeightBand], SumAndCount]
    weight_source: str = "all"
    reduce: ReduceFunction | None = None
    self_attention_only: bool = False  # only where a text reads itself


def mean_over_rows(rows_HT: Tensor, counted: Tensor) -> SumAndCount:
    """The sum over the rows that count, and how many these are."""
    counted = counted.expand_as(rows_HT)
    return torch.where(counted, rows_HT, 0).sum(-1, dtype=torch.float64), counted.sum(-1, dtype=torch.float64)


def _weight_on_keys(block: WeightBand, keys: Tensor) -> SumAndCount:
    """The weight on some tokens, of rows that may read one of them."""
    return mean_over_rows(block.weight_on(keys), block.may_read(keys))


def _weight_at_pairs(block: WeightBand, t: Tensor, s: Tensor) -> SumAndCount:
    """The weight of each row on the keys it is paired with, which are few and picked one by one."""
    t, s = t - block.first_query, s - block.first_key
    here = (s >= 0) & (s < block.w_HTS.shape[2])
    t, s = t[here], s[here]
    flags = (block.allowed if block.allowed.dim() == 3 else block.allowed[None])[:, t, s].float()
    rows = block.w_HTS.new_zeros(block.w_HTS.shape[:2]).index_add_(1, t, block.w_HTS[:, t, s])
    may = flags.new_zeros(len(flags), rows.shape[1]).index_add_(1, t, flags) > 0
    return mean_over_rows(rows, block.select_counted(may))


def entropy_sums(block: WeightBand) -> SumAndCount:
    """- sum p log p of each row in nats, and exp of it over the number of keys that may be read, [H, 2]."""
    rows = row_entropy(block.w_HTS)
    shares = rows.exp() / block.num_allowed_keys.clamp(min=1)
    told = [mean_over_rows(one, block.has_keys) for one in (rows, shares)]
    return torch.stack([sums for sums, _ in told], -1), torch.stack([numbers for _, numbers in told], -1)


def row_entropy(w_HTS: Tensor) -> Tensor:
    """- sum p log p of each row, [H, T]; of weights below zero there is none.

    >>> row_entropy(torch.tensor([[[0.5, 0.5, 0.0]]]))
    tensor([[0.6931]])
    """
    least = torch.finfo(w_HTS.dtype).tiny  # changes no weight but 0, and nothing times its logarithm is nothing
    return -(w_HTS + least).log_().mul_(w_HTS).sum(-1)


def confidence_sums(block: WeightBand) -> SumAndCount:
    """The largest weight of each row (1905.09418)."""
    return mean_over_rows(block.max_weight, block.has_keys)


def distance_sums(block: WeightBand) -> SumAndCount:
    """How far away keys are, in tokens."""
    far = (block.key_positions - block.query_positions[:, None]).abs().to(block.w_HTS.dtype)
    return mean_over_rows((block.w_HTS * far).sum(-1), block.has_keys)


def sink_sums(block: WeightBand) -> SumAndCount:
    """The weight on the first token and on those that stand for no text, and what a learned sink takes."""
    return mean_over_rows(1 - block.non_sink_weight, block.has_keys)


def separator_sums(block: WeightBand) -> SumAndCount:
    """The weight on separators."""
    return _weight_on_keys(block, block.key_tokens.is_separator)


def first_token_sums(block: WeightBand) -> SumAndCount:
    """The weight on the first token."""
    keys = torch.zeros_like(block.key_tokens.is_special)
    keys[:1] = True
    return _weight_on_keys(block, keys)


def punctuation_sums(block: WeightBand) -> SumAndCount:
    """The weight on punctuation."""
    return _weight_on_keys(block, block.key_tokens.is_punctuation)


def make_offset_metric(offset: int) -> Callable[[WeightBand], SumAndCount]:
    """The weight on the key so many tokens later, of rows that may read it."""

    def sums(block: WeightBand) -> SumAndCount:
        those, may = block.weights_at_offsets((offset,))
        return mean_over_rows(those[..., 0], block.select_counted(may[..., 0]))

    return sums


def argmax_offset_sums(block: WeightBand) -> SumAndCount:
    """How often the largest weight stands at each offset of -8..8, [H, 17] (1905.09418)."""
    those, _ = block.weights_at_offsets(range(-MAX_OFFSET, MAX_OFFSET + 1))
    hits = (those == block.max_weight[..., None]) / block.num_max_keys[..., None]
    counted = block.has_keys.expand(hits.shape[:2])
    found = torch.where(counted[..., None], hits, 0).sum(1, dtype=torch.float64)
    return found, counted.sum(-1, dtype=torch.float64)[:, None].expand_as(found)


def duplicate_sums(block: WeightBand) -> SumAndCount:
    """The weight on other tokens of the same id."""
    t, s = block.same_id_pairs
    return _weight_at_pairs(block, t[s != t], s[s != t])


def induction_sums(block: WeightBand) -> SumAndCount:
    """The weight on tokens behind earlier ones of the same id (Olsson et al. 2022)."""
    t, s = block.same_id_pairs
    earlier = s + 1 < t
    return _weight_at_pairs(block, t[earlier], s[earlier] + 1)


def rarest_token_sums(block: WeightBand) -> SumAndCount:
    """How often the largest weight stands on the rarest token of the text (1905.09418)."""
    told = block.key_tokens
    readable = (told.frequency > 0) & ~told.is_special
    if not bool(readable.any()):
        zero = block.w_HTS.new_zeros(block.w_HTS.shape[0], dtype=torch.float64)
        return zero, zero
    least = torch.where(readable, told.frequency, told.frequency.max() + 1).min()
    rarest = readable & (told.frequency == least)
    hits = block.is_max @ block.slice_keys(rarest).to(block.is_max.dtype) / block.num_max_keys
    return mean_over_rows(hits, block.may_read(rarest))


def support_sums(block: WeightBand) -> SumAndCount:
    """How many keys hold 50, 90 and 95 % of a row, over those that may be read, [H, 3]; of rows evenly spread."""
    count = block.query_tokens.count
    spread = (
        torch.linspace(0, count - 1, min(count, MAX_ROWS), device=block.w_HTS.device).round().long() - block.first_query
    )
    rows = spread[(spread >= 0) & (spread < block.w_HTS.shape[1])]
    held = block.w_HTS[:, rows].sort(-1, descending=True).values.cumsum(-1, dtype=torch.float64)
    goals = (
        held[..., -1:] * (1 - MASS_TOLERANCE) * torch.tensor(SUPPORT_FRACTIONS, dtype=torch.float64, device=held.device)
    )
    keys = torch.searchsorted(held, goals) + 1
    visible = block.num_allowed_keys[..., rows].expand(keys.shape[:2])
    counted = (visible > 0)[..., None]
    found = torch.where(counted, keys.double() / visible.clamp(min=1)[..., None], 0).sum(1, dtype=torch.float64)
    return found, counted.expand_as(keys).sum(1, dtype=torch.float64)


def offset_variance_sums(block: WeightBand) -> SumAndCount:
    """Weights of each offset of -16..16 and of all others, how many pairs these are of all, and squares: [H, 69].

    All that the share of their variance that offsets explain is made of, see `explained`.
    """
    those, may = block.weights_at_offsets(range(-MAX_DISTANCE, MAX_DISTANCE + 1))
    left = block.select_counted(torch.ones_like(block.num_allowed_keys, dtype=torch.bool))
    those, pairs = those.sum(1, dtype=torch.float64), (may & left[..., None]).sum(1, dtype=torch.float64)
    whole = block.w_HTS.sum(-1).sum(-1, dtype=torch.float64)
    every = (block.num_allowed_keys * left).sum(-1, dtype=torch.float64)
    squares = torch.linalg.vector_norm(block.w_HTS, dim=-1).double().square().sum(-1)
    sums = torch.cat([those, (whole - those.sum(-1))[:, None]], -1)
    numbers = torch.cat([pairs, (every - pairs.sum(-1))[:, None]], -1).expand_as(sums)
    total = every.expand(len(sums))[:, None]
    return torch.cat([sums, numbers, squares[:, None]], -1), torch.cat(
        [numbers, total.expand(-1, 2 * MAX_DISTANCE + 3)], -1
    )


def variance_explained_by_offset(mean: Tensor) -> Tensor:
    """The share of the variance of weights that offsets alone explain, of `by_offset`; 0 where nothing varies."""
    groups = 2 * MAX_DISTANCE + 2
    of_group, share, square = mean[..., :groups], mean[..., groups:-1], mean[..., -1]
    of_group = torch.where(share > 0, of_group, 0)  # nobody is at an offset that no text is long enough for
    centre = (share * of_group).sum(-1)
    within, total = (share * of_group.square()).sum(-1) - centre.square(), square - centre.square()
    return torch.where(total > MASS_TOLERANCE * square, within / total, torch.where(total.isnan(), total, 0))


def select_largest(mean: Tensor) -> Tensor:
    """The largest of several means."""
    return mean.amax(-1)


def select_peak_offset(mean: Tensor) -> Tensor:
    """The offset of the largest of the means of `offsets`.

    >>> select_peak_offset(torch.tensor([0.0] * 6 + [0.9] + [0.0] * 10))
    tensor(-2., dtype=torch.float64)
    """
    return torch.where(mean.isnan().any(-1), torch.nan, (mean.argmax(-1) - MAX_OFFSET).double())


def make_selector(index: int) -> ReduceFunction:
    """One of several means.

    >>> make_selector(1)(torch.tensor([0.2, 0.7]))
    tensor(0.7000)
    """
    return lambda mean: mean[..., index]


HEAD_METRICS: Mapping[str, HeadMetric] = {
    one.name: one
    for one in (
        HeadMetric("entropy", "nats of a row", entropy_sums, reduce=make_selector(0)),
        HeadMetric("breadth", "share of what may be read that is read", entropy_sums, reduce=make_selector(1)),
        HeadMetric("confidence", "largest weight of a row", confidence_sums),
        HeadMetric("distance", "tokens between query and key", distance_sums, self_attention_only=True),
        HeadMetric("sink", "weight on sinks", sink_sums),
        HeadMetric("first", "weight on the first token", first_token_sums),
        HeadMetric("separator", "weight on separators", separator_sums),
        HeadMetric("punctuation", "weight on punctuation", punctuation_sums, "rest"),
        HeadMetric("previous", "weight on the token before", make_offset_metric(-1), "rest", self_attention_only=True),
        HeadMetric("self", "weight on the token itself", make_offset_metric(0), "rest", self_attention_only=True),
        HeadMetric("next", "weight on the token behind", make_offset_metric(1), "rest", self_attention_only=True),
        HeadMetric(
            "offset",
            "rows whose largest weight is at one distance",
            argmax_offset_sums,
            "rest",
            select_largest,
            self_attention_only=True,
        ),
        HeadMetric(
            "peak",
            "the distance that most largest weights are at",
            argmax_offset_sums,
            "rest",
            select_peak_offset,
            self_attention_only=True,
        ),
        HeadMetric(
            "positional_share",
            "variance of weights that distance explains",
            offset_variance_sums,
            "rest",
            variance_explained_by_offset,
            self_attention_only=True,
        ),
        HeadMetric("support50", "share of keys that hold half of a row", support_sums, reduce=make_selector(0)),
        HeadMetric("support90", "share of keys that hold 90 % of a row", support_sums, reduce=make_selector(1)),
        HeadMetric("support95", "share of keys that hold 95 % of a row", support_sums, reduce=make_selector(2)),
        HeadMetric("duplicate", "weight on the same token elsewhere", duplicate_sums, "rest", self_attention_only=True),
        HeadMetric(
            "induction", "weight behind an earlier same token", induction_sums, "rest", self_attention_only=True
        ),
        HeadMetric("rare", "rows whose largest weight is on the rarest token", rarest_token_sums, "rest"),
    )
}
