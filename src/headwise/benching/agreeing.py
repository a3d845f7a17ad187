"""Whether two ways give the same: a bench compares like with like, or says so."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def difference(ours: Any, theirs: Any, tolerance: float) -> str:
    """How what theirs gives is not what ours gives; nothing where each number is within the tolerance.

    The tolerance is a share of the largest number of each tensor.

    >>> difference(torch.tensor([1.0, 100.0]), torch.tensor([1.05, 100.0]), 1e-3)
    ''
    >>> difference(torch.tensor([1.0, 2.0]), torch.tensor([1.5, 2.0]), 1e-3)
    'off by 0.25 times the largest number'
    """
    mine, other = _tensors(ours), _tensors(theirs)
    if [one.shape for one in mine] != [one.shape for one in other]:
        return f"gives {_shapes(other)}, not {_shapes(mine)}"
    off = max((_off(*pair) for pair in zip(mine, other, strict=True)), default=0.0)
    return "" if off <= tolerance else f"off by {off:.2g} times the largest number"


def _off(mine: Tensor, other: Tensor) -> float:
    """The largest difference over the largest number."""
    if not mine.numel():
        return 0.0
    mine, other = mine.detach().double(), other.detach().to(mine.device).double()
    apart = (mine - other).abs().masked_fill(mine == other, 0)  # two infinities are the same
    most = float(apart.max())
    size = float(mine.abs().max())
    if not math.isfinite(most):
        return math.inf
    return most / size if size else most


def _tensors(given: Any) -> list[Tensor]:
    if isinstance(given, (tuple, list)):
        return [tensor for one in given for tensor in _tensors(one)]
    return [torch.as_tensor(given)]


def _shapes(tensors: list[Tensor]) -> str:
    return ", ".join(str(tuple(one.shape)) for one in tensors) or "nothing"
