"""The Triton kernels of attention by open queries, against the definition in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import headwise as hw
from headwise.attention.backends import CallSignature, routed_heads
from headwise.attention.interfaces.core_types import CallSize
from headwise.kernels import open_query_attention, triton_support
from kernels.triton_cases import DEVICE, NEEDS_TRITON, OpenQueries
from support.layer_cases import check_close

pytestmark = [pytest.mark.triton, *NEEDS_TRITON]
CASES = {
    "causal, two heads to a key": lambda: OpenQueries((2, 70, 70, 4, 2), (24, 16), 0.5),
    "behind a cache": lambda: OpenQueries((1, 33, 50, 3, 1), (16, 40), 0.3, ahead=17),
    "all keys": lambda: OpenQueries((1, 65, 80, 2, 2), (20, 20), 0.7, ahead=80),
    "all open": lambda: OpenQueries((2, 40, 40, 2, 1), (8, 8), 1.1),
    "all closed": lambda: OpenQueries((1, 20, 20, 2, 1), (8, 8), 0.0),
    "wide": lambda: OpenQueries((1, 37, 37, 2, 2), (70, 64), 0.5),
    "one query": lambda: OpenQueries((1, 1, 1, 1, 1), (3, 1), 1.1),
}


def definition(case: OpenQueries, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax over the keys up to `ahead` after each query; zeros for closed queries."""
    group = q.shape[2] // k.shape[2]
    rows = []
    for t in range(q.shape[1]):
        end = min(t + case.ahead + 1, k.shape[1])
        own = (one[:, :end].repeat_interleave(group, 2) for one in (k, v))
        keys, values = own
        scores = (q[:, t, None] * keys).sum(-1) * case.scale
        weights = scores.exp() / scores.exp().sum(1, keepdim=True)
        rows.append((weights[..., None] * values).sum(1))
    return torch.stack(rows, 1) * case.opened[..., None]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 2e-3)], ids=str
)
def test_outputs_and_gradients_equal_the_definition(
    name: str, dtype: torch.dtype, tolerance: float
):
    torch.manual_seed(0)
    case = CASES[name]()
    if name == "wide" and dtype == torch.float32:
        pytest.skip("float32 has kernels for heads of up to 64 channels")
    tensors = [one.to(dtype).double().requires_grad_() for one in case.tensors]
    grad = case.grad.to(dtype).double()
    wanted = definition(case, *tensors)
    gradients = torch.autograd.grad(wanted, tensors, grad)
    for found, exact in zip(case.run(dtype), (wanted.detach(), *gradients), strict=True):
        assert found.dtype == dtype
        error = (found.cpu().double() - exact).abs().max()
        assert error <= tolerance * max(1.0, float(exact.abs().max()))


def test_strides_do_not_matter():
    case = OpenQueries((2, 40, 40, 4, 2), (16, 16), 0.5)
    wanted = case.run(torch.float32)
    case.tensors = [one.transpose(1, 2).contiguous().transpose(1, 2) for one in case.tensors]
    case.grad = case.grad.transpose(1, 2).contiguous().transpose(1, 2)
    case.opened = case.opened.mT.contiguous().mT
    assert all(map(torch.equal, case.run(torch.float32), wanted))


MOH = hw.design(preset="moh", model=32, heads=4, pattern="causal")


@pytest.fixture
def layer_on_gpu(monkeypatch: pytest.MonkeyPatch) -> hw.Attention:
    """A layer whose router closes heads, and the interpreter's device in place of a GPU."""
    monkeypatch.setattr(triton_support, "DEVICES", {"cuda", DEVICE})
    torch.manual_seed(0)
    return hw.Attention(MOH, backend="routed").to(DEVICE)


def run(layer: hw.Attention, x: Tensor, **options: Any) -> list[Tensor]:
    """Outputs of a layer, and gradients of its inputs and weights."""
    x = x.clone().requires_grad_()
    y = layer(x, **options)
    grads = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()], allow_unused=True)
    return [y, *(one for one in grads if one is not None)]


def test_a_layer_skips_its_closed_heads(
    layer_on_gpu: hw.Attention, monkeypatch: pytest.MonkeyPatch
):
    dense = hw.Attention(MOH, backend="dense").to(DEVICE)
    dense.load_state_dict(layer_on_gpu.state_dict())
    calls: list[Tensor] = []
    attend = open_query_attention.attend

    def record(*arguments: Any) -> Any:
        calls.append(arguments[3])
        return attend(*arguments)

    monkeypatch.setattr(open_query_attention, "attend", record)
    x = torch.randn(2, 40, 32, device=DEVICE)
    for found, wanted in zip(run(layer_on_gpu, x), run(dense, x), strict=True):
        check_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert len(calls) == 1
    assert 0 < float(calls[0].float().mean()) < 1


def test_padding_behind_texts_is_skipped(layer_on_gpu: hw.Attention):
    x = torch.randn(2, 40, 32, device=DEVICE)
    with torch.no_grad():
        y = layer_on_gpu(x, sequence=hw.SequenceInfo.from_batch(x, lengths=[40, 23]))
        check_close(y[1, :23], layer_on_gpu(x[1:, :23])[0], rtol=1e-4, atol=1e-6)
    assert not y[1, 23:].any()


def test_prefill_behind_a_cache(layer_on_gpu: hw.Attention):
    x = torch.randn(1, 30, 32, device=DEVICE)
    with torch.no_grad():
        cache = layer_on_gpu.cache(batch=1, capacity=30)
        parts = [layer_on_gpu(x[:, own], cache=cache) for own in (slice(20), slice(20, 30))]
        check_close(torch.cat(parts, 1), layer_on_gpu(x), rtol=1e-4, atol=1e-6)


def test_counted_flops_are_those_of_the_expected_open_queries(layer_on_gpu: hw.Attention):
    """The backward pass has 7 products of a score's size, the forward pass 2."""
    with FlopCounterMode(display=False) as counter:
        layer_on_gpu(torch.randn(2, 40, 32, device=DEVICE)).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    call = CallSignature(MOH, MOH.core, grad_enabled=True)
    expected = routed_heads.executed_flops(call, CallSize(2, 40, 0, 40))
    assert counts[torch.ops.headwise.open_query_attention] == expected
    assert counts[torch.ops.headwise.open_query_attention_backward] == 7 * expected // 2


def test_masks_and_dtypes_without_a_kernel_are_refused(layer_on_gpu: hw.Attention):
    x = torch.randn(1, 20, 32, device=DEVICE)
    texts = hw.SequenceInfo.from_batch(x, lengths=[12], pad="left")
    with pytest.raises(
        hw.NoBackend, match="needs a full or causal mask, and padding only behind causal texts"
    ):
        layer_on_gpu(x, sequence=texts)
    layer = hw.Attention(MOH, backend="routed").to(DEVICE, torch.float64)
    with pytest.raises(hw.NoBackend, match="does not support float64 on"):
        layer(x.double())
    wide = hw.design(preset="moh", model=256, heads=2, pattern="causal")
    with pytest.raises(hw.NoBackend, match="needs heads of at most 64 channels in float32"):
        hw.Attention(wide, backend="routed").to(DEVICE)(torch.randn(1, 20, 256, device=DEVICE))
