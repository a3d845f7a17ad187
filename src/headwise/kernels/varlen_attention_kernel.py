"""Kernels of `varlen_attention`: attention within each of many short sequences.

For the queries q, keys k and values v of one sequence and head, and the gradient g of the output:

    w = softmax(scale q k^T),  o = w v                     causal: query t reads keys 0 to t
    dv = w^T g,  du = g v^T,  ds = scale w * (du - rowsum(w * du)),  dq = ds k,  dk = ds^T q

In plain PyTorch, for one sequence: `o = F.scaled_dot_product_attention(q, k, v, is_causal=causal,
scale=scale, enable_gqa=True)` and `dq, dk, dv = torch.autograd.grad(o, (q, k, v), g)`.

Loop order: one work item is one sequence and one key head, whose queries and keys fit the nearest
caches. It transposes the keys into the scratch buffer, then loops over the query heads of the
group; each of these makes its products by `gemm`. The kernel reads and writes rows in place:
nothing is grouped or padded by sequence. All scores of a head are kept at once, and computed again
in the backward pass.
"""

from __future__ import annotations

import math

from numba import extending, njit

from . import simd
from .gemm_kernel import gemm
from .launch import SIMD_WIDTH
from .simd import (
    fma,
    load_int64,
    load_scalar,
    load_vector,
    reduce_max,
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
def transpose_rows(dtype, to, source, step, rows, width):
    """Write rows as columns, padded with zeros to whole vectors."""
    size, column_bytes = (
        simd.compute_itemsize(dtype),
        simd.compute_itemsize(dtype) * round_up_to_simd(rows),
    )
    for c in range(width if rows else 0):
        store_value(
            to + column_bytes * (c + 1) - size * SIMD_WIDTH, splat(simd.as_compute_scalar(dtype, 0))
        )
        for n in range(rows):
            store_value(
                to + column_bytes * c + size * n, load_scalar(dtype, source + step * n + size * c)
            )


@njit
def softmax_scores(dtype, args, scores, indices, queries, keys):
    """Replace products x by weights, softmax(scale * x) over the keys that each query may read."""
    size, padded_keys = simd.compute_itemsize(dtype), round_up_to_simd(keys)
    minus_inf, scale = (
        simd.as_compute_scalar(dtype, -math.inf),
        splat(simd.as_compute_scalar(dtype, args.scale)),
    )
    index = load_vector(dtype, indices)
    for t in range(queries):
        count = min(t + 1, keys) if args.causal else keys
        maxima, sums = splat(minus_inf), splat(simd.as_compute_scalar(dtype, 0))
        for c in range(0, padded_keys, SIMD_WIDTH):
            limit = splat(simd.as_compute_scalar(dtype, count - c))
            score = select_below(
                index,
                limit,
                vec_mul(load_vector(dtype, scores + size * c), scale),
                splat(minus_inf),
            )
            store_value(scores + size * c, score)
            maxima = vec_max(maxima, score)
        row_max = reduce_max(maxima)
        for c in range(0, padded_keys, SIMD_WIDTH):
            weight = vec_exp(vec_sub(load_vector(dtype, scores + size * c), splat(row_max)))
            store_value(scores + size * c, weight)
            sums = vec_add(sums, weight)
        weight_sum = reduce_sum(sums)
        factor = splat(
            simd.as_compute_scalar(dtype, 1) / weight_sum
            if weight_sum != 0
            else simd.as_compute_scalar(dtype, math.nan)
        )
        for c in range(0, padded_keys, SIMD_WIDTH):
            store_value(scores + size * c, vec_mul(load_vector(dtype, scores + size * c), factor))
        scores += size * padded_keys


@njit
def softmax_backward(dtype, args, weights, grads, queries, keys):
    """Replace gradients of weights by gradients of products: scale * w * (d - sum(w * d))."""
    size, padded_keys = simd.compute_itemsize(dtype), round_up_to_simd(keys)
    scale = splat(simd.as_compute_scalar(dtype, args.scale))
    for n in range(queries):
        mean, begin = splat(simd.as_compute_scalar(dtype, 0)), size * padded_keys * n
        for c in range(begin, begin + size * padded_keys, size * SIMD_WIDTH):
            mean = fma(load_vector(dtype, weights + c), load_vector(dtype, grads + c), mean)
        mean = splat(reduce_sum(mean))
        for c in range(begin, begin + size * padded_keys, size * SIMD_WIDTH):
            store_value(
                grads + c,
                vec_mul(
                    vec_mul(load_vector(dtype, weights + c), scale),
                    vec_sub(load_vector(dtype, grads + c), mean),
                ),
            )


@njit
def sequence_of_item(args, item):
    """Return first query, number of queries, first key, number of keys and key
    head of a work item.
    """
    groups = args.num_kv_heads
    sequence = args.sequences + 32 * (item // groups)
    return (
        load_int64(sequence),
        load_int64(sequence + 8),
        load_int64(sequence + 16),
        load_int64(sequence + 24),
        item % groups,
    )


@njit
def recompute_weights(dtype, args, q, scratch, sequence):
    """Compute all attention weights of one sequence and head in the scratch buffer."""
    indices, keys, weights = scratch
    _, queries, _, count, _ = sequence
    size, dim, padded_keys = simd.compute_itemsize(dtype), args.dim, round_up_to_simd(count)
    a = (q, args.q_token_stride, size)
    gemm(
        dtype,
        (weights, size * padded_keys),
        a,
        (keys, size * padded_keys),
        (queries, padded_keys, dim),
        False,
    )
    softmax_scores(dtype, args, weights, indices, queries, count)


@extending.register_jitable
def varlen_forward(dtype, args, item, indices):
    """Forward kernel: one sequence and the query heads of one key head; scores, softmax, weighted
    values.
    """
    size, dim, vdim = simd.compute_itemsize(dtype), args.dim, args.vdim
    group_size, output_stride = args.group_size, size * vdim * args.num_kv_heads * args.group_size
    fill_indices(dtype, indices)
    sequence = sequence_of_item(args, item)
    first, queries, begin, count, g = sequence
    keys, row_bytes = indices + size * SIMD_WIDTH, size * round_up_to_simd(count)
    weights = keys + row_bytes * dim
    k = args.k + args.k_token_stride * begin + args.k_head_stride * g
    v = args.v + args.v_token_stride * begin + args.v_head_stride * g
    transpose_rows(dtype, keys, k, args.k_token_stride, count, dim)
    for h in range(g * group_size, (g + 1) * group_size if count else 0):
        q = args.q + args.q_token_stride * first + args.q_head_stride * h
        to = args.output + output_stride * first + size * vdim * h
        recompute_weights(dtype, args, q, (indices, keys, weights), sequence)
        shape = queries, vdim, count
        gemm(
            dtype,
            (to, output_stride),
            (weights, row_bytes, size),
            (v, args.v_token_stride),
            shape,
            False,
        )


@njit
def fill_indices(dtype, indices):
    """Write 0 to 15 as floats: the index of each key within a vector."""
    for n in range(SIMD_WIDTH):
        store_value(indices + simd.compute_itemsize(dtype) * n, simd.as_compute_scalar(dtype, n))


@njit
def backward_head(dtype, args, h, scratch, sequence):
    """Compute the gradients of one query head of a sequence."""
    size, dim, vdim = simd.compute_itemsize(dtype), args.dim, args.vdim
    indices, keys, values = scratch
    first, queries, begin, count, g = sequence
    row_bytes, groups, group_size = (
        size * round_up_to_simd(count),
        args.num_kv_heads,
        args.group_size,
    )
    weights = values + row_bytes * vdim
    weight_grads, accumulate = weights + row_bytes * queries, h > g * group_size
    q = args.q + args.q_token_stride * first + args.q_head_stride * h
    k = args.k + args.k_token_stride * begin + args.k_head_stride * g
    step = size * vdim * groups * group_size
    grad = args.grad + step * first + size * vdim * h
    recompute_weights(dtype, args, q, (indices, keys, weights), sequence)
    gemm(
        dtype,
        (weight_grads, row_bytes),
        (grad, step, size),
        (values, row_bytes),
        (queries, round_up_to_simd(count), vdim),
        False,
    )
    to = args.d_v + size * vdim * (groups * begin + g)
    shape = count, vdim, queries
    gemm(
        dtype,
        (to, size * vdim * groups),
        (weights, size, row_bytes),
        (grad, step),
        shape,
        accumulate,
    )
    softmax_backward(dtype, args, weights, weight_grads, queries, count)
    output_stride = size * dim * groups * group_size
    to = args.output + output_stride * first + size * dim * h
    shape = queries, dim, count
    gemm(
        dtype,
        (to, output_stride),
        (weight_grads, row_bytes, size),
        (k, args.k_token_stride),
        shape,
        False,
    )
    to = args.d_k + size * dim * (groups * begin + g)
    gemm(
        dtype,
        (to, size * dim * groups),
        (weight_grads, size, row_bytes),
        (q, args.q_token_stride),
        (count, dim, queries),
        accumulate,
    )


@extending.register_jitable
def varlen_backward(dtype, args, item, indices):
    """Backward kernel: one sequence and the query heads of one key head; weights again, then all
    gradients.
    """
    size, dim, vdim = simd.compute_itemsize(dtype), args.dim, args.vdim
    group_size = args.group_size
    fill_indices(dtype, indices)
    sequence = sequence_of_item(args, item)
    _, _, begin, count, g = sequence
    keys = indices + size * SIMD_WIDTH
    values = keys + size * round_up_to_simd(count) * dim
    k = args.k + args.k_token_stride * begin + args.k_head_stride * g
    v = args.v + args.v_token_stride * begin + args.v_head_stride * g
    transpose_rows(dtype, keys, k, args.k_token_stride, count, dim)
    transpose_rows(dtype, values, v, args.v_token_stride, count, vdim)
    for h in range(g * group_size, (g + 1) * group_size if count else 0):
        backward_head(dtype, args, h, (indices, keys, values), sequence)
