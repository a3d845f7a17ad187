"""Attention within many short packed sequences, as a torch operation with gradients.

For each sequence, with its queries q, keys k and values v of one head:

    w = softmax(scale * q k^T)        o = w v        (causal: query t reads keys 0 to t)

In plain PyTorch this is one `F.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=causal,
enable_gqa=True)` per sequence, on transposed tensors. Queries and keys of a sequence may come from
different places, as in cross-attention.

`varlen_attention_kernel` holds the kernels and their loop order.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .autograd_guards import NO_DOUBLE_BACKWARD_REMEDY, forbid_double_backward
from .kernel_args import Int64Arg, ParallelKernelArgs, StridedArg, TensorArg
from .launch import COMPUTE_DTYPES, SIMD_WIDTH, ParallelKernelSet
from .operand_checks import FLOAT, OperandChecks, check_groups, check_indices, check_ranges


class VarlenArgs(ParallelKernelArgs):
    """Kernel arguments; strides count bytes. A work item is one sequence and one key head."""

    sequences: Int64Arg = (
        None  # [sequences, 4]: first query, number of queries, first key, number of keys
    )
    q: StridedArg = (
        None  # [tokens, num_kv_heads x group_size, dim], with its token and head strides
    )
    q_token_stride: int = 0
    q_head_stride: int = 0
    k: StridedArg = None  # [tokens, num_kv_heads, dim]
    k_token_stride: int = 0
    k_head_stride: int = 0
    v: StridedArg = None  # [tokens, num_kv_heads, vdim]
    v_token_stride: int = 0
    v_head_stride: int = 0
    num_kv_heads: int = 0
    group_size: int = 0  # query heads per key head
    dim: int = 0
    vdim: int = 0
    scale: float = 0.0
    causal: int = 0  # 1 if query t of a sequence reads only keys 0 to t
    output: TensorArg = (
        None  # forward the output [tokens, heads, vdim]; backward the gradient of the queries
    )
    grad: TensorArg = None  # [tokens, heads, vdim]
    d_k: TensorArg = None  # [tokens, num_kv_heads, dim]
    d_v: TensorArg = None  # [tokens, num_kv_heads, vdim]


def varlen_scratch_size(max_length: int, dim: int, vdim: int) -> int:
    """Return the scratch elements per thread: key indices, transposed keys and values, weights and
    their gradients.
    """
    padded_length = -(-max_length // SIMD_WIDTH) * SIMD_WIDTH
    return SIMD_WIDTH + padded_length * (dim + vdim + 2 * max_length)


VARLEN_KERNELS = ParallelKernelSet(
    "varlen_attention_kernel",
    COMPUTE_DTYPES,
    forward=("varlen_forward", VarlenArgs),
    backward=("varlen_backward", VarlenArgs),
)

# --- The operation `headwise::varlen_attention` ---------------------------------------------------

SequenceTable = tuple[Tensor, int]
CHECKS = OperandChecks(
    "varlen_attention",
    q=FLOAT + "N H K",
    k="M G K",
    v="M G V",
    sequences="int64: * 4",
    grad="N H V?",
)


@torch.library.custom_op("headwise::varlen_attention", mutates_args=(), device_types="cpu")
def attend_varlen(
    qkv: list[Tensor], sequences: Tensor, max_length: int, causal: bool, scale: float
) -> Tensor:
    """Return o [N, H, V], attention within each packed sequence, for q [N, H, K], k [M, G, K] and v
    [M, G, V].

    `sequences` [N, 4] holds for each sequence its first query, the number of queries, its first key
    and the number of keys; no number of queries or keys exceeds `max_length`. If `causal`, query t
    of a sequence reads its keys 0 to t.

    >>> ones = torch.ones(3, 1, 16)
    >>> attend_varlen(
    ...     [ones, ones, ones.cumsum(0)], torch.tensor([[0, 1, 0, 1], [1, 2, 1, 2]]), 2, True, 1.0
    ... )[:, 0, 0].tolist()
    [1.0, 2.0, 2.5]
    """
    _check_operands(qkv, sequences, max_length, None)
    (q, _, v), padded = qkv, [_pad_rows(t) for t in qkv]
    o = v.new_zeros(*q.shape[:2], padded[2].shape[2])
    args = _make_args(padded, (sequences, max_length), causal, scale).replace(output=o)
    VARLEN_KERNELS.launch("forward", o.dtype, args)
    return o if o.shape[2] == v.shape[2] else o[..., : v.shape[2]].contiguous()


@torch.library.custom_op("headwise::varlen_attention_backward", mutates_args=(), device_types="cpu")
def attend_varlen_backward(
    grad: Tensor, qkv: list[Tensor], sequences: Tensor, max_length: int, causal: bool, scale: float
) -> list[Tensor]:
    """Return the gradients of q, k and v."""
    _check_operands(qkv, sequences, max_length, grad)
    padded = [_pad_rows(t) for t in qkv]
    grads = d_q, d_k, d_v = [t.new_zeros(t.shape) for t in padded]
    args = _make_args(padded, (sequences, max_length), causal, scale)
    args = args.replace(output=d_q, grad=_pad_rows(grad).contiguous(), d_k=d_k, d_v=d_v)
    VARLEN_KERNELS.launch("backward", d_q.dtype, args)
    return [
        d if d.shape == t.shape else d[..., : t.shape[2]].contiguous()
        for d, t in zip(grads, qkv, strict=True)
    ]


def _check_operands(
    qkv: list[Tensor], sequences: Tensor, max_length: int, grad: Tensor | None
) -> None:
    """Raise ValueError for tensors that do not fit each other, or sequences outside them."""
    CHECKS.check(*qkv, sequences, grad)
    check_groups("varlen_attention", qkv[0].shape[1], qkv[1].shape[1])
    first_query, queries, first_key, keys = sequences.unbind(1)
    check_ranges("varlen_attention", "sequences", first_query, queries, len(qkv[0]))
    check_ranges("varlen_attention", "sequences", first_key, keys, len(qkv[1]))
    check_indices(
        "varlen_attention", "the lengths of sequences", sequences[:, 1::2], max_length + 1
    )


def _pad_rows(t: Tensor) -> Tensor:
    """Return t with its channels padded to whole vectors and adjacent in memory."""
    padding = -t.shape[2] % SIMD_WIDTH
    t = F.pad(t, (0, padding)) if padding else t
    return t if t.stride(2) == 1 else t.contiguous()


def _make_args(
    qkv: list[Tensor], sequence_table: SequenceTable, causal: bool, scale: float
) -> VarlenArgs:
    """Return the kernel arguments of a call, without the tensors that the kernel writes."""
    (sequences, max_length), (q, k, v) = sequence_table, qkv
    itemsize, num_kv_heads = q.itemsize, k.shape[1]
    return VarlenArgs.make(
        num_items=len(sequences) * num_kv_heads,
        scratch_bytes=varlen_scratch_size(max_length, k.shape[2], v.shape[2]) * itemsize,
        sequences=sequences,
        q=q,
        q_token_stride=q.stride(0) * itemsize,
        q_head_stride=q.stride(1) * itemsize,
        k=k,
        k_token_stride=k.stride(0) * itemsize,
        k_head_stride=k.stride(1) * itemsize,
        v=v,
        v_token_stride=v.stride(0) * itemsize,
        v_head_stride=v.stride(1) * itemsize,
        num_kv_heads=num_kv_heads,
        group_size=q.shape[1] // num_kv_heads,
        dim=k.shape[2],
        vdim=v.shape[2],
        scale=scale,
        causal=int(causal),
    )


@attend_varlen.register_fake
def _(qkv: list[Tensor], sequences: Tensor, max_length: int, causal: bool, scale: float) -> Tensor:
    return qkv[2].new_empty(*qkv[0].shape[:2], qkv[2].shape[2])


@attend_varlen_backward.register_fake
def _(
    grad: Tensor, qkv: list[Tensor], sequences: Tensor, max_length: int, causal: bool, scale: float
) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in qkv]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    qkv, sequences, *ctx.options = inputs
    ctx.save_for_backward(sequences, *qkv)


def _varlen_autograd_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    forbid_double_backward(NO_DOUBLE_BACKWARD_REMEDY)
    sequences, *qkv = ctx.saved_tensors
    return attend_varlen_backward(grad, qkv, sequences, *ctx.options), None, None, None, None


attend_varlen.register_autograd(_varlen_autograd_backward, setup_context=_save_for_backward)


def _count_products(qkv: list[Tensor], sequences: Tensor) -> tuple[int, int, int]:
    """Return 2 x (pairs of all heads), the channels of a query and those of a value."""
    pairs = int((sequences[:, 1] * sequences[:, 3]).sum()) * qkv[0].shape[1]
    return 2 * pairs, qkv[0].shape[2], qkv[2].shape[2]


@register_flop_formula(torch.ops.headwise.varlen_attention, get_raw=True)
def _varlen_flops(qkv: Any, sequences: Any, *args: Any, **kwargs: Any) -> int:
    products, dim, vdim = _count_products(qkv, sequences)
    return products * (dim + vdim)


@register_flop_formula(torch.ops.headwise.varlen_attention_backward, get_raw=True)
def _varlen_backward_flops(grad: Any, qkv: Any, sequences: Any, *args: Any, **kwargs: Any) -> int:
    """Count the recomputed scores, and two gradients for each of the two products."""
    products, dim, vdim = _count_products(qkv, sequences)
    return products * (3 * dim + 2 * vdim)
