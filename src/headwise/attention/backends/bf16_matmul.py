"""Plain softmax attention as matrix products, a block of queries at a time: for bfloat16 on a CPU.

A CPU multiplies large bfloat16 matrices several times as fast as float32 ones. torch's fused call
uses blocks too small to gain from that, and its backward pass is slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.operand_checks import NO_DOUBLE_BACKWARD_REMEDY, forbid_double_backward
from ..interfaces.core_types import CallSize
from ..masking.patterns import Causal
from ..masking.sequence_info import AttentionMask
from . import sdpa
from .core_interface import CallSignature, CoreInputs, no_mask_conflicts
from .query_blocks import QUERY_BLOCK_LENGTHS, QUERY_BLOCK_SIZE, count_formed_pairs

# keys up to which weights are saved for the backward pass; beyond, they are recomputed
MAX_SAVED_KEYS = 512


class CausalBlock(NamedTuple):
    """A block of queries, the keys up to the last that any of them may attend to, its mask, and
    rows without keys.
    """

    queries: slice
    keys: slice
    additive_mask: Tensor | None = None  # [B or 1, 1, T, S]
    rows_without_keys: Tensor | None = None  # [B or 1, 1, T, 1]


def boundary_lengths() -> tuple[int, ...]:
    """Lengths where the number of blocks changes, or where weight recomputation starts."""
    return *QUERY_BLOCK_LENGTHS, MAX_SAVED_KEYS + 1


def unsupported_reasons(call: CallSignature) -> list[str]:
    """Why this call cannot run here."""
    reasons = sdpa.plain_softmax_conflicts(call)
    if not call.group_size:
        reasons.append("needs the same number of query heads in every key-value group")
    if call.single_query:
        reasons.append("needs more than one query per row")
    if call.is_compiling:
        reasons.append(
            "rows without allowed keys are found at run time, so torch.compile is not supported"
        )
    return reasons


def is_preferred(call: CallSignature) -> bool:
    """True if it is tried before torch's call: in bfloat16 on a CPU, on its side of the crossover
    points.
    """
    return call.device == "cpu" and call.dtype == torch.bfloat16


mask_conflicts = no_mask_conflicts


def slower_reasons(call: CallSignature, size: CallSize, mask_shape: str) -> list[str]:
    """Why another backend is preferred at this size; in other dtypes it is the last resort at every
    size.
    """
    if not is_preferred(call):
        return []
    faster = "torch's fused call takes less time"
    if call.grad_enabled:
        return call.slower_below("bf16_matmul_gradients", size, faster, is_upper=True)
    return call.slower_below("bf16_matmul", size, faster)


def executed_flops(call: CallSignature, size: CallSize) -> int:
    """FLOPs of all blocks with the keys that any of their queries may attend to."""
    return call.core.flops(size.batch * count_formed_pairs(call, size))


def attend(call: CallSignature, inputs: CoreInputs) -> Tensor:
    """Per-head outputs o_BTRV."""
    q, k, v = (t.to(call.dtype) for t in inputs[:3])
    blocks = tuple(_make_causal_blocks(inputs.mask, q))
    saves_weights = saves_weights_for_backward(k.shape[1])
    scale = inputs.query_context.scale
    o_BTRV: Tensor = _BlockedMatmulAttention.apply(q, k, v, blocks, scale, saves_weights)
    return o_BTRV


def saves_weights_for_backward(keys: int) -> bool:
    """True if weights are saved for the backward pass, so that no score is computed twice."""
    return keys <= MAX_SAVED_KEYS


def _make_causal_blocks(attention_mask: AttentionMask, like: Tensor) -> Iterator[CausalBlock]:
    queries = attention_mask.queries
    keys = attention_mask.keys
    low = torch.finfo(like.dtype).min / 2
    for start in range(0, queries.count, QUERY_BLOCK_SIZE):
        rows = slice(start, min(start + QUERY_BLOCK_SIZE, queries.count))
        if attention_mask.shape == "full":
            yield CausalBlock(rows, slice(0, keys.count))
        elif (
            queries.start is not None
            and keys.start is not None
            and isinstance(attention_mask.pattern, Causal)
        ):
            # number of keys of the first query
            first_row_keys = queries.start - keys.start + start + 1
            stop = min(keys.count, max(first_row_keys + rows.stop - start - 1, 0))
            mask = like.new_full((1, 1, rows.stop - start, stop), low).triu_(first_row_keys)
            rows_without_keys = None if first_row_keys > 0 else (mask < 0).all(-1, keepdim=True)
            yield CausalBlock(rows, slice(0, stop), mask, rows_without_keys)
        else:
            hidden = ~attention_mask.allowed[:, :, rows]
            rows_without_keys = hidden.all(-1, keepdim=True)
            mask = like.new_zeros(hidden.shape).masked_fill_(hidden, low)
            any_row = bool(rows_without_keys.any())
            yield CausalBlock(
                rows, slice(0, keys.count), mask, rows_without_keys if any_row else None
            )


class _BlockedMatmulAttention(torch.autograd.Function):
    """Attention by batched matrix products: queries are [B x KV heads, query heads per KV head, T,
    K], keys and values [B x KV heads, S, K].
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        blocks: tuple[CausalBlock, ...],
        scale: float,
        saves_weights: bool,
    ) -> Tensor:
        batch, count, heads, _ = q.shape
        queries = _group_query_heads(q, k.shape[2])
        keys = _flatten_kv_heads(k)
        values = _flatten_kv_heads(v)
        o = v.new_empty(batch, count, heads, v.shape[-1])
        saved_weights = list[Tensor]()
        for block in blocks:
            w = _block_weights(queries, keys, block, scale)
            block_o = torch.bmm(w, values[:, block.keys])
            o[:, block.queries] = block_o.view(batch, heads, -1, block_o.shape[-1]).transpose(1, 2)
            saved_weights += [w] * saves_weights
        ctx.blocks = blocks
        ctx.scale = scale
        ctx.batch = batch
        ctx.save_for_backward(queries, keys, values, *saved_weights)
        return o

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        forbid_double_backward(NO_DOUBLE_BACKWARD_REMEDY)
        queries, keys, values, *saved_weights = ctx.saved_tensors
        grad = _group_query_heads(grads[0], len(keys) // ctx.batch)
        blocks = ctx.blocks
        scale = ctx.scale
        d_queries = torch.empty_like(queries)
        d_keys = _Float32Accumulator(keys, blocks)
        d_values = _Float32Accumulator(values, blocks)
        for n, block in enumerate(blocks):
            w = saved_weights[n] if saved_weights else _block_weights(queries, keys, block, scale)
            block_queries = _rows_of_block(queries, block)
            block_grad = _rows_of_block(grad, block)
            d_weights = torch.bmm(block_grad, values[:, block.keys].transpose(1, 2))
            d_scores = torch.ops.aten._softmax_backward_data(d_weights, w, -1, w.dtype)
            d_block_queries = d_queries[:, :, block.queries]
            d_block_queries.copy_(
                _scaled_matmul(d_scores, keys[:, block.keys], scale).view_as(d_block_queries)
            )
            d_keys.add(block.keys, _scaled_matmul(d_scores.transpose(1, 2), block_queries, scale))
            d_values.add(block.keys, torch.bmm(w.transpose(1, 2), block_grad))
        input_grads = d_queries, d_keys.result(), d_values.result()
        dq, dk, dv = (t.view(ctx.batch, -1, *t.shape[-2:]).transpose(1, 2) for t in input_grads)
        return dq, dk, dv, None, None, None


class _Float32Accumulator:
    """Sum of a gradient of keys or values over blocks, in float32, so that it
    is rounded only once.
    """

    def __init__(self, like: Tensor, blocks: tuple[CausalBlock, ...]) -> None:
        self.like = like
        self.is_single = len(blocks) == 1 and blocks[0].keys.stop == like.shape[1]
        exact = torch.promote_types(like.dtype, torch.float32)
        self.total = like if self.is_single else torch.zeros_like(like, dtype=exact)

    def add(self, keys: slice, grad: Tensor) -> None:
        """Add the gradient of these keys."""
        if self.is_single:
            self.total = grad
        else:
            self.total[:, keys] += grad

    def result(self) -> Tensor:
        """The sum, in the dtype of the keys or values."""
        return self.total.to(self.like.dtype)


def _flatten_kv_heads(x_BSGK: Tensor) -> Tensor:
    return x_BSGK.transpose(1, 2).flatten(0, 1)


def _group_query_heads(x_BTHK: Tensor, groups: int) -> Tensor:
    return x_BTHK.transpose(1, 2).unflatten(1, (groups, -1)).flatten(0, 1)


def _rows_of_block(x: Tensor, block: CausalBlock) -> Tensor:
    return x[:, :, block.queries].flatten(1, 2)


def _scaled_matmul(a: Tensor, b: Tensor, scale: float) -> Tensor:
    return torch.baddbmm(a.new_empty(()), a, b, beta=0, alpha=scale)


def _block_weights(queries: Tensor, keys: Tensor, block: CausalBlock, scale: float) -> Tensor:
    """Attention weights of a block, [B x KV heads, query heads per KV head x T, S]."""
    block_queries = _rows_of_block(queries, block)
    block_keys = keys[:, block.keys].transpose(1, 2)
    if block.additive_mask is None:
        return _scaled_matmul(block_queries, block_keys, scale).softmax(-1)
    batch, _, num_queries, num_keys = block.additive_mask.shape
    by_group = len(queries) // batch, queries.shape[1], num_queries, num_keys
    mask = block.additive_mask[:, :, None].expand(batch, *by_group).flatten(0, 1).flatten(1, 2)
    w = torch.baddbmm(mask, block_queries, block_keys, alpha=scale).softmax(-1)
    if block.rows_without_keys is not None:
        w.view(batch, by_group[0] * by_group[1], num_queries, num_keys).masked_fill_(
            block.rows_without_keys, 0
        )
    return w
