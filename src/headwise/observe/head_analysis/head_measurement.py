"""Measures of every attention head over a data set in one pass, with confidence intervals and
chance levels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import chain, islice
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
from ..inspect.site import Site
from ..traces import AttentionRecord, Trace
from .annotated_examples import Example, ExampleReader, TokenAnnotations
from .attention_sinks import (
    MAX_SINK_TEXTS,
    DistinctExamples,
    find_sink_streams,
    mark_first_token_sinks,
    rate_first_tokens,
    streams_of_words,
)
from .head_metrics import (
    HEAD_METRICS,
    WORD_METRICS,
    HeadMetric,
    SumAndCount,
    first_token_choice_sums,
    get_metric,
    select_largest,
    select_peak_offset,
)
from .head_table import HeadMeasures, HeadTable, Measure, rows_of_heads
from .resampling import Array, Jackknife, excess_p_values, ratio_of_sums, stack_texts
from .streamed_statistics import (
    STREAMED_METRICS,
    StatisticsStream,
    read_arrays,
    read_statistics,
    sum_metrics,
)
from .weight_bands import (
    BatchMismatch,
    WeightBand,
    annotate_trace,
    join_heads,
    stream_trace,
    stream_weight_bands,
)

OBSERVED = "own"
CHANCE = "chance"
WITH_FIRST_TOKEN_SINK = ("own, first token a sink", "chance, first token a sink")
FIRST_TOKEN = "first token with a choice"
# Small layers with one mask are measured together: fewer, larger operations.
MIN_JOINED_CELLS = 2**18
# Texts that may run together; a divisor of the texts in a shard of an engine, whose numbers are
# those of one process bit for bit.
MAX_BATCH_TEXTS = 4
MAX_BATCH_TOKENS = 512  # more tokens make no better use of weights that are read once
MAX_CHANCE_PAIRS = 2**22  # of longer texts, a chance level costs little beside the heads
TextSums = tuple[Array, Array]
SumsOfText = dict[tuple[str, str, str], TextSums]


class MeasureCollector(Protocol):
    """Collects something else during the pass of `measure_heads`, and turns it into measures by
    site name and head: `DependencyScores`, `AlignmentScores`. Subclasses need only `add_band`.
    With `needs_sinks`, first tokens that are sinks are annotated before the pass.
    """

    needs_sinks: bool = False

    def start_example(self, example: Example) -> None:
        """Called before the model runs on an example."""

    def add_band(self, site: str, band: WeightBand) -> None:
        """Called with each band of attention weights of the current example."""

    def finish_example(self) -> None:
        """Called after the model has run on an example."""

    def measures(self) -> Mapping[tuple[str, int], Mapping[str, Measure]]:
        """Return the measures of every head, with intervals over examples."""
        return {}

    def merge(self, later: Any) -> None:
        """Add what a collector of the same kind has of later examples."""
        raise ValueError(f"{type(self).__name__} runs in one process; leave the engine out")


class Measured(NamedTuple):
    """Sums of one source over bands of several sites, and the heads of each site among them.

    `text` is the index of the text in its batch. `values` are the sums and counts of every metric
    side by side, [H, N]; `shapes` are their shapes without the axis of heads.
    """

    text: int
    source: str
    heads_by_site: Sequence[tuple[str, slice]]
    values: torch.Tensor
    shapes: Mapping[str, torch.Size]


class MetricSums:
    """Hold sums and counts of every metric per example, for the model and for its chance level.

    `sums_by_example` maps (site, metric, source) to one (sums, counts) pair per example. A source
    is `OBSERVED` or `CHANCE`, and for metrics that depend on sinks also one of
    `WITH_FIRST_TOKEN_SINK`: whether the first token is a sink is only known after the pass.
    """

    def __init__(self, metrics: Sequence[HeadMetric]) -> None:
        self.metrics = metrics
        self.num_examples = 0
        self.sums_by_example: dict[tuple[str, str, str], list[TextSums]] = {}
        self._measured: list[Measured] = []
        # Bands with one mask, which are measured together, and chance levels of masks, by place.
        self._waiting: dict[tuple[object, ...], list[tuple[str, WeightBand]]] = {}
        self._chances: dict[tuple[object, ...], list[tuple[WeightBand, list[Measured]]]] = {}
        self._tokens_with_sink: dict[TokenAnnotations, TokenAnnotations] = {}
        self.stream = StatisticsStream()  # calls of the current text that a GPU kernel measures

    def add_band(self, site: str, band: WeightBand) -> None:
        """Add a band of rows, and the same band of a head that reads every allowed key equally (the
        chance level).
        """
        place = (band.text, band.first_query, band.first_key, band.w_HTS.shape[1:])
        waiting = self._waiting.setdefault(place, [])
        if waiting and not band.has_same_mask(waiting[0][1]):
            self._measure_waiting(place)
            waiting = self._waiting.setdefault(place, [])
        waiting.append((site, band))
        if sum(other.w_HTS.numel() for _, other in waiting) >= MIN_JOINED_CELLS:
            self._measure_waiting(place)

    def _measure_waiting(self, place: tuple[object, ...]) -> None:
        waiting = self._waiting.pop(place)
        heads_by_site: list[tuple[str, slice]] = []
        end = 0
        for site, band in waiting:
            heads_by_site.append((site, slice(end, end + len(band.w_HTS))))
            end += len(band.w_HTS)
        band = join_heads([band for _, band in waiting])
        self._measured += self._measure(heads_by_site, band, is_chance=False)
        recent = self._chances.setdefault(place, [])
        uniform = band.uniform_baseline
        chances = [measured for other, measured in recent if uniform.has_same_mask(other)]
        if not chances:
            chances = [self._measure([], uniform, is_chance=True)]
            is_short = band.query_tokens.count * band.key_tokens.count <= MAX_CHANCE_PAIRS
            without_weights = replace(
                uniform, w_HTS=uniform.w_HTS.new_empty(0, *uniform.w_HTS.shape[1:])
            )
            self._chances[place] = [*recent[-2:], (without_weights, chances[0])] * is_short
        every_head = [(site, slice(None)) for site, _ in heads_by_site]
        self._measured += [one._replace(heads_by_site=every_head) for one in chances[0]]

    def _measure(
        self, heads_by_site: Sequence[tuple[str, slice]], band: WeightBand, is_chance: bool
    ) -> list[Measured]:
        """Sum every metric over a band, and those that depend on sinks with the first token as a
        sink too.
        """
        needs_rest = any(metric.weight_source == "rest" for metric in self.metrics)
        rest = band.without_sinks() if needs_rest else band
        sums = self._compute_sums(band, rest, self.metrics, is_chance)
        sums[FIRST_TOKEN] = first_token_choice_sums(band)
        marked: dict[str, SumAndCount] = {}
        on_sinks = [metric for metric in self.metrics if metric.weight_source != "all"]
        band_with_sink = self._add_first_token_sink(band)
        if band_with_sink is None:
            marked = {metric.name: sums[metric.name] for metric in on_sinks if metric.name in sums}
        else:
            rest = band_with_sink.without_sinks(rest.w_HTS) if needs_rest else band_with_sink
            marked = self._compute_sums(band_with_sink, rest, on_sinks, is_chance)
        sources = (CHANCE if is_chance else OBSERVED, WITH_FIRST_TOKEN_SINK[is_chance])
        return [
            Measured(band.text, source, heads_by_site, *_join_metrics(by_metric))
            for source, by_metric in zip(sources, (sums, marked), strict=True)
            if by_metric
        ]

    def _compute_sums(
        self, band: WeightBand, rest: WeightBand, metrics: Sequence[HeadMetric], is_chance: bool
    ) -> dict[str, SumAndCount]:
        computed: dict[Any, SumAndCount] = {}  # several metrics reduce the same sums
        sums_by_metric: dict[str, SumAndCount] = {}
        for metric in metrics:
            is_missing = metric.self_attention_only and not band.is_self_attention
            if is_missing or (metric.name in WORD_METRICS and not band.key_tokens.has_words):
                continue
            compute = (is_chance and metric.compute_chance) or metric.compute_sums
            key = (compute, metric.weight_source)
            if key not in computed:
                computed[key] = compute(rest if metric.weight_source == "rest" else band)
            sums_by_metric[metric.name] = computed[key]
        return sums_by_metric

    def _add_first_token_sink(self, band: WeightBand) -> WeightBand | None:
        """The band with its first token as a sink; None if it is one anyway."""
        keys = band.key_tokens
        if keys not in self._tokens_with_sink:
            is_sink = bool(keys.is_sink[:1].all())
            self._tokens_with_sink[keys] = keys if is_sink else replace(keys, first_is_sink=True)
        marked = self._tokens_with_sink[keys]
        if marked is keys:
            return None
        queries = marked if band.is_self_attention else band.query_tokens
        return replace(band, query_tokens=queries, key_tokens=marked)

    def finish_example(self) -> None:
        """Store the sums of an example that ran alone."""
        self.append_texts(self.finish_batch(1))

    def finish_batch(self, count: int) -> list[SumsOfText]:
        """Read the sums of the `count` texts that just ended from their device, at once."""
        for place in [*self._waiting]:
            self._measure_waiting(place)
        arrays = read_arrays([one.values for one in self._measured])
        values: dict[tuple[int, str, str], Array] = {}
        shapes: dict[tuple[int, str, str], Mapping[str, torch.Size]] = {}
        for one, array in zip(self._measured, arrays, strict=True):
            for site, heads in one.heads_by_site:
                key = (one.text, site, one.source)
                values[key] = values.get(key, 0) + array[heads]
                shapes[key] = one.shapes
        texts: list[SumsOfText] = [{} for _ in range(count)]
        for (text, site, source), array in values.items():
            end = 0
            for metric, shape in shapes[text, site, source].items():
                start = end
                end += 2 * shape.numel()
                pair = array[:, start:end].reshape(len(array), 2, *shape)
                texts[text][site, metric, source] = (pair[:, 0], pair[:, 1])
        for call, own, uniform in read_statistics(self.stream.calls):
            means = dict(sum_metrics(uniform))
            means["breadth"] = (uniform[:, -1], means["breadth"][1])
            streamed = {OBSERVED: sum_metrics(own), CHANCE: means}
            for metric in self.metrics:
                if call.is_self_attention or not metric.self_attention_only:
                    for source, sums_of_call in streamed.items():
                        texts[0][call.site, metric.name, source] = sums_of_call[metric.name]
        self.drop_batch()
        return texts

    def drop_batch(self) -> None:
        """Drop what was measured since the last batch ended."""
        self.stream = StatisticsStream()
        self._waiting = {}
        self._measured = []
        self._chances = {}
        self._tokens_with_sink = {}

    def append_texts(self, texts: Iterable[SumsOfText]) -> None:
        """Append the sums of further examples."""
        for totals in texts:
            for key, total in totals.items():
                self.sums_by_example.setdefault(key, []).append(total)
            self.num_examples += 1

    def append(
        self, sums_by_example: Mapping[tuple[str, str, str], list[TextSums]], num_examples: int
    ) -> None:
        """Append the sums of further examples, as another process computed them."""
        for key, sums in sums_by_example.items():
            self.sums_by_example.setdefault(key, []).extend(sums)
        self.num_examples += num_examples

    def find_sink_streams(
        self, stream_of_site: Mapping[str, str]
    ) -> tuple[set[str], tuple[str, ...]]:
        """Find the streams whose first token is a sink, from the first texts."""
        if not stream_of_site:
            return set(), ()
        sums: dict[str, Array] = {}
        for site in stream_of_site:
            by_text = self.sums_by_example.get((site, FIRST_TOKEN, OBSERVED), [])
            if by_text:
                sums[site] = np.stack([np.stack(text) for text in by_text[:MAX_SINK_TEXTS]])
        return find_sink_streams(stream_of_site, rate_first_tokens(sums))


def _join_metrics(sums: Mapping[str, SumAndCount]) -> tuple[torch.Tensor, Mapping[str, torch.Size]]:
    """Join the sums and counts of all metrics, [H, N]; also return their shapes without heads."""
    parts = [part.flatten(1) if part.dim() > 1 else part[:, None] for part in chain(*sums.values())]
    return torch.cat(parts, 1).double(), {
        metric: pair[0].shape[1:] for metric, pair in sums.items()
    }


class ExampleEngine(Protocol):
    """Interface of engines that compute the metrics of examples elsewhere, and return their sums in
    order. Collectors get what was collected elsewhere by `merge`.
    """

    def __call__(
        self,
        model: nn.Module,
        examples: Iterable[Example],
        options: MeasureOptions,
        progress: Callable[[int], object],
        collectors: Sequence[MeasureCollector],
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

    Short texts of equal length run as one batch, and attention weights are streamed in bands, so
    that memory stays bounded. An example that repeats an earlier one is left out. `collectors` add
    measures of their own during the same pass, for example `DependencyScores` or
    `AlignmentScores`. `progress` is called with the number of examples measured so far.
    """
    sites, streams = select_sites(model, options.sites)
    distinct = DistinctExamples(examples)
    sample: list[Example] = []  # the texts that tell if their first token is a sink

    def read_examples() -> Iterator[Example]:
        for example in distinct:
            if len(sample) < MAX_SINK_TEXTS:
                sample.append(example)
            yield example

    examples = read_examples()
    sink_streams: set[str] = set()
    sink_notes: tuple[str, ...] = ()
    is_marked = _is_streamed(model, options, collectors)  # the kernel must know the sinks
    is_marked |= any(collector.needs_sinks for collector in collectors)
    if is_marked:
        examples, sink_notes = mark_first_token_sinks(model, sites, streams, examples)
    if options.engine is not None:
        metric_sums = options.engine(model, examples, options, progress, collectors)
    else:
        metric_sums = sum_examples(model, examples, options, collectors, progress)
    count = metric_sums.num_examples
    distinct.check_min_count(options.min_texts)
    if not is_marked:
        word_streams = streams_of_words(sample, streams)
        sink_streams, sink_notes = metric_sums.find_sink_streams(word_streams)
    collected = [collector.measures() for collector in collectors]
    num_texts = {site: len(sums) for (site, _, _), sums in metric_sums.sums_by_example.items()}
    missed: dict[str, str] = {}
    measured: list[SiteModule] = []
    num_mixed = 0  # layers that mix heads after normalisation, which may make weights negative
    for module in sites:
        name_of_site = module.site.name
        reached = num_texts.get(name_of_site, 0)
        if reached != count:
            missed[name_of_site] = f"{count - reached} of {count} texts do not reach it"
            continue
        measured.append(module)
        if isinstance(module.module, Attention):
            mixes = module.module.spec.parts_of(Mix)
            num_mixed += any(mix.phase is Phase.WEIGHTS for _, mix in mixes)
    if len(missed) == len(sites):
        first, reason = next(iter(missed.items()))
        raise ValueError(f"cannot measure heads: {first}: {reason}; give inputs that reach it")
    notes = [*distinct.notes, *sink_notes]
    if num_mixed:
        layers = pluralise(len(sites) - len(missed), "layer")
        fact = f"heads are mixed after the softmax in {num_mixed} of {layers}"
        effect = "entropy, confidence, sink and other measures may then leave their usual ranges"
        notes.append(f"{fact}, so that weights may be negative; {effect}")
    notes += [] if options.sites else left_out_notes(model, "observe", missed)
    with_sink = {site for site, (_, stream) in streams.items() if stream in sink_streams}
    heads = _measure_sites([one.site for one in measured], metric_sums, with_sink, collected)
    texts = pluralise(count, "text")
    return HeadTable(name or type(model).__name__, texts, tuple(heads), tuple(notes))


