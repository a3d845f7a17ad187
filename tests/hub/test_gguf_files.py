"""GGUF files: their weights are those that were written, every command opens them, and a damaged
file is one line.

The files are written here, from tiny models of transformers: llama.cpp stores the rows of rotary
queries and keys of Llama in pairs, and Gemma's norms with 1 added.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel

import headwise as hw
from headwise import cli
from headwise.hub import gguf_files
from headwise.hub.gguf_files import count_weights, read_gguf_config, unpack_gguf
from headwise.hub.pretrained_models import load_original
from headwise.util.errors import SpecError

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
ARCHITECTURES = {  # of llama.cpp: class of transformers, and settings besides the sizes
    "llama": ("LlamaForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"tie_word_embeddings": True}),
    "gemma2": ("Gemma2ForCausalLM", {}),
    "phi3": ("Phi3ForCausalLM", {}),
}
IDS = torch.tensor([[5, 9, 260, 9, 5, 17]])


def make_model(architecture: str) -> Any:
    name, more = ARCHITECTURES[architecture]
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**SIZES | more)).eval()
    with torch.no_grad():  # initial norms and biases are equal in every model
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def stored_weights(architecture: str, model: Any) -> Mapping[str, np.ndarray]:
    """The weights by their names in a file, as llama.cpp stores them."""
    layers = model.config.num_hidden_layers
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], layers)
    weights = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        rotated = {"q_proj": model.config.num_attention_heads}
        rotated["k_proj"] = model.config.num_key_value_heads
        heads = rotated.get(name.split(".")[-2])
        if architecture == "llama" and heads:
            halves = tensor.view(heads, 2, -1, tensor.shape[1])
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        stem, _, suffix = name.rpartition(".")
        stored = names.get_name(stem)
        assert stored is not None, name
        weights[f"{stored}.{suffix}"] = tensor.numpy()
    return weights


def write_gguf(path: Path, architecture: str, model: Any, quantised: bool = False) -> Path:
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(SIZES["head_dim"])
    writer.add_value_length(SIZES["head_dim"])
    writer.add_rope_dimension_count(SIZES["head_dim"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if architecture == "gemma2":
        writer.add_sliding_window(config.sliding_window)
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    add_tokenizer(writer)
    for name, weight in stored_weights(architecture, model).items():
        if quantised and weight.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, np.ascontiguousarray(weight, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: Any) -> None:
    """Bytes in GPT-2's spelling, two special tokens and a few merges."""
    letters = sorted(ByteLevel.alphabet())
    merges = ["t h", "th e", "Ġ t"]
    special = ["<s>", "</s>", "<|endoftext|>", "<unk>", "<pad>", "<eos>", "<bos>", "<mask>"]
    words = [*special, *letters, *(merge.replace(" ", "") for merge in merges)]
    words += [f"<{n}>" for n in range(SIZES["vocab_size"] - len(words))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3 if word in special else 1 for word in words])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A cache of these tests alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    return write_gguf(folder / "tiny.gguf", "llama", make_model("llama"))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_a_file_computes_what_the_model_computes(architecture: str, tmp_path: Path) -> None:
    model = make_model(architecture)
    file = write_gguf(tmp_path / "tiny.gguf", architecture, model)
    expected = model(IDS).logits
    torch.testing.assert_close(load_original(file)(IDS).logits, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hw.load(file)(IDS), expected, rtol=1e-5, atol=1e-5)
    stored = {id(p): p.numel() for p in model.parameters()}
    assert count_weights(file) == sum(stored.values())


def test_quantised_weights_are_scale_times_integer(tmp_path: Path) -> None:
    model = make_model("qwen3")
    file = write_gguf(tmp_path / "tiny.gguf", "qwen3", model, quantised=True)
    weights = load_original(file).state_dict()
    for name, original in model.state_dict().items():
        if original.dim() == 1:
            assert torch.equal(weights[name], original)
            continue
        blocks = original.view(-1, 32)  # Q8_0: a scale of 16 bits for 32 weights
        scale = blocks.abs().amax(1, keepdim=True) / 127
        integer = (blocks / scale.clamp(min=1e-9)).round()  # the padding token is all zeros
        dequantised = (scale.half().float() * integer).view_as(original)
        torch.testing.assert_close(weights[name], dequantised, rtol=0, atol=1e-7)


