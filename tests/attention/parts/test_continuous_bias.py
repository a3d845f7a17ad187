"""Continuous position bias: Swin v2 of transformers, and MoH-ViT written out for one query at a
time.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.attention import reference
from support.layer_cases import check_close

HEADS, DIM, ROWS, COLUMNS = 3, 5, 2, 4
WIDTH, TOKENS = HEADS * DIM, ROWS * COLUMNS


def randomised(spec: hw.AttentionSpec) -> hw.Attention:
    """A layer in float64 whose parameters are all random."""
    layer = hw.Attention(spec).double().eval()
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64) / 2)
    return layer


def swin_layer(trained: tuple[int, int]) -> hw.Attention:
    bias = hw.parts.ContinuousBias(
        rows=ROWS, columns=COLUMNS, trained_rows=trained[0], trained_columns=trained[1]
    )
    modifiers, similarity = (
        (hw.parts.QKNorm(kind="l2", eps=1e-12), bias),
        hw.parts.DotProduct(scale=1.0),
    )
    return randomised(
        hw.design(model=WIDTH, heads=HEADS, modifiers=modifiers, similarity=similarity, bias="qv")
    )


@pytest.mark.parametrize("trained", [(0, 0), (3, 6)])
@torch.no_grad()
def test_heads_are_those_of_swin_v2(trained: tuple[int, int]):
    swin = pytest.importorskip("transformers.models.swinv2.modeling_swinv2")
    config = swin.Swinv2Config(attention_probs_dropout_prob=0.0)
    theirs = (
        swin.Swinv2SelfAttention(config, WIDTH, HEADS, (ROWS, COLUMNS), trained).double().eval()
    )
    ours = swin_layer(trained)
    state = ours.state_dict()
    for side, module in (("q", theirs.query), ("k", theirs.key), ("v", theirs.value)):
        module.weight.copy_(state[f"project.{side}"])
        if side != "k":
            module.bias.copy_(state[f"project.{side}_bias"])
    theirs.logit_scale.copy_(state["qk_norm.temperature"].abs().log()[:, None, None])
    ours.load_state_dict(
        state
        | {"qk_norm.temperature": state["qk_norm.temperature"].abs(), "output.o": torch.eye(WIDTH)}
    )
    first, _, second = theirs.continuous_position_bias_mlp
    first.weight.copy_(state["continuous_bias.hidden"])
    first.bias.copy_(state["continuous_bias.hidden_bias"])
    second.weight.copy_(state["continuous_bias.out"])
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    # transformers makes its table of offsets in float32
    torch.testing.assert_close(ours(x), theirs(x)[0], atol=1e-6, rtol=1e-6)


def moh_vit_by_hand(
    state: dict[str, Tensor], x: Tensor, query: int, always: int, active: int
) -> Tensor:
    """The output of one query, from the formulas of 2410.11842 (its code) and 2311.17132."""

    def spaced(offset: int, size: int) -> float:
        return math.copysign(math.log(1 + 8 * abs(offset) / (size - 1), 8), offset)

    def project(side: str, token: int, head: int) -> Tensor:
        rows = slice(head * DIM, (head + 1) * DIM)
        return state[f"project.{side}"][rows] @ x[token] + state[f"project.{side}_bias"][rows]

    routed = torch.softmax(state["mixture_of_heads.router"] @ x[query], 0)
    best = sorted(range(HEADS - always), key=lambda head: -routed[head])[:active]
    kinds = 2 * torch.softmax(state["mixture_of_heads.kind"] @ x[query], 0)
    shared = (
        torch.ones(1)
        if always == 1
        else always * torch.softmax(state["mixture_of_heads.shared"] @ x[query], 0)
    )
    gates = [kinds[0] * gate for gate in shared]
    total = sum(routed[head] for head in best)
    gates += [
        kinds[1] * active * routed[head] / total if head in best else 0.0
        for head in range(HEADS - always)
    ]
    heads = list[Tensor]()
    for head in range(HEADS):
        q = project("q", query, head)
        q = (q / q.norm() + state["qk_norm.embedding"][head]) * state["qk_norm.temperature"][head]
        scores = list[Tensor]()
        for token in range(TOKENS):
            k = project("k", token, head)
            offset = torch.tensor(
                [
                    spaced(query // COLUMNS - token // COLUMNS, ROWS),
                    spaced(query % COLUMNS - token % COLUMNS, COLUMNS),
                ],
                dtype=torch.float64,
            )
            hidden = torch.relu(
                state["continuous_bias.hidden"] @ offset + state["continuous_bias.hidden_bias"]
            )
            bias = (
                state["continuous_bias.out"][head] @ hidden
                + state["continuous_bias.out_bias"][head]
            )
            scores.append(q @ k / k.norm() + bias)
        weights = torch.softmax(torch.stack(scores), 0)
        heads.append(
            gates[head] * sum(weights[token] * project("v", token, head) for token in range(TOKENS))
        )
    return state["output.o"] @ torch.cat(heads) + state["output.o_bias"]


@pytest.mark.parametrize(("always", "active"), [(1, 1), (2, 1)])
@torch.no_grad()
def test_the_preset_of_moh_vit_is_its_formula(always: int, active: int):
    spec = hw.design(preset="moh_vit", model=WIDTH, heads=HEADS, rows=ROWS, columns=COLUMNS)
    modifiers = (*spec.modifiers[:-1], hw.parts.MixtureOfHeads(always=always, active=active))
    layer = randomised(
        hw.design(
            preset="moh_vit",
            model=WIDTH,
            heads=HEADS,
            rows=ROWS,
            columns=COLUMNS,
            modifiers=modifiers,
        )
    )
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    expected = torch.stack(
        [moh_vit_by_hand(layer.state_dict(), x, query, always, active) for query in range(TOKENS)]
    )
    check_close(layer(x[None])[0], expected)
    check_close(reference.reference_attention(layer, x[None])[0], expected)


def test_offsets_beyond_the_grid_count_as_the_largest():
    part = hw.parts.ContinuousBias(rows=2, columns=4)
    pair = SimpleNamespace(
        i=torch.tensor([0, 4, 8, 40]), j=torch.tensor(0), take=lambda factors, index: index
    )
    assert part.score(torch.zeros(4), pair, torch.empty(0), {}).tolist() == [10, 17, 17, 17]


def test_wrong_fields_are_refused():
    assert list(
        hw.parts.ContinuousBias(rows=0, output="tanh").field_conflicts(swin_layer((0, 0)).spec)
    ) == [
        "ContinuousBias(output='tanh') is unknown; use 'sigmoid' or 'linear'",
        "ContinuousBias(rows=0) must be at least 1",
    ]
