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

from numba import njit

from .launch import CACHE_LINE_BYTES, SIMD_WIDTH
from .paged_decode import KV_BLOCK_SIZE
from .simd import (
    floats,
    fma,
    ints,
    itemsize,
    number,
    prefetch_l1,
    reduce_max,
    reduce_sum,
    reduce_sum_16,
    round_up_to_simd,
    splat,
    store_quarter,
    stored,
    vec,
    vec_max,
)
from .vector_math import vec_exp

# --- Scores and weighted values of a block --------------------------------------------------------

# Lists of int64 at the start of a scratch buffer: addresses of keys and values, offsets of scales,
# columns of the bias; the same of the next block; then the scores.
KEYS, VALUES, SCALES, COLUMNS, NEXT_BLOCK = range(0, 5 * KV_BLOCK_SIZE, KV_BLOCK_SIZE)
SCORES_OFFSET = 2 * 8 * NEXT_BLOCK  # bytes
KV_PREFETCH_BYTES = 12 * 2**10  # prefetch distance, about one memory latency
KEYS_PER_STEP = 4  # keys, or values, that are processed together
njit_inline = njit(forceinline=True)  # a function call costs a seventh of what four keys do


@njit
def score_buffers(dtype, args, scratch):
    """Return the scores [heads, keys], one factor per head, and room for one vector."""
    scores = floats(dtype, scratch + SCORES_OFFSET)
    factors = scores + args.num_heads * KV_BLOCK_SIZE
    return scores, factors, factors + round_up_to_simd(args.num_heads)


@njit
def storage_itemsize(dtype):
    """Return the bytes of a stored number."""
    return itemsize(stored(dtype, 0))


@njit
def load_row_tail(row, count, scratch):
    """Load up to 16 numbers, and zeros after them."""
    scratch[0] = splat(scratch, 0)
    for n in range(count):
        scratch[n] = row[n]
    return vec(scratch, 0)


@njit_inline
def fma_4_keys(x, y, a):
    """Return the sums plus the products of four keys with one vector."""
    return fma(x[0], y, a[0]), fma(x[1], y, a[1]), fma(x[2], y, a[2]), fma(x[3], y, a[3])


@njit_inline
def fma_4_keys_4_heads(x, q, steps, a):
    """Return the sums plus the products of four keys with the queries of four heads."""
    first = fma_4_keys(x, vec(q, 0), a[0])
    second = fma_4_keys(x, vec(q, steps[0]), a[1])
    third = fma_4_keys(x, vec(q, 2 * steps[0]), a[2])
    return first, second, third, fma_4_keys(x, vec(q, steps[1]), a[3])


@njit_inline
def load_4_keys(keys, n):
    """Load 16 channels of four keys."""
    return vec(keys[0], n), vec(keys[1], n), vec(keys[2], n), vec(keys[3], n)


@njit
def load_4_keys_partial(keys, n, bounds, scratch):
    """Load up to 16 channels of up to four keys."""
    dim, num_keys, _ = bounds
    count = min(dim - n, SIMD_WIDTH)
    a = load_row_tail(keys[0] + n, count, scratch)
    b = load_row_tail(keys[1] + n, count if num_keys > 1 else 0, scratch)
    c = load_row_tail(keys[2] + n, count if num_keys > 2 else 0, scratch)
    d = load_row_tail(keys[3] + n, count if num_keys > 3 else 0, scratch)
    return a, b, c, d


@njit_inline
def key_pointers(dtype, addresses, offset):
    """Return pointers to one head of four keys."""
    return (
        stored(dtype, addresses[0] + offset),
        stored(dtype, addresses[1] + offset),
        stored(dtype, addresses[2] + offset),
        stored(dtype, addresses[3] + offset),
    )


@njit_inline
def num_full_channels(bounds):
    """Return the channels up to which whole vectors of four keys can be loaded."""
    dim, num_keys, _ = bounds
    return dim // SIMD_WIDTH * SIMD_WIDTH if num_keys == KEYS_PER_STEP else 0


