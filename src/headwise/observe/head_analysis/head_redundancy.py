"""Redundancy of heads: how similar their attention patterns and outputs are, compared with chance.

`measure_redundancy` compares all heads over the same tokens: distances, clusters, a map in the
plane, how much the heads of each layer differ, and outliers. Weights on sinks are left out, because
heads that agree only on them are not redundant; `ComparableHeads.with_sinks` has the distances of
whole rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ...report.data import Table, Value
from ...report.numbers import format_number, format_p
from ...report.render import to_plain, to_text
from ..inspect.attention_sites import left_out_notes, require_ability
from ..inspect.model_inputs import get_streams, is_encoder_decoder
from .annotated_examples import Example
from .attention_sinks import mark_first_token_sinks
from .distinct_examples import DistinctExamples
from .head_similarity import (
    CKA_ESTIMATORS,
    SMOOTHING_METHODS,
    ClusterMerge,
    HeadLocation,
    NonSinkRows,
    OutputReservoir,
    PlaneEmbedding,
    RowSampling,
    SampledRows,
    StreamPair,
    average_linkage,
    centred_kernel_alignment,
    collect_head_outputs,
    cut_clusters,
    embed_in_plane,
    jensen_shannon_divergence,
    sample_rows,
    smooth_weights,
    spread_of_sets,
)
from .head_table import Measure
from .resampling import (
    Array,
    FoldedSums,
    MeanIntervals,
    PermutationTest,
    class_separation_test,
    compare_with_null,
    correct_p_values,
    expected_pairs_below,
    mantel_test,
    poisson_test,
    ratio_of_sums,
)

# --- Diversity of layers and outliers -------------------------------------------------------------

NUM_NULL_DRAWS = 100_000
SIGNIFICANCE = 0.05


class LayerDiversity(NamedTuple):
    """Diversity of the heads of one layer, from 0 (identical attention) to 1 (no two heads share a
    key).

    `spread` is (H(mean of rows) - mean of H(row)) / log(number of heads) (1909.00015), over rows
    without sinks. Its chance level is the mean over random sets of as many heads from all layers;
    `p` is the share of these sets that lie as far from that mean, corrected for the number of
    layers.
    """

    site: str
    heads: int
    spread: Measure
    p: float

    @property
    def data(self) -> dict[str, Any]:
        """Dictionary of plain values, ready for JSON."""
        return to_plain(self._asdict())


class HeadOutlier(NamedTuple):
    """A head, its mean `distance` to the other heads of its layer, and how unusual that is.

    `studentised` is the log of `distance`, minus the mean and divided by the standard deviation of
    that log over the other heads.
    """

    head: HeadLocation
    distance: float
    studentised: float
    p: float


class DiversitySums:
    """Sums of the diversity of each layer, text by text, for the true layers and for heads permuted
    among layers.
    """

    def __init__(self, heads: Sequence[HeadLocation], permutations: int, seed: int) -> None:
        self.sites = tuple(dict.fromkeys(head.site for head in heads))
        self.sizes = [sum(head.site == site for head in heads) for site in self.sites]
        layer_of_head = np.array([self.sites.index(head.site) for head in heads])
        generator = np.random.default_rng(seed)
        times = permutations if len(self.sites) > 1 else 0
        assignments = [layer_of_head, *(generator.permutation(layer_of_head) for _ in range(times))]
        self.sets = torch.cat(
            [_membership(torch.from_numpy(layers), len(self.sites)) for layers in assignments]
        )
        self.observed, shape = FoldedSums(), (times, len(self.sites))
        self.permuted, self.permuted_counts = np.zeros(shape), np.zeros(shape)

    def add(self, text_index: int, rows: NonSinkRows, row_weight: float = 1.0) -> None:
        """Add rows of a text."""
        sums, counts = (
            row_weight * one.cpu().numpy().reshape(-1, len(self.sites))
            for one in spread_of_sets(rows.weights, self.sets, rows.counted)
        )
        self.observed.add(text_index, sums[0], counts[0])
        self.permuted += sums[1:]
        self.permuted_counts += counts[1:]

    def layer_diversities(self) -> tuple[LayerDiversity, ...]:
        """Diversity of each layer; NaN for a single head, and without a chance level for a single
        layer.
        """
        spreads = self.observed.mean_intervals()
        permuted = ratio_of_sums(self.permuted[None], self.permuted_counts[None])
        # The null distribution of a layer pools the permuted layers of the same size.
        null_values = [permuted[:, np.equal(self.sizes, size)].ravel() for size in self.sizes]
        null_values = [null[~np.isnan(null)] for null in null_values]
        tests = [
            compare_with_null(value, null)
            for value, null in zip(spreads.mean, null_values, strict=True)
        ]
        p = correct_p_values([test.p for test in tests])
        return tuple(
            LayerDiversity(site, size, spreads.measure_at(n, tests[n].chance), float(p[n]))
            for n, (site, size) in enumerate(zip(self.sites, self.sizes, strict=True))
        )


def _membership(class_of_item: Tensor, count: int) -> Tensor:
    """One-hot membership [classes, items]."""
    return (class_of_item == torch.arange(count)[:, None]).float()


def find_outliers(
    distances: Array,
    heads: Sequence[HeadLocation],
    *,
    seed: int = 0,
    num_draws: int = NUM_NULL_DRAWS,
) -> tuple[HeadOutlier, ...]:
    """Test every head with at least two other heads in its layer for being an outlier; the most
    significant come first.

    The log of a head's mean distance to the other heads is studentised with the mean and the
    deviation of the other heads (Grubbs 1950). `p` is the share of samples of as many normal
    numbers in which the first lies as far out, corrected for the number of heads.
    """
    outliers: list[HeadOutlier] = []
    for site in dict.fromkeys(head.site for head in heads):
        members = [n for n, head in enumerate(heads) if head.site == site]
        if len(members) < 3:
            continue
        mean_distance = distances[np.ix_(members, members)].sum(1) / (len(members) - 1)
        studentised = _studentise(np.log(np.maximum(mean_distance, 1e-12))[None])[0]
        normal = np.random.default_rng([seed, len(members)]).standard_normal(
            (num_draws, len(members))
        )
        null_values = _studentise(normal)[:, 0]
        for k, n in enumerate(members):
            p = compare_with_null(studentised[k], null_values, "high").p
            outliers.append(
                HeadOutlier(heads[n], float(mean_distance[k]), float(studentised[k]), p)
            )
    corrected = correct_p_values([outlier.p for outlier in outliers])
    outliers = [
        outlier._replace(p=float(p)) for outlier, p in zip(outliers, corrected, strict=True)
    ]
    return tuple(sorted(outliers, key=lambda outlier: (outlier.p, -outlier.studentised)))


def _studentise(values: Array) -> Array:
    """Each value minus the mean of the others in its row, over the standard deviation of the
    others.
    """
    count = values.shape[1] - 1
    values = values - values.mean(1, keepdims=True)
    total = values.sum(1, keepdims=True)
    squares = (values**2).sum(1, keepdims=True)
    mean = (total - values) / count
    variance = np.maximum((squares - values**2) / count - mean**2, 0)
    deviation = np.sqrt(variance * count / max(1, count - 1))
    gap = values - mean
    return np.divide(
        gap,
        deviation,
        out=np.where(gap == 0, 0.0, np.copysign(np.inf, gap)),
        where=deviation > 1e-12,
    )


# --- Options and results --------------------------------------------------------------------------

EQUAL_DISTANCE = 1e-9  # nats; smaller distances are rounding
CHANCE_RATE = 0.05  # share of pairs below the distance threshold by chance


class RedundancyOptions(NamedTuple):
    """Options of `measure_redundancy`.

    - `rows_per_text`: queries sampled from each text for the attention patterns.
    - `num_tokens`: tokens sampled from all texts for the comparison of outputs.
    - `smoothing`: of attention weights, "none" or "clark" (1906.04341).
    - `cka_estimator`: "unbiased" or "linear", see `centred_kernel_alignment`.
    - `num_permutations`, `seed`: of permutation tests.
    - `max_distance`: distance below which heads form one cluster; None uses the distance that 5 %
      of pairs fall below
      by chance.
    """

    rows_per_text: int = 64
    num_tokens: int = 1024
    smoothing: str = "none"
    cka_estimator: str = "unbiased"
    num_permutations: int = 199
    seed: int = 0
    max_distance: float | None = None

    def validate(self) -> RedundancyOptions:
        """Return the options; raise ValueError if one is invalid."""
        for name, value, choices in (
            ("smoothing", self.smoothing, SMOOTHING_METHODS),
            ("cka_estimator", self.cka_estimator, CKA_ESTIMATORS),
        ):
            if value not in choices:
                raise ValueError(f"unknown {name}={value!r}; use {' or '.join(map(repr, choices))}")
        for name, minimum in (("rows_per_text", 1), ("num_tokens", 4), ("num_permutations", 1)):
            if getattr(self, name) < minimum:
                raise ValueError(f"{name} must be >= {minimum}, got {getattr(self, name)}")
        return self


class WholeRows(NamedTuple):
    """Comparison of whole attention rows, sinks included.

    `num_similar` pairs are significantly closer than `threshold` and than their chance distance;
    `num_expected` are by chance, if weights are permuted but those on sinks stay.
    """

    distances: Array
    threshold: float
    num_similar: int
    num_expected: float

    @property
    def median(self) -> float:
        """Median distance of all pairs."""
        return float(np.median(self.distances[np.triu_indices(len(self.distances), 1)]))

    @property
    def data(self) -> dict[str, Any]:
        """Dictionary of plain values, ready for JSON."""
        return {**self._asdict(), "distances": to_plain(self.distances)}


@dataclass(frozen=True, eq=False)
class ComparableHeads:
    """Heads with the same query and key tokens, and every comparison between them.

    - `distances`, `low`, `high`: Jensen-Shannon divergences of attention rows without sinks in nats
      [heads, heads],
      means over the rows in which sinks leave both heads at least 1 % of the weight, with
      confidence intervals.
    - `chance`: the divergences if the weights of one head are permuted among the other keys that it
      may read. They are
      as sharp as before but unrelated.
    - `with_sinks`: the same comparison of whole rows. `sink_weight` is the mean weight on sinks.
    - `without_rest`: heads that are not compared because sinks leave them less than 1 % of the
      weight in (almost) all
      rows.
    - `outputs`: CKA of head outputs, or None if it could not be computed.
    - `merges`, `threshold`, `clusters`: steps of the average-linkage clustering, its distance
      threshold, and the
      cluster of each head. `num_chance_clusters` is the number of clusters of the chance distances
      at this threshold.
    - `embedding`: the heads as points in the plane.
    - `layers`, `outliers`: diversity of each layer, and outlying heads.
    - `similar_pair_test`: number of significantly similar pairs against the number expected by
      chance.
    - `within_layer_test`: distances within layers against distances between layers.
    - `agreement`: correlation of distances with those of outputs.
    """

    streams: StreamPair
    heads: tuple[HeadLocation, ...]
    distances: Array
    low: Array
    high: Array
    chance: Array
    with_sinks: WholeRows
    sink_weight: float
    without_rest: tuple[HeadLocation, ...]
    outputs: Array | None
    merges: tuple[ClusterMerge, ...]
    threshold: float
    clusters: tuple[int, ...]
    num_chance_clusters: int
    embedding: PlaneEmbedding
    layers: tuple[LayerDiversity, ...]
    outliers: tuple[HeadOutlier, ...]
    similar_pair_test: PermutationTest
    within_layer_test: PermutationTest
    agreement: PermutationTest

    @property
    def num_pairs(self) -> int:
        """Number of pairs of heads."""
        return len(self.heads) * (len(self.heads) - 1) // 2

    @property
    def similar_pairs(self) -> tuple[tuple[HeadLocation, HeadLocation], ...]:
        """Pairs whose interval ends below the threshold and below their chance distance, the
        closest first.
        """
        first, second = np.triu_indices(len(self.heads), 1)
        is_similar = (self.high < np.minimum(self.threshold, self.chance))[first, second]
        order = np.argsort(self.distances[first, second], kind="stable")
        return tuple((self.heads[first[n]], self.heads[second[n]]) for n in order if is_similar[n])

    @property
    def cluster_members(self) -> tuple[tuple[HeadLocation, ...], ...]:
        """The heads of each cluster, the largest cluster first."""
        members: dict[int, list[HeadLocation]] = {}
        for head, cluster in zip(self.heads, self.clusters, strict=True):
            members.setdefault(cluster, []).append(head)
        return tuple(sorted(map(tuple, members.values()), key=len, reverse=True))

    @property
    def sentence(self) -> str:
        """Whether the heads are redundant, with the number of similar pairs."""
        test = self.similar_pair_test
        counts = (
            f"{len(self.similar_pairs)} of {self.num_pairs} pairs of heads are significantly more "
            f"similar than chance; {test.chance:.1f} are expected (p {format_p(test.p)})."
        )
        if not test.p < SIGNIFICANCE:
            return f"Not shown to be redundant: {counts}"
        agreement = self.agreement
        return f"{counts} Their outputs agree with r = {agreement.value:.2f} (p {format_p(agreement.p)})."

    def list_findings(self) -> dict[str, Value]:
        """Return the numbers on which the answer rests, by name."""
        pairs = np.triu_indices(len(self.heads), 1)
        within = self.within_layer_test
        agreement = self.agreement
        different = sum(layer.p < SIGNIFICANCE for layer in self.layers)
        outliers = [str(one.head) for one in self.outliers if one.p < SIGNIFICANCE]
        return {
            "heads": len(self.heads),
            "mean weight on sinks, which are left out": self.sink_weight,
            "median distance, nats": float(np.median(self.distances[pairs])),
            "median distance of permuted weights": float(np.median(self.chance[pairs])),
            "median distance with sinks": self.with_sinks.median,
            "distance that counts as similar": self.threshold,
            "similar pairs": len(self.similar_pairs),
            "similar pairs by chance": self.similar_pair_test.chance,
            "similar pairs, p": format_p(self.similar_pair_test.p),
            "closest pair": " and ".join(map(str, (*self.similar_pairs, ("-",))[0])),
            "similar pairs with sinks": self.with_sinks.num_similar,
            "similar pairs with sinks by chance": self.with_sinks.num_expected,
            "clusters": len(self.cluster_members),
            "clusters by chance": self.num_chance_clusters,
            "distance within layers minus between": within.value,
            "distance within layers, p": format_p(within.p),
            "layers unlike randomly chosen heads": different,
            "outliers in their layer": ", ".join(outliers) or "none",
            "correlation with distances of outputs": agreement.value,
            "correlation with outputs, p": format_p(agreement.p),
        }

    @property
    def data(self) -> dict[str, Any]:
        """Dictionary of plain values, ready for JSON."""
        names = ("distances", "low", "high", "chance")
        grids = {name: to_plain(getattr(self, name)) for name in names}
        return {
            "streams": list(self.streams),
            "heads": [head._asdict() for head in self.heads],
            **grids,
            "with_sinks": self.with_sinks.data,
            "sink_weight": self.sink_weight,
            "without_rest": [head._asdict() for head in self.without_rest],
            "outputs": to_plain(self.outputs),
            "threshold": self.threshold,
            "merges": [merge._asdict() for merge in self.merges],
            "clusters": list(self.clusters),
            "clusters_by_chance": self.num_chance_clusters,
            "embedding": to_plain(self.embedding.points),
            "stress": self.embedding.stress,
            "layers": [layer.data for layer in self.layers],
            "similar_pair_test": to_plain(self.similar_pair_test._asdict()),
            "within_layer_test": to_plain(self.within_layer_test._asdict()),
            "outliers": [
                {**outlier.head._asdict(), "distance": outlier.distance, "p": outlier.p}
                for outlier in self.outliers
            ],
            "agreement": to_plain(self.agreement._asdict()),
            "sentence": self.sentence,
        }


@dataclass(frozen=True, eq=False)
class RedundancyResult:
    """Comparisons of all groups of heads over the same tokens, the number of texts, and notes on
    what was left out.
    """

    model: str
    texts: int
    readers: tuple[ComparableHeads, ...]
    notes: tuple[str, ...]

    @property
    def table(self) -> Table:
        """The numbers of every group on which the answer rests."""
        findings = [group.list_findings() for group in self.readers]
        columns = ["quantity"]
        columns += [" to ".join(dict.fromkeys(group.streams)) for group in self.readers]
        rows: list[tuple[str, ...]] = []
        for name in findings[0] if findings else ():
            values = [one[name] for one in findings]
            texts = [format_number(one) if isinstance(one, float) else str(one) for one in values]
            rows.append((name, *texts))
        sentences = [group.sentence for group in self.readers]
        title = f"{self.model}, {self.texts} texts: similarity of heads. {' '.join(sentences)}"
        return Table(title, columns, rows, self.notes)

    def __str__(self) -> str:
        return to_text(self.table)

    @property
    def data(self) -> dict[str, Any]:
        """Dictionary of plain values, ready for JSON."""
        readers = [group.data for group in self.readers]
        return {
            "model": self.model,
            "texts": self.texts,
            "readers": readers,
            "notes": list(self.notes),
        }


# --- Measurement ----------------------------------------------------------------------------------


class _DistanceSums:
    """Sums over texts of the distances between heads, observed and by chance."""

    def __init__(self) -> None:
        self.distances, self.chance = FoldedSums(), FoldedSums()

    def add(self, text_index: int, rows: NonSinkRows, permuted: Tensor, row_weight: float) -> None:
        """Add rows of a text and the same rows with permuted weights."""
        flags = rows.counted.double()
        count = (flags @ flags.T).cpu().numpy() * row_weight
        for sums, others in ((self.distances, None), (self.chance, permuted)):
            divergence = jensen_shannon_divergence(rows.weights, others, rows.counted)
            sums.add(text_index, divergence.cpu().numpy() * row_weight, count)


class _RedundancySums:
    """Sums over texts for one group of heads."""

    def __init__(self, rows: SampledRows, options: RedundancyOptions) -> None:
        self.heads = rows.heads
        self.options = options
        self.rest, self.whole = _DistanceSums(), _DistanceSums()
        self.sink_weight = 0.0
        self.num_rows = 0.0
        self.diversity = DiversitySums(rows.heads, options.num_permutations, options.seed)

    def add(self, text_index: int, rows: SampledRows) -> None:
        """Add rows of a text."""
        permuted = rows.permute_weights((self.options.seed, text_index))
        rest, rest_permuted = (
            self._smooth_rest(rows.without_sinks(weights)) for weights in (rows.weights, permuted)
        )
        self.rest.add(text_index, rest, rest_permuted.weights, rows.row_weight)
        whole, whole_permuted = (
            self._smooth_whole(weights) for weights in (rows.weights, permuted)
        )
        all_rows = torch.ones_like(rest.counted)
        self.whole.add(text_index, NonSinkRows(whole, all_rows), whole_permuted, rows.row_weight)
        self.diversity.add(text_index, rest, rows.row_weight)
        self.sink_weight += rows.sink_weight * rows.row_weight
        self.num_rows += all_rows.numel() * rows.row_weight

    def _smooth_rest(self, rows: NonSinkRows) -> NonSinkRows:
        return rows._replace(weights=smooth_weights(rows.weights, self.options.smoothing))

    def _smooth_whole(self, weights: Tensor) -> Tensor:
        """Smooth the weights of all keys but the learned sink."""
        return torch.cat(
            [smooth_weights(weights[..., :-1], self.options.smoothing), weights[..., -1:]], -1
        )

    def comparable_heads(self) -> list[int]:
        """Indices of the heads of which every pair has rows; a head that has the fewest is left out
        first.
        """
        counts = self.rest.distances.count.copy()
        np.fill_diagonal(counts, 1)
        indices = list(range(len(counts)))
        while len(indices) > 1 and not (counts[np.ix_(indices, indices)] > 0).all():
            indices.remove(min(indices, key=lambda n: (counts[n, indices].sum(), -n)))
        return indices


DEFAULT_OPTIONS = RedundancyOptions()


def measure_redundancy(
    model: nn.Module,
    examples: Iterable[Example],
    *,
    options: RedundancyOptions = DEFAULT_OPTIONS,
    name: str = "",
    progress: Callable[[int], object] = lambda _: None,
) -> RedundancyResult:
    """Measure how similar all heads over the same tokens are, and whether that is more than chance.

    Each text runs alone. A sample of its attention rows and a sample of head outputs over all texts
    are kept, so that memory does not grow with the data. `progress` is called with the number of
    texts read so far.
    """
    sites = require_ability(model, "observe")
    options = options.validate()
    sites_with_outputs = [module for module in sites if module.site.ablate.possible]
    streams = {
        module.site.name: get_streams(module.site, is_encoder_decoder(model)) for module in sites
    }
    sampling = RowSampling(options.rows_per_text, options.seed)
    sums = dict[StreamPair, _RedundancySums]()
    reservoirs = dict[str, OutputReservoir]()
    distinct = DistinctExamples(examples)
    marked = mark_first_token_sinks(model, sites, streams, distinct)
    reasons = dict[str, str]()
    count = 0
    for index, example in enumerate(marked.examples):
        count = index + 1
        groups, unsupported = sample_rows(model, sites, example, streams, sampling, index)
        reasons |= unsupported
        for rows in groups:
            if rows.weights.shape[1]:
                group_sums = sums.setdefault(rows.streams, _RedundancySums(rows, options))
                _check_same_heads(group_sums.heads, rows.heads)
                group_sums.add(index, rows)
        outputs = collect_head_outputs(model, sites_with_outputs, example)
        _add_head_outputs(reservoirs, outputs, streams, index, options)
        progress(count)
    distinct.check_min_count()
    compared = [
        _compare_heads(pair, group_sums, reservoirs.get(pair[0]))
        for pair, group_sums in sums.items()
    ]
    comparisons = tuple(group for group in compared if group is not None)
    if not comparisons:
        details = "".join(f"; {site}: {reason}" for site, reason in reasons.items())
        raise ValueError(
            f"cannot compare heads: no two of them have the same queries and keys{details}"
        )
    left_out = reasons | {
        str(head): "sinks leave less than 1 % of its weight in almost every row"
        for group in comparisons
        for head in group.without_rest
    }
    notes = [
        *distinct.notes,
        *marked.notes,
        *(f"{name} is left out: {reason}" for name, reason in left_out.items()),
    ]
    notes += left_out_notes(model, "observe")
    return RedundancyResult(name or type(model).__name__, count, comparisons, tuple(notes))


def _check_same_heads(heads: Sequence[HeadLocation], others: Sequence[HeadLocation]) -> None:
    if tuple(heads) != tuple(others):
        fact = "the model runs different attention layers for different texts"
        raise ValueError(f"cannot compare heads: {fact}; give texts that run the same layers")


def _add_head_outputs(
    reservoirs: dict[str, OutputReservoir],
    outputs: Mapping[str, torch.Tensor],
    streams: Mapping[str, StreamPair],
    text_index: int,
    options: RedundancyOptions,
) -> None:
    """Sample head outputs, with the same tokens for all sites of a query stream."""
    for stream in dict.fromkeys(pair[0] for pair in streams.values()):
        stream_outputs = {site: z for site, z in outputs.items() if streams[site][0] == stream}
        if stream_outputs:
            reservoirs.setdefault(stream, OutputReservoir(options.num_tokens, options.seed)).add(
                text_index, stream_outputs
            )


class _SimilarPairs(NamedTuple):
    """Distances with intervals, their chance level, a distance threshold, and the numbers of pairs
    below it.
    """

    intervals: MeanIntervals
    chance: Array
    threshold: float
    num_similar: int
    num_expected: float


def _distance_intervals(folds: FoldedSums, grid: tuple[Any, ...]) -> MeanIntervals:
    """Distances of these heads; a distance of 0 is that of equal rows in every text, however few
    there are.
    """
    mean, low, high = (array[grid] for array in folds.mean_intervals())
    return MeanIntervals(
        mean, *(np.where(np.abs(mean) < EQUAL_DISTANCE, mean, end) for end in (low, high))
    )


def _count_similar_pairs(
    sums: _DistanceSums, options: RedundancyOptions, indices: Sequence[int]
) -> _SimilarPairs:
    """Compare the distances of these heads with their chance level."""
    grid = np.ix_(indices, indices)
    pairs = np.triu_indices(len(indices), 1)
    observed, permuted = (
        _distance_intervals(folds, grid) for folds in (sums.distances, sums.chance)
    )
    threshold = (
        _chance_threshold(permuted.mean) if options.max_distance is None else options.max_distance
    )
    num_similar = int((observed.high < np.minimum(threshold, permuted.mean))[pairs].sum())
    chance_pairs = MeanIntervals(*(array[pairs] for array in permuted))
    num_expected = expected_pairs_below(chance_pairs, threshold, sums.chance.num_folds)
    return _SimilarPairs(observed, permuted.mean, threshold, num_similar, num_expected)


def _compare_heads(
    pair: StreamPair, sums: _RedundancySums, reservoir: OutputReservoir | None
) -> ComparableHeads | None:
    """Turn the sums of a group into distances, clusters, tests and the rest of the result.

    Return None if fewer than two heads have rows.
    """
    options = sums.options
    indices = sums.comparable_heads()
    if len(indices) < 2:
        return None
    heads = tuple(sums.heads[n] for n in indices)
    similar = _count_similar_pairs(sums.rest, options, indices)
    whole = _count_similar_pairs(sums.whole, options, range(len(sums.heads)))
    distances = similar.intervals.mean
    threshold = similar.threshold
    merges = average_linkage(distances)
    outputs = _output_similarity(sums.heads, reservoir, options)
    outputs = None if outputs is None else outputs[np.ix_(indices, indices)]
    sites = list(dict.fromkeys(head.site for head in heads))
    layer_of_head = [sites.index(head.site) for head in heads]
    return ComparableHeads(
        streams=pair,
        heads=heads,
        distances=distances,
        low=similar.intervals.low,
        high=similar.intervals.high,
        chance=similar.chance,
        with_sinks=WholeRows(
            whole.intervals.mean, whole.threshold, whole.num_similar, whole.num_expected
        ),
        sink_weight=sums.sink_weight / sums.num_rows,
        without_rest=tuple(head for head in sums.heads if head not in heads),
        outputs=outputs,
        merges=tuple(merges),
        threshold=threshold,
        clusters=cut_clusters(merges, threshold),
        num_chance_clusters=len(set(cut_clusters(average_linkage(similar.chance), threshold))),
        embedding=embed_in_plane(distances, seed=options.seed),
        layers=sums.diversity.layer_diversities(),
        outliers=find_outliers(distances, heads, seed=options.seed),
        similar_pair_test=poisson_test(similar.num_similar, similar.num_expected),
        within_layer_test=class_separation_test(
            distances, layer_of_head, options.num_permutations, options.seed
        ),
        agreement=_test_agreement(distances, outputs, options),
    )


def _chance_threshold(chance: Array) -> float:
    return float(np.quantile(chance[np.triu_indices(len(chance), 1)], CHANCE_RATE))


def _output_similarity(
    heads: Sequence[HeadLocation], reservoir: OutputReservoir | None, options: RedundancyOptions
) -> Array | None:
    """CKA of the outputs of these heads; None if attention rows and outputs do not correspond one
    to one.
    """
    sites = list(dict.fromkeys(head.site for head in heads))
    if (
        reservoir is None
        or any(site not in reservoir.outputs for site in sites)
        or len(reservoir.priorities) < 4
    ):
        return None
    features = reservoir.features(sites)
    return (
        centred_kernel_alignment(features, options.cka_estimator).numpy()
        if len(features) == len(heads)
        else None
    )


def _test_agreement(
    distances: Array, outputs: Array | None, options: RedundancyOptions
) -> PermutationTest:
    """Test whether heads with similar attention patterns have similar outputs."""
    if outputs is None or np.isnan(outputs).any():
        return PermutationTest(math.nan, math.nan, math.nan)
    return mantel_test(distances, 1 - outputs, options.num_permutations, options.seed)
