"""Kernel `attend` of paged decode: work items of one row, or of several rows that share a prefix.

For the splits n of a row, with maximum m_n, sum l_n and unnormalised output o_n of each
(Flash-Decoding):

    m = max_n m_n,   l = sum_n l_n exp(m_n - m),   o = sum_n o_n exp(m_n - m) / l,   lse = m + log l

A sink adds exp(sink - m) to l, but not to lse. In plain PyTorch: `attend_paged_reference` of
`paged_decode`.

Loop order: every thread takes work items; for each plan entry of the item, for each block of 64
keys: scores, score transforms, online softmax, weighted values (`kv_block_attention`), with the
next block prefetched. The thread that finishes the last split of a row combines its splits.

For a shared prefix (Hydragen, 2402.05099) the query heads of all rows that share a key head are
stacked, [G, rows, heads per group], as if they were the heads of one row: their queries are copied
to the scratch buffer, and their partial outputs are copied back to each row afterwards. There the
loop over heads is outside the loop over keys, so that one head of a block stays in the cache while
all stacked query heads read it, four at a time.
"""

from __future__ import annotations

import math

from numba import extending, njit

from .jit import args_field_address, copy_args, store_arg
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
from .paged_decode import KV_BLOCK_SIZE
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


@njit
def prefetch_key_lines(keys, head, position, lines):
    """Prefetch the next `lines` cache lines of one head of some keys; return the new position."""
    (addresses, count) = keys
    (offset, head_bytes) = head
    (n, line_offset) = position
    for _ in range(lines):
        if n < count:
            prefetch_l2(load_int64(addresses + 8 * n) + offset + line_offset)
            line_offset += CACHE_LINE_BYTES
            if line_offset >= head_bytes:
                n = n + 1
                line_offset = 0
    return n, line_offset


