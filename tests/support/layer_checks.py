"""Checks of one layer: those of `part_checks` as assertions, and the bytes that autograd saves."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from headwise.costs.part_checks import (
    CheckResult,
    Comparison,
    count_torch_flops as torch_flops,
    decode_in_chunks,
    layer_gradients,
)

__all__ = ["check_comparisons", "decode_in_chunks", "layer_gradients", "saved_bytes", "torch_flops"]


def check_comparisons(comparisons: Iterable[Comparison]) -> None:
    """Assert that the two values of every comparison are equal, and that there is one."""
    result = CheckResult("", "")
    for comparison in comparisons:
        result.compare(*comparison)
    assert result.outcome == "passed", "\n".join(result.failures)


def saved_bytes(layer, count: int) -> int:
    """Bytes that autograd saves in one forward pass, each storage counted once."""
    x = torch.randn(1, count, layer.spec.model, requires_grad=True)
    bytes_by_storage: dict[int, int] = {}

    def record(tensor):
        bytes_by_storage[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        y = layer(x)
    assert y.requires_grad
    return sum(bytes_by_storage.values())
