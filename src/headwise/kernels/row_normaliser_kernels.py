"""Kernels of `row_normalisers`: softmax, and entmax with optional values, forward and backward.

Softmax of a row s over its allowed keys:

    w = exp(s - max s) / sum exp(s - max s)

In plain PyTorch `s.masked_fill(~allowed, -torch.inf).softmax(-1)`, with zeros for rows without
allowed keys.

Entmax with x = (alpha - 1)(s - max s), the gradient g of w, and the slope u = w^(2 - alpha):

    w = max(x - tau, 0)^(1 / (alpha - 1)),  with tau such that sum w = 1
    ds = u * (g - sum(u * g) / sum(u));   with values: o = w v,  dv = w^T do,  g = do v^T

The largest x is 0, so tau lies in [-1, 0) and only keys with x > -1 can have weight. These
candidates are compacted into a short list, on which Newton's method finds tau. In plain PyTorch:
`_entmax_by_bisection` of `parts.entmax`, which finds tau by bisection and returns `(x -
tau).clamp(min=0) ** (1 / (alpha - 1))`.

Loop order: one work item is 8 rows. A thread copies each row to its scratch buffer, which fits the
nearest cache, and makes all passes over it there, 16 keys at a time. Entmax backward with values:
one work item is all rows that read one value head, so that only one thread adds to its gradients.
"""

from __future__ import annotations

import math

from numba import extending, njit

from . import simd
from .launch import SIMD_WIDTH
from .row_normalisers import ROW_STATE_SIZE, ROWS_PER_ITEM
from .simd import (
    compress_store,
    fma,
    is_byte_set,
    load_int32,
    load_int64,
    load_masked,
    load_scalar,
    load_vector,
    reduce_max,
    reduce_sum,
    round_up_to_simd,
    select_below,
    splat,
    store_value,
    vec_add,
    vec_div,
    vec_exp,
    vec_log,
    vec_max,
    vec_mul,
    vec_sub,
)


@njit
def load_row(dtype, args, row, scratch):
    """Copy a row of scores to the scratch buffer, -inf at masked keys and after the end; return its
    maximum or NaN.

    The result is NaN if an allowed score is NaN or +inf.
    """
    size = simd.compute_itemsize(dtype)
    S = args.num_keys
    T = args.num_queries
    minus_inf = simd.as_compute_scalar(dtype, -math.inf)
    inf = splat(simd.as_compute_scalar(dtype, math.inf))
    zero = splat(simd.as_compute_scalar(dtype, 0))
    nan_sum = zero
    nan = splat(simd.as_compute_scalar(dtype, math.nan))
    source = args.scores + size * row * S
    maxima = splat(minus_inf)
    end = S // SIMD_WIDTH * SIMD_WIDTH
    mask = args.mask
    if mask:
        batch = row // (args.num_heads * T)
        mask += batch * args.mask_row_stride + row % T * args.mask_query_stride
    for c in range(0, end, SIMD_WIDTH):
        x = load_vector(dtype, source + size * c)
        if mask:
            x = load_masked(dtype, mask + c, x, splat(minus_inf))
        store_value(scratch + size * c, x)
        maxima = vec_max(maxima, x)
        nan_sum = vec_add(nan_sum, select_below(x, inf, zero, nan))
    if end < S:
        store_value(scratch + size * end, splat(minus_inf))
        for c in range(end, S):
            if mask == 0 or is_byte_set(mask + c):
                store_value(scratch + size * c, load_scalar(dtype, source + size * c))
        x = load_vector(dtype, scratch + size * end)
        maxima = vec_max(maxima, x)
        nan_sum = vec_add(nan_sum, select_below(x, inf, zero, nan))
    return reduce_max(maxima) + reduce_sum(nan_sum)


@njit
def store_row_scaled(dtype, args, row, scratch, factor):
    """Copy a row from the scratch buffer to the output, times a factor."""
    size = simd.compute_itemsize(dtype)
    S = args.num_keys
    to = args.output + size * row * S
    end = S // SIMD_WIDTH * SIMD_WIDTH
    for c in range(0, end, SIMD_WIDTH):
        store_value(to + size * c, vec_mul(load_vector(dtype, scratch + size * c), splat(factor)))
    for c in range(end, S):
        store_value(to + size * c, load_scalar(dtype, scratch + size * c) * factor)


