"""Matrix products within kernels: the one micro-kernel that all of them use.

    C[m, n] = sum_i A[m, i] B[i, n]  (+ C[m, n])

In plain PyTorch `torch.mm(a, b, out=c)`, or `c.addmm_(a, b)`. A is read element by element and may
have any strides; B and C have rows of adjacent elements.

Loop order: four rows of C at a time, tiles of 64 columns, then of 16, then i. The 16 vector sums of
a tile stay in registers. Every element of C is summed in the order of i, whatever the tile. If
fewer than four rows are left, the last one is computed several times and stored at one place, so
that no other row is written.
"""

from __future__ import annotations

from numba import njit

from .launch import SIMD_WIDTH
from .simd import fma, splat, vec

TILE_COLUMNS = 4 * SIMD_WIDTH


@njit
def load_64(p):
    """Return 64 numbers as four vectors."""
    return vec(p, 0), vec(p, SIMD_WIDTH), vec(p, 2 * SIMD_WIDTH), vec(p, 3 * SIMD_WIDTH)


@njit
def axpy_64(x, factor, a):
    """Return a + factor x."""
    return (
        fma(x[0], factor, a[0]),
        fma(x[1], factor, a[1]),
        fma(x[2], factor, a[2]),
        fma(x[3], factor, a[3]),
    )


@njit
def store_64(to, a):
    """Store four vectors."""
    to[0] = a[0]
    to[SIMD_WIDTH] = a[1]
    to[2 * SIMD_WIDTH] = a[2]
    to[3 * SIMD_WIDTH] = a[3]


@njit
def gemm_4x64(to, a, b, depth, accumulate):
    """Compute four rows of 64 columns: to = a b, or to += a b."""
    a0, a1, a2, a3, a_step = a
    b, b_stride = b
    zero = splat(b, 0)
    r0 = r1 = r2 = r3 = (zero, zero, zero, zero)
    if accumulate:
        r0 = load_64(to[0])
        r1 = load_64(to[1])
        r2 = load_64(to[2])
        r3 = load_64(to[3])
    for n in range(depth):
        x = load_64(b + b_stride * n)
        offset = a_step * n
        r0 = axpy_64(x, a0[offset], r0)
        r1 = axpy_64(x, a1[offset], r1)
        r2 = axpy_64(x, a2[offset], r2)
        r3 = axpy_64(x, a3[offset], r3)
    store_64(to[0], r0)
    store_64(to[1], r1)
    store_64(to[2], r2)
    store_64(to[3], r3)


@njit
def gemm_4x16(to, a, b, depth, accumulate):
    """Compute four rows of 16 columns, as `gemm_4x64`."""
    a0, a1, a2, a3, a_step = a
    b, b_stride = b
    r0 = r1 = r2 = r3 = splat(b, 0)
    if accumulate:
        r0 = vec(to[0], 0)
        r1 = vec(to[1], 0)
        r2 = vec(to[2], 0)
        r3 = vec(to[3], 0)
    for n in range(depth):
        x = vec(b, b_stride * n)
        offset = a_step * n
        r0 = fma(x, a0[offset], r0)
        r1 = fma(x, a1[offset], r1)
        r2 = fma(x, a2[offset], r2)
        r3 = fma(x, a3[offset], r3)
    to[0][0] = r0
    to[1][0] = r1
    to[2][0] = r2
    to[3][0] = r3


@njit
def four_rows(p, stride, last_row):
    """Return pointers to four rows; the last row stands for missing ones."""
    return (
        p,
        p + stride * min(1, last_row),
        p + stride * min(2, last_row),
        p + stride * min(3, last_row),
    )


@njit
def gemm(to, a, b, shape, accumulate):
    """Compute to = a b, or to += a b, for shape (rows, columns, depth); columns are whole vectors.

    `to` and `b` are a pointer and the distance of rows, `a` also has the distance of its columns.
    """
    to, to_stride = to
    a, a_stride, a_step = a
    b, b_stride = b
    rows, columns, depth = shape
    full_columns = columns // TILE_COLUMNS * TILE_COLUMNS
    for m in range(0, rows, 4):
        t0, t1, t2, t3 = four_rows(to + to_stride * m, to_stride, rows - m - 1)
        a0, a1, a2, a3 = four_rows(a + a_stride * m, a_stride, rows - m - 1)
        a_rows = a0, a1, a2, a3, a_step
        for c in range(0, full_columns, TILE_COLUMNS):
            gemm_4x64(
                (t0 + c, t1 + c, t2 + c, t3 + c), a_rows, (b + c, b_stride), depth, accumulate
            )
        for c in range(full_columns, columns, SIMD_WIDTH):
            gemm_4x16(
                (t0 + c, t1 + c, t2 + c, t3 + c), a_rows, (b + c, b_stride), depth, accumulate
            )
