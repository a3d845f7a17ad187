"""Work planning for paged decode: split the keys of every row and find prefixes that rows share.

The keys of a row are cut into splits of 256 (`KV_SPLIT_SIZE`), as in Flash-Decoding. Rows whose block tables begin
alike have the same keys there; these are read once for all of them (Hydragen, 2402.05099; ChunkAttention, 2402.15220).
For this, rows are ordered so that each follows one with which it shares the longest prefix, as in a traversal of a
prefix tree. Rows that read a block of keys together are then adjacent, whatever they share with other rows.

Where a row's splits and blocks end does not depend on other rows, and so neither does its result.

Loop order of the `plan` kernel, which runs in one thread: order the rows, cut each row, then for each row and split
make one work item: the plan entries of this split for all rows that read it together. It computes no tensor, so
there is no equivalent PyTorch function.
"""

from __future__ import annotations

from numba import extending, njit

from .kv_block_attention import (
    COLUMNS_OFFSET,
    KEYS_OFFSET,
    NEXT_BLOCK_OFFSET,
    SCALES_OFFSET,
    VALUES_OFFSET,
)
from .paged_decode import (
    KV_BLOCK_SIZE,
    KV_SPLIT_SIZE,
    MAX_ROWS_TOGETHER,
    PLAN_ENTRY_FIELDS,
    PagedDecodeArgs,
    hash_table_size,
)
from .simd import load_int64, store_value

PLAN_ENTRY_BYTES = (
    8 * PLAN_ENTRY_FIELDS
)  # fields: place in the order, rows, span, slot, keys, split number, whether it begins the split


@njit
def count_shared_spans(told, row, other, n):
    """Return with how many equal spans the block tables of two rows begin; the first n are known to be equal."""
    count = load_int64(told + PagedDecodeArgs.SPAN_COUNT)
    a, b = (
        load_int64(told + PagedDecodeArgs.SPANS) + 24 * row * count,
        load_int64(told + PagedDecodeArgs.SPANS) + 24 * other * count,
    )
    while (
        n < count
        and load_int64(a + 24 * n) == load_int64(b + 24 * n)
        and load_int64(a + 24 * n + 8) == load_int64(b + 24 * n + 8)
        and load_int64(a + 24 * n + 16) == load_int64(b + 24 * n + 16)
    ):
        n += 1
    return n


@njit
def find_row_with_page(told, row):
    """Return True if an earlier row begins with the same page; otherwise add this row to the hash table."""
    table, last, step = (
        load_int64(told + PagedDecodeArgs.PAGE_HASH_TABLE),
        hash_table_size(load_int64(told + PagedDecodeArgs.BATCH)) - 1,
        24 * load_int64(told + PagedDecodeArgs.SPAN_COUNT),
    )
    page = load_int64(load_int64(told + PagedDecodeArgs.SPANS) + step * row)
    n = page & last
    while load_int64(table + 8 * n) >= 0:
        if load_int64(load_int64(told + PagedDecodeArgs.SPANS) + step * load_int64(table + 8 * n)) == page:
            return True
        n = (n + 1) & last
    store_value(table + 8 * n, row)
    return False


@njit
def order_rows_by_prefix(told):
    """Insert each row behind one with which it shares the most spans, and store how many they share."""
    table = load_int64(told + PagedDecodeArgs.ROW_ORDER)
    for n in range(hash_table_size(load_int64(told + PagedDecodeArgs.BATCH))):
        store_value(load_int64(told + PagedDecodeArgs.PAGE_HASH_TABLE) + 8 * n, -1)
    for row in range(load_int64(told + PagedDecodeArgs.BATCH)):
        at, common = row, 0
        if load_int64(told + PagedDecodeArgs.SPAN_COUNT) and find_row_with_page(told, row):
            at, common = 1, count_shared_spans(told, row, load_int64(table), 0)
        while at < row and load_int64(table + 24 * at + 8) >= common:
            if load_int64(table + 24 * at + 8) == common:
                common = count_shared_spans(told, row, load_int64(table + 24 * at), common)
            at += 1
        for n in range(row, at, -1):
            store_value(table + 24 * n, load_int64(table + 24 * n - 24))
            store_value(table + 24 * n + 8, load_int64(table + 24 * n - 16))
        store_value(table + 24 * at, row)
        store_value(table + 24 * at + 8, common)


