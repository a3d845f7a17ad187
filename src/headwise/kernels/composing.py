"""Heads composed by factors of the query and of the key (2405.08553), in one pass over a block of scores.

Keys are taken in tiles, and a tile by one thread, which goes through the queries of its row: it lays the pairs of one
query with these keys on its desk, where also the keys' factors lie. Sixteen pairs of all heads are composed at a time, a
rank after the other. (Heads of a block lie so far apart, in powers of two, that they would drive each other out of the
cache.) What a tile adds to a query's factors stands apart, so that sums do not depend on threads.
"""

from __future__ import annotations

from enum import IntEnum, auto
from typing import Any

import torch
from numba import njit

from . import memory
from .arrays import Kernels, mark
from .lanes import WIDE, fma, plus, splat, times, total
from .memory import ahead, put, read, read_one, take, whole

TILE = 64
LINE = 64  # bytes that memory brings at once


class At(IntEnum):
    """Where each number lies in what a kernel is told: an array of int64. Addresses count bytes, sizes numbers."""

    NEXT = 0  # the next unit of work: a tile of keys of one row
    THREAD = auto()  # the next thread to begin
    UNITS = auto()
    Q_SOURCE = auto()  # [B, T, R, H]; of a side without factors there are no ranks
    Q_TARGET = auto()  # [B, T, R, O]
    Q_GATE = auto()  # [B, T, O]: what is left of a head's own, 1 + g
    K_SOURCE = auto()  # [B, R H, S]
    K_TARGET = auto()  # [B, R O, S]
    K_GATE = auto()  # [B, O, S]
    GIVEN = auto()  # [B, H, T, S]
    OWN = auto()  # [O], int64
    H = auto()
    O = auto()  # noqa: E741
    T = auto()
    S = auto()
    Q_RANKS = auto()
    K_RANKS = auto()
    GATES = auto()  # O, or 0 where keys have no factors
    EACH = auto()  # heads to a group
    DESK = auto()  # of all threads, and how many bytes each has
    DESK_SIZE = auto()
    MADE = auto()  # [B, O, T, S] forward, the gradient of what was given backward
    GRAD = auto()  # [B, O, T, S]
    D_Q_SOURCE = auto()  # those of queries once for each tile, [B, tiles, T, R, H]
    D_Q_TARGET = auto()
    D_Q_GATE = auto()
    D_K_SOURCE = auto()
    D_K_TARGET = auto()
    D_K_GATE = auto()


def desk(heads: int, out: int, q_ranks: int, k_ranks: int) -> int:
    """How many numbers a unit writes on: pairs and factors of keys, their gradients, sums of a query's factors."""
    return 2 * TILE * (heads + out + k_ranks * (heads + out) + out) + WIDE * (out + q_ranks * (heads + out))


@njit
def told(table, at):
    """The number that a kernel is told at this place."""
    return whole(table + 8 * at)


@njit
def clear(form, to, count):
    """So many zeros."""
    for n in range(0, count, WIDE):
        put(to + memory.size(form) * n, splat(memory.number(form, 0)))


@njit
def lay(form, to, to_step, source, step, rows, count):
    """Copy so many numbers of each row."""
    size = memory.size(form)
    for n in range(rows):
        for c in range(0, count, WIDE):
            put(to + to_step * n + size * c, read(form, source + step * n + size * c))


@njit
def asked(form, source, step, rows, count):
    """Ask for so many numbers of each row, which are soon read or written."""
    size = memory.size(form)
    for n in range(rows):
        for c in range(0, count * size, LINE):
            ahead(source + step * n + c)


@njit
def add(form, to, a, b):
    """Add a b to what lies there."""
    put(to, fma(a, b, read(form, to)))


@njit
def by_query(form, x, factor, first, last):
    """A sum over heads, by one number for each."""
    size, step = memory.size(form), memory.size(form) * TILE
    a = splat(memory.number(form, 0))
    for h in range(first, last):
        a = fma(read(form, x + step * h), splat(read_one(form, factor + size * h)), a)
    return a


@njit
def by_key(form, x, factor, first, last):
    """A sum over heads, by a number for each key."""
    step = memory.size(form) * TILE
    a = splat(memory.number(form, 0))
    for h in range(first, last):
        a = fma(read(form, x + step * h), read(form, factor + step * h), a)
    return a


@njit
def group(table, n):
    """The first and last heads of a group, and of its output heads: one that is alone has all of these."""
    each = told(table, At.EACH)
    first, last = n * each, (n + 1) * each
    return first, last, first, told(table, At.O) if each == told(table, At.H) else last


@njit
def laid(form, table, to, b, begin):
    """Lay the factors of a tile of keys on the desk."""
    H, O, S, ranks = told(table, At.H), told(table, At.O), told(table, At.S), told(table, At.K_RANKS)
    size, count = memory.size(form), min(TILE, S - begin)
    for n in range(3):
        rows = ranks * H if n == 0 else ranks * O if n == 1 else told(table, At.GATES)
        source = told(table, At.K_SOURCE + n) + size * (b * rows * S + begin)
        lay(form, to, size * TILE, source, size * S, rows, count)
        to += size * TILE * rows


