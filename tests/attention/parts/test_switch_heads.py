"""SwitchHead against the formulas of its paper and released code (2312.07987), one token, head and
expert at a time, in float64.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.attention.head_axis_ops import keep_heads
from headwise.attention.interfaces.core_types import CallSize
from headwise.costs.flops import forward_flops
from support.layer_checks import torch_flops

WIDTH, HEADS, DIM, EXPERTS, ACTIVE, TOKENS = 12, 2, 4, 3, 2, 7


def make_layer(**options: Any) -> hw.Attention:
    """A layer with experts of values and outputs, and weights of the size of real ones."""
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"model": WIDTH, "heads": HEADS, "dim": DIM, "pattern": "causal"}
    project = hw.parts.SwitchValues(experts=EXPERTS, active=ACTIVE)
    outputs = hw.parts.SwitchOutputs(experts=EXPERTS, active=ACTIVE)
    spec = hw.design(**{**sizes, "project": project, "modifiers": (outputs,), **options})
    layer = hw.Attention(spec).double()
    for weight in layer.parameters():
        weight.data = torch.randn_like(weight) * 0.5
    return layer


def best(scores: Tensor) -> list[int]:
    """The experts with the largest scores."""
    return sorted(range(EXPERTS), key=lambda e: -scores[e].item())[:ACTIVE]


def render(layer: hw.Attention, x: Tensor) -> Tensor:
    """v = sum of sigmoid(x s_V) x W_V over the chosen experts; y likewise with o, s_O and W_O."""
    p = dict(layer.named_parameters())
    experts_v = p["project.v"].view(HEADS, EXPERTS, DIM, WIDTH)
    router_v = p["project.router"].view(HEADS, EXPERTS, WIDTH)
    router_o = p["switch_outputs.router"].view(HEADS, EXPERTS, WIDTH)
    experts_o = p["output.o"].view(WIDTH, HEADS, EXPERTS, DIM)
    rows = []
    for i, token in enumerate(x):
        y = torch.zeros(WIDTH, dtype=x.dtype)
        for h in range(HEADS):
            q = p["project.q"].view(HEADS, DIM, WIDTH)[h] @ token
            keys = [p["project.k"].view(HEADS, DIM, WIDTH)[h] @ z for z in x[: i + 1]]
            values = []
            for z in x[: i + 1]:
                scores = router_v[h] @ z
                chosen = [torch.sigmoid(scores[e]) * (experts_v[h, e] @ z) for e in best(scores)]
                values.append(torch.stack(chosen).sum(0))
            weights = torch.stack([q @ k / DIM**0.5 for k in keys]).softmax(0)
            o = (weights[:, None] * torch.stack(values)).sum(0)
            scores = router_o[h] @ token
            for e in best(scores):
                y = y + torch.sigmoid(scores[e]) * (experts_o[:, h, e] @ o)
        rows.append(y)
    return torch.stack(rows)


def test_a_layer_and_its_gradients_are_the_formula():
    layer = make_layer()
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    found, expected = layer(x[None])[0], render(layer, x)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    target = torch.randn_like(expected)
    inputs = [x, *layer.parameters()]
    gradients = (torch.autograd.grad((y * target).sum(), inputs) for y in (found, expected))
    for own, other in zip(*gradients, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-11)


def test_values_of_other_experts_are_not_computed():
    """torch's counter sees `active` of the experts, as the cost report does."""
    layer = make_layer(modifiers=()).float()
    one = make_layer(project=hw.parts.SwitchValues(experts=EXPERTS, active=1), modifiers=()).float()
    x = torch.randn(1, TOKENS, WIDTH)
    expected = 2 * TOKENS * HEADS * (ACTIVE - 1) * DIM * WIDTH
    assert torch_flops(layer, x) - torch_flops(one, x) == expected
    work = CallSize(batch=1, queries=TOKENS, new_tokens=TOKENS, keys=TOKENS)
    required = [forward_flops(each.spec, work).total for each in (layer, one)]
    assert required[0] - required[1] == expected


def test_a_compiled_layer_multiplies_with_all_experts(monkeypatch):
    layer = make_layer()
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    expected = layer(x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)


def test_an_expert_is_pruned_by_itself():
    """A pruned expert of an output is one whose block of W_O is zero."""
    layer = make_layer()
    kept = [0, 2, 3, 4]
    spec, weights = keep_heads(layer.spec, layer.state_dict(), kept)
    small = hw.Attention(spec).double()
    small.load_state_dict(weights)
    with torch.no_grad():
        blocks = layer.get_parameter("output.o").view(WIDTH, HEADS * EXPERTS, DIM)
        blocks[:, [1, 5]] = 0
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(small(x), layer(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"project": hw.parts.SwitchValues(experts=2, active=3)}, "active=3.* use at most 2"),
        ({"modifiers": (hw.parts.SwitchOutputs(experts=2, active=3),)}, "use at most 2"),
        ({"project": hw.parts.SwitchValues(bias="v")}, "name each of q and k at most once"),
    ],
)
def test_what_is_not_defined_is_refused(options: dict[str, Any], reason: str):
    with pytest.raises(hw.SpecError, match=reason):
        make_layer(**options)


def test_other_numbers_of_heads_have_experts_too():
    spec = hw.design(preset="switchhead", model=24, heads=6, dim=8, kv=2)
    assert spec.with_heads(q=12).heads.score_head_of_output == tuple(n // 4 for n in range(48))
    one = spec.with_heads(kv=1)
    assert hw.Attention(one)(torch.randn(1, 3, 24)).shape == (1, 3, 24)
    with pytest.raises(hw.SpecError, match="needs 3 output heads for each of 6 rows"):
        replace(spec, modifiers=(hw.parts.SwitchOutputs(experts=3),))
