"""Measures of every head over a data set, in one pass, with intervals and chance levels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn

from ..errors import nearest
from ..hub.finding import able
from ..hub.readable import reads_two, streams_of
from ..hub.routes.base import Found
from .block import Block
from .intervals import Array, interval, mean, means, resampled
from .looking import look
from .published import named
from .scene import Scene
from .statistics import STATISTICS, Statistic
from .table import Head, Measure, Table
from .words import ByWord

RESAMPLES = 1000
OWN, CHANCE = "own", "chance"
Sums = tuple[Array, Array]
UNITS = ("tokens", "words")


class More(Protocol):
    """What else is added up on the way, and made into measures of heads by site and number."""

    def open(self, scene: Scene) -> None:
        """A text comes."""
        ...

    def see(self, site: str, block: Block) -> None:
        """Add a band of rows."""
        ...

    def close(self) -> None:
        """A text is over."""
        ...

    def measures(self, draws: Array) -> Mapping[tuple[str, int], Mapping[str, Measure]]:
        """What was found, with intervals of these draws of texts."""
        ...


class Adding:
    """Sums of every statistic, text by text: little is kept of each."""

    def __init__(self, statistics: Sequence[Statistic]) -> None:
        self.statistics = statistics
        self.kept: dict[tuple[str, str, str], list[Sums]] = {}
        self._open: dict[tuple[str, str, str], Sums] = {}
        self._known: list[tuple[Any, torch.Tensor, dict[str, Sums]]] = []

    def see(self, site: str, block: Block) -> None:
        """Add a band of rows, and the same of a head that reads all it may alike."""
        chances = self._chances(block)
        both = self._sums(block if chances is not None else block.with_chance())
        if chances is None:  # it is the last head
            chances = {name: (sums[-1:], numbers[-1:]) for name, (sums, numbers) in both.items()}
            both = {name: (sums[:-1], numbers[:-1]) for name, (sums, numbers) in both.items()}
            here = (block.start, block.first, block.asks, block.told)
            self._known = [*self._known[-2:], (here, block.allowed, chances)]
        for which, told in ((OWN, both), (CHANCE, chances)):
            for name, one in told.items():
                self._add((site, name, which), one)

    def _sums(self, block: Block) -> dict[str, Sums]:
        left = block.beside_sinks()
        asked = [one for one in self.statistics if block.itself or not one.itself]
        ways = {(one.sums, one.of): None for one in asked}  # several are made of the same sums
        told = {way: _both(way[0](block if way[1] == "all" else left)) for way in ways}
        return {one.name: told[one.sums, one.of] for one in asked}

    def _chances(self, block: Block) -> dict[str, Sums] | None:
        """What chance is here, if it is known: that of the last bands is, for most layers let tokens read the same."""
        here = (block.start, block.first, block.asks, block.told)
        for place, allowed, told in self._known:
            if place == here and allowed.shape == block.allowed.shape and torch.equal(allowed, block.allowed):
                return told
        return None

    def _add(self, key: tuple[str, str, str], told: Sums) -> None:
        was = self._open.get(key)
        self._open[key] = told if was is None else (was[0] + told[0], was[1] + told[1])

    def close(self) -> None:
        """A text is over."""
        for key, told in self._open.items():
            self.kept.setdefault(key, []).append(told)
        self._open, self._known = {}, []


def _both(told: tuple[torch.Tensor, torch.Tensor]) -> Sums:
    sums, numbers = (one.cpu().numpy().astype(np.float64) for one in told)
    return sums, numbers


class Chosen(NamedTuple):
    """What is measured and how: names of statistics, draws of the bootstrap, its seed, and of "tokens" or "words"."""

    statistics: tuple[str, ...] = tuple(STATISTICS)
    resamples: int = RESAMPLES
    seed: int = 0
    units: str = "tokens"


def measure(
    model: nn.Module,
    scenes: Iterable[Scene],
    *,
    chosen: Chosen = Chosen(),  # noqa: B008 - it is frozen
    more: Sequence[More] = (),
    name: str = "",
    tell: Callable[[int], object] = lambda _: None,
) -> Table:
    """What the heads of a model do over texts: a table of measures with intervals and chance levels.

    Every text is run by itself, and no map of weights is kept. `more` is added up on the way: `Syntax`, `Alignment`.
    `tell` hears how many texts were read.
    """
    if chosen.units not in UNITS:
        raise ValueError(f"units={chosen.units!r} are unknown; {nearest(chosen.units, UNITS)}")
    those = able(model, "see")
    streams = {one.site.name: streams_of(one.site, reads_two(model)) for one in those}
    adding = Adding([named(one) for one in chosen.statistics])
    words = ByWord(adding.see)
    sees = [words.see if chosen.units == "words" else adding.see, *(one.see for one in more)]

    def see(site: str, block: Block) -> None:
        for one in sees:
            one(site, block)

    count = 0
    for count, scene in enumerate(scenes, 1):
        for one in more:
            one.open(scene)
        look(model, those, scene, streams, see)
        for one in (adding, words, *more):
            one.close()
        tell(count)
    if count < 2:
        raise ValueError(f"{count} texts leave no interval; give at least two")
    draws = resampled(count, chosen.resamples, chosen.seed)
    also = [one.measures(draws) for one in more]
    heads = [_with(head, also) for one in those for head in _heads(one, adding, draws)]
    return Table(name or type(model).__name__, f"{count} texts", tuple(heads))


def _with(head: Head, also: Sequence[Mapping[tuple[str, int], Mapping[str, Measure]]]) -> Head:
    """The same with measures that were made elsewhere."""
    found = dict(head.measures)
    for told in also:
        found.update(told.get((head.site, head.head), {}))
    return replace(head, measures=found)


def _heads(one: Found, adding: Adding, draws: Array) -> list[Head]:
    site = one.site
    measures = {
        statistic.name: _measures(adding, site.name, statistic, draws)
        for statistic in adding.statistics
        if (site.name, statistic.name, OWN) in adding.kept
    }
    count = len(next(iter(measures.values())))
    each = max(1, count // max(1, site.kv))
    return [
        Head(site.stack, site.kind, site.layer, number, number // each, site.name,
             {name: own[number] for name, own in measures.items()})
        for number in range(count)
    ]  # fmt: skip


def _measures(adding: Adding, site: str, statistic: Statistic, draws: Array) -> list[Measure]:
    """One statistic of every head of a site."""
    sums, numbers = _stacked(adding.kept[site, statistic.name, OWN])
    chance = mean(*_stacked(adding.kept[site, statistic.name, CHANCE]))
    value, found = mean(sums, numbers), means(sums, numbers, draws)
    if statistic.fold is not None:
        value, found, chance = (_folded(statistic, told) for told in (value, found, chance))
    low, high = interval(found)
    rows = zip(value, low, high, strict=True)
    return [Measure(float(own), float(least), float(most), float(chance[0])) for own, least, most in rows]


def _folded(statistic: Statistic, told: Array) -> Array:
    assert statistic.fold is not None
    return statistic.fold(torch.from_numpy(told)).numpy()


def _stacked(told: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    return np.stack([sums for sums, _ in told]), np.stack([numbers for _, numbers in told])
