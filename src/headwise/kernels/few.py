"""What is done to a few tokens between products, each in one call: norms, turns by positions, gates.

Of a few tokens torch's own operations take as long as the way into each of them, and a norm in bfloat16 is eight. These
are for calls that nobody follows (see `orders.alone`), so torch is not told of them; what they do not take is left to
torch. All is computed in single precision, angles in double, and rounded once.
"""

from __future__ import annotations

import math
from array import array

import torch
from numba import extending, njit
from torch import Tensor

from . import memory, team
from .compiled import Kernels
from .lanes import WIDE, exp, fma, larger, minus, over, plus, splat, times, total
from .memory import lies, load, number, put, read, read_one, size, store, told
from .orders import alone
from .thinning import KINDS

FEW = 2**14  # numbers at most, beyond which threads are worth their while


def takes(x: Tensor, *more: Tensor) -> bool:
    """Whether these are a few numbers in whole vectors, all of a kind that kernels know, and nobody follows them."""
    return (
        0 < x.numel() <= FEW
        and x.dtype in KINDS
        and x.shape[-1] % WIDE == 0
        and all(t.dtype == x.dtype and t.stride(-1) == 1 for t in more)
        and x.stride(-1) == 1
        and alone(x, *more)
        and not torch.is_autocast_enabled("cpu")
    )


