"""Work planning for paged decode: split the keys of every row and find prefixes that rows share.

The keys of a row are cut into splits of 256 (`KV_SPLIT_SIZE`), as in Flash-Decoding. Rows with
block tables that begin with equal spans share these keys, which are read once for all rows
(Hydragen, 2402.05099; ChunkAttention, 2402.15220). For this, each row follows the row that shares
its longest prefix, as in a traversal of a prefix tree. Rows that read a split together are then
adjacent, whatever they share with other rows.

Where a row's splits end does not depend on other rows, and so neither does its result.
For row b with n[b] keys and split i:

    splits of b = ceil(n[b] / 256),   split i = keys 256 i to min(256 (i + 1), n[b])
    rows b and c read split i together if spans[b] and spans[c] are equal up to the end of the split

Loop order of the `plan` kernel, which runs in one thread: check the spans, order the rows, cut each
row, then for each row and split make one work item: the plan entry of this split for all rows that
read it together. It computes no tensor. In plain PyTorch, a row's entries name the keys
`torch.cat([k[page, :, begin:end] for page, begin, end in spans[b]], 1)`.
"""

from __future__ import annotations

from numba import extending, njit

from .jit import store_arg
from .kv_block_attention import COLUMNS, KEYS, NEXT_BLOCK, SCALES, VALUES
from .paged_decode import KV_BLOCK_SIZE, KV_SPLIT_SIZE, MAX_ROWS_TOGETHER, PLAN_ENTRY_FIELDS
from .simd import ints

# Fields of an entry of the plan: index in the order, rows, span, slot, keys, split number.


@njit
def find_invalid_span(args):
    """Return the index of the first span outside its page, or -1."""
    for n in range(args.batch * args.num_spans):
        span = ints(args.spans) + 3 * n
        begin = span[1]
        end = span[2]
        is_page = 0 <= span[0] < args.num_pages
        if begin < end and (begin < 0 or end > args.page_size or not is_page):
            return n
    return -1


@njit
def count_shared_spans(args, row, other_row, n):
    """Return how many first spans two rows share, given that they share n."""
    count = 3 * args.num_spans
    spans = ints(args.spans) + row * count
    other_spans = ints(args.spans) + other_row * count
    n *= 3
    while (
        n < count
        and spans[n] == other_spans[n]
        and spans[n + 1] == other_spans[n + 1]
        and spans[n + 2] == other_spans[n + 2]
    ):
        n += 3
    return n // 3


@njit
def begins_as_earlier_row(args, row):
    """True if an earlier row begins with the same page."""
    step = 3 * args.num_spans
    spans = ints(args.spans)
    earlier = 0 if step else row
    while earlier < row and spans[step * earlier] != spans[step * row]:
        earlier += 1
    return earlier < row


@njit
def order_rows_by_prefix(args):
    """Sort rows with a common prefix next to each other: a stable insertion sort."""
    order = ints(args.row_order)
    for row in range(args.batch):
        order_index = row
        num_shared = 0
        if begins_as_earlier_row(args, row):
            order_index = 1
            num_shared = count_shared_spans(args, row, order[0], 0)
        while order_index < row and order[3 * order_index + 1] >= num_shared:
            if order[3 * order_index + 1] == num_shared:
                num_shared = count_shared_spans(args, row, order[3 * order_index], num_shared)
            order_index += 1
        for n in range(row, order_index, -1):
            order[3 * n] = order[3 * n - 3]
            order[3 * n + 1] = order[3 * n - 2]
        order[3 * order_index] = row
        order[3 * order_index + 1] = num_shared


