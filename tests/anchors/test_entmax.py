"""Entmax against its authors' package (entmax 1.3), numpy renderings of its formulas, and what
holds of any root.
"""

from __future__ import annotations

import copy
import math
from itertools import pairwise

import entmax
import numpy as np
import pytest
import torch
from torch import Tensor

import headwise as hw
from support.layer_cases import base, check_close

ALPHAS = [1.1, 1.25, 1.5, 1.75, 2.0, 3.0]
EXACT = {1.5: entmax.entmax15, 2.0: entmax.sparsemax}


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.fixture(params=["normalise", "fused_normalise"], autouse=True)
def way(request, monkeypatch):
    """Plain tensor operations, and the kernel where there is one."""
    monkeypatch.setitem(METHOD_NAME, "taken", request.param)


METHOD_NAME = {"taken": "normalise"}


def made(part: hw.parts.Entmax, s_BHTS: Tensor, allowed: Tensor, p: object = None) -> Tensor:
    """Weights in the way that is tried."""
    return getattr(part, METHOD_NAME["taken"])(s_BHTS, allowed, p)


def weights(s_S: Tensor, alpha: float, allowed: Tensor | None = None) -> Tensor:
    """Weights of scores [..., S]."""
    s_BHTS = s_S.reshape(1, 1, -1, s_S.shape[-1])
    visible = torch.ones(1, 1, 1, s_S.shape[-1], dtype=torch.bool) if allowed is None else allowed
    return made(hw.parts.Entmax(alpha=alpha), s_BHTS, visible).reshape(s_S.shape)


def learned(heads: int, alpha: float = 1.5, a: Tensor | None = None) -> hw.Attention:
    """A layer whose heads learn their alpha; a sets it."""
    layer = hw.Attention(
        base(heads=heads, kv=heads, normaliser=hw.parts.Entmax(alpha=alpha, kind="learned"))
    ).double()
    if a is not None:
        with torch.no_grad():
            layer.normaliser["a"].copy_(a)
    return layer


def check_root(s_S: Tensor, w_S: Tensor, alpha: float, atol: float) -> None:
    """(alpha - 1) s - w^(alpha - 1) is one number over the keys read, and no other key lies above
    it.

    These are the conditions of the optimum. Near alpha = 1 a weight may well be too small for its
    precision.
    """
    tiny = torch.finfo(w_S.dtype).tiny
    x_S, w_S = (
        (alpha - 1) * (s_S - s_S.amax(-1, keepdim=True)).double(),
        w_S.masked_fill(w_S < tiny, 0.0).double(),
    )
    above = x_S - w_S ** (alpha - 1)
    tau = (above * w_S).sum(-1, keepdim=True)
    assert (w_S >= 0).all()
    check_close(w_S.sum(-1), torch.ones_like(w_S[..., 0]), rtol=0, atol=1e-5)
    check_close(
        above.masked_fill(w_S == 0, 0.0),
        tau.expand_as(w_S).masked_fill(w_S == 0, 0.0),
        rtol=0,
        atol=atol,
    )
    assert (x_S.masked_fill(w_S > 0, -torch.inf) <= tau + atol + tiny ** (alpha - 1)).all()


# --- against the package --------------------------------------------------------------------------


@pytest.mark.parametrize("spread", [0.03, 1.0, 7.0])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_weights_and_gradients_are_the_packages(alpha, spread):
    s, g = (numbers(13, 61) * spread).requires_grad_(), numbers(13, 61)
    ours = weights(s, alpha)
    mine = torch.autograd.grad(ours, s, g)[0]
    theirs = {"bisect": entmax.entmax_bisect(s, alpha=alpha, n_iter=80)}
    if alpha in EXACT:
        theirs["exact"] = EXACT[alpha](s, dim=-1)
    for w in theirs.values():
        check_close(ours, w, rtol=1e-9, atol=1e-10)
        check_close(mine, torch.autograd.grad(w, s, g)[0], rtol=1e-6, atol=1e-9)


def test_the_gradient_in_alpha_is_the_packages():
    a = torch.tensor([-2.5, -1.0, 0.0, 1.5, 3.0], dtype=torch.float64)
    layer = learned(5, a=a)
    s, g = numbers(3, 5, 7, 31), numbers(3, 5, 7, 31)
    ours = made(
        layer.spec.normaliser, s, torch.ones(1, 1, 1, 31, dtype=torch.bool), layer.normaliser
    )
    mine = torch.autograd.grad(ours, layer.normaliser["a"], g)[0]
    other = a.clone().requires_grad_()
    theirs = entmax.entmax_bisect(s, alpha=(1 + other.sigmoid())[:, None, None], n_iter=80)
    check_close(ours, theirs)
    check_close(mine, torch.autograd.grad(theirs, other, g)[0], rtol=1e-8)


