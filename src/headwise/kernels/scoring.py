"""Scores of a block of keys, before their values are read: scales, a ceiling, what is added, and shares.

They lie on a desk as `blocks` lays them: [H, BLOCK], behind them a factor for each head.
"""

from __future__ import annotations

import math

from numba import njit

from .blocks import COLUMNS_OFFSET, SCALES_OFFSET, SCORES_OFFSET
from .lanes import SIMD_WIDTH, vec_exp, vec_max, reduce_max, vec_sub, vec_add, splat, reduce_sum, round_up_to_simd
from .memory import as_compute_scalar, store_value, load_vector, load_scalar, compute_itemsize, load_int64
from .told import KV_BLOCK_SIZE, PagedDecodeArgs


@njit
def apply_kv_scale(f, told, scale, desk, count):
    """Numbers of a block times the scale of the keys, or values, that they belong to."""
    heads, groups, head = load_int64(told + PagedDecodeArgs.HEADS), load_int64(told + PagedDecodeArgs.GROUPS), load_int64(told + PagedDecodeArgs.SCALE_HEAD_STRIDE)
    for h in range(heads):
        x, own = desk + SCORES_OFFSET + compute_itemsize(f) * KV_BLOCK_SIZE * h, scale + h // (heads // groups) * head
        for i in range(count):
            store_value(x + compute_itemsize(f) * i, load_scalar(f, x + compute_itemsize(f) * i) * load_scalar(f, own + load_int64(desk + SCALES_OFFSET + 8 * i)))


@njit
def apply_softcap(f, told, desk, count):
    """Scores with their ceiling."""
    cap = load_int64(told + PagedDecodeArgs.SOFTCAP)
    for h in range(load_int64(told + PagedDecodeArgs.HEADS)):
        x = desk + SCORES_OFFSET + compute_itemsize(f) * KV_BLOCK_SIZE * h
        for i in range(count):
            share = math.tanh(load_scalar(f, x + compute_itemsize(f) * i) / load_scalar(f, cap))
            store_value(x + compute_itemsize(f) * i, as_compute_scalar(f, share) * load_scalar(f, cap))


@njit
def add_bias_to_head(f, x, own, key, desk, count):
    """Scores of one head with what is added to them; sixteen at once where columns follow each other."""
    first = load_int64(desk + COLUMNS_OFFSET)
    joined = key == compute_itemsize(f) and load_int64(desk + COLUMNS_OFFSET + 8 * count - 8) == first + count - 1
    full = count // SIMD_WIDTH * SIMD_WIDTH if joined else 0
    for i in range(0, full, SIMD_WIDTH):
        store_value(x + compute_itemsize(f) * i, vec_add(load_vector(f, x + compute_itemsize(f) * i), load_vector(f, own + compute_itemsize(f) * (first + i))))
    for i in range(full, count):
        more = load_scalar(f, own + load_int64(desk + COLUMNS_OFFSET + 8 * i) * key)
        store_value(x + compute_itemsize(f) * i, load_scalar(f, x + compute_itemsize(f) * i) + more)


@njit
def add_bias(f, told, row, desk, count):
    """Scores with what is added to them."""
    for h in range(load_int64(told + PagedDecodeArgs.HEADS)):
        own = load_int64(told + PagedDecodeArgs.BIAS) + row * load_int64(told + PagedDecodeArgs.BIAS_ROW_STRIDE) + h * load_int64(told + PagedDecodeArgs.BIAS_HEAD_STRIDE)
        add_bias_to_head(f, desk + SCORES_OFFSET + compute_itemsize(f) * KV_BLOCK_SIZE * h, own, load_int64(told + PagedDecodeArgs.BIAS_KEY_STRIDE), desk, count)


@njit
def online_softmax(f, told, desk, part, count):
    """Scores to shares of the largest so far, and by which factor what was read before shrinks."""
    factors = desk + SCORES_OFFSET + compute_itemsize(f) * load_int64(told + PagedDecodeArgs.HEADS) * KV_BLOCK_SIZE
    step, lowest = compute_itemsize(f) * (round_up_to_simd(load_int64(told + PagedDecodeArgs.VDIM)) + 2), as_compute_scalar(f, -math.inf)
    for h in range(load_int64(told + PagedDecodeArgs.HEADS)):
        x, ends = desk + SCORES_OFFSET + compute_itemsize(f) * KV_BLOCK_SIZE * h, part + step * (h + 1) - 2 * compute_itemsize(f)
        for i in range(count, round_up_to_simd(count)):
            store_value(x + compute_itemsize(f) * i, lowest)
        top = splat(lowest)
        for c in range(0, count, SIMD_WIDTH):
            top = vec_max(top, load_vector(f, x + compute_itemsize(f) * c))
        old = load_scalar(f, ends)
        new = max(old, reduce_max(top))
        base = new if new > lowest else as_compute_scalar(f, 0.0)  # where all are -inf, each share is e^-inf
        factor, sums = as_compute_scalar(f, math.exp(old - base)), splat(as_compute_scalar(f, 0.0))
        for c in range(0, count, SIMD_WIDTH):
            e = vec_exp(vec_sub(load_vector(f, x + compute_itemsize(f) * c), splat(base)))
            store_value(x + compute_itemsize(f) * c, e)
            sums = vec_add(sums, e)
        store_value(ends, new)
        store_value(ends + compute_itemsize(f), load_scalar(f, ends + compute_itemsize(f)) * factor + reduce_sum(sums))
        store_value(factors + compute_itemsize(f) * h, factor)
