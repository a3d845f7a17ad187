"""Both versions of differential attention by their formulas in numpy, and where they are something
else.
"""

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
X[..., 0] = 1.0  # a feature that is always there, so that a projection can be a number
EXACT = 1e-13
LAST = {"pattern": "causal()"}


def set_noise(layer: hw.Attention, value: float) -> None:
    """x.w is this number for every token and head."""
    with torch.no_grad():
        layer.differential_v2["noise"].zero_()[:, 0] = value


# --- version 2 ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kv", "vdim"), [(6, None), (3, None), (2, 5), (1, 5)])
def test_version_2_as_published(kv: int, vdim: int | None):
    layer = cases.layer(base(modifiers=(hw.parts.DifferentialV2(),), kv=kv, vdim=vdim, **LAST))
    heads = layer.spec.heads
    assert (heads.q, heads.kv, heads.vdim, len(layer.spec.score_head_of_output)) == (
        12,
        kv,
        vdim or 4,
        6,
    )
    w, x = written.numbers(layer), X.numpy()
    q, k, v = (written.projected(w, x, side, n) for side, n in (("q", 12), ("k", kv), ("v", kv)))
    attn = written.read(q, k, v, [h // (12 // kv) for h in range(12)], causal=True)
    noise = written.sigmoid(x @ w["differential_v2.noise"].T)[..., None]
    o = attn[:, :, 0::2] - noise * attn[:, :, 1::2]
    assert far(layer.head_outputs(X), o) < EXACT
    assert far(layer(X), o.reshape(3, 7, -1) @ w["output.o"].T) < EXACT


def test_version_2_that_takes_nothing_away_is_grouped_attention_on_the_even_heads():
    layer = cases.layer(
        base(modifiers=(hw.parts.DifferentialV2(), hw.parts.Rotary()), kv=2, **LAST)
    )
    set_noise(layer, -1e4)
    plain = hw.Attention(base(modifiers=(hw.parts.Rotary(),), kv=2, **LAST)).double()
    state = layer.state_dict()
    even = state["project.q"].unflatten(0, (12, 4))[::2].flatten(0, 1)
    plain.load_state_dict({name: state[name] for name in plain.state_dict()} | {"project.q": even})
    assert far(layer(X), plain(X).detach().numpy()) < EXACT


def test_version_2_outputs_zero_if_it_subtracts_equal_heads_fully():
    layer = cases.layer(base(modifiers=(hw.parts.DifferentialV2(),), kv=2))
    set_noise(layer, 1e4)
    with torch.no_grad():
        pairs = layer.project["q"].unflatten(0, (6, 2, 4))
        pairs[:, 1] = pairs[:, 0]
    assert layer.head_outputs(X).abs().max() < 1e-15


def test_version_2_costs_a_second_query_and_a_number_a_head():
    twice, usual = (
        hw.design(model=512, heads=8, kv=2, modifiers=m) for m in ((hw.parts.DifferentialV2(),), ())
    )
    assert hw.costs.count_parameters(twice) - hw.costs.count_parameters(usual) == 512**2 + 512 * 8
    assert hw.costs.cached_numbers_per_token(twice) == hw.costs.cached_numbers_per_token(usual)


@pytest.mark.parametrize(("tokens", "runs"), [("many", "flash_cpu"), ("one", "ragged")])
def test_version_2_runs_fused(tokens: str, runs: str):
    reasons = hw.why(base(modifiers=(hw.parts.DifferentialV2(),), kv=2, **LAST), tokens=tokens)
    assert reasons.backend == runs
    assert reasons.reasons_against[runs] == []


@pytest.mark.parametrize("vdim", [None, 4, 5])
def test_options_of_values_do_not_change_the_number_of_heads(vdim: int | None):
    assert base(modifiers=(hw.parts.DifferentialV2(),), kv=2, vdim=vdim).heads.q == 12


# --- version 1 ------------------------------------------------------------------------------------


def test_version_1_that_takes_nothing_away_is_attention_on_the_first_of_each_pair_and_a_norm():
    layer = cases.layer(base(heads=3, modifiers=(hw.parts.Differential(depth=2),), **LAST))
    start = 0.8 - 0.6 * np.exp(-0.6)
    with torch.no_grad():  # exp(0) - exp(log(1 + start)) + start = 0
        p = layer.differential
        p["a1"].zero_()
        p["a2"].fill_(1.0)
        p["b2"].fill_(np.log1p(start) / 4)
    state = layer.state_dict()
    plain = hw.Attention(base(heads=3, vdim=8, **LAST)).double()
    first = {
        f"project.{side}": state[f"project.{side}"].unflatten(0, (6, 4))[::2].flatten(0, 1)
        for side in "qk"
    }
    plain.load_state_dict({name: state[name] for name in plain.state_dict()} | first)
    o = plain.head_outputs(X).detach().numpy()
    normed = o / np.sqrt((o**2).mean(-1, keepdims=True) + 1e-5) * state["differential.norm"].numpy()
    assert far(layer.head_outputs(X), normed * (1 - start)) < EXACT


@pytest.mark.parametrize("kv", [3, 1])
def test_version_1_as_released(kv: int):
    """Keys of a pair lie side by side, and either head reads its own where they are grouped."""
    layer = cases.layer(
        base(heads=3, kv=kv, modifiers=(hw.parts.Differential(depth=1, eps=1e-3),), **LAST)
    )
    w, x = written.numbers(layer), X.numpy()
    q, k, v = (written.projected(w, x, side, n) for side, n in (("q", 6), ("k", 2 * kv), ("v", kv)))
    q1, q2, k1, k2 = q[:, :, ::2], q[:, :, 1::2], k[:, :, ::2], k[:, :, 1::2]
    reads = [i // (3 // kv) for i in range(3)]
    start = 0.8 - 0.6 * np.exp(-0.3)
    dots = [(w[f"differential.a{n}"] * w[f"differential.b{n}"]).sum() for n in (1, 2)]
    noise = np.exp(dots[0]) - np.exp(dots[1]) + start
    o = written.read(q1, k1, v, reads, causal=True) - noise * written.read(
        q2, k2, v, reads, causal=True
    )
    o = o / np.sqrt((o**2).mean(-1, keepdims=True) + 1e-3) * w["differential.norm"] * (1 - start)
    assert far(layer.head_outputs(X), o) < EXACT


def test_version_1_of_pairs_that_share_a_key_is_version_2_and_a_norm():
    first = cases.layer(base(heads=3, modifiers=(hw.parts.Differential(),), **LAST))
    with torch.no_grad():
        p = first.differential
        pairs = first.project["k"].unflatten(0, (3, 2, 4))
        pairs[:, 1] = pairs[:, 0]
        for name in ("a1", "a2"):
            p[name].mul_(0.1)
        noise = ((p["a1"] * p["b1"]).sum().exp() - (p["a2"] * p["b2"]).sum().exp() + 0.2).item()
    assert 0 < noise < 1
    second = hw.Attention(
        base(heads=3, vdim=8, modifiers=(hw.parts.DifferentialV2(), hw.parts.HeadNorm()), **LAST)
    ).double()
    state = first.state_dict()
    theirs = {name: state[name] for name in ("project.q", "project.v", "output.o")}
    theirs |= {"project.k": state["project.k"].unflatten(0, (6, 4))[::2].flatten(0, 1)}
    theirs |= {
        "head_norm.scale": 0.8 * state["differential.norm"],
        "differential_v2.noise": torch.zeros(3, 10),
    }
    second.load_state_dict(theirs)
    set_noise(second, float(np.log(noise / (1 - noise))))
    assert far(first(X), second(X).detach().numpy()) < EXACT


@pytest.mark.parametrize("pairs", [hw.parts.Differential(), hw.parts.DifferentialV2()], ids=repr)
@pytest.mark.parametrize("keep", [[0], [1], [2], [0, 2]])
def test_groups_of_three_heads_hold_no_whole_pairs(pairs: hw.Modifier, keep: list[int]):
    layer = cases.layer(
        base(heads=3, dim=2, modifiers=(hw.parts.DynamicComposition(groups=2), pairs))
    )
    small, weights = hw.attention.head_axis_ops.keep_heads(layer.spec, layer.state_dict(), keep)
    cut = hw.Attention(small).double().eval()
    cut.load_state_dict(weights)
    assert far(cut.head_outputs(X), layer.head_outputs(X)[:, :, keep].detach().numpy()) < EXACT


# --- the presets ----------------------------------------------------------------------------------


def rotated(x: np.ndarray, pairs: str) -> np.ndarray:
    """Rotary embedding as a product of complex numbers: [B, T, heads, width]."""
    width = x.shape[-1]
    angles = np.arange(x.shape[1])[:, None] * 10_000.0 ** (-np.arange(0, width, 2) / width)
    a, b = (x[..., ::2], x[..., 1::2]) if pairs == "interleaved" else np.split(x, 2, -1)
    turned = (a + 1j * b) * np.exp(1j * angles)[None, :, None]
    halves = turned.real, turned.imag
    if pairs == "interleaved":
        return np.stack(halves, -1).reshape(x.shape)
    return np.concatenate(halves, -1)


PRESET_X = torch.linspace(-2, 2, 2 * 7 * 48, dtype=torch.float64).sin().view(2, 7, 48)


def preset_layer(**options: Any) -> hw.Attention:
    torch.manual_seed(0)
    return hw.Attention(hw.design(model=48, **options)).double()


@pytest.mark.parametrize("pairs", ["interleaved", "half"])
@pytest.mark.parametrize(
    ("keys", "kv", "key_of_score_head"),
    [
        ("own", 6, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]),
        ("repeated", 6, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]),
        ("own", 3, [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5]),
        (
            "repeated",
            3,
            [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5],
        ),  # two repeats: both heads of a pair share a key
        ("own", 2, [0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3]),
        ("repeated", 2, [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]),  # three: pairs 1 and 4 do not
    ],
)
def test_the_preset_diff_as_released(keys: str, kv: int, key_of_score_head: list[int], pairs: str):
    layer = preset_layer(preset="diff", heads=6, kv=kv, keys=keys, pairs=pairs)
    assert layer.spec == hw.from_toml(hw.to_toml(layer.spec))
    w, x = written.numbers(layer), PRESET_X.numpy()
    q, k, v = (
        written.projected(w, x, side, n) for side, n in (("q", 12), ("k", 2 * kv), ("v", kv))
    )
    q, k = rotated(q, pairs), rotated(k, pairs)
    dots = [(w[f"differential.a{n}"] * w[f"differential.b{n}"]).sum() for n in (1, 2)]
    noise = np.exp(dots[0]) - np.exp(dots[1]) + 0.2
    outputs = []
    for i in range(6):
        first, second = (
            written.shares(q[:, :, head], k[:, :, key_of_score_head[head]], causal=True)
            for head in (2 * i, 2 * i + 1)
        )
        outputs.append((first - noise * second) @ v[:, :, i // (6 // kv)])
    o = np.stack(outputs, 2)
    o = o / np.sqrt((o**2).mean(-1, keepdims=True) + 1e-5) * w["differential.norm"] * 0.8
    assert far(layer.head_outputs(PRESET_X), o) < EXACT


@pytest.mark.parametrize("pairs", ["interleaved", "half"])
def test_the_preset_diff2_as_released(pairs: str):
    layer = preset_layer(preset="diff2", heads=6, kv=3, pairs=pairs)
    w, x = written.numbers(layer), PRESET_X.numpy()
    q, k, v = (written.projected(w, x, side, n) for side, n in (("q", 12), ("k", 3), ("v", 3)))
    attn = written.read(
        rotated(q, pairs), rotated(k, pairs), v, [h // 4 for h in range(12)], causal=True
    )
    noise = written.sigmoid(x @ w["differential_v2.noise"].T)[..., None]
    assert far(layer.head_outputs(PRESET_X), attn[:, :, ::2] - noise * attn[:, :, 1::2]) < EXACT


@pytest.mark.parametrize("preset", ["diff", "diff2"])
def test_the_presets_pair_channels_as_the_released_codes_do(preset: str):
    default, half = (
        hw.design(preset=preset, **options).modifiers[0] for options in ({}, {"pairs": "half"})
    )
    assert (default, half) == (hw.parts.Rotary(pairs="interleaved"), hw.parts.Rotary())
