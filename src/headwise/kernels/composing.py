"""Heads composed by factors of the query and of the key (2405.08553), in one pass over a block of scores.

Keys are taken in tiles, and a tile by one thread, which goes through the queries of its row: it lays the pairs of one
query with these keys on its desk, beside the keys' factors, and composes sixteen pairs of all heads at a time, a rank
after another. (Heads of a block lie so far apart, in powers of two, that they would drive each other out of the cache.)
What a tile adds to a query's factors stands apart, so that sums do not depend on threads.
"""

from __future__ import annotations

from enum import IntEnum, auto

from numba import extending, njit

from . import memory
from .compiled import FIRST_KERNEL_ARG
from .lanes import SIMD_WIDTH, fma, vec_add, splat, vec_mul
from .memory import prefetch_l2, store_value, load_vector, load_scalar, load_arg, load_int64

KEY_TILE_SIZE = 64
CACHE_LINE_BYTES = 64  # bytes that memory brings at once


class HeadMixingArgs(IntEnum):
    """Where each number lies in what a kernel is told: an array of int64. Addresses count bytes, sizes numbers."""

    Q_SOURCE = FIRST_KERNEL_ARG  # [B, T, R, H]; of a side without factors there are no ranks
    Q_TARGET = auto()  # [B, T, R, O]
    Q_GATE = auto()  # [B, T, O]: what is left of a head's own, 1 + g
    K_SOURCE = auto()  # [B, R H, S]
    K_TARGET = auto()  # [B, R O, S]
    K_GATE = auto()  # [B, O, S]
    INPUT = auto()  # [B, H, T, S]
    HEAD_OF_OUTPUT = auto()  # [O], int64
    H = auto()
    NUM_OUTPUT_HEADS = auto()
    T = auto()
    S = auto()
    Q_RANKS = auto()
    K_RANKS = auto()
    NUM_KEY_GATES = auto()  # OUT, or 0 where keys have no factors
    HEADS_PER_GROUP = auto()  # heads to a group
    OUTPUT = auto()  # [B, O, T, S] forward, the gradient of what was given backward
    GRAD = auto()  # [B, O, T, S]
    D_Q_SOURCE = auto()  # those of queries once for each tile, [B, tiles, T, R, H]
    D_Q_TARGET = auto()
    D_Q_GATE = auto()
    D_K_SOURCE = auto()
    D_K_TARGET = auto()
    D_K_GATE = auto()


def head_mixing_scratch_size(heads: int, num_output_heads: int, q_ranks: int, k_ranks: int) -> int:
    """How many numbers a unit writes on: pairs and factors of keys, their gradients, sums of a query's factors."""
    return 2 * KEY_TILE_SIZE * (heads + num_output_heads + k_ranks * (heads + num_output_heads) + num_output_heads) + SIMD_WIDTH * (num_output_heads + q_ranks * (heads + num_output_heads))


@njit
def clear_memory(form, to, count):
    """So many zeros."""
    for n in range(0, count, SIMD_WIDTH):
        store_value(to + memory.compute_itemsize(form) * n, splat(memory.as_compute_scalar(form, 0)))


@njit
def copy_rows(form, to, source, rows, count):
    """Copy so many numbers of each row; of both the address of the first row, and the bytes to the next."""
    size, (to, to_step), (source, step) = memory.compute_itemsize(form), to, source
    for n in range(rows):
        for c in range(0, count, SIMD_WIDTH):
            store_value(to + to_step * n + size * c, load_vector(form, source + step * n + size * c))


@njit
def prefetch_rows(form, source, step, rows, count):
    """Ask for so many numbers of each row, which are soon read or written."""
    size = memory.compute_itemsize(form)
    for n in range(rows):
        for c in range(0, count * size, CACHE_LINE_BYTES):
            prefetch_l2(source + step * n + c)


@njit
def accumulate_product(form, to, a, b):
    """Add a b to what lies there."""
    store_value(to, fma(a, b, load_vector(form, to)))


