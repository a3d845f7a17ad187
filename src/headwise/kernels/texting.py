"""Texts that lie one behind the other, each of which reads itself or a source of its own: the kernel.

A thread takes all queries and keys of one text and one key head at a time, which fit the nearest caches, and reads and
writes rows where they lie: texts are neither put into groups nor filled up. Scores are formed whole, and once more on
the way back. Every sum over channels, keys or queries is the same small product of matrices.
"""

from __future__ import annotations

import math
from enum import IntEnum, auto

from numba import extending, njit

from . import memory
from .compiled import HEAD, NUMBERS, Units
from .lanes import WIDE, exp, fma, larger, largest, minus, plus, splat, times, total, where_below, wide
from .memory import put, read, read_one, told, whole


class At(IntEnum):
    """Where each number lies in what a kernel is told: an array of int64. Addresses and steps count bytes."""

    TEXTS = HEAD  # [texts, 4]: the first query of each, how many there are, its first key, how many
    Q = auto()  # [tokens, groups x each, DIM], with the step to the next token and to the next head
    Q_TOKEN = auto()
    Q_HEAD = auto()
    K = auto()  # [tokens, groups, DIM]
    K_TOKEN = auto()
    K_HEAD = auto()
    V = auto()  # [tokens, groups, VDIM]
    V_TOKEN = auto()
    V_HEAD = auto()
    GROUPS = auto()
    EACH = auto()  # heads that read one key head
    DIM = auto()
    VDIM = auto()
    SCALE = auto()  # one number
    CAUSAL = auto()  # 1 where no key is read that is later than the query
    MADE = auto()  # [tokens, heads, VDIM] forward, the gradient of the queries backward
    GRAD = auto()  # [tokens, heads, VDIM]
    D_K = auto()  # [tokens, groups, DIM]
    D_V = auto()  # [tokens, groups, VDIM]


