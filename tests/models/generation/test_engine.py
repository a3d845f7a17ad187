"""The serving engine: a request gets the result it gets alone, and a failing
request fails alone.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys

import pytest
import torch
from hypothesis import given, settings, strategies as st

import headwise as hw
from headwise.models import model_spec as bp
from headwise.models.generation import engine as engine_module
from headwise.models.generation.decoding_state import choose_tokens
from headwise.models.generation.engine import split_by_size, split_prefill

TOKENS, MODEL = 13, 16
ROOMY = 40_000_000
# of the profile that was asked for
FEW = settings(max_examples=settings().max_examples // 8, deadline=None)


def causal(preset: str) -> hw.AttentionSpec:
    """A preset, tiny and decodable."""
    result = {}
    if hw.design(preset=preset, model=MODEL, heads=4).pattern.tokens_before_decode != 0:
        result = {"pattern": "causal()"}
    small = {"dim": 4, "project": hw.parts.MLAProjection(rank=6, rope=2)} if preset == "mla" else {}
    return hw.design(preset=preset, model=MODEL, heads=4, **small, **result)


def stack(*specs: hw.AttentionSpec, **embedding: object) -> bp.StackSpec:
    blocks = [
        bp.BlockSpec(spec, feed=bp.FeedForwardSpec(18), norm=bp.NormSpec("rms")) for spec in specs
    ]
    return bp.StackSpec.from_blocks(
        "decoder",
        MODEL,
        blocks,
        embedding=bp.EmbeddingSpec(TOKENS, **embedding),
        norm=bp.NormSpec("rms"),
    )


def random_model(net: hw.Transformer) -> hw.Transformer:
    """Every number matters: no token is always the likeliest, and gaps are far above rounding."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(
                torch.randn(parameter.shape, generator=generator)
                * (1.0 if parameter.dim() > 1 else 0.3)
            )
    return net.eval()


def language(*specs: hw.AttentionSpec, **embedding: object) -> hw.Transformer:
    layers = stack(*specs, **embedding)
    return random_model(
        hw.build(
            bp.ModelSpec(
                "tiny", "decoder", (layers,), heads=(bp.OutputHeadSpec("tokens", TOKENS),)
            ),
            seed=1,
        )
    )


def plain(**options: object) -> hw.AttentionSpec:
    return hw.design(
        **{
            "model": MODEL,
            "heads": 3,
            "dim": 4,
            "pattern": "causal()",
            "modifiers": (hw.parts.Rotary(),),
        }
        | options
    )


STREAMING = "perhead((window(4) | first(2), causal()), (0, 0, 1, 1))"
MODELS = {
    **{
        name: functools.partial(lambda name: language(causal(name), causal(name)), name)
        for name in ("gqa", "mla", "dcmha", "diff", "moh", "entmax", "selective", "cope")
    },
    "window": lambda: language(plain(pattern="window(5)"), plain(pattern="window(5)")),
    "streaming heads": lambda: language(
        *[plain(heads=4, kv=2, pattern=STREAMING)] * 2, plain(pattern="window(5)")
    ),
    "sinks": lambda: language(
        plain(pattern="window(4) | first(2)", kv=1), plain(pattern="window(4) | first(2)", kv=1)
    ),
    "mixed": lambda: language(plain(pattern="window(3)"), plain(pattern="window(3)"), plain(kv=1)),
    "prefix": lambda: language(plain(pattern="prefix(3)"), plain(pattern="prefix(3)")),
    "learned": lambda: language(plain(modifiers=()), positions=bp.PositionSpec("learned", 64)),
    "sinusoidal": lambda: language(plain(modifiers=()), positions=bp.PositionSpec("sinusoidal")),
}


@functools.cache
def model(name: str) -> hw.Transformer:
    return MODELS[name]()


def alone(net: hw.Transformer, prompt: list[int], count: int) -> list[int]:
    return hw.generation.greedy_decode(net, torch.tensor([prompt]), max_new_tokens=count)[0]


