"""Attention functions of transformers that get causality and windows as arguments, not as a mask:
FlashAttention.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.observe.head_analysis.head_measurement import MeasureOptions
from headwise.observe.inspect.adapters.known_interfaces import inputs_of_call
from headwise.observe.inspect.attention_sites import find_attention
from support.site_recording import record_eager_weights, record_sites
from support.transformers_models import LLAMA, LOCAL, ZOO, TransformersModel, transformers

NAME = "without_masks"
WINDOW = 5
COHERE = LLAMA | {"sliding_window": WINDOW, "layer_types": LOCAL}
MODELS = {name: ZOO[name] for name in ("llama", "mistral", "gemma2", "gemma3", "gpt-oss")} | {
    "cohere2": TransformersModel("Cohere2ForCausalLM", "Cohere2Config", COHERE, "o_proj")
}
FEW = MeasureOptions()


def attend(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, **options: Any
) -> tuple[Tensor, None]:
    """Attention as FlashAttention computes it: the last query is at the
    position of the last key.
    """
    assert mask is None
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * options["scaling"]
    if options.get("softcap") is not None:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    count, window = k.shape[2], options.get("sliding_window")
    for row in range(q.shape[2]):
        position = count - q.shape[2] + row
        scores[:, :, row, position + 1 :] = -torch.inf
        scores[:, :, row, : max(0, position + 1 - (window or count))] = -torch.inf
    if (sinks := options.get("s_aux")) is not None:
        scores = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., :count] @ v).transpose(1, 2), None


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    """Register the function with transformers, with a mask function that makes none."""
    interfaces = (transformers.AttentionInterface, transformers.AttentionMaskInterface)
    for interface, function in zip(
        interfaces, (attend, lambda *sizes, **options: None), strict=True
    ):
        interface.register(NAME, function)
    yield
    for interface in interfaces:
        del interface._global_mapping[NAME]


@pytest.mark.parametrize("cached", [0, 7], ids=["whole text", "after cached tokens"])
@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_eager_attention(name, cached, monkeypatch):
    eager, flash = (MODELS[name].build(kind) for kind in ("eager", NAME))
    ids = MODELS[name].inputs()["input_ids"]

    def run(model: Any) -> Tensor:
        with torch.no_grad():
            past = model(ids[:, :cached]).past_key_values if cached else None
        with (
            torch.no_grad(),
            record_eager_weights(monkeypatch) as weights,
            record_sites(model) as records,
        ):
            logits = model(ids[:, cached:], past_key_values=past).logits
        recorded.append((weights, records))
        return logits

    recorded: list[Any] = []
    torch.testing.assert_close(run(flash), run(eager), rtol=1e-4, atol=1e-4)
    (_, records), (weights, _) = recorded
    queries = torch.arange(cached, 11)[:, None]
    for own, theirs in zip(find_attention(flash), find_attention(eager), strict=True):
        (call,) = records[own.site.name].seen
        expected = weights[theirs.module]
        first = 11 - expected.shape[-1]  # caches of windows drop older keys
        assert torch.allclose(call.all_weights(), expected[..., -call.k_BSGK.shape[1] :], atol=1e-5)
        assert torch.equal(call.allowed_pairs().expand(expected.shape), expected > 0)
        if getattr(own.module, "sliding_window", None):
            distance = queries - torch.arange(first, 11)
            assert bool((distance[expected[0, 0] > 0] < WINDOW).all())


@pytest.mark.parametrize("name", MODELS)
def test_traces_and_measures_are_those_of_eager_attention(name: str):
    zoo = MODELS[name]._replace(keys=MODELS[name].keys | {"vocab_size": 256, "eos_token_id": None})
    models = [zoo.build(kind) for kind in ("eager", NAME)]
    traces = [
        hw.trace(model, {"input_ids": zoo.inputs()["input_ids"][:1]}, max_new_tokens=4)
        for model in models
    ]
    for layer in traces[0].layers:
        for head in range(layer.heads):
            own, expected = (
                torch.from_numpy(trace.head_weights(layer.name, head)) for trace in traces
            )
            assert torch.allclose(own, expected, atol=1e-5)
    tables = [
        hw.heads(model, ["a text of words", "another"], options=FEW, tokenizer="bytes")
        for model in models
    ]
    for own, expected in zip(*(table.heads for table in tables), strict=True):
        for measure, values in expected.measures.items():
            assert own.measures[measure] == pytest.approx(
                values, rel=1e-4, abs=1e-4, nan_ok=True
            ), measure


def call_inputs(name: str, queries: int, **options: Any) -> Any:
    q, k = torch.zeros(1, 2, queries, 4), torch.zeros(1, 2, 6, 4)
    return inputs_of_call(name, nn.Module(), (q, k, k, None), options)


def test_a_window_without_causality_has_both_sides():
    allowed = call_inputs(NAME, 6, sliding_window=2, is_causal=False).allowed_pairs()[0, 0]
    assert torch.equal(allowed, torch.ones(6, 6).tril(1).triu(-1).bool())


def test_functions_that_get_masks_ignore_windows():
    """Their masks contain windows; without a mask they are causal from the first key on."""
    for name in ("eager", "sdpa", "headwise"):
        assert call_inputs(name, 6, sliding_window=2, is_causal=False).allowed_pairs().all()
    own = transformers.AttentionMaskInterface()
    transformers.AttentionMaskInterface.register("like_sdpa", own["sdpa"])
    allowed = call_inputs("like_sdpa", 3, is_causal=True).allowed_pairs()[0, 0]
    del transformers.AttentionMaskInterface._global_mapping["like_sdpa"]
    assert torch.equal(allowed, torch.ones(3, 6).tril().bool())


PACKED = {
    "positions": {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])},
    "lengths": {"cu_seq_lens_q": torch.tensor([0, 3, 6])},
}


@pytest.mark.parametrize("kind", PACKED)
def test_packed_texts_are_refused(kind: str):
    inputs = call_inputs(NAME, 6, is_causal=True, **PACKED[kind])
    with pytest.raises(ValueError, match="its texts are packed into one row"):
        inputs.all_weights()
    assert not call_inputs("sdpa", 6, is_causal=True, **PACKED[kind]).unsupported
