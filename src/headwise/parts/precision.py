"""Where rounding to the layer's precision, or to autocast's, would be another function."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def to_at_least_float32(x: Tensor) -> Tensor:
    """x in at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Products in the precision of their operands, whatever autocast thinks of that."""
    kind = x.device.type
    lowered = kind != "meta" and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if lowered else nullcontext()
