"""Queries from anywhere that read the keys from a first to a last of their own, as an operation of torch with a
gradient of its own."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from struct import pack
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .compiled import FIRST_KERNEL_ARG, NUM_ITEMS_ARG
from .lanes import round_up_to_simd
from .orders import NO_DOUBLE_BACKWARD_REMEDY, forbid_double_backward
from .reading import FlashAttentionArgs, flash_scratch_size
from .rereading import FLASH_ATTENTION_KERNELS
from .tiles import GEMM_ROW_PADDING

KernelTable = array
TENSOR_ARGS = tuple(map(int, (FlashAttentionArgs.Q, FlashAttentionArgs.K, FlashAttentionArgs.V, FlashAttentionArgs.OUT, FlashAttentionArgs.LSE, FlashAttentionArgs.GRAD, FlashAttentionArgs.D_Q, FlashAttentionArgs.D_K, FlashAttentionArgs.D_V)))
MAX_INDEX_BY_DTYPE = {torch.float32: 2**24, torch.float64: 2**53}  # keys whose numbers are known exactly


@torch.library.custom_op("headwise::read_lines", mutates_args=(), device_types="cpu")
def gathered_attention(q: Tensor, k: Tensor, v: Tensor, told: list[Tensor], scale: float, formed: int) -> list[Tensor]:
    """What some of the queries q [B, T, H, dim] read of k and v [B, S, G, dim or vdim], zeros for others, and the
    log-sum-exp of their scores, [B, T, H].

    `told` are all int64: the lines, where those queries stand among all (b, t, h), by row and key head; the ends
    [1 or B, T, 2], the first key that a token reads and the one behind its last; and the units of work forth and back,
    as `reading.At.TOLD` says. `formed` is how many pairs are formed, for whoever counts.
    """
    return [*run_forward(q, k, v, told, scale, q.new_zeros)]


@torch.library.custom_op("headwise::read_lines_backward", mutates_args=(), device_types="cpu")
def gathered_attention_backward(
    grad: Tensor, given: list[Tensor], told: list[Tensor], scale: float, formed: int
) -> list[Tensor]:
    """The gradients of q, k and v; `given` are these, what was read, and the log-sum-exp."""
    return [*run_backward(grad, given, told, scale, given[0].new_zeros)]


def run_forward(
    q: Tensor, k: Tensor, v: Tensor, told: list[Tensor], scale: float, make: Callable[..., Tensor]
) -> tuple[Tensor, Tensor]:
    """What queries read, and the log-sum-exp of their scores, where `make` makes room for these."""
    q, k, v = make_contiguous(q, k, v)
    o, lse = make(*q.shape[:3], v.shape[-1]), make(q.shape[:3])
    lines, ends, units, _ = told
    launch_flash_kernel("forward", make_kernel_table(q, k, v, (units, lines, ends), scale), q, k, v, o, lse)
    return o, lse


def run_backward(
    grad: Tensor, given: list[Tensor], told: list[Tensor], scale: float, make: Callable[..., Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, where `make` makes room for those of queries."""
    q, k, v, o, lse = given
    q, k, v = make_contiguous(q, k, v)
    lines, ends, _, units = told
    grads = allocate_gradients(q, k, v, len(units) // (len(k) * k.shape[2]), make)
    known = make_kernel_table(q, k, v, (units, lines, ends), scale)
    launch_flash_kernel("backward", known, q, k, v, o, lse, grad.contiguous(), *grads)
    return reduce_gradients(grads, k, v)


def make_contiguous(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries that lie one behind the other, keys and values with the numbers of a head side by side."""
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    return q.contiguous(), k, v


def make_kernel_table(q: Tensor, k: Tensor, v: Tensor, told: tuple[Tensor, ...], scale: float) -> KernelTable:
    """What the kernel is told of a call, but where its tensors lie."""
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; give all in one")
    if k.shape[1] > MAX_INDEX_BY_DTYPE[q.dtype]:
        raise ValueError(f"{k.shape[1]:,} keys are more than {MAX_INDEX_BY_DTYPE[q.dtype]:,} in {q.dtype}; use another backend")
    units, lines, ends = told
    numbers, size = array("q", [0] * (len(FlashAttentionArgs) + FIRST_KERNEL_ARG)), q.element_size()
    sizes = [*q.shape[1:3], *k.shape[1:3], q.shape[3], v.shape[3]]
    strides = [step * size for t in (k, v) for step in t.stride()[:3]]
    numbers[NUM_ITEMS_ARG], numbers[NUM_ITEMS_ARG + 2] = len(units), flash_scratch_size(q.shape[3], v.shape[3]) * size
    lie = [units.data_ptr(), lines.data_ptr(), ends.data_ptr(), len(ends)]
    numbers[FlashAttentionArgs.WORK_ITEMS : FlashAttentionArgs.NUM_KEY_RANGE_ROWS + 1] = array("q", lie)
    numbers[FlashAttentionArgs.SCALE : FlashAttentionArgs.SCALE + 1] = array("q", pack("d" if size == 8 else "f4x", scale))
    numbers[FlashAttentionArgs.T : FlashAttentionArgs.V_HEAD_STRIDE + 1] = array("q", sizes + strides)
    numbers[FlashAttentionArgs.NUM_QUERY_ROWS], numbers[FlashAttentionArgs.PADDED_KEYS] = q.shape[:3].numel(), k.shape[1] + GEMM_ROW_PADDING
    return numbers


def launch_flash_kernel(which: str, known: KernelTable, *tensors: Tensor) -> None:
    """Tell the kernel where q, k, v, what is read and its log-sum-exp lie, backwards also gradients, and run it.

    All of these are held until it is done: some of them nobody else may hold.
    """
    for at, tensor in zip(TENSOR_ARGS, tensors, strict=False):
        known[at] = tensor.data_ptr()
    FLASH_ATTENTION_KERNELS.launch_table(which, tensors[0].dtype, known)


def allocate_gradients(q: Tensor, k: Tensor, v: Tensor, parts: int, make: Callable[..., Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the gradients of queries, once for each part of the keys, and for those of keys and values."""
    batch, keys, groups, _ = k.shape
    d_k, d_v = (t.new_empty(batch, groups, keys + GEMM_ROW_PADDING, round_up_to_simd(t.shape[3])) for t in (k, v))
    return make(parts, *q.shape), d_k, d_v


def reduce_gradients(grads: tuple[Tensor, Tensor, Tensor], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries added up over parts, those of keys and values as the caller's lie."""
    d_q, *others = grads
    d_k, d_v = (d[:, :, : t.shape[1], : t.shape[3]].transpose(1, 2) for d, t in zip(others, (k, v), strict=True))
    return d_q.sum(0) if len(d_q) > 1 else d_q[0], d_k, d_v


@gathered_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, told: list[Tensor], scale: float, formed: int) -> list[Tensor]:
    return [q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3])]


