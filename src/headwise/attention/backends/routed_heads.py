"""Mixture of heads: heads that are closed for a token skip its query, in the forward and the
backward pass.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from ...kernels.flash_attention import (
    FLASH_ATTENTION_KERNELS,
    QUERY_TILE_ROWS,
    WorkItems,
    gathered_attention,
)
from ...kernels.open_query_attention import MAX_DIM, attend_open_queries, can_run
from ..interfaces import Gate, OutputStep
from ..interfaces.core_types import CallSize
from ..masking.patterns import Causal
from ..masking.sequence_info import AttentionMask
from . import flash_cpu, sdpa
from .core_interface import CallSignature, CoreInputs

# An estimate: no GPU has measured from which length on the packed queries take less time.
MIN_KEYS_ON_GPU = 2048
boundary_lengths = flash_cpu.boundary_lengths


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
    reasons += _device_conflicts(call)
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


def _device_conflicts(call: CallSignature) -> list[str]:
    if not can_run(call.device):
        if call.device == "cuda":
            return ["needs Triton on CUDA, which is not installed"]
        return flash_cpu.unsupported_reasons(call)
    reasons = sdpa.plain_softmax_conflicts(call)
    most = MAX_DIM.get(call.dtype, 0)
    dtype = str(call.dtype).removeprefix("torch.")
    if not most:
        reasons.append(f"does not support {dtype} on {call.device}")
    elif max(call.core.dim, call.core.vdim) > most:
        reasons.append(f"needs heads of at most {most} channels in {dtype} on {call.device}")
    if call.single_query:
        reasons.append("needs more than one query per row")
    return reasons


def slower_reasons(call: CallSignature, size: CallSize, mask_shape: str) -> list[str]:
    """Why another backend is preferred at this size."""
    if can_run(call.device) and size.keys < MIN_KEYS_ON_GPU:
        return [f"all heads take less time below {MIN_KEYS_ON_GPU:,} keys, by estimate"]
    return call.slower_below("routed", size, "all heads take less time")


def mask_conflicts(call: CallSignature, attention_mask: AttentionMask) -> list[str]:
    """Why this mask cannot run here."""
    if not can_run(call.device):
        return flash_cpu.mask_conflicts(call, attention_mask)
    if flash_cpu.keys_ahead(attention_mask) is None:
        return ["needs a full or causal mask, and padding only behind causal texts"]
    return []


def _open_shares(call: CallSignature) -> list[tuple[Fraction, ...] | None]:
    """For each gate, the fraction of tokens with each head open.

    None if outputs of closed heads are needed.
    """
    shares = []
    for _, gate in call.spec.parts_of(Gate):
        can_skip = gate.blocks_gradient_when_closed() or not call.grad_enabled
        shares.append(gate.open_fractions(call.spec) if can_skip else None)
    return shares


def executed_flops(call: CallSignature, size: CallSize) -> int:
    """FLOPs if every head is open for its gate's share of the tokens, evenly spaced."""
    pairs = _expected_pairs(call, size)
    return int(call.core.flops(size.batch) * pairs / len(call.core.key_head_of_query))


def _expected_pairs(call: CallSignature, size: CallSize) -> Fraction:
    """Scores of all heads of a batch row, if open queries are evenly spaced."""
    shares = min(filter(None, _open_shares(call)), key=sum)
    is_causal = call.pattern == Causal()
    pairs = Fraction(0)
    for first in range(0, len(shares), call.group_size):
        rows_per_token = sum(shares[first : first + call.group_size], Fraction(0))
        pairs += _pairs_of_tiles(rows_per_token, size, is_causal)
    return pairs


def _pairs_of_tiles(rows_per_token: Fraction, size: CallSize, is_causal: bool) -> Fraction:
    """Scores of a KV head: whole tiles of rows, each with the keys of its last row."""
    tiles = -(-math.ceil(rows_per_token * size.queries) // QUERY_TILE_ROWS)
    if not is_causal or not tiles:
        return Fraction(QUERY_TILE_ROWS * tiles * size.keys)
    own = QUERY_TILE_ROWS * Fraction(tiles * (tiles - 1), 2) / rows_per_token + size.queries
    return QUERY_TILE_ROWS * (own + tiles * (size.keys - size.queries))


def attend(call: CallSignature, inputs: CoreInputs) -> Tensor:
    """Per-head outputs o_BTRV, zero for closed heads."""
    q = inputs.q
    k = inputs.k
    v = inputs.v
    with torch.no_grad():
        opened = torch.ones(inputs.q.shape[:3], dtype=torch.bool, device=inputs.q.device)
        for shares, gate in zip(_open_shares(call), inputs.gates, strict=True):
            if shares is not None:
                opened &= gate[..., 0] != 0
    if can_run(call.device):
        ahead = flash_cpu.keys_ahead(inputs.mask)
        assert ahead is not None, "mask_conflicts refuses such a mask"
        size = CallSize(q.shape[0], q.shape[1], 0, k.shape[1])
        num_pairs = int(size.batch * _expected_pairs(call, size))
        scale = inputs.query_context.scale
        return attend_open_queries(q, k, v, opened, ahead, scale, num_pairs)[0]
    if not FLASH_ATTENTION_KERNELS.is_usable(q.dtype):  # it is being compiled
        return flash_cpu.attend(call, inputs) * opened[..., None]
    with torch.no_grad():
        ends = flash_cpu.key_range_table(inputs.mask, q)
        assert ends is not None, "mask_conflicts refuses such a mask"
        items = WorkItems.from_open_heads(opened, k.shape[2], ends, k.shape[1])
    return gathered_attention(q, k, v, items, inputs.query_context.scale)
