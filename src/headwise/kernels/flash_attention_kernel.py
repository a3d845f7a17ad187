"""Kernels of `flash_attention`: tiles of 64 queries against blocks of 64 keys, with online softmax.

Forward, for the queries of one work item and blocks of keys j:

    S = K_block Q^T                        [keys, 64 queries]: queries are the columns, so softmax runs across vectors
    m' = max(m, max_j S),  P = exp(S - m'),  l = l exp(m - m') + sum_j P,  O = O exp(m - m') + V_block^T P

and finally o = O / l, lse = m + log l. Backward, with P = exp(S - lse) and D = rowsum(o * grad):

    dV += P grad,   dS = P * (V grad^T - D),   dQ += dS^T K * scale,   dK += dS Q * scale

Loop order: forward, one work item is a tile of 64 queries of one key head and loops over key blocks. Backward, one
work item is a part of the keys of one key head; it loops over query tiles, then over key blocks, so that only one
thread adds to a key's gradients. Queries' gradients are summed over the parts afterwards. In plain PyTorch the forward
kernel is `F.scaled_dot_product_attention` with the key ranges as a boolean mask.

All products are `gemm`: rows are accumulated four at a time, in tiles of up to 64 columns, so that 16 vector sums stay
in registers. The left operand is read element by element and may have any strides.
"""

from __future__ import annotations

import math

from numba import extending, njit

from . import simd
from .flash_attention import (
    FLASH_KEY_BLOCK_SIZE,
    GEMM_ROW_PADDING,
    NUM_ROW_STATE_VECTORS,
    QUERY_TILE_ROWS,
    FlashAttentionArgs,
)
from .launch import SIMD_WIDTH
from .simd import (
    fma,
    load_arg,
    load_int64,
    load_scalar,
    load_vector,
    reduce_sum,
    round_up_to_simd,
    select_below,
    splat,
    store_value,
    vec_add,
    vec_exp,
    vec_max,
    vec_mul,
    vec_sub,
)


@njit
def load_64(f, address):
    """Load 64 adjacent elements as four vectors."""
    step = simd.compute_itemsize(f) * SIMD_WIDTH
    return (
        load_vector(f, address),
        load_vector(f, address + step),
        load_vector(f, address + 2 * step),
        load_vector(f, address + 3 * step),
    )


@njit
def zeros_64(f):
    """Return four vectors of zeros."""
    zero = splat(simd.as_compute_scalar(f, 0))
    return zero, zero, zero, zero


@njit
def axpy_64(x, share, a):
    """Return a + share * x for 64 elements."""
    p = splat(share)
    return fma(x[0], p, a[0]), fma(x[1], p, a[1]), fma(x[2], p, a[2]), fma(x[3], p, a[3])


@njit
def store_64(f, to, a):
    """Store 64 adjacent elements."""
    step = simd.compute_itemsize(f) * SIMD_WIDTH
    store_value(to, a[0])
    store_value(to + step, a[1])
    store_value(to + 2 * step, a[2])
    store_value(to + 3 * step, a[3])


@njit
def gemm_4x64(f, to, a, b, depth, more):
    """Compute a tile of 4 rows and 64 columns over `depth` steps; add to the stored values if `more`."""
    (to, step), (a0, a1, a2, a3, on), (b, ahead) = to, a, b
    r0 = r1 = r2 = r3 = zeros_64(f)
    if more:
        r0, r1, r2, r3 = load_64(f, to), load_64(f, to + step), load_64(f, to + 2 * step), load_64(f, to + 3 * step)
    for n in range(depth):
        x, at = load_64(f, b + ahead * n), on * n
        r0, r1 = axpy_64(x, load_scalar(f, a0 + at), r0), axpy_64(x, load_scalar(f, a1 + at), r1)
        r2, r3 = axpy_64(x, load_scalar(f, a2 + at), r2), axpy_64(x, load_scalar(f, a3 + at), r3)
    store_64(f, to, r0)
    store_64(f, to + step, r1)
    store_64(f, to + 2 * step, r2)
    store_64(f, to + 3 * step, r3)


