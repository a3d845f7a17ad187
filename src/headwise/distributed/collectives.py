"""What ranks say to each other: sums and rows side by side, with their way back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn


class CollectiveGroup:
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


class CopyToGroup(torch.autograd.Function):
    """x as it is; backwards the sum over all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wire: CollectiveGroup) -> Tensor:
        ctx.group = wire
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.group.total(grads[0]), None


class ReduceFromGroup(torch.autograd.Function):
    """The sum over all; backwards as it is, for all have the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wire: CollectiveGroup) -> Tensor:
        return wire.total(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class AllReduceSum(torch.autograd.Function):
    """The sum over all, of which each makes a loss of its own: backwards the sum of what all find."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wire: CollectiveGroup) -> Tensor:
        ctx.group = wire
        return wire.total(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.group.total(grads[0]), None


class AllGather(torch.autograd.Function):
    """What each holds, [ranks, *x]; backwards the sum of what all find, each its own part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wire: CollectiveGroup) -> Tensor:
        ctx.group = wire
        return wire.beside(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.group.dealt(grads[0]), None


# --- Gradients summed over ranks, many to a message, each message as soon as it is full ----------------

BUCKET_BYTES = 4 << 20  # of a message: few enough that most of them travel while gradients are still made


class GradientBuckets:
    """The gradients of some parameters, summed over a group of ranks.

    Gradients come from the last layer to the first, and so do messages; on every rank in the same order, whatever is
    ready first. Behind the gradients of a message stands which parameters have one: what no rank used keeps none.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], group: dist.ProcessGroup | None, max_bytes: int = BUCKET_BYTES
    ) -> None:
        self.group = group
        self._buckets = list(_make_buckets(reversed(list(params)), max_bytes)) if group is not None else []
        self._pending: list[tuple[Tensor, Any]] = []
        self._num_missing: list[int] = []
        for index, bucket in enumerate(self._buckets):
            for param in bucket:
                param.register_post_accumulate_grad_hook(lambda _, index=index: self._on_gradient(index))

    @property
    def bucket_sizes(self) -> list[int]:
        """How many numbers each message has."""
        return [sum(param.numel() for param in bucket) + len(bucket) for bucket in self._buckets]

    def begin_final_backward(self) -> None:
        """The gradients of the next way back are the last ones: send them as they come."""
        self._pending, self._num_missing = [], [len(bucket) for bucket in self._buckets]

    def finish(self) -> None:
        """Send what is left, and wait for all of it."""
        while len(self._pending) < len(self._buckets):
            self._send_bucket()
        for bucket, (message, work) in zip(self._buckets, self._pending, strict=True):
            work.wait()
            _unflatten_bucket(bucket, message)
        self._pending, self._num_missing = [], []

    def _on_gradient(self, index: int) -> None:
        if self._num_missing:
            self._num_missing[index] -= 1
            while len(self._pending) < len(self._num_missing) and self._num_missing[len(self._pending)] == 0:
                self._send_bucket()

    def _send_bucket(self) -> None:
        message = _flatten_bucket(self._buckets[len(self._pending)])
        self._pending.append((message, dist.all_reduce(message, group=self.group, async_op=True)))


def _make_buckets(params: Iterable[nn.Parameter], max_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Parameters of one kind in a row, up to so many bytes."""
    bucket: list[nn.Parameter] = []
    for param in params:
        held = sum(p.numel() for p in bucket)
        if bucket and ((held + param.numel()) * param.itemsize > max_bytes or param.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(param)
    if bucket:
        yield bucket


def _flatten_bucket(bucket: list[nn.Parameter]) -> Tensor:
    flat = [torch.zeros_like(p).view(-1) if p.grad is None else p.grad.reshape(-1) for p in bucket]
    there = torch.tensor([p.grad is not None for p in bucket], dtype=flat[0].dtype, device=flat[0].device)
    return torch.cat([*flat, there])


def _unflatten_bucket(bucket: list[nn.Parameter], message: Tensor) -> None:
    *flat, there = message.split([*(p.numel() for p in bucket), len(bucket)])
    for index, (param, sums) in enumerate(zip(bucket, flat, strict=True)):
        if param.grad is not None or bool(there[index]):
            param.grad = sums.view(param.shape)
