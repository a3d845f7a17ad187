"""Diversity of heads in a layer, and collapse of tokens over depth."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import headwise as hw
from headwise.observe.head_analysis.head_redundancy import (
    DiversitySums,
    RedundancyOptions,
    measure_redundancy,
)
from headwise.observe.head_analysis.head_similarity import HeadLocation, NonSinkRows, spread_of_sets
from headwise.observe.head_analysis.rank_analysis import (
    measure_rank_collapse,
    rank_one_residual,
    singular_value_ratio,
)
from headwise.report.render import to_plain
from support.number_examples import make_examples, small_gpt2

Array = NDArray[np.float64]


def heads(layers: int, each: int) -> tuple[HeadLocation, ...]:
    return tuple(
        HeadLocation(f"decoder.{layer}.attention", layer, head)
        for layer in range(layers)
        for head in range(each)
    )


def random_weights(
    count: int, seed: int, rows: int = 3, keys: int = 7, sharp: float = 2.0
) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return (sharp * torch.randn(count, rows, keys, generator=draw)).softmax(-1)


def rows_of(weights: Tensor) -> NonSinkRows:
    return NonSinkRows(weights, torch.ones(weights.shape[:2], dtype=torch.bool))


def spread(weights: Array) -> float:
    """H(mean of heads) - mean of H, over log of their number, the mean over rows."""

    def entropy(row: Array) -> float:
        return -sum(float(p) * math.log(p) for p in row if p > 0)

    each = [
        entropy(weights[:, row].mean(0)) - np.mean([entropy(head[row]) for head in weights])
        for row in range(weights.shape[1])
    ]
    return float(np.mean(each) / math.log(len(weights)))


# --- the spread of a layer ------------------------------------------------------------------------


def test_the_least_and_the_most_that_heads_spread():
    alike, separate = torch.zeros(4, 2, 9), torch.zeros(4, 2, 9)
    alike[..., 0] = 1
    separate[torch.arange(4), :, torch.arange(4)] = 1
    both = torch.cat([alike, separate])
    sums, counts = spread_of_sets(both, torch.eye(2).repeat_interleave(4, 1), torch.ones(8, 2))
    assert (sums / counts).tolist() == pytest.approx([0, 1], abs=1e-6)


def test_the_spread_of_a_row_is_that_of_the_heads_that_count_it():
    weights = random_weights(6, 3, rows=5)
    counted = torch.rand(6, 5, generator=torch.Generator().manual_seed(2)) < 0.6
    sets = torch.tensor([[1.0, 1, 1, 0, 0, 0], [0, 1, 0, 1, 1, 1]])
    sums, counts = spread_of_sets(weights * counted[..., None], sets, counted)
    result = weights.double().numpy()
    for n, members in enumerate(([0, 1, 2], [1, 3, 4, 5])):
        by_row = [[head for head in members if counted[head, row]] for row in range(5)]
        expected = [
            spread(result[heads][:, [row]]) for row, heads in enumerate(by_row) if len(heads) > 1
        ]
        assert counts[n] == len(expected)
        assert float(sums[n]) == pytest.approx(sum(expected), abs=1e-5)


def test_permuted_heads_give_a_calibrated_null():
    locations, least, chances = heads(3, 4), [], []
    for trial in range(80):
        adding = DiversitySums(locations, 39, trial)
        adding.add(0, rows_of(random_weights(12, trial)))
        found = adding.layer_diversities()
        least.append(min(one.p for one in found))
        chances += [one.spread.value - one.spread.chance for one in found]
    assert np.mean(np.array(least) <= 0.1) < 0.2  # corrected over three layers
    assert abs(np.mean(chances)) < 0.01


def test_a_layer_whose_heads_are_alike_is_found():
    locations, weights = heads(5, 6), random_weights(30, 1, rows=20, sharp=4.0)
    weights[6:12] = weights[6] * 0.9 + weights[6:12] * 0.1
    adding = DiversitySums(locations, 99, 0)
    adding.add(0, rows_of(weights))
    found = adding.layer_diversities()
    assert found[1].p < 0.05
    assert found[1].spread.value < 0.5 * found[1].spread.chance
    assert [one.p > 0.05 for one in found] == [True, False, True, True, True]


def test_a_single_head_or_a_single_layer_has_no_chance():
    for locations in (heads(1, 3), heads(3, 1)):
        adding = DiversitySums(locations, 9, 0)
        adding.add(0, rows_of(random_weights(3, 0)))
        found = adding.layer_diversities()
        assert all(math.isnan(one.p) for one in found)
        assert to_plain(found[0])["p"] is None


def test_the_spread_of_a_model_is_that_of_its_layers():
    net, texts = small_gpt2(), make_examples(3)
    found = (
        measure_redundancy(net, texts, options=RedundancyOptions(num_permutations=9))
        .readers[0]
        .layers
    )
    recorded: list[Array] = []
    for text in texts:
        probes = {f"decoder.{n}.attention": hw.Probe("weights") for n in range(2)}
        net.probes = probes
        with torch.no_grad():
            net(text.inputs["x"])
        net.probes = {}
        recorded.append(
            np.stack([probe.tensors["weights"][0].double().numpy() for probe in probes.values()])
        )
    count = sum(one.shape[2] for one in recorded)
    for layer, one in enumerate(found):
        expected = sum(spread(weights[layer]) * weights.shape[2] for weights in recorded) / count
        assert one.spread.value == pytest.approx(expected, abs=1e-6)
        assert one.spread.low <= one.spread.value <= one.spread.high


# --- depth ----------------------------------------------------------------------------------------


def test_distance_of_tokens_from_their_mean():
    x = torch.randn(7, 5, dtype=torch.float64).numpy()
    middle = x - x.mean(0)
    assert rank_one_residual(torch.tensor(x)) == pytest.approx(
        np.sqrt((middle**2).sum() / (x**2).sum())
    )
    values = np.linalg.svd(x, compute_uv=False)
    assert singular_value_ratio(torch.tensor(x)) == pytest.approx(values[1] / values[0])
    assert singular_value_ratio(torch.ones(1, 4)) == 0.0


def states(net: Any, ids: Tensor) -> Iterator[Tensor]:
    """The states before any layer and behind each, by running the layers one after the other."""
    from headwise.models.transformer import resolve_sequence

    (stack,) = net.stacks.values()
    h, types = stack.embed(ids)
    at = resolve_sequence(h, None, None)
    h = stack.place(h, at, types)
    yield h[0]
    from headwise.models.block import EarlierLayers, LayerInputs

    for layer in stack.blocks:
        h = layer(h, LayerInputs(at, None, None, None, {}, EarlierLayers()))
        yield h[0]


def test_diversity_of_a_native_model():
    net, texts = small_gpt2(layers=3), make_examples(4)
    found = measure_rank_collapse(net, texts)
    with torch.no_grad():
        values = [[rank_one_residual(x) for x in states(net, text.inputs["x"])] for text in texts]
    assert [one.layers for one in found] == [0, 1, 2, 3]
    assert [one.residual.value for one in found] == pytest.approx(np.mean(values, 0))
    assert all(one.residual.low <= one.residual.value <= one.residual.high for one in found)
    assert not any(module._forward_hooks for module in net.modules())


@pytest.mark.parametrize("name", ["bert", "gpt2", "bart"])
def test_diversity_of_transformers_models(name: str):
    pytest.importorskip("transformers")
    from dataclasses import replace

    from support.transformers_models import ZOO

    model, texts = ZOO[name].build(), make_examples(3, "input_ids")
    if name == "bart":
        texts = [
            replace(one, inputs=one.inputs | {"decoder_input_ids": one.inputs["input_ids"][:, :5]})
            for one in texts
        ]
    found = measure_rank_collapse(model, texts)
    with torch.no_grad():
        values = [model(**one.inputs, output_hidden_states=True) for one in texts]
    key = "decoder_hidden_states" if name == "bart" else "hidden_states"
    expected = np.mean([rank_one_residual(one[key][1][0]) for one in values])
    stack = "decoder" if name == "bart" else "states"
    assert {one.stack for one in found} == (
        {"encoder", "decoder"} if name == "bart" else {"states"}
    )
    assert next(
        one for one in found if (one.stack, one.layers) == (stack, 1)
    ).residual.value == pytest.approx(expected)
