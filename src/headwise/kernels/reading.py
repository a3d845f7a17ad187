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
from .compiled import FIRST_KERNEL_ARG
from .lanes import SIMD_WIDTH, vec_exp, vec_max, vec_sub, vec_add, splat, vec_mul, select_below, round_up_to_simd
from .memory import store_value, load_vector, load_scalar, load_arg, load_int64
from .tiles import QUERY_TILE_ROWS, GEMM_ROW_PADDING, gemm

FLASH_KEY_BLOCK_SIZE = 64  # that are compared before their values are read


class FlashAttentionArgs(IntEnum):
    """Where each number lies in what a kernel is told: an array of int64. Addresses count bytes, sizes numbers."""

    WORK_ITEMS = FIRST_KERNEL_ARG  # [units, 6], int64: row and key head, first line, lines, first key, key behind the last, part
    QUERY_ROWS = auto()  # int64: where the queries of each row and key head stand among all (b, t, h)
    KEY_RANGES = auto()  # [1 or B, T, 2], int64: the first key that a token reads and the one behind its last
    NUM_KEY_RANGE_ROWS = auto()  # how many rows those have
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
    K_ROW_STRIDE = auto()  # bytes from one row, key and head to the next
    K_KEY_STRIDE = auto()
    K_HEAD_STRIDE = auto()
    V_ROW_STRIDE = auto()
    V_KEY_STRIDE = auto()
    V_HEAD_STRIDE = auto()
    OUT = auto()  # [B, T, H, vdim]
    LSE = auto()  # [B, T, H]
    GRAD = auto()  # [B, T, H, vdim]
    NUM_QUERY_ROWS = auto()  # B T H
    D_Q = auto()  # [parts, B, T, H, dim]
    D_K = auto()  # [B, GROUPS, S and slack, dim in whole vectors]
    D_V = auto()
    PADDED_KEYS = auto()  # S and slack


NUM_ROW_STATE_VECTORS = 5  # vectors of sixty-four at the head of a desk: first keys, ends, largest scores, sums, factors


def flash_scratch_size(dim: int, vdim: int) -> int:
    """How many numbers a thread writes on, backwards: forward it is less."""
    return QUERY_TILE_ROWS * (NUM_ROW_STATE_VECTORS + 1 + 2 * (dim + GEMM_ROW_PADDING) + vdim + GEMM_ROW_PADDING + 2 * (FLASH_KEY_BLOCK_SIZE + GEMM_ROW_PADDING) + round_up_to_simd(dim) + round_up_to_simd(vdim))


@njit
def load_key_ranges(f, table, unit, desk):
    """Lay first keys and ends of the rows on the desk, none for those that are missing: the extremes of all, and the
    largest first key and the least end."""
    lines, count = load_arg(table, FlashAttentionArgs.QUERY_ROWS) + 8 * load_int64(unit + 8), load_int64(unit + 16)
    low, high, inner, outer = load_arg(table, FlashAttentionArgs.S), 0, 0, load_arg(table, FlashAttentionArgs.S)
    tokens = load_arg(table, FlashAttentionArgs.T) * load_arg(table, FlashAttentionArgs.NUM_KEY_RANGE_ROWS)
    for r in range(QUERY_TILE_ROWS):
        first = end = 0
        if r < count:
            token = load_int64(lines + 8 * r) // load_arg(table, FlashAttentionArgs.H) % tokens
            first, end = load_int64(load_arg(table, FlashAttentionArgs.KEY_RANGES) + 16 * token), load_int64(load_arg(table, FlashAttentionArgs.KEY_RANGES) + 16 * token + 8)
            low, high, inner, outer = min(low, first), max(high, end), max(inner, first), min(outer, end)
        store_value(desk + memory.compute_itemsize(f) * r, memory.as_compute_scalar(f, first))
        store_value(desk + memory.compute_itemsize(f) * (QUERY_TILE_ROWS + r), memory.as_compute_scalar(f, end))
    return max(low, load_int64(unit + 24)), min(high, load_int64(unit + 32)), inner, outer