def test_a_file_is_unpacked_once(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = unpack_gguf(llama)
    assert folder.name == "tiny"
    with monkeypatch.context() as patch:
        patch.setattr(gguf_files, "count_weights", None)
        assert unpack_gguf(llama) == folder
    before = llama.stat()
    os.utime(llama, (before.st_atime, before.st_mtime + 1))
    assert unpack_gguf(llama) != folder


def test_cost_reads_the_header_alone(
    llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_files, "unpack_gguf", None)
    model = make_model("llama")
    assert cli.main(["cost", str(llama), "--json"]) == 0
    from_file = capsys.readouterr().out
    assert f": {sum(p.numel() for p in model.parameters())}" in from_file
    estimate = hw.cost(llama)[model.config.model_type]
    assert estimate.parameters.total == sum(p.numel() for p in model.parameters())
    assert cli.main(["cost", str(llama), "--heads", "4"]) == 2
    assert "--heads is for presets" in capsys.readouterr().err
    config = read_gguf_config(llama)
    same = ("hidden_size", "num_key_value_heads", "intermediate_size", "max_position_embeddings")
    assert [config[key] for key in same] == [getattr(model.config, key) for key in same]


def test_a_file_is_pruned_to_a_folder_of_transformers(llama: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("the cat sat there\nthey ate the other\nthis is the end\nthat thing\n")
    smaller = tmp_path / "smaller"
    assert cli.main(["heads", str(llama), "--data", str(texts), "--json"]) == 0
    arguments = ["prune", str(llama), "--data", str(texts), "--keep", "0.5", "--out", str(smaller)]
    assert cli.main(arguments) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(smaller)
    assert model.config.num_attention_heads == 2
    assert model.config.num_key_value_heads == 1


def cut(file: Path, path: Path, size: int) -> Path:
    path.write_bytes(file.read_bytes()[:size])
    return path


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.2, 0.6, 0.999])
@pytest.mark.parametrize("verb", ["heads", "cost"])
def test_a_file_cut_in_the_middle_is_one_line(
    verb: str, share: float, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if verb == "cost" and share > 0.5:
        pytest.skip("cost reads the header, which is whole")
    file = cut(llama, tmp_path / "cut.gguf", int(share * llama.stat().st_size))
    assert cli.main([verb, str(file)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert "cut.gguf" in printed.err
    assert "copy the file again" in printed.err


def test_refused_files(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = tmp_path / "tiny-00001-of-00002.gguf"
    part.write_bytes(llama.read_bytes())
    with pytest.raises(SpecError, match="one file of several; merge them with llama-gguf-split"):
        unpack_gguf(part)
    alien = tmp_path / "alien.gguf"
    writer = gguf.GGUFWriter(alien, "alien")
    writer.add_name("alien")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(SpecError, match=r"cannot be read as GGUF: .*alien is not supported"):
        unpack_gguf(alien)
    monkeypatch.setattr(gguf_files, "available_memory", lambda: 1000)
    whole = cut(llama, tmp_path / "whole.gguf", llama.stat().st_size)
    with pytest.raises(SpecError, match=r"weights need .* of memory, and this machine has"):
        unpack_gguf(whole)
    monkeypatch.setattr(gguf_files, "find_spec", lambda name: None if name == "gguf" else 1)
    with pytest.raises(SpecError, match=r"without gguf; pip install 'headwise\[gguf\]'"):
        unpack_gguf(whole)


def test_a_file_without_some_weights_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("llama")
    whole = stored_weights("llama", model)
    name = "blk.1.attn_v.weight"
    rest = {key: value for key, value in whole.items() if key != name}
    monkeypatch.setitem(globals(), "stored_weights", lambda *_: rest)
    file = write_gguf(tmp_path / "tiny.gguf", "llama", model)
    with pytest.raises(SpecError, match=r"no weights for model.layers.1.self_attn.v_proj.weight"):
        unpack_gguf(file)
    narrow = whole | {name: np.zeros((16, 64), np.float32)}
    monkeypatch.setitem(globals(), "stored_weights", lambda *_: narrow)
    file = write_gguf(tmp_path / "narrow.gguf", "llama", model)
    with pytest.raises(SpecError, match=r"v_proj.weight has shape \[16, 64\], .* \[32, 64\]"):
        unpack_gguf(file)


def test_a_cache_that_cannot_be_written_is_one_line(
    llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/self")
    assert cli.main(["heads", str(llama)]) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 2  # what is unpacked, and why it cannot be
    assert "/proc/self" in error[1]
