"""A block of keys, read by one query of every head: scores, their shares, and what is read of the values.

`f` is the form in which keys lie in memory. A desk is what a thread writes on: addresses of the block's keys, of their
values and of their scales, their columns; the same of the next block; scores [H, BLOCK], factors [H] and one vector.
Memory is kept busy throughout: while keys are compared their values are asked for, and while values are read, the keys
of the next block.
"""

from __future__ import annotations

import math

from numba import njit

from .lanes import WIDE, exp, fma, larger, largest, minus, plus, splat, times, total
from .memory import ahead, lies, load, load_one, number, put, read, read_one, size, whole
from .told import BLOCK, LINE, At
from .told import wide as _wide

wide = njit(_wide)
KEYS, VALUES, SCALES, COLUMNS, NEXT = (8 * BLOCK * n for n in range(5))
SCORES = 2 * NEXT


@njit
def rest(f, address, count, desk):
    """The last numbers of a row, that do not fill a vector."""
    put(desk, splat(number(f, 0.0)))
    for n in range(count):
        put(desk + size(f) * n, load_one(f, address + lies(f) * n))
    return read(f, desk)


@njit
def dot(f, q, k, dim, tail):
    """The product of one key with one query."""
    a, full = splat(number(f, 0.0)), dim // WIDE * WIDE
    for c in range(0, full, WIDE):
        a = fma(load(f, k + lies(f) * c), read(f, q + size(f) * c), a)
    if full < dim:
        a = fma(rest(f, k + lies(f) * full, dim - full, tail), read(f, q + size(f) * full), a)
    return total(a)


@njit
def four_dots(f, q, k, dim, tail, to):
    """The products of one key with the queries of four heads."""
    a0 = a1 = a2 = a3 = splat(number(f, 0.0))
    full, apart, step = dim // WIDE * WIDE, size(f) * BLOCK, size(f) * wide(dim)
    q1, q2, q3 = q + step, q + 2 * step, q + 3 * step
    for c in range(0, full, WIDE):
        x, at = load(f, k + lies(f) * c), size(f) * c
        a0, a1 = fma(x, read(f, q + at), a0), fma(x, read(f, q1 + at), a1)
        a2, a3 = fma(x, read(f, q2 + at), a2), fma(x, read(f, q3 + at), a3)
    if full < dim:
        x, at = rest(f, k + lies(f) * full, dim - full, tail), size(f) * full
        a0, a1 = fma(x, read(f, q + at), a0), fma(x, read(f, q1 + at), a1)
        a2, a3 = fma(x, read(f, q2 + at), a2), fma(x, read(f, q3 + at), a3)
    put(to, total(a0))
    put(to + apart, total(a1))
    put(to + 2 * apart, total(a2))
    put(to + 3 * apart, total(a3))


@njit
def compare(f, told, q, desk, count):
    """The scores of a block, key by key as they lie in memory; values are asked for on the way."""
    heads, groups, dim = whole(told + At.HEADS), whole(told + At.GROUPS), whole(told + At.DIM)
    each, apart, step = heads // groups, size(f) * BLOCK, size(f) * wide(dim)
    k_head, v_head = whole(told + At.K_HEAD), whole(told + At.V_HEAD)
    held, tail = lies(f) * whole(told + At.VDIM), desk + SCORES + size(f) * (heads * BLOCK + wide(heads))
    for i in range(count):
        k, v, scores = whole(desk + KEYS + 8 * i), whole(desk + VALUES + 8 * i), desk + SCORES + size(f) * i
        for g in range(groups):
            for line in range(0, held, LINE):
                ahead(v + g * v_head + line)
            h, end = g * each, (g + 1) * each
            while h + 4 <= end:
                four_dots(f, q + step * h, k + g * k_head, dim, tail, scores + apart * h)
                h += 4
            while h < end:
                put(scores + apart * h, dot(f, q + step * h, k + g * k_head, dim, tail))
                h += 1