@njit
def load_rows_transposed(f, table, unit, source, dim, to):
    """Lay the rows of a unit side by side, zeros for those that are missing."""
    lines, count, size = load_arg(table, FlashAttentionArgs.QUERY_ROWS) + 8 * load_int64(unit + 8), load_int64(unit + 16), memory.compute_itemsize(f)
    for r in range(count):
        row = source + size * dim * load_int64(lines + 8 * r)
        for c in range(dim):
            store_value(to + size * (QUERY_TILE_ROWS * c + r), load_scalar(f, row + size * c))
    for r in range(count, QUERY_TILE_ROWS):
        for c in range(dim):
            store_value(to + size * (QUERY_TILE_ROWS * c + r), memory.as_compute_scalar(f, 0))


@njit
def scale_columns(f, to, rows, factor):
    """So many rows of sixty-four, times a number each column has."""
    step = memory.compute_itemsize(f) * SIMD_WIDTH
    for c in range(0, memory.compute_itemsize(f) * QUERY_TILE_ROWS, step):
        share = load_vector(f, factor + c)
        for n in range(rows):
            here = to + memory.compute_itemsize(f) * QUERY_TILE_ROWS * n + c
            store_value(here, vec_mul(load_vector(f, here), share))


@njit
def mask_scores(f, scores, ends, start, count):
    """Scores of keys that a row may not read become -inf."""
    size, lowest = memory.compute_itemsize(f), splat(memory.as_compute_scalar(f, -math.inf))
    for c in range(0, size * QUERY_TILE_ROWS, size * SIMD_WIDTH):
        first, end = load_vector(f, ends + c), load_vector(f, ends + size * QUERY_TILE_ROWS + c)
        for n in range(count):
            here, key = scores + size * QUERY_TILE_ROWS * n + c, splat(memory.as_compute_scalar(f, start + n))
            below = select_below(key, end, load_vector(f, here), lowest)
            store_value(here, select_below(key, first, lowest, below))


@njit
def online_softmax(f, scores, ends, count):
    """Scores to shares of the largest so far, and by which factor what was read before shrinks."""
    size, lowest, zero = memory.compute_itemsize(f), splat(memory.as_compute_scalar(f, -math.inf)), splat(memory.as_compute_scalar(f, 0))
    step = size * QUERY_TILE_ROWS
    for c in range(0, step, size * SIMD_WIDTH):
        old = load_vector(f, ends + 2 * step + c)
        top = old
        for n in range(count):
            top = vec_max(top, load_vector(f, scores + step * n + c))
        base = select_below(lowest, top, top, zero)  # where all are -inf, each share is e^-inf
        factor = vec_exp(vec_sub(old, base))
        sums = vec_mul(load_vector(f, ends + 3 * step + c), factor)
        for n in range(count):
            e = vec_exp(vec_sub(load_vector(f, scores + step * n + c), base))
            store_value(scores + step * n + c, e)
            sums = vec_add(sums, e)
        store_value(ends + 2 * step + c, top)
        store_value(ends + 3 * step + c, sums)
        store_value(ends + 4 * step + c, factor)


@njit
def qk_tile(f, table, at, q, scores, span):
    """The products of neighbouring keys with all rows of a unit."""
    k, (start, count) = at, span
    step = memory.compute_itemsize(f) * QUERY_TILE_ROWS
    a = k + load_arg(table, FlashAttentionArgs.K_KEY_STRIDE) * start, load_arg(table, FlashAttentionArgs.K_KEY_STRIDE), memory.compute_itemsize(f)
    gemm(f, (scores, step), a, (q, step), (count, QUERY_TILE_ROWS, load_arg(table, FlashAttentionArgs.DIM)), False)