def measure_trace(trace: Trace, metrics: Sequence[str] = tuple(HEAD_METRICS)) -> HeadTable:
    """Measure every head of a recorded run by its weights; every row of its batch is a text."""
    reader = ExampleReader(nn.Identity())
    count = trace.layers[0].batch_size
    reader.examples += [annotate_trace(trace, row) for row in range(count)]
    examples = reader.examples_with_frequencies()
    metric_sums = MetricSums([get_metric(metric) for metric in metrics])
    for row, example in enumerate(examples):
        stream_trace(trace, row, example, metric_sums.add_band)
        metric_sums.finish_example()
    streams = {one.name: (one.query_stream, one.key_stream) for one in trace.layers}
    sinks, notes = metric_sums.find_sink_streams(streams_of_words(examples, streams))
    with_sink = {site for site, (_, stream) in streams.items() if stream in sinks}
    heads = _measure_sites(trace.layers, metric_sums, with_sink, [])
    skipped = [f"{site} is not recorded: {reason}" for site, reason in trace.skipped.items()]
    name = str(trace.model.get("name", "a model"))
    return HeadTable(name, pluralise(count, "text"), tuple(heads), (*skipped, *notes))


def select_sites(
    model: nn.Module, names: Sequence[str] = ()
) -> tuple[list[SiteModule], Mapping[str, tuple[str, str]]]:
    """Select the sites to measure, by default all that can be observed; also return the streams of
    their queries and keys by name.
    """
    sites = require_ability(model, "observe")
    sites = [one for one in sites if not names or one.site.name in names]
    has_source = is_encoder_decoder(model)
    return sites, {one.site.name: get_streams(one.site, has_source) for one in sites}


