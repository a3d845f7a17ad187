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
    COLUMNS,
    KEYS,
    KEYS_PER_STEP,
    NEXT_BLOCK,
    SCORES_OFFSET,
    VALUES,
    add_bias_to_head,
    apply_kv_scale,
    apply_softcap,
    heads_per_step,
    key_pointers,
    online_softmax,
    pv_block,
    pv_heads,
    qk_block,
    qk_heads,
    rescale_output,
    score_buffers,
    storage_itemsize,
)
from .launch import CACHE_LINE_BYTES, SIMD_WIDTH
from .paged_decode import KV_BLOCK_SIZE, PLAN_ENTRY_FIELDS
from .simd import (
    address_of,
    fetch_and_increment,
    floats,
    fma,
    ints,
    number,
    prefetch_l2,
    round_up_to_simd,
    splat,
    vec,
)
from .split_kv_schedule import fill_block_addresses, prepare_next_block

# --- Rows that share a prefix ---------------------------------------------------------------------


@njit
def prefetch_key_lines(addresses, count, head, position, lines):
    """Prefetch some cache lines of one head of a list of keys; return where to go on."""
    offset, head_bytes = head
    n, line_offset = position
    for _ in range(lines):
        if n < count:
            prefetch_l2(addresses[n] + offset + line_offset)
            line_offset += CACHE_LINE_BYTES
            if line_offset >= head_bytes:
                n = n + 1
                line_offset = 0
    return n, line_offset


