"""Heads composed at every pair, as an operation of torch with a gradient of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .compiled import NUMBERS
from .composing import TILE, desk
from .decomposing import KERNELS
from .lanes import WIDE
from .orders import PLAIN, check_once, transformed


def takes(a_BHTS: Tensor) -> bool:
    """Whether there is a kernel for these: float32 or float64 on the CPU."""
    return a_BHTS.device.type == "cpu" and a_BHTS.dtype in NUMBERS and not transformed()


@torch.library.custom_op("headwise::composed", mutates_args=(), device_types="cpu")
def composed(a: Tensor, own: Tensor, each: int, factors: list[Tensor]) -> Tensor:
    """[B, O, T, S] of a [B, H, T, S]: a[own] (qg + kg) + sum_r (a.qs_r) qt_r, and the same with factors of keys.

    The factors of queries are [B, T, R, H], [B, T, R, O] and [B, T, O], those of keys [B, R, H, S], [B, R, O, S] and
    [B, 1, O, S]; a side without factors has R = 0, and 0 for 1. `each` heads are a group.
    """
    keys = a.shape[3]
    given = _given(a, own, factors)
    a = given[6]
    out = a.new_empty(a.shape[0], own.shape[0], *a.shape[2:])
    _launch("forward", given, each, out)
    return _narrowed(out, keys)


@torch.library.custom_op("headwise::composed_backward", mutates_args=(), device_types="cpu")
def composed_backward(grad: Tensor, a: Tensor, own: Tensor, each: int, factors: list[Tensor]) -> list[Tensor]:
    """The gradients of a and of the six factors."""
    keys = a.shape[3]
    given = _given(a, own, factors)
    qs, qt, qg, ks, kt, kg, a, own = given
    tiles = -(-a.shape[3] // TILE)
    of_queries = [t.new_empty(len(t), tiles, *t.shape[1:]) for t in (qs, qt, qg)]
    of_keys = [torch.empty_like(t) for t in (ks, kt, kg)]
    d_a = torch.empty_like(a)
    _launch("backward", given, each, d_a, _padded(grad), *of_queries, *of_keys)
    return [_narrowed(d_a, keys), *(t.sum(1) for t in of_queries), *(_narrowed(t, keys) for t in of_keys)]


def _given(a: Tensor, own: Tensor, factors: Sequence[Tensor]) -> list[Tensor]:
    return [*(t.contiguous() for t in factors[:3]), *map(_padded, factors[3:]), _padded(a), own.contiguous()]


def _padded(t: Tensor) -> Tensor:
    """Keys in whole vectors."""
    lacking = -t.shape[-1] % WIDE
    return (F.pad(t, (0, lacking)) if lacking else t).contiguous()  # padding keeps strides of other orders


def _narrowed(t: Tensor, keys: int) -> Tensor:
    return t if t.shape[-1] == keys else t[..., :keys].contiguous()


def _launch(which: str, given: list[Tensor], each: int, *made: Tensor) -> None:
    qs, ks, kg, a, own = given[0], given[3], given[5], given[6], given[7]
    (batch, heads, queries, keys), out = a.shape, own.shape[0]
    work = batch * -(-keys // TILE), desk(heads, out, qs.shape[2], ks.shape[1])
    sizes = (heads, out, queries, keys, qs.shape[2], ks.shape[1], kg.shape[1] * out, each)
    KERNELS.launch(which, a.dtype, work, *given, *sizes, *made)


@composed.register_fake
def _(a: Tensor, own: Tensor, each: int, factors: list[Tensor]) -> Tensor:
    return a.new_empty(a.shape[0], own.shape[0], *a.shape[2:])


@composed_backward.register_fake
def _(grad: Tensor, a: Tensor, own: Tensor, each: int, factors: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (a, *factors)]


def _kept(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, own, ctx.each, factors = inputs
    ctx.save_for_backward(a, own, *factors)


def _back(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    check_once(PLAIN)
    a, own, *factors = ctx.saved_tensors
    d_a, *d_factors = composed_backward(grad, a, own, ctx.each, factors)
    return d_a, None, None, d_factors


composed.register_autograd(_back, setup_context=_kept)


@register_flop_formula(torch.ops.headwise.composed)
def _flops(a: Any, own: Any, each: int, factors: Any, **said: Any) -> int:
    batch, heads, queries, keys = a
    return 2 * batch * queries * keys * (factors[0][2] + factors[3][1]) * (heads + own[0])


@register_flop_formula(torch.ops.headwise.composed_backward)
def _flops_back(grad: Any, a: Any, own: Any, each: int, factors: Any, **said: Any) -> int:
    """The ranks once more; of each product with factors, the gradients of both."""
    batch, heads, queries, keys = a
    return 2 * batch * queries * keys * (factors[0][2] + factors[3][1]) * (3 * heads + 2 * own[0])
