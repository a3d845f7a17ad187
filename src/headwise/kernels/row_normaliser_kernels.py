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
from typing import Any

from llvmlite import ir
from numba import extending, njit, types
from numba.core import cgutils

from .launch import SIMD_WIDTH
from .row_normalisers import ROW_STATE_SIZE, ROWS_PER_ITEM
from .simd import (
    INT8,
    INT32,
    INT64,
    SIMD_FLOAT64,
    address_of,
    as_vector,
    floats,
    fma,
    intrinsic,
    ints,
    memory_pointer,
    number,
    reduce_max,
    reduce_sum,
    round_up_to_simd,
    select_below,
    short_ints,
    splat,
    vec,
    vec_max,
)
from .vector_math import vec_exp, vec_log

# --- Masks and stream compaction ------------------------------------------------------------------


@intrinsic
def load_masked(typing: Any, address: Any, x: Any, low: Any) -> Any:
    """Return x where the mask byte at `address` is set, else the number `low`."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.VectorType(INT8, SIMD_WIDTH)
        mask = builder.load(memory_pointer(builder, args[0], kind), align=1)
        is_set = builder.icmp_unsigned("!=", mask, ir.Constant(kind, [0] * SIMD_WIDTH))
        return builder.select(is_set, args[1], as_vector(builder, args[2], x))

    return x(types.int64, x, x.scalar_type), code


@intrinsic
def is_byte_set(typing: Any, address: Any) -> Any:
    """Return 1 if the byte at an address is set, else 0."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.zext(builder.load(memory_pointer(builder, args[0], INT8), align=1), INT64)

    return types.int64(types.int64), code


