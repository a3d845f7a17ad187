"""Keys that several rows read, read once for all of them.

The heads of all these rows that share a key head stand side by side, [G, rows, heads of a group], as if they were those
of one row: their queries are laid so on the desk, and what they read is handed to each row afterwards, whose other
pieces it is joined with (Hydragen, 2402.05099). One head's keys of a block stay in near memory while all of these heads
are met, four and four.
"""

from __future__ import annotations

import math

from numba import njit

from .blocks import (
    KEYS,
    NEXT,
    SCORES,
    TOGETHER,
    VALUES,
    abreast,
    four_keys,
    head_compared,
    head_read,
    heads_compared,
    heads_read,
    shrink,
)  # fmt: skip
from .lanes import WIDE, splat, wide
from .memory import ahead, lies, number, put, read, read_one, size, whole
from .planning import ENTRY, lay, ready
from .scoring import capped, leant, scaled, weigh
from .told import BLOCK, LINE, At

FIELDS = len(At)


@njit
def asked(keys, held, walk, lines):
    """Ask for so many lines more of one head of some keys; how far that is."""
    (list_, count), (head, bytes_), (n, at) = keys, held, walk
    for _ in range(lines):
        if n < count:
            ahead(whole(list_ + 8 * n) + head + at)
            at += LINE
            if at >= bytes_:
                n, at = n + 1, 0
    return n, at


