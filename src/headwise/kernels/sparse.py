"""Entmax of rows of scores, and values read with it: only keys that get weight are touched (1905.05702, 1909.00015).

The few that can have weight are found first; whatever comes after, the way back too, goes over these alone.
"""

from __future__ import annotations

import math

from numba import extending, njit

from . import memory
from .compiled import NUMBERS, Units
from .lanes import WIDE, fma, log, minus, plus, splat, times, total, where_below
from .masks import place
from .memory import put, read, read_one, told, whole
from .normalising import ROWS, At, lay
from .sifting import root, scaled, sift, spread, weigh

KEPT = 2  # numbers of a row from which it is formed again: the highest score and tau
STRIP = 4 * WIDE  # channels of a value that are read at once


@njit
def strew(form, to, S, given, count):
    """A row of zeros, but for the few where they stand."""
    size, zero, (few, places) = memory.size(form), memory.number(form, 0), given
    end = S // WIDE * WIDE
    for c in range(0, end, WIDE):
        put(to + size * c, splat(zero))
    for c in range(end, S):
        put(to + size * c, zero)
    for n in range(count):
        put(to + size * place(places + 4 * n), read_one(form, few + size * n))


@njit
def gather(form, values, width, to, given, count):
    """The sum of values by the few as weights."""
    size, zero, (few, places) = memory.size(form), splat(memory.number(form, 0)), given
    by = size * WIDE
    for c in range(0, width // STRIP * STRIP, STRIP):
        a0, a1, a2, a3 = zero, zero, zero, zero
        for n in range(count):
            w, v = splat(read_one(form, few + size * n)), values + size * (place(places + 4 * n) * width + c)
            a0, a1 = fma(w, read(form, v), a0), fma(w, read(form, v + by), a1)
            a2, a3 = fma(w, read(form, v + 2 * by), a2), fma(w, read(form, v + 3 * by), a3)
        put(to + size * c, a0)
        put(to + size * c + by, a1)
        put(to + size * c + 2 * by, a2)
        put(to + size * c + 3 * by, a3)
    for c in range(width // STRIP * STRIP, width, WIDE):
        a = zero
        for n in range(count):
            v = values + size * (place(places + 4 * n) * width + c)
            a = fma(splat(read_one(form, few + size * n)), read(form, v), a)
        put(to + size * c, a)


@njit
def head_of(table, row):
    """The head of a row."""
    return row // told(table, At.T) % told(table, At.H)


@njit
def values_of(form, table, row, at):
    """Where the values that a row reads lie, or their gradients."""
    batch = row // (told(table, At.H) * told(table, At.T))
    head = batch * told(table, At.G) + whole(told(table, At.OF) + 8 * head_of(table, row))
    return told(table, at) + memory.size(form) * head * told(table, At.S) * told(table, At.V)


@njit
def forward_row(form, table, row, desk):
    """The weights of a row, or what it reads with them."""
    size, S, V = memory.size(form), told(table, At.S), told(table, At.V)
    line, few, slopes, _, places = spread(form, table, desk)
    top, alpha = lay(form, table, row, line), read_one(form, told(table, At.ALPHA) + size * head_of(table, row))
    zero, one = memory.number(form, 0), memory.number(form, 1)
    tau, count = zero, 0
    if top != memory.number(form, -math.inf):
        scaled(form, line, S, top, alpha)
        count = sift(form, (line, told(table, At.KEYS)), S, -one, (few, places))
        tau = root(form, few, count, alpha) if top == top else top
        count = sift(form, (few, places), count, tau, (few, places))
        weigh(form, (few, slopes), count, tau, alpha)
    kept = told(table, At.KEPT) + size * KEPT * row
    put(kept, top)
    put(kept + size, tau)
    if told(table, At.VALUES):
        values = values_of(form, table, row, At.VALUES)
        gather(form, values, V, told(table, At.MADE) + size * V * row, (few, places), count)
    else:
        strew(form, told(table, At.MADE) + size * S * row, S, (few, places), count)


@njit
def heard(form, table, row, lists, count):
    """The gradients of the few weights; where these read values, theirs are added up."""
    size, (few, heard, places) = memory.size(form), lists
    put(heard + size * (count // WIDE * WIDE), splat(memory.number(form, 0)))
    if told(table, At.VALUES) == 0:
        grad = told(table, At.GRAD) + size * told(table, At.S) * row
        for n in range(count):
            put(heard + size * n, read_one(form, grad + size * place(places + 4 * n)))
        return
    width = told(table, At.V)
    grad = told(table, At.GRAD) + size * width * row
    values, d_values = values_of(form, table, row, At.VALUES), values_of(form, table, row, At.D_VALUES)
    for n in range(count):
        at = size * place(places + 4 * n) * width
        w, sum_ = splat(read_one(form, few + size * n)), splat(memory.number(form, 0))
        for c in range(0, size * width, size * WIDE):
            g = read(form, grad + c)
            sum_ = fma(g, read(form, values + at + c), sum_)
            put(d_values + at + c, fma(w, g, read(form, d_values + at + c)))
        put(heard + size * n, total(sum_))


@njit
def back_row(form, table, row, desk):
    """The gradient of a row of scores: slope (g - the mean of g by slopes); and its share of that of alpha."""
    size, S = memory.size(form), told(table, At.S)
    line, few, slopes, grads, places = spread(form, table, desk)
    kept, alpha = told(table, At.KEPT) + size * KEPT * row, told(table, At.ALPHA) + size * head_of(table, row)
    alpha, top, tau = read_one(form, alpha), read_one(form, kept), read_one(form, kept + size)
    zero, count, mean, by_alpha = splat(memory.number(form, 0)), 0, memory.number(form, 0), memory.number(form, 0)
    if top != memory.number(form, -math.inf):
        lay(form, table, row, line)
        scaled(form, line, S, top, alpha)
        count = sift(form, (line, told(table, At.KEYS)), S, tau, (few, places))
        weigh(form, (few, slopes), count, tau, alpha)
        heard(form, table, row, (few, grads, places), count)
        falls, all_ = zero, zero
        for c in range(0, count, WIDE):
            slope = read(form, slopes + size * c)
            falls, all_ = plus(falls, slope), fma(slope, read(form, grads + size * c), all_)
        fall = total(falls)
        mean = total(all_) / fall
        by_alpha = towards(form, (few, grads), count, alpha, mean)
    for c in range(0, count, WIDE):
        put(grads + size * c, times(read(form, slopes + size * c), minus(read(form, grads + size * c), splat(mean))))
    strew(form, told(table, At.MADE) + size * S * row, S, (grads, places), count)
    put(told(table, At.D_ALPHA) + size * row, by_alpha)


@njit
def towards(form, lists, count, alpha, mean):
    """The gradient in alpha (1909.00015, proposition 1) of one row."""
    size, zero, one, (few, grads) = memory.size(form), memory.number(form, 0), memory.number(form, 1), lists
    straight, bent, spreads = splat(zero), splat(zero), splat(zero)
    for c in range(0, count, WIDE):
        w, g = read(form, few + size * c), read(form, grads + size * c)
        bits = where_below(splat(zero), w, times(w, log(w)), splat(zero))
        straight, bent, spreads = fma(w, g, straight), fma(bits, g, bent), plus(spreads, bits)
    straight, bent, spreads = total(straight), total(bent), total(spreads)
    return ((straight - mean) / (alpha - one) - bent + mean * spreads) / (alpha - one)


@extending.register_jitable
def forward(form, table, unit, desk):
    """A few rows."""
    for row in range(unit * ROWS, min(unit * ROWS + ROWS, told(table, At.COUNT))):
        forward_row(form, table, row, desk)


@njit
def back_head(form, table, unit, desk):
    """All rows that read one head of values, so that nobody else adds to its gradients."""
    H, T, G = told(table, At.H), told(table, At.T), told(table, At.G)
    for h in range(H):
        if whole(told(table, At.OF) + 8 * h) == unit % G:
            for t in range(T):
                back_row(form, table, (unit // G * H + h) * T + t, desk)


@extending.register_jitable
def backward(form, table, unit, desk):
    """A few rows; where values are read, those of a head of these."""
    if told(table, At.VALUES):
        back_head(form, table, unit, desk)
    else:
        for row in range(unit * ROWS, min(unit * ROWS + ROWS, told(table, At.COUNT))):
            back_row(form, table, row, desk)


KERNELS = Units(NUMBERS, forward=forward, backward=backward)