@njit_inline
def qk_4_heads(q, keys, bounds, scratch, to):
    """Write the scores of three or four heads with four keys."""
    dim, _, heads = bounds
    zero = splat(q, 0)
    zeros = (zero, zero, zero, zero)
    a = (zeros, zeros, zeros, zeros)
    full = num_full_channels(bounds)
    step = round_up_to_simd(dim)
    steps = step, step * (heads - 1)
    for n in range(0, full, SIMD_WIDTH):
        a = fma_4_keys_4_heads(load_4_keys(keys, n), q + n, steps, a)
    for n in range(full, dim, SIMD_WIDTH):
        a = fma_4_keys_4_heads(load_4_keys_partial(keys, n, bounds, scratch), q + n, steps, a)
    scores = reduce_sum_16(a)
    store_quarter(to, scores, 0)
    store_quarter(to + KV_BLOCK_SIZE, scores, 1)
    store_quarter(to + 2 * KV_BLOCK_SIZE, scores, 2)
    store_quarter(to + (heads - 1) * KV_BLOCK_SIZE, scores, 3)


@njit_inline
def qk_1_head(q, keys, bounds, scratch, to):
    """Write the scores of one head with four keys."""
    zero = splat(q, 0)
    a = (zero, zero, zero, zero)
    full = num_full_channels(bounds)
    for n in range(0, full, SIMD_WIDTH):
        a = fma_4_keys(load_4_keys(keys, n), vec(q, n), a)
    for n in range(full, bounds[0], SIMD_WIDTH):
        a = fma_4_keys(load_4_keys_partial(keys, n, bounds, scratch), vec(q, n), a)
    to[0] = reduce_sum(a[0])
    to[1] = reduce_sum(a[1])
    to[2] = reduce_sum(a[2])
    to[3] = reduce_sum(a[3])


@njit
def heads_per_step(num_remaining):
    """Return how many heads of a group are processed together."""
    return min(num_remaining, 4) if num_remaining > 2 else 1


@njit_inline
def qk_heads(q, keys, bounds, scratch, to):
    """Write the scores of the heads of one step with four keys."""
    if bounds[2] > 1:
        qk_4_heads(q, keys, bounds, scratch, to)
    else:
        qk_1_head(q, keys, bounds, scratch, to)


@njit
def prefetch_distance(args, bytes_per_number):
    """Return how many keys ahead are prefetched."""
    width = args.num_kv_heads * bytes_per_number * (args.dim + args.vdim)
    bytes_per_step = KEYS_PER_STEP * width // 2
    steps = (KV_PREFETCH_BYTES + bytes_per_step - 1) // bytes_per_step
    return min(KEYS_PER_STEP * steps, KV_BLOCK_SIZE)


@njit
def prefetch_targets(i, current_keys, next_keys):
    """Return the keys to prefetch: those from i on, or keys of the next list beyond its end."""
    addresses, count, head_bytes, head_stride, groups = current_keys
    if i >= count:
        i -= (count + KEYS_PER_STEP - 1) // KEYS_PER_STEP * KEYS_PER_STEP
        addresses, count, head_bytes, head_stride, groups = next_keys
    addresses = addresses + i
    num_keys = min(KEYS_PER_STEP, count - i)
    is_contiguous = (
        num_keys > 0
        and head_stride == head_bytes
        and addresses[num_keys - 1] - addresses[0] == (num_keys - 1) * groups * head_bytes
    )
    return addresses, num_keys, head_bytes, head_stride, is_contiguous


@njit_inline
def prefetch_head(g, groups, keys):
    """Prefetch one head of four keys, or as many bytes of them in memory order."""
    addresses, num_keys, head_bytes, head_stride, is_contiguous = keys
    if is_contiguous:
        begin = addresses[0] + g * KEYS_PER_STEP * head_bytes
        end = addresses[0] + num_keys * groups * head_bytes
        end = min(begin + KEYS_PER_STEP * head_bytes, end)
        for line in range(begin, end, 4 * CACHE_LINE_BYTES):
            prefetch_l1(line)
            prefetch_l1(line + CACHE_LINE_BYTES)
            prefetch_l1(line + 2 * CACHE_LINE_BYTES)
            prefetch_l1(line + 3 * CACHE_LINE_BYTES)
    else:
        for n in range(num_keys):
            begin = addresses[n] + g * head_stride
            for line in range(begin, begin + head_bytes, CACHE_LINE_BYTES):
                prefetch_l1(line)


