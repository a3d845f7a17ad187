"""Numbers of heads from weights against numpy, and the sentences about them."""

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
from headwise.head_analysis.circuit_summary import (
    HeadCircuit,
    describe_circuits,
    describe_collapse,
    describe_spectrum,
    measure_head_circuits,
)
from headwise.head_analysis.head_table import Measure
from headwise.head_analysis.rank_analysis import DepthSimilarity, DimensionCount, LayerSpectrum


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=12, n_head=3, n_layer=2, vocab_size=17, n_positions=16)
    return transformers.GPT2LMHeadModel(config).eval()


def test_numbers_of_heads_are_those_of_the_weights():
    model = gpt2()
    embed = model.transformer.wte.weight.detach().double().numpy()
    found = iter(measure_head_circuits(model))
    for block in model.transformer.h:
        attention, output = (m.weight.detach().double().numpy() for m in (block.attn.c_attn, block.attn.c_proj))
        for head in range(3):
            v, o = attention[:, 24 + 4 * head : 28 + 4 * head], output[4 * head : 4 * head + 4]
            own = next(found)
            assert own.over == "tokens"
            assert own.output_norm == pytest.approx(np.linalg.norm(o), rel=1e-5)
            assert own.ov_norm == pytest.approx(np.linalg.norm(v @ o), rel=1e-5)
            values = np.linalg.eigvals(embed @ v @ o @ embed.T)
            assert own.copying == pytest.approx(values.real.sum() / np.abs(values).sum(), abs=1e-4)
    assert next(found, None) is None


def test_combined_heads_have_the_norm_of_w_o_alone():
    layer = torch.nn.Sequential(hw.Attention(hw.design(preset="diff", model=16, heads=2)))
    heads = measure_head_circuits(layer)
    output = layer[0].output["o"].detach().double()
    for n, head in enumerate(heads):
        assert head.output_norm == pytest.approx(output[:, 8 * n : 8 * n + 8].norm().item(), rel=1e-5)
        assert math.isnan(head.copying)
        assert head.data["ov_norm"] is None
    assert next(describe_circuits(heads)) == "copying: no head has a W_V and W_O of its own"


def test_sentences_state_numbers_and_a_verdict():
    heads = [HeadCircuit("a", n, copying, "states", 1.0, 1.0) for n, copying in enumerate((0.9, 0.6, 0.5))]
    assert "2 of 3 heads copy the states that they attend to" in next(describe_circuits(heads))
    head = DimensionCount(5, 16, 5.0)
    for dims, words in ((43, "in fewer dimensions than chance"), (44, "share no dimensions beyond chance")):
        spectrum = LayerSpectrum("a", (head,), DimensionCount(dims, 128, 48.0), head, head, ())
        assert words in describe_spectrum(spectrum)
    first = Measure(0.5, 0.4, 0.6, 0.5)
    for last, words in (
        (Measure(0.3, 0.2, 0.39, 0.5), "become more similar"),
        (Measure(0.7, 0.61, 0.8, 0.5), "become less similar"),
        (Measure(0.4, 0.3, 0.5, 0.5), "stay as similar as the intervals can tell"),
    ):
        depths = [DepthSimilarity("a", 0, first, first), DepthSimilarity("a", 2, last, last)]
        (sentence,) = describe_collapse(depths)
        assert words in sentence


def test_the_command_prints_sentences_and_all_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    spec = hw.families.read_model_spec(
        {"model_type": "gpt2", "n_embd": 12, "n_head": 3, "n_layer": 2, "vocab_size": 256, "n_positions": 32}
    )
    net = hw.build(spec, seed=0)
    hw.save(net, tmp_path / "net")
    (tmp_path / "lines").write_text("a longer one\nshort\nthird one\n")
    options = ["heads", str(tmp_path / "net"), "--data", str(tmp_path / "lines"), "--tokenizer", "bytes"]
    options += ["--circuits", "--spectra", "--collapse"]
    assert cli.main(options) == 0
    text = " ".join(capsys.readouterr().out.split())
    for sentence in (
        "norm of W_O: largest for",
        "dimensions carry 90 % of the scores of all heads",
        "tokens differ by",
    ):
        assert sentence in text
    assert cli.main([*options, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    expected = measure_head_circuits(net)
    assert [(one["site"], one["head"]) for one in data["circuits"]] == [(one.site, one.head) for one in expected]
    assert [one["output_norm"] for one in data["circuits"]] == pytest.approx([one.output_norm for one in expected])
    spectra = hw.measure_qk_spectra(net)
    assert [one["summed"]["dims"] for one in data["spectra"]] == [one.summed.dims for one in spectra]
    assert [one["layers"] for one in data["collapse"]] == [0, 1, 2]
    assert data["collapse"][0]["residual"]["value"] == data["collapse"][0]["residual"]["chance"]


def test_layers_are_normalised_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    spec = hw.families.read_model_spec(
        {"model_type": "gpt2", "n_embd": 12, "n_head": 3, "n_layer": 2, "vocab_size": 256, "n_positions": 32}
    )
    hw.save(hw.build(spec, seed=0), tmp_path / "net")
    (tmp_path / "lines").write_text("a longer one\nshort\nthird one\n")
    options = ["heads", str(tmp_path / "net"), "--data", str(tmp_path / "lines"), "--tokenizer", "bytes"]
    assert cli.main([*options, "--importance", "michel-bert", "--normalise-layers", "--json"]) == 0
    heads = json.loads(capsys.readouterr().out)["importance"]["heads"]
    for layer in range(2):
        assert np.linalg.norm([head["value"] for head in heads if head["layer"] == layer]) == pytest.approx(1)
    assert cli.main([*options, "--normalise-layers"]) == 2
    assert "--normalise-layers needs scores to divide; add --importance METHOD" in capsys.readouterr().err
