"""Metrics of a head's attention weights, each a sum over rows and the number of rows that it
averages.

A row holds the weights of one query. A metric receives a `WeightBand` (some rows of every head of a
layer) and returns sums and counts, which add up over bands and texts; its value on a data set is
the total sum over the total count. The same metric of a head that reads every allowed key equally
is its chance level, except for `breadth`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter

import torch
from torch import Tensor

from ...util.errors import check_known
from .annotated_examples import TokenAnnotations
from .weight_bands import MAX_OFFSET, WeightBand, row_entropy

# sums over rows, [H] or [H, N], and the number of rows, of the same shape
SumAndCount = tuple[Tensor, Tensor]
Sums = Callable[[WeightBand], SumAndCount]
ReduceFunction = Callable[[Tensor], Tensor]
# largest offset with a separate mean weight, in both directions; farther pairs form one group
MAX_DISTANCE = 16
MAX_ROWS = 64  # rows of a text that `support_sums` sorts, at most
SUPPORT_FRACTIONS = (0.5, 0.9, 0.95)
MASS_TOLERANCE = 1e-6  # relative rounding error allowed in float32 sums


@dataclass(frozen=True)
class HeadMetric:
    """A metric: its name, a short description and the function that sums it over a band.

    Its chance level is its value for uniform attention, or what `compute_chance` sums over a band
    of uniform attention. `weight_source` "rest" measures the weight that sink tokens leave, "all"
    the whole row, "sinks" the whole row where it depends on which tokens are sinks. `reduce` turns
    several means into one number. `self_attention_only` metrics are left out for cross-attention.
    """

    name: str
    description: str
    compute_sums: Sums
    weight_source: str = "all"
    reduce: ReduceFunction | None = None
    self_attention_only: bool = False
    compute_chance: Sums | None = None


HEAD_METRICS: dict[str, HeadMetric] = {}
PATCH_METRICS: dict[str, HeadMetric] = {}  # of images
LITERATURE_METRICS: dict[str, HeadMetric] = {}  # published, with definitions of their own


def define_metric(
    name: str,
    description: str,
    weight_source: str = "all",
    reduce: ReduceFunction | None = None,
    *,
    is_self: bool = False,
    compute_chance: Sums | None = None,
    table: dict[str, HeadMetric] = HEAD_METRICS,
) -> Callable[[Sums], Sums]:
    """Return a decorator that adds a function of sums to a table, as the metric of this name."""

    def define(compute_sums: Sums) -> Sums:
        fields = (name, description, compute_sums, weight_source, reduce, is_self, compute_chance)
        table[name] = HeadMetric(*fields)
        return compute_sums

    return define


def mean_over_rows(rows_HT: Tensor, counted: Tensor) -> SumAndCount:
    """Sum of `rows_HT` over the rows where `counted` is true, and their number."""
    counted = counted.expand_as(rows_HT)
    sums = torch.where(counted, rows_HT, 0).sum(-1, dtype=torch.float64)
    return sums, counted.sum(-1, dtype=torch.float64)


def _weight_on_keys(band: WeightBand, keys: Tensor) -> SumAndCount:
    """Weight on the given tokens, averaged over rows that may read at least one of them."""
    return mean_over_rows(band.weight_on(keys), band.may_read(keys))


def _weight_at_pairs(band: WeightBand, t: Tensor, s: Tensor) -> SumAndCount:
    """Weight of each row on the keys it is paired with; gathered one by one because the pairs are
    few.
    """
    t = t - band.first_query
    s = s - band.first_key
    in_band = (s >= 0) & (s < band.w_HTS.shape[2])
    device = band.w_HTS.device
    t = t[in_band].to(device)
    s = s[in_band].to(device)
    allowed = band.allowed[:, t, s].float()
    rows = band.w_HTS.new_zeros(band.w_HTS.shape[:2]).index_add_(1, t, band.w_HTS[:, t, s])
    rows = band.scale_rows(rows)
    has_pair = allowed.new_zeros(len(allowed), rows.shape[1]).index_add_(1, t, allowed) > 0
    return mean_over_rows(rows, band.select_counted(has_pair))


@define_metric("entropy", "nats of a row")
def entropy_sums(band: WeightBand) -> SumAndCount:
    """Entropy of each row in nats."""
    return mean_over_rows(band.row_entropies, band.has_keys)


def random_breadth_sums(band: WeightBand) -> SumAndCount:
    """The breadth of random attention: weights drawn uniformly from all distributions over the n
    allowed keys.

    Their mean entropy is 1/2 + 1/3 + ... + 1/n, the mean entropy under a flat Dirichlet
    distribution.
    """
    breadth = mean_random_breadth(band.num_allowed_keys).expand(*band.w_HTS.shape[:2])
    return mean_over_rows(breadth, band.select_counted(band.num_allowed_keys > 1))


def mean_random_breadth(num_keys: Tensor) -> Tensor:
    """Breadth at the mean entropy of random attention over so many keys, in float64."""
    num_keys = num_keys.clamp(min=1).double()
    mean_entropy = torch.digamma(num_keys + 1) - torch.digamma(torch.full_like(num_keys, 2))
    return mean_entropy.exp() / num_keys


@define_metric(
    "breadth", "exp(entropy) over the number of allowed keys", compute_chance=random_breadth_sums
)
def breadth_sums(band: WeightBand) -> SumAndCount:
    """exp(entropy) of each row over the number of allowed keys; a row with a single allowed key has
    no breadth.
    """
    breadth = band.row_entropies.exp() / band.num_allowed_keys.clamp(min=1)
    return mean_over_rows(breadth, band.select_counted(band.num_allowed_keys > 1))


@define_metric("confidence", "largest weight of a row")
def confidence_sums(band: WeightBand) -> SumAndCount:
    """Largest weight of each row (1905.09418)."""
    return mean_over_rows(band.max_weight, band.has_keys)


@define_metric("distance", "tokens between query and key", is_self=True)
def distance_sums(band: WeightBand) -> SumAndCount:
    """Mean distance between query and key in tokens, weighted by attention."""
    distance = (band.key_positions - band.query_positions[:, None]).abs().to(band.w_HTS.dtype)
    return mean_over_rows((band.w_HTS * distance).sum(-1), band.has_keys)


@define_metric("sink", "weight on sinks", "sinks")
def sink_sums(band: WeightBand) -> SumAndCount:
    """Weight on special tokens, on a learned sink, and on the first token if it is a sink.

    A weight within rounding error of 0 is 0: p-values of noise would differ between devices.
    """
    weight = 1 - band.non_sink_weight
    rounding = 16 * torch.finfo(weight.dtype).eps
    return mean_over_rows(weight.where(weight > rounding, 0), band.has_keys)


@define_metric("first", "weight on the first token")
def first_token_sums(band: WeightBand) -> SumAndCount:
    """Weight on the first token."""
    keys = torch.zeros_like(band.key_tokens.is_special)
    keys[:1] = True
    return _weight_on_keys(band, keys)


def first_token_choice_sums(band: WeightBand) -> SumAndCount:
    """Weight on the first token, and its chance level, over rows that may also read another token,
    [H, 2].
    """
    sums = band.w_HTS.new_zeros(len(band.w_HTS), 2, dtype=torch.float64)
    if band.first_key:
        return sums, sums
    has_choice = band.allowed[..., 0] & (band.num_allowed_keys > 1)
    weight = torch.where(has_choice, band.w_HTS[..., 0], 0)
    uniform = has_choice / band.num_allowed_keys.clamp(min=1)
    sums[:, 0] = weight.sum(-1, dtype=torch.float64)
    sums[:, 1] = uniform.sum(-1, dtype=torch.float64)
    return sums, has_choice.sum(-1, dtype=torch.float64)[:, None].expand_as(sums)


@define_metric("separator", "weight on separators")
def separator_sums(band: WeightBand) -> SumAndCount:
    """Weight on separators."""
    return _weight_on_keys(band, band.key_tokens.is_separator)


@define_metric("punctuation", "weight on punctuation", "rest")
def punctuation_sums(band: WeightBand) -> SumAndCount:
    """Weight on punctuation."""
    return _weight_on_keys(band, band.key_tokens.is_punctuation)


def _neighbour_sums(band: WeightBand, offset: int) -> SumAndCount:
    """Weight on the key `offset` tokens after the query (-1, 0 or 1) over rows that may read it."""
    weights, counts = band.neighbour_sums
    return weights[:, 1 + offset], counts[:, 1 + offset]


NEIGHBOURS = {
    "previous": "the previous token",
    "self": "the token itself",
    "next": "the next token",
}
for _place, (_name, _token) in enumerate(NEIGHBOURS.items()):
    define_metric(_name, f"weight on {_token}", "rest", is_self=True)(
        partial(_neighbour_sums, offset=_place - 1)
    )


def select_largest(mean: Tensor) -> Tensor:
    """Largest of several means."""
    return mean.amax(-1)


def select_peak_offset(mean: Tensor) -> Tensor:
    """Offset with the largest of the means of `argmax_offset_sums`.

    >>> select_peak_offset(torch.tensor([0.0] * 6 + [0.9] + [0.0] * 10))
    tensor(-2., dtype=torch.float64)
    """
    return torch.where(mean.isnan().any(-1), torch.nan, (mean.argmax(-1) - MAX_OFFSET).double())


LARGEST_OFFSET = "rows whose largest weight is at one distance"
PEAK = "distance at which most rows have their largest weight"


@define_metric("peak", PEAK, "rest", select_peak_offset, is_self=True)
@define_metric("offset", LARGEST_OFFSET, "rest", select_largest, is_self=True)
def argmax_offset_sums(band: WeightBand) -> SumAndCount:
    """Count rows with their largest weight at each offset of -8..8, [H, 17] (1905.09418)."""
    weights, _ = band.nearest
    is_hit = (weights == band.max_weight[..., None]).double()
    counted = band.has_keys.expand(is_hit.shape[:2])
    share = torch.where(counted, 1 / band.num_max_keys, 0).double()
    sums = (share[:, None] @ is_hit)[:, 0]
    return sums, counted.sum(-1, dtype=torch.float64)[:, None].expand_as(sums)


def variance_explained_by_offset(mean: Tensor) -> Tensor:
    """Share of the variance of attention weights that the offset alone explains; 0 where the
    weights do not vary.

    `mean` holds the means of `offset_variance_sums`.
    """
    groups = 2 * MAX_DISTANCE + 2
    group_mean = mean[..., :groups]
    share = mean[..., groups:-1]
    square = mean[..., -1]
    # offsets longer than every text have no pairs
    group_mean = torch.where(share > 0, group_mean, 0)
    grand_mean = (share * group_mean).sum(-1)
    explained = (share * group_mean.square()).sum(-1) - grand_mean.square()
    total = square - grand_mean.square()
    constant = torch.where(total.isnan(), total, 0)
    return torch.where(total > MASS_TOLERANCE * square, explained / total, constant)


@define_metric(
    "positional_share",
    "share of the variance of weights that distance explains",
    "rest",
    variance_explained_by_offset,
    is_self=True,
)
def offset_variance_sums(band: WeightBand) -> SumAndCount:
    """Sums for `variance_explained_by_offset`, [H, 69].

    These are the weights at each offset of -16..16 and at all other offsets, the share of pairs at
    each, and squared weights.
    """
    weights, allowed = band.weights_at_offsets(range(-MAX_DISTANCE, MAX_DISTANCE + 1))
    counted = band.select_counted(torch.ones_like(band.num_allowed_keys, dtype=torch.bool))
    weights = band.scale_rows(weights).sum(1, dtype=torch.float64)
    pairs = (allowed & counted[..., None]).sum(1, dtype=torch.float64)
    total_weight = band.scale_rows(band.w_HTS.sum(-1)).sum(-1, dtype=torch.float64)
    num_pairs = (band.num_allowed_keys * counted).sum(-1, dtype=torch.float64)
    norms = band.scale_rows(torch.linalg.vector_norm(band.w_HTS, dim=-1))
    squares = norms.double().square().sum(-1)
    sums = torch.cat([weights, (total_weight - weights.sum(-1))[:, None]], -1)
    counts = torch.cat([pairs, (num_pairs - pairs.sum(-1))[:, None]], -1).expand_as(sums)
    num_pairs_H1 = num_pairs.expand(len(sums))[:, None]
    all_sums = torch.cat([sums, counts, squares[:, None]], -1)
    return all_sums, torch.cat([counts, num_pairs_H1.expand(-1, 2 * MAX_DISTANCE + 3)], -1)


def support_sums(band: WeightBand) -> SumAndCount:
    """Number of keys that hold 50, 90 and 95 % of a row over the number of allowed keys, [H, 3].

    At most `MAX_ROWS` evenly spaced rows of a text are counted.
    """
    rows = sample_rows(band.query_tokens.count, torch.device("cpu")) - band.first_query
    rows = rows[(rows >= 0) & (rows < band.w_HTS.shape[1])].to(band.w_HTS.device)
    return sum_support(band.w_HTS[:, rows], band.num_allowed_keys[..., rows])


def sample_rows(count: int, device: torch.device) -> Tensor:
    """Evenly spaced queries of a text of `count` tokens, at most `MAX_ROWS`."""
    return torch.linspace(0, count - 1, min(count, MAX_ROWS), device=device).round().long()


def sum_support(w_HTS: Tensor, num_allowed_keys: Tensor) -> SumAndCount:
    """Sums of `support_sums` over rows; each of them may read `num_allowed_keys`, [H or 1, T]."""
    cumulative = w_HTS.sort(-1, descending=True).values.cumsum(-1, dtype=torch.float64)
    fractions = torch.tensor(SUPPORT_FRACTIONS, dtype=torch.float64, device=w_HTS.device)
    goals = cumulative[..., -1:] * (1 - MASS_TOLERANCE) * fractions
    keys = torch.searchsorted(cumulative, goals) + 1
    visible = num_allowed_keys.expand(keys.shape[:2])[..., None]
    counted = (visible > 0).expand_as(keys)
    shares = torch.where(counted, keys.double() / visible.clamp(min=1), 0)
    return shares.sum(1), counted.sum(1, dtype=torch.float64)


for _place, _fraction in enumerate(SUPPORT_FRACTIONS):
    _percent = round(100 * _fraction)
    define_metric(
        f"support{_percent}",
        f"share of keys that hold {_percent} % of a row",
        reduce=itemgetter((..., _place)),
    )(support_sums)


@define_metric("duplicate", "weight on other occurrences of the same token", "rest", is_self=True)
def duplicate_sums(band: WeightBand) -> SumAndCount:
    """Weight on other occurrences of the query's token id."""
    t, s = band.same_id_pairs
    return _weight_at_pairs(band, t[s != t], s[s != t])


