"""What a kernel is told: an array of int64, and where in it each number lies."""

from __future__ import annotations

import math
from enum import IntEnum, auto

from numba import extending, njit

from .simd import (
    SIMD_WIDTH,
    as_compute_scalar,
    compute_itemsize,
    fma,
    load_int64,
    load_scalar,
    load_storage,
    load_storage_scalar,
    load_vector,
    prefetch_l1,
    reduce_max,
    reduce_sum,
    reduce_sum_16,
    round_up_to_simd,
    splat,
    storage_itemsize,
    store_quarter,
    store_value,
    vec_add,
    vec_exp,
    vec_max,
    vec_mul,
    vec_sub,
)

KV_BLOCK_SIZE, KV_SPLIT_SIZE = 64, 256  # keys that are read at once; keys that one thread takes on at a time
CACHE_LINE_BYTES = 64  # bytes that memory brings at once
PLAN_ENTRY_FIELDS = 7  # numbers of what is read at once
MAX_ROWS_TOGETHER = 8  # rows that read keys together at most


class PagedDecodeArgs(IntEnum):
    """The place of each number, as bytes from the start. Addresses and strides count bytes; 0 where there is none.

    A key lies at `K + number of its page x K_PAGE + head x K_HEAD + slot x K_SLOT`, its value and their scales
    likewise; what is added to its score at `BIAS + row x BIAS_ROW + head x BIAS_HEAD + column x BIAS_KEY`.
    """

    def _generate_next_value_(name, start, count, last_values):
        return 8 * count

    NEXT_WORK_ITEM = auto()  # counters: the next job, the next thread
    NEXT_THREAD = auto()
    NUM_WORK_ITEMS = auto()  # threads, then jobs
    MAX_SPLITS = auto()  # pieces there may be, then rows that read together
    Q = auto()  # [B, H, dim wide], scaled
    K = auto()
    V = auto()
    SPANS = auto()  # [B, N, 3]: page, first slot, end
    BIAS = auto()
    SINK = auto()  # [H]
    K_SCALE = auto()
    V_SCALE = auto()
    SOFTCAP = auto()  # a number: scores saturate there
    OUT = auto()  # [B, H, V]
    LSE = auto()  # [B, H]
    PLAN = auto()  # what is read at once, as `planning` notes it, at most 4 for each piece
    WORK_ITEMS = auto()  # [jobs + 1]: which of these is the first of a job
    SPLIT_STARTS = auto()  # [pieces, 3]: span, slot in it, whether a row before this one reads it too
    ROW_SPLITS = auto()  # [B, 3]: first piece, pieces, pieces done
    ROW_ORDER = auto()  # [B, 3]: row, keys that it has in common with the one before it, keys
    PAGE_HASH_TABLE = auto()  # a row for each page that a row begins with, or -1
    PARTIAL_OUTPUTS = auto()  # [pieces, H, vdim wide + 2]: what each piece reads, its top and its total
    SCRATCH = auto()  # where threads write, and how many bytes each has there
    SCRATCH_BYTES = auto()
    BATCH = auto()
    HEADS = auto()
    GROUPS = auto()
    DIM = auto()
    VDIM = auto()
    SPAN_COUNT = auto()
    PAGE_SIZE = auto()
    K_PAGE_STRIDE = auto()
    K_HEAD_STRIDE = auto()
    K_SLOT_STRIDE = auto()
    V_PAGE_STRIDE = auto()
    V_HEAD_STRIDE = auto()
    V_SLOT_STRIDE = auto()
    BIAS_ROW_STRIDE = auto()
    BIAS_HEAD_STRIDE = auto()
    BIAS_KEY_STRIDE = auto()
    SCALE_PAGE_STRIDE = auto()
    SCALE_HEAD_STRIDE = auto()
    SCALE_SLOT_STRIDE = auto()


def decode_scratch_bytes(heads: int, itemsize: int, rows: int = 1, qv_width: int = 0) -> int:
    """Bytes that a thread writes on: addresses for two blocks, scores and factors by head, one vector.

    Where rows read together, also their queries and what they read, `widths` for a head, and what they are told.
    """
    lists, own = 2 * 4 * 8 * KV_BLOCK_SIZE, 8 * (len(PagedDecodeArgs) + 1) if rows > 1 else 0
    heads *= rows
    numbers = heads * KV_BLOCK_SIZE + round_up_to_simd(heads) + SIMD_WIDTH + (heads * qv_width if rows > 1 else 0)
    return (lists + numbers * itemsize + own + CACHE_LINE_BYTES - 1) // CACHE_LINE_BYTES * CACHE_LINE_BYTES


