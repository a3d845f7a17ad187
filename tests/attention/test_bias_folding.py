"""Key biases do not change outputs and value biases add a constant, exactly where that holds;
folding of both.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import headwise as hw

BATCH, TOKENS, SOURCE = 2, 7, 11
ROUNDING = 1e-12


def built(bias: str, **options: object) -> tuple[hw.Attention, hw.Attention]:
    """A layer with every number random but for the bias, which is zero; and its twin with a random
    bias.
    """
    words = {"model": 10, "heads": 6, "dim": 4, "bias": bias} | options
    plain = hw.Attention(hw.design(**words)).double()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(torch.randn_like(parameter))
        plain.project[f"{bias}_bias"].zero_()
    biased = hw.Attention(plain.spec).double()
    biased.load_state_dict(plain.state_dict())
    with torch.no_grad():
        biased.project[f"{bias}_bias"].normal_()
    return plain, biased


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# --- b_K ------------------------------------------------------------------------------------------


# --- b_V ------------------------------------------------------------------------------------------


def constant(layer: hw.Attention) -> Tensor:
    """b_V W_O by heads: each output head adds the bias of the value head that it reads, through its
    own W_O.
    """
    heads, out = layer.spec.heads, layer.output["o"].view(10, layer.spec.heads.q, -1)
    bias = layer.project["v_bias"].view(heads.num_value_heads, heads.vdim)
    return sum(out[:, h] @ bias[heads.value_head_of_row[h]] for h in range(heads.q))


UNEVEN = {"uneven": hw.Heads(q=6, kv=3, dim=4, vdim=5, kv_head_of_query=(2, 0, 0, 1, 0, 0))}
SEPARATE_GROUPS = {
    "values-apart": hw.Heads(q=6, kv=2, dim=4, vdim=5, value_heads=(0, 1, 2, 0, 1, 2))
}


@pytest.mark.parametrize(
    "heads", [*UNEVEN.values(), *SEPARATE_GROUPS.values()], ids=[*UNEVEN, *SEPARATE_GROUPS]
)
def test_the_constant_follows_the_pattern(heads: hw.Heads):
    spec = hw.AttentionSpec(
        model=10,
        heads=heads,
        project=hw.parts.LinearProjection(bias="v"),
        similarity=hw.parts.DotProduct(),
        pattern=hw.patterns.Causal(),
        normaliser=hw.parts.Softmax(),
        merge=hw.parts.ConcatMerge(),
    )
    layer, x = hw.Attention(spec).double(), numbers(BATCH, TOKENS, 10)
    without = layer(x).detach()
    with torch.no_grad():
        layer.project["v_bias"].normal_()
    added = layer(x) - without
    torch.testing.assert_close(added, constant(layer).expand_as(added), rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("backend", ["dense", "sdpa"])
def test_a_query_without_a_key_gets_no_constant(backend: str):
    """Fully masked rows read zero, so there b_V is not handed on; the others in the same call get
    all of it.
    """
    plain, biased = built("v", kv=2)
    for layer in (plain, biased):
        layer.backend_name = backend
    x = numbers(BATCH, TOKENS, 10)
    tokens = hw.SequenceInfo.from_batch(x, lengths=[TOKENS, 5])
    added = biased(x, sequence=tokens) - plain(x, sequence=tokens)
    live = tokens.is_real
    torch.testing.assert_close(
        added[live], constant(biased).expand_as(added[live]), rtol=0, atol=ROUNDING
    )
    assert (added[~live] == 0).all()


# --- how many -------------------------------------------------------------------------------------


# --- folding --------------------------------------------------------------------------------------

FOLDED = {
    "plain": ({}, "q", "o", ()),
    "grouped": (
        {"kv": 2, "vdim": 5, "pattern": "causal()", "modifiers": (hw.parts.Alibi(),)},
        "q",
        "o",
        (),
    ),
    "with an output bias": ({"bias": "qkvo", "kv": 3}, "q", "o", ()),
    "talking scores": ({"modifiers": (hw.parts.TalkingHeads(),)}, "q", "o", ()),
    "turned": ({"modifiers": (hw.parts.Rotary(),)}, "qk", "o", ("k",)),
    "bent": ({"modifiers": (hw.parts.Softcap(0.5),)}, "qk", "o", ("k",)),
    "mixed by who asks": ({"modifiers": (hw.parts.DynamicComposition(),)}, "qk", "o", ("k",)),
    "gated": ({"modifiers": (hw.parts.HeadGate(),)}, "qv", "", ("v",)),
    "mixed weights": ({"modifiers": (hw.parts.TalkingHeads(on="weights"),)}, "qv", "", ("v",)),
    "a sink": ({"normaliser": hw.parts.SinkSoftmax()}, "qkv", "", ("k", "v")),
    "no competition": ({"normaliser": hw.parts.Sigmoid()}, "qkv", "", ("k", "v")),
    "sums of features": (
        {"similarity": hw.parts.FeatureMap(), "normaliser": hw.parts.SumNormaliser()},
        "qk",
        "o",
        ("k",),
    ),
    "sums that may be zero": (
        {
            "similarity": hw.parts.FeatureMap(kind="relu"),
            "normaliser": hw.parts.SumNormaliser(),
            "dim": 1,
        },
        "qkv",
        "",
        ("k", "v"),
    ),
}


@pytest.mark.parametrize("case", FOLDED)
def test_folding_removes_foldable_biases_and_reports_the_others(case: str):
    options, inner, outer, stayed = FOLDED[case]
    layer = hw.Attention(
        hw.design(**({"model": 10, "heads": 6, "dim": 4, "bias": "qkv"} | options))
    ).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    folded = hw.fold_bias(layer.spec, layer.state_dict())
    assert (folded.spec.project.bias, folded.spec.merge.bias, tuple(folded.reasons_kept)) == (
        inner,
        outer,
        stayed,
    )
    other = hw.Attention(folded.spec).double()
    other.load_state_dict(folded.weights)
    x = numbers(BATCH, TOKENS, 10)
    torch.testing.assert_close(other(x), layer(x), rtol=0, atol=1e-11)


def test_folding_changes_queries_without_allowed_keys():
    layer = built("v")[1]
    folded = hw.fold_bias(layer.spec, layer.state_dict())
    other = hw.Attention(folded.spec).double()
    other.load_state_dict(folded.weights)
    blind = torch.zeros(1, 1, 1, TOKENS, dtype=torch.bool)
    x = numbers(BATCH, TOKENS, 10)
    assert (layer(x, mask=blind) == 0).all()
    torch.testing.assert_close(other(x, mask=blind)[0, 0], constant(layer))