@njit
def store_output_and_lse(f, table, unit, read_there, ends):
    """Write what the rows of a unit read, and the log-sum-exp of their scores; inf for those that read nothing."""
    lines, size, vdim = load_arg(table, FlashAttentionArgs.QUERY_ROWS) + 8 * load_int64(unit + 8), memory.compute_itemsize(f), load_arg(table, FlashAttentionArgs.VDIM)
    for r in range(load_int64(unit + 16)):
        line = load_int64(lines + 8 * r)
        top, sums = load_scalar(f, ends + size * (2 * QUERY_TILE_ROWS + r)), load_scalar(f, ends + size * (3 * QUERY_TILE_ROWS + r))
        share = memory.as_compute_scalar(f, 1 / sums if sums != 0 else 0.0)
        lse = memory.as_compute_scalar(f, top + math.log(sums) if sums != 0 else math.inf)
        store_value(load_arg(table, FlashAttentionArgs.LSE) + size * line, lse)
        for c in range(vdim):
            here = load_arg(table, FlashAttentionArgs.OUT) + size * (line * vdim + c)
            store_value(here, memory.as_compute_scalar(f, load_scalar(f, read_there + size * (QUERY_TILE_ROWS * c + r)) * share))


@njit
def clear_memory(f, to, count):
    """So many zeros, in whole vectors."""
    for n in range(0, count, SIMD_WIDTH):
        store_value(to + memory.compute_itemsize(f) * n, splat(memory.as_compute_scalar(f, 0)))


@extending.register_jitable
def flash_forward(f, table, number, desk):
    """All keys that the rows of a unit read, some at a time."""
    unit = load_arg(table, FlashAttentionArgs.WORK_ITEMS) + 48 * number
    size, dim, vdim, groups = memory.compute_itemsize(f), load_arg(table, FlashAttentionArgs.DIM), load_arg(table, FlashAttentionArgs.VDIM), load_arg(table, FlashAttentionArgs.GROUPS)
    step, own, each = size * QUERY_TILE_ROWS, load_int64(unit) // groups, load_int64(unit) % groups
    q = desk + step * NUM_ROW_STATE_VECTORS
    scores = q + step * (dim + GEMM_ROW_PADDING)
    sums = scores + step * FLASH_KEY_BLOCK_SIZE
    k = load_arg(table, FlashAttentionArgs.K) + own * load_arg(table, FlashAttentionArgs.K_ROW_STRIDE) + each * load_arg(table, FlashAttentionArgs.K_HEAD_STRIDE)
    v = load_arg(table, FlashAttentionArgs.V) + own * load_arg(table, FlashAttentionArgs.V_ROW_STRIDE) + each * load_arg(table, FlashAttentionArgs.V_HEAD_STRIDE)
    start, stop, inner, outer = load_key_ranges(f, table, unit, desk)
    load_rows_transposed(f, table, unit, load_arg(table, FlashAttentionArgs.Q), dim, q)
    clear_memory(f, desk + 2 * step, 3 * QUERY_TILE_ROWS)
    for c in range(0, step, size * SIMD_WIDTH):
        store_value(desk + 2 * step + c, splat(memory.as_compute_scalar(f, -math.inf)))
        store_value(desk + 4 * step + c, splat(memory.as_compute_scalar(f, load_scalar(f, table + 8 * FlashAttentionArgs.SCALE))))
    scale_columns(f, q, dim, desk + 4 * step)
    clear_memory(f, sums, (vdim + GEMM_ROW_PADDING) * QUERY_TILE_ROWS)
    while start < stop:
        count = min(FLASH_KEY_BLOCK_SIZE, stop - start)
        qk_tile(f, table, k, q, scores, (start, count))
        if start < inner or start + count > outer:
            mask_scores(f, scores, desk, start, count)
        online_softmax(f, scores, desk, count)
        scale_columns(f, sums, vdim, desk + 4 * step)
        values = v + load_arg(table, FlashAttentionArgs.V_KEY_STRIDE) * start, size, load_arg(table, FlashAttentionArgs.V_KEY_STRIDE)
        gemm(f, (sums, step), values, (scores, step), (vdim, QUERY_TILE_ROWS, count), True)
        start += count
    store_output_and_lse(f, table, unit, sums, desk)
