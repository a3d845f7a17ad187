"""Kernels of `flash_attention`: tiles of 64 queries against blocks of 64 keys, with online softmax.

Forward, for the queries of one work item and blocks of keys j:

    S = K_block Q^T                        [keys, 64 queries]: queries are the columns, so softmax runs across vectors
    m' = max(m, max_j S),  P = exp(S - m'),  l = l exp(m - m') + sum_j P,  O = O exp(m - m') + V_block^T P

and finally o = O / l, lse = m + log l. Backward, with P = exp(S - lse) and D = rowsum(o * grad):

    dV += P grad,   dS = P * (V grad^T - D),   dQ += dS^T K * scale,   dK += dS Q * scale

Loop order: forward, one work item is a tile of 64 queries of one key head and loops over key
blocks. Backward, one work item is a part of the keys of one key head; it loops over query tiles,
then over key blocks, so that only one thread adds to a key's gradients. Queries' gradients are
summed over the parts afterwards.

In plain PyTorch: `attend_key_ranges_reference` and `attend_key_ranges_backward_reference` of
`flash_attention`, which equal `F.scaled_dot_product_attention` with the key ranges as a boolean
mask.

All products are `gemm` of `gemm_kernel`.
"""

from __future__ import annotations

import math

from numba import extending, njit

