"""Generation with compiled decode steps: the same ids, by one graph for all lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import headwise as hw
from headwise.models.generation import decoding_state

pytestmark = pytest.mark.compile
COMPILED = hw.DecodingConfig(compile=True)
LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 31,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": LLAMA | {"model_type": "mistral", "sliding_window": 4},
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 12,
        "n_head": 3,
        "n_layer": 2,
        "n_positions": 128,
        "vocab_size": 31,
    },
}


def build(name: str, seed: int = 0) -> hw.Transformer:
    return hw.build(hw.families.read_model_spec(MODELS[name]), seed=seed)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    """Counts the graphs, which run without a compiler, and refuses breaks in them."""
    counter = CompileCounterWithBackend("eager")
    compile = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda step, mode: compile(step, backend=counter, fullgraph=True)
    )
    monkeypatch.setattr(decoding_state, "COMPILED_STEPS", {})
    torch._dynamo.reset()
    return counter


@pytest.mark.parametrize("name", MODELS)
def test_ids_are_those_of_plain_steps(name: str, graphs: CompileCounterWithBackend):
    net = build(name)
    for prompts, count in (([3, 1, 4], 8), ([[3, 1, 4], [5], [2, 2]], 9), ([3, 1], 90)):
        expected = hw.generate(net, prompts, max_new_tokens=count)
        assert hw.generate(net, prompts, max_new_tokens=count, config=COMPILED) == expected
    assert graphs.frame_count <= 3  # each number of rows or slots that changes is a symbol then


def test_few_graphs_serve_prompts_of_all_lengths(graphs: CompileCounterWithBackend):
    net = build("llama")
    for length in range(1, 30, 7):
        hw.generate(net, [1] * length, max_new_tokens=4, config=COMPILED)
    assert graphs.frame_count <= 2  # again after the first prompt of more than one token


def test_another_model_has_its_own_weights(graphs: CompileCounterWithBackend):
    for seed in (0, 1):
        net = build("llama", seed)
        expected = hw.generate(net, [3, 1], max_new_tokens=12)
        assert hw.generate(net, [3, 1], max_new_tokens=12, config=COMPILED) == expected
    with torch.no_grad():
        next(net.parameters()).mul_(-1)
    expected = hw.generate(net, [3, 1], max_new_tokens=12)
    assert hw.generate(net, [3, 1], max_new_tokens=12, config=COMPILED) == expected


def test_sampled_rows_that_end_at_different_steps(graphs: CompileCounterWithBackend):
    net = build("gpt2")
    prompts = [[3, 1, 4], [5], [2, 2], [9, 8]]
    options = {"max_new_tokens": 30, "temperature": 1.0, "seed": 5}
    expected = hw.generate(net, prompts, config=hw.DecodingConfig(end=(7, 8, 9)), **options)
    assert len({len(row) for row in expected}) > 1
    found = hw.generate(
        net, prompts, config=hw.DecodingConfig(end=(7, 8, 9), compile=True), **options
    )
    assert found == expected
    assert graphs.frame_count == 1


def test_a_gpu_gets_a_captured_graph(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "compile", lambda step, mode: mode)
    monkeypatch.setattr(decoding_state, "COMPILED_STEPS", {})
    modes = [decoding_state._compile_step(device) for device in ("cuda", "cpu")]
    assert modes == ["reduce-overhead", None]


def test_what_cannot_be_compiled_is_refused():
    with pytest.raises(hw.SpecError, match="compile=True does not search beams=3 beams; leave"):
        hw.DecodingConfig(beams=3, compile=True)
    spec = hw.design(preset="linear", model=16, heads=2)
    linear = hw.training.run_setup.replace_self_attention(
        hw.families.read_model_spec(LLAMA | {"num_attention_heads": 2}), lambda _: spec
    )
    with pytest.raises(hw.SpecError, match=r"recurrent state .* leave out .* compile=True"):
        hw.generate(hw.build(linear), [3, 1], max_new_tokens=3, config=COMPILED)
    engine = hw.Engine(build("llama"), budget=2**20)
    with pytest.raises(ValueError, match="engine does not compile its steps"):
        engine.submit([3, 1], config=COMPILED)
