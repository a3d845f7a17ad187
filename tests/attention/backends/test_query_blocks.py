"""Query blocks of a pattern in fused calls: each pair once, exact results and gradients, linear
work.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import headwise as hw
from headwise import costs
from headwise.attention.backends import BACKENDS, CallSignature, block_sparse
from headwise.attention.backends.query_blocks import (
    TokenAxis,
    choose_block_size,
    count_batch_pairs,
    find_dilation,
    plan_block_batches,
)
from headwise.attention.masking.patterns import parse_pattern
from support import layer_cases as cases
from support.layer_checks import saved_bytes, torch_flops

PATTERNS = [
    "window(100)",
    "window(9, after=4) | global((0, 77))",
    "first(4) | window(37)",
    "first(2)",
    "dilated(5, rate=3)",
    "dilated(9, rate=200, after=4)",
    "dilated(9, rate=40) | first(2)",
    "dilated(7, rate=6) | dilated(5, rate=4)",
    "window(40) & dilated(9, rate=2)",
    "bigbird(300, block=16, random=2)",
    "blocks(50)",
    "prefix(30)",
    "edges(((3, 200), (250, 1), (250, 299)))",
]


def covered_pairs(pattern, queries: range, *runs: range) -> tuple[Tensor, Tensor]:
    """Which pairs the pieces say are read, and how often each is formed, by slots."""
    slots, axes = 0, list[TokenAxis]()
    for places in runs:
        axes.append(TokenAxis(places, slots))
        slots += len(places)
    allowed, found = torch.zeros(2, len(queries), slots, dtype=torch.int64)
    for piece in plan_block_batches(pattern, TokenAxis(queries), axes):
        mask = torch.ones(len(piece.queries[0]), sum(map(len, piece.keys[0])), dtype=torch.bool)
        if piece.first_block_positions is not None:
            i, j = (
                torch.tensor([n for some in each for n in some])
                for each in ([piece.first_block_positions[0]], piece.first_block_positions[1])
            )
            mask = pattern.allows(i[:, None], j)
        for rows, keys in zip(piece.queries, piece.keys, strict=True):
            where = (
                torch.tensor(list(rows))[:, None],
                torch.tensor([n for some in keys for n in some]),
            )
            allowed[where] += mask
            found[where] += 1
    return allowed, found


@pytest.mark.parametrize("pattern", PATTERNS)
@settings(max_examples=10, deadline=None)
@given(
    start=st.integers(0, 150),
    count=st.integers(1, 200),
    cut=st.integers(0, 300),
    gap=st.integers(0, 40),
)
def test_pieces_read_every_allowed_pair_once_and_no_other(pattern, start, count, cut, gap):
    pattern = parse_pattern(pattern)
    result, runs = range(start, start + count), (range(cut), range(cut + gap, 300 + gap))
    allowed, found = covered_pairs(pattern, result, *runs)
    i, j = torch.tensor(list(result))[:, None], torch.tensor([n for places in runs for n in places])
    assert (allowed == (pattern.allows(i, j) & torch.ones_like(allowed, dtype=torch.bool))).all()
    assert found.max() <= 1
    assert int(found.sum()) == sum(
        piece.num_pairs for piece in plan_block_batches(pattern, TokenAxis(result), _axes(runs))
    )


def _axes(runs) -> list[TokenAxis]:
    return [TokenAxis(places, sum(map(len, runs[:n]))) for n, places in enumerate(runs)]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_executed_pairs_are_the_sum_over_the_pieces(pattern):
    pattern = parse_pattern(pattern)
    for queries, keys in [
        (range(1500), range(1500)),
        (range(700, 1900), range(1900)),
        (range(300), range(77)),
    ]:
        every = plan_block_batches(pattern, TokenAxis(queries), [TokenAxis(keys)])
        assert count_batch_pairs(pattern, queries, keys) == sum(piece.num_pairs for piece in every)


def test_gaps_are_left_out():
    assert [find_dilation(parse_pattern(text)) for text in PATTERNS] == [
        1,
        1,
        1,
        1,
        3,
        200,
        1,
        2,
        2,
        1,
        1,
        1,
        1,
    ]
    far, dense = parse_pattern("dilated(64, rate=32)"), parse_pattern("window(64)")
    assert count_batch_pairs(far, range(8192), range(8192)) <= 1.3 * count_batch_pairs(
        dense, range(8192), range(8192)
    )
    assert [
        choose_block_size(parse_pattern(text))
        for text in ("window(32)", "window(256)", "window(2048)")
    ] == [
        32,
        64,
        128,
    ]


def truth(q, k, v, allowed, sinks, scale) -> tuple[Tensor, Tensor]:
    """o_BTHV and the log-sum-exp l_BTH in float64, pair by pair."""
    each = q.shape[2] // k.shape[2]
    k, v = (x.double().repeat_interleave(each, 2) for x in (k, v))
    s = torch.einsum("bthd,bshd->bhts", q.double(), k) * scale
    s = s.masked_fill(~allowed, -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.double()[None, :, None, None].expand(*s.shape[:3], 1)], -1)
    w = (s - s.amax(-1, keepdim=True).clamp(min=-1e300)).exp()
    w = w / w.sum(-1, keepdim=True).clamp(min=1e-300)
    return torch.einsum("bhts,bshd->bthd", w[..., : k.shape[1]], v), s.logsumexp(-1).transpose(1, 2)


@st.composite
def filled(draw) -> tuple[int, list[list[int]], str]:
    """Rows of segments, some of them padding, and how they are laid."""
    batch, count = draw(st.integers(1, 5)), draw(st.integers(130, 300))
    cuts = [sorted(draw(st.lists(st.integers(0, count), max_size=4))) for _ in range(batch)]
    return count, cuts, draw(st.sampled_from(["texts", "padding", "anywhere", "apart"]))


def laid(count: int, cuts: list[list[int]], way: str) -> hw.SequenceInfo:
    places = torch.arange(count)
    segment = torch.stack([sum((places >= cut).long() for cut in row) + 0 * places for row in cuts])
    if way == "padding":
        segment = segment.where(segment % 2 == 0, -1)
    tokens = hw.SequenceInfo.from_batch(segment[..., None], segments=segment)
    if way == "anywhere":
        order = torch.stack([torch.randperm(count) for _ in cuts])
        return hw.SequenceInfo(tokens.position.gather(1, order), segment.gather(1, order))
    if way == "apart":  # the same text goes on further behind, as in a ring
        whole = torch.where(places < count // 3, places, places + 50).expand(len(cuts), -1)
        return hw.SequenceInfo(whole.roll(40, 1), torch.zeros_like(whole))
    return tokens


@pytest.mark.parametrize("pattern", PATTERNS)
@settings(max_examples=4, deadline=None)
@given(filled(), st.sampled_from([1, 3]), st.booleans())
def test_ragged_rows_have_the_outputs_and_gradients_of_the_definition(pattern, rows, each, sunk):
    count, cuts, way = rows
    tokens = laid(count, cuts, way)
    q, k, v = (
        torch.randn(len(cuts), count, n, 4, dtype=torch.float64).requires_grad_()
        for n in (6, 6 // each, 6 // each)
    )
    sinks = torch.randn(6, dtype=torch.float64, requires_grad=True) if sunk else None
    same = [tokens.position, tokens.segment] * 2
    o, lse = block_sparse.block_sparse_attention(q, k, v, sinks, same, [], pattern, 0.7)
    expected, sums = truth(
        q,
        k,
        v,
        hw.attention.AttentionMask(tokens, tokens, parse_pattern(pattern)).allowed,
        sinks,
        0.7,
    )
    cases.check_close(o, expected)
    torch.testing.assert_close(lse, sums.detach(), rtol=1e-9, atol=1e-9)  # of nothing it is -inf
    learn = [q, k, v, *([sinks] if sunk else [])]
    back = torch.randn_like(o)
    for ours, theirs in zip(
        torch.autograd.grad(o, learn, back), torch.autograd.grad(expected, learn, back), strict=True
    ):
        cases.check_close(ours, theirs, rtol=1e-8, atol=1e-9)
    assert not lse.requires_grad


@pytest.mark.parametrize(
    "pattern", ["window(100)", "dilated(5, rate=3)", "dilated(9, rate=200, after=4)"]
)
def test_gradients_added_together_do_not_overlap(pattern, monkeypatch):
    """Threads share an addition out: two that add to the same token at once lose what one of them
    adds.
    """
    added, inside, view, overlap = (
        [],
        [],
        block_sparse.BatchedBlocks._view,
        block_sparse.BatchedBlocks._overlap,
    )

    def viewed(self, x, ranges):
        inputs = view(self, x, ranges)
        added.extend([inputs] if inside else [])
        return inputs

    def overlapped(self, *args):
        inside.append(True)
        overlap(self, *args)
        inside.clear()

    monkeypatch.setattr(block_sparse.BatchedBlocks, "_view", viewed)
    monkeypatch.setattr(block_sparse.BatchedBlocks, "_overlap", overlapped)
    q, k, v = (torch.randn(1, 700, 2, 4).requires_grad_() for _ in "qkv")
    o, _ = block_sparse.block_sparse_attention(q, k, v, None, [], [0, 0], pattern, 0.5)
    torch.autograd.grad(o.sum(), [q, k, v])
    assert any(len(some) > 1 for some in added)
    for some in added:
        along = [
            torch.arange(count) * stride
            for count, stride in zip(some.shape, some.stride(), strict=True)
        ]
        places = sum(torch.meshgrid(*along, indexing="ij"))
        assert len(places.unique()) == some.numel()


def large(dtype) -> tuple[Tensor, ...]:
    return tuple(torch.randn(2, 300, 3, 16).to(dtype) for _ in "qkv")


@pytest.mark.parametrize(
    ("dtype", "peer"), [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("pattern", ["window(100)", "first(4) | window(37)", "dilated(5, rate=3)"])
def test_errors_are_at_most_twice_those_of_one_masked_call(pattern, dtype, peer):
    q, k, v = large(dtype)
    place = torch.arange(300)
    mask = parse_pattern(pattern).allows(place[:, None], place)
    exact, _ = truth(q, k, v, mask, None, 0.25)
    ours = block_sparse.block_sparse_attention(q, k, v, None, [], [0, 0], pattern, 0.25)[0]
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), mask, scale=0.25
    )
    errors = [(o.double() - exact).abs().max() for o in (ours, theirs.transpose(1, 2))]
    assert errors[0] <= 2 * errors[1] + torch.finfo(peer).eps * exact.abs().max()


def test_huge_scores_and_sinks_give_numbers():
    q, k, v = (x.requires_grad_() for x in large(torch.float32))
    for sinks in (None, torch.tensor([-1e4, 0.0, 1e4], requires_grad=True)):
        o, _ = block_sparse.block_sparse_attention(q, k, v, sinks, [], [0, 150], "window(100)", 1e4)
        grads = torch.autograd.grad(o.sum(), [q, k, v, *([] if sinks is None else [sinks])])
        assert all(x.isfinite().all() for x in (o, *grads))
        assert (o[:, :150] == 0).all()  # these stand before every key


class AllocationCounter(TorchDispatchMode):
    """Adds up the bytes of every tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        values = {
            t.untyped_storage().data_ptr()
            for t in tree_leaves((args, kwargs))
            if isinstance(t, Tensor)
        }
        for built in tree_leaves(out):
            if isinstance(built, Tensor) and built.untyped_storage().data_ptr() not in values:
                self.nbytes += built.nbytes
        return out


