"""Plain attention as whole products of matrices, a block of queries at a time: for numbers of 16 bits on a CPU.

It multiplies matrices of bfloat16 several times as fast as those of float32. torch's fused call cuts them so small that
nothing of that is left, and is slower backwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.orders import PLAIN, check_once, transformed
from ..pattern import Causal
from ..probe import Probe
from ..terms import Work
from ..tokens import Sight
from . import dense, sdpa
from .blocks import BLOCK, EDGES, formed
from .bound import Bound
from .job import Inputs, Job

KEPT = 512  # keys up to which weights are kept for the way back; of more they are formed once more


class Cut(NamedTuple):
    """A block of queries and the keys up to the last that any of them reads; what hides some, who reads none at all."""

    queries: slice
    keys: slice
    hides: Tensor | None = None  # to be added to scores, [B or 1, 1, T, S]
    blind: Tensor | None = None  # [B or 1, 1, T, 1]


class Plan(NamedTuple):
    """What is done beside the tensors it is done with."""

    cuts: tuple[Cut, ...]
    scale: float
    keeps: bool


def edges() -> tuple[int, ...]:
    """The lengths at which a block more is begun, and from which on weights are formed once more."""
    return *EDGES, KEPT + 1


def refuses(job: Job) -> list[str]:
    """Why this job cannot run here."""
    reasons = sdpa.refuses_plain(job)
    if not job.groups:
        reasons.append("its groups of heads must be equal")
    if job.one:
        reasons.append("a single query is no block")
    if job.compiled:
        reasons.append("who reads nothing is for the data to say, which a compiled graph cannot ask")
    if "lse" in job.wants:
        reasons.append("it has no log-sum-exp")
    return reasons


def leads(job: Job) -> bool:
    """Whether it was measured to be faster than torch's call, at every length (log/2026-11-22-fast-halves.md); where
    keys are not told nobody asks for the fastest.
    """
    return job.device == "cpu" and job.dtype == torch.bfloat16 and job.keys is not None


def spent(job: Job, work: Work) -> int:
    """The products of every block with the keys that some of its queries may read."""
    return job.core.flops(work.batch * formed(job, work))


def attend(job: Job, sight: Sight, inputs: Inputs, bound: Bound, probe: Probe | None) -> Tensor:
    """Per-head outputs o_BTHV."""
    if not inputs.q.numel() or not inputs.k.numel() or transformed():
        return dense.attend(job, sight, inputs, bound, probe)
    q, k, v = (t.to(job.dtype) for t in inputs[:3])
    plan = Plan(tuple(_cuts(sight, q)), inputs.asked.scale, keeps(k.shape[1]))
    o_BTHV: Tensor = _Core.apply(q, k, v, plan)
    return o_BTHV


def keeps(keys: int) -> bool:
    """Whether weights are kept for the way back, so that no score is formed twice."""
    return keys <= KEPT


def _cuts(sight: Sight, like: Tensor) -> Iterator[Cut]:
    asks, told = sight.queries, sight.keys
    low = torch.finfo(like.dtype).min / 2
    for start in range(0, asks.count, BLOCK):
        rows = slice(start, min(start + BLOCK, asks.count))
        if sight.shape == "full":
            yield Cut(rows, slice(0, told.count))
        elif asks.start is not None and told.start is not None and isinstance(sight.pattern, Causal):
            seen = asks.start - told.start + start + 1  # keys up to the first query
            stop = min(told.count, max(seen + rows.stop - start - 1, 0))
            hides = like.new_full((1, 1, rows.stop - start, stop), low).triu_(seen)
            yield Cut(rows, slice(0, stop), hides, None if seen > 0 else (hides < 0).all(-1, keepdim=True))
        else:
            hidden = ~sight.allowed[:, :, rows]
            blind = hidden.all(-1, keepdim=True)
            hides = like.new_zeros(hidden.shape).masked_fill_(hidden, low)
            yield Cut(rows, slice(0, told.count), hides, blind if bool(blind.any()) else None)


class _Core(torch.autograd.Function):
    """Queries lie [B x key heads, heads that read it, T, K] in here, keys and values [B x key heads, S, K]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
        batch, count, heads, _ = q.shape
        rows, keys, values = _by_group(q, k.shape[2]), _flat(k), _flat(v)
        o, kept = v.new_empty(batch, count, heads, v.shape[-1]), list[Tensor]()
        for cut in plan.cuts:
            w = _weights(rows, keys, cut, plan.scale)
            some = torch.bmm(w, values[:, cut.keys])
            o[:, cut.queries] = some.view(batch, heads, -1, some.shape[-1]).transpose(1, 2)
            kept += [w] * plan.keeps
        ctx.plan, ctx.batch = plan, batch
        ctx.save_for_backward(rows, keys, values, *kept)
        return o

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        check_once(PLAIN)
        rows, keys, values, *kept = ctx.saved_tensors
        grad, plan = _by_group(grads[0], len(keys) // ctx.batch), ctx.plan
        d_rows, d_keys, d_values = torch.empty_like(rows), _Sum(keys, plan), _Sum(values, plan)
        for n, cut in enumerate(plan.cuts):
            w = kept[n] if kept else _weights(rows, keys, cut, plan.scale)
            asks, told = _some(rows, cut), _some(grad, cut)
            d = torch.bmm(told, values[:, cut.keys].transpose(1, 2))
            d = torch.ops.aten._softmax_backward_data(d, w, -1, w.dtype)
            here = d_rows[:, :, cut.queries]
            here.copy_(_product(d, keys[:, cut.keys], plan.scale).view_as(here))
            d_keys.add(cut.keys, _product(d.transpose(1, 2), asks, plan.scale))
            d_values.add(cut.keys, torch.bmm(w.transpose(1, 2), told))
        made = d_rows, d_keys.made(), d_values.made()
        dq, dk, dv = (t.view(ctx.batch, -1, *t.shape[-2:]).transpose(1, 2) for t in made)
        return dq, dk, dv, None


class _Sum:
    """A gradient of keys or values, of all blocks: in single precision, for it is rounded with each of them."""

    def __init__(self, like: Tensor, plan: Plan) -> None:
        self.like, self.alone = like, len(plan.cuts) == 1 and plan.cuts[0].keys.stop == like.shape[1]
        exact = torch.promote_types(like.dtype, torch.float32)
        self.all = like if self.alone else torch.zeros_like(like, dtype=exact)

    def add(self, keys: slice, more: Tensor) -> None:
        """Of these keys so much more."""
        if self.alone:
            self.all = more
        else:
            self.all[:, keys] += more

    def made(self) -> Tensor:
        """The sum, in the numbers of what it is the gradient of."""
        return self.all.to(self.like.dtype)


def _flat(x_BSGK: Tensor) -> Tensor:
    return x_BSGK.transpose(1, 2).flatten(0, 1)


def _by_group(x_BTHK: Tensor, groups: int) -> Tensor:
    return x_BTHK.transpose(1, 2).unflatten(1, (groups, -1)).flatten(0, 1)


def _some(rows: Tensor, cut: Cut) -> Tensor:
    return rows[:, :, cut.queries].flatten(1, 2)


def _product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    return torch.baddbmm(a.new_empty(()), a, b, beta=0, alpha=scale)


def _weights(rows: Tensor, keys: Tensor, cut: Cut, scale: float) -> Tensor:
    """[B x key heads, heads that read it x T, S]"""
    asks, told = _some(rows, cut), keys[:, cut.keys].transpose(1, 2)
    if cut.hides is None:
        return _product(asks, told, scale).softmax(-1)
    batch, _, count, read = cut.hides.shape
    by_group = len(rows) // batch, rows.shape[1], count, read
    hides = cut.hides[:, :, None].expand(batch, *by_group).flatten(0, 1).flatten(1, 2)
    w = torch.baddbmm(hides, asks, told, alpha=scale).softmax(-1)
    if cut.blind is not None:
        w.view(batch, by_group[0] * by_group[1], count, read).masked_fill_(cut.blind, 0)
    return w