@define_metric(
    "induction",
    "weight on tokens that follow an earlier occurrence of the same token",
    "rest",
    is_self=True,
)
def induction_sums(band: WeightBand) -> SumAndCount:
    """Weight on tokens that follow an earlier occurrence of the query's token id (Olsson et al.
    2022).
    """
    t, s = band.same_id_pairs
    earlier = s + 1 < t
    return _weight_at_pairs(band, t[earlier], s[earlier] + 1)


@define_metric("rare", "rows whose largest weight is on the rarest token", "rest")
def rarest_token_sums(band: WeightBand) -> SumAndCount:
    """Count rows with their largest weight on the rarest token of the text (1905.09418)."""
    rarest = find_rarest_tokens(band.key_tokens)
    hits = band.is_max @ band.slice_keys(rarest).to(band.is_max) / band.num_max_keys
    return mean_over_rows(hits, band.may_read(rarest))


def find_rarest_tokens(keys: TokenAnnotations) -> Tensor:
    """Find the tokens with the lowest frequency in the data set, special tokens apart."""
    readable = (keys.frequency > 0) & ~keys.is_special
    frequency = torch.where(readable, keys.frequency.double(), torch.inf)
    return readable & (frequency == frequency.sort().values[:1])


WORD_METRICS = ("separator", "punctuation", "duplicate", "induction", "rare")


