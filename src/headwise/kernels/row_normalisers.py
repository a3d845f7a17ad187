"""Masked softmax and entmax over rows of scores, as torch operations with gradients.

`masked_softmax(s, allowed)` equals `s.masked_fill(~allowed, -inf).softmax(-1)`, except that a row without allowed keys
is zero rather than NaN. `masked_entmax` computes alpha-entmax (1905.05702) with one alpha per head:

    w[j] = max((alpha - 1) s[j] - tau, 0) ^ (1 / (alpha - 1)),  with tau such that sum_j w[j] = 1

alpha = 2 is sparsemax, alpha -> 1 softmax. With values it returns w @ v and never stores w, whose entries are mostly
zero. `row_normaliser_kernels` holds the kernels and their loop order.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum, auto
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .autograd_guards import NO_DOUBLE_BACKWARD_REMEDY, forbid_double_backward, is_under_functorch
from .launch import COMPUTE_DTYPES, FIRST_KERNEL_ARG, SIMD_WIDTH, KernelSet, ParallelKernelSet

ROWS_PER_ITEM = 8  # rows per work item
NUM_ROW_LISTS = 5  # lists in a scratch buffer: row, candidates, slopes, gradients, key indices
ROW_STATE_SIZE = 2  # maximum and tau, from which a row is computed again


class RowNormaliserArgs(IntEnum):
    """Kernel arguments: indices into an int64 array. Addresses count bytes, sizes count elements."""

    SCORES = FIRST_KERNEL_ARG  # [B, H, T, S]: scores
    OUTPUT = auto()  # forward weights, or weighted values [B, H, T, V]; backward the gradient of scores
    MASK = auto()  # [1 or B, 1, 1 or T, S], one byte each; 0 if every key is allowed
    MASK_ROW_STRIDE = auto()  # elements to the next row of the batch, and to the next query
    MASK_QUERY_STRIDE = auto()
    H = auto()
    T = auto()
    S = auto()
    NUM_ROWS = auto()  # rows in all
    KEY_INDICES = auto()  # int32 0, 1, 2, ... for each key; used by entmax only, as are all that follow
    ALPHA = auto()  # [H]
    ROW_STATE = auto()  # [B, H, T, 2]: maximum and tau of each row, for the backward pass
    VALUES = auto()  # [B, G, S, V], V padded to whole vectors; 0 to return the weights themselves
    VALUE_HEAD_OF_HEAD = auto()  # [H], int64: the value head that each head reads
    G = auto()
    V = auto()
    GRAD = auto()  # backward: gradient of the output
    D_VALUES = auto()
    D_ALPHA = auto()  # [B, H, T]


SOFTMAX_KERNELS = ParallelKernelSet("row_normaliser_kernels", COMPUTE_DTYPES, softmax="softmax_kernel")
ENTMAX_KERNELS = ParallelKernelSet(
    "row_normaliser_kernels", COMPUTE_DTYPES, forward="entmax_forward_kernel", backward="entmax_backward_kernel"
)


def can_use_kernels(s_BHTS: Tensor, kernels: KernelSet) -> bool:
    """Return True if these kernels may run on the scores: float32 or float64 on the CPU, outside torch.func."""
    if s_BHTS.device.type != "cpu" or s_BHTS.dtype not in COMPUTE_DTYPES or is_under_functorch():
        return False
    return kernels.is_usable(s_BHTS.dtype)


@torch.library.custom_op("headwise::softmax", mutates_args=(), device_types="cpu")
def masked_softmax(s: Tensor, allowed: Tensor) -> Tensor:
    """Return the softmax of s [B, H, T, S] over the allowed keys; rows without any are zero.

    `allowed` is [1 or B, 1, 1 or T, S].
    """
    told, made = _score_args(s, allowed), s.new_empty(s.shape)
    _launch_rows(SOFTMAX_KERNELS, "softmax", told | {RowNormaliserArgs.OUTPUT: made}, (_num_items(s), 1))
    return made


@torch.library.custom_op("headwise::softmax_backward", mutates_args=(), device_types="cpu")
def masked_softmax_backward(grad: Tensor, w: Tensor) -> Tensor:
    """Return the gradient of the scores; it is zero for rows without allowed keys, as their weights are."""
    return torch.ops.aten._softmax_backward_data(grad, w, -1, w.dtype)


@torch.library.custom_op("headwise::entmax", mutates_args=(), device_types="cpu")
def masked_entmax(
    s: Tensor, allowed: Tensor, alpha: Tensor, v: Tensor | None, of: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return the entmax of s [B, H, T, S] over allowed [1 or B, 1, 1 or T, S], with one alpha per head.

    With values v [B, G, S, V] it returns the weighted values [B, H, T, V] instead, where head h reads v[:, of[h]]. The
    second output, [B, H, T, 2], holds each row's maximum and tau, from which the backward pass computes the row again.
    """
    held = [] if v is None else [_pad_channels(v), torch.tensor(of)]
    told, kept = _entmax_args(s, allowed, alpha, held), s.new_empty(*s.shape[:3], ROW_STATE_SIZE)
    made = s.new_empty(*s.shape[:3], held[0].shape[3] if held else s.shape[3])
    _launch_rows(
        ENTMAX_KERNELS,
        "forward",
        told | {RowNormaliserArgs.OUTPUT: made, RowNormaliserArgs.ROW_STATE: kept},
        (_num_items(s), NUM_ROW_LISTS),
    )
    return made if v is None else _unpad_channels(made, v), kept


