"""The flash attention kernel for the CPU, of all queries and of gathered ones, against the definition
in float64, at any size.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.flop_counter import FlopCounterMode

import headwise as hw
from headwise import costs
from headwise.attention.backends import BACKENDS, CallSignature, flash_cpu
from headwise.kernels import flash_attention
from headwise.kernels.flash_attention import (
    FlashAttentionShape,
    WorkItems,
    attend_key_ranges,
    count_executed_pairs,
    gathered_attention,
)
from support import crossover, layer_cases as cases
from support.layer_cases import base, check_close
from support.layer_checks import torch_flops

SCALE = 0.4


class Call:
    """One call: each token reads the keys up to as many behind its own number, all, or between ends
    of its own; with a rate, only this share of the queries asks.
    """

    def __init__(
        self,
        sizes,
        widths,
        ahead: int | None = None,
        dtype: torch.dtype = torch.float64,
        rate: float | None = None,
    ) -> None:
        (batch, queries, keys), (heads, values, dim, vdim) = sizes, widths
        make = torch.Generator().manual_seed(batch + 3 * queries + 5 * keys + 7 * heads)

        def numbers(*shape: int) -> torch.Tensor:
            return (
                torch.randn(*shape, generator=make, dtype=torch.float64).to(dtype).requires_grad_()
            )

        self.q, self.k, self.v = (
            numbers(batch, queries, heads, dim),
            numbers(batch, keys, values, dim),
            numbers(batch, keys, values, vdim),
        )
        self.way = torch.randn(batch, queries, heads, vdim, generator=make, dtype=torch.float64).to(
            dtype
        )
        self.ahead = ahead
        self.ends: torch.Tensor | None = None
        self.opened: torch.Tensor | None = None
        if rate is not None:
            self.opened = torch.rand(batch, queries, heads, generator=make) < rate
            self.between(queries, queries % 2 == 1)

    def between(self, seed: int, alike: bool) -> None:
        """Ends of each token's own."""
        make = torch.Generator().manual_seed(seed)
        rows = 1 if alike else len(self.q)
        self.ends = (
            torch.randint(0, self.k.shape[1] + 1, (rows, self.q.shape[1], 2), generator=make)
            .sort(-1)
            .values
        )

    def items(self) -> WorkItems:
        return WorkItems.from_open_heads(self.opened, self.k.shape[2], self.ends, self.k.shape[1])

    def read(self) -> torch.Tensor:
        if self.opened is not None:
            return gathered_attention(self.q, self.k, self.v, self.items(), SCALE)
        return attend_key_ranges(self.q, self.k, self.v, self.ends, self.ahead, SCALE)

    def expected(self) -> torch.Tensor:
        each, key = self.q.shape[2] // self.k.shape[2], torch.arange(self.k.shape[1])
        q, k, v = (
            t.double()
            for t in (self.q, self.k.repeat_interleave(each, 2), self.v.repeat_interleave(each, 2))
        )
        if self.ends is not None:
            allowed = (key >= self.ends[..., :1]) & (key < self.ends[..., 1:])
        else:
            last = (
                len(key) if self.ahead is None else torch.arange(q.shape[1])[:, None] + self.ahead
            )
            allowed = (
                (key <= last)[None]
                if self.ahead is not None
                else torch.ones(1, q.shape[1], len(key)).bool()
            )
        s = torch.einsum("bthk,bshk->bhts", q, k) * SCALE
        w = s.masked_fill(~allowed[:, None], -torch.inf).softmax(-1)
        w = w.masked_fill(~allowed.any(-1)[:, None, :, None], 0.0)
        o = torch.einsum("bhts,bshv->bthv", w, v)
        return o if self.opened is None else o * self.opened[..., None]

    def both(self, o: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (o, *torch.autograd.grad((o * self.way.to(o.dtype)).sum(), (self.q, self.k, self.v)))

    def check_reading(self, **tolerance: float) -> None:
        for ours, theirs in zip(self.both(self.read()), self.both(self.expected()), strict=True):
            check_close(ours, theirs.to(ours.dtype), **tolerance)


@pytest.mark.parametrize("ahead", [0, None])
@pytest.mark.parametrize("count", [1, 3, 63, 64, 65, 127, 129])
def test_units_end_where_they_should(count, ahead):
    Call((2, count, count), (4, 2, 5, 7), ahead).check_reading()


@pytest.fixture
def parts(monkeypatch):
    """Keys in parts of their own, be there few or many."""
    monkeypatch.setattr(flash_attention, "MIN_KEYS_PER_PART", 16)


@pytest.mark.parametrize("queries", [1, 63, 64, 65, 128, 131])
@pytest.mark.parametrize("keys", [1, 3, 63, 64, 65, 131])
def test_units_of_gathered_queries_end_where_they_should(queries, keys, parts):
    Call((1, queries, keys), (2, 2, 5, 7), rate=1.0).check_reading()


@pytest.mark.parametrize("rate", [None, 0.4])
@pytest.mark.parametrize("dim", [1, 15, 16, 17, 64, 67])
@pytest.mark.parametrize("vdim", [3, 16, 65])
def test_any_width(dim, vdim, rate, parts):
    Call((2, 70, 75), (4, 2, dim, vdim), 5, rate=rate).check_reading()


@pytest.mark.parametrize("keep", [1, 2, 7, 14])
def test_parts_of_keys_are_added_up(keep, parts):
    some = Call((1, 80, 201), (14, keep, 5, 3), rate=0.4)
    assert len(some.items().backward) == keep * {1: 4, 2: 4, 7: 2, 14: 1}[keep]
    some.check_reading()
    call = Call((1, 80, 201), (14, keep, 5, 3), 121)
    flash_attention._PLAN_CACHE.clear()
    call.check_reading()
    (plan,) = flash_attention._PLAN_CACHE.values()
    assert plan.num_key_parts == {1: 4, 2: 4, 7: 2, 14: 1}[keep]
    flash_attention._PLAN_CACHE.clear()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 200), st.integers(0, 150)),
    groups=st.sampled_from([(1, 1), (6, 1), (6, 2), (6, 6)]),
    widths=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    way=st.sampled_from(["causal", "full", "between", "between alike", 0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 99),
)
def test_any_call(sizes, groups, widths, way, seed):
    batch, queries, more = sizes
    rate = way if isinstance(way, float) else None
    keys = queries + more if rate is None else seed + 1
    ahead = more if way == "causal" else None
    call = Call((batch, queries, keys), (*groups, *widths), ahead, rate=rate)
    if way in ("between", "between alike"):
        call.between(seed, way == "between alike")
    with pytest.MonkeyPatch.context() as patch:
        if rate is not None:
            patch.setattr(flash_attention, "MIN_KEYS_PER_PART", 48)
        call.check_reading()
    if rate is not None:
        return
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        call.read()
    assert counter.get_total_flops() == 2 * formed(call) * sum(widths)


