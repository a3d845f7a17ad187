"""Are the heads of a model redundant, and how do we know? Distances, likeness, clusters and a map, held to chance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ..hub.finding import require_ability
from ..hub.readable import is_encoder_decoder, get_streams
from .answering import CHANCE_RATE, summarise_redundancy, compare_redundancy
from .diversity import LayerDiversity, HeadOutlier, DiversitySums, find_outliers
from .folds import FoldedSums
from .intervals import Array
from .likeness import CKA_ESTIMATORS, SMOOTHING_METHODS, centred_kernel_alignment, jensen_shannon_divergence, smooth_weights
from .mapping import ClusterMerge, PlaneEmbedding, cut_clusters, average_linkage, embed_in_plane
from .nulls import PermutationTest, poisson_test, mantel_test, class_separation_test, expected_pairs_below
from .sampled import RowSampling, OutputReservoir, SampledRows, StreamPair, HeadLocation, sample_rows, collect_head_outputs
from .scene import Example


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
        for name, value, known in (("smoothing", self.smoothing, SMOOTHING_METHODS), ("cka_estimator", self.cka_estimator, CKA_ESTIMATORS)):
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
            "streams": list(self.streams), "heads": [who._asdict() for who in self.heads], **grids,
            "outputs": None if self.outputs is None else _grid_to_lists(self.outputs), "cut": self.cut,
            "joined": [one._asdict() for one in self.joined], "clusters": list(self.clusters),
            "clusters_by_chance": self.by_chance, "map": _grid_to_lists(self.plane.places), "stress": self.plane.stress,
            "layers": [one.data for one in self.layers], "alike": _test_to_dict(self.alike), "within": _test_to_dict(self.within),
            "outliers": [{**one.head._asdict(), "far": one.far, "p": one.p} for one in self.outliers],
            "agreement": _test_to_dict(self.agreement), "sentence": self.sentence,
        }  # fmt: skip


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


def measure_redundancy(
    model: nn.Module, examples: Iterable[Example], *, options: RedundancyOptions = RedundancyOptions(), name: str = "",  # noqa: B008 - it is frozen
    progress: Callable[[int], object] = lambda _: None,
) -> RedundancyResult:  # fmt: skip
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
        every, whys = sample_rows(model, those, scene, streams, RowSampling(options.rows_per_text, options.seed), number)
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
        raise ValueError("no two heads read the same tokens" + "".join(
            f"; {site}: {why}" for site, why in notes.items()))  # fmt: skip
    told = tuple(f"{site} is left out: {why}" for site, why in notes.items())
    return RedundancyResult(name or type(model).__name__, count, readers, told)


def _check_same_heads(heads: Sequence[HeadLocation], now: Sequence[HeadLocation]) -> None:
    if tuple(heads) != tuple(now):
        raise ValueError("the model runs other attentions for one text than for another; give texts that run the same")


def _add_head_outputs(
    said: dict[str, OutputReservoir], now: Mapping[str, torch.Tensor], streams: Mapping[str, StreamPair], number: int, how: RedundancyOptions
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
    joined, own = average_linkage(far), [list(dict.fromkeys(who.site for who in heads)).index(who.site) for who in heads]
    outputs = _output_similarity(heads, said, how)
    near = int((high < np.minimum(cut, chance))[pairs].sum())
    alike = poisson_test(near, expected_pairs_below(*(grid[pairs] for grid in dealt), threshold=cut))
    return ComparableHeads(
        pair, heads, far, low, high, chance, outputs, tuple(joined), cut, cut_clusters(joined, cut),
        len(set(cut_clusters(average_linkage(chance), cut))), embed_in_plane(far, seed=how.seed),
        adding.spread.layer_diversities(how.num_resamples, how.seed), find_outliers(far, heads, seed=how.seed),
        alike, class_separation_test(far, own, how.num_permutations, how.seed), _test_agreement(far, outputs, how),
    )  # fmt: skip


def _chance_threshold(chance: Array) -> float:
    return float(np.quantile(chance[np.triu_indices(len(chance), 1)], CHANCE_RATE))


def _output_similarity(heads: Sequence[HeadLocation], said: OutputReservoir | None, how: RedundancyOptions) -> Array | None:
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
