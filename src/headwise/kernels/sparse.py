"""Entmax of rows of scores, and values read with it: only keys that get weight are touched (1905.05702, 1909.00015).

The few that can have weight are found first; whatever comes after, the way back too, goes over these alone.
"""

from __future__ import annotations

import math

from numba import extending, njit

from . import memory
from .compiled import COMPUTE_DTYPES, ParallelKernelSet
from .lanes import SIMD_WIDTH, fma, vec_log, vec_sub, vec_add, splat, vec_mul, reduce_sum, select_below
from .masks import load_int32
from .memory import store_value, load_vector, load_scalar, load_arg, load_int64
from .normalising import ROWS_PER_ITEM, RowNormaliserArgs, load_row
from .sifting import solve_tau, scale_scores, collect_candidates, row_list_addresses, compute_entmax_weights

ROW_STATE_SIZE = 2  # numbers of a row from which it is formed again: the highest score and tau
VALUE_STRIP_WIDTH = 4 * SIMD_WIDTH  # channels of a value that are read at once


@njit
def scatter_row(form, to, S, given, count):
    """A row of zeros, but for the few where they stand."""
    size, zero, (few, places) = memory.compute_itemsize(form), memory.as_compute_scalar(form, 0), given
    end = S // SIMD_WIDTH * SIMD_WIDTH
    for c in range(0, end, SIMD_WIDTH):
        store_value(to + size * c, splat(zero))
    for c in range(end, S):
        store_value(to + size * c, zero)
    for n in range(count):
        store_value(to + size * load_int32(places + 4 * n), load_scalar(form, few + size * n))


@njit
def gather_weighted_values(form, values, width, to, given, count):
    """The sum of values by the few as weights."""
    size, zero, (few, places) = memory.compute_itemsize(form), splat(memory.as_compute_scalar(form, 0)), given
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
    """The head of a row."""
    return row // load_arg(table, RowNormaliserArgs.T) % load_arg(table, RowNormaliserArgs.H)


@njit
def value_address(form, table, row, at):
    """Where the values that a row reads lie, or their gradients."""
    batch = row // (load_arg(table, RowNormaliserArgs.H) * load_arg(table, RowNormaliserArgs.T))
    head = batch * load_arg(table, RowNormaliserArgs.G) + load_int64(load_arg(table, RowNormaliserArgs.VALUE_HEAD_OF_HEAD) + 8 * head_of_row(table, row))
    return load_arg(table, at) + memory.compute_itemsize(form) * head * load_arg(table, RowNormaliserArgs.S) * load_arg(table, RowNormaliserArgs.V)


@njit
def entmax_forward_row(form, table, row, desk):
    """The weights of a row, or what it reads with them."""
    size, S, V = memory.compute_itemsize(form), load_arg(table, RowNormaliserArgs.S), load_arg(table, RowNormaliserArgs.V)
    line, few, slopes, _, places = row_list_addresses(form, table, desk)
    top, alpha = load_row(form, table, row, line), load_scalar(form, load_arg(table, RowNormaliserArgs.ALPHA) + size * head_of_row(table, row))
    zero, one = memory.as_compute_scalar(form, 0), memory.as_compute_scalar(form, 1)
    tau, count = zero, 0
    if top != memory.as_compute_scalar(form, -math.inf):
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
        gather_weighted_values(form, values, V, load_arg(table, RowNormaliserArgs.OUTPUT) + size * V * row, (few, places), count)
    else:
        scatter_row(form, load_arg(table, RowNormaliserArgs.OUTPUT) + size * S * row, S, (few, places), count)


