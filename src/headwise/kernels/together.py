"""Keys that several rows read, read once for all of them.

The heads of all these rows that share a key head stand side by side, [G, rows, heads of a group], as if they were those
of one row: their queries are laid so on the desk, and what they read is handed to each row afterwards, whose other
pieces it is joined with (Hydragen, 2402.05099). One head's keys of a block stay in near memory while all of these heads
are met, four and four.
"""

from __future__ import annotations

import math

from numba import njit

from .blocks import (
    KEYS_OFFSET,
    NEXT_BLOCK_OFFSET,
    SCORES_OFFSET,
    KEYS_PER_STEP,
    VALUES_OFFSET,
    heads_per_step,
    key_addresses,
    qk_1_head,
    pv_1_head,
    qk_4_heads,
    pv_4_heads,
    rescale_output,
)  # fmt: skip
from .lanes import SIMD_WIDTH, splat, round_up_to_simd
from .memory import prefetch_l2, storage_itemsize, as_compute_scalar, store_value, load_vector, load_scalar, compute_itemsize, load_int64
from .planning import PLAN_ENTRY_BYTES, fill_block_addresses, prepare_next_block
from .scoring import apply_softcap, add_bias_to_head, apply_kv_scale, online_softmax
from .told import KV_BLOCK_SIZE, CACHE_LINE_BYTES, PagedDecodeArgs

NUM_ARGS = len(PagedDecodeArgs)


@njit
def prefetch_key_lines(keys, held, walk, lines):
    """Ask for so many lines more of one head of some keys; how far that is."""
    (list_, count), (head, bytes_), (n, at) = keys, held, walk
    for _ in range(lines):
        if n < count:
            prefetch_l2(load_int64(list_ + 8 * n) + head + at)
            at += CACHE_LINE_BYTES
            if at >= bytes_:
                n, at = n + 1, 0
    return n, at


