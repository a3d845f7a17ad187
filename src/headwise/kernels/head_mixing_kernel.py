"""Kernels of `head_mixing`: tiles of 64 keys, one query at a time.

Loop order: one work item is a tile of 64 keys of one batch row. The thread copies the keys' factors to its scratch
buffer and loops over the queries: it copies the scores of one query with the tile, all heads, to the scratch buffer,
then loops over 16 keys at a time, over groups of heads, over ranks and over heads, and copies the result back. (In
memory the heads are strided by large powers of two, which would evict each other from the cache.) In the backward pass
each tile writes its gradients of the query factors separately; they are summed afterwards, so that the result does not
depend on the number of threads.
"""

from __future__ import annotations

from numba import extending, njit

from . import simd
from .head_mixing import KEY_TILE_SIZE, HeadMixingArgs
from .launch import CACHE_LINE_BYTES, SIMD_WIDTH
from .simd import (
    fma,
    load_arg,
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
def clear_memory(form, to, count):
    """Store `count` zeros, rounded up to whole vectors."""
    for n in range(0, count, SIMD_WIDTH):
        store_value(to + simd.compute_itemsize(form) * n, splat(simd.as_compute_scalar(form, 0)))


@njit
def copy_rows(form, to, source, rows, count):
    """Copy `count` elements of each row; `to` and `source` are (address of the first row, bytes to the next)."""
    size, (to, to_step), (source, step) = simd.compute_itemsize(form), to, source
    for n in range(rows):
        for c in range(0, count, SIMD_WIDTH):
            store_value(to + to_step * n + size * c, load_vector(form, source + step * n + size * c))


@njit
def prefetch_rows(form, source, step, rows, count):
    """Prefetch `count` elements of each row that are soon read or written."""
    size = simd.compute_itemsize(form)
    for n in range(rows):
        for c in range(0, count * size, CACHE_LINE_BYTES):
            prefetch_l2(source + step * n + c)


@njit
def accumulate_product(form, to, a, b):
    """Add a * b to the vector stored at `to`."""
    store_value(to, fma(a, b, load_vector(form, to)))


@njit
def dot_with_scalars(form, x, factor, first, last):
    """Return sum_h x[h] factor[h] for 16 keys, where the factor is one number per head."""
    size, step = simd.compute_itemsize(form), simd.compute_itemsize(form) * KEY_TILE_SIZE
    a = splat(simd.as_compute_scalar(form, 0))
    for h in range(first, last):
        a = fma(load_vector(form, x + step * h), splat(load_scalar(form, factor + size * h)), a)
    return a


@njit
def dot_with_vectors(form, x, factor, first, last):
    """Return sum_h x[h] factor[h] for 16 keys, where the factor has one number per head and key."""
    step = simd.compute_itemsize(form) * KEY_TILE_SIZE
    a = splat(simd.as_compute_scalar(form, 0))
    for h in range(first, last):
        a = fma(load_vector(form, x + step * h), load_vector(form, factor + step * h), a)
    return a


@njit
def head_group_bounds(table, n):
    """Return the range of heads of group n and of its output heads; a single group has all output heads."""
    each = load_arg(table, HeadMixingArgs.HEADS_PER_GROUP)
    first, last = n * each, (n + 1) * each
    return (
        first,
        last,
        first,
        load_arg(table, HeadMixingArgs.NUM_OUTPUT_HEADS) if each == load_arg(table, HeadMixingArgs.H) else last,
    )


@njit
def load_key_factors(form, table, to, b, begin):
    """Copy the factors of a tile of keys to the scratch buffer."""
    H, OUT, S, ranks = (
        load_arg(table, HeadMixingArgs.H),
        load_arg(table, HeadMixingArgs.NUM_OUTPUT_HEADS),
        load_arg(table, HeadMixingArgs.S),
        load_arg(table, HeadMixingArgs.K_RANKS),
    )
    size, count = simd.compute_itemsize(form), min(KEY_TILE_SIZE, S - begin)
    for n in range(3):
        rows = ranks * H if n == 0 else ranks * OUT if n == 1 else load_arg(table, HeadMixingArgs.NUM_KEY_GATES)
        source = load_arg(table, HeadMixingArgs.K_SOURCE + n) + size * (b * rows * S + begin)
        copy_rows(form, (to, size * KEY_TILE_SIZE), (source, size * S), rows, count)
        to += size * KEY_TILE_SIZE * rows


@njit
def store_key_factor_grads(form, table, source, b, begin):
    """Copy the gradients of a tile's key factors from the scratch buffer to the output."""
    H, OUT, S, ranks = (
        load_arg(table, HeadMixingArgs.H),
        load_arg(table, HeadMixingArgs.NUM_OUTPUT_HEADS),
        load_arg(table, HeadMixingArgs.S),
        load_arg(table, HeadMixingArgs.K_RANKS),
    )
    size, count = simd.compute_itemsize(form), min(KEY_TILE_SIZE, S - begin)
    for n in range(3):
        rows = ranks * H if n == 0 else ranks * OUT if n == 1 else load_arg(table, HeadMixingArgs.NUM_KEY_GATES)
        to = load_arg(table, HeadMixingArgs.D_K_SOURCE + n) + size * (b * rows * S + begin)
        copy_rows(form, (to, size * S), (source, size * KEY_TILE_SIZE), rows, count)
        source += size * KEY_TILE_SIZE * rows


@njit
def compose_key_vector(form, table, row, desk):
    """Compute all output heads for one query and 16 keys."""
    size, step = simd.compute_itemsize(form), simd.compute_itemsize(form) * KEY_TILE_SIZE
    H, OUT, ranks, held = (
        load_arg(table, HeadMixingArgs.H),
        load_arg(table, HeadMixingArgs.NUM_OUTPUT_HEADS),
        load_arg(table, HeadMixingArgs.Q_RANKS),
        load_arg(table, HeadMixingArgs.K_RANKS),
    )
    gate = load_arg(table, HeadMixingArgs.Q_GATE) + size * row * OUT
    source, target = (
        load_arg(table, HeadMixingArgs.Q_SOURCE) + size * row * ranks * H,
        load_arg(table, HeadMixingArgs.Q_TARGET) + size * row * ranks * OUT,
    )
    x, y, of_source = desk
    of_target, of_gate = of_source + step * held * H, of_source + step * held * (H + OUT)
    for o in range(OUT):
        a = load_vector(form, x + step * load_int64(load_arg(table, HeadMixingArgs.HEAD_OF_OUTPUT) + 8 * o))
        factor = splat(load_scalar(form, gate + size * o))
        if load_arg(table, HeadMixingArgs.NUM_KEY_GATES):
            factor = vec_add(factor, load_vector(form, of_gate + step * o))
        store_value(y + step * o, vec_mul(a, factor))
    for n in range(H // load_arg(table, HeadMixingArgs.HEADS_PER_GROUP)):
        first, last, begin, end = head_group_bounds(table, n)
        for r in range(ranks):
            a = dot_with_scalars(form, x, source + size * r * H, first, last)
            for o in range(begin, end):
                accumulate_product(form, y + step * o, a, splat(load_scalar(form, target + size * (r * OUT + o))))
        for r in range(held):
            a = dot_with_vectors(form, x, of_source + step * r * H, first, last)
            for o in range(begin, end):
                accumulate_product(form, y + step * o, a, load_vector(form, of_target + step * (r * OUT + o)))


@extending.register_jitable
def head_mixing_forward(form, table, unit, desk):
    """Forward kernel: one tile of keys of one batch row."""
    size, step = simd.compute_itemsize(form), simd.compute_itemsize(form) * KEY_TILE_SIZE
    H, OUT, T, S = (
        load_arg(table, HeadMixingArgs.H),
        load_arg(table, HeadMixingArgs.NUM_OUTPUT_HEADS),
        load_arg(table, HeadMixingArgs.T),
        load_arg(table, HeadMixingArgs.S),
    )
    tiles = -(-S // KEY_TILE_SIZE)
    b, begin = unit // tiles, unit % tiles * KEY_TILE_SIZE
    x, y, keys, count = desk, desk + step * H, desk + step * (H + OUT), min(KEY_TILE_SIZE, S - begin)
    load_key_factors(form, table, keys, b, begin)
    for t in range(T):
        given = load_arg(table, HeadMixingArgs.INPUT) + size * ((b * H * T + t) * S + begin)
        made = load_arg(table, HeadMixingArgs.OUTPUT) + size * ((b * OUT * T + t) * S + begin)
        copy_rows(form, (x, step), (given, size * T * S), H, count)
        prefetch_rows(form, given + size * S, size * T * S, H, count)
        prefetch_rows(form, made, size * T * S, OUT, count)
        for c in range(0, count, SIMD_WIDTH):
            compose_key_vector(form, table, b * T + t, (x + size * c, y + size * c, keys + size * c))
        copy_rows(form, (made, size * T * S), (y, step), OUT, count)


# --- Backward pass -------------------------------------------------------------------------------------


@njit
def backward_own_heads(form, table, row, desk):
    """Compute the gradients of the term a[own] * gate: of the heads and of both gates."""
    x, keys, d_x, d_keys, sums = desk
    size, step = simd.compute_itemsize(form), simd.compute_itemsize(form) * KEY_TILE_SIZE
    H, OUT, held = (
        load_arg(table, HeadMixingArgs.H),
        load_arg(table, HeadMixingArgs.NUM_OUTPUT_HEADS),
        load_arg(table, HeadMixingArgs.K_RANKS),
    )
    gate, g = load_arg(table, HeadMixingArgs.Q_GATE) + size * row * OUT, x + step * H
    of_gate, d_gate = keys + step * held * (H + OUT), d_keys + step * held * (H + OUT)
    for h in range(H):
        store_value(d_x + step * h, splat(simd.as_compute_scalar(form, 0)))
    for o in range(OUT):
        h = load_int64(load_arg(table, HeadMixingArgs.HEAD_OF_OUTPUT) + 8 * o)
        a, b, factor = (
            load_vector(form, x + step * h),
            load_vector(form, g + step * o),
            splat(load_scalar(form, gate + size * o)),
        )
        if load_arg(table, HeadMixingArgs.NUM_KEY_GATES):
            factor = vec_add(factor, load_vector(form, of_gate + step * o))
            accumulate_product(form, d_gate + step * o, a, b)
        accumulate_product(form, d_x + step * h, b, factor)
        accumulate_product(form, sums + size * SIMD_WIDTH * o, a, b)


@njit
def backward_query_ranks(form, table, row, heads, desk):
    """Compute the gradients of the query's low-rank term; those of its factors stay vectors, summed over keys later."""
    x, _, d_x, _, sums = desk
    size, step = simd.compute_itemsize(form), simd.compute_itemsize(form) * KEY_TILE_SIZE
    H, OUT, ranks = (
        load_arg(table, HeadMixingArgs.H),
        load_arg(table, HeadMixingArgs.NUM_OUTPUT_HEADS),
        load_arg(table, HeadMixingArgs.Q_RANKS),
    )
    first, last, begin, end = heads
    g = x + step * H
    for r in range(ranks):
        source = load_arg(table, HeadMixingArgs.Q_SOURCE) + size * (row * ranks + r) * H
        target = load_arg(table, HeadMixingArgs.Q_TARGET) + size * (row * ranks + r) * OUT
        a, back = dot_with_scalars(form, x, source, first, last), dot_with_scalars(form, g, target, begin, end)
        of_source = sums + size * SIMD_WIDTH * (OUT + r * H)
        of_target = sums + size * SIMD_WIDTH * (OUT + ranks * H + r * OUT)
        for o in range(begin, end):
            accumulate_product(form, of_target + size * SIMD_WIDTH * o, load_vector(form, g + step * o), a)
        for h in range(first, last):
            accumulate_product(form, d_x + step * h, back, splat(load_scalar(form, source + size * h)))
            accumulate_product(form, of_source + size * SIMD_WIDTH * h, load_vector(form, x + step * h), back)


@njit
def backward_key_ranks(form, table, heads, desk):
    """Compute the gradients of the keys' low-rank term."""
    x, keys, d_x, d_keys, _ = desk
    step = simd.compute_itemsize(form) * KEY_TILE_SIZE
    H, OUT, ranks = (
        load_arg(table, HeadMixingArgs.H),
        load_arg(table, HeadMixingArgs.NUM_OUTPUT_HEADS),
        load_arg(table, HeadMixingArgs.K_RANKS),
    )
    first, last, begin, end = heads
    g = x + step * H
    for r in range(ranks):
        at_source, at_target = step * r * H, step * (ranks * H + r * OUT)
        a = dot_with_vectors(form, x, keys + at_source, first, last)
        back = dot_with_vectors(form, g, keys + at_target, begin, end)
        for o in range(begin, end):
            accumulate_product(form, d_keys + at_target + step * o, load_vector(form, g + step * o), a)
        for h in range(first, last):
            accumulate_product(form, d_x + step * h, back, load_vector(form, keys + at_source + step * h))
            accumulate_product(form, d_keys + at_source + step * h, load_vector(form, x + step * h), back)


@njit
def sum_query_factor_grads(form, table, row, sums):
    """Reduce the vectors of gradients of one query's factors over the tile and store them."""
    size, vector = simd.compute_itemsize(form), simd.compute_itemsize(form) * SIMD_WIDTH
    H, OUT, ranks = (
        load_arg(table, HeadMixingArgs.H),
        load_arg(table, HeadMixingArgs.NUM_OUTPUT_HEADS),
        load_arg(table, HeadMixingArgs.Q_RANKS),
    )
    for n in range(OUT):
        store_value(
            load_arg(table, HeadMixingArgs.D_Q_GATE) + size * (row * OUT + n),
            reduce_sum(load_vector(form, sums + vector * n)),
        )
    for n in range(ranks * H):
        store_value(
            load_arg(table, HeadMixingArgs.D_Q_SOURCE) + size * (row * ranks * H + n),
            reduce_sum(load_vector(form, sums + vector * (OUT + n))),
        )
    sums += vector * (OUT + ranks * H)
    for n in range(ranks * OUT):
        store_value(
            load_arg(table, HeadMixingArgs.D_Q_TARGET) + size * (row * ranks * OUT + n),
            reduce_sum(load_vector(form, sums + vector * n)),
        )


@njit
def backward_query(form, table, b, t, begin, desk):
    """Compute all gradients between one query and a tile of keys."""
    x, keys, d_x, d_keys, sums = desk
    size, step = simd.compute_itemsize(form), simd.compute_itemsize(form) * KEY_TILE_SIZE
    H, OUT, T, S = (
        load_arg(table, HeadMixingArgs.H),
        load_arg(table, HeadMixingArgs.NUM_OUTPUT_HEADS),
        load_arg(table, HeadMixingArgs.T),
        load_arg(table, HeadMixingArgs.S),
    )
    at, count, apart = size * ((b * H * T + t) * S + begin), min(KEY_TILE_SIZE, S - begin), size * T * S
    grad = load_arg(table, HeadMixingArgs.GRAD) + size * ((b * OUT * T + t) * S + begin)
    copy_rows(form, (x, step), (load_arg(table, HeadMixingArgs.INPUT) + at, apart), H, count)
    copy_rows(form, (x + step * H, step), (grad, apart), OUT, count)
    prefetch_rows(form, load_arg(table, HeadMixingArgs.INPUT) + at + size * S, apart, H, count)
    prefetch_rows(form, grad + size * S, apart, OUT, count)
    prefetch_rows(form, load_arg(table, HeadMixingArgs.OUTPUT) + at, apart, H, count)
    clear_memory(form, sums, SIMD_WIDTH * (OUT + load_arg(table, HeadMixingArgs.Q_RANKS) * (H + OUT)))
    for c in range(0, count, SIMD_WIDTH):
        here = (x + size * c, keys + size * c, d_x + size * c, d_keys + size * c, sums)
        backward_own_heads(form, table, b * T + t, here)
        for n in range(H // load_arg(table, HeadMixingArgs.HEADS_PER_GROUP)):
            heads = head_group_bounds(table, n)
            backward_query_ranks(form, table, b * T + t, heads, here)
            backward_key_ranks(form, table, heads, here)
    copy_rows(form, (load_arg(table, HeadMixingArgs.OUTPUT) + at, apart), (d_x, step), H, count)
    tile, tiles = begin // KEY_TILE_SIZE, -(-S // KEY_TILE_SIZE)
    sum_query_factor_grads(form, table, (b * tiles + tile) * T + t, sums)


@extending.register_jitable
def head_mixing_backward(form, table, unit, desk):
    """Backward kernel: one tile of keys of one batch row."""
    step = simd.compute_itemsize(form) * KEY_TILE_SIZE
    H, OUT, held = (
        load_arg(table, HeadMixingArgs.H),
        load_arg(table, HeadMixingArgs.NUM_OUTPUT_HEADS),
        load_arg(table, HeadMixingArgs.K_RANKS),
    )
    tiles, factors = (
        -(-load_arg(table, HeadMixingArgs.S) // KEY_TILE_SIZE),
        held * (H + OUT) + load_arg(table, HeadMixingArgs.NUM_KEY_GATES),
    )
    b, begin = unit // tiles, unit % tiles * KEY_TILE_SIZE
    x, keys = desk, desk + step * (H + OUT)
    d_x = keys + step * factors
    d_keys = d_x + step * H
    load_key_factors(form, table, keys, b, begin)
    clear_memory(form, d_keys, KEY_TILE_SIZE * factors)
    for t in range(load_arg(table, HeadMixingArgs.T)):
        backward_query(form, table, b, t, begin, (x, keys, d_x, d_keys, d_keys + step * factors))
    store_key_factor_grads(form, table, d_keys, b, begin)
