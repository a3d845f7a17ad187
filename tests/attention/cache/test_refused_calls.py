"""A call that is refused leaves the cache as it was, so that its tokens can be given again."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from attention.cache.cache_streams import (
    KINDS,
    MODEL,
    ONE_DOCUMENT,
    build_layer,
    check_stream,
    random_tensor,
)
from headwise.attention.backends import dense
from headwise.attention.backends.core_interface import never_slower
from headwise.attention.backends.dispatch import BACKENDS
from headwise.attention.cache import PagePool

HOLE = hw.SequenceInfo(torch.tensor([[0, 1, 0, 2, 3]]), torch.tensor([[0, 0, -1, 0, 0]]))


def pooled(layer: hw.Attention, batch: int) -> hw.KVCache:
    pool = PagePool([layer.spec], pages=60, page=3, dtype=torch.float64)
    return pool.caches(pool.batch_of([pool.block_tables.new_sequence() for _ in range(batch)]))[0]


def slots(layer: hw.Attention, batch: int) -> hw.KVCache:
    return layer.cache(batch=batch, capacity=31)


CACHES: dict[str, Callable[[hw.Attention, int], hw.KVCache]] = {"slots": slots, "pages": pooled}
WITH_TOKENS = [kind for kind in KINDS if kind != "state"]


@pytest.mark.parametrize("store", CACHES)
def test_padding_inside_a_row_is_refused_before_it_is_stored(store: str):
    spec = hw.design(model=MODEL, heads=2, pattern="causal()")
    layer = hw.Attention(spec, backend="flash_cpu").double()
    x = random_tensor(1, 7, MODEL)
    cache = CACHES[store](layer, 1)
    with torch.no_grad():
        for _ in range(2):
            with pytest.raises(hw.NoBackend, match="one range"):
                layer(x[:, :5], cache=cache, sequence=HOLE)
            assert cache.used == 0
            assert cache.next_positions(1).position.tolist() == [[0]]
        layer.backend_name = None
        first = layer(x[:, :5], cache=cache, sequence=HOLE)
        rest = layer(x[:, 5:], cache=cache)
        alone = layer(x[:, [0, 1, 3, 4, 5, 6]])
    torch.testing.assert_close(torch.cat([first[:, [0, 1, 3, 4]], rest], 1), alone)


def refuse_masks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Add the backend "picky", which refuses every mask while the returned list has reasons."""
    reasons: list[str] = []
    picky = types.SimpleNamespace(
        unsupported_reasons=lambda call: [],
        slower_reasons=never_slower,
        mask_conflicts=lambda call, attention_mask: list(reasons),
        attend=dense.attend_all_pairs,
        executed_flops=dense.executed_flops,
    )
    monkeypatch.setitem(BACKENDS, "picky", picky)
    return reasons


@pytest.mark.parametrize("stream", ["holes", "even"])
@pytest.mark.parametrize("kind", WITH_TOKENS)
@pytest.mark.parametrize("store", CACHES)
def test_each_call_is_refused_once(
    store: str, kind: str, stream: str, monkeypatch: pytest.MonkeyPatch
):
    """Every cache, before the first token, in the middle of a text, and at a single token."""
    reasons = refuse_masks(monkeypatch)
    layer = build_layer(kind)
    layer.backend_name = "picky"
    rows = ONE_DOCUMENT[stream]
    num_refused = 0

    def call(x: Tensor, cache: hw.KVCache | None = None, **options: Any) -> Tensor:
        nonlocal num_refused
        if cache is not None and x.numel():
            reasons.append("is in a bad mood")
            with pytest.raises(hw.NoBackend, match="in a bad mood"):
                layer(x, cache=cache, **options)
            reasons.clear()
            num_refused += 1
        return layer(x, cache=cache, **options)

    check_stream(call, rows, CACHES[store](layer, len(rows[0])))  # pyright: ignore[reportArgumentType] - called as a layer
    assert num_refused


@pytest.mark.parametrize("stream", ["holes", "nothing first", "even"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("store", CACHES)
def test_a_preview_has_the_positions_of_the_call(
    store: str, kind: str, stream: str, monkeypatch: pytest.MonkeyPatch
):
    if (store, kind) == ("pages", "state"):
        pytest.skip("a recurrent state has no pages")
    layer = build_layer(kind)
    rows = ONE_DOCUMENT[stream]
    cache = CACHES[store](layer, len(rows[0]))
    extend = type(cache).extend
    num_compared = 0

    def compare(own: hw.KVCache, entry: Any, new_tokens: hw.SequenceInfo) -> Any:
        nonlocal num_compared
        if own is not cache:  # the copy that the preview uses
            return extend(own, entry, new_tokens)
        expected = cache.preview(new_tokens)
        entry, sequence = extend(cache, entry, new_tokens)
        if sequence.num_visible is None:
            real = sequence.is_real
            assert torch.equal(expected.is_real, real)
            assert torch.equal(expected.position[real], sequence.position[real])
        else:
            assert torch.equal(expected.position, sequence.position)
        assert (expected.start, expected.count) == (sequence.start, sequence.count)
        assert expected.num_visible == sequence.num_visible
        num_compared += 1
        return entry, sequence

    monkeypatch.setattr(type(cache), "extend", compare)
    check_stream(layer, rows, cache, infer_positions=stream == "even")
    assert num_compared


def test_a_prefix_in_parts_is_refused_before_any_group_of_heads_stores_it():
    pattern = "perhead((causal(), prefix(3) & blocks(4)), (0, 0, 1, 1))"
    layer = hw.Attention(hw.design(model=8, heads=4, kv=2, pattern=pattern)).double()
    cache = layer.cache(batch=1, capacity=9)
    x = random_tensor(1, 5, 8)
    with torch.no_grad():
        with pytest.raises(ValueError, match="first 3 tokens"):
            layer(x[:, :2], cache=cache)
        torch.testing.assert_close(layer(x, cache=cache), layer(x))
