"""`thin`: a few tokens meet matrices, and reading these is all that takes time. A custom operation of torch."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import team
from .orders import can_skip_dispatcher
from .thinning import GEMV_KERNELS, GEMV_TILE_SIZE, GemvArgs

BLOCKS_PER_THREAD, MAX_BLOCK_BYTES = 2, 2**19  # blocks of rows for each thread, at least; bytes of a block, at most


def multiply_small_batch(x_MK: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """x W^T of tokens x [M, K] with each of several matrices [N, K], side by side: [M, all rows of all matrices].

    All are float32 or all bfloat16, matrices lie whole, and K is a multiple of 16; sums are float32. What comes of a
    token depends neither on those beside it nor on threads, bit for bit.

    >>> multiply_small_batch(torch.ones(2, 16), [torch.eye(16)[:1], torch.ones(2, 16)]).tolist()
    [[1.0, 16.0, 16.0], [1.0, 16.0, 16.0]]
    """
    return _launch_gemv(x_MK, matrices) if can_skip_dispatcher(x_MK, *matrices) else _small_batch_matmul_op(x_MK, matrices)


@torch.library.custom_op("headwise::thin", mutates_args=(), device_types="cpu")
def _small_batch_matmul_op(x_MK: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    return _launch_gemv(x_MK, matrices)


def _launch_gemv(x_MK: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    x_MK, (tokens, width) = x_MK.contiguous(), x_MK.shape
    table = array("q", [number for matrix in matrices for number in (matrix.data_ptr(), matrix.shape[0])])
    rows, own, threads = sum(table[1::2]), 4 * tokens * width, team.max_threads()
    each = _rows_per_block(rows, width * x_MK.itemsize, threads)
    blocks = sum([-(-count // each) for count in table[1::2]])
    threads = min(blocks, threads)
    y, desks = x_MK.new_empty(tokens, rows), torch.empty(threads * own, dtype=torch.uint8)
    places = x_MK.data_ptr(), y.data_ptr(), desks.data_ptr()
    told = array("q", (0, 0, blocks, each, *places, own, tokens, width, rows)) + table
    assert 8 * (len(told) - len(table)) == GemvArgs.MATRICES
    team.run_in_threads(GEMV_KERNELS.function_address("work", x_MK.dtype), told.buffer_info()[0], threads)
    return y


def _rows_per_block(rows: int, line: int, threads: int) -> int:
    """How many rows of so many bytes a thread takes at once: long runs are read faster, short ones shared better."""
    share = min(-(-rows // (BLOCKS_PER_THREAD * threads)), max(1, MAX_BLOCK_BYTES // line))
    return -(-share // GEMV_TILE_SIZE) * GEMV_TILE_SIZE


@_small_batch_matmul_op.register_fake
def _fake_small_batch_matmul(x_MK: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    return x_MK.new_empty(x_MK.shape[0], sum(matrix.shape[0] for matrix in matrices))


@register_flop_formula(torch.ops.headwise.thin)
def _small_batch_matmul_flops(x: Any, matrices: Any, *rest: Any, out_shape: Any = None, **more: Any) -> int:
    return 2 * x[0] * x[1] * sum(matrix[0] for matrix in matrices)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], *inputs[1])


def _small_batch_matmul_backward(ctx: Any, dy: Tensor) -> tuple[Tensor, list[Tensor]]:
    x, *matrices = ctx.saved_tensors
    parts = dy.split([matrix.shape[0] for matrix in matrices], 1)
    return dy @ torch.cat(matrices), [part.T @ x for part in parts]


_small_batch_matmul_op.register_autograd(_small_batch_matmul_backward, setup_context=_save_for_backward)
