"""What kernels do not follow: gradients of gradients, derivatives forward, and functions that are transformed; and
whether anybody follows them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._C._autograd import _profiler_enabled
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

PLAIN_TENSOR_TYPES = (Tensor, nn.Parameter)  # without a mind of their own
NO_DOUBLE_BACKWARD_REMEDY = "do without, or make the layer with backend='dense'"


def is_under_functorch() -> bool:
    """Whether torch.func, or a derivative forward, is at work: there plain operations are asked, which torch sees.

    >>> is_under_functorch(), torch.func.grad(lambda x: x * is_under_functorch())(torch.tensor(2.0)).item()
    (False, 1.0)
    """
    return not torch.compiler.is_compiling() and _has_transform()


def _has_transform() -> bool:
    # Neither is public, and nothing public says as much.
    return forward_ad._current_level >= 0 or peek_interpreter_stack() is not None


def can_skip_dispatcher(*given: Tensor) -> bool:
    """Whether nobody follows what is done with these: no gradient, no graph, no transformation, no mode, no profiler.

    Then the function behind an operation can be called itself. The way into an operation that is written in Python
    takes longer than a small one does, and more so where much was read just before.

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
    ) and all(type(t) in PLAIN_TENSOR_TYPES and t.is_cpu for t in given)


def forbid_double_backward(remedy: str) -> None:
    """On the way back, refuse a gradient that is to be differentiated again.

    torch's `once_differentiable` says so only to a second pass that comes by: one that is asked for some tensors alone
    goes around, and leaves out in silence what it would have added.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling() and not _has_transform():
        raise RuntimeError(f"create_graph=True asks for a gradient of this gradient, which has none; {remedy}")