@torch.library.custom_op("headwise::entmax_backward", mutates_args=(), device_types="cpu")
def masked_entmax_backward(grad: Tensor, given: Sequence[Tensor], of: Sequence[int]) -> list[Tensor]:
    """Return the gradients of the scores, of alpha and, if given, of the values (1905.05702, 1909.00015).

    `given` holds the scores, the allowed keys, alpha, the row state of the forward pass and optionally the values.
    """
    s, allowed, alpha, kept, *values = given
    held = [] if not values else [_pad_channels(values[0]), torch.tensor(of)]
    made, of_alpha, of_values = s.new_empty(s.shape), s.new_empty(s.shape[:3]), [torch.zeros_like(t) for t in held[:1]]
    told = _entmax_args(s, allowed, alpha, held) | {
        RowNormaliserArgs.OUTPUT: made,
        RowNormaliserArgs.ROW_STATE: kept.contiguous(),
        RowNormaliserArgs.D_ALPHA: of_alpha,
    }
    told |= {
        RowNormaliserArgs.GRAD: _pad_channels(grad) if held else grad.contiguous(),
        RowNormaliserArgs.D_VALUES: of_values[0] if held else 0,
    }
    units = len(s) * held[0].shape[1] if held else _num_items(s)
    _launch_rows(ENTMAX_KERNELS, "backward", told, (units, NUM_ROW_LISTS))
    return [made, of_alpha.sum((0, 2)), *map(_unpad_channels, of_values, values)]


KernelArgs = dict[RowNormaliserArgs, Tensor | int]


def _score_args(s: Tensor, allowed: Tensor) -> KernelArgs:
    batch, heads, queries, keys = s.shape
    seen, count = allowed.expand(*allowed.shape[:3], keys).contiguous(), batch * heads * queries
    told: KernelArgs = {
        RowNormaliserArgs.SCORES: s.contiguous(),
        RowNormaliserArgs.MASK: seen,
        RowNormaliserArgs.H: heads,
        RowNormaliserArgs.T: queries,
        RowNormaliserArgs.S: keys,
        RowNormaliserArgs.NUM_ROWS: count,
    }
    told[RowNormaliserArgs.MASK_ROW_STRIDE] = keys * seen.shape[2] * (len(seen) > 1)
    return told | {RowNormaliserArgs.MASK_QUERY_STRIDE: keys * (seen.shape[2] > 1)}


def _entmax_args(s: Tensor, allowed: Tensor, alpha: Tensor, held: Sequence[Tensor]) -> KernelArgs:
    told = _score_args(s, allowed)
    told |= {
        RowNormaliserArgs.KEY_INDICES: torch.arange(s.shape[3] + SIMD_WIDTH, dtype=torch.int32),
        RowNormaliserArgs.ALPHA: alpha.contiguous(),
    }
    if held:
        told |= {
            RowNormaliserArgs.VALUES: held[0],
            RowNormaliserArgs.VALUE_HEAD_OF_HEAD: held[1],
            RowNormaliserArgs.G: held[0].shape[1],
            RowNormaliserArgs.V: held[0].shape[3],
        }
    return told


