"""Syntax in attention heads: which heads follow dependency relations, and how well a probe on all
heads finds governors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ...util.errors import check_known, pluralise
from ..inspect.attention_sites import require_ability
from ..inspect.hooks import SiteModule
from ..inspect.model_inputs import get_streams, is_encoder_decoder
from .annotated_examples import Example, TokenAnnotations
from .head_measurement import MeasureCollector
from .head_metrics import MAX_OFFSET
from .head_table import Measure
from .resampling import CONFIDENCE, Array, Jackknife, stack_by_key
from .weight_bands import WeightBand, WordBandMerger, merge_annotations, stream_weight_bands

# --- Dependencies found by single heads -----------------------------------------------------------

CONVENTIONS = ("ours", "clark")
DIRECTIONS = ("governor", "dependent")
ALL_RELATIONS = "all"  # stands for all relations together
POSSESSIVE_RELATIONS = ("poss", "nmod:poss")
POSSESSIVE_MARKS = ("'s", "s'")
MIN_ARCS = 20  # relations with fewer dependencies in the data are not measured
SYNTAX_PREFIX = "syntactic"  # names of these measures start with it
RelationKey = tuple[str, str]  # relation name and direction: towards the governor or the dependent


class DependencyScores(MeasureCollector):
    """Dependencies found by self-attention heads: a collector for `measure_heads`.

    Parsed sentences are the sources of an encoder-decoder. A relation is left out if the data has
    fewer than `min_arcs` of it. A dependency is found by a word that attends to the other word
    most. `convention` defines how dependencies count, "ours" or "clark" (1906.04341, section 4.2,
    and its notebook):

    - Heads compete with fixed offsets between words: -8 to 8, or "clark" -3 to 2; an offset past
      the last word finds the last word. With "ours", they also compete with uniform
      attention over tokens, which favours words of many tokens.
    - "ours" counts the dependencies that the attention mask allows, "clark" all of them.
    - With "clark", a dependent belongs to the word that attends to it most, attention of a word to
      itself is left out, and a possessive mark stands for the word before it.
    """

    def __init__(self, *, convention: str = "ours", min_arcs: int = MIN_ARCS) -> None:
        check_known("convention", convention, CONVENTIONS)
        self.is_clark = convention == "clark"
        reach = range(-3, 3) if self.is_clark else range(-MAX_OFFSET, MAX_OFFSET + 1)
        self.offsets = [offset for offset in reach if offset or self.is_clark]
        self.num_baselines = len(self.offsets) + (not self.is_clark)
        self.min_arcs = min_arcs
        # hits of heads and baselines, and the number of dependencies, of each text by site and key
        self.counts_by_example: list[dict[tuple[str, RelationKey], Array]] = []
        self._words = WordBandMerger(self._add_word_band)
        self._tokens: TokenAnnotations | None = None
        self._keys: list[RelationKey] = []
        self._pairs = torch.empty(3, 0)  # querying word, the word to be found, index into `_keys`
        self._sums: dict[str, Array] = {}
        self._best_readers: dict[str, tuple[Tensor, Tensor]] = {}

    def start_example(self, example: Example) -> None:
        """Read the dependencies of the example, as pairs of words in both directions."""
        self._tokens = example.streams.get(example.parsed_stream)
        self._keys = []
        if not example.dependencies:
            return
        if self._tokens is None:
            raise ValueError(
                "the example has dependencies but no tokens; give the streams that they belong to"
            )
        words = self._words.group_words(self._tokens).tokens
        numbers = words.word_index.tolist()
        index_of = {word: index for index, word in enumerate(numbers) if word >= 0}
        rows: list[tuple[int, int, RelationKey]] = []
        for arc in example.dependencies:
            _check_words(arc[:2], index_of, f"dependency {arc!r} names a word that does not exist")
            governor = index_of[arc[1]]
            relation = arc[2]
            query = index_of[arc[0]]
            reverse = (governor, query)
            if self.is_clark:
                mark = index_of.get(arc[0] + 1)
                is_marked = mark is not None and words.words[mark].strip() in POSSESSIVE_MARKS
                if mark is not None and is_marked and relation in POSSESSIVE_RELATIONS:
                    query = mark
                reverse = (query, governor)
            for name in (relation, ALL_RELATIONS):
                rows.append((query, governor, (name, DIRECTIONS[0])))
                rows.append((*reverse, (name, DIRECTIONS[1])))
        self._keys = list(dict.fromkeys(key for *_, key in rows))
        table = [(query, target, self._keys.index(key)) for query, target, key in rows]
        self._pairs = torch.tensor(table, device=words.word_index.device).T

    def add_band(self, site: str, band: WeightBand) -> None:
        """Add a band of rows; bands of other streams and of cross-attention are ignored."""
        is_parsed = band.is_self_attention and band.query_tokens is self._tokens
        if not self._keys or not is_parsed:
            return
        if not self.is_clark:
            uniform = band.uniform_baseline.w_HTS.to(band.w_HTS.dtype)
            band = replace(band, w_HTS=torch.cat([band.w_HTS, uniform]))
        self._words.add_band(site, band)

    def _select(self, direction: str) -> Tensor:
        """The pairs of one direction."""
        flags = [key[1] == direction for key in self._keys]
        return self._pairs[:, torch.tensor(flags, device=self._pairs.device)[self._pairs[2]]]

    def _add_word_band(self, site: str, band: WeightBand) -> None:
        allowed = band.allowed.any(0)
        w_HTS = band.w_HTS.masked_fill((band.key_tokens.word_index < 0) | ~allowed, -1)
        pairs = self._pairs
        if self.is_clark:
            keys = torch.arange(band.key_tokens.count, device=w_HTS.device)
            w_HTS = w_HTS.masked_fill(keys == band.query_positions[:, None], -1)
            # For each word, the word that attends to it most in the bands so far
            is_word = band.query_tokens.word_index[band.query_positions] >= 0
            weight, reader = w_HTS.masked_fill(~is_word[:, None], -1).max(1)
            unread = (torch.full_like(weight, -1), torch.zeros_like(reader))
            best_weight, best_reader = self._best_readers.get(site, unread)
            self._best_readers[site] = (
                torch.maximum(weight, best_weight),
                torch.where(weight > best_weight, reader + band.first_query, best_reader),
            )
            pairs = self._select(DIRECTIONS[0])
        rows = pairs[0] - band.first_query
        is_inside = (rows >= 0) & (rows < w_HTS.shape[1])
        pairs = pairs[:, is_inside]
        if not self.is_clark:
            pairs = pairs[:, allowed[pairs[0] - band.first_query, pairs[1]]]
        query = pairs[0] - band.first_query
        is_max = w_HTS == w_HTS.amax(-1, keepdim=True)
        self._add_hits(site, pairs, is_max[:, query, pairs[1]] / is_max.sum(-1)[:, query])

    def _add_hits(self, site: str, pairs: Tensor, hits: Tensor) -> None:
        """Add hits of heads and baselines and the number of dependencies, by key: [keys, H +
        baselines + 1].
        """
        assert self._tokens is not None
        word = self._words.group_words(self._tokens).tokens.word_index
        predicted = word[pairs[0]] + torch.tensor(self.offsets, device=word.device)[:, None]
        if self.is_clark:
            predicted = predicted.clamp(max=int(word.max()))
        ones = torch.ones_like(predicted[:1], dtype=torch.float64)
        columns = torch.cat([hits.double(), (predicted == word[pairs[1]]).double(), ones])
        sums = columns.new_zeros(len(self._keys), len(columns))
        sums.index_add_(0, pairs[2], columns.T.contiguous())
        self._sums[site] = self._sums.get(site, 0) + sums.cpu().numpy()

    def finish_example(self) -> None:
        """Store the counts of the example."""
        for site, (_, reader) in self._best_readers.items():
            pairs = self._select(DIRECTIONS[1])
            self._add_hits(site, pairs, reader[:, pairs[0]] == pairs[1])
        counts: dict[tuple[str, RelationKey], Array] = {}
        for site, sums in self._sums.items():
            counts |= {(site, key): sums[n] for n, key in enumerate(self._keys)}
        self.counts_by_example.append(counts)
        self._sums = {}
        self._best_readers = {}
        self._keys = []
        self._words.finish_example()

    def merge(self, later: DependencyScores) -> None:
        """Add the counts of later examples."""
        self.counts_by_example += later.counts_by_example

    def measures(self) -> Mapping[tuple[str, int], Mapping[str, Measure]]:
        """Measure the share of each relation's dependencies that each head finds.

        Chance is the best baseline. The interval is computed for the head's margin over the best
        baseline, then moved to the head's own value. It is corrected for testing all heads,
        relations and directions at once (Bonferroni: one false claim in 20 data sets), and cut off
        at 0 and 1.
        """
        stacked = stack_by_key(self.counts_by_example)
        stacked = {key: one for key, one in stacked.items() if one[..., -1].sum() >= self.min_arcs}
        tests = sum(one.shape[1] - self.num_baselines - 1 for one in stacked.values())
        confidence = 1 - (1 - CONFIDENCE) / max(1, tests)
        measures: dict[tuple[str, int], dict[str, Measure]] = {}
        for (site, (relation, towards)), counts in stacked.items():
            name = f"{SYNTAX_PREFIX} {relation} to {towards}"
            shares = Jackknife.of_ratio(counts[:, :-1], counts[:, -1:])
            chance = float(shares.value[-self.num_baselines :].max())
            margins = shares.map(self._margin)
            low, high = (np.clip(end + chance, 0, 1) for end in margins.interval(confidence))
            num_arcs = float(counts[:, -1].sum())
            columns = (shares.value[: len(low)], low, high, margins.p_values(sides=1))
            for head, (value, start, end, p) in enumerate(np.stack(columns, 1).tolist()):
                measure = Measure(value, start, end, chance, num_arcs, p)
                measures.setdefault((site, head), {})[name] = measure
        return measures

    def _margin(self, shares: Array) -> Array:
        """How much more each head finds than the best baseline, which follow the heads."""
        heads = shares[..., : -self.num_baselines]
        return heads - shares[..., -self.num_baselines :].max(-1, keepdims=True)


def _check_words(words: Iterable[int], index_of: Mapping[int, int], fact: str) -> None:
    """Raise if a dependency names a word without tokens."""
    if not {*words} <= index_of.keys():
        valid = f"words {min(index_of)}..{max(index_of)}" if index_of else "no words"
        raise ValueError(f"{fact}: the tokens have {valid}; count words from 0")


def is_relation_measure(measure: str) -> bool:
    """Return True if `measure` is the name of a measure of a single relation.

    >>> names = ("syntactic nsubj to governor", "syntactic all to governor", "sink")
    >>> [is_relation_measure(name) for name in names]
    [True, False, False]
    """
    prefix, _, relation = measure.partition(" ")
    return prefix == SYNTAX_PREFIX and not relation.startswith(f"{ALL_RELATIONS} ")


# --- A probe on the attention weights of all heads ------------------------------------------------


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


@dataclass(frozen=True)
class HeadProbeWeight:
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

    `random_baseline` is the score with random initialisation; `baseline` is the score of one fixed
    `offset`. `head_weights` are the probe's weights by head; `texts` and `arcs` count the training
    and the held-out part.
    """

    uas: Measure
    random_baseline: Measure | None
    baseline: Measure
    offset: int
    head_weights: tuple[HeadProbeWeight, ...]
    texts: tuple[int, int]
    arcs: tuple[int, int]
    notes: tuple[str, ...] = ()


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

    @property
    def is_candidate(self) -> Tensor:
        """False for the dependent itself, [dependencies, words]."""
        dependents = torch.tensor([dependent for dependent, _ in self.dependencies])
        return torch.arange(self.attention_maps.shape[1]) != dependents[:, None]

    @property
    def governors(self) -> Tensor:
        """Gold governor of each dependency."""
        return torch.tensor([governor for _, governor in self.dependencies])

    def hits(self, weight: Tensor) -> list[float]:
        """For each dependency, 1.0 if the likeliest candidate is the governor."""
        scores = (self.features @ weight).masked_fill(~self.is_candidate, -torch.inf)
        return (scores.argmax(-1) == self.governors).double().tolist()


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
    sites = [_self_attention_sites(each) for each in models]
    sentences: list[list[ProbeSentence]] = [[] for _ in models]
    heads: list[tuple[str, int]] = []
    left_out = 0
    for example in examples:
        tokens = example.streams.get(example.parsed_stream)
        numbers = [] if tokens is None else merge_annotations(tokens).word_index.tolist()
        index_of: dict[int, int] = {}  # place of each word in the attention maps
        for word in numbers:
            index_of |= {word: len(index_of)} if word >= 0 else {}
        dependencies: list[tuple[int, int]] = []
        for *pair, _ in example.dependencies:
            if pair[0] != pair[1] and pair[1] >= 0:
                _check_words(pair, index_of, f"a dependency joins words {tuple(pair)}")
                dependencies.append((index_of[pair[0]], index_of[pair[1]]))
        if not dependencies:
            left_out += 1
            continue
        for number, each in enumerate(models):
            maps = word_attention_maps(each, sites[number], example)
            sentences[number].append(ProbeSentence(torch.cat(list(maps.values())), dependencies))
            heads = []
            for site, site_maps in maps.items():
                heads += [(site, head) for head in range(len(site_maps))]
        progress(len(sentences[0]))
    train, test = _split_texts(len(sentences[0]), options)
    weights = [_fit_probe(itemgetter(*train)(texts), options) for texts in sentences]
    offsets: list[int] = []
    for n in train:
        offsets += [governor - dependent for dependent, governor in sentences[0][n].dependencies]
    choices = [one for one in range(-MAX_OFFSET, MAX_OFFSET + 1) if one]
    offset = max(choices, key=lambda one: (offsets.count(one), -abs(one), -one))
    hits: list[list[list[float]]] = []  # of each probe and of the offset, by text and dependency
    for texts, weight in zip(sentences, weights, strict=True):
        hits.append([texts[n].hits(weight) for n in test])
    by_offset: list[list[float]] = []
    chance: list[float] = []
    for n in test:
        arcs = sentences[0][n].dependencies
        by_offset.append([float(governor == dependent + offset) for dependent, governor in arcs])
        chance += [1 / (sentences[0][n].attention_maps.shape[1] - 1)] * len(arcs)
    scores: list[Measure] = []
    for correct in (*hits, by_offset):
        counts = np.array([float(len(one)) for one in correct])
        accuracy = Jackknife.of_ratio(np.array([float(sum(one)) for one in correct]), counts)
        low, high = (float(end) for end in accuracy.interval())
        scores.append(Measure(float(accuracy.value), low, high, float(np.mean(chance))))
    notes = (f"left out {pluralise(left_out, 'text')} without dependencies",) if left_out else ()
    num_arcs = np.array([len(one.dependencies) for one in sentences[0]])
    pairs = zip(heads, weights[0].view(2, -1).T.tolist(), strict=True)
    return ProbeResult(
        scores[0],
        scores[1] if random_baseline is not None else None,
        scores[-1],
        offset,
        tuple(HeadProbeWeight(*head, *up_and_down) for head, up_and_down in pairs),
        (len(train), len(test)),
        (int(num_arcs[train].sum()), int(num_arcs[test].sum())),
        notes,
    )