def _is_streamed(
    model: nn.Module, options: MeasureOptions, collectors: Sequence[MeasureCollector]
) -> bool:
    """True if a GPU kernel measures the heads; collectors need the weights themselves."""
    is_known = STREAMED_METRICS.issuperset(options.metrics)
    return is_known and not collectors and can_run_triton(get_device(model))


def sum_examples(
    model: nn.Module,
    examples: Iterable[Example],
    options: MeasureOptions,
    collectors: Sequence[MeasureCollector] = (),
    progress: Callable[[int], object] = lambda _: None,
) -> MetricSums:
    """Sum every metric over examples with marked first tokens.

    Returns one entry for each example, in their order. Short texts of equal length run together.
    """
    sites, streams = select_sites(model, options.sites)
    metric_sums = MetricSums([get_metric(metric) for metric in options.metrics])
    receivers = (metric_sums, *collectors)

    def on_band(site: str, band: WeightBand) -> None:
        for receiver in receivers:
            receiver.add_band(site, band)

    is_streamed = _is_streamed(model, options, collectors)
    num_ahead = 1 if is_streamed or collectors else MAX_BATCH_TEXTS
    remaining = iter(examples)
    count = 0
    while window := list(islice(remaining, num_ahead)):
        sums_of_text: dict[int, SumsOfText] = {}
        batches = _make_batches(window)
        while batches:
            numbers = batches.pop(0)
            batch = [window[number] for number in numbers]
            for collector in collectors:
                collector.start_example(batch[0])
            add_call = metric_sums.stream.add_call if is_streamed else None
            try:
                stream_weight_bands(model, sites, batch, streams, on_band, add_call)
            except BatchMismatch:
                metric_sums.drop_batch()
                batches = [[number] for number in numbers] + batches
                continue
            sums_of_text |= zip(numbers, metric_sums.finish_batch(len(batch)), strict=True)
            for collector in collectors:
                collector.finish_example()
            for _ in batch:
                count += 1
                progress(count)
        metric_sums.append_texts(sums_of_text[number] for number in range(len(window)))
    return metric_sums


