"""Masked softmax and entmax over rows of scores, as torch operations with gradients.

`masked_softmax(s, allowed)` equals `s.masked_fill(~allowed, -inf).softmax(-1)`, except that a row
without allowed keys is zero rather than NaN. `masked_entmax` computes alpha-entmax (1905.05702)
with one alpha per head:

    w[j] = max((alpha - 1) s[j] - tau, 0) ^ (1 / (alpha - 1)),  with tau such that sum_j w[j] = 1

alpha = 2 is sparsemax, alpha -> 1 softmax. With values it returns w @ v and never stores w, because
it is mostly zero. `row_normaliser_kernels` holds the kernels and their loop order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import row_normaliser_triton
from .launch import (
    COMPUTE_DTYPES,
    SIMD_WIDTH,
    ParallelKernelArgs,
    ParallelKernelSet,
    TensorArg,
    pad_to_simd,
    unpad,
)
from .operand_checks import (
    FLOAT,
    NO_DOUBLE_BACKWARD_REMEDY,
    OperandChecks,
    forbid_double_backward,
    is_under_functorch,
    refuse_operands,
)

ROWS_PER_ITEM = 8  # rows per work item
NUM_ROW_LISTS = 5  # lists in a scratch buffer: row, candidates, slopes, gradients, key indices
ROW_STATE_SIZE = 2  # maximum and tau, from which a row is recomputed


class RowNormaliserArgs(ParallelKernelArgs):
    """Kernel arguments of softmax and entmax. A work item is a few rows; strides count elements."""

    scores: TensorArg = None  # [B, H, T, S]
    # forward weights, or weighted values [B, H, T, V]; backward the gradient of scores
    output: TensorArg = None
    mask: TensorArg = None  # [1 or B, 1, 1 or T, S]; None if every key is allowed
    mask_row_stride: int = 0  # to the next row of the batch, and to the next query
    mask_query_stride: int = 0
    num_heads: int = 0  # H
    num_queries: int = 0  # T
    num_keys: int = 0  # S
    num_rows: int = 0  # B H T
    # 0, 1, 2, ... for each key; this field and the following ones are used by entmax only
    key_indices: TensorArg = None
    alpha: TensorArg = None  # [H]
    row_state: TensorArg = None  # [B, H, T, 2]: maximum and tau of each row, for the backward pass
    # [B, G, S, V], V padded to whole vectors; None to return the weights themselves
    values: TensorArg = None
    value_head_of_head: TensorArg = None  # [H]: the value head that each head reads
    num_value_heads: int = 0  # G
    value_dim: int = 0  # V
    grad: TensorArg = None  # backward: gradient of the output
    d_values: TensorArg = None
    d_alpha: TensorArg = None  # [B, H, T]


SOFTMAX_KERNELS = ParallelKernelSet(
    "row_normaliser_kernels", COMPUTE_DTYPES, softmax=("softmax_kernel", RowNormaliserArgs)
)
ENTMAX_KERNELS = ParallelKernelSet(
    "row_normaliser_kernels",
    COMPUTE_DTYPES,
    forward=("entmax_forward_kernel", RowNormaliserArgs),
    backward=("entmax_backward_kernel", RowNormaliserArgs),
)
MASK_FORM = "bool: 1|B 1 1|T 1|S"
SOFTMAX_CHECKS = OperandChecks("masked_softmax", s=FLOAT + "B H T S", allowed=MASK_FORM)
ENTMAX_CHECKS = OperandChecks(
    "masked_entmax",
    s=FLOAT + "B H T S",
    allowed=MASK_FORM,
    alpha="H",
    v="B G S V?",
    row_state="B H T 2?",
    grad="B H T *?",
)


@torch.library.custom_op("headwise::masked_softmax", mutates_args=(), device_types="cpu")
def masked_softmax(s: Tensor, allowed: Tensor) -> Tensor:
    """Return the softmax of s [B, H, T, S] over the allowed keys; rows without any are zero.

    `allowed` is [1 or B, 1, 1 or T, S].
    """
    SOFTMAX_CHECKS.check(s, allowed)
    w = s.new_empty(s.shape)
    SOFTMAX_KERNELS.launch(
        "softmax", s.dtype, _score_args(s, allowed, num_lists=1).replace(output=w)
    )
    return w


@torch.library.custom_op("headwise::masked_entmax", mutates_args=(), device_types="cpu")
def masked_entmax(
    s: Tensor, allowed: Tensor, alpha: Tensor, v: Tensor | None, value_heads: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return the entmax of s [B, H, T, S] over allowed [1 or B, 1, 1 or T, S], with one alpha per
    head.

    With values v [B, G, S, V] it returns the weighted values [B, H, T, V] instead, where head h
    reads v[:, value_heads[h]]. The second output, [B, H, T, 2], holds each row's maximum and tau,
    from which the backward pass recomputes the row.
    """
    _check_entmax_operands(s, allowed, alpha, v, value_heads)
    args = _entmax_args(s, allowed, alpha, v, value_heads)
    row_state = s.new_empty(*s.shape[:3], ROW_STATE_SIZE)
    width = s.shape[3] if v is None else args.value_dim
    output = s.new_empty(*s.shape[:3], width)
    if not s.shape[3]:
        output.zero_()  # values without keys have no memory, which the kernel takes for no values
    ENTMAX_KERNELS.launch("forward", s.dtype, args.replace(output=output, row_state=row_state))
    return output if v is None else unpad(output, v.shape[-1]), row_state