def test_masked_keys_are_keys_that_are_not_there():
    s, sample = numbers(2, 2, 2, 11), torch.rand(2, 1, 2, 11) < 0.6
    for alpha in ALPHAS:
        ours = made(hw.parts.Entmax(alpha=alpha), s, sample)
        for b, h, t in np.ndindex(2, 2, 2):
            keys = sample[b, 0, t]
            assert (ours[b, h, t, ~keys] == 0).all()
            if keys.any():
                theirs = entmax.entmax_bisect(s[b, h, t, keys], alpha=alpha, n_iter=80)
                check_close(ours[b, h, t, keys], theirs, rtol=1e-9, atol=1e-10)


# --- the formulas, in numpy -----------------------------------------------------------------------


def sparsemax(z: np.ndarray) -> np.ndarray:
    """k* = #{k: 1 + k z_(k) > sum of the k highest}, tau = (that sum - 1) / k* (1602.02068)."""
    top = np.sort(z)[::-1]
    k, total = np.arange(1, len(z) + 1), np.cumsum(top)
    last = (1 + k * top > total).sum()
    return np.maximum(z - (total[last - 1] - 1) / last, 0)


def entmax15(z: np.ndarray) -> np.ndarray:
    """tau_k = mean_k - sqrt((1 - k var_k) / k) over the k highest z / 2, k* = #{k: tau_k <= z_(k) /
    2} (1905.05702).
    """
    x = z / 2
    top = np.sort(x)[::-1]
    taus = []
    for k in range(1, len(z) + 1):
        rest = (1 - k * top[:k].var()) / k
        taus.append(top[:k].mean() - math.sqrt(rest) if rest >= 0 else math.inf)
    last = (np.array(taus) <= top).sum()
    return np.maximum(x - taus[last - 1], 0) ** 2


@pytest.mark.parametrize(("alpha", "oracle"), [(1.5, entmax15), (2.0, sparsemax)])
def test_sorting_and_stepping_agree(alpha, oracle):
    part, halving = hw.parts.Entmax(alpha=alpha), hw.parts.Entmax(kind="learned")
    for spread in (0.01, 0.3, 2.0, 40.0):
        for n in (1, 2, 23, 211):
            s = numbers(n) * spread
            expected = torch.from_numpy(oracle(s.numpy()))
            check_close(part.normalise_row(s, {}), expected)
            check_close(weights(s, alpha), expected)
            if alpha == 1.5:
                check_close(
                    halving.normalise_row(s, {"a": torch.zeros((), dtype=torch.float64)}), expected
                )


@pytest.mark.parametrize("alpha", ALPHAS)
def test_gradients_are_finite_differences(alpha):
    s = numbers(3, 17).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda s: weights(s, alpha), s, eps=1e-7, atol=1e-5, fast_mode=True
    )


@pytest.mark.parametrize("at", [1.02, 1.1, 1.5, 1.9])
def test_the_gradient_in_alpha_is_a_finite_difference(at):
    s, g, step = numbers(1, 1, 5, 19), numbers(5, 19), 1e-6
    a = torch.tensor([math.log((at - 1) / (2 - at))], dtype=torch.float64)
    layer = learned(1, a=a)
    visible = torch.ones(1, 1, 1, 19, dtype=torch.bool)
    ours = (made(layer.spec.normaliser, s, visible, layer.normaliser)[0, 0] * g).sum()
    slope = torch.autograd.grad(ours, layer.normaliser["a"])[0].item() / ((at - 1) * (2 - at))
    ends = [(weights(s[0, 0], at + side * step) * g).sum().item() for side in (1, -1)]
    assert slope == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-5, abs=1e-7)


# --- what must hold -------------------------------------------------------------------------------


