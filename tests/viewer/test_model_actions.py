"""The Cost screen: its numbers are those of `hw.cost`. Measuring reads a tokenizer once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import headwise as hw
from headwise.models.vocabulary import ByteVocabulary
from headwise.observe import bundled_sample
from headwise.observe.inspect import model_tokenizer
from headwise.viewer.model_actions import compute_cost, make_examples
from headwise.viewer.open_model import OpenModel
from headwise.viewer.view import Target, open_target
from viewer.page_models import progress


@pytest.fixture(scope="module")
def model() -> OpenModel:
    opened = OpenModel(
        bundled_sample.load_sample_trace(), load_model=bundled_sample.load_sample_model
    )
    opened.get_model()
    return opened


ARGUMENTS = [{"context": 100, "batch": 3}, {"context": 64, "source": 200, "dtype": "bf16"}, {}]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_rows_are_those_of_the_library_and_add_up(model: OpenModel, arguments: dict[str, Any]):
    found = compute_cost(model, arguments, progress())
    net: Any = model.get_model()
    workload = hw.Workload(**{"dtype": "fp32"} | arguments)
    (estimate,) = hw.cost(net.spec, workload)
    whole, *layers = found["rows"]
    assert whole["params"] == sum(p.numel() for p in net.parameters())
    assert (whole["prefill"], whole["decode"]) == tuple(
        estimate.data["flops"][call] for call in ("prefill", "decode")
    )
    assert [row["name"] for row in layers] == list(model.sites)
    assert not found["notes"]
    assert sum(row["kv_bytes"] for row in layers) == whole["kv_bytes"] == estimate.cache_bytes
    assert sum(row["kv_bytes_per_token"] or 0 for row in layers) == whole["kv_bytes_per_token"]
    for call, flops in (("prefill", estimate.prefill_flops), ("decode", estimate.decode_flops)):
        cores = sum(
            term.value
            for term in flops.terms
            if ".attention." in term.name or ".cross." in term.name
        )
        assert sum(row[call] or 0 for row in layers) == cores
    sizes = {"batch": 1, "source": estimate.full_call.source} | arguments
    expected = {
        "context": estimate.full_call.tokens,
        "dtype": workload.dtype,
        "device": "NVIDIA H200 SXM",
    }
    assert found["workload"] == expected | sizes


def test_the_default_context_is_within_the_maximum_of_the_model():
    spec = hw.families.read_model_spec(
        {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}
    )
    opened = OpenModel(bundled_sample.load_sample_trace(), load_model=lambda: hw.build(spec))
    found = compute_cost(opened, {}, progress())
    assert found["workload"]["context"] == 1024
    assert found["rows"][0]["name"] == spec.name
    assert (found["workload"]["source"], found["workload"]["dtype"]) == (None, "fp32")


@pytest.mark.parametrize(
    "arguments", [{"context": 0}, {"context": 2**21}, {"batch": True}, {"context": "9"}]
)
def test_sizes_out_of_range_are_refused(model: OpenModel, arguments: dict[str, Any]):
    with pytest.raises(ValueError, match=r"is (out of range|not an integer)"):
        compute_cost(model, arguments, progress())


def test_several_texts_read_the_tokenizer_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A tokenizer of 49,152 tokens takes a third of a second to read."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=257, num_attention_heads=2, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(ByteVocabulary().document)
    opened = open_target(Target(str(tmp_path), "a text"))
    files: list[Path] = []
    read = model_tokenizer.read_tokenizer_file
    monkeypatch.setattr(
        model_tokenizer, "read_tokenizer_file", lambda path: (files.append(path), read(path))[1]
    )
    texts = ["one", "two words", "three short words"]
    lengths = [len(example.streams["text"].ids) for example in make_examples(opened, texts)]
    assert lengths == [len(text) for text in texts]
    assert files == [tmp_path / "tokenizer.json"]
