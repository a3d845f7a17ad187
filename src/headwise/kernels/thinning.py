"""The kernel of thin products: a few tokens meet the rows of matrices.

Rows are read as they lie, one after the other, and handed out to threads in blocks. A long row is read in pieces, so
that what it meets stays near. Every number is summed up in one order, whatever stands beside it and whoever does it.
"""

from __future__ import annotations

from enum import IntEnum, auto
from typing import Any

from numba import njit

from . import memory
from .compiled import MARK, Kernels
from .lanes import WIDE, fma, plus, splat, total
from .memory import ahead, lies, load, number, put, read, read_one, take, whole
from .thin import KINDS
from .told import LINE

BLOCK = 64  # rows of a matrix that a thread takes at once
PIECE = 768  # numbers of a row that are read at once, at most
STEP = 4 * WIDE  # numbers that are read before it is asked whether there are more
AHEAD = 8192  # bytes before they are read memory is asked for them


class At(IntEnum):
    """The place of each number of what the kernel is told, as bytes from the start. Addresses count bytes."""

    def _generate_next_value_(name, start, count, last_values):
        return 8 * count

    NEXT = auto()  # a counter: the next block
    BLOCKS = auto()
    X = auto()  # [K / 16, M, 16], in single precision
    Y = auto()  # [M, rows of all matrices], in single precision, zeros
    TOKENS = auto()  # M
    WIDTH = auto()  # K
    ROWS = auto()  # of all matrices together
    TABLE = auto()  # for each matrix its address, and how many rows it has


@njit
def soon(f, at):
    """Ask for what is read some rows later."""
    for line in range(0, lies(f) * STEP, LINE):
        ahead(at + line)


@njit
def one(f, w, x, shape, y, next_):
    """A piece of a row meets one token; `shape`: how many numbers, how far apart; next_: how far on to ask, or 0."""
    count, apart = shape
    zero = splat(number(f, 0.0))
    a0, a1, a2, a3 = zero, zero, zero, zero
    end, full = w + lies(f) * count, w + lies(f) * (count // STEP * STEP)
    by = lies(f) * WIDE
    while w < full:
        if next_:
            soon(f, w + next_)
        a0, a1 = fma(load(f, w), read(f, x), a0), fma(load(f, w + by), read(f, x + apart), a1)
        a2 = fma(load(f, w + 2 * by), read(f, x + 2 * apart), a2)
        a3 = fma(load(f, w + 3 * by), read(f, x + 3 * apart), a3)
        w, x = w + 4 * by, x + 4 * apart
    while w < end:
        a0 = fma(load(f, w), read(f, x), a0)
        w, x = w + by, x + apart
    put(y, read_one(f, y) + total(plus(plus(a0, a1), plus(a2, a3))))


@njit
def met(f, w, x, a):
    """Sixteen numbers of a row meet four tokens."""
    part = load(f, w)
    a0, a1 = fma(part, read(f, x), a[0]), fma(part, read(f, x + LINE), a[1])
    return a0, a1, fma(part, read(f, x + 2 * LINE), a[2]), fma(part, read(f, x + 3 * LINE), a[3])


@njit
def four(f, w, x, shape, places, next_):
    """A piece of a row meets four tokens; `places`: where the sum of the first goes, and how far on the next."""
    count, apart = shape
    zero = splat(number(f, 0.0))
    a0 = a1 = a2 = a3 = (zero, zero, zero, zero)
    end, full = w + lies(f) * count, w + lies(f) * (count // STEP * STEP)
    by = lies(f) * WIDE
    while w < full:
        if next_:
            soon(f, w + next_)
        a0, a1 = met(f, w, x, a0), met(f, w + by, x + apart, a1)
        a2, a3 = met(f, w + 2 * by, x + 2 * apart, a2), met(f, w + 3 * by, x + 3 * apart, a3)
        w, x = w + 4 * by, x + 4 * apart
    while w < end:
        a0 = met(f, w, x, a0)
        w, x = w + by, x + apart
    y, step = places
    for m in range(4):
        put(y, read_one(f, y) + total(plus(plus(a0[m], a1[m]), plus(a2[m], a3[m]))))
        y += step


@njit
def piece(f, told, w, first, count, y):
    """Some columns of one row meet all tokens."""
    tokens, step = whole(told + At.TOKENS), 4 * whole(told + At.ROWS)
    m, x, apart, next_ = 0, whole(told + At.X) + 4 * first * tokens, LINE * tokens, AHEAD
    while m + 4 <= tokens:
        four(f, w, x + LINE * m, (count, apart), (y + m * step, step), next_)
        m, next_ = m + 4, 0
    while m < tokens:
        one(f, w, x + LINE * m, (count, apart), y + m * step, next_)
        m, next_ = m + 1, 0


@njit
def block(f, told, w, rows, y):
    """Some rows of one matrix meet all tokens."""
    width = whole(told + At.WIDTH)
    pieces = (width + PIECE - 1) // PIECE
    each = (width + pieces * STEP - 1) // (pieces * STEP) * STEP
    for first in range(0, width, each):
        count = min(each, width - first)
        for n in range(rows):
            piece(f, told, w + lies(f) * (n * width + first), first, count, y + 4 * n)


@njit
def work(f, told):
    """What every thread does: take a block, read it, until there are no more."""
    blocks, width, this = whole(told + At.BLOCKS), whole(told + At.WIDTH), take(told + At.NEXT)
    while this < blocks:
        table, left, before = told + At.TABLE, this, 0
        rows = whole(table + 8)
        while left * BLOCK >= rows:
            left -= (rows + BLOCK - 1) // BLOCK
            before, table = before + rows, table + 16
            rows = whole(table + 8)
        first = left * BLOCK
        w, y = whole(table) + first * lies(f) * width, whole(told + At.Y) + 4 * (before + first)
        block(f, told, w, min(BLOCK, rows - first), y)
        this = take(told + At.NEXT)


def _entry(kind: str, mark: int) -> Any:
    def entry(told):
        if mark:
            work(memory.form(kind), told)

    return entry


KERNELS = Kernels({dtype: _entry(kind, MARK) for dtype, kind in KINDS.items()})
