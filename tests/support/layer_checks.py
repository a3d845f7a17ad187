"""Checks of one layer: FLOPs counted by torch, cached decode, gradients and saved tensors."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop


def flash_on_cpu(q, k, v, *args, out_shape=None, **kwargs):
    """FLOPs of flash attention on the CPU, for which FlopCounterMode has no entry and counts zero."""
    return sdpa_flop(q, k, v)


MAPPING = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: flash_on_cpu}


def torch_flops(layer, x, **call) -> int:
    """FLOPs of a call as counted by torch's FlopCounterMode."""
    with FlopCounterMode(display=False, custom_mapping=MAPPING) as counter, torch.no_grad():
        layer(x, **call)
    return counter.get_total_flops()


def decode_in_chunks(layer, x, chunks, cache, **call):
    """Output of a layer whose input arrives in chunks through a cache."""
    parts, start = [], 0
    for count in chunks:
        parts.append(layer(x[:, start : start + count], cache=cache, **call))
        start += count
    return torch.cat(parts, 1)


def layer_gradients(layer, y, x):
    """Gradients of x and every parameter under a loss that weights every output differently."""
    loss = (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)).sum()
    named = dict(layer.named_parameters()) | {"x": x}
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {n: torch.zeros_like(named[n]) if g is None else g for n, g in zip(named, grads, strict=True)}


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