# --- Images ---------------------------------------------------------------------------------------


def make_pair_metric(selects: Callable[[Tensor, Tensor], Tensor]) -> Sums:
    """Return a metric of the weight on patches in a relation to the query, over rows that may read
    one of them; the relation is a function of differences of rows and of columns, [T, S] each.
    """

    def sums(band: WeightBand) -> SumAndCount:
        rows, columns, is_patch = _differences(band)
        pairs = selects(rows, columns) & is_patch
        weights = band.scale_rows((band.w_HTS * pairs.to(band.w_HTS.dtype)).sum(-1))
        return mean_over_rows(weights, band.select_counted((band.allowed & pairs).any(-1)))

    return sums


@define_metric(
    "patch_distance", "distance between query and key, in patches", "rest", table=PATCH_METRICS
)
def patch_distance_sums(band: WeightBand) -> SumAndCount:
    """Mean Euclidean distance between query and key in patches, weighted by attention (2010.11929,
    appendix D.7).
    """
    rows, columns, is_patch = _differences(band)
    distance = (rows.square() + columns.square()).to(band.w_HTS.dtype).sqrt()
    sums = band.scale_rows((band.w_HTS * (distance * is_patch)).sum(-1))
    return mean_over_rows(sums, band.select_counted((band.allowed & is_patch).any(-1)))