def allocated_bytes(pattern: str, count: int) -> int:
    q, k, v = (torch.randn(1, count, 2, 8) for _ in "qkv")
    how = None, [], [0, 0], pattern, 0.3
    block_sparse.run_forward(q, k, v, *how)
    with AllocationCounter() as mode:
        o, lse = block_sparse.run_forward(q, k, v, *how)
        block_sparse.run_backward(o, o, lse, q, k, v, *how)
    return mode.nbytes


LINEAR = ["first(4) | window(37)", "dilated(5, rate=3)", "bigbird(4096, block=32, random=0)"]


@pytest.mark.parametrize("pattern", LINEAR)
def test_work_and_memory_grow_with_the_length(pattern):
    layer = hw.Attention(hw.design(model=16, heads=2, pattern=pattern), backend="block_sparse")
    keep = [saved_bytes(layer, count) for count in (1024, 2048)]
    numbers = [allocated_bytes(pattern, count) for count in (1024, 2048)]
    values = [
        count_batch_pairs(parse_pattern(pattern), range(count), range(count))
        for count in (1024, 2048)
    ]
    assert values[1] <= 2.2 * values[0]
    assert numbers[1] <= 2.2 * numbers[0]
    assert keep[1] <= 2.2 * keep[0]


@pytest.mark.parametrize(
    "modifiers", [(hw.parts.T5Bias(buckets=8, reach=9),), (hw.parts.Alibi(),)], ids=repr
)
def test_biases_leave_gradients_that_grow_with_the_length(modifiers):
    layer = hw.Attention(
        hw.design(model=8, heads=2, pattern="window(50)", modifiers=modifiers),
        backend="block_sparse",
    )
    grown = list[int]()
    for count in (1024, 2048):
        x = torch.randn(1, count, 8, requires_grad=True)
        y = layer(x).sum()
        with AllocationCounter() as mode:
            y.backward()
        grown.append(mode.nbytes)
    assert grown[1] <= 2.2 * grown[0]