@njit
def qk_block(dtype, args, q, scratch, count):
    """Write the scores of all heads with a block of keys, in memory order."""
    groups = args.num_kv_heads
    dim = args.dim
    group_size = args.num_heads // groups
    step = round_up_to_simd(dim)
    k_head = args.k_head_stride
    lists = ints(scratch)
    scores, _, tail = score_buffers(dtype, args, scratch)
    size = storage_itemsize(dtype)
    distance = prefetch_distance(args, size)
    current_keys = lists + KEYS, count, size * dim, k_head, groups
    next_values = lists + VALUES, count, size * args.vdim, args.v_head_stride, groups
    for i in range(0, count, KEYS_PER_STEP):
        num_keys = min(KEYS_PER_STEP, count - i)
        targets = prefetch_targets(i + distance, current_keys, next_values)
        for g in range(groups):
            prefetch_head(g, groups, targets)
            keys = key_pointers(dtype, lists + (KEYS + i), g * k_head)
            h = g * group_size
            while h < (g + 1) * group_size:
                heads = heads_per_step((g + 1) * group_size - h)
                to = scores + (KV_BLOCK_SIZE * h + i)
                qk_heads(q + step * h, keys, (dim, num_keys, heads), tail, to)
                h += heads


@njit_inline
def load_4_weights(scores):
    """Return four weights, each as a vector."""
    a = splat(scores, scores[0])
    b = splat(scores, scores[1])
    return a, b, splat(scores, scores[2]), splat(scores, scores[3])


@njit_inline
def accumulate_4_values(to, x, p):
    """Add the products of four values and weights."""
    to[0] = fma(x[3], p[3], fma(x[2], p[2], fma(x[1], p[1], fma(x[0], p[0], vec(to, 0)))))


@njit_inline
def accumulate_4_values_4_heads(to, step, heads, x, p):
    """Add the products of four values and the weights of three or four heads."""
    accumulate_4_values(to, x, p[0])
    accumulate_4_values(to + step, x, p[1])
    accumulate_4_values(to + 2 * step, x, p[2])
    if heads > 3:
        accumulate_4_values(to + 3 * step, x, p[3])


@njit_inline
def pv_4_heads(scores, keys, bounds, scratch, to, step):
    """Add four values, weighted, to the outputs of three or four heads."""
    dim, _, heads = bounds
    full = num_full_channels(bounds)
    p0 = load_4_weights(scores)
    p1 = load_4_weights(scores + KV_BLOCK_SIZE)
    p2 = load_4_weights(scores + 2 * KV_BLOCK_SIZE)
    p = (p0, p1, p2, load_4_weights(scores + (heads - 1) * KV_BLOCK_SIZE))
    for n in range(0, full, SIMD_WIDTH):
        accumulate_4_values_4_heads(to + n, step, heads, load_4_keys(keys, n), p)
    for n in range(full, dim, SIMD_WIDTH):
        x = load_4_keys_partial(keys, n, bounds, scratch)
        accumulate_4_values_4_heads(to + n, step, heads, x, p)


@njit_inline
def pv_1_head(scores, keys, bounds, scratch, to):
    """Add four values, weighted, to the outputs of one head."""
    p = load_4_weights(scores)
    full = num_full_channels(bounds)
    for n in range(0, full, SIMD_WIDTH):
        accumulate_4_values(to + n, load_4_keys(keys, n), p)
    for n in range(full, bounds[0], SIMD_WIDTH):
        accumulate_4_values(to + n, load_4_keys_partial(keys, n, bounds, scratch), p)


@njit_inline
def pv_heads(scores, keys, bounds, scratch, to, step):
    """Add four values, weighted, to the outputs of the heads of one step."""
    if bounds[2] > 1:
        pv_4_heads(scores, keys, bounds, scratch, to, step)
    else:
        pv_1_head(scores, keys, bounds, scratch, to)


@njit
def rescale_output(args, factors, part):
    """Multiply the output of each head by its factor."""
    step = round_up_to_simd(args.vdim) + 2
    for h in range(args.num_heads):
        factor = factors[h]
        if factor != number(factors, 1.0):
            to = part + step * h
            for n in range(0, args.vdim, SIMD_WIDTH):
                to[n] = vec(to, n) * factor


