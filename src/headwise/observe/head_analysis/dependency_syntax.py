"""Syntax in attention heads: which heads follow dependency relations, and how well a probe on all
heads finds governors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ...report.render import to_plain
from ...util.errors import pluralise, suggest
from ..inspect.attention_sites import find_attention
from ..inspect.hooks import SiteModule
from ..inspect.model_inputs import get_streams, is_encoder_decoder
from .annotated_examples import Example, TokenAnnotations
from .head_metrics import MAX_OFFSET
from .head_table import Measure
from .resampling import CONFIDENCE, Array, Jackknife
from .weight_bands import (
    WeightBand,
    WordBandMerger,
    WordGrouping,
    merge_annotations,
    stream_weight_bands,
)

# --- Dependencies as pairs of words ---------------------------------------------------------------

DIRECTIONS = ("governor", "dependent")
ALL_RELATIONS = "all"  # stands for all relations together
POSSESSIVE_MARKS = ("'s", "s'")
RelationKey = tuple[str, str]  # relation name and direction: towards the governor or the dependent


@dataclass(frozen=True)
class ArcConvention:
    """How dependencies count as found.

    - `baseline_offsets`: fixed offsets between words that compete with the heads as baselines.
    - `weight_baseline`: "uniform" adds uniform attention over tokens as a baseline; it favours
      words of many tokens.
    - `dependents_from`: how a governor finds its dependents. "rows": it attends to the dependent
      most. "columns": each
      dependent belongs to the word that attends to it most.
    - `self_reading`: whether attention of a word to itself "counts" or is "left out".
    - `out_of_range`: an offset that leads past the last word finds "nothing" or the "last" word.
    - `counted_arcs`: "allowed" counts dependencies that the attention mask allows, "all" counts
      every one.
    - `possessive_relations`: relations whose dependent is represented by the possessive mark that
      follows it, if any.
    """

    baseline_offsets: tuple[int, ...]
    dependents_from: str = "rows"
    self_reading: str = "counts"
    out_of_range: str = "nothing"
    counted_arcs: str = "allowed"
    possessive_relations: tuple[str, ...] = ()
    weight_baseline: str = "none"

    @property
    def num_baselines(self) -> int:
        """Number of baselines that compete with a head."""
        return len(self.baseline_offsets) + (self.weight_baseline == "uniform")


ARC_CONVENTIONS: Mapping[str, ArcConvention] = {
    "ours": ArcConvention(
        tuple(offset for offset in range(-MAX_OFFSET, MAX_OFFSET + 1) if offset),
        weight_baseline="uniform",
    ),
    # 1906.04341, section 4.2, and its notebook
    "clark": ArcConvention(
        tuple(range(-3, 3)), "columns", "left out", "last", "all", ("poss", "nmod:poss")
    ),
}


@dataclass(frozen=True, eq=False)
class DependencyPairs:
    """Dependencies as pairs of word indices, [3, N]: the querying word, the word to be found, and
    an index into `keys`.

    A word index is a position among `words`, which include those of special tokens.
    """

    pairs: Tensor
    keys: tuple[RelationKey, ...]
    words: TokenAnnotations

    def select(self, directions: Sequence[str]) -> Tensor:
        """The pairs with one of these directions."""
        selected = torch.tensor(
            [key[1] in directions for key in self.keys], device=self.pairs.device
        )
        return self.pairs[:, selected[self.pairs[2]]]


def make_dependency_pairs(
    dependencies: Sequence[tuple[int, int, str]],
    word_grouping: WordGrouping,
    convention: ArcConvention,
) -> DependencyPairs:
    """Turn dependencies (dependent, governor, relation) of a text into pairs of word indices, in
    both directions.
    """
    words = word_grouping.tokens
    index_of = {word: index for index, word in enumerate(words.word_index.tolist()) if word >= 0}
    rows: list[tuple[int, int, RelationKey]] = []
    for arc in dependencies:
        if arc[0] not in index_of or arc[1] not in index_of:
            valid = f"words {min(index_of)}..{max(index_of)}" if index_of else "no words"
            raise ValueError(
                f"dependency {arc!r} names a word that does not exist: the tokens have {valid}; "
                "count words from 0"
            )
        dependent = index_of[arc[0]]
        governor = index_of[arc[1]]
        relation = arc[2]
        mark = index_of.get(arc[0] + 1) if relation in convention.possessive_relations else None
        query = (
            dependent if mark is None or words.words[mark].strip() not in POSSESSIVE_MARKS else mark
        )
        reverse = (
            (query, governor) if convention.dependents_from == "columns" else (governor, dependent)
        )
        for name in (relation, ALL_RELATIONS):
            rows += [(query, governor, (name, DIRECTIONS[0])), (*reverse, (name, DIRECTIONS[1]))]
    keys = tuple(dict.fromkeys(key for *_, key in rows))
    key_index = {key: n for n, key in enumerate(keys)}
    table = [(query, target, key_index[key]) for query, target, key in rows]
    return DependencyPairs(torch.tensor(table, device=words.word_index.device).T, keys, words)


# --- Dependencies found by single heads -----------------------------------------------------------

MIN_ARCS = 20  # relations with fewer dependencies in the data are not measured
SYNTAX_PREFIX = "syntactic"  # names of these measures start with it


class DependencyScores:
    """Dependencies found by self-attention heads: a collector for `measure_heads`.

    Parsed sentences are the sources of an encoder-decoder. A relation is left out if the data has
    fewer than `min_arcs` of it. `kept` holds the counts of each text by site, relation and
    direction.
    """

    def __init__(self, *, convention: str = "ours", min_arcs: int = MIN_ARCS) -> None:
        if convention not in ARC_CONVENTIONS:
            raise ValueError(
                f"unknown convention={convention!r}; {suggest(convention, ARC_CONVENTIONS)}"
            )
        self.convention = ARC_CONVENTIONS[convention]
        self.min_arcs = min_arcs
        self.counts_by_example: list[dict[tuple[str, RelationKey], Array]] = []
        self._words = WordBandMerger(self._add_word_band)
        self._tokens: TokenAnnotations | None = None
        self._pairs: DependencyPairs | None = None
        self._sums: dict[str, Array] = {}
        self._best_readers: dict[str, tuple[Tensor, Tensor]] = {}

    def start_example(self, example: Example) -> None:
        """Read the dependencies of the example."""
        self._tokens = example.streams.get(example.parsed_stream)
        self._pairs = None
        if example.dependencies:
            if self._tokens is None:
                raise ValueError(
                    "the example has dependencies but no tokens; give the streams that they "
                    "belong to"
                )
            self._pairs = make_dependency_pairs(
                example.dependencies, self._words.group_words(self._tokens), self.convention
            )

    def add_band(self, site: str, band: WeightBand) -> None:
        """Add a band of rows; bands of other streams and of cross-attention are ignored."""
        if (
            self._pairs is None
            or not band.is_self_attention
            or band.query_tokens is not self._tokens
        ):
            return
        if self.convention.weight_baseline == "uniform":
            band = replace(
                band,
                w_HTS=torch.cat([band.w_HTS, band.uniform_baseline.w_HTS.to(band.w_HTS.dtype)]),
            )
        self._words.add_band(site, band)

    def _add_word_band(self, site: str, band: WeightBand) -> None:
        dependencies = self._pairs
        assert dependencies is not None
        allowed = band.allowed if band.allowed.dim() == 2 else band.allowed.any(0)
        w_HTS = band.w_HTS.masked_fill((band.key_tokens.word_index < 0) | ~allowed, -1)
        if self.convention.self_reading == "left out":
            w_HTS = w_HTS.masked_fill(
                torch.arange(band.key_tokens.count, device=w_HTS.device)
                == band.query_positions[:, None],
                -1,
            )
        pairs = dependencies.pairs
        if self.convention.dependents_from == "columns":
            self._update_best_readers(site, w_HTS, band)
            pairs = dependencies.select(DIRECTIONS[:1])
        pairs = pairs[
            :, (pairs[0] >= band.first_query) & (pairs[0] < band.first_query + w_HTS.shape[1])
        ]
        query = pairs[0] - band.first_query
        target = pairs[1]
        if self.convention.counted_arcs == "allowed":
            pairs = pairs[:, allowed[query, target]]
            query = pairs[0] - band.first_query
            target = pairs[1]
        is_max = w_HTS == w_HTS.amax(-1, keepdim=True)
        self._add_hits(site, pairs, is_max[:, query, target] / is_max.sum(-1)[:, query])

    def _update_best_readers(self, site: str, w_HTS: Tensor, band: WeightBand) -> None:
        """Update, for each word, the word that attends to it most in the bands so far."""
        w_HTS = w_HTS.masked_fill(
            band.query_tokens.word_index[band.query_positions][:, None] < 0, -1
        )
        weight, reader = w_HTS.max(1)
        best_weight, best_reader = self._best_readers.get(
            site, (torch.full_like(weight, -1), torch.zeros_like(reader))
        )
        self._best_readers[site] = (
            torch.maximum(weight, best_weight),
            torch.where(weight > best_weight, reader + band.first_query, best_reader),
        )

    def _add_hits(self, site: str, pairs: Tensor, hits: Tensor) -> None:
        """Add hits of heads and baselines and the number of dependencies, by key: [keys, H +
        baselines + 1].
        """
        dependencies = self._pairs
        assert dependencies is not None
        word = dependencies.words.word_index
        query = word[pairs[0]]
        target = word[pairs[1]]
        predicted = (
            query + torch.tensor(self.convention.baseline_offsets, device=word.device)[:, None]
        )
        if self.convention.out_of_range == "last":
            predicted = predicted.clamp(max=int(word.max()))
        columns = torch.cat(
            [
                hits.double(),
                (predicted == target).double(),
                torch.ones_like(predicted[:1], dtype=torch.float64),
            ]
        )
        sums = columns.new_zeros(len(dependencies.keys), len(columns)).index_add_(
            0, pairs[2], columns.T.contiguous()
        )
        self._sums[site] = self._sums.get(site, 0) + sums.cpu().numpy()

    def finish_example(self) -> None:
        """Store the counts of the example."""
        dependencies = self._pairs
        for site, (_, reader) in self._best_readers.items():
            assert dependencies is not None
            pairs = dependencies.select(DIRECTIONS[1:])
            self._add_hits(site, pairs, reader[:, pairs[0]] == pairs[1])
        keys = dependencies.keys if dependencies is not None else ()
        counts = {
            (site, key): sums[n] for site, sums in self._sums.items() for n, key in enumerate(keys)
        }
        self.counts_by_example.append(counts)
        self._sums = {}
        self._best_readers = {}
        self._pairs = None
        self._words.finish_example()

    def measures(self) -> Mapping[tuple[str, int], Mapping[str, Measure]]:
        """The share of each relation's dependencies that each head finds; chance is the best
        baseline.

        The interval is that of the head's margin over the best baseline, moved to the head's own
        value. It is corrected for testing all heads, relations and directions at once (Bonferroni:
        one false claim in 20 data sets), and cut off at 0 and 1.
        """
        keys = dict.fromkeys(key for counts in self.counts_by_example for key in counts)
        counts_by_key = {key: self._stack_counts(key) for key in keys}
        counts_by_key = {
            key: counts
            for key, counts in counts_by_key.items()
            if counts[..., -1].sum() >= self.min_arcs
        }
        baselines = self.convention.num_baselines
        tests = sum(counts.shape[1] - baselines - 1 for counts in counts_by_key.values())
        confidence = 1 - (1 - CONFIDENCE) / max(1, tests)
        measures: dict[tuple[str, int], dict[str, Measure]] = {}
        for (site, (relation, towards)), counts in counts_by_key.items():
            name = f"{SYNTAX_PREFIX} {relation} to {towards}"
            for head, measure in enumerate(_relation_measures(counts, baselines, confidence)):
                measures.setdefault((site, head), {})[name] = measure
        return measures

    def _stack_counts(self, key: tuple[str, RelationKey]) -> Array:
        """Counts of every text, [texts, H + baselines + 1]."""
        missing = np.zeros_like(
            next(counts[key] for counts in self.counts_by_example if key in counts)
        )
        return np.stack([counts.get(key, missing) for counts in self.counts_by_example])


def is_relation_measure(measure: str) -> bool:
    """True if `measure` is the name of a measure of a single relation.

    >>> (
    ...     is_relation_measure("syntactic nsubj to governor"),
    ...     is_relation_measure("syntactic all to governor"),
    ...     is_relation_measure("sink"),
    ... )
    (True, False, False)
    """
    return measure.startswith(f"{SYNTAX_PREFIX} ") and not measure.startswith(
        f"{SYNTAX_PREFIX} {ALL_RELATIONS} "
    )


def _relation_measures(sums: Array, num_baselines: int, confidence: float) -> list[Measure]:
    """Share of one relation's dependencies, in one direction, that each head finds."""
    shares = Jackknife.of_ratio(sums[:, :-1], sums[:, -1:])
    values = shares.value[:-num_baselines]
    chance = shares.value[-num_baselines:].max()

    def margin(values: Array) -> Array:
        return values[..., :-num_baselines] - values[..., -num_baselines:].max(-1, keepdims=True)

    margins = shares.map(margin)
    low, high = (np.clip(end + chance, 0, 1) for end in margins.interval(confidence))
    num_arcs = float(sums[:, -1].sum())
    columns = (array.tolist() for array in (values, low, high, margins.p_values(sides=1)))
    return [
        Measure(value, start, end, float(chance), num_arcs, p)
        for value, start, end, p in zip(*columns, strict=True)
    ]