@gathered_attention_backward.register_fake
def _(grad: Tensor, given: list[Tensor], told: list[Tensor], scale: float, formed: int) -> list[Tensor]:
    q, k, v, *_ = given
    return [*reduce_gradients(allocate_gradients(q, k, v, 1, q.new_empty), k, v)]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    q, k, v, told, ctx.scale, ctx.num_pairs = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, *told)


def _gathered_attention_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    forbid_double_backward(NO_DOUBLE_BACKWARD_REMEDY)
    saved = list(ctx.saved_tensors)  # asked once: a checkpoint hands each out no second time
    told = saved[5:]
    d_q, d_k, d_v = gathered_attention_backward(grads[0], saved[:5], told, ctx.scale, ctx.num_pairs)
    return d_q, d_k, d_v, [None] * len(told), None, None


gathered_attention.register_autograd(_gathered_attention_backward, setup_context=_save_for_backward)


@register_flop_formula(torch.ops.headwise.read_lines)
def _gathered_attention_flops(q: Any, k: Any, v: Any, told: Any, scale: float, formed: int, **said: Any) -> int:
    return 2 * formed * (q[3] + v[3])


@register_flop_formula(torch.ops.headwise.read_lines_backward)
def _gathered_attention_backward_flops(grad: Any, given: Any, told: Any, scale: float, formed: int, **said: Any) -> int:
    """The scores once more, and of both products the gradients of both."""
    q, _, v, *_ = given
    return 2 * formed * (3 * q[3] + 2 * v[3])
