"""Every preset works at other sizes."""

from __future__ import annotations

import pytest
import torch

import headwise as hw
from headwise.attention import reference
from headwise.attention.presets import PRESETS
from support.layer_cases import check_close

PUBLISHED = (
    "mha gqa mqa mla moh dcmha mohsa collaborative talking diff entmax linear performer "
    "longformer bigbird kha"
)


def layer_of(name: str, dtype=torch.float64) -> hw.Attention:
    """A preset in the sizes of the command line's example, in float64 unless told."""
    torch.manual_seed(0)
    return hw.Attention(hw.design(preset=name, model=256, heads=8)).to(dtype)


def test_all_that_are_promised_are_there():
    assert set(PUBLISHED.split()) <= set(PRESETS)
    assert all(make.__doc__ for make in PRESETS.values())


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_equals_its_definition(name):
    layer, x = layer_of(name).eval(), torch.randn(1, 6, 256, dtype=torch.float64)
    check_close(layer(x), reference.reference_attention(layer, x))


@pytest.mark.parametrize("name", PRESETS)
def test_gradients_are_finite_under_autocast(name):
    layer, x = layer_of(name, torch.float32).train(), torch.randn(2, 40, 256, requires_grad=True)
    tokens = hw.SequenceInfo.from_batch(x, lengths=[40, 0])  # a row of nothing but padding
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x, sequence=tokens)
    assert y.isfinite().all()
    y.float().square().sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())
