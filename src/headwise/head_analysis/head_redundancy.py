"""How unlike each other the heads of a layer are, held to layers dealt out anew, and which of them stand apart."""

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

NUM_NULL_DRAWS = 100_000


class LayerDiversity(NamedTuple):
    """One layer: how far its heads spread, from 0, where all read alike, to 1, where no two share a key.

    `spread` is H(mean of rows) - mean of H(row) over log of the number of heads (1909.00015); its chance is the same of
    as many heads drawn from all layers. `p` says how often so drawn heads are as far from that chance, corrected for
    the number of layers.
    """

    site: str
    heads: int
    spread: Measure
    p: float

    @property
    def data(self) -> dict[str, Any]:
        """As plain values."""
        p = None if math.isnan(self.p) else self.p
        return {"site": self.site, "heads": self.heads, "spread": self.spread.data, "p": p}


class HeadOutlier(NamedTuple):
    """A head, how far it is from the others of its layer on average, and how surely that is too far to be one of them.

    `beyond` is that distance, as a logarithm, less the mean of the others' own, in their deviations.
    """

    head: HeadLocation
    far: float
    beyond: float
    p: float


class DiversitySums:
    """Adds up, text by text, how far the heads of each layer spread, and those of layers dealt out anew."""

    def __init__(self, heads: Sequence[HeadLocation], permutations: int, seed: int) -> None:
        self.sites = tuple(dict.fromkeys(one.site for one in heads))
        self.sizes = [sum(one.site == site for one in heads) for site in self.sites]
        own = np.array([self.sites.index(one.site) for one in heads])
        draw, times = np.random.default_rng(seed), permutations if len(self.sites) > 1 else 0
        dealt = [own, *(draw.permutation(own) for _ in range(times))]
        self.sets = torch.cat([self._layer_sets(torch.from_numpy(of)) for of in dealt])
        self.own, self.dealt = FoldedSums(), np.zeros((times, len(self.sites)))

    def _layer_sets(self, of: Tensor) -> Tensor:
        members = _membership(of, len(self.sizes))
        return members / members.sum(1, keepdim=True)

    def add(self, text_index: int, rows: SampledRows) -> None:
        """Rows of text `number`."""
        sums = (
            generalised_jensen_shannon(rows.weights, self.sets).cpu().numpy().reshape(-1, len(self.sites))
            * rows.row_weight
        )
        self.own.add(text_index, sums[0], rows.weights.shape[1] * rows.row_weight)
        self.dealt += sums[1:]

    def layer_diversities(self, num_resamples: int, seed: int) -> tuple[LayerDiversity, ...]:
        """What was found of each layer; a single head spreads over nothing, and a single layer has no other to be
        dealt to."""
        most = np.array([math.log(size) if size > 1 else math.nan for size in self.sizes])
        told = MeanIntervals(*(each / most for each in self.own.mean_intervals(num_resamples, seed)))
        dealt = self.dealt / self.own.count / most
        alike = [dealt[:, np.equal(self.sizes, size)].ravel() for size in self.sizes]  # each a set of so many heads
        held = [compare_with_null(value, each) for value, each in zip(told.mean, alike, strict=True)]
        p = holm_correction([one.p for one in held])
        return tuple(
            LayerDiversity(site, size, told.measure_at(n, held[n].chance), p[n])
            for n, (site, size) in enumerate(zip(self.sites, self.sizes, strict=True))
        )


def _membership(of: Tensor, count: int) -> Tensor:
    """Which things [count, things] are of each class."""
    return (of == torch.arange(count)[:, None]).float()


def find_outliers(
    distances: Array, heads: Sequence[HeadLocation], *, seed: int = 0, num_draws: int = NUM_NULL_DRAWS
) -> tuple[HeadOutlier, ...]:
    """Every head that has two layer mates or more, those that stand apart most surely first.

    How far a head is from its layer mates on average, as a logarithm, is held to the same of these mates: the
    deviation is studentised without the head itself, as Grubbs (1950) does, and `p` is how often one of as many normal
    numbers lies as far out, corrected for the number of heads. So a layer with no odd head has none.
    """
    found: list[HeadOutlier] = []
    for site in dict.fromkeys(one.site for one in heads):
        own = [n for n, one in enumerate(heads) if one.site == site]
        if len(own) < 3:
            continue
        near = distances[np.ix_(own, own)]
        far = near.sum(1) / (len(own) - 1)
        beyond = _studentise(np.log(np.maximum(far, 1e-12))[None])[0]
        normal = np.random.default_rng([seed, len(own)]).standard_normal((num_draws, len(own)))
        chance = _studentise(normal)[:, 0]
        found += [
            HeadOutlier(heads[n], float(far[k]), float(beyond[k]), compare_with_null(beyond[k], chance, "high").p)
            for k, n in enumerate(own)
        ]
    p = holm_correction([one.p for one in found])
    return tuple(sorted((one._replace(p=p[n]) for n, one in enumerate(found)), key=lambda one: (one.p, -one.beyond)))