@njit
def softmax_of_row(dtype, args, row, scratch):
    """Compute exp(s - max) / sum of one row; zeros if no key is allowed."""
    size = simd.compute_itemsize(dtype)
    S = args.num_keys
    row_max = load_row(dtype, args, row, scratch)
    zero = simd.as_compute_scalar(dtype, 0)
    one = simd.as_compute_scalar(dtype, 1)
    if row_max == simd.as_compute_scalar(dtype, -math.inf):
        for c in range(0, S, SIMD_WIDTH):
            store_value(scratch + size * c, splat(zero))
        store_row_scaled(dtype, args, row, scratch, one)
        return
    sums = splat(zero)
    for c in range(0, S, SIMD_WIDTH):
        e = vec_exp(vec_sub(load_vector(dtype, scratch + size * c), splat(row_max)))
        store_value(scratch + size * c, e)
        sums = vec_add(sums, e)
    store_row_scaled(dtype, args, row, scratch, one / reduce_sum(sums))


@extending.register_jitable
def softmax_kernel(dtype, args, item, scratch):
    """Softmax of the rows of one work item."""
    for row in range(
        item * ROWS_PER_ITEM, min(item * ROWS_PER_ITEM + ROWS_PER_ITEM, args.num_rows)
    ):
        softmax_of_row(dtype, args, row, scratch)


# --- Entmax: candidates of a row, tau and weights -------------------------------------------------

MAX_SOLVER_STEPS = 200  # Newton takes 5 to 12 steps, bisection as many as the dtype has bits
SUM_BLOCK_SIZE = (
    16 * SIMD_WIDTH
)  # partial sums of this size limit rounding errors when many values are equal


@njit
def row_list_addresses(dtype, args, scratch):
    """Return the addresses of the scratch lists: row, candidates, slopes,
    gradients, key indices.
    """
    list_bytes = simd.compute_itemsize(dtype) * (round_up_to_simd(args.num_keys) + SIMD_WIDTH)
    return (
        scratch,
        scratch + list_bytes,
        scratch + 2 * list_bytes,
        scratch + 3 * list_bytes,
        scratch + 4 * list_bytes,
    )


@njit
def collect_candidates(dtype, source_list, count, bound, target_list):
    """Compact the values above `bound` into a list, followed by -inf; return how many there are.

    `source_list` and `target_list` are pairs of addresses: of the values and of their key indices.
    """
    (source, source_indices) = source_list
    (candidates, indices) = target_list
    size = simd.compute_itemsize(dtype)
    num_found = 0
    for c in range(0, count, SIMD_WIDTH):
        x = load_vector(dtype, source + size * c)
        num_found += compress_store(
            x,
            splat(bound),
            source_indices + 4 * c,
            candidates + size * num_found,
            indices + 4 * num_found,
        )
    num_found = min(
        num_found, count
    )  # if values are NaN, the padding passes the comparison as well
    store_value(candidates + size * num_found, splat(simd.as_compute_scalar(dtype, -math.inf)))
    return num_found


@njit
def entmax_power(dtype, r, alpha):
    """Return r^(1 / (alpha - 1)) and that divided by r; both are 0 where r is 0."""
    zero = splat(simd.as_compute_scalar(dtype, 0))
    one = simd.as_compute_scalar(dtype, 1)
    if alpha == simd.as_compute_scalar(dtype, 1.5):
        return vec_mul(r, r), r
    if alpha == simd.as_compute_scalar(dtype, 2):
        return r, select_below(zero, r, splat(one), zero)
    w = select_below(zero, r, vec_exp(vec_mul(vec_log(r), splat(one / (alpha - one)))), zero)
    return w, select_below(zero, r, vec_div(w, r), zero)


@njit
def entmax_sum_and_slope(dtype, candidates, count, tau, alpha):
    """Return the sum of max(x - tau, 0)^(1 / (alpha - 1)), and the sum of its terms divided by x -
    tau.

    The second is (1 - alpha) times the derivative of the first in tau.
    """
    size = simd.compute_itemsize(dtype)
    zero = splat(simd.as_compute_scalar(dtype, 0))
    slope_sums = zero
    weight_sums = zero
    for begin in range(0, count, SUM_BLOCK_SIZE):
        block_slopes = zero
        block_weights = zero
        for c in range(begin, min(begin + SUM_BLOCK_SIZE, count), SIMD_WIDTH):
            w, slope = entmax_power(
                dtype,
                vec_max(vec_sub(load_vector(dtype, candidates + size * c), splat(tau)), zero),
                alpha,
            )
            block_slopes = vec_add(block_slopes, slope)
            block_weights = vec_add(block_weights, w)
        slope_sums = vec_add(slope_sums, block_slopes)
        weight_sums = vec_add(weight_sums, block_weights)
    return reduce_sum(weight_sums), reduce_sum(slope_sums)


