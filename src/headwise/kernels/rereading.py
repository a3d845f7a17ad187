"""The gradients of rows that read keys: scores are formed once more, from the log-sum-exp of each row (2205.14135).

A unit is all rows of one key head with a part of its keys, whose gradients are this unit's alone. What parts give to a
row stands apart, so that sums do not depend on threads.
"""

from __future__ import annotations

from numba import extending, njit

from . import memory
from .compiled import NUMBERS, Units
from .lanes import WIDE, exp, fma, minus, splat, times, total, wide
from .memory import put, read, read_one, told, whole
from .reading import ENDS, KEYS, At, barred, cleared, compare, forward, lying, scaled, turned
from .tiles import ROWS, SLACK, multiply


@njit
def rows_laid(f, table, unit, source, dim, to):
    """Lay the rows of a unit one below the other, in whole vectors, zeros for what is missing."""
    lines, count, size = told(table, At.LINES) + 8 * whole(unit + 8), whole(unit + 16), memory.size(f)
    cleared(f, to, ROWS * wide(dim))
    for r in range(count):
        row, here = source + size * dim * whole(lines + 8 * r), to + size * wide(dim) * r
        for c in range(0, dim // WIDE * WIDE, WIDE):
            put(here + size * c, read(f, row + size * c))
        for c in range(dim // WIDE * WIDE, dim):
            put(here + size * c, read_one(f, row + size * c))


@njit
def along(f, a, b, count):
    """The sum over so many numbers of the products of each two."""
    size, sums = memory.size(f), splat(memory.number(f, 0))
    for c in range(0, count // WIDE * WIDE, WIDE):
        sums = fma(read(f, a + size * c), read(f, b + size * c), sums)
    every = total(sums)
    for c in range(count // WIDE * WIDE, count):
        every += read_one(f, a + size * c) * read_one(f, b + size * c)
    return every


@njit
def known(f, table, unit, desk):
    """Lay each row's log-sum-exp, the product of what it read with its gradient, and the scale."""
    lines, count, size = told(table, At.LINES) + 8 * whole(unit + 8), whole(unit + 16), memory.size(f)
    to, vdim = desk + size * 2 * ROWS, told(table, At.VDIM)
    for r in range(ROWS):
        lse, both = memory.number(f, float("inf")), memory.number(f, 0)
        if r < count:
            line = whole(lines + 8 * r)
            lse, row = read_one(f, told(table, At.LSE) + size * line), size * vdim * line
            both = along(f, told(table, At.OUT) + row, told(table, At.GRAD) + row, vdim)
        put(to + size * r, lse)
        put(to + size * (ROWS + r), both)
        put(to + size * (2 * ROWS + r), read_one(f, table + 8 * At.SCALE))


@njit
def shares(f, scores, desk, count):
    """Scores as shares of what each row reads."""
    size = memory.size(f)
    step = size * ROWS
    for c in range(0, step, size * WIDE):
        lse = read(f, desk + 2 * step + c)
        for n in range(count):
            put(scores + step * n + c, exp(minus(read(f, scores + step * n + c), lse)))


@njit
def through(f, scores, grads, desk, count):
    """The gradients of scores from those of shares."""
    size = memory.size(f)
    step = size * ROWS
    for c in range(0, step, size * WIDE):
        total = read(f, desk + 3 * step + c)
        for n in range(count):
            here = step * n + c
            put(grads + here, times(read(f, scores + here), minus(read(f, grads + here), total)))


@njit
def few_keys(f, table, at, desk, span, bars):
    """What some neighbouring keys and all rows of the desk give each other."""
    (k, v, d_k, d_v), (start, count) = at, span
    size, dim, vdim = memory.size(f), told(table, At.DIM), told(table, At.VDIM)
    step, fours = size * ROWS, -(-count // 4) * 4
    q = desk + step * ENDS
    grad = q + step * (dim + SLACK)
    scores = grad + step * (vdim + SLACK)
    grads = scores + step * (KEYS + SLACK)
    d_q = grads + step * (KEYS + SLACK)
    q_rows = d_q + step * (dim + SLACK)
    grad_rows = q_rows + step * wide(dim)
    compare(f, table, k, q, scores, span)
    if bars:
        barred(f, scores, desk, start, fours)
    shares(f, scores, desk, fours)
    row = size * wide(vdim)
    multiply(f, (d_v + row * start, row), (scores, step, size), (grad_rows, row), (fours, wide(vdim), ROWS), True)
    values = v + told(table, At.V_KEY) * start, told(table, At.V_KEY), size
    multiply(f, (grads, step), values, (grad, step), (count, ROWS, vdim), False)
    through(f, scores, grads, desk, fours)
    keys = k + told(table, At.K_KEY) * start, size, told(table, At.K_KEY)
    multiply(f, (d_q, step), keys, (grads, step), (dim, ROWS, count), True)
    row = size * wide(dim)
    multiply(f, (d_k + row * start, row), (grads, step, size), (q_rows, row), (fours, wide(dim), ROWS), True)


@njit
def tile_back(f, table, at, unit, desk):
    """The gradients that up to sixty-four rows have and give."""
    size, dim, vdim = memory.size(f), told(table, At.DIM), told(table, At.VDIM)
    step = size * ROWS
    q = desk + step * ENDS
    grad = q + step * (dim + SLACK)
    d_q = grad + step * (vdim + SLACK) + 2 * step * (KEYS + SLACK)
    q_rows = d_q + step * (dim + SLACK)
    start, stop, inner, outer = lying(f, table, unit, desk)
    if start >= stop:
        return
    known(f, table, unit, desk)
    turned(f, table, unit, told(table, At.Q), dim, q)
    scaled(f, q, dim, desk + 4 * step)
    turned(f, table, unit, told(table, At.GRAD), vdim, grad)
    rows_laid(f, table, unit, told(table, At.Q), dim, q_rows)
    for n in range(0, step * wide(dim), size * WIDE):
        put(q_rows + n, times(read(f, q_rows + n), read(f, desk + 4 * step)))
    rows_laid(f, table, unit, told(table, At.GRAD), vdim, q_rows + step * wide(dim))
    cleared(f, d_q, ROWS * (dim + SLACK))
    start = start // 4 * 4  # parts of keys begin and end at fours, so that no row of another part is written
    while start < stop:
        count = min(KEYS, stop - start)
        few_keys(f, table, at, desk, (start, count), start < inner or start + -(-count // 4) * 4 > outer)
        start += count
    scaled(f, d_q, dim, desk + 4 * step)
    lines = told(table, At.LINES) + 8 * whole(unit + 8)
    for r in range(whole(unit + 16)):
        to = told(table, At.D_Q) + size * dim * (whole(unit + 40) * told(table, At.ALL) + whole(lines + 8 * r))
        for c in range(dim):
            put(to + size * c, read_one(f, d_q + size * (ROWS * c + r)))


@extending.register_jitable
def backward(f, table, number, desk):
    """All rows of a unit, sixty-four at a time."""
    unit = told(table, At.TOLD) + 48 * number
    size, dim, vdim, groups = memory.size(f), told(table, At.DIM), told(table, At.VDIM), told(table, At.GROUPS)
    own, each = whole(unit) // groups, whole(unit) % groups
    k = told(table, At.K) + own * told(table, At.K_ROW) + each * told(table, At.K_HEAD)
    v = told(table, At.V) + own * told(table, At.V_ROW) + each * told(table, At.V_HEAD)
    d_k = told(table, At.D_K) + size * wide(dim) * told(table, At.KEPT) * whole(unit)
    d_v = told(table, At.D_V) + size * wide(vdim) * told(table, At.KEPT) * whole(unit)
    first, last, here = whole(unit + 24), whole(unit + 32), desk
    last = told(table, At.KEPT) if last == told(table, At.S) else last
    cleared(f, d_k + size * wide(dim) * first, (last - first) * wide(dim))
    cleared(f, d_v + size * wide(vdim) * first, (last - first) * wide(vdim))
    for n in range(6):
        put(here + 8 * n, whole(unit + 8 * n))
    for start in range(0, whole(unit + 16), ROWS):
        put(here + 8, whole(unit + 8) + start)
        put(here + 16, min(ROWS, whole(unit + 16) - start))
        tile_back(f, table, (k, v, d_k, d_v), here, desk + size * ROWS)


KERNELS = Units(NUMBERS, forward=forward, backward=backward)