def _num_items(s: Tensor) -> int:
    """Return the number of work items, each of a few rows."""
    return -(-s.shape[:3].numel() // ROWS_PER_ITEM)


def _launch_rows(kernels: ParallelKernelSet, name: str, told: KernelArgs, work: tuple[int, int]) -> None:
    """Run `work[0]` work items, each with `work[1]` rows of scratch buffer."""
    given, (units, rows) = told[RowNormaliserArgs.SCORES], work
    assert isinstance(given, Tensor)
    desk = rows * (given.shape[3] // SIMD_WIDTH + 2) * SIMD_WIDTH
    kernels.launch(name, given.dtype, (units, desk), *(told.get(at, 0) for at in RowNormaliserArgs))


def _pad_channels(v: Tensor) -> Tensor:
    """Return v contiguous, with its channels padded to whole vectors."""
    lacking = -v.shape[-1] % SIMD_WIDTH
    return (F.pad(v, (0, lacking)) if lacking else v).contiguous()  # F.pad may return permuted strides


def _unpad_channels(t: Tensor, v: Tensor) -> Tensor:
    return t if t.shape[-1] == v.shape[-1] else t[..., : v.shape[-1]].contiguous()


@masked_softmax.register_fake
def _(s: Tensor, allowed: Tensor) -> Tensor:
    return torch.empty_like(s, memory_format=torch.contiguous_format)


@masked_entmax.register_fake
def _(s: Tensor, allowed: Tensor, alpha: Tensor, v: Tensor | None, of: Sequence[int]) -> tuple[Tensor, Tensor]:
    width = s.shape[3] if v is None else v.shape[3]
    return s.new_empty(*s.shape[:3], width), s.new_empty(*s.shape[:3], ROW_STATE_SIZE)


@masked_softmax_backward.register_fake
def _(grad: Tensor, w: Tensor) -> Tensor:
    return torch.empty_like(w, memory_format=torch.contiguous_format)


@masked_entmax_backward.register_fake
def _(grad: Tensor, given: Sequence[Tensor], of: Sequence[int]) -> list[Tensor]:
    s, values = given[0], given[4:]
    made = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (s, *values)]
    return [made[0], s.new_empty(s.shape[1]), *made[1:]]


def _save_softmax(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _softmax_autograd_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    forbid_double_backward(NO_DOUBLE_BACKWARD_REMEDY)
    return masked_softmax_backward(grad, ctx.saved_tensors[0]), None


def _save_entmax(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.of = inputs
    ctx.save_for_backward(*tensors, output[1])


def _entmax_autograd_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    forbid_double_backward(NO_DOUBLE_BACKWARD_REMEDY)
    s, allowed, alpha, v, kept = ctx.saved_tensors
    given = [s, allowed, alpha, kept] if v is None else [s, allowed, alpha, kept, v]
    of_scores, of_alpha, *of_values = masked_entmax_backward(grad, given, ctx.of)
    return of_scores, None, of_alpha, of_values[0] if of_values else None, None


masked_softmax.register_autograd(_softmax_autograd_backward, setup_context=_save_softmax)
masked_entmax.register_autograd(_entmax_autograd_backward, setup_context=_save_entmax)


@register_flop_formula(torch.ops.headwise.entmax)
def _entmax_flops(s: Any, allowed: Any, alpha: Any, v: Any, of: Any, **said: Any) -> int:
    """Count the full product of weights and values; which weights are zero is only known from the data."""
    return 0 if v is None else 2 * s[0] * s[1] * s[2] * s[3] * v[3]


@register_flop_formula(torch.ops.headwise.entmax_backward)
def _entmax_backward_flops(grad: Any, given: Any, of: Any, **said: Any) -> int:
    s, values = given[0], given[4:]
    return 4 * s[0] * s[1] * s[2] * s[3] * values[0][3] if values else 0