@njit
def gemm_4x16(f, to, a, b, depth, more):
    """Compute a tile of 4 rows and 16 columns over `depth` steps; add to the stored values if `more`."""
    (to, step), (a0, a1, a2, a3, on), (b, ahead) = to, a, b
    r0 = r1 = r2 = r3 = splat(simd.as_compute_scalar(f, 0))
    if more:
        r0, r1, r2, r3 = (
            load_vector(f, to),
            load_vector(f, to + step),
            load_vector(f, to + 2 * step),
            load_vector(f, to + 3 * step),
        )
    for n in range(depth):
        x, at = load_vector(f, b + ahead * n), on * n
        r0, r1 = fma(x, splat(load_scalar(f, a0 + at)), r0), fma(x, splat(load_scalar(f, a1 + at)), r1)
        r2, r3 = fma(x, splat(load_scalar(f, a2 + at)), r2), fma(x, splat(load_scalar(f, a3 + at)), r3)
    store_value(to, r0)
    store_value(to + step, r1)
    store_value(to + 2 * step, r2)
    store_value(to + 3 * step, r3)


@njit
def gemm_4_rows(f, to, a, b, shape, more):
    """Compute four rows of any width, in tiles of 64 columns, then of 16."""
    (to, step), (b, ahead), (wide, depth), size = to, b, shape, simd.compute_itemsize(f)
    full = wide // QUERY_TILE_ROWS * QUERY_TILE_ROWS
    for c in range(0, full * size, QUERY_TILE_ROWS * size):
        gemm_4x64(f, (to + c, step), a, (b + c, ahead), depth, more)
    for c in range(full * size, wide * size, SIMD_WIDTH * size):
        gemm_4x16(f, (to + c, step), a, (b + c, ahead), depth, more)


@njit
def gemm(f, to, a, b, shape, more):
    """Compute to = a b, or add it to `to` if `more` is set.

    `to` and `b` are pairs (address, bytes to the next row); `a` is (address, bytes to the next row, bytes to the next
    step). `shape` is (rows, columns, steps), the columns a multiple of 16. Rows are computed in fours, so up to three
    rows behind the last are written (`GEMM_ROW_PADDING`).
    """
    (to, step), (a, apart, on), (rows, wide, depth) = to, a, shape
    for m in range(0, rows, 4):
        left = rows - m - 1  # beyond the last row, read the last row again
        first = a + apart * m
        of = (first, first + apart * min(1, left), first + apart * min(2, left), first + apart * min(3, left), on)
        gemm_4_rows(f, (to + step * m, step), of, b, (wide, depth), more)


# --- Forward pass --------------------------------------------------------------------------------------


@njit
def load_key_ranges(f, table, unit, desk):
    """Write the key range of each of 64 rows to the scratch buffer, empty ranges for missing rows.

    Returns the first and last key of the union of the ranges, cut to the work item's keys, and those of their
    intersection, inside which no mask is needed.
    """
    lines, count = load_arg(table, FlashAttentionArgs.QUERY_ROWS) + 8 * load_int64(unit + 8), load_int64(unit + 16)
    low, high, inner, outer = load_arg(table, FlashAttentionArgs.S), 0, 0, load_arg(table, FlashAttentionArgs.S)
    tokens = load_arg(table, FlashAttentionArgs.T) * load_arg(table, FlashAttentionArgs.NUM_KEY_RANGE_ROWS)
    for r in range(QUERY_TILE_ROWS):
        first = end = 0
        if r < count:
            token = load_int64(lines + 8 * r) // load_arg(table, FlashAttentionArgs.H) % tokens
            first, end = (
                load_int64(load_arg(table, FlashAttentionArgs.KEY_RANGES) + 16 * token),
                load_int64(load_arg(table, FlashAttentionArgs.KEY_RANGES) + 16 * token + 8),
            )
            low, high, inner, outer = min(low, first), max(high, end), max(inner, first), min(outer, end)
        store_value(desk + simd.compute_itemsize(f) * r, simd.as_compute_scalar(f, first))
        store_value(desk + simd.compute_itemsize(f) * (QUERY_TILE_ROWS + r), simd.as_compute_scalar(f, end))
    return max(low, load_int64(unit + 24)), min(high, load_int64(unit + 32)), inner, outer


