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

from .blocks import NEXT_BLOCK_OFFSET, qk_block, pv_block
from .compiled import KernelSet
from .lanes import SIMD_WIDTH, fma, splat, vec_mul, round_up_to_simd
from .memory import as_compute_scalar, store_value, load_vector, load_scalar, compute_itemsize, fetch_and_increment, load_int64
from .planning import PLAN_ENTRY_BYTES, fill_block_addresses, plan_split_kv, prepare_next_block
from .scoring import add_bias, apply_softcap, apply_kv_scale, online_softmax
from .together import init_partial_output, attend_shared_prefix
from .told import KV_BLOCK_SIZE, PagedDecodeArgs

KV_STORAGE_DTYPES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16", torch.int8: "int8"}


@njit
def attend_split(f, told, entry, following, desk):
    """Read keys for one row, block by block, while the next are fetched."""
    heads, this = load_int64(told + PagedDecodeArgs.HEADS), load_int64(told + PagedDecodeArgs.PLAN) + PLAN_ENTRY_BYTES * entry
    n, slot, left = load_int64(this + 16), load_int64(this + 24), load_int64(this + 32)
    row, step = load_int64(load_int64(told + PagedDecodeArgs.ROW_ORDER) + 24 * load_int64(this)), compute_itemsize(f) * (round_up_to_simd(load_int64(told + PagedDecodeArgs.VDIM)) + 2)
    number_ = load_int64(load_int64(told + PagedDecodeArgs.ROW_SPLITS) + 24 * row) + load_int64(this + 40)
    part = load_int64(told + PagedDecodeArgs.PARTIAL_OUTPUTS) + number_ * heads * step
    q = load_int64(told + PagedDecodeArgs.Q) + row * heads * compute_itemsize(f) * round_up_to_simd(load_int64(told + PagedDecodeArgs.DIM))
    k_scale, v_scale = load_int64(told + PagedDecodeArgs.K_SCALE), load_int64(told + PagedDecodeArgs.V_SCALE)
    if load_int64(this + 48):
        init_partial_output(f, told, part)
    while left > 0:
        count = min(left, KV_BLOCK_SIZE)
        n, slot = fill_block_addresses(told, row, n, slot, desk, count)
        left -= count
        if left > 0:
            after = min(left, KV_BLOCK_SIZE)
            fill_block_addresses(told, row, n, slot, desk + NEXT_BLOCK_OFFSET, after)
        else:
            after = prepare_next_block(told, following, desk)
        qk_block(f, told, q, desk, count)
        if k_scale:
            apply_kv_scale(f, told, k_scale, desk, count)
        if load_int64(told + PagedDecodeArgs.SOFTCAP):
            apply_softcap(f, told, desk, count)
        if load_int64(told + PagedDecodeArgs.BIAS):
            add_bias(f, told, row, desk, count)
        online_softmax(f, told, desk, part, count)
        if v_scale:
            apply_kv_scale(f, told, v_scale, desk, count)
        pv_block(f, told, desk, part, count, after)


@njit
def finite_max(f, top):
    """What scores are measured from: their largest, or 0 where all are -inf."""
    return top if top > as_compute_scalar(f, -math.inf) else as_compute_scalar(f, 0.0)


@njit
def combine_channels(f, part, way, over):
    """Sixteen channels of all pieces, each by its share."""
    (apart, count, share), a = way, splat(as_compute_scalar(f, 0.0))
    for n in range(count):
        a = fma(load_vector(f, part + n * apart), splat(load_scalar(f, part + n * apart + share)), a)
    return vec_mul(a, splat(over))


@njit
def store_channels(f, to, a, left, scratch):
    """Write sixteen channels, or as many as are left, by way of sixteen numbers that nobody needs any more."""
    if left >= SIMD_WIDTH:
        store_value(to, a)
        return
    store_value(scratch, a)
    for d in range(left):
        store_value(to + compute_itemsize(f) * d, load_scalar(f, scratch + compute_itemsize(f) * d))


