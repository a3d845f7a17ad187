"""Normalisers against renderings of their papers' formulas, one query at a time, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import headwise as hw

TOKENS, WIDTH, HEADS, DIM = 9, 24, 3, 8
Row = Callable[[list[float], float], list[float]]  # the scores of a row, and s of the head


def scalable_row(scores: list[float], s: float) -> list[float]:
    """n^(s z_i) / sum of n^(s z_j), equation 2 of 2501.19399."""
    powers = [len(scores) ** (s * score) for score in scores]
    return [power / sum(powers) for power in powers]


def softpick_row(scores: list[float], s: float) -> list[float]:
    """ReLU(e^x - 1) / (sum |e^x - 1|), equation 2 of 2504.20966."""
    excess = [math.exp(score) - 1 for score in scores]
    return [max(one, 0.0) / sum(map(abs, excess)) for one in excess]


def stick_row(scores: list[float], s: float) -> list[float]:
    """beta_j prod over k of j < k <= i of (1 - beta_k), equation 2 of 2410.17980, with the token
    itself.
    """
    beta = [1 / (1 + math.exp(-score)) for score in scores]
    return [one * math.prod(1 - later for later in beta[j + 1 :]) for j, one in enumerate(beta)]


NORMALISERS = {
    "ScalableSoftmax": scalable_row,
    "Softpick": softpick_row,
    "StickBreaking": stick_row,
}


def make_layer(name: str) -> hw.Attention:
    spec = hw.design(
        model=WIDTH, heads=HEADS, pattern="causal", normaliser=getattr(hw.parts, name)()
    )
    torch.manual_seed(1)
    layer = hw.Attention(spec).double().eval()
    for weight in layer.state_dict().values():
        weight.copy_(torch.randn_like(weight) / 3)
    return layer


def render(layer: hw.Attention, x: Tensor, row: Row) -> Tensor:
    """The output [T, D] of a causal layer, with the weights of each row by a formula."""
    state = layer.state_dict()
    q, k, v = ((x @ state[f"project.{side}"].T).unflatten(-1, (HEADS, DIM)) for side in "qkv")
    scale = [float(one) for one in state.get("normaliser.s", torch.ones(HEADS))]
    outputs = []
    for query in range(len(x)):
        heads = []
        for head in range(HEADS):
            scores = k[: query + 1, head] @ q[query, head] / math.sqrt(DIM)
            weights = row(scores.tolist(), scale[head])
            heads.append(torch.tensor(weights, dtype=x.dtype) @ v[: query + 1, head])
        outputs.append(torch.cat(heads) @ state["output.o"].T)
    return torch.stack(outputs)


@pytest.mark.parametrize("name", NORMALISERS)
def test_a_layer_is_its_formula(name: str):
    layer = make_layer(name)
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(
        layer(x[None])[0], render(layer, x, NORMALISERS[name]), atol=1e-7, rtol=1e-7
    )


def test_scalable_softmax_does_not_dilute():
    """A key that is 1 ahead of n - 1 others has the weight n^s / (n^s + n - 1)."""
    for count in (16, 4096):
        scores = torch.zeros(count, dtype=torch.float64)
        scores[3] = 1.0
        p = {"s": torch.tensor(2.0, dtype=torch.float64)}
        weights = hw.parts.ScalableSoftmax().normalise_row(scores, p)
        assert weights[3].item() == pytest.approx(count**2 / (count**2 + count - 1))
        assert scores.softmax(-1)[3].item() == pytest.approx(math.e / (math.e + count - 1))


@pytest.mark.parametrize("shift", [-2000.0, -60.0, 0.0, 60.0, 2000.0])
def test_softpick_is_finite_for_scores_of_any_size(shift: float):
    scores = (torch.tensor([0.5, -0.5, 0.0]) + shift).requires_grad_()
    weights = hw.parts.Softpick().normalise_row(scores, {})
    weights.sum().backward()
    assert weights.isfinite().all()
    assert scores.grad is not None
    assert scores.grad.isfinite().all()
    assert bool((weights.sum() <= 1).all())
    assert bool((weights > 0).any()) == (shift >= 0)


def test_what_a_stick_leaves_is_the_product():
    scores = torch.randn(7, dtype=torch.float64)
    weights = hw.parts.StickBreaking().normalise_row(scores, {})
    left = (1 - torch.sigmoid(scores)).prod()
    torch.testing.assert_close(1 - weights.sum(), left)


def test_a_window_gives_its_keys_in_the_order_of_positions():
    spec = hw.design(model=8, heads=2, pattern="window(4)", normaliser=hw.parts.StickBreaking())
    layer = hw.Attention(spec).double().eval()
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    cache = layer.cache(batch=2, capacity=50)
    for t in range(9):
        if t:
            preview = cache.preview(cache.next_positions(1))
            real = preview.position[preview.segment >= 0].unflatten(0, (2, -1))
            assert real.tolist() == [[*range(max(0, t - 3), t + 1)]] * 2
        layer(x[:, t : t + 1], cache=cache)


@pytest.mark.parametrize("size", [1e-30, 1e-39])
def test_tiny_sums_of_scores_are_divided_exactly(size: float):
    """Their reciprocals, or the squares of these, are beyond float32."""
    scores = torch.tensor([[[[0.0, 1.0, 3.0]]]]) * size
    scores.requires_grad_()
    allowed = torch.ones(1, 1, 1, 3, dtype=torch.bool)
    weights = hw.parts.SumNormaliser().normalise(scores, allowed, {})
    torch.testing.assert_close(weights.flatten(), torch.tensor([0.0, 0.25, 0.75]))
    (weights * torch.tensor([0.0, 1.0, 1.0])).sum().backward()
    assert scores.grad is not None
    if size > 1e-38:
        expected = torch.tensor([-0.25, 0.0, 0.0]) / size
        torch.testing.assert_close(scores.grad.flatten(), expected, atol=1e-3 / size, rtol=1e-5)
