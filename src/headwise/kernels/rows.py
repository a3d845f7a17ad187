"""Rows of scores as weights, each way as an operation of torch with a gradient of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import normalising, sparse
from .compiled import NUMBERS, Units
from .lanes import WIDE
from .normalising import ROWS, At
from .orders import PLAIN, check_once, transformed
from .sifting import LISTS
from .sparse import KEPT


def takes(s_BHTS: Tensor) -> bool:
    """Whether there are kernels for these: float32 or float64 on the CPU."""
    return s_BHTS.device.type == "cpu" and s_BHTS.dtype in NUMBERS and not transformed()


@torch.library.custom_op("headwise::softmax", mutates_args=(), device_types="cpu")
def softmax(s: Tensor, allowed: Tensor) -> Tensor:
    """Softmax over the keys of s [B, H, T, S] that are allowed [1 or B, 1, 1 or T, S]; where none is, no weight."""
    told, made = _told(s, allowed), s.new_empty(s.shape)
    _launch(normalising.KERNELS, "softmax", told | {At.MADE: made}, (_few(s), 1))
    return made


@torch.library.custom_op("headwise::softmax_backward", mutates_args=(), device_types="cpu")
def softmax_backward(grad: Tensor, w: Tensor) -> Tensor:
    """The gradient of the scores; where nothing was allowed all weights are zero, and so is it."""
    return torch.ops.aten._softmax_backward_data(grad, w, -1, w.dtype)


@torch.library.custom_op("headwise::entmax", mutates_args=(), device_types="cpu")
def entmax(s: Tensor, allowed: Tensor, alpha: Tensor, v: Tensor | None, of: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Entmax, with an alpha for each head, over the keys of s [B, H, T, S] that are allowed [1 or B, 1, 1 or T, S].

    With values v [B, G, S, V] it is what each row reads of v[of[h]], [B, H, T, V]. The second, [B, H, T, 2], is all
    that the way back needs to form rows again.
    """
    held = [] if v is None else [_whole(v), torch.tensor(of)]
    told, kept = _sparse(s, allowed, alpha, held), s.new_empty(*s.shape[:3], KEPT)
    made = s.new_empty(*s.shape[:3], held[0].shape[3] if held else s.shape[3])
    _launch(sparse.KERNELS, "forward", told | {At.MADE: made, At.KEPT: kept}, (_few(s), LISTS))
    return made if v is None else _narrow(made, v), kept


@torch.library.custom_op("headwise::entmax_backward", mutates_args=(), device_types="cpu")
def entmax_backward(grad: Tensor, given: Sequence[Tensor], of: Sequence[int]) -> list[Tensor]:
    """The gradients of the scores, of alpha, and of the values where there are some (1905.05702, 1909.00015).

    Given are scores, what is allowed, alphas, what was kept, and values.
    """
    s, allowed, alpha, kept, *values = given
    held = [] if not values else [_whole(values[0]), torch.tensor(of)]
    made, of_alpha, of_values = s.new_empty(s.shape), s.new_empty(s.shape[:3]), [torch.zeros_like(t) for t in held[:1]]
    told = _sparse(s, allowed, alpha, held) | {At.MADE: made, At.KEPT: kept.contiguous(), At.D_ALPHA: of_alpha}
    told |= {At.GRAD: _whole(grad) if held else grad.contiguous(), At.D_VALUES: of_values[0] if held else 0}
    units = len(s) * held[0].shape[1] if held else _few(s)
    _launch(sparse.KERNELS, "backward", told, (units, LISTS))
    return [made, of_alpha.sum((0, 2)), *map(_narrow, of_values, values)]


Told = dict[At, Tensor | int]


def _told(s: Tensor, allowed: Tensor) -> Told:
    batch, heads, queries, keys = s.shape
    seen, count = allowed.expand(*allowed.shape[:3], keys).contiguous(), batch * heads * queries
    told: Told = {At.GIVEN: s.contiguous(), At.ALLOWED: seen, At.H: heads, At.T: queries, At.S: keys, At.COUNT: count}
    told[At.ALLOWED_ROW] = keys * seen.shape[2] * (len(seen) > 1)
    return told | {At.ALLOWED_QUERY: keys * (seen.shape[2] > 1)}