# --- A probe on the attention weights of all heads ------------------------------------------------

MAX_BASELINE_OFFSET = 8  # largest offset that the baseline may choose, in both directions
MAX_ITERATIONS = 100


@dataclass(frozen=True)
class ProbeOptions:
    """Options of `train_attention_probe`.

    `test_fraction` of the texts is held out; `weight_decay` / 2 times the squared weights is added
    to the loss.

    >>> ProbeOptions(test_fraction=1.5)
    Traceback (most recent call last):
    ValueError: test_fraction must be between 0 and 1, got 1.5
    """

    test_fraction: float = 0.3
    weight_decay: float = 1e-4
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.test_fraction < 1:
            raise ValueError(f"test_fraction must be between 0 and 1, got {self.test_fraction!r}")
        if not self.weight_decay >= 0:
            raise ValueError(f"weight_decay must be >= 0, got {self.weight_decay!r}")


class HeadProbeWeight(NamedTuple):
    """Weights of one head in the probe: `up` for attention of the governor to the word, `down` for
    attention of the word to its governor.
    """

    site: str
    head: int
    up: float
    down: float


@dataclass(frozen=True)
class ProbeResult:
    """Share of governors that the probe finds in the held-out texts (unlabelled attachment score,
    UAS).

    `random_baseline` is the score of the randomly initialised baseline, `baseline` that of one
    fixed `offset`. `head_weights` are the probe's weights by head; `texts` and `arcs` count the
    training and the held-out part.
    """

    uas: Measure
    random_baseline: Measure | None
    baseline: Measure
    offset: int
    head_weights: tuple[HeadProbeWeight, ...]
    texts: tuple[int, int]
    arcs: tuple[int, int]
    notes: tuple[str, ...] = ()

    @property
    def data(self) -> dict[str, Any]:
        """Dictionary of plain values, ready for JSON."""
        weights = [weight._asdict() for weight in self.head_weights]
        return to_plain(self) | {"head_weights": weights}


