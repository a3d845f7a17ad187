"""Names of heads: every way to write one means the same head, and one way prints it."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import pytest
import torch

import headwise as hw
from headwise.observe.head_names import find_layer, locate_head, parse_heads, print_head
from support.number_examples import make_examples, small_gpt2
from support.refusals import refused_cases

IDS = torch.tensor([[3, 1, 4, 1, 5]])


class Layer(NamedTuple):
    name: str
    stack: str
    kind: str
    layer: int


LAYERS = [
    Layer("encoder.1.attention", "encoder", "attention", 1),
    Layer("decoder.1.attention", "decoder", "attention", 1),
    Layer("decoder.1.cross", "decoder", "cross", 1),
    Layer("decoder.2.attention", "decoder", "attention", 2),
]


@pytest.mark.parametrize(
    ("name", "site"),
    [
        ("E1H3", "encoder.1.attention"),
        ("D1 H3", "decoder.1.attention"),
        ("X1H3", "decoder.1.cross"),
        ("X-1H3", "decoder.1.cross"),
        ("D-1.3", "decoder.2.attention"),
        ("L2H3", "decoder.2.attention"),
        ("2.3", "decoder.2.attention"),
        ("-1:3", "decoder.2.attention"),
        ("decoder.1.cross:3", "decoder.1.cross"),
    ],
)
def test_heads_have_short_names(name: str, site: str):
    assert locate_head(name, LAYERS) == (site, 3)


@pytest.mark.parametrize(("name", "why"), refused_cases(__file__, "names of heads", globals()))
def test_wrong_names_of_heads(name: str, why: str):
    with pytest.raises(ValueError, match=why):
        locate_head(name, LAYERS)


def test_a_printed_name_is_read_back():
    sites = [layer.name for layer in LAYERS]
    printed = [print_head(site, 3, sites) for site in sites]
    assert printed == ["E1H3", "D1H3", "X1H3", "D2H3"]
    assert [locate_head(name, LAYERS) for name in printed] == [(site, 3) for site in sites]
    assert print_head("decoder.2.attention", 0, ["decoder.2.attention"]) == "L2H0"
    assert print_head("attention", 2, ["attention"]) == "attention:2"
    assert parse_heads("attention:2") == ("attention", (2,))


def test_the_name_of_a_site_wins_over_a_number():
    odd = [Layer("1", "model", "attention", 0), Layer("model.1.attention", "model", "attention", 1)]
    assert find_layer("1", odd, "the model").layer == 0


@pytest.mark.parametrize(
    "heads", [["L1H2"], "L1H2", ["1.2"], ["decoder.1.attention:2"], [(-1, 2)], ["-1:2"]]
)
def test_ablations_take_every_name(heads: Any):
    net = small_gpt2()
    with torch.no_grad(), hw.ablate(net, [(1, 2)]):
        expected = net(IDS)
    with torch.no_grad(), hw.ablate(net, heads):
        assert torch.equal(net(IDS), expected)
    assert not torch.equal(net(IDS), expected)


def test_an_ablation_without_with_is_reported():
    net = small_gpt2()
    with pytest.raises(ValueError, match=r"no head 9; give heads in 0\.\.3"):
        hw.ablate(net, ["L1H9"])
    ablation = hw.ablate(net, ["L0H0", "L1H2"])
    assert repr(ablation) == "<2 edited heads of Transformer, within `with` only>"
    with pytest.warns(UserWarning, match="2 edited heads .* was never entered; write with"):
        del ablation
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with hw.ablate(net, ["L0H0"]):
            net(IDS)


def test_a_trace_is_indexed_by_names_of_heads():
    traced = hw.trace(small_gpt2(), make_examples(1)[0].model_inputs)
    expected = traced.head_weights("decoder.1.attention", 2)
    assert (traced["L1H2"] == expected).all()
    for layer in ("decoder.1.attention", 1, -1, "L1"):
        weights = traced.weights(layer)
        assert weights.shape == (4, *expected.shape)
        assert (weights[2] == expected).all()
    with pytest.raises(ValueError, match=r"the trace has no layer L7; its layers are 0\.\.1"):
        traced["L7H0"]
