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
from .compiled import HEAD
from .lanes import WIDE, fma, plus, splat, times
from .memory import ahead, put, read, read_one, told, whole

TILE = 64
LINE = 64  # bytes that memory brings at once


class At(IntEnum):
    """Where each number lies in what a kernel is told: an array of int64. Addresses count bytes, sizes numbers."""

    Q_SOURCE = HEAD  # [B, T, R, H]; of a side without factors there are no ranks
    Q_TARGET = auto()  # [B, T, R, O]
    Q_GATE = auto()  # [B, T, O]: what is left of a head's own, 1 + g
    K_SOURCE = auto()  # [B, R H, S]
    K_TARGET = auto()  # [B, R O, S]
    K_GATE = auto()  # [B, O, S]
    GIVEN = auto()  # [B, H, T, S]
    OWN = auto()  # [O], int64
    H = auto()
    OUT = auto()
    T = auto()
    S = auto()
    Q_RANKS = auto()
    K_RANKS = auto()
    GATES = auto()  # OUT, or 0 where keys have no factors
    EACH = auto()  # heads to a group
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
def clear(form, to, count):
    """So many zeros."""
    for n in range(0, count, WIDE):
        put(to + memory.size(form) * n, splat(memory.number(form, 0)))


@njit
def lay(form, to, source, rows, count):
    """Copy so many numbers of each row; of both the address of the first row, and the bytes to the next."""
    size, (to, to_step), (source, step) = memory.size(form), to, source
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
    return first, last, first, told(table, At.OUT) if each == told(table, At.H) else last


@njit
def laid(form, table, to, b, begin):
    """Lay the factors of a tile of keys on the desk."""
    H, OUT, S, ranks = told(table, At.H), told(table, At.OUT), told(table, At.S), told(table, At.K_RANKS)
    size, count = memory.size(form), min(TILE, S - begin)
    for n in range(3):
        rows = ranks * H if n == 0 else ranks * OUT if n == 1 else told(table, At.GATES)
        source = told(table, At.K_SOURCE + n) + size * (b * rows * S + begin)
        lay(form, (to, size * TILE), (source, size * S), rows, count)
        to += size * TILE * rows


@njit
def handed(form, table, source, b, begin):
    """Bring the gradients of a tile's factors from the desk to where they belong."""
    H, OUT, S, ranks = told(table, At.H), told(table, At.OUT), told(table, At.S), told(table, At.K_RANKS)
    size, count = memory.size(form), min(TILE, S - begin)
    for n in range(3):
        rows = ranks * H if n == 0 else ranks * OUT if n == 1 else told(table, At.GATES)
        to = told(table, At.D_K_SOURCE + n) + size * (b * rows * S + begin)
        lay(form, (to, size * S), (source, size * TILE), rows, count)
        source += size * TILE * rows


@njit
def compose(form, table, row, desk):
    """What sixteen pairs of all heads come to: of each output head's own, and of ranks."""
    size, step = memory.size(form), memory.size(form) * TILE
    H, OUT, ranks, held = told(table, At.H), told(table, At.OUT), told(table, At.Q_RANKS), told(table, At.K_RANKS)
    gate = told(table, At.Q_GATE) + size * row * OUT
    source, target = (
        told(table, At.Q_SOURCE) + size * row * ranks * H,
        told(table, At.Q_TARGET) + size * row * ranks * OUT,
    )
    x, y, of_source = desk
    of_target, of_gate = of_source + step * held * H, of_source + step * held * (H + OUT)
    for o in range(OUT):
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
                add(form, y + step * o, a, splat(read_one(form, target + size * (r * OUT + o))))
        for r in range(held):
            a = by_key(form, x, of_source + step * r * H, first, last)
            for o in range(begin, end):
                add(form, y + step * o, a, read(form, of_target + step * (r * OUT + o)))


@extending.register_jitable
def forward(form, table, unit, desk):
    """A tile of keys of one row: lay out, compose, bring back."""
    size, step = memory.size(form), memory.size(form) * TILE
    H, OUT, T, S = told(table, At.H), told(table, At.OUT), told(table, At.T), told(table, At.S)
    tiles = -(-S // TILE)
    b, begin = unit // tiles, unit % tiles * TILE
    x, y, keys, count = desk, desk + step * H, desk + step * (H + OUT), min(TILE, S - begin)
    laid(form, table, keys, b, begin)
    for t in range(T):
        given = told(table, At.GIVEN) + size * ((b * H * T + t) * S + begin)
        made = told(table, At.MADE) + size * ((b * OUT * T + t) * S + begin)
        lay(form, (x, step), (given, size * T * S), H, count)
        asked(form, given + size * S, size * T * S, H, count)
        asked(form, made, size * T * S, OUT, count)
        for c in range(0, count, WIDE):
            compose(form, table, b * T + t, (x + size * c, y + size * c, keys + size * c))
        lay(form, (made, size * T * S), (y, step), OUT, count)
