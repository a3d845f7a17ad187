"""Kernels of `flash_attention`: tiles of 64 queries against blocks of 64 keys, with online softmax.

Forward, for the queries of one work item and blocks of keys j:

    S = K_block Q^T                        [keys, 64 queries]: queries are the columns, so softmax
    runs across vectors
    m' = max(m, max_j S),  P = exp(S - m'),  l = l exp(m - m') + sum_j P,  O = O exp(m - m') +
    V_block^T P

and finally o = O / l, lse = m + log l. Backward, with P = exp(S - lse) and D = rowsum(o * grad):

    dV += P grad,   dS = P * (V grad^T - D),   dQ += dS^T K * scale,   dK += dS Q * scale

Loop order: forward, one work item is a tile of 64 queries of one key head and loops over key
blocks. Backward, one work item is a part of the keys of one key head; it loops over query tiles,
then over key blocks, so that only one thread adds to a key's gradients. Queries' gradients are
summed over the parts afterwards.

In plain PyTorch: `attend_key_ranges_reference` and `attend_key_ranges_backward_reference` of
`flash_attention_reference`, which equal `F.scaled_dot_product_attention` with the key ranges as a
boolean mask.

All products are `gemm`, the micro-kernel at the end:

    C[m, n] = sum_i A[m, i] B[i, n]  (+ C[m, n])

A is read element by element and may have any strides; B and C have rows of adjacent elements. Four
rows of C at a time, tiles of 64 columns, then of 16, then i. The 16 vector sums of a tile stay in
registers. Every element of C is summed in the order of i, whatever the tile. If fewer than four
rows are left, the last one is computed several times and stored at one place, so that no other row
is written.
"""

from __future__ import annotations

import math

from numba import extending, njit

from .flash_attention import FLASH_KEY_BLOCK_SIZE, NUM_ROW_STATE_VECTORS, QUERY_TILE_ROWS
from .launch import SIMD_WIDTH
from .simd import (
    floats,
    fma,
    ints,
    number,
    reduce_sum,
    round_up_to_simd,
    select_below,
    splat,
    vec,
    vec_max,
)
from .vector_math import vec_exp

# Vectors of 64 numbers at the start of a scratch buffer, one number per row: the first keys, ends
# of the keys, maxima, sums, and factors. The backward pass stores lse, row terms and the scale.
ROWS = QUERY_TILE_ROWS
ENDS, MAXIMA, SUMS, FACTORS = range(ROWS, 5 * ROWS, ROWS)


@njit
def load_key_ranges(args, work, state):
    """Write the key range of each of 64 rows to the scratch buffer, empty ranges for missing rows.

    Returns the first and last key of the union of the ranges, cut to the work item's keys, and of
    their intersection. Inside the intersection no mask is needed.
    """
    query_rows = ints(args.query_rows) + work[1]
    key_ranges = ints(args.key_ranges)
    tokens = args.num_queries * args.num_key_range_rows
    union_begin = args.num_keys
    union_end = 0
    common_begin = 0
    common_end = args.num_keys
    for r in range(ROWS):
        first = end = 0
        if r < work[2]:
            token = query_rows[r] // args.num_heads % tokens
            first = key_ranges[2 * token]
            end = key_ranges[2 * token + 1]
            union_begin = min(union_begin, first)
            union_end = max(union_end, end)
            common_begin = max(common_begin, first)
            common_end = min(common_end, end)
        state[r] = first
        state[ENDS + r] = end
    return max(union_begin, work[3]), min(union_end, work[4]), common_begin, common_end


@njit
def load_rows_transposed(args, work, source, dim, to):
    """Write the rows of a tile as columns, zero for missing rows."""
    query_rows = ints(args.query_rows) + work[1]
    for r in range(work[2]):
        row = source + dim * query_rows[r]
        for c in range(dim):
            to[ROWS * c + r] = row[c]
    for r in range(work[2], ROWS):
        for c in range(dim):
            to[ROWS * c + r] = 0


