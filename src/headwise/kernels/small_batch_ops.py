"""Operations on a few tokens: matrix products (GEMV), RMSNorm, rotary embedding, SwiGLU and
scaling.

`multiply_small_batch(x, [W1, W2, ...])` equals `torch.cat([x @ W.T for W in (W1, W2, ...)], 1)`,
with float32 sums:

    y[m, n] = sum_k x[m, k] W[n, k]

The elementwise kernels run in the calling thread. In plain PyTorch they are `rms_norm`:
`F.rms_norm(x, (width,), weight + offset, eps)`; `apply_rotary`: rotation of channel pairs (c, c +
pairs); `silu_and_multiply`: `F.silu(gate) * up`; `scale_to_float32`: `x.float() * factor`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..machine.capabilities import this_machine
from ..machine.takeover_points import takeover_size
from . import launch
from .autograd_guards import can_skip_dispatcher
from .kernel_args import (
    Float32Arg,
    Float64Arg,
    Int64Arg,
    KernelArgs,
    ParallelKernelArgs,
    StridedArg,
    TableArg,
    TensorArg,
    matrix_table,
)
from .launch import SIMD_WIDTH, KernelSet
from .operand_checks import OperandChecks, refuse_operands

GEMV_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
GEMV_TILE_SIZE = 4  # rows, and tokens, of one tile of products
GEMV_STEP = 2 * SIMD_WIDTH  # channels of a row that one step reads


class GemvArgs(ParallelKernelArgs, is_checked=False):
    """Arguments of the GEMV; a work item is a block of rows of one matrix, the scratch buffer holds
    packed tokens.
    """

    rows_per_block: int = 0  # matrix rows that a thread takes at a time
    x: TensorArg = None  # [M, K]
    y: TensorArg = None  # [M, rows of all matrices]
    num_tokens: int = 0  # M
    width: int = 0  # K
    num_rows: int = 0  # N of all matrices together
    matrices: TableArg = None  # pairs: address and number of rows of each matrix


GEMV_KERNELS = KernelSet("small_batch_kernels", GEMV_DTYPES, gemv=("run_gemv", GemvArgs))

# --- The operation `headwise::small_batch_matmul` -------------------------------------------------

BLOCKS_PER_THREAD, MAX_BLOCK_BYTES = (
    2,
    2**19,
)  # minimum number of blocks per thread; maximum bytes of a block
PACKED_TOKEN_BYTES = (
    this_machine().l2_cache_bytes
) // 2  # of the tokens that are multiplied at a time
GEMV_CHECKS = OperandChecks("small_batch_matmul", x="float32 bfloat16: M K", matrix="* K+")


def multiply_small_batch(x_MK: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """Return x W^T for tokens x [M, K] and each of several matrices W [N, K], side by side: [M, all
    N together].

    All tensors are float32 or all bfloat16, the matrices are contiguous, and K is a multiple of 16;
    sums are float32. The result of a token depends neither on other tokens nor on the number of
    threads, bit for bit.

    >>> multiply_small_batch(torch.ones(2, 16), [torch.eye(16)[:1], torch.ones(2, 16)]).tolist()
    [[1.0, 16.0, 16.0], [1.0, 16.0, 16.0]]
    """
    return (
        _launch_gemv(x_MK, matrices)
        if can_skip_dispatcher(x_MK, *matrices)
        else _small_batch_matmul_op(x_MK, matrices)
    )


@torch.library.custom_op("headwise::small_batch_matmul", mutates_args=(), device_types="cpu")
def _small_batch_matmul_op(x_MK: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    return _launch_gemv(x_MK, matrices)


def _launch_gemv(x_MK: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    GEMV_CHECKS.check(x_MK, *matrices)
    for matrix in matrices:
        if not matrix.is_contiguous():
            fact = f"a matrix {list(matrix.shape)} has strides {matrix.stride()}"
            refuse_operands("small_batch_matmul", fact, "give a contiguous matrix")
    x_MK, (num_tokens, width) = x_MK.contiguous(), x_MK.shape
    num_rows, count = sum([matrix.shape[0] for matrix in matrices]), _tokens_per_pass(width)
    if width % SIMD_WIDTH or not width or not num_rows:
        fact = f"{len(matrices)} matrices have {num_rows} rows of {width} channels"
        refuse_operands(
            "small_batch_matmul",
            fact,
            f"give at least one row and a multiple of {SIMD_WIDTH} channels",
        )
    y = x_MK.new_empty(num_tokens, num_rows)
    if num_tokens <= count:
        _run_gemv(x_MK, matrices, y)
        return y
    for first in range(0, num_tokens, count):
        _run_gemv(x_MK[first : first + count], matrices, y[first : first + count])
    return y


def _tokens_per_pass(width: int) -> int:
    """Return how many tokens are multiplied at a time: packed in float32, they fill half of the
    second-level cache.
    """
    return max(1, PACKED_TOKEN_BYTES // (4 * max(width, 1) * GEMV_TILE_SIZE)) * GEMV_TILE_SIZE


def _run_gemv(x_MK: Tensor, matrices: Sequence[Tensor], y: Tensor) -> None:
    """Write the products of contiguous tokens to `y`."""
    num_tokens, width = x_MK.shape
    table = matrix_table(matrices)
    tile_size = max(1, min(num_tokens, GEMV_TILE_SIZE))
    num_rows, threads = sum(table[1::2]), launch.max_threads()
    scratch_bytes = 4 * width * (-(-num_tokens // tile_size) * tile_size)
    rows_per_block = _rows_per_block(num_rows, width * x_MK.itemsize, threads)
    num_blocks = sum(
        [-(-num_rows_of_matrix // rows_per_block) for num_rows_of_matrix in table[1::2]]
    )
    threads = min(num_blocks, threads)
    args = GemvArgs.make(
        num_items=num_blocks,
        scratch=torch.empty(threads * scratch_bytes, dtype=torch.uint8),
        scratch_bytes=scratch_bytes,
        rows_per_block=rows_per_block,
        x=x_MK,
        y=y,
        num_tokens=num_tokens,
        width=width,
        num_rows=num_rows,
        matrices=table,
    )
    args.tensors += matrices
    GEMV_KERNELS.run("gemv", x_MK.dtype, args, threads)


def _rows_per_block(num_rows: int, row_bytes: int, threads: int) -> int:
    """Return the number of rows per block: long blocks are read faster, short ones balance the
    threads better.
    """
    count = min(-(-num_rows // (BLOCKS_PER_THREAD * threads)), max(1, MAX_BLOCK_BYTES // row_bytes))
    return -(-count // GEMV_TILE_SIZE) * GEMV_TILE_SIZE


@_small_batch_matmul_op.register_fake
def _fake_small_batch_matmul(x_MK: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    return x_MK.new_empty(x_MK.shape[0], sum(matrix.shape[0] for matrix in matrices))


@register_flop_formula(torch.ops.headwise.small_batch_matmul)
def _small_batch_matmul_flops(
    x: Any, matrices: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    return 2 * x[0] * x[1] * sum(matrix[0] for matrix in matrices)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], *inputs[1])


def _small_batch_matmul_backward(ctx: Any, dy: Tensor) -> tuple[Tensor, list[Tensor]]:
    x, *matrices = ctx.saved_tensors
    parts = dy.split([matrix.shape[0] for matrix in matrices], 1)
    return dy @ torch.cat(matrices), [part.T @ x for part in parts]


_small_batch_matmul_op.register_autograd(
    _small_batch_matmul_backward, setup_context=_save_for_backward
)

# --- Elementwise operations on a few tokens, one kernel call each ---------------------------------


class RmsNormArgs(KernelArgs, is_checked=False):
    """Arguments of `rms_norm`."""

    x: TensorArg = None  # [rows, width]
    y: TensorArg = None
    weight: TensorArg = None  # [width]
    rows: int = 0
    width: int = 0
    eps: float = 0.0
    offset: float = 0.0  # added to the weight


class RotaryArgs(KernelArgs, is_checked=False):
    """Arguments of `apply_rotary`; strides count bytes."""

    x: StridedArg = None  # [batch, tokens, heads, width]
    y: TensorArg = None
    position: Int64Arg = None  # [batch or 1, tokens]
    frequency: Float64Arg = None  # [pairs]
    cos_sin: TableArg = (
        None  # scratch: cosines and sines of one token, [2, pairs] in the dtype for computing
    )
    batch: int = 0
    tokens: int = 0
    heads: int = 0
    width: int = 0
    pairs: int = 0
    x_batch_stride: int = 0
    x_token_stride: int = 0
    x_head_stride: int = 0
    position_batch_stride: int = 0
    attention_factor: float = 0.0


class SiluArgs(KernelArgs, is_checked=False):
    """Arguments of `silu_and_multiply`; strides count bytes."""

    gate: StridedArg = None  # [rows, width]
    up: StridedArg = None
    y: TensorArg = None
    rows: int = 0
    width: int = 0
    gate_row_stride: int = 0
    up_row_stride: int = 0


class ScaleArgs(KernelArgs, is_checked=False):
    """Arguments of `scale_to_float32`."""

    x: TensorArg = None
    y: Float32Arg = None
    count: int = 0  # elements
    factor: float = 0.0


SMALL_BATCH_KERNELS = KernelSet(
    "small_batch_kernels",
    GEMV_DTYPES,
    rms_norm=("rms_norm_kernel", RmsNormArgs),
    apply_rotary=("rotary_kernel", RotaryArgs),
    silu_and_multiply=("silu_and_multiply_kernel", SiluArgs),
    scale_to_float32=("scale_to_float32_kernel", ScaleArgs),
)
RMS_NORM_CHECKS = OperandChecks("rms_norm", x="float32 bfloat16: R C", weight="C?")
ROTARY_CHECKS = OperandChecks(
    "apply_rotary", x="float32 bfloat16: B T H K", position="int64: 1|B T", frequency="float64: P"
)
SILU_CHECKS = OperandChecks("silu_and_multiply", gate="float32 bfloat16: R C", up="R C")
SCALE_CHECKS = OperandChecks("scale_to_float32", x="float32 bfloat16: * * *")


def is_small_batch(x: Tensor, *others: Tensor) -> bool:
    """Return True if the kernels support these tensors and are faster than torch for them.

    That is: at most as many elements as the take-over point (beyond it torch's threads pay off), in
    whole vectors, one dtype that the kernels know, and a call that can skip the dispatcher.
    """
    return (
        0 < x.numel() <= takeover_size("elementwise")
        and x.dtype in GEMV_DTYPES
        and x.shape[-1] % SIMD_WIDTH == 0
        and all(t.dtype == x.dtype and t.stride(-1) == 1 for t in others)
        and x.stride(-1) == 1
        and can_skip_dispatcher(x, *others)
        and not torch.is_autocast_enabled("cpu")
        and SMALL_BATCH_KERNELS.is_usable(x.dtype)
    )


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) over the last axis, times weight + offset (1910.07467).

    >>> rms_norm(torch.full((1, 16), 3.0), torch.full((16,), 2.0), 0.0)[0, :2].tolist()
    [2.0, 2.0]
    """
    x, width = x.contiguous(), x.shape[-1]
    RMS_NORM_CHECKS.check(x.view(-1, width), weight)
    _check_vectors("rms_norm", width)
    weight = None if weight is None else weight.contiguous()
    y = torch.empty_like(x)
    args = RmsNormArgs.make(
        x=x, y=y, weight=weight, rows=x.numel() // width, width=width, eps=eps, offset=offset
    )
    SMALL_BATCH_KERNELS.run("rms_norm", x.dtype, args)
    return y


def apply_rotary(
    x_BTHK: Tensor, position_BT: Tensor, frequency: Tensor, attention_factor: float
) -> Tensor:
    """Rotate channels c and c + pairs of each head by position x frequency[c] (RoPE, 2104.09864).

    Angles are float64. The rotated channels are multiplied by `attention_factor`; channels beyond
    the pairs are copied.

    >>> apply_rotary(
    ...     torch.ones(1, 1, 1, 32),
    ...     torch.tensor([[1]]),
    ...     torch.full((16,), torch.pi, dtype=torch.float64),
    ...     2.0,
    ... )[0, 0, 0, ::16].tolist()
    [-2.0, -2.0]
    """
    ROTARY_CHECKS.check(x_BTHK, position_BT, frequency)
    (batch, tokens, heads, width), pairs = x_BTHK.shape, frequency.numel()
    if 2 * pairs > width or width % SIMD_WIDTH or pairs % SIMD_WIDTH or x_BTHK.stride(3) != 1:
        fact = f"{pairs} pairs rotate {width} channels with stride {x_BTHK.stride(3)}"
        refuse_operands(
            "apply_rotary",
            fact,
            f"give multiples of {SIMD_WIDTH}, at most half as many pairs, stride 1",
        )
    y = x_BTHK.new_empty(x_BTHK.shape)
    batch_stride, token_stride, head_stride, _ = x_BTHK.stride()
    args = RotaryArgs.make(
        x=x_BTHK,
        y=y,
        position=position_BT.contiguous(),
        frequency=frequency.contiguous(),
        cos_sin=array("q", bytes(8 * pairs)),
        batch=batch,
        tokens=tokens,
        heads=heads,
        width=width,
        pairs=pairs,
        x_batch_stride=x_BTHK.itemsize * batch_stride,
        x_token_stride=x_BTHK.itemsize * token_stride,
        x_head_stride=x_BTHK.itemsize * head_stride,
        position_batch_stride=0 if position_BT.shape[0] == 1 else 8 * tokens,
        attention_factor=attention_factor,
    )
    SMALL_BATCH_KERNELS.run("apply_rotary", x_BTHK.dtype, args)
    return y


def silu_and_multiply(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up (SwiGLU, 2002.05202) for two tensors of one shape, whose rows may be
    strided.

    >>> silu_and_multiply(torch.full((1, 16), 100.0), torch.full((1, 16), 2.0))[0, 0].item()
    200.0
    """
    gate, up = _flatten_rows(gate), _flatten_rows(up)
    SILU_CHECKS.check(gate, up)
    _check_vectors("silu_and_multiply", gate.shape[1])
    y, (rows, width), itemsize = gate.new_empty(gate.shape), gate.shape, gate.itemsize
    args = SiluArgs.make(
        gate=gate,
        up=up,
        y=y,
        rows=rows,
        width=width,
        gate_row_stride=itemsize * gate.stride(0),
        up_row_stride=itemsize * up.stride(0),
    )
    SMALL_BATCH_KERNELS.run("silu_and_multiply", gate.dtype, args)
    return y


def scale_to_float32(x_BHK: Tensor, factor: float) -> Tensor:
    """Return x in float32 times a factor, contiguous.

    >>> scale_to_float32(torch.ones(1, 1, 16, dtype=torch.bfloat16), 0.1)[0, 0, 0].item()
    0.100...
    """
    SCALE_CHECKS.check(x_BHK)
    _check_vectors("scale_to_float32", x_BHK.shape[2])
    x = x_BHK.contiguous()
    y = x.new_empty(x.shape, dtype=torch.float32)
    SMALL_BATCH_KERNELS.run(
        "scale_to_float32", x.dtype, ScaleArgs.make(x=x, y=y, count=x.numel(), factor=factor)
    )
    return y


def _flatten_rows(x: Tensor) -> Tensor:
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def _check_vectors(operation: str, width: int) -> None:
    if width % SIMD_WIDTH:
        refuse_operands(
            operation, f"rows have {width} channels", f"give a multiple of {SIMD_WIDTH}"
        )
