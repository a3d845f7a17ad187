"""Kernel of `linear`: products of a few tokens with matrices.

    run_gemv                    y[m, n] = sum_k x[m, k] W[n, k]

In plain PyTorch: `x.float() @ W.float().T`.

Loop order of the GEMV kernel: blocks of matrix rows (handed out to threads), tiles of four rows,
tiles of four tokens, then k in steps of 32. Each matrix is read once, in storage order, and
prefetched in that order. Every thread packs the tokens into its scratch buffer in float32. Each
y[m, n] is summed in one fixed order, independent of other tokens and of the number of threads. It
is no `gemm`: both operands are read along k, where `gemm` reads rows of one of them.
"""

from __future__ import annotations

from numba import extending, njit

from .capabilities import this_machine
from .jit import args_field_address
from .launch import CACHE_LINE_BYTES, SIMD_WIDTH
from .linear import GEMV_STEP, GEMV_TILE_SIZE
from .simd import (
    address_of,
    fetch_and_increment,
    floats,
    fma,
    ints,
    itemsize,
    load_bf16_even,
    load_bf16_odd,
    prefetch_l2,
    prefetch_nontemporal,
    reduce_sum,
    splat,
    stored,
    vec,
)

GEMV_PREFETCH_BYTES = 8192  # prefetch distance ahead of the current tile
# Each matrix is read once a pass, so that on AMD's processors its lines need not pass through the
# second-level cache. Intel's processors then read memory four times as slowly (6 instead of 27 GB/s
# on an Emerald Rapids core).
prefetch_weights = (
    prefetch_nontemporal if this_machine().processor.startswith("AMD") else prefetch_l2
)