@intrinsic
def compress_store(
    typing: Any, x: Any, bound: Any, source_indices: Any, target: Any, target_indices: Any
) -> Any:
    """Store the elements of x that are above `bound`, or NaN, adjacently; return how many they are.

    The int32 at `source_indices` that belong to these elements are stored adjacently to
    `target_indices`.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        index_vector = ir.VectorType(INT32, SIMD_WIDTH)
        selected = builder.fcmp_unordered(">", args[0], as_vector(builder, args[1], x))
        suffix = "f64" if x == SIMD_FLOAT64 else "f32"
        num_stored = builder.zext(
            builder.ctpop(builder.bitcast(selected, ir.IntType(SIMD_WIDTH))), INT64
        )
        indices = builder.load(memory_pointer(builder, args[2], index_vector), align=4)
        for vector, kind, address in ((args[0], suffix, args[3]), (indices, "i32", args[4])):
            target = memory_pointer(builder, address, vector.type.element)
            store_type = ir.FunctionType(ir.VoidType(), [vector.type, target.type, selected.type])
            name = f"llvm.masked.compressstore.v{SIMD_WIDTH}{kind}"
            store = cgutils.get_or_insert_function(builder.module, store_type, name)
            builder.call(store, [vector, target, selected])
        return num_stored

    return types.int64(x, x.scalar_type, source_indices, target, target_indices), code


# --- Rows ---------------------------------------------------------------------------------------


@njit
def load_row(args, row, scratch):
    """Copy a row of scores, -inf where it is masked, and return its maximum; NaN if one is NaN."""
    S = args.num_keys
    T = args.num_queries
    source = floats(scratch, args.scores) + row * S
    nan_sum = splat(scratch, 0)
    maxima = splat(scratch, -math.inf)
    end = S // SIMD_WIDTH * SIMD_WIDTH
    mask = args.mask
    if mask:
        batch = row // (args.num_heads * T)
        mask += batch * args.mask_row_stride + row % T * args.mask_query_stride
    for c in range(0, end, SIMD_WIDTH):
        x = vec(source, c)
        if mask:
            x = load_masked(mask + c, x, -math.inf)
        scratch[c] = x
        maxima = vec_max(maxima, x)
        nan_sum = nan_sum + select_below(x, math.inf, 0, math.nan)
    if end < S:
        scratch[end] = splat(scratch, -math.inf)
        for c in range(end, S):
            if mask == 0 or is_byte_set(mask + c):
                scratch[c] = source[c]
        x = vec(scratch, end)
        maxima = vec_max(maxima, x)
        nan_sum = nan_sum + select_below(x, math.inf, 0, math.nan)
    return reduce_max(maxima) + reduce_sum(nan_sum)


@njit
def store_row_scaled(to, scratch, S, factor):
    """Write a row times a factor."""
    end = S // SIMD_WIDTH * SIMD_WIDTH
    for c in range(0, end, SIMD_WIDTH):
        to[c] = vec(scratch, c) * factor
    for c in range(end, S):
        to[c] = scratch[c] * factor


@njit
def softmax_of_row(args, row, scratch):
    """Compute the softmax of a row; zeros if all its keys are masked."""
    S = args.num_keys
    to = floats(scratch, args.output) + row * S
    row_max = load_row(args, row, scratch)
    one = number(scratch, 1)
    if row_max == number(scratch, -math.inf):
        for c in range(0, S, SIMD_WIDTH):
            scratch[c] = splat(scratch, 0)
        store_row_scaled(to, scratch, S, one)
        return
    sums = splat(scratch, 0)
    for c in range(0, S, SIMD_WIDTH):
        e = vec_exp(vec(scratch, c) - row_max)
        scratch[c] = e
        sums = sums + e
    store_row_scaled(to, scratch, S, one / reduce_sum(sums))


@njit
def rows_of_item(args, item):
    """Return the first row of a work item and the end of its rows."""
    return item * ROWS_PER_ITEM, min((item + 1) * ROWS_PER_ITEM, args.num_rows)


@extending.register_jitable
def softmax_kernel(dtype, args, item, scratch):
    """Compute the softmax of a few rows."""
    begin, end = rows_of_item(args, item)
    for row in range(begin, end):
        softmax_of_row(args, row, floats(dtype, scratch))


# --- Entmax: candidates of a row, tau and weights -------------------------------------------------

MAX_SOLVER_STEPS = 200  # Newton takes 5 to 12 steps, bisection one per bit of the dtype
# Partial sums of this size limit rounding errors when many values are equal.
SUM_BLOCK_SIZE = 16 * SIMD_WIDTH


@njit
def row_lists(dtype, args, scratch):
    """Return the lists of a scratch buffer: row, candidates, slopes, gradients, key indices."""
    row = floats(dtype, scratch)
    size = round_up_to_simd(args.num_keys) + SIMD_WIDTH
    grads = row + 3 * size
    return row, row + size, row + 2 * size, grads, short_ints(address_of(grads + size))


@njit
def collect_candidates(source, source_indices, count, bound, candidates, indices):
    """Write the values above a bound and their indices, padded with -inf; return how many."""
    num_found = 0
    for c in range(0, count, SIMD_WIDTH):
        num_found += compress_store(
            vec(source, c), bound, source_indices + c, candidates + num_found, indices + num_found
        )
    # if values are NaN, the padding passes the comparison as well
    num_found = min(num_found, count)
    candidates[num_found] = splat(candidates, -math.inf)
    return num_found


@njit
def entmax_power(like, r, alpha):
    """Return the weights r^(1 / (alpha - 1)) and their slopes, the weights to the power 2 -
    alpha.
    """
    if alpha == number(like, 1.5):
        return r * r, r
    if alpha == number(like, 2):
        return r, select_below(splat(like, 0), r, 1, 0)
    one = number(like, 1)
    zero = splat(like, 0)
    w = select_below(zero, r, vec_exp(vec_log(r) * (one / (alpha - one))), 0)
    return w, select_below(zero, r, w / r, 0)


@njit
def entmax_sum_and_slope(candidates, count, tau, alpha):
    """Return the sum of the weights for tau, and its slope."""
    zero = splat(candidates, 0)
    slope_sums = zero
    weight_sums = zero
    for begin in range(0, count, SUM_BLOCK_SIZE):
        block_slopes = zero
        block_weights = zero
        for c in range(begin, min(begin + SUM_BLOCK_SIZE, count), SIMD_WIDTH):
            w, slope = entmax_power(candidates, vec_max(vec(candidates, c) - tau, zero), alpha)
            block_slopes = block_slopes + slope
            block_weights = block_weights + w
        slope_sums = slope_sums + block_slopes
        weight_sums = weight_sums + block_weights
    return reduce_sum(weight_sums), reduce_sum(slope_sums)


@njit
def solve_tau(candidates, count, alpha):
    """Return tau, for which the weights sum to one: Newton steps between bounds."""
    one = number(candidates, 1)
    half = number(candidates, 0.5)
    low = -one
    high = number(candidates, 0)
    tau = -one
    last_step = one
    for _ in range(MAX_SOLVER_STEPS):
        weight_sum, slope = entmax_sum_and_slope(candidates, count, tau, alpha)
        if weight_sum >= one:
            low = tau
        else:
            high = tau
        previous_tau = tau
        power = number(candidates, weight_sum ** (one + one - alpha))
        tau = tau + (weight_sum - power) / slope
        if tau == previous_tau:
            break
        is_slow = alpha > one + one and abs(tau - previous_tau) > half * last_step
        if is_slow or not low < tau < high:
            tau = low + half * (high - low)
            if not low < tau < high:
                break
        last_step = abs(tau - previous_tau)
    return tau


@njit
def compute_entmax_weights(candidates, slopes, count, tau, alpha):
    """Replace candidates by their weights, and write the slopes; both are NaN if tau is."""
    zero = splat(candidates, 0)
    weight_sums = zero
    for begin in range(0, count, SUM_BLOCK_SIZE):
        block_weights = zero
        for c in range(begin, min(begin + SUM_BLOCK_SIZE, count), SIMD_WIDTH):
            w, slope = entmax_power(candidates, vec_max(vec(candidates, c) - tau, zero), alpha)
            if tau != tau:
                w = slope = splat(candidates, tau)
            candidates[c] = w
            slopes[c] = slope
            block_weights = block_weights + w
        weight_sums = weight_sums + block_weights
    weight_sum = reduce_sum(weight_sums)
    for c in range(0, count, SIMD_WIDTH):
        candidates[c] = vec(candidates, c) / weight_sum


@njit
def scale_scores(scratch, S, row_max, alpha):
    """Replace scores s by (alpha - 1) (s - max s)."""
    factor = alpha - number(scratch, 1)
    for c in range(0, S, SIMD_WIDTH):
        scratch[c] = (vec(scratch, c) - row_max) * factor


# --- Entmax of rows, forward and backward ---------------------------------------------------------

VALUE_STRIP_WIDTH = 4 * SIMD_WIDTH  # channels of a value per tile


@njit
def scatter_row(to, S, values, indices, count):
    """Write a row: the values at their indices, zeros elsewhere."""
    end = S // SIMD_WIDTH * SIMD_WIDTH
    for c in range(0, end, SIMD_WIDTH):
        to[c] = splat(to, 0)
    for c in range(end, S):
        to[c] = 0
    for n in range(count):
        to[indices[n]] = values[n]


@njit
def gather_weighted_values(values, width, to, weights, indices, count):
    """Write the weighted sum of the values at these indices; widths are whole vectors."""
    full = width // VALUE_STRIP_WIDTH * VALUE_STRIP_WIDTH
    for c in range(0, full, VALUE_STRIP_WIDTH):
        a0 = a1 = a2 = a3 = splat(to, 0)
        for n in range(count):
            w = splat(to, weights[n])
            v = values + (indices[n] * width + c)
            a0 = fma(w, vec(v, 0), a0)
            a1 = fma(w, vec(v, SIMD_WIDTH), a1)
            a2 = fma(w, vec(v, 2 * SIMD_WIDTH), a2)
            a3 = fma(w, vec(v, 3 * SIMD_WIDTH), a3)
        to[c] = a0
        to[c + SIMD_WIDTH] = a1
        to[c + 2 * SIMD_WIDTH] = a2
        to[c + 3 * SIMD_WIDTH] = a3
    for c in range(full, width, SIMD_WIDTH):
        a = splat(to, 0)
        for n in range(count):
            a = fma(splat(to, weights[n]), vec(values, indices[n] * width + c), a)
        to[c] = a


@njit
def head_of_row(args, row):
    """Return the head of a row of scores."""
    return row // args.num_queries % args.num_heads


@njit
def value_offset(args, row):
    """Return where the values that a row reads begin among all values."""
    batch = row // (args.num_heads * args.num_queries)
    own = ints(args.value_head_of_head)[head_of_row(args, row)]
    return (batch * args.num_value_heads + own) * args.num_keys * args.value_dim


@njit
def entmax_forward_row(dtype, args, row, scratch):
    """Compute the entmax of a row, or the values weighted by it; keep its maximum and tau."""
    S = args.num_keys
    V = args.value_dim
    row_scores, candidates, slopes, _, indices = row_lists(dtype, args, scratch)
    row_max = load_row(args, row, row_scores)
    alpha = floats(dtype, args.alpha)[head_of_row(args, row)]
    tau = number(dtype, 0)
    count = 0
    if row_max != number(dtype, -math.inf):
        scale_scores(row_scores, S, row_max, alpha)
        keys = short_ints(args.key_indices)
        count = collect_candidates(row_scores, keys, S, number(dtype, -1), candidates, indices)
        tau = solve_tau(candidates, count, alpha) if row_max == row_max else row_max
        count = collect_candidates(candidates, indices, count, tau, candidates, indices)
        compute_entmax_weights(candidates, slopes, count, tau, alpha)
    row_state = floats(dtype, args.row_state) + ROW_STATE_SIZE * row
    row_state[0] = row_max
    row_state[1] = tau
    output = floats(dtype, args.output)
    if args.values:
        values = floats(dtype, args.values) + value_offset(args, row)
        gather_weighted_values(values, V, output + V * row, candidates, indices, count)
    else:
        scatter_row(output + S * row, S, candidates, indices, count)


@njit
def grad_of_weights(args, row, weights, grads, indices, count):
    """Write the gradients of a row's weights, and add the gradients of the values it reads."""
    grads[count // SIMD_WIDTH * SIMD_WIDTH] = splat(grads, 0)
    grad = floats(grads, args.grad)
    if args.values == 0:
        for n in range(count):
            grads[n] = grad[args.num_keys * row + indices[n]]
        return
    width = args.value_dim
    grad = grad + width * row
    values = floats(grads, args.values) + value_offset(args, row)
    d_values = floats(grads, args.d_values) + value_offset(args, row)
    for n in range(count):
        offset = indices[n] * width
        w = splat(grads, weights[n])
        products = splat(grads, 0)
        for c in range(0, width, SIMD_WIDTH):
            g = vec(grad, c)
            products = fma(g, vec(values, offset + c), products)
            d_values[offset + c] = fma(w, g, vec(d_values, offset + c))
        grads[n] = reduce_sum(products)


@njit
def entmax_backward_row(dtype, args, row, scratch):
    """Compute the gradients of a row's scores, of its values and of alpha."""
    S = args.num_keys
    row_scores, candidates, slopes, grads, indices = row_lists(dtype, args, scratch)
    row_state = floats(dtype, args.row_state) + ROW_STATE_SIZE * row
    alpha = floats(dtype, args.alpha)[head_of_row(args, row)]
    row_max = row_state[0]
    tau = row_state[1]
    count = 0
    mean = number(dtype, 0)
    d_alpha = number(dtype, 0)
    if row_max != number(dtype, -math.inf):
        load_row(args, row, row_scores)
        scale_scores(row_scores, S, row_max, alpha)
        keys = short_ints(args.key_indices)
        count = collect_candidates(row_scores, keys, S, tau, candidates, indices)
        compute_entmax_weights(candidates, slopes, count, tau, alpha)
        grad_of_weights(args, row, candidates, grads, indices, count)
        slope_sums = splat(grads, 0)
        grad_sums = splat(grads, 0)
        for c in range(0, count, SIMD_WIDTH):
            slope = vec(slopes, c)
            slope_sums = slope_sums + slope
            grad_sums = fma(slope, vec(grads, c), grad_sums)
        mean = reduce_sum(grad_sums) / reduce_sum(slope_sums)
        d_alpha = grad_alpha_of_row(candidates, grads, count, alpha, mean)
    for c in range(0, count, SIMD_WIDTH):
        grads[c] = vec(slopes, c) * (vec(grads, c) - mean)
    scatter_row(floats(dtype, args.output) + S * row, S, grads, indices, count)
    floats(dtype, args.d_alpha)[row] = d_alpha


@njit
def grad_alpha_of_row(weights, grads, count, alpha, mean):
    """Return the gradient of alpha from one row."""
    zero = splat(grads, 0)
    one = number(grads, 1)
    grad_sums = log_grad_sums = log_sums = zero
    for c in range(0, count, SIMD_WIDTH):
        w = vec(weights, c)
        g = vec(grads, c)
        w_log_w = select_below(zero, w, w * vec_log(w), 0)
        grad_sums = fma(w, g, grad_sums)
        log_grad_sums = fma(w_log_w, g, log_grad_sums)
        log_sums = log_sums + w_log_w
    log_part = reduce_sum(log_grad_sums)
    total = (reduce_sum(grad_sums) - mean) / (alpha - one) - log_part + mean * reduce_sum(log_sums)
    return total / (alpha - one)


@extending.register_jitable
def entmax_forward_kernel(dtype, args, item, scratch):
    """Compute the entmax of a few rows."""
    begin, end = rows_of_item(args, item)
    for row in range(begin, end):
        entmax_forward_row(dtype, args, row, scratch)


@extending.register_jitable
def entmax_backward_kernel(dtype, args, item, scratch):
    """Compute the gradients of a few rows, or of all rows that read one value head."""
    if not args.values:
        begin, end = rows_of_item(args, item)
        for row in range(begin, end):
            entmax_backward_row(dtype, args, row, scratch)
        return
    H = args.num_heads
    T = args.num_queries
    G = args.num_value_heads
    value_heads = ints(args.value_head_of_head)
    for h in range(H):
        if value_heads[h] == item % G:
            for t in range(T):
                entmax_backward_row(dtype, args, (item // G * H + h) * T + t, scratch)
