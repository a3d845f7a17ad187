"""Statistics of attention heads: of a long text against the forward pass alone, and of short texts
against `output_attentions` and numpy.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.attention.interfaces.core_types import Probe
from headwise.hub.pretrained_models import copy_live_model
from headwise.models import Transformer, build
from headwise.models.families import read_model_spec
from headwise.observe.head_analysis.annotated_examples import Example, TokenAnnotations
from headwise.observe.head_analysis.head_measurement import (
    MeasureOptions,
    MetricSums,
    measure_heads,
)
from headwise.observe.head_analysis.head_metrics import HEAD_METRICS
from headwise.observe.head_analysis.head_similarity import (
    entropy,
    jensen_shannon_divergence,
    sample_rows,
)
from headwise.observe.head_analysis.resampling import Array, Jackknife
from headwise.observe.head_analysis.weight_bands import WeightBand, stream_weight_bands
from headwise.observe.inspect.attention_sites import find_attention

from .harness import (
    BenchmarkCase,
    CaseKind,
    MissingPeer,
    SpeedTarget,
    TimedCall,
    import_quietly,
)

LONG_LENGTH = 8192
SHORT_LENGTH = 2048
VOCABULARY_SIZE = 1000
MEMORY_LIMIT = "1 GB"
MODEL_CONFIG: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 1,
    "vocab_size": VOCABULARY_SIZE,
}
STATISTIC_NAMES = ("entropy", "sink", "first", "previous", "self", "next", "offset", "peak")
FORWARD_ONLY = "one forward"
EAGER_WEIGHTS = "eager weights of all pairs"
ROWS_PER_TEXT = 64
SHORT_TEXTS = 5
SHORT_LENGTHS = (64, 256, 512)
OUTPUT_ATTENTIONS = "output_attentions and numpy"
LLAMA_CONFIG: dict[str, Any] = {  # the shape of a Llama of 135M parameters, with few token ids
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 1024,
}


def head_statistics_cases(quick: bool) -> Iterator[BenchmarkCase]:
    """Yield sums over all rows of weights, divergence_RHH statistic, and Jensen-Shannon divergences
    of sampled rows.
    """
    yield _summed_case(SHORT_LENGTH, STATISTIC_NAMES)
    yield _summed_case(LONG_LENGTH, STATISTIC_NAMES)
    if not quick:
        yield _summed_case(LONG_LENGTH, tuple(HEAD_METRICS))
    yield _similarity_case(LONG_LENGTH)
    yield from _short_text_cases(quick)


def _summed_case(count: int, names: tuple[str, ...]) -> BenchmarkCase:
    net = _make_model(count)
    example = _make_example(count)
    layers = find_attention(net)
    notes = dict[str, str]()
    streams = {layer.site.name: ("text", "text") for layer in layers}

    def ours() -> None:
        sums = MetricSums([HEAD_METRICS[name] for name in names])
        column_mass: dict[str, torch.Tensor] = {}

        def add_band(site: str, block: WeightBand) -> None:
            sums.add_band(site, block)
            empty = torch.zeros(len(block.w_HTS), count, dtype=torch.float64)
            mass = column_mass.setdefault(site, empty)
            mass[:, block.first_key : block.first_key + block.w_HTS.shape[2]] += block.w_HTS.sum(1)

        stream_weight_bands(net, layers, [example], streams, add_band)
        sums.finish_example()

    def ours_with_memory() -> None:
        if notes or count < LONG_LENGTH:
            ours()
            return
        forward()
        before = peak_memory_bytes(reset=True)
        ours()
        added = peak_memory_bytes() - before
        notes["memory added"] = (
            f"{added / 1e9:.2f} GB, limit {MEMORY_LIMIT}" if before else "unknown on this system"
        )

    forward = _forward_pass(net, example)
    size = count * count * MODEL_CONFIG["n_head"] * 4 / 1e9
    too_large = MissingPeer(f"scores and weights of {count:,} tokens would hold {2 * size:.1f} GB")
    peers = {
        FORWARD_ONLY: forward,
        EAGER_WEIGHTS: too_large if count == LONG_LENGTH else _eager_statistics(net, example),
    }
    statistics = (
        "entropy, sinks, offsets" if names is STATISTIC_NAMES else f"all {len(names)} statistics"
    )
    targets = (SpeedTarget(FORWARD_ONLY, 1 / 3),) if count == LONG_LENGTH else ()
    return BenchmarkCase(
        f"{statistics}, column mass, {count:,} tokens",
        ours_with_memory,
        peers,
        targets,
        tolerance=None,
        notes=notes,
    )


def _similarity_case(count: int) -> BenchmarkCase:
    """Return the case of the divergence between each pair of heads, with an interval over rows."""
    net = _make_model(count)
    example = _make_example(count)
    layers = find_attention(net)
    streams = {layer.site.name: ("text", "text") for layer in layers}
    notes = dict[str, str]()

    def ours() -> None:
        with torch.inference_mode():
            (rows,), _ = sample_rows(net, layers, example, streams, ROWS_PER_TEXT, 0)
            divergences = [
                jensen_shannon_divergence(row[:, None]).numpy() for row in rows.weights.unbind(1)
            ]
        divergence_RHH = np.stack(divergences)
        above = np.triu_indices(divergence_RHH.shape[1], 1)
        mean = Jackknife.of_ratio(divergence_RHH[:, *above].mean(1))
        low, high = mean.interval()
        summary = (
            f"{mean.value:.3f} nats, {low:.3f} to {high:.3f}, over {len(divergence_RHH)} "
            f"rows of {count:,}"
        )
        notes["divergence of two heads"] = summary

    name = f"Jensen-Shannon of {ROWS_PER_TEXT} sampled rows, {count:,} tokens"
    return BenchmarkCase(
        name, ours, {FORWARD_ONLY: _forward_pass(net, example)}, tolerance=None, notes=notes
    )


def _short_text_cases(quick: bool) -> Iterator[BenchmarkCase]:
    """Yield measures of short texts in processor time, which includes threads that wait."""
    lengths = SHORT_LENGTHS[:1] if quick else SHORT_LENGTHS
    rows: list[tuple[Sequence[str], int, float]] = []
    rows += [(STATISTIC_NAMES, length, 1.0) for length in lengths]
    rows.append((tuple(HEAD_METRICS), lengths[len(lengths) // 2], 1 / 1.6))
    try:
        library = import_quietly("transformers")
    except ImportError as error:
        peers = {OUTPUT_ATTENTIONS: MissingPeer(str(error))}
        yield BenchmarkCase("heads over short texts", lambda: None, peers, tolerance=None)
        return
    config = library.LlamaConfig(**LLAMA_CONFIG, attn_implementation="eager")
    model = library.LlamaForCausalLM(config).eval()
    net = copy_live_model(model).eval()
    for names, length, ratio in rows:
        texts = [_make_example(length, seed) for seed in range(SHORT_TEXTS)]
        yield BenchmarkCase(
            f"{len(names)} measures of {SHORT_TEXTS} texts of {length} tokens, 270 heads",
            _measure_texts(net, texts, names),
            {OUTPUT_ATTENTIONS: _numpy_statistics(model, texts)},
            (SpeedTarget(OUTPUT_ATTENTIONS, ratio),),
            notes={"time": "of the processor"},
            clock=time.process_time,
        )


def _measure_texts(net: Transformer, texts: Sequence[Example], names: Sequence[str]) -> TimedCall:
    """Return a call that measures all heads and returns entropies and weights on first tokens."""
    options = MeasureOptions(tuple(names))

    def ours() -> Array:
        table = measure_heads(net, texts, options=options)
        compared = ("entropy", "first")
        rows = [[head.measures[name].value for name in compared] for head in table.heads]
        return np.array(rows)

    return ours


def _numpy_statistics(model: Any, texts: Sequence[Example]) -> TimedCall:
    """Return the lines that one writes by hand for the statistics in `STATISTIC_NAMES`."""

    def measure(weights: Array, is_sink: Any) -> list[Array]:
        entropy = -(weights * np.log(weights + 1e-38)).sum(-1).mean(-1)
        sink = weights[..., is_sink].sum(-1).mean(-1)
        first = weights[..., 0].mean(-1)
        diagonals = [weights.diagonal(offset, 1, 2).mean(-1) for offset in (-1, 0, 1)]
        offsets = weights.argmax(-1) - np.arange(weights.shape[1])
        shares = np.stack([(offsets == offset).mean(-1) for offset in range(-8, 9)])
        return [entropy, first, sink, *diagonals, shares.max(0), shares.argmax(0) - 8]

    def by_hand() -> Array:
        of_texts = []
        for text in texts:
            is_sink = text.streams["text"].is_special.numpy().copy()
            is_sink[0] = True
            with torch.inference_mode():
                attentions = model(text.inputs, output_attentions=True).attentions
            layers = [np.array(measure(layer[0].numpy(), is_sink)) for layer in attentions]
            of_texts.append(np.concatenate(layers, 1))
        return np.mean(of_texts, 0)[:2].T

    return by_hand


def _make_model(count: int) -> Transformer:
    return build(read_model_spec(MODEL_CONFIG | {"n_positions": count}), seed=0).eval()


def _make_example(count: int, seed: int = 0) -> Example:
    """Random tokens, a seventh of them punctuation and a hundredth separators."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY_SIZE, (count,), generator=generator)
    is_separator = torch.rand(count, generator=generator) < 0.01
    common = torch.bincount(ids, minlength=VOCABULARY_SIZE)[ids]
    annotations = TokenAnnotations(
        ids, ("",) * count, is_separator, is_separator, ids % 7 == 0, torch.arange(count), common
    )
    return Example(ids[None], {"text": annotations})


