"""The Open screen in a browser: sizes of the model and of its runs, and texts to try."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import headwise as hw
from headwise.observe.traces.attention_trace import Trace
from headwise.viewer.open_model import OpenModel
from headwise.viewer.view_document import estimate_memory
from support.page_models import GPT


def make_run(tokens: int) -> tuple[Trace, Any]:
    net = hw.build(hw.families.read_model_spec(GPT), seed=0).eval()
    ids = torch.randint(0, 40, (1, tokens), generator=torch.Generator().manual_seed(0))
    return hw.trace(net, ids, capture=hw.Capture(extra=("v",))), net


def test_the_memory_of_a_long_run_is_that_of_one():
    """The estimate from 8 tokens is what a run of 64 tokens records, masks apart."""
    short, net = make_run(8)
    found = estimate_memory(short, net, 64)
    long, _ = make_run(64)
    recorded = sum(array.nbytes for layer in long.layers for array in layer.arrays.values())
    assert found["longestBytes"] == pytest.approx(recorded, rel=0.01)
    assert found["parameters"] == sum(one.numel() for one in net.parameters())
    assert found["weightBytes"] == 4 * sum(one.numel() for one in net.parameters())
    assert estimate_memory(short, None, 64)["parameters"] is None


def test_a_trace_alone_has_no_parameters():
    trace, _ = make_run(8)
    memory = OpenModel(trace).describe()["memory"]
    assert memory["parameters"] is None
    assert memory["recordBytes"] == trace.nbytes
