"""Rows of queries that read keys, each up to an end of its own: softmax in one pass, no score is kept (2205.14135).

A unit is up to `ROWS` queries of one key head, from anywhere. They lie side by side on the desk, keys one below the
other: so keys and values are read as they lie in memory, and a row's largest score, its sum and its end are numbers of
one vector each. What is read of the values stays on the desk until all keys were met.
"""

from __future__ import annotations

import math
from enum import IntEnum, auto

from numba import extending, njit

from . import memory
from .compiled import HEAD
from .lanes import WIDE, exp, larger, minus, plus, splat, times, where_below, wide
from .memory import put, read, read_one, told, whole
from .tiles import ROWS, SLACK, multiply

KEYS = 64  # that are compared before their values are read


class At(IntEnum):
    """Where each number lies in what a kernel is told: an array of int64. Addresses count bytes, sizes numbers."""

    TOLD = HEAD  # [units, 6], int64: row and key head, first line, lines, first key, key behind the last, part
    LINES = auto()  # int64: where the queries of each row and key head stand among all (b, t, h)
    ENDS = auto()  # [1 or B, T, 2], int64: the first key that a token reads and the one behind its last
    END_ROWS = auto()  # how many rows those have
    Q = auto()  # [B, T, H, dim]
    SCALE = auto()  # the number itself, in the first bytes of its place
    K = auto()
    V = auto()
    T = auto()
    H = auto()
    S = auto()
    GROUPS = auto()  # key heads
    DIM = auto()
    VDIM = auto()
    K_ROW = auto()  # bytes from one row, key and head to the next
    K_KEY = auto()
    K_HEAD = auto()
    V_ROW = auto()
    V_KEY = auto()
    V_HEAD = auto()
    OUT = auto()  # [B, T, H, vdim]
    LSE = auto()  # [B, T, H]
    GRAD = auto()  # [B, T, H, vdim]
    ALL = auto()  # B T H
    D_Q = auto()  # [parts, B, T, H, dim]
    D_K = auto()  # [B, GROUPS, S and slack, dim in whole vectors]
    D_V = auto()
    KEPT = auto()  # S and slack


ENDS = 5  # vectors of sixty-four at the head of a desk: first keys, ends, largest scores, sums, factors


def desk(dim: int, vdim: int) -> int:
    """How many numbers a thread writes on, backwards: forward it is less."""
    return ROWS * (ENDS + 1 + 2 * (dim + SLACK) + vdim + SLACK + 2 * (KEYS + SLACK) + wide(dim) + wide(vdim))


@njit
def lying(f, table, unit, desk):
    """Lay first keys and ends of the rows on the desk, none for those that are missing: the extremes of all, and the
    largest first key and the least end."""
    lines, count = told(table, At.LINES) + 8 * whole(unit + 8), whole(unit + 16)
    low, high, inner, outer = told(table, At.S), 0, 0, told(table, At.S)
    tokens = told(table, At.T) * told(table, At.END_ROWS)
    for r in range(ROWS):
        first = end = 0
        if r < count:
            token = whole(lines + 8 * r) // told(table, At.H) % tokens
            first, end = whole(told(table, At.ENDS) + 16 * token), whole(told(table, At.ENDS) + 16 * token + 8)
            low, high, inner, outer = min(low, first), max(high, end), max(inner, first), min(outer, end)
        put(desk + memory.size(f) * r, memory.number(f, first))
        put(desk + memory.size(f) * (ROWS + r), memory.number(f, end))
    return max(low, whole(unit + 24)), min(high, whole(unit + 32)), inner, outer


@njit
def turned(f, table, unit, source, dim, to):
    """Lay the rows of a unit side by side, zeros for those that are missing."""
    lines, count, size = told(table, At.LINES) + 8 * whole(unit + 8), whole(unit + 16), memory.size(f)
    for r in range(count):
        row = source + size * dim * whole(lines + 8 * r)
        for c in range(dim):
            put(to + size * (ROWS * c + r), read_one(f, row + size * c))
    for r in range(count, ROWS):
        for c in range(dim):
            put(to + size * (ROWS * c + r), memory.number(f, 0))


@njit
def scaled(f, to, rows, factor):
    """So many rows of sixty-four, times a number each column has."""
    step = memory.size(f) * WIDE
    for c in range(0, memory.size(f) * ROWS, step):
        share = read(f, factor + c)
        for n in range(rows):
            here = to + memory.size(f) * ROWS * n + c
            put(here, times(read(f, here), share))