def _studentise(values: Array) -> Array:
    """Each less the mean of the others in its row, over their deviation."""
    count, values = values.shape[1] - 1, values - values.mean(1, keepdims=True)
    total, squares = values.sum(1, keepdims=True), (values**2).sum(1, keepdims=True)
    mean = (total - values) / count
    variance = np.maximum((squares - values**2) / count - mean**2, 0)
    deviation = np.sqrt(variance * count / max(1, count - 1))
    gap = values - mean
    return np.divide(gap, deviation, out=np.where(gap == 0, 0.0, np.copysign(np.inf, gap)), where=deviation > 1e-12)


# --- What was found between heads, as an answer to whether they are redundant --------------------------

SIGNIFICANCE = 0.05
CHANCE_RATE = 0.05  # of pairs are nearer than the cut where heads look at nothing alike
MAX_DIVERGENCE = math.log(2)  # the largest Jensen-Shannon divergence, in nats


def summarise_redundancy(group: ComparableHeads) -> str:
    """Whether heads are redundant, with every number that it rests on."""
    parts = [_distances_sentence(group), _clusters_sentence(group), _layers_sentence(group), _outputs_sentence(group)]
    return f"{_verdict_sentence(group)} " + " ".join(part for part in parts if part)


def compare_redundancy(group: ComparableHeads, other: ComparableHeads) -> str:
    """What another model does with the same texts, beside how many pairs are near in one's own."""
    middle = float(np.median(other.distances[np.triu_indices(len(other.heads), 1)]))
    return (
        f"of {len(other.heads)} heads ({other.streams[0]} reads {other.streams[1]}) the median pair is {middle:.3f} "
        f"nats apart, and {len(other.similar_pairs)} of {other.num_pairs} pairs are surely near, not "
        f"{len(group.similar_pairs)}."
    )


def _verdict_sentence(own: ComparableHeads) -> str:
    agree = own.agreement
    if not own.alike.p < SIGNIFICANCE:
        return "Not shown to be redundant."
    if math.isnan(agree.p):
        return "Some heads read alike beyond chance; what they say could not be compared."
    said = "and heads that read alike say alike" if agree.p < SIGNIFICANCE else "but not shown to say alike"
    return f"Some heads read alike beyond chance, {said}; silence or cut them to know what the model loses."


def _distances_sentence(own: ComparableHeads) -> str:
    pairs = np.triu_indices(len(own.heads), 1)
    middle, chance = (float(np.median(grid[pairs])) for grid in (own.distances, own.chance))
    near = own.similar_pairs
    told = (
        f"Of {len(own.heads)} heads ({own.streams[0]} reads {own.streams[1]}) the median pair is {middle:.3f} nats "
        f"apart of at most {MAX_DIVERGENCE:.3f}, and {chance:.3f} where weights are dealt anew; {len(near)} "
        f"of {own.num_pairs} pairs "
        f"are surely nearer than {own.cut:.3f}, where {own.alike.chance:.1f} would be by chance "
        f"({_format_p(own.alike)})"
    )
    if not near:
        return f"{told}."
    one, other = (own.heads.index(who) for who in near[0])
    return f"{told}, the nearest {near[0][0]} and {near[0][1]} with {own.distances[one, other]:.3f}."


def _clusters_sentence(own: ComparableHeads) -> str:
    largest = own.cluster_members[0]
    return (
        f"Below that distance they are {len(own.cluster_members)} clusters ({own.by_chance} by chance), the largest of "
        f"{len(largest)}."
    )