def rows(n: int) -> dict[str, Tensor]:
    """Rows whose roots are hard to find: ties, near ties, keys at the very edge, and groups of
    growing size.
    """
    k = torch.arange(n, dtype=torch.float64)
    found = {f"gauss {s}": numbers(4, n) * s for s in (1e-6, 1e-2, 0.1, 0.3, 1, 10, 1e4)}
    found |= {f"ramp {s}": -k[None] * s / n for s in (1e-6, 0.3, 3, 1e4)}
    found |= {f"geometric {g}": -(1 - g**k)[None] * 3 for g in (0.5, 0.9, 0.999)}
    found["ties"] = torch.zeros(1, n, dtype=torch.float64)
    for edge in (0.1, 1e-3, 1e-6):
        found[f"one above {edge}"] = torch.where(k == 0, 0.0, edge - 1)[None]
    for growth, depth in ((1.3, 0.3), (2.0, 0.1), (2.0, 0.6), (3.5, 0.5)):
        found[f"groups {growth} {depth}"] = (
            -depth * (1 + k * (growth - 1)).log()[None] / math.log(growth)
        )
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("alpha", [1.01, *ALPHAS[:-1], 1.9])
def test_the_steps_are_enough_for_any_row(alpha, dtype):
    for n in (2, 61, 4096):
        for s in rows(n).values():
            for scaled in (s, s / (alpha - 1)):
                scores = scaled.to(dtype)
                check_root(
                    scores,
                    weights(scores, alpha),
                    alpha,
                    atol=5e-4 if dtype == torch.float32 else 2e-12,
                )


def test_above_two_the_root_is_found_too():
    for n in (2, 61, 1021):
        for s in rows(n).values():
            check_root(s, weights(s, 2.5), 2.5, atol=1e-12)
            check_root(s, weights(s, 3.0), 3.0, atol=1e-12)


def test_towards_one_it_is_softmax():
    s = numbers(5, 23)
    gaps = [(weights(s, 1 + d) - s.softmax(-1)).abs().max() for d in (0.04, 0.02, 0.01)]
    assert gaps[2] < 0.02
    assert gaps[0] / gaps[1] == pytest.approx(2, rel=0.1)
    assert gaps[1] / gaps[2] == pytest.approx(2, rel=0.1)


def test_a_key_far_below_the_best_is_not_read():
    for alpha in ALPHAS:
        gap = 1 / (alpha - 1)
        assert weights(torch.tensor([0.0, -1.0001 * gap]), alpha).tolist() == [1.0, 0.0]
        assert weights(torch.tensor([0.0, -0.99 * gap]), alpha)[1] > 0


def test_the_larger_alpha_the_fewer_keys_are_read():
    s = numbers(11, 301)
    read = [(weights(s, alpha) > 0).sum(-1) for alpha in ALPHAS]
    assert all((few <= many).all() for many, few in pairwise(read))
    assert (read[-1] < read[1] / 4).all()


@pytest.mark.parametrize("alpha", ALPHAS)
def test_equal_scores_are_averaged(alpha):
    s, sample = torch.full((2, 3, 5, 4096), 7.25), torch.rand(2, 1, 5, 4096) < 0.5
    expected = hw.parts.AverageNormaliser().normalise(s, sample, None)
    check_close(made(hw.parts.Entmax(alpha=alpha), s, sample), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_number_added_to_a_row_changes_nothing(alpha):
    s = (numbers(5, 23) * 64).round() / 64  # so that the sum is exact
    assert torch.equal(weights(s + 4096.0, alpha), weights(s, alpha))


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_query_with_nothing_to_read_gets_no_weight(alpha, dtype):
    s = numbers(2, 3, 5, 7).to(dtype).requires_grad_()
    visible = torch.ones(2, 1, 5, 7, dtype=torch.bool)
    visible[1, :, 2] = False
    w = made(hw.parts.Entmax(alpha=alpha), s, visible)
    w.backward(torch.ones_like(w) * torch.arange(7.0).to(dtype))
    assert (w[1, :, 2] == 0).all()
    assert (s.grad[1, :, 2] == 0).all()
    assert (s.grad[0] != 0).any()
    assert s.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_scores_of_any_size_are_numbers(alpha, dtype):
    most = torch.finfo(dtype).max
    s = torch.tensor([[-1, -0.5, -0.25], [1, 0.5, -1], [1, 1, 1], [-1, -1, -1]]).to(dtype)
    s = (s * most).requires_grad_()
    w = weights(s, alpha)
    w.sum().backward()
    assert s.grad.isfinite().all()
    expected = torch.tensor([[0, 0, 1], [1, 0, 0], [1 / 3] * 3, [1 / 3] * 3]).to(dtype)
    check_close(w, expected, rtol=torch.finfo(dtype).eps, atol=0)


def test_where_the_package_gives_no_number():
    """Its bisection multiplies before it takes the highest score away, and knows no row without a
    key.
    """
    s = torch.full((128,), -1005.0).index_fill(0, torch.tensor([0]), -1000.0).bfloat16()
    assert entmax.entmax_bisect(s, alpha=1.5).isnan().all()
    assert weights(s, 1.5).tolist() == [1.0] + [0.0] * 127
    assert entmax.entmax_bisect(torch.full((3,), -torch.inf), alpha=1.5).isnan().all()
    assert (
        weights(torch.zeros(3), 1.5, torch.zeros(1, 1, 1, 3, dtype=torch.bool)).tolist()
        == [0.0] * 3
    )


# --- learned --------------------------------------------------------------------------------------


def test_initial_alpha_of_heads_equals_the_option():
    for alpha in (1.1, 1.5, 1.99):
        a = learned(3, alpha).normaliser["a"]
        check_close(1 + a.detach().sigmoid(), torch.full((3,), alpha), rtol=1e-6)


def test_every_head_has_its_own_alpha():
    a = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64)
    layer, s = learned(3, a=a), numbers(2, 3, 5, 29)
    visible = torch.ones(1, 1, 1, 29, dtype=torch.bool)
    ours = made(layer.spec.normaliser, s, visible, layer.normaliser)
    for h, alpha in enumerate((1 + a.sigmoid()).tolist()):
        check_close(ours[:, h], weights(s[:, h], alpha))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_ends_of_a_head_are_numbers(dtype):
    layer = learned(2, a=torch.tensor([-60.0, 60.0])).to(dtype)
    s = (numbers(1, 2, 5, 29) * 3).to(dtype).requires_grad_()
    w = made(layer.spec.normaliser, s, torch.ones(1, 1, 1, 29, dtype=torch.bool), layer.normaliser)
    check_close(w[:, 0], weights(s[:, 0], 1.01), rtol=1e-5, atol=1e-7)
    check_close(w[:, 1], weights(s[:, 1], 2.0), rtol=1e-4, atol=1e-5)
    assert (w[:, 1] == 0).any()
    for grad in torch.autograd.grad(w.square().sum(), [s, layer.normaliser["a"]]):
        assert grad.isfinite().all()


