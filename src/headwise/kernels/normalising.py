"""Rows of scores as weights, and their gradients: softmax, and entmax by Newton's method (1905.05702, 1909.00015).

A thread takes a few rows at a time and lays each on its desk, which fits the nearest cache, before it goes over it as
often as it has to.
"""

from __future__ import annotations

import math
from enum import IntEnum, auto
from typing import Any

import torch
from numba import njit

from . import memory
from .compiled import MARK, Kernels
from .lanes import (
    WIDE,
    exp,
    fma,
    larger,
    largest,
    minus,
    plus,
    splat,
    times,
    total,
    where_below,
)
from .masks import allowed, marked, root
from .memory import put, read, read_one, take, whole

ROWS = 8  # that a thread takes at a time


class At(IntEnum):
    """Where each number lies in what a kernel is told: an array of int64. Addresses count bytes, sizes numbers."""

    NEXT = 0
    THREAD = auto()  # the next thread to begin
    UNITS = auto()
    GIVEN = auto()  # [B, H, T, S]: scores forward, weights backward
    MADE = auto()
    GRAD = auto()  # backward, of the weights
    ALLOWED = auto()  # [1 or B, 1, 1 or T, S], a byte each; 0 where all are
    ALLOWED_ROW = auto()  # numbers to the next row of the batch, and to the next query
    ALLOWED_QUERY = auto()
    TWICE = auto()  # alpha: 3 or 4
    STEPS = auto()  # at most so many
    H = auto()
    T = auto()
    S = auto()
    COUNT = auto()  # rows in all
    DESK = auto()
    DESK_SIZE = auto()  # bytes of each thread


@njit
def told(table, at):
    """The number that a kernel is told at this place."""
    return whole(table + 8 * at)


@njit
def wide(count):
    """The next multiple of a vector's numbers."""
    return (count + WIDE - 1) // WIDE * WIDE


@njit
def lay(form, table, row, desk):
    """Lay the scores of a row on the desk, -inf where none is allowed and behind the end; the largest, or NaN."""
    size, S, T = memory.size(form), told(table, At.S), told(table, At.T)
    low = memory.number(form, -math.inf)
    high, zero = splat(memory.number(form, math.inf)), splat(memory.number(form, 0))
    odd, nan = zero, splat(memory.number(form, math.nan))
    source, top, end = told(table, At.GIVEN) + size * row * S, splat(low), S // WIDE * WIDE
    seen = told(table, At.ALLOWED)
    if seen:
        batch = row // (told(table, At.H) * T)
        seen += batch * told(table, At.ALLOWED_ROW) + row % T * told(table, At.ALLOWED_QUERY)
    for c in range(0, end, WIDE):
        x = read(form, source + size * c)
        if seen:
            x = allowed(form, seen + c, x, splat(low))
        put(desk + size * c, x)
        top, odd = larger(top, x), plus(odd, where_below(x, high, zero, nan))
    if end < S:
        put(desk + size * end, splat(low))
        for c in range(end, S):
            if seen == 0 or marked(seen + c):
                put(desk + size * c, read_one(form, source + size * c))
        x = read(form, desk + size * end)
        top, odd = larger(top, x), plus(odd, where_below(x, high, zero, nan))
    return largest(top) + total(odd)


@njit
def hand(form, table, row, desk, factor):
    """Bring a row from the desk to where it belongs, times a factor."""
    size, S = memory.size(form), told(table, At.S)
    to, end = told(table, At.MADE) + size * row * S, S // WIDE * WIDE
    for c in range(0, end, WIDE):
        put(to + size * c, times(read(form, desk + size * c), splat(factor)))
    for c in range(end, S):
        put(to + size * c, read_one(form, desk + size * c) * factor)


@njit
def softmax_row(form, table, row, desk):
    """exp(s - top) over their sum; nothing where nothing is allowed."""
    size, S = memory.size(form), told(table, At.S)
    top = lay(form, table, row, desk)
    zero, one = memory.number(form, 0), memory.number(form, 1)
    if top == memory.number(form, -math.inf):
        for c in range(0, S, WIDE):
            put(desk + size * c, splat(zero))
        hand(form, table, row, desk, one)
        return
    sums = splat(zero)
    for c in range(0, S, WIDE):
        e = exp(minus(read(form, desk + size * c), splat(top)))
        put(desk + size * c, e)
        sums = plus(sums, e)
    hand(form, table, row, desk, one / total(sums))


@njit
def half_steps(form, desk, S, steps):
    """tau such that the [x - tau]_+ squared sum to one, by Newton's method on their norm from tau = -1."""
    size, zero, one = memory.size(form), memory.number(form, 0), memory.number(form, 1)
    tau = -one
    for _ in range(steps):
        falls, sums, at = splat(zero), splat(zero), splat(tau)
        for c in range(0, S, WIDE):
            r = larger(minus(read(form, desk + size * c), at), splat(zero))
            falls, sums = plus(falls, r), fma(r, r, sums)
        fall, sum_ = total(falls), total(sums)
        before, tau = tau, tau + (sum_ - memory.number(form, math.sqrt(sum_))) / fall
        if tau == before:
            break
    return tau


