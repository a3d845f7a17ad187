"""Mixture of heads: heads that are closed for a token skip its query, in the forward and the
backward pass.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.flash_attention import FLASH_ATTENTION_KERNELS, QUERY_TILE_ROWS, gathered_attention
from ..interfaces import Gate, OutputStep
from ..interfaces.core_types import CallSize, Probe
from ..masking.patterns import Causal
from ..masking.sequence_info import AttentionMask
from . import flash_cpu
from .core_interface import CallSignature, CoreInputs, CoreSteps

# The backward pass splits the keys into parts of at least this size, so that there are enough work
# items.
MIN_KEYS_PER_PART = 512
MAX_KEY_PARTS = 4
TARGET_WORK_ITEMS = 16


class RoutedWorkItems(NamedTuple):
    """Arguments of `gathered_attention` (query rows, key ranges, work items) and the number of
    scores it computes.
    """

    kernel_args: list[Tensor]
    num_pairs: int

    @staticmethod
    def from_open_heads(
        open_BTH: Tensor, num_open: int, ends: Tensor, keys: int
    ) -> RoutedWorkItems:
        """Work items for the open queries; the items with most keys come first, so that threads end
        together.
        """
        batch, queries, heads = open_BTH.shape
        by_key = open_BTH.view(batch, queries, num_open, heads // num_open).transpose(1, 2)
        b, g, t, h = by_key.nonzero(as_tuple=True)
        lines = (b * queries + t) * heads + g * (heads // num_open) + h
        counts = by_key.sum((2, 3)).flatten()
        whose, first, rows = _make_forward_items(counts)
        last = first + rows - 1
        token = b % len(ends) * queries + t
        low, high = (ends.view(-1, 2)[token[n], side] for n, side in ((first, 0), (last, 1)))
        forth = torch.stack([whose, first, rows, 0 * rows, 0 * rows + keys, 0 * rows], 1)
        forth = forth[torch.argsort(high - low, descending=True)]
        formed = QUERY_TILE_ROWS * int((high - low).sum())
        return RoutedWorkItems(
            [lines, ends.contiguous(), forth.contiguous(), _make_backward_items(counts, keys)],
            formed,
        )


def _make_forward_items(counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tiles of consecutive query rows: the KV head of each, its first row, and
    its number of rows.
    """
    units = (counts + QUERY_TILE_ROWS - 1).div(QUERY_TILE_ROWS, rounding_mode="floor")
    whose = torch.arange(len(counts), device=counts.device).repeat_interleave(units)
    number = torch.arange(len(whose), device=counts.device) - (units.cumsum(0) - units)[whose]
    first = (counts.cumsum(0) - counts)[whose] + QUERY_TILE_ROWS * number
    return whose, first, (counts[whose] - QUERY_TILE_ROWS * number).clamp(max=QUERY_TILE_ROWS)