@njit
def scaled(f, told, scale, desk, count):
    """Numbers of a block times the scale of the keys, or values, that they belong to."""
    heads, groups, head = whole(told + At.HEADS), whole(told + At.GROUPS), whole(told + At.SCALE_HEAD)
    for h in range(heads):
        x, own = desk + SCORES + size(f) * BLOCK * h, scale + h // (heads // groups) * head
        for i in range(count):
            put(x + size(f) * i, read_one(f, x + size(f) * i) * read_one(f, own + whole(desk + SCALES + 8 * i)))


@njit
def capped(f, told, desk, count):
    """Scores with their ceiling."""
    cap = whole(told + At.CAP)
    for h in range(whole(told + At.HEADS)):
        x = desk + SCORES + size(f) * BLOCK * h
        for i in range(count):
            share = math.tanh(read_one(f, x + size(f) * i) / read_one(f, cap))
            put(x + size(f) * i, number(f, share) * read_one(f, cap))


@njit
def biased(f, told, row, desk, count):
    """Scores with what is added to them; sixteen at once where columns follow each other."""
    bias, key, first = whole(told + At.BIAS), whole(told + At.BIAS_KEY), whole(desk + COLUMNS)
    joined = key == size(f) and whole(desk + COLUMNS + 8 * count - 8) == first + count - 1
    full = count // WIDE * WIDE if joined else 0
    for h in range(whole(told + At.HEADS)):
        x = desk + SCORES + size(f) * BLOCK * h
        own = bias + row * whole(told + At.BIAS_ROW) + h * whole(told + At.BIAS_HEAD)
        for i in range(0, full, WIDE):
            put(x + size(f) * i, plus(read(f, x + size(f) * i), read(f, own + size(f) * (first + i))))
        for i in range(full, count):
            more = read_one(f, own + whole(desk + COLUMNS + 8 * i) * key)
            put(x + size(f) * i, read_one(f, x + size(f) * i) + more)


@njit
def weigh(f, told, desk, part, count):
    """Scores to shares of the largest so far, and by which factor what was read before shrinks."""
    factors = desk + SCORES + size(f) * whole(told + At.HEADS) * BLOCK
    step, lowest = size(f) * (wide(whole(told + At.VDIM)) + 2), number(f, -math.inf)
    for h in range(whole(told + At.HEADS)):
        x, ends = desk + SCORES + size(f) * BLOCK * h, part + step * (h + 1) - 2 * size(f)
        for i in range(count, wide(count)):
            put(x + size(f) * i, lowest)
        top = splat(lowest)
        for c in range(0, count, WIDE):
            top = larger(top, read(f, x + size(f) * c))
        old = read_one(f, ends)
        new = max(old, largest(top))
        base = new if new > lowest else number(f, 0.0)  # where all are -inf, each share is e^-inf
        factor, sums = number(f, math.exp(old - base)), splat(number(f, 0.0))
        for c in range(0, count, WIDE):
            e = exp(minus(read(f, x + size(f) * c), splat(base)))
            put(x + size(f) * c, e)
            sums = plus(sums, e)
        put(ends, new)
        put(ends + size(f), read_one(f, ends + size(f)) * factor + total(sums))
        put(factors + size(f) * h, factor)


@njit
def four(f, address):
    """Sixty-four channels of a value."""
    step = lies(f) * WIDE
    return load(f, address), load(f, address + step), load(f, address + 2 * step), load(f, address + 3 * step)


@njit
def added(x, share, a):
    """What was read, and a share of one value."""
    p = splat(share)
    return fma(x[0], p, a[0]), fma(x[1], p, a[1]), fma(x[2], p, a[2]), fma(x[3], p, a[3])


@njit
def begun(f, to, factor):
    """What was read before, shrunk."""
    p, step = splat(factor), size(f) * WIDE
    a, b = times(read(f, to), p), times(read(f, to + step), p)
    return a, b, times(read(f, to + 2 * step), p), times(read(f, to + 3 * step), p)