def word_attention_maps(
    model: nn.Module, sites: Sequence[SiteModule], example: Example
) -> dict[str, Tensor]:
    """Attention of every word to every word, averaged over the querying tokens: site name ->
    [heads, words, words].
    """
    stream = example.parsed_stream
    bands: dict[str, list[Tensor]] = {module.site.name: [] for module in sites}
    words = WordBandMerger(lambda site, band: bands[site].append(band.w_HTS.float()))
    streams = dict.fromkeys(bands, (stream, stream))
    stream_weight_bands(model, sites, [example], streams, words.add_band)
    is_word = words.group_words(example.streams[stream]).tokens.word_index >= 0
    return {site: torch.cat(one, 1)[:, is_word][:, :, is_word] for site, one in bands.items()}


def _self_attention_sites(model: nn.Module) -> list[SiteModule]:
    """Observable sites at which a text, or the source of an encoder-decoder, attends to itself."""
    has_source = is_encoder_decoder(model)
    streams = ("source", "source") if has_source else ("text", "text")
    sites = require_ability(model, "observe")
    sites = [one for one in sites if get_streams(one.site, has_source) == streams]
    if not sites:
        raise ValueError(
            f"cannot probe {type(model).__name__}: it has no self-attention that can be observed"
        )
    return sites


