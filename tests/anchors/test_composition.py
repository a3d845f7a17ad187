"""Mixings and sums, each against its formula written out by hand in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import headwise as hw
from headwise import costs
from support import layer_cases as cases
from support.layer_cases import base, check_close


def arrays(layer) -> dict[str, np.ndarray]:
    """The weights of a layer as numpy sees them."""
    return {name: tensor.numpy() for name, tensor in layer.state_dict().items()}


def softmax(s):
    """Over the last axis."""
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("causal", [False, True])
def test_rectangular_talking_heads(causal):
    """2003.02436, figure 2: h_k = 6 logits, h = 7 softmaxes, h_v = 5 value heads."""
    mixes = (hw.parts.TalkingHeads(heads=7), hw.parts.TalkingHeads(on="weights", heads=5))
    spec = base(vdim=3, modifiers=mixes, pattern="causal" if causal else "full")
    layer = cases.layer(spec)
    w, (x, _) = arrays(layer), cases.tensors(spec)
    result = x.numpy()
    q, k = (
        np.einsum("btd,hkd->bhtk", result, w[f"project.{side}"].reshape(6, 4, 10)) for side in "qk"
    )
    v = np.einsum("btd,hvd->bhtv", result, w["project.v"].reshape(5, 3, 10))
    logits = np.einsum("bhtk,bhsk->bhts", q, k) / 2
    mixed = np.einsum("bgts,gh->bhts", logits, w["talking_heads.mixing"])
    if causal:
        mixed = np.where(np.tril(np.ones((7, 7), bool)), mixed, -np.inf)
    weights = np.einsum("bgts,gh->bhts", softmax(mixed), w["talking_heads_2.mixing"])
    o = np.einsum("bhts,bhsv->bthv", weights, v).reshape(3, 7, 15)
    check_close(layer(x), torch.from_numpy(o @ w["output.o"].T))
    assert costs.count_parameters(spec) == 2 * 24 * 10 + 15 * 10 + 6 * 7 + 7 * 5 + 10 * 15


def test_talking_heads_of_cait():
    """2103.17239 as timm's TalkingHeadAttn: proj_l on the scaled scores and proj_w on the weights,
    both with a bias.
    """
    mixes = (hw.parts.TalkingHeads(bias=True), hw.parts.TalkingHeads(on="weights", bias=True))
    spec = hw.design(model=12, heads=3, bias="qkvo", modifiers=mixes)
    layer = cases.layer(spec)
    w, x = arrays(layer), np.random.default_rng(0).normal(size=(2, 5, 12))
    assert all(np.abs(w[f"{name}.bias"]).min() > 0 for name in ("talking_heads", "talking_heads_2"))
    qkv_weight = np.concatenate([w[f"project.{side}"] for side in "qkv"])
    qkv_bias = np.concatenate([w[f"project.{side}_bias"] for side in "qkv"])
    qkv = (x @ qkv_weight.T + qkv_bias).reshape(2, 5, 3, 3, 4).transpose(2, 0, 3, 1, 4)
    q, k, v = qkv[0] * 4**-0.5, qkv[1], qkv[2]
    attn = q @ k.swapaxes(-2, -1)
    attn = (
        attn.transpose(0, 2, 3, 1) @ w["talking_heads.mixing"] + w["talking_heads.bias"]
    ).transpose(0, 3, 1, 2)
    attn = softmax(attn)
    attn = (
        attn.transpose(0, 2, 3, 1) @ w["talking_heads_2.mixing"] + w["talking_heads_2.bias"]
    ).transpose(0, 3, 1, 2)
    y = (attn @ v).swapaxes(1, 2).reshape(2, 5, 12) @ w["output.o"].T + w["output.o_bias"]
    check_close(layer(torch.from_numpy(x)), torch.from_numpy(y))


def test_a_bias_of_talking_heads_is_added_at_allowed_pairs():
    spec = base(modifiers=(hw.parts.TalkingHeads(on="weights", bias=True),), pattern="causal")
    layer, probe = cases.layer(spec), hw.Probe("weights")
    x, _ = cases.tensors(spec)
    layer(x, probe=probe)
    later = torch.ones(7, 7, dtype=torch.bool).triu(1)
    assert (probe.tensors["weights"][..., later] == 0).all()


def test_another_number_of_heads_starts_as_the_first_ones_alone():
    spec = base(modifiers=(hw.parts.TalkingHeads(on="weights", heads=4),))
    mixing = hw.Attention(spec).talking_heads["mixing"]
    check_close(mixing, torch.eye(6)[:, :4])


def test_average_attention_is_a_running_mean():
    """1908.11365: (1/t) times the sum of x W_V up to t; the state is the sum and the number."""
    spec = base(
        project=hw.parts.ValueProjection(),
        normaliser=hw.parts.AverageNormaliser(),
        pattern="causal",
    )
    layer = cases.layer(spec)
    w, (x, _) = arrays(layer), cases.tensors(spec)
    running = np.cumsum(x.numpy() @ w["project.v"].T, 1) / np.arange(1, 8)[None, :, None]
    check_close(layer(x), torch.from_numpy(running @ w["output.o"].T))
    assert costs.count_parameters(spec) == 2 * 24 * 10
    cache = layer.cache(batch=3, capacity=10**6)
    layer(x, cache=cache)
    assert cache.nbytes == 3 * (24 + 6) * 8


def test_recurrent_state_has_constant_size_and_linear_cost():
    spec = base(
        similarity=hw.parts.FeatureMap(), normaliser=hw.parts.SumNormaliser(), pattern="causal"
    )
    sizes = {costs.cache_bytes(spec, batch=2, capacity=c) for c in (1, 1000, 10**9)}
    assert len(sizes) == 1
    from headwise.attention.backends import CallSignature, linear_attention

    values = [
        linear_attention.executed_flops(
            CallSignature(spec, spec.core), hw.costs.CallSize(1, n, n, n)
        )
        for n in (2**10, 2**11, 2**12)
    ]
    assert values[2] - values[1] == 2 * (values[1] - values[0])