@njit
def prefetch_lines_per_step(count, bytes_, each, keys):
    """How many lines to ask for at each step, so that one head of so many keys is there when all heads of a group have
    met so many others."""
    steps = (each + KEYS_PER_STEP - 1) // KEYS_PER_STEP * ((keys + KEYS_PER_STEP - 1) // KEYS_PER_STEP)
    return (count * ((bytes_ + CACHE_LINE_BYTES - 1) // CACHE_LINE_BYTES) + steps - 1) // steps


@njit
def qk_shared_block(f, told, q, desk, count):
    """The scores of a block, a head of its keys after the other; on the way the next head is asked for, or the first of
    the values."""
    heads, groups, dim = load_int64(told + PagedDecodeArgs.HEADS), load_int64(told + PagedDecodeArgs.GROUPS), load_int64(told + PagedDecodeArgs.DIM)
    each, apart, step, k_head = heads // groups, compute_itemsize(f) * KV_BLOCK_SIZE, compute_itemsize(f) * round_up_to_simd(dim), load_int64(told + PagedDecodeArgs.K_HEAD_STRIDE)
    tail, h = desk + SCORES_OFFSET + compute_itemsize(f) * (heads * KV_BLOCK_SIZE + round_up_to_simd(heads)), 0
    walk = 0, 0
    while h < heads:
        g = h // each
        last, some, walk = g + 1 == groups, heads_per_step((g + 1) * each - h), walk if h > g * each else (0, 0)
        coming = desk + (VALUES_OFFSET if last else KEYS_OFFSET), count
        held = 0 if last else (g + 1) * k_head, storage_itemsize(f) * (load_int64(told + PagedDecodeArgs.VDIM) if last else dim)
        lines = prefetch_lines_per_step(count, held[1], each, count)
        for i in range(0, count, KEYS_PER_STEP):
            walk = prefetch_key_lines(coming, held, walk, lines)
            keys, to = key_addresses(desk + KEYS_OFFSET + 8 * i, g * k_head), desk + SCORES_OFFSET + apart * h + compute_itemsize(f) * i
            bounds = dim, min(KEYS_PER_STEP, count - i), some
            if some > 1:
                qk_4_heads(f, q + step * h, keys, bounds, tail, to)
            else:
                qk_1_head(f, q + step * h, keys, bounds, tail, to)
        h += some


@njit
def pv_shared_block(f, told, desk, part, count, following):
    """What every head reads of the values of a block, a head of them after the other; the next head, or the first of
    those keys that follow, is asked for on the way."""
    heads, groups, dim = load_int64(told + PagedDecodeArgs.HEADS), load_int64(told + PagedDecodeArgs.GROUPS), load_int64(told + PagedDecodeArgs.VDIM)
    each, apart, step, v_head = heads // groups, compute_itemsize(f) * KV_BLOCK_SIZE, compute_itemsize(f) * (round_up_to_simd(dim) + 2), load_int64(told + PagedDecodeArgs.V_HEAD_STRIDE)
    factors, h = desk + SCORES_OFFSET + compute_itemsize(f) * heads * KV_BLOCK_SIZE, 0
    tail = factors + compute_itemsize(f) * round_up_to_simd(heads)
    rescale_output(f, told, factors, part)
    walk = 0, 0
    while h < heads:
        g = h // each
        last, some, walk = g + 1 == groups, heads_per_step((g + 1) * each - h), walk if h > g * each else (0, 0)
        coming = desk + (NEXT_BLOCK_OFFSET + KEYS_OFFSET if last else VALUES_OFFSET), following if last else count
        held = 0 if last else (g + 1) * v_head, storage_itemsize(f) * (load_int64(told + PagedDecodeArgs.DIM) if last else dim)
        lines = prefetch_lines_per_step(coming[1], held[1], each, count)
        for i in range(0, count, KEYS_PER_STEP):
            walk = prefetch_key_lines(coming, held, walk, lines)
            keys, scores = key_addresses(desk + VALUES_OFFSET + 8 * i, g * v_head), desk + SCORES_OFFSET + apart * h + compute_itemsize(f) * i
            bounds = dim, min(KEYS_PER_STEP, count - i), some
            if some > 1:
                pv_4_heads(f, scores, keys, bounds, tail, (part + step * h, step))
            else:
                pv_1_head(f, scores, keys, bounds, tail, part + step * h)
        h += some


@njit
def add_bias_shared(f, told, at, desk, count):
    """Scores with what is added to those of each row; they have the same columns."""
    groups, key, order = load_int64(told + PagedDecodeArgs.GROUPS), load_int64(told + PagedDecodeArgs.BIAS_KEY_STRIDE), load_int64(told + PagedDecodeArgs.ROW_ORDER) + 24 * at[0]
    each = load_int64(told + PagedDecodeArgs.HEADS) // groups // at[1]
    for h in range(load_int64(told + PagedDecodeArgs.HEADS)):
        row, head = load_int64(order + 24 * (h // each % at[1])), h // each // at[1] * each + h % each
        own = load_int64(told + PagedDecodeArgs.BIAS) + row * load_int64(told + PagedDecodeArgs.BIAS_ROW_STRIDE) + head * load_int64(told + PagedDecodeArgs.BIAS_HEAD_STRIDE)
        add_bias_to_head(f, desk + SCORES_OFFSET + compute_itemsize(f) * KV_BLOCK_SIZE * h, own, key, desk, count)


@njit
def copy_vector(f, to, of, count):
    """So many numbers, sixteen at once."""
    full = count // SIMD_WIDTH * SIMD_WIDTH
    for n in range(0, full, SIMD_WIDTH):
        store_value(to + compute_itemsize(f) * n, load_vector(f, of + compute_itemsize(f) * n))
    for n in range(full, count):
        store_value(to + compute_itemsize(f) * n, load_scalar(f, of + compute_itemsize(f) * n))


@njit
def load_shared_rows(f, told, this, q, part):
    """Lay the queries of all rows side by side, and what they have read of this piece before."""
    heads, groups, dim = load_int64(told + PagedDecodeArgs.HEADS), load_int64(told + PagedDecodeArgs.GROUPS), round_up_to_simd(load_int64(told + PagedDecodeArgs.DIM))
    order, rows, each = load_int64(told + PagedDecodeArgs.ROW_ORDER) + 24 * load_int64(this), load_int64(this + 8), heads // groups
    held = round_up_to_simd(load_int64(told + PagedDecodeArgs.VDIM)) + 2
    for m in range(rows):
        row = load_int64(order + 24 * m)
        first = load_int64(load_int64(told + PagedDecodeArgs.ROW_SPLITS) + 24 * row) + load_int64(this + 40)
        of = load_int64(told + PagedDecodeArgs.PARTIAL_OUTPUTS) + first * heads * held * compute_itemsize(f)
        for g in range(groups):
            to, own = (g * rows + m) * each, load_int64(told + PagedDecodeArgs.Q) + (row * heads + g * each) * dim * compute_itemsize(f)
            copy_vector(f, q + to * dim * compute_itemsize(f), own, each * dim)
            if not load_int64(this + 48):
                copy_vector(f, part + to * held * compute_itemsize(f), of + g * each * held * compute_itemsize(f), each * held)


@njit
def store_shared_rows(f, told, this, part):
    """Give each row what it has read."""
    heads, groups, held = load_int64(told + PagedDecodeArgs.HEADS), load_int64(told + PagedDecodeArgs.GROUPS), round_up_to_simd(load_int64(told + PagedDecodeArgs.VDIM)) + 2
    order, rows, each = load_int64(told + PagedDecodeArgs.ROW_ORDER) + 24 * load_int64(this), load_int64(this + 8), heads // groups
    for m in range(rows):
        first = load_int64(load_int64(told + PagedDecodeArgs.ROW_SPLITS) + 24 * load_int64(order + 24 * m)) + load_int64(this + 40)
        to = load_int64(told + PagedDecodeArgs.PARTIAL_OUTPUTS) + first * heads * held * compute_itemsize(f)
        for g in range(groups):
            copy_vector(f, to + g * each * held * compute_itemsize(f), part + (g * rows + m) * each * held * compute_itemsize(f), each * held)


@njit
def init_partial_output(f, told, part):
    """Nothing read so far."""
    vdim = load_int64(told + PagedDecodeArgs.VDIM)
    step = compute_itemsize(f) * (round_up_to_simd(vdim) + 2)
    for h in range(load_int64(told + PagedDecodeArgs.HEADS)):
        for c in range(0, vdim, SIMD_WIDTH):
            store_value(part + step * h + compute_itemsize(f) * c, splat(as_compute_scalar(f, 0.0)))
        store_value(part + step * (h + 1) - 2 * compute_itemsize(f), as_compute_scalar(f, -math.inf))
        store_value(part + step * (h + 1) - compute_itemsize(f), as_compute_scalar(f, 0.0))


@njit
def make_shared_args(f, told, rows, desk):
    """Where on a desk queries lie, what is read, and what a kernel is told of all rows as of one."""
    heads = rows * load_int64(told + PagedDecodeArgs.HEADS)
    q = desk + SCORES_OFFSET + compute_itemsize(f) * (heads * KV_BLOCK_SIZE + round_up_to_simd(heads) + SIMD_WIDTH)
    part = q + compute_itemsize(f) * heads * round_up_to_simd(load_int64(told + PagedDecodeArgs.DIM))
    own = (part + compute_itemsize(f) * heads * (round_up_to_simd(load_int64(told + PagedDecodeArgs.VDIM)) + 2) + 7) // 8 * 8
    for n in range(NUM_ARGS):
        store_value(own + 8 * n, load_int64(told + 8 * n))
    store_value(own + PagedDecodeArgs.HEADS, heads)
    return q, part, own


@njit
def attend_shared_prefix(f, told, entry, following, desk):
    """Read keys for several rows, block by block, while the next are fetched."""
    this = load_int64(told + PagedDecodeArgs.PLAN) + PLAN_ENTRY_BYTES * entry
    q, part, own = make_shared_args(f, told, load_int64(this + 8), desk)
    at, n, slot, left = (load_int64(this), load_int64(this + 8)), load_int64(this + 16), load_int64(this + 24), load_int64(this + 32)
    row, k_scale, v_scale = (
        load_int64(load_int64(told + PagedDecodeArgs.ROW_ORDER) + 24 * at[0]),
        load_int64(told + PagedDecodeArgs.K_SCALE),
        load_int64(told + PagedDecodeArgs.V_SCALE),
    )
    load_shared_rows(f, told, this, q, part)
    if load_int64(this + 48):
        init_partial_output(f, own, part)
    while left > 0:
        count = min(left, KV_BLOCK_SIZE)
        n, slot = fill_block_addresses(told, row, n, slot, desk, count)
        left -= count
        if left > 0:
            after = min(left, KV_BLOCK_SIZE)
            fill_block_addresses(told, row, n, slot, desk + NEXT_BLOCK_OFFSET, after)
        else:
            after = prepare_next_block(told, following, desk)
        qk_shared_block(f, own, q, desk, count)
        if k_scale:
            apply_kv_scale(f, own, k_scale, desk, count)
        if load_int64(told + PagedDecodeArgs.SOFTCAP):
            apply_softcap(f, own, desk, count)
        if load_int64(told + PagedDecodeArgs.BIAS):
            add_bias_shared(f, own, at, desk, count)
        online_softmax(f, own, desk, part, count)
        if v_scale:
            apply_kv_scale(f, own, v_scale, desk, count)
        pv_shared_block(f, own, desk, part, count, after)
    store_shared_rows(f, told, this, part)