@njit
def barred(f, scores, ends, start, count):
    """Scores of keys that a row may not read become -inf."""
    size, lowest = memory.size(f), splat(memory.number(f, -math.inf))
    for c in range(0, size * ROWS, size * WIDE):
        first, end = read(f, ends + c), read(f, ends + size * ROWS + c)
        for n in range(count):
            here, key = scores + size * ROWS * n + c, splat(memory.number(f, start + n))
            below = where_below(key, end, read(f, here), lowest)
            put(here, where_below(key, first, lowest, below))


@njit
def weigh(f, scores, ends, count):
    """Scores to shares of the largest so far, and by which factor what was read before shrinks."""
    size, lowest, zero = memory.size(f), splat(memory.number(f, -math.inf)), splat(memory.number(f, 0))
    step = size * ROWS
    for c in range(0, step, size * WIDE):
        old = read(f, ends + 2 * step + c)
        top = old
        for n in range(count):
            top = larger(top, read(f, scores + step * n + c))
        base = where_below(lowest, top, top, zero)  # where all are -inf, each share is e^-inf
        factor = exp(minus(old, base))
        sums = times(read(f, ends + 3 * step + c), factor)
        for n in range(count):
            e = exp(minus(read(f, scores + step * n + c), base))
            put(scores + step * n + c, e)
            sums = plus(sums, e)
        put(ends + 2 * step + c, top)
        put(ends + 3 * step + c, sums)
        put(ends + 4 * step + c, factor)


@njit
def compare(f, table, at, q, scores, span):
    """The products of neighbouring keys with all rows of a unit."""
    k, (start, count) = at, span
    step = memory.size(f) * ROWS
    a = k + told(table, At.K_KEY) * start, told(table, At.K_KEY), memory.size(f)
    multiply(f, (scores, step), a, (q, step), (count, ROWS, told(table, At.DIM)), False)


@njit
def delivered(f, table, unit, read_there, ends):
    """Write what the rows of a unit read, and the log-sum-exp of their scores; inf for those that read nothing."""
    lines, size, vdim = told(table, At.LINES) + 8 * whole(unit + 8), memory.size(f), told(table, At.VDIM)
    for r in range(whole(unit + 16)):
        line = whole(lines + 8 * r)
        top, sums = read_one(f, ends + size * (2 * ROWS + r)), read_one(f, ends + size * (3 * ROWS + r))
        share = memory.number(f, 1 / sums if sums != 0 else 0.0)
        lse = memory.number(f, top + math.log(sums) if sums != 0 else math.inf)
        put(told(table, At.LSE) + size * line, lse)
        for c in range(vdim):
            here = told(table, At.OUT) + size * (line * vdim + c)
            put(here, memory.number(f, read_one(f, read_there + size * (ROWS * c + r)) * share))


@njit
def cleared(f, to, count):
    """So many zeros, in whole vectors."""
    for n in range(0, count, WIDE):
        put(to + memory.size(f) * n, splat(memory.number(f, 0)))


@extending.register_jitable
def forward(f, table, number, desk):
    """All keys that the rows of a unit read, some at a time."""
    unit = told(table, At.TOLD) + 48 * number
    size, dim, vdim, groups = memory.size(f), told(table, At.DIM), told(table, At.VDIM), told(table, At.GROUPS)
    step, own, each = size * ROWS, whole(unit) // groups, whole(unit) % groups
    q = desk + step * ENDS
    scores = q + step * (dim + SLACK)
    sums = scores + step * KEYS
    k = told(table, At.K) + own * told(table, At.K_ROW) + each * told(table, At.K_HEAD)
    v = told(table, At.V) + own * told(table, At.V_ROW) + each * told(table, At.V_HEAD)
    start, stop, inner, outer = lying(f, table, unit, desk)
    turned(f, table, unit, told(table, At.Q), dim, q)
    cleared(f, desk + 2 * step, 3 * ROWS)
    for c in range(0, step, size * WIDE):
        put(desk + 2 * step + c, splat(memory.number(f, -math.inf)))
        put(desk + 4 * step + c, splat(memory.number(f, read_one(f, table + 8 * At.SCALE))))
    scaled(f, q, dim, desk + 4 * step)
    cleared(f, sums, (vdim + SLACK) * ROWS)
    while start < stop:
        count = min(KEYS, stop - start)
        compare(f, table, k, q, scores, (start, count))
        if start < inner or start + count > outer:
            barred(f, scores, desk, start, count)
        weigh(f, scores, desk, count)
        scaled(f, sums, vdim, desk + 4 * step)
        values = v + told(table, At.V_KEY) * start, size, told(table, At.V_KEY)
        multiply(f, (sums, step), values, (scores, step), (vdim, ROWS, count), True)
        start += count
    delivered(f, table, unit, sums, desk)