def desk(longest: int, dim: int, vdim: int) -> int:
    """How many numbers a unit writes on: places, keys and values by channel, weights and their gradients."""
    across = -(-longest // WIDE) * WIDE
    return WIDE + across * (dim + vdim + 2 * longest)


@njit
def begun(form, at, more):
    """What a sum begins with: what lies there, if more is added to it."""
    if more:
        return read(form, at)
    return splat(memory.number(form, 0))


@njit
def four_rows(form, to, a, b, sizes):
    """Four rows of a product, sixteen columns at a time."""
    (to, row), (a, apart, step), (b, along), (inner, width, more) = to, a, b, sizes
    for c in range(0, memory.size(form) * width, memory.size(form) * WIDE):
        x0, x1 = begun(form, to + c, more), begun(form, to + row + c, more)
        x2, x3 = begun(form, to + 2 * row + c, more), begun(form, to + 3 * row + c, more)
        for i in range(inner):
            y, at = read(form, b + along * i + c), a + step * i
            x0 = fma(y, splat(read_one(form, at)), x0)
            x1 = fma(y, splat(read_one(form, at + apart)), x1)
            x2 = fma(y, splat(read_one(form, at + 2 * apart)), x2)
            x3 = fma(y, splat(read_one(form, at + 3 * apart)), x3)
        put(to + c, x0)
        put(to + row + c, x1)
        put(to + 2 * row + c, x2)
        put(to + 3 * row + c, x3)


@njit
def one_row(form, to, a, b, sizes):
    """One row of a product."""
    (a, _, step), (b, along), (inner, width, more) = a, b, sizes
    for c in range(0, memory.size(form) * width, memory.size(form) * WIDE):
        x = begun(form, to[0] + c, more)
        for i in range(inner):
            x = fma(read(form, b + along * i + c), splat(read_one(form, a + step * i)), x)
        put(to[0] + c, x)


@njit
def product(form, to, a, b, rows, sizes):
    """to[r] = sum_i a[r, i] b[i], or so much more; of `to` and b the step to the next row, of a to the next r and i."""
    (to, row), (a, apart, step) = to, a
    r = 0
    while r + 4 <= rows:
        four_rows(form, (to + row * r, row), (a + apart * r, apart, step), b, sizes)
        r += 4
    while r < rows:
        one_row(form, (to + row * r, row), (a + apart * r, apart, step), b, sizes)
        r += 1


@njit
def turned(form, to, source, step, rows, width):
    """Rows as columns, and zeros behind the last of them."""
    size, across = memory.size(form), memory.size(form) * wide(rows)
    for c in range(width if rows else 0):
        put(to + across * (c + 1) - size * WIDE, splat(memory.number(form, 0)))
        for n in range(rows):
            put(to + across * c + size * n, read_one(form, source + step * n + size * c))


@njit
def weigh(form, table, x, places, queries, keys):
    """Products to weights: exp(scale x - top) over their sum, of keys that may be read."""
    size, across = memory.size(form), wide(keys)
    low, scale = memory.number(form, -math.inf), splat(read_one(form, told(table, At.SCALE)))
    place = read(form, places)
    for t in range(queries):
        count = min(t + 1, keys) if told(table, At.CAUSAL) else keys
        top, sums = splat(low), splat(memory.number(form, 0))
        for c in range(0, across, WIDE):
            left = splat(memory.number(form, count - c))
            s = where_below(place, left, times(read(form, x + size * c), scale), splat(low))
            put(x + size * c, s)
            top = larger(top, s)
        highest = largest(top)
        for c in range(0, across, WIDE):
            e = exp(minus(read(form, x + size * c), splat(highest)))
            put(x + size * c, e)
            sums = plus(sums, e)
        sum_ = total(sums)
        factor = splat(memory.number(form, 1) / sum_ if sum_ != 0 else memory.number(form, math.nan))
        for c in range(0, across, WIDE):
            put(x + size * c, times(read(form, x + size * c), factor))
        x += size * across


@njit
def back(form, table, w, d, queries, keys):
    """Gradients of weights to those of products: scale w (d - sum w d)."""
    size, across = memory.size(form), wide(keys)
    scale = splat(read_one(form, told(table, At.SCALE)))
    for n in range(queries):
        mean, at = splat(memory.number(form, 0)), size * across * n
        for c in range(at, at + size * across, size * WIDE):
            mean = fma(read(form, w + c), read(form, d + c), mean)
        mean = splat(total(mean))
        for c in range(at, at + size * across, size * WIDE):
            put(d + c, times(times(read(form, w + c), scale), minus(read(form, d + c), mean)))


@njit
def unit_of(table, unit):
    """The text and the key head of a unit: the first query, how many, the first key, how many, the head."""
    groups = told(table, At.GROUPS)
    text = told(table, At.TEXTS) + 32 * (unit // groups)
    return whole(text), whole(text + 8), whole(text + 16), whole(text + 24), unit % groups


@njit
def weights(form, table, q, desk, text):
    """The weights of all pairs of a text and one head, on the desk."""
    places, keys, w = desk
    _, queries, _, count, _ = text
    size, dim, across = memory.size(form), told(table, At.DIM), wide(count)
    a = (q, told(table, At.Q_TOKEN), size)
    product(form, (w, size * across), a, (keys, size * across), queries, (dim, across, 0))
    weigh(form, table, w, places, queries, count)


@extending.register_jitable
def forward(form, table, unit, places):
    """One text and the heads of one key head: compare, weigh, read."""
    size, dim, vdim = memory.size(form), told(table, At.DIM), told(table, At.VDIM)
    each, made = told(table, At.EACH), size * vdim * told(table, At.GROUPS) * told(table, At.EACH)
    laid(form, places)
    text = unit_of(table, unit)
    first, queries, begin, count, g = text
    keys, row = places + size * WIDE, size * wide(count)
    w = keys + row * dim
    k = told(table, At.K) + told(table, At.K_TOKEN) * begin + told(table, At.K_HEAD) * g
    v = told(table, At.V) + told(table, At.V_TOKEN) * begin + told(table, At.V_HEAD) * g
    turned(form, keys, k, told(table, At.K_TOKEN), count, dim)
    for h in range(g * each, (g + 1) * each if count else 0):
        q = told(table, At.Q) + told(table, At.Q_TOKEN) * first + told(table, At.Q_HEAD) * h
        to = told(table, At.MADE) + made * first + size * vdim * h
        weights(form, table, q, (places, keys, w), text)
        product(form, (to, made), (w, row, size), (v, told(table, At.V_TOKEN)), queries, (count, vdim, 0))


@njit
def laid(form, places):
    """The numbers from 0 on, of which each key of a vector has one."""
    for n in range(WIDE):
        put(places + memory.size(form) * n, memory.number(form, n))


@njit
def back_head(form, table, h, desk, text):
    """The gradients of one head of a text."""
    size, dim, vdim = memory.size(form), told(table, At.DIM), told(table, At.VDIM)
    places, keys, values = desk
    first, queries, begin, count, g = text
    row, groups, each = size * wide(count), told(table, At.GROUPS), told(table, At.EACH)
    w = values + row * vdim
    d, more = w + row * queries, int(h > g * each)
    q = told(table, At.Q) + told(table, At.Q_TOKEN) * first + told(table, At.Q_HEAD) * h
    k = told(table, At.K) + told(table, At.K_TOKEN) * begin + told(table, At.K_HEAD) * g
    step = size * vdim * groups * each
    grad = told(table, At.GRAD) + step * first + size * vdim * h
    weights(form, table, q, (places, keys, w), text)
    product(form, (d, row), (grad, step, size), (values, row), queries, (vdim, wide(count), 0))
    to = told(table, At.D_V) + size * vdim * (groups * begin + g)
    product(form, (to, size * vdim * groups), (w, size, row), (grad, step), count, (queries, vdim, more))
    back(form, table, w, d, queries, count)
    made = size * dim * groups * each
    to = told(table, At.MADE) + made * first + size * dim * h
    product(form, (to, made), (d, row, size), (k, told(table, At.K_TOKEN)), queries, (count, dim, 0))
    to = told(table, At.D_K) + size * dim * (groups * begin + g)
    product(form, (to, size * dim * groups), (d, size, row), (q, told(table, At.Q_TOKEN)), count, (queries, dim, more))


@extending.register_jitable
def backward(form, table, unit, places):
    """One text and the heads of one key head: the weights once more, and all gradients."""
    size, dim, vdim = memory.size(form), told(table, At.DIM), told(table, At.VDIM)
    each = told(table, At.EACH)
    laid(form, places)
    text = unit_of(table, unit)
    _, _, begin, count, g = text
    keys = places + size * WIDE
    values = keys + size * wide(count) * dim
    k = told(table, At.K) + told(table, At.K_TOKEN) * begin + told(table, At.K_HEAD) * g
    v = told(table, At.V) + told(table, At.V_TOKEN) * begin + told(table, At.V_HEAD) * g
    turned(form, keys, k, told(table, At.K_TOKEN), count, dim)
    turned(form, values, v, told(table, At.V_TOKEN), count, vdim)
    for h in range(g * each, (g + 1) * each if count else 0):
        back_head(form, table, h, (places, keys, values), text)


KERNELS = Units(NUMBERS, forward=forward, backward=backward)
