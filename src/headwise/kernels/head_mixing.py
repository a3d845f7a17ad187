"""Dynamically composed attention heads (2405.08553): mix scores or weights across heads by low-rank factors.

With factors of the query (qs, qt, qg) and of the key (ks, kt, kg), for each query t and key s:

    out[o] = a[own[o]] (qg[o] + kg[o]) + sum_r (sum_h a[h] qs[r, h]) qt[r, o] + sum_r (sum_h a[h] ks[r, h]) kt[r, o]

In plain PyTorch, for one group of heads:

    out = a[:, own] * (qg.movedim(-1, 1)[..., None] + kg.transpose(1, 2))
    out += torch.einsum("bhts,btrh,btro->bots", a, qs, qt) + torch.einsum("bhts,brhs,bros->bots", a, ks, kt)

Loop order: one work item is a tile of 64 keys of one batch row. The thread copies the keys' factors to its scratch
buffer and loops over the queries: it copies the scores of one query with the tile, all heads, to the scratch buffer,
then loops over 16 keys at a time, over groups of heads, over ranks and over heads, and copies the result back. (In
memory the heads are strided by large powers of two, which would evict each other from the cache.) In the backward pass
each tile writes its gradients of the query factors separately; they are summed afterwards, so that the result does not
depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum, auto
from typing import Any

import torch
import torch.nn.functional as F
from numba import extending, njit
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import simd
from .autograd_guards import NO_DOUBLE_BACKWARD_REMEDY, forbid_double_backward, is_under_functorch
from .jit import COMPUTE_DTYPES, FIRST_KERNEL_ARG, ParallelKernelSet
from .simd import (
    SIMD_WIDTH,
    fma,
    load_arg,
    load_int64,
    load_scalar,
    load_vector,
    prefetch_l2,
    reduce_sum,
    splat,
    store_value,
    vec_add,
    vec_mul,
)

KEY_TILE_SIZE = 64
CACHE_LINE_BYTES = 64  # bytes per cache line


class HeadMixingArgs(IntEnum):
    """Kernel arguments: indices into an int64 array. Addresses count bytes, sizes count elements."""

    Q_SOURCE = FIRST_KERNEL_ARG  # [B, T, R, H]; R is 0 for a side without factors
    Q_TARGET = auto()  # [B, T, R, O]
    Q_GATE = auto()  # [B, T, O]: factor of the head itself, 1 + g
    K_SOURCE = auto()  # [B, R H, S]
    K_TARGET = auto()  # [B, R O, S]
    K_GATE = auto()  # [B, O, S]
    INPUT = auto()  # [B, H, T, S]
    HEAD_OF_OUTPUT = auto()  # [O], int64
    H = auto()
    NUM_OUTPUT_HEADS = auto()
    T = auto()
    S = auto()
    Q_RANKS = auto()
    K_RANKS = auto()
    NUM_KEY_GATES = auto()  # NUM_OUTPUT_HEADS, or 0 if keys have no factors
    HEADS_PER_GROUP = auto()  # heads per group
    OUTPUT = auto()  # forward the output [B, O, T, S]; backward the gradient of the input
    GRAD = auto()  # [B, O, T, S]
    D_Q_SOURCE = auto()  # gradients of query factors, once per tile: [B, tiles, T, R, H]
    D_Q_TARGET = auto()
    D_Q_GATE = auto()
    D_K_SOURCE = auto()
    D_K_TARGET = auto()
    D_K_GATE = auto()


def head_mixing_scratch_size(heads: int, num_output_heads: int, q_ranks: int, k_ranks: int) -> int:
    """Return the scratch elements per thread: scores, key factors, their gradients and sums of query gradients."""
    return 2 * KEY_TILE_SIZE * (
        heads + num_output_heads + k_ranks * (heads + num_output_heads) + num_output_heads
    ) + SIMD_WIDTH * (num_output_heads + q_ranks * (heads + num_output_heads))


@njit
def clear_memory(form, to, count):
    """Store `count` zeros, rounded up to whole vectors."""
    for n in range(0, count, SIMD_WIDTH):
        store_value(to + simd.compute_itemsize(form) * n, splat(simd.as_compute_scalar(form, 0)))


@njit
def copy_rows(form, to, source, rows, count):
    """Copy `count` elements of each row; `to` and `source` are (address of the first row, bytes to the next)."""
    size, (to, to_step), (source, step) = simd.compute_itemsize(form), to, source
    for n in range(rows):
        for c in range(0, count, SIMD_WIDTH):
            store_value(to + to_step * n + size * c, load_vector(form, source + step * n + size * c))


@njit
def prefetch_rows(form, source, step, rows, count):
    """Prefetch `count` elements of each row that are soon read or written."""
    size = simd.compute_itemsize(form)
    for n in range(rows):
        for c in range(0, count * size, CACHE_LINE_BYTES):
            prefetch_l2(source + step * n + c)


@njit
def accumulate_product(form, to, a, b):
    """Add a * b to the vector stored at `to`."""
    store_value(to, fma(a, b, load_vector(form, to)))


@njit
def dot_with_scalars(form, x, factor, first, last):
    """Return sum_h x[h] factor[h] for 16 keys, where the factor is one number per head."""
    size, step = simd.compute_itemsize(form), simd.compute_itemsize(form) * KEY_TILE_SIZE
    a = splat(simd.as_compute_scalar(form, 0))
    for h in range(first, last):
        a = fma(load_vector(form, x + step * h), splat(load_scalar(form, factor + size * h)), a)
    return a


@njit
def dot_with_vectors(form, x, factor, first, last):
    """Return sum_h x[h] factor[h] for 16 keys, where the factor has one number per head and key."""
    step = simd.compute_itemsize(form) * KEY_TILE_SIZE
    a = splat(simd.as_compute_scalar(form, 0))
    for h in range(first, last):
        a = fma(load_vector(form, x + step * h), load_vector(form, factor + step * h), a)
    return a


@njit
def head_group_bounds(table, n):
    """Return the range of heads of group n and of its output heads; a single group has all output heads."""
    each = load_arg(table, HeadMixingArgs.HEADS_PER_GROUP)
    first, last = n * each, (n + 1) * each
    return (
        first,
        last,
        first,
        load_arg(table, HeadMixingArgs.NUM_OUTPUT_HEADS) if each == load_arg(table, HeadMixingArgs.H) else last,
    )


@njit
def load_key_factors(form, table, to, b, begin):
    """Copy the factors of a tile of keys to the scratch buffer."""
    H, OUT, S, ranks = (
        load_arg(table, HeadMixingArgs.H),
        load_arg(table, HeadMixingArgs.NUM_OUTPUT_HEADS),
        load_arg(table, HeadMixingArgs.S),
        load_arg(table, HeadMixingArgs.K_RANKS),
    )
    size, count = simd.compute_itemsize(form), min(KEY_TILE_SIZE, S - begin)
    for n in range(3):
        rows = ranks * H if n == 0 else ranks * OUT if n == 1 else load_arg(table, HeadMixingArgs.NUM_KEY_GATES)
        source = load_arg(table, HeadMixingArgs.K_SOURCE + n) + size * (b * rows * S + begin)
        copy_rows(form, (to, size * KEY_TILE_SIZE), (source, size * S), rows, count)
        to += size * KEY_TILE_SIZE * rows


@njit
def store_key_factor_grads(form, table, source, b, begin):
    """Copy the gradients of a tile's key factors from the scratch buffer to the output."""
    H, OUT, S, ranks = (
        load_arg(table, HeadMixingArgs.H),
        load_arg(table, HeadMixingArgs.NUM_OUTPUT_HEADS),
        load_arg(table, HeadMixingArgs.S),
        load_arg(table, HeadMixingArgs.K_RANKS),
    )
    size, count = simd.compute_itemsize(form), min(KEY_TILE_SIZE, S - begin)
    for n in range(3):
        rows = ranks * H if n == 0 else ranks * OUT if n == 1 else load_arg(table, HeadMixingArgs.NUM_KEY_GATES)
        to = load_arg(table, HeadMixingArgs.D_K_SOURCE + n) + size * (b * rows * S + begin)
        copy_rows(form, (to, size * S), (source, size * KEY_TILE_SIZE), rows, count)
        source += size * KEY_TILE_SIZE * rows