# --- alone and together ---------------------------------------------------------------------------

PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=14)  # of three tokens: many begin alike
REQUESTS = st.tuples(PROMPTS, st.integers(1, 8))
EVENTS = st.lists(st.sampled_from(["join", "join", "step", "step", "leave"]), max_size=16)
CONFIGS = st.builds(
    hw.generation.BatchingConfig,
    rows=st.integers(1, 6),
    page=st.integers(1, 5),
    chunk=st.integers(1, 9),
)


@pytest.mark.parametrize("name", MODELS)
@FEW
@given(
    requests=st.lists(REQUESTS, min_size=1, max_size=5),
    events=EVENTS,
    way=CONFIGS,
    tight=st.booleans(),
    data=st.data(),
)
def test_a_request_gets_the_tokens_it_gets_alone(
    name: str, requests, events, way: hw.generation.BatchingConfig, tight: bool, data
):
    net = model(name)
    if name == "prefix":
        requests = [
            ([*prompt, 1, 2, 0][: max(3, len(prompt))], count) for prompt, count in requests
        ]
    engine = hw.Engine(net, budget=smallest(net, way, requests) if tight else ROOMY, batching=way)
    streams, coming = [], list(requests)
    for event in events:
        if event == "join" and coming:
            prompt, count = coming.pop()
            streams.append((engine.submit(prompt, max_new_tokens=count), prompt, count))
        if event == "leave" and streams:
            streams[data.draw(st.integers(0, len(streams) - 1))][0].cancel()
        if event == "step":
            engine.step()
        assert engine.memory.used <= engine.memory.nbytes <= engine.memory.budget
    streams += [
        (engine.submit(prompt, max_new_tokens=count), prompt, count) for prompt, count in coming
    ]
    for stream, prompt, count in reversed(streams):
        expected, result = alone(net, prompt, count), stream.result()
        assert result == (expected[: len(result)] if stream.ended == "cancelled" else expected)
        assert stream.ended in ("cancelled", "length")
    engine.finish_requests()  # frees the memory of requests that were cancelled last
    assert engine.memory.used == 0
    assert engine.memory.pool.block_tables.pages.num_allocated == 0


def smallest(
    net: hw.Transformer, way: hw.generation.BatchingConfig, requests: list[tuple[list[int], int]]
) -> int:
    """The least budget in which each of these fits when it is alone, found from what is refused."""
    budget = 1
    while True:
        try:
            engine = hw.Engine(net, budget=budget, batching=way)
            for prompt, count in requests:
                engine.submit(prompt, max_new_tokens=count)
            return budget
        except ValueError as refused:
            words = (word.strip(".;,").replace(",", "") for word in str(refused).split())
            enough = max(int(word) for word in words if word.isdecimal())
            budget = enough if enough > budget else pytest.fail(str(refused))


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_one_pass(name: str, monkeypatch: pytest.MonkeyPatch):
    """In float64, where rounding cannot hide what is wrong."""
    net = MODELS[name]().double()
    recorded: list[tuple[list[int], torch.Tensor]] = []

    def watched(logits, past, **how):
        recorded.extend((list(ids), row) for ids, row in zip(past, logits, strict=True))
        return choose_tokens(logits, past, **how)

    monkeypatch.setattr(engine_module, "choose_tokens", watched)
    engine = hw.Engine(
        net, budget=ROOMY, batching=hw.generation.BatchingConfig(rows=3, page=4, chunk=7)
    )
    values = [
        ([n * n % 5 for n in range(length)], count)
        for length, count in ((9, 5), (3, 7), (17, 3), (5, 4), (9, 2))
    ]
    streams = [engine.submit(prompt, max_new_tokens=count) for prompt, count in values]
    engine.finish_requests()
    assert len(recorded) == 21
    for (prompt, _), stream in zip(values, streams, strict=True):
        whole = prompt + stream.ids
        with torch.no_grad():
            logits = net(torch.tensor([whole]))[0]
        rows = [(len(ids) - 1, row) for ids, row in recorded if ids == whole[: len(ids)]]
        assert len(rows) >= len(stream.ids)
        for at, row in rows:
            torch.testing.assert_close(row, logits[at], rtol=1e-9, atol=1e-9)