@njit
def solve_tau(dtype, candidates, count, alpha):
    """Return the tau for which the sum is 1, by Newton's method on the norm of order 1 / (alpha -
    1), from tau = -1.

    Up to alpha = 2 the norm is convex, and the steps approach from below. Beyond, a step may leave
    the bracket between the largest tau known to be too low and the smallest too high. In that case,
    or if a step is more than half as long as the one before, the bracket is halved.
    """
    one = simd.as_compute_scalar(dtype, 1)
    half = simd.as_compute_scalar(dtype, 0.5)
    low = -one
    high = simd.as_compute_scalar(dtype, 0)
    tau = -one
    last_step = one
    for _ in range(MAX_SOLVER_STEPS):
        weight_sum, slope = entmax_sum_and_slope(dtype, candidates, count, tau, alpha)
        if weight_sum >= one:
            low = tau
        else:
            high = tau
        previous_tau = tau
        tau = (
            tau
            + (weight_sum - simd.as_compute_scalar(dtype, weight_sum ** (one + one - alpha)))
            / slope
        )
        if tau == previous_tau:
            break
        if not low < tau < high or (
            alpha > one + one and abs(tau - previous_tau) > half * last_step
        ):
            tau = low + half * (high - low)
            if not low < tau < high:
                break
        last_step = abs(tau - previous_tau)
    return tau


@njit
def compute_entmax_weights(dtype, lists, count, tau, alpha):
    """Replace candidates by their weights, normalised to sum 1, and write their slopes; a NaN tau
    gives NaN weights.
    """
    size = simd.compute_itemsize(dtype)
    zero = splat(simd.as_compute_scalar(dtype, 0))
    candidates, slopes = lists
    weight_sums = zero
    for begin in range(0, count, SUM_BLOCK_SIZE):
        block_weights = zero
        for c in range(begin, min(begin + SUM_BLOCK_SIZE, count), SIMD_WIDTH):
            w, slope = entmax_power(
                dtype,
                vec_max(vec_sub(load_vector(dtype, candidates + size * c), splat(tau)), zero),
                alpha,
            )
            if tau != tau:
                w = splat(tau)
                slope = splat(tau)
            store_value(candidates + size * c, w)
            store_value(slopes + size * c, slope)
            block_weights = vec_add(block_weights, w)
        weight_sums = vec_add(weight_sums, block_weights)
    weight_sum = splat(reduce_sum(weight_sums))
    for c in range(0, count, SIMD_WIDTH):
        store_value(
            candidates + size * c, vec_div(load_vector(dtype, candidates + size * c), weight_sum)
        )


@njit
def scale_scores(dtype, scratch, S, row_max, alpha):
    """Replace scores by (alpha - 1)(s - max)."""
    size = simd.compute_itemsize(dtype)
    factor = alpha - simd.as_compute_scalar(dtype, 1)
    for c in range(0, S, SIMD_WIDTH):
        store_value(
            scratch + size * c,
            vec_mul(vec_sub(load_vector(dtype, scratch + size * c), splat(row_max)), splat(factor)),
        )


# --- Entmax of rows, forward and backward ---------------------------------------------------------

VALUE_STRIP_WIDTH = 4 * SIMD_WIDTH  # channels of a value per tile


@njit
def scatter_row(dtype, to, S, entries, count):
    """Write a row of zeros with the list's values at their key indices."""
    size = simd.compute_itemsize(dtype)
    zero = simd.as_compute_scalar(dtype, 0)
    (candidates, indices) = entries
    end = S // SIMD_WIDTH * SIMD_WIDTH
    for c in range(0, end, SIMD_WIDTH):
        store_value(to + size * c, splat(zero))
    for c in range(end, S):
        store_value(to + size * c, zero)
    for n in range(count):
        store_value(
            to + size * load_int32(indices + 4 * n), load_scalar(dtype, candidates + size * n)
        )


