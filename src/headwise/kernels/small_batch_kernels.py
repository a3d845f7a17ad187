"""Kernel of `small_batch_ops`: products of a few tokens with matrices.

    run_gemv                    y[m, n] = sum_k x[m, k] W[n, k]

In plain PyTorch: `x.float() @ W.float().T`.

Loop order of the GEMV kernel: blocks of matrix rows (handed out to threads), tiles of four rows,
tiles of four tokens, then k in steps of 32. Each matrix is read once, in storage order, and
prefetched in that order. Every thread packs the tokens into its scratch buffer in float32. Each
y[m, n] is summed in one fixed order, independent of other tokens and of the number of threads. It
is no `gemm`: both operands are read along k, where `gemm` reads rows of one of them.
"""

from __future__ import annotations

from numba import extending, njit

from .capabilities import this_machine
from .jit import args_field_address
from .launch import CACHE_LINE_BYTES
from .simd import (
    as_compute_scalar,
    fetch_and_increment,
    fma,
    load_bf16_even,
    load_bf16_odd,
    load_int64,
    load_storage,
    load_vector,
    prefetch_l2,
    prefetch_nontemporal,
    reduce_sum,
    splat,
    storage_itemsize,
    store_storage,
    store_value,
)
from .small_batch_ops import GEMV_STEP, GEMV_TILE_SIZE

GEMV_PREFETCH_BYTES = 8192  # prefetch distance ahead of the current tile
# Each matrix is read once a pass, so that on AMD's processors its lines need not pass through the
# second-level cache. Intel's processors then read memory four times as slowly (6 instead of 27 GB/s
# on an Emerald Rapids core).
prefetch_weights = (
    prefetch_nontemporal if this_machine().processor.startswith("AMD") else prefetch_l2
)


