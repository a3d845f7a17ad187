"""Triton kernel of statistics of attention weights: two sweeps over the keys of a tile of queries.

The first sweep finds the largest score and the sums of each row, as flash attention does. With
these the second sweep recomputes the exact weights, tile by tile, and adds them to the statistics.
A program owns `BLOCK_ROWS` queries of one head and writes `NUM_SLOTS` float64 sums. No program
writes where another does, except into the column mass, so that sums do not depend on their order.

Products are in full float32 ("ieee"): TF32 would change weights by 1e-3. Narrower inputs become
float32 right after they are loaded. A row's largest keys are those with its largest score.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .triton_support import constant, constexpr, jit, tl

BLOCK_ROWS = constant(16)
BLOCK_KEYS = constant(64)
BLOCK_DIMS = constant(16)
NO_SCORE = constant(-3.0e38)  # smaller than every score that is allowed
MASKED = constant(-1e4)  # a bias of this or less is a mask
MIN_REST = constant(0.01)  # rows with less weight than this outside sinks do not count
ROUNDING = constant(16 * 2.0**-23)  # a weight on sinks of this or less is 0
MAX_OFFSET = constant(16)
NUM_LANES = constant(64)  # offsets -16..16, padded to a power of two
NUM_SLOTS = constant(224)  # 16 pairs of sum and count, then weights, pairs and hits by offset

CAUSAL = constant(1)
SELF_ATTENTION = constant(2)  # queries and keys are the same tokens
UNIFORM = constant(4)  # every allowed key has equal weight

# bits of the flags of a key
SINK = constant(1)
SEPARATOR = constant(2)
PUNCTUATION = constant(4)
RAREST = constant(8)


class StridedInput(NamedTuple):
    """A tensor [heads, rows, columns] by its strides; no tensor if `data` is None."""

    data: Any
    by_head: Any
    by_row: Any
    by_column: Any


class ScoreArgs(NamedTuple):
    """Inputs of the scores. `bias` is added; `mask` is true where a key is allowed."""

    q: StridedInput
    k: StridedInput
    kv_head_of_query: Any
    bias: StridedInput
    mask: StridedInput
    sinks: Any
    num_queries: Any
    num_keys: Any
    num_dims: Any
    scale: Any
    softcap: Any


class TokenArgs(NamedTuple):
    """Ids of queries and keys, flags of keys, and the place of each query among sampled rows."""

    query_ids: Any
    key_ids: Any
    key_flags: Any
    sample_of_query: Any
    num_samples: Any


class HeadStatistics(NamedTuple):
    """Statistics of every head, on the device.

    - `sums`: float64 [H, slots]: sum and count at each of `head_statistics.PLACES`, then sums of
      weights, pairs and hits of the largest weight at offsets -16..16, `NUM_LANES` each. The kernel
      writes those of every tile of queries, [H, tiles, slots].
    - `num_keys`: allowed keys of each query, [H, T].
    - `sampled`: weights of the sampled queries, [H, samples, S].
    - `column_mass`: weight on each key, summed over queries, [H, S].
    """

    sums: Any
    num_keys: Any
    sampled: Any
    column_mass: Any


@jit
def load_pairs(x, head, rows, columns, inside):
    """Load a tile of a bias or mask."""
    places = rows[:, None].to(tl.int64) * x.by_row + columns[None].to(tl.int64) * x.by_column
    return tl.load(x.data + head * x.by_head + places, mask=inside, other=0)


@jit
def allow_pairs(args, head, rows, columns, inside):
    """Return which pairs of a tile the masks of a head allow."""
    allowed = inside
    if args.mask.data is not None:
        allowed = allowed & (load_pairs(args.mask, head, rows, columns, inside) != 0)
    if args.bias.data is not None:
        bias = load_pairs(args.bias, head, rows, columns, inside).to(tl.float32)
        allowed = allowed & (bias > MASKED)
    return allowed


@jit
def multiply_tile(args, head, rows, columns):
    """Return scaled products of a tile of queries and keys, in full float32."""
    dims = tl.arange(0, BLOCK_DIMS)
    kv_head = tl.load(args.kv_head_of_query + head).to(tl.int64)
    q = args.q.data + head * args.q.by_head + rows[:, None] * args.q.by_row
    k = args.k.data + kv_head * args.k.by_head + columns[None] * args.k.by_row
    scores = tl.zeros([BLOCK_ROWS, BLOCK_KEYS], tl.float32)
    for start in range(0, args.num_dims, BLOCK_DIMS):
        dim = start + dims
        is_query = (rows[:, None] < args.num_queries) & (dim[None] < args.num_dims)
        is_key = (columns[None] < args.num_keys) & (dim[:, None] < args.num_dims)
        left = tl.load(q + dim[None] * args.q.by_column, mask=is_query, other=0.0)
        right = tl.load(k + dim[:, None] * args.k.by_column, mask=is_key, other=0.0)
        left = left.to(tl.float32) * args.scale
        scores = tl.dot(left, right.to(tl.float32), scores, input_precision="ieee")
    return scores


@jit
def score_tile(args, head, rows, columns, OPTIONS: constexpr):
    """Return the scores of a tile, and which pairs are allowed."""
    inside = (rows[:, None] < args.num_queries) & (columns[None] < args.num_keys)
    if OPTIONS & CAUSAL:
        inside = inside & (columns[None] <= rows[:, None])
    if OPTIONS & UNIFORM:
        scores = tl.zeros([BLOCK_ROWS, BLOCK_KEYS], tl.float32)
    else:
        scores = multiply_tile(args, head, rows, columns)
        if args.softcap is not None:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1), in float64 because of the difference
            doubled = 2.0 * (scores / args.softcap).to(tl.float64)
            scores = (args.softcap * (1.0 - 2.0 / (tl.exp(doubled) + 1.0))).to(tl.float32)
        if args.bias.data is not None:
            scores += load_pairs(args.bias, head, rows, columns, inside).to(tl.float32)
    return scores, allow_pairs(args, head, rows, columns, inside)


@jit
def sweep_sums(args, key_flags, head, rows, num_keys, OPTIONS: constexpr):
    """First sweep: the largest score of each row and the sum of exponentials relative to it, over
    all keys and over keys that are not sinks, and how many of the latter share their largest score.
    """
    top = tl.full([BLOCK_ROWS], NO_SCORE, tl.float32)
    rest_top = tl.full([BLOCK_ROWS], NO_SCORE, tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    rest = tl.zeros([BLOCK_ROWS], tl.float32)
    ties = tl.zeros([BLOCK_ROWS], tl.float32)
    for start in range(0, num_keys, BLOCK_KEYS):
        columns = start + tl.arange(0, BLOCK_KEYS)
        scores, allowed = score_tile(args, head, rows, columns, OPTIONS)
        flags = tl.load(key_flags + columns, mask=columns < args.num_keys, other=0)
        is_rest = allowed & ((flags & SINK) == 0)[None]
        scores = tl.where(allowed, scores, NO_SCORE)
        larger = tl.maximum(top, tl.max(scores, 1))
        powers = tl.where(allowed, tl.exp(scores - larger[:, None]), 0.0)
        shrink = tl.exp(top - larger)
        total = total * shrink + tl.sum(powers, 1)
        rest = rest * shrink + tl.sum(tl.where(is_rest, powers, 0.0), 1)
        top = larger
        larger = tl.maximum(rest_top, tl.max(tl.where(is_rest, scores, NO_SCORE), 1))
        equal = is_rest & (scores == larger[:, None])
        ties = tl.where(larger > rest_top, 0.0, ties) + tl.sum(equal.to(tl.float32), 1)
        rest_top = larger
    return top, total, rest, rest_top, ties


@jit
def add_offsets(by_offset, rows, start, scores, is_rest, norms):
    """Add a tile to the sums by the offset of the key from the query: weights, pairs and hits.

    `norms` holds of each row the subtrahend of scores, the factor of weights outside sinks, the
    largest score outside sinks and the number of keys that share it.
    """
    weights, pairs, hits = by_offset
    subtrahend, factor, rest_top, ties = norms
    lanes = tl.arange(0, NUM_LANES)
    places = rows[:, None] + (lanes - MAX_OFFSET)[None] - start
    in_tile = (places >= 0) & (places < BLOCK_KEYS) & (lanes <= 2 * MAX_OFFSET)[None]
    places = tl.minimum(tl.maximum(places, 0), BLOCK_KEYS - 1)
    picked = tl.gather(tl.where(is_rest, scores, NO_SCORE), places, 1)
    in_tile = in_tile & (picked > NO_SCORE) & (factor > 0)[:, None]
    powers = tl.exp(picked - subtrahend[:, None]) * factor[:, None]
    share = tl.where(picked == rest_top[:, None], 1.0 / tl.maximum(ties, 1.0)[:, None], 0.0)
    weights += tl.sum(tl.where(in_tile, powers, 0.0), 0)
    pairs += tl.sum(in_tile.to(tl.float32), 0)
    hits += tl.sum(tl.where(in_tile, share, 0.0), 0)
    return weights, pairs, hits


@jit
def put(sums, PLACE: constexpr, counted, values):
    """Store a sum over the rows that count, and their number, in float64."""
    tl.store(sums + 2 * PLACE, tl.sum(tl.where(counted, values, 0.0).to(tl.float64), 0))
    tl.store(sums + 2 * PLACE + 1, tl.sum(counted.to(tl.float64), 0))


@jit
def add_tile(sums, tile, rows, columns, args, tokens, OPTIONS: constexpr):
    """Second sweep, one tile: add its weights to the sums of rows."""
    weights, logs, allowed, is_rest, is_top, flags = tile
    totals, counts = sums
    entropy, distance, first, separator, punctuation, duplicate, induction, rare, squares = totals
    num_keys, num_rest, seen_kinds, seen_pairs = counts
    rest = tl.where(is_rest, weights, 0.0)
    is_first = (columns == 0)[None]
    is_separator = ((flags & SEPARATOR) != 0)[None]
    is_punctuation = ((flags & PUNCTUATION) != 0)[None]
    is_rare = ((flags & RAREST) != 0)[None]
    entropy -= tl.sum(weights * logs, 1)
    first += tl.sum(tl.where(is_first, weights, 0.0), 1)
    separator += tl.sum(tl.where(is_separator, weights, 0.0), 1)
    punctuation += tl.sum(tl.where(is_punctuation, rest, 0.0), 1)
    rare += tl.sum((is_top & is_rare).to(tl.float32), 1)
    squares += tl.sum(rest * rest, 1)
    # The 64 keys of a tile are counted in bytes of an integer, four kinds of keys at once.
    kinds = (allowed & is_first).to(tl.int32) + ((allowed & is_separator).to(tl.int32) << 8)
    kinds += (is_rest & is_punctuation).to(tl.int32) << 16
    kinds += (is_rest & is_rare).to(tl.int32) << 24
    pairs = (is_rest.to(tl.int32) << 16) + (allowed.to(tl.int32) << 24)
    if OPTIONS & SELF_ATTENTION:
        far = tl.abs(columns[None] - rows[:, None]).to(tl.float32)
        distance += tl.sum(weights * far, 1)
        is_key = columns < args.num_keys
        ids = tl.load(tokens.key_ids + columns, mask=is_key, other=-1)
        before = tl.load(tokens.key_ids + columns - 1, mask=is_key & (columns > 0), other=-1)
        own = tl.load(tokens.query_ids + rows, mask=rows < args.num_queries, other=-1)
        is_same = is_rest & (own[:, None] == ids[None]) & (columns[None] != rows[:, None])
        follows = is_rest & (own[:, None] == before[None]) & (columns[None] < rows[:, None])
        follows = follows & (columns > 0)[None]
        duplicate += tl.sum(tl.where(is_same, rest, 0.0), 1)
        induction += tl.sum(tl.where(follows, rest, 0.0), 1)
        pairs += is_same.to(tl.int32) + (follows.to(tl.int32) << 8)
    kinds = tl.sum(kinds, 1)
    pairs = tl.sum(pairs, 1)
    totals = (entropy, distance, first, separator, punctuation, duplicate, induction, rare, squares)
    counts = (
        num_keys + (pairs >> 24),
        num_rest + ((pairs >> 16) & 255),
        seen_kinds | kinds,
        seen_pairs | pairs,
    )
    return totals, counts


@jit
def put_rows(sums, row_values, totals, counts):
    """Store the statistics of all rows of a tile; `head_statistics.PLACES` names the places."""
    largest, non_sink, factor, ties, is_query = row_values
    entropy, distance, first, separator, punctuation, duplicate, induction, rare, squares = totals
    num_keys, num_rest, kinds, pairs = counts
    has_keys = is_query & (num_keys > 0)
    has_choice = is_query & (num_keys > 1)
    is_counted = is_query & (factor > 0)
    reads_first = is_query & ((kinds & 255) > 0)
    keys = tl.maximum(num_keys, 1).to(tl.float32)
    sink = 1.0 - non_sink
    put(sums, 0, has_keys, entropy)
    put(sums, 1, has_choice, tl.exp(entropy) / keys)
    put(sums, 2, has_keys, largest)
    put(sums, 3, has_keys, distance)
    put(sums, 4, has_keys, tl.where(sink > ROUNDING, sink, 0.0))
    put(sums, 5, reads_first, first)
    put(sums, 6, is_query & (((kinds >> 8) & 255) > 0), separator)
    put(sums, 7, is_counted & (((kinds >> 16) & 255) > 0), punctuation * factor)
    put(sums, 8, is_counted & ((pairs & 255) > 0), duplicate * factor)
    put(sums, 9, is_counted & (((pairs >> 8) & 255) > 0), induction * factor)
    put(sums, 10, is_counted & (((kinds >> 24) & 255) > 0), rare / tl.maximum(ties, 1.0))
    put(sums, 11, is_counted, squares * factor * factor)
    put(sums, 12, is_counted, num_rest.to(tl.float32))
    put(sums, 13, reads_first & has_choice, first)
    put(sums, 14, reads_first & has_choice, 1.0 / keys)


@jit
def head_statistics_kernel(args, tokens, outputs, OPTIONS: constexpr):
    """Sum the statistics of `BLOCK_ROWS` queries of one head; the grid is [tiles, heads]."""
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    rows = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_query = rows < args.num_queries
    end = args.num_keys
    if OPTIONS & CAUSAL:
        end = tl.minimum(end, (tile + 1) * BLOCK_ROWS)
    top, total, rest, rest_top, ties = sweep_sums(args, tokens.key_flags, head, rows, end, OPTIONS)
    largest = tl.where(total > 0, 1.0, 0.0)
    if args.sinks is not None:
        # A learned sink is one more score, without a value.
        sink = tl.load(args.sinks + head).to(tl.float32)
        shrink = tl.exp(top - tl.maximum(top, sink))
        largest *= shrink
        total = total * shrink + tl.exp(sink - tl.maximum(top, sink))
        rest *= shrink
        top = tl.maximum(top, sink)
    has_weight = total > 0
    total = tl.where(has_weight, total, 1.0)
    inverse = tl.where(has_weight, 1.0 / total, 0.0)
    log_total = tl.log(total)
    non_sink = rest * inverse
    is_counted = is_query & (non_sink >= MIN_REST)
    factor = tl.where(is_counted, 1.0 / tl.maximum(non_sink, MIN_REST), 0.0)
    norms = (top, inverse * factor, rest_top, ties)

    zero = tl.zeros([BLOCK_ROWS], tl.float32)
    none = tl.zeros([BLOCK_ROWS], tl.int32)
    lane_zero = tl.zeros([NUM_LANES], tl.float32)
    totals = (zero, zero, zero, zero, zero, zero, zero, zero, zero)
    counts = (none, none, none, none)
    by_offset = (lane_zero, lane_zero, lane_zero)
    sample = tl.load(tokens.sample_of_query + rows, mask=is_query, other=-1)
    is_sampled = (sample >= 0)[:, None]
    sampled = outputs.sampled + (head * tokens.num_samples + sample[:, None]) * args.num_keys
    for start in range(0, end, BLOCK_KEYS):
        columns = start + tl.arange(0, BLOCK_KEYS)
        is_key = columns < args.num_keys
        scores, allowed = score_tile(args, head, rows, columns, OPTIONS)
        flags = tl.load(tokens.key_flags + columns, mask=is_key, other=0)
        is_rest = allowed & ((flags & SINK) == 0)[None]
        logs = tl.where(allowed, scores - top[:, None], 0.0)
        weights = tl.where(allowed, tl.exp(logs) * inverse[:, None], 0.0)
        is_top = is_rest & (scores == rest_top[:, None])
        parts = (weights, logs - log_total[:, None], allowed, is_rest, is_top, flags)
        totals, counts = add_tile((totals, counts), parts, rows, columns, args, tokens, OPTIONS)
        tl.store(sampled + columns[None], weights, mask=allowed & is_sampled)
        if outputs.column_mass is not None:
            mass = outputs.column_mass + head * args.num_keys + columns
            tl.atomic_add(mass, tl.sum(weights, 0), mask=is_key)
        if OPTIONS & SELF_ATTENTION:
            first_row = tile * BLOCK_ROWS
            is_near = start <= first_row + BLOCK_ROWS - 1 + MAX_OFFSET
            if is_near & (start + BLOCK_KEYS > first_row - MAX_OFFSET):
                by_offset = add_offsets(by_offset, rows, start, scores, is_rest, norms)

    sums = outputs.sums + (head * tl.num_programs(0) + tile) * NUM_SLOTS
    put_rows(sums, (largest * inverse, non_sink, factor, ties, is_query), totals, counts)
    lanes = tl.arange(0, NUM_LANES)
    for part in tl.static_range(3):
        tl.store(sums + 32 + part * NUM_LANES + lanes, by_offset[part].to(tl.float64))
    num_keys = outputs.num_keys + head * args.num_queries + rows
    tl.store(num_keys, counts[0], mask=is_query)
