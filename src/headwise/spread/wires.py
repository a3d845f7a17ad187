"""What ranks say to each other: sums and rows side by side, with their way back."""

from __future__ import annotations

from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor


class Wire:
    """A group of ranks that share something; `rank` is which of its `size` this one is."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # a copy of a model speaks with the same ranks

    def total(self, x: Tensor) -> Tensor:
        """The sum of what all hold."""
        y = x.contiguous().clone()
        dist.all_reduce(y, group=self.group)
        return y

    def beside(self, x: Tensor) -> Tensor:
        """What each holds, [ranks, *x]."""
        y = x.new_empty(self.size, *x.shape)
        dist.all_gather_single(y.flatten(0, 1), x.contiguous(), group=self.group)
        return y

    def dealt(self, x: Tensor) -> Tensor:
        """Of the sum of what all hold, [ranks, ...], the part of this one."""
        y = x.new_empty(x.shape[1:])
        dist.reduce_scatter_single(y, x.contiguous().flatten(0, 1), group=self.group)
        return y


class Enter(torch.autograd.Function):
    """x as it is; backwards the sum over all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wire: Wire) -> Tensor:
        ctx.wire = wire
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.wire.total(grads[0]), None


class Leave(torch.autograd.Function):
    """The sum over all; backwards as it is, for all have the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wire: Wire) -> Tensor:
        return wire.total(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class Total(torch.autograd.Function):
    """The sum over all, of which each makes a loss of its own: backwards the sum of what all find."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wire: Wire) -> Tensor:
        ctx.wire = wire
        return wire.total(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.wire.total(grads[0]), None


class Beside(torch.autograd.Function):
    """What each holds, [ranks, *x]; backwards the sum of what all find, each its own part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wire: Wire) -> Tensor:
        ctx.wire = wire
        return wire.beside(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.wire.dealt(grads[0]), None