def test_no_tensor_is_saved_without_gradients():
    layer, stored = (
        hw.Attention(cases.base(pattern="window(20)"), backend="block_sparse"),
        list[Tensor](),
    )
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(stored.append, lambda t: t):
        layer(torch.randn(1, 300, 10))
    assert not stored


def test_second_derivatives_are_refused():
    layer = hw.Attention(cases.base(pattern="window(20)"), backend="block_sparse")
    x = torch.randn(1, 300, 10, requires_grad=True)
    (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises((RuntimeError, NotImplementedError)):
        first.sum().backward()


@pytest.mark.parametrize(
    "pattern", ["window(20)", "dilated(5, rate=3)", "bigbird(300, block=16, random=2)"]
)
def test_gradients_are_counted_as_torch_counts_them(pattern):
    spec = cases.base(pattern=pattern, kv=2)
    layer = cases.layer(spec, torch.float32, "block_sparse")
    x = torch.randn(2, 300, 10, requires_grad=True)
    job, work = (
        CallSignature(spec, spec.core, grad_enabled=True),
        costs.self_attention_work(spec, batch=2, queries=300),
    )
    core = BACKENDS["block_sparse"].executed_flops(job, work)
    with FlopCounterMode(display=False) as counter:
        y = layer(x)
        forth = counter.get_total_flops()
        y.sum().backward()
    assert forth == costs.executed_flops(spec, work, core)
    assert counter.get_total_flops() - forth == 2 * (forth - core) + 5 * core // 2


@pytest.mark.parametrize("pattern", ["window(100)", "window(100) | first(4)"])
def test_a_chunk_behind_a_ring_reads_its_window(pattern):
    layer = cases.layer(cases.base(pattern=pattern), torch.float32)
    x = torch.randn(1, 900, 10)
    cache = layer.cache(batch=1, capacity=5000)
    with torch.no_grad():
        expected = layer(x)[:, 600:]
        layer(x[:, :600], cache=cache)
        core = torch_flops(layer, x[:, 600:], cache=cache) - 300 * 2 * 10 * 24 * 4
        assert core <= 300 * (100 + 4 + 128) * 6 * 4 * 4
        again = layer.cache(batch=1, capacity=5000)
        layer(x[:, :600], cache=again)
        cases.check_close(layer(x[:, 600:], cache=again), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.compile
@pytest.mark.parametrize("words", [{"pattern": text} for text in PATTERNS[4:10]] + [
    {"pattern": "bigbird(300, block=16, random=2)", "vdim": 5},
    {"pattern": "window(20)", "modifiers": (hw.parts.Alibi(),)},
    {"pattern": "window(20)", "normaliser": hw.parts.SinkSoftmax()},
], ids=str)  # fmt: skip
def test_patterns_are_one_graph(words):
    layer = cases.layer(cases.base(**words), backend="block_sparse")
    x = torch.randn(2, 300, 10, dtype=torch.float64, requires_grad=True)
    torch._dynamo.reset()
    y = torch.compile(layer, fullgraph=True, backend="eager")(x)
    layer.backend_name = "dense"
    cases.check_close(y, layer(x))
    ours, theirs = (torch.autograd.grad(one.sum(), x)[0] for one in (y, layer(x)))
    cases.check_close(ours, theirs, rtol=1e-8, atol=1e-9)
