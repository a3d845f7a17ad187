"""Kernels of `head_mixing`: tiles of 64 keys, one query at a time.

For a query t and a key s, with factors of the query (qs, qt, qg) and of the key (ks, kt, kg), and
the gradient g of the output:

    out[o] = a[h(o)] (qg[o] + kg[o]) + sum_r qt[r, o] (sum_h a[h] qs[r, h]) + sum_r kt[r, o] (sum_h
    a[h] ks[r, h])
    da[h]  = sum_{o: h(o) = h} g[o] (qg[o] + kg[o]) + sum_r qs[r, h] (sum_o g[o] qt[r, o]) + the
    same for ks and kt dqg[o] = sum_s g[o] a[h(o)],   dqt[r, o] = sum_s g[o] (sum_h a[h] qs[r, h]),
    dqs[r, h] = sum_s a[h] (sum_o g[o] qt[r, o])            the key's factors likewise, summed over
    t

In plain PyTorch: the two lines at the top of `head_mixing`, and `torch.autograd.grad` of them.

Loop order: one work item is a tile of 64 keys of one batch row. The thread copies the keys' factors
to its scratch buffer and loops over the queries: it copies the scores of one query with the tile,
all heads, to the scratch buffer, then loops over 16 keys at a time, over groups of heads, over
ranks and over heads, and copies the result back. (In memory the heads are strided by large powers
of two, which would evict each other from the cache.) In the backward pass each tile writes its
gradients of the query factors separately; they are summed afterwards, so that the result does not
depend on the number of threads.
"""

from __future__ import annotations

from numba import extending, njit

from .head_mixing import KEY_TILE_SIZE
from .launch import CACHE_LINE_BYTES, SIMD_WIDTH
from .simd import (
    address_of,
    floats,
    fma,
    ints,
    itemsize,
    prefetch_l2,
    reduce_sum,
    splat,
    vec,
)

STEP = KEY_TILE_SIZE  # distance of two heads in the scratch buffer


@njit
def clear_memory(to, count):
    """Set numbers to zero, in whole vectors."""
    for n in range(0, count, SIMD_WIDTH):
        to[n] = splat(to, 0)


@njit
def copy_rows(to, to_step, source, step, shape):
    """Copy shape = (rows, count) numbers; counts are whole vectors."""
    rows, count = shape
    for n in range(rows):
        for c in range(0, count, SIMD_WIDTH):
            to[to_step * n + c] = vec(source, step * n + c)


@njit
def prefetch_rows(source, step, shape):
    """Prefetch shape = (rows, count) numbers into the second-level cache."""
    rows, count = shape
    for n in range(rows):
        begin = address_of(source + step * n)
        for line in range(begin, begin + count * itemsize(source), CACHE_LINE_BYTES):
            prefetch_l2(line)


@njit
def accumulate_product(to, a, b):
    """Add a b to the vector at `to`."""
    to[0] = fma(a, b, vec(to, 0))


@njit
def dot_with_scalars(x, factor, begin, end):
    """Return the sum over heads of their vectors times one number each."""
    a = splat(x, 0)
    for h in range(begin, end):
        a = fma(vec(x, STEP * h), factor[h], a)
    return a


@njit
def dot_with_vectors(x, factor, begin, end):
    """Return the sum over heads of their vectors times one vector each."""
    a = splat(x, 0)
    for h in range(begin, end):
        a = fma(vec(x, STEP * h), vec(factor, STEP * h), a)
    return a


@njit
def head_group_bounds(args, group):
    """Return the first and end index of a group's heads, and of its output heads."""
    begin = group * args.heads_per_group
    end = begin + args.heads_per_group
    return (
        begin,
        end,
        begin,
        args.num_output_heads if args.heads_per_group == args.num_heads else end,
    )


@njit
def copy_key_factors(args, arrays, tile, b, begin, is_stored):
    """Copy the factors of a tile of keys to the scratch buffer, or their gradients back."""
    count = min(KEY_TILE_SIZE, args.num_keys - begin)
    rows = args.k_ranks * args.num_heads
    for n in range(3):
        array = arrays[n] + (b * rows * args.num_keys + begin)
        if is_stored:
            copy_rows(array, args.num_keys, tile, STEP, (rows, count))
        else:
            copy_rows(tile, STEP, array, args.num_keys, (rows, count))
        tile = tile + STEP * rows
        rows = args.k_ranks * args.num_output_heads if n == 0 else args.num_key_gates


