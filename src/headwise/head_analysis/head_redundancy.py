"""Redundancy of heads: how similar their attention patterns and outputs are, compared with chance.

`measure_redundancy` compares all heads over the same tokens: distances, clusters, a map in the plane, how much the
heads of each layer differ, and outliers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..inspect.attention_sites import require_ability
from ..inspect.model_inputs import get_streams, is_encoder_decoder
from .annotated_examples import Example
from .attention_sinks import mark_first_token_sinks
from .head_similarity import (
    CKA_ESTIMATORS,
    SMOOTHING_METHODS,
    ClusterMerge,
    HeadLocation,
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
    generalised_jensen_shannon,
    jensen_shannon_divergence,
    sample_rows,
    smooth_weights,
)
from .head_table import Measure
from .resampling import (
    Array,
    FoldedSums,
    MeanIntervals,
    PermutationTest,
    class_separation_test,
    compare_with_null,
    expected_pairs_below,
    holm_correction,
    mantel_test,
    poisson_test,
)

# --- Diversity of layers and outliers ------------------------------------------------------------------

NUM_NULL_DRAWS = 100_000


class LayerDiversity(NamedTuple):
    """Diversity of the heads of one layer, from 0 (identical attention) to 1 (no two heads share a key).

    `spread` is (H(mean of rows) - mean of H(row)) / log(number of heads) (1909.00015). Its chance level is the mean
    over random sets of as many heads from all layers; `p` is the share of these sets that lie as far from that mean,
    corrected for the number of layers.
    """

    site: str
    heads: int
    spread: Measure
    p: float

    @property
    def data(self) -> dict[str, Any]:
        """Dictionary of plain values, ready for JSON."""
        p = None if math.isnan(self.p) else self.p
        return {"site": self.site, "heads": self.heads, "spread": self.spread.data, "p": p}


class HeadOutlier(NamedTuple):
    """A head, its mean `distance` to the other heads of its layer, and how unusual that is.

    `studentised` is the log of `distance`, minus the mean and divided by the standard deviation of that log over the
    other heads.
    """

    head: HeadLocation
    distance: float
    studentised: float
    p: float


class DiversitySums:
    """Sums of the diversity of each layer, text by text, for the true layers and for heads permuted among layers."""

    def __init__(self, heads: Sequence[HeadLocation], permutations: int, seed: int) -> None:
        self.sites = tuple(dict.fromkeys(head.site for head in heads))
        self.sizes = [sum(head.site == site for head in heads) for site in self.sites]
        layer_of_head = np.array([self.sites.index(head.site) for head in heads])
        generator, times = np.random.default_rng(seed), permutations if len(self.sites) > 1 else 0
        assignments = [layer_of_head, *(generator.permutation(layer_of_head) for _ in range(times))]
        self.sets = torch.cat([self._layer_sets(torch.from_numpy(assignment)) for assignment in assignments])
        self.observed, self.permuted = FoldedSums(), np.zeros((times, len(self.sites)))

    def _layer_sets(self, layer_of_head: Tensor) -> Tensor:
        members = _membership(layer_of_head, len(self.sizes))
        return members / members.sum(1, keepdim=True)

    def add(self, text_index: int, rows: SampledRows) -> None:
        """Add rows of a text."""
        divergences = generalised_jensen_shannon(rows.weights, self.sets).cpu().numpy()
        sums = divergences.reshape(-1, len(self.sites)) * rows.row_weight
        self.observed.add(text_index, sums[0], rows.weights.shape[1] * rows.row_weight)
        self.permuted += sums[1:]

    def layer_diversities(self, num_resamples: int, seed: int) -> tuple[LayerDiversity, ...]:
        """Diversity of each layer; NaN for a single head, and without a chance level for a single layer."""
        maximum = np.array([math.log(size) if size > 1 else math.nan for size in self.sizes])
        intervals = self.observed.mean_intervals(num_resamples, seed)
        spreads = MeanIntervals(*(values / maximum for values in intervals))
        permuted = self.permuted / self.observed.count / maximum
        # The null distribution of a layer pools the permuted layers of the same size.
        null_values = [permuted[:, np.equal(self.sizes, size)].ravel() for size in self.sizes]
        tests = [compare_with_null(value, null) for value, null in zip(spreads.mean, null_values, strict=True)]
        p = holm_correction([test.p for test in tests])
        return tuple(
            LayerDiversity(site, size, spreads.measure_at(n, tests[n].chance), p[n])
            for n, (site, size) in enumerate(zip(self.sites, self.sizes, strict=True))
        )


def _membership(class_of_item: Tensor, count: int) -> Tensor:
    """One-hot membership [classes, items]."""
    return (class_of_item == torch.arange(count)[:, None]).float()


def find_outliers(
    distances: Array, heads: Sequence[HeadLocation], *, seed: int = 0, num_draws: int = NUM_NULL_DRAWS
) -> tuple[HeadOutlier, ...]:
    """Test every head with at least two other heads in its layer for being an outlier; the most significant come first.

    The log of a head's mean distance to the other heads is studentised with the mean and the deviation of the other
    heads (Grubbs 1950). `p` is the share of samples of as many normal numbers in which the first lies as far out,
    corrected for the number of heads.
    """
    outliers: list[HeadOutlier] = []
    for site in dict.fromkeys(head.site for head in heads):
        members = [n for n, head in enumerate(heads) if head.site == site]
        if len(members) < 3:
            continue
        mean_distance = distances[np.ix_(members, members)].sum(1) / (len(members) - 1)
        studentised = _studentise(np.log(np.maximum(mean_distance, 1e-12))[None])[0]
        normal = np.random.default_rng([seed, len(members)]).standard_normal((num_draws, len(members)))
        null_values = _studentise(normal)[:, 0]
        for k, n in enumerate(members):
            p = compare_with_null(studentised[k], null_values, "high").p
            outliers.append(HeadOutlier(heads[n], float(mean_distance[k]), float(studentised[k]), p))
    corrected = holm_correction([outlier.p for outlier in outliers])
    outliers = [outlier._replace(p=p) for outlier, p in zip(outliers, corrected, strict=True)]
    return tuple(sorted(outliers, key=lambda outlier: (outlier.p, -outlier.studentised)))


def _studentise(values: Array) -> Array:
    """Each value minus the mean of the others in its row, over the standard deviation of the others."""
    count, values = values.shape[1] - 1, values - values.mean(1, keepdims=True)
    total, squares = values.sum(1, keepdims=True), (values**2).sum(1, keepdims=True)
    mean = (total - values) / count
    variance = np.maximum((squares - values**2) / count - mean**2, 0)
    deviation = np.sqrt(variance * count / max(1, count - 1))
    gap = values - mean
    return np.divide(gap, deviation, out=np.where(gap == 0, 0.0, np.copysign(np.inf, gap)), where=deviation > 1e-12)


# --- The result in sentences ---------------------------------------------------------------------------

SIGNIFICANCE = 0.05
CHANCE_RATE = 0.05  # share of pairs below the distance threshold by chance
MAX_DIVERGENCE = math.log(2)  # the largest Jensen-Shannon divergence, in nats


def summarise_redundancy(group: ComparableHeads) -> str:
    """Whether heads are redundant, in sentences with every number that the answer rests on."""
    parts = [_distances_sentence(group), _clusters_sentence(group), _layers_sentence(group), _outputs_sentence(group)]
    return f"{_verdict_sentence(group)} " + " ".join(part for part in parts if part)


def compare_redundancy(group: ComparableHeads, other: ComparableHeads) -> str:
    """A sentence about another model on the same texts: its median distance and how many of its pairs are similar."""
    median = float(np.median(other.distances[np.triu_indices(len(other.heads), 1)]))
    return (
        f"among {_describe_heads(other)}, the median pair is {median:.3f} nats apart, and "
        f"{len(other.similar_pairs)} of {other.num_pairs} pairs are significantly similar "
        f"(instead of {len(group.similar_pairs)})."
    )


def _describe_heads(group: ComparableHeads) -> str:
    queries, keys = group.streams
    return f"{len(group.heads)} heads (queries from the {queries}, keys from the {keys})"


def _verdict_sentence(group: ComparableHeads) -> str:
    if not group.similar_pair_test.p < SIGNIFICANCE:
        return "Not shown to be redundant."
    similar = "Some heads have attention patterns more similar than chance"
    if math.isnan(group.agreement.p):
        return f"{similar}; their outputs could not be compared."
    if group.agreement.p < SIGNIFICANCE:
        outputs = "and heads with similar patterns have similar outputs"
    else:
        outputs = "but similar outputs are not shown"
    return f"{similar}, {outputs}; ablate or prune them to measure what the model loses."


def _distances_sentence(group: ComparableHeads) -> str:
    pairs = np.triu_indices(len(group.heads), 1)
    median, chance = (float(np.median(grid[pairs])) for grid in (group.distances, group.chance))
    similar = group.similar_pairs
    sentence = (
        f"Among {_describe_heads(group)}, the median pair has a Jensen-Shannon divergence of {median:.3f} nats "
        f"(at most {MAX_DIVERGENCE:.3f}), and of {chance:.3f} if weights are permuted; "
        f"{len(similar)} of {group.num_pairs} pairs are significantly closer than {group.threshold:.3f}, "
        f"where {group.similar_pair_test.chance:.1f} are expected by chance ({_format_p(group.similar_pair_test)})"
    )
    if not similar:
        return f"{sentence}."
    first, second = similar[0]
    distance = group.distances[group.heads.index(first), group.heads.index(second)]
    return f"{sentence}; the closest are {first} and {second} with {distance:.3f}."


def _clusters_sentence(group: ComparableHeads) -> str:
    clusters = group.cluster_members
    counts = f"{len(clusters)} clusters ({group.num_chance_clusters} by chance)"
    return f"Clustering up to that distance gives {counts}, the largest with {len(clusters[0])} heads."


def _layers_sentence(group: ComparableHeads) -> str:
    parts = list[str]()
    if not math.isnan(group.within_layer_test.p):
        parts.append(_within_layer_sentence(group.within_layer_test))
    if any(not math.isnan(layer.p) for layer in group.layers):
        significant = [layer for layer in group.layers if layer.p < SIGNIFICANCE]
        fact = f"{len(significant)} of {len(group.layers)} layers differ in diversity from randomly chosen heads"
        parts.append(f"{fact} (corrected p < {SIGNIFICANCE}).")
    outliers = [outlier for outlier in group.outliers if outlier.p < SIGNIFICANCE]
    if outliers:
        first = outliers[0]
        fact = f"{len(outliers)} heads are outliers in their layer"
        parts.append(f"{fact}, most clearly {first.head} (corrected p {first.p:.3f}).")
    elif group.outliers:
        parts.append("No head is an outlier in its layer.")
    return " ".join(parts)


def _within_layer_sentence(test: PermutationTest) -> str:
    direction = "closer to" if test.value < 0 else "farther from"
    distance = f"{abs(test.value):.3f} nats {direction} each other than to heads of other layers"
    return f"Heads of one layer are {distance} ({_format_p(test)})."


def _outputs_sentence(group: ComparableHeads) -> str:
    if math.isnan(group.agreement.p):
        return ""
    correlation = f"r = {group.agreement.value:.2f} ({_format_p(group.agreement)})"
    return f"Distances between attention patterns and between outputs correlate with {correlation}."


def _format_p(test: PermutationTest) -> str:
    return f"p = {test.p:.3f}" if test.p >= 0.001 else "p < 0.001"


# --- Options and results -------------------------------------------------------------------------------


class RedundancyOptions(NamedTuple):
    """Options of `measure_redundancy`.

    - `rows_per_text`: queries sampled from each text for the attention patterns.
    - `num_tokens`: tokens sampled from all texts for the comparison of outputs.
    - `smoothing`: of attention weights, "none" or "clark" (1906.04341).
    - `cka_estimator`: "unbiased" or "linear", see `centred_kernel_alignment`.
    - `num_permutations`, `num_resamples`, `seed`: of permutation tests and bootstrap intervals.
    - `max_distance`: distance below which heads form one cluster; None uses the distance that 5 % of pairs fall below
      by chance.
    """

    rows_per_text: int = 64
    num_tokens: int = 1024
    smoothing: str = "none"
    cka_estimator: str = "unbiased"
    num_permutations: int = 199
    num_resamples: int = 1000
    seed: int = 0
    max_distance: float | None = None

    def validate(self) -> RedundancyOptions:
        """Return the options; raise ValueError if one is invalid."""
        for name, value, known in (
            ("smoothing", self.smoothing, SMOOTHING_METHODS),
            ("cka_estimator", self.cka_estimator, CKA_ESTIMATORS),
        ):
            if value not in known:
                raise ValueError(f"unknown {name}={value!r}; use {' or '.join(map(repr, known))}")
        for name, minimum in (("rows_per_text", 1), ("num_tokens", 4), ("num_permutations", 1), ("num_resamples", 1)):
            if getattr(self, name) < minimum:
                raise ValueError(f"{name} must be >= {minimum}, got {getattr(self, name)}")
        return self


@dataclass(frozen=True, eq=False)
class ComparableHeads:
    """Heads with the same query and key tokens, and every comparison between them.

    - `distances`, `low`, `high`: Jensen-Shannon divergences of attention rows in nats [heads, heads], means over rows,
      with confidence intervals.
    - `chance`: the divergences if the weights of one head are permuted among the keys that it may read. They are as
      sharp as before but unrelated.
    - `outputs`: CKA of head outputs, or None if it could not be computed.
    - `merges`, `threshold`, `clusters`: steps of the average-linkage clustering, its distance threshold, and the
      cluster of each head. `num_chance_clusters` is the number of clusters of the chance distances at this threshold.
    - `embedding`: the heads as points in the plane.
    - `layers`, `outliers`: diversity of each layer, and outlying heads.
    - `similar_pair_test`: number of significantly similar pairs against the number expected by chance.
    - `within_layer_test`: distances within layers against distances between layers.
    - `agreement`: correlation of distances with those of outputs.
    """

    streams: StreamPair
    heads: tuple[HeadLocation, ...]
    distances: Array
    low: Array
    high: Array
    chance: Array
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
        """Pairs whose interval ends below the threshold and below their chance distance, the closest first."""
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
        """Whether the heads are redundant, in sentences; see `summarise_redundancy`."""
        return summarise_redundancy(self)

    @property
    def data(self) -> dict[str, Any]:
        """Dictionary of plain values, ready for JSON."""
        grids = {name: _grid_to_lists(getattr(self, name)) for name in ("distances", "low", "high", "chance")}
        return {
            "streams": list(self.streams),
            "heads": [head._asdict() for head in self.heads],
            **grids,
            "outputs": None if self.outputs is None else _grid_to_lists(self.outputs),
            "threshold": self.threshold,
            "merges": [merge._asdict() for merge in self.merges],
            "clusters": list(self.clusters),
            "clusters_by_chance": self.num_chance_clusters,
            "embedding": _grid_to_lists(self.embedding.points),
            "stress": self.embedding.stress,
            "layers": [layer.data for layer in self.layers],
            "similar_pair_test": _test_to_dict(self.similar_pair_test),
            "within_layer_test": _test_to_dict(self.within_layer_test),
            "outliers": [
                {**outlier.head._asdict(), "distance": outlier.distance, "p": outlier.p} for outlier in self.outliers
            ],
            "agreement": _test_to_dict(self.agreement),
            "sentence": self.sentence,
        }


@dataclass(frozen=True, eq=False)
class RedundancyResult:
    """Comparisons of all groups of heads over the same tokens, the number of texts, and notes on what was left out."""

    model: str
    texts: int
    readers: tuple[ComparableHeads, ...]
    notes: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """Whether the heads are redundant, in sentences for every group."""
        return " ".join(f"{self.model}, {self.texts} texts: {group.sentence}" for group in self.readers)

    def compare_with(self, other: RedundancyResult) -> str:
        """Compare with the result of another model on the same texts, such as a random baseline; a sentence for every
        group.
        """
        pairs = [(own, theirs) for own in self.readers for theirs in other.readers if own.streams == theirs.streams]
        return " ".join(
            f"{other.model}, {other.texts} texts: {compare_redundancy(own, theirs)}" for own, theirs in pairs
        )

    @property
    def data(self) -> dict[str, Any]:
        """Dictionary of plain values, ready for JSON."""
        readers = [group.data for group in self.readers]
        return {"model": self.model, "texts": self.texts, "readers": readers, "notes": list(self.notes)}


# --- Measurement ---------------------------------------------------------------------------------------


class _RedundancySums:
    """Sums over texts for one group of heads."""

    def __init__(self, rows: SampledRows, options: RedundancyOptions) -> None:
        self.heads, self.options = rows.heads, options
        self.distances, self.chance = FoldedSums(), FoldedSums()
        self.diversity = DiversitySums(rows.heads, options.num_permutations, options.seed)

    def add(self, text_index: int, rows: SampledRows) -> None:
        weights, count = self._smooth_weights(rows.weights), rows.weights.shape[1] * rows.row_weight
        permuted = self._smooth_weights(rows.permute_weights((self.options.seed, text_index)))
        distances = jensen_shannon_divergence(weights).cpu().numpy()
        chance = jensen_shannon_divergence(weights, permuted).cpu().numpy()
        self.distances.add(text_index, distances * rows.row_weight, count)
        self.chance.add(text_index, chance * rows.row_weight, count)
        self.diversity.add(text_index, rows)

    def _smooth_weights(self, weights: torch.Tensor) -> torch.Tensor:
        """Smooth the weights of all keys but the learned sink."""
        return torch.cat([smooth_weights(weights[..., :-1], self.options.smoothing), weights[..., -1:]], -1)


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

    Each text runs alone. A sample of its attention rows and a sample of head outputs over all texts are kept, so that
    memory does not grow with the data. `progress` is called with the number of texts read so far.
    """
    sites, options = require_ability(model, "observe"), options.validate()
    sites_with_outputs = [module for module in sites if module.site.ablate.possible]
    streams = {module.site.name: get_streams(module.site, is_encoder_decoder(model)) for module in sites}
    sampling = RowSampling(options.rows_per_text, options.seed)
    sums, reservoirs = dict[StreamPair, _RedundancySums](), dict[str, OutputReservoir]()
    marked = mark_first_token_sinks(model, sites, streams, examples)
    reasons, count = dict[str, str](), 0
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
    if count < 2:
        raise ValueError(f"cannot compute confidence intervals from {count} texts; give at least two")
    comparisons = tuple(
        _compare_heads(pair, group_sums, reservoirs.get(pair[0]))
        for pair, group_sums in sums.items()
        if len(group_sums.heads) > 1
    )
    if not comparisons:
        details = "".join(f"; {site}: {reason}" for site, reason in reasons.items())
        raise ValueError(f"cannot compare heads: no two of them have the same queries and keys{details}")
    notes = (*marked.notes, *(f"{site} is left out: {reason}" for site, reason in reasons.items()))
    return RedundancyResult(name or type(model).__name__, count, comparisons, notes)


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


