"""QK and OV circuits against full products, copying scores against eigenvalues,
random baselines.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.attention.head_axis_ops import KeptHeads
from headwise.observe.head_analysis.head_circuits import (
    AttentionCircuits,
    LowRankMap,
    as_native_model,
    compare_circuits,
    copying_score,
    fold_circuits,
    get_circuits,
    get_token_tables,
    make_random_baseline,
)
from headwise.observe.head_analysis.rank_analysis import measure_qk_spectra
from headwise.observe.inspect.attention_sites import find_attention
from headwise.util.errors import SpecError
from support.number_examples import WORDS, small_gpt2


def layer(**options: Any) -> AttentionCircuits:
    """The circuits of one attention of 8 channels and 4 heads with weights in float64."""
    torch.manual_seed(0)
    built = hw.Attention(hw.design(**({"model": 8, "heads": 4} | options))).double()
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    (one,) = get_circuits(torch.nn.ModuleList([built])).values()
    return one


def random_map(rank: int = 2, wide: int = 7, seed: int = 0) -> LowRankMap:
    draw = torch.Generator().manual_seed(seed)
    return LowRankMap(
        *(
            torch.randn(*shape, generator=draw, dtype=torch.float64)
            for shape in ((wide, rank), (rank, wide))
        )
    )


# --- the maps -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv": 2},
        {"kv": 1, "vdim": 3},
        {"source": 6},
        {"merge": hw.parts.SumMerge()},
        {"merge": hw.parts.SumMerge(of="mean"), "bias": "o"},
    ],
)
def test_scores_and_outputs_are_those_of_the_layer(options: dict[str, Any]):
    outputs = layer(**options)
    x, z = (
        torch.randn(1, 5, 8, dtype=torch.float64),
        torch.randn(1, 6, options.get("source", 8), dtype=torch.float64),
    )
    z = z if "source" in options else x
    probe = hw.Probe("scores", "weights", "heads")
    with torch.no_grad():
        y = outputs.layer(x, source=z if "source" in options else None, probe=probe)
        nothing = outputs.layer.merge_heads(torch.zeros_like(probe.tensors["heads"]))
    total = torch.zeros_like(y[0])
    for head in range(4):
        qk, ov = outputs.qk_circuit(head), outputs.ov_circuit(head)
        scores = x[0] @ qk.product @ z[0].T / math.sqrt(2)
        torch.testing.assert_close(probe.tensors["scores"][0, head], scores.detach())
        total += probe.tensors["weights"][0, head] @ z[0] @ ov.product
        said_one = torch.zeros_like(probe.tensors["heads"])
        said_one[0, :, head] = probe.tensors["heads"][0, :, head]
        wrote = probe.tensors["heads"][0, :, head] @ outputs.output_map(head)
        torch.testing.assert_close(
            wrote, (outputs.layer.merge_heads(said_one) - nothing)[0].detach()
        )
    torch.testing.assert_close(total + nothing[0], y[0])


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "bart", "t5", "phi3", "qwen3"])
def test_models_of_transformers_are_read_from_their_live_weights(name: str):
    pytest.importorskip("transformers")
    from support.transformers_models import ZOO

    model = ZOO[name].build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)  # whatever a folder says
    circuits = get_circuits(model)
    assert [one.site.name for one in find_attention(model)] == list(circuits)
    wide = circuits[next(iter(circuits))].spec.heads.dim * 4
    first = next(iter(circuits.values()))
    own = dict(model.named_parameters())
    names = {
        "bert": "encoder.layer.0.attention.self.query.weight",
        "gpt2": "transformer.h.0.attn.c_attn.weight",
        "llama": "model.layers.0.self_attn.q_proj.weight",
        "qwen3": "model.layers.0.self_attn.q_proj.weight",
        "bart": "model.encoder.layers.0.self_attn.q_proj.weight",
        "phi3": "model.layers.0.self_attn.qkv_proj.weight",
        "t5": "encoder.block.0.layer.0.SelfAttention.q.weight",
    }
    q = own[names[name]].detach()
    q = q.T[:wide] if name == "gpt2" else q[:wide]
    torch.testing.assert_close(first.qk_circuit(1).left, q.view(4, 8, -1)[1].T)


def test_unsupported_models_are_refused_with_the_reason():
    pytest.importorskip("transformers")
    from support.transformers_models import FALLBACK

    with pytest.raises(SpecError, match="deberta-v2"):
        get_circuits(FALLBACK["deberta-v2"].build())
    with pytest.raises(SpecError, match=r"it has no config; use a model of hw\.build"):
        get_circuits(torch.nn.MultiheadAttention(8, 2))


def test_layers_without_such_maps_are_refused():
    with pytest.raises(
        SpecError, match="has no single matrix per head for q; they need layers whose q"
    ):
        layer(project=hw.parts.Collaborative(width=4)).qk_circuit(0)
    with pytest.raises(SpecError, match="which is not a product of W_Q and W_K"):
        layer(similarity=hw.parts.Additive()).qk_circuit(0)
    with pytest.raises(SpecError, match=r"combines rows by Differential.*no single W_V"):
        layer(heads=8, modifiers=(hw.parts.Differential(),), vdim=2).ov_circuit(0)
    with pytest.raises(ValueError, match=r"score head must be in 0\.\.3, got 4"):
        layer().qk_circuit(4)
    with pytest.raises(ValueError, match=r"output head must be in 0..3, got -1"):
        layer().ov_circuit(-1)


def test_a_head_whose_queries_only_a_router_reads_has_no_qk_circuit():
    routed = hw.design(model=8, heads=4, modifiers=(hw.parts.MixtureOfHeads(2, 1, router="norm"),))
    pruned = torch.nn.ModuleList([hw.Attention(KeptHeads.from_spec(routed, [1, 3]).spec)])
    (circuits,) = get_circuits(pruned).values()
    with pytest.raises(
        SpecError,
        match=r"only a gate reads the queries of score head 0 of .*; name one of \[1, 3\]",
    ):
        circuits.qk_circuit(0)
    assert circuits.qk_circuit(3).left.shape == (8, 2)
    assert [len(spectrum.heads) for spectrum in measure_qk_spectra(pruned)] == [2]


def test_operations_that_circuits_leave_out_are_reported():
    outputs = layer(modifiers=(hw.parts.Rotary(), hw.parts.TalkingHeads()))
    assert "Rotary() changes q and k token by token" in outputs.caveats
    assert any("mixes heads" in one for one in outputs.caveats)
    assert layer().caveats == ()


# --- likeness of maps -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "gemma"])
def test_folded_circuits_apply_the_norms_to_states(family: str):
    """By the definition of layer norm, and of RMS norm with gains stored as w - 1."""
    config = {"gpt2": {"n_embd": 12, "n_head": 3, "n_layer": 2, "vocab_size": 11}}
    config["gemma"] = {"hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 2}
    config["gemma"] |= {"head_dim": 4, "intermediate_size": 7, "vocab_size": 11}
    config["gemma"] |= {"num_key_value_heads": 3}
    spec = hw.families.read_model_spec({"model_type": family, **config[family]})
    net = hw.build(spec, seed=0).double()
    named = dict(net.named_parameters())
    with torch.no_grad():
        for name, parameter in named.items():
            if "norm" in name:
                parameter.normal_()

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        gain = named[f"{name}.weight"]
        if family == "gemma":
            return x * (1 + gain)
        return (x - x.mean(-1, keepdim=True)) * gain

    site = "decoder.1.attention"
    plain = get_circuits(net)[site]
    folded = fold_circuits(net, site, 2)
    x_TD = torch.randn(5, 12, dtype=torch.float64)
    with torch.no_grad():
        n_TD = norm(x_TD, "decoder.1.attention_norm")
        scores = n_TD @ plain.qk_circuit(2).product @ n_TD.T
        torch.testing.assert_close(x_TD @ folded.qk.product @ x_TD.T, scores)
        written = norm(n_TD @ plain.ov_circuit(2).product, "decoder.norm")
        torch.testing.assert_close(x_TD @ folded.ov.product, written)


def test_folded_circuits_have_the_residual_multiplier():
    config = {"model_type": "granite", "hidden_size": 12, "num_attention_heads": 3}
    config |= {"num_hidden_layers": 1, "intermediate_size": 7, "vocab_size": 11}
    nets = [
        hw.build(
            hw.families.read_model_spec({**config, "residual_multiplier": factor}), seed=0
        ).double()
        for factor in (0.3, 1.0)
    ]
    folded, plain = (fold_circuits(net, "decoder.0.attention", 1) for net in nets)
    torch.testing.assert_close(folded.ov.product, 0.3 * plain.ov.product)
    torch.testing.assert_close(folded.qk.product, plain.qk.product)


@pytest.mark.parametrize("site", ["decoder.0.cross", "encoder.0.attention", "decoder.7.attention"])
def test_sites_whose_norms_are_others_are_not_folded(site: str):
    config = {"model_type": "t5", "d_model": 32, "d_kv": 8, "num_heads": 4, "num_layers": 2}
    net = hw.build(hw.families.read_model_spec({**config, "d_ff": 48, "vocab_size": 67}), seed=0)
    words = (
        f"'{site}': it is no self-attention of the decoder.*give one of decoder.0.attention, decod"
    )
    with pytest.raises(SpecError, match=words):
        fold_circuits(net, site, 1)


def test_the_inner_product_is_that_of_full_products():
    one, other = random_map(seed=1), random_map(rank=3, seed=2)
    a, b = one.product.numpy(), other.product.numpy()
    assert one.inner_product(other).item() == pytest.approx((a * b).sum())
    turn, _ = torch.linalg.qr(torch.randn(2, 2, dtype=torch.float64))
    turned = LowRankMap(one.left @ turn, turn.T @ one.right)
    assert one.inner_product(turned).item() == pytest.approx((a * a).sum())


def test_kin_of_all_heads_of_a_model():
    net = small_gpt2()
    circuits, result = compare_circuits(net), get_circuits(net)
    whole = [
        one.ov_circuit(head).product.double().numpy()
        for one in result.values()
        for head in range(4)
    ]
    for one, other in ((0, 0), (1, 6), (5, 2)):
        a, b = whole[one], whole[other]
        expected = (a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b)
        assert circuits.values[one, other].item() == pytest.approx(expected, abs=1e-6)
    assert circuits.heads[6] == ("decoder.1.attention", 1, 2)


def test_singular_values_are_those_of_the_full_product():
    one = random_map(rank=3)
    expected = np.linalg.svd(one.product.numpy(), compute_uv=False)
    np.testing.assert_allclose(one.singular_values.numpy(), expected[:3], atol=1e-9)
    assert expected[3:].max() < 1e-9


# --- copying --------------------------------------------------------------------------------------


def test_copying_of_the_whole_map_from_tokens_to_tokens():
    ov, draw = random_map(rank=3), torch.Generator().manual_seed(5)
    embed = torch.randn(11, 7, generator=draw, dtype=torch.float64)
    unembed = torch.randn(7, 11, generator=draw, dtype=torch.float64)
    values = np.linalg.eigvals((embed @ ov.product @ unembed).numpy())
    assert copying_score(ov, embed, unembed) == pytest.approx(
        values.sum().real / np.abs(values).sum(), abs=1e-6
    )
    states = np.linalg.eigvals(ov.product.numpy())
    assert copying_score(ov) == pytest.approx(states.sum().real / np.abs(states).sum(), abs=1e-6)


def planted(sign: float) -> Any:
    """A model of one layer whose only head carries what it reads into the same channels, or the
    opposite.
    """
    net: Any = small_gpt2(layers=1, heads=1)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name.endswith("project.v"):
                parameter.copy_(torch.eye(20))
            if name.endswith("output.o"):
                parameter.copy_(sign * torch.eye(20))
    return net


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_head_that_copies_and_one_that_takes_back(sign: float):
    net = planted(sign)
    embed, unembed, note = get_token_tables(net, "decoder")
    assert copying_score(
        get_circuits(net)["decoder.0.attention"].ov_circuit(0), embed, unembed
    ) == pytest.approx(sign)
    assert (embed.shape, unembed.shape, note) == ((WORDS, 20), (20, WORDS), "")
    assert torch.equal(embed, unembed.T)  # GPT-2 ties them


def test_a_model_without_token_outputs_uses_its_embedding_table():
    pytest.importorskip("transformers")
    from support.transformers_models import ZOO

    model = ZOO["bert"].build()
    embed, unembed, note = get_token_tables(model, "encoder")
    assert torch.equal(embed, model.get_parameter("embeddings.word_embeddings.weight"))
    assert torch.equal(unembed, embed.T)
    assert "its embedding is used as unembedding" in note


# --- what heads write -----------------------------------------------------------------------------


def test_a_random_baseline_has_the_shapes_and_new_weights():
    net: Any = small_gpt2()
    state = torch.get_rng_state()
    one, again, other = (
        make_random_baseline(net, seed=1),
        make_random_baseline(net, seed=1),
        make_random_baseline(net, seed=2),
    )
    assert torch.equal(state, torch.get_rng_state())
    shapes = [
        {name: tensor.shape for name, tensor in each.state_dict().items()} for each in (net, one)
    ]
    assert shapes[0] == shapes[1]
    q = "decoder.0.attention.project.q"
    assert torch.equal(one.state_dict()[q], again.state_dict()[q])
    assert not torch.equal(one.state_dict()[q], other.state_dict()[q])
    assert not one.training


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_random_baseline_of_a_transformers_model(name: str):
    pytest.importorskip("transformers")
    from support.transformers_models import ZOO

    model = ZOO[name].build("sdpa")
    one = make_random_baseline(model, seed=1)
    torch.rand(3)
    state = torch.get_rng_state()
    again = make_random_baseline(model, seed=1)
    assert torch.equal(state, torch.get_rng_state())
    assert type(one) is type(model)
    assert one.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), again.parameters(), strict=True))
    assert not all(
        torch.equal(a, b) for a, b in zip(one.parameters(), model.parameters(), strict=True)
    )


def test_a_random_baseline_of_a_bare_module_is_refused():
    with pytest.raises(
        ValueError,
        match="cannot rebuild Linear with random weights: it has neither a spec nor a config",
    ):
        make_random_baseline(torch.nn.Linear(2, 2))


def test_a_native_model_of_a_transformers_model_has_its_outputs():
    pytest.importorskip("transformers")
    from support.transformers_models import ZOO, run_model

    model, ids = ZOO["gpt2"].build(), torch.randint(3, 60, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(
            as_native_model(model)(ids), run_model(model, {"input_ids": ids}), atol=1e-4, rtol=1e-4
        )
