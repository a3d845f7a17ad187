"""Operations on few tokens between matrix products, against float64, and their dispatch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import headwise as hw
from headwise.kernels import attend_paged, multiply_small_batch, small_batch_ops
from headwise.kernels.autograd_guards import can_skip_dispatcher
from headwise.model_spec import FeedForwardSpec, NormSpec
from headwise.models.feed_forward import FeedForward, NormLayer
from headwise.parts.rotary_embedding import Rotary
from support import takeover

EPS = {torch.float32: 1e-6, torch.bfloat16: 2**-8}
DTYPES = (torch.float32, torch.bfloat16)


def random_tensor(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check_near(y: Tensor, truth: Tensor, size: Tensor | float = 0.0) -> None:
    """Within half a unit in the last place, and as much of the numbers that were added up."""
    assert truth.dtype == torch.float64
    assert y.shape == truth.shape
    assert ((y.double() - truth).abs() <= EPS[y.dtype] * (truth.abs() + size) + 1e-30).all()


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 5), st.integers(1, 50), st.booleans(), st.booleans(), st.sampled_from([0.0, 1.0])
)
def test_a_norm_divides_by_the_root_of_the_mean_square(rows, lanes, single, weighted, offset):
    dtype = torch.float32 if single else torch.bfloat16
    x, w = (
        random_tensor(1, rows, 16 * lanes, dtype=dtype) * 3,
        random_tensor(2, 16 * lanes, dtype=dtype) if weighted else None,
    )
    scale = torch.ones(16 * lanes).double() if w is None else w.double() + offset
    exact = x.double()
    truth = exact / (exact.square().mean(-1, keepdim=True) + 0.5).sqrt() * scale
    check_near(small_batch_ops.rms_norm(x, w, 0.5, offset), truth)


def test_a_norm_reads_strided_rows_and_keeps_nan():
    x = random_tensor(0, 3, 4, 96)[..., 16:48]
    torch.testing.assert_close(
        small_batch_ops.rms_norm(x, None, 1e-6), F.rms_norm(x, (32,), eps=1e-6)
    )
    x = x.clone()
    x[1, 2, 5], x[0, 0, 0] = torch.nan, 0.0
    y = small_batch_ops.rms_norm(x, None, 0.0)
    assert y[1, 2].isnan().all()
    assert y.isnan().sum() == 32


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 2),
    st.booleans(),
)
def test_pairs_turn_by_their_angles(batch, tokens, heads, lanes, rest, single):
    dtype, pairs = torch.float32 if single else torch.bfloat16, 16 * lanes
    width = 2 * pairs + 16 * rest
    x = random_tensor(0, batch, tokens, heads * width + 48, dtype=dtype)[..., 16:-32].view(
        batch, tokens, heads, width
    )
    frequency = 10_000.0 ** -(torch.arange(pairs).double() / pairs)
    for rows in {1, batch}:
        position = torch.randint(
            0, 2**24, (rows, tokens), generator=torch.Generator().manual_seed(1)
        )
        angle = position[:, :, None, None] * frequency
        a, b, left = x.double().split([pairs, pairs, 16 * rest], -1)
        cos, sin = angle.cos() * 1.25, angle.sin() * 1.25
        truth = torch.cat([a * cos - b * sin, a * sin + b * cos, left], -1)
        check_near(
            small_batch_ops.apply_rotary(x, position, frequency, 1.25),
            truth,
            2 * x.double().abs().amax(),
        )


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 20), st.booleans())
def test_gates_open_as_they_are_defined(batch, tokens, lanes, single):
    dtype, width = torch.float32 if single else torch.bfloat16, 16 * lanes
    gate, up = (random_tensor(0, batch, tokens, 2 * width, dtype=dtype) * 9).split(width, -1)
    exact = gate.double()
    truth = exact / (1 + (-exact).exp()) * up.double()
    check_near(small_batch_ops.silu_and_multiply(gate, up).view(gate.shape), truth, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_are_open_closed_or_no_number(dtype):
    gate = torch.tensor(
        [0.0, -87.0, -100.0, -1e30, 100.0, 1e30, torch.inf, torch.nan] * 2, dtype=dtype
    )[None]
    y = small_batch_ops.silu_and_multiply(gate, torch.full_like(gate, 2.0))[0, :8]
    expected = torch.tensor([0.0, 0.0, 0.0, 0.0, 200.0, 2e30, torch.inf, torch.nan], dtype=dtype)
    torch.testing.assert_close(y, expected, equal_nan=True, rtol=1e-2, atol=1e-6)


# --- who does it ----------------------------------------------------------------------------------


def called(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """Every call of one of them from now on."""
    calls, run = [], getattr(small_batch_ops, name)
    monkeypatch.setattr(small_batch_ops, name, lambda *args: (calls.append(name), run(*args))[1])
    return calls


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["rms", "offset"])
def test_a_norm_of_a_few_tokens_is_one_call(monkeypatch, kind, dtype):
    norm, x, calls = (
        NormLayer(NormSpec(kind, eps=1e-3), 48).to(dtype),
        random_tensor(0, 4, 1, 48, dtype=dtype),
        called(monkeypatch, "rms_norm"),
    )
    with torch.no_grad():
        norm.get_parameter("weight").copy_(random_tensor(1, 48, dtype=dtype))
        y = norm(x)
    again = norm(x)
    assert calls == ["rms_norm"]
    torch.testing.assert_close(
        y, again.detach(), rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
    )


def test_turns_of_a_few_tokens_are_two_calls(monkeypatch):
    calls = called(monkeypatch, "apply_rotary")
    layer = hw.Attention(
        hw.design(model=64, heads=2, kv=1, modifiers=(Rotary(),), pattern="causal()")
    )
    x, cache = random_tensor(0, 3, 5, 64), layer.cache(batch=3, capacity=8)
    whole = layer(x).detach()
    assert not calls
    with torch.no_grad():
        steps = [layer(x[:, t : t + 1], cache=cache) for t in range(5)]
    assert len(calls) == 10
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "turn", [Rotary(pairs="interleaved"), Rotary(dims=16)], ids=["interleaved", "narrow"]
)
def test_other_turns_are_for_torch(monkeypatch, turn):
    calls = called(monkeypatch, "apply_rotary")
    layer = hw.Attention(hw.design(model=64, heads=2, modifiers=(turn,)))
    with torch.no_grad():
        layer(random_tensor(0, 1, 3, 64))
    assert not calls


def test_a_gated_feed_of_a_few_tokens_gates_in_one_call(monkeypatch):
    calls, x = called(monkeypatch, "silu_and_multiply"), random_tensor(0, 2, 1, 32)
    feed = FeedForward(FeedForwardSpec(48, form="gated", activation="silu"), 32)
    with torch.no_grad():
        y = feed(x)
    assert calls == ["silu_and_multiply"]
    gate, up, down = (feed.get_parameter(name).detach() for name in ("gate", "up", "down"))
    torch.testing.assert_close(y, (F.silu(x @ gate.T) * (x @ up.T)) @ down.T, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "x",
    [
        random_tensor(0, 1, takeover.least("elementwise") + 16),
        random_tensor(0, 1, 24),
        random_tensor(0, 1, 32).double(),
        random_tensor(0, 32, 16).T,
        random_tensor(0, 0, 32),
    ],
    ids=["many", "width", "double", "turned", "none"],
)
def test_all_other_calls_run_in_torch(x):
    with torch.no_grad():
        assert not small_batch_ops.is_small_batch(x)
        assert small_batch_ops.is_small_batch(random_tensor(0, 1, takeover.least("elementwise")))
        assert not small_batch_ops.is_small_batch(
            random_tensor(0, 1, 32), random_tensor(0, 32).double()
        )


def test_dispatch_modes_see_the_operation():
    """Gradients, graphs, transformations, modes and profilers: none of them is passed by."""
    x, w = random_tensor(0, 2, 16), random_tensor(1, 3, 16)
    assert not can_skip_dispatcher(x)
    with torch.no_grad():
        assert can_skip_dispatcher(x, torch.nn.Parameter(w))
        assert not can_skip_dispatcher(x.to("meta"))
        assert not can_skip_dispatcher(torch.nn.Buffer(x).as_subclass(Followed))
        assert not torch.func.vmap(lambda row: torch.tensor(can_skip_dispatcher(row)))(x).any()
        with FlopCounterMode(display=False) as counted:
            assert not can_skip_dispatcher(x)
            multiply_small_batch(x, [w])
            q, k = x.view(2, 1, 16), random_tensor(2, 2, 1, 5, 16)
            attend_paged(q, k, k, None, scale=1.0)
        assert counted.get_total_flops() == 2 * 2 * 16 * 3 + 4 * 2 * 5 * 16
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            assert not can_skip_dispatcher(x)
            multiply_small_batch(x, [w])
        assert "headwise::small_batch_matmul" in {event.name for event in recorded.events() or ()}
        assert can_skip_dispatcher(x)


class Followed(Tensor):
    """A tensor with a mind of its own."""
