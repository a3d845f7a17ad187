"""Products of small matrices that lie somewhere in memory: what kernels of attention are made of.

A tile is up to `ROWS` columns wide, which lie side by side; its rows are added up four at a time, so that sixteen sums
stay in registers while one vector of each step is read. What multiplies it may lie at any distances: it is read number
by number.
"""

from __future__ import annotations

from numba import njit

from . import memory
from .lanes import WIDE, fma, splat
from .memory import put, read, read_one

ROWS = 4 * WIDE  # rows of queries whose numbers lie side by side
SLACK = 3  # rows that may be written behind the last: sums are formed for four rows, be there so many or not


@njit
def four(f, address):
    """Sixty-four numbers."""
    step = memory.size(f) * WIDE
    return read(f, address), read(f, address + step), read(f, address + 2 * step), read(f, address + 3 * step)


@njit
def nothing(f):
    """Sixty-four zeros."""
    zero = splat(memory.number(f, 0))
    return zero, zero, zero, zero


@njit
def added(x, share, a):
    """What was summed up so far, and so much of x."""
    p = splat(share)
    return fma(x[0], p, a[0]), fma(x[1], p, a[1]), fma(x[2], p, a[2]), fma(x[3], p, a[3])


@njit
def kept(f, to, a):
    """Write sixty-four numbers."""
    step = memory.size(f) * WIDE
    put(to, a[0])
    put(to + step, a[1])
    put(to + 2 * step, a[2])
    put(to + 3 * step, a[3])


@njit
def four_rows(f, to, a, b, depth, more):
    """Four rows of sixty-four: sums over so many steps of a's number for the row times b's vectors."""
    (to, step), (a0, a1, a2, a3, on), (b, ahead) = to, a, b
    r0 = r1 = r2 = r3 = nothing(f)
    if more:
        r0, r1, r2, r3 = four(f, to), four(f, to + step), four(f, to + 2 * step), four(f, to + 3 * step)
    for n in range(depth):
        x, at = four(f, b + ahead * n), on * n
        r0, r1 = added(x, read_one(f, a0 + at), r0), added(x, read_one(f, a1 + at), r1)
        r2, r3 = added(x, read_one(f, a2 + at), r2), added(x, read_one(f, a3 + at), r3)
    kept(f, to, r0)
    kept(f, to + step, r1)
    kept(f, to + 2 * step, r2)
    kept(f, to + 3 * step, r3)


@njit
def narrow_rows(f, to, a, b, depth, more):
    """Four rows of sixteen, in the same way."""
    (to, step), (a0, a1, a2, a3, on), (b, ahead) = to, a, b
    r0 = r1 = r2 = r3 = splat(memory.number(f, 0))
    if more:
        r0, r1, r2, r3 = read(f, to), read(f, to + step), read(f, to + 2 * step), read(f, to + 3 * step)
    for n in range(depth):
        x, at = read(f, b + ahead * n), on * n
        r0, r1 = fma(x, splat(read_one(f, a0 + at)), r0), fma(x, splat(read_one(f, a1 + at)), r1)
        r2, r3 = fma(x, splat(read_one(f, a2 + at)), r2), fma(x, splat(read_one(f, a3 + at)), r3)
    put(to, r0)
    put(to + step, r1)
    put(to + 2 * step, r2)
    put(to + 3 * step, r3)


@njit
def all_columns(f, to, a, b, shape, more):
    """Four rows of any width."""
    (to, step), (b, ahead), (wide, depth), size = to, b, shape, memory.size(f)
    full = wide // ROWS * ROWS
    for c in range(0, full * size, ROWS * size):
        four_rows(f, (to + c, step), a, (b + c, ahead), depth, more)
    for c in range(full * size, wide * size, WIDE * size):
        narrow_rows(f, (to + c, step), a, (b + c, ahead), depth, more)


@njit
def multiply(f, to, a, b, shape, more):
    """Rows of a, that lie so far apart and whose steps do, times the rows of b: written, or added to what there is.

    `to` and `b` are an address and the bytes to the next row, a an address, the bytes to the next row and those to the
    next step; `shape` is rows, columns in whole vectors, and steps. Up to three rows too many are written.
    """
    (to, step), (a, apart, on), (rows, wide, depth) = to, a, shape
    for m in range(0, rows, 4):
        left = rows - m - 1  # beyond the last row the last is read once more
        first = a + apart * m
        of = (first, first + apart * min(1, left), first + apart * min(2, left), first + apart * min(3, left), on)
        all_columns(f, (to + step * m, step), of, b, (wide, depth), more)