@njit
def pack_tokens(dtype, args, scratch):
    """Pack tokens into the scratch buffer, in tiles of T = min(M, 4) tokens, in the order in which
    the products read.

    A tile is [K / 32, T, 32], then the last 16 channels [T, 16] if K % 32 is 16.
    """
    tokens = args.num_tokens
    width = args.width
    tile_size = min(args.num_tokens, GEMV_TILE_SIZE)
    full = width // GEMV_STEP * GEMV_STEP
    for m in range(tokens):
        tile = scratch + 4 * width * (m // tile_size * tile_size)
        row = m % tile_size
        token = args.x + storage_itemsize(dtype) * width * m
        to = tile + 2 * CACHE_LINE_BYTES * row
        for c in range(0, full, GEMV_STEP):
            store_value(to, load_bf16_even(dtype, token + storage_itemsize(dtype) * c))
            store_value(
                to + CACHE_LINE_BYTES, load_bf16_odd(dtype, token + storage_itemsize(dtype) * c)
            )
            to += 2 * CACHE_LINE_BYTES * tile_size
        if full < width:
            store_value(
                tile + 4 * full * tile_size + CACHE_LINE_BYTES * row,
                load_storage(dtype, token + storage_itemsize(dtype) * full),
            )


@njit
def fma_4_rows(part, x, a):
    """Multiply 16 channels of four matrix rows with those of one token and add them to the sums
    `a`.
    """
    return (
        fma(part[0], x, a[0]),
        fma(part[1], x, a[1]),
        fma(part[2], x, a[2]),
        fma(part[3], x, a[3]),
    )


@njit
def load_4_rows(dtype, w):
    """Load 32 channels of each of four rows, as two halves (even and odd channels for bfloat16)."""
    even = (
        load_bf16_even(dtype, w[0]),
        load_bf16_even(dtype, w[1]),
        load_bf16_even(dtype, w[2]),
        load_bf16_even(dtype, w[3]),
    )
    return even, (
        load_bf16_odd(dtype, w[0]),
        load_bf16_odd(dtype, w[1]),
        load_bf16_odd(dtype, w[2]),
        load_bf16_odd(dtype, w[3]),
    )


@njit
def load_4_rows_tail(dtype, w):
    """Load the last 16 channels of each of four rows."""
    return (
        load_storage(dtype, w[0]),
        load_storage(dtype, w[1]),
        load_storage(dtype, w[2]),
        load_storage(dtype, w[3]),
    )


@njit
def advance_addresses(addresses, offset):
    """Add one offset, `offset`, to four addresses."""
    return (
        addresses[0] + offset,
        addresses[1] + offset,
        addresses[2] + offset,
        addresses[3] + offset,
    )


@njit
def prefetch_4_rows(dtype, address):
    """Prefetch as many bytes as one step reads of four rows."""
    for line in range(0, GEMV_TILE_SIZE * storage_itemsize(dtype) * GEMV_STEP, CACHE_LINE_BYTES):
        prefetch_weights(address + line)


@njit
def zero_sums(dtype):
    """Return four vectors of zeros."""
    zero = splat(as_compute_scalar(dtype, 0.0))
    return zero, zero, zero, zero


@njit
def store_4_sums(dtype, y, a):
    """Reduce four vectors of sums and store them as four output elements of one token."""
    store_storage(dtype, y[0], reduce_sum(a[0]))
    store_storage(dtype, y[1], reduce_sum(a[1]))
    store_storage(dtype, y[2], reduce_sum(a[2]))
    store_storage(dtype, y[3], reduce_sum(a[3]))


@njit
def dot_4_rows_1_token(dtype, w, x, y, shape, prefetch_address):
    """Compute the dot products of four rows with one token.

    `shape` is the row width and the bytes between two steps of the packed token.
    """
    width, stride = shape
    a = zero_sums(dtype)
    step_bytes = storage_itemsize(dtype) * GEMV_STEP
    for _ in range(width // GEMV_STEP):
        prefetch_4_rows(dtype, prefetch_address)
        even, odd = load_4_rows(dtype, w)
        a = fma_4_rows(
            odd,
            load_vector(dtype, x + CACHE_LINE_BYTES),
            fma_4_rows(even, load_vector(dtype, x), a),
        )
        w = advance_addresses(w, step_bytes)
        x = x + stride
        prefetch_address = prefetch_address + GEMV_TILE_SIZE * step_bytes
    if width % GEMV_STEP:
        a = fma_4_rows(load_4_rows_tail(dtype, w), load_vector(dtype, x), a)
    store_4_sums(dtype, y, a)


@njit
def dot_4_rows_4_tokens(dtype, w, x, y, shape, prefetch_address):
    """Compute the dot products of four rows with four tokens.

    `x` holds the addresses of the packed tokens and those of their last 16 channels. Nothing is
    prefetched if `prefetch_address` is 0.
    """
    width, stride, step = shape
    prefetch_step = GEMV_TILE_SIZE * storage_itemsize(dtype) * GEMV_STEP if prefetch_address else 0
    a0 = zero_sums(dtype)
    a1 = zero_sums(dtype)
    a2 = zero_sums(dtype)
    a3 = zero_sums(dtype)
    step_bytes = storage_itemsize(dtype) * GEMV_STEP
    token_addresses, tail_addresses = x
    for _ in range(width // GEMV_STEP):
        if prefetch_step:
            prefetch_4_rows(dtype, prefetch_address)
        even, odd = load_4_rows(dtype, w)
        a0 = fma_4_rows(even, load_vector(dtype, token_addresses[0]), a0)
        a1 = fma_4_rows(even, load_vector(dtype, token_addresses[1]), a1)
        a2 = fma_4_rows(even, load_vector(dtype, token_addresses[2]), a2)
        a3 = fma_4_rows(even, load_vector(dtype, token_addresses[3]), a3)
        a0 = fma_4_rows(odd, load_vector(dtype, token_addresses[0] + CACHE_LINE_BYTES), a0)
        a1 = fma_4_rows(odd, load_vector(dtype, token_addresses[1] + CACHE_LINE_BYTES), a1)
        a2 = fma_4_rows(odd, load_vector(dtype, token_addresses[2] + CACHE_LINE_BYTES), a2)
        a3 = fma_4_rows(odd, load_vector(dtype, token_addresses[3] + CACHE_LINE_BYTES), a3)
        w = advance_addresses(w, step_bytes)
        token_addresses = advance_addresses(token_addresses, stride)
        prefetch_address = prefetch_address + prefetch_step
    if width % GEMV_STEP:
        part = load_4_rows_tail(dtype, w)
        a0 = fma_4_rows(part, load_vector(dtype, tail_addresses[0]), a0)
        a1 = fma_4_rows(part, load_vector(dtype, tail_addresses[1]), a1)
        a2 = fma_4_rows(part, load_vector(dtype, tail_addresses[2]), a2)
        a3 = fma_4_rows(part, load_vector(dtype, tail_addresses[3]), a3)
    store_4_sums(dtype, advance_addresses(y, step[0]), a0)
    store_4_sums(dtype, advance_addresses(y, step[1]), a1)
    store_4_sums(dtype, advance_addresses(y, step[2]), a2)
    store_4_sums(dtype, advance_addresses(y, step[3]), a3)


@njit
def four_offsets(first, count, stride):
    """Return the offsets of items first to first + 3; the last item is repeated beyond the end."""
    last_item = count - 1
    return (
        stride * min(first, last_item),
        stride * min(first + 1, last_item),
        stride * min(first + 2, last_item),
        stride * min(first + 3, last_item),
    )


@njit
def multiply_block(dtype, args, block, scratch, next_block):
    """Multiply a block of rows of one matrix with all tokens; prefetch from the address
    `next_block`.
    """
    w, rows, y = block
    tokens = args.num_tokens
    width = args.width
    step = storage_itemsize(dtype) * args.num_rows
    tile_size = min(tokens, GEMV_TILE_SIZE)
    row_bytes = storage_itemsize(dtype) * width
    token_stride = 2 * CACHE_LINE_BYTES * tile_size
    tail = scratch + 4 * (width // GEMV_STEP * GEMV_STEP) * tile_size
    for n in range(0, rows, GEMV_TILE_SIZE):
        rows_w = advance_addresses(four_offsets(n, rows, row_bytes), w)
        to = advance_addresses(four_offsets(n, rows, storage_itemsize(dtype)), y)
        prefetch_address = w + row_bytes * (n + GEMV_TILE_SIZE) + GEMV_PREFETCH_BYTES
        if prefetch_address >= w + row_bytes * rows:
            prefetch_address += next_block - w - row_bytes * rows
        if tokens == 1:
            dot_4_rows_1_token(dtype, rows_w, scratch, to, (width, token_stride), prefetch_address)
            continue
        for m in range(0, tokens, GEMV_TILE_SIZE):
            tile = 4 * width * m
            rest = tokens - m
            x = (
                advance_addresses(four_offsets(0, rest, 2 * CACHE_LINE_BYTES), scratch + tile),
                advance_addresses(four_offsets(0, rest, CACHE_LINE_BYTES), tail + tile),
            )
            dot_4_rows_4_tokens(
                dtype,
                rows_w,
                x,
                to,
                (width, token_stride, four_offsets(m, tokens, step)),
                prefetch_address,
            )
            prefetch_address = 0  # the first tile of tokens has prefetched all rows


@njit
def find_block(dtype, args, block):
    """Return the address of a block of rows, its number of rows, and the address of its outputs."""
    matrix = args.matrices
    rows_before = 0
    rows_per_block = args.rows_per_block
    rows = load_int64(matrix + 8)
    while block * rows_per_block >= rows:
        block -= (rows + rows_per_block - 1) // rows_per_block
        rows_before = rows_before + rows
        matrix = matrix + 16
        rows = load_int64(matrix + 8)
    first = block * rows_per_block
    w = load_int64(matrix) + first * storage_itemsize(dtype) * args.width
    return (
        w,
        min(rows_per_block, rows - first),
        args.y + storage_itemsize(dtype) * (rows_before + first),
    )


@extending.register_jitable
def run_gemv(dtype, args):
    """Entry point of every thread: pack the tokens, then take blocks of rows until none is left."""
    scratch = (
        args.scratch
        + fetch_and_increment(args_field_address(args, "next_thread")) * args.scratch_bytes
    )
    pack_tokens(dtype, args, scratch)
    num_blocks = args.num_items
    item = fetch_and_increment(args_field_address(args, "next_item"))
    while item < num_blocks:
        next_item = fetch_and_increment(args_field_address(args, "next_item"))
        block = find_block(dtype, args, item)
        multiply_block(
            dtype,
            args,
            block,
            scratch,
            find_block(dtype, args, next_item)[0] if next_item < num_blocks else block[0],
        )
        item = next_item
