"""Numbers of heads from weights against numpy, and tables of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import headwise as hw
from headwise import cli
from headwise.observe.head_analysis.head_circuits import circuit_table, measure_head_circuits
from headwise.observe.head_analysis.rank_analysis import spectra_table
from headwise.report.render import to_plain
from support.stories_model import write_stories_folder
from support.tiny_configs import model_config


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=12, n_head=3, n_layer=2, vocab_size=17, n_positions=16)
    return transformers.GPT2LMHeadModel(config).eval()


def score(product: np.ndarray[Any, Any]) -> float:
    values = np.linalg.eigvals(product)
    return float(values.real.sum() / np.abs(values).sum())


def centred(width: int) -> np.ndarray[Any, Any]:
    return np.eye(width) - 1 / width


def test_numbers_of_heads_are_those_of_the_weights():
    model = with_random_gains(gpt2())
    weights = {
        name: value.detach().double().numpy()
        for name, value in model.transformer.named_parameters()
    }
    embed, final = weights["wte.weight"], centred(12) @ np.diag(weights["ln_f.weight"])
    found = iter(measure_head_circuits(model))
    for n in range(2):
        attention, output = (
            weights[f"h.{n}.attn.c_attn.weight"],
            weights[f"h.{n}.attn.c_proj.weight"],
        )
        before = centred(12) @ np.diag(weights[f"h.{n}.ln_1.weight"])
        for head in range(3):
            v, o = attention[:, 24 + 4 * head : 28 + 4 * head], output[4 * head : 4 * head + 4]
            own = next(found)
            assert own.over == "tokens"
            assert own.output_norm == pytest.approx(np.linalg.norm(o), rel=1e-5)
            assert own.ov_norm == pytest.approx(np.linalg.norm(v @ o), rel=1e-5)
            assert own.copying == pytest.approx(
                score(embed @ before @ v @ o @ final @ embed.T), abs=1e-4
            )
    assert next(found, None) is None


def with_random_gains(model: Any) -> Any:
    """The model with gains of its norms between 0 and 2."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_" in name:
                parameter.copy_(2 * torch.rand(parameter.shape, generator=draw))
    return model


# gains before the attention, gains of its output, what is added to a gain, whether the mean is
# subtracted
NORMS = {
    "llama": ("input_layernorm", "", 0.0, False),
    "gemma2": ("input_layernorm", "post_attention_layernorm", 1.0, False),
    "olmo2": ("", "post_attention_layernorm", 0.0, False),
    "phi": ("input_layernorm", "", 0.0, True),
}


@pytest.mark.parametrize("family", NORMS)
def test_copying_scores_have_the_gains_of_norms(family: str):
    before, after, offset, is_centred = NORMS[family]
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 12,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "num_hidden_layers": 2,
    }
    sizes |= {"intermediate_size": 20, "vocab_size": 17, "head_dim": 4}
    config = transformers.AutoConfig.for_model(
        family, **sizes, tie_word_embeddings=False, pad_token_id=0
    )
    model = with_random_gains(transformers.AutoModelForCausalLM.from_config(config).eval())
    weights = {name: value.detach().double().numpy() for name, value in model.named_parameters()}

    def weight(name: str) -> np.ndarray[Any, Any]:
        return next(value for key, value in weights.items() if key.endswith(name))

    def linear(name: str) -> np.ndarray[Any, Any]:
        gain = np.diag(weight(name) + offset) if name else np.eye(12)
        return centred(12) @ gain if name and is_centred else gain

    tables = model.get_input_embeddings(), model.get_output_embeddings()
    embed, unembed = (table.weight.detach().double().numpy() for table in tables)
    final = "final_layernorm.weight" if family == "phi" else "model.norm.weight"
    found = iter(measure_head_circuits(model))
    for layer in range(2):
        prefix = f"layers.{layer}."
        v = weight(f"{prefix}self_attn.v_proj.weight")
        o = weight(f"{prefix}self_attn.{'dense' if family == 'phi' else 'o_proj'}.weight")
        first, last = (linear(f"{prefix}{name}.weight" if name else "") for name in (before, after))
        for head in range(3):
            own = slice(4 * head, 4 * head + 4)
            product = embed @ first @ v[own].T @ o[:, own].T @ last @ linear(final) @ unembed.T
            assert next(found).copying == pytest.approx(score(product), abs=1e-4), (layer, head)


