"""Linear attention in chunks, against the definition over all pairs in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.attention.backends import linear_attention
from headwise.attention.parts.feature_map import FeatureMap
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


def test_wide_heads_keep_fewer_states_in_memory(monkeypatch: pytest.MonkeyPatch):
    counts: list[int] = []
    states = linear_attention._StateReader._states_of_chunks

    def record(self: Any, state: Any, chunks: Any, is_last: bool) -> Any:
        counts.append(chunks[0].shape[1])
        return states(self, state, chunks, is_last)

    monkeypatch.setattr(linear_attention._StateReader, "_states_of_chunks", record)
    for heads in (32, 1):
        spec = hw.design(preset="linear", model=512, heads=heads, pattern="causal")
        counts.clear()
        with torch.no_grad():
            hw.Attention(spec, backend="linear")(torch.randn(1, 33 * 64, 512))
        assert max(counts) == (32 if heads == 32 else 7)


def test_an_own_part_gets_a_state_of_every_row(monkeypatch: pytest.MonkeyPatch):
    """A sum may be written by shapes: the state has as many rows as the keys."""
    rows: list[tuple[int, int]] = []
    update = FeatureMap.update_state

    def record(self: Any, state: Any, k: Tensor, *rest: Any) -> Any:
        rows.append((len(state["kv"]), len(k)))
        return update(self, state, k, *rest)

    monkeypatch.setattr(FeatureMap, "update_state", record)
    hw.Attention(SPECS["elu"], backend="linear")(torch.randn(2, 200, 12))
    assert rows
    assert all(one == other > 0 for one, other in rows)


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
