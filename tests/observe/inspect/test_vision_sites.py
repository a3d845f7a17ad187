"""Attentions of vision libraries, found by name and by a run: ablation, weights, and the model
afterwards.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.observe.inspect.attention_sites import ADAPTERS
from observe.inspect.module_state import read_state
from support.vision_attentions import CASES, HEADS, EvaAttention

EXAMPLES = ("without", "with", "twice")


def list_sites(model: nn.Module, x: Tensor, example: str) -> list[hw.Site]:
    """The sites, without an example, with one, and with one after a search without."""
    if example == "with":
        return hw.sites(model, x)
    found = hw.sites(model)
    return found if example == "without" else hw.sites(model, x)


def with_zero_head(model: nn.Module, name: str, head: int) -> nn.Module:
    """A copy whose second layer has no head `head`, by its own weights."""
    other = copy.deepcopy(model)
    weight = other[1].get_submodule(CASES[name].projection).weight
    width = weight.shape[1] // HEADS
    weight[:, head * width : (head + 1) * width] = 0
    return other


@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_ablation_equals_weights_set_to_zero_by_hand(name: str, example: str):
    model, x = CASES[name].build()
    before, whole = read_state(model), model(x)
    found = list_sites(model, x, example)
    assert [(site.heads, site.layer) for site in found] == [(HEADS, 0), (HEADS, 1)]
    if (name, example) == ("torchvision swin", "without"):
        reason = r"projection never ran as a module.*hw.sites\(model, example\)"
        with pytest.raises(ValueError, match=reason), hw.ablate(model, [(1, 1)]):
            model(x)
        hw.sites(model, x)
    expected = with_zero_head(model, name, 1)(x)
    with hw.ablate(model, [(1, 1)]):
        ablated = model(x)
    assert torch.allclose(ablated, expected, atol=1e-5)
    assert not torch.allclose(ablated, whole, atol=1e-2)
    assert torch.equal(model(x), whole)
    assert read_state(model) == before


@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.parametrize("name", CASES)
def test_traced_weights_equal_an_independent_softmax(name: str, example: str):
    model, x = CASES[name].build()
    before = read_state(model)
    list_sites(model, x, example)
    if example == "without" and isinstance(model[0], EvaAttention):
        with pytest.raises(
            ValueError,
            match=r"cannot (observe its weights|be observed): .*hw.sites\(model, example\)",
        ):
            hw.trace(model, x)
        assert read_state(model) == before
        return
    recorded = hw.trace(model, x)
    expected = CASES[name].expected_weights(model, x)
    for head in range(HEADS):
        for row in range(len(expected)):
            weights = torch.from_numpy(recorded.head_weights(0, head, row=row)).double()
            assert torch.allclose(weights, expected[row, head], atol=1e-5)
    assert expected.std(-1).min() > 1e-3
    assert read_state(model) == before


@pytest.mark.parametrize("name", CASES)
def test_a_search_changes_nothing(name: str):
    model, x = CASES[name].build()
    before = read_state(model)
    for adapter in ADAPTERS:
        list(adapter(model))
    hw.sites(model, x)
    with pytest.raises(ValueError, match="cannot run on this example"):
        hw.sites(model, x[..., :3])
    assert read_state(model) == before


@torch.no_grad()
def test_contexts_entered_before_and_after_an_example_nest():
    model, x = CASES["timm vit"].build()
    other = copy.deepcopy(model)
    for head in (0, 2):
        other[1].proj.weight[:, 5 * head : 5 * head + 5] = 0
    with hw.ablate(model, [(1, 0)]):
        hw.sites(
            model, x
        )  # the inner context hooks the attention function, the outer one the projection
        with hw.ablate(model, [(1, 2)]):
            assert torch.allclose(model(x), other(x), atol=1e-5)
        with (
            hw.ablate(model, [(1, 2)]),
            hw.ablate(model, {(1, 1): 0.5}),
            hw.ablate(model, {(1, 1): 2.0}),
        ):
            assert torch.allclose(model(x), other(x), atol=1e-5)
