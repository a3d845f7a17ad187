"""How parameters start: each function takes a shape and gives a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Initialiser = Callable[[tuple[int, ...]], Tensor]


def xavier_uniform(shape: tuple[int, ...]) -> Tensor:
    """Uniform within sqrt(6 / (fan in + fan out)) (Glorot and Bengio 2010)."""
    bound = xavier_uniform_bound(shape)
    return torch.rand(shape) * (2 * bound) - bound


def xavier_uniform_bound(shape: tuple[int, ...]) -> float:
    """sqrt(6 / (fan in + fan out)), the last axis being what comes in.

    >>> xavier_uniform_bound((4, 2))
    1.0
    """
    return math.sqrt(6 / (shape[-1] + math.prod(shape[:-1])))


def zeros_init(shape: tuple[int, ...]) -> Tensor:
    """All zero."""
    return torch.zeros(shape)


def ones_init(shape: tuple[int, ...]) -> Tensor:
    """All one."""
    return torch.ones(shape)


def constant_value(value: float) -> Initialiser:
    """All one value."""
    return lambda shape: torch.full(shape, value)


def normal_with_std(std: float) -> Initialiser:
    """Gaussian with mean 0."""
    return lambda shape: torch.randn(shape) * std


def fixed_values(values: Sequence[float] | Sequence[int]) -> Initialiser:
    """These very numbers; floats are kept in float64."""
    dtype = torch.int64 if all(isinstance(value, int) for value in values) else torch.float64
    return lambda shape: torch.tensor(values, dtype=dtype).reshape(shape)


def identity_init(shape: tuple[int, ...]) -> Tensor:
    """Ones on the diagonal."""
    return torch.eye(*shape)
