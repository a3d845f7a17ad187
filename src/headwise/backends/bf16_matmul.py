"""Plain softmax attention as matrix products, a block of queries at a time: for bfloat16 on a CPU.

A CPU multiplies large bfloat16 matrices several times as fast as float32 ones. torch's fused call uses blocks too
small to gain from that, and its backward pass is slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..interfaces.core_types import CallSize, Probe
from ..kernels.autograd_guards import NO_DOUBLE_BACKWARD_REMEDY, forbid_double_backward
from ..masking.patterns import Causal
from ..masking.sequence_info import AttentionMask
from . import sdpa
from .core_interface import CallSignature, CoreInputs, CoreSteps, never_slower, no_tensor_conflicts
from .query_blocks import QUERY_BLOCK_LENGTHS, QUERY_BLOCK_SIZE, count_formed_pairs

MAX_SAVED_KEYS = 512  # keys up to which weights are saved for the backward pass; beyond, they are recomputed


class CausalBlock(NamedTuple):
    """A block of queries, the keys up to the last that one of them attends to, hidden pairs, and rows without keys."""

    queries: slice
    keys: slice
    hidden_pairs: Tensor | None = None  # to be added to scores, [B or 1, 1, T, S]
    rows_without_keys: Tensor | None = None  # [B or 1, 1, T, 1]


class BlockedMatmulPlan(NamedTuple):
    """How a call runs: its blocks, the scale, and whether weights are saved for the backward pass."""

    blocks: tuple[CausalBlock, ...]
    scale: float
    saves_weights: bool


def boundary_lengths() -> tuple[int, ...]:
    """The lengths at which a block more is begun, and from which on weights are formed once more."""
    return *QUERY_BLOCK_LENGTHS, MAX_SAVED_KEYS + 1


def unsupported_reasons(call: CallSignature) -> list[str]:
    """Why this call cannot run here."""
    reasons = sdpa.plain_softmax_conflicts(call)
    if not call.group_size:
        reasons.append("needs the same number of query heads in every key-value group")
    if call.single_query:
        reasons.append("needs more than one query per row")
    if call.is_compiling:
        reasons.append("rows without allowed keys are found at run time, so torch.compile is not supported")
    if "lse" in call.probed_tensors:
        reasons.append("does not return the log-sum-exp")
    return reasons


def is_preferred(call: CallSignature) -> bool:
    """Whether it was measured to be faster than torch's call, at every length (log/2026-11-22-fast-halves.md)."""
    return call.device == "cpu" and call.dtype == torch.bfloat16


tensor_conflicts = no_tensor_conflicts
slower_reasons = never_slower


def executed_flops(call: CallSignature, size: CallSize) -> int:
    """The products of every block with the keys that some of its queries may read."""
    return call.core.flops(size.batch * count_formed_pairs(call, size))


def attend(
    call: CallSignature, attention_mask: AttentionMask, inputs: CoreInputs, steps: CoreSteps, probe: Probe | None
) -> Tensor:
    """Per-head outputs o_BTHV."""
    q, k, v = (t.to(call.dtype) for t in inputs[:3])
    plan = BlockedMatmulPlan(
        tuple(_make_causal_blocks(attention_mask, q)),
        inputs.query_context.scale,
        saves_weights_for_backward(k.shape[1]),
    )
    o_BTHV: Tensor = _BlockedMatmulAttention.apply(q, k, v, plan)
    return o_BTHV


def saves_weights_for_backward(keys: int) -> bool:
    """Whether weights are saved for the backward pass, so that no score is computed twice."""
    return keys <= MAX_SAVED_KEYS


def _make_causal_blocks(attention_mask: AttentionMask, like: Tensor) -> Iterator[CausalBlock]:
    asks, told = attention_mask.queries, attention_mask.keys
    low = torch.finfo(like.dtype).min / 2
    for start in range(0, asks.count, QUERY_BLOCK_SIZE):
        rows = slice(start, min(start + QUERY_BLOCK_SIZE, asks.count))
        if attention_mask.shape == "full":
            yield CausalBlock(rows, slice(0, told.count))
        elif asks.start is not None and told.start is not None and isinstance(attention_mask.pattern, Causal):
            seen = asks.start - told.start + start + 1  # keys up to the first query
            stop = min(told.count, max(seen + rows.stop - start - 1, 0))
            hides = like.new_full((1, 1, rows.stop - start, stop), low).triu_(seen)
            yield CausalBlock(rows, slice(0, stop), hides, None if seen > 0 else (hides < 0).all(-1, keepdim=True))
        else:
            hidden = ~attention_mask.allowed[:, :, rows]
            blind = hidden.all(-1, keepdim=True)
            hides = like.new_zeros(hidden.shape).masked_fill_(hidden, low)
            yield CausalBlock(rows, slice(0, told.count), hides, blind if bool(blind.any()) else None)


