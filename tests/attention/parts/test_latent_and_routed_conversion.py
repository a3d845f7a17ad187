"""Exact conversion of layers to multi-head latent attention and to mixture-of-heads attention, or a
refusal.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.attention.parts.latent_attention import convert_to_latent
from headwise.attention.parts.mixture_of_heads import convert_to_mixture_of_heads
from support import layer_cases as cases
from support.layer_cases import EVERY, EVERY_CASE, base, check_close

# What a latent is no other form of: other projects, products that are none, turns and steps that
# see heads as wide as they were, values that are grouped apart.
NO_LATENT = {
    "Additive",
    "Collaborative",
    "ComposedHead",
    "ContextualPosition",
    "Differential",
    "DifferentialV",
    "FactoredQuerie",
    "FeatureMap",
    "Gaussian",
    "GroupedLatent",
    "HeadCollapse",
    "JointSoftmax",
    "KeyQueryConvolution",
    "KnockingHead",
    "MLAProjection",
    "Overlapping",
    "PseudoHead",
    "PseudoOrder",
    "PseudoRotary",
    "QKNorm",
    "SelectiveAttention",
    "Shaw",
    "SumNormaliser",
    "SwitchValue",
    "TensorProduct",
    "TiedProjection",
    "ValueProjection",
}
ONES = {"ContinuousBias1", "HardConcreteGate4", "MixtureOfHeads5", "TalkingHeads2", "TalkingHeads3"}


@pytest.mark.parametrize("name", EVERY_CASE)
def test_a_merged_layer_is_refused_or_the_same(name):
    spec = EVERY[name]
    layer = cases.layer(spec)
    x, z = cases.tensors(spec)
    if name in ONES or {part.rstrip("0123456789s") for part in name.split("-")} & NO_LATENT:
        with pytest.raises(hw.SpecError):
            convert_to_latent(spec, layer.state_dict())
        return
    values, weights = convert_to_latent(spec, layer.state_dict())
    shared = cases.load_layer(values, weights)
    check_close(shared(x, source=z), layer(x, source=z))
    if z is None and spec.pattern.tokens_before_decode == 0:
        cache = shared.cache(batch=3, capacity=7)
        steps = [shared(x[:, t : t + 1], cache=cache) for t in range(7)]
        check_close(torch.cat(steps, 1), layer(x))


@pytest.mark.parametrize(
    "options",
    [
        {"modifiers": (hw.parts.Rotary(),)},
        {"modifiers": (hw.parts.Rotary(pairs="interleaved"),), "bias": "qkvo"},
        {"modifiers": (hw.parts.Rotary(dims=2),), "bias": "v"},
        {
            "modifiers": (
                hw.parts.Rotary(dims=4, scaling=hw.parts.YaRN(factor=4.0, original=32)),
                hw.parts.Alibi(),
            ),
            "dim": 7,
            "bias": "qk",
        },
        {"similarity": hw.parts.DotProduct(scale=0.3), "source": 13, "bias": "k"},
    ],
    ids=str,
)
def test_the_latent_of_a_token_holds_its_keys_and_values(options):
    spec = base(**({"kv": 3, "vdim": 5} | options))
    layer = cases.layer(spec)
    x, z = cases.tensors(spec)
    values, weights = convert_to_latent(spec, layer.state_dict())
    shared = cases.load_layer(values, weights)
    check_close(shared(x, source=z), layer(x, source=z))
    assert hw.costs.cached_numbers_per_token(values) == hw.costs.cached_numbers_per_token(spec)
    read = x if z is None else z
    ours, theirs = shared.project_source(read).entry, layer.project_source(read).entry
    latents = torch.cat([ours["c"], ours["r"]], -1).sort(-1).values
    check_close(
        latents, torch.cat([theirs["k"].flatten(2), theirs["v"].flatten(2)], -1).sort(-1).values
    )
    half = convert_to_latent(
        spec, {name: tensor.float() for name, tensor in layer.state_dict().items()}
    )
    check_close(
        cases.load_layer(*half, torch.float32)(x.float(), source=z if z is None else z.float()),
        layer(x, source=z),
        rtol=1e-4,
        atol=1e-4,
    )


# --- heads that tokens choose ---------------------------------------------------------------------


@pytest.mark.parametrize("shared", [(), (2,), (5, 0, 3), (0, 1, 2, 3, 4, 5)], ids=str)
def test_all_heads_routed_to_are_the_same_layer(shared):
    spec = base(
        kv=2, pattern="causal()", bias="qkvo", modifiers=(hw.parts.Rotary(), hw.parts.Alibi())
    )
    layer = cases.layer(spec)
    x, _ = cases.tensors(spec)
    check_close(
        cases.load_layer(
            *convert_to_mixture_of_heads(spec, layer.state_dict(), shared, 6 - len(shared))
        )(x),
        layer(x),
    )


@pytest.mark.parametrize("shared", [(), (4,), (5, 1)], ids=str)
def test_a_token_closes_the_heads_with_the_smallest_query_norms(shared):
    spec = base(kv=2, pattern="causal()", bias="qkvo", modifiers=(hw.parts.Rotary(),))
    layer = cases.layer(spec)
    x, _ = cases.tensors(spec)
    tensors = {name: tensor.numpy() for name, tensor in layer.state_dict().items()}
    q = (x.numpy() @ tensors["project.q"].T + tensors["project.q_bias"]).reshape(3, 7, 6, 4)
    others = [head for head in range(6) if head not in shared]
    order = np.linalg.norm(q, axis=-1)[..., others].argsort(-1)
    gate = np.ones((3, 7, 6))
    for silent in range(len(others) - 2):
        np.put_along_axis(gate, np.array(others)[order[..., silent : silent + 1]], 0.0, -1)
    heads = layer.head_outputs(x).detach().numpy() * gate[..., None]
    result = (
        np.einsum("btov,dov->btd", heads, tensors["output.o"].reshape(10, 6, 4))
        + tensors["output.o_bias"]
    )
    check_close(
        cases.load_layer(*convert_to_mixture_of_heads(spec, layer.state_dict(), shared, 2))(x),
        torch.tensor(result),
    )


def test_pairs_are_routed_by_the_query_of_the_first():
    spec = base(heads=3, modifiers=(hw.parts.DifferentialV2(),))
    values, weights = convert_to_mixture_of_heads(spec, cases.layer(spec).state_dict(), [1], 1)
    assert weights["mixture_of_heads.asker"].tolist() == [0, 4]
    assert weights["mixture_of_heads.slot"].tolist() == [1, 0, 2]
    assert values.modifiers[-1] == hw.parts.MixtureOfHeads(always=1, active=1, router="norm")
