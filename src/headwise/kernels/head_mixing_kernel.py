"""Kernels of `head_mixing`: tiles of 64 keys, one query at a time.

For a query t and a key s, with factors of the query (qs, qt, qg) and of the key (ks, kt, kg), and
the gradient g of the output:

    out[o] = a[h(o)] (qg[o] + kg[o]) + sum_r qt[r, o] (sum_h a[h] qs[r, h]) + sum_r kt[r, o] (sum_h
    a[h] ks[r, h])
    da[h]  = sum_{o: h(o) = h} g[o] (qg[o] + kg[o]) + sum_r qs[r, h] (sum_o g[o] qt[r, o]) + the same for ks and kt
    dqg[o] = sum_s g[o] a[h(o)],   dqt[r, o] = sum_s g[o] (sum_h a[h] qs[r, h]),
    dqs[r, h] = sum_s a[h] (sum_o g[o] qt[r, o])            the key's factors likewise, summed over t

In plain PyTorch: the two lines at the top of `head_mixing`, and `torch.autograd.grad` of them.

Loop order: one work item is a tile of 64 keys of one batch row. The thread copies the keys' factors
to its scratch buffer and loops over the queries: it copies the scores of one query with the tile,
all heads, to the scratch buffer, then loops over 16 keys at a time, over groups of heads, over
ranks and over heads, and copies the result back. (In memory the heads are strided by large powers
of two, which would evict each other from the cache.) In the backward pass each tile writes its
gradients of the query factors separately; they are summed afterwards, so that the result does not
depend on the number of threads.
"""

from __future__ import annotations

from numba import extending, njit

from . import simd
from .head_mixing import KEY_TILE_SIZE
from .launch import CACHE_LINE_BYTES, SIMD_WIDTH
from .simd import (
    fma,
    load_int64,
    load_scalar,
    load_vector,
    prefetch_l2,
    reduce_sum,
    splat,
    store_value,
    vec_add,
    vec_mul,
)


@njit
def clear_memory(dtype, to, count):
    """Store `count` zeros, rounded up to whole vectors."""
    for n in range(0, count, SIMD_WIDTH):
        store_value(to + simd.compute_itemsize(dtype) * n, splat(simd.as_compute_scalar(dtype, 0)))


@njit
def copy_rows(dtype, to, source, rows, count):
    """Copy `count` elements of each row; `to` and `source` are (address of the first row, bytes to
    the next).
    """
    size = simd.compute_itemsize(dtype)
    (to, to_step) = to
    (source, step) = source
    for n in range(rows):
        for c in range(0, count, SIMD_WIDTH):
            store_value(
                to + to_step * n + size * c, load_vector(dtype, source + step * n + size * c)
            )


@njit
def prefetch_rows(dtype, source, step, rows, count):
    """Prefetch `count` elements of each row that are soon read or written."""
    size = simd.compute_itemsize(dtype)
    for n in range(rows):
        for c in range(0, count * size, CACHE_LINE_BYTES):
            prefetch_l2(source + step * n + c)


@njit
def accumulate_product(dtype, to, a, b):
    """Add a * b to the vector stored at `to`."""
    store_value(to, fma(a, b, load_vector(dtype, to)))


@njit
def dot_with_scalars(dtype, x, factor, begin, end):
    """Return sum_h x[h] factor[h] for 16 keys, where the factor is one number per head."""
    size = simd.compute_itemsize(dtype)
    step = simd.compute_itemsize(dtype) * KEY_TILE_SIZE
    a = splat(simd.as_compute_scalar(dtype, 0))
    for h in range(begin, end):
        a = fma(load_vector(dtype, x + step * h), splat(load_scalar(dtype, factor + size * h)), a)
    return a


@njit
def dot_with_vectors(dtype, x, factor, begin, end):
    """Return sum_h x[h] factor[h] for 16 keys, where the factor has one number per head and key."""
    step = simd.compute_itemsize(dtype) * KEY_TILE_SIZE
    a = splat(simd.as_compute_scalar(dtype, 0))
    for h in range(begin, end):
        a = fma(load_vector(dtype, x + step * h), load_vector(dtype, factor + step * h), a)
    return a


