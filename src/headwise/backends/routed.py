"""Heads that do not speak for a token are not asked: its query is left out of what they compute, both ways."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from ..kernels.compiled import NUMBERS
from ..kernels.orders import PLAIN, check_once, transformed
from ..kernels.read import read_lines
from ..kernels.tiles import ROWS
from ..parts.softmax import Softmax
from ..pattern import Causal, Full
from ..probe import Probe
from ..seams import Gate, OutputStep, ScoreStep
from ..terms import Work
from ..tokens import Sight
from . import sdpa
from .bound import Bound
from .job import Inputs, Job
from .lines import Lines
from .speaking import Pack, Piece, Reading, chunks, packs

LEAST = 1024  # keys from which on it was measured to be faster: docs/backends.md


def edges() -> tuple[int, ...]:
    """The lengths at which units are full, and at which chunks and blocks of keys end."""
    return ROWS - 1, ROWS, ROWS + 1, 259


def refuses(job: Job) -> list[str]:
    """Why this job cannot run here."""
    spec, reasons = job.spec, sdpa.refuses_core(job)
    if not any(gate.shares(spec) for _, gate in spec.steps(Gate)):
        reasons.append("no gate promises that heads are shut")
    elif not any(_shut(job)):
        reasons.append("gradients pass the gates of heads that are shut, so what these read is needed")
    if any(isinstance(part, ScoreStep) for _, part in spec.parts()) or not isinstance(spec.normaliser, Softmax):
        reasons.append("it reads by a plain softmax over products, with nothing added")
    if any(step.joins or step.sources(spec, frozenset({0})) != {0} for _, step in spec.steps(OutputStep)):
        reasons.append("outputs of several heads are joined before the gates")
    if spec.pattern not in (Full(), Causal()):
        reasons.append(f"{spec.pattern.text} leaves keys out, which saves as much without packing")
    if job.one:
        reasons.append("a single query of all heads is answered sooner than one of some")
    if job.compiled:
        reasons.append("how many queries a head has is for the data to say, which a compiled graph cannot ask")
    if "lse" in job.wants:
        reasons.append("it has a log-sum-exp for heads that speak only")
    return [*reasons, *_refuses_kernel(job)] or job.early(LEAST, "all heads take less time")


def _refuses_kernel(job: Job) -> list[str]:
    reasons = []
    if job.device != "cpu":
        reasons.append(f"it works with the CPU's kernel, not on {job.device}")
    if job.core.dim != job.core.vdim:
        reasons.append("its kernel wants keys and values of one width")
    if not job.groups:
        reasons.append("its groups of heads must be equal")
    return reasons


def _shut(job: Job) -> list[tuple[Fraction, ...] | None]:
    """Of each gate how often heads speak, if where it is zero nobody needs to know what they read."""
    gates = (gate for _, gate in job.spec.steps(Gate))
    return [gate.shares(job.spec) if gate.seals() or not job.grad else None for gate in gates]


def spent(job: Job, work: Work) -> int:
    """The products that are formed if every head speaks as often as its gate tells, and evenly."""
    shares, causal = min(filter(None, _shut(job)), key=sum), job.spec.pattern == Causal()
    formed = _of_units if _takes(job) else _of_chunks
    pairs = sum(formed(share * job.groups, work, causal) for share in _by_key(shares, job.groups))
    return int(job.core.flops(work.batch) * pairs / len(job.core.keys))


def _takes(job: Job) -> bool:
    """Whether there is a kernel for its numbers; torch's own call reads for others, chunk by chunk."""
    return job.device == "cpu" and job.dtype in NUMBERS


def _by_key(shares: tuple[Fraction, ...], each: int) -> list[Fraction]:
    """The mean share of the heads that read one key head."""
    return [sum(shares[n : n + each], Fraction(0)) / each for n in range(0, len(shares), each)]


