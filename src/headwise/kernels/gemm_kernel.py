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

from . import simd
from .launch import SIMD_WIDTH
from .simd import fma, load_scalar, load_vector, splat, store_value

TILE_COLUMNS = 4 * SIMD_WIDTH


@njit
def load_64(dtype, address):
    """Load 64 adjacent elements as four vectors."""
    step = simd.compute_itemsize(dtype) * SIMD_WIDTH
    return (
        load_vector(dtype, address),
        load_vector(dtype, address + step),
        load_vector(dtype, address + 2 * step),
        load_vector(dtype, address + 3 * step),
    )


@njit
def zeros_64(dtype):
    """Return four vectors of zeros."""
    zero = splat(simd.as_compute_scalar(dtype, 0))
    return zero, zero, zero, zero


@njit
def axpy_64(x, factor, a):
    """Return a + factor * x for 64 elements."""
    factors = splat(factor)
    return (
        fma(x[0], factors, a[0]),
        fma(x[1], factors, a[1]),
        fma(x[2], factors, a[2]),
        fma(x[3], factors, a[3]),
    )


@njit
def store_64(dtype, to, a):
    """Store 64 adjacent elements."""
    step = simd.compute_itemsize(dtype) * SIMD_WIDTH
    store_value(to, a[0])
    store_value(to + step, a[1])
    store_value(to + 2 * step, a[2])
    store_value(to + 3 * step, a[3])


@njit
def gemm_4x64(dtype, to, a, b, depth, accumulate):
    """Compute a tile of 4 rows and 64 columns over `depth` steps; add to the stored values if
    `accumulate`.
    """
    (to0, to1, to2, to3) = to
    (a0, a1, a2, a3, a_step) = a
    (b, b_stride) = b
    r0 = r1 = r2 = r3 = zeros_64(dtype)
    if accumulate:
        r0 = load_64(dtype, to0)
        r1 = load_64(dtype, to1)
        r2 = load_64(dtype, to2)
        r3 = load_64(dtype, to3)
    for n in range(depth):
        x = load_64(dtype, b + b_stride * n)
        offset = a_step * n
        r0 = axpy_64(x, load_scalar(dtype, a0 + offset), r0)
        r1 = axpy_64(x, load_scalar(dtype, a1 + offset), r1)
        r2 = axpy_64(x, load_scalar(dtype, a2 + offset), r2)
        r3 = axpy_64(x, load_scalar(dtype, a3 + offset), r3)
    store_64(dtype, to0, r0)
    store_64(dtype, to1, r1)
    store_64(dtype, to2, r2)
    store_64(dtype, to3, r3)


@njit
def gemm_4x16(dtype, to, a, b, depth, accumulate):
    """Compute a tile of 4 rows and 16 columns over `depth` steps; add to the stored values if
    `accumulate`.
    """
    (to0, to1, to2, to3) = to
    (a0, a1, a2, a3, a_step) = a
    (b, b_stride) = b
    r0 = r1 = r2 = r3 = splat(simd.as_compute_scalar(dtype, 0))
    if accumulate:
        r0 = load_vector(dtype, to0)
        r1 = load_vector(dtype, to1)
        r2 = load_vector(dtype, to2)
        r3 = load_vector(dtype, to3)
    for n in range(depth):
        x = load_vector(dtype, b + b_stride * n)
        offset = a_step * n
        r0 = fma(x, splat(load_scalar(dtype, a0 + offset)), r0)
        r1 = fma(x, splat(load_scalar(dtype, a1 + offset)), r1)
        r2 = fma(x, splat(load_scalar(dtype, a2 + offset)), r2)
        r3 = fma(x, splat(load_scalar(dtype, a3 + offset)), r3)
    store_value(to0, r0)
    store_value(to1, r1)
    store_value(to2, r2)
    store_value(to3, r3)


@njit
def four_rows(address, stride, last_row):
    """Return the addresses of four rows; those after the last row repeat it."""
    return (
        address,
        address + stride * min(1, last_row),
        address + stride * min(2, last_row),
        address + stride * min(3, last_row),
    )


@njit
def gemm(dtype, to, a, b, shape, accumulate):
    """Compute to = a b, or add it to `to` if `accumulate` is set.

    `to` and `b` are pairs (address, bytes to the next row); `a` is (address, bytes to the next row,
    bytes to the next step). `shape` is (rows, columns, steps); whole vectors of columns are read
    and written.
    """
    (to, to_stride) = to
    (a, a_stride, a_step) = a
    (b, b_stride) = b
    (rows, columns, depth) = shape
    size = simd.compute_itemsize(dtype)
    full_columns = columns // TILE_COLUMNS * TILE_COLUMNS
    for m in range(0, rows, 4):
        t0, t1, t2, t3 = four_rows(to + to_stride * m, to_stride, rows - m - 1)
        a0, a1, a2, a3 = four_rows(a + a_stride * m, a_stride, rows - m - 1)
        a_rows = a0, a1, a2, a3, a_step
        for c in range(0, full_columns * size, TILE_COLUMNS * size):
            gemm_4x64(
                dtype,
                (t0 + c, t1 + c, t2 + c, t3 + c),
                a_rows,
                (b + c, b_stride),
                depth,
                accumulate,
            )
        for c in range(full_columns * size, columns * size, SIMD_WIDTH * size):
            gemm_4x16(
                dtype,
                (t0 + c, t1 + c, t2 + c, t3 + c),
                a_rows,
                (b + c, b_stride),
                depth,
                accumulate,
            )