def test_a_step_is_a_chunk_of_prompts_and_a_token_of_every_row():
    engine = hw.Engine(model("gqa"), budget=ROOMY, batching=hw.generation.BatchingConfig(chunk=8))
    short = engine.submit([1, 2], max_new_tokens=20)
    long = engine.submit(list(range(13)) * 3, max_new_tokens=4)
    recorded = []
    while engine.step():
        recorded.append((len(short.ids), len(long.ids)))
    # a last token alone is a row
    assert [step.tokens for step in engine.report().steps][:6] == [8, 8, 8, 8, 8, 0]
    # the short one was never kept waiting
    assert recorded[:6] == [(2, 0), (3, 0), (4, 0), (5, 0), (6, 1), (7, 2)]


# --- what is remembered ---------------------------------------------------------------------------


def test_the_first_rows_of_a_burst_wait_until_half_of_it_is_read():
    """A step of few rows costs almost as much as one of many; rows past their first token are never
    delayed.
    """
    net = MODELS["mixed"]()
    engine = hw.Engine(net, budget=ROOMY, batching=hw.generation.BatchingConfig(chunk=4))
    prompts = [[n + 1, 2, 3, n] for n in range(6)]
    streams = [engine.submit(prompt, max_new_tokens=9) for prompt in prompts]
    for _ in range(6):
        engine.step()
    assert [(step.num_prompts, step.rows) for step in engine.report().steps] == [
        (1, 0),
        (1, 0),
        (1, 3),
        (1, 4),
        (1, 5),
        (1, 6),
    ]
    late = [engine.submit([n, 5, 5, n], max_new_tokens=3) for n in range(1, 9)]
    counts = [len(stream.ids) for stream in streams]
    engine.step()
    assert [len(stream.ids) for stream in streams] == [count + 1 for count in counts]
    for prompt, stream in zip(prompts, streams, strict=True):
        assert stream.result() == hw.generate(net, prompt, max_new_tokens=9)
    assert late[-1].result() == hw.generate(net, [8, 5, 5, 8], max_new_tokens=3)


def test_the_first_rows_of_a_burst_do_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_module, "MAX_POSTPONED_STEPS", 3)
    engine = hw.Engine(
        MODELS["mixed"](), budget=ROOMY, batching=hw.generation.BatchingConfig(chunk=4)
    )
    streams = [engine.submit([1, 2, 3, 4], max_new_tokens=9)]
    streams += [engine.submit([n, 5] * 10, max_new_tokens=3) for n in (6, 7, 8)]
    for _ in range(5):
        engine.step()
    assert [step.rows for step in engine.report().steps] == [0, 0, 0, 1, 1]
    assert len(streams[0].ids) == 3


def test_beginnings_are_read_once():
    """A common beginning of 40 tokens, asked by all at once: one reads it, the others wait a step
    and share.
    """
    net, begin = model("mixed"), [n % 7 for n in range(40)]
    engine = hw.Engine(net, budget=ROOMY, batching=hw.generation.BatchingConfig(page=4, chunk=64))
    prompts = [[*begin, *[8 + n % 5] * (1 + n)] for n in range(6)]
    streams = [engine.submit(prompt, max_new_tokens=5) for prompt in prompts]
    assert [stream.result() for stream in streams] == [alone(net, prompt, 5) for prompt in prompts]
    # two layers keep 24 numbers of each of 4 tokens in a page, one keeps 8 of each of 24
    shared = 24
    assert engine.report().shared == 5 * shared
    assert engine.memory.pool.block_tables.pages.num_allocated == 0
    # nobody holds those pages, but they are still known
    again = engine.submit([*begin, 9, 9, 9], max_new_tokens=2)
    assert again.result() == alone(net, [*begin, 9, 9, 9], 2)
    assert engine.report().shared == 6 * shared


