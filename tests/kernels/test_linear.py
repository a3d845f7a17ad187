"""Linear maps, against float64, and their dispatch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import headwise as hw
from headwise.kernels import linear as linear_ops, multiply_small_batch
from headwise.kernels.linear import GEMV_STEP, linear, linear_many, uses_gemv_kernel
from headwise.models.feed_forward import FeedForward
from headwise.models.model_spec import FeedForwardSpec
from support import crossover

WIDTHS = (16, GEMV_STEP, GEMV_STEP + 16, 24 * GEMV_STEP, 24 * GEMV_STEP + 16, 73 * GEMV_STEP + 16)
ROWS = (1, 63, 64, 65, 131, 2)
EPS = {torch.float32: 2e-6, torch.bfloat16: 2**-8}


def random_tensor(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check_product(y: Tensor, x: Tensor, matrices: list[Tensor], eps: float) -> None:
    truth = torch.cat([x.double() @ w.double().T for w in matrices], 1)
    size = torch.cat([x.double().abs() @ w.double().abs().T for w in matrices], 1)
    assert y.dtype == x.dtype
    assert ((y.double() - truth).abs() <= eps * (truth.abs() + size / 16)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_number_is_the_sum_of_its_products(width, dtype):
    for tokens in range(1, 10):
        x = random_tensor(tokens, tokens, width, dtype=dtype)
        matrices = [random_tensor(n, rows, width, dtype=dtype) for n, rows in enumerate(ROWS)]
        check_product(multiply_small_batch(x, matrices), x, matrices, EPS[dtype])


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(1, 60),
    st.lists(st.integers(1, 200), min_size=1, max_size=4),
    st.booleans(),
)
def test_any_shape_is_its_product(tokens, lanes, rows, single):
    dtype = torch.float32 if single else torch.bfloat16
    x = random_tensor(0, tokens, 16 * lanes, dtype=dtype)
    matrices = [random_tensor(n, count, 16 * lanes, dtype=dtype) for n, count in enumerate(rows)]
    check_product(multiply_small_batch(x, matrices), x, matrices, EPS[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_does_not_see_those_beside_it_nor_the_threads(dtype):
    x, w = (
        random_tensor(0, 7, 1040, dtype=dtype),
        [random_tensor(1, 131, 1040, dtype=dtype), random_tensor(2, 67, 1040, dtype=dtype)],
    )
    together, threads = multiply_small_batch(x, w), torch.get_num_threads()
    alone = torch.cat([multiply_small_batch(x[n : n + 1], w) for n in range(7)])
    assert torch.equal(together, alone)
    try:
        torch.set_num_threads(3)
        assert torch.equal(multiply_small_batch(x, w), together)
    finally:
        torch.set_num_threads(threads)


def test_tokens_are_multiplied_in_passes_that_leave_no_trace():
    """Packed tokens fill half of the second-level cache; more of them are multiplied in several
    passes.
    """
    count = 2 * linear_ops._tokens_per_pass(4096) + 3
    x, w = random_tensor(0, count, 4096), random_tensor(1, 9, 4096)
    together = multiply_small_batch(x, [w])
    check_product(together, x, [w], EPS[torch.float32])
    for row in (0, count // 2, count - 1):
        assert torch.equal(multiply_small_batch(x[row : row + 1], [w]), together[row : row + 1])


def test_memory_around_the_result_is_untouched():
    """Four rows are read at once: where fewer are left, no others are, and nothing beyond them is
    written.
    """
    for rows in range(1, 10):
        around = random_tensor(1, rows + 6, 48)
        w = around[:rows]
        clean = multiply_small_batch(x := random_tensor(0, 3, 48), [w, w])
        around[rows:] = torch.nan
        assert torch.equal(multiply_small_batch(x, [w, w]), clean)
        assert torch.equal(clean[:, :rows], clean[:, rows:])


def test_results_are_rounded_as_in_torch():
    """bfloat16: to the nearest, between two to the even one; NaN stays NaN, and what is too large
    is infinite.
    """
    low, step = (
        torch.tensor([1.0, 1.0, -3.0, 0.0]),
        torch.tensor([2**-8, 3 * 2**-8, 2**-7, 2.0**-133]),
    )
    x = torch.zeros(4, 16, dtype=torch.bfloat16)
    x[:, 0], x[:, 1], x[:, 2] = low, step, torch.tensor([0.0, 2**-9, -(2**-9), 0.0])
    w = torch.ones(5, 16, dtype=torch.bfloat16)
    assert torch.equal(multiply_small_batch(x, [w]), (x.float() @ w.float().T).bfloat16())
    x[1, 5], x[2, 3] = torch.nan, 3e38
    x[2, 4] = 3e38
    torch.testing.assert_close(
        multiply_small_batch(x, [w]),
        (x.float() @ w.float().T).bfloat16(),
        equal_nan=True,
        rtol=0,
        atol=0,
    )


def test_gradients_are_those_of_the_product():
    x, w = (
        random_tensor(0, 3, 48).requires_grad_(),
        [random_tensor(n, 5 + n, 48).requires_grad_() for n in (1, 2)],
    )
    result = random_tensor(9, 3, 13)
    ours = torch.autograd.grad(multiply_small_batch(x, w), [x, *w], result)
    theirs = torch.autograd.grad(torch.cat([F.linear(x, one) for one in w], 1), [x, *w], result)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_torch_knows_its_shape_and_flops():
    x, w = random_tensor(0, 3, 48), [random_tensor(1, 5, 48), random_tensor(2, 7, 48)]
    op = torch.ops.headwise.small_batch_matmul.default
    torch.library.opcheck(op, (x, w), test_utils=("test_schema", "test_faketensor"))
    with FlopCounterMode(display=False) as counted:
        multiply_small_batch(x, w)
    assert counted.get_total_flops() == 2 * 3 * 48 * 12


# --- who takes what -------------------------------------------------------------------------------


WIDE = 1024
TALL, MOST = crossover.least("gemv_float32") // (4 * WIDE), crossover.least("gemm_tokens_float32")
FLAT = crossover.least("gemm_float32") // (4 * WIDE)


def test_few_tokens_and_much_to_read_are_for_the_kernel():
    w = random_tensor(0, TALL, WIDE)
    with torch.no_grad():
        assert uses_gemv_kernel(random_tensor(1, MOST, 1, WIDE), [w])
        assert uses_gemv_kernel(random_tensor(1, 1, WIDE), [w[: TALL // 2], w[TALL // 2 :]])
        assert uses_gemv_kernel(random_tensor(1, 2, WIDE), [w[:FLAT]])


@pytest.mark.parametrize(
    ("x", "w"),
    [
        (random_tensor(1, MOST + 1, WIDE), random_tensor(0, TALL, WIDE)),
        (random_tensor(1, 1, WIDE), random_tensor(0, TALL - 1, WIDE)),
        (random_tensor(1, 2, WIDE), random_tensor(0, FLAT - 1, WIDE)),
        (random_tensor(1, 0, WIDE), random_tensor(0, TALL, WIDE)),
        (random_tensor(1, 1, WIDE + 8), random_tensor(0, TALL, WIDE + 8)),
        (random_tensor(1, 1, WIDE), random_tensor(0, WIDE, TALL).T),
        (random_tensor(1, 1, WIDE).double(), random_tensor(0, TALL, WIDE).double()),
        (random_tensor(1, 1, WIDE), random_tensor(0, 2 * TALL, WIDE).bfloat16()),
    ],
    ids=["tokens", "small", "few-small", "none", "width", "turned", "double", "mixed"],
)
def test_all_other_calls_run_in_torch(x, w):
    with torch.no_grad():
        assert not uses_gemv_kernel(x, [w])


def test_gradients_and_autocast_are_for_torch():
    x, w = random_tensor(1, 1, WIDE), random_tensor(0, TALL, WIDE)
    assert not uses_gemv_kernel(x, [w])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert not uses_gemv_kernel(x, [w])
        assert linear(x, w).dtype == torch.bfloat16


def test_a_gated_feed_meets_its_input_once(monkeypatch):
    feed = FeedForward(FeedForwardSpec(TALL, "silu", form="gated"), WIDE)
    recorded: list[int] = []

    def counting(x: Tensor, weights: list[Tensor]) -> Tensor:
        recorded.append(len(weights))
        return multiply_small_batch(x, weights)

    monkeypatch.setattr(linear_ops, "multiply_small_batch", counting)
    x = random_tensor(3, 2, 1, WIDE)
    with torch.no_grad():
        y = feed(x)
        gate, up = F.linear(x, feed.gate), F.linear(x, feed.up)
        torch.testing.assert_close(y, F.linear(F.silu(gate) * up, feed.down), rtol=1e-4, atol=1e-5)
    assert recorded == [2, 1]


def test_without_numba_torch_does_all(monkeypatch):
    monkeypatch.setattr(linear_ops.GEMV_KERNELS, "is_usable", lambda dtype: False)
    with torch.no_grad():
        assert not uses_gemv_kernel(random_tensor(1, 1, WIDE), [random_tensor(0, TALL, WIDE)])


def test_changed_weights_are_read():
    """Matrices are read as they lie: written to in place, behind autograd's back, or replaced."""
    net = torch.nn.Linear(WIDE, TALL, bias=False)
    x = random_tensor(1, 2, WIDE)
    with torch.no_grad():
        before = linear(x, net.weight)
        net.weight.data.mul_(2)
        torch.testing.assert_close(linear(x, net.weight), 2 * before)
        net.load_state_dict({"weight": torch.zeros(TALL, WIDE)})
        assert not linear(x, net.weight).any()


