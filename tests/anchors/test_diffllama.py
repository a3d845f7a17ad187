"""transformers' DiffLlama, layer by layer, is differential attention version 1 with its heads in
another order.

With h query and g key-value heads of width D, theirs pairs query head i with i + h/2 and key head j
with j + g/2, where the paper and we pair neighbours; and the value of key group j, 2 D wide, is
their value heads j and j + g/2 one after the other, where ours lie in a row. The norm has no
weights, so ours are ones. Its layers count from 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

import headwise as hw
from anchors.hf import Model, Site, far, linear, randomised

B, T, D, LAYERS = 4, 13, 10, 3
LENGTHS = [T, 11, 6, 1]
OFF = 2e-6  # they take angles and softmax in float32


pytestmark = pytest.mark.usefixtures("without_gradients")


def neighbours(theirs: Tensor) -> Tensor:
    """Rows of heads 0, 1 .. h/2 .. as 0, h/2, 1, h/2 + 1 ..: matrices and biases alike."""
    halves = theirs.reshape(2, theirs.shape[0] // (2 * D), D, -1)
    return halves.transpose(0, 1).reshape(theirs.shape)


def weights(attention: Any) -> dict[str, Tensor]:
    tensors = linear("project.q", attention.q_proj) | linear("project.k", attention.k_proj)
    tensors |= linear("project.v", attention.v_proj)
    lambdas = {
        f"{ours}{n}": getattr(attention, f"lambda_{side}{n}")
        for ours, side in ("aq", "bk")
        for n in (1, 2)
    }
    return (
        {name: neighbours(tensor) for name, tensor in tensors.items()}
        | linear("output.o", attention.o_proj)
        | {f"differential.{name}": tensor.detach() for name, tensor in lambdas.items()}
        | {"differential.norm": torch.ones(2 * D)}
    )


def diffllama(heads: int, kv: int, bias: bool) -> Model:
    """The head's width is not hidden size / heads, and the epsilon is large enough to be seen."""
    config = tf.DiffLlamaConfig(
        vocab_size=37,
        hidden_size=42,
        head_dim=D,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        num_hidden_layers=LAYERS,
        intermediate_size=29,
        rms_norm_eps=1e-2,
        attention_bias=bias,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        attn_implementation="eager",
    )
    model = randomised(tf.DiffLlamaModel(config))
    sites = []
    for depth, layer in enumerate(model.layers):
        spec = hw.design(
            model=42,
            heads=heads // 2,
            kv=kv // 2,
            dim=D,
            pattern="causal()",
            bias="qkvo" if bias else "",
            modifiers=(hw.parts.Rotary(base=500.0), hw.parts.Differential(depth=depth, eps=1e-2)),
        )
        sites.append(
            Site(
                layer.self_attn,
                layer.self_attn,
                spec,
                weights(layer.self_attn),
                ("attentions", depth),
            )
        )
    return Model(model, sites, OFF)


MODELS: dict[str, tuple[int, int, bool]] = {
    "a key for every head": (6, 6, False),
    "grouped": (12, 4, False),
    "one pair of keys": (6, 2, True),
}


@pytest.mark.parametrize("pad", ["none", "right", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_layers_agree(name: str, pad: str, record_property: Callable[[str, object], None]):
    """Outputs and weights of every head, wherever the query is no padding."""
    model, off = diffllama(*MODELS[name]), OFF
    at, mask = hw.SequenceInfo.from_batch(torch.zeros(B, T)), {}
    if pad != "none":
        # In float64 their softmax, taken in float32, is NaN where a padding query may read nothing.
        model.model.float()
        at, off = hw.SequenceInfo.from_batch(torch.zeros(B, T), lengths=LENGTHS, pad=pad), 5e-6
        mask = {"attention_mask": at.is_real.long()}
    live, worst = at.is_real.expand(B, -1), []
    with model.run_with_hooks():
        outputs = model.model(
            torch.randint(2, 37, (B, T)), output_attentions=True, use_cache=False, **mask
        )
    assert [site.inputs[0].shape for site in model.sites] == [(B, T, 42)] * LAYERS
    for site, theirs in zip(model.sites, outputs.attentions, strict=True):
        layer, probe = site.layer, hw.Probe("weights")
        x, y = site.inputs[0], site.outputs[0]
        assert far(layer(x, sequence=at)[live], y[live]) < off
        worst.append(far(layer(x, sequence=at, probe=probe)[live], y[live]))
        paired = theirs.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        worst.append(
            far(probe.tensors["weights"].transpose(1, 2)[live], paired.transpose(1, 2)[live])
        )
    record_property("worst", max(worst))
    assert max(worst) < off


@pytest.mark.parametrize("name", MODELS)
def test_decoding_agrees(name: str, record_property: Callable[[str, object], None]):
    """A prefill, steps of one and a chunk, through their cache and through ours."""
    model, worst, sizes = diffllama(*MODELS[name]), [], (5, 1, 1, 3, 1, 1, 1)
    cache = tf.DynamicCache(config=model.model.config)
    with model.run_with_hooks():
        for part in torch.randint(2, 37, (B, T)).split(sizes, 1):
            model.model(input_ids=part, past_key_values=cache, use_cache=True)
    for site in model.sites:
        layer = site.layer
        stored = layer.cache(batch=B, capacity=T)
        steps = [layer(x, cache=stored) for x in site.inputs]
        assert tuple(step.shape[1] for step in steps) == sizes
        worst += [far(ours, theirs) for ours, theirs in zip(steps, site.outputs, strict=True)]
    record_property("worst", max(worst))
    assert max(worst) < OFF


def test_the_depth_is_seen():
    """What the anchor rests on: a layer at another depth would be far off."""
    model = diffllama(6, 6, False)
    with model.run_with_hooks():
        model.model(torch.randint(2, 37, (B, T)))
    for site in model.sites:
        theirs = site.outputs[0]
        for depth in range(LAYERS):
            site.spec = site.spec.at_depth(depth, LAYERS)
            assert (far(site.layer(site.inputs[0]), theirs) < OFF) == (depth == site.attends[1])
