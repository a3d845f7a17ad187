"""The kernel of thin products: a few tokens meet the rows of matrices.

Rows are read as they lie, four beside each other, and handed out to threads in blocks; memory is asked for in the order
in which it lies, whichever row is read. Every thread lays tokens out for itself, in single precision. Every number is
summed up in one order, whatever stands beside it and whoever does it.
"""

from __future__ import annotations

from enum import IntEnum, auto

import torch
from numba import extending, njit

from .compiled import KernelSet
from .lanes import SIMD_WIDTH, fma, splat, reduce_sum
from .memory import load_bf16_even, storage_itemsize, load_storage, as_compute_scalar, load_bf16_odd, prefetch_nontemporal, store_value, load_vector, store_storage, fetch_and_increment, load_int64
from .told import CACHE_LINE_BYTES

GEMV_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
GEMV_TILE_SIZE = 4  # rows that are read at once, and tokens that they meet
GEMV_STEP = 2 * SIMD_WIDTH  # numbers of a row that are read at once
GEMV_PREFETCH_BYTES = 8192  # bytes before the next four rows are read memory is asked for them


class GemvArgs(IntEnum):
    """The place of each number of what the kernel is told, as bytes from the start. Addresses count bytes."""

    def _generate_next_value_(name, start, count, last_values):
        return 8 * count

    NEXT_BLOCK = auto()  # counters: the next block, the next thread
    NEXT_THREAD = auto()
    NUM_BLOCKS = auto()
    ROWS_PER_BLOCK = auto()  # rows of a matrix that a thread takes at once
    X = auto()  # [M, K]
    Y = auto()  # [M, rows of all matrices]
    SCRATCH = auto()  # where threads lay out tokens, and how many bytes each has there
    SCRATCH_BYTES = auto()
    NUM_TOKENS = auto()  # M
    WIDTH = auto()  # K
    NUM_ROWS = auto()  # of all matrices together
    MATRICES = auto()  # for each matrix its address, and how many rows it has


@njit
def pack_tokens(f, told, desk):
    """Tokens side by side, [K / 32, M, 32] and what is left, [M, 16]: in the order in which rows meet them."""
    tokens, width, x = load_int64(told + GemvArgs.NUM_TOKENS), load_int64(told + GemvArgs.WIDTH), load_int64(told + GemvArgs.X)
    full = width // GEMV_STEP * GEMV_STEP
    for m in range(tokens):
        own, to = x + storage_itemsize(f) * width * m, desk + 2 * CACHE_LINE_BYTES * m
        for c in range(0, full, GEMV_STEP):
            store_value(to, load_bf16_even(f, own + storage_itemsize(f) * c))
            store_value(to + CACHE_LINE_BYTES, load_bf16_odd(f, own + storage_itemsize(f) * c))
            to += 2 * CACHE_LINE_BYTES * tokens
        if full < width:
            store_value(desk + 4 * full * tokens + CACHE_LINE_BYTES * m, load_storage(f, own + storage_itemsize(f) * full))


@njit
def fma_4_rows(part, x, a):
    """Sixteen numbers of each of four rows meet one token's."""
    return fma(part[0], x, a[0]), fma(part[1], x, a[1]), fma(part[2], x, a[2]), fma(part[3], x, a[3])


@njit
def load_4_rows(f, w):
    """Thirty-two numbers of each of four rows, in two parts."""
    even = load_bf16_even(f, w[0]), load_bf16_even(f, w[1]), load_bf16_even(f, w[2]), load_bf16_even(f, w[3])
    return even, (load_bf16_odd(f, w[0]), load_bf16_odd(f, w[1]), load_bf16_odd(f, w[2]), load_bf16_odd(f, w[3]))


@njit
def load_4_rows_tail(f, w):
    """Sixteen numbers of each of four rows, the last."""
    return load_storage(f, w[0]), load_storage(f, w[1]), load_storage(f, w[2]), load_storage(f, w[3])


@njit
def advance_addresses(at, by):
    """Four addresses further on."""
    return at[0] + by, at[1] + by, at[2] + by, at[3] + by


@njit
def prefetch_4_rows(f, at):
    """Ask for as much as four rows give at once."""
    for line in range(0, GEMV_TILE_SIZE * storage_itemsize(f) * GEMV_STEP, CACHE_LINE_BYTES):
        prefetch_nontemporal(at + line)


@njit
def zero_sums(f):
    """Where sums begin."""
    zero = splat(as_compute_scalar(f, 0.0))
    return zero, zero, zero, zero