@njit
def handed(form, table, source, b, begin):
    """Bring the gradients of a tile's factors from the desk to where they belong."""
    H, O, S, ranks = told(table, At.H), told(table, At.O), told(table, At.S), told(table, At.K_RANKS)
    size, count = memory.size(form), min(TILE, S - begin)
    for n in range(3):
        rows = ranks * H if n == 0 else ranks * O if n == 1 else told(table, At.GATES)
        to = told(table, At.D_K_SOURCE + n) + size * (b * rows * S + begin)
        lay(form, to, size * S, source, size * TILE, rows, count)
        source += size * TILE * rows


@njit
def compose(form, table, row, c, x, y, keys):
    """What sixteen pairs of all heads come to: of each output head's own, and of ranks."""
    size, step = memory.size(form), memory.size(form) * TILE
    H, O, ranks, held = told(table, At.H), told(table, At.O), told(table, At.Q_RANKS), told(table, At.K_RANKS)
    gate = told(table, At.Q_GATE) + size * row * O
    source, target = told(table, At.Q_SOURCE) + size * row * ranks * H, told(table, At.Q_TARGET) + size * row * ranks * O
    of_source, of_target, of_gate = keys + size * c, keys + size * c + step * held * H, keys + size * c + step * held * (H + O)
    x, y = x + size * c, y + size * c
    for o in range(O):
        a = read(form, x + step * whole(told(table, At.OWN) + 8 * o))
        factor = splat(read_one(form, gate + size * o))
        if told(table, At.GATES):
            factor = plus(factor, read(form, of_gate + step * o))
        put(y + step * o, times(a, factor))
    for n in range(H // told(table, At.EACH)):
        first, last, begin, end = group(table, n)
        for r in range(ranks):
            a = by_query(form, x, source + size * r * H, first, last)
            for o in range(begin, end):
                add(form, y + step * o, a, splat(read_one(form, target + size * (r * O + o))))
        for r in range(held):
            a = by_key(form, x, of_source + step * r * H, first, last)
            for o in range(begin, end):
                add(form, y + step * o, a, read(form, of_target + step * (r * O + o)))


@njit
def forward(form, table):
    """Unit by unit: lay out, compose, bring back."""
    size, step = memory.size(form), memory.size(form) * TILE
    H, O, T, S = told(table, At.H), told(table, At.O), told(table, At.T), told(table, At.S)
    tiles = -(-S // TILE)
    desk = told(table, At.DESK) + told(table, At.DESK_SIZE) * take(table + 8 * At.THREAD)
    unit = take(table)
    while unit < told(table, At.UNITS):
        b, begin = unit // tiles, unit % tiles * TILE
        x, y, keys, count = desk, desk + step * H, desk + step * (H + O), min(TILE, S - begin)
        laid(form, table, keys, b, begin)
        for t in range(T):
            given = told(table, At.GIVEN) + size * ((b * H * T + t) * S + begin)
            made = told(table, At.MADE) + size * ((b * O * T + t) * S + begin)
            lay(form, x, step, given, size * T * S, H, count)
            asked(form, given + size * S, size * T * S, H, count)
            asked(form, made, size * T * S, O, count)
            for c in range(0, count, WIDE):
                compose(form, table, b * T + t, c, x, y, keys)
            lay(form, made, size * T * S, y, step, O, count)
        unit = take(table)


@njit
def back_own(form, table, row, x, keys, d_x, d_keys, sums):
    """The gradients of heads as their own output heads', and of gates."""
    size, step = memory.size(form), memory.size(form) * TILE
    H, O, held = told(table, At.H), told(table, At.O), told(table, At.K_RANKS)
    gate, g = told(table, At.Q_GATE) + size * row * O, x + step * H
    of_gate, d_gate = keys + step * held * (H + O), d_keys + step * held * (H + O)
    for h in range(H):
        put(d_x + step * h, splat(memory.number(form, 0)))
    for o in range(O):
        h = whole(told(table, At.OWN) + 8 * o)
        a, b, factor = read(form, x + step * h), read(form, g + step * o), splat(read_one(form, gate + size * o))
        if told(table, At.GATES):
            factor = plus(factor, read(form, of_gate + step * o))
            add(form, d_gate + step * o, a, b)
        add(form, d_x + step * h, b, factor)
        add(form, sums + size * WIDE * o, a, b)


@njit
def back_queries(form, table, row, heads, x, d_x, sums):
    """The gradients by way of the query's ranks; those of its factors as vectors, still to be summed."""
    size, step = memory.size(form), memory.size(form) * TILE
    H, O, ranks = told(table, At.H), told(table, At.O), told(table, At.Q_RANKS)
    first, last, begin, end = heads
    g = x + step * H
    for r in range(ranks):
        source = told(table, At.Q_SOURCE) + size * (row * ranks + r) * H
        target = told(table, At.Q_TARGET) + size * (row * ranks + r) * O
        a, back = by_query(form, x, source, first, last), by_query(form, g, target, begin, end)
        of_source = sums + size * WIDE * (O + r * H)
        of_target = sums + size * WIDE * (O + ranks * H + r * O)
        for o in range(begin, end):
            add(form, of_target + size * WIDE * o, read(form, g + step * o), a)
        for h in range(first, last):
            add(form, d_x + step * h, back, splat(read_one(form, source + size * h)))
            add(form, of_source + size * WIDE * h, read(form, x + step * h), back)


@njit
def back_keys(form, table, heads, x, keys, d_x, d_keys):
    """The gradients by way of the keys' ranks."""
    step = memory.size(form) * TILE
    H, O, ranks = told(table, At.H), told(table, At.O), told(table, At.K_RANKS)
    first, last, begin, end = heads
    g = x + step * H
    for r in range(ranks):
        at_source, at_target = step * r * H, step * (ranks * H + r * O)
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
    H, O, ranks = told(table, At.H), told(table, At.O), told(table, At.Q_RANKS)
    for n in range(O):
        put(told(table, At.D_Q_GATE) + size * (row * O + n), total(read(form, sums + vector * n)))
    for n in range(ranks * H):
        put(told(table, At.D_Q_SOURCE) + size * (row * ranks * H + n), total(read(form, sums + vector * (O + n))))
    sums += vector * (O + ranks * H)
    for n in range(ranks * O):
        put(told(table, At.D_Q_TARGET) + size * (row * ranks * O + n), total(read(form, sums + vector * n)))


@njit
def back_query(form, table, b, t, begin, desk):
    """All gradients of one query's pairs with a tile of keys."""
    x, keys, d_x, d_keys, sums = desk
    size, step = memory.size(form), memory.size(form) * TILE
    H, O, T, S = told(table, At.H), told(table, At.O), told(table, At.T), told(table, At.S)
    at, count, apart = size * ((b * H * T + t) * S + begin), min(TILE, S - begin), size * T * S
    lay(form, x, step, told(table, At.GIVEN) + at, apart, H, count)
    lay(form, x + step * H, step, told(table, At.GRAD) + size * ((b * O * T + t) * S + begin), apart, O, count)
    asked(form, told(table, At.GIVEN) + at + size * S, apart, H, count)
    asked(form, told(table, At.GRAD) + size * ((b * O * T + t) * S + begin) + size * S, apart, O, count)
    asked(form, told(table, At.MADE) + at, apart, H, count)
    clear(form, sums, WIDE * (O + told(table, At.Q_RANKS) * (H + O)))
    for c in range(0, count, WIDE):
        on = size * c
        back_own(form, table, b * T + t, x + on, keys + on, d_x + on, d_keys + on, sums)
        for n in range(H // told(table, At.EACH)):
            heads = group(table, n)
            back_queries(form, table, b * T + t, heads, x + on, d_x + on, sums)
            back_keys(form, table, heads, x + on, keys + on, d_x + on, d_keys + on)
    lay(form, told(table, At.MADE) + at, apart, d_x, step, H, count)
    tile, tiles = begin // TILE, -(-S // TILE)
    summed(form, table, (b * tiles + tile) * T + t, sums)


@njit
def backward(form, table):
    """Unit by unit: lay out, go back, bring the gradients of keys home."""
    step = memory.size(form) * TILE
    H, O, held = told(table, At.H), told(table, At.O), told(table, At.K_RANKS)
    tiles, factors = -(-told(table, At.S) // TILE), held * (H + O) + told(table, At.GATES)
    desk = told(table, At.DESK) + told(table, At.DESK_SIZE) * take(table + 8 * At.THREAD)
    unit = take(table)
    while unit < told(table, At.UNITS):
        b, begin = unit // tiles, unit % tiles * TILE
        x, keys = desk, desk + step * (H + O)
        d_x = keys + step * factors
        d_keys = d_x + step * H
        laid(form, table, keys, b, begin)
        clear(form, d_keys, TILE * factors)
        for t in range(told(table, At.T)):
            back_query(form, table, b, t, begin, (x, keys, d_x, d_keys, d_keys + step * factors))
        handed(form, table, d_keys, b, begin)
        unit = take(table)


def _entries(source: int) -> dict[tuple[str, torch.dtype], Any]:
    """What is called from outside. `source` marks what all are made of: Numba keeps them by it."""

    def forward32(table):
        if source:
            forward(memory.float32(), table)

    def forward64(table):
        if source:
            forward(memory.float64(), table)

    def backward32(table):
        if source:
            backward(memory.float32(), table)

    def backward64(table):
        if source:
            backward(memory.float64(), table)

    single, double = torch.float32, torch.float64
    ways = {("forward", single): forward32, ("forward", double): forward64}
    return ways | {("backward", single): backward32, ("backward", double): backward64}


KERNELS = Kernels(_entries(mark()))
NUMBERS = (torch.float32, torch.float64)
