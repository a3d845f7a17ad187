"""Redundancy of heads: how similar their attention patterns and outputs are, compared with chance.

`measure_redundancy` compares all heads over the same tokens: distances, clusters, a map in the
plane, and how much the heads of each layer differ. Weights on sinks are left out, because
heads that agree only on them are not redundant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ...report.data import Table, Value
from ...report.notebook import TableResult
from ...report.render import to_plain
from ...report.text import format_number, format_p
from ..inspect.attention_sites import left_out_notes, require_ability
from ..inspect.hooks import record_head_outputs
from ..inspect.model_inputs import get_streams, is_encoder_decoder
from .annotated_examples import Example
from .attention_sinks import DistinctExamples, mark_first_token_sinks
from .head_similarity import (
    ClusterMerge,
    HeadLocation,
    NonSinkRows,
    OutputReservoir,
    PlaneEmbedding,
    SampledRows,
    StreamPair,
    average_linkage,
    centred_kernel_alignment,
    cut_clusters,
    embed_in_plane,
    jensen_shannon_divergence,
    sample_rows,
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
    poisson_test,
    ratio_of_sums,
)

# --- Diversity of layers ------------- ------------------------------------------------------------

SIGNIFICANCE = 0.05


@dataclass(frozen=True)
class LayerDiversity:
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


class DiversitySums:
    """Sums of the diversity of each layer, text by text, for the true layers and for heads permuted
    among layers.
    """

    def __init__(self, heads: Sequence[HeadLocation], permutations: int, seed: int) -> None:
        self.sites = tuple(dict.fromkeys(head.site for head in heads))
        layer_of_head = np.array([self.sites.index(head.site) for head in heads])
        generator = np.random.default_rng(seed)
        times = permutations if len(self.sites) > 1 else 0
        assignments = [layer_of_head, *(generator.permutation(layer_of_head) for _ in range(times))]
        layers = np.arange(len(self.sites))[:, None]
        # One-hot membership of each head in the layers, of each assignment
        self.sets = torch.from_numpy(np.concatenate([one == layers for one in assignments])).float()
        self.observed = FoldedSums()
        self.permuted = np.zeros((2, times, len(self.sites)))  # sums and counts

    def add(self, text_index: int, rows: NonSinkRows, row_weight: float = 1.0) -> None:
        """Add rows of a text."""
        spreads = spread_of_sets(rows.weights, self.sets, rows.counted)
        sums = np.stack([one.cpu().numpy().reshape(-1, len(self.sites)) for one in spreads])
        sums = row_weight * sums
        self.observed.add(text_index, sums[0, 0], sums[1, 0])
        self.permuted += sums[:, 1:]

    def layer_diversities(self) -> tuple[LayerDiversity, ...]:
        """Diversity of each layer; NaN for a single head, and without a chance level for a single
        layer.
        """
        spreads = self.observed.mean_intervals()
        permuted = ratio_of_sums(*self.permuted[:, None])
        sizes = self.sets[: len(self.sites)].sum(1).int().tolist()
        tests: list[PermutationTest] = []
        for value, size in zip(spreads.mean, sizes, strict=True):
            # The null distribution of a layer pools the permuted layers of the same size.
            null_values = permuted[:, np.equal(sizes, size)].ravel()
            tests.append(compare_with_null(value, null_values[~np.isnan(null_values)]))
        p = correct_p_values([test.p for test in tests])
        return tuple(
            LayerDiversity(site, sizes[n], spreads.measure_at(n, tests[n].chance), float(p[n]))
            for n, site in enumerate(self.sites)
        )


# --- Options and results --------------------------------------------------------------------------

EQUAL_DISTANCE = 1e-9  # nats; smaller distances are rounding
CHANCE_RATE = 0.05  # share of pairs below the distance threshold by chance


class RedundancyOptions(NamedTuple):
    """Options of `measure_redundancy`.

    - `rows_per_text`: queries sampled from each text for the attention patterns.
    - `num_tokens`: tokens sampled from all texts for the comparison of outputs.
    - `num_permutations`, `seed`: of permutation tests.
    - `max_distance`: distance below which heads form one cluster; None uses the distance that 5 %
      of pairs fall below
      by chance.
    """

    rows_per_text: int = 64
    num_tokens: int = 1024
    num_permutations: int = 199
    seed: int = 0
    max_distance: float | None = None


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
    - `sink_weight`: mean weight on sinks, which are left out.
    - `without_rest`: heads that are not compared because sinks leave them less than 1 % of the
      weight in (almost) all
      rows.
    - `outputs`: CKA of head outputs, or None if it could not be computed.
    - `merges`, `threshold`, `clusters`: steps of the average-linkage clustering, its distance
      threshold, and the
      cluster of each head. `num_chance_clusters` is the number of clusters of the chance distances
      at this threshold.
    - `embedding`: the heads as points in the plane.
    - `layers`: diversity of each layer.
    - `similar_pair_test`: number of significantly similar pairs against the number expected by
      chance.
    - `within_layer_test`: distances within layers against distances between layers.
    """

    streams: StreamPair
    heads: tuple[HeadLocation, ...]
    distances: Array
    low: Array
    high: Array
    chance: Array
    sink_weight: float
    without_rest: tuple[HeadLocation, ...]
    outputs: Array | None
    merges: tuple[ClusterMerge, ...]
    threshold: float
    clusters: tuple[int, ...]
    num_chance_clusters: int
    embedding: PlaneEmbedding
    layers: tuple[LayerDiversity, ...]
    similar_pair_test: PermutationTest
    within_layer_test: PermutationTest

    @property
    def num_pairs(self) -> int:
        """Count pairs of heads."""
        return len(self.heads) * (len(self.heads) - 1) // 2

    @property
    def similar_pairs(self) -> tuple[tuple[HeadLocation, HeadLocation], ...]:
        """Return pairs with an interval below both the threshold and their chance distance, closest
        first.
        """
        first, second = np.triu_indices(len(self.heads), 1)
        is_similar = (self.high < np.minimum(self.threshold, self.chance))[first, second]
        order = np.argsort(self.distances[first, second], kind="stable")
        return tuple((self.heads[first[n]], self.heads[second[n]]) for n in order if is_similar[n])

    @property
    def cluster_members(self) -> tuple[tuple[HeadLocation, ...], ...]:
        """List the heads of each cluster, the largest cluster first."""
        members: dict[int, list[HeadLocation]] = {}
        for head, cluster in zip(self.heads, self.clusters, strict=True):
            members.setdefault(cluster, []).append(head)
        return tuple(sorted(map(tuple, members.values()), key=len, reverse=True))

    @property
    def sentence(self) -> str:
        """State if the heads are redundant, with the number of similar pairs."""
        test = self.similar_pair_test
        counts = (
            f"{len(self.similar_pairs)} of {self.num_pairs} pairs of heads are significantly more "
            f"similar than chance; {test.chance:.1f} are expected (p {format_p(test.p)})."
        )
        return counts if test.p < SIGNIFICANCE else f"Not shown to be redundant: {counts}"

    def list_findings(self) -> dict[str, Value]:
        """Return the numbers on which the answer rests, by name."""
        pairs = np.triu_indices(len(self.heads), 1)
        within = self.within_layer_test
        different = sum(layer.p < SIGNIFICANCE for layer in self.layers)
        return {
            "heads": len(self.heads),
            "mean weight on sinks, which are left out": self.sink_weight,
            "median distance, nats": float(np.median(self.distances[pairs])),
            "median distance of permuted weights": float(np.median(self.chance[pairs])),
            "distance that counts as similar": self.threshold,
            "similar pairs": len(self.similar_pairs),
            "similar pairs by chance": self.similar_pair_test.chance,
            "similar pairs, p": format_p(self.similar_pair_test.p),
            "closest pair": " and ".join(map(str, (*self.similar_pairs, ("-",))[0])),
            "clusters": len(self.cluster_members),
            "clusters by chance": self.num_chance_clusters,
            "distance within layers minus between": within.value,
            "distance within layers, p": format_p(within.p),
            "layers unlike randomly chosen heads": different,
        }

    @property
    def data(self) -> dict[str, Any]:
        """Dictionary of plain values, ready for JSON."""
        fields = {name: to_plain(value) for name, value in vars(self).items()}
        fields |= {
            "heads": [head._asdict() for head in self.heads],
            "without_rest": [head._asdict() for head in self.without_rest],
            "merges": [merge._asdict() for merge in self.merges],
            "clusters_by_chance": fields.pop("num_chance_clusters"),
            "embedding": to_plain(self.embedding.points),
            "stress": self.embedding.stress,
            "sentence": self.sentence,
        }
        for name in ("similar_pair_test", "within_layer_test"):
            fields[name] = to_plain(getattr(self, name)._asdict())
        return fields


