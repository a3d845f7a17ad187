"""Heads that do not speak for a token are not asked: its query is left out of what they compute, both ways."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from ..kernels.compiled import COMPUTE_DTYPES
from ..kernels.orders import NO_DOUBLE_BACKWARD_REMEDY, forbid_double_backward, is_under_functorch
from ..kernels.read import gathered_attention
from ..kernels.tiles import QUERY_TILE_ROWS
from ..parts.softmax import Softmax
from ..pattern import Causal, Full
from ..probe import Probe
from ..seams import Gate, OutputStep, ScoreStep
from ..terms import CallSize
from ..tokens import AttentionMask
from . import sdpa
from .bound import CoreSteps
from .job import CoreInputs, CallSignature
from .lines import RoutedWorkItems
from .speaking import PackedQueries, MaskedRectangle, KeyVisibility, num_chunks, pack_open_queries

MIN_KEYS = 1024  # keys from which on it was measured to be faster: docs/backends.md


def boundary_lengths() -> tuple[int, ...]:
    """The lengths at which units are full, and at which chunks and blocks of keys end."""
    return QUERY_TILE_ROWS - 1, QUERY_TILE_ROWS, QUERY_TILE_ROWS + 1, 259


def unsupported_reasons(job: CallSignature) -> list[str]:
    """Why this job cannot run here."""
    spec, reasons = job.spec, sdpa.fused_call_conflicts(job)
    if not any(gate.open_fractions(spec) for _, gate in spec.parts_of(Gate)):
        reasons.append("no gate promises that heads are shut")
    elif not any(_open_shares(job)):
        reasons.append("gradients pass the gates of heads that are shut, so what these read is needed")
    if any(isinstance(part, ScoreStep) for _, part in spec.parts()) or not isinstance(spec.normaliser, Softmax):
        reasons.append("it reads by a plain softmax over products, with nothing added")
    if any(step.combines_rows or step.required_score_heads(spec, frozenset({0})) != {0} for _, step in spec.parts_of(OutputStep)):
        reasons.append("outputs of several heads are joined before the gates")
    if spec.pattern not in (Full(), Causal()):
        reasons.append(f"{spec.pattern.text} leaves keys out, which saves as much without packing")
    if job.single_query:
        reasons.append("a single query of all heads is answered sooner than one of some")
    if job.is_compiling:
        reasons.append("how many queries a head has is for the data to say, which a compiled graph cannot ask")
    if "lse" in job.probed_tensors:
        reasons.append("it has a log-sum-exp for heads that speak only")
    return [*reasons, *_unsupported_kernel_reasons(job)] or job.slower_than(MIN_KEYS, "all heads take less time")


def _unsupported_kernel_reasons(job: CallSignature) -> list[str]:
    reasons = []
    if job.device != "cpu":
        reasons.append(f"it works with the CPU's kernel, not on {job.device}")
    if job.core.dim != job.core.vdim:
        reasons.append("its kernel wants keys and values of one width")
    if not job.group_size:
        reasons.append("its groups of heads must be equal")
    return reasons


def _open_shares(job: CallSignature) -> list[tuple[Fraction, ...] | None]:
    """Of each gate how often heads speak, if where it is zero nobody needs to know what they read."""
    gates = (gate for _, gate in job.spec.parts_of(Gate))
    return [gate.open_fractions(job.spec) if gate.blocks_gradient_when_closed() or not job.needs_grad else None for gate in gates]


def executed_flops(job: CallSignature, work: CallSize) -> int:
    """The products that are formed if every head speaks as often as its gate tells, and evenly."""
    shares, causal = min(filter(None, _open_shares(job)), key=sum), job.spec.pattern == Causal()
    formed = _pairs_of_work_items if _has_kernel(job) else _pairs_of_chunks
    pairs = sum(formed(share * job.group_size, work, causal) for share in _share_per_kv_head(shares, job.group_size))
    return int(job.core.flops(work.batch) * pairs / len(job.core.keys))


def _has_kernel(job: CallSignature) -> bool:
    """Whether there is a kernel for its numbers; torch's own call reads for others, chunk by chunk."""
    return job.device == "cpu" and job.dtype in COMPUTE_DTYPES


def _share_per_kv_head(shares: tuple[Fraction, ...], each: int) -> list[Fraction]:
    """The mean share of the heads that read one key head."""
    return [sum(shares[n : n + each], Fraction(0)) / each for n in range(0, len(shares), each)]


