"""Kernels of `small_batch_ops`: matrix-vector products, and elementwise kernels for a few tokens.

Loop order of the GEMV kernel: blocks of matrix rows (handed out to threads), tiles of four rows, tiles of four tokens,
then k in steps of 32. Each matrix is read once, in storage order, and prefetched in that order. Every thread packs the
tokens into its scratch buffer in float32. Each y[m, n] is summed in one fixed order, independent of other tokens
and of the number of threads.
"""

from __future__ import annotations

import math

from numba import extending, njit

from . import simd
from .launch import CACHE_LINE_BYTES, SIMD_WIDTH
from .simd import (
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
from .small_batch_ops import GEMV_STEP, GEMV_TILE_SIZE, GemvArgs

GEMV_PREFETCH_BYTES = 8192  # how far ahead of the tile being read rows are prefetched


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


# --- Elementwise kernels, which run in the calling thread ----------------------------------------------


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