def _of_units(rate: Fraction, work: Work, causal: bool) -> Fraction:
    """Pairs of a key head for which so many rows speak at each token: whole units, each with the keys of its last."""
    units = -(-math.ceil(rate * work.queries) // ROWS)
    if not causal or not units:
        return Fraction(ROWS * units * work.keys)
    own = ROWS * Fraction(units * (units - 1), 2) / rate + work.queries
    return ROWS * (own + units * (work.keys - work.queries))


def _of_chunks(rate: Fraction, work: Work, causal: bool) -> Fraction:
    """The same of chunks."""
    rows = rate * work.queries
    if not causal or not rows or (rate == 1 and work.keys == work.queries):
        return rows * work.keys
    count = chunks(math.ceil(rows))
    each = Fraction(math.ceil(rows / count))
    return each * (count * (work.keys - work.queries) + Fraction(work.queries * (count + 1), 2))


def attend(job: Job, sight: Sight, inputs: Inputs, bound: Bound, probe: Probe | None) -> Tensor:
    """Per-head outputs o_BTHV, zero for heads that are shut."""
    q, k, v = inputs.q, inputs.k, inputs.v
    if not q.numel() or not k.numel() or transformed():
        return sdpa.attend(job, sight, inputs, bound, probe)
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = (t.to(torch.get_autocast_dtype(q.device.type)) for t in (q, k, v))
    with torch.no_grad():
        reading, opened = Reading(sight, q.dtype), _open(job, inputs)
        ends = reading.ends(q.shape[1]) if q.dtype in NUMBERS else None
        lines = None if ends is None else Lines.of(opened, k.shape[2], ends, k.shape[1])
        packed = packs(opened, k.shape[2], reading.plain) if lines is None else []
    if lines is not None:
        return read_lines(q, k, v, lines.told, inputs.asked.scale, lines.formed)[0]
    o_BTHV: Tensor = _Core.apply(q, k, v, packed, (reading, inputs.asked.scale))
    return o_BTHV


def _open(job: Job, inputs: Inputs) -> Tensor:
    """Which heads speak for which token, [B, T, H]: no gate that promises to shut some is zero there."""
    opened = torch.ones(inputs.q.shape[:3], dtype=torch.bool, device=inputs.q.device)
    for shares, gate in zip(_shut(job), inputs.gates, strict=True):
        if shares is not None:
            opened &= gate[..., 0] != 0
    return opened


class _Core(torch.autograd.Function):
    """Packed attention; backwards the scores are formed once more, from the log-sum-exp of each row."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, packed: list[Pack], how: tuple[Reading, float]) -> Tensor:
        batch, queries, heads = q.shape[:3]
        line = v.new_zeros(batch * queries * heads + 1, v.shape[-1])
        kept = []
        for pack in packed:
            call = _Call(pack, q, k, v, how)
            o_BGRV, lse_BGR = call.forth()
            line.index_copy_(0, pack.line, o_BGRV.view(-1, v.shape[-1]))
            kept += [o_BGRV, lse_BGR]
        ctx.packed, ctx.how = packed, how
        ctx.save_for_backward(q, k, v, *kept)
        return line[:-1].view(batch, queries, heads, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        check_once(PLAIN)
        q, k, v, *kept = ctx.saved_tensors
        dq = q.new_zeros(q.shape[:3].numel() + 1, q.shape[-1])
        dk, dv = (t.new_zeros(t.transpose(1, 2).shape) for t in (k, v))
        for n, pack in enumerate(ctx.packed):
            call = _Call(pack, q, k, v, ctx.how)
            dq_BGRK, dk_BGSK, dv_BGSV = call.back(grads[0], kept[2 * n], kept[2 * n + 1])
            dq.index_copy_(0, pack.line, dq_BGRK.view(-1, q.shape[-1]).to(q.dtype))
            dk[:, pack.heads], dv[:, pack.heads] = dk_BGSK.to(k.dtype), dv_BGSV.to(v.dtype)
        return dq[:-1].view(q.shape), dk.transpose(1, 2), dv.transpose(1, 2), None, None


class _Call:
    """The rows of one pack with their keys and values, and what is made of them piece by piece."""

    def __init__(self, pack: Pack, q: Tensor, k: Tensor, v: Tensor, how: tuple[Reading, float]) -> None:
        self.pack, (self.reading, self.scale) = pack, how
        self.q_BGRK = self._packed(q)
        self.k_BGSK, self.v_BGSV = (_some(t.transpose(1, 2), pack.heads) for t in (k, v))

    def _packed(self, x_BTHK: Tensor) -> Tensor:
        if self.pack.whole:
            return _some(x_BTHK.transpose(1, 2), self.pack.heads)
        line = x_BTHK.reshape(-1, x_BTHK.shape[-1])
        rows = line.index_select(0, self.pack.line.clamp(max=len(line) - 1))
        return rows.view(*self.pack.place_BGR.shape, -1)

    def _bars(self, piece: Piece) -> Tensor | None:
        return self.reading.bars(self.pack.place_BGR[..., piece.rows], piece.keys) if piece.barred else None

    def forth(self) -> tuple[Tensor, Tensor]:
        """What rows read, and the log-sum-exp of their scores."""
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        exact = torch.promote_types(self.q_BGRK.dtype, torch.float32)
        o_BGRV = self.v_BGSV.new_zeros(*self.pack.place_BGR.shape, self.v_BGSV.shape[-1])
        lse_BGR = o_BGRV.new_zeros(o_BGRV.shape[:-1], dtype=exact)
        for piece in self.reading.forth(self.pack):
            if piece.keys.start >= piece.keys.stop:
                continue
            q, k, v = self.q_BGRK[:, :, piece.rows], self.k_BGSK[:, :, piece.keys], self.v_BGSV[:, :, piece.keys]
            o, lse = kernel(q, k, v, 0.0, piece.triangle, attn_mask=self._bars(piece), scale=self.scale)
            if not piece.first:
                before, o = o_BGRV[:, :, piece.rows].to(exact), o.to(exact)
                apart = lse - lse_BGR[:, :, piece.rows]
                o = torch.lerp(before, o, torch.sigmoid(apart)[..., None])
                lse = torch.logaddexp(lse, lse_BGR[:, :, piece.rows])
            o_BGRV[:, :, piece.rows], lse_BGR[:, :, piece.rows] = o, lse
        return o_BGRV, lse_BGR.masked_fill_(~self.pack.live_BGR, torch.inf)  # what fills up has no weight backwards

    def back(self, grad_BTHV: Tensor, o_BGRV: Tensor, lse_BGR: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of rows, keys and values."""
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        exact = torch.promote_types(self.q_BGRK.dtype, torch.float32)
        to_BGRV = self._packed(grad_BTHV)
        dq, dk, dv = (t.new_zeros(t.shape, dtype=exact) for t in (self.q_BGRK, self.k_BGSK, self.v_BGSV))
        for piece in self.reading.back(self.pack):
            rows, keys = piece.rows, piece.keys
            if rows.start >= rows.stop or keys.start == keys.stop:
                continue
            q, o, lse, to = (t[:, :, rows] for t in (self.q_BGRK, o_BGRV, lse_BGR, to_BGRV))
            k, v = self.k_BGSK[:, :, keys], self.v_BGSV[:, :, keys]
            found = kernel(to, q, k, v, o, lse, 0.0, piece.triangle, attn_mask=self._bars(piece), scale=self.scale)
            for total, some, part in zip((dq, dk, dv), (rows, keys, keys), found, strict=True):
                total[:, :, some] += part
        return dq, dk, dv


def _some(x_BGSK: Tensor, heads: Sequence[int]) -> Tensor:
    """These heads: a view where they stand at equal distances."""
    step = heads[1] - heads[0] if len(heads) > 1 else 1
    regular = range(heads[0], heads[-1] + 1, step)
    if list(heads) == list(regular):
        return x_BGSK[:, regular.start : regular.stop : step]
    return x_BGSK[:, list(heads)]
