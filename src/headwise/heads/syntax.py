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

from ..errors import nearest
from .arcs import ALL, CONVENTIONS, TOWARDS, Arcs, Key, pairs
from .block import Block
from .intervals import SHARE, Array, mean, means
from .scene import Scene, Tokens
from .table import Measure
from .words import ByWord

LEAST = 20  # arcs of a relation, or nothing is said of it
SIGN = "syntactic"  # what the names of its measures begin with


class Syntax:
    """Arcs that heads find, added up text by text, of the words of one stream: what `measure` takes as `more`.

    A relation is left out where the data have fewer than `least` arcs of it.
    """

    def __init__(self, *, convention: str = "ours", stream: str = "text", least: int = LEAST) -> None:
        if convention not in CONVENTIONS:
            raise ValueError(f"convention={convention!r} is unknown; {nearest(convention, CONVENTIONS)}")
        self.convention, self.stream, self.least = CONVENTIONS[convention], stream, least
        self.kept: list[dict[tuple[str, Key], Array]] = []
        self._words = ByWord(self._see)
        self._tokens: Tokens | None = None
        self._arcs: Arcs | None = None
        self._sums: dict[str, Array] = {}
        self._columns: dict[str, tuple[Tensor, Tensor]] = {}

    def open(self, scene: Scene) -> None:
        """A text comes."""
        if self.stream not in scene.streams:
            raise ValueError(f"no stream is called {self.stream!r}; {nearest(self.stream, scene.streams)}")
        self._tokens, self._arcs = scene.streams[self.stream], None
        if scene.arcs:
            self._arcs = pairs(scene.arcs, self._words.whole(self._tokens), self.convention)

    def see(self, site: str, block: Block) -> None:
        """Add a band of rows."""
        if self._arcs is None or not block.itself or block.asks is not self._tokens:
            return
        if self.convention.weights == "alike":
            block = replace(block, w_HTS=torch.cat([block.w_HTS, block.uniform.w_HTS.to(block.w_HTS.dtype)]))
        self._words.see(site, block)

    def _see(self, site: str, block: Block) -> None:
        """Add a band of words."""
        arcs = self._arcs
        assert arcs is not None
        allowed = block.allowed if block.allowed.dim() == 2 else block.allowed.any(0)
        w_HTS = block.w_HTS.masked_fill((block.told.word < 0) | ~allowed, -1)
        if self.convention.itself == "left out":
            w_HTS = w_HTS.masked_fill(torch.arange(block.told.count, device=w_HTS.device) == block.places[:, None], -1)
        found = arcs.pairs
        if self.convention.back == "columns":
            self._widen(site, w_HTS, block)
            found = arcs.of(TOWARDS[:1])
        found = found[:, (found[0] >= block.start) & (found[0] < block.start + w_HTS.shape[1])]
        asks, wanted = found[0] - block.start, found[1]
        if self.convention.counted == "read":
            found = found[:, allowed[asks, wanted]]
            asks, wanted = found[0] - block.start, found[1]
        best = w_HTS == w_HTS.amax(-1, keepdim=True)
        self._add(site, found, best[:, asks, wanted] / best.sum(-1)[:, asks])

    def _widen(self, site: str, w_HTS: Tensor, block: Block) -> None:
        """Keep of each word who reads it most so far."""
        w_HTS = w_HTS.masked_fill(block.asks.word[block.places][:, None] < 0, -1)
        most, by = w_HTS.max(1)
        was, whom = self._columns.get(site, (torch.full_like(most, -1), torch.zeros_like(by)))
        self._columns[site] = torch.maximum(most, was), torch.where(most > was, by + block.start, whom)

    def _add(self, site: str, found: Tensor, hits: Tensor) -> None:
        """Hits of heads and of rivals, and the number of arcs, by relation and direction: [keys, H + rivals + 1]."""
        arcs = self._arcs
        assert arcs is not None
        word = arcs.words.word
        asks, wanted = word[found[0]], word[found[1]]
        led = asks + torch.tensor(self.convention.offsets, device=word.device)[:, None]
        if self.convention.edge == "last":
            led = led.clamp(max=int(word.max()))
        each = torch.cat([hits.double(), (led == wanted).double(), torch.ones_like(led[:1], dtype=torch.float64)])
        sums = each.new_zeros(len(arcs.keys), len(each)).index_add_(0, found[2], each.T.contiguous())
        self._sums[site] = self._sums.get(site, 0) + sums.cpu().numpy()

    def close(self) -> None:
        """A text is over."""
        arcs = self._arcs
        for site, (_, by) in self._columns.items():
            assert arcs is not None
            found = arcs.of(TOWARDS[1:])
            self._add(site, found, by[:, found[0]] == found[1])
        keys = arcs.keys if arcs is not None else ()
        told = {(site, key): sums[n] for site, sums in self._sums.items() for n, key in enumerate(keys)}
        self.kept.append(told)
        self._sums, self._columns, self._arcs = {}, {}, None
        self._words.close()

    def measures(self, draws: Array) -> Mapping[tuple[str, int], Mapping[str, Measure]]:
        """Of each head: how many arcs of each relation it finds; chance is the best of its rivals.

        The interval is that of how much better a head is, set on the rival, so wide that all heads, relations and
        directions together are wrong once in 20 data sets (Bonferroni). So far out there are no draws: it is the normal
        one, with their deviation.
        """
        sums = {where: self._stacked(where) for where in dict.fromkeys(where for told in self.kept for where in told)}
        sums = {where: own for where, own in sums.items() if own[..., -1].sum() >= self.least}
        rivals = self.convention.rivals
        tests = sum(own.shape[1] - rivals - 1 for own in sums.values())
        wide = NormalDist().inv_cdf(1 - (1 - SHARE) / 2 / max(1, tests))
        measures: dict[tuple[str, int], dict[str, Measure]] = {}
        for (site, (relation, towards)), own in sums.items():
            name = f"{SIGN} {relation} to {towards}"
            for head, one in enumerate(_margins(own, rivals, draws, wide)):
                measures.setdefault((site, head), {})[name] = one
        return measures

    def _stacked(self, where: tuple[str, Key]) -> Array:
        """The counts of all texts, [texts, H + rivals + 1]."""
        none = np.zeros_like(next(told[where] for told in self.kept if where in told))
        return np.stack([told.get(where, none) for told in self.kept])


def follows(measure: str) -> bool:
    """Whether a measure of this name is of one relation.

    >>> follows("syntactic nsubj to governor"), follows("syntactic all to governor"), follows("sink")
    (True, False, False)
    """
    return measure.startswith(f"{SIGN} ") and not measure.startswith(f"{SIGN} {ALL} ")


def _margins(sums: Array, rivals: int, draws: Array, wide: float) -> list[Measure]:
    """What heads find of one relation in one direction."""
    numbers = sums[:, -1:]
    found, drawn = mean(sums[:, :-1], np.broadcast_to(numbers, sums[:, :-1].shape)), means(sums[:, :-1], numbers, draws)
    chance = found[-rivals:].max()
    better = drawn[:, :-rivals] - drawn[:, -rivals:].max(1, keepdims=True)
    far = wide * np.nanstd(better, 0, ddof=1)
    return [
        Measure(float(own), float(own - off), float(own + off), float(chance))
        for own, off in zip(found[:-rivals], far, strict=True)
    ]
