"""Measuring heads waits for a device a few times per text, however many layers there are."""

from __future__ import annotations

import pytest

import headwise as hw
from headwise.observe.inspect import abilities
from support.pretended_device import DeviceTensor, count_waits, pretended_device
from support.transformers_models import ZOO

GPT2 = {"model_type": "gpt2", "n_embd": 12, "n_head": 3, "vocab_size": 256}
MISTRAL = {
    "model_type": "mistral",
    "hidden_size": 12,
    "intermediate_size": 14,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 256,
    "sliding_window": 4,
}
TEXTS = ["a, b, a, b", "two to two", "two x", "is it: it is", "no one", "nine"]


def build_model(name: str, layers: int):
    if name in ("gpt2", "mistral"):
        key = "n_layer" if name == "gpt2" else "num_hidden_layers"
        config = (GPT2 if name == "gpt2" else MISTRAL) | {key: layers}
        return hw.build(hw.families.read_model_spec(config), seed=0).eval()
    known = ZOO[name]
    keys = known.keys | {"vocab_size": 256, "eos_token_id": None, "num_hidden_layers": layers}
    return known._replace(keys=keys).build()


@pytest.mark.parametrize("name", ["gpt2", "mistral", "llama"])
def test_heads_wait_four_times_per_text_at_most(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(abilities, "PLAIN_TENSORS", (*abilities.PLAIN_TENSORS, DeviceTensor))
    with pretended_device() as device:
        for layers in (1, 3):
            model = build_model(name, layers).to(device)
            waits = count_waits(lambda net=model: hw.heads(net, TEXTS, tokenizer="bytes"))
            assert waits <= 4 * len(TEXTS)
