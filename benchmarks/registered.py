"""transformers' models on headwise: one token behind a long cache, and what it costs to have it registered only.

A step of a decoder with grouped heads runs on the same weights three ways: on headwise, and on transformers' own fused
and eager functions. The second part runs one model, unwatched and on its own fused function, in two processes that take
turns: one has imported `headwise.hub`, the other knows nothing of headwise.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from typing import Any

import torch

from headwise.bench.benchmark_case import BenchmarkCase, TimingPace
from headwise.bench.session import BenchmarkRow, CaseTimer, MachineLimits

from .elsewhere import CONFIG, Elsewhere, model

WAYS = {"ours": "headwise", "transformers' sdpa": "sdpa", "transformers' eager": "eager"}
# What kind of cache, how many tokens it holds, and of which numbers.
DECODE = (("dynamic", 512, torch.float32), ("dynamic", 4096, torch.float32), ("dynamic", 4096, torch.bfloat16),
          ("static", 4096, torch.float32))  # fmt: skip
REPEATS, PAIRS = 15, 5
ONE = TimingPace(
    min_sample_seconds=0.0, min_samples=REPEATS, max_samples=REPEATS
)  # call of each sample: a cache has room for so many
MORE = TimingPace(min_samples=3 * REPEATS, max_samples=3 * REPEATS)
TOKENS = (1, 128)  # of an unwatched forward


def cache(net: Any, kind: str, past: int) -> Any:
    """One that holds so many tokens, and has room for all that are asked for."""
    theirs = import_module("transformers")
    room = past + REPEATS + 3
    kept = theirs.DynamicCache() if kind == "dynamic" else theirs.StaticCache(net.config, max_cache_len=room)
    draw = torch.Generator().manual_seed(1)
    dim = CONFIG["hidden_size"] // CONFIG["num_attention_heads"]
    for layer in range(CONFIG["num_hidden_layers"]):
        k, v = torch.randn(2, 1, CONFIG["num_key_value_heads"], past, dim, generator=draw).to(net.dtype)
        kept.update(k, v, layer)
    return kept


def step(net: Any, kept: Any) -> Callable[[], None]:
    """The next token, again and again."""
    token = torch.tensor([[7]])

    def run() -> None:
        net(token, past_key_values=kept)

    return run


def decode(kind: str, past: int, dtype: torch.dtype) -> BenchmarkRow:
    """A row of the table: all ways, which say the same of the first token."""
    import_module("headwise.hub")
    nets = {name: model(attention).to(dtype) for name, attention in WAYS.items()}
    said = [net(torch.tensor([[7]]), past_key_values=cache(net, kind, past)).logits for net in nets.values()]
    for other in said[1:]:
        torch.testing.assert_close(said[0], other, atol=1e-5 if dtype == torch.float32 else 0.05, rtol=1e-4)
    runs = {name: step(net, cache(net, kind, past)) for name, net in nets.items()}
    name = f"one token, {past} {kind}ally cached, {str(dtype).removeprefix('torch.')}"
    return timed(BenchmarkCase(name, runs.pop("ours"), runs, tolerance=None), ONE)


def timed(case: BenchmarkCase, pace: TimingPace) -> BenchmarkRow:
    """A row of the table."""
    return CaseTimer(pace, MachineLimits.of_this_machine()).time_case(case, "registered") | {
        "title": "transformers' models on headwise"
    }


def unwatched(tokens: int) -> BenchmarkRow:
    """A row of the table: with the backend registered, and without; of several pairs of processes the middle one.

    Where a process happens to lie in memory makes it some per cent faster or slower than another like it.
    """
    return sorted((pair(tokens) for _ in range(PAIRS)), key=lambda row: row["ratio"]["not imported"])[PAIRS // 2]


def pair(tokens: int) -> BenchmarkRow:
    """The same of one pair of processes, taking turns."""
    with ExitStack() as stack:
        runs = {name: stack.enter_context(Elsewhere(name, tokens)) for name in ("registered", "absent")}
        others = {"not imported": runs["absent"].run}
        return timed(BenchmarkCase(f"unwatched, {tokens} tokens", runs["registered"].run, others, tolerance=None), MORE)


def main() -> list[BenchmarkRow]:
    """Rows of the table."""
    with torch.no_grad():
        rows = [decode(*case) for case in DECODE]
    return rows + [unwatched(tokens) for tokens in TOKENS]
