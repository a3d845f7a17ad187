"""Triton kernels of `headwise::head_mixing`, the operation of `head_mixing`, for GPUs.

A program owns a tile of queries and keys of one group of heads. It sums the heads by rank, and then
writes the mixed heads, so scores are read twice and written once. The backward kernel recomputes
the sums. Gradients of query factors are sums over keys, and those of key factors over queries: each
program writes its part, and the parts are added afterwards, so that results do not depend on the
order of the programs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .triton_support import can_run_triton, constant, constexpr, jit, tl

ROWS = 16
BLOCK_ROWS = constant(ROWS)
MAX_RANK = 4
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Factors(NamedTuple):
    """Factors of queries and keys in the shapes of the operation, or parts of their gradients."""

    q_source: Any
    q_target: Any
    q_gate: Any
    k_source: Any
    k_target: Any
    k_gate: Any


class Sizes(NamedTuple):
    """Numbers of heads, outputs, queries and keys, in all and of a group; constants are compiled.

    `lanes` is the larger rank, rounded up to a power of two; `block` is the keys of a program.
    """

    heads: Any
    outputs: Any
    queries: Any
    keys: Any
    group_heads: Any
    group_outputs: Any
    q_rank: Any
    k_rank: Any
    lanes: Any
    block: Any


class Tile(NamedTuple):
    """Batch row, queries and keys of a program."""

    batch: Any
    rows: Any
    columns: Any


class Range(NamedTuple):
    """First head, end, and heads in all."""

    first: Any
    end: Any
    count: Any


@jit
def find_pairs(head, count, tile, sizes):
    """Places of a tile of [B, count, T, S], and which of them exist."""
    row = (tile.batch * count + head) * sizes.queries + tile.rows[:, None]
    inside = (tile.rows[:, None] < sizes.queries) & (tile.columns[None] < sizes.keys)
    return row * sizes.keys + tile.columns[None], inside


@jit
def find_by_query(head, count, tile, sizes, RANK: constexpr, LANES: constexpr):
    """Places of a head in [B, T, RANK, count], [lanes, rows], and which of them exist."""
    lanes = tl.arange(0, LANES)[:, None]
    inside = (lanes < RANK) & (tile.rows[None] < sizes.queries)
    row = tile.batch * sizes.queries + tile.rows[None]
    return (row * RANK + lanes) * count + head, inside


@jit
def find_by_key(head, count, tile, sizes, RANK: constexpr, LANES: constexpr):
    """Places of a head in [B, RANK, count, S], [lanes, columns], and which of them exist."""
    lanes = tl.arange(0, LANES)[:, None]
    inside = (lanes < RANK) & (tile.columns[None] < sizes.keys)
    return ((tile.batch * RANK + lanes) * count + head) * sizes.keys + tile.columns[None], inside


@jit
def load(x, place):
    """The numbers at these places in float32, 0 where there are none."""
    places, inside = place
    return tl.load(x + places, mask=inside, other=0.0).to(tl.float32)


@jit
def store(x, place, values):
    """Store numbers at these places."""
    places, inside = place
    tl.store(x + places, values, mask=inside)


@jit
def load_gate(factors, output, tile, sizes):
    """The factor of the head itself, of queries and keys together."""
    gate = load(factors.q_gate, find_by_query(output, sizes.outputs, tile, sizes, 1, 1))
    gate = tl.sum(gate, 0)[:, None]
    if sizes.k_rank:
        by_key = load(factors.k_gate, find_by_key(output, sizes.outputs, tile, sizes, 1, 1))
        gate = gate + by_key
    return gate


@jit
def sum_by_rank(x, by_query, by_key, heads, tile, sizes):
    """Sums over heads of numbers times their factors, [lanes, rows, columns], by query and key."""
    from_query = tl.zeros([sizes.lanes, BLOCK_ROWS, sizes.block], tl.float32)
    from_key = tl.zeros([sizes.lanes, BLOCK_ROWS, sizes.block], tl.float32)
    for head in range(heads.first, heads.end):
        values = load(x, find_pairs(head, heads.count, tile, sizes))[None]
        if sizes.q_rank:
            place = find_by_query(head, heads.count, tile, sizes, sizes.q_rank, sizes.lanes)
            from_query += values * load(by_query, place)[:, :, None]
        if sizes.k_rank:
            place = find_by_key(head, heads.count, tile, sizes, sizes.k_rank, sizes.lanes)
            from_key += values * load(by_key, place)[:, None]
    return from_query, from_key


@jit
def spread_ranks(sums, by_query, by_key, head, count, tile, sizes):
    """Sums over ranks of the sums times the factors of one head, [rows, columns]."""
    from_query, from_key = sums
    values = tl.zeros([BLOCK_ROWS, sizes.block], tl.float32)
    if sizes.q_rank:
        place = find_by_query(head, count, tile, sizes, sizes.q_rank, sizes.lanes)
        values += tl.sum(from_query * load(by_query, place)[:, :, None], 0)
    if sizes.k_rank:
        place = find_by_key(head, count, tile, sizes, sizes.k_rank, sizes.lanes)
        values += tl.sum(from_key * load(by_key, place)[:, None], 0)
    return values


@jit
def put_factors(values, sums, by_query, by_key, head, count, parts, sizes):
    """Store this program's part of the gradients of the factors of one head."""
    from_query, from_key = sums
    if sizes.q_rank:
        place = find_by_query(head, count, parts[0], sizes, sizes.q_rank, sizes.lanes)
        store(by_query, place, tl.sum(from_query * values[None], 2))
    if sizes.k_rank:
        place = find_by_key(head, count, parts[1], sizes, sizes.k_rank, sizes.lanes)
        store(by_key, place, tl.sum(from_key * values[None], 1))


