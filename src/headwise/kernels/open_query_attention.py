"""FlashAttention over the open queries of each head on GPUs, in Triton, for mixtures of heads.

A head attends for the queries that its router opened, and returns zeros for the others. For head h,
its key head g and an open query t, over the keys j <= t + ahead:

    o[t] = sum_j softmax(scale q[t] . k[j]) v[j]        lse[t] = log2 sum_j exp(scale q[t] . k[j])

The open queries of a head are packed: a program owns a tile of them, and reads keys up to the last
that one of them reads. Only the device knows how many are open, so programs are launched for all
queries, and those without an open one return at once. The backward pass recomputes the scores from
lse (2205.14135), once for the queries and once for the keys, so that no program writes where
another does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .operand_checks import (
    NO_DOUBLE_BACKWARD_REMEDY,
    OperandChecks,
    check_groups,
    forbid_double_backward,
    refuse_operands,
)
from .triton_support import can_run_triton, constant, constexpr, jit, tl

# channels of a head; wider ones need more registers than a GPU has
MAX_DIM = {torch.float32: 64, torch.float16: 128, torch.bfloat16: 128}
# Queries and keys of a tile, and stages of its loads: in the kernels that own queries, and in the
# one that owns keys. Larger ones spill registers on one of the GPUs that are tested.
FLOAT32_TILES = ((16, 32, 2), (16, 32, 2))
NARROW_TILES = ((64, 64, 2), (64, 64, 1))  # up to 64 channels
WIDE_TILES = ((32, 64, 2), (64, 32, 1))
NO_SCORE = constant(-1.0e30)  # smaller than every score that is allowed
LOG2_E = 1.4426950408889634


class Operands(NamedTuple):
    """Queries [B, T, H, dim], keys [B, S, G, dim], values [B, S, G, vdim] and the open queries.

    `rows` [B, H, T] lists the open queries of each head first, in order. `before` [B, H, T + 1]
    counts the open queries before each one.
    """

    q: Any
    k: Any
    v: Any
    rows: Any
    before: Any


class Gradients(NamedTuple):
    """The gradient of the outputs [B, T, H, vdim], lse [B, T, H], and the product of gradient and
    output of each query [B, T, H].
    """

    grad: Any
    lse: Any
    delta: Any


class Sizes(NamedTuple):
    """Sizes of a call; those after `scale` are compiled.

    `dims` and `vdims` are the channels, rounded up to a power of two.
    """

    queries: Any
    heads: Any
    keys: Any
    kv_heads: Any
    ahead: Any
    scale: Any
    dim: Any
    vdim: Any
    dims: Any
    vdims: Any
    block_rows: Any
    block_keys: Any


class Axis(NamedTuple):
    """One head of a tensor [B, count, heads, channels]."""

    batch: Any
    count: Any
    heads: Any
    head: Any


@jit
def find_channels(axis, rows, inside, DIM: constexpr, LANES: constexpr):
    """Places of the channels of some rows, [rows, lanes], and which of them exist."""
    lanes = tl.arange(0, LANES)[None]
    row = (axis.batch * axis.count + rows[:, None]) * axis.heads + axis.head
    return row * DIM + lanes, inside[:, None] & (lanes < DIM)


@jit
def load_channels(x, axis, rows, inside, DIM: constexpr, LANES: constexpr):
    """The channels of some rows, 0 where there are none."""
    places, exist = find_channels(axis, rows, inside, DIM, LANES)
    return tl.load(x + places, mask=exist, other=0.0)


@jit
def store_channels(x, axis, rows, inside, values, DIM: constexpr, LANES: constexpr):
    """Store the channels of some rows."""
    places, exist = find_channels(axis, rows, inside, DIM, LANES)
    tl.store(x + places, values, mask=exist)


@jit
def load_open(operands, line, first, sizes):
    """The next open queries of a head, from number `first`, and which of them exist."""
    number = first + tl.arange(0, sizes.block_rows)
    end = tl.load(operands.before + line * (sizes.queries + 1) + sizes.queries)
    inside = number < end
    return tl.load(operands.rows + line * sizes.queries + number, mask=inside, other=0), inside


@jit
def load_key_tile(operands, shared, start, sizes):
    """The numbers of the next keys, which of them exist, and the keys and values."""
    columns = start + tl.arange(0, sizes.block_keys)
    exist = columns < sizes.keys
    k = load_channels(operands.k, shared, columns, exist, sizes.dim, sizes.dims)
    v = load_channels(operands.v, shared, columns, exist, sizes.vdim, sizes.vdims)
    return columns, exist, k, v


@jit
def score(q, k, rows, columns, inside, sizes):
    """Scores of a tile in base 2, [rows, columns]; `NO_SCORE` for pairs that are not allowed."""
    allowed = (columns[None] <= rows[:, None] + sizes.ahead) & (columns[None] < sizes.keys)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * sizes.scale
    return tl.where(allowed & inside[:, None], scores, NO_SCORE)


@jit
def find_own(operands, sizes):
    """The queries of this program and the end of their keys; the grid is [tiles, heads, batch]."""
    batch = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    line = batch * sizes.heads + head
    rows, inside = load_open(operands, line, tl.program_id(0) * sizes.block_rows, sizes)
    end = tl.minimum(tl.max(rows, 0) + sizes.ahead + 1, sizes.keys)
    end = tl.where(tl.max(inside.to(tl.int32), 0) > 0, end, 0)
    own = Axis(batch, sizes.queries, sizes.heads, head)
    shared = Axis(batch, sizes.keys, sizes.kv_heads, head // (sizes.heads // sizes.kv_heads))
    return own, shared, rows, inside, end


@jit
def attend_kernel(operands, out, lse, sizes):
    """Write the outputs and the sums of exponentials of the open queries."""
    own, shared, rows, inside, end = find_own(operands, sizes)
    if end > 0:
        q = load_channels(operands.q, own, rows, inside, sizes.dim, sizes.dims)
        top = tl.full([sizes.block_rows], NO_SCORE, tl.float32)
        total = tl.zeros([sizes.block_rows], tl.float32)
        sums = tl.zeros([sizes.block_rows, sizes.vdims], tl.float32)
        for start in range(0, end, sizes.block_keys):
            columns, _, k, v = load_key_tile(operands, shared, start, sizes)
            scores = score(q, k, rows, columns, inside, sizes)
            highest = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - highest[:, None])
            shrink = tl.exp2(top - highest)
            total = total * shrink + tl.sum(weights, 1)
            sums = sums * shrink[:, None]
            sums = tl.dot(weights.to(v.dtype), v, sums, input_precision="ieee")
            top = highest
        total = tl.where(inside, total, 1.0)
        store_channels(out, own, rows, inside, sums / total[:, None], sizes.vdim, sizes.vdims)
        places = (own.batch * sizes.queries + rows) * sizes.heads + own.head
        tl.store(lse + places, top + tl.log2(total), mask=inside)


class QueryTile(NamedTuple):
    """Open queries of a tile, their channels, and what the backward pass reads of them."""

    rows: Any
    inside: Any
    q: Any
    grad: Any
    lse: Any
    delta: Any


@jit
def load_query_tile(operands, gradients, own, rows, inside, sizes):
    """Queries, gradients of their outputs, their lse, and their products with the outputs."""
    q = load_channels(operands.q, own, rows, inside, sizes.dim, sizes.dims)
    grad = load_channels(gradients.grad, own, rows, inside, sizes.vdim, sizes.vdims)
    places = (own.batch * sizes.queries + rows) * sizes.heads + own.head
    lse = tl.load(gradients.lse + places, mask=inside, other=0.0)
    delta = tl.load(gradients.delta + places, mask=inside, other=0.0)
    return QueryTile(rows, inside, q, grad, lse, delta)


@jit
def backward_tile(tile, k, v, columns, sizes):
    """Weights of a tile of pairs, and gradients of its scores."""
    scores = score(tile.q, k, tile.rows, columns, tile.inside, sizes)
    weights = tl.exp2(scores - tile.lse[:, None])
    by_weight = tl.dot(tile.grad, tl.trans(v), input_precision="ieee")
    return weights, weights * (by_weight - tile.delta[:, None])


@jit
def backward_queries_kernel(operands, gradients, d_q, factor, sizes):
    """Write the gradients of the open queries."""
    own, shared, rows, inside, end = find_own(operands, sizes)
    if end > 0:
        tile = load_query_tile(operands, gradients, own, rows, inside, sizes)
        sums = tl.zeros([sizes.block_rows, sizes.dims], tl.float32)
        for start in range(0, end, sizes.block_keys):
            columns, _, k, v = load_key_tile(operands, shared, start, sizes)
            _, d_scores = backward_tile(tile, k, v, columns, sizes)
            sums = tl.dot(d_scores.to(k.dtype), k, sums, input_precision="ieee")
        store_channels(d_q, own, rows, inside, sums * factor, sizes.dim, sizes.dims)


@jit
def backward_keys_kernel(operands, gradients, d_k, d_v, factor, sizes):
    """Write the gradients of a tile of keys and values; the grid is [tiles, key heads, batch]."""
    batch = tl.program_id(2).to(tl.int64)
    kv_head = tl.program_id(1)
    begin = tl.program_id(0) * sizes.block_keys
    shared = Axis(batch, sizes.keys, sizes.kv_heads, kv_head)
    columns, exist, k, v = load_key_tile(operands, shared, begin, sizes)
    sums_k = tl.zeros([sizes.block_keys, sizes.dims], tl.float32)
    sums_v = tl.zeros([sizes.block_keys, sizes.vdims], tl.float32)
    group = sizes.heads // sizes.kv_heads
    first_reader = tl.minimum(tl.maximum(begin - sizes.ahead, 0), sizes.queries)
    for head in range(kv_head * group, (kv_head + 1) * group):
        line = batch * sizes.heads + head
        counts = operands.before + line * (sizes.queries + 1)
        own = Axis(batch, sizes.queries, sizes.heads, head)
        end = tl.load(counts + sizes.queries)
        for first in range(tl.load(counts + first_reader), end, sizes.block_rows):
            rows, inside = load_open(operands, line, first, sizes)
            tile = load_query_tile(operands, gradients, own, rows, inside, sizes)
            weights, d_scores = backward_tile(tile, k, v, columns, sizes)
            weights = tl.trans(weights.to(v.dtype))
            sums_v = tl.dot(weights, tile.grad, sums_v, input_precision="ieee")
            d_scores = tl.trans(d_scores.to(k.dtype))
            sums_k = tl.dot(d_scores, tile.q, sums_k, input_precision="ieee")
    store_channels(d_k, shared, columns, exist, sums_k * factor, sizes.dim, sizes.dims)
    store_channels(d_v, shared, columns, exist, sums_v, sizes.vdim, sizes.vdims)


class _Launch:
    """Operands, sizes and grids of one call."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, opened_BTH: Tensor, ahead: int, scale: float
    ) -> None:
        batch, queries, heads, dim = q.shape
        _, keys, kv_heads, vdim = v.shape
        before = torch.nn.functional.pad(opened_BTH.mT.cumsum(-1, dtype=torch.int32), (1, 0))
        order = torch.argsort(~opened_BTH.mT, dim=-1, stable=True).to(torch.int32)
        tensors = (one.contiguous() for one in (q, k, v, order, before))
        self.operands = Operands(*tensors)
        lanes = [max(16, 1 << (size - 1).bit_length()) for size in (dim, vdim)]
        tiles = NARROW_TILES if max(lanes) <= 64 else WIDE_TILES
        if q.dtype == torch.float32:
            tiles = FLOAT32_TILES
        counts = queries, heads, keys, kv_heads, ahead, scale * LOG2_E
        self.by_query, self.by_key = (
            Sizes(*counts, *map(tl.constexpr, (dim, vdim, *lanes, *tile[:2]))) for tile in tiles
        )
        self.stages = [stages for *_, stages in tiles]
        self.query_grid = -(-queries // tiles[0][0]), heads, batch
        self.key_grid = -(-keys // tiles[1][1]), kv_heads, batch


def can_run(device: str) -> bool:
    """Return True if the kernels run on this kind of device."""
    return can_run_triton(torch.device(device))


def attend(
    q: Tensor, k: Tensor, v: Tensor, opened_BTH: Tensor, ahead: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Run `headwise::open_query_attention`."""
    launch = _Launch(q, k, v, opened_BTH, ahead, scale)
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    lse = q.new_zeros(q.shape[:3], dtype=torch.float32)
    with torch.cuda.device_of(q):
        attend_kernel[launch.query_grid](
            launch.operands, out, lse, launch.by_query, num_stages=launch.stages[0]
        )
    return out, lse


def attend_backward(
    grad: Tensor, tensors: list[Tensor], opened_BTH: Tensor, ahead: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Run `headwise::open_query_attention_backward`."""
    q, k, v, out, lse = tensors
    launch = _Launch(q, k, v, opened_BTH, ahead, scale)
    delta = (grad.float() * out.float()).sum(-1)
    gradients = Gradients(grad.contiguous(), lse.contiguous(), delta)
    d_q = torch.zeros_like(launch.operands.q)
    d_k, d_v = torch.empty_like(launch.operands.k), torch.empty_like(launch.operands.v)
    arguments = launch.operands, gradients
    with torch.cuda.device_of(q):
        backward_queries_kernel[launch.query_grid](
            *arguments, d_q, scale, launch.by_query, num_stages=launch.stages[0]
        )
        backward_keys_kernel[launch.key_grid](
            *arguments, d_k, d_v, scale, launch.by_key, num_stages=launch.stages[1]
        )
    return d_q, d_k, d_v


# --- The operation --------------------------------------------------------------------------------

OPERANDS = {"k": "B S G K", "v": "B S G V", "opened": "bool: B T H"}
FORM_OF_Q = "float32 float16 bfloat16: B T H K"
CHECKS = OperandChecks("open_query_attention", q=FORM_OF_Q, **OPERANDS)
BACKWARD_CHECKS = OperandChecks(
    "open_query_attention_backward",
    q=FORM_OF_Q,
    **OPERANDS,
    out="B T H V",
    lse="float32: B T H",
    grad="B T H V",
)


def _check_operands(checks: OperandChecks, tensors: list[Tensor], ahead: int) -> None:
    """Raise ValueError for tensors that do not fit each other, or that no kernel takes."""
    checks.check(*tensors)
    q, k, v, *_ = tensors
    check_groups(checks.operation, q.shape[2], k.shape[2])
    if not can_run_triton(q.device):
        refuse_operands(checks.operation, f"q is on {q.device}", "give tensors of a GPU and Triton")
    if max(q.shape[3], v.shape[3]) > MAX_DIM[q.dtype]:
        fact = f"heads have {q.shape[3]} and {v.shape[3]} channels"
        refuse_operands(checks.operation, fact, f"give at most {MAX_DIM[q.dtype]}")
    if ahead < 0:
        refuse_operands(checks.operation, f"ahead is {ahead}", "give 0 or more")


@torch.library.custom_op("headwise::open_query_attention", mutates_args=())
def attend_open_queries(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    opened_BTH: Tensor,
    ahead: int,
    scale: float,
    num_pairs: int,
) -> tuple[Tensor, Tensor]:
    """Return the attention of the open queries, zeros for the others, and lse.

    Only the counter of FLOPs reads `num_pairs`, the scores that are expected to be computed.
    """
    _check_operands(CHECKS, [q, k, v, opened_BTH], ahead)
    return attend(q, k, v, opened_BTH, ahead, scale)


@torch.library.custom_op("headwise::open_query_attention_backward", mutates_args=())
def attend_open_queries_backward(
    grad: Tensor,
    tensors: list[Tensor],
    opened_BTH: Tensor,
    ahead: int,
    scale: float,
    num_pairs: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; `tensors` holds these, the outputs and lse."""
    q, k, v, out, lse = tensors
    _check_operands(BACKWARD_CHECKS, [q, k, v, opened_BTH, out, lse, grad], ahead)
    return attend_backward(grad, tensors, opened_BTH, ahead, scale)


@attend_open_queries.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return (
        q.new_empty(*q.shape[:3], v.shape[3]),
        q.new_empty(q.shape[:3], dtype=torch.float32),
    )


@attend_open_queries_backward.register_fake
def _(grad: Tensor, tensors: list[Tensor], *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.empty_like(one, memory_format=torch.contiguous_format) for one in tensors[:3])
    return q, k, v


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, opened, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, opened)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    forbid_double_backward(NO_DOUBLE_BACKWARD_REMEDY)
    *tensors, opened = ctx.saved_tensors
    gradients = attend_open_queries_backward(grad, tensors, opened, *ctx.options)
    return *gradients, None, None, None, None


attend_open_queries.register_autograd(_backward, setup_context=_save_for_backward)


@register_flop_formula(torch.ops.headwise.open_query_attention, get_raw=True)
def _attend_flops(q: Tensor, k: Tensor, v: Tensor, *options: Any, **kwargs: Any) -> int:
    return 2 * options[-1] * (q.shape[3] + v.shape[3])


@register_flop_formula(torch.ops.headwise.open_query_attention_backward, get_raw=True)
def _attend_backward_flops(
    grad: Tensor, tensors: list[Tensor], *options: Any, **kwargs: Any
) -> int:
    """Count the scores recomputed twice, and the products of both kernels."""
    q, _, v, *_ = tensors
    return 2 * options[-1] * (4 * q.shape[3] + 3 * v.shape[3])
