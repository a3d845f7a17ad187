"""One query of a row reads the keys of that row, wherever they lie: the kernel.

Keys of a row are cut into pieces; the pieces of all rows are handed out to threads one by one, so that a long row is
shared and a short one costs what it holds. A piece is read in blocks with an online softmax (1805.02867), all heads of a
block together, because their keys lie together; whoever finishes the last piece of a row joins them by their log-sum-exp
(Flash-Decoding, Dao and others, 2023). How keys are cut does not depend on threads, and so neither does what comes out.
"""

from __future__ import annotations

import math
from hashlib import sha256
from pathlib import Path
from typing import Any

from numba import cfunc, njit, types

from . import lanes
from .blocks import COLUMNS, KEYS, SCALES, SCORES, VALUES, altered, compare, gather, scaled, weigh, wide
from .lanes import WIDE, number, put, read_one, size, splat, take, whole
from .told import BLOCK, PIECE, At

ENTRY = types.void(types.int64)


@njit
def plan(told):
    """Cut the keys of every row into pieces; a row without keys is one empty piece."""
    entry, n, table = whole(told + At.PLAN), 0, whole(told + At.ROWS)
    for row in range(whole(told + At.BATCH)):
        first, end = n, whole(told + At.SPAN_COUNT)
        span, held = whole(told + At.SPANS) + 24 * row * end, 0
        for index in range(end):
            slot = whole(span + 24 * index + 8)
            while slot < whole(span + 24 * index + 16):
                if held == 0:
                    put(entry + 32 * n, row)
                    put(entry + 32 * n + 8, index)
                    put(entry + 32 * n + 16, slot)
                step = min(whole(span + 24 * index + 16) - slot, PIECE - held)
                slot, held = slot + step, held + step
                put(entry + 32 * n + 24, held)
                if held == PIECE:
                    n, held = n + 1, 0
        if held == 0 and n == first:
            put(entry + 32 * n, row)
            put(entry + 32 * n + 24, 0)
        n += int(held > 0 or n == first)
        put(table + 24 * row, first)
        put(table + 24 * row + 8, n - first)
        put(table + 24 * row + 16, 0)
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
def piece(f, told, this, desk):
    """Read one piece, block by block; the row it belongs to."""
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
    factors = desk + SCORES + size(f) * heads * BLOCK
    tail = factors + size(f) * wide(heads)
    k_scale, v_scale = whole(told + At.K_SCALE), whole(told + At.V_SCALE)
    while left > 0:
        count = min(left, BLOCK)
        n, slot = lay(told, row, n, slot, desk, count)
        compare(f, told, q, desk, count, tail)
        if k_scale:
            scaled(f, told, k_scale, desk, count)
        if whole(told + At.CAP) or whole(told + At.BIAS):
            altered(f, told, row, desk, count)
        weigh(f, told, desk, factors, part, count)
        if v_scale:
            scaled(f, told, v_scale, desk, count)
        gather(f, told, desk, factors, part, count, tail)
        left -= count
    return row


@njit
def join(f, told, row):
    """What all pieces of a row read, by their shares of the whole; and how much there was to read."""
    heads, vdim, b = whole(told + At.HEADS), whole(told + At.VDIM), size(f)
    step, table, lowest = b * (wide(vdim) + 2), whole(told + At.ROWS) + 24 * row, number(f, -math.inf)
    first, count, sink = whole(table), whole(table + 8), whole(told + At.SINK)
    for h in range(heads):
        part, apart = whole(told + At.PARTS) + (first * heads + h) * step, heads * step
        rest = read_one(f, sink + b * h) if sink else lowest
        top = rest
        for n in range(count):
            top = max(top, read_one(f, part + n * apart + step - 2 * b))
        base = top if top > lowest else number(f, 0.0)
        sums = number(f, math.exp(rest - base))
        for n in range(count):
            ends = part + n * apart + step - 2 * b
            share = number(f, math.exp(read_one(f, ends) - base))
            sums += read_one(f, ends + b) * share
            put(ends, share)
        over = number(f, 1.0) / (sums if sums != 0 else number(f, 1.0))  # who may read nothing reads zero
        to = whole(told + At.OUT) + (row * heads + h) * b * vdim
        for d in range(vdim):
            a = number(f, 0.0)
            for n in range(count):
                a += read_one(f, part + n * apart + b * d) * read_one(f, part + n * apart + step - 2 * b)
            put(to + b * d, a * over)
        put(whole(told + At.LSE) + (row * heads + h) * b, number(f, math.log(sums)) + base)


@njit
def work(f, told):
    """What every thread does: take a piece, read it, until there are no more."""
    desk = whole(told + At.DESK) + take(told + At.THREAD) * whole(told + At.DESK_SIZE)
    pieces, table, this = whole(told + At.PIECES), whole(told + At.ROWS), take(told + At.NEXT)
    while this < pieces:
        row = piece(f, told, this, desk)
        if take(table + 24 * row + 16) + 1 == whole(table + 24 * row + 8):
            join(f, told, row)
        this = take(told + At.NEXT)


def _entries(source: str) -> dict[str, Any]:
    """A C function for each form. Numba keeps what it compiles under their code and what they close over: `source`,
    a mark of all files that they are made of."""

    def plans(told):
        source  # noqa: B018
        plan(told)

    def float32(told):
        source  # noqa: B018
        work(lanes.float32(), told)

    def float64(told):
        source  # noqa: B018
        work(lanes.float64(), told)

    def bfloat16(told):
        source  # noqa: B018
        work(lanes.bfloat16(), told)

    def int8(told):
        source  # noqa: B018
        work(lanes.int8(), told)

    return {"plan": plans, "float32": float32, "float64": float64, "bfloat16": bfloat16, "int8": int8}


def _mark() -> str:
    return sha256(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))).hexdigest()


ENTRIES = _entries(_mark())
_compiled: dict[str, int] = {}


def entry(name: str) -> int:
    """The address of a kernel, compiled when it is first asked for and kept on disk where that can be."""
    if name not in _compiled:
        function = ENTRIES[name]
        try:
            made = cfunc(ENTRY, cache=True)(function)
        except RuntimeError:  # neither the package's folder nor the user's own can be written
            made = cfunc(ENTRY)(function)
        _kept.append(made)
        _compiled[name] = made.address
    return _compiled[name]


_kept: list[Any] = []