@njit
def combine_splits(f, told, row):
    """What all pieces of a row read, by their shares of the whole; and how much there was to read."""
    heads, vdim, b = load_int64(told + PagedDecodeArgs.HEADS), load_int64(told + PagedDecodeArgs.VDIM), compute_itemsize(f)
    step, table, lowest = b * (round_up_to_simd(vdim) + 2), load_int64(told + PagedDecodeArgs.ROW_SPLITS) + 24 * row, as_compute_scalar(f, -math.inf)
    first, count, sink = load_int64(table), load_int64(table + 8), load_int64(told + PagedDecodeArgs.SINK)
    for h in range(heads):
        part, apart = load_int64(told + PagedDecodeArgs.PARTIAL_OUTPUTS) + (first * heads + h) * step, heads * step
        top, own = lowest, as_compute_scalar(f, 0.0)
        for n in range(count):
            top = max(top, load_scalar(f, part + n * apart + step - 2 * b))
        for n in range(count):
            ends = part + n * apart + step - 2 * b
            own += load_scalar(f, ends + b) * as_compute_scalar(f, math.exp(load_scalar(f, ends) - finite_max(f, top)))
        store_value(load_int64(told + PagedDecodeArgs.LSE) + (row * heads + h) * b, as_compute_scalar(f, math.log(own)) + finite_max(f, top))
        top = max(top, load_scalar(f, sink + b * h)) if sink else top
        base = finite_max(f, top)
        sums = as_compute_scalar(f, math.exp(load_scalar(f, sink + b * h) - base)) if sink else as_compute_scalar(f, 0.0)
        for n in range(count):
            ends = part + n * apart + step - 2 * b
            share = as_compute_scalar(f, math.exp(load_scalar(f, ends) - base))
            sums += load_scalar(f, ends + b) * share
            store_value(ends, share)
        over = as_compute_scalar(f, 1.0) / (sums if sums != 0 else as_compute_scalar(f, 1.0))  # who may read nothing reads zero
        to = load_int64(told + PagedDecodeArgs.OUT) + (row * heads + h) * b * vdim
        for c in range(0, vdim, SIMD_WIDTH):
            store_channels(f, to + b * c, combine_channels(f, part + b * c, (apart, count, step - 2 * b - b * c), over), vdim - c, part)


@njit
def first_plan_entry(told, job):
    """What a job begins with, or -1 behind the last."""
    return load_int64(load_int64(told + PagedDecodeArgs.WORK_ITEMS) + 8 * job) if job < load_int64(told + PagedDecodeArgs.NUM_WORK_ITEMS) else -1


@extending.register_jitable
def run_work_items(f, told):
    """What every thread does: take a job, read what it says, until there are no more."""
    desk = load_int64(told + PagedDecodeArgs.SCRATCH) + fetch_and_increment(told + PagedDecodeArgs.NEXT_THREAD) * load_int64(told + PagedDecodeArgs.SCRATCH_BYTES)
    table, order, this = load_int64(told + PagedDecodeArgs.ROW_SPLITS), load_int64(told + PagedDecodeArgs.ROW_ORDER), fetch_and_increment(told + PagedDecodeArgs.NEXT_WORK_ITEM)
    while this < load_int64(told + PagedDecodeArgs.NUM_WORK_ITEMS):
        following, entry, end = fetch_and_increment(told + PagedDecodeArgs.NEXT_WORK_ITEM), first_plan_entry(told, this), load_int64(load_int64(told + PagedDecodeArgs.WORK_ITEMS) + 8 * this + 8)
        begin = load_int64(told + PagedDecodeArgs.PLAN) + PLAN_ENTRY_BYTES * entry
        while entry < end:
            after = entry + 1 if entry + 1 < end else first_plan_entry(told, following)
            if load_int64(load_int64(told + PagedDecodeArgs.PLAN) + PLAN_ENTRY_BYTES * entry + 8) > 1:
                attend_shared_prefix(f, told, entry, after, desk)
            else:
                attend_split(f, told, entry, after, desk)
            entry += 1
        for at in range(load_int64(begin), load_int64(begin) + load_int64(begin + 8)):
            row = load_int64(order + 24 * at)
            if fetch_and_increment(table + 24 * row + 16) + 1 == load_int64(table + 24 * row + 8):
                combine_splits(f, told, row)
        this = following


PAGED_DECODE_KERNELS = KernelSet(KV_STORAGE_DTYPES, plan=plan_split_kv, work=run_work_items)