@dataclass(frozen=True, eq=False, repr=False)
class RedundancyResult(TableResult):
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

    @property
    def data(self) -> dict[str, Any]:
        """Dictionary of plain values, ready for JSON."""
        return vars(self) | {
            "readers": [group.data for group in self.readers],
            "notes": list(self.notes),
        }


# --- Measurement ----------------------------------------------------------------------------------


class _RedundancySums:
    """Sums over texts for one group of heads: their distances without sinks, observed and by
    chance.
    """

    def __init__(self, rows: SampledRows, options: RedundancyOptions) -> None:
        self.heads = rows.heads
        self.options = options
        self.observed = FoldedSums()
        self.permuted = FoldedSums()
        self.sink_weight = 0.0
        self.num_rows = 0.0
        self.diversity = DiversitySums(rows.heads, options.num_permutations, options.seed)

    def add(self, text_index: int, rows: SampledRows) -> None:
        """Add rows of a text, and the same rows with permuted weights."""
        if rows.heads != self.heads:
            fact = "the model runs different attention layers for different texts"
            raise ValueError(f"cannot compare heads: {fact}; give texts that run the same layers")
        row_weight = rows.row_weight
        permuted = rows.permute_weights((self.options.seed, text_index))
        rest = rows.without_sinks(rows.weights)
        flags = rest.counted.double()
        count = (flags @ flags.T).cpu().numpy() * row_weight
        others = rows.without_sinks(permuted).weights
        for sums, second in ((self.observed, None), (self.permuted, others)):
            divergence = jensen_shannon_divergence(rest.weights, second, rest.counted)
            sums.add(text_index, divergence.cpu().numpy() * row_weight, count)
        self.diversity.add(text_index, rest, row_weight)
        self.sink_weight += rows.sink_weight * row_weight
        self.num_rows += rest.counted.numel() * row_weight


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
    for option, minimum in (("rows_per_text", 1), ("num_tokens", 4), ("num_permutations", 1)):
        if getattr(options, option) < minimum:
            raise ValueError(f"{option} must be >= {minimum}, got {getattr(options, option)}")
    has_source = is_encoder_decoder(model)
    streams = {one.site.name: get_streams(one.site, has_source) for one in sites}
    sums: dict[StreamPair, _RedundancySums] = {}
    reservoirs: dict[str, OutputReservoir] = {}
    distinct = DistinctExamples(examples)
    marked, sink_notes = mark_first_token_sinks(model, sites, streams, distinct)
    left_out: dict[str, str] = {}
    count = 0
    for index, example in enumerate(marked):
        count = index + 1
        groups, unsupported = sample_rows(
            model, sites, example, streams, options.rows_per_text, options.seed, index
        )
        left_out |= unsupported
        for rows in groups:
            if rows.weights.shape[1]:
                if rows.streams not in sums:
                    sums[rows.streams] = _RedundancySums(rows, options)
                sums[rows.streams].add(index, rows)
        # Sample head outputs, with the same tokens for all sites of a query stream.
        with_outputs = [module for module in sites if module.site.ablate.possible]
        _, outputs = record_head_outputs(model, example.model_inputs, with_outputs)
        for stream in dict.fromkeys(pair[0] for pair in streams.values()):
            of_stream = {site: z for site, z in outputs.items() if streams[site][0] == stream}
            if of_stream:
                empty = OutputReservoir(options.num_tokens, options.seed)
                reservoirs.setdefault(stream, empty).add(index, of_stream)
        progress(count)
    distinct.check_min_count()
    compared = [_compare_heads(pair, one, reservoirs.get(pair[0])) for pair, one in sums.items()]
    comparisons = tuple(group for group in compared if group is not None)
    if not comparisons:
        details = "".join(f"; {site}: {reason}" for site, reason in left_out.items())
        raise ValueError(
            f"cannot compare heads: no two of them have the same queries and keys{details}"
        )
    for group in comparisons:
        reason = "sinks leave less than 1 % of its weight in almost every row"
        left_out |= dict.fromkeys(map(str, group.without_rest), reason)
    notes = [*distinct.notes, *sink_notes]
    notes += [f"{one} is left out: {reason}" for one, reason in left_out.items()]
    notes += left_out_notes(model, "observe")
    return RedundancyResult(name or type(model).__name__, count, comparisons, tuple(notes))


