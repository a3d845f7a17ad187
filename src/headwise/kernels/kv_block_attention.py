"""Attention of one query per head over a block of up to 64 keys: the inner kernels of paged decode.

For each head h, its key head g and the block's keys j, with running maximum m, sum l and output o:

    s[j] = q[h] . k[j, g]  (* key scale, softcap, + bias)
    m' = max(m, max_j s),  p[j] = exp(s[j] - m'),  l = l exp(m - m') + sum_j p[j]
    o = o exp(m - m') + sum_j p[j] (* value scale) v[j, g]

In plain PyTorch one block is `s = q @ k.T`, `p = torch.exp(s - m_new)`, `o = o * torch.exp(m -
m_new) + p @ v`.

Loop order, for scores and for values: four keys at a time in storage order, key heads, up to four
query heads of the group, channels in vectors of 16. Each key and value is read from memory once for
all query heads of its group. Keys may be anywhere in memory: a block holds one address per key.
While four keys are read, later ones are prefetched.

The scratch buffer holds the addresses of two blocks (the current and the next), the scores of all
heads, one rescaling factor per head and one vector for partial loads.
"""

from __future__ import annotations

import math

from numba import extending, njit

from .launch import CACHE_LINE_BYTES, SIMD_WIDTH
from .paged_decode import KV_BLOCK_SIZE, hash_table_size
from .simd import (
    as_compute_scalar,
    compute_itemsize,
    fma,
    load_int64,
    load_scalar,
    load_storage,
    load_storage_scalar,
    load_vector,
    prefetch_l1,
    reduce_max,
    reduce_sum,
    reduce_sum_16,
    round_up_to_simd,
    splat,
    storage_itemsize,
    store_quarter,
    store_value,
    vec_add,
    vec_exp,
    vec_max,
    vec_mul,
    vec_sub,
)

extending.register_jitable(hash_table_size)

# --- Scores and weighted values of a block --------------------------------------------------------

KEYS_OFFSET, VALUES_OFFSET, SCALES_OFFSET, COLUMNS_OFFSET, NEXT_BLOCK_OFFSET = (
    8 * KV_BLOCK_SIZE * n for n in range(5)
)
SCORES_OFFSET = 2 * NEXT_BLOCK_OFFSET
KV_PREFETCH_BYTES = 12 * 2**10  # prefetch distance, about one memory latency
KEYS_PER_STEP = 4  # keys, or values, that are processed together
njit_inline = njit(forceinline=True)  # a function call costs a seventh of what four keys do


@njit
def load_row_tail(dtype, address, count, scratch):
    """Load the last `count` channels of a row, fewer than a vector; the others are zero."""
    store_value(scratch, splat(as_compute_scalar(dtype, 0.0)))
    for n in range(count):
        store_value(
            scratch + compute_itemsize(dtype) * n,
            load_storage_scalar(dtype, address + storage_itemsize(dtype) * n),
        )
    return load_vector(dtype, scratch)


@njit_inline
def fma_4_keys(x, y, a):
    """Add x[i] * y to four sums."""
    return fma(x[0], y, a[0]), fma(x[1], y, a[1]), fma(x[2], y, a[2]), fma(x[3], y, a[3])


@njit_inline
def fma_4_keys_4_heads(dtype, x, q, offsets, a):
    """Add the products of four keys with four heads to 16 sums.

    `offsets` holds the bytes from the first head to the second and to the fourth.
    """
    first = fma_4_keys(x, load_vector(dtype, q), a[0])
    second = fma_4_keys(x, load_vector(dtype, q + offsets[0]), a[1])
    return (
        first,
        second,
        fma_4_keys(x, load_vector(dtype, q + 2 * offsets[0]), a[2]),
        fma_4_keys(x, load_vector(dtype, q + offsets[1]), a[3]),
    )


@njit_inline
def load_4_keys(dtype, keys, offset):
    """Load 16 channels of four keys."""
    return (
        load_storage(dtype, keys[0] + offset),
        load_storage(dtype, keys[1] + offset),
        load_storage(dtype, keys[2] + offset),
        load_storage(dtype, keys[3] + offset),
    )


