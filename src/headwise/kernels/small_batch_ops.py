"""Operations on a few tokens: matrix-vector products (GEMV), RMSNorm, rotary embedding, SwiGLU and scaling.

`multiply_small_batch(x, [W1, W2, ...])` equals `torch.cat([x @ W.T for W in (W1, W2, ...)], 1)`, with float32 sums:

    y[m, n] = sum_k x[m, k] W[n, k]

Loop order of the GEMV kernel: blocks of matrix rows (handed out to threads), tiles of four rows, tiles of four tokens,
then k in steps of 32. Each matrix is read once, in storage order, and prefetched in that order. Every thread packs the
tokens into its scratch buffer in float32. Each y[m, n] is summed in one fixed order, independent of other tokens
and of the number of threads.

The elementwise kernels run in the calling thread. In plain PyTorch they are `rms_norm`: `F.rms_norm(x, (width,), weight
+ offset, eps)`; `apply_rotary`: rotation of channel pairs (c, c + pairs); `silu_and_multiply`: `F.silu(gate) * up`;
`scale_to_float32`: `x.float() * factor`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from enum import IntEnum, auto
from typing import Any

import torch
from numba import extending, njit
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import jit, simd
from .autograd_guards import can_skip_dispatcher
from .jit import KernelSet
from .kv_block_attention import CACHE_LINE_BYTES
from .simd import (
    SIMD_WIDTH,
    as_compute_scalar,
    compute_itemsize,
    fetch_and_increment,
    fma,
    load_arg,
    load_bf16_even,
    load_bf16_odd,
    load_int64,
    load_scalar,
    load_storage,
    load_vector,
    prefetch_nontemporal,
    reduce_sum,
    splat,
    storage_itemsize,
    store_storage,
    store_value,
    vec_add,
    vec_div,
    vec_exp,
    vec_max,
    vec_mul,
    vec_sub,
)

GEMV_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
GEMV_TILE_SIZE = 4  # rows, and tokens, of one tile of products
GEMV_STEP = 2 * SIMD_WIDTH  # channels of a row that one step reads
GEMV_PREFETCH_BYTES = 8192  # how far ahead of the tile being read rows are prefetched


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


@njit
def pack_tokens(f, told, desk):
    """Pack tokens into the scratch buffer as [K / 32, M, 32], then the last 16 channels [M, 16] if K % 32 is 16.

    This is the order in which the products read them.
    """
    tokens, width, x = (
        load_int64(told + GemvArgs.NUM_TOKENS),
        load_int64(told + GemvArgs.WIDTH),
        load_int64(told + GemvArgs.X),
    )
    full = width // GEMV_STEP * GEMV_STEP
    for m in range(tokens):
        own, to = x + storage_itemsize(f) * width * m, desk + 2 * CACHE_LINE_BYTES * m
        for c in range(0, full, GEMV_STEP):
            store_value(to, load_bf16_even(f, own + storage_itemsize(f) * c))
            store_value(to + CACHE_LINE_BYTES, load_bf16_odd(f, own + storage_itemsize(f) * c))
            to += 2 * CACHE_LINE_BYTES * tokens
        if full < width:
            store_value(
                desk + 4 * full * tokens + CACHE_LINE_BYTES * m, load_storage(f, own + storage_itemsize(f) * full)
            )


@njit
def fma_4_rows(part, x, a):
    """Multiply 16 channels of four matrix rows with those of one token and add them to the sums `a`."""
    return fma(part[0], x, a[0]), fma(part[1], x, a[1]), fma(part[2], x, a[2]), fma(part[3], x, a[3])


@njit
def load_4_rows(f, w):
    """Load 32 channels of each of four rows, as two halves (even and odd channels for bfloat16)."""
    even = load_bf16_even(f, w[0]), load_bf16_even(f, w[1]), load_bf16_even(f, w[2]), load_bf16_even(f, w[3])
    return even, (load_bf16_odd(f, w[0]), load_bf16_odd(f, w[1]), load_bf16_odd(f, w[2]), load_bf16_odd(f, w[3]))


@njit
def load_4_rows_tail(f, w):
    """Load the last 16 channels of each of four rows."""
    return load_storage(f, w[0]), load_storage(f, w[1]), load_storage(f, w[2]), load_storage(f, w[3])


@njit
def advance_addresses(at, by):
    """Add one offset, `by`, to four addresses."""
    return at[0] + by, at[1] + by, at[2] + by, at[3] + by


@njit
def prefetch_4_rows(f, at):
    """Prefetch as many bytes as one step reads of four rows."""
    for line in range(0, GEMV_TILE_SIZE * storage_itemsize(f) * GEMV_STEP, CACHE_LINE_BYTES):
        prefetch_nontemporal(at + line)


@njit
def zero_sums(f):
    """Return four vectors of zeros."""
    zero = splat(as_compute_scalar(f, 0.0))
    return zero, zero, zero, zero


@njit
def store_4_sums(f, y, a):
    """Reduce four vectors of sums and store them as four output elements of one token."""
    store_storage(f, y[0], reduce_sum(a[0]))
    store_storage(f, y[1], reduce_sum(a[1]))
    store_storage(f, y[2], reduce_sum(a[2]))
    store_storage(f, y[3], reduce_sum(a[3]))


@njit
def dot_4_rows_1_token(f, w, x, y, shape, ask):
    """Compute the dot products of four rows with one token.

    `shape` is the row width and the bytes between two steps of the packed token.
    """
    width, apart = shape
    a, by = zero_sums(f), storage_itemsize(f) * GEMV_STEP
    for _ in range(width // GEMV_STEP):
        prefetch_4_rows(f, ask)
        even, odd = load_4_rows(f, w)
        a = fma_4_rows(odd, load_vector(f, x + CACHE_LINE_BYTES), fma_4_rows(even, load_vector(f, x), a))
        w, x, ask = advance_addresses(w, by), x + apart, ask + GEMV_TILE_SIZE * by
    if width % GEMV_STEP:
        a = fma_4_rows(load_4_rows_tail(f, w), load_vector(f, x), a)
    store_4_sums(f, y, a)


@njit
def dot_4_rows_4_tokens(f, w, x, y, shape, ask):
    """Compute the dot products of four rows with four tokens.

    `x` holds the addresses of the packed tokens and those of their last 16 channels.
    """
    width, apart, step = shape
    a0, a1, a2, a3, by = zero_sums(f), zero_sums(f), zero_sums(f), zero_sums(f), storage_itemsize(f) * GEMV_STEP
    at, ends = x
    for _ in range(width // GEMV_STEP):
        prefetch_4_rows(f, ask)
        even, odd = load_4_rows(f, w)
        a0, a1 = fma_4_rows(even, load_vector(f, at[0]), a0), fma_4_rows(even, load_vector(f, at[1]), a1)
        a2, a3 = fma_4_rows(even, load_vector(f, at[2]), a2), fma_4_rows(even, load_vector(f, at[3]), a3)
        a0, a1 = (
            fma_4_rows(odd, load_vector(f, at[0] + CACHE_LINE_BYTES), a0),
            fma_4_rows(odd, load_vector(f, at[1] + CACHE_LINE_BYTES), a1),
        )
        a2, a3 = (
            fma_4_rows(odd, load_vector(f, at[2] + CACHE_LINE_BYTES), a2),
            fma_4_rows(odd, load_vector(f, at[3] + CACHE_LINE_BYTES), a3),
        )
        w, at, ask = advance_addresses(w, by), advance_addresses(at, apart), ask + GEMV_TILE_SIZE * by
    if width % GEMV_STEP:
        part = load_4_rows_tail(f, w)
        a0, a1 = fma_4_rows(part, load_vector(f, ends[0]), a0), fma_4_rows(part, load_vector(f, ends[1]), a1)
        a2, a3 = fma_4_rows(part, load_vector(f, ends[2]), a2), fma_4_rows(part, load_vector(f, ends[3]), a3)
    store_4_sums(f, advance_addresses(y, step[0]), a0)
    store_4_sums(f, advance_addresses(y, step[1]), a1)
    store_4_sums(f, advance_addresses(y, step[2]), a2)
    store_4_sums(f, advance_addresses(y, step[3]), a3)


@njit
def four_offsets(first, count, apart):
    """Return the offsets of items first to first + 3; the last item is repeated beyond the end."""
    last = count - 1
    return (
        apart * min(first, last),
        apart * min(first + 1, last),
        apart * min(first + 2, last),
        apart * min(first + 3, last),
    )


@njit
def multiply_block(f, told, place, desk, after):
    """Multiply a block of rows of one matrix with all tokens; `after` is the address of the next block, to prefetch."""
    w, rows, y = place
    tokens, width, step = (
        load_int64(told + GemvArgs.NUM_TOKENS),
        load_int64(told + GemvArgs.WIDTH),
        storage_itemsize(f) * load_int64(told + GemvArgs.NUM_ROWS),
    )
    line, apart, tail = (
        storage_itemsize(f) * width,
        2 * CACHE_LINE_BYTES * tokens,
        desk + 4 * (width // GEMV_STEP * GEMV_STEP) * tokens,
    )
    for n in range(0, rows, GEMV_TILE_SIZE):
        own, to, ask = (
            advance_addresses(four_offsets(n, rows, line), w),
            advance_addresses(four_offsets(n, rows, storage_itemsize(f)), y),
            w + line * (n + GEMV_TILE_SIZE) + GEMV_PREFETCH_BYTES,
        )
        if ask >= w + line * rows:
            ask += after - w - line * rows
        if tokens == 1:
            dot_4_rows_1_token(f, own, desk, to, (width, apart), ask)
            continue
        for m in range(0, tokens, GEMV_TILE_SIZE):
            x = (
                advance_addresses(four_offsets(m, tokens, 2 * CACHE_LINE_BYTES), desk),
                advance_addresses(four_offsets(m, tokens, CACHE_LINE_BYTES), tail),
            )
            dot_4_rows_4_tokens(f, own, x, to, (width, apart, four_offsets(m, tokens, step)), ask)


@njit
def find_block(f, told, this):
    """Return the address of block `this`, its number of rows, and the address of its outputs."""
    table, before, rows, each = (
        told + GemvArgs.MATRICES,
        0,
        load_int64(told + GemvArgs.MATRICES + 8),
        load_int64(told + GemvArgs.ROWS_PER_BLOCK),
    )
    while this * each >= rows:
        this -= (rows + each - 1) // each
        before, table = before + rows, table + 16
        rows = load_int64(table + 8)
    first = this * each
    w, y = (
        load_int64(table) + first * storage_itemsize(f) * load_int64(told + GemvArgs.WIDTH),
        load_int64(told + GemvArgs.Y) + storage_itemsize(f) * (before + first),
    )
    return w, min(each, rows - first), y


@extending.register_jitable
def run_gemv(f, told):
    """Entry point of every thread: pack the tokens, then take blocks of rows until none is left."""
    desk = load_int64(told + GemvArgs.SCRATCH) + fetch_and_increment(told + GemvArgs.NEXT_THREAD) * load_int64(
        told + GemvArgs.SCRATCH_BYTES
    )
    pack_tokens(f, told, desk)
    blocks, this = load_int64(told + GemvArgs.NUM_BLOCKS), fetch_and_increment(told + GemvArgs.NEXT_BLOCK)
    while this < blocks:
        following, place = fetch_and_increment(told + GemvArgs.NEXT_BLOCK), find_block(f, told, this)
        multiply_block(f, told, place, desk, find_block(f, told, following)[0] if following < blocks else place[0])
        this = following


GEMV_KERNELS = KernelSet(GEMV_DTYPES, work=run_gemv)

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
    rows, own, threads = sum(table[1::2]), 4 * tokens * width, jit.max_threads()
    each = _rows_per_block(rows, width * x_MK.itemsize, threads)
    blocks = sum([-(-count // each) for count in table[1::2]])
    threads = min(blocks, threads)
    y, desks = x_MK.new_empty(tokens, rows), torch.empty(threads * own, dtype=torch.uint8)
    places = x_MK.data_ptr(), y.data_ptr(), desks.data_ptr()
    told = array("q", (0, 0, blocks, each, *places, own, tokens, width, rows)) + table
    assert 8 * (len(told) - len(table)) == GemvArgs.MATRICES
    jit.run_in_threads(GEMV_KERNELS.function_address("work", x_MK.dtype), told.buffer_info()[0], threads)
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
    jit.run_in_threads(SMALL_BATCH_KERNELS.function_address(name, like.dtype), table.buffer_info()[0], 1)


@extending.register_jitable
def rms_norm_kernel(f, table):
    """Kernel of `rms_norm`.

    Arguments: x and output [rows, width], rows, width, the weight's address or 0, the address of eps and offset.
    """
    x, y, rows, width, weight = (
        load_arg(table, 0),
        load_arg(table, 1),
        load_arg(table, 2),
        load_arg(table, 3),
        load_arg(table, 4),
    )
    double = simd.storage_type("float64")
    eps, more = (
        load_scalar(double, load_arg(table, 5)),
        splat(as_compute_scalar(f, load_scalar(double, load_arg(table, 5) + 8))),
    )
    line = storage_itemsize(f) * width
    for at in range(0, rows * line, line):
        sums = splat(as_compute_scalar(f, 0.0))
        for c in range(at, at + line, storage_itemsize(f) * SIMD_WIDTH):
            part = load_storage(f, x + c)
            sums = fma(part, part, sums)
        share = splat(as_compute_scalar(f, 1.0 / math.sqrt(reduce_sum(sums) / width + eps)))
        for c in range(0, line, storage_itemsize(f) * SIMD_WIDTH):
            part = vec_mul(load_storage(f, x + at + c), share)
            if weight:
                part = vec_mul(part, vec_add(load_storage(f, weight + c), more))
            store_storage(f, y + at + c, part)


@njit
def cos_sin_tables(f, position, frequency, pairs, swell, desk):
    """Write the cosines of `pairs` angles to the scratch buffer, then their sines, times the factor `swell`."""
    double = simd.storage_type("float64")
    for c in range(pairs):
        angle = position * load_scalar(double, frequency + 8 * c)
        store_value(desk + compute_itemsize(f) * c, as_compute_scalar(f, math.cos(angle) * swell))
        store_value(desk + compute_itemsize(f) * (pairs + c), as_compute_scalar(f, math.sin(angle) * swell))


@njit
def rotate_head(f, x, y, width, pairs, desk):
    """Rotate one head of one token."""
    half = storage_itemsize(f) * pairs
    for c in range(0, pairs, SIMD_WIDTH):
        cos, sin, at = (
            load_vector(f, desk + compute_itemsize(f) * c),
            load_vector(f, desk + compute_itemsize(f) * (pairs + c)),
            storage_itemsize(f) * c,
        )
        a, b = load_storage(f, x + at), load_storage(f, x + half + at)
        store_storage(f, y + at, vec_sub(vec_mul(a, cos), vec_mul(b, sin)))
        store_storage(f, y + half + at, vec_add(vec_mul(a, sin), vec_mul(b, cos)))
    for c in range(2 * half, storage_itemsize(f) * width, storage_itemsize(f) * SIMD_WIDTH):
        store_storage(f, y + c, load_storage(f, x + c))


@extending.register_jitable
def rotary_kernel(f, table):
    """Kernel of `apply_rotary`.

    Arguments: x and output [B, T, H, width], these four sizes, the strides of x along B, T and H; the positions and
    their stride along B; the frequencies and their count, the address of the factor, and the scratch buffer for cosines
    and sines.
    """
    x, y, batch, tokens, heads = (
        load_arg(table, 0),
        load_arg(table, 1),
        load_arg(table, 2),
        load_arg(table, 3),
        load_arg(table, 4),
    )
    width, line, apart = load_arg(table, 5), storage_itemsize(f) * load_arg(table, 5), load_arg(table, 10)
    pairs, swell, desk = (
        load_arg(table, 12),
        load_scalar(simd.storage_type("float64"), load_arg(table, 13)),
        load_arg(table, 14),
    )
    for t in range(tokens):
        for b in range(batch):
            if b == 0 or apart:
                position = load_arg(load_arg(table, 9) + b * apart, t)
                cos_sin_tables(f, position, load_arg(table, 11), pairs, swell, desk)
            own = x + b * load_arg(table, 6) + t * load_arg(table, 7)
            to = y + (b * tokens + t) * heads * line
            for h in range(heads):
                rotate_head(f, own + h * load_arg(table, 8), to + h * line, width, pairs, desk)


@extending.register_jitable
def silu_and_multiply_kernel(f, table):
    """Kernel of `silu_and_multiply`.

    Arguments: gate, up and output [rows, width], these two sizes, and the row strides of gate and up.
    """
    gate, up, y, rows, width = (
        load_arg(table, 0),
        load_arg(table, 1),
        load_arg(table, 2),
        load_arg(table, 3),
        load_arg(table, 4),
    )
    line, one = storage_itemsize(f) * width, splat(as_compute_scalar(f, 1.0))
    for m in range(rows):
        g, u, to = gate + m * load_arg(table, 5), up + m * load_arg(table, 6), y + m * line
        for c in range(0, line, storage_itemsize(f) * SIMD_WIDTH):
            x = load_storage(f, g + c)
            e = vec_exp(
                vec_sub(splat(as_compute_scalar(f, 0.0)), vec_max(x, splat(as_compute_scalar(f, -88.0))))
            )  # e^-x overflows for x < -88
            store_storage(f, to + c, vec_mul(vec_div(x, vec_add(one, e)), load_storage(f, u + c)))


@extending.register_jitable
def scale_to_float32_kernel(f, table):
    """Kernel of `scale_to_float32`. Arguments: input, output, number of elements, address of the factor."""
    x, y, count, by = load_arg(table, 0), load_arg(table, 1), load_arg(table, 2), load_arg(table, 3)
    factor = splat(as_compute_scalar(f, load_scalar(simd.storage_type("float64"), by)))
    for c in range(0, count, SIMD_WIDTH):
        store_value(y + compute_itemsize(f) * c, vec_mul(load_storage(f, x + storage_itemsize(f) * c), factor))


SMALL_BATCH_KERNELS = KernelSet(
    GEMV_DTYPES,
    norms=rms_norm_kernel,
    turns=rotary_kernel,
    gates=silu_and_multiply_kernel,
    rises=scale_to_float32_kernel,
)
