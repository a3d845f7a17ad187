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

from .blocks import NEXT, compare, gather
from .compiled import Kernels
from .lanes import WIDE, fma, splat, times, wide
from .memory import number, put, read, read_one, size, take, whole
from .planning import ENTRY, lay, plan, ready
from .scoring import biased, capped, scaled, weigh
from .together import blank, read_together
from .told import BLOCK, At

KINDS = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16", torch.int8: "int8"}


@njit
def read_alone(f, told, entry, following, desk):
    """Read keys for one row, block by block, while the next are fetched."""
    heads, this = whole(told + At.HEADS), whole(told + At.PLAN) + ENTRY * entry
    n, slot, left = whole(this + 16), whole(this + 24), whole(this + 32)
    row, step = whole(whole(told + At.ORDER) + 24 * whole(this)), size(f) * (wide(whole(told + At.VDIM)) + 2)
    number_ = whole(whole(told + At.ROWS) + 24 * row) + whole(this + 40)
    part = whole(told + At.PARTS) + number_ * heads * step
    q = whole(told + At.Q) + row * heads * size(f) * wide(whole(told + At.DIM))
    k_scale, v_scale = whole(told + At.K_SCALE), whole(told + At.V_SCALE)
    if whole(this + 48):
        blank(f, told, part)
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


@njit
def first(told, job):
    """What a job begins with, or -1 behind the last."""
    return whole(whole(told + At.JOBS) + 8 * job) if job < whole(told + At.COUNT) else -1


@extending.register_jitable
def work(f, told):
    """What every thread does: take a job, read what it says, until there are no more."""
    desk = whole(told + At.DESK) + take(told + At.THREAD) * whole(told + At.DESK_SIZE)
    table, order, this = whole(told + At.ROWS), whole(told + At.ORDER), take(told + At.NEXT)
    while this < whole(told + At.COUNT):
        following, entry, end = take(told + At.NEXT), first(told, this), whole(whole(told + At.JOBS) + 8 * this + 8)
        begin = whole(told + At.PLAN) + ENTRY * entry
        while entry < end:
            after = entry + 1 if entry + 1 < end else first(told, following)
            if whole(whole(told + At.PLAN) + ENTRY * entry + 8) > 1:
                read_together(f, told, entry, after, desk)
            else:
                read_alone(f, told, entry, after, desk)
            entry += 1
        for at in range(whole(begin), whole(begin) + whole(begin + 8)):
            row = whole(order + 24 * at)
            if take(table + 24 * row + 16) + 1 == whole(table + 24 * row + 8):
                join(f, told, row)
        this = following


KERNELS = Kernels(KINDS, plan=plan, work=work)
