"""The gradients of rows that read keys: scores are formed once more, from the log-sum-exp of each row (2205.14135).

A unit is all rows of one key head with a part of its keys, whose gradients are this unit's alone. What parts give to a
row stands apart, so that sums do not depend on threads.
"""

from __future__ import annotations

from numba import extending, njit

from . import memory
from .compiled import COMPUTE_DTYPES, ParallelKernelSet
from .lanes import SIMD_WIDTH, vec_exp, fma, vec_sub, splat, vec_mul, reduce_sum, round_up_to_simd
from .memory import store_value, load_vector, load_scalar, load_arg, load_int64
from .reading import NUM_ROW_STATE_VECTORS, FLASH_KEY_BLOCK_SIZE, FlashAttentionArgs, mask_scores, clear_memory, qk_tile, flash_forward, load_key_ranges, scale_columns, load_rows_transposed
from .tiles import QUERY_TILE_ROWS, GEMM_ROW_PADDING, gemm


@njit
def load_rows(f, table, unit, source, dim, to):
    """Lay the rows of a unit one below the other, in whole vectors, zeros for what is missing."""
    lines, count, size = load_arg(table, FlashAttentionArgs.QUERY_ROWS) + 8 * load_int64(unit + 8), load_int64(unit + 16), memory.compute_itemsize(f)
    clear_memory(f, to, QUERY_TILE_ROWS * round_up_to_simd(dim))
    for r in range(count):
        row, here = source + size * dim * load_int64(lines + 8 * r), to + size * round_up_to_simd(dim) * r
        for c in range(0, dim // SIMD_WIDTH * SIMD_WIDTH, SIMD_WIDTH):
            store_value(here + size * c, load_vector(f, row + size * c))
        for c in range(dim // SIMD_WIDTH * SIMD_WIDTH, dim):
            store_value(here + size * c, load_scalar(f, row + size * c))


@njit
def inner_product(f, a, b, count):
    """The sum over so many numbers of the products of each two."""
    size, sums = memory.compute_itemsize(f), splat(memory.as_compute_scalar(f, 0))
    for c in range(0, count // SIMD_WIDTH * SIMD_WIDTH, SIMD_WIDTH):
        sums = fma(load_vector(f, a + size * c), load_vector(f, b + size * c), sums)
    every = reduce_sum(sums)
    for c in range(count // SIMD_WIDTH * SIMD_WIDTH, count):
        every += load_scalar(f, a + size * c) * load_scalar(f, b + size * c)
    return every


@njit
def load_row_statistics(f, table, unit, desk):
    """Lay each row's log-sum-exp, the product of what it read with its gradient, and the scale."""
    lines, count, size = load_arg(table, FlashAttentionArgs.QUERY_ROWS) + 8 * load_int64(unit + 8), load_int64(unit + 16), memory.compute_itemsize(f)
    to, vdim = desk + size * 2 * QUERY_TILE_ROWS, load_arg(table, FlashAttentionArgs.VDIM)
    for r in range(QUERY_TILE_ROWS):
        lse, both = memory.as_compute_scalar(f, float("inf")), memory.as_compute_scalar(f, 0)
        if r < count:
            line = load_int64(lines + 8 * r)
            lse, row = load_scalar(f, load_arg(table, FlashAttentionArgs.LSE) + size * line), size * vdim * line
            both = inner_product(f, load_arg(table, FlashAttentionArgs.OUT) + row, load_arg(table, FlashAttentionArgs.GRAD) + row, vdim)
        store_value(to + size * r, lse)
        store_value(to + size * (QUERY_TILE_ROWS + r), both)
        store_value(to + size * (2 * QUERY_TILE_ROWS + r), load_scalar(f, table + 8 * FlashAttentionArgs.SCALE))


@njit
def recompute_weights(f, scores, desk, count):
    """Scores as shares of what each row reads."""
    size = memory.compute_itemsize(f)
    step = size * QUERY_TILE_ROWS
    for c in range(0, step, size * SIMD_WIDTH):
        lse = load_vector(f, desk + 2 * step + c)
        for n in range(count):
            store_value(scores + step * n + c, vec_exp(vec_sub(load_vector(f, scores + step * n + c), lse)))


@njit
def grad_scores(f, scores, grads, desk, count):
    """The gradients of scores from those of shares."""
    size = memory.compute_itemsize(f)
    step = size * QUERY_TILE_ROWS
    for c in range(0, step, size * SIMD_WIDTH):
        total = load_vector(f, desk + 3 * step + c)
        for n in range(count):
            here = step * n + c
            store_value(grads + here, vec_mul(load_vector(f, scores + here), vec_sub(load_vector(f, grads + here), total)))


@njit
def backward_key_block(f, table, at, desk, span, bars):
    """What some neighbouring keys and all rows of the desk give each other."""
    (k, v, d_k, d_v), (start, count) = at, span
    size, dim, vdim = memory.compute_itemsize(f), load_arg(table, FlashAttentionArgs.DIM), load_arg(table, FlashAttentionArgs.VDIM)
    step, fours = size * QUERY_TILE_ROWS, -(-count // 4) * 4
    q = desk + step * NUM_ROW_STATE_VECTORS
    grad = q + step * (dim + GEMM_ROW_PADDING)
    scores = grad + step * (vdim + GEMM_ROW_PADDING)
    grads = scores + step * (FLASH_KEY_BLOCK_SIZE + GEMM_ROW_PADDING)
    d_q = grads + step * (FLASH_KEY_BLOCK_SIZE + GEMM_ROW_PADDING)
    q_rows = d_q + step * (dim + GEMM_ROW_PADDING)
    grad_rows = q_rows + step * round_up_to_simd(dim)
    qk_tile(f, table, k, q, scores, span)
    if bars:
        mask_scores(f, scores, desk, start, fours)
    recompute_weights(f, scores, desk, fours)
    row = size * round_up_to_simd(vdim)
    gemm(f, (d_v + row * start, row), (scores, step, size), (grad_rows, row), (fours, round_up_to_simd(vdim), QUERY_TILE_ROWS), True)
    values = v + load_arg(table, FlashAttentionArgs.V_KEY_STRIDE) * start, load_arg(table, FlashAttentionArgs.V_KEY_STRIDE), size
    gemm(f, (grads, step), values, (grad, step), (count, QUERY_TILE_ROWS, vdim), False)
    grad_scores(f, scores, grads, desk, fours)
    keys = k + load_arg(table, FlashAttentionArgs.K_KEY_STRIDE) * start, size, load_arg(table, FlashAttentionArgs.K_KEY_STRIDE)
    gemm(f, (d_q, step), keys, (grads, step), (dim, QUERY_TILE_ROWS, count), True)
    row = size * round_up_to_simd(dim)
    gemm(f, (d_k + row * start, row), (grads, step, size), (q_rows, row), (fours, round_up_to_simd(dim), QUERY_TILE_ROWS), True)


@njit
def backward_query_tile(f, table, at, unit, desk):
    """The gradients that up to sixty-four rows have and give."""
    size, dim, vdim = memory.compute_itemsize(f), load_arg(table, FlashAttentionArgs.DIM), load_arg(table, FlashAttentionArgs.VDIM)
    step = size * QUERY_TILE_ROWS
    q = desk + step * NUM_ROW_STATE_VECTORS
    grad = q + step * (dim + GEMM_ROW_PADDING)
    d_q = grad + step * (vdim + GEMM_ROW_PADDING) + 2 * step * (FLASH_KEY_BLOCK_SIZE + GEMM_ROW_PADDING)
    q_rows = d_q + step * (dim + GEMM_ROW_PADDING)
    start, stop, inner, outer = load_key_ranges(f, table, unit, desk)
    if start >= stop:
        return
    load_row_statistics(f, table, unit, desk)
    load_rows_transposed(f, table, unit, load_arg(table, FlashAttentionArgs.Q), dim, q)
    scale_columns(f, q, dim, desk + 4 * step)
    load_rows_transposed(f, table, unit, load_arg(table, FlashAttentionArgs.GRAD), vdim, grad)
    load_rows(f, table, unit, load_arg(table, FlashAttentionArgs.Q), dim, q_rows)
    for n in range(0, step * round_up_to_simd(dim), size * SIMD_WIDTH):
        store_value(q_rows + n, vec_mul(load_vector(f, q_rows + n), load_vector(f, desk + 4 * step)))
    load_rows(f, table, unit, load_arg(table, FlashAttentionArgs.GRAD), vdim, q_rows + step * round_up_to_simd(dim))
    clear_memory(f, d_q, QUERY_TILE_ROWS * (dim + GEMM_ROW_PADDING))
    start = start // 4 * 4  # parts of keys begin and end at fours, so that no row of another part is written
    while start < stop:
        count = min(FLASH_KEY_BLOCK_SIZE, stop - start)
        backward_key_block(f, table, at, desk, (start, count), start < inner or start + -(-count // 4) * 4 > outer)
        start += count
    scale_columns(f, d_q, dim, desk + 4 * step)
    lines = load_arg(table, FlashAttentionArgs.QUERY_ROWS) + 8 * load_int64(unit + 8)
    for r in range(load_int64(unit + 16)):
        to = load_arg(table, FlashAttentionArgs.D_Q) + size * dim * (load_int64(unit + 40) * load_arg(table, FlashAttentionArgs.NUM_QUERY_ROWS) + load_int64(lines + 8 * r))
        for c in range(dim):
            store_value(to + size * c, load_scalar(f, d_q + size * (QUERY_TILE_ROWS * c + r)))


@extending.register_jitable
def flash_backward(f, table, number, desk):
    """All rows of a unit, sixty-four at a time."""
    unit = load_arg(table, FlashAttentionArgs.WORK_ITEMS) + 48 * number
    size, dim, vdim, groups = memory.compute_itemsize(f), load_arg(table, FlashAttentionArgs.DIM), load_arg(table, FlashAttentionArgs.VDIM), load_arg(table, FlashAttentionArgs.GROUPS)
    own, each = load_int64(unit) // groups, load_int64(unit) % groups
    k = load_arg(table, FlashAttentionArgs.K) + own * load_arg(table, FlashAttentionArgs.K_ROW_STRIDE) + each * load_arg(table, FlashAttentionArgs.K_HEAD_STRIDE)
    v = load_arg(table, FlashAttentionArgs.V) + own * load_arg(table, FlashAttentionArgs.V_ROW_STRIDE) + each * load_arg(table, FlashAttentionArgs.V_HEAD_STRIDE)
    d_k = load_arg(table, FlashAttentionArgs.D_K) + size * round_up_to_simd(dim) * load_arg(table, FlashAttentionArgs.PADDED_KEYS) * load_int64(unit)
    d_v = load_arg(table, FlashAttentionArgs.D_V) + size * round_up_to_simd(vdim) * load_arg(table, FlashAttentionArgs.PADDED_KEYS) * load_int64(unit)
    first, last, here = load_int64(unit + 24), load_int64(unit + 32), desk
    last = load_arg(table, FlashAttentionArgs.PADDED_KEYS) if last == load_arg(table, FlashAttentionArgs.S) else last
    clear_memory(f, d_k + size * round_up_to_simd(dim) * first, (last - first) * round_up_to_simd(dim))
    clear_memory(f, d_v + size * round_up_to_simd(vdim) * first, (last - first) * round_up_to_simd(vdim))
    for n in range(6):
        store_value(here + 8 * n, load_int64(unit + 8 * n))
    for start in range(0, load_int64(unit + 16), QUERY_TILE_ROWS):
        store_value(here + 8, load_int64(unit + 8) + start)
        store_value(here + 16, min(QUERY_TILE_ROWS, load_int64(unit + 16) - start))
        backward_query_tile(f, table, (k, v, d_k, d_v), here, desk + size * QUERY_TILE_ROWS)


FLASH_ATTENTION_KERNELS = ParallelKernelSet(COMPUTE_DTYPES, forward=flash_forward, backward=flash_backward)
