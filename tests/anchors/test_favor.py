"""Feature maps: random features estimate a softmax, and every form of a sum is one function."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import headwise as hw
from headwise import costs
from headwise.attention import reference
from headwise.attention.parts.feature_map import sample_orthogonal_gaussian
from support import layer_cases as cases
from support.layer_cases import base, check_close
from support.layer_checks import decode_in_chunks


def favor(draws=0, seed=0, **options) -> hw.AttentionSpec:
    """Attention by positive random features."""
    similarity = hw.parts.FeatureMap(kind="favor", draws=draws, seed=seed)
    return base(
        **(
            {"similarity": similarity, "normaliser": hw.parts.SumNormaliser(), "pattern": "causal"}
            | options
        )
    )


def directions(seed, draws, dim) -> torch.Tensor:
    """What one seed draws for heads of this width."""
    return hw.Attention(favor(draws, seed, dim=dim)).similarity["directions"]


def features(x, w):
    """2009.14794, lemma 1, with x scaled by dim^(-1/4) and no stabiliser."""
    x = x * x.shape[-1] ** -0.25
    return np.exp(x @ w.T - (x**2).sum(-1, keepdims=True) / 2) / np.sqrt(len(w))


def test_the_layer_by_its_formula():
    layer = cases.layer(favor(9, 3, kv=2, vdim=5))
    w = {name: tensor.numpy() for name, tensor in layer.state_dict().items()}
    x, _ = cases.tensors(layer.spec)
    result, visible = x.numpy(), np.tril(np.ones((7, 7)))
    heads = []
    for h in range(6):
        g = h // 3
        phi_q, phi_k = (
            features(result @ w[f"project.{side}"][4 * n : 4 * n + 4].T, w["similarity.directions"])
            for side, n in (("q", h), ("k", g))
        )
        shares = phi_q @ phi_k.transpose(0, 2, 1) * visible
        heads.append(
            shares / shares.sum(-1, keepdims=True) @ (result @ w["project.v"][5 * g : 5 * g + 5].T)
        )
    check_close(layer(x), torch.from_numpy(np.concatenate(heads, -1) @ w["output.o"].T))


def test_rows_are_orthogonal_and_as_long_as_gaussians():
    w = directions(5, 40, 16)
    assert w.dtype == torch.float64
    lengths = w.norm(dim=1)
    for block in w.split(16):
        cosines = block @ block.T / (block.norm(dim=1)[:, None] * block.norm(dim=1))
        check_close(cosines, torch.eye(len(block)), atol=1e-13)
    assert lengths.std() > 0.3  # rows of one length sqrt(dim) estimate something else
    assert directions(5, 4096, 16).square().sum(1).mean().item() == pytest.approx(16, rel=0.03)
    assert torch.equal(w, directions(5, 40, 16))
    assert not torch.equal(w, directions(6, 40, 16))
    assert len(directions(0, 0, 16)) == 16 * 3  # ceil(ln 17) = 3


@pytest.mark.parametrize("draws", [3, 13])
def test_a_product_of_features_is_the_exponential_on_average(draws):
    """Over 4000 draws of directions; each mean within 4.5 of its own standard errors."""
    rng = np.random.default_rng(7)
    q, k = rng.normal(size=(2, 6, 8)) * 0.5
    truth = np.exp((q * k).sum(-1) / np.sqrt(8))
    kind = hw.parts.FeatureMap(kind="favor", draws=draws)
    found = np.stack([_products(kind, seed, q, k) for seed in range(4000)])
    error = found.std(0, ddof=1) / np.sqrt(len(found))
    assert (abs(found.mean(0) - truth) < 4.5 * error).all()
    assert (error < 0.025 * truth).all()


def _products(kind, seed, q, k):
    """What is lifted, with the factor of each query that it goes without; of short keys nothing is
    taken off.
    """
    w = sample_orthogonal_gaussian(seed, (kind.draws, 8))
    query_features, key_features = (
        kind.feature_map(torch.from_numpy(x)[None, None], side, {"directions": w})[0, 0]
        for side, x in (("q", q), ("k", k))
    )
    result = q * 8**-0.25
    return (query_features * key_features).sum(-1).numpy() * np.exp(
        (result @ w.numpy().T).max(-1) - (result**2).sum(-1) / 2
    )


def shares_of(layer, x):
    """The weights of one head with identity projections, and the same by the formula in float64."""
    probe, w = hw.Probe("weights"), layer.similarity["directions"].double().numpy()
    with torch.no_grad():
        for side in "qk":
            layer.project[side].copy_(torch.eye(x.shape[-1]))
        layer(x, probe=probe)
    result = x[0].double().numpy() * x.shape[-1] ** -0.25
    exponents = result @ w.T - (result**2).sum(-1, keepdims=True) / 2
    query_features, key_features = (
        np.exp(e)
        for e in (exponents - exponents.max(-1, keepdims=True), exponents - exponents.max())
    )
    shares = query_features @ key_features.T
    return probe.tensors["weights"][0, 0].double().numpy(), shares / shares.sum(-1, keepdims=True)


@pytest.mark.parametrize("dim", [8, 128])
def test_float32_at_the_top_of_the_features(dim):
    """exp(w.x - |x|^2 / 2) is exp(|w|^2 / 2) where x is a direction itself: 1e39 and more at dim
    128.
    """
    layer = hw.Attention(favor(model=dim, heads=1, dim=dim, pattern="full"))
    w = layer.similarity["directions"].float()
    longest = w[w.square().sum(-1).argmax()] * dim**0.25
    near = torch.randn(1, 500, dim) * 0.1 * dim**-0.25
    ours, truth = shares_of(layer, near + longest * torch.linspace(0.2, 1.0, 500)[:, None])
    # the digits that exponents of some 90 leave
    assert abs(ours - truth).max() < 3e-4 * truth.max()
    with torch.no_grad():
        layer.project["v"].copy_(1e3 * torch.eye(dim))
        for x in (longest.expand(1, 500, -1), longest.expand(1, 500, -1) * 0.3):
            assert layer(x).isfinite().all()


@pytest.mark.parametrize("dim", [8, 64, 128, 256])
def test_lengths_that_float32_can_tell(dim):
    layer = hw.Attention(favor(model=dim, heads=1, dim=dim, pattern="full"))
    for length in (0.0, 0.5, 3.0, 8.0, 12.0):
        x = torch.nn.functional.normalize(torch.randn(1, 300, dim), dim=-1) * length * dim**0.25
        ours, truth = shares_of(layer, x)
        assert abs(ours - truth).max() < 2e-5


def test_no_key_leaves_float32():
    """At dim 256 the longest direction is 18 long: what no range could hold counts as the most that
    one can.
    """
    layer = hw.Attention(favor(model=256, heads=1, dim=256))
    w = layer.similarity["directions"].float()
    longest = w[w.square().sum(-1).argmax()] * 256**0.25
    with torch.no_grad():
        for side in "qkv":
            layer.project[side].copy_(torch.eye(256))
    keys = longest.expand(1, 2000, -1).clone().requires_grad_()
    y = layer(keys)
    assert y.isfinite().all()
    assert torch.autograd.grad(y.sum(), keys)[0].isfinite().all()


def test_more_features_come_closer_to_softmax():
    """The error of weights falls as 1 / sqrt(draws): sixteen times as many, a quarter of it, within
    a factor of 1.6.
    """
    exact = cases.layer(base(pattern="causal", dim=8))
    x, _ = cases.tensors(exact.spec)
    truth = hw.Probe("weights")
    with torch.no_grad():
        for name in ("project.q", "project.k"):
            exact.get_parameter(name).mul_(0.2)
    exact(x, probe=truth)

    def error(draws):
        errors = []
        for seed in range(12):
            layer = hw.Attention(favor(draws, seed, dim=8)).double()
            layer.load_state_dict(exact.state_dict(), strict=False)
            probe = hw.Probe("weights")
            layer(x, probe=probe)
            errors.append((probe.tensors["weights"] - truth.tensors["weights"]).square().mean())
        return torch.stack(errors).mean().sqrt().item()

    few, some, many = error(16), error(256), error(4096)
    assert many < 0.003
    for ratio in (few / some, some / many):
        assert 4 / 1.6 < ratio < 4 * 1.6


@pytest.mark.parametrize("kind", ["elu", "relu", "favor"])
def test_parallel_chunked_and_recurrent_are_one_function(kind):
    spec = base(
        similarity=hw.parts.FeatureMap(kind=kind),
        normaliser=hw.parts.SumNormaliser(),
        pattern="causal",
        kv=3,
        vdim=5,
    )
    layer = cases.layer(spec)
    x = torch.randn(2, 131, 10, dtype=torch.float64)
    layer.backend_name = "dense"
    expected = layer(x)
    check_close(expected[:, :9], reference.reference_attention(layer, x[:, :9]))
    layer.backend_name = "linear"
    check_close(layer(x), expected)
    layer.backend_name = None
    for chunks in [(1,) * 131, (64, 1, 66), (130, 1)]:
        cache = layer.cache(batch=2, capacity=131)
        check_close(decode_in_chunks(layer, x, chunks, cache), expected)
    features = spec.similarity.num_state_features(spec.core)
    assert features == (8 if kind == "favor" else 4)
    assert cache.nbytes == 2 * 6 * features * (5 + 1) * 8
    assert cache.nbytes == costs.cache_bytes(spec, batch=2, capacity=1, bytes_per_number=8)


# --- the small numbers that released codes add ----------------------------------------------------


def heads_of(layer: hw.Attention, x: torch.Tensor) -> list[list[np.ndarray]]:
    """Queries, keys and values of each of six heads, by their definition, for three key-value
    heads.
    """
    w = {name: tensor.numpy() for name, tensor in layer.state_dict().items()}
    sides = {side: x.numpy() @ w[f"project.{side}"].T for side in "qkv"}
    widths = {"q": 4, "k": 4, "v": 5}
    return [
        [
            sides[side][..., n * widths[side] : (n + 1) * widths[side]]
            for side, n in (("q", h), ("k", h // 2), ("v", h // 2))
        ]
        for h in range(6)
    ]


def forms(layer: hw.Attention, x: torch.Tensor) -> list[torch.Tensor]:
    """Head outputs [B, T, H, V] of the dense form, the chunked form and token by token from a
    state.
    """
    found = []
    for backend in ("dense", "linear"):
        layer.backend_name = backend
        found.append(layer.head_outputs(x))
    layer.backend_name = None
    cache = layer.cache(batch=len(x), capacity=x.shape[1])
    steps = [layer.head_outputs(x[:, t : t + 1], cache=cache) for t in range(x.shape[1])]
    return [*found, torch.cat(steps, 1)]


def test_eps_of_the_sum_is_that_of_the_released_linear_attention():
    spec = base(
        similarity=hw.parts.FeatureMap(),
        normaliser=hw.parts.SumNormaliser(eps=0.7),
        pattern="causal",
        kv=3,
        vdim=5,
    )
    layer, x = cases.layer(spec), torch.randn(2, 131, 10, dtype=torch.float64)
    expected = []
    for q, k, v in heads_of(layer, x):
        phi_q, phi_k = (np.where(t > 0, t + 1, np.exp(t)) for t in (q, k))
        state = np.cumsum(phi_k[..., None] * v[:, :, None], 1)
        divisor = (phi_q * np.cumsum(phi_k, 1)).sum(-1) + 0.7
        expected.append(np.einsum("btk,btkv->btv", phi_q, state) / divisor[..., None])
    for o_BTHV in forms(layer, x):
        check_close(o_BTHV, torch.from_numpy(np.stack(expected, 2)))
    check_close(layer(x[:, :9]), reference.reference_attention(layer, x[:, :9]))


@pytest.mark.parametrize("eps", [1e-4, 0.3])
def test_eps_of_random_features_is_added_to_each_of_them(eps: float):
    spec = favor(
        9, 3, kv=3, vdim=5, similarity=hw.parts.FeatureMap(kind="favor", draws=9, seed=3, eps=eps)
    )
    layer, x = cases.layer(spec), torch.randn(2, 131, 10, dtype=torch.float64)
    w, expected = layer.similarity["directions"].numpy(), []
    for q, k, v in heads_of(layer, x):
        exponents_q, exponents_k = (
            t * 4**-0.25 @ w.T - (t**2).sum(-1, keepdims=True) / 4 for t in (q, k)
        )
        largest = (q * 4**-0.25 @ w.T).max(-1, keepdims=True)
        phi_q, phi_k = np.exp(exponents_q - largest) + eps, np.exp(exponents_k) + eps
        shares = phi_q @ phi_k.transpose(0, 2, 1) * np.tri(131)
        expected.append(shares / shares.sum(-1, keepdims=True) @ v)
    for o_BTHV in forms(layer, x):
        check_close(o_BTHV, torch.from_numpy(np.stack(expected, 2)))
    check_close(layer(x[:, :9]), reference.reference_attention(layer, x[:, :9]))


def test_eps_counts_against_directions_that_need_an_offset():
    """At dim 128 all exponents of keys lose an offset; eps loses it too."""
    layer = hw.Attention(
        favor(model=128, heads=1, dim=128, similarity=hw.parts.FeatureMap(kind="favor", eps=0.05))
    ).double()
    x, w = torch.randn(1, 40, 128, dtype=torch.float64), layer.similarity["directions"].numpy()
    assert (w**2).sum(-1).max() / 2 > 64
    q, k, v = (x.numpy() @ layer.project[side].detach().numpy().T for side in "qkv")
    exponents_q, exponents_k = (
        t * 128**-0.25 @ w.T - (t**2).sum(-1, keepdims=True) / 2 / 128**0.5 for t in (q, k)
    )
    phi_q = np.exp(exponents_q - (q * 128**-0.25 @ w.T).max(-1, keepdims=True)) + 0.05
    shares = phi_q @ (np.exp(exponents_k) + 0.05).transpose(0, 2, 1) * np.tri(40)
    expected = shares / shares.sum(-1, keepdims=True) @ v
    for o_BTHV in forms(layer, x):
        check_close(o_BTHV[:, :, 0], torch.from_numpy(expected))


def test_sums_with_eps_do_not_reach_one():
    plain = base(
        similarity=hw.parts.FeatureMap(),
        normaliser=hw.parts.SumNormaliser(),
        pattern="causal",
        bias="v",
    )
    short = base(
        similarity=hw.parts.FeatureMap(),
        normaliser=hw.parts.SumNormaliser(eps=1.0),
        pattern="causal",
        bias="v",
    )
    folded, reasons = (
        hw.fold_bias(spec, hw.Attention(spec).state_dict()).reasons_kept for spec in (plain, short)
    )
    assert "v" not in folded
    assert "do not always sum to one" in str(reasons["v"])
    with pytest.raises(
        hw.SpecError,
        match=r"SumNormaliser\(eps=1e-06\) needs scores of a known scale, unlike FeatureMap",
    ):
        favor(normaliser=hw.parts.SumNormaliser(eps=1e-6))
    with pytest.raises(hw.SpecError, match=r"SumNormaliser\(eps=-1.0\) must be at least 0"):
        base(similarity=hw.parts.FeatureMap(), normaliser=hw.parts.SumNormaliser(eps=-1.0))


def test_a_query_that_meets_no_channel_reads_zero():
    spec = base(
        similarity=hw.parts.FeatureMap(kind="relu"),
        normaliser=hw.parts.SumNormaliser(),
        pattern="causal",
    )
    layer = cases.layer(spec)
    with torch.no_grad():
        layer.project["q"][4:8] = 0  # the second head asks for nothing
        layer.project["k"][8:12] = 0  # the third remembers nothing
    x, _ = cases.tensors(spec)
    x.requires_grad_()
    cache = layer.cache(batch=3, capacity=9)
    steps = torch.cat([layer.head_outputs(x[:, t : t + 1], cache=cache) for t in range(7)], 1)
    for o_BTOV in (layer.head_outputs(x), steps):
        assert (o_BTOV[:, :, 1:3] == 0).all()
        assert (o_BTOV[:, -1, [0, 3, 4, 5]] != 0).any()
        assert torch.autograd.grad(o_BTOV.sum(), x, retain_graph=True)[0].isfinite().all()


def test_what_lifting_costs():
    """2 dim m for each query of each score head and each key of each key head; a score then has m
    channels.
    """
    spec = favor(9, kv=2)
    plain = base(
        similarity=hw.parts.FeatureMap(),
        normaliser=hw.parts.SumNormaliser(),
        pattern="causal",
        kv=2,
    )
    work = hw.costs.CallSize(3, 7, 7, 7)
    features = 2 * 3 * 7 * (6 + 2) * 9 * 4
    wider = 2 * 3 * 49 * 6 * (9 - 4)
    assert costs.counted_flops(spec, work) - costs.counted_flops(plain, work) == features + wider
    assert costs.count_parameters(spec) == costs.count_parameters(plain)
    assert costs.count_constants(spec) == 9 * 4


def test_features_are_drawn_anew_and_other_maps_have_none():
    from headwise.attention.initialisation import redraw_features

    layer = hw.Attention(favor(draws=8))
    redraw_features(layer, seed=3)
    drawn = sample_orthogonal_gaussian(3 * 1_000_003, (8, layer.spec.core.dim))
    assert torch.equal(layer.similarity["directions"], drawn)
    elu = hw.parts.FeatureMap(kind="elu")
    assert redraw_features(hw.Attention(favor(similarity=elu)), seed=3) == 0
