"""Measures of every attention head over a data set in one pass, with confidence intervals and
chance levels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn

from ...attention.attention import Attention
from ...attention.interfaces import Mix
from ...attention.interfaces.core_types import Phase
from ...kernels.triton_support import can_run_triton
from ...util.errors import pluralise
from ..inspect.attention_sites import left_out_notes, require_ability
from ..inspect.hooks import SiteModule
from ..inspect.model_inputs import get_device, get_streams, is_encoder_decoder
from .annotated_examples import Example
from .attention_sinks import DistinctExamples, mark_first_token_sinks
from .head_metrics import HEAD_METRICS, HeadMetric, get_metric, select_largest, select_peak_offset
from .head_table import HeadMeasures, HeadTable, Measure
from .resampling import Array, Jackknife, excess_p_values, ratio_of_sums, stack_texts
from .streamed_statistics import (
    STREAMED_METRICS,
    StatisticsStream,
    read_statistics,
    sum_chance,
    sum_metrics,
)
from .weight_bands import WeightBand, move_annotations, stream_weight_bands

OBSERVED = "own"
CHANCE = "chance"
TextSums = tuple[Array, Array]


class MeasureCollector(Protocol):
    """Collects something else during the pass of `measure_heads` and turns it into measures, keyed
    by site name and head; subclasses need only `add_band`.

    Implemented by `DependencyScores` and `AlignmentScores`.
    """

    def start_example(self, example: Example) -> None:
        """Called before the model runs on an example."""

    def add_band(self, site: str, band: WeightBand) -> None:
        """Called with each band of attention weights of the current example."""

    def finish_example(self) -> None:
        """Called after the model has run on an example."""

    def measures(self) -> Mapping[tuple[str, int], Mapping[str, Measure]]:
        """Return the measures of every head, with intervals over examples."""
        return {}


class MetricSums:
    """Hold sums and counts of every metric per example, for the model and for its chance level.

    `sums_by_example` maps (site, metric, `OBSERVED` or `CHANCE`) to one (sums, counts) pair per
    example.
    """

    def __init__(self, metrics: Sequence[HeadMetric]) -> None:
        self.metrics = metrics
        self.num_examples = 0
        self.sums_by_example: dict[tuple[str, str, str], list[TextSums]] = {}
        self._open: dict[tuple[str, str, str], TextSums] = {}
        self._recent_uniform: list[tuple[Any, torch.Tensor, dict[str, TextSums]]] = []
        self.stream = StatisticsStream()  # calls of the current text that a GPU kernel measures

    def add_band(self, site: str, band: WeightBand) -> None:
        """Add a band of rows, and the same band of a head that reads every allowed key equally (the
        chance level).
        """
        # Most layers share one attention mask, so a recent band may have the same baseline.
        key = (band.first_query, band.first_key, band.query_tokens, band.key_tokens)
        uniform: dict[str, TextSums] | None = None
        for recent_key, allowed, sums in self._recent_uniform:
            is_same = recent_key == key and allowed.shape == band.allowed.shape
            if is_same and torch.equal(allowed, band.allowed):
                uniform = sums
        if uniform is not None:
            observed = self._compute_sums(band)
        else:  # the uniform baseline is the last head
            both = self._compute_sums(band.append_uniform_baseline())
            observed = {name: (sums[:-1], counts[:-1]) for name, (sums, counts) in both.items()}
            uniform = {name: (sums[-1:], counts[-1:]) for name, (sums, counts) in both.items()}
            for metric in self.metrics:
                if metric.compute_chance is not None and metric.name in uniform:
                    uniform[metric.name] = _to_numpy(metric.compute_chance(band.uniform_baseline))
            self._recent_uniform = [*self._recent_uniform[-2:], (key, band.allowed, uniform)]
        for source, sums_by_metric in ((OBSERVED, observed), (CHANCE, uniform)):
            for metric, (sums, counts) in sums_by_metric.items():
                place = (site, metric, source)
                total = self._open.get(place, (0, 0))
                self._open[place] = (total[0] + sums, total[1] + counts)

    def _compute_sums(self, band: WeightBand) -> dict[str, TextSums]:
        bands = {"all": band, "rest": band.without_sinks()}
        computed: dict[Any, TextSums] = {}  # several metrics reduce the same sums
        sums_by_metric: dict[str, TextSums] = {}
        for metric in self.metrics:
            if metric.self_attention_only and not band.is_self_attention:
                continue
            key = (metric.compute_sums, metric.weight_source)
            if key not in computed:
                computed[key] = _to_numpy(metric.compute_sums(bands[metric.weight_source]))
            sums_by_metric[metric.name] = computed[key]
        return sums_by_metric

    def finish_example(self) -> None:
        """Store the sums of the example that just ended."""
        for call, own, uniform in read_statistics(self.stream.calls):
            sources = {OBSERVED: sum_metrics(own), CHANCE: sum_chance(uniform)}
            for metric in self.metrics:
                if call.is_self_attention or not metric.self_attention_only:
                    for source, sums in sources.items():
                        self._open[call.site, metric.name, source] = sums[metric.name]
        self.stream = StatisticsStream()
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
    - `sites`: names of the sites to measure; empty for every observable site.
    - `engine`: runs the examples elsewhere.
    - `min_texts`: fewest different texts; a single one has no intervals and no tests.
    """

    metrics: tuple[str, ...] = tuple(HEAD_METRICS)
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
    num_texts = {site: len(sums) for (site, _, _), sums in metric_sums.sums_by_example.items()}
    missed: dict[str, str] = {}
    heads: list[HeadMeasures] = []
    num_mixed = 0  # layers that mix heads after normalisation, which may make weights negative
    for module in sites:
        name_of_site = module.site.name
        reached = num_texts.get(name_of_site, 0)
        if reached != count:
            missed[name_of_site] = f"{count - reached} of {count} texts do not reach it"
            continue
        heads += _site_heads(module, metric_sums, collected)
        if isinstance(module.module, Attention):
            mixes = module.module.spec.parts_of(Mix)
            num_mixed += any(mix.phase is Phase.WEIGHTS for _, mix in mixes)
    if len(missed) == len(sites):
        first, reason = next(iter(missed.items()))
        raise ValueError(f"cannot measure heads: {first}: {reason}; give inputs that reach it")
    notes = [*distinct.notes, *marked.notes]
    if num_mixed:
        layers = pluralise(len(sites) - len(missed), "layer")
        fact = f"heads are mixed after the softmax in {num_mixed} of {layers}"
        effect = "entropy, confidence, sink and other measures may then leave their usual ranges"
        notes.append(f"{fact}, so that weights may be negative; {effect}")
    notes += [] if options.sites else left_out_notes(model, "observe", missed)
    texts = pluralise(count, "text")
    return HeadTable(name or type(model).__name__, texts, tuple(heads), tuple(notes))


