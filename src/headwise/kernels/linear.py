"""Linear layers, by torch or, where it was measured to be faster and no gradient is needed, by
headwise's kernel.

With few tokens, as in a decode step, a product takes as long as reading its weights from memory.
torch's product reaches a third of the memory bandwidth (bfloat16, 2 cores). With many tokens the
kernel wins on processors that torch's matrix library was not tuned for (float32 on AMD). It reads
the weights in their usual layout, so nothing has to be repacked when they change.

`multiply_small_batch(x, [W1, W2, ...])`, the kernel's operation, equals `torch.cat([x @ W.T for W
in (W1, W2, ...)], 1)`, with float32 sums:

    y[m, n] = sum_k x[m, k] W[n, k]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import launch
from .capabilities import crossover_sizes, this_machine
from .launch import SIMD_WIDTH, KernelSet, ParallelKernelArgs, TensorArg, matrix_table
from .operand_checks import (
    PLAIN_TENSOR_TYPES,
    OperandChecks,
    can_skip_dispatcher,
    is_under_functorch,
    refuse_operands,
)

GEMV_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
# Crossover points: bytes of weights from which the kernel is faster than torch's product, for one
# token and for several, and tokens up to which it is.
GEMV_POINTS = {
    name: (f"gemv_{label}", f"gemm_{label}", f"gemm_tokens_{label}")
    for name, label in GEMV_DTYPES.items()
}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b for x [..., K] and W [N, K], as `torch.nn.functional.linear`.

    >>> linear(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])).item()
    11.0
    """
    if bias is None and uses_gemv_kernel(x, (weight,)):
        return multiply_small_batch(x.reshape(-1, x.shape[-1]), [weight]).view(
            *x.shape[:-1], weight.shape[0]
        )
    return F.linear(x, weight, bias)


def linear_many(x: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """x W^T for each of several weight matrices, in one kernel call or one product if that is
    faster.

    >>> [
    ...     y.item()
    ...     for y in linear_many(
    ...         torch.tensor([[1.0, 2.0]]), [torch.tensor([[3.0, 4.0]]), torch.ones(1, 2)]
    ...     )
    ... ]
    [11.0, 3.0]
    """
    if uses_gemv_kernel(x, weights):
        flat = multiply_small_batch(x.reshape(-1, x.shape[-1]), list(weights))
        return flat.view(*x.shape[:-1], -1).split([w.shape[0] for w in weights], -1)
    if torch.is_grad_enabled() and should_concatenate(x, weights):
        return F.linear(x, torch.cat(list(weights))).split([w.shape[0] for w in weights], -1)
    return [F.linear(x, weight) for weight in weights]


def should_concatenate(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """True if one product with the concatenated matrices is faster, although every call
    concatenates them.

    It is in mixed-precision training on a CPU, because autocast copies every matrix anyway; in
    float32 it is not.
    """
    return (
        torch.is_grad_enabled()
        and x.device.type == "cpu"
        and torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and all(type(w) in PLAIN_TENSOR_TYPES and w.requires_grad for w in weights)
    )


def uses_gemv_kernel(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """True if the kernel runs this product: faster at this size on this machine; no gradient."""
    if torch.is_grad_enabled() or x.dtype not in GEMV_POINTS:
        return False
    one_token, several_tokens, most_tokens = GEMV_POINTS[x.dtype]
    width = x.shape[-1]
    sizes = crossover_sizes()
    least_bytes = sizes[one_token if x.numel() == width else several_tokens]
    if sum(map(torch.numel, weights)) * x.dtype.itemsize < least_bytes:
        return False
    return (
        0 < x.numel() <= sizes[most_tokens] * width
        and x.device.type == "cpu"
        and type(x) is Tensor
        and width % SIMD_WIDTH == 0
        and all(
            type(w) in PLAIN_TENSOR_TYPES and w.dtype == x.dtype and w.is_contiguous()
            for w in weights
        )
        and all(w.is_cpu and w.shape[1] == width for w in weights)
        and not torch.is_autocast_enabled("cpu")
        and not is_under_functorch()
        and GEMV_KERNELS.is_usable(x.dtype)
    )


GEMV_TILE_SIZE = 4  # rows, and tokens, of one tile of products
GEMV_STEP = 2 * SIMD_WIDTH  # channels of a row that one step reads


class GemvArgs(ParallelKernelArgs):
    """Arguments of the GEMV; a work item is a block of rows of one matrix, the scratch buffer holds
    packed tokens.
    """

    rows_per_block: int = 0  # matrix rows that a thread takes at a time
    x: TensorArg = None  # [M, K]
    y: TensorArg = None  # [M, rows of all matrices]
    num_tokens: int = 0  # M
    width: int = 0  # K
    num_rows: int = 0  # N of all matrices together
    matrices: TensorArg = None  # pairs: address and number of rows of each matrix


GEMV_KERNELS = KernelSet("small_batch_kernels", GEMV_DTYPES, gemv=("run_gemv", GemvArgs))

# --- The operation `headwise::small_batch_matmul` -------------------------------------------------

BLOCKS_PER_THREAD = 2
MAX_BLOCK_BYTES = 2**19  # minimum number of blocks per thread; maximum bytes of a block
# of the tokens that are multiplied at a time
PACKED_TOKEN_BYTES = (this_machine().l2_cache_bytes) // 2
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
    if can_skip_dispatcher(x_MK, *matrices):
        return _launch_gemv(x_MK, matrices)
    return _small_batch_matmul_op(x_MK, matrices)


@torch.library.custom_op("headwise::small_batch_matmul", mutates_args=(), device_types="cpu")
def _small_batch_matmul_op(x_MK: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    return _launch_gemv(x_MK, matrices)


def _launch_gemv(x_MK: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    GEMV_CHECKS.check(x_MK, *matrices)
    for matrix in matrices:
        if not matrix.is_contiguous():
            fact = f"a matrix {list(matrix.shape)} has strides {matrix.stride()}"
            refuse_operands("small_batch_matmul", fact, "give a contiguous matrix")
    x_MK = x_MK.contiguous()
    num_tokens, width = x_MK.shape
    num_rows = sum([matrix.shape[0] for matrix in matrices])
    count = _tokens_per_pass(width)
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
    num_rows = sum(table[1::2])
    threads = launch.max_threads()
    scratch_bytes = 4 * width * (-(-num_tokens // tile_size) * tile_size)
    # Long blocks are read faster, short ones balance the threads better.
    count = min(
        -(-num_rows // (BLOCKS_PER_THREAD * threads)),
        max(1, MAX_BLOCK_BYTES // (width * x_MK.itemsize)),
    )
    rows_per_block = -(-count // GEMV_TILE_SIZE) * GEMV_TILE_SIZE
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
    GEMV_KERNELS.run_kernel("gemv", x_MK.dtype, args, threads)


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
