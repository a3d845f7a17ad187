"""Checks for what the kernels do not support: double backward, forward-mode derivatives and
torch.func transforms.

They also detect when no part of torch (autograd, torch.compile, modes, profiler) observes a call,
so that the dispatcher can be skipped.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._C._autograd import _profiler_enabled
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

PLAIN_TENSOR_TYPES = (
    Tensor,
    nn.Parameter,
)  # subclasses may override operations through __torch_function__
NO_DOUBLE_BACKWARD_REMEDY = "leave out create_graph, or build the layer with backend='dense'"


def is_under_functorch() -> bool:
    """Return True inside a torch.func transform or at a forward-mode level; plain torch operations
    must be used there.

    >>> (
    ...     is_under_functorch(),
    ...     torch.func.grad(lambda x: x * is_under_functorch())(torch.tensor(2.0)).item(),
    ... )
    (False, 1.0)
    """
    return not torch.compiler.is_compiling() and _has_transform()


def _has_transform() -> bool:
    # Both are private; torch has no public equivalent.
    return forward_ad._current_level >= 0 or peek_interpreter_stack() is not None


def can_skip_dispatcher(*tensors: Tensor) -> bool:
    """Return True if autograd, torch.compile, transforms, modes, tracing and the profiler are all
    off.

    The tensors must also be plain CPU tensors whose memory holds their numbers: the dispatcher
    resolves the negative bit, and allocates tensors of zeros without memory. The function behind a
    custom operation can then be called directly. Dispatching to an operation that is written in
    Python takes longer than a small operation itself, and longer still after a large read from
    memory.

    >>> can_skip_dispatcher(torch.ones(1))
    False
    >>> with torch.no_grad():
    ...     can_skip_dispatcher(torch.ones(1))
    True
    """
    return not (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or _has_transform()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._is_tracing()
        or _profiler_enabled()
    ) and all(
        type(t) in PLAIN_TENSOR_TYPES and t.is_cpu and not (t.is_neg() or t._is_zerotensor())
        for t in tensors
    )


def forbid_double_backward(remedy: str) -> None:
    """Raise RuntimeError in a backward pass that runs with create_graph=True; the message ends with
    `remedy`.

    torch's `once_differentiable` raises only if the second backward pass reaches the function. A
    second pass that is restricted to some inputs can go around it, and would then silently leave
    out a part of the gradient.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling() and not _has_transform():
        raise RuntimeError(
            "cannot differentiate this gradient again (create_graph=True): its kernel has no "
            f"double backward; {remedy}"
        )
