"""Products of the sizes that a box has, timed on this machine."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..terms import Core
from .here import DTYPES, seconds, where

SECONDS = 0.05  # of one measurement: a table has dozens


def product_seconds(shapes: Sequence[tuple[int, ...]], rows: int, dtype: str) -> float:
    """Seconds in which so many vectors meet matrices of these shapes; tensors of one axis are left out.

    >>> 0 < product_seconds([(8, 16), (8,)], 3, "fp32") < 1
    True
    """
    matrices = [_filled((math.prod(shape[:-1]), shape[-1]), dtype) for shape in shapes if len(shape) > 1]
    inputs = [_filled((rows, matrix.shape[1]), dtype) for matrix in matrices]
    return seconds(lambda: [torch.mm(x, matrix.T) for x, matrix in zip(inputs, matrices, strict=True)], SECONDS)


def core_seconds(core: Core, kept: int, sizes: tuple[int, int], dtype: str) -> float:
    """Seconds in which one query of each of (rows, keys) meets keys, and their shares values.

    `kept` is how many numbers are remembered of a token: where that is less than keys and values, values are the first
    channels of keys, as in a latent.

    >>> 0 < core_seconds(Core((0, 0), (0, 0), 4, 4, 1.0), 8, (3, 5), "fp32") < 1
    True
    """
    rows, keys = sizes
    groups, voices = max(core.keys) + 1, max(core.values) + 1
    q = _filled((rows * groups, -(-len(core.keys) // groups), core.width), dtype)
    k = _filled((rows * groups, keys, core.width), dtype)
    joint = kept < groups * core.width + voices * core.vdim and groups == voices and core.vdim <= core.width
    v = k[..., : core.vdim] if joint else _filled((rows * voices, keys, core.vdim), dtype)

    def read() -> Tensor:
        shares = torch.softmax(torch.bmm(q, k.transpose(1, 2)), -1)
        return torch.bmm(shares.reshape(v.shape[0], -1, keys), v)

    return seconds(read, SECONDS)


def _filled(shape: tuple[int, ...], dtype: str) -> Tensor:
    """Any numbers, but written: memory that nobody wrote to is not read from memory."""
    return torch.full(shape, 0.01, dtype=DTYPES[dtype], device=where())
