"""What a layer keeps between calls never changes a result, and makes the next call cheaper."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import headwise as hw
from headwise.attention import reference
from headwise.attention.backends.dispatch import BACKENDS
from headwise.kernels.capabilities import assume_points, current_points

SPEC = hw.design(model=24, heads=6, kv=2, pattern="causal()", modifiers=(hw.parts.Rotary(),))


@pytest.fixture
def layer() -> hw.Attention:
    torch.manual_seed(0)
    return hw.Attention(SPEC).double().eval()


def check_layer(layer: hw.Attention, tokens: int) -> None:
    """The layer agrees with the definition, which keeps nothing; on long texts with a copy, which
    computes all angles anew.
    """
    x = torch.randn(1, tokens, 24, dtype=torch.float64)
    with torch.no_grad():
        found = layer(x)
        expected = (
            reference.reference_attention(layer, x) if tokens < 9 else copy.deepcopy(layer)(x)
        )
    torch.testing.assert_close(found, expected)


def angles_of(layer: hw.Attention) -> Any:
    return layer.weights["rotary"].cached


def test_angles_are_computed_once_and_again_for_longer_texts(layer: hw.Attention):
    check_layer(layer, 5)
    (table,) = angles_of(layer).values()
    check_layer(layer, 128)
    assert angles_of(layer)[torch.float64] is table
    check_layer(layer, 131)
    assert angles_of(layer)[torch.float64].cos.shape[1] == 256


def test_decode_steps_read_the_same_angles(layer: hw.Attention):
    x = torch.randn(1, 150, 24, dtype=torch.float64)
    cache = layer.cache(batch=1, capacity=150)
    with torch.no_grad():
        expected = copy.deepcopy(layer)(x)
        outputs = [layer(x[:, :119], cache=cache)]
        outputs += [layer(x[:, t : t + 1], cache=cache) for t in range(119, 150)]
    torch.testing.assert_close(torch.cat(outputs, 1), expected)


@pytest.mark.parametrize("how", ["in place", "replaced", "loaded"])
def test_other_frequencies_have_other_angles(layer: hw.Attention, how: str):
    check_layer(layer, 7)
    weights = layer.weights["rotary"]
    frequency = weights["frequency"]
    if how == "in place":
        frequency.mul_(1.5)
    elif how == "replaced":
        weights._buffers["frequency"] = frequency * 1.5
    else:
        layer.load_state_dict({**layer.state_dict(), "rotary.frequency": frequency * 1.5})
    check_layer(layer, 7)


def test_what_inference_mode_kept_can_be_trained_with(layer: hw.Attention):
    x = torch.randn(1, 7, 24, dtype=torch.float64)
    with torch.inference_mode():
        expected = layer(x)
    layer.train()
    found = layer(x)
    found.sum().backward()
    torch.testing.assert_close(found, expected.clone())


def test_positions_read_in_inference_mode_can_be_trained_with():
    sequence = hw.SequenceInfo.contiguous(0, 5, "cpu")
    with torch.inference_mode():
        assert sequence.position.tolist() == [[0, 1, 2, 3, 4]]
        assert sequence.segment.tolist() == [[0] * 5]
    table = torch.nn.Embedding(7, 3)
    (table(sequence.position) + table(sequence.segment)).sum().backward()
    assert table.weight.grad is not None
    assert table.weight.grad[:, 0].tolist() == [6, 1, 1, 1, 1, 0, 0]


def test_copies_keep_nothing(layer: hw.Attention):
    check_layer(layer, 7)
    assert not angles_of(copy.deepcopy(layer))
    check_layer(copy.deepcopy(layer), 7)


def test_a_choice_of_backend_follows_the_crossovers(
    layer: hw.Attention, monkeypatch: pytest.MonkeyPatch
):
    ran: list[str] = []
    for name in ("flash_cpu", "sdpa"):
        attend = BACKENDS[name].attend

        def record(*args: Any, name: str = name, attend: Any = attend) -> Any:
            ran.append(name)
            return attend(*args)

        monkeypatch.setattr(BACKENDS[name], "attend", record)
    x = torch.randn(1, 40, 24)
    layer = layer.float()
    with torch.no_grad():
        for size in (1.0, 1e9, 1.0):
            with assume_points(current_points().with_sizes(flash_cpu=size)):
                layer(x)
                layer(x)
    assert ran == ["flash_cpu", "flash_cpu", "sdpa", "sdpa", "flash_cpu", "flash_cpu"]


def test_angles_of_fake_tensors_are_not_kept(layer: hw.Attention):
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        layer(torch.empty(1, 7, 24, dtype=torch.float64))
    assert not angles_of(layer)
    check_layer(layer, 7)


def count_calls(run: Callable[[], object]) -> int:
    """Python functions that a call enters, those of torch included."""
    count = 0

    def observe(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(observe)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.compile  # without the checks of shapes, which are calls too
def test_a_steady_call_enters_few_functions(layer: hw.Attention):
    """A budget: what a plain call does not use, it does not run."""
    layer = layer.float()
    x = torch.randn(1, 16, 24)
    cache = layer.cache(batch=1, capacity=256)
    with torch.no_grad():
        layer(torch.randn(1, 100, 24), cache=cache)
        for _ in range(3):
            layer(x)
            layer(x[:, :1], cache=cache)
        assert count_calls(lambda: layer(x)) <= 62
        assert count_calls(lambda: layer(x[:, :1], cache=cache)) <= 75
