"""The few scores of a row that can have weight by entmax, side by side, and their weights (1905.05702, 1909.00015).

Keys less than 1 / (alpha - 1) below the highest can. They are laid side by side before Newton's method begins,
and again when it ends.
"""

from __future__ import annotations

import math

from numba import njit

from . import memory
from .lanes import WIDE, exp, larger, log, minus, over, plus, splat, times, total, where_below, wide
from .masks import squeeze
from .memory import put, read, told
from .normalising import At

LISTS = 5  # on a desk: the row, the few scores that count, slopes, gradients, and where they stand
MOST = 200  # steps; Newton takes 5 to 12, halving as many as a number has digits
SUMMED = 16 * WIDE  # numbers that are summed up before they are added to the others, or equal ones would drift


@njit
def spread(form, table, desk):
    """The lists of a desk: the row, the few, their slopes, their gradients, where they stand."""
    each = memory.size(form) * (wide(told(table, At.S)) + WIDE)
    return desk, desk + each, desk + 2 * each, desk + 3 * each, desk + 4 * each


@njit
def sift(form, given, count, least, to):
    """Lay those of so many numbers that are above `least` side by side, -inf behind them; how many they are.

    `given` and `to` are addresses of numbers, and of where they stand.
    """
    (source, stood), (few, places) = given, to
    size, found = memory.size(form), 0
    for c in range(0, count, WIDE):
        x = read(form, source + size * c)
        found += squeeze(x, splat(least), stood + 4 * c, few + size * found, places + 4 * found)
    found = min(found, count)  # of what is no number, what fills up passes as well
    put(few + size * found, splat(memory.number(form, -math.inf)))
    return found


@njit
def powers(form, r, alpha):
    """r^(1 / (alpha - 1)), and that over r; both zero where r is."""
    zero, one = splat(memory.number(form, 0)), memory.number(form, 1)
    if alpha == memory.number(form, 1.5):
        return times(r, r), r
    if alpha == memory.number(form, 2):
        return r, where_below(zero, r, splat(one), zero)
    w = where_below(zero, r, exp(times(log(r), splat(one / (alpha - one)))), zero)
    return w, where_below(zero, r, over(w, r), zero)


@njit
def sums(form, few, count, tau, alpha):
    """The sum of [x - tau]_+ ^ (1 / (alpha - 1)), and how fast it falls."""
    size, zero = memory.size(form), splat(memory.number(form, 0))
    falls, all_ = zero, zero
    for begin in range(0, count, SUMMED):
        fall, part = zero, zero
        for c in range(begin, min(begin + SUMMED, count), WIDE):
            w, slope = powers(form, larger(minus(read(form, few + size * c), splat(tau)), zero), alpha)
            fall, part = plus(fall, slope), plus(part, w)
        falls, all_ = plus(falls, fall), plus(all_, part)
    return total(all_), total(falls)


@njit
def root(form, few, count, alpha):
    """tau for which that sum is one, by Newton's method on the norm of order 1 / (alpha - 1), from tau = -1.

    Up to alpha = 2 a norm is convex, and steps come from below. Beyond, they may go astray: then, and where a step is
    not half as long as the one before, what is left between too low and too high is halved.
    """
    one, half = memory.number(form, 1), memory.number(form, 0.5)
    low, high, tau, last = -one, memory.number(form, 0), -one, one
    for _ in range(MOST):
        sum_, fall = sums(form, few, count, tau, alpha)
        if sum_ >= one:
            low = tau
        else:
            high = tau
        before, tau = tau, tau + (sum_ - memory.number(form, sum_ ** (one + one - alpha))) / fall
        if tau == before:
            break
        if not low < tau < high or (alpha > one + one and abs(tau - before) > half * last):
            tau = low + half * (high - low)
            if not low < tau < high:
                break
        last = abs(tau - before)
    return tau


@njit
def weigh(form, lists, count, tau, alpha):
    """Weights in the place of the few, and their slopes beside. Without a tau there are none."""
    size, zero = memory.size(form), splat(memory.number(form, 0))
    few, slopes = lists
    all_ = zero
    for begin in range(0, count, SUMMED):
        part = zero
        for c in range(begin, min(begin + SUMMED, count), WIDE):
            w, slope = powers(form, larger(minus(read(form, few + size * c), splat(tau)), zero), alpha)
            if tau != tau:
                w, slope = splat(tau), splat(tau)
            put(few + size * c, w)
            put(slopes + size * c, slope)
            part = plus(part, w)
        all_ = plus(all_, part)
    sum_ = splat(total(all_))
    for c in range(0, count, WIDE):
        put(few + size * c, over(read(form, few + size * c), sum_))


@njit
def scaled(form, desk, S, top, alpha):
    """(alpha - 1) (s - top) in the place of scores."""
    size, by = memory.size(form), alpha - memory.number(form, 1)
    for c in range(0, S, WIDE):
        put(desk + size * c, times(minus(read(form, desk + size * c), splat(top)), splat(by)))
