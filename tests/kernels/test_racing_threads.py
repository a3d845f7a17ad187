"""Threads that call layers and kernels at the same time get what each call gives alone, also while
graphs are made.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.kernels import attend_paged, flash_attention, multiply_small_batch

THREADS, ROUNDS = 4, 3
Call = Callable[[], Tensor]


@pytest.fixture(autouse=True)
def frequent_switches() -> Iterator[None]:
    """Let the interpreter change threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def run_together(calls: Sequence[Call]) -> list[list[Tensor]]:
    """Return the results of all calls from each of several threads, which begin at different calls
    at one moment.
    """
    results: list[list[Tensor]] = [[] for _ in range(THREADS)]
    errors, barrier = list[BaseException](), threading.Barrier(THREADS)

    def run(number: int) -> None:
        try:
            barrier.wait(60)
            found: dict[int, Tensor] = {}
            with torch.no_grad():
                for n in range(ROUNDS * len(calls)):
                    place = (n + number * len(calls) // THREADS) % len(calls)
                    found[place] = calls[place]()
            results[number] = [found[place] for place in range(len(calls))]
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(number,), daemon=True) for number in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert errors == []
    assert not any(thread.is_alive() for thread in threads)
    return results


def flash_calls() -> list[Call]:
    """Calls of more shapes than plans are cached."""
    calls: list[Call] = []
    for n in range(flash_attention.MAX_CACHED_PLANS + 5):
        q, k, v = (torch.randn(1, 3 + n, heads, 16) for heads in (4, 2, 2))
        calls.append(partial(flash_attention.attend_key_ranges, q, k, v, None, 0, 0.25))
    return calls


def product_calls() -> list[Call]:
    matrices = [torch.randn(rows, 32) for rows in (5, 3)]
    return [partial(multiply_small_batch, torch.randn(n, 32), matrices) for n in range(1, 9)]


def paged_calls() -> list[Call]:
    k, v = torch.randn(5, 2, 4, 16), torch.randn(5, 2, 4, 7)
    spans = torch.tensor([[[0, 0, 4], [1, 0, 2]], [[2, 0, 3], [0, 0, 1]], [[3, 1, 3], [4, 2, 4]]])

    def decode(q: Tensor) -> Tensor:
        return attend_paged(q, k, v, spans[: len(q)], scale=0.5)[0]

    return [partial(decode, torch.randn(rows, 4, 16)) for rows in (1, 2, 3)]


def layer_calls() -> list[Call]:
    """Layers with different patterns and lengths; a decode step has a cache of its own."""
    calls: list[Call] = []
    for pattern in ("causal", "window(5)", "causal() & dilated(4, 2)"):
        layer = hw.Attention(
            hw.design(model=32, heads=4, kv=2, pattern=pattern, modifiers=(hw.parts.Rotary(),))
        ).eval()
        calls += [partial(layer, torch.randn(2, n, 32)) for n in (1, 7, 19)]
        calls.append(partial(decode_last, layer, torch.randn(1, 6, 32)))
    return calls


def decode_last(layer: hw.Attention, x: Tensor) -> Tensor:
    """Return the output of the last token, decoded after the others."""
    cache = layer.cache(batch=1, capacity=8)
    layer(x[:, :-1], cache=cache)
    return layer(x[:, -1:], cache=cache)


@pytest.mark.lengthy
@pytest.mark.parametrize("make_calls", [flash_calls, product_calls, paged_calls, layer_calls])
def test_threads_get_what_each_call_gives_alone(make_calls: Callable[[], list[Call]]):
    calls = make_calls()
    with torch.no_grad():
        expected = [call() for call in calls]
    for found in run_together(calls):
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.compile
def test_threads_that_trace_a_layer_do_not_disturb_each_other():
    """Every thread may be the first to call a compiled layer, while others run
    it without a graph.
    """
    torch._dynamo.reset()
    layer = hw.Attention(
        hw.design(model=32, heads=4, kv=2, pattern="causal", modifiers=(hw.parts.Rotary(),))
    ).eval()
    compiled = torch.compile(layer, backend="eager", dynamic=False)
    inputs = [torch.randn(2, n, 32) for n in (5, 9)]
    calls: list[Call] = [partial(run, x) for x in inputs for run in (compiled, layer)]
    with torch.no_grad():
        expected = [layer(x) for x in inputs for _ in range(2)]
    for found in run_together(calls):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
    torch._dynamo.reset()