class ProbeSentence(NamedTuple):
    """Attention maps [heads, words, words] of a text and its dependencies (dependent, governor)."""

    attention_maps: Tensor
    dependencies: Sequence[tuple[int, int]]

    @property
    def features(self) -> Tensor:
        """Attention to and from each candidate governor of each dependency, [dependencies, words, 2
        heads].
        """
        dependents = [dependent for dependent, _ in self.dependencies]
        to_dependent = self.attention_maps[:, :, dependents].permute(2, 1, 0)
        from_dependent = self.attention_maps[:, dependents].permute(1, 2, 0)
        return torch.cat([to_dependent, from_dependent], -1)

    def scores(self, weight: Tensor) -> Tensor:
        """Score of each word as governor, [dependencies, words]; the dependent itself has none."""
        words = torch.arange(self.attention_maps.shape[1])
        dependents = torch.tensor([dependent for dependent, _ in self.dependencies])
        return (self.features @ weight).masked_fill(words == dependents[:, None], -torch.inf)


def train_attention_probe(
    model: nn.Module,
    examples: Iterable[Example],
    *,
    random_baseline: nn.Module | None = None,
    options: ProbeOptions = ProbeOptions(),
    progress: Callable[[int], object] = lambda _: None,
) -> ProbeResult:
    """Train the attention-only probe of Clark et al. (1906.04341) on gold dependencies; score it on
    held-out texts.

    `random_baseline` is the same architecture before training, see `make_random_baseline`; its
    score shows what word positions alone reveal. The second baseline is the single offset from a
    word to its governor that is right most often in the training texts. `progress` is called with
    the number of examples with dependencies read so far.
    """
    models = [model] if random_baseline is None else [model, random_baseline]
    sites_by_model = [_self_attention_sites(each) for each in models]
    sentences_by_model: list[list[ProbeSentence]] = [[] for _ in models]
    heads: list[tuple[str, int]] = []
    left_out = 0
    for example in examples:
        dependencies = _word_dependencies(example)
        if not dependencies:
            left_out += 1
            continue
        for each, sites, sentences in zip(models, sites_by_model, sentences_by_model, strict=True):
            maps = word_attention_maps(each, sites, example)
            sentences.append(ProbeSentence(torch.cat(list(maps.values())), dependencies))
            heads = []
            for site, site_maps in maps.items():
                heads += [(site, head) for head in range(len(site_maps))]
        progress(len(sentences_by_model[0]))
    own = sentences_by_model[0]
    train, test = _split_texts(len(own), options)
    weights: list[Tensor] = []
    correct: list[list[list[float]]] = []
    for sentences in sentences_by_model:
        weights.append(_fit_probe([sentences[n] for n in train], options))
        correct.append([_arc_accuracy(sentences[n], weights[-1]) for n in test])
    offset = _best_offset([own[n] for n in train])
    by_offset: list[list[float]] = []
    chance: list[float] = []
    for n in test:
        arcs = own[n].dependencies
        by_offset.append([float(governor == dependent + offset) for dependent, governor in arcs])
        chance += [1 / (own[n].attention_maps.shape[1] - 1)] * len(arcs)
    scores = [_accuracy_measure(hits, float(np.mean(chance))) for hits in (*correct, by_offset)]
    notes = (f"left out {pluralise(left_out, 'text')} without dependencies",) if left_out else ()
    counts = [sum(len(own[n].dependencies) for n in part) for part in (train, test)]
    ups, downs = weights[0].view(2, -1).tolist()
    pairs = zip(heads, ups, downs, strict=True)
    return ProbeResult(
        scores[0],
        scores[1] if random_baseline is not None else None,
        scores[-1],
        offset,
        tuple(HeadProbeWeight(site, head, up, down) for (site, head), up, down in pairs),
        (len(train), len(test)),
        (counts[0], counts[1]),
        notes,
    )