def test_shared_prefixes_are_in_memory_once():
    spec = plain()
    net, begin = language(spec), list(range(12)) * 4
    engine = hw.Engine(net, budget=ROOMY, batching=hw.generation.BatchingConfig(page=4, chunk=100))
    for n in range(5):
        engine.submit([*begin, n], max_new_tokens=4)
    engine.step()
    engine.step()
    # 12 pages of the prefix, and one page of each row: the first has 50 tokens, the others 49.
    assert engine.memory.used == hw.costs.cache_bytes(spec, batch=1, capacity=4 * (12 + 5))


def generated(net: hw.Transformer, prompt: object, **options: object):
    return hw.generate(net, prompt, **options)


def test_the_budget_holds_and_requests_wait_for_free_pages():
    spec = plain()
    net, way = language(spec), hw.generation.BatchingConfig(page=4, chunk=16)
    each = hw.costs.cache_bytes(spec, batch=1, capacity=20)
    # as much again for the buffer, of one layer
    engine = hw.Engine(net, budget=3 * 2 * each, batching=way)
    streams = [engine.submit([n] * 13, max_new_tokens=8) for n in range(9)]
    most = 0
    while engine.step():
        assert engine.memory.nbytes <= engine.memory.budget
        most = max(most, sum(1 for stream in streams if stream.ids and not stream.ended))
    assert most == 2  # three rows of 5 pages would be 15, and there are 14 beside the empty one
    assert [stream.result() for stream in streams] == [alone(net, [n] * 13, 8) for n in range(9)]
    assert engine.report().peak_bytes == 2 * each


def test_the_budget_holds_when_a_layer_gathers_several_groups_of_heads():
    """All groups of a layer's heads lie in the gather buffer at once."""
    net = language(plain(heads=4, pattern="perhead((window(60), causal()), (0, 0, 1, 1))"))
    engine = hw.Engine(
        net, budget=131_072, batching=hw.generation.BatchingConfig(rows=16, page=4, chunk=64)
    )
    prefix = [n % TOKENS for n in range(48)]
    engine.submit([*prefix, 0], max_new_tokens=2).result()
    prompts = [[*prefix, n] for n in range(12)]
    streams = [engine.submit(prompt, max_new_tokens=8) for prompt in prompts]
    while engine.step():
        assert engine.memory.nbytes <= engine.memory.budget
    assert [stream.result() for stream in streams] == [alone(net, prompt, 8) for prompt in prompts]


def resident_bytes(tensor: torch.Tensor) -> int:
    """The bytes of a tensor that have memory of the machine."""
    begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = tensor.data_ptr() + tensor.nbytes - begin
    flags = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(size), flags) == 0
    return sum(flag & 1 for flag in flags) * mmap.PAGESIZE


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs mincore")
def test_pages_take_memory_when_they_are_needed():
    net = language(plain(dim=64), plain(dim=64))
    engine = hw.Engine(net, budget=400_000_000)
    slack = 2 * 2**21  # the system may hand out pages of 2 MiB
    storage = engine.memory.pool.storage
    assert storage.nbytes > 100_000_000
    written = 750 * 2 * 2 * 3 * 64 * 4  # tokens, layers, k and v, heads of 64, float32
    taken = [resident_bytes(storage)]
    assert taken[0] <= slack
    for number in range(3):  # pages of earlier requests keep their tokens
        assert len(engine.submit([number, *range(1, 10)] * 75, max_new_tokens=2).result()) == 2
        taken.append(resident_bytes(storage))
        # the system sometimes does not count a few of the written pages
        assert 0.95 * (number + 1) * written <= taken[-1] <= (number + 1) * written + slack
    assert taken[-1] < storage.nbytes / 10


