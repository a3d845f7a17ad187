"""transformers, layer by layer: the same hidden states through their attention and through ours."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.t5.modeling_t5 import T5Attention

import headwise as hw
from anchors import hf_models
from anchors.hf import Model, Site, far

B, T, S = 4, 13, 17  # rows, tokens, tokens of an encoder that another stack reads
LENGTHS = {T: [T, 11, 6, 1], S: [9, S, 2, 14]}
EXACT = 1e-9
PADS = ("none", "right", "left")

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 0.5, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 8.0, "beta_slow": 0.5}
LONG = {"original_max_position_embeddings": 64}
# transformers stretches to the length in hand; 13 tokens in a model of 8 are 2.25 for a factor of
# 2.
STRETCHED = 2.0 * T / 8 - (2.0 - 1)
# Both mscales: one swells the turned channels, the other the scale of the scores, by its square.
MSCALED = YARN | LONG | {"mscale": 0.7, "mscale_all_dim": 1.3}


def mscale(of: float) -> float:
    return 0.1 * of * math.log(4.0) + 1


MODELS: dict[str, Callable[[], Model]] = {
    "bert": hf_models.bert,
    "gpt2": hf_models.gpt2,
    "gpt2-by-depth": partial(hf_models.gpt2, by_depth=True),
    "llama": hf_models.llama,
    "llama-bias": partial(hf_models.llama, bias=True),
    "llama-llama3": partial(
        hf_models.llama, LLAMA3 | LONG, hw.parts.Llama3Scaling(8.0, low=0.5, high=4.0, original=64)
    ),
    "llama-yarn": partial(
        hf_models.llama, YARN | LONG, hw.parts.YaRN(4.0, original=64, beta_fast=8.0, beta_slow=0.5)
    ),
    "llama-linear": partial(
        hf_models.llama, {"rope_type": "linear", "factor": 3.0}, hw.parts.PositionInterpolation(3.0)
    ),
    "llama-dynamic": partial(
        hf_models.llama, {"rope_type": "dynamic", "factor": 2.0}, hw.parts.NTKScaling(STRETCHED)
    ),
    "stablelm": hf_models.stablelm,
    "qwen3": hf_models.qwen3,
    "olmo2": hf_models.olmo2,
    "gemma2": hf_models.gemma2,
    "gpt-oss": hf_models.gpt_oss,
    "t5": hf_models.t5,
    "deepseek": hf_models.deepseek,
    "deepseek-halves": partial(hf_models.deepseek, interleaved=False),
    "deepseek-query-rank": partial(hf_models.deepseek, query_rank=13),
    "deepseek-yarn": partial(
        hf_models.deepseek,
        rope=MSCALED,
        scaling=hw.parts.YaRN(
            4.0,
            original=64,
            beta_fast=8.0,
            beta_slow=0.5,
            attention_factor=mscale(0.7) / mscale(1.3),
        ),
        scale=11**-0.5 * mscale(1.3) ** 2,
    ),
}
DECODED = (
    "gpt2",
    "llama",
    "llama-llama3",
    "qwen3",
    "gemma2",
    "gpt-oss",
    "deepseek",
    "deepseek-query-rank",
)


pytestmark = pytest.mark.usefixtures("without_gradients")


def some_ids(tokens: int) -> Tensor:
    """Token 0 and 1 mean something to some models."""
    return torch.randint(2, hf_models.VOCABULARY, (B, tokens))


def padding(tokens: int, pad: str) -> tuple[hw.SequenceInfo, dict[str, Tensor]]:
    """Our tokens, and the mask that says the same to transformers."""
    x = torch.zeros(B, tokens)
    if pad == "none":
        at = hw.SequenceInfo.from_batch(x)
    else:
        at = hw.SequenceInfo.from_batch(x, lengths=LENGTHS[tokens], pad=pad)
    live = at.is_real.expand(B, -1)
    if pad != "none" and live.sum(1).tolist() != LENGTHS[tokens]:
        raise ValueError(f"rows of {live.sum(1).tolist()} live tokens, not of {LENGTHS[tokens]}")
    return at, {} if pad == "none" else {"attention_mask": live.long()}


def run_forward(
    model: Model, pad: str
) -> tuple[Any, dict[str, tuple[hw.SequenceInfo, hw.SequenceInfo]]]:
    """What a forward of the whole model gives; queries' and keys' tokens by the name of the
    weights.
    """
    at, mask = padding(T, pad)
    if not model.model.config.is_encoder_decoder:
        options = {"input_ids": some_ids(T)} | mask
        stacks = {"attentions": (at, at)}
    else:
        before, hidden = padding(S, pad)
        options = {"input_ids": some_ids(S), "decoder_input_ids": some_ids(T)} | hidden
        options |= {f"decoder_{name}": value for name, value in mask.items()}
        stacks = {"encoder_attentions": (before, before), "decoder_attentions": (at, at)}
        stacks["cross_attentions"] = (at, before)
    outputs = model.model(**options, output_attentions=True, use_cache=False)
    return outputs, stacks


def run(
    site: Site, sequence_info: hw.SequenceInfo, value: hw.SequenceInfo
) -> tuple[Tensor, Tensor]:
    """Our output and weights for the hidden states that the site saw."""
    layer, probe = site.layer, hw.Probe("weights")
    source = layer.project_source(site.sources[0], sequence=value) if site.sources else None
    ours = layer(site.inputs[0], source=source, sequence=sequence_info)  # whatever backend takes it
    # the one that shows weights
    layer(site.inputs[0], source=source, sequence=sequence_info, probe=probe)
    return ours, probe.tensors["weights"]


@pytest.mark.parametrize("pad", PADS)
@pytest.mark.parametrize("name", MODELS)
def test_layers_agree(name: str, pad: str, record_property: Callable[[str, object], None]):
    """Outputs and weights of every head, wherever the query is no padding."""
    model = MODELS[name]()
    if pad != "none" and model.off > EXACT:
        # In float64 the softmax of these, taken in float32, is NaN where a padding query may read
        # nothing.
        model.model.float()
        model.off = 5e-6
    with model.run_with_hooks():
        result, stacks = run_forward(model, pad)
    worst = 0.0
    for site in model.sites:
        stack, depth = site.attends
        live = stacks[stack][0].is_real.expand(B, -1)
        ours, weights = run(site, *stacks[stack])
        theirs = result[stack][depth]
        assert far(ours[live], site.outputs[0][live]) < model.off, site.attends
        by_query = weights.transpose(1, 2)[live], theirs.transpose(1, 2)[live]
        assert far(*by_query) < model.off, site.attends
        worst = max(worst, far(ours[live], site.outputs[0][live]), far(*by_query))
    assert len(model.sites) == sum(len(result[stack]) for stack in stacks)
    record_property("worst", worst)


@pytest.mark.parametrize("name", DECODED)
def test_decoding_agrees(name: str, record_property: Callable[[str, object], None]):
    """A prefill, steps of one and a chunk, through their DynamicCache and through ours."""
    model, ids = MODELS[name](), some_ids(T)
    cache = tf.DynamicCache(config=model.model.config)
    with model.run_with_hooks():
        for part in ids.split((5, 1, 1, 3, 1, 1, 1), 1):
            model.model(input_ids=part, past_key_values=cache, use_cache=True)
    worst = 0.0
    for site in model.sites:
        layer = site.layer
        stored = layer.cache(batch=B, capacity=T)
        steps = [layer(x, cache=stored) for x in site.inputs]
        assert [step.shape[1] for step in steps] == [5, 1, 1, 3, 1, 1, 1]
        worst = max(
            worst, *(far(ours, theirs) for ours, theirs in zip(steps, site.outputs, strict=True))
        )
    record_property("worst", worst)
    assert worst < model.off


@pytest.mark.parametrize("layer", range(hf_models.LAYERS))
@pytest.mark.parametrize("name", ["gemma2", "gpt-oss"])
def test_every_second_layer_forgets(name: str, layer: int):
    """What the anchors above rest on: 13 tokens are more than a window of 5, and only one kind of
    layer has it.
    """
    model = MODELS[name]()
    with model.run_with_hooks():
        result, _ = run_forward(model, "none")
    read = (result["attentions"][layer] > 0).sum(-1).amax()
    assert read == (5, T)[layer]


# --- buckets --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("buckets", "reach"), [(32, 128), (8, 11), (64, 500)])
@pytest.mark.parametrize("looking", ["both", "back"])
def test_t5_buckets(buckets: int, reach: int, looking: str):
    ahead = torch.arange(-3 * reach, 3 * reach + 1)
    theirs = T5Attention._relative_position_bucket(ahead, looking == "both", buckets, reach)
    ours = hw.parts.T5Bias(buckets=buckets, reach=reach, looking=looking).relative_bucket(ahead)
    assert ours.tolist() == theirs.tolist()
    assert set(ours.tolist()) == set(range(buckets)) - (
        {buckets // 2} if looking == "both" else set()
    )


# --- frequencies ----------------------------------------------------------------------------------

SCALINGS: dict[str, tuple[int, float, dict[str, Any], Any]] = {
    "linear": (
        10,
        500.0,
        {"rope_type": "linear", "factor": 3.0},
        hw.parts.PositionInterpolation(3.0),
    ),
    "linear-wide": (
        128,
        1e6,
        {"rope_type": "linear", "factor": 8.0},
        hw.parts.PositionInterpolation(8.0),
    ),
    "llama-3.1": (
        128,
        5e5,
        LLAMA3 | {"low_freq_factor": 1.0, "original_max_position_embeddings": 8192},
        hw.parts.Llama3Scaling(),
    ),
    "llama-3.2": (
        64,
        5e5,
        LLAMA3 | {"factor": 32.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192},
        hw.parts.Llama3Scaling(32.0),
    ),
    "llama3-short": (
        22,
        1e4,
        LLAMA3 | LONG,
        hw.parts.Llama3Scaling(8.0, low=0.5, high=4.0, original=64),
    ),
    "yarn": (
        128,
        1e6,
        YARN | {"beta_fast": 32.0, "beta_slow": 1.0} | LONG,
        hw.parts.YaRN(4.0, original=64),
    ),
    "yarn-qwen": (
        128,
        1e6,
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        hw.parts.YaRN(4.0, original=32768),
    ),
    "yarn-deepseek": (
        64,
        1e4,
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        hw.parts.YaRN(40.0, original=4096, attention_factor=1.0),
    ),
    "yarn-mscaled": (
        22,
        1e4,
        MSCALED,
        hw.parts.YaRN(
            4.0,
            original=64,
            beta_fast=8.0,
            beta_slow=0.5,
            attention_factor=mscale(0.7) / mscale(1.3),
        ),
    ),
    "yarn-said": (
        22,
        1e4,
        YARN | LONG | {"attention_factor": 1.7},
        hw.parts.YaRN(4.0, 64, 8.0, 0.5, attention_factor=1.7),
    ),
    "yarn-short": (
        10,
        500.0,
        YARN | LONG,
        hw.parts.YaRN(4.0, original=64, beta_fast=8.0, beta_slow=0.5),
    ),
    "yarn-beyond": (
        14,
        50.0,
        YARN | {"original_max_position_embeddings": 9999},
        hw.parts.YaRN(4.0, original=9999, beta_fast=8.0, beta_slow=0.5),
    ),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies(name: str):
    """Theirs are float32, and raise the base to a power in it."""
    dims, base, rope, scaling = SCALINGS[name]
    config = tf.LlamaConfig(
        head_dim=dims, rope_parameters=rope | {"rope_theta": base}, max_position_embeddings=9999
    )
    theirs, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
    ours = torch.tensor(hw.parts.Rotary(base=base, scaling=scaling).frequencies(dims))
    assert len(ours) == dims // 2
    torch.testing.assert_close(ours, theirs, rtol=3e-6, atol=0.0)
    assert scaling.channel_scale == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize(
    ("dims", "base", "factor", "length"), [(10, 500.0, 2.0, 13), (64, 1e4, 4.0, 31)]
)
def test_dynamic_frequencies_are_ours_at_one_length(
    dims: int, base: float, factor: float, length: int
):
    rope = {"rope_type": "dynamic", "rope_theta": base, "factor": factor}
    config = tf.LlamaConfig(head_dim=dims, rope_parameters=rope, max_position_embeddings=8)
    theirs, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=length)
    scaling = hw.parts.NTKScaling(factor * length / 8 - (factor - 1))
    ours = torch.tensor(hw.parts.Rotary(base=base, scaling=scaling).frequencies(dims))
    torch.testing.assert_close(ours, theirs, rtol=3e-6, atol=0.0)
