"""The gradients of heads that are composed, and all kernels of composition by name."""

from __future__ import annotations

from numba import extending, njit

from . import memory
from .compiled import NUMBERS, Units
from .composing import TILE, At, add, asked, by_key, by_query, clear, forward, group, handed, laid, lay
from .lanes import WIDE, plus, splat, total
from .memory import put, read, read_one, told, whole


@njit
def back_own(form, table, row, desk):
    """The gradients of heads as their own output heads', and of gates."""
    x, keys, d_x, d_keys, sums = desk
    size, step = memory.size(form), memory.size(form) * TILE
    H, OUT, held = told(table, At.H), told(table, At.OUT), told(table, At.K_RANKS)
    gate, g = told(table, At.Q_GATE) + size * row * OUT, x + step * H
    of_gate, d_gate = keys + step * held * (H + OUT), d_keys + step * held * (H + OUT)
    for h in range(H):
        put(d_x + step * h, splat(memory.number(form, 0)))
    for o in range(OUT):
        h = whole(told(table, At.OWN) + 8 * o)
        a, b, factor = read(form, x + step * h), read(form, g + step * o), splat(read_one(form, gate + size * o))
        if told(table, At.GATES):
            factor = plus(factor, read(form, of_gate + step * o))
            add(form, d_gate + step * o, a, b)
        add(form, d_x + step * h, b, factor)
        add(form, sums + size * WIDE * o, a, b)


@njit
def back_queries(form, table, row, heads, desk):
    """The gradients by way of the query's ranks; those of its factors as vectors, still to be summed."""
    x, _, d_x, _, sums = desk
    size, step = memory.size(form), memory.size(form) * TILE
    H, OUT, ranks = told(table, At.H), told(table, At.OUT), told(table, At.Q_RANKS)
    first, last, begin, end = heads
    g = x + step * H
    for r in range(ranks):
        source = told(table, At.Q_SOURCE) + size * (row * ranks + r) * H
        target = told(table, At.Q_TARGET) + size * (row * ranks + r) * OUT
        a, back = by_query(form, x, source, first, last), by_query(form, g, target, begin, end)
        of_source = sums + size * WIDE * (OUT + r * H)
        of_target = sums + size * WIDE * (OUT + ranks * H + r * OUT)
        for o in range(begin, end):
            add(form, of_target + size * WIDE * o, read(form, g + step * o), a)
        for h in range(first, last):
            add(form, d_x + step * h, back, splat(read_one(form, source + size * h)))
            add(form, of_source + size * WIDE * h, read(form, x + step * h), back)


@njit
def back_keys(form, table, heads, desk):
    """The gradients by way of the keys' ranks."""
    x, keys, d_x, d_keys, _ = desk
    step = memory.size(form) * TILE
    H, OUT, ranks = told(table, At.H), told(table, At.OUT), told(table, At.K_RANKS)
    first, last, begin, end = heads
    g = x + step * H
    for r in range(ranks):
        at_source, at_target = step * r * H, step * (ranks * H + r * OUT)
        a = by_key(form, x, keys + at_source, first, last)
        back = by_key(form, g, keys + at_target, begin, end)
        for o in range(begin, end):
            add(form, d_keys + at_target + step * o, read(form, g + step * o), a)
        for h in range(first, last):
            add(form, d_x + step * h, back, read(form, keys + at_source + step * h))
            add(form, d_keys + at_source + step * h, read(form, x + step * h), back)


@njit
def summed(form, table, row, sums):
    """The gradients of one query's factors over a tile, from the vectors of its sums."""
    size, vector = memory.size(form), memory.size(form) * WIDE
    H, OUT, ranks = told(table, At.H), told(table, At.OUT), told(table, At.Q_RANKS)
    for n in range(OUT):
        put(told(table, At.D_Q_GATE) + size * (row * OUT + n), total(read(form, sums + vector * n)))
    for n in range(ranks * H):
        put(told(table, At.D_Q_SOURCE) + size * (row * ranks * H + n), total(read(form, sums + vector * (OUT + n))))
    sums += vector * (OUT + ranks * H)
    for n in range(ranks * OUT):
        put(told(table, At.D_Q_TARGET) + size * (row * ranks * OUT + n), total(read(form, sums + vector * n)))


@njit
def back_query(form, table, b, t, begin, desk):
    """All gradients of one query's pairs with a tile of keys."""
    x, keys, d_x, d_keys, sums = desk
    size, step = memory.size(form), memory.size(form) * TILE
    H, OUT, T, S = told(table, At.H), told(table, At.OUT), told(table, At.T), told(table, At.S)
    at, count, apart = size * ((b * H * T + t) * S + begin), min(TILE, S - begin), size * T * S
    grad = told(table, At.GRAD) + size * ((b * OUT * T + t) * S + begin)
    lay(form, (x, step), (told(table, At.GIVEN) + at, apart), H, count)
    lay(form, (x + step * H, step), (grad, apart), OUT, count)
    asked(form, told(table, At.GIVEN) + at + size * S, apart, H, count)
    asked(form, grad + size * S, apart, OUT, count)
    asked(form, told(table, At.MADE) + at, apart, H, count)
    clear(form, sums, WIDE * (OUT + told(table, At.Q_RANKS) * (H + OUT)))
    for c in range(0, count, WIDE):
        here = (x + size * c, keys + size * c, d_x + size * c, d_keys + size * c, sums)
        back_own(form, table, b * T + t, here)
        for n in range(H // told(table, At.EACH)):
            heads = group(table, n)
            back_queries(form, table, b * T + t, heads, here)
            back_keys(form, table, heads, here)
    lay(form, (told(table, At.MADE) + at, apart), (d_x, step), H, count)
    tile, tiles = begin // TILE, -(-S // TILE)
    summed(form, table, (b * tiles + tile) * T + t, sums)


@extending.register_jitable
def backward(form, table, unit, desk):
    """A tile of keys of one row: lay out, go back, bring the gradients of keys home."""
    step = memory.size(form) * TILE
    H, OUT, held = told(table, At.H), told(table, At.OUT), told(table, At.K_RANKS)
    tiles, factors = -(-told(table, At.S) // TILE), held * (H + OUT) + told(table, At.GATES)
    b, begin = unit // tiles, unit % tiles * TILE
    x, keys = desk, desk + step * (H + OUT)
    d_x = keys + step * factors
    d_keys = d_x + step * H
    laid(form, table, keys, b, begin)
    clear(form, d_keys, TILE * factors)
    for t in range(told(table, At.T)):
        back_query(form, table, b, t, begin, (x, keys, d_x, d_keys, d_keys + step * factors))
    handed(form, table, d_keys, b, begin)


KERNELS = Units(NUMBERS, forward=forward, backward=backward)