def _compare_heads(pair: StreamPair, sums: _RedundancySums, reservoir: OutputReservoir | None) -> ComparableHeads:
    """Turn the sums of a group into distances, clusters, tests and the rest of the result."""
    options, heads = sums.options, sums.heads
    distances, low, high = sums.distances.mean_intervals(options.num_resamples, options.seed)
    permuted = sums.chance.mean_intervals(options.num_resamples, options.seed)
    chance, pairs = permuted.mean, np.triu_indices(len(heads), 1)
    threshold = _chance_threshold(chance) if options.max_distance is None else options.max_distance
    merges = average_linkage(distances)
    outputs = _output_similarity(heads, reservoir, options)
    num_similar = int((high < np.minimum(threshold, chance))[pairs].sum())
    num_expected = expected_pairs_below(*(grid[pairs] for grid in permuted), threshold=threshold)
    sites = list(dict.fromkeys(head.site for head in heads))
    layer_of_head = [sites.index(head.site) for head in heads]
    return ComparableHeads(
        streams=pair,
        heads=heads,
        distances=distances,
        low=low,
        high=high,
        chance=chance,
        outputs=outputs,
        merges=tuple(merges),
        threshold=threshold,
        clusters=cut_clusters(merges, threshold),
        num_chance_clusters=len(set(cut_clusters(average_linkage(chance), threshold))),
        embedding=embed_in_plane(distances, seed=options.seed),
        layers=sums.diversity.layer_diversities(options.num_resamples, options.seed),
        outliers=find_outliers(distances, heads, seed=options.seed),
        similar_pair_test=poisson_test(num_similar, num_expected),
        within_layer_test=class_separation_test(distances, layer_of_head, options.num_permutations, options.seed),
        agreement=_test_agreement(distances, outputs, options),
    )


