"""Helpers for computations that must not run in the layer's low precision or under autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def to_at_least_float32(x: Tensor) -> Tensor:
    """x converted to float32 if its dtype is less precise."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context in which matrix products run in the dtype of their operands, without autocast."""
    kind = x.device.type
    lowered = kind != "meta" and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if lowered else nullcontext()
