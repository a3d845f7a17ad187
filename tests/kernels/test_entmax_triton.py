"""The Triton kernels of entmax against its definition in float64: tau by bisection, gradients by
differences.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.kernels import row_normaliser_triton, row_normalisers, triton_support
from kernels.triton_cases import DEVICE, NEEDS_TRITON, random_rows, run_entmax
from support.layer_cases import check_close

pytestmark = [pytest.mark.triton, *NEEDS_TRITON]
STEP = 1e-6
ALPHAS = {
    "1.5": (1.5, 1.5),
    "sparsemax": (2.0, 2.0),
    "between": (1.2, 1.8),
    "near softmax": (1.01, 1.05),
    "above 2": (2.5, 3.5),
}


def definition(s: Tensor, allowed: Tensor, alpha: Tensor) -> Tensor:
    """Weights [(alpha - 1) s - tau]+ ^ (1 / (alpha - 1)) that sum to one; zeros without a key."""
    power = 1 / (alpha - 1)
    x = ((alpha - 1) * s).masked_fill(~allowed, -torch.inf)
    high = x.amax(-1, keepdim=True)
    low = high - 1
    for _ in range(60):
        tau = (low + high) / 2
        is_low = ((x - tau).clamp(min=0) ** power).sum(-1, keepdim=True) >= 1
        low, high = torch.where(is_low, tau, low), torch.where(is_low, high, tau)
    return ((x - low).clamp(min=0) ** power).nan_to_num(0.0)


def differences(s: Tensor, allowed: Tensor, alpha: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Central differences of the sum of weights times `grad`, by each score and each alpha."""
    by_score = torch.empty_like(s)
    for key in range(s.shape[-1]):
        step = torch.zeros(s.shape[-1], dtype=s.dtype)
        step[key] = STEP
        change = definition(s + step, allowed, alpha) - definition(s - step, allowed, alpha)
        by_score[..., key] = (change * grad).sum(-1) / (2 * STEP)
    change = definition(s, allowed, alpha + STEP) - definition(s, allowed, alpha - STEP)
    return by_score, (change * grad).sum((0, 2, 3)) / (2 * STEP)


@pytest.mark.parametrize("name", ALPHAS)
def test_weights_and_gradients_equal_the_definition(name: str):
    torch.manual_seed(0)
    s, allowed, alpha = random_rows((2, 2, 5, 23), ALPHAS[name])
    exact = s.double(), allowed, alpha.double().view(1, 2, 1, 1)
    grad = torch.randn_like(s)
    weights, *gradients = run_entmax(s, allowed, alpha, grad)
    assert (weights - definition(*exact)).abs().max() <= 2e-6
    # the gradient by alpha is a difference divided by (alpha - 1)^2
    tolerances = 1e-5, 1e-5 if alpha.min() > 1.1 else 5e-4
    wanted = differences(*exact, grad.double())
    for found, one, tolerance in zip(gradients, wanted, tolerances, strict=True):
        assert (found - one).abs().max() <= tolerance * one.abs().max()


def test_rows_longer_than_a_block(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    rows = random_rows((1, 2, 2, 70), (1.5, 1.3))
    grad = torch.randn_like(rows[0])
    whole = run_entmax(*rows, grad)
    monkeypatch.setattr(row_normaliser_triton, "MAX_BLOCK", 16)
    for found, wanted in zip(run_entmax(*rows, grad), whole, strict=True):
        check_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_large_scores_do_not_overflow():
    s = torch.tensor([1e38, -1e38, 5e37, 1e38]).view(1, 1, 1, 4)
    allowed = torch.ones(1, 1, 1, 4, dtype=torch.bool)
    weights = run_entmax(s, allowed, torch.tensor([1.5]), torch.ones_like(s))[0]
    assert weights.flatten().tolist() == pytest.approx([0.5, 0.0, 0.0, 0.5])
    lowest = torch.full((1, 1, 1, 4), torch.finfo(torch.float32).min)
    weights = run_entmax(lowest, allowed, torch.tensor([1.5]), torch.ones_like(s))[0]
    assert weights.flatten().tolist() == pytest.approx([0.25] * 4)


@pytest.mark.parametrize("kind", ["fixed", "learned"])
def test_a_layer_normalises_by_the_kernel(kind: str, monkeypatch: pytest.MonkeyPatch):
    """With the operation of GPUs in place of that of CPUs, and the interpreter's device."""
    normaliser = hw.parts.Entmax(alpha=1.4, kind=kind)
    spec = hw.design(normaliser=normaliser, model=16, heads=2, pattern="causal")
    layer = hw.Attention(spec, backend="chunked").to(DEVICE)
    x = torch.randn(2, 40, 16, device=DEVICE)
    calls: list[int] = []

    def normalise(s: Tensor, allowed: Tensor, alpha: Tensor, *_: Any) -> Any:
        calls.append(1)
        return row_normaliser_triton.entmax(s, allowed, alpha)

    with torch.no_grad():
        monkeypatch.setattr(row_normalisers, "can_run_entmax", lambda s: False)
        wanted = layer(x)
        monkeypatch.setattr(triton_support, "DEVICES", {"cuda", DEVICE})
        can_run = row_normaliser_triton.can_normalise
        monkeypatch.setattr(row_normalisers, "can_run_entmax", can_run)
        monkeypatch.setattr(row_normalisers, "masked_entmax", normalise)
        monkeypatch.setattr(hw.parts.Entmax, "prefers_gather", lambda *_: False)
        check_close(layer(x), wanted, rtol=1e-5, atol=1e-6)
    assert len(calls) == 1
