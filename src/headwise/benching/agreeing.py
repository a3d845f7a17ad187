"""Whether two ways give the same: a bench compares like with like, or says so."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def describe_difference(ours: Any, theirs: Any, tolerance: float) -> str:
    """How what theirs gives is not what ours gives; nothing where each number is within the tolerance.

    The tolerance is a share of the largest number of each tensor.

    >>> describe_difference(torch.tensor([1.0, 100.0]), torch.tensor([1.05, 100.0]), 1e-3)
    ''
    >>> describe_difference(torch.tensor([1.0, 2.0]), torch.tensor([1.5, 2.0]), 1e-3)
    'off by 0.25 times the largest number'
    """
    mine, other = _list_tensors(ours), _list_tensors(theirs)
    if [one.shape for one in mine] != [one.shape for one in other]:
        return f"gives {_format_shapes(other)}, not {_format_shapes(mine)}"
    off = max((_relative_error(*pair) for pair in zip(mine, other, strict=True)), default=0.0)
    return "" if off <= tolerance else f"off by {off:.2g} times the largest number"


def _relative_error(mine: Tensor, other: Tensor) -> float:
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


def _list_tensors(given: Any) -> list[Tensor]:
    if isinstance(given, (tuple, list)):
        return [tensor for one in given for tensor in _list_tensors(one)]
    return [torch.as_tensor(given)]


def _format_shapes(tensors: list[Tensor]) -> str:
    return ", ".join(str(tuple(one.shape)) for one in tensors) or "nothing"
