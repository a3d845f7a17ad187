"""Dynamically composed attention heads (2405.08553): mix scores or weights across heads by low-rank
factors.

With factors of the query (qs, qt, qg) and of the key (ks, kt, kg), for each query t and key s:

    out[o] = a[head_of_output[o]] (qg[o] + kg[o])
             + sum_r (sum_h a[h] qs[r, h]) qt[r, o] + sum_r (sum_h a[h] ks[r, h]) kt[r, o]

In plain PyTorch, for one group of heads:

    out = a[:, head_of_output] * (qg.movedim(-1, 1)[..., None] + kg.transpose(1, 2)) out +=
    torch.einsum("bhts,btrh,btro->bots", a, qs, qt) + torch.einsum("bhts,brhs,bros->bots", a, ks,
    kt)

`head_mixing_kernel` holds the kernels and their loop order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import head_mixing_triton
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
    check_indices,
    forbid_double_backward,
    is_under_functorch,
    refuse_operands,
)

KEY_TILE_SIZE = 64


class HeadMixingArgs(ParallelKernelArgs):
    """Kernel arguments. A work item is a tile of keys of one batch row.

    R is 0 for a side without factors.
    """

    q_source: TensorArg = None  # [B, T, R, H]
    q_target: TensorArg = None  # [B, T, R, O]
    q_gate: TensorArg = None  # [B, T, O]: factor of the head itself, 1 + g
    k_source: TensorArg = None  # [B, R H, S]
    k_target: TensorArg = None  # [B, R O, S]
    k_gate: TensorArg = None  # [B, O, S]
    input: TensorArg = None  # [B, H, T, S]
    head_of_output: TensorArg = None  # [O]
    num_heads: int = 0  # H
    num_output_heads: int = 0  # O
    num_queries: int = 0  # T
    num_keys: int = 0  # S
    q_ranks: int = 0
    k_ranks: int = 0
    num_key_gates: int = 0  # num_output_heads, or 0 if keys have no factors
    heads_per_group: int = 0
    output: TensorArg = None  # forward the output [B, O, T, S]; backward the gradient of the input
    grad: TensorArg = None  # [B, O, T, S]
    d_q_source: TensorArg = None  # gradients of query factors, once per tile: [B, tiles, T, R, H]
    d_q_target: TensorArg = None
    d_q_gate: TensorArg = None
    d_k_source: TensorArg = None
    d_k_target: TensorArg = None
    d_k_gate: TensorArg = None


def head_mixing_scratch_size(heads: int, num_output_heads: int, q_ranks: int, k_ranks: int) -> int:
    """Return the scratch elements per thread: scores, key factors, their gradients and sums of
    query gradients.
    """
    return 2 * KEY_TILE_SIZE * (
        heads + num_output_heads + k_ranks * (heads + num_output_heads) + num_output_heads
    ) + SIMD_WIDTH * (num_output_heads + q_ranks * (heads + num_output_heads))


HEAD_MIXING_KERNELS = ParallelKernelSet(
    "head_mixing_kernel",
    COMPUTE_DTYPES,
    forward=("head_mixing_forward", HeadMixingArgs),
    backward=("head_mixing_backward", HeadMixingArgs),
)

# --- The operation `headwise::head_mixing` --------------------------------------------------------

OPERANDS = {
    "head_of_output": "int64: O",
    "q_source": "B T Q H",
    "q_target": "B T Q O",
    "q_gate": "B T O",
    "k_source": "B R H S",
    "k_target": "B R O S",
    "k_gate": "B 0|1 O S",
    "grad": "B O T S?",
}
CHECKS = OperandChecks("head_mixing", a=FLOAT + "B H T S", **OPERANDS)
GPU_CHECKS = OperandChecks("head_mixing", a="float32 float16 bfloat16: B H T S", **OPERANDS)


@torch.library.custom_op("headwise::head_mixing", mutates_args=(), device_types="cpu")
def mix_heads_by_factors(
    a: Tensor, head_of_output: Tensor, heads_per_group: int, factors: list[Tensor]
) -> Tensor:
    """Return [B, O, T, S], the heads a [B, H, T, S] mixed by the factors of queries and keys.

    Query factors are qs [B, T, R, H], qt [B, T, R, O] and qg [B, T, O]; key factors are ks
    [B, R, H, S], kt [B, R, O, S] and kg [B, 1, O, S]. A side without factors has size 0 instead of
    R, and instead of the 1 of kg. Heads are mixed within groups of `heads_per_group`. The module
    docstring has the formula.
    """
    _check_operands(a, head_of_output, heads_per_group, factors, None)
    args = _make_args(a, head_of_output, heads_per_group, factors)
    output = a.new_empty(a.shape[0], head_of_output.shape[0], a.shape[2], args.num_keys)
    HEAD_MIXING_KERNELS.launch("forward", a.dtype, args.replace(output=output))
    return unpad(output, a.shape[3])


@torch.library.custom_op("headwise::head_mixing_backward", mutates_args=(), device_types="cpu")
def mix_heads_by_factors_backward(
    grad: Tensor, a: Tensor, head_of_output: Tensor, heads_per_group: int, factors: list[Tensor]
) -> list[Tensor]:
    """Return the gradients of a and of the six factors."""
    _check_operands(a, head_of_output, heads_per_group, factors, grad)
    args = _make_args(a, head_of_output, heads_per_group, factors)
    padded_keys = args.num_keys
    tiles = -(-padded_keys // KEY_TILE_SIZE)
    d_a = a.new_empty(*a.shape[:3], padded_keys)
    d_queries = [t.new_empty(len(t), tiles, *t.shape[1:]) for t in factors[:3]]
    d_keys = [t.new_empty(*t.shape[:-1], padded_keys) for t in factors[3:]]
    args = args.replace(
        output=d_a,
        grad=pad_to_simd(grad),
        d_q_source=d_queries[0],
        d_q_target=d_queries[1],
        d_q_gate=d_queries[2],
        d_k_source=d_keys[0],
        d_k_target=d_keys[1],
        d_k_gate=d_keys[2],
    )
    HEAD_MIXING_KERNELS.launch("backward", a.dtype, args)
    keys = a.shape[3]
    return [
        unpad(d_a, keys),
        *(t.sum(1) for t in d_queries),
        *(unpad(t, keys) for t in d_keys),
    ]


def _check_operands(
    a: Tensor,
    head_of_output: Tensor,
    heads_per_group: int,
    factors: list[Tensor],
    grad: Tensor | None,
) -> None:
    """Raise ValueError for tensors that do not fit each other, or heads out of range."""
    if a.is_cpu:
        CHECKS.check(a, head_of_output, *factors, grad)
        check_indices("head_mixing", "head_of_output", head_of_output, a.shape[1])
    else:  # indices are not read, because the host would wait
        GPU_CHECKS.check(a, head_of_output, *factors, grad)
    heads = a.shape[1]
    num_output_heads = len(head_of_output)
    if (
        heads_per_group < 1
        or heads % heads_per_group
        or (heads_per_group < heads > num_output_heads)
    ):
        fact = (
            f"{heads} heads and {num_output_heads} output heads are mixed in groups of "
            f"{heads_per_group}"
        )
        refuse_operands(
            "head_mixing", fact, "give a divisor of the heads, and an output for each head"
        )


def _make_args(
    a: Tensor, head_of_output: Tensor, heads_per_group: int, factors: list[Tensor]
) -> HeadMixingArgs:
    """Return the kernel arguments of a call, without the tensors that the kernel writes; keys are
    padded.
    """
    qs, qt, qg = (t.contiguous() for t in factors[:3])
    a, ks, kt, kg = map(pad_to_simd, (a, *factors[3:]))
    (batch, heads, queries, keys) = a.shape
    num_output_heads = head_of_output.shape[0]
    q_ranks = qs.shape[2]
    k_ranks = ks.shape[1]
    return HeadMixingArgs.make(
        num_items=batch * -(-keys // KEY_TILE_SIZE),
        scratch_bytes=head_mixing_scratch_size(heads, num_output_heads, q_ranks, k_ranks)
        * a.itemsize,
        q_source=qs,
        q_target=qt,
        q_gate=qg,
        k_source=ks,
        k_target=kt,
        k_gate=kg,
        input=a,
        head_of_output=head_of_output.contiguous(),
        num_heads=heads,
        num_output_heads=num_output_heads,
        num_queries=queries,
        num_keys=keys,
        q_ranks=q_ranks,
        k_ranks=k_ranks,
        num_key_gates=kg.shape[1] * num_output_heads,
        heads_per_group=heads_per_group,
    )


@mix_heads_by_factors.register_kernel("cuda")
def _(a: Tensor, head_of_output: Tensor, heads_per_group: int, factors: list[Tensor]) -> Tensor:
    _check_operands(a, head_of_output, heads_per_group, factors, None)
    return head_mixing_triton.mix_heads(a, head_of_output, heads_per_group, factors)


@mix_heads_by_factors_backward.register_kernel("cuda")
def _(
    grad: Tensor, a: Tensor, head_of_output: Tensor, heads_per_group: int, factors: list[Tensor]
) -> list[Tensor]:
    _check_operands(a, head_of_output, heads_per_group, factors, grad)
    return head_mixing_triton.mix_heads_backward(grad, a, head_of_output, heads_per_group, factors)


def can_mix(a: Tensor, rank: int) -> bool:
    """Return True if a kernel of this device mixes these heads by factors of this rank."""
    if a.is_cpu:
        return HEAD_MIXING_KERNELS.can_run(a)
    return head_mixing_triton.can_mix(a, rank) and not is_under_functorch()


@mix_heads_by_factors.register_fake
def _(a: Tensor, head_of_output: Tensor, heads_per_group: int, factors: list[Tensor]) -> Tensor:
    return a.new_empty(a.shape[0], head_of_output.shape[0], *a.shape[2:])


@mix_heads_by_factors_backward.register_fake
def _(
    grad: Tensor, a: Tensor, head_of_output: Tensor, heads_per_group: int, factors: list[Tensor]
) -> list[Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (a, *factors)]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, head_of_output, ctx.heads_per_group, factors = inputs
    ctx.save_for_backward(a, head_of_output, *factors)


def _head_mixing_autograd_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    forbid_double_backward(NO_DOUBLE_BACKWARD_REMEDY)
    a, head_of_output, *factors = ctx.saved_tensors
    d_a, *d_factors = mix_heads_by_factors_backward(
        grad, a, head_of_output, ctx.heads_per_group, factors
    )
    return d_a, None, None, d_factors


mix_heads_by_factors.register_autograd(
    _head_mixing_autograd_backward, setup_context=_save_for_backward
)


@register_flop_formula(torch.ops.headwise.head_mixing)
def _head_mixing_flops(
    a: Any, head_of_output: Any, heads_per_group: int, factors: Any, **kwargs: Any
) -> int:
    batch, heads, queries, keys = a
    return (
        2 * batch * queries * keys * (factors[0][2] + factors[3][1]) * (heads + head_of_output[0])
    )


@register_flop_formula(torch.ops.headwise.head_mixing_backward)
def _head_mixing_backward_flops(
    grad: Any, a: Any, head_of_output: Any, heads_per_group: int, factors: Any, **kwargs: Any
) -> int:
    """Count the recomputed rank products, and two gradients for each product with factors."""
    batch, heads, queries, keys = a
    return (
        2
        * batch
        * queries
        * keys
        * (factors[0][2] + factors[3][1])
        * (3 * heads + 2 * head_of_output[0])
    )
