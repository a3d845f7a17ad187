"""Random features are sampled again, in place and in training, and a saved model keeps those it
had.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import headwise as hw
from headwise.attention.parts.feature_map import sample_orthogonal_gaussian
from headwise.models.model_spec import ModelSpec, StackSpec
from headwise.training import train
from support.small_training import Echo, short_recipe


@dataclass(frozen=True)
class RandomFeatures(Echo):
    """The echo task with two layers of random features."""

    name: ClassVar[str] = "random-features"

    def model(self) -> ModelSpec:
        described = super().model()
        stack = described.stacks[0]
        block = replace(stack.layers[0], attention=hw.design(preset="performer", model=8, heads=2))
        stack = StackSpec.from_blocks("decoder", 8, [block, block], embedding=stack.embedding)
        return replace(described, stacks=(stack,))


def directions(net: torch.nn.Module) -> list[torch.Tensor]:
    return [
        constant.clone()
        for name, constant in net.named_buffers()
        if name.endswith("similarity.directions")
    ]


def test_every_layer_gets_new_features_of_its_own():
    net = hw.build(RandomFeatures().model())
    weights, before = (
        {name: p.detach().clone() for name, p in net.named_parameters()},
        directions(net),
    )
    assert hw.attention.redraw_features(net, 5) == 2
    after = directions(net)
    assert all(not torch.equal(*pair) for pair in [*zip(before, after, strict=True), after])
    expected = sample_orthogonal_gaussian(5 * 1_000_003 + 1, tuple(after[1].shape)).to(
        after[1].dtype
    )
    torch.testing.assert_close(after[1], expected)
    assert all(torch.equal(p, weights[name]) for name, p in net.named_parameters())
    hw.attention.redraw_features(net, 6)
    assert not torch.equal(directions(net)[0], after[0])
    hw.attention.redraw_features(net, 5)
    assert all(map(torch.equal, directions(net), after))


def test_models_without_random_features_stay_as_they_are():
    net = hw.build(Echo().model())
    assert hw.attention.redraw_features(net, 1) == 0
    assert (
        hw.attention.redraw_features(hw.Attention(hw.design(preset="linear", model=8, heads=2)), 1)
        == 0
    )
    with pytest.raises(hw.SpecError, match="seed=-1 is not a valid seed"):
        hw.attention.redraw_features(net, -1)


def test_training_redraws_features_and_a_resumed_run_ends_with_the_same_bits(tmp_path: Path):
    recipe = short_recipe(steps=6, redraw_features=2, seed=3)
    whole = train(RandomFeatures(), recipe=recipe, out=tmp_path / "whole").net
    expected = hw.build(RandomFeatures().model())
    hw.attention.redraw_features(expected, 3 + 5)  # before steps 3 and 5
    assert all(map(torch.equal, directions(whole), directions(expected)))
    again = hw.load(tmp_path / "whole")
    assert all(
        torch.equal(again.state_dict()[name], tensor) for name, tensor in whole.state_dict().items()
    )
    fixed = train(
        RandomFeatures(), recipe=short_recipe(steps=6, seed=3), out=tmp_path / "fixed"
    ).net
    assert all(map(torch.equal, directions(fixed), directions(hw.build(RandomFeatures().model()))))
