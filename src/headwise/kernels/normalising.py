"""Rows of scores as weights: softmax, and what all kernels of rows have alike.

A thread takes a few rows at a time and lays each on its desk, which fits the nearest cache, before it goes over it as
often as it has to.
"""

from __future__ import annotations

import math
from enum import IntEnum, auto

from numba import extending, njit

from . import memory
from .compiled import FIRST_KERNEL_ARG, COMPUTE_DTYPES, ParallelKernelSet
from .lanes import SIMD_WIDTH, vec_exp, vec_max, reduce_max, vec_sub, vec_add, splat, vec_mul, reduce_sum, select_below
from .masks import load_masked, is_byte_set
from .memory import store_value, load_vector, load_scalar, load_arg

ROWS_PER_ITEM = 8  # that a thread takes at a time


class RowNormaliserArgs(IntEnum):
    """Where each number lies in what a kernel is told: an array of int64. Addresses count bytes, sizes numbers."""

    SCORES = FIRST_KERNEL_ARG  # [B, H, T, S]: scores
    OUTPUT = auto()  # forward weights, or what is read with them, [B, H, T, V]; backward the gradient of scores
    MASK = auto()  # [1 or B, 1, 1 or T, S], a byte each; 0 where all are
    MASK_ROW_STRIDE = auto()  # numbers to the next row of the batch, and to the next query
    MASK_QUERY_STRIDE = auto()
    H = auto()
    T = auto()
    S = auto()
    NUM_ROWS = auto()  # rows in all
    KEY_INDICES = auto()  # 0, 1, 2 ..., an int32 for each key: from here on for entmax alone
    ALPHA = auto()  # [H]
    ROW_STATE = auto()  # [B, H, T, 2]: how a row is formed again
    VALUES = auto()  # [B, G, S, V], V in whole vectors; 0 where weights themselves are asked for
    VALUE_HEAD_OF_HEAD = auto()  # [H], int64: the value head that each head reads
    G = auto()
    V = auto()
    GRAD = auto()  # backward, of what was made
    D_VALUES = auto()
    D_ALPHA = auto()  # [B, H, T]


@njit
def load_row(form, table, row, desk):
    """Lay the scores of a row on the desk, -inf where none is allowed and behind the end; the largest, or NaN."""
    size, S, T = memory.compute_itemsize(form), load_arg(table, RowNormaliserArgs.S), load_arg(table, RowNormaliserArgs.T)
    low = memory.as_compute_scalar(form, -math.inf)
    high, zero = splat(memory.as_compute_scalar(form, math.inf)), splat(memory.as_compute_scalar(form, 0))
    odd, nan = zero, splat(memory.as_compute_scalar(form, math.nan))
    source, top, end = load_arg(table, RowNormaliserArgs.SCORES) + size * row * S, splat(low), S // SIMD_WIDTH * SIMD_WIDTH
    seen = load_arg(table, RowNormaliserArgs.MASK)
    if seen:
        batch = row // (load_arg(table, RowNormaliserArgs.H) * T)
        seen += batch * load_arg(table, RowNormaliserArgs.MASK_ROW_STRIDE) + row % T * load_arg(table, RowNormaliserArgs.MASK_QUERY_STRIDE)
    for c in range(0, end, SIMD_WIDTH):
        x = load_vector(form, source + size * c)
        if seen:
            x = load_masked(form, seen + c, x, splat(low))
        store_value(desk + size * c, x)
        top, odd = vec_max(top, x), vec_add(odd, select_below(x, high, zero, nan))
    if end < S:
        store_value(desk + size * end, splat(low))
        for c in range(end, S):
            if seen == 0 or is_byte_set(seen + c):
                store_value(desk + size * c, load_scalar(form, source + size * c))
        x = load_vector(form, desk + size * end)
        top, odd = vec_max(top, x), vec_add(odd, select_below(x, high, zero, nan))
    return reduce_max(top) + reduce_sum(odd)


@njit
def store_row_scaled(form, table, row, desk, factor):
    """Bring a row from the desk to where it belongs, times a factor."""
    size, S = memory.compute_itemsize(form), load_arg(table, RowNormaliserArgs.S)
    to, end = load_arg(table, RowNormaliserArgs.OUTPUT) + size * row * S, S // SIMD_WIDTH * SIMD_WIDTH
    for c in range(0, end, SIMD_WIDTH):
        store_value(to + size * c, vec_mul(load_vector(form, desk + size * c), splat(factor)))
    for c in range(end, S):
        store_value(to + size * c, load_scalar(form, desk + size * c) * factor)


@njit
def softmax_of_row(form, table, row, desk):
    """exp(s - top) over their sum; nothing where nothing is allowed."""
    size, S = memory.compute_itemsize(form), load_arg(table, RowNormaliserArgs.S)
    top = load_row(form, table, row, desk)
    zero, one = memory.as_compute_scalar(form, 0), memory.as_compute_scalar(form, 1)
    if top == memory.as_compute_scalar(form, -math.inf):
        for c in range(0, S, SIMD_WIDTH):
            store_value(desk + size * c, splat(zero))
        store_row_scaled(form, table, row, desk, one)
        return
    sums = splat(zero)
    for c in range(0, S, SIMD_WIDTH):
        e = vec_exp(vec_sub(load_vector(form, desk + size * c), splat(top)))
        store_value(desk + size * c, e)
        sums = vec_add(sums, e)
    store_row_scaled(form, table, row, desk, one / reduce_sum(sums))


@extending.register_jitable
def softmax_kernel(form, table, unit, desk):
    """A few rows."""
    for row in range(unit * ROWS_PER_ITEM, min(unit * ROWS_PER_ITEM + ROWS_PER_ITEM, load_arg(table, RowNormaliserArgs.NUM_ROWS))):
        softmax_of_row(form, table, row, desk)


SOFTMAX_KERNELS = ParallelKernelSet(COMPUTE_DTYPES, softmax=softmax_kernel)
