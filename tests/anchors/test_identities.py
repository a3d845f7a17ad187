"""Golden identities of the published variants, and their published sizes: neither needs our
reference.
"""

from __future__ import annotations

import pytest
import torch

import headwise as hw
from headwise import costs
from support import layer_cases as cases
from support.layer_cases import base, check_close


def plain(layer: hw.Attention, spec, **renamed: str) -> hw.Attention:
    """A layer of another spec with this one's weights, by name or renamed."""
    other = hw.Attention(spec).double().eval()
    state = layer.state_dict()
    other.load_state_dict({key: state[renamed.get(key, key)] for key in other.state_dict()})
    return other


def check_same(spec, usual, x, change=None) -> None:
    """The layer of a spec, after a change of its weights, is the plain layer
    with the rest of them.
    """
    layer = cases.layer(spec)
    with torch.no_grad():
        for part, weights in (change or {}).items():
            for key, value in weights.items():
                getattr(layer, part)[key].copy_(torch.as_tensor(value, dtype=torch.float64))
    check_close(layer(x), plain(layer, usual)(x))


X = torch.linspace(-2, 2, 3 * 7 * 10, dtype=torch.float64).sin().view(3, 7, 10)
EYE = torch.eye(6)


@pytest.mark.parametrize("on", ["scores", "weights"])
def test_talking_heads_that_repeat_themselves(on):
    check_same(
        base(modifiers=(hw.parts.TalkingHeads(on=on),)),
        base(),
        X,
        {"talking_heads": {"mixing": EYE}},
    )


@pytest.mark.parametrize("on", ["scores", "weights"])
def test_dynamic_heads_without_factors(on):
    spec = base(pattern="causal()", modifiers=(hw.parts.DynamicComposition(on=on, static="full"),))
    names = [f"{side}_{kind}" for side in ("query", "key") for kind in ("target", "gate")]
    check_same(
        spec,
        base(pattern="causal()"),
        X,
        {"dynamic_composition": dict.fromkeys((*names, "static"), 0.0)},
    )