@njit
def kept(f, to, a):
    """Write down what is read so far."""
    step = size(f) * WIDE
    put(to, a[0])
    put(to + step, a[1])
    put(to + 2 * step, a[2])
    put(to + 3 * step, a[3])


@njit
def by_four(f, at, count, step, after):
    """Sixty-four channels of the values of a block, read by four heads; as many of the next keys are asked for."""
    values, offset, scores, factors, to = at
    apart, b = size(f) * BLOCK, size(f)
    a0, a1 = begun(f, to, read_one(f, factors)), begun(f, to + step, read_one(f, factors + b))
    a2 = begun(f, to + 2 * step, read_one(f, factors + 2 * b))
    a3 = begun(f, to + 3 * step, read_one(f, factors + 3 * b))
    for i in range(count):
        if after >= 0:
            for line in range(0, 4 * WIDE * lies(f), LINE):
                ahead(whole(values - VALUES + NEXT + 8 * i) + after + line)
        x, s = four(f, whole(values + 8 * i) + offset), scores + b * i
        a0, a1 = added(x, read_one(f, s), a0), added(x, read_one(f, s + apart), a1)
        a2, a3 = added(x, read_one(f, s + 2 * apart), a2), added(x, read_one(f, s + 3 * apart), a3)
    kept(f, to, a0)
    kept(f, to + step, a1)
    kept(f, to + 2 * step, a2)
    kept(f, to + 3 * step, a3)


@njit
def by_one(f, at, count):
    """Sixty-four channels of the values of a block, read by one head."""
    values, offset, scores, factors, to = at
    a = begun(f, to, read_one(f, factors))
    for i in range(count):
        a = added(four(f, whole(values + 8 * i) + offset), read_one(f, scores + size(f) * i), a)
    kept(f, to, a)


@njit
def by_bits(f, at, count, left, tail):
    """The last channels, fewer than sixty-four, read by one head."""
    values, offset, scores, factors, to = at
    for b in range(0, left, WIDE):
        a = times(read(f, to + size(f) * b), splat(read_one(f, factors)))
        for i in range(count):
            here = whole(values + 8 * i) + offset + lies(f) * b
            x = load(f, here) if b + WIDE <= left else rest(f, here, left - b, tail)
            a = fma(x, splat(read_one(f, scores + size(f) * i)), a)
        put(to + size(f) * b, a)


@njit
def channels(f, at, count, each, span):
    """Up to sixty-four channels of the values of a block, read by the heads of one group."""
    values, offset, scores, factors, to = at
    step, left, tail, after = span
    h = 0
    while h < each:
        here = values, offset, scores + size(f) * BLOCK * h, factors + size(f) * h, to + step * h
        if left >= 4 * WIDE and h + 4 <= each:
            by_four(f, here, count, step, after if h == 0 else -1)
            h += 3
        elif left >= 4 * WIDE:
            by_one(f, here, count)
        else:
            by_bits(f, here, count, left, tail)
        h += 1


@njit
def gather(f, told, desk, part, count, more):
    """What every head reads of the values of a block, added to what it has read before; `more` if a block follows."""
    heads, groups, vdim = whole(told + At.HEADS), whole(told + At.GROUPS), whole(told + At.VDIM)
    each, step, factors = heads // groups, size(f) * (wide(vdim) + 2), desk + SCORES + size(f) * heads * BLOCK
    tail = factors + size(f) * wide(heads)
    for g in range(groups):
        h = g * each
        scores, own, to = desk + SCORES + size(f) * BLOCK * h, factors + size(f) * h, part + step * h
        for c in range(0, vdim, 4 * WIDE):
            at = desk + VALUES, g * whole(told + At.V_HEAD) + lies(f) * c, scores, own, to + size(f) * c
            after = g * whole(told + At.K_HEAD) + lies(f) * c if c < whole(told + At.DIM) and more else -1
            channels(f, at, count, each, (step, vdim - c, tail, after))