def formed(call: Call) -> int:
    """The pairs of all units, one by one: sixty-four rows, with the keys from the first to the last
    that one reads.
    """
    size, total = FlashAttentionShape.from_tensors(call.q, call.k), 0
    for b in range(size.batch):
        for first in range(0, size.queries * size.group_size, 64):
            tokens = [
                row // size.group_size
                for row in range(first, min(first + 64, size.queries * size.group_size))
            ]
            if call.ends is not None:
                own = call.ends[b % len(call.ends), tokens]
                total += 64 * size.num_kv_heads * max(0, int(own[:, 1].max() - own[:, 0].min()))
            else:
                last = (
                    size.keys if call.ahead is None else min(size.keys, tokens[-1] + call.ahead + 1)
                )
                total += 64 * size.num_kv_heads * last
    return total


@pytest.mark.parametrize("heads", [1, 3, 6, 64, 96, 160])
def test_pairs_are_counted_without_counting(heads):
    for queries, keys, ahead in [
        (1, 1, 0),
        (63, 63, 0),
        (200, 200, 0),
        (200, 333, 133),
        (200, 150, 0),
        (90, 400, 7),
    ]:
        call = Call((2, queries, keys), (heads, 1, 1, 1), ahead)
        assert count_executed_pairs(
            FlashAttentionShape.from_tensors(call.q, call.k), None, ahead
        ) == formed(call), (
            queries,
            keys,
            ahead,
        )
    million = FlashAttentionShape(1, 10**12, heads, 10**12, 1)
    assert count_executed_pairs(million, None, 0) == pytest.approx(heads * 10**24 / 2, rel=1e-6)


