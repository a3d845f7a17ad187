"""Keys that several rows read, read once for all of them.

The heads of all these rows that share a key head stand side by side, [G, rows, heads of a group], as if they were those
of one row: their queries are laid so on the desk, and what they read is handed to each row afterwards, whose other
pieces it is joined with (Hydragen, 2402.05099). One head's keys of a block stay in near memory while all of these heads
are met, four and four.
"""

from __future__ import annotations

import math

import torch
from numba import extending, njit

from .jit import KernelSet
from .kv_block_attention import (
    CACHE_LINE_BYTES,
    KEYS_OFFSET,
    KEYS_PER_STEP,
    KV_BLOCK_SIZE,
    NEXT_BLOCK_OFFSET,
    SCORES_OFFSET,
    VALUES_OFFSET,
    PagedDecodeArgs,
    add_bias,
    add_bias_to_head,
    apply_kv_scale,
    apply_softcap,
    heads_per_step,
    key_addresses,
    online_softmax,
    pv_1_head,
    pv_4_heads,
    pv_block,
    qk_1_head,
    qk_4_heads,
    qk_block,
    rescale_output,
)
from .simd import (
    SIMD_WIDTH,
    as_compute_scalar,
    compute_itemsize,
    fetch_and_increment,
    fma,
    load_int64,
    load_scalar,
    load_vector,
    prefetch_l2,
    round_up_to_simd,
    splat,
    storage_itemsize,
    store_value,
    vec_mul,
)
from .split_kv_schedule import PLAN_ENTRY_BYTES, fill_block_addresses, plan_split_kv, prepare_next_block

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
    heads, groups, dim = (
        load_int64(told + PagedDecodeArgs.HEADS),
        load_int64(told + PagedDecodeArgs.GROUPS),
        load_int64(told + PagedDecodeArgs.DIM),
    )
    each, apart, step, k_head = (
        heads // groups,
        compute_itemsize(f) * KV_BLOCK_SIZE,
        compute_itemsize(f) * round_up_to_simd(dim),
        load_int64(told + PagedDecodeArgs.K_HEAD_STRIDE),
    )
    tail, h = desk + SCORES_OFFSET + compute_itemsize(f) * (heads * KV_BLOCK_SIZE + round_up_to_simd(heads)), 0
    walk = 0, 0
    while h < heads:
        g = h // each
        last, some, walk = g + 1 == groups, heads_per_step((g + 1) * each - h), walk if h > g * each else (0, 0)
        coming = desk + (VALUES_OFFSET if last else KEYS_OFFSET), count
        held = (
            0 if last else (g + 1) * k_head,
            storage_itemsize(f) * (load_int64(told + PagedDecodeArgs.VDIM) if last else dim),
        )
        lines = prefetch_lines_per_step(count, held[1], each, count)
        for i in range(0, count, KEYS_PER_STEP):
            walk = prefetch_key_lines(coming, held, walk, lines)
            keys, to = (
                key_addresses(desk + KEYS_OFFSET + 8 * i, g * k_head),
                desk + SCORES_OFFSET + apart * h + compute_itemsize(f) * i,
            )
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
    heads, groups, dim = (
        load_int64(told + PagedDecodeArgs.HEADS),
        load_int64(told + PagedDecodeArgs.GROUPS),
        load_int64(told + PagedDecodeArgs.VDIM),
    )
    each, apart, step, v_head = (
        heads // groups,
        compute_itemsize(f) * KV_BLOCK_SIZE,
        compute_itemsize(f) * (round_up_to_simd(dim) + 2),
        load_int64(told + PagedDecodeArgs.V_HEAD_STRIDE),
    )
    factors, h = desk + SCORES_OFFSET + compute_itemsize(f) * heads * KV_BLOCK_SIZE, 0
    tail = factors + compute_itemsize(f) * round_up_to_simd(heads)
    rescale_output(f, told, factors, part)
    walk = 0, 0
    while h < heads:
        g = h // each
        last, some, walk = g + 1 == groups, heads_per_step((g + 1) * each - h), walk if h > g * each else (0, 0)
        coming = desk + (NEXT_BLOCK_OFFSET + KEYS_OFFSET if last else VALUES_OFFSET), following if last else count
        held = (
            0 if last else (g + 1) * v_head,
            storage_itemsize(f) * (load_int64(told + PagedDecodeArgs.DIM) if last else dim),
        )
        lines = prefetch_lines_per_step(coming[1], held[1], each, count)
        for i in range(0, count, KEYS_PER_STEP):
            walk = prefetch_key_lines(coming, held, walk, lines)
            keys, scores = (
                key_addresses(desk + VALUES_OFFSET + 8 * i, g * v_head),
                desk + SCORES_OFFSET + apart * h + compute_itemsize(f) * i,
            )
            bounds = dim, min(KEYS_PER_STEP, count - i), some
            if some > 1:
                pv_4_heads(f, scores, keys, bounds, tail, (part + step * h, step))
            else:
                pv_1_head(f, scores, keys, bounds, tail, part + step * h)
        h += some