@njit
def scale_columns(to, rows, factors):
    """Multiply each of 64 columns by its factor."""
    for c in range(0, ROWS, SIMD_WIDTH):
        factor = vec(factors, c)
        for n in range(rows):
            to[ROWS * n + c] = vec(to, ROWS * n + c) * factor


@njit
def mask_scores(scores, state, start, count):
    """Set the scores of keys outside each row's range to -inf."""
    for c in range(0, ROWS, SIMD_WIDTH):
        first = vec(state, c)
        end = vec(state, ENDS + c)
        for n in range(count):
            key = splat(state, start + n)
            score = select_below(key, end, vec(scores, ROWS * n + c), -math.inf)
            scores[ROWS * n + c] = select_below(key, first, -math.inf, score)


@njit
def clear_memory(to, count):
    """Set numbers to zero, in whole vectors."""
    for n in range(0, count, SIMD_WIDTH):
        to[n] = splat(to, 0)


# --- Forward pass ---------------------------------------------------------------------------------


@njit
def online_softmax(scores, state, count):
    """Replace the scores of a block by weights, and update maxima, sums and factors of the rows."""
    for c in range(0, ROWS, SIMD_WIDTH):
        old_max = vec(state, MAXIMA + c)
        new_max = old_max
        for n in range(count):
            new_max = vec_max(new_max, vec(scores, ROWS * n + c))
        # if all scores are -inf, every weight is exp(-inf) = 0
        shift = select_below(splat(state, -math.inf), new_max, new_max, 0)
        factor = vec_exp(old_max - shift)
        sums = vec(state, SUMS + c) * factor
        for n in range(count):
            weights = vec_exp(vec(scores, ROWS * n + c) - shift)
            scores[ROWS * n + c] = weights
            sums = sums + weights
        state[MAXIMA + c] = new_max
        state[SUMS + c] = sums
        state[FACTORS + c] = factor


@njit
def qk_tile(args, k, q, scores, span):
    """Compute the scores of a block of keys (rows) with a tile of queries (columns)."""
    start, count = span
    keys = (k + args.k_key_stride * start, args.k_key_stride, 1)
    gemm((scores, ROWS), keys, (q, ROWS), (count, ROWS, args.dim), False)


@njit
def store_output_and_lse(args, work, outputs, state):
    """Divide the weighted sums of values by the sums of weights, and write both."""
    query_rows = ints(args.query_rows) + work[1]
    vdim = args.vdim
    all_lse = floats(state, args.lse)
    for r in range(work[2]):
        query_row = query_rows[r]
        weight_sum = state[SUMS + r]
        factor = number(state, 1 / weight_sum if weight_sum != 0 else 0.0)
        all_lse[query_row] = (
            state[MAXIMA + r] + math.log(weight_sum) if weight_sum != 0 else math.inf
        )
        to = floats(state, args.out) + query_row * vdim
        for c in range(vdim):
            to[c] = outputs[ROWS * c + r] * factor


@njit
def key_head_pointers(dtype, args, work):
    """Return pointers to the keys and values of a work item's key head."""
    batch_row = work[0] // args.num_kv_heads
    head = work[0] % args.num_kv_heads
    k = floats(dtype, args.k) + (batch_row * args.k_row_stride + head * args.k_head_stride)
    v = floats(dtype, args.v) + (batch_row * args.v_row_stride + head * args.v_head_stride)
    return k, v