@njit
def paced(count, bytes_, each, keys):
    """How many lines to ask for at each step, so that one head of so many keys is there when all heads of a group have
    met so many others."""
    steps = (each + TOGETHER - 1) // TOGETHER * ((keys + TOGETHER - 1) // TOGETHER)
    return (count * ((bytes_ + LINE - 1) // LINE) + steps - 1) // steps


@njit
def compare_all(f, told, q, desk, count):
    """The scores of a block, a head of its keys after the other; on the way the next head is asked for, or the first of
    the values."""
    heads, groups, dim = whole(told + At.HEADS), whole(told + At.GROUPS), whole(told + At.DIM)
    each, apart, step, k_head = heads // groups, size(f) * BLOCK, size(f) * wide(dim), whole(told + At.K_HEAD)
    tail, h = desk + SCORES + size(f) * (heads * BLOCK + wide(heads)), 0
    walk = 0, 0
    while h < heads:
        g = h // each
        last, some, walk = g + 1 == groups, abreast((g + 1) * each - h), walk if h > g * each else (0, 0)
        coming = desk + (VALUES if last else KEYS), count
        held = 0 if last else (g + 1) * k_head, lies(f) * (whole(told + At.VDIM) if last else dim)
        lines = paced(count, held[1], each, count)
        for i in range(0, count, TOGETHER):
            walk = asked(coming, held, walk, lines)
            keys, to = four_keys(desk + KEYS + 8 * i, g * k_head), desk + SCORES + apart * h + size(f) * i
            bounds = dim, min(TOGETHER, count - i), some
            if some > 1:
                heads_compared(f, q + step * h, keys, bounds, tail, to)
            else:
                head_compared(f, q + step * h, keys, bounds, tail, to)
        h += some


@njit
def gather_all(f, told, desk, part, count, following):
    """What every head reads of the values of a block, a head of them after the other; the next head, or the first of
    those keys that follow, is asked for on the way."""
    heads, groups, dim = whole(told + At.HEADS), whole(told + At.GROUPS), whole(told + At.VDIM)
    each, apart, step, v_head = heads // groups, size(f) * BLOCK, size(f) * (wide(dim) + 2), whole(told + At.V_HEAD)
    factors, h = desk + SCORES + size(f) * heads * BLOCK, 0
    tail = factors + size(f) * wide(heads)
    shrink(f, told, factors, part)
    walk = 0, 0
    while h < heads:
        g = h // each
        last, some, walk = g + 1 == groups, abreast((g + 1) * each - h), walk if h > g * each else (0, 0)
        coming = desk + (NEXT + KEYS if last else VALUES), following if last else count
        held = 0 if last else (g + 1) * v_head, lies(f) * (whole(told + At.DIM) if last else dim)
        lines = paced(coming[1], held[1], each, count)
        for i in range(0, count, TOGETHER):
            walk = asked(coming, held, walk, lines)
            keys, scores = four_keys(desk + VALUES + 8 * i, g * v_head), desk + SCORES + apart * h + size(f) * i
            bounds = dim, min(TOGETHER, count - i), some
            if some > 1:
                heads_read(f, scores, keys, bounds, tail, (part + step * h, step))
            else:
                head_read(f, scores, keys, bounds, tail, part + step * h)
        h += some


@njit
def biased_all(f, told, at, desk, count):
    """Scores with what is added to those of each row; they have the same columns."""
    groups, key, order = whole(told + At.GROUPS), whole(told + At.BIAS_KEY), whole(told + At.ORDER) + 24 * at[0]
    each = whole(told + At.HEADS) // groups // at[1]
    for h in range(whole(told + At.HEADS)):
        row, head = whole(order + 24 * (h // each % at[1])), h // each // at[1] * each + h % each
        own = whole(told + At.BIAS) + row * whole(told + At.BIAS_ROW) + head * whole(told + At.BIAS_HEAD)
        leant(f, desk + SCORES + size(f) * BLOCK * h, own, key, desk, count)


@njit
def copied(f, to, of, count):
    """So many numbers, sixteen at once."""
    full = count // WIDE * WIDE
    for n in range(0, full, WIDE):
        put(to + size(f) * n, read(f, of + size(f) * n))
    for n in range(full, count):
        put(to + size(f) * n, read_one(f, of + size(f) * n))


@njit
def fetched(f, told, this, q, part):
    """Lay the queries of all rows side by side, and what they have read of this piece before."""
    heads, groups, dim = whole(told + At.HEADS), whole(told + At.GROUPS), wide(whole(told + At.DIM))
    order, rows, each = whole(told + At.ORDER) + 24 * whole(this), whole(this + 8), heads // groups
    held = wide(whole(told + At.VDIM)) + 2
    for m in range(rows):
        row = whole(order + 24 * m)
        first = whole(whole(told + At.ROWS) + 24 * row) + whole(this + 40)
        of = whole(told + At.PARTS) + first * heads * held * size(f)
        for g in range(groups):
            to, own = (g * rows + m) * each, whole(told + At.Q) + (row * heads + g * each) * dim * size(f)
            copied(f, q + to * dim * size(f), own, each * dim)
            if not whole(this + 48):
                copied(f, part + to * held * size(f), of + g * each * held * size(f), each * held)


@njit
def handed(f, told, this, part):
    """Give each row what it has read."""
    heads, groups, held = whole(told + At.HEADS), whole(told + At.GROUPS), wide(whole(told + At.VDIM)) + 2
    order, rows, each = whole(told + At.ORDER) + 24 * whole(this), whole(this + 8), heads // groups
    for m in range(rows):
        first = whole(whole(told + At.ROWS) + 24 * whole(order + 24 * m)) + whole(this + 40)
        to = whole(told + At.PARTS) + first * heads * held * size(f)
        for g in range(groups):
            copied(f, to + g * each * held * size(f), part + (g * rows + m) * each * held * size(f), each * held)


@njit
def blank(f, told, part):
    """Nothing read so far."""
    vdim = whole(told + At.VDIM)
    step = size(f) * (wide(vdim) + 2)
    for h in range(whole(told + At.HEADS)):
        for c in range(0, vdim, WIDE):
            put(part + step * h + size(f) * c, splat(number(f, 0.0)))
        put(part + step * (h + 1) - 2 * size(f), number(f, -math.inf))
        put(part + step * (h + 1) - size(f), number(f, 0.0))


@njit
def told_all(f, told, rows, desk):
    """Where on a desk queries lie, what is read, and what a kernel is told of all rows as of one."""
    heads = rows * whole(told + At.HEADS)
    q = desk + SCORES + size(f) * (heads * BLOCK + wide(heads) + WIDE)
    part = q + size(f) * heads * wide(whole(told + At.DIM))
    own = (part + size(f) * heads * (wide(whole(told + At.VDIM)) + 2) + 7) // 8 * 8
    for n in range(FIELDS):
        put(own + 8 * n, whole(told + 8 * n))
    put(own + At.HEADS, heads)
    return q, part, own


@njit
def read_together(f, told, entry, following, desk):
    """Read keys for several rows, block by block, while the next are fetched."""
    this = whole(told + At.PLAN) + ENTRY * entry
    q, part, own = told_all(f, told, whole(this + 8), desk)
    at, n, slot, left = (whole(this), whole(this + 8)), whole(this + 16), whole(this + 24), whole(this + 32)
    row, k_scale, v_scale = (
        whole(whole(told + At.ORDER) + 24 * at[0]),
        whole(told + At.K_SCALE),
        whole(told + At.V_SCALE),
    )
    fetched(f, told, this, q, part)
    if whole(this + 48):
        blank(f, own, part)
    while left > 0:
        count = min(left, BLOCK)
        n, slot = lay(told, row, n, slot, desk, count)
        left -= count
        if left > 0:
            after = min(left, BLOCK)
            lay(told, row, n, slot, desk + NEXT, after)
        else:
            after = ready(told, following, desk)
        compare_all(f, own, q, desk, count)
        if k_scale:
            scaled(f, own, k_scale, desk, count)
        if whole(told + At.CAP):
            capped(f, own, desk, count)
        if whole(told + At.BIAS):
            biased_all(f, own, at, desk, count)
        weigh(f, own, desk, part, count)
        if v_scale:
            scaled(f, own, v_scale, desk, count)
        gather_all(f, own, desk, part, count, after)
    handed(f, told, this, part)
