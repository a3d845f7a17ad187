"""Linear attention in chunks, against the definition over all pairs in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.attention.backends import linear_attention
from support.layer_cases import check_close

SPECS = {
    "elu": hw.design(preset="linear", model=12, heads=3, pattern="causal"),
    "favor": hw.design(preset="performer", model=12, heads=3, pattern="causal"),
    "average": hw.design(
        normaliser=hw.parts.AverageNormaliser(), model=12, heads=3, pattern="causal"
    ),
}


def outputs_and_gradients(layer: hw.Attention, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    weights = [one for one in layer.parameters() if one.requires_grad]
    inputs = [x, *weights]
    grads = torch.autograd.grad(y.square().sum(), inputs, allow_unused=True, materialize_grads=True)
    return [y.detach(), *grads]


@pytest.mark.parametrize("name", SPECS)
def test_every_number_of_chunks_equals_all_pairs(name: str, monkeypatch: pytest.MonkeyPatch):
    """One chunk, whole groups of chunks, one chunk more, and a chunk that is not whole."""
    monkeypatch.setattr(linear_attention, "CHUNK_SIZE", 4)
    monkeypatch.setattr(linear_attention, "CHUNKS_TOGETHER", 2)
    torch.manual_seed(0)
    layer = hw.Attention(SPECS[name], backend="linear").double()
    pairs = hw.Attention(SPECS[name], backend="dense").double()
    pairs.load_state_dict(layer.state_dict())
    for count in range(1, 23):
        x = torch.randn(2, count, 12, dtype=torch.float64)
        found, exact = (outputs_and_gradients(one, x) for one in (layer, pairs))
        for one, other in zip(found, exact, strict=True):
            check_close(one, other, rtol=1e-10, atol=1e-12)
