"""The bf16 matmul backend: results, saved bytes, refusals, and when it is chosen."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import example, given, settings, strategies as st

import headwise as hw
from headwise.attention import attention_call, backends
from headwise.attention.backends import CallSignature, bf16_matmul, dense
from headwise.attention.backends.backend_report import why
from support.layer_cases import base, check_close
from support.saved_bytes import layer_saved_bytes

BF16 = torch.bfloat16


@contextmanager
def small_blocks() -> Iterator[None]:
    """Blocks of four queries, and no weights kept beyond nine keys."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bf16_matmul, "QUERY_BLOCK_SIZE", 4)
        patch.setattr(bf16_matmul, "MAX_SAVED_KEYS", 9)
        yield


@pytest.fixture
def small() -> Iterator[None]:
    with small_blocks():
        yield


def pair(
    spec: hw.AttentionSpec, dtype: torch.dtype = torch.float64
) -> tuple[hw.Attention, hw.Attention]:
    """The same layer in whole products, and in plain operations."""
    ours = hw.Attention(spec, backend="bf16_matmul").to(dtype)
    other = copy.deepcopy(ours)
    other.backend_name = "dense"
    return ours, other


def gradients(layer: hw.Attention, x: torch.Tensor, **call) -> list[torch.Tensor]:
    """The output, and the gradients of a loss that weighs every number of it differently."""
    x = x.detach().requires_grad_()
    y = layer(x, **call)
    result = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)
    return [y, *torch.autograd.grad((y * result).sum(), [x, *layer.parameters()])]


LENGTHS = st.lists(st.integers(0, 17), min_size=1, max_size=4).filter(
    lambda lengths: max(lengths) != 1
)


@settings(deadline=None, max_examples=25)
@given(
    lengths=LENGTHS,
    kv=st.sampled_from([1, 2, 6]),
    pattern=st.sampled_from(["causal", "full"]),
    pad=st.sampled_from(["right", "left", "none"]),
)
def test_any_rows_give_what_plain_operations_give(lengths, kv, pattern, pad):
    ours, other = pair(hw.design(model=10, heads=6, kv=kv, dim=5, vdim=3, pattern=pattern))
    x = torch.randn(len(lengths), max(lengths), 10, dtype=torch.float64)
    sequence = (
        hw.SequenceInfo.from_batch(x)
        if pad == "none"
        else hw.SequenceInfo.from_batch(x, lengths=lengths, pad=pad)
    )
    with small_blocks():
        built = gradients(ours, x, sequence=sequence)
    for one, expected in zip(built, gradients(other, x, sequence=sequence), strict=True):
        check_close(one, expected, rtol=1e-9, atol=1e-10)


