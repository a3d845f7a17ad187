"""One query of a row reads the keys of that row, wherever they lie: the kernel.

Keys of a row are cut into pieces; the pieces of all rows are handed out to threads one by one, so that a long row is
shared and a short one costs what it holds. A piece is read in blocks with an online softmax (1805.02867), all heads of
a block together, because their keys lie together; whoever finishes the last piece of a row joins them by their
log-sum-exp (Flash-Decoding, Dao and others, 2023). How keys are cut does not depend on threads, and so neither does
what comes out.
"""

from __future__ import annotations

import math

import torch
from numba import extending, njit

from .blocks import COLUMNS, KEYS, NEXT, SCALES, VALUES, compare, gather
from .compiled import Kernels
from .lanes import WIDE, fma, splat, times, wide
from .memory import number, put, read, read_one, size, take, whole
from .scoring import biased, capped, scaled, weigh
from .told import BLOCK, PIECE, At

KINDS = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16", torch.int8: "int8"}


@njit
def cut(told, row, n):
    """Note the pieces of one row from number n on, with where each begins; the number behind them."""
    entry, count, held = whole(told + At.PLAN), whole(told + At.SPAN_COUNT), 0
    span = whole(told + At.SPANS) + 24 * row * count
    put(entry + 32 * n + 24, 0)
    for index in range(count):
        slot, end = whole(span + 24 * index + 8), whole(span + 24 * index + 16)
        while slot < end:
            if held % PIECE == 0:
                this = entry + 32 * (n + held // PIECE)
                put(this + 8, index)
                put(this + 16, slot)
            step = min(end - slot, PIECE - held % PIECE)
            slot, held = slot + step, held + step
            put(entry + 32 * (n + (held - 1) // PIECE) + 24, (held - 1) % PIECE + 1)
    end = n + max(1, (held + PIECE - 1) // PIECE)
    for this in range(n, end):
        put(entry + 32 * this, row)
    return end


@extending.register_jitable
def plan(told):
    """Cut the keys of every row into pieces; a row without keys is one empty piece."""
    n, table = 0, whole(told + At.ROWS)
    for row in range(whole(told + At.BATCH)):
        end = cut(told, row, n)
        put(table + 24 * row, n)
        put(table + 24 * row + 8, end - n)
        put(table + 24 * row + 16, 0)
        n = end
    put(told + At.PIECES, n)
    put(told + At.NEXT, 0)
    put(told + At.THREAD, 0)


@njit
def lay(told, row, n, slot, desk, count):
    """The addresses of so many keys of a row from one slot on, of their values and scales, and their columns."""
    spans, page = whole(told + At.SPANS) + 24 * row * whole(told + At.SPAN_COUNT), whole(told + At.PAGE)
    k, v = whole(told + At.K), whole(told + At.V)
    k_page, v_page, s_page = whole(told + At.K_PAGE), whole(told + At.V_PAGE), whole(told + At.SCALE_PAGE)
    k_slot, v_slot, s_slot = whole(told + At.K_SLOT), whole(told + At.V_SLOT), whole(told + At.SCALE_SLOT)
    for i in range(count):
        while slot >= whole(spans + 24 * n + 16):
            n += 1
            slot = whole(spans + 24 * n + 8)
        held, to = whole(spans + 24 * n), desk + 8 * i
        put(to + KEYS, k + held * k_page + slot * k_slot)
        put(to + VALUES, v + held * v_page + slot * v_slot)
        put(to + SCALES, held * s_page + slot * s_slot)
        put(to + COLUMNS, n * page + slot)
        slot += 1
    return n, slot


@njit
def ready(told, this, desk):
    """Lay out the first block of a piece, where there is one, as that which comes next; how many keys it has."""
    if this >= whole(told + At.PIECES):
        return 0
    entry = whole(told + At.PLAN) + 32 * this
    count = min(whole(entry + 24), BLOCK)
    lay(told, whole(entry), whole(entry + 8), whole(entry + 16), desk + NEXT, count)
    return count


@njit
def piece(f, told, this, following, desk):
    """Read one piece, block by block, while the next is fetched; the row it belongs to."""
    heads, vdim = whole(told + At.HEADS), whole(told + At.VDIM)
    step, entry = size(f) * (wide(vdim) + 2), whole(told + At.PLAN) + 32 * this
    part = whole(told + At.PARTS) + this * heads * step
    for h in range(heads):
        for c in range(0, vdim, WIDE):
            put(part + step * h + size(f) * c, splat(number(f, 0.0)))
        put(part + step * (h + 1) - 2 * size(f), number(f, -math.inf))
        put(part + step * (h + 1) - size(f), number(f, 0.0))
    row, n, slot, left = whole(entry), whole(entry + 8), whole(entry + 16), whole(entry + 24)
    q = whole(told + At.Q) + row * heads * size(f) * wide(whole(told + At.DIM))
    k_scale, v_scale = whole(told + At.K_SCALE), whole(told + At.V_SCALE)
    while left > 0:
        count = min(left, BLOCK)
        n, slot = lay(told, row, n, slot, desk, count)
        left -= count
        if left > 0:
            after = min(left, BLOCK)
            lay(told, row, n, slot, desk + NEXT, after)
        else:
            after = ready(told, following, desk)
        compare(f, told, q, desk, count)
        if k_scale:
            scaled(f, told, k_scale, desk, count)
        if whole(told + At.CAP):
            capped(f, told, desk, count)
        if whole(told + At.BIAS):
            biased(f, told, row, desk, count)
        weigh(f, told, desk, part, count)
        if v_scale:
            scaled(f, told, v_scale, desk, count)
        gather(f, told, desk, part, count, after)
    return row


@njit
def finite(f, top):
    """What scores are measured from: their largest, or 0 where all are -inf."""
    return top if top > number(f, -math.inf) else number(f, 0.0)


@njit
def summed(f, part, way, over):
    """Sixteen channels of all pieces, each by its share."""
    (apart, count, share), a = way, splat(number(f, 0.0))
    for n in range(count):
        a = fma(read(f, part + n * apart), splat(read_one(f, part + n * apart + share)), a)
    return times(a, splat(over))


@njit
def deliver(f, to, a, left, scratch):
    """Write sixteen channels, or as many as are left, by way of sixteen numbers that nobody needs any more."""
    if left >= WIDE:
        put(to, a)
        return
    put(scratch, a)
    for d in range(left):
        put(to + size(f) * d, read_one(f, scratch + size(f) * d))


@njit
def join(f, told, row):
    """What all pieces of a row read, by their shares of the whole; and how much there was to read."""
    heads, vdim, b = whole(told + At.HEADS), whole(told + At.VDIM), size(f)
    step, table, lowest = b * (wide(vdim) + 2), whole(told + At.ROWS) + 24 * row, number(f, -math.inf)
    first, count, sink = whole(table), whole(table + 8), whole(told + At.SINK)
    for h in range(heads):
        part, apart = whole(told + At.PARTS) + (first * heads + h) * step, heads * step
        top, own = lowest, number(f, 0.0)
        for n in range(count):
            top = max(top, read_one(f, part + n * apart + step - 2 * b))
        for n in range(count):
            ends = part + n * apart + step - 2 * b
            own += read_one(f, ends + b) * number(f, math.exp(read_one(f, ends) - finite(f, top)))
        put(whole(told + At.LSE) + (row * heads + h) * b, number(f, math.log(own)) + finite(f, top))
        top = max(top, read_one(f, sink + b * h)) if sink else top
        base = finite(f, top)
        sums = number(f, math.exp(read_one(f, sink + b * h) - base)) if sink else number(f, 0.0)
        for n in range(count):
            ends = part + n * apart + step - 2 * b
            share = number(f, math.exp(read_one(f, ends) - base))
            sums += read_one(f, ends + b) * share
            put(ends, share)
        over = number(f, 1.0) / (sums if sums != 0 else number(f, 1.0))  # who may read nothing reads zero
        to = whole(told + At.OUT) + (row * heads + h) * b * vdim
        for c in range(0, vdim, WIDE):
            deliver(f, to + b * c, summed(f, part + b * c, (apart, count, step - 2 * b - b * c), over), vdim - c, part)


@extending.register_jitable
def work(f, told):
    """What every thread does: take a piece, read it, until there are no more."""
    desk = whole(told + At.DESK) + take(told + At.THREAD) * whole(told + At.DESK_SIZE)
    pieces, table, this = whole(told + At.PIECES), whole(told + At.ROWS), take(told + At.NEXT)
    while this < pieces:
        following = take(told + At.NEXT)
        row = piece(f, told, this, following, desk)
        if take(table + 24 * row + 16) + 1 == whole(table + 24 * row + 8):
            join(f, told, row)
        this = following


KERNELS = Kernels(KINDS, plan=plan, work=work)
