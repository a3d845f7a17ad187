"""A dilated window is a plain one over every rate-th token: no residue class meets another."""

from __future__ import annotations

import pytest
import torch

import headwise as hw
from support import layer_cases as cases
from support.layer_cases import base, check_close

T = 17
CASES = [
    (keys, rate, after)
    for keys, after in ((1, 0), (4, 0), (5, 2), (3, 2))
    for rate in (1, 2, 3, 20)
]


def layers(keys: int, rate: int, after: int) -> tuple[hw.Attention, hw.Attention]:
    """A dilated layer, and a plain one with the same weights."""
    dilated = cases.layer(base(kv=2, vdim=5, pattern=hw.patterns.Dilated(keys, rate, after=after)))
    window = hw.Attention(
        base(kv=2, vdim=5, pattern=hw.patterns.Window(keys, after=after))
    ).double()
    window.load_state_dict(dilated.state_dict())
    return dilated, window


@pytest.mark.parametrize(("keys", "rate", "after"), CASES)
def test_each_residue_class_is_a_sequence_of_its_own(keys: int, rate: int, after: int):
    dilated, window = layers(keys, rate, after)
    x = torch.randn(3, T, 10).double()
    y = dilated(x)
    for first in range(min(rate, T)):
        check_close(y[:, first::rate], window(x[:, first::rate]))


@pytest.mark.parametrize(("keys", "rate", "after"), CASES)
def test_residue_classes_are_segments(keys: int, rate: int, after: int):
    """Packed side by side, each token at its place in its class."""
    dilated, window = layers(keys, rate, after)
    x, place = torch.randn(3, T, 10).double(), torch.arange(T)[None]
    check_close(window(x, sequence=hw.SequenceInfo(place // rate, place % rate)), dilated(x))


@pytest.mark.parametrize(("keys", "rate", "after"), CASES)
def test_pairs_add_up(keys: int, rate: int, after: int):
    lengths = [len(range(first, T, rate)) for first in range(rate)]
    window = hw.patterns.Window(keys, after=after)
    expected = sum(window.pairs(range(n), range(n)) for n in lengths)
    assert hw.patterns.Dilated(keys, rate, after=after).pairs(range(T), range(T)) == expected
