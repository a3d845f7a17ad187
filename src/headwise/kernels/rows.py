"""Rows of scores as weights, each way as an operation of torch with a gradient of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .compiled import threads
from .lanes import WIDE
from .normalising import KERNELS, NUMBERS, ROWS

ALPHAS = (1.5, 2.0)  # whose powers are products and roots


def takes(s_BHTS: Tensor) -> bool:
    """Whether there are kernels for these: float32 or float64 on the CPU."""
    return s_BHTS.device.type == "cpu" and s_BHTS.dtype in NUMBERS


@torch.library.custom_op("headwise::softmax", mutates_args=())
def softmax(s: Tensor, allowed: Tensor) -> Tensor:
    """Softmax over the keys of s [B, H, T, S] that are allowed [1 or B, 1, 1 or T, S]; where none is, no weight."""
    return _launch("softmax", s, allowed)


@torch.library.custom_op("headwise::softmax_backward", mutates_args=())
def softmax_backward(grad: Tensor, w: Tensor) -> Tensor:
    """The gradient of the scores; where nothing was allowed all weights are zero, and so is it."""
    return torch.ops.aten._softmax_backward_data(grad, w, -1, w.dtype)


@torch.library.custom_op("headwise::entmax", mutates_args=())
def entmax(s: Tensor, allowed: Tensor, alpha: float, steps: int) -> Tensor:
    """Entmax with alpha 1.5 or 2 over the keys of s [B, H, T, S] that are allowed, in at most so many steps."""
    return _launch("entmax", s, allowed, alpha, steps)


@torch.library.custom_op("headwise::entmax_backward", mutates_args=())
def entmax_backward(grad: Tensor, w: Tensor, alpha: float) -> Tensor:
    """The gradient of the scores (1909.00015)."""
    return _launch("entmax back", w, None, alpha, 0, grad.contiguous())


def _launch(
    name: str, given: Tensor, allowed: Tensor | None, alpha: float = 0.0, steps: int = 0, grad: Tensor | None = None
) -> Tensor:
    given = given.contiguous()
    _, heads, queries, keys = given.shape
    seen = None if allowed is None else allowed.expand(*allowed.shape[:3], keys).contiguous()
    strides = [0, 0] if seen is None else [keys * seen.shape[2] * (len(seen) > 1), keys * (seen.shape[2] > 1)]
    made, count = torch.empty_like(given), heads * queries * len(given)
    units = -(-count // ROWS)
    desks = given.new_empty(threads(units), (keys // WIDE + 2) * WIDE)
    told = [given, made, 0 if grad is None else grad, 0 if seen is None else seen, *strides]
    sizes = [round(2 * alpha), steps, heads, queries, keys, count]
    KERNELS.launch((name, given.dtype), units, *told, *sizes, desks, desks.nbytes // len(desks))
    return made


@softmax.register_fake
def _(s: Tensor, allowed: Tensor) -> Tensor:
    return torch.empty_like(s, memory_format=torch.contiguous_format)


@entmax.register_fake
def _(s: Tensor, allowed: Tensor, alpha: float, steps: int) -> Tensor:
    return torch.empty_like(s, memory_format=torch.contiguous_format)


@softmax_backward.register_fake
def _(grad: Tensor, w: Tensor) -> Tensor:
    return torch.empty_like(w, memory_format=torch.contiguous_format)


@entmax_backward.register_fake
def _(grad: Tensor, w: Tensor, alpha: float) -> Tensor:
    return torch.empty_like(w, memory_format=torch.contiguous_format)


def _keep_softmax(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)


@once_differentiable
def _back_softmax(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return softmax_backward(grad, ctx.saved_tensors[0]), None


def _keep_entmax(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.alpha = inputs[2]
    ctx.save_for_backward(output)


@once_differentiable
def _back_entmax(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return entmax_backward(grad, ctx.saved_tensors[0], ctx.alpha), None, None, None


softmax.register_autograd(_back_softmax, setup_context=_keep_softmax)
entmax.register_autograd(_back_entmax, setup_context=_keep_entmax)