@jit
def find_own(sizes):
    """The tile of this program, and the heads and outputs of its group."""
    group = tl.program_id(1)
    wide = tl.cdiv(sizes.keys, sizes.block)
    rows = tl.program_id(0) // wide * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(0) % wide * sizes.block + tl.arange(0, sizes.block)
    first = group * sizes.group_heads
    heads = Range(first, first + sizes.group_heads, sizes.heads)
    first = group * sizes.group_outputs
    outputs = Range(first, first + sizes.group_outputs, sizes.outputs)
    return Tile(tl.program_id(2).to(tl.int64), rows, columns), heads, outputs


@jit
def mix_kernel(a, head_of_output, factors, output, sizes):
    """Write the mixed heads; the grid is [tiles, groups, batch]."""
    tile, heads, outputs = find_own(sizes)
    sums = sum_by_rank(a, factors.q_source, factors.k_source, heads, tile, sizes)
    for out in range(outputs.first, outputs.end):
        own = tl.load(head_of_output + out)
        values = load(a, find_pairs(own, heads.count, tile, sizes))
        values *= load_gate(factors, out, tile, sizes)
        values += spread_ranks(
            sums, factors.q_target, factors.k_target, out, outputs.count, tile, sizes
        )
        store(output, find_pairs(out, outputs.count, tile, sizes), values)


