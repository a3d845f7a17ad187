"""Linear layers, by torch or, where it was measured to be faster and no gradient is needed, by
headwise's kernel.

With few tokens, as in a decode step, a product takes as long as reading its weights from memory.
torch's product reaches a third of the memory bandwidth (bfloat16, 2 cores). With many tokens the
kernel wins on processors that torch's matrix library was not tuned for (float32 on AMD). It reads
the weights in their usual layout, so nothing has to be repacked when they change.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .autograd_guards import is_under_functorch
from .launch import SIMD_WIDTH
from .small_batch_ops import GEMV_DTYPES, GEMV_KERNELS, multiply_small_batch
from .takeover_points import takeover_size

# Take-over points: bytes of weights from which the kernel is faster than torch's product, for one
# token and for several, and tokens up to which it is.
GEMV_POINTS = {
    name: (f"gemv_{label}", f"gemm_{label}", f"gemm_tokens_{label}")
    for name, label in GEMV_DTYPES.items()
}
PLAIN_TENSOR_TYPES = (Tensor, nn.Parameter)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b for x [..., K] and W [N, K], as `torch.nn.functional.linear`.

    >>> linear(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])).item()
    11.0
    """
    if bias is None and uses_gemv_kernel(x, (weight,)):
        return multiply_small_batch(x.reshape(-1, x.shape[-1]), [weight]).view(
            *x.shape[:-1], weight.shape[0]
        )
    return F.linear(x, weight, bias)


def linear_many(x: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """x W^T for each of several weight matrices, in one kernel call or one product if that is
    faster.

    >>> [
    ...     y.item()
    ...     for y in linear_many(
    ...         torch.tensor([[1.0, 2.0]]), [torch.tensor([[3.0, 4.0]]), torch.ones(1, 2)]
    ...     )
    ... ]
    [11.0, 3.0]
    """
    rows = [weight.shape[0] for weight in weights]
    if uses_gemv_kernel(x, weights):
        return (
            multiply_small_batch(x.reshape(-1, x.shape[-1]), list(weights))
            .view(*x.shape[:-1], -1)
            .split(rows, -1)
        )
    if should_concatenate(x, weights):
        return F.linear(x, torch.cat(list(weights))).split(rows, -1)
    return [F.linear(x, weight) for weight in weights]


def should_concatenate(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether one product with the concatenated matrices is faster, although every call
    concatenates them.

    It is in mixed-precision training on a CPU, because autocast copies every matrix anyway; in
    float32 it is not.
    """
    return (
        torch.is_grad_enabled()
        and x.device.type == "cpu"
        and torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and all(type(w) in PLAIN_TENSOR_TYPES and w.requires_grad for w in weights)
    )


def uses_gemv_kernel(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether the kernel runs this product: sizes at which it is faster on this class of machine,
    and no gradient.
    """
    if torch.is_grad_enabled() or x.dtype not in GEMV_POINTS:
        return False
    one_token, several_tokens, most_tokens = GEMV_POINTS[x.dtype]
    width = x.shape[-1]
    least_bytes = takeover_size(one_token if x.numel() == width else several_tokens)
    if sum([w.numel() for w in weights]) * x.dtype.itemsize < least_bytes:
        return False
    return (
        0 < x.numel() <= takeover_size(most_tokens) * width
        and x.device.type == "cpu"
        and type(x) is Tensor
        and width % SIMD_WIDTH == 0
        and all(
            type(w) in PLAIN_TENSOR_TYPES and w.dtype == x.dtype and w.is_contiguous()
            for w in weights
        )
        and all(w.is_cpu and w.shape[1] == width for w in weights)
        and not torch.is_autocast_enabled("cpu")
        and not is_under_functorch()
        and GEMV_KERNELS.is_usable(x.dtype)
    )