@njit
def split_row(args, order_index, n):
    """Write where the splits of a row begin, from split n on, and how many keys it has and shares;
    return the end of its splits.
    """
    entry = ints(args.row_order) + 3 * order_index
    starts = ints(args.split_starts)
    num_keys = 0
    num_shared = 0
    count = args.num_spans
    num_shared_spans = entry[1]
    span = ints(args.spans) + 3 * entry[0] * count
    starts[3 * n + 2] = 0
    for index in range(count):
        slot = span[3 * index + 1]
        end = span[3 * index + 2]
        while slot < end:
            if num_keys % KV_SPLIT_SIZE == 0:
                start = starts + 3 * (n + num_keys // KV_SPLIT_SIZE)
                start[0] = index
                start[1] = slot
                start[2] = 0
            step = min(end - slot, KV_SPLIT_SIZE - num_keys % KV_SPLIT_SIZE)
            slot = slot + step
            num_keys = num_keys + step
        num_shared = num_keys if index < num_shared_spans else num_shared
    entry[1] = num_shared
    entry[2] = num_keys
    return n + max(1, (num_keys + KV_SPLIT_SIZE - 1) // KV_SPLIT_SIZE)


@njit
def shares_split_with_previous(args, order_index, begin):
    """True if a row shares its split from `begin` with the previous row in the order."""
    entry = ints(args.row_order) + 3 * order_index
    end = min(begin + KV_SPLIT_SIZE, entry[2])
    return begin < end <= entry[1] and end == min(begin + KV_SPLIT_SIZE, entry[-1])


@njit
def max_rows_together(args, num_splits):
    """Return the maximum number of rows per work item: fewer if threads would be idle. This changes
    no result.
    """
    threads = args.num_items
    if threads == 1:
        return MAX_ROWS_TOGETHER
    return max(1, min(MAX_ROWS_TOGETHER, num_splits // (2 * threads)))


@njit
def count_rows_sharing_split(args, order_index, begin, max_rows):
    """Return the number of rows from `order_index` on that read the split at `begin` together, at
    most `max_rows`.

    The last rows are divided evenly rather than leaving a small remainder.
    """
    rows = 1
    batch = args.batch
    while (
        rows < 2 * max_rows
        and order_index + rows < batch
        and shares_split_with_previous(args, order_index + rows, begin)
    ):
        rows += 1
    return rows if rows <= max_rows else min(max_rows, (rows + 1) // 2)


@njit
def plan_split(args, fields, order_index, split, max_rows):
    """Write the entry of a split of a row, and of the rows that share it."""
    order = ints(args.row_order)
    begin = KV_SPLIT_SIZE * split
    rows = count_rows_sharing_split(args, order_index, begin, max_rows)
    for other_index in range(order_index + 1, order_index + rows):
        first = ints(args.row_splits)[3 * order[3 * other_index]]
        ints(args.split_starts)[3 * (first + split) + 2] = 1
    own = ints(args.row_splits)[3 * order[3 * order_index]]
    start = ints(args.split_starts) + 3 * (own + split)
    fields[0] = order_index
    fields[1] = rows
    fields[2] = start[0]
    fields[3] = start[1]
    fields[4] = min(KV_SPLIT_SIZE, order[3 * order_index + 2] - begin)
    fields[5] = split
    store_arg(args, "max_splits", max(args.max_splits, rows))


@njit
def lay_out_plan_tables(args):
    """Write the addresses of the plan's tables into the kernel arguments, sized for
    `args.max_splits` splits.
    """
    max_splits = args.max_splits
    batch = args.batch
    store_arg(args, "split_starts", args.plan + 8 * PLAN_ENTRY_FIELDS * max_splits)
    store_arg(args, "row_splits", args.split_starts + 24 * max_splits)
    store_arg(args, "row_order", args.row_splits + 24 * batch)
    store_arg(args, "max_splits", 1)


@extending.register_jitable
def plan_split_kv(args):
    """Order the rows, split their keys, and write the plan and its work items; or no work items if
    a span is invalid.
    """
    store_arg(args, "first_invalid", find_invalid_span(args))
    if args.first_invalid >= 0:
        store_arg(args, "num_items", 0)
        return
    lay_out_plan_tables(args)
    order = ints(args.row_order)
    row_splits = ints(args.row_splits)
    plan = ints(args.plan)
    n = 0
    item = 0
    order_rows_by_prefix(args)
    for order_index in range(args.batch):
        own = row_splits + 3 * order[3 * order_index]
        end = split_row(args, order_index, n)
        own[0] = n
        own[1] = end - n
        own[2] = 0
        n = end
    max_rows = max_rows_together(args, n)
    for order_index in range(args.batch):
        own = row_splits + 3 * order[3 * order_index]
        for split in range(own[1]):
            if not ints(args.split_starts)[3 * (own[0] + split) + 2]:
                plan_split(args, plan + PLAN_ENTRY_FIELDS * item, order_index, split, max_rows)
                item = item + 1
    store_arg(args, "num_items", item)


@njit
def fill_block_addresses(args, row, n, slot, lists, count):
    """Write the addresses of the next keys and values of a row, the offsets of their scales, and
    their columns of the bias; return the span and slot behind them.
    """
    spans = ints(args.spans) + 3 * row * args.num_spans
    for i in range(count):
        while slot >= spans[3 * n + 2]:
            n += 1
            slot = spans[3 * n + 1]
        page = spans[3 * n]
        lists[KEYS + i] = args.k + page * args.k_page_stride + slot * args.k_slot_stride
        lists[VALUES + i] = args.v + page * args.v_page_stride + slot * args.v_slot_stride
        lists[SCALES + i] = page * args.scale_page_stride + slot * args.scale_slot_stride
        lists[COLUMNS + i] = n * args.page_size + slot
        slot += 1
    return n, slot


@njit
def prepare_next_block(args, entry, lists):
    """Write the addresses of the first block of an entry, to be prefetched; return its keys."""
    if entry >= args.num_items:
        return 0
    fields = ints(args.plan) + PLAN_ENTRY_FIELDS * entry
    row = ints(args.row_order)[3 * fields[0]]
    count = min(fields[4], KV_BLOCK_SIZE)
    fill_block_addresses(args, row, fields[2], fields[3], lists + NEXT_BLOCK, count)
    return count
