"""What kernels do not follow: gradients of gradients, derivatives forward, and functions that are transformed."""

from __future__ import annotations

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

PLAIN = "do without, or make the layer with backend='dense'"


def transformed() -> bool:
    """Whether torch.func, or a derivative forward, is at work: there plain operations are asked, which torch sees.

    >>> transformed(), torch.func.grad(lambda x: x * transformed())(torch.tensor(2.0)).item()
    (False, 1.0)
    """
    return not torch.compiler.is_compiling() and _followed()


def _followed() -> bool:
    # Neither is public, and nothing public says as much.
    return forward_ad._current_level >= 0 or peek_interpreter_stack() is not None


def check_once(remedy: str) -> None:
    """On the way back, refuse a gradient that is to be differentiated again.

    torch's `once_differentiable` says so only to a second pass that comes by: one that is asked for some tensors alone
    goes around, and leaves out in silence what it would have added.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling() and not _followed():
        raise RuntimeError(f"create_graph=True asks for a gradient of this gradient, which has none; {remedy}")