@njit
def store_4_sums(f, y, a):
    """Write down what four rows make of a token."""
    store_storage(f, y[0], reduce_sum(a[0]))
    store_storage(f, y[1], reduce_sum(a[1]))
    store_storage(f, y[2], reduce_sum(a[2]))
    store_storage(f, y[3], reduce_sum(a[3]))


@njit
def dot_4_rows_1_token(f, w, x, y, shape, ask):
    """Four rows meet one token; `shape`: how wide they are, how far apart what they meet lies."""
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
    """Four rows meet four tokens; `x` is where each of these begins, and where their last sixteen numbers are."""
    width, apart, step = shape
    a0, a1, a2, a3, by = zero_sums(f), zero_sums(f), zero_sums(f), zero_sums(f), storage_itemsize(f) * GEMV_STEP
    at, ends = x
    for _ in range(width // GEMV_STEP):
        prefetch_4_rows(f, ask)
        even, odd = load_4_rows(f, w)
        a0, a1 = fma_4_rows(even, load_vector(f, at[0]), a0), fma_4_rows(even, load_vector(f, at[1]), a1)
        a2, a3 = fma_4_rows(even, load_vector(f, at[2]), a2), fma_4_rows(even, load_vector(f, at[3]), a3)
        a0, a1 = fma_4_rows(odd, load_vector(f, at[0] + CACHE_LINE_BYTES), a0), fma_4_rows(odd, load_vector(f, at[1] + CACHE_LINE_BYTES), a1)
        a2, a3 = fma_4_rows(odd, load_vector(f, at[2] + CACHE_LINE_BYTES), a2), fma_4_rows(odd, load_vector(f, at[3] + CACHE_LINE_BYTES), a3)
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
    """How far four of them lie from the beginning: from one on, and the last again where there are no more."""
    last = count - 1
    return (
        apart * min(first, last),
        apart * min(first + 1, last),
        apart * min(first + 2, last),
        apart * min(first + 3, last),
    )


@njit
def multiply_block(f, told, place, desk, after):
    """Some rows of one matrix meet all tokens; `after`: where the next rows lie."""
    w, rows, y = place
    tokens, width, step = load_int64(told + GemvArgs.NUM_TOKENS), load_int64(told + GemvArgs.WIDTH), storage_itemsize(f) * load_int64(told + GemvArgs.NUM_ROWS)
    line, apart, tail = storage_itemsize(f) * width, 2 * CACHE_LINE_BYTES * tokens, desk + 4 * (width // GEMV_STEP * GEMV_STEP) * tokens
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
            x = advance_addresses(four_offsets(m, tokens, 2 * CACHE_LINE_BYTES), desk), advance_addresses(four_offsets(m, tokens, CACHE_LINE_BYTES), tail)
            dot_4_rows_4_tokens(f, own, x, to, (width, apart, four_offsets(m, tokens, step)), ask)


@njit
def find_block(f, told, this):
    """Where a block of rows lies, how many they are, and where their sums go."""
    table, before, rows, each = told + GemvArgs.MATRICES, 0, load_int64(told + GemvArgs.MATRICES + 8), load_int64(told + GemvArgs.ROWS_PER_BLOCK)
    while this * each >= rows:
        this -= (rows + each - 1) // each
        before, table = before + rows, table + 16
        rows = load_int64(table + 8)
    first = this * each
    w, y = load_int64(table) + first * storage_itemsize(f) * load_int64(told + GemvArgs.WIDTH), load_int64(told + GemvArgs.Y) + storage_itemsize(f) * (before + first)
    return w, min(each, rows - first), y


@extending.register_jitable
def run_gemv(f, told):
    """What every thread does: take a block, read it, until there are no more."""
    desk = load_int64(told + GemvArgs.SCRATCH) + fetch_and_increment(told + GemvArgs.NEXT_THREAD) * load_int64(told + GemvArgs.SCRATCH_BYTES)
    pack_tokens(f, told, desk)
    blocks, this = load_int64(told + GemvArgs.NUM_BLOCKS), fetch_and_increment(told + GemvArgs.NEXT_BLOCK)
    while this < blocks:
        following, place = fetch_and_increment(told + GemvArgs.NEXT_BLOCK), find_block(f, told, this)
        multiply_block(f, told, place, desk, find_block(f, told, following)[0] if following < blocks else place[0])
        this = following


GEMV_KERNELS = KernelSet(GEMV_DTYPES, work=run_gemv)
