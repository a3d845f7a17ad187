"""Work planning for paged decode: split the keys of every row and find prefixes that rows share.

The keys of a row are cut into splits of 256 (`KV_SPLIT_SIZE`), as in Flash-Decoding. Rows whose
block tables begin with equal spans share these keys, which are read once for all rows (Hydragen,
2402.05099; ChunkAttention, 2402.15220). For this, rows are ordered so that each follows one with
which it shares the longest prefix, as in a traversal of a prefix tree. Rows that read a block of
keys together are then adjacent, whatever they share with other rows.

Where a row's splits and blocks end does not depend on other rows, and so neither does its result.
For row b with n[b] keys, split i and the block of 64 keys at position p of its keys:

    splits of b = ceil(n[b] / 256),   split i = keys 256 i to min(256 (i + 1), n[b])
    rows b and c read the block together if spans[b] and spans[c] are equal up to the end of the
    block

Loop order of the `plan` kernel, which runs in one thread: order the rows, cut each row, then for
each row and split make one work item: the plan entries of this split for all rows that read it
together. It computes no tensor. In plain PyTorch, the keys that a row's entries name, in order, are
`torch.cat([k[page, :, begin:end] for page, begin, end in spans[b]], 1)`.
"""

from __future__ import annotations

from numba import extending, njit

from .jit import store_arg
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
    hash_table_size,
)
from .simd import load_int64, store_value

PLAN_ENTRY_BYTES = (
    8 * PLAN_ENTRY_FIELDS
)  # fields: index in the order, rows, span, slot, keys, split number, whether it begins the split


@njit
def count_shared_spans(args, row, other_row, n):
    """Return the number of leading spans that two rows share; the first n are known to be equal."""
    count = args.num_spans
    spans = args.spans + 24 * row * count
    other_spans = args.spans + 24 * other_row * count
    while (
        n < count
        and load_int64(spans + 24 * n) == load_int64(other_spans + 24 * n)
        and load_int64(spans + 24 * n + 8) == load_int64(other_spans + 24 * n + 8)
        and load_int64(spans + 24 * n + 16) == load_int64(other_spans + 24 * n + 16)
    ):
        n += 1
    return n


@njit
def find_row_with_page(args, row):
    """Return True if an earlier row begins with the same page; otherwise add this row to the hash
    table.
    """
    hash_table = args.page_hash_table
    last = hash_table_size(args.batch) - 1
    step = 24 * args.num_spans
    page = load_int64(args.spans + step * row)
    n = page & last
    while load_int64(hash_table + 8 * n) >= 0:
        if load_int64(args.spans + step * load_int64(hash_table + 8 * n)) == page:
            return True
        n = (n + 1) & last
    store_value(hash_table + 8 * n, row)
    return False


@njit
def order_rows_by_prefix(args):
    """Insert each row after one with which it shares the most spans, and store the number of shared
    spans.
    """
    order = args.row_order
    for n in range(hash_table_size(args.batch)):
        store_value(args.page_hash_table + 8 * n, -1)
    for row in range(args.batch):
        order_index = row
        num_shared = 0
        if args.num_spans and find_row_with_page(args, row):
            order_index = 1
            num_shared = count_shared_spans(args, row, load_int64(order), 0)
        while order_index < row and load_int64(order + 24 * order_index + 8) >= num_shared:
            if load_int64(order + 24 * order_index + 8) == num_shared:
                num_shared = count_shared_spans(
                    args, row, load_int64(order + 24 * order_index), num_shared
                )
            order_index += 1
        for n in range(row, order_index, -1):
            store_value(order + 24 * n, load_int64(order + 24 * n - 24))
            store_value(order + 24 * n + 8, load_int64(order + 24 * n - 16))
        store_value(order + 24 * order_index, row)
        store_value(order + 24 * order_index + 8, num_shared)