def _select_sites(
    model: nn.Module, options: MeasureOptions
) -> tuple[list[SiteModule], Mapping[str, tuple[str, str]]]:
    """Select the sites to measure; also return the streams of their queries and keys by name."""
    sites = require_ability(model, "observe")
    sites = [one for one in sites if not options.sites or one.site.name in options.sites]
    has_source = is_encoder_decoder(model)
    return sites, {one.site.name: get_streams(one.site, has_source) for one in sites}


def sum_examples(
    model: nn.Module,
    examples: Iterable[Example],
    options: MeasureOptions,
    collectors: Sequence[MeasureCollector] = (),
    progress: Callable[[int], object] = lambda _: None,
) -> MetricSums:
    """Sum every metric over examples with marked first tokens.

    Returns one entry for each example, in their order.
    """
    sites, streams = _select_sites(model, options)
    metric_sums = MetricSums([get_metric(metric) for metric in options.metrics])
    receivers = (metric_sums, *collectors)

    def on_band(site: str, band: WeightBand) -> None:
        for receiver in receivers:
            receiver.add_band(site, band)

    device = get_device(model)
    is_streamed = STREAMED_METRICS.issuperset(options.metrics) and can_run_triton(device)
    moved = (move_annotations(example, device) for example in examples)
    for count, example in enumerate(moved, 1):
        for collector in collectors:
            collector.start_example(example)
        # Other collectors need the weights themselves.
        add_call = metric_sums.stream.add_call if is_streamed and not collectors else None
        stream_weight_bands(model, sites, example, streams, on_band, add_call)
        for receiver in receivers:
            receiver.finish_example()
        progress(count)
    return metric_sums


def _site_heads(
    module: SiteModule,
    metric_sums: MetricSums,
    collected: Sequence[Mapping[tuple[str, int], Mapping[str, Measure]]],
) -> list[HeadMeasures]:
    site = module.site
    by_metric: dict[str, list[Measure]] = {}
    for metric in metric_sums.metrics:
        if (site.name, metric.name, OBSERVED) in metric_sums.sums_by_example:
            by_metric[metric.name] = _metric_measures(metric_sums, site.name, metric)
    num_heads = len(next(iter(by_metric.values())))
    heads_per_kv = max(1, num_heads // max(1, site.kv))
    heads: list[HeadMeasures] = []
    for head in range(num_heads):
        measures = {name: by_head[head] for name, by_head in by_metric.items()}
        for more in collected:
            measures |= more.get((site.name, head), {})
        place = (site.stack, site.kind, site.layer, head, head // heads_per_kv, site.name)
        heads.append(HeadMeasures(*place, measures))
    return heads


def _metric_measures(metric_sums: MetricSums, site: str, metric: HeadMetric) -> list[Measure]:
    """One metric of every head of a site."""
    observed, baseline = (
        stack_texts(metric_sums.sums_by_example[site, metric.name, source])
        for source in (OBSERVED, CHANCE)
    )
    estimate = Jackknife.of_ratio(*observed)
    chance = ratio_of_sums(*baseline)
    rows = observed[1].sum(0)
    reduce = metric.reduce
    if reduce is None:
        p = excess_p_values(observed, baseline)
    else:
        p = np.full(len(rows), np.nan)
        if reduce is select_largest:  # larger than the baseline's; corrected for their number
            largest = np.nan_to_num(estimate.value).argmax(-1)
            sums, counts = (array[:, np.arange(len(rows)), largest] for array in observed)
            best = int(np.nan_to_num(chance)[0].argmax())
            of_best = (baseline[0][:, :, best], baseline[1][:, :, best])
            p = np.minimum(1, excess_p_values((sums, counts), of_best) * estimate.value.shape[1])

        def reduce_means(means: Array) -> Array:
            return reduce(torch.from_numpy(means)).numpy()

        estimate = estimate.map(reduce_means)
        chance = reduce_means(chance)
        rows = rows.max(-1)
    low, high = estimate.interval()
    # Means of sums that are at least 0 in every text are not negative.
    is_positive = (observed[0] >= 0).all(axis=(0, *range(low.ndim + 1, observed[0].ndim)))
    low = np.where(is_positive, np.maximum(low, 0), low)
    if reduce is select_peak_offset:  # the most frequent distance jumps: it has no standard error
        low = np.full_like(low, np.nan)
        high = low
    columns = np.stack([estimate.value, low, high, rows, p], 1).tolist()
    level = float(chance[0])
    return [Measure(value, start, end, level, n, test) for value, start, end, n, test in columns]