from . import simd
from .flash_attention import FLASH_KEY_BLOCK_SIZE, NUM_ROW_STATE_VECTORS, QUERY_TILE_ROWS
from .gemm_kernel import gemm
from .launch import SIMD_WIDTH
from .simd import (
    fma,
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

# --- Forward pass ---------------------------------------------------------------------------------


@njit
def load_key_ranges(dtype, args, work_item, scratch):
    """Write the key range of each of 64 rows to the scratch buffer, empty ranges for missing rows.

    Returns the first and last key of the union of the ranges, cut to the work item's keys, and
    those of their intersection, inside which no mask is needed.
    """
    query_rows = args.query_rows + 8 * load_int64(work_item + 8)
    count = load_int64(work_item + 16)
    union_begin = args.num_keys
    union_end = 0
    common_begin = 0
    common_end = args.num_keys
    tokens = args.num_queries * args.num_key_range_rows
    for r in range(QUERY_TILE_ROWS):
        first = end = 0
        if r < count:
            token = load_int64(query_rows + 8 * r) // args.num_heads % tokens
            first = load_int64(args.key_ranges + 16 * token)
            end = load_int64(args.key_ranges + 16 * token + 8)
            union_begin = min(union_begin, first)
            union_end = max(union_end, end)
            common_begin = max(common_begin, first)
            common_end = min(common_end, end)
        store_value(
            scratch + simd.compute_itemsize(dtype) * r, simd.as_compute_scalar(dtype, first)
        )
        store_value(
            scratch + simd.compute_itemsize(dtype) * (QUERY_TILE_ROWS + r),
            simd.as_compute_scalar(dtype, end),
        )
    return (
        max(union_begin, load_int64(work_item + 24)),
        min(union_end, load_int64(work_item + 32)),
        common_begin,
        common_end,
    )


@njit
def load_rows_transposed(dtype, args, work_item, source, dim, to):
    """Write the rows of a work item as columns, [dim, 64]; missing rows become zeros."""
    query_rows = args.query_rows + 8 * load_int64(work_item + 8)
    count = load_int64(work_item + 16)
    size = simd.compute_itemsize(dtype)
    for r in range(count):
        row = source + size * dim * load_int64(query_rows + 8 * r)
        for c in range(dim):
            store_value(to + size * (QUERY_TILE_ROWS * c + r), load_scalar(dtype, row + size * c))
    for r in range(count, QUERY_TILE_ROWS):
        for c in range(dim):
            store_value(to + size * (QUERY_TILE_ROWS * c + r), simd.as_compute_scalar(dtype, 0))


@njit
def scale_columns(dtype, to, rows, factor):
    """Multiply the columns of [rows, 64] with one factor each."""
    step = simd.compute_itemsize(dtype) * SIMD_WIDTH
    for c in range(0, simd.compute_itemsize(dtype) * QUERY_TILE_ROWS, step):
        factors = load_vector(dtype, factor + c)
        for n in range(rows):
            address = to + simd.compute_itemsize(dtype) * QUERY_TILE_ROWS * n + c
            store_value(address, vec_mul(load_vector(dtype, address), factors))


@njit
def mask_scores(dtype, scores, row_state, start, count):
    """Set the scores of keys outside a query's range to -inf."""
    size = simd.compute_itemsize(dtype)
    minus_inf = splat(simd.as_compute_scalar(dtype, -math.inf))
    for c in range(0, size * QUERY_TILE_ROWS, size * SIMD_WIDTH):
        first = load_vector(dtype, row_state + c)
        end = load_vector(dtype, row_state + size * QUERY_TILE_ROWS + c)
        for n in range(count):
            address = scores + size * QUERY_TILE_ROWS * n + c
            key = splat(simd.as_compute_scalar(dtype, start + n))
            score = select_below(key, end, load_vector(dtype, address), minus_inf)
            store_value(address, select_below(key, first, minus_inf, score))


@njit
def online_softmax(dtype, scores, row_state, count):
    """Replace scores by exp(score - running maximum); update the maxima, sums and rescaling
    factors.
    """
    size = simd.compute_itemsize(dtype)
    minus_inf = splat(simd.as_compute_scalar(dtype, -math.inf))
    zero = splat(simd.as_compute_scalar(dtype, 0))
    step = size * QUERY_TILE_ROWS
    for c in range(0, step, size * SIMD_WIDTH):
        old_max = load_vector(dtype, row_state + 2 * step + c)
        new_max = old_max
        for n in range(count):
            new_max = vec_max(new_max, load_vector(dtype, scores + step * n + c))
        shift = select_below(
            minus_inf, new_max, new_max, zero
        )  # if all scores are -inf, every weight is exp(-inf) = 0
        factor = vec_exp(vec_sub(old_max, shift))
        sums = vec_mul(load_vector(dtype, row_state + 3 * step + c), factor)
        for n in range(count):
            weights = vec_exp(vec_sub(load_vector(dtype, scores + step * n + c), shift))
            store_value(scores + step * n + c, weights)
            sums = vec_add(sums, weights)
        store_value(row_state + 2 * step + c, new_max)
        store_value(row_state + 3 * step + c, sums)
        store_value(row_state + 4 * step + c, factor)


@njit
def qk_tile(dtype, args, keys, q, scores, span):
    """Compute the scores of adjacent keys with all queries of the tile."""
    k = keys
    (start, count) = span
    step = simd.compute_itemsize(dtype) * QUERY_TILE_ROWS
    a = (k + args.k_key_stride * start, args.k_key_stride, simd.compute_itemsize(dtype))
    gemm(dtype, (scores, step), a, (q, step), (count, QUERY_TILE_ROWS, args.dim), False)


@njit
def store_output_and_lse(dtype, args, work_item, outputs, row_state):
    """Store the normalised outputs and the log-sum-exp; rows without keys get output 0 and lse inf.

    With lse = inf, exp(s - lse) is 0 in the backward pass.
    """
    query_rows = args.query_rows + 8 * load_int64(work_item + 8)
    size = simd.compute_itemsize(dtype)
    vdim = args.vdim
    for r in range(load_int64(work_item + 16)):
        query_row = load_int64(query_rows + 8 * r)
        row_max = load_scalar(dtype, row_state + size * (2 * QUERY_TILE_ROWS + r))
        weight_sum = load_scalar(dtype, row_state + size * (3 * QUERY_TILE_ROWS + r))
        factor = simd.as_compute_scalar(dtype, 1 / weight_sum if weight_sum != 0 else 0.0)
        lse = simd.as_compute_scalar(
            dtype, row_max + math.log(weight_sum) if weight_sum != 0 else math.inf
        )
        store_value(args.lse + size * query_row, lse)
        for c in range(vdim):
            to = args.out + size * (query_row * vdim + c)
            store_value(
                to,
                simd.as_compute_scalar(
                    dtype, load_scalar(dtype, outputs + size * (QUERY_TILE_ROWS * c + r)) * factor
                ),
            )


@njit
def clear_memory(dtype, to, count):
    """Store `count` zeros, rounded up to whole vectors."""
    for n in range(0, count, SIMD_WIDTH):
        store_value(to + simd.compute_itemsize(dtype) * n, splat(simd.as_compute_scalar(dtype, 0)))


@extending.register_jitable
def flash_forward(dtype, args, item, scratch):
    """Forward kernel: attend from the tile of queries of one work item to all of its keys, block by
    block.
    """
    work_item = args.work_items + 48 * item
    size = simd.compute_itemsize(dtype)
    dim = args.dim
    vdim = args.vdim
    groups = args.num_kv_heads
    step = size * QUERY_TILE_ROWS
    batch_row = load_int64(work_item) // groups
    kv_head = load_int64(work_item) % groups
    q = scratch + step * NUM_ROW_STATE_VECTORS
    scores = q + step * dim
    sums = scores + step * FLASH_KEY_BLOCK_SIZE
    k = args.k + batch_row * args.k_row_stride + kv_head * args.k_head_stride
    v = args.v + batch_row * args.v_row_stride + kv_head * args.v_head_stride
    start, stop, common_begin, common_end = load_key_ranges(dtype, args, work_item, scratch)
    load_rows_transposed(dtype, args, work_item, args.q, dim, q)
    clear_memory(dtype, scratch + 2 * step, 3 * QUERY_TILE_ROWS)
    for c in range(0, step, size * SIMD_WIDTH):
        store_value(scratch + 2 * step + c, splat(simd.as_compute_scalar(dtype, -math.inf)))
        store_value(scratch + 4 * step + c, splat(simd.as_compute_scalar(dtype, args.scale)))
    scale_columns(dtype, q, dim, scratch + 4 * step)
    clear_memory(dtype, sums, vdim * QUERY_TILE_ROWS)
    while start < stop:
        count = min(FLASH_KEY_BLOCK_SIZE, stop - start)
        qk_tile(dtype, args, k, q, scores, (start, count))
        if start < common_begin or start + count > common_end:
            mask_scores(dtype, scores, scratch, start, count)
        online_softmax(dtype, scores, scratch, count)
        scale_columns(dtype, sums, vdim, scratch + 4 * step)
        values = (v + args.v_key_stride * start, size, args.v_key_stride)
        gemm(dtype, (sums, step), values, (scores, step), (vdim, QUERY_TILE_ROWS, count), True)
        start += count
    store_output_and_lse(dtype, args, work_item, sums, scratch)


# --- Backward pass --------------------------------------------------------------------------------


@njit
def load_rows(dtype, args, work_item, source, dim, to):
    """Write the rows of a work item one after another, padded with zeros to whole vectors and 64
    rows.
    """
    query_rows = args.query_rows + 8 * load_int64(work_item + 8)
    count = load_int64(work_item + 16)
    size = simd.compute_itemsize(dtype)
    clear_memory(dtype, to, QUERY_TILE_ROWS * round_up_to_simd(dim))
    for r in range(count):
        row = source + size * dim * load_int64(query_rows + 8 * r)
        to_row = to + size * round_up_to_simd(dim) * r
        for c in range(0, dim // SIMD_WIDTH * SIMD_WIDTH, SIMD_WIDTH):
            store_value(to_row + size * c, load_vector(dtype, row + size * c))
        for c in range(dim // SIMD_WIDTH * SIMD_WIDTH, dim):
            store_value(to_row + size * c, load_scalar(dtype, row + size * c))


@njit
def inner_product(dtype, a, b, count):
    """Return the inner product of two arrays of `count` elements."""
    size = simd.compute_itemsize(dtype)
    sums = splat(simd.as_compute_scalar(dtype, 0))
    for c in range(0, count // SIMD_WIDTH * SIMD_WIDTH, SIMD_WIDTH):
        sums = fma(load_vector(dtype, a + size * c), load_vector(dtype, b + size * c), sums)
    total = reduce_sum(sums)
    for c in range(count // SIMD_WIDTH * SIMD_WIDTH, count):
        total += load_scalar(dtype, a + size * c) * load_scalar(dtype, b + size * c)
    return total


@njit
def load_row_statistics(dtype, args, work_item, scratch):
    """Write each row's log-sum-exp, its D = o . grad, and the scale to the scratch buffer."""
    query_rows = args.query_rows + 8 * load_int64(work_item + 8)
    count = load_int64(work_item + 16)
    size = simd.compute_itemsize(dtype)
    to = scratch + size * 2 * QUERY_TILE_ROWS
    vdim = args.vdim
    for r in range(QUERY_TILE_ROWS):
        lse = simd.as_compute_scalar(dtype, float("inf"))
        row_term = simd.as_compute_scalar(dtype, 0)
        if r < count:
            query_row = load_int64(query_rows + 8 * r)
            lse = load_scalar(dtype, args.lse + size * query_row)
            row = size * vdim * query_row
            row_term = inner_product(dtype, args.out + row, args.grad + row, vdim)
        store_value(to + size * r, lse)
        store_value(to + size * (QUERY_TILE_ROWS + r), row_term)
        store_value(
            to + size * (2 * QUERY_TILE_ROWS + r), simd.as_compute_scalar(dtype, args.scale)
        )


@njit
def recompute_weights(dtype, scores, scratch, count):
    """Replace scores by attention weights, exp(score - lse)."""
    size = simd.compute_itemsize(dtype)
    step = size * QUERY_TILE_ROWS
    for c in range(0, step, size * SIMD_WIDTH):
        lse = load_vector(dtype, scratch + 2 * step + c)
        for n in range(count):
            store_value(
                scores + step * n + c,
                vec_exp(vec_sub(load_vector(dtype, scores + step * n + c), lse)),
            )


@njit
def grad_scores(dtype, scores, grads, scratch, count):
    """Replace gradients of weights by gradients of scores: P * (dP - D)."""
    size = simd.compute_itemsize(dtype)
    step = size * QUERY_TILE_ROWS
    for c in range(0, step, size * SIMD_WIDTH):
        row_terms = load_vector(dtype, scratch + 3 * step + c)
        for n in range(count):
            offset = step * n + c
            store_value(
                grads + offset,
                vec_mul(
                    load_vector(dtype, scores + offset),
                    vec_sub(load_vector(dtype, grads + offset), row_terms),
                ),
            )


@njit
def backward_key_block(dtype, args, addresses, scratch, span, needs_mask):
    """Accumulate the gradients between a block of adjacent keys and the query tile in the scratch
    buffer.
    """
    (k, v, d_k, d_v) = addresses
    (start, count) = span
    size = simd.compute_itemsize(dtype)
    dim = args.dim
    vdim = args.vdim
    step = size * QUERY_TILE_ROWS
    q = scratch + step * NUM_ROW_STATE_VECTORS
    grad = q + step * dim
    scores = grad + step * vdim
    grads = scores + step * FLASH_KEY_BLOCK_SIZE
    d_q = grads + step * FLASH_KEY_BLOCK_SIZE
    q_rows = d_q + step * dim
    grad_rows = q_rows + step * round_up_to_simd(dim)
    qk_tile(dtype, args, k, q, scores, span)
    if needs_mask:
        mask_scores(dtype, scores, scratch, start, count)
    recompute_weights(dtype, scores, scratch, count)
    row = size * round_up_to_simd(vdim)
    gemm(
        dtype,
        (d_v + row * start, row),
        (scores, step, size),
        (grad_rows, row),
        (count, round_up_to_simd(vdim), QUERY_TILE_ROWS),
        True,
    )
    values = (v + args.v_key_stride * start, args.v_key_stride, size)
    gemm(dtype, (grads, step), values, (grad, step), (count, QUERY_TILE_ROWS, vdim), False)
    grad_scores(dtype, scores, grads, scratch, count)
    keys = (k + args.k_key_stride * start, size, args.k_key_stride)
    gemm(dtype, (d_q, step), keys, (grads, step), (dim, QUERY_TILE_ROWS, count), True)
    row = size * round_up_to_simd(dim)
    gemm(
        dtype,
        (d_k + row * start, row),
        (grads, step, size),
        (q_rows, row),
        (count, round_up_to_simd(dim), QUERY_TILE_ROWS),
        True,
    )


@njit
def backward_query_tile(dtype, args, addresses, work_item, scratch):
    """Compute the gradients between up to 64 queries and all keys of the work item."""
    size = simd.compute_itemsize(dtype)
    dim = args.dim
    vdim = args.vdim
    step = size * QUERY_TILE_ROWS
    q = scratch + step * NUM_ROW_STATE_VECTORS
    grad = q + step * dim
    d_q = grad + step * vdim + 2 * step * FLASH_KEY_BLOCK_SIZE
    q_rows = d_q + step * dim
    start, stop, common_begin, common_end = load_key_ranges(dtype, args, work_item, scratch)
    if start >= stop:
        return
    load_row_statistics(dtype, args, work_item, scratch)
    load_rows_transposed(dtype, args, work_item, args.q, dim, q)
    scale_columns(dtype, q, dim, scratch + 4 * step)
    load_rows_transposed(dtype, args, work_item, args.grad, vdim, grad)
    load_rows(dtype, args, work_item, args.q, dim, q_rows)
    for n in range(0, step * round_up_to_simd(dim), size * SIMD_WIDTH):
        store_value(
            q_rows + n,
            vec_mul(load_vector(dtype, q_rows + n), load_vector(dtype, scratch + 4 * step)),
        )
    load_rows(dtype, args, work_item, args.grad, vdim, q_rows + step * round_up_to_simd(dim))
    clear_memory(dtype, d_q, QUERY_TILE_ROWS * dim)
    while start < stop:
        count = min(FLASH_KEY_BLOCK_SIZE, stop - start)
        backward_key_block(
            dtype,
            args,
            addresses,
            scratch,
            (start, count),
            start < common_begin or start + count > common_end,
        )
        start += count
    scale_columns(dtype, d_q, dim, scratch + 4 * step)
    query_rows = args.query_rows + 8 * load_int64(work_item + 8)
    for r in range(load_int64(work_item + 16)):
        to = args.d_q + size * dim * (
            load_int64(work_item + 40) * args.num_query_rows + load_int64(query_rows + 8 * r)
        )
        for c in range(dim):
            store_value(to + size * c, load_scalar(dtype, d_q + size * (QUERY_TILE_ROWS * c + r)))


@extending.register_jitable
def flash_backward(dtype, args, item, scratch):
    """Backward kernel: process all queries of one work item, 64 at a time, against its part of the
    keys.
    """
    work_item = args.work_items + 48 * item
    size = simd.compute_itemsize(dtype)
    dim = args.dim
    vdim = args.vdim
    groups = args.num_kv_heads
    batch_row = load_int64(work_item) // groups
    kv_head = load_int64(work_item) % groups
    k = args.k + batch_row * args.k_row_stride + kv_head * args.k_head_stride
    v = args.v + batch_row * args.v_row_stride + kv_head * args.v_head_stride
    d_k = args.d_k + size * round_up_to_simd(dim) * args.num_keys * load_int64(work_item)
    d_v = args.d_v + size * round_up_to_simd(vdim) * args.num_keys * load_int64(work_item)
    begin = load_int64(work_item + 24)
    end = load_int64(work_item + 32)
    tile_item = scratch
    clear_memory(
        dtype, d_k + size * round_up_to_simd(dim) * begin, (end - begin) * round_up_to_simd(dim)
    )
    clear_memory(
        dtype, d_v + size * round_up_to_simd(vdim) * begin, (end - begin) * round_up_to_simd(vdim)
    )
    for n in range(6):
        store_value(tile_item + 8 * n, load_int64(work_item + 8 * n))
    for start in range(0, load_int64(work_item + 16), QUERY_TILE_ROWS):
        store_value(tile_item + 8, load_int64(work_item + 8) + start)
        store_value(tile_item + 16, min(QUERY_TILE_ROWS, load_int64(work_item + 16) - start))
        backward_query_tile(
            dtype, args, (k, v, d_k, d_v), tile_item, scratch + size * QUERY_TILE_ROWS
        )