@njit
def grad_of_weights(form, table, row, lists, count):
    """The gradients of the few weights; where these read values, theirs are added up."""
    size, (few, heard, places) = memory.compute_itemsize(form), lists
    store_value(heard + size * (count // SIMD_WIDTH * SIMD_WIDTH), splat(memory.as_compute_scalar(form, 0)))
    if load_arg(table, RowNormaliserArgs.VALUES) == 0:
        grad = load_arg(table, RowNormaliserArgs.GRAD) + size * load_arg(table, RowNormaliserArgs.S) * row
        for n in range(count):
            store_value(heard + size * n, load_scalar(form, grad + size * load_int32(places + 4 * n)))
        return
    width = load_arg(table, RowNormaliserArgs.V)
    grad = load_arg(table, RowNormaliserArgs.GRAD) + size * width * row
    values, d_values = value_address(form, table, row, RowNormaliserArgs.VALUES), value_address(form, table, row, RowNormaliserArgs.D_VALUES)
    for n in range(count):
        at = size * load_int32(places + 4 * n) * width
        w, sum_ = splat(load_scalar(form, few + size * n)), splat(memory.as_compute_scalar(form, 0))
        for c in range(0, size * width, size * SIMD_WIDTH):
            g = load_vector(form, grad + c)
            sum_ = fma(g, load_vector(form, values + at + c), sum_)
            store_value(d_values + at + c, fma(w, g, load_vector(form, d_values + at + c)))
        store_value(heard + size * n, reduce_sum(sum_))


@njit
def entmax_backward_row(form, table, row, desk):
    """The gradient of a row of scores: slope (g - the mean of g by slopes); and its share of that of alpha."""
    size, S = memory.compute_itemsize(form), load_arg(table, RowNormaliserArgs.S)
    line, few, slopes, grads, places = row_list_addresses(form, table, desk)
    kept, alpha = load_arg(table, RowNormaliserArgs.ROW_STATE) + size * ROW_STATE_SIZE * row, load_arg(table, RowNormaliserArgs.ALPHA) + size * head_of_row(table, row)
    alpha, top, tau = load_scalar(form, alpha), load_scalar(form, kept), load_scalar(form, kept + size)
    zero, count, mean, by_alpha = splat(memory.as_compute_scalar(form, 0)), 0, memory.as_compute_scalar(form, 0), memory.as_compute_scalar(form, 0)
    if top != memory.as_compute_scalar(form, -math.inf):
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
        store_value(grads + size * c, vec_mul(load_vector(form, slopes + size * c), vec_sub(load_vector(form, grads + size * c), splat(mean))))
    scatter_row(form, load_arg(table, RowNormaliserArgs.OUTPUT) + size * S * row, S, (grads, places), count)
    store_value(load_arg(table, RowNormaliserArgs.D_ALPHA) + size * row, by_alpha)


@njit
def grad_alpha_of_row(form, lists, count, alpha, mean):
    """The gradient in alpha (1909.00015, proposition 1) of one row."""
    size, zero, one, (few, grads) = memory.compute_itemsize(form), memory.as_compute_scalar(form, 0), memory.as_compute_scalar(form, 1), lists
    straight, bent, spreads = splat(zero), splat(zero), splat(zero)
    for c in range(0, count, SIMD_WIDTH):
        w, g = load_vector(form, few + size * c), load_vector(form, grads + size * c)
        bits = select_below(splat(zero), w, vec_mul(w, vec_log(w)), splat(zero))
        straight, bent, spreads = fma(w, g, straight), fma(bits, g, bent), vec_add(spreads, bits)
    straight, bent, spreads = reduce_sum(straight), reduce_sum(bent), reduce_sum(spreads)
    return ((straight - mean) / (alpha - one) - bent + mean * spreads) / (alpha - one)


@extending.register_jitable
def entmax_forward_kernel(form, table, unit, desk):
    """A few rows."""
    for row in range(unit * ROWS_PER_ITEM, min(unit * ROWS_PER_ITEM + ROWS_PER_ITEM, load_arg(table, RowNormaliserArgs.NUM_ROWS))):
        entmax_forward_row(form, table, row, desk)


@njit
def entmax_backward_head(form, table, unit, desk):
    """All rows that read one head of values, so that nobody else adds to its gradients."""
    H, T, G = load_arg(table, RowNormaliserArgs.H), load_arg(table, RowNormaliserArgs.T), load_arg(table, RowNormaliserArgs.G)
    for h in range(H):
        if load_int64(load_arg(table, RowNormaliserArgs.VALUE_HEAD_OF_HEAD) + 8 * h) == unit % G:
            for t in range(T):
                entmax_backward_row(form, table, (unit // G * H + h) * T + t, desk)


@extending.register_jitable
def entmax_backward_kernel(form, table, unit, desk):
    """A few rows; where values are read, those of a head of these."""
    if load_arg(table, RowNormaliserArgs.VALUES):
        entmax_backward_head(form, table, unit, desk)
    else:
        for row in range(unit * ROWS_PER_ITEM, min(unit * ROWS_PER_ITEM + ROWS_PER_ITEM, load_arg(table, RowNormaliserArgs.NUM_ROWS))):
            entmax_backward_row(form, table, row, desk)


ENTMAX_KERNELS = ParallelKernelSet(COMPUTE_DTYPES, forward=entmax_forward_kernel, backward=entmax_backward_kernel)