def _forward_pass(net: Transformer, example: Example) -> TimedCall:
    def forward() -> Tensor:
        with torch.inference_mode():
            return net(example.inputs)

    return forward


def _eager_statistics(net: Transformer, example: Example) -> TimedCall:
    """Return a call that computes the statistics from all weights at once, as with
    output_attentions=True.
    """
    annotations = example.streams["text"]

    def eager() -> tuple[Tensor, ...]:
        (name, _), *_ = net.spec.attention_specs()
        probe = Probe("weights")
        net.probes = {name: probe}
        try:
            with torch.inference_mode():
                net(example.inputs)
        finally:
            net.probes = {}
        w_HTS = probe.tensors["weights"][0]
        sinks = (
            w_HTS[..., annotations.is_special | annotations.is_separator].sum(-1) + w_HTS[..., 0]
        )
        diagonals = [w_HTS.diagonal(offset, 1, 2).mean(-1) for offset in (-1, 0)]
        offsets = torch.arange(annotations.count) - w_HTS.argmax(-1)
        offset_shares = torch.stack([(offsets == offset).float().mean(-1) for offset in range(9)])
        return entropy(w_HTS), sinks.mean(-1), *diagonals, offset_shares, w_HTS.sum(1)

    return eager


def peak_memory_bytes(*, reset: bool = False) -> int:
    """Return the peak memory of this process in bytes since the last reset; 0 if the system does
    not report it.
    """
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text(
                "5"
            )  # proc_pid_clear_refs(5): resets the high-water mark
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return 0


KINDS = {
    "head_statistics": CaseKind("Statistics of 12 heads of 64, causal", head_statistics_cases),
}
