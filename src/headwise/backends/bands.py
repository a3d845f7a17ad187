"""The fused kernel of the CPU over pieces of a call, forward and backward, as one operation that torch knows by name.

The forward pass keeps each query's log-sum-exp; with it the backward pass of a piece needs no other piece (2205.14135).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..pattern import parse_pattern
from .banding import TokenAxis, BlockBatch, count_batch_pairs, plan_block_batches
from .blocks import QUERY_BLOCK_SIZE
from .folds import BatchedBlocks, batch_blocks
from .rows import find_token_runs

FLASH_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
OP_INPUT_SCHEMA = "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor[] tokens, int[] starts, str pattern, float scale"
MAX_CACHED_PLANS = 256  # more kinds of calls than this are forgotten

_PLAN_CACHE: dict[tuple[str, TokenAxis, tuple[TokenAxis, ...]], list[BlockBatch]] = {}


def cached_block_batches(pattern: str, query_axis: TokenAxis, key_axes: tuple[TokenAxis, ...]) -> list[BlockBatch]:
    """The pieces of one call, kept for the next of its kind."""
    key = pattern, query_axis, key_axes
    found = _PLAN_CACHE.get(key)  # once: another thread may forget all plans at any time
    if found is None:
        if len(_PLAN_CACHE) >= MAX_CACHED_PLANS:
            _PLAN_CACHE.clear()
        found = _PLAN_CACHE[key] = plan_block_batches(parse_pattern(pattern), query_axis, key_axes)
    return found


class BlockSparseArgs(NamedTuple):
    """What decides who reads whom in a call, and the scale of its scores.

    `starts` are the places of the first query and the first key, where all rows hold neighbours of one text; else
    `tokens` are position and segment of queries and of keys.
    """

    tokens: Sequence[Tensor]
    first_positions: Sequence[int]
    pattern: str
    scale: float


class BlockSparseCall:
    """The calls of the kernel that make up one attention."""

    def __init__(self, q: Tensor, k: Tensor, how: BlockSparseArgs) -> None:
        self.q, self.k, self.args, self.pattern = q, k, how, parse_pattern(how.pattern)
        self.block_batches = self._pieces()

    def _pieces(self) -> list[tuple[BlockBatch, Sequence[int]]] | None:
        """Each piece, with the rows of the batch that have it; None where tokens stand anywhere."""
        (batch, queries), keys = self.q.shape[:2], self.k.shape[1]
        if self.args.first_positions:
            asks, told = (TokenAxis(range(at, at + n)) for at, n in zip(self.args.first_positions, (queries, keys), strict=True))
            return [(piece, range(batch)) for piece in cached_block_batches(self.args.pattern, asks, (told,))]
        if (found := find_token_runs(self.args.tokens, batch)) is None:
            return None
        return [(piece, rows) for rows, asks, told in found for piece in cached_block_batches(self.args.pattern, asks, told)]

    def __iter__(self) -> Iterator[tuple[BatchedBlocks, Tensor | None]]:
        """What each call reads, and what it adds to its scores."""
        if self.block_batches is None:
            yield from self._anywhere()
            return
        nbytes = 2 * self.k.shape[2] * self.k.shape[3] * self.k.element_size()
        for piece, rows in self.block_batches:
            mask = self._mask(piece)
            yield from ((fold, mask) for fold in batch_blocks(piece, rows, nbytes))

    def _mask(self, piece: BlockBatch) -> Tensor | None:
        if piece.first_block_positions is None:
            return None
        asks, told = piece.first_block_positions
        i = torch.arange(asks.start, asks.stop, asks.step)
        j = torch.cat([torch.arange(some.start, some.stop, some.step) for some in told])
        allowed = self.pattern.allows(i[:, None], j)
        return self._added(allowed[None, None])

    def _anywhere(self) -> Iterator[tuple[BatchedBlocks, Tensor]]:
        """Blocks of queries that may each read every key."""
        place, segment, other, same = (t[:, None, None] for t in self.args.tokens)
        for start in range(0, self.q.shape[1], QUERY_BLOCK_SIZE):
            asks = range(start, min(start + QUERY_BLOCK_SIZE, self.q.shape[1]))
            i, own = (t.transpose(2, 3)[:, :, asks.start : asks.stop] for t in (place, segment))
            allowed = (own == same) & (own >= 0) & self.pattern.allows(i, other)
            yield BatchedBlocks(None, [asks], [(range(self.k.shape[1]),)]), self._added(allowed)

    def _added(self, allowed: Tensor) -> Tensor:
        return self.q.new_zeros(allowed.shape).masked_fill(~allowed, -torch.inf)

    @property
    def num_pairs(self) -> int:
        """The scores that all rows form for each head."""
        if self.block_batches is None:
            return self.q.shape[0] * self.q.shape[1] * self.k.shape[1]
        return sum(piece.num_pairs * len(rows) for piece, rows in self.block_batches)


def run_forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *said: Any) -> tuple[Tensor, Tensor]:
    """o_BTHV and the log-sum-exp l_BTH, of queries q_BTHK that read k_BSGK and v_BSGV; the rest is `How`.

    `sinks` are one more score in every row of a head, whose value is nothing.
    """
    how = BlockSparseArgs(*said)
    q, k, v = _contiguous_channels(q), _contiguous_channels(k), _contiguous_channels(v)
    o = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    for fold, mask in BlockSparseCall(q, k, how):
        part, sums = FLASH_FORWARD(fold.gather_queries(q), fold.gather_keys(k), fold.gather_keys(v), 0.0, False, attn_mask=mask, scale=how.scale)
        if mask is not None:
            sums = sums.masked_fill((mask == -torch.inf).all(-1), -torch.inf)
        fold.scatter_queries(o, part)
        fold.scatter_queries(lse[..., None], sums[..., None])
    if sinks is None:
        return o, lse
    every = torch.logaddexp(lse, sinks.to(lse.dtype))
    return o * (lse - every).exp()[..., None].to(o.dtype), every


def run_backward(grad: Tensor, o: Tensor, lse: Tensor, q: Tensor, k: Tensor, *said: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    v, _, how = said[0], said[1], BlockSparseArgs(*said[2:])
    grad, q, k, v = (_contiguous_channels(x) for x in (grad, q, k, v))
    asked, keys, values = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    lse = lse.masked_fill(lse == -torch.inf, 0.0)[..., None]  # of no keys: every weight is exp(-inf - 0)
    for fold, mask in BlockSparseCall(q, k, how):
        got = fold.gather_queries(grad), fold.gather_queries(q), fold.gather_keys(k), fold.gather_keys(v), fold.gather_queries(o), fold.gather_queries(lse)[..., 0]
        parts = FLASH_BACKWARD(*got, 0.0, False, attn_mask=mask, scale=how.scale)
        fold.scatter_queries(asked, parts[0])
        fold.add_to_keys(keys, parts[1])
        fold.add_to_keys(values, parts[2])
    return asked, keys, values


def _contiguous_channels(x: Tensor) -> Tensor:
    """The same with the channels of a head side by side, as the kernel wants them."""
    return x if x.stride(-1) == 1 else x.contiguous()


# Their names are how compilers and counters know them; what happens inside is not theirs to see.
block_sparse_attention = torch.library.custom_op("headwise::banded", run_forward, mutates_args=(), schema=f"({OP_INPUT_SCHEMA}) -> (Tensor, Tensor)")
block_sparse_attention_backward = torch.library.custom_op(
    "headwise::banded_backward",
    run_backward,
    mutates_args=(),
    schema=f"(Tensor grad, Tensor o, Tensor lse, {OP_INPUT_SCHEMA}) -> (Tensor, Tensor, Tensor)",
)


@block_sparse_attention.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    exact = torch.promote_types(q.dtype, torch.float32)
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:3], dtype=exact)


@block_sparse_attention_backward.register_fake
def _(grad: Tensor, o: Tensor, lse: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in args[:3])
    return q, k, v


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, tokens, *ctx.how = inputs
    ctx.save_for_backward(q, k, v, *output, *([] if sinks is None else [sinks]), *tokens)
    ctx.sunk = sinks is not None
    ctx.mark_non_differentiable(output[1])


def _run_autograd_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    q, k, v, o, lse, *rest = ctx.saved_tensors
    sinks = rest.pop(0) if ctx.sunk else None
    grads = block_sparse_attention_backward(grad, o, lse, q, k, v, sinks, list(rest), *ctx.how)
    sunk = None
    if sinks is not None:
        # A sink's weight reads nothing, so its score goes down with all that the others read.
        weight = (sinks - lse).exp()
        sunk = -(weight * (grad * o).sum(-1)).sum((0, 1)).to(sinks.dtype)
    return *grads, sunk, [None] * len(rest), None if ctx.how[0] else [], None, None  # of lists, lists


block_sparse_attention.register_autograd(_run_autograd_backward, setup_context=_save_for_backward)


@register_flop_formula(torch.ops.headwise.banded, get_raw=True)
def _forward_flops(q: Tensor, k: Tensor, v: Tensor, sinks: Any, *said: Any, **_: Any) -> int:
    return 2 * _count_call_pairs(q, k, BlockSparseArgs(*said)) * q.shape[2] * (q.shape[3] + v.shape[3])


@register_flop_formula(torch.ops.headwise.banded_backward, get_raw=True)
def _backward_flops(grad: Tensor, o: Tensor, lse: Tensor, q: Tensor, k: Tensor, *said: Any, **_: Any) -> int:
    # Scores once more, their gradients and those of queries and keys; of weights and of values.
    return 2 * _count_call_pairs(q, k, BlockSparseArgs(*said[2:])) * q.shape[2] * (3 * q.shape[3] + 2 * o.shape[3])


def _count_call_pairs(q: Tensor, k: Tensor, how: BlockSparseArgs) -> int:
    if not how.first_positions:
        return BlockSparseCall(q, k, how).num_pairs
    asks, told = (range(at, at + x.shape[1]) for at, x in zip(how.first_positions, (q, k), strict=True))
    return q.shape[0] * count_batch_pairs(parse_pattern(how.pattern), asks, told)