@pytest.mark.parametrize("rate", [None, 0.4])
def test_results_are_independent_of_threads(rate, parts):
    flash_attention._PLAN_CACHE.clear()
    call, found = Call((1, 300, 300), (6, 3, 20, 20), 0, torch.float32, rate), []
    before = torch.get_num_threads()
    for count in (1, 2):
        torch.set_num_threads(count)
        found.append(call.both(call.read()))
    torch.set_num_threads(before)
    flash_attention._PLAN_CACHE.clear()
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


@pytest.mark.parametrize("rate", [None, 0.4])
@pytest.mark.parametrize("size", [1.0, 1e4])
def test_scores_of_any_size_in_single_precision(size, rate):
    call = Call((1, 150, 150), (2, 2, 16, 16), 0, torch.float32, rate)
    with torch.no_grad():
        call.q.mul_(size)
    found = call.both(call.read())
    assert all(t.isfinite().all() for t in found)
    check_close(found[0], call.expected().float(), rtol=1e-5, atol=1e-5 if size == 1.0 else 1e-3)


def test_error_is_at_most_twice_that_of_torch():
    call = Call((1, 1000, 1000), (4, 4, 32, 32), 0, torch.float32)
    truth = call.both(call.expected())
    q, k, v = (t.transpose(1, 2) for t in (call.q, call.k, call.v))
    o = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=SCALE
    ).transpose(1, 2)
    for ours, theirs, true in zip(call.both(call.read()), call.both(o), truth, strict=True):
        assert (ours - true).abs().max() <= 2 * (theirs - true).abs().max()


@pytest.mark.parametrize("rate", [None, 0.4])
def test_memory_that_lies_otherwise_is_read_where_it_is(rate):
    call = Call((2, 70, 80), (4, 2, 6, 6), 10, rate=rate)
    expected = call.both(call.expected())
    for name in "qkv":
        setattr(
            call,
            name,
            getattr(call, name)
            .detach()
            .transpose(1, 2)
            .contiguous()
            .transpose(1, 2)
            .requires_grad_(),
        )
    call.k = call.k.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_()
    for ours, theirs in zip(call.both(call.read()), expected, strict=True):
        check_close(ours, theirs)


def test_a_plan_is_of_one_kind_of_call():
    call = Call((2, 70, 70), (4, 2, 6, 6), 0)
    call.check_reading()
    half = attend_key_ranges(call.q, call.k, call.v, None, 0, SCALE / 2)
    check_close(half, attend_key_ranges(call.q / 2, call.k, call.v, None, 0, SCALE))
    call.k, call.v = (
        t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
        for t in (call.k, call.v)
    )
    call.check_reading()
    call.between(3, False)
    call.check_reading()
    call.ends = None
    call.check_reading()


def test_units_with_most_keys_begin():
    call = Call((2, 200, 200), (4, 2, 6, 6), 0)
    flash_attention._PLAN_CACHE.clear()
    call.read()
    (plan,) = flash_attention._PLAN_CACHE.values()
    units = plan.forward_args.tensors[1]
    assert units.data_ptr() == plan.forward_args.work_items
    assert (units[:, 1] % 400).unique_consecutive().tolist() == [384, 320, 256, 192, 128, 64, 0]
    assert units[:, 2].sum() == 2 * 200 * 4