def normed(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last axis, times the weight and what is added to that (1910.07467).

    >>> normed(torch.full((1, 16), 3.0), torch.full((16,), 2.0), 0.0)[0, :2].tolist()
    [2.0, 2.0]
    """
    x, width = x.contiguous(), x.shape[-1]
    y, numbers = torch.empty_like(x), array("d", (eps, offset))
    by = 0 if weight is None else weight.data_ptr()
    _run("norms", x, (x.data_ptr(), y.data_ptr(), x.numel() // width, width, by, numbers.buffer_info()[0]))
    return y


def turned(x_BTHK: Tensor, position_BT: Tensor, frequency: Tensor, swell: float) -> Tensor:
    """Channels c and c + pairs of each head turned by position x frequency[c], in float64, and grown by `swell`
    (2104.09864); the others as they are.

    >>> turned(torch.ones(1, 1, 1, 32), torch.tensor([[1]]), torch.full((16,), torch.pi, dtype=torch.float64), 2.0)[
    ...     0, 0, 0, ::16
    ... ].tolist()
    [-2.0, -2.0]
    """
    (batch, tokens, heads, width), step, pairs = x_BTHK.shape, x_BTHK.itemsize, frequency.numel()
    y, numbers = x_BTHK.new_empty(x_BTHK.shape), array("d", (swell,))
    waves = array("q", bytes(8 * pairs))
    position, apart = position_BT.contiguous(), 0 if position_BT.shape[0] == 1 else 8 * tokens
    strides = [step * x_BTHK.stride(n) for n in range(3)]
    where = position.data_ptr(), apart, frequency.data_ptr(), pairs, numbers.buffer_info()[0], waves.buffer_info()[0]
    _run("turns", x_BTHK, (x_BTHK.data_ptr(), y.data_ptr(), batch, tokens, heads, width, *strides, *where))
    return y


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """gate / (1 + e^-gate) x up (2002.05202), of the same shape, whose rows may lie apart.

    >>> gated(torch.full((1, 16), 100.0), torch.full((1, 16), 2.0))[0, 0].item()
    200.0
    """
    gate, up = _rows(gate), _rows(up)
    y, (rows, width), step = gate.new_empty(gate.shape), gate.shape, gate.itemsize
    places = gate.data_ptr(), up.data_ptr(), y.data_ptr(), rows, width, step * gate.stride(0), step * up.stride(0)
    _run("gates", gate, places)
    return y


def raised(x_BHK: Tensor, factor: float) -> Tensor:
    """The same numbers in single precision times a factor, in one piece.

    >>> raised(torch.ones(1, 1, 16, dtype=torch.bfloat16), 0.1)[0, 0, 0].item()
    0.100...
    """
    x, numbers = x_BHK.contiguous(), array("d", (factor,))
    y = x.new_empty(x.shape, dtype=torch.float32)
    _run("rises", x, (x.data_ptr(), y.data_ptr(), x.numel(), numbers.buffer_info()[0]))
    return y


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _run(name: str, like: Tensor, numbers: tuple[int, ...]) -> None:
    table = array("q", numbers)
    team.run(KERNELS.address(name, like.dtype), table.buffer_info()[0], 1)


@extending.register_jitable
def norms(f, table):
    """Told of x and what is made [rows, width], these two, the weight or 0, and of eps and what is added to weights."""
    x, y, rows, width, weight = told(table, 0), told(table, 1), told(table, 2), told(table, 3), told(table, 4)
    double = memory.form("float64")
    eps, more = read_one(double, told(table, 5)), splat(number(f, read_one(double, told(table, 5) + 8)))
    line = lies(f) * width
    for at in range(0, rows * line, line):
        sums = splat(number(f, 0.0))
        for c in range(at, at + line, lies(f) * WIDE):
            part = load(f, x + c)
            sums = fma(part, part, sums)
        share = splat(number(f, 1.0 / math.sqrt(total(sums) / width + eps)))
        for c in range(0, line, lies(f) * WIDE):
            part = times(load(f, x + at + c), share)
            if weight:
                part = times(part, plus(load(f, weight + c), more))
            store(f, y + at + c, part)


@njit
def waves(f, position, frequency, pairs, swell, desk):
    """The cosines of so many angles, and behind them the sines."""
    double = memory.form("float64")
    for c in range(pairs):
        angle = position * read_one(double, frequency + 8 * c)
        put(desk + size(f) * c, number(f, math.cos(angle) * swell))
        put(desk + size(f) * (pairs + c), number(f, math.sin(angle) * swell))


@njit
def turn(f, x, y, width, pairs, desk):
    """One head of one token."""
    half = lies(f) * pairs
    for c in range(0, pairs, WIDE):
        cos, sin, at = read(f, desk + size(f) * c), read(f, desk + size(f) * (pairs + c)), lies(f) * c
        a, b = load(f, x + at), load(f, x + half + at)
        store(f, y + at, minus(times(a, cos), times(b, sin)))
        store(f, y + half + at, plus(times(a, sin), times(b, cos)))
    for c in range(2 * half, lies(f) * width, lies(f) * WIDE):
        store(f, y + c, load(f, x + c))


@extending.register_jitable
def turns(f, table):
    """Told of x and what is made [B, T, H, width], these four, the steps of x from one of B, T and H to the next;
    positions and the step to the next of B; frequencies, how many, the swell, and where waves can be written."""
    x, y, batch, tokens, heads = told(table, 0), told(table, 1), told(table, 2), told(table, 3), told(table, 4)
    width, line, apart = told(table, 5), lies(f) * told(table, 5), told(table, 10)
    pairs, swell, desk = told(table, 12), read_one(memory.form("float64"), told(table, 13)), told(table, 14)
    for t in range(tokens):
        for b in range(batch):
            if b == 0 or apart:
                position = told(told(table, 9) + b * apart, t)
                waves(f, position, told(table, 11), pairs, swell, desk)
            own = x + b * told(table, 6) + t * told(table, 7)
            to = y + (b * tokens + t) * heads * line
            for h in range(heads):
                turn(f, own + h * told(table, 8), to + h * line, width, pairs, desk)


@extending.register_jitable
def gates(f, table):
    """Told of gates, of what they meet and of what is made [rows, width], these two, and of the first two the step to
    the next row."""
    gate, up, y, rows, width = told(table, 0), told(table, 1), told(table, 2), told(table, 3), told(table, 4)
    line, one = lies(f) * width, splat(number(f, 1.0))
    for m in range(rows):
        g, u, to = gate + m * told(table, 5), up + m * told(table, 6), y + m * line
        for c in range(0, line, lies(f) * WIDE):
            x = load(f, g + c)
            e = exp(minus(splat(number(f, 0.0)), larger(x, splat(number(f, -88.0)))))  # beyond, e^-x is no number
            store(f, to + c, times(over(x, plus(one, e)), load(f, u + c)))


@extending.register_jitable
def rises(f, table):
    """Told of numbers, of what is made, how many they are, and of the factor."""
    x, y, count, by = told(table, 0), told(table, 1), told(table, 2), told(table, 3)
    factor = splat(number(f, read_one(memory.form("float64"), by)))
    for c in range(0, count, WIDE):
        put(y + size(f) * c, times(load(f, x + lies(f) * c), factor))


KERNELS = Kernels(KINDS, norms=norms, turns=turns, gates=gates, rises=rises)