@njit
def compose_key_vector(form, table, row, desk):
    """Compute all output heads for one query and 16 keys."""
    size, step = simd.compute_itemsize(form), simd.compute_itemsize(form) * KEY_TILE_SIZE
    H, OUT, ranks, held = (
        load_arg(table, HeadMixingArgs.H),
        load_arg(table, HeadMixingArgs.NUM_OUTPUT_HEADS),
        load_arg(table, HeadMixingArgs.Q_RANKS),
        load_arg(table, HeadMixingArgs.K_RANKS),
    )
    gate = load_arg(table, HeadMixingArgs.Q_GATE) + size * row * OUT
    source, target = (
        load_arg(table, HeadMixingArgs.Q_SOURCE) + size * row * ranks * H,
        load_arg(table, HeadMixingArgs.Q_TARGET) + size * row * ranks * OUT,
    )
    x, y, of_source = desk
    of_target, of_gate = of_source + step * held * H, of_source + step * held * (H + OUT)
    for o in range(OUT):
        a = load_vector(form, x + step * load_int64(load_arg(table, HeadMixingArgs.HEAD_OF_OUTPUT) + 8 * o))
        factor = splat(load_scalar(form, gate + size * o))
        if load_arg(table, HeadMixingArgs.NUM_KEY_GATES):
            factor = vec_add(factor, load_vector(form, of_gate + step * o))
        store_value(y + step * o, vec_mul(a, factor))
    for n in range(H // load_arg(table, HeadMixingArgs.HEADS_PER_GROUP)):
        first, last, begin, end = head_group_bounds(table, n)
        for r in range(ranks):
            a = dot_with_scalars(form, x, source + size * r * H, first, last)
            for o in range(begin, end):
                accumulate_product(form, y + step * o, a, splat(load_scalar(form, target + size * (r * OUT + o))))
        for r in range(held):
            a = dot_with_vectors(form, x, of_source + step * r * H, first, last)
            for o in range(begin, end):
                accumulate_product(form, y + step * o, a, load_vector(form, of_target + step * (r * OUT + o)))


@extending.register_jitable
def head_mixing_forward(form, table, unit, desk):
    """Forward kernel: one tile of keys of one batch row."""
    size, step = simd.compute_itemsize(form), simd.compute_itemsize(form) * KEY_TILE_SIZE
    H, OUT, T, S = (
        load_arg(table, HeadMixingArgs.H),
        load_arg(table, HeadMixingArgs.NUM_OUTPUT_HEADS),
        load_arg(table, HeadMixingArgs.T),
        load_arg(table, HeadMixingArgs.S),
    )
    tiles = -(-S // KEY_TILE_SIZE)
    b, begin = unit // tiles, unit % tiles * KEY_TILE_SIZE
    x, y, keys, count = desk, desk + step * H, desk + step * (H + OUT), min(KEY_TILE_SIZE, S - begin)
    load_key_factors(form, table, keys, b, begin)
    for t in range(T):
        given = load_arg(table, HeadMixingArgs.INPUT) + size * ((b * H * T + t) * S + begin)
        made = load_arg(table, HeadMixingArgs.OUTPUT) + size * ((b * OUT * T + t) * S + begin)
        copy_rows(form, (x, step), (given, size * T * S), H, count)
        prefetch_rows(form, given + size * S, size * T * S, H, count)
        prefetch_rows(form, made, size * T * S, OUT, count)
        for c in range(0, count, SIMD_WIDTH):
            compose_key_vector(form, table, b * T + t, (x + size * c, y + size * c, keys + size * c))
        copy_rows(form, (made, size * T * S), (y, step), OUT, count)


# --- Backward pass -------------------------------------------------------------------------------------


@njit
def backward_own_heads(form, table, row, desk):
    """Compute the gradients of the term a[own] * gate: of the heads and of both gates."""
    x, keys, d_x, d_keys, sums = desk
    size, step = simd.compute_itemsize(form), simd.compute_itemsize(form) * KEY_TILE_SIZE
    H, OUT, held = (
        load_arg(table, HeadMixingArgs.H),
        load_arg(table, HeadMixingArgs.NUM_OUTPUT_HEADS),
        load_arg(table, HeadMixingArgs.K_RANKS),
    )
    gate, g = load_arg(table, HeadMixingArgs.Q_GATE) + size * row * OUT, x + step * H
    of_gate, d_gate = keys + step * held * (H + OUT), d_keys + step * held * (H + OUT)
    for h in range(H):
        store_value(d_x + step * h, splat(simd.as_compute_scalar(form, 0)))
    for o in range(OUT):
        h = load_int64(load_arg(table, HeadMixingArgs.HEAD_OF_OUTPUT) + 8 * o)
        a, b, factor = (
            load_vector(form, x + step * h),
            load_vector(form, g + step * o),
            splat(load_scalar(form, gate + size * o)),
        )
        if load_arg(table, HeadMixingArgs.NUM_KEY_GATES):
            factor = vec_add(factor, load_vector(form, of_gate + step * o))
            accumulate_product(form, d_gate + step * o, a, b)
        accumulate_product(form, d_x + step * h, b, factor)
        accumulate_product(form, sums + size * SIMD_WIDTH * o, a, b)


@njit
def backward_query_ranks(form, table, row, heads, desk):
    """Compute the gradients of the query's low-rank term; those of its factors stay vectors, summed over keys later."""
    x, _, d_x, _, sums = desk
    size, step = simd.compute_itemsize(form), simd.compute_itemsize(form) * KEY_TILE_SIZE
    H, OUT, ranks = (
        load_arg(table, HeadMixingArgs.H),
        load_arg(table, HeadMixingArgs.NUM_OUTPUT_HEADS),
        load_arg(table, HeadMixingArgs.Q_RANKS),
    )
    first, last, begin, end = heads
    g = x + step * H
    for r in range(ranks):
        source = load_arg(table, HeadMixingArgs.Q_SOURCE) + size * (row * ranks + r) * H
        target = load_arg(table, HeadMixingArgs.Q_TARGET) + size * (row * ranks + r) * OUT
        a, back = dot_with_scalars(form, x, source, first, last), dot_with_scalars(form, g, target, begin, end)
        of_source = sums + size * SIMD_WIDTH * (OUT + r * H)
        of_target = sums + size * SIMD_WIDTH * (OUT + ranks * H + r * OUT)
        for o in range(begin, end):
            accumulate_product(form, of_target + size * SIMD_WIDTH * o, load_vector(form, g + step * o), a)
        for h in range(first, last):
            accumulate_product(form, d_x + step * h, back, splat(load_scalar(form, source + size * h)))
            accumulate_product(form, of_source + size * SIMD_WIDTH * h, load_vector(form, x + step * h), back)


@njit
def backward_key_ranks(form, table, heads, desk):
    """Compute the gradients of the keys' low-rank term."""
    x, keys, d_x, d_keys, _ = desk
    step = simd.compute_itemsize(form) * KEY_TILE_SIZE
    H, OUT, ranks = (
        load_arg(table, HeadMixingArgs.H),
        load_arg(table, HeadMixingArgs.NUM_OUTPUT_HEADS),
        load_arg(table, HeadMixingArgs.K_RANKS),
    )
    first, last, begin, end = heads
    g = x + step * H
    for r in range(ranks):
        at_source, at_target = step * r * H, step * (ranks * H + r * OUT)
        a = dot_with_vectors(form, x, keys + at_source, first, last)
        back = dot_with_vectors(form, g, keys + at_target, begin, end)
        for o in range(begin, end):
            accumulate_product(form, d_keys + at_target + step * o, load_vector(form, g + step * o), a)
        for h in range(first, last):
            accumulate_product(form, d_x + step * h, back, load_vector(form, keys + at_source + step * h))
            accumulate_product(form, d_keys + at_source + step * h, load_vector(form, x + step * h), back)


@njit
def sum_query_factor_grads(form, table, row, sums):
    """Reduce the vectors of gradients of one query's factors over the tile and store them."""
    size, vector = simd.compute_itemsize(form), simd.compute_itemsize(form) * SIMD_WIDTH
    H, OUT, ranks = (
        load_arg(table, HeadMixingArgs.H),
        load_arg(table, HeadMixingArgs.NUM_OUTPUT_HEADS),
        load_arg(table, HeadMixingArgs.Q_RANKS),
    )
    for n in range(OUT):
        store_value(
            load_arg(table, HeadMixingArgs.D_Q_GATE) + size * (row * OUT + n),
            reduce_sum(load_vector(form, sums + vector * n)),
        )
    for n in range(ranks * H):
        store_value(
            load_arg(table, HeadMixingArgs.D_Q_SOURCE) + size * (row * ranks * H + n),
            reduce_sum(load_vector(form, sums + vector * (OUT + n))),
        )
    sums += vector * (OUT + ranks * H)
    for n in range(ranks * OUT):
        store_value(
            load_arg(table, HeadMixingArgs.D_Q_TARGET) + size * (row * ranks * OUT + n),
            reduce_sum(load_vector(form, sums + vector * n)),
        )


@njit
def backward_query(form, table, b, t, begin, desk):
    """Compute all gradients between one query and a tile of keys."""
    x, keys, d_x, d_keys, sums = desk
    size, step = simd.compute_itemsize(form), simd.compute_itemsize(form) * KEY_TILE_SIZE
    H, OUT, T, S = (
        load_arg(table, HeadMixingArgs.H),
        load_arg(table, HeadMixingArgs.NUM_OUTPUT_HEADS),
        load_arg(table, HeadMixingArgs.T),
        load_arg(table, HeadMixingArgs.S),
    )
    at, count, apart = size * ((b * H * T + t) * S + begin), min(KEY_TILE_SIZE, S - begin), size * T * S
    grad = load_arg(table, HeadMixingArgs.GRAD) + size * ((b * OUT * T + t) * S + begin)
    copy_rows(form, (x, step), (load_arg(table, HeadMixingArgs.INPUT) + at, apart), H, count)
    copy_rows(form, (x + step * H, step), (grad, apart), OUT, count)
    prefetch_rows(form, load_arg(table, HeadMixingArgs.INPUT) + at + size * S, apart, H, count)
    prefetch_rows(form, grad + size * S, apart, OUT, count)
    prefetch_rows(form, load_arg(table, HeadMixingArgs.OUTPUT) + at, apart, H, count)
    clear_memory(form, sums, SIMD_WIDTH * (OUT + load_arg(table, HeadMixingArgs.Q_RANKS) * (H + OUT)))
    for c in range(0, count, SIMD_WIDTH):
        here = (x + size * c, keys + size * c, d_x + size * c, d_keys + size * c, sums)
        backward_own_heads(form, table, b * T + t, here)
        for n in range(H // load_arg(table, HeadMixingArgs.HEADS_PER_GROUP)):
            heads = head_group_bounds(table, n)
            backward_query_ranks(form, table, b * T + t, heads, here)
            backward_key_ranks(form, table, heads, here)
    copy_rows(form, (load_arg(table, HeadMixingArgs.OUTPUT) + at, apart), (d_x, step), H, count)
    tile, tiles = begin // KEY_TILE_SIZE, -(-S // KEY_TILE_SIZE)
    sum_query_factor_grads(form, table, (b * tiles + tile) * T + t, sums)


@extending.register_jitable
def head_mixing_backward(form, table, unit, desk):
    """Backward kernel: one tile of keys of one batch row."""
    step = simd.compute_itemsize(form) * KEY_TILE_SIZE
    H, OUT, held = (
        load_arg(table, HeadMixingArgs.H),
        load_arg(table, HeadMixingArgs.NUM_OUTPUT_HEADS),
        load_arg(table, HeadMixingArgs.K_RANKS),
    )
    tiles, factors = (
        -(-load_arg(table, HeadMixingArgs.S) // KEY_TILE_SIZE),
        held * (H + OUT) + load_arg(table, HeadMixingArgs.NUM_KEY_GATES),
    )
    b, begin = unit // tiles, unit % tiles * KEY_TILE_SIZE
    x, keys = desk, desk + step * (H + OUT)
    d_x = keys + step * factors
    d_keys = d_x + step * H
    load_key_factors(form, table, keys, b, begin)
    clear_memory(form, d_keys, KEY_TILE_SIZE * factors)
    for t in range(load_arg(table, HeadMixingArgs.T)):
        backward_query(form, table, b, t, begin, (x, keys, d_x, d_keys, d_keys + step * factors))
    store_key_factor_grads(form, table, d_keys, b, begin)


HEAD_MIXING_KERNELS = ParallelKernelSet(COMPUTE_DTYPES, forward=head_mixing_forward, backward=head_mixing_backward)

# --- The operation `headwise::composed` ----------------------------------------------------------------


def has_head_mixing_kernel(a_BHTS: Tensor) -> bool:
    """Return True if the kernels support these scores: float32 or float64 on the CPU, outside torch.func."""
    return a_BHTS.device.type == "cpu" and a_BHTS.dtype in COMPUTE_DTYPES and not is_under_functorch()


@torch.library.custom_op("headwise::composed", mutates_args=(), device_types="cpu")
def mix_heads_by_factors(a: Tensor, head_of_output: Tensor, heads_per_group: int, factors: list[Tensor]) -> Tensor:
    """Return [B, O, T, S], the heads a [B, H, T, S] mixed by the factors of queries and keys.

    The factors of queries are qs [B, T, R, H], qt [B, T, R, O] and qg [B, T, O], those of keys ks [B, R, H, S], kt [B,
    R, O, S] and kg [B, 1, O, S]. A side without factors has size 0 instead of R, and instead of the 1 of kg. Heads are
    mixed within groups of `heads_per_group`. The formula stands at the top of this module.
    """
    keys = a.shape[3]
    given = _padded_inputs(a, head_of_output, factors)
    a = given[6]
    out = a.new_empty(a.shape[0], head_of_output.shape[0], *a.shape[2:])
    _launch_head_mixing("forward", given, heads_per_group, out)
    return _unpad_keys(out, keys)


@torch.library.custom_op("headwise::composed_backward", mutates_args=(), device_types="cpu")
def mix_heads_by_factors_backward(
    grad: Tensor, a: Tensor, own: Tensor, each: int, factors: list[Tensor]
) -> list[Tensor]:
    """Return the gradients of a and of the six factors."""
    keys = a.shape[3]
    given = _padded_inputs(a, own, factors)
    qs, qt, qg, ks, kt, kg, a, own = given
    tiles = -(-a.shape[3] // KEY_TILE_SIZE)
    of_queries = [t.new_empty(len(t), tiles, *t.shape[1:]) for t in (qs, qt, qg)]
    of_keys = [torch.empty_like(t) for t in (ks, kt, kg)]
    d_a = torch.empty_like(a)
    _launch_head_mixing("backward", given, each, d_a, _pad_keys(grad), *of_queries, *of_keys)
    return [_unpad_keys(d_a, keys), *(t.sum(1) for t in of_queries), *(_unpad_keys(t, keys) for t in of_keys)]


def _padded_inputs(a: Tensor, own: Tensor, factors: Sequence[Tensor]) -> list[Tensor]:
    return [*(t.contiguous() for t in factors[:3]), *map(_pad_keys, factors[3:]), _pad_keys(a), own.contiguous()]


def _pad_keys(t: Tensor) -> Tensor:
    """Return t contiguous, with its keys padded to whole vectors."""
    lacking = -t.shape[-1] % SIMD_WIDTH
    return (F.pad(t, (0, lacking)) if lacking else t).contiguous()  # F.pad may return permuted strides


def _unpad_keys(t: Tensor, keys: int) -> Tensor:
    return t if t.shape[-1] == keys else t[..., :keys].contiguous()


def _launch_head_mixing(which: str, given: list[Tensor], each: int, *made: Tensor) -> None:
    qs, ks, kg, a, own = given[0], given[3], given[5], given[6], given[7]
    (batch, heads, queries, keys), out = a.shape, own.shape[0]
    work = batch * -(-keys // KEY_TILE_SIZE), head_mixing_scratch_size(heads, out, qs.shape[2], ks.shape[1])
    sizes = (heads, out, queries, keys, qs.shape[2], ks.shape[1], kg.shape[1] * out, each)
    HEAD_MIXING_KERNELS.launch(which, a.dtype, work, *given, *sizes, *made)


@mix_heads_by_factors.register_fake
def _(a: Tensor, own: Tensor, each: int, factors: list[Tensor]) -> Tensor:
    return a.new_empty(a.shape[0], own.shape[0], *a.shape[2:])


@mix_heads_by_factors_backward.register_fake
def _(grad: Tensor, a: Tensor, own: Tensor, each: int, factors: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (a, *factors)]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, own, ctx.each, factors = inputs
    ctx.save_for_backward(a, own, *factors)


def _head_mixing_autograd_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    forbid_double_backward(NO_DOUBLE_BACKWARD_REMEDY)
    a, own, *factors = ctx.saved_tensors
    d_a, *d_factors = mix_heads_by_factors_backward(grad, a, own, ctx.each, factors)
    return d_a, None, None, d_factors


mix_heads_by_factors.register_autograd(_head_mixing_autograd_backward, setup_context=_save_for_backward)


@register_flop_formula(torch.ops.headwise.composed)
def _head_mixing_flops(a: Any, own: Any, each: int, factors: Any, **said: Any) -> int:
    batch, heads, queries, keys = a
    return 2 * batch * queries * keys * (factors[0][2] + factors[3][1]) * (heads + own[0])


@register_flop_formula(torch.ops.headwise.composed_backward)
def _head_mixing_backward_flops(grad: Any, a: Any, own: Any, each: int, factors: Any, **said: Any) -> int:
    """Count the rank products computed again, and two gradients for each product with factors."""
    batch, heads, queries, keys = a
    return 2 * batch * queries * keys * (factors[0][2] + factors[3][1]) * (3 * heads + 2 * own[0])