def _make_batches(examples: Sequence[Example]) -> list[list[int]]:
    """Group the indices of texts that can run together, at most `MAX_BATCH_TOKENS` tokens."""
    groups: dict[object, list[int]] = {}
    for number, example in enumerate(examples):
        key = example.batch_key
        groups.setdefault(number if key is None else key, []).append(number)
    batches: list[list[int]] = []
    for numbers in groups.values():
        num_tokens = sum(tokens.count for tokens in examples[numbers[0]].streams.values())
        size = max(1, MAX_BATCH_TOKENS // max(1, num_tokens))
        batches += [numbers[start : start + size] for start in range(0, len(numbers), size)]
    return batches


def _measure_sites(
    sites: Sequence[Site | AttentionRecord],
    metric_sums: MetricSums,
    with_sink: Set[str],
    collected: Sequence[Mapping[tuple[str, int], Mapping[str, Measure]]],
) -> list[HeadMeasures]:
    """Measures of every head of these sites; the first token is a sink of those in `with_sink`."""
    measures: dict[tuple[str, int], dict[str, Measure]] = {}
    for metric in metric_sums.metrics:
        names = [
            site.name
            for site in sites
            if (site.name, metric.name, OBSERVED) in metric_sums.sums_by_example
        ]
        if names:
            for head, measure in _metric_measures(metric_sums, names, metric, with_sink):
                measures.setdefault(head, {})[metric.name] = measure
    for head, by_metric in measures.items():
        for more in collected:
            by_metric |= more.get(head, {})
    return rows_of_heads(sites, measures)


def _join_sites(
    metric_sums: MetricSums, sites: Sequence[str], metric: HeadMetric, with_sink: Set[str]
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Sums and counts of the heads of all sites, [texts, heads, ...], and their chance levels."""
    parts: list[list[Array]] = []
    for site in sites:
        is_marked = site in with_sink and metric.weight_source != "all"
        sources = WITH_FIRST_TOKEN_SINK if is_marked else (OBSERVED, CHANCE)
        own, baseline = (
            stack_texts(metric_sums.sums_by_example[site, metric.name, source])
            for source in sources
        )
        parts.append([*own, *(np.broadcast_to(array, own[0].shape) for array in baseline)])
    joined = [np.concatenate(arrays, 1) for arrays in zip(*parts, strict=True)]
    return (joined[0], joined[1]), (joined[2], joined[3])


def _metric_measures(
    metric_sums: MetricSums, sites: Sequence[str], metric: HeadMetric, with_sink: Set[str]
) -> list[tuple[tuple[str, int], Measure]]:
    """One metric of every head of these sites, by site and head."""
    observed, baseline = _join_sites(metric_sums, sites, metric, with_sink)
    estimate = Jackknife.of_ratio(*observed)
    chance = ratio_of_sums(*baseline)
    rows = observed[1].sum(0)
    reduce = metric.reduce
    if reduce is None:
        p = excess_p_values(observed, baseline)
    else:
        p = np.full(len(rows), np.nan)
        if reduce is select_largest:  # larger than the baseline's; corrected for their number
            heads = np.arange(len(rows))
            largest = np.nan_to_num(estimate.value).argmax(-1)
            best = np.nan_to_num(chance).argmax(-1)
            sums, counts = (array[:, heads, largest] for array in observed)
            of_best = (baseline[0][:, heads, best], baseline[1][:, heads, best])
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
    columns = np.stack([estimate.value, low, high, chance, rows, p], 1).tolist()
    heads_of_sites: list[tuple[str, int]] = []
    for site in sites:
        num_heads = len(metric_sums.sums_by_example[site, metric.name, OBSERVED][0][0])
        heads_of_sites += [(site, head) for head in range(num_heads)]
    return [(head, Measure(*column)) for head, column in zip(heads_of_sites, columns, strict=True)]
