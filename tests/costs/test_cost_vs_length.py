"""Lengths at which one layer costs less than another, and attention beside recurrences and
convolutions.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import headwise as hw
from headwise.costs.complexity import ComplexityTable, LayerSizes, attention_specs, measure_scaling
from headwise.costs.cost_report import estimate_cost
from headwise.costs.cost_vs_length import (
    QUANTITY_LABELS,
    CostByLength,
    cost_at_length,
    find_ranges,
    prefill_flops,
)

D, H = 512, 8
MHA = hw.design(model=D, heads=H, pattern="causal")
LOAD = hw.Workload(batch=3)


def crossovers(one, other, load: hw.Workload = LOAD) -> dict[str, str]:
    """What is said of the second against the first, by quantity."""
    return {
        row.quantity: str(row)
        for row in hw.find_crossovers({"other": other, "one": one}, load).crossovers
    }


# --- what a length costs --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mha", "gqa", "mla", "linear", "dcmha", "bigbird", "average"])
def test_a_sample_is_the_price_in_its_totals(name):
    load = hw.Workload(batch=3, context=301, dtype="fp32", device="cpu", generate=5)
    short, whole = (
        cost_at_length(hw.design(preset=name), load),
        estimate_cost(hw.design(preset=name), hw.Workload(3, 301, "fp32", "cpu")),
    )
    decodes = whole.decode_flops is not None
    assert short.prefill_flops == whole.prefill_flops.total
    assert short.prefill_seconds == whole.seconds("prefill")
    assert short.step_flops == (whole.decode_flops.total if decodes else None)
    assert short.cache_bytes == (whole.cache_bytes if decodes else None)
    assert short.step_seconds == (whole.seconds("decode") if decodes else None)


def test_models_are_sampled_too_sources_included():
    t5 = hw.families.read_model_spec(
        {"model_type": "t5", "num_layers": 2, "d_model": 48, "d_kv": 12, "num_heads": 4, "d_ff": 96}
    )
    load = hw.Workload(batch=2, context=11, source=29)
    assert cost_at_length(t5, load).cache_bytes == estimate_cost(t5, load).cache_bytes
    assert cost_at_length(t5, load).prefill_flops == estimate_cost(t5, load).prefill_flops.total


def test_limits_of_the_length():
    named = {
        "rule": MHA,
        "table": hw.design(preset="bigbird"),
        "known": hw.families.read_model_spec({"model_type": "gpt2"}),
    }
    along = CostByLength(named, LOAD)
    assert [along.max_length(name) for name in named] == [2**40, 2**14, 1024]
    assert along.max_length("rule", "known") == 1024


# --- breaking even, by hand -----------------------------------------------------------------------


def test_a_cache_of_latents_is_smaller_at_any_length_and_a_state_from_some():
    latents = hw.design(
        preset="mla", model=2048, heads=16
    )  # 512 + 64 numbers of a token, not 2 * 2048
    assert (
        crossovers(latents, hw.design(model=2048, heads=16, pattern="causal"))["cache_bytes"]
        == "always"
    )
    # 8 states of 64 * 64 + 64 numbers of 4 bytes; 2 * 512 numbers of 2 bytes for each token: equal
    # at 65.
    assert 8 * (64 * 64 + 64) * 4 == 65 * 2 * 512 * 2
    assert (
        crossovers(hw.design(preset="linear", model=D, heads=H), MHA)["cache_bytes"] == "from 66 on"
    )


def test_sums_over_tokens_against_scores_by_hand():
    found = crossovers(hw.design(preset="linear", model=D, heads=H), MHA)
    # A step: 2 * 2k a head and key, against k (k + 1) for the state and 2k for the own token: 2 (2k
    # + k (k + 1)) at once. So t > (2k + k (k + 1)) / 2k = 33.5 for k = 64.
    assert found["step_flops"] == "from 34 on"
    assert found["prefill_flops"] == f"from {linear_from(64, 128)} on"


def linear_from(k: int, chunk: int) -> int:
    """The length from which chunks of scores and a state cost less than half a square of scores,
    for good.
    """
    less = [sums(t, k, chunk) < 2 * k * t * (t + 1) // 2 for t in range(1, 3000)]
    return 3000 - less[::-1].index(False)


def sums(tokens: int, k: int, chunk: int) -> int:
    """Multiply-adds of one head: all scores inside a chunk, what is folded before the last, what
    reads a state.
    """
    sizes = [min(chunk, tokens - start) for start in range(0, tokens, chunk)]
    own = sum(2 * k * size**2 for size in sizes)
    return own + sum(sizes[:-1]) * k * k + sum(sizes[1:]) * k * (k + 1)


def test_a_window_gains_once_it_is_full():
    found = crossovers(hw.design(model=D, heads=H, pattern="window(100)"), MHA)
    assert {found[name] for name in ("prefill_flops", "step_flops", "cache_bytes")} == {
        "from 101 on"
    }


def test_never_always_equal_and_incomparable():
    grouped = hw.design(model=D, heads=H, kv=2, pattern="causal")
    assert set(crossovers(grouped, MHA).values()) == {"always"}
    assert set(crossovers(MHA, grouped).values()) == {"never"}
    assert set(crossovers(MHA, hw.design(model=D, heads=H, pattern="causal()")).values()) == {
        "never: equal"
    }
    ahead = crossovers(hw.design(model=D, heads=H), MHA)
    assert (ahead["prefill_flops"], ahead["step_flops"], ahead["cache_bytes"]) == (
        "never",
        "-",
        "-",
    )


def test_seconds_change_sides_where_prices_do():
    gqa, mla = (hw.design(preset=name, model=4096, heads=32) for name in ("gqa", "mla"))
    (row,) = (
        row
        for row in hw.find_crossovers({"gqa": gqa, "mla": mla}).crossovers
        if row.quantity == "step_seconds"
    )
    first = row.ranges[0].first
    gains = [
        estimate_cost(gqa, hw.Workload(context=t)).total_operation("decode").seconds
        - estimate_cost(mla, hw.Workload(context=t)).total_operation("decode").seconds
        for t in (first - 1, first, 10 * first, 10**9)
    ]
    assert [gain > 0 for gain in gains] == [False, True, True, True]
    assert len(row.ranges) == 1


def test_changing_orders_are_reported_by_range():
    """A short chunk forms scores that a causal square leaves out; its smaller maps outweigh two or
    three tokens.
    """
    gqa, linear = (
        hw.design(preset="gqa", model=2048, heads=16),
        hw.design(preset="linear", model=2048, heads=16, dim=80),
    )
    less = [
        prefill_flops(linear, hw.Workload(context=t)) < prefill_flops(gqa, hw.Workload(context=t))
        for t in range(1, 300)
    ]
    assert [t for t in range(1, 299) if less[t] != less[t - 1]] == [1, 3, 181]
    (row,) = (
        row
        for row in hw.find_crossovers({"gqa": gqa, "it": linear}).crossovers
        if row.quantity == "prefill_flops"
    )
    assert (str(row), row.ranges) == ("from 2 to 3, from 182 on", ((2, 3), (182, None)))


@given(st.lists(st.integers(1, 7), max_size=4), st.booleans())
def test_spans_are_found_to_the_token(gaps, first):
    """Where changes lie an octave or more apart, none is missed."""
    changes = [4 ** sum(gaps[: n + 1]) + n for n in range(len(gaps))]

    def holds(tokens: int) -> bool:
        return first ^ (sum(change <= tokens for change in changes) % 2 == 1)

    ends = [1, *changes, None]
    expected = [(a, b and b - 1) for n, (a, b) in enumerate(pairwise(ends)) if first ^ (n % 2 == 1)]
    assert [tuple(span) for span in find_ranges(holds, 2**62)] == expected


def test_break_even_needs_two():
    for alone, message in (({"one": MHA}, "one"), ({}, "nothing"), (MHA, "AttentionSpec")):
        with pytest.raises(
            hw.SpecError,
            match=f"cannot find crossovers of {message}.*: it takes two specs; give two or more",
        ):
            hw.find_crossovers(alone)


def test_the_page_and_the_plain_values():
    found = hw.find_crossovers(
        {"mha": MHA, "window": hw.design(model=D, heads=H, pattern="window(100)")}, LOAD
    )
    assert "window (checked up to 1,099,511,627,776 tokens)" in str(found)
    assert max(map(len, str(found).splitlines())) <= 80
    rows = {row["quantity"]: row for row in found.data}
    assert list(rows) == list(QUANTITY_LABELS)
    assert rows["cache_bytes"]["cheaper"] == [{"first": 101, "last": None}]


# --- beside recurrences and convolutions ----------------------------------------------------------

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
    pattern = hw.Window(window)
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
    square = [4 * sums(t, 16, 128) < 4 * 2 * 16 * t * t for t in range(1, 3000)]
    assert found["linear"] == 3000 - square[::-1].index(False)


def test_growth_is_measured_in_ratios():
    found = measure_scaling(SIZES, lengths=(8, 16, 32))
    assert set(found.layers) == set(LAYERS) - {"dilated convolution"}
    assert all(seconds > 0 for each in found.layers.values() for seconds in each)
    assert found.growth_factors["GRU"] == tuple(b / a for a, b in pairwise(found.layers["GRU"]))
    assert max(map(len, str(found).splitlines())) <= 80


@pytest.mark.parametrize("tokens", [1, 2**40])
def test_the_table_fits_the_screen(tokens):
    assert (
        max(map(len, str(ComplexityTable.from_sizes(LayerSizes(tokens, 4096, 32))).splitlines()))
        <= 80
    )


@pytest.mark.parametrize(
    "options", [{"tokens": 0}, {"kernel": 1}, {"window": 1.5}, {"model": True}, {"heads": 3}]
)
def test_sizes_that_cannot_be_meant_are_refused(options):
    with pytest.raises(hw.SpecError, match=r"must be a whole number|does not divide"):
        ComplexityTable.from_sizes(LayerSizes(**({"tokens": 5, "model": 8, "heads": 2} | options)))
