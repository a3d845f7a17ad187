"""transformers models on the headwise backend: one decode step after a long cache, and the cost of
registration.

A decode step with grouped-query attention runs on the same weights with three attention functions:
headwise, and the fused and eager functions of transformers. The second part runs one model without
hooks, on its own fused function, in two alternating processes: one has imported `headwise.hub`, the
other has not imported headwise.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from typing import Any

import torch

from headwise.bench.benchmark_case import BenchmarkCase, TimingPace
from headwise.bench.session import BenchmarkRow, CaseTimer, MachineLimits

from .peer_process import CONFIG, PeerProcess, build_model

ATTENTION_FUNCTIONS = {
    "ours": "headwise",
    "transformers' sdpa": "sdpa",
    "transformers' eager": "eager",
}
# Kind of cache, cached tokens, dtype.
DECODE = (
    ("dynamic", 512, torch.float32),
    ("dynamic", 4096, torch.float32),
    ("dynamic", 4096, torch.bfloat16),
    ("static", 4096, torch.float32),
)
REPEATS, PAIRS = 15, 5
ONE = TimingPace(
    min_sample_seconds=0.0, min_samples=REPEATS, max_samples=REPEATS
)  # one call per sample, because the cache has room for REPEATS more tokens
MORE = TimingPace(min_samples=3 * REPEATS, max_samples=3 * REPEATS)
TOKENS = (1, 128)  # of a forward pass without hooks


def fill_cache(net: Any, kind: str, past: int) -> Any:
    """A cache with `past` random tokens and room for all timed steps."""
    transformers = import_module("transformers")
    room = past + REPEATS + 3
    cache = (
        transformers.DynamicCache()
        if kind == "dynamic"
        else transformers.StaticCache(net.config, max_cache_len=room)
    )
    draw = torch.Generator().manual_seed(1)
    dim = CONFIG["hidden_size"] // CONFIG["num_attention_heads"]
    for layer in range(CONFIG["num_hidden_layers"]):
        k, v = torch.randn(2, 1, CONFIG["num_key_value_heads"], past, dim, generator=draw).to(
            net.dtype
        )
        cache.update(k, v, layer)
    return cache


def step(net: Any, cache: Any) -> Callable[[], None]:
    """A function that decodes one more token."""
    token = torch.tensor([[7]])

    def run() -> None:
        net(token, past_key_values=cache)

    return run


def decode(kind: str, past: int, dtype: torch.dtype) -> BenchmarkRow:
    """A row of the table: all attention functions, whose first logits must agree."""
    import_module("headwise.hub")
    nets = {
        name: build_model(attention).to(dtype) for name, attention in ATTENTION_FUNCTIONS.items()
    }
    logits = [
        net(torch.tensor([[7]]), past_key_values=fill_cache(net, kind, past)).logits
        for net in nets.values()
    ]
    for other in logits[1:]:
        torch.testing.assert_close(
            logits[0], other, atol=1e-5 if dtype == torch.float32 else 0.05, rtol=1e-4
        )
    runs = {name: step(net, fill_cache(net, kind, past)) for name, net in nets.items()}
    name = f"one token, {past} {kind}ally cached, {str(dtype).removeprefix('torch.')}"
    return time_case(BenchmarkCase(name, runs.pop("ours"), runs, tolerance=None), ONE)


def time_case(case: BenchmarkCase, pace: TimingPace) -> BenchmarkRow:
    """A row of the table."""
    return CaseTimer(pace, MachineLimits.of_this_machine()).time_case(case, "registered") | {
        "title": "transformers' models on headwise"
    }


def time_registration(tokens: int) -> BenchmarkRow:
    """A row of the table: with and without the registered backend; the median of several pairs of
    processes.

    The memory layout of a process makes it some per cent faster or slower than an equal process.
    """
    return sorted(
        (time_pair(tokens) for _ in range(PAIRS)), key=lambda row: row["ratio"]["not imported"]
    )[PAIRS // 2]


def time_pair(tokens: int) -> BenchmarkRow:
    """A row of one pair of alternating processes."""
    with ExitStack() as stack:
        runs = {
            name: stack.enter_context(PeerProcess(name, tokens))
            for name in ("registered", "absent")
        }
        others = {"not imported": runs["absent"].run}
        return time_case(
            BenchmarkCase(
                f"without hooks, {tokens} tokens", runs["registered"].run, others, tolerance=None
            ),
            MORE,
        )


def main() -> list[BenchmarkRow]:
    """Rows of the table."""
    with torch.no_grad():
        rows = [decode(*case) for case in DECODE]
    return rows + [time_registration(tokens) for tokens in TOKENS]
