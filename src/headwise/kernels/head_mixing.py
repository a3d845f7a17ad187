"""Dynamically composed attention heads (2405.08553): mix scores or weights across heads by low-rank factors.

With factors of the query (qs, qt, qg) and of the key (ks, kt, kg), for each query t and key s:

    out[o] = a[own[o]] (qg[o] + kg[o]) + sum_r (sum_h a[h] qs[r, h]) qt[r, o] + sum_r (sum_h a[h] ks[r, h]) kt[r, o]

In plain PyTorch, for one group of heads:

    out = a[:, own] * (qg.movedim(-1, 1)[..., None] + kg.transpose(1, 2))
    out += torch.einsum("bhts,btrh,btro->bots", a, qs, qt) + torch.einsum("bhts,brhs,bros->bots", a, ks, kt)

`head_mixing_kernel` holds the kernels and their loop order.
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
from .launch import COMPUTE_DTYPES, FIRST_KERNEL_ARG, SIMD_WIDTH, ParallelKernelSet

KEY_TILE_SIZE = 64


class HeadMixingArgs(IntEnum):
    """Kernel arguments: indices into an int64 array. Addresses count bytes, sizes count elements."""

    Q_SOURCE = FIRST_KERNEL_ARG  # [B, T, R, H]; R is 0 for a side without factors
    Q_TARGET = auto()  # [B, T, R, O]
    Q_GATE = auto()  # [B, T, O]: factor of the head itself, 1 + g
    K_SOURCE = auto()  # [B, R H, S]
    K_TARGET = auto()  # [B, R O, S]
    K_GATE = auto()  # [B, O, S]
    INPUT = auto()  # [B, H, T, S]
    HEAD_OF_OUTPUT = auto()  # [O], int64
    H = auto()
    NUM_OUTPUT_HEADS = auto()
    T = auto()
    S = auto()
    Q_RANKS = auto()
    K_RANKS = auto()
    NUM_KEY_GATES = auto()  # NUM_OUTPUT_HEADS, or 0 if keys have no factors
    HEADS_PER_GROUP = auto()  # heads per group
    OUTPUT = auto()  # forward the output [B, O, T, S]; backward the gradient of the input
    GRAD = auto()  # [B, O, T, S]
    D_Q_SOURCE = auto()  # gradients of query factors, once per tile: [B, tiles, T, R, H]
    D_Q_TARGET = auto()
    D_Q_GATE = auto()
    D_K_SOURCE = auto()
    D_K_TARGET = auto()
    D_K_GATE = auto()


def head_mixing_scratch_size(heads: int, num_output_heads: int, q_ranks: int, k_ranks: int) -> int:
    """Return the scratch elements per thread: scores, key factors, their gradients and sums of query gradients."""
    return 2 * KEY_TILE_SIZE * (
        heads + num_output_heads + k_ranks * (heads + num_output_heads) + num_output_heads
    ) + SIMD_WIDTH * (num_output_heads + q_ranks * (heads + num_output_heads))


HEAD_MIXING_KERNELS = ParallelKernelSet(
    "head_mixing_kernel", COMPUTE_DTYPES, forward="head_mixing_forward", backward="head_mixing_backward"
)

# --- The operation `headwise::composed` ----------------------------------------------------------------


def can_use_kernels(a_BHTS: Tensor) -> bool:
    """Return True if the kernels may run on these scores: float32 or float64 on the CPU, outside torch.func."""
    if a_BHTS.device.type != "cpu" or a_BHTS.dtype not in COMPUTE_DTYPES or is_under_functorch():
        return False
    return HEAD_MIXING_KERNELS.is_usable(a_BHTS.dtype)


@torch.library.custom_op("headwise::composed", mutates_args=(), device_types="cpu")
def mix_heads_by_factors(a: Tensor, head_of_output: Tensor, heads_per_group: int, factors: list[Tensor]) -> Tensor:
    """Return [B, O, T, S], the heads a [B, H, T, S] mixed by the factors of queries and keys.

    The factors of queries are qs [B, T, R, H], qt [B, T, R, O] and qg [B, T, O], those of keys ks [B, R, H, S], kt [B,
    R, O, S] and kg [B, 1, O, S]. A side without factors has size 0 instead of R, and instead of the 1 of kg. Heads are
    mixed within groups of `heads_per_group`. The formula stands at the top of this module.
    """
    keys = a.shape[3]
    given = _padded_inputs(a, head_of_output, factors)
    a = given[6]
    out = a.new_empty(a.shape[0], head_of_output.shape[0], *a.shape[2:])
    _launch_head_mixing("forward", given, heads_per_group, out)
    return _unpad_keys(out, keys)


@torch.library.custom_op("headwise::composed_backward", mutates_args=(), device_types="cpu")
def mix_heads_by_factors_backward(
    grad: Tensor, a: Tensor, own: Tensor, each: int, factors: list[Tensor]
) -> list[Tensor]:
    """Return the gradients of a and of the six factors."""
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
    """Return t contiguous, with its keys padded to whole vectors."""
    lacking = -t.shape[-1] % SIMD_WIDTH
    return (F.pad(t, (0, lacking)) if lacking else t).contiguous()  # F.pad may return permuted strides


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
    """Count the rank products computed again, and two gradients for each product with factors."""
    batch, heads, queries, keys = a
    return 2 * batch * queries * keys * (factors[0][2] + factors[3][1]) * (3 * heads + 2 * own[0])