def word_attention_maps(
    model: nn.Module, sites: Sequence[SiteModule], example: Example
) -> dict[str, Tensor]:
    """Attention of every word to every word, averaged over the querying tokens: site name ->
    [heads, words, words].
    """
    stream = example.parsed_stream
    tokens = example.streams[stream]
    bands = dict[str, list[Tensor]]()
    words = WordBandMerger(
        lambda site, band: bands.setdefault(site, []).append(band.w_HTS.float().cpu())
    )
    streams = {module.site.name: (stream, stream) for module in sites}
    stream_weight_bands(model, sites, example, streams, words.add_band)
    is_word = (words.group_words(tokens).tokens.word_index >= 0).cpu()
    return {
        module.site.name: torch.cat(bands[module.site.name], 1)[:, is_word][:, :, is_word]
        for module in sites
    }


def _self_attention_sites(model: nn.Module) -> list[SiteModule]:
    """Observable sites at which a text, or the source of an encoder-decoder, attends to itself."""
    if model.training:
        raise ValueError(
            "cannot probe a model in train mode, where dropout changes attention; call "
            "model.eval() first"
        )
    has_source = is_encoder_decoder(model)
    stream = "source" if has_source else "text"
    sites = [
        module
        for module in find_attention(model)
        if module.site.observe.possible and get_streams(module.site, has_source) == (stream, stream)
    ]
    if not sites:
        raise ValueError(
            f"cannot probe {type(model).__name__}: it has no self-attention that can be observed"
        )
    return sites