def test_a_budget_beyond_all_memory_is_refused():
    with pytest.raises(
        ValueError, match=r"the system refuses to reserve .* bytes of memory; give a smaller budget"
    ):
        hw.Engine(model("gqa"), budget=10**19)


# --- who is next ----------------------------------------------------------------------------------


def order_of(
    budget: int, batching: hw.generation.BatchingConfig, requests: list[tuple[int, int]]
) -> list[int]:
    """The order in which requests of these sizes and counts have their first token."""
    engine = hw.Engine(language(plain()), budget=budget, batching=batching)
    streams = [engine.submit([1] * size, max_new_tokens=count) for size, count in requests]
    order = list[int]()
    while engine.step():
        order += [n for n, stream in enumerate(streams) if stream.ids and n not in order]
    return order


def test_requests_run_in_order_of_arrival():
    requests = [(2, count) for count in (5, 2, 3, 4)]
    assert order_of(ROOMY, hw.generation.BatchingConfig(rows=1), requests) == [0, 1, 2, 3]


def test_a_long_one_is_not_passed_by_short_ones_while_it_waits_for_room():
    requests = [(size, 4) for size in (8, 20, 3, 3)]
    assert order_of(2 * 12 * 4 * 96, hw.generation.BatchingConfig(page=1), requests) == [0, 1, 2, 3]


def test_rows_of_like_length_share_a_call():
    assert split_by_size([9, 9, 9, 1], call_cost=100) == [4]
    assert split_by_size([90, 9, 9, 9, 9, 9, 9], call_cost=100) == [1, 6]
    assert split_by_size([], call_cost=1) == []


@given(st.lists(st.integers(1, 90), min_size=1, max_size=12), st.integers(0, 200))
def test_dividing_never_costs_more_than_one_call(sizes: list[int], worth: int):
    sizes.sort(reverse=True)
    parts, start, cost = split_by_size(sizes, worth), 0, 0
    for count in parts:
        cost += sizes[start] * count + worth
        start += count
    assert start == len(sizes)
    assert cost <= sizes[0] * len(sizes) + worth


@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.integers(1, 40), st.integers(0, 9))
def test_a_chunk_takes_prompts_in_order(pending: list[int], chunk: int, opening: int):
    chunks = list(split_prefill(pending, chunk, opening))
    assert chunks
    assert sum(chunks) <= max(chunk, opening)
    assert all(min(count, opening) <= n <= count for n, count in zip(chunks, pending, strict=False))
    assert all(n == count for n, count in zip(chunks[:-1], pending, strict=False))


# --- one request's end is its own -----------------------------------------------------------------


def test_cancelled_requests_free_their_pages():
    net = model("gqa")
    engine = hw.Engine(net, budget=ROOMY)
    removed = engine.submit([1, 2, 3], max_new_tokens=20)
    other = engine.submit([4], max_new_tokens=20)
    waiting = engine.submit([5], max_new_tokens=3)
    waiting.cancel()
    assert waiting.ended == "cancelled"
    assert [next(removed), next(removed)] == alone(net, [1, 2, 3], 20)[:2]
    used = engine.memory.used
    removed.cancel()
    engine.step()
    assert engine.memory.used < used
    assert removed.ended == "cancelled"
    assert removed.result() == alone(net, [1, 2, 3], 20)[: len(removed.ids)]
    removed.cancel()
    assert other.result() == alone(net, [4], 20)
    assert waiting.result() == []


def test_a_reader_that_stops_blocks_no_other():
    net = model("gqa")
    engine = hw.Engine(net, budget=ROOMY, batching=hw.generation.BatchingConfig(rows=2))
    left, other, third = (engine.submit([n], max_new_tokens=6) for n in range(3))
    next(left)
    assert other.result() == alone(net, [1], 6)
    # it had the place of who stopped reading, and who was done all the same
    assert third.result() == alone(net, [2], 6)
    assert left.ended == "length"
    assert list(left) == alone(net, [0], 6)[1:]