@njit
def head_group_bounds(args, group):
    """Return the range of heads of group n and of its output heads; a single group has all output
    heads.
    """
    heads_per_group = args.heads_per_group
    begin = group * heads_per_group
    end = (group + 1) * heads_per_group
    return begin, end, begin, args.num_output_heads if heads_per_group == args.num_heads else end


@njit
def load_key_factors(dtype, args, to, b, begin):
    """Copy the factors of a tile of keys to the scratch buffer."""
    H = args.num_heads
    OUT = args.num_output_heads
    S = args.num_keys
    ranks = args.k_ranks
    size = simd.compute_itemsize(dtype)
    count = min(KEY_TILE_SIZE, S - begin)
    for n in range(3):
        rows = ranks * H if n == 0 else ranks * OUT if n == 1 else args.num_key_gates
        factors = args.k_source if n == 0 else args.k_target if n == 1 else args.k_gate
        source = factors + size * (b * rows * S + begin)
        copy_rows(dtype, (to, size * KEY_TILE_SIZE), (source, size * S), rows, count)
        to += size * KEY_TILE_SIZE * rows


@njit
def store_key_factor_grads(dtype, args, source, b, begin):
    """Copy the gradients of a tile's key factors from the scratch buffer to the output."""
    H = args.num_heads
    OUT = args.num_output_heads
    S = args.num_keys
    ranks = args.k_ranks
    size = simd.compute_itemsize(dtype)
    count = min(KEY_TILE_SIZE, S - begin)
    for n in range(3):
        rows = ranks * H if n == 0 else ranks * OUT if n == 1 else args.num_key_gates
        grads = args.d_k_source if n == 0 else args.d_k_target if n == 1 else args.d_k_gate
        to = grads + size * (b * rows * S + begin)
        copy_rows(dtype, (to, size * S), (source, size * KEY_TILE_SIZE), rows, count)
        source += size * KEY_TILE_SIZE * rows