@njit
def whole_steps(form, desk, S, steps):
    """tau such that the [x - tau]_+ sum to one; a step goes as far as the keys read now would allow."""
    size, zero, one = memory.size(form), memory.number(form, 0), memory.number(form, 1)
    tau = -one
    for _ in range(steps):
        falls, sums, at = splat(zero), splat(zero), splat(tau)
        for c in range(0, S, WIDE):
            r = larger(minus(read(form, desk + size * c), at), splat(zero))
            falls, sums = plus(falls, where_below(splat(zero), r, splat(one), splat(zero))), plus(sums, r)
        fall, sum_ = total(falls), total(sums)
        before, tau = tau, tau + (sum_ - one) / fall
        if tau == before:
            break
    return tau


@njit
def entmax_row(form, table, row, desk):
    """[(alpha - 1)(s - top) - tau]_+ ^ (1 / (alpha - 1)) over their sum, alpha 1.5 or 2."""
    size, S = memory.size(form), told(table, At.S)
    top = lay(form, table, row, desk)
    zero, one = memory.number(form, 0), memory.number(form, 1)
    squares = told(table, At.TWICE) == 3
    by = memory.number(form, 0.5) if squares else one
    if top == memory.number(form, -math.inf) or top != top:
        for c in range(0, S, WIDE):
            put(desk + size * c, splat(zero if top == top else top))
        hand(form, table, row, desk, one)
        return
    for c in range(0, S, WIDE):
        put(desk + size * c, times(minus(read(form, desk + size * c), splat(top)), splat(by)))
    steps = told(table, At.STEPS)
    tau = half_steps(form, desk, S, steps) if squares else whole_steps(form, desk, S, steps)
    sums = splat(zero)
    for c in range(0, S, WIDE):
        r = larger(minus(read(form, desk + size * c), splat(tau)), splat(zero))
        if squares:
            r = times(r, r)
        put(desk + size * c, r)
        sums = plus(sums, r)
    hand(form, table, row, desk, one / total(sums))


@njit
def slope(form, w, squares):
    """w^(2 - alpha) over the keys that are read."""
    zero = splat(memory.number(form, 0))
    return root(w) if squares else where_below(zero, w, splat(memory.number(form, 1)), zero)


@njit
def back_row(form, table, row, desk):
    """slope (g - the mean of g by slopes)."""
    size, S = memory.size(form), told(table, At.S)
    zero, low = memory.number(form, 0), memory.number(form, 0.5)
    squares = told(table, At.TWICE) == 3
    end, g = S // WIDE * WIDE, told(table, At.GRAD) + size * row * S
    w, to = told(table, At.GIVEN) + size * row * S, told(table, At.MADE) + size * row * S
    put(desk, splat(zero))
    put(desk + size * WIDE, splat(zero))
    for c in range(end, S):
        put(desk + size * (c - end), read_one(form, w + size * c))
        put(desk + size * (WIDE + c - end), read_one(form, g + size * c))
    slopes = slope(form, read(form, desk), squares)
    sums = times(slopes, read(form, desk + size * WIDE))
    for c in range(0, end, WIDE):
        here = slope(form, read(form, w + size * c), squares)
        slopes, sums = plus(slopes, here), fma(here, read(form, g + size * c), sums)
    over = total(slopes)
    mean = splat(total(sums) / (over if over > low else low))
    for c in range(0, end, WIDE):
        here = slope(form, read(form, w + size * c), squares)
        put(to + size * c, times(here, minus(read(form, g + size * c), mean)))
    put(desk, times(slope(form, read(form, desk), squares), minus(read(form, desk + size * WIDE), mean)))
    for c in range(end, S):
        put(to + size * c, read_one(form, desk + size * (c - end)))


@njit
def over_rows(form, table, way):
    """Rows by the few."""
    desk = told(table, At.DESK) + told(table, At.DESK_SIZE) * take(table + 8 * At.THREAD)
    unit = take(table)
    while unit < told(table, At.UNITS):
        for row in range(unit * ROWS, min(unit * ROWS + ROWS, told(table, At.COUNT))):
            if way == 0:
                softmax_row(form, table, row, desk)
            elif way == 1:
                entmax_row(form, table, row, desk)
            else:
                back_row(form, table, row, desk)
        unit = take(table)


def _entry(way: int, kind: str, mark: int) -> Any:
    def entry(table):
        if mark:
            over_rows(memory.form(kind), table, way)

    return entry


WAYS = ("softmax", "entmax", "entmax back")
NUMBERS = {torch.float32: "float32", torch.float64: "float64"}
KERNELS = Kernels(
    {(name, dtype): _entry(way, kind, MARK) for way, name in enumerate(WAYS) for dtype, kind in NUMBERS.items()}
)
