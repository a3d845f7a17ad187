"""torch's counter of FLOPs, with the fused attention of the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


def _forward(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    batch, heads, queries, dim = q
    return 2 * batch * heads * queries * k[-2] * (dim + v[-1])


def _backward(
    grad: Any, q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any
) -> int:
    """Recomputed scores and gradients of queries, keys (3 dim), weights and values (2 vdim)."""
    batch, heads, queries, dim = q
    return 2 * batch * heads * queries * k[-2] * (3 * dim + 2 * v[-1])


# Operations that torch's counter has no formula for.
FUSED_FLOPS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
}


def flop_counter() -> FlopCounterMode:
    """torch's `FlopCounterMode`, extended by the CPU's flash attention."""
    return FlopCounterMode(display=False, custom_mapping=FUSED_FLOPS)
