"""Alignment of heads before pooling: it keeps the outputs and is never worse than no rotation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import headwise as hw
from headwise.attention import head_axis_ops
from headwise.attention.interfaces.core_types import SymmetryGroup
from headwise.surgery.head_alignment import (
    CrossProducts,
    align_heads,
    align_to_mean,
    compute_kv_features,
    compute_similarity,
    find_symmetry,
    map_heads,
    max_trace,
    pooling_error,
    solve_procrustes,
)
from support import layer_cases as cases
from support.layer_cases import EVERY, base, check_close
from support.refusals import refused_cases

# Whose heads lie in a way that something sees, by side.
UNSUPPORTED_BY_SIDE = {
    "k": {
        "Additive",
        "Collaborative",
        "ComposedHeads",
        "ContextualPositions",
        "FeatureMap",
        "GroupedLatent",
        "HeadCollapse",
        "JointSoftmax",
        "KnockingHeads",
        "MLAProjection",
        "Overlapping",
        "PseudoHeads",
        "PseudoOrder",
        "PseudoRotary",
        "Shaw",
        "SumNormaliser",
        "TensorProduct",
        "TiedProjection",
        "ValueProjection",
    },
    "v": {
        "ComposedHeads",
        "GroupedLatent",
        "HeadCollapse",
        "JointSoftmax",
        "KnockingHeads",
        "Overlapping",
        "OutputGate",
        "PseudoHeads",
        "PseudoOrder",
        "PseudoRotary",
        "Shaw",
        "SumMerge",
        "SumRows",
        "TensorProduct",
        "TiedProjection",
    },
}
MIXING_PARTS = {"Differential0", "Differential1", "TalkingHeads2", "TalkingHeads3"}


def layer_from_weights(spec, weights, dtype=torch.float64) -> hw.Attention:
    layer = hw.Attention(spec).to(dtype).eval()
    layer.load_state_dict(weights, strict=True)
    return layer


def random_maps(free: SymmetryGroup, heads: int, width: int) -> torch.Tensor:
    """Any maps of a freedom."""
    return solve_procrustes(torch.randn(heads, width, width, dtype=torch.float64), free)


def cross_products(layer: hw.Attention, z: torch.Tensor) -> dict[str, CrossProducts]:
    return {
        side: CrossProducts.from_features(x) for side, x in compute_kv_features(layer, z).items()
    }


@pytest.mark.parametrize("name", [name for name in EVERY if name not in MIXING_PARTS])
def test_a_rotation_is_refused_or_does_not_change_the_output(name):
    spec = EVERY[name]
    layer = cases.layer(spec)
    x, z = cases.tensors(spec)
    for side, width in (("k", spec.heads.dim), ("v", spec.heads.vdim)):
        free, reason = find_symmetry(spec, layer.state_dict(), side)
        assert bool(reason) == (free == SymmetryGroup())
        if not reason:
            maps = random_maps(free, spec.heads.kv, width)
            assert (maps - torch.eye(width)).abs().max() > 0.1
            other = layer.state_dict() | map_heads(spec, layer.state_dict(), side, maps)
            fixed = (
                {"atol": 1e-5, "rtol": 1e-5} if name == "ConcatMerge1" else {}
            )  # a constant keeps its float32
            check_close(layer_from_weights(spec, other)(x, source=z), layer(x, source=z), **fixed)


@pytest.mark.parametrize("side", "kv")
def test_only_heads_without_symmetry_cannot_be_rotated(side):
    recorded = {
        name
        for name, spec in cases.EXAMPLES.items()
        if name not in MIXING_PARTS and find_symmetry(spec, cases.layer(spec).state_dict(), side)[1]
    }
    parts = {name.rstrip("0123456789") for name in recorded}
    assert parts - {"Shaw", "QKNorm"} == UNSUPPORTED_BY_SIDE[side] - {"Shaw"}
    norms = [
        part
        for name in recorded
        if "QKNorm" in name
        for _, part in cases.EXAMPLES[name].parts_of(hw.parts.QKNorm)
    ]
    assert [part.kind for part in norms] == (
        ["l2-embedding"] if side == "k" else []
    )  # its embedding has a direction
    assert ("Shaw0" in recorded, "Shaw1" in recorded) == (True, side == "k")


@pytest.mark.parametrize(
    ("options", "side", "reason"), refused_cases(__file__, "alignments", globals(), 2)
)
def test_a_refusal_names_the_part(options, side, reason):
    layer = cases.layer(base(**options))
    assert find_symmetry(layer.spec, layer.state_dict(), side) == (SymmetryGroup(), reason)


def test_a_norm_of_keys_lets_turns_pass_where_its_weights_are_alike():
    spec = base(kv=2, modifiers=(hw.parts.QKNorm(), hw.parts.Rotary()))
    layer = cases.layer(spec)
    x, _ = cases.tensors(spec)
    weights = layer.state_dict() | {
        f"qk_norm.{side}": torch.tensor([2.0, 3, 2, 5]).double() for side in "qk"
    }
    free, reason = find_symmetry(spec, weights, "k")
    assert (free, reason) == (SymmetryGroup(planes=((0, 2),)), "")
    other = weights | map_heads(spec, weights, "k", random_maps(free, 2, 4))
    check_close(layer_from_weights(spec, other)(x), layer_from_weights(spec, weights)(x))
    assert (
        find_symmetry(spec, weights | {"qk_norm.q": torch.tensor([2.0, 3, 1, 5])}, "k")[0]
        == SymmetryGroup()
    )


SPECS = {
    "plain": base(bias="qkvo", kv=3, vdim=5),
    "rotary": base(kv=3, vdim=5, bias="qkv", pattern="causal()", modifiers=(hw.parts.Rotary(),)),
    "partial": base(
        dim=7, modifiers=(hw.parts.Rotary(dims=4, pairs="interleaved"), hw.parts.Alibi()), bias="k"
    ),
    "crossed": base(source=13, bias="qkvo"),
    "paired": base(kv=2, heads=4, modifiers=(hw.parts.DifferentialV2(), hw.parts.Rotary()), vdim=3),
}


def groups_of(kv: int):
    return {2: [(0, 1)], 3: [(2, 0, 1)], 6: [(5, 0, 2), (1, 4, 3)]}[kv]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_aligned_is_the_same_function_and_nearer_to_its_means(name, dtype):
    spec = SPECS[name]
    layer = cases.layer(spec, dtype)
    x, z = cases.tensors(spec, dtype)
    read, groups = x if z is None else z, groups_of(spec.heads.kv)
    built = align_heads(spec, layer.state_dict(), groups, cross_products(layer, read))
    close = (
        {"atol": 1e-10, "rtol": 1e-10} if dtype is torch.float64 else {"atol": 1e-5, "rtol": 1e-5}
    )
    new = layer_from_weights(spec, built.weights, dtype)
    check_close(new(x, source=z), layer(x, source=z), **close)
    assert not built.skip_reasons
    assert all(tensor.dtype == built.weights["project.q"].dtype for tensor in new.parameters())
    for side, (before, after) in built.pooling_errors.items():
        assert after < 0.95 * before  # of random heads, far from chance
        for one, share in ((layer, before), (new, after)):
            result = (
                compute_kv_features(one, read)[side]
                .double()
                .numpy()
                .reshape(-1, spec.heads.kv, compute_kv_features(one, read)[side].shape[-1])
            )
            lost = sum(
                ((result[:, list(g)] - result[:, list(g)].mean(1, keepdims=True)) ** 2).sum()
                for g in groups
            )
            assert share == pytest.approx(
                lost / (result**2).sum(), rel=1e-4 if dtype is torch.float32 else 1e-9
            )


def turned_copies(spec) -> hw.Attention:
    """A layer whose kv heads are all one, each under a turn of its own that
    queries and W_O undo.
    """
    layer, heads = cases.layer(spec), spec.heads
    weights = layer.state_dict()
    for side, width in (("k", heads.dim), ("v", heads.vdim)):
        for name in (f"project.{side}", f"project.{side}_bias"):
            rows = weights[name].unflatten(0, (heads.kv, width))
            weights[name] = rows[:1].expand_as(rows).flatten(0, 1).clone()
        free, _ = find_symmetry(spec, weights, side)
        weights |= map_heads(spec, weights, side, random_maps(free, heads.kv, width))
    return layer_from_weights(spec, weights)


@pytest.mark.parametrize(
    "modifiers", [(), (hw.parts.Rotary(),), (hw.parts.Rotary(dims=2), hw.parts.HeadGate())], ids=str
)
def test_heads_that_differ_by_a_turn_are_pooled_without_loss(modifiers):
    spec = base(kv=3, vdim=5, bias="qkvo", modifiers=modifiers)
    layer = turned_copies(spec)
    x, _ = cases.tensors(spec)
    built = align_heads(spec, layer.state_dict(), [(0, 1, 2)], cross_products(layer, x))
    assert all(after < 1e-12 < 0.1 < before for before, after in built.pooling_errors.values())
    pooled = layer_from_weights(*head_axis_ops.share_kv_heads(spec, built.weights, [(0, 1, 2)]))
    check_close(pooled(x), layer(x), atol=1e-9)
    mean = layer_from_weights(*head_axis_ops.share_kv_heads(spec, layer.state_dict(), [(0, 1, 2)]))
    assert (mean(x) - layer(x)).abs().max() > 1e-2


def test_an_unaligned_side_gives_a_reason_and_is_unchanged():
    spec = base(kv=2, modifiers=(hw.parts.Shaw(reach=3),))
    layer = cases.layer(spec)
    x, _ = cases.tensors(spec)
    built = align_heads(spec, layer.state_dict(), [(0, 1)], cross_products(layer, x))
    assert built.skip_reasons == {"k": "Shaw depends on the basis of keys"}
    assert built.pooling_errors["k"][0] == built.pooling_errors["k"][1]
    assert built.pooling_errors["v"][0] > built.pooling_errors["v"][1]
    assert [
        name
        for name, tensor in built.weights.items()
        if not torch.equal(tensor, layer.state_dict()[name])
    ] == ["project.v", "output.o"]


def brute(x: np.ndarray) -> float:
    """What the means over heads miss of x [tokens, heads, width]."""
    return ((x - x.mean(1, keepdims=True)) ** 2).sum()


FREEDOMS = st.sampled_from(
    [
        SymmetryGroup(),
        SymmetryGroup.full(4),
        SymmetryGroup(planes=((0, 2), (1, 3))),
        SymmetryGroup(planes=((0, 1),), blocks=((2, 3),)),
        SymmetryGroup(blocks=((1,), (0, 3))),
    ]
)


@settings(deadline=None, max_examples=25)
@given(FREEDOMS, st.integers(2, 4), st.integers(1, 9), st.integers(0, 999), st.booleans())
def test_means_of_turned_heads_miss_no_more(free, heads, tokens, seed, poor):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(tokens, heads, 4)) * (rng.random((1, heads, 4)) > 0.5 * poor)
    sums = CrossProducts.from_features(torch.tensor(x)).sums
    maps = align_to_mean(sums, free)
    assert np.allclose(maps @ maps.mT, np.eye(4), atol=1e-12)
    assert np.allclose(maps[0], np.eye(4), atol=1e-12)
    after = np.einsum("nia,iba->nib", x, maps.numpy())
    still = torch.eye(4, dtype=torch.float64).expand(heads, 4, 4)
    whole = (x**2).sum() + 1e-30
    assert pooling_error(sums, maps) / whole == pytest.approx(brute(after) / whole, abs=1e-12)
    assert pooling_error(sums, still) / whole == pytest.approx(brute(x) / whole, abs=1e-12)
    assert brute(after) <= brute(x) + 1e-12 * whole
    met = torch.einsum("ijab,jcb->iac", sums, maps) - torch.einsum("iiab,icb->iac", sums, maps)
    pull = torch.einsum(
        "iab,iba->i", maps, met
    )  # of all others on each head: none is left to give way to
    assert (max_trace(met, free) - pull <= 1e-3 * whole).all()


@settings(deadline=None, max_examples=25)
@given(FREEDOMS, st.integers(0, 999))
def test_the_best_map_is_in_its_freedom_and_no_other_there_is_better(free, seed):
    rng = np.random.default_rng(seed)
    p = rng.normal(size=(4, 4))
    own = solve_procrustes(torch.tensor(p), free).numpy()
    mine = np.trace(own @ p)
    assert max_trace(torch.tensor(p), free).item() == pytest.approx(mine, abs=1e-12)
    allowed = np.eye(4, dtype=bool)
    for group in (*free.planes, *free.blocks):
        allowed[np.ix_(group, group)] = True
    assert np.allclose(own[~allowed], 0)
    assert np.allclose(own @ own.T, np.eye(4))
    for plane in free.planes:
        assert np.linalg.det(own[np.ix_(plane, plane)]) == pytest.approx(1)
        angles = np.linspace(0, 2 * np.pi, 721)
        (aa, ab), (ba, bb) = p[np.ix_(plane, plane)]
        scan = np.cos(angles) * (aa + bb) + np.sin(angles) * (
            ab - ba
        )  # trace of [[c, -s], [s, c]] P
        assert np.trace(own[np.ix_(plane, plane)] @ p[np.ix_(plane, plane)]) >= scan.max() - 1e-12
    for other in random_maps(free, 50, 4).numpy():
        assert np.trace(other @ p) <= mine + 1e-12


def test_likeness_is_that_of_rows_after_the_best_map():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(11, 3, 4)) + 0.5
    x[4, 1] = 0  # a head that says nothing of one token
    products = CrossProducts.from_features(torch.tensor(x))
    found = compute_similarity(products, SymmetryGroup.full(4)).numpy()
    for i in range(3):
        for j in range(3):
            u, _, vh = np.linalg.svd(x[:, i].T @ x[:, j])
            score = -((x[:, i] @ (u @ vh) - x[:, j]) ** 2).sum(-1).mean()
            assert found[i, j] == pytest.approx(score, abs=1e-12)
    unturned = compute_similarity(products)[0, 2].item()
    assert unturned == pytest.approx(-((x[:, 0] - x[:, 2]) ** 2).sum(-1).mean(), abs=1e-12)
    assert unturned < found[0, 2]


def test_features_are_projections_before_rotary_and_norms():
    spec = base(
        kv=2,
        vdim=5,
        bias="qkv",
        modifiers=(hw.parts.QKNorm(), hw.parts.Rotary(), hw.parts.KnockingHeads()),
    )
    layer = cases.layer(spec)
    x, _ = cases.tensors(spec)
    tensors = {name: tensor.numpy() for name, tensor in layer.state_dict().items()}
    for side, width in (("k", 4), ("v", 5)):
        plain = x.numpy() @ tensors[f"project.{side}"].T + tensors[f"project.{side}_bias"]
        check_close(
            compute_kv_features(layer, x)[side], torch.tensor(plain.reshape(3, 7, 2, width))
        )


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from([1, 2, 3, 6]),
    st.permutations(range(6)),
    st.sampled_from(["", "qkvo"]),
    st.booleans(),
)
def test_pooling_and_splitting_equal_heads_is_exact(into, order, bias, rotary):
    spec = base(bias=bias, modifiers=(hw.parts.Rotary(), hw.parts.HeadGate()) if rotary else ())
    groups = [tuple(order[n : n + 6 // into]) for n in range(0, 6, 6 // into)]
    layer = cases.layer(spec)
    weights = layer.state_dict()
    for name in [f"project.{side}" for side in "kv"] + [
        f"project.{side}_bias" for side in "kv" if bias
    ]:
        rows = weights[name].unflatten(0, (6, 4))
        for group in groups:
            rows[list(group)] = rows[group[0]].clone()
    x, _ = cases.tensors(spec)
    outputs = layer(x)
    shared = head_axis_ops.share_kv_heads(spec, weights, groups)
    check_close(layer_from_weights(*shared)(x), outputs)
    check_close(layer_from_weights(*head_axis_ops.split_kv_heads(*shared))(x), outputs)
    assert shared[0].heads.kv == into


def test_invalid_arguments_are_refused():
    spec = base(kv=3)
    layer = cases.layer(spec)
    x, _ = cases.tensors(spec)
    recorded, weights = cross_products(layer, x), layer.state_dict()
    separate = replace(spec, heads=replace(spec.heads, value_heads=(0, 1, 0, 1, 0, 1)))
    with pytest.raises(hw.SpecError, match="grouped separately"):
        align_heads(separate, weights, [(0, 1, 2)], recorded)
    with pytest.raises(ValueError, match="not finite"):
        CrossProducts.from_features(x[..., None] * np.inf)