def test_a_bias_is_added_and_views_are_those_of_each_matrix():
    x, w = random_tensor(1, 2, 2, WIDE), [random_tensor(0, TALL, WIDE), random_tensor(2, 3, WIDE)]
    bias = random_tensor(3, TALL)
    with torch.no_grad():
        torch.testing.assert_close(
            linear(x, w[0], bias), F.linear(x, w[0], bias), rtol=1e-4, atol=1e-4
        )
        for y, one in zip(linear_many(x, w), w, strict=True):
            torch.testing.assert_close(y, F.linear(x, one), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_of_a_model_whose_matrices_are_large_are_one_pass(dtype):
    config = {
        "model_type": "llama",
        "hidden_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 1040,
        "vocab_size": 1100,
        "max_position_embeddings": 64,
    }
    net = hw.build(hw.families.read_model_spec(config), seed=0).to(dtype).eval()
    ids = torch.randint(1100, (3, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole, cache = net(ids), net.cache(batch=3, capacity=16)
        steps = [net(ids[:, t : t + 1], cache=cache) for t in range(9)]
        truth = hw.build(hw.families.read_model_spec(config), seed=0).to(dtype).double().eval()(ids)
    off, theirs = (torch.cat(steps, 1) - truth).abs().max(), (whole - truth).abs().max()
    assert off <= 2 * theirs + 1e-6


def test_matrices_that_are_converted_anyway_are_one_product():
    x, w = (
        random_tensor(0, 2, 9, 48).requires_grad_(),
        [random_tensor(n, 5 + n, 48).requires_grad_() for n in (1, 2, 3)],
    )
    values = [random_tensor(9 + n, 2, 9, 5 + n).bfloat16() for n in (1, 2, 3)]
    found = []
    for way in (lambda: linear_many(x, w), lambda: [F.linear(x, one) for one in w]):
        with torch.autocast("cpu", torch.bfloat16):
            y = way()
        found.append([*y, *torch.autograd.grad(list(y), [x, *w], values)])
    assert len({y.untyped_storage().data_ptr() for y in found[0][:3]}) == 1
    for ours, theirs in zip(*found, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2 * theirs.abs().max().item())


@pytest.mark.parametrize("frozen", [0, 1])
def test_other_linears_are_not_joined(frozen):
    x, w = (
        random_tensor(0, 9, 48),
        [random_tensor(n, 7, 48).requires_grad_(n > frozen) for n in (1, 2)],
    )
    assert not linear_ops.should_concatenate(x, w)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear_ops.should_concatenate(x, w) == (not frozen)
        with torch.no_grad():
            assert not linear_ops.should_concatenate(x, w)


@pytest.mark.parametrize("modifiers", [(), (hw.parts.Rotary(),)], ids=["plain", "turned"])
def test_a_layer_in_mixed_precision_learns_the_same_and_keeps_no_more(modifiers, monkeypatch):
    layer = hw.Attention(hw.design(model=32, heads=4, kv=2, pattern="causal", modifiers=modifiers))
    x, found = random_tensor(0, 3, 64, 32).requires_grad_(), []
    for joined in (True, False):
        if not joined:
            monkeypatch.setattr(linear_ops, "should_concatenate", lambda *args: False)
        recorded = {}

        def keep(tensor, tensors=recorded):
            tensors[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with (
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
            torch.autocast("cpu", torch.bfloat16),
        ):
            y = layer(x)
        result = sum(tensor.untyped_storage().nbytes() for tensor in recorded.values())
        found.append(
            (result, [y, *torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y))])
        )
    assert found[0][0] <= found[1][0]
    for ours, theirs in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=3e-2, atol=3e-2 * theirs.abs().max().item())