def _differences(band: WeightBand) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and columns from query to key, [T, S] each, and whether both are patches."""
    grids: list[Tensor] = []  # row and column of each token; -1 for tokens that are not patches
    for tokens in (band.query_tokens, band.key_tokens):
        grid = torch.full((tokens.count, 2), -1) if tokens.patch_grid is None else tokens.patch_grid
        grids.append(grid.to(band.w_HTS.device))
    queries = grids[0][band.query_positions][:, None]
    keys = band.slice_keys(grids[1])[None]
    difference = keys - queries
    is_patch = (queries[..., 0] >= 0) & (keys[..., 0] >= 0)
    return difference[..., 0], difference[..., 1], is_patch


PATCH_RELATIONS: Mapping[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "same_patch": ("the patch itself", lambda rows, columns: (rows == 0) & (columns == 0)),
    "neighbours": (
        "the 8 patches around the query",
        lambda rows, columns: torch.maximum(rows.abs(), columns.abs()) == 1,
    ),
    "same_row": (
        "other patches of the same row",
        lambda rows, columns: (rows == 0) & (columns != 0),
    ),
    "same_column": (
        "other patches of the same column",
        lambda rows, columns: (rows != 0) & (columns == 0),
    ),
}
for _name, (_keys, _relation) in PATCH_RELATIONS.items():
    _description = f"weight on {_keys}"
    define_metric(_name, _description, "rest", table=PATCH_METRICS)(make_pair_metric(_relation))
# The measures of texts that also describe images.
IMAGE_METRICS = (
    *("entropy", "breadth", "confidence", "sink", "support50", "support90", "support95"),
    *PATCH_METRICS,
)
NOT_FOR_IMAGES = (
    "not measured on images: previous, next, offset, peak, positional_share and distance (patches "
    "lie on two axes), "
    "and duplicate, induction, rare, punctuation and separator (patches have no words)"
)


# --- Published metrics ----------------------------------------------------------------------------

# Clark et al. (1906.04341) and Voita et al. (1905.09418) use the whole row, sinks included.
SENTENCE_ENDS = (".", ",")  # the punctuation that Clark et al. measure
SMOOTHING = 1e-4


RowFunction = Callable[[WeightBand], Tensor]


def _clark_metric(
    name: str, description: str, is_self: bool = False
) -> Callable[[RowFunction], RowFunction]:
    """Return a decorator that defines a metric of Clark et al. by a number of each row, [H, T], as
    a mean over texts. A text counts once, however many of its rows may read the tokens in question.
    """

    def define(rows: RowFunction) -> RowFunction:
        def compute_sums(band: WeightBand) -> SumAndCount:
            rows_HT = rows(band)
            num_rows = band.query_tokens.count
            sums = rows_HT.sum(-1, dtype=torch.float64) / num_rows
            return sums, torch.full_like(sums, rows_HT.shape[1] / num_rows)

        define_metric(f"clark {name}", description, is_self=is_self, table=LITERATURE_METRICS)(
            compute_sums
        )
        return rows

    return define


@_clark_metric("next", HEAD_METRICS["next"].description, is_self=True)
def _weight_on_next_token(band: WeightBand) -> Tensor:
    return band.nearest[0][..., MAX_OFFSET + 1]


@_clark_metric("previous", HEAD_METRICS["previous"].description, is_self=True)
def _weight_on_previous_token(band: WeightBand) -> Tensor:
    return band.nearest[0][..., MAX_OFFSET - 1]


@_clark_metric("first", "weight on [CLS]")
def _weight_on_first_token(band: WeightBand) -> Tensor:
    is_first = torch.zeros_like(band.key_tokens.is_special)
    is_first[:1] = True
    return band.weight_on(band.key_tokens.is_special & is_first)


@_clark_metric("separator", "weight on [SEP]")
def _weight_on_separators(band: WeightBand) -> Tensor:
    return band.weight_on(band.key_tokens.is_separator)


@_clark_metric("punctuation", "weight on . and ,")
def _weight_on_sentence_ends(band: WeightBand) -> Tensor:
    flags = [word.strip() in SENTENCE_ENDS for word in band.key_tokens.words]
    return band.weight_on(torch.tensor(flags))


@_clark_metric("entropy", "entropy of a smoothed row in nats")
def _smoothed_entropy(band: WeightBand) -> Tensor:
    """Entropy of the smoothed rows; keys outside the band have only the added weight."""
    added = SMOOTHING / band.key_tokens.count
    entropy_outside_band = (band.key_tokens.count - band.w_HTS.shape[-1]) * added * math.log(added)
    return row_entropy((1 - SMOOTHING) * band.w_HTS + added) - entropy_outside_band


def _voita_sums(compute_sums: Sums, band: WeightBand) -> SumAndCount:
    """Sums over the band without separators as keys and as queries; rows are not rescaled."""
    rows = slice(band.first_query, band.first_query + band.w_HTS.shape[1])
    is_kept = band.slice_keys(~band.key_tokens.is_separator).to(band.w_HTS.device)
    queries = ~band.query_tokens.is_separator[rows].to(band.w_HTS.device)
    allowed = band.allowed & is_kept & queries[:, None]
    return compute_sums(replace(band, w_HTS=band.w_HTS * is_kept, allowed=allowed))


_voita_offsets = partial(_voita_sums, argmax_offset_sums)
for _name, _description, _sums, _reduce in (
    ("confidence", "largest weight of a row, separators excluded", confidence_sums, None),
    ("position", LARGEST_OFFSET, _voita_offsets, select_largest),
    ("peak", PEAK, _voita_offsets, select_peak_offset),
    ("rare", HEAD_METRICS["rare"].description, rarest_token_sums, None),
):
    _is_self = _reduce is not None
    _voita = define_metric(
        f"voita {_name}", _description, reduce=_reduce, is_self=_is_self, table=LITERATURE_METRICS
    )
    _voita(_sums if _is_self else partial(_voita_sums, _sums))


ALL_METRICS: Mapping[str, HeadMetric] = {**HEAD_METRICS, **PATCH_METRICS, **LITERATURE_METRICS}


def get_metric(name: str) -> HeadMetric:
    """Return the metric of this name, one of ours or a published one.

    >>> get_metric("clark next").description
    'weight on the next token'
    """
    check_known("metric", name, ALL_METRICS)
    return ALL_METRICS[name]


def metrics_for_criteria(criteria: str) -> tuple[str, ...]:
    """Names of the metrics that published criteria need; empty for "ours".

    >>> metrics_for_criteria("voita")
    ('voita confidence', 'voita position', 'voita peak', 'voita rare')
    """
    return tuple(name for name in LITERATURE_METRICS if name.startswith(f"{criteria} "))
