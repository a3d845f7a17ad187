"""Training steps compile once for each shape."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

import headwise as hw
from models.decoding_models import decoder_spec


@pytest.mark.compile
def test_a_training_step_is_compiled_once_for_each_shape(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch.compiler.reset()
    counters.clear()
    net = hw.build(decoder_spec(), seed=0).train()
    hidden, recorded = torch.compile(net.hidden), []
    optimiser = torch.optim.AdamW(net.parameters())
    for _ in range(5):
        loss = net.apply_head(hidden(torch.randint(11, (3, 7)))).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        recorded.append(counters["stats"]["unique_graphs"])
    assert recorded == recorded[:1] * 5
    net.eval()
    with torch.no_grad():
        for _ in range(2):
            hidden(torch.randint(11, (3, 7)))
            recorded.append(counters["stats"]["unique_graphs"])
    assert recorded[5:] == [recorded[0] + 1] * 2  # answering is another graph, made once
    torch.compiler.reset()
