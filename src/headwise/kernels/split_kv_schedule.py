"""Which keys are read at once, and by which rows together.

Keys of a row are cut into pieces of `PIECE`. Rows whose tables begin alike hold the same keys there, and what is known
to be the same is read once for all of them (Hydragen, 2402.05099; ChunkAttention, 2402.15220). For that rows are put in
an order in which whoever shares more stands nearer, as in a tree of beginnings: then those that read one block of keys
together are neighbours, whatever they share with others besides. Where a row's pieces and blocks end does not depend on
who else reads them, and so neither does what it reads.
"""

from __future__ import annotations

from numba import extending, njit

from .kv_block_attention import (
    COLUMNS_OFFSET,
    KEYS_OFFSET,
    KV_BLOCK_SIZE,
    KV_SPLIT_SIZE,
    MAX_ROWS_TOGETHER,
    NEXT_BLOCK_OFFSET,
    PLAN_ENTRY_FIELDS,
    SCALES_OFFSET,
    VALUES_OFFSET,
    PagedDecodeArgs,
    hash_table_size,
)
from .simd import load_int64, store_value

PLAN_ENTRY_BYTES = (
    8 * PLAN_ENTRY_FIELDS
)  # bytes: place in the order, rows, span, slot, keys, number of the piece, whether it begins it


@njit
def count_shared_spans(told, row, other, n):
    """With how many spans the tables of two rows begin alike; so many are known to be."""
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
    """Whether a row before this one begins with the same page; if none does, that this one does is noted."""
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
    """Put each row behind one that it shares most spans with, and note how many those are."""
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
    """Note where each piece of the row at a place of the order begins, from number n on, how many of its keys are those
    of the row before it, and how many it has; the number behind its pieces, of which one without keys has one."""
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
    """Whether the row at a place of the order reads the block behind so many keys as the one before it does."""
    entry = load_int64(told + PagedDecodeArgs.ROW_ORDER) + 24 * at
    end = min(begin + KV_BLOCK_SIZE, load_int64(entry + 16))
    return begin < end <= load_int64(entry + 8) and end == min(begin + KV_BLOCK_SIZE, load_int64(entry - 8))


@njit
def append_plan_entry(told, entry, who, where, piece):
    """Note what is read at once: by whom, from where on how many keys, and of which piece; the place behind it."""
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
    """Whether so many rows read all of a piece that begins behind so many keys together."""
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
    """The span and slot of a row's key so many behind the one at a place."""
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
    """The span and slot at which a piece of a row begins."""
    this = load_int64(told + PagedDecodeArgs.SPLIT_STARTS) + 24 * (
        load_int64(load_int64(told + PagedDecodeArgs.ROW_SPLITS) + 24 * row) + number
    )
    return load_int64(this), load_int64(this + 8)


@njit
def plan_split_by_sharing(told, entry, at, rows, number):
    """Note the blocks of a piece, each by those who read it together."""
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
    """How many rows read together at most: fewer where threads would else have nothing to do. That changes no bit."""
    threads = load_int64(told + PagedDecodeArgs.NUM_WORK_ITEMS)
    return MAX_ROWS_TOGETHER if threads == 1 else max(1, min(MAX_ROWS_TOGETHER, pieces // (2 * threads)))


@njit
def count_rows_sharing_block(told, at, begin, most):
    """How many rows, from one on, read the block behind so many keys together: at most so many, and about as many in
    the last teams."""
    rows, batch = 1, load_int64(told + PagedDecodeArgs.BATCH)
    while rows < 2 * most and at + rows < batch and shares_block_with_previous(told, at + rows, begin):
        rows += 1
    return rows if rows <= most else min(most, (rows + 1) // 2)


@njit
def plan_shared_split(told, entry, at, number, most):
    """Note what is read of a piece by a row and by those behind it that begin it together; the place behind it."""
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
    """Where each table of notes begins, the first of which is told, for so many pieces at most as are told."""
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
    """Cut the keys of every row into pieces, and make jobs of them: what one thread reads at a time."""
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
    """The addresses of so many keys of a row from one slot on, of their values and scales, and their columns."""
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
    """Lay out the first block of what is read next, where there is more, as that which comes next; how many keys it
    has."""
    if entry < 0:
        return 0
    this = load_int64(told + PagedDecodeArgs.PLAN) + PLAN_ENTRY_BYTES * entry
    row, count = (
        load_int64(load_int64(told + PagedDecodeArgs.ROW_ORDER) + 24 * load_int64(this)),
        min(load_int64(this + 32), KV_BLOCK_SIZE),
    )
    fill_block_addresses(told, row, load_int64(this + 16), load_int64(this + 24), desk + NEXT_BLOCK_OFFSET, count)
    return count
