"""Operations on a few tokens: matrix-vector products (GEMV), RMSNorm, rotary embedding, SwiGLU and scaling.

`multiply_small_batch(x, [W1, W2, ...])` equals `torch.cat([x @ W.T for W in (W1, W2, ...)], 1)`, with float32 sums:

    y[m, n] = sum_k x[m, k] W[n, k]

The elementwise kernels run in the calling thread. In plain PyTorch they are `rms_norm`: `F.rms_norm(x, (width,), weight
+ offset, eps)`; `apply_rotary`: rotation of channel pairs (c, c + pairs); `silu_and_multiply`: `F.silu(gate) * up`;
`scale_to_float32`: `x.float() * factor`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import IntEnum, auto
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import launch
from .autograd_guards import can_skip_dispatcher
from .launch import SIMD_WIDTH, KernelSet

GEMV_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
GEMV_TILE_SIZE = 4  # rows, and tokens, of one tile of products
GEMV_STEP = 2 * SIMD_WIDTH  # channels of a row that one step reads


class GemvArgs(IntEnum):
    """Kernel arguments of the GEMV: byte offsets into an int64 array. Addresses and strides count bytes."""

    def _generate_next_value_(name, start, count, last_values):
        return 8 * count

    NEXT_BLOCK = auto()  # counters: next block, next thread
    NEXT_THREAD = auto()
    NUM_BLOCKS = auto()
    ROWS_PER_BLOCK = auto()  # matrix rows that a thread takes at a time
    X = auto()  # [M, K]
    Y = auto()  # [M, rows of all matrices]
    SCRATCH = auto()  # scratch buffers for packed tokens, and the bytes of each
    SCRATCH_BYTES = auto()
    NUM_TOKENS = auto()  # M
    WIDTH = auto()  # K
    NUM_ROWS = auto()  # N of all matrices together
    MATRICES = auto()  # pairs: address and number of rows of each matrix


GEMV_KERNELS = KernelSet("small_batch_kernels", GEMV_DTYPES, work="run_gemv")

# --- The operation `headwise::thin` --------------------------------------------------------------------

BLOCKS_PER_THREAD, MAX_BLOCK_BYTES = 2, 2**19  # minimum number of blocks per thread; maximum bytes of a block


def multiply_small_batch(x_MK: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """Return x W^T for tokens x [M, K] and each of several matrices W [N, K], side by side: [M, all N together].

    All tensors are float32 or all bfloat16, the matrices are contiguous, and K is a multiple of 16; sums are float32.
    The result of a token depends neither on other tokens nor on the number of threads, bit for bit.

    >>> multiply_small_batch(torch.ones(2, 16), [torch.eye(16)[:1], torch.ones(2, 16)]).tolist()
    [[1.0, 16.0, 16.0], [1.0, 16.0, 16.0]]
    """
    return (
        _launch_gemv(x_MK, matrices) if can_skip_dispatcher(x_MK, *matrices) else _small_batch_matmul_op(x_MK, matrices)
    )


@torch.library.custom_op("headwise::thin", mutates_args=(), device_types="cpu")
def _small_batch_matmul_op(x_MK: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    return _launch_gemv(x_MK, matrices)


def _launch_gemv(x_MK: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    x_MK, (tokens, width) = x_MK.contiguous(), x_MK.shape
    table = array("q", [number for matrix in matrices for number in (matrix.data_ptr(), matrix.shape[0])])
    rows, own, threads = sum(table[1::2]), 4 * tokens * width, launch.max_threads()
    each = _rows_per_block(rows, width * x_MK.itemsize, threads)
    blocks = sum([-(-count // each) for count in table[1::2]])
    threads = min(blocks, threads)
    y, desks = x_MK.new_empty(tokens, rows), torch.empty(threads * own, dtype=torch.uint8)
    places = x_MK.data_ptr(), y.data_ptr(), desks.data_ptr()
    told = array("q", (0, 0, blocks, each, *places, own, tokens, width, rows)) + table
    assert 8 * (len(told) - len(table)) == GemvArgs.MATRICES
    launch.run_in_threads(GEMV_KERNELS.function_address("work", x_MK.dtype), told.buffer_info()[0], threads)
    return y


def _rows_per_block(rows: int, line: int, threads: int) -> int:
    """Return how many rows a thread takes at a time: long runs read faster, short ones balance the threads better."""
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

# --- Elementwise operations on a few tokens, one kernel call each --------------------------------------

SMALL_BATCH_KERNELS = KernelSet(
    "small_batch_kernels",
    GEMV_DTYPES,
    norms="rms_norm_kernel",
    turns="rotary_kernel",
    gates="silu_and_multiply_kernel",
    rises="scale_to_float32_kernel",
)
MAX_SMALL_NUMEL = 2**14  # maximum number of elements; beyond it torch's threads pay off


def is_small_batch(x: Tensor, *more: Tensor) -> bool:
    """Return True if the kernels support these tensors and are faster than torch for them.

    That is: at most 2^14 elements in whole vectors, one dtype that the kernels know, and a call that can skip the
    dispatcher.
    """
    return (
        0 < x.numel() <= MAX_SMALL_NUMEL
        and x.dtype in GEMV_DTYPES
        and x.shape[-1] % SIMD_WIDTH == 0
        and all(t.dtype == x.dtype and t.stride(-1) == 1 for t in more)
        and x.stride(-1) == 1
        and can_skip_dispatcher(x, *more)
        and not torch.is_autocast_enabled("cpu")
        and SMALL_BATCH_KERNELS.is_usable(x.dtype)
    )


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) over the last axis, times weight + offset (1910.07467).

    >>> rms_norm(torch.full((1, 16), 3.0), torch.full((16,), 2.0), 0.0)[0, :2].tolist()
    [2.0, 2.0]
    """
    x, width = x.contiguous(), x.shape[-1]
    y, numbers = torch.empty_like(x), array("d", (eps, offset))
    by = 0 if weight is None else weight.data_ptr()
    _launch_small_batch(
        "norms", x, (x.data_ptr(), y.data_ptr(), x.numel() // width, width, by, numbers.buffer_info()[0])
    )
    return y


def apply_rotary(x_BTHK: Tensor, position_BT: Tensor, frequency: Tensor, attention_factor: float) -> Tensor:
    """Rotate channels c and c + pairs of each head by position x frequency[c] (RoPE, 2104.09864).

    Angles are float64. The rotated channels are multiplied by `attention_factor`; channels beyond the pairs are copied.

    >>> apply_rotary(
    ...     torch.ones(1, 1, 1, 32), torch.tensor([[1]]), torch.full((16,), torch.pi, dtype=torch.float64), 2.0
    ... )[0, 0, 0, ::16].tolist()
    [-2.0, -2.0]
    """
    (batch, tokens, heads, width), step, pairs = x_BTHK.shape, x_BTHK.itemsize, frequency.numel()
    y, numbers = x_BTHK.new_empty(x_BTHK.shape), array("d", (attention_factor,))
    waves = array("q", bytes(8 * pairs))
    position, apart = position_BT.contiguous(), 0 if position_BT.shape[0] == 1 else 8 * tokens
    strides = [step * x_BTHK.stride(n) for n in range(3)]
    where = position.data_ptr(), apart, frequency.data_ptr(), pairs, numbers.buffer_info()[0], waves.buffer_info()[0]
    _launch_small_batch(
        "turns", x_BTHK, (x_BTHK.data_ptr(), y.data_ptr(), batch, tokens, heads, width, *strides, *where)
    )
    return y


def silu_and_multiply(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up (SwiGLU, 2002.05202) for two tensors of one shape, whose rows may be strided.

    >>> silu_and_multiply(torch.full((1, 16), 100.0), torch.full((1, 16), 2.0))[0, 0].item()
    200.0
    """
    gate, up = _flatten_rows(gate), _flatten_rows(up)
    y, (rows, width), step = gate.new_empty(gate.shape), gate.shape, gate.itemsize
    places = gate.data_ptr(), up.data_ptr(), y.data_ptr(), rows, width, step * gate.stride(0), step * up.stride(0)
    _launch_small_batch("gates", gate, places)
    return y


def scale_to_float32(x_BHK: Tensor, factor: float) -> Tensor:
    """Return x in float32 times a factor, contiguous.

    >>> scale_to_float32(torch.ones(1, 1, 16, dtype=torch.bfloat16), 0.1)[0, 0, 0].item()
    0.100...
    """
    x, numbers = x_BHK.contiguous(), array("d", (factor,))
    y = x.new_empty(x.shape, dtype=torch.float32)
    _launch_small_batch("rises", x, (x.data_ptr(), y.data_ptr(), x.numel(), numbers.buffer_info()[0]))
    return y


def _flatten_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _launch_small_batch(name: str, like: Tensor, numbers: tuple[int, ...]) -> None:
    table = array("q", numbers)
    launch.run_in_threads(SMALL_BATCH_KERNELS.function_address(name, like.dtype), table.buffer_info()[0], 1)
