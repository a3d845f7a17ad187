"""A few tokens meet matrices: y = x W^T, where reading W is all that takes time.

Matrices are read as they lie, row by row, and what comes of a row does not depend on the tokens beside it, nor on how
many threads there are: every number is summed up in one order. Rows are handed out to threads in blocks; a long row is
read in pieces, so that what it meets stays near.
"""

from __future__ import annotations

from enum import IntEnum, auto
from typing import Any

from numba import cfunc, njit, types

from . import lanes
from .lanes import WIDE, ahead, fma, plus, put, splat, take, total, whole

LINE = 64  # bytes that memory brings at once
BLOCK = 64  # rows of a matrix that a thread takes at once
PIECE = int(__import__("os").environ.get("PC", "1536"))  # numbers of a row at most that are read at once: four tokens of as many stay in the first cache
AHEAD = 8192  # bytes before they are read memory is asked for them


class At(IntEnum):
    """Where each number lies in what the kernel is told: an array of int64. Addresses count bytes."""

    NEXT = 0  # a counter first: the next block
    BLOCKS = auto()
    X = auto()  # [K / 16, M, 16], in single precision: so tokens lie beside each other
    Y = auto()  # [M, all rows of all matrices], in single precision
    M = auto()
    K = auto()
    ROWS = auto()  # of all matrices together
    TABLE = auto()  # then for each matrix: its address, and how many rows it has


def built(kind: str) -> Any:
    """What every thread runs, for matrices that lie in memory as one kind of numbers."""
    size, lies = 4, lanes.SIZE[kind]
    load, _ = lanes.loader(kind)
    read, read_one = lanes.loader("float32")
    step = 4 * WIDE
    wide = lies * step

    @njit(inline="always")
    def soon(at):
        for line in range(0, wide, LINE):
            ahead(at + line)

    @njit(inline="always")
    def one(w, x, count, row, y, next_):
        """Piece of a row meets one token."""
        a0 = a1 = a2 = a3 = splat(types.float32(0.0))
        c, most = 0, count // step * step
        while c < most:
            at = w + lies * c
            soon(at + next_)
            a0, a1 = fma(load(at), read(x), a0), fma(load(at + lies * WIDE), read(x + row), a1)
            a2 = fma(load(at + 2 * lies * WIDE), read(x + 2 * row), a2)
            a3 = fma(load(at + 3 * lies * WIDE), read(x + 3 * row), a3)
            c, x = c + step, x + 4 * row
        while c < count:
            a0 = fma(load(w + lies * c), read(x), a0)
            c, x = c + WIDE, x + row
        put(y, read_one(y) + total(plus(plus(a0, a1), plus(a2, a3))))

    @njit(inline="always")
    def met(w, at, a):
        """Sixteen numbers of a row meet four tokens."""
        a0, a1 = fma(w, read(at), a[0]), fma(w, read(at + LINE), a[1])
        return a0, a1, fma(w, read(at + 2 * LINE), a[2]), fma(w, read(at + 3 * LINE), a[3])

    @njit(inline="always")
    def four(w, x, count, row, y, all_, next_):
        """Piece of a row meets four tokens."""
        zero = splat(types.float32(0.0))
        a0 = a1 = a2 = a3 = (zero, zero, zero, zero)
        c, most = 0, count // step * step
        while c < most:
            at = w + lies * c
            soon(at + next_)
            a0, a1 = met(load(at), x, a0), met(load(at + lies * WIDE), x + row, a1)
            a2 = met(load(at + 2 * lies * WIDE), x + 2 * row, a2)
            a3 = met(load(at + 3 * lies * WIDE), x + 3 * row, a3)
            c, x = c + step, x + 4 * row
        while c < count:
            a0 = met(load(w + lies * c), x, a0)
            c, x = c + WIDE, x + row
        for m in range(4):
            put(y + m * all_, read_one(y + m * all_) + total(plus(plus(a0[m], a1[m]), plus(a2[m], a3[m]))))

    @njit
    def piece(told, w, first, count, y):
        """Some columns of one row meet all tokens."""
        tokens, all_ = whole(told + 8 * At.M), size * whole(told + 8 * At.ROWS)
        m, x, row, next_ = 0, whole(told + 8 * At.X) + size * first * tokens, LINE * tokens, AHEAD
        while m + 4 <= tokens:
            four(w, x + LINE * m, count, row, y + m * all_, all_, next_)
            m, next_ = m + 4, 0
        while m < tokens:
            one(w, x + LINE * m, count, row, y + m * all_, next_)
            m, next_ = m + 1, 0

    @njit
    def block(told, w, rows, y):
        """Rows of one matrix meet all tokens."""
        width = whole(told + 8 * At.K)
        pieces = (width + PIECE - 1) // PIECE
        each = (width + pieces * step - 1) // (pieces * step) * step
        for first in range(0, width, each):
            count = min(each, width - first)
            for n in range(rows):
                piece(told, w + lies * (n * width + first), first, count, y + size * n)

    @njit
    def work(told):
        blocks, width = whole(told + 8 * At.BLOCKS), whole(told + 8 * At.K)
        number = take(told)
        while number < blocks:
            table, left, before = told + 8 * At.TABLE, number, 0
            rows = whole(table + 8)
            while left * BLOCK >= rows:
                left -= (rows + BLOCK - 1) // BLOCK
                before += rows
                table += 16
                rows = whole(table + 8)
            first = left * BLOCK
            w, y = whole(table) + first * lies * width, whole(told + 8 * At.Y) + size * (before + first)
            block(told, w, min(BLOCK, rows - first), y)
            number = take(told)

    return cfunc(types.void(types.int64))(work)