@njit
def gather_weighted_values(dtype, values, width, to, entries, count):
    """Write the sum of the listed values, times their weights."""
    size = simd.compute_itemsize(dtype)
    zero = splat(simd.as_compute_scalar(dtype, 0))
    (candidates, indices) = entries
    vector_bytes = size * SIMD_WIDTH
    for c in range(0, width // VALUE_STRIP_WIDTH * VALUE_STRIP_WIDTH, VALUE_STRIP_WIDTH):
        a0 = zero
        a1 = zero
        a2 = zero
        a3 = zero
        for n in range(count):
            w = splat(load_scalar(dtype, candidates + size * n))
            v = values + size * (load_int32(indices + 4 * n) * width + c)
            a0 = fma(w, load_vector(dtype, v), a0)
            a1 = fma(w, load_vector(dtype, v + vector_bytes), a1)
            a2 = fma(w, load_vector(dtype, v + 2 * vector_bytes), a2)
            a3 = fma(w, load_vector(dtype, v + 3 * vector_bytes), a3)
        store_value(to + size * c, a0)
        store_value(to + size * c + vector_bytes, a1)
        store_value(to + size * c + 2 * vector_bytes, a2)
        store_value(to + size * c + 3 * vector_bytes, a3)
    for c in range(width // VALUE_STRIP_WIDTH * VALUE_STRIP_WIDTH, width, SIMD_WIDTH):
        a = zero
        for n in range(count):
            v = values + size * (load_int32(indices + 4 * n) * width + c)
            a = fma(splat(load_scalar(dtype, candidates + size * n)), load_vector(dtype, v), a)
        store_value(to + size * c, a)


@njit
def head_of_row(args, row):
    """Return the head of a row."""
    return row // args.num_queries % args.num_heads


@njit
def value_address(dtype, args, row, values):
    """Return the address of the value head that a row reads, among all values
    or their gradients.
    """
    batch = row // (args.num_heads * args.num_queries)
    head = batch * args.num_value_heads + load_int64(
        args.value_head_of_head + 8 * head_of_row(args, row)
    )
    return values + simd.compute_itemsize(dtype) * head * args.num_keys * args.value_dim


@njit
def entmax_forward_row(dtype, args, row, scratch):
    """Compute the entmax weights of a row, or its weighted values."""
    size = simd.compute_itemsize(dtype)
    S = args.num_keys
    V = args.value_dim
    row_scores, candidates, slopes, _, indices = row_list_addresses(dtype, args, scratch)
    row_max = load_row(dtype, args, row, row_scores)
    alpha = load_scalar(dtype, args.alpha + size * head_of_row(args, row))
    zero = simd.as_compute_scalar(dtype, 0)
    one = simd.as_compute_scalar(dtype, 1)
    tau = zero
    count = 0
    if row_max != simd.as_compute_scalar(dtype, -math.inf):
        scale_scores(dtype, row_scores, S, row_max, alpha)
        count = collect_candidates(
            dtype, (row_scores, args.key_indices), S, -one, (candidates, indices)
        )
        tau = solve_tau(dtype, candidates, count, alpha) if row_max == row_max else row_max
        count = collect_candidates(dtype, (candidates, indices), count, tau, (candidates, indices))
        compute_entmax_weights(dtype, (candidates, slopes), count, tau, alpha)
    row_state = args.row_state + size * ROW_STATE_SIZE * row
    store_value(row_state, row_max)
    store_value(row_state + size, tau)
    if args.values:
        values = value_address(dtype, args, row, args.values)
        gather_weighted_values(
            dtype, values, V, args.output + size * V * row, (candidates, indices), count
        )
    else:
        scatter_row(dtype, args.output + size * S * row, S, (candidates, indices), count)


@njit
def grad_of_weights(dtype, args, row, lists, count):
    """Write the gradients of the listed weights; with values, also add to the values' gradients."""
    size = simd.compute_itemsize(dtype)
    (candidates, grads, indices) = lists
    store_value(
        grads + size * (count // SIMD_WIDTH * SIMD_WIDTH), splat(simd.as_compute_scalar(dtype, 0))
    )
    if args.values == 0:
        grad = args.grad + size * args.num_keys * row
        for n in range(count):
            store_value(
                grads + size * n, load_scalar(dtype, grad + size * load_int32(indices + 4 * n))
            )
        return
    width = args.value_dim
    grad = args.grad + size * width * row
    values = value_address(dtype, args, row, args.values)
    d_values = value_address(dtype, args, row, args.d_values)
    for n in range(count):
        offset = size * load_int32(indices + 4 * n) * width
        w = splat(load_scalar(dtype, candidates + size * n))
        products = splat(simd.as_compute_scalar(dtype, 0))
        for c in range(0, size * width, size * SIMD_WIDTH):
            g = load_vector(dtype, grad + c)
            products = fma(g, load_vector(dtype, values + offset + c), products)
            store_value(d_values + offset + c, fma(w, g, load_vector(dtype, d_values + offset + c)))
        store_value(grads + size * n, reduce_sum(products))


@njit
def entmax_backward_row(dtype, args, row, scratch):
    """Compute the gradient of a row of scores, u * (g - sum(u * g) / sum(u)), and the row's part of
    d alpha.
    """
    size = simd.compute_itemsize(dtype)
    S = args.num_keys
    row_scores, candidates, slopes, grads, indices = row_list_addresses(dtype, args, scratch)
    row_state = args.row_state + size * ROW_STATE_SIZE * row
    alpha = args.alpha + size * head_of_row(args, row)
    alpha = load_scalar(dtype, alpha)
    row_max = load_scalar(dtype, row_state)
    tau = load_scalar(dtype, row_state + size)
    zero = splat(simd.as_compute_scalar(dtype, 0))
    count = 0
    mean = simd.as_compute_scalar(dtype, 0)
    d_alpha = simd.as_compute_scalar(dtype, 0)
    if row_max != simd.as_compute_scalar(dtype, -math.inf):
        load_row(dtype, args, row, row_scores)
        scale_scores(dtype, row_scores, S, row_max, alpha)
        count = collect_candidates(
            dtype, (row_scores, args.key_indices), S, tau, (candidates, indices)
        )
        compute_entmax_weights(dtype, (candidates, slopes), count, tau, alpha)
        grad_of_weights(dtype, args, row, (candidates, grads, indices), count)
        slope_sums = zero
        grad_sums = zero
        for c in range(0, count, SIMD_WIDTH):
            slope = load_vector(dtype, slopes + size * c)
            slope_sums = vec_add(slope_sums, slope)
            grad_sums = fma(slope, load_vector(dtype, grads + size * c), grad_sums)
        slope_sum = reduce_sum(slope_sums)
        mean = reduce_sum(grad_sums) / slope_sum
        d_alpha = grad_alpha_of_row(dtype, (candidates, grads), count, alpha, mean)
    for c in range(0, count, SIMD_WIDTH):
        store_value(
            grads + size * c,
            vec_mul(
                load_vector(dtype, slopes + size * c),
                vec_sub(load_vector(dtype, grads + size * c), splat(mean)),
            ),
        )
    scatter_row(dtype, args.output + size * S * row, S, (grads, indices), count)
    store_value(args.d_alpha + size * row, d_alpha)


@njit
def grad_alpha_of_row(dtype, lists, count, alpha, mean):
    """Return one row's part of the gradient of alpha (1909.00015, proposition 1)."""
    size = simd.compute_itemsize(dtype)
    zero = simd.as_compute_scalar(dtype, 0)
    one = simd.as_compute_scalar(dtype, 1)
    (candidates, grads) = lists
    grad_sum = splat(zero)
    log_grad_sum = splat(zero)
    log_sum = splat(zero)
    for c in range(0, count, SIMD_WIDTH):
        w = load_vector(dtype, candidates + size * c)
        g = load_vector(dtype, grads + size * c)
        w_log_w = select_below(splat(zero), w, vec_mul(w, vec_log(w)), splat(zero))
        grad_sum = fma(w, g, grad_sum)
        log_grad_sum = fma(w_log_w, g, log_grad_sum)
        log_sum = vec_add(log_sum, w_log_w)
    grad_sum = reduce_sum(grad_sum)
    log_grad_sum = reduce_sum(log_grad_sum)
    log_sum = reduce_sum(log_sum)
    return ((grad_sum - mean) / (alpha - one) - log_grad_sum + mean * log_sum) / (alpha - one)


@extending.register_jitable
def entmax_forward_kernel(dtype, args, item, scratch):
    """Entmax of the rows of one work item."""
    for row in range(
        item * ROWS_PER_ITEM, min(item * ROWS_PER_ITEM + ROWS_PER_ITEM, args.num_rows)
    ):
        entmax_forward_row(dtype, args, row, scratch)


@njit
def entmax_backward_head(dtype, args, item, scratch):
    """Backward pass of all rows that read one value head, so that only this thread adds to its
    gradients.
    """
    H = args.num_heads
    T = args.num_queries
    G = args.num_value_heads
    for h in range(H):
        if load_int64(args.value_head_of_head + 8 * h) == item % G:
            for t in range(T):
                entmax_backward_row(dtype, args, (item // G * H + h) * T + t, scratch)


@extending.register_jitable
def entmax_backward_kernel(dtype, args, item, scratch):
    """Backward pass of the rows of one work item, or with values of all rows of one value head."""
    if args.values:
        entmax_backward_head(dtype, args, item, scratch)
    else:
        for row in range(
            item * ROWS_PER_ITEM, min(item * ROWS_PER_ITEM + ROWS_PER_ITEM, args.num_rows)
        ):
            entmax_backward_row(dtype, args, row, scratch)
