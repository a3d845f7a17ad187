"""The choice of a path goes by the crossovers of the class of machine."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.attention.backends import CallSignature, CoreDispatch, make_dispatch
from headwise.kernels.capabilities import (
    FROM_ANY_CLASS,
    MACHINE_CLASSES,
    MEASURED_ON,
    assume_points,
    points_of_class,
)
from headwise.kernels.linear import linear, uses_gemv_kernel
from support.layer_cases import check_close

PLAIN = hw.design(model=64, heads=4, pattern="causal")


# --- the table ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in MACHINE_CLASSES if name not in MEASURED_ON])
def test_where_nobody_measured_no_kernel_is_preferred(name: str):
    points = points_of_class(name)
    assert points.measured == frozenset(FROM_ANY_CLASS)
    assert points.sizes["flash_cpu"] == math.inf
    assert points.sizes["gemm_tokens_float32"] == points.sizes["bf16_matmul_gradients"] == 0
    with assume_points(points):
        for dtype in ("fp32", "bf16"):
            for tokens in (20, 5000):
                assert hw.why(PLAIN, tokens=tokens, dtype=dtype).backend == "sdpa"
                assert hw.why(PLAIN, tokens=tokens, dtype=dtype, when=["grad"]).backend == "sdpa"
        assert (
            hw.why(PLAIN, tokens="one").backend
            == hw.why(PLAIN, tokens=hw.costs.CallSize(64, 1, 1, 9000)).backend
            == "sdpa"
        )
        refusal = hw.why(PLAIN).reasons_against["flash_cpu"]
        assert refusal == [f"not measured on this class of machine ({name})"]
        assert hw.why(PLAIN).backend == "sdpa"
        assert f"{name}: not measured" in " ".join(str(hw.why(PLAIN)).split())


def test_one_thread_has_sizes_of_its_own():
    sizes = [
        points_of_class("x86-avx512-bf16", threads).sizes["gemv_float32"]
        for threads in (None, 1, 2)
    ]
    assert sizes == [1572864, 4194304, 1572864]
    x, w = torch.randn(1, 512), torch.randn(1024, 512)
    with torch.no_grad():
        with assume_points(points_of_class("x86-avx512-bf16", 1)):
            assert not uses_gemv_kernel(x, [w])
            plain = linear(x, w)
        with assume_points(points_of_class("x86-avx512-bf16", 2)):
            assert uses_gemv_kernel(x, [w])
            check_close(linear(x, w), plain, rtol=1e-4, atol=1e-4)


# --- choices by class -----------------------------------------------------------------------------


def test_products_in_bf16_need_the_instructions():
    """On processors without bf16 instructions torch's fused call was measured
    to be twice as fast.
    """
    chosen = {}
    for name in ("x86-avx512", "x86-avx512-bf16"):
        with assume_points(points_of_class(name)):
            chosen[name] = [
                hw.why(PLAIN, tokens=1024, dtype="bf16", when=when).backend
                for when in ([], ["grad"])
            ]
            if name == "x86-avx512":
                [reason] = hw.why(PLAIN, tokens=1024, dtype="bf16").reasons_against["bf16_matmul"]
                assert (
                    reason
                    == "torch's fused call takes less time on this class of machine (x86-avx512)"
                )
    assert chosen == {
        "x86-avx512": ["sdpa", "sdpa"],
        "x86-avx512-bf16": ["bf16_matmul", "bf16_matmul"],
    }


def test_a_point_up_to_which_products_are_faster():
    """With AMX, torch's fused bfloat16 call is faster from some hundred keys on, and forward passes
    at every length.
    """
    with assume_points(points_of_class("x86-amx", 2)):
        few, many = (
            hw.why(PLAIN, tokens=tokens, dtype="bf16", when=["grad"]) for tokens in (300, 1024)
        )
        assert hw.why(PLAIN, tokens=300, dtype="bf16").backend == "sdpa"
    assert (few.backend, many.backend) == ("bf16_matmul", "sdpa")
    assert few.call.length_ranges[-2:] == [(0, "bf16_matmul"), (328, "sdpa")]
    [reason] = many.reasons_against["bf16_matmul"]
    assert reason == "torch's fused call takes less time above 327 keys; this call has 1,024"


def test_a_layer_made_on_one_class_runs_by_the_points_of_the_call(
    monkeypatch: pytest.MonkeyPatch,
):
    """A plan that a layer keeps does not freeze the choice."""
    layer = hw.Attention(PLAIN).bfloat16().eval()
    x = torch.randn(1, 40, 64).bfloat16()
    ran: list[str] = []
    select = CoreDispatch.select

    def record(self: CoreDispatch, *args: Any) -> str:
        ran.append(select(self, *args))
        return ran[-1]

    monkeypatch.setattr(CoreDispatch, "select", record)
    outputs = []
    with torch.no_grad():
        for name in ("x86-avx512-bf16", "x86-avx512", "x86-avx512-bf16"):
            with assume_points(points_of_class(name)):
                outputs.append(layer(x).float())
    assert ran == ["bf16_matmul", "sdpa", "bf16_matmul"]
    assert torch.equal(outputs[0], outputs[2])
    check_close(outputs[0], outputs[1], rtol=2e-2, atol=2e-2)  # rounding of bfloat16


def test_few_tokens_go_to_torch_where_its_product_was_faster():
    x, w = torch.randn(2, 1024), torch.randn(1024, 1024)
    with torch.no_grad():
        with assume_points(points_of_class("x86-avx512")):
            assert not uses_gemv_kernel(x, [w])
            plain = linear(x, w)
        with assume_points(points_of_class("x86-avx512-bf16")):
            assert uses_gemv_kernel(x, [w])
            check_close(linear(x, w), plain, rtol=1e-4, atol=1e-4)
        assert torch.equal(plain, torch.nn.functional.linear(x, w))


@pytest.mark.parametrize("preset", ["mha", "gqa", "moh", "longformer", "linear", "diff2"])
@pytest.mark.parametrize("name", ["x86-avx2", "x86-avx512", "aarch64"])
def test_results_do_not_depend_on_the_choice(preset: str, name: str):
    layer = hw.Attention(hw.design(preset=preset, model=64, heads=4)).eval()
    own = points_of_class("x86-avx512-bf16").with_sizes(flash_cpu=0, routed=0, block_sparse=0)
    x, outputs, grads = torch.randn(2, 70, 64), [], []
    for points in (own, points_of_class(name)):
        with assume_points(points):
            y = layer(x)
            outputs.append(y.detach())
            grads.append(
                torch.autograd.grad(y.square().sum(), list(layer.parameters()), allow_unused=True)
            )
    check_close(*outputs, rtol=1e-4, atol=1e-5)
    for one, other in zip(*grads, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            check_close(one, other, rtol=1e-3, atol=1e-3)


def test_compiled_graphs_leave_out_what_is_never_preferred():
    call = CallSignature(PLAIN, PLAIN.core, is_compiling=True)
    size = hw.costs.CallSize(1, 5, 5, 5)
    assert make_dispatch(call).select_for_size(size) == "flash_cpu"  # at every length
    with assume_points(points_of_class("aarch64")):
        assert make_dispatch(call).select_for_size(size) == "sdpa"
        # named by the caller
        assert make_dispatch(call, "flash_cpu").select_for_size(size) == "flash_cpu"


@pytest.mark.compile
def test_a_compiled_layer_runs_by_the_points():
    layer, x = hw.Attention(PLAIN).eval(), torch.randn(1, 70, 64)
    with torch.no_grad(), assume_points(points_of_class("x86-avx2")):
        expected = layer(x)
        compiled = torch.compile(layer, fullgraph=True)
        check_close(compiled(x), expected, rtol=1e-4, atol=1e-5)
