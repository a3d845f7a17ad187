"""Dependency arcs of a text as pairs of words, by one convention or another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import suggest
from ..inspect.attention_sites import find_attention
from ..inspect.hooks import SiteModule
from ..inspect.model_inputs import get_streams, is_encoder_decoder
from .annotated_examples import Example, TokenAnnotations
from .head_metrics import MAX_OFFSET
from .head_table import Measure
from .resampling import CONFIDENCE, Array, confidence_interval, draw_resamples, ratio_of_sums, resampled_ratios
from .weight_bands import WeightBand, WordBandMerger, WordGrouping, merge_annotations, stream_weight_bands

DIRECTIONS = ("governor", "dependent")
ALL_RELATIONS = "all"  # relations together
POSSESSIVE_MARKS = ("'s", "s'")
RelationKey = tuple[str, str]  # a relation, and towards which end


@dataclass(frozen=True)
class ArcConvention:
    """How arcs are counted.

    `offsets` compete as baseline, and "alike" `weights` on all tokens, for words of many pieces get more of those.
    `back` is how a governor finds its dependents: by its "rows", what it reads most, or by "columns", where each
    dependent is given to the word that reads it most. `itself` says whether a word may read itself: "counts" or "left
    out". `edge` is where offsets lead beyond the last word: to "nothing", or to the "last". `counted` are arcs that may
    be "read", or "all". A dependent of a `possessive` relation before a mark of possession is asked for through the
    mark.
    """

    baseline_offsets: tuple[int, ...]
    dependents_from: str = "rows"
    self_reading: str = "counts"
    out_of_range: str = "nothing"
    counted_arcs: str = "read"
    possessive_relations: tuple[str, ...] = ()
    weight_baseline: str = "none"

    @property
    def num_baselines(self) -> int:
        """How many compete with a head."""
        return len(self.baseline_offsets) + (self.weight_baseline == "alike")


ARC_CONVENTIONS: Mapping[str, ArcConvention] = {
    "ours": ArcConvention(tuple(one for one in range(-MAX_OFFSET, MAX_OFFSET + 1) if one), weight_baseline="alike"),
    # 1906.04341, section 4.2, and its notebook
    "clark": ArcConvention(tuple(range(-3, 3)), "columns", "left out", "last", "all", ("poss", "nmod:poss")),
}


@dataclass(frozen=True, eq=False)
class DependencyPairs:
    """Pairs of words: who asks, who is wanted, and the number among `keys` of the relation with its direction, [3, N].

    Words go by their numbers among the `words` of the text, those that stand for no text included.
    """

    pairs: Tensor
    keys: tuple[RelationKey, ...]
    words: TokenAnnotations

    def select(self, directions: Sequence[str]) -> Tensor:
        """The pairs of these directions."""
        wanted = torch.tensor([key[1] in directions for key in self.keys], device=self.pairs.device)
        return self.pairs[:, wanted[self.pairs[2]]]


def make_dependency_pairs(
    dependencies: Sequence[tuple[int, int, str]], word_grouping: WordGrouping, convention: ArcConvention
) -> DependencyPairs:
    """The arcs (dependent, governor, relation) of a text."""
    words = word_grouping.tokens
    at = {word: number for number, word in enumerate(words.word_index.tolist()) if word >= 0}
    rows: list[tuple[int, int, RelationKey]] = []
    for arc in dependencies:
        if arc[0] not in at or arc[1] not in at:
            has = f"the words {min(at)}..{max(at)}" if at else "no words"
            raise ValueError(f"arc {arc!r} names a word that is not there, the tokens have {has}; give arcs of those")
        dependent, governor, relation = at[arc[0]], at[arc[1]], arc[2]
        mark = at.get(arc[0] + 1) if relation in convention.possessive_relations else None
        asks = dependent if mark is None or words.words[mark].strip() not in POSSESSIVE_MARKS else mark
        back = (asks, governor) if convention.dependents_from == "columns" else (governor, dependent)
        for name in (relation, ALL_RELATIONS):
            rows += [(asks, governor, (name, DIRECTIONS[0])), (*back, (name, DIRECTIONS[1]))]
    keys = tuple(dict.fromkeys(key for *_, key in rows))
    number = {key: n for n, key in enumerate(keys)}
    table = [(asks, wanted, number[key]) for asks, wanted, key in rows]
    return DependencyPairs(torch.tensor(table, device=words.word_index.device).T, keys, words)


# --- Dependencies that heads follow --------------------------------------------------------------------

MIN_ARCS = 20  # arcs of a relation, or nothing is said of it
SYNTAX_PREFIX = "syntactic"  # what the names of its measures begin with


class DependencyScores:
    """Arcs that heads find, added up text by text, of the words of one stream: what `measure` takes as `more`.

    A relation is left out where the data have fewer than `least` arcs of it.
    """

    def __init__(self, *, convention: str = "ours", stream: str = "text", min_arcs: int = MIN_ARCS) -> None:
        if convention not in ARC_CONVENTIONS:
            raise ValueError(f"convention={convention!r} is unknown; {suggest(convention, ARC_CONVENTIONS)}")
        self.convention, self.stream, self.least = ARC_CONVENTIONS[convention], stream, min_arcs
        self.kept: list[dict[tuple[str, RelationKey], Array]] = []
        self._words = WordBandMerger(self._add_word_band)
        self._tokens: TokenAnnotations | None = None
        self._arcs: DependencyPairs | None = None
        self._sums: dict[str, Array] = {}
        self._columns: dict[str, tuple[Tensor, Tensor]] = {}

    def start_example(self, example: Example) -> None:
        """A text comes."""
        if self.stream not in example.streams:
            raise ValueError(f"no stream is called {self.stream!r}; {suggest(self.stream, example.streams)}")
        self._tokens, self._arcs = example.streams[self.stream], None
        if example.dependencies:
            self._arcs = make_dependency_pairs(
                example.dependencies, self._words.group_words(self._tokens), self.convention
            )

    def add_band(self, site: str, band: WeightBand) -> None:
        """Add a band of rows."""
        if self._arcs is None or not band.is_self_attention or band.query_tokens is not self._tokens:
            return
        if self.convention.weight_baseline == "alike":
            band = replace(band, w_HTS=torch.cat([band.w_HTS, band.uniform_baseline.w_HTS.to(band.w_HTS.dtype)]))
        self._words.add_band(site, band)

    def _add_word_band(self, site: str, block: WeightBand) -> None:
        """Add a band of words."""
        arcs = self._arcs
        assert arcs is not None
        allowed = block.allowed if block.allowed.dim() == 2 else block.allowed.any(0)
        w_HTS = block.w_HTS.masked_fill((block.key_tokens.word_index < 0) | ~allowed, -1)
        if self.convention.self_reading == "left out":
            w_HTS = w_HTS.masked_fill(
                torch.arange(block.key_tokens.count, device=w_HTS.device) == block.query_positions[:, None], -1
            )
        found = arcs.pairs
        if self.convention.dependents_from == "columns":
            self._update_best_readers(site, w_HTS, block)
            found = arcs.select(DIRECTIONS[:1])
        found = found[:, (found[0] >= block.first_query) & (found[0] < block.first_query + w_HTS.shape[1])]
        asks, wanted = found[0] - block.first_query, found[1]
        if self.convention.counted_arcs == "read":
            found = found[:, allowed[asks, wanted]]
            asks, wanted = found[0] - block.first_query, found[1]
        best = w_HTS == w_HTS.amax(-1, keepdim=True)
        self._add_hits(site, found, best[:, asks, wanted] / best.sum(-1)[:, asks])

    def _update_best_readers(self, site: str, w_HTS: Tensor, block: WeightBand) -> None:
        """Keep of each word who reads it most so far."""
        w_HTS = w_HTS.masked_fill(block.query_tokens.word_index[block.query_positions][:, None] < 0, -1)
        most, by = w_HTS.max(1)
        was, whom = self._columns.get(site, (torch.full_like(most, -1), torch.zeros_like(by)))
        self._columns[site] = torch.maximum(most, was), torch.where(most > was, by + block.first_query, whom)

    def _add_hits(self, site: str, heads_hits: Tensor, hits: Tensor) -> None:
        """Hits of heads and of rivals, and the number of arcs, by relation and direction: [keys, H + rivals + 1]."""
        arcs = self._arcs
        assert arcs is not None
        word = arcs.words.word_index
        asks, wanted = word[heads_hits[0]], word[heads_hits[1]]
        led = asks + torch.tensor(self.convention.baseline_offsets, device=word.device)[:, None]
        if self.convention.out_of_range == "last":
            led = led.clamp(max=int(word.max()))
        each = torch.cat([hits.double(), (led == wanted).double(), torch.ones_like(led[:1], dtype=torch.float64)])
        sums = each.new_zeros(len(arcs.keys), len(each)).index_add_(0, heads_hits[2], each.T.contiguous())
        self._sums[site] = self._sums.get(site, 0) + sums.cpu().numpy()

    def finish_example(self) -> None:
        """A text is over."""
        arcs = self._arcs
        for site, (_, by) in self._columns.items():
            assert arcs is not None
            found = arcs.select(DIRECTIONS[1:])
            self._add_hits(site, found, by[:, found[0]] == found[1])
        keys = arcs.keys if arcs is not None else ()
        told = {(site, key): sums[n] for site, sums in self._sums.items() for n, key in enumerate(keys)}
        self.kept.append(told)
        self._sums, self._columns, self._arcs = {}, {}, None
        self._words.finish_example()

    def measures(self, resamples: Array) -> Mapping[tuple[str, int], Mapping[str, Measure]]:
        """Of each head: how many arcs of each relation it finds; chance is the best of its rivals.

        The interval is that of how much better a head is, set on the rival, so wide that all heads, relations and
        directions together are wrong once in 20 data sets (Bonferroni). So far out there are no draws: it is the normal
        one, with their deviation.
        """
        sums = {
            where: self._stack_counts(where) for where in dict.fromkeys(where for told in self.kept for where in told)
        }
        sums = {where: own for where, own in sums.items() if own[..., -1].sum() >= self.least}
        rivals = self.convention.num_baselines
        tests = sum(own.shape[1] - rivals - 1 for own in sums.values())
        wide = NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / 2 / max(1, tests))
        measures: dict[tuple[str, int], dict[str, Measure]] = {}
        for (site, (relation, towards)), own in sums.items():
            name = f"{SYNTAX_PREFIX} {relation} to {towards}"
            for head, one in enumerate(_relation_measures(own, rivals, resamples, wide)):
                measures.setdefault((site, head), {})[name] = one
        return measures

    def _stack_counts(self, where: tuple[str, RelationKey]) -> Array:
        """The counts of all texts, [texts, H + rivals + 1]."""
        none = np.zeros_like(next(told[where] for told in self.kept if where in told))
        return np.stack([told.get(where, none) for told in self.kept])


def is_relation_measure(measure: str) -> bool:
    """Whether a measure of this name is of one relation.

    >>> (
    ...     is_relation_measure("syntactic nsubj to governor"),
    ...     is_relation_measure("syntactic all to governor"),
    ...     is_relation_measure("sink"),
    ... )
    (True, False, False)
    """
    return measure.startswith(f"{SYNTAX_PREFIX} ") and not measure.startswith(f"{SYNTAX_PREFIX} {ALL_RELATIONS} ")


def _relation_measures(sums: Array, num_baselines: int, draws: Array, confidence: float) -> list[Measure]:
    """What heads find of one relation in one direction."""
    numbers = sums[:, -1:]
    found, drawn = (
        ratio_of_sums(sums[:, :-1], np.broadcast_to(numbers, sums[:, :-1].shape)),
        resampled_ratios(sums[:, :-1], numbers, draws),
    )
    chance = found[-num_baselines:].max()
    better = drawn[:, :-num_baselines] - drawn[:, -num_baselines:].max(1, keepdims=True)
    far = confidence * np.nanstd(better, 0, ddof=1)
    return [
        Measure(float(own), float(own - off), float(own + off), float(chance))
        for own, off in zip(found[:-num_baselines], far, strict=True)
    ]


# --- How much of syntax all heads know together --------------------------------------------------------

MAX_BASELINE_OFFSET = 8  # offsets that the baseline may choose from, each way
MAX_ITERATIONS = 100


@dataclass(frozen=True)
class ProbeOptions:
    """How a probe is learned and asked: this share of texts is held out; `decay` times half the squares is added.

    >>> ProbeOptions(test_fraction=1.5)
    Traceback (most recent call last):
    ValueError: held_out=1.5 is no share of texts; give more than 0 and less than 1
    """

    test_fraction: float = 0.3
    weight_decay: float = 1e-4
    num_resamples: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.test_fraction < 1:
            raise ValueError(f"held_out={self.test_fraction!r} is no share of texts; give more than 0 and less than 1")
        if not self.weight_decay >= 0:
            raise ValueError(f"decay={self.weight_decay!r} is negative; give 0 or more")


class HeadProbeWeight(NamedTuple):
    """What a probe learned of one head: `up`, how much it counts that a governor reads the word, and `down`, that the
    word reads its governor."""

    site: str
    head: int
    up: float
    down: float


@dataclass(frozen=True)
class ProbeResult:
    """How often governors are guessed right in texts held out (UAS): by the model, its twin, and one fixed offset."""

    uas: Measure
    twin: Measure | None
    baseline: Measure
    offset: int
    pulls: tuple[HeadProbeWeight, ...]
    texts: tuple[int, int]
    arcs: tuple[int, int]
    notes: tuple[str, ...] = ()

    @property
    def data(self) -> dict[str, Any]:
        """All of it as plain values; texts and arcs are those learned from and those held out."""
        return {
            "uas": self.uas.data,
            "twin": None if self.twin is None else self.twin.data,
            "baseline": self.baseline.data,
            "offset": self.offset,
            "pulls": [one._asdict() for one in self.pulls],
            "texts": list(self.texts),
            "arcs": list(self.arcs),
            "notes": list(self.notes),
        }


class ProbeSentence(NamedTuple):
    """The maps [heads, words, words] of a text, whose they are (site, head), and its arcs (dependent, governor)."""

    attention_maps: Tensor
    heads: Sequence[tuple[str, int]]
    dependencies: Sequence[tuple[int, int]]

    @property
    def features(self) -> Tensor:
        """For each arc and each word that might govern, what heads say: [arcs, words, 2 heads]."""
        those = [dependent for dependent, _ in self.dependencies]
        up, down = self.attention_maps[:, :, those].permute(2, 1, 0), self.attention_maps[:, those].permute(1, 2, 0)
        return torch.cat([up, down], -1)

    @property
    def is_candidate(self) -> Tensor:
        """Which words might govern, [arcs, words]: no word governs itself."""
        words = torch.arange(self.attention_maps.shape[1])
        return words != torch.tensor([dependent for dependent, _ in self.dependencies])[:, None]


def train_attention_probe(
    model: nn.Module,
    examples: Iterable[Example],
    *,
    random_baseline: nn.Module | None = None,
    options: ProbeOptions = ProbeOptions(),
    progress: Callable[[int], object] = lambda _: None,
) -> ProbeResult:
    """Clark's attention-only probe over the gold arcs of texts: learned on some, asked of those held out.

    `twin` is the same model before it learned anything; what it reaches is what words' places alone say. The other
    baseline is the one offset from a word to its governor that is most often right in the texts that are learned from.
    """
    models = [model] if random_baseline is None else [model, random_baseline]
    sites = [_self_attention_sites(one) for one in models]
    seen: list[list[ProbeSentence]] = [[] for _ in models]
    left_out = 0
    for scene in examples:
        arcs = _word_dependencies(scene)
        if not arcs:
            left_out += 1
            continue
        for one, those, kept in zip(models, sites, seen, strict=True):
            maps = word_attention_maps(one, those, scene)
            names = [(site, head) for site, own in maps.items() for head in range(len(own))]
            kept.append(ProbeSentence(torch.cat(list(maps.values())), names, arcs))
        progress(len(seen[0]))
    learned, held = _split_texts(len(seen[0]), options)
    fits = [_fit_probe([kept[n] for n in learned], options) for kept in seen]
    right = [[_arc_accuracy(kept[n], weight) for n in held] for kept, weight in zip(seen, fits, strict=True)]
    offset = _best_offset([seen[0][n] for n in learned])
    by_offset = [
        [float(governor == dependent + offset) for dependent, governor in seen[0][n].dependencies] for n in held
    ]
    chance = np.concatenate(
        [np.full(len(seen[0][n].dependencies), 1 / (seen[0][n].attention_maps.shape[1] - 1)) for n in held]
    ).mean()
    rates = [_accuracy_measure(one, float(chance), options) for one in (*right, by_offset)]
    notes = (f"{left_out} texts without arcs were left out",) if left_out else ()
    counts = [sum(len(seen[0][n].dependencies) for n in part) for part in (learned, held)]
    return ProbeResult(
        rates[0],
        rates[1] if random_baseline is not None else None,
        rates[-1],
        offset,
        _head_probe_weights(seen[0][0].heads, fits[0]),
        (len(learned), len(held)),
        (counts[0], counts[1]),
        notes,
    )


def word_attention_maps(model: nn.Module, sites: Sequence[SiteModule], example: Example) -> dict[str, Tensor]:
    """How much each word reads each word in every head of these sites, [heads, words, words] of each."""
    tokens, bands = example.streams["text"], dict[str, list[Tensor]]()
    words = WordBandMerger(lambda site, block: bands.setdefault(site, []).append(block.w_HTS.float().cpu()))
    stream_weight_bands(model, sites, example, {one.site.name: ("text", "text") for one in sites}, words.add_band)
    kept = (words.group_words(tokens).tokens.word_index >= 0).cpu()
    return {one.site.name: torch.cat(bands[one.site.name], 1)[:, kept][:, :, kept] for one in sites}


def _self_attention_sites(model: nn.Module) -> list[SiteModule]:
    """The sites at which the text reads itself."""
    if model.training:
        raise ValueError("the model is in train mode, where dropout changes what is read; call model.eval() first")
    two = is_encoder_decoder(model)
    those = [
        one for one in find_attention(model) if one.site.see.can and get_streams(one.site, two) == ("text", "text")
    ]
    if not those:
        raise ValueError(f"{type(model).__name__} has no attention of a text over itself that can be seen")
    return those


def _word_dependencies(scene: Example) -> list[tuple[int, int]]:
    """The arcs between two words, by the places of these in maps."""
    numbers = merge_annotations(scene.streams["text"]).word_index.tolist() if "text" in scene.streams else []
    at = {word: place for place, word in enumerate(number for number in numbers if number >= 0)}
    arcs = [
        (dependent, governor)
        for dependent, governor, _ in scene.dependencies
        if dependent != governor and governor >= 0
    ]
    if wrong := [arc for arc in arcs if not {*arc} <= at.keys()]:
        has = f"the words {min(at)}..{max(at)}" if at else "no words"
        raise ValueError(f"an arc joins words {wrong[0]}, and the tokens have {has}; give arcs of those")
    return [(at[dependent], at[governor]) for dependent, governor in arcs]


def _split_texts(count: int, options: ProbeOptions) -> tuple[list[int], list[int]]:
    """Which texts are learned from, and which are held out."""
    held = round(options.test_fraction * count)
    if held < 2 or count - held < 2:
        raise ValueError(f"{count} texts with arcs leave {held} held out; give at least two to learn from and two more")
    order = np.random.default_rng(options.seed).permutation(count).tolist()
    return sorted(order[held:]), sorted(order[:held])


class ProbeCandidates(NamedTuple):
    """Every word that might govern, of every arc: what heads say of it, which arc it is of, whether it governs."""

    features: Tensor
    arc_index: Tensor
    is_governor: Tensor
    num_arcs: int

    @staticmethod
    def from_sentences(sentences: Sequence[ProbeSentence]) -> ProbeCandidates:
        """Those of some texts, one behind the other."""
        counts = [len(one.dependencies) for one in sentences]
        kept = torch.cat([one.is_candidate.flatten() for one in sentences])
        told = torch.cat([one.features.flatten(0, 1) for one in sentences])[kept]
        gold = torch.cat([_gold_governors(one).flatten() for one in sentences])[kept]
        words = torch.tensor([one.attention_maps.shape[1] for one in sentences]).repeat_interleave(torch.tensor(counts))
        return ProbeCandidates(told, torch.arange(sum(counts)).repeat_interleave(words)[kept], gold, sum(counts))

    def negative_log_likelihood(self, weight: Tensor) -> Tensor:
        """- log p of the gold governor, a mean over arcs."""
        scores, none = self.features @ weight, self.features.new_zeros(self.num_arcs)
        top = (none - torch.inf).scatter_reduce(0, self.arc_index, scores.detach(), "amax")
        total = none.index_add(0, self.arc_index, (scores - top[self.arc_index]).exp())
        return (total.log() + top - none.index_add(0, self.arc_index, scores * self.is_governor)).mean()


def _fit_probe(sentences: Sequence[ProbeSentence], options: ProbeOptions) -> Tensor:
    """[2 heads]: what makes gold governors likeliest, by L-BFGS from nothing."""
    rows = ProbeCandidates.from_sentences(sentences)
    weight = torch.zeros(rows.features.shape[1], requires_grad=True)
    steps = torch.optim.LBFGS([weight], max_iter=MAX_ITERATIONS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        steps.zero_grad()
        told = rows.negative_log_likelihood(weight) + options.weight_decay * weight.square().sum() / 2
        told.backward()
        return told

    with torch.enable_grad():
        steps.step(loss)  # pyright: ignore[reportArgumentType] - its stub wants a float, torch a tensor
    return weight.detach()


def _gold_governors(one: ProbeSentence) -> Tensor:
    governors = torch.tensor([governor for _, governor in one.dependencies])
    return (torch.arange(one.attention_maps.shape[1]) == governors[:, None]).float()


def _arc_accuracy(one: ProbeSentence, weight: Tensor) -> list[float]:
    """For each arc, whether the likeliest word governs."""
    guessed = (one.features @ weight).masked_fill(~one.is_candidate, -torch.inf).argmax(-1).tolist()
    return [float(guess == governor) for guess, (_, governor) in zip(guessed, one.dependencies, strict=True)]


def _best_offset(sentences: Sequence[ProbeSentence]) -> int:
    far = [governor - dependent for one in sentences for dependent, governor in one.dependencies]
    known = [offset for offset in range(-MAX_BASELINE_OFFSET, MAX_BASELINE_OFFSET + 1) if offset]
    return max(known, key=lambda offset: (far.count(offset), -abs(offset), -offset))


def _accuracy_measure(right: Sequence[Sequence[float]], chance: float, options: ProbeOptions) -> Measure:
    """The share that is right, resampled over texts."""
    sums, numbers = (np.array([[float(told(one))] for one in right]) for told in (sum, len))
    draws = draw_resamples(len(right), options.num_resamples, options.seed)
    low, high = confidence_interval(resampled_ratios(sums, numbers, draws))
    return Measure(float(ratio_of_sums(sums, numbers)[0]), float(low[0]), float(high[0]), chance)


def _head_probe_weights(heads: Sequence[tuple[str, int]], weight: Tensor) -> tuple[HeadProbeWeight, ...]:
    up, down = weight.view(2, -1).tolist()
    return tuple(HeadProbeWeight(site, head, *told) for (site, head), *told in zip(heads, up, down, strict=True))
