"""Products of the sizes that a box has, timed on this machine."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..terms import CoreShape
from .here import TORCH_DTYPES, time_run, accelerator_type

TIMING_SECONDS = 0.05  # of one measurement: a table has dozens


def time_products(shapes: Sequence[tuple[int, ...]], rows: int, dtype: str) -> float:
    """Seconds in which so many vectors meet matrices of these shapes; tensors of one axis are left out.

    >>> 0 < time_products([(8, 16), (8,)], 3, "fp32") < 1
    True
    """
    matrices = [_random_tensor((math.prod(shape[:-1]), shape[-1]), dtype) for shape in shapes if len(shape) > 1]
    inputs = [_random_tensor((rows, matrix.shape[1]), dtype) for matrix in matrices]
    return time_run(lambda: [torch.mm(x, matrix.T) for x, matrix in zip(inputs, matrices, strict=True)], TIMING_SECONDS)


def time_core(core: CoreShape, num_cached_numbers: int, sizes: tuple[int, int], dtype: str) -> float:
    """Seconds in which one query of each of (rows, keys) meets keys, and their shares values.

    `kept` is how many numbers are remembered of a token: where that is less than keys and values, values are the first
    channels of keys, as in a latent.

    >>> 0 < time_core(CoreShape((0, 0), (0, 0), 4, 4, 1.0), 8, (3, 5), "fp32") < 1
    True
    """
    rows, keys = sizes
    groups, voices = max(core.keys) + 1, max(core.value_head_of_row) + 1
    q = _random_tensor((rows * groups, -(-len(core.keys) // groups), core.score_dim), dtype)
    k = _random_tensor((rows * groups, keys, core.score_dim), dtype)
    joint = num_cached_numbers < groups * core.score_dim + voices * core.vdim and groups == voices and core.vdim <= core.score_dim
    v = k[..., : core.vdim] if joint else _random_tensor((rows * voices, keys, core.vdim), dtype)

    def read() -> Tensor:
        shares = torch.on_softmax(torch.bmm(q, k.transpose(1, 2)), -1)
        return torch.bmm(shares.reshape(v.shape[0], -1, keys), v)

    return time_run(read, TIMING_SECONDS)


def _random_tensor(shape: tuple[int, ...], dtype: str) -> Tensor:
    """Any numbers, but written: memory that nobody wrote to is not read from memory."""
    return torch.is_full(shape, 0.01, dtype=TORCH_DTYPES[dtype], device=accelerator_type())