@torch.library.custom_op("headwise::masked_entmax_backward", mutates_args=(), device_types="cpu")
def masked_entmax_backward(
    grad: Tensor, tensors: Sequence[Tensor], value_heads: Sequence[int]
) -> list[Tensor]:
    """Return the gradients of the scores, of alpha and, if there are any, of the values
    (1905.05702, 1909.00015).

    `tensors` holds the scores, the allowed keys, alpha, the row state of the forward pass and
    optionally the values.
    """
    s, allowed, alpha, row_state, *values = tensors
    _check_entmax_operands(
        s, allowed, alpha, values[0] if values else None, value_heads, row_state, grad
    )
    args = _entmax_args(s, allowed, alpha, values[0] if values else None, value_heads)
    d_scores = s.new_empty(s.shape)
    d_alpha = s.new_empty(s.shape[:3])
    args = args.replace(output=d_scores, row_state=row_state.contiguous(), d_alpha=d_alpha)
    if not values:
        ENTMAX_KERNELS.launch("backward", s.dtype, args.replace(grad=grad.contiguous()))
        return [d_scores, d_alpha.sum((0, 2))]
    d_values = s.new_zeros(*values[0].shape[:3], args.value_dim)
    # A work item is all rows that read one value head, so that only one thread adds to its
    # gradients.
    args = args.replace(
        num_items=len(s) * args.num_value_heads, grad=pad_to_simd(grad), d_values=d_values
    )
    ENTMAX_KERNELS.launch("backward", s.dtype, args)
    return [d_scores, d_alpha.sum((0, 2)), unpad(d_values, values[0].shape[-1])]


def _check_entmax_operands(
    s: Tensor,
    allowed: Tensor,
    alpha: Tensor,
    v: Tensor | None,
    value_heads: Sequence[int],
    *state: Tensor,
) -> None:
    """Raise ValueError for tensors that do not fit each other; `state` is row state and gradient of
    a backward pass.
    """
    ENTMAX_CHECKS.check(s, allowed, alpha, v, *(state or (None, None)))
    if v is not None and (
        len(value_heads) != s.shape[1] or not set(value_heads) <= set(range(v.shape[1]))
    ):
        fact = f"value_heads is {list(value_heads)}"
        refuse_operands(
            "masked_entmax", fact, f"give {s.shape[1]} numbers from 0 to {v.shape[1] - 1}"
        )
    width = s.shape[3] if v is None else v.shape[3]
    if state and state[1].shape[3] != width:
        refuse_operands("masked_entmax", f"grad is {list(state[1].shape)}", f"give [..., {width}]")