@njit
def split_row(args, order_index, n):
    """Write where each split of the row at `order_index` begins, from split number n on.

    Also replaces the row's count of shared spans by its shared keys, and stores its number of keys.
    Returns the next split number; a row without keys has one split.
    """
    entry = args.row_order + 24 * order_index
    starts = args.split_starts
    num_keys = 0
    num_shared = 0
    count = args.num_spans
    spans = load_int64(entry + 8)
    span = args.spans + 24 * load_int64(entry) * count
    store_value(starts + 24 * n + 16, 0)
    for index in range(count):
        slot = load_int64(span + 24 * index + 8)
        end = load_int64(span + 24 * index + 16)
        while slot < end:
            if num_keys % KV_SPLIT_SIZE == 0:
                start = starts + 24 * (n + num_keys // KV_SPLIT_SIZE)
                store_value(start, index)
                store_value(start + 8, slot)
                store_value(start + 16, 0)
            step = min(end - slot, KV_SPLIT_SIZE - num_keys % KV_SPLIT_SIZE)
            slot = slot + step
            num_keys = num_keys + step
        num_shared = num_keys if index < spans else num_shared
    store_value(entry + 8, num_shared)
    store_value(entry + 16, num_keys)
    return n + max(1, (num_keys + KV_SPLIT_SIZE - 1) // KV_SPLIT_SIZE)


@njit
def shares_block_with_previous(args, order_index, begin):
    """Return True if the row at `order_index` has the same block of keys from `begin` on as the row
    before it.
    """
    entry = args.row_order + 24 * order_index
    end = min(begin + KV_BLOCK_SIZE, load_int64(entry + 16))
    return begin < end <= load_int64(entry + 8) and end == min(
        begin + KV_BLOCK_SIZE, load_int64(entry - 8)
    )


@njit
def append_plan_entry(args, entry, row_range, position, split_position):
    """Write a plan entry: the rows that read it, its first key and number of keys, its split.
    Return the next index.
    """
    (order_index, rows) = row_range
    (n, slot, count) = position
    (split, is_first_block) = split_position
    address = args.plan + PLAN_ENTRY_BYTES * entry
    store_value(address, order_index)
    store_value(address + 8, rows)
    store_value(address + 16, n)
    store_value(address + 24, slot)
    store_value(address + 32, count)
    store_value(address + 40, split)
    store_value(address + 48, is_first_block)
    return entry + 1


@njit
def shares_whole_split(args, order_index, rows, begin):
    """Return True if `rows` rows from `order_index` on share the whole split that begins at key
    `begin`.
    """
    order = args.row_order
    end = min(begin + KV_SPLIT_SIZE, load_int64(order + 24 * order_index + 16))
    for other_index in range(order_index + 1, order_index + rows):
        if (
            min(begin + KV_SPLIT_SIZE, load_int64(order + 24 * other_index + 16)) != end
            or load_int64(order + 24 * other_index + 8) < end
        ):
            return False
    return True


@njit
def advance_position(args, row, position, count):
    """Return the span and slot of the key `count` keys after a position of a row."""
    (n, slot) = position
    spans = args.spans + 24 * row * args.num_spans
    while count > 0:
        step = max(0, min(count, load_int64(spans + 24 * n + 16) - slot))
        slot = slot + step
        count = count - step
        if count > 0:
            n += 1
            slot = load_int64(spans + 24 * n + 8)
    return n, slot


@njit
def split_start(args, row, split):
    """Return the span and slot at which a split of a row begins."""
    start = args.split_starts + 24 * (load_int64(args.row_splits + 24 * row) + split)
    return load_int64(start), load_int64(start + 8)


@njit
def plan_split_by_sharing(args, entry, order_index, rows, split):
    """Write one plan entry for each block of a split and each run of rows that share the block."""
    order = args.row_order
    for begin in range(KV_SPLIT_SIZE * split, KV_SPLIT_SIZE * (split + 1), KV_BLOCK_SIZE):
        first = 0
        while first < rows:
            first_index = order_index + first
            num_rows = 1
            num_keys = load_int64(order + 24 * (order_index + first) + 16)
            while first + num_rows < rows and shares_block_with_previous(
                args, first_index + num_rows, begin
            ):
                num_rows += 1
            if begin < num_keys:
                row = load_int64(order + 24 * first_index)
                n, slot = advance_position(
                    args, row, split_start(args, row, split), begin - KV_SPLIT_SIZE * split
                )
                position = n, slot, min(KV_BLOCK_SIZE, num_keys - begin)
                entry = append_plan_entry(
                    args,
                    entry,
                    (first_index, num_rows),
                    position,
                    (split, 1 if begin == KV_SPLIT_SIZE * split else 0),
                )
            first += num_rows
    return entry


@njit
def max_rows_together(args, num_splits):
    """Return the maximum number of rows per work item: fewer if threads would be idle. This changes
    no result.
    """
    threads = args.num_items
    return (
        MAX_ROWS_TOGETHER
        if threads == 1
        else max(1, min(MAX_ROWS_TOGETHER, num_splits // (2 * threads)))
    )


@njit
def count_rows_sharing_block(args, order_index, begin, max_rows):
    """Return the number of rows from `order_index` on that read the block at `begin` together, at
    most `max_rows`.

    The last rows are divided evenly rather than leaving a small remainder.
    """
    rows = 1
    batch = args.batch
    while (
        rows < 2 * max_rows
        and order_index + rows < batch
        and shares_block_with_previous(args, order_index + rows, begin)
    ):
        rows += 1
    return rows if rows <= max_rows else min(max_rows, (rows + 1) // 2)


@njit
def plan_shared_split(args, entry, order_index, split, max_rows):
    """Write the plan entries of one split for a row and the following rows that share its first
    block.
    """
    order = args.row_order
    rows = count_rows_sharing_block(args, order_index, KV_SPLIT_SIZE * split, max_rows)
    for other_index in range(order_index + 1, order_index + rows):
        first = load_int64(args.row_splits + 24 * load_int64(order + 24 * other_index))
        store_value(args.split_starts + 24 * (first + split) + 16, 1)
    if not shares_whole_split(args, order_index, rows, KV_SPLIT_SIZE * split):
        entry = plan_split_by_sharing(args, entry, order_index, rows, split)
    else:
        n, slot = split_start(args, load_int64(order + 24 * order_index), split)
        count = min(
            KV_SPLIT_SIZE, load_int64(order + 24 * order_index + 16) - KV_SPLIT_SIZE * split
        )
        entry = append_plan_entry(args, entry, (order_index, rows), (n, slot, count), (split, 1))
    store_arg(args, "max_splits", max(args.max_splits, rows))
    return entry


@njit
def lay_out_plan_tables(args):
    """Write the addresses of the plan's tables into the kernel arguments, sized for
    `args.max_splits` splits.
    """
    max_splits = args.max_splits
    batch = args.batch
    begin = args.plan
    store_arg(args, "work_items", begin + PLAN_ENTRY_BYTES * 4 * max_splits)
    store_arg(args, "split_starts", args.work_items + 8 * (max_splits + 1))
    store_arg(args, "row_splits", args.split_starts + 24 * max_splits)
    store_arg(args, "row_order", args.row_splits + 24 * batch)
    store_arg(args, "page_hash_table", args.row_order + 24 * batch)
    store_arg(args, "max_splits", 1)


@extending.register_jitable
def plan_split_kv(args):
    """Kernel `plan`: cut the keys of every row into splits and make the work items that threads
    take.
    """
    lay_out_plan_tables(args)
    order = args.row_order
    n = 0
    entry = 0
    item = 0
    order_rows_by_prefix(args)
    for order_index in range(args.batch):
        row_split = args.row_splits + 24 * load_int64(order + 24 * order_index)
        end = split_row(args, order_index, n)
        store_value(row_split, n)
        store_value(row_split + 8, end - n)
        store_value(row_split + 16, 0)
        n = end
    max_rows = max_rows_together(args, n)
    for order_index in range(args.batch):
        row_split = args.row_splits + 24 * load_int64(order + 24 * order_index)
        for split in range(load_int64(row_split + 8)):
            if not load_int64(args.split_starts + 24 * (load_int64(row_split) + split) + 16):
                store_value(args.work_items + 8 * item, entry)
                entry = plan_shared_split(args, entry, order_index, split, max_rows)
                item = item + 1
    store_value(args.work_items + 8 * item, entry)
    store_arg(args, "num_items", item)


@njit
def fill_block_addresses(args, row, n, slot, scratch, count):
    """Write the addresses of `count` keys of a row, of their values and scales, and their columns.

    Returns the span and slot after the last of them.
    """
    spans = args.spans + 24 * row * args.num_spans
    page = args.page_size
    k = args.k
    v = args.v
    k_page = args.k_page_stride
    v_page = args.v_page_stride
    s_page = args.scale_page_stride
    k_slot = args.k_slot_stride
    v_slot = args.v_slot_stride
    s_slot = args.scale_slot_stride
    for i in range(count):
        while slot >= load_int64(spans + 24 * n + 16):
            n += 1
            slot = load_int64(spans + 24 * n + 8)
        page_index = load_int64(spans + 24 * n)
        to = scratch + 8 * i
        store_value(to + KEYS_OFFSET, k + page_index * k_page + slot * k_slot)
        store_value(to + VALUES_OFFSET, v + page_index * v_page + slot * v_slot)
        store_value(to + SCALES_OFFSET, page_index * s_page + slot * s_slot)
        store_value(to + COLUMNS_OFFSET, n * page + slot)
        slot += 1
    return n, slot


@njit
def prepare_next_block(args, entry, scratch):
    """Write the addresses of the first block of the next plan entry, for prefetching; return its
    number of keys.
    """
    if entry < 0:
        return 0
    entry_address = args.plan + PLAN_ENTRY_BYTES * entry
    row = load_int64(args.row_order + 24 * load_int64(entry_address))
    count = min(load_int64(entry_address + 32), KV_BLOCK_SIZE)
    fill_block_addresses(
        args,
        row,
        load_int64(entry_address + 16),
        load_int64(entry_address + 24),
        scratch + NEXT_BLOCK_OFFSET,
        count,
    )
    return count


# --- Check of the block table ---------------------------------------------------------------------


@extending.register_jitable
def search_invalid_span(args):
    """Kernel of `find_invalid_span`: goes from the last span to the first, so that the first
    invalid one remains.
    """
    for n in range(args.num_spans - 1, -1, -1):
        span = args.spans + 24 * n
        page = load_int64(span)
        begin = load_int64(span + 8)
        end = load_int64(span + 16)
        if begin < end and (
            begin < 0 or end > args.page_size or page < 0 or page >= args.num_pages
        ):
            store_arg(args, "first_invalid", n)