def _layers_sentence(own: ComparableHeads) -> str:
    parts = list[str]()
    if not math.isnan(own.within.p):
        parts.append(_within_layer_sentence(own.within))
    odd = [layer for layer in own.layers if layer.p < SIGNIFICANCE]
    if any(not math.isnan(layer.p) for layer in own.layers):
        parts.append(
            f"{len(odd)} of {len(own.layers)} layers spread otherwise than heads dealt out anew (corrected "
            f"p < {SIGNIFICANCE})."
        )
    apart = [one for one in own.outliers if one.p < SIGNIFICANCE]
    if own.outliers:
        parts.append(
            "No head stands apart from its layer."
            if not apart
            else f"{len(apart)} stand apart from their layer, first {apart[0].head} (corrected p {apart[0].p:.3f})."
        )
    return " ".join(parts)


def _within_layer_sentence(found: PermutationTest) -> str:
    way = "nearer to" if found.value < 0 else "farther from"
    return (
        f"Heads of a layer are {abs(found.value):.3f} nats {way} each other than to those of others "
        f"({_format_p(found)})."
    )


def _outputs_sentence(own: ComparableHeads) -> str:
    if math.isnan(own.agreement.p):
        return ""
    return (
        f"Distances of weights and of what heads say agree with r = {own.agreement.value:.2f} "
        f"({_format_p(own.agreement)})."
    )


def _format_p(one: PermutationTest) -> str:
    return f"p = {one.p:.3f}" if one.p >= 0.001 else "p < 0.001"


# --- Are the heads of a model redundant, and how do we know? Distances, likeness, clusters and a map, ---