def _word_dependencies(example: Example) -> list[tuple[int, int]]:
    """Dependencies between two words, as indices into the attention maps."""
    tokens = example.streams.get(example.parsed_stream)
    word_indices = [] if tokens is None else merge_annotations(tokens).word_index.tolist()
    words = [word for word in word_indices if word >= 0]
    index_of = {word: index for index, word in enumerate(words)}
    dependencies = [
        (dependent, governor)
        for dependent, governor, _ in example.dependencies
        if dependent != governor and governor >= 0
    ]
    unknown = [pair for pair in dependencies if not {*pair} <= index_of.keys()]
    if unknown:
        valid = f"words {min(index_of)}..{max(index_of)}" if index_of else "no words"
        raise ValueError(
            f"a dependency joins words {unknown[0]}, but the tokens have {valid}; count words "
            "from 0"
        )
    return [(index_of[dependent], index_of[governor]) for dependent, governor in dependencies]


def _split_texts(count: int, options: ProbeOptions) -> tuple[list[int], list[int]]:
    """Indices of the training texts and of the held-out texts."""
    num_test = round(options.test_fraction * count)
    if num_test < 2 or count - num_test < 2:
        split = f"{count - num_test} for training and {num_test} held out"
        raise ValueError(
            f"cannot split {count} texts with dependencies: {split}; at least two of each are "
            "needed"
        )
    order = np.random.default_rng(options.seed).permutation(count).tolist()
    return sorted(order[num_test:]), sorted(order[:num_test])


