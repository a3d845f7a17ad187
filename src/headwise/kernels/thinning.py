"""The kernel of thin products: a few tokens meet the rows of matrices.

Rows are read as they lie, four beside each other, and handed out to threads in blocks; memory is asked for in the order
in which it lies, whichever row is read. Every thread lays tokens out for itself, in single precision. Every number is
summed up in one order, whatever stands beside it and whoever does it.
"""

from __future__ import annotations

from enum import IntEnum, auto

import torch
from numba import extending, njit

from .compiled import Kernels
from .lanes import WIDE, fma, splat, total
from .memory import evens, lies, load, number, odds, once, put, read, store, take, whole
from .told import LINE

KINDS = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
TILE = 4  # rows that are read at once, and tokens that they meet
STEP = 2 * WIDE  # numbers of a row that are read at once
AHEAD = 8192  # bytes before the next four rows are read memory is asked for them


class At(IntEnum):
    """The place of each number of what the kernel is told, as bytes from the start. Addresses count bytes."""

    def _generate_next_value_(name, start, count, last_values):
        return 8 * count

    NEXT = auto()  # counters: the next block, the next thread
    THREAD = auto()
    BLOCKS = auto()
    EACH = auto()  # rows of a matrix that a thread takes at once
    X = auto()  # [M, K]
    Y = auto()  # [M, rows of all matrices]
    DESK = auto()  # where threads lay out tokens, and how many bytes each has there
    DESK_SIZE = auto()
    TOKENS = auto()  # M
    WIDTH = auto()  # K
    ROWS = auto()  # of all matrices together
    TABLE = auto()  # for each matrix its address, and how many rows it has


@njit
def lay(f, told, desk):
    """Tokens side by side, [K / 32, M, 32] and what is left, [M, 16]: in the order in which rows meet them."""
    tokens, width, x = whole(told + At.TOKENS), whole(told + At.WIDTH), whole(told + At.X)
    full = width // STEP * STEP
    for m in range(tokens):
        own, to = x + lies(f) * width * m, desk + 2 * LINE * m
        for c in range(0, full, STEP):
            put(to, evens(f, own + lies(f) * c))
            put(to + LINE, odds(f, own + lies(f) * c))
            to += 2 * LINE * tokens
        if full < width:
            put(desk + 4 * full * tokens + LINE * m, load(f, own + lies(f) * full))


@njit
def met(part, x, a):
    """Sixteen numbers of each of four rows meet one token's."""
    return fma(part[0], x, a[0]), fma(part[1], x, a[1]), fma(part[2], x, a[2]), fma(part[3], x, a[3])


@njit
def here(f, w):
    """Thirty-two numbers of each of four rows, in two parts."""
    even = evens(f, w[0]), evens(f, w[1]), evens(f, w[2]), evens(f, w[3])
    return even, (odds(f, w[0]), odds(f, w[1]), odds(f, w[2]), odds(f, w[3]))


@njit
def rest(f, w):
    """Sixteen numbers of each of four rows, the last."""
    return load(f, w[0]), load(f, w[1]), load(f, w[2]), load(f, w[3])


@njit
def on(at, by):
    """Four addresses further on."""
    return at[0] + by, at[1] + by, at[2] + by, at[3] + by


@njit
def soon(f, at):
    """Ask for as much as four rows give at once."""
    for line in range(0, TILE * lies(f) * STEP, LINE):
        once(at + line)


@njit
def nothing(f):
    """Where sums begin."""
    zero = splat(number(f, 0.0))
    return zero, zero, zero, zero


@njit
def sums(f, y, a):
    """Write down what four rows make of a token."""
    store(f, y[0], total(a[0]))
    store(f, y[1], total(a[1]))
    store(f, y[2], total(a[2]))
    store(f, y[3], total(a[3]))


