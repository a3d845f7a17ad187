"""The backend that skips closed heads, against all heads with the gate applied afterwards, in
float64.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings, strategies as st

import headwise as hw
from headwise import costs
from headwise.attention.backends import (
    CallSignature,
    CoreInputs,
    CoreSteps,
    flash_cpu,
    routed_heads,
)
from headwise.attention.interfaces.core_types import CallSize, QueryContext
from headwise.attention.masking.sequence_info import AttentionMask, SequenceInfo
from headwise.kernels.flash_attention import WorkItems
from support import layer_cases as cases
from support.layer_cases import base, check_close
from support.layer_checks import torch_flops

HALF = (hw.parts.MixtureOfHeads(always=0, active=3),)


class Call:
    """One call of the core with gates of the caller's own."""

    def __init__(
        self, pattern: str, sizes, kv: int = 6, dtype: torch.dtype = torch.float64
    ) -> None:
        self.spec = base(pattern=pattern, kv=kv, modifiers=HALF)
        batch, queries, keys = sizes
        make = torch.Generator().manual_seed(batch + 7 * queries + 11 * keys)

        def some(count: int, heads: int) -> torch.Tensor:
            return (
                torch.randn(batch, count, heads, 4, generator=make, dtype=torch.float64)
                .to(dtype)
                .requires_grad_()
            )

        self.q, self.k, self.v = some(queries, 6), some(keys, kv), some(keys, kv)
        self.query_sequence, self.key_sequence = (
            SequenceInfo.contiguous(keys - queries, queries, "cpu"),
            SequenceInfo.contiguous(0, keys, "cpu"),
        )
        self.way = some(queries, 6).detach()

    def attend(self, opened: torch.Tensor) -> torch.Tensor:
        job = CallSignature(self.spec, self.spec.core, grad_enabled=True)
        layer = hw.Attention(self.spec)
        bound = CoreSteps.from_spec(self.spec, layer.weights)
        query_context = QueryContext(self.q, self.q, 0.5, self.query_sequence)
        gate = opened.to(self.q.dtype)[..., None]
        mask = AttentionMask(self.query_sequence, self.key_sequence, self.spec.pattern)
        inputs = CoreInputs(self.q, self.k, self.v, mask, bound, query_context, {}, gates=(gate,))
        return gate * routed_heads.attend(job, inputs)

    def expected(self, opened: torch.Tensor) -> torch.Tensor:
        """Every pair, from the definition."""
        each = 6 // self.k.shape[2]
        q, k, v = (
            t.double()
            for t in (self.q, self.k.repeat_interleave(each, 2), self.v.repeat_interleave(each, 2))
        )
        s = torch.einsum("bthk,bshk->bhts", q, k) * 0.5
        queries, keys = self.query_sequence, self.key_sequence
        fits = self.spec.pattern.allows(
            queries.position[:, None, :, None], keys.position[:, None, None, :]
        )
        same = queries.segment[:, None, :, None] == keys.segment[:, None, None, :]
        allowed = fits & same & (queries.segment >= 0)[:, None, :, None]
        w = (
            s.masked_fill(~allowed, -torch.inf)
            .softmax(-1)
            .masked_fill(~allowed.any(-1, keepdim=True), 0.0)
        )
        return torch.einsum("bhts,bshv->bthv", w, v) * opened[..., None]

    def check_reading(self, opened: torch.Tensor, **tolerance: float) -> None:
        found = {}
        for name, run in {"ours": self.attend, "theirs": self.expected}.items():
            o = run(opened)
            found[name] = (o, *torch.autograd.grad((o * self.way).sum(), (self.q, self.k, self.v)))
        for ours, theirs in zip(found["ours"], found["theirs"], strict=True):
            check_close(ours, theirs.to(ours.dtype), **tolerance)


def some_open(batch: int, queries: int, rates, seed: int = 0) -> torch.Tensor:
    make = torch.Generator().manual_seed(seed)
    return torch.rand(batch, queries, 6, generator=make) < torch.tensor(rates)


EVEN, UNEVEN = (0.5,) * 6, (1.0, 1.0, 0.7, 0.02, 0.3, 0.33)
PATTERNS = ["full()", "causal()"]


