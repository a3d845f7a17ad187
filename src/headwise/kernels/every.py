"""Every query reads the keys from a first to a last of its own, as an operation of torch with a gradient of its own."""

from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .orders import PLAIN, check_once
from .read import Table, narrowed, room, run, straight, table
from .reading import At
from .tiles import ROWS

KEYS = 512  # whose gradients are a part at least
PARTS, UNITS = 4, 16  # parts there may be at most, so that there are so many units
HELD = 16  # plans that are kept: more kinds of calls than this are forgotten


class Size(NamedTuple):
    """Rows, queries, heads of a call, keys, and heads of these."""

    batch: int
    queries: int
    heads: int
    keys: int
    kept: int

    @staticmethod
    def of(q: Tensor, k: Tensor) -> Size:
        """That of queries [B, T, H, dim] and keys [B, S, G, dim]."""
        return Size(*q.shape[:3], *k.shape[1:3])

    @property
    def each(self) -> int:
        """Heads that read one key head."""
        return self.heads // self.kept


class Plan(NamedTuple):
    """What the kernel is told of one kind of call, forth and back, and the tensors whose places stand in there."""

    forth: Table
    back: Table
    parts: int
    held: list[Tensor]

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, ahead: int | None, scale: float) -> Plan:
        """That of these, kept for the next of their kind: to make it takes longer than a short call."""
        kinds = q.dtype, k.dtype, v.dtype
        key = q.shape, k.shape, v.shape, k.stride(), v.stride(), kinds, ahead, scale
        found = _PLANS.get(key)  # once: another thread may forget all plans at any time
        if found is None:
            if len(_PLANS) >= HELD:
                _PLANS.clear()
            size = Size.of(q, k)
            lines, ends, *units = held = [torch.from_numpy(np.ascontiguousarray(t)) for t in _planned(size, ahead)]
            forth, back = (table(q, k, v, (some, lines, ends), scale) for some in units)
            found = _PLANS[key] = Plan(forth, back, len(units[1]) // (size.batch * size.kept), held)
        return found


def _ending(known: Table, ends: Tensor | None) -> Table:
    """A copy, with the caller's own ends if there are some."""
    known = known[:]
    if ends is not None:
        known[At.ENDS], known[At.END_ROWS] = ends.data_ptr(), len(ends)
    return known


_PLANS: dict[tuple[Any, ...], Plan] = {}


def _planned(size: Size, ahead: int | None) -> list[Any]:
    batch, queries, heads, keys, kept = size
    lines = np.arange(batch * queries * heads).reshape(batch, queries, kept, size.each).swapaxes(1, 2).ravel()
    last = np.minimum(np.arange(queries) + (keys if ahead is None else ahead) + 1, keys)
    return [lines, np.stack([0 * last, last], 1)[None], _units_forth(size), _units_back(size)]


def _units_forth(size: Size) -> Any:
    """Units of as many queries as lie side by side; the last, which have most keys, begin."""
    rows, whose = size.queries * size.each, np.arange(size.batch * size.kept)
    first = np.arange(0, rows, ROWS)[::-1]
    units = np.zeros((len(first), len(whose), 6), np.int64)
    units[..., 0], units[..., 1] = whose, whose * rows + first[:, None]
    units[..., 2], units[..., 4] = np.minimum(rows - first, ROWS)[:, None], size.keys
    return units.reshape(-1, 6)


def _units_back(size: Size) -> Any:
    """All queries of each key head with a part of the keys; those of the first keys have most to read."""
    rows, whose = size.queries * size.each, np.arange(size.batch * size.kept)
    parts = max(1, min(PARTS, UNITS // len(whose), size.keys // KEYS))
    cuts = np.array([*(size.keys * part // parts // 4 * 4 for part in range(parts)), size.keys])  # the kernel's fours
    units = np.zeros((parts, len(whose), 6), np.int64)
    units[..., 0], units[..., 1], units[..., 2] = whose, whose * rows, rows
    units[..., 3], units[..., 4], units[..., 5] = cuts[:-1, None], cuts[1:, None], np.arange(parts)[:, None]
    return units.reshape(-1, 6)


# Defined without `custom_op`, whose two functions around each call take as long as a short call itself.
_LIBRARY = torch.library.Library("headwise", "FRAGMENT")
_LIBRARY.define(
    "read_every(Tensor q, Tensor k, Tensor v, Tensor? ends, SymInt? ahead, float scale) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_LIBRARY.define(
    "read_every_backward(Tensor grad, Tensor[] given, Tensor? ends, SymInt? ahead, float scale)"
    " -> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
FORTH, BACK = torch.ops.headwise.read_every.default, torch.ops.headwise.read_every_backward.default


def read_every(q: Tensor, k: Tensor, v: Tensor, ends: Tensor | None, ahead: int | None, scale: float) -> Tensor:
    """What the queries q [B, T, H, dim] read of k and v [B, S, G, dim or vdim].

    `ends`, int64 [1 or B, T, 2], are the first key that a token reads and the one behind its last; without them token t
    reads keys up to t + ahead, or all where that is not said.

    >>> q, k = torch.zeros(1, 3, 1, 2), torch.zeros(1, 3, 1, 2)
    >>> read_every(q, k, torch.arange(3.0).view(1, 3, 1, 1), None, 0, 1.0).flatten().tolist()
    [0.0, 0.5, 1.0]
    """
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        read: Tensor = _Every.apply(q, k, v, ends, ahead, scale)
        return read
    return FORTH(q, k, v, ends, ahead, scale)[0]


class _Every(torch.autograd.Function):
    """Backwards the scores are formed once more, from the log-sum-exp of each row."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *how: Any) -> Tensor:
        o, lse = FORTH(q, k, v, *how)
        ctx.save_for_backward(q, k, v, o, lse, how[0])
        ctx.how = how[1:]
        return o

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        check_once(PLAIN)
        *given, ends = ctx.saved_tensors
        return *BACK(grads[0], given, ends, *ctx.how), None, None, None


@torch.library.impl(_LIBRARY, "read_every", "CPU")
def _forth(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor | None, ahead: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    """What is read, and the log-sum-exp of the scores, [B, T, H]."""
    q, k, v = straight(q, k, v)
    o, lse = q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3])
    plan = Plan.of(q, k, v, ahead, scale)
    run("forward", _ending(plan.forth, ends), q, k, v, o, lse)
    return o, lse


@torch.library.impl(_LIBRARY, "read_every_backward", "CPU")
def _back(
    grad: Tensor, given: list[Tensor], ends: Tensor | None, ahead: int | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v; `given` are these, what was read, and the log-sum-exp."""
    q, k, v, o, lse = given
    q, k, v = straight(q, k, v)
    plan = Plan.of(q, k, v, ahead, scale)
    # Who reads nothing of a part writes nothing.
    make = q.new_empty if ends is None and plan.parts == 1 else q.new_zeros
    grads = room(q, k, v, plan.parts, make)
    run("backward", _ending(plan.back, ends), q, k, v, o, lse, grad.contiguous(), *grads)
    return narrowed(grads, k, v)


@torch.library.register_fake("headwise::read_every")
def _(q: Tensor, k: Tensor, v: Tensor, ends: Any, ahead: Any, scale: float) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3])


@torch.library.register_fake("headwise::read_every_backward")
def _(grad: Tensor, given: list[Tensor], ends: Any, ahead: Any, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, *_ = given
    return narrowed(room(q, k, v, 1, q.new_empty), k, v)


def pairs(size: Size, ends: Tensor | None, ahead: int | None) -> int:
    """How many pairs are formed: whole units, each with the keys from the first to the last that one of its rows reads.

    >>> pairs(Size(1, 128, 1, 128, 1), None, 0), pairs(Size(1, 128, 1, 128, 1), None, None)
    (12288, 16384)
    """
    if ends is not None:
        return _pairs_between(size, ends)
    each, units = size.each, -(-size.queries * size.each // ROWS)
    if ahead is None:
        return ROWS * size.batch * size.kept * units * size.keys
    inner = max(0, min(units - 1, (size.keys - ahead) * each // ROWS))  # units whose last row is not stopped by the end
    keys = _last_tokens(inner, each) + inner * (ahead + 1) + (units - 1 - inner) * size.keys
    return ROWS * size.batch * size.kept * (keys + min(size.queries + ahead, size.keys))


def _last_tokens(units: int, each: int) -> int:
    """The sum over so many units of the token of the last row of each, which rises evenly from period to period."""
    period = each // gcd(each, ROWS)
    first, (times, rest) = [(ROWS * (n + 1) - 1) // each for n in range(period)], divmod(units, period)
    rise = ROWS * period // each
    every = times * sum(first) + period * rise * times * (times - 1) // 2
    return every + sum(first[:rest]) + rest * rise * times


def _pairs_between(size: Size, ends: Tensor) -> int:
    rows = ends.repeat_interleave(size.each, 1)
    rows = torch.cat([rows, rows[:, -1:].expand(-1, -rows.shape[1] % ROWS, -1)], 1).unflatten(1, (-1, ROWS))
    keys = (rows[..., 1].amax(-1) - rows[..., 0].amin(-1)).clamp(min=0).sum()
    return ROWS * size.kept * int(keys) * (size.batch // len(ends))


@register_flop_formula(torch.ops.headwise.read_every, get_raw=True)
def _flops(q: Tensor, k: Tensor, v: Tensor, ends: Any, ahead: Any, scale: float, **said: Any) -> int:
    return 2 * pairs(Size.of(q, k), ends, ahead) * (q.shape[3] + v.shape[3])


@register_flop_formula(torch.ops.headwise.read_every_backward, get_raw=True)
def _flops_back(grad: Any, given: Any, ends: Any, ahead: Any, scale: float, **said: Any) -> int:
    """The scores once more, and of both products the gradients of both."""
    q, k, v, *_ = given
    return 2 * pairs(Size.of(q, k), ends, ahead) * (3 * q.shape[3] + 2 * v.shape[3])