@njit
def compose_key_vector(args, row, x, y, key_source):
    """Compute all output heads of one query and 16 keys."""
    H = args.num_heads
    OUT = args.num_output_heads
    q_ranks = args.q_ranks
    k_ranks = args.k_ranks
    gate = floats(x, args.q_gate) + row * OUT
    source = floats(x, args.q_source) + row * q_ranks * H
    target = floats(x, args.q_target) + row * q_ranks * OUT
    head_of_output = ints(args.head_of_output)
    key_target = key_source + STEP * k_ranks * H
    key_gate = key_source + STEP * k_ranks * (H + OUT)
    for o in range(OUT):
        factor = splat(x, gate[o])
        if args.num_key_gates:
            factor = factor + vec(key_gate, STEP * o)
        y[STEP * o] = vec(x, STEP * head_of_output[o]) * factor
    for n in range(H // args.heads_per_group):
        head_begin, head_end, output_begin, output_end = head_group_bounds(args, n)
        for r in range(q_ranks):
            a = dot_with_scalars(x, source + r * H, head_begin, head_end)
            for o in range(output_begin, output_end):
                accumulate_product(y + STEP * o, a, splat(x, target[r * OUT + o]))
        for r in range(k_ranks):
            a = dot_with_vectors(x, key_source + STEP * r * H, head_begin, head_end)
            for o in range(output_begin, output_end):
                accumulate_product(y + STEP * o, a, vec(key_target, STEP * (r * OUT + o)))


@extending.register_jitable
def head_mixing_forward(dtype, args, item, scratch):
    """Mix the heads of all queries with one tile of keys."""
    H = args.num_heads
    OUT = args.num_output_heads
    T = args.num_queries
    S = args.num_keys
    tiles = -(-S // KEY_TILE_SIZE)
    b = item // tiles
    begin = item % tiles * KEY_TILE_SIZE
    x = floats(dtype, scratch)
    y = x + STEP * H
    keys = y + STEP * OUT
    count = min(KEY_TILE_SIZE, S - begin)
    factors = (floats(x, args.k_source), floats(x, args.k_target), floats(x, args.k_gate))
    copy_key_factors(args, factors, keys, b, begin, False)
    for t in range(T):
        inputs = floats(x, args.input) + ((b * H * T + t) * S + begin)
        outputs = floats(x, args.output) + ((b * OUT * T + t) * S + begin)
        copy_rows(x, STEP, inputs, T * S, (H, count))
        prefetch_rows(inputs + S, T * S, (H, count))
        prefetch_rows(outputs, T * S, (OUT, count))
        for c in range(0, count, SIMD_WIDTH):
            compose_key_vector(args, b * T + t, x + c, y + c, keys + c)
        copy_rows(outputs, T * S, y, STEP, (OUT, count))


# --- Backward pass --------------------------------------------------------------------------------


@njit
def backward_own_heads(args, row, scratch):
    """Add the gradients of each head's own factor, and of the input through it."""
    x, keys, d_x, d_keys, sums = scratch
    H = args.num_heads
    OUT = args.num_output_heads
    gate = floats(x, args.q_gate) + row * OUT
    head_of_output = ints(args.head_of_output)
    g = x + STEP * H
    gates = STEP * args.k_ranks * (H + OUT)
    for h in range(H):
        d_x[STEP * h] = splat(x, 0)
    for o in range(OUT):
        h = head_of_output[o]
        a = vec(x, STEP * h)
        b = vec(g, STEP * o)
        factor = splat(x, gate[o])
        if args.num_key_gates:
            factor = factor + vec(keys, gates + STEP * o)
            accumulate_product(d_keys + (gates + STEP * o), a, b)
        accumulate_product(d_x + STEP * h, b, factor)
        accumulate_product(sums + SIMD_WIDTH * o, a, b)


@njit
def backward_query_ranks(args, row, heads, scratch):
    """Add the gradients of the query's factors, and of the input through them."""
    x, _, d_x, _, sums = scratch
    H = args.num_heads
    OUT = args.num_output_heads
    ranks = args.q_ranks
    head_begin, head_end, output_begin, output_end = heads
    g = x + STEP * H
    for r in range(ranks):
        source = floats(x, args.q_source) + (row * ranks + r) * H
        target = floats(x, args.q_target) + (row * ranks + r) * OUT
        a = dot_with_scalars(x, source, head_begin, head_end)
        d_a = dot_with_scalars(g, target, output_begin, output_end)
        d_source = sums + SIMD_WIDTH * (OUT + r * H)
        d_target = sums + SIMD_WIDTH * (OUT + ranks * H + r * OUT)
        for o in range(output_begin, output_end):
            accumulate_product(d_target + SIMD_WIDTH * o, vec(g, STEP * o), a)
        for h in range(head_begin, head_end):
            accumulate_product(d_x + STEP * h, d_a, splat(x, source[h]))
            accumulate_product(d_source + SIMD_WIDTH * h, vec(x, STEP * h), d_a)


@njit
def backward_key_ranks(args, heads, scratch):
    """Add the gradients of the keys' factors, and of the input through them."""
    x, keys, d_x, d_keys, _ = scratch
    H = args.num_heads
    OUT = args.num_output_heads
    ranks = args.k_ranks
    head_begin, head_end, output_begin, output_end = heads
    g = x + STEP * H
    for r in range(ranks):
        at_source = STEP * r * H
        at_target = STEP * (ranks * H + r * OUT)
        a = dot_with_vectors(x, keys + at_source, head_begin, head_end)
        d_a = dot_with_vectors(g, keys + at_target, output_begin, output_end)
        for o in range(output_begin, output_end):
            accumulate_product(d_keys + (at_target + STEP * o), vec(g, STEP * o), a)
        for h in range(head_begin, head_end):
            accumulate_product(d_x + STEP * h, d_a, vec(keys, at_source + STEP * h))
            accumulate_product(d_keys + (at_source + STEP * h), vec(x, STEP * h), d_a)


@njit
def store_sums(to, sums, count):
    """Write the sums of vectors."""
    for n in range(count):
        to[n] = reduce_sum(vec(sums, SIMD_WIDTH * n))


@njit
def backward_query(args, b, t, begin, scratch):
    """Compute the gradients of one query and a tile of keys."""
    x, keys, d_x, d_keys, sums = scratch
    H = args.num_heads
    OUT = args.num_output_heads
    T = args.num_queries
    S = args.num_keys
    ranks = args.q_ranks
    offset = (b * H * T + t) * S + begin
    count = min(KEY_TILE_SIZE, S - begin)
    inputs = floats(x, args.input) + offset
    outputs = floats(x, args.output) + offset
    grad = floats(x, args.grad) + ((b * OUT * T + t) * S + begin)
    copy_rows(x, STEP, inputs, T * S, (H, count))
    copy_rows(x + STEP * H, STEP, grad, T * S, (OUT, count))
    prefetch_rows(inputs + S, T * S, (H, count))
    prefetch_rows(grad + S, T * S, (OUT, count))
    prefetch_rows(outputs, T * S, (H, count))
    clear_memory(sums, SIMD_WIDTH * (OUT + ranks * (H + OUT)))
    for c in range(0, count, SIMD_WIDTH):
        pointers = (x + c, keys + c, d_x + c, d_keys + c, sums)
        backward_own_heads(args, b * T + t, pointers)
        for n in range(H // args.heads_per_group):
            heads = head_group_bounds(args, n)
            backward_query_ranks(args, b * T + t, heads, pointers)
            backward_key_ranks(args, heads, pointers)
    copy_rows(outputs, T * S, d_x, STEP, (H, count))
    row = (b * -(-S // KEY_TILE_SIZE) + begin // KEY_TILE_SIZE) * T + t
    store_sums(floats(x, args.d_q_gate) + row * OUT, sums, OUT)
    sums = sums + SIMD_WIDTH * OUT
    store_sums(floats(x, args.d_q_source) + row * ranks * H, sums, ranks * H)
    sums = sums + SIMD_WIDTH * ranks * H
    store_sums(floats(x, args.d_q_target) + row * ranks * OUT, sums, ranks * OUT)


@extending.register_jitable
def head_mixing_backward(dtype, args, item, scratch):
    """Compute the gradients of all queries and one tile of keys."""
    H = args.num_heads
    OUT = args.num_output_heads
    tiles = -(-args.num_keys // KEY_TILE_SIZE)
    num_factors = args.k_ranks * (H + OUT) + args.num_key_gates
    b = item // tiles
    begin = item % tiles * KEY_TILE_SIZE
    x = floats(dtype, scratch)
    keys = x + STEP * (H + OUT)
    d_x = keys + STEP * num_factors
    d_keys = d_x + STEP * H
    factors = (floats(x, args.k_source), floats(x, args.k_target), floats(x, args.k_gate))
    copy_key_factors(args, factors, keys, b, begin, False)
    clear_memory(d_keys, KEY_TILE_SIZE * num_factors)
    for t in range(args.num_queries):
        backward_query(args, b, t, begin, (x, keys, d_x, d_keys, d_keys + STEP * num_factors))
    grads = (floats(x, args.d_k_source), floats(x, args.d_k_target), floats(x, args.d_k_gate))
    copy_key_factors(args, grads, d_keys, b, begin, True)