def _make_backward_items(counts: Tensor, keys: int) -> Tensor:
    """Work items of the backward pass: all rows of a KV head with a part of its keys."""
    parts = max(1, min(MAX_KEY_PARTS, TARGET_WORK_ITEMS // len(counts), keys // MIN_KEYS_PER_PART))
    # Parts begin at multiples of four keys, which the kernel writes together.
    cuts = [*(keys * part // parts // 4 * 4 for part in range(parts)), keys]
    order = torch.argsort(counts, descending=True)
    first = (counts.cumsum(0) - counts)[order]
    some = [
        torch.stack(
            [
                order,
                first,
                counts[order],
                *(torch.full_like(order, n) for n in (cuts[p], cuts[p + 1], p)),
            ],
            1,
        )
        for p in range(parts)
    ]
    return torch.cat(some).contiguous()


# --- The backend ----------------------------------------------------------------------------------

boundary_lengths = flash_cpu.boundary_lengths
tensor_conflicts = flash_cpu.tensor_conflicts


def unsupported_reasons(call: CallSignature) -> list[str]:
    """Why this call cannot run here."""
    spec = call.spec
    reasons = []
    if not any(gate.open_fractions(spec) for _, gate in spec.parts_of(Gate)):
        reasons.append("no part routes tokens to heads, so every head is needed")
    elif not any(_open_shares(call)):
        reasons.append("gradients pass the gates of closed heads, so their outputs are needed")
    elif call.head_group is not None:
        reasons.append("packs all heads of a layer, which must have the same pattern")
    reasons += flash_cpu.unsupported_reasons(call)
    for _, step in spec.parts_of(OutputStep):
        if step.combines_rows or step.required_score_heads(spec, frozenset({0})) != {0}:
            reasons.append("an output step combines heads before the gates")
    if call.is_compiling:
        reasons.append(
            "the queries of a head are counted at run time, so torch.compile is not supported"
        )
    if not call.group_size:
        reasons.append("needs the same number of query heads in every key-value group")
    return reasons


def slower_reasons(call: CallSignature, size: CallSize, mask_shape: str) -> list[str]:
    """Why another backend is preferred at this size."""
    return call.slower_below("routed", size, "all heads take less time")


def _open_shares(call: CallSignature) -> list[tuple[Fraction, ...] | None]:
    """For each gate, the share of tokens for which each head is open; None if outputs of closed
    heads are needed.
    """
    shares = []
    for _, gate in call.spec.parts_of(Gate):
        can_skip = gate.blocks_gradient_when_closed() or not call.needs_grad
        shares.append(gate.open_fractions(call.spec) if can_skip else None)
    return shares


def executed_flops(call: CallSignature, size: CallSize) -> int:
    """FLOPs if every head is open for its gate's share of the tokens, evenly spaced."""
    shares = min(filter(None, _open_shares(call)), key=sum)
    is_causal = call.pattern == Causal()
    pairs = Fraction(0)
    for first in range(0, len(shares), call.group_size):
        rows_per_token = sum(shares[first : first + call.group_size], Fraction(0))
        pairs += _pairs_of_tiles(rows_per_token, size, is_causal)
    return int(call.core.flops(size.batch) * pairs / len(call.core.key_head_of_query))


def _pairs_of_tiles(rows_per_token: Fraction, size: CallSize, is_causal: bool) -> Fraction:
    """Scores of a KV head: whole tiles of rows, each with the keys of its last row."""
    tiles = -(-math.ceil(rows_per_token * size.queries) // QUERY_TILE_ROWS)
    if not is_causal or not tiles:
        return Fraction(QUERY_TILE_ROWS * tiles * size.keys)
    own = QUERY_TILE_ROWS * Fraction(tiles * (tiles - 1), 2) / rows_per_token + size.queries
    return QUERY_TILE_ROWS * (own + tiles * (size.keys - size.queries))


def attend(
    call: CallSignature,
    attention_mask: AttentionMask,
    inputs: CoreInputs,
    steps: CoreSteps,
    probe: Probe | None,
) -> Tensor:
    """Per-head outputs o_BTRV, zero for closed heads."""
    q = inputs.q
    k = inputs.k
    v = inputs.v
    with torch.no_grad():
        opened = _open_heads(call, inputs)
    if not FLASH_ATTENTION_KERNELS.is_usable(q.dtype):  # it is being compiled
        return flash_cpu.attend(call, attention_mask, inputs, steps, probe) * opened[..., None]
    with torch.no_grad():
        ends = flash_cpu.key_range_table(attention_mask, q)
        assert ends is not None, "tensor_conflicts refuses such a mask"
        items = RoutedWorkItems.from_open_heads(opened, k.shape[2], ends, k.shape[1])
    scale = inputs.query_context.scale
    return gathered_attention(q, k, v, items.kernel_args, scale, items.num_pairs)[0]


def _open_heads(call: CallSignature, inputs: CoreInputs) -> Tensor:
    """True for each head and token, [B, T, H], where no gate that closes heads is zero."""
    opened = torch.ones(inputs.q.shape[:3], dtype=torch.bool, device=inputs.q.device)
    for shares, gate in zip(_open_shares(call), inputs.gates, strict=True):
        if shares is not None:
            opened &= gate[..., 0] != 0
    return opened
