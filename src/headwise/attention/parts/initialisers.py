"""Parameter initialisers: functions from a shape to a tensor, or functions that return one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..interfaces.core_types import AppliedTo, AxisLayout, Param

Initialiser = Callable[[tuple[int, ...]], Tensor]


def xavier_uniform(shape: tuple[int, ...]) -> Tensor:
    """Uniform values within sqrt(6 / (fan in + fan out)) of zero (Glorot and Bengio 2010)."""
    bound = xavier_uniform_bound(shape)
    return uniform_within(bound, shape)


def uniform_within(bound: float, shape: tuple[int, ...]) -> Tensor:
    """Uniform values between -bound and bound.

    In place, because other arithmetic on the meta device, where models are built before their
    weights are read, imports torch._dynamo, which takes half a second.
    """
    return torch.rand(shape).mul_(2 * bound).sub_(bound)


def xavier_uniform_bound(shape: tuple[int, ...]) -> float:
    """sqrt(6 / (fan in + fan out)), where the last axis is the input.

    >>> xavier_uniform_bound((4, 2))
    1.0
    """
    return math.sqrt(6 / (shape[-1] + math.prod(shape[:-1])))


def zeros_init(shape: tuple[int, ...]) -> Tensor:
    """A tensor of zeros."""
    return torch.zeros(shape)


def ones_init(shape: tuple[int, ...]) -> Tensor:
    """A tensor of ones."""
    return torch.ones(shape)


def constant_value(value: float) -> Initialiser:
    """An initialiser that fills a tensor with one value."""
    return lambda shape: torch.full(shape, value)


def normal_with_std(std: float) -> Initialiser:
    """An initialiser with Gaussian values of mean 0 and this standard deviation."""
    return lambda shape: torch.randn(shape).mul_(std)


def fixed_values(values: Sequence[float] | Sequence[int]) -> Initialiser:
    """An initialiser with exactly these values; floats are stored in float64, integers in int64."""

    def make(
        shape: tuple[int, ...],
    ) -> Tensor:  # called for a layer, not for a count of its parameters
        dtype = torch.int64 if all(isinstance(value, int) for value in values) else torch.float64
        return torch.tensor(values, dtype=dtype).reshape(shape)

    return make


def identity_init(shape: tuple[int, ...]) -> Tensor:
    """An identity matrix."""
    return torch.eye(*shape)


def weight(axes: str, init: Initialiser, applied: AppliedTo | None = None) -> Param:
    """Declare a trainable tensor with axes such as "(q dim) model"."""
    return Param(AxisLayout.parse(axes), init, applied)


def constant(axes: str, values: Sequence[float] | Sequence[int]) -> Param:
    """A tensor of fixed values, which is not trained."""
    return Param(AxisLayout.parse(axes), fixed_values(values), trainable=False)
