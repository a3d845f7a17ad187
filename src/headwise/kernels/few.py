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
from .compiled import KernelSet
from .lanes import SIMD_WIDTH, vec_exp, fma, vec_max, vec_sub, vec_div, vec_add, splat, vec_mul, reduce_sum
from .memory import storage_itemsize, load_storage, as_compute_scalar, store_value, load_vector, load_scalar, compute_itemsize, store_storage, load_arg
from .orders import can_skip_dispatcher
from .thinning import GEMV_DTYPES

MAX_SMALL_NUMEL = 2**14  # numbers at most, beyond which threads are worth their while


def is_small_batch(x: Tensor, *more: Tensor) -> bool:
    """Whether these are a few numbers in whole vectors, all of a kind that kernels know, and nobody follows them."""
    return (
        0 < x.numel() <= MAX_SMALL_NUMEL
        and x.dtype in GEMV_DTYPES
        and x.shape[-1] % SIMD_WIDTH == 0
        and all(t.dtype == x.dtype and t.stride(-1) == 1 for t in more)
        and x.stride(-1) == 1
        and can_skip_dispatcher(x, *more)
        and not torch.is_autocast_enabled("cpu")
    )


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last axis, times the weight and what is added to that (1910.07467).

    >>> rms_norm(torch.is_full((1, 16), 3.0), torch.is_full((16,), 2.0), 0.0)[0, :2].tolist()
    [2.0, 2.0]
    """
    x, width = x.contiguous(), x.shape[-1]
    y, numbers = torch.empty_like(x), array("d", (eps, offset))
    by = 0 if weight is None else weight.data_ptr()
    _launch_small_batch("norms", x, (x.data_ptr(), y.data_ptr(), x.numel() // width, width, by, numbers.buffer_info()[0]))
    return y


def apply_rotary(x_BTHK: Tensor, position_BT: Tensor, frequency: Tensor, attention_factor: float) -> Tensor:
    """Channels c and c + pairs of each head turned by position x frequency[c], in float64, and grown by `swell`
    (2104.09864); the others as they are.

    >>> apply_rotary(torch.ones(1, 1, 1, 32), torch.tensor([[1]]), torch.is_full((16,), torch.pi, dtype=torch.float64), 2.0)[
    ...     0, 0, 0, ::16
    ... ].tolist()
    [-2.0, -2.0]
    """
    (batch, tokens, heads, width), step, pairs = x_BTHK.shape, x_BTHK.itemsize, frequency.numel()
    y, numbers = x_BTHK.new_empty(x_BTHK.shape), array("d", (attention_factor,))
    waves = array("q", bytes(8 * pairs))
    position, apart = position_BT.contiguous(), 0 if position_BT.shape[0] == 1 else 8 * tokens
    strides = [step * x_BTHK.stride(n) for n in range(3)]
    where = position.data_ptr(), apart, frequency.data_ptr(), pairs, numbers.buffer_info()[0], waves.buffer_info()[0]
    _launch_small_batch("turns", x_BTHK, (x_BTHK.data_ptr(), y.data_ptr(), batch, tokens, heads, width, *strides, *where))
    return y


def silu_and_multiply(gate: Tensor, up: Tensor) -> Tensor:
    """gate / (1 + e^-gate) x up (2002.05202), of the same shape, whose rows may lie apart.

    >>> silu_and_multiply(torch.is_full((1, 16), 100.0), torch.is_full((1, 16), 2.0))[0, 0].item()
    200.0
    """
    gate, up = _flatten_rows(gate), _flatten_rows(up)
    y, (rows, width), step = gate.new_empty(gate.shape), gate.shape, gate.itemsize
    places = gate.data_ptr(), up.data_ptr(), y.data_ptr(), rows, width, step * gate.stride(0), step * up.stride(0)
    _launch_small_batch("gates", gate, places)
    return y


def scale_to_float32(x_BHK: Tensor, factor: float) -> Tensor:
    """The same numbers in single precision times a factor, in one piece.

    >>> scale_to_float32(torch.ones(1, 1, 16, dtype=torch.bfloat16), 0.1)[0, 0, 0].item()
    0.100...
    """
    x, numbers = x_BHK.contiguous(), array("d", (factor,))
    y = x.new_empty(x.shape, dtype=torch.float32)
    _launch_small_batch("rises", x, (x.data_ptr(), y.data_ptr(), x.numel(), numbers.buffer_info()[0]))
    return y


def _flatten_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _launch_small_batch(name: str, like: Tensor, numbers: tuple[int, ...]) -> None:
    table = array("q", numbers)
    team.run_in_threads(SMALL_BATCH_KERNELS.function_address(name, like.dtype), table.buffer_info()[0], 1)


@extending.register_jitable
def rms_norm_kernel(f, table):
    """Told of x and what is made [rows, width], these two, the weight or 0, and of eps and what is added to weights."""
    x, y, rows, width, weight = load_arg(table, 0), load_arg(table, 1), load_arg(table, 2), load_arg(table, 3), load_arg(table, 4)
    double = memory.storage_type("float64")
    eps, more = load_scalar(double, load_arg(table, 5)), splat(as_compute_scalar(f, load_scalar(double, load_arg(table, 5) + 8)))
    line = storage_itemsize(f) * width
    for at in range(0, rows * line, line):
        sums = splat(as_compute_scalar(f, 0.0))
        for c in range(at, at + line, storage_itemsize(f) * SIMD_WIDTH):
            part = load_storage(f, x + c)
            sums = fma(part, part, sums)
        share = splat(as_compute_scalar(f, 1.0 / math.sqrt(reduce_sum(sums) / width + eps)))
        for c in range(0, line, storage_itemsize(f) * SIMD_WIDTH):
            part = vec_mul(load_storage(f, x + at + c), share)
            if weight:
                part = vec_mul(part, vec_add(load_storage(f, weight + c), more))
            store_storage(f, y + at + c, part)


@njit
def cos_sin_tables(f, position, frequency, pairs, swell, desk):
    """The cosines of so many angles, and behind them the sines."""
    double = memory.storage_type("float64")
    for c in range(pairs):
        angle = position * load_scalar(double, frequency + 8 * c)
        store_value(desk + compute_itemsize(f) * c, as_compute_scalar(f, math.cos(angle) * swell))
        store_value(desk + compute_itemsize(f) * (pairs + c), as_compute_scalar(f, math.sin(angle) * swell))


@njit
def rotate_head(f, x, y, width, pairs, desk):
    """One head of one token."""
    half = storage_itemsize(f) * pairs
    for c in range(0, pairs, SIMD_WIDTH):
        cos, sin, at = load_vector(f, desk + compute_itemsize(f) * c), load_vector(f, desk + compute_itemsize(f) * (pairs + c)), storage_itemsize(f) * c
        a, b = load_storage(f, x + at), load_storage(f, x + half + at)
        store_storage(f, y + at, vec_sub(vec_mul(a, cos), vec_mul(b, sin)))
        store_storage(f, y + half + at, vec_add(vec_mul(a, sin), vec_mul(b, cos)))
    for c in range(2 * half, storage_itemsize(f) * width, storage_itemsize(f) * SIMD_WIDTH):
        store_storage(f, y + c, load_storage(f, x + c))


@extending.register_jitable
def rotary_kernel(f, table):
    """Told of x and what is made [B, T, H, width], these four, the steps of x from one of B, T and H to the next;
    positions and the step to the next of B; frequencies, how many, the swell, and where waves can be written."""
    x, y, batch, tokens, heads = load_arg(table, 0), load_arg(table, 1), load_arg(table, 2), load_arg(table, 3), load_arg(table, 4)
    width, line, apart = load_arg(table, 5), storage_itemsize(f) * load_arg(table, 5), load_arg(table, 10)
    pairs, swell, desk = load_arg(table, 12), load_scalar(memory.storage_type("float64"), load_arg(table, 13)), load_arg(table, 14)
    for t in range(tokens):
        for b in range(batch):
            if b == 0 or apart:
                position = load_arg(load_arg(table, 9) + b * apart, t)
                cos_sin_tables(f, position, load_arg(table, 11), pairs, swell, desk)
            own = x + b * load_arg(table, 6) + t * load_arg(table, 7)
            to = y + (b * tokens + t) * heads * line
            for h in range(heads):
                rotate_head(f, own + h * load_arg(table, 8), to + h * line, width, pairs, desk)


@extending.register_jitable
def silu_and_multiply_kernel(f, table):
    """Told of gates, of what they meet and of what is made [rows, width], these two, and of the first two the step to
    the next row."""
    gate, up, y, rows, width = load_arg(table, 0), load_arg(table, 1), load_arg(table, 2), load_arg(table, 3), load_arg(table, 4)
    line, one = storage_itemsize(f) * width, splat(as_compute_scalar(f, 1.0))
    for m in range(rows):
        g, u, to = gate + m * load_arg(table, 5), up + m * load_arg(table, 6), y + m * line
        for c in range(0, line, storage_itemsize(f) * SIMD_WIDTH):
            x = load_storage(f, g + c)
            e = vec_exp(vec_sub(splat(as_compute_scalar(f, 0.0)), vec_max(x, splat(as_compute_scalar(f, -88.0)))))  # beyond, e^-x is no number
            store_storage(f, to + c, vec_mul(vec_div(x, vec_add(one, e)), load_storage(f, u + c)))


@extending.register_jitable
def scale_to_float32_kernel(f, table):
    """Told of numbers, of what is made, how many they are, and of the factor."""
    x, y, count, by = load_arg(table, 0), load_arg(table, 1), load_arg(table, 2), load_arg(table, 3)
    factor = splat(as_compute_scalar(f, load_scalar(memory.storage_type("float64"), by)))
    for c in range(0, count, SIMD_WIDTH):
        store_value(y + compute_itemsize(f) * c, vec_mul(load_storage(f, x + storage_itemsize(f) * c), factor))


SMALL_BATCH_KERNELS = KernelSet(GEMV_DTYPES, norms=rms_norm_kernel, turns=rotary_kernel, gates=silu_and_multiply_kernel, rises=scale_to_float32_kernel)