@extending.register_jitable
def flash_forward(dtype, args, item, scratch):
    """Compute the outputs and the log-sum-exp of a tile of queries."""
    work = ints(args.work_items) + 6 * item
    dim = args.dim
    vdim = args.vdim
    state = floats(dtype, scratch)
    q = state + ROWS * NUM_ROW_STATE_VECTORS
    scores = q + ROWS * dim
    sums = scores + ROWS * FLASH_KEY_BLOCK_SIZE
    k, v = key_head_pointers(dtype, args, work)
    start, stop, common_begin, common_end = load_key_ranges(args, work, state)
    load_rows_transposed(args, work, floats(dtype, args.q), dim, q)
    clear_memory(state + MAXIMA, 3 * ROWS)
    for c in range(0, ROWS, SIMD_WIDTH):
        state[MAXIMA + c] = splat(state, -math.inf)
        state[FACTORS + c] = splat(state, args.scale)
    scale_columns(q, dim, state + FACTORS)
    clear_memory(sums, vdim * ROWS)
    while start < stop:
        count = min(FLASH_KEY_BLOCK_SIZE, stop - start)
        qk_tile(args, k, q, scores, (start, count))
        if start < common_begin or start + count > common_end:
            mask_scores(scores, state, start, count)
        online_softmax(scores, state, count)
        scale_columns(sums, vdim, state + FACTORS)
        values = (v + args.v_key_stride * start, 1, args.v_key_stride)
        gemm((sums, ROWS), values, (scores, ROWS), (vdim, ROWS, count), True)
        start += count
    store_output_and_lse(args, work, sums, state)


# --- Backward pass --------------------------------------------------------------------------------


@njit
def load_rows(args, work, source, dim, to):
    """Write the rows of a tile one after another, padded to whole vectors, zero for missing
    rows.
    """
    query_rows = ints(args.query_rows) + work[1]
    clear_memory(to, ROWS * round_up_to_simd(dim))
    full = dim // SIMD_WIDTH * SIMD_WIDTH
    for r in range(work[2]):
        row = source + dim * query_rows[r]
        to_row = to + round_up_to_simd(dim) * r
        for c in range(0, full, SIMD_WIDTH):
            to_row[c] = vec(row, c)
        for c in range(full, dim):
            to_row[c] = row[c]


@njit
def inner_product(a, b, count):
    """Return the inner product of two rows."""
    full = count // SIMD_WIDTH * SIMD_WIDTH
    sums = splat(a, 0)
    for c in range(0, full, SIMD_WIDTH):
        sums = fma(vec(a, c), vec(b, c), sums)
    total = reduce_sum(sums)
    for c in range(full, count):
        total += a[c] * b[c]
    return total


@njit
def load_row_statistics(args, work, state):
    """Write lse, rowsum(o * grad) and the scale of each row; missing rows get weights of zero."""
    query_rows = ints(args.query_rows) + work[1]
    vdim = args.vdim
    all_lse = floats(state, args.lse)
    for r in range(ROWS):
        lse = number(state, math.inf)
        row_term = number(state, 0)
        if r < work[2]:
            query_row = query_rows[r]
            lse = all_lse[query_row]
            out = floats(state, args.out) + vdim * query_row
            row_term = inner_product(out, floats(state, args.grad) + vdim * query_row, vdim)
        state[MAXIMA + r] = lse
        state[SUMS + r] = row_term
        state[FACTORS + r] = args.scale


@njit
def recompute_weights(scores, state, count):
    """Replace scores by the weights of the forward pass."""
    for c in range(0, ROWS, SIMD_WIDTH):
        lse = vec(state, MAXIMA + c)
        for n in range(count):
            scores[ROWS * n + c] = vec_exp(vec(scores, ROWS * n + c) - lse)


@njit
def grad_scores(scores, grads, state, count):
    """Convert gradients of weights to gradients of scores in place, without the scale."""
    for c in range(0, ROWS, SIMD_WIDTH):
        row_terms = vec(state, SUMS + c)
        for n in range(count):
            at = ROWS * n + c
            grads[at] = vec(scores, at) * (vec(grads, at) - row_terms)