@njit
def add_bias_shared(f, told, at, desk, count):
    """Scores with what is added to those of each row; they have the same columns."""
    groups, key, order = (
        load_int64(told + PagedDecodeArgs.GROUPS),
        load_int64(told + PagedDecodeArgs.BIAS_KEY_STRIDE),
        load_int64(told + PagedDecodeArgs.ROW_ORDER) + 24 * at[0],
    )
    each = load_int64(told + PagedDecodeArgs.HEADS) // groups // at[1]
    for h in range(load_int64(told + PagedDecodeArgs.HEADS)):
        row, head = load_int64(order + 24 * (h // each % at[1])), h // each // at[1] * each + h % each
        own = (
            load_int64(told + PagedDecodeArgs.BIAS)
            + row * load_int64(told + PagedDecodeArgs.BIAS_ROW_STRIDE)
            + head * load_int64(told + PagedDecodeArgs.BIAS_HEAD_STRIDE)
        )
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
    heads, groups, dim = (
        load_int64(told + PagedDecodeArgs.HEADS),
        load_int64(told + PagedDecodeArgs.GROUPS),
        round_up_to_simd(load_int64(told + PagedDecodeArgs.DIM)),
    )
    order, rows, each = (
        load_int64(told + PagedDecodeArgs.ROW_ORDER) + 24 * load_int64(this),
        load_int64(this + 8),
        heads // groups,
    )
    held = round_up_to_simd(load_int64(told + PagedDecodeArgs.VDIM)) + 2
    for m in range(rows):
        row = load_int64(order + 24 * m)
        first = load_int64(load_int64(told + PagedDecodeArgs.ROW_SPLITS) + 24 * row) + load_int64(this + 40)
        of = load_int64(told + PagedDecodeArgs.PARTIAL_OUTPUTS) + first * heads * held * compute_itemsize(f)
        for g in range(groups):
            to, own = (
                (g * rows + m) * each,
                load_int64(told + PagedDecodeArgs.Q) + (row * heads + g * each) * dim * compute_itemsize(f),
            )
            copy_vector(f, q + to * dim * compute_itemsize(f), own, each * dim)
            if not load_int64(this + 48):
                copy_vector(
                    f, part + to * held * compute_itemsize(f), of + g * each * held * compute_itemsize(f), each * held
                )


@njit
def store_shared_rows(f, told, this, part):
    """Give each row what it has read."""
    heads, groups, held = (
        load_int64(told + PagedDecodeArgs.HEADS),
        load_int64(told + PagedDecodeArgs.GROUPS),
        round_up_to_simd(load_int64(told + PagedDecodeArgs.VDIM)) + 2,
    )
    order, rows, each = (
        load_int64(told + PagedDecodeArgs.ROW_ORDER) + 24 * load_int64(this),
        load_int64(this + 8),
        heads // groups,
    )
    for m in range(rows):
        first = load_int64(
            load_int64(told + PagedDecodeArgs.ROW_SPLITS) + 24 * load_int64(order + 24 * m)
        ) + load_int64(this + 40)
        to = load_int64(told + PagedDecodeArgs.PARTIAL_OUTPUTS) + first * heads * held * compute_itemsize(f)
        for g in range(groups):
            copy_vector(
                f,
                to + g * each * held * compute_itemsize(f),
                part + (g * rows + m) * each * held * compute_itemsize(f),
                each * held,
            )


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
    own = (
        (part + compute_itemsize(f) * heads * (round_up_to_simd(load_int64(told + PagedDecodeArgs.VDIM)) + 2) + 7)
        // 8
        * 8
    )
    for n in range(NUM_ARGS):
        store_value(own + 8 * n, load_int64(told + 8 * n))
    store_value(own + PagedDecodeArgs.HEADS, heads)
    return q, part, own


@njit
def attend_shared_prefix(f, told, entry, following, desk):
    """Read keys for several rows, block by block, while the next are fetched."""
    this = load_int64(told + PagedDecodeArgs.PLAN) + PLAN_ENTRY_BYTES * entry
    q, part, own = make_shared_args(f, told, load_int64(this + 8), desk)
    at, n, slot, left = (
        (load_int64(this), load_int64(this + 8)),
        load_int64(this + 16),
        load_int64(this + 24),
        load_int64(this + 32),
    )
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


# --- One query of a row reads the keys of that row, wherever they lie ----------------------------------

KV_STORAGE_DTYPES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16", torch.int8: "int8"}


@njit
def attend_split(f, told, entry, following, desk):
    """Read keys for one row, block by block, while the next are fetched."""
    heads, this = (
        load_int64(told + PagedDecodeArgs.HEADS),
        load_int64(told + PagedDecodeArgs.PLAN) + PLAN_ENTRY_BYTES * entry,
    )
    n, slot, left = load_int64(this + 16), load_int64(this + 24), load_int64(this + 32)
    row, step = (
        load_int64(load_int64(told + PagedDecodeArgs.ROW_ORDER) + 24 * load_int64(this)),
        compute_itemsize(f) * (round_up_to_simd(load_int64(told + PagedDecodeArgs.VDIM)) + 2),
    )
    number_ = load_int64(load_int64(told + PagedDecodeArgs.ROW_SPLITS) + 24 * row) + load_int64(this + 40)
    part = load_int64(told + PagedDecodeArgs.PARTIAL_OUTPUTS) + number_ * heads * step
    q = load_int64(told + PagedDecodeArgs.Q) + row * heads * compute_itemsize(f) * round_up_to_simd(
        load_int64(told + PagedDecodeArgs.DIM)
    )
    k_scale, v_scale = load_int64(told + PagedDecodeArgs.K_SCALE), load_int64(told + PagedDecodeArgs.V_SCALE)
    if load_int64(this + 48):
        init_partial_output(f, told, part)
    while left > 0:
        count = min(left, KV_BLOCK_SIZE)
        n, slot = fill_block_addresses(told, row, n, slot, desk, count)
        left -= count
        if left > 0:
            after = min(left, KV_BLOCK_SIZE)
            fill_block_addresses(told, row, n, slot, desk + NEXT_BLOCK_OFFSET, after)
        else:
            after = prepare_next_block(told, following, desk)
        qk_block(f, told, q, desk, count)
        if k_scale:
            apply_kv_scale(f, told, k_scale, desk, count)
        if load_int64(told + PagedDecodeArgs.SOFTCAP):
            apply_softcap(f, told, desk, count)
        if load_int64(told + PagedDecodeArgs.BIAS):
            add_bias(f, told, row, desk, count)
        online_softmax(f, told, desk, part, count)
        if v_scale:
            apply_kv_scale(f, told, v_scale, desk, count)
        pv_block(f, told, desk, part, count, after)


@njit
def finite_max(f, top):
    """What scores are measured from: their largest, or 0 where all are -inf."""
    return top if top > as_compute_scalar(f, -math.inf) else as_compute_scalar(f, 0.0)


@njit
def combine_channels(f, part, way, over):
    """Sixteen channels of all pieces, each by its share."""
    (apart, count, share), a = way, splat(as_compute_scalar(f, 0.0))
    for n in range(count):
        a = fma(load_vector(f, part + n * apart), splat(load_scalar(f, part + n * apart + share)), a)
    return vec_mul(a, splat(over))


@njit
def store_channels(f, to, a, left, scratch):
    """Write sixteen channels, or as many as are left, by way of sixteen numbers that nobody needs any more."""
    if left >= SIMD_WIDTH:
        store_value(to, a)
        return
    store_value(scratch, a)
    for d in range(left):
        store_value(to + compute_itemsize(f) * d, load_scalar(f, scratch + compute_itemsize(f) * d))


@njit
def combine_splits(f, told, row):
    """What all pieces of a row read, by their shares of the whole; and how much there was to read."""
    heads, vdim, b = (
        load_int64(told + PagedDecodeArgs.HEADS),
        load_int64(told + PagedDecodeArgs.VDIM),
        compute_itemsize(f),
    )
    step, table, lowest = (
        b * (round_up_to_simd(vdim) + 2),
        load_int64(told + PagedDecodeArgs.ROW_SPLITS) + 24 * row,
        as_compute_scalar(f, -math.inf),
    )
    first, count, sink = load_int64(table), load_int64(table + 8), load_int64(told + PagedDecodeArgs.SINK)
    for h in range(heads):
        part, apart = load_int64(told + PagedDecodeArgs.PARTIAL_OUTPUTS) + (first * heads + h) * step, heads * step
        top, own = lowest, as_compute_scalar(f, 0.0)
        for n in range(count):
            top = max(top, load_scalar(f, part + n * apart + step - 2 * b))
        for n in range(count):
            ends = part + n * apart + step - 2 * b
            own += load_scalar(f, ends + b) * as_compute_scalar(f, math.exp(load_scalar(f, ends) - finite_max(f, top)))
        store_value(
            load_int64(told + PagedDecodeArgs.LSE) + (row * heads + h) * b,
            as_compute_scalar(f, math.log(own)) + finite_max(f, top),
        )
        top = max(top, load_scalar(f, sink + b * h)) if sink else top
        base = finite_max(f, top)
        sums = (
            as_compute_scalar(f, math.exp(load_scalar(f, sink + b * h) - base)) if sink else as_compute_scalar(f, 0.0)
        )
        for n in range(count):
            ends = part + n * apart + step - 2 * b
            share = as_compute_scalar(f, math.exp(load_scalar(f, ends) - base))
            sums += load_scalar(f, ends + b) * share
            store_value(ends, share)
        over = as_compute_scalar(f, 1.0) / (
            sums if sums != 0 else as_compute_scalar(f, 1.0)
        )  # who may read nothing reads zero
        to = load_int64(told + PagedDecodeArgs.OUT) + (row * heads + h) * b * vdim
        for c in range(0, vdim, SIMD_WIDTH):
            store_channels(
                f,
                to + b * c,
                combine_channels(f, part + b * c, (apart, count, step - 2 * b - b * c), over),
                vdim - c,
                part,
            )


@njit
def first_plan_entry(told, job):
    """What a job begins with, or -1 behind the last."""
    return (
        load_int64(load_int64(told + PagedDecodeArgs.WORK_ITEMS) + 8 * job)
        if job < load_int64(told + PagedDecodeArgs.NUM_WORK_ITEMS)
        else -1
    )


@extending.register_jitable
def run_work_items(f, told):
    """What every thread does: take a job, read what it says, until there are no more."""
    desk = load_int64(told + PagedDecodeArgs.SCRATCH) + fetch_and_increment(
        told + PagedDecodeArgs.NEXT_THREAD
    ) * load_int64(told + PagedDecodeArgs.SCRATCH_BYTES)
    table, order, this = (
        load_int64(told + PagedDecodeArgs.ROW_SPLITS),
        load_int64(told + PagedDecodeArgs.ROW_ORDER),
        fetch_and_increment(told + PagedDecodeArgs.NEXT_WORK_ITEM),
    )
    while this < load_int64(told + PagedDecodeArgs.NUM_WORK_ITEMS):
        following, entry, end = (
            fetch_and_increment(told + PagedDecodeArgs.NEXT_WORK_ITEM),
            first_plan_entry(told, this),
            load_int64(load_int64(told + PagedDecodeArgs.WORK_ITEMS) + 8 * this + 8),
        )
        begin = load_int64(told + PagedDecodeArgs.PLAN) + PLAN_ENTRY_BYTES * entry
        while entry < end:
            after = entry + 1 if entry + 1 < end else first_plan_entry(told, following)
            if load_int64(load_int64(told + PagedDecodeArgs.PLAN) + PLAN_ENTRY_BYTES * entry + 8) > 1:
                attend_shared_prefix(f, told, entry, after, desk)
            else:
                attend_split(f, told, entry, after, desk)
            entry += 1
        for at in range(load_int64(begin), load_int64(begin) + load_int64(begin + 8)):
            row = load_int64(order + 24 * at)
            if fetch_and_increment(table + 24 * row + 16) + 1 == load_int64(table + 24 * row + 8):
                combine_splits(f, told, row)
        this = following


PAGED_DECODE_KERNELS = KernelSet(KV_STORAGE_DTYPES, plan=plan_split_kv, work=run_work_items)
