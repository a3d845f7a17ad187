"""Texts that lie one behind the other, each read by itself, as an operation of torch with a gradient of its own."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .orders import NO_DOUBLE_BACKWARD_REMEDY, forbid_double_backward

HAS_NUMBA = find_spec("numba") is not None
PADDING_WIDTH = 16  # numbers that are computed with at once: rows are filled up to a multiple of them
SequenceTable = tuple[Tensor, int]


@torch.library.custom_op("headwise::texts", mutates_args=(), device_types="cpu")
def attend_varlen(qkv: list[Tensor], where: Tensor, longest: int, causal: bool, scale: float) -> Tensor:
    """o [N, H, V] of q [N, H, K], k [M, G, K] and v [M, G, V]: softmax(scale q k^T) v of each text by itself.

    `where` [texts, 4] says of each text its first query, how many there are, its first key and how many; none of these
    numbers is above `longest`. Causal queries read no key that is later than they are in their text.

    >>> ones = torch.ones(3, 1, 16)
    >>> attend_varlen([ones, ones, ones.cumsum(0)], torch.tensor([[0, 1, 0, 1], [1, 2, 1, 2]]), 2, True, 1.0)[:, 0, 0].tolist()
    [1.0, 2.0, 2.5]
    """
    (q, _, v), wide = qkv, [_pad_rows(t) for t in qkv]
    o = v.new_zeros(*q.shape[:2], wide[2].shape[2])
    _launch_varlen("forward", wide, (where, longest), (causal, scale), o)
    return o if o.shape[2] == v.shape[2] else o[..., : v.shape[2]].contiguous()


@torch.library.custom_op("headwise::texts_backward", mutates_args=(), device_types="cpu")
def attend_varlen_backward(
    grad: Tensor, qkv: list[Tensor], where: Tensor, longest: int, causal: bool, scale: float
) -> list[Tensor]:
    """The gradients of q, k and v."""
    wide = [_pad_rows(t) for t in qkv]
    made = [t.new_zeros(t.shape) for t in wide]
    back = _pad_rows(grad).contiguous()
    _launch_varlen("backward", wide, (where, longest), (causal, scale), made[0], back, *made[1:])
    return [
        t if t.shape == own.shape else t[..., : own.shape[2]].contiguous() for t, own in zip(made, qkv, strict=True)
    ]


def _pad_rows(t: Tensor) -> Tensor:
    """Rows of whole vectors, each of which lies in one piece."""
    lacking = -t.shape[2] % PADDING_WIDTH
    t = F.pad(t, (0, lacking)) if lacking else t
    return t if t.stride(2) == 1 else t.contiguous()


def _launch_varlen(which: str, given: list[Tensor], where: SequenceTable, how: tuple[bool, float], *made: Tensor) -> None:
    from .texting import VARLEN_KERNELS, varlen_scratch_size  # here: Numba takes a second to import

    (table, longest), (causal, scale), (q, k, v) = where, how, given
    groups, scales = k.shape[1], torch.is_full((1,), scale, dtype=q.dtype)
    work = len(table) * groups, varlen_scratch_size(longest, k.shape[2], v.shape[2])
    lies = [told for t in given for told in (t, *(step * t.itemsize for step in t.stride()[:2]))]
    sizes = (groups, q.shape[1] // groups, k.shape[2], v.shape[2], scales, int(causal))
    VARLEN_KERNELS.launch(which, q.dtype, work, table, *lies, *sizes, *made)


@attend_varlen.register_fake
def _(qkv: list[Tensor], where: Tensor, longest: int, causal: bool, scale: float) -> Tensor:
    return qkv[2].new_empty(*qkv[0].shape[:2], qkv[2].shape[2])


@attend_varlen_backward.register_fake
def _(grad: Tensor, qkv: list[Tensor], where: Tensor, longest: int, causal: bool, scale: float) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in qkv]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    qkv, where, *ctx.how = inputs
    ctx.save_for_backward(where, *qkv)


def _varlen_autograd_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    forbid_double_backward(NO_DOUBLE_BACKWARD_REMEDY)
    where, *qkv = ctx.saved_tensors
    return attend_varlen_backward(grad, qkv, where, *ctx.how), None, None, None, None


attend_varlen.register_autograd(_varlen_autograd_backward, setup_context=_save_for_backward)


def _count_products(qkv: list[Tensor], where: Tensor) -> tuple[int, int, int]:
    """Products of one number each: of pairs and heads with channels of a query, and of a value."""
    pairs = int((where[:, 1] * where[:, 3]).sum()) * qkv[0].shape[1]
    return 2 * pairs, qkv[0].shape[2], qkv[2].shape[2]


@register_flop_formula(torch.ops.headwise.texts, get_raw=True)
def _varlen_flops(qkv: Any, where: Any, *rest: Any, **said: Any) -> int:
    pairs, dim, vdim = _count_products(qkv, where)
    return pairs * (dim + vdim)


@register_flop_formula(torch.ops.headwise.texts_backward, get_raw=True)
def _varlen_backward_flops(grad: Any, qkv: Any, where: Any, *rest: Any, **said: Any) -> int:
    """Scores once more, and the gradients of both factors of each product."""
    pairs, dim, vdim = _count_products(qkv, where)
    return pairs * (3 * dim + 2 * vdim)
