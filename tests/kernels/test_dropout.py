"""Dropout on the CPU: its rate, independence of elements, and unchanged means."""

from __future__ import annotations

import math

import pytest
import torch

from headwise.kernels.counter_rng import dropout

COUNT = 1_000_003


@pytest.mark.parametrize("rate", [0.1, 0.25, 0.5, 0.9])
def test_the_dropout_rate_is_the_given_one(rate):
    torch.manual_seed(0)
    y = dropout(torch.ones(COUNT), rate, training=True)
    stay = (y != 0).double()
    assert (
        abs(stay.mean().item() - (1 - rate)) < 4 * math.sqrt(rate * (1 - rate) / COUNT) + 1 / 2**17
    )
    assert y.max().item() == pytest.approx(1 / (1 - rate), rel=1e-3)
    assert y.double().mean().item() == pytest.approx(1.0, abs=0.02)


def test_each_alone():
    """No neighbour, near or as far as numbers that are drawn together, tells anything."""
    torch.manual_seed(1)
    stay = (dropout(torch.ones(COUNT), 0.5, training=True) != 0).double() - 0.5
    for far in (1, 2, 3, 4, 5, 8):
        assert abs((stay[far:] * stay[:-far]).mean().item()) < 4 * 0.25 / math.sqrt(COUNT)


def test_gradients_pass_where_numbers_did():
    torch.manual_seed(2)
    x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    y = dropout(x, 0.3, training=True)
    y.sum().backward()
    assert torch.allclose(x.grad * x, y)
    assert 0 < (y == 0).sum() < y.numel()


def test_a_seed_repeats_dropout_and_rate_zero_draws_no_number():
    x = torch.ones(3, 5)
    torch.manual_seed(3)
    first = dropout(x, 0.5, training=True)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert torch.equal(dropout(x, 0.0, training=True), x)
    assert torch.equal(dropout(x, 0.5, training=False), x)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(dropout(x, 0.5, training=True), first)
    assert not dropout(x, 0.999_999, training=True).any()
