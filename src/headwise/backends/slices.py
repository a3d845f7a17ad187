"""Slices of tokens whose gradients are added up in one place, where autograd would make a whole for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.orders import is_under_functorch

SliceRanges = tuple[range, ...]


def gather_slices(x: Tensor, range_lists: Sequence[SliceRanges]) -> Sequence[Tensor]:
    """For each of these, its neighbours of dimension 1 side by side: a view where they are one range."""
    if torch.is_grad_enabled() and x.requires_grad and not is_under_functorch():
        return _GatherSlices.apply(x, [[(some.start, some.stop) for some in ranges] for ranges in range_lists])
    return [_concat_ranges(x, [(some.start, some.stop) for some in ranges]) for ranges in range_lists]


class _GatherSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, every: list[list[tuple[int, int]]]) -> tuple[Tensor, ...]:
        ctx.every, ctx.shape = every, x.shape
        return tuple(_concat_ranges(x, ranges) for ranges in every)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        whole = grads[0].new_zeros(ctx.shape)
        for ranges, grad in zip(ctx.every, grads, strict=True):
            begin = 0
            for start, stop in ranges:
                whole[:, start:stop] += grad[:, begin : begin + stop - start]
                begin += stop - start
        return whole, None


def _concat_ranges(x: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    if len(ranges) == 1:
        return x[:, ranges[0][0] : ranges[0][1]]
    return torch.cat([x[:, start:stop] for start, stop in ranges], 1) if ranges else x[:, :0]
