"""Gradients of transformers models on headwise's attention, against their eager attention and
finite differences.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise.hub as hub
from headwise.hub import transformers_backend
from headwise.observe.inspect.site import AttentionInputs
from support.pretended_device import count_waits, pretended_device
from support.transformers_models import (
    BART,
    HEADS,
    LLAMA,
    LOCAL,
    ZOO,
    TransformersModel,
    transformers,
)

assert hub  # importing it registers the attention function

LINEAR = LLAMA | {
    "layer_types": ["full_attention", "linear_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
WINDOW = LLAMA | {"sliding_window": 5}
NEOX = {
    key: value for key, value in LLAMA.items() if key not in ("num_key_value_heads", "head_dim")
}
OPT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
}
MORE = {
    "gpt-neox": TransformersModel("GPTNeoXForCausalLM", "GPTNeoXConfig", NEOX, "dense"),
    "opt": TransformersModel("OPTForCausalLM", "OPTConfig", BART | OPT, "out_proj"),
    "phi": TransformersModel("PhiForCausalLM", "PhiConfig", NEOX, "dense"),
    "qwen3-next": TransformersModel("Qwen3NextForCausalLM", "Qwen3NextConfig", LINEAR, "o_proj"),
    "starcoder2": TransformersModel("Starcoder2ForCausalLM", "Starcoder2Config", WINDOW, "o_proj"),
    "smollm3": TransformersModel("SmolLM3ForCausalLM", "SmolLM3Config", LLAMA, "o_proj"),
    "cohere2": TransformersModel(
        "Cohere2ForCausalLM", "Cohere2Config", WINDOW | {"layer_types": LOCAL}, "o_proj"
    ),
}
MODELS = {name: model for name, model in (ZOO | MORE).items() if model.reads in ("ids", "both")}
PAD = 3
MASK_FORMS = (("left", "ids"), ("right", "numbers"), ("left", "booleans"))
CASES = [  # encoder-decoders and OPT read more than pairs from a mask: only that of the ids
    (name, side, form)
    for name, (side, form) in itertools.product(MODELS, (("right", "ids"), *MASK_FORMS))
    if form == "ids" or name in ("llama", "gpt2", "bert")
]


@pytest.fixture(autouse=True, scope="module")
def plain_attention() -> Iterator[None]:
    """Register the formula of the paper, in the dtype of its inputs, as attention "plain" of
    transformers.
    """

    def attend(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any
    ):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = q @ k.transpose(2, 3) * options["scaling"]
        for bias in (mask, options.get("position_bias")):
            scores = scores if bias is None else scores + bias
        return (scores.softmax(-1) @ v).transpose(1, 2), None

    masks, functions = transformers.AttentionMaskInterface, transformers.AttentionInterface
    functions.register("plain", attend)
    masks.register("plain", masks()["eager"])
    yield
    del functions._global_mapping["plain"], masks._global_mapping["plain"]


def build(name: str, attention: str, dtype: torch.dtype = torch.float32, **keys: Any) -> nn.Module:
    zoo = MODELS[name]
    return zoo._replace(keys=zoo.keys | keys).build(attention).to(dtype)


def padded_inputs(
    model: TransformersModel, side: str, form: str, value: float
) -> dict[str, Tensor]:
    """Inputs with three padding tokens in the second row, and their mask in one of the forms that
    models take.
    """
    inputs = model.inputs()
    rows, length = inputs["input_ids"].shape
    real = torch.ones(rows, length, dtype=torch.bool)
    real[1, slice(0, PAD) if side == "left" else slice(-PAD, None)] = False
    if form == "ids":
        return inputs | {"attention_mask": real.long()}
    allowed = real[:, None, None].expand(rows, 1, length, length)
    if model.reads == "ids" and "For" in model.model:  # a decoder
        allowed = allowed & torch.ones(length, length, dtype=torch.bool).tril()
    return inputs | {
        "attention_mask": allowed if form == "booleans" else torch.where(allowed, 0.0, value)
    }


def gradients(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs, and the gradients of their sum with random factors; outputs at padding count as
    well.
    """
    output = model(**inputs)
    output = output.logits if "logits" in output else output.last_hidden_state
    factors = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    (output * factors.to(output.dtype)).sum().backward()
    return output.detach(), {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


def difference(own: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of two sets of gradients, relative to the largest gradient."""
    assert own.keys() == expected.keys()
    largest = max(float(grad.abs().max()) for grad in expected.values())
    return max(float((own[name] - grad).abs().max()) for name, grad in expected.items()) / largest


@pytest.mark.parametrize(("name", "side", "form"), CASES)
def test_gradients_equal_those_of_eager_attention(name: str, side: str, form: str):
    """In float32; a boolean mask is compared with its numbers, which eager attention adds to the
    scores.
    """
    zoo, lowest = MODELS[name], torch.finfo(torch.float32).min
    outputs, eager = gradients(
        zoo.build("eager"), padded_inputs(zoo, side, form.replace("booleans", "numbers"), lowest)
    )
    own_outputs, own = gradients(zoo.build("headwise"), padded_inputs(zoo, side, form, lowest))
    assert difference({"": own_outputs}, {"": outputs}) <= 1e-5
    assert difference(own, eager) <= 1e-5


@pytest.mark.parametrize(
    ("name", "side"),
    [("llama", "left"), ("gpt2", "right"), ("bert", "left"), ("deepseek", "right")],
)
def test_gradients_in_other_dtypes(name: str, side: str):
    """Eager attention of most decoders computes its softmax in float32, so float64 is compared with
    the formula.
    """
    inputs = padded_inputs(MODELS[name], side, "ids", 0)
    _, truth = gradients(build(name, "plain", torch.float64), inputs)
    _, own = gradients(build(name, "headwise", torch.float64), inputs)
    assert difference(own, truth) <= 1e-9
    errors = []
    for attention in ("eager", "headwise"):
        _, rounded = gradients(build(name, attention, torch.bfloat16), inputs)
        errors.append(difference(rounded, truth))
    assert errors[1] <= 1.5 * errors[0] + 0.01


@pytest.mark.parametrize("value", [-1e3, -1e7, -1e12])
def test_masks_of_any_size(value: float):
    """In float64 the reference is exact; in float32 a mask of this size rounds the scores of eager
    attention.
    """
    inputs = padded_inputs(MODELS["llama"], "left", "numbers", value)
    _, truth = gradients(build("llama", "plain", torch.float64), inputs)
    _, own = gradients(build("llama", "headwise", torch.float64), inputs)
    assert difference(own, truth) <= 1e-5
    _, eager = gradients(build("llama", "eager"), inputs)
    _, own = gradients(build("llama", "headwise"), inputs)
    assert difference(own, eager) <= 1e-5 or difference(own, truth) <= difference(eager, truth)


@pytest.mark.parametrize("kind", ["dropout", "autocast", "checkpointing", "one query"])
def test_gradients_in_other_settings(kind: str):
    recorded = []
    rate = 0.3 if kind == "dropout" else 0.0
    for attention in ("eager", "headwise"):
        model: Any = build("llama", attention, attention_dropout=rate).train()
        inputs = padded_inputs(MODELS["llama"], "left", "ids", 0)
        if kind == "checkpointing":
            model.activation_checkpointing_enable()
        if kind == "one query":
            inputs = {name: values[:, :1] for name, values in inputs.items()}
        torch.manual_seed(5)
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            recorded.append(gradients(model, inputs)[1])
    assert difference(recorded[1], recorded[0]) <= (0.05 if kind == "autocast" else 1e-5)


@pytest.mark.compile
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_gradients_of_compiled_models(name: str):
    """In one graph: nothing in it depends on the values of the mask."""
    inputs = padded_inputs(MODELS[name], "left", "ids", 0)
    _, eager = gradients(build(name, "eager"), inputs)
    compiled: Any = torch.compile(build(name, "headwise"), backend="aot_eager", fullgraph=True)
    _, own = gradients(compiled, inputs)
    assert (
        difference({key.removeprefix("_orig_mod."): grad for key, grad in own.items()}, eager)
        <= 1e-5
    )


def test_a_mask_is_read_once_for_all_layers():
    """A GPU waits for each reading, so more layers wait no more often."""
    inputs = padded_inputs(MODELS["llama"], "right", "ids", 0.0)
    waits = []
    for layers in (1, 3):
        model = build("llama", "headwise", num_hidden_layers=layers)
        with pretended_device() as device:
            moved = model.to(device)
            own = {name: one.to(device) for name, one in inputs.items()}
            waits.append(count_waits(lambda call=moved, own=own: call(**own)))
    assert waits[0] == waits[1]


def test_a_mask_that_is_changed_is_read_again():
    mask = torch.zeros(1, 1, 3, 3)
    inputs = AttentionInputs(*[torch.zeros(1, 3, 1, 2)] * 3, scale=1.0, mask=mask)
    assert transformers_backend._gives_every_query_a_key(inputs, mask)
    mask[:, :, 1] = -1e30
    assert not transformers_backend._gives_every_query_a_key(inputs, mask)
