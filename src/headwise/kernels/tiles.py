"""Products of small matrices that lie somewhere in memory: what kernels of attention are made of.

A tile is up to `ROWS` columns wide, which lie side by side; its rows are added up four at a time, so that sixteen sums
stay in registers while one vector of each step is read. What multiplies it may lie at any distances: it is read number
by number.
"""

from __future__ import annotations

from numba import njit

from . import memory
from .lanes import SIMD_WIDTH, fma, splat
from .memory import store_value, load_vector, load_scalar

QUERY_TILE_ROWS = 4 * SIMD_WIDTH  # rows of queries whose numbers lie side by side
GEMM_ROW_PADDING = 3  # rows that may be written behind the last: sums are formed for four rows, be there so many or not


@njit
def load_64(f, address):
    """Sixty-four numbers."""
    step = memory.compute_itemsize(f) * SIMD_WIDTH
    return load_vector(f, address), load_vector(f, address + step), load_vector(f, address + 2 * step), load_vector(f, address + 3 * step)


@njit
def zeros_64(f):
    """Sixty-four zeros."""
    zero = splat(memory.as_compute_scalar(f, 0))
    return zero, zero, zero, zero


@njit
def axpy_64(x, share, a):
    """What was summed up so far, and so much of x."""
    p = splat(share)
    return fma(x[0], p, a[0]), fma(x[1], p, a[1]), fma(x[2], p, a[2]), fma(x[3], p, a[3])


@njit
def store_64(f, to, a):
    """Write sixty-four numbers."""
    step = memory.compute_itemsize(f) * SIMD_WIDTH
    store_value(to, a[0])
    store_value(to + step, a[1])
    store_value(to + 2 * step, a[2])
    store_value(to + 3 * step, a[3])


@njit
def gemm_4x64(f, to, a, b, depth, more):
    """Four rows of sixty-four: sums over so many steps of a's number for the row times b's vectors."""
    (to, step), (a0, a1, a2, a3, on), (b, ahead) = to, a, b
    r0 = r1 = r2 = r3 = zeros_64(f)
    if more:
        r0, r1, r2, r3 = load_64(f, to), load_64(f, to + step), load_64(f, to + 2 * step), load_64(f, to + 3 * step)
    for n in range(depth):
        x, at = load_64(f, b + ahead * n), on * n
        r0, r1 = axpy_64(x, load_scalar(f, a0 + at), r0), axpy_64(x, load_scalar(f, a1 + at), r1)
        r2, r3 = axpy_64(x, load_scalar(f, a2 + at), r2), axpy_64(x, load_scalar(f, a3 + at), r3)
    store_64(f, to, r0)
    store_64(f, to + step, r1)
    store_64(f, to + 2 * step, r2)
    store_64(f, to + 3 * step, r3)


@njit
def gemm_4x16(f, to, a, b, depth, more):
    """Four rows of sixteen, in the same way."""
    (to, step), (a0, a1, a2, a3, on), (b, ahead) = to, a, b
    r0 = r1 = r2 = r3 = splat(memory.as_compute_scalar(f, 0))
    if more:
        r0, r1, r2, r3 = load_vector(f, to), load_vector(f, to + step), load_vector(f, to + 2 * step), load_vector(f, to + 3 * step)
    for n in range(depth):
        x, at = load_vector(f, b + ahead * n), on * n
        r0, r1 = fma(x, splat(load_scalar(f, a0 + at)), r0), fma(x, splat(load_scalar(f, a1 + at)), r1)
        r2, r3 = fma(x, splat(load_scalar(f, a2 + at)), r2), fma(x, splat(load_scalar(f, a3 + at)), r3)
    store_value(to, r0)
    store_value(to + step, r1)
    store_value(to + 2 * step, r2)
    store_value(to + 3 * step, r3)


@njit
def gemm_4_rows(f, to, a, b, shape, more):
    """Four rows of any width."""
    (to, step), (b, ahead), (wide, depth), size = to, b, shape, memory.compute_itemsize(f)
    full = wide // QUERY_TILE_ROWS * QUERY_TILE_ROWS
    for c in range(0, full * size, QUERY_TILE_ROWS * size):
        gemm_4x64(f, (to + c, step), a, (b + c, ahead), depth, more)
    for c in range(full * size, wide * size, SIMD_WIDTH * size):
        gemm_4x16(f, (to + c, step), a, (b + c, ahead), depth, more)


@njit
def gemm(f, to, a, b, shape, more):
    """Rows of a, that lie so far apart and whose steps do, times the rows of b: written, or added to what there is.

    `to` and `b` are an address and the bytes to the next row, a an address, the bytes to the next row and those to the
    next step; `shape` is rows, columns in whole vectors, and steps. Up to three rows too many are written.
    """
    (to, step), (a, apart, on), (rows, wide, depth) = to, a, shape
    for m in range(0, rows, 4):
        left = rows - m - 1  # beyond the last row the last is read once more
        first = a + apart * m
        of = (first, first + apart * min(1, left), first + apart * min(2, left), first + apart * min(3, left), on)
        gemm_4_rows(f, (to + step * m, step), of, b, (wide, depth), more)