@njit
def compose_key_vector(dtype, args, row, scratch):
    """Compute all output heads for one query and 16 keys."""
    size = simd.compute_itemsize(dtype)
    step = simd.compute_itemsize(dtype) * KEY_TILE_SIZE
    H = args.num_heads
    OUT = args.num_output_heads
    q_ranks = args.q_ranks
    k_ranks = args.k_ranks
    gate = args.q_gate + size * row * OUT
    source = args.q_source + size * row * q_ranks * H
    target = args.q_target + size * row * q_ranks * OUT
    x, y, key_source = scratch
    key_target = key_source + step * k_ranks * H
    key_gate = key_source + step * k_ranks * (H + OUT)
    for o in range(OUT):
        a = load_vector(dtype, x + step * load_int64(args.head_of_output + 8 * o))
        factor = splat(load_scalar(dtype, gate + size * o))
        if args.num_key_gates:
            factor = vec_add(factor, load_vector(dtype, key_gate + step * o))
        store_value(y + step * o, vec_mul(a, factor))
    for n in range(H // args.heads_per_group):
        head_begin, head_end, output_begin, output_end = head_group_bounds(args, n)
        for r in range(q_ranks):
            a = dot_with_scalars(dtype, x, source + size * r * H, head_begin, head_end)
            for o in range(output_begin, output_end):
                accumulate_product(
                    dtype, y + step * o, a, splat(load_scalar(dtype, target + size * (r * OUT + o)))
                )
        for r in range(k_ranks):
            a = dot_with_vectors(dtype, x, key_source + step * r * H, head_begin, head_end)
            for o in range(output_begin, output_end):
                accumulate_product(
                    dtype, y + step * o, a, load_vector(dtype, key_target + step * (r * OUT + o))
                )


@extending.register_jitable
def head_mixing_forward(dtype, args, item, scratch):
    """Forward kernel: one tile of keys of one batch row."""
    size = simd.compute_itemsize(dtype)
    step = simd.compute_itemsize(dtype) * KEY_TILE_SIZE
    H = args.num_heads
    OUT = args.num_output_heads
    T = args.num_queries
    S = args.num_keys
    tiles = -(-S // KEY_TILE_SIZE)
    b = item // tiles
    begin = item % tiles * KEY_TILE_SIZE
    x = scratch
    y = scratch + step * H
    keys = scratch + step * (H + OUT)
    count = min(KEY_TILE_SIZE, S - begin)
    load_key_factors(dtype, args, keys, b, begin)
    for t in range(T):
        inputs = args.input + size * ((b * H * T + t) * S + begin)
        outputs = args.output + size * ((b * OUT * T + t) * S + begin)
        copy_rows(dtype, (x, step), (inputs, size * T * S), H, count)
        prefetch_rows(dtype, inputs + size * S, size * T * S, H, count)
        prefetch_rows(dtype, outputs, size * T * S, OUT, count)
        for c in range(0, count, SIMD_WIDTH):
            compose_key_vector(
                dtype, args, b * T + t, (x + size * c, y + size * c, keys + size * c)
            )
        copy_rows(dtype, (outputs, size * T * S), (y, step), OUT, count)


# --- Backward pass --------------------------------------------------------------------------------


@njit
def backward_own_heads(dtype, args, row, scratch):
    """Compute the gradients of the term a[own] * gate: of the heads and of both gates."""
    x, keys, d_x, d_keys, sums = scratch
    size = simd.compute_itemsize(dtype)
    step = simd.compute_itemsize(dtype) * KEY_TILE_SIZE
    H = args.num_heads
    OUT = args.num_output_heads
    k_ranks = args.k_ranks
    gate = args.q_gate + size * row * OUT
    g = x + step * H
    key_gate = keys + step * k_ranks * (H + OUT)
    d_gate = d_keys + step * k_ranks * (H + OUT)
    for h in range(H):
        store_value(d_x + step * h, splat(simd.as_compute_scalar(dtype, 0)))
    for o in range(OUT):
        h = load_int64(args.head_of_output + 8 * o)
        a = load_vector(dtype, x + step * h)
        b = load_vector(dtype, g + step * o)
        factor = splat(load_scalar(dtype, gate + size * o))
        if args.num_key_gates:
            factor = vec_add(factor, load_vector(dtype, key_gate + step * o))
            accumulate_product(dtype, d_gate + step * o, a, b)
        accumulate_product(dtype, d_x + step * h, b, factor)
        accumulate_product(dtype, sums + size * SIMD_WIDTH * o, a, b)


@njit
def backward_query_ranks(dtype, args, row, heads, scratch):
    """Compute the gradients of the query's low-rank term; those of its factors stay vectors, summed
    over keys later.
    """
    x, _, d_x, _, sums = scratch
    size = simd.compute_itemsize(dtype)
    step = simd.compute_itemsize(dtype) * KEY_TILE_SIZE
    H = args.num_heads
    OUT = args.num_output_heads
    ranks = args.q_ranks
    head_begin, head_end, output_begin, output_end = heads
    g = x + step * H
    for r in range(ranks):
        source = args.q_source + size * (row * ranks + r) * H
        target = args.q_target + size * (row * ranks + r) * OUT
        a = dot_with_scalars(dtype, x, source, head_begin, head_end)
        d_a = dot_with_scalars(dtype, g, target, output_begin, output_end)
        d_source = sums + size * SIMD_WIDTH * (OUT + r * H)
        d_target = sums + size * SIMD_WIDTH * (OUT + ranks * H + r * OUT)
        for o in range(output_begin, output_end):
            accumulate_product(
                dtype, d_target + size * SIMD_WIDTH * o, load_vector(dtype, g + step * o), a
            )
        for h in range(head_begin, head_end):
            accumulate_product(
                dtype, d_x + step * h, d_a, splat(load_scalar(dtype, source + size * h))
            )
            accumulate_product(
                dtype, d_source + size * SIMD_WIDTH * h, load_vector(dtype, x + step * h), d_a
            )


@njit
def backward_key_ranks(dtype, args, heads, scratch):
    """Compute the gradients of the keys' low-rank term."""
    x, keys, d_x, d_keys, _ = scratch
    step = simd.compute_itemsize(dtype) * KEY_TILE_SIZE
    H = args.num_heads
    OUT = args.num_output_heads
    ranks = args.k_ranks
    head_begin, head_end, output_begin, output_end = heads
    g = x + step * H
    for r in range(ranks):
        at_source = step * r * H
        at_target = step * (ranks * H + r * OUT)
        a = dot_with_vectors(dtype, x, keys + at_source, head_begin, head_end)
        d_a = dot_with_vectors(dtype, g, keys + at_target, output_begin, output_end)
        for o in range(output_begin, output_end):
            accumulate_product(
                dtype, d_keys + at_target + step * o, load_vector(dtype, g + step * o), a
            )
        for h in range(head_begin, head_end):
            accumulate_product(
                dtype, d_x + step * h, d_a, load_vector(dtype, keys + at_source + step * h)
            )
            accumulate_product(
                dtype, d_keys + at_source + step * h, load_vector(dtype, x + step * h), d_a
            )


@njit
def sum_query_factor_grads(dtype, args, row, sums):
    """Reduce the vectors of gradients of one query's factors over the tile and store them."""
    size = simd.compute_itemsize(dtype)
    vector = simd.compute_itemsize(dtype) * SIMD_WIDTH
    H = args.num_heads
    OUT = args.num_output_heads
    ranks = args.q_ranks
    for n in range(OUT):
        store_value(
            args.d_q_gate + size * (row * OUT + n),
            reduce_sum(load_vector(dtype, sums + vector * n)),
        )
    for n in range(ranks * H):
        store_value(
            args.d_q_source + size * (row * ranks * H + n),
            reduce_sum(load_vector(dtype, sums + vector * (OUT + n))),
        )
    sums += vector * (OUT + ranks * H)
    for n in range(ranks * OUT):
        store_value(
            args.d_q_target + size * (row * ranks * OUT + n),
            reduce_sum(load_vector(dtype, sums + vector * n)),
        )


@njit
def backward_query(dtype, args, b, t, begin, scratch):
    """Compute all gradients between one query and a tile of keys."""
    x, keys, d_x, d_keys, sums = scratch
    size = simd.compute_itemsize(dtype)
    step = simd.compute_itemsize(dtype) * KEY_TILE_SIZE
    H = args.num_heads
    OUT = args.num_output_heads
    T = args.num_queries
    S = args.num_keys
    offset = size * ((b * H * T + t) * S + begin)
    count = min(KEY_TILE_SIZE, S - begin)
    row_stride = size * T * S
    grad = args.grad + size * ((b * OUT * T + t) * S + begin)
    copy_rows(dtype, (x, step), (args.input + offset, row_stride), H, count)
    copy_rows(dtype, (x + step * H, step), (grad, row_stride), OUT, count)
    prefetch_rows(dtype, args.input + offset + size * S, row_stride, H, count)
    prefetch_rows(dtype, grad + size * S, row_stride, OUT, count)
    prefetch_rows(dtype, args.output + offset, row_stride, H, count)
    clear_memory(dtype, sums, SIMD_WIDTH * (OUT + args.q_ranks * (H + OUT)))
    for c in range(0, count, SIMD_WIDTH):
        addresses = (x + size * c, keys + size * c, d_x + size * c, d_keys + size * c, sums)
        backward_own_heads(dtype, args, b * T + t, addresses)
        for n in range(H // args.heads_per_group):
            heads = head_group_bounds(args, n)
            backward_query_ranks(dtype, args, b * T + t, heads, addresses)
            backward_key_ranks(dtype, args, heads, addresses)
    copy_rows(dtype, (args.output + offset, row_stride), (d_x, step), H, count)
    tile = begin // KEY_TILE_SIZE
    tiles = -(-S // KEY_TILE_SIZE)
    sum_query_factor_grads(dtype, args, (b * tiles + tile) * T + t, sums)


@extending.register_jitable
def head_mixing_backward(dtype, args, item, scratch):
    """Backward kernel: one tile of keys of one batch row."""
    step = simd.compute_itemsize(dtype) * KEY_TILE_SIZE
    H = args.num_heads
    OUT = args.num_output_heads
    k_ranks = args.k_ranks
    tiles = -(-args.num_keys // KEY_TILE_SIZE)
    factors = k_ranks * (H + OUT) + args.num_key_gates
    b = item // tiles
    begin = item % tiles * KEY_TILE_SIZE
    x = scratch
    keys = scratch + step * (H + OUT)
    d_x = keys + step * factors
    d_keys = d_x + step * H
    load_key_factors(dtype, args, keys, b, begin)
    clear_memory(dtype, d_keys, KEY_TILE_SIZE * factors)
    for t in range(args.num_queries):
        backward_query(dtype, args, b, t, begin, (x, keys, d_x, d_keys, d_keys + step * factors))
    store_key_factor_grads(dtype, args, d_keys, b, begin)
