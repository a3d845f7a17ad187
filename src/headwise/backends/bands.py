"""The fused kernel of the CPU over pieces of a call, forward and backward, as one operation that torch knows by name.

The forward pass keeps each query's log-sum-exp; with it the backward pass of a piece needs no other piece (2205.14135).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..pattern import parse
from .banding import Axis, Piece, formed, pieces
from .blocks import BLOCK
from .folds import Fold, folds
from .rows import runs

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor[] tokens, int[] starts, str pattern, float scale"
PLANS = 256  # more kinds of calls than this are forgotten

_PLANS: dict[tuple[str, Axis, tuple[Axis, ...]], list[Piece]] = {}


def planned(pattern: str, asks: Axis, told: tuple[Axis, ...]) -> list[Piece]:
    """The pieces of one call, kept for the next of its kind."""
    key = pattern, asks, told
    found = _PLANS.get(key)  # once: another thread may forget all plans at any time
    if found is None:
        if len(_PLANS) >= PLANS:
            _PLANS.clear()
        found = _PLANS[key] = pieces(parse(pattern), asks, told)
    return found


class How(NamedTuple):
    """What decides who reads whom in a call, and the scale of its scores.

    `starts` are the places of the first query and the first key, where all rows hold neighbours of one text; else
    `tokens` are position and segment of queries and of keys.
    """

    tokens: Sequence[Tensor]
    starts: Sequence[int]
    pattern: str
    scale: float


class Call:
    """The calls of the kernel that make up one attention."""

    def __init__(self, q: Tensor, k: Tensor, how: How) -> None:
        self.q, self.k, self.how, self.pattern = q, k, how, parse(how.pattern)
        self.pieces = self._pieces()

    def _pieces(self) -> list[tuple[Piece, Sequence[int]]] | None:
        """Each piece, with the rows of the batch that have it; None where tokens stand anywhere."""
        (batch, queries), keys = self.q.shape[:2], self.k.shape[1]
        if self.how.starts:
            asks, told = (Axis(range(at, at + n)) for at, n in zip(self.how.starts, (queries, keys), strict=True))
            return [(piece, range(batch)) for piece in planned(self.how.pattern, asks, (told,))]
        if (found := runs(self.how.tokens, batch)) is None:
            return None
        return [(piece, rows) for rows, asks, told in found for piece in planned(self.how.pattern, asks, told)]

    def __iter__(self) -> Iterator[tuple[Fold, Tensor | None]]:
        """What each call reads, and what it adds to its scores."""
        if self.pieces is None:
            yield from self._anywhere()
            return
        nbytes = 2 * self.k.shape[2] * self.k.shape[3] * self.k.element_size()
        for piece, rows in self.pieces:
            mask = self._mask(piece)
            yield from ((fold, mask) for fold in folds(piece, rows, nbytes))

    def _mask(self, piece: Piece) -> Tensor | None:
        if piece.places is None:
            return None
        asks, told = piece.places
        i = torch.arange(asks.start, asks.stop, asks.step)
        j = torch.cat([torch.arange(some.start, some.stop, some.step) for some in told])
        allowed = self.pattern.allows(i[:, None], j)
        return self._added(allowed[None, None])

    def _anywhere(self) -> Iterator[tuple[Fold, Tensor]]:
        """Blocks of queries that may each read every key."""
        place, segment, other, same = (t[:, None, None] for t in self.how.tokens)
        for start in range(0, self.q.shape[1], BLOCK):
            asks = range(start, min(start + BLOCK, self.q.shape[1]))
            i, own = (t.transpose(2, 3)[:, :, asks.start : asks.stop] for t in (place, segment))
            allowed = (own == same) & (own >= 0) & self.pattern.allows(i, other)
            yield Fold(None, [asks], [(range(self.k.shape[1]),)]), self._added(allowed)

    def _added(self, allowed: Tensor) -> Tensor:
        return self.q.new_zeros(allowed.shape).masked_fill(~allowed, -torch.inf)

    @property
    def pairs(self) -> int:
        """The scores that all rows form for each head."""
        if self.pieces is None:
            return self.q.shape[0] * self.q.shape[1] * self.k.shape[1]
        return sum(piece.pairs * len(rows) for piece, rows in self.pieces)


def read(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *said: Any) -> tuple[Tensor, Tensor]:
    """o_BTHV and the log-sum-exp l_BTH, of queries q_BTHK that read k_BSGK and v_BSGV; the rest is `How`.

    `sinks` are one more score in every row of a head, whose value is nothing.
    """
    how = How(*said)
    q, k, v = _straight(q), _straight(k), _straight(v)
    o = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    for fold, mask in Call(q, k, how):
        part, sums = FORWARD(fold.asked(q), fold.told(k), fold.told(v), 0.0, False, attn_mask=mask, scale=how.scale)
        if mask is not None:
            sums = sums.masked_fill((mask == -torch.inf).all(-1), -torch.inf)
        fold.put(o, part)
        fold.put(lse[..., None], sums[..., None])
    if sinks is None:
        return o, lse
    every = torch.logaddexp(lse, sinks.to(lse.dtype))
    return o * (lse - every).exp()[..., None].to(o.dtype), every


def gradients(grad: Tensor, o: Tensor, lse: Tensor, q: Tensor, k: Tensor, *said: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    v, _, how = said[0], said[1], How(*said[2:])
    grad, q, k, v = (_straight(x) for x in (grad, q, k, v))
    asked, keys, values = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    lse = lse.masked_fill(lse == -torch.inf, 0.0)[..., None]  # of no keys: every weight is exp(-inf - 0)
    for fold, mask in Call(q, k, how):
        got = fold.asked(grad), fold.asked(q), fold.told(k), fold.told(v), fold.asked(o), fold.asked(lse)[..., 0]
        parts = BACKWARD(*got, 0.0, False, attn_mask=mask, scale=how.scale)
        fold.put(asked, parts[0])
        fold.add(keys, parts[1])
        fold.add(values, parts[2])
    return asked, keys, values


def _straight(x: Tensor) -> Tensor:
    """The same with the channels of a head side by side, as the kernel wants them."""
    return x if x.stride(-1) == 1 else x.contiguous()


# Their names are how compilers and counters know them; what happens inside is not theirs to see.
banded = torch.library.custom_op("headwise::banded", read, mutates_args=(), schema=f"({INPUTS}) -> (Tensor, Tensor)")
banded_backward = torch.library.custom_op(
    "headwise::banded_backward",
    gradients,
    mutates_args=(),
    schema=f"(Tensor grad, Tensor o, Tensor lse, {INPUTS}) -> (Tensor, Tensor, Tensor)",
)


@banded.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    exact = torch.promote_types(q.dtype, torch.float32)
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:3], dtype=exact)


@banded_backward.register_fake
def _(grad: Tensor, o: Tensor, lse: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in args[:3])
    return q, k, v


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, tokens, *ctx.how = inputs
    ctx.save_for_backward(q, k, v, *output, *([] if sinks is None else [sinks]), *tokens)
    ctx.sunk = sinks is not None
    ctx.mark_non_differentiable(output[1])


def _back(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    q, k, v, o, lse, *rest = ctx.saved_tensors
    sinks = rest.pop(0) if ctx.sunk else None
    grads = banded_backward(grad, o, lse, q, k, v, sinks, list(rest), *ctx.how)
    sunk = None
    if sinks is not None:
        # A sink's weight reads nothing, so its score goes down with all that the others read.
        weight = (sinks - lse).exp()
        sunk = -(weight * (grad * o).sum(-1)).sum((0, 1)).to(sinks.dtype)
    return *grads, sunk, [None] * len(rest), None if ctx.how[0] else [], None, None  # of lists, lists


banded.register_autograd(_back, setup_context=_keep)


@register_flop_formula(torch.ops.headwise.banded, get_raw=True)
def _forward_flops(q: Tensor, k: Tensor, v: Tensor, sinks: Any, *said: Any, **_: Any) -> int:
    return 2 * _pairs(q, k, How(*said)) * q.shape[2] * (q.shape[3] + v.shape[3])


@register_flop_formula(torch.ops.headwise.banded_backward, get_raw=True)
def _backward_flops(grad: Tensor, o: Tensor, lse: Tensor, q: Tensor, k: Tensor, *said: Any, **_: Any) -> int:
    # Scores once more, their gradients and those of queries and keys; of weights and of values.
    return 2 * _pairs(q, k, How(*said[2:])) * q.shape[2] * (3 * q.shape[3] + 2 * o.shape[3])


def _pairs(q: Tensor, k: Tensor, how: How) -> int:
    if not how.starts:
        return Call(q, k, how).pairs
    asks, told = (range(at, at + x.shape[1]) for at, x in zip(how.starts, (q, k), strict=True))
    return q.shape[0] * formed(parse(how.pattern), asks, told)
