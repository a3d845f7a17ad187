"""Scores of a block of keys, before their values are read: scales, a ceiling, what is added, and shares.

They lie on a desk as `blocks` lays them: [H, BLOCK], behind them a factor for each head.
"""

from __future__ import annotations

import math

from numba import njit

from .blocks import COLUMNS, SCALES, SCORES
from .lanes import WIDE, exp, larger, largest, minus, plus, splat, total, wide
from .memory import number, put, read, read_one, size, whole
from .told import BLOCK, At


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
def leant(f, x, own, key, desk, count):
    """Scores of one head with what is added to them; sixteen at once where columns follow each other."""
    first = whole(desk + COLUMNS)
    joined = key == size(f) and whole(desk + COLUMNS + 8 * count - 8) == first + count - 1
    full = count // WIDE * WIDE if joined else 0
    for i in range(0, full, WIDE):
        put(x + size(f) * i, plus(read(f, x + size(f) * i), read(f, own + size(f) * (first + i))))
    for i in range(full, count):
        more = read_one(f, own + whole(desk + COLUMNS + 8 * i) * key)
        put(x + size(f) * i, read_one(f, x + size(f) * i) + more)


@njit
def biased(f, told, row, desk, count):
    """Scores with what is added to them."""
    for h in range(whole(told + At.HEADS)):
        own = whole(told + At.BIAS) + row * whole(told + At.BIAS_ROW) + h * whole(told + At.BIAS_HEAD)
        leant(f, desk + SCORES + size(f) * BLOCK * h, own, whole(told + At.BIAS_KEY), desk, count)


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
