"""What is said of heads over a long text, beside reading it: sums over rows, and how alike rows are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...families import read_model_spec
from ...head_analysis.annotated_examples import Example, TokenAnnotations
from ...head_analysis.head_measurement import MetricSums
from ...head_analysis.head_metrics import HEAD_METRICS
from ...head_analysis.head_similarity import RowSampling, entropy, jensen_shannon_divergence, sample_rows
from ...head_analysis.resampling import confidence_interval
from ...head_analysis.weight_bands import AttentionReceived, WeightBand, stream_weight_bands
from ...inspect.attention_sites import find_attention
from ...interfaces.probe import Probe
from ...models import Transformer, build
from ..benchmark_case import BenchmarkCase, MissingPeer, SpeedTarget, TimedCall

TITLE = "Statistics of 12 heads of 64, causal"
LONG_LENGTH, SHORT_LENGTH, VOCABULARY_SIZE, MEMORY_LIMIT = 8192, 2048, 1000, "1 GB"
MODEL_CONFIG: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 1,
    "vocab_size": VOCABULARY_SIZE,
}
STATISTIC_NAMES = ("entropy", "sink", "first", "previous", "self", "next", "offset", "peak")
FORWARD_ONLY, EAGER_WEIGHTS = "one forward", "eager weights of all pairs"
ROW_SAMPLE, NUM_RESAMPLES = RowSampling(num_rows=64), 1000


def cases(quick: bool) -> Iterator[BenchmarkCase]:
    """What is summed in one pass; every statistic there is; and Jensen-Shannon of sampled rows, a budget apart."""
    yield _summed_case(SHORT_LENGTH, STATISTIC_NAMES)
    yield _summed_case(LONG_LENGTH, STATISTIC_NAMES)
    if not quick:
        yield _summed_case(LONG_LENGTH, tuple(HEAD_METRICS))
    yield _similarity_case(LONG_LENGTH)


def _summed_case(count: int, names: tuple[str, ...]) -> BenchmarkCase:
    net, scene = _make_model(count), _make_example(count)
    those, notes = find_attention(net), dict[str, str]()
    streams = {one.site.name: ("text", "text") for one in those}

    def ours() -> None:
        adding, received = MetricSums([HEAD_METRICS[name] for name in names]), AttentionReceived()

        def see(site: str, block: WeightBand) -> None:
            adding.add_band(site, block)
            received.add_band(site, block)

        stream_weight_bands(net, those, scene, streams, see)

    def watched() -> None:
        if notes or count < LONG_LENGTH:
            ours()
            return
        forward()
        before = peak_memory_bytes(reset=True)
        ours()
        grown = peak_memory_bytes() - before
        notes["memory beyond the process"] = (
            f"{grown / 1e9:.2f} GB, of {MEMORY_LIMIT} at most" if before else "not known here"
        )

    forward = _forward_pass(net, scene)
    size = count * count * MODEL_CONFIG["n_head"] * 4 / 1e9
    refused = MissingPeer(f"scores and weights of {count:,} tokens would hold {2 * size:.1f} GB")
    peers = {FORWARD_ONLY: forward, EAGER_WEIGHTS: refused if count == LONG_LENGTH else _eager_statistics(net, scene)}
    said = "entropy, sinks, offsets" if names is STATISTIC_NAMES else f"all {len(names)} statistics"
    aims = (SpeedTarget(FORWARD_ONLY, 1 / 3),) if count == LONG_LENGTH else ()
    return BenchmarkCase(f"{said}, column mass, {count:,} tokens", watched, peers, aims, tolerance=None, notes=notes)


def _similarity_case(count: int) -> BenchmarkCase:
    """How far apart the rows of each two heads are, with an interval over rows."""
    net, scene = _make_model(count), _make_example(count)
    those = find_attention(net)
    streams = {one.site.name: ("text", "text") for one in those}
    notes = dict[str, str]()

    def ours() -> None:
        with torch.inference_mode():
            (rows,), _ = sample_rows(net, those, scene, streams, ROW_SAMPLE)
            each = [jensen_shannon_divergence(row[:, None]).numpy() for row in rows.weights.unbind(1)]
        every = np.stack(each)
        above = np.triu_indices(every.shape[1], 1)
        draws = np.random.default_rng(0).integers(len(every), size=(NUM_RESAMPLES, len(every)))
        means = every[:, *above].mean(1)
        low, high = confidence_interval(means[draws].mean(1)[:, None])
        told = f"{means.mean():.3f} nats, {low[0]:.3f} to {high[0]:.3f}, over {len(every)} rows of {count:,}"
        notes["distance of two heads"] = told

    name = f"Jensen-Shannon of {ROW_SAMPLE.num_rows} sampled rows, {count:,} tokens"
    return BenchmarkCase(name, ours, {FORWARD_ONLY: _forward_pass(net, scene)}, tolerance=None, notes=notes)


def _make_model(count: int) -> Transformer:
    return build(read_model_spec(MODEL_CONFIG | {"n_positions": count}), seed=0).eval()


def _make_example(count: int) -> Example:
    """Random tokens, a seventh of them punctuation and a hundredth separators."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(1, VOCABULARY_SIZE, (count,), generator=draw)
    ends = torch.rand(count, generator=draw) < 0.01
    common = torch.bincount(ids, minlength=VOCABULARY_SIZE)[ids]
    told = TokenAnnotations(ids, ("",) * count, ends, ends, ids % 7 == 0, torch.arange(count), common)
    return Example(ids[None], {"text": told})


def _forward_pass(net: Transformer, scene: Example) -> TimedCall:
    def forward() -> Tensor:
        with torch.inference_mode():
            return net(scene.inputs)

    return forward


def _eager_statistics(net: Transformer, scene: Example) -> TimedCall:
    """The same sums of weights that are all there at once, as who asks a model to output attentions has them."""
    told = scene.streams["text"]

    def eager() -> tuple[Tensor, ...]:
        (name, _), *_ = net.spec.attention_specs()
        probe = Probe("weights")
        net.probes = {name: probe}
        try:
            with torch.inference_mode():
                net(scene.inputs)
        finally:
            net.probes = {}
        w_HTS = probe.tensors["weights"][0]
        sinks = w_HTS[..., told.is_special | told.is_separator].sum(-1) + w_HTS[..., 0]
        diagonals = [w_HTS.diagonal(offset, 1, 2).mean(-1) for offset in (-1, 0)]
        hits = torch.arange(told.count) - w_HTS.argmax(-1)
        near = torch.stack([(hits == offset).float().mean(-1) for offset in range(9)])
        return entropy(w_HTS), sinks.mean(-1), *diagonals, near, w_HTS.sum(1)

    return eager


def peak_memory_bytes(*, reset: bool = False) -> int:
    """The most bytes that this process has held, since it was last asked anew; 0 where the system does not say."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")  # proc_pid_clear_refs(5): the high-water mark begins anew
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return 0
