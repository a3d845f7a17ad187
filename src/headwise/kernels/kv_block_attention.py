"""Attention of one query per head over a block of up to 64 keys: the inner kernels of paged decode.

For each head h, its key head g and the block's keys j, with running maximum m, sum l and output o:

    s[j] = q[h] . k[j, g]  (* key scale, softcap, + bias)
    m' = max(m, max_j s),  p[j] = exp(s[j] - m'),  l = l exp(m - m') + sum_j p[j]
    o = o exp(m - m') + sum_j p[j] (* value scale) v[j, g]

In plain PyTorch one block is `s = q @ k.T`, `p = torch.exp(s - m_new)`, `o = o * torch.exp(m - m_new) + p @ v`.

Loop order, for scores and for values alike: four keys at a time in storage order, key heads, up to four query heads of
the group, channels in vectors of 16. Each key and value is read from memory once for all query heads of its group.
Keys may lie anywhere: a block holds one address per key. While four keys are read, later ones are prefetched.

The scratch buffer holds the addresses of two blocks (the current and the next), the scores of all heads, one rescaling
factor per head and one vector for partial loads.
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

# --- Scores and weighted values of a block -------------------------------------------------------------

KEYS_OFFSET, VALUES_OFFSET, SCALES_OFFSET, COLUMNS_OFFSET, NEXT_BLOCK_OFFSET = (8 * KV_BLOCK_SIZE * n for n in range(5))
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
            scratch + compute_itemsize(dtype) * n, load_storage_scalar(dtype, address + storage_itemsize(dtype) * n)
        )
    return load_vector(dtype, scratch)


@njit_inline
def fma_4_keys(x, y, a):
    """Add x[i] * y to four sums."""
    return fma(x[0], y, a[0]), fma(x[1], y, a[1]), fma(x[2], y, a[2]), fma(x[3], y, a[3])


@njit_inline
def fma_4_keys_4_heads(dtype, x, q, apart, a):
    """Add the products of four keys with four heads to 16 sums.

    `apart` holds the bytes from the first head to the second and to the fourth.
    """
    first, second = fma_4_keys(x, load_vector(dtype, q), a[0]), fma_4_keys(x, load_vector(dtype, q + apart[0]), a[1])
    return (
        first,
        second,
        fma_4_keys(x, load_vector(dtype, q + 2 * apart[0]), a[2]),
        fma_4_keys(x, load_vector(dtype, q + apart[1]), a[3]),
    )


@njit_inline
def load_4_keys(dtype, keys, at):
    """Load 16 channels of four keys."""
    return (
        load_storage(dtype, keys[0] + at),
        load_storage(dtype, keys[1] + at),
        load_storage(dtype, keys[2] + at),
        load_storage(dtype, keys[3] + at),
    )


@njit
def load_4_keys_partial(dtype, keys, at, bounds, scratch):
    """Load up to 16 channels of up to four keys; missing ones are zero and their memory is not read."""
    count, some = bounds
    a, b = (
        load_row_tail(dtype, keys[0] + at, count, scratch),
        load_row_tail(dtype, keys[1] + at, count if some > 1 else 0, scratch),
    )
    c, d = (
        load_row_tail(dtype, keys[2] + at, count if some > 2 else 0, scratch),
        load_row_tail(dtype, keys[3] + at, count if some > 3 else 0, scratch),
    )
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
def qk_4_heads(dtype, q, keys, bounds, tail, to):
    """Compute the scores of four keys with four query heads, or with three, where the last is computed twice."""
    dim, some, heads = bounds
    nothing = splat(as_compute_scalar(dtype, 0.0))
    none = (nothing, nothing, nothing, nothing)
    a = (none, none, none, none)
    full, apart, step = (
        dim // SIMD_WIDTH * SIMD_WIDTH if some == KEYS_PER_STEP else 0,
        compute_itemsize(dtype) * KV_BLOCK_SIZE,
        compute_itemsize(dtype) * round_up_to_simd(dim),
    )
    steps = step, step * (heads - 1)
    for n in range(0, full, SIMD_WIDTH):
        x, own = load_4_keys(dtype, keys, storage_itemsize(dtype) * n), q + compute_itemsize(dtype) * n
        a = fma_4_keys_4_heads(dtype, x, own, steps, a)
    for n in range(full, dim, SIMD_WIDTH):
        x, own = (
            load_4_keys_partial(dtype, keys, storage_itemsize(dtype) * n, (min(dim - n, SIMD_WIDTH), some), tail),
            q + compute_itemsize(dtype) * n,
        )
        a = fma_4_keys_4_heads(dtype, x, own, steps, a)
    found = reduce_sum_16(a)
    store_quarter(to, found, 0)
    store_quarter(to + apart, found, 1)
    store_quarter(to + 2 * apart, found, 2)
    store_quarter(to + (heads - 1) * apart, found, 3)


@njit_inline
def qk_1_head(dtype, q, keys, bounds, tail, to):
    """Compute the scores of four keys with one query head."""
    dim, some, _ = bounds
    nothing = splat(as_compute_scalar(dtype, 0.0))
    a, full = (nothing, nothing, nothing, nothing), dim // SIMD_WIDTH * SIMD_WIDTH if some == KEYS_PER_STEP else 0
    for n in range(0, full, SIMD_WIDTH):
        a = fma_4_keys(
            load_4_keys(dtype, keys, storage_itemsize(dtype) * n),
            load_vector(dtype, q + compute_itemsize(dtype) * n),
            a,
        )
    for n in range(full, dim, SIMD_WIDTH):
        x = load_4_keys_partial(dtype, keys, storage_itemsize(dtype) * n, (min(dim - n, SIMD_WIDTH), some), tail)
        a = fma_4_keys(x, load_vector(dtype, q + compute_itemsize(dtype) * n), a)
    store_value(to, reduce_sum(a[0]))
    store_value(to + compute_itemsize(dtype), reduce_sum(a[1]))
    store_value(to + 2 * compute_itemsize(dtype), reduce_sum(a[2]))
    store_value(to + 3 * compute_itemsize(dtype), reduce_sum(a[3]))


@njit
def heads_per_step(left):
    """Return how many heads to process together: four or three, else one, as two together are slower."""
    return min(left, 4) if left > 2 else 1


@njit_inline
def qk_head_group(dtype, q, keys, bounds, tail, to):
    """Compute the scores of four keys with all query heads of a group."""
    dim, some, each = bounds
    h, apart, step = 0, compute_itemsize(dtype) * KV_BLOCK_SIZE, compute_itemsize(dtype) * round_up_to_simd(dim)
    while h < each:
        heads = heads_per_step(each - h)
        if heads > 1:
            qk_4_heads(dtype, q + step * h, keys, (dim, some, heads), tail, to + apart * h)
        else:
            qk_1_head(dtype, q + step * h, keys, (dim, some, heads), tail, to + apart * h)
        h += heads


@njit
def prefetch_distance(args, each):
    """Return how many keys ahead to prefetch: enough for `KV_PREFETCH_BYTES`, but at most one block."""
    held = KEYS_PER_STEP * args.num_kv_heads * each * (args.dim + args.vdim) // 2
    return min(KEYS_PER_STEP * ((KV_PREFETCH_BYTES + held - 1) // held), KV_BLOCK_SIZE)


@njit
def prefetch_targets(i, here, there):
    """Return which keys to prefetch while four are read.

    The result is their address list, their number, the bytes of one head, the bytes to the next head, and whether all
    of it is one contiguous piece of memory.
    """
    list_, count, held, apart, groups = here
    if i >= count:
        i -= (count + KEYS_PER_STEP - 1) // KEYS_PER_STEP * KEYS_PER_STEP
        list_, count, held, apart, groups = there
    list_, some = list_ + 8 * i, min(KEYS_PER_STEP, count - i)
    joined = (
        some > 0
        and apart == held
        and load_int64(list_ + 8 * (some - 1)) - load_int64(list_) == (some - 1) * groups * held
    )
    return list_, some, held, apart, joined


@njit_inline
def prefetch_head(g, groups, keys):
    """Prefetch one head's share of some keys: in storage order if they are contiguous, else the head's own bytes."""
    list_, some, held, apart, joined = keys
    if joined:
        begin, end = load_int64(list_) + g * KEYS_PER_STEP * held, load_int64(list_) + some * groups * held
        for line in range(begin, min(begin + KEYS_PER_STEP * held, end), 4 * CACHE_LINE_BYTES):
            prefetch_l1(line)
            prefetch_l1(line + CACHE_LINE_BYTES)
            prefetch_l1(line + 2 * CACHE_LINE_BYTES)
            prefetch_l1(line + 3 * CACHE_LINE_BYTES)
    else:
        for n in range(some):
            begin = load_int64(list_ + 8 * n) + g * apart
            for line in range(begin, begin + held, CACHE_LINE_BYTES):
                prefetch_l1(line)


@njit
def qk_block(dtype, args, q, scratch, count):
    """Compute the scores of a block for all heads, four keys at a time; prefetch later keys, then values."""
    heads, groups, dim = (
        args.num_heads,
        args.num_kv_heads,
        args.dim,
    )
    each, apart, step, k_head = (
        heads // groups,
        compute_itemsize(dtype) * KV_BLOCK_SIZE,
        compute_itemsize(dtype) * round_up_to_simd(dim),
        args.k_head_stride,
    )
    tail, before = (
        scratch + SCORES_OFFSET + compute_itemsize(dtype) * (heads * KV_BLOCK_SIZE + round_up_to_simd(heads)),
        prefetch_distance(args, storage_itemsize(dtype)),
    )
    here = scratch + KEYS_OFFSET, count, storage_itemsize(dtype) * dim, k_head, groups
    there = (
        scratch + VALUES_OFFSET,
        count,
        storage_itemsize(dtype) * args.vdim,
        args.v_head_stride,
        groups,
    )
    for i in range(0, count, KEYS_PER_STEP):
        scores, some = scratch + SCORES_OFFSET + compute_itemsize(dtype) * i, min(KEYS_PER_STEP, count - i)
        after = prefetch_targets(i + before, here, there)
        for g in range(groups):
            prefetch_head(g, groups, after)
            keys, h = key_addresses(scratch + KEYS_OFFSET + 8 * i, g * k_head), g * each
            qk_head_group(dtype, q + step * h, keys, (dim, some, each), tail, scores + apart * h)


@njit_inline
def load_4_weights(dtype, scores):
    """Load the weights of four keys for one head, each broadcast to a vector."""
    a, b = splat(load_scalar(dtype, scores)), splat(load_scalar(dtype, scores + compute_itemsize(dtype)))
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
def accumulate_4_values_4_heads(dtype, to, apart, x, p):
    """Add four weighted values to the outputs of three heads, and of a fourth if there is one."""
    step, heads = apart
    accumulate_4_values(dtype, to, x, p[0])
    accumulate_4_values(dtype, to + step, x, p[1])
    accumulate_4_values(dtype, to + 2 * step, x, p[2])
    if heads > 3:
        accumulate_4_values(dtype, to + 3 * step, x, p[3])


@njit_inline
def pv_4_heads(dtype, scores, keys, bounds, tail, place):
    """Add four weighted values to the outputs of four heads, or of three."""
    (dim, some, heads), (to, step) = bounds, place
    apart, full = (
        compute_itemsize(dtype) * KV_BLOCK_SIZE,
        dim // SIMD_WIDTH * SIMD_WIDTH if some == KEYS_PER_STEP else 0,
    )
    p0, p1 = load_4_weights(dtype, scores), load_4_weights(dtype, scores + apart)
    p, step = (
        (p0, p1, load_4_weights(dtype, scores + 2 * apart), load_4_weights(dtype, scores + (heads - 1) * apart)),
        (step, heads),
    )
    for n in range(0, full, SIMD_WIDTH):
        x, own = load_4_keys(dtype, keys, storage_itemsize(dtype) * n), to + compute_itemsize(dtype) * n
        accumulate_4_values_4_heads(dtype, own, step, x, p)
    for n in range(full, dim, SIMD_WIDTH):
        x, own = (
            load_4_keys_partial(dtype, keys, storage_itemsize(dtype) * n, (min(dim - n, SIMD_WIDTH), some), tail),
            to + compute_itemsize(dtype) * n,
        )
        accumulate_4_values_4_heads(dtype, own, step, x, p)


@njit_inline
def pv_1_head(dtype, scores, keys, bounds, tail, to):
    """Add four weighted values to the output of one head."""
    dim, some, _ = bounds
    p, full = load_4_weights(dtype, scores), dim // SIMD_WIDTH * SIMD_WIDTH if some == KEYS_PER_STEP else 0
    for n in range(0, full, SIMD_WIDTH):
        accumulate_4_values(
            dtype, to + compute_itemsize(dtype) * n, load_4_keys(dtype, keys, storage_itemsize(dtype) * n), p
        )
    for n in range(full, dim, SIMD_WIDTH):
        x = load_4_keys_partial(dtype, keys, storage_itemsize(dtype) * n, (min(dim - n, SIMD_WIDTH), some), tail)
        accumulate_4_values(dtype, to + compute_itemsize(dtype) * n, x, p)


@njit_inline
def pv_head_group(dtype, scores, keys, bounds, tail, place):
    """Add four weighted values to the outputs of all heads of a group."""
    (dim, some, each), (to, step) = bounds, place
    h, apart = 0, compute_itemsize(dtype) * KV_BLOCK_SIZE
    while h < each:
        heads = heads_per_step(each - h)
        if heads > 1:
            pv_4_heads(dtype, scores + apart * h, keys, (dim, some, heads), tail, (to + step * h, step))
        else:
            pv_1_head(dtype, scores + apart * h, keys, (dim, some, heads), tail, to + step * h)
        h += heads


@njit
def rescale_output(dtype, args, factors, part):
    """Multiply the outputs by their rescaling factors, for heads whose running maximum has grown."""
    vdim = args.vdim
    for h in range(args.num_heads):
        factor, to = (
            load_scalar(dtype, factors + compute_itemsize(dtype) * h),
            part + compute_itemsize(dtype) * (round_up_to_simd(vdim) + 2) * h,
        )
        if factor != as_compute_scalar(dtype, 1.0):
            for n in range(0, vdim, SIMD_WIDTH):
                store_value(
                    to + compute_itemsize(dtype) * n,
                    vec_mul(load_vector(dtype, to + compute_itemsize(dtype) * n), splat(factor)),
                )


@njit
def pv_block(dtype, args, scratch, part, count, following):
    """Add the weighted values of a block to the outputs of all heads; prefetch later values, then the next keys."""
    heads, groups, dim = (
        args.num_heads,
        args.num_kv_heads,
        args.vdim,
    )
    each, apart, step, v_head = (
        heads // groups,
        compute_itemsize(dtype) * KV_BLOCK_SIZE,
        compute_itemsize(dtype) * (round_up_to_simd(dim) + 2),
        args.v_head_stride,
    )
    factors, before = (
        scratch + SCORES_OFFSET + compute_itemsize(dtype) * heads * KV_BLOCK_SIZE,
        prefetch_distance(args, storage_itemsize(dtype)),
    )
    here, tail = (
        (scratch + VALUES_OFFSET, count, storage_itemsize(dtype) * dim, v_head, groups),
        factors + compute_itemsize(dtype) * round_up_to_simd(heads),
    )
    there = (
        scratch + NEXT_BLOCK_OFFSET + KEYS_OFFSET,
        following,
        storage_itemsize(dtype) * args.dim,
        args.k_head_stride,
        groups,
    )
    rescale_output(dtype, args, factors, part)
    for i in range(0, count, KEYS_PER_STEP):
        scores, some = scratch + SCORES_OFFSET + compute_itemsize(dtype) * i, min(KEYS_PER_STEP, count - i)
        after = prefetch_targets(i + before, here, there)
        for g in range(groups):
            prefetch_head(g, groups, after)
            keys, h = key_addresses(scratch + VALUES_OFFSET + 8 * i, g * v_head), g * each
            pv_head_group(dtype, scores + apart * h, keys, (dim, some, each), tail, (part + step * h, step))


# --- Score transforms and softmax of a block -----------------------------------------------------------


@njit
def apply_kv_scale(dtype, args, scale, scratch, count):
    """Multiply scores, or weights, by the scale of each key, or value, of an int8 cache."""
    heads, groups, head = (
        args.num_heads,
        args.num_kv_heads,
        args.scale_head_stride,
    )
    for h in range(heads):
        x, own = (
            scratch + SCORES_OFFSET + compute_itemsize(dtype) * KV_BLOCK_SIZE * h,
            scale + h // (heads // groups) * head,
        )
        for i in range(count):
            store_value(
                x + compute_itemsize(dtype) * i,
                load_scalar(dtype, x + compute_itemsize(dtype) * i)
                * load_scalar(dtype, own + load_int64(scratch + SCALES_OFFSET + 8 * i)),
            )


@njit
def apply_softcap(dtype, args, scratch, count):
    """Replace scores by cap * tanh(score / cap)."""
    cap = as_compute_scalar(dtype, args.softcap)
    for h in range(args.num_heads):
        x = scratch + SCORES_OFFSET + compute_itemsize(dtype) * KV_BLOCK_SIZE * h
        for i in range(count):
            share = math.tanh(load_scalar(dtype, x + compute_itemsize(dtype) * i) / cap)
            store_value(x + compute_itemsize(dtype) * i, as_compute_scalar(dtype, share) * cap)


@njit
def add_bias_to_head(dtype, x, own, key, scratch, count):
    """Add the bias to the scores of one head, 16 at a time if the columns are consecutive."""
    first = load_int64(scratch + COLUMNS_OFFSET)
    joined = (
        key == compute_itemsize(dtype) and load_int64(scratch + COLUMNS_OFFSET + 8 * count - 8) == first + count - 1
    )
    full = count // SIMD_WIDTH * SIMD_WIDTH if joined else 0
    for i in range(0, full, SIMD_WIDTH):
        store_value(
            x + compute_itemsize(dtype) * i,
            vec_add(
                load_vector(dtype, x + compute_itemsize(dtype) * i),
                load_vector(dtype, own + compute_itemsize(dtype) * (first + i)),
            ),
        )
    for i in range(full, count):
        more = load_scalar(dtype, own + load_int64(scratch + COLUMNS_OFFSET + 8 * i) * key)
        store_value(x + compute_itemsize(dtype) * i, load_scalar(dtype, x + compute_itemsize(dtype) * i) + more)


@njit
def add_bias(dtype, args, row, scratch, count):
    """Add the bias to the scores of all heads."""
    for h in range(args.num_heads):
        own = args.bias + row * args.bias_row_stride + h * args.bias_head_stride
        add_bias_to_head(
            dtype,
            scratch + SCORES_OFFSET + compute_itemsize(dtype) * KV_BLOCK_SIZE * h,
            own,
            args.bias_key_stride,
            scratch,
            count,
        )


@njit
def online_softmax(dtype, args, scratch, part, count):
    """Replace scores by exp(score - running maximum); update maxima, sums and rescaling factors."""
    factors = scratch + SCORES_OFFSET + compute_itemsize(dtype) * args.num_heads * KV_BLOCK_SIZE
    step, lowest = (
        compute_itemsize(dtype) * (round_up_to_simd(args.vdim) + 2),
        as_compute_scalar(dtype, -math.inf),
    )
    for h in range(args.num_heads):
        x, ends = (
            scratch + SCORES_OFFSET + compute_itemsize(dtype) * KV_BLOCK_SIZE * h,
            part + step * (h + 1) - 2 * compute_itemsize(dtype),
        )
        for i in range(count, round_up_to_simd(count)):
            store_value(x + compute_itemsize(dtype) * i, lowest)
        top = splat(lowest)
        for c in range(0, count, SIMD_WIDTH):
            top = vec_max(top, load_vector(dtype, x + compute_itemsize(dtype) * c))
        old = load_scalar(dtype, ends)
        new = max(old, reduce_max(top))
        base = (
            new if new > lowest else as_compute_scalar(dtype, 0.0)
        )  # if all scores are -inf, every weight is exp(-inf) = 0
        factor, sums = as_compute_scalar(dtype, math.exp(old - base)), splat(as_compute_scalar(dtype, 0.0))
        for c in range(0, count, SIMD_WIDTH):
            e = vec_exp(vec_sub(load_vector(dtype, x + compute_itemsize(dtype) * c), splat(base)))
            store_value(x + compute_itemsize(dtype) * c, e)
            sums = vec_add(sums, e)
        store_value(ends, new)
        store_value(
            ends + compute_itemsize(dtype),
            load_scalar(dtype, ends + compute_itemsize(dtype)) * factor + reduce_sum(sums),
        )
        store_value(factors + compute_itemsize(dtype) * h, factor)