@njit
def backward_key_block(args, keys_and_grads, tile, span, needs_mask):
    """Add the gradients of a block of keys and a tile of queries."""
    k, v, d_k, d_v = keys_and_grads
    state, q, grad, scores, grads, d_q, q_rows, grad_rows = tile
    start, count = span
    dim = args.dim
    vdim = args.vdim
    qk_tile(args, k, q, scores, span)
    if needs_mask:
        mask_scores(scores, state, start, count)
    recompute_weights(scores, state, count)
    width = round_up_to_simd(vdim)
    to = (d_v + width * start, width)
    gemm(to, (scores, ROWS, 1), (grad_rows, width), (count, width, ROWS), True)
    values = (v + args.v_key_stride * start, args.v_key_stride, 1)
    gemm((grads, ROWS), values, (grad, ROWS), (count, ROWS, vdim), False)
    grad_scores(scores, grads, state, count)
    keys = (k + args.k_key_stride * start, 1, args.k_key_stride)
    gemm((d_q, ROWS), keys, (grads, ROWS), (dim, ROWS, count), True)
    width = round_up_to_simd(dim)
    to = (d_k + width * start, width)
    gemm(to, (grads, ROWS, 1), (q_rows, width), (count, width, ROWS), True)


@njit
def backward_query_tile(args, keys_and_grads, work, state):
    """Add the gradients of the keys of a work item and a tile of queries."""
    dim = args.dim
    vdim = args.vdim
    q = state + ROWS * NUM_ROW_STATE_VECTORS
    grad = q + ROWS * dim
    scores = grad + ROWS * vdim
    grads = scores + ROWS * FLASH_KEY_BLOCK_SIZE
    d_q = grads + ROWS * FLASH_KEY_BLOCK_SIZE
    q_rows = d_q + ROWS * dim
    grad_rows = q_rows + ROWS * round_up_to_simd(dim)
    start, stop, common_begin, common_end = load_key_ranges(args, work, state)
    if start >= stop:
        return
    load_row_statistics(args, work, state)
    load_rows_transposed(args, work, floats(state, args.q), dim, q)
    scale_columns(q, dim, state + FACTORS)
    load_rows_transposed(args, work, floats(state, args.grad), vdim, grad)
    load_rows(args, work, floats(state, args.q), dim, q_rows)
    for n in range(0, ROWS * round_up_to_simd(dim), SIMD_WIDTH):
        q_rows[n] = vec(q_rows, n) * vec(state, FACTORS)
    load_rows(args, work, floats(state, args.grad), vdim, grad_rows)
    clear_memory(d_q, ROWS * dim)
    tile = (state, q, grad, scores, grads, d_q, q_rows, grad_rows)
    while start < stop:
        count = min(FLASH_KEY_BLOCK_SIZE, stop - start)
        needs_mask = start < common_begin or start + count > common_end
        backward_key_block(args, keys_and_grads, tile, (start, count), needs_mask)
        start += count
    scale_columns(d_q, dim, state + FACTORS)
    query_rows = ints(args.query_rows) + work[1]
    all_d_q = floats(state, args.d_q)
    for r in range(work[2]):
        to = all_d_q + dim * (work[5] * args.num_query_rows + query_rows[r])
        for c in range(dim):
            to[c] = d_q[ROWS * c + r]


@extending.register_jitable
def flash_backward(dtype, args, item, scratch):
    """Compute the gradients of a part of the keys of one key head, and its share of the
    queries'.
    """
    work = ints(args.work_items) + 6 * item
    k, v = key_head_pointers(dtype, args, work)
    k_width = round_up_to_simd(args.dim)
    v_width = round_up_to_simd(args.vdim)
    d_k = floats(dtype, args.d_k) + k_width * args.num_keys * work[0]
    d_v = floats(dtype, args.d_v) + v_width * args.num_keys * work[0]
    clear_memory(d_k + k_width * work[3], (work[4] - work[3]) * k_width)
    clear_memory(d_v + v_width * work[3], (work[4] - work[3]) * v_width)
    tile = ints(scratch)  # the work item with the rows of one tile
    for n in range(6):
        tile[n] = work[n]
    for start in range(0, work[2], ROWS):
        tile[1] = work[1] + start
        tile[2] = min(ROWS, work[2] - start)
        backward_query_tile(args, (k, v, d_k, d_v), tile, floats(dtype, scratch) + ROWS)


TILE_COLUMNS = 4 * SIMD_WIDTH