def probe_loss(sentences: Sequence[ProbeSentence]) -> Callable[[Tensor], Tensor]:
    """Return the function from probe weights [2 heads] to -log p of the gold governor, averaged over
    the dependencies of all sentences.
    """
    features: list[Tensor] = []
    is_candidate: list[Tensor] = []
    governors: list[int] = []
    for sentence in sentences:
        features += sentence.features.unbind()
        is_candidate += torch.isfinite(
            sentence.scores(features[0].new_zeros(features[0].shape[-1]))
        )
        governors += [governor for _, governor in sentence.dependencies]
    all_features = nn.utils.rnn.pad_sequence(features, batch_first=True)
    left_out = ~nn.utils.rnn.pad_sequence(is_candidate, batch_first=True)
    targets = torch.tensor(governors)

    def loss(weight: Tensor) -> Tensor:
        scores = (all_features @ weight).masked_fill(left_out, -torch.inf)
        return nn.functional.cross_entropy(scores, targets)

    return loss


def _fit_probe(sentences: Sequence[ProbeSentence], options: ProbeOptions) -> Tensor:
    """Probe weights [2 heads] that maximise the likelihood of the gold governors, by L-BFGS from
    zero.
    """
    likelihood = probe_loss(sentences)
    weight = torch.zeros(2 * len(sentences[0].attention_maps), requires_grad=True)
    optimiser = torch.optim.LBFGS([weight], max_iter=MAX_ITERATIONS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = likelihood(weight) + options.weight_decay * weight.square().sum() / 2
        value.backward()
        return value

    with torch.enable_grad():
        optimiser.step(loss)  # pyright: ignore[reportArgumentType] - its stub wants a float, torch a tensor
    return weight.detach()


def _arc_accuracy(sentence: ProbeSentence, weight: Tensor) -> list[float]:
    """For each dependency, 1.0 if the likeliest candidate is the governor."""
    governors = torch.tensor([governor for _, governor in sentence.dependencies])
    return (sentence.scores(weight).argmax(-1) == governors).double().tolist()


def _best_offset(sentences: Sequence[ProbeSentence]) -> int:
    offsets: list[int] = []
    for sentence in sentences:
        offsets += [governor - dependent for dependent, governor in sentence.dependencies]
    choices = [offset for offset in range(-MAX_BASELINE_OFFSET, MAX_BASELINE_OFFSET + 1) if offset]
    return max(choices, key=lambda offset: (offsets.count(offset), -abs(offset), -offset))


def _accuracy_measure(correct: Sequence[Sequence[float]], chance: float) -> Measure:
    """Accuracy with an interval over texts."""
    sums = np.array([float(sum(hits)) for hits in correct])
    accuracy = Jackknife.of_ratio(sums, np.array([float(len(hits)) for hits in correct]))
    low, high = accuracy.interval()
    return Measure(float(accuracy.value), float(low), float(high), chance)
