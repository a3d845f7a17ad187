"""Measures of every head over a data set, in one pass, with intervals and chance levels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn

from ..errors import suggest
from ..inspect.attention_sites import require_ability
from ..inspect.hooks import SiteModule
from ..inspect.model_inputs import get_streams, is_encoder_decoder
from .annotated_examples import Example
from .head_metrics import HEAD_METRICS, HeadMetric
from .head_table import HeadMeasures, HeadTable, Measure
from .literature_metrics import get_metric
from .resampling import Array, confidence_interval, draw_resamples, ratio_of_sums, resampled_ratios
from .weight_bands import WeightBand, WordBandMerger, stream_weight_bands

NUM_RESAMPLES = 1000
OBSERVED, UNIFORM = "own", "chance"
TextSums = tuple[Array, Array]
TOKEN_UNITS = ("tokens", "words")


class MeasureCollector(Protocol):
    """What else is added up on the way, and made into measures of heads by site and number."""

    def start_example(self, example: Example) -> None:
        """A text comes."""
        ...

    def add_band(self, site: str, band: WeightBand) -> None:
        """Add a band of rows."""
        ...

    def finish_example(self) -> None:
        """A text is over."""
        ...

    def measures(self, resamples: Array) -> Mapping[tuple[str, int], Mapping[str, Measure]]:
        """What was found, with intervals of these draws of texts."""
        ...


class MetricSums:
    """Sums of every statistic, text by text: little is kept of each."""

    def __init__(self, metrics: Sequence[HeadMetric]) -> None:
        self.statistics = metrics
        self.kept: dict[tuple[str, str, str], list[TextSums]] = {}
        self._open: dict[tuple[str, str, str], TextSums] = {}
        self._known: list[tuple[Any, torch.Tensor, dict[str, TextSums]]] = []

    def add_band(self, site: str, band: WeightBand) -> None:
        """Add a band of rows, and the same of a head that reads all it may alike."""
        chances = self._uniform_sums(band)
        both = self._compute_sums(band if chances is not None else band.append_uniform_baseline())
        if chances is None:  # it is the last head
            chances = {name: (sums[-1:], numbers[-1:]) for name, (sums, numbers) in both.items()}
            both = {name: (sums[:-1], numbers[:-1]) for name, (sums, numbers) in both.items()}
            here = (band.first_query, band.first_key, band.query_tokens, band.key_tokens)
            self._known = [*self._known[-2:], (here, band.allowed, chances)]
        for which, told in ((OBSERVED, both), (UNIFORM, chances)):
            for name, one in told.items():
                self._accumulate((site, name, which), one)

    def _compute_sums(self, block: WeightBand) -> dict[str, TextSums]:
        left = block.without_sinks()
        asked = [one for one in self.statistics if block.is_self_attention or not one.self_attention_only]
        ways = {(one.compute_sums, one.weight_source): None for one in asked}  # several are made of the same sums
        told = {way: _to_numpy(way[0](block if way[1] == "all" else left)) for way in ways}
        return {one.name: told[one.compute_sums, one.weight_source] for one in asked}

    def _uniform_sums(self, block: WeightBand) -> dict[str, TextSums] | None:
        """What chance is here, if it is known: that of the last bands is, for most layers let tokens read the same."""
        here = (block.first_query, block.first_key, block.query_tokens, block.key_tokens)
        for place, allowed, told in self._known:
            if place == here and allowed.shape == block.allowed.shape and torch.equal(allowed, block.allowed):
                return told
        return None

    def _accumulate(self, key: tuple[str, str, str], told: TextSums) -> None:
        was = self._open.get(key)
        self._open[key] = told if was is None else (was[0] + told[0], was[1] + told[1])

    def finish_example(self) -> None:
        """A text is over."""
        for key, told in self._open.items():
            self.kept.setdefault(key, []).append(told)
        self._open, self._known = {}, []


def _to_numpy(told: tuple[torch.Tensor, torch.Tensor]) -> TextSums:
    sums, numbers = (one.cpu().numpy().astype(np.float64) for one in told)
    return sums, numbers


class MeasureOptions(NamedTuple):
    """What is measured and how: names of statistics, draws of the bootstrap, its seed, and of "tokens" or "words"."""

    metrics: tuple[str, ...] = tuple(HEAD_METRICS)
    num_resamples: int = NUM_RESAMPLES
    seed: int = 0
    units: str = "tokens"


def measure_heads(
    model: nn.Module,
    examples: Iterable[Example],
    *,
    options: MeasureOptions = MeasureOptions(),  # noqa: B008 - it is frozen
    collectors: Sequence[MeasureCollector] = (),
    name: str = "",
    progress: Callable[[int], object] = lambda _: None,
) -> HeadTable:
    """What the heads of a model do over texts: a table of measures with intervals and chance levels.

    Every text is run by itself, and no map of weights is kept. `more` is added up on the way: `Syntax`, `Alignment`.
    `tell` hears how many texts were read.
    """
    if options.units not in TOKEN_UNITS:
        raise ValueError(f"units={options.units!r} are unknown; {suggest(options.units, TOKEN_UNITS)}")
    those = require_ability(model, "see")
    streams = {one.site.name: get_streams(one.site, is_encoder_decoder(model)) for one in those}
    adding = MetricSums([get_metric(one) for one in options.metrics])
    words = WordBandMerger(adding.add_band)
    sees = [words.add_band if options.units == "words" else adding.add_band, *(one.add_band for one in collectors)]

    def see(site: str, block: WeightBand) -> None:
        for one in sees:
            one(site, block)

    count = 0
    for count, scene in enumerate(examples, 1):
        for one in collectors:
            one.start_example(scene)
        stream_weight_bands(model, those, scene, streams, see)
        for one in (adding, words, *collectors):
            one.finish_example()
        progress(count)
    if count < 2:
        raise ValueError(f"{count} texts leave no interval; give at least two")
    draws = draw_resamples(count, options.num_resamples, options.seed)
    also = [one.measures(draws) for one in collectors]
    heads = [_with_measures(head, also) for one in those for head in _site_heads(one, adding, draws)]
    return HeadTable(name or type(model).__name__, f"{count} texts", tuple(heads))


def _with_measures(head: HeadMeasures, also: Sequence[Mapping[tuple[str, int], Mapping[str, Measure]]]) -> HeadMeasures:
    """The same with measures that were made elsewhere."""
    found = dict(head.measures)
    for told in also:
        found.update(told.get((head.site, head.head), {}))
    return replace(head, measures=found)


def _site_heads(one: SiteModule, adding: MetricSums, draws: Array) -> list[HeadMeasures]:
    site = one.site
    measures = {
        statistic.name: _metric_measures(adding, site.name, statistic, draws)
        for statistic in adding.statistics
        if (site.name, statistic.name, OBSERVED) in adding.kept
    }
    count = len(next(iter(measures.values())))
    each = max(1, count // max(1, site.kv))
    return [
        HeadMeasures(
            site.stack,
            site.kind,
            site.layer,
            number,
            number // each,
            site.name,
            {name: own[number] for name, own in measures.items()},
        )
        for number in range(count)
    ]


def _metric_measures(adding: MetricSums, site: str, statistic: HeadMetric, draws: Array) -> list[Measure]:
    """One statistic of every head of a site."""
    sums, numbers = _stack_texts(adding.kept[site, statistic.name, OBSERVED])
    chance = ratio_of_sums(*_stack_texts(adding.kept[site, statistic.name, UNIFORM]))
    value, found = ratio_of_sums(sums, numbers), resampled_ratios(sums, numbers, draws)
    if statistic.reduce is not None:
        value, found, chance = (_reduce_mean(statistic, told) for told in (value, found, chance))
    low, high = confidence_interval(found)
    rows = zip(value, low, high, strict=True)
    return [Measure(float(own), float(least), float(most), float(chance[0])) for own, least, most in rows]


def _reduce_mean(statistic: HeadMetric, told: Array) -> Array:
    assert statistic.reduce is not None
    return statistic.reduce(torch.from_numpy(told)).numpy()


def _stack_texts(told: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    return np.stack([sums for sums, _ in told]), np.stack([numbers for _, numbers in told])
