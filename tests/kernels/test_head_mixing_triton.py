"""The Triton kernels of mixed heads against the formula, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.kernels import head_mixing, head_mixing_triton, triton_support
from kernels.triton_cases import DEVICE, NEEDS_TRITON, MixedHeads
from support.layer_cases import check_close

pytestmark = [pytest.mark.triton, *NEEDS_TRITON]
CASES = {
    "both sides": lambda: MixedHeads((2, 4, 5, 65), (2, 2)),
    "queries, two groups": lambda: MixedHeads((1, 6, 17, 33), (1, 0), groups=2),
    "keys, fewer outputs": lambda: MixedHeads((1, 4, 3, 17), (0, 3), own=(2, 0, 3)),
    "ranks that differ": lambda: MixedHeads((2, 4, 35, 130), (3, 2), groups=2),
    "an output twice": lambda: MixedHeads((1, 3, 16, 64), (1, 1), own=(1, 2, 1, 0)),
    "one pair": lambda: MixedHeads((1, 1, 1, 1), (4, 1)),
}


def formula(mixed: MixedHeads, tensors: list[Tensor]) -> Tensor:
    """The formula of the module `head_mixing`, one output at a time."""
    a, q_source, q_target, q_gate, k_source, k_target, k_gate = tensors
    size = mixed.heads_per_group
    outputs: list[Tensor] = []
    for number, own in enumerate(mixed.own.tolist()):
        group = number // size if size < a.shape[1] else 0
        heads = range(group * size, (group + 1) * size)
        total = a[:, own] * q_gate[:, :, number, None]
        if k_gate.shape[1]:
            total = total + a[:, own] * k_gate[:, 0, number, None]
        for rank in range(q_source.shape[2]):
            summed = sum(a[:, head] * q_source[:, :, rank, head, None] for head in heads)
            total = total + summed * q_target[:, :, rank, number, None]
        for rank in range(k_source.shape[1]):
            summed = sum(a[:, head] * k_source[:, rank, head, None] for head in heads)
            total = total + summed * k_target[:, rank, number, None]
        outputs.append(total)
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 4e-3)], ids=str
)
def test_heads_and_gradients_equal_the_formula(case: str, dtype: torch.dtype, tolerance: float):
    torch.manual_seed(0)
    mixed = CASES[case]()
    tensors = [one.to(dtype).double().requires_grad_() for one in mixed.tensors]
    mixed.grad = mixed.grad.to(dtype).double()
    wanted = formula(mixed, tensors)
    gradients = torch.autograd.grad(wanted, tensors, mixed.grad, allow_unused=True)
    found = head_mixing_triton.mix_heads(*mixed.arguments(dtype))
    pairs = [(found, wanted), *zip(mixed.backward(dtype), gradients, strict=True)]
    for one, other in pairs:
        if other is not None and other.numel():
            assert one.dtype == dtype
            assert one.shape == other.shape
            error = (one.cpu().double() - other).abs().max()
            assert error <= tolerance * other.abs().max()


def test_strides_of_heads_and_gradients_do_not_matter():
    mixed = MixedHeads((2, 4, 5, 20), (2, 2))
    a, own, size, factors = mixed.arguments(torch.float32)
    grad = mixed.grad.to(DEVICE, torch.float32)
    strided = [one.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) for one in (a, grad)]
    found = head_mixing_triton.mix_heads_backward(strided[1], strided[0], own, size, factors)
    wanted = head_mixing_triton.mix_heads_backward(grad, a, own, size, factors)
    assert all(map(torch.equal, found, wanted))


def test_a_layer_mixes_its_heads_by_the_kernel(monkeypatch: pytest.MonkeyPatch):
    """With the operation of GPUs in place of that of CPUs, and the interpreter's device."""
    monkeypatch.setattr(triton_support, "DEVICES", {"cuda", DEVICE})
    layer = hw.Attention(hw.design(preset="dcmha", model=16, heads=4, pattern="causal"))
    layer = layer.to(DEVICE)
    x = torch.randn(2, 20, 16, device=DEVICE)
    with torch.no_grad():
        monkeypatch.setattr(head_mixing, "can_mix", lambda a, rank: False)
        wanted = layer(x)
        calls: list[int] = []

        def mix(*arguments: Any) -> Tensor:
            calls.append(1)
            return head_mixing_triton.mix_heads(*arguments)

        monkeypatch.setattr(head_mixing, "can_mix", head_mixing_triton.can_mix)
        monkeypatch.setattr(head_mixing, "mix_heads_by_factors", mix)
        check_close(layer(x), wanted, rtol=1e-5, atol=1e-6)
    assert len(calls) == 2  # scores and weights


def test_tensors_of_two_devices_are_refused():
    a, own, size, factors = MixedHeads((1, 2, 3, 4), (1, 1)).arguments(torch.float32)
    factors[1] = factors[1].to("meta")
    with pytest.raises(ValueError, match=r"q_target \[1, 3, 1, 2\] is on meta; give a tensor on"):
        head_mixing._check_operands(a, own, size, factors, None)