@pytest.mark.slow
def test_gains_of_norms_change_five_verdicts_of_a_released_model(shared: Path, tmp_path: Path):
    """stories260K, rendered in numpy from its own file of weights."""
    folder = shared / "data" / "model_stories260k"
    if not folder.is_dir():
        pytest.skip("there is no model_stories260k in the folder `shared`")
    weights = {
        name: value.astype(np.float64) for name, value in np.load(folder / "weights.npz").items()
    }
    embed, plain, folded = weights["tok_embeddings"], list[float](), list[float]()
    for layer in range(5):
        gains = np.diag(weights["attention_norm"][layer]), np.diag(weights["norm"])
        for head in range(8):
            v = weights["wv"][layer][8 * (head // 2) : 8 * (head // 2) + 8].T
            o = weights["wo"][layer][:, 8 * head : 8 * head + 8].T
            plain.append(score(embed @ v @ o @ embed.T))
            folded.append(score(embed @ gains[0] @ v @ o @ gains[1] @ embed.T))
    net = hw.load(write_stories_folder(folder, tmp_path / "stories260K"))
    found = [one.copying for one in measure_head_circuits(net)]
    np.testing.assert_allclose(found, folded, atol=1e-4)
    assert sum((a >= 0.5) != (b >= 0.5) for a, b in zip(plain, folded, strict=True)) == 5
    assert max(abs(a - b) for a, b in zip(plain, folded, strict=True)) == pytest.approx(
        0.88, abs=0.005
    )


def test_combined_heads_have_the_norm_of_w_o_alone():
    layer = torch.nn.Sequential(hw.Attention(hw.design(preset="diff", model=16, heads=2)))
    heads = measure_head_circuits(layer)
    output = layer[0].output["o"].detach().double()
    for n, head in enumerate(heads):
        assert head.output_norm == pytest.approx(
            output[:, 8 * n : 8 * n + 8].norm().item(), rel=1e-5
        )
        assert math.isnan(head.copying)
        assert to_plain(head)["ov_norm"] is None
    assert {row[1] for row in circuit_table(heads).rows} == set(range(len(heads)))


def test_the_command_prints_tables_and_all_numbers(tmp_path, capsys):
    spec = hw.families.read_model_spec(
        model_config("gpt2", n_embd=12, n_head=3, n_layer=2, vocab_size=256, n_positions=32)
    )
    net = hw.build(spec, seed=0)
    hw.save(net, tmp_path / "net")
    (tmp_path / "lines").write_text("a longer one\nshort\nthird one\n")
    options = [
        "heads",
        str(tmp_path / "net"),
        "--data",
        str(tmp_path / "lines"),
        "--tokenizer",
        "bytes",
    ]
    options += ["--circuits", "--spectra", "--collapse"]
    assert cli.main(options) == 0
    text = " ".join(capsys.readouterr().out.split())
    for sentence in (
        "copying scores and norms of the heads' weights",
        "dimensions that carry 90 % of the scores",
        "difference of the states of a text's tokens",
    ):
        assert sentence in text
    assert cli.main([*options, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    expected = measure_head_circuits(net)
    assert [(one["site"], one["head"]) for one in data["circuits"]] == [
        (one.site, one.head) for one in expected
    ]
    assert [one["output_norm"] for one in data["circuits"]] == pytest.approx(
        [one.output_norm for one in expected]
    )
    spectra = hw.head_analysis.measure_qk_spectra(net)
    assert [one["summed"]["dims"] for one in data["spectra"]] == [
        one.summed.dims for one in spectra
    ]
    assert [row[1] for row in spectra_table(spectra).rows] == [one.summed.dims for one in spectra]
    assert [one["layers"] for one in data["collapse"]] == [0, 1, 2]
    assert data["collapse"][0]["residual"]["value"] == data["collapse"][0]["residual"]["chance"]


def test_layers_are_normalised_from_the_command_line(tmp_path, capsys):
    spec = hw.families.read_model_spec(
        model_config("gpt2", n_embd=12, n_head=3, n_layer=2, vocab_size=256, n_positions=32)
    )
    hw.save(hw.build(spec, seed=0), tmp_path / "net")
    (tmp_path / "lines").write_text("a longer one\nshort\nthird one\n")
    options = [
        "heads",
        str(tmp_path / "net"),
        "--data",
        str(tmp_path / "lines"),
        "--tokenizer",
        "bytes",
    ]
    assert cli.main([*options, "--importance", "michel", "--normalise-layers", "--json"]) == 0
    heads = json.loads(capsys.readouterr().out)["importance"]["heads"]
    for layer in range(2):
        assert np.linalg.norm(
            [head["value"] for head in heads if head["layer"] == layer]
        ) == pytest.approx(1)
    assert cli.main([*options, "--normalise-layers"]) == 2
    assert (
        "--normalise-layers needs --importance; add --importance METHOD, or leave --normalise-layers out"
        in capsys.readouterr().err
    )