def broken_at(token: int) -> hw.Transformer:
    """A model that has NaN to say of one token."""
    net = MODELS["gqa"]()
    with torch.no_grad():
        net.decoder.embedding.tokens[token] = torch.nan
    return net


def test_a_failing_request_fails_alone():
    net = broken_at(11)
    engine = hw.Engine(net, budget=ROOMY, batching=hw.generation.BatchingConfig(page=2))
    fine, bad, later = (
        engine.submit(prompt, max_new_tokens=6) for prompt in ([1, 2, 3], [4, 11, 5], [6, 7])
    )
    with pytest.raises(ValueError, match="the model produced NaN logits"):
        bad.result()
    assert bad.ended == "failed"
    with pytest.raises(ValueError, match="the model produced NaN logits"):
        list(bad)
    sound = model("gqa")
    assert fine.result() == alone(sound, [1, 2, 3], 6)
    assert later.result() == alone(sound, [6, 7], 6)
    # in the pages of who failed
    assert engine.submit([4, 5], max_new_tokens=3).result() == alone(sound, [4, 5], 3)
    assert engine.memory.used == 0


def test_the_request_that_breaks_a_call_is_found_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
):
    """What goes wrong inside the model for all rows at once is tried again row by row."""
    for name in ("gqa", "sinks"):
        net = MODELS[name]()
        engine = hw.Engine(net, budget=ROOMY, batching=hw.generation.BatchingConfig(page=2))
        hidden = net.hidden

        def fussy(x, hidden=hidden, **options):
            h = hidden(x, **options)
            if (x.ids == 11).any():
                raise RuntimeError("eleven is too much")
            return h

        monkeypatch.setattr(net, "hidden", fussy)
        streams = [
            engine.submit(prompt, max_new_tokens=4) for prompt in ([1, 2, 3, 4], [4, 11], [6, 7, 8])
        ]
        with pytest.raises(RuntimeError, match="eleven is too much"):
            streams[1].result()
        monkeypatch.setattr(net, "hidden", hidden)
        for stream, prompt in ((streams[0], [1, 2, 3, 4]), (streams[2], [6, 7, 8])):
            assert stream.result() == alone(net, prompt, 4)


def test_an_interrupted_step_has_not_happened(monkeypatch: pytest.MonkeyPatch):
    for name in ("gqa", "sinks"):
        net = MODELS[name]()
        engine = hw.Engine(
            net, budget=ROOMY, batching=hw.generation.BatchingConfig(page=2, chunk=3)
        )
        stream = engine.submit([1, 2, 3, 4, 5], max_new_tokens=6)
        hidden, calls = net.hidden, []

        def interrupted(x, hidden=hidden, calls=calls, **options):
            h = hidden(x, **options)
            calls.append(x)
            if len(calls) % 2:
                raise KeyboardInterrupt
            return h

        monkeypatch.setattr(net, "hidden", interrupted)
        while not stream.ended:
            try:
                engine.step()
            except KeyboardInterrupt:
                continue
        monkeypatch.setattr(net, "hidden", hidden)
        assert stream.result() == alone(net, [1, 2, 3, 4, 5], 6)


SMALL = 30_000