def _split_texts(count: int, options: ProbeOptions) -> tuple[list[int], list[int]]:
    """Return indices of the training texts and of the held-out texts."""
    num_test = round(options.test_fraction * count)
    if num_test < 2 or count - num_test < 2:
        split = f"{count - num_test} for training and {num_test} held out"
        fact = f"cannot split {count} texts with dependencies: {split}"
        raise ValueError(f"{fact}; at least two of each are needed")
    order = np.random.default_rng(options.seed).permutation(count).tolist()
    return sorted(order[num_test:]), sorted(order[:num_test])


def probe_loss(sentences: Sequence[ProbeSentence]) -> Callable[[Tensor], Tensor]:
    """Return the function from probe weights [2 heads] to -log p of the gold governor, averaged
    over the dependencies of all sentences.
    """
    features: list[Tensor] = []
    is_candidate: list[Tensor] = []
    for sentence in sentences:
        features += sentence.features.unbind()
        is_candidate += sentence.is_candidate.unbind()
    all_features = nn.utils.rnn.pad_sequence(features, batch_first=True)
    left_out = ~nn.utils.rnn.pad_sequence(is_candidate, batch_first=True)
    targets = torch.cat([sentence.governors for sentence in sentences])

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
        optimiser.step(loss)  # pyright: ignore[reportArgumentType] - its stub wants a float
    return weight.detach()
