"""What adding, concatenating and mixing heads have to do with each other: identities, and five ways
to merge.
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
EXACT = 1e-14
H, D, V = 6, 4, 5


def copy_with_spec(
    layer: hw.Attention, spec: hw.AttentionSpec, **changed: torch.Tensor
) -> hw.Attention:
    """A layer of another spec with this one's weights but for those that are given, "project_q"."""
    built = hw.Attention(spec).double()
    tensors = layer.state_dict() | {
        name.replace("_", ".", 1): tensor for name, tensor in changed.items()
    }
    built.load_state_dict({name: tensors[name] for name in built.state_dict()})
    return built


def read(layer: hw.Attention) -> tuple[Any, Any]:
    """What every head would read with the weights of every head, A_j V_i: [B, T, j, i, V]; and
    W_O[i]: [i, D, V].
    """
    w, x = written.numbers(layer), X.numpy()
    q, k, v = (written.projected(w, x, side, H) for side in "qkv")
    shares = [written.shares(q[:, :, h], k[:, :, h]) for h in range(H)]
    each = np.stack([np.stack([share @ v[:, :, i] for i in range(H)], 2) for share in shares], 2)
    return each, w["output.o"].reshape(10, H, V).transpose(1, 0, 2)


# --- identities -----------------------------------------------------------------------------------


def test_concatenation_is_the_sum_of_projected_heads():
    layer = cases.layer(base(vdim=V))
    each, out = read(layer)
    assert far(layer(X), sum(each[:, :, h, h] @ out[h].T for h in range(H))) < EXACT


def test_talking_before_the_softmax_is_collaboration_in_blocks():
    """P mixes whole heads, m_i = repeat(P_i, D): what heads share are then blocks of channels of
    one space.
    """
    talking = cases.layer(base(vdim=V, modifiers=(hw.parts.TalkingHeads(on="scores"),)))
    mixing = talking.talking_heads["mixing"].detach()  # of head g into head h
    shared = base(vdim=V, project=hw.parts.Collaborative(width=H * D))
    blocks = {
        "project_mixing": mixing.T.repeat_interleave(D, 1),
        "project_content": torch.zeros(H, 10),
    }
    assert far(copy_with_spec(talking, shared, **blocks)(X), talking(X).detach().numpy()) < EXACT


def test_talking_after_the_softmax_is_all_pairs_of_heads():
    """h^2 heads: the weights of each with the values and the output of each
    other, P[j, i] of them.
    """
    layer = cases.layer(base(vdim=V, modifiers=(hw.parts.TalkingHeads(on="weights"),)))
    mixing = layer.talking_heads["mixing"].detach()
    each, out = read(layer)
    pairs = [mixing[j, i].item() * each[:, :, j, i] @ out[i].T for j in range(H) for i in range(H)]
    assert far(layer(X), sum(pairs)) < EXACT


def test_all_pairs_of_heads_are_a_layer_of_their_own():
    layer = cases.layer(base(vdim=V, modifiers=(hw.parts.TalkingHeads(on="weights"),)))
    state = layer.state_dict()
    first, second = (tuple(pair[n] for pair in np.ndindex(H, H)) for n in range(2))
    heads = hw.Heads(q=H * H, kv=H, dim=D, vdim=V, kv_head_of_query=first, value_heads=second)
    q = state["project.q"].unflatten(0, (H, D))[list(first)].flatten(0, 1)
    out = state["output.o"].unflatten(1, (H, V))[:, list(second)]
    scaled = (out * state["talking_heads.mixing"][list(first), list(second)][:, None]).flatten(1)
    wide = copy_with_spec(
        layer, cases.change_spec(base(), heads=heads), project_q=q, output_o=scaled
    )
    assert far(wide(X), layer(X).detach().numpy()) < EXACT


@pytest.mark.parametrize("of", ["sum", "mean"])
def test_an_unprojected_sum_is_concatenation_with_one_projection_for_all(of: str):
    added = cases.layer(base(vdim=V, bias="o", merge=hw.parts.SumMerge(of=of)))
    tied = added.output["o"].detach().repeat(1, H) / (1 if of == "sum" else H)
    assert (
        far(
            copy_with_spec(added, base(vdim=V, bias="o"), output_o=tied)(X),
            added(X).detach().numpy(),
        )
        < EXACT
    )


def test_an_unprojected_sum_is_invariant_to_the_order_of_heads():
    added = cases.layer(base(vdim=V, merge=hw.parts.SumMerge()))
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    state, wide = added.state_dict(), {"q": D, "k": D, "v": V}
    moved = {
        f"project_{n}": state[f"project.{n}"].unflatten(0, (H, w))[order].flatten(0, 1)
        for n, w in wide.items()
    }
    assert far(copy_with_spec(added, added.spec, **moved)(X), added(X).detach().numpy()) < EXACT
    outputs = cases.layer(base(vdim=V))
    assert far(copy_with_spec(outputs, outputs.spec, **moved)(X), outputs(X).detach().numpy()) > 0.1


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 12])
def test_the_number_of_heads_costs_no_parameters_at_one_width(heads: int):
    spec = hw.design(model=12, heads=heads)
    assert (
        sum(p.numel() for p in hw.Attention(spec).parameters())
        == hw.costs.count_parameters(spec)
        == 4 * 12**2
    )


