"""Captured traces against the eager weights of the models and our definitions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

import headwise as hw
from headwise.attention.attention import Attention
from headwise.models.model_spec import (
    BlockSpec,
    EmbeddingSpec,
    FeedForwardSpec,
    ModelSpec,
    NormSpec,
    OutputHeadSpec,
    StackSpec,
)
from headwise.observe.inspect.site import AttentionInputs
from headwise.observe.traces import Trace, save_trace
from headwise.util.errors import SpecError
from support import layer_cases as cases
from support.refusals import refused_cases
from support.transformers_models import ZOO

GET_INTERFACE = vars(AttentionInterface)["get_interface"]

SITE_BY_OUTPUT = {
    "attentions": "",
    "encoder_attentions": "encoder.{}.attention",
    "decoder_attentions": "decoder.{}.attention",
    "cross_attentions": "decoder.{}.cross",
}
PRESETS = {name: hw.design(preset=name, model=16, heads=4) for name in hw.PRESETS}


def own_weights(options: Mapping[str, Any]) -> Iterator[tuple[str | int, Tensor]]:
    """The weights that a model of transformers gives itself, by the names of their sites."""
    for key, name in SITE_BY_OUTPUT.items():
        for number, weights in enumerate(options.get(key) or ()):
            yield name.format(number) if name else number, weights


def far(trace: Trace, site: str | int, weights: Tensor) -> float:
    """The largest difference of any weight; of queries that were not asked there are none."""
    num_queries = trace.get_layer(site).num_queries
    worst = 0.0
    for row in range(weights.shape[0]):
        for head in range(weights.shape[1]):
            found, own = (
                trace.head_weights(site, head, row=row),
                weights[row, head, :num_queries].numpy(),
            )
            keys = min(found.shape[1], own.shape[1])
            worst = max(
                worst,
                np.abs(found[:, :keys] - own[:, :keys]).max(),
                np.abs(found[:, keys:]).max(initial=0),
            )
    return worst


@pytest.mark.parametrize("name", ZOO)
def test_rows_are_the_models_own(name: str, tmp_path: Path):
    foreign = ZOO[name]
    try:
        model = foreign.build("sdpa")
    except ValueError:  # it has no fused form
        model = foreign.build("eager")
    trace = hw.trace(model, foreign.inputs())
    save_trace(trace, tmp_path / "a.trace")
    again = hw.load_trace(tmp_path / "a.trace")
    with torch.no_grad():
        result = foreign.build("eager")(**foreign.inputs(), output_attentions=True)
    pairs = list(own_weights(result))
    assert len(pairs) == len(again.layers)
    assert (
        max(far(again, site, weights) for site, weights in pairs) <= 5e-5
    )  # scores of T5 are large, not scaled


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["gpt2", "mistral", "deepseek", "t5", "bart"])
def test_every_generated_token_is_recorded(name: str, cache: str):
    foreign = ZOO[name]
    model = foreign.build("eager")
    model.generation_config.eos_token_id = None
    if cache == "static":
        model.generation_config.cache_implementation = cache
    inputs = {key: value for key, value in foreign.inputs().items() if key != "decoder_input_ids"}
    trace = hw.trace(model, inputs, max_new_tokens=6)
    ids = torch.tensor([row.ids for row in trace.streams["text"]])
    inputs["decoder_input_ids" if foreign.reads == "both" else "input_ids"] = ids
    with torch.no_grad():
        outputs = model(**inputs, output_attentions=True, use_cache=False)
    assert max(far(trace, site, weights) for site, weights in own_weights(outputs)) <= 1e-5
    assert {len(one.calls) for one in trace.layers if one.stack == "decoder"} == {6}


def test_generation_from_audio_is_recorded():
    model = ZOO["whisper"].build("sdpa")
    model.generation_config.eos_token_id = None
    sound = {"input_features": ZOO["whisper"].inputs()["input_features"]}
    trace = hw.trace(model, sound, max_new_tokens=4)
    assert {len(one.calls) for one in trace.layers if one.stack == "decoder"} == {4}
    assert [
        trace.get_layer("decoder.1.cross").num_queries,
        trace.get_layer("decoder.1.cross").num_keys,
    ] == [4, 13]


def test_cached_tokens_are_recorded_once():
    model = ZOO["llama"].build("sdpa")
    model.generation_config.eos_token_id = None
    trace = hw.trace(model, ZOO["llama"].inputs(), max_new_tokens=6)
    read = ZOO["llama"].inputs()["input_ids"].shape[1] + 5
    assert [one.arrays["k"].shape[1] for one in trace.layers] == [read, read]


def test_texts_of_several_lengths_side_by_side():
    model, ids = ZOO["llama"].build("sdpa"), ZOO["llama"].inputs()["input_ids"]
    live = torch.ones_like(ids)
    live[0, :4], live[1, 8:] = 0, 0  # one begins late, the other ends early
    trace = hw.trace(model, {"input_ids": ids, "attention_mask": live})
    with torch.no_grad():
        result = ZOO["llama"].build("eager")(
            input_ids=ids, attention_mask=live, output_attentions=True
        )
    for site, weights in own_weights(result):
        for row, head in ((0, 1), (1, 3)):
            actual = live[row].bool()
            found = trace.head_weights(site, head, row=row)[actual]
            np.testing.assert_allclose(found, weights[row, head][actual], atol=1e-5)


def test_a_query_without_allowed_keys_has_zero_weights():
    q = torch.randn(1, 2, 1, 4)
    mask = torch.tensor([[[[True, False], [False, False]]]])
    attention_inputs = AttentionInputs(q, q, q, 1.0, mask)
    assert attention_inputs.all_weights()[0, 0].tolist() == [[1, 0], [0, 0]]
    assert torch.equal(
        F.scaled_dot_product_attention(*[q.transpose(1, 2)] * 3, mask)[0, 0, 1], torch.zeros(4)
    )
    assert attention_inputs.allowed_pairs().tolist() == mask.tolist()


@pytest.mark.parametrize("name", PRESETS)
def test_ours_are_the_definitions(name: str):
    spec = PRESETS[name]
    layer = cases.layer(spec).float()
    x, z = (None if one is None else one.float() for one in cases.tensors(spec))
    inputs = {"x": x} | ({} if z is None else {"source": z})
    trace = hw.trace(layer, inputs, capture=hw.Capture(extra=("v", "z")))
    probe = hw.Probe("weights", "heads")
    with torch.no_grad():
        layer(x, source=z, probe=probe)
    (one,) = trace.layers
    assert far(trace, 0, probe.tensors["weights"]) <= 1e-5
    outputs = probe.tensors["heads"]
    atol = 1e-5 * max(1.0, outputs.abs().max().item())  # float32, and mla's outputs reach 20
    np.testing.assert_allclose(one.arrays["z"], outputs, atol=atol)


@pytest.mark.parametrize("pattern", ["causal()", "window(3)", "window(3) | first(2)"])
@pytest.mark.parametrize("kv", [1, 4])
def test_steps_of_ours_through_every_cache(pattern: str, kv: int):
    block = BlockSpec(
        hw.design(model=16, heads=4, kv=kv, pattern=pattern), feed=FeedForwardSpec(8, bias="ud")
    )
    stack = StackSpec.from_blocks(
        "decoder", 16, [block] * 2, embedding=EmbeddingSpec(11), norm=NormSpec()
    )
    net = hw.build(
        ModelSpec("small", "decoder", (stack,), (OutputHeadSpec("tokens", 11),)), seed=0
    ).eval()
    ids = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    trace = hw.trace(net, ids, max_new_tokens=6, capture=hw.Capture(extra=("v",)))
    whole = hw.trace(net, torch.tensor([row.ids for row in trace.streams["text"]]))
    for one in trace.layers:
        for head in range(4):
            for row in range(2):
                found, own = (t.head_weights(one.name, head, row=row) for t in (trace, whole))
                np.testing.assert_allclose(found, own[: len(found), : found.shape[1]], atol=1e-5)


def test_no_hook_remains_and_the_model_is_unchanged():
    model, inputs = ZOO["llama"].build("sdpa"), ZOO["llama"].inputs()
    with torch.no_grad():
        before = model(**inputs).logits
    methods = {name: vars(Attention)[name] for name in ("head_outputs_and_gates", "attend")}
    with pytest.raises(SpecError, match=r"beyond a budget of 1\.00 kB; give a larger budget="):
        hw.trace(model, inputs, capture=hw.Capture(budget=1000))
    hw.trace(model, inputs)
    assert all(vars(Attention)[name] is method for name, method in methods.items())
    assert vars(AttentionInterface)["get_interface"] is GET_INTERFACE
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, before)


def test_a_budget_that_the_run_passes():
    model, inputs = ZOO["llama"].build("sdpa"), ZOO["llama"].inputs()
    model.generation_config.cache_implementation = "static"
    needed = hw.trace(model, inputs, max_new_tokens=6).nbytes
    with pytest.raises(
        SpecError, match=r"cannot record this run: it takes at least .*, beyond a budget"
    ):
        hw.trace(model, inputs, max_new_tokens=6, capture=hw.Capture(budget=needed - 100))


def test_half_the_bytes():
    model, inputs = ZOO["llama"].build("sdpa"), ZOO["llama"].inputs()
    whole = hw.trace(model, inputs)
    half = hw.trace(model, inputs, capture=hw.Capture(precision="half"))
    assert half.nbytes == whole.nbytes / 2
    np.testing.assert_allclose(half.head_weights(1, 2), whole.head_weights(1, 2), atol=5e-3)
    assert not np.array_equal(half.head_weights(1, 2), whole.head_weights(1, 2))


def test_some_sites_alone():
    trace = hw.trace(
        ZOO["bart"].build("sdpa"),
        ZOO["bart"].inputs(),
        capture=hw.Capture(sites=("decoder.1.cross",)),
    )
    assert [one.name for one in trace.layers] == ["decoder.1.cross"]


def test_queries_of_pictures_are_recorded():
    trace = hw.trace(ZOO["vit"].build("sdpa"), ZOO["vit"].inputs())
    assert trace.layers[0].num_queries == 17


class Plain(nn.Module):
    """Somebody's own encoder."""

    def __init__(self):
        super().__init__()
        self.inner = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.filterwarnings("ignore:.*nested_tensor")
def test_weights_are_recorded_without_scores():
    model, x = Plain().eval(), torch.randn(2, 5, 8)
    trace = hw.trace(model, x)
    own = model.inner.layers[0].self_attn
    with torch.no_grad():
        _, weights = own(x, x, x, average_attn_weights=False)
    assert far(trace, 0, weights) <= 1e-6
    assert list(trace.layers[0].arrays) == ["weights.0"]


@pytest.mark.parametrize(
    ("change", "inputs", "more", "message"),
    refused_cases(__file__, "untraceable models", globals(), 3),
)
def test_untraceable_models_are_refused(change, inputs, more, message: str):
    model = change(ZOO["llama"].build("sdpa"))
    with pytest.raises(ValueError, match=message):
        hw.trace(model, ZOO["llama"].inputs() if inputs is None else inputs, **more)
    assert vars(AttentionInterface)["get_interface"] is GET_INTERFACE


@pytest.mark.parametrize(
    "options", [{"extra": ("q",)}, {"budget": 0}, {"budget": 1.5}, {"precision": "bf16"}]
)
def test_unsupported_captures_are_refused(options: dict[str, Any]):
    with pytest.raises(SpecError, match=r"Capture|unknown"):
        hw.Capture(**options)