def _score_args(s: Tensor, allowed: Tensor, num_lists: int) -> RowNormaliserArgs:
    """Return the arguments of softmax, without its output; a scratch buffer
    holds `num_lists` rows.
    """
    (_, heads, queries, keys) = s.shape
    num_rows = s.shape[:3].numel()
    mask = allowed.expand(*allowed.shape[:3], keys).contiguous()
    return RowNormaliserArgs.make(
        num_items=-(-num_rows // ROWS_PER_ITEM),
        scratch_bytes=num_lists * (keys // SIMD_WIDTH + 2) * SIMD_WIDTH * s.itemsize,
        scores=s.contiguous(),
        mask=mask,
        mask_row_stride=keys * mask.shape[2] * (len(mask) > 1),
        mask_query_stride=keys * (mask.shape[2] > 1),
        num_heads=heads,
        num_queries=queries,
        num_keys=keys,
        num_rows=num_rows,
    )


def _entmax_args(
    s: Tensor, allowed: Tensor, alpha: Tensor, v: Tensor | None, value_heads: Sequence[int]
) -> RowNormaliserArgs:
    """Return the arguments of entmax, without the tensors that it writes."""
    args = _score_args(s, allowed, NUM_ROW_LISTS)
    indices = torch.arange(s.shape[3] + SIMD_WIDTH, dtype=torch.int32)
    args = args.replace(key_indices=indices, alpha=alpha.contiguous())
    if v is None:
        return args
    values = pad_to_simd(v)
    return args.replace(
        values=values,
        value_head_of_head=torch.tensor(value_heads),
        num_value_heads=values.shape[1],
        value_dim=values.shape[3],
    )


@masked_entmax.register_kernel("cuda")
def _(
    s: Tensor, allowed: Tensor, alpha: Tensor, v: Tensor | None, value_heads: Sequence[int]
) -> tuple[Tensor, Tensor]:
    _refuse_values(v)
    _check_entmax_operands(s, allowed, alpha, v, value_heads)
    return row_normaliser_triton.entmax(s, allowed, alpha)


@masked_entmax_backward.register_kernel("cuda")
def _(grad: Tensor, tensors: Sequence[Tensor], value_heads: Sequence[int]) -> list[Tensor]:
    s, allowed, alpha, row_state, *values = tensors
    _refuse_values(*values)
    _check_entmax_operands(s, allowed, alpha, None, value_heads, row_state, grad)
    return row_normaliser_triton.entmax_backward(grad, s, allowed, alpha, row_state)


def _refuse_values(v: Tensor | None = None) -> None:
    if v is not None:
        refuse_operands("masked_entmax", "v is given on a GPU", "multiply the weights by v")


def can_run_entmax(s: Tensor) -> bool:
    """Return True if a kernel of this device computes the entmax of these scores."""
    if s.is_cpu:
        return ENTMAX_KERNELS.can_run(s)
    return row_normaliser_triton.can_normalise(s) and not is_under_functorch()


@masked_softmax.register_fake
def _(s: Tensor, allowed: Tensor) -> Tensor:
    return torch.empty_like(s, memory_format=torch.contiguous_format)


@masked_entmax.register_fake
def _(
    s: Tensor, allowed: Tensor, alpha: Tensor, v: Tensor | None, value_heads: Sequence[int]
) -> tuple[Tensor, Tensor]:
    width = s.shape[3] if v is None else v.shape[3]
    return s.new_empty(*s.shape[:3], width), s.new_empty(*s.shape[:3], ROW_STATE_SIZE)


@masked_entmax_backward.register_fake
def _(grad: Tensor, tensors: Sequence[Tensor], value_heads: Sequence[int]) -> list[Tensor]:
    s = tensors[0]
    values = tensors[4:]
    grads = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (s, *values)]
    return [grads[0], s.new_empty(s.shape[1]), *grads[1:]]


def _save_softmax(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _softmax_autograd_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    forbid_double_backward(NO_DOUBLE_BACKWARD_REMEDY)
    w = ctx.saved_tensors[0]
    return torch.ops.aten._softmax_backward_data(grad, w, -1, w.dtype), None


def _save_entmax(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.value_heads = inputs
    ctx.save_for_backward(*tensors, output[1])


def _entmax_autograd_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    forbid_double_backward(NO_DOUBLE_BACKWARD_REMEDY)
    s, allowed, alpha, v, row_state = ctx.saved_tensors
    tensors = [s, allowed, alpha, row_state] if v is None else [s, allowed, alpha, row_state, v]
    d_scores, d_alpha, *d_values = masked_entmax_backward(grad, tensors, ctx.value_heads)
    return d_scores, None, d_alpha, d_values[0] if d_values else None, None


masked_softmax.register_autograd(_softmax_autograd_backward, setup_context=_save_softmax)
masked_entmax.register_autograd(_entmax_autograd_backward, setup_context=_save_entmax)


@register_flop_formula(torch.ops.headwise.masked_entmax)
def _entmax_flops(s: Any, allowed: Any, alpha: Any, v: Any, value_heads: Any, **kwargs: Any) -> int:
    """Count the full product of weights and values; which weights are zero is only known from the
    data.
    """
    return 0 if v is None else 2 * s[0] * s[1] * s[2] * s[3] * v[3]


@register_flop_formula(torch.ops.headwise.masked_entmax_backward)
def _entmax_backward_flops(grad: Any, tensors: Any, value_heads: Any, **kwargs: Any) -> int:
    s = tensors[0]
    values = tensors[4:]
    return 4 * s[0] * s[1] * s[2] * s[3] * values[0][3] if values else 0
