"""Dependencies that heads follow: how often the word that is read most is the governor, or the dependent, of who asks.

Of each relation and each direction, against the fixed offset that is right most often on the same arcs, or reading all
tokens alike where that is right more often. Counts are kept of every text; weights are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from ..errors import suggest
from .arcs import ALL_RELATIONS, ARC_CONVENTIONS, DIRECTIONS, DependencyPairs, RelationKey, make_dependency_pairs
from .block import WeightBand
from .intervals import CONFIDENCE, Array, ratio_of_sums, resampled_ratios
from .scene import Example, TokenAnnotations
from .table import Measure
from .words import WordBandMerger

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
            self._arcs = make_dependency_pairs(example.dependencies, self._words.group_words(self._tokens), self.convention)

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
            w_HTS = w_HTS.masked_fill(torch.arange(block.key_tokens.count, device=w_HTS.device) == block.query_positions[:, None], -1)
        found = arcs.pairs
        if self.convention.dependents_from == "columns":
            self._update_best_readers(site, w_HTS, block)
            found = arcs.select(DIRECTIONS[:1])
        found = found[:, (found[0] >= block.start) & (found[0] < block.start + w_HTS.shape[1])]
        asks, wanted = found[0] - block.start, found[1]
        if self.convention.counted_arcs == "read":
            found = found[:, allowed[asks, wanted]]
            asks, wanted = found[0] - block.start, found[1]
        best = w_HTS == w_HTS.amax(-1, keepdim=True)
        self._add_hits(site, found, best[:, asks, wanted] / best.sum(-1)[:, asks])

    def _update_best_readers(self, site: str, w_HTS: Tensor, block: WeightBand) -> None:
        """Keep of each word who reads it most so far."""
        w_HTS = w_HTS.masked_fill(block.query_tokens.word_index[block.query_positions][:, None] < 0, -1)
        most, by = w_HTS.max(1)
        was, whom = self._columns.get(site, (torch.full_like(most, -1), torch.zeros_like(by)))
        self._columns[site] = torch.maximum(most, was), torch.where(most > was, by + block.start, whom)

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
        sums = {where: self._stack_counts(where) for where in dict.fromkeys(where for told in self.kept for where in told)}
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

    >>> is_relation_measure("syntactic nsubj to governor"), is_relation_measure("syntactic all to governor"), is_relation_measure("sink")
    (True, False, False)
    """
    return measure.startswith(f"{SYNTAX_PREFIX} ") and not measure.startswith(f"{SYNTAX_PREFIX} {ALL_RELATIONS} ")


def _relation_measures(sums: Array, num_baselines: int, draws: Array, confidence: float) -> list[Measure]:
    """What heads find of one relation in one direction."""
    numbers = sums[:, -1:]
    found, drawn = ratio_of_sums(sums[:, :-1], np.broadcast_to(numbers, sums[:, :-1].shape)), resampled_ratios(sums[:, :-1], numbers, draws)
    chance = found[-num_baselines:].max()
    better = drawn[:, :-num_baselines] - drawn[:, -num_baselines:].max(1, keepdims=True)
    far = confidence * np.nanstd(better, 0, ddof=1)
    return [
        Measure(float(own), float(own - off), float(own + off), float(chance))
        for own, off in zip(found[:-num_baselines], far, strict=True)
    ]