@example(queries=6, keys=5, before=-2, pattern="causal")
@settings(deadline=None, max_examples=25)
@given(
    queries=st.integers(2, 14),
    keys=st.integers(1, 14),
    before=st.integers(-15, 15),
    pattern=st.sampled_from(["causal", "full"]),
)
def test_queries_may_stand_anywhere_beside_their_keys(queries, keys, before, pattern):
    """Behind them, before them, where the first read nothing, and where keys stand ahead of all."""
    ours, other = pair(hw.design(model=6, heads=2, pattern=pattern, source=7))
    x, z = (
        torch.randn(2, count, wide, dtype=torch.float64)
        for count, wide in ((queries, 6), (keys, 7))
    )
    at = hw.SequenceInfo.contiguous(20 + before, queries, "cpu")
    recorded = []
    with small_blocks():
        for layer in (ours, other):
            source = layer.project_source(z, sequence=hw.SequenceInfo.contiguous(20, keys, "cpu"))
            recorded.append(gradients(layer, x, source=source, sequence=at))
    for one, expected in zip(*recorded, strict=True):
        check_close(one, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("count", [60, 259, 600])
@pytest.mark.parametrize("logits", [1.0, 1e4])
def test_error_is_at_most_that_of_plain_operations(count, logits):
    spec = hw.design(model=32, heads=2, dim=16, pattern="causal")
    ours, other = pair(spec, BF16)
    exact = copy.deepcopy(other).double()
    x = (torch.randn(2, count, 32) * logits**0.5).to(BF16)
    truth = gradients(exact, x.double())
    for built, plain, true in zip(gradients(ours, x), gradients(other, x), truth, strict=True):
        assert built.isfinite().all()
        if logits == 1.0:
            error, plain_error = ((t.double() - true).abs().max().item() for t in (built, plain))
            assert error <= 2 * plain_error + 4 * 2**-8 * true.abs().max().item()


def test_sums_over_many_blocks_are_not_rounded_with_each():
    """Every query adds the same to the first key: 300 blocks of 2^-8 a piece would be lost beside 1
    in bfloat16.
    """
    q = torch.zeros(1, 1200, 1, 2, dtype=BF16)
    v = torch.zeros(1, 1200, 1, 2, dtype=BF16).requires_grad_()
    spec = hw.design(model=2, heads=1, pattern="full")
    at = hw.SequenceInfo.contiguous(0, 1200, "cpu")
    query_context = hw.interfaces.core_types.QueryContext(q, q, 1.0, at)
    job = CallSignature(spec, spec.core, dtype=BF16, grad_enabled=True)
    mask = hw.attention.AttentionMask(at, at, spec.pattern)
    steps = hw.Attention(spec).core_steps
    o = bf16_matmul.attend(job, backends.CoreInputs(q, q, v, mask, steps, query_context, {}))
    o.backward(torch.ones_like(o))
    check_close(v.grad, torch.ones_like(v), rtol=0, atol=2**-8)


# --- what is kept ---------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [5, 128, 300, 513])
def test_saved_bytes_are_counted(count):
    spec = hw.design(model=16, heads=4, kv=2, pattern="causal")
    load = hw.Workload(2, count, "bf16", "cpu")
    layer = hw.Attention(spec, backend="bf16_matmul").to(BF16)
    x = torch.randn(2, count, 16).to(BF16).requires_grad_()
    assert hw.costs.layer_activation_memory(spec, load, "bf16_matmul").total == layer_saved_bytes(
        layer, x
    )
    assert hw.costs.layer_activation_memory(spec, load) == hw.costs.layer_activation_memory(
        spec, load, "bf16_matmul"
    )
    assert hw.costs.layer_activation_memory(
        spec, hw.Workload(2, count, "fp32", "cpu")
    ) == hw.costs.layer_activation_memory(spec, hw.Workload(2, count, "fp32", "cpu"), "sdpa")


def test_saved_tensors_are_not_recomputed(small):
    spec = base(pattern="causal")
    job = CallSignature(spec, spec.core)
    values = [
        backends.recomputed_flops(bf16_matmul, job, hw.costs.CallSize(1, keys, keys, keys), 100)
        for keys in (9, 10)
    ]
    assert values == [0, 100 * spec.core.score_dim // (spec.core.score_dim + spec.core.vdim)]


# --- who takes what -------------------------------------------------------------------------------


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The backends that ran so far."""
    names: list[str] = []
    select = backends.CoreDispatch.select

    def select_and_note(self: backends.CoreDispatch, *args: object) -> str:
        names.append(select(self, *args))
        return names[-1]

    monkeypatch.setattr(backends.CoreDispatch, "select", select_and_note)
    return names


def test_numbers_of_16_bits_are_read_in_whole_products(ran):
    spec = hw.design(model=8, heads=2, pattern="causal")
    x = torch.randn(1, 5, 8)
    layer = hw.Attention(spec)
    layer(x)
    assert ran == ["sdpa"]
    with torch.autocast("cpu", BF16):
        assert layer(x).dtype == BF16
    assert ran == ["sdpa", "bf16_matmul"]
    low = copy.deepcopy(layer).to(BF16)
    low(x.to(BF16))
    assert ran[-1] == "bf16_matmul"
    assert why(spec, dtype="bfloat16", tokens=5).backend == "bf16_matmul"
    assert why(spec, dtype="bfloat16").call.length_ranges == [(0, "bf16_matmul")]
    assert (
        why(spec, tokens=5).backend
        == why(spec, dtype="bfloat16", device="cuda", tokens=5).backend
        == "sdpa"
    )


def test_autocast_leaves_double_precision_alone():
    layer, x = (
        hw.Attention(hw.design(model=8, heads=2)).double(),
        torch.randn(1, 5, 8, dtype=torch.float64),
    )
    with torch.autocast("cpu", BF16):
        assert attention_call.compute_dtype(x) == torch.float64
        assert layer(x).dtype == torch.float64
    assert attention_call.compute_dtype(x.float()) == torch.float32


def test_an_autocast_layer_is_as_good_as_plain():
    ours, other = pair(base(pattern="causal"), torch.float32)
    x = torch.randn(2, 150, 10)
    with torch.autocast("cpu", BF16):
        built, expected = gradients(ours, x), gradients(other, x)
    for one, plain in zip(built, expected, strict=True):
        assert one.dtype == plain.dtype
        check_close(one, plain, rtol=0, atol=0.05 * plain.abs().max().item())


@pytest.mark.filterwarnings("ignore")  # of torch, that it loops over rows
def test_torch_func_transforms_use_plain_operations():
    ours, other = pair(base(pattern="causal"))
    x, along = torch.randn(2, 3, 9, 10, dtype=torch.float64)
    slopes, rises = [], []
    with pytest.raises(hw.NoBackend, match="does not support torch"):
        torch.func.grad(lambda x: ours(x).square().sum())(x)
    ours.backend_name = None
    for layer in (ours, other):
        slopes.append(torch.func.grad(lambda x, layer=layer: layer(x).square().sum())(x))
        rises.append(torch.func.jvp(layer, (x,), (along,))[1])
    check_close(*slopes)
    check_close(*rises)


def test_empty_calls_use_plain_operations(small, monkeypatch: pytest.MonkeyPatch):
    """No tokens, or no rows: plain operations know what that is."""
    ours, _ = pair(base())
    recorded = []
    monkeypatch.setattr(dense, "attend", lambda job, inputs: recorded.append(1) or inputs.q)
    assert ours(torch.zeros(0, 3, 10, dtype=torch.float64)).shape == (0, 3, 10)
    assert recorded == [1]
