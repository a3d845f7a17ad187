"""Depth-scaled initialisation: which parameters are sampled, and from which interval."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import headwise as hw
from support.layer_cases import base

WIDE, HIGH = 96, 160  # enough numbers that their spread is known to 2 %
EVERY = (
    hw.parts.QKNorm(),
    hw.parts.Alibi(),
    hw.parts.T5Bias(buckets=8),
    hw.parts.Shaw(),
    hw.parts.TalkingHeads(),
    hw.parts.HeadGate(start=1.0),
)


def changed(module: nn.Module, **options) -> set[str]:
    """The names of what a depth-scaled start draws."""
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    hw.attention.depth_scaled_init(module, depth=4, **options)
    return {
        name
        for name, tensor in module.state_dict().items()
        if not torch.equal(tensor, before[name])
    }


@pytest.mark.parametrize("exponent", [0.0, 0.25, 0.5])
@pytest.mark.parametrize("depth", [1, 2, 7, 16])
def test_the_interval_narrows_with_depth(depth: int, exponent: float):
    """gamma alpha / l^e; the spread of a uniform number is its bound over the square root of 3."""
    linear = nn.Linear(WIDE, HIGH)
    hw.attention.depth_scaled_init(linear, depth=depth, exponent=exponent, alpha=0.75)
    bound = math.sqrt(6 / (WIDE + HIGH)) * 0.75 / depth**exponent
    assert 0.995 * bound < linear.weight.abs().max().item() <= bound * (1 + 1e-6)
    assert linear.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)


def test_each_matrix_of_a_layer_by_its_own_widths():
    layer = hw.Attention(hw.design(model=WIDE, heads=8, kv=2, dim=24, bias="qkvo"))
    hw.attention.depth_scaled_init(layer, depth=9)
    widths = {"project.q": 192, "project.k": 48, "project.v": 48, "output.o": 192}
    for name, tensor in layer.state_dict().items():
        bound = math.sqrt(6 / (WIDE + widths[name]) / 9) if name in widths else 0.0
        assert 0.99 * bound <= tensor.abs().max().item() <= bound * (1 + 1e-6), name


def test_biases_norms_tables_and_constants_stay():
    layer = hw.Attention(base(bias="qkvo", modifiers=EVERY))
    assert changed(layer) == {"project.q", "project.k", "project.v", "output.o", "head_gate.gate"}
    assert changed(
        hw.Attention(base(project=hw.parts.MLAProjection(rank=8, rope=2, query_rank=9), vdim=5))
    ) == {
        *(f"project.{name}" for name in ("q_down", "q_up", "kv_down", "k_up", "v_up")),
        "output.o",
    }


def test_any_module():
    foreign = nn.TransformerEncoderLayer(10, 2, 13)
    weights = {
        "self_attn.in_proj_weight",
        "self_attn.out_proj.weight",
        "linear1.weight",
        "linear2.weight",
    }
    assert changed(foreign) == weights
    bound = math.sqrt(6 / 20 / 4)  # three square maps, not one of 30 rows
    assert 0.9 * bound < foreign.self_attn.in_proj_weight.abs().max().item() <= bound
    multihead_attention = nn.MultiheadAttention(10, 2, kdim=7, vdim=5)
    assert changed(multihead_attention) == {
        "q_proj_weight",
        "k_proj_weight",
        "v_proj_weight",
        "out_proj.weight",
    }
    mixed = nn.ModuleDict(
        {"embed": nn.Embedding(5, 10), "norm": nn.LayerNorm(10), "attend": hw.Attention(base())}
    )
    assert changed(mixed) == {
        f"attend.{name}" for name in ("project.q", "project.k", "project.v", "output.o")
    }


def test_shared_weights_are_sampled_once():
    merged = hw.attention.MergedAttention(base(kv=2))
    hw.attention.depth_scaled_init(merged, depth=4, generator=torch.Generator().manual_seed(5))
    alone = hw.Attention(base(kv=2))
    hw.attention.depth_scaled_init(alone, depth=4, generator=torch.Generator().manual_seed(5))
    for name, tensor in alone.state_dict().items():
        assert torch.equal(merged.state_dict()[f"cross.{name}"], tensor)


def test_several_modules_and_a_generator_of_ones_own():
    modules = [nn.Linear(3, 5), hw.Attention(base())]
    state = torch.get_rng_state()
    hw.attention.depth_scaled_init(modules, depth=2, generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.get_rng_state(), state)
    again = [nn.Linear(3, 5), hw.Attention(base())]
    hw.attention.depth_scaled_init(iter(again), depth=2, generator=torch.Generator().manual_seed(1))
    assert torch.equal(modules[0].weight, again[0].weight)
    assert torch.equal(modules[1].output["o"], again[1].output["o"])
