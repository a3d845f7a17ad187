"""Dynamically composed heads: in groups, from queries or keys, and as one matrix per pair."""

from __future__ import annotations

from math import erf, sqrt

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.attention.parts import dynamic_composition
from headwise.attention.parts.dynamic_composition import DynamicComposition
from support import layer_cases as cases
from support.layer_cases import base, check_close


def gelu(a):
    return a * 0.5 * (1 + np.vectorize(erf)(a / sqrt(2)))


def matrices(p, part, side, x, heads):
    """W(t) [B, T, heads, heads] of one side: within each group, sum_r w1_r^T w2_r + diag(g)."""
    groups, rank = part.groups, part.rank
    each = heads // groups
    units = 2 * rank * each
    built = np.zeros((*x.shape[:2], heads, heads))
    u = gelu(x @ p[f"{side}_hidden"].T)
    g = np.tanh(x @ p[f"{side}_gate"].T)
    w1, w2 = (p[f"{side}_{kind}"].reshape(rank, heads, units) for kind in ("source", "target"))
    for n in range(groups):
        own = slice(n * each, (n + 1) * each)
        mine = u[..., n * units : (n + 1) * units]
        a, b = (np.einsum("rhu,btu->btrh", w[:, own], mine) for w in (w1, w2))
        a = a / np.sqrt((a**2).mean(-1, keepdims=True) + 1e-6)
        built[:, :, own, own] = np.einsum("btrh,btro->btho", a, b)
    return built + np.eye(heads) * g[:, :, None]


def merged(layer, part, x, z):
    """M(t, s) = I + W_b + W_q(t) + W_k(s), [B, T, S, heads, heads]."""
    p = {name: t.detach().numpy() for name, t in layer.dynamic_composition.state_dict().items()}
    heads = layer.spec.heads.q
    mixing = np.eye(heads)[None, None, None]
    if part.static == "full":
        each = heads // part.groups
        w_b = np.zeros((heads, heads))
        for n in range(part.groups):
            own = slice(n * each, (n + 1) * each)
            w_b[own, own] = p["static"][own]
        mixing = mixing + w_b
    if part.sides != "key":
        mixing = mixing + matrices(p, part, "query", x, heads)[:, :, None]
    if part.sides != "query":
        mixing = mixing + matrices(p, part, "key", z, heads)[:, None]
    return mixing


@pytest.mark.parametrize("on", ["scores", "weights"])
@pytest.mark.parametrize("groups", [1, 2, 3, 6])
@pytest.mark.parametrize(
    ("sides", "static", "rank"), [("both", "full", 2), ("query", "none", 1), ("key", "full", 3)]
)
def test_one_matrix_for_every_pair(on, groups, sides, static, rank):
    part = hw.parts.DynamicComposition(on=on, rank=rank, static=static, groups=groups, sides=sides)
    layer = cases.layer(base(modifiers=(part,), kv=2, source=13))
    x, z = cases.tensors(layer.spec)
    probe, usual = hw.Probe(on), hw.Probe(on)
    layer(x, source=z, probe=probe)
    plain = hw.Attention(cases.change_spec(layer.spec, modifiers=())).double().eval()
    plain.load_state_dict({name: layer.state_dict()[name] for name in plain.state_dict()})
    plain(x, source=z, probe=usual)
    mixing = merged(layer, part, x.numpy(), z.numpy())
    expected = np.einsum("bhts,btsho->bots", usual.tensors[on].detach().numpy(), mixing)
    check_close(probe.tensors[on], torch.from_numpy(expected))


def part_of(weights, spec, small, group):
    """The weights of one group of heads, cut out by hand."""
    heads, each = spec.heads.q, small.heads.q
    own = slice(group * each, (group + 1) * each)
    units = small.sizes_of(small.modifiers[0])["hidden"]
    out = {}
    for name, w in weights.items():
        part, key = name.split(".")
        if name == "output.o":
            out[name] = w.view(10, heads, -1)[:, own].flatten(1)
        elif part == "project":
            out[name] = w.view(heads, -1, *w.shape[1:])[own].flatten(0, 1)
        elif key.endswith("hidden"):
            out[name] = w[group * units : (group + 1) * units]
        elif key.endswith(("source", "target")):
            out[name] = w.view(-1, heads, units)[:, own].flatten(0, 1)
        elif key in ("own", "name"):
            out[name] = torch.arange(each)
        else:  # gate and static, a row a head
            out[name] = w[own]
    return out


