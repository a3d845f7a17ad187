"""Norm-weighted attention, rollout, aggregates and shares of a logit, against plain torch on
transformers models.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

import headwise as hw
from headwise.observe.head_analysis.attention_maps import (
    AttentionMaps,
    LayerAttention,
    attribute_logit,
    compute_attention_maps,
)
from headwise.util.errors import SpecError

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2]])


def gpt2() -> Any:
    config = transformers.GPT2Config(
        n_embd=12, n_head=3, n_layer=3, vocab_size=17, n_positions=16, attn_implementation="eager"
    )
    return seeded(transformers.GPT2LMHeadModel, config)


def llama() -> Any:
    config = transformers.LlamaConfig(
        hidden_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        intermediate_size=20,
        vocab_size=17,
        max_position_embeddings=16,
        attn_implementation="eager",
    )
    return seeded(transformers.LlamaForCausalLM, config)


def seeded(kind: Any, config: Any) -> Any:
    torch.manual_seed(0)
    model = kind(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (1 if parameter.ndim == 1 else 0))
    return model


class Parts:
    """Values and output maps of one layer of a model, and its outputs before W_O, from its own
    modules.
    """

    def __init__(self, name: str, model: Any, layer: int) -> None:
        self.name, self.model = name, model
        self.block = model.transformer.h[layer] if name == "gpt2" else model.model.layers[layer]
        self.heads = 3 if name == "gpt2" else 4

    @property
    def output(self) -> Any:
        return self.block.attn.c_proj if self.name == "gpt2" else self.block.self_attn.o_proj

    @property
    def output_maps(self) -> torch.Tensor:
        """[heads, width, model]"""
        weight = self.output.weight if self.name == "gpt2" else self.output.weight.T
        return weight.detach().unflatten(0, (self.heads, -1))

    def values(self, x: torch.Tensor) -> torch.Tensor:
        """[heads, tokens, width] from the input of the attention."""
        if self.name == "gpt2":
            return (
                self.block.attn.c_attn(x)[0]
                .chunk(3, -1)[2]
                .unflatten(-1, (3, 4))
                .transpose(0, 1)
                .detach()
            )
        v = self.block.self_attn.v_proj(x)[0].unflatten(-1, (2, 6)).transpose(0, 1).detach()
        return v.repeat_interleave(2, 0)


MODELS = {"gpt2": gpt2, "llama": llama}


def record(model: Any, module: Any) -> list[torch.Tensor]:
    """The input of a module in one run."""
    found: list[torch.Tensor] = []
    handle = module.register_forward_pre_hook(
        lambda _, args, kwargs: found.append(args[0] if args else kwargs["hidden_states"]),
        with_kwargs=True,
    )
    with torch.no_grad():
        model(IDS)
    handle.remove()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_norm_weighted_attention_is_the_norm_of_what_each_key_adds(name: str):
    model = MODELS[name]()
    maps = compute_attention_maps(model, IDS)
    weights = model(IDS, output_attentions=True).attentions
    for n, site in enumerate(maps.layers):
        parts = Parts(name, model, n)
        (x,) = record(model, parts.block.attn if name == "gpt2" else parts.block.self_attn)
        written = torch.einsum(
            "htS,hSv,hvd->htSd", weights[n][0], parts.values(x), parts.output_maps
        )
        torch.testing.assert_close(maps.weights(site).double(), weights[n][0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            maps.norms(site).double(), written.norm(dim=-1).detach(), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("name", MODELS)
def test_headwise_models_have_the_maps_of_the_transformers_model(name: str):
    model = MODELS[name]()
    from headwise.observe.head_analysis.head_circuits import as_native_model

    ours, theirs = (
        compute_attention_maps(as_native_model(model).eval(), IDS),
        compute_attention_maps(model, IDS),
    )
    assert list(ours.layers) == list(theirs.layers)
    for site in ours.layers:
        torch.testing.assert_close(ours.norms(site), theirs.norms(site), rtol=1e-5, atol=1e-6)


def test_rollout_is_a_product_over_layers():
    model = gpt2()
    expected = np.eye(7)
    for weights in model(IDS, output_attentions=True).attentions:
        expected = (0.5 * np.eye(7) + 0.5 * weights[0].detach().numpy().mean(0)) @ expected
    found = compute_attention_maps(model, IDS).rollout()
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)


def test_rollout_of_rows_with_a_sink_sums_to_one():
    spec = hw.design(model=8, heads=2, pattern="causal()", normaliser=hw.parts.SinkSoftmax())
    net = torch.nn.Sequential(hw.Attention(spec)).eval()
    x = torch.randn(1, 5, 8)
    found = compute_attention_maps(net, x)
    (site,) = found.layers
    assert found.weights(site).sum(-1).max() < 1
    torch.testing.assert_close(found.rollout().sum(-1), torch.ones(5, dtype=torch.float64))
    mean = found.weights(site).double().mean(0)
    torch.testing.assert_close(
        found.rollout(), 0.5 * torch.eye(5) + 0.5 * mean / mean.sum(-1, keepdim=True)
    )


def test_a_query_without_keys_keeps_its_own_state():
    weights = torch.tensor([[[0.0, 0.0], [0.25, 0.75]]])
    maps = AttentionMaps(
        {"a.0.attention": LayerAttention("a.0.attention", "a", "attention", weights, None, "")}
    )
    assert maps.rollout().tolist() == [[1.0, 0.0], [0.125, 0.875]]


@pytest.mark.parametrize("of", ["weights", "norms"])
def test_the_mean_over_heads_and_layers(of: str):
    maps = compute_attention_maps(gpt2(), IDS)
    stacked = np.stack(
        [(maps.weights if of == "weights" else maps.norms)(site).numpy() for site in maps.layers]
    )
    np.testing.assert_allclose(maps.aggregate(of).numpy(), stacked.mean((0, 1)), atol=1e-6)


def test_wrong_names_are_errors():
    maps = compute_attention_maps(gpt2(), IDS)
    with pytest.raises(ValueError, match="unknown quantity 'norm'; did you mean 'norms'"):
        maps.aggregate("norm")
    with pytest.raises(ValueError, match=r"unknown site 'decoder\.9\.attention'"):
        maps.weights("decoder.9.attention")


def test_heads_without_a_map_of_their_own_have_weights_alone():
    spec = hw.design(preset="diff", model=16, heads=2)
    maps = compute_attention_maps(
        torch.nn.Sequential(hw.Attention(spec)).eval(), torch.randn(1, 5, 16)
    )
    (site,) = maps.layers
    assert maps.weights(site).shape == (4, 5, 5)
    with pytest.raises(
        SpecError, match=r"norm-weighted attention of .* is unknown: .*; use the weights"
    ):
        maps.norms(site)


@pytest.mark.parametrize("position", [-1, 2])
@pytest.mark.parametrize("baseline", [None, 11])
@pytest.mark.parametrize("name", MODELS)
def test_shares_of_a_logit_are_those_of_the_residual_stream(name, baseline, position):
    model = MODELS[name]()
    norm, unembed = (
        (model.transformer.ln_f, model.lm_head.weight)
        if name == "gpt2"
        else (model.model.norm, model.lm_head.weight)
    )
    (h,) = record(model, norm)
    h, weight = h[0, position], norm.weight
    readout = unembed[5] - (0 if baseline is None else unembed[baseline])
    found = attribute_logit(model, IDS, token=5, baseline=baseline, position=position)
    expected = []
    for layer in range(len(model.transformer.h if name == "gpt2" else model.model.layers)):
        parts = Parts(name, model, layer)
        (z,) = record(model, parts.output)
        for head, own in enumerate(z[0, position].unflatten(0, (parts.heads, -1))):
            written = own @ parts.output_maps[head]
            if name == "gpt2":
                normed = (
                    (written - written.mean()) / (h.var(unbiased=False) + norm.eps).sqrt() * weight
                )
            else:
                normed = written / (h.square().mean() + norm.variance_epsilon).sqrt() * weight
            expected.append((normed @ readout).item())
    np.testing.assert_allclose(
        [share.value for share in found.heads], expected, rtol=1e-4, atol=1e-6
    )
    logits = model(IDS).logits[0, position]
    logit = logits[5] - (0 if baseline is None else logits[baseline])
    assert found.logit == pytest.approx(logit.item(), rel=1e-4)
    assert found.rest == pytest.approx(found.logit - sum(expected), abs=1e-5)
    assert found.position == position % 7
    assert abs(found.by_size[0].value) == pytest.approx(max(map(abs, expected)), rel=1e-4)


def test_the_most_likely_token_is_explained_if_none_is_named():
    model = gpt2()
    assert attribute_logit(model, IDS).token == model(IDS).logits[0, -1].argmax()
    with pytest.raises(ValueError, match=r"give tokens in 0\.\.16"):
        attribute_logit(model, IDS, token=17)
    with pytest.raises(ValueError, match="no position 7; give one in"):
        attribute_logit(model, IDS, position=7)


def test_models_whose_heads_do_not_add_to_the_logits_are_refused():
    spec = hw.families.read_model_spec(
        {
            "model_type": "bert",
            "hidden_size": 12,
            "num_attention_heads": 3,
            "num_hidden_layers": 1,
            "intermediate_size": 8,
            "vocab_size": 17,
            "architectures": ["BertForMaskedLM"],
        }
    )
    with pytest.raises(SpecError, match=r"its norms are placed 'post'.*estimate_importance"):
        attribute_logit(hw.build(spec, seed=0).eval(), IDS)