@njit
def pack_tokens(dtype, args, scratch):
    """Write the tokens of each tile channel by channel: 32 channels of each token in turn."""
    width = args.width
    tile_size = min(args.num_tokens, GEMV_TILE_SIZE)
    full = width // GEMV_STEP * GEMV_STEP
    x = stored(dtype, args.x)
    for m in range(args.num_tokens):
        tile = scratch + width * (m // tile_size * tile_size)
        row = m % tile_size
        to = tile + GEMV_STEP * row
        for c in range(0, full, GEMV_STEP):
            step = x + (width * m + c)
            to[0] = load_bf16_even(step)
            to[SIMD_WIDTH] = load_bf16_odd(step)
            to = to + GEMV_STEP * tile_size
        if full < width:
            tile[full * tile_size + SIMD_WIDTH * row] = vec(x, width * m + full)


@njit
def fma_4_rows(part, x, a):
    """Return the sums plus the products of four rows and one vector."""
    first = fma(part[0], x, a[0])
    second = fma(part[1], x, a[1])
    return first, second, fma(part[2], x, a[2]), fma(part[3], x, a[3])


@njit
def load_4_rows(w):
    """Load the two halves of 32 channels of four rows."""
    even = load_bf16_even(w[0]), load_bf16_even(w[1]), load_bf16_even(w[2]), load_bf16_even(w[3])
    odd = load_bf16_odd(w[0]), load_bf16_odd(w[1]), load_bf16_odd(w[2]), load_bf16_odd(w[3])
    return even, odd


@njit
def load_4_rows_tail(w):
    """Load 16 channels of four rows."""
    return vec(w[0], 0), vec(w[1], 0), vec(w[2], 0), vec(w[3], 0)


@njit
def advance(pointers, offset):
    """Return four pointers, further by an offset."""
    first = pointers[0] + offset
    second = pointers[1] + offset
    return first, second, pointers[2] + offset, pointers[3] + offset


@njit
def prefetch_4_rows(bytes_per_number, address):
    """Prefetch as many bytes as a step reads of four rows."""
    end = address + GEMV_TILE_SIZE * bytes_per_number * GEMV_STEP
    for line in range(address, end, CACHE_LINE_BYTES):
        prefetch_weights(line)


@njit
def zero_sums(dtype):
    """Return four vectors of zeros."""
    zero = splat(dtype, 0)
    return zero, zero, zero, zero


@njit
def store_4_sums(y, rows, a):
    """Write the sums of four vectors."""
    y[rows[0]] = reduce_sum(a[0])
    y[rows[1]] = reduce_sum(a[1])
    y[rows[2]] = reduce_sum(a[2])
    y[rows[3]] = reduce_sum(a[3])


@njit
def dot_4_rows_1_token(w, x, y, rows, shape, prefetch_address):
    """Write the products of four rows and one token."""
    width, stride = shape
    a = zero_sums(x)
    size = itemsize(y)
    for _ in range(width // GEMV_STEP):
        prefetch_4_rows(size, prefetch_address)
        even, odd = load_4_rows(w)
        a = fma_4_rows(odd, vec(x, SIMD_WIDTH), fma_4_rows(even, vec(x, 0), a))
        w = advance(w, GEMV_STEP)
        x = x + stride
        prefetch_address = prefetch_address + GEMV_TILE_SIZE * size * GEMV_STEP
    if width % GEMV_STEP:
        a = fma_4_rows(load_4_rows_tail(w), vec(x, 0), a)
    store_4_sums(y, rows, a)


@njit
def dot_4_rows_4_tokens(w, x, y, rows, shape, prefetch_address):
    """Write the products of four rows and four tokens; address 0 prefetches nothing."""
    width, stride, tokens = shape
    size = itemsize(y)
    prefetch_step = GEMV_TILE_SIZE * size * GEMV_STEP if prefetch_address else 0
    a0 = zero_sums(y)
    a1 = zero_sums(y)
    a2 = zero_sums(y)
    a3 = zero_sums(y)
    token, tail = x
    for _ in range(width // GEMV_STEP):
        if prefetch_step:
            prefetch_4_rows(size, prefetch_address)
        even, odd = load_4_rows(w)
        a0 = fma_4_rows(even, vec(token[0], 0), a0)
        a1 = fma_4_rows(even, vec(token[1], 0), a1)
        a2 = fma_4_rows(even, vec(token[2], 0), a2)
        a3 = fma_4_rows(even, vec(token[3], 0), a3)
        a0 = fma_4_rows(odd, vec(token[0], SIMD_WIDTH), a0)
        a1 = fma_4_rows(odd, vec(token[1], SIMD_WIDTH), a1)
        a2 = fma_4_rows(odd, vec(token[2], SIMD_WIDTH), a2)
        a3 = fma_4_rows(odd, vec(token[3], SIMD_WIDTH), a3)
        w = advance(w, GEMV_STEP)
        token = advance(token, stride)
        prefetch_address = prefetch_address + prefetch_step
    if width % GEMV_STEP:
        part = load_4_rows_tail(w)
        a0 = fma_4_rows(part, vec(tail[0], 0), a0)
        a1 = fma_4_rows(part, vec(tail[1], 0), a1)
        a2 = fma_4_rows(part, vec(tail[2], 0), a2)
        a3 = fma_4_rows(part, vec(tail[3], 0), a3)
    store_4_sums(y + tokens[0], rows, a0)
    store_4_sums(y + tokens[1], rows, a1)
    store_4_sums(y + tokens[2], rows, a2)
    store_4_sums(y + tokens[3], rows, a3)


@njit
def four_offsets(first, count, stride):
    """Return the offsets of four items; the last one stands for missing ones."""
    last = count - 1
    a = stride * min(first, last)
    b = stride * min(first + 1, last)
    return a, b, stride * min(first + 2, last), stride * min(first + 3, last)


@njit
def pointers_at(p, offsets):
    """Return pointers at four offsets."""
    return p + offsets[0], p + offsets[1], p + offsets[2], p + offsets[3]


@njit
def multiply_block(args, block, scratch, next_block):
    """Write the products of a block of rows and all tokens."""
    w, rows, y = block
    tokens = args.num_tokens
    width = args.width
    tile_size = min(tokens, GEMV_TILE_SIZE)
    row_bytes = itemsize(w) * width
    stride = GEMV_STEP * tile_size
    tail = scratch + (width // GEMV_STEP * GEMV_STEP) * tile_size
    begin = address_of(w)
    for n in range(0, rows, GEMV_TILE_SIZE):
        own_w = pointers_at(w, four_offsets(n, rows, width))
        own_rows = four_offsets(n, rows, 1)
        prefetch_address = begin + row_bytes * (n + GEMV_TILE_SIZE) + GEMV_PREFETCH_BYTES
        if prefetch_address >= begin + row_bytes * rows:
            prefetch_address += address_of(next_block) - begin - row_bytes * rows
        if tokens == 1:
            dot_4_rows_1_token(own_w, scratch, y, own_rows, (width, stride), prefetch_address)
            continue
        for m in range(0, tokens, GEMV_TILE_SIZE):
            rest = tokens - m
            x = (
                pointers_at(scratch + width * m, four_offsets(0, rest, GEMV_STEP)),
                pointers_at(tail + width * m, four_offsets(0, rest, SIMD_WIDTH)),
            )
            shape = (width, stride, four_offsets(m, tokens, args.num_rows))
            dot_4_rows_4_tokens(own_w, x, y, own_rows, shape, prefetch_address)
            prefetch_address = 0  # the first tile of tokens has prefetched all rows


@njit
def find_block(dtype, args, block):
    """Return the first row of a block of a matrix, the number of its rows, and its outputs."""
    matrix = ints(args.matrices)
    rows_before = 0
    rows_per_block = args.rows_per_block
    rows = matrix[1]
    while block * rows_per_block >= rows:
        block -= (rows + rows_per_block - 1) // rows_per_block
        rows_before = rows_before + rows
        matrix = matrix + 2
        rows = matrix[1]
    first = block * rows_per_block
    w = stored(dtype, matrix[0]) + first * args.width
    return w, min(rows_per_block, rows - first), stored(dtype, args.y) + (rows_before + first)


@extending.register_jitable
def run_gemv(dtype, args):
    """Multiply blocks of rows until none is left."""
    thread = fetch_and_increment(args_field_address(args, "next_thread"))
    scratch = floats(dtype, args.scratch + thread * args.scratch_bytes)
    pack_tokens(dtype, args, scratch)
    num_blocks = args.num_items
    item = fetch_and_increment(args_field_address(args, "next_item"))
    while item < num_blocks:
        next_item = fetch_and_increment(args_field_address(args, "next_item"))
        block = find_block(dtype, args, item)
        next_block = find_block(dtype, args, next_item)[0] if next_item < num_blocks else block[0]
        multiply_block(args, block, scratch, next_block)
        item = next_item