def test_what_training_does_to_a_layer():
    """Copies learn apart, autocast and strides change nothing."""
    layer = learned(6).float()
    copied = copy.deepcopy(layer)
    x = torch.randn(3, 7, 10)
    y = layer(x)
    y.square().sum().backward()
    assert (layer.normaliser["a"].grad != 0).all()
    assert copied.normaliser["a"].grad is None
    assert torch.equal(copied(x), y)
    with torch.autocast("cpu", torch.bfloat16):
        check_close(layer(x), y, rtol=0.05, atol=0.05)
    s, visible = torch.randn(3, 7, 6, 11), torch.ones(1, 1, 1, 11, dtype=torch.bool)
    turned, part = s.transpose(1, 2), layer.spec.normaliser
    check_close(
        made(part, turned, visible, layer.normaliser),
        made(part, turned.contiguous(), visible, layer.normaliser),
    )


def test_a_second_derivative_is_exact_or_refused():
    s, sample = numbers(1, 3, 2, 5).requires_grad_(), torch.rand(1, 1, 2, 5) < 0.7
    if METHOD_NAME["taken"] == "fused_normalise":
        with pytest.raises(RuntimeError, match="create_graph=True"):
            torch.autograd.grad(weights(s, 1.5).square().sum(), s, create_graph=True)
        return
    for alpha in (1.25, 1.5, 1.75, 2.0, 2.5):
        assert torch.autograd.gradgradcheck(
            lambda s, alpha=alpha: made(hw.parts.Entmax(alpha=alpha), s, sample), s, fast_mode=True
        )
    part, learned_a = hw.parts.Entmax(kind="learned"), numbers(3, 1, 1).requires_grad_()
    assert torch.autograd.gradgradcheck(
        lambda s, a: part.normalise(s, sample, PartStub(a)), (s, learned_a)
    )


class PartStub:
    """The numbers that heads learn, as they stand."""

    def __init__(self, a: Tensor) -> None:
        self.a = a

    def broadcast_over_scores(self) -> dict[str, Tensor]:
        return {"a": self.a}


@pytest.mark.compile
@pytest.mark.parametrize("kind", ["fixed", "learned"])
def test_one_graph_holds_the_gradients_too(kind):
    spec = base(normaliser=hw.parts.Entmax(kind=kind), pattern="causal()")
    layer, x = hw.Attention(spec).double(), numbers(3, 7, 10)
    expected = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
    torch._dynamo.reset()
    traced = torch.compile(layer, fullgraph=True, backend="aot_eager")
    ours = torch.autograd.grad(traced(x).square().sum(), list(layer.parameters()))
    for mine, theirs in zip(ours, expected, strict=True):
        check_close(mine, theirs)
