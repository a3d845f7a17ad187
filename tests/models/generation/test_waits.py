"""Decoding waits for the device once per token: to know the ids that were chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

import headwise as hw
from support.pretended_device import count_waits, pretended_device

GPT2 = {"model_type": "gpt2", "n_embd": 12, "n_head": 3, "n_positions": 64, "vocab_size": 31}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 12,
    "intermediate_size": 14,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 31,
}
MISTRAL = LLAMA | {"model_type": "mistral", "sliding_window": 4}
MODELS = {"gpt2": GPT2, "llama": LLAMA, "mistral": MISTRAL}
EVEN = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [3, 3, 3, 3, 3]]
UNEVEN = [[1, 2, 3, 4, 5, 6, 7], [6, 7], [3, 1, 4, 1]]
WAYS: Mapping[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 3},
    "filtered": {
        "temperature": 0.8,
        "seed": 3,
        "config": hw.DecodingConfig(top_k=9, top_p=0.9, min_p=0.01, repetition=1.2),
    },
    "beams": {"config": hw.DecodingConfig(beams=3)},
}


def build_model(name: str, layers: int) -> hw.Transformer:
    key = "n_layer" if name == "gpt2" else "num_hidden_layers"
    return hw.build(hw.families.read_model_spec(MODELS[name] | {key: layers}), seed=0).eval()


def waits_of(
    name: str, layers: int, prompts: Sequence[Sequence[int]], count: int, **options: Any
) -> int:
    """Waits to generate `count` tokens; the ids are those of the CPU."""
    net = build_model(name, layers)
    expected = hw.generate(net, prompts, max_new_tokens=count, **options)
    found: list[Any] = []
    with pretended_device() as device:
        net.to(device)
        waits = count_waits(
            lambda: found.extend(hw.generate(net, prompts, max_new_tokens=count, **options))
        )
    assert found == expected
    return waits


CASES = [("llama", UNEVEN, way) for way in WAYS]
CASES += [("gpt2", EVEN, "sampled"), ("mistral", EVEN, "greedy")]


@pytest.mark.parametrize(("name", "prompts", "way"), CASES)
def test_one_wait_per_token(name: str, prompts: list[list[int]], way: str):
    few, many = (waits_of(name, 3, prompts, count, **WAYS[way]) for count in (3, 11))
    assert many - few <= 8


@pytest.mark.parametrize(
    ("name", "prompts"), [("gpt2", EVEN), ("llama", UNEVEN), ("mistral", EVEN)]
)
def test_a_prompt_takes_few_waits_however_many_layers(name: str, prompts: list[list[int]]):
    shallow, deep = (waits_of(name, layers, prompts, 1) for layers in (1, 4))
    assert shallow == deep
    assert deep <= 7


def test_rows_that_end_early_take_no_more_waits():
    net = build_model("llama", 3)
    ends: dict[str, Any] = {"config": hw.DecodingConfig(end=tuple(range(0, 31, 4)))}
    lengths = [len(ids) for ids in hw.generate(net, UNEVEN, max_new_tokens=20, **ends)]
    assert len(set(lengths)) > 1
    waits = waits_of("llama", 3, UNEVEN, 20, **ends)
    assert waits <= max(lengths) + 1 + 7


@pytest.mark.parametrize("name", MODELS)
def test_a_step_of_the_engine_waits_once(name: str):
    net = build_model(name, 3)
    with pretended_device() as device:
        net.to(device)
        engine = hw.Engine(net, budget=2**22)
        streams = [engine.submit(prompt, max_new_tokens=9) for prompt in UNEVEN]
        engine.step()
        while all(not stream.ended for stream in streams):
            assert count_waits(engine.step) <= 1
    assert [len(stream.ids) for stream in streams] == [9] * 3
