"""Knocking heads by the paper's formulas in numpy; folded into the projection they are plain
attention again.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import headwise as hw
from anchors import written
from anchors.written import far
from headwise import costs
from support import layer_cases as cases
from support.layer_checks import torch_flops

X = torch.linspace(-2, 2, 3 * 7 * 10, dtype=torch.float64).sin().view(3, 7, 10)
EXACT = 1e-13


@pytest.mark.parametrize(
    "knocking", [hw.parts.KnockingHeads(sides="qkv"), hw.parts.KnockingHeads(kind="mlp")], ids=str
)
def test_a_fresh_layer_is_plain_attention(knocking: hw.parts.KnockingHeads):
    options: dict[str, Any] = {"kv": 2, "vdim": 5, "pattern": "causal()", "bias": "qkvo"}
    fresh = hw.Attention(cases.base(modifiers=(knocking,), **options)).double()
    plain = hw.Attention(cases.base(**options)).double()
    plain.load_state_dict(
        {name: tensor for name, tensor in fresh.state_dict().items() if "knocking" not in name}
    )
    assert torch.equal(fresh(X), plain(X))


@pytest.mark.parametrize("sides", ["v", "qk", "qkv"])
def test_one_matrix_for_all_heads_of_a_side(sides: str):
    layer = cases.layer(
        cases.base(
            modifiers=(hw.parts.KnockingHeads(sides=sides),),
            kv=2,
            vdim=5,
            pattern="causal()",
            bias="qkv",
        )
    )
    w, x = written.numbers(layer), X.numpy()
    q, k, v = (
        written.projected(w, x, side, heads) for side, heads in (("q", 6), ("k", 2), ("v", 2))
    )
    knock = {side: w[f"knocking_heads.{side}"].T for side in sides}  # as the paper writes it, x T
    q, k, v = (
        x @ knock[side] if side in knock else x for side, x in (("q", q), ("k", k), ("v", v))
    )
    o = written.read(q, k, v, (0, 0, 0, 1, 1, 1), causal=True)
    assert far(layer.head_outputs(X), o) < EXACT


def test_the_mlp_as_published():
    layer = cases.layer(
        cases.base(modifiers=(hw.parts.KnockingHeads(kind="mlp"),), kv=3, vdim=5, bias="v")
    )
    w, x = written.numbers(layer), X.numpy()
    q, k, v = (
        written.projected(w, x, side, heads) for side, heads in (("q", 6), ("k", 3), ("v", 3))
    )
    up, gate, down = (w[f"knocking_heads.{name}"].T for name in ("up", "gate", "down"))
    v = 2 * ((v @ up) * written.sigmoid(v @ gate)) @ down
    assert far(layer.head_outputs(X), written.read(q, k, v, (0, 0, 1, 1, 2, 2))) < EXACT


@pytest.mark.parametrize(
    ("knocking", "matrices"),
    [(hw.parts.KnockingHeads(sides="qkv"), 3), (hw.parts.KnockingHeads(kind="mlp"), 3)],
)
def test_published_sizes(knocking: hw.parts.KnockingHeads, matrices: int):
    spec = hw.design(model=512, heads=8, modifiers=(knocking,))
    assert (
        hw.costs.count_parameters(spec) - hw.costs.count_parameters(hw.design(model=512, heads=8))
        == matrices * 64**2
    )


def test_cutting_heads_leaves_the_matrix_alone():
    layer = cases.layer(cases.base(modifiers=(hw.parts.KnockingHeads(sides="qkv"),), kv=2, vdim=5))
    _, weights = hw.attention.head_axis_ops.keep_heads(layer.spec, layer.state_dict(), [0, 4])
    assert all(
        torch.equal(weights[f"knocking_heads.{side}"], layer.knocking_heads[side]) for side in "qkv"
    )


# --- folding --------------------------------------------------------------------------------------

ROTARY = hw.parts.Rotary(base=30.0)
ALL, MLP = hw.parts.KnockingHeads(sides="qkv"), hw.parts.KnockingHeads(kind="mlp")
MORE = "it is not one matrix for every head and token"
FOLDED: dict[str, tuple[dict[str, Any], tuple[Any, ...], dict[str, str]]] = {
    "values": ({"modifiers": (hw.parts.KnockingHeads(),)}, (), {}),
    "every side": ({"modifiers": (ALL,), "heads": 6, "kv": 3}, (), {}),
    "twice": (
        {"modifiers": (ALL, hw.parts.KnockingHeads(sides="vq")), "heads": 6, "kv": 3},
        (),
        {},
    ),
    "before it turns": (
        {"modifiers": (ALL, ROTARY), "pattern": "causal()"},
        (ROTARY,),
        {"rotary.q": MORE, "rotary.k": MORE},
    ),
    "after it turned": (
        {"modifiers": (ROTARY, ALL), "pattern": "causal()"},
        (ROTARY, hw.parts.KnockingHeads(sides="qk")),
        {f"rotary.{side}": MORE for side in "qk"}
        | {f"knocking_heads.{side}": f"rotary transforms {side} before it" for side in "qk"},
    ),
    "around an mlp": (
        {"modifiers": (hw.parts.KnockingHeads(), MLP, ALL)},
        (MLP, hw.parts.KnockingHeads(sides="v")),
        {
            "knocking_heads_2.v": MORE,
            "knocking_heads_3.v": "knocking_heads_2 transforms v before it",
        },
    ),
    "other values": (
        {"modifiers": (hw.parts.Differential(), ALL), "heads": 3, "kv": 3, "vdim": None},
        (hw.parts.Differential(),),
        {},
    ),
    "a norm of queries": (
        {"modifiers": (hw.parts.QKNorm(), hw.parts.KnockingHeads(sides="qv"))},
        (hw.parts.QKNorm(), hw.parts.KnockingHeads(sides="q")),
        {
            "qk_norm.q": MORE,
            "knocking_heads.q": "qk_norm transforms q before it",
            "qk_norm.k": MORE,
        },
    ),
}


@pytest.mark.parametrize("bias", ["", "qkvo"])
@pytest.mark.parametrize("case", FOLDED)
def test_folded_is_unfolded(case: str, bias: str):
    options, left, stayed = FOLDED[case]
    layer = cases.layer(cases.base(**({"kv": 2, "vdim": 5, "bias": bias} | options)))
    folded = hw.fold_qk_transforms(layer.spec, layer.state_dict())
    assert (folded.spec.modifiers, folded.reasons_kept) == (left, stayed)
    other = hw.Attention(folded.spec).double()
    other.load_state_dict(folded.weights)
    assert far(other(X), layer(X).detach().numpy()) < 1e-12
    cut = hw.attention.head_axis_ops.keep_heads(*folded[:2], [1])
    assert cut[0].modifiers == left


def test_nothing_to_fold_is_left_as_it_is():
    layer = cases.layer(cases.base(modifiers=(ROTARY, hw.parts.Alibi()), pattern="causal()"))
    folded = hw.fold_qk_transforms(layer.spec, layer.state_dict())
    assert folded.spec == layer.spec
    assert list(folded.weights) == list(layer.state_dict())
    assert all(
        torch.equal(weight, layer.state_dict()[name]) for name, weight in folded.weights.items()
    )


def test_a_bias_behind_a_folded_matrix_can_go_too():
    layer = cases.layer(cases.base(modifiers=(hw.parts.KnockingHeads(),), vdim=5, bias="qkvo"))
    before = hw.fold_bias(layer.spec, layer.state_dict())
    assert before.reasons_kept == {"v": "knocking_heads transforms v after its bias"}
    bare = hw.fold_bias(*hw.fold_qk_transforms(layer.spec, layer.state_dict())[:2])
    assert (bare.spec, bare.reasons_kept) == (
        cases.base(
            vdim=5,
            project=hw.parts.LinearProjection(bias="q"),
            merge=hw.parts.ConcatMerge(bias="o"),
        ),
        {},
    )
    other = hw.Attention(bare.spec).double()
    other.load_state_dict(bare.weights)
    assert far(other(X), layer(X).detach().numpy()) < 1e-12


@pytest.mark.parametrize(
    "project", [hw.parts.ValueProjection(bias="v"), hw.parts.Collaborative(width=9)], ids=repr
)
def test_values_are_knocked_whatever_compares(project: hw.Project):
    """And where all it does is linear, it does not matter whether values or what is read of them
    meet it.
    """
    layer = cases.layer(
        cases.base(project=project, modifiers=(hw.parts.KnockingHeads(),), kv=2, vdim=5)
    )
    plain = hw.Attention(cases.base(project=project, kv=2, vdim=5)).double()
    state = layer.state_dict()
    plain.load_state_dict(
        {name: weight for name, weight in state.items() if "knocking" not in name}
    )
    assert (
        far(
            layer.head_outputs(X),
            (plain.head_outputs(X) @ state["knocking_heads.v"].T).detach().numpy(),
        )
        < EXACT
    )
    assert torch_flops(layer, X) == costs.counted_flops(layer.spec, hw.costs.CallSize(3, 7, 7, 7))