@njit
def one(f, w, x, y, shape, ask):
    """Four rows meet one token; `shape`: how wide they are, how far apart what they meet lies."""
    width, apart = shape
    a, by = nothing(f), lies(f) * STEP
    for _ in range(width // STEP):
        soon(f, ask)
        even, odd = here(f, w)
        a = met(odd, read(f, x + LINE), met(even, read(f, x), a))
        w, x, ask = on(w, by), x + apart, ask + TILE * by
    if width % STEP:
        a = met(rest(f, w), read(f, x), a)
    sums(f, y, a)


@njit
def four(f, w, x, y, shape, ask):
    """Four rows meet four tokens; `x` is where each of these begins, and where their last sixteen numbers are."""
    width, apart, step = shape
    a0, a1, a2, a3, by = nothing(f), nothing(f), nothing(f), nothing(f), lies(f) * STEP
    at, ends = x
    for _ in range(width // STEP):
        soon(f, ask)
        even, odd = here(f, w)
        a0, a1 = met(even, read(f, at[0]), a0), met(even, read(f, at[1]), a1)
        a2, a3 = met(even, read(f, at[2]), a2), met(even, read(f, at[3]), a3)
        a0, a1 = met(odd, read(f, at[0] + LINE), a0), met(odd, read(f, at[1] + LINE), a1)
        a2, a3 = met(odd, read(f, at[2] + LINE), a2), met(odd, read(f, at[3] + LINE), a3)
        w, at, ask = on(w, by), on(at, apart), ask + TILE * by
    if width % STEP:
        part = rest(f, w)
        a0, a1 = met(part, read(f, ends[0]), a0), met(part, read(f, ends[1]), a1)
        a2, a3 = met(part, read(f, ends[2]), a2), met(part, read(f, ends[3]), a3)
    sums(f, on(y, step[0]), a0)
    sums(f, on(y, step[1]), a1)
    sums(f, on(y, step[2]), a2)
    sums(f, on(y, step[3]), a3)


@njit
def neighbours(first, count, apart):
    """How far four of them lie from the beginning: from one on, and the last again where there are no more."""
    last = count - 1
    return (
        apart * min(first, last),
        apart * min(first + 1, last),
        apart * min(first + 2, last),
        apart * min(first + 3, last),
    )


@njit
def block(f, told, place, desk, after):
    """Some rows of one matrix meet all tokens; `after`: where the next rows lie."""
    w, rows, y = place
    tokens, width, step = whole(told + At.TOKENS), whole(told + At.WIDTH), lies(f) * whole(told + At.ROWS)
    line, apart, tail = lies(f) * width, 2 * LINE * tokens, desk + 4 * (width // STEP * STEP) * tokens
    for n in range(0, rows, TILE):
        own, to, ask = (
            on(neighbours(n, rows, line), w),
            on(neighbours(n, rows, lies(f)), y),
            w + line * (n + TILE) + AHEAD,
        )
        if ask >= w + line * rows:
            ask += after - w - line * rows
        if tokens == 1:
            one(f, own, desk, to, (width, apart), ask)
            continue
        for m in range(0, tokens, TILE):
            x = on(neighbours(m, tokens, 2 * LINE), desk), on(neighbours(m, tokens, LINE), tail)
            four(f, own, x, to, (width, apart, neighbours(m, tokens, step)), ask)


@njit
def find(f, told, this):
    """Where a block of rows lies, how many they are, and where their sums go."""
    table, before, rows, each = told + At.TABLE, 0, whole(told + At.TABLE + 8), whole(told + At.EACH)
    while this * each >= rows:
        this -= (rows + each - 1) // each
        before, table = before + rows, table + 16
        rows = whole(table + 8)
    first = this * each
    w, y = whole(table) + first * lies(f) * whole(told + At.WIDTH), whole(told + At.Y) + lies(f) * (before + first)
    return w, min(each, rows - first), y


@extending.register_jitable
def work(f, told):
    """What every thread does: take a block, read it, until there are no more."""
    desk = whole(told + At.DESK) + take(told + At.THREAD) * whole(told + At.DESK_SIZE)
    lay(f, told, desk)
    blocks, this = whole(told + At.BLOCKS), take(told + At.NEXT)
    while this < blocks:
        following, place = take(told + At.NEXT), find(f, told, this)
        block(f, told, place, desk, find(f, told, following)[0] if following < blocks else place[0])
        this = following


KERNELS = Kernels(KINDS, work=work)