def num_kv_splits(keys: int) -> int:
    """Into how many pieces so many keys of a row are cut; none are one empty piece."""
    return max(1, -(-keys // KV_SPLIT_SIZE))


def plan_size(batch: int, max_splits: int) -> int:
    """How many numbers note what is planned of so many rows and pieces, at most."""
    return (4 * PLAN_ENTRY_FIELDS + 4) * max_splits + 1 + 6 * batch + hash_table_size(batch)


@extending.register_jitable
def hash_table_size(batch: int) -> int:
    """The places of a list in which so many rows are looked up by a number, twice as many at least: a power of two."""
    count = 1
    while count < 2 * batch:
        count *= 2
    return count


# --- A block of keys, read by one query of every head --------------------------------------------------

KEYS_OFFSET, VALUES_OFFSET, SCALES_OFFSET, COLUMNS_OFFSET, NEXT_BLOCK_OFFSET = (8 * KV_BLOCK_SIZE * n for n in range(5))
SCORES_OFFSET = 2 * NEXT_BLOCK_OFFSET
KV_PREFETCH_BYTES = 12 * 2**10  # bytes between what is asked for and what is read: a memory's answer long
KEYS_PER_STEP = 4  # keys, or values, that are read at once
njit_inline = njit(forceinline=True)  # a call of their own costs what a seventh of four keys does


@njit
def load_row_tail(f, address, count, desk):
    """The last numbers of a row, that do not fill a vector."""
    store_value(desk, splat(as_compute_scalar(f, 0.0)))
    for n in range(count):
        store_value(desk + compute_itemsize(f) * n, load_storage_scalar(f, address + storage_itemsize(f) * n))
    return load_vector(f, desk)


@njit_inline
def fma_4_keys(x, y, a):
    """Sums with four products more."""
    return fma(x[0], y, a[0]), fma(x[1], y, a[1]), fma(x[2], y, a[2]), fma(x[3], y, a[3])


@njit_inline
def fma_4_keys_4_heads(f, x, q, apart, a):
    """Sums of four heads, the fourth so far from the first, with four products more of each."""
    first, second = fma_4_keys(x, load_vector(f, q), a[0]), fma_4_keys(x, load_vector(f, q + apart[0]), a[1])
    return (
        first,
        second,
        fma_4_keys(x, load_vector(f, q + 2 * apart[0]), a[2]),
        fma_4_keys(x, load_vector(f, q + apart[1]), a[3]),
    )


@njit_inline
def load_4_keys(f, keys, at):
    """Sixteen channels of four keys."""
    return (
        load_storage(f, keys[0] + at),
        load_storage(f, keys[1] + at),
        load_storage(f, keys[2] + at),
        load_storage(f, keys[3] + at),
    )


@njit
def load_4_keys_partial(f, keys, at, bounds, desk):
    """As many channels of as many keys as there are, of sixteen and of four; the others are 0 and not read."""
    count, some = bounds
    a, b = load_row_tail(f, keys[0] + at, count, desk), load_row_tail(f, keys[1] + at, count if some > 1 else 0, desk)
    c, d = (
        load_row_tail(f, keys[2] + at, count if some > 2 else 0, desk),
        load_row_tail(f, keys[3] + at, count if some > 3 else 0, desk),
    )
    return a, b, c, d


@njit_inline
def key_addresses(keys, offset):
    """Where one head of four keys, or of their values, lies."""
    return (
        load_int64(keys) + offset,
        load_int64(keys + 8) + offset,
        load_int64(keys + 16) + offset,
        load_int64(keys + 24) + offset,
    )


@njit_inline
def qk_4_heads(f, q, keys, bounds, tail, to):
    """The products of four keys with the queries of four heads, or of three, of which the last is then met twice."""
    dim, some, heads = bounds
    nothing = splat(as_compute_scalar(f, 0.0))
    none = (nothing, nothing, nothing, nothing)
    a = (none, none, none, none)
    full, apart, step = (
        dim // SIMD_WIDTH * SIMD_WIDTH if some == KEYS_PER_STEP else 0,
        compute_itemsize(f) * KV_BLOCK_SIZE,
        compute_itemsize(f) * round_up_to_simd(dim),
    )
    steps = step, step * (heads - 1)
    for n in range(0, full, SIMD_WIDTH):
        x, own = load_4_keys(f, keys, storage_itemsize(f) * n), q + compute_itemsize(f) * n
        a = fma_4_keys_4_heads(f, x, own, steps, a)
    for n in range(full, dim, SIMD_WIDTH):
        x, own = (
            load_4_keys_partial(f, keys, storage_itemsize(f) * n, (min(dim - n, SIMD_WIDTH), some), tail),
            q + compute_itemsize(f) * n,
        )
        a = fma_4_keys_4_heads(f, x, own, steps, a)
    found = reduce_sum_16(a)
    store_quarter(to, found, 0)
    store_quarter(to + apart, found, 1)
    store_quarter(to + 2 * apart, found, 2)
    store_quarter(to + (heads - 1) * apart, found, 3)


@njit_inline
def qk_1_head(f, q, keys, bounds, tail, to):
    """The products of four keys with the query of one head."""
    dim, some, _ = bounds
    nothing = splat(as_compute_scalar(f, 0.0))
    a, full = (nothing, nothing, nothing, nothing), dim // SIMD_WIDTH * SIMD_WIDTH if some == KEYS_PER_STEP else 0
    for n in range(0, full, SIMD_WIDTH):
        a = fma_4_keys(load_4_keys(f, keys, storage_itemsize(f) * n), load_vector(f, q + compute_itemsize(f) * n), a)
    for n in range(full, dim, SIMD_WIDTH):
        x = load_4_keys_partial(f, keys, storage_itemsize(f) * n, (min(dim - n, SIMD_WIDTH), some), tail)
        a = fma_4_keys(x, load_vector(f, q + compute_itemsize(f) * n), a)
    store_value(to, reduce_sum(a[0]))
    store_value(to + compute_itemsize(f), reduce_sum(a[1]))
    store_value(to + 2 * compute_itemsize(f), reduce_sum(a[2]))
    store_value(to + 3 * compute_itemsize(f), reduce_sum(a[3]))


@njit
def heads_per_step(left):
    """How many heads are read beside each other, of those that are left: four or three; two take longer so."""
    return min(left, 4) if left > 2 else 1


@njit_inline
def qk_head_group(f, q, keys, bounds, tail, to):
    """The products of four keys with the queries of all heads that share them."""
    dim, some, each = bounds
    h, apart, step = 0, compute_itemsize(f) * KV_BLOCK_SIZE, compute_itemsize(f) * round_up_to_simd(dim)
    while h < each:
        heads = heads_per_step(each - h)
        if heads > 1:
            qk_4_heads(f, q + step * h, keys, (dim, some, heads), tail, to + apart * h)
        else:
            qk_1_head(f, q + step * h, keys, (dim, some, heads), tail, to + apart * h)
        h += heads


@njit
def prefetch_distance(told, each):
    """How many keys before it is read each is asked for: so many that `AHEAD` bytes lie between, a block at most."""
    held = (
        KEYS_PER_STEP
        * load_int64(told + PagedDecodeArgs.GROUPS)
        * each
        * (load_int64(told + PagedDecodeArgs.DIM) + load_int64(told + PagedDecodeArgs.VDIM))
        // 2
    )
    return min(KEYS_PER_STEP * ((KV_PREFETCH_BYTES + held - 1) // held), KV_BLOCK_SIZE)


@njit
def prefetch_targets(i, here, there):
    """Which keys to ask for while four are read: their list, how many there are, what a head of them holds and how far
    it is to the next head, and whether all of that lies in one piece."""
    list_, count, held, apart, groups = here
    if i >= count:
        i -= (count + KEYS_PER_STEP - 1) // KEYS_PER_STEP * KEYS_PER_STEP
        list_, count, held, apart, groups = there
    list_, some = list_ + 8 * i, min(KEYS_PER_STEP, count - i)
    joined = (
        some > 0
        and apart == held
        and load_int64(list_ + 8 * (some - 1)) - load_int64(list_) == (some - 1) * groups * held
    )
    return list_, some, held, apart, joined


@njit_inline
def prefetch_head(g, groups, keys):
    """Ask for what one head is asked of: its part of some keys in the order in which they lie, or its own numbers."""
    list_, some, held, apart, joined = keys
    if joined:
        begin, end = load_int64(list_) + g * KEYS_PER_STEP * held, load_int64(list_) + some * groups * held
        for line in range(begin, min(begin + KEYS_PER_STEP * held, end), 4 * CACHE_LINE_BYTES):
            prefetch_l1(line)
            prefetch_l1(line + CACHE_LINE_BYTES)
            prefetch_l1(line + 2 * CACHE_LINE_BYTES)
            prefetch_l1(line + 3 * CACHE_LINE_BYTES)
    else:
        for n in range(some):
            begin = load_int64(list_ + 8 * n) + g * apart
            for line in range(begin, begin + held, CACHE_LINE_BYTES):
                prefetch_l1(line)


@njit
def qk_block(f, told, q, desk, count):
    """The scores of a block, four keys at a time as they lie in memory; those that follow are asked for on the way."""
    heads, groups, dim = (
        load_int64(told + PagedDecodeArgs.HEADS),
        load_int64(told + PagedDecodeArgs.GROUPS),
        load_int64(told + PagedDecodeArgs.DIM),
    )
    each, apart, step, k_head = (
        heads // groups,
        compute_itemsize(f) * KV_BLOCK_SIZE,
        compute_itemsize(f) * round_up_to_simd(dim),
        load_int64(told + PagedDecodeArgs.K_HEAD_STRIDE),
    )
    tail, before = (
        desk + SCORES_OFFSET + compute_itemsize(f) * (heads * KV_BLOCK_SIZE + round_up_to_simd(heads)),
        prefetch_distance(told, storage_itemsize(f)),
    )
    here = desk + KEYS_OFFSET, count, storage_itemsize(f) * dim, k_head, groups
    there = (
        desk + VALUES_OFFSET,
        count,
        storage_itemsize(f) * load_int64(told + PagedDecodeArgs.VDIM),
        load_int64(told + PagedDecodeArgs.V_HEAD_STRIDE),
        groups,
    )
    for i in range(0, count, KEYS_PER_STEP):
        scores, some = desk + SCORES_OFFSET + compute_itemsize(f) * i, min(KEYS_PER_STEP, count - i)
        after = prefetch_targets(i + before, here, there)
        for g in range(groups):
            prefetch_head(g, groups, after)
            keys, h = key_addresses(desk + KEYS_OFFSET + 8 * i, g * k_head), g * each
            qk_head_group(f, q + step * h, keys, (dim, some, each), tail, scores + apart * h)


@njit_inline
def load_4_weights(f, scores):
    """What four keys have of one head, each sixteen times."""
    a, b = splat(load_scalar(f, scores)), splat(load_scalar(f, scores + compute_itemsize(f)))
    return (
        a,
        b,
        splat(load_scalar(f, scores + 2 * compute_itemsize(f))),
        splat(load_scalar(f, scores + 3 * compute_itemsize(f))),
    )


@njit_inline
def fma_4_values(x, p, a):
    """A sum with four products more."""
    return fma(x[3], p[3], fma(x[2], p[2], fma(x[1], p[1], fma(x[0], p[0], a))))


@njit_inline
def accumulate_4_values(f, to, x, p):
    """What was read before, with what is read of four values."""
    store_value(to, fma_4_values(x, p, load_vector(f, to)))


@njit_inline
def accumulate_4_values_4_heads(f, to, apart, x, p):
    """The same of three heads, and of a fourth where there is one."""
    step, heads = apart
    accumulate_4_values(f, to, x, p[0])
    accumulate_4_values(f, to + step, x, p[1])
    accumulate_4_values(f, to + 2 * step, x, p[2])
    if heads > 3:
        accumulate_4_values(f, to + 3 * step, x, p[3])


@njit_inline
def pv_4_heads(f, scores, keys, bounds, tail, place):
    """What four heads, or three, read of four values."""
    (dim, some, heads), (to, step) = bounds, place
    apart, full = compute_itemsize(f) * KV_BLOCK_SIZE, dim // SIMD_WIDTH * SIMD_WIDTH if some == KEYS_PER_STEP else 0
    p0, p1 = load_4_weights(f, scores), load_4_weights(f, scores + apart)
    p, step = (
        (p0, p1, load_4_weights(f, scores + 2 * apart), load_4_weights(f, scores + (heads - 1) * apart)),
        (step, heads),
    )
    for n in range(0, full, SIMD_WIDTH):
        x, own = load_4_keys(f, keys, storage_itemsize(f) * n), to + compute_itemsize(f) * n
        accumulate_4_values_4_heads(f, own, step, x, p)
    for n in range(full, dim, SIMD_WIDTH):
        x, own = (
            load_4_keys_partial(f, keys, storage_itemsize(f) * n, (min(dim - n, SIMD_WIDTH), some), tail),
            to + compute_itemsize(f) * n,
        )
        accumulate_4_values_4_heads(f, own, step, x, p)


@njit_inline
def pv_1_head(f, scores, keys, bounds, tail, to):
    """What one head reads of four values."""
    dim, some, _ = bounds
    p, full = load_4_weights(f, scores), dim // SIMD_WIDTH * SIMD_WIDTH if some == KEYS_PER_STEP else 0
    for n in range(0, full, SIMD_WIDTH):
        accumulate_4_values(f, to + compute_itemsize(f) * n, load_4_keys(f, keys, storage_itemsize(f) * n), p)
    for n in range(full, dim, SIMD_WIDTH):
        x = load_4_keys_partial(f, keys, storage_itemsize(f) * n, (min(dim - n, SIMD_WIDTH), some), tail)
        accumulate_4_values(f, to + compute_itemsize(f) * n, x, p)


@njit_inline
def pv_head_group(f, scores, keys, bounds, tail, place):
    """What all heads that share them read of four values."""
    (dim, some, each), (to, step) = bounds, place
    h, apart = 0, compute_itemsize(f) * KV_BLOCK_SIZE
    while h < each:
        heads = heads_per_step(each - h)
        if heads > 1:
            pv_4_heads(f, scores + apart * h, keys, (dim, some, heads), tail, (to + step * h, step))
        else:
            pv_1_head(f, scores + apart * h, keys, (dim, some, heads), tail, to + step * h)
        h += heads


@njit
def rescale_output(f, told, factors, part):
    """What was read before, where a larger score than all before is found since."""
    vdim = load_int64(told + PagedDecodeArgs.VDIM)
    for h in range(load_int64(told + PagedDecodeArgs.HEADS)):
        factor, to = (
            load_scalar(f, factors + compute_itemsize(f) * h),
            part + compute_itemsize(f) * (round_up_to_simd(vdim) + 2) * h,
        )
        if factor != as_compute_scalar(f, 1.0):
            for n in range(0, vdim, SIMD_WIDTH):
                store_value(
                    to + compute_itemsize(f) * n, vec_mul(load_vector(f, to + compute_itemsize(f) * n), splat(factor))
                )


@njit
def pv_block(f, told, desk, part, count, following):
    """What every head reads of the values of a block, added to what it has read before; of those keys that follow as
    much is asked for on the way."""
    heads, groups, dim = (
        load_int64(told + PagedDecodeArgs.HEADS),
        load_int64(told + PagedDecodeArgs.GROUPS),
        load_int64(told + PagedDecodeArgs.VDIM),
    )
    each, apart, step, v_head = (
        heads // groups,
        compute_itemsize(f) * KV_BLOCK_SIZE,
        compute_itemsize(f) * (round_up_to_simd(dim) + 2),
        load_int64(told + PagedDecodeArgs.V_HEAD_STRIDE),
    )
    factors, before = (
        desk + SCORES_OFFSET + compute_itemsize(f) * heads * KV_BLOCK_SIZE,
        prefetch_distance(told, storage_itemsize(f)),
    )
    here, tail = (
        (desk + VALUES_OFFSET, count, storage_itemsize(f) * dim, v_head, groups),
        factors + compute_itemsize(f) * round_up_to_simd(heads),
    )
    there = (
        desk + NEXT_BLOCK_OFFSET + KEYS_OFFSET,
        following,
        storage_itemsize(f) * load_int64(told + PagedDecodeArgs.DIM),
        load_int64(told + PagedDecodeArgs.K_HEAD_STRIDE),
        groups,
    )
    rescale_output(f, told, factors, part)
    for i in range(0, count, KEYS_PER_STEP):
        scores, some = desk + SCORES_OFFSET + compute_itemsize(f) * i, min(KEYS_PER_STEP, count - i)
        after = prefetch_targets(i + before, here, there)
        for g in range(groups):
            prefetch_head(g, groups, after)
            keys, h = key_addresses(desk + VALUES_OFFSET + 8 * i, g * v_head), g * each
            pv_head_group(f, scores + apart * h, keys, (dim, some, each), tail, (part + step * h, step))


# --- Scores of a block of keys, before their values are read -------------------------------------------


@njit
def apply_kv_scale(f, told, scale, desk, count):
    """Numbers of a block times the scale of the keys, or values, that they belong to."""
    heads, groups, head = (
        load_int64(told + PagedDecodeArgs.HEADS),
        load_int64(told + PagedDecodeArgs.GROUPS),
        load_int64(told + PagedDecodeArgs.SCALE_HEAD_STRIDE),
    )
    for h in range(heads):
        x, own = desk + SCORES_OFFSET + compute_itemsize(f) * KV_BLOCK_SIZE * h, scale + h // (heads // groups) * head
        for i in range(count):
            store_value(
                x + compute_itemsize(f) * i,
                load_scalar(f, x + compute_itemsize(f) * i)
                * load_scalar(f, own + load_int64(desk + SCALES_OFFSET + 8 * i)),
            )


@njit
def apply_softcap(f, told, desk, count):
    """Scores with their ceiling."""
    cap = load_int64(told + PagedDecodeArgs.SOFTCAP)
    for h in range(load_int64(told + PagedDecodeArgs.HEADS)):
        x = desk + SCORES_OFFSET + compute_itemsize(f) * KV_BLOCK_SIZE * h
        for i in range(count):
            share = math.tanh(load_scalar(f, x + compute_itemsize(f) * i) / load_scalar(f, cap))
            store_value(x + compute_itemsize(f) * i, as_compute_scalar(f, share) * load_scalar(f, cap))


@njit
def add_bias_to_head(f, x, own, key, desk, count):
    """Scores of one head with what is added to them; sixteen at once where columns follow each other."""
    first = load_int64(desk + COLUMNS_OFFSET)
    joined = key == compute_itemsize(f) and load_int64(desk + COLUMNS_OFFSET + 8 * count - 8) == first + count - 1
    full = count // SIMD_WIDTH * SIMD_WIDTH if joined else 0
    for i in range(0, full, SIMD_WIDTH):
        store_value(
            x + compute_itemsize(f) * i,
            vec_add(
                load_vector(f, x + compute_itemsize(f) * i), load_vector(f, own + compute_itemsize(f) * (first + i))
            ),
        )
    for i in range(full, count):
        more = load_scalar(f, own + load_int64(desk + COLUMNS_OFFSET + 8 * i) * key)
        store_value(x + compute_itemsize(f) * i, load_scalar(f, x + compute_itemsize(f) * i) + more)


@njit
def add_bias(f, told, row, desk, count):
    """Scores with what is added to them."""
    for h in range(load_int64(told + PagedDecodeArgs.HEADS)):
        own = (
            load_int64(told + PagedDecodeArgs.BIAS)
            + row * load_int64(told + PagedDecodeArgs.BIAS_ROW_STRIDE)
            + h * load_int64(told + PagedDecodeArgs.BIAS_HEAD_STRIDE)
        )
        add_bias_to_head(
            f,
            desk + SCORES_OFFSET + compute_itemsize(f) * KV_BLOCK_SIZE * h,
            own,
            load_int64(told + PagedDecodeArgs.BIAS_KEY_STRIDE),
            desk,
            count,
        )


@njit
def online_softmax(f, told, desk, part, count):
    """Scores to shares of the largest so far, and by which factor what was read before shrinks."""
    factors = desk + SCORES_OFFSET + compute_itemsize(f) * load_int64(told + PagedDecodeArgs.HEADS) * KV_BLOCK_SIZE
    step, lowest = (
        compute_itemsize(f) * (round_up_to_simd(load_int64(told + PagedDecodeArgs.VDIM)) + 2),
        as_compute_scalar(f, -math.inf),
    )
    for h in range(load_int64(told + PagedDecodeArgs.HEADS)):
        x, ends = (
            desk + SCORES_OFFSET + compute_itemsize(f) * KV_BLOCK_SIZE * h,
            part + step * (h + 1) - 2 * compute_itemsize(f),
        )
        for i in range(count, round_up_to_simd(count)):
            store_value(x + compute_itemsize(f) * i, lowest)
        top = splat(lowest)
        for c in range(0, count, SIMD_WIDTH):
            top = vec_max(top, load_vector(f, x + compute_itemsize(f) * c))
        old = load_scalar(f, ends)
        new = max(old, reduce_max(top))
        base = new if new > lowest else as_compute_scalar(f, 0.0)  # where all are -inf, each share is e^-inf
        factor, sums = as_compute_scalar(f, math.exp(old - base)), splat(as_compute_scalar(f, 0.0))
        for c in range(0, count, SIMD_WIDTH):
            e = vec_exp(vec_sub(load_vector(f, x + compute_itemsize(f) * c), splat(base)))
            store_value(x + compute_itemsize(f) * c, e)
            sums = vec_add(sums, e)
        store_value(ends, new)
        store_value(ends + compute_itemsize(f), load_scalar(f, ends + compute_itemsize(f)) * factor + reduce_sum(sums))
        store_value(factors + compute_itemsize(f) * h, factor)