def opened_in(kind: str, queries: int) -> torch.Tensor:
    """Heads that speak for a stretch of tokens, one at a time, never, or for all but one token."""
    opened = torch.zeros(2, queries, 6, dtype=torch.bool)
    if kind == "stretches":
        for head in range(6):
            opened[:, head * queries // 6 : (head + 2) * queries // 6, head] = True
    elif kind == "rows":
        opened[1] = some_open(1, queries, EVEN)[0]
    elif kind == "one":
        opened[0, queries - 1, 4] = opened[1, 0, 4] = True
    elif kind == "all":
        opened[:] = True
    return opened


@pytest.mark.parametrize("kind", ["stretches", "rows", "one", "all", "none"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_any_choice_of_open_heads_is_exact(pattern, kind):
    Call(pattern, (2, 521, 521)).check_reading(opened_in(kind, 521))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    queries=st.integers(1, 700),
    more=st.integers(0, 90),
    rates=st.tuples(*[st.sampled_from([0.0, 0.03, 0.3, 0.5, 0.55, 1.0])] * 6),
    kv=st.sampled_from([1, 2, 6]),
    pattern=st.sampled_from(PATTERNS),
    seed=st.integers(0, 99),
)
def test_any_length_and_load(queries, more, rates, kv, pattern, seed):
    Call(pattern, (1, queries, queries + more), kv).check_reading(
        some_open(1, queries, rates, seed)
    )


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("pad", ["left", "right"])
def test_padding_and_packed_documents(pattern, pad):
    call = Call(pattern, (2, 400, 400))
    keys = torch.zeros(2, 400, 1)
    call.query_sequence = call.key_sequence = hw.SequenceInfo.from_batch(
        keys, lengths=[400, 150], pad=pad
    )
    call.check_reading(some_open(2, 400, EVEN))
    segments = torch.zeros(2, 400, dtype=torch.int64)
    segments[0, 130:] = 1
    segments[1, 390:] = -1
    call.query_sequence = call.key_sequence = hw.SequenceInfo.from_batch(keys, segments=segments)
    call.check_reading(some_open(2, 400, UNEVEN))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_documents_that_are_torn_apart_are_refused(pattern):
    """Keys that a token may not read lie between those that it may."""
    call = Call(pattern, (2, 200, 200))
    at = SequenceInfo(
        torch.arange(200)[None].expand(2, 200), (torch.arange(200) // 7 % 2).expand(2, 200)
    )
    mask = AttentionMask(at, at, call.spec.pattern)
    signature = CallSignature(call.spec, call.spec.core)
    [reason] = routed_heads.mask_conflicts(signature, mask)
    assert "to be one range" in reason


def test_while_the_kernel_is_compiled_torch_operations_run(monkeypatch):
    monkeypatch.setattr(type(routed_heads.FLASH_ATTENTION_KERNELS), "is_usable", lambda *_: False)
    Call("causal()", (2, 130, 130)).check_reading(some_open(2, 130, UNEVEN))


def layer_of(pattern: str = "causal()", *modifiers, **words) -> hw.Attention:
    return cases.layer(
        base(
            pattern=pattern,
            modifiers=(*modifiers, hw.parts.MixtureOfHeads(always=1, active=2)),
            **words,
        )
    )


@pytest.mark.parametrize(
    "modifiers",
    [
        (),
        (hw.parts.Rotary(),),
        (hw.parts.HeadGate(),),
        (hw.parts.HeadNorm(scope="head"),),
        (hw.parts.OutputGate(),),
    ],
    ids=repr,
)
def test_a_whole_layer_is_the_same(modifiers):
    layer = layer_of("causal()", *modifiers, kv=3)
    x = torch.randn(2, 333, 10, dtype=torch.float64, requires_grad=True)
    found = {}
    for backend in ("dense", "routed"):
        layer.backend_name = backend
        y = layer(x)
        loss = (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)).sum()
        found[backend] = [y, *torch.autograd.grad(loss, [x, *layer.parameters()])]
    for ours, theirs in zip(found["routed"], found["dense"], strict=True):
        check_close(ours, theirs, rtol=1e-8, atol=1e-9)


def test_a_long_prompt_after_cached_tokens():
    layer = layer_of()
    x = torch.randn(2, 1600, 10, dtype=torch.float64)
    expected = layer(x)
    with torch.no_grad():
        for chunks in [(1600,), (100, 700, 800), (1, 1599)]:
            cache = layer.cache(batch=2, capacity=1620)
            check_close(
                torch.cat([layer(part, cache=cache) for part in x.split(list(chunks), 1)], 1),
                expected,
            )


def test_open_heads_attend_to_a_source():
    layer = cases.layer(base(source=13, modifiers=HALF), backend="routed")
    x, z = (
        torch.randn(2, 300, 10, dtype=torch.float64),
        torch.randn(2, 411, 13, dtype=torch.float64),
    )
    ours = layer(x, source=z)
    layer.backend_name = "dense"
    check_close(ours, layer(x, source=z))


# --- who is refused -------------------------------------------------------------------------------


def test_the_backend_is_the_first_choice():
    assert hw.why(base(pattern="causal()", modifiers=HALF), when=["grad"]).backend == "routed"


@pytest.mark.compile
def test_a_compiled_layer_computes_all_heads():
    layer = layer_of()
    x = torch.randn(1, 300, 10, dtype=torch.float64)
    expected = layer(x)
    torch._dynamo.reset()
    check_close(torch.compile(layer, fullgraph=True, backend="eager")(x), expected)


# --- what it costs --------------------------------------------------------------------------------


def evenly(spec, count: int) -> torch.Tensor:
    """Gates where every other token is open, which is the last of each two."""
    return (torch.arange(count) % 2 == 1)[None, :, None].expand(1, count, 6).clone()


@pytest.mark.parametrize("pattern", ["causal()", "full()"])
@pytest.mark.parametrize("count", [256, 512, 768, 90])
def test_executed_flops_are_those_torch_counts(count, pattern, monkeypatch):
    spec = base(pattern=pattern, modifiers=HALF)
    layer = cases.layer(spec, torch.float32, "routed")
    gate = evenly(spec, count).float()[..., None]
    monkeypatch.setattr(layer.parts, "gate_values", lambda context, aux_losses: [gate])
    work = costs.self_attention_work(spec, batch=1, queries=count)
    router = 2 * count * spec.model * 6
    core = routed_heads.executed_flops(CallSignature(spec, spec.core), work)
    assert (
        torch_flops(layer, torch.randn(1, count, 10))
        == costs.executed_flops(spec, work, core) - router
    )


@pytest.mark.parametrize("routing", [(0, 3), (2, 2), (1, 1)])
def test_expected_flops_are_near_those_of_sampled_gates(routing):
    spec = hw.design(
        model=10, heads=6, dim=4, pattern="causal", modifiers=(hw.parts.MixtureOfHeads(*routing),)
    )
    work = CallSize(1, 2048, 2048, 2048)
    expected = routed_heads.executed_flops(CallSignature(spec, spec.core), work)
    always, active = routing
    scores = torch.rand(1, 2048, 6, generator=torch.Generator().manual_seed(3))
    scores[..., :always] = 2.0
    opened = torch.zeros(1, 2048, 6, dtype=torch.bool).scatter(
        -1, scores.topk(always + active).indices, True
    )
    at = SequenceInfo.contiguous(0, 2048, "cpu")
    mask = AttentionMask(at, at, spec.pattern)
    ends = flash_cpu.key_range_table(mask, torch.empty(1, 2048))
    assert ends is not None
    formed = WorkItems.from_open_heads(opened, 6, ends, 2048).num_pairs
    built = spec.core.flops(formed) // 6
    assert 0.99 * expected <= built <= 1.2 * expected
    # torch counts a triangle as the square around it
    every = Fraction(2 * always, 6) + Fraction(active, 6)
    assert built < float(every) * 1.3 * spec.core.flops(2048 * 2049 // 2)


def test_a_pruned_layer_reports_its_support():
    assert hw.parts.MixtureOfHeads(always=1, active=2).open_fractions(base()) == (
        1,
        *[Fraction(2, 5)] * 5,
    )
    assert (
        hw.parts.MixtureOfHeads(always=1, active=2, heads=9).open_fractions(base())
        == (Fraction(1, 3),) * 6
    )
    assert hw.parts.MixtureOfHeads(always=3, active=3).open_fractions(base()) is None


def test_memory_grows_with_length_alone():
    recorded = {}
    for count in (512, 1024):
        call = Call("causal()", (1, count, count))
        calls: dict[int, int] = {}

        def keep(tensor, keep=calls):
            keep[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            assert call.attend(some_open(1, count, EVEN)).requires_grad
        recorded[count] = sum(calls.values())
    assert recorded[1024] <= 2.1 * recorded[512]


@pytest.mark.parametrize(
    "modifiers", [(), (hw.parts.HardConcreteGate(),), (hw.parts.HeadGate(),)], ids=repr
)
def test_packed_texts_take_their_gates_with_them(modifiers):
    layer = layer_of("causal()", *modifiers)
    x = torch.randn(2, 1600, 10, dtype=torch.float64)
    ours = layer(x, sequence=hw.SequenceInfo.packed([[780, 820], [1600]]))
    layer.backend_name = "dense"
    check_close(ours[:1], torch.cat([layer(x[:1, :780]), layer(x[:1, 780:])], 1))
    check_close(ours[1:], layer(x[1:]))