@njit
def pv_block(dtype, args, scratch, part, count, next_count):
    """Add a block of values, weighted, to the outputs of all heads, in memory order."""
    groups = args.num_kv_heads
    dim = args.vdim
    group_size = args.num_heads // groups
    step = round_up_to_simd(dim) + 2
    v_head = args.v_head_stride
    lists = ints(scratch)
    scores, factors, tail = score_buffers(dtype, args, scratch)
    size = storage_itemsize(dtype)
    distance = prefetch_distance(args, size)
    current_values = lists + VALUES, count, size * dim, v_head, groups
    keys_size = size * args.dim
    next_keys = lists + (NEXT_BLOCK + KEYS), next_count, keys_size, args.k_head_stride, groups
    rescale_output(args, factors, part)
    for i in range(0, count, KEYS_PER_STEP):
        num_keys = min(KEYS_PER_STEP, count - i)
        targets = prefetch_targets(i + distance, current_values, next_keys)
        for g in range(groups):
            prefetch_head(g, groups, targets)
            values = key_pointers(dtype, lists + (VALUES + i), g * v_head)
            h = g * group_size
            while h < (g + 1) * group_size:
                heads = heads_per_step((g + 1) * group_size - h)
                weights = scores + (KV_BLOCK_SIZE * h + i)
                pv_heads(weights, values, (dim, num_keys, heads), tail, part + step * h, step)
                h += heads


# --- Score transforms and softmax of a block ------------------------------------------------------


@njit
def apply_kv_scale(args, scale, scores, lists, count):
    """Multiply scores, or weights, by the scales of their int8 keys, or values."""
    group_size = args.num_heads // args.num_kv_heads
    scales = floats(scores, scale)
    for h in range(args.num_heads):
        x = scores + KV_BLOCK_SIZE * h
        for i in range(count):
            at = h // group_size * args.scale_head_stride + lists[SCALES + i]
            x[i] = x[i] * scales[at]


@njit
def apply_softcap(args, scores, count):
    """Replace scores s by cap tanh(s / cap)."""
    cap = number(scores, args.softcap)
    for h in range(args.num_heads):
        x = scores + KV_BLOCK_SIZE * h
        for i in range(count):
            x[i] = number(scores, math.tanh(x[i] / cap)) * cap


@njit
def add_bias_to_head(x, bias, key_stride, columns, count):
    """Add the bias of one head and row to its scores."""
    first = columns[0]
    is_contiguous = key_stride == 1 and columns[count - 1] == first + count - 1
    full = count // SIMD_WIDTH * SIMD_WIDTH if is_contiguous else 0
    for i in range(0, full, SIMD_WIDTH):
        x[i] = vec(x, i) + vec(bias, first + i)
    for i in range(full, count):
        x[i] = x[i] + bias[columns[i] * key_stride]


@njit
def online_softmax(args, scores, factors, part, count):
    """Replace scores by weights, and update the maximum, the sum and the factor of each head."""
    step = round_up_to_simd(args.vdim) + 2
    minus_inf = number(scores, -math.inf)
    for h in range(args.num_heads):
        x = scores + KV_BLOCK_SIZE * h
        max_and_sum = part + (step * (h + 1) - 2)
        for i in range(count, round_up_to_simd(count)):
            x[i] = minus_inf
        maxima = splat(scores, minus_inf)
        for c in range(0, count, SIMD_WIDTH):
            maxima = vec_max(maxima, vec(x, c))
        old_max = max_and_sum[0]
        new_max = max(old_max, reduce_max(maxima))
        # if all scores are -inf, every weight is exp(-inf) = 0
        shift = new_max if new_max > minus_inf else number(scores, 0.0)
        factor = number(scores, math.exp(old_max - shift))
        sums = splat(scores, 0)
        for c in range(0, count, SIMD_WIDTH):
            weights = vec_exp(vec(x, c) - shift)
            x[c] = weights
            sums = sums + weights
        max_and_sum[0] = new_max
        max_and_sum[1] = max_and_sum[1] * factor + reduce_sum(sums)
        factors[h] = factor