class RedundancyOptions(NamedTuple):
    """How heads are compared.

    `rows` are queries of a text, `tokens` those of all texts whose outputs are compared; `smoothing` is "none" or
    "clark", `outputs` "unbiased" or "linear". `cut` is the distance below which heads are one cluster; without it, the
    one below which 5 % of pairs fall by chance.
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
        """The same, if it can be done."""
        for name, value, known in (
            ("smoothing", self.smoothing, SMOOTHING_METHODS),
            ("cka_estimator", self.cka_estimator, CKA_ESTIMATORS),
        ):
            if value not in known:
                raise ValueError(f"{name}={value!r} is unknown; use {' or '.join(map(repr, known))}")
        for name, least in (("rows_per_text", 1), ("num_tokens", 4), ("num_permutations", 1), ("num_resamples", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} is too few; give at least {least}")
        return self


@dataclass(frozen=True, eq=False)
class ComparableHeads:
    """Heads that read the same tokens, and all that was found between them.

    `distances` are Jensen-Shannon divergences of their rows in nats, means over rows, between `low` and `high`;
    `chance` is the same with the weights of each of the other's rows dealt anew among the keys it may read: what is
    left where two heads are as sharp as these but look at nothing alike. `outputs` is CKA of what they say, or None
    where that could not be had. `by_chance` is how many clusters the distances of chance would make at the same cut.
    `alike` counts pairs that are surely near, beside how many would be where no head looks at what another does;
    `within` holds distances in layers to those between, `agreement` distances to what heads say.
    """

    streams: StreamPair
    heads: tuple[HeadLocation, ...]
    distances: Array
    low: Array
    high: Array
    chance: Array
    outputs: Array | None
    joined: tuple[ClusterMerge, ...]
    cut: float
    clusters: tuple[int, ...]
    by_chance: int
    plane: PlaneEmbedding
    layers: tuple[LayerDiversity, ...]
    outliers: tuple[HeadOutlier, ...]
    alike: PermutationTest
    within: PermutationTest
    agreement: PermutationTest

    @property
    def num_pairs(self) -> int:
        """How many pairs of heads there are."""
        return len(self.heads) * (len(self.heads) - 1) // 2

    @property
    def similar_pairs(self) -> tuple[tuple[HeadLocation, HeadLocation], ...]:
        """Pairs whose interval ends below the cut and below their own chance, the nearest first."""
        one, other = np.triu_indices(len(self.heads), 1)
        sure = (self.high < np.minimum(self.cut, self.chance))[one, other]
        order = np.argsort(self.distances[one, other], kind="stable")
        return tuple((self.heads[one[n]], self.heads[other[n]]) for n in order if sure[n])

    @property
    def cluster_members(self) -> tuple[tuple[HeadLocation, ...], ...]:
        """The clusters, the largest first."""
        every: dict[int, list[HeadLocation]] = {}
        for who, number in zip(self.heads, self.clusters, strict=True):
            every.setdefault(number, []).append(who)
        return tuple(sorted(map(tuple, every.values()), key=len, reverse=True))

    @property
    def sentence(self) -> str:
        """The answer, with the numbers that it rests on and what chance would have given."""
        return summarise_redundancy(self)

    @property
    def data(self) -> dict[str, Any]:
        """As plain values."""
        grids = {name: _grid_to_lists(getattr(self, name)) for name in ("distances", "low", "high", "chance")}
        return {
            "streams": list(self.streams),
            "heads": [who._asdict() for who in self.heads],
            **grids,
            "outputs": None if self.outputs is None else _grid_to_lists(self.outputs),
            "cut": self.cut,
            "joined": [one._asdict() for one in self.joined],
            "clusters": list(self.clusters),
            "clusters_by_chance": self.by_chance,
            "map": _grid_to_lists(self.plane.places),
            "stress": self.plane.stress,
            "layers": [one.data for one in self.layers],
            "alike": _test_to_dict(self.alike),
            "within": _test_to_dict(self.within),
            "outliers": [{**one.head._asdict(), "far": one.far, "p": one.p} for one in self.outliers],
            "agreement": _test_to_dict(self.agreement),
            "sentence": self.sentence,
        }


@dataclass(frozen=True, eq=False)
class RedundancyResult:
    """What was found of every set of heads that read the same tokens, on how many texts, and what was left out."""

    model: str
    texts: int
    readers: tuple[ComparableHeads, ...]
    notes: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """The answer to "are heads redundant, how do we verify it?"."""
        return " ".join(f"{self.model}, {self.texts} texts: {one.sentence}" for one in self.readers)

    def compare_with(self, other: RedundancyResult) -> str:
        """The same of another model on the same texts, such as its `twin`, in a sentence for each set of readers."""
        pairs = [(one, two) for one in self.readers for two in other.readers if one.streams == two.streams]
        return " ".join(f"{other.model}, {other.texts} texts: {compare_redundancy(one, two)}" for one, two in pairs)

    @property
    def data(self) -> dict[str, Any]:
        """As plain values."""
        readers = [one.data for one in self.readers]
        return {"model": self.model, "texts": self.texts, "readers": readers, "notes": list(self.notes)}


class _RedundancySums:
    """Sums over texts of everything that one set of readers is asked for."""

    def __init__(self, rows: SampledRows, options: RedundancyOptions) -> None:
        self.heads, self.how = rows.heads, options
        self.far, self.chance = FoldedSums(), FoldedSums()
        self.spread = DiversitySums(rows.heads, options.num_permutations, options.seed)

    def add(self, number: int, rows: SampledRows) -> None:
        """Rows of text `number`."""
        weights, count = self._smooth_weights(rows.weights), rows.weights.shape[1] * rows.row_weight
        dealt = self._smooth_weights(rows.permute_weights((self.how.seed, number)))
        self.far.add(number, jensen_shannon_divergence(weights).cpu().numpy() * rows.row_weight, count)
        self.chance.add(number, jensen_shannon_divergence(weights, dealt).cpu().numpy() * rows.row_weight, count)
        self.spread.add(number, rows)

    def _smooth_weights(self, weights: torch.Tensor) -> torch.Tensor:
        """All keys but the learned sink are smoothed."""
        return torch.cat([smooth_weights(weights[..., :-1], self.how.smoothing), weights[..., -1:]], -1)


DEFAULT_OPTIONS = RedundancyOptions()


def measure_redundancy(
    model: nn.Module,
    examples: Iterable[Example],
    *,
    options: RedundancyOptions = DEFAULT_OPTIONS,
    name: str = "",
    progress: Callable[[int], object] = lambda _: None,
) -> RedundancyResult:
    """How alike all heads of a model are that read the same tokens, and whether that is more than chance.

    Every text is run by itself; of each, some rows of all heads are held, and of all texts, some tokens of what heads
    say, so that memory does not grow with the data. `tell` hears how many texts were read.
    """
    those, options = require_ability(model, "see"), options.validate()
    streams = {one.site.name: get_streams(one.site, is_encoder_decoder(model)) for one in those}
    heard = [one for one in those if one.site.silence.can]
    adding, said, notes, count = dict[StreamPair, _RedundancySums](), dict[str, OutputReservoir](), dict[str, str](), 0
    for number, scene in enumerate(examples):
        count = number + 1
        every, whys = sample_rows(
            model, those, scene, streams, RowSampling(options.rows_per_text, options.seed), number
        )
        notes |= whys
        for rows in every:
            if rows.weights.shape[1]:
                own = adding.setdefault(rows.streams, _RedundancySums(rows, options))
                _check_same_heads(own.heads, rows.heads)
                own.add(number, rows)
        _add_head_outputs(said, collect_head_outputs(model, heard, scene), streams, number, options)
        progress(count)
    if count < 2:
        raise ValueError(f"{count} texts leave no interval; give at least two")
    readers = tuple(_compare_heads(pair, own, said.get(pair[0])) for pair, own in adding.items() if len(own.heads) > 1)
    if not readers:
        raise ValueError(
            "no two heads read the same tokens" + "".join(f"; {site}: {why}" for site, why in notes.items())
        )
    told = tuple(f"{site} is left out: {why}" for site, why in notes.items())
    return RedundancyResult(name or type(model).__name__, count, readers, told)


def _check_same_heads(heads: Sequence[HeadLocation], now: Sequence[HeadLocation]) -> None:
    if tuple(heads) != tuple(now):
        raise ValueError("the model runs other attentions for one text than for another; give texts that run the same")


def _add_head_outputs(
    said: dict[str, OutputReservoir],
    now: Mapping[str, torch.Tensor],
    streams: Mapping[str, StreamPair],
    number: int,
    how: RedundancyOptions,
) -> None:
    """Keep some tokens of what heads say, of all sites with the same queries alike."""
    for asks in dict.fromkeys(pair[0] for pair in streams.values()):
        own = {site: z for site, z in now.items() if streams[site][0] == asks}
        if own:
            said.setdefault(asks, OutputReservoir(how.num_tokens, how.seed)).add(number, own)


def _compare_heads(pair: StreamPair, adding: _RedundancySums, said: OutputReservoir | None) -> ComparableHeads:
    """What was added up, with what follows from it."""
    how, heads = adding.how, adding.heads
    far, low, high = adding.far.mean_intervals(how.num_resamples, how.seed)
    dealt = adding.chance.mean_intervals(how.num_resamples, how.seed)
    chance, pairs = dealt.mean, np.triu_indices(len(heads), 1)
    cut = _chance_threshold(chance) if how.max_distance is None else how.max_distance
    joined, own = (
        average_linkage(far),
        [list(dict.fromkeys(who.site for who in heads)).index(who.site) for who in heads],
    )
    outputs = _output_similarity(heads, said, how)
    near = int((high < np.minimum(cut, chance))[pairs].sum())
    alike = poisson_test(near, expected_pairs_below(*(grid[pairs] for grid in dealt), threshold=cut))
    return ComparableHeads(
        pair,
        heads,
        far,
        low,
        high,
        chance,
        outputs,
        tuple(joined),
        cut,
        cut_clusters(joined, cut),
        len(set(cut_clusters(average_linkage(chance), cut))),
        embed_in_plane(far, seed=how.seed),
        adding.spread.layer_diversities(how.num_resamples, how.seed),
        find_outliers(far, heads, seed=how.seed),
        alike,
        class_separation_test(far, own, how.num_permutations, how.seed),
        _test_agreement(far, outputs, how),
    )


def _chance_threshold(chance: Array) -> float:
    return float(np.quantile(chance[np.triu_indices(len(chance), 1)], CHANCE_RATE))


def _output_similarity(
    heads: Sequence[HeadLocation], said: OutputReservoir | None, how: RedundancyOptions
) -> Array | None:
    """CKA of what these heads say; None where rows of weights and what is said are not one to one."""
    sites = list(dict.fromkeys(who.site for who in heads))
    if said is None or any(site not in said.outputs for site in sites) or len(said.priorities) < 4:
        return None
    features = said.features(sites)
    return centred_kernel_alignment(features, how.cka_estimator).numpy() if len(features) == len(heads) else None


def _test_agreement(far: Array, outputs: Array | None, how: RedundancyOptions) -> PermutationTest:
    """Whether heads that read alike say alike."""
    if outputs is None or np.isnan(outputs).any():
        return PermutationTest(math.nan, math.nan, math.nan)
    return mantel_test(far, 1 - outputs, how.num_permutations, how.seed)


def _grid_to_lists(grid: Array) -> list[Any]:
    """Rows of numbers; what was never counted is None."""
    return [[None if math.isnan(value) else float(value) for value in row] for row in grid]


def _test_to_dict(one: PermutationTest) -> dict[str, float | None]:
    return {name: None if math.isnan(value) else value for name, value in one._asdict().items()}