class _BlockedMatmulAttention(torch.autograd.Function):
    """Queries lie [B x key heads, heads that read it, T, K] in here, keys and values [B x key heads, S, K]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: BlockedMatmulPlan) -> Tensor:
        batch, count, heads, _ = q.shape
        rows, keys, values = _group_query_heads(q, k.shape[2]), _flatten_kv_heads(k), _flatten_kv_heads(v)
        o, kept = v.new_empty(batch, count, heads, v.shape[-1]), list[Tensor]()
        for cut in plan.blocks:
            w = _block_weights(rows, keys, cut, plan.scale)
            some = torch.bmm(w, values[:, cut.keys])
            o[:, cut.queries] = some.view(batch, heads, -1, some.shape[-1]).transpose(1, 2)
            kept += [w] * plan.saves_weights
        ctx.plan, ctx.batch = plan, batch
        ctx.save_for_backward(rows, keys, values, *kept)
        return o

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        forbid_double_backward(NO_DOUBLE_BACKWARD_REMEDY)
        rows, keys, values, *kept = ctx.saved_tensors
        grad, plan = _group_query_heads(grads[0], len(keys) // ctx.batch), ctx.plan
        d_rows, d_keys, d_values = (
            torch.empty_like(rows),
            _Float32Accumulator(keys, plan),
            _Float32Accumulator(values, plan),
        )
        for n, cut in enumerate(plan.blocks):
            w = kept[n] if kept else _block_weights(rows, keys, cut, plan.scale)
            asks, told = _rows_of_block(rows, cut), _rows_of_block(grad, cut)
            d = torch.bmm(told, values[:, cut.keys].transpose(1, 2))
            d = torch.ops.aten._softmax_backward_data(d, w, -1, w.dtype)
            here = d_rows[:, :, cut.queries]
            here.copy_(_scaled_matmul(d, keys[:, cut.keys], plan.scale).view_as(here))
            d_keys.add(cut.keys, _scaled_matmul(d.transpose(1, 2), asks, plan.scale))
            d_values.add(cut.keys, torch.bmm(w.transpose(1, 2), told))
        made = d_rows, d_keys.result(), d_values.result()
        dq, dk, dv = (t.view(ctx.batch, -1, *t.shape[-2:]).transpose(1, 2) for t in made)
        return dq, dk, dv, None


class _Float32Accumulator:
    """A gradient of keys or values, of all blocks: in single precision, for it is rounded with each of them."""

    def __init__(self, like: Tensor, plan: BlockedMatmulPlan) -> None:
        self.like, self.alone = like, len(plan.blocks) == 1 and plan.blocks[0].keys.stop == like.shape[1]
        exact = torch.promote_types(like.dtype, torch.float32)
        self.all = like if self.alone else torch.zeros_like(like, dtype=exact)

    def add(self, keys: slice, more: Tensor) -> None:
        """Of these keys so much more."""
        if self.alone:
            self.all = more
        else:
            self.all[:, keys] += more

    def result(self) -> Tensor:
        """The sum, in the numbers of what it is the gradient of."""
        return self.all.to(self.like.dtype)


def _flatten_kv_heads(x_BSGK: Tensor) -> Tensor:
    return x_BSGK.transpose(1, 2).flatten(0, 1)


def _group_query_heads(x_BTHK: Tensor, groups: int) -> Tensor:
    return x_BTHK.transpose(1, 2).unflatten(1, (groups, -1)).flatten(0, 1)


def _rows_of_block(rows: Tensor, cut: CausalBlock) -> Tensor:
    return rows[:, :, cut.queries].flatten(1, 2)


def _scaled_matmul(a: Tensor, b: Tensor, scale: float) -> Tensor:
    return torch.baddbmm(a.new_empty(()), a, b, beta=0, alpha=scale)


def _block_weights(rows: Tensor, keys: Tensor, cut: CausalBlock, scale: float) -> Tensor:
    """[B x key heads, heads that read it x T, S]"""
    asks, told = _rows_of_block(rows, cut), keys[:, cut.keys].transpose(1, 2)
    if cut.hidden_pairs is None:
        return _scaled_matmul(asks, told, scale).softmax(-1)
    batch, _, count, read = cut.hidden_pairs.shape
    by_group = len(rows) // batch, rows.shape[1], count, read
    hides = cut.hidden_pairs[:, :, None].expand(batch, *by_group).flatten(0, 1).flatten(1, 2)
    w = torch.baddbmm(hides, asks, told, alpha=scale).softmax(-1)
    if cut.rows_without_keys is not None:
        w.view(batch, by_group[0] * by_group[1], count, read).masked_fill_(cut.rows_without_keys, 0)
    return w