@njit
def prefetch_lines_per_step(count, head_bytes, group_size, keys):
    """Return how many lines each step prefetches, so that all are when a head is done."""
    head_steps = (group_size + KEYS_PER_STEP - 1) // KEYS_PER_STEP
    steps = head_steps * ((keys + KEYS_PER_STEP - 1) // KEYS_PER_STEP)
    return (count * ((head_bytes + CACHE_LINE_BYTES - 1) // CACHE_LINE_BYTES) + steps - 1) // steps


@njit
def qk_shared_block(dtype, args, q, scratch, count):
    """Write the scores of all heads with a block of keys, one head after another."""
    heads = args.num_heads
    groups = args.num_kv_heads
    dim = args.dim
    group_size = heads // groups
    step = round_up_to_simd(dim)
    k_head = args.k_head_stride
    lists = ints(scratch)
    scores, _, tail = score_buffers(dtype, args, scratch)
    h = 0
    position = 0, 0
    while h < heads:
        g = h // group_size
        is_last = g + 1 == groups
        num_heads = heads_per_step((g + 1) * group_size - h)
        position = position if h > g * group_size else (0, 0)
        next_keys = lists + (VALUES if is_last else KEYS)
        next_bytes = storage_itemsize(dtype) * (args.vdim if is_last else dim)
        next_head = 0 if is_last else (g + 1) * k_head, next_bytes
        lines = prefetch_lines_per_step(count, next_bytes, group_size, count)
        for i in range(0, count, KEYS_PER_STEP):
            position = prefetch_key_lines(next_keys, count, next_head, position, lines)
            keys = key_pointers(dtype, lists + (KEYS + i), g * k_head)
            bounds = dim, min(KEYS_PER_STEP, count - i), num_heads
            qk_heads(q + step * h, keys, bounds, tail, scores + (KV_BLOCK_SIZE * h + i))
        h += num_heads


@njit
def pv_shared_block(dtype, args, scratch, part, count, next_count):
    """Add a block of values, weighted, to the outputs of all heads, one head after another."""
    heads = args.num_heads
    groups = args.num_kv_heads
    dim = args.vdim
    group_size = heads // groups
    step = round_up_to_simd(dim) + 2
    v_head = args.v_head_stride
    lists = ints(scratch)
    scores, factors, tail = score_buffers(dtype, args, scratch)
    rescale_output(args, factors, part)
    h = 0
    position = 0, 0
    while h < heads:
        g = h // group_size
        is_last = g + 1 == groups
        num_heads = heads_per_step((g + 1) * group_size - h)
        position = position if h > g * group_size else (0, 0)
        next_keys = lists + (NEXT_BLOCK + KEYS if is_last else VALUES)
        num_next = next_count if is_last else count
        next_bytes = storage_itemsize(dtype) * (args.dim if is_last else dim)
        next_head = 0 if is_last else (g + 1) * v_head, next_bytes
        lines = prefetch_lines_per_step(num_next, next_bytes, group_size, count)
        for i in range(0, count, KEYS_PER_STEP):
            position = prefetch_key_lines(next_keys, num_next, next_head, position, lines)
            values = key_pointers(dtype, lists + (VALUES + i), g * v_head)
            weights = scores + (KV_BLOCK_SIZE * h + i)
            bounds = dim, min(KEYS_PER_STEP, count - i), num_heads
            pv_heads(weights, values, bounds, tail, part + step * h, step)
        h += num_heads


@njit
def copy_vector(to, source, count):
    """Copy numbers."""
    full = count // SIMD_WIDTH * SIMD_WIDTH
    for n in range(0, full, SIMD_WIDTH):
        to[n] = vec(source, n)
    for n in range(full, count):
        to[n] = source[n]


@njit
def copy_shared_rows(args, entry, q, part, is_stored):
    """Copy the queries of several rows into one row with all heads, or its partial outputs back."""
    heads = args.num_heads
    groups = args.num_kv_heads
    dim = round_up_to_simd(args.dim)
    order = ints(args.row_order) + 3 * entry[0]
    rows = entry[1]
    group_size = heads // groups
    width = round_up_to_simd(args.vdim) + 2
    for m in range(rows):
        row = order[3 * m]
        first = ints(args.row_splits)[3 * row] + entry[5]
        partial = floats(q, args.partial_outputs) + first * heads * width
        for g in range(groups):
            at = (g * rows + m) * group_size
            own_part = part + at * width
            row_part = partial + g * group_size * width
            if is_stored:
                copy_vector(row_part, own_part, group_size * width)
                continue
            row_q = floats(q, args.q) + (row * heads + g * group_size) * dim
            copy_vector(q + at * dim, row_q, group_size * dim)


@njit
def make_shared_args(dtype, args, rows, scratch):
    """Return queries, partial outputs and arguments of one row with the heads of several."""
    heads = rows * args.num_heads
    scores = floats(dtype, scratch + SCORES_OFFSET)
    q = scores + (heads * KV_BLOCK_SIZE + round_up_to_simd(heads) + SIMD_WIDTH)
    part = q + heads * round_up_to_simd(args.dim)
    end = address_of(part + heads * (round_up_to_simd(args.vdim) + 2))
    shared_args = copy_args(args, (end + 7) // 8 * 8)
    store_arg(shared_args, "num_heads", heads)
    return q, part, shared_args


# --- Entries of the plan, their combination, and the entry point ----------------------------------


@njit
def init_partial_output(args, part):
    """Write an output of no keys."""
    step = round_up_to_simd(args.vdim) + 2
    for h in range(args.num_heads):
        to = part + step * h
        for c in range(0, args.vdim, SIMD_WIDTH):
            to[c] = splat(part, 0)
        to[step - 2] = -math.inf
        to[step - 1] = 0.0


@njit
def add_bias(args, block_args, entry, scores, columns, count):
    """Add the bias of each head of the rows of an entry."""
    rows = entry[1]
    order = ints(args.row_order) + 3 * entry[0]
    group_size = args.num_heads // args.num_kv_heads
    for h in range(block_args.num_heads):
        row = order[3 * (h // group_size % rows)]
        head = h // group_size // rows * group_size + h % group_size
        offset = row * args.bias_row_stride + head * args.bias_head_stride
        bias = floats(scores, args.bias) + offset
        add_bias_to_head(scores + KV_BLOCK_SIZE * h, bias, args.bias_key_stride, columns, count)


@njit
def attend_entry(dtype, args, entry_index, next_entry, scratch):
    """Add the keys of one entry of the plan to the partial outputs of its rows."""
    entry = ints(args.plan) + PLAN_ENTRY_FIELDS * entry_index
    is_shared = entry[1] > 1
    n = entry[2]
    slot = entry[3]
    num_remaining = entry[4]
    row = ints(args.row_order)[3 * entry[0]]
    lists = ints(scratch)
    if is_shared:
        q, part, block_args = make_shared_args(dtype, args, entry[1], scratch)
        copy_shared_rows(args, entry, q, part, False)
    else:
        heads = args.num_heads
        split = ints(args.row_splits)[3 * row] + entry[5]
        q = floats(dtype, args.q) + row * heads * round_up_to_simd(args.dim)
        width = round_up_to_simd(args.vdim) + 2
        part = floats(dtype, args.partial_outputs) + split * heads * width
        block_args = args
    scores, factors, _ = score_buffers(dtype, block_args, scratch)
    init_partial_output(block_args, part)
    while num_remaining > 0:
        count = min(num_remaining, KV_BLOCK_SIZE)
        n, slot = fill_block_addresses(args, row, n, slot, lists, count)
        num_remaining -= count
        if num_remaining > 0:
            next_count = min(num_remaining, KV_BLOCK_SIZE)
            fill_block_addresses(args, row, n, slot, lists + NEXT_BLOCK, next_count)
        else:
            next_count = prepare_next_block(args, next_entry, lists)
        if is_shared:
            qk_shared_block(dtype, block_args, q, scratch, count)
        else:
            qk_block(dtype, block_args, q, scratch, count)
        if args.k_scale:
            apply_kv_scale(block_args, args.k_scale, scores, lists, count)
        if args.softcap != 0:
            apply_softcap(block_args, scores, count)
        if args.bias:
            add_bias(args, block_args, entry, scores, lists + COLUMNS, count)
        online_softmax(block_args, scores, factors, part, count)
        if args.v_scale:
            apply_kv_scale(block_args, args.v_scale, scores, lists, count)
        if is_shared:
            pv_shared_block(dtype, block_args, scratch, part, count, next_count)
        else:
            pv_block(dtype, block_args, scratch, part, count, next_count)
    if is_shared:
        copy_shared_rows(args, entry, q, part, True)


@njit
def finite_max(like, row_max):
    """Return a maximum, or zero for -inf."""
    return row_max if row_max > number(like, -math.inf) else number(like, 0.0)


@njit
def combine_channels(part, splits, factor):
    """Return 16 channels of a row: the sum over splits times their factors, times a factor."""
    split_stride, count, factor_offset = splits
    a = splat(part, 0)
    for n in range(count):
        a = fma(vec(part, n * split_stride), part[n * split_stride + factor_offset], a)
    return a * factor


@njit
def store_channels(to, a, count, scratch):
    """Store up to 16 channels."""
    if count >= SIMD_WIDTH:
        to[0] = a
        return
    scratch[0] = a
    for d in range(count):
        to[d] = scratch[d]


@njit
def combine_splits(dtype, args, row):
    """Combine the outputs and log-sum-exps of a row's splits."""
    heads = args.num_heads
    vdim = args.vdim
    step = round_up_to_simd(vdim) + 2
    split_stride = heads * step
    first = ints(args.row_splits)[3 * row]
    count = ints(args.row_splits)[3 * row + 1]
    for h in range(heads):
        part = floats(dtype, args.partial_outputs) + (first * heads + h) * step
        sink = floats(dtype, args.sink) + h
        maxima = part + (step - 2)
        row_max = number(dtype, -math.inf)
        exp_sum = number(dtype, 0.0)
        for n in range(count):
            row_max = max(row_max, maxima[n * split_stride])
        for n in range(count):
            at = n * split_stride
            shifted = maxima[at] - finite_max(dtype, row_max)
            exp_sum += maxima[at + 1] * number(dtype, math.exp(shifted))
        lse = number(dtype, math.log(exp_sum)) + finite_max(dtype, row_max)
        floats(dtype, args.lse)[row * heads + h] = lse
        row_max = max(row_max, sink[0]) if args.sink else row_max
        shift = finite_max(dtype, row_max)
        weight_sum = number(dtype, 0.0)
        if args.sink:
            weight_sum = number(dtype, math.exp(sink[0] - shift))
        for n in range(count):
            at = n * split_stride
            factor = number(dtype, math.exp(maxima[at] - shift))
            weight_sum += maxima[at + 1] * factor
            maxima[at] = factor
        # a row without keys returns zero
        one = number(dtype, 1.0)
        normaliser = one / (weight_sum if weight_sum != 0 else one)
        to = floats(dtype, args.out) + (row * heads + h) * vdim
        for c in range(0, vdim, SIMD_WIDTH):
            a = combine_channels(part + c, (split_stride, count, step - 2 - c), normaliser)
            store_channels(to + c, a, vdim - c, part)


@extending.register_jitable
def run_work_items(dtype, args):
    """Run work items until none is left; the thread that completes a row combines its splits."""
    thread = fetch_and_increment(args_field_address(args, "next_thread"))
    scratch = args.scratch + thread * args.scratch_bytes
    order = ints(args.row_order)
    row_splits = ints(args.row_splits)
    item = fetch_and_increment(args_field_address(args, "next_item"))
    while item < args.num_items:
        next_item = fetch_and_increment(args_field_address(args, "next_item"))
        entry = ints(args.plan) + PLAN_ENTRY_FIELDS * item
        attend_entry(dtype, args, item, next_item, scratch)
        for order_index in range(entry[0], entry[0] + entry[1]):
            row = order[3 * order_index]
            done = fetch_and_increment(address_of(row_splits + (3 * row + 2))) + 1
            if done == row_splits[3 * row + 1]:
                combine_splits(dtype, args, row)
        item = next_item
