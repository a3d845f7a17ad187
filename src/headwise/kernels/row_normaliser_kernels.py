"""Kernels of `row_normalisers`: softmax, and entmax with optional values, forward and backward.

Softmax of a row s with allowed keys: w = exp(s - max s) / sum exp(s - max s). In plain PyTorch
`s.masked_fill(~allowed, -inf).softmax(-1)`, with zeros for rows without allowed keys.

Entmax: x = (alpha - 1)(s - max s), w = max(x - tau, 0)^(1 / (alpha - 1)) with sum w = 1. The largest x is 0, so tau
lies in [-1, 0) and only keys with x > -1 can have weight. These candidates are compacted into a short list, on which
Newton's method finds tau. Backward, with the slope u = w^(2 - alpha): ds = u * (g - sum(u * g) / sum(u)).

Loop order: one work item is 8 rows. A thread copies each row to its scratch buffer, which fits the nearest cache, and
makes all passes over it there, 16 keys at a time. Entmax backward with values: one work item is all rows that read one
value head, so that only one thread adds to its gradients.
"""

from __future__ import annotations

import math

from numba import extending, njit

from . import simd
from .launch import SIMD_WIDTH
from .row_normalisers import ROW_STATE_SIZE, ROWS_PER_ITEM, RowNormaliserArgs
from .simd import (
    compress_store,
    fma,
    is_byte_set,
    load_arg,
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
def load_row(form, table, row, desk):
    """Copy a row of scores to the scratch buffer, -inf at masked keys and behind the end; return its maximum or NaN.

    The result is NaN if an allowed score is NaN or +inf.
    """
    size, S, T = simd.compute_itemsize(form), load_arg(table, RowNormaliserArgs.S), load_arg(table, RowNormaliserArgs.T)
    low = simd.as_compute_scalar(form, -math.inf)
    high, zero = splat(simd.as_compute_scalar(form, math.inf)), splat(simd.as_compute_scalar(form, 0))
    odd, nan = zero, splat(simd.as_compute_scalar(form, math.nan))
    source, top, end = (
        load_arg(table, RowNormaliserArgs.SCORES) + size * row * S,
        splat(low),
        S // SIMD_WIDTH * SIMD_WIDTH,
    )
    seen = load_arg(table, RowNormaliserArgs.MASK)
    if seen:
        batch = row // (load_arg(table, RowNormaliserArgs.H) * T)
        seen += batch * load_arg(table, RowNormaliserArgs.MASK_ROW_STRIDE) + row % T * load_arg(
            table, RowNormaliserArgs.MASK_QUERY_STRIDE
        )
    for c in range(0, end, SIMD_WIDTH):
        x = load_vector(form, source + size * c)
        if seen:
            x = load_masked(form, seen + c, x, splat(low))
        store_value(desk + size * c, x)
        top, odd = vec_max(top, x), vec_add(odd, select_below(x, high, zero, nan))
    if end < S:
        store_value(desk + size * end, splat(low))
        for c in range(end, S):
            if seen == 0 or is_byte_set(seen + c):
                store_value(desk + size * c, load_scalar(form, source + size * c))
        x = load_vector(form, desk + size * end)
        top, odd = vec_max(top, x), vec_add(odd, select_below(x, high, zero, nan))
    return reduce_max(top) + reduce_sum(odd)


@njit
def store_row_scaled(form, table, row, desk, factor):
    """Copy a row from the scratch buffer to the output, times a factor."""
    size, S = simd.compute_itemsize(form), load_arg(table, RowNormaliserArgs.S)
    to, end = load_arg(table, RowNormaliserArgs.OUTPUT) + size * row * S, S // SIMD_WIDTH * SIMD_WIDTH
    for c in range(0, end, SIMD_WIDTH):
        store_value(to + size * c, vec_mul(load_vector(form, desk + size * c), splat(factor)))
    for c in range(end, S):
        store_value(to + size * c, load_scalar(form, desk + size * c) * factor)


@njit
def softmax_of_row(form, table, row, desk):
    """Compute exp(s - max) / sum of one row; zeros if no key is allowed."""
    size, S = simd.compute_itemsize(form), load_arg(table, RowNormaliserArgs.S)
    top = load_row(form, table, row, desk)
    zero, one = simd.as_compute_scalar(form, 0), simd.as_compute_scalar(form, 1)
    if top == simd.as_compute_scalar(form, -math.inf):
        for c in range(0, S, SIMD_WIDTH):
            store_value(desk + size * c, splat(zero))
        store_row_scaled(form, table, row, desk, one)
        return
    sums = splat(zero)
    for c in range(0, S, SIMD_WIDTH):
        e = vec_exp(vec_sub(load_vector(form, desk + size * c), splat(top)))
        store_value(desk + size * c, e)
        sums = vec_add(sums, e)
    store_row_scaled(form, table, row, desk, one / reduce_sum(sums))


@extending.register_jitable
def softmax_kernel(form, table, unit, desk):
    """Softmax of the rows of one work item."""
    for row in range(
        unit * ROWS_PER_ITEM, min(unit * ROWS_PER_ITEM + ROWS_PER_ITEM, load_arg(table, RowNormaliserArgs.NUM_ROWS))
    ):
        softmax_of_row(form, table, row, desk)


# --- Entmax: candidates of a row, tau and weights ------------------------------------------------------

MAX_SOLVER_STEPS = 200  # Newton takes 5 to 12 steps, bisection as many as the dtype has bits
SUM_BLOCK_SIZE = 16 * SIMD_WIDTH  # partial sums of this size limit rounding errors when many values are equal


@njit
def row_list_addresses(form, table, desk):
    """Return the addresses of the scratch lists: row, candidates, slopes, gradients, key indices."""
    each = simd.compute_itemsize(form) * (round_up_to_simd(load_arg(table, RowNormaliserArgs.S)) + SIMD_WIDTH)
    return desk, desk + each, desk + 2 * each, desk + 3 * each, desk + 4 * each


@njit
def collect_candidates(form, given, count, least, to):
    """Compact the values above `least` into a list, followed by -inf; return how many there are.

    `given` and `to` are pairs of addresses: of the values and of their key indices.
    """
    (source, stood), (few, places) = given, to
    size, found = simd.compute_itemsize(form), 0
    for c in range(0, count, SIMD_WIDTH):
        x = load_vector(form, source + size * c)
        found += compress_store(x, splat(least), stood + 4 * c, few + size * found, places + 4 * found)
    found = min(found, count)  # if values are NaN, the padding passes the comparison as well
    store_value(few + size * found, splat(simd.as_compute_scalar(form, -math.inf)))
    return found


@njit
def entmax_power(form, r, alpha):
    """Return r^(1 / (alpha - 1)) and that divided by r; both are 0 where r is 0."""
    zero, one = splat(simd.as_compute_scalar(form, 0)), simd.as_compute_scalar(form, 1)
    if alpha == simd.as_compute_scalar(form, 1.5):
        return vec_mul(r, r), r
    if alpha == simd.as_compute_scalar(form, 2):
        return r, select_below(zero, r, splat(one), zero)
    w = select_below(zero, r, vec_exp(vec_mul(vec_log(r), splat(one / (alpha - one)))), zero)
    return w, select_below(zero, r, vec_div(w, r), zero)


@njit
def entmax_sum_and_slope(form, few, count, tau, alpha):
    """Return the sum of max(x - tau, 0)^(1 / (alpha - 1)), and the sum of its terms divided by x - tau.

    The second is (1 - alpha) times the derivative of the first in tau.
    """
    size, zero = simd.compute_itemsize(form), splat(simd.as_compute_scalar(form, 0))
    falls, all_ = zero, zero
    for begin in range(0, count, SUM_BLOCK_SIZE):
        fall, part = zero, zero
        for c in range(begin, min(begin + SUM_BLOCK_SIZE, count), SIMD_WIDTH):
            w, slope = entmax_power(form, vec_max(vec_sub(load_vector(form, few + size * c), splat(tau)), zero), alpha)
            fall, part = vec_add(fall, slope), vec_add(part, w)
        falls, all_ = vec_add(falls, fall), vec_add(all_, part)
    return reduce_sum(all_), reduce_sum(falls)


@njit
def solve_tau(form, few, count, alpha):
    """Return the tau for which the sum is 1, by Newton's method on the norm of order 1 / (alpha - 1), from tau = -1.

    Up to alpha = 2 the norm is convex, and the steps approach from below. Beyond, a step may leave the bracket between
    the largest tau known to be too low and the smallest too high. In that case, or if a step is more than half as long
    as the one before, the bracket is halved.
    """
    one, half = simd.as_compute_scalar(form, 1), simd.as_compute_scalar(form, 0.5)
    low, high, tau, last = -one, simd.as_compute_scalar(form, 0), -one, one
    for _ in range(MAX_SOLVER_STEPS):
        sum_, fall = entmax_sum_and_slope(form, few, count, tau, alpha)
        if sum_ >= one:
            low = tau
        else:
            high = tau
        before, tau = tau, tau + (sum_ - simd.as_compute_scalar(form, sum_ ** (one + one - alpha))) / fall
        if tau == before:
            break
        if not low < tau < high or (alpha > one + one and abs(tau - before) > half * last):
            tau = low + half * (high - low)
            if not low < tau < high:
                break
        last = abs(tau - before)
    return tau


@njit
def compute_entmax_weights(form, lists, count, tau, alpha):
    """Replace candidates by their weights, normalised to sum 1, and write their slopes; a NaN tau gives NaN weights."""
    size, zero = simd.compute_itemsize(form), splat(simd.as_compute_scalar(form, 0))
    few, slopes = lists
    all_ = zero
    for begin in range(0, count, SUM_BLOCK_SIZE):
        part = zero
        for c in range(begin, min(begin + SUM_BLOCK_SIZE, count), SIMD_WIDTH):
            w, slope = entmax_power(form, vec_max(vec_sub(load_vector(form, few + size * c), splat(tau)), zero), alpha)
            if tau != tau:
                w, slope = splat(tau), splat(tau)
            store_value(few + size * c, w)
            store_value(slopes + size * c, slope)
            part = vec_add(part, w)
        all_ = vec_add(all_, part)
    sum_ = splat(reduce_sum(all_))
    for c in range(0, count, SIMD_WIDTH):
        store_value(few + size * c, vec_div(load_vector(form, few + size * c), sum_))


@njit
def scale_scores(form, desk, S, top, alpha):
    """Replace scores by (alpha - 1)(s - max)."""
    size, by = simd.compute_itemsize(form), alpha - simd.as_compute_scalar(form, 1)
    for c in range(0, S, SIMD_WIDTH):
        store_value(desk + size * c, vec_mul(vec_sub(load_vector(form, desk + size * c), splat(top)), splat(by)))


# --- Entmax of rows, forward and backward --------------------------------------------------------------

VALUE_STRIP_WIDTH = 4 * SIMD_WIDTH  # channels of a value per tile


@njit
def scatter_row(form, to, S, given, count):
    """Write a row of zeros with the list's values at their key indices."""
    size, zero, (few, places) = simd.compute_itemsize(form), simd.as_compute_scalar(form, 0), given
    end = S // SIMD_WIDTH * SIMD_WIDTH
    for c in range(0, end, SIMD_WIDTH):
        store_value(to + size * c, splat(zero))
    for c in range(end, S):
        store_value(to + size * c, zero)
    for n in range(count):
        store_value(to + size * load_int32(places + 4 * n), load_scalar(form, few + size * n))


@njit
def gather_weighted_values(form, values, width, to, given, count):
    """Write the sum of the listed values, times their weights."""
    size, zero, (few, places) = simd.compute_itemsize(form), splat(simd.as_compute_scalar(form, 0)), given
    by = size * SIMD_WIDTH
    for c in range(0, width // VALUE_STRIP_WIDTH * VALUE_STRIP_WIDTH, VALUE_STRIP_WIDTH):
        a0, a1, a2, a3 = zero, zero, zero, zero
        for n in range(count):
            w, v = splat(load_scalar(form, few + size * n)), values + size * (load_int32(places + 4 * n) * width + c)
            a0, a1 = fma(w, load_vector(form, v), a0), fma(w, load_vector(form, v + by), a1)
            a2, a3 = fma(w, load_vector(form, v + 2 * by), a2), fma(w, load_vector(form, v + 3 * by), a3)
        store_value(to + size * c, a0)
        store_value(to + size * c + by, a1)
        store_value(to + size * c + 2 * by, a2)
        store_value(to + size * c + 3 * by, a3)
    for c in range(width // VALUE_STRIP_WIDTH * VALUE_STRIP_WIDTH, width, SIMD_WIDTH):
        a = zero
        for n in range(count):
            v = values + size * (load_int32(places + 4 * n) * width + c)
            a = fma(splat(load_scalar(form, few + size * n)), load_vector(form, v), a)
        store_value(to + size * c, a)


@njit
def head_of_row(table, row):
    """Return the head of a row."""
    return row // load_arg(table, RowNormaliserArgs.T) % load_arg(table, RowNormaliserArgs.H)


@njit
def value_address(form, table, row, at):
    """Return the address of the values that a row reads, or of their gradients."""
    batch = row // (load_arg(table, RowNormaliserArgs.H) * load_arg(table, RowNormaliserArgs.T))
    head = batch * load_arg(table, RowNormaliserArgs.G) + load_int64(
        load_arg(table, RowNormaliserArgs.VALUE_HEAD_OF_HEAD) + 8 * head_of_row(table, row)
    )
    return load_arg(table, at) + simd.compute_itemsize(form) * head * load_arg(table, RowNormaliserArgs.S) * load_arg(
        table, RowNormaliserArgs.V
    )


@njit
def entmax_forward_row(form, table, row, desk):
    """Compute the entmax weights of a row, or its weighted values."""
    size, S, V = simd.compute_itemsize(form), load_arg(table, RowNormaliserArgs.S), load_arg(table, RowNormaliserArgs.V)
    line, few, slopes, _, places = row_list_addresses(form, table, desk)
    top, alpha = (
        load_row(form, table, row, line),
        load_scalar(form, load_arg(table, RowNormaliserArgs.ALPHA) + size * head_of_row(table, row)),
    )
    zero, one = simd.as_compute_scalar(form, 0), simd.as_compute_scalar(form, 1)
    tau, count = zero, 0
    if top != simd.as_compute_scalar(form, -math.inf):
        scale_scores(form, line, S, top, alpha)
        count = collect_candidates(form, (line, load_arg(table, RowNormaliserArgs.KEY_INDICES)), S, -one, (few, places))
        tau = solve_tau(form, few, count, alpha) if top == top else top
        count = collect_candidates(form, (few, places), count, tau, (few, places))
        compute_entmax_weights(form, (few, slopes), count, tau, alpha)
    kept = load_arg(table, RowNormaliserArgs.ROW_STATE) + size * ROW_STATE_SIZE * row
    store_value(kept, top)
    store_value(kept + size, tau)
    if load_arg(table, RowNormaliserArgs.VALUES):
        values = value_address(form, table, row, RowNormaliserArgs.VALUES)
        gather_weighted_values(
            form, values, V, load_arg(table, RowNormaliserArgs.OUTPUT) + size * V * row, (few, places), count
        )
    else:
        scatter_row(form, load_arg(table, RowNormaliserArgs.OUTPUT) + size * S * row, S, (few, places), count)


@njit
def grad_of_weights(form, table, row, lists, count):
    """Write the gradients of the listed weights; with values, also add to the values' gradients."""
    size, (few, heard, places) = simd.compute_itemsize(form), lists
    store_value(heard + size * (count // SIMD_WIDTH * SIMD_WIDTH), splat(simd.as_compute_scalar(form, 0)))
    if load_arg(table, RowNormaliserArgs.VALUES) == 0:
        grad = load_arg(table, RowNormaliserArgs.GRAD) + size * load_arg(table, RowNormaliserArgs.S) * row
        for n in range(count):
            store_value(heard + size * n, load_scalar(form, grad + size * load_int32(places + 4 * n)))
        return
    width = load_arg(table, RowNormaliserArgs.V)
    grad = load_arg(table, RowNormaliserArgs.GRAD) + size * width * row
    values, d_values = (
        value_address(form, table, row, RowNormaliserArgs.VALUES),
        value_address(form, table, row, RowNormaliserArgs.D_VALUES),
    )
    for n in range(count):
        at = size * load_int32(places + 4 * n) * width
        w, sum_ = splat(load_scalar(form, few + size * n)), splat(simd.as_compute_scalar(form, 0))
        for c in range(0, size * width, size * SIMD_WIDTH):
            g = load_vector(form, grad + c)
            sum_ = fma(g, load_vector(form, values + at + c), sum_)
            store_value(d_values + at + c, fma(w, g, load_vector(form, d_values + at + c)))
        store_value(heard + size * n, reduce_sum(sum_))


@njit
def entmax_backward_row(form, table, row, desk):
    """Compute the gradient of a row of scores, u * (g - sum(u * g) / sum(u)), and the row's part of d alpha."""
    size, S = simd.compute_itemsize(form), load_arg(table, RowNormaliserArgs.S)
    line, few, slopes, grads, places = row_list_addresses(form, table, desk)
    kept, alpha = (
        load_arg(table, RowNormaliserArgs.ROW_STATE) + size * ROW_STATE_SIZE * row,
        load_arg(table, RowNormaliserArgs.ALPHA) + size * head_of_row(table, row),
    )
    alpha, top, tau = load_scalar(form, alpha), load_scalar(form, kept), load_scalar(form, kept + size)
    zero, count, mean, by_alpha = (
        splat(simd.as_compute_scalar(form, 0)),
        0,
        simd.as_compute_scalar(form, 0),
        simd.as_compute_scalar(form, 0),
    )
    if top != simd.as_compute_scalar(form, -math.inf):
        load_row(form, table, row, line)
        scale_scores(form, line, S, top, alpha)
        count = collect_candidates(form, (line, load_arg(table, RowNormaliserArgs.KEY_INDICES)), S, tau, (few, places))
        compute_entmax_weights(form, (few, slopes), count, tau, alpha)
        grad_of_weights(form, table, row, (few, grads, places), count)
        falls, all_ = zero, zero
        for c in range(0, count, SIMD_WIDTH):
            slope = load_vector(form, slopes + size * c)
            falls, all_ = vec_add(falls, slope), fma(slope, load_vector(form, grads + size * c), all_)
        fall = reduce_sum(falls)
        mean = reduce_sum(all_) / fall
        by_alpha = grad_alpha_of_row(form, (few, grads), count, alpha, mean)
    for c in range(0, count, SIMD_WIDTH):
        store_value(
            grads + size * c,
            vec_mul(load_vector(form, slopes + size * c), vec_sub(load_vector(form, grads + size * c), splat(mean))),
        )
    scatter_row(form, load_arg(table, RowNormaliserArgs.OUTPUT) + size * S * row, S, (grads, places), count)
    store_value(load_arg(table, RowNormaliserArgs.D_ALPHA) + size * row, by_alpha)


@njit
def grad_alpha_of_row(form, lists, count, alpha, mean):
    """Return one row's part of the gradient of alpha (1909.00015, proposition 1)."""
    size, zero, one, (few, grads) = (
        simd.compute_itemsize(form),
        simd.as_compute_scalar(form, 0),
        simd.as_compute_scalar(form, 1),
        lists,
    )
    straight, bent, spreads = splat(zero), splat(zero), splat(zero)
    for c in range(0, count, SIMD_WIDTH):
        w, g = load_vector(form, few + size * c), load_vector(form, grads + size * c)
        bits = select_below(splat(zero), w, vec_mul(w, vec_log(w)), splat(zero))
        straight, bent, spreads = fma(w, g, straight), fma(bits, g, bent), vec_add(spreads, bits)
    straight, bent, spreads = reduce_sum(straight), reduce_sum(bent), reduce_sum(spreads)
    return ((straight - mean) / (alpha - one) - bent + mean * spreads) / (alpha - one)


@extending.register_jitable
def entmax_forward_kernel(form, table, unit, desk):
    """Entmax of the rows of one work item."""
    for row in range(
        unit * ROWS_PER_ITEM, min(unit * ROWS_PER_ITEM + ROWS_PER_ITEM, load_arg(table, RowNormaliserArgs.NUM_ROWS))
    ):
        entmax_forward_row(form, table, row, desk)


@njit
def entmax_backward_head(form, table, unit, desk):
    """Backward pass of all rows that read one value head, so that only this thread adds to its gradients."""
    H, T, G = (
        load_arg(table, RowNormaliserArgs.H),
        load_arg(table, RowNormaliserArgs.T),
        load_arg(table, RowNormaliserArgs.G),
    )
    for h in range(H):
        if load_int64(load_arg(table, RowNormaliserArgs.VALUE_HEAD_OF_HEAD) + 8 * h) == unit % G:
            for t in range(T):
                entmax_backward_row(form, table, (unit // G * H + h) * T + t, desk)


@extending.register_jitable
def entmax_backward_kernel(form, table, unit, desk):
    """Backward pass of the rows of one work item, or with values of all rows of one value head."""
    if load_arg(table, RowNormaliserArgs.VALUES):
        entmax_backward_head(form, table, unit, desk)
    else:
        for row in range(
            unit * ROWS_PER_ITEM, min(unit * ROWS_PER_ITEM + ROWS_PER_ITEM, load_arg(table, RowNormaliserArgs.NUM_ROWS))
        ):
            entmax_backward_row(form, table, row, desk)
