"""Mixture of attention heads: against transformers' JetMoE, and against the paper's formulas
(2210.05144) one token and head at a time, in float64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw

WIDTH, HEADS, DIM, ACTIVE, TOKENS = 12, 6, 4, 2, 7


def make_layer(**options: Any) -> hw.Attention:
    """A layer with weights of the size of real ones."""
    torch.manual_seed(3)
    routed = hw.parts.MixtureOfHeads(always=0, active=ACTIVE, norm="moa")
    modifiers = (hw.parts.Rotary(), routed)
    sizes: dict[str, Any] = {"model": WIDTH, "heads": HEADS, "dim": DIM, "kv": 1}
    spec = hw.design(**{**sizes, "pattern": "causal", "modifiers": modifiers, **options})
    layer = hw.Attention(spec).double()
    for weight in layer.parameters():
        weight.data = torch.randn_like(weight) * 0.5
    return layer


def test_a_layer_is_the_one_of_jetmoe():
    from transformers import JetMoeConfig
    from transformers.models.jetmoe import modeling_jetmoe

    sizes: dict[str, Any] = {"hidden_size": WIDTH, "num_key_value_heads": 1, "kv_channels": DIM}
    experts: dict[str, Any] = {"num_local_experts": HEADS, "num_experts_per_tok": ACTIVE}
    config = JetMoeConfig(**sizes, **experts)
    config._attn_implementation = "eager"
    theirs = modeling_jetmoe.JetMoeAttention(config, 0).double().eval()
    layer = make_layer()
    own = dict(layer.named_parameters())
    with torch.no_grad():
        theirs.kv_proj.weight.copy_(torch.cat([own["project.k"], own["project.v"]]))
        theirs.experts.bias.zero_()
        theirs.experts.router.layer.weight.copy_(own["mixture_of_heads.router"])
        queries = own["project.q"].view(HEADS, DIM, WIDTH)
        theirs.experts.input_linear.weight.copy_(queries)
        outputs = own["output.o"].view(WIDTH, HEADS, DIM).transpose(0, 1)
        theirs.experts.output_linear.weight.copy_(outputs)
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    angles = modeling_jetmoe.JetMoeRotaryEmbedding(config)(x, torch.arange(TOKENS)[None])
    mask = torch.full((TOKENS, TOKENS), float("-inf"), dtype=torch.float64).triu(1)
    with torch.no_grad():
        expected = theirs(x, attention_mask=mask[None, None], position_embeddings=angles)[0]
        found = layer(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)  # their angles are in float32


def render_gates(x: Tensor, router: Tensor) -> Tensor:
    """w_i = p_i / detach(sum of the p of the chosen heads), [tokens, heads]."""
    rows = []
    for token in x:
        p = torch.softmax(router @ token, 0)
        chosen = sorted(range(HEADS), key=lambda i: -p[i].item())[:ACTIVE]
        total = sum(p[i].item() for i in chosen)
        rows.append(torch.stack([p[i] / total if i in chosen else 0 * p[i] for i in range(HEADS)]))
    return torch.stack(rows)


def test_gates_and_their_gradients_are_those_of_the_paper():
    layer = make_layer()
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    probe = hw.Probe("heads")
    layer(x[None], probe=probe)
    heads = probe.tensors["heads"][0]
    bare = make_layer(modifiers=(hw.parts.Rotary(),))
    bare.load_state_dict({k: v for k, v in layer.state_dict().items() if "mixture" not in k})
    plain = hw.Probe("heads")
    bare(x[None], probe=plain)
    router = layer.get_parameter("mixture_of_heads.router")
    expected = plain.tensors["heads"][0].detach() * render_gates(x, router)[..., None]
    torch.testing.assert_close(heads, expected, rtol=0, atol=1e-12)
    target = torch.randn_like(heads)
    own, other = (torch.autograd.grad((y * target).sum(), router)[0] for y in (heads, expected))
    torch.testing.assert_close(own, other, rtol=0, atol=1e-12)


def test_losses_are_those_of_the_paper():
    """L_a = N sum f_i P_i with both as shares, and L_z = mean (log sum exp)^2."""
    layer = make_layer().requires_grad_(False)
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    losses = hw.attention.AuxLosses()
    layer(x, probe=hw.Probe(aux_losses=losses))
    scores = x.flatten(0, 1) @ layer.get_parameter("mixture_of_heads.router").T
    choices = [0] * HEADS
    for row in scores.tolist():
        for head in sorted(range(HEADS), key=lambda i: -row[i])[:ACTIVE]:
            choices[head] += 1
    shares = torch.tensor(choices, dtype=torch.float64) / sum(choices)
    balance = HEADS * (shares * scores.softmax(-1).mean(0)).sum()
    z = (scores.exp().sum(-1).log() ** 2).mean()
    assert float(losses.total("balance")) == pytest.approx(balance.item(), rel=1e-12)
    assert float(losses.total("z")) == pytest.approx(z.item(), rel=1e-12)


@pytest.mark.parametrize("options", [{"always": 1}, {"always": 0, "router": "norm"}])
def test_shared_heads_and_other_routers_are_refused(options: dict[str, Any]):
    routed = hw.parts.MixtureOfHeads(active=2, norm="moa", **options)
    with pytest.raises(hw.SpecError, match="use always=0 and router='learned'"):
        hw.design(model=WIDTH, heads=HEADS, modifiers=(routed,))


def test_the_loss_of_large_scores_is_finite_in_16_bits():
    layer = make_layer().requires_grad_(False).half()
    x = torch.randn(1, TOKENS, WIDTH).half() * 300
    losses = hw.attention.AuxLosses()
    layer(x, probe=hw.Probe(aux_losses=losses))
    assert 255**2 < float(losses.total("z")) < float("inf")
