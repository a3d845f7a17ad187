"""`attend`: the formula in float64, its shapes, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw

B, H, G, T, S, K, V = 2, 6, 2, 5, 7, 8, 4


def tensors(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return (
        torch.randn(B, H, T, K, dtype=dtype),
        torch.randn(B, G, S, K, dtype=dtype),
        torch.randn(B, G, S, V, dtype=dtype),
    )


def render(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, bias: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The formula, head by head and query by query."""
    output, weights = (
        torch.zeros(B, H, T, V, dtype=torch.float64),
        torch.zeros(B, H, T, S, dtype=torch.float64),
    )
    for b, h, t in [(b, h, t) for b in range(B) for h in range(H) for t in range(T)]:
        group = h // (H // G)
        scores = torch.stack(
            [query[b, h, t].dot(key[b, group, s]) * scale + bias[b, h, t, s] for s in range(S)]
        )
        powers = torch.where(allowed[b, h, t], (scores - scores.max()).exp(), 0.0)
        if powers.sum() > 0:
            weights[b, h, t] = powers / powers.sum()
        output[b, h, t] = weights[b, h, t] @ value[b, group]
    return output, weights


MASK = torch.rand(B, 1, T, S, generator=torch.Generator().manual_seed(1)) > 0.4
MASK[0, 0, 2] = False  # a query that may attend to nothing
BIAS = torch.randn(1, H, T, S, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"mask": MASK},
        {"mask": MASK[1, 0].int()},
        {"bias": BIAS},
        {"scale": 0.3, "mask": MASK, "bias": BIAS},
    ],
    ids=["plain", "causal", "mask", "zeros and ones", "bias", "all"],
)
def test_outputs_and_weights_are_those_of_the_formula(options: dict[str, Any], need_weights: bool):
    query, key, value = tensors()
    allowed = torch.ones(B, H, T, S, dtype=torch.bool)
    if options.get("causal"):
        allowed = allowed.tril(S - T)
    if "mask" in options:
        allowed = allowed & options["mask"].bool()
    bias = options.get("bias", torch.zeros(1, 1, 1, 1)).expand(B, H, T, S)
    expected = render(query, key, value, allowed, bias, options.get("scale", K**-0.5))
    output, weights = hw.attend(query, key, value, need_weights=need_weights, **options)
    torch.testing.assert_close(output, expected[0], rtol=1e-9, atol=1e-9)
    assert (weights is not None) == need_weights
    if weights is not None:
        # weights of a probe are float32 or more
        torch.testing.assert_close(weights, expected[1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["plain", "causal", "mask", "bias", "scale"])
def test_errors_are_about_those_of_torch(case: str, dtype: torch.dtype):
    """Both against the formula in float64 of the same rounded inputs."""
    query, key, value = tensors(dtype)
    # torch gives NaN for a query that may attend to nothing
    visible = MASK | ~MASK.any(-1, keepdim=True)
    later = torch.ones(1, 1, T, S, dtype=torch.bool).tril(S - T)
    allowed = {"causal": later, "mask": visible}.get(case, torch.ones(1, 1, T, S, dtype=torch.bool))
    added = BIAS.to(dtype) if case == "bias" else torch.zeros(1, 1, 1, 1, dtype=dtype)
    scale = 0.3 if case == "scale" else K**-0.5
    options = {"causal": {"causal": True}, "mask": {"mask": visible}, "bias": {"bias": added}}.get(
        case, {}
    )
    ours = hw.attend(query, key, value, scale=scale, **options)[0].double()
    attn_mask = added if case == "bias" else allowed
    theirs = F.scaled_dot_product_attention(
        query, key, value, attn_mask, scale=scale, enable_gqa=True
    ).double()
    doubles, shape = (query.double(), key.double(), value.double()), (B, H, T, S)
    exact, _ = render(*doubles, allowed.expand(shape), added.double().expand(shape), scale)
    bound = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
    assert max(float((theirs - exact).abs().max()), float((ours - exact).abs().max())) < bound
    assert (ours - exact).norm() <= 3 * (theirs - exact).norm() + 1e-15


def test_heads_and_batch_can_be_left_out():
    query, key, value = tensors()
    output, weights = hw.attend(
        query[:, 0], key[:, 0], value[:, 0], mask=MASK[:, 0], need_weights=True
    )
    whole, whole_weights = hw.attend(
        query[:, :1], key[:, :1], value[:, :1], mask=MASK, need_weights=True
    )
    assert weights is not None
    assert whole_weights is not None
    assert torch.equal(output, whole[:, 0])
    assert torch.equal(weights, whole_weights[:, 0])
    torch.testing.assert_close(
        hw.attend(query[0, 0], key[0, 0], value[0, 0], mask=MASK[0, 0])[0], output[0]
    )


def test_dropped_weights_are_scaled_up():
    torch.manual_seed(0)
    ones = torch.ones(1, 1, 400, 4)
    output, weights = hw.attend(ones, ones, ones, dropout=0.25, need_weights=True)
    assert weights is not None
    nonzero = weights > 0
    assert 0.72 < nonzero.double().mean() < 0.78
    torch.testing.assert_close(weights[nonzero], torch.full_like(weights[nonzero], 1 / 400 / 0.75))
    torch.testing.assert_close(output, weights @ ones)


def test_dropout_may_be_a_module():
    ones, module = torch.ones(1, 1, 50, 4), nn.Dropout(0.5)
    for training, share in ((True, 0.5), (False, 0.0)):
        _, weights = hw.attend(ones, ones, ones, dropout=module.train(training), need_weights=True)
        assert weights is not None
        assert (weights == 0).double().mean() == pytest.approx(share, abs=0.05)
    assert torch.equal(hw.attend(ones, ones, ones, dropout=None)[0], ones)
