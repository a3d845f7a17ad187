"""The engine: whoever is beside it, a request gets what it gets alone; and what is bad input for one is that one's end."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import headwise as hw
from headwise import blueprint as bp
from headwise.cli.screen import PRESETS
from headwise.engine import stepping
from headwise.engine.choosing import chunked, divided

TOKENS, MODEL = 13, 16
ROOMY = 40_000_000


def causal(preset: str) -> hw.AttentionSpec:
    """A preset, tiny and decodable."""
    said = {} if hw.design(preset=preset, model=MODEL, heads=4).pattern.opening == 0 else {"pattern": "causal()"}
    small = {"dim": 4, "project": hw.Latent(rank=6, rope=2)} if preset == "mla" else {}
    return hw.design(preset=preset, model=MODEL, heads=4, **small, **said)


def stack(*specs: hw.AttentionSpec, **embedding: object) -> bp.Stack:
    blocks = [bp.Block(spec, feed=bp.Dense(18), norm=bp.Norm("rms")) for spec in specs]
    return bp.Stack.of("decoder", MODEL, blocks, embedding=bp.Embedding(TOKENS, **embedding), norm=bp.Norm("rms"))


def drawn(net: hw.Transformer) -> hw.Transformer:
    """Every number matters: no token is always the likeliest, and gaps are far above rounding."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (1.0 if parameter.dim() > 1 else 0.3))
    return net.eval()


def language(*specs: hw.AttentionSpec, **embedding: object) -> hw.Transformer:
    layers = stack(*specs, **embedding)
    return drawn(hw.build(bp.Model("tiny", "decoder", (layers,), heads=(bp.Head("tokens", TOKENS),)), seed=1))


def plain(**said: object) -> hw.AttentionSpec:
    return hw.design(**{"model": MODEL, "heads": 3, "dim": 4, "pattern": "causal()", "modifiers": (hw.Rotary(),)} | said)


MODELS = {
    **{name: functools.partial(lambda name: language(causal(name), causal(name)), name) for name in PRESETS},
    "window": lambda: language(plain(pattern="window(5)"), plain(pattern="window(5)")),
    "sinks": lambda: language(plain(pattern="window(4) | first(2)", kv=1), plain(pattern="window(4) | first(2)", kv=1)),
    "mixed": lambda: language(plain(pattern="window(3)"), plain(pattern="window(3)"), plain(kv=1)),
    "state and tokens": lambda: language(causal("linear"), plain()),
    "prefix": lambda: language(plain(pattern="prefix(3)"), plain(pattern="prefix(3)")),
    "learned": lambda: language(plain(modifiers=()), positions=bp.Positions("learned", 64)),
    "sinusoidal": lambda: language(plain(modifiers=()), positions=bp.Positions("sinusoidal")),
}


@functools.cache
def model(name: str) -> hw.Transformer:
    return MODELS[name]()


def alone(net: hw.Transformer, prompt: list[int], count: int) -> list[int]:
    return hw.greedy(net, torch.tensor([prompt]), count=count)[0]


# --- alone and together --------------------------------------------------------------------------------

PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=14)  # of three tokens: many begin alike
ASKED = st.tuples(PROMPTS, st.integers(1, 8))
EVENTS = st.lists(st.sampled_from(["join", "join", "step", "step", "leave"]), max_size=16)
WAYS = st.builds(
    hw.Batching,
    rows=st.integers(1, 6),
    page=st.integers(1, 5),
    chunk=st.integers(1, 9),
    order=st.sampled_from(["arrival", "shortest"]),
    patience=st.integers(1, 3),
)


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=4, deadline=None)
@given(asked=st.lists(ASKED, min_size=1, max_size=6), events=EVENTS, way=WAYS, tight=st.booleans(), data=st.data())
def test_a_request_gets_what_it_gets_alone(name: str, asked, events, way: hw.Batching, tight: bool, data):
    net = model(name)
    if name == "prefix":
        asked = [([*prompt, 1, 2, 0][: max(3, len(prompt))], count) for prompt, count in asked]
    engine = hw.Engine(net, budget=smallest(net, way, asked) if tight else ROOMY, batching=way)
    streams, coming = [], list(asked)
    for event in events:
        if event == "join" and coming:
            prompt, count = coming.pop()
            streams.append((engine.submit(prompt, max_new_tokens=count), prompt, count))
        if event == "leave" and streams:
            streams[data.draw(st.integers(0, len(streams) - 1))][0].cancel()
        if event == "step":
            engine.step()
        assert engine.room.used <= engine.room.nbytes <= engine.room.budget
    streams += [(engine.submit(prompt, max_new_tokens=count), prompt, count) for prompt, count in coming]
    for stream, prompt, count in reversed(streams):
        expected, said = alone(net, prompt, count), stream.result()
        assert said == (expected[: len(said)] if stream.ended == "cancelled" else expected)
        assert stream.ended in ("cancelled", "length")
    assert engine.room.used == 0
    assert engine.room.pool.book.pages.held == 0


def smallest(net: hw.Transformer, way: hw.Batching, asked: list[tuple[list[int], int]]) -> int:
    """The least budget in which each of these fits when it is alone, found from what is refused."""
    budget = 1
    while True:
        try:
            engine = hw.Engine(net, budget=budget, batching=way)
            for prompt, count in asked:
                engine.submit(prompt, max_new_tokens=count)
            return budget
        except ValueError as refused:
            numbers = [int(word.strip(".;,").replace(",", "")) for word in str(refused).split() if word[0].isdigit()]
            assert max(numbers) > budget, refused
            budget = max(numbers)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_one_pass(name: str, monkeypatch: pytest.MonkeyPatch):
    """In float64, where rounding cannot hide what is wrong."""
    net = MODELS[name]().double()
    seen: list[tuple[list[int], torch.Tensor]] = []

    def watched(logits, past, **how):
        seen.extend((list(ids), row) for ids, row in zip(past, logits, strict=True))
        return hw.models.generating.pick(logits, past, **how)

    monkeypatch.setattr(stepping, "pick", watched)
    engine = hw.Engine(net, budget=ROOMY, batching=hw.Batching(rows=3, page=4, chunk=7))
    for length, count in ((9, 5), (3, 7), (17, 3), (5, 4), (9, 2)):
        engine.submit([n * n % 5 for n in range(length)], max_new_tokens=count)
    engine.run()
    assert len(seen) == 21
    for ids, row in seen:
        with torch.no_grad():
            torch.testing.assert_close(row, net(torch.tensor([ids]))[0, -1], rtol=1e-9, atol=1e-9)


def test_a_step_is_a_chunk_of_prompts_and_a_token_of_every_row():
    engine = hw.Engine(model("gqa"), budget=ROOMY, batching=hw.Batching(chunk=8))
    short, long = engine.submit([1, 2], max_new_tokens=20), engine.submit(list(range(13)) * 3, max_new_tokens=4)
    told = []
    while engine.step():
        told.append((len(short.ids), len(long.ids)))
    assert [step.tokens for step in engine.report().steps][:6] == [8, 8, 8, 8, 8, 1]
    assert told[:6] == [(2, 0), (3, 0), (4, 0), (5, 0), (6, 0), (7, 2)]  # the short one was never kept waiting
