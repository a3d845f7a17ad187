"""The norm of every head's output in numpy; where it stands beside what joins rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from anchors import written
from anchors.written import far
from support import layer_cases as cases
from support.layer_cases import base

X = torch.linspace(-2, 2, 3 * 7 * 10, dtype=torch.float64).sin().view(3, 7, 10)
EXACT = 1e-13


def normed(o: Any, eps: float) -> Any:
    return o / np.sqrt((o**2).mean(-1, keepdims=True) + eps)


@pytest.mark.parametrize("eps", [1e-5, 0.3])
@pytest.mark.parametrize(("scope", "shape"), [("shared", (5,)), ("head", (6, 5))])
def test_every_head_by_itself(scope: str, shape: tuple[int, ...], eps: float):
    layer = cases.layer(
        base(modifiers=(hw.parts.HeadNorm(scope=scope, eps=eps),), kv=2, vdim=5, pattern="causal()")
    )
    w, x = written.numbers(layer), X.numpy()
    assert w["head_norm.scale"].shape == shape
    q, k, v = (written.projected(w, x, side, n) for side, n in (("q", 6), ("k", 2), ("v", 2)))
    o = written.read(q, k, v, (0, 0, 0, 1, 1, 1), causal=True)
    assert far(layer.head_outputs(X), normed(o, eps) * w["head_norm.scale"]) < EXACT


def test_it_forgets_how_long_values_are_and_not_where_they_point():
    layer = cases.layer(base(modifiers=(hw.parts.HeadNorm(eps=1e-30),)))
    before = layer.head_outputs(X)
    with torch.no_grad():
        layer.project["v"].mul_(1e3)
    cases.check_close(layer.head_outputs(X), before)


@pytest.mark.parametrize("first", ["norm", "pairs"])
def test_a_norm_acts_in_the_order_written(first: str):
    norm, pairs = hw.parts.HeadNorm(eps=1e-2), hw.parts.DifferentialV2()
    layer = cases.layer(base(modifiers=(norm, pairs) if first == "norm" else (pairs, norm), kv=2))
    w, x = written.numbers(layer), X.numpy()
    q, k, v = (written.projected(w, x, side, n) for side, n in (("q", 12), ("k", 2), ("v", 2)))
    o = written.read(q, k, v, (0,) * 6 + (1,) * 6)
    noise = written.sigmoid(x @ w["differential_v2.noise"].T)[..., None]
    scale = w["head_norm.scale"]
    o = normed(o, 1e-2) * scale if first == "norm" else o
    o = o[:, :, ::2] - noise * o[:, :, 1::2]
    assert far(layer.head_outputs(X), normed(o, 1e-2) * scale if first == "pairs" else o) < EXACT


def test_weights_of_each_output_head_may_stand_behind_a_join():
    layer = cases.layer(
        base(modifiers=(hw.parts.DifferentialV2(), hw.parts.HeadNorm(scope="head")), kv=2)
    )
    assert layer.head_norm["scale"].shape == (6, 4)
    small, weights = hw.attention.head_axis_ops.keep_heads(layer.spec, layer.state_dict(), [1, 4])
    cut = hw.Attention(small).double()
    cut.load_state_dict(weights)
    cases.check_close(cut.head_outputs(X), layer.head_outputs(X)[:, :, [1, 4]])