@njit
def dot_with_scalars(form, x, factor, first, last):
    """A sum over heads, by one number for each."""
    size, step = memory.compute_itemsize(form), memory.compute_itemsize(form) * KEY_TILE_SIZE
    a = splat(memory.as_compute_scalar(form, 0))
    for h in range(first, last):
        a = fma(load_vector(form, x + step * h), splat(load_scalar(form, factor + size * h)), a)
    return a


@njit
def dot_with_vectors(form, x, factor, first, last):
    """A sum over heads, by a number for each key."""
    step = memory.compute_itemsize(form) * KEY_TILE_SIZE
    a = splat(memory.as_compute_scalar(form, 0))
    for h in range(first, last):
        a = fma(load_vector(form, x + step * h), load_vector(form, factor + step * h), a)
    return a


@njit
def head_group_bounds(table, n):
    """The first and last heads of a group, and of its output heads: one that is alone has all of these."""
    each = load_arg(table, HeadMixingArgs.HEADS_PER_GROUP)
    first, last = n * each, (n + 1) * each
    return first, last, first, load_arg(table, HeadMixingArgs.NUM_OUTPUT_HEADS) if each == load_arg(table, HeadMixingArgs.H) else last


@njit
def load_key_factors(form, table, to, b, begin):
    """Lay the factors of a tile of keys on the desk."""
    H, OUT, S, ranks = load_arg(table, HeadMixingArgs.H), load_arg(table, HeadMixingArgs.NUM_OUTPUT_HEADS), load_arg(table, HeadMixingArgs.S), load_arg(table, HeadMixingArgs.K_RANKS)
    size, count = memory.compute_itemsize(form), min(KEY_TILE_SIZE, S - begin)
    for n in range(3):
        rows = ranks * H if n == 0 else ranks * OUT if n == 1 else load_arg(table, HeadMixingArgs.NUM_KEY_GATES)
        source = load_arg(table, HeadMixingArgs.K_SOURCE + n) + size * (b * rows * S + begin)
        copy_rows(form, (to, size * KEY_TILE_SIZE), (source, size * S), rows, count)
        to += size * KEY_TILE_SIZE * rows


@njit
def store_key_factor_grads(form, table, source, b, begin):
    """Bring the gradients of a tile's factors from the desk to where they belong."""
    H, OUT, S, ranks = load_arg(table, HeadMixingArgs.H), load_arg(table, HeadMixingArgs.NUM_OUTPUT_HEADS), load_arg(table, HeadMixingArgs.S), load_arg(table, HeadMixingArgs.K_RANKS)
    size, count = memory.compute_itemsize(form), min(KEY_TILE_SIZE, S - begin)
    for n in range(3):
        rows = ranks * H if n == 0 else ranks * OUT if n == 1 else load_arg(table, HeadMixingArgs.NUM_KEY_GATES)
        to = load_arg(table, HeadMixingArgs.D_K_SOURCE + n) + size * (b * rows * S + begin)
        copy_rows(form, (to, size * S), (source, size * KEY_TILE_SIZE), rows, count)
        source += size * KEY_TILE_SIZE * rows


@njit
def compose_key_vector(form, table, row, desk):
    """What sixteen pairs of all heads come to: of each output head's own, and of ranks."""
    size, step = memory.compute_itemsize(form), memory.compute_itemsize(form) * KEY_TILE_SIZE
    H, OUT, ranks, held = load_arg(table, HeadMixingArgs.H), load_arg(table, HeadMixingArgs.NUM_OUTPUT_HEADS), load_arg(table, HeadMixingArgs.Q_RANKS), load_arg(table, HeadMixingArgs.K_RANKS)
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
    """A tile of keys of one row: lay out, compose, bring back."""
    size, step = memory.compute_itemsize(form), memory.compute_itemsize(form) * KEY_TILE_SIZE
    H, OUT, T, S = load_arg(table, HeadMixingArgs.H), load_arg(table, HeadMixingArgs.NUM_OUTPUT_HEADS), load_arg(table, HeadMixingArgs.T), load_arg(table, HeadMixingArgs.S)
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