@njit
def load_4_keys_partial(dtype, keys, offset, bounds, scratch):
    """Load up to 16 channels of up to four keys; missing ones are zero and their memory is not
    read.
    """
    count, num_keys = bounds
    a = load_row_tail(dtype, keys[0] + offset, count, scratch)
    b = load_row_tail(dtype, keys[1] + offset, count if num_keys > 1 else 0, scratch)
    c = load_row_tail(dtype, keys[2] + offset, count if num_keys > 2 else 0, scratch)
    d = load_row_tail(dtype, keys[3] + offset, count if num_keys > 3 else 0, scratch)
    return a, b, c, d


@njit_inline
def key_addresses(keys, offset):
    """Return the addresses of one head of four keys, or of four values."""
    return (
        load_int64(keys) + offset,
        load_int64(keys + 8) + offset,
        load_int64(keys + 16) + offset,
        load_int64(keys + 24) + offset,
    )


@njit_inline
def qk_4_heads(dtype, q, keys, bounds, scratch, to):
    """Compute the scores of four keys with four query heads, or with three, where the last is
    computed twice.
    """
    dim, num_keys, heads = bounds
    zero = splat(as_compute_scalar(dtype, 0.0))
    zeros = (zero, zero, zero, zero)
    a = (zeros, zeros, zeros, zeros)
    full = dim // SIMD_WIDTH * SIMD_WIDTH if num_keys == KEYS_PER_STEP else 0
    score_stride = compute_itemsize(dtype) * KV_BLOCK_SIZE
    step = compute_itemsize(dtype) * round_up_to_simd(dim)
    steps = step, step * (heads - 1)
    for n in range(0, full, SIMD_WIDTH):
        x = load_4_keys(dtype, keys, storage_itemsize(dtype) * n)
        q_channels = q + compute_itemsize(dtype) * n
        a = fma_4_keys_4_heads(dtype, x, q_channels, steps, a)
    for n in range(full, dim, SIMD_WIDTH):
        x = load_4_keys_partial(
            dtype, keys, storage_itemsize(dtype) * n, (min(dim - n, SIMD_WIDTH), num_keys), scratch
        )
        q_channels = q + compute_itemsize(dtype) * n
        a = fma_4_keys_4_heads(dtype, x, q_channels, steps, a)
    scores = reduce_sum_16(a)
    store_quarter(to, scores, 0)
    store_quarter(to + score_stride, scores, 1)
    store_quarter(to + 2 * score_stride, scores, 2)
    store_quarter(to + (heads - 1) * score_stride, scores, 3)


@njit_inline
def qk_1_head(dtype, q, keys, bounds, scratch, to):
    """Compute the scores of four keys with one query head."""
    dim, num_keys, _ = bounds
    zero = splat(as_compute_scalar(dtype, 0.0))
    a = (zero, zero, zero, zero)
    full = dim // SIMD_WIDTH * SIMD_WIDTH if num_keys == KEYS_PER_STEP else 0
    for n in range(0, full, SIMD_WIDTH):
        a = fma_4_keys(
            load_4_keys(dtype, keys, storage_itemsize(dtype) * n),
            load_vector(dtype, q + compute_itemsize(dtype) * n),
            a,
        )
    for n in range(full, dim, SIMD_WIDTH):
        x = load_4_keys_partial(
            dtype, keys, storage_itemsize(dtype) * n, (min(dim - n, SIMD_WIDTH), num_keys), scratch
        )
        a = fma_4_keys(x, load_vector(dtype, q + compute_itemsize(dtype) * n), a)
    store_value(to, reduce_sum(a[0]))
    store_value(to + compute_itemsize(dtype), reduce_sum(a[1]))
    store_value(to + 2 * compute_itemsize(dtype), reduce_sum(a[2]))
    store_value(to + 3 * compute_itemsize(dtype), reduce_sum(a[3]))


@njit
def heads_per_step(num_remaining):
    """Return the number of heads to process together: four or three, else one, as two together are
    slower.
    """
    return min(num_remaining, 4) if num_remaining > 2 else 1


