"""Rows of scores as weights: softmax, and what all kernels of rows have alike.

A thread takes a few rows at a time and lays each on its desk, which fits the nearest cache, before it goes over it as
often as it has to.
"""

from __future__ import annotations

import math
from enum import IntEnum, auto

from numba import extending, njit

from . import memory
from .compiled import HEAD, NUMBERS, Units
from .lanes import WIDE, exp, larger, largest, minus, plus, splat, times, total, where_below
from .masks import allowed, marked
from .memory import put, read, read_one, told

ROWS = 8  # that a thread takes at a time


class At(IntEnum):
    """Where each number lies in what a kernel is told: an array of int64. Addresses count bytes, sizes numbers."""

    GIVEN = HEAD  # [B, H, T, S]: scores
    MADE = auto()  # forward weights, or what is read with them, [B, H, T, V]; backward the gradient of scores
    ALLOWED = auto()  # [1 or B, 1, 1 or T, S], a byte each; 0 where all are
    ALLOWED_ROW = auto()  # numbers to the next row of the batch, and to the next query
    ALLOWED_QUERY = auto()
    H = auto()
    T = auto()
    S = auto()
    COUNT = auto()  # rows in all
    KEYS = auto()  # 0, 1, 2 ..., an int32 for each key: from here on for entmax alone
    ALPHA = auto()  # [H]
    KEPT = auto()  # [B, H, T, 2]: how a row is formed again
    VALUES = auto()  # [B, G, S, V], V in whole vectors; 0 where weights themselves are asked for
    OF = auto()  # [H], int64: the value head that each head reads
    G = auto()
    V = auto()
    GRAD = auto()  # backward, of what was made
    D_VALUES = auto()
    D_ALPHA = auto()  # [B, H, T]


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


@extending.register_jitable
def softmax(form, table, unit, desk):
    """A few rows."""
    for row in range(unit * ROWS, min(unit * ROWS + ROWS, told(table, At.COUNT))):
        softmax_row(form, table, row, desk)


KERNELS = Units(NUMBERS, softmax=softmax)