def _chance_threshold(chance: Array) -> float:
    return float(np.quantile(chance[np.triu_indices(len(chance), 1)], CHANCE_RATE))


def _output_similarity(
    heads: Sequence[HeadLocation], reservoir: OutputReservoir | None, options: RedundancyOptions
) -> Array | None:
    """CKA of the outputs of these heads; None if attention rows and outputs do not correspond one to one."""
    sites = list(dict.fromkeys(head.site for head in heads))
    if reservoir is None or any(site not in reservoir.outputs for site in sites) or len(reservoir.priorities) < 4:
        return None
    features = reservoir.features(sites)
    return centred_kernel_alignment(features, options.cka_estimator).numpy() if len(features) == len(heads) else None


def _test_agreement(distances: Array, outputs: Array | None, options: RedundancyOptions) -> PermutationTest:
    """Test whether heads with similar attention patterns have similar outputs."""
    if outputs is None or np.isnan(outputs).any():
        return PermutationTest(math.nan, math.nan, math.nan)
    return mantel_test(distances, 1 - outputs, options.num_permutations, options.seed)


def _grid_to_lists(grid: Array) -> list[Any]:
    """Rows of a matrix as lists; NaN becomes None."""
    return [[None if math.isnan(value) else float(value) for value in row] for row in grid]


def _test_to_dict(test: PermutationTest) -> dict[str, float | None]:
    return {name: None if math.isnan(value) else value for name, value in test._asdict().items()}