@njit
def load_rows_transposed(f, table, unit, source, dim, to):
    """Write the rows of a work item as columns, [dim, 64]; missing rows become zeros."""
    lines, count, size = (
        load_arg(table, FlashAttentionArgs.QUERY_ROWS) + 8 * load_int64(unit + 8),
        load_int64(unit + 16),
        simd.compute_itemsize(f),
    )
    for r in range(count):
        row = source + size * dim * load_int64(lines + 8 * r)
        for c in range(dim):
            store_value(to + size * (QUERY_TILE_ROWS * c + r), load_scalar(f, row + size * c))
    for r in range(count, QUERY_TILE_ROWS):
        for c in range(dim):
            store_value(to + size * (QUERY_TILE_ROWS * c + r), simd.as_compute_scalar(f, 0))


@njit
def scale_columns(f, to, rows, factor):
    """Multiply the columns of [rows, 64] with one factor each."""
    step = simd.compute_itemsize(f) * SIMD_WIDTH
    for c in range(0, simd.compute_itemsize(f) * QUERY_TILE_ROWS, step):
        share = load_vector(f, factor + c)
        for n in range(rows):
            here = to + simd.compute_itemsize(f) * QUERY_TILE_ROWS * n + c
            store_value(here, vec_mul(load_vector(f, here), share))


@njit
def mask_scores(f, scores, ends, start, count):
    """Set the scores of keys outside a query's range to -inf."""
    size, lowest = simd.compute_itemsize(f), splat(simd.as_compute_scalar(f, -math.inf))
    for c in range(0, size * QUERY_TILE_ROWS, size * SIMD_WIDTH):
        first, end = load_vector(f, ends + c), load_vector(f, ends + size * QUERY_TILE_ROWS + c)
        for n in range(count):
            here, key = scores + size * QUERY_TILE_ROWS * n + c, splat(simd.as_compute_scalar(f, start + n))
            below = select_below(key, end, load_vector(f, here), lowest)
            store_value(here, select_below(key, first, lowest, below))


@njit
def online_softmax(f, scores, ends, count):
    """Replace scores by exp(score - running maximum); update the maxima, sums and rescaling factors."""
    size, lowest, zero = (
        simd.compute_itemsize(f),
        splat(simd.as_compute_scalar(f, -math.inf)),
        splat(simd.as_compute_scalar(f, 0)),
    )
    step = size * QUERY_TILE_ROWS
    for c in range(0, step, size * SIMD_WIDTH):
        old = load_vector(f, ends + 2 * step + c)
        top = old
        for n in range(count):
            top = vec_max(top, load_vector(f, scores + step * n + c))
        base = select_below(lowest, top, top, zero)  # if all scores are -inf, every weight is exp(-inf) = 0
        factor = vec_exp(vec_sub(old, base))
        sums = vec_mul(load_vector(f, ends + 3 * step + c), factor)
        for n in range(count):
            e = vec_exp(vec_sub(load_vector(f, scores + step * n + c), base))
            store_value(scores + step * n + c, e)
            sums = vec_add(sums, e)
        store_value(ends + 2 * step + c, top)
        store_value(ends + 3 * step + c, sums)
        store_value(ends + 4 * step + c, factor)


@njit
def qk_tile(f, table, at, q, scores, span):
    """Compute the scores of adjacent keys with all queries of the tile."""
    k, (start, count) = at, span
    step = simd.compute_itemsize(f) * QUERY_TILE_ROWS
    a = (
        k + load_arg(table, FlashAttentionArgs.K_KEY_STRIDE) * start,
        load_arg(table, FlashAttentionArgs.K_KEY_STRIDE),
        simd.compute_itemsize(f),
    )
    gemm(f, (scores, step), a, (q, step), (count, QUERY_TILE_ROWS, load_arg(table, FlashAttentionArgs.DIM)), False)


