"""Measures of every attention head over a data set in one pass, with confidence intervals and
chance levels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ...attention.attention import Attention
from ...attention.interfaces import Mix
from ...attention.interfaces.core_types import Phase
from ...util.errors import pluralise, suggest
from ..inspect.attention_sites import left_out_notes, require_ability
from ..inspect.hooks import SiteModule
from ..inspect.model_inputs import get_device, get_streams, is_encoder_decoder
from .annotated_examples import Example
from .attention_sinks import mark_first_token_sinks, stack_texts
from .distinct_examples import DistinctExamples
from .head_metrics import HEAD_METRICS, HeadMetric, select_largest, select_peak_offset
from .head_table import HeadMeasures, HeadTable, Measure
from .literature_metrics import get_metric
from .resampling import Array, Jackknife, excess_p_values, ratio_of_sums
from .weight_bands import WeightBand, WordBandMerger, move_annotations, stream_weight_bands

OBSERVED = "own"
CHANCE = "chance"
TextSums = tuple[Array, Array]
TOKEN_UNITS = ("tokens", "words")


class MeasureCollector(Protocol):
    """Collects something else during the pass of `measure_heads` and turns it into measures, keyed
    by site name and head.

    Implemented by `DependencyScores` and `AlignmentScores`.
    """

    def start_example(self, example: Example) -> None:
        """Called before the model runs on an example."""
        ...

    def add_band(self, site: str, band: WeightBand) -> None:
        """Called with each band of attention weights of the current example."""
        ...

    def finish_example(self) -> None:
        """Called after the model has run on an example."""
        ...

    def measures(self) -> Mapping[tuple[str, int], Mapping[str, Measure]]:
        """Return the measures of every head, with intervals over examples."""
        ...


class MetricSums:
    """Sums and counts of every metric, one small array per example, for the model and for its
    chance level.

    `sums_by_example` maps (site, metric, `OBSERVED` or `CHANCE`) to one (sums, counts) pair per
    example.
    """

    def __init__(self, metrics: Sequence[HeadMetric]) -> None:
        self.metrics = metrics
        self.num_examples = 0
        self.sums_by_example: dict[tuple[str, str, str], list[TextSums]] = {}
        self._open: dict[tuple[str, str, str], TextSums] = {}
        self._recent_uniform: list[tuple[Any, torch.Tensor, dict[str, TextSums]]] = []

    def add_band(self, site: str, band: WeightBand) -> None:
        """Add a band of rows, and the same band of a head that reads every allowed key equally (the
        chance level).
        """
        uniform = self._uniform_sums(band)
        observed = self._compute_sums(
            band if uniform is not None else band.append_uniform_baseline()
        )
        if uniform is None:  # the uniform baseline is the last head
            uniform = {
                metric: (sums[-1:], numbers[-1:]) for metric, (sums, numbers) in observed.items()
            }
            observed = {
                metric: (sums[:-1], numbers[:-1]) for metric, (sums, numbers) in observed.items()
            }
            uniform |= self._other_chance_sums(band, uniform)
            key = (band.first_query, band.first_key, band.query_tokens, band.key_tokens)
            self._recent_uniform = [*self._recent_uniform[-2:], (key, band.allowed, uniform)]
        for source, sums_by_metric in ((OBSERVED, observed), (CHANCE, uniform)):
            for metric, sums in sums_by_metric.items():
                self._accumulate((site, metric, source), sums)

    def _compute_sums(self, band: WeightBand) -> dict[str, TextSums]:
        without_sinks = band.without_sinks()
        metrics = [
            metric
            for metric in self.metrics
            if band.is_self_attention or not metric.self_attention_only
        ]
        # Several metrics reduce the same sums, which are computed once.
        keys = {(metric.compute_sums, metric.weight_source): None for metric in metrics}
        sums_by_key = {
            key: _to_numpy(key[0](band if key[1] == "all" else without_sinks)) for key in keys
        }
        return {
            metric.name: sums_by_key[metric.compute_sums, metric.weight_source]
            for metric in metrics
        }

    def _other_chance_sums(
        self, band: WeightBand, measured: Mapping[str, TextSums]
    ) -> dict[str, TextSums]:
        """Sums of the metrics whose chance level is not that of uniform attention."""
        return {
            metric.name: _to_numpy(metric.compute_chance(band.uniform_baseline))
            for metric in self.metrics
            if metric.compute_chance is not None and metric.name in measured
        }

    def _uniform_sums(self, band: WeightBand) -> dict[str, TextSums] | None:
        """Uniform-baseline sums of a recent band with the same allowed pairs, or None.

        Most layers share one attention mask, so the baseline is the same for all of them.
        """
        key = (band.first_query, band.first_key, band.query_tokens, band.key_tokens)
        for recent_key, allowed, sums_by_metric in self._recent_uniform:
            if (
                recent_key == key
                and allowed.shape == band.allowed.shape
                and torch.equal(allowed, band.allowed)
            ):
                return sums_by_metric
        return None

    def _accumulate(self, key: tuple[str, str, str], added: TextSums) -> None:
        total = self._open.get(key)
        self._open[key] = added if total is None else (total[0] + added[0], total[1] + added[1])

    def finish_example(self) -> None:
        """Store the sums of the example that just ended."""
        for key, totals in self._open.items():
            self.sums_by_example.setdefault(key, []).append(totals)
        self._open = {}
        self._recent_uniform = []
        self.num_examples += 1

    def append(
        self, sums_by_example: Mapping[tuple[str, str, str], list[TextSums]], num_examples: int
    ) -> None:
        """Append the sums of further examples, as another process computed them."""
        for key, sums in sums_by_example.items():
            self.sums_by_example.setdefault(key, []).extend(sums)
        self.num_examples += num_examples


def _to_numpy(sums_and_counts: tuple[torch.Tensor, torch.Tensor]) -> TextSums:
    sums, counts = (tensor.cpu().numpy().astype(np.float64) for tensor in sums_and_counts)
    return sums, counts


class ExampleEngine(Protocol):
    """Interface of engines that compute the metrics of examples elsewhere, and return their sums in
    order.
    """

    def __call__(
        self,
        model: nn.Module,
        examples: Iterable[Example],
        options: MeasureOptions,
        progress: Callable[[int], object],
    ) -> MetricSums: ...


class MeasureOptions(NamedTuple):
    """Options of `measure_heads`.

    - `metrics`: names of the metrics.
    - `units`: "tokens" or "words".
    - `sites`: names of the sites to measure; empty for all that can be observed.
    - `engine`: runs the examples elsewhere.
    - `min_texts`: fewest different texts; a single one has no intervals and no tests.
    """

    metrics: tuple[str, ...] = tuple(HEAD_METRICS)
    units: str = "tokens"
    sites: tuple[str, ...] = ()
    engine: ExampleEngine | None = None
    min_texts: int = 2


def measure_heads(
    model: nn.Module,
    examples: Iterable[Example],
    *,
    options: MeasureOptions = MeasureOptions(),  # noqa: B008 - it is frozen
    collectors: Sequence[MeasureCollector] = (),
    name: str = "",
    progress: Callable[[int], object] = lambda _: None,
) -> HeadTable:
    """Measure every head of a model over a data set: a table of measures with confidence intervals
    and chance levels.

    Each example runs alone, and attention weights are streamed in bands, so that memory stays
    bounded. An example that repeats an earlier one is left out. `collectors` add measures of their
    own during the same pass, for example `DependencyScores` or `AlignmentScores`. `progress` is
    called with the number of examples measured so far.
    """
    if options.units not in TOKEN_UNITS:
        raise ValueError(f"unknown units={options.units!r}; {suggest(options.units, TOKEN_UNITS)}")
    if options.engine is not None and collectors:
        raise ValueError(
            "dependencies and alignments are measured in one process; leave the engine out"
        )
    sites, streams = _select_sites(model, options)
    distinct = DistinctExamples(examples)
    marked = mark_first_token_sinks(model, sites, streams, distinct)
    if options.engine is not None:
        metric_sums = options.engine(model, marked.examples, options, progress)
    else:
        metric_sums = sum_examples(model, marked.examples, options, collectors, progress)
    count = metric_sums.num_examples
    distinct.check_min_count(options.min_texts)
    collected = [collector.measures() for collector in collectors]
    missed = _find_missed_sites(sites, metric_sums)
    reached = [site for site in sites if site.site.name not in missed]
    heads = [
        _with_measures(head, collected)
        for site in reached
        for head in _site_heads(site, metric_sums)
    ]
    left_out = [] if options.sites else left_out_notes(model, "observe", missed)
    notes = (*distinct.notes, *marked.notes, *_range_notes(reached), *left_out)
    return HeadTable(name or type(model).__name__, pluralise(count, "text"), tuple(heads), notes)


def _find_missed_sites(sites: Sequence[SiteModule], metric_sums: MetricSums) -> dict[str, str]:
    """Sites that some texts do not reach, with the reason; raises if these are all sites."""
    num_texts = {site: len(sums) for (site, _, _), sums in metric_sums.sums_by_example.items()}
    count = metric_sums.num_examples
    names = [module.site.name for module in sites]
    missed = {
        name: f"{count - num_texts.get(name, 0)} of {count} texts do not reach it"
        for name in names
        if num_texts.get(name, 0) != count
    }
    if len(missed) == len(names):
        raise ValueError(
            f"cannot measure heads: {names[0]}: {missed[names[0]]}; give inputs that reach it"
        )
    return missed


def _range_notes(sites: Sequence[SiteModule]) -> list[str]:
    """A note if heads are mixed after normalisation, which may make weights negative."""
    specs = [module.module.spec for module in sites if isinstance(module.module, Attention)]
    num_mixed = sum(
        any(mix.phase is Phase.WEIGHTS for _, mix in spec.parts_of(Mix)) for spec in specs
    )
    if not num_mixed:
        return []
    layers = pluralise(len(sites), "layer")
    fact = (
        f"heads are mixed after the softmax in {num_mixed} of {layers}, so that weights may be "
        "negative"
    )
    return [
        f"{fact}; entropy, confidence, sink and other measures may then leave their usual ranges"
    ]


def _select_sites(
    model: nn.Module, options: MeasureOptions
) -> tuple[list[SiteModule], Mapping[str, tuple[str, str]]]:
    """The sites to measure, and the streams of their queries and keys by site name."""
    sites = [
        site
        for site in require_ability(model, "observe")
        if not options.sites or site.site.name in options.sites
    ]
    return sites, {
        site.site.name: get_streams(site.site, is_encoder_decoder(model)) for site in sites
    }


def sum_examples(
    model: nn.Module,
    examples: Iterable[Example],
    options: MeasureOptions,
    collectors: Sequence[MeasureCollector] = (),
    progress: Callable[[int], object] = lambda _: None,
) -> MetricSums:
    """Sums of every metric over examples whose first tokens are marked, one entry for each example,
    in their order.
    """
    sites, streams = _select_sites(model, options)
    metric_sums = MetricSums([get_metric(metric) for metric in options.metrics])
    words = WordBandMerger(metric_sums.add_band)
    own_callback = words.add_band if options.units == "words" else metric_sums.add_band
    callbacks = [own_callback, *(collector.add_band for collector in collectors)]

    def on_band(site: str, band: WeightBand) -> None:
        for callback in callbacks:
            callback(site, band)

    device = get_device(model)
    moved = (move_annotations(example, device) for example in examples)
    for count, example in enumerate(moved, 1):
        for collector in collectors:
            collector.start_example(example)
        stream_weight_bands(model, sites, example, streams, on_band)
        for receiver in (metric_sums, words, *collectors):
            receiver.finish_example()
        progress(count)
    return metric_sums


def _with_measures(
    head: HeadMeasures, collected: Sequence[Mapping[tuple[str, int], Mapping[str, Measure]]]
) -> HeadMeasures:
    measures = dict(head.measures)
    for measures_by_head in collected:
        measures.update(measures_by_head.get((head.site, head.head), {}))
    return replace(head, measures=measures)


def _site_heads(module: SiteModule, metric_sums: MetricSums) -> list[HeadMeasures]:
    site = module.site
    measures = {
        metric.name: _metric_measures(metric_sums, site.name, metric)
        for metric in metric_sums.metrics
        if (site.name, metric.name, OBSERVED) in metric_sums.sums_by_example
    }
    num_heads = len(next(iter(measures.values())))
    heads_per_kv = max(1, num_heads // max(1, site.kv))
    return [
        HeadMeasures(
            site.stack,
            site.kind,
            site.layer,
            head,
            head // heads_per_kv,
            site.name,
            {name: by_head[head] for name, by_head in measures.items()},
        )
        for head in range(num_heads)
    ]


def _metric_measures(metric_sums: MetricSums, site: str, metric: HeadMetric) -> list[Measure]:
    """One metric of every head of a site."""
    observed, baseline = (
        stack_texts(metric_sums.sums_by_example[site, metric.name, source])
        for source in (OBSERVED, CHANCE)
    )
    estimate = Jackknife.of_ratio(*observed)
    chance = ratio_of_sums(*baseline)
    p = _excess_p_values(metric, observed, baseline)
    rows = observed[1].sum(0)
    if metric.reduce is not None:
        estimate = estimate.map(partial(_reduce_mean, metric))
        chance = _reduce_mean(metric, chance)
        rows = rows.max(-1)
    low, high = estimate.interval()
    low = np.where(_is_nonnegative(observed[0], low.ndim), np.maximum(low, 0), low)
    if (
        metric.reduce is select_peak_offset
    ):  # the most frequent distance jumps, so that it has no standard error
        low = np.full_like(low, np.nan)
        high = np.full_like(high, np.nan)
    columns = (array.tolist() for array in (estimate.value, low, high, rows, p))
    return [
        Measure(mean, start, stop, float(chance[0]), num_rows, p_value)
        for mean, start, stop, num_rows, p_value in zip(*columns, strict=True)
    ]


def _is_nonnegative(sums: Array, num_axes: int) -> NDArray[np.bool_]:
    """True for heads whose sums are at least 0 in every text, so that their means are."""
    return np.asarray((sums >= 0).all(axis=(0, *range(num_axes + 1, sums.ndim))))


def _excess_p_values(metric: HeadMetric, observed: TextSums, baseline: TextSums) -> Array:
    """P-values that the heads exceed chance, [H]; NaN for a metric without a test.

    The largest of several means is tested against the largest of the baseline, corrected for their
    number.
    """
    if metric.reduce is None:
        return excess_p_values(observed, baseline)
    num_heads, num_means = observed[0].shape[1:]
    if metric.reduce is not select_largest:
        return np.full(num_heads, np.nan)
    largest = np.nan_to_num(ratio_of_sums(*observed)).argmax(-1)
    columns = [array[:, np.arange(num_heads), largest] for array in observed]
    best = int(np.nan_to_num(ratio_of_sums(*baseline))[0].argmax())
    p = excess_p_values(
        (columns[0], columns[1]), (baseline[0][:, :, best], baseline[1][:, :, best])
    )
    return np.minimum(1, p * num_means)


def _reduce_mean(metric: HeadMetric, mean: Array) -> Array:
    assert metric.reduce is not None
    return metric.reduce(torch.from_numpy(mean)).numpy()