def _sparse(s: Tensor, allowed: Tensor, alpha: Tensor, held: Sequence[Tensor]) -> Told:
    told = _told(s, allowed)
    told |= {At.KEYS: torch.arange(s.shape[3] + WIDE, dtype=torch.int32), At.ALPHA: alpha.contiguous()}
    if held:
        told |= {At.VALUES: held[0], At.OF: held[1], At.G: held[0].shape[1], At.V: held[0].shape[3]}
    return told


def _few(s: Tensor) -> int:
    """Units of a few rows each."""
    return -(-s.shape[:3].numel() // ROWS)


def _launch(kernels: Units, name: str, told: Told, work: tuple[int, int]) -> None:
    """Do so many units, each with so many rows on its desk."""
    given, (units, rows) = told[At.GIVEN], work
    assert isinstance(given, Tensor)
    desk = rows * (given.shape[3] // WIDE + 2) * WIDE
    kernels.launch(name, given.dtype, (units, desk), *(told.get(at, 0) for at in At))


def _whole(v: Tensor) -> Tensor:
    """Channels in whole vectors."""
    lacking = -v.shape[-1] % WIDE
    return (F.pad(v, (0, lacking)) if lacking else v).contiguous()  # padding keeps strides of other orders


def _narrow(t: Tensor, v: Tensor) -> Tensor:
    return t if t.shape[-1] == v.shape[-1] else t[..., : v.shape[-1]].contiguous()


@softmax.register_fake
def _(s: Tensor, allowed: Tensor) -> Tensor:
    return torch.empty_like(s, memory_format=torch.contiguous_format)


@entmax.register_fake
def _(s: Tensor, allowed: Tensor, alpha: Tensor, v: Tensor | None, of: Sequence[int]) -> tuple[Tensor, Tensor]:
    width = s.shape[3] if v is None else v.shape[3]
    return s.new_empty(*s.shape[:3], width), s.new_empty(*s.shape[:3], KEPT)


@softmax_backward.register_fake
def _(grad: Tensor, w: Tensor) -> Tensor:
    return torch.empty_like(w, memory_format=torch.contiguous_format)


@entmax_backward.register_fake
def _(grad: Tensor, given: Sequence[Tensor], of: Sequence[int]) -> list[Tensor]:
    s, values = given[0], given[4:]
    made = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (s, *values)]
    return [made[0], s.new_empty(s.shape[1]), *made[1:]]


def _keep_softmax(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _back_softmax(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    check_once(PLAIN)
    return softmax_backward(grad, ctx.saved_tensors[0]), None


def _keep_entmax(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.of = inputs
    ctx.save_for_backward(*tensors, output[1])


def _back_entmax(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    check_once(PLAIN)
    s, allowed, alpha, v, kept = ctx.saved_tensors
    given = [s, allowed, alpha, kept] if v is None else [s, allowed, alpha, kept, v]
    of_scores, of_alpha, *of_values = entmax_backward(grad, given, ctx.of)
    return of_scores, None, of_alpha, of_values[0] if of_values else None, None


softmax.register_autograd(_back_softmax, setup_context=_keep_softmax)
entmax.register_autograd(_back_entmax, setup_context=_keep_entmax)


@register_flop_formula(torch.ops.headwise.entmax)
def _flops(s: Any, allowed: Any, alpha: Any, v: Any, of: Any, **said: Any) -> int:
    """The product of all weights with values: which are zero is not known beforehand."""
    return 0 if v is None else 2 * s[0] * s[1] * s[2] * s[3] * v[3]


@register_flop_formula(torch.ops.headwise.entmax_backward)
def _flops_back(grad: Any, given: Any, of: Any, **said: Any) -> int:
    s, values = given[0], given[4:]
    return 4 * s[0] * s[1] * s[2] * s[3] * values[0][3] if values else 0
