"""Falcon of transformers with headwise as attention backend, in each of its architectures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.hub import transformers_backend
from headwise.hub.transformers_backend import register_falcon
from support.transformers_models import FALCON, TransformersModel, run_model, transformers

KINDS: dict[str, dict[str, Any]] = {
    "one key-value head": {},
    "a key-value head per head": {"multi_query": False, "parallel_attn": False, "bias": True},
    "groups": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "alibi": {"alibi": True, "multi_query": False},
}
EXPECTED = {"alibi": "sdpa"}  # eager adds the biases of alibi twice: to the scores, and in the mask


def build(kind: str, implementation: str) -> nn.Module:
    """A tiny Falcon with uneven attention."""
    return TransformersModel(
        "FalconForCausalLM", "FalconConfig", FALCON | KINDS[kind], "dense"
    ).build(implementation)


def token_ids(rows: int = 2, columns: int = 11) -> dict[str, Tensor]:
    """Ids and a mask with padding on the left of the second row."""
    ids = torch.randint(3, 67, (rows, columns), generator=torch.Generator().manual_seed(1))
    shown = torch.ones_like(ids)
    shown[1, :3] = 0
    return {"input_ids": ids, "attention_mask": shown}


INPUTS = {
    "input_ids": token_ids()["input_ids"]
}  # without padding, whose rows differ between implementations


def error(own: Tensor, expected: Tensor) -> float:
    return float((own - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_equal_those_of_transformers(kind: str, monkeypatch: pytest.MonkeyPatch):
    calls: list[tuple[int, int]] = []
    original = transformers_backend._attend_sdpa

    def count(inputs: Any, qkv: tuple[Tensor, Tensor, Tensor], dropout: float) -> Tensor:
        calls.append((qkv[0].shape[1], qkv[1].shape[1]))
        return original(inputs, qkv, dropout)

    expected, ours = build(kind, EXPECTED.get(kind, "eager")), build(kind, "headwise")
    monkeypatch.setattr(transformers_backend, "_attend_sdpa", count)
    for inputs in (token_ids(), {"input_ids": token_ids()["input_ids"]}):
        assert error(run_model(ours, inputs), run_model(expected, inputs)) <= 1e-5
    kv_heads = {"one key-value head": 1, "groups": 2}.get(kind, 4)
    assert calls == [(4, kv_heads)] * 4  # two layers, two inputs


@pytest.mark.parametrize("kind", KINDS)
def test_the_implementation_of_a_live_model_is_set(kind: str):
    model: Any = build(kind, "sdpa")
    before = run_model(model, INPUTS)
    model.set_attn_implementation("headwise")
    assert model.config._attn_implementation == "headwise"
    changed = run_model(model, INPUTS)
    assert error(changed, before) <= 1e-5
    model.set_attn_implementation("sdpa")
    assert torch.equal(run_model(model, INPUTS), before)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_is_generated_with_a_cache_of_key_value_heads(kind: str):
    texts = []
    for implementation in (EXPECTED.get(kind, "eager"), "headwise"):
        model: Any = build(kind, implementation)
        options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        texts.append(model.generate(**token_ids(), **options))
    assert torch.equal(*texts)
    with torch.no_grad():
        cache = model(token_ids()["input_ids"], use_cache=True).past_key_values
    assert cache.layers[0].keys.shape[1] == {"one key-value head": 1, "groups": 2}.get(kind, 4)


def test_attentions_are_returned_on_request():
    recorded = []
    for implementation in ("eager", "headwise"):
        with torch.no_grad():
            recorded.append(
                build("groups", implementation)(**token_ids(), output_attentions=True).attentions
            )
    assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(*recorded, strict=True))


@pytest.mark.parametrize("kind", ["one key-value head", "groups"])
def test_heads_are_ablated_and_observed(kind: str):
    eager, ours = build(kind, "eager"), build(kind, "headwise")
    eager.transformer.h[1].self_attention.dense.weight.data[:, 8:16] = 0
    with hw.ablate(ours, [(1, 1)]):
        assert error(run_model(ours, token_ids()), run_model(eager, token_ids())) <= 1e-5
    traces = [hw.trace(model, token_ids()["input_ids"]) for model in (build(kind, "eager"), ours)]
    weights = [torch.from_numpy(trace.head_weights(1, 2, row=0)) for trace in traces]
    assert torch.allclose(*weights, atol=1e-5)


def test_registration_is_done_once():
    falcon = transformers.models.falcon.modeling_falcon
    forward = falcon.FalconAttention.forward
    register_falcon()
    assert falcon.FalconAttention.forward is forward