@pytest.mark.parametrize("on", [("scores",), ("weights",), ("scores", "weights")], ids=str)
@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("sides", ["both", "query", "key"])
def test_groups_are_so_many_layers_side_by_side(on, groups, sides):
    parts = [hw.parts.DynamicComposition(on=one, static="full", sides=sides) for one in on]
    grouped = tuple(
        hw.parts.DynamicComposition(on=one, static="full", sides=sides, groups=groups) for one in on
    )
    spec = base(modifiers=grouped, bias="qkv", pattern="causal()", vdim=5)
    small = base(heads=6 // groups, modifiers=tuple(parts), bias="qkv", pattern="causal()", vdim=5)
    layer = cases.layer(spec)
    x, _ = cases.tensors(spec)
    total = torch.zeros_like(x)
    for group in range(groups):
        one = cases.load_layer(small, part_of(layer.state_dict(), spec, small, group))
        total = total + one(x)
    check_close(layer(x), total)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_cache_grows_by_ten_numbers_per_head(groups):
    """2405.08553: 5 N a stage at rank 2, w1, w2 and g of each key, so (4 R + 2) N for both; nothing
    for queries.
    """
    plain = hw.costs.cached_numbers_per_token(hw.design(model=64, heads=8))
    for rank, sides, each in [
        (2, "both", 10),
        (2, "key", 10),
        (2, "query", 0),
        (3, "both", 14),
        (1, "both", 6),
    ]:
        parts = tuple(
            hw.parts.DynamicComposition(on=on, rank=rank, sides=sides, groups=groups)
            for on in ("scores", "weights")
        )
        assert (
            hw.costs.cached_numbers_per_token(hw.design(model=64, heads=8, modifiers=parts))
            == plain + each * 8
        )


@pytest.mark.parametrize("on", ["scores", "weights"])
def test_whole_groups_are_cut(on):
    spec = base(modifiers=(hw.parts.DynamicComposition(on=on, groups=3, static="full"),), kv=3)
    layer = cases.layer(spec)
    small, weights = hw.attention.head_axis_ops.keep_heads(spec, layer.state_dict(), [3, 4])
    assert (small.heads.q, small.heads.kv, small.score_head_of_output) == (4, 2, (1, 2))
    assert small.modifiers == (hw.parts.DynamicComposition(on=on, members=2, static="full"),)
    assert weights["dynamic_composition.query_hidden"].shape == (4 * 4, 10)
    x, _ = cases.tensors(spec)
    cut = cases.load_layer(small, weights)
    alone = torch.zeros(6, 1, dtype=torch.float64)
    alone[3:5] = 1
    check_close(cut(x), layer(x, probe=hw.Probe("heads", callback=lambda _, o: o * alone)))


def test_groups_that_cross_are_kept_until_all_are_whole():
    """Head 0 needs the pair (0, 1), that the trio (0, 1, 2), that the pair (2, 3), and that all."""
    crossing = (
        hw.parts.DynamicComposition(groups=2),
        hw.parts.DynamicComposition(on="weights", groups=3),
    )
    assert base(modifiers=crossing).required_score_heads(0) == frozenset(range(6))
    assert base(modifiers=crossing[:1]).required_score_heads(0) == {0, 1, 2}
    assert base(modifiers=crossing[1:]).required_score_heads(5) == {4, 5}


def test_the_mix_starts_almost_as_the_identity():
    """With the standard deviations of DCFormer's code: Xavier's for the hidden units, so small ones
    for the rest that the composed scores differ little from those of plain heads.
    """
    torch.manual_seed(0)
    width, heads, rank = 256, 8, 2
    units = 2 * rank * heads
    weights = dict(hw.Attention(hw.PRESETS["dcmha"](model=width, heads=heads)).named_parameters())
    for side in ("query", "key"):
        expected = {
            "hidden": sqrt(2 / (width + units)),
            "source": 0.02 / (sqrt(units) * (heads + rank)),
            "target": 0.02 / (sqrt(units) * (heads + rank)),
            "gate": 0.005 * sqrt(2 / (width + heads)),
        }
        for name, std in expected.items():
            found = weights[f"dynamic_composition.{side}_{name}"].detach().std().item()
            assert found == pytest.approx(std, rel=0.1), name


@pytest.mark.parametrize("on", ["scores", "weights"])
def test_the_kernel_adds_the_static_mix(on: str, monkeypatch: pytest.MonkeyPatch):
    """The layer with the kernel for mixing equals the layer without it, forward and backward."""
    part = DynamicComposition(on=on, static="full", groups=2)
    layer = hw.Attention(base(heads=4, kv=4, modifiers=(part,)), backend="chunked").double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(1, 400, layer.spec.model, dtype=torch.float64)  # several blocks of queries
    kernels, called = dynamic_composition.composing.HEAD_MIXING_KERNELS, []
    monkeypatch.setattr(kernels, "run_kernel", spy(kernels.run_kernel, called))
    results = []
    for is_allowed in (True, False):
        if not is_allowed:
            monkeypatch.setattr(kernels, "can_run", lambda _: False)
        y = layer(x)
        y.square().sum().backward()
        results.append([y.detach(), *(p.grad.clone() for p in layer.parameters())])
        layer.zero_grad()
    assert called
    for fused, plain in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-9, atol=1e-9)


def spy(run, called):
    def run_and_note(*args, **kwargs):
        called.append(args)
        return run(*args, **kwargs)

    return run_and_note
