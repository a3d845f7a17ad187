"""Kernel `work` of paged decode: work items of one row, or of several rows that share a prefix.

For the splits n of a row, with maximum m_n, sum l_n and unnormalised output o_n of each (Flash-Decoding):

    m = max_n m_n,   l = sum_n l_n exp(m_n - m),   o = sum_n o_n exp(m_n - m) / l,   lse = m + log l

A sink adds exp(sink - m) to l, but not to lse. Plain PyTorch: `attend_paged_reference` in `paged_decode`.

Loop order: every thread takes work items; for each plan entry of the item, for each block of 64 keys: scores, score
transforms, online softmax, weighted values (`kv_block_attention`), with the next block prefetched. The thread that
finishes the last split of a row combines its splits.

For a shared prefix (Hydragen, 2402.05099) the query heads of all rows that share a key head are stacked, [G, rows,
heads per group], as if they were the heads of one row: their queries are copied to the scratch buffer, and their
partial outputs are copied back to each row afterwards. There the loop over heads is outside the loop over keys, so that
one head of a block stays in a near cache while all stacked query heads read it, four at a time.
"""

from __future__ import annotations

import math

from numba import extending, njit

from .kv_block_attention import (
    KEYS_OFFSET,
    KEYS_PER_STEP,
    NEXT_BLOCK_OFFSET,
    SCORES_OFFSET,
    VALUES_OFFSET,
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
from .launch import CACHE_LINE_BYTES, SIMD_WIDTH
from .paged_decode import KV_BLOCK_SIZE, PagedDecodeArgs
from .simd import (
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
from .split_kv_schedule import PLAN_ENTRY_BYTES, fill_block_addresses, prepare_next_block

NUM_ARGS = len(PagedDecodeArgs)


@njit
def prefetch_key_lines(keys, held, walk, lines):
    """Prefetch the next `lines` cache lines of one head of some keys; return the new position."""
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
    """Return how many cache lines to prefetch per step.

    With this many, one head of `count` keys is in the cache by the time all heads of a group have processed `keys`
    others.
    """
    steps = (each + KEYS_PER_STEP - 1) // KEYS_PER_STEP * ((keys + KEYS_PER_STEP - 1) // KEYS_PER_STEP)
    return (count * ((bytes_ + CACHE_LINE_BYTES - 1) // CACHE_LINE_BYTES) + steps - 1) // steps


@njit
def qk_shared_block(f, told, q, desk, count):
    """Compute the scores of a block, one key head after the other; prefetch the next head, or the first value head."""
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
    """Add the weighted values of a block, one head after the other; prefetch the next head, or the following keys."""
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
    """Add each row's bias to its scores; the rows have the same columns."""
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
    """Copy `count` elements, 16 at a time."""
    full = count // SIMD_WIDTH * SIMD_WIDTH
    for n in range(0, full, SIMD_WIDTH):
        store_value(to + compute_itemsize(f) * n, load_vector(f, of + compute_itemsize(f) * n))
    for n in range(full, count):
        store_value(to + compute_itemsize(f) * n, load_scalar(f, of + compute_itemsize(f) * n))


@njit
def load_shared_rows(f, told, this, q, part):
    """Copy the queries of all rows to the scratch buffer, and their partial outputs if the split has been begun."""
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
    """Copy the partial outputs from the scratch buffer back to each row."""
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
    """Set output 0, maximum -inf and sum 0 for every head."""
    vdim = load_int64(told + PagedDecodeArgs.VDIM)
    step = compute_itemsize(f) * (round_up_to_simd(vdim) + 2)
    for h in range(load_int64(told + PagedDecodeArgs.HEADS)):
        for c in range(0, vdim, SIMD_WIDTH):
            store_value(part + step * h + compute_itemsize(f) * c, splat(as_compute_scalar(f, 0.0)))
        store_value(part + step * (h + 1) - 2 * compute_itemsize(f), as_compute_scalar(f, -math.inf))
        store_value(part + step * (h + 1) - compute_itemsize(f), as_compute_scalar(f, 0.0))


@njit
def make_shared_args(f, told, rows, desk):
    """Return scratch addresses of the stacked queries, of the partial outputs, and of a copy of the kernel arguments.

    In the copy HEADS is rows x heads.
    """
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
    """Run one plan entry for several rows, block by block, while the next block is prefetched."""
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


# --- Splits of one row, their combination, and the entry point -----------------------------------------


@njit
def attend_split(f, told, entry, following, desk):
    """Run one plan entry for one row, block by block, while the next block is prefetched."""
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
    """Return the maximum to subtract from scores, or 0 if all of them are -inf."""
    return top if top > as_compute_scalar(f, -math.inf) else as_compute_scalar(f, 0.0)


@njit
def combine_channels(f, part, way, over):
    """Combine 16 channels of all splits: sum_n share_n o_n, times `over`."""
    (apart, count, share), a = way, splat(as_compute_scalar(f, 0.0))
    for n in range(count):
        a = fma(load_vector(f, part + n * apart), splat(load_scalar(f, part + n * apart + share)), a)
    return vec_mul(a, splat(over))


@njit
def store_channels(f, to, a, left, scratch):
    """Store up to 16 channels; a partial vector goes through `scratch`, whose 16 elements are no longer needed."""
    if left >= SIMD_WIDTH:
        store_value(to, a)
        return
    store_value(scratch, a)
    for d in range(left):
        store_value(to + compute_itemsize(f) * d, load_scalar(f, scratch + compute_itemsize(f) * d))


@njit
def combine_splits(f, told, row):
    """Combine the splits of a row into its output and log-sum-exp."""
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
        )  # a row without keys returns zero
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
    """Return the first plan entry of a work item, or -1 behind the last item."""
    return (
        load_int64(load_int64(told + PagedDecodeArgs.WORK_ITEMS) + 8 * job)
        if job < load_int64(told + PagedDecodeArgs.NUM_WORK_ITEMS)
        else -1
    )


@extending.register_jitable
def run_work_items(f, told):
    """Kernel `work`, run by every thread: take work items until none is left, and combine rows that are complete."""
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