@njit_inline
def qk_head_group(dtype, q, keys, bounds, scratch, to):
    """Compute the scores of four keys with all query heads of a group."""
    dim, num_keys, group_size = bounds
    h = 0
    score_stride = compute_itemsize(dtype) * KV_BLOCK_SIZE
    step = compute_itemsize(dtype) * round_up_to_simd(dim)
    while h < group_size:
        heads = heads_per_step(group_size - h)
        if heads > 1:
            qk_4_heads(
                dtype, q + step * h, keys, (dim, num_keys, heads), scratch, to + score_stride * h
            )
        else:
            qk_1_head(
                dtype, q + step * h, keys, (dim, num_keys, heads), scratch, to + score_stride * h
            )
        h += heads


@njit
def prefetch_distance(args, itemsize):
    """Return the number of keys ahead to prefetch: enough for `KV_PREFETCH_BYTES`, but at most one
    block.
    """
    bytes_per_step = KEYS_PER_STEP * args.num_kv_heads * itemsize * (args.dim + args.vdim) // 2
    return min(
        KEYS_PER_STEP * ((KV_PREFETCH_BYTES + bytes_per_step - 1) // bytes_per_step), KV_BLOCK_SIZE
    )


@njit
def prefetch_targets(i, current_keys, next_keys):
    """Return the keys to prefetch while the current four are processed.

    The result is their address list, their number, the bytes of one head, the bytes to the next
    head, and whether the keys are contiguous in memory.
    """
    addresses, count, head_bytes, head_stride, groups = current_keys
    if i >= count:
        i -= (count + KEYS_PER_STEP - 1) // KEYS_PER_STEP * KEYS_PER_STEP
        addresses, count, head_bytes, head_stride, groups = next_keys
    addresses = addresses + 8 * i
    num_keys = min(KEYS_PER_STEP, count - i)
    is_contiguous = (
        num_keys > 0
        and head_stride == head_bytes
        and load_int64(addresses + 8 * (num_keys - 1)) - load_int64(addresses)
        == (num_keys - 1) * groups * head_bytes
    )
    return addresses, num_keys, head_bytes, head_stride, is_contiguous


@njit_inline
def prefetch_head(g, groups, keys):
    """Prefetch one head's share of some keys: in storage order if they are contiguous, else the
    head's own bytes.
    """
    addresses, num_keys, head_bytes, head_stride, is_contiguous = keys
    if is_contiguous:
        begin = load_int64(addresses) + g * KEYS_PER_STEP * head_bytes
        end = load_int64(addresses) + num_keys * groups * head_bytes
        for line in range(
            begin, min(begin + KEYS_PER_STEP * head_bytes, end), 4 * CACHE_LINE_BYTES
        ):
            prefetch_l1(line)
            prefetch_l1(line + CACHE_LINE_BYTES)
            prefetch_l1(line + 2 * CACHE_LINE_BYTES)
            prefetch_l1(line + 3 * CACHE_LINE_BYTES)
    else:
        for n in range(num_keys):
            begin = load_int64(addresses + 8 * n) + g * head_stride
            for line in range(begin, begin + head_bytes, CACHE_LINE_BYTES):
                prefetch_l1(line)


@njit
def qk_block(dtype, args, q, scratch, count):
    """Compute the scores of a block for all heads, four keys at a time; prefetch later keys, then
    values.
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
    distance = prefetch_distance(args, storage_itemsize(dtype))
    current_keys = scratch + KEYS_OFFSET, count, storage_itemsize(dtype) * dim, k_head, groups
    next_values = (
        scratch + VALUES_OFFSET,
        count,
        storage_itemsize(dtype) * args.vdim,
        args.v_head_stride,
        groups,
    )
    for i in range(0, count, KEYS_PER_STEP):
        scores = scratch + SCORES_OFFSET + compute_itemsize(dtype) * i
        num_keys = min(KEYS_PER_STEP, count - i)
        targets = prefetch_targets(i + distance, current_keys, next_values)
        for g in range(groups):
            prefetch_head(g, groups, targets)
            keys = key_addresses(scratch + KEYS_OFFSET + 8 * i, g * k_head)
            h = g * group_size
            qk_head_group(
                dtype,
                q + step * h,
                keys,
                (dim, num_keys, group_size),
                tail,
                scores + score_stride * h,
            )


@njit_inline
def load_4_weights(dtype, scores):
    """Load the weights of four keys for one head, each broadcast to a vector."""
    a = splat(load_scalar(dtype, scores))
    b = splat(load_scalar(dtype, scores + compute_itemsize(dtype)))
    return (
        a,
        b,
        splat(load_scalar(dtype, scores + 2 * compute_itemsize(dtype))),
        splat(load_scalar(dtype, scores + 3 * compute_itemsize(dtype))),
    )


@njit_inline
def fma_4_values(x, p, a):
    """Add p[0] x[0] + ... + p[3] x[3] to a."""
    return fma(x[3], p[3], fma(x[2], p[2], fma(x[1], p[1], fma(x[0], p[0], a))))


@njit_inline
def accumulate_4_values(dtype, to, x, p):
    """Add four weighted values to the output at `to`."""
    store_value(to, fma_4_values(x, p, load_vector(dtype, to)))


@njit_inline
def accumulate_4_values_4_heads(dtype, to, heads_of_step, x, p):
    """Add four weighted values to the outputs of three heads, and of a fourth if there is one."""
    step, heads = heads_of_step
    accumulate_4_values(dtype, to, x, p[0])
    accumulate_4_values(dtype, to + step, x, p[1])
    accumulate_4_values(dtype, to + 2 * step, x, p[2])
    if heads > 3:
        accumulate_4_values(dtype, to + 3 * step, x, p[3])


@njit_inline
def pv_4_heads(dtype, scores, keys, bounds, scratch, output):
    """Add four weighted values to the outputs of four heads, or of three."""
    (dim, num_keys, heads) = bounds
    (to, step) = output
    score_stride = compute_itemsize(dtype) * KV_BLOCK_SIZE
    full = dim // SIMD_WIDTH * SIMD_WIDTH if num_keys == KEYS_PER_STEP else 0
    p0 = load_4_weights(dtype, scores)
    p1 = load_4_weights(dtype, scores + score_stride)
    p = (
        p0,
        p1,
        load_4_weights(dtype, scores + 2 * score_stride),
        load_4_weights(dtype, scores + (heads - 1) * score_stride),
    )
    step = (step, heads)
    for n in range(0, full, SIMD_WIDTH):
        x = load_4_keys(dtype, keys, storage_itemsize(dtype) * n)
        outputs = to + compute_itemsize(dtype) * n
        accumulate_4_values_4_heads(dtype, outputs, step, x, p)
    for n in range(full, dim, SIMD_WIDTH):
        x = load_4_keys_partial(
            dtype, keys, storage_itemsize(dtype) * n, (min(dim - n, SIMD_WIDTH), num_keys), scratch
        )
        outputs = to + compute_itemsize(dtype) * n
        accumulate_4_values_4_heads(dtype, outputs, step, x, p)


@njit_inline
def pv_1_head(dtype, scores, keys, bounds, scratch, to):
    """Add four weighted values to the output of one head."""
    dim, num_keys, _ = bounds
    p = load_4_weights(dtype, scores)
    full = dim // SIMD_WIDTH * SIMD_WIDTH if num_keys == KEYS_PER_STEP else 0
    for n in range(0, full, SIMD_WIDTH):
        accumulate_4_values(
            dtype,
            to + compute_itemsize(dtype) * n,
            load_4_keys(dtype, keys, storage_itemsize(dtype) * n),
            p,
        )
    for n in range(full, dim, SIMD_WIDTH):
        x = load_4_keys_partial(
            dtype, keys, storage_itemsize(dtype) * n, (min(dim - n, SIMD_WIDTH), num_keys), scratch
        )
        accumulate_4_values(dtype, to + compute_itemsize(dtype) * n, x, p)


@njit_inline
def pv_head_group(dtype, scores, keys, bounds, scratch, output):
    """Add four weighted values to the outputs of all heads of a group."""
    (dim, num_keys, group_size) = bounds
    (to, step) = output
    h = 0
    score_stride = compute_itemsize(dtype) * KV_BLOCK_SIZE
    while h < group_size:
        heads = heads_per_step(group_size - h)
        if heads > 1:
            pv_4_heads(
                dtype,
                scores + score_stride * h,
                keys,
                (dim, num_keys, heads),
                scratch,
                (to + step * h, step),
            )
        else:
            pv_1_head(
                dtype,
                scores + score_stride * h,
                keys,
                (dim, num_keys, heads),
                scratch,
                to + step * h,
            )
        h += heads


@njit
def rescale_output(dtype, args, factors, part):
    """Multiply the outputs by their rescaling factors, for heads whose running
    maximum has grown.
    """
    vdim = args.vdim
    for h in range(args.num_heads):
        factor = load_scalar(dtype, factors + compute_itemsize(dtype) * h)
        to = part + compute_itemsize(dtype) * (round_up_to_simd(vdim) + 2) * h
        if factor != as_compute_scalar(dtype, 1.0):
            for n in range(0, vdim, SIMD_WIDTH):
                store_value(
                    to + compute_itemsize(dtype) * n,
                    vec_mul(load_vector(dtype, to + compute_itemsize(dtype) * n), splat(factor)),
                )


@njit
def pv_block(dtype, args, scratch, part, count, next_count):
    """Add the weighted values of a block to the outputs of all heads; prefetch later values, then
    the next keys.
    """
    heads = args.num_heads
    groups = args.num_kv_heads
    dim = args.vdim
    group_size = heads // groups
    score_stride = compute_itemsize(dtype) * KV_BLOCK_SIZE
    step = compute_itemsize(dtype) * (round_up_to_simd(dim) + 2)
    v_head = args.v_head_stride
    factors = scratch + SCORES_OFFSET + compute_itemsize(dtype) * heads * KV_BLOCK_SIZE
    distance = prefetch_distance(args, storage_itemsize(dtype))
    current_values = (scratch + VALUES_OFFSET, count, storage_itemsize(dtype) * dim, v_head, groups)
    tail = factors + compute_itemsize(dtype) * round_up_to_simd(heads)
    next_keys = (
        scratch + NEXT_BLOCK_OFFSET + KEYS_OFFSET,
        next_count,
        storage_itemsize(dtype) * args.dim,
        args.k_head_stride,
        groups,
    )
    rescale_output(dtype, args, factors, part)
    for i in range(0, count, KEYS_PER_STEP):
        scores = scratch + SCORES_OFFSET + compute_itemsize(dtype) * i
        num_keys = min(KEYS_PER_STEP, count - i)
        targets = prefetch_targets(i + distance, current_values, next_keys)
        for g in range(groups):
            prefetch_head(g, groups, targets)
            keys = key_addresses(scratch + VALUES_OFFSET + 8 * i, g * v_head)
            h = g * group_size
            pv_head_group(
                dtype,
                scores + score_stride * h,
                keys,
                (dim, num_keys, group_size),
                tail,
                (part + step * h, step),
            )


# --- Score transforms and softmax of a block ------------------------------------------------------


@njit
def apply_kv_scale(dtype, args, scale, scratch, count):
    """Multiply scores, or weights, by the scale of each key, or value, of an int8 cache."""
    heads = args.num_heads
    groups = args.num_kv_heads
    head_stride = args.scale_head_stride
    for h in range(heads):
        x = scratch + SCORES_OFFSET + compute_itemsize(dtype) * KV_BLOCK_SIZE * h
        head_scale = scale + h // (heads // groups) * head_stride
        for i in range(count):
            store_value(
                x + compute_itemsize(dtype) * i,
                load_scalar(dtype, x + compute_itemsize(dtype) * i)
                * load_scalar(dtype, head_scale + load_int64(scratch + SCALES_OFFSET + 8 * i)),
            )


@njit
def apply_softcap(dtype, args, scratch, count):
    """Replace scores by cap * tanh(score / cap)."""
    cap = as_compute_scalar(dtype, args.softcap)
    for h in range(args.num_heads):
        x = scratch + SCORES_OFFSET + compute_itemsize(dtype) * KV_BLOCK_SIZE * h
        for i in range(count):
            factor = math.tanh(load_scalar(dtype, x + compute_itemsize(dtype) * i) / cap)
            store_value(x + compute_itemsize(dtype) * i, as_compute_scalar(dtype, factor) * cap)


@njit
def add_bias_to_head(dtype, x, bias, key_stride, scratch, count):
    """Add the bias to the scores of one head, 16 at a time if the columns are consecutive."""
    first = load_int64(scratch + COLUMNS_OFFSET)
    is_contiguous = (
        key_stride == compute_itemsize(dtype)
        and load_int64(scratch + COLUMNS_OFFSET + 8 * count - 8) == first + count - 1
    )
    full = count // SIMD_WIDTH * SIMD_WIDTH if is_contiguous else 0
    for i in range(0, full, SIMD_WIDTH):
        store_value(
            x + compute_itemsize(dtype) * i,
            vec_add(
                load_vector(dtype, x + compute_itemsize(dtype) * i),
                load_vector(dtype, bias + compute_itemsize(dtype) * (first + i)),
            ),
        )
    for i in range(full, count):
        addend = load_scalar(
            dtype, bias + load_int64(scratch + COLUMNS_OFFSET + 8 * i) * key_stride
        )
        store_value(
            x + compute_itemsize(dtype) * i,
            load_scalar(dtype, x + compute_itemsize(dtype) * i) + addend,
        )


@njit
def add_bias(dtype, args, row, scratch, count):
    """Add the bias to the scores of all heads."""
    for h in range(args.num_heads):
        bias = args.bias + row * args.bias_row_stride + h * args.bias_head_stride
        add_bias_to_head(
            dtype,
            scratch + SCORES_OFFSET + compute_itemsize(dtype) * KV_BLOCK_SIZE * h,
            bias,
            args.bias_key_stride,
            scratch,
            count,
        )


@njit
def online_softmax(dtype, args, scratch, part, count):
    """Replace scores by exp(score - running maximum); update maxima, sums and rescaling factors."""
    factors = scratch + SCORES_OFFSET + compute_itemsize(dtype) * args.num_heads * KV_BLOCK_SIZE
    step = compute_itemsize(dtype) * (round_up_to_simd(args.vdim) + 2)
    minus_inf = as_compute_scalar(dtype, -math.inf)
    for h in range(args.num_heads):
        x = scratch + SCORES_OFFSET + compute_itemsize(dtype) * KV_BLOCK_SIZE * h
        max_and_sum = part + step * (h + 1) - 2 * compute_itemsize(dtype)
        for i in range(count, round_up_to_simd(count)):
            store_value(x + compute_itemsize(dtype) * i, minus_inf)
        maxima = splat(minus_inf)
        for c in range(0, count, SIMD_WIDTH):
            maxima = vec_max(maxima, load_vector(dtype, x + compute_itemsize(dtype) * c))
        old_max = load_scalar(dtype, max_and_sum)
        new_max = max(old_max, reduce_max(maxima))
        shift = (
            new_max if new_max > minus_inf else as_compute_scalar(dtype, 0.0)
        )  # if all scores are -inf, every weight is exp(-inf) = 0
        factor = as_compute_scalar(dtype, math.exp(old_max - shift))
        sums = splat(as_compute_scalar(dtype, 0.0))
        for c in range(0, count, SIMD_WIDTH):
            weights = vec_exp(
                vec_sub(load_vector(dtype, x + compute_itemsize(dtype) * c), splat(shift))
            )
            store_value(x + compute_itemsize(dtype) * c, weights)
            sums = vec_add(sums, weights)
        store_value(max_and_sum, new_max)
        store_value(
            max_and_sum + compute_itemsize(dtype),
            load_scalar(dtype, max_and_sum + compute_itemsize(dtype)) * factor + reduce_sum(sums),
        )
        store_value(factors + compute_itemsize(dtype) * h, factor)
