"""The static cache: tensors alone change from step to step, so one compiled step serves all lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import headwise as hw
from attention.cache.cache_streams import (
    KINDS,
    MODEL,
    ONE_DOCUMENT,
    build_layer,
    check_stream,
    random_tensor,
)
from headwise.attention.cache import StaticCache

STATIC = [kind for kind in KINDS if kind != "state"]
STEPS = 60
LLAMA = {
    "model_type": "llama",
    "hidden_size": 12,
    "intermediate_size": 14,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 3,
    "vocab_size": 31,
}
MODELS = {
    "llama": LLAMA,
    "mistral": LLAMA | {"model_type": "mistral", "sliding_window": 4},
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 12,
        "n_head": 3,
        "n_layer": 3,
        "n_positions": 96,
        "vocab_size": 31,
    },
}


def static_cache(layer: hw.Attention, batch: int, **options: Any) -> StaticCache:
    cache = layer.cache(batch=batch, capacity=31, kind="static", **options)
    assert isinstance(cache, StaticCache)
    return cache


@pytest.mark.parametrize("stream", ["left padding", "a late row", "holes"])
@pytest.mark.parametrize("kind", STATIC)
def test_chunks_with_padding(kind: str, stream: str):
    layer, rows = build_layer(kind), ONE_DOCUMENT[stream]
    check_stream(layer, rows, static_cache(layer, len(rows[0])))


@pytest.mark.parametrize("stream", ["even", "one by one"])
@pytest.mark.parametrize("kind", STATIC)
def test_chunks_whose_positions_the_cache_knows(kind: str, stream: str):
    layer, rows = build_layer(kind), ONE_DOCUMENT[stream]
    check_stream(layer, rows, static_cache(layer, len(rows[0])), infer_positions=True)


@pytest.mark.parametrize("kind", STATIC)
def test_dense_steps_equal_those_of_the_plain_cache(kind: str):
    """Bit by bit once all slots of a plain cache are full: until then it reads fewer keys."""
    layer = build_layer(kind)
    layer.backend_name = "dense"
    x = random_tensor(2, 12, MODEL)
    plain = layer.cache(batch=2, capacity=12)
    static = layer.cache(batch=2, capacity=12, kind="static")
    with torch.no_grad():
        for t in range(12):
            step = x[:, t : t + 1]
            expected = layer(step, cache=plain)
            found = layer(step, cache=static)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    if kind in ("plain", "extra"):
        assert torch.equal(found, expected)
    assert static.used == plain.used == 12


def test_rows_are_selected_and_counted():
    layer = build_layer("plain")
    cache = static_cache(layer, 3)
    x = random_tensor(3, 6, MODEL)
    with torch.no_grad():
        layer(
            x[:, :4], cache=cache, sequence=hw.SequenceInfo.from_batch(x[:, :4], lengths=[4, 1, 3])
        )
        assert cache.next_positions(2).position.tolist() == [[4, 5], [1, 2], [3, 4]]
        cache.select_rows(torch.tensor([1, 0, 1]))
        y = layer(x[:, 4:], cache=cache)
        for n, (row, length) in enumerate([(1, 1), (0, 4), (1, 1)]):
            whole = torch.cat([x[row, :length], x[n, 4:]])
            torch.testing.assert_close(y[n], layer(whole[None])[0, -2:], rtol=0, atol=1e-11)
    assert cache.used == 6


def test_int8_storage_equals_that_of_the_plain_cache():
    layer = build_layer("plain")
    x = random_tensor(2, 9, MODEL)
    caches = [
        layer.cache(batch=2, capacity=31, kind=kind, storage_format="int8")
        for kind in ("smallest", "static")
    ]
    with torch.no_grad():
        for start, stop in ((0, 4), (4, 5), (5, 8), (8, 9)):
            plain, static = (layer(x[:, start:stop], cache=cache) for cache in caches)
            torch.testing.assert_close(static, plain, rtol=0, atol=1e-11)
    assert caches[0].nbytes == caches[1].nbytes


def test_tokens_beyond_the_last_slot_are_refused():
    layer = build_layer("plain")
    cache = layer.cache(batch=1, capacity=3, kind="static")
    with torch.no_grad():
        layer(random_tensor(1, 3, MODEL), cache=cache)
        with pytest.raises(IndexError):
            layer(random_tensor(1, 1, MODEL), cache=cache)


@pytest.mark.compile
@pytest.mark.parametrize("padded", [False, True], ids=["even", "uneven"])
@pytest.mark.parametrize("name", MODELS)
def test_one_graph_serves_all_lengths(name: str, padded: bool):
    """Sixty decode steps of a model are compiled once, with the logits of one pass."""
    net = hw.build(hw.families.read_model_spec(MODELS[name]), seed=0).eval().double()
    ids = torch.randint(0, 31, (2, 5 + STEPS))
    lengths = [5, 3] if padded else [5, 5]
    prompt = hw.SequenceInfo.from_batch(ids[:, :5], lengths=lengths, pad="left")
    cache = net.cache(batch=2, capacity=5 + STEPS, kind="static")
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def decode(step_ids: torch.Tensor) -> torch.Tensor:
        return net(step_ids, cache=cache)[:, -1]

    step = torch.compile(decode, fullgraph=True, backend=counter)
    with torch.no_grad():
        net(ids[:, :5], sequence=prompt, cache=cache)
        found = torch.stack([step(ids[:, t : t + 1]) for t in range(5, 5 + STEPS)], 1)
        for row, length in enumerate(lengths):
            alone = net(ids[row : row + 1, 5 - length :])[0, length:]
            torch.testing.assert_close(found[row], alone, rtol=0, atol=1e-9)
    assert counter.frame_count == 1