@njit
def prefetch_lines_per_step(count, head_bytes, group_size, keys):
    """Return how many cache lines to prefetch per step.

    With this many, one head of `count` keys is in the cache by the time all heads of a group have
    processed `keys` others.
    """
    steps = (
        (group_size + KEYS_PER_STEP - 1)
        // KEYS_PER_STEP
        * ((keys + KEYS_PER_STEP - 1) // KEYS_PER_STEP)
    )
    return (count * ((head_bytes + CACHE_LINE_BYTES - 1) // CACHE_LINE_BYTES) + steps - 1) // steps


@njit
def qk_shared_block(dtype, args, q, scratch, count):
    """Compute the scores of a block, one key head after the other; prefetch the next head, or the
    first value head.
    """
    heads = args.num_heads
    groups = args.num_kv_heads
    dim = args.dim
    group_size = heads // groups
    score_stride = compute_itemsize(dtype) * KV_BLOCK_SIZE
    step = compute_itemsize(dtype) * round_up_to_simd(dim)
    k_head = args.k_head_stride
    tail = (
        scratch
        + SCORES_OFFSET
        + compute_itemsize(dtype) * (heads * KV_BLOCK_SIZE + round_up_to_simd(heads))
    )
    h = 0
    position = 0, 0
    while h < heads:
        g = h // group_size
        is_last = g + 1 == groups
        num_heads = heads_per_step((g + 1) * group_size - h)
        position = position if h > g * group_size else (0, 0)
        next_keys = scratch + (VALUES_OFFSET if is_last else KEYS_OFFSET), count
        next_head = (
            0 if is_last else (g + 1) * k_head,
            storage_itemsize(dtype) * (args.vdim if is_last else dim),
        )
        lines = prefetch_lines_per_step(count, next_head[1], group_size, count)
        for i in range(0, count, KEYS_PER_STEP):
            position = prefetch_key_lines(next_keys, next_head, position, lines)
            keys = key_addresses(scratch + KEYS_OFFSET + 8 * i, g * k_head)
            to = scratch + SCORES_OFFSET + score_stride * h + compute_itemsize(dtype) * i
            bounds = dim, min(KEYS_PER_STEP, count - i), num_heads
            if num_heads > 1:
                qk_4_heads(dtype, q + step * h, keys, bounds, tail, to)
            else:
                qk_1_head(dtype, q + step * h, keys, bounds, tail, to)
        h += num_heads


@njit
def pv_shared_block(dtype, args, scratch, part, count, next_count):
    """Add the weighted values of a block, one head after the other; prefetch the next head, or the
    following keys.
    """
    heads = args.num_heads
    groups = args.num_kv_heads
    dim = args.vdim
    group_size = heads // groups
    score_stride = compute_itemsize(dtype) * KV_BLOCK_SIZE
    step = compute_itemsize(dtype) * (round_up_to_simd(dim) + 2)
    v_head = args.v_head_stride
    factors = scratch + SCORES_OFFSET + compute_itemsize(dtype) * heads * KV_BLOCK_SIZE
    h = 0
    tail = factors + compute_itemsize(dtype) * round_up_to_simd(heads)
    rescale_output(dtype, args, factors, part)
    position = 0, 0
    while h < heads:
        g = h // group_size
        is_last = g + 1 == groups
        num_heads = heads_per_step((g + 1) * group_size - h)
        position = position if h > g * group_size else (0, 0)
        next_keys = (
            scratch + (NEXT_BLOCK_OFFSET + KEYS_OFFSET if is_last else VALUES_OFFSET),
            next_count if is_last else count,
        )
        next_head = (
            0 if is_last else (g + 1) * v_head,
            storage_itemsize(dtype) * (args.dim if is_last else dim),
        )
        lines = prefetch_lines_per_step(next_keys[1], next_head[1], group_size, count)
        for i in range(0, count, KEYS_PER_STEP):
            position = prefetch_key_lines(next_keys, next_head, position, lines)
            keys = key_addresses(scratch + VALUES_OFFSET + 8 * i, g * v_head)
            scores = scratch + SCORES_OFFSET + score_stride * h + compute_itemsize(dtype) * i
            bounds = dim, min(KEYS_PER_STEP, count - i), num_heads
            if num_heads > 1:
                pv_4_heads(dtype, scores, keys, bounds, tail, (part + step * h, step))
            else:
                pv_1_head(dtype, scores, keys, bounds, tail, part + step * h)
        h += num_heads


@njit
def add_bias_shared(dtype, args, shared, scratch, count):
    """Add each row's bias to its scores; the rows have the same columns."""
    groups = args.num_kv_heads
    key_stride = args.bias_key_stride
    order = args.row_order + 24 * shared[0]
    group_size = args.num_heads // groups // shared[1]
    for h in range(args.num_heads):
        row = load_int64(order + 24 * (h // group_size % shared[1]))
        head = h // group_size // shared[1] * group_size + h % group_size
        bias = args.bias + row * args.bias_row_stride + head * args.bias_head_stride
        add_bias_to_head(
            dtype,
            scratch + SCORES_OFFSET + compute_itemsize(dtype) * KV_BLOCK_SIZE * h,
            bias,
            key_stride,
            scratch,
            count,
        )


@njit
def copy_vector(dtype, to, source, count):
    """Copy `count` elements, 16 at a time."""
    full = count // SIMD_WIDTH * SIMD_WIDTH
    for n in range(0, full, SIMD_WIDTH):
        store_value(
            to + compute_itemsize(dtype) * n,
            load_vector(dtype, source + compute_itemsize(dtype) * n),
        )
    for n in range(full, count):
        store_value(
            to + compute_itemsize(dtype) * n,
            load_scalar(dtype, source + compute_itemsize(dtype) * n),
        )


@njit
def load_shared_rows(dtype, args, entry_address, q, part):
    """Copy the queries of all rows to the scratch buffer, and their partial outputs if the split
    has been begun.
    """
    heads = args.num_heads
    groups = args.num_kv_heads
    dim = round_up_to_simd(args.dim)
    order = args.row_order + 24 * load_int64(entry_address)
    rows = load_int64(entry_address + 8)
    group_size = heads // groups
    part_width = round_up_to_simd(args.vdim) + 2
    for m in range(rows):
        row = load_int64(order + 24 * m)
        first = load_int64(args.row_splits + 24 * row) + load_int64(entry_address + 40)
        partial = args.partial_outputs + first * heads * part_width * compute_itemsize(dtype)
        for g in range(groups):
            to = (g * rows + m) * group_size
            q_row = args.q + (row * heads + g * group_size) * dim * compute_itemsize(dtype)
            copy_vector(dtype, q + to * dim * compute_itemsize(dtype), q_row, group_size * dim)
            if not load_int64(entry_address + 48):
                copy_vector(
                    dtype,
                    part + to * part_width * compute_itemsize(dtype),
                    partial + g * group_size * part_width * compute_itemsize(dtype),
                    group_size * part_width,
                )


@njit
def store_shared_rows(dtype, args, entry_address, part):
    """Copy the partial outputs from the scratch buffer back to each row."""
    heads = args.num_heads
    groups = args.num_kv_heads
    part_width = round_up_to_simd(args.vdim) + 2
    order = args.row_order + 24 * load_int64(entry_address)
    rows = load_int64(entry_address + 8)
    group_size = heads // groups
    for m in range(rows):
        first = load_int64(args.row_splits + 24 * load_int64(order + 24 * m)) + load_int64(
            entry_address + 40
        )
        to = args.partial_outputs + first * heads * part_width * compute_itemsize(dtype)
        for g in range(groups):
            copy_vector(
                dtype,
                to + g * group_size * part_width * compute_itemsize(dtype),
                part + (g * rows + m) * group_size * part_width * compute_itemsize(dtype),
                group_size * part_width,
            )


@njit
def init_partial_output(dtype, args, part):
    """Set output 0, maximum -inf and sum 0 for every head."""
    vdim = args.vdim
    step = compute_itemsize(dtype) * (round_up_to_simd(vdim) + 2)
    for h in range(args.num_heads):
        for c in range(0, vdim, SIMD_WIDTH):
            store_value(
                part + step * h + compute_itemsize(dtype) * c, splat(as_compute_scalar(dtype, 0.0))
            )
        store_value(
            part + step * (h + 1) - 2 * compute_itemsize(dtype), as_compute_scalar(dtype, -math.inf)
        )
        store_value(part + step * (h + 1) - compute_itemsize(dtype), as_compute_scalar(dtype, 0.0))


@njit
def make_shared_args(dtype, args, rows, scratch):
    """Return scratch addresses of the stacked queries and of the partial outputs, and a copy of the
    argument record.

    In the copy `num_heads` is rows x heads.
    """
    heads = rows * args.num_heads
    q = (
        scratch
        + SCORES_OFFSET
        + compute_itemsize(dtype) * (heads * KV_BLOCK_SIZE + round_up_to_simd(heads) + SIMD_WIDTH)
    )
    part = q + compute_itemsize(dtype) * heads * round_up_to_simd(args.dim)
    end = part + compute_itemsize(dtype) * heads * (round_up_to_simd(args.vdim) + 2)
    shared_args = copy_args(args, (end + 7) // 8 * 8)
    store_arg(shared_args, "num_heads", heads)
    return q, part, shared_args


@njit
def attend_shared_prefix(dtype, args, entry, next_entry, scratch):
    """Run one plan entry for several rows, block by block, while the next block is prefetched."""
    entry_address = args.plan + PLAN_ENTRY_BYTES * entry
    q, part, shared_args = make_shared_args(dtype, args, load_int64(entry_address + 8), scratch)
    shared = (load_int64(entry_address), load_int64(entry_address + 8))
    n = load_int64(entry_address + 16)
    slot = load_int64(entry_address + 24)
    num_remaining = load_int64(entry_address + 32)
    row = load_int64(args.row_order + 24 * shared[0])
    k_scale = args.k_scale
    v_scale = args.v_scale
    load_shared_rows(dtype, args, entry_address, q, part)
    if load_int64(entry_address + 48):
        init_partial_output(dtype, shared_args, part)
    while num_remaining > 0:
        count = min(num_remaining, KV_BLOCK_SIZE)
        n, slot = fill_block_addresses(args, row, n, slot, scratch, count)
        num_remaining -= count
        if num_remaining > 0:
            next_count = min(num_remaining, KV_BLOCK_SIZE)
            fill_block_addresses(args, row, n, slot, scratch + NEXT_BLOCK_OFFSET, next_count)
        else:
            next_count = prepare_next_block(args, next_entry, scratch)
        qk_shared_block(dtype, shared_args, q, scratch, count)
        if k_scale:
            apply_kv_scale(dtype, shared_args, k_scale, scratch, count)
        if args.softcap != 0:
            apply_softcap(dtype, shared_args, scratch, count)
        if args.bias:
            add_bias_shared(dtype, shared_args, shared, scratch, count)
        online_softmax(dtype, shared_args, scratch, part, count)
        if v_scale:
            apply_kv_scale(dtype, shared_args, v_scale, scratch, count)
        pv_shared_block(dtype, shared_args, scratch, part, count, next_count)
    store_shared_rows(dtype, args, entry_address, part)


# --- Splits of one row, their combination, and the entry point ------------------------------------


@njit
def attend_split(dtype, args, entry, next_entry, scratch):
    """Run one plan entry for one row, block by block, while the next block is prefetched."""
    heads = args.num_heads
    entry_address = args.plan + PLAN_ENTRY_BYTES * entry
    n = load_int64(entry_address + 16)
    slot = load_int64(entry_address + 24)
    num_remaining = load_int64(entry_address + 32)
    row = load_int64(args.row_order + 24 * load_int64(entry_address))
    step = compute_itemsize(dtype) * (round_up_to_simd(args.vdim) + 2)
    split = load_int64(args.row_splits + 24 * row) + load_int64(entry_address + 40)
    part = args.partial_outputs + split * heads * step
    q = args.q + row * heads * compute_itemsize(dtype) * round_up_to_simd(args.dim)
    k_scale = args.k_scale
    v_scale = args.v_scale
    if load_int64(entry_address + 48):
        init_partial_output(dtype, args, part)
    while num_remaining > 0:
        count = min(num_remaining, KV_BLOCK_SIZE)
        n, slot = fill_block_addresses(args, row, n, slot, scratch, count)
        num_remaining -= count
        if num_remaining > 0:
            next_count = min(num_remaining, KV_BLOCK_SIZE)
            fill_block_addresses(args, row, n, slot, scratch + NEXT_BLOCK_OFFSET, next_count)
        else:
            next_count = prepare_next_block(args, next_entry, scratch)
        qk_block(dtype, args, q, scratch, count)
        if k_scale:
            apply_kv_scale(dtype, args, k_scale, scratch, count)
        if args.softcap != 0:
            apply_softcap(dtype, args, scratch, count)
        if args.bias:
            add_bias(dtype, args, row, scratch, count)
        online_softmax(dtype, args, scratch, part, count)
        if v_scale:
            apply_kv_scale(dtype, args, v_scale, scratch, count)
        pv_block(dtype, args, scratch, part, count, next_count)


@njit
def finite_max(dtype, row_max):
    """Return the maximum to subtract from scores, or 0 if all of them are -inf."""
    return (
        row_max if row_max > as_compute_scalar(dtype, -math.inf) else as_compute_scalar(dtype, 0.0)
    )


@njit
def combine_channels(dtype, part, splits, factor):
    """Combine 16 channels of all splits: sum_n share_n o_n, times `factor`."""
    (split_stride, count, factor_offset) = splits
    a = splat(as_compute_scalar(dtype, 0.0))
    for n in range(count):
        a = fma(
            load_vector(dtype, part + n * split_stride),
            splat(load_scalar(dtype, part + n * split_stride + factor_offset)),
            a,
        )
    return vec_mul(a, splat(factor))


@njit
def store_channels(dtype, to, a, count, scratch):
    """Store up to 16 channels; a partial vector goes through `scratch`, whose 16 elements are no
    longer needed.
    """
    if count >= SIMD_WIDTH:
        store_value(to, a)
        return
    store_value(scratch, a)
    for d in range(count):
        store_value(
            to + compute_itemsize(dtype) * d,
            load_scalar(dtype, scratch + compute_itemsize(dtype) * d),
        )


@njit
def combine_splits(dtype, args, row):
    """Combine the splits of a row into its output and log-sum-exp."""
    heads = args.num_heads
    vdim = args.vdim
    itemsize = compute_itemsize(dtype)
    step = itemsize * (round_up_to_simd(vdim) + 2)
    row_splits = args.row_splits + 24 * row
    minus_inf = as_compute_scalar(dtype, -math.inf)
    first = load_int64(row_splits)
    count = load_int64(row_splits + 8)
    sink = args.sink
    for h in range(heads):
        part = args.partial_outputs + (first * heads + h) * step
        split_stride = heads * step
        row_max = minus_inf
        exp_sum = as_compute_scalar(dtype, 0.0)
        for n in range(count):
            row_max = max(
                row_max, load_scalar(dtype, part + n * split_stride + step - 2 * itemsize)
            )
        for n in range(count):
            max_and_sum = part + n * split_stride + step - 2 * itemsize
            exp_sum += load_scalar(dtype, max_and_sum + itemsize) * as_compute_scalar(
                dtype, math.exp(load_scalar(dtype, max_and_sum) - finite_max(dtype, row_max))
            )
        store_value(
            args.lse + (row * heads + h) * itemsize,
            as_compute_scalar(dtype, math.log(exp_sum)) + finite_max(dtype, row_max),
        )
        row_max = max(row_max, load_scalar(dtype, sink + itemsize * h)) if sink else row_max
        shift = finite_max(dtype, row_max)
        weight_sum = (
            as_compute_scalar(dtype, math.exp(load_scalar(dtype, sink + itemsize * h) - shift))
            if sink
            else as_compute_scalar(dtype, 0.0)
        )
        for n in range(count):
            max_and_sum = part + n * split_stride + step - 2 * itemsize
            factor = as_compute_scalar(dtype, math.exp(load_scalar(dtype, max_and_sum) - shift))
            weight_sum += load_scalar(dtype, max_and_sum + itemsize) * factor
            store_value(max_and_sum, factor)
        normaliser = as_compute_scalar(dtype, 1.0) / (
            weight_sum if weight_sum != 0 else as_compute_scalar(dtype, 1.0)
        )  # a row without keys returns zero
        to = args.out + (row * heads + h) * itemsize * vdim
        for c in range(0, vdim, SIMD_WIDTH):
            store_channels(
                dtype,
                to + itemsize * c,
                combine_channels(
                    dtype,
                    part + itemsize * c,
                    (split_stride, count, step - 2 * itemsize - itemsize * c),
                    normaliser,
                ),
                vdim - c,
                part,
            )


@njit
def first_plan_entry(args, item):
    """Return the first plan entry of a work item, or -1 after the last item."""
    return load_int64(args.work_items + 8 * item) if item < args.num_items else -1


@extending.register_jitable
def run_work_items(dtype, args):
    """Kernel `attend`, run by every thread: process work items until none remains, and combine
    complete rows.
    """
    scratch = (
        args.scratch
        + fetch_and_increment(args_field_address(args, "next_thread")) * args.scratch_bytes
    )
    row_splits = args.row_splits
    order = args.row_order
    item = fetch_and_increment(args_field_address(args, "next_item"))
    while item < args.num_items:
        next_item = fetch_and_increment(args_field_address(args, "next_item"))
        entry = first_plan_entry(args, item)
        end = load_int64(args.work_items + 8 * item + 8)
        begin = args.plan + PLAN_ENTRY_BYTES * entry
        while entry < end:
            next_entry = entry + 1 if entry + 1 < end else first_plan_entry(args, next_item)
            if load_int64(args.plan + PLAN_ENTRY_BYTES * entry + 8) > 1:
                attend_shared_prefix(dtype, args, entry, next_entry, scratch)
            else:
                attend_split(dtype, args, entry, next_entry, scratch)
            entry += 1
        for order_index in range(load_int64(begin), load_int64(begin) + load_int64(begin + 8)):
            row = load_int64(order + 24 * order_index)
            if fetch_and_increment(row_splits + 24 * row + 16) + 1 == load_int64(
                row_splits + 24 * row + 8
            ):
                combine_splits(dtype, args, row)
        item = next_item