def test_gathered_queries_with_most_keys_begin():
    opened = torch.rand(1, 500, 3, generator=torch.Generator().manual_seed(0)) < 0.5
    ends = torch.stack([torch.zeros(500, dtype=torch.int64), torch.arange(1, 501)], -1)[None]
    items = WorkItems.from_open_heads(opened, 3, ends, 500)
    places, _, forth, back, _ = items
    last = places[forth[:, 1] + forth[:, 2] - 1] // 3 % 500
    assert (last.diff() <= 0).all()
    assert forth[:, 2].sum() == opened.sum() == len(places)
    assert (back[:, 2].diff() <= 0).all()
    assert items.num_pairs == 64 * int((last + 1).sum())


def test_plans_are_few():
    flash_attention._PLAN_CACHE.clear()
    for count in range(1, 2 * flash_attention.MAX_CACHED_PLANS):
        Call((1, count, count), (2, 2, 3, 3), 0).read()
    assert 0 < len(flash_attention._PLAN_CACHE) <= flash_attention.MAX_CACHED_PLANS


@pytest.mark.parametrize("way", ["causal", "between", "gathered"])
def test_the_operation_passes_opcheck(way):
    call = Call((1, 20, 20), (2, 2, 4, 4), 0, rate=0.4 if way == "gathered" else None)
    if way == "between":
        call.between(0, False)
    looks, qkv = ("test_schema", "test_faketensor"), [t.detach() for t in (call.q, call.k, call.v)]
    how = (call.ends, 0 if way == "causal" else None, [], SCALE, None)
    if way == "gathered":
        items = call.items()
        tables = [items.query_rows, items.forward, items.backward]
        how = (items.key_ranges, None, tables, SCALE, items.num_pairs)
    assert set(
        torch.library.opcheck(
            flash_attention.FLASH_FORWARD_OP, (*qkv, *how), test_utils=looks
        ).values()
    ) == {"SUCCESS"}
    back = (call.way, [*qkv, *flash_attention.FLASH_FORWARD_OP(*qkv, *how)], *how)
    assert set(
        torch.library.opcheck(flash_attention.FLASH_BACKWARD_OP, back, test_utils=looks).values()
    ) == {"SUCCESS"}


# --- layers ---------------------------------------------------------------------------------------


def layer_of(dtype: torch.dtype = torch.float64, **words) -> hw.Attention:
    return cases.layer(base(**({"pattern": "causal()"} | words)), dtype, "flash_cpu")


def tokens_of(kind: str, x: torch.Tensor) -> hw.SequenceInfo:
    segments = torch.zeros(x.shape[:2], dtype=torch.int64)
    segments[0, 50:] = 1
    segments[1, 130:] = -1
    torn = torch.arange(x.shape[1])[None].expand(x.shape[:2])
    return {
        "left": lambda: hw.SequenceInfo.from_batch(x, lengths=[x.shape[1], 40], pad="left"),
        "right": lambda: hw.SequenceInfo.from_batch(x, lengths=[x.shape[1], 40]),
        "segments": lambda: hw.SequenceInfo.from_batch(x, segments=segments),
        # keys that a token may not read lie between those that it may
        "torn": lambda: hw.SequenceInfo(torn, torn // 7 % 2),
    }[kind]()


@pytest.mark.parametrize("pattern", ["causal()", "full()"])
def test_keys_with_gaps_between_them_are_refused(pattern):
    layer, x = layer_of(pattern=pattern), torch.randn(2, 150, 10, dtype=torch.float64)
    layer.backend_name = "flash_cpu"
    with pytest.raises(hw.NoBackend, match="allowed keys of each query to be one range"):
        layer(x, sequence=tokens_of("torn", x))
    layer.backend_name = None
    expected = reference_of(layer, x, tokens_of("torn", x))
    check_close(layer(x, sequence=tokens_of("torn", x)), expected)


def reference_of(layer, x, tokens):
    layer.backend_name = "dense"
    expected = layer(x, sequence=tokens)
    layer.backend_name = None
    return expected


@pytest.mark.parametrize("kind", ["left", "right", "segments"])
@pytest.mark.parametrize("pattern", ["causal()", "full()"])
def test_padding_and_documents(kind, pattern):
    layer = layer_of(pattern=pattern, kv=2, vdim=5)
    x = torch.randn(2, 150, 10, dtype=torch.float64, requires_grad=True)
    found = {}
    for name in ("flash_cpu", "dense"):
        layer.backend_name = name
        y = layer(x, sequence=tokens_of(kind, x))
        found[name] = [y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])]
    for ours, theirs in zip(found["flash_cpu"], found["dense"], strict=True):
        check_close(ours, theirs, rtol=1e-8, atol=1e-9)


