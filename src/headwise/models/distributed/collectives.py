"""Collectives within a group of ranks, their autograd functions, and bucketed gradient sums."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

# torch 2.13 renamed both and deprecated their old names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class CollectiveGroup:
    """Process group of `size` ranks, in which this process has index `rank`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # a copied model communicates with the same ranks

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of x over the ranks."""
        y = x.contiguous().clone()
        dist.all_reduce(y, group=self.group)
        return y

    def all_gather(self, x: Tensor) -> Tensor:
        """Return x of every rank, stacked as [ranks, *x.shape]."""
        y = x.new_empty(self.size, *x.shape)
        _all_gather(y.flatten(0, 1), x.contiguous(), group=self.group)
        return y

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Sum x [ranks, ...] over the ranks and return this rank's entry of the first axis."""
        y = x.new_empty(x.shape[1:])
        _reduce_scatter(y, x.contiguous().flatten(0, 1), group=self.group)
        return y


class CopyToGroup(torch.autograd.Function):
    """Identity in the forward pass; the backward pass sums the gradient over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: CollectiveGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_reduce(grads[0]), None


class ReduceFromGroup(torch.autograd.Function):
    """All-reduce in the forward pass; identity in the backward pass, because every rank has the
    same gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: CollectiveGroup) -> Tensor:
        return group.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class AllReduceSum(torch.autograd.Function):
    """All-reduce in both passes, for a sum from which every rank computes its own loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: CollectiveGroup) -> Tensor:
        ctx.group = group
        return group.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_reduce(grads[0]), None


class AllGather(torch.autograd.Function):
    """All-gather [ranks, *x.shape] in the forward pass; reduce-scatter of the gradient in the
    backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: CollectiveGroup) -> Tensor:
        ctx.group = group
        return group.all_gather(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.group.reduce_scatter(grads[0]), None


# --- Gradients summed over ranks in buckets, overlapped with the backward pass --------------------

BUCKET_BYTES = (
    4 << 20
)  # per bucket: small enough that most buckets are sent while the backward pass still runs


class GradientBuckets:
    """Sums the gradients of some parameters over a group of ranks, one all-reduce per bucket.

    Gradients arrive from the last layer to the first, and buckets are sent in that order on every
    rank, whichever is ready first. Each message ends with one flag per parameter: a parameter that
    no rank used keeps grad=None.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        group: dist.ProcessGroup | None,
        max_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.group = group
        self._buckets = (
            list(_make_buckets(reversed(list(params)), max_bytes)) if group is not None else []
        )
        self._pending: list[tuple[Tensor, Any]] = []
        self._num_missing: list[int] = []
        for index, bucket in enumerate(self._buckets):
            for param in bucket:
                param.register_post_accumulate_grad_hook(
                    lambda _, index=index: self._on_gradient(index)
                )

    def begin_final_backward(self) -> None:
        """Send each bucket as soon as it is full during the next backward pass, the last one of
        this step.
        """
        self._pending, self._num_missing = [], [len(bucket) for bucket in self._buckets]

    def finish(self) -> None:
        """Send the remaining buckets, wait for all of them and store the summed gradients."""
        while len(self._pending) < len(self._buckets):
            self._send_bucket()
        for bucket, (message, work) in zip(self._buckets, self._pending, strict=True):
            work.wait()
            _unflatten_bucket(bucket, message)
        self._pending = []
        self._num_missing = []

    def _on_gradient(self, index: int) -> None:
        if self._num_missing:
            self._num_missing[index] -= 1
            while (
                len(self._pending) < len(self._num_missing)
                and self._num_missing[len(self._pending)] == 0
            ):
                self._send_bucket()

    def _send_bucket(self) -> None:
        message = _flatten_bucket(self._buckets[len(self._pending)])
        self._pending.append((message, dist.all_reduce(message, group=self.group, async_op=True)))


def _make_buckets(params: Iterable[nn.Parameter], max_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Yield consecutive parameters of one dtype, up to `max_bytes` per bucket."""
    bucket: list[nn.Parameter] = []
    for param in params:
        filled = sum(p.numel() for p in bucket)
        if bucket and (
            (filled + param.numel()) * param.itemsize > max_bytes or param.dtype != bucket[0].dtype
        ):
            yield bucket
            bucket = []
        bucket.append(param)
    if bucket:
        yield bucket


def _flatten_bucket(bucket: list[nn.Parameter]) -> Tensor:
    flat = [torch.zeros_like(p).view(-1) if p.grad is None else p.grad.reshape(-1) for p in bucket]
    has_grad = torch.tensor(
        [p.grad is not None for p in bucket], dtype=flat[0].dtype, device=flat[0].device
    )
    return torch.cat([*flat, has_grad])


def _unflatten_bucket(bucket: list[nn.Parameter], message: Tensor) -> None:
    *flat, has_grad = message.split([*(p.numel() for p in bucket), len(bucket)])
    for index, (param, sums) in enumerate(zip(bucket, flat, strict=True)):
        if param.grad is not None or bool(has_grad[index]):
            param.grad = sums.view(param.shape)