@njit
def split_row(told, at, n):
    """Write where each split of the row at place `at` of the order begins, from split number n on.

    Also replaces the row's count of shared spans by its shared keys, and stores its number of keys. Returns the next
    split number; a row without keys has one split.
    """
    entry, starts, held, common = (
        load_int64(told + PagedDecodeArgs.ROW_ORDER) + 24 * at,
        load_int64(told + PagedDecodeArgs.SPLIT_STARTS),
        0,
        0,
    )
    count, spans = load_int64(told + PagedDecodeArgs.SPAN_COUNT), load_int64(entry + 8)
    span = load_int64(told + PagedDecodeArgs.SPANS) + 24 * load_int64(entry) * count
    store_value(starts + 24 * n + 16, 0)
    for index in range(count):
        slot, end = load_int64(span + 24 * index + 8), load_int64(span + 24 * index + 16)
        while slot < end:
            if held % KV_SPLIT_SIZE == 0:
                this = starts + 24 * (n + held // KV_SPLIT_SIZE)
                store_value(this, index)
                store_value(this + 8, slot)
                store_value(this + 16, 0)
            step = min(end - slot, KV_SPLIT_SIZE - held % KV_SPLIT_SIZE)
            slot, held = slot + step, held + step
        common = held if index < spans else common
    store_value(entry + 8, common)
    store_value(entry + 16, held)
    return n + max(1, (held + KV_SPLIT_SIZE - 1) // KV_SPLIT_SIZE)


@njit
def shares_block_with_previous(told, at, begin):
    """Return True if the row at `at` has the same block of keys from `begin` on as the row before it in the order."""
    entry = load_int64(told + PagedDecodeArgs.ROW_ORDER) + 24 * at
    end = min(begin + KV_BLOCK_SIZE, load_int64(entry + 16))
    return begin < end <= load_int64(entry + 8) and end == min(begin + KV_BLOCK_SIZE, load_int64(entry - 8))


@njit
def append_plan_entry(told, entry, who, where, piece):
    """Write a plan entry: the rows that read it, its first key and number of keys, its split. Return the next index."""
    (at, rows), (n, slot, count), (number, begins) = who, where, piece
    this = load_int64(told + PagedDecodeArgs.PLAN) + PLAN_ENTRY_BYTES * entry
    store_value(this, at)
    store_value(this + 8, rows)
    store_value(this + 16, n)
    store_value(this + 24, slot)
    store_value(this + 32, count)
    store_value(this + 40, number)
    store_value(this + 48, begins)
    return entry + 1


@njit
def shares_whole_split(told, at, rows, begin):
    """Return True if `rows` rows from `at` on share the whole split that begins at key `begin`."""
    table = load_int64(told + PagedDecodeArgs.ROW_ORDER)
    end = min(begin + KV_SPLIT_SIZE, load_int64(table + 24 * at + 16))
    for other in range(at + 1, at + rows):
        if (
            min(begin + KV_SPLIT_SIZE, load_int64(table + 24 * other + 16)) != end
            or load_int64(table + 24 * other + 8) < end
        ):
            return False
    return True


@njit
def advance_position(told, row, place, count):
    """Return the span and slot of the key `count` keys behind a position of a row."""
    (n, slot), spans = (
        place,
        load_int64(told + PagedDecodeArgs.SPANS) + 24 * row * load_int64(told + PagedDecodeArgs.SPAN_COUNT),
    )
    while count > 0:
        step = max(0, min(count, load_int64(spans + 24 * n + 16) - slot))
        slot, count = slot + step, count - step
        if count > 0:
            n += 1
            slot = load_int64(spans + 24 * n + 8)
    return n, slot


@njit
def split_start(told, row, number):
    """Return the span and slot at which a split of a row begins."""
    this = load_int64(told + PagedDecodeArgs.SPLIT_STARTS) + 24 * (
        load_int64(load_int64(told + PagedDecodeArgs.ROW_SPLITS) + 24 * row) + number
    )
    return load_int64(this), load_int64(this + 8)


@njit
def plan_split_by_sharing(told, entry, at, rows, number):
    """Write one plan entry for each block of a split and each run of rows that share the block."""
    table = load_int64(told + PagedDecodeArgs.ROW_ORDER)
    for begin in range(KV_SPLIT_SIZE * number, KV_SPLIT_SIZE * (number + 1), KV_BLOCK_SIZE):
        first = 0
        while first < rows:
            this, some, held = at + first, 1, load_int64(table + 24 * (at + first) + 16)
            while first + some < rows and shares_block_with_previous(told, this + some, begin):
                some += 1
            if begin < held:
                row = load_int64(table + 24 * this)
                n, slot = advance_position(told, row, split_start(told, row, number), begin - KV_SPLIT_SIZE * number)
                where = n, slot, min(KV_BLOCK_SIZE, held - begin)
                entry = append_plan_entry(
                    told, entry, (this, some), where, (number, 1 if begin == KV_SPLIT_SIZE * number else 0)
                )
            first += some
    return entry


@njit
def max_rows_together(told, pieces):
    """Return how many rows may read together: fewer if threads would otherwise be idle. This changes no result."""
    threads = load_int64(told + PagedDecodeArgs.NUM_WORK_ITEMS)
    return MAX_ROWS_TOGETHER if threads == 1 else max(1, min(MAX_ROWS_TOGETHER, pieces // (2 * threads)))


@njit
def count_rows_sharing_block(told, at, begin, most):
    """Return how many rows from `at` on read the block at `begin` together, at most `most`.

    The last rows are divided evenly rather than leaving a small remainder.
    """
    rows, batch = 1, load_int64(told + PagedDecodeArgs.BATCH)
    while rows < 2 * most and at + rows < batch and shares_block_with_previous(told, at + rows, begin):
        rows += 1
    return rows if rows <= most else min(most, (rows + 1) // 2)


@njit
def plan_shared_split(told, entry, at, number, most):
    """Write the plan entries of one split for a row and the following rows that share its first block."""
    table, rows = (
        load_int64(told + PagedDecodeArgs.ROW_ORDER),
        count_rows_sharing_block(told, at, KV_SPLIT_SIZE * number, most),
    )
    for other in range(at + 1, at + rows):
        first = load_int64(load_int64(told + PagedDecodeArgs.ROW_SPLITS) + 24 * load_int64(table + 24 * other))
        store_value(load_int64(told + PagedDecodeArgs.SPLIT_STARTS) + 24 * (first + number) + 16, 1)
    if not shares_whole_split(told, at, rows, KV_SPLIT_SIZE * number):
        entry = plan_split_by_sharing(told, entry, at, rows, number)
    else:
        n, slot = split_start(told, load_int64(table + 24 * at), number)
        count = min(KV_SPLIT_SIZE, load_int64(table + 24 * at + 16) - KV_SPLIT_SIZE * number)
        entry = append_plan_entry(told, entry, (at, rows), (n, slot, count), (number, 1))
    store_value(told + PagedDecodeArgs.MAX_SPLITS, max(load_int64(told + PagedDecodeArgs.MAX_SPLITS), rows))
    return entry


@njit
def lay_out_plan_tables(told):
    """Write the addresses of the plan's tables into the kernel arguments, sized for `MAX_SPLITS` splits."""
    most, batch, begin = (
        load_int64(told + PagedDecodeArgs.MAX_SPLITS),
        load_int64(told + PagedDecodeArgs.BATCH),
        load_int64(told + PagedDecodeArgs.PLAN),
    )
    store_value(told + PagedDecodeArgs.WORK_ITEMS, begin + PLAN_ENTRY_BYTES * 4 * most)
    store_value(told + PagedDecodeArgs.SPLIT_STARTS, load_int64(told + PagedDecodeArgs.WORK_ITEMS) + 8 * (most + 1))
    store_value(told + PagedDecodeArgs.ROW_SPLITS, load_int64(told + PagedDecodeArgs.SPLIT_STARTS) + 24 * most)
    store_value(told + PagedDecodeArgs.ROW_ORDER, load_int64(told + PagedDecodeArgs.ROW_SPLITS) + 24 * batch)
    store_value(told + PagedDecodeArgs.PAGE_HASH_TABLE, load_int64(told + PagedDecodeArgs.ROW_ORDER) + 24 * batch)
    store_value(told + PagedDecodeArgs.MAX_SPLITS, 1)


@extending.register_jitable
def plan_split_kv(told):
    """Kernel `plan`: cut the keys of every row into splits and make the work items that threads take."""
    lay_out_plan_tables(told)
    table, n, entry, job = load_int64(told + PagedDecodeArgs.ROW_ORDER), 0, 0, 0
    order_rows_by_prefix(told)
    for at in range(load_int64(told + PagedDecodeArgs.BATCH)):
        this, end = (
            load_int64(told + PagedDecodeArgs.ROW_SPLITS) + 24 * load_int64(table + 24 * at),
            split_row(told, at, n),
        )
        store_value(this, n)
        store_value(this + 8, end - n)
        store_value(this + 16, 0)
        n = end
    most = max_rows_together(told, n)
    for at in range(load_int64(told + PagedDecodeArgs.BATCH)):
        this = load_int64(told + PagedDecodeArgs.ROW_SPLITS) + 24 * load_int64(table + 24 * at)
        for number in range(load_int64(this + 8)):
            if not load_int64(load_int64(told + PagedDecodeArgs.SPLIT_STARTS) + 24 * (load_int64(this) + number) + 16):
                store_value(load_int64(told + PagedDecodeArgs.WORK_ITEMS) + 8 * job, entry)
                entry, job = plan_shared_split(told, entry, at, number, most), job + 1
    store_value(load_int64(told + PagedDecodeArgs.WORK_ITEMS) + 8 * job, entry)
    store_value(told + PagedDecodeArgs.NUM_WORK_ITEMS, job)


@njit
def fill_block_addresses(told, row, n, slot, desk, count):
    """Write the addresses of `count` keys of a row, of their values and scales, and their columns.

    Returns the span and slot behind the last of them.
    """
    spans, page = (
        load_int64(told + PagedDecodeArgs.SPANS) + 24 * row * load_int64(told + PagedDecodeArgs.SPAN_COUNT),
        load_int64(told + PagedDecodeArgs.PAGE_SIZE),
    )
    k, v = load_int64(told + PagedDecodeArgs.K), load_int64(told + PagedDecodeArgs.V)
    k_page, v_page, s_page = (
        load_int64(told + PagedDecodeArgs.K_PAGE_STRIDE),
        load_int64(told + PagedDecodeArgs.V_PAGE_STRIDE),
        load_int64(told + PagedDecodeArgs.SCALE_PAGE_STRIDE),
    )
    k_slot, v_slot, s_slot = (
        load_int64(told + PagedDecodeArgs.K_SLOT_STRIDE),
        load_int64(told + PagedDecodeArgs.V_SLOT_STRIDE),
        load_int64(told + PagedDecodeArgs.SCALE_SLOT_STRIDE),
    )
    for i in range(count):
        while slot >= load_int64(spans + 24 * n + 16):
            n += 1
            slot = load_int64(spans + 24 * n + 8)
        held, to = load_int64(spans + 24 * n), desk + 8 * i
        store_value(to + KEYS_OFFSET, k + held * k_page + slot * k_slot)
        store_value(to + VALUES_OFFSET, v + held * v_page + slot * v_slot)
        store_value(to + SCALES_OFFSET, held * s_page + slot * s_slot)
        store_value(to + COLUMNS_OFFSET, n * page + slot)
        slot += 1
    return n, slot


@njit
def prepare_next_block(told, entry, desk):
    """Write the addresses of the first block of the next plan entry, for prefetching; return its number of keys."""
    if entry < 0:
        return 0
    this = load_int64(told + PagedDecodeArgs.PLAN) + PLAN_ENTRY_BYTES * entry
    row, count = (
        load_int64(load_int64(told + PagedDecodeArgs.ROW_ORDER) + 24 * load_int64(this)),
        min(load_int64(this + 32), KV_BLOCK_SIZE),
    )
    fill_block_addresses(told, row, load_int64(this + 16), load_int64(this + 24), desk + NEXT_BLOCK_OFFSET, count)
    return count


# --- Check of the block table -------------------------------------------------------------------------


@extending.register_jitable
def search_invalid_span(table):
    """Kernel of `find_invalid_span`: goes from the last span to the first, so that the first invalid one remains."""
    first, count, pages, slots = (
        load_int64(table),
        load_int64(table + 8),
        load_int64(table + 16),
        load_int64(table + 24),
    )
    for n in range(count - 1, -1, -1):
        page, begin, end = load_int64(first + 24 * n), load_int64(first + 24 * n + 8), load_int64(first + 24 * n + 16)
        if begin < end and (begin < 0 or end > slots or page < 0 or page >= pages):
            store_value(table + 32, n)