def test_a_long_prompt_after_cached_tokens(monkeypatch):
    layer = layer_of(kv=3)
    x = torch.randn(2, 300, 10, dtype=torch.float64)
    layer.backend_name = "dense"
    expected = layer(x)
    layer.backend_name, recorded = None, []
    monkeypatch.setattr(
        flash_cpu,
        "attend_key_ranges",
        lambda *args: recorded.append(args[4]) or attend_key_ranges(*args),
    )
    with torch.no_grad():
        cache = layer.cache(batch=2, capacity=320)
        check_close(
            torch.cat([layer(part, cache=cache) for part in x.split([100, 1, 199], 1)], 1), expected
        )
    assert recorded == [0, 101]


def test_under_autocast_it_refuses():
    """There numbers are bfloat16, whatever x is; a layer that asks for nobody has them read by
    another.
    """
    layer = layer_of(torch.float32)
    x = torch.randn(2, 130, 10)
    layer.backend_name = "flash_cpu"
    layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(hw.NoBackend, match="computes in float32 and float64 only"):
            layer(x)
        layer.backend_name = None
        assert layer(x).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "words", [{}, {"kv": 2}, {"kv": 1}, {"pattern": "full()"}, {"source": 13, "pattern": "full()"}]
)
@pytest.mark.parametrize("count", [64, 130])
def test_executed_flops_are_those_torch_counts(words, count):
    layer = layer_of(torch.float32, **words)
    x, z = torch.randn(2, count, 10), torch.randn(2, 77, 13) if "source" in words else None
    keys = count if z is None else 77
    work = hw.costs.CallSize(2, count, keys, keys)
    core = flash_cpu.executed_flops(CallSignature(layer.spec, layer.spec.core), work)
    assert torch_flops(layer, x, source=z) == costs.executed_flops(layer.spec, work, core)


def test_flops_of_a_backward_pass():
    call = Call((2, 130, 130), (4, 2, 16, 16), 0, torch.float32)
    with FlopCounterMode(display=False) as counter:
        o = call.read()
        forth = counter.get_total_flops()
        o.sum().backward()
    assert counter.get_total_flops() == forth * 7 // 2


def test_the_kernel_is_preferred():
    spec = base(pattern="causal()")
    order = [*BACKENDS]
    assert order.index("flash_cpu") == order.index("sdpa") - 1
    assert (
        hw.why(spec, tokens=crossover.least("flash_cpu")).backend
        == hw.why(spec, when=["grad", "training"]).backend
        == "flash_cpu"
    )
    assert hw.why(spec, tokens=crossover.least("flash_cpu") - 1).backend == "sdpa"
    assert hw.why(spec, dtype="bf16").backend == "bf16_matmul"


@pytest.mark.compile
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_layer_is_one_graph(dynamic):
    layer = layer_of(kv=2)
    layer.backend_name = None
    torch._dynamo.reset()
    traced = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for count in (130, 131, 200):
        x = torch.randn(2, count, 10, dtype=torch.float64, requires_grad=True)
        found = [(y, torch.autograd.grad(y.square().sum(), x)[0]) for y in (traced(x), layer(x))]
        for ours, theirs in zip(*found, strict=True):
            check_close(ours, theirs)