@jit
def mix_backward_kernel(grad, a, head_of_output, outputs_of_head, factors, parts, d_a, sizes):
    """Write the gradient of the heads, and this program's part of those of the factors."""
    tile, heads, outputs = find_own(sizes)
    wide = tl.cdiv(sizes.keys, sizes.block)
    high = tl.cdiv(sizes.queries, BLOCK_ROWS)
    by_query = Tile(tile.batch * wide + tl.program_id(0) % wide, tile.rows, tile.columns)
    by_key = Tile(tile.batch * high + tl.program_id(0) // wide, tile.rows, tile.columns)
    places = (by_query, by_key)
    sums = sum_by_rank(a, factors.q_source, factors.k_source, heads, tile, sizes)
    grads = sum_by_rank(grad, factors.q_target, factors.k_target, outputs, tile, sizes)
    for out in range(outputs.first, outputs.end):
        values = load(grad, find_pairs(out, outputs.count, tile, sizes))
        put_factors(values, sums, parts.q_target, parts.k_target, out, outputs.count, places, sizes)
        own = tl.load(head_of_output + out)
        values *= load(a, find_pairs(own, heads.count, tile, sizes))
        place = find_by_query(out, outputs.count, by_query, sizes, 1, 1)
        store(parts.q_gate, place, tl.sum(values, 1)[None])
        if sizes.k_rank:
            place = find_by_key(out, outputs.count, by_key, sizes, 1, 1)
            store(parts.k_gate, place, tl.sum(values, 0)[None])
    order, ends = outputs_of_head
    for head in range(heads.first, heads.end):
        values = load(a, find_pairs(head, heads.count, tile, sizes))
        put_factors(values, grads, parts.q_source, parts.k_source, head, heads.count, places, sizes)
        total = spread_ranks(
            grads, factors.q_source, factors.k_source, head, heads.count, tile, sizes
        )
        for number in range(tl.load(ends + head), tl.load(ends + head + 1)):
            reader = tl.load(order + number)
            values = load(grad, find_pairs(reader, outputs.count, tile, sizes))
            total += values * load_gate(factors, reader, tile, sizes)
        store(d_a, find_pairs(head, heads.count, tile, sizes), total)


class _Launch:
    """Sizes, factors and grid of one call."""

    def __init__(
        self, a: Tensor, head_of_output: Tensor, heads_per_group: int, factors: list[Tensor]
    ) -> None:
        batch, heads, queries, keys = a.shape
        outputs = len(head_of_output)
        groups = heads // heads_per_group
        ranks = factors[0].shape[2], factors[3].shape[1]
        lanes = 1 << (max(1, *ranks) - 1).bit_length()
        block = max(16, 64 // lanes)
        shape = heads, outputs, queries, keys, heads_per_group, outputs // groups
        self.sizes = Sizes(*shape, *map(tl.constexpr, (*ranks, lanes, block)))
        self.factors = Factors(*(one.contiguous() for one in factors))
        self.high = -(-queries // ROWS)
        self.wide = -(-keys // block)
        self.grid = self.high * self.wide, groups, batch


def can_mix(a: Tensor, rank: int) -> bool:
    """Return True if the kernels mix heads of this device and dtype by factors of this rank."""
    return can_run_triton(a.device) and a.dtype in DTYPES and rank <= MAX_RANK


def mix_heads(
    a: Tensor, head_of_output: Tensor, heads_per_group: int, factors: list[Tensor]
) -> Tensor:
    """Run `headwise::head_mixing`."""
    launch = _Launch(a, head_of_output, heads_per_group, factors)
    output = a.new_empty(a.shape[0], launch.sizes.outputs, *a.shape[2:])
    with torch.cuda.device_of(a):
        mix_kernel[launch.grid](
            a.contiguous(), head_of_output, launch.factors, output, launch.sizes
        )
    return output


def mix_heads_backward(
    grad: Tensor, a: Tensor, head_of_output: Tensor, heads_per_group: int, factors: list[Tensor]
) -> list[Tensor]:
    """Run `headwise::head_mixing_backward`."""
    launch = _Launch(a, head_of_output, heads_per_group, factors)
    a = a.contiguous()
    d_a = torch.empty_like(a)
    tiles = [launch.wide] * 3 + [launch.high] * 3
    parts = [
        one.new_empty(len(one), count, *one.shape[1:], dtype=torch.float32)
        for one, count in zip(factors, tiles, strict=True)
    ]
    heads = torch.arange(launch.sizes.heads + 1, device=a.device)
    own, order = head_of_output.sort(stable=True)
    with torch.cuda.device_of(a):
        mix_backward_kernel[launch.grid](
            grad.contiguous(),
            a,
            head_of_output,
            (order, torch.searchsorted(own, heads)),
            launch.factors,
            Factors(*parts),
            d_a,
            launch.sizes,
        )
    return [d_a, *(part.sum(1).to(a.dtype) for part in parts)]