@njit
def store_output_and_lse(f, table, unit, read_there, ends):
    """Store the normalised outputs and the log-sum-exp; rows without keys get output 0 and lse inf.

    With lse = inf, exp(s - lse) is 0 in the backward pass.
    """
    lines, size, vdim = (
        load_arg(table, FlashAttentionArgs.QUERY_ROWS) + 8 * load_int64(unit + 8),
        simd.compute_itemsize(f),
        load_arg(table, FlashAttentionArgs.VDIM),
    )
    for r in range(load_int64(unit + 16)):
        line = load_int64(lines + 8 * r)
        top, sums = (
            load_scalar(f, ends + size * (2 * QUERY_TILE_ROWS + r)),
            load_scalar(f, ends + size * (3 * QUERY_TILE_ROWS + r)),
        )
        share = simd.as_compute_scalar(f, 1 / sums if sums != 0 else 0.0)
        lse = simd.as_compute_scalar(f, top + math.log(sums) if sums != 0 else math.inf)
        store_value(load_arg(table, FlashAttentionArgs.LSE) + size * line, lse)
        for c in range(vdim):
            here = load_arg(table, FlashAttentionArgs.OUT) + size * (line * vdim + c)
            store_value(
                here, simd.as_compute_scalar(f, load_scalar(f, read_there + size * (QUERY_TILE_ROWS * c + r)) * share)
            )


@njit
def clear_memory(f, to, count):
    """Store `count` zeros, rounded up to whole vectors."""
    for n in range(0, count, SIMD_WIDTH):
        store_value(to + simd.compute_itemsize(f) * n, splat(simd.as_compute_scalar(f, 0)))


@extending.register_jitable
def flash_forward(f, table, number, desk):
    """Forward kernel: attend from the tile of queries of one work item to all of its keys, block by block."""
    unit = load_arg(table, FlashAttentionArgs.WORK_ITEMS) + 48 * number
    size, dim, vdim, groups = (
        simd.compute_itemsize(f),
        load_arg(table, FlashAttentionArgs.DIM),
        load_arg(table, FlashAttentionArgs.VDIM),
        load_arg(table, FlashAttentionArgs.GROUPS),
    )
    step, own, each = size * QUERY_TILE_ROWS, load_int64(unit) // groups, load_int64(unit) % groups
    q = desk + step * NUM_ROW_STATE_VECTORS
    scores = q + step * (dim + GEMM_ROW_PADDING)
    sums = scores + step * FLASH_KEY_BLOCK_SIZE
    k = (
        load_arg(table, FlashAttentionArgs.K)
        + own * load_arg(table, FlashAttentionArgs.K_ROW_STRIDE)
        + each * load_arg(table, FlashAttentionArgs.K_HEAD_STRIDE)
    )
    v = (
        load_arg(table, FlashAttentionArgs.V)
        + own * load_arg(table, FlashAttentionArgs.V_ROW_STRIDE)
        + each * load_arg(table, FlashAttentionArgs.V_HEAD_STRIDE)
    )
    start, stop, inner, outer = load_key_ranges(f, table, unit, desk)
    load_rows_transposed(f, table, unit, load_arg(table, FlashAttentionArgs.Q), dim, q)
    clear_memory(f, desk + 2 * step, 3 * QUERY_TILE_ROWS)
    for c in range(0, step, size * SIMD_WIDTH):
        store_value(desk + 2 * step + c, splat(simd.as_compute_scalar(f, -math.inf)))
        store_value(
            desk + 4 * step + c, splat(simd.as_compute_scalar(f, load_scalar(f, table + 8 * FlashAttentionArgs.SCALE)))
        )
    scale_columns(f, q, dim, desk + 4 * step)
    clear_memory(f, sums, (vdim + GEMM_ROW_PADDING) * QUERY_TILE_ROWS)
    while start < stop:
        count = min(FLASH_KEY_BLOCK_SIZE, stop - start)
        qk_tile(f, table, k, q, scores, (start, count))
        if start < inner or start + count > outer:
            mask_scores(f, scores, desk, start, count)
        online_softmax(f, scores, desk, count)
        scale_columns(f, sums, vdim, desk + 4 * step)
        values = (
            v + load_arg(table, FlashAttentionArgs.V_KEY_STRIDE) * start,
            size,
            load_arg(table, FlashAttentionArgs.V_KEY_STRIDE),
        )
        gemm(f, (sums, step), values, (scores, step), (vdim, QUERY_TILE_ROWS, count), True)
        start += count
    store_output_and_lse(f, table, unit, sums, desk)


