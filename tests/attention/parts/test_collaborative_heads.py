"""Conversion of a trained layer to collaborative heads: exact where possible, with the error
reported otherwise.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.attention.parts.collaborative import BilinearForm, factorise_truncated_svd
from support import layer_cases as cases
from support.layer_cases import base, check_close


def layer_from_weights(model) -> hw.Attention:
    return cases.load_layer(model.spec, model.weights)


def scores(layer: hw.Attention, x, z=None):
    probe = hw.Probe("scores")
    layer(x, source=z, probe=probe)
    return probe.tensors["scores"]


def forms(layer: hw.Attention) -> np.ndarray:
    """T [heads, model, source] of a plain layer."""
    heads, p = layer.spec.heads, layer.project
    q = p["q"].detach().numpy().reshape(heads.q, heads.dim, -1)
    k = p["k"].detach().numpy().reshape(heads.kv, heads.dim, -1)[list(heads.kv_head_of_query)]
    return np.stack([a.T @ b for a, b in zip(q, k, strict=True)])


def shared_forms(model) -> np.ndarray:
    q, m, k = (model.weights[f"project.{name}"].numpy() for name in ("q", "mixing", "k"))
    return np.stack([q.T @ np.diag(row) @ k for row in m])


def brute(layer: hw.Attention, model) -> float:
    whole = forms(layer)
    return float(np.linalg.norm(whole - shared_forms(model)) / np.linalg.norm(whole))


def sharing(width: int, spec) -> hw.Attention:
    """A plain layer whose heads do compare in one space of `width`, each in a basis of its own."""
    layer, heads = cases.layer(spec), spec.heads
    shared = torch.randn(2, width, spec.model, dtype=torch.float64)
    with torch.no_grad():
        for h in range(heads.q):
            basis = torch.linalg.qr(torch.randn(heads.dim, heads.dim, dtype=torch.float64))[0][
                :, :width
            ]
            rows = slice(h * heads.dim, (h + 1) * heads.dim)
            layer.project["q"][rows] = basis @ (
                torch.randn(width, 1, dtype=torch.float64) * shared[0]
            )
            layer.project["k"][rows] = basis @ shared[1]
    return layer


@pytest.mark.parametrize(
    "options",
    [
        {"bias": "qkvo"},
        {"bias": "qv", "kv": 2, "vdim": 5},
        {"bias": "q", "kv": 1, "source": 13},
        {
            "pattern": "causal()",
            "kv": 3,
            "modifiers": (hw.parts.Alibi(), hw.parts.TalkingHeads(), hw.parts.HeadGate()),
        },
        {"heads": 3, "modifiers": (hw.parts.Differential(),)},
        {"similarity": hw.parts.DotProduct(scale=0.3), "bias": "k"},
    ],
    ids=str,
)
def test_full_width_is_exact(options):
    layer = cases.layer(base(**options))
    x, z = cases.tensors(layer.spec)
    heads = layer.spec.heads
    to_collaborative = hw.parts.convert_to_collaborative(
        layer.spec, layer.state_dict(), heads.q * heads.dim
    )
    check_close(layer_from_weights(to_collaborative)(x, source=z), layer(x, source=z))
    assert to_collaborative.sweeps == 0
    assert to_collaborative.relative_error < 1e-15
    assert (
        to_collaborative.weights["project.mixing"].tolist()
        == torch.eye(heads.q).repeat_interleave(heads.dim, 1).tolist()
    )
    if "k" not in options.get("bias", ""):
        check_close(scores(layer_from_weights(to_collaborative), x, z), scores(layer, x, z))


@pytest.mark.parametrize("width", [2, 3, 4])
def test_a_space_that_is_shared_is_found(width):
    layer = sharing(width, base())
    x, _ = cases.tensors(layer.spec)
    to_collaborative = hw.parts.convert_to_collaborative(layer.spec, layer.state_dict(), width)
    assert to_collaborative.relative_error < 1e-6
    check_close(layer_from_weights(to_collaborative)(x), layer(x), atol=1e-5, rtol=1e-5)
    check_close(
        scores(layer_from_weights(to_collaborative), x), scores(layer, x), atol=1e-4, rtol=1e-5
    )  # at the scale they had
    assert (
        hw.parts.convert_to_collaborative(layer.spec, layer.state_dict(), width - 1).relative_error
        > 0.01
    )


def test_bands_that_overlap_are_found():
    """Overlapping heads compare in the channels of a shared space: twelve, where plain heads would
    keep 24.
    """
    # the fit is not convex: from about half of the seeds it ends in a local minimum
    torch.manual_seed(0)
    spec = base(model=40)
    layer = cases.layer(spec)
    shared = torch.randn(2, 12, 40, dtype=torch.float64)
    with torch.no_grad():
        for h in range(6):
            band = [(2 * h + c) % 12 for c in range(4)]
            rows = slice(4 * h, 4 * h + 4)
            layer.project["q"][rows] = torch.randn(4, 1, dtype=torch.float64) * shared[0, band]
            layer.project["k"][rows] = shared[1, band]
    to_collaborative = hw.parts.convert_to_collaborative(
        spec, layer.state_dict(), 12, max_sweeps=2000
    )
    assert to_collaborative.relative_error < 1e-6


@pytest.mark.parametrize("options", [{}, {"kv": 2, "source": 13}, {"dim": 11, "heads": 2}], ids=str)
@pytest.mark.parametrize("width", [1, 7, 20])
def test_the_error_is_that_of_the_tensor(options, width):
    layer = cases.layer(base(**options))
    for sweeps in (0, 3):
        to_collaborative = hw.parts.convert_to_collaborative(
            layer.spec, layer.state_dict(), width, max_sweeps=sweeps
        )
        assert to_collaborative.relative_error == pytest.approx(
            brute(layer, to_collaborative), rel=1e-9, abs=1e-14
        )
        assert to_collaborative.sweeps <= sweeps


def test_sweeps_and_ranks_never_make_it_worse():
    layer = cases.layer(base(kv=3, vdim=5))
    weights = layer.state_dict()
    swept = [
        hw.parts.convert_to_collaborative(
            layer.spec, weights, 9, max_sweeps=n, tolerance=0.0
        ).relative_error
        for n in (0, 1, 2, 3, 6, 12, 24)
    ]
    assert all(after <= before + 1e-12 for before, after in pairwise(swept))
    assert swept[-1] < 0.98 * swept[0]
    for sweeps in (0, 100):
        ranks = [
            hw.parts.convert_to_collaborative(
                layer.spec, weights, width, max_sweeps=sweeps
            ).relative_error
            for width in (1, 9, 19)
        ]
        assert all(after < before for before, after in pairwise(ranks))


def test_each_step_is_the_best_for_the_others():
    """After many sweeps no factor can be bettered alone: a least-squares fit of each on the tensor
    finds it again.
    """
    layer = cases.layer(base())
    to_collaborative = hw.parts.convert_to_collaborative(
        layer.spec, layer.state_dict(), 5, max_sweeps=3000, tolerance=0.0
    )
    q, m, k = (to_collaborative.weights[f"project.{name}"].numpy() for name in ("q", "mixing", "k"))
    whole = forms(layer)
    design = np.einsum("rd,re->der", q, k).reshape(-1, 5)
    best = np.linalg.lstsq(design, whole.reshape(6, -1).T, rcond=None)[0].T
    np.testing.assert_allclose(best, m, atol=1e-4)
    design = np.einsum("hr,re->her", m, k).reshape(-1, 5)
    best = np.linalg.lstsq(design, whole.transpose(0, 2, 1).reshape(-1, 10), rcond=None)[0]
    np.testing.assert_allclose(best, q, atol=1e-4)


def test_initialisation_uses_singular_triples():
    layer = cases.layer(base())
    whole = forms(layer)
    sizes = np.sort(np.concatenate([np.linalg.svd(form, compute_uv=False)[:4] for form in whole]))
    started = hw.parts.convert_to_collaborative(
        layer.spec, layer.state_dict(), 9, max_sweeps=0
    ).relative_error
    assert started == pytest.approx(np.linalg.norm(sizes[:-9]) / np.linalg.norm(whole), rel=1e-9)
    rng = np.random.default_rng(0)
    for _ in range(20):  # random vectors, with the very best mixing of them
        q, k = rng.standard_normal((2, 9, 10))
        design = np.einsum("rd,re->der", q, k).reshape(-1, 9)
        mixing = np.linalg.lstsq(design, whole.reshape(6, -1).T, rcond=None)[0]
        assert started < np.linalg.norm(design @ mixing - whole.reshape(6, -1).T) / np.linalg.norm(
            whole
        )


def test_the_same_twice_and_in_the_dtype_it_had():
    layer = cases.layer(base(bias="q"), torch.float32)
    one, two = (
        hw.parts.convert_to_collaborative(layer.spec, layer.state_dict(), 9) for _ in range(2)
    )
    assert all(torch.equal(one.weights[name], two.weights[name]) for name in one.weights)
    assert {tensor.dtype for tensor in one.weights.values()} == {torch.float32}
    assert one.spec == two.spec


def test_heads_wider_than_the_shared_space():
    """Two heads of 11 on 10 channels have 20 products at most; the rest of the width is empty, and
    exact.
    """
    form = BilinearForm(*torch.randn(2, 2, 11, 10, dtype=torch.float64))
    q, mixing, k = factorise_truncated_svd(form, 21)
    assert q.shape == k.shape == (21, 10)
    check_close(torch.einsum("rd,hr,re->hde", q, mixing, k), form.q.mT @ form.k)


@pytest.mark.parametrize(
    "times",
    [{"q": 1e-200}, {"q": 1e-160, "k": 1e-140}, {"q": 1e80, "k": 1e80}, {"k": 1e-310}],
    ids=str,
)
def test_the_error_does_not_depend_on_size(times):
    layer = cases.layer(base())
    weights, x = layer.state_dict(), torch.randn(3, 7, 10, dtype=torch.float64)
    plain = hw.parts.convert_to_collaborative(layer.spec, weights, 7)
    scaled = {
        name: tensor * times.get(name.removeprefix("project."), 1.0)
        for name, tensor in weights.items()
    }
    to_collaborative = hw.parts.convert_to_collaborative(layer.spec, scaled, 7)
    assert to_collaborative.relative_error == pytest.approx(plain.relative_error, rel=1e-6)
    assert hw.parts.convert_to_collaborative(layer.spec, scaled, 24).relative_error == 0
    assert layer_from_weights(to_collaborative)(x).isfinite().all()


def test_the_largest_head_sets_the_scale_of_all():
    """A head that is larger by 1e200 is approximated alone, and its squares do not overflow."""
    layer = cases.layer(base())
    with torch.no_grad():
        layer.project["q"][:4] *= 1e200
    conversion = hw.parts.convert_to_collaborative(layer.spec, layer.state_dict(), 4)
    assert conversion.relative_error < 1e-12
    assert all(weight.isfinite().all() for weight in conversion.weights.values())


@pytest.mark.parametrize("heads", [6, 1], ids=["all", "one"])
@pytest.mark.parametrize("sides", ["q", "k", "qk"])
@pytest.mark.parametrize("width", [7, 24])
def test_heads_with_zero_scores(heads, sides, width):
    layer = cases.layer(base())
    with torch.no_grad():
        for side in sides:
            layer.project[side][: 4 * heads] = 0
    to_collaborative = hw.parts.convert_to_collaborative(layer.spec, layer.state_dict(), width)
    assert (
        to_collaborative.relative_error < 1e-15
        if heads == 6 or width == 24
        else 0 < to_collaborative.relative_error < 1
    )
    assert all(weight.isfinite().all() for weight in to_collaborative.weights.values())
    x, _ = cases.tensors(layer.spec)
    if heads == 6 or width == 24:
        check_close(layer_from_weights(to_collaborative)(x), layer(x))
    assert (
        scores(layer_from_weights(to_collaborative), x)[:, :heads].abs()
        <= 0.1 * scores(layer, x).abs().max()
    ).all()


def test_the_query_bias_needs_no_softmax():
    layer = cases.layer(
        base(bias="qv", normaliser=hw.parts.Sigmoid(), modifiers=(hw.parts.Softcap(limit=3.0),))
    )
    x, _ = cases.tensors(layer.spec)
    check_close(
        layer_from_weights(hw.parts.convert_to_collaborative(layer.spec, layer.state_dict(), 24))(
            x
        ),
        layer(x),
    )


def test_a_converted_layer_can_be_cut():
    layer = cases.layer(base(bias="q", kv=2))
    to_collaborative = hw.parts.convert_to_collaborative(layer.spec, layer.state_dict(), 9)
    x, _ = cases.tensors(layer.spec)
    loud = torch.tensor([0.0, 1, 0, 1, 1, 0], dtype=torch.float64)[:, None]
    silenced = layer_from_weights(to_collaborative)(
        x, probe=hw.Probe("heads", callback=lambda _, o: o * loud)
    )
    spec, weights = hw.attention.head_axis_ops.keep_heads(
        to_collaborative.spec, to_collaborative.weights, [1, 3, 4]
    )
    cut = cases.load_layer(spec, weights)
    check_close(cut(x), silenced)


def test_the_forward_formula():
    """s = D^-1/2 (x W_Q diag(m_i) W_K^T z^T + z c_i), softmax over keys, values per head, merged:
    in numpy.
    """
    layer = cases.layer(
        base(project=hw.parts.Collaborative(width=9, bias="v"), kv=3, vdim=5, source=13)
    )
    x, z = cases.tensors(layer.spec)
    w = {name: tensor.numpy() for name, tensor in layer.state_dict().items()}
    q, k = x.numpy() @ w["project.q"].T, z.numpy() @ w["project.k"].T
    v = (z.numpy() @ w["project.v"].T + w["project.v_bias"]).reshape(3, 11, 3, 5)
    y = np.zeros((3, 7, 10))
    for i in range(6):
        s = (q * w["project.mixing"][i]) @ k.transpose(0, 2, 1) + (
            z.numpy() @ w["project.content"][i]
        )[:, None]
        e = np.exp(s / 2 - (s / 2).max(-1, keepdims=True))
        y += (
            (e / e.sum(-1, keepdims=True)) @ v[:, :, i // 2] @ w["output.o"][:, 5 * i : 5 * i + 5].T
        )
    check_close(layer(x, source=z), torch.from_numpy(y))


def test_initialisation_of_the_mixing():
    def started(start, heads, width):
        spec = hw.design(
            model=10, heads=heads, dim=4, project=hw.parts.Collaborative(width=width, start=start)
        )
        return hw.Attention(spec).project["mixing"].detach()

    assert started("blocks", 3, 7).tolist() == [
        [1, 1, 1, 0, 0, 0, 0],
        [0, 0, 0, 1, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 1],
    ]
    assert started("ones", 3, 7).tolist() == [[1.0] * 7] * 3
    assert started("normal", 50, 200).std().item() == pytest.approx(0.2, rel=0.05)
    with pytest.raises(hw.SpecError, match=r"start='uniform'.*'normal', 'ones' or 'blocks'"):
        started("uniform", 3, 7)
