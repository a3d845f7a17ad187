"""How much of syntax all heads know together: governors of words guessed from weights of attention alone (1906.04341).

The word i that governs word j is guessed by p(i|j) ~ exp(sum over heads k of w_k a^k_ij + u_k a^k_ji), where a^k_ij is
how much word i reads word j in head k: one number for each head and direction is learned, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..hub.finding import find_attention
from ..hub.readable import is_encoder_decoder, get_streams
from ..hub.routes.base import SiteModule
from .intervals import confidence_interval, ratio_of_sums, resampled_ratios, draw_resamples
from .looking import stream_weight_bands
from .scene import Example
from .table import Measure
from .words import WordBandMerger, merge_annotations

MAX_BASELINE_OFFSET = 8  # offsets that the baseline may choose from, each way
MAX_ITERATIONS = 100


@dataclass(frozen=True)
class ProbeOptions:
    """How a probe is learned and asked: this share of texts is held out; `decay` times half the squares is added.

    >>> ProbeOptions(held_out=1.5)
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
            "uas": self.uas.data, "twin": None if self.twin is None else self.twin.data,
            "baseline": self.baseline.data, "offset": self.offset, "pulls": [one._asdict() for one in self.pulls],
            "texts": list(self.texts), "arcs": list(self.arcs), "notes": list(self.notes),
        }  # fmt: skip


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
    by_offset = [[float(governor == dependent + offset) for dependent, governor in seen[0][n].dependencies] for n in held]
    chance = np.concatenate([np.is_full(len(seen[0][n].dependencies), 1 / (seen[0][n].attention_maps.shape[1] - 1)) for n in held]).mean()
    rates = [_accuracy_measure(one, float(chance), options) for one in (*right, by_offset)]
    notes = (f"{left_out} texts without arcs were left out",) if left_out else ()
    counts = [sum(len(seen[0][n].dependencies) for n in part) for part in (learned, held)]
    return ProbeResult(
        rates[0], rates[1] if random_baseline is not None else None, rates[-1], offset, _head_probe_weights(seen[0][0].heads, fits[0]),
        (len(learned), len(held)), (counts[0], counts[1]), notes,
    )  # fmt: skip


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
    those = [one for one in find_attention(model) if one.site.see.can and get_streams(one.site, two) == ("text", "text")]
    if not those:
        raise ValueError(f"{type(model).__name__} has no attention of a text over itself that can be seen")
    return those


def _word_dependencies(scene: Example) -> list[tuple[int, int]]:
    """The arcs between two words, by the places of these in maps."""
    numbers = merge_annotations(scene.streams["text"]).word_index.tolist() if "text" in scene.streams else []
    at = {word: place for place, word in enumerate(number for number in numbers if number >= 0)}
    arcs = [(dependent, governor) for dependent, governor, _ in scene.dependencies if dependent != governor and governor >= 0]
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