def _distances(folds: FoldedSums, indices: Sequence[int]) -> MeanIntervals:
    """Mean distances of these heads, with intervals."""
    grid = np.ix_(indices, indices)
    mean, low, high = (array[grid] for array in folds.mean_intervals())
    is_equal = np.abs(mean) < EQUAL_DISTANCE  # equal rows in every text, however few there are
    return MeanIntervals(mean, *(np.where(is_equal, mean, end) for end in (low, high)))


def _compare_heads(
    pair: StreamPair, sums: _RedundancySums, reservoir: OutputReservoir | None
) -> ComparableHeads | None:
    """Turn the sums of a group into distances, clusters, tests and the rest of the result.

    Return None if fewer than two heads have rows.
    """
    options = sums.options
    # every pair of heads that are compared has rows; heads with the fewest rows are left out
    counts = sums.observed.count.copy()
    np.fill_diagonal(counts, 1)
    indices = list(range(len(counts)))
    while len(indices) > 1 and not (counts[np.ix_(indices, indices)] > 0).all():
        indices.remove(min(indices, key=lambda n: (counts[n, indices].sum(), -n)))
    if len(indices) < 2:
        return None
    heads = tuple(sums.heads[n] for n in indices)
    observed = _distances(sums.observed, indices)
    permuted = _distances(sums.permuted, indices)
    distances = observed.mean
    chance = permuted.mean
    pairs = np.triu_indices(len(indices), 1)
    threshold = options.max_distance
    if threshold is None:
        threshold = float(np.quantile(chance[pairs], CHANCE_RATE))
    num_similar = int((observed.high < np.minimum(threshold, chance))[pairs].sum())
    chance_pairs = MeanIntervals(*(array[pairs] for array in permuted))
    num_expected = expected_pairs_below(chance_pairs, threshold, sums.permuted.num_folds)
    merges = average_linkage(distances)
    # CKA of the outputs, if attention rows and outputs correspond one to one
    outputs = None
    all_sites = list(dict.fromkeys(head.site for head in sums.heads))
    if reservoir is not None and {*all_sites} <= reservoir.outputs.keys():
        features = reservoir.features(all_sites)
        if len(reservoir.priorities) >= 4 and len(features) == len(sums.heads):
            outputs = centred_kernel_alignment(features).numpy()[np.ix_(indices, indices)]
    layer_of_head = [all_sites.index(head.site) for head in heads]
    return ComparableHeads(
        streams=pair,
        heads=heads,
        distances=distances,
        low=observed.low,
        high=observed.high,
        chance=chance,
        sink_weight=sums.sink_weight / sums.num_rows,
        without_rest=tuple(head for head in sums.heads if head not in heads),
        outputs=outputs,
        merges=tuple(merges),
        threshold=threshold,
        clusters=cut_clusters(merges, threshold),
        num_chance_clusters=len(set(cut_clusters(average_linkage(chance), threshold))),
        embedding=embed_in_plane(distances, seed=options.seed),
        layers=sums.diversity.layer_diversities(),
        similar_pair_test=poisson_test(num_similar, num_expected),
        within_layer_test=class_separation_test(
            distances, layer_of_head, options.num_permutations, options.seed
        ),
    )
