"""Heads composed at every pair, as an operation of torch with a gradient of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .compiled import COMPUTE_DTYPES
from .composing import KEY_TILE_SIZE, head_mixing_scratch_size
from .decomposing import HEAD_MIXING_KERNELS
from .lanes import SIMD_WIDTH
from .orders import NO_DOUBLE_BACKWARD_REMEDY, forbid_double_backward, is_under_functorch


def has_head_mixing_kernel(a_BHTS: Tensor) -> bool:
    """Whether there is a kernel for these: float32 or float64 on the CPU."""
    return a_BHTS.device.type == "cpu" and a_BHTS.dtype in COMPUTE_DTYPES and not is_under_functorch()


@torch.library.custom_op("headwise::composed", mutates_args=(), device_types="cpu")
def mix_heads_by_factors(a: Tensor, head_of_output: Tensor, heads_per_group: int, factors: list[Tensor]) -> Tensor:
    """[B, O, T, S] of a [B, H, T, S]: a[own] (qg + kg) + sum_r (a.qs_r) qt_r, and the same with factors of keys.

    The factors of queries are [B, T, R, H], [B, T, R, O] and [B, T, O], those of keys [B, R, H, S], [B, R, O, S] and
    [B, 1, O, S]; a side without factors has R = 0, and 0 for 1. `each` heads are a group.
    """
    keys = a.shape[3]
    given = _padded_inputs(a, head_of_output, factors)
    a = given[6]
    out = a.new_empty(a.shape[0], head_of_output.shape[0], *a.shape[2:])
    _launch_head_mixing("forward", given, heads_per_group, out)
    return _unpad_keys(out, keys)


@torch.library.custom_op("headwise::composed_backward", mutates_args=(), device_types="cpu")
def mix_heads_by_factors_backward(grad: Tensor, a: Tensor, own: Tensor, each: int, factors: list[Tensor]) -> list[Tensor]:
    """The gradients of a and of the six factors."""
    keys = a.shape[3]
    given = _padded_inputs(a, own, factors)
    qs, qt, qg, ks, kt, kg, a, own = given
    tiles = -(-a.shape[3] // KEY_TILE_SIZE)
    of_queries = [t.new_empty(len(t), tiles, *t.shape[1:]) for t in (qs, qt, qg)]
    of_keys = [torch.empty_like(t) for t in (ks, kt, kg)]
    d_a = torch.empty_like(a)
    _launch_head_mixing("backward", given, each, d_a, _pad_keys(grad), *of_queries, *of_keys)
    return [_unpad_keys(d_a, keys), *(t.sum(1) for t in of_queries), *(_unpad_keys(t, keys) for t in of_keys)]


def _padded_inputs(a: Tensor, own: Tensor, factors: Sequence[Tensor]) -> list[Tensor]:
    return [*(t.contiguous() for t in factors[:3]), *map(_pad_keys, factors[3:]), _pad_keys(a), own.contiguous()]


def _pad_keys(t: Tensor) -> Tensor:
    """Keys in whole vectors."""
    lacking = -t.shape[-1] % SIMD_WIDTH
    return (F.pad(t, (0, lacking)) if lacking else t).contiguous()  # padding keeps strides of other orders


def _unpad_keys(t: Tensor, keys: int) -> Tensor:
    return t if t.shape[-1] == keys else t[..., :keys].contiguous()


def _launch_head_mixing(which: str, given: list[Tensor], each: int, *made: Tensor) -> None:
    qs, ks, kg, a, own = given[0], given[3], given[5], given[6], given[7]
    (batch, heads, queries, keys), out = a.shape, own.shape[0]
    work = batch * -(-keys // KEY_TILE_SIZE), head_mixing_scratch_size(heads, out, qs.shape[2], ks.shape[1])
    sizes = (heads, out, queries, keys, qs.shape[2], ks.shape[1], kg.shape[1] * out, each)
    HEAD_MIXING_KERNELS.launch(which, a.dtype, work, *given, *sizes, *made)


@mix_heads_by_factors.register_fake
def _(a: Tensor, own: Tensor, each: int, factors: list[Tensor]) -> Tensor:
    return a.new_empty(a.shape[0], own.shape[0], *a.shape[2:])


@mix_heads_by_factors_backward.register_fake
def _(grad: Tensor, a: Tensor, own: Tensor, each: int, factors: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (a, *factors)]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, own, ctx.each, factors = inputs
    ctx.save_for_backward(a, own, *factors)


def _head_mixing_autograd_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    forbid_double_backward(NO_DOUBLE_BACKWARD_REMEDY)
    a, own, *factors = ctx.saved_tensors
    d_a, *d_factors = mix_heads_by_factors_backward(grad, a, own, ctx.each, factors)
    return d_a, None, None, d_factors


mix_heads_by_factors.register_autograd(_head_mixing_autograd_backward, setup_context=_save_for_backward)


@register_flop_formula(torch.ops.headwise.composed)
def _head_mixing_flops(a: Any, own: Any, each: int, factors: Any, **said: Any) -> int:
    batch, heads, queries, keys = a
    return 2 * batch * queries * keys * (factors[0][2] + factors[3][1]) * (heads + own[0])


@register_flop_formula(torch.ops.headwise.composed_backward)
def _head_mixing_backward_flops(grad: Any, a: Any, own: Any, each: int, factors: Any, **said: Any) -> int:
    """The ranks once more; of each product with factors, the gradients of both."""
    batch, heads, queries, keys = a
    return 2 * batch * queries * keys * (factors[0][2] + factors[3][1]) * (3 * heads + 2 * own[0])