@njit
def load_64(p):
    """Return 64 numbers as four vectors."""
    return vec(p, 0), vec(p, SIMD_WIDTH), vec(p, 2 * SIMD_WIDTH), vec(p, 3 * SIMD_WIDTH)


@njit
def axpy_64(x, factor, a):
    """Return a + factor x."""
    return (
        fma(x[0], factor, a[0]),
        fma(x[1], factor, a[1]),
        fma(x[2], factor, a[2]),
        fma(x[3], factor, a[3]),
    )


@njit
def store_64(to, a):
    """Store four vectors."""
    to[0] = a[0]
    to[SIMD_WIDTH] = a[1]
    to[2 * SIMD_WIDTH] = a[2]
    to[3 * SIMD_WIDTH] = a[3]


@njit
def gemm_4x64(to, a, b, depth, accumulate):
    """Compute four rows of 64 columns: to = a b, or to += a b."""
    a0, a1, a2, a3, a_step = a
    b, b_stride = b
    zero = splat(b, 0)
    r0 = r1 = r2 = r3 = (zero, zero, zero, zero)
    if accumulate:
        r0 = load_64(to[0])
        r1 = load_64(to[1])
        r2 = load_64(to[2])
        r3 = load_64(to[3])
    for n in range(depth):
        x = load_64(b + b_stride * n)
        offset = a_step * n
        r0 = axpy_64(x, a0[offset], r0)
        r1 = axpy_64(x, a1[offset], r1)
        r2 = axpy_64(x, a2[offset], r2)
        r3 = axpy_64(x, a3[offset], r3)
    store_64(to[0], r0)
    store_64(to[1], r1)
    store_64(to[2], r2)
    store_64(to[3], r3)


@njit
def gemm_4x16(to, a, b, depth, accumulate):
    """Compute four rows of 16 columns, as `gemm_4x64`."""
    a0, a1, a2, a3, a_step = a
    b, b_stride = b
    r0 = r1 = r2 = r3 = splat(b, 0)
    if accumulate:
        r0 = vec(to[0], 0)
        r1 = vec(to[1], 0)
        r2 = vec(to[2], 0)
        r3 = vec(to[3], 0)
    for n in range(depth):
        x = vec(b, b_stride * n)
        offset = a_step * n
        r0 = fma(x, a0[offset], r0)
        r1 = fma(x, a1[offset], r1)
        r2 = fma(x, a2[offset], r2)
        r3 = fma(x, a3[offset], r3)
    to[0][0] = r0
    to[1][0] = r1
    to[2][0] = r2
    to[3][0] = r3


@njit
def four_rows(p, stride, last_row):
    """Return pointers to four rows; the last row stands for missing ones."""
    return (
        p,
        p + stride * min(1, last_row),
        p + stride * min(2, last_row),
        p + stride * min(3, last_row),
    )


@njit
def gemm(to, a, b, shape, accumulate):
    """Compute to = a b, or to += a b, for shape (rows, columns, depth); columns are whole vectors.

    `to` and `b` are a pointer and the distance of rows, `a` also has the distance of its columns.
    """
    to, to_stride = to
    a, a_stride, a_step = a
    b, b_stride = b
    rows, columns, depth = shape
    full_columns = columns // TILE_COLUMNS * TILE_COLUMNS
    for m in range(0, rows, 4):
        t0, t1, t2, t3 = four_rows(to + to_stride * m, to_stride, rows - m - 1)
        a0, a1, a2, a3 = four_rows(a + a_stride * m, a_stride, rows - m - 1)
        a_rows = a0, a1, a2, a3, a_step
        for c in range(0, full_columns, TILE_COLUMNS):
            gemm_4x64(
                (t0 + c, t1 + c, t2 + c, t3 + c), a_rows, (b + c, b_stride), depth, accumulate
            )
        for c in range(full_columns, columns, SIMD_WIDTH):
            gemm_4x16(
                (t0 + c, t1 + c, t2 + c, t3 + c), a_rows, (b + c, b_stride), depth, accumulate
            )