@pytest.mark.parametrize(
    ("name", "prompt", "options", "fact"),
    [
        ("gqa", [], {}, "the prompt is empty"),
        ("gqa", [1, 13], {}, "the prompt holds the id 13"),
        ("gqa", [[1], [2]], {}, "the prompt is a list of 2 prompts; submit each separately"),
        ("gqa", [1], {"max_new_tokens": 0}, "max_new_tokens=0 is not a token count"),
        ("gqa", [1], {"temperature": -1.0}, "temperature must be a finite number >= 0, got -1.0"),
        ("gqa", [1], {"config": hw.DecodingConfig(beams=2)}, "hw.generate"),
        ("gqa", "text", {}, "has no tokenizer"),
        ("learned", [1] * 65, {}, "a prompt of 65 tokens is 1 longer than the 64 positions"),
        (
            "learned",
            [1] * 60,
            {"max_new_tokens": 6},
            "60 tokens and 6 new are 1 more than the 64 positions",
        ),
        (
            "prefix",
            [1, 2],
            {},
            "the prompt has 2 tokens, but this attention pattern needs at least 3",
        ),
        (
            "gqa",
            [1] * 900,
            {},
            r"a request of 963 tokens needs 61 pages of 1,024 bytes and the budget of 30,000 bytes",
        ),
    ],
)
def test_impossible_requests_are_refused_at_once(name: str, prompt, options: dict, fact: str):
    net = model(name)
    engine = hw.Engine(net, budget=SMALL if len(prompt) > 800 else ROOMY)
    other = engine.submit([1, 2, 3], max_new_tokens=3)
    with pytest.raises(ValueError, match=fact):
        engine.submit(prompt, **options)
    assert other.result() == alone(net, [1, 2, 3], 3)


def test_the_recommended_budget_is_enough():
    net, way = model("mixed"), hw.generation.BatchingConfig(page=4)
    request = [([1] * 37, 5)]
    budget = smallest(net, way, request)
    assert hw.Engine(net, budget=budget, batching=way).submit([1] * 37, max_new_tokens=5).result()
    with pytest.raises(ValueError, match="a request of 41 tokens needs"):
        hw.Engine(net, budget=budget - 1, batching=way).submit([1] * 37, max_new_tokens=5)


# --- how tokens are chosen ------------------------------------------------------------------------


def test_a_request_samples_the_tokens_it_samples_alone():
    net = model("gqa")
    engine = hw.Engine(net, budget=ROOMY)
    modes = [
        {"temperature": 0.7, "seed": 3},
        {"temperature": 1.3, "seed": 4, "config": hw.DecodingConfig(top_k=5, repetition=1.5)},
        {"config": hw.DecodingConfig(repetition=4.0)},
        {"temperature": 0.7, "seed": 5},
        {"config": hw.DecodingConfig(end=(alone(net, [4, 5], 9)[4],))},
    ]
    streams = [engine.submit([4, 5], max_new_tokens=9, **way) for way in modes]
    expected = [generated(net, [4, 5], max_new_tokens=9, **way) for way in modes]
    assert [stream.result() for stream in streams] == expected
    assert [stream.ended for stream in streams] == ["length"] * 4 + ["stop"]
    assert len({tuple(options) for options in expected}) == 5


def test_text_requests_get_text_up_to_their_stops():
    net = language(plain())
    net.usage = hw.ProcessorSpec(tokenizer=letters(), prefix_ids=(1,), eos=(0,))
    engine = hw.Engine(net, budget=ROOMY)
    whole = generated(net, "cab", max_new_tokens=12)
    assert len(whole) > 4
    stop = hw.DecodingConfig(stop=(whole[3:5],))
    streams = [
        engine.submit("cab", max_new_tokens=12),
        engine.submit("cab", max_new_tokens=12, config=stop),
    ]
    assert [stream.result() for stream in streams] == [
        whole,
        generated(net, "cab", max_new_tokens=12, config=stop),
    ]
    assert streams[0].text == whole
    assert streams[1].ended == "stop"
    assert list(streams[1]) == streams[1].ids


def letters() -> str:
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import WordLevel

    tokenizer = Tokenizer(
        WordLevel({letter: n for n, letter in enumerate("<>abcdefghijk")}, unk_token="<")
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.Split("", "isolated"),
        decoders.Fuse(),
    )
    return tokenizer.to_str()
