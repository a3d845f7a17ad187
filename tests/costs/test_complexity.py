"""Attention beside recurrences and convolutions."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import headwise as hw
from headwise.costs.complexity import ComplexityTable, LayerSizes, attention_specs, measure_scaling
from headwise.report.render import to_text


def sums(tokens: int, k: int, chunk: int) -> int:
    """Multiply-adds of one head: all scores inside a chunk, what is folded before the last, what
    reads a state.
    """
    sizes = [min(chunk, tokens - start) for start in range(0, tokens, chunk)]
    own = sum(2 * k * size**2 for size in sizes)
    return own + sum(sizes[:-1]) * k * k + sum(sizes[1:]) * k * (k + 1)


SIZES = LayerSizes(tokens=37, model=20, heads=4, kernel=5, window=7)
LAYERS = {layer.name: layer for layer in ComplexityTable.from_sizes(SIZES).layers}


def counted_flops(run) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run()
    return counter.get_total_flops()


def test_attention_is_counted_as_torch_counts_it():
    layer = LAYERS["self-attention"]
    n, d = SIZES.tokens, SIZES.model
    x = torch.randn(1, n, d)
    assert layer.flops == counted_flops(
        lambda: hw.Attention(attention_specs(SIZES)["self-attention"], backend="dense")(x)
    )
    assert layer.flops == 8 * n * d**2 + 4 * n**2 * d
    assert layer.formula == "8 n d^2 + 4 n^2 d"
    pairs = sum(min(i + 1, 7) for i in range(n))
    assert LAYERS["sliding window"].flops == 8 * n * d**2 + 4 * d * pairs


@pytest.mark.parametrize(
    ("name", "gates", "value"), [("recurrent", 1, nn.RNN), ("GRU", 3, nn.GRU), ("LSTM", 4, nn.LSTM)]
)
def test_recurrences_are_products_of_the_token_and_of_the_state(name, gates, value):
    n, d = SIZES.tokens, SIZES.model
    net = value(d, d)
    inner, outer = net.weight_ih_l0.detach(), net.weight_hh_l0.detach()

    def steps() -> None:
        state = torch.zeros(1, d)
        for token in torch.randn(n, 1, d):
            state = (token @ inner.T + state @ outer.T)[:, :d]

    assert LAYERS[name].flops == counted_flops(steps) == 4 * gates * n * d * d
    assert LAYERS[name].parameters == sum(p.numel() for p in net.parameters())
    assert (LAYERS[name].serial, LAYERS[name].path) == (n, n)


def test_convolutions_are_counted_as_torch_counts_them():
    n, d, k = SIZES.tokens, SIZES.model, SIZES.kernel
    x = torch.randn(1, d, n + k - 1)
    wide, deep, across = nn.Conv1d(d, d, k), nn.Conv1d(d, d, k, groups=d), nn.Conv1d(d, d, 1)
    for name in ("convolution", "dilated convolution"):
        assert LAYERS[name].flops == counted_flops(lambda: wide(x))
        assert LAYERS[name].parameters == sum(p.numel() for p in wide.parameters())
    assert LAYERS["separable conv."].flops == counted_flops(lambda: across(deep(x)))
    assert LAYERS["separable conv."].parameters == sum(
        p.numel() for p in (*deep.parameters(), *across.parameters())
    )


def reached(tokens: int, back) -> int:
    """Layers until the last token knows of the first, each reading so far back
    as its depth allows.
    """
    positions, depth = {tokens - 1}, 0
    while 0 not in positions:
        positions |= {i - step for i in positions for step in back(depth) if i >= step}
        depth += 1
    return max(depth, 1)


@pytest.mark.parametrize(
    ("tokens", "kernel", "window"),
    [(1, 2, 2), (2, 2, 3), (27, 3, 5), (28, 3, 7), (64, 2, 64), (65, 4, 9)],
)
def test_paths_are_as_long_as_walking_them(tokens, kernel, window):
    found = {
        one.name: one
        for one in ComplexityTable.from_sizes(LayerSizes(tokens, 8, 2, kernel, window)).layers
    }
    assert found["convolution"].path == reached(tokens, lambda _: range(kernel))
    assert found["separable conv."].path == found["convolution"].path
    assert found["dilated convolution"].path == reached(
        tokens, lambda depth: range(0, kernel ** (depth + 1), kernel**depth)
    )
    pattern = hw.patterns.Window(window)
    near = [step for step in range(tokens) if pattern.allows(tokens, tokens - step)]
    assert found["sliding window"].path == reached(tokens, lambda _: near)
    assert (found["self-attention"].path, found["self-attention"].serial) == (1, 1)


def test_orders_are_those_of_the_paper():
    """Table 1 of 1706.03762, and section 4 for separable convolutions; 2006.16236 for sums."""
    assert {name: layer.order for name, layer in LAYERS.items()} == {
        "self-attention": "n^2 d",
        "sliding window": "r n d",
        "linear": "n d^2 / h",
        "recurrent": "n d^2",
        "GRU": "n d^2",
        "LSTM": "n d^2",
        "convolution": "k n d^2",
        "dilated convolution": "k n d^2",
        "separable conv.": "k n d + n d^2",
    }


def test_from_which_length_attention_is_dearer_by_hand():
    """8 n d^2 + 4 n^2 d against 4 g n d^2, or 2 k n d^2: beyond n = (g - 2) d, or (k / 2 - 2) d."""
    found = {
        one.name: one.dearer
        for one in ComplexityTable.from_sizes(LayerSizes(9, 64, 4, kernel=7, window=10)).layers
    }
    assert (found["recurrent"], found["GRU"], found["LSTM"]) == (1, 64 + 1, 2 * 64 + 1)
    assert (found["convolution"], found["separable conv."], found["sliding window"]) == (
        96 + 1,
        1,
        2,
    )
    assert found["self-attention"] is None
    square = [4 * sums(t, 16, 64) < 4 * 2 * 16 * t * t for t in range(1, 3000)]
    assert found["linear"] == 3000 - square[::-1].index(False)


def test_every_layer_is_timed_at_every_length():
    found = measure_scaling(SIZES, lengths=(8, 16, 32))
    assert set(found) == set(LAYERS) - {"dilated convolution"}
    assert all(len(times) == 3 and min(times) > 0 for times in found.values())


@pytest.mark.parametrize("tokens", [1, 2**40])
def test_the_table_fits_the_screen(tokens):
    (table,) = ComplexityTable.from_sizes(LayerSizes(tokens, 4096, 32)).items
    assert max(map(len, to_text(table).splitlines())) <= 80
