"""The few scores of a row that can have weight by entmax, side by side, and their weights (1905.05702, 1909.00015).

Keys less than 1 / (alpha - 1) below the highest can. They are laid side by side before Newton's method begins,
and again when it ends.
"""

from __future__ import annotations

import math

from numba import njit

from . import memory
from .lanes import SIMD_WIDTH, vec_exp, vec_max, vec_log, vec_sub, vec_div, vec_add, splat, vec_mul, reduce_sum, select_below, round_up_to_simd
from .masks import compress_store
from .memory import store_value, load_vector, load_arg
from .normalising import RowNormaliserArgs

NUM_ROW_LISTS = 5  # on a desk: the row, the few scores that count, slopes, gradients, and where they stand
MAX_SOLVER_STEPS = 200  # steps; Newton takes 5 to 12, halving as many as a number has digits
SUM_BLOCK_SIZE = 16 * SIMD_WIDTH  # numbers that are summed up before they are added to the others, or equal ones would drift


@njit
def row_list_addresses(form, table, desk):
    """The lists of a desk: the row, the few, their slopes, their gradients, where they stand."""
    each = memory.compute_itemsize(form) * (round_up_to_simd(load_arg(table, RowNormaliserArgs.S)) + SIMD_WIDTH)
    return desk, desk + each, desk + 2 * each, desk + 3 * each, desk + 4 * each


@njit
def collect_candidates(form, given, count, least, to):
    """Lay those of so many numbers that are above `least` side by side, -inf behind them; how many they are.

    `given` and `to` are addresses of numbers, and of where they stand.
    """
    (source, stood), (few, places) = given, to
    size, found = memory.compute_itemsize(form), 0
    for c in range(0, count, SIMD_WIDTH):
        x = load_vector(form, source + size * c)
        found += compress_store(x, splat(least), stood + 4 * c, few + size * found, places + 4 * found)
    found = min(found, count)  # of what is no number, what fills up passes as well
    store_value(few + size * found, splat(memory.as_compute_scalar(form, -math.inf)))
    return found


@njit
def entmax_power(form, r, alpha):
    """r^(1 / (alpha - 1)), and that over r; both zero where r is."""
    zero, one = splat(memory.as_compute_scalar(form, 0)), memory.as_compute_scalar(form, 1)
    if alpha == memory.as_compute_scalar(form, 1.5):
        return vec_mul(r, r), r
    if alpha == memory.as_compute_scalar(form, 2):
        return r, select_below(zero, r, splat(one), zero)
    w = select_below(zero, r, vec_exp(vec_mul(vec_log(r), splat(one / (alpha - one)))), zero)
    return w, select_below(zero, r, vec_div(w, r), zero)


@njit
def entmax_sum_and_slope(form, few, count, tau, alpha):
    """The sum of [x - tau]_+ ^ (1 / (alpha - 1)), and how fast it falls."""
    size, zero = memory.compute_itemsize(form), splat(memory.as_compute_scalar(form, 0))
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
    """tau for which that sum is one, by Newton's method on the norm of order 1 / (alpha - 1), from tau = -1.

    Up to alpha = 2 a norm is convex, and steps come from below. Beyond, they may go astray: then, and where a step is
    not half as long as the one before, what is left between too low and too high is halved.
    """
    one, half = memory.as_compute_scalar(form, 1), memory.as_compute_scalar(form, 0.5)
    low, high, tau, last = -one, memory.as_compute_scalar(form, 0), -one, one
    for _ in range(MAX_SOLVER_STEPS):
        sum_, fall = entmax_sum_and_slope(form, few, count, tau, alpha)
        if sum_ >= one:
            low = tau
        else:
            high = tau
        before, tau = tau, tau + (sum_ - memory.as_compute_scalar(form, sum_ ** (one + one - alpha))) / fall
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
    """Weights in the place of the few, and their slopes beside. Without a tau there are none."""
    size, zero = memory.compute_itemsize(form), splat(memory.as_compute_scalar(form, 0))
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
    """(alpha - 1) (s - top) in the place of scores."""
    size, by = memory.compute_itemsize(form), alpha - memory.as_compute_scalar(form, 1)
    for c in range(0, S, SIMD_WIDTH):
        store_value(desk + size * c, vec_mul(vec_sub(load_vector(form, desk + size * c), splat(top)), splat(by)))
