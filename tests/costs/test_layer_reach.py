"""Reach of layers: derivatives against differences of inputs, chains and equivariance against their
definitions.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from headwise import SpecError
from headwise.costs.complexity import (
    DISTANCES,
    LAYERS,
    WIDTH,
    LayerReach,
    gradient_norms,
    layers_to_reach,
    longest_chain,
    measure_layer_reach,
)

TOKENS = 40
Table = dict[str, LayerReach]


@pytest.fixture(scope="module")
def table() -> Table:
    return {layer.name: layer for layer in measure_layer_reach(TOKENS)}


def make(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LAYERS[name]().double().eval()


def inputs(tokens: int = TOKENS) -> Tensor:
    return torch.randn(
        tokens, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )


def norm_by_differences(name: str, distance: int, step: float = 1e-5) -> float:
    """The derivative of the last output by one token, from central differences."""
    layer, squares = make(name), 0.0
    for channel in range(WIDTH):
        up, down = inputs(), inputs()
        up[-1 - distance, channel] += step
        down[-1 - distance, channel] -= step
        with torch.no_grad():
            squares += float(((layer(up)[-1] - layer(down)[-1]) / (2 * step)).square().sum())
    return squares**0.5


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("distance", DISTANCES)
def test_gradients_are_those_of_differences(name: str, distance: int, table: Table):
    assert table[name].gradients[distance] == pytest.approx(
        norm_by_differences(name, distance), rel=1e-4, abs=1e-9
    )


def test_gradients_of_attention_do_not_fall_and_those_of_recurrence_do(table: Table):
    attention, gru = (table[name].gradients for name in ("attention", "GRU"))
    assert attention[32] > attention[1] / 10
    assert gru[32] < gru[1] / 1e4
    assert table["convolution"].gradients[8] == 0


@pytest.mark.parametrize(
    ("name", "field", "layers"),
    [
        ("attention", TOKENS, 1),
        ("GRU", TOKENS, 1),
        ("LSTM", TOKENS, 1),
        ("convolution", 3, TOKENS - 1),
    ],
)
def test_receptive_fields_and_paths(name: str, field: int, layers: int, table: Table):
    assert (table[name].receptive_field, table[name].layers) == (field, layers)


def test_only_the_chain_of_recurrent_layers_grows(table: Table):
    longer = {layer.name: layer.chain for layer in measure_layer_reach(2 * TOKENS)}
    grown = {name: longer[name] - layer.chain for name, layer in table.items()}
    assert grown["attention"] == grown["convolution"] == 0
    assert grown["GRU"] >= 3 * TOKENS
    assert grown["LSTM"] >= 3 * TOKENS


def test_the_longest_of_several_paths_counts():
    x = torch.ones(3, requires_grad=True)
    assert longest_chain(x + x.exp().exp().exp()) == 5


def test_equivariance(table: Table):
    def errors(layer: LayerReach) -> tuple[bool, bool]:
        return layer.shift < 1e-12, layer.permutation < 1e-12

    assert {name: errors(layer) for name, layer in table.items()} == {
        "attention": (True, True),
        "GRU": (False, False),
        "LSTM": (False, False),
        "convolution": (True, False),
    }


def test_parameters_and_state(table: Table):
    d = WIDTH
    assert {name: layer.parameters for name, layer in table.items()} == {
        "attention": 4 * d * d,
        "GRU": 3 * (2 * d * d + 2 * d),
        "LSTM": 4 * (2 * d * d + 2 * d),
        "convolution": 3 * d * d + d,
    }
    assert {name: layer.state_bytes // 4 for name, layer in table.items()} == {
        "attention": 2 * TOKENS * d,
        "GRU": d,
        "LSTM": 2 * d,
        "convolution": 2 * d,
    }


def test_a_layer_without_any_path_is_refused():
    with pytest.raises(SpecError, match="does not depend on the first after 4 layers"):
        layers_to_reach(lambda x_TD: x_TD * 2, torch.ones(4, 2))


def test_norms_of_a_mean():
    norms = gradient_norms(
        lambda x_TD: x_TD.mean(0, keepdim=True), torch.zeros(4, 9, dtype=torch.float64)
    )
    assert norms.tolist() == pytest.approx([3 / 4] * 4)
