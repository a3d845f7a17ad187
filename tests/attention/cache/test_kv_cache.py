"""KV caches: documents that arrive in chunks give the outputs of one pass over
each document alone.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import headwise as hw
from attention.cache.cache_streams import (
    EVEN,
    KINDS,
    MODEL,
    ONE_DOCUMENT,
    build_layer,
    check_stream,
    random_tensor,
)
from headwise.attention.cache import ContiguousCache, RecurrentStateCache, RingCache

TYPES = {
    "ring": RingCache,
    "dilated": RingCache,
    "sinks": RingCache,
    "latent ring": RingCache,
    "state": RecurrentStateCache,
}
SLOTS = {"ring": 3, "dilated": 5, "sinks": 5, "latent ring": 4}
PACKED = {
    "two and two": [
        ["aaabb", "aabbb"],
        ["b", "b"],
        ["bbb", "bcc"],
        ["b", "c"],
        ["bc", "cc"],
        ["c", "c"],
    ],
    "three in a chunk": [
        ["aabbbcc", "abbcccc"],
        ["cc", "cd"],
        ["c", "d"],
        ["c", "d"],
        ["cd", "dd"],
    ],
    "padding between": [
        ["aa.bb", "a.b.c"],
        ["b", "."],
        ["b", "c"],
        [".c", "cc"],
        ["c", "c"],
        ["c", "."],
    ],
    "long ones": [
        ["aaaaaaaabb", "aabbbbbbbb"],
        ["b", "b"],
        ["bbbbbbbbcc", "bbcccccccc"],
        ["c", "c"],
        ["c", "c"],
    ],
}


@pytest.mark.parametrize("stream", ONE_DOCUMENT)
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_with_padding(kind: str, stream: str):
    layer, rows = build_layer(kind), ONE_DOCUMENT[stream]
    check_stream(layer, rows, layer.cache(batch=len(rows[0]), capacity=31))


@pytest.mark.parametrize("stream", EVEN)
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_without_a_word_about_positions(kind: str, stream: str):
    """The usual call: the cache knows that every row is the same run, and takes short cuts."""
    layer, rows = build_layer(kind), ONE_DOCUMENT[stream]
    check_stream(layer, rows, layer.cache(batch=len(rows[0]), capacity=31), infer_positions=True)


@pytest.mark.parametrize("stream", PACKED)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "state"])
def test_documents_that_arrive_over_several_appends(kind: str, stream: str):
    layer, rows = build_layer(kind), PACKED[stream]
    check_stream(layer, rows, layer.cache(batch=len(rows[0]), capacity=31))


@pytest.mark.parametrize("kind", SLOTS)
def test_a_ring_wraps_many_times(kind: str):
    layer, stream = (
        build_layer(kind),
        [["aa"] * 2, *[["a"] * 2] * 23, ["aaaa"] * 2, *[["a"] * 2] * 7],
    )
    for unsaid in (False, True):
        cache = layer.cache(batch=2, capacity=1000)
        assert isinstance(cache, RingCache)
        assert cache.slots == SLOTS[kind]
        check_stream(layer, stream, cache, infer_positions=unsaid)
    ragged = layer.cache(batch=2, capacity=1000)
    check_stream(layer, [["aa", "a."], *[["a", "a"], ["a", "."], ["aa", ".a"]] * 9], ragged)


@pytest.mark.parametrize("kind", KINDS)
def test_the_kind_follows_from_the_spec(kind: str):
    assert type(build_layer(kind).cache(batch=2, capacity=31)) is TYPES.get(kind, ContiguousCache)


def test_a_ring_no_shorter_than_the_capacity_is_plain():
    layer = build_layer("sinks")
    assert isinstance(layer.cache(batch=2, capacity=5), ContiguousCache)
    assert isinstance(layer.cache(batch=2, capacity=6), RingCache)


def test_a_prefix_that_comes_at_once():
    layer = hw.Attention(hw.design(model=MODEL, heads=5, pattern="prefix(3)")).double()
    for stream in ([["aaa", "aaa"], ["a", "a"], ["aa", "a."]], [["aaaa", "aaa."], ["a", "a"]]):
        check_stream(layer, stream, layer.cache(batch=2, capacity=9))
    check_stream(
        layer,
        [["aaaa"] * 2, *[["a"] * 2] * 3],
        layer.cache(batch=2, capacity=9),
        infer_positions=True,
    )


def test_padding_takes_no_slot():
    """Six slots hold six tokens a row, however much padding came between."""
    layer = build_layer("plain")
    check_stream(
        layer,
        [["aaa..", "a...."], ["..aa", "aaaa"], ["a", "."], [".", "a"]],
        layer.cache(batch=2, capacity=6),
    )


# --- rows -----------------------------------------------------------------------------------------

MOVES = {
    "duplicate": [[1, 1, 0, 2, 1], [0, 0, 4]],
    "beam": [[0, 0, 1], [2, 0, 0], [1, 1, 1], [0, 2, 1]],
}


@pytest.mark.parametrize("moves", MOVES)
@pytest.mark.parametrize("ragged", [False, True], ids=["even", "ragged"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_go_their_own_way(kind: str, ragged: bool, moves: str):
    """After each move a row says what it would had it come all the way alone."""
    layer = build_layer(kind)
    cache, lengths = layer.cache(batch=3, capacity=31), [4, 2, 3] if ragged else [4, 4, 4]
    x = random_tensor(3, 4, MODEL)
    past = [x[b, :length] for b, length in enumerate(lengths)]
    with torch.no_grad():
        layer(
            x,
            cache=cache,
            sequence=hw.SequenceInfo.from_batch(x, lengths=lengths) if ragged else None,
        )
        for move in MOVES[moves]:
            cache.select_rows(torch.tensor(move))
            past = [past[b] for b in move]
            for count in (1, 2, 1):
                x = random_tensor(len(move), count, MODEL)
                past = [torch.cat([row, new]) for row, new in zip(past, x, strict=True)]
                for y, row in zip(layer(x, cache=cache), past, strict=True):
                    torch.testing.assert_close(y, layer(row[None])[0, -count:], rtol=0, atol=1e-11)
    assert cache.batch == len(MOVES[moves][-1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_goes_its_own_way(kind: str):
    layer, x = build_layer(kind), random_tensor(2, 7, MODEL)
    cache = layer.cache(batch=2, capacity=31)
    with torch.no_grad():
        layer(x[:, :3], cache=cache)
        other = copy.deepcopy(cache)
        layer(random_tensor(2, 2, MODEL), cache=other)
        torch.testing.assert_close(
            layer(x[:, 3:], cache=cache), layer(x)[:, 3:], rtol=0, atol=1e-11
        )


# --- bytes and shapes -----------------------------------------------------------------------------


def cached_tensors(cache: hw.KVCache) -> dict[str, Tensor]:
    """Every tensor of remembered numbers."""
    return dict(cache.state) or cache.entry


def check_bytes(cache: hw.KVCache, capacity: int) -> None:
    """What is said, what is counted and what is really there; no tensor is a window on a larger
    one.
    """
    width = torch.empty(0, dtype=cache.dtype).element_size()
    counted = hw.costs.cache_bytes(
        cache.spec, batch=cache.batch, capacity=capacity, bytes_per_number=width
    )
    stored = sum(tensor.untyped_storage().nbytes() for tensor in cached_tensors(cache).values())
    assert cache.nbytes == counted == stored
    others = [value for value in vars(cache).values() if isinstance(value, Tensor)]
    if not isinstance(cache, RecurrentStateCache):
        others += [cache.tokens.position, cache.tokens.segment]
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in others)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_counted(kind: str):
    dtype = torch.bfloat16
    layer = build_layer(kind).to(dtype)
    cache = layer.cache(batch=3, capacity=31)
    check_bytes(cache, 31)
    with torch.no_grad():
        for count in (11, 1, 1, 3):
            layer(torch.randn(3, count, MODEL, dtype=dtype), cache=cache)
            check_bytes(cache, 31)
    for rows in ([2, 0], [0, 0, 1, 1, 1], [4]):
        cache.select_rows(torch.tensor(rows))
        check_bytes(cache, 31)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "state"])
@pytest.mark.parametrize("ragged", [False, True], ids=["even", "ragged"])
def test_a_step_never_changes_a_shape(kind: str, ragged: bool, monkeypatch: pytest.MonkeyPatch):
    """What the append of a single token hands over is the whole cache, each time the very same
    memory.
    """
    layer, x = build_layer(kind), random_tensor(2, 5, MODEL)
    cache, handed = layer.cache(batch=2, capacity=31), []
    append = cache.append
    # an uncompiled step of a plain cache writes without `append`
    monkeypatch.setattr(cache, "extend", lambda entry, at: hw.KVCache.extend(cache, entry, at))
    monkeypatch.setattr(
        cache, "append", lambda entry, at: handed.append(append(entry, at)) or handed[-1]
    )
    with torch.no_grad():
        layer(
            x,
            cache=cache,
            sequence=hw.SequenceInfo.from_batch(x, lengths=[5, 2]) if ragged else None,
        )
        for _ in range(9):
            layer(random_tensor(2, 1, MODEL), cache=cache)
    steps = [
        {name: (t.shape, t.data_ptr()) for name, t in entry.items()} for entry, _ in handed[1:]
    ]
    assert steps == [{name: (t.shape, t.data_ptr()) for name, t in cache.entry.items()}] * 9
    assert all(t.shape[:2] == (2, cache.slots) for t in cache.entry.values())
    assert {tuple(at.position.shape) for _, at in handed[1:]} == {(2, cache.slots)}


# --- next -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_tokens_stand_after_the_last_of_each_row(kind: str):
    layer = build_layer(kind)
    cache, x = layer.cache(batch=3, capacity=31), random_tensor(3, 5, MODEL)
    assert cache.next_positions(2).position.tolist() == [[0, 1]]
    with torch.no_grad():
        layer(x, cache=cache)
        after = cache.next_positions(2)
        assert (after.position.tolist(), after.start) == ([[5, 6]], 5)
        layer(
            x,
            cache=cache,
            sequence=hw.SequenceInfo(torch.arange(5, 10).repeat(3, 1), ragged([5, 0, 3])),
        )
    assert cache.next_positions(2).position.tolist() == [[10, 11], [5, 6], [8, 9]]
    assert cache.next_positions(2).segment.tolist() == [[0, 0]] * 3
    cache.select_rows(torch.tensor([2, 1]))
    assert cache.next_positions(1).position.tolist() == [[8], [5]]


def ragged(lengths: list[int]) -> Tensor:
    """Segment 0 for so many tokens of five, then padding."""
    return (torch.arange(5) < torch.tensor(lengths)[:, None]).long() - 1


def test_the_next_tokens_stay_in_the_last_segment():
    layer, x = build_layer("sinks"), random_tensor(2, 5, MODEL)
    cache = layer.cache(batch=2, capacity=31)
    layer(
        x,
        cache=cache,
        sequence=hw.SequenceInfo.from_batch(
            x, segments=torch.tensor([[0, 0, 1, 1, 1], [0, 1, 2, 2, -1]])
        ),
    )
    assert cache.next_positions(1).position.tolist() == [[3], [2]]
    assert cache.next_positions(1).segment.tolist() == [[1], [2]]