# --- a mean, and what is cut ----------------------------------------------------------------------


def test_a_mean_is_of_the_heads_that_were_there():
    layer = cases.layer(base(merge=hw.parts.SumMerge(of="mean")))
    small, weights = hw.attention.head_axis_ops.keep_heads(layer.spec, layer.state_dict(), [0, 2])
    assert small.merge == hw.parts.SumMerge(of="mean", heads=6)
    cut = hw.Attention(small).double()
    cut.load_state_dict(weights)
    o = layer.head_outputs(X)[:, :, [0, 2]].detach().numpy()
    assert far(cut(X), o.sum(2) / 6 @ weights["output.o"].numpy().T) < EXACT
    assert (
        hw.attention.head_axis_ops.keep_heads(
            base(merge=hw.parts.SumMerge()), layer.state_dict(), [0]
        )[0].merge
        == hw.parts.SumMerge()
    )


# --- five ways ------------------------------------------------------------------------------------

SIZES = {"model": 30, "heads": 5}
EQUAL = hw.match_size(
    hw.design(merge=hw.parts.SumMerge(), **SIZES), like=hw.design(**SIZES), free="vdim"
).chosen
ARMS = {
    "concat": (hw.design(**SIZES), 4 * 30**2),
    "sum": (hw.design(merge=hw.parts.SumMerge(), **SIZES), 3 * 30**2 + 30 * 6),
    "sum, equal": (hw.design(merge=hw.parts.SumMerge(), vdim=EQUAL, **SIZES), 4 * 30**2),
    "mean": (hw.design(merge=hw.parts.SumMerge(of="mean"), **SIZES), 3 * 30**2 + 30 * 6),
    "fixed": (hw.design(merge=hw.parts.ConcatMerge(output="fixed"), **SIZES), 3 * 30**2),
    "sum, fixed": (
        hw.design(merge=hw.parts.SumMerge(output="fixed", bias="o"), **SIZES),
        3 * 30**2 + 30,
    ),
}


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_trains_all_of_its_declared_parameters(arm: str):
    spec, size = ARMS[arm]
    layer = hw.Attention(spec)
    assert hw.costs.count_parameters(spec) == sum(p.numel() for p in layer.parameters()) == size
    layer(torch.randn(2, 7, 30)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())


def test_equal_parameters_are_as_equal_as_widths_allow():
    assert EQUAL == 10  # 2 d^2 / (h d + d)
    for options in (
        {"model": 30, "heads": 3},
        {"model": 30, "heads": 6, "kv": 2},
        {"model": 7, "heads": 7, "bias": "qkvo"},
    ):
        added, usual = hw.design(merge=hw.parts.SumMerge(), **options), hw.design(**options)
        expected = hw.costs.count_parameters(usual)
        off = [
            abs(hw.costs.count_parameters(added.with_heads(vdim=v)) - expected)
            for v in range(1, 100)
        ]
        assert hw.match_size(added, like=usual, free="vdim").chosen == 1 + off.index(min(off))
    assert hw.match_size(hw.design(**SIZES), like=hw.design(**SIZES), free="vdim").chosen == 6


# --- a projection that is not learned -------------------------------------------------------------


@pytest.mark.parametrize(
    "merge",
    [hw.parts.ConcatMerge(output="fixed", bias="o"), hw.parts.SumMerge(output="fixed", bias="o")],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_fixed_projection_runs_in_every_precision_and_keeps_its_own(
    merge: hw.interfaces.Merge, dtype: torch.dtype
):
    layer = hw.Attention(base(merge=merge, vdim=V))
    before = layer.output["o"].clone()
    layer = layer.to(dtype)
    y = layer(X.to(dtype))
    assert y.dtype == dtype
    assert y.isfinite().all()
    assert torch.equal(layer.output["o"], before)
    assert "output.o" in layer.state_dict()
    assert "output.o" not in dict(layer.named_parameters())


@pytest.mark.parametrize("of", ["sum", "mean"])
def test_a_bias_of_values_folds_into_a_fixed_sum(of: str):
    layer = cases.layer(
        base(vdim=V, kv=2, bias="qkv", merge=hw.parts.SumMerge(of=of, output="fixed"))
    )
    folded = hw.fold_bias(layer.spec, layer.state_dict())
    assert (folded.spec.project, folded.spec.merge.bias, folded.reasons_kept) == (
        hw.parts.LinearProjection(bias="q"),
        "o",
        {},
    )
    bare = copy_with_spec(layer, folded.spec, output_o_bias=folded.weights["output.o_bias"])
    assert far(bare(X), layer(X).detach().numpy()) < 1e-12