# --- Backward pass -------------------------------------------------------------------------------------


@njit
def load_rows(f, table, unit, source, dim, to):
    """Write the rows of a work item below each other, padded with zeros to whole vectors and 64 rows."""
    lines, count, size = (
        load_arg(table, FlashAttentionArgs.QUERY_ROWS) + 8 * load_int64(unit + 8),
        load_int64(unit + 16),
        simd.compute_itemsize(f),
    )
    clear_memory(f, to, QUERY_TILE_ROWS * round_up_to_simd(dim))
    for r in range(count):
        row, here = source + size * dim * load_int64(lines + 8 * r), to + size * round_up_to_simd(dim) * r
        for c in range(0, dim // SIMD_WIDTH * SIMD_WIDTH, SIMD_WIDTH):
            store_value(here + size * c, load_vector(f, row + size * c))
        for c in range(dim // SIMD_WIDTH * SIMD_WIDTH, dim):
            store_value(here + size * c, load_scalar(f, row + size * c))


@njit
def inner_product(f, a, b, count):
    """Return the inner product of two arrays of `count` elements."""
    size, sums = simd.compute_itemsize(f), splat(simd.as_compute_scalar(f, 0))
    for c in range(0, count // SIMD_WIDTH * SIMD_WIDTH, SIMD_WIDTH):
        sums = fma(load_vector(f, a + size * c), load_vector(f, b + size * c), sums)
    every = reduce_sum(sums)
    for c in range(count // SIMD_WIDTH * SIMD_WIDTH, count):
        every += load_scalar(f, a + size * c) * load_scalar(f, b + size * c)
    return every


@njit
def load_row_statistics(f, table, unit, desk):
    """Write each row's log-sum-exp, its D = o . grad, and the scale to the scratch buffer."""
    lines, count, size = (
        load_arg(table, FlashAttentionArgs.QUERY_ROWS) + 8 * load_int64(unit + 8),
        load_int64(unit + 16),
        simd.compute_itemsize(f),
    )
    to, vdim = desk + size * 2 * QUERY_TILE_ROWS, load_arg(table, FlashAttentionArgs.VDIM)
    for r in range(QUERY_TILE_ROWS):
        lse, both = simd.as_compute_scalar(f, float("inf")), simd.as_compute_scalar(f, 0)
        if r < count:
            line = load_int64(lines + 8 * r)
            lse, row = load_scalar(f, load_arg(table, FlashAttentionArgs.LSE) + size * line), size * vdim * line
            both = inner_product(
                f, load_arg(table, FlashAttentionArgs.OUT) + row, load_arg(table, FlashAttentionArgs.GRAD) + row, vdim
            )
        store_value(to + size * r, lse)
        store_value(to + size * (QUERY_TILE_ROWS + r), both)
        store_value(to + size * (2 * QUERY_TILE_ROWS + r), load_scalar(f, table + 8 * FlashAttentionArgs.SCALE))


@njit
def recompute_weights(f, scores, desk, count):
    """Replace scores by attention weights, exp(score - lse)."""
    size = simd.compute_itemsize(f)
    step = size * QUERY_TILE_ROWS
    for c in range(0, step, size * SIMD_WIDTH):
        lse = load_vector(f, desk + 2 * step + c)
        for n in range(count):
            store_value(scores + step * n + c, vec_exp(vec_sub(load_vector(f, scores + step * n + c), lse)))


@njit
def grad_scores(f, scores, grads, desk, count):
    """Replace gradients of weights by gradients of scores: P * (dP - D)."""
    size = simd.compute_itemsize(f)
    step = size * QUERY_TILE_ROWS
    for c in range(0, step, size * SIMD_WIDTH):
        total = load_vector(f, desk + 3 * step + c)
        for n in range(count):
            here = step * n + c
            store_value(
                grads + here, vec_mul(load_vector(f, scores + here), vec_sub(load_vector(f, grads + here), total))
            )


@njit
def backward_key_block(f, table, at, desk, span, bars):
    """Accumulate the gradients between a block of adjacent keys and the query tile in the scratch buffer."""
    (k, v, d_k, d_v), (start, count) = at, span
    size, dim, vdim = (
        simd.compute_itemsize(f),
        load_arg(table, FlashAttentionArgs.DIM),
        load_arg(table, FlashAttentionArgs.VDIM),
    )
    step, fours = size * QUERY_TILE_ROWS, -(-count // 4) * 4
    q = desk + step * NUM_ROW_STATE_VECTORS
    grad = q + step * (dim + GEMM_ROW_PADDING)
    scores = grad + step * (vdim + GEMM_ROW_PADDING)
    grads = scores + step * (FLASH_KEY_BLOCK_SIZE + GEMM_ROW_PADDING)
    d_q = grads + step * (FLASH_KEY_BLOCK_SIZE + GEMM_ROW_PADDING)
    q_rows = d_q + step * (dim + GEMM_ROW_PADDING)
    grad_rows = q_rows + step * round_up_to_simd(dim)
    qk_tile(f, table, k, q, scores, span)
    if bars:
        mask_scores(f, scores, desk, start, fours)
    recompute_weights(f, scores, desk, fours)
    row = size * round_up_to_simd(vdim)
    gemm(
        f,
        (d_v + row * start, row),
        (scores, step, size),
        (grad_rows, row),
        (fours, round_up_to_simd(vdim), QUERY_TILE_ROWS),
        True,
    )
    values = (
        v + load_arg(table, FlashAttentionArgs.V_KEY_STRIDE) * start,
        load_arg(table, FlashAttentionArgs.V_KEY_STRIDE),
        size,
    )
    gemm(f, (grads, step), values, (grad, step), (count, QUERY_TILE_ROWS, vdim), False)
    grad_scores(f, scores, grads, desk, fours)
    keys = (
        k + load_arg(table, FlashAttentionArgs.K_KEY_STRIDE) * start,
        size,
        load_arg(table, FlashAttentionArgs.K_KEY_STRIDE),
    )
    gemm(f, (d_q, step), keys, (grads, step), (dim, QUERY_TILE_ROWS, count), True)
    row = size * round_up_to_simd(dim)
    gemm(
        f,
        (d_k + row * start, row),
        (grads, step, size),
        (q_rows, row),
        (fours, round_up_to_simd(dim), QUERY_TILE_ROWS),
        True,
    )


@njit
def backward_query_tile(f, table, at, unit, desk):
    """Compute the gradients between up to 64 queries and all keys of the work item."""
    size, dim, vdim = (
        simd.compute_itemsize(f),
        load_arg(table, FlashAttentionArgs.DIM),
        load_arg(table, FlashAttentionArgs.VDIM),
    )
    step = size * QUERY_TILE_ROWS
    q = desk + step * NUM_ROW_STATE_VECTORS
    grad = q + step * (dim + GEMM_ROW_PADDING)
    d_q = grad + step * (vdim + GEMM_ROW_PADDING) + 2 * step * (FLASH_KEY_BLOCK_SIZE + GEMM_ROW_PADDING)
    q_rows = d_q + step * (dim + GEMM_ROW_PADDING)
    start, stop, inner, outer = load_key_ranges(f, table, unit, desk)
    if start >= stop:
        return
    load_row_statistics(f, table, unit, desk)
    load_rows_transposed(f, table, unit, load_arg(table, FlashAttentionArgs.Q), dim, q)
    scale_columns(f, q, dim, desk + 4 * step)
    load_rows_transposed(f, table, unit, load_arg(table, FlashAttentionArgs.GRAD), vdim, grad)
    load_rows(f, table, unit, load_arg(table, FlashAttentionArgs.Q), dim, q_rows)
    for n in range(0, step * round_up_to_simd(dim), size * SIMD_WIDTH):
        store_value(q_rows + n, vec_mul(load_vector(f, q_rows + n), load_vector(f, desk + 4 * step)))
    load_rows(f, table, unit, load_arg(table, FlashAttentionArgs.GRAD), vdim, q_rows + step * round_up_to_simd(dim))
    clear_memory(f, d_q, QUERY_TILE_ROWS * (dim + GEMM_ROW_PADDING))
    start = start // 4 * 4  # parts begin and end at multiples of four, so that no row of another part is written
    while start < stop:
        count = min(FLASH_KEY_BLOCK_SIZE, stop - start)
        backward_key_block(f, table, at, desk, (start, count), start < inner or start + -(-count // 4) * 4 > outer)
        start += count
    scale_columns(f, d_q, dim, desk + 4 * step)
    lines = load_arg(table, FlashAttentionArgs.QUERY_ROWS) + 8 * load_int64(unit + 8)
    for r in range(load_int64(unit + 16)):
        to = load_arg(table, FlashAttentionArgs.D_Q) + size * dim * (
            load_int64(unit + 40) * load_arg(table, FlashAttentionArgs.NUM_QUERY_ROWS) + load_int64(lines + 8 * r)
        )
        for c in range(dim):
            store_value(to + size * c, load_scalar(f, d_q + size * (QUERY_TILE_ROWS * c + r)))


@extending.register_jitable
def flash_backward(f, table, number, desk):
    """Backward kernel: process all queries of one work item, 64 at a time, against its part of the keys."""
    unit = load_arg(table, FlashAttentionArgs.WORK_ITEMS) + 48 * number
    size, dim, vdim, groups = (
        simd.compute_itemsize(f),
        load_arg(table, FlashAttentionArgs.DIM),
        load_arg(table, FlashAttentionArgs.VDIM),
        load_arg(table, FlashAttentionArgs.GROUPS),
    )
    own, each = load_int64(unit) // groups, load_int64(unit) % groups
    k = (
        load_arg(table, FlashAttentionArgs.K)
        + own * load_arg(table, FlashAttentionArgs.K_ROW_STRIDE)
        + each * load_arg(table, FlashAttentionArgs.K_HEAD_STRIDE)
    )
    v = (
        load_arg(table, FlashAttentionArgs.V)
        + own * load_arg(table, FlashAttentionArgs.V_ROW_STRIDE)
        + each * load_arg(table, FlashAttentionArgs.V_HEAD_STRIDE)
    )
    d_k = load_arg(table, FlashAttentionArgs.D_K) + size * round_up_to_simd(dim) * load_arg(
        table, FlashAttentionArgs.PADDED_KEYS
    ) * load_int64(unit)
    d_v = load_arg(table, FlashAttentionArgs.D_V) + size * round_up_to_simd(vdim) * load_arg(
        table, FlashAttentionArgs.PADDED_KEYS
    ) * load_int64(unit)
    first, last, here = load_int64(unit + 24), load_int64(unit + 32), desk
    last = load_arg(table, FlashAttentionArgs.PADDED_KEYS) if last == load_arg(table, FlashAttentionArgs.S) else last
    clear_memory(f, d_k + size * round_up_to_simd(dim) * first, (last - first) * round_up_to_simd(dim))
    clear_memory(f, d_v + size * round_up_to_simd(vdim) * first, (last - first) * round_up_to_simd(vdim))
    for n in range(6):
        store_value(here + 8 * n, load_int64(unit + 8 * n))
    for start in range(0, load_int64(unit + 16), QUERY_TILE_ROWS):
        store_value(here + 8, load_int64(unit + 8) + start)
        store_value(here + 16, min(QUERY_TILE_ROWS, load_int64(unit + 16) - start))
        backward_query_tile(f, table, (k, v, d_k, d_v), here, desk + size * QUERY_TILE_ROWS)
