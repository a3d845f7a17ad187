"""The gradients of heads that are composed, and all kernels of composition by name."""

from __future__ import annotations

from numba import extending, njit

from . import memory
from .compiled import COMPUTE_DTYPES, ParallelKernelSet
from .composing import KEY_TILE_SIZE, HeadMixingArgs, accumulate_product, prefetch_rows, dot_with_vectors, dot_with_scalars, clear_memory, head_mixing_forward, head_group_bounds, store_key_factor_grads, load_key_factors, copy_rows
from .lanes import SIMD_WIDTH, vec_add, splat, reduce_sum
from .memory import store_value, load_vector, load_scalar, load_arg, load_int64


@njit
def backward_own_heads(form, table, row, desk):
    """The gradients of heads as their own output heads', and of gates."""
    x, keys, d_x, d_keys, sums = desk
    size, step = memory.compute_itemsize(form), memory.compute_itemsize(form) * KEY_TILE_SIZE
    H, OUT, held = load_arg(table, HeadMixingArgs.H), load_arg(table, HeadMixingArgs.NUM_OUTPUT_HEADS), load_arg(table, HeadMixingArgs.K_RANKS)
    gate, g = load_arg(table, HeadMixingArgs.Q_GATE) + size * row * OUT, x + step * H
    of_gate, d_gate = keys + step * held * (H + OUT), d_keys + step * held * (H + OUT)
    for h in range(H):
        store_value(d_x + step * h, splat(memory.as_compute_scalar(form, 0)))
    for o in range(OUT):
        h = load_int64(load_arg(table, HeadMixingArgs.HEAD_OF_OUTPUT) + 8 * o)
        a, b, factor = load_vector(form, x + step * h), load_vector(form, g + step * o), splat(load_scalar(form, gate + size * o))
        if load_arg(table, HeadMixingArgs.NUM_KEY_GATES):
            factor = vec_add(factor, load_vector(form, of_gate + step * o))
            accumulate_product(form, d_gate + step * o, a, b)
        accumulate_product(form, d_x + step * h, b, factor)
        accumulate_product(form, sums + size * SIMD_WIDTH * o, a, b)


@njit
def backward_query_ranks(form, table, row, heads, desk):
    """The gradients by way of the query's ranks; those of its factors as vectors, still to be summed."""
    x, _, d_x, _, sums = desk
    size, step = memory.compute_itemsize(form), memory.compute_itemsize(form) * KEY_TILE_SIZE
    H, OUT, ranks = load_arg(table, HeadMixingArgs.H), load_arg(table, HeadMixingArgs.NUM_OUTPUT_HEADS), load_arg(table, HeadMixingArgs.Q_RANKS)
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
    """The gradients by way of the keys' ranks."""
    x, keys, d_x, d_keys, _ = desk
    step = memory.compute_itemsize(form) * KEY_TILE_SIZE
    H, OUT, ranks = load_arg(table, HeadMixingArgs.H), load_arg(table, HeadMixingArgs.NUM_OUTPUT_HEADS), load_arg(table, HeadMixingArgs.K_RANKS)
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
    """The gradients of one query's factors over a tile, from the vectors of its sums."""
    size, vector = memory.compute_itemsize(form), memory.compute_itemsize(form) * SIMD_WIDTH
    H, OUT, ranks = load_arg(table, HeadMixingArgs.H), load_arg(table, HeadMixingArgs.NUM_OUTPUT_HEADS), load_arg(table, HeadMixingArgs.Q_RANKS)
    for n in range(OUT):
        store_value(load_arg(table, HeadMixingArgs.D_Q_GATE) + size * (row * OUT + n), reduce_sum(load_vector(form, sums + vector * n)))
    for n in range(ranks * H):
        store_value(load_arg(table, HeadMixingArgs.D_Q_SOURCE) + size * (row * ranks * H + n), reduce_sum(load_vector(form, sums + vector * (OUT + n))))
    sums += vector * (OUT + ranks * H)
    for n in range(ranks * OUT):
        store_value(load_arg(table, HeadMixingArgs.D_Q_TARGET) + size * (row * ranks * OUT + n), reduce_sum(load_vector(form, sums + vector * n)))


@njit
def backward_query(form, table, b, t, begin, desk):
    """All gradients of one query's pairs with a tile of keys."""
    x, keys, d_x, d_keys, sums = desk
    size, step = memory.compute_itemsize(form), memory.compute_itemsize(form) * KEY_TILE_SIZE
    H, OUT, T, S = load_arg(table, HeadMixingArgs.H), load_arg(table, HeadMixingArgs.NUM_OUTPUT_HEADS), load_arg(table, HeadMixingArgs.T), load_arg(table, HeadMixingArgs.S)
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
    """A tile of keys of one row: lay out, go back, bring the gradients of keys home."""
    step = memory.compute_itemsize(form) * KEY_TILE_SIZE
    H, OUT, held = load_arg(table, HeadMixingArgs.H), load_arg(table, HeadMixingArgs.NUM_OUTPUT_HEADS), load_arg(table, HeadMixingArgs.K_RANKS)
    tiles, factors = -(-load_arg(table, HeadMixingArgs.S) // KEY_TILE_SIZE), held * (H + OUT) + load_arg(table, HeadMixingArgs.NUM_KEY_GATES)
    b, begin = unit // tiles, unit % tiles * KEY_TILE_SIZE
    x, keys = desk, desk + step * (H + OUT)
    d_x = keys + step * factors
    d_keys = d_x + step * H
    load_key_factors(form, table, keys, b, begin)
    clear_memory(form, d_keys, KEY_TILE_SIZE * factors)
    for t in range(load_arg(table, HeadMixingArgs.T)):
        backward_query(form, table, b, t, begin, (x, keys, d_x, d_keys, d_keys + step * factors))
    store_key_factor_grads(form, table, d_keys, b, begin)


HEAD_MIXING_KERNELS = ParallelKernelSet(COMPUTE_DTYPES, forward=head_mixing_forward, backward=head_mixing_backward)