def _pairs_of_work_items(rate: Fraction, work: CallSize, causal: bool) -> Fraction:
    """Pairs of a key head for which so many rows speak at each token: whole units, each with the keys of its last."""
    units = -(-math.ceil(rate * work.queries) // QUERY_TILE_ROWS)
    if not causal or not units:
        return Fraction(QUERY_TILE_ROWS * units * work.keys)
    own = QUERY_TILE_ROWS * Fraction(units * (units - 1), 2) / rate + work.queries
    return QUERY_TILE_ROWS * (own + units * (work.keys - work.queries))


def _pairs_of_chunks(rate: Fraction, work: CallSize, causal: bool) -> Fraction:
    """The same of chunks."""
    rows = rate * work.queries
    if not causal or not rows or (rate == 1 and work.keys == work.queries):
        return rows * work.keys
    count = num_chunks(math.ceil(rows))
    each = Fraction(math.ceil(rows / count))
    return each * (count * (work.keys - work.queries) + Fraction(work.queries * (count + 1), 2))


def attend(job: CallSignature, sight: AttentionMask, inputs: CoreInputs, bound: CoreSteps, probe: Probe | None) -> Tensor:
    """Per-head outputs o_BTHV, zero for heads that are shut."""
    q, k, v = inputs.q, inputs.k, inputs.v
    if not q.numel() or not k.numel() or is_under_functorch():
        return sdpa.attend(job, sight, inputs, bound, probe)
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = (t.to(torch.get_autocast_dtype(q.device.type)) for t in (q, k, v))
    with torch.no_grad():
        reading, opened = KeyVisibility(sight, q.dtype), _open_heads(job, inputs)
        ends = reading.key_ranges(q.shape[1]) if q.dtype in COMPUTE_DTYPES else None
        lines = None if ends is None else RoutedWorkItems.from_open_heads(opened, k.shape[2], ends, k.shape[1])
        packed = pack_open_queries(opened, k.shape[2], reading.is_full_or_causal) if lines is None else []
    if lines is not None:
        return gathered_attention(q, k, v, lines.kernel_args, inputs.query_context.scale, lines.num_pairs)[0]
    o_BTHV: Tensor = _RoutedAttention.apply(q, k, v, packed, (reading, inputs.query_context.scale))
    return o_BTHV


def _open_heads(job: CallSignature, inputs: CoreInputs) -> Tensor:
    """Which heads speak for which token, [B, T, H]: no gate that promises to shut some is zero there."""
    opened = torch.ones(inputs.q.shape[:3], dtype=torch.bool, device=inputs.q.device)
    for shares, gate in zip(_open_shares(job), inputs.gates, strict=True):
        if shares is not None:
            opened &= gate[..., 0] != 0
    return opened


class _RoutedAttention(torch.autograd.Function):
    """Packed attention; backwards the scores are formed once more, from the log-sum-exp of each row."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, packed: list[PackedQueries], how: tuple[KeyVisibility, float]) -> Tensor:
        batch, queries, heads = q.shape[:3]
        line = v.new_zeros(batch * queries * heads + 1, v.shape[-1])
        kept = []
        for pack in packed:
            call = _PackedCall(pack, q, k, v, how)
            o_BGRV, lse_BGR = call.forward()
            line.index_copy_(0, pack.flat_index, o_BGRV.view(-1, v.shape[-1]))
            kept += [o_BGRV, lse_BGR]
        ctx.packed, ctx.how = packed, how
        ctx.save_for_backward(q, k, v, *kept)
        return line[:-1].view(batch, queries, heads, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        forbid_double_backward(NO_DOUBLE_BACKWARD_REMEDY)
        q, k, v, *kept = ctx.saved_tensors
        dq = q.new_zeros(q.shape[:3].numel() + 1, q.shape[-1])
        dk, dv = (t.new_zeros(t.transpose(1, 2).shape) for t in (k, v))
        for n, pack in enumerate(ctx.packed):
            call = _PackedCall(pack, q, k, v, ctx.how)
            dq_BGRK, dk_BGSK, dv_BGSV = call.backward(grads[0], kept[2 * n], kept[2 * n + 1])
            dq.index_copy_(0, pack.line, dq_BGRK.view(-1, q.shape[-1]).to(q.dtype))
            dk[:, pack.heads], dv[:, pack.heads] = dk_BGSK.to(k.dtype), dv_BGSV.to(v.dtype)
        return dq[:-1].view(q.shape), dk.transpose(1, 2), dv.transpose(1, 2), None, None


class _PackedCall:
    """The rows of one pack with their keys and values, and what is made of them piece by piece."""

    def __init__(self, pack: PackedQueries, q: Tensor, k: Tensor, v: Tensor, how: tuple[KeyVisibility, float]) -> None:
        self.pack, (self.reading, self.scale) = pack, how
        self.q_BGRK = self._packed(q)
        self.k_BGSK, self.v_BGSV = (_select_heads(t.transpose(1, 2), pack.heads) for t in (k, v))

    def _packed(self, x_BTHK: Tensor) -> Tensor:
        if self.pack.is_complete:
            return _select_heads(x_BTHK.transpose(1, 2), self.pack.heads)
        line = x_BTHK.reshape(-1, x_BTHK.shape[-1])
        rows = line.index_select(0, self.pack.flat_index.clamp(max=len(line) - 1))
        return rows.view(*self.pack.position_BGR.shape, -1)

    def _bars(self, piece: MaskedRectangle) -> Tensor | None:
        return self.reading.mask_bias(self.pack.position_BGR[..., piece.rows], piece.keys) if piece.is_masked else None

    def forward(self) -> tuple[Tensor, Tensor]:
        """What rows read, and the log-sum-exp of their scores."""
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        exact = torch.promote_types(self.q_BGRK.dtype, torch.float32)
        o_BGRV = self.v_BGSV.new_zeros(*self.pack.position_BGR.shape, self.v_BGSV.shape[-1])
        lse_BGR = o_BGRV.new_zeros(o_BGRV.shape[:-1], dtype=exact)
        for piece in self.reading.forward_rectangles(self.pack):
            if piece.keys.start >= piece.keys.stop:
                continue
            q, k, v = self.q_BGRK[:, :, piece.rows], self.k_BGSK[:, :, piece.keys], self.v_BGSV[:, :, piece.keys]
            o, lse = kernel(q, k, v, 0.0, piece.is_causal_square, attn_mask=self._bars(piece), scale=self.scale)
            if not piece.is_first_of_rows:
                before, o = o_BGRV[:, :, piece.rows].to(exact), o.to(exact)
                apart = lse - lse_BGR[:, :, piece.rows]
                o = torch.lerp(before, o, torch.sigmoid(apart)[..., None])
                lse = torch.logaddexp(lse, lse_BGR[:, :, piece.rows])
            o_BGRV[:, :, piece.rows], lse_BGR[:, :, piece.rows] = o, lse
        return o_BGRV, lse_BGR.masked_fill_(~self.pack.is_valid_BGR, torch.inf)  # what fills up has no weight backwards

    def backward(self, grad_BTHV: Tensor, o_BGRV: Tensor, lse_BGR: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of rows, keys and values."""
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        exact = torch.promote_types(self.q_BGRK.dtype, torch.float32)
        to_BGRV = self._packed(grad_BTHV)
        dq, dk, dv = (t.new_zeros(t.shape, dtype=exact) for t in (self.q_BGRK, self.k_BGSK, self.v_BGSV))
        for piece in self.reading.backward_rectangles(self.pack):
            rows, keys = piece.rows, piece.keys
            if rows.start >= rows.stop or keys.start == keys.stop:
                continue
            q, o, lse, to = (t[:, :, rows] for t in (self.q_BGRK, o_BGRV, lse_BGR, to_BGRV))
            k, v = self.k_BGSK[:, :, keys], self.v_BGSV[:, :, keys]
            found = kernel(to, q, k, v, o, lse, 0.0, piece.is_causal_square, attn_mask=self._bars(piece), scale=self.scale)
            for total, some, part in zip((dq, dk, dv), (rows, keys, keys), found, strict=True):
                total[:, :, some] += part
        return dq, dk, dv


def _select_heads(x_BGSK: Tensor, heads: Sequence[int]) -> Tensor:
    """These heads: a view where they stand at equal distances."""
    step = heads[1] - heads[0] if len(heads) > 1 else 1
    regular = range(heads[0], heads[-1] + 1, step)
    if list(heads) == list(regular):
        return x_BGSK[:, regular.start : regular.stop : step]
    return x_BGSK[:, list(heads)]
