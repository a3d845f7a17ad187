"""Measures of one layer: FLOPs counted by torch, decoding with a cache in chunks, and gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop

from ..cache import KVCache
from ..nn.attention import Attention


def _flash_flops_on_cpu(q: Any, k: Any, v: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """FLOPs of flash attention on the CPU, for which FlopCounterMode has no entry and counts zero."""
    return sdpa_flop(q, k, v)


FLOP_FORMULAS = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _flash_flops_on_cpu}


def count_torch_flops(layer: Attention, x: Tensor, **call: Any) -> int:
    """FLOPs of a call as counted by torch's FlopCounterMode."""
    with FlopCounterMode(display=False, custom_mapping=FLOP_FORMULAS) as counter, torch.no_grad():
        layer(x, **call)
    return counter.get_total_flops()


def decode_in_chunks(layer: Attention, x: Tensor, chunks: Iterable[int], cache: KVCache, **call: Any) -> Tensor:
    """Output of a layer whose input arrives in chunks through a cache."""
    outputs, start = list[Tensor](), 0
    for count in chunks:
        outputs.append(layer(x[:, start : start + count], cache=cache, **call))
        start += count
    return torch.cat(outputs, 1)


def layer_gradients(layer: Attention, y: Tensor, x: Tensor) -> dict[str, Tensor]:
    """Gradients of x and every parameter under a loss that weights every output differently."""
    loss = (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)).sum()
    named = dict(layer.named_parameters()) | {"x": x}
    gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {
        name: torch.zeros_like(named[name]) if gradient is None else gradient
        for name, gradient in zip(named, gradients, strict=True)
    }
