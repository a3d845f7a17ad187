"""Compiled decode steps give the results of plain ones, and compile once."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import headwise as hw
from headwise.models.generation import DecodingState, PromptBatch, TextGenerator, decoding_state
from headwise.models.generation.decoding_state import decide_compile, estimate_compile_gain
from headwise.util.errors import SpecError
from support.decoding_models import CAUSAL, build_random, decoder_spec, encoder_decoder_spec

SPECS = {
    "causal": CAUSAL,
    "rotary": hw.design(model=32, heads=4, kv=2, pattern="causal()", modifiers=(hw.Rotary(),)),
    "window": hw.design(
        model=32, heads=4, kv=2, pattern="window(3) | first(2)", modifiers=(hw.Rotary(),)
    ),
    "state": hw.design(
        model=32, heads=4, pattern="causal()", similarity=hw.FeatureMap(), normaliser=hw.Sum()
    ),
}


@pytest.fixture
def graphs(monkeypatch):
    """How many graphs were made; by Dynamo alone, for Inductor takes long and counts alike."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch.compiler.reset()
    counters.clear()
    yield lambda: counters["stats"].get("unique_graphs", 0)
    torch.compiler.reset()


def answers(net: hw.Transformer, prompts: list[list[int]], how: str, count: int = 12) -> Any:
    return hw.generate(net, prompts, max_new_tokens=count, config=hw.DecodingConfig(compile=how))


@pytest.mark.compile
@pytest.mark.parametrize("name", SPECS)
def test_one_graph_serves_every_position_and_every_room(name, graphs):
    net = build_random(decoder_spec(SPECS[name]))
    for length, count in ((3, 12), (5, 4), (9, 40), (2, 7)):
        prompts = [[(7 * row + 3 * n) % 11 for n in range(length)] for row in range(3)]
        assert answers(net, prompts, "on", count) == answers(net, prompts, "off", count)
        assert graphs() == 1


@pytest.mark.compile
def test_rows_of_several_lengths_and_a_single_row(graphs):
    """Rows that are padded run as they are; one row has a graph of its own."""
    net = build_random(decoder_spec())
    ragged = [[3, 1], [4, 1, 5, 9]]
    assert answers(net, ragged, "on") == answers(net, ragged, "off")
    assert graphs() == 0
    for prompt in ([3, 1], [4, 1, 5], [2, 7, 1, 8, 2]):
        assert answers(net, [prompt], "on") == answers(net, [prompt], "off")
        assert graphs() == 1


@pytest.mark.compile
def test_a_decoder_that_reads_a_source_is_one_graph(graphs):
    net = build_random(encoder_decoder_spec(), begin=(1,), end=())
    for length in (3, 7):
        sources = [[(5 * row + n) % 13 for n in range(length)] for row in range(2)]
        assert answers(net, sources, "on") == answers(net, sources, "off")
        assert graphs() == 1


@pytest.mark.compile
def test_changed_parameters_are_read(graphs):
    """A graph holds no copy of a weight: what is loaded or written to in place
    is what it runs on.
    """
    net = build_random(decoder_spec())
    other = build_random(decoder_spec(hw.design(model=32, heads=4, kv=1, pattern="causal()")))
    prompts = [[3, 1, 4], [1, 5, 9]]
    answers(net, prompts, "on")
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(-1.3)
    net.load_state_dict(other.state_dict())
    assert answers(net, prompts, "on") == answers(other, prompts, "off")
    assert graphs() == 1


def test_auto_compares_the_gain_with_the_compile_time(monkeypatch):
    net = build_random(decoder_spec())
    assert not decide_compile(net, "auto", 64).should_compile
    assert decide_compile(net, "auto", 10**6).should_compile
    assert decide_compile(net, "on", 1) == decoding_state.CompileDecision(
        True, "compiled: compile is on"
    )
    assert estimate_compile_gain(12, 64).reason.startswith(
        "not compiled: 64 steps could gain about"
    )


def test_without_a_compiler_auto_reports_it_and_on_is_refused(monkeypatch):
    monkeypatch.setattr(decoding_state.shutil, "which", lambda name: None)
    net = build_random(decoder_spec())
    assert decide_compile(net, "auto", 10**6) == decoding_state.CompileDecision(
        False, "not compiled: there is no C++ compiler"
    )
    assert answers(net, [[3, 1]], "auto") == answers(net, [[3, 1]], "off")
    with pytest.raises(
        SpecError, match=r"steps cannot be compiled: there is no C\+\+ compiler; leave compile out"
    ):
        answers(net, [[3, 1]], "on")


def test_probes_hinder_and_other_words_are_refused():
    net = build_random(decoder_spec())
    net.probes = {"decoder.0.attention": hw.Probe("heads")}
    assert decide_compile(net, "auto", 10**6).reason == "not compiled: probes observe its attention"
    with pytest.raises(SpecError, match=r"compile='yes' is unknown"):
        hw.DecodingConfig(compile="yes")


def test_rows_of_several_lengths_give_a_reason_not_to_compile():
    net, prompt = build_random(decoder_spec()), torch.tensor([[3, 1, 4], [0, 1, 5]])
    sequence = hw.SequenceInfo.from_batch(prompt, lengths=[3, 2], pad="left")
    with torch.no_grad():
        for tokens, compiled in ((sequence, False), (None, True)):
            choice = DecodingState(
                net,
                prompt,
                max_new_tokens=2,
                sequence=tokens,
                config=hw.DecodingConfig(compile="on"),
            ).choice
            assert choice.should_compile is compiled
            assert choice.reason == (
                "compiled: compile is on" if compiled else decoding_state.UNEQUAL_LENGTHS.reason
            )
        assert (
            DecodingState(net, prompt, max_new_tokens=2, sequence=sequence).choice.reason
            == "not compiled: compile is off"
        )


def test_every_choice_is_reported_on_request():
    net, recorded = build_random(decoder_spec()), []
    request = TextGenerator.of(net, 5, 0.0, hw.DecodingConfig(compile="auto"), recorded.append)
    request.answers(PromptBatch([[3, 1], [4, 1]], "ids", "together"))
    list(request.pieces(PromptBatch([[3, 1]], "ids", "alone")))
    assert [choice.should_compile for choice in recorded] == [False, False]
    assert all("5 steps could gain" in choice.reason for choice in recorded)


@pytest.mark.compile
def test_a_training_step_is_compiled_once_for_each_shape(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch.compiler.reset()
    counters.clear()
    net = hw.build(decoder_spec(), seed=0).train()
    hidden, recorded = torch.compile(net.hidden), []
    optimiser = torch.optim.AdamW(net.parameters())
    for _ in range(5):
        loss = net.apply_head(hidden(torch.randint(11, (3, 7)))).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        recorded.append(counters["stats"]["unique_graphs"])
    assert recorded == recorded[:1] * 5
    net.eval()
    with torch.no_grad():
        for _ in range(2):
            hidden(torch.randint(11, (3, 7)))
            recorded.append(counters["stats"]["unique_graphs"])
    assert recorded[5:] == [recorded[0] + 1] * 2  # answering is another graph, made once
    torch.compiler.reset()