@pytest.mark.parametrize("on", ["scores", "weights"])
def test_dynamic_heads_as_published(on):
    """One pair of tokens by the formula of the paper's released code, written out."""
    spec = base(modifiers=(hw.parts.DynamicComposition(on=on, rank=2, static="full"),))
    layer = cases.layer(spec)
    p, place = layer.dynamic_composition, "scores" if on == "scores" else "weights"
    probe, usual = hw.Probe(place), hw.Probe(place)
    layer(X, probe=probe)
    plain(layer, base())(X, probe=usual)
    t, s, b = 4, 2, 1
    a = usual.tensors[place][b, :, t, s]
    mixed = a + a @ p["static"]
    for side, x in (("query", X[b, t]), ("key", X[b, s])):
        u = torch.nn.functional.gelu(p[f"{side}_hidden"] @ x)
        w1 = (p[f"{side}_source"] @ u).view(2, 6)
        w1 = w1 / (w1.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        w2 = (p[f"{side}_target"] @ u).view(2, 6)
        mixed = mixed + (w1 @ a) @ w2 + a * torch.tanh(p[f"{side}_gate"] @ x)
    check_close(probe.tensors[place][b, :, t, s], mixed)


def test_overlapping_heads_without_overlap():
    check_same(base(project=hw.parts.Overlapping(overlap=0)), base(), X)


def test_overlapping_queries_and_keys_are_collaborative_ones_with_a_banded_mixing():
    overlap, heads, dim = 1, 6, 4
    wide = cases.layer(base(project=hw.parts.Overlapping(overlap=overlap)))
    shared = cases.layer(base(project=hw.parts.Collaborative(width=heads * dim)))
    channel = torch.arange(heads * dim)
    band = [
        (channel >= h * dim - overlap) & (channel < (h + 1) * dim + overlap) for h in range(heads)
    ]
    with torch.no_grad():
        shared.project["q"].copy_(wide.project["q"])
        shared.project["k"].copy_(wide.project["k"])
        shared.project["mixing"].copy_(torch.stack(band))
        shared.project["content"].zero_()
    arguments = hw.Probe("scores"), hw.Probe("scores")
    for layer, probe in zip((wide, shared), arguments, strict=True):
        layer(X, probe=probe)
    check_close(arguments[0].tensors["scores"], arguments[1].tensors["scores"])


def test_collaborative_heads_of_full_width_with_blocks_and_the_query_bias():
    usual = cases.layer(base(bias="qkv"))
    shared = cases.layer(base(project=hw.parts.Collaborative(width=24, bias="v")))
    p = usual.project
    with torch.no_grad():
        for name in ("q", "k", "v", "v_bias"):
            shared.project[name].copy_(p[name])
        shared.project["mixing"].copy_(torch.eye(6).repeat_interleave(4, 1))
        content = p["q_bias"].view(6, 4, 1) * p["k"].view(6, 4, 10)
        shared.project["content"].copy_(content.sum(1))
        shared.output["o"].copy_(usual.output["o"])
    check_close(shared(X), usual(X))


def test_differential_heads_that_subtract_nothing():
    spec = base(heads=3, modifiers=(hw.parts.Differential(),))
    layer = cases.layer(spec)
    with torch.no_grad():
        for name in ("b1", "b2"):
            layer.differential[name].zero_()  # lambda is what it starts from
    start = hw.parts.Differential().initial_lambda
    probe = hw.Probe("heads")
    layer(X, probe=probe)
    rows = hw.Attention(hw.design(model=10, heads=6, dim=4)).double()
    assert rows.spec.heads.q == spec.heads.q == 6
    q, k, v = (torch.nn.functional.linear(X, layer.project[n]) for n in "qkv")
    q, k = q.view(3, 7, 6, 4), k.view(3, 7, 6, 4)
    weights = (torch.einsum("bthk,bshk->bhts", q, k) / 2).softmax(-1)
    pair = weights[:, ::2] - start * weights[:, 1::2]
    o = torch.einsum("bhts,bshv->bthv", pair, v.view(3, 7, 3, 8))
    normed = (
        o
        / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        * layer.differential["norm"]
        * (1 - start)
    )
    check_close(probe.tensors["heads"], normed)


def test_a_sink_that_takes_nothing():
    spec = base(normaliser=hw.parts.SinkSoftmax(), pattern="causal()")
    check_same(spec, base(pattern="causal()"), X, {"normaliser": {"sink": -1e9}})


@pytest.mark.parametrize(
    "gate", [hw.parts.HeadGate(start=1e3), hw.parts.OutputGate(start=1e3)], ids=str
)
def test_gates_that_stand_open(gate):
    name = {"HeadGate": "head_gate", "OutputGate": "output_gate"}[type(gate).__name__]
    check_same(base(modifiers=(gate,)), base(), X, {name: {"gate": 0.0, "bias": 1e3}})


def test_routing_without_a_preference_and_all_heads_active():
    spec = base(modifiers=(hw.parts.MixtureOfHeads(always=2, active=4),))
    check_same(spec, base(), X, {"mixture_of_heads": {"router": 0.0, "shared": 0.0, "kind": 0.0}})


def test_routing_sets_its_balance_once():
    layer = cases.layer(base(modifiers=(hw.parts.MixtureOfHeads(always=2, active=3),)))
    with torch.no_grad():
        layer.mixture_of_heads["router"].zero_()
    aux_losses = hw.attention.AuxLosses()
    for _ in range(2):
        layer(X, probe=hw.Probe(aux_losses=aux_losses))
    # at uniform routing the code's value is K
    assert aux_losses.total("balance").item() == pytest.approx(3.0)


def test_routing_leaves_padding_out_of_its_balance():
    layer = cases.layer(base(modifiers=(hw.parts.MixtureOfHeads(always=2, active=1),)))
    short, padded = hw.attention.AuxLosses(), hw.attention.AuxLosses()
    layer(X[:, :4], probe=hw.Probe(aux_losses=short))
    layer(
        X,
        sequence=hw.SequenceInfo.from_batch(X, lengths=[4, 4, 4]),
        probe=hw.Probe(aux_losses=padded),
    )
    check_close(padded.total("balance"), short.total("balance"))


def test_latent_forms_are_one_function():
    turned = (hw.parts.Rotary(pairs="interleaved"),)
    for rank in (None, 9):
        expanded = base(
            project=hw.parts.MLAProjection(rank=8, rope=2, query_rank=rank),
            vdim=5,
            modifiers=turned,
        )
        layer = cases.layer(expanded)
        absorbed = cases.change_spec(
            expanded,
            project=hw.parts.MLAProjection(rank=8, rope=2, query_rank=rank, form="absorbed"),
        )
        check_close(plain(layer, absorbed)(X), layer(X))


def test_the_temperature_of_unit_vectors():
    spec = base(similarity=hw.parts.DotProduct(scale=1.0), modifiers=(hw.parts.QKNorm(kind="l2"),))
    probe = hw.Probe("scores")
    layer = cases.layer(spec)
    with torch.no_grad():
        layer.qk_norm["temperature"].fill_(7.0)
    layer(X, probe=probe)
    assert probe.tensors["scores"].abs().max() <= 7.0 + 1e-9


SIZES = {
    "DeepSeek-V3 attention": (
        187_107_328,
        lambda: hw.design(
            preset="mla",
            model=7168,
            heads=128,
            project=hw.parts.MLAProjection(rank=512, rope=64, query_rank=1536),
        ),
    ),
    "DeepSeek-V2-Lite attention": (13_763_072, lambda: hw.design(preset="mla")),
    "multi-head with biases, d=512": (
        1_050_624,
        lambda: hw.design(model=512, heads=8, bias="qkvo"),
    ),
    "DCMHA extra at 32 heads of 80": (
        4 * 2560**2 + 20 * 32 * 2560 + 64 * 32**2,
        lambda: hw.design(
            model=2560,
            heads=32,
            modifiers=(hw.parts.DynamicComposition(), hw.parts.DynamicComposition(on="weights")),
        ),
    ),
    "MoH extra (h + 2) d": (
        4 * 512**2 + 10 * 512,
        lambda: hw.design(model=512, heads=8, modifiers=(hw.parts.MixtureOfHeads(2, 3),)),
    ),
    "MOHSA extra 2 o h d": (
        4 * 192**2 + 2 * 3 * 12 * 192,
        lambda: hw.design(model=192, heads=12, project=hw.parts.Overlapping(overlap=3)),
    ),
    "collaborative": (
        2 * 768 * 256 + 12 * 256 + 12 * 768 + 2 * 768**2,
        lambda: hw.design(model=768, heads=12, project=hw.parts.Collaborative(width=256)),
    ),
    "talking heads 2 h^2": (
        4 * 512**2 + 2 * 64,
        lambda: hw.design(
            model=512,
            heads=8,
            modifiers=(hw.parts.TalkingHeads(), hw.parts.TalkingHeads(on="weights")),
        ),
    ),
    "differential v1: 4 D + 2 D": (
        4 * 512**2 + 4 * 64 + 128,
        lambda: hw.design(model=512, heads=4, dim=64, modifiers=(hw.parts.Differential(),)),
    ),
}


@pytest.mark.parametrize("name", SIZES)
def test_published_sizes(name):
    size, values = SIZES[name]
    assert costs.count_parameters(values()) == size


CACHES = {
    "Llama-3-8B, a layer": (2 * 8 * 128, lambda: hw.design(model=4096, heads=32, kv=8)),
    "DeepSeek-V3, a layer": (576, lambda: hw.design(preset="mla", model=7168, heads=128)),
    "DCMHA factors 10 N": (
        2 * 2560 + 10 * 32,
        lambda: hw.design(
            model=2560,
            heads=32,
            modifiers=(hw.parts.DynamicComposition(), hw.parts.DynamicComposition(on="weights")),
        ),
    ),
    "overlapping, before it overlaps": (
        2 * 192,
        lambda: hw.design(model=192, heads=12, project=hw.parts.Overlapping(3)),
    ),
}


@pytest.mark.parametrize("name", CACHES)
def test_published_caches(name):
    size, values = CACHES[name]
    assert costs.cached_numbers_per_token(values()) == size
